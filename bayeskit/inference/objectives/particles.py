"""Particles: log weights of a guide's draws under a model, for every datum.

Every multi-sample objective is a pure function of what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bayeskit.errors import GuideError
from bayeskit.inference.objectives.layout import Layout
from bayeskit.inference.objectives.sites import Site


@dataclass
class Particles:
    """What one run of guide and model gives for each of ``K`` particles of each datum.

    Attributes
    ----------
    log_likelihood : Tensor
        Log density of observed sites and factors, ``(K, *batch)``.
    log_prior, log_guide : dict of Tensor
        Log density of each latent site under model and guide, ``(K, *batch)``; of sites in ``kl`` only where a score
        needs it.
    log_score : Tensor or None
        Log density under the guide of those sites whose draws carry no gradient, to be used in score-function
        terms; None if there are none.
    kl : dict of Tensor
        Kullback-Leibler divergence of guide from model in closed form, ``(K, *batch)``, of those latent sites that
        have one, if it was asked for.
    scale : float
        How many items of the whole data each datum stands for, from subsampling.
    layout : Layout
    model_sites, guide_sites : dict
        The sites themselves.
    in_expectation : str or None
        Name of a site that the guide enumerates. All terms are then expectations over such sites, which may be
        added up but make no weights.
    """

    log_likelihood: Tensor
    log_prior: dict[str, Tensor]
    log_guide: dict[str, Tensor]
    log_score: Tensor | None
    kl: dict[str, Tensor]
    scale: float
    layout: Layout
    model_sites: dict[str, Site] = field(repr=False)
    guide_sites: dict[str, Site] = field(repr=False)
    in_expectation: str | None = None
    finite: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by site, where the sites are not kept
    in_sum: str | None = None  # a latent site whose prior is part of a sum over the model's enumerated sites

    @property
    def log_model(self) -> Tensor:
        """Log joint density, ``(K, *batch)``."""
        return sum(self.log_prior.values(), self.log_likelihood)

    @property
    def log_guide_total(self) -> Tensor:
        """Log density of the guide, ``(K, *batch)``."""
        return sum(self.log_guide.values(), torch.zeros_like(self.log_likelihood))

    @property
    def log_weight(self) -> Tensor:
        """Log joint density less log density of the guide, ``(K, *batch)``.

        Raises
        ------
        GuideError
            If the guide enumerates a site.
        RuntimeError
            If closed forms took the place of log densities.
        """
        if self.kl:
            raise RuntimeError("log weights need particles drawn without analytic_kl")
        if self.in_expectation is not None:
            raise GuideError(
                f"site {self.in_expectation!r} is enumerated in the guide, or drawn as weighted points, but this "
                "objective weighs draws; take the mark out of the guide (infer['enumerate'] or infer['gradient']), or "
                "use ELBO"
            )
        return self.log_model - self.log_guide_total

    def require_divergences(self, objective: str) -> None:
        """Refuse guide sites whose prior is part of a sum over enumerated sites of the model: they have none."""
        if self.in_sum is not None:
            raise GuideError(
                f"{objective} weighs the divergence of each latent site, but the prior of {self.in_sum!r} depends on a "
                "site that the model sums out, so that it has no term of its own; enumerate that site in the guide, or "
                "use ELBO without weights, or IWAE"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that carries a gradient, in a fixed order."""
        score = () if self.log_score is None else (self.log_score,)
        return (self.log_likelihood, *score, *self.log_prior.values(), *self.log_guide.values(), *self.kl.values())

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Particles:
        """Return the same particles with :meth:`tensors` replaced."""
        rest = iter(tensors)

        def next_of(terms: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: next(rest) for name in terms}

        likelihood = next(rest)
        score = None if self.log_score is None else next(rest)
        prior, guide, kl = next_of(self.log_prior), next_of(self.log_guide), next_of(self.kl)
        return replace(self, log_likelihood=likelihood, log_score=score, log_prior=prior, log_guide=guide, kl=kl)

    def without_sites(self) -> Particles:
        """Return the same particles without the graph that made them."""
        bare = self.with_tensors(tuple(t.detach() for t in self.tensors()))
        return replace(bare, model_sites={}, guide_sites={}, finite=self.finite_by_site())

    def finite_by_site(self) -> dict[str, Tensor]:
        """Return, for each site with a term, whether that is finite: scalars, so that nothing waits for a device."""
        found = dict(self.finite)
        for name, site in (*self.guide_sites.items(), *self.model_sites.items()):
            term = site.get("term", self.kl.get(name))
            if term is not None:
                good = term.detach().isfinite().all()
                found[name] = found[name] & good if name in found else good
        return found

    def culprit(self) -> str | None:
        """Return the name of the first site whose log density is not finite, if there is one."""
        terms = [*self.guide_sites.items(), *self.model_sites.items()]
        for name, site in terms:
            if not bool(_finite(site)):
                return name
        return next((name for name, good in self.finite.items() if not bool(good)), None)


def _finite(site: Site) -> Tensor:
    term = site["term"] if "term" in site else site["fn"].log_prob(site["value"])
    return term.isfinite().all()


def _all_finite(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: torch.stack([run[name] for run in runs if name in run]).all() for name in names}


def stacked(runs: list[Particles]) -> Particles:
    """Join runs of one model and guide along their particles."""
    first = runs[0]
    count = sum(r.layout.num_particles for r in runs)

    def join(name: str) -> dict[str, Tensor]:
        return {site: torch.cat([getattr(r, name)[site] for r in runs]) for site in getattr(first, name)}

    scores = [r.log_score for r in runs if r.log_score is not None]
    return Particles(
        torch.cat([r.log_likelihood for r in runs]),
        join("log_prior"),
        join("log_guide"),
        torch.cat(scores) if scores else None,
        join("kl"),
        first.scale,
        replace(first.layout, num_particles=count),
        first.model_sites,
        first.guide_sites,
        first.in_expectation,
        _all_finite([run.finite_by_site() for run in runs]),
        first.in_sum,
    )
