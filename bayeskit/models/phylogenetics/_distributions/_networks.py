"""Conditional clade distributions and subsplit Bayesian networks of topologies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints

from bayeskit.errors import AccuracyWarning, SettingsError, ShapeError
from bayeskit.extend import new_generator, warn_user
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions import _graphs as graph_passes
from bayeskit.models.phylogenetics._distributions._graphs import (
    Choices,
    Floats,
    Numbers,
    SubsplitGraph,
    add_up,
    describe_missing,
    every_root,
    graph_of_all_splits,
    graph_of_hanging,
    graph_of_rootings,
    hanging_sets,
    one_root,
)
from bayeskit.models.phylogenetics._distributions._topology_distribution import (
    Estimate,
    SplitProbabilities,
    TopologyDistribution,
    WeightedTopologies,
    check_topologies,
    most_probable_splits,
    weighted_topologies,
)
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import Tree

# Maximum likelihood and penalised likelihood for the option probabilities of a graph.

#: Growth factor of the overrelaxation, its maximum, and the number of initial plain steps.
_GROWTH, _LARGEST_STRETCH, _PLAIN_ITERATIONS = 1.3, 1e4, 10
#: Lower bound of the log probability of an option in the sample, which may underflow during EM.
_LEAST = -100.0


class NetworkFit(NamedTuple):
    """Fitted log probabilities of the options, and the mean log likelihood before and after each iteration."""

    log_probabilities: Floats
    log_likelihoods: Floats


def simple_average(graph: SubsplitGraph, choices: Choices, weights: Floats) -> NetworkFit:
    """Return the fit with all root positions equally probable, from topologies with weights `(topologies,)`."""
    # For rooted topologies this is the maximum of the likelihood.
    log_probabilities = graph.shares(choices.counts(choices.equal_rootings(), weights))
    log_prob, _ = choices.log_prob(graph.table(log_probabilities, missing=-np.inf))
    return NetworkFit(log_probabilities, np.array([weights @ log_prob]))


def prior_counts(graph: SubsplitGraph, choices: Choices, weights: Floats, alpha: float) -> Floats:
    """Return pseudo-counts, `(options,)`, that sum to `alpha` times each parent subsplit's share of the sample."""
    # Options of the root get `alpha` times their simple average; other groups spread their share evenly.
    counts = choices.counts(choices.equal_rootings(), weights)
    even = (graph.sum_groups(counts) / np.diff(graph.starts))[graph.group_of]
    root = int(graph.starts[-2])
    return alpha * np.concatenate([even[:root], counts[root:]])


class _Point(NamedTuple):
    """Log probabilities, their mean log likelihood, its sum with the log prior, and the result of an EM step."""

    log_probabilities: Floats
    log_likelihood: float
    objective: float
    target: Floats


