"""The main job on real data: twelve primates, 898 sites, against the published value."""

import math

import pytest

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import TreeModel, primates

PUBLISHED, ITS_ERROR = -6468.912, 0.004


@pytest.fixture(scope="module")
def compared():
    # As many chains as rows of the ladder are evaluated at once, so that only one size is compiled.
    budget = evidence.Budget(128, 120, 60, num_temperatures=40, ladder_chains=16, ladder_warmup=80, ladder_samples=160)
    target = bk.Target.from_pyro(TreeModel(*primates()))
    methods = ["laplace_importance_sampling", "bridge_sampling", "modified_path_sampling", "stepping_stone"]
    return evidence.compare(target, methods, budget=budget, seed=0, progress=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "largest_error"),
    [
        ("laplace_importance_sampling", 0.03),
        ("bridge_sampling", 0.03),
        ("modified_path_sampling", 0.08),
        ("stepping_stone", 0.08),
    ],
)
def test_the_published_evidence(compared, method, largest_error, limit):
    z = compared[method]
    assert z.trusted, str(z)
    assert z.standard_error < largest_error
    assert abs(z.log_evidence - PUBLISHED) < limit(4) * math.hypot(z.standard_error, ITS_ERROR)
