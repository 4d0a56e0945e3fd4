"""What users hand to a mixture."""

from __future__ import annotations

from torch import Tensor

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.discrete.inputs import as_real


def as_observations(y: Tensor) -> Tensor:
    """Return observations as a floating tensor, shape ``(n,)`` or ``(n, D)``.

    Parameters
    ----------
    y : Tensor or array

    Raises
    ------
    DataError
        If they are no real numbers, there are none, or some are not finite.
    ShapeError
        If they are neither a vector nor a matrix.

    Examples
    --------
    >>> import numpy as np
    >>> as_observations(np.array([1.5, 2.0]))
    tensor([1.5000, 2.0000], dtype=torch.float64)
    """
    y = as_real("y", y)
    if y.dim() not in (1, 2):
        raise ShapeError(f"y must have shape (n,) or (n, D), not {tuple(y.shape)}")
    if y.numel() == 0:
        raise DataError(f"y has shape {tuple(y.shape)}, so it holds no observations")
    if not bool(y.isfinite().all()):
        raise DataError(f"y holds {int((~y.isfinite()).sum())} values that are NaN or infinite; leave them out")
    return y
