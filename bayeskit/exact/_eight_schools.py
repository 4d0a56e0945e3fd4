"""Eight schools: a normal hierarchical model, with one-dimensional quadrature over its scale."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact._case import ExactCase, finite_tensor, positive_scalar

_EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
_STANDARD_ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)
_TOLERANCE = 1e-9


def eight_schools_model(effects: Tensor, standard_errors: Tensor, mu_scale: Tensor, tau_scale: Tensor) -> None:
    """Pyro model in non-centred parameterization: ``theta = mu + tau * eta`` with ``eta ~ N(0, 1)``.

    ``mu ~ N(0, mu_scale^2)``, ``tau ~ HalfCauchy(tau_scale)``, ``y ~ N(theta, standard_errors^2)``.

    Parameters
    ----------
    effects, standard_errors : Tensor, shape (schools,)
        Estimated effects and their known standard errors.
    mu_scale, tau_scale : Tensor, shape ()
        Prior scales, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact import eight_schools
    >>> case = eight_schools()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> {site: tuple(trace.nodes[site]["value"].shape) for site in ("mu", "tau", "eta", "theta")}
    {'mu': (), 'tau': (), 'eta': (8,), 'theta': (8,)}
    """
    mu = pyro.sample("mu", dist.Normal(torch.zeros_like(mu_scale), mu_scale))
    tau = pyro.sample("tau", dist.HalfCauchy(tau_scale))
    with pyro.plate("schools", effects.shape[0]):
        eta = pyro.sample("eta", dist.Normal(torch.zeros_like(effects), torch.ones_like(effects)))
        theta = pyro.deterministic("theta", mu + tau * eta)
        pyro.sample("y", dist.Normal(theta, standard_errors), obs=effects)


def eight_schools_centered_model(effects: Tensor, standard_errors: Tensor, mu_scale: Tensor, tau_scale: Tensor) -> None:
    """Pyro model in centred parameterization: ``theta ~ N(mu, tau^2)``.

    The posterior of ``mu``, ``tau`` and ``theta`` is the same as in :func:`eight_schools_model`; in these coordinates
    it is a funnel.

    Parameters
    ----------
    effects, standard_errors : Tensor, shape (schools,)
        Estimated effects and their known standard errors.
    mu_scale, tau_scale : Tensor, shape ()
        Prior scales, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact import eight_schools
    >>> case = eight_schools(centered=True)
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> sorted(trace.stochastic_nodes)
    ['mu', 'schools', 'tau', 'theta']
    """
    mu = pyro.sample("mu", dist.Normal(torch.zeros_like(mu_scale), mu_scale))
    tau = pyro.sample("tau", dist.HalfCauchy(tau_scale))
    with pyro.plate("schools", effects.shape[0]):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, standard_errors), obs=effects)


def _integrate(
    y: np.ndarray, s: np.ndarray, mu_scale: float, tau_scale: float, num_nodes: int
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return log evidence, means and covariances by Gauss-Legendre quadrature over the scale ``tau``."""
    # With tau = tau_scale * tan(phi) the half-Cauchy prior is uniform in phi on (0, pi/2) and the likelihood is
    # analytic, so the rule converges geometrically.
    abscissae, weights = np.polynomial.legendre.leggauss(num_nodes)
    tau = tau_scale * np.tan(0.25 * math.pi * (abscissae + 1.0))  # (nodes,)
    marginal_precision = 1.0 / (s**2 + tau[:, None] ** 2)  # of y_j given mu, tau: (nodes, schools)
    mu_precision = 1.0 / mu_scale**2 + marginal_precision.sum(1)
    mu_mean = marginal_precision @ y / mu_precision
    log_likelihood = 0.5 * (
        np.log(marginal_precision / (2.0 * math.pi)).sum(1)
        - np.log(mu_scale**2 * mu_precision)
        - marginal_precision @ y**2
        + mu_precision * mu_mean**2
    )
    peak = log_likelihood.max()
    mass = 0.5 * weights * np.exp(log_likelihood - peak)
    log_evidence = float(peak + np.log(mass.sum()))
    mass /= mass.sum()

    # Given tau, the latent vectors are affine in mu plus independent noise:
    # conditional mean = offset + slope * mu, conditional variance = noise, all (nodes, schools).
    shrinkage = s**2 * marginal_precision
    gain = tau[:, None] * marginal_precision
    one, zero = np.ones((num_nodes, 1)), np.zeros((num_nodes, 1))
    affine = {
        "mu": (zero, one, zero),
        "tau": (tau[:, None], zero, zero),
        "eta": (gain * y, -gain, shrinkage),
        "theta": (tau[:, None] * gain * y, shrinkage, tau[:, None] ** 2 * shrinkage),
    }
    means, covariances = {}, {}
    for site, (offset, slope, noise) in affine.items():
        given_tau = offset + slope * mu_mean[:, None]
        mean = mass @ given_tau
        deviation = given_tau - mean
        covariances[site] = (
            np.diag(mass @ noise)
            + np.einsum("k,ki,kj->ij", mass / mu_precision, slope, slope)
            + np.einsum("k,ki,kj->ij", mass, deviation, deviation)
        )
        means[site] = mean
    return log_evidence, means, covariances


