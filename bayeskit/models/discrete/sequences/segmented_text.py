"""A Pyro model of texts without spaces, with its exact twin."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.discrete.inputs import as_real
from bayeskit.models.discrete.sequences.strings import Strings


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
