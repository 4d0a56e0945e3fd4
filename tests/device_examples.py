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
        is_private = any(word.startswith("_") for word in part.name.split(".")) or part.name == "bayeskit.cli"
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
    "models.discrete.mixtures._labels.relabel": {"4, 300, 100": "4, 20, 10"},
    "models.wide_networks._finite_width.ntk_drift_against_width": {"(16, 256)": "(4, 8)"},
    "models.wide_networks.gaussian_processes._marginal_likelihood.fit_depths": {
        "fit_depths(make_network, [1, 3]": "found = fit_depths(make_network, [1, 2]"
    },
    "inference.evidence._ladder.thermodynamic_integration": {
        "num_samples=200": "num_samples=10, num_warmup=40, num_chains=4, num_temperatures=4, max_temperatures=8"
    },
    "inference.evidence._tolerance.tolerance_check": {"1 / 8, progress": "1 / 8, tighter_rtol=1 / 10, progress"},
    "inference.marginal._target.MarginalTarget": {"num_samples=200": "num_warmup=20, num_samples=5"},
    "inference.samplers._chains.Convergence": {"16, 200, 5000": "4, 20, 5", "500)": "5)"},
    "inference.samplers._ladder.sample_ladder": {"8, num_warmup=50": "4, num_chains=4, num_warmup=30"},
    "inference.samplers._nested.sample_nested": {"num_live=200": "num_live=20"},
    "inference.samplers._sampling.sample": {
        "num_warmup=100, num_samples=200": "num_warmup=20, num_samples=5",
        "num_samples=100": "num_warmup=20, num_samples=5",
    },
    "inference.samplers._stochastic_gradient.sample_stochastic_gradient": {
        "num_samples=2000": "num_samples=20, num_warmup=20"
    },
    "inference.training._fitting.fit": {"num_epochs=40": "num_epochs=2"},
    "inference.generalized._coarsened.calibration_curve": {
        "num_warmup=100, num_draws=100": "num_warmup=20, num_draws=10"
    },
    "inference.generalized._bootstrap.loss_likelihood_bootstrap": {"posterior, 4000": "posterior, 50"},
    "inference.generalized._bootstrap.posterior_bootstrap": {"posterior, 4000": "posterior, 50"},
    "inference.held_out._by_evidence.by_evidence": {"num_warmup=100, num_samples=200": "num_warmup=20, num_samples=10"},
}

