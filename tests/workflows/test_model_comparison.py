"""Bayes factors and posterior probabilities against closed forms."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy.special import logit
from scipy.stats import chi2, norm

from bayeskit import exact
from bayeskit.errors import CheckpointError, SamplingWarning, SettingsError, UnknownNameError
from bayeskit.inference.evidence import Budget, Evidence, EvidenceComparison
from bayeskit.workflows import _bayes_factors as module
from bayeskit.workflows._bayes_factors import ModelComparison, compare_models

SMALL = Budget(8, 150, 150)
TINY = Budget(4, 30, 40)  # for what holds to the last bit
SUBSETS = {
    "all ten": range(10),
    "without the last": range(9),
    "without the first": range(1, 10),
    "first five": range(5),
}


@functools.cache
def regression(name):
    """The closed form for some columns of linreg10."""
    design, response = exact.get("linreg10").args[:2]
    return exact.linear_regression(design[:, list(SUBSETS[name])], response)


def exact_probabilities(weights):
    log_evidence = torch.tensor([regression(name).log_evidence for name in SUBSETS], dtype=torch.float64)
    return dict(zip(SUBSETS, (log_evidence + torch.tensor(weights).double().log()).softmax(0).tolist(), strict=True))


@pytest.fixture(scope="module")
def models():
    return {name: regression(name).target for name in SUBSETS}


def quietly_compared(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return compare_models(*args, **kwargs)


@pytest.fixture(scope="module")
def comparison(models):
    return quietly_compared(models, budget=SMALL, seed=1, progress=False)


@pytest.fixture(scope="module")
def tiny_comparison(models):
    return quietly_compared(models, budget=TINY, seed=1, progress=False)


@pytest.mark.long
def test_radiata_pine(limit):
    cases = {"density": exact.radiata_pine("x"), "adjusted": exact.radiata_pine("z")}
    result = compare_models({name: case.target() for name, case in cases.items()}, budget=SMALL, progress=False)
    truth = cases["density"].log_evidence - cases["adjusted"].log_evidence
    factor, error = result.log_bayes_factor("density", "adjusted")
    assert result.best == "adjusted" and not result.warnings
    assert error < 0.05 and abs(factor - truth) < limit() * error
    assert result.log_bayes_factor("adjusted", "density") == (-factor, error)
    p, p_error = result.posterior_probabilities["density"]
    assert abs(p - 1 / (1 + math.exp(-truth))) < limit() * p_error


@pytest.mark.calibration
def test_subsets_of_a_regression(comparison, limit):
    truth = {name: regression(name).log_evidence for name in SUBSETS}
    best = max(truth, key=truth.get)
    table = comparison.to_pandas().set_index("model")
    assert comparison.best == table.index[0] == best
    assert table["log_evidence"].is_monotonic_decreasing and table["trusted"].all()
    z = [(row.log_evidence - truth[name]) / row.standard_error for name, row in table.iterrows()]
    assert max(map(abs, z)) < limit(4), z
    for name, probability in exact_probabilities([1.0] * 4).items():
        row = table.loc[name]
        if name != best:
            off = row["log_bayes_factor"] - (truth[name] - truth[best])
            assert abs(off) < limit(4) * row["log_bayes_factor_error"]
        assert abs(row["posterior_probability"] - probability) < limit(4) * row["posterior_probability_error"] + 1e-12
    assert table["posterior_probability"].sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.calibration
def test_prior_probabilities_weigh(comparison):
    weights = [1.0, 3.0, 0.0, 4.0]
    perfect = {name: Evidence("closed form", regression(name).log_evidence, 0.0, 0) for name in SUBSETS}
    weighed = ModelComparison(perfect, dict(zip(SUBSETS, weights, strict=True)))
    assert sum(weighed.prior_probabilities.values()) == pytest.approx(1, abs=1e-15)
    result = weighed.posterior_probabilities
    for name, probability in exact_probabilities(weights).items():
        assert result[name] == (pytest.approx(probability, abs=1e-12), 0.0)


def scatter_of_probabilities(spread_of, count=4000):
    """Return the variance of each probability over noisy log evidences, relative to what is claimed."""
    log_evidence, error = np.array([-10.0, -10.5, -11.0, -14.0]), np.array([0.02, 0.05, 0.01, 0.03])
    names = [f"m{i}" for i in range(4)]

    def comparison(values):
        results = {n: Evidence("smc", float(v), float(e), 1) for n, v, e in zip(names, values, error, strict=True)}
        return ModelComparison(results, dict.fromkeys(names, 0.25))

    noisy = np.random.default_rng(0).normal(log_evidence, error, (count, 4))
    weights = np.exp(noisy - noisy.max(1, keepdims=True))
    p = weights / weights.sum(1, keepdims=True)
    return p.var(0, ddof=1) / np.array(spread_of(comparison(log_evidence))) ** 2, count


def within(ratio, count):
    low, high = chi2.ppf([0.5e-5 / 4, 1 - 0.5e-5 / 4], count - 1) / (count - 1)
    return bool(((ratio > 0.98 * low) & (ratio < 1.02 * high)).all())  # the first order leaves 1 % here


def test_errors_of_probabilities_are_those_of_repeated_estimates():
    claimed = scatter_of_probabilities(lambda c: [error for _, error in c.posterior_probabilities.values()])
    assert within(*claimed)

    def alone(comparison):
        """The mutation: the other models' errors are forgotten."""
        found = comparison.posterior_probabilities
        return [p * (1 - p) * comparison[name].standard_error for name, (p, _) in found.items()]

    assert not within(*scatter_of_probabilities(alone))


