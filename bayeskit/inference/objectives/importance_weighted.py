"""The importance-weighted bound of Burda, Grosse and Salakhutdinov, for continuous and discrete guides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.inference.objectives.objective import Draw, Objective, log_mean_exp, with_gradient_of


def leave_one_out_bound(log_weight: Tensor) -> Tensor:
    """Return the bound with each particle's weight replaced by the geometric mean of the others.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(K, *batch)`` with ``K >= 2``.

    Returns
    -------
    Tensor
        Shape ``(K, *batch)``: what the bound would have been without looking at particle ``k``.

    Examples
    --------
    >>> import torch
    >>> leave_one_out_bound(torch.tensor([1.0, 3.0]))
    tensor([3., 1.])
    """
    count = len(log_weight)
    finite = log_weight.isfinite()
    known = torch.where(finite, log_weight, 0.0)
    others = (known.sum(0) - known) / (count - 1)
    # One weight of zero among the others makes their geometric mean zero; taken from a sum it would make it NaN.
    others = torch.where((~finite).sum(0) > (~finite).long(), -torch.inf, others)
    peak = log_weight.amax(0)
    weight = (log_weight - peak).exp()
    # The sum without particle k is taken anew where subtracting would cancel, and in logarithms throughout: the
    # others may be too small for a number beside the largest.
    without = (weight.sum(0) - weight).log() + peak
    top = log_weight.argmax(0, keepdim=True)
    without = without.scatter(0, top, log_weight.scatter(0, top, -torch.inf).logsumexp(0, keepdim=True))
    return torch.logaddexp(without, others) - math.log(count)


def importance_weighted_estimate(log_weight: Tensor, log_score: Tensor | None = None) -> Tensor:
    """Return the bound, with a gradient that is right whatever the guide draws.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(K, *batch)``.
    log_score : Tensor, optional
        Log density under the guide of draws that carry no gradient, ``(K, *batch)``.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    References
    ----------
    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.
    """
    bound = log_mean_exp(log_weight)
    if log_score is None:
        return bound
    detached = log_weight.detach()
    signal = bound.detach() - (leave_one_out_bound(detached) if len(detached) > 1 else 0.0)
    return with_gradient_of(bound, bound + (signal * log_score).sum(0))


class IWAE(Objective):
    """Importance-weighted bound: the expected log of the mean of ``num_particles`` weights, for each datum.

    Where the guide's draws carry gradients, these are used; for discrete and other draws the score function is,
    with each particle's leave-one-out baseline (VIMCO).

    Parameters
    ----------
    num_particles : int, default 16
        One gives the ELBO.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    References
    ----------
    Burda, Y., Grosse, R., Salakhutdinov, R. (2016). Importance weighted autoencoders. ICLR.

    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import IWAE
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior
    >>> x = torch.tensor([1.0, -0.5])
    >>> loss = IWAE(num_particles=4).loss(model, guide, x)
    >>> abs(loss + dist.Normal(0.0, 2**0.5).log_prob(x).sum().item()) < 1e-5
    True
    """

    def __init__(
        self,
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

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound of each datum, ``(*batch)``."""
        particles = draw(self.num_particles)
        return importance_weighted_estimate(particles.log_weight, particles.log_score)
