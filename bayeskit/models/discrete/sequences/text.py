"""Texts without spaces: strings, lexicons that segment them, and how a lexicon is learnt."""

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

from bayeskit.core.inputs import as_numbers, real_number, whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.inputs import as_real
from bayeskit.models.discrete.sequences.chains import LogSum
from bayeskit.models.discrete.sequences.segmentations import Segmentations, totals

__all__ = ["LearnedLexicon", "Lexicon", "SegmentedText", "Strings", "candidate_words", "learn_lexicon"]

# Strings without word boundaries, and lexicons to segment them with.


class Strings:
    """Strings with an index of the segments that they can be cut into, made once and scored as often as wanted.

    Parameters
    ----------
    strings : sequence of str
        None of them empty. Their lengths may differ.
    words : sequence of str, optional
        The segments allowed. By default every substring is.
    max_length : int, optional
        Of a segment. By default that of the longest word or, without words, of the longest string.

    Attributes
    ----------
    strings : tuple of str
    segments : tuple of str
        Without words, the distinct substrings up to ``max_length`` in the order in which they end; otherwise the words.
    lengths : Tensor of int
        Shape ``(strings,)``.
    max_length : int

    Raises
    ------
    DataError
        If there is no string, or one is empty.
    SettingsError
        If there is no word, one is empty or given twice, or ``max_length`` is below 1.

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
        """Look up the log weight of every segment of every string.

        Parameters
        ----------
        values : Tensor or array
            Log weights of ``segments``, shape ``(*batch, segments)``.

        Returns
        -------
        Tensor
            ``(*batch, strings, n, L)``, as :class:`Segmentations` takes it; minus infinity where there is no segment.

        Raises
        ------
        ShapeError
            If ``values`` has another last dimension.
        DataError
            If ``values`` are no real numbers.
        """
        values = as_real("values", values)
        if values.shape[-1:] != (len(self.segments),):
            raise ShapeError(f"values has shape {tuple(values.shape)}; give (*batch, {len(self.segments)})")
        none = torch.full_like(values[..., :1], -math.inf)
        return torch.cat([values, none], -1)[..., self._index.to(values.device)]

    def segmentations(self, values: Tensor | Callable[[Sequence[str]], Tensor]) -> Segmentations:
        """Return the distribution over segmentations of every string, batch shape ``(*batch, strings)``.

        Parameters
        ----------
        values : Tensor, array or callable
            Log weights of ``segments``, ``(*batch, segments)``, or a function that scores them all at once, for
            instance a network: it maps ``segments`` to that tensor.

        Raises
        ------
        ShapeError
            If there is not one number for each segment.
        """
        weights = self.log_weights(values(self.segments) if callable(values) else values)
        return Segmentations(weights, self.lengths.to(weights.device))

    def log_marginal(self, values: Tensor) -> Tensor:
        """Return the log marginal of every string: ``(*batch, segments)`` to ``(*batch, strings)``.

        The same as ``segmentations(values).log_normalizer()``, for code that is traced.
        """
        weights = self.log_weights(values)
        return totals(LogSum(), weights, self.lengths.to(weights.device))

    def expected_counts(self, values: Tensor) -> Tensor:
        """Return how often each segment is expected in the segmentations of all strings, ``(segments,)``.

        It is the gradient of the sum of log marginals.

        Parameters
        ----------
        values : Tensor or array
            Log weights, ``(segments,)``.

        Raises
        ------
        DataError
            If a string has no segmentation.
        """
        values = as_real("values", values)
        self.check(values)
        with torch.enable_grad():
            weights = values.detach().requires_grad_()
            return torch.autograd.grad(self.log_marginal(weights).sum(), weights)[0]

    def split(self, ends: Tensor) -> list[list[str]]:
        """Cut every string in two or more at the marked places.

        Parameters
        ----------
        ends : Tensor of bool
            ``(strings, n)``: True where a segment ends, as :class:`Segmentations` returns it.

        Raises
        ------
        ShapeError
            If ``ends`` has another shape.
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
        """Raise an error that names the first string without a segmentation, and where it cannot go on.

        Raises
        ------
        DataError
            If there is one.
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
    r"""Words and their weights: a distribution over texts without spaces.

    Words are drawn one after the other, word :math:`s` with probability :math:`w(s)`; with what is left of probability,
    :math:`1 - \sum_s w(s)`, the text ends. The marginal of a string sums over its segmentations the products of weights
    and says nothing of the end: times the probability of the end it is the probability of the text, and these sum to
    one over all texts, the empty one included. Where the weights sum to one, the text never ends, and the marginal is
    the probability that the text begins with this string and that a word ends with it.

    Parameters
    ----------
    words : sequence of str
    log_weights : Tensor or array
        Shape ``(words,)``. Any weights will do, not only probabilities.
    log_end : Tensor or float, optional
        Log probability of the end, a number. By default the end has what the weights leave.

    Raises
    ------
    SettingsError
        If there is no word, or one is empty or given twice.
    ShapeError
        If there is not one weight for each word, or ``log_end`` is not one number.
    DataError
        If weights are no real numbers.

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
        """Make a lexicon of words and weights.

        Raises
        ------
        SettingsError
            If there is no word, one is empty, or a weight is not above zero and finite.
        """
        if not isinstance(weights, Mapping):
            raise SettingsError(f"weights is {weights!r:.80}; give a mapping of words to weights, such as {{'a': 0.5}}")
        for word, weight in weights.items():
            if not 0 < float(weight) < math.inf:
                raise SettingsError(f"word {word!r} has weight {weight}; give a finite number above zero")
        return cls(tuple(weights), torch.tensor([float(w) for w in weights.values()], dtype=dtype).log())

    def segmentations(self, strings: Sequence[str]) -> Segmentations:
        """Return the distribution over the segmentations of each string, batch shape ``(strings,)``.

        Where no segmentation makes a string, its log marginal is minus infinity.
        """
        return Strings(strings, self.words).segmentations(self.log_weights)

    def split(self, strings: Sequence[str]) -> list[list[str]]:
        """Return the words of the most probable segmentation of each string.

        Raises
        ------
        DataError
            If a string has no segmentation; the message names it, and the place.
        """
        text = Strings(strings, self.words)
        text.check(self.log_weights)
        return text.split(text.segmentations(self.log_weights).most_probable())

    def log_prob(self, strings: Sequence[str]) -> Tensor:
        """Return the log probability that a text is this string and ends there, ``(strings,)``.

        Raises
        ------
        SettingsError
            If the end has no probability of its own, and the weights sum to one or more, so that no text ends.
        """
        if self.log_end is not None:
            return self.segmentations(strings).log_normalizer() + self.log_end
        words = float(self.log_weights.detach().exp().sum())
        if not words < 1 - len(self.words) * torch.finfo(self.log_weights.dtype).eps:
            raise SettingsError(
                f"the weights of words sum to {words:.6g}, which leaves no probability for the end of a text; lower "
                "them, or use segmentations(strings).log_normalizer()"
            )
        return self.segmentations(strings).log_normalizer() + (-self.log_weights.exp().sum()).log1p()


