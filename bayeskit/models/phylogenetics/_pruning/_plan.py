"""Plans for the passes of pruning: distinct sub-patterns of sets of taxa, and the rows of each node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._topologies import Topologies

# Distinct sub-patterns of sets of taxa, cached: whether two site patterns are equal at a node depends only on the
# *taxa* below it, so that a new topology made of known sets needs no search. If all changes between four bases are
# equally likely, patterns that differ only by a renaming of the bases count as equal. The renamings that leave a
# sub-pattern unchanged permute bases within the blocks of one of the fifteen partitions of the bases. Other numbers of
# states have too many renamings; of these only the identity is used.

#: A code is `row * CODE_BASE + renaming`.
CODE_BASE = 32
_PARTITIONS = [labels for labels in itertools.product(range(4), repeat=4) if labels == tuple(map(labels.index, labels))]


class Renamings(NamedTuple):
    """A group of renamings of the states, with lookup tables: all of four bases, or the identity."""

    # A set of renamings is a bit mask; a *stabiliser* is the index of a group in `stabilizers`.

    images: NDArray[np.int64]  # [g, i]: image of state i under renaming g; renaming 0 is the identity
    relative: NDArray[np.int64]  # [g, h]: h first, then the inverse of g
    stabilizers: NDArray[np.int64]  # each stabiliser as a set, ascending
    coset: NDArray[np.int64]  # [s, t, g]: smallest product a g b with a in s and b in t, b applied first
    carriers: NDArray[np.int64]  # [s, g, h]: set of all renamings that turn h x into g x, if s leaves x unchanged
    first: NDArray[np.int64]  # [bit % 37]: number of the renaming with that bit; 37 tells powers of two apart
    reading: NDArray[np.int64]  # [g, i]: state that renaming g turns into i
    tips: NDArray[np.int64] | None  # [a, b]: set of all renamings that turn the set of bases a into b

    @classmethod
    @lru_cache
    def of(cls, interchangeable: bool, num_states: int = 4) -> Renamings:
        """Return all renamings of four interchangeable bases, else the identity only."""
        if not interchangeable or num_states != 4:
            none, states = np.zeros((1, 1, 1), dtype=np.int64), np.arange(num_states)[None]
            return cls(states, none[0], none[0, 0] + 1, none, none + 1, np.zeros(37, dtype=np.int64), states, None)
        images = np.array(list(itertools.permutations(range(4))))
        number = {tuple(image): place for place, image in enumerate(images.tolist())}
        product = np.array([[number[tuple(g[h].tolist())] for h in images] for g in images])
        inverse = (product == 0).argmax(axis=1)
        bits = 1 << np.arange(len(images))
        labels = np.array(_PARTITIONS)
        inside = (labels[:, images] == labels[:, None]).all(axis=-1)
        stabilizers = np.unique(inside @ bits)
        inside = (stabilizers[:, None] & bits) != 0
        relative = product[inverse]
        # coset[s, t, g]: over all a in s and b in t, the smallest a g b.
        reached = product[product]  # [a, g, b]
        allowed = inside[:, None, :, None, None] & inside[None, :, None, None, :]
        coset = np.where(allowed, reached, len(images)).min(axis=(2, 4))
        # carriers[s, g, h]: k with inverse(g) k h in s.
        between = product[product[inverse][:, :, None], np.arange(len(images))]  # [g, k, h]
        carriers = np.einsum("sgkh,k->sgh", inside[:, between], bits)
        sets = np.arange(16)
        renamed = np.zeros((16, len(images)), dtype=np.int64)
        for base in range(4):
            renamed |= ((sets[:, None] >> base) & 1) << images[None, :, base]
        tips = (renamed[:, None] == sets[:, None]) @ bits
        first = np.zeros(37, dtype=np.int64)
        first[bits % 37] = np.arange(len(images))
        return cls(images, relative, stabilizers, coset, carriers, first, images[inverse], tips)

    def smallest(self, sets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the smallest renaming of each set."""
        return self.first[(sets & -sets) % 37]


