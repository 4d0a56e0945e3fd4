"""The stochastic block model: nodes in blocks, and edges whose probabilities depend on the blocks alone."""

from __future__ import annotations

from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayeskit._inputs import as_numbers
from bayeskit._settings import real_number, whole_number
from bayeskit._torch import one_thread
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.block_model.counts import BlockCounts, EdgePrior, log_rising_factorials

_CHUNK = 2**14
_MAX_SUMMED_ASSIGNMENTS = 2**12


class BlockPosterior(NamedTuple):
    """All assignments of nodes to blocks, and how probable they are.

    Attributes
    ----------
    assignments : Tensor of int
        Shape ``(count, nodes)``.
    probabilities : Tensor
        Shape ``(count,)``. Relabelled blocks are another assignment, just as probable where priors are exchangeable.
    log_evidence : Tensor
        Log probability of the graph, ``()``.
    """

    assignments: Tensor
    probabilities: Tensor
    log_evidence: Tensor

    def __repr__(self) -> str:
        count, nodes = self.assignments.shape
        return f"BlockPosterior(log_evidence={float(self.log_evidence):.6f}, {count} assignments of {nodes} nodes)"

    def co_assignment(self) -> Tensor:
        """Return the probability of each pair of nodes to share a block, whatever its label: ``(nodes, nodes)``."""
        return co_assignment(self.assignments, self.probabilities)


class EdgeProbabilities(NamedTuple):
    """Conjugate posteriors given an assignment.

    Attributes
    ----------
    proportions : Dirichlet
        Of the blocks, batch shape ``(*batch)``.
    edges : Beta
        Probability of an edge between two blocks, symmetric, batch shape ``(*batch, blocks, blocks)``.
    """

    proportions: dist.Dirichlet
    edges: dist.Beta