def _checked_strings(strings: Sequence[str]) -> tuple[str, ...]:
    """Return ``strings`` as a tuple, or raise DataError where there is none, an empty one, or something else."""
    if isinstance(strings, str):
        raise DataError("strings is one string; give a sequence of them, such as [string]")
    for position, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise DataError(f"string {position} is {string!r}; give strings of at least one character")
    if not len(strings):
        raise DataError("there is no string; give at least one")
    return tuple(strings)


def _checked_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return ``words`` as a tuple, or raise SettingsError where there is none, an empty one, or one twice."""
    if isinstance(words, str):
        raise SettingsError(f"words is one string, {words!r}; give a sequence of words, such as [{words!r}]")
    words = tuple(words)
    if not words:
        raise SettingsError("the lexicon is empty, so that no string has a segmentation; give at least one word")
    seen: set[str] = set()
    for word in words:
        if not isinstance(word, str) or not word:
            raise SettingsError(f"the lexicon holds {word!r}; give words of at least one character")
        if word in seen:
            raise SettingsError(f"the lexicon holds {word!r} twice; add the weights up")
        seen.add(word)
    return words


def _index(strings: tuple[str, ...], words: tuple[str, ...] | None, longest: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return the number of the segment at each place and length, one past the last where there is none, and all."""
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


# A Pyro model of texts without spaces, with its exact twin.


