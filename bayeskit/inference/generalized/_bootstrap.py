"""Loss-likelihood and posterior bootstrap: minimisers of a loss under random weights of the data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit.errors import DataError, SamplingWarning, SettingsError, ShapeError
from bayeskit.extend import (
    Draws,
    draw_values,
    global_stream,
    new_generator,
    progress_bar,
    real_number,
    standard_gamma,
    warn_user,
    whole_number,
)
from bayeskit.inference.generalized._minimizer import Minimum, minimize
from bayeskit.inference.generalized._posterior import GibbsPosterior, check_pooling
from bayeskit.inference.generalized.losses._loss import Data, columns

# Loss-likelihood bootstrap.

BLOCK = 2**21
"""Largest number of tensor entries in one batch of replicates."""


def loss_likelihood_bootstrap(
    posterior: GibbsPosterior,
    num_draws: int = 1000,
    *,
    concentration: float = 1.0,
    prior_weight: float = 0.0,
    seed: int = 0,
    progress: bool = True,
) -> Draws:
    r"""Minimise the loss under Dirichlet weights of the data: the weighted-likelihood or loss-likelihood bootstrap.

    Each draw is :math:`\arg\min_\theta \sum_i g_i \ell(\theta, x_i)` with :math:`g \sim n\,\mathrm{Dirichlet}(c, \dots,
    c)`. With ``concentration`` one this is the posterior of the minimiser under the noninformative Dirichlet process
    prior (Bayesian bootstrap). Its covariance is asymptotically the sandwich, so no learning rate is needed.

    Parameters
    ----------
    posterior : GibbsPosterior
        Loss and data; its weight has no effect, its prior only defines the shape and support of the parameter.
    num_draws : int, default 1000
        Number of draws ``R``.
    concentration : float, default 1.0
        ``c``, positive; the weights have variance of about ``1 / c``.
    prior_weight : float, default 0.0
        Weight of minus the log prior density (over unconstrained space), which is added to the loss.

    Returns
    -------
    Draws
        One chain of ``R`` independent draws, with the convergence of each in ``sample_stats["converged"]``.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, losses are not pooled by the sum or mean, or most minimisations did not
        converge.

    Warns
    -----
    SamplingWarning
        If minimisations did not converge.

    References
    ----------
    Newton, M. A., Raftery, A. E. (1994). Approximate Bayesian inference with the weighted likelihood bootstrap. JRSS B
    56, 3-48. Lyddon, S. P., Holmes, C. C., Walker, S. G. (2019). General Bayesian updating and the loss-likelihood
    bootstrap. Biometrika 106, 465-478. Rubin, D. B. (1981). The Bayesian bootstrap. Annals of Statistics 9, 130-134.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x)
    >>> draws = loss_likelihood_bootstrap(posterior, 4000)
    >>> theta = draws.values()["theta"]  # exactly: mean 4, variance 1.9
    >>> bool(abs(theta.mean() - 4) < 0.1), bool(abs(theta.var() - 1.9) < 0.2)
    (True, True)
    """
    count = whole_number("num_draws", num_draws, least=1)
    check_pooling(posterior)
    shape = real_number("concentration", concentration, "(0, inf)")
    generator = new_generator(seed, stream="loss-likelihood bootstrap")
    begin, n, found = time.monotonic(), posterior.num_data, []
    first = minimize(posterior, prior_weight=prior_weight, seed=seed).position
    with progress_bar("loss-likelihood bootstrap", count, progress) as bar:
        for size in _replicate_batches(count, n):
            weights = n * dirichlet(torch.full((size, n), shape, dtype=torch.float64), generator)
            found.append(minimize(posterior, weights=weights.to(first), prior_weight=prior_weight, start=first))
            bar.update(sum(len(part.value) for part in found))
    settings = {"method": "loss_likelihood_bootstrap", "concentration": shape, "seed": seed}
    return _minima_as_draws(posterior, _joined(found), time.monotonic() - begin, settings)


def dirichlet(concentration: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from the Dirichlet distribution of each row, ``(R, n) -> (R, n)``; concentration 0 gives weight 0."""
    # Gamma variables of small concentration underflow and are drawn on the log scale: if ``g ~ Gamma(c + 1)`` and
    # ``u`` is uniform, then ``g * u ** (1 / c) ~ Gamma(c)``.
    small = concentration < 1
    gamma = standard_gamma(concentration + small.to(concentration), generator=generator)
    if not bool(small.any()):
        return gamma / gamma.sum(-1, keepdim=True)
    uniform = 1 - torch.rand(gamma.shape, dtype=gamma.dtype, device=gamma.device, generator=generator)
    power = uniform.log() / concentration.clamp_min(100 * torch.finfo(gamma.dtype).tiny)
    logarithm = torch.where(small, gamma.log() + power, gamma.log())
    return logarithm.masked_fill(concentration <= 0, -math.inf).softmax(-1)


