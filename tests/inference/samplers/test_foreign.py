import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import digamma, polygamma

import bayeskit as bk
from bayeskit._statistics import effective_sample_size
from bayeskit.errors import SettingsError, SlowModelWarning
from bayeskit.inference.samplers import foreign
from bayeskit.inference.samplers.foreign import sample_with_pyro


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


def test_moments_of_a_skewed_correlated_target(skewed, limit):
    draws = sample_with_pyro(skewed, 2, 100, 300, seed=1, progress=False)
    assert max(scores(draws)) < limit(4)
    stats = draws.sample_stats
    assert all(value.shape == (2, 300) for value in stats.values())
    assert bool((stats["n_steps"] <= 2 ** stats["tree_depth"] - 1).all()) and int(stats["n_steps"].min()) >= 1
    assert 0.5 < float(stats["acceptance_rate"].mean()) < 1
    assert draws.num_gradients > int(stats["n_steps"].sum())
    assert torch.equal(draws.log_density, skewed.log_density(draws.unconstrained))
    assert set(draws.to_datasets()["sample_stats"]) >= {"diverging", "tree_depth", "n_steps", "lp"}


def test_the_moments_notice_a_gradient_that_fits_another_potential(skewed, limit, monkeypatch):
    evaluate = foreign._Potential.evaluate

    def tilted(self, u):
        evaluation = evaluate(self, u)
        return evaluation._replace(log_density=evaluation.log_density + u[0])

    monkeypatch.setattr(foreign._Potential, "evaluate", tilted)
    draws = sample_with_pyro(skewed, 2, 50, 300, seed=1, max_depth=4, progress=False)
    assert max(scores(draws)) > limit(4)


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
    "setting", [{"num_chains": 0}, {"num_samples": 0}, {"num_warmup": -1}, {"target_acceptance": 1.0}, {"max_depth": 0}]
)
def test_settings_outside_their_domain_are_refused(normal_normal, setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        sample_with_pyro(normal_normal, **setting)
