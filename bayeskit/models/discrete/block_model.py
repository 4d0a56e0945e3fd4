"""Stochastic block model with exact and annealed evidence, and Zachary's karate club."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayeskit.core.inputs import as_numbers, real_number, warn_user, whole_number
from bayeskit.core.plots import BLUE, CHAIN_COLOURS, GREY, VERMILION
from bayeskit.core.progress import progress_bar
from bayeskit.core.randomness import new_generator, one_thread
from bayeskit.core.texts import with_error
from bayeskit.errors import AccuracyWarning, DataError, SettingsError, ShapeError, UnknownNameError
from bayeskit.models.discrete.inputs import as_real, digits_of, new_axes, prior_probabilities_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = [
    "AnnealedEvidence",
    "BlockComparison",
    "BlockCounts",
    "BlockPosterior",
    "EdgeProbabilities",
    "KarateClub",
    "StochasticBlockModel",
    "annealed_evidence",
    "co_assignment",
    "compare_num_blocks",
    "karate_club",
    "plot_adjacency",
    "plot_co_assignment",
]


# Zachary's karate club data.


class KarateClub(NamedTuple):
    """Friendships in Zachary's karate club, and factions after the split.

    Attributes
    ----------
    adjacency : Tensor
        1 for members who met outside the club, ``(34, 34)``, symmetric. Row ``i`` is member ``i + 1`` of the paper.
    with_instructor : Tensor of bool
        True for the instructor's faction (member 1), False for the administrator's (member 34), ``(34,)``.
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


# Sufficient statistics of block assignments, and marginal likelihood.


class BlockCounts(NamedTuple):
    """Sufficient statistics of block assignments.

    Attributes
    ----------
    sizes : Tensor
        Number of nodes per block, ``(*batch, blocks)``.
    ends : Tensor
        Number of edges between blocks, ``(*batch, blocks, blocks)``; edges within a block count twice.
    """

    sizes: Tensor
    ends: Tensor

    @classmethod
    def of(cls, adjacency: Tensor, assignments: Tensor, num_blocks: int) -> BlockCounts:
        """Compute the counts of ``assignments (*batch, nodes)``."""
        members = one_hot(assignments, num_blocks).to(adjacency)
        return cls(members.sum(-2), members.mT @ (adjacency @ members))

    @property
    def edges(self) -> Tensor:
        """Number of edges between blocks, and within blocks on the diagonal, ``(*batch, blocks, blocks)``."""
        return _within_once(self.ends)

    @property
    def pairs(self) -> Tensor:
        """Number of node pairs between blocks, and within blocks on the diagonal, ``(*batch, blocks, blocks)``."""
        return _within_once(self.sizes.unsqueeze(-1) * self.sizes.unsqueeze(-2) - self.sizes.diag_embed())

    def changed(self, block: Tensor, neighbours: Tensor, sign: int) -> BlockCounts:
        """Return the counts after a node joins (``sign=1``) or leaves (``sign=-1``) a block.

        ``block``: one-hot block of the node, ``(*batch, blocks)``. ``neighbours``: number of neighbours of the node in
        each block, same shape.
        """
        met = block.unsqueeze(-1) * neighbours.unsqueeze(-2)
        return BlockCounts(self.sizes + sign * block, self.ends + sign * (met + met.mT))


class _EdgePrior:
    """Beta distributions of the edge probabilities, ``(blocks, blocks)``, integrated out for up to ``most`` pairs."""

    def __init__(self, edges: Tensor, gaps: Tensor, most: int) -> None:
        self.edges, self.gaps = edges, gaps
        kinds, kind = torch.stack([edges, gaps], -1).flatten(0, 1).unique(dim=0, return_inverse=True)
        self._start = kind.view_as(edges) * (most + 1)
        # Counts are integers: tabulated Gamma ratios are several times faster than lgamma.
        # Tables are float64, because results are small differences of large entries.
        first, second = kinds.double().unbind(-1)
        self._edge_table, self._gap_table, self._pair_table = (
            _log_rising_factorials(start, most) for start in (first, second, first + second)
        )

    def log_marginal(self, edges: Tensor, pairs: Tensor) -> Tensor:
        """Return log probabilities of ``edges`` among ``pairs`` of nodes, ``(*batch, blocks, blocks)``, float64."""
        found, all_pairs = edges.long(), pairs.long()
        among = self._edge_table[self._start + found] + self._gap_table[self._start + all_pairs - found]
        return among - self._pair_table[self._start + all_pairs]


