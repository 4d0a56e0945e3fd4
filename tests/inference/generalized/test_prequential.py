import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import chi2
from scipy.stats import t as student

import bayeskit as bk
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._cross_validation import prequential_score, prior_populations
from bayeskit.inference.samplers import PopulationMoves, ResampleMove
from bayeskit.inference.samplers import _populations as populations
from bayeskit.inference.samplers._population_moves import MoveInfo, PopulationHMC
from bayeskit.inference.samplers._weighted_data import WeightedData, carry

Y = torch.tensor([1.2, -0.3, 2.5, 0.8, 1.9, 0.1, 1.1, 0.7], dtype=torch.float64)
PRIOR_VARIANCE = 4.0
FAILURE_RATE = 1e-5
X = torch.linspace(-1, 1, 8, dtype=torch.float64)


def location(y):
    mean = pyro.sample("mean", dist.Normal(0.0, PRIOR_VARIANCE**0.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def coin(y):
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(share), obs=y)


def closed_form(orders):
    """Log predictive densities of a normal law of known variance, ``(q, n)``."""
    y = Y[orders]
    seen = torch.arange(8, dtype=torch.float64)
    variance = 1 / (1 / PRIOR_VARIANCE + seen)
    mean = variance * (y.cumsum(1) - y)
    return dist.Normal(mean, (1 + variance).sqrt()).log_prob(y)


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_pyro(location, Y)


@pytest.fixture(scope="module")
def curves(target):
    return prequential_score(target, orders=3, num_replicates=8, seed=1)


def test_each_datum_is_predicted_as_in_closed_form(curves):
    z = (curves.log_predictive - closed_form(curves.orders)) / curves.standard_error
    # The error of each comes from eight populations.
    assert float(z.abs().max()) < float(student.isf(FAILURE_RATE / (2 * z.numel()), 7))


def test_the_cumulative_curves_are_evidence_of_the_data_so_far(curves, limit):
    z = (curves.cumulative - closed_form(curves.orders).cumsum(1)) / curves.cumulative_standard_error
    assert float(z.abs().max()) < limit(z.numel())


def test_the_total_does_not_depend_on_the_order(curves, limit):
    exact = closed_form(curves.orders).sum(1)
    assert float((exact - exact[0]).abs().max()) < 1e-12
    assert curves.trusted, curves.warnings
    assert abs(curves.log_evidence - float(exact[0])) < limit() * curves.log_evidence_standard_error
    spread = (curves.cumulative[:, -1] - curves.cumulative[:, -1].mean()) / curves.cumulative_standard_error[-1]
    assert float(spread.square().sum()) < float(chi2.isf(FAILURE_RATE, 2))
    assert not torch.equal(curves.orders[0], curves.orders[1])


def test_flips_of_a_coin(limit):
    flips = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    target = bk.Target.from_pyro(coin, flips)
    result = prequential_score(target, torch.arange(4), num_replicates=16, num_particles=512, seed=2)
    # Laplace's rule of succession.
    exact = torch.tensor([1 / 2, 2 / 3, 1 / 4, 3 / 5], dtype=torch.float64).log()
    z = (result.log_predictive - exact) / result.standard_error
    assert float(z.abs().max()) < float(student.isf(FAILURE_RATE / 8, 15))
    assert abs(result.log_evidence - math.log(1 / 20)) < limit() * result.log_evidence_standard_error


def test_two_dimensions_agree_with_the_normal_evidence(limit):
    def regression(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(intercept + slope * x, 0.5), obs=y)

    covariance = 4 * torch.outer(X, X) + 9 + 0.25 * torch.eye(8, dtype=torch.float64)
    exact = dist.MultivariateNormal(torch.zeros(8, dtype=torch.float64), covariance).log_prob(Y)
    result = prequential_score(bk.Target.from_pyro(regression, X, Y), orders=4, seed=3)
    assert result.trusted, result.warnings
    assert abs(result.log_evidence - float(exact)) < limit() * result.log_evidence_standard_error


def test_a_loss_in_place_of_a_likelihood(limit):
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), Y, weight=0.5)
    precision = 1 + 0.5 * 8
    exact = -0.25 * Y.square().sum() + 0.125 * Y.sum().square() / precision - 0.5 * math.log(precision)
    result = prequential_score(posterior, orders=2, num_replicates=8, seed=4)
    assert abs(result.log_evidence - float(exact)) < limit() * result.log_evidence_standard_error


