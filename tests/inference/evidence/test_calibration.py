"""Error bars must be neither too small nor too large."""

import numpy as np
import pytest
from scipy.stats import binom

from bayeskit import exact
from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import Budget, calibrate
from bayeskit.inference.evidence import _calibration as calibration
from bayeskit.inference.evidence._budget import LEAST
from bayeskit.workflows._calibration import calibrations

FAILURE_RATE = 1e-5
LADDER = Budget(8, 80, 100, num_temperatures=24, ladder_chains=8, ladder_warmup=60, ladder_samples=60)


def covers(z):
    return binom.cdf(int((np.abs(z) < 1.96).sum()), len(z), 0.95) > FAILURE_RATE


@pytest.mark.long
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_bridge_on_autocorrelated_draws(correlation, calibrated):
    z = calibrate(("bridge_sampling",), "linreg10", 100, correlation=correlation, progress=False).z("bridge_sampling")
    assert calibrated(z, off=0.1) and covers(z), z
    # A standard error cut in half is noticed by all but one in ten thousand such studies.
    assert not calibrated(2 * z, off=0.1)


@pytest.mark.long
def test_bridge_path_and_stepping_stone_on_sampled_draws(calibrated):
    methods = ("bridge_sampling", "modified_path_sampling", "stepping_stone")
    result = calibrate(methods, "linreg10", 32, budget=LADDER, progress=False)
    for method in methods:
        z = result.z(method)
        assert calibrated(z, off=0.1) and covers(z), (method, z)
    table = result.to_pandas()
    assert list(table["method"]) == list(methods)
    beyond_three = binom.isf(FAILURE_RATE / 3, 32, 0.0027)  # of normal scores
    assert (32 * table["false_comfort"] <= beyond_three).all()


def test_processes_do_not_change_the_result():
    serial = calibrate(("bridge_sampling",), "linreg10", 4, correlation=0.5, progress=False)
    parallel = calibrate(("bridge_sampling",), "linreg10", 4, correlation=0.5, num_jobs=2, progress=False)
    # Sums of the same numbers at other addresses may differ in the last digit.
    np.testing.assert_allclose(serial.z("bridge_sampling"), parallel.z("bridge_sampling"), rtol=0, atol=1e-9)


def test_finished_replicates_are_kept(tmp_path, monkeypatch):
    settings = {"correlation": 0.5, "checkpoint": tmp_path / "run", "progress": False}
    first = calibrate(("bridge_sampling",), "linreg10", 3, **settings)
    (tmp_path / "run" / "task-000001.safetensors").unlink()
    compare, seeds = calibration.compare, []

    def counted(target, methods, seed, **settings):
        seeds.append(seed)
        return compare(target, methods, seed=seed, **settings)

    monkeypatch.setattr(calibration, "compare", counted)
    again = calibrate(("bridge_sampling",), "linreg10", 3, **settings)
    assert seeds == [first.seeds[1]]
    np.testing.assert_array_equal(first.z("bridge_sampling"), again.z("bridge_sampling"))
    with pytest.raises(CheckpointError, match="another task 0"):
        calibrate(("bridge_sampling",), "linreg10", 3, **settings, seed=5)


@pytest.mark.calibration
def test_a_study_of_several_problems_keeps_those_that_are_done(tmp_path, monkeypatch):
    original, asked = calibration.compare, []

    def fails_at_the_third(target, *args, **kwargs):
        asked.append(target.dim)
        if len(asked) == 3:
            raise ArithmeticError
        return original(target, *args, **kwargs)

    monkeypatch.setattr(calibration, "compare", fails_at_the_third)
    problems = ["beta_binomial", "linreg10"]
    with pytest.raises(ArithmeticError):
        calibrations("laplace_importance_sampling", problems, tmp_path, 2, progress=False)
    found = calibrations("laplace_importance_sampling", problems, tmp_path, 2, progress=False)
    assert asked == [1, 1, 10, 10, 10] and [one.case for one in found] == problems
    assert not list(tmp_path.rglob("checkpoint*"))


def test_what_has_no_exact_draws_is_refused():
    with pytest.raises(SettingsError, match="linreg10"):
        calibrate(("bridge_sampling",), "eight_schools", 2, correlation=0.5)
    with pytest.raises(SettingsError, match="correlation"):
        calibrate(("bridge_sampling",), "linreg10", 2, correlation=1.5)


