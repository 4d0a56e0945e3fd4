"""The evidence as a sum of predictive log densities: their closed forms, and the same sum in any order."""

import math

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import chi2
from scipy.stats import t as student

import bayeskit as bk
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference import evidence
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, FoundModes
from bayeskit.inference.evidence._prequential_evidence import PrequentialEvidence, prequential, prequential_refusal
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.samplers import PopulationMoves, ResampleMove
from bayeskit.inference.samplers import _populations as populations
from bayeskit.inference.samplers._population_moves import MoveInfo, PopulationHMC
from bayeskit.inference.samplers._weighted_data import WeightedData

F64 = torch.float64
TOSSES = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=F64)
SMALL = {"num_particles": 64, "num_replicates": 16}
Y = torch.tensor([1.2, -0.3, 2.5, 0.8, 1.9, 0.1, 1.1, 0.7], dtype=F64)
PRIOR_VARIANCE = 4.0
FAILURE_RATE = 1e-5
SEVERAL = {"num_particles": 256, "num_replicates": 8}  # of each of several orders


def coin(y):
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(share), obs=y)


def two_sites(first, second):
    mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    with pyro.plate("first", len(first)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=first)
    with pyro.plate("second", len(second)):
        pyro.sample("y", dist.Normal(mean, 2.0), obs=second)


def location(y):
    mean = pyro.sample("mean", dist.Normal(0.0, PRIOR_VARIANCE**0.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def closed_form(orders):
    """Log predictive densities of normals of known variance, ``(q, n)``."""
    y = Y[orders]
    seen = torch.arange(8, dtype=F64)
    variance = 1 / (1 / PRIOR_VARIANCE + seen)
    mean = variance * (y.cumsum(1) - y)
    return dist.Normal(mean, (1 + variance).sqrt()).log_prob(y)


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_pyro(location, Y)


@pytest.fixture(scope="module")
def curves(target):
    return prequential(target, order=3, seed=1, **SEVERAL)


def _succession(y):
    """Laplace's rule: chances of what came, given what came before."""
    ones = torch.cat([y.new_zeros(1), y.cumsum(0)[:-1]])
    before = torch.arange(len(y), dtype=F64)
    chance = (ones + 1) / (before + 2)
    return torch.where(y == 1, chance, 1 - chance).log()


def test_predictives_of_a_coin_follow_laplaces_rule(limit):
    z = prequential(bk.Target.from_pyro(coin, TOSSES), seed=1, **SMALL)
    exact = _succession(TOSSES)
    assert isinstance(z, PrequentialEvidence) and z.trusted, str(z)
    score = (z.predictives - exact) / z.predictive_errors
    assert float(score.abs().max()) < limit(len(TOSSES), dof=15)
    assert abs(z.log_evidence - float(exact.sum())) < limit() * z.standard_error
    assert z.order.tolist() == [list(range(8))] and z.predictives.shape == (1, 8)
    assert float(z.cumulative[0, -1]) == pytest.approx(z.log_evidence, abs=1e-9)


@pytest.mark.calibration
def test_predictives_of_a_regression_are_student_free_normals(limit):
    """Known noise: each response is normal given those before it, with the moments of the posterior so far."""
    case = bk.exact.get("linreg10")
    design, response, noise, prior = case.args
    precision, moment = torch.eye(10, dtype=F64) / prior**2, torch.zeros(10, dtype=F64)
    exact = []
    for x, y in zip(design, response, strict=True):
        covariance = torch.linalg.inv(precision)
        spread = (noise**2 + x @ covariance @ x).sqrt()
        exact.append(torch.distributions.Normal(x @ covariance @ moment, spread).log_prob(y))
        precision, moment = precision + torch.outer(x, x) / noise**2, moment + x * y / noise**2
    exact = torch.stack(exact)
    assert float(exact.sum()) == pytest.approx(case.log_evidence, abs=1e-9)
    target = case.target()
    target.compile = False
    z = prequential(target, seed=2, num_particles=64)
    score = (z.predictives - exact) / z.predictive_errors
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error, str(z)
    assert float(score.abs().max()) < limit(len(exact), dof=15)


@pytest.mark.calibration
@pytest.mark.parametrize("order", [range(7, -1, -1), [3, 1, 4, 0, 5, 2, 6, 7]])
def test_the_sum_is_the_same_in_any_order(order, limit):
    order = torch.tensor(list(order))
    z = prequential(bk.Target.from_pyro(coin, TOSSES), order=order, seed=3, **SMALL)
    assert abs(z.log_evidence - float(_succession(TOSSES).sum())) < limit() * z.standard_error
    shuffled = _succession(TOSSES[order])
    assert float(((z.predictives - shuffled) / z.predictive_errors).abs().max()) < limit(8, dof=15)


@pytest.mark.calibration
def test_errors_are_right(calibrated, monkeypatch):
    monkeypatch.setattr(Diagnostics, "modes", lambda self, draws: FoundModes((), 0))
    target, truth = bk.Target.from_pyro(coin, TOSSES[:3]), float(_succession(TOSSES[:3]).sum())
    scores = []
    for seed in range(24):
        z = prequential(target, seed=seed, num_particles=32)
        scores.append((z.log_evidence - truth) / z.standard_error)
    assert calibrated(scores), scores


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["beta_binomial", "three_taxon_tree", "eight_schools"])
def test_few_observations_come_by_powers_of_their_likelihood(name, limit):
    case = bk.exact.get(name)
    z = prequential(case.target(), seed=1)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error and z.trusted, str(z)


def test_one_site_comes_after_the_others(limit):
    first, second = torch.tensor([0.5, -1.0], dtype=F64), torch.tensor([2.0, 0.0, 1.0], dtype=F64)
    target = bk.Target.from_pyro(two_sites, first, second)
    covariance = torch.ones(5, 5, dtype=F64) + torch.diag(torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0], dtype=F64))
    every = torch.cat([first, second])
    whole = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=F64), covariance).log_prob(every)
    begin = torch.distributions.MultivariateNormal(torch.zeros(2, dtype=F64), covariance[:2, :2]).log_prob(first)
    z = prequential(target, site="y", seed=1, **SMALL)
    assert z.predictives.shape == z.cumulative.shape == (1, 3)
    assert abs(float(z.start) - float(begin)) < limit() * z.standard_error
    assert abs(z.log_evidence - float(whole)) < limit() * z.standard_error
    assert float(z.start + z.predictives.sum()) == pytest.approx(z.log_evidence, abs=1e-9)
    assert prequential(target, seed=1, **SMALL).predictives.shape == (1, 5)
    with pytest.raises(SettingsError, match="x, y"):
        prequential(target, site="w")


