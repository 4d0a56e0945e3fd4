"""Error bars must be neither too small nor too large."""

import numpy as np
import pytest
from scipy.stats import binom, chi2

from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference.evidence import Budget, calibrate, calibration

FAILURE_RATE = 1e-5
LADDER = Budget(4, 120, 200, num_temperatures=24, ladder_chains=4, ladder_warmup=100, ladder_samples=120)


def check(z):
    """Compare the scatter of z with a standard normal's, allowing the 10 % that short chains cost."""
    n = len(z)
    low, high = chi2.ppf([FAILURE_RATE / 2, 1 - FAILURE_RATE / 2], n - 1) / (n - 1)
    assert 0.9**2 * low < np.var(z, ddof=1) < 1.1**2 * high
    assert abs(z.mean()) < 4.5 * z.std(ddof=1) / np.sqrt(n)
    covered = int((np.abs(z) < 1.96).sum())
    assert binom.cdf(covered, n, 0.95) > FAILURE_RATE


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_bridge_on_autocorrelated_draws(correlation):
    result = calibrate(("bridge_sampling",), "linreg10", 150, correlation=correlation, progress=False)
    check(result.z("bridge_sampling"))


def test_bridge_path_and_stepping_stone_on_sampled_draws():
    methods = ("bridge_sampling", "modified_path_sampling", "stepping_stone")
    result = calibrate(methods, "linreg10", 32, budget=LADDER, progress=False)
    for method in methods:
        check(result.z(method))
    table = result.to_pandas()
    assert list(table["method"]) == list(methods) and (table["false_comfort"] <= 0.05).all()


def test_a_standard_error_cut_in_half_is_noticed():
    result = calibrate(("bridge_sampling",), "linreg10", 100, correlation=0.5, progress=False)
    with pytest.raises(AssertionError):
        check(2 * result.z("bridge_sampling"))


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
    assert seeds == [1]
    np.testing.assert_array_equal(first.z("bridge_sampling"), again.z("bridge_sampling"))
    with pytest.raises(CheckpointError, match="another task 0"):
        calibrate(("bridge_sampling",), "linreg10", 3, **settings, seed=5)


def test_what_has_no_exact_draws_is_refused():
    with pytest.raises(SettingsError, match="linreg10"):
        calibrate(("bridge_sampling",), "eight_schools", 2, correlation=0.5)
    with pytest.raises(SettingsError, match="correlation"):
        calibrate(("bridge_sampling",), "linreg10", 2, correlation=1.5)
