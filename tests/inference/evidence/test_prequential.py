"""The evidence as a sum of predictive log densities: their closed forms, and the same sum in any order."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference import evidence
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, FoundModes
from bayeskit.inference.evidence._prequential_evidence import PrequentialEvidence, prequential, prequential_refusal
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.inference.samplers._weighted_data import WeightedData

F64 = torch.float64
TOSSES = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=F64)
SMALL = {"num_particles": 64, "num_replicates": 16}


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
    assert float(z.cumulative[-1]) == pytest.approx(z.log_evidence, abs=1e-9)


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
    assert len(z.predictives) == 3
    assert abs(z.start - float(begin)) < limit() * z.standard_error
    assert abs(z.log_evidence - float(whole)) < limit() * z.standard_error
    assert z.start + float(z.predictives.sum()) == pytest.approx(z.log_evidence, abs=1e-9)
    assert len(prequential(target, seed=1, **SMALL).predictives) == 5
    with pytest.raises(SettingsError, match="x, y"):
        prequential(target, site="w")


def test_moves_that_forget_the_data_are_noticed(limit, monkeypatch):
    """The mutation: particles move as if nothing had been seen."""
    counting = WeightedData.counting
    monkeypatch.setattr(WeightedData, "counting", lambda self, weights: counting(self, 0 * weights))
    target, tosses = bk.Target.from_pyro(coin, torch.ones(16, dtype=F64)), torch.ones(16, dtype=F64)
    z = prequential(target, seed=3, **SMALL)
    assert abs(z.log_evidence - float(_succession(tosses).sum())) > limit() * z.standard_error


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