class Rows(NamedTuple):
    """The distinct sub-patterns of one set of taxa."""

    codes: NDArray[np.int64]  # `row * CODE_BASE + renaming` of each pattern from the representative, (patterns,)
    representatives: NDArray[np.int64]  # a pattern that shows each row, (rows,)
    stabilizers: NDArray[np.int64]  # stabiliser of each row's representative, (rows,)


def tip_rows(masks: NDArray[Any], group: Renamings) -> Rows:
    """Find the rows of a single taxon from the set of states that each pattern shows."""
    if group.tips is None:
        _, first, row = np.unique(masks, return_index=True, return_inverse=True)
        return Rows(row * CODE_BASE, first, np.zeros(len(first), dtype=np.int64))
    smallest = (group.tips != 0).argmax(axis=1)  # sets are equal up to renaming if their smallest renamed sets are
    _, first, row = np.unique(smallest[masks], return_index=True, return_inverse=True)
    renaming = group.smallest(group.tips[masks[first][row], masks])
    own = group.tips[masks[first], masks[first]]
    return Rows(row * CODE_BASE + renaming, first, np.searchsorted(group.stabilizers, own))


def join_rows(one: Rows, other: Rows, group: Renamings) -> Rows:
    """Find the rows of the union of two disjoint sets of taxa."""
    # Codes may be stored in 32 bits, which the keys of pairs of rows exceed.
    row_a, renaming_a = np.divmod(one.codes.astype(np.int64), CODE_BASE)
    row_b, renaming_b = np.divmod(other.codes.astype(np.int64), CODE_BASE)
    kept_a, kept_b = one.stabilizers[row_a], other.stabilizers[row_b]
    # Two pairs of sub-patterns are equal if the same renaming maps both parts.
    between = group.coset[kept_a, kept_b, group.relative[renaming_a, renaming_b]]
    keys = (row_a * len(other.representatives) + row_b) * CODE_BASE + between
    _, first, row = np.unique(keys, return_index=True, return_inverse=True)
    # Rows in the order of their patterns, whatever the two parts: sums over rows are the same to the last bit.
    place = np.argsort(first)
    first, row = first[place], np.argsort(place)[row]
    shown = first[row]
    serves = (
        group.carriers[kept_a, renaming_a, renaming_a[shown]] & group.carriers[kept_b, renaming_b, renaming_b[shown]]
    )
    return Rows(
        row * CODE_BASE + group.smallest(serves),
        first,
        np.searchsorted(group.stabilizers, serves[first]),
    )


# Plans of traversal of many topologies: the root of each topology, and the rows of each of its edges.

#: Bytes that one pattern takes in a slot: a code, a representative, a weight and a stabiliser.
_BYTES = 4 + 4 + 8 + 1
_MOST_SLOTS = 2**16


class Hanging(NamedTuple):
    """Unrooted topologies with their central internal node as root."""

    order: NDArray[np.int32]  # internal edges, lower edges first, (topologies, n - 3)
    factors: NDArray[np.int32]  # the two edges below each edge of `order`, (topologies, n - 3, 2)
    roots: NDArray[np.int32]  # the three edges at the root, (topologies, 3)
    sets: clades.Bits  # taxa below each edge of `order`, (topologies, n - 3, words), uint64


