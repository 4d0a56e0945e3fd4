"""Martingale posteriors: exact moments at every horizon of urn and score-driven rules, and the copula's martingale."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.special import polygamma
from scipy.stats import multivariate_normal, norm

from bayeskit.errors import DataError, SamplingWarning, SettingsError, ShapeError
from bayeskit.inference.generalized import GibbsPosterior, bootstrap, losses
from bayeskit.inference.generalized import martingale as copula
from bayeskit.inference.generalized.martingale import (
    CopulaUpdate,
    PolyaUrn,
    ScoreDriven,
    conditional,
    law_without_data,
    log_copula_density,
    martingale_posterior,
    normal_location,
    rate,
)

X = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
V = 9.5  # mean square deviation from the mean, 4
PRIOR = dist.Normal(torch.tensor(0.0, dtype=torch.float64), 5.0)


def mean_posterior(data=X):
    return GibbsPosterior(PRIOR, losses.HalfSquared(), data)


def score(draws, mean, variance):
    """Return the larger z score of mean and variance of independent draws ``(R,)``."""
    centred = draws - mean
    spread, root = centred.square(), math.sqrt(len(draws))
    return max(abs(float(centred.mean() / centred.std())), abs(float((spread.mean() - variance) / spread.std()))) * root


def test_the_urn_is_the_bayesian_bootstrap(limit):
    """The reference case: mean 4, variance 1.9 in the limit; after N draws a share of N / (n + N) of it."""
    result = martingale_posterior(mean_posterior(), num_draws=5000, horizon=2000)
    assert result.horizons == (125, 250, 500, 1000, 2000)
    for horizon, draws in zip(result.horizons, result.path[..., 0], strict=True):
        assert score(draws, 4.0, V / 5 * horizon / (4 + horizon)) < limit(12)
    assert score(result.draws.values()["theta"][0], 4.0, 1.9) < limit(12)
    # What is left is n / (n + N); two variances of independent draws, of kurtosis six at most, estimate it.
    assert abs(math.log(float(result.remaining) / (4 / 2004))) < limit() * math.sqrt(10 / 5000)
    assert float(result.drift.abs().max()) < limit(4)


def test_the_urn_counts_atoms():
    urn, generator = PolyaUrn(), torch.Generator().manual_seed(0)
    state = urn.init(X, 7, 10)
    for _ in range(10):
        state = urn.step(state, generator=generator)
    weights = urn.completed(state).weights
    assert torch.equal(weights.sum(1), torch.full((7,), 14.0)) and bool((weights >= 1).all())


class StuckUrn(PolyaUrn):
    """Draws from the observed data alone, not from what it has drawn."""

    def step(self, state, *, generator):
        chosen = torch.randint(state.num_data, (len(state.origin), 1), generator=generator)
        state.origin[:, state.size] = state.origin.gather(1, chosen)[:, 0]
        return state._replace(size=state.size + 1)


def test_mutation_an_urn_that_does_not_learn_fails(limit):
    with pytest.warns(SamplingWarning, match="is a martingale"):
        draws = martingale_posterior(mean_posterior(), StuckUrn(), 5000, horizon=200).path[-1, :, 0]
    assert score(draws, 4.0, V / 5 * 200 / 204) > limit(12)


def test_batches_do_not_matter(limit, monkeypatch):
    monkeypatch.setattr(bootstrap, "BLOCK", 300 * 104)
    result = martingale_posterior(mean_posterior(), num_draws=1000, horizon=100)
    assert result.path.shape == (5, 1000, 1) and torch.equal(result.path[-1], result.draws.unconstrained[0])
    assert score(result.path[-1, :, 0], 4.0, V / 5 * 100 / 104) < limit(2)


@pytest.mark.parametrize("sd", [0.5, 2.0])
def test_plug_in_normal(sd, limit):
    rule = ScoreDriven(normal_location(sd), X.mean()[None], torch.tensor([[1 / sd**2]], dtype=torch.float64))
    result = martingale_posterior(mean_posterior(), rule, 3000, horizon=200)
    limiting = sd**2 * polygamma(1, 5)  # the sum of 1 / t^2 beyond n
    for horizon, draws in zip(result.horizons, result.path[..., 0], strict=True):
        variance = sd**2 * (polygamma(1, 5) - polygamma(1, 5 + horizon))
        assert score(draws, 4.0, variance) < limit(10)
        assert variance < limiting
    exact = polygamma(1, 205) / polygamma(1, 5)
    assert abs(math.log(float(result.remaining) / exact)) < limit() * math.sqrt(4 / 3000) + 0.01  # 1/t^2 by integrals


def run(rule, data, replicates, steps):
    generator, state = torch.Generator().manual_seed(1), rule.init(data, replicates, steps)
    for _ in range(steps):
        state = rule.step(state, generator=generator)
    return state


def test_default_information_is_that_of_the_observed_scores(limit):
    """Scores of N(mean, sd^2) have mean square V / sd^4, so that steps are sd^2 / V times those of a running mean."""
    sd = 2.0
    state = run(ScoreDriven(normal_location(sd), X.mean()[None]), X, 4000, 60)
    variance = (sd**2 / V) ** 2 * sd**2 * (polygamma(1, 5) - polygamma(1, 65))
    assert score(state.parameter[:, 0], 4.0, variance) < limit(2)


def test_two_parameters_are_martingales(limit):
    def family(parameter):
        return torch.distributions.Normal(parameter[:, 0], parameter[:, 1].exp())

    data = torch.tensor(np.random.default_rng(0).normal(3.0, 2.0, 40))
    start = torch.stack([data.mean(), data.std(correction=0).log()])
    information = torch.diag(torch.stack([(-2 * start[1]).exp(), torch.tensor(2.0, dtype=torch.float64)]))
    state = run(ScoreDriven(family, start, information), data, 3000, 100)
    z = (state.parameter - start).mean(0) / state.parameter.std(0) * math.sqrt(3000)
    assert float(z.abs().max()) < limit(2)


def test_the_copula_is_that_of_a_normal_law():
    x, y, rho = 0.3, -0.8, 0.6
    u, v = (torch.tensor(norm.cdf(z)) for z in (x, y))
    assert float(conditional(u, v, rho)) == pytest.approx(norm.cdf(x, rho * y, math.sqrt(1 - rho**2)), abs=1e-12)
    joint = multivariate_normal(cov=[[1, rho], [rho, 1]]).logpdf([x, y]) - norm.logpdf(x) - norm.logpdf(y)
    assert float(log_copula_density(u, v, rho)) == pytest.approx(joint, abs=1e-12)


def test_one_step_of_the_copula_by_quadrature(limit):
    """The law after a step is expected to be what it was; its variance is that of the conditional, times the rate's."""
    rule = CopulaUpdate(correlation=0.7, num_points=21)
    before = rule.init(X, 20_000, 1)
    after = rule.step(before, generator=torch.Generator().manual_seed(0)).cdf
    for place in (4, 8, 10, 13):
        start, rho = before.cdf[0, place], before.correlation

        def moved(v, power, start=start, rho=rho):
            return float(conditional(start, torch.tensor(v, dtype=torch.float64), rho) - start) ** power

        assert quad(moved, 0, 1, args=(1,))[0] == pytest.approx(0, abs=1e-7)
        variance = rate(4) ** 2 * quad(moved, 0, 1, args=(2,))[0]
        assert score(after[:, place], float(start), variance) < limit(8)


