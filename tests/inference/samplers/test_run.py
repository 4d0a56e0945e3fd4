import math
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import (
    CheckpointError,
    CheckpointWarning,
    DataError,
    InitializationError,
    OutputError,
    SettingsError,
    ShapeError,
    UnknownNameError,
)
from bayeskit.inference.samplers import (
    HMC,
    NUTS,
    SGLD,
    Adaptation,
    Control,
    Convergence,
    RunSettings,
    run,
    sample_ladder,
    sample_nested,
    sample_smc,
    sample_with_pyro,
)
from bayeskit.inference.samplers._chains import Chains
from bayeskit.inference.samplers._sampling import _starting_points

#: A server that imports once and from then on only forks, itself without a thread and having computed nothing.
FORKS = multiprocessing.get_context("forkserver")


def _sample(checkpoint, out):
    torch.set_num_threads(1)
    target = exact.get("eight_schools").target()
    draws = bk.sample(target, 4, 100, 150, seed=3, checkpoint=checkpoint, checkpoint_seconds=0.01, progress=False)
    draws.save(out)


def _run(checkpoint, out, kill_after=None):
    process = FORKS.Process(target=_sample, args=(checkpoint, out))
    process.start()
    if kill_after is not None:
        deadline = time.monotonic() + 120
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        while process.is_alive() and time.monotonic() < deadline:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != before:
                break  # this process has made progress of its own
            time.sleep(0.005)
        time.sleep(kill_after)
        process.kill()
    process.join(300)
    return process.exitcode


@pytest.mark.calibration
def test_a_killed_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    FORKS.set_forkserver_preload(["bayeskit.exact", "bayeskit.inference.samplers"])
    target = exact.get("eight_schools").target()
    whole = bk.sample(target, 4, 100, 150, seed=3, progress=False)
    checkpoint, out = tmp_path / "state", tmp_path / "draws"
    moments = random.Random(11)
    killed = 0
    for _ in range(2):
        code = _run(checkpoint, out, kill_after=moments.uniform(0.0, 0.15))
        killed += code == -signal.SIGKILL
    assert killed >= 1 and checkpoint.exists()
    assert _run(checkpoint, out) == 0
    resumed = bk.Draws.load(out, target)
    assert torch.equal(resumed.unconstrained, whole.unconstrained)
    assert torch.equal(resumed.log_likelihood, whole.log_likelihood)
    assert resumed.num_gradients == whole.num_gradients
    for name, value in whole.sample_stats.items():
        assert torch.equal(resumed.sample_stats[name], value), name


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "state"
    target = exact.get("beta_binomial").target()
    draws = bk.sample(target, 4, 50, 50, checkpoint=path, progress=False)
    return path, target, draws


def test_a_finished_checkpoint_gives_the_same_draws(checkpoint):
    path, target, draws = checkpoint
    again = bk.sample(target, 4, 50, 50, checkpoint=path, progress=False)
    assert torch.equal(draws.unconstrained, again.unconstrained)


def test_a_checkpoint_of_another_model_is_refused_and_kept(checkpoint):
    path, _, _ = checkpoint
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="another model"):
        bk.sample(exact.beta_binomial(3, 10).target(), 4, 50, 50, checkpoint=path, progress=False)
    assert path.read_bytes() == before


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("change", "name"),
    [({"num_samples": 40}, "num_samples"), ({"seed": 1}, "seed"), ({"num_warmup": 60}, "num_warmup")],
)
def test_a_checkpoint_of_other_settings_is_refused(checkpoint, change, name):
    path, target, _ = checkpoint
    settings = {"num_chains": 4, "num_warmup": 50, "num_samples": 50} | change
    with pytest.raises(CheckpointError, match=name):
        bk.sample(target, **settings, checkpoint=path, progress=False)


@pytest.mark.calibration
@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_truncated_checkpoint_is_refused(checkpoint, keep):
    path, target, _ = checkpoint
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        bk.sample(target, 4, 50, 50, checkpoint=path, progress=False)


