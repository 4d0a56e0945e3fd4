"""Evidence of shared mechanisms against quadrature, calibration under the prior, and two published mechanisms."""

import functools
import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.integrate import quad
from scipy.special import gammaln, logsumexp
from scipy.stats import invgamma, t

from bayeskit import exact
from bayeskit.errors import DataError, DataWarning, SettingsError, ShapeError, UnknownNameError
from bayeskit.workflows._invariance import InvariantSubsets, RegressionPrior, SubsetEvidence, invariant_subsets

PRIOR = RegressionPrior(coefficient_sd=2.0, noise_shape=2.0, noise_scale=1.0)
SPREADS = (0.5, 1.0, 2.0)
NOTHING, CAUSE, EFFECT, BOTH = (), ("X1",), ("X2",), ("X1", "X2")


def quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return invariant_subsets(*args, **kwargs)


def raw(*args, **kwargs):
    """Without standardisation, so that evidences are those of the prior as it is written down."""
    return quietly(*args, standardize=False, **{"prior": PRIOR} | kwargs)


def three_environments(seed, noise=(1.0, 1.0, 1.0), noise_of_effect=SPREADS, num_rows=1000):
    """``X1 -> Y -> X2``, where the spread of X1 varies by environment, and further spreads as given."""
    rng = np.random.default_rng(seed)
    tables = []
    for spread, own, after in zip(SPREADS, noise, noise_of_effect, strict=True):
        x1 = spread * rng.standard_normal(num_rows)
        y = x1 + own * rng.standard_normal(num_rows)
        tables.append(np.stack([x1, y + after * rng.standard_normal(num_rows), y], 1))
    table = np.concatenate(tables)
    return table[:, :2], table[:, 2], np.repeat(["a", "b", "c"], num_rows)


def named(*data, **kwargs):
    return quietly(*data, names=BOTH, **kwargs)


@functools.cache
def small_data(num_environments=2):
    rng = np.random.default_rng(5)
    counts = (6, 9, 5, 7)[:num_environments]
    x = rng.normal(0.3, 1.2, (sum(counts), 1))
    environment = np.repeat(np.arange(num_environments), counts)
    y = 0.4 + 0.8 * x[:, 0] + (0.5 + environment) * rng.standard_normal(len(x))
    return x, y, environment


def with_intercept(x):
    return np.concatenate([np.ones((len(x), 1)), x], 1)


# Exact twins.


def by_quadrature(design, y, prior=PRIOR):
    """Integrate the evidence for known noise over the prior of the noise."""

    def integrand(log_sd):
        sd = math.exp(log_sd)
        given = exact.linear_regression(design, y, noise_sd=sd, prior_sd=prior.coefficient_sd * sd).log_evidence
        density = invgamma.logpdf(sd**2, prior.noise_shape, scale=prior.noise_scale) + math.log(2 * sd**2)
        return math.exp(given + density + 30.0)

    return math.log(quad(integrand, -6, 6, points=[-1, 0, 1], epsabs=0, epsrel=1e-11, limit=200)[0]) - 30.0


@pytest.mark.parametrize("columns", [(), ("x0",)], ids=["intercept", "slope"])
def test_shared_and_separate_against_quadrature_over_the_noise(columns):
    x, y, environment = small_data()
    found = raw(x, y, environment).of(*columns)
    design = with_intercept(x)[:, : 1 + len(columns)]
    assert found.shared == pytest.approx(by_quadrature(design, y), abs=1e-8)
    parts = [by_quadrature(design[environment == e], y[environment == e]) for e in (0, 1)]
    assert found.separate == pytest.approx(sum(parts), abs=1e-8)
    assert found.log_bayes_factor == found.shared - found.separate


