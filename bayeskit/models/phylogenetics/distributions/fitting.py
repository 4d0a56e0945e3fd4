"""Maximum likelihood and penalised likelihood for the probabilities of a graph."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from bayeskit.errors import AccuracyWarning
from bayeskit.models.phylogenetics.distributions.choices import Choices
from bayeskit.models.phylogenetics.distributions.rows import Floats
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph

#: By how much the stretching of steps grows, how far it may, and how many steps are not stretched at first.
_GROWTH, _LARGEST_STRETCH, _PLAIN_ITERATIONS = 1.3, 1e4, 10
#: Log probability that no option of a sampled tree falls below: one may underflow on the way, but the graph makes it.
_LEAST = -100.0


class Fit(NamedTuple):
    """Fitted log probabilities of the options, and the mean log likelihood before and after each iteration."""

    log_probabilities: Floats
    log_likelihoods: Floats


def simple_average(graph: SubsplitGraph, choices: Choices, weights: Floats) -> Fit:
    """Take every place of a root as equally probable; of rooted topologies this is the likelihood's maximum.

    Parameters
    ----------
    graph : SubsplitGraph
        The choices.
    choices : Choices
        The options of the topologies.
    weights : ndarray
        Their shares of the sample, `(topologies,)`.

    Returns
    -------
    Fit
        The probabilities.
    """
    log_probabilities = graph.shares(choices.counts(choices.equal_rootings(), weights))
    log_prob, _ = choices.log_prob(graph.table(log_probabilities, missing=-np.inf))
    return Fit(log_probabilities, np.array([weights @ log_prob]))


def prior_counts(graph: SubsplitGraph, choices: Choices, weights: Floats, alpha: float) -> Floats:
    """Return pseudo-counts that add up to `alpha` for each parent subsplit's share of the sample.

    The options of the root get `alpha` times their simple average; those of other groups share evenly `alpha` times
    the simple average of their group.

    Parameters
    ----------
    graph, choices, weights
        As for `simple_average`.
    alpha : float
        Size of the pseudo-sample in units of the sample.

    Returns
    -------
    ndarray
        Shape `(options,)`.
    """
    counts = choices.counts(choices.equal_rootings(), weights)
    even = (graph.sum_groups(counts) / np.diff(graph.starts))[graph.group_of]
    root = int(graph.starts[-2])
    return alpha * np.concatenate([even[:root], counts[root:]])


class _Point(NamedTuple):
    """Log probabilities, their mean log likelihood, that with the log prior, and where a step of EM leads."""

    log_probabilities: Floats
    log_likelihood: float
    objective: float
    target: Floats


def expectation_maximization(
    graph: SubsplitGraph,
    choices: Choices,
    weights: Floats,
    pseudo_counts: Floats,
    max_iterations: int,
    tolerance: float,
) -> Fit:
    """Climb to a maximum of the likelihood, times a Dirichlet prior, from the simple average.

    Where an option turns from useless to useful its probability grows by the same small factor in each iteration, so
    that plain EM stands almost still for hundreds. After the first ten iterations, steps are therefore stretched in
    the log probabilities, by more and more until a step goes down, which is taken back: a cycle, after which steps are
    plain again. The objective, the likelihood times the prior, never falls; with a prior, the likelihood alone may.

    A small gain bounds no distance: the climb to the maximum may take many more cycles that gain little each.

    Parameters
    ----------
    graph, choices, weights
        As for `simple_average`.
    pseudo_counts : ndarray
        Counts added by the prior, `(options,)`.
    max_iterations : int
        When to stop in any case.
    tolerance : float
        Gain of the objective by a whole cycle, in nats a tree, below which to stop.

    Returns
    -------
    Fit
        The probabilities.

    Warns
    -----
    AccuracyWarning
        If `max_iterations` came first.

    References
    ----------
    Salakhutdinov, R., Roweis, S. (2003). Adaptive overrelaxed bound optimization methods. ICML.
    """
    held = pseudo_counts > 0

    def evaluate(log_probabilities: Floats) -> _Point:
        log_prob, saved = choices.log_prob(graph.table(log_probabilities, missing=-np.inf))
        log_likelihood = float(weights @ log_prob)
        log_prior = float(pseudo_counts[held] @ log_probabilities[held])
        target = graph.shares(choices.counts(saved, weights) + pseudo_counts)
        return _Point(log_probabilities, log_likelihood, log_likelihood + log_prior, target)

    point = evaluate(simple_average(graph, choices, weights).log_probabilities)
    history, stretch, start, gain = [point.log_likelihood], 1.0, point.objective, np.inf
    for iteration in range(1, max_iterations + 1):
        following = evaluate(point.target if stretch == 1.0 else _stretched(graph, point, stretch))
        ends = stretch > 1.0 and not following.objective >= point.objective
        if not ends:
            point = following
            history.append(point.log_likelihood)
            stretch *= _GROWTH if iteration >= _PLAIN_ITERATIONS else 1.0
        # Where the maximum has a closed form, the first step leads there, and no other goes anywhere.
        stands = np.array_equal(point.target, point.log_probabilities)
        if ends or stands or stretch > _LARGEST_STRETCH:
            gain, start, stretch = point.objective - start, point.objective, 1.0
            if stands or gain < tolerance:
                return _fit(graph, point, history)
    # Of the cycle that was cut short, or of the last whole one if that just ended.
    gain = point.objective - start or gain
    warnings.warn(
        f"EM stopped after {max_iterations} iterations while it still gained {gain:.1e} nats a tree in a cycle. "
        "Remedy: raise max_iterations, or tolerance if that is near enough.",
        AccuracyWarning,
        stacklevel=3,
    )
    return _fit(graph, point, history)


def _fit(graph: SubsplitGraph, point: _Point, history: list[float]) -> Fit:
    """Return the point with every option possible; what this moves is far below rounding."""
    return Fit(graph.normalised(np.maximum(point.log_probabilities, _LEAST)), np.array(history))


def _stretched(graph: SubsplitGraph, point: _Point, stretch: float) -> Floats:
    """Go further than EM would; options that are or become impossible stay so."""
    possible = np.isfinite(point.log_probabilities) & np.isfinite(point.target)
    step = np.zeros_like(point.target)
    np.subtract(point.target, point.log_probabilities, out=step, where=possible)
    return graph.normalised(np.where(possible, point.log_probabilities + stretch * step, -np.inf))
