"""Old import paths answer with a warning that names the new one."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

import bayeskit
from bayeskit import _moved
from bayeskit.core.storage import decode, encode, qualified_name
from bayeskit.errors import CheckpointError
from bayeskit.models.phylogenetics import GammaRates, SiteRates

LINES = Path(bayeskit.__file__).with_name("moved_modules.txt").read_text(encoding="utf-8").splitlines()
OLD = {f"bayeskit.{old}": line.split(":")[0].split() for line in LINES for old in line.split(":")[1].split()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of packages that are imported on the way
def test_every_old_path_has_a_place_that_exists():
    assert len(OLD) > 400
    for places in OLD.values():
        for place in places:
            assert importlib.import_module(f"bayeskit.{place}").__file__


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("bayeskit.target", "Target", "bayeskit.logdensity.target"),
        ("bayeskit.inference.evidence.posterior", "bridge_sampling", "bayeskit.inference.evidence.bridge"),
        ("bayeskit.inference.samplers.smc.run", "SMCRun", "bayeskit.inference.samplers.smc"),
        ("bayeskit.models.wide_networks.empirical", "kernel_regime", "bayeskit.models.wide_networks.finite_width"),
    ],
)
def test_an_old_name_is_the_new_one(old, name, new):
    with pytest.warns(DeprecationWarning, match=f"{old} has moved; import {name} from {new}"):
        scope: dict[str, object] = {}
        exec(f"from {old} import {name}", scope)
    assert scope[name] is getattr(importlib.import_module(new), name)


RENAMED = Path(bayeskit.__file__).with_name("renamed_names.txt").read_text(encoding="utf-8").splitlines()


def test_every_renamed_name_has_its_new_one():
    for module, old, new in map(str.split, RENAMED):
        found = vars(importlib.import_module(f"bayeskit.{module}"))
        home, _, last = new.rpartition(".")
        present = vars(importlib.import_module(f"bayeskit.{home or module}"))
        assert last in present and old not in found, (module, old, new)


@pytest.mark.parametrize(
    ("room", "old", "new"),
    [
        ("bayeskit.inference.gradients", "compare", "compare_estimators"),
        ("bayeskit.inference.objectives", "Schedule", "WeightSchedule"),
        ("bayeskit.inference.samplers", "Schedule", "SMCSchedule"),
        ("bayeskit.inference.generalized", "prequential", "prequential_score"),
        ("bayeskit.inference.generalized.variational", "Renyi", "RenyiDivergence"),
        ("bayeskit.models.wide_networks.gaussian_processes", "Fit", "VarianceFit"),
        ("bayeskit.models.wide_networks.curvature", "Gaussian", "GaussianOutputs"),
        ("bayeskit.gallery", "get", "get_model"),
    ],
)
def test_an_old_name_answers_with_its_new_one(room, old, new):
    module = importlib.import_module(room)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_a_name_that_has_moved_to_another_module():
    with pytest.warns(DeprecationWarning, match="SUBSTITUTION_MODELS has moved; .* from .*model_names"):
        from bayeskit.models.phylogenetics.substitution import SUBSTITUTION_MODELS
    assert (
        SUBSTITUTION_MODELS is importlib.import_module("bayeskit.models.phylogenetics.model_names").SUBSTITUTION_MODELS
    )
    old, new = (f"bayeskit.models.phylogenetics.{name}.SUBSTITUTION_MODELS" for name in ("substitution", "model_names"))
    assert _moved.present_names(old) == [new]


def test_an_old_path_knows_the_new_name():
    with pytest.warns(DeprecationWarning, match="import StepSizeSchedule from"):
        scope: dict[str, object] = {}
        exec("from bayeskit.inference.samplers.stochastic_gradient.schedules import Schedule", scope)
    assert "bayeskit.inference.samplers.stochastic_gradient.StepSizeSchedule" in _moved.present_names(
        "bayeskit.inference.samplers.stochastic_gradient.schedules.Schedule"
    )


def test_a_name_that_has_become_private_is_found():
    with pytest.warns(DeprecationWarning, match="import _quarter_period from bayeskit.inference.samplers.example"):
        sys.modules["bayeskit.inference.samplers.example"] = module = type(sys)("bayeskit.inference.samplers.example")
        module._quarter_period = 1.5
        try:
            moved = _moved._Moved("bayeskit.old", ["bayeskit.inference.samplers.example"])
            assert moved.quarter_period == 1.5
        finally:
            del sys.modules["bayeskit.inference.samplers.example"]


def test_results_that_were_stored_under_an_old_name_are_read():
    types = {qualified_name(SiteRates): SiteRates}
    stored = {"type": "bayeskit.models.phylogenetics.substitution.site_rates.GammaRates", "fields": {}}
    with pytest.raises(CheckpointError, match=r"site_rates\.GammaRates; name this type"):
        decode(stored, {}, types)
    fields = encode(GammaRates(num_categories=3), {}, {qualified_name(GammaRates): GammaRates})["fields"]
    found = decode(stored | {"fields": fields}, {}, types | {qualified_name(GammaRates): GammaRates})
    assert isinstance(found, GammaRates) and found.num_categories == 3


def test_what_never_was_is_not_there():
    with pytest.raises(ImportError, match="never"):
        exec("from bayeskit.inference.samplers.smc.run import never")


def test_who_looks_through_all_modules_is_not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in OLD:
            assert not hasattr(sys.modules[name], "__file__")
            assert not hasattr(sys.modules[name], "torch")  # imported by many; pickle asks for such names
            assert repr(sys.modules[name])
