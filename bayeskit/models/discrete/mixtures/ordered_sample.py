"""Independent draws in ascending order."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor


class OrderedSample(TorchDistribution):
    """Create the distribution of ``num_draws`` independent draws from a continuous distribution, sorted.

    Its density is ``num_draws!`` times that of the draws, on ascending vectors only: what an ordering constraint has
    to be worth, so that the evidence of a mixture stays what it is without the constraint.

    Parameters
    ----------
    base : Distribution
        On the real line, scalar, without batch dimensions.
    num_draws : int

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> ordered = OrderedSample(dist.Normal(torch.zeros((), dtype=torch.float64), 1.0), 3)
    >>> ordered.sample().diff().min() > 0
    tensor(True)
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.ordered_vector

    def __init__(self, base: Any, num_draws: int, validate_args: bool | None = None) -> None:
        self.base = base
        super().__init__(torch.Size(), torch.Size([num_draws]), validate_args=validate_args)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw, shape ``(*sample_shape, num_draws)``."""
        return self.base.sample((*torch.Size(sample_shape), *self.event_shape)).sort(-1).values

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density at ascending vectors, ``(*batch, num_draws) -> (*batch)``."""
        count = torch.as_tensor(self.event_shape[0] + 1.0, dtype=value.dtype, device=value.device)
        return self.base.log_prob(value).sum(-1) + count.lgamma()