def test_a_checkpoint_that_cannot_be_written_is_said(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        bk.sample(exact.get("beta_binomial").target(), 4, 50, 50, checkpoint=file / "state", progress=False)


@pytest.mark.calibration
def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(checkpoint, tmp_path, monkeypatch):
    _, target, whole = checkpoint
    path, calls = tmp_path / "folder" / "state", []
    path.parent.mkdir()

    def fills_up(_):
        calls.append(1)
        if len(calls) > 70:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        with pytest.warns(CheckpointWarning, match="No space left"):
            bk.sample(target, 4, 50, 50, checkpoint=path, checkpoint_seconds=0, progress=False)
    assert list(path.parent.iterdir()) == [path]
    resumed = bk.sample(target, 4, 50, 50, checkpoint=path, progress=False)
    assert torch.equal(resumed.unconstrained, whole.unconstrained)


def test_finished_draws_are_returned_though_the_last_checkpoint_cannot_be_written(tmp_path, monkeypatch):
    target = exact.get("beta_binomial").target()
    calls = []

    def fills_up(_):
        calls.append(1)
        if len(calls) > 1:  # the first one is written before the work begins
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fills_up)
    with pytest.warns(CheckpointWarning, match="No space left"):
        draws = bk.sample(target, 4, 50, 50, checkpoint=tmp_path / "state", checkpoint_seconds=1000, progress=False)
    assert draws.num_draws == 50


def test_bad_starts_are_named():
    target = exact.get("linreg10").target()
    with pytest.raises(ShapeError, match="initial must have shape"):
        bk.sample(target, initial=torch.zeros(3), progress=False)

    def log_prior(u):
        return torch.where(u[..., 0] > 0, -u[..., 0], -torch.inf)

    wild = torch.zeros(4, target.dim, dtype=torch.float64)
    wild[2, 0] = torch.nan
    with pytest.raises(InitializationError, match=r"chains \[2\] hold NaN"):
        bk.sample(target, initial=wild, progress=False)
    outside = bk.Target.from_functions(log_prior, lambda u: 0 * u[..., 0], 1)
    with pytest.raises(InitializationError, match="outside the support of the prior"):
        bk.sample(outside, initial=-torch.ones(1, dtype=torch.float64), progress=False)


def test_every_chain_at_minus_infinity_is_said():
    nowhere = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: u.sum(-1) * 0 - torch.inf, 2)
    with pytest.raises(InitializationError, match="density is zero at all 400 starting candidates"):
        bk.sample(nowhere, progress=False)


@pytest.mark.parametrize("name", ["num_chains", "num_samples"])
def test_nothing_to_do_is_refused(name):
    with pytest.raises(SettingsError, match=name):
        bk.sample(exact.get("beta_binomial").target(), **{name: 0}, progress=False)


def test_the_ladder_starts_at_the_prior_and_ends_at_the_posterior():
    target = exact.get("beta_binomial").target()
    ladder = sample_ladder(target, 6, 4, 50, 40, progress=False)
    assert ladder.beta[0] == 0 and ladder.beta[-1] == 1 and len(ladder.beta) == 7
    assert ladder.log_likelihood.shape == (7, 4, 40)
    torch.testing.assert_close(target.log_likelihood(ladder.draws.unconstrained), ladder.draws.log_likelihood)
    custom = sample_ladder(target, beta=[0, 0.1, 1], num_chains=2, num_warmup=30, num_samples=20, progress=False)
    assert custom.beta.tolist() == [0, 0.1, 1]
    for bad in ([0.1, 0.5, 1], [0, 0.5, 0.9], [0, 0.6, 0.5, 1], [0, 1], "abc", ["a", 1], [[0, 0.5], [1]]):
        with pytest.raises(SettingsError, match="increase strictly"):
            sample_ladder(target, beta=bad, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("metric", ["diagonal", "dense", "low_rank"])
@pytest.mark.parametrize("stop", [57, 130])
def test_a_run_goes_on_from_the_middle_of_a_window_to_the_same_draws(metric, stop, tmp_path, monkeypatch):
    target = exact.get("linreg10").target()
    settings = {"num_warmup": 120, "num_samples": 30, "metric": metric, "progress": False}
    whole, advance = bk.sample(target, **settings), Chains.advance

    def dies(self, state, iteration, generator):
        if iteration == stop:
            raise MemoryError
        return advance(self, state, iteration, generator)

    again = settings | {"checkpoint": tmp_path / "checkpoint", "checkpoint_seconds": 0}
    with monkeypatch.context() as patch:
        patch.setattr(Chains, "advance", dies)
        with pytest.raises(MemoryError):
            bk.sample(target, **again)
    assert torch.equal(bk.sample(target, **again).unconstrained, whole.unconstrained)


def test_a_ladder_resumes_too(tmp_path):
    target = exact.get("beta_binomial").target()
    path = tmp_path / "ladder"
    first = sample_ladder(target, 4, 2, 30, 20, checkpoint=path, checkpoint_seconds=0, progress=False)
    second = sample_ladder(target, 4, 2, 30, 20, checkpoint=path, progress=False)
    assert torch.equal(first.draws.unconstrained, second.draws.unconstrained)


@pytest.mark.parametrize("kernel", [NUTS, "nuts", SGLD(step_size=0.1)])
def test_a_kernel_that_is_none_is_refused(kernel):
    with pytest.raises(SettingsError, match="kernel must be"):
        bk.sample(exact.get("beta_binomial").target(), kernel=kernel, progress=False)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("draws", "num_samples"), ("tune", "num_warmup"), ("chains", "num_chains"), ("cores", "num_jobs")]
    + [("target_accept", "target_acceptance"), ("idata_kwargs", "coords and dims")],
)
def test_words_of_other_packages_are_answered_with_ours(theirs, ours):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    y = torch.zeros(3, dtype=torch.float64)
    for target in ((model, y), (bk.Target.from_pyro(model, y),)):
        with pytest.raises(UnknownNameError, match=f"no setting '{theirs}'; what other packages call so is {ours}"):
            bk.sample(*target, **{theirs: 2})


