"""Velocities of 82 galaxies."""

from __future__ import annotations

from importlib import resources

import torch
from torch import Tensor


def galaxy_velocities() -> Tensor:
    """Load the velocities of 82 galaxies in six conic sections of the Corona Borealis region.

    These are the values of Roeder (1990). The 78th is 26.960, as in the original survey; a widespread copy has
    26.690 there, by exchanging two digits. The 74th is 24.366 (some later copies have 24.368).

    Returns
    -------
    Tensor
        Ascending, in 1000 km/s, float64, shape ``(82,)``.

    References
    ----------
    Postman, M., Huchra, J. P., Geller, M. J. (1986). Probes of large-scale structure in the Corona Borealis region.
    Astronomical Journal 92, 1238-1247.

    Roeder, K. (1990). Density estimation with confidence sets exemplified by superclusters and voids in the galaxies.
    Journal of the American Statistical Association 85, 617-624.

    Examples
    --------
    >>> y = galaxy_velocities()
    >>> len(y), y[77].item(), round(y.mean().item(), 4)
    (82, 26.96, 20.8315)
    """
    text = resources.files("bayeskit.models.discrete").joinpath("data", "galaxies.csv").read_text(encoding="utf-8")
    return torch.tensor([float(line) for line in text.split()[1:]], dtype=torch.float64)
