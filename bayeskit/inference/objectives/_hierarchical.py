"""Bounds for guides with auxiliary variables, which have no closed-form marginal density."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayeskit._core.inputs import whole_number
from bayeskit.errors import GuideError
from bayeskit.inference.objectives._drawing import (
    Layout,
    Particles,
    Site,
    SubsampleIndices,
    draw_log_density,
    reduced,
    site_log_density,
    supplied_sites,
)
from bayeskit.inference.objectives._evidence_lower_bound import score_function_estimate
from bayeskit.inference.objectives._objective import Draw, Objective, log_mean_weight

Reverse = Callable[..., Any]
"""A Pyro function of the latent values, by name, and the model's arguments; it samples the auxiliary sites."""


class AuxiliaryELBO(Objective):
    r"""Evidence lower bound of a guide with auxiliary sites, whose marginal is a mixture.

    The guide draws auxiliary sites :math:`a`, marked ``infer={"is_auxiliary": True}``, and then the model's latent
    sites :math:`z`. Their marginal density :math:`q(z)` is bounded from above, on average, by

    .. math:: \frac{1}{J+1} \sum_{j=0}^J \frac{q(a_j, z)}{r(a_j \mid z, x)}

    where :math:`a_0` is the guide draw that generated :math:`z` and the other :math:`a_j` are drawn from the reverse
    model :math:`r`. The bound is tight if ``r`` is the guide's conditional of ``a`` given ``z``, or as ``J`` grows.

    Parameters
    ----------
    reverse : callable or None
        Called as ``reverse(values, *args, **kwargs)`` with the latent values by name and the model's arguments. It
        samples every auxiliary site, in the guide's plates, and is trained jointly. None uses the guide's
        distribution of ``a`` (semi-implicit variational inference); set ``num_auxiliary > 0`` with None. The module
        ``objective(model, guide)`` holds only the parameters of model and guide: make the reverse model a submodule
        of the guide, or pass its parameters to the optimizer.
    num_auxiliary : int, default 0
        Number of additional auxiliary draws ``J`` per particle. With a reverse model, 0 gives the bound of
        hierarchical variational models and auxiliary deep generative models, larger values importance-weighted
        hierarchical inference.
    max_plate_nesting, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If ``num_auxiliary`` is negative.
    GuideError
        On use, if the guide has no auxiliary site or the reverse model samples different sites.

    References
    ----------
    Ranganath, R., Tran, D., Blei, D. (2016). Hierarchical variational models. ICML. Maaloe, L. et al. (2016). Auxiliary
    deep generative models. ICML. Yin, M., Zhou, M. (2018). Semi-implicit variational inference. ICML. Sobolev, A.,
    Vetrov, D. (2019). Importance weighted hierarchical variational inference. NeurIPS.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from bayeskit.inference.objectives._hierarchical import AuxiliaryELBO
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):  # its marginal is the exact posterior
    ...     a = pyro.sample("a", dist.Normal(x / 2, 0.5), infer={"is_auxiliary": True})
    ...     pyro.sample("z", dist.Normal(a, 0.5))
    >>> def reverse(values, x):
    ...     pyro.sample("a", dist.Normal((values["z"] + x / 2) / 2, 0.125**0.5))
    >>> x = torch.tensor(1.0)
    >>> loss = AuxiliaryELBO(reverse, num_particles=3, num_auxiliary=2).loss(model, guide, x)
    >>> abs(loss + dist.Normal(0.0, 2**0.5).log_prob(x).item()) < 1e-5
    True
    """

    def __init__(
        self,
        reverse: Reverse | None,
        num_particles: int = 1,
        *,
        num_auxiliary: int = 0,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        self.reverse, self.num_auxiliary = reverse, whole_number("num_auxiliary", num_auxiliary, least=0)

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound for each observation, ``(*batch)``."""
        with SubsampleIndices() as indices:
            particles = draw(self.num_particles)
        log_joint = particles.log_weight + particles.log_guide_total
        inference = _Inference(draw, self.reverse, particles, indices.values)
        ratios, scores = [inference.at_the_draw().unsqueeze(0)], [particles.log_score]
        if self.num_auxiliary:
            ratio, score = inference.at_further_draws(self.num_auxiliary)
            ratios.append(ratio)
            scores.append(score)
        # ratios: (J + 1, K, *batch), log guide density of latent and auxiliary values minus the log density of the
        # auxiliary values under the reverse model; index 0 holds the draws behind the latent values.
        value = log_joint - log_mean_weight(torch.cat(ratios))
        known = [score for score in scores if score is not None]
        return score_function_estimate(value, sum(known[1:], known[0]) if known else None)


class _Inference:
    """The guide and its reverse at the latent values of some particles."""

    def __init__(
        self, draw: Draw, reverse: Reverse | None, particles: Particles, indices: Mapping[str, Tensor]
    ) -> None:
        self._draw, self._reverse, self._indices = draw, reverse, indices
        self._sites = {n: s for n, s in particles.guide_sites.items() if not s["is_observed"]}
        self._auxiliary = [n for n in self._sites if n not in particles.model_sites]
        self._latent = [n for n in self._sites if n not in self._auxiliary]
        self._log_guide, self._layout = particles.log_guide, particles.layout
        if not self._auxiliary:
            raise GuideError(
                'the guide has no auxiliary site; mark one infer={"is_auxiliary": True}, or use ELBO, which is this '
                "bound without any"
            )

    def at_the_draw(self) -> Tensor:
        """Return the log ratio of the particles themselves, ``(K, *batch)``."""
        if self._reverse is None:
            return self._sum(self._log_guide[name] for name in self._latent)
        values = {name: site["value"] for name, site in self._sites.items()}
        sites = self._run(self._reverse, values, self._layout)
        return self._sum(self._log_guide.values()) - self._sum(_terms(sites, self._layout).values())

    def at_further_draws(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Draw more auxiliary values; return log ratios ``(J, K, *batch)`` and their score ``(K, *batch)``."""
        layout = replace(self._layout, num_particles=count * self._layout.num_particles)
        values = {name: self._repeated(self._sites[name], count) for name in self._latent}
        proposal: dict[str, Site] = {}
        if self._reverse is not None:
            proposal = self._run(self._reverse, values, layout)
            values |= {name: proposal[name]["value"] for name in self._auxiliary}
        draw = self._draw
        guide = supplied_sites(
            draw.guide, draw.args, draw.kwargs, layout, self._indices, lambda name, fn: values.get(name)
        )
        log_guide, log_reverse = _terms(guide, layout), _terms(proposal, layout)
        names = self._latent if self._reverse is None else list(log_guide)
        ratio = self._sum(log_guide[name] for name in names) - self._sum(log_reverse.values())
        drawn = guide if self._reverse is None else proposal
        scores = [
            layout.reduce(draw_log_density(drawn[name]))
            for name in self._auxiliary
            if not drawn[name]["fn"].has_rsample
        ]
        shape = (count, *self._layout.shape)
        return ratio.reshape(shape), self._sum(scores).reshape(shape).sum(0) if scores else None

    def _run(self, reverse: Reverse, values: Mapping[str, Tensor], layout: Layout) -> dict[str, Site]:
        """Run the reverse model at given latent values, and auxiliary ones where they are given, too."""
        draw, latent = self._draw, {name: values[name] for name in self._latent}
        given = {name: values[name] for name in self._auxiliary if name in values}
        sites = supplied_sites(
            reverse, (latent, *draw.args), draw.kwargs, layout, self._indices, lambda name, fn: given.get(name)
        )
        names = [name for name, site in sites.items() if not site["is_observed"]]
        if missing := [name for name in self._auxiliary if name not in names]:
            raise GuideError(f"the reverse model has no site for the guide's auxiliary {missing[0]!r}; add pyro.sample")
        if extra := [name for name in names if name not in self._auxiliary]:
            raise GuideError(
                f"the reverse model has a site {extra[0]!r} that is no auxiliary site of the guide; rename it, or take "
                "it out"
            )
        return sites

    def _repeated(self, site: Site, count: int) -> Tensor:
        """Return a site's value ``count`` times along the particles, so that the first index varies slowest."""
        value, layout = site["value"], self._layout
        if count * layout.num_particles == 1:
            return value
        padding = (1,) * (layout.nesting + 1 + site["fn"].event_dim - value.dim())
        value = value.reshape(padding + tuple(value.shape))
        return value.expand(count, *value.shape).reshape(-1, *value.shape[1:])

    def _sum(self, terms: Iterable[Tensor]) -> Tensor:
        total = list(terms)
        return sum(total[1:], total[0]) if total else next(iter(self._log_guide.values())).new_zeros(())


def _terms(sites: Mapping[str, Site], layout: Layout) -> dict[str, Tensor]:
    return {
        name: reduced(site, site_log_density(site["fn"], site["value"]), layout)
        for name, site in sites.items()
        if not site["is_observed"]
    }
