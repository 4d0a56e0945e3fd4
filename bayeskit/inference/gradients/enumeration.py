"""The exact gradient, by a sum over all points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bayeskit._settings import whole_number
from bayeskit.inference.gradients.estimator import GradientEstimator, WeightedPoints
from bayeskit.inference.gradients.space import LIMIT, Space


@dataclass(frozen=True)
class Enumeration(GradientEstimator):
    """All points, weighted by their probabilities: exact.

    Parameters
    ----------
    limit : int, default 65,536
        Number of points beyond which it is refused.

    Raises
    ------
    SettingsError
        If the limit is below one, or there are more points.

    Examples
    --------
    >>> import torch
    >>> Enumeration().estimate(torch.zeros(2), torch.tensor([1.0, 3.0]))
    tensor([-0.5000,  0.5000])
    """

    limit: int = LIMIT

    def __post_init__(self) -> None:
        whole_number("limit", self.limit, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Return all points."""
        codes = space.enumerate(self.limit)
        return WeightedPoints(space.value(codes), space.log_prob(codes).exp())

    def num_evaluations(self, space: Space) -> int:
        """Return how many points there are."""
        return space.size