def test_groups_come_together(target, limit):
    groups = torch.arange(8) // 4
    result = prequential_score(target, torch.tensor([1, 0]), num_replicates=8, groups=groups, seed=5)
    exact = closed_form(torch.tensor([[4, 5, 6, 7, 0, 1, 2, 3]])).unflatten(1, (2, 4)).sum(-1)
    z = (result.cumulative - exact.cumsum(1)) / result.cumulative_standard_error
    assert float(z.abs().max()) < limit(2)


@pytest.mark.calibration
def test_errors_are_those_of_repeated_runs(target, limit):
    runs = [prequential_score(target, 2, num_particles=64, seed=seed) for seed in range(8)]
    exact = float(closed_form(torch.arange(8).unsqueeze(0)).sum())
    z = torch.tensor([(run.log_evidence - exact) / run.log_evidence_standard_error for run in runs])
    # Errors of eight populations are widened to hold the 97.5 % quantile, so that z varies no more than a normal.
    assert float(z.square().sum()) < float(chi2.isf(FAILURE_RATE, 8))
    assert abs(float(z.mean())) < limit() / math.sqrt(8)


@pytest.mark.calibration
def test_moves_that_ignore_the_data_are_found_out(target, limit, monkeypatch):
    # The mutation: particles move as if no datum counted, that is, they return to the prior.
    counting = WeightedData.counting
    monkeypatch.setattr(WeightedData, "counting", lambda self, weights: counting(self, 0 * weights))
    result = prequential_score(target, orders=2, num_replicates=32, seed=1)
    exact = float(closed_form(torch.arange(8).unsqueeze(0)).sum())
    assert abs(result.log_evidence - exact) > limit() * result.log_evidence_standard_error


def test_increments_that_lose_the_weights_are_found_out(target, limit, monkeypatch):
    # The mutation: resampling forgets which particles the data prefer.
    def forgetful(log_weight, generator, below):
        index = torch.arange(log_weight.shape[1]).expand(log_weight.shape).contiguous()
        return index, torch.full_like(log_weight, -math.log(log_weight.shape[1]))

    monkeypatch.setattr(populations, "survivors", forgetful)
    monkeypatch.setattr(PopulationHMC, "step", lambda self, target, state, *, generator: (state, _accepted(state)))
    result = prequential_score(target, orders=2, num_replicates=8, seed=1)
    exact = float(closed_form(torch.arange(8).unsqueeze(0)).sum())
    assert abs(result.log_evidence - exact) > limit() * result.log_evidence_standard_error


def _accepted(state):
    ones = torch.ones_like(state.log_density)
    return MoveInfo(ones, ones < 1, ones)


def test_particles_are_carried_to_any_weights(target, limit):
    # Half a datum counts: the power posterior is normal, and its normaliser known.
    data = WeightedData(target)
    generator = torch.Generator().manual_seed(6)
    state = prior_populations(data, 16, 256, generator)
    weights = torch.zeros(16, 8, dtype=torch.float64)
    weights[:, 0], weights[:, 3] = 0.5, 1.0
    state, increment, _, _ = carry(data, state, weights, ResampleMove(), generator)
    precision = 1 / PRIOR_VARIANCE + 1.5
    total, squares = 0.5 * Y[0] + Y[3], 0.5 * Y[0].square() + Y[3].square()
    exact = -0.75 * math.log(2 * math.pi) - 0.5 * math.log(PRIOR_VARIANCE * precision)
    exact += float(0.5 * total.square() / precision - 0.5 * squares)
    value = float(increment.logsumexp(0)) - math.log(16)
    assert abs(value - exact) < limit() * float((increment - value).exp().std()) / 4
    mean = (state.particles.log_weight.exp() * state.particles.position.squeeze(-1)).sum(1)
    assert abs(float(mean.mean() - total / precision)) < limit() * float(mean.std()) / 4
    assert torch.equal(state.data_weights, weights)


