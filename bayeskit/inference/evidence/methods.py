"""The registry of methods: what each is called, what it needs and to what it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from bayeskit.core.inputs import unknown_name
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.bridge import bridge_sampling, warp_bridge_sampling
from bayeskit.inference.evidence.checks import NO_PRIOR_DRAWS
from bayeskit.inference.evidence.chibs_method import chib
from bayeskit.inference.evidence.chibs_method import chib_refusal as chib_refuses
from bayeskit.inference.evidence.flows import flow_importance_sampling, learned_harmonic_mean
from bayeskit.inference.evidence.ladder import (
    generalised_stepping_stone,
    modified_path_sampling,
    path_sampling,
    stepping_stone,
    thermodynamic_integration,
)
from bayeskit.inference.evidence.laplace_approximation import (
    laplace,
    laplace_importance_sampling,
    maximum_likelihood,
    maximum_posterior,
)
from bayeskit.inference.evidence.laplus import (
    PositiveDensity,
    beta_prime_laplus,
    gamma_laplus,
    gamma_laplus_importance_sampling,
    lognormal_laplus,
)
from bayeskit.inference.evidence.likelihood_weights import harmonic_mean, naive_monte_carlo, stabilised_harmonic_mean
from bayeskit.inference.evidence.material import Budget, Material
from bayeskit.inference.evidence.nested_evidence import nested_sampling
from bayeskit.inference.evidence.predictive import conditional_predictive_ordinates, pointwise_predictive_density
from bayeskit.inference.evidence.predictive import scores_refusal as predictive_refuses
from bayeskit.inference.evidence.prequential_evidence import prequential
from bayeskit.inference.evidence.prequential_evidence import prequential_refusal as prequential_refuses
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.sequential import adaptive_smc, smc
from bayeskit.inference.evidence.variational import evidence_lower_bound, variational_importance_sampling
from bayeskit.inference.samplers import sample_nested, sample_smc
from bayeskit.inference.samplers.driver import obey
from bayeskit.logdensity.target import Target

if TYPE_CHECKING:
    from bayeskit.inference.evidence.result import PredictiveScore

__all__ = ["Estimate", "Kind", "METHODS", "Method", "Refusal", "select"]


Estimate = Callable[[Target, Material, int], "Evidence | PredictiveScore"]
Refusal = Callable[[Target, Material], "str | None"]
#: "consistent": the estimate tends to the log evidence with more draws, and its error is one; "unstable": so it does,
#: but no error of it can be relied on; "approximation": it has a bias that more draws do not mend; "bound": it lies
#: below; "score": another thing.
Kind = Literal["consistent", "unstable", "approximation", "bound", "score"]


@dataclass(frozen=True)
class Method:
    """One way to compute a marginal likelihood.

    Attributes
    ----------
    name : str
        The name of its function.
    needs : frozenset of str
        Parts of :class:`Material` that it works on, and "prior" where it draws from the prior.
    estimate : callable
        ``(target, material, seed) -> Evidence``, or a predictive score.
    kind : {"consistent", "unstable", "approximation", "bound", "score"}
    refuses : callable, optional
        ``(target, material)``, the reason why the method does not apply, or None.
    """

    name: str
    needs: frozenset[str]
    estimate: Estimate
    kind: Kind = "consistent"
    refuses: Refusal | None = None

    @property
    def source(self) -> str:
        """The draws or the search that its estimate rests on; a method with a run of its own is its own source."""
        return next(
            (part for part in ("posterior", "ladder", "mode", "positive mode", "mean field") if part in self.needs),
            self.name,
        )

    def refusal(self, target: Target, material: Material) -> str | None:
        """Return the reason why the method does not apply to a target, or None."""
        if self.kind != "score" and material.improper is not None:
            return material.improper
        if self.needs & {"prior", "ladder"} and not target.can_sample_prior:
            return NO_PRIOR_DRAWS
        return None if self.refuses is None else self.refuses(target, material)


def _not_positive(target: Target, material: Material) -> str | None:
    try:
        PositiveDensity(target)
    except SettingsError as error:
        return str(error)
    return None


def _alone(function: Callable[..., Any]) -> Estimate:
    return lambda target, material, seed: function(target, seed=seed)


def _posterior(function: Callable[..., Any]) -> Estimate:
    return lambda target, material, seed: function(target, material.draws, seed=seed)


def _tempered(function: Callable[..., Any]) -> Estimate:
    return lambda target, material, seed: function(target, material.ladder)


def _checked(function: Callable[..., Any], **parts: str) -> Estimate:
    """Return an estimator that checks itself against posterior draws where the caller gave some."""

    def estimate(target: Target, material: Material, seed: int) -> Evidence:
        shared = {argument: material.part(part) for argument, part in parts.items()}
        # Not against draws that another method needed: the answer must not depend on the other methods of a call.
        return function(target, draws=material.given_draws, seed=seed, **shared)

    return estimate


def _at_the_mode(function: Callable[..., Any]) -> Estimate:
    return _checked(function, mode="mode")


def _positive(function: Callable[..., Any]) -> Estimate:
    return lambda target, material, seed: function(target, mode=material.positive_mode, seed=seed)


def _flow(function: Callable[..., Any]) -> Estimate:
    return lambda target, material, seed: function(target, material.draws, flow=material.flow, seed=seed)


def _bound(target: Target, material: Material, seed: int) -> Evidence:
    return evidence_lower_bound(target, mean_field=material.mean_field, seed=seed)


def _generalised(target: Target, material: Material, seed: int) -> Evidence:
    spend = material.budget
    return generalised_stepping_stone(
        target,
        material.draws,
        num_temperatures=spend.num_reference_temperatures,
        num_chains=spend.ladder_chains,
        num_warmup=spend.ladder_warmup,
        num_samples=spend.ladder_samples,
        seed=seed,
        progress=material.progress,
        checkpoint=material.file("reference"),
    )


def _refined(target: Target, material: Material, seed: int) -> Evidence:
    spend = material.budget
    return thermodynamic_integration(
        target,
        ladder=material.ladder,
        num_chains=spend.ladder_chains,
        num_warmup=spend.ladder_warmup,
        num_samples=spend.ladder_samples,
        seed=seed,
        progress=material.progress,
        checkpoint=material.file("refined"),
    )


def _smc(target: Target, material: Material, seed: int) -> Evidence:
    spend = material.budget
    run = sample_smc(
        target,
        spend.num_particles,
        spend.num_replicates,
        seed,
        checkpoint=material.file("smc"),
        progress=material.progress,
    )
    obey(run.ending)
    # A resumed run has taken longer than its last part.
    return replace(smc(target, run, seed=seed), seconds=run.draws.seconds)


def _populations(spend: Budget) -> dict[str, Any]:
    """Fewer and larger populations: what each adapts to itself, or weighs by, is a bias of its own."""
    return {"num_particles": 2 * spend.num_particles, "num_replicates": max(16, spend.num_replicates // 2)}


def _adaptive(target: Target, material: Material, seed: int) -> Evidence:
    return adaptive_smc(
        target,
        **_populations(material.budget),
        seed=seed,
        checkpoint=material.file("adaptive"),
        progress=material.progress,
    )


def _prequential(target: Target, material: Material, seed: int) -> Evidence:
    return prequential(target, **_populations(material.budget), seed=seed, progress=material.progress)


def _nested(target: Target, material: Material, seed: int) -> Evidence:
    run = sample_nested(
        target,
        material.budget.num_live,
        seed,
        termination=material.budget.termination,
        checkpoint=material.file("nested"),
        progress=material.progress,
    )
    obey(run.ending)
    return nested_sampling(target, run, seed=seed)


def _chib(target: Target, material: Material, seed: int) -> Evidence:
    return chib(target, material.blocks or None, seed=seed, progress=material.progress)


def _scored(function: Callable[[Target], str | None]) -> Refusal:
    return lambda target, material: function(target)


def _row(
    name: str, needs: str, estimate: Estimate, kind: Kind = "consistent", refuses: Refusal | None = None
) -> Method:
    return Method(name, frozenset(part.strip() for part in needs.split(",") if part.strip()), estimate, kind, refuses)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _row("maximum_likelihood", "mode", _at_the_mode(maximum_likelihood), "approximation"),
        _row("maximum_posterior", "mode", _at_the_mode(maximum_posterior), "approximation"),
        _row("laplace", "mode", _at_the_mode(laplace), "approximation"),
        _row("gamma_laplus", "positive mode", _positive(gamma_laplus), "approximation", _not_positive),
        _row("beta_prime_laplus", "positive mode", _positive(beta_prime_laplus), "approximation", _not_positive),
        _row("lognormal_laplus", "positive mode", _positive(lognormal_laplus), "approximation", _not_positive),
        _row("evidence_lower_bound", "mean field", _bound, "bound"),
        _row("naive_monte_carlo", "prior", _alone(naive_monte_carlo)),
        _row(
            "gamma_laplus_importance_sampling",
            "positive mode",
            _positive(gamma_laplus_importance_sampling),
            refuses=_not_positive,
        ),
        _row("laplace_importance_sampling", "mode", _at_the_mode(laplace_importance_sampling)),
        _row(
            "variational_importance_sampling",
            "mean field",
            _checked(variational_importance_sampling, mean_field="mean field"),
        ),
        _row("harmonic_mean", "posterior", _posterior(harmonic_mean), "unstable"),
        _row("stabilised_harmonic_mean", "posterior", _posterior(stabilised_harmonic_mean), "unstable"),
        _row("bridge_sampling", "posterior", _posterior(bridge_sampling)),
        _row("warp_bridge_sampling", "posterior", _posterior(warp_bridge_sampling)),
        _row("learned_harmonic_mean", "posterior, flow", _flow(learned_harmonic_mean)),
        _row("flow_importance_sampling", "posterior, flow", _flow(flow_importance_sampling)),
        _row("generalised_stepping_stone", "posterior", _generalised),
        # The gap of its trapezoids stays with however many draws.
        _row("path_sampling", "ladder", _tempered(path_sampling), "approximation"),
        _row("modified_path_sampling", "ladder", _tempered(modified_path_sampling)),
        _row("thermodynamic_integration", "ladder", _refined),
        _row("stepping_stone", "ladder", _tempered(stepping_stone)),
        _row("smc", "prior", _smc),
        _row("adaptive_smc", "prior", _adaptive),
        _row("nested_sampling", "prior", _nested),
        _row("prequential", "prior", _prequential, refuses=_scored(prequential_refuses)),
        _row("chib", "", _chib, refuses=lambda target, material: chib_refuses(target, material.blocks)),
        _row(
            "conditional_predictive_ordinates",
            "posterior",
            _posterior(conditional_predictive_ordinates),
            "score",
            _scored(predictive_refuses),
        ),
        _row(
            "pointwise_predictive_density",
            "posterior",
            _posterior(pointwise_predictive_density),
            "score",
            _scored(predictive_refuses),
        ),
    )
}


def select(methods: str | Sequence[str]) -> list[Method]:
    """Return the methods of these names, in registry order; ``"all"`` means every one.

    Raises
    ------
    UnknownNameError
        For a name that is not registered; the message suggests the nearest.

    Examples
    --------
    >>> [m.name for m in select(["stepping_stone", "bridge_sampling"])]
    ['bridge_sampling', 'stepping_stone']
    """
    if methods == "all":
        return list(METHODS.values())
    names = [methods] if isinstance(methods, str) else list(methods) if isinstance(methods, Iterable) else [methods]
    for name in names:
        if name not in METHODS:
            raise unknown_name("evidence method", name, METHODS)
    return [method for name, method in METHODS.items() if name in names]
