"""Variational inference over topologies and branch lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch

from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.extend import (
    CHECKPOINT_SECONDS,
    IWAE,
    Control,
    Linear,
    ReweightedWakeSleep,
    WeightSchedule,
    say_early,
    setting_as_json,
    whole_number,
)
from bayeskit.models.phylogenetics import Alignment, Partition, SiteRates
from bayeskit.models.phylogenetics._branch_length_priors import check_branch_length_prior, in_double_precision
from bayeskit.models.phylogenetics._parameters import free_parameters
from bayeskit.models.phylogenetics._partitions import forest_likelihood
from bayeskit.models.phylogenetics._substitution import SubstitutionModel
from bayeskit.models.phylogenetics._topology_constraints import check_constraints
from bayeskit.models.phylogenetics.workflows._growing_support import ScoredTrees, SupportGrowth
from bayeskit.models.phylogenetics.workflows._topology_comparison import check_data
from bayeskit.models.phylogenetics.workflows._topology_inference import infer_topologies
from bayeskit.models.phylogenetics.workflows._variational._ascent import Training
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._learning_rates import (
    BudgetPace,
    LearningRates,
    Pace,
    by_steps,
)
from bayeskit.models.phylogenetics.workflows._variational._length_families import LengthFamily, LogNormalLengths
from bayeskit.models.phylogenetics.workflows._variational._posterior import VariationalPosterior
from bayeskit.models.phylogenetics.workflows._variational._rounds import GrowthRounds, time_left, train_in_rounds
from bayeskit.models.phylogenetics.workflows._variational._support import (
    Support,
    SupportSearch,
    network_of_support,
    searched_network,
)
from bayeskit.models.phylogenetics.workflows._variational._target import TreeTarget, check_order_of_taxa, log_posterior

#: Inverse temperature of the likelihood at the first step.
_HOTTEST = 0.001


#: Rounds of a search for topologies by chains.
_WARM_UP, _ROUNDS = 300, 700


def variational_inference(
    alignment: Alignment | Partition,
    support: Support | SupportSearch | Callable[[Any], Support | SupportSearch] | None = None,
    *,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
    branch_length_prior: dist.TorchDistribution | None = None,
    constraints: Sequence[Sequence[str]] = (),
    lengths: LengthFamily | None = None,
    objective: IWAE | ReweightedWakeSleep | None = None,
    num_steps: int = 200_000,
    learning_rates: LearningRates | None = None,
    annealing: WeightSchedule | None = None,
    growth: SupportGrowth | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> VariationalPosterior:
    r"""Approximate the posterior of topology, branch lengths and parameters by variational inference.

    The variational family is a subsplit Bayesian network :math:`Q(\tau)` of topologies, a distribution
    :math:`Q(q \mid \tau)` of branch lengths with parameters shared among topologies, and a multivariate normal
    distribution :math:`Q(\theta)` of the free parameters of substitution and site rates in unconstrained coordinates.
    By default training maximises the expected log of the mean of several weights

    .. math:: w = \frac{p(D \mid \tau, q, \theta)^\beta \, p(q) \, p(\theta) \, p(\tau)}
                      {Q(\tau) \, Q(q \mid \tau) \, Q(\theta)},

    with :math:`p(\tau) = 1 / (2n-5)!!` or, with constraints, uniform over the topologies that satisfy them; reweighted
    wake-sleep is the alternative.

    Parameters
    ----------
    alignment : Alignment or Partition
        A partition has its own substitution models and site rates, as in `PartitionedTreeModel`.
    support : TreeSample, Topologies, sequence of Tree, SubsplitBayesianNetwork, SupportSearch or callable, optional
        Topologies, such as those of a short MCMC run: the support consists of all recombinations of their subsplits,
        and training starts with equal probabilities of all options. Or a network, which is the starting point; or an
        object with such a `sample`, or a function of `alignment` that returns one of these. Roots are removed. By
        default the support is searched for, from trees of neighbour joining, and grows; with constraints, it is found
        by `infer_topologies`, which is slow without a C++ compiler.
    substitution : SubstitutionModel, default JC69()
        Parameters without a value, such as those of `GTR()`, have their prior and are inferred.
    site_rates : SiteRates, optional
        Distribution of the rate over sites, likewise; by default all sites have rate one.
    branch_length_prior : TorchDistribution, optional
        Over one positive branch length; or over the vector of all, in the edge order of `Topologies`: external branches
        first, in the alignment's order of taxa. Exponential with rate 10 by default.
    constraints : sequence of sequences of str, optional
        Groups of taxa that are on one side of a branch in every tree. Recombinations of trees that satisfy them satisfy
        them too.
    lengths : LengthFamily, default LogNormalLengths()
    objective : IWAE or ReweightedWakeSleep, default IWAE(10)
        Objective and number of particles, at least two. With IWAE, branch lengths are reparameterised, and topologies
        use the score function with leave-one-out baselines (VIMCO).
    num_steps : int, default 200,000
        The default takes about twenty minutes on one core of 2025 for 27 taxa and 1,949 sites (DS1).
    learning_rates : LearningRates, default LearningRates()
        Step sizes of Adam.
    annealing : Schedule, optional
        Inverse temperature of the likelihood at each step, above 0; by default it rises from 0.001 to one over the
        first half of the steps or of the time budget, whichever is further. A checkpoint distinguishes functions by
        name only.
    growth : SupportGrowth, optional
        Let the support grow during training, by neighbours of its probable topologies; not with constraints. By default
        a given support stays as it is.
    seed : int, default 0
    checkpoint : path, optional
        File for the state, from which an existing run resumes with bitwise identical results. Beside it, a support that
        grows has one file for each round, such as `run.growth1`; the search for topologies is repeated.
    checkpoint_seconds : float, default 10
        Seconds between two checkpoints; 0 writes one at every step.
    time_budget : float, optional
        Seconds after which the run ends. With the default annealing, annealing and learning rates follow the share of
        the budget that has passed, so that half of the run is at inverse temperature one; with `annealing` given, both
        follow the number of steps. A resumed run spreads its budget over what is left of the schedules. The search for
        a support under constraints takes half of the budget at most; with a checkpoint it is not cut short, so that a
        resumed run finds the same support.
    progress : bool, default True
        Show a progress bar if the run takes over two seconds.

    Returns
    -------
    VariationalPosterior

    Notes
    -----
    Without a time budget, a seed determines the result bit for bit, however often the run is resumed. With a time
    budget it also depends on when each step began: the attribute `positions` of the result records where each step read
    the schedules, and given these positions the run is reproducible. How many steps fit into the budget is not.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, a prior is unsuitable, or the constraints contradict each other or exclude
        a tree of the support.
    TreeError
        If the taxa of the support or of a subset differ from those of the alignment, or the support is a network over
        rooted topologies.
    LossError
        If the bound or its gradient is not finite; the message gives the step.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the run ended early; the message gives the inverse temperature reached.
    ConversionWarning
        Once, if the topologies of the support are rooted.

    References
    ----------
    Zhang, C., Matsen, F. A. (2019). Variational Bayesian phylogenetic inference. ICLR.

    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.

    Bornschein, J., Bengio, Y. (2015). Reweighted wake-sleep. ICLR.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Alignment, SubsplitBayesianNetwork, all_topologies
    >>> from bayeskit.models.phylogenetics.workflows import LearningRates, variational_inference
    >>> alignment = Alignment.from_sequences({"A": "AACCAGT", "B": "AACCAGT", "C": "AGCTAGA", "D": "AGCTACA"})
    >>> support = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD"))
    >>> rates = LearningRates(0.02, 0.02)
    >>> posterior = variational_inference(alignment, support, num_steps=300, learning_rates=rates, progress=False)
    >>> posterior.topologies.most_probable_tree().to_newick(0)
    '(A,B,(C,D));'
    >>> posterior.log_evidence(1000).trusted
    True
    """
    substitution = check_data(alignment, substitution, site_rates)
    num_steps = whole_number("num_steps", num_steps, 1)
    objective = _checked_settings(IWAE(10) if objective is None else objective)
    default_annealing = annealing is None
    annealing = Linear(max(1, num_steps // 2), start=_HOTTEST) if annealing is None else annealing
    learning_rates = LearningRates() if learning_rates is None else learning_rates
    lengths = LogNormalLengths() if lengths is None else lengths
    by_chains = support is None and len(constraints) > 0
    growth = SupportGrowth() if support is None and growth is None and not by_chains else growth
    _check_options(learning_rates, annealing, lengths, growth)
    if growth is not None and len(constraints):
        raise SettingsError(
            "growth: neighbours of trees may violate the constraints. Remedy: leave growth out; without a support, one "
            "is found by infer_topologies, under the constraints."
        )
    prior = branch_length_prior
    if prior is None:
        prior = dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    check_branch_length_prior(prior, 2 * alignment.num_taxa - 3)
    likelihood = forest_likelihood(alignment, substitution, site_rates)
    priors = free_parameters(alignment, substitution, site_rates).priors
    groups = tuple(tuple(group) for group in constraints)
    target = TreeTarget(likelihood, in_double_precision(prior), priors, groups)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    settings = {
        "objective": type(objective).__name__,
        "num_particles": objective.num_particles,
        "learning_rates": setting_as_json(learning_rates),
        "annealing": setting_as_json(annealing),
        "lengths": setting_as_json(lengths),
        "seed": whole_number("seed", seed),
    }
    if isinstance(objective, ReweightedWakeSleep):
        settings["wake_phi"] = objective.wake_phi
    if growth is not None:
        settings |= {"growth": setting_as_json(growth), "num_steps": num_steps}
    begin = time.monotonic()
    trees = None
    if by_chains:
        found = infer_topologies(
            alignment,
            substitution=substitution,
            site_rates=site_rates,
            branch_length_prior=branch_length_prior,
            constraints=constraints,
            num_warmup=_WARM_UP,
            num_samples=_ROUNDS,
            seed=settings["seed"],
            time_budget=None if time_budget is None or checkpoint is not None else time_budget / 2,
            progress=progress,
        )
        if found.ending == "interrupted":
            raise KeyboardInterrupt
        support = found.sample
    if support is None:
        trees = ScoredTrees(partial(log_posterior, target, None), alignment.taxa)
        network = searched_network(trees, alignment, growth or SupportGrowth(), settings["seed"], control)
    else:
        network = network_of_support(support, alignment)
        if growth is not None:
            trees = ScoredTrees(partial(log_posterior, target, None), network.taxa)
    check_constraints(network.graph.clades, constraints, network.taxa, "the support")
    check_order_of_taxa(target.branch_length_prior, alignment, network)
    family = TreeFamily(network, lengths, target.guide)
    spent = time.monotonic() - begin
    follows = default_annealing and time_budget is not None
    pace: Pace = BudgetPace(time_left(control, spent), num_steps) if follows else by_steps
    training = Training(
        family=family,
        log_densities=target.log_densities,
        objective=objective,
        learning_rates=learning_rates,
        annealing=annealing,
        num_steps=num_steps,
        pace=pace,
    )
    rounds = GrowthRounds(trees=trees, growth=growth, seed=settings["seed"])
    try:
        run = train_in_rounds(training, target, control, rounds, settings, spent)
    except CheckpointError as error:
        if default_annealing and "annealing" in str(error):
            raise CheckpointError(
                f"{error}. By default the likelihood is annealed over half of num_steps. Remedy: resume with the "
                f"previous num_steps, or give annealing=Linear(half of the previous num_steps, start={_HOTTEST})."
            ) from error
        raise
    taken = len(run.bounds)
    done = f"after {taken} of {num_steps} steps"
    if taken and (weight := annealing(int(run.state.position))) < 1:
        done += f", with {100 * weight:.2g} % of the log likelihood: the trees do not yet approximate the posterior"
    say_early(run.ending, control, "variational inference", done)
    return VariationalPosterior(
        family=run.family,
        target=target,
        parameters=run.state.parameters,
        bounds=run.bounds,
        positions=run.positions,
        ending=run.ending,
        seconds=run.seconds,
        settings=settings,
    )


def _check_options(learning_rates: object, annealing: object, lengths: object, growth: object) -> None:
    """Raise SettingsError for settings of the wrong type."""
    if not isinstance(learning_rates, LearningRates):
        raise SettingsError(
            f"learning_rates: {learning_rates!r:.80} has the wrong type. Remedy: give LearningRates(0.001, 0.001)."
        )
    if not callable(annealing):
        raise SettingsError(
            f"annealing: {annealing!r:.80} is not a schedule. Remedy: give a schedule such as Linear(1000, start=0.01)."
        )
    if isinstance(lengths, type) or not hasattr(lengths, "rsample"):
        raise SettingsError(
            f"lengths: {lengths!r:.80} is not an object of a length family. Remedy: give LogNormalLengths()."
        )
    if not isinstance(growth, SupportGrowth | None):
        raise SettingsError(f"growth: {growth!r:.80} has the wrong type. Remedy: give SupportGrowth(), or None.")


def _checked_settings(objective: IWAE | ReweightedWakeSleep) -> IWAE | ReweightedWakeSleep:
    if not isinstance(objective, (IWAE, ReweightedWakeSleep)):
        raise SettingsError(
            f"objective: {objective!r:.80} is not supported for trees. Remedy: give IWAE or ReweightedWakeSleep."
        )
    if objective.num_particles < 2:
        raise SettingsError(
            f"objective: num_particles={objective.num_particles} is too small, because each topology is compared with "
            "the other particles. Remedy: give at least 2, such as 10."
        )
    if isinstance(objective, ReweightedWakeSleep) and objective.sleep_phi:
        raise SettingsError("objective: the sleep update is not supported for trees. Remedy: leave sleep_phi at 0.")
    return objective