@pytest.mark.parametrize("columns", [(), ("x0",)], ids=["intercept", "slope"])
def test_mean_shared_against_quadrature_over_both_noises(columns, limit):
    x, y, environment = small_data()
    design = torch.tensor(with_intercept(x)[:, : 1 + len(columns)])
    k = design.shape[1]
    nodes, weights = np.polynomial.legendre.leggauss(160)
    log_sd, log_weight = 5.0 * nodes, np.log(5.0 * weights)
    one, two = (torch.tensor(g).flatten() for g in np.meshgrid(log_sd, log_sd, indexing="ij"))
    log_weights = (log_weight[:, None] + log_weight).ravel()
    variances = torch.stack([one, two], 1).mul(2).exp()  # (n, 2)
    log_prior = invgamma.logpdf(variances, PRIOR.noise_shape, scale=PRIOR.noise_scale) + np.log(2 * variances.numpy())
    harmonic = 1 / (1 / variances).mean(1)
    # The density of coefficients to the power 1 / 2 in each environment, relative to a normalised normal density.
    log_prior = log_prior.sum(1) + 0.5 * k * (harmonic.log() - variances.log().mean(1)).numpy()
    covariance = torch.diag_embed(variances[:, environment])
    covariance += PRIOR.coefficient_sd**2 * harmonic[:, None, None] * (design @ design.mT)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(y), dtype=torch.float64), covariance)
    log_likelihood = normal.log_prob(torch.tensor(y)).numpy()
    truth = logsumexp(log_prior + log_likelihood + log_weights) - logsumexp(log_prior + log_weights)
    found = raw(x, y, environment, num_draws=20_000).of(*columns)
    assert found.mean_shared_error < 0.01
    assert abs(found.mean_shared - truth) < limit() * found.mean_shared_error


def by_quadrature_over_the_intercept(y, environment, prior=PRIOR):
    """Integrate over one coefficient; given it, the noise of each environment is integrated out in closed form."""
    a, b, c, num = prior.noise_shape, prior.noise_scale, prior.coefficient_sd, len(set(environment))

    def integrand(mean):
        total = t.logpdf(mean, 2 * a * num, scale=c * math.sqrt(b / a)) + 40.0
        shape, scale = a + 0.5 / num, b + mean**2 / (2 * num * c**2)
        for e in set(environment):
            residual, n = y[environment == e] - mean, (environment == e).sum()
            total += gammaln(shape + n / 2) - gammaln(shape) - n / 2 * math.log(2 * math.pi) + shape * math.log(scale)
            total -= (shape + n / 2) * math.log(scale + residual @ residual / 2)
        return math.exp(total)

    centres = sorted(float(y[environment == e].mean()) for e in set(environment))
    return math.log(quad(integrand, -60, 60, points=centres, epsabs=0, epsrel=1e-10, limit=500)[0]) - 40.0


@pytest.mark.parametrize("num_environments", [2, 3, 4])
def test_mean_shared_against_quadrature_over_the_intercept(num_environments, limit):
    x, y, environment = small_data(num_environments)
    truth = by_quadrature_over_the_intercept(y, environment)
    found = raw(x, y, environment, num_draws=20_000).of()
    assert abs(found.mean_shared - truth) < limit() * found.mean_shared_error < 0.1


@pytest.mark.calibration
@pytest.mark.parametrize("gap", [0.0, 6.0], ids=["one mode", "two modes"])
def test_errors_of_the_shared_mean_are_calibrated(gap, calibrated):
    rng = np.random.default_rng(8)
    environment = np.repeat([0, 1], 12)
    y = 0.3 * rng.standard_normal(24) + gap * environment
    x = rng.standard_normal((24, 1))
    truth = by_quadrature_over_the_intercept(y, environment)
    runs = [raw(x, y, environment, seed=seed, num_draws=500).of() for seed in range(100)]
    assert min(run.effective_draws for run in runs) > 250
    assert calibrated([(run.mean_shared - truth) / run.mean_shared_error for run in runs], off=0.1, bias=0.1)


def simulated(rng, hypothesis, design, environment, prior=PRIOR):
    """Draw ``y`` from the prior predictive of a hypothesis."""
    a, b, c, num = prior.noise_shape, prior.noise_scale, prior.coefficient_sd, len(set(environment))
    k = design.shape[1]
    if hypothesis == "mean":
        scale = c * math.sqrt(b / a)
        coefficients = scale * rng.standard_normal(k) / math.sqrt(rng.chisquare(2 * a * num) / (2 * a * num))
        rate = b + coefficients @ coefficients / (2 * num * c**2)
        variance = rate / rng.gamma(a + 0.5 * k / num, size=num)
        coefficients = np.tile(coefficients, (num, 1))
    else:
        variance = b / rng.gamma(a, size=num)
        coefficients = c * np.sqrt(variance)[:, None] * rng.standard_normal((num, k))
        if hypothesis == "mechanism":
            variance, coefficients = variance[[0] * num], coefficients[[0] * num]
    noise = np.sqrt(variance)[environment] * rng.standard_normal(len(environment))
    return (design * coefficients[environment]).sum(1) + noise


