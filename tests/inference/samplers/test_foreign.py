import math
import os
import signal
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import digamma, polygamma

import bayeskit as bk
from bayeskit._core.statistics import effective_sample_size
from bayeskit.errors import BudgetError, CheckpointError, SamplingWarning, SettingsError, SlowModelWarning
from bayeskit.inference.samplers import _pyro_nuts as foreign
from bayeskit.inference.samplers._pyro_nuts import sample_with_pyro


def scores(draws):
    """Standardised errors of moments of the skewed target."""
    x, y = draws.unconstrained.unbind(-1)
    mean, variance = float(digamma(3)), float(polygamma(1, 3))
    truths = [
        (x, mean),
        (y, 0.8 * mean),
        ((x - mean).square(), variance),
        ((x - mean) * (y - 0.8 * mean), 0.8 * variance),
    ]
    return [abs(float((s.mean() - t) / (s.std() / effective_sample_size(s).sqrt()))) for s, t in truths]


@pytest.mark.calibration
def test_moments_of_a_skewed_correlated_target(skewed, limit):
    draws = sample_with_pyro(skewed, 2, 100, 300, seed=1, progress=False)
    assert max(scores(draws)) < limit(4)
    stats = draws.sample_stats
    assert all(value.shape == (2, 300) for value in stats.values())
    assert bool((stats["n_steps"] <= 2 ** stats["tree_depth"] - 1).all()) and int(stats["n_steps"].min()) >= 1
    assert 0.5 < float(stats["acceptance_rate"].mean()) < 1
    assert draws.num_gradients > int(stats["n_steps"].sum())
    torch.testing.assert_close(draws.log_density, skewed.log_density(draws.unconstrained), rtol=1e-12, atol=1e-12)
    assert set(draws.to_datasets()["sample_stats"]) >= {"diverging", "tree_depth", "n_steps", "lp"}


@pytest.mark.calibration
def test_the_moments_notice_a_gradient_that_fits_another_potential(skewed, limit, monkeypatch):
    evaluate = foreign._Potential.evaluate

    def tilted(self, u):
        evaluation = evaluate(self, u)
        return evaluation._replace(log_density=evaluation.log_density + u[0])

    monkeypatch.setattr(foreign._Potential, "evaluate", tilted)
    draws = sample_with_pyro(skewed, 2, 50, 300, seed=1, max_depth=4, progress=False)
    assert max(scores(draws)) > limit(4)


@pytest.mark.calibration
def test_a_model_that_cannot_be_batched(limit):
    """y ~ N(mean, 1), the mean folded at zero by a Python branch: the posterior has two mirrored halves."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        if mean < 0:
            mean = -mean
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.warns(SlowModelWarning):
        target = bk.Target.from_pyro(model, torch.tensor(1.0, dtype=torch.float64))
    draws = sample_with_pyro(target, 2, 100, 200, seed=3, progress=False)
    x = draws.unconstrained[..., 0].abs()
    # |mean| is a N(1/2, 1/2) variable given that it is positive.
    ratio = (
        math.exp(-0.25) / math.sqrt(math.pi) / (1 + math.erf(0.5))
    )  # density over mass above zero, times the variance
    truth = 0.5 + ratio
    error = x.std() / effective_sample_size(x).sqrt()
    assert abs(float((x.mean() - truth) / error)) < limit()


def test_same_seed_same_draws_and_no_trace_on_globals(normal_normal):
    before = torch.get_rng_state()
    first = sample_with_pyro(normal_normal, 2, 20, 10, seed=7, progress=False)
    second = sample_with_pyro(normal_normal, 2, 20, 10, seed=7, progress=False)
    other = sample_with_pyro(normal_normal, 2, 20, 10, seed=8, progress=False)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.unconstrained, second.unconstrained)
    assert not torch.equal(first.unconstrained, other.unconstrained)
    assert not torch.equal(first.unconstrained[0], first.unconstrained[1])


def test_divergences_are_counted():
    target = bk.Target.from_functions(
        lambda u: torch.where(u[..., 0].abs() < 1, torch.zeros_like(u[..., 0]), -torch.inf),
        lambda u: 0 * u[..., 0],
        1,
    )
    start = torch.zeros(1, dtype=torch.float64)
    draws = sample_with_pyro(target, 1, 0, 50, initial=start, max_depth=4, progress=False)
    assert int(draws.sample_stats["diverging"].sum()) > 0
    assert bool((draws.unconstrained.abs() < 1).all())


@pytest.mark.parametrize(
    "setting",
    [
        {"num_chains": 0},
        {"num_samples": 0},
        {"num_warmup": -1},
        {"target_acceptance": 1.0},
        {"target_acceptance": "0.8"},
        {"max_depth": 0},
    ],
)
def test_settings_outside_their_domain_are_refused(normal_normal, setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        sample_with_pyro(normal_normal, **setting)


# -- runs that are ended early ----------------------------------------------------------------

RUN = {"num_chains": 3, "num_warmup": 20, "num_samples": 15, "seed": 4, "progress": False}


@pytest.fixture(scope="module")
def whole():
    return sample_with_pyro(bk.exact.get("linreg10").target(), **RUN)


def assert_same(a, b, chains=slice(None), length=None):
    """The first draws of some chains of ``b`` are all that ``a`` has, bit for bit."""
    assert torch.equal(a.unconstrained, b.unconstrained[chains, :length])
    for name in ("log_prior", "log_likelihood"):
        density = getattr(b, name)[chains, :length]
        # Part of a chain is a smaller batch, which rounds otherwise.
        torch.testing.assert_close(getattr(a, name), density, rtol=0 if length is None else 1e-12, atol=0)
    for name, value in b.sample_stats.items():
        assert torch.equal(a.sample_stats[name], value[chains, :length]), name


def interrupt_at(patch, iteration, what=lambda: os.kill(os.getpid(), signal.SIGINT)):
    """Do something, once, in the n-th iteration of Pyro's kernel."""
    sample, calls = foreign.PyroNUTS.sample, []

    def counted(self, params):
        calls.append(1)
        if len(calls) == iteration:
            what()
        return sample(self, params)

    patch.setattr(foreign.PyroNUTS, "sample", counted)


