"""Weights of the data that stand for resampling them."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit.errors import SettingsError

MOST_RESAMPLES = 10**6


def resampled(num_data: int, num_replicates: int, generator: torch.Generator) -> Tensor:
    """Return how often each datum occurs in resamples with replacement, ``(R, n)``."""
    chosen = torch.randint(num_data, (num_replicates, num_data), generator=generator)
    counts = torch.zeros(num_replicates, num_data, dtype=torch.float64)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))


def all_resamples(num_data: int) -> Tensor:
    """Return how often each datum occurs in each of the ``n**n`` resamples of few data: the bootstrap, exactly.

    Parameters
    ----------
    num_data : int
        At most seven.

    Returns
    -------
    Tensor
        Shape ``(n**n, n)``, all equally probable.

    Raises
    ------
    SettingsError
        If there are more than a million resamples.

    Examples
    --------
    >>> all_resamples(2)
    tensor([[2., 0.],
            [1., 1.],
            [1., 1.],
            [0., 2.]], dtype=torch.float64)
    """
    if num_data < 1 or num_data**num_data > MOST_RESAMPLES:
        raise SettingsError(f"{num_data} data have too many resamples to enumerate; draw some of them")
    grids = torch.meshgrid(*[torch.arange(num_data)] * num_data, indexing="ij")
    chosen = torch.stack([x.reshape(-1) for x in grids], 1)
    return torch.nn.functional.one_hot(chosen, num_data).sum(1).double()