def test_neighbouring_seeds_share_no_replicate():
    settings = {"correlation": 0.0, "budget": Budget(2, 20, 20), "progress": False}
    one, two = (calibrate("bridge_sampling", "linreg10", 6, seed=seed, **settings) for seed in (0, 1))
    assert len({*one.seeds, *two.seeds}) == 12
    assert not set(one.estimates["bridge_sampling"]) & set(two.estimates["bridge_sampling"])
    more = calibrate("bridge_sampling", "linreg10", 8, seed=0, **settings)
    assert more.seeds[:6] == one.seeds
    np.testing.assert_array_equal(more.estimates["bridge_sampling"][:6], one.estimates["bridge_sampling"])


def test_what_does_not_apply_is_skipped_if_wanted():
    methods = ["laplace_importance_sampling", "gamma_laplus", "pointwise_predictive_density"]
    with pytest.raises(SettingsError, match="gamma_laplus cannot be calibrated on beta_binomial"):
        calibrate(methods, "beta_binomial", 2, progress=False)
    found = calibrate(methods, "beta_binomial", 2, skip_refused=True, progress=False)
    assert list(found.estimates) == methods[:1] and list(found.refused) == methods[1:]
    with pytest.raises(SettingsError, match="predictive score"):
        calibrate(methods[1:], "beta_binomial", 2, skip_refused=True, progress=False)


@pytest.mark.parametrize("name", list(LEAST))
def test_a_budget_too_small_to_run_is_refused(name):
    assert getattr(Budget(**{name: np.int64(LEAST[name])}), name) == LEAST[name]
    for value in (LEAST[name] - 1, -3, 8.5):
        with pytest.raises(SettingsError, match=f"{name} must be .* not {value}"):
            Budget(**{name: value})


def test_other_settings_of_a_budget_are_checked():
    for wrong in ({"target_acceptance": 1.0}, {"target_acceptance": "high"}, {"exchange": 1}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            Budget(**wrong)


def test_draws_of_one_posterior_do_not_pass_for_another_of_the_same_name():
    other = calibration.Problem("linreg10", exact.get("beta_binomial").target, -2.4)
    with pytest.raises(SettingsError, match="for the exact case linreg10"):
        calibrate("bridge_sampling", other, 2, correlation=0.5, progress=False)
    same = calibration.Problem("by another name", exact.get("linreg10").target, exact.get("linreg10").log_evidence)
    settings = {"correlation": 0.5, "progress": False}
    renamed = calibrate("bridge_sampling", same, 2, **settings).estimates["bridge_sampling"]
    assert (renamed == calibrate("bridge_sampling", "linreg10", 2, **settings).estimates["bridge_sampling"]).all()


def test_a_target_instead_of_what_makes_it_is_refused():
    target = exact.get("beta_binomial").target()
    with pytest.raises(SettingsError, match="build of problem 'q' is a Target; give a function"):
        calibrate("laplace", calibration.Problem("q", target), 2, progress=False)
    with pytest.raises(SettingsError, match="'q' cannot be called without arguments"):
        calibrate("laplace", calibration.Problem("q", lambda x: target), 2, progress=False)
    with pytest.raises(SettingsError, match="correlation"):
        calibrate("bridge_sampling", "linreg10", 2, correlation="high", progress=False)


def test_a_budget_is_nested_and_has_flat_words():
    budget = Budget(4, 100, num_live=20, ladder=evidence.LadderBudget(num_temperatures=20))
    assert budget == Budget(num_chains=4, num_warmup=100, nested=evidence.NestedSamplingBudget(20), num_temperatures=20)
    assert (budget.posterior.num_warmup, budget.ladder.num_temperatures, budget.nested.num_live) == (100, 20, 20)
    assert Budget(**budget.words()) == budget and eval(repr(budget)) == budget
    assert (budget.ladder_chains, budget.num_samples) == (budget.ladder.num_chains, budget.posterior.num_samples)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: Budget(4, num_chains=3), "num_chains by position and by name"),
        (lambda: Budget(*range(20, 28)), "at most 7 numbers by position"),
        (lambda: Budget(chains=3), "has no chains"),
        (lambda: Budget(posterior=evidence.LadderBudget()), "must be a PosteriorBudget"),
        (lambda: Budget(ladder=evidence.LadderBudget(num_chains=0)), "ladder_chains must be"),
    ],
)
def test_a_budget_that_cannot_be_read_is_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        given()
