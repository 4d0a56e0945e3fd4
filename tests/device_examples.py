"""The examples of all public docstrings, run by a user whose data are on a device."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import Any

import pyro
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import bayeskit

#: Modules whose functions make neural networks.
_MODULES = ("bayeskit.models.vae._autoencoders", "bayeskit.models.vae._networks", "bayeskit.models.vae._flows")
_LIBRARIES = tuple(f"{folder}/" for module in (torch, pyro) for folder in module.__path__)


class _UsersTensors(TorchFunctionMode):
    """Put tensors that an example makes on the device; what the package makes stays where the package puts it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _device_constructors() and kwargs.get("device") is None and _by_example(sys._getframe(1)):
            kwargs = {**kwargs, "device": self.device}
        result = function(*args, **kwargs)
        return result.to(self.device) if function is torch.from_numpy and _by_example(sys._getframe(1)) else result


def _by_example(frame: FrameType | None) -> bool:
    """Tell whether the first caller outside torch and Pyro is an example."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith("<doctest")


class _NamesTheDevice(ast.NodeTransformer):
    """Let an example name the device where a user has to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names = {"Generator", "target", *_with_a_device()}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        place = ast.Constant(str(self.device))
        if name in self.names and not any(keyword.arg == "device" for keyword in node.keywords):
            node.keywords.append(ast.keyword("device", place))
        if name in _made_on_the_host():
            return ast.Call(ast.Attribute(node, "to", ast.Load()), [place], [])
        return node


class _Checker(doctest.OutputChecker):
    """Compare what is printed, but for the device."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, re.sub(r",\s*device='[a-z:0-9]*'", "", got), optionflags)


class _AnyOutput(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


@lru_cache
def public() -> dict[str, Any]:
    """Return every class and function that a package exports to users, by the name of its module and its own."""
    found = {}
    for part in pkgutil.walk_packages(bayeskit.__path__, "bayeskit."):
        is_private = part.name.rpartition(".")[2].startswith("_") or part.name == "bayeskit._compiler"
        if part.ispkg and not is_private:
            package = importlib.import_module(part.name)
            for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
                if inspect.isclass(value) or inspect.isfunction(value):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return dict(sorted(found.items()))


@lru_cache
def elsewhere() -> dict[str, str]:
    """Return the reason why an object runs on no device, by its full name."""
    return {
        f"bayeskit.{module}.{name}": reason
        for reason, listed in ELSEWHERE.items()
        for module, names in re.findall(r"([\w.]+):((?:\s+\w+\b(?![.:]))+)", listed)
        for name in names.split()
    }


@lru_cache
def _made_on_the_host() -> frozenset[str]:
    """Return the names of what a user moves to the device: modules, and tensors made of a size alone."""
    modules = {x.__name__ for x in public().values() if inspect.isclass(x) and issubclass(x, torch.nn.Module)}
    functions = {x.__name__ for x in public().values() if inspect.isfunction(x) and x.__module__.startswith(_MODULES)}
    return frozenset(modules | functions) - {"likelihoods"} | {"all_permutations"}


@lru_cache
def _with_a_device() -> frozenset[str]:
    """Return the names of public classes, functions and their constructors that take a device."""
    found = set()
    for value in public().values():
        for made in (value, *(vars(value).values() if inspect.isclass(value) else ())):
            made = made.__func__ if isinstance(made, classmethod | staticmethod) else made
            with suppress(TypeError, ValueError):
                if "device" in inspect.signature(made).parameters:
                    found.add(made.__name__)
    return frozenset(found) - {"to", "new_generator", "__init__"}


def run_example(name: str, device: torch.device, shorter: dict[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """Run the examples of an object and its methods on a device; return what went wrong, and the names they bound.

    With replacements for a ``shorter`` run what is printed does not matter.
    """
    value = public()[name]
    module = importlib.import_module(value.__module__)
    said: list[str] = []
    bound: dict[str, Any] = {}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for test in doctest.DocTestFinder().find(value, name, module=module, globs=dict(vars(module))):
        before = dict(test.globs)
        for example in test.examples:
            for old, new in (shorter or {}).items():
                example.source = example.source.replace(old, new)
            renamed = _NamesTheDevice(device).visit(ast.parse(example.source))
            example.source = f"{ast.unparse(ast.fix_missing_locations(renamed))}\n"
        checker = _Checker() if shorter is None else _AnyOutput()
        with _UsersTensors(device), pyro.get_param_store().scope():
            runner = doctest.DocTestRunner(checker, verbose=False, optionflags=flags)
            runner.run(test, out=said.append, clear_globs=False)
        bound |= {f"{test.name}.{key}": x for key, x in test.globs.items() if before.get(key) is not x}
    return "".join(said), bound


def prints(name: str) -> bool:
    """Tell whether the examples of an object print something, which is compared."""
    found = doctest.DocTestFinder().find(public()[name], name)
    return any(example.want for test in found for example in test.examples)


def numbers(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all numbers and tensors within a value, but for times, with their names."""
    if isinstance(value, torch.Tensor | bool | int | float):
        if not name.endswith("seconds"):
            yield name, torch.as_tensor(value).detach().cpu()
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    elif isinstance(value, torch.nn.Module):
        parts = value.state_dict().items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).items()
    for key, part in parts:
        yield from numbers(part, f"{name}.{key}")


