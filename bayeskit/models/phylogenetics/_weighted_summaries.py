"""Means, medians and highest posterior density intervals of branch lengths and node heights of a sample of trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._samples import TreeSample


class WeightedSummary(NamedTuple):
    """Mean, median and 95 % interval of each of several quantities; NaN for one that no tree of the sample has.

    The interval is the shortest with at least 95 % of the weight (highest posterior density).

    Attributes
    ----------
    mean, median : ndarray
        Shape `(quantities,)`.
    interval : ndarray
        Both ends, shape `(quantities, 2)`.

    References
    ----------
    M.-H. Chen and Q.-M. Shao (1999), Monte Carlo estimation of Bayesian credible and HPD intervals, Journal of
    Computational and Graphical Statistics 8, 69-92.
    """

    mean: NDArray[np.float64]
    median: NDArray[np.float64]
    interval: NDArray[np.float64]

    def texts(self, place: int, mean: str, median: str, interval: str) -> list[str]:
        """Write one quantity as annotations with the given names, or as none."""
        if np.isnan(self.mean[place]):
            return []
        low, high = self.interval[place].tolist()
        numbers = f"{mean}={self.mean[place].item()!r}", f"{median}={self.median[place].item()!r}"
        return [*numbers, f"{interval}={{{low!r},{high!r}}}"]


def _lengths_of(sample: TreeSample) -> np.ndarray:
    """Return the branch lengths of each tree, `(samples, edges)`; TreeError if there are none."""
    if sample.branch_lengths is None:
        raise TreeError("The sample has no branch lengths to summarise. Remedy: read a file of trees with lengths.")
    return sample.branch_lengths.numpy()


def length_summary(sample: TreeSample, splits: clades.Bits) -> WeightedSummary:
    """Summarise the length of each tip's edge and of each split over the trees that have it."""
    lengths, num_taxa = _lengths_of(sample), sample.num_taxa
    inner = sample.topologies.below[:, num_taxa:]
    _, index = clades.identify(np.concatenate([splits, inner.reshape(-1, inner.shape[-1])]))
    # Place of each edge among tips and splits; edges of other splits come last.
    place = np.full(index.max(initial=-1) + 1, num_taxa + len(splits))
    place[index[: len(splits)]] = num_taxa + np.arange(len(splits))
    places = np.broadcast_to(np.arange(lengths.shape[1]), lengths.shape).copy()
    places[:, num_taxa:] = place[index[len(splits) :]].reshape(inner.shape[:2])[sample.index]
    return summarised(places, lengths, sample.sample_weights, num_taxa + len(splits))


def ancestor_heights(sample: TreeSample, sets: clades.Bits) -> np.ndarray:
    """Return the height of the most recent common ancestor of each set of taxa in each tree, `(samples, sets)`."""
    lengths, topologies = _lengths_of(sample), sample.topologies
    parents, rows = topologies.parents[sample.index], np.arange(len(lengths))
    depths = np.zeros((len(lengths), topologies.num_edges + 1))
    for node in reversed(range(topologies.num_edges)):
        depths[:, node] = depths[rows, parents[:, node]] + lengths[:, node]
    heights = depths.max(1, keepdims=True) - depths
    found = np.empty((len(lengths), len(sets)))
    for place, one in enumerate(sets):
        # Nodes are ordered by size: the first that holds all is the ancestor.
        holds = ((one & ~topologies.below) == 0).all(-1)
        ancestor = np.where(holds.any(1), holds.argmax(1), topologies.num_edges)
        found[:, place] = heights[rows, ancestor[sample.index]]
    return found


def summarised(places: np.ndarray, values: np.ndarray, weights: np.ndarray, count: int) -> WeightedSummary:
    """Summarise values `(samples, m)` of the quantities at `places` `(samples, m)`; places from `count` on are none."""
    used = (places < count) & (weights[:, None] > 0)
    values, numbers = values[used], places[used]
    held = np.broadcast_to(weights[:, None], used.shape)[used]
    order = np.lexsort((values, numbers))
    ends = np.searchsorted(numbers[order], np.arange(count + 1))
    rows = np.full((count, 4), np.nan)
    for place, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        if start < end:
            rows[place] = _summary(values[order[start:end]], held[order[start:end]])
    return WeightedSummary(rows[:, 0], rows[:, 1], rows[:, 2:])


def _summary(values: np.ndarray, weights: np.ndarray) -> tuple[float, float, float, float]:
    """Return mean, median and 95 % interval of sorted values `(m,)` with weights `(m,)` above zero."""
    total = np.append(0.0, np.cumsum(weights)) / weights.sum()
    total[-1] = 1.0
    # Sums of weights are subject to rounding. Between two halves of the weight, the median is in the middle.
    halves = np.searchsorted(total[1:], [0.5 - 1e-9, 0.5 + 1e-9])
    last = np.searchsorted(total, total[:-1] + 0.95 - 1e-9) - 1
    first = np.flatnonzero(last < len(values))
    start = first[np.argmin(values[last[first]] - values[first])]
    mean = float(values @ weights / weights.sum())
    return mean, float(values[halves].mean()), float(values[start]), float(values[last[start]])
