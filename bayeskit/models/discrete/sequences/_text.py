"""Segmentation of text without spaces: strings, lexicons, and estimation of lexicons."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, real_number, whole_number
from bayeskit.models.discrete._inputs import as_real, log_dirichlet_moment
from bayeskit.models.discrete.sequences._chains import LogSum
from bayeskit.models.discrete.sequences._segmentations import Segmentations, totals

# Strings without word boundaries, and lexicons.


class Strings:
    """Strings with an index of their candidate segments, computed once.

    Parameters
    ----------
    strings : sequence of str
        Nonempty.
    words : sequence of str, optional
        Allowed segments; default all substrings.
    max_length : int, optional
        Maximum segment length; default the length of the longest word or, without ``words``, the longest string.

    Attributes
    ----------
    strings : tuple of str
    segments : tuple of str
        The words or, without words, the distinct substrings up to ``max_length`` in order of their end.
    lengths : Tensor of int
        Shape ``(strings,)``.
    max_length : int

    Raises
    ------
    DataError
        If there is no string, or a string is empty.
    SettingsError
        If there is no word, a word is empty or repeated, or ``max_length`` is less than 1.

    Examples
    --------
    >>> import torch
        >>> from bayeskit.models.discrete.sequences import Strings
    >>> text = Strings(["abab", "ab"], max_length=2)
    >>> text.segments
    ('a', 'b', 'ab', 'ba')
    >>> by_length = torch.tensor([-1.5 * len(segment) for segment in text.segments])
    >>> text.segmentations(by_length).count()
    tensor([5, 2])
    """

    def __init__(
        self, strings: Sequence[str], words: Sequence[str] | None = None, max_length: int | None = None
    ) -> None:
        self.strings = _checked_strings(strings)
        allowed = None if words is None else _checked_words(words)
        longest = max(map(len, self.strings if allowed is None else allowed))
        if max_length is not None:
            longest = min(longest, whole_number("max_length", max_length, least=1))
        self.max_length = longest
        self.lengths = torch.tensor([len(string) for string in self.strings])
        self._index, self.segments = _index(self.strings, allowed, longest)

    def __repr__(self) -> str:
        return f"Strings({len(self.strings)} strings, {len(self.segments)} segments of up to {self.max_length})"

    def log_weights(self, values: Tensor) -> Tensor:
        """Return the log weight of every segment of every string.

        ``values`` (tensor or array): log weights of ``segments``, shape ``(*batch, segments)``. Returns ``(*batch,
        strings, n, L)``, the input of :class:`Segmentations`; ``-inf`` where no segment is allowed. Raises
        ``ShapeError`` if the last dimension of ``values`` is not the number of segments; ``DataError`` if ``values``
        are not real.
        """
        values = as_real("values", values)
        if values.shape[-1:] != (len(self.segments),):
            raise ShapeError(f"values has shape {tuple(values.shape)}; give (*batch, {len(self.segments)})")
        none = torch.full_like(values[..., :1], -math.inf)
        return torch.cat([values, none], -1)[..., self._index.to(values.device)]

    def segmentations(self, values: Tensor | Callable[[Sequence[str]], Tensor]) -> Segmentations:
        """Return the distribution over segmentations of every string, batch shape ``(*batch, strings)``.

        ``values`` (tensor, array or callable): log weights of ``segments``, shape ``(*batch, segments)``, or a function
        (e.g. a network) that maps ``segments`` to this tensor. Raises ``ShapeError`` if there is not one log weight per
        segment.
        """
        weights = self.log_weights(values(self.segments) if callable(values) else values)
        return Segmentations(weights, self.lengths.to(weights.device))

    def log_marginal(self, values: Tensor) -> Tensor:
        """Return the log marginal of every string: ``(*batch, segments)`` to ``(*batch, strings)``.

        Equals ``segmentations(values).log_normalizer()``; use it in traced code.
        """
        weights = self.log_weights(values)
        return totals(LogSum(), weights, self.lengths.to(weights.device))

    def expected_counts(self, values: Tensor) -> Tensor:
        """Return the expected count of each segment in the segmentations of all strings, ``(segments,)``.

        ``values`` (tensor or array): log weights, ``(segments,)``. Raises ``DataError`` if a string has no
        segmentation.
        """
        values = as_real("values", values)
        self.check(values)
        with torch.enable_grad():
            weights = values.detach().requires_grad_()
            return torch.autograd.grad(self.log_marginal(weights).sum(), weights)[0]

    def split(self, ends: Tensor) -> list[list[str]]:
        """Split each string after the marked positions.

        ``ends``: True where a segment ends, shape ``(strings, n)``, e.g. from :meth:`Segmentations.most_probable`.
        Raises ``ShapeError`` if ``ends`` has a wrong shape.
        """
        ends = as_numbers("ends", ends)
        if ends.shape != self._index.shape[:2]:
            raise ShapeError(f"ends has shape {tuple(ends.shape)}; give {tuple(self._index.shape[:2])}")
        cuts = [[0, *(row.nonzero().flatten() + 1).tolist()] for row in ends.cpu()]
        return [
            [string[start:end] for start, end in zip(places, places[1:], strict=False)]
            for string, places in zip(self.strings, cuts, strict=True)
        ]

    def check(self, values: Tensor) -> None:
        """Raise an error if a string has no segmentation, naming the first such string and position.

        Raises ``DataError`` if a string has no segmentation.
        """
        values = as_real("values", values).detach()
        lost = (self.log_marginal(values) == -math.inf).nonzero()
        if len(lost):
            string = int(lost[0, -1])
            try:
                self.segmentations(values).check()
            except DataError as error:
                raise DataError(f"string {string} is {self.strings[string]!r}: {error}") from None


class Lexicon:
    r"""Words with weights: a distribution over texts without spaces.

    Words are drawn independently, word :math:`s` with probability :math:`w(s)`; the text ends with probability
    :math:`1 - \sum_s w(s)` before each word. The marginal of a string is the sum over its segmentations of the product
    of weights. The marginal times the end probability is the probability of the text. If the weights sum to 1, texts do
    not end, and the marginal is the probability that a text starts with the string and a word ends there.

    Parameters
    ----------
    words : sequence of str
    log_weights : Tensor or array
        Shape ``(words,)``; weights need not be probabilities.
    log_end : Tensor or float, optional
        Log probability of the end; default ``log(1 - sum(weights))``.

    Raises
    ------
    SettingsError
        If there is no word, or a word is empty or repeated.
    ShapeError
        If there is not one weight per word, or ``log_end`` is not a scalar.
    DataError
        If weights are not real.

    Examples
    --------
    >>> import torch
        >>> from bayeskit.models.discrete.sequences import Lexicon
    >>> lexicon = Lexicon.from_weights({"a": 0.3, "b": 0.2, "ab": 0.4})
    >>> round(float(lexicon.segmentations(["abab"]).log_normalizer().exp()), 6)
    0.2116
    >>> lexicon.split(["abab", "ba"])
    [['ab', 'ab'], ['b', 'a']]
    >>> round(float(lexicon.log_prob(["abab"]).exp()), 6)
    0.02116
    """

    def __init__(self, words: Sequence[str], log_weights: Tensor, log_end: Tensor | None = None) -> None:
        self.words = _checked_words(words)
        log_weights = as_real("log_weights", log_weights)
        log_end = None if log_end is None else as_real("log_end", log_end).to(log_weights.device)
        if log_weights.shape != (len(self.words),):
            raise ShapeError(f"log_weights has shape {tuple(log_weights.shape)}; give ({len(self.words)},)")
        if log_end is not None and log_end.dim():
            raise ShapeError(f"log_end has shape {tuple(log_end.shape)}; give one number, ()")
        self.log_weights, self.log_end = log_weights, log_end

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.words[:4]))
        return f"Lexicon({len(self.words)} words: {first}{', ...' if len(self.words) > 4 else ''})"

    @classmethod
    def from_weights(cls, weights: Mapping[str, float], *, dtype: torch.dtype = torch.float64) -> Lexicon:
        """Make a lexicon from a mapping of words to weights.

        Raises ``SettingsError`` if there is no word, a word is empty, or a weight is not positive and finite.
        """
        if not isinstance(weights, Mapping):
            raise SettingsError(f"weights is {weights!r:.80}; give a mapping of words to weights, such as {{'a': 0.5}}")
        for word, weight in weights.items():
            if not 0 < float(weight) < math.inf:
                raise SettingsError(f"word {word!r} has weight {weight}; give a finite number above zero")
        return cls(tuple(weights), torch.tensor([float(w) for w in weights.values()], dtype=dtype).log())

    def segmentations(self, strings: Sequence[str]) -> Segmentations:
        """Return the distribution over the segmentations of each string, batch shape ``(strings,)``.

        The log normalizer of a string without a segmentation is ``-inf``.
        """
        return Strings(strings, self.words).segmentations(self.log_weights)

    def split(self, strings: Sequence[str]) -> list[list[str]]:
        """Return the words of the most probable segmentation of each string.

        Raises ``DataError`` if a string has no segmentation; the message names the string and position.
        """
        text = Strings(strings, self.words)
        text.check(self.log_weights)
        return text.split(text.segmentations(self.log_weights).most_probable())

    def log_prob(self, strings: Sequence[str]) -> Tensor:
        """Return the log probability of each string as a complete text, ``(strings,)``.

        Raises ``SettingsError`` if ``log_end`` was not given and the weights sum to 1 or more.
        """
        if self.log_end is not None:
            return self.segmentations(strings).log_normalizer() + self.log_end
        words = float(self.log_weights.detach().exp().sum())
        if not words < 1 - len(self.words) * torch.finfo(self.log_weights.dtype).eps:
            raise SettingsError(
                f"the weights of words sum to {words:.6g}, which leaves no probability for the end of a text; reduce "
                "the weights, or use segmentations(strings).log_normalizer()"
            )
        return self.segmentations(strings).log_normalizer() + (-self.log_weights.exp().sum()).log1p()


def _checked_strings(strings: Sequence[str]) -> tuple[str, ...]:
    """Return ``strings`` as a tuple; DataError if there is no string, or an item is empty or not a string."""
    if isinstance(strings, str):
        raise DataError("strings is one string; give a sequence of strings, such as [string]")
    for position, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise DataError(f"string {position} is {string!r}; give strings of at least one character")
    if not len(strings):
        raise DataError("there is no string; give at least one string")
    return tuple(strings)


def _checked_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return ``words`` as a tuple; SettingsError if there is no word, or a word is empty or repeated."""
    if isinstance(words, str):
        raise SettingsError(f"words is one string, {words!r}; give a sequence of words, such as [{words!r}]")
    words = tuple(words)
    if not words:
        raise SettingsError("the lexicon is empty, so no string has a segmentation; give at least one word")
    seen: set[str] = set()
    for word in words:
        if not isinstance(word, str) or not word:
            raise SettingsError(f"the lexicon holds {word!r}; give words of at least one character")
        if word in seen:
            raise SettingsError(f"the lexicon holds {word!r} twice; list each word once, with the sum of its weights")
        seen.add(word)
    return words


