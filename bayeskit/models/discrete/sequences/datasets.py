"""Series that come inside Python packages: nothing is downloaded when they are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import MissingPackageError


class Series(NamedTuple):
    """Data in the order of time.

    Attributes
    ----------
    times : Tensor of int
        Shape ``(n,)``.
    values : Tensor
        Shape ``(n,)``, float64.
    """

    times: Tensor
    values: Tensor


def load_nile() -> Series:
    """Load the flow of the Nile at Aswan in each year from 1871 to 1970, in units of 10^8 cubic metres.

    Raises
    ------
    MissingPackageError
        If statsmodels, from whose wheel they come, is not installed.

    References
    ----------
    Cobb, G. W. (1978). The problem of the Nile: conditional solution to a changepoint problem. Biometrika 65, 243-251.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import load_nile
    >>> nile = load_nile()
    >>> len(nile.values), float(nile.values.mean())
    (100, 919.35)
    """
    try:
        from statsmodels.datasets import nile
    except ImportError as error:
        raise MissingPackageError(
            "load_nile needs statsmodels; install it with: pip install 'bayeskit[tables]'"
        ) from error
    table = nile.load_pandas().data
    return Series(torch.tensor(table["year"].to_numpy(dtype=int)), torch.tensor(table["volume"].to_numpy(dtype=float)))