@pytest.mark.calibration
@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_ctrl_c_returns_complete_chains_and_the_next_call_goes_on_bit_for_bit(tmp_path, monkeypatch, whole, seconds):
    settings = RUN | {"checkpoint": tmp_path / "state", "checkpoint_seconds": seconds}
    target = bk.exact.get("linreg10").target()
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, lambda: time.sleep(1))
        interrupt_at(patch, 2 * 35 + 25)
        with pytest.warns(SamplingWarning, match="interrupted after 15 of 15 draws of 2 of 3 chains; the same call"):
            cut = sample_with_pyro(target, **settings)
    assert cut.settings["ending"] == "interrupted"
    assert_same(cut, whole, slice(2))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10**6, lambda: None)
        resumed = sample_with_pyro(target, **settings)
    assert resumed.settings["ending"] == "finished" and resumed.seconds > 1  # as the first part alone took
    assert resumed.num_gradients == whole.num_gradients
    assert_same(resumed, whole)
    assert_same(sample_with_pyro(target, **settings), whole)  # all is in the file


@pytest.mark.calibration
def test_where_no_chain_is_complete_the_draws_of_the_first_are_returned(tmp_path, monkeypatch, whole):
    settings = RUN | {"checkpoint": tmp_path / "state"}
    target = bk.exact.get("linreg10").target()
    with monkeypatch.context() as patch:
        interrupt_at(patch, 20 + 7)
        with pytest.warns(SamplingWarning, match="interrupted after 7 of 15 draws of 1 of 3 chains"):
            cut = sample_with_pyro(target, **settings)
    assert_same(cut, whole, slice(1), 7)
    assert 0 < cut.num_gradients < whole.num_gradients
    assert_same(sample_with_pyro(target, **settings), whole)


@pytest.mark.calibration
def test_a_time_budget_is_looked_at_in_every_iteration(monkeypatch, whole):
    now = [0.0]
    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: now[0])

    def pass_time():
        now[0] += 100.0

    interrupt_at(monkeypatch, 35 + 30, pass_time)
    target = bk.exact.get("linreg10").target()
    with pytest.warns(SamplingWarning, match="time budget of 50 s after 15 of 15 draws of 1 of 3 chains; these are"):
        cut = sample_with_pyro(target, **RUN, time_budget=50.0)
    assert cut.settings["ending"] == "time budget"
    assert_same(cut, whole, slice(1))


def test_before_the_first_draw_there_is_nothing_to_return(monkeypatch):
    target = bk.exact.get("linreg10").target()
    with pytest.raises(BudgetError, match="in the warm-up of the first of 3 chains"):
        sample_with_pyro(target, **RUN, time_budget=1e-9)
    interrupt_at(monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        sample_with_pyro(target, **RUN)


@pytest.mark.parametrize(
    ("name", "value"), [("num_chains", 2), ("num_warmup", 21), ("max_depth", 5), ("target_acceptance", 0.9)]
)
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, normal_normal, name, value):
    settings = {"num_chains": 1, "num_warmup": 5, "num_samples": 2, "checkpoint": tmp_path / "state", "progress": False}
    sample_with_pyro(normal_normal, **settings)
    with pytest.raises(CheckpointError, match=name):
        sample_with_pyro(normal_normal, **settings | {name: value})
