"""Generalized variational inference: a loss, a divergence and a family of guides, each chosen by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, Normal

from bayeskit.errors import SettingsError
from bayeskit.inference.generalized.variational.divergences import Divergence, Gaussian, KullbackLeibler, as_divergence
from bayeskit.inference.objectives.evidence_lower_bound import divergences, score_function_estimate
from bayeskit.inference.objectives.objective import Draw, Objective
from bayeskit.inference.objectives.particles import Particles
from bayeskit.inference.objectives.sites import Site, unwrapped


class GVI(Objective):
    r"""Expected loss plus a divergence of guide from prior, :math:`E_q[w \sum_i \ell(\theta, x_i)] + D(q \| \pi)`.

    The rule of three: the loss and its weight are those of the model, such as a
    :class:`~bayeskit.inference.generalized.GibbsPosterior` (or any Pyro model, whose loss is minus its log
    likelihood), the divergence is the argument, and the family is the guide. With :class:`KullbackLeibler` and a guide
    that can be the Gibbs posterior, that is the optimum; other divergences give other beliefs, not approximations of
    these.

    The divergence is computed in closed form where guide and prior are normal, their sites independent of each
    other, including Pyro's automatic guides of unconstrained parameters; otherwise by the guide's draws.

    Parameters
    ----------
    divergence : Divergence, default KullbackLeibler()
        One of :mod:`~bayeskit.inference.generalized.variational.divergences`.
    num_particles : int, default 16
        Draws of the guide.
    max_plate_nesting, data_plate
        As in :class:`~bayeskit.inference.objectives.Objective`. With plates that hold all sites, the divergence
        is that of each datum's own latent variables.

    Raises
    ------
    SettingsError
        If ``divergence`` is none, or one that does not add up has to be estimated from a single draw.
    GuideError
        If the divergence has no estimate by draws and is needed where there is no closed form.

    References
    ----------
    Knoblauch, J., Jewson, J., Damoulas, T. (2022). An optimization-centric view on Bayes' rule: reviewing and
    generalizing variational inference. JMLR 23 (132), 1-109.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> from bayeskit.inference.generalized.variational.divergences import Renyi
    >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=0.5)
    >>> def guide():
    ...     return pyro.sample("theta", dist.Normal(torch.tensor(1.4, dtype=torch.float64), 0.4**0.5))
    >>> bound = GVI(num_particles=10_000).loss(posterior, guide)  # at the Gibbs posterior: minus its log evidence
    >>> abs(bound - 3.2581) < 0.1
    True
    >>> GVI(Renyi(0.5), num_particles=10_000).loss(posterior, guide) < bound
    True
    """

    def __init__(
        self,
        divergence: Divergence | None = None,
        num_particles: int = 16,
        *,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        self.divergence = KullbackLeibler() if divergence is None else as_divergence(divergence)

    def estimate(self, draw: Draw) -> Tensor:
        """Return minus the expected loss and the divergence of each datum, ``(*batch)``."""
        particles = draw(self.num_particles, analytic_kl=self.divergence.adds_up)
        return score_function_estimate(particles.log_likelihood, particles.log_score) - self._divergence(particles)

    def _divergence(self, particles: Particles) -> Tensor:
        pair = normal_laws(particles)
        if pair is not None:
            return self.divergence.between(*pair)
        particles.require_divergences(type(self).__name__)
        if self.divergence.adds_up:
            return self.divergence.of_draws(sum(divergences(particles).values(), _none(particles)), particles.log_score)
        ratio = particles.log_guide_total - sum(particles.log_prior.values(), _none(particles))
        if len(ratio) < 2:
            raise SettingsError(
                f"{type(self.divergence).__name__} has no closed form between this guide and prior and needs several "
                "draws; raise num_particles"
            )
        return self.divergence.of_draws(ratio, particles.log_score)


def normal_laws(particles: Particles) -> tuple[Gaussian, Gaussian] | None:
    """Return the joint laws of guide and prior over all latent sites, where both are normal and neither is a chain.

    Parameters
    ----------
    particles : Particles

    Returns
    -------
    (Gaussian, Gaussian) or None
        None where a site is not normal, is masked, scaled or belongs to a datum, or depends on another site, which
        shows in particles that differ in its law.
    """
    prior = {name: site for name, site in particles.model_sites.items() if not site["is_observed"]}
    guide = _free_sites(particles.guide_sites, prior)
    if guide is None or particles.layout.plates or not prior:
        return None
    count = particles.layout.num_particles
    values = [_flat(site["value"], count) for site in (*guide.values(), *prior.values())]
    laws = [_normal_law(site, count) for site in (*guide.values(), *prior.values())]
    if any(value is None for value in values) or any(law is None for law in laws):
        return None
    if count == 1 and len(prior) > 1:
        return None  # a single particle cannot show what depends on it
    split = len(guide)
    drawn, taken = (torch.cat(part, -1) for part in (values[:split], values[split:]))  # type: ignore[arg-type]
    if drawn.shape != taken.shape or not torch.equal(drawn, taken):
        return None
    like = drawn + taken
    return _joint(laws[:split], like), _joint(laws[split:], like)


def _free_sites(guide: Mapping[str, Site], prior: Mapping[str, Site]) -> dict[str, Site] | None:
    """Return the sites that the guide draws from: the prior's, in its order, or those of an automatic guide."""
    if set(guide) == set(prior):
        return {name: guide[name] for name in prior}
    free: dict[str, Site] = {}
    for name, site in guide.items():
        base = unwrapped(site["fn"])[0]
        if not isinstance(base, Delta):
            free[name] = site
        elif bool((torch.as_tensor(base.log_density) != 0).any()):
            return None  # a transform bends the law
    return free


def _flat(value: Tensor, count: int) -> Tensor | None:
    """Return values as ``(K, d)``."""
    if count > 1 and (value.dim() == 0 or len(value) != count):
        return None
    return value.reshape(count, -1)


def _normal_law(site: Site, count: int) -> Gaussian | None:
    """Return the law of a site if it is normal and the same for all particles."""
    if site["mask"] not in (None, True) or isinstance(site["scale"], Tensor) or site["scale"] != 1:
        return None
    base, shape = unwrapped(site["fn"])[0], site["value"].shape
    if isinstance(base, Normal):
        scale = _flat(base.scale.expand(shape), count)
        factor = None if scale is None else torch.diag_embed(scale)
    elif isinstance(base, (MultivariateNormal, LowRankMultivariateNormal)):
        size = shape[-1]
        blocks = base.scale_tril.expand(*shape, size).reshape(count, -1, size, size)
        factor = torch.stack([torch.block_diag(*row) for row in blocks[: 1 if _alike(blocks) else count]])
    else:
        return None
    mean = _flat(base.loc.expand(shape), count)
    if mean is None or factor is None or not _alike(mean) or not _alike(factor):
        return None
    return Gaussian(mean[0], factor[0])


def _alike(rows: Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _joint(laws: list[Any], like: Tensor) -> Gaussian:
    mean = torch.cat([law.mean for law in laws])
    return Gaussian(mean.to(like), torch.block_diag(*(law.scale_tril for law in laws)).to(like))


def _none(particles: Particles) -> Tensor:
    return torch.zeros_like(particles.log_likelihood)
