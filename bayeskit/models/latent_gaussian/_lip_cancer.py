"""Lip cancer in Scotland, the standard example of disease maps."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor


class LipCancer(NamedTuple):
    """Cases of lip cancer of men in the districts of Scotland, 1975 to 1980.

    Attributes
    ----------
    counts : Tensor
        Registered cases, ``(56,)``.
    expected : Tensor
        Cases expected from the ages of the population, ``(56,)``.
    outdoor_work : Tensor
        Percentage of the work force in agriculture, fishing or forestry, ``(56,)``.
    edges : Tensor of int
        Pairs of districts with a common border, counted from zero, ``(117, 2)``. Districts 5, 7 and 10 are islands
        without neighbours.
    """

    counts: Tensor
    expected: Tensor
    outdoor_work: Tensor
    edges: Tensor


def scottish_lip_cancer() -> LipCancer:
    """Load the cases of lip cancer in 56 districts of Scotland, float64.

    References
    ----------
    Clayton, D., Kaldor, J. (1987). Empirical Bayes estimates of age-standardized relative risks for use in disease
    mapping. Biometrics 43, 671-681.

    Examples
    --------
    >>> data = scottish_lip_cancer()
    >>> int(data.counts.sum()), data.expected.sum().round(decimals=1), len(data.edges)
    (536, tensor(536.2000, dtype=torch.float64), 117)
    """
    path = resources.files("bayeskit.models.latent_gaussian") / "data" / "scottish_lip_cancer.txt"
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    numbers = torch.tensor([[float(word) for word in line[1:4]] for line in lines], dtype=torch.float64)
    edges = [(int(line[0]) - 1, int(other) - 1) for line in lines for other in line[4:]]
    counts, expected, outdoor_work = numbers.unbind(1)
    return LipCancer(counts, expected, outdoor_work, torch.tensor(edges))
