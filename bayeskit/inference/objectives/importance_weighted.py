"""The importance-weighted bound of Burda, Grosse and Salakhutdinov, for continuous and discrete guides."""

from __future__ import annotations

from torch import Tensor

from bayeskit.inference.gradients.multi_sample import importance_weighted_estimate
from bayeskit.inference.objectives.objective import Draw, Objective


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
