import math
import signal
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import (
    BudgetError,
    CheckpointError,
    InitializationError,
    ModelError,
    SamplingWarning,
    SettingsError,
    ShapeError,
)
from bayeskit.inference.samplers._minibatch import Epochs, IndependentRows, MinibatchTarget
from bayeskit.inference.samplers._stochastic_gradient import (
    SGHMC,
    SGLD,
    Constant,
    Polynomial,
    PreconditionedSGLD,
    sample_stochastic_gradient,
)

NUM_DATA, BATCH_SIZE = 40, 5
Y = 1 + torch.randn(NUM_DATA, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
MEAN = float(Y.sum()) / (1 + NUM_DATA)
NEAR = torch.tensor([MEAN], dtype=torch.float64)  # from elsewhere, slow chains need a longer warm-up to cool down
NOISE = NUM_DATA**2 / BATCH_SIZE * float(Y.var(correction=0))


def normal_mean(y, batch_size):
    """Prior N(0, 1), observations N(mean, 1)."""
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


@pytest.fixture(scope="module")
def target():
    return MinibatchTarget.from_pyro(normal_mean, Y, BATCH_SIZE, row_order=IndependentRows())


@pytest.fixture(scope="module")
def whole():
    return MinibatchTarget.from_pyro(normal_mean, Y, NUM_DATA)


@pytest.fixture(scope="module")
def epochs():
    return MinibatchTarget.from_pyro(normal_mean, Y, BATCH_SIZE)


KERNELS = [SGLD(Polynomial(0.005)), PreconditionedSGLD(0.001), SGHMC(0.01, friction=8.0)]


class _Stop(Exception):
    pass


@pytest.mark.calibration
@pytest.mark.parametrize("order", [Epochs(), IndependentRows()], ids=["epochs", "independent"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("stop_at", [9, 33])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch, kernel, order, stop_at):
    target = MinibatchTarget.from_pyro(normal_mean, Y, BATCH_SIZE, row_order=order)
    settings = {"num_chains": 3, "num_warmup": 15, "num_samples": 12, "thinning": 3, "seed": 4, "progress": False}
    whole = sample_stochastic_gradient(target, kernel, **settings)
    path, steps, step = tmp_path / "state", [], type(kernel).step

    def stopping(*arguments, **named):
        steps.append(1)
        if len(steps) > stop_at:
            raise _Stop
        return step(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(_Stop):
        patch.setattr(type(kernel), "step", stopping)
        sample_stochastic_gradient(target, kernel, **settings, checkpoint=path, checkpoint_seconds=0)
    resumed = sample_stochastic_gradient(target, kernel, **settings, checkpoint=path)
    assert torch.equal(resumed.unconstrained, whole.unconstrained)
    assert torch.equal(resumed.log_prior, whole.log_prior)
    assert resumed.sample_stats.keys() == whole.sample_stats.keys()
    assert all(torch.equal(resumed.sample_stats[k], v) for k, v in whole.sample_stats.items())
    with pytest.raises(CheckpointError, match="kernel="):
        sample_stochastic_gradient(target, SGLD(0.5), **settings, checkpoint=path)
    with pytest.raises(CheckpointError, match="num_samples="):
        sample_stochastic_gradient(target, kernel, **(settings | {"num_samples": 11}), checkpoint=path)
    longer = settings | {"num_samples": 14}
    goes_on = sample_stochastic_gradient(target, kernel, **longer, checkpoint=path)
    assert torch.equal(goes_on.unconstrained, sample_stochastic_gradient(target, kernel, **longer).unconstrained)
    other = MinibatchTarget.from_pyro(normal_mean, -Y, BATCH_SIZE, row_order=order)
    with pytest.raises(CheckpointError, match="another model"):
        sample_stochastic_gradient(other, kernel, **settings, checkpoint=path)


def test_draws_are_what_other_parts_expect(target, tmp_path):
    draws = sample_stochastic_gradient(target, SGLD(0.002), 2, 50, 30, 2, seed=1, progress=False)
    assert draws.unconstrained.shape == (2, 30, 1) and draws.num_gradients == 2 * (50 + 60 + 1)
    full = bk.Target.from_pyro(normal_mean, Y, None)
    torch.testing.assert_close(draws.log_prior, full.log_prior(draws.unconstrained))
    assert bool(draws.log_likelihood.isnan().all())
    estimate = draws.sample_stats["log_likelihood_estimate"]
    assert estimate.shape == (2, 30) and not torch.equal(estimate, full.log_likelihood(draws.unconstrained))
    with pytest.raises(ModelError, match="a target of minibatches; make a Target"):
        draws.predictive()
    tree = draws.to_arviz()
    assert tree.posterior["mean"].shape == (2, 30)
    assert set(tree.sample_stats.data_vars) >= {"step_size", "diverging", "temperature", "log_likelihood_estimate"}
    draws.save(tmp_path / "draws")
    loaded = bk.Draws.load(tmp_path / "draws", target)
    assert torch.equal(loaded.values()["mean"], draws.values()["mean"])


def test_with_all_rows_the_estimate_is_the_likelihood(whole):
    draws = sample_stochastic_gradient(whole, SGLD(0.005), 2, 0, 5, progress=False)
    exact = bk.Target.from_pyro(normal_mean, Y, None).log_likelihood(draws.unconstrained)
    torch.testing.assert_close(draws.sample_stats["log_likelihood_estimate"], exact)


def test_same_seed_same_draws(target):
    def run(seed):
        return sample_stochastic_gradient(target, SGLD(0.01), 2, 10, 10, seed=seed, progress=False).unconstrained

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert not torch.equal(run(1)[0], run(1)[1])


def test_float32_stays_float32():
    single = MinibatchTarget.from_pyro(normal_mean, Y.float(), BATCH_SIZE, row_order=IndependentRows())
    for kernel in (*KERNELS, SGHMC(0.01, friction=8.0, gradient_noise=torch.tensor([NOISE], dtype=torch.float64))):
        draws = sample_stochastic_gradient(single, kernel, 2, 5, 5, progress=False)
        assert draws.unconstrained.dtype == draws.log_prior.dtype == torch.float32
        assert all(v.dtype in (torch.float32, torch.bool) for v in draws.sample_stats.values())


# -- what goes wrong ------------------------------------------------------------------------


@pytest.mark.calibration
@pytest.mark.parametrize(
    "kernel",
    [SGLD(torch.tensor([0.001, 8.0, 0.001])), SGHMC(torch.tensor([0.001, 0.9, 0.001]), friction=1.0)],
    ids=["SGLD", "SGHMC"],
)
def test_a_chain_with_too_large_a_step_is_named_and_the_others_go_on(target, kernel):
    with pytest.warns(SamplingWarning, match=r"chains \[1\] diverged"):
        draws = sample_stochastic_gradient(target, kernel, 3, 700, 400, initial=NEAR, progress=False)
    assert bool(draws.unconstrained.isfinite().all())
    assert bool(draws.sample_stats["diverging"][1].any())
    assert not bool(draws.sample_stats["diverging"][[0, 2]].any())
    calm = replace(kernel, step_size=torch.full((3,), 0.001))
    alone = sample_stochastic_gradient(target, calm, 3, 700, 400, initial=NEAR, progress=False)
    assert torch.equal(draws.unconstrained[[0, 2]], alone.unconstrained[[0, 2]])


def test_a_zero_density_is_not_entered():
    """The density ends at zero, where its gradient does not say so."""
    target = MinibatchTarget.from_functions(
        lambda u: torch.where(u[0] > 0, -u[0], -torch.inf), lambda u, rows: 0 * rows, 1, 1, batch_size=1
    )
    for kernel in (SGLD(0.5), PreconditionedSGLD(0.5), SGHMC(0.3)):
        with pytest.warns(SamplingWarning, match="diverged"):
            draws = sample_stochastic_gradient(
                target, kernel, 4, 50, 200, initial=torch.ones(1, dtype=torch.float64), progress=False
            )
        assert bool((draws.unconstrained > 0).all()) and bool(draws.log_prior.isfinite().all())
        assert len(draws.unconstrained[0].unique()) > 50  # it goes on elsewhere


def test_a_hot_chain_is_named(target):
    step = torch.tensor([0.001, 0.09], dtype=torch.float64)
    with pytest.warns(SamplingWarning, match=r"chains \[1\] have a mean temperature up to"):
        sample_stochastic_gradient(target, SGLD(step), 2, 100, 300, progress=False)


@pytest.mark.parametrize("step", [4.2, 6.0])
def test_all_chains_that_run_away_are_named(whole, step):
    """Their temperatures grow without end, so that the error of the mean is as large as the mean."""
    with pytest.warns(SamplingWarning, match=r"chains \[0, 1, 2\] have a mean temperature up to"):
        sample_stochastic_gradient(whole, SGLD(step / (1 + NUM_DATA)), 3, 20, 100, progress=False)


def test_noise_is_not_taken_out_twice(epochs):
    with pytest.warns(SamplingWarning, match="the noise of one epoch cancels in part"):
        sample_stochastic_gradient(epochs, SGHMC(0.01, friction=8.0, gradient_noise=NOISE), 2, 5, 5, progress=False)


def test_bad_starts_are_named(target):
    with pytest.raises(InitializationError, match="hold NaN or infinit"):
        sample_stochastic_gradient(target, SGLD(0.01), 2, initial=torch.tensor([math.inf]), progress=False)
    with pytest.raises(ShapeError, match="initial must have shape"):
        sample_stochastic_gradient(target, SGLD(0.01), 2, initial=torch.zeros(3), progress=False)
    initial = torch.tensor([[0.0], [math.nan], [1.0]])
    with pytest.raises(InitializationError, match=r"chains \[1\] hold NaN"):
        sample_stochastic_gradient(target, SGLD(0.001), 3, 20, 30, initial=initial, progress=False)


def test_a_run_out_of_time_gives_what_it_has(target, monkeypatch):
    with pytest.raises(BudgetError, match="before the first draw"):
        sample_stochastic_gradient(target, SGLD(0.01), 2, time_budget=1e-9, progress=False)
    steps, step = [], SGLD.step

    def interrupting(*arguments, **named):
        steps.append(1)
        if len(steps) == 25:
            signal.raise_signal(signal.SIGINT)
        return step(*arguments, **named)

    monkeypatch.setattr(SGLD, "step", interrupting)
    with pytest.warns(SamplingWarning, match="interrupted after 15 of 100 draws"):
        draws = sample_stochastic_gradient(target, SGLD(0.001), 2, 10, 100, progress=False)
    assert draws.settings["ending"] == "interrupted"
    monkeypatch.undo()
    whole = sample_stochastic_gradient(target, SGLD(0.001), 2, 10, 100, progress=False)
    assert draws.num_draws == 15 and torch.equal(draws.unconstrained, whole.unconstrained[:, :15])


def test_a_target_without_minibatches_is_refused():
    with pytest.raises(SettingsError, match=r"takes a MinibatchTarget, not a Target; make one with"):
        sample_stochastic_gradient(bk.exact.get("linreg10").target(), SGLD(step_size=1e-4))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SGLD(0.0), "step_size must be positive"),
        (lambda: PreconditionedSGLD(-1.0), "step_size must be positive"),
        (lambda: PreconditionedSGLD(0.1, decay=0.0), "decay"),
        (lambda: PreconditionedSGLD(0.1, regularization=0.0), "regularization"),
        (lambda: SGHMC(0.1, friction=0.0), "friction"),
        (lambda: SGHMC(0.1, friction=11.0), "must not exceed 1"),
        (lambda: SGHMC(0.1, friction=1.0, gradient_noise=30.0), "no noise is left"),
        (lambda: SGHMC(0.1, gradient_noise=-1.0), "must not be negative"),
        (lambda: Constant(torch.tensor([0.1, -0.1])), "positive"),
        (lambda: Polynomial(0.0), "a must lie in"),
        (lambda: Polynomial(0.1, gamma=1.5), "gamma"),
        (lambda: SGLD(0.1).stationary_variance(40.0), "below 4"),
        (lambda: SGLD(Polynomial(0.1)).stationary_variance(1.0), "constant step"),
        (lambda: SGHMC(0.1).stationary_covariance(1000.0), "diverges"),
        (lambda: SGHMC(Polynomial(0.1)).stationary_covariance(1.0), "constant step"),
    ],
)
def test_settings_outside_their_domain_are_refused(make, match):
    with pytest.raises(SettingsError, match=match):
        make()


@pytest.mark.parametrize("change", [{"num_chains": 0}, {"num_warmup": -1}, {"num_samples": 0}, {"thinning": 0}])
def test_nothing_to_do_is_refused(target, change):
    with pytest.raises(SettingsError, match=next(iter(change))):
        sample_stochastic_gradient(target, SGLD(0.01), **change, progress=False)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_a_device_draws_from_the_same_posterior(kernel, device, limit):
    """Chains are independent; SGLD's steps become small, so that it takes 2,000 of them to come from its start."""
    on_device = MinibatchTarget.from_pyro(normal_mean, Y.to(device), BATCH_SIZE)
    draws = sample_stochastic_gradient(on_device, kernel, 1000, 2000, 1, progress=False)
    assert draws.unconstrained.device.type == device
    last = draws.unconstrained[:, 0, 0].cpu()
    assert abs(float((last.mean() - MEAN) / (last.std() / math.sqrt(len(last))))) < limit()
