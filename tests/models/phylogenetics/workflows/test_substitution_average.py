"""Averages over substitution models against quadrature by another likelihood, and by an identity of nested models."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from quartet_quadrature import exact
from scipy.stats import chi2

import bayeskit as bk
from bayeskit.errors import ConversionWarning, SamplingWarning, SettingsError, TreeError, UnknownNameError
from bayeskit.models.phylogenetics import (
    K80,
    Alignment,
    GammaRates,
    GTRSubmodel,
    Mk,
    Tree,
    TreeModel,
    all_reversible_models,
    primates,
)
from bayeskit.models.phylogenetics.workflows import _substitution_average as substitution_average
from bayeskit.models.phylogenetics.workflows import average_substitution_models

DOUBLE = torch.float64
EIGHT = Alignment.from_sequences({"A": "CCTCATCG", "B": "CCTCATCT", "C": "CCAGTGAT", "D": "GCAGTGCC"})
TREE = Tree.from_newick("((A,B),C,D);")
#: A model of each number of classes up to three, one with free frequencies, and one with rates of sites.
MODELS = {
    "000000+FQ": {"partition": "000000"},
    "000000+FQ+G2": {"partition": "000000", "gamma": True},
    "010010+FQ": {"partition": "010010"},
    "K81": {"partition": "012210"},
    "F81": {"partition": "000000", "free_frequencies": True},
}


def averaged(*arguments, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return average_substitution_models(*arguments, progress=False, **settings)


@pytest.fixture(scope="module")
def truth():
    """Probabilities of the models, and means over them of exchangeabilities, frequencies and the inner length."""
    found = [exact(EIGHT, **arguments) for arguments in MODELS.values()]
    p = torch.tensor([one.log_evidence for one in found], dtype=DOUBLE).softmax(0)
    means = [torch.cat([one.exchangeabilities, one.frequencies, p.new_tensor([one.inner_length])]) for one in found]
    return [one.log_evidence for one in found], p, p @ torch.stack(means)


def means_of(found):
    inner = [place for place, name in enumerate(found.tree.edge_names) if "," in name or "|" in name][-1]
    columns = (
        (found.exchangeabilities, found.exchangeability_errors),
        (found.frequencies, found.frequency_errors),
        (found.branch_lengths[inner:], found.branch_length_errors[inner:]),
    )
    return (torch.cat(column) for column in zip(*columns, strict=True))


@pytest.mark.calibration
def test_probabilities_and_averages_are_exact(truth, limit):
    log_evidence, p, means = truth
    found = averaged(EIGHT, TREE, list(MODELS), num_draws=10_000)
    for exact_value, z in zip(log_evidence, found.comparison.results.values(), strict=True):
        assert z.trusted and z.standard_error < 0.03
        assert abs(z.log_evidence - exact_value) < limit(5) * z.standard_error
    for exact_value, (value, error) in zip(p.tolist(), found.posterior_probabilities.values(), strict=True):
        assert abs(value - exact_value) < limit(5) * error and error < 0.01
    values, errors = means_of(found)
    assert ((values - means).abs() < limit(len(means)) * errors).all() and errors.max() < 0.01
    assert found.exchangeabilities.sum() == pytest.approx(1) and found.frequencies.sum() == pytest.approx(1)
    # A-C and C-G are one rate but under K81, A-C and A-G under neither K80 nor K81.
    assert found.probability_of_equal("A-C", "C-G").value == pytest.approx(1 - found.posterior_probabilities["K81"][0])
    value, error = found.probability_of_equal("A-C", "A-G")
    assert abs(value - float(1 - p[2] - p[3])) < limit() * error and error < 0.01
    assert found.tree.branch_lengths is not None and found.tree.to_newick().count("(") == 2


@pytest.mark.calibration
def test_draws_without_their_weights_are_noticed(truth, limit, monkeypatch):
    original = substitution_average._Moments.of
    monkeypatch.setattr(
        substitution_average._Moments, "of", lambda features, w: original(features, torch.zeros_like(w))
    )
    values, errors = means_of(averaged(EIGHT, TREE, list(MODELS), num_draws=3000))
    assert ((values - truth[2]).abs() > limit(len(values)) * errors).any()


@pytest.mark.calibration
def test_errors_are_neither_too_small_nor_too_large(monkeypatch):
    """Of the mean of a rate and a length over seeds, and of the probability of equal rates."""
    models = {"000000+FQ": MODELS["000000+FQ"], "010010+FQ": MODELS["010010+FQ"]}
    one, other = (exact(EIGHT, **arguments) for arguments in models.values())
    p = 1 / (1 + math.exp(other.log_evidence - one.log_evidence))
    means = torch.tensor([[x.exchangeabilities[1], x.inner_length, x is one] for x in (one, other)], dtype=DOUBLE)
    truth = means.mT @ torch.tensor([p, 1 - p], dtype=DOUBLE)
    z = []

    def found_once(*arguments):
        first.extend(() if first else [original(*arguments)])
        return first[0]

    first, original = [], substitution_average._modes
    monkeypatch.setattr(substitution_average, "_modes", found_once)
    for seed in range(25):
        found = averaged(EIGHT, TREE, list(models), num_draws=1000, seed=seed)
        values, errors = means_of(found)
        chance, error = found.probability_of_equal("A-C", "A-G")
        values, errors = (torch.tensor([x[1], x[-1], y]) for x, y in ((values, chance), (errors, error)))
        z.append((values - truth) / errors)
    for sum_of_squares in torch.stack(z).square().sum(0).tolist():
        assert chi2.isf(1 - 1.6e-6, len(z)) < sum_of_squares < chi2.isf(1.6e-6, len(z))


@pytest.mark.calibration
def test_a_narrow_prior_is_a_ratio_of_densities_at_draws_of_a_wide_one(limit):
    """The ratio of Savage and Dickey, of which a narrow prior is the limit; the draws are those of HMC."""
    narrow, wide = (dist.LogNormal(*torch.tensor(one, dtype=DOUBLE)) for one in ([0.0, 0.2], [1.0, 1.25]))
    models = {"narrow": K80(narrow), "wide": K80(wide)}
    found = averaged(EIGHT, TREE, models, num_draws=10_000)
    draws = bk.sample(TreeModel(EIGHT, TREE, K80(wide)), num_chains=32, num_warmup=150, num_samples=150, progress=False)
    ratios = (narrow.log_prob(draws["kappa"]) - wide.log_prob(draws["kappa"])).exp().mean(1)  # one of each chain
    ratio, error = float(ratios.mean()), float(ratios.std()) / math.sqrt(len(ratios))
    factor, factor_error = found.comparison.log_bayes_factor("narrow", "wide")
    assert error / ratio < 0.1
    assert abs(math.exp(factor) - ratio) < limit(dof=31) * math.hypot(error, math.exp(factor) * factor_error)


def test_all_reversible_models_are_the_default():
    """Of the primates, for which the transitions are at one rate or at two, and no transversion is at theirs."""
    asked = substitution_average._chosen(None, EIGHT, GammaRates())
    assert tuple(asked) == all_reversible_models() and len(asked) == 203
    assert all(isinstance(rates, GammaRates) for _, rates in asked.values())
    alignment, tree = primates()
    codes = ["000000", "010010", "010020", "012343", "012345"]
    found = averaged(alignment, tree, codes, num_draws=1000)
    assert found.comparison.best == "012343" and found.exchangeabilities[4] > 0.4
    assert found.probability_of_equal("A-G", "A-C").value < 1e-6


@pytest.mark.calibration
@pytest.mark.parametrize("place", range(3))
def test_a_search_from_another_models_mode_finds_the_mode(place):
    alignment, tree = primates()
    name = ["HKY85", "012314", "F81"][place]
    cold, warm = (averaged(alignment, tree, [name, other], num_draws=20) for other in ("JC69", "GTR"))
    value = [one.comparison[name].diagnostics["log_density_at_the_mode"] for one in (cold, warm)]
    assert value[0] == pytest.approx(value[1], abs=1e-5)


def test_prior_probabilities_and_names():
    found = averaged(EIGHT, TREE, ["JC69", "K80", "K80+G2"], num_draws=500, prior_probabilities={
        "JC69": 3.0, "K80": 1.0, "K80+G2": 0.0})  # fmt: skip
    p = found.posterior_probabilities
    assert p["K80+G2"] == (0.0, 0.0) and p["JC69"].value + p["K80"].value == pytest.approx(1)
    factor = found.comparison.log_bayes_factor("JC69", "K80")[0]
    assert math.log(p["JC69"].value / p["K80"].value) == pytest.approx(factor + math.log(3), abs=1e-9)
    rates = averaged(EIGHT, TREE, ["K80", "JC69+G2"], num_draws=500, site_rates=GammaRates(0.5, 2))
    assert rates.comparison["K80"].log_evidence != found.comparison["K80"].log_evidence


def test_the_table_the_plot_and_the_text():
    found = averaged(EIGHT, TREE, ["JC69", "K80", "F81", "HKY85", "TN93", "GTR"], num_draws=200)
    table = found.averages_to_pandas()
    assert table["quantity"].value_counts().to_dict() == {"exchangeability": 6, "frequency": 4, "branch_length": 5}
    assert (table["standard_error"] > 0).all() and len(found.to_pandas()) == 6
    assert "1 more models" in repr(found) and "GTR" in found._repr_html_()
    ax = found.plot(Figure().subplots())
    assert len(ax.patches) == 6 and ax.get_xlabel() == "posterior probability"


def test_models_of_other_data():
    alignment = Alignment.from_sequences({"a": "001", "b": "011", "c": "111", "d": "101"}, data_type="standard")
    found = averaged(alignment, Tree.from_newick("((a,b),c,d);"), ["Mk", "Mk+G"], num_draws=200)
    assert found.pairs == ("0-1",) and found.exchangeabilities.tolist() == pytest.approx([1.0])
    assert found.equal.flatten().tolist() == pytest.approx([1.0])


@pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning")
def test_a_rooted_tree_loses_its_root():
    with pytest.warns(ConversionWarning, match="rooted") as told:
        average_substitution_models(EIGHT, Tree.from_newick("((A,B),(C,D));"), ["JC69", "K80"], num_draws=10)
    assert told[0].filename == __file__


BAD = {
    "one": (["JC69"], {}, SettingsError, "at least two models"),
    "a text": ("GTR", {}, SettingsError, "no sequence of names"),
    "a model in a list": ([GTRSubmodel("000000")], {}, SettingsError, "no name"),
    "twice": (["GTR", "GTR"], {}, SettingsError, "'GTR' is given twice"),
    "unknown": (["GTR", "HKI"], {}, UnknownNameError, "HKI"),
    "other data": (["GTR", "LG"], {}, SettingsError, "protein"),
    "other data by name": ({"a": Mk(2), "b": Mk(3)}, {}, SettingsError, "standard"),
    "no model": ({"a": "GTR", "b": Mk(3)}, {}, SettingsError, "not a substitution model"),
    "prior": (["JC69", "K80"], {"prior_probabilities": {"JC69": 1.0}}, SettingsError, "JC69, K80"),
    "negative": (["JC69", "K80"], {"prior_probabilities": {"JC69": -1.0, "K80": 2.0}}, SettingsError, "nonnegative"),
    "draws": (["JC69", "K80"], {"num_draws": 0}, SettingsError, "num_draws"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    models, settings, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        average_substitution_models(EIGHT, TREE, models, **settings)


def test_trees_that_do_not_fit():
    with pytest.raises(TreeError, match="E"):
        average_substitution_models(EIGHT, Tree.from_newick("((A,B),C,E);"))
    with pytest.raises(SettingsError, match="tree: .*is not a Tree"):
        average_substitution_models(EIGHT, "((A,B),C,D);")
    found = averaged(EIGHT, TREE, ["JC69", "K80"], num_draws=10)
    with pytest.raises(UnknownNameError, match="'A-B'.*A-C"):
        found.probability_of_equal("A-B", "A-C")
