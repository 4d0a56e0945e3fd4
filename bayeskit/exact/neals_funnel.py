"""Neal's funnel as a prior, with one coordinate measured: all but the scale integrates analytically."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.core.inputs import whole_number
from bayeskit.errors import DataError, SettingsError
from bayeskit.exact.case import ExactCase, finite_tensor, positive_scalar

__all__ = ["neals_funnel", "neals_funnel_model"]

_REACH = 15.0  # prior standard deviations beyond which the scale has no mass in double precision
_GONE = 80.0  # so far below its peak, on the log scale, the integrand is over
_STEP = 0.2  # of the trapezoidal rule; the integrand is analytic within pi / 2 of the real axis
_SQUARABLE = 1e150  # its square is still a number


def neals_funnel_model(zeros: Tensor, measured: Tensor, noise_sd: Tensor, scale_sd: Tensor) -> None:
    """Pyro model: ``v ~ N(0, scale_sd^2)``, ``x ~ N(0, exp(v) I)``, ``y ~ N(x[0], noise_sd^2)``.

    Parameters
    ----------
    zeros : Tensor, shape (d - 1,)
        Means of ``x``.
    measured : Tensor, shape ()
        The observation ``y``.
    noise_sd, scale_sd : Tensor, shape ()
        Standard deviations, above zero.

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
    """Return the log of prior times likelihood of the log variance ``v``, and the squared measurement over its own."""
    log_total = np.logaddexp(v, 2 * math.log(noise_sd))
    # Beyond the range of floating-point numbers there is no mass.
    ratio = np.exp(np.minimum(2 * math.log(abs(measured)) - log_total, 600.0)) if measured else np.zeros_like(v)
    log_prior = -0.5 * (v / scale_sd) ** 2 - math.log(scale_sd * math.sqrt(2 * math.pi))
    return log_prior - 0.5 * (ratio + log_total + math.log(2 * math.pi)), ratio


def _grid(measured: float, noise_sd: float, scale_sd: float, step: float) -> np.ndarray:
    """Return equally spaced log variances over the integrand; raise ``SettingsError`` if variances overflow."""
    # The likelihood alone would put the variance at the squared measurement, or at zero.
    reach, furthest = _REACH * scale_sd, max(0.0, 2 * math.log(abs(measured))) if measured else 0.0
    around = np.linspace(-reach, reach, 20_001)
    coarse = np.linspace(-reach - 0.5 * scale_sd**2, furthest + reach + scale_sd**2, 200_001)
    coarse = np.sort(np.concatenate([coarse, around]))
    terms, ratio = _log_terms(coarse, measured, noise_sd, scale_sd)
    # With the variance as a factor, whose mean is wanted too, the mass sits to the right.
    kept = np.flatnonzero((terms > terms.max() - _GONE) | (terms + coarse > (terms + coarse).max() - _GONE))
    low, high = coarse[max(kept[0] - 1, 0)], coarse[min(kept[-1] + 1, len(coarse) - 1)]
    if high > 700:
        raise SettingsError(
            f"measured={measured:g} and scale_sd={scale_sd:g} put the variance exp(v) beyond the largest number; pass "
            "smaller ones"
        )
    # As dense as the peak is narrow.
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
        raise SettingsError(f"scale_sd={scale_sd:g} and measured={measured:g} are beyond this quadrature")
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
    r"""Build the funnel with one coordinate measured.

    :math:`v \sim N(0, \sigma_v^2)`, :math:`x_i \sim N(0, e^v)` for :math:`i < d`, and
    :math:`y \sim N(x_1, \sigma^2)`. All :math:`x` integrate analytically:
    :math:`p(y) = \int N(v; 0, \sigma_v^2) N(y; 0, e^v + \sigma^2) dv`. The measurement cuts off the thin end of the
    funnel as far as ``measured`` exceeds ``noise_sd``; the wide end stays, where the unmeasured coordinates
    spread by a factor of thousands.

    Parameters
    ----------
    dim : int
        Dimension ``d``, the scale included; at least 2.
    measured : float
        The observation ``y``.
    noise_sd, scale_sd : float
        Standard deviations :math:`\sigma` of the measurement and :math:`\sigma_v` of the log variance, above zero.

    Returns
    -------
    ExactCase
        Latent sites ``"v"`` of shape ``()`` and ``"x"`` of shape ``(dim - 1,)``, sampled directly, not rescaled.

    Raises
    ------
    SettingsError
        If ``dim`` is below 2 or a standard deviation is not positive or above 20.
    DataError
        If ``measured`` is not finite, or squares of the data are not.

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
            raise DataError(f"{name} is {float(value):g}, whose square is no number; rescale the data")
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