def test_a_seed_repeats_itself(target):
    first, again, other = (prequential_score(target, 1, num_particles=16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.cumulative, again.cumulative)
    assert first.log_evidence != other.log_evidence


def test_a_model_that_cannot_be_batched_is_looped(limit):
    def branching(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        scale = 1.0 if mean < 100 else 2.0  # control flow on a value
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    with pytest.warns(bk.errors.SlowModelWarning):
        looping = bk.Target.from_pyro(branching, Y[:2])
    result = prequential_score(looping, 1, num_replicates=8, num_particles=16, seed=1)
    covariance = torch.eye(2, dtype=torch.float64) + 1
    exact = dist.MultivariateNormal(torch.zeros(2, dtype=torch.float64), covariance).log_prob(Y[:2])
    assert abs(result.log_evidence - float(exact)) < limit() * result.log_evidence_standard_error


def test_table_and_plots(curves, target):
    table = curves.to_pandas()
    assert len(table) == 24 and table["datum"].tolist()[:8] == curves.orders[0].tolist()
    assert "3 orders of 8 data" in str(curves)
    ax = curves.plot(Figure().subplots(), label="location")
    assert ax.get_xlabel() == "data seen" and len(ax.lines) == 3
    other = prequential_score(target, curves.orders, num_particles=32)
    ax = curves.plot(Figure().subplots(), against=other)
    assert ax.get_ylabel() == "log Bayes factor (nats)"
    with pytest.raises(SettingsError, match="different orders"):
        curves.plot(Figure().subplots(), against=prequential_score(target, 3, num_particles=16, seed=9))


def test_few_populations_say_so(target):
    result = prequential_score(target, 1, num_replicates=2, num_particles=64)
    assert not result.trusted
    assert "only 2 populations" in result.warnings[0]


@pytest.mark.parametrize("orders", [torch.zeros(8), torch.arange(7), torch.ones(2, 8, dtype=torch.long)])
def test_orders_that_are_no_permutations(target, orders):
    with pytest.raises(ShapeError, match="permutations of the 8 data"):
        prequential_score(target, orders)


def test_bad_settings(target):
    with pytest.raises(SettingsError, match="num_replicates must be at least 2"):
        prequential_score(target, num_replicates=1)
    with pytest.raises(SettingsError, match="orders must be at least 1"):
        prequential_score(target, 0)
    with pytest.raises(SettingsError, match="ess_threshold"):
        ResampleMove(ess_threshold=1.5)
    with pytest.raises(SettingsError, match="max_moves"):
        PopulationMoves(max_moves=0)
    with pytest.raises(SettingsError, match="must be PopulationMoves"):
        ResampleMove(moves=3)
    with pytest.raises(SettingsError, match="improper"):
        prequential_score(GibbsPosterior(Flat(), losses.HalfSquared(), Y))
    normal = dist.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    plain = bk.Target.from_functions(lambda u: normal.log_prob(u).sum(-1), lambda u: -u.square().sum(-1), 1)
    with pytest.raises(ModelError, match="no pointwise"):
        prequential_score(plain)


def test_likelihoods_that_do_not_add_up_are_refused(target, monkeypatch):
    whole = target.log_likelihood
    monkeypatch.setattr(target, "log_likelihood", lambda u: whole(u) - 1)
    with pytest.raises(ModelError, match="do not add up"):
        prequential_score(target)
