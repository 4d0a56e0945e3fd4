"""A fitted variational posterior of trees: draws, importance weights, bound and evidence."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bayeskit.errors import SamplingWarning
from bayeskit.extend import (
    MAX_PARETO_SHAPE,
    MIN_EFFECTIVE,
    Ending,
    Evidence,
    as_inference_data,
    log_mean_exp,
    new_generator,
    one_thread,
    pareto_shape,
    short_repr,
    stratified_log_mean_exp_error,
    systematic,
    to_datasets,
    warn_user,
    weight_effective_sample_size,
    whole_number,
    with_rounding,
    without_nan,
)
from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies, TreeSample
from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._posterior_file import (
    PosteriorContents,
    read_posterior,
    write_posterior,
)
from bayeskit.models.phylogenetics.workflows._variational._target import TreeTarget

#: Number of trees in one batch.
_AT_ONCE = 500


class WeightedTrees(NamedTuple):
    """Trees drawn from a proposal, with importance weights.

    Attributes
    ----------
    topologies : Topologies
        One per tree.
    lengths : Tensor
        Branch lengths, shape `(trees, edges)`.
    log_prior, log_likelihood : Tensor
        Shape `(trees,)`.
    log_weight : Tensor
        Log of joint density over proposal density, `(trees,)`.
    parameters : dict of str to Tensor
        Values of the parameters without a fixed value by name, one for each tree, `(trees, *event_shape)`.
    part : Tensor
        Mixture component of the branch lengths of each tree, `(trees,)`: 0 if all are from the prior, 1 if half of them
        are, 2 otherwise; 0 for all trees if the proposal is the approximation itself.
    """

    topologies: Topologies
    lengths: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_weight: Tensor
    part: Tensor
    parameters: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class VariationalPosterior:
    """Approximate posterior of topologies, branch lengths and parameters, as fitted by `variational_inference`.

    Attributes
    ----------
    family : TreeFamily
        Network and distributions of branch lengths and parameters.
    target : TreeTarget
        Joint density of data, branch lengths, parameters of the models, and topology.
    parameters : Tensor
        Parameters of the family, a vector.
    bounds : Tensor
        Estimate of the untempered bound at each step, shape `(steps,)`.
    positions : Tensor
        Where each step read the schedules of annealing and learning rates, as a number of steps, shape `(steps,)`.
    ending : str
        `"finished"`, `"time budget"` or `"interrupted"`.
    seconds : float
    settings : dict
    """

    family: TreeFamily = field(repr=False)
    target: TreeTarget = field(repr=False)
    parameters: Tensor = field(repr=False)
    bounds: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)
    ending: Ending
    seconds: float
    settings: dict[str, Any]

    __repr__ = short_repr

    @cached_property
    def topologies(self) -> SubsplitBayesianNetwork:
        """The approximate posterior of the topology."""
        return self.family.topologies(self.parameters)

    @property
    def num_steps(self) -> int:
        """Number of training steps."""
        return len(self.bounds)

    def weighted_trees(self, num_draws: int, *, seed: int = 0, defensive: bool = True) -> WeightedTrees:
        """Draw trees with importance weights for the exact posterior.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        defensive : bool, default True
            Draw from a defensive mixture, which bounds the weights: one tree in ten has all branch lengths from the
            prior, another one half of them (if the prior is over one branch length), and one in five of the others at
            least one from a heavy tail. One tree in ten has parameters from their prior, the others from a t
            distribution. If False, draw from the approximation itself.

        Returns
        -------
        WeightedTrees
        """
        return self._draw_weighted(num_draws, seed, "weighed" if defensive else "drawn", defensive=defensive)

    def _draw_weighted(self, num_draws: int, seed: int, purpose: str, *, defensive: bool) -> WeightedTrees:
        """Draw trees with importance weights; draws for different purposes are independent."""
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, stream=f"trees of a variational posterior, {purpose}")
        draw = partial(self.family.draw_defensive, self.target.branch_length_prior) if defensive else self.family.draw
        children, columns, values = [], [], []
        with torch.no_grad(), one_thread():
            for first in range(0, num_draws, _AT_ONCE):
                drawn = draw(self.parameters, min(_AT_ONCE, num_draws - first), generator)
                densities = self.target.log_densities(drawn.topologies, drawn.lengths, **drawn.parameters)
                log_prior, log_likelihood = densities
                log_weight = log_prior + log_likelihood - drawn.log_guide
                values.append(drawn.parameters)
                children.append(torch.from_numpy(drawn.topologies.children))
                columns.append((drawn.lengths, log_prior, log_likelihood, log_weight, drawn.part))
        topologies = Topologies(self.topologies.taxa, torch.cat(children).numpy())
        parameters = {name: torch.cat([one[name] for one in values]) for name in values[0]}
        lengths, log_prior, log_likelihood, log_weight, part = (
            torch.cat(column) for column in zip(*columns, strict=True)
        )
        return WeightedTrees(
            topologies=topologies,
            lengths=lengths,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
            log_weight=log_weight,
            part=part,
            parameters=parameters,
        )

    def sample(self, num_draws: int, *, seed: int = 0, weighted: bool = False) -> TreeSample:
        """Draw trees with branch lengths.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        weighted : bool, default False
            If True, draw from the defensive mixture with importance weights for the exact posterior on the network's
            support; if False, draw from the approximation with equal weights.

        Returns
        -------
        TreeSample
            `weights` are the probabilities of the topologies.

        Warns
        -----
        SamplingWarning
            If the weights are not trusted.
        """
        drawn = self.weighted_trees(num_draws, seed=seed, defensive=weighted)
        weights = _trusted_weights(drawn.log_weight) if weighted else None
        return TreeSample.from_topologies(drawn.topologies, weights, drawn.lengths)

    def sample_parameters(self, num_draws: int, *, seed: int = 0, weighted: bool = False) -> dict[str, Tensor]:
        """Draw the parameters of substitution and site rates without a fixed value.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        weighted : bool, default False
            If True, draws are resampled by their importance weights, so that they represent the exact posterior on the
            network's support, with repetition; if False, they are draws from the approximation.

        Returns
        -------
        dict of str to Tensor
            By name, shape `(draws, *event_shape)`: those of the trees of `sample` or, if weighted, of `to_arviz`.

        Warns
        -----
        SamplingWarning
            If the weights are not trusted.
        """
        drawn = self.weighted_trees(num_draws, seed=seed, defensive=weighted)
        rows = _resampled(drawn.log_weight, seed) if weighted else slice(None)
        return {name: value[rows] for name, value in drawn.parameters.items()}

    def lower_bound(self, num_particles: int = 1, num_draws: int = 1000, *, seed: int = 0) -> Estimate:
        """Estimate the importance-weighted lower bound of the log evidence.

        Parameters
        ----------
        num_particles : int, default 1
            Number of weights in each mean; 1 gives the ELBO.
        num_draws : int, default 1000
            Number of independent means, at least two.
        seed : int, default 0

        Returns
        -------
        Estimate
            In nats, with standard error.
        """
        count, repeats = whole_number("num_particles", num_particles, 1), whole_number("num_draws", num_draws, 2)
        drawn = self._draw_weighted(count * repeats, seed, "lower bound", defensive=False)
        bounds = drawn.log_weight.reshape(repeats, count).logsumexp(1) - math.log(count)
        return Estimate(float(bounds.mean()), float(bounds.std()) / math.sqrt(repeats))

    def log_evidence(self, num_draws: int = 10_000, *, seed: int = 0) -> Evidence:
        """Estimate the log evidence by importance sampling from the defensive mixture of `weighted_trees`.

        Parameters
        ----------
        num_draws : int, default 10,000
            At least two.
        seed : int, default 0

        Returns
        -------
        Evidence
            In nats, with diagnostics of the weights. Topologies outside the network's support contribute nothing.
        """
        begin = time.monotonic()
        drawn = self._draw_weighted(whole_number("num_draws", num_draws, 2), seed, "evidence", defensive=True)
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

    def to_arviz(self, num_draws: int = 1000, *, seed: int = 0, weighted: bool = False) -> Any:
        """Return draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Parameters
        ----------
        num_draws : int, default 1000
        seed : int, default 0
        weighted : bool, default False
            If True, draws are resampled by their importance weights, so that they represent the exact posterior on the
            network's support, with repetition; if False, they are draws from the approximation.

        Returns
        -------
        InferenceData or DataTree
            Group `posterior` holds one chain of `tree_length`, the sum of all branch lengths, `topology`, the rank of
            the topology by its frequency in the draws, and the parameters without a fixed value. Group `sample_stats`
            holds the log joint density `lp` and, without resampling, `log_weight`. Group `constant_data` holds the
            Newick text of each topology, `newick`, by rank. The trees are those of `sample` with the same seed.

        Warns
        -----
        SamplingWarning
            If the weights are not trusted.
        """
        import xarray as xr

        drawn = self.weighted_trees(num_draws, seed=seed, defensive=weighted)
        rows = _resampled(drawn.log_weight, seed) if weighted else torch.arange(num_draws)
        sample = TreeSample.from_topologies(drawn.topologies[rows.numpy()])
        order = sample.top(len(sample.topologies))
        rank = torch.from_numpy(order).argsort()
        stats = {"lp": drawn.log_prior + drawn.log_likelihood, "log_weight": drawn.log_weight}
        if weighted:
            del stats["log_weight"]
        tree_length, topology = drawn.lengths.sum(-1), rank[torch.from_numpy(sample.index)]
        chains: dict[str, dict[str, Tensor]] = {
            "posterior": {
                "tree_length": tree_length[None, rows],
                "topology": topology[None],
                **{name: value[None, rows] for name, value in drawn.parameters.items()},
            },
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
            Overwritten if it exists.

        Raises
        ------
        SettingsError
            If substitution model, site rates, prior or branch lengths are of a user-defined class.
        OutputError
            If the file cannot be written.
        """
        write_posterior(path, PosteriorContents(**{name: getattr(self, name) for name in PosteriorContents._fields}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`, without executing code from it.

        Parameters
        ----------
        path : str or Path

        Returns
        -------
        VariationalPosterior
            Its draws are bitwise identical to those of the saved object.

        Raises
        ------
        CheckpointError
            If the file is missing, truncated, or has other contents.
        """
        return cls(**read_posterior(path)._asdict())


def _checked(log_weight: Tensor) -> tuple[Tensor, list[str], dict[str, float]]:
    """Return log weights without NaN, their problems, and their diagnostics."""
    usable, problems = without_nan(log_weight)
    shape, effective = pareto_shape(usable[None]), float(weight_effective_sample_size(usable))
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): train longer")
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective weights: draw more trees, or train longer")
    return usable, problems, {"pareto_shape": shape, "effective_draws": effective}


def _trusted_weights(log_weight: Tensor) -> Tensor:
    """Return weights that sum to one; warn if they are not trusted."""
    usable, problems, _ = _checked(log_weight)
    if problems:
        what = f"the importance weights are not trusted: {'; '.join(problems)}"
        warn_user(what, SamplingWarning)
    return usable.softmax(0)


def _resampled(log_weight: Tensor, seed: int) -> Tensor:
    """Return indices of draws resampled by their weights, `(draws,)`; warn if the weights are not trusted."""
    return systematic(_trusted_weights(log_weight).log()[None], new_generator(seed, stream="resampled trees"))[0]
