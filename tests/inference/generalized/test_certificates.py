"""PAC-Bayes certificates: the numbers of a coin, how often they fail, and what is refused."""

import math
import os
from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import binom, norm

import bayeskit as bk
from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference.generalized import (
    GibbsPosterior,
    certify,
    divergence_from_prior,
    gaussian_posterior,
    invert_binary_divergence,
    losses,
    pac_bayes_certificate,
)

SHIFT = int(os.environ.get("BAYESKIT_SEED_SHIFT", "0"))
NORMAL = dist.Normal(*torch.tensor([0.1, 0.2], dtype=torch.float64))
STANDARD = dist.Normal(*torch.tensor([0.0, 1.0], dtype=torch.float64))


def divergence_of_beta(a, b):
    one = torch.ones((), dtype=torch.float64)
    return float(torch.distributions.kl_divergence(dist.Beta(a * one, b * one), dist.Beta(one, one)))


def coin(heads, tosses, level=0.95):
    """Certificate of predicting a toss by a toss of a coin drawn from the posterior."""
    chance = (1 + heads) / (2 + tosses)
    risk = heads / tosses * (1 - chance) + (1 - heads / tosses) * chance
    return pac_bayes_certificate(risk, divergence_of_beta(1.0 + heads, 1.0 + tosses - heads), tosses, level=level)


def test_the_coin():
    found = coin(20, 100)
    assert abs(found.divergence - 1.811040) < 5e-7 and abs(found.risk - 0.323529) < 5e-7
    assert abs(found.bound - 0.519304) < 5e-7
    assert found.trusted and not found.is_vacuous and "0.5193" in found.promise


