"""Runs that end early, by a time budget or by Ctrl-C: what there is is returned, and where nothing is, that is said."""

import math
import os
import signal

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit import exact
from bayeskit.errors import BudgetError, SamplingWarning
from bayeskit.inference.samplers import SGLD, MinibatchTarget, sample_nested, sample_smc, sample_stochastic_gradient
from bayeskit.inference.samplers import _smc as smc_run
from bayeskit.inference.samplers._nested import NestedSampler
from bayeskit.inference.samplers._smc import AdaptiveTempering, Replicates
from bayeskit.inference.samplers._stochastic_gradient import StochasticGradientRun

LONG = 100.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless told."""
    now = [0.0]
    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: now[0])

    def pass_time(seconds=LONG):
        now[0] += seconds

    return pass_time


def before_step(patch, algorithm, step, action):
    """Do something in the given step of an algorithm, counted from one."""
    advance = algorithm.advance

    def watched(self, state, iteration, generator):
        if iteration + 1 == step:
            action()
        return advance(self, state, iteration, generator)

    patch.setattr(algorithm, "advance", watched)


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def smc(**settings):
    small = {"num_particles": 16, "num_replicates": 4, "num_pilot_particles": 64, "ess_threshold": 0.97}
    return sample_smc(exact.get("beta_binomial").target(), **small, progress=False, **settings)


def nested(**settings):
    return sample_nested(exact.get("beta_binomial").target(), 40, num_slice_steps=4, progress=False, **settings)


def minibatch(**settings):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=20) as rows:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])

    target = MinibatchTarget.from_pyro(model, torch.linspace(-1.0, 3.0, 100, dtype=torch.float64))
    return sample_stochastic_gradient(target, SGLD(step_size=1e-3), 2, 10, 10, progress=False, **settings)


@pytest.mark.parametrize("run", [smc, nested, minibatch])
def test_a_time_budget_that_leaves_nothing_is_an_error(run, tmp_path):
    with pytest.raises(BudgetError, match="before there was anything to return; give more time, or a checkpoint"):
        run(time_budget=1e-9)
    with pytest.raises(BudgetError, match="the same call resumes from the checkpoint"):
        run(time_budget=1e-9, checkpoint=tmp_path / "state")
    run(checkpoint=tmp_path / "state")


@pytest.mark.parametrize(
    ("run", "algorithm"), [(smc, AdaptiveTempering), (nested, NestedSampler), (minibatch, StochasticGradientRun)]
)
def test_ctrl_c_that_leaves_nothing_is_raised(run, algorithm, monkeypatch):
    start = algorithm.start

    def interrupted(self, generator):
        ctrl_c()
        return start(self, generator)

    monkeypatch.setattr(algorithm, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()


@pytest.mark.parametrize("phase", [AdaptiveTempering, Replicates])
def test_what_smc_has_done_is_returned(phase, clock, monkeypatch, tmp_path):
    whole = smc()
    with monkeypatch.context() as patch:
        before_step(patch, phase, 2, clock)
        with pytest.warns(SamplingWarning, match="time budget of 50 s.*the same call resumes from the checkpoint"):
            cut = smc(time_budget=50.0, checkpoint=tmp_path / "state")
    assert cut.ending == "time budget" and len(cut.beta) == 2
    assert 0 < float(cut.draws.beta[0]) < 1 and (cut.schedule is None) == (phase is AdaptiveTempering)
    resumed = smc(checkpoint=tmp_path / "state")
    assert torch.equal(resumed.draws.unconstrained, whole.draws.unconstrained)
    assert torch.equal(resumed.log_evidence, whole.log_evidence)
    assert resumed.draws.seconds == LONG  # of both parts; the clock stood still otherwise


@pytest.mark.calibration
@pytest.mark.parametrize("algorithm", [AdaptiveTempering, Replicates, NestedSampler, StochasticGradientRun])
def test_ctrl_c_in_the_last_step_is_heard_and_returns_everything(algorithm, monkeypatch):
    """Whoever follows several runs up has to hear it, though this one is complete."""
    if algorithm is NestedSampler:
        whole = nested()
        steps = (len(whole.position) - 40) // 20
        run, draws = nested, lambda run: run.position
    elif algorithm is StochasticGradientRun:
        whole, steps, run, draws = minibatch(), 20, minibatch, lambda run: run.unconstrained
    else:
        whole = smc()
        steps, run, draws = len(whole.schedule), smc, lambda run: run.draws.unconstrained
    before_step(monkeypatch, algorithm, steps, ctrl_c)
    with pytest.warns(SamplingWarning, match="interrupted"):
        complete = run()
    ending = complete.settings["ending"] if algorithm is StochasticGradientRun else complete.ending
    assert ending == "interrupted"
    if algorithm is AdaptiveTempering:
        assert float(complete.draws.beta[0]) == 1 and complete.schedule.fingerprint() == whole.schedule.fingerprint()
    else:
        assert torch.equal(draws(complete), draws(whole))


def test_ctrl_c_in_the_last_move_of_smc_is_heard(monkeypatch):
    whole, pooled = smc(), smc_run._pooled

    def interrupted(*arguments):
        ctrl_c()
        return pooled(*arguments)

    monkeypatch.setattr(smc_run, "_pooled", interrupted)
    with pytest.warns(SamplingWarning, match=r"interrupted after (\d+) of \1 stages"):
        complete = smc()
    assert complete.ending == complete.draws.settings["ending"] == "interrupted"
    assert torch.equal(complete.draws.unconstrained, whole.draws.unconstrained)


def test_a_finished_pilot_is_returned_though_no_replicate_has_moved(clock, monkeypatch):
    before_step(monkeypatch, Replicates, 1, lambda: None)
    drive_start = Replicates.start

    def slow(self, generator):
        clock()
        return drive_start(self, generator)

    monkeypatch.setattr(Replicates, "start", slow)
    with pytest.warns(SamplingWarning, match=r"after 0 of \d+ stages"):
        cut = smc(time_budget=50.0)
    assert cut.schedule is not None and float(cut.draws.beta[0]) == 0 and len(cut.beta) == 0
    with pytest.raises(BudgetError, match="in the first stage"):
        smc(time_budget=50.0, schedule=cut.schedule)


def test_what_nested_sampling_has_done_is_returned(clock, monkeypatch, tmp_path):
    whole = nested()
    with monkeypatch.context() as patch:
        before_step(patch, NestedSampler, 3, clock)
        with pytest.warns(SamplingWarning, match="nested sampling: ended by the time budget of 50 s after 3 blocks"):
            cut = nested(time_budget=50.0, checkpoint=tmp_path / "state")
    assert cut.ending == "time budget" and len(cut.position) == 40 + 3 * 20
    resumed = nested(checkpoint=tmp_path / "state")
    assert torch.equal(resumed.position, whole.position) and resumed.log_evidence == whole.log_evidence
    assert resumed.seconds == cut.seconds == LONG


@pytest.mark.parametrize("ending", ["time budget", "interrupted"])
def test_the_draws_of_minibatches_that_are_done_are_returned(clock, monkeypatch, tmp_path, ending):
    whole = minibatch()
    with monkeypatch.context() as patch:
        before_step(patch, StochasticGradientRun, 14, clock if ending == "time budget" else ctrl_c)
        with pytest.warns(SamplingWarning, match="after 4 of 10 draws a chain"):
            cut = minibatch(time_budget=50.0, checkpoint=tmp_path / "state")
    assert cut.settings["ending"] == ending and torch.equal(cut.unconstrained, whole.unconstrained[:, :4])
    resumed = minibatch(checkpoint=tmp_path / "state")
    assert torch.equal(resumed.unconstrained, whole.unconstrained)
    assert torch.equal(resumed.sample_stats["diverging"], whole.sample_stats["diverging"])
    assert math.isclose(resumed.seconds, LONG if ending == "time budget" else 0.0)