def hang(topologies: Topologies) -> Hanging:
    """Root topologies at the node with at most half of the taxa on each side."""
    num_taxa, num_edges = topologies.num_taxa, topologies.num_edges
    trees = np.arange(len(topologies))
    # With the last node as root, edge i has node i at its lower end; the last node is not the lower end of an edge.
    internal = topologies.below[:, num_taxa:]
    large = 2 * clades.size(internal) >= num_taxa
    root = num_taxa + np.where(large.any(axis=1), large.argmax(axis=1) if num_taxa > 3 else 0, num_edges - num_taxa)
    last = root == num_edges
    inside = internal[trees, np.minimum(root, num_edges - 1) - num_taxa] if num_taxa > 3 else internal[:, 0:0]
    # Edges from the new root up to the old root are reversed.
    turned = ((inside[:, None] & ~internal) == 0).all(axis=-1) & ~last[:, None] if num_taxa > 3 else large
    edges = np.arange(num_taxa, num_edges)
    order = np.argsort(np.where(turned, 2 * num_edges - edges, edges), axis=1, kind="stable")
    parents = topologies.parents[:, num_taxa:]
    siblings = topologies.children[trees[:, None], parents - num_taxa].sum(axis=-1) - edges
    # Above the old root there is only the first taxon.
    upper = np.where(parents == num_edges, 0, parents)
    factors = np.where(turned[..., None], np.stack([siblings, upper], axis=-1), topologies.children[:, :-1])
    sets = np.where(turned[..., None], clades.everything(num_taxa) & ~internal, internal)
    roots = np.concatenate([topologies.children[trees, root - num_taxa], np.where(last, 0, root)[:, None]], axis=1)
    return Hanging(
        order=(order + num_taxa).astype(np.int32),
        factors=np.take_along_axis(factors, order[..., None], axis=1).astype(np.int32),
        roots=roots.astype(np.int32),
        sets=np.take_along_axis(sets, order[..., None], axis=1),
    )


