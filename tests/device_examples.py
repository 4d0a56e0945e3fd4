"""The examples of all public docstrings, run by a user whose data are on a device."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
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
_MODULES = ("bayeskit.models.vae.autoencoders", "bayeskit.models.vae.networks", "bayeskit.models.vae.flows")
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
    """Return every class and function that a package exports, by the name of its module and its own."""
    found = {}
    for part in pkgutil.walk_packages(bayeskit.__path__, "bayeskit."):
        if part.ispkg and not part.name.rpartition(".")[2].startswith("_"):
            package = importlib.import_module(part.name)
            for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
                if inspect.isclass(value) or inspect.isfunction(value):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return dict(sorted(found.items()))


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


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names of tensors and numbers that differ beyond rounding."""
    wrong = []
    for key, value in expected.items():
        if isinstance(value, torch.Tensor | float):
            one, other = (torch.as_tensor(x).detach().cpu() for x in (value, found[key]))
            if one.shape != other.shape or not torch.allclose(
                one.double(), other.double(), rtol=1e-6, atol=1e-8, equal_nan=True
            ):
                wrong.append(f"{key}: {one} on the host, {other} on the device")
    return wrong


#: Shorter runs for examples that take long: what is replaced in their text. Numbers are compared with the host's.
SHORTER = {
    "samplers.chains.Convergence": {"16, 200, 5000": "4, 20, 5", "500)": "5)"},
    "samplers.ladder.sample_ladder": {"8, num_warmup=50": "4, num_chains=4, num_warmup=30"},
    "samplers.nested.NestedRun": {"num_live=100": "num_live=20"},
    "samplers.nested.sample_nested": {"num_live=200": "num_live=20"},
    "samplers.sampling.sample": {
        "num_warmup=100, num_samples=200": "num_warmup=20, num_samples=5",
        "num_samples=100": "num_warmup=20, num_samples=5",
    },
    "samplers.stochastic_gradient.sample_stochastic_gradient": {"num_samples=2000": "num_samples=20, num_warmup=20"},
    "training.fitting.fit": {"num_epochs=40": "num_epochs=2"},
    "generalized.coarsened.calibration_curve": {"num_warmup=100, num_samples=100": "num_warmup=20, num_samples=10"},
    "generalized.bootstrap.loss_likelihood_bootstrap": {"posterior, 4000": "posterior, 50"},
    "generalized.bootstrap.posterior_bootstrap": {"posterior, 4000": "posterior, 50"},
    "held_out.annealing.bidirectional_annealing": {"torch.zeros(100)": "torch.zeros(5)"},
    "held_out.by_evidence.by_evidence": {"num_warmup=100, num_samples=200": "num_warmup=20, num_samples=10"},
}

#: What computes nothing on a device by itself, by the reason; names of objects, or of packages with a dot at the end.
ELSEWHERE = {
    "names, texts and pages": "gallery.",
    "from alignments, files and models to tables and reports; they call what is rehearsed": "workflows.",
    "problems whose data are on the host, from where ExactCase.target moves them": "exact.",
    "each estimator is rehearsed on shared runs": "inference.evidence.",
    "data are simulated on the host, or a function of the user is given the host's": (
        "coverage_report enumerated_cross_validation NoisyMatching"
    ),
    "long examples, which benchmarks/device_transfers.py runs": (
        "relabel ntk_drift_against_width fit_depths Ladder coherence_check propriety_check"
    ),
    "tables and pictures, made on the host": (
        "load_mnist5000 plot_traversal "
        "Series load_nile plot_boundaries plot_credible_set plot_num_components plot_predictive "
        "plot_split_frequencies plot_tree predictive_density "
    ),
    "trees, alignments, their files and distributions over them": (
        "Alignment BranchDerivatives ConditionalCladeDistribution ConsensusTree DataType Estimate Moves "
        "MrBayesBlock ReversibleModel SampleFrequencies SiteRates Smoothed SplitProbabilities "
        "SubsplitBayesianNetwork SubstitutionModel TopologyDistribution Tree TreeSample all_reversible_models "
        "all_topologies asdsf check_for_search codon_frequencies codons dates_from_file dates_from_names "
        "empirical_frequencies greedy_consensus jukes_cantor_distances majority_rule_consensus "
        "parse_substitution primates read_partitions robinson_foulds split_frequencies standard_characters "
    ),
    "settings, results, abstract classes and sizes, or objects that run within the examples of others": (
        "Linearized ConjugateGradients InducingPoints LargeRegression DepthComparison VarianceFit InfiniteWidth "
        "Kernels StandardNormal "
        "ActiveUnits Adaptation AdaptationState Algorithm Autoencoder Carriage CategoricalEmission ChEES "
        "Chains ChangePointPrior CoherenceReport Constant Control Cyclical DensityEstimate Emission Exchange "
        "ExponentialDecay GaussianEmission GaussianMixture GenerativeModel GeometricTail GradientComparison "
        "GradientEstimator GradientStatistics GridPosterior HMCInfo HMCState Images Information "
        "InformationMatrices Labels LearnedLexicon Lexicon Linear LogLikelihoodConstraint LongestAxis Loss "
        "MarginLoss MeanEmbedding MeanSquaredError Minimum NUTSInfo NegativeBinomialLengths NestedSampler "
        "NumberOfChanges Objective Outcome PointwiseLoss Pooling PredictionLoss Predictive ProprietyReport "
        "Relaxation ReplicatePosteriors ResidualMismatch RunSettings SMCInfo SMCRun SMCState Sandwich "
        "SegmentModel Semiring Space Tail TemperatureSchedule UnknownSizeMixture WeightSchedule "
        "WeightedPoints aligned candidate_words coarsening_weight conditional_vae drive galaxy_velocities "
        "hierarchical_vae infomax_weight learn_lexicon load_digits log_joint_of_assignments run "
        "semi_supervised_vae sigmoid_schedule stochastic_beam_search "
    ),
}