class StochasticBlockModel:
    r"""Undirected graph without loops whose nodes belong to hidden blocks.

    Proportions of blocks are Dirichlet, nodes are assigned to blocks independently, the probability of an edge between
    blocks :math:`a \le b` is Beta, and edges are independent given all of these. Proportions and probabilities
    integrate out in closed form, so that :meth:`log_joint` is the exact weight of an assignment.

    Called as a Pyro model it samples ``"proportions"`` and ``"edge_probabilities"`` (of the pairs of blocks
    ``(0, 0), (0, 1), ..., (1, 1), ...``), and sums assignments out; that is feasible only for small graphs.

    Parameters
    ----------
    adjacency : Tensor or array
        Zeros and ones, symmetric, zero on its diagonal, ``(nodes, nodes)``. Integers and booleans become the default
        dtype.
    num_blocks : int
        At least one; blocks may be empty.
    concentration : float, default 1.0
        Of the Dirichlet distribution, for each block.
    within_prior, between_prior : (float, float), default (1.0, 1.0)
        Beta distribution of the probability of an edge within a block and between two. Priors that favour edges
        within blocks look for communities; equal ones also find hubs and other roles.

    Raises
    ------
    ShapeError, DataError
        If ``adjacency`` is not such a matrix.
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Nowicki, K., Snijders, T. A. B. (2001). Estimation and prediction for stochastic blockstructures.
    Journal of the American Statistical Association 96, 1077-1087.

    Examples
    --------
    >>> import torch
    >>> two_triangles = torch.block_diag(*[1 - torch.eye(3, dtype=torch.float64)] * 2)
    >>> posterior = StochasticBlockModel(two_triangles, num_blocks=2).enumerate()
    >>> posterior.co_assignment()[0, 1] > 0.8 > 0.2 > posterior.co_assignment()[0, 3]
    tensor(True)
    """

    def __init__(
        self,
        adjacency: Tensor,
        num_blocks: int,
        concentration: float = 1.0,
        within_prior: tuple[float, float] = (1.0, 1.0),
        between_prior: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.adjacency = adjacency = _check_adjacency(adjacency)
        self.num_blocks = whole_number("num_blocks", num_blocks, least=1)
        self.concentration = real_number("concentration", concentration, between=(0.0, float("inf")))
        self.within_prior = _check_prior("within_prior", within_prior)
        self.between_prior = _check_prior("between_prior", between_prior)
        same = torch.eye(self.num_blocks, dtype=torch.bool, device=adjacency.device)
        within, between = (adjacency.new_tensor(prior) for prior in (self.within_prior, self.between_prior))
        edges, gaps = torch.where(same.unsqueeze(-1), within, between).unbind(-1)
        self._edge_prior = EdgePrior(edges, gaps, self.num_nodes * (self.num_nodes - 1) // 2)
        starts = adjacency.new_tensor([self.concentration, self.num_blocks * self.concentration], dtype=torch.float64)
        self._size_table, self._total_table = log_rising_factorials(starts, self.num_nodes).view(2, -1)

    def __repr__(self) -> str:
        edges = int(self.adjacency.sum()) // 2
        return f"StochasticBlockModel({self.num_nodes} nodes, {edges} edges, num_blocks={self.num_blocks})"

    @property
    def num_nodes(self) -> int:
        """Size of the graph."""
        return len(self.adjacency)

    def log_prior(self, assignments: Tensor) -> Tensor:
        """Return the log probability of assignments, proportions integrated out.

        Parameters
        ----------
        assignments : Tensor of int
            Block of each node, ``(*batch, nodes)``.

        Returns
        -------
        Tensor
            Shape ``(*batch)``.

        Raises
        ------
        ShapeError, DataError
            If ``assignments`` are not such.
        """
        return self._log_prior(self._counts(assignments)).to(self.adjacency.dtype)

    def log_likelihood(self, assignments: Tensor) -> Tensor:
        """Return the log probability of the graph given assignments, edge probabilities integrated out.

        Shapes and errors are those of :meth:`log_prior`.
        """
        return self._log_likelihood(self._counts(assignments)).to(self.adjacency.dtype)

    def log_joint(self, assignments: Tensor) -> Tensor:
        """Return the sum of :meth:`log_prior` and :meth:`log_likelihood`, the log of the posterior and a constant."""
        return self._log_joint(assignments).to(self.adjacency.dtype)

    def parameters_given(self, assignments: Tensor) -> EdgeProbabilities:
        """Return the exact posteriors of proportions and edge probabilities given assignments ``(*batch, nodes)``."""
        counts = self._counts(assignments)
        edges = self._edge_prior.edges + counts.edges
        gaps = self._edge_prior.gaps + counts.pairs - counts.edges
        return EdgeProbabilities(dist.Dirichlet(self.concentration + counts.sizes), dist.Beta(edges, gaps))

    def enumerate(self, limit: int = 2**20) -> BlockPosterior:
        """Return the posterior of every assignment, and the evidence.

        Parameters
        ----------
        limit : int, default 1048576
            The most assignments to list.

        Raises
        ------
        SettingsError
            If there are more than ``limit``; the message has their number.
        """
        if self.num_blocks**self.num_nodes > limit:
            raise SettingsError(
                f"{self.num_nodes} nodes can be assigned to {self.num_blocks} blocks in "
                f"{self.num_blocks**self.num_nodes} ways, more than the limit of {limit}; use gibbs_sweep and "
                "annealed_evidence"
            )
        index = torch.arange(self.num_blocks**self.num_nodes, device=self.adjacency.device).unsqueeze(1)
        place = self.num_blocks ** torch.arange(self.num_nodes, device=self.adjacency.device)
        assignments = index // place % self.num_blocks
        log_joint = torch.cat([self._log_joint(chunk) for chunk in assignments.split(_CHUNK)])
        log_evidence = log_joint.logsumexp(0)
        probabilities = (log_joint - log_evidence).exp().to(self.adjacency.dtype)
        return BlockPosterior(assignments, probabilities, log_evidence.to(self.adjacency.dtype))

    def sample_prior(self, num_samples: int, *, generator: torch.Generator) -> Tensor:
        """Draw assignments from their prior: ``(num_samples, nodes)``."""
        num_samples = whole_number("num_samples", num_samples, least=1)
        blocks = torch.empty(num_samples, 0, dtype=torch.int64, device=self.adjacency.device)
        sizes = self.adjacency.new_full((num_samples, self.num_blocks), self.concentration)
        for _ in range(self.num_nodes):  # Polya's urn: proportions integrated out
            drawn = torch.multinomial(sizes, 1, generator=generator)
            sizes = sizes.scatter_add(-1, drawn, torch.ones_like(sizes[:, :1]))
            blocks = torch.cat([blocks, drawn], dim=1)
        return blocks

    @one_thread()
    def gibbs_sweep(self, assignments: Tensor, *, generator: torch.Generator, power: Tensor | float = 1.0) -> Tensor:
        """Draw the block of each node anew given all others, one node after the other, in all chains at once.

        Parameters
        ----------
        assignments : Tensor of int
            One a chain, ``(chains, nodes)``.
        generator : torch.Generator
        power : Tensor or float, default 1.0
            The sweep leaves ``prior * likelihood**power`` as it is; finite, ``()`` or ``(chains,)``.

        Returns
        -------
        Tensor of int
            Same shape as ``assignments``.

        Raises
        ------
        ShapeError, DataError
            If ``assignments`` are not such, or ``power`` has another shape.
        SettingsError
            If a power is not finite.
        """
        if assignments.dim() != 2:
            raise ShapeError(f"assignments have shape {tuple(assignments.shape)}; give (chains, {self.num_nodes})")
        counts = self._counts(assignments)
        power = _check_power(power, len(assignments)).to(self.adjacency.device)
        members = one_hot(assignments.T.long(), self.num_blocks).to(self.adjacency)
        for node in range(self.num_nodes):
            neighbours = members[self.adjacency[node] == 1].sum(0)
            counts = counts.changed(members[node], neighbours, -1)
            logits = power * self._log_likelihood_gains(counts, neighbours) + (counts.sizes + self.concentration).log()
            uniform = torch.rand(logits.shape, dtype=logits.dtype, device=logits.device, generator=generator)
            # The largest of logits with Gumbel noise is a draw from their softmax.
            drawn = (logits - (-uniform.log()).log()).argmax(-1)
            members[node] = one_hot(drawn, self.num_blocks).to(members)
            counts = counts.changed(members[node], neighbours, 1)
        return members.argmax(-1).T

    def __call__(self) -> None:
        """Sample proportions and edge probabilities, assign nodes (to be summed out), and observe every pair.

        Raises
        ------
        SettingsError
            If there are more than 4096 assignments; the message has their number.
        """
        if self.num_blocks**self.num_nodes > _MAX_SUMMED_ASSIGNMENTS:
            raise SettingsError(
                f"{self.num_nodes} nodes in {self.num_blocks} blocks have {self.num_blocks**self.num_nodes} "
                f"assignments, and the Pyro model sums out at most {_MAX_SUMMED_ASSIGNMENTS}; "
                "use gibbs_sweep and parameters_given, where probabilities are integrated out instead"
            )
        rows, columns = torch.triu_indices(self.num_blocks, self.num_blocks, device=self.adjacency.device)
        concentration = self.adjacency.new_full((self.num_blocks,), self.concentration)
        proportions = pyro.sample("proportions", dist.Dirichlet(concentration))
        prior = dist.Beta(self._edge_prior.edges[rows, columns], self._edge_prior.gaps[rows, columns])
        probabilities = pyro.sample("edge_probabilities", prior.to_event(1))
        position = torch.zeros_like(self._edge_prior.edges, dtype=torch.int64)
        position[rows, columns] = position[columns, rows] = torch.arange(len(rows), device=position.device)
        blocks = [
            pyro.sample(f"block_{node}", dist.Categorical(proportions), infer={"enumerate": "parallel"})
            for node in range(self.num_nodes)
        ]
        for first in range(self.num_nodes):
            for second in range(first + 1, self.num_nodes):
                edge = dist.Bernoulli(probabilities[position[blocks[first], blocks[second]]])
                pyro.sample(f"edge_{first}_{second}", edge, obs=self.adjacency[first, second])

    def _counts(self, assignments: Tensor) -> BlockCounts:
        whole = not (assignments.is_floating_point() or assignments.is_complex() or assignments.dtype == torch.bool)
        if assignments.shape[-1:] != (self.num_nodes,) or not whole:
            raise ShapeError(
                f"assignments have shape {tuple(assignments.shape)} and type {assignments.dtype}; "
                f"give integers, (*batch, {self.num_nodes})"
            )
        if not bool(((assignments >= 0) & (assignments < self.num_blocks)).all()):
            raise DataError(f"assignments must be blocks 0 to {self.num_blocks - 1}")
        return BlockCounts.of(self.adjacency, assignments.long(), self.num_blocks)

    def _log_joint(self, assignments: Tensor) -> Tensor:
        counts = self._counts(assignments)
        return self._log_prior(counts) + self._log_likelihood(counts)

    def _log_prior(self, counts: BlockCounts) -> Tensor:
        return self._size_table[counts.sizes.long()].sum(-1) - self._total_table[-1]

    def _log_likelihood(self, counts: BlockCounts) -> Tensor:
        return self._edge_prior.log_marginal(counts.edges, counts.pairs).triu().sum((-2, -1))

    def _log_likelihood_gains(self, counts: BlockCounts, neighbours: Tensor) -> Tensor:
        """Return what a node that is in no block adds to the log likelihood in each: ``(*batch, blocks)``."""
        edges, pairs = counts.edges, counts.pairs
        after = self._edge_prior.log_marginal(edges + neighbours.unsqueeze(-2), pairs + counts.sizes.unsqueeze(-2))
        return (after - self._edge_prior.log_marginal(edges, pairs)).sum(-1)


def co_assignment(assignments: Tensor, weights: Tensor | None = None, *, log_weights: Tensor | None = None) -> Tensor:
    """Return how often each pair of nodes shares a block.

    Parameters
    ----------
    assignments : Tensor of int or array
        Shape ``(draws, nodes)``.
    weights : Tensor or array, optional
        Shape ``(draws,)``, normalized here; equal by default.
    log_weights : Tensor or array, optional
        Their logarithms, instead.

    Returns
    -------
    Tensor
        Shape ``(nodes, nodes)``.

    Raises
    ------
    ShapeError
        If the shapes differ from these.
    SettingsError
        If both weights and their logarithms are given.
    DataError
        If a weight is negative or not finite, or all are zero.

    Examples
    --------
    >>> import torch
    >>> co_assignment(torch.tensor([[0, 0, 1], [1, 0, 0]]))[0]
    tensor([1.0000, 0.5000, 0.0000])
    """
    if weights is not None and log_weights is not None:
        raise SettingsError("give co_assignment either weights or log_weights")
    assignments = as_numbers("assignments", assignments)
    if log_weights is not None:
        weights = as_numbers("log_weights", log_weights)
        weights = (weights - weights.max()).exp() if weights.numel() else weights
    elif weights is None:
        weights = torch.ones(assignments.shape[:1], device=assignments.device)
    else:
        weights = as_numbers("weights", weights)
    if assignments.dim() != 2 or weights.shape != assignments.shape[:1]:
        raise ShapeError(
            f"assignments and weights have shapes {tuple(assignments.shape)} and {tuple(weights.shape)}; "
            "give (draws, nodes) and (draws,)"
        )
    if not (bool((weights >= 0).all()) and 0 < float(weights.sum()) < float("inf")):
        raise DataError(
            "weights of draws must be finite and not negative, and not all zero; logarithms are given as log_weights"
        )
    weights = weights / weights.sum()
    total = weights.new_zeros(assignments.shape[-1], assignments.shape[-1])
    for block in assignments.unique().tolist():
        member = (assignments == block).to(weights)
        total = total + (member * weights.unsqueeze(-1)).T @ member
    return total


def _check_adjacency(adjacency: Tensor) -> Tensor:
    adjacency = as_numbers("adjacency", adjacency)
    if adjacency.dim() != 2 or adjacency.shape[0] != adjacency.shape[1] or not len(adjacency):
        raise ShapeError(f"adjacency has shape {tuple(adjacency.shape)}; give (nodes, nodes)")
    if not adjacency.is_floating_point():
        adjacency = adjacency.to(torch.get_default_dtype())
    for wrong, what in (
        ((adjacency != 0) & (adjacency != 1), "is neither 0 nor 1"),
        (adjacency != adjacency.T, "differs from its mirror image; the graph must be undirected"),
        (adjacency.diag().diag() != 0, "joins a node to itself; the graph must have no loops"),
    ):
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise DataError(f"the entry {adjacency[row, column]:g} of adjacency at {row}, {column} {what}")
    return adjacency


def _check_power(power: Tensor | float, num_chains: int) -> Tensor:
    """Return powers as float64, ``(1,)`` or ``(chains, 1)``."""
    powers = torch.as_tensor(power, dtype=torch.float64)
    if powers.shape not in ((), (num_chains,)):
        raise ShapeError(f"power has shape {tuple(powers.shape)}; give one number, or one a chain, ({num_chains},)")
    if not bool(powers.isfinite().all()):
        raise SettingsError(f"power must be finite, not {power}")
    return powers.unsqueeze(-1)


def _check_prior(name: str, prior: tuple[float, float]) -> tuple[float, float]:
    try:
        first, second = prior
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} must be the two parameters of a Beta distribution, not {prior!r}") from error
    positive = (0.0, float("inf"))
    return real_number(f"{name}[0]", first, positive), real_number(f"{name}[1]", second, positive)
