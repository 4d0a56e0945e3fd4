"""What a process imports, and when."""

import subprocess
import sys

import pytest

import bayeskit

HEAVY = (
    "arviz",
    "gpytorch",
    "matplotlib",
    "pandas",
    "scipy.stats",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "xarray",
)
"""Packages that take a third of a second or more, and are of use to some calls only."""

SAMPLE = """
import torch, pyro, pyro.distributions as dist, bayeskit as bk
def model(y):
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(pyro.sample("mean", dist.Normal(0.0, 5.0)), scale), obs=y)
target = bk.Target.from_pyro(model, torch.tensor([1.2, 0.4, 2.1], dtype=torch.float64))
draws = bk.sample(target, num_chains=2, num_warmup=20, num_samples=20, seed=0, progress=False)
"""


def loaded_by(*arguments, status=0):
    """Return the names of the modules that a process imports, which ends with that status."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("arguments", [("-c", "import bayeskit"), ("-m", "bayeskit", "--help")], ids=["import", "help"])
def test_neither_import_nor_help_loads_torch(arguments):
    assert not loaded_by(*arguments) & {"torch", "pyro", "numpy", *HEAVY}


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["list"], 0),
        (["evidence", "primats"], 2),
        (["evidence", "linreg10", "--methods", "bridge"], 2),
        (["evidence", "linreg10", "--method", "all"], 2),
        (["evidence", "--alignment", "missing.fasta", "--tree", "missing.nwk"], 2),
        (["compare", "--alignment", "missing.fasta", "--trees", "missing.nwk"], 2),
        (["sbn", "--trees", "missing.nwk"], 2),
        (["vi", "--alignment", "missing.fasta"], 2),
        (["exam", "--cases", "linreg"], 2),
        (["run", "linreg10", "--out", "/dev/null/folder"], 2),
    ],
)
def test_lists_and_refusals_need_no_torch(arguments, status):
    assert not loaded_by("-m", "bayeskit", *arguments, status=status) & {"torch", "pyro", "numpy", *HEAVY}


@pytest.mark.calibration
def test_a_summary_and_the_evidence_load_only_what_they_need():
    found = loaded_by("-c", f"{SAMPLE}\ndraws.summary()\nbk.evidence.bridge_sampling(draws.target, draws)")
    assert "pandas" in found and not found & (set(HEAVY) - {"pandas"})


@pytest.mark.calibration
def test_sampling_loads_only_what_it_needs():
    found = loaded_by("-c", SAMPLE)
    assert "torch" in found and not found & set(HEAVY)


def test_every_public_name_is_found():
    assert set(bayeskit.__all__) <= set(dir(bayeskit))
    assert all(getattr(bayeskit, name) is not None for name in bayeskit.__all__)
    assert bayeskit.workflows.sbc is bayeskit.sbc  # rooms as well


@pytest.mark.calibration
def test_rooms_are_found_from_the_package_on():
    code = "import bayeskit as bk; bk.inference.evidence.compare, bk.inference.samplers.NUTS, bk.models.vae.LinearVAE"
    assert "bayeskit.models.vae._linear" in loaded_by("-c", code)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'smaple'"):
        _ = bayeskit.smaple
    with pytest.raises(AttributeError, match="no attribute 'smaple'"):
        _ = bayeskit.inference.smaple