class SubPatterns:
    """Cache of the rows of sets of taxa, in slots of fixed tables; a full table drops the least recently used set.

    Hold `lock` from the making of a plan until its last use, because the next plan may reuse its slots.
    """

    def __init__(
        self,
        taxa: Sequence[str],
        masks: NDArray[Any],
        weights: NDArray[np.float64],
        interchangeable: bool,
        num_bytes: int,
        num_states: int = 4,
    ) -> None:
        # `masks` are sets of states as bits, (taxa, patterns), `weights` numbers of sites, (patterns,).
        self.taxa, self.num_states = tuple(taxa), num_states
        self.masks = np.ascontiguousarray(masks, dtype=np.uint8 if num_states <= 8 else np.int64)
        num_taxa, num_patterns = masks.shape
        self.group = Renamings.of(interchangeable, num_states)
        self._pattern_weights = weights
        fixed = num_taxa + 1
        # At least one topology fits.
        self.capacity = max(fixed + num_taxa, min(num_bytes // (num_patterns * _BYTES), _MOST_SLOTS))
        shape = (self.capacity, num_patterns)
        # Slot i belongs to taxon i, slot n to all n taxa. By slot: the code of each pattern, and for each row a pattern
        # that shows it and its number of sites; the first `counts` of a slot are used. The operating system allocates
        # the memory of an empty table only when it is written.
        self.codes, self.representatives = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.int32)
        self.weights, self._stabilizers = np.empty(shape), np.empty(shape, dtype=np.uint8)
        self.counts = np.zeros(self.capacity, dtype=np.int64)  # number of rows of each slot
        self._used = np.full(self.capacity, -1)  # number of the last call that used the slot
        self._used[:fixed] = np.iinfo(np.int64).max
        self._calls = 0
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.lock = Lock()
        tips = [tip_rows(row, self.group) for row in self.masks]
        for slot, rows in enumerate(tips):
            self._store(slot, rows)
        whole = tips[0]
        for rows in tips[1:]:
            whole = join_rows(whole, rows, self.group)
        self._store(num_taxa, whole)
        self._next = fixed

    def of_site(self, masks: NDArray[np.int64]) -> SubPatterns:
        """Return the tables of one site with a set of states for each taxon, `(taxa,)`."""
        room = len(self.taxa) * self.num_topologies
        uniform = self.group.tips is not None
        return SubPatterns(self.taxa, masks[:, None], np.ones(1), uniform, room * _BYTES, self.num_states)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the lock, which cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=Lock())

    @property
    def num_topologies(self) -> int:
        """Number of topologies that fit into the tables at a time, even if they share no set."""
        num_taxa = len(self.taxa)
        return (self.capacity - num_taxa - 1) // max(1, num_taxa - 3)

    @property
    def num_root_rows(self) -> int:
        """Number of rows of all taxa together."""
        return int(self.counts[len(self.taxa)])

    @property
    def root_weights(self) -> NDArray[np.float64]:
        """Number of sites of each row of all taxa together, `(rows,)`."""
        return self.weights[len(self.taxa), : self.num_root_rows]

    @property
    def constant(self) -> NDArray[np.float64]:
        """The states that all taxa allow in each row of all taxa together, entries 0 and 1, `(rows, states)`."""
        shown = self.representatives[len(self.taxa), : self.num_root_rows]
        common = np.bitwise_and.reduce(self.masks[:, shown], axis=0)
        return ((common[:, None] >> np.arange(self.num_states)) & 1).astype(np.float64)

    def find(self, hanging: Hanging) -> NDArray[np.int32]:
        """Return the slot of the taxa below each edge, `(topologies, edges)`, int32, valid until the next call."""
        count, internal = hanging.order.shape
        num_taxa = len(self.taxa)
        width = hanging.sets.shape[-1] * 8
        text = hanging.sets.tobytes()
        keys = [text[start : start + width] for start in range(0, len(text), width)]
        known = self._slot_of
        found = np.array([known.get(key, -1) for key in keys], dtype=np.int32).reshape(count, internal)
        slots = np.empty((count, num_taxa + internal), dtype=np.int32)
        slots[:, :num_taxa] = np.arange(num_taxa)
        np.put_along_axis(slots, hanging.order, found, axis=1)
        self._calls += 1
        missing = np.flatnonzero(found < 0)
        self._used[found[found >= 0]] = self._calls
        for place in missing.tolist():
            tree, position = divmod(place, internal)
            slot = known.get(keys[place])
            if slot is None:
                one, other = slots[tree, hanging.factors[tree, position]]
                slot = self._add(keys[place], join_rows(self._load(one), self._load(other), self.group))
            self._used[slot] = self._calls
            slots[tree, hanging.order[tree, position]] = slot
        return slots

    def _add(self, key: bytes, rows: Rows) -> int:
        if self._next < self.capacity:
            slot = self._next
            self._next += 1
        else:
            slot = int(self._used.argmin())
            self._slot_of.pop(self._key_of.pop(slot, b""), None)
        self._store(slot, rows)
        # Keys are stored last, so that after an interruption no key refers to an incomplete slot.
        self._key_of[slot] = key
        self._slot_of[key] = slot
        return slot

    def _store(self, slot: int, rows: Rows) -> None:
        count = len(rows.representatives)
        self.counts[slot] = count
        self.codes[slot] = rows.codes
        self.representatives[slot, :count] = rows.representatives
        self._stabilizers[slot, :count] = rows.stabilizers
        self.weights[slot, :count] = np.bincount(rows.codes // CODE_BASE, self._pattern_weights, count)

    def _load(self, slot: int) -> Rows:
        count = self.counts[slot]
        return Rows(self.codes[slot], self.representatives[slot, :count], self._stabilizers[slot, :count])


class PruningPlan(NamedTuple):
    """Rooted topologies and the rows of their edges."""

    patterns: SubPatterns
    hanging: Hanging
    slots: NDArray[np.int32]  # slot of the taxa below each edge, (topologies, edges)


def make_plan(topologies: Topologies, patterns: SubPatterns) -> PruningPlan:
    """Root at most `patterns.num_topologies` unrooted topologies and find their rows, with `patterns.lock` held."""
    hanging = hang(topologies)
    return PruningPlan(patterns, hanging, patterns.find(hanging))