def test_wrong_objects_are_named():
    target = exact.get("beta_binomial").target()
    with pytest.raises(SettingsError, match="takes a Target or a Pyro model"):
        bk.sample("beta_binomial")
    with pytest.raises(SettingsError, match="by position with a Target, not 60"):
        bk.sample(target, 4, 50, 50, 60)
    with pytest.raises(UnknownNameError, match="did you mean 'num_chains'"):
        bk.sample(target, num_chain=4)
    with pytest.raises(SettingsError, match="two chains"):
        bk.sample(target, 1, stop=Convergence(), progress=False)


@pytest.mark.parametrize("name", ["num_chains", "num_warmup", "num_samples", "seed"])
@pytest.mark.parametrize("wrong", [4.0, 25.5, "25", None, True], ids=repr)
def test_numbers_that_are_not_whole_are_refused(name, wrong):
    settings = {"num_chains": 4, "num_warmup": 25, "num_samples": 5, "seed": 1} | {name: wrong}
    with pytest.raises(SettingsError, match=f"{name} must be a whole number"):
        RunSettings(**settings)


def test_integers_of_numpy_are_as_good_and_checkpoints_take_them(tmp_path):
    target, control = exact.get("beta_binomial").target(), Control(tmp_path / "state", progress=False)

    def positions(integer):
        settings = RunSettings(*(integer(i) for i in (4, 25, 5)), seed=integer(1), control=control)
        return run(target, Adaptation(HMC(), integer(25)), settings).position

    assert torch.equal(positions(np.int64), positions(int))  # the second resumes from the file of the first


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (sample_smc, "num_particles"),
        (sample_smc, "num_replicates"),
        (sample_smc, "num_pilot_particles"),
        (sample_smc, "max_moves"),
        (sample_smc, "seed"),
        (sample_nested, "num_live"),
        (sample_nested, "num_delete"),
        (sample_nested, "num_slice_steps"),
        (sample_nested, "max_blocks"),
        (sample_nested, "seed"),
        (sample_with_pyro, "num_chains"),
        (sample_with_pyro, "max_depth"),
        (sample_with_pyro, "seed"),
    ],
)
def test_every_sampler_wants_whole_numbers(sampler, name):
    with pytest.raises(SettingsError, match=f"{name} must be a whole number"):
        sampler(exact.get("beta_binomial").target(), **{name: 16.0}, progress=False)


def line(x, y, scale=1.0):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(slope * x, scale * noise), obs=y)


X = torch.linspace(-1, 1, 20, dtype=torch.float64)
Y = 2 * X + 0.3 * torch.sin(20 * X)


