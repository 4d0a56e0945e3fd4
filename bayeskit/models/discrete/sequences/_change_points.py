"""Exact Bayesian change-point models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import new_generator, real_number, whole_number
from bayeskit.models.discrete._inputs import as_real, check_part
from bayeskit.models.discrete.sequences._chains import LogSum, MaxWeight, draw_categories
from bayeskit.models.discrete.sequences._segmentations import (
    Choice,
    follow_numbered,
    numbered_probabilities,
    numbered_sums,
)

# Models of the data within a segment, parameters integrated out.


class SegmentModel(Protocol):
    """Interface of the model of the data within a segment."""

    def log_marginals(self, x: Tensor, max_length: int) -> Tensor:
        """Return the log marginal likelihood of every segment.

        ``x``: ``(n,)``. Returns ``(n, max_length)``. Entry ``[j, l]`` is for the ``l + 1`` observations up to and
        including ``x[j]``. Entries with ``l > j`` are ignored.
        """

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's mean, indexed as :meth:`log_marginals`."""


@dataclass(frozen=True)
class NormalSegments:
    r"""Normal data with mean and variance per segment.

    .. math:: \sigma^2 \sim \mathrm{InverseGamma}(a, b), \qquad \mu \mid \sigma^2 \sim N(m_0, \sigma^2 / k_0).

    Raises ``SettingsError`` if a parameter is not finite, or ``precision``, ``shape`` or ``rate`` is not positive.

    Parameters
    ----------
    mean : float
        :math:`m_0`.
    precision : float
        :math:`k_0`, the prior sample size of the mean.
    shape, rate : float
        :math:`a` and :math:`b`.

    References
    ----------
    Bernardo, J. M., Smith, A. F. M. (1994). Bayesian theory. Wiley, section 5.2.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import NormalSegments
    >>> model = NormalSegments(mean=0.0, precision=1.0, shape=2.0, rate=1.0)
    >>> model.log_marginals(torch.tensor([0.5, -0.5, 0.1]), max_length=1)[:, 0]
    tensor([-1.1324, -1.1324, -0.9871])
    """

    mean: float
    precision: float
    shape: float
    rate: float

    def __post_init__(self) -> None:
        real_number("mean", self.mean, "(-inf, inf)")
        for name in ("precision", "shape", "rate"):
            real_number(name, getattr(self, name), "(0, inf)")

    def log_marginals(self, x: Tensor, max_length: int) -> Tensor:
        """Return the log marginal likelihood of every segment, ``(n, max_length)``.

        Raises ``DataError`` if ``x`` is not finite.
        """
        x = _finite(x)
        count, mean, spread = _moments(x, max_length)
        precision, shape = self.precision + count, self.shape + count / 2
        off = self.precision * count / precision * (mean - self.mean).square()
        rate = self.rate + 0.5 * (spread + off)
        marginals = (
            torch.lgamma(shape)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - shape * rate.log()
            + 0.5 * (math.log(self.precision) - precision.log())
            - 0.5 * count * math.log(2 * math.pi)
        )
        return marginals.to(x.dtype)

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's mean, ``(n, max_length)``."""
        x = _finite(x)
        count, mean, _ = _moments(x, max_length)
        return (self.mean + count / (self.precision + count) * (mean - self.mean)).to(x.dtype)


