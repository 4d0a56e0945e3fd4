"""Mutual information, aggregate divergence and active units, against quadrature and closed forms."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.transforms import AffineTransform

from bayeskit._core.randomness import new_generator
from bayeskit.errors import DataError, GuideError, ModelError, SettingsError
from bayeskit.inference.held_out import _information as module
from bayeskit.inference.held_out import active_units, aggregate_kl, mutual_information

DOUBLE = torch.float64
X = torch.randn(40, generator=new_generator(0, stream="data"), dtype=DOUBLE)
SCALE = 0.4


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(0.8 * x, SCALE))


def by_quadrature():
    """Return mutual information and divergence from the prior of the mixture, on a fine grid."""
    z = torch.linspace(-12.0, 12.0, 200_001, dtype=DOUBLE)
    log_mixture = dist.Normal(0.8 * X.unsqueeze(1), SCALE).log_prob(z).logsumexp(0) - math.log(len(X))
    mass = log_mixture.exp() * (z[1] - z[0])
    entropy = -(mass * log_mixture).sum()
    log_prior = dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0).log_prob(z)
    own_entropy = 0.5 * math.log(2 * math.pi * math.e * SCALE**2)
    return float(entropy - own_entropy), float(-(mass * log_prior).sum() - entropy)


def test_agrees_with_quadrature(limit):
    information, divergence = by_quadrature()
    found = mutual_information(model, guide, X, num_draws=400)
    assert abs(found.value - information) < limit() * found.standard_error
    assert found.standard_error < 0.01
    assert found.limit == pytest.approx(math.log(40))
    assert found.trusted
    other = aggregate_kl(model, guide, X, num_draws=400)
    assert abs(other.value - divergence) < limit() * other.standard_error
    assert other.standard_error < 0.01


def test_both_add_up_to_the_mean_divergence(limit):
    prior = dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0)
    mean_kl = torch.distributions.kl_divergence(dist.Normal(0.8 * X, SCALE), prior).mean()
    parts = [f(model, guide, X, num_draws=400, seed=2) for f in (mutual_information, aggregate_kl)]
    error = sum(part.standard_error for part in parts)  # they share draws
    assert abs(sum(part.value for part in parts) - float(mean_kl)) < limit() * error


def test_chunks_change_nothing_and_a_mixture_without_its_weight_is_noticed(monkeypatch, limit):
    whole = mutual_information(model, guide, X, num_draws=20).value
    monkeypatch.setattr(module, "ROWS", 7 * len(X))
    assert mutual_information(model, guide, X, num_draws=20).value == pytest.approx(whole, abs=1e-12)
    # A mixture over the lower half of the data is another one.
    monkeypatch.undo()
    half = mutual_information(model, guide, X.sort().values[:20], num_draws=400)
    assert abs(half.value - by_quadrature()[0]) > limit() * half.standard_error


@pytest.mark.calibration
def test_replicates_give_the_standard_error():
    found = [mutual_information(model, guide, X, num_draws=4, seed=seed) for seed in range(200)]
    spread = float(torch.tensor([f.value for f in found], dtype=DOUBLE).std())
    claimed = math.sqrt(sum(f.standard_error**2 for f in found) / len(found))
    assert abs(claimed / spread - 1) < 5 / math.sqrt(2 * len(found))


def test_positive_codes_give_the_same_as_their_logarithms():
    def positive_model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.LogNormal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(z.log(), 1.0), obs=x)

    def positive_guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.LogNormal(0.8 * x, SCALE))

    for estimate in (mutual_information, aggregate_kl):
        plain, mapped = estimate(model, guide, X), estimate(positive_model, positive_guide, X)
        assert mapped.value == pytest.approx(plain.value, abs=1e-10)


def test_codes_that_tell_all_data_apart_are_at_the_limit():
    def sharp(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x, 1e-6))

    found = mutual_information(model, sharp, X)
    assert found.value == pytest.approx(math.log(40), abs=1e-10)
    assert not found.trusted
    assert "use more data" in str(found)


WEIGHT = torch.tensor([0.5, 0.05, -0.3], dtype=DOUBLE)


def closed(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x.unsqueeze(-1) * WEIGHT, 0.5).to_event(1))


def without_mean(x):
    with pyro.plate("data", len(x)):
        base = dist.Normal(torch.zeros(len(x), 3, dtype=DOUBLE), 0.5).to_event(1)
        pyro.sample("z", dist.TransformedDistribution(base, AffineTransform(x.unsqueeze(-1) * WEIGHT, 1.0, 1)))


def test_active_units_of_a_linear_guide_are_exact():
    result = active_units(closed, X)
    expected = WEIGHT.square() * X.var()
    assert torch.allclose(result.variance["z"], expected, rtol=1e-12)
    assert result.active["z"].tolist() == [True, False, True]
    assert result.count == 2
    assert result.num_undecided == 0
    assert list(result.to_pandas()["active"]) == [True, False, True]
    # A variance is a mean of squares.
    error = (X - X.mean()).square().std() / math.sqrt(40)
    assert torch.allclose(result.standard_error["z"], WEIGHT.square() * error, rtol=1e-12)


def many_variances(num_seeds=60):
    found = [active_units(without_mean, X, num_draws=4, seed=seed).variance["z"] for seed in range(num_seeds)]
    found = torch.stack(found)
    return (found.mean(0) - WEIGHT.square() * X.var()) / (found.std(0) / math.sqrt(num_seeds))


def test_means_by_draws_are_corrected_for_their_noise(monkeypatch, limit):
    assert float(many_variances().abs().max()) < limit(3)
    uncorrected = active_units.__globals__["_variance"]
    monkeypatch.setitem(active_units.__globals__, "_variance", lambda m: (m.mean(0).var(0), uncorrected(m)[1]))
    assert float(many_variances().abs().max()) > limit(3)


def test_inner_plates_and_several_sites():
    def nested(x):
        with pyro.plate("data", len(x)):
            pyro.sample("a", dist.Normal(x, 1.0))
            with pyro.plate("inner", 2, dim=-2):
                pyro.sample("b", dist.Normal(torch.stack([2 * x, 0 * x]), 1.0))

    result = active_units(nested, X)
    assert torch.allclose(result.variance["a"], X.var().reshape(1), rtol=1e-12)
    assert torch.allclose(result.variance["b"], torch.stack([4 * X.var(), 0 * X.var()]), rtol=1e-12, atol=1e-15)
    assert result.count == 2


def test_bad_input_is_refused():
    def coin(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Bernoulli(torch.full_like(x, 0.5)))

    with pytest.raises(SettingsError, match="num_draws"):
        mutual_information(model, guide, X, num_draws=0)
    with pytest.raises(SettingsError, match="at least 2"):
        aggregate_kl(model, guide, X, num_draws=1)
    with pytest.raises(GuideError, match="'z'"):
        aggregate_kl(model, lambda x: None, X)
    with pytest.raises(SettingsError, match="threshold"):
        active_units(guide, X, threshold=0.0)
    with pytest.raises(DataError, match="at least two observations"):
        active_units(guide, X[:1])
    with pytest.raises(GuideError, match="discrete.*continuous sites only"):
        active_units(coin, X)
    with pytest.raises(ModelError, match="no plate"):
        active_units(lambda x: pyro.sample("z", dist.Normal(0.0, 1.0)), X)