def test_an_order_is_a_sequence_an_array_a_column_a_frame_or_a_tensor():
    target, order = bk.Target.from_pyro(coin, TOSSES), [*reversed(range(len(TOSSES)))]
    given = order, range(len(order))[::-1], np.arange(len(order))[::-1], pd.Series(order), pd.DataFrame([order])
    one, *others = (prequential(target, order=form, seed=3, **SMALL) for form in (torch.tensor(order), *given))
    for other in others:
        assert other.log_evidence == one.log_evidence and torch.equal(other.predictives, one.predictives)


@pytest.mark.parametrize("order", [None, 2])
def test_moves_that_forget_the_data_are_noticed(order, limit, monkeypatch):
    """The mutation: particles move as if nothing had been seen."""
    counting = WeightedData.counting
    monkeypatch.setattr(WeightedData, "counting", lambda self, weights: counting(self, 0 * weights))
    target, tosses = bk.Target.from_pyro(coin, torch.ones(16, dtype=F64)), torch.ones(16, dtype=F64)
    z = prequential(target, order=order, seed=3, **SMALL)
    assert abs(z.log_evidence - float(_succession(tosses).sum())) > limit() * z.standard_error


def test_data_of_one_site_come_in_groups_and_several_orders(limit):
    first, second = torch.tensor([0.5, -1.0], dtype=F64), torch.tensor([2.0, 0.0, 1.0], dtype=F64)
    target = bk.Target.from_pyro(two_sites, first, second)
    covariance = torch.ones(5, 5, dtype=F64) + torch.diag(torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0], dtype=F64))
    every = torch.cat([first, second])

    def joint(which):
        mean = torch.zeros(len(which), dtype=F64)
        return float(dist.MultivariateNormal(mean, covariance[which][:, which]).log_prob(every[which]))

    groups = torch.tensor([3, 1, 9, 4, 9])  # the data of y: its middle, and the two beside it
    z = prequential(target, site="y", order=torch.tensor([[0, 1], [1, 0]]), groups=groups, seed=1, **SMALL)
    exact = torch.tensor([[joint([0, 1, 3]), joint([0, 1, 2, 3, 4])], [joint([0, 1, 2, 4]), joint([0, 1, 2, 3, 4])]])
    assert float(((z.cumulative - exact) / z.cumulative_errors).abs().max()) < limit(4)
    assert float((z.start - joint([0, 1])).abs().max()) < limit(2) * z.standard_error * math.sqrt(2)