def _expectation_maximization(
    graph: SubsplitGraph,
    choices: Choices,
    weights: Floats,
    pseudo_counts: Floats,
    max_iterations: int,
    tolerance: float,
) -> NetworkFit:
    """Maximise the likelihood times a Dirichlet prior by overrelaxed EM (Salakhutdinov and Roweis 2003).

    `pseudo_counts` are `(options,)`; stop at a gain below `tolerance` nats a tree in a cycle, or with AccuracyWarning.
    """
    held = pseudo_counts > 0

    def evaluate(log_probabilities: Floats) -> _Point:
        log_prob, saved = choices.log_prob(graph.table(log_probabilities, missing=-np.inf))
        log_likelihood = float(weights @ log_prob)
        log_prior = float(pseudo_counts[held] @ log_probabilities[held])
        target = graph.shares(choices.counts(saved, weights) + pseudo_counts)
        return _Point(log_probabilities, log_likelihood, log_likelihood + log_prior, target)

    # Plain EM raises the probability of a newly useful option by the same small factor in each iteration. Steps are
    # therefore overrelaxed in the log probabilities by a growing factor, until the objective decreases and the step is
    # rejected. These steps are a cycle; the next cycle starts with plain steps. The objective never decreases; with a
    # prior, the likelihood alone may. A small gain does not bound the distance to the maximum.
    point = evaluate(simple_average(graph, choices, weights).log_probabilities)
    history, stretch, start, gain = [point.log_likelihood], 1.0, point.objective, np.inf
    for iteration in range(1, max_iterations + 1):
        following = evaluate(point.target if stretch == 1.0 else _stretched(graph, point, stretch))
        ends = stretch > 1.0 and not following.objective >= point.objective
        if not ends:
            point = following
            history.append(point.log_likelihood)
            stretch *= _GROWTH if iteration >= _PLAIN_ITERATIONS else 1.0
        # If the maximum has a closed form, the first step reaches it and further steps change nothing.
        stands = np.array_equal(point.target, point.log_probabilities)
        if ends or stands or stretch > _LARGEST_STRETCH:
            gain, start, stretch = point.objective - start, point.objective, 1.0
            if stands or gain < tolerance:
                return _fit(graph, point, history)
    # The gain of the truncated cycle, or of the last complete cycle if it has just ended.
    gain = point.objective - start or gain
    warn_user(
        f"EM stopped after {max_iterations} iterations without convergence: the last cycle still gained {gain:.1e} "
        "nats per tree. Remedy: raise max_iterations, or raise tolerance if this precision is sufficient.",
        AccuracyWarning,
    )
    return _fit(graph, point, history)


def _fit(graph: SubsplitGraph, point: _Point, history: list[float]) -> NetworkFit:
    """Return the point with log probabilities of at least `_LEAST`; the change is far below rounding."""
    return NetworkFit(graph.normalised(np.maximum(point.log_probabilities, _LEAST)), np.array(history))


def _stretched(graph: SubsplitGraph, point: _Point, stretch: float) -> Floats:
    """Return an overrelaxed EM step; impossible options stay impossible."""
    possible = np.isfinite(point.log_probabilities) & np.isfinite(point.target)
    step = np.zeros_like(point.target)
    np.subtract(point.target, point.log_probabilities, out=step, where=possible)
    return graph.normalised(np.where(possible, point.log_probabilities + stretch * step, -np.inf))


# Distributions that build a topology by successive splits of clades.

_ARRAYS = ("group_clade", "group_sister", "starts", "parts")