#: What computes nothing on a device by itself, by the reason: names of objects after those of their modules.
ELSEWHERE = {
    "maps and their data are on the host, from where models move them to the counts": """
        models.latent_gaussian._fields: AreaGraph
        models.latent_gaussian._lip_cancer: scottish_lip_cancer
        models.latent_gaussian._models: DiseaseMap
    """,
    "names, texts and pages": """
        gallery._registry: Entry entries listed names
        gallery._scripts: Page data_file is_small page pages
        gallery._trees: tree_target
    """,
    "from alignments, files and models to tables and reports; they call what is rehearsed": """
        workflows._bayes_factors: ModelComparison compare_models
        workflows._calibration: calibration_in_folder
        workflows._exam: run_exam run_generated_exam
        workflows._folder: evidence_in_folder posterior_in_folder save_netcdf
        workflows._invariance: RegressionPrior invariant_subsets
        models.discrete.mixtures._evidence: TemperingBudget compare_num_components mixture_evidence symmetrised_bridge
        models.phylogenetics.workflows._growing_support: SupportGrowth
        models.phylogenetics.workflows._substitution_average: average_substitution_models
        models.phylogenetics.workflows._topology_comparison: compare_topologies
        models.phylogenetics.workflows._topology_evidence: topology_evidence
        models.phylogenetics.workflows._topology_inference: TopologyInference infer_topologies
        models.phylogenetics.workflows._topology_report: write_topology_report
        models.phylogenetics.workflows._variational._inference: variational_inference
        models.phylogenetics.workflows._variational._learning_rates: LearningRates
        models.phylogenetics.workflows._variational._length_families: FlowLengths LogNormalLengths
        models.phylogenetics.workflows._variational._posterior: VariationalPosterior
        workflows._simulation_based_calibration: SBCResult sbc
    """,
    "problems whose data are on the host, from where ExactCase.target moves them": """
        exact._beta_binomial: beta_binomial
        exact._case: ExactCase
        exact._eight_schools: eight_schools
        exact._enumeration: Marginal enumerate_latents
        exact._family: Family
        exact.generated: generate shrink
        exact: get
        exact._linear_regression: linear_regression
        exact._neals_funnel: neals_funnel
        exact._pima: pima
        exact._radiata_pine: radiata_pine
        exact._several_modes: eggbox gaussian_shells spike_and_slab
        exact._three_taxon_tree: pattern_log_probabilities three_taxon_sequences three_taxon_tree
    """,
    "settings, results and parts of the estimators, each of which is rehearsed on shared runs": """
        inference.evidence._budget: Budget LadderBudget NestedSamplingBudget PosteriorBudget SMCBudget
        inference.evidence._calibration: Calibration Problem calibrate
        inference.evidence._comparison: EvidenceComparison compare
        inference.evidence._conditionals: ConjugateBlock
        inference.evidence._decorator: estimator
        inference.evidence._flows: fit_flow
        inference.evidence._judging._constants: check_constants
        inference.evidence._judging._diagnostics: Diagnostics from_draws
        inference.evidence._judging._verdict: Verdict
        inference.evidence._methods: Method Part select
        inference.evidence._modes: find_mode
        inference.evidence._result: Evidence PredictiveScore
        inference.evidence._variational: fit_mean_field
    """,
    "numbers of Python, and tables made from them": """
        models.discrete._genotypes: conflict_free_matrices num_conflict_free
        models.discrete._ising: kaufman_log_partition
        inference.generalized._certificates: invert_binary_divergence
    """,
    "data are simulated on the host, or a function of the user is given the host's": """
        inference._experiments: best_design information information_gradient
        inference.generalized._coverage: coverage_report
        inference.held_out._leave_out: enumerated_cross_validation
        models.discrete.permutations._matching: NoisyMatching
    """,
    "networks are trained in single precision, and Adam magnifies rounding: on_a_device.py has a case of its own": """
        inference.amortization._posterior: AmortizedPosterior amortize
    """,
    "tables and pictures, made on the host": """
        models.vae._images: load_mnist5000 plot_traversal
        models.discrete.sequences._plots: Series load_nile plot_boundaries
        models.phylogenetics._summaries: plot_credible_set plot_split_frequencies plot_tree
        models.discrete.mixtures._plots: plot_num_components plot_predictive predictive_density
    """,
    "trees, alignments, their files and distributions over them": """
        models.phylogenetics._alignments: Alignment primates read_matrices
        models.phylogenetics._distributions._networks: ConditionalCladeDistribution SubsplitBayesianNetwork
        models.phylogenetics._summaries: AnnotatedTree greedy_consensus majority_rule_consensus
            maximum_clade_credibility
        models.phylogenetics._topological_effective_size: topological_effective_size
        models.phylogenetics._data_types: DataType codons standard_characters
        models.phylogenetics._distributions._topology_distribution: TopologyDistribution
        models.phylogenetics._mrbayes: MrBayesBlock
        models.phylogenetics._substitution: ReversibleModel SubstitutionModel all_reversible_models
            empirical_frequencies
        models.phylogenetics._distributions._frequencies: SampleFrequencies Smoothed
        models.phylogenetics._site_rates: SiteRates
        models.phylogenetics._trees: Tree
        models.phylogenetics._samples: TreeSample asdsf robinson_foulds split_frequencies tetrapods
        models.phylogenetics._topologies: all_topologies
        models.phylogenetics._alignment_checks: check_for_search
        models.phylogenetics._mixture_models: MixtureModel
        models.phylogenetics._codon_models: codon_frequencies
        models.phylogenetics._tip_dates: TipDates dates_from_file dates_from_names
        models.phylogenetics._neighbour_joining: jukes_cantor_distances
        models.phylogenetics._model_names: parse_substitution
        models.phylogenetics._site_sets: read_partitions
    """,
    "settings, results, abstract classes and sizes, or objects that run within the examples of others": """
        inference.curvature._laplace: LaplacePosterior
        inference.curvature._likelihoods: OutputLikelihood
        models.wide_networks.gaussian_processes._comparison: GaussianProcessComparison
        models.wide_networks.gaussian_processes._ensemble: Ensemble
        models.wide_networks.gaussian_processes._large_data: ConjugateGradients InducingPoints
        models.wide_networks.gaussian_processes._posterior: GaussianProcess KernelRegression Posterior
        models.wide_networks.gaussian_processes._wide_kernels: WideKernel
        models.wide_networks._kernels: InfiniteWidth Kernels
        models.sparse_networks._network: SparseNetwork
        models.sparse_networks._priors: HorseshoePrior LogUniformPrior SpikeAndSlabPrior
        models.unnormalised._moves: Unnormalised
        models.unnormalised._training: EnergyObjective NoiseContrastive RankingNoiseContrastive
        inference.held_out._information: Information
        inference.samplers._adaptation: Adaptation ChEES LongestAxis
        inference.samplers._driver: Algorithm Control drive
        models.vae._generative_model: Autoencoder GenerativeModel
        models.discrete.sequences._hidden_markov: CategoricalEmission Emission GaussianEmission
        inference.samplers._chains: Chains RunSettings run
        models.discrete.sequences._change_points: ChangePointPrior NegativeBinomialLengths NumberOfChanges
            SegmentModel
        inference.samplers._stochastic_gradient: Constant
        inference.objectives._evidence_lower_bound: Cyclical Linear WeightSchedule infomax_weight
        inference.generalized.losses._densities: DensityEstimate
        inference.samplers._ladder: Exchange
        inference.gradients._relaxed: ExponentialDecay
        models.discrete.mixtures._gaussian_mixture: GaussianMixture UnknownSizeMixture galaxy_velocities
        inference.objectives._sumo: GeometricTail Tail
        inference.gradients._estimator: GradientEstimator
        models.vae._images: Images load_digits
        models.discrete.mixtures._labels: Labels aligned
        models.discrete.sequences._text: Lexicon candidate_words learn_lexicon
        inference.objectives._constrained: LogLikelihoodConstraint MeanSquaredError
        inference.generalized.losses._loss: Loss PointwiseLoss
        inference.generalized.losses._margin: MarginLoss
        inference.generalized.losses._mean_discrepancy: MeanEmbedding
        inference.objectives._objective: Objective
        inference.generalized._posterior: Pooling
        inference.generalized.losses._prediction: PredictionLoss
        models.discrete.permutations._relaxations: Relaxation
        inference.samplers._populations: PopulationMoves ResampleMove
        inference.samplers._weighted_particles: sigmoid_schedule
        models.discrete.sequences._chains: Semiring
        inference.gradients._space: Space
        inference.objectives._thermodynamic: TemperatureSchedule
        inference.generalized._coarsened: coarsening_weight
        models.vae._discrete: binary_vae categorical_vae
        models.vae._autoencoders: conditional_vae hierarchical_vae semi_supervised_vae
        inference.gradients._without_replacement: stochastic_beam_search
    """,
}
