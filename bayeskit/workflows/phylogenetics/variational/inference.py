"""Variational inference over topologies and branch lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference.objectives import IWAE, Linear, ReweightedWakeSleep, Schedule
from bayeskit.inference.samplers.driver import CHECKPOINT_SECONDS, Control, drive, say_early
from bayeskit.inference.training.checkpoint import described
from bayeskit.models.phylogenetics import (
    Alignment,
    SiteRates,
    SubsplitBayesianNetwork,
    Topologies,
    Tree,
    TreeSample,
)
from bayeskit.models.phylogenetics.branch_length_priors import (
    check_branch_length_prior,
    in_double_precision,
    log_prior_of_lengths,
)
from bayeskit.models.phylogenetics.forest.forest_likelihood import ForestLikelihood
from bayeskit.models.phylogenetics.substitution import SubstitutionModel
from bayeskit.models.phylogenetics.trees.tree import check_same_taxa
from bayeskit.workflows.phylogenetics.inputs import check_models, unrooted_topologies
from bayeskit.workflows.phylogenetics.variational.family import TreeFamily, TreeTarget
from bayeskit.workflows.phylogenetics.variational.lengths import LengthFamily, LogNormalLengths
from bayeskit.workflows.phylogenetics.variational.posterior import VariationalPosterior
from bayeskit.workflows.phylogenetics.variational.training import LearningRates, Training

#: Inverse temperature of the likelihood at the first step.
_HOTTEST = 0.001
#: Points at which two priors are compared.
_PROBES = 64


def variational_inference(
    alignment: Alignment,
    support: TreeSample | Topologies | Sequence[Tree] | SubsplitBayesianNetwork,
    *,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
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
    support : TreeSample, Topologies, sequence of Tree, or SubsplitBayesianNetwork
        Topologies, such as those of a short run of MCMC, of which the approximation can make every
        recombination: training starts with all options equally probable. Or a network, whose probabilities are the
        start. Rooted topologies are unrooted.
    substitution : SubstitutionModel, optional
        With values for all of its parameters; Jukes-Cantor by default.
    site_rates : SiteRates, optional
        How the rate varies over sites, with values for all of its parameters; by default it does not vary.
    branch_length_prior : TorchDistribution, optional
        Over one positive branch length; or over the vector of all in the order of edges of `Topologies`, the branches
        to the tips first, in the alignment's order of taxa. Exponential with rate 10 by default.
    lengths : LengthFamily, optional
        `LogNormalLengths()` by default.
    objective : IWAE or ReweightedWakeSleep, optional
        Which gradient, and of how many particles. `IWAE(10)` by default: draws of branch lengths are reparameterised,
        those of topologies have the score function with each one's leave-one-out baseline (VIMCO).
    num_steps : int, default 200,000
        On one core of 2025 they take about twenty minutes for 27 taxa and 1,949 sites (DS1), and less for smaller data.
    learning_rates : LearningRates, optional
        Of Adam; `LearningRates()` by default.
    annealing : Schedule, optional
        Inverse temperature of the likelihood at each step, above 0; by default it rises from 0.001 to one over the
        first half of the steps. A checkpoint tells functions apart by their names only.
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
        If a setting lies outside its domain, or the prior of branch lengths is none.
    TreeError
        If the support has other taxa than the alignment, or is a network over rooted topologies.
    LossError
        If the bound or its gradient is not finite, naming the step.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the run ended early; it says how much of the likelihood counted by then.
    ConversionWarning
        Once, if the topologies of the support are rooted.

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
    substitution = check_models(alignment, substitution, site_rates)
    if isinstance(support, SubsplitBayesianNetwork):
        network = support
        check_same_taxa(alignment.taxa, network.taxa, "the alignment", "the support")
    else:
        network = SubsplitBayesianNetwork.from_topologies(unrooted_topologies(support, alignment))
    num_steps = whole_number("num_steps", num_steps, 1)
    objective = _checked(IWAE(10) if objective is None else objective)
    default_annealing = annealing is None
    annealing = Linear(max(1, num_steps // 2), start=_HOTTEST) if annealing is None else annealing
    learning_rates = LearningRates() if learning_rates is None else learning_rates
    lengths = LogNormalLengths() if lengths is None else lengths
    _check_options(learning_rates, annealing, lengths)
    prior = branch_length_prior
    if prior is None:
        prior = dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    _check_prior(prior, alignment, network)
    prior = in_double_precision(prior)
    target = TreeTarget(ForestLikelihood(alignment, substitution, site_rates=site_rates), prior)
    family = TreeFamily(network, lengths)
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
    model = _fingerprint(target, network)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    training = Training(
        family, target.log_densities, objective, learning_rates, annealing, num_steps, {"model": model, **settings}
    )
    try:
        outcome = drive(training, control, new_generator(settings["seed"], stream="variational inference over trees"))
    except CheckpointError as error:
        if default_annealing and "annealing" in str(error):
            raise CheckpointError(
                f"{error}. By default the likelihood is annealed over half of num_steps. Remedy: resume with the "
                f"num_steps of before, or give annealing=Linear(half of them, start={_HOTTEST})."
            ) from error
        raise
    done = f"after {outcome.num_iterations} of {num_steps} steps"
    if outcome.num_iterations and (weight := annealing(outcome.num_iterations - 1)) < 1:
        done += f", with {100 * weight:.2g} % of the log likelihood: the trees are not yet those of the posterior"
    say_early(outcome.ending, control, "variational inference", done)
    bounds = outcome.records["bound"].clone() if "bound" in outcome.records else torch.zeros(0, dtype=torch.float64)
    return VariationalPosterior(
        family, target, outcome.state.parameters, bounds, outcome.ending, outcome.seconds, settings
    )


def _check_options(learning_rates: object, annealing: object, lengths: object) -> None:
    """Refuse what has another type than the settings need."""
    if not isinstance(learning_rates, LearningRates):
        raise SettingsError(
            f"learning_rates: {learning_rates!r:.80} is none. Remedy: give LearningRates(0.001, 0.001)."
        )
    if not callable(annealing):
        raise SettingsError(
            f"annealing: {annealing!r:.80} is no schedule. Remedy: give such as Linear(1000, start=0.01)."
        )
    if isinstance(lengths, type) or not hasattr(lengths, "rsample"):
        raise SettingsError(f"lengths: {lengths!r:.80} is no object of a family. Remedy: give LogNormalLengths().")


def _check_prior(prior: dist.TorchDistribution, alignment: Alignment, network: SubsplitBayesianNetwork) -> None:
    """Refuse a prior of something else, and one of all edges where the order of taxa leaves it open which is which."""
    num_edges = 2 * alignment.num_taxa - 3
    check_branch_length_prior(prior, num_edges)
    tips = [alignment.taxa.index(taxon) for taxon in network.taxa]
    probes = _probes(num_edges)
    moved = log_prior_of_lengths(prior, probes[:, [*tips, *range(alignment.num_taxa, num_edges)]])
    # A sum in another order rounds otherwise.
    if not torch.allclose(log_prior_of_lengths(prior, probes), moved, rtol=1e-9, atol=1e-9):
        raise SettingsError(
            "branch_length_prior tells taxa apart, but the support has them in another order than the alignment. "
            "Remedy: make the network of topologies.with_taxa(alignment.taxa)[0], or give these topologies."
        )


def _probes(num_edges: int) -> Tensor:
    """Return branch lengths from very short to very long, `(probes, edges)`, no two edges alike."""
    generator = new_generator(0, stream="probes of a prior")
    return (-4.0 + 3.0 * torch.randn(_PROBES, num_edges, generator=generator, dtype=torch.float64)).exp()


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


def _fingerprint(target: TreeTarget, network: SubsplitBayesianNetwork) -> object:
    """Return data, support and model as JSON that differs where they do."""
    graph, likelihood, prior = network.graph, target.likelihood, target.branch_length_prior
    arrays = [graph.clades.view("int64"), graph.group_clade, graph.group_sister, graph.starts, graph.parts]
    parts = [
        list(likelihood.alignment.taxa),
        likelihood.alignment.patterns,
        likelihood.alignment.weights,
        list(network.taxa),
        [torch.from_numpy(array) for array in arrays],
        network.logits,
        likelihood.substitution,
        type(prior).__name__,
        # Whatever a prior is made of, its density tells it from others.
        log_prior_of_lengths(prior, _probes(2 * len(network.taxa) - 3)),
    ]
    return described(parts if likelihood.site_rates is None else [*parts, likelihood.site_rates])
