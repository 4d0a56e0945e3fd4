"""Distributions that build a topology by choosing splits of clades."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics.distributions import graph_passes
from bayeskit.models.phylogenetics.distributions.choices import Choices, every_root, one_root
from bayeskit.models.phylogenetics.distributions.missing import describe_missing
from bayeskit.models.phylogenetics.distributions.rows import Floats, Numbers
from bayeskit.models.phylogenetics.distributions.split_probabilities import SplitProbabilities, most_probable_splits
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.distributions.topology_distribution import (
    Estimate,
    TopologyDistribution,
)
from bayeskit.models.phylogenetics.trees.topologies import Topologies
from bayeskit.models.phylogenetics.trees.tree import Tree

_ARRAYS = ("group_clade", "group_sister", "starts", "parts")


class GraphDistribution(TopologyDistribution):
    """Base of the distributions with one probability for each option of a graph of splits.

    Parameters
    ----------
    graph : SubsplitGraph
        The choices.
    logits : Tensor
        Log probabilities of the options, up to a constant for each group, `(options,)`.

    Raises
    ------
    SettingsError
        If the logits are no tensor of floating-point numbers.
    ShapeError
        If there is not one for each option.
    """

    def __init__(self, graph: SubsplitGraph, logits: Tensor) -> None:
        _check_logits(logits, graph)
        self.graph, self.logits = graph, logits
        self._state: _State | None = None
        super().__init__(graph.taxa, graph.rooted)

    def _size(self) -> str:
        return f"{self.graph.num_options} options"

    def choices(self, topologies: Topologies | Tree | Tensor) -> Choices:
        """Find the options that make topologies.

        Who asks for the same topologies again and again can keep these and use `log_prob_of_choices`.

        Parameters
        ----------
        topologies : Topologies, Tree or Tensor
            As in `log_prob`.

        Returns
        -------
        Choices
            The numbers of the options.
        """
        find = every_root if self.graph.of_rootings else one_root
        return find(self.graph, self.read(topologies))

    def log_prob_of_choices(self, choices: Choices) -> Tensor:
        """Return the log probabilities of topologies whose options are known, `(topologies,)`, in nats.

        Differentiable once by `logits`.
        """
        state = self._current()
        return _LogProb.apply(self.logits, state, self.graph, choices)  # type: ignore[no-any-return]

    def _log_prob(self, topologies: Topologies) -> Tensor:
        return self.log_prob_of_choices(self.choices(topologies))

    @property
    def log_probabilities(self) -> Floats:
        """Log probability of each option in its group, `(options,)`, as numbers."""
        return self._current().log_probabilities

    def _current(self) -> _State:
        """Return what follows from the logits, computed again where these have changed, by whatever means."""
        # Fused optimisers and writes to `.data` leave no trace but the values themselves.
        if self._state is None or not _same(self._state.logits, self.logits):
            _check_logits(self.logits, self.graph)
            self._state = _State(self.graph, self.logits.detach().clone())
        return self._state

    def why_not(self, tree: Topologies | Tree) -> str | None:
        """Name what keeps a topology out of the support.

        Parameters
        ----------
        tree : Topologies or Tree
            One topology.

        Returns
        -------
        str or None
            The first split that the graph lacks, or has with probability zero; of an unrooted topology with its root
            where least is missing. None if the topology is in the support.
        """
        topologies = self.read(tree)
        if len(topologies) != 1:
            raise ShapeError(f"tree: there are {len(topologies)} topologies. Remedy: give one.")
        return describe_missing(self.graph, self.choices(topologies), topologies, self.log_probabilities)

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Topologies:
        cumulative, last = self._current().cumulated
        return graph_passes.draw(self.graph, cumulative, last, num_samples, generator)

    def entropy(  # type: ignore[override]  # with its error
        self, *, num_samples: int = 10_000, seed: int | torch.Generator = 0
    ) -> Estimate:
        """Return the entropy in nats; exact, save where an unrooted topology is a sum over its rootings.

        Parameters
        ----------
        num_samples : int, default 10_000
            Draws to estimate it from where it has no closed form.
        seed : int or torch.Generator, default 0
            Source of randomness.

        Returns
        -------
        Estimate
            The value and its standard error, zero where it is exact.
        """
        if self.graph.of_rootings:
            return super().entropy(num_samples=num_samples, seed=seed)
        return Estimate(graph_passes.entropy(self.graph, self.log_probabilities), 0.0)

    def most_probable_tree(self) -> Topologies:
        """Return the most probable topology as `Topologies` of length one; `.tree(0)` makes an unrooted `Tree`."""
        return graph_passes.most_probable(self.graph, self.log_probabilities)[0]

    def option_probabilities(self) -> Floats:
        """Return the probability that a (rooted) tree has each option, not only given its group: `(options,)`."""
        probabilities = np.exp(self.log_probabilities)
        return graph_passes.reach(self.graph, probabilities)[self.graph.group_of] * probabilities

    def split_probabilities(self) -> SplitProbabilities:
        """Return the probability that a topology has each split, or each clade of rooted topologies; exact."""
        graph, probabilities = self.graph, np.exp(self.log_probabilities)
        totals = graph_passes.clade_probabilities(graph, probabilities)
        if graph.of_rootings:
            # A split is there when one of its sides is a clade; both are when it is the root's.
            opposite = graph.find_clade(graph.clades[-1] & ~graph.clades)
            both = np.zeros(len(totals))
            root = slice(int(graph.starts[-2]), None)
            both[graph.parts[root]] = probabilities[root, None]
            totals = totals + np.where(opposite >= 0, totals[opposite], 0.0) - both
        return most_probable_splits(self.taxa, self.rooted, graph.clades, totals)

    def _tensors(self) -> dict[str, Tensor]:
        arrays = {name: torch.from_numpy(getattr(self.graph, name)) for name in _ARRAYS}
        return {**arrays, "clades": torch.from_numpy(self.graph.clades.view(np.int64)), "logits": self.logits.detach()}

    def _facts(self) -> dict[str, Any]:
        return {"with_sisters": self.graph.with_sisters}

    @classmethod
    def _restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        sets = tensors["clades"].numpy().view(np.uint64)
        arrays = [tensors[name].numpy() for name in _ARRAYS]
        graph = SubsplitGraph(tuple(facts["taxa"]), bool(facts["rooted"]), bool(facts["with_sisters"]), sets, *arrays)
        return cls(graph, tensors["logits"])


def _check_logits(logits: Tensor, graph: SubsplitGraph) -> None:
    if not (isinstance(logits, Tensor) and logits.is_floating_point()):
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise SettingsError(f"logits: {kind} is no tensor of real numbers. Remedy: give torch.as_tensor(...).double().")
    if tuple(logits.shape) != (graph.num_options,):
        raise ShapeError(
            f"logits: shape {tuple(logits.shape)} does not fit. Remedy: give shape ({graph.num_options},), one "
            "for each option of the graph."
        )


def _same(one: Tensor, other: Tensor) -> bool:
    alike = isinstance(other, Tensor) and (one.dtype, one.device) == (other.dtype, other.device)
    return alike and torch.equal(one, other)


class _State:
    """What follows from logits, as numbers."""

    def __init__(self, graph: SubsplitGraph, logits: Tensor) -> None:
        self.logits = logits
        with np.errstate(invalid="ignore"):
            self.log_probabilities = graph.normalised(logits.to("cpu", torch.float64).numpy())
        if np.isnan(self.log_probabilities).any():
            raise SettingsError(
                "logits: one is not a number, or all of a group are minus infinity. Remedy: lower the learning rate "
                "if they are being trained; -inf may stand for an impossible option, but not for all of a group."
            )
        self.probabilities = np.exp(self.log_probabilities)
        self.table = graph.table(self.log_probabilities, missing=-np.inf)
        self._graph = graph
        self._cumulated: tuple[Floats, Numbers] | None = None

    @property
    def cumulated(self) -> tuple[Floats, Numbers]:
        if self._cumulated is None:
            self._cumulated = graph_passes.cumulate(self._graph, self.probabilities)
        return self._cumulated


class _LogProb(torch.autograd.Function):
    """Log probabilities of topologies, whose derivative is the expected number of uses of each option."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, state: _State, graph: SubsplitGraph, choices: Choices) -> Tensor:
        log_prob, saved = choices.log_prob(state.table)
        ctx.context = (state, graph, choices, saved, logits.dtype, logits.device)
        return torch.from_numpy(log_prob).to(logits.device, logits.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        state, graph, choices, saved, dtype, device = ctx.context
        counts = choices.counts(saved, gradients[0].detach().to("cpu", torch.float64).numpy())
        by_logits = counts - state.probabilities * graph.sum_groups(counts)[graph.group_of]
        return torch.from_numpy(by_logits).to(device, dtype), None, None, None