def _within_once(counts: Tensor) -> Tensor:
    return counts - 0.5 * torch.diag_embed(counts.diagonal(dim1=-2, dim2=-1))


def _log_rising_factorials(start: Tensor, most: int) -> Tensor:
    """Return ``log Gamma(start + n) - log Gamma(start)`` for ``n = 0, ..., most``, concatenated over ``start``."""
    factors = (start.unsqueeze(-1) + torch.arange(most, device=start.device)).log()
    return torch.nn.functional.pad(factors.cumsum(-1), (1, 0)).flatten()


# The stochastic block model: edge probabilities depend only on the blocks of the nodes.

_CHUNK = 2**14
_MAX_SUMMED_ASSIGNMENTS = 2**12


class BlockPosterior(NamedTuple):
    """Posterior of all block assignments.

    Attributes
    ----------
    assignments : Tensor of int
        Shape ``(count, nodes)``.
    probabilities : Tensor
        Shape ``(count,)``. Permutations of block labels are separate, equally probable assignments.
    log_evidence : Tensor
        Log marginal likelihood of the graph, ``()``.
    """

    assignments: Tensor
    probabilities: Tensor
    log_evidence: Tensor

    def __repr__(self) -> str:
        count, nodes = self.assignments.shape
        return f"BlockPosterior(log_evidence={float(self.log_evidence):.6f}, {count} assignments of {nodes} nodes)"

    def co_assignment(self) -> Tensor:
        """Return the posterior probability that two nodes share a block, ``(nodes, nodes)``."""
        return co_assignment(self.assignments, self.probabilities)


class EdgeProbabilities(NamedTuple):
    """Posteriors of the parameters given an assignment.

    Attributes
    ----------
    proportions : Dirichlet
        Block proportions, batch shape ``(*batch)``.
    edges : Beta
        Edge probabilities between blocks, symmetric, batch shape ``(*batch, blocks, blocks)``.
    """

    proportions: dist.Dirichlet
    edges: dist.Beta