@dataclass(frozen=True)
class PoissonSegments:
    r"""Poisson counts with a rate per segment, :math:`\lambda \sim \Gamma(a, b)`.

    Raises ``SettingsError`` if a parameter is not positive and finite.

    Parameters
    ----------
    shape, rate : float
        :math:`a` and :math:`b`; the prior mean is ``shape / rate``.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import PoissonSegments
    >>> PoissonSegments(1.0, 1.0).log_marginals(torch.tensor([0.0, 1.0, 2.0]), max_length=1)[:, 0].exp()
    tensor([0.5000, 0.2500, 0.1250])
    """

    shape: float
    rate: float

    def __post_init__(self) -> None:
        for name in ("shape", "rate"):
            real_number(name, getattr(self, name), "(0, inf)")

    def log_marginals(self, x: Tensor, max_length: int) -> Tensor:
        """Return the log marginal likelihood of every segment, ``(n, max_length)``.

        Raises ``DataError`` if ``x`` has values that are not nonnegative integers.
        """
        x = _finite(x)
        if bool(((x < 0) | (x != x.round())).any()):
            raise DataError("the counts hold a negative number or a fraction; give nonnegative whole numbers")
        counts = _windows(x, max_length)
        length, total = _lengths(counts), counts.cumsum(1)
        marginals = (
            torch.lgamma(self.shape + total)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - (self.shape + total) * (self.rate + length).log()
            - torch.lgamma(counts + 1).cumsum(1)
        )
        return marginals.to(x.dtype)

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's rate, ``(n, max_length)``."""
        x = _finite(x)
        counts = _windows(x, max_length)
        return ((self.shape + counts.cumsum(1)) / (self.rate + _lengths(counts))).to(x.dtype)


def _finite(x: Tensor) -> Tensor:
    """Return ``x`` in floating point, or raise DataError that names the first number that is not finite."""
    x = as_real("x", x, torch.float64)
    if x.dim() != 1 or not len(x):
        raise ShapeError(f"x has shape {tuple(x.shape)}; give a sequence of numbers, (n,)")
    bad = (~x.isfinite()).nonzero()
    if len(bad):
        raise DataError(f"x[{int(bad[0])}] is {float(x[bad[0]])}; give finite data")
    return x


def _windows(x: Tensor, max_length: int) -> Tensor:
    """Return lagged observations ``x[j - l]``, float64, ``(n, max_length)``; ``x[0]`` before the data."""
    x = x.double()
    padded = torch.cat([x[:1].expand(max_length - 1), x])
    return padded.unfold(0, max_length, 1).flip(1)


def _lengths(windows: Tensor) -> Tensor:
    return torch.arange(1, windows.shape[1] + 1, dtype=windows.dtype, device=windows.device)


