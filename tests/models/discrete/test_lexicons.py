"""Lexicons, their learning, and the model of texts, against enumeration and closed forms."""

import itertools
import math

import pyro
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.evidence import naive_monte_carlo
from bayeskit.models.discrete.sequences import Lexicon, Strings, candidate_words, learn_lexicon
from bayeskit.models.discrete.sequences._text import SegmentedText

WEIGHTS = {"a": 0.3, "b": 0.2, "ab": 0.4}


def all_cuts(string, words):
    """Return every way to cut a string into words."""
    if not string:
        return [[]]
    return [[w, *rest] for w in words if string.startswith(w) for rest in all_cuts(string[len(w) :], words)]


def marginal(string, weights=WEIGHTS):
    return sum(math.prod(weights[word] for word in cut) for cut in all_cuts(string, weights))


def test_marginal_of_abab():
    segmentations = Lexicon.from_weights(WEIGHTS).segmentations(["abab"])
    assert abs(float(segmentations.log_normalizer().exp()) - 0.2116) < 1e-14
    assert int(segmentations.count()) == 4


def test_marginals_of_many_strings_are_those_of_enumeration():
    strings = ["".join(s) for n in range(1, 7) for s in itertools.product("ab", repeat=n)]
    found = Lexicon.from_weights(WEIGHTS).segmentations(strings).log_normalizer().exp()
    exact = torch.tensor([marginal(string) for string in strings], dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-14)


def test_probabilities_of_texts_sum_to_one():
    # By length, marginals sum to u_n = .5 u_(n-1) + .4 u_(n-2), for one word has one letter and another two.
    lexicon, sums = Lexicon.from_weights(WEIGHTS), [1.0, 0.5]
    for _ in range(1500):
        sums.append(0.5 * sums[-1] + 0.4 * sums[-2])
    for n in (1, 4, 7):
        texts = ["".join(s) for s in itertools.product("ab", repeat=n)]
        assert abs(float(lexicon.log_prob(texts).exp().sum()) - 0.1 * sums[n]) < 1e-13
    assert abs(0.1 * sum(sums) - 1) < 1e-12


def test_split_finds_the_best_words_and_names_what_is_impossible():
    lexicon = Lexicon.from_weights({"the": 0.2, "red": 0.1, "there": 0.1, "d": 0.05, "door": 0.2})
    assert lexicon.split(["thereddoor", "there"]) == [["the", "red", "door"], ["there"]]
    assert lexicon.segmentations(["theredoor", "thegate"]).log_normalizer().isinf().tolist() == [False, True]
    with pytest.raises(DataError, match="string 1 is 'thegate': .* begins at place 3"):
        lexicon.split(["there", "thegate"])


def test_a_scorer_sees_every_substring_once_and_gets_a_gradient():
    text, slope = Strings(["abab", "ba"], max_length=3), torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    assert set(text.segments) == {"a", "b", "ab", "ba", "aba", "bab"} and len(text.segments) == 6

    def score(segments):
        return slope * torch.tensor([len(s) ** 2 for s in segments], dtype=torch.float64)

    found = text.segmentations(score).log_normalizer()
    weights = {s: math.exp(-0.7 * len(s) ** 2) for s in text.segments}
    exact = torch.tensor([math.log(marginal(s, weights)) for s in text.strings], dtype=torch.float64)
    torch.testing.assert_close(found.detach(), exact, rtol=0, atol=1e-13)
    moved = {s: math.exp(-(0.7 - 1e-6) * len(s) ** 2) for s in text.segments}
    slope_found = torch.autograd.grad(found[0], slope)[0]
    assert abs(float(slope_found) - (math.log(marginal("abab", moved)) - float(exact[0])) / 1e-6) < 1e-4


def expected_counts_by_enumeration(strings, weights):
    counts = dict.fromkeys(weights, 0.0)
    for string in strings:
        for cut in all_cuts(string, weights):
            for word in cut:
                counts[word] += math.prod(weights[w] for w in cut) / marginal(string, weights)
    return torch.tensor(list(counts.values()), dtype=torch.float64)


def test_expected_counts_are_those_of_enumeration():
    strings = ["abab", "aab", "bab"]
    values = torch.tensor(list(WEIGHTS.values()), dtype=torch.float64).log()
    found = Strings(strings, tuple(WEIGHTS)).expected_counts(values)
    torch.testing.assert_close(found, expected_counts_by_enumeration(strings, WEIGHTS), rtol=0, atol=1e-13)


