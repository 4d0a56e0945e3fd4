r"""
Unsupervised word segmentation by dynamic programming: text without spaces
==========================================================================

**What you will learn:** how to sum over all ways to cut a text into words, how to learn the words from the text alone,
and why likelihood needs to be told that words are short.

Speech has no spaces, and neither has the text of some scripts; whoever learns the language finds the words.
:cite:t:`goldwater2009` asked which models can, from transcripts of speech to infants. Here sentences are made by a
small grammar of 30 words and then lose their spaces, so that what is found can be compared with what was there.
"""

import itertools
import math

import torch
from matplotlib.figure import Figure

from bayeskit.gallery import is_small
from bayeskit.models.discrete.sequences import Lexicon, Strings, candidate_words, learn_lexicon, plot_boundaries

# %%
# The model
# ---------
# Words are drawn one after the other, word :math:`s` with probability :math:`w(s)`, until the text ends. Where they end
# is not seen, so that the probability of a text is a sum over all its segmentations,
#
# .. math::
#
#    p(\text{text}) = w_{\text{end}} \sum_{s_1 s_2 \cdots s_m = \text{text}} \; \prod_{i=1}^m w(s_i).
#
# A dynamic programme adds them up in a time proportional to the length of the text. Any string of up to nine letters
# that occurs twice may be a word.

THINGS = ("the|a|my|your|this", "old|little|red|good|", "dog|cat|child|friend|book|house|garden|hat|bird|ball")
SENTENCE = (*THINGS, "sees|wants|likes|remembers|finds|takes|loses", *THINGS, "today|again|now|often||")


def sentences(number: int, seed: int) -> list[list[str]]:
    """Fill each place of a sentence with one of the words, or with nothing where a choice is empty."""
    generator = torch.Generator().manual_seed(seed)
    places = [words.split("|") for words in SENTENCE]
    chosen = [
        [words[int(torch.randint(len(words), (), generator=generator))] for words in places] for _ in range(number)
    ]
    return [[word for word in sentence if word] for sentence in chosen]


true = sentences(100 if is_small() else 500, seed=0)
strings = ["".join(words) for words in true]
text = Strings(strings, candidate_words(strings, max_length=9))
print(f"{len(strings)} sentences such as {strings[0]!r}, {len(text.segments)} candidates for words")

# %%
# Before the data
# ---------------
# What does the model think of as text before it has learnt anything? If all candidates are equally probable, the words
# drawn are long, for most candidates are. A penalty that takes :math:`|s|^\beta` off the log weight of a word of
# :math:`|s|` letters :cite:p:`liang2009` prefers short ones. Neither knows English, but one knows what words are like.

word_lengths = torch.tensor([float(len(word)) for word in text.segments])
generator = torch.Generator().manual_seed(0)
for name, log_weights in (("no penalty", 0 * word_lengths), ("beta = 1.4", -(word_lengths**1.4))):
    drawn = torch.multinomial(log_weights.softmax(0), 12, generator=generator)
    print(f"{name}: {' '.join(text.segments[i] for i in drawn.tolist())}")

# %%
# An exact twin
# -------------
# Eight letters can be cut in 128 ways. One by one they give the same sum, the same probability of a cut after each
# letter and the same entropy as the programme.

weights = {"a": 0.3, "b": 0.2, "ab": 0.4, "aab": 0.05}
string = "abaababb"
total, ends, surprise = 0.0, [0.0] * len(string), 0.0
for cuts in itertools.product([False, True], repeat=len(string) - 1):
    places = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(string)]
    weight = math.prod(weights.get(string[a:b], 0.0) for a, b in itertools.pairwise(places))
    if weight:
        total += weight
        surprise -= weight * math.log(weight)
        for place in places[1:]:
            ends[place - 1] += weight
programme = Lexicon.from_weights(weights).segmentations([string])
print(f"{int(programme.count())} segmentations with a weight; log of the sum of all:", end=" ")
print(f"{float(programme.log_normalizer()):.12f}, one by one {math.log(total):.12f}")
assert abs(float(programme.log_normalizer()) - math.log(total)) < 1e-12
assert abs(float(programme.entropy()) - (math.log(total) + surprise / total)) < 1e-12
assert (programme.boundary_probabilities()[0] - torch.tensor(ends, dtype=torch.float64) / total).abs().max() < 1e-12

# %%
# The fit
# -------
# The gradient of the log of the sum is the number of times that each word is expected in the text, which is all that
# expectation maximisation needs. No step may lower the likelihood, and whatever the words are, their letters must be
# those of the text. Words found are compared with the true ones by the F score: a word counts if both its ends are
# right.