def _moments(x: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number ``(L,)``, and the mean and sum of squares about it ``(n, L)``, of every segment's data."""
    # Segments are extended backwards by Welford's update of the sum of squares, without cancellation. Means are
    # relative to the last observation, to preserve precision for data far from zero.
    off = _windows(x, max_length) - x.double().unsqueeze(1)
    count = _lengths(off)
    mean = off.cumsum(1) / count
    rises = (off[:, 1:] - mean[:, :-1]).square() * count[:-1] / count[1:]
    spread = torch.cat([torch.zeros_like(off[:, :1]), rises.cumsum(1)], 1)
    return count, x.double().unsqueeze(1) + mean, spread


class ChangePointPrior(Protocol):
    """Interface of a prior of change points: weights of segments and of their number."""

    def largest(self, n: int) -> int:
        """Return the maximum number of change points among ``n`` observations."""

    def segment_weights(self, n: int, max_length: int) -> Tensor:
        """Return log weights of segments, ``(n, max_length)``, float64."""

    def number_weights(self, totals: Tensor) -> Tensor:
        """Return normalizing log weights of the number of change points, ``(numbers,)``.

        ``totals``: for each number, log total weight of the segmentations with this number of change points.
        """


@dataclass(frozen=True)
class NumberOfChanges:
    """Prior with given probabilities of the number of change points and uniform positions given the number.

    Numbers that are impossible under the segment length limits are excluded; the others are normalized. Raises
    ``SettingsError`` if a probability is not a number, negative or not finite, or all are zero.

    Parameters
    ----------
    probabilities : tuple of float
        Probabilities of 0, 1, 2, ... change points, nonnegative; normalized internally.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import NumberOfChanges
    >>> NumberOfChanges.exactly(1), NumberOfChanges.up_to(2)
    (NumberOfChanges(probabilities=(0.0, 1.0)), NumberOfChanges(probabilities=(1.0, 1.0, 1.0)))
    """

    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        try:
            numbers = tuple(real_number("probabilities", p) for p in self.probabilities)
        except TypeError:
            raise SettingsError(
                f"probabilities={self.probabilities!r}; give the probabilities of 0, 1, 2, ... changes, such as "
                "(0.5, 0.5), or use NumberOfChanges.up_to(3) or NumberOfChanges.exactly(3)"
            ) from None
        object.__setattr__(self, "probabilities", numbers)
        if not all(0 <= p < math.inf for p in self.probabilities) or not sum(self.probabilities) > 0:
            raise SettingsError(f"probabilities={self.probabilities}; give finite numbers of at least 0, not all zero")

    @classmethod
    def exactly(cls, number: int) -> NumberOfChanges:
        """Fix the number of change points."""
        return cls((0.0,) * whole_number("number", number, least=0) + (1.0,))

    @classmethod
    def up_to(cls, number: int) -> NumberOfChanges:
        """Use a uniform prior of the number of change points from 0 to this number."""
        return cls((1.0,) * (whole_number("number", number, least=0) + 1))

    def largest(self, n: int) -> int:
        """Return the maximum number of change points."""
        return len(self.probabilities) - 1

    def segment_weights(self, n: int, max_length: int) -> Tensor:
        """Return constant log weights of segments."""
        return torch.zeros(n, max_length, dtype=torch.float64)

    def number_weights(self, totals: Tensor) -> Tensor:
        """Return log weights of the number of change points.

        Raises ``SettingsError`` if no number with positive probability is possible.
        """
        logits = torch.tensor(self.probabilities, dtype=torch.float64).log()
        room = totals > -math.inf
        possible = room & (logits > -math.inf)
        if not bool(possible.any()):
            fits = room.nonzero().flatten().tolist()
            raise SettingsError(
                f"with {int(logits.argmax())} change points, or any other number of positive probability, no "
                f"segmentation fits the segment length limits; allow one from {fits[0]} to {fits[-1]}, or relax the "
                "limits"
            )
        logits = logits.masked_fill(~possible, -math.inf)
        return torch.where(possible, logits.log_softmax(0) - totals, -math.inf)


@dataclass(frozen=True)
class NegativeBinomialLengths:
    r"""Prior with independent negative binomial segment lengths; the last segment is censored.

    A segment has length :math:`l` with probability :math:`\binom{l-1}{r-1} p^r (1-p)^{l-r}`. With :math:`r=1` each
    position is a change point independently with probability :math:`p`. Raises ``SettingsError`` if a setting lies
    outside its domain.

    Parameters
    ----------
    probability : float
        :math:`p`, between 0 and 1.
    successes : int, default 1
        :math:`r`, also the minimum length.
    most : int, optional
        Maximum number of change points, on which the prior is conditioned. Default: no limit; the cost is then cubic in
        the number of observations.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import NegativeBinomialLengths
    >>> NegativeBinomialLengths(0.25).segment_weights(3, 3).exp()[0, 0]
    tensor(0.2500, dtype=torch.float64)
    """

    probability: float
    successes: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        real_number("probability", self.probability, "(0, 1)")
        whole_number("successes", self.successes, least=1)
        if self.most is not None:
            whole_number("most", self.most, least=0)

    def largest(self, n: int) -> int:
        """Return the maximum number of change points."""
        room = (n - 1) // self.successes
        return room if self.most is None else min(room, self.most)

    def segment_weights(self, n: int, max_length: int) -> Tensor:
        """Return log probabilities of segment lengths; of at least the length for the last segment."""
        length = torch.arange(1, n + 1, dtype=torch.float64)
        r, p = self.successes, self.probability
        ways = torch.lgamma(length) - torch.lgamma((length - r + 1).clamp_min(1)) - math.lgamma(r)
        mass = torch.where(length >= r, ways + r * math.log(p) + (length - r) * math.log1p(-p), -math.inf)
        # Length at least l: fewer than r successes in l - 1 trials, a sum of at most r nonnegative terms.
        failures = torch.arange(r, dtype=torch.float64)
        before = (length - 1).unsqueeze(1)
        terms = (
            torch.lgamma(before + 1) - torch.lgamma(failures + 1) - torch.lgamma((before - failures + 1).clamp_min(1))
        )
        terms = terms + failures * math.log(p) + (before - failures) * math.log1p(-p)
        survival = torch.where(failures <= before, terms, -math.inf).logsumexp(1)
        weights = mass[:max_length].expand(n, max_length).clone()
        weights[-1] = survival[:max_length]
        return weights

    def number_weights(self, totals: Tensor) -> Tensor:
        """Return log weights that condition the prior on its limits."""
        return -totals.logsumexp(0).expand(totals.shape)


class ChangePoints:
    r"""Exact posterior of the number and positions of change points.

    Segments are independent, with parameters integrated out. Dynamic programming sums over the positions for each
    number of change points.

    Parameters
    ----------
    x : Tensor or array
        Time series, shape ``(n,)``. Integers are converted to double precision.
    segments : SegmentModel
        E.g. :class:`NormalSegments` or :class:`PoissonSegments`.
    prior : ChangePointPrior
        :class:`NumberOfChanges` or :class:`NegativeBinomialLengths`, normalized within the limits below.
    min_length : int, default 1
        Minimum segment length.
    max_length : int, optional
        Maximum segment length; default no limit.

    Attributes
    ----------
    log_evidence : Tensor
        Log marginal likelihood, shape ``()``.
    log_evidence_by_number : Tensor
        Log marginal likelihood given 0, 1, 2, ... change points, ``(largest + 1,)``; NaN for impossible numbers.
    number_probabilities : Tensor
        Posterior of the number of change points, ``(largest + 1,)``.

    Raises
    ------
    ShapeError
        If ``x`` is not one-dimensional, or the segment model returns a wrong shape.
    SettingsError
        If a setting is outside its domain, ``segments`` or ``prior`` has a wrong type, or the prior excludes all
        segmentations.
    DataError
        If the data are not real, invalid for the segment model, or have probability zero.

    References
    ----------
    Fearnhead, P. (2006). Exact and efficient Bayesian inference for multiple changepoint problems. Statistics and
    Computing 16, 203-213.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import ChangePoints, NormalSegments, NumberOfChanges
    >>> x = torch.tensor([0.1, -0.2, 0.3, 0.0, 5.1, 4.8, 5.3], dtype=torch.float64)
    >>> posterior = ChangePoints(x, NormalSegments(0.0, 0.1, 2.0, 1.0), NumberOfChanges.up_to(2))
    >>> posterior
    ChangePoints(7 data, most probably 1 change, log evidence -12.7738)
    >>> posterior.most_probable()
    tensor([False, False, False,  True, False, False])
    >>> posterior.number_probabilities
    tensor([3.8632e-05, 7.3731e-01, 2.6265e-01], dtype=torch.float64)
    """

    def __init__(
        self,
        x: Tensor,
        segments: SegmentModel,
        prior: ChangePointPrior,
        *,
        min_length: int = 1,
        max_length: int | None = None,
    ) -> None:
        x = as_real("x", x, torch.float64)
        check_part("segments", segments, "log_marginals", "a model such as PoissonSegments(shape=1.0, rate=1.0)")
        check_part("prior", prior, "number_weights", "a prior such as NumberOfChanges.up_to(3)")
        if x.dim() != 1 or not len(x):
            raise ShapeError(f"x has shape {tuple(x.shape)}; give a sequence of numbers, (n,)")
        n = len(x)
        shortest = whole_number("min_length", min_length, least=1)
        longest = n if max_length is None else min(n, whole_number("max_length", max_length, least=1))
        if shortest > longest:
            raise SettingsError(f"min_length={shortest} exceeds the longest possible segment, {longest}; lower it")
        self.x, self.segments, self.longest = x, segments, longest
        marginals = _checked_marginals(segments.log_marginals(x, longest), n, longest)
        weights = prior.segment_weights(n, longest).to(marginals)
        weights = torch.where(torch.arange(1, longest + 1, device=weights.device) >= shortest, weights, -math.inf)
        self._most = prior.largest(n) + 1
        totals = numbered_sums(LogSum(), weights, self._most)[1:, -1]
        if not bool((totals > -math.inf).any()):
            raise SettingsError("the prior and the segment length limits allow no segmentation of the data; relax them")
        self._number_weights = prior.number_weights(totals.cpu()).to(marginals)
        self._weights = weights + marginals
        self._sums = numbered_sums(LogSum(), self._weights, self._most)
        ends = self._sums[1:, -1]
        allowed = self._number_weights > -math.inf
        self.log_evidence_by_number = torch.where(allowed, ends - totals, math.nan)
        joint = ends + self._number_weights
        self.log_evidence = LogSum().sum(joint, -1)
        if not bool(self.log_evidence > -math.inf):
            raise DataError("the data have probability zero under the segment model and the prior; relax one of them")
        self.number_probabilities = joint.softmax(-1)

    def __repr__(self) -> str:
        best = int(self.number_probabilities.argmax())
        changes = f"{best} change{'' if best == 1 else 's'}"
        return f"ChangePoints({len(self.x)} data, most probably {changes}, log evidence {float(self.log_evidence):.6g})"

    def segment_probabilities(self) -> Tensor:
        """Return the posterior probability of each segment, ``(n, max_length)``.

        Entry ``[j, l]`` is for the segment of ``l + 1`` observations up to and including ``x[j]``.
        """
        return numbered_probabilities(self._sums, self._weights, self.number_probabilities)

    def place_probabilities(self) -> Tensor:
        """Return the posterior probability of a change point after each observation, ``(n - 1,)``."""
        return self.segment_probabilities().sum(-1)[:-1]

    def levels(self) -> Tensor:
        """Return the posterior mean of the mean of each observation, ``(n,)``, averaged over segmentations."""
        share = self.segment_probabilities()
        parts = share * torch.where(share > 0, self.segments.levels(self.x, self.longest), 0.0)
        # Segments of length > l that end at an observation contain the observation l positions earlier.
        reaching = parts.flip(1).cumsum(1).flip(1)
        n = len(self.x)
        place = torch.arange(n, device=parts.device).unsqueeze(1) - torch.arange(self.longest, device=parts.device)
        return parts.new_zeros(n).index_add(0, place.clamp_min(0).flatten(), reaching.flatten())

    def most_probable(self) -> Tensor:
        """Return the joint mode of the number and positions of change points.

        Returns ``(n - 1,)``, bool: True where a change point follows the observation.
        """
        sums = numbered_sums(MaxWeight(), self._weights, self._most)
        number = (sums[1:, -1] + self._number_weights).argmax() + 1
        return self._places(sums, number, lambda logits: logits.argmax(-1))

    def sample(self, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw independent sets of change points from the posterior.

        Returns ``(num_samples, n - 1)``, bool: True where a change point follows the observation. Raises
        ``SettingsError`` if ``num_samples`` is not a positive integer.
        """
        num_samples = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, self.x.device, stream="change_points")
        number = draw_categories(self._sums[1:, -1] + self._number_weights, num_samples, generator) + 1
        return self._places(self._sums, number, lambda logits: draw_categories(logits, 1, generator)[0])

    def _places(self, sums: Tensor, number: Tensor, choose: Choice) -> Tensor:
        with torch.no_grad():
            return follow_numbered(sums, self._weights, number, choose)[..., :-1]


def _checked_marginals(marginals: Tensor, n: int, longest: int) -> Tensor:
    if marginals.shape != (n, longest):
        raise ShapeError(f"the segment model returns log marginals {tuple(marginals.shape)} instead of {(n, longest)}")
    read = torch.ones_like(marginals, dtype=torch.bool).tril()
    bad = read & (marginals.isnan() | (marginals == math.inf))
    if bool(bad.any()):
        place, length = bad.nonzero()[0].tolist()
        raise DataError(
            f"the log marginal of the {length + 1} data up to x[{place}] is {float(marginals[place, length])}; a "
            "segment model must return finite numbers or minus infinity"
        )
    return torch.where(read, marginals.detach(), -math.inf)
