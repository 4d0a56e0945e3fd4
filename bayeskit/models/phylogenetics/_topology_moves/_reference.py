"""Reference distribution of a path to the posterior: clades, subsplits and branch lengths of a sample of trees."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._topologies import Topologies

#: Weight of the mean over all clades in the fit of a clade's branch length, in draws.
_SHRINKAGE = 4.0


class TreeReference(NamedTuple):
    """Distribution over topologies and branch lengths: subsplits of clades, and gamma distributions of lengths.

    Clades are the taxa below an edge, seen from the first taxon. Without clades it stands for no distribution.
    """

    clades: Tensor  # as bits, (clades, words), int64
    shape: Tensor  # of the lengths above each clade; the last is that of all other clades, (clades + 1, sets)
    rate: Tensor
    parent: Tensor  # clade of each subsplit, ascending, (subsplits,), int64
    child: Tensor  # its child with the parent's first taxon
    weight: Tensor  # total weight of the trees that have it, (subsplits,), float64

    @classmethod
    def none(cls, num_taxa: int, num_sets: int = 1) -> TreeReference:
        """Return no distribution."""
        numbers, whole = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        of_lengths = torch.zeros(0, num_sets, dtype=torch.float64)
        return cls(
            torch.zeros(0, clades.num_words(num_taxa), dtype=torch.int64), of_lengths, of_lengths, whole, whole, numbers
        )

    @classmethod
    def fitted(cls, splits: Tensor, lengths: Tensor, weights: Tensor, num_taxa: int) -> TreeReference:
        """Fit to trees: splits `(draws, edges, words)`, lengths `(draws, sets * edges)` and weights `(draws,)`."""
        taxa = tuple(str(number) for number in range(num_taxa))
        topologies, order = Topologies.from_edges(taxa, splits.numpy().view(np.uint64), rooted=False)
        sets = clades.below(topologies.children, num_taxa)[:, 1:]
        # The first taxon's edge is the last node's.
        of_sets = lengths.unflatten(1, (-1, splits.shape[1])).numpy()
        times = np.roll(np.take_along_axis(of_sets, order[:, None], axis=2), -1, axis=2)
        distinct, index = clades.identify(sets)
        edges = index.shape[1]
        weight = weights.numpy().repeat(edges)
        known = index.ravel(), weight, len(distinct), clades.size(distinct) == 1
        shape, rate = np.stack([_gamma_fits(one.ravel(), *known) for one in times.transpose(1, 0, 2)], -1)
        children = index[np.arange(len(index))[:, None, None], topologies.children - 1]
        parent = index[:, num_taxa - 1 :]
        lowest = np.array([clades.members(one)[0] for one in distinct])
        child = np.where(lowest[children[..., 0]] == lowest[parent], children[..., 0], children[..., 1])
        pairs, place = np.unique(np.stack([parent.ravel(), child.ravel()], 1), axis=0, return_inverse=True)
        total = np.bincount(place.ravel(), weights.numpy().repeat(parent.shape[1]))
        return cls(
            torch.from_numpy(distinct.view(np.int64)),
            torch.from_numpy(shape.copy()),
            torch.from_numpy(rate.copy()),
            torch.from_numpy(pairs[:, 0].copy()),
            torch.from_numpy(pairs[:, 1].copy()),
            torch.from_numpy(total),
        )


def _gamma_fits(
    times: np.ndarray, index: np.ndarray, weight: np.ndarray, count: int, pendant: np.ndarray
) -> np.ndarray:
    """Return shape and rate of each clade's lengths and of other clades', `(2, count + 1)`, shrunk to their mean."""
    number = np.bincount(index, weight, minlength=count)
    times = np.maximum(times, 1e-12)
    total = np.bincount(index, weight * times, minlength=count)
    logs = np.bincount(index, weight * np.log(times), minlength=count)
    inner = ~pendant if not pendant.all() else pendant
    typical, typical_log = (float((part[inner] / number[inner]).mean()) for part in (total, logs))
    mean = np.append((total + _SHRINKAGE * typical) / (number + _SHRINKAGE), typical)
    mean_log = np.append((logs + _SHRINKAGE * typical_log) / (number + _SHRINKAGE), typical_log)
    # Near the maximum of the likelihood of a gamma distribution (Minka 2002).
    gap = np.maximum(np.log(mean) - mean_log, 1e-6)
    shape = (3 - gap + np.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    return np.stack([shape, shape / mean])


class ReferenceDensity:
    """Draws and log densities of a reference without compiled code; sets of taxa are the bits of whole numbers.

    Each clade splits into two, independently of the rest of the tree: as in the sample or, with the weight of one tree,
    at random. Half of the splits at random are into a clade of the sample and what remains, the others as in a uniform
    distribution over the topologies with the splits `constraints`, `(constraints, words)`.
    """

    def __init__(self, reference: TreeReference, constraints: clades.Bits) -> None:
        self._constraints = sorted(set(whole_numbers(constraints)))
        self._clades = whole_numbers(reference.clades.numpy().view(np.uint64))
        self._place = {one: place for place, one in enumerate(self._clades)}
        self._shape, self._rate = reference.shape.numpy(), reference.rate.numpy()
        self._norm = self._shape * np.log(self._rate) - np.vectorize(math.lgamma)(self._shape)
        self._children: dict[int, dict[int, float]] = {}  # by clade: shares of its children with the first taxon
        for parent, child, weight in zip(*(part.tolist() for part in reference[3:]), strict=True):
            self._children.setdefault(self._clades[parent], {})[self._clades[child]] = weight
        self._at_random: dict[int, float] = {}  # by clade: probability of a split at random
        for one, weights in self._children.items():
            total = 1 + sum(weights.values())
            self._at_random[one] = 1 / total
            self._children[one] = {child: weight / total for child, weight in weights.items()}
        self.log_split = lru_cache(_KEPT)(self._log_split)
        self._choices_kept = lru_cache(_KEPT)(self._choices)

    def gammas(self, sets: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return shapes, rates and log factors of the gamma densities of lengths above clades, `(clades, sets)`."""
        rows = np.array([self._place.get(one, -1) for one in sets])
        return self._shape[rows], self._rate[rows], self._norm[rows]

    def draw_split(self, whole: int, generator: np.random.Generator) -> int:
        """Return one of the two parts of a clade."""
        left = generator.random()
        for child, share in self._children.get(whole, {}).items():
            left -= share
            if left < 0:
                return child
        units, known = self._choices_kept(whole)
        if generator.random() < 0.5:
            return known[generator.integers(len(known))]
        number = len(units)
        some = np.arange(1, number)
        logs = [
            _log_trees(one) + _log_trees(number - one) - math.lgamma(one + 1) - math.lgamma(number - one + 1)
            for one in some.tolist()
        ]
        shares = np.exp(np.array(logs) - max(logs))
        size = generator.choice(some, p=shares / shares.sum())
        return sum(units[place] for place in generator.permutation(number)[:size])

    def _log_split(self, whole: int, part: int) -> float:
        """Return the log probability that a clade splits into a part and the rest."""
        if not part & whole & -whole:  # without the first taxon
            part = whole & ~part
        share, at_random = self._children.get(whole, {}).get(part, 0.0), self._at_random.get(whole, 1.0)
        units, known = self._choices_kept(whole)
        share_of_known = ((part in self._place) + ((whole & ~part) in self._place)) / len(known)
        number, some = len(units), sum(1 for unit in units if unit & part)
        uniform = math.exp(_log_trees(some) + _log_trees(number - some) - _log_trees(number))
        return math.log(share + at_random * (0.5 * share_of_known + 0.5 * uniform))

    def _choices(self, whole: int) -> tuple[list[int], list[int]]:
        """Return the units of a clade that constraints keep together, and the clades of the sample to split off."""
        inside = [one for one in self._constraints if _holds(whole, one)]
        units = [one for one in inside if not any(_holds(other, one) for other in inside)]
        alone = whole & ~sum(units)
        known = [one for one in self._clades if _holds(whole, one) and not any(_holds(unit, one) for unit in units)]
        return units + [1 << taxon for taxon in range(alone.bit_length()) if alone >> taxon & 1], known


#: Number of clades and of splits whose numbers are kept.
_KEPT = 1 << 16


def whole_numbers(sets: clades.Bits) -> list[int]:
    """Return sets of taxa `(sets, words)` as whole numbers with the same bits."""
    return [int.from_bytes(one.tobytes(), "little") for one in sets.astype("<u8")]


def _holds(one: int, other: int) -> bool:
    """Return whether a set holds another one, and more."""
    return not other & ~one and one != other


def _log_trees(taxa: int) -> float:
    """Return the log number of rooted binary topologies."""
    return 0.0 if taxa < 3 else math.lgamma(2 * taxa - 1) - (taxa - 1) * math.log(2) - math.lgamma(taxa)
