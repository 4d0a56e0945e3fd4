import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gamma, kstest, norm

import bayeskit as bk
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._nested import ConstrainedSlice

CUT = 1.0


def scalar(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def normal_log_density(u):
    return (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1)


def make_kernel(threshold, label=0.0, *, dim=2, cls=ConstrainedSlice, **settings):
    ensemble = torch.randn(50, dim, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    metric = Metric.dense(torch.eye(dim, dtype=torch.float64) + 0.3)
    return cls(scalar(threshold), scalar(label), metric, ensemble, **settings)


@pytest.fixture(scope="module")
def truncated(skewed):
    """The skewed target of the other samplers, its first coordinate above a cut."""
    return bk.Target.from_functions(skewed.log_prior, lambda u: u[..., 0], 2)


def truncated_moments():
    """Mean and variance of the logarithm of a Gamma(3, 1) variable above the cut."""
    low = math.exp(CUT)
    mass = gamma.sf(low, 3)
    mean = quad(lambda g: math.log(g) * gamma.pdf(g, 3), low, 60, epsabs=1e-12)[0] / mass
    variance = quad(lambda g: (math.log(g) - mean) ** 2 * gamma.pdf(g, 3), low, 60, epsabs=1e-12)[0] / mass
    return mean, variance


def moment_scores(target, kernel, n=4000):
    """Start all chains at one point, so that nothing but the kernel spreads them, and standardise their moments."""
    generator = torch.Generator().manual_seed(3)
    state = kernel.init(target, torch.tensor([CUT + 1.5, -1.0], dtype=torch.float64).repeat(n, 1), generator=generator)
    state, _ = kernel.step(target, state, generator=generator)
    x, y = state.position.T
    mean, variance = truncated_moments()
    truths = {
        "mean x": (x, mean),
        "mean y": (y, 0.8 * mean),
        "variance x": ((x - mean).square(), variance),
        "variance y": ((y - 0.8 * mean).square(), 0.64 * variance + 0.25),
        "covariance": ((x - mean) * (y - 0.8 * mean), 0.8 * variance),
    }
    return {name: float((v.mean() - t) / v.std()) * math.sqrt(n) for name, (v, t) in truths.items()}


@pytest.mark.calibration
@pytest.mark.parametrize("pair_share", [0.0, 1.0])
def test_moments_of_a_skewed_correlated_truncated_target(truncated, limit, pair_share):
    scores = moment_scores(truncated, make_kernel(CUT, num_steps=60, pair_share=pair_share))
    assert max(map(abs, scores.values())) < limit(len(scores)), scores


class _NoThreshold(ConstrainedSlice):
    def above(self, log_likelihood, label):
        return torch.ones_like(log_likelihood, dtype=torch.bool)


class _NoPrior(ConstrainedSlice):
    def _inside(self, log_prior, new_prior, level):
        return torch.ones_like(new_prior, dtype=torch.bool)


class _WrongLevel(ConstrainedSlice):
    def _inside(self, log_prior, new_prior, level):
        return new_prior >= log_prior - 2 * level


@pytest.mark.calibration
@pytest.mark.parametrize("mutant", [_NoThreshold, _NoPrior, _WrongLevel])
def test_the_moments_notice_a_broken_kernel(truncated, limit, mutant):
    scores = moment_scores(truncated, make_kernel(CUT, num_steps=60, cls=mutant))
    assert max(map(abs, scores.values())) > limit(len(scores)), scores


@pytest.mark.parametrize("width", [0.5, 10.0, 1000.0])
def test_one_update_leaves_a_truncated_normal_invariant_whatever_the_bracket(width):
    target = bk.Target.from_functions(normal_log_density, lambda u: u[..., 0], 1)
    exact = norm.isf(torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * norm.sf(0.5))
    kernel = make_kernel(0.5, dim=1, num_steps=1, width=width, pair_share=0.5)
    generator = torch.Generator().manual_seed(2)
    state = kernel.init(target, torch.as_tensor(exact).unsqueeze(-1), generator=generator)
    state, info = kernel.step(target, state, generator=generator)
    assert kstest(norm.sf(state.position[:, 0].numpy()) / norm.sf(0.5), "uniform").pvalue > 1e-5
    assert int(info.num_stuck.sum()) == 0


def test_a_plateau_is_cut_by_labels(limit):
    """The likelihood has two levels; above the lower one's label 0.6 lies 0.4 of its mass."""
    target = bk.Target.from_functions(normal_log_density, lambda u: (u[..., 0] > 0).to(u.dtype), 2)
    kernel = make_kernel(0.0, 0.6, num_steps=40)
    generator = torch.Generator().manual_seed(4)
    state = kernel.init(target, torch.ones(5000, 2, dtype=torch.float64), generator=generator)
    state, _ = kernel.step(target, state, generator=generator)
    upper = state.log_likelihood == 1
    share = 1 / 1.4
    error = math.sqrt(share * (1 - share) / 5000)
    assert abs(float(upper.to(torch.float64).mean()) - share) / error < limit()
    assert kstest(state.label[upper].numpy(), "uniform").pvalue > 1e-5
    assert kstest((state.label[~upper].numpy() - 0.6) / 0.4, "uniform").pvalue > 1e-5


def test_a_likelihood_that_is_not_a_number_is_never_accepted_but_counted():
    target = bk.Target.from_functions(
        normal_log_density, lambda u: torch.where(u[..., 1] > 0.5, torch.nan, u[..., 0]), 2
    )
    kernel = make_kernel(-1.0)
    generator = torch.Generator().manual_seed(5)
    state = kernel.init(target, torch.zeros(100, 2, dtype=torch.float64), generator=generator)
    state, info = kernel.step(target, state, generator=generator)
    assert bool((state.position[:, 1] <= 0.5).all()) and int(info.num_nan.sum()) > 0
    assert kernel.init(target, torch.ones(3, 2, dtype=torch.float64), generator=generator).log_likelihood.tolist() == (
        [-math.inf] * 3
    )


def test_a_chain_below_the_threshold_gives_up_where_it_is():
    target = bk.Target.from_functions(normal_log_density, lambda u: 0 * u[..., 0], 2)
    kernel = make_kernel(1.0, num_steps=2)
    generator = torch.Generator().manual_seed(6)
    start = kernel.init(target, torch.ones(4, 2, dtype=torch.float64), generator=generator)
    state, info = kernel.step(target, start, generator=generator)
    assert torch.equal(state.position, start.position)
    assert info.num_stuck.tolist() == [2] * 4


@pytest.mark.calibration
def test_evaluations_are_counted_and_the_seed_decides(truncated):
    kernel = make_kernel(CUT)

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        state = kernel.init(truncated, torch.full((16, 2), 2.0, dtype=torch.float64), generator=generator)
        return kernel.step(truncated, state, generator=generator)

    (first, info), (second, _), (other, _) = run(1), run(1), run(2)
    assert torch.equal(first.position, second.position)
    assert not torch.equal(first.position, other.position)
    # Every update needs at least one evaluation; the batch goes on until the slowest chain is done.
    assert int(info.num_evaluations.min()) >= kernel.num_steps
    assert int(info.num_evaluations.max()) <= int(info.num_batches)
    log_prior, log_likelihood = truncated.evaluate(first.position)
    torch.testing.assert_close(first.log_prior, log_prior)
    torch.testing.assert_close(first.log_likelihood, log_likelihood)


@pytest.mark.parametrize(
    "setting",
    [{"num_steps": 0}, {"width": 0.0}, {"pair_width": -1.0}, {"pair_share": 1.5}],
    ids=lambda s: next(iter(s)),
)
def test_settings_outside_their_domain_are_refused(setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        make_kernel(0.0, **setting)


def test_an_ensemble_of_one_is_refused():
    with pytest.raises(ShapeError, match="two points"):
        ConstrainedSlice(scalar(0.0), scalar(0.0), Metric.diagonal(torch.ones(2)), torch.zeros(1, 2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_runs_on_a_device():
    device = torch.device("cuda")
    target = bk.Target.from_functions(normal_log_density, lambda u: u[..., 0], 2, device=device)
    ensemble = torch.randn(50, 2, dtype=torch.float64, device=device)
    level = torch.zeros((), dtype=torch.float64, device=device)
    kernel = ConstrainedSlice(level, level, Metric.dense(ensemble.T.cov()), ensemble)
    generator = torch.Generator(device).manual_seed(0)
    state = kernel.init(target, torch.ones(64, 2, dtype=torch.float64, device=device), generator=generator)
    state, _ = kernel.step(target, state, generator=generator)
    assert state.position.device.type == "cuda" and bool((state.position[:, 0] > 0).all())