@pytest.mark.parametrize("risk", [0.0, 1e-9, 0.02, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("budget", [0.0, 1e-6, 0.01, 0.5, 5.0])
def test_the_inverse_solves_its_equation(risk, budget):
    p = invert_binary_divergence(risk, budget)
    assert risk <= p <= 1
    if risk == 0:
        assert p == pytest.approx(-math.expm1(-budget), abs=1e-12)
    elif risk < 1 and p < 1 - 1e-9:
        divergence = risk * math.log(risk / p) + (1 - risk) * math.log((1 - risk) / (1 - p))
        assert divergence == pytest.approx(budget, abs=1e-9)
    else:
        assert p > 1 - 1e-3 or risk == 1


def test_a_certificate_fails_at_most_as_often_as_it_says():
    """Exactly, over all numbers of heads; the mean loss itself lies below the truth half of the time."""
    tosses, chance, heads = 40, 0.3, np.arange(41)
    predicted = (1 + heads) / (2 + tosses)
    truth = chance * (1 - predicted) + (1 - chance) * predicted
    chances = binom.pmf(heads, tosses, chance)
    found = [coin(float(k), tosses, level=0.8) for k in heads]
    assert chances[np.array([c.bound for c in found]) < truth].sum() <= 0.2
    assert chances[np.array([c.risk for c in found]) < truth].sum() > 0.4


def test_the_error_of_draws_is_covered():
    """The share of the failure that draws may cause, exactly; half the budget is not enough."""
    draws, truth, failure = 60, 0.3, 0.05
    counts = np.arange(draws + 1)
    chances = binom.pmf(counts, draws, truth)

    def failing(share):
        limits = [invert_binary_divergence(k / draws, -share * math.log(failure) / draws) for k in counts]
        return chances[np.array(limits) < truth].sum()

    assert failing(1.0) <= failure < failing(0.5)
    few, many = (pac_bayes_certificate(torch.full((s, 100), 0.25), 2.0).bound for s in (50, 50_000))
    exact = pac_bayes_certificate(0.25, 2.0, 100).bound
    assert exact < many < exact + 0.01 < few


def test_another_range_is_a_change_of_units():
    unit, other = (pac_bayes_certificate(x, 3.0, 200, between=r).bound for x, r in ((0.2, (0, 1)), (-0.6, (-1, 1))))
    assert other == pytest.approx(2 * unit - 1, abs=1e-12)
    assert pac_bayes_certificate(0.4, 1e6, 10).is_vacuous


def thresholds(threshold, data):
    x, labels = data
    return ((x > threshold) != labels).double()


def test_a_distribution_is_certified_by_draws(limit):
    x = torch.linspace(-2, 2, 400, dtype=torch.float64)
    data = (x, x > 0.1)
    found = certify(NORMAL, STANDARD, thresholds, data, num_draws=2000, seed=SHIFT)
    wrong = norm.cdf(-np.abs(x.numpy() - 0.1) / 0.2)  # a datum is wrong if the threshold lies beyond it
    each = torch.stack([thresholds(NORMAL.sample(), data).mean() for _ in range(400)])
    assert abs(found.risk - wrong.mean()) < limit() * float(each.std()) / math.sqrt(2000)
    assert found.divergence == pytest.approx(math.log(5) + (0.04 + 0.01) / 2 - 0.5, abs=1e-12)
    exact = pac_bayes_certificate(float(wrong.mean()), found.divergence, 400)
    assert exact.bound < found.bound < exact.bound + 0.03
    again = certify(NORMAL, STANDARD, thresholds, data, num_draws=2000, seed=SHIFT)
    assert again.bound == found.bound


@pytest.mark.calibration
def test_a_sampled_posterior_gets_its_divergence_from_its_evidence(limit):
    generator = torch.Generator().manual_seed(3)
    x = 1 + torch.randn(50, generator=generator, dtype=torch.float64)
    posterior = GibbsPosterior(dist.Normal(0.0, 2.0), losses.HalfSquared(), x, weight=0.6)
    normal = gaussian_posterior(posterior).distribution
    prior = dist.MultivariateNormal(torch.zeros(1).double(), 4 * torch.eye(1).double())
    exact = float(torch.distributions.kl_divergence(normal, prior))
    draws = bk.sample(posterior, 4, 200, 500, seed=SHIFT, progress=False)
    found, error = divergence_from_prior(draws, bk.evidence.bridge_sampling(posterior, draws, seed=SHIFT))
    assert 0 < error < 0.1 and abs(found - exact) < limit() * error
    with pytest.raises(SettingsError, match="tempered"):
        divergence_from_prior(replace(draws, beta=0.5 * draws.beta), bk.evidence.bridge_sampling(posterior, draws))


def test_losses_without_bounds_are_refused():
    x = torch.linspace(-2, 2, 50, dtype=torch.float64)
    with pytest.raises(SettingsError, match="HalfSquared is not bounded, so no certificate"):
        certify(NORMAL, STANDARD, losses.HalfSquared(), x)
    with pytest.raises(SettingsError, match="FunctionLoss is not bounded"):
        certify(NORMAL, STANDARD, losses.FunctionLoss(lambda m, x: (x - m).square()), x)
    with pytest.raises(DataError, match=r"datum \d+\) lies outside of between=\(0, 1\)"):
        certify(NORMAL, STANDARD, lambda m, x: (x - m).square(), x)
    with pytest.raises(SettingsError, match="loss without bounds has no certificate"):
        pac_bayes_certificate(0.2, 1.0, 10, between=(0.0, math.inf))
    bounded = certify(NORMAL, STANDARD, lambda m, x: (x - m).square().clamp(max=25.0), x, between=(0.0, 25.0))
    assert bounded.between == (0.0, 25.0) and bounded.risk < bounded.bound < 25


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"losses": torch.zeros(4)}, ShapeError, "draws, data"),
        ({"losses": torch.full((2, 3), torch.nan)}, DataError, "nan"),
        ({"losses": 1.5, "num_data": 5}, DataError, "outside of between"),
        ({"losses": 0.2}, SettingsError, "num_data is missing"),
        ({"losses": torch.zeros(2, 3), "num_data": 5}, SettingsError, "3 columns"),
        ({"divergence": -1.0}, SettingsError, "not negative"),
        ({"divergence": math.inf}, SettingsError, "finite"),
        ({"level": 1.0}, SettingsError, "level"),
    ],
)
def test_bad_certificates_are_refused(change, error, match):
    with pytest.raises(error, match=match):
        pac_bayes_certificate(**({"losses": torch.zeros(2, 3), "divergence": 1.0} | change))