def test_each_datum_of_several_orders_is_predicted_as_in_closed_form(curves):
    z = (curves.predictives - closed_form(curves.order)) / curves.predictive_errors
    # The error of each comes from eight populations.
    assert float(z.abs().max()) < float(student.isf(FAILURE_RATE / (2 * z.numel()), 7))


def test_the_cumulative_curves_are_evidence_of_the_data_so_far(curves, limit):
    z = (curves.cumulative - closed_form(curves.order).cumsum(1)) / curves.cumulative_errors
    assert float(z.abs().max()) < limit(z.numel())


def test_the_total_does_not_depend_on_the_order(curves, limit):
    exact = closed_form(curves.order).sum(1)
    assert float((exact - exact[0]).abs().max()) < 1e-12
    assert curves.trusted, curves.warnings
    assert abs(curves.log_evidence - float(exact[0])) < limit() * curves.standard_error
    spread = (curves.cumulative[:, -1] - curves.cumulative[:, -1].mean()) / curves.cumulative_errors[-1]
    assert float(spread.square().sum()) < float(chi2.isf(FAILURE_RATE, 2))
    assert not torch.equal(curves.order[0], curves.order[1])


def test_two_dimensions_agree_with_the_normal_evidence(limit):
    def regression(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(intercept + slope * x, 0.5), obs=y)

    x = torch.linspace(-1, 1, 8, dtype=F64)
    covariance = 4 * torch.outer(x, x) + 9 + 0.25 * torch.eye(8, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(8, dtype=F64), covariance).log_prob(Y)
    z = prequential(bk.Target.from_pyro(regression, x, Y), order=4, num_particles=256, num_replicates=4, seed=3)
    assert z.trusted, z.warnings
    assert abs(z.log_evidence - float(exact)) < limit() * z.standard_error


def test_a_loss_in_place_of_a_likelihood(limit):
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), Y, weight=0.5)
    precision = 1 + 0.5 * 8
    exact = -0.25 * Y.square().sum() + 0.125 * Y.sum().square() / precision - 0.5 * math.log(precision)
    z = prequential(posterior, order=2, seed=4, **SEVERAL)
    assert abs(z.log_evidence - float(exact)) < limit() * z.standard_error