def _replicate_batches(count: int, numbers: int) -> list[int]:
    """Return batch sizes that sum to ``count``, each with at most ``BLOCK`` entries or one replicate."""
    size = max(1, BLOCK // max(numbers, 1))
    return [min(size, count - start) for start in range(0, count, size)]


def _numbers_of(data: Data) -> int:
    """Return the total number of entries of all columns of the data."""
    return sum(x.numel() for x in columns(data))


def _joined(parts: list[Minimum]) -> Minimum:
    """Concatenate the minima of several batches."""
    return Minimum(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _minima_as_draws(posterior: GibbsPosterior, found: Minimum, seconds: float, settings: dict[str, Any]) -> Draws:
    """Return minima as one chain of draws; warn if some did not converge, SettingsError if most did not."""
    failed, count = int((~found.converged).sum()), len(found.value)
    stuck = count > 1 and bool((found.position == found.position[0]).all())
    if 2 * failed > count or (failed and stuck):
        raise SettingsError(
            f"{failed} of {count} minimisations of the loss {type(posterior.loss).__name__} did not converge: if the "
            "loss has kinks, use losses.Absolute or losses.Pinball (with predict=), or subclass PointwiseLoss with "
            "smoothed(); otherwise it may have no minimum, or covariates may be badly scaled"
        )
    if failed:
        warn_user(
            f"{failed} of {len(found.value)} minimisations did not converge, so their draws are not minimisers; "
            "inspect sample_stats['converged'], scale covariates to unit variance, or smooth the loss",
            SamplingWarning,
        )
    log_prior, log_likelihood = posterior.evaluate(found.position)
    return Draws(
        found.position[None],
        log_prior[None],
        log_likelihood[None],
        torch.ones(1, dtype=posterior.dtype, device=posterior.device),
        {"converged": found.converged[None]},
        seconds=seconds,
        settings=settings,
        target=posterior,
    )


# Posterior bootstrap: minimisers of a loss under draws from a Dirichlet process posterior.

Centring = Callable[[int, int, torch.Generator], Any]
"""``(replicates R, pseudo-samples T, generator) -> data (R, T, ...)``, a tuple if the data are a tuple."""


def posterior_bootstrap(
    posterior: GibbsPosterior,
    num_draws: int = 1000,
    *,
    concentration: float = 0.0,
    centring: Centring | Distribution | None = None,
    num_pseudo_samples: int = 100,
    num_restarts: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Draws:
    r"""Minimise the loss under draws from a Dirichlet process posterior of the data distribution.

    The data distribution has a Dirichlet process prior with ``concentration`` :math:`c` and centring model :math:`F`;
    its posterior is :math:`\mathrm{DP}(c + n, \frac{c F + \sum_i \delta_{x_i}}{c + n})`. Each draw minimises the loss
    of the data and :math:`T` pseudo-samples from :math:`F` with :math:`\mathrm{Dirichlet}(1, \dots, 1, c/T, \dots,
    c/T)` weights. The parameter is defined as the minimiser of the expected loss, so no model has to hold. Result and
    warnings are those of :func:`loss_likelihood_bootstrap`.

    Parameters
    ----------
    posterior, num_draws
        As for :func:`loss_likelihood_bootstrap`; restarts start from the prior of ``posterior``.
    concentration : float, default 0.0
        ``c``, the prior sample size of the centring model. Zero is the loss-likelihood bootstrap.
    centring : callable or distribution, optional
        Distribution ``F`` of one datum, or function ``(R, T, generator) -> data (R, T, ...)`` that draws
        pseudo-samples. If the function draws a parameter for each replicate, the prior is a mixture of Dirichlet
        processes.
    num_pseudo_samples : int, default 100
        ``T``; larger values approximate the Dirichlet process better.
    num_restarts : int, default 0
        Number of prior draws from which each replicate is minimised again; the best minimum is kept.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, ``concentration`` is positive without ``centring``, losses are not pooled
        by the sum or mean, or most minimisations did not converge.
    ShapeError
        If the shapes of pseudo-samples do not fit the data.
    DataError
        If pseudo-samples are not finite.

    References
    ----------
    Lyddon, S., Walker, S., Holmes, C. (2018). Nonparametric learning from Bayesian models with randomized objective
    functions. NeurIPS. Fong, E., Lyddon, S., Holmes, C. (2019). Scalable nonparametric sampling from multimodal
    posteriors with the posterior bootstrap. ICML.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x)
    >>> draws = posterior_bootstrap(posterior, 4000, concentration=4.0, centring=dist.Normal(0.0, 1.0))
    >>> theta = draws.values()["theta"]  # half way between the data's mean and the centring model's
    >>> bool(abs(theta.mean() - 2) < 0.1)
    True
    """
    count = whole_number("num_draws", num_draws, least=1)
    extra = whole_number("num_pseudo_samples", num_pseudo_samples, least=1)
    restarts = whole_number("num_restarts", num_restarts, least=0)
    check_pooling(posterior)
    c = real_number("concentration", concentration, "[0, inf)")
    if c > 0 and centring is None:
        raise SettingsError("a positive concentration needs a centring model for pseudo-samples; give centring=")
    generator = new_generator(seed, stream="posterior bootstrap")
    begin, n, found = time.monotonic(), posterior.num_data, []
    first = minimize(posterior, seed=seed).position
    concentrations = torch.ones(n, dtype=torch.float64)
    if c > 0:
        concentrations = torch.cat([concentrations, torch.full((extra,), c / extra, dtype=torch.float64)])
    numbers = _numbers_of(posterior.data) * len(concentrations) // n
    with progress_bar("posterior bootstrap", count, progress) as bar:
        for size in _replicate_batches(count, numbers):
            weights = (n + c) * dirichlet(concentrations.expand(size, -1), generator).to(first)
            data = _completed(posterior, centring, size, extra, generator) if c > 0 else None
            starts = [first.expand(size, -1)]
            starts += [posterior.prior.start(size, generator).to(first) for _ in range(restarts)]
            found.append(_best([minimize(posterior, weights=weights, data=data, start=start) for start in starts]))
            bar.update(sum(len(part.value) for part in found))
    settings = {"method": "posterior_bootstrap", "concentration": c, "num_restarts": restarts, "seed": seed}
    if c > 0:
        settings["num_pseudo_samples"] = extra
    return _minima_as_draws(posterior, _joined(found), time.monotonic() - begin, settings)


def _completed(
    posterior: GibbsPosterior, centring: Any, replicates: int, count: int, generator: torch.Generator
) -> Data:
    """Return the data followed by each replicate's pseudo-samples, ``(R, n + T, ...)``; an error if they do not fit."""
    if isinstance(centring, Distribution):
        with global_stream(generator):
            drawn: Any = draw_values(centring, (replicates, count))
    elif callable(centring):
        drawn = centring(replicates, count, generator)
    else:
        raise SettingsError(f"centring must be a distribution or (R, T, generator) -> data, not {centring!r:.80}")
    own = columns(posterior.data)
    given = columns(drawn)
    wanted = [(replicates, count, *x.shape[1:]) for x in own]
    if not all(isinstance(x, Tensor) for x in given):
        raise DataError("centring must return tensors of data, or one tensor, of as many replicates and pseudo-samples")
    if [tuple(x.shape) for x in given] != wanted:
        raise ShapeError(
            f"the centring model draws data of shapes {[tuple(x.shape) for x in given]} instead of {wanted}: the first "
            "dimensions must be replicate and pseudo-sample"
        )
    if not all(bool(x.isfinite().all()) for x in given):
        raise DataError("the centring model draws data that are not finite; use a model with lighter tails")
    both = tuple(torch.cat([x.expand(len(y), *x.shape), y.to(x)], 1) for x, y in zip(own, given, strict=True))
    return both if isinstance(posterior.data, tuple) else both[0]


def _best(runs: list[Minimum]) -> Minimum:
    """Return the minimum with the smallest loss for each replicate."""
    if len(runs) == 1:
        return runs[0]
    values = torch.stack([run.value for run in runs]).nan_to_num(nan=math.inf)
    which, rows = values.argmin(0), torch.arange(values.shape[1], device=values.device)
    return Minimum(*(torch.stack(column)[which, rows] for column in zip(*runs, strict=True)))
