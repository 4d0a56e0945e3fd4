"""A gamma distribution that is drawn from in batches."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor


class BatchableGamma(dist.Gamma):
    """Create a gamma distribution whose draws ``vmap`` can batch; torch's own clamps them in place, one by one.

    Examples
    --------
    >>> import torch
    >>> BatchableGamma(torch.tensor([2.0, 3.0]), torch.tensor(1.0)).sample().shape
    torch.Size([2])
    """

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw, shape ``(*sample_shape, *batch)``."""
        shape = self._extended_shape(torch.Size(sample_shape))
        value = torch._standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
        return value.clamp(min=torch.finfo(value.dtype).tiny)
