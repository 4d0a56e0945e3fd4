"""Chains that move in partly centred coordinates: what is chosen, exact answers, and runs that resume."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import logsumexp

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.statistics import effective_sample_size
from bayeskit._logdensity.centring import Locations
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers import NUTS, Adaptation, Convergence
from bayeskit.inference.samplers._centring import Centring, best_centredness, divergence


def hierarchy(y, noise):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, noise), obs=y)


def _data(noise, count=20, seed=1):
    generator = torch.Generator().manual_seed(seed)
    errors = torch.full((count,), noise, dtype=torch.float64)
    effects = 1 + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    return effects + errors * torch.randn(count, generator=generator, dtype=torch.float64), errors


def _truth(y, noise):
    """Return mean and standard deviation of log tau and of mu, by quadrature over log tau."""
    t = np.linspace(-30, 8, 4001)
    variance = noise[0] ** 2 + np.exp(2 * t)
    precision = len(y) / variance + 1 / 25
    mean = y.sum() / variance / precision
    log_density = -0.5 * (len(y) * np.log(variance) + np.log(precision) + (y**2).sum() / variance - precision * mean**2)
    log_density += t - np.log1p(np.exp(2 * t) / 25)
    weight = np.exp(log_density - logsumexp(log_density))
    middle, overall = weight @ t, weight @ mean
    return {
        "log tau": (middle, math.sqrt(weight @ (t - middle) ** 2)),
        "mu": (overall, math.sqrt(weight @ (1 / precision + (mean - overall) ** 2))),
    }


def _centredness(target, seed=0, **settings):
    """Return the draws of a run and the last centredness of its chains."""
    seen = []
    original = Centring.original

    def watched(self, state, position, log_prior):
        seen.append(state.centredness)
        return original(self, state, position, log_prior)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Centring, "original", watched)
        draws = bk.sample(target, seed=seed, progress=False, **settings)
    return draws, seen[-1]


# -- what is chosen ------------------------------------------------------------------------------


@pytest.mark.calibration
def test_the_best_centredness_of_a_normal_hierarchy_is_that_of_the_algebra():
    # With scales tau (known) and sigma, x = mu + noise given the data has the slope sigma^2 / (sigma^2 + tau^2) on mu;
    # the diagonal normal distribution fits best where the coordinate x - (1 - c) mu is independent of mu.
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(200_000, 1, generator=generator, dtype=torch.float64)
    share = torch.tensor([0.05, 0.2, 0.5, 0.8, 0.95], dtype=torch.float64)  # sigma^2 / (sigma^2 + tau^2)
    x = share * mu + 0.3 * torch.randn(200_000, 5, generator=generator, dtype=torch.float64)
    at = Locations(mu.expand_as(x), 1e-3 * torch.randn(200_000, 1, generator=generator, dtype=x.dtype).expand_as(x))
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)
    cost = torch.stack([divergence(x, at, c, linear=False) for c in grid])
    torch.testing.assert_close(grid[cost.argmin(0)], 1 - share, rtol=0, atol=0.011)


def test_the_divergence_is_the_change_of_the_kullback_leibler_divergence():
    # A non-centred normal coordinate is exactly normal: there, and only there, the divergence is that of the entropy.
    generator = torch.Generator().manual_seed(0)
    log_scale, noise = torch.randn(2, 400_000, 1, generator=generator, dtype=torch.float64)
    x, at = log_scale.exp() * noise, Locations(torch.zeros_like(noise), log_scale)
    none, whole = (divergence(x, at, torch.tensor(c, dtype=x.dtype)) for c in (0.0, 1.0))
    assert abs(float(none)) < 0.01
    assert abs(float(whole) - 1.0) < 0.1  # half the logarithm of E exp(2 log_scale) = exp(2)


def test_elements_of_a_site_share_what_the_draws_say():
    generator = torch.Generator().manual_seed(0)
    log_scale = 0.4 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    x = log_scale.exp() * torch.randn(60, 40, generator=generator, dtype=torch.float64)
    at = Locations(torch.zeros_like(x), log_scale.expand_as(x))
    alone = torch.cat([best_centredness(x[:, [j]], Locations(*(a[:, [j]] for a in at))) for j in range(40)])
    together = best_centredness(x, at)
    assert together.mean() < alone.mean()
    assert together.std() < alone.std()


def test_in_a_long_neck_the_least_centredness_of_those_that_are_nearly_as_good_is_taken():
    generator = torch.Generator().manual_seed(0)
    log_scale, noise = torch.randn(2, 4000, 1, generator=generator, dtype=torch.float64)
    chosen = []
    for width in (1.0, 0.4):
        at = Locations(torch.zeros_like(noise), width * log_scale)
        x = (0.8 * at.log_scale).exp() * noise  # the data act a little
        chosen.append(float(best_centredness(x, at)))
    assert chosen[0] == 0.0
    assert abs(chosen[1] - 0.2) < 0.11


def test_a_scale_that_is_constant_and_a_linear_location_change_nothing():
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(500, 1, generator=generator, dtype=torch.float64)
    x = mu + torch.randn(500, 3, generator=generator, dtype=torch.float64)
    at = Locations(mu.expand_as(x), torch.zeros_like(x))
    assert torch.equal(best_centredness(x, at), torch.ones(3, dtype=torch.float64))
    assert (best_centredness(x, at, linear=False) < 0.2).all()  # where the metric is diagonal


@pytest.mark.long
@pytest.mark.parametrize(("noise", "low", "high"), [(1.5, 0.0, 0.4), (0.05, 0.8, 1.0)])
def test_weak_data_are_not_centred_and_strong_data_are(noise, low, high):
    target = bk.Target.from_pyro(hierarchy, *_data(noise))
    _, centredness = _centredness(target, num_samples=50)
    assert torch.equal(centredness[:2], torch.ones(2, dtype=torch.float64))
    assert low <= float(centredness[2:].mean()) <= high


# -- exact answers -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the effective sample size:bayeskit.errors.SamplingWarning")
def test_a_centred_hierarchy_has_the_moments_of_the_quadrature(limit):
    y, noise = _data(1.5)
    truth, target = _truth(y.numpy(), noise.numpy()), bk.Target.from_pyro(hierarchy, y, noise)
    log_tau, mu = [], []
    for seed in range(5):
        draws = bk.sample(target, seed=seed, progress=False)
        assert not draws.sample_stats["diverging"].any()
        log_tau.append(draws["tau"].log())
        mu.append(draws["mu"])
    scores = []
    # All runs together: one has ten to twenty visits to the neck, too few for the error of a second moment.
    for name, x in (("log tau", torch.cat(log_tau)), ("mu", torch.cat(mu))):
        mean, deviation = truth[name]
        for value, expected in ((x, mean), ((x - mean).square(), deviation**2)):
            error = float(value.std() / effective_sample_size(value).sqrt())
            scores.append((float(value.mean()) - expected) / error)
    assert max(map(abs, scores)) < limit(len(scores), dof=100)  # errors from some hundred visits


@pytest.mark.calibration
def test_draws_are_those_of_the_model_as_it_is_written():
    target = bk.Target.from_pyro(hierarchy, *_data(1.0))
    draws, centredness = _centredness(target, num_warmup=100, num_samples=50)
    assert (centredness != 1).any()
    u = draws.unconstrained
    assert draws.target is target
    torch.testing.assert_close(draws.log_prior, target.log_prior(u))
    torch.testing.assert_close(draws.log_likelihood, target.log_likelihood(u))
    torch.testing.assert_close(draws["theta"], target.constrain(u)["theta"])


@pytest.mark.calibration
@pytest.mark.parametrize("case", ["linreg10", "eight_schools"])
def test_models_without_such_sites_are_sampled_as_they_are(case):
    target = exact.get(case).target()
    one = bk.sample(target, num_warmup=60, num_samples=30, progress=False)
    two = bk.sample(target, num_warmup=60, num_samples=30, reparameterize=False, progress=False)
    assert torch.equal(one.unconstrained, two.unconstrained)


@pytest.mark.calibration
def test_it_can_be_switched_off():
    target = bk.Target.from_pyro(hierarchy, *_data(0.5))
    one = bk.sample(target, num_warmup=60, num_samples=30, progress=False)
    two = bk.sample(target, num_warmup=60, num_samples=30, reparameterize=False, progress=False)
    assert not torch.equal(one.unconstrained, two.unconstrained)
    with pytest.raises(SettingsError, match="reparameterize"):
        bk.sample(target, reparameterize="always")


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"kernel": NUTS()}, {"metric": "diagonal"}, {"metric": "low_rank"}])
def test_other_kernels_and_metrics(settings):
    y, noise = _data(1.0)
    truth, target = _truth(y.numpy(), noise.numpy()), bk.Target.from_pyro(hierarchy, y, noise)
    draws = bk.sample(target, num_samples=500, progress=False, **settings)
    error = float(draws["mu"].std() / effective_sample_size(draws["mu"]).sqrt())
    assert abs(float(draws["mu"].mean()) - truth["mu"][0]) < 5 * error


# -- runs ----------------------------------------------------------------------------------------

_SHORT = {"num_chains": 4, "num_warmup": 100, "num_samples": 40, "seed": 3, "progress": False}


class _EndedError(Exception):
    pass


@pytest.mark.long
@pytest.mark.parametrize("iteration", [1, 40, 99, 120])
def test_a_run_resumes_bit_for_bit(iteration, tmp_path, monkeypatch):
    y, noise = _data(0.7)
    whole = bk.sample(bk.Target.from_pyro(hierarchy, y, noise), **_SHORT)
    settings = _SHORT | {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    advance = Centring.advance

    def ended(self, state, at, generator):
        if at == iteration:
            raise _EndedError
        return advance(self, state, at, generator)

    with monkeypatch.context() as patch:
        patch.setattr(Centring, "advance", ended)
        with pytest.raises(_EndedError):
            bk.sample(bk.Target.from_pyro(hierarchy, y, noise), **settings)
    resumed = bk.sample(bk.Target.from_pyro(hierarchy, y, noise), **settings)
    assert torch.equal(resumed.unconstrained, whole.unconstrained)
    assert torch.equal(resumed.log_prior, whole.log_prior)
    assert resumed.num_gradients == whole.num_gradients


@pytest.mark.calibration
def test_groups_have_coordinates_of_their_own():
    target = bk.Target.from_pyro(hierarchy, *_data(0.7))
    one = bk.sample(target, **_SHORT, num_groups=2)
    two = bk.sample(target, **_SHORT, num_groups=2, num_jobs=2)
    assert torch.equal(one.unconstrained, two.unconstrained)
    torch.testing.assert_close(one.log_prior, target.log_prior(one.unconstrained))


@pytest.mark.calibration
def test_a_stopping_rule_sees_the_coordinates_of_the_model():
    target = bk.Target.from_pyro(hierarchy, *_data(0.7))
    rule = Convergence(effective_draws=100, r_hat=1.1)
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        reached = Convergence.reached

        def watched(self, position, log_density):
            seen.append((position, log_density))
            return reached(self, position, log_density)

        patch.setattr(Convergence, "reached", watched)
        draws = bk.sample(target, num_samples=2000, stop=rule, progress=False)
    assert draws.settings["ending"] == "converged"
    position, log_density = seen[-1]
    torch.testing.assert_close(log_density, target.log_density(position))


@pytest.mark.calibration
def test_a_warm_up_that_begins_again_begins_in_the_coordinates_of_the_model(monkeypatch):
    target, told = bk.Target.from_pyro(hierarchy, *_data(0.7)), []

    def once(self, state):
        told.append(int(state.iteration))
        still = torch.zeros_like(state.kernel.position, dtype=torch.bool)
        still[0, 0] = told.count(100) == 1 and told[-1] == 100
        return still

    monkeypatch.setattr(Adaptation, "stands_still", once)
    draws = bk.sample(target, **_SHORT)
    assert draws.settings["num_restarts"] == 1
    assert draws.num_draws == 40
    torch.testing.assert_close(draws.log_prior, target.log_prior(draws.unconstrained))


@pytest.mark.calibration
def test_gradients_are_counted():
    target = bk.Target.from_pyro(hierarchy, *_data(0.7))
    draws = bk.sample(target, **_SHORT)
    assert draws.num_gradients > int(draws.sample_stats["n_steps"].amax(0).sum()) * 4