@functools.cache
def found_under_the_prior():
    """Hypotheses drawn, and log evidences found: 450 data sets."""
    rng = np.random.default_rng(77)
    x, environment = rng.standard_normal((24, 1)), np.repeat([0, 1, 2], 8)
    names, rows = ("mechanism", "mean", "nothing"), []
    for hypothesis in names * 150:
        y = simulated(rng, hypothesis, with_intercept(x), environment)
        z = raw(x, y, environment, num_draws=500).of("x0")
        rows.append((names.index(hypothesis), z.shared, z.mean_shared, z.separate))
    table = np.array(rows)
    return table[:, 0].astype(int), table[:, 1:]


def scores_of(shift):
    truth, log_evidence = found_under_the_prior()
    log_evidence = log_evidence + np.array(shift)
    p = np.exp(log_evidence - logsumexp(log_evidence, axis=1, keepdims=True))
    # The number of each hypothesis is fixed: its mean probability is a sum over data of that and of the others.
    mean = p.reshape(-1, 3, 3).sum(1)  # (groups of one of each, hypotheses)
    assert (truth.reshape(-1, 3) == [0, 1, 2]).all()
    return (mean.mean(0) - 1) / (mean.std(0) / math.sqrt(len(mean)))


@pytest.mark.long
def test_probabilities_are_calibrated_under_the_prior(limit):
    assert abs(scores_of((0, 0, 0))).max() < limit(3)


@pytest.mark.parametrize("shift", [(2.5, 0, 0), (0, 2.5, 0), (0, 0, 2.5)])
def test_mutation_an_evidence_that_is_off_is_noticed(shift, limit):
    assert abs(scores_of(shift)).max() > limit(3)


# What is found in data whose mechanism is known.


def test_a_cause_is_told_from_an_effect():
    for seed in range(4):
        found = named(*three_environments(seed))
        assert found.best == CAUSE and found.trusted and not found.warnings
        holds = [found.holds(*subset) for subset in (CAUSE, NOTHING, EFFECT, BOTH)]
        assert holds == ["mechanism shared", "mean shared", "nothing shared", "nothing shared"]
        assert found.of("X1").log_bayes_factor > 15
        assert max(found.of(*subset).log_bayes_factor for subset in (NOTHING, EFFECT, BOTH)) < -150
        assert found.column_probabilities["X1"] > 0.99 > 0.01 > found.column_probabilities["X2"]
        assert found.invariant == (CAUSE,)


def test_a_column_that_is_neither_is_not_taken_for_a_cause():
    x, y, environment = three_environments(0)
    other = np.random.default_rng(9).standard_normal((len(y), 1))
    found = quietly(np.concatenate([x, other], 1), y, environment, names=["X1", "X2", "X3"])
    assert found.invariant == (("X1",), ("X1", "X3")) and found.best == ("X1",) and found.trusted
    assert found.of("X1", "X3").log_bayes_factor > found.of("X1").log_bayes_factor  # more that is shared
    assert found.column_probabilities["X3"] < 0.01


def test_environments_that_are_alike_identify_nothing():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((600, 2))
    y = x[:, 0] + rng.standard_normal(600)
    with pytest.warns(DataWarning, match="4 of 4 subsets have a shared mechanism and no column in common"):
        found = invariant_subsets(x, y, np.arange(600) % 3)
    assert found.best == () and max(found.column_probabilities.values()) < 0.05


def test_noise_that_varies_leaves_the_mean():
    # Independent implementation: the log Bayes factors of normal-inverse-gamma priors without standardisation.
    data = three_environments(0, noise=SPREADS, noise_of_effect=(1.0, 1.0, 1.0))
    prior = RegressionPrior(10.0, 1.0, 1.0)
    with pytest.warns(DataWarning, match=r"only a mean is shared, that given \{X1\} or \{\}, and the noise varies"):
        found = invariant_subsets(*data, names=BOTH, prior=prior, standardize=False)
    assert found.of("X1").log_bayes_factor == pytest.approx(-841.3, abs=0.05)
    assert found.of("X2").log_bayes_factor == pytest.approx(-342.8, abs=0.05)
    assert found.best is None and not found.trusted
    assert [found.holds(*s) for s in (CAUSE, EFFECT, BOTH)] == ["mean shared", "nothing shared", "nothing shared"]
    assert found.probabilities("X1")["mean"] > 0.99 and found.probabilities("X2")["nothing"] > 0.99
    assert found.column_probabilities["X1"] < 1e-6 and found.probability_of_none > 0.99


