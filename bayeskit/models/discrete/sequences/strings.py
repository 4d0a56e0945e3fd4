"""Strings whose words are not marked, and lexicons to segment them with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._settings import whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.inputs import as_real
from bayeskit.models.discrete.sequences.segmentations import Segmentations
from bayeskit.models.discrete.sequences.segments import totals
from bayeskit.models.discrete.sequences.semirings import LogSum


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
        self.strings = checked_strings(strings)
        allowed = None if words is None else checked_words(words)
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
        self.words = checked_words(words)
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


def checked_strings(strings: Sequence[str]) -> tuple[str, ...]:
    """Return ``strings`` as a tuple, or raise DataError where there is none, an empty one, or something else."""
    if isinstance(strings, str):
        raise DataError("strings is one string; give a sequence of them, such as [string]")
    for position, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise DataError(f"string {position} is {string!r}; give strings of at least one character")
    if not len(strings):
        raise DataError("there is no string; give at least one")
    return tuple(strings)


def checked_words(words: Sequence[str]) -> tuple[str, ...]:
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
