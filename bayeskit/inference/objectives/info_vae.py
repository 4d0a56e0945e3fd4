"""The objective of InfoVAE: a divergence of the aggregate posterior from the prior beside that of each datum."""

from __future__ import annotations

import math
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from bayeskit._pyro.draws import MendedDraws
from bayeskit._pyro.draws import draw as draw_from
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.kernel_discrepancy import Kernel, maximum_mean_discrepancy
from bayeskit.inference.objectives.evidence_lower_bound import divergences
from bayeskit.inference.objectives.layout import PARTICLES, Layout
from bayeskit.inference.objectives.objective import Draw, Objective
from bayeskit.inference.objectives.particles import Particles
from bayeskit.inference.objectives.sites import Site


class InfoVAE(Objective):
    """Expected log likelihood, less ``1 - alpha`` divergences of guide from prior and some of their aggregates.

    The aggregate posterior, the guide averaged over the data, is compared with the prior by the squared maximum mean
    discrepancy, with weight ``alpha + weight - 1``, estimated without bias from one draw for each datum of the
    minibatch and as many from the prior.

    Parameters
    ----------
    alpha : float, default 0.0
        Nats of mutual information of data and code are rewarded by ``alpha``.
    weight : float, default 1.0
        Of the divergence of the aggregates. With ``alpha = 0`` and ``weight = 1`` this is the ELBO; with
        ``alpha = 1`` only the aggregates are compared.
    kernel : Kernel, optional
        From :mod:`bayeskit.inference.kernel_discrepancy`; an inverse multiquadric by default.
    num_particles : int, default 1
    analytic_kl : bool, default True
        Use the closed form of a site's divergence where there is one.
    max_plate_nesting, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If a weight is negative.

    Notes
    -----
    The guide's draws have to carry gradients, and the data to stand in a plate of which each minibatch holds at
    least two items.

    References
    ----------
    Zhao, S., Song, J., Ermon, S. (2019). InfoVAE: balancing learning and inference in variational autoencoders. AAAI.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives.info_vae import InfoVAE
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.7))
    >>> loss = InfoVAE(alpha=1.0, weight=10.0).loss(model, guide, torch.randn(50))
    """

    def __init__(
        self,
        alpha: float = 0.0,
        weight: float = 1.0,
        kernel: Kernel | None = None,
        num_particles: int = 1,
        *,
        analytic_kl: bool = True,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        if not (alpha <= 1 and alpha + weight >= 1):
            raise SettingsError(
                f"alpha must be at most 1 and alpha + weight at least 1, so that no divergence is rewarded, not "
                f"alpha={alpha} and weight={weight}"
            )
        self.alpha, self.weight, self.kernel, self.analytic_kl = float(alpha), float(weight), kernel, analytic_kl

    def estimate(self, draw: Draw) -> Tensor:
        """Return the objective of each datum, ``(*batch)``; the aggregates' part is the same for all."""
        particles = draw(self.num_particles, analytic_kl=self.analytic_kl)
        if particles.log_score is not None:
            raise GuideError(
                "InfoVAE needs a guide whose draws carry gradients, but some do not, such as discrete ones; use ELBO"
            )
        particles.require_divergences("InfoVAE")
        value = particles.log_likelihood
        for divergence in divergences(particles).values():
            value = value - (1 - self.alpha) * divergence
        aggregate = self.alpha + self.weight - 1
        if aggregate:
            if particles.in_expectation is not None:
                raise GuideError(
                    f"site {particles.in_expectation!r} is enumerated in the guide, but InfoVAE compares draws with "
                    "the prior's; take the mark out of the guide, or use ELBO"
                )
            codes = code_vectors(particles.guide_sites, particles.layout)
            prior = code_vectors(prior_sites(draw, particles), particles.layout)
            discrepancy = maximum_mean_discrepancy(codes, prior, self.kernel)
            value = value - aggregate * discrepancy.reshape(-1, *(1,) * (value.dim() - 1))
        return value.mean(0)


def prior_sites(draw: Draw, particles: Particles) -> dict[str, Site]:
    """Return the latent sites with values drawn from the prior instead of the guide."""
    drawn = particles.guide_sites  # the model may sum out others
    latent = {n: site for n, site in particles.model_sites.items() if not site["is_observed"] and n in drawn}
    if len(latent) == 1:
        ((name, site),) = latent.items()
        shape = site["value"].shape[: site["value"].dim() - site["fn"].event_dim]
        fn = site["fn"].expand(shape)
        return {name: {**site, "value": fn.rsample() if fn.has_rsample else draw_from(fn)}}
    model, layout = draw.model, particles.layout
    if layout.num_particles > 1:
        model = pyro.plate(PARTICLES, layout.num_particles, dim=-layout.nesting - 1)(model)
    with poutine.block(), MendedDraws():
        nodes: Any = poutine.trace(model).get_trace(*draw.args, **draw.kwargs).nodes
    return {name: nodes[name] for name in latent}


def code_vectors(sites: dict[str, Site], layout: Layout) -> Tensor:
    """Return the latent values of each datum as one vector: ``(K, data, features)``.

    Raises
    ------
    SettingsError
        If there are not two data.
    """
    data = sorted(plate.dim for plate in layout.plates.values())
    count = math.prod(layout.batch_shape)
    if count < 2:
        raise SettingsError(
            "the aggregate posterior needs latent variables in a plate of data, and at least two items in a minibatch"
        )
    parts = []
    for name in sorted(name for name, site in sites.items() if not site["is_observed"]):
        value, events = sites[name]["value"], sites[name]["fn"].event_dim
        plates = layout.nesting + 1
        value = value.reshape((1,) * (plates + events - value.dim()) + tuple(value.shape))
        shape = list(value.shape)
        shape[0] = layout.num_particles
        for plate in layout.plates.values():
            shape[plates + plate.dim] = plate.size
        value = value.expand(shape).movedim([plates + d for d in data], list(range(1, 1 + len(data))))
        parts.append(value.reshape(layout.num_particles, count, -1))
    return torch.cat(parts, -1)
