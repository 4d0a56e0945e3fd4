"""Monte Carlo errors: effective sample size, standard errors, and Pareto smoothing of weights."""

from __future__ import annotations

import math

import torch
from scipy.fft import next_fast_len
from scipy.stats import norm
from scipy.stats import t as student
from torch import Tensor

__all__ = [
    "effective_sample_size",
    "effective_within_chains",
    "independent_log_mean_exp_error",
    "log_mean_exp",
    "log_mean_exp_error",
    "mean_error",
    "num_largest",
    "pareto_shape",
    "pareto_smoothed",
    "r_hat",
    "replicates_log_mean_error",
    "shape_of_largest",
    "share_beyond_the_largest",
    "stratified_log_mean_exp_error",
    "weight_effective_sample_size",
]

# --------------------------------------------------------------------------------------------------
# Importance weights whose largest are replaced by quantiles of the distribution that they seem to follow.
# --------------------------------------------------------------------------------------------------

_MIN_TAIL = 5
#: By less than this part of the largest, weights differ by rounding.
_SAME_WEIGHT = 1e-12


def pareto_smoothed(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the largest weights by quantiles of a generalised Pareto distribution fitted to them.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, draws)``.

    Returns
    -------
    log_weights : Tensor
        Smoothed and normalised, ``(*batch, draws)``; none exceeds the largest raw one. Rows of nothing but ``-inf``
        become uniform, with shape ``inf``.
    shape : Tensor
        Pareto ``k`` of the tail, ``(*batch)``: above 0.7 the weights cannot be relied on. ``inf`` where there are too
        few weights for a fit, ``-inf`` where all of the tail is equal: weights that so many reach are bounded.

    References
    ----------
    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
    Machine Learning Research 25(72).

    Zhang, J., Stephens, M. A. (2009). A new and efficient estimation method for the generalized Pareto distribution.
    Technometrics 51, 316-325.

    Examples
    --------
    >>> import torch
    >>> u = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> smoothed, shape = pareto_smoothed(-0.5 * u.log())
    >>> round(smoothed.exp().sum().item(), 6), abs(shape.item() - 0.5) < 0.15
    (1.0, True)
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
    """Return how many of the largest weights :func:`shape_of_largest` should be given, the cutoff included."""
    return min(num_weights // 5, math.ceil(3 * math.sqrt(num_weights))) + 1


def shape_of_largest(largest: Tensor) -> Tensor:
    """Return the Pareto ``k`` of which :func:`pareto_smoothed` tells, from the largest weights alone.

    Parameters
    ----------
    largest : Tensor
        Log weights in ascending order, ``(m, length)``; the first is the cutoff.

    Returns
    -------
    Tensor
        ``(m,)``; ``inf`` where there are too few weights, ``-inf`` where they are all equal.

    Examples
    --------
    >>> weights = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> largest = weights.sort(-1).values[:, -num_largest(1000):]
    >>> bool((shape_of_largest(largest) - pareto_smoothed(weights)[1]).abs().max() < 1e-12)
    True
    """
    rows = largest - largest[:, -1:]
    equal = rows[:, 0] > -_SAME_WEIGHT
    if rows.shape[1] - 1 < _MIN_TAIL:
        return torch.where(equal, -torch.inf, torch.inf)
    _, shape, usable = _fitted_beyond(rows[:, :1].exp(), rows[:, 1:].exp())
    return torch.where(equal, -torch.inf, torch.where(usable, shape, torch.inf))


def _fitted_beyond(cutoff: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit what lies beyond cutoffs ``(m, 1)``: scale, shape and whether there was enough to fit, each ``(m,)``."""
    length, excess = tail.shape[-1], tail - cutoff
    # A tail without quartiles of its own, most of it at the cutoff, has no distribution to fit.
    usable = excess[:, length // 4 - 1] > 0
    filler = torch.linspace(0.1, 1.0, length, dtype=tail.dtype, device=tail.device)
    scale, shape = _fitted_tail(torch.where(usable.unsqueeze(-1), excess, filler))
    return scale, shape, usable


def _fitted_tail(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Fit generalised Pareto distributions by a profile posterior mean.

    Parameters
    ----------
    excess : Tensor
        Ascending and positive, ``(m, n)``: a row for each distribution.

    Returns
    -------
    scale, shape : Tensor
        ``(m,)`` each.
    """
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


# --------------------------------------------------------------------------------------------------
# Monte Carlo errors: effective sample size, standard errors and the Pareto shape of weights.
# --------------------------------------------------------------------------------------------------


def effective_sample_size(x: Tensor) -> Tensor:
    """Effective number of independent draws behind the mean of ``x``.

    Split chains, autocovariances by FFT, Geyer's initial monotone sequence.

    Parameters
    ----------
    x : Tensor
        Shape ``(*batch, chains, draws)`` with at least 8 draws.

    Returns
    -------
    Tensor
        Shape ``(*batch)``. A constant ``x`` counts in full; NaN where a value is not finite.

    References
    ----------
    Vehtari, A., Gelman, A., Simpson, D., Carpenter, B., Buerkner, P.-C. (2021).
    Rank-normalization, folding, and localization: an improved R-hat. Bayesian
    Analysis 16, 667-718 (here without rank normalisation).

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> bool(3000 < effective_sample_size(x) < 5000)
    True
    """
    dtype, x = x.dtype, _split(x).to(torch.float64)  # the rounding of single precision is no variance
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
    """Effective number of draws of half a chain, whatever the others do, ``(*batch, chains, draws) -> (*batch)``.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> apart = x + torch.arange(4)[:, None]  # chains that disagree
    >>> bool(400 < effective_within_chains(apart) < 700)
    True
    """
    dtype, x = x.dtype, _split(x).to(torch.float64)
    covariance = _autocovariance(x)
    correlation = covariance / covariance[..., :1]
    n = x.shape[-1]
    result = n / _correlation_time(correlation, n * x.shape[-2])
    return _of_finite(x, torch.where(covariance[..., 0] > 0, result, torch.full_like(result, n))).to(dtype)


def _autocovariance(x: Tensor) -> Tensor:
    """Mean over chains of the autocovariance at each lag, ``(*batch, chains, n) -> (*batch, n)``."""
    n = x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    size = next_fast_len(2 * n, real=True)
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
    """Potential scale reduction of split chains, ``(*batch, chains, draws) -> (*batch)``.

    1 is converged; NaN where a value is not finite.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> bool(r_hat(x) < 1.01)
    True
    """
    dtype, x = x.dtype, _split(x).to(torch.float64)
    n = x.shape[-1]
    within = x.var(-1).mean(-1)
    between = x.mean(-1).var(-1)
    ratio = (within * (n - 1) / n + between) / within
    # Chains that do not move agree only where they stand at one point.
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
    """Return the standard error of the log of the mean of ``exp(log_x)``, where parts give fixed shares of the draws.

    Parameters
    ----------
    log_x : Tensor
        Independent draws, ``(n, *batch)``.
    part : Tensor
        Number of the part that each is from, ``(n,)``. Parts of one draw count as drawn by chance.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    Examples
    --------
    >>> import torch
    >>> log_x = torch.tensor([1.0, 1.1, 0.9, 3.0, 3.1, 2.9]).log()
    >>> parts = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> [round(float(stratified_log_mean_exp_error(log_x, one)), 3) for one in (parts, 0 * parts)]
    [0.02, 0.224]
    """
    relative = (log_x - log_x.logsumexp(0) + math.log(len(log_x))).exp()
    found = [relative[part == number] for number in part.unique()]
    if min(map(len, found)) < 2:
        found = [relative]
    return torch.stack([len(one) * one.var(0) for one in found]).sum(0).sqrt() / len(log_x)


def replicates_log_mean_error(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard error of the log of a mean of replicates, pooled over groups, and the relative spread.

    With few replicates the error is widened such that 1.96 of it hold the 97.5 % quantile of Student's distribution.
    Estimates of an evidence that are products over many stages are nearly log-normal: where they spread far, a mean of
    few misses the rare large ones, and their spread with it, which that of their logarithms tells. So the error comes
    from the larger of the two. Among the logarithms a value below a seventh of the mean counts as a seventh, lest
    replicates that have found nothing count for more than they are.

    Parameters
    ----------
    log_ratio : Tensor
        Logarithms of values over their mean, ``(*batch, groups, replicates)``.

    Returns
    -------
    error, spread : Tensor
        Each ``(*batch)``; NaN where there is one replicate alone. The spread is that of the values.

    References
    ----------
    Bérard, J., Del Moral, P., Doucet, A. (2014). A lognormal central limit theorem for particle approximations of
    normalizing constants. Electronic Journal of Probability 19, 94.
    """
    groups, r = log_ratio.shape[-2:]
    correction = min(1, r - 1)
    by_values = log_ratio.exp().var(-1, correction=correction).mean(-1)
    # Pooled before it is exponentiated: of few replicates the exponential of a variance is far too large on average.
    by_logarithms = log_ratio.clamp(min=-2).var(-1, correction=correction).mean(-1).expm1()
    if r < 2:
        return torch.full_like(by_values, math.nan), torch.full_like(by_values, math.nan)
    widened = float(student.ppf(0.975, groups * (r - 1)) / norm.ppf(0.975))
    return widened * torch.maximum(by_values, by_logarithms).sqrt() / math.sqrt(r), by_values.sqrt()


def weight_effective_sample_size(log_weights: Tensor) -> Tensor:
    """Kish's effective sample size ``(sum w)^2 / sum w^2`` over the last dimension."""
    return (2 * log_weights.logsumexp(-1) - (2 * log_weights).logsumexp(-1)).exp()


def pareto_shape(log_weights: Tensor) -> float:
    """Shape ``k`` of a generalised Pareto distribution fitted to the largest weights.

    Above 0.5 the variance of the weights is infinite, above 0.7 the estimate is
    practically useless, above 1 the mean does not exist.

    Parameters
    ----------
    log_weights : Tensor
        Any shape, flattened; at least 25.

    Returns
    -------
    float
        ``inf`` for fewer than 5 distinct tail weights; ``-inf`` where all of the tail is the largest weight, but for
        rounding: weights that so many draws reach are bounded by it.

    References
    ----------
    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed
    importance sampling. Journal of Machine Learning Research 25(72).
    Zhang, J., Stephens, M. A. (2009). A new and efficient estimation method for the
    generalized Pareto distribution. Technometrics 51, 316-325.

    Examples
    --------
    >>> import torch
    >>> u = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> abs(pareto_shape(-0.5 * u.log()) - 0.5) < 0.15
    True
    """
    return _fitted_to_the_largest(log_weights)[1]


def share_beyond_the_largest(log_weights: Tensor) -> float:
    """Return the share that weights above the largest of ``n`` would add to the mean, if one draw in ``n`` had them.

    By the generalised Pareto distribution that is fitted to the largest weights, see :func:`pareto_shape`: where this
    is small, their shape does not matter.

    Parameters
    ----------
    log_weights : Tensor
        Any shape, flattened; at least 25.

    Returns
    -------
    float
        ``inf`` where the tail has no mean.

    Examples
    --------
    >>> import torch
    >>> u = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> share_beyond_the_largest(-0.8 * u.log()) > 0.05, share_beyond_the_largest((1 + 1e-4 * u**-0.8).log()) < 0.001
    (True, True)
    """
    scale, shape = _fitted_to_the_largest(log_weights)
    if not shape < 1:
        return math.inf
    weights = (log_weights - log_weights.max()).flatten().to(torch.float64).exp()
    # Of a tail that starts at the cut-off, the mean of what exceeds the largest weight, 1.
    return (1 + max(scale / (1 - shape), 0.0)) / float(weights.sum())


def _fitted_to_the_largest(log_weights: Tensor) -> tuple[float, float]:
    """Return, for the largest weight as unit, the mean excess over it times ``1 - shape``, and the shape."""
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
