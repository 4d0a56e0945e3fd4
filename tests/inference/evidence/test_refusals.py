"""Draws, models and numbers that must not pass for an answer."""

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import CheckpointError, DrawsError, ModelError, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import Budget
from bayeskit.inference.samplers import HMC, sample_ladder

Y = torch.tensor([1.0, 2.0, 1.5, 3.0], dtype=torch.float64)


def conjugate(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def exact(y):
    covariance = torch.eye(len(y), dtype=torch.float64) + 1
    return float(
        torch.distributions.MultivariateNormal(torch.zeros_like(covariance[0]), covariance).log_prob(y.double())
    )


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_pyro(conjugate, Y)


def test_tempered_draws_are_no_posterior(target):
    with pytest.raises(SettingsError, match="beta=1"):
        bk.sample(target, kernel=HMC(beta=0.2))
    ladder = sample_ladder(target, 4, 4, 50, 40, progress=False)
    for estimate in (evidence.bridge_sampling, evidence.harmonic_mean):
        with pytest.raises(DrawsError, match="tempered"):
            estimate(target, ladder.draws)


def test_a_scaled_prior_is_refused():
    def model(y):
        with pyro.poutine.scale(scale=3.0):
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)

    with pytest.raises(ModelError, match="'mean' is scaled"):
        bk.Target.from_pyro(model, Y)


def test_an_improper_prior_has_no_evidence():
    def model(y):
        mean = pyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)

    target = bk.Target.from_pyro(model, Y)
    with pytest.raises(SettingsError, match="prior of the site 'mean' is improper"):
        evidence.laplace(target)


@pytest.mark.calibration
@pytest.mark.parametrize("seed", range(6))
def test_data_whose_support_depends_on_a_latent_site(seed, limit):
    """The evidence is the integral of theta^-2 from the largest datum to 10, over 10."""

    def model(y):
        theta = pyro.sample("theta", dist.Uniform(0.0, 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, theta), obs=y)

    target = bk.Target.from_pyro(model, torch.tensor([5.0, 5.5], dtype=torch.float64), seed=seed)
    z = evidence.naive_monte_carlo(target, seed=seed)
    assert abs(z.log_evidence - math.log((1 / 5.5 - 1 / 10) / 10)) < limit() * z.standard_error


@pytest.mark.calibration
def test_modes_that_a_ladder_cannot_weigh_are_not_trusted():
    """Two bumps in twenty dimensions that differ in height, between which no chain moves."""
    centre = torch.zeros(20, dtype=torch.float64)
    centre[0] = 2.0

    def log_prior(u):
        return (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1)

    def log_likelihood(u):
        left = (-0.5 * ((u + centre) / 0.4).square()).sum(-1)
        right = 1 + (-0.5 * ((u - centre) / 0.4).square()).sum(-1)
        return torch.logaddexp(left, right)

    target = bk.Target.from_functions(
        log_prior, log_likelihood, 20, lambda n, g: torch.randn(n, 20, generator=g, dtype=torch.float64)
    )
    ladder = sample_ladder(target, 20, 8, 100, 200, progress=False)
    for estimate in (evidence.path_sampling, evidence.modified_path_sampling, evidence.stepping_stone):
        z = estimate(target, ladder)
        assert not z.trusted and "disagree" in z.warnings[0]


@pytest.mark.calibration
def test_too_short_chains_cost_no_other_result(target, limit):
    """Halves of ten draws a chain are too short to be bridged, and the ladder is as good as ever."""
    budget = Budget(4, 100, 10, num_temperatures=10, ladder_chains=4, ladder_warmup=100, ladder_samples=1000)
    methods = ["bridge_sampling", "warp_bridge_sampling", "stepping_stone"]
    table = evidence.compare(target, methods, budget=budget, progress=False)
    for method in methods[:2]:
        assert "too few" in table[method].warnings[0] and not table[method].trusted
    z = table["stepping_stone"]
    assert z.trusted and abs(z.log_evidence - exact(Y)) < limit() * z.standard_error


@pytest.mark.parametrize(
    "call",
    [
        lambda t, d: evidence.naive_monte_carlo(t, 0),
        lambda t, d: evidence.laplace_importance_sampling(t, 0),
        lambda t, d: evidence.bridge_sampling(t, d, num_proposals=0),
    ],
)
def test_no_draws_at_all(call, target):
    draws = bk.sample(target, num_warmup=30, num_samples=20, progress=False)
    with pytest.raises(SettingsError, match="at least"):
        call(target, draws)


@pytest.mark.calibration
def test_a_lost_chain_does_not_spoil_the_estimate(target, limit):
    draws = bk.sample(target, num_warmup=200, num_samples=500, seed=3, progress=False)
    lost = replace(draws, log_likelihood=draws.log_likelihood.clone())
    lost.log_likelihood[1] = torch.nan
    z = evidence.bridge_sampling(target, lost)
    assert z.trusted and abs(z.log_evidence - exact(Y)) < limit() * z.standard_error
    lost.log_likelihood[:] = torch.nan
    with pytest.raises(DrawsError, match="no chain"):
        evidence.bridge_sampling(target, lost)


def test_a_likelihood_that_is_not_a_number_is_said():
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: torch.where(u[..., 0] < 1, 0.1 * u[..., 0], torch.nan),
        2,
        lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64),
    )
    for z in (evidence.naive_monte_carlo(target), evidence.laplace_importance_sampling(target)):
        assert math.isfinite(z.log_evidence) and not z.trusted and "NaN" in z.warnings[0]


def test_single_precision_converges_and_owns_up_to_its_rounding(limit):
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) + 0.3
    target = bk.Target.from_pyro(conjugate, y)
    draws = bk.sample(target, num_warmup=200, num_samples=500, progress=False)
    z = evidence.bridge_sampling(target, draws)
    n, total, squares = len(y), float(y.double().sum()), float(y.double().square().sum())
    answer = -0.5 * n * math.log(2 * math.pi) - 0.5 * math.log(n + 1) - 0.5 * (squares - total**2 / (n + 1))
    assert z.trusted, str(z)
    assert z.standard_error >= abs(answer) * torch.finfo(torch.float32).eps
    assert abs(z.log_evidence - answer) < limit() * z.standard_error


def test_a_checkpoint_of_other_data_is_refused_where_the_density_is_zero(tmp_path):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        inside = (y - mean).abs().max() < 1
        pyro.factor("inside", torch.where(inside, 0.0, -torch.inf))

    def run(y, start):
        target = bk.Target.from_pyro(model, torch.tensor(y, dtype=torch.float64))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bk.errors.SamplingWarning)
            initial = torch.tensor([start], dtype=torch.float64)
            path = tmp_path / "state"
            return bk.sample(target, num_warmup=30, num_samples=20, initial=initial, checkpoint=path, progress=False)

    run([5.0, 5.5], 5.2)
    with pytest.raises(CheckpointError, match="another model or of other data"):
        run([-7.0, -7.5], -7.2)


def test_a_checkpoint_of_another_start_is_refused(target, tmp_path):
    settings = {"num_warmup": 30, "num_samples": 20, "checkpoint": tmp_path / "state", "progress": False}
    bk.sample(target, **settings)
    with pytest.raises(CheckpointError, match="initial"):
        bk.sample(target, initial=torch.ones(1, dtype=torch.float64), **settings)
    with pytest.raises(CheckpointError, match="num_steps_jitter"):
        bk.sample(target, kernel=HMC(num_steps_jitter=0.5), **settings)