def pair(errors, difference=10.0):
    results = {"a": result("smc", -100.0, errors[0]), "b": result("smc", -100.0 - difference, errors[1])}
    return ModelComparison(results, {"a": 0.5, "b": 0.5})


@pytest.mark.parametrize(("errors", "difference"), [((5.0, 0.1), 10.0), ((1.0, 1.0), 0.0), ((2.0, 0.5), 3.0)])
def test_large_errors_of_log_evidences_are_not_lost_in_a_first_order(errors, difference, limit):
    """The difference is normal, so that moments of its logistic function are integrals over one variable."""
    x, w = np.polynomial.hermite_e.hermegauss(200)
    w = w / w.sum()
    half = math.hypot(*errors)
    p = 1 / (1 + np.exp(-(difference + half * x)))
    second, fourth = (w @ (p - w @ p) ** power for power in (2, 4))
    relative = math.sqrt((fourth / second**2 - 1) / (4 * 10_000))  # error of a standard deviation of 10,000 pairs
    found = pair(errors, difference)
    for name in "ab":
        assert abs(found.posterior_probabilities[name][1] / math.sqrt(second) - 1) < limit(3) * relative
    assert found.posterior_probabilities["a"][0] == pytest.approx(1 / (1 + math.exp(-difference)), abs=1e-12)
    ends = (logit(found.posterior_intervals["a"]) - difference) / half
    error = math.sqrt(0.025 * 0.975 / 20_000) / norm.pdf(1.96)  # of a quantile of both halves of the pairs
    assert np.abs(ends - [-1.96, 1.96]).max() < limit(6) * error
    assert any("posterior_intervals" in warning for warning in found.warnings)
    assert not any("posterior_intervals" in warning for warning in pair((0.4, 0.4)).warnings)


def test_an_unknown_error_does_not_spoil_the_others(limit):
    results = {
        "a": result("smc", -10.0, 0.1),
        "b": result("laplace", -11.0, math.nan, ("unknown error",)),
        "c": result("laplace", -12.0, math.nan, ("unknown error",)),
    }
    found = ModelComparison(results, dict.fromkeys(results, 1 / 3))
    p, error = found.posterior_probabilities["a"]
    assert error == pytest.approx(p * (1 - p) * 0.1, rel=limit() / math.sqrt(2 * 10_000))  # of pairs
    assert all(math.isnan(found.posterior_probabilities[name][1]) for name in "bc")
    assert math.isfinite(found.posterior_probabilities["b"][0])
    (said,) = found.warnings
    assert "models 'b', 'c' " in said and "unknown error" in said and "Bayes factors against it have no error" in said


def test_a_method_that_does_not_apply_is_refused_before_any_model_is_estimated(monkeypatch):
    def forbidden(*args, **kwargs):
        raise RuntimeError("estimated before the models were checked")

    monkeypatch.setattr(module, "compare", forbidden)
    positive, real = exact.get("three_taxon_tree").target, regression("first five").target
    with pytest.raises(SettingsError, match="does not apply to model 'real'"):
        compare_models({"positive": positive, "real": real}, "gamma_laplus_importance_sampling", progress=False)
    logistic = exact.get("pima_m1").target
    with pytest.raises(SettingsError, match="chib does not apply to model 'two'"):
        compare_models({"one": real(), "two": logistic()}, "chib", progress=False)
    with pytest.raises(SettingsError, match="predictive score"):
        compare_models({"one": real(), "two": real()}, "pointwise_predictive_density", progress=False)


@pytest.mark.calibration
def test_processes_and_the_company_of_other_models_do_not_change_an_estimate(tiny_comparison):
    two = {name: regression(name).target() for name in ("first five", "all ten")}
    for target in two.values():
        target.compile = False
        target.value_and_grad(torch.zeros(TINY.num_chains, target.dim, dtype=torch.float64))  # used before
    parallel = quietly_compared(two, budget=TINY, seed=1, num_jobs=2, progress=False)
    for name in two:
        assert parallel[name].log_evidence == tiny_comparison[name].log_evidence
        assert parallel[name].standard_error == tiny_comparison[name].standard_error