class SegmentedText:
    r"""Texts made of words, their segmentations summed out: a Pyro model of the probabilities of words.

    .. math::
        (\pi_1, \dots, \pi_W, \pi_{end}) \sim \mathrm{Dirichlet}(\alpha), \qquad
        p(\text{string} \mid \pi) = \pi_{end} \sum_{\text{segmentations}} \prod_i \pi_{s_i}.

    The probabilities are the site ``"probabilities"``, in the order of ``text.segments`` and then the end. Give the
    model to :meth:`bayeskit.Target.from_pyro`; :meth:`log_evidence` is exact.

    Parameters
    ----------
    text : Strings
        Strings and the words that they may consist of.
    concentration : Tensor, array or float
        Of the Dirichlet distribution, above zero, shape ``(words + 1,)``; the last belongs to the end. A number is that
        of every word and of the end.

    Raises
    ------
    ShapeError
        If there is not one concentration for each word and the end.
    SettingsError
        If one is not above zero and finite.
    DataError
        If a string has no segmentation, or the concentration is no real number.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.discrete.sequences import SegmentedText, Strings
    >>> text = Strings(["abab", "aab"], words=["a", "b", "ab"])
    >>> model = SegmentedText(text, torch.ones(4, dtype=torch.float64))
    >>> bk.Target.from_pyro(model).dim, round(model.log_evidence(), 6)
    (3, -8.283999)
    """

    #: Factors that are log probabilities of data, with all constants.
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
            raise SettingsError("concentration must be above 0 and finite everywhere")
        text.check(torch.zeros_like(concentration[:-1]))
        self.text, self.concentration = text, concentration

    def __repr__(self) -> str:
        return f"SegmentedText({self.text!r})"

    def __call__(self) -> None:
        """Draw the probabilities of words, and weigh them by the probability of the texts."""
        probabilities = pyro.sample("probabilities", dist.Dirichlet(self.concentration))
        logarithms = probabilities.log()
        with pyro.plate("strings", len(self.text.strings)):
            pyro.factor("texts", self.text.log_marginal(logarithms[..., :-1]) + logarithms[..., -1:])

    def log_evidence(self, limit: int = 100_000) -> float:
        """Return the exact log probability of the texts, the probabilities of words integrated out.

        Given a segmentation, words are counts and the integral is known; segmentations with the same counts are added
        up as they are enumerated.

        Parameters
        ----------
        limit : int, default 100_000
            The largest number of segmentations of one string, and of pairs of counts to be joined, that is enumerated.

        Raises
        ------
        SettingsError
            If there are more; the message says how many.
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
        moments = (torch.lgamma(counts + alpha) - torch.lgamma(alpha)).sum(-1)
        normalizer = torch.lgamma(alpha.sum()) - torch.lgamma((counts + alpha).sum(-1))
        return float((moments + normalizer + multiplicity.log()).logsumexp(0))

    def _counts(self, row: int, limit: int) -> Counter[tuple[int, ...]]:
        """Count how often each word occurs, for every segmentation of one string."""
        string, numbers = self.text.strings[row], {word: i for i, word in enumerate(self.text.segments)}
        last = [
            [
                (s, numbers[string[s:end]])
                for s in range(max(0, end - self.text.max_length), end)
                if string[s:end] in numbers
            ]
            for end in range(1, len(string) + 1)
        ]
        ways = [1]
        for pieces in last:
            ways.append(sum(ways[start] for start, _ in pieces))
        if ways[-1] > limit:
            number = ways[-1] if ways[-1] < 10**15 else f"about exp({math.log(ways[-1]):.6g})"
            raise SettingsError(
                f"string {row} has {number} segmentations, which exceed limit={limit}; give shorter texts"
            )
        found: list[list[tuple[int, ...]]] = [[(0,) * len(numbers)]]
        for pieces in last:
            found.append([(*c[:w], c[w] + 1, *c[w + 1 :]) for start, w in pieces for c in found[start]])
        return Counter(found[-1])


# Learning a lexicon from strings without word boundaries.

_POSITIVE = (0.0, math.inf)


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
    concentration = real_number("concentration", concentration, _POSITIVE)
    if concentration < 1:
        raise SettingsError(f"concentration must be at least 1, not {concentration:g}: there is no mode below")
    if length_penalty is not None:
        length_penalty = real_number("length_penalty", length_penalty, _POSITIVE)
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
