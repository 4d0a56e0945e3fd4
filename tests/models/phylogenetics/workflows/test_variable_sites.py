"""Workflows on data without constant sites."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import AlignmentError, SamplingWarning
from bayeskit.inference.evidence import Budget
from bayeskit.models.phylogenetics import (
    JC69,
    K80,
    Alignment,
    Mk,
    SubsplitBayesianNetwork,
    VariableSites,
    all_topologies,
)
from bayeskit.models.phylogenetics.workflows import (
    VariationalPosterior,
    average_substitution_models,
    compare_topologies,
    infer_topologies,
    variational_inference,
)

VARIABLE = Alignment.from_sequences({"a": "02110", "b": "02210", "c": "01112", "d": "12002"}, data_type="standard")
SETTINGS = {"substitution": VariableSites(Mk(3)), "progress": False}


@pytest.fixture(autouse=True)
def few_draws_are_not_trusted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        yield


@pytest.mark.calibration
def test_importance_sampling_and_prior_draws_agree(limit):
    """Of the topologies, and of one of them with and without the correction."""
    topologies = all_topologies("abcd")
    one = compare_topologies(VARIABLE, topologies, num_draws=3000, **SETTINGS)
    other = compare_topologies(VARIABLE, topologies, "naive_monte_carlo", budget=Budget(4, 50, 500), **SETTINGS)
    error = torch.hypot(one.standard_error, other.standard_error)
    assert ((one.log_evidence - other.log_evidence).abs() < limit(4) * error).all() and error.max() < 0.1
    models = {"Mk": Mk(3), "Mkv": VariableSites(Mk(3))}
    average = average_substitution_models(VARIABLE, topologies.tree(0), models, num_draws=3000, progress=False)
    found = average.comparison["Mkv"]
    error = math.hypot(found.standard_error, float(other.standard_error[0]))
    assert abs(found.log_evidence - float(other.log_evidence[0])) < limit(4) * error
    assert found.log_evidence > average.comparison["Mk"].log_evidence + 1


def test_the_search_refuses_sites_that_cannot_be_in_the_data():
    constant = Alignment.from_sequences({"a": "00", "b": "01", "c": "00", "d": "01"}, data_type="standard")
    with pytest.raises(AlignmentError, match="Sites 1 .*data without constant sites"):
        infer_topologies(constant, substitution=VariableSites(Mk(2)), progress=False)


def test_a_fitted_posterior_is_stored(tmp_path):
    bases = Alignment.from_sequences({"a": "ACTG", "b": "ACGG", "c": "CCTA", "d": "CTTA"})
    support = SubsplitBayesianNetwork.from_topologies(all_topologies("abcd"))
    for substitution in (VariableSites(JC69()), VariableSites(K80(dist.Gamma(2.0, 1.0)))):
        posterior = variational_inference(bases, support, substitution=substitution, num_steps=20, progress=False)
        posterior.save(tmp_path / "posterior")
        again = VariationalPosterior.load(tmp_path / "posterior")
        assert again.log_evidence(200, seed=1).log_evidence == posterior.log_evidence(200, seed=1).log_evidence