@pytest.mark.calibration
def test_a_comparison_goes_on_where_it_stopped(models, tiny_comparison, tmp_path, monkeypatch):
    folder, calls, original = tmp_path / "run", [], module.compare

    def fails_at_the_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            original(*args, **kwargs)  # leaves its run behind
            raise ArithmeticError
        return original(*args, **kwargs)

    settings = {"budget": TINY, "seed": 1, "checkpoint": folder, "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(module, "compare", fails_at_the_third)
        with pytest.raises(ArithmeticError) as caught:
            compare_models(models, **settings)
        assert caught.value.__notes__ == ["raised by task 2: model 'without the first'"]
        assert (folder / "model-002.posterior").exists()
        resumed = quietly_compared(models, **settings)
    assert len(calls) == 5
    assert all(resumed[name].log_evidence == tiny_comparison[name].log_evidence for name in models)
    assert not list(folder.glob("model-*"))
    with pytest.raises(CheckpointError, match="another task 0"):
        compare_models(models, **settings | {"seed": 2})


@pytest.mark.calibration
def test_a_comparison_of_other_models_is_not_taken_for_this_one(tmp_path):
    settings = {"budget": TINY, "checkpoint": tmp_path, "progress": False}
    second = exact.radiata_pine("z").target()
    quietly_compared({"one": lambda: exact.radiata_pine("x").target(), "two": second}, **settings)
    with pytest.raises(CheckpointError, match="another task 0"):
        compare_models({"one": lambda: exact.radiata_pine("z").target(), "two": second}, **settings)


def result(name, value, error, problem=()):
    return Evidence(name, value, error, 10, problem)


def doubtful():
    results = {
        "a": result("smc", -10.0, 0.2),
        "b": result("smc", -10.3, 0.2),
        "c": result("smc", -20.0, 0.2, ("chains disagree: run longer",)),
        "d": result("smc", math.nan, math.nan, ("failed: no start",)),
    }
    return ModelComparison(results, dict.fromkeys(results, 0.25))


def test_doubts_are_said():
    said = doubtful().warnings
    assert len(said) == 3
    assert "model 'c' is not trusted: chains disagree" in said[0] and "'d'" in said[1]
    assert "models 'a' and 'b' are not distinguished: their log Bayes factor is 0.3 +- 0.28" in said[2]
    p = doubtful().posterior_probabilities
    assert math.isnan(p["d"][0]) and p["a"][0] + p["b"][0] + p["c"][0] == pytest.approx(1)
    assert str(doubtful()).count("\n") == 6


def test_a_tie_is_no_matter_of_budget():
    for error, remedy in (
        (0.2, "give a larger budget"),
        (0.01, "the models are tied: a larger budget does not help, but other data may"),
    ):
        results = {"a": result("smc", -10.0, error), "b": result("smc", -10.0 - error / 2, error)}
        (said,) = ModelComparison(results, dict.fromkeys(results, 0.5)).warnings
        assert said.endswith(f"; {remedy}")


def test_a_doubt_that_many_models_share_is_said_once():
    rough = {f"m{i}": result("smc", -10.0 * i, 2.0 + i) for i in range(8)}
    results = rough | {f"n{i}": result("laplace", -900.0, math.nan, ("unknown error",)) for i in range(8)}
    said = ModelComparison(results, dict.fromkeys(results, 1 / 16)).warnings
    assert [warning.count("and 3 more") for warning in said] == [1, 1] and "is 9 at worst" in said[1]


@pytest.mark.calibration
def test_doubts_are_warned_of():
    same = {"one": regression("first five").target, "two": regression("first five").target}
    with pytest.warns(SamplingWarning, match="not distinguished"):
        compare_models(same, budget=SMALL, progress=False)
    with pytest.warns(SamplingWarning, match="no error") as told:
        compare_models(same, "laplace", progress=False)
    assert len(told) == 1


@pytest.mark.calibration
def test_the_plot_and_the_file(comparison, tmp_path):
    axes = comparison.plot(Figure().subplots())
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == 4 and labels[0].startswith(f"{comparison.best}, p = ")
    circles = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(c.get_xdata()[0]) for c in circles] == comparison.to_pandas()["log_bayes_factor"].tolist()
    hollow = doubtful().plot(Figure().subplots())
    assert [label.get_text() for label in hollow.get_yticklabels()][2:] == [
        "c, p = 2.6e-05 (not trusted)",
        "d (failed)",
    ]
    assert [line.get_mfc() for line in hollow.lines if line.get_marker() == "o"][2] == "white"
    comparison.to_csv(tmp_path / "models.csv")
    assert (tmp_path / "models.csv").read_text(encoding="utf-8").splitlines()[0].startswith("model,log_evidence,")


