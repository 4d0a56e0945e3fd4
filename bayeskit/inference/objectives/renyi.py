"""Bounds from Renyi's divergence: from the ELBO through IWAE to the largest weight alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.gradients.multi_sample import leave_one_out_bound
from bayeskit.inference.objectives.objective import Draw, Objective, log_mean_exp, with_gradient_of

# Below this power the log of the mean of powers is expanded about the mean log weight.
_SMALL_POWER = 1e-3


def renyi_bound(log_weight: Tensor, alpha: float) -> Tensor:
    """Return the log of the power mean of the weights, with power ``1 - alpha``.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(K, *batch)``.
    alpha : float
        Minus infinity gives the largest log weight, plus infinity the smallest, one the mean.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    Examples
    --------
    >>> import torch
    >>> log_weight = torch.tensor([0.0, 2.0])
    >>> [round(renyi_bound(log_weight, a).item(), 4) for a in (-math.inf, 0.0, 1.0, math.inf)]
    [2.0, 1.4338, 1.0, 0.0]
    """
    power = 1.0 - alpha
    if math.isinf(power):
        return log_weight.amax(0) if power > 0 else log_weight.amin(0)
    if abs(power) >= _SMALL_POWER:
        return log_mean_exp(power * log_weight) / power
    centre = log_weight.mean(0)
    if power == 0:
        return centre
    return centre + torch.log1p(torch.expm1(power * (log_weight - centre)).mean(0)) / power


def leave_one_out_renyi(log_weight: Tensor, alpha: float) -> Tensor:
    """Return, for each particle, a guess at the bound from the other particles alone, ``(K, *batch)``."""
    power = 1.0 - alpha
    count = len(log_weight)
    if math.isinf(power):
        signed = log_weight if power > 0 else -log_weight
        best = signed.topk(2, 0)
        top = torch.arange(count, device=signed.device).reshape(-1, *(1,) * (signed.dim() - 1)) == best.indices[0]
        others = torch.where(top, best.values[1], best.values[0])
        return others if power > 0 else -others
    if abs(power) >= _SMALL_POWER:
        return leave_one_out_bound(power * log_weight) / power
    return (log_weight.sum(0) - log_weight) / (count - 1)


def renyi_estimate(log_weight: Tensor, alpha: float, log_score: Tensor | None = None) -> Tensor:
    """Return the bound, with a gradient that is right whatever the guide draws.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(K, *batch)``.
    alpha : float
    log_score : Tensor, optional
        Log density under the guide of draws that carry no gradient, ``(K, *batch)``.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.
    """
    bound = renyi_bound(log_weight, alpha)
    if log_score is None:
        return bound
    detached = log_weight.detach()
    signal = bound.detach() - (leave_one_out_renyi(detached, alpha) if len(detached) > 1 else 0.0)
    return with_gradient_of(bound, bound + (signal * log_score).sum(0))


class Renyi(Objective):
    """Variational Renyi bound: expected log of the power mean of ``num_particles`` weights, for each datum.

    Where the guide's draws carry gradients, these are used; for discrete and other draws the score function is,
    with a baseline for each particle from the others.

    Parameters
    ----------
    alpha : float
        Order of the divergence. One is the ELBO, zero is IWAE. Above one the guide shrinks into a mode; below
        zero it spreads over all of them. Minus infinity follows the largest weight alone ("VR-max"), plus infinity
        the smallest.
    num_particles : int, default 16
        With one, every ``alpha`` gives the ELBO.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If ``alpha`` is not a number.

    Notes
    -----
    With infinitely many particles the bound lies below the log marginal likelihood for positive ``alpha`` and above
    it for negative; finitely many push it down for ``alpha`` below one and up for ``alpha`` above. So for a negative
    ``alpha`` what is reported may lie on either side. The gradient is that of the expected estimate at the given
    number of particles.

    References
    ----------
    Li, Y., Turner, R. E. (2016). Renyi divergence variational inference. NeurIPS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import Renyi
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior: every bound is tight
    >>> x = torch.tensor([1.0, -0.5])
    >>> loss = Renyi(alpha=0.5, num_particles=4).loss(model, guide, x)
    >>> abs(loss + dist.Normal(0.0, 2**0.5).log_prob(x).sum().item()) < 1e-5
    True
    """

    def __init__(
        self,
        alpha: float,
        num_particles: int = 16,
        *,
        max_plate_nesting: int | None = None,
        vectorize_particles: bool = True,
        chunk_size: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(
            num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
            chunk_size=chunk_size,
            data_plate=data_plate,
        )
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or math.isnan(alpha):
            raise SettingsError(f"alpha must be a number (plus or minus infinity included), not {alpha!r}")
        self.alpha = float(alpha)

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound of each datum, ``(*batch)``."""
        particles = draw(self.num_particles)
        return renyi_estimate(particles.log_weight, self.alpha, particles.log_score)
