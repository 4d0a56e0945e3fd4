"""The learning rate that gives the posterior as much spread as the weighted-likelihood bootstrap."""

from __future__ import annotations

from typing import Literal

import torch

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.bootstrap.loss_likelihood_bootstrap import dirichlet
from bayeskit.inference.generalized.calibrate.assumptions import (
    check_minimizers_vary,
    converged_rows,
    few_data,
    ill_conditioned,
    on_kinks,
)
from bayeskit.inference.generalized.calibrate.selection import Selection
from bayeskit.inference.generalized.minimizer import minimize
from bayeskit.inference.generalized.pooling import check_sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import information


def weighted_likelihood_bootstrap_matching(
    posterior: GibbsPosterior,
    *,
    criterion: Literal["trace", "determinant"] = "trace",
    num_replicates: int = 1000,
    seed: int = 0,
) -> Selection:
    r"""Give the posterior the total or the generalised variance of the weighted-likelihood bootstrap.

    The bootstrap minimises :math:`\sum_i g_i \ell(\theta, x_i)` under :math:`g \sim n\,\mathrm{Dirichlet}(1, \dots,
    1)`; with covariance ``V`` of its minimisers, and :math:`(n w J)^{-1}` for the posterior's,

    .. math:: w = \mathrm{tr}(J^{-1}) / (n\,\mathrm{tr} V) \quad \text{or} \quad
              w = (\det(J^{-1}) / \det V)^{1/d} / n.

    In the limit of many data ``V`` is the sandwich, and with one unknown this is the weight of
    :func:`information_matching`; here the spread of few data is that of actual minimisers.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight and prior do not matter.
    criterion : {"trace", "determinant"}, default "trace"
        The determinant does not depend on linear changes of coordinates, the trace does.
    num_replicates : int, default 1000
        Weightings of the data, all minimised in one batch.
    seed : int, default 0
        Of the weightings.

    Returns
    -------
    Selection
        With diagnostics ``"covariance" (d, d)`` of the bootstrap, ``"minimizers" (R, d)``, ``"converged" (R,)`` and
        ``"information"``.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or minimisers hardly vary.
    SettingsError
        If losses do not add up, or the criterion is none.

    References
    ----------
    Newton, M. A., Raftery, A. E. (1994). Approximate Bayesian inference with the weighted likelihood bootstrap. JRSS B
    56, 3-48. Lyddon, S. P., Holmes, C. C., Walker, S. G. (2019). General Bayesian updating and the loss-likelihood
    bootstrap. Biometrika 106, 465-478.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64).repeat(10)
    >>> posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x)
    >>> chosen = weighted_likelihood_bootstrap_matching(posterior, seed=1)
    >>> abs(chosen.weight - 41 / 40 / 9.5) < 5 * chosen.standard_error  # (n + 1) / n / variance
    True
    """
    check_sum(posterior)
    if criterion not in ("trace", "determinant"):
        raise SettingsError(f"criterion must be 'trace' or 'determinant', not {criterion!r:.80}")
    num_replicates = whole_number("num_replicates", num_replicates, least=posterior.dim + 2)
    found = information(posterior)
    generator = new_generator(seed, stream="weighted likelihood bootstrap matching")
    ones = torch.ones(num_replicates, posterior.num_data, dtype=torch.float64)
    weights = posterior.num_data * dirichlet(ones, generator)
    minima = minimize(posterior, weights=weights.to(found.position), start=found.position)
    rows, warnings = converged_rows(minima.converged)
    away = minima.position[rows] - minima.position[rows].mean(0)
    covariance = away.mT @ away / (len(rows) - 1)
    if not bool((torch.linalg.eigvalsh(covariance) > 0).all()):
        raise DataError("the bootstrap's minimisers do not vary in some direction; are the data fitted without error?")
    check_minimizers_vary(posterior, found.position, covariance)
    ours = found.posterior_covariance
    if criterion == "trace":
        weight = torch.trace(ours) / torch.trace(covariance)
        share = away.square().sum(-1) / torch.trace(covariance)
    else:
        weight = ((torch.logdet(ours) - torch.logdet(covariance)) / posterior.dim).exp()
        share = (away * torch.linalg.solve(covariance, away.mT).mT).sum(-1) / posterior.dim
    spread = {"trace": "total variance (trace)", "determinant": "generalised variance (determinant)"}[criterion]
    return Selection(
        weight=float(weight),
        target=f"The {spread} of the weighted-likelihood bootstrap of the loss minimiser.",
        method="weighted_likelihood_bootstrap_matching",
        source=posterior,
        standard_error=float(weight * share.std()) / len(rows) ** 0.5,
        diagnostics={
            "covariance": covariance,
            "minimizers": minima.position,
            "converged": minima.converged,
            "information": found,
        },
        warnings=few_data(posterior) + ill_conditioned(found) + warnings + on_kinks(posterior, found.position),
    )
