"""The evidence lower bound whose gradient vanishes, draw by draw, where the guide is exact."""

from __future__ import annotations

from torch import Tensor

from bayeskit.inference.objectives.evidence_lower_bound import score_function_estimate
from bayeskit.inference.objectives.objective import Draw, Objective


class STL(Objective):
    """Evidence lower bound with the gradient of the guide taken along its draws alone.

    The guide's log density depends on its parameters through the draw and also directly. The direct part has
    expectation zero and is left out: what remains is zero on every draw once the guide is the exact posterior.
    Sites whose draws carry no gradient, such as discrete ones, get the score-function term instead; with two or
    more particles, it vanishes at the exact posterior, too.

    Parameters
    ----------
    num_particles : int, default 1
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Notes
    -----
    A guide of several sites is run a second time on its own draws, held fixed. Detaching the parameters of its
    distributions would not do: those of a later site also depend on earlier draws, and without that path the
    gradient at the exact posterior is no longer zero.

    References
    ----------
    Roeder, G., Wu, Y., Duvenaud, D. (2017). Sticking the landing: simple, lower-variance gradient estimators for
    variational inference. NeurIPS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import STL
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> slope = torch.tensor(0.5, requires_grad=True)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(slope * x, 0.5**0.5))  # the exact posterior
    >>> STL()(model, guide)(torch.tensor([1.0, -0.5])).backward()
    >>> abs(slope.grad.item()) < 1e-5
    True
    """

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound of each datum, ``(*batch)``."""
        particles = draw(self.num_particles, path_only=True)
        value, score = particles.log_weight, particles.log_score
        return score_function_estimate(value, score)