class StochasticBlockModel:
    r"""Stochastic block model of an undirected graph without loops.

    Block proportions are Dirichlet, node assignments are independent given the proportions, edge probabilities between
    blocks :math:`a \le b` are Beta, and edges are independent given assignments and probabilities. In
    :meth:`log_joint` proportions and probabilities are integrated out in closed form.

    As a Pyro model it samples ``"proportions"`` and ``"edge_probabilities"`` (of block pairs ``(0, 0), (0, 1), ...,
    (1, 1), ...``) and enumerates the assignments, which is feasible for small graphs only.

    Parameters
    ----------
    adjacency : Tensor or array
        Symmetric, entries 0 and 1, zero diagonal, ``(nodes, nodes)``. Integers and bools get the default dtype.
    num_blocks : int
        At least 1; blocks may be empty.
    concentration : float, default 1.0
        Dirichlet concentration of each block.
    within_prior, between_prior : (float, float), default (1.0, 1.0)
        Beta parameters of edge probabilities within and between blocks. Priors that favour edges within blocks find
        communities; equal priors also find hubs and other roles.

    Raises
    ------
    ShapeError, DataError
        If ``adjacency`` is not a valid adjacency matrix.
    SettingsError
        If a setting is outside its domain.

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
        self.concentration = real_number("concentration", concentration, "(0, inf)")
        self.within_prior = _check_prior("within_prior", within_prior)
        self.between_prior = _check_prior("between_prior", between_prior)
        same = torch.eye(self.num_blocks, dtype=torch.bool, device=adjacency.device)
        within, between = (adjacency.new_tensor(prior) for prior in (self.within_prior, self.between_prior))
        edges, gaps = torch.where(same.unsqueeze(-1), within, between).unbind(-1)
        self._edge_prior = _EdgePrior(edges, gaps, self.num_nodes * (self.num_nodes - 1) // 2)
        starts = adjacency.new_tensor([self.concentration, self.num_blocks * self.concentration], dtype=torch.float64)
        self._size_table, self._total_table = _log_rising_factorials(starts, self.num_nodes).view(2, -1)

    def __repr__(self) -> str:
        edges = int(self.adjacency.sum()) // 2
        return f"StochasticBlockModel({self.num_nodes} nodes, {edges} edges, num_blocks={self.num_blocks})"

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.adjacency)

    def log_prior(self, assignments: Tensor) -> Tensor:
        """Return the log probability of assignments, proportions integrated out, ``(*batch)``.

        ``assignments``: block of each node, ``(*batch, nodes)``. Raises ``ShapeError`` or ``DataError`` if
        ``assignments`` are invalid.
        """
        return self._log_prior(self._counts(assignments)).to(self.adjacency.dtype)

    def log_likelihood(self, assignments: Tensor) -> Tensor:
        """Return the log probability of the graph given assignments, edge probabilities integrated out.

        Arguments, shapes and errors as in :meth:`log_prior`.
        """
        return self._log_likelihood(self._counts(assignments)).to(self.adjacency.dtype)

    def log_joint(self, assignments: Tensor) -> Tensor:
        """Return the unnormalized log posterior: :meth:`log_prior` plus :meth:`log_likelihood`."""
        return self._log_joint(assignments).to(self.adjacency.dtype)

    def parameters_given(self, assignments: Tensor) -> EdgeProbabilities:
        """Return the exact posteriors of proportions and edge probabilities given assignments ``(*batch, nodes)``."""
        counts = self._counts(assignments)
        edges = self._edge_prior.edges + counts.edges
        gaps = self._edge_prior.gaps + counts.pairs - counts.edges
        return EdgeProbabilities(dist.Dirichlet(self.concentration + counts.sizes), dist.Beta(edges, gaps))

    def enumerate(self, limit: int = 2**20) -> BlockPosterior:
        """Return the exact posterior of all assignments, and the evidence.

        ``limit``: maximum number of assignments. Raises ``SettingsError`` if there are more than ``limit`` assignments.
        """
        if self.num_blocks**self.num_nodes > limit:
            raise SettingsError(
                f"{self.num_nodes} nodes can be assigned to {self.num_blocks} blocks in "
                f"{self.num_blocks**self.num_nodes} ways, more than the limit of {limit}; use gibbs_sweep or "
                "annealed_evidence"
            )
        count = self.num_blocks**self.num_nodes
        assignments = digits_of(count, self.num_blocks, self.num_nodes, self.adjacency.device)
        log_joint = torch.cat([self._log_joint(chunk) for chunk in assignments.split(_CHUNK)])
        log_evidence = log_joint.logsumexp(0)
        probabilities = (log_joint - log_evidence).exp().to(self.adjacency.dtype)
        return BlockPosterior(assignments, probabilities, log_evidence.to(self.adjacency.dtype))

    def sample_prior(self, num_samples: int, *, generator: torch.Generator) -> Tensor:
        """Draw assignments from the prior, ``(num_samples, nodes)``."""
        num_samples = whole_number("num_samples", num_samples, least=1)
        blocks = torch.empty(num_samples, 0, dtype=torch.int64, device=self.adjacency.device)
        sizes = self.adjacency.new_full((num_samples, self.num_blocks), self.concentration)
        for _ in range(self.num_nodes):  # Polya urn
            drawn = torch.multinomial(sizes, 1, generator=generator)
            sizes = sizes.scatter_add(-1, drawn, torch.ones_like(sizes[:, :1]))
            blocks = torch.cat([blocks, drawn], dim=1)
        return blocks

    @one_thread()
    def gibbs_sweep(self, assignments: Tensor, *, generator: torch.Generator, power: Tensor | float = 1.0) -> Tensor:
        """Perform a Gibbs sweep over the nodes, vectorized over chains.

        ``assignments``: assignment of each chain, ``(chains, nodes)``. ``power``: the invariant distribution is ``prior
        * likelihood**power``; finite, shape ``()`` or ``(chains,)``. Raises ``ShapeError`` or ``DataError`` if
        ``assignments`` are invalid, or ``power`` has a wrong shape; ``SettingsError`` if a power is not finite.

        Returns
        -------
        Tensor of int
            Same shape as ``assignments``.
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
            # Gumbel-max trick.
            drawn = (logits - (-uniform.log()).log()).argmax(-1)
            members[node] = one_hot(drawn, self.num_blocks).to(members)
            counts = counts.changed(members[node], neighbours, 1)
        return members.argmax(-1).T

    def __call__(self) -> None:
        """Run the Pyro model with enumerated assignments; SettingsError for more than 4096 assignments."""
        if self.num_blocks**self.num_nodes > _MAX_SUMMED_ASSIGNMENTS:
            raise SettingsError(
                f"{self.num_nodes} nodes in {self.num_blocks} blocks have {self.num_blocks**self.num_nodes} "
                f"assignments, but the Pyro model sums out at most {_MAX_SUMMED_ASSIGNMENTS}; use gibbs_sweep and "
                "parameters_given, which integrate out the probabilities instead"
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
        """Return the change of the log likelihood when an unassigned node joins each block, ``(*batch, blocks)``."""
        edges, pairs = counts.edges, counts.pairs
        after = self._edge_prior.log_marginal(edges + neighbours.unsqueeze(-2), pairs + counts.sizes.unsqueeze(-2))
        return (after - self._edge_prior.log_marginal(edges, pairs)).sum(-1)


def co_assignment(assignments: Tensor, weights: Tensor | None = None, *, log_weights: Tensor | None = None) -> Tensor:
    """Return the (weighted) fraction of draws in which two nodes share a block, ``(nodes, nodes)``.

    Parameters
    ----------
    assignments : Tensor of int or array
        Shape ``(draws, nodes)``.
    weights : Tensor or array, optional
        Shape ``(draws,)``, normalized internally; default equal.
    log_weights : Tensor or array, optional
        Log weights, as an alternative to ``weights``.

    Raises
    ------
    ShapeError
        If a shape is wrong.
    SettingsError
        If both ``weights`` and ``log_weights`` are given.
    DataError
        If a weight is negative or not finite, or all weights are zero.

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
    adjacency = as_real("adjacency", adjacency)
    if adjacency.dim() != 2 or adjacency.shape[0] != adjacency.shape[1] or not len(adjacency):
        raise ShapeError(f"adjacency has shape {tuple(adjacency.shape)}; give (nodes, nodes)")
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
        raise ShapeError(f"power has shape {tuple(powers.shape)}; give one number, or one per chain, ({num_chains},)")
    if not bool(powers.isfinite().all()):
        raise SettingsError(f"power must be finite, not {power}")
    return powers.unsqueeze(-1)


def _check_prior(name: str, prior: tuple[float, float]) -> tuple[float, float]:
    try:
        first, second = prior
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} must be the two parameters of a Beta distribution, not {prior!r}") from error
    return real_number(f"{name}[0]", first, "(0, inf)"), real_number(f"{name}[1]", second, "(0, inf)")


# Evidence of a block model by annealed importance sampling.

#: Minimum effective sample size of a reliable result (or half of the chains if fewer).
_LEAST_EFFECTIVE = 50
#: Number of steps of the first pilot run.
_FIRST_PILOT = 50


class AnnealedEvidence(NamedTuple):
    """Result of annealed importance sampling of assignments.

    Attributes
    ----------
    log_evidence : float
        Log of the mean weight; the mean weight is an unbiased estimate.
    standard_error : float
        Standard error of ``log_evidence``, from the variance of the weights.
    assignments : Tensor of int
        Final states of the chains, ``(chains, nodes)``.
    log_weights : Tensor
        Log weights of the chains, ``(chains,)``.
    num_steps : int
        Number of sweeps per chain.
    """

    log_evidence: float
    standard_error: float
    assignments: Tensor
    log_weights: Tensor
    num_steps: int

    def __repr__(self) -> str:
        chains, nodes = self.assignments.shape
        return (
            f"AnnealedEvidence({with_error(self.log_evidence, self.standard_error)}, {chains} chains of "
            f"{self.num_steps} steps on {nodes} nodes, worth {self.effective_sample_size:.0f} chains)"
        )

    @property
    def weights(self) -> Tensor:
        """Normalized weights of the chains, ``(chains,)``."""
        return self.log_weights.softmax(0)

    @property
    def effective_sample_size(self) -> float:
        """Effective sample size of the weights."""
        return float(1 / self.weights.square().sum())

    @property
    def reliable(self) -> bool:
        """Whether the effective sample size is at least 50, or half of the chains if fewer."""
        return self.effective_sample_size >= min(_LEAST_EFFECTIVE, len(self.log_weights) / 2)

    def co_assignment(self) -> Tensor:
        """Return the posterior probability that two nodes share a block, ``(nodes, nodes)``.

        Warns with ``AccuracyWarning`` if a few chains have most of the weight.
        """
        if not self.reliable:
            warn_user(_too_few(self, "probabilities to share a block"), AccuracyWarning)
        return co_assignment(self.assignments, self.weights)


@one_thread()
def annealed_evidence(
    model: StochasticBlockModel,
    num_chains: int = 1000,
    num_steps: int | None = None,
    *,
    max_num_steps: int = 6400,
    seed: int | torch.Generator = 0,
    progress: bool = True,
) -> AnnealedEvidence:
    r"""Estimate the evidence of a block model by annealed importance sampling with Gibbs sweeps.

    Chains start from the prior and perform one sweep at each of the distributions
    :math:`p(z) \, p(A \mid z)^{\beta_t}`, :math:`\beta_t = (t / T)^2`. Chains are independent, so the standard error
    accounts for multiple modes found by different chains.

    By default, pilot runs of 50, 100, 200, ... steps find a number of steps with effective sample size at least 50 (or
    half of the chains if fewer). The estimate is a separate run with twice as many steps, so the mean weight is
    unbiased. Raises ``SettingsError`` if there are fewer than two chains or no steps. Warns with ``AccuracyWarning`` if
    a few chains have most of the weight; estimate and standard error are then unreliable.

    Parameters
    ----------
    model : StochasticBlockModel
    num_chains : int, default 1000
        At least 2.
    num_steps : int, optional
        Number of sweeps per chain; disables the pilot runs.
    max_num_steps : int, default 6400
        Maximum number of steps chosen by pilot runs, at least 100.
    seed : int or torch.Generator, default 0
    progress : bool, default True
        Show a progress bar on a terminal for runs longer than two seconds.

    References
    ----------
    Neal, R. M. (2001). Annealed importance sampling. Statistics and Computing 11, 125-139.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.block_model import StochasticBlockModel, annealed_evidence
    >>> two_triangles = torch.block_diag(*[1 - torch.eye(3, dtype=torch.float64)] * 2)
    >>> model = StochasticBlockModel(two_triangles, num_blocks=2)
    >>> estimate = annealed_evidence(model, num_chains=500, num_steps=20)
    >>> abs(estimate.log_evidence - float(model.enumerate().log_evidence)) < 4 * estimate.standard_error
    True
    """
    num_chains = whole_number("num_chains", num_chains, least=2)
    generator = new_generator(seed, model.adjacency.device, stream="annealed_evidence")
    if num_steps is None:
        most = whole_number("max_num_steps", max_num_steps, least=2 * _FIRST_PILOT)
        steps = _steps_by_pilots(model, num_chains, most, generator, progress)
    else:
        steps = whole_number("num_steps", num_steps, least=1)
    estimate = _anneal(model, num_chains, steps, generator, f"annealing, {steps} steps", progress)
    if not estimate.reliable:
        warn_user(_too_few(estimate, "the evidence or its error"), AccuracyWarning)
    return estimate


def _steps_by_pilots(
    model: StochasticBlockModel, num_chains: int, most: int, generator: torch.Generator, progress: bool
) -> int:
    """Return twice the number of steps of the first pilot run that is reliable."""
    steps = _FIRST_PILOT
    while 2 * steps < most:
        pilot = _anneal(model, num_chains, steps, generator, f"annealing, pilot of {steps} steps", progress)
        if pilot.reliable:
            break
        steps *= 2
    return min(2 * steps, most)


def _anneal(
    model: StochasticBlockModel,
    num_chains: int,
    num_steps: int,
    generator: torch.Generator,
    description: str,
    progress: bool,
) -> AnnealedEvidence:
    assignments = model.sample_prior(num_chains, generator=generator)
    log_weights = model.adjacency.new_zeros(num_chains, dtype=torch.float64)
    before = 0.0
    with progress_bar(description, num_steps, progress) as bar:
        for step in range(1, num_steps + 1):
            power = (step / num_steps) ** 2
            log_weights = log_weights + (power - before) * model.log_likelihood(assignments)
            assignments = model.gibbs_sweep(assignments, generator=generator, power=power)
            before = power
            bar.update(step)
    log_evidence = float(log_weights.logsumexp(0)) - math.log(num_chains)
    error = float((log_weights - log_evidence).exp().std()) / math.sqrt(num_chains)
    return AnnealedEvidence(
        log_evidence, error, assignments, log_weights.to(model.adjacency.dtype), num_steps=num_steps
    )


def _too_few(estimate: AnnealedEvidence, what: str) -> str:
    return (
        f"the effective sample size of the {len(estimate.log_weights)} chains is {estimate.effective_sample_size:.0f}, "
        f"too small to rely on {what}; raise num_steps above {estimate.num_steps}, or num_chains"
    )


# Comparison of numbers of blocks by evidence.


@dataclass(frozen=True, repr=False)
class BlockComparison:
    """Evidence of a graph for several numbers of blocks.

    Attributes
    ----------
    results : dict of int to AnnealedEvidence
        Keyed by number of blocks.
    prior_probabilities : dict of int to float
        Keyed by number of blocks, normalized.
    """

    results: dict[int, AnnealedEvidence]
    prior_probabilities: dict[int, float]

    def __getitem__(self, num_blocks: int) -> AnnealedEvidence:
        if num_blocks not in self.results:
            raise UnknownNameError(
                f"no model has {num_blocks!r} blocks; there are: {', '.join(map(str, self.results))}"
            )
        return self.results[num_blocks]

    def __repr__(self) -> str:
        lines = [
            f"{row.num_blocks} blocks: log evidence {with_error(row.log_evidence, row.standard_error)}, probability "
            f"{with_error(row.posterior_probability, row.posterior_probability_error)}"
            + ("" if row.reliable else " (not to be relied on)")
            for row in self.to_pandas().itertuples()
        ]
        return "\n".join(lines)

    @property
    def best(self) -> int:
        """Number of blocks with the largest evidence."""
        return max(self.results, key=lambda size: self.results[size].log_evidence)

    def log_bayes_factor(self, num_blocks: int, other: int | None = None) -> tuple[float, float]:
        """Return the log Bayes factor between two numbers of blocks and its standard error, in nats.

        ``other``: default :attr:`best`. Raises ``UnknownNameError`` if a number of blocks is not in the comparison.
        """
        one, two = self[num_blocks], self[self.best if other is None else other]
        if one is two:
            return 0.0, 0.0
        return one.log_evidence - two.log_evidence, math.hypot(one.standard_error, two.standard_error)

    @property
    def posterior_probabilities(self) -> dict[int, tuple[float, float]]:
        """Posterior probability of each number of blocks and its Monte Carlo standard error (delta method)."""
        estimates = self.results.values()
        with np.errstate(divide="ignore"):
            weight = np.log([self.prior_probabilities[size] for size in self.results])
        weight = weight + np.array([z.log_evidence for z in estimates])
        p = np.exp(weight - weight.max())
        p = p / p.sum()
        # d p_i = p_i (d z_i - sum_j p_j d z_j), with independent errors of the log evidences z.
        error = np.sqrt((np.diag(p) - np.outer(p, p)) ** 2 @ np.array([z.standard_error for z in estimates]) ** 2)
        return {size: (float(a), float(b)) for size, a, b in zip(self.results, p, error, strict=True)}

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per number of blocks; Bayes factors are relative to the best."""
        import pandas as pd

        posterior, rows = self.posterior_probabilities, []
        for size, z in self.results.items():
            (factor, factor_error), (p, p_error) = self.log_bayes_factor(size), posterior[size]
            rows.append(
                {
                    "num_blocks": size,
                    "log_evidence": z.log_evidence,
                    "standard_error": z.standard_error,
                    "log_bayes_factor": factor,
                    "log_bayes_factor_error": factor_error,
                    "prior_probability": self.prior_probabilities[size],
                    "posterior_probability": p,
                    "posterior_probability_error": p_error,
                    "effective_sample_size": z.effective_sample_size,
                    "num_steps": z.num_steps,
                    "reliable": z.reliable,
                }
            )
        return pd.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the posterior probability of each number of blocks with error bars of two standard errors.

        ``ax``: default axes of a new figure.
        """
        ax = new_axes(5.2, 3.6) if ax is None else ax
        p, error = np.array(list(self.posterior_probabilities.values())).T
        reach = [np.minimum(2 * error, p), np.minimum(2 * error, 1 - p)]
        ax.bar(range(len(p)), p, color=BLUE, alpha=0.8)
        ax.errorbar(range(len(p)), p, yerr=reach, fmt="none", ecolor=GREY, capsize=3)
        ax.set_xticks(range(len(p)), [str(size) for size in self.results])
        ax.set_ylim(0.0, 1.0)
        ax.set_xlabel("number of blocks")
        ax.set_ylabel("posterior probability")
        return ax


def compare_num_blocks(
    adjacency: Tensor,
    num_blocks: Iterable[int] = range(1, 6),
    *,
    concentration: float = 1.0,
    within_prior: tuple[float, float] = (1.0, 1.0),
    between_prior: tuple[float, float] = (1.0, 1.0),
    prior_probabilities: Mapping[int, float] | None = None,
    num_chains: int = 1000,
    num_steps: int | None = None,
    max_num_steps: int = 6400,
    seed: int = 0,
    progress: bool = True,
) -> BlockComparison:
    """Compare numbers of blocks by annealed importance sampling estimates of the evidence.

    With 300 chains, a graph of 24 nodes takes about a minute per number of blocks above two on one core. Blocks may be
    empty, so models with more blocks include models with fewer; the penalty for superfluous blocks is smaller than with
    nonempty blocks. Warns with ``AccuracyWarning`` if an estimate is unreliable.

    Parameters
    ----------
    adjacency, concentration, within_prior, between_prior
        As in :class:`StochasticBlockModel`.
    num_blocks : iterable of int, default 1 to 5
        At least two numbers of blocks.
    prior_probabilities : mapping of int to float, optional
        Prior probability of each number, normalized internally; default equal.
    num_chains, num_steps, max_num_steps, progress
        As in :func:`annealed_evidence`, for each number.
    seed : int, default 0
        Each number of blocks uses a separate random stream.

    Raises
    ------
    ShapeError, DataError
        If ``adjacency`` is not a valid adjacency matrix.
    SettingsError
        If there are fewer than two numbers, a number is repeated, the keys of ``prior_probabilities`` differ from
        ``num_blocks``, or a setting is outside its domain.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.block_model import compare_num_blocks
    >>> two_cliques = torch.block_diag(*[1 - torch.eye(5)] * 2)
    >>> comparison = compare_num_blocks(two_cliques, [1, 2], num_steps=100)
    >>> comparison.best, comparison.posterior_probabilities[2][0] > 0.99
    (2, True)
    """
    sizes = _sizes(num_blocks)
    chances = prior_probabilities_of(sizes, prior_probabilities)
    models = {size: StochasticBlockModel(adjacency, size, concentration, within_prior, between_prior) for size in sizes}
    results = {
        size: annealed_evidence(
            model,
            num_chains,
            num_steps,
            max_num_steps=max_num_steps,
            seed=new_generator(seed, model.adjacency.device, stream=f"{size} blocks"),
            progress=progress,
        )
        for size, model in models.items()
    }
    return BlockComparison(results, chances)


def _sizes(num_blocks: Any) -> list[int]:
    given = list(num_blocks) if isinstance(num_blocks, Iterable) else [num_blocks]
    sizes = [whole_number("num_blocks", size, least=1) for size in given]
    if len(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise SettingsError(f"give at least two numbers of blocks, each once, such as range(1, 5), not {sizes}")
    return sizes


# Plots of graphs sorted by block.


def plot_adjacency(adjacency: Tensor, assignments: Tensor, ax: Axes | None = None) -> Axes:
    """Plot the adjacency matrix, dark for edges, with lines between blocks.

    Nodes are sorted by block, then by index, as in :func:`plot_co_assignment`. Raises ``ShapeError`` if a shape is
    wrong.

    Parameters
    ----------
    adjacency : Tensor or array
        Shape ``(nodes, nodes)``.
    assignments : Tensor of int or array
        Block of each node, ``(nodes,)``.
    ax : Axes, optional
        Default axes of a new figure.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> axes = plot_adjacency(torch.ones(4, 4), torch.tensor([0, 1, 0, 1]), Figure().subplots())
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['0', '2', '1', '3']
    """
    adjacency, assignments, order = _sorted(adjacency, assignments)
    ax, _ = _plot_matrix(adjacency, order, ax)
    ax.set_title(f"{len(assignments.unique())} blocks", fontsize="small")
    ends = assignments[order].diff().nonzero().flatten() + 0.5
    for end in ends.tolist():
        ax.axhline(end, color=VERMILION, linewidth=1.2)
        ax.axvline(end, color=VERMILION, linewidth=1.2)
    return ax


def plot_co_assignment(probabilities: Tensor, assignments: Tensor, ax: Axes | None = None) -> Axes:
    """Plot the posterior probability that two nodes share a block, sorted as in :func:`plot_adjacency`.

    Raises ``ShapeError`` if a shape is wrong.

    Parameters
    ----------
    probabilities : Tensor or array
        Shape ``(nodes, nodes)``.
    assignments, ax
        As in :func:`plot_adjacency`; the blocks also colour the labels. The colour bar takes space from the axes.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> axes = plot_co_assignment(torch.eye(3), torch.tensor([1, 0, 1]), Figure().subplots())
    >>> axes.images[0].get_clim()
    (0.0, 1.0)
    """
    probabilities, assignments, order = _sorted(probabilities, assignments)
    ax, image = _plot_matrix(probabilities, order, ax)
    ax.figure.colorbar(image, ax=ax, label="probability to share a block")
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        for label, block in zip(labels, assignments[order].tolist(), strict=True):
            label.set_color(CHAIN_COLOURS[block % len(CHAIN_COLOURS)])
    return ax


def _sorted(matrix: Tensor, assignments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both as tensors, and the nodes sorted by block and index."""
    matrix, assignments = as_numbers("the matrix", matrix), as_numbers("assignments", assignments)
    nodes = len(matrix) if matrix.dim() else 0
    if matrix.shape != (nodes, nodes) or assignments.shape != (nodes,):
        raise ShapeError(
            f"the matrix has shape {tuple(matrix.shape)} and assignments {tuple(assignments.shape)}; "
            "give (nodes, nodes) and (nodes,)"
        )
    return matrix, assignments, assignments.argsort(stable=True)


def _plot_matrix(matrix: Tensor, order: Tensor, ax: Axes | None) -> tuple[Axes, AxesImage]:
    ax = new_axes(5.2, 4.6) if ax is None else ax
    sorted_matrix = matrix[order][:, order].detach().cpu().to(torch.float64)
    image = ax.imshow(sorted_matrix.numpy(), cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")
    ticks, names = range(len(order)), [str(node) for node in order.tolist()]
    size = 8 if len(order) <= 20 else 5
    ax.set_xticks(ticks, names, fontsize=size, rotation=90)
    ax.set_yticks(ticks, names, fontsize=size)
    ax.tick_params(length=0)
    ax.set_xlabel("node")
    ax.set_ylabel("node")
    return ax, image