_WORK = ("num_evaluations", "iterations")  # counts of it


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what differs beyond rounding among all numbers within two values, but for counts of work.

    What a judgement evaluates depends on the modes that are known of its target already, and the iterations of a bridge
    on the last digits of its terms.
    """
    one, other = (
        {key: x for key, x in numbers(value, "") if not key.endswith(_WORK) and "__warningregistry__" not in key}
        for value in (expected, found)
    )
    wrong = [f"{key} is there only once" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        a, b = (x.to_dense().to(torch.complex128) for x in (one[key], other[key]))
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True):
            wrong.append(f"{key}: {a} on the host, {b} on the device")
    return wrong


#: Shorter runs for examples that take long: what is replaced in their text. Numbers are compared with the host's.
SHORTER = {
    "models.discrete.mixtures.labels.relabel": {"4, 300, 100": "4, 20, 10"},
    "models.wide_networks.finite_width.ntk_drift_against_width": {"(16, 256)": "(4, 8)"},
    "models.wide_networks.gaussian_processes.marginal_likelihood.fit_depths": {
        "fit_depths(make_network, [1, 3]": "found = fit_depths(make_network, [1, 2]"
    },
    "inference.evidence.ladder.thermodynamic_integration": {
        "num_samples=200": "num_samples=10, num_warmup=40, num_chains=4, num_temperatures=4, max_temperatures=8"
    },
    "inference.evidence.tolerance.tolerance_check": {"1 / 8, progress": "1 / 8, tighter_rtol=1 / 10, progress"},
    "inference.samplers.ladder.Ladder": {"8, 4, 50, 20": "4, 4, 30, 10"},
    "inference.samplers.chains.Convergence": {"16, 200, 5000": "4, 20, 5", "500)": "5)"},
    "inference.samplers.ladder.sample_ladder": {"8, num_warmup=50": "4, num_chains=4, num_warmup=30"},
    "inference.samplers.nested.NestedRun": {"num_live=100": "num_live=20"},
    "inference.samplers.nested.sample_nested": {"num_live=200": "num_live=20"},
    "inference.samplers.sampling.sample": {
        "num_warmup=100, num_samples=200": "num_warmup=20, num_samples=5",
        "num_samples=100": "num_warmup=20, num_samples=5",
    },
    "inference.samplers.stochastic_gradient.sample_stochastic_gradient": {
        "num_samples=2000": "num_samples=20, num_warmup=20"
    },
    "inference.training.fitting.fit": {"num_epochs=40": "num_epochs=2"},
    "inference.generalized.coarsened.calibration_curve": {
        "num_warmup=100, num_samples=100": "num_warmup=20, num_samples=10"
    },
    "inference.generalized.bootstrap.loss_likelihood_bootstrap": {"posterior, 4000": "posterior, 50"},
    "inference.generalized.bootstrap.posterior_bootstrap": {"posterior, 4000": "posterior, 50"},
    "inference.held_out.by_evidence.by_evidence": {"num_warmup=100, num_samples=200": "num_warmup=20, num_samples=10"},
}

#: What computes nothing on a device by itself, by the reason: names of objects after those of their modules.
ELSEWHERE = {
    "maps and their data are on the host, from where models move them to the counts": """
        models.latent_gaussian.fields: AreaGraph
        models.latent_gaussian.lip_cancer: LipCancer scottish_lip_cancer
        models.latent_gaussian.models: DiseaseMap
    """,
    "names, texts and pages": """
        gallery.registry: Entry entries get_model listed names
        gallery.scripts: Page data_file is_page is_small page pages run_page
        gallery.trees: check_substitution mrbayes_block tree_target
    """,
    "from alignments, files and models to tables and reports; they call what is rehearsed": """
        workflows.bayes_factors: ModelComparison compare_models
        workflows.calibration: calibration_in_folder
        workflows.exam: Exam ExamRow run_exam run_generated_exam
        workflows.folder: evidence_in_folder posterior_in_folder save_netcdf
        workflows.invariance: InvariantSubsets RegressionPrior invariant_subsets
        workflows.mixtures: TemperingBudget compare_num_components mixture_evidence symmetrised_bridge
        workflows.phylogenetics.growing_support: SupportGrowth
        workflows.phylogenetics.substitution_average: SubstitutionAverage average_substitution_models
        workflows.phylogenetics.topology_comparison: TopologyComparison compare_topologies
        workflows.phylogenetics.topology_evidence: TopologyEvidence topology_evidence
        workflows.phylogenetics.topology_inference: TopologyInference infer_topologies
        workflows.phylogenetics.topology_report: write_topology_report
        workflows.phylogenetics.variational.inference: variational_inference
        workflows.phylogenetics.variational.learning_rates: LearningRates
        workflows.phylogenetics.variational.length_families: FlowLengths LogNormalLengths
        workflows.phylogenetics.variational.posterior: VariationalPosterior
        workflows.simulation_based_calibration: SBCResult sbc
    """,
    "problems whose data are on the host, from where ExactCase.target moves them": """
        exact.beta_binomial: beta_binomial beta_binomial_model
        exact.case: ExactCase
        exact.eight_schools: eight_schools eight_schools_centered_model eight_schools_model
        exact.enumeration: EnumeratedPosterior Marginal enumerate_latents
        exact.family: Family
        exact.generated: generate shrink
        exact: get
        exact.linear_regression: linear_regression linear_regression_model
        exact.neals_funnel: neals_funnel neals_funnel_model
        exact.pima: pima pima_model
        exact.radiata_pine: radiata_pine radiata_pine_model
        exact.several_modes: eggbox eggbox_model gaussian_shells gaussian_shells_model spike_and_slab
            spike_and_slab_model
        exact.three_taxon_tree: count_site_patterns pattern_log_probabilities three_taxon_sequences
            three_taxon_tree three_taxon_tree_model
    """,
    "settings, results and parts of the estimators, each of which is rehearsed on shared runs": """
        inference.evidence.budget: Budget LadderBudget NestedSamplingBudget PosteriorBudget SMCBudget
        inference.evidence.calibration: Calibration Problem calibrate
        inference.evidence.comparison: EvidenceComparison compare
        inference.evidence.conditionals: ConjugateBlock
        inference.evidence.decorator: estimator
        inference.evidence.flows: FittedFlow fit_flow
        inference.evidence.judging.constants: ConstantsReport check_constants
        inference.evidence.judging.diagnostics: Diagnostics from_draws
        inference.evidence.judging.verdict: Verdict
        inference.evidence.methods: Method Part select
        inference.evidence.modes: Mode find_mode
        inference.evidence.prequential_evidence: PrequentialEvidence
        inference.evidence.result: Evidence PredictiveScore
        inference.evidence.shared_runs: SharedRuns
        inference.evidence.tolerance: ToleranceCheck
        inference.evidence.variational: MeanField fit_mean_field
    """,
    "numbers of Python": """
        inference.generalized.certificates: invert_binary_divergence
    """,
    "data are simulated on the host, or a function of the user is given the host's": """
        inference.generalized.coverage: coverage_report
        inference.generalized.cross_validation: enumerated_cross_validation
        models.discrete.permutations.matching: NoisyMatching
    """,
    "networks are trained in single precision, and Adam magnifies rounding: on_a_device.py has a case of its own": """
        inference.amortization.posterior: AmortizedPosterior Corrected amortize
    """,
    "tables and pictures, made on the host": """
        models.vae.images: load_mnist5000 plot_traversal
        models.discrete.sequences.plots: Series load_nile plot_boundaries
        models.phylogenetics.summaries: plot_credible_set plot_split_frequencies plot_tree
        models.discrete.mixtures.plots: plot_num_components plot_predictive predictive_density
    """,
    "trees, alignments, their files and distributions over them": """
        models.phylogenetics.alignments: Alignment primates
        models.phylogenetics.branch_derivatives: BranchDerivatives
        models.phylogenetics.distributions.networks: ConditionalCladeDistribution SubsplitBayesianNetwork
        models.phylogenetics.summaries: ConsensusTree greedy_consensus majority_rule_consensus
        models.phylogenetics.data_types: DataType codons standard_characters
        models.phylogenetics.distributions.topology_distribution: Estimate SplitProbabilities
            TopologyDistribution
        models.phylogenetics.topology_moves.chains: Moves
        models.phylogenetics.mrbayes: MrBayesBlock
        models.phylogenetics.substitution: ReversibleModel SubstitutionModel all_reversible_models
            empirical_frequencies
        models.phylogenetics.distributions.frequencies: SampleFrequencies Smoothed
        models.phylogenetics.site_rates: SiteRates
        models.phylogenetics.trees: Tree
        models.phylogenetics.samples: TetrapodRuns TreeSample asdsf robinson_foulds split_frequencies tetrapods
        models.phylogenetics.topologies: all_topologies
        models.phylogenetics.alignment_checks: check_for_search
        models.phylogenetics.codon_models: codon_frequencies
        models.phylogenetics.dated_topologies: dates_from_file dates_from_names
        models.phylogenetics.neighbour_joining: jukes_cantor_distances
        models.phylogenetics.model_names: parse_substitution
        models.phylogenetics.site_sets: read_partitions
    """,
    "settings, results, abstract classes and sizes, or objects that run within the examples of others": """
        models.wide_networks.empirical_kernels: Linearized
        inference.curvature.laplace: LaplacePosterior Prediction
        inference.curvature.likelihoods: OutputLikelihood
        inference.curvature.matrices: Curvature Trace
        inference.curvature.natural_gradients: GradientFields
        models.wide_networks.gaussian_processes.comparison: GaussianProcessComparison ProcessPrediction
        models.wide_networks.gaussian_processes.ensemble: Ensemble
        models.wide_networks.gaussian_processes.large_data: ConjugateGradients InducingPoints LargeRegression
        models.wide_networks.gaussian_processes.marginal_likelihood: DepthComparison VarianceFit
        models.wide_networks.gaussian_processes.posterior: GaussianProcess KernelRegression Posterior
        models.wide_networks.gaussian_processes.wide_kernels: WideKernel
        models.wide_networks.kernels: InfiniteWidth Kernels
        models.sparse_networks.network: LayerPrecision SparseNetwork
        models.sparse_networks.priors: HorseshoePrior LogUniformPrior SpikeAndSlabPrior
        inference.unnormalised.moves: Unnormalised
        inference.unnormalised.normaliser: LogNormaliser
        inference.unnormalised.training: EnergyObjective NoiseContrastive RankingNoiseContrastive
        ode.operations: FailureCount
        inference.held_out.information: ActiveUnits Information
        inference.samplers.adaptation: Adaptation AdaptationState ChEES LongestAxis
        inference.samplers.driver: Algorithm Control Outcome drive
        models.vae.generative_model: Autoencoder GenerativeModel
        models.discrete.sequences.hidden_markov: CategoricalEmission Emission GaussianEmission
        inference.samplers.chains: Chains RunSettings run
        models.discrete.sequences.change_points: ChangePointPrior NegativeBinomialLengths NumberOfChanges
            SegmentModel
        inference.generalized.certificates: Certificate
        inference.generalized.checks: CoherenceReport ProprietyReport ResidualMismatch
        inference.generalized.generalization: GeneralizationGap
        inference.samplers.stochastic_gradient: Constant
        inference.objectives.evidence_lower_bound: Cyclical Linear WeightSchedule infomax_weight
        inference.generalized.losses.densities: DensityEstimate
        inference.samplers.ladder: Exchange
        inference.gradients.relaxed: ExponentialDecay
        models.discrete.mixtures.gaussian_mixture: GaussianMixture UnknownSizeMixture galaxy_velocities
        inference.objectives.sumo: GeometricTail Tail
        inference.gradients.comparison: GradientComparison GradientStatistics
        inference.gradients.estimator: GradientEstimator WeightedPoints
        inference.generalized.exact: GridPosterior
        inference.samplers.hmc: HMCInfo HMCState
        models.vae.images: Images load_digits
        inference.generalized.minimizer: InformationMatrices Minimum
        models.discrete.mixtures.labels: Labels aligned
        models.discrete.sequences.text: LearnedLexicon Lexicon candidate_words learn_lexicon
        inference.objectives.constrained: LogLikelihoodConstraint MeanSquaredError
        inference.generalized.losses.loss: Loss PointwiseLoss
        inference.generalized.losses.margin: MarginLoss
        inference.generalized.losses.mean_discrepancy: MeanEmbedding
        inference.samplers.nuts: NUTSInfo
        inference.samplers.nested: NestedSampler
        inference.objectives.objective: Objective
        inference.generalized.posterior: Pooling
        inference.generalized.losses.prediction: PredictionLoss
        models.discrete.permutations.relaxations: Relaxation
        inference.generalized.coverage: ReplicatePosteriors
        inference.samplers.populations: PopulationMoves ResampleMove SMCInfo SMCState
        inference.samplers.smc: SMCRun
        inference.held_out.annealing: Sandwich
        inference.samplers.weighted_particles: sigmoid_schedule
        models.discrete.sequences.chains: Semiring
        inference.gradients.space: Space
        inference.objectives.thermodynamic: TemperatureSchedule
        inference.generalized.coarsened: coarsening_weight
        models.vae.autoencoders: conditional_vae hierarchical_vae semi_supervised_vae
        models.discrete.mixtures.conjugate: log_joint_of_assignments
        inference.gradients.without_replacement: stochastic_beam_search
    """,
}