@pytest.fixture(scope="module")
def line_target():
    return bk.Target.from_pyro(line, X, Y, scale=2.0, compile=False)


@pytest.mark.calibration
def test_a_model_with_its_arguments_is_its_target(line_target):
    draws = bk.sample(line, X, Y, scale=2.0, compile=False, num_chains=2, num_warmup=50, num_samples=20, progress=False)
    same = bk.sample(line_target, 2, 50, 20, progress=False)
    assert torch.equal(draws.unconstrained, same.unconstrained)
    assert draws.target.fingerprint() == line_target.fingerprint()


def starts_of(target, initial, num_chains=3):
    """The values of sites from which chains set out."""
    return target.constrain(_starting_points(target, initial, num_chains, seed=0))


def test_chains_start_where_they_are_told(line_target):
    start = starts_of(line_target, {"slope": 0.5, "noise": [0.1, 0.2, 0.3]})
    torch.testing.assert_close(start["slope"], torch.full((3,), 0.5, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(start["noise"], torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), rtol=1e-6, atol=1e-6)
    partly = starts_of(line_target, {"noise": 0.2})
    torch.testing.assert_close(partly["noise"], torch.full((3,), 0.2, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert len(set(partly["slope"].tolist())) == 3
    for strategy in ("prior", "uniform"):
        one, again = starts_of(line_target, strategy), starts_of(line_target, strategy)
        assert all(torch.equal(one[name], again[name]) and len(set(one[name].tolist())) == 3 for name in one)


def test_named_starting_points_have_their_laws(line_target, limit):
    prior, uniform = starts_of(line_target, "prior", 2000), starts_of(line_target, "uniform", 2000)
    assert abs(prior["slope"].mean()) < limit(3) * 2.0 / math.sqrt(2000)
    assert abs(uniform["slope"].mean()) < limit(3) * 4.0 / math.sqrt(12 * 2000)
    assert uniform["slope"].abs().max() <= 2 and abs(prior["noise"].square().mean() - 1) < limit(3) * math.sqrt(
        2 / 2000
    )


def test_the_default_start_is_that_of_pathfinder(line_target):
    one, other = (bk.sample(line_target, 2, 20, 5, initial=how, progress=False) for how in (None, "pathfinder"))
    assert torch.equal(one.unconstrained, other.unconstrained)


def test_starting_points_that_cannot_be_are_named(line_target):
    with pytest.raises(SettingsError, match="'pior' is unknown; take 'pathfinder'"):
        bk.sample(line_target, initial="pior")
    with pytest.raises(UnknownNameError, match="did you mean 'slope'"):
        bk.sample(line_target, initial={"slop": 1.0})
    with pytest.raises(DataError, match="'noise' lies outside its support"):
        bk.sample(line_target, initial={"noise": -1.0})
    with pytest.raises(ShapeError, match="'noise' has"):
        bk.sample(line_target, initial={"noise": torch.ones(5, 2)}, num_chains=4)
    flat = bk.Target.from_functions(lambda u: 0 * u[..., 0], lambda u: -u.square().sum(-1), 2)
    with pytest.raises(SettingsError, match="needs prior draws"):
        bk.sample(flat, initial="prior")


def test_thinning_keeps_every_third_of_the_same_chain(line_target, tmp_path):
    every = bk.sample(line_target, 2, 50, 30, progress=False)
    third = bk.sample(line_target, 2, 50, 10, thinning=3, progress=False)
    assert torch.equal(third.unconstrained, every.unconstrained[:, 2::3]) and third.settings["thinning"] == 3
    assert third.num_gradients == every.num_gradients
    by_hand = every.thin(3)
    assert torch.equal(by_hand.unconstrained, third.unconstrained) and torch.equal(by_hand.log_prior, third.log_prior)
    assert torch.equal(by_hand.sample_stats["energy"], third.sample_stats["energy"])
    with pytest.raises(CheckpointError):
        bk.sample(line_target, 2, 50, 10, thinning=3, checkpoint=tmp_path / "state", progress=False)
        bk.sample(line_target, 2, 50, 10, checkpoint=tmp_path / "state", progress=False)
    with pytest.raises(SettingsError, match="thinning"):
        bk.sample(line_target, thinning=0)
