"""Topologies from an alignment where there is no compiler: evidence against quadrature, resumption, constraints."""

import math

import pytest
import torch

from bayeskit.errors import CheckpointError
from bayeskit.models.phylogenetics import K80
from bayeskit.models.phylogenetics._topology_moves import _tensor_chains as tensor_chains
from bayeskit.models.phylogenetics.workflows import infer_topologies
from tests.models.phylogenetics.test_tree_chains import ALIGNMENT, exact_log_masses
from tests.models.phylogenetics.workflows.test_topology_inference import (
    FOUR,
    is_allowed,
    newicks,
    runs_until_killed_and_to_the_end,
)


@pytest.fixture
def no_compiler(monkeypatch):
    """Chains run as array operations; the warning is tested with them."""
    monkeypatch.setattr(tensor_chains, "compiled_code", lambda *_: None)


@pytest.mark.calibration
def test_evidence_and_constraints_without_a_compiler(no_compiler, limit):
    settings = {"num_temperatures": 4, "progress": False, "dtype": torch.float64}
    found = infer_topologies(ALIGNMENT, num_warmup=80, num_samples=300, **settings)
    exact = float(exact_log_masses(ALIGNMENT)[1].logsumexp(0)) - math.log(15)
    assert abs(found.log_evidence - exact) < limit() * found.evidence.standard_error < 1
    found = infer_topologies(ALIGNMENT, constraints=[["A", "E"]], num_warmup=20, num_samples=20, **settings)
    assert all(map(is_allowed, newicks(found)))


@pytest.mark.calibration
def test_a_killed_run_without_a_compiler_goes_on_bit_for_bit(no_compiler, tmp_path):
    expected, found = runs_until_killed_and_to_the_end(ALIGNMENT, tmp_path, substitution=K80())
    assert torch.equal(found.log_likelihood, expected.log_likelihood)
    assert torch.equal(found.parameters["kappa"], expected.parameters["kappa"])
    assert torch.equal(found.sample.branch_lengths, expected.sample.branch_lengths)
    assert (found.sample.index == expected.sample.index).all()


@pytest.mark.compiler
def test_a_checkpoint_knows_whether_its_chains_are_compiled(tmp_path, monkeypatch):
    settings = {"num_warmup": 10, "num_samples": 8, "num_temperatures": 4, "progress": False}
    infer_topologies(FOUR, checkpoint=tmp_path / "compiled", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_chains, "compiled_code", lambda *_: None)
        infer_topologies(FOUR, checkpoint=tmp_path / "arrays", **settings)
        with pytest.raises(CheckpointError, match="compiled"):
            infer_topologies(FOUR, checkpoint=tmp_path / "compiled", **settings)
    with pytest.raises(CheckpointError, match="compiled"):
        infer_topologies(FOUR, checkpoint=tmp_path / "arrays", **settings)
