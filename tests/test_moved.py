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
    with pytest.raises(CheckpointError, match=r"site_rates\.GammaRates; name it"):
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
            assert repr(sys.modules[name])
