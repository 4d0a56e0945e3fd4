"""Variational inference over topologies and branch lengths."""

from __future__ import annotations

from pathlib import Path

import pyro.distributions as dist
import torch

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import SettingsError, TreeError
from bayeskit.inference.objectives import IWAE, Linear, ReweightedWakeSleep, Schedule
from bayeskit.inference.samplers.driver import CHECKPOINT_SECONDS, Control, drive, say_early
from bayeskit.inference.training.checkpoint import described
from bayeskit.models.phylogenetics import JC69, Alignment, SubsplitBayesianNetwork, TreeSample
from bayeskit.models.phylogenetics.forest.forest_likelihood import ForestLikelihood
from bayeskit.models.phylogenetics.substitution import SubstitutionModel
from bayeskit.models.phylogenetics.trees.tree import check_same_taxa
from bayeskit.workflows.phylogenetics.variational.family import TreeFamily, TreeTarget
from bayeskit.workflows.phylogenetics.variational.lengths import LengthFamily, LogNormalLengths
from bayeskit.workflows.phylogenetics.variational.posterior import VariationalPosterior
from bayeskit.workflows.phylogenetics.variational.training import LearningRates, Training

#: Inverse temperature of the likelihood at the first step.
_HOTTEST = 0.001


def variational_inference(
    alignment: Alignment,
    support: TreeSample | SubsplitBayesianNetwork,
    *,
    substitution: SubstitutionModel | None = None,
    branch_length_prior: dist.TorchDistribution | None = None,
    lengths: LengthFamily | None = None,
    objective: IWAE | ReweightedWakeSleep | None = None,
    num_steps: int = 200_000,
    learning_rates: LearningRates | None = None,
    annealing: Schedule | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> VariationalPosterior:
    r"""Approximate the posterior of topology and branch lengths by a subsplit Bayesian network.

    The network gives topologies their probabilities, :math:`Q(\tau)`; branch lengths have a distribution
    :math:`Q(q \mid \tau)` whose parameters topologies share where they are alike. Both ascend the expected log of the
    mean of several weights

    .. math:: w = \frac{p(D \mid \tau, q)^\beta \, p(q) \, p(\tau)}{Q(\tau) \, Q(q \mid \tau)},

    with :math:`p(\tau) = 1 / (2n-5)!!`, or follow reweighted wake-sleep.

    Parameters
    ----------
    alignment : Alignment
    support : TreeSample or SubsplitBayesianNetwork
        Unrooted topologies, such as those of a short run of MCMC, of which the approximation can make every
        recombination: training starts with all options equally probable. Or a network, whose probabilities are the
        start.
    substitution : SubstitutionModel, optional
        With values for all of its parameters; Jukes-Cantor by default.
    branch_length_prior : TorchDistribution, optional
        Over one branch length or over the vector of all, in the order of edges of `Topologies`, that of the tips first;
        Exponential with rate 10 by default.
    lengths : LengthFamily, optional
        `LogNormalLengths()` by default.
    objective : IWAE or ReweightedWakeSleep, optional
        Which gradient, and of how many particles. `IWAE(10)` by default: draws of branch lengths are reparameterised,
        those of topologies have the score function with each one's leave-one-out baseline (VIMCO).
    num_steps : int, default 200,000
    learning_rates : LearningRates, optional
        Of Adam; `LearningRates()` by default.
    annealing : Schedule, optional
        Inverse temperature of the likelihood at each step, above 0; by default it rises from 0.001 to one over the
        first half of the steps.
    seed : int, default 0
    checkpoint : path, optional
        File to write the state to and, if it exists, to resume from, bit for bit.
    checkpoint_seconds : float, default 10
        Seconds between two checkpoints; 0 writes one at every step.
    time_budget : float, optional
        Seconds after which the run ends with what it has, as it does on Ctrl-C.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    VariationalPosterior

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    TreeError
        If the support is rooted, or has other taxa than the alignment.
    LossError
        If the bound or its gradient is not finite, naming the step.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the run ended early.

    References
    ----------
    Zhang, C., Matsen, F. A. (2019). Variational Bayesian phylogenetic inference. ICLR.

    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.

    Bornschein, J., Bengio, Y. (2015). Reweighted wake-sleep. ICLR.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import all_topologies
    >>> alignment = Alignment.from_sequences({"A": "AACCAGT", "B": "AACCAGT", "C": "AGCTAGA", "D": "AGCTACA"})
    >>> support = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD"))
    >>> rates = LearningRates(0.02, 0.02)
    >>> posterior = variational_inference(alignment, support, num_steps=300, learning_rates=rates, progress=False)
    >>> posterior.topologies.most_probable_tree().to_newick(0)
    '(A,B,(C,D));'
    >>> posterior.log_evidence(1000).trusted
    True
    """
    network = _network(support)
    check_same_taxa(alignment.taxa, network.taxa, "the alignment", "the support")
    num_steps = whole_number("num_steps", num_steps, 1)
    objective = _checked(IWAE(10) if objective is None else objective)
    annealing = Linear(max(1, num_steps // 2), start=_HOTTEST) if annealing is None else annealing
    learning_rates = learning_rates or LearningRates()
    prior = branch_length_prior or dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    substitution = JC69() if substitution is None else substitution
    target = TreeTarget(ForestLikelihood(alignment, substitution), prior)
    family = TreeFamily(network, LogNormalLengths() if lengths is None else lengths)
    settings = {
        "objective": type(objective).__name__,
        "num_particles": objective.num_particles,
        "learning_rates": described(learning_rates),
        "annealing": described(annealing),
        "lengths": described(family.lengths),
        "seed": whole_number("seed", seed),
    }
    if isinstance(objective, ReweightedWakeSleep):
        settings["wake_phi"] = objective.wake_phi
    model = _fingerprint(alignment, network, substitution, prior)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    training = Training(
        family, target.log_densities, objective, learning_rates, annealing, num_steps, {"model": model, **settings}
    )
    outcome = drive(training, control, new_generator(settings["seed"], stream="variational inference over trees"))
    say_early(outcome.ending, control, "variational inference", f"after {outcome.num_iterations} of {num_steps} steps")
    bounds = outcome.records["bound"].clone() if "bound" in outcome.records else torch.zeros(0, dtype=torch.float64)
    return VariationalPosterior(
        family, target, outcome.state.parameters, bounds, outcome.ending, outcome.seconds, settings
    )


def _network(support: TreeSample | SubsplitBayesianNetwork) -> SubsplitBayesianNetwork:
    if isinstance(support, SubsplitBayesianNetwork):
        return support
    if support.rooted:
        raise TreeError("The trees of the support are rooted. Remedy: give support.unrooted().")
    return SubsplitBayesianNetwork.from_topologies(support.topologies)


def _checked(objective: IWAE | ReweightedWakeSleep) -> IWAE | ReweightedWakeSleep:
    if not isinstance(objective, (IWAE, ReweightedWakeSleep)):
        raise SettingsError(f"objective: {objective!r:.80} has no trees. Remedy: give IWAE or ReweightedWakeSleep.")
    if objective.num_particles < 2:
        raise SettingsError(
            f"objective: num_particles={objective.num_particles} leaves nothing to compare a topology with. Remedy: "
            "give at least 2, such as 10."
        )
    if isinstance(objective, ReweightedWakeSleep) and objective.sleep_phi:
        raise SettingsError("objective: there is no sleep update of trees. Remedy: leave sleep_phi at 0.")
    return objective


def _fingerprint(
    alignment: Alignment,
    network: SubsplitBayesianNetwork,
    substitution: SubstitutionModel,
    prior: dist.TorchDistribution,
) -> object:
    """Return data, support and model as JSON that differs where they do."""
    graph = network.graph
    arrays = [graph.clades.view("int64"), graph.group_clade, graph.group_sister, graph.starts, graph.parts]
    parameters = {name: getattr(prior, name) for name in sorted(prior.arg_constraints) if name in vars(prior)}
    return described(
        [
            list(alignment.taxa),
            alignment.patterns,
            alignment.weights,
            list(network.taxa),
            [torch.from_numpy(array) for array in arrays],
            network.logits,
            substitution,
            type(prior).__name__,
            parameters,
        ]
    )