def test_nothing_is_shared_where_the_cause_is_missing():
    x, y, environment = three_environments(1)
    y = y + 3.0 * (environment == "b")
    with pytest.warns(DataWarning, match="nor a mean: a cause may be missing"):
        found = invariant_subsets(x, y, environment)
    assert found.best is None and {found.holds(*z.subset) for z in found} == {"nothing shared"}


def with_exact_moments(covariances, num_rows):
    """Data whose second moments in each environment are exactly those given."""
    rng = np.random.default_rng(2)
    tables = []
    for covariance in covariances:
        z = rng.standard_normal((num_rows, len(covariance)))
        z = np.linalg.qr(z - z.mean(0))[0] * math.sqrt(num_rows)
        tables.append(z @ np.linalg.cholesky(covariance).T)
    table = np.concatenate(tables)
    return table[:, :-1], table[:, -1], np.repeat(np.arange(len(covariances)), num_rows)


def residual_variance(covariance, subset):
    s = list(subset)
    inner = covariance[np.ix_(s, s)]
    return (
        covariance[-1, -1] - covariance[-1, s] @ np.linalg.solve(inner, covariance[s, -1]) if s else covariance[-1, -1]
    )


def test_bayes_factors_tend_to_mutual_information():
    num_rows = 20_000
    covariances = [
        np.array([[v, v, v], [v, 2 * v + 1, v + 1], [v, v + 1, v + 1]]) for v in (spread**2 for spread in SPREADS)
    ]
    found = named(*with_exact_moments(covariances, num_rows))
    pooled, total = np.mean(covariances, 0), 3 * num_rows
    wanted = {NOTHING: 0.0848, CAUSE: 0.0, EFFECT: 0.2295, BOTH: 0.1950}
    for subset, information in wanted.items():
        columns = [BOTH.index(name) for name in subset]
        each = [math.log(residual_variance(covariance, columns)) for covariance in covariances]
        truth = 0.5 * (math.log(residual_variance(pooled, columns)) - np.mean(each))
        assert truth == pytest.approx(information, abs=5e-5)
        # Two more regressions of len(subset) + 2 parameters: each costs half a log of its rows, and the prior.
        penalty = (len(subset) + 2) * math.log(num_rows)
        assert abs(-found.of(*subset).log_bayes_factor / total - truth) < 3 * penalty / total < 0.002


# Invariances.


def test_units_order_and_labels_do_not_matter():
    x, y, environment = three_environments(3, num_rows=60)
    found = named(x, y, environment)
    order = np.random.default_rng(0).permutation(len(y))
    labels = {"a": ("first", 1), "b": 2.5, "c": "third"}
    other = named(torch.tensor(x * [1e3, -2.0] + 5.0)[order], 7.0 * y[order], [labels[e] for e in environment[order]])
    for z, w in zip(found, other, strict=True):
        assert w.log_bayes_factor == pytest.approx(z.log_bayes_factor, abs=1e-7)
        assert w.shared == pytest.approx(z.shared - len(y) * math.log(7.0), abs=1e-7)
    assert other.num_rows == {("first", 1): 60, 2.5: 60, "third": 60}
    again = named(x, y, environment)
    assert again == found


def test_names_and_labels_come_from_tables():
    x, y, environment = three_environments(3, num_rows=60)
    table = pd.DataFrame({"dose": x[:, 0], "marker": x[:, 1], "y": y, "site": pd.Categorical(environment)})
    found = quietly(table[["dose", "marker"]], table["y"], table["site"])
    assert found.columns == ("dose", "marker") and list(found.num_rows) == ["a", "b", "c"]
    assert [z.subset for z in found] == [(), ("dose",), ("marker",), ("dose", "marker")]
    single = quietly(
        torch.tensor(x, dtype=torch.float32), torch.tensor(y), torch.tensor([0, 1, 2]).repeat_interleave(60)
    )
    assert single.columns == ("x0", "x1")
    assert single.of("x0").shared == pytest.approx(found.of("dose").shared, abs=1e-2)


def test_prior_probabilities_of_hypotheses():
    data = three_environments(0, num_rows=40)
    found = named(*data, prior_probabilities={"mechanism": 3, "mean": 0, "nothing": 1})
    assert found.prior_probabilities == {"mechanism": 0.75, "mean": 0.0, "nothing": 0.25}
    for z in found:
        odds = math.exp(z.log_bayes_factor) * 3
        assert found.probabilities(*z.subset)["mechanism"] == pytest.approx(odds / (1 + odds))
        assert found.probabilities(*z.subset)["mean"] == 0


