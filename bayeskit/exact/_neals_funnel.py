"""Neal's funnel as a prior with one observed coordinate; evidence by quadrature over the log variance."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._core.inputs import whole_number
from bayeskit.errors import DataError, SettingsError
from bayeskit.exact._case import ExactCase, finite_tensor, positive_scalar

_REACH = 15.0  # prior standard deviations beyond which the prior mass is negligible in double precision
_GONE = 80.0  # nats below the maximum at which the integrand is negligible
_STEP = 0.2  # step of the trapezoidal rule; the integrand is analytic within pi / 2 of the real axis
_SQUARABLE = 1e150  # limit for numbers whose square must not overflow


def neals_funnel_model(zeros: Tensor, measured: Tensor, noise_sd: Tensor, scale_sd: Tensor) -> None:
    """Pyro model: ``v ~ N(0, scale_sd^2)``, ``x ~ N(0, exp(v) I)``, ``y ~ N(x[0], noise_sd^2)``.

    Parameters
    ----------
    zeros : Tensor, shape (d - 1,)
        Means of ``x``.
    measured : Tensor, shape ()
        Observation ``y``.
    noise_sd, scale_sd : Tensor, shape ()
        Standard deviations, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact import neals_funnel
    >>> case = neals_funnel()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["v"]["value"].shape), tuple(trace.nodes["x"]["value"].shape)
    ((), (9,))
    """
    v = pyro.sample("v", dist.Normal(torch.zeros_like(scale_sd), scale_sd))
    x = pyro.sample("x", dist.Normal(zeros, (v / 2).exp()).to_event(1))
    pyro.sample("y", dist.Normal(x[0], noise_sd), obs=measured)


def _log_terms(v: np.ndarray, measured: float, noise_sd: float, scale_sd: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log prior plus log likelihood of ``v``, and the squared observation over its variance given ``v``."""
    log_total = np.logaddexp(v, 2 * math.log(noise_sd))
    # Values that overflow or underflow have negligible mass.
    ratio = np.exp(np.minimum(2 * math.log(abs(measured)) - log_total, 600.0)) if measured else np.zeros_like(v)
    log_prior = -0.5 * (v / scale_sd) ** 2 - math.log(scale_sd * math.sqrt(2 * math.pi))
    return log_prior - 0.5 * (ratio + log_total + math.log(2 * math.pi)), ratio


def _grid(measured: float, noise_sd: float, scale_sd: float, step: float) -> np.ndarray:
    """Return an equally spaced grid of log variances that covers the integrand; SettingsError for overflow."""
    # The likelihood is maximal where the total variance equals the squared observation, or at zero variance.
    reach, furthest = _REACH * scale_sd, max(0.0, 2 * math.log(abs(measured))) if measured else 0.0
    around = np.linspace(-reach, reach, 20_001)
    coarse = np.linspace(-reach - 0.5 * scale_sd**2, furthest + reach + scale_sd**2, 200_001)
    coarse = np.sort(np.concatenate([coarse, around]))
    terms, ratio = _log_terms(coarse, measured, noise_sd, scale_sd)
    # The integrand of the mean of exp(v) has exp(v) as a factor, which shifts its mass to the right.
    kept = np.flatnonzero((terms > terms.max() - _GONE) | (terms + coarse > (terms + coarse).max() - _GONE))
    low, high = coarse[max(kept[0] - 1, 0)], coarse[min(kept[-1] + 1, len(coarse) - 1)]
    if high > 700:
        raise SettingsError(
            f"the variance exp(v) overflows with measured={measured:g} and scale_sd={scale_sd:g}; pass smaller values"
        )
    # Reduce the step for a narrow peak.
    top = int(terms.argmax())
    share = math.exp(coarse[top] - np.logaddexp(coarse[top], 2 * math.log(noise_sd)))
    width = 1 / math.sqrt(1 / scale_sd**2 + 0.5 * ratio[top] * share**2)
    spacing = step * min(1.0, 2 * width)
    return low + spacing * np.arange(math.ceil((high - low) / spacing) + 1)