def test_learning_without_ambiguity_takes_one_step_to_the_frequencies():
    learned = learn_lexicon(Strings(["aab", "ab"], ["a", "b"]), num_steps=3)
    weights = dict(zip(learned.lexicon.words, learned.lexicon.log_weights.exp().tolist(), strict=True))
    assert abs(weights["a"] - 3 / 7) < 1e-14 and abs(weights["b"] - 2 / 7) < 1e-14
    assert learned.expected_counts.tolist() == pytest.approx([3.0, 2.0], abs=1e-12)


STRINGS = ["thedog", "thecat", "adog", "acat", "dogcat", "theadog"]


def learned_path(text):
    return learn_lexicon(text, num_steps=30, tolerance=0.0, length_penalty=1.3).log_likelihoods.diff()


def test_learning_never_lowers_the_likelihood_and_ends_where_its_gradient_vanishes():
    text = Strings(STRINGS, candidate_words(STRINGS, max_length=4))
    assert float(learned_path(text).min()) > -1e-12
    learned = learn_lexicon(text, num_steps=2000, tolerance=1e-15)
    lexicon = learned.lexicon
    # At the maximum the expected counts are proportional to the probabilities.
    total = learned.expected_counts.sum() + len(STRINGS)
    found = lexicon.log_weights.exp() - learned.expected_counts / total
    assert float(found.abs().max()) < 1e-6


def test_a_learned_lexicon_keeps_the_end_beside_the_penalty():
    text = Strings(STRINGS, candidate_words(STRINGS, max_length=4))
    lexicon = learn_lexicon(text, length_penalty=1.6, num_steps=5, tolerance=0.0).lexicon
    likelihood = learn_lexicon(text, length_penalty=1.6, num_steps=6, tolerance=0.0).log_likelihoods[-1]
    assert abs(float(lexicon.log_prob(STRINGS).sum() - likelihood)) < 1e-10
    # Taken as what the weights leave, the end would be far more probable.
    left = Lexicon(lexicon.words, lexicon.log_weights).log_prob(STRINGS).sum()
    assert float(left - likelihood) > 1.0


def test_mutation_counts_that_are_wrong_lower_the_likelihood(monkeypatch):
    text = Strings(STRINGS, candidate_words(STRINGS, max_length=4))
    right = Strings.expected_counts
    monkeypatch.setattr(Strings, "expected_counts", lambda self, values: right(self, values).square())
    assert float(learned_path(text).min()) < -1e-3


def test_pseudo_counts_of_a_prior_are_added():
    learned = learn_lexicon(Strings(["ab"], ["a", "b", "ba"]), concentration=2.0, num_steps=1)
    weights = dict(zip(learned.lexicon.words, learned.lexicon.log_weights.exp().tolist(), strict=True))
    assert weights == pytest.approx({"a": 2 / 6, "b": 2 / 6, "ba": 1 / 6}, abs=1e-14)


def texts():
    return SegmentedText(Strings(["abab", "aab"], words=["a", "b", "ab"]), torch.tensor([1.0, 2.0, 0.5, 1.5]).double())


def test_the_model_of_texts_has_the_likelihood_of_enumeration():
    model = texts()
    target = bk.Target.from_pyro(model)
    u = target.sample_prior(5, seed=0)
    probabilities = target.constrain(u)["probabilities"]
    for row, p in enumerate(probabilities.tolist()):
        weights = dict(zip("a b ab".split(), p, strict=False))
        exact = sum(math.log(marginal(s, weights) * p[3]) for s in model.text.strings)
        assert abs(float(target.log_likelihood(u)[row]) - exact) < 1e-12


class WithoutTheEnd(SegmentedText):
    """Forget that each text ends."""

    def __call__(self):
        p = pyro.sample("probabilities", pyro.distributions.Dirichlet(self.concentration))
        pyro.factor("texts", self.text.log_marginal(p.log()[:-1]).sum())


def z_of_evidence(model):
    estimate = naive_monte_carlo(bk.Target.from_pyro(model), 20_000, seed=0)
    return abs(estimate.log_evidence - model.log_evidence()) / estimate.standard_error


