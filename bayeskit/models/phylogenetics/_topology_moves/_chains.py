"""Markov chains over unrooted topologies and branch lengths: their states, moves and interface, and compiled code."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bayeskit.extend import FLAGS, raise_for_status, standard_gamma
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._compiled_code import load_or_warn
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._topology_moves._reference import TreeReference

#: Branch lengths of a tree that has none.
FIRST_LENGTH = 0.05
_SOURCES = (Path(__file__).with_name("chain.cpp"), Path(__file__).parents[1] / "_pruning" / "lanes.h")
_FLAGS = (*FLAGS, "-std=c++17", "-fno-math-errno", "-fno-trapping-math")


class Trees(NamedTuple):
    """States of chains; node `i` of a tree is tip `i`, edge `i` ends in tip `i`."""

    ends: Tensor  # nodes at both ends of each edge, (chains, edges, 2), int32
    lengths: Tensor  # set after set, (chains, sets * edges), float64
    focus: Tensor  # edge of the last local move, (chains,), int64
    log_likelihood: Tensor  # (chains,), float64
    splits: Tensor  # taxa on the side of each edge without the first taxon, as bits, (chains, edges, words), int64
    random: Tensor  # states of the generators, (chains, 4), int64
    counts: Tensor  # proposed and accepted moves of each kind, (chains, moves, 2), int64
    log_reference: Tensor  # log density of the reference distribution, (chains,), float64


class Process(NamedTuple):
    """Substitution process of each part of the sites in each chain: its rate matrix, decomposed, and rates of sites."""

    eigenvalues: Tensor  # (chains, parts, states)
    right: Tensor  # eigenvectors as columns, (chains, parts, states, states)
    left: Tensor  # inverse of `right`
    frequencies: Tensor  # (chains, parts, states)
    rates: Tensor  # of the categories of one part after those of another, (chains, all categories)
    weights: Tensor  # (chains, all categories)
    invariant: Tensor  # proportion of invariant sites, (chains, parts)
    categories: Tensor  # number of those of each part, (chains, parts), int64

    @classmethod
    def of(
        cls, rate_matrix: Tensor, frequencies: Tensor, categories: Any = None, num_states: int | None = None
    ) -> Process:
        """Decompose reversible rate matrices `(chains, states, states)`; `categories` are those of the site rates.

        Up to `num_states`, there are further states that never occur. Eigenvalues are NaN where extreme parameters give
        rates that are no numbers.
        """
        root = frequencies.sqrt()
        symmetric = root[..., :, None] * rate_matrix / root[..., None, :]
        symmetric = (symmetric + symmetric.mT) / 2
        finite = symmetric.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], symmetric, 0.0))
        values = torch.where(finite[:, None], values, torch.nan)
        chains = len(frequencies)
        if categories is None:
            rates = weights = frequencies.new_ones(chains, 1)
            invariant = frequencies.new_zeros(chains)
        else:
            rates, weights = (part.expand(chains, part.shape[-1]) for part in categories[:2])
            none = frequencies.new_zeros(())
            invariant = (none if categories.invariant is None else categories.invariant).expand(chains)
        right, left = vectors / root[..., :, None], vectors.mT * root[..., None, :]
        more = 0 if num_states is None else num_states - frequencies.shape[-1]
        of_part = [functional.pad(part, (0, more))[:, None] for part in (values, frequencies)]
        of_part[1:1] = [functional.pad(part, (0, more, 0, more))[:, None] for part in (right, left)]
        number = torch.full((chains, 1), rates.shape[1])
        return cls(*[*of_part, rates, weights, invariant[:, None], number])

    @classmethod
    def joined(cls, processes: Sequence[Process]) -> Process:
        """Return the processes of several parts as one."""
        return cls(*(torch.cat(fields, 1) for fields in zip(*processes, strict=True)))

    @property
    def is_finite(self) -> Tensor:
        """Whether all rates are numbers, `(chains,)`."""
        return self.eigenvalues.isfinite().flatten(1).all(1)


@dataclass(frozen=True)
class LengthPrior:
    """Branch lengths `t` of sum `L` with log density `sum (shape - 1) log t - rate L + power log L` and a constant.

    Covers independent exponential and gamma distributions and the gamma-Dirichlet distribution.
    """

    pendant: float = 1.0  # shape of the edges of tips
    inner: float = 1.0  # shape of the other edges
    rate: float = 10.0
    power: float = 0.0

    def log_density(self, lengths: Tensor, num_taxa: int) -> Tensor:
        """Return the log density of one or several independent sets, `(*batch, sets * edges) -> (*batch)`."""
        of_sets = lengths.unflatten(-1, (-1, 2 * num_taxa - 3))
        return self._of_one_set(of_sets, num_taxa).sum(-1)

    def _of_one_set(self, lengths: Tensor, num_taxa: int) -> Tensor:
        logs, total, others = lengths.log(), lengths.sum(-1), lengths.shape[-1] - num_taxa
        pendant, inner = logs[..., :num_taxa].sum(-1), logs[..., num_taxa:].sum(-1)
        shapes = num_taxa * self.pendant + others * self.inner
        constant = (
            math.lgamma(shapes)
            - math.lgamma(shapes + self.power)
            + (shapes + self.power) * math.log(self.rate)
            - num_taxa * math.lgamma(self.pendant)
            - others * math.lgamma(self.inner)
        )
        lengths_alone = (self.pendant - 1) * pendant + (self.inner - 1) * inner
        return constant + lengths_alone - self.rate * total + self.power * total.log()


@dataclass(frozen=True)
class Moves:
    """Relative frequencies of the kinds of moves.

    Attributes
    ----------
    length : float
        One branch length, from a gamma distribution that matches the first two derivatives of its log density.
    exchange : float
        Nearest-neighbour interchange: one of three topologies, and the inner edge's length.
    likelihood_regraft : float
        Subtree pruning and regrafting, among the places with few more changes than the best by the likelihood.
    parsimony_regraft : float
        The same by the number of changes.
    near_regraft : float
        The same by the distance only (extending subtree pruning and regrafting).
    reconnection : float
        Tree bisection and reconnection, by the number of changes.
    scale : float
        All branch lengths of a set times a common factor.
    independent : float
        A tree drawn from the reference distribution, once there is one; until then, `length`.
    """

    length: float = 1.0
    exchange: float = 3.0
    likelihood_regraft: float = 0.3
    parsimony_regraft: float = 0.3
    near_regraft: float = 0.3
    reconnection: float = 0.1
    scale: float = 0.01
    independent: float = 0.5


class _Data(ctypes.Structure):
    """The data, in the order of the struct of the same name in the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("taxa", "patterns")),
        *((name, ctypes.c_void_p) for name in ("masks", "weights")),
        ("num_parts", ctypes.c_int64),
        ("part_sizes", ctypes.c_void_p),
        ("conditioned", ctypes.c_void_p),
        ("num_sets", ctypes.c_int64),
        ("part_sets", ctypes.c_void_p),
        ("num_constraints", ctypes.c_int64),
        ("constraints", ctypes.c_void_p),
    ]


