"""Prequential evidence: the sum of log predictive densities of each observation given those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeskit.core.evaluation import Evaluator
from bayeskit.core.inputs import real_number, whole_number
from bayeskit.core.progress import progress_bar
from bayeskit.core.randomness import new_generator, one_thread
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.evidence.decorator import estimator
from bayeskit.inference.evidence.judging.belonging import NO_PRIOR_DRAWS
from bayeskit.inference.evidence.judging.diagnostics import Diagnostics, from_draws
from bayeskit.inference.evidence.methods import Part, Parts
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.sequential import (
    average,
    crossed_metrics,
    fewer_and_larger,
    finished_run,
    next_step,
)
from bayeskit.inference.samplers.smc import (
    PLANNED_CALLS,
    PopulationMoves,
    SMCInfo,
    SMCState,
    count_distinct,
    first_step_size,
    resample,
    start_populations,
)
from bayeskit.inference.samplers.weighted_particles import effective_share, reweighted
from bayeskit.logdensity.combinators import Weighted
from bayeskit.logdensity.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PrequentialEvidence", "prequential", "prequential_refusal"]


_MOVE_BELOW = 0.5
_PROBES = 4
#: Largest number of log likelihoods, of each observation at each particle, in a comparison: 128 MiB.
_MOST_TERMS = 2**24
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass(frozen=True, repr=False)
class PrequentialEvidence(Evidence):
    """An :class:`Evidence` with its terms, one per observation.

    Attributes
    ----------
    predictives : Tensor
        Log density of each observation given those before it, in their order, ``(n,)``.
    predictive_errors : Tensor
        Monte Carlo standard errors of ``predictives``, ``(n,)``.
    start : float
        Log density of the observations of other sites that precede them; zero without any.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence.prequential_evidence import PrequentialEvidence
    >>> z = PrequentialEvidence("prequential", -3.0, 0.1, 1000, predictives=torch.tensor([-1.0, -2.0]))
    >>> z.cumulative
    tensor([-1., -3.])
    """

    predictives: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    predictive_errors: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    start: float = 0.0

    @property
    def cumulative(self) -> Tensor:
        """Log evidence of the first ``1, ..., n`` observations, ``(n,)``."""
        return self.start + self.predictives.cumsum(0)

    def plot(self, ax: Axes | None = None, *, label: str = "") -> Axes:
        """Plot the log evidence against the number of observations.

        Parameters
        ----------
        ax : Axes, optional
            Axes to draw on; by default a new figure of ``pyplot``. Curves of several models on the same axes show after
            which observation one model predicts better.
        label : str, default ""
        """
        from bayeskit.core.plots import CHAIN_COLOURS

        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        seen = torch.arange(1, len(self.predictives) + 1).numpy()
        colour = CHAIN_COLOURS[len(ax.lines) % len(CHAIN_COLOURS)]
        ax.plot(seen, self.cumulative.cpu().numpy(), color=colour, linewidth=1.4, label=label or None)
        ax.set_xlabel("observations seen")
        ax.set_ylabel("cumulative log score (nats)")
        if label:
            ax.legend(frameon=False)
        return ax


def _compared(target: Target, parts: Parts, seed: int) -> Evidence:
    return prequential(target, **fewer_and_larger(parts.budget.smc), seed=seed, progress=parts.progress)


@estimator(Part.PRIOR, refuses=lambda target, parts: _refusal(target, parts), by=_compared)
def prequential(
    target: Target,
    *,
    site: str | None = None,
    order: Tensor | None = None,
    num_particles: int = 128,
    num_replicates: int = 16,
    ess_threshold: float = 0.8,
    seed: int = 0,
    progress: bool = True,
) -> PrequentialEvidence:
    r"""Estimate the log evidence as a sum of log predictive densities, in any order of the observations.

    .. math:: \log p(y) = \sum_{i=1}^n \log p(y_i \mid y_1, \dots, y_{i-1})

    Independent populations of particles start in the prior and process one observation after another: the weights are
    multiplied by its likelihood, in tempered steps if needed, and uneven weights trigger resampling and moves.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior and a pointwise log likelihood that adds up to the log likelihood.
    site : str, optional
        Observed site whose observations are processed one by one, after those of all other sites. By default all sites
        in model order.
    order : Tensor, optional
        Order of the observations, a permutation ``(n,)``.
    num_particles : int, default 128
        Per population.
    num_replicates : int, default 16
        Number of independent populations, whose variance gives the standard error.
    ess_threshold : float in (0, 1), default 0.8
        Conditional effective share of all particles after each step.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    PrequentialEvidence
        Estimate with its terms and their plot.

    Raises
    ------
    ModelError
        If there is no pointwise log likelihood, or it does not add up to the log likelihood.
    SettingsError
        If a setting lies outside its domain, there is no such site, or the target cannot draw from its prior.
    ShapeError
        If ``order`` is not a permutation.
    InitializationError
        If the likelihood is zero at all prior draws.

    References
    ----------
    Dawid, A. P. (1984). Statistical theory: the prequential approach. Journal of the Royal Statistical Society A 147,
    278-292.
    Chopin, N. (2002). A sequential particle filter method for static models. Biometrika 89, 539-552.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence.prequential_evidence import prequential
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> z = prequential(bk.Target.from_pyro(model, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)))
    >>> abs(z.log_evidence - torch.tensor(1 / 20).log().item()) < 4 * z.standard_error, z.trusted
    (True, True)
    >>> exact = torch.tensor([1 / 2, 2 / 3, 1 / 4, 3 / 5], dtype=torch.float64)
    >>> torch.allclose(z.predictives.exp(), exact, atol=0.05)
    True
    """
    num_particles = whole_number("num_particles", num_particles, 8)
    num_replicates = whole_number("num_replicates", num_replicates, 2)
    ess_threshold = real_number("ess_threshold", ess_threshold, "(0, 1)")
    seed = whole_number("seed", seed)
    generator = new_generator(seed, target.device, stream="prequential")
    with one_thread(), torch.no_grad():
        data = _Data(target, site)
        come = _as_order(order, data)
        populations = _Populations(
            data, start_populations(target, num_replicates, num_particles, generator), ess_threshold
        )
        with progress_bar("prequential", len(come), progress) as bar:
            for done, datum in enumerate(come):
                populations.take_in(datum, generator)
                bar.update(done + 1)
    info = SMCInfo(*(torch.stack(column, 1) for column in zip(*populations.stages, strict=True)))
    settings = {"sampler": "prequential", "seed": seed, "ending": "finished"}
    final = populations.particles._replace(log_likelihood=populations.log_likelihood().to(target.dtype))
    run = finished_run(target, final, info, populations.step_size, populations.num_evaluations, settings)
    run = replace(run, correlation=torch.stack(populations.correlations) if populations.correlations else None)
    whole = Diagnostics(target).judge(from_draws(average(target, run, "prequential"), run.draws))
    increments = torch.stack(populations.increments, 1)  # (r, n)
    # Averages of evidence estimates, not of their logs, which would be biased.
    curve = increments.cumsum(1).logsumexp(0) - math.log(num_replicates)
    each = curve.diff(prepend=curve.new_zeros(1))
    errors = increments.std(0) / math.sqrt(num_replicates)
    first = int(data.has_start)
    return PrequentialEvidence(
        **vars(whole),
        predictives=each[first:],
        predictive_errors=errors[first:],
        start=float(each[0]) if first else 0.0,
    )


def prequential_refusal(target: Target) -> str | None:
    """Return the reason why the prequential identity does not apply to a target, or None if it does."""
    if not target.can_sample_prior:
        return NO_PRIOR_DRAWS
    try:
        _Data(target, None)
    except ModelError as error:
        return str(error)
    return None


def _refusal(target: Target, parts: Parts) -> str | None:
    """Return the reason why a comparison leaves the method out."""
    if (reason := prequential_refusal(target)) is not None:
        return reason
    num_data, sizes = _Data(target, None).num_data, fewer_and_larger(parts.budget.smc)
    num_particles = sizes["num_particles"] * sizes["num_replicates"]
    if num_data * num_particles <= _MOST_TERMS:
        return None
    return (
        f"{num_data} observations one by one, each with its log likelihood at {num_particles} particles, take more "
        "time and memory than all other methods; call prequential(target, num_particles=...) by itself"
    )


class _Data:
    """The observations of a target, which count as often as weights say."""

    def __init__(self, target: Target, site: str | None) -> None:
        self.target, self.site = target, site
        generator = new_generator(0, stream="probes of the likelihood")
        probe = torch.randn(_PROBES, target.dim, generator=generator, dtype=torch.float64)
        probe = probe.to(target.device, target.dtype)
        pointwise = target.pointwise_log_likelihood(probe)
        if site is not None and site not in pointwise:
            raise SettingsError(f"there is no observed site {site!r}; there are: {', '.join(pointwise)}")
        self.has_start = site is not None and len(pointwise) > 1
        _check_sum(pointwise, target.log_likelihood(probe))
        self.num_data = self.each(target.density.pointwise(probe[0])).numel()
        self._weighted = Weighted(target, self.each, self.num_data)

    def each(self, pointwise: Mapping[str, Tensor]) -> Tensor:
        """Return the log likelihood of each observation, ``(n,)``; those of other sites are the first, as one."""
        if not self.has_start or self.site is None:
            return torch.cat([x.reshape(-1) for x in pointwise.values()])
        others = sum(x.sum() for name, x in pointwise.items() if name != self.site)
        return torch.cat([torch.as_tensor(others).reshape(1), pointwise[self.site].reshape(-1)])

    def at(self, position: Tensor) -> Tensor:
        """Return the log likelihood of each observation, ``(r, n, d) -> (r, n, data)``; what is no number is zero."""
        pointwise = self.target.pointwise_log_likelihood(position.flatten(0, 1))
        each = torch.func.vmap(self.each)(pointwise).to(torch.float64)
        each = each.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        return each.reshape(*position.shape[:2], -1)

    def seen(self, weights: Tensor, num_particles: int) -> Evaluator:
        """Return the evaluation of populations that have seen what ``weights (r, data)`` say."""
        return self._weighted.given(weights).evaluator(len(weights) * num_particles, PLANNED_CALLS)


class _Populations:
    """Particles that take in one observation after the other, and what has happened to them."""

    def __init__(self, data: _Data, particles: SMCState, ess_threshold: float) -> None:
        self._data, self._threshold, self._moves = data, ess_threshold, PopulationMoves()
        self.particles, self.step_size = particles, first_step_size(particles)
        self._pointwise = data.at(particles.position)
        like = {"dtype": torch.float64, "device": particles.position.device}
        self._weights = torch.zeros(len(particles.position), data.num_data, **like)  # type: ignore[call-overload]
        self.increments: list[Tensor] = []  # of each observation, (r,)
        self.stages: list[SMCInfo] = []
        self.correlations: list[Tensor] = []
        self.num_evaluations = 2 * particles.log_weight.numel()

    def take_in(self, datum: int, generator: torch.Generator) -> None:
        """Let one observation count."""
        r = len(self._weights)
        total = torch.zeros_like(self._weights[:, 0])
        while bool((self._weights[:, datum] < 1).any()):
            covered, log_ratio = self._weights[:, datum], self._pointwise[..., datum]
            reached = next_step(self.particles.log_weight, log_ratio, covered, self._threshold)
            log_weight, increment, left = reweighted(self.particles.log_weight, log_ratio, reached - covered)
            self.particles = self.particles._replace(log_weight=log_weight)
            self._weights = self._weights.index_copy(
                1, torch.tensor([datum], device=reached.device), reached.unsqueeze(1)
            )
            total = total + increment
            share = effective_share(self.particles.log_weight)
            accepted, diverging = torch.ones(2, r, dtype=torch.float64, device=total.device)
            if float(share.mean()) < _MOVE_BELOW:
                accepted, diverging = self._move(generator)
            ancestors = count_distinct(self.particles.ancestor.sort(-1).values)
            self.stages.append(SMCInfo(increment, left, share, accepted, diverging, ancestors))
        self.increments.append(total)

    def log_likelihood(self) -> Tensor:
        """Return the log likelihood of what has been seen, ``(r, n)``."""
        weights = self._weights.unsqueeze(1)
        return torch.where(weights > 0, weights * self._pointwise, 0.0).sum(-1)

    def _move(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Resample and move all particles; return how often they accepted and diverged."""
        dtype = self.particles.position.dtype
        particles = self.particles._replace(log_likelihood=self.log_likelihood().to(dtype))
        metric = crossed_metrics(particles)
        particles = resample(particles, generator)
        evaluate = self._data.seen(self._weights, particles.log_weight.shape[1])
        moved = self._moves.run(evaluate, particles, metric, self.step_size, generator)
        self.particles, self.step_size = moved.particles, moved.step_size
        self._pointwise = self._data.at(self.particles.position)
        self.correlations.append(moved.correlation)
        self.num_evaluations += moved.num_evaluations + particles.log_weight.numel()
        return moved.acceptance_rate.to(torch.float64), moved.diverging.to(torch.float64)


def _as_order(order: Any, data: _Data) -> list[int]:
    """Return which observation comes when, those of other sites first."""
    first = int(data.has_start)
    count = data.num_data - first
    if order is None:
        return list(range(data.num_data))
    try:
        chosen = torch.as_tensor(order)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"order must hold {count} whole numbers, a permutation of the observations, not {order!r}"
        ) from error
    if tuple(chosen.shape) != (count,) or sorted(chosen.tolist()) != list(range(count)):
        raise ShapeError(f"order must be a permutation of the {count} observations, not of shape {tuple(chosen.shape)}")
    return [*range(first), *(int(i) + first for i in chosen)]


def _check_sum(pointwise: Mapping[str, Tensor], whole: Tensor) -> None:
    total = torch.stack([x.reshape(len(x), -1).sum(1) for x in pointwise.values()]).sum(0)
    off = (total - whole).abs() > _TOLERANCE[whole.dtype] * (1 + whole.abs())
    if bool((off & total.isfinite() & whole.isfinite()).any()):
        raise ModelError(
            f"the log likelihoods of the observations of {', '.join(map(repr, pointwise))} do not add up to the whole, "
            "so they cannot be predicted one by one; put each part of the likelihood in its own site"
        )
