r"""Words out of text without spaces.

What you will learn: how to sum over all ways to cut a string into words, and how to learn the words.

A text is made of words, drawn one after the other with probabilities :math:`w`, and nobody says where they end,

.. math:: p(\text{text}) = w_{end} \sum_{\text{segmentations}} \prod_i w(s_i).

A dynamic programme sums over all segmentations, and the gradient of its logarithm counts how often each word is
expected: all that expectation maximisation needs. Likelihood alone prefers long words, up to whole sentences, so the
log weight of a word loses its length to the power 1.4 (after Liang and Klein 2009).
"""

import os

import torch

from bayeskit.models.discrete.sequences import Lexicon, Strings, candidate_words, learn_lexicon, plot_boundaries

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
THINGS = ("the|a|my|your|this", "old|little|red|good|", "dog|cat|child|friend|book|house|garden|hat|bird|ball")
VERBS = "sees|wants|likes|remembers|finds|takes|loses"
ENDS = "today|again|now|often||"


def sentences(number: int, seed: int) -> list[list[str]]:
    """Draw each word of a sentence such as 'my old friend sees a bird today' from those that may stand there."""
    generator = torch.Generator().manual_seed(seed)
    places = [choices.split("|") for choices in (*THINGS, VERBS, *THINGS, ENDS)]
    drawn = [
        [words[int(torch.randint(len(words), (), generator=generator))] for words in places] for _ in range(number)
    ]
    return [[word for word in sentence if word] for sentence in drawn]


def f_score(found: list[list[str]], true: list[list[str]]) -> float:
    """Compare words with both their ends in place: the harmonic mean of precision and recall."""

    def spans(sentence: list[str]) -> set[tuple[int, int]]:
        ends = torch.tensor([len(word) for word in sentence]).cumsum(0).tolist()
        return set(zip([0, *ends], ends, strict=False))

    right = sum(len(spans(a) & spans(b)) for a, b in zip(found, true, strict=True))
    return 2 * right / (sum(map(len, found)) + sum(map(len, true)))


def main() -> None:
    lexicon = Lexicon.from_weights({"a": 0.3, "b": 0.2, "ab": 0.4})
    small = lexicon.segmentations(["abab"])
    print(f"'abab' has {int(small.count())} segmentations into a, b and ab; the sum of their weights is", end=" ")
    print(f"{float(small.log_normalizer().exp()):.4f}, their entropy {float(small.entropy()):.4f} nats")

    true = sentences(60 if SMALL else 250, seed=0)
    strings = ["".join(words) for words in true]
    words = candidate_words(strings, max_length=9)
    print(f"\n{len(strings)} sentences such as {strings[0]!r}, {len(words)} candidate words")
    text = Strings(strings, words)
    scores = {}
    for name, penalty in (("likelihood alone", None), ("with a penalty of length", 1.4)):
        learned = learn_lexicon(text, length_penalty=penalty, num_steps=20 if SMALL else 40)
        found = learned.lexicon.split(strings)
        scores[name] = f_score(found, true)
        print(f"{name}: {len(learned.lexicon.words)} words kept, F score {scores[name]:.3f}")
        print("   ", " ".join(found[0]), "|", " ".join(found[1]))

    print("most frequent:", " ".join(learned.lexicon.words[:15]))
    unseen = sentences(5, seed=1)
    segmentations = learned.lexicon.segmentations(["".join(sentence) for sentence in unseen])
    for sentence, best, entropy in zip(
        unseen, learned.lexicon.split(["".join(s) for s in unseen]), segmentations.entropy(), strict=True
    ):
        print(f"{' '.join(sentence):45s} -> {' '.join(best):45s} entropy {float(entropy):.3f}")
    string = "".join(unseen[0])
    ax = plot_boundaries(segmentations.boundary_probabilities()[0], string)
    if not SMALL:
        ax.figure.savefig("text_without_spaces.png", dpi=100)
    assert scores["with a penalty of length"] > scores["likelihood alone"]


if __name__ == "__main__":
    main()