def eight_schools(
    effects: ArrayLike | Tensor | None = None,
    standard_errors: ArrayLike | Tensor | None = None,
    *,
    mu_scale: float = 5.0,
    tau_scale: float = 5.0,
    centered: bool = False,
    num_nodes: int = 256,
) -> ExactCase:
    r"""Build the eight schools case, or the same normal hierarchical model with other data.

    Given :math:`\tau`, the effects :math:`\theta` and their mean :math:`\mu` are jointly normal and are
    integrated out analytically. The half-Cauchy scale :math:`\tau` is integrated out by one-dimensional
    quadrature.

    Parameters
    ----------
    effects : array_like, shape (schools,), optional
        Estimated effects; default the eight schools.
    standard_errors : array_like, shape (schools,), optional
        Standard errors of the effects, positive. Required with ``effects``.
    mu_scale : float
        Standard deviation of the normal prior of ``mu``, positive.
    tau_scale : float
        Scale of the half-Cauchy prior of ``tau``, positive.
    centered : bool
        Use the centred parameterization. The evidence is the same.
    num_nodes : int
        Number of quadrature nodes, at least 8.

    Returns
    -------
    ExactCase
        Latent sites ``"mu"`` and ``"tau"`` of shape ``()``, and ``"theta"`` of shape ``(schools,)`` if
        centred; otherwise ``"eta"`` is latent and ``"theta"`` deterministic.

    Raises
    ------
    DataError
        If only one of the data vectors is given, an entry is not finite, a standard error is not
        positive, or there are fewer than two schools.
    ShapeError
        If the two vectors differ in length.
    SettingsError
        If a scale is not positive, or the quadrature has not converged with ``num_nodes`` nodes.

    References
    ----------
    Rubin (1981), Estimation in parallel randomized experiments, J. Educational Statistics 6.
    Gelman (2006), Prior distributions for variance parameters in hierarchical models, Bayesian
    Analysis 1.

    Examples
    --------
    >>> from bayeskit.exact import eight_schools
    >>> case = eight_schools()
    >>> round(case.log_evidence, 7)
    -31.3113474
    >>> round(case.posterior_mean["mu"].item(), 3), round(case.posterior_mean["tau"].item(), 3)
    (4.397, 3.598)
    """
    if (effects is None) != (standard_errors is None):
        raise DataError(
            "Only one of effects and standard_errors is given; pass both, or neither for the eight schools."
        )
    default = effects is None or standard_errors is None
    y = finite_tensor("effects", _EFFECTS if effects is None else effects, 1)
    s = finite_tensor("standard_errors", _STANDARD_ERRORS if standard_errors is None else standard_errors, 1)
    if y.shape != s.shape:
        raise ShapeError(f"effects has {y.numel()} entries and standard_errors has {s.numel()}; they must agree.")
    if not bool((s > 0).all()):
        raise DataError(f"standard_errors has the entry {s.min().item():g}; all must be above zero.")
    if y.numel() < 2:
        # With one group the posterior variance of tau is infinite.
        raise DataError("effects has one entry; a hierarchical model needs at least two.")
    mu_scale_tensor, tau_scale_tensor = (
        positive_scalar("mu_scale", mu_scale),
        positive_scalar("tau_scale", tau_scale),
    )
    if int(num_nodes) != num_nodes or num_nodes < 8:
        raise SettingsError(f"num_nodes is {num_nodes}; pass a whole number of at least 8.")

    log_evidence, means, covariances = _integrate(y.numpy(), s.numpy(), mu_scale, tau_scale, num_nodes)
    coarse, _, _ = _integrate(y.numpy(), s.numpy(), mu_scale, tau_scale, num_nodes * 3 // 4)
    if not abs(log_evidence - coarse) < _TOLERANCE:
        raise SettingsError(
            f"num_nodes is {num_nodes}, too few: with a quarter fewer nodes the log evidence changes by "
            f"{abs(log_evidence - coarse):.1e}. Pass a larger num_nodes."
        )
    if centered:
        del means["eta"], covariances["eta"]
    scalar = {"mu", "tau"}
    parameterisation = "centred" if centered else "non-centred"
    name = "eight_schools" if default else "normal_hierarchy"
    return ExactCase(
        name=f"{name}_centered" if centered else name,
        description=f"normal hierarchy of {y.numel()} groups, half-Cauchy scale, {parameterisation}",
        model=eight_schools_centered_model if centered else eight_schools_model,
        args=(y, s, mu_scale_tensor, tau_scale_tensor),
        log_evidence=log_evidence,
        posterior_mean={
            site: torch.from_numpy(mean).reshape(() if site in scalar else mean.shape) for site, mean in means.items()
        },
        posterior_covariance={site: torch.from_numpy(value) for site, value in covariances.items()},
        reference=(
            "one-dimensional Gauss-Legendre quadrature over tau, the rest integrated analytically "
            "(data: Rubin 1981; prior: Gelman 2006)"
        ),
    )