class _Sample(ctypes.Structure):
    """A reference distribution, in the order of the struct of the same name in the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("taxa", "clades", "subsplits", "num_sets")),
        *((name, ctypes.c_void_p) for name in ("bits", "shape", "rate")),
        *((name, ctypes.c_void_p) for name in ("parent", "child", "count")),
        ("num_constraints", ctypes.c_int64),
        ("constraints", ctypes.c_void_p),
    ]


_STATE = ("ends", "lengths", "random", "focus", "log_likelihood", "counts")
_PROCESS = ("eigenvalues", "right", "left", "frequencies", "rates", "weights", "invariant", "categories")


class _Call(ctypes.Structure):
    """The arguments, in the order of the struct of the same name in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_STATE, *_PROCESS)),
        ("beta", ctypes.c_double),
        ("reference", ctypes.c_void_p),
        ("share", ctypes.c_double),
        ("log_reference", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("pendant", "inner", "rate", "power")),
        ("shares", ctypes.c_void_p),
        ("steps", ctypes.c_int64),
        ("splits", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
    ]


@lru_cache
def compiled_code(num_states: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load the compiled code; warn once and return None on failure, as without a compiler."""
    sources = {source.name: source.read_text(encoding="utf-8") for source in _SOURCES}
    real = "float" if dtype == torch.float32 else "double"
    flags = (*_FLAGS, f"-DREAL={real}", f"-DSTATES={num_states}")
    argument = ("size_of_call", ctypes.sizeof(_Call))
    library = load_or_warn("tree_chain", sources, flags, argument, "chains over tree topologies")
    if library is not None:
        return_pointers(library)
    return library


def return_pointers(library: ctypes.CDLL) -> None:
    """Let the functions that make something return its address."""
    for make in (library.make_chain, library.make_room, library.make_reference):
        make.restype = ctypes.c_void_p


class TreeChains(ABC):
    """Several chains over the topologies of an alignment, each with a power of the likelihood of its own.

    `run` depends on its arguments alone.

    Parameters
    ----------
    masks : ndarray
        Allowed states of each taxon and site pattern as bits, shape `(taxa, patterns)`.
    weights : ndarray
        Number of sites of each pattern, shape `(patterns,)`.
    num_states : int
        The largest of the parts; to others, states are added that never occur.
    num_chains : int
    prior : LengthPrior
    parts : sequence of int, optional
        Number of patterns of each part of the sites, which follow each other; by default there is one part.
    conditioned : sequence of float, optional
        For a part of patterns that cannot be in the data, the number of sites that are therefore none of them, and 0
        for a part of the data; the weights are then numbers of patterns of the same probability. By default all 0.
    part_sets : sequence of int, optional
        For each part, which of the independent sets of branch lengths it has, counted from 0; by default there is one.
    constraints : ndarray, optional
        Splits that every tree has, as bits without the first taxon, shape `(constraints, words)`.
    dtype : torch.dtype
        Of the partial likelihoods: float64, or float32 with errors of the log-likelihood of some 1e-7 per site.
    num_threads : int, default 1
        Changes nothing but the time.
    """

    def __init__(
        self,
        masks: np.ndarray,
        weights: np.ndarray,
        num_states: int,
        num_chains: int,
        prior: LengthPrior,
        *,
        parts: Sequence[int] | None = None,
        conditioned: Sequence[float] | None = None,
        part_sets: Sequence[int] | None = None,
        constraints: clades.Bits | None = None,
        dtype: torch.dtype = torch.float64,
        num_threads: int = 1,
    ) -> None:
        self.num_chains, self.num_taxa, self.prior, self.num_threads = num_chains, len(masks), prior, num_threads
        self.num_edges, self.num_states, self.dtype = 2 * self.num_taxa - 3, num_states, dtype
        self.masks = np.ascontiguousarray(masks, dtype=np.uint64)
        self.weights = np.ascontiguousarray(weights, dtype=np.float64)
        self.sizes = np.array([masks.shape[1]] if parts is None else parts, dtype=np.int64)
        self.conditioned = np.array([0.0] * len(self.sizes) if conditioned is None else conditioned, dtype=np.float64)
        self.part_sets = np.array([0] * len(self.sizes) if part_sets is None else part_sets, dtype=np.int64)
        self.num_sets = int(self.part_sets.max()) + 1
        none = np.zeros((0, clades.num_words(self.num_taxa)), dtype=np.uint64)
        self.constraints = none if constraints is None else np.unique(constraints, axis=0)

    def start(self, generator: torch.Generator, process: Process) -> Trees:
        """Return trees by stepwise addition in random order, each taxon where it adds fewest changes.

        Branch lengths are 0.05.
        """
        trees, ones = self._unmoved(generator), torch.ones(self.num_chains, dtype=torch.float64)
        trees = self._grown(trees, process, range(self.num_chains), True)
        return self.run(trees, process, ones, Moves(), 0)

    def start_at(self, topologies: Topologies, lengths: Tensor, generator: torch.Generator, process: Process) -> Trees:
        """Return given trees, one for each chain, with lengths `(chains, edges)` in the order of `Topologies`.

        All sets have the same lengths.
        """
        chains, edges = lengths.shape
        ends = torch.stack([torch.arange(edges).expand(chains, -1), torch.from_numpy(topologies.parents)], -1).int()
        trees = self._unmoved(generator)._replace(ends=ends, lengths=lengths.to(torch.float64).repeat(1, self.num_sets))
        return self.run(trees, process, torch.ones(chains, dtype=torch.float64), Moves(), 0)

    def _unmoved(self, generator: torch.Generator) -> Trees:
        """Return states without a tree."""
        chains, edges = self.num_chains, self.num_edges
        return Trees(
            torch.zeros(chains, edges, 2, dtype=torch.int32),
            torch.full((chains, self.num_sets * edges), FIRST_LENGTH, dtype=torch.float64),
            torch.zeros(chains, dtype=torch.int64),
            torch.zeros(chains, dtype=torch.float64),
            torch.zeros(chains, edges, clades.num_words(self.num_taxa), dtype=torch.int64),
            torch.randint(1, 2**63 - 1, (chains, 4), generator=generator, dtype=torch.int64),  # not all zero
            torch.zeros(chains, len(astuple(Moves())), 2, dtype=torch.int64),
            torch.zeros(chains, dtype=torch.float64),
        )

    def draw(
        self,
        trees: Trees,
        process: Process,
        chains: Sequence[int],
        generator: torch.Generator,
        reference: TreeReference | None = None,
    ) -> Trees:
        """Replace the trees of some chains by draws from the prior, or from the reference.

        Their log-likelihood stays that of before.
        """
        if reference is not None:
            return self._drawn(trees, process, chains, reference)
        prior, tips = self.prior, self.num_taxa
        shape = torch.full((len(chains), self.num_sets, self.num_edges), prior.inner, dtype=torch.float64)
        shape[..., :tips] = prior.pendant
        parts = standard_gamma(shape, generator=generator)
        total = standard_gamma(shape.sum(-1, keepdim=True) + prior.power, generator=generator) / prior.rate
        lengths = trees.lengths.clone()
        lengths[list(chains)] = (total * parts / parts.sum(-1, keepdim=True)).clamp(min=1e-30).flatten(1)
        return self._grown(trees._replace(lengths=lengths), process, chains, False)

    @abstractmethod
    def run(
        self,
        trees: Trees,
        process: Process,
        beta: Tensor,
        moves: Moves,
        num_moves: int | Tensor,
        reference: TreeReference | None = None,
    ) -> Trees:
        """Return the states after some moves of each chain, `(chains,)`; with none, with their log-likelihood.

        The chains' densities are the likelihood to the power `beta` times the prior; with a reference distribution, the
        likelihood and the prior to the power `beta` times the reference to the power `1 - beta`.
        """

    @abstractmethod
    def _grown(self, trees: Trees, process: Process, chains: Sequence[int], by_parsimony: bool) -> Trees:
        """Return some chains' trees by stepwise addition with the same lengths, by parsimony or at random."""

    @abstractmethod
    def _drawn(self, trees: Trees, process: Process, chains: Sequence[int], reference: TreeReference) -> Trees:
        """Return draws from the reference as trees of some chains."""


class CompiledChains(TreeChains):
    """Chains in compiled code, as `library`, which are moved one after another or in threads.

    Partial likelihoods of the states that `run` returned last are kept, unless they need much memory: then chains have
    room for them in turns, and make them anew, with the same bits.
    """

    def __init__(self, library: ctypes.CDLL, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._library = library
        self._reference: tuple[TreeReference, ctypes.c_void_p, Callable[[], Any]] | None = None
        of_parts = (len(self.sizes), self.sizes.ctypes.data, self.conditioned.ctypes.data)
        of_sets = (self.num_sets, self.part_sets.ctypes.data)
        of_splits = (len(self.constraints), self.constraints.ctypes.data)
        data = _Data(
            *self.masks.shape, self.masks.ctypes.data, self.weights.ctypes.data, *of_parts, *of_sets, *of_splits
        )
        self._chains = list[ctypes.c_void_p]()
        for _ in range(self.num_chains):
            self._chains.append(_made(library.make_chain(ctypes.byref(data))))
            finalize(self, library.delete_chain, self._chains[-1])
        self._rooms = list[ctypes.c_void_p]()  # of each chain; of each thread if they need much memory

    def run(
        self,
        trees: Trees,
        process: Process,
        beta: Tensor,
        moves: Moves,
        num_moves: int | Tensor,
        reference: TreeReference | None = None,
    ) -> Trees:
        """Return the states after some moves of each chain."""
        counts = torch.as_tensor(num_moves).expand(self.num_chains)
        chains = range(self.num_chains)
        return self._call(self._library.run_chain, trees, process, beta, moves, counts, chains, reference)

    def _grown(self, trees: Trees, process: Process, chains: Sequence[int], by_parsimony: bool) -> Trees:
        beta = torch.full((self.num_chains,), float(by_parsimony), dtype=torch.float64)
        return self._call(self._library.grow_tree, trees, process, beta, Moves(), 0 * beta, chains, None)

    def _drawn(self, trees: Trees, process: Process, chains: Sequence[int], reference: TreeReference) -> Trees:
        zero = torch.zeros(self.num_chains, dtype=torch.float64)
        return self._call(self._library.draw_tree, trees, process, zero, Moves(), zero, chains, reference)

    def _as_pointer(self, reference: TreeReference | None) -> ctypes.c_void_p | None:
        """Return the compiled form of a reference, which is made once."""
        if reference is None:
            return None
        if self._reference is None or self._reference[0] is not reference:
            if self._reference is not None:
                self._reference[2]()
            parts = [part.contiguous() for part in reference]
            bits, shape, rate, parent, child, count = (part.data_ptr() for part in parts)
            sizes = (self.num_taxa, len(reference.clades), len(reference.weight), self.num_sets)
            limits = (len(self.constraints), self.constraints.ctypes.data)
            sample = _Sample(*sizes, bits, shape, rate, parent, child, count, *limits)
            pointer = _made(self._library.make_reference(ctypes.byref(sample)))
            self._reference = (reference, pointer, finalize(self, self._library.delete_reference, pointer))
        return self._reference[1]

    def _call(
        self,
        function: Callable[..., Any],
        trees: Trees,
        process: Process,
        beta: Tensor,
        moves: Moves,
        num_moves: Tensor,
        chains: Sequence[int],
        reference: TreeReference | None,
    ) -> Trees:
        trees = Trees(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in trees))
        shares = torch.tensor(list(vars(moves).values()), dtype=torch.float64)
        state = trees._asdict()
        model = {
            name: (tensor if name == "categories" else tensor.to(torch.float64)).contiguous()
            for name, tensor in process._asdict().items()
        }
        passed = [*(state[name] for name in _STATE), *(model[name] for name in _PROCESS)]
        passed += [state["log_reference"], state["splits"]]
        starts = [(part.data_ptr(), part.stride(0) * part.element_size()) for part in passed]
        pointer = self._as_pointer(reference)
        powers = beta.tolist()
        counts, prior = num_moves.long().tolist(), vars(self.prior).values()

        free = self._free_rooms(process)

        def one(chain: int) -> None:
            *places, density, splits = (start + chain * size for start, size in starts)
            share = 0.0 if pointer is None else 1 - powers[chain]
            path = (powers[chain], pointer, share, density)
            room = self._rooms[chain] if free is None else free.get()
            call = _Call(*places, *path, *prior, shares.data_ptr(), counts[chain], splits, room)
            try:
                raise_for_status(function(self._chains[chain], ctypes.byref(call)), "chains over tree topologies")
            finally:
                if free is not None:
                    free.put(room)

        if self.num_threads == 1:
            for chain in chains:
                one(chain)
        else:
            with ThreadPoolExecutor(self.num_threads) as pool:
                list(pool.map(one, chains))
        return trees

    def _free_rooms(self, process: Process) -> SimpleQueue[ctypes.c_void_p] | None:
        """Return the rooms that chains share, one for each thread, or None where each chain has its own."""
        # Twice three blocks of each inner node, and those of candidate places.
        size = (int(process.categories.max()) * self.num_states + 1) * self.masks.shape[1] * self.dtype.itemsize
        shared = self.num_chains * 8 * self.num_taxa * size > _MOST_BYTES
        for _ in range(len(self._rooms), self.num_threads if shared else self.num_chains):
            self._rooms.append(_made(self._library.make_room()))
            finalize(self, self._library.delete_room, self._rooms[-1])
        if not shared:
            return None
        free = SimpleQueue[ctypes.c_void_p]()
        for room in self._rooms:
            free.put(room)
        return free


#: Memory for partial likelihoods of all chains above which these share it.
_MOST_BYTES = 2**28


def _made(address: int | None) -> ctypes.c_void_p:
    """Return the pointer to what compiled code has made; raise ``MemoryError`` if it is null."""
    raise_for_status(int(address is None), "chains over tree topologies")
    return ctypes.c_void_p(address)


def topologies_of(taxa: Sequence[str], splits: Tensor) -> tuple[Topologies, np.ndarray]:
    """Return topologies from splits `(trees, edges, words)`, and the edge of each of their edges, `(trees, edges)`."""
    return Topologies.from_edges(taxa, splits.numpy().view(np.uint64), rooted=False)