DATA = torch.tensor(np.random.default_rng(3).gamma(2.0, 1.0, 30))


CLUSTERS = torch.cat([torch.linspace(-4, -2, 20), torch.linspace(2, 4, 20)]).double()


def test_the_law_of_the_observed_data():
    rule = CopulaUpdate("prequential", num_permutations=4)
    state = rule.init(CLUSTERS, 2, 1)
    assert bool((state.cdf.diff(dim=1) >= 0).all()) and state.correlation > 0.5
    around = state.correlation + torch.tensor([0.0, -0.01, 0.01], dtype=torch.float64)
    assert int(rule.prequential(CLUSTERS, around).argmax()) == 0
    # Between the clusters there is less than a normal law of the same moments would have.
    middle = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    cdf = rule._observed(CLUSTERS, middle, torch.tensor([state.correlation]).double())[0].mean(0)[0]
    assert float(cdf[1] - cdf[0]) < 0.5 * (norm.cdf(1, 0, float(CLUSTERS.std())) * 2 - 1)


def test_two_data_by_hand():
    pair, rho = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    sd = 1 / 1.349  # quartiles 1.5 and 2.5
    rule, u = CopulaUpdate(num_permutations=1), torch.special.ndtr((pair - 2.0) / sd)
    joint = norm.logpdf(pair.numpy(), 2.0, sd).sum()
    joint += math.log(0.5 + 0.5 * float(log_copula_density(*u, 0.5).exp()))  # the same in either order
    assert float(rule.prequential(pair, rho)) == pytest.approx(joint, abs=1e-12)
    at = torch.tensor([2.5], dtype=torch.float64)
    found = float(rule._observed(pair, at, rho)[0])
    ends = []
    for first, second in ((0, 1), (1, 0)):
        law = torch.special.ndtr((at - 2.0) / sd)
        law, other = ((x + conditional(x, u[first], 0.5)) / 2 for x in (law, u[second]))
        ends.append(float((law + conditional(law, other, 0.5)) / 2))
    assert min(abs(found - end) for end in ends) < 1e-12 < abs(ends[0] - ends[1])


