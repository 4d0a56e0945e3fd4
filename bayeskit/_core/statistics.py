"""Monte Carlo errors: effective sample size, standard errors, and Pareto smoothing of weights."""

from __future__ import annotations

import functools
import math

import scipy
import torch
from torch import Tensor

# Pareto smoothing: the largest importance weights are replaced by quantiles of a fitted distribution.

_MIN_TAIL = 5
#: Relative difference below which weights are equal up to rounding.
_SAME_WEIGHT = 1e-12


def pareto_smoothed(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return Pareto-smoothed, normalised log weights ``(*batch, draws)`` and ``k`` ``(*batch)`` (Vehtari et al. 2024).

    ``k`` is ``inf`` for too few weights to fit and rows of ``-inf``, which become uniform; ``-inf`` for equal tails.
    """
    batch, n = log_weights.shape[:-1], log_weights.shape[-1]
    rows = log_weights.reshape(-1, n).to(torch.float64)
    largest = rows.amax(-1, keepdim=True)
    nothing = largest.squeeze(-1) == -torch.inf
    rows = torch.where(nothing.unsqueeze(-1), 0.0, rows - largest)
    length = num_largest(n) - 1
    if length < _MIN_TAIL:
        equal = (rows.amin(-1) > -_SAME_WEIGHT) & ~nothing
        shape = torch.where(equal, -torch.inf, torch.inf)
        return (rows - rows.logsumexp(-1, keepdim=True)).reshape(log_weights.shape), shape.reshape(batch)
    ordered, order = rows.sort(-1)
    equal = (ordered[:, -length - 1] > -_SAME_WEIGHT) & ~nothing
    cutoff = ordered[:, -length - 1].exp().unsqueeze(-1)
    scale, shape, usable = _fitted_beyond(cutoff, ordered[:, -length:].exp())
    usable &= ~equal
    level = (torch.arange(length, dtype=rows.dtype, device=rows.device) + 0.5) / length
    k = shape.unsqueeze(-1)
    quantile = cutoff + scale.unsqueeze(-1) * torch.expm1(-k * torch.log1p(-level)) / k
    tail = torch.where(usable.unsqueeze(-1), quantile.log().clamp(max=0.0), ordered[:, -length:])
    rows = rows.scatter(-1, order[:, -length:], tail)
    shape = torch.where(usable, shape, torch.where(equal, -torch.inf, torch.inf))
    return (rows - rows.logsumexp(-1, keepdim=True)).reshape(log_weights.shape), shape.reshape(batch)


def num_largest(num_weights: int) -> int:
    """Return the number of largest weights that :func:`shape_of_largest` takes, including the cutoff."""
    return min(num_weights // 5, math.ceil(3 * math.sqrt(num_weights))) + 1


def shape_of_largest(largest: Tensor) -> Tensor:
    """Return ``k`` as of :func:`pareto_smoothed`, ``(m,)``, from the ascending largest log weights, ``(m, n)``."""
    rows = largest - largest[:, -1:]
    equal = rows[:, 0] > -_SAME_WEIGHT
    if rows.shape[1] - 1 < _MIN_TAIL:
        return torch.where(equal, -torch.inf, torch.inf)
    _, shape, usable = _fitted_beyond(rows[:, :1].exp(), rows[:, 1:].exp())
    return torch.where(equal, -torch.inf, torch.where(usable, shape, torch.inf))


def _fitted_beyond(cutoff: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit tails beyond cutoffs ``(m, 1)``: scale, shape and whether the tail was long enough, each ``(m,)``."""
    length, excess = tail.shape[-1], tail - cutoff
    # A tail whose lower quartile equals the cutoff cannot be fitted.
    usable = excess[:, length // 4 - 1] > 0
    filler = torch.linspace(0.1, 1.0, length, dtype=tail.dtype, device=tail.device)
    scale, shape = _fitted_tail(torch.where(usable.unsqueeze(-1), excess, filler))
    return scale, shape, usable


def _fitted_tail(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and shape, ``(m,)``, of Pareto fits to ascending excesses ``(m, n)`` (Zhang and Stephens 2009)."""
    n = excess.shape[-1]
    count = 30 + int(math.sqrt(n))
    grid = torch.arange(1, count + 1, dtype=excess.dtype, device=excess.device)
    quartile, largest = excess[:, int(n / 4 + 0.5) - 1 : int(n / 4 + 0.5)], excess[:, -1:]
    b = 1 / largest + (1 - (count / (grid - 0.5)).sqrt()) / (3 * quartile)
    shape = torch.log1p(-b.unsqueeze(-1) * excess.unsqueeze(1)).mean(-1)
    log_likelihood = n * ((-b / shape).log() - shape - 1)
    mean = (b * torch.softmax(log_likelihood, -1)).sum(-1, keepdim=True)
    shape = torch.log1p(-mean * excess).mean(-1)
    # A weak prior at 0.5, worth ten observations, steadies short tails.
    return -shape / mean.squeeze(-1), (n * shape + 10 * 0.5) / (n + 10)


# Monte Carlo errors: effective sample size, standard errors and the Pareto shape of weights.


def effective_sample_size(x: Tensor) -> Tensor:
    """Return the effective sample size of the mean, ``(*batch, chains, draws) -> (*batch)`` (Vehtari et al. 2021).

    At least 8 draws; a constant counts in full, and a value that is not finite gives NaN.
    """
    # Split chains, autocovariances by FFT, Geyer's initial monotone sequence; without rank normalisation.
    dtype, x = x.dtype, _split(x).to(torch.float64)  # so that rounding in single precision does not count as variance
    chains, n = x.shape[-2:]
    total = chains * n
    covariance = _autocovariance(x)
    within = covariance[..., 0]
    between = x.mean(-1).var(-1) if chains > 1 else torch.zeros_like(within)
    variance = within * (n - 1) / n + between
    correlation = 1 - (within.unsqueeze(-1) - covariance) / variance.unsqueeze(-1)
    result = total / _correlation_time(correlation, total)
    constant = variance <= 1e-28 * x.abs().amax((-1, -2)).square()
    return _of_finite(x, torch.where(constant, torch.full_like(result, total), result)).to(dtype)


def effective_within_chains(x: Tensor) -> Tensor:
    """Return the effective sample size of half a chain, ``(*batch, chains, draws) -> (*batch)``."""
    dtype, x = x.dtype, _split(x).to(torch.float64)
    covariance = _autocovariance(x)
    correlation = covariance / covariance[..., :1]
    n = x.shape[-1]
    result = n / _correlation_time(correlation, n * x.shape[-2])
    return _of_finite(x, torch.where(covariance[..., 0] > 0, result, torch.full_like(result, n))).to(dtype)


@functools.cache
def _fft_size(n: int) -> int:
    """Return the smallest number from ``n`` on without prime factors above five, whose Fourier transform is fast."""
    odd = (3**i * 5**j for i in range(n.bit_length()) for j in range(n.bit_length()))
    return min(k << (-(-n // k) - 1).bit_length() for k in odd)


def _autocovariance(x: Tensor) -> Tensor:
    """Mean over chains of the autocovariance at each lag, ``(*batch, chains, n) -> (*batch, n)``."""
    n = x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    size = _fft_size(2 * n)
    spectrum = torch.view_as_real(torch.fft.rfft(centred, n=size)).square().sum(-1)
    return torch.fft.irfft(spectrum, n=size)[..., :n].mean(-2) / (n - 1)


def _correlation_time(correlation: Tensor, total: int) -> Tensor:
    """Integrated autocorrelation time by Geyer's initial monotone sequence, ``(*batch, n) -> (*batch)``."""
    correlation = correlation.clone()
    correlation[..., 0] = 1.0
    n = correlation.shape[-1]
    pairs = correlation[..., : n - n % 2].unflatten(-1, (-1, 2)).sum(-1)
    # Geyer: keep pair sums while positive, then force them to decrease.
    positive = torch.cumprod((pairs > 0).to(correlation.dtype), -1)
    monotone = torch.cummin(torch.where(positive > 0, pairs, 0.0), -1).values
    return (-1 + 2 * monotone.sum(-1)).clamp(min=1 / math.log10(total))


def r_hat(x: Tensor) -> Tensor:
    """Return split R-hat, ``(*batch, chains, draws) -> (*batch)``; NaN where a value is not finite."""
    dtype, x = x.dtype, _split(x).to(torch.float64)
    n = x.shape[-1]
    within = x.var(-1).mean(-1)
    between = x.mean(-1).var(-1)
    ratio = (within * (n - 1) / n + between) / within
    # Constant chains agree only if all have the same value.
    still = torch.where(between > 0, torch.inf, torch.ones_like(ratio))
    return _of_finite(x, torch.where(within > 0, ratio, still).sqrt()).to(dtype)


def _of_finite(x: Tensor, result: Tensor) -> Tensor:
    return torch.where(x.isfinite().all(-1).all(-1), result, torch.nan)


def _split(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], x[..., -half:]], -2)


def mean_error(x: Tensor) -> Tensor:
    """Return the standard error of the mean of autocorrelated draws, ``(*batch, chains, draws) -> (*batch)``."""
    flat = x.flatten(-2)
    return (flat.var(-1) / effective_sample_size(x)).sqrt()


def log_mean_exp(log_x: Tensor) -> Tensor:
    """Logarithm of the mean of ``exp(log_x)`` over chains and draws, ``(*batch, chains, draws) -> (*batch)``."""
    flat = log_x.flatten(-2)
    return flat.logsumexp(-1) - math.log(flat.shape[-1])


def log_mean_exp_error(log_x: Tensor) -> Tensor:
    """Return the standard error of :func:`log_mean_exp` by the delta method, autocorrelation included."""
    relative = (log_x - log_mean_exp(log_x).unsqueeze(-1).unsqueeze(-1)).exp()
    return mean_error(relative)


def independent_log_mean_exp_error(log_x: Tensor) -> Tensor:
    """Return the standard error of :func:`log_mean_exp` for independent draws."""
    flat = log_x.flatten(-2)
    relative = (flat - log_mean_exp(log_x).unsqueeze(-1)).exp()
    return relative.std(-1) / math.sqrt(flat.shape[-1])


def stratified_log_mean_exp_error(log_x: Tensor, part: Tensor) -> Tensor:
    """Return the standard error ``(*batch)`` of the log mean of ``exp(log_x)`` ``(n, *batch)``, by strata ``part``."""
    relative = (log_x - log_x.logsumexp(0) + math.log(len(log_x))).exp()
    found = [relative[part == number] for number in part.unique()]
    # A stratum of one draw has no variance estimate; the draws are then treated as unstratified.
    if min(map(len, found)) < 2:
        found = [relative]
    return torch.stack([len(one) * one.var(0) for one in found]).sum(0).sqrt() / len(log_x)


def replicates_log_mean_error(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard error of the log of a mean of replicates and their relative spread, ``(*batch)`` each.

    ``log_ratio``, ``(*batch, groups, replicates)``, are logs of values over their mean; NaN for a single replicate.
    """
    groups, r = log_ratio.shape[-2:]
    correction = min(1, r - 1)
    # Products over many stages are nearly log-normal (Berard, Del Moral and Doucet 2014). If their variance is large, a
    # few replicates miss the rare large values, and the sample variance is too small; the variance of the logarithms is
    # not. The larger of the two gives the error.
    by_values = log_ratio.exp().var(-1, correction=correction).mean(-1)
    # Pooled before exponentiation: with few replicates the exponential of a variance is far too large on average.
    # Small replicates are raised to exp(-2), a seventh of the mean.
    by_logarithms = log_ratio.clamp(min=-2).var(-1, correction=correction).mean(-1).expm1()
    if r < 2:
        return torch.full_like(by_values, math.nan), torch.full_like(by_values, math.nan)
    # Widened so that 1.96 errors reach the 97.5 % quantile of Student's distribution.
    widened = float(scipy.special.stdtrit(groups * (r - 1), 0.975) / scipy.special.ndtri(0.975))
    return widened * torch.maximum(by_values, by_logarithms).sqrt() / math.sqrt(r), by_values.sqrt()


def weight_effective_sample_size(log_weights: Tensor) -> Tensor:
    """Kish's effective sample size ``(sum w)^2 / sum w^2`` over the last dimension."""
    return (2 * log_weights.logsumexp(-1) - (2 * log_weights).logsumexp(-1)).exp()


def pareto_shape(log_weights: Tensor) -> float:
    """Return ``k`` of a generalised Pareto fit to the largest of at least 25 log weights (Vehtari et al. 2024).

    ``inf`` for fewer than 5 distinct tail weights; ``-inf`` where all of the tail equals the largest weight.
    """
    return fitted_to_the_largest(log_weights)[1]


def fitted_to_the_largest(log_weights: Tensor) -> tuple[float, float]:
    """Return the mean excess over the largest weight, in units of it and times ``1 - shape``, and the shape."""
    weights = log_weights.flatten().to(torch.float64).sort().values
    n = len(weights)
    tail_length = min(n // 5, math.ceil(3 * math.sqrt(n)))
    if tail_length < 5 or not bool(weights[-1].isfinite()):
        return math.nan, math.inf
    scaled = (weights - weights[-1]).exp()
    cutoff = scaled[-tail_length - 1]
    if bool(cutoff > 1 - _SAME_WEIGHT):
        return 0.0, -math.inf
    tail = scaled[-tail_length:] - cutoff
    tail = tail[tail > 0]
    if len(tail) < 5:
        return math.nan, math.inf
    scale, shape = (float(each) for each in _fitted_tail(tail.unsqueeze(0)))
    return scale + shape * (1 - float(cutoff)), shape