class GraphDistribution(TopologyDistribution):
    """Base class of distributions with one probability for each option of a graph of splits.

    Parameters
    ----------
    graph : SubsplitGraph
        Groups of options: one group for each clade (with its sister, if the model has them), one option per split.
    logits : Tensor
        Log probabilities of the options up to a constant for each group, `(options,)`.

    Raises
    ------
    SettingsError
        If the logits are not a floating-point tensor.
    ShapeError
        If the number of logits differs from the number of options.
    """

    def __init__(self, graph: SubsplitGraph, logits: Tensor) -> None:
        _check_logits(logits, graph)
        self.graph, self.logits = graph, logits
        self._state: _State | None = None
        super().__init__(graph.taxa, graph.rooted)

    def _size(self) -> str:
        return f"{self.graph.num_options} options"

    def choices(self, topologies: Topologies | Tree | Tensor) -> Choices:
        """Return the options that make up topologies, for repeated use in `log_prob_of_choices`.

        Parameters
        ----------
        topologies : Topologies, Tree or Tensor
            As in `log_prob`.

        Returns
        -------
        Choices
            Option numbers.
        """
        find = every_root if self.graph.of_rootings else one_root
        return find(self.graph, self.read(topologies))

    def log_prob_of_choices(self, choices: Choices) -> Tensor:
        """Return the log probabilities of topologies with known options, `(topologies,)`, in nats.

        Differentiable once with respect to `logits`.
        """
        state = self._current()
        return _LogProb.apply(self.logits, state, self.graph, choices)  # type: ignore[no-any-return]

    def _log_prob(self, topologies: Topologies) -> Tensor:
        return self.log_prob_of_choices(self.choices(topologies))

    @property
    def log_probabilities(self) -> Floats:
        """Log probability of each option within its group, an array `(options,)`."""
        return self._current().log_probabilities

    def _current(self) -> _State:
        """Return the state of the logits, recomputed if their values have changed."""
        # Fused optimisers and writes to `.data` do not change the version counter, so values are compared.
        if self._state is None or not _same(self._state.logits, self.logits):
            _check_logits(self.logits, self.graph)
            self._state = _State(self.graph, self.logits.detach().clone())
        return self._state

    def why_not(self, tree: Topologies | Tree) -> str | None:
        """Explain why a topology is outside the support.

        Parameters
        ----------
        tree : Topologies or Tree
            One topology.

        Returns
        -------
        str or None
            The first split that is missing or has probability zero; for an unrooted topology, with the root position
            that lacks the fewest. None if the topology is in the support.
        """
        topologies = self.read(tree)
        if len(topologies) != 1:
            raise ShapeError(f"tree: there are {len(topologies)} topologies. Remedy: give one topology.")
        return describe_missing(self.graph, self.choices(topologies), topologies, self.log_probabilities)

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Topologies:
        cumulative, last = self._current().cumulated
        return graph_passes.draw_trees(self.graph, cumulative, last, num_samples, generator)

    def entropy(  # type: ignore[override]  # with its error
        self, *, num_samples: int = 10_000, seed: int | torch.Generator = 0
    ) -> Estimate:
        """Return the entropy in nats: exact, unless a topology is a sum over its rootings.

        Parameters
        ----------
        num_samples : int, default 10_000
            Draws for the estimate if there is no closed form.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Estimate
            The value and its standard error, zero if exact.
        """
        if self.graph.of_rootings:
            return super().entropy(num_samples=num_samples, seed=seed)
        return Estimate(graph_passes.entropy(self.graph, self.log_probabilities), 0.0)

    def most_probable_tree(self) -> Topologies:
        """Return the most probable topology as `Topologies` of length one; `.tree(0)` makes an unrooted `Tree`."""
        return graph_passes.most_probable_tree(self.graph, self.log_probabilities)[0]

    def option_probabilities(self) -> Floats:
        """Return the marginal probability that a (rooted) tree contains each option, `(options,)`."""
        probabilities = np.exp(self.log_probabilities)
        return graph_passes.reach(self.graph, probabilities)[self.graph.group_of] * probabilities

    def split_probabilities(self) -> SplitProbabilities:
        """Return the exact probability that a topology has each split (or clade, if rooted)."""
        graph, probabilities = self.graph, np.exp(self.log_probabilities)
        totals = graph_passes.clade_probabilities(graph, probabilities)
        if graph.of_rootings:
            # A split is present if one of its sides is a clade; both sides are if it is the root split.
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
        raise SettingsError(
            f"logits must be a floating-point tensor, not {kind}. Remedy: give torch.as_tensor(...).double()."
        )
    if tuple(logits.shape) != (graph.num_options,):
        raise ShapeError(
            f"logits: shape {tuple(logits.shape)} does not fit. Remedy: give shape ({graph.num_options},), one "
            "for each option of the graph."
        )


def _same(one: Tensor, other: Tensor) -> bool:
    alike = isinstance(other, Tensor) and (one.dtype, one.device) == (other.dtype, other.device)
    return alike and torch.equal(one, other)