def test_bad_input_is_named(models):
    with pytest.raises(SettingsError, match="at least two models"):
        compare_models({"one": models["all ten"]})
    with pytest.raises(SettingsError, match="model 'b' is a float"):
        compare_models({"a": models["all ten"], "b": 1.0})
    with pytest.raises(SettingsError, match="returned a int"):
        compare_models({"a": lambda: 3, "b": lambda: 4}, progress=False)
    with pytest.raises(UnknownNameError, match="did you mean 'bridge_sampling'"):
        compare_models(models, "bridge")
    for weights in ({"all ten": 1.0}, dict.fromkeys(models, 0.0), dict.fromkeys(models, -1.0)):
        with pytest.raises(SettingsError, match="prior_probabilities must give each"):
            compare_models(models, prior_probabilities=weights)
    with pytest.raises(SettingsError, match="models must be a dict of targets by name, not a list"):
        compare_models(list(models.values()))
    with pytest.raises(SettingsError, match="prior_probabilities must be a dict of numbers by model, not a list"):
        compare_models(models, prior_probabilities=[0.25] * 4)
    with pytest.raises(SettingsError, match="the prior probability of 'all ten' must be a number, not 'x'"):
        compare_models(models, prior_probabilities={"all ten": "x"})
    with pytest.raises(SettingsError, match=r"num_jobs must be a whole number .* not 1\.5"):
        compare_models(models, num_jobs=1.5)
    with pytest.raises(UnknownNameError, match="no model is called 'x'"):
        doubtful()["x"]
    assert list(doubtful()) == ["a", "b", "c", "d"]


def table(*estimates):
    return EvidenceComparison({z.method: z for z in estimates}, None, None)


def test_models_are_compared_by_what_several_methods_together_say():
    agreed = table(Evidence("a", -10.0, 0.01, 1), Evidence("b", -10.02, 0.03, 1))
    torn = table(Evidence("a", -12.0, 0.01, 1), Evidence("b", -13.0, 0.01, 1))
    unknown = table(Evidence("a", -9.0, 0.01, 1, ("weights dominate",)))
    found = ModelComparison.from_comparisons({"x": agreed, "y": torn, "z": unknown}, {"x": 1, "y": 2, "z": 1})
    assert found["x"] is agreed["a"] and found["x"].trusted
    assert not found["y"].trusted and "disagree" in found["y"].warnings[0]
    assert math.isnan(found["z"].log_evidence) and "weights dominate" in found["z"].warnings[0]
    assert found.best == "x" and found.prior_probabilities == {"x": 0.25, "y": 0.5, "z": 0.25}
    assert math.isnan(found["y"].standard_error) and math.isnan(found.posterior_probabilities["z"][0])
    assert [w for w in found.warnings if "'y'" in w] and [w for w in found.warnings if "'z'" in w]
    outvoted = table(*(Evidence(name, -10.0, 0.01, 1) for name in "ab"), Evidence("c", -11.0, 0.02, 1))
    assert ModelComparison.from_comparisons({"x": outvoted})["x"].trusted  # one in a hundred tables has such a method
    for wrong in ([agreed], {"x": agreed["a"]}):
        with pytest.raises(SettingsError, match="EvidenceComparison"):
            ModelComparison.from_comparisons(wrong)
    for priors in (3, "xy", [("x", 1), ("y", 2)], {"x": 1.0}):
        with pytest.raises(SettingsError, match="prior_probabilities must"):
            ModelComparison.from_comparisons({"x": agreed, "y": torn}, priors)
    with pytest.raises(SettingsError, match="at least one model"):
        ModelComparison.from_comparisons({})


def test_finished_results_are_checked():
    one, two = Evidence("a", -10.0, 0.01, 1), Evidence("a", -12.0, 0.01, 1)
    assert ModelComparison({"x": one, "y": two}).prior_probabilities == {"x": 0.5, "y": 0.5}
    for results, priors, said in (
        ({"x": table(one), "y": two}, {}, "use ModelComparison.from_comparisons"),
        ({"x": -10.0, "y": two}, {}, "the result of model 'x' is a float"),
        ({}, {}, "at least one model"),
        ({"x": one, "y": two}, {"x": 1.0}, "each of the models x, y"),
        ({"x": one, "y": two}, {"x": -1.0, "y": 2.0}, "nonnegative"),
        ({"x": one, "y": two}, [], "must be a dict"),
        ({1: one, 2: two}, {1: 1.0}, "each of the models 1, 2"),
        ({"x": one, "y": two}, {"x": "much", "y": 2.0}, "the prior probability of 'x'"),
    ):
        with pytest.raises(SettingsError, match=said):
            ModelComparison(results, priors)