def test_the_copula_s_mean_is_a_martingale(limit):
    rule = CopulaUpdate(correlation=0.8, num_permutations=3, num_points=200)
    result = martingale_posterior(mean_posterior(DATA), rule, 400, horizon=600)
    law = rule.completed(rule.init(DATA, 1, 1))
    start = float((law.data * law.weights).sum() / law.weights.sum())
    z = (result.path[..., 0].mean(1) - start) / result.spread[:, 0] * math.sqrt(400)
    assert float(z.abs().max()) < limit(5)
    assert bool((result.spread[:, 0].diff() > 0).all())
    assert abs(start - float(DATA.mean())) < 0.2 * float(DATA.std())


def test_mutation_a_conditional_of_another_width_is_no_martingale(limit, monkeypatch):
    def wrong(cdf, at, correlation):
        x, y = (torch.special.ndtri(u.clamp(1e-13, 1 - 1e-13)) for u in (cdf, at))
        return torch.special.ndtr(x - correlation * y)

    rule = CopulaUpdate(correlation=0.7, num_points=21)
    before = rule.init(X, 20_000, 1)
    monkeypatch.setattr(copula, "conditional", wrong)
    after = rule.step(before, generator=torch.Generator().manual_seed(0)).cdf[:, 4]
    assert abs(float((after - before.cdf[0, 4]).mean() / after.std())) * math.sqrt(20_000) > limit(8)


NORMAL = torch.tensor(norm.ppf((np.arange(60) + 0.5) / 60))


@pytest.mark.parametrize("rho", [0.35, 0.5, 0.8])
def test_the_copula_s_mean_of_normal_data_has_the_spread_of_two_correlations(rho, limit):
    """A datum moves the mean of a normal law by its correlation, twice as far as a running mean is moved."""
    rule = CopulaUpdate(rho, num_points=100)
    result = martingale_posterior(mean_posterior(NORMAL), rule, 400, horizon=600)
    places, mass = (x[0] for x in rule.completed(rule.init(NORMAL, 1, 1)))
    share = mass / mass.sum()
    sd = math.sqrt(float((share * (places - (share * places).sum()).square()).sum()))
    assert abs(sd - 1) < 0.1
    exact = rho * sd * math.sqrt(sum(rate(t) ** 2 for t in range(60, 660)))
    assert exact == pytest.approx(2 * rho * sd / math.sqrt(60) * math.sqrt(600 / 660), rel=0.02)
    assert abs(math.log(float(result.spread[-1]) / exact)) < limit(3) / math.sqrt(2 * 400)


def test_the_default_spreads_as_the_bayesian_bootstrap_does(limit):
    smooth = martingale_posterior(mean_posterior(NORMAL), CopulaUpdate(num_points=100), 400, horizon=600)
    urn = martingale_posterior(mean_posterior(NORMAL), PolyaUrn(), 400, horizon=600)
    # The spread of the law that it starts from is that of the data within a tenth, as above.
    assert abs(math.log(float(smooth.spread[-1] / urn.spread[-1]))) < limit() / math.sqrt(400) + 0.1


def test_a_copula_of_another_spread_warns():
    # The law without data fits normal data already, so that the prequential likelihood wants no update.
    rule = CopulaUpdate("prequential", num_permutations=3, num_points=50)
    assert rule.fitted_correlation(NORMAL) < 0.1
    with pytest.warns(SamplingWarning, match=r"times the standard deviation.*take another correlation="):
        martingale_posterior(mean_posterior(NORMAL), rule, 50, horizon=400)
    outlier = torch.cat([NORMAL, torch.tensor([1e4], dtype=torch.float64)])
    with pytest.warns(SamplingWarning, match=r"PolyaUrn\(\) if tails are heavy"):
        martingale_posterior(mean_posterior(outlier), CopulaUpdate(num_points=50), 50, horizon=400)


def test_an_outlier_leaves_the_law_of_the_others():
    outlier = torch.cat([NORMAL, torch.tensor([1e4], dtype=torch.float64)])
    mean, scale = law_without_data(outlier)
    assert abs(float(mean)) < 0.05 and abs(float(scale) - 1) < 0.05
    laws = [CopulaUpdate().init(x, 1, 1) for x in (NORMAL, outlier)]
    assert float(laws[1].grid[0]) < -6 and float(laws[1].grid[-1]) > 1e4
    quantiles = [[float(law.grid[int((law.cdf[0] < q).sum())]) for q in (0.25, 0.5, 0.75)] for law in laws]
    # One datum in 61 moves a quantile by 1 / 61 over the density; a grid of 400 adds little.
    for q, (alone, among) in zip((0.25, 0.5, 0.75), zip(*quantiles, strict=True), strict=True):
        assert abs(alone - among) < 2 / 61 / norm.pdf(norm.ppf(q))
    median = GibbsPosterior(PRIOR, losses.Absolute(), outlier)
    draws = martingale_posterior(median, CopulaUpdate(), 100, horizon=400).draws.values()["theta"]
    assert 0.05 < float(draws.std()) < 0.5  # of the median of normal data, sqrt(pi / 2 / 60) = 0.16


