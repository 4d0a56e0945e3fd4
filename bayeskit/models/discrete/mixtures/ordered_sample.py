"""Independent draws in ascending order."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import ShapeError


class OrderedSample(TorchDistribution):
    """Create the distribution of ``num_draws`` independent draws from a continuous distribution, sorted.

    Its density is ``num_draws!`` times that of the draws, on ascending vectors only: what an ordering constraint has
    to be worth, so that the evidence of a mixture stays what it is without the constraint.

    Parameters
    ----------
    base : Distribution
        On the real line, scalar, without batch dimensions.
    num_draws : int
        At least 1.
    validate_args : bool, optional
        Whether to refuse values that do not ascend, with a ``ValueError``, as in all distributions of torch.

    Raises
    ------
    SettingsError
        If ``num_draws`` is less than 1.
    ShapeError
        If ``base`` has batch or event dimensions.

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
        num_draws = whole_number("num_draws", num_draws, 1)
        if base.batch_shape or base.event_shape:
            shapes = f"batch {tuple(base.batch_shape)} and event {tuple(base.event_shape)}"
            raise ShapeError(f"the distribution of one draw has shapes {shapes}; give one of a single number")
        self.base = base
        super().__init__(torch.Size(), torch.Size([num_draws]), validate_args=validate_args)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw, shape ``(*sample_shape, num_draws)``."""
        return self.base.sample((*torch.Size(sample_shape), *self.event_shape)).sort(-1).values

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density at ascending vectors, ``(*batch, num_draws) -> (*batch)``.

        Raises
        ------
        ShapeError
            If the last dimension is not ``num_draws``.
        """
        if value.shape[-1:] != self.event_shape:
            raise ShapeError(f"values have shape {tuple(value.shape)}; the last dimension is {self.event_shape[0]}")
        if self._validate_args:
            self._validate_sample(value)
        return self.base.log_prob(value).sum(-1) + math.lgamma(self.event_shape[0] + 1)