def _index(strings: tuple[str, ...], words: tuple[str, ...] | None, longest: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return the segment index at each position and length (``len(segments)`` if not allowed), and the segments."""
    numbers = {} if words is None else {word: number for number, word in enumerate(words)}
    found: list[tuple[int, int, int, int]] = []
    for row, string in enumerate(strings):
        for place in range(len(string)):
            for length in range(min(longest, place + 1)):
                segment = string[place - length : place + 1]
                number = numbers.get(segment, -1) if words is not None else numbers.setdefault(segment, len(numbers))
                if number >= 0:
                    found.append((row, place, length, number))
    index = torch.full((len(strings), max(map(len, strings)), longest), len(numbers))
    rows, places, lengths, values = torch.tensor(found, dtype=torch.int64).reshape(-1, 4).unbind(1)
    index[rows, places, lengths] = values
    return index, tuple(numbers)


# A Pyro model of texts without spaces, with exact evidence.


class SegmentedText:
    r"""Pyro model of word probabilities given texts without spaces, segmentations marginalized.

    .. math::
        (\pi_1, \dots, \pi_W, \pi_{end}) \sim \mathrm{Dirichlet}(\alpha), \qquad
        p(\text{string} \mid \pi) = \pi_{end} \sum_{\text{segmentations}} \prod_i \pi_{s_i}.

    Site ``"probabilities"`` has the order of ``text.segments``, followed by the end. Pass the model to
    :meth:`bayeskit.Target.from_pyro`.

    Parameters
    ----------
    text : Strings
        Strings and their candidate words.
    concentration : Tensor, array or float
        Dirichlet concentration, positive, shape ``()`` or ``(words + 1,)``; the last entry is for the end.

    Raises
    ------
    ShapeError
        If ``concentration`` has a wrong shape.
    SettingsError
        If a concentration is not positive and finite.
    DataError
        If a string has no segmentation, or the concentration is not real.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.discrete.sequences import Strings
    >>> from bayeskit.models.discrete.sequences._text import SegmentedText
    >>> text = Strings(["abab", "aab"], words=["a", "b", "ab"])
    >>> model = SegmentedText(text, torch.ones(4, dtype=torch.float64))
    >>> bk.Target.from_pyro(model).dim, round(model.log_evidence(), 6)
    (3, -8.283999)
    """

    #: Factor sites that are normalized log likelihoods.
    normalised_factors = frozenset({"texts"})

    def __init__(self, text: Strings, concentration: Tensor) -> None:
        if not isinstance(text, Strings):
            raise SettingsError(f"text is {text!r:.80}; give Strings(strings, words)")
        concentration = as_real("concentration", concentration)
        if not concentration.dim():
            concentration = concentration.expand(len(text.segments) + 1)
        if concentration.shape != (len(text.segments) + 1,):
            raise ShapeError(
                f"concentration has shape {tuple(concentration.shape)}; give ({len(text.segments) + 1},), one for each "
                "word and one for the end"
            )
        if not bool(((concentration > 0) & concentration.isfinite()).all()):
            raise SettingsError("concentration must be positive and finite")
        text.check(torch.zeros_like(concentration[:-1]))
        self.text, self.concentration = text, concentration

    def __repr__(self) -> str:
        return f"SegmentedText({self.text!r})"

    def __call__(self) -> None:
        """Draw the word probabilities and add the log likelihood of the texts."""
        probabilities = pyro.sample("probabilities", dist.Dirichlet(self.concentration))
        logarithms = probabilities.log()
        with pyro.plate("strings", len(self.text.strings)):
            pyro.factor("texts", self.text.log_marginal(logarithms[..., :-1]) + logarithms[..., -1:])

    def log_evidence(self, limit: int = 100_000) -> float:
        """Return the exact log evidence of the texts.

        Segmentations are enumerated and grouped by word counts; given the counts, word probabilities are integrated out
        by conjugacy. ``limit``: maximum number of segmentations per string, and of pairs of counts to combine. Raises
        ``SettingsError`` if ``limit`` is exceeded; the message gives the number.
        """
        limit = whole_number("limit", limit, least=1)
        size = len(self.text.segments)
        ways: Counter[tuple[int, ...]] = Counter({(0,) * size: 1})
        for row in range(len(self.text.strings)):
            one = self._counts(row, limit)
            if len(ways) * len(one) > limit:
                raise SettingsError(f"{len(ways) * len(one)} pairs of counts exceed limit={limit}; give shorter texts")
            joined: Counter[tuple[int, ...]] = Counter()
            for (left, m), (right, n) in itertools.product(ways.items(), one.items()):
                joined[tuple(a + b for a, b in zip(left, right, strict=True))] += m * n
            ways = joined
        counts = torch.tensor([[*key, len(self.text.strings)] for key in ways], dtype=torch.float64)
        multiplicity = torch.tensor([float(n) for n in ways.values()], dtype=torch.float64)
        alpha = self.concentration.detach().double().cpu()
        return float((log_dirichlet_moment(counts, alpha) + multiplicity.log()).logsumexp(0))

    def _counts(self, row: int, limit: int) -> Counter[tuple[int, ...]]:
        """Return the word counts of every segmentation of one string."""
        string, numbers = self.text.strings[row], {word: i for i, word in enumerate(self.text.segments)}
        longest, ends = self.text.max_length, range(1, len(string) + 1)
        pieces = [[(s, numbers.get(string[s:end])) for s in range(max(0, end - longest), end)] for end in ends]
        last = [[(start, word) for start, word in each if word is not None] for each in pieces]
        ways = [1]
        for each in last:
            ways.append(sum(ways[start] for start, _ in each))
        if ways[-1] > limit:
            number = ways[-1] if ways[-1] < 10**15 else f"about exp({math.log(ways[-1]):.6g})"
            raise SettingsError(
                f"string {row} has {number} segmentations, which exceed limit={limit}; give shorter texts"
            )
        found: list[list[tuple[int, ...]]] = [[(0,) * len(numbers)]]
        for each in last:
            found.append([(*c[:w], c[w] + 1, *c[w + 1 :]) for start, w in each for c in found[start]])
        return Counter(found[-1])


# Estimation of a lexicon from strings without word boundaries.


class LearnedLexicon(NamedTuple):
    """Result of :func:`learn_lexicon`.

    Attributes
    ----------
    lexicon : Lexicon
        The retained words in descending order of frequency. Weights include the length penalty; the end has its
        estimated probability.
    expected_counts : Tensor
        Expected count of each word in the strings, ``(words,)``.
    log_likelihoods : Tensor
        Log likelihood before each step, ``(steps,)``; nondecreasing if ``concentration`` is 1.
    """

    lexicon: Lexicon
    expected_counts: Tensor
    log_likelihoods: Tensor


def candidate_words(strings: Sequence[str], *, max_length: int, min_count: int = 2) -> tuple[str, ...]:
    """Return the substrings with at least ``min_count`` occurrences and all single characters.

    Parameters
    ----------
    strings : sequence of str
    max_length : int
        Maximum word length.
    min_count : int, default 2
        Minimum number of (possibly overlapping) occurrences of substrings of two or more characters.

    Returns
    -------
    tuple of str
        In the order of first occurrence.

    Raises
    ------
    DataError
        If there is no string, or a string is empty.
    SettingsError
        If a setting is less than 1.

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
        for string in _checked_strings(strings)
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
    r"""Estimate word probabilities by expectation maximization.

    The model is :class:`Lexicon` with a Dirichlet prior on the probabilities of ``text.segments`` and of the end. Each
    step adds prior counts to the expected counts and normalizes. Maximum likelihood favours long words, up to whole
    strings; the penalty subtracts :math:`|s|^\beta` from the log weight of word :math:`s`.

    Parameters
    ----------
    text : Strings
        Strings and candidate words.
    concentration : float, default 1
        Dirichlet concentration, at least 1; 1 gives maximum likelihood.
    length_penalty : float, optional
        Exponent :math:`\beta`, positive; default no penalty.
    num_steps : int, default 100
        Maximum number of steps.
    tolerance : float, default 1e-8
        Stop if the relative change of the log likelihood is smaller.

    Raises
    ------
    SettingsError
        If a setting is outside its domain.
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
    concentration = real_number("concentration", concentration, "(0, inf)")
    if concentration < 1:
        raise SettingsError(f"concentration must be at least 1, not {concentration:g}: there is no mode below")
    if length_penalty is not None:
        length_penalty = real_number("length_penalty", length_penalty, "(0, inf)")
    tolerance = real_number("tolerance", tolerance, "[0, inf)")
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