def test_common_columns_against_a_list_of_all_events():
    rng = np.random.default_rng(6)
    columns = ("a", "b", "c")
    subsets = [s for size in range(4) for s in itertools.combinations(columns, size)]
    factors = dict(zip(subsets, rng.normal(-1.5, 2.0, 8), strict=True))
    found = InvariantSubsets(
        tuple(SubsetEvidence(s, factors[s], -2.0, 0.0, 0.0, 2000.0) for s in reversed(subsets)), columns, {0: 9, 1: 9}
    )
    p = {s: math.exp(g) / (math.exp(g) + math.exp(-2.0) + 1) for s, g in factors.items()}
    wanted, none = dict.fromkeys(subsets, 0.0), 0.0
    for event in itertools.product([False, True], repeat=8):
        weight = math.prod(p[s] if is_shared else 1 - p[s] for s, is_shared in zip(subsets, event, strict=True))
        shared = [set(s) for s, is_shared in zip(subsets, event, strict=True) if is_shared]
        if shared:
            wanted[tuple(name for name in columns if all(name in s for s in shared))] += weight
        else:
            none += weight
    assert found.posterior_probabilities == pytest.approx(wanted, abs=1e-12)
    assert found.probability_of_none == pytest.approx(none, abs=1e-12)
    for name, q in found.column_probabilities.items():
        assert q == pytest.approx(sum(w for s, w in wanted.items() if name in s), abs=1e-12)


# How it is told.


def example(rows=None, **changes):
    numbers = {
        (): (-140.0, -128.0, 0.0, -120.0, 2000.0),
        ("a",): (-100.0, -104.0, 0.01, -109.0, 1500.0),
        ("b",): (-130.5, -114.0, 0.01, -109.0, 1500.0),
        ("a", "b"): (-100.5, -104.0, 0.01, -109.0, 1500.0),
    } | (rows or {})
    found = tuple(SubsetEvidence(subset, *row) for subset, row in numbers.items())
    return InvariantSubsets(found, ("a", "b"), {"one": 50, "two": 50}, **changes)


def test_what_is_not_settled_is_said():
    assert example().best == ("a",) and example().trusted
    found = example({("b",): (-110.0, -114.0, 0.01, -109.0, 1500.0)})
    assert found.best == ("a",) and not found.trusted
    assert "is not settled: {a} has probability 0.7" in found.warnings[0] and "and {} has 0.2" in found.warnings[0]
    few = example({("b",): (-130.0, -104.0, 0.5, -100.0, 30.0)}, remarks=("a remark",))
    assert few.warnings == (
        "a remark",
        "the evidence of a shared mean rests on 30 effective draws for {b}: raise num_draws",
    )
    with pytest.raises(SettingsError, match="those of all 4 subsets"):
        InvariantSubsets(found.evidences[:3], ("a", "b"), {"one": 50, "two": 50})


def test_table_plot_and_texts(tmp_path):
    found = named(*three_environments(0))
    table = found.to_pandas()
    assert list(table["subset"]) == ["{X1}", "{}", "{X1, X2}", "{X2}"]
    assert table["log_bayes_factor"].is_monotonic_decreasing
    parts = table[["probability_of_mechanism", "probability_of_mean", "probability_of_nothing"]].sum(axis=1)
    assert np.allclose(parts, 1) and table["probability_of_common"].sum() + found.probability_of_none == pytest.approx(
        1
    )
    found.to_csv(tmp_path / "found.csv")
    assert pd.read_csv(tmp_path / "found.csv")["holds"][0] == "mechanism shared"
    axes = found.plot()
    assert [label.get_text() for label in axes.get_yticklabels()][0] == "{X1}: mechanism shared"
    assert len(axes.patches) == 8
    assert str(found) == repr(found)
    assert str(found).startswith("1 of 4 subsets have a mechanism that 3 environments share; in common: {X1}, prob")
    assert "mean shared" in found._repr_html_()
    with pytest.raises(UnknownNameError, match="no column is called 'X3'; there are: X1, X2"):
        found.of("X3")


def test_dependent_columns_are_said():
    x, y, environment = three_environments(0, num_rows=50)
    with pytest.warns(DataWarning) as caught:
        found = invariant_subsets(np.stack([x[:, 0], 2 * x[:, 0] + 1], 1), y, environment)
    assert any("linearly dependent" in str(warning.message) for warning in caught)
    assert found.of("x0").log_bayes_factor == pytest.approx(found.of("x1").log_bayes_factor) and not found.trusted