def _integrate(
    dim: int, measured: float, noise_sd: float, scale_sd: float, step: float
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return log evidence, means and covariances by the trapezoidal rule over the log variance ``v``."""
    v = _grid(measured, noise_sd, scale_sd, step)
    variance = np.exp(v)
    total = variance + noise_sd**2
    log_mass = _log_terms(v, measured, noise_sd, scale_sd)[0] + math.log(v[1] - v[0])
    peak = log_mass.max()
    mass = np.exp(log_mass - peak)
    if not max(mass[0], mass[-1]) < 1e-20 * mass.sum():
        raise SettingsError(f"the quadrature fails with scale_sd={scale_sd:g} and measured={measured:g}")
    log_evidence = float(peak + np.log(mass.sum()))
    mass /= mass.sum()

    mean_v = mass @ v
    given_v = measured * (variance / total)  # mean of the measured coordinate
    mean_x, spread = np.zeros(dim - 1), np.full(dim - 1, mass @ variance)
    mean_x[0] = mass @ given_v
    spread[0] = mass @ (noise_sd**2 * (variance / total) + (given_v - mean_x[0]) ** 2)
    means = {"v": np.array(mean_v), "x": mean_x}
    covariances = {"v": np.array([[mass @ (v - mean_v) ** 2]]), "x": np.diag(spread)}
    return log_evidence, means, covariances


def neals_funnel(dim: int = 10, *, measured: float = 2.0, noise_sd: float = 0.5, scale_sd: float = 3.0) -> ExactCase:
    r"""Build Neal's funnel with one observed coordinate.

    The model is :math:`v \sim N(0, \sigma_v^2)`, :math:`x_i \sim N(0, e^v)` for :math:`i < d`, and
    :math:`y \sim N(x_1, \sigma^2)`. All :math:`x` are integrated out analytically:
    :math:`p(y) = \int N(v; 0, \sigma_v^2) N(y; 0, e^v + \sigma^2) dv`. If ``measured`` exceeds ``noise_sd``, the
    observation excludes the narrow end of the funnel. At the wide end the scale of the other coordinates varies by a
    factor of thousands.

    Parameters
    ----------
    dim : int
        Dimension ``d`` including ``v``, at least 2.
    measured : float
        Observation ``y``.
    noise_sd, scale_sd : float
        Standard deviations :math:`\sigma` of the observation and :math:`\sigma_v` of the log variance, positive.

    Returns
    -------
    ExactCase
        Latent sites ``"v"`` of shape ``()`` and ``"x"`` of shape ``(dim - 1,)``, in centred parameterization.

    Raises
    ------
    SettingsError
        If ``dim`` is less than 2, a standard deviation is not positive, ``scale_sd`` exceeds 20, or the quadrature
        fails.
    DataError
        If ``measured`` is not finite, or the square of ``measured`` or ``noise_sd`` is out of range.

    References
    ----------
    Neal, R. M. (2003). Slice sampling. Annals of Statistics 31, 705-767 (the funnel, section 8).

    Examples
    --------
    >>> from bayeskit.exact import neals_funnel
    >>> round(neals_funnel().log_evidence, 6)
    -2.992931
    """
    dim = whole_number("dim", dim, least=2)
    y = finite_tensor("measured", measured, 0)
    noise, scale = positive_scalar("noise_sd", noise_sd), positive_scalar("scale_sd", scale_sd)
    for name, value in (("measured", y), ("noise_sd", noise)):
        if abs(float(value)) > _SQUARABLE or 0 < abs(float(value)) < 1 / _SQUARABLE:
            raise DataError(f"{name} is {float(value):g}, whose square is out of range; rescale the data")
    if float(scale) > 20:
        raise SettingsError(f"scale_sd is {scale_sd}; the variance exp(v) then overflows, pass at most 20.")
    log_evidence, means, covariances = _integrate(dim, float(y), float(noise), float(scale), _STEP)
    return ExactCase(
        name="neals_funnel",
        description=f"Neal's funnel in {dim} dimensions as a prior, one coordinate measured",
        model=neals_funnel_model,
        args=(torch.zeros(dim - 1, dtype=torch.float64), y, noise, scale),
        log_evidence=log_evidence,
        posterior_mean={site: torch.from_numpy(np.asarray(mean)) for site, mean in means.items()},
        posterior_covariance={site: torch.from_numpy(value) for site, value in covariances.items()},
        reference="one-dimensional trapezoidal quadrature over the log variance (prior: Neal 2003)",
    )
