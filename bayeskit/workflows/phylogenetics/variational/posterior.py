"""A fitted approximation of a posterior of trees."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._arviz import as_inference_data, to_datasets
from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator, one_thread
from bayeskit.inference.evidence import Evidence
from bayeskit.inference.evidence.checks import MAX_PARETO_SHAPE, MIN_EFFECTIVE, with_rounding
from bayeskit.inference.samplers.driver import Ending
from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies, TreeSample
from bayeskit.models.phylogenetics.distributions import Estimate
from bayeskit.workflows.phylogenetics.variational.family import TreeFamily, TreeTarget

#: Trees that are drawn at a time.
_AT_ONCE = 500


class WeighedTrees(NamedTuple):
    """Trees drawn from an approximation, and what they weigh.

    Attributes
    ----------
    topologies : Topologies
        One for each tree.
    lengths : Tensor
        Shape `(trees, edges)`.
    log_prior, log_likelihood : Tensor
        Shape `(trees,)`.
    log_weight : Tensor
        Log of the joint density over that of the approximation, `(trees,)`.
    """

    topologies: Topologies
    lengths: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_weight: Tensor


@dataclass(frozen=True, eq=False)
class VariationalPosterior:
    """A posterior of topologies and branch lengths, approximated by `variational_inference`.

    Attributes
    ----------
    family : TreeFamily
        Network and branch lengths.
    target : TreeTarget
        What was approximated.
    parameters : Tensor
        Of the family, a vector.
    bounds : Tensor
        Estimate of the bound at each step, the likelihood at its full weight, shape `(steps,)`.
    ending : str
        `"finished"`, `"time budget"` or `"interrupted"`.
    seconds : float
    settings : dict
    """

    family: TreeFamily = field(repr=False)
    target: TreeTarget = field(repr=False)
    parameters: Tensor = field(repr=False)
    bounds: Tensor = field(repr=False)
    ending: Ending
    seconds: float
    settings: dict[str, Any]

    @cached_property
    def topologies(self) -> SubsplitBayesianNetwork:
        """The approximate posterior of the topology."""
        return self.family.topologies(self.parameters)

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return len(self.bounds)

    def weighed_trees(self, num_draws: int, seed: int = 0) -> WeighedTrees:
        """Draw trees, and weigh them by the exact posterior over the approximate one.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0

        Returns
        -------
        WeighedTrees
        """
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, stream="trees of a variational posterior")
        children, columns = [], []
        with torch.no_grad(), one_thread():
            for first in range(0, num_draws, _AT_ONCE):
                drawn = self.family.draw(self.parameters, min(_AT_ONCE, num_draws - first), generator)
                log_prior, log_likelihood = self.target.log_densities(drawn.topologies, drawn.lengths)
                log_weight = log_prior + log_likelihood - drawn.log_topology - drawn.log_lengths
                children.append(torch.from_numpy(drawn.topologies.children))
                columns.append((drawn.lengths, log_prior, log_likelihood, log_weight))
        topologies = Topologies(self.topologies.taxa, torch.cat(children).numpy())
        return WeighedTrees(topologies, *(torch.cat(column) for column in zip(*columns, strict=True)))

    def sample(self, num_draws: int, seed: int = 0, *, weighted: bool = False) -> TreeSample:
        """Draw trees with branch lengths.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        weighted : bool, default False
            Whether trees have importance weights, so that the sample is one of the exact posterior as far as the
            network's support reaches; or equal ones, those of the approximation.

        Returns
        -------
        TreeSample
            Its `weights` are the probabilities of the topologies, `credible_set(0.95)` has the most probable ones, and
            `to_file("posterior.trees")` writes all trees.
        """
        drawn = self.weighed_trees(num_draws, seed)
        weights = drawn.log_weight.softmax(0) if weighted else None
        return TreeSample.from_topologies(drawn.topologies, weights, drawn.lengths)

    def lower_bound(self, num_particles: int = 1, num_draws: int = 1000, seed: int = 0) -> Estimate:
        """Estimate the lower bound of the log evidence, the expected log of the mean of some weights.

        Parameters
        ----------
        num_particles : int, default 1
            How many weights.
        num_draws : int, default 1000
            How many times so many; at least two.
        seed : int, default 0

        Returns
        -------
        Estimate
            The bound in nats and its standard error.
        """
        count, repeats = whole_number("num_particles", num_particles, 1), whole_number("num_draws", num_draws, 2)
        log_weight = self.weighed_trees(count * repeats, seed).log_weight.reshape(repeats, count)
        bounds = log_weight.logsumexp(1) - math.log(count)
        return Estimate(float(bounds.mean()), float(bounds.std()) / math.sqrt(repeats))

    def log_evidence(self, num_draws: int = 10_000, seed: int = 0) -> Evidence:
        """Estimate the log evidence by importance sampling from the approximation.

        Parameters
        ----------
        num_draws : int, default 10,000
            At least two.
        seed : int, default 0

        Returns
        -------
        Evidence
            In nats, with what its weights say against it. Topologies outside the network's support are left out: their
            share of the posterior is missing from the evidence.
        """
        begin = time.monotonic()
        drawn = self.weighed_trees(whole_number("num_draws", num_draws, 2), seed)
        log_weight = drawn.log_weight[None]
        shape, effective = pareto_shape(log_weight), float(weight_effective_sample_size(log_weight[0]))
        problems = []
        if not shape <= MAX_PARETO_SHAPE:
            problems.append(f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): train longer")
        if not effective >= MIN_EFFECTIVE:
            problems.append(f"only {effective:.0f} effective weights: draw more trees, or train longer")
        error = with_rounding(float(independent_log_mean_exp_error(log_weight)), drawn.log_likelihood)
        return Evidence(
            "variational_importance_sampling",
            float(log_mean_exp(log_weight)),
            error,
            num_draws,
            tuple(problems),
            {"pareto_shape": shape, "effective_draws": effective, "lower_bound": float(log_weight.mean())},
            time.monotonic() - begin,
        )

    def to_arviz(self, num_draws: int = 1000, seed: int = 0) -> Any:
        """Return draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Parameters
        ----------
        num_draws : int, default 1000
        seed : int, default 0

        Returns
        -------
        InferenceData or DataTree
            Group `posterior` holds one chain of `tree_length`, the sum of all branch lengths, and `topology`, the rank
            of the topology by its share of the draws; group `sample_stats` the log joint density `lp` and the
            `log_weight` of each draw.
        """
        drawn = self.weighed_trees(num_draws, seed)
        sample = TreeSample.from_topologies(drawn.topologies)
        rank = torch.from_numpy(sample.top(len(sample.topologies))).argsort()
        groups = {
            "posterior": {"tree_length": drawn.lengths.sum(-1), "topology": rank[torch.from_numpy(sample.index)]},
            "sample_stats": {"lp": drawn.log_prior + drawn.log_likelihood, "log_weight": drawn.log_weight},
        }
        chains: dict[str, dict[str, Tensor]] = {
            group: {name: value[None] for name, value in variables.items()} for group, variables in groups.items()
        }
        facts = {"seconds": self.seconds, "ending": self.ending, "num_steps": self.num_steps}
        return as_inference_data(to_datasets(chains, facts))
