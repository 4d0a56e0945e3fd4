"""Linear regression with known noise and a conjugate normal prior."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bayeskit.errors import DataError, ShapeError
from bayeskit.exact._case import Conditionals, ExactCase, finite_tensor, positive_scalar, read_table


def linear_regression_model(design: Tensor, response: Tensor, noise_sd: Tensor, prior_sd: Tensor) -> None:
    """Pyro model: ``b ~ N(0, prior_sd^2 I)``, ``y ~ N(design @ b, noise_sd^2)``.

    Parameters
    ----------
    design : Tensor, shape (n, p)
        Design matrix; an intercept is a column of ones.
    response : Tensor, shape (n,)
    noise_sd, prior_sd : Tensor, shape ()
        Standard deviations, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact import linear_regression
    >>> case = linear_regression()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["b"]["value"].shape), tuple(trace.nodes["y"]["value"].shape)
    ((10,), (50,))
    """
    b = pyro.sample("b", dist.Normal(torch.zeros_like(design[0]), prior_sd).to_event(1))
    with pyro.plate("observations", response.shape[0]):
        pyro.sample("y", dist.Normal(design @ b, noise_sd), obs=response)


def _full_conditionals(design: Tensor, response: Tensor, noise_sd: Tensor, prior_sd: Tensor) -> Conditionals:
    identity = torch.eye(design.shape[1], dtype=design.dtype, device=design.device)
    precision = design.mT @ design / noise_sd**2 + identity / prior_sd**2
    mean = torch.linalg.solve(precision, design.mT @ response / noise_sd**2)
    return {("b",): lambda others: dist.MultivariateNormal(mean, precision_matrix=precision)}


def linear_regression(
    design: ArrayLike | Tensor | None = None,
    response: ArrayLike | Tensor | None = None,
    *,
    noise_sd: float = 1.0,
    prior_sd: float = 2.0,
) -> ExactCase:
    r"""Build a conjugate linear regression; without data, the case "linreg10".

    Let :math:`\sigma` be ``noise_sd``, :math:`v` the prior variance,
    :math:`P = X^\top X / \sigma^2 + I / v` and :math:`m = P^{-1} X^\top y / \sigma^2`. The posterior is
    :math:`N(m, P^{-1})` and

    .. math:: \log p(y) = -\tfrac n2 \log(2\pi\sigma^2) - \tfrac p2 \log v - \tfrac12 \log |P|
              - \tfrac12 \left( \|y - Xm\|^2 / \sigma^2 + \|m\|^2 / v \right).

    Parameters
    ----------
    design : array_like, shape (n, p), optional
        Design matrix ``X``; default the 50 x 10 matrix of linreg10, with an intercept in column 0.
    response : array_like, shape (n,), optional
        Observations ``y``. Required with ``design``.
    noise_sd : float, default 1.0
        Standard deviation of the noise, positive.
    prior_sd : float, default 2.0
        Standard deviation of the independent normal prior of each coefficient, positive.

    Returns
    -------
    ExactCase
        Latent site ``"b"`` of shape ``(p,)``.

    Raises
    ------
    DataError
        If only one of ``design`` and ``response`` is given, or an entry is not finite.
    ShapeError
        If their shapes do not match.
    SettingsError
        If a standard deviation is not finite and positive.

    References
    ----------
    Lindley and Smith (1972), Bayes estimates for the linear model, JRSS B 34.
    Bishop (2006), Pattern Recognition and Machine Learning, section 3.5.

    Examples
    --------
    >>> from bayeskit.exact import linear_regression
    >>> round(linear_regression().log_evidence, 6)
    -94.084507
    >>> case = linear_regression([[1.0], [1.0]], [0.0, 2.0], prior_sd=1.0)
    >>> round(case.posterior_mean["b"].item(), 6)
    0.666667
    """
    if (design is None) != (response is None):
        raise DataError("Only one of design and response is given; pass both, or neither for linreg10.")
    if design is None or response is None:
        name, columns = "linreg10", read_table("linreg10.csv")
        y = columns.pop("y")
        x = torch.stack(list(columns.values()), dim=1)
    else:
        name = "linear_regression"
        x, y = finite_tensor("design", design, 2), finite_tensor("response", response, 1)
    num_observations, num_coefficients = x.shape
    if y.shape[0] != num_observations:
        raise ShapeError(f"design has {num_observations} rows and response has {y.shape[0]} entries; they must agree.")
    noise_sd_tensor, prior_sd_tensor = (
        positive_scalar("noise_sd", noise_sd),
        positive_scalar("prior_sd", prior_sd),
    )

    noise_sd, prior_sd = float(noise_sd), float(prior_sd)
    identity = torch.eye(num_coefficients, dtype=x.dtype)
    factor = torch.linalg.cholesky(x.mT @ x / noise_sd**2 + identity / prior_sd**2)
    mean = torch.cholesky_solve((x.mT @ y / noise_sd**2).unsqueeze(-1), factor).squeeze(-1)
    # Use residuals at the posterior mean; y'y - m'Pm would suffer from cancellation.
    misfit = ((y - x @ mean) / noise_sd).square().sum() + (mean / prior_sd).square().sum()
    log_evidence = (
        -0.5 * num_observations * math.log(2.0 * math.pi)
        - num_observations * math.log(noise_sd)
        - num_coefficients * math.log(prior_sd)
        - factor.diagonal().log().sum()
        - 0.5 * misfit
    )
    return ExactCase(
        name=name,
        description=f"linear regression, {num_observations} x {num_coefficients}, known noise, normal prior",
        model=linear_regression_model,
        args=(x, y, noise_sd_tensor, prior_sd_tensor),
        log_evidence=float(log_evidence),
        posterior_mean={"b": mean},
        posterior_covariance={"b": torch.cholesky_inverse(factor)},
        reference="closed form: normal prior conjugate to the normal likelihood (Lindley and Smith 1972)",
        full_conditionals=_full_conditionals,
    )
