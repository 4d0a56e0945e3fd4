"""A social network that split."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor


class KarateClub(NamedTuple):
    """Friendships in a karate club, and which side its members took.

    Attributes
    ----------
    adjacency : Tensor
        One where two members met outside the club, ``(34, 34)``, symmetric. Row ``i`` is member ``i + 1`` of the paper.
    with_instructor : Tensor of bool
        Whether a member stayed with the instructor (member 1) or with the administrator (member 34), ``(34,)``.
    """

    adjacency: Tensor
    with_instructor: Tensor


def karate_club() -> KarateClub:
    """Load Zachary's karate club: 34 members, 78 friendships, float64.

    References
    ----------
    Zachary, W. W. (1977). An information flow model for conflict and fission in small groups.
    Journal of Anthropological Research 33, 452-473.

    Examples
    --------
    >>> club = karate_club()
    >>> club.adjacency.shape, int(club.adjacency.sum()) // 2, int(club.with_instructor.sum())
    (torch.Size([34, 34]), 78, 17)
    """
    path = resources.files("bayeskit.models.discrete") / "data" / "zachary_karate_club.txt"
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    adjacency = torch.zeros(len(lines), len(lines), dtype=torch.float64)
    for member, _, *friends in lines:
        adjacency[int(member) - 1, [int(friend) - 1 for friend in friends]] = 1.0
    return KarateClub(adjacency + adjacency.T, torch.tensor([side == "instructor" for _, side, *_ in lines]))