def test_groups_come_together(target, limit):
    z = prequential(target, order=torch.tensor([1, 0]), groups=torch.arange(8) // 4, seed=5, **SEVERAL)
    exact = closed_form(torch.tensor([[4, 5, 6, 7, 0, 1, 2, 3]])).unflatten(1, (2, 4)).sum(-1)
    assert float(((z.cumulative - exact.cumsum(1)) / z.cumulative_errors).abs().max()) < limit(2)


@pytest.mark.calibration
def test_errors_of_several_orders_are_those_of_repeated_runs(target, limit):
    runs = [prequential(target, order=2, num_particles=64, num_replicates=4, seed=seed) for seed in range(8)]
    exact = float(closed_form(torch.arange(8).unsqueeze(0)).sum())
    z = torch.tensor([(run.log_evidence - exact) / run.standard_error for run in runs])
    # Errors of eight populations are widened to hold the 97.5 % quantile, so that z varies no more than a normal.
    assert float(z.square().sum()) < float(chi2.isf(FAILURE_RATE, 8))
    assert abs(float(z.mean())) < limit() / math.sqrt(8)


def test_increments_that_lose_the_weights_are_found_out(target, limit, monkeypatch):
    """The mutation: resampling forgets which particles the data prefer."""

    def forgetful(log_weight, generator, below):
        index = torch.arange(log_weight.shape[1]).expand(log_weight.shape).contiguous()
        return index, torch.full_like(log_weight, -math.log(log_weight.shape[1]))

    def stay(self, target, state, *, generator):
        ones = torch.ones_like(state.log_density)
        return state, MoveInfo(ones, ones < 1, ones)

    monkeypatch.setattr(populations, "survivors", forgetful)
    monkeypatch.setattr(PopulationHMC, "step", stay)
    z = prequential(target, order=2, seed=1, **SEVERAL)
    exact = float(closed_form(torch.arange(8).unsqueeze(0)).sum())
    assert abs(z.log_evidence - exact) > limit() * z.standard_error


def test_a_seed_repeats_itself(target):
    first, again, other = (prequential(target, order=1, num_particles=16, num_replicates=4, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.cumulative, again.cumulative) and torch.equal(first.order, again.order)
    assert first.log_evidence != other.log_evidence


def test_a_model_that_cannot_be_batched_is_looped(limit, monkeypatch):
    monkeypatch.setattr(Diagnostics, "modes", lambda self, draws: FoundModes((), 0))

    def branching(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        scale = 1.0 if mean < 100 else 2.0  # control flow on a value
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    with pytest.warns(bk.errors.SlowModelWarning):
        looping = bk.Target.from_pyro(branching, Y[:2])
    z = prequential(looping, order=1, num_replicates=8, num_particles=16, seed=1)
    covariance = torch.eye(2, dtype=F64) + 1
    exact = dist.MultivariateNormal(torch.zeros(2, dtype=F64), covariance).log_prob(Y[:2])
    assert abs(z.log_evidence - float(exact)) < limit() * z.standard_error


def test_table_and_plots_of_several_orders(curves, target):
    table = curves.to_pandas()
    assert len(table) == 24 and table["datum"].tolist()[:8] == curves.order[0].tolist()
    assert table["cumulative"].tolist()[7::8] == curves.cumulative[:, -1].tolist()
    ax = curves.plot(Figure().subplots(), label="location")
    assert ax.get_xlabel() == "data seen" and len(ax.lines) == 3
    other = prequential(target, order=curves.order, num_particles=32, num_replicates=4)
    ax = curves.plot(Figure().subplots(), against=other)
    assert ax.get_ylabel() == "log Bayes factor (nats)"
    with pytest.raises(SettingsError, match="different orders"):
        curves.plot(Figure().subplots(), against=prequential(target, order=3, num_particles=16, seed=9))


def test_few_populations_say_so(target):
    z = prequential(target, order=1, num_replicates=2, num_particles=64)
    assert not z.trusted
    assert any("only 2 replicates" in warning for warning in z.warnings)


@pytest.mark.parametrize("order", [torch.zeros(8), torch.arange(7), torch.ones(2, 8, dtype=torch.long)])
def test_orders_that_are_no_permutations(target, order):
    with pytest.raises(ShapeError, match="permutations of the 8 data"):
        prequential(target, order=order)


def test_likelihoods_that_do_not_add_up_are_refused(target, monkeypatch):
    whole = target.log_likelihood
    monkeypatch.setattr(target, "log_likelihood", lambda u: whole(u) - 1)
    with pytest.raises(ModelError, match="do not add up"):
        prequential(target)


def test_plot_and_single_precision(limit):
    target = bk.Target.from_pyro(coin, TOSSES.to(torch.float32))
    z = prequential(target, seed=1, **SMALL)
    assert abs(z.log_evidence - float(_succession(TOSSES).sum())) < limit() * z.standard_error
    axes = z.plot(Figure().subplots(), label="coin")
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(z.log_evidence, abs=1e-9)


def test_bad_input_is_refused():
    target = bk.Target.from_pyro(coin, TOSSES)
    assert prequential_refusal(target) is None
    for bad in ({"num_particles": 2}, {"num_replicates": 1}, {"ess_threshold": 0.0}):
        with pytest.raises(SettingsError, match=next(iter(bad))):
            prequential(target, **bad)
    with pytest.raises(ShapeError, match="permutation"):
        prequential(target, order=torch.zeros(8, dtype=torch.long))
    with pytest.raises(SettingsError, match="whole numbers"):
        prequential(target, order="abc")
    with pytest.raises(SettingsError, match="order must be at least 1"):
        prequential(target, order=0)
    with pytest.raises(ShapeError, match="groups must be 8 integers"):
        prequential(target, groups=torch.zeros(3, dtype=torch.long))
    with pytest.raises(SettingsError, match="improper"):
        prequential(GibbsPosterior(Flat(), losses.HalfSquared(), Y))
    with pytest.raises(SettingsError, match="max_moves"):
        PopulationMoves(max_moves=0)
    with pytest.raises(SettingsError, match="must be PopulationMoves"):
        ResampleMove(moves=3)
    functions = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1) - 0.5 * math.log(2 * math.pi),
        lambda u: 0 * u.sum(-1),
        1,
        lambda n, g: torch.randn(n, 1, generator=g, dtype=F64),
    )
    assert "pointwise" in prequential_refusal(functions)
    with pytest.raises(ModelError, match="pointwise"):
        prequential(functions)
    assert "sample_prior" in prequential_refusal(
        bk.Target.from_functions(functions.log_prior, functions.log_likelihood, 1)
    )


def test_a_comparison_leaves_it_out_where_it_would_take_more_than_all_else():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(y.new_tensor(0.0), 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    method = evidence.METHODS["prequential"]
    few, many = (bk.Target.from_pyro(model, torch.zeros(n, dtype=torch.float64)) for n in (100, 10_000))
    assert method.refusal(few, SharedRuns(few)) is None
    assert "10000 observations" in method.refusal(many, SharedRuns(many))