class _State:
    """Probabilities and tables computed from logits."""

    def __init__(self, graph: SubsplitGraph, logits: Tensor) -> None:
        self.logits = logits
        with np.errstate(invalid="ignore"):
            self.log_probabilities = graph.normalised(logits.to("cpu", torch.float64).numpy())
        if np.isnan(self.log_probabilities).any():
            raise SettingsError(
                "logits: a logit is not a number, or all logits of a group are -inf. Remedy: lower the learning rate "
                "if the logits are being trained; -inf may mark an impossible option, but not all options of a group."
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


# Conditional clade distributions.

Order = Literal[0, 1, 2]


class ConditionalCladeDistribution(GraphDistribution):
    r"""Distribution of topologies by independent splits of clades, from the root down.

    The order sets the parameters:

    - 1, the conditional clade distribution of Hoehna and Drummond (2012) and Larget (2013):
      :math:`p(\tau) = \prod_{C} f(C \to A, B) / f(C)`, with sample frequencies `f` of the splits
      :math:`C \to A, B` and of their clades;
    - 0: :math:`p(\tau) \propto \prod_{C} f(C)`, over all trees made of clades in the sample, whether or not the sample
      has them as sisters (Berling et al., 2025);
    - 2: a split also depends on the sister of the clade. For rooted topologies this is the subsplit Bayesian network
      with its closed-form fit.

    **Unrooted topologies** are rooted at their first taxon; the distribution depends on the choice of this taxon.

    Use `fit` to make a distribution.

    References
    ----------
    Hoehna, S., Drummond, A. J. (2012). Guided tree topology proposals for Bayesian phylogenetic inference. Systematic
    Biology 61, 1-11.

    Larget, B. (2013). The estimation of tree posterior probabilities using conditional clade probability
    distributions. Systematic Biology 62, 501-511.

    Berling, L., Klawitter, J., Bouckaert, R., Xie, D., Gavryushkin, A., Drummond, A. J. (2025). Accurate Bayesian
    phylogenetic point estimation using a tree distribution parameterized by clade probabilities. PLOS Computational
    Biology 21.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> from bayeskit.models.phylogenetics._distributions import SampleFrequencies
    >>> trees = all_topologies("ABCDE")
    >>> sample = SampleFrequencies.from_topologies(trees[[0, 0, 0, 7]])
    >>> clades = ConditionalCladeDistribution.fit(sample)
    >>> clades.log_prob(trees[[0, 7]]).exp()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    @classmethod
    def fit(cls, sample: WeightedTopologies | Topologies, order: Order = 1) -> Self:
        """Estimate the distribution in closed form.

        Parameters
        ----------
        sample : TreeSample or Topologies
            Topologies with weights, or with equal weights.
        order : {0, 1, 2}, default 1
            See the class.

        Returns
        -------
        ConditionalCladeDistribution

        Raises
        ------
        SettingsError
            If `order` is not 0, 1 or 2.
        """
        if order not in (0, 1, 2):
            raise SettingsError(f"order: {order!r} is unknown. Remedy: give 0, 1 or 2.")
        topologies, weights = weighted_topologies(sample)
        if order == 0:
            graph = graph_of_all_splits(topologies)
            log_probabilities = _by_clades(graph, topologies, weights)
        else:
            graph = graph_of_hanging(topologies, with_sisters=order == 2)
            choices = one_root(graph, topologies)
            log_probabilities = graph.shares(choices.counts(np.zeros(len(weights)), weights))
        return cls(graph, torch.from_numpy(log_probabilities))


def _by_clades(graph: SubsplitGraph, topologies: Topologies, weights: Floats) -> Floats:
    """Return log probabilities of options, where trees are weighted by the product of their clade frequencies."""
    met = graph.find_clade(hanging_sets(topologies)[:, topologies.num_taxa :])
    each = np.broadcast_to(weights[:, None], met.shape)
    frequencies = add_up(met, each, len(graph.clades))
    frequencies[clades.size(graph.clades) == 1] = 1.0
    return graph_passes.log_sums(graph, np.log(frequencies[graph.parts]).sum(axis=1))[1]


# Subsplit Bayesian networks.

#: Number of draws in the search for the most probable unrooted topology.
_CANDIDATES = 4096


class SubsplitBayesianNetwork(GraphDistribution):
    r"""Distribution of topologies whose splits depend on the clade and its sister.

    The probability of a rooted topology is that of its root split times those of the splits of all other clades,

    .. math:: p(\tau) = p(S_1) \prod_{C} p(C \to A, B \mid C, \mathrm{sister}(C)),

    with parameters shared by all topologies. The probability of an unrooted topology is the sum over its `2n - 3` root
    positions, computed in two passes over its nodes. Topologies outside the graph have probability zero: `why_not`
    explains them, and `Smoothed` gives them a small probability.

    Use `fit` or `from_topologies` to make a network. For training by gradient, `log_prob` is differentiable once with
    respect to `logits`; in-place changes of the logits are detected.

    Parameters
    ----------
    graph : SubsplitGraph
        Root splits and parent-child subsplit pairs of the support.
    logits : Tensor, optional
        Log probabilities of the options up to a constant for each group, `(options,)`, real; zero by default, which
        makes the options of a group equally probable.

    Attributes
    ----------
    log_likelihoods : ndarray or None
        After `fit`: mean log likelihood per tree in nats, before the first iteration and after each.

    References
    ----------
    Zhang, C., Matsen, F. A. (2018). Generalizing tree probability estimation via Bayesian networks. NeurIPS 31.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> from bayeskit.models.phylogenetics._distributions import SampleFrequencies
    >>> trees = all_topologies("ABCD")
    >>> network = SubsplitBayesianNetwork.fit(SampleFrequencies.from_topologies(trees[[0, 0, 0, 1]]))
    >>> [round(p, 3) for p in network.log_prob(trees).exp().tolist()]
    [0.75, 0.25, 0.0]
    >>> network.why_not(trees[2])
    'no tree of the support has the clade {C, D}'
    >>> len(network.sample(10, seed=0)), network.sample(torch.Size([5])).shape
    (10, torch.Size([5, 2, 2]))
    """

    arg_constraints = {"logits": constraints.real_vector}
    log_likelihoods: Floats | None = None

    def __init__(self, graph: SubsplitGraph, logits: Tensor | None = None) -> None:
        super().__init__(graph, torch.zeros(graph.num_options, dtype=torch.float64) if logits is None else logits)

    @classmethod
    def from_topologies(cls, topologies: Topologies) -> Self:
        """Make the network with the smallest support that contains given topologies, uniform within each group.

        Parameters
        ----------
        topologies : Topologies
            Such as those of a sample, or `all_topologies(taxa)` for full support.

        Returns
        -------
        SubsplitBayesianNetwork

        Raises
        ------
        TreeError
            If there is no topology, or `topologies` has another type.
        """
        check_topologies(topologies)
        if topologies.rooted:
            return cls(graph_of_hanging(topologies, with_sisters=True))
        return cls(graph_of_rootings(topologies))

    @classmethod
    def fit(
        cls,
        sample: WeightedTopologies | Topologies,
        method: Literal["em", "simple_average"] = "em",
        *,
        alpha: float = 0.0,
        max_iterations: int = 2000,
        tolerance: float = 3e-6,
    ) -> Self:
        """Estimate the network from sampled topologies, whose options define its support.

        Parameters
        ----------
        sample : TreeSample or Topologies
            Topologies with weights, or with equal weights.
        method : {"em", "simple_average"}, default "em"
            For unrooted topologies: maximum likelihood by expectation maximisation, or equal weights of all root
            positions. For rooted topologies both give the maximum likelihood in closed form.
        alpha : float, default 0.0
            Strength of the Dirichlet prior of "em", as the size of a pseudo-sample relative to the sample. The prior
            follows the simple average at the root and is even over the splits of each parent subsplit.
        max_iterations : int, default 2000
        tolerance : float, default 3e-6
            Minimum gain in log likelihood (plus log prior) of a cycle of plain and overrelaxed EM steps, in nats per
            tree; EM stops below it. The distance to the maximum may be hundreds of times larger: lower the tolerance
            if that matters.

        Returns
        -------
        SubsplitBayesianNetwork

        Raises
        ------
        SettingsError
            If a setting lies outside its domain, or `alpha` is given with "simple_average".

        Warns
        -----
        AccuracyWarning
            If EM has not converged after `max_iterations`.
        """
        _check_settings(method, alpha, max_iterations, tolerance)
        topologies, weights = weighted_topologies(sample)
        graph = cls.from_topologies(topologies).graph
        choices = every_root(graph, topologies) if graph.of_rootings else one_root(graph, topologies)
        if method == "simple_average":
            result = simple_average(graph, choices, weights)
        else:
            prior = prior_counts(graph, choices, weights, alpha)
            result = _expectation_maximization(graph, choices, weights, prior, max_iterations, tolerance)
        network = cls(graph, torch.from_numpy(result.log_probabilities))
        network.log_likelihoods = result.log_likelihoods
        return network

    def most_probable_tree(self, seed: int | torch.Generator = 0) -> Topologies:
        """Return the most probable topology as `Topologies` of length one; `.tree(0)` makes an unrooted `Tree`.

        Exact for rooted topologies. For unrooted topologies the search covers 4,096 draws and the topology with the
        most probable rooting.

        Parameters
        ----------
        seed : int or torch.Generator, default 0
            Ignored for rooted topologies.

        Returns
        -------
        Topologies

        Warns
        -----
        AccuracyWarning
            If a more probable topology may have been missed by the draws.
        """
        best, _ = graph_passes.most_probable_tree(self.graph, self.log_probabilities)
        if not self.graph.of_rootings:
            return best
        drawn = self.sample(_CANDIDATES, seed=new_generator(seed, stream="most probable tree"))
        together = Topologies(self.taxa, np.concatenate([best.children, drawn.children]), self.rooted)
        candidates, _ = together.distinct()
        with torch.no_grad():
            log_prob = self.log_prob(candidates)
        top = int(log_prob.argmax())
        probability = math.exp(float(log_prob[top]))
        # Probability that all draws miss a topology that is at least as probable.
        missed = (1 - min(probability, 1.0)) ** _CANDIDATES
        if missed > 1e-6:
            warn_user(
                f"The best topology found has probability {probability:.1e}. With probability {missed:.1e}, "
                f"{_CANDIDATES} draws miss an equally probable topology, so a better topology may exist. Remedy: treat "
                "the topology as one of many probable topologies.",
                AccuracyWarning,
            )
        return candidates[top]

    def _tensors(self) -> dict[str, Tensor]:
        history = {} if self.log_likelihoods is None else {"log_likelihoods": torch.from_numpy(self.log_likelihoods)}
        return {**super()._tensors(), **history}

    @classmethod
    def _restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        network = super()._restore(tensors, facts)
        if "log_likelihoods" in tensors:
            network.log_likelihoods = tensors["log_likelihoods"].numpy()
        return network


def _check_settings(method: str, alpha: float, max_iterations: int, tolerance: float) -> None:
    if method not in ("em", "simple_average"):
        raise SettingsError(f"method: {method!r} is unknown. Remedy: give 'em' or 'simple_average'.")
    if not 0.0 <= alpha < math.inf:
        raise SettingsError(f"alpha: {alpha} is negative or not finite. Remedy: give a small number such as 1e-4.")
    if alpha and method == "simple_average":
        raise SettingsError("alpha: the simple average has no prior. Remedy: use method='em', or omit alpha.")
    if max_iterations < 1 or not tolerance >= 0:
        raise SettingsError(
            f"max_iterations={max_iterations} or tolerance={tolerance} is invalid. Remedy: give at least one iteration "
            "and a nonnegative tolerance."
        )