@pytest.mark.calibration
def test_exact_evidence_is_what_monte_carlo_finds(limit):
    assert z_of_evidence(texts()) < limit()
    model = texts()
    assert z_of_evidence(WithoutTheEnd(model.text, model.concentration)) > 3 * limit()


def test_exact_evidence_of_one_word_is_a_beta_integral():
    model = SegmentedText(Strings(["aaa", "a"], words=["a"]), torch.tensor([2.0, 3.0]).double())
    exact = math.lgamma(5) - math.lgamma(2) - math.lgamma(3) + math.lgamma(6) + math.lgamma(5) - math.lgamma(11)
    assert abs(model.log_evidence() - exact) < 1e-12


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Lexicon.from_weights({}), SettingsError, "lexicon is empty"),
        (lambda: Strings(["a"], words=[]), SettingsError, "lexicon is empty"),
        (lambda: Lexicon.from_weights({"a": 0.0}), SettingsError, "word 'a' has weight 0"),
        (lambda: Lexicon(["a", "a"], torch.zeros(2)), SettingsError, "'a' twice"),
        (lambda: Lexicon(["a", ""], torch.zeros(2)), SettingsError, "at least one character"),
        (lambda: Lexicon(["a"], torch.zeros(2)), ShapeError, r"give \(1,\)"),
        (lambda: Lexicon.from_weights({"a": 0.6, "b": 0.4}).log_prob(["ab"]), SettingsError, "sum to 1"),
        (lambda: Lexicon("abc", torch.zeros(3)), SettingsError, "words is one string"),
        (lambda: Strings(["ab"], words="ab"), SettingsError, "words is one string"),
        (lambda: Lexicon(["a"], torch.tensor([0j])), DataError, "complex"),
        (lambda: Lexicon(["a"], torch.zeros(1), torch.zeros(1)), ShapeError, "log_end"),
        (lambda: Strings(["a"]).log_marginal(["a"]), DataError, "values is .* not numbers"),
        (lambda: Strings([]), DataError, "no string"),
        (lambda: Strings("abc"), DataError, "one string"),
        (lambda: Strings(["a", ""]), DataError, "string 1"),
        (lambda: Strings(["a"], max_length=0), SettingsError, "max_length"),
        (lambda: Strings(["ab"]).log_marginal(torch.zeros(2)), ShapeError, "values"),
        (lambda: Strings(["ab"]).split(torch.ones(1, 3) > 0), ShapeError, "ends"),
        (lambda: learn_lexicon(Strings(["ab"]), concentration=0.5), SettingsError, "concentration"),
        (lambda: learn_lexicon(Strings(["ab"]), concentration="1"), SettingsError, "concentration"),
        (lambda: learn_lexicon(Strings(["ab"]), length_penalty=0.0), SettingsError, "length_penalty"),
        (lambda: learn_lexicon(Strings(["ab"]), tolerance=math.nan), SettingsError, "tolerance"),
        (lambda: learn_lexicon(Strings(["ab"]), tolerance=-1.0), SettingsError, "tolerance"),
        (lambda: learn_lexicon(Strings(["ab"], ["a"])), DataError, "string 0 is 'ab'"),
        (lambda: SegmentedText(Strings(["ab"], ["a"]), torch.ones(2)), DataError, "string 0 is 'ab'"),
        (lambda: SegmentedText(Strings(["a"], ["a"]), torch.ones(1)), ShapeError, "concentration"),
        (lambda: SegmentedText(Strings(["a"], ["a"]), torch.zeros(2)), SettingsError, "concentration"),
        (lambda: SegmentedText(Strings(["a"], ["a"]), None), DataError, "not numbers"),
        (lambda: SegmentedText(["a"], 1.0), SettingsError, "give Strings"),
        (lambda: learn_lexicon(["a"]), SettingsError, "give Strings"),
        (lambda: Lexicon.from_weights(["a"]), SettingsError, "give a mapping"),
        (lambda: texts().log_evidence(limit=3), SettingsError, "string 0 has 4 segmentations"),
        (
            lambda: SegmentedText(Strings(["a" * 200], ["a", "aa"]), torch.ones(3)).log_evidence(),
            SettingsError,
            r"string 0 has about exp\(95\.9189\) segmentations, which exceed limit=100000",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
