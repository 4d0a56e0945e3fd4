"""Exact tests and simultaneous bands for the uniformity of ranks, integers from 0 to a known maximum."""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.special import gammaln, xlog1py, xlogy
from scipy.stats import binom, chi2, rankdata

_MIN_EXPECTED = 10
_MAX_BINS = 20


def rank_bins(num_replicates: int, num_draws: int) -> list[np.ndarray]:
    """Split the ranks ``0 .. num_draws`` into nearly equal bins, with at least ten expected replicates each."""
    count = max(2, min(_MAX_BINS, num_draws + 1, num_replicates // _MIN_EXPECTED))
    return np.array_split(np.arange(num_draws + 1), count)


def chi_square_p_value(ranks: np.ndarray, num_draws: int) -> float:
    """Return the p-value of Pearson's test on binned ranks from 0 to ``num_draws``, ``(replicates,)``."""
    bins = rank_bins(len(ranks), num_draws)
    observed = np.array([np.isin(ranks, b).sum() for b in bins])
    expected = len(ranks) * np.array([len(b) for b in bins]) / (num_draws + 1)
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(bins) - 1))


def ecdf_p_value(ranks: np.ndarray, num_draws: int) -> float:
    """Return the exact p-value of the ECDF of ranks 0 to ``num_draws``, ``(replicates,)`` (Sailynoja et al. 2022)."""
    tails = _tails(len(ranks), num_draws)
    counts = np.cumsum(np.bincount(ranks, minlength=num_draws + 1))[:-1]
    # The largest deviation from uniform, as a two-sided binomial tail probability.
    smallest = tails[np.arange(num_draws), counts].min()
    return float(np.clip(1.0 - _coverage(tails, smallest * (1 + 1e-9)), 0.0, 1.0))


@functools.lru_cache(maxsize=8)
def ecdf_band(num_replicates: int, num_draws: int, coverage: float = 0.99) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper limits ``(num_draws,)`` that hold the whole ECDF of uniform ranks with ``coverage``."""
    tails = _tails(num_replicates, num_draws)
    low, high = 0.0, 1.0 - coverage
    for _ in range(24):
        level = 0.5 * (low + high)
        low, high = (level, high) if _coverage(tails, level) >= coverage else (low, level)
    first, last = _limits(tails, low)
    return first / num_replicates, last / num_replicates


@functools.lru_cache(maxsize=8)
def _tails(num_replicates: int, num_draws: int) -> np.ndarray:
    """Two-sided tail probability of each count of ranks up to each, ``(num_draws, num_replicates + 1)``."""
    counts = np.arange(num_replicates + 1)
    share = np.arange(1, num_draws + 1)[:, None] / (num_draws + 1)
    lower, upper = binom.cdf(counts, num_replicates, share), binom.sf(counts - 1, num_replicates, share)
    return np.minimum(1.0, 2.0 * np.minimum(lower, upper))


def _limits(tails: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """First and last count of each row whose tail probability is above ``level``."""
    inside = tails > level
    return inside.argmax(1), tails.shape[1] - 1 - inside[:, ::-1].argmax(1)


def _coverage(tails: np.ndarray, level: float) -> float:
    """Probability that no count of uniform ranks has a tail probability of ``level`` or less."""
    if not (tails > level).any(1).all():
        return 0.0
    num_draws, total = tails.shape[0], tails.shape[1] - 1
    first, last = _limits(tails, level)
    before, mass = np.array([0]), np.array([1.0])
    for i in range(num_draws):
        after = np.arange(first[i], last[i] + 1)
        # Each rank above i - 1 equals i with the same probability.
        mass = mass @ _binomial(after[None, :] - before[:, None], (total - before)[:, None], 1 / (num_draws + 1 - i))
        before = after
    return float(mass.sum())


def _binomial(k: np.ndarray, n: np.ndarray, p: float) -> np.ndarray:
    possible = (k >= 0) & (k <= n)
    k = np.where(possible, k, 0)
    log = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + xlogy(k, p) + xlog1py(n - k, -p)
    return np.where(possible, np.exp(log), 0.0)


def local_p_value(ranks: np.ndarray, num_draws: int, statistic: np.ndarray) -> float:
    """Return the p-value of uniform ranks, integers from 0 to ``num_draws``, whatever a statistic of the data.

    Two cosines of the ranks, which have no mean and equal variances if ranks are uniform, are multiplied by two
    polynomials of the statistic's own ranks; the four sums have a joint normal distribution.
    """
    u = (ranks + 0.5) / (num_draws + 1)
    x = (rankdata(statistic) - 0.5) / len(statistic) - 0.5
    x = x - x.mean()
    square = x**2 - (x**2).mean()
    square = square - x * (square @ x) / (x @ x) if x.any() else square
    total, count = 0.0, 0
    for polynomial in (x, square):
        size = np.sqrt(polynomial @ polynomial)
        if size > 1e-6 * np.sqrt(len(x)):  # a statistic of two values has no square
            for k in (1, 2):
                total += float((np.sqrt(2) * np.cos(np.pi * k * u) @ polynomial / size) ** 2)
                count += 1
    return float(chi2.sf(total, count)) if count else 1.0


def holm(p_values: np.ndarray) -> np.ndarray:
    """Return p-values adjusted for their number by Holm's step-down method, same shape."""
    flat = np.asarray(p_values, dtype=float).reshape(-1)
    order = flat.argsort()
    stepped = np.maximum.accumulate(flat[order] * np.arange(len(flat), 0, -1))
    adjusted = np.empty_like(flat)
    adjusted[order] = np.minimum(1.0, stepped)
    return adjusted.reshape(np.shape(p_values))


def deviation_sd(num_replicates: int, num_draws: int) -> float:
    """Return the standard deviation of the mean of uniform ranks, as a share of ``num_draws``."""
    return math.sqrt((num_draws + 2) / (12 * num_draws * num_replicates))