def test_bad_distributions_and_losses_are_refused():
    x, prior = torch.zeros(5), dist.Normal(0.0, 1.0)
    with pytest.raises(ModelError, match="no divergence of StudentT from Normal"):
        certify(dist.StudentT(3.0), prior, thresholds, x)
    with pytest.raises(ShapeError, match=r"returns \(\) for 5 data"):
        certify(prior, prior, lambda m, x: (x - m).sigmoid().mean(), x)


@pytest.mark.parametrize(
    ("posterior", "prior", "text"),
    [
        (dist.Delta(torch.zeros(2)), dist.Normal(torch.zeros(2), 1.0), "a point .Delta.*give it a spread"),
        (dist.Delta(torch.zeros(2), event_dim=1), dist.Normal(torch.zeros(2), 1.0).to_event(1), "a point .Delta"),
        (dist.Normal(0.0, 1.0).mask(False), dist.Normal(0.0, 1.0).mask(False), "MaskedDistribution"),
        (
            dist.Normal(0.0, 1.0),
            dist.ImproperUniform(torch.distributions.constraints.real, (), ()),
            "the prior has a part ImproperUniform",
        ),
    ],
)
def test_densities_in_place_of_divergences_are_refused(posterior, prior, text):
    with pytest.raises(SettingsError, match=text):
        certify(posterior, prior, lambda w, x: (x > 0).double(), torch.randn(5), num_draws=2)


def test_a_bound_at_the_end_of_a_negative_range_says_nothing():
    assert pac_bayes_certificate(-1.5, 1e5, 100, between=(-2.0, -1.0)).is_vacuous
    assert not pac_bayes_certificate(-1.9, 0.1, 1000, between=(-2.0, -1.0)).is_vacuous


@pytest.mark.calibration
def test_divergences_without_a_normalised_prior_or_of_another_target_are_refused():
    y = torch.linspace(-1, 2, 50, dtype=torch.float64)

    def log_likelihood(u):
        return -0.5 * (y - u).square().sum(-1)

    def normal(u):
        return torch.distributions.Normal(torch.zeros((), dtype=u.dtype), 1.0).log_prob(u).sum(-1)

    target = bk.Target.from_functions(normal, log_likelihood, 1)
    draws = bk.sample(target, num_samples=300, seed=0, progress=False)
    z = bk.evidence.bridge_sampling(target, draws)
    value, error = divergence_from_prior(draws, z)
    exactly = 0.5 * (1 / 51 + (25 / 51) ** 2 - 1 + math.log(51))
    assert abs(value - exactly) < 5 * error
    with pytest.raises(DataError, match="different targets"):
        divergence_from_prior(draws, replace(z, log_evidence=0.0))
    with pytest.raises(DataError, match="different targets"):
        divergence_from_prior(draws, replace(z, log_evidence=math.nan))
    with pytest.warns(AccuracyWarning, match="not trusted.*bad"):
        divergence_from_prior(draws, replace(z, warnings=("bad",)))
    without = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), log_likelihood, 1)
    with pytest.raises(SettingsError, match="normalised prior"):
        divergence_from_prior(replace(draws, target=without), z)
    whole = bk.Target.from_log_density(lambda u: normal(u) + log_likelihood(u), 1, inputs="torch")
    with pytest.raises(SettingsError, match="without a prior of its own"):
        divergence_from_prior(replace(draws, target=whole), z)