def f_score(found: list[list[str]]) -> float:
    """Return the harmonic mean of precision and recall of words."""

    def spans(sentence: list[str]) -> set[tuple[int, int]]:
        return set(itertools.pairwise(itertools.accumulate(map(len, sentence), initial=0)))

    right = sum(len(spans(a) & spans(b)) for a, b in zip(found, true, strict=True))
    return 2 * right / (sum(map(len, found)) + sum(map(len, true)))


scores, learned = {}, {}
for beta in (None, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
    fit = learned[beta] = learn_lexicon(text, length_penalty=beta, num_steps=300, tolerance=1e-6)
    steps = fit.log_likelihoods.diff()
    letters = sum(float(n) * len(word) for n, word in zip(fit.expected_counts, fit.lexicon.words, strict=True))
    assert len(steps) < 299 and steps.min() > -1e-9 * fit.log_likelihoods.abs().max()
    assert abs(letters / sum(map(len, strings)) - 1) < 1e-9
    scores[beta] = f_score(fit.lexicon.split(strings))

# %%
# A failure on purpose
# --------------------
# Likelihood alone is happiest with long words: a phrase that occurs often is cheaper as one word than as three. An
# exponent of one would not help: every segmentation then pays for all letters of the text, and so the same.

for beta in (None, 1.4):
    lexicon = learned[beta].lexicon
    print(f"{'no penalty' if beta is None else f'beta = {beta}'}: F score {scores[beta]:.3f}", end=", ")
    print(f"{' '.join(lexicon.split(strings)[0])}")
    print(f"    most frequent: {' '.join(lexicon.words[:12])}")
assert scores[1.4] > scores[None]

# %%
# What it says
# ------------
# With short words preferred, the words are found, by counting alone. But much depends on the exponent, and nothing in
# the text tells which to take.
#
# The lexicon is a distribution over segmentations, not one of them: drawn segmentations say how sure it is, and the
# mean number of words in the draws must be the exact expectation. Below is the least certain of fifty new sentences.

lexicon = learned[1.4].lexicon
segmentations = lexicon.segmentations(strings)
draws = segmentations.sample(20 if is_small() else 100, seed=0)
drawn = torch.tensor([f_score(text.split(each)) for each in draws], dtype=torch.float64)
print(f"F score {scores[1.4]:.4f} of the most probable segmentations,", end=" ")
print(f"{float(drawn.mean()):.4f} +- {float(drawn.std() / len(drawn) ** 0.5):.4f} of drawn ones")
counted = draws.sum((1, 2)).double()
error = float(counted.std() / len(counted) ** 0.5)
expected = float(segmentations.expectation(torch.ones(())).sum())
print(f"words in the text: {float(counted.mean()):.1f} +- {error:.1f} drawn, {expected:.1f} expected, ", end="")
print(f"{sum(map(len, true))} in truth")
assert abs(float(counted.mean()) - expected) < 4.5 * error

unseen = sentences(50, seed=1)
new = lexicon.segmentations(["".join(words) for words in unseen])
doubtful = int(new.entropy().argmax())
figure = Figure(figsize=(9, 5), layout="constrained")
above, below = figure.subplots(2, 1)
above.plot(list(scores)[1:], list(scores.values())[1:], marker="o", label="penalty of length")
above.axhline(scores[None], color="C1", linestyle="--", label="no penalty")
above.set(xlabel="exponent of the penalty", ylabel="F score of words", ylim=(0, 1.05))
above.legend(frameon=False)
plot_boundaries(new.boundary_probabilities()[doubtful], "".join(unseen[doubtful]), below)
below.set_title(" ".join(unseen[doubtful]), fontsize="medium")

# %%
# Try it on yours
# ---------------
# Replace ``strings`` by your sentences without spaces, or by any sequences of letters.
#
# .. code-block:: python
#
#    text = Strings(strings, candidate_words(strings, max_length=9))
#    fit = learn_lexicon(text, length_penalty=1.4, num_steps=100)
#    print(fit.lexicon.words[:10], fit.lexicon.split(strings)[0])
#
# Look at the entropy of single sentences, which says where the lexicon is unsure. The exponent of the penalty has to be
# chosen on some sentences whose words are known; likelihood cannot choose it. With many known words, give them to
# ``Lexicon.from_weights`` and learn nothing.
#
# Where to go next: :doc:`nile_change_point` cuts a series of numbers by the same programme, :doc:`topics_as_bars` finds
# which words go together.