# Bad input.

X, Y, E = three_environments(0, num_rows=10)


def changed(array, value, *place):
    array = array.astype(object if value is None else float)
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((changed(X, np.nan, 3, 1), Y, E), DataError, r"x\[3, 1\] is nan: 1 of 60"),
        ((changed(X, None, 3, 1), Y, E), DataError, r"x\[3, 1\] is nan"),
        ((X, changed(Y, np.inf, 4), E), DataError, r"y\[4\] is inf"),
        ((X, Y, ["a"] * 30), DataError, "all rows are of environment 'a'"),
        ((changed(X, 2.0, slice(None), 0), Y, E), DataError, r"column 'x0' of x is constant \(2\) in all 30 rows"),
        ((X, np.ones(30), E), DataError, "y is constant"),
        ((X * 1e200, Y, E), DataError, "too far to be squared"),
        ((X + 1j, Y, E), DataError, "x is an array of complex128"),
        ((torch.tensor(X) + 1j, Y, E), DataError, "complex"),
        ((X.astype(str), Y, E), DataError, "not numbers"),
        ((np.tile(X, 7)[:, :13], Y, E), SettingsError, r"13 columns, which have 8,192 subsets; give at most 12"),
        ((X, Y, ["a"] * 27 + ["b"] * 3), DataError, "environment 'b' has 3 rows, fewer than the 4 parameters"),
        ((np.tile(X, 6), Y, E), DataError, "environment 'a' has 10 rows, fewer than the 14 parameters"),
        ((X[:, 0], Y, E), ShapeError, r"not of shape \(30,\); give one column as x\[:, None\]"),
        ((X[:, :0], Y, E), ShapeError, "x must be a matrix"),
        ((X[:0], Y[:0], []), ShapeError, "x must be a matrix"),
        ((X, Y[:, None], E), ShapeError, "y must be a vector"),
        ((X, Y[:29], E), ShapeError, "x has 30 rows, y has 29 entries and environment has 30 labels"),
        ((X, Y, E[:29]), ShapeError, "environment has 29 labels"),
        ((X, Y, "a"), ShapeError, "environment must be a list of labels, one for each row, not a str"),
        ((X, Y, 3), ShapeError, "not a int"),
        ((X, Y, None), ShapeError, "not a NoneType"),
        ((X, Y, [*E[:29], None]), DataError, r"environment\[29\] is missing \(None\)"),
        ((X, Y, [*E[:29], math.nan]), DataError, r"environment\[29\] is missing \(nan\)"),
        ((X, Y, [*E[:29], pd.NA]), DataError, r"environment\[29\] is of type NAType"),
        ((X, Y, [*E[:29], [1]]), DataError, r"environment\[29\] is of type list, which is no label"),
        ((X, Y, np.ones((30, 2))), DataError, r"environment\[0\] is of type list"),
    ],
)
def test_bad_data_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        invariant_subsets(*arguments)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"names": ["a"]}, "names must be 2 different texts"),
        ({"names": ["a", "a"]}, "names must be 2 different texts"),
        ({"names": "ab"}, "names must be"),
        ({"num_draws": 10}, "num_draws must be at least 100"),
        ({"prior_probabilities": {"mechanism": 1}}, "a dict of numbers for mechanism, mean, nothing"),
        ({"prior_probabilities": dict.fromkeys(("mechanism", "mean", "nothing"), 0)}, "one of them positive"),
    ],
)
def test_bad_settings_are_named(settings, match):
    with pytest.raises(SettingsError, match=match):
        invariant_subsets(X, Y, E, **settings)


@pytest.mark.parametrize("name", ["coefficient_sd", "noise_shape", "noise_scale"])
@pytest.mark.parametrize("value", [0, -1.0, 1e300, 1e-300, math.inf, math.nan])
def test_bad_priors_are_named(name, value):
    with pytest.raises(SettingsError, match=name):
        RegressionPrior(**{name: value})


def test_every_subset_has_its_row():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 6))
    found = quietly(x, x[:, 0] + rng.standard_normal(60), [0, 1] * 30, num_draws=100)
    assert len(found.evidences) == 64
    assert {len(z.subset) for z in found} == set(range(7))
    assert [z.subset for z in found] == [s for k in range(7) for s in itertools.combinations(found.columns, k)]
