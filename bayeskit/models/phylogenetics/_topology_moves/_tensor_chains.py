"""Markov chains over unrooted topologies and branch lengths as array operations, for machines without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._topology_moves._chains import (
    CompiledChains,
    Moves,
    Process,
    TreeChains,
    Trees,
    compiled_code,
)
from bayeskit.models.phylogenetics._topology_moves._reference import ReferenceDensity, TreeReference, whole_numbers

_Numbers = NDArray[np.float64]
_Nodes = NDArray[np.int64]

_LENGTH, _EXCHANGE, _LIKELIHOOD, _PARSIMONY, _NEAR, _RECONNECTION, _SCALE, _INDEPENDENT = range(len(fields(Moves)))
#: Loss of log weight of a place by each change of a state; probability that a walk to a near place ends.
_WARP, _ENDING = 0.6, 0.4
#: Lengths between which a proposal has to stay.
_SHORTEST, _LONGEST = 1e-30, 1e6
#: Smallest probability of the sites that can be in the data.
_LEAST_OTHER = 1e-15
#: Entries of a table of partial likelihoods, which is made for some of the patterns at a time.
_MOST_ENTRIES = 1 << 21


def tree_chains(
    masks: np.ndarray,
    weights: np.ndarray,
    num_states: int,
    *arguments: Any,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> TreeChains:
    """Return chains with the arguments of `TreeChains`: compiled or, with a warning, as array operations."""
    library = compiled_code(num_states, dtype)
    given = (masks, weights, num_states, *arguments)
    if library is None:
        return TensorChains(*given, dtype=dtype, **settings)
    return CompiledChains(library, *given, dtype=dtype, **settings)


# Trees as arrays with one row for each. A tree hangs from its first tip: every other node has a parent, and a length of
# the edge above it. Between moves the last node is the one below the first tip. An edge has the number of the node
# below it, but the last node's has number 0, because it ends in the first tip.


class _Forest(NamedTuple):
    """Trees; the parent of the first node, and of nodes that are not in the tree yet, is 0."""

    parents: _Nodes  # (trees, nodes)
    lengths: _Numbers  # of each set, (trees, nodes, sets)

    def at(self, rows: Any) -> _Forest:
        return _Forest(self.parents[rows], self.lengths[rows])


class _Level(NamedTuple):
    """Inner nodes of one depth in all trees with their children."""

    tree: _Nodes
    node: _Nodes
    one: _Nodes
    other: _Nodes


class _State(NamedTuple):
    """Trees with their log densities, which are arrays `(trees,)` where nothing else is said."""

    parents: _Nodes
    lengths: _Numbers  # (trees, nodes, sets)
    below: clades.Bits  # taxa below each node, (trees, nodes, words)
    log_likelihood: _Numbers
    log_prior: _Numbers
    log_reference: _Numbers

    def at(self, rows: Any) -> _State:
        return _State(*(part[rows] for part in self))

    def log_density(self, beta: _Numbers) -> _Numbers:
        return beta * (self.log_likelihood + self.log_prior) + (1 - beta) * self.log_reference


def _children(parents: _Nodes) -> _Nodes:
    """Return the children of the inner nodes, `(trees, nodes) -> (trees, inner, 2)`."""
    inner = int((parents[0] > 0).sum()) // 2
    return np.argsort(parents, 1, kind="stable")[:, parents.shape[1] - 2 * inner :].reshape(len(parents), inner, 2)


def _levels(parents: _Nodes) -> list[_Level]:
    """Return the inner nodes from the deepest to those below the first tip."""
    children, first = _children(parents), parents.shape[1] // 2 + 1
    depth, above = (parents > 0).astype(np.int64), parents
    while above.any():
        depth = depth + np.take_along_axis(depth, above, 1)
        above = np.take_along_axis(above, above, 1)
    depth = depth[:, first : first + children.shape[1]]
    found = [np.nonzero(depth == one) for one in range(int(depth.max()), -1, -1)]
    return [_Level(tree, place + first, *children[tree, place].T) for tree, place in found]


def _below(levels: Sequence[_Level], count: int, num_taxa: int) -> clades.Bits:
    """Return the taxa below each node, `(trees, nodes, words)`; the first node has none."""
    sets = np.zeros((count, 2 * num_taxa - 2, clades.num_words(num_taxa)), dtype=np.uint64)
    sets[:, 1:num_taxa] = clades.single(num_taxa)[1:]
    for tree, node, one, other in levels:
        sets[tree, node] = sets[tree, one] | sets[tree, other]
    return sets


def _moved(forest: _Forest, node: _Nodes, place: _Nodes, part: _Numbers | float) -> _Forest:
    """Return trees with the subtrees of `node` moved to edges of `place`, whose lower `part` of the length stays.

    Parts may differ between sets of lengths, `(trees, sets)`.
    """
    parents, lengths = forest.parents.copy(), forest.lengths.copy()
    rows, top = np.arange(len(parents)), parents[np.arange(len(parents)), node]
    beside = ((parents == top[:, None]) & (np.arange(parents.shape[1]) != node[:, None])).argmax(1)
    parents[rows, beside] = parents[rows, top]
    lengths[rows, beside] += lengths[rows, top]
    parents[rows, top], parents[rows, place] = parents[rows, place], top
    lengths[rows, top] = (1 - part) * lengths[rows, place]
    lengths[rows, place] *= part
    return _Forest(parents, lengths)


def _with_last_node_on_top(forest: _Forest) -> _Forest:
    """Return the trees with the node below the first tip as their last."""
    count, nodes = forest.parents.shape
    names, rows = np.tile(np.arange(nodes), (count, 1)), np.arange(count)
    top = (forest.parents[:, 1:] == 0).argmax(1) + 1
    names[rows, top], names[:, -1] = nodes - 1, top
    parents = np.take_along_axis(names, np.take_along_axis(forest.parents, names, 1), 1)
    return _Forest(parents, np.take_along_axis(forest.lengths, names[..., None], 1))


def _chosen(logs: _Numbers, generator: np.random.Generator) -> _Nodes:
    """Return a place in each row with probabilities in proportion to weights, given as logarithms."""
    return (logs + generator.gumbel(size=logs.shape)).argmax(1)


def _meet(one: clades.Bits, other: clades.Bits) -> clades.Bits:
    """Return the sets of states of Fitch (1971) where two subtrees meet."""
    return np.where(one & other, one & other, one | other)


class TensorChains(TreeChains):
    """The chains of `CompiledChains` in one batch, many times slower, with simpler moves.

    All chains make a proposal at the same time. Of the moves, `length` and `exchange` multiply a length by a random
    factor; both guided regrafts follow the number of changes; `reconnection` is a regraft at any place.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        states = (self.masks[:, None] >> np.arange(self.num_states, dtype=np.uint64)[:, None]) & np.uint64(1)
        self._tips = torch.from_numpy(states.astype(np.float64)).to(self.dtype)  # (taxa, states, patterns)
        self._always = self._tips.double().amin(0)
        self._site_weights = torch.from_numpy(self.weights)
        self._density: tuple[TreeReference, ReferenceDensity] | None = None

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
        steps = torch.as_tensor(num_moves).expand(self.num_chains).numpy()
        power, shares = beta.double().numpy(), np.array(astuple(moves))
        focus, counts = trees.focus.numpy().copy(), trees.counts.numpy().copy()
        density, generator = self._density_of(reference), _generator(trees)
        process = Process(*(part if part.dtype == torch.int64 else part.double() for part in process))
        state = self._evaluated(self._forest(trees, slice(None)), process, density)
        for step in range(int(steps.max())):
            chains = np.flatnonzero(steps > step)
            kind = generator.choice(len(shares), len(chains), p=shares / shares.sum())
            kind[(kind == _INDEPENDENT) & (density is None)] = _LENGTH
            here, own = state.at(chains), power[chains]
            proposed, edge, log_ratio = self._proposed(_Forest(*here[:2]), kind, own, density, generator)
            there = self._evaluated(proposed, Process(*(part[chains] for part in process)), density)
            if density is None:
                log_ratio += own * (there.log_likelihood - here.log_likelihood) + there.log_prior - here.log_prior
            else:
                log_ratio += there.log_density(own) - here.log_density(own)
                log_ratio += (kind == _INDEPENDENT) * (here.log_reference - there.log_reference)
            accept = (np.log(generator.random(len(chains))) < log_ratio) & self._is_possible(there)
            counts[chains, kind, 0] += 1
            counts[chains, kind, 1] += accept
            focus[chains] = np.where(kind < _SCALE, edge, focus[chains])
            for old, new in zip(state, there, strict=True):
                old[chains[accept]] = new[accept]
        values = {"focus": focus, "counts": counts, "log_likelihood": state.log_likelihood}
        values |= {} if density is None else {"log_reference": state.log_reference}
        moved = trees._replace(**{name: torch.from_numpy(value) for name, value in values.items()})
        return self._replaced(moved, range(self.num_chains), state, generator if steps.any() else None)

    # States.

    def _forest(self, trees: Trees, chains: Any) -> _Forest:
        parents = np.pad(trees.ends[chains, :, 1].numpy().astype(np.int64), ((0, 0), (0, 1)))
        parents[:, 0] = 0
        lengths = trees.lengths[chains].unflatten(1, (self.num_sets, self.num_edges)).mT.numpy()
        return _Forest(parents, np.concatenate([lengths, lengths[:, :1]], 1))

    def _replaced(
        self, trees: Trees, chains: Sequence[int], forest: _State | _Forest, generator: np.random.Generator | None
    ) -> Trees:
        """Return states with other trees of some chains, and the next state of the generator, if it was used."""
        levels, at = _levels(forest.parents), list(chains)
        below = _below(levels, len(at), self.num_taxa)
        found = Trees(*(part.clone() for part in trees))
        parents, lengths = forest.parents[:, :-1].copy(), forest.lengths[:, :-1].copy()
        lengths[:, 0], below[:, 0] = forest.lengths[:, -1], below[:, -1]
        parents[:, 0] = self.num_edges
        ends = np.stack([np.broadcast_to(np.arange(self.num_edges), parents.shape), parents], -1)
        found.ends[at] = torch.from_numpy(ends.astype(np.int32))
        found.lengths[at] = torch.from_numpy(lengths).mT.flatten(1)
        found.splits[at] = torch.from_numpy(below[:, :-1].view(np.int64))
        if generator is not None:
            found.random.copy_(torch.from_numpy(generator.integers(1, 2**63 - 1, (self.num_chains, 4))))
        return found

    def _density_of(self, reference: TreeReference | None) -> ReferenceDensity | None:
        """Return the density of a reference, which is made once."""
        if reference is None:
            return None
        if self._density is None or self._density[0] is not reference:
            self._density = (reference, ReferenceDensity(reference, self.constraints))
        return self._density[1]

    def _evaluated(self, forest: _Forest, process: Process, density: ReferenceDensity | None) -> _State:
        levels = _levels(forest.parents)
        below = _below(levels, len(forest.parents), self.num_taxa)
        lengths = torch.from_numpy(forest.lengths)
        edges = torch.cat([lengths[:, -1:], lengths[:, 1:-1]], 1)
        log_prior = self.prior.log_density(edges.mT.flatten(1), self.num_taxa).numpy()
        log_likelihood = self._log_likelihood(lengths, levels, process).numpy()
        log_reference = np.zeros_like(log_prior) if density is None else _log_reference(forest, levels, below, density)
        return _State(*forest, below, log_likelihood, log_prior, log_reference)

    def _is_possible(self, state: _State) -> NDArray[np.bool_]:
        """Return whether lengths are neither too short nor too long, and the constraints hold."""
        lengths = state.lengths[:, 1:]
        held = (state.below[:, :, None] == self.constraints).all(-1).any(1).all(1)
        return ((lengths >= _SHORTEST) & (lengths <= _LONGEST)).all((1, 2)) & held

    # Likelihood: a table of what each node sends to its parent, level by level. Rows are nodes of all trees, those of
    # one node together.

    def _log_likelihood(self, lengths: Tensor, levels: Sequence[_Level], process: Process) -> Tensor:
        count = len(lengths)
        rows = [
            tuple(map(torch.from_numpy, (level.tree, *(node * count + level.tree for node in level[1:]))))
            for level in levels
        ]
        total, pattern, category = torch.zeros(count, dtype=torch.float64), 0, 0
        for part, size in enumerate(self.sizes.tolist()):
            mixed = slice(category, category := category + int(process.categories[0, part]))
            rates, weights = process.rates[:, mixed], process.weights[:, mixed]
            exponents = process.eigenvalues[:, part, None, :] * rates[..., None]  # (trees, categories, states)
            powers = (exponents * lengths[..., self.part_sets[part]].mT[..., None, None]).exp()
            matrices = (process.right[:, part, None] * powers[..., None, :]) @ process.left[:, part, None]
            matrices = matrices.clamp(min=0).to(self.dtype)  # (nodes, trees, categories, states, states)
            frequencies = process.frequencies[:, part]
            unchanged = process.invariant[:, part, None] * (frequencies @ self._always)
            step, left_out = max(1, _MOST_ENTRIES // powers.numel()), torch.zeros_like(total)
            for begin in range(pattern, pattern + size, step):
                block = slice(begin, min(begin + step, pattern + size))
                tips = self._tips[..., block]
                received, scale = self._received(matrices, tips, rows)
                at_root = (weights[..., None] * frequencies[:, None]).to(self.dtype)
                sites = (at_root[..., None] * tips[0] * received).sum((1, 2)).clamp(min=self._tiny).log().double()
                values = torch.logaddexp(sites + scale, unchanged[:, block].log())
                if self.conditioned[part]:
                    left_out += values.exp() @ self._site_weights[block]
                else:
                    total += values @ self._site_weights[block]
            total -= float(self.conditioned[part]) * (1 - left_out).clamp(min=_LEAST_OTHER).log()
            pattern += size
        return total

    @property
    def _tiny(self) -> float:
        return 1e-30 if self.dtype == torch.float32 else 1e-300

    def _received(self, matrices: Tensor, tips: Tensor, rows: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Return partial likelihoods at the first tip, `(trees, categories, states, patterns)`, and their log scale."""
        nodes, count, categories, states, _ = matrices.shape
        patterns = tips.shape[-1]
        table = matrices.new_empty(nodes, count * categories * states, patterns)
        torch.bmm(matrices[: self.num_taxa].reshape(self.num_taxa, -1, states), tips, out=table[: self.num_taxa])
        table = table.reshape(nodes * count, categories, states, patterns)
        scale = torch.zeros(count, patterns, dtype=torch.float64)
        for tree, node, one, other in rows:
            product = table[one] * table[other]
            largest = product.amax((1, 2)).clamp(min=self._tiny)
            scale.index_add_(0, tree, largest.log().double())
            table[node] = matrices.flatten(0, 1)[node] @ (product / largest[:, None, None])
        return table[-count:], scale

    # Moves.

    def _proposed(
        self,
        forest: _Forest,
        kind: _Nodes,
        beta: _Numbers,
        density: ReferenceDensity | None,
        generator: np.random.Generator,
    ) -> tuple[_Forest, _Nodes, _Numbers]:
        """Return proposals, the edge of each, and the log ratio of the densities of the moves back and forth."""
        parents, lengths = forest.parents.copy(), forest.lengths.copy()
        count, nodes = parents.shape
        regrafts, scaled = (kind > _EXCHANGE) & (kind < _SCALE), kind == _SCALE
        # All edges, those with a topology around them, and those of subtrees that can be moved.
        first = np.where(kind == _EXCHANGE, self.num_taxa, 1)
        edge = generator.integers(first, np.where((kind == _EXCHANGE) | regrafts, nodes - 1, nodes))
        deviation = np.exp(-np.where(scaled, 5.0, 2.5) * generator.random(count))
        step = deviation * generator.standard_normal(count)
        # The lengths of one set change.
        number = self.num_sets
        chosen = generator.integers(number, size=(count, 1)) if number > 1 else np.zeros((count, 1), dtype=np.int64)
        steps = np.where(np.arange(number) == chosen, step[:, None], 0.0)
        factors = np.where(scaled[:, None, None], steps[:, None], 0.0).repeat(nodes, 1)
        factors[np.arange(count), edge] = steps
        lengths = np.clip(lengths * np.exp(factors), 0.1 * _SHORTEST, 10 * _LONGEST)
        log_ratio = np.where(scaled, self.num_edges * step, step)
        found = _Forest(parents, lengths)
        for which, move in ((kind == _EXCHANGE, self._exchanged), (regrafts, self._regrafted)):
            if which.any():
                there, more = move(found.at(which), edge[which], kind[which], beta[which], generator)
                parents[which], lengths[which] = there
                log_ratio[which] += more
        renewed = kind == _INDEPENDENT
        if density is not None and renewed.any():
            parents[renewed], lengths[renewed] = self._renewed(int(renewed.sum()), density, generator)
            log_ratio[renewed] = 0
        return found, np.where(edge == nodes - 1, 0, edge), log_ratio

    def _exchanged(
        self, forest: _Forest, node: _Nodes, kind: _Nodes, beta: _Numbers, generator: np.random.Generator
    ) -> tuple[_Forest, _Numbers | float]:
        """Nearest-neighbour interchange: one of the three topologies around an edge, with equal probabilities."""
        parents, rows, turn = forest.parents, np.arange(len(node)), generator.integers(3, size=len(node))
        children, above = _children(parents), parents[np.arange(len(node)), node]
        beside = children[rows, above - self.num_taxa].sum(1) - node
        lower = children[rows, node - self.num_taxa, np.maximum(turn - 1, 0)]
        parents[rows, beside] = np.where(turn > 0, node, above)
        parents[rows, lower] = np.where(turn > 0, above, node)
        return forest, 0.0

    def _regrafted(
        self, forest: _Forest, node: _Nodes, kind: _Nodes, beta: _Numbers, generator: np.random.Generator
    ) -> tuple[_Forest, _Numbers]:
        """Subtree pruning and regrafting at a uniform place of an edge."""
        rows, above = np.arange(len(node)), forest.parents[np.arange(len(node)), node]
        # In between, the subtree hangs at the first tip, so that the way back starts from the same tree.
        beside = _children(forest.parents)[rows, above - self.num_taxa].sum(1) - node
        last = forest.parents.shape[1] - 1
        hung = _moved(forest, node, np.where(above == last, beside, last), 1.0)
        levels = _levels(hung.parents)
        logs = np.where(self._places(hung.parents, node, levels), 0.0, -np.inf)
        guided = (kind == _LIKELIHOOD) | (kind == _PARSIMONY)
        if guided.any():
            logs[guided] -= _WARP * beta[guided, None] * self._changes(hung.parents[guided], node[guided])
        place, near = _chosen(logs, generator), kind == _NEAR
        if near.any():
            place[near] = self._walked(hung.parents[near], beside[near], generator)
        log_ratio = logs[rows, beside] - logs[rows, place]
        log_ratio += np.log(hung.lengths[rows, place] / hung.lengths[rows, beside]).sum(-1)
        part = generator.random((len(node), self.num_sets))
        return _with_last_node_on_top(_moved(hung, node, place, part)), log_ratio

    def _places(self, parents: _Nodes, node: _Nodes, levels: Sequence[_Level]) -> NDArray[np.bool_]:
        """Return the edges to which subtrees can be moved, where they hang at the first tip, `(trees, nodes)`."""
        below = _below(levels, len(node), self.num_taxa)
        own = below[np.arange(len(node)), node][:, None]
        return (parents > 0) & (below & ~own).any(-1)

    def _walked(self, parents: _Nodes, place: _Nodes, generator: np.random.Generator) -> _Nodes:
        """Return edges some steps away: at each step one of four neighbours, or the same where there is a tip.

        The steps are symmetric, and so is the walk. It stays below the node at the first tip.
        """
        children, rows = _children(parents), np.arange(len(place))
        steps = generator.geometric(_ENDING, len(place))
        for step in range(int(steps.max())):
            turn, above = generator.integers(4, size=len(place)), parents[rows, place]
            beside = children[rows, above - self.num_taxa].sum(1) - place
            lower = children[rows, np.maximum(place - self.num_taxa, 0), turn % 2]
            there = np.where(turn > 1, lower, np.where(turn == 1, above, beside))
            ends = np.where(turn > 1, place < self.num_taxa, parents[rows, above] == 0)
            place = np.where(ends | (step >= steps), place, there)
        return place

    def _changes(self, parents: _Nodes, node: _Nodes) -> _Numbers:
        """Return the number of changes that subtrees add at each edge, where they hang at the first tip."""
        levels, (count, nodes) = _levels(parents), parents.shape
        down = np.zeros((count, nodes, self.masks.shape[1]), dtype=np.uint64)
        up = np.zeros_like(down)
        down[:, : self.num_taxa] = self.masks
        for tree, at, one, other in levels:
            down[tree, at] = _meet(down[tree, one], down[tree, other])
        for tree, at, one, other in reversed(levels):
            top = (parents[tree, at] == 0)[:, None]
            up[tree, one] = np.where(top, self.masks[0], _meet(up[tree, at], down[tree, other]))
            up[tree, other] = np.where(top, self.masks[0], _meet(up[tree, at], down[tree, one]))
        own = down[np.arange(count), node][:, None]
        return ((_meet(up, down) & own) == 0) @ self.weights

    # Trees that do not depend on those before.

    def _renewed(self, count: int, density: ReferenceDensity, generator: np.random.Generator) -> _Forest:
        """Return draws from the reference."""
        parents = np.zeros((count, self.num_edges + 1), dtype=np.int64)
        everything = (1 << self.num_taxa) - 2
        sets = np.zeros(parents.shape, dtype=object)
        for tree in range(count):
            left, free = [(everything, 0)], self.num_edges
            while left:
                whole, above = left.pop()
                node, free = (free, free - 1) if whole & (whole - 1) else (whole.bit_length() - 1, free)
                parents[tree, node], sets[tree, node] = above, whole
                if node >= self.num_taxa:
                    part = density.draw_split(whole, generator)
                    left += [(part, node), (whole & ~part, node)]
        shape, rate, _ = density.gammas(sets.ravel().tolist())
        lengths = np.clip(generator.gamma(shape) / rate, _SHORTEST, _LONGEST).reshape(*parents.shape, -1)
        return _Forest(parents, lengths)

    def _drawn(self, trees: Trees, process: Process, chains: Sequence[int], reference: TreeReference) -> Trees:
        density, generator = self._density_of(reference), _generator(trees)
        if density is None or not len(chains):
            return trees
        return self._replaced(trees, chains, self._renewed(len(chains), density, generator), generator)

    def _grown(self, trees: Trees, process: Process, chains: Sequence[int], by_parsimony: bool) -> Trees:
        if not len(chains):
            return trees
        generator, count, taxa = _generator(trees), len(chains), self.num_taxa
        rows = np.arange(count)
        order = generator.permuted(np.tile(np.arange(1, taxa), (count, 1)), axis=1)
        parents = np.zeros((count, self.num_edges + 1), dtype=np.int64)
        parents[rows[:, None], order[:, :2]] = taxa
        top, lengths = np.full(count, taxa), np.zeros((*parents.shape, self.num_sets))
        for number in range(2, taxa - 1):
            tip, above = order[:, number], taxa + number - 1
            parents[rows, tip] = parents[rows, top] = above
            levels = _levels(parents)
            places = self._places(parents, tip, levels)
            places &= self._allowed(tip, _below(levels, count, taxa), above)
            cost = np.where(places, self._changes(parents, tip) if by_parsimony else 0.0, np.inf)
            place = _chosen(np.where(cost == cost.min(1, keepdims=True), 0.0, -np.inf), generator)
            parents = _moved(_Forest(parents, lengths), tip, place, 0.5).parents
            top = np.where(place == top, above, top)
        grown = _with_last_node_on_top(_Forest(parents, lengths))
        lengths = self._forest(trees, list(chains)).lengths
        return self._replaced(trees, chains, _Forest(grown.parents, lengths), generator)

    def _allowed(self, tip: _Nodes, below: clades.Bits, top: int) -> NDArray[np.bool_]:
        """Return the edges where a taxon, which hangs at the first tip, may be by the constraints, `(trees, nodes)`."""
        single, splits = clades.single(self.num_taxa), self.constraints
        present = ((below[:, top] & ~single[tip]) | single[0])[:, None]
        inside = (single[tip][:, None] & splits).any(-1, keepdims=True)
        # The taxa on the same side of a constraint, (trees, constraints, words), stay together, if there are others.
        own = present & np.where(inside, splits, ~splits)
        free = ~(own.any(-1) & (present & ~own).any(-1))[:, None]
        side, own = below[:, :, None], own[:, None]
        near, far = ~(side & ~own).any(-1), ~(present[:, None] & ~side & ~own).any(-1)
        return (free | near | far).all(-1)


def _generator(trees: Trees) -> np.random.Generator:
    """Return the generator of all chains, which begins with their states."""
    return np.random.default_rng(trees.random.numpy().ravel().view(np.uint64))


def _log_reference(
    forest: _Forest, levels: Sequence[_Level], below: clades.Bits, density: ReferenceDensity
) -> _Numbers:
    """Return the log densities of trees under the reference."""
    count, nodes = forest.parents.shape
    sets = whole_numbers(below.reshape(count * nodes, -1))
    shape, rate, log = (part.reshape(count, nodes, -1)[:, 1:] for part in density.gammas(sets))
    lengths = forest.lengths[:, 1:]
    total: _Numbers = (log + (shape - 1) * np.log(lengths) - rate * lengths).sum(-1).sum(1)
    for tree, node, one, _ in levels:
        pairs = zip((tree * nodes + node).tolist(), (tree * nodes + one).tolist(), strict=True)
        np.add.at(total, tree, [density.log_split(sets[whole], sets[part]) for whole, part in pairs])
    return total