def test_ties_leave_the_raw_standard_deviation():
    zeros = torch.cat([torch.zeros(20), torch.ones(2)]).double()
    assert float(law_without_data(zeros)[1]) == float(zeros.std())


def test_whole_numbers_are_data_too():
    whole = X.long()
    posterior = GibbsPosterior(PRIOR, losses.HalfSquared(), whole)
    copied = CopulaUpdate(0.7).init(whole, 2, 4)
    assert copied.cdf.is_floating_point() and bool(copied.cdf.isfinite().all())
    rule = ScoreDriven(lambda rate: torch.distributions.Poisson(rate[:, 0]), X.mean()[None])
    exact, found = (martingale_posterior(mean_posterior(x), rule, 50, horizon=200).path for x in (X, whole))
    assert torch.equal(run(rule, whole, 5, 20).data, run(rule, X, 5, 20).data)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)  # minimised to single precision
    result = martingale_posterior(posterior, CopulaUpdate(0.5), 50, horizon=100)
    assert bool(result.path.isfinite().all())


def test_pairs_are_drawn_together():
    covariate = torch.linspace(-1, 1, 12, dtype=torch.float64)
    design = torch.stack([torch.ones_like(covariate), covariate], 1)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 5.0).to_event(1)
    posterior = GibbsPosterior(prior, losses.HalfSquared(losses.linear), (design, 1 - 3 * covariate))
    result = martingale_posterior(posterior, num_draws=30)
    assert torch.equal(result.remaining, torch.zeros(2, dtype=torch.float64))
    theta = result.draws.values()["theta"][0]
    exact = torch.tensor([1.0, -3.0], dtype=torch.float64).expand(30, 2)
    torch.testing.assert_close(theta, exact, rtol=0, atol=1e-8)  # without noise every weighting has one minimum


def test_short_horizons_warn():
    with pytest.warns(SamplingWarning, match="raise horizon to 80"):
        martingale_posterior(mean_posterior(), num_draws=300, horizon=4)


def test_seeds_arviz_and_plot():
    first, second = (martingale_posterior(mean_posterior(), num_draws=50, seed=2) for _ in range(2))
    assert torch.equal(first.path, second.path) and first.horizons == (5, 10, 20, 40, 80)
    assert not torch.equal(first.path, martingale_posterior(mean_posterior(), num_draws=50, seed=3).path)
    assert first.to_arviz().posterior["theta"].shape == (1, 50)
    assert len(first.plot(num_paths=7).lines) == 7 and "remaining variance" in repr(first)


def test_bad_input():
    with pytest.raises(SettingsError, match="Max"):
        martingale_posterior(GibbsPosterior(PRIOR, losses.HalfSquared(), X, pooling="max"))
    for bad in ({"num_draws": 1}, {"horizon": 1}, {"predictive": PolyaUrn}):
        with pytest.raises(SettingsError):
            martingale_posterior(mean_posterior(), **bad)
    for bad in (
        lambda: CopulaUpdate(correlation=1.0),
        lambda: CopulaUpdate(correlation="fitted"),
        lambda: CopulaUpdate(num_points=2),
        lambda: normal_location(0.0),
    ):
        with pytest.raises(SettingsError):
            bad()
    with pytest.raises(DataError, match="differ"):
        CopulaUpdate().init(torch.ones(5), 2, 1)
    with pytest.raises(ShapeError):
        CopulaUpdate().init(torch.ones(5, 2), 2, 1)
    with pytest.raises(ShapeError, match="start"):
        ScoreDriven(normal_location(1.0), X.mean()).init(X, 2, 1)
    with pytest.raises(ShapeError, match="information"):
        ScoreDriven(normal_location(1.0), X.mean()[None], torch.eye(2)).init(X, 2, 1)
    with pytest.raises(DataError, match="positive definite"):
        ScoreDriven(normal_location(1.0), X.mean()[None], -torch.eye(1)).init(X, 2, 1)
    with pytest.raises(ShapeError, match="one column"):
        ScoreDriven(normal_location(1.0), X.mean()[None]).init((X, X), 2, 1)
