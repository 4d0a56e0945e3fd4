"""The evidence at two tolerances of a solver against a linear regression, whose evidence is known at each."""

import math
import os

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.evidence import tolerance_check

SHIFT = int(os.environ.get("BAYESKIT_SEED_SHIFT", "0"))
DOUBLE = torch.float64
TIMES = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=DOUBLE)
DATA = torch.tensor([0.62, 0.35, 0.15], dtype=DOUBLE)


def by_euler(h, y):
    """Decay by steps of Euler's method, of length ``h``."""
    start = pyro.sample("start", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    pyro.sample("y", dist.Normal(start * euler_factors(h), 0.1).to_event(1), obs=y)


def euler_factors(h):
    return (1 - h) ** (TIMES[1:] / h).round()


def by_solver(rtol, y):
    start = pyro.sample("start", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    path = bk.ode.solve(lambda t, z, _: -z, start.reshape(1), TIMES, rtol=rtol, atol=rtol)
    pyro.sample("y", dist.Normal(path[1:, 0], 0.1).to_event(1), obs=y)


def exactly(factors):
    covariance = factors[:, None] * factors + 0.01 * torch.eye(3, dtype=DOUBLE)
    return float(torch.distributions.MultivariateNormal(torch.zeros(3, dtype=DOUBLE), covariance).log_prob(DATA))


def check(model, rtol, **settings):
    return tolerance_check(
        lambda rtol: bk.Target.from_pyro(model, rtol, DATA), rtol, seed=2 + SHIFT, progress=False, **settings
    )


@pytest.mark.calibration
def test_long_steps_are_found_out():
    assert exactly(torch.exp(-TIMES[1:])) == pytest.approx(1.6324255707, abs=1e-9)
    assert exactly(euler_factors(1 / 4)) == pytest.approx(1.581721, abs=1e-6)
    found = check(by_euler, 1 / 4, tighter_rtol=1 / 3200)
    difference = exactly(euler_factors(1 / 3200)) - exactly(euler_factors(1 / 4))
    assert not found.trusted and "more than its standard error" in str(found)
    assert abs(found.difference - difference) < 4.5 * found.standard_error
    assert found.standard_error < 0.1 * difference
    for z, h in ((found.evidence, 1 / 4), (found.tighter_evidence, 1 / 3200)):
        assert abs(z.log_evidence - exactly(euler_factors(h))) < 4.5 * z.standard_error


@pytest.mark.calibration
def test_the_default_tolerance_is_trusted():
    found = check(by_solver, 1e-6)
    assert found.trusted and not found.warnings and found.tighter_rtol == 1e-8
    assert abs(found.difference) < 1e-4 * found.evidence.standard_error + 1e-4
    assert "difference" in repr(found) and "log evidence" in found._repr_html_()


@pytest.mark.calibration
def test_a_factory_that_ignores_its_tolerance_is_not_trusted():
    found = tolerance_check(lambda _: bk.Target.from_pyro(by_solver, 1e-2, DATA), 1e-6, seed=SHIFT, progress=False)
    assert not found.trusted and "equal to the bit" in found.warnings[0] and len(found.warnings) == 1


@pytest.mark.calibration
def test_states_in_small_units_are_solved_at_the_default():
    def model(rtol, y):
        start = pyro.sample("start", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
        path = bk.ode.solve(lambda t, z, _: -z, 1e-9 * start.reshape(1), TIMES, rtol=rtol)
        pyro.sample("y", dist.Normal(1e9 * path[1:, 0], 0.1).to_event(1), obs=y)

    found = check(model, 1e-6)
    assert found.trusted and abs(found.evidence.log_evidence - 1.6324255707) < 4.5 * found.evidence.standard_error


@pytest.mark.calibration
def test_posteriors_that_barely_overlap_have_draws_of_their_own():
    def model(h, y):
        start = pyro.sample("start", dist.Normal(torch.zeros((), dtype=y.dtype), 10.0))
        pyro.sample("y", dist.Normal(start - 5 * h, 0.1).to_event(0), obs=y[0])

    found = tolerance_check(lambda h: bk.Target.from_pyro(model, h, DATA), 0.5, seed=SHIFT, progress=False)
    assert not found.trusted and "barely overlap" in found.warnings[0]
    right = [float(dist.Normal(-5 * h, math.hypot(10, 0.1)).log_prob(DATA[0])) for h in (0.5, 0.005)]
    assert abs(found.difference - (right[1] - right[0])) < 4.5 * found.standard_error


@pytest.mark.calibration
def test_draws_can_be_given():
    target = bk.Target.from_pyro(by_solver, 1e-6, DATA)
    draws = bk.sample(target, seed=SHIFT, progress=False)
    found = tolerance_check(lambda rtol: bk.Target.from_pyro(by_solver, rtol, DATA), draws=draws, progress=False)
    direct = bk.evidence.bridge_sampling(target, draws, seed=0)
    assert (found.evidence.log_evidence, found.evidence.standard_error) == (direct.log_evidence, direct.standard_error)
    assert found.evidence.warnings == direct.warnings


def test_bad_input():
    def factory(rtol):
        return bk.Target.from_pyro(by_solver, rtol, DATA)

    with pytest.raises(SettingsError, match="tighter_rtol"):
        tolerance_check(factory, 1e-6, tighter_rtol=1e-5)
    with pytest.raises(SettingsError, match="rtol"):
        tolerance_check(factory, -1.0)
    with pytest.raises(SettingsError, match="must return a Target, not a float"):
        tolerance_check(lambda rtol: rtol)
    with pytest.raises(ShapeError, match="1 coordinates at rtol 1 and 2"):
        sizes = {1.0: 1, 0.01: 2}

        def model(size):
            x = pyro.sample("x", dist.Normal(torch.zeros(size), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(0.0))

        tolerance_check(lambda rtol: bk.Target.from_pyro(model, sizes[rtol]), 1.0)
