"""Learning a lexicon from strings whose words are not marked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.models.discrete.sequences.strings import Lexicon, Strings, checked_strings

POSITIVE = (0.0, math.inf)


class LearnedLexicon(NamedTuple):
    """What :func:`learn_lexicon` returns.

    Attributes
    ----------
    lexicon : Lexicon
        The words that are left, the most frequent first; its weights contain the penalty of length, and its end has
        the probability learnt.
    expected_counts : Tensor
        How often each word is expected in the strings, ``(words,)``.
    log_likelihoods : Tensor
        Log probability of the strings before each step, ``(steps,)``. It never decreases with a concentration of one.
    """

    lexicon: Lexicon
    expected_counts: Tensor
    log_likelihoods: Tensor


def candidate_words(strings: Sequence[str], *, max_length: int, min_count: int = 2) -> tuple[str, ...]:
    """List the substrings that occur often enough to be words, and every single character.

    Parameters
    ----------
    strings : sequence of str
    max_length : int
        Of a word.
    min_count : int, default 2
        How often a substring of two or more characters must occur, overlaps included.

    Returns
    -------
    tuple of str
        In the order of first occurrence.

    Raises
    ------
    DataError
        If there is no string, or one is empty.
    SettingsError
        If a setting is below 1.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import candidate_words
    >>> candidate_words(["abab"], max_length=3)
    ('a', 'ab', 'b')
    """
    longest = whole_number("max_length", max_length, least=1)
    least = whole_number("min_count", min_count, least=1)
    counts = Counter(
        string[place : place + length]
        for string in checked_strings(strings)
        for place in range(len(string))
        for length in range(1, min(longest, len(string) - place) + 1)
    )
    return tuple(word for word, count in counts.items() if count >= least or len(word) == 1)


def learn_lexicon(
    text: Strings,
    *,
    concentration: float = 1.0,
    length_penalty: float | None = None,
    num_steps: int = 100,
    tolerance: float = 1e-8,
) -> LearnedLexicon:
    r"""Learn the probabilities of words by expectation maximisation.

    The model is that of :class:`Lexicon`: a Dirichlet prior over the probabilities of ``text.segments`` and of the end
    of a text. A step takes the expected counts, which are the gradient of the log marginal, adds the prior's, and
    normalises. Likelihood alone prefers long words, each string a word of its own at the extreme; a penalty takes
    :math:`|s|^\beta` off the log weight of word :math:`s` and so prefers short ones.

    Parameters
    ----------
    text : Strings
        Strings and candidate words.
    concentration : float, default 1
        Of the prior for each word, at least one, which gives maximum likelihood.
    length_penalty : float, optional
        The exponent :math:`\beta`, above zero. By default there is no penalty.
    num_steps : int, default 100
        At most this many.
    tolerance : float, default 1e-8
        Stop when a step changes the log likelihood by less, relative to its size.

    Returns
    -------
    LearnedLexicon

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    DataError
        If a string has no segmentation.

    References
    ----------
    Liang, P., Klein, D. (2009). Online EM for unsupervised models. NAACL, 611-619. (The penalty.)

    Deligne, S., Bimbot, F. (1995). Language modeling by variable length sequences: theoretical formulation and
    evaluation of multigrams. ICASSP.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import Strings, candidate_words, learn_lexicon
    >>> strings = ["thedog", "thecat", "adog", "acat", "dogcat", "theadog"]
    >>> text = Strings(strings, candidate_words(strings, max_length=4))
    >>> learn_lexicon(text, length_penalty=1.6).lexicon.split(["thedog", "acat"])
    [['the', 'dog'], ['a', 'cat']]
    """
    if not isinstance(text, Strings):
        raise SettingsError(f"text is {text!r:.80}; give Strings(strings, candidate_words(strings, max_length=...))")
    concentration = real_number("concentration", concentration, POSITIVE)
    if concentration < 1:
        raise SettingsError(f"concentration must be at least 1, not {concentration:g}: there is no mode below")
    if length_penalty is not None:
        length_penalty = real_number("length_penalty", length_penalty, POSITIVE)
    if real_number("tolerance", tolerance, (-math.inf, math.inf)) < 0:
        raise SettingsError(f"tolerance must be at least 0, not {tolerance:g}")
    num_steps = whole_number("num_steps", num_steps, least=1)
    word_lengths = torch.tensor([len(word) for word in text.segments], dtype=torch.float64)
    penalty = torch.zeros_like(word_lengths) if length_penalty is None else word_lengths**length_penalty
    num_ends = len(text.strings)
    size = len(text.segments) + 1
    log_probs = torch.full((size,), -math.log(size), dtype=torch.float64)
    path: list[float] = []
    for _ in range(num_steps):
        values = log_probs[:-1] - penalty
        counts = text.expected_counts(values)
        path.append(float(text.log_marginal(values).sum() + num_ends * log_probs[-1]))
        kept = torch.cat([counts + concentration - 1, counts.new_tensor([num_ends])])
        log_probs = kept.log() - kept.sum().log()
        if len(path) > 1 and abs(path[-1] - path[-2]) < tolerance * abs(path[-1]):
            break
    return _sorted(text, log_probs[:-1] - penalty, log_probs[-1], torch.tensor(path, dtype=torch.float64))


def _sorted(text: Strings, values: Tensor, end: Tensor, path: Tensor) -> LearnedLexicon:
    counts = text.expected_counts(values)
    order = counts.argsort(descending=True, stable=True)
    order = order[values[order] > -math.inf]
    words = tuple(text.segments[i] for i in order.tolist())
    return LearnedLexicon(Lexicon(words, values[order], end), counts[order], path)
