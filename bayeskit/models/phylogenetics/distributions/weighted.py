"""Topologies with weights, as distributions are fitted to and compared with."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bayeskit.errors import ShapeError, TreeError
from bayeskit.models.phylogenetics.distributions.rows import Floats, add_up
from bayeskit.models.phylogenetics.trees.topologies import Topologies


class WeightedTopologies(Protocol):
    """Topologies with weights, such as a `TreeSample`."""

    @property
    def topologies(self) -> Topologies:
        """The topologies."""

    @property
    def weights(self) -> Any:
        """Their weights, `(topologies,)`."""


class _Equal(NamedTuple):
    topologies: Topologies
    weights: Floats


def check_topologies(topologies: object, empty: bool = False) -> None:
    """Refuse what are no `Topologies`, or are none at all where they must not be empty.

    Raises
    ------
    TreeError
        If so.
    """
    if not isinstance(topologies, Topologies):
        raise TreeError(
            f"{type(topologies).__name__} is not Topologies. Remedy: give Topologies.from_trees(trees), or those of a "
            "sample, sample.topologies."
        )
    if not (empty or len(topologies)):
        raise TreeError("There is no topology. Remedy: give at least one.")


def weighted(sample: WeightedTopologies | Topologies) -> tuple[Topologies, Floats]:
    """Return the distinct topologies with weights above zero, and these weights, which sum to one.

    Parameters
    ----------
    sample : WeightedTopologies
        The topologies, which may repeat, and weights that are not negative. `Topologies` count the same each.

    Returns
    -------
    topologies : Topologies
        Each once.
    weights : ndarray
        Shape `(topologies,)`, float64.

    Raises
    ------
    ShapeError
        If there is not one weight for each topology.
    TreeError
        If a weight is negative or not finite, all are zero, there is no topology, or something else is given.
    """
    if isinstance(sample, Topologies):
        check_topologies(sample)
        return weighted(_Equal(sample, np.ones(len(sample))))
    if not (hasattr(sample, "topologies") and hasattr(sample, "weights")):
        raise TreeError(
            f"{type(sample).__name__} holds no weighted topologies. Remedy: make a sample by TreeSample.from_trees or "
            "TreeSample.from_topologies; to fit to a distribution, fit to draws of it, .sample(1000, seed=0)."
        )
    check_topologies(sample.topologies)
    topologies, given = sample.topologies, torch.as_tensor(sample.weights).detach().cpu().numpy().astype(np.float64)
    if given.shape != (len(topologies),):
        raise ShapeError(
            f"weights: shape {given.shape} does not fit {len(topologies)} topologies. Remedy: give one weight for each."
        )
    if not np.isfinite(given).all() or (given < 0).any() or not given.sum() > 0:
        raise TreeError("weights: one is negative or not finite, or all are zero. Remedy: give frequencies of trees.")
    distinct, index = topologies.distinct()
    weights = add_up(index, given, len(distinct))
    return distinct[weights > 0], weights[weights > 0] / given.sum()
