"""A fitted approximation of a posterior of trees."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import xarray as xr
from torch import Tensor

from bayeskit._arviz import as_inference_data, to_datasets
from bayeskit._settings import whole_number
from bayeskit._statistics import (
    log_mean_exp,
    pareto_shape,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import SamplingWarning
from bayeskit.inference.evidence import Evidence
from bayeskit.inference.evidence.checks import MAX_PARETO_SHAPE, MIN_EFFECTIVE, with_rounding, without_nan
from bayeskit.inference.samplers.driver import Ending
from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies, TreeSample
from bayeskit.models.phylogenetics.distributions import Estimate
from bayeskit.workflows.phylogenetics.variational import storage
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
        Log of the joint density over that which the trees were drawn from, `(trees,)`.
    part : Tensor
        Which part of the mixture each tree was drawn from, `(trees,)`: all branch lengths from the prior, half of them,
        or else; zero where all are from the approximation itself.
    """

    topologies: Topologies
    lengths: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_weight: Tensor
    part: Tensor


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

    def weighed_trees(self, num_draws: int, seed: int = 0, *, defended: bool = True) -> WeighedTrees:
        """Draw trees, and weigh them by the joint density over that which they were drawn from.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        defended : bool, default True
            Whether one tree in ten has all branch lengths from the prior, another one half of them, and one in five
            of the others one or more from a heavy tail, without which a weight could be of any size; or all are from
            the approximation itself.

        Returns
        -------
        WeighedTrees
        """
        return self._weighed(num_draws, seed, "weighed" if defended else "drawn", defended=defended)

    def _weighed(self, num_draws: int, seed: int, purpose: str, *, defended: bool) -> WeighedTrees:
        """Draw and weigh trees; those for one purpose are independent of those for another."""
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, stream=f"trees of a variational posterior, {purpose}")
        draw = partial(self.family.draw_defended, self.target.branch_length_prior) if defended else self.family.draw
        children, columns = [], []
        with torch.no_grad(), one_thread():
            for first in range(0, num_draws, _AT_ONCE):
                drawn = draw(self.parameters, min(_AT_ONCE, num_draws - first), generator)
                log_prior, log_likelihood = self.target.log_densities(drawn.topologies, drawn.lengths)
                log_weight = log_prior + log_likelihood - drawn.log_topology - drawn.log_lengths
                children.append(torch.from_numpy(drawn.topologies.children))
                columns.append((drawn.lengths, log_prior, log_likelihood, log_weight, drawn.part))
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

        Warns
        -----
        SamplingWarning
            If the weights are not to be trusted.
        """
        drawn = self.weighed_trees(num_draws, seed, defended=weighted)
        weights = _trusted_weights(drawn.log_weight) if weighted else None
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
        drawn = self._weighed(count * repeats, seed, "lower bound", defended=False)
        bounds = drawn.log_weight.reshape(repeats, count).logsumexp(1) - math.log(count)
        return Estimate(float(bounds.mean()), float(bounds.std()) / math.sqrt(repeats))

    def log_evidence(self, num_draws: int = 10_000, seed: int = 0) -> Evidence:
        """Estimate the log evidence by importance sampling, with a little of the prior and of a heavy tail.

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
        drawn = self._weighed(whole_number("num_draws", num_draws, 2), seed, "evidence", defended=True)
        log_weight, problems, facts = _checked(drawn.log_weight)
        error = with_rounding(float(stratified_log_mean_exp_error(log_weight, drawn.part)), drawn.log_likelihood)
        return Evidence(
            "variational_importance_sampling",
            float(log_mean_exp(log_weight[None])),
            error,
            num_draws,
            tuple(problems),
            facts,
            time.monotonic() - begin,
        )

    def to_arviz(self, num_draws: int = 1000, seed: int = 0, *, weighted: bool = False) -> Any:
        """Return draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Parameters
        ----------
        num_draws : int, default 1000
        seed : int, default 0
        weighted : bool, default False
            Whether draws are resampled by their importance weights, so that all count the same in the exact posterior,
            as far as the network's support reaches, and some stand more than once; or are those of the approximation.

        Returns
        -------
        InferenceData or DataTree
            Group `posterior` holds one chain of `tree_length`, the sum of all branch lengths, and `topology`, the rank
            of the topology by its share of the draws; group `sample_stats` the log joint density `lp` and, of draws
            that were not resampled, `log_weight`; group `constant_data` the Newick text of each topology, `newick`, by
            its rank. The trees are those of `sample` with the same seed.

        Warns
        -----
        SamplingWarning
            If the weights are not to be trusted.
        """
        drawn = self.weighed_trees(num_draws, seed, defended=weighted)
        rows = torch.arange(num_draws)
        if weighted:
            weights = _trusted_weights(drawn.log_weight)
            uniform = torch.rand((), generator=new_generator(seed, stream="resampled trees"), dtype=torch.float64)
            # Systematically: each as often as its weight says, rounded up or down.
            rows = torch.searchsorted(weights.cumsum(0), (rows + uniform) / num_draws).clamp(max=num_draws - 1)
        sample = TreeSample.from_topologies(drawn.topologies[rows.numpy()])
        order = sample.top(len(sample.topologies))
        rank = torch.from_numpy(order).argsort()
        stats = {"lp": drawn.log_prior + drawn.log_likelihood, "log_weight": drawn.log_weight}
        if weighted:
            del stats["log_weight"]
        tree_length, topology = drawn.lengths.sum(-1), rank[torch.from_numpy(sample.index)]
        chains: dict[str, dict[str, Tensor]] = {
            "posterior": {"tree_length": tree_length[None, rows], "topology": topology[None]},
            "sample_stats": {name: value[None, rows] for name, value in stats.items()},
        }
        facts = {"seconds": self.seconds, "ending": self.ending, "num_steps": self.num_steps, "seed_of_draws": seed}
        data = to_datasets(chains, facts | {"settings": json.dumps(self.settings)})
        data["constant_data"] = xr.Dataset(
            {"newick": ("topology_rank", [sample.topologies.to_newick(place) for place in order.tolist()])}
        )
        return as_inference_data(data)

    def save(self, path: str | Path) -> None:
        """Write the approximation with data and model to one safetensors file.

        Parameters
        ----------
        path : str or Path
            The file, replaced if there.

        Raises
        ------
        SettingsError
            If substitution model, site rates, prior or branch lengths are of a class of the user's own.
        OutputError
            If the file cannot be written.
        """
        storage.write(path, storage.Contents(**{name: getattr(self, name) for name in storage.Contents._fields}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; reading runs no code.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        VariationalPosterior
            Whose draws are those of the one that was saved, bit for bit.

        Raises
        ------
        CheckpointError
            If the file is missing, truncated, or holds something else.
        """
        return cls(*storage.read(path))


def _checked(log_weight: Tensor) -> tuple[Tensor, list[str], dict[str, float]]:
    """Return log weights without NaN, what is wrong with them, and the numbers behind that."""
    usable, problems = without_nan(log_weight)
    shape, effective = pareto_shape(usable[None]), float(weight_effective_sample_size(usable))
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): train longer")
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective weights: draw more trees, or train longer")
    return usable, problems, {"pareto_shape": shape, "effective_draws": effective}


def _trusted_weights(log_weight: Tensor) -> Tensor:
    """Return weights that add up to one; warn if they are not to be trusted."""
    usable, problems, _ = _checked(log_weight)
    if problems:
        warnings.warn(
            f"the importance weights are not to be trusted: {'; '.join(problems)}", SamplingWarning, stacklevel=3
        )
    return usable.softmax(0)
