"""Sequences from arrays, lists and tables; averages over draws; refusals, reprs and plots."""

import math
import re

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import BayeskitWarning, DataError, SettingsError, ShapeError
from bayeskit.models.discrete.sequences import (
    CategoricalEmission,
    ChangePoints,
    GaussianEmission,
    HiddenMarkov,
    HiddenMarkovModel,
    Lexicon,
    NormalSegments,
    NumberOfChanges,
    PoissonSegments,
    Segmentations,
    Strings,
    categorical_log_evidence,
    plot_boundaries,
    plot_change_points,
    plot_states,
)
from bayeskit.models.discrete.sequences import (
    _hidden_markov as hidden_markov,
)
from bayeskit.models.discrete.sequences._text import SegmentedText

X = [0.3, -0.2, 0.1, 4.0, 5.0]
KINDS = [np.array, list, lambda x: pd.DataFrame({"x": x})["x"]]
NORMAL = NormalSegments(0.0, 0.1, 2.0, 1.0)
UP_TO = NumberOfChanges.up_to(2)
STAY = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).log()
EMISSION = dist.Normal(torch.tensor([0.0, 4.0], dtype=torch.float64), 1.0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def chain(duration=5, lengths=None):
    return HiddenMarkov(double([0.0, 0.0]), STAY, EMISSION, duration, lengths)


def density(x, lengths=None, emission=None):
    target = bk.Target.from_pyro(HiddenMarkovModel(2, emission or GaussianEmission()), x, lengths)
    return target.log_density(target.sample_prior(3, seed=0)).double()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_for_arrays_lists_and_columns_are_those_for_tensors(kind):
    weights = {"a": 0.3, "b": 0.2, "ab": 0.4}
    logs = [math.log(w) for w in weights.values()]
    text = Strings(["abab", "aab"], list(weights))

    def answers(convert):
        lexicon = Lexicon(list(weights), convert(logs))
        return [
            ChangePoints(convert(X), NORMAL, UP_TO).log_evidence,
            chain().log_prob(convert(X)),
            chain().state_probabilities(convert(X)),
            chain().log_joint(convert([0, 0, 1, 1, 1]), convert(X)),
            HiddenMarkov(convert([0.0, 0.1]), STAY, EMISSION, 5).log_prob(double(X)),
            density(convert(X)),
            lexicon.log_prob(["abab"]),
            Lexicon(list(weights), convert(logs), -1.0).log_prob(["abab"]),
            text.expected_counts(convert(logs)),
            double(SegmentedText(text, convert([1.0, 1.0, 1.0, 1.0])).log_evidence()),
            double(categorical_log_evidence(HiddenMarkovModel(2, CategoricalEmission(2)), convert([0, 1, 1]))),
        ]

    for found, right in zip(answers(kind), answers(lambda x: torch.from_numpy(np.array(x))), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_lengths_and_tables_of_weights_from_lists():
    x = [[0.3, 0.1, 4.0], [5.0, 4.0, 0.0]]
    torch.testing.assert_close(density(x, [3, 2]), density(double(x), torch.tensor([3, 2])), rtol=0, atol=0)
    exact = chain(3, torch.tensor([3, 2])).log_prob(double(x))
    torch.testing.assert_close(chain(3, np.array([3, 2])).log_prob(np.array(x)), exact, rtol=0, atol=0)
    weights = [[0.1, 0.0], [0.2, 0.3], [0.4, 0.5]]
    found, right = Segmentations(weights, np.array(3)), Segmentations(double(weights))
    ends = [True, False, True]
    torch.testing.assert_close(found.log_prob(ends), right.log_prob(torch.tensor(ends)), rtol=0, atol=0)
    torch.testing.assert_close(found.expectation(weights), right.expectation(double(weights)), rtol=0, atol=0)


def test_whole_numbers_and_booleans_are_real_numbers():
    counts = torch.tensor([0, 1, 1, 0, 1])
    for x in (counts, counts.bool(), counts.bool().tolist()):
        found = ChangePoints(x, PoissonSegments(1.0, 1.0), UP_TO)
        exact = ChangePoints(counts.double(), PoissonSegments(1.0, 1.0), UP_TO)
        assert (found.log_evidence.dtype, float(found.log_evidence)) == (torch.float64, float(exact.log_evidence))
        torch.testing.assert_close(chain().log_prob(x), chain().log_prob(counts.double()), rtol=0, atol=0)
        torch.testing.assert_close(density(x), density(counts.double()), rtol=0, atol=0)
    flips = HiddenMarkov(double([0.0, 0.0]), STAY, dist.Bernoulli(double([0.2, 0.6])), 5)
    torch.testing.assert_close(flips.log_prob(counts.bool()), flips.log_prob(counts.double()), rtol=0, atol=0)
    assert Segmentations(torch.zeros(3, 2, dtype=torch.int64)).log_normalizer().dtype == torch.get_default_dtype()
    assert int(Segmentations([[0, 0], [0, 0], [0, 0]]).count()) == 3


def test_one_concentration_is_that_of_every_word():
    text = Strings(["abab", "aab"], ["a", "b", "ab"])
    assert SegmentedText(text, 1.5).log_evidence() == SegmentedText(text, torch.full((4,), 1.5)).log_evidence()


X2 = normal(5, 6, seed=4)


@pytest.mark.parametrize("emission", [GaussianEmission(), CategoricalEmission(3)])
@pytest.mark.parametrize(("rows", "lengths"), [(None, None), (5, None), (5, torch.tensor([6, 3, 1, 2, 5]))])
def test_probabilities_of_states_are_averages_over_draws(emission, rows, lengths):
    x = X2 if isinstance(emission, GaussianEmission) else X2.mul(10).long() % 3
    x = x.flatten() if rows is None else x
    model = HiddenMarkovModel(2, emission)
    target = bk.Target.from_pyro(model, x, lengths)
    values = target.constrain(target.sample_prior(12, seed=0).reshape(4, 3, -1))
    alone = [
        model.distribution({name: value[chain, draw] for name, value in values.items()}, x, lengths)
        for chain in range(4)
        for draw in range(3)
    ]
    each = torch.stack([hmm.state_probabilities(x) for hmm in alone])
    hmm = model.distribution(values, x, lengths)
    torch.testing.assert_close(hmm.state_probabilities(x), each.unflatten(0, (4, 3)), rtol=0, atol=1e-12)
    log_prob = torch.stack([hmm.log_prob(x) for hmm in alone]).unflatten(0, (4, 3))
    torch.testing.assert_close(hmm.log_prob(x), log_prob, rtol=0, atol=1e-12)
    mean = model.state_probabilities(values, x, lengths)
    torch.testing.assert_close(mean, each.mean(0), rtol=0, atol=1e-12)
    # One draw for the average over all is noticed.
    assert float((each[0] - mean).abs().max()) > 1e-2


def test_draws_are_taken_as_they_are():
    model, x = HiddenMarkovModel(2, GaussianEmission()), normal(8, seed=3)
    target = bk.Target.from_pyro(model, x)
    u = target.sample_prior(10, seed=0).reshape(2, 5, -1)
    draws = bk.Draws(u, target.log_prior(u), target.log_likelihood(u), torch.ones(2), target=target)
    found = model.state_probabilities(draws, x.numpy())
    torch.testing.assert_close(found, model.state_probabilities(draws.values(), x), rtol=0, atol=0)
    assert model.distribution(draws, x).batch_shape == (2, 5) and found.shape == (8, 2)


def test_sites_of_different_draws_do_not_fit():
    model, x = HiddenMarkovModel(2, GaussianEmission()), normal(8, seed=3)
    target = bk.Target.from_pyro(model, x)
    values = target.constrain(target.sample_prior(6, seed=0))
    with pytest.raises(ShapeError, match=r"mean has shape \(4, 2\), initial \(6, 2\)"):
        model.state_probabilities(values | {"mean": values["mean"][:4]}, x)


SURE = HiddenMarkov(
    torch.tensor([0.0, -math.inf]),
    torch.tensor([[0.0, -math.inf], [0.0, 0.0]]),
    dist.Categorical(torch.tensor([[1.0, 0.0], [0.5, 0.5]])),
    3,
)


def answers_for_the_impossible(hmm=SURE):
    try:
        return hmm.most_probable_states([0, 1, 1]).tolist()
    except DataError as error:
        return str(error)


def test_an_emission_of_probability_zero_is_impossible(monkeypatch):
    assert float(SURE.log_prob(torch.tensor([0, 1, 1]))) == -math.inf
    assert "log density -inf" in answers_for_the_impossible()
    assert SURE.most_probable_states([0, 0, 0]).tolist() == [0, 0, 0]
    monkeypatch.setattr(hidden_markov, "unclamped", lambda fn: fn)
    assert answers_for_the_impossible() == [0, 0, 0]


def test_slopes_are_finite_next_to_probabilities_of_zero():
    probabilities = double([[0.7, 0.3, 0.0], [0.2, 0.3, 0.5]]).requires_grad_()
    hmm = HiddenMarkov(double([0.0, 0.0]), STAY, dist.Categorical(probabilities), 4)
    slopes = torch.autograd.grad(hmm.log_prob(torch.tensor([0, 2, 1, 2])), probabilities)[0]
    assert bool(slopes.isfinite().all()) and float(slopes[1, 2]) > 0


def test_probabilities_in_place_of_logits_are_noticed(recwarn):
    for initial, transition, name in (
        (double([0.0, 0.0]), STAY.exp(), "transition_logits"),
        (double([0.3, 0.7]), STAY, "initial_logits"),
    ):
        with pytest.warns(BayeskitWarning, match=rf"rows of {name} .* {name}\.log\(\)"):
            HiddenMarkov(initial, transition, EMISSION, 3)
    recwarn.clear()
    # Rows of equal numbers mean the same either way, and others are logits.
    HiddenMarkov(double([0.5, 0.5]), double([[0.2, 0.9], [0.5, 0.5]]), EMISSION, 3)
    HiddenMarkov(STAY.exp()[0].log(), STAY, EMISSION, 3)
    assert not recwarn.list


def test_seeds_have_a_default():
    posterior = ChangePoints(double(X), NORMAL, UP_TO)
    for drawn, again in (
        (posterior.sample(9), posterior.sample(9, seed=0)),
        (chain().sample_states(X, 9), chain().sample_states(X, 9, seed=0)),
        (Segmentations(normal(6, 3)).sample(9), Segmentations(normal(6, 3)).sample(9, seed=0)),
    ):
        assert torch.equal(drawn, again)


def own_emission(num_states, like):
    return dist.Normal(like.new_zeros(num_states), 1.0)


@pytest.mark.parametrize(
    ("thing", "shown"),
    [
        (
            ChangePoints(double(X), NORMAL, UP_TO),
            r"ChangePoints\(5 data, most probably 1 change, log evidence -10\.\d+\)",
        ),
        (Segmentations(torch.zeros(4, 3, 2)), r"Segmentations\(batch \(4,\), 3 places, segments of up to 2\)"),
        (Lexicon.from_weights({"a": 0.3, "b": 0.2}), r"Lexicon\(2 words: 'a', 'b'\)"),
        (Lexicon(list("abcde"), torch.zeros(5)), r"Lexicon\(5 words: 'a', 'b', 'c', 'd', \.\.\.\)"),
        (Strings(["ab"], ["a", "b"]), r"Strings\(1 strings, 2 segments of up to 1\)"),
        (SegmentedText(Strings(["a"], ["a"]), 1.0), r"SegmentedText\(Strings\(.*\)\)"),
        (HiddenMarkovModel(3, own_emission), r"HiddenMarkovModel\(3 states, own_emission, stay=0\)"),
        (HiddenMarkovModel(2, GaussianEmission()), r"HiddenMarkovModel\(2 states, GaussianEmission\(mean=.*\)"),
    ],
)
def test_reprs_say_what_a_thing_is(thing, shown):
    assert re.fullmatch(shown, repr(thing)), repr(thing)


@pytest.mark.parametrize(
    "times",
    [pd.date_range("2020", periods=5), pd.date_range("2020", periods=5, tz="UTC"), range(5), list("abcde"), None],
)
def test_plots_take_any_times_and_draw_into_a_figure_of_the_user(times):
    left, right = Figure(figsize=(12, 4)).subfigures(1, 2)
    assert plot_change_points(ChangePoints(X, NORMAL, UP_TO), times, figure=left) is left and len(left.axes) == 3
    figure = plot_states(chain().state_probabilities(X), X, times, figure=right)
    top, bottom = figure.axes
    assert figure is right and top.lines[0].get_ydata().tolist() == X
    shares = bottom.collections[0].get_paths()[0].vertices[:, 1]
    assert abs(shares.max() - float(chain().state_probabilities(X)[:, 0].max())) < 1e-12
    left.figure.draw_without_rendering()


def test_bars_show_where_a_text_is_cut():
    segmentations = Lexicon.from_weights({"a": 0.3, "b": 0.2, "ab": 0.4}).segmentations(["abab", "ab"])
    probabilities, ax = segmentations.boundary_probabilities(), Figure().subplots()
    assert plot_boundaries(probabilities[1], "ab", ax) is ax
    assert [bar.get_height() for bar in ax.patches] == probabilities[1, :2].tolist()
    assert [tick.get_text() for tick in plot_boundaries(probabilities[0], "abab").get_xticklabels()] == list("abab")


HALVES = torch.full((3, 2), 0.5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ChangePoints(X, NORMAL, 3), SettingsError, r"prior is 3; give .*NumberOfChanges.up_to\(3\)"),
        (lambda: ChangePoints(X, NORMAL, NumberOfChanges), SettingsError, "prior is <class"),
        (lambda: ChangePoints(X, NormalSegments, UP_TO), SettingsError, "segments is <class"),
        (lambda: ChangePoints(["a"], NORMAL, UP_TO), DataError, "x is .* not numbers"),
        (lambda: ChangePoints(torch.zeros(3) * 1j, NORMAL, UP_TO), DataError, "complex"),
        (lambda: NumberOfChanges(3), SettingsError, r"probabilities=3; .*NumberOfChanges.up_to\(3\)"),
        (lambda: HiddenMarkovModel(2, "gaussian"), SettingsError, r"'gaussian'; give GaussianEmission\(\)"),
        (lambda: HiddenMarkovModel(2, GaussianEmission), SettingsError, "emission is <class"),
        (lambda: HiddenMarkovModel(2, EMISSION), SettingsError, "emission is Normal"),
        (lambda: plot_change_points(ChangePoints(X, NORMAL, UP_TO), range(4)), ShapeError, r"times .* give \(5,\)"),
        (
            lambda: plot_change_points(ChangePoints(X, NORMAL, UP_TO), [[1], [2, 3], [], [], []]),
            DataError,
            "times cannot be read as an array",
        ),
        (lambda: plot_states(HALVES, X), ShapeError, r"x has shape \(5,\); give \(3,\)"),
        (lambda: plot_states(HALVES[None], X), ShapeError, "those of one sequence"),
        (lambda: plot_states(HALVES, [1, 2, 3], range(2)), ShapeError, "times"),
        (lambda: plot_boundaries(HALVES[0], "abc"), ShapeError, r"give \(3,\)"),
        (lambda: plot_boundaries(HALVES[0], ["a", "b"]), DataError, "give a string"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
