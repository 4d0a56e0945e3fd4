"""The learning rate that matches the information of posterior and loss-likelihood bootstrap."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit.errors import DataError
from bayeskit.inference.generalized.calibrate.assumptions import few_data, ill_conditioned, on_kinks
from bayeskit.inference.generalized.calibrate.selection import Selection
from bayeskit.inference.generalized.pooling import check_sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import information


def information_matching(posterior: GibbsPosterior, at: Tensor | None = None) -> Selection:
    r"""Give the posterior the asymptotic Fisher information of the loss-likelihood bootstrap.

    The bootstrap of the minimiser has the asymptotic precision :math:`n J I^{-1} J`, the posterior of weight ``w``
    has :math:`n w J`, where ``I`` is the covariance of a datum's gradient and ``J`` its mean Hessian. Equal traces
    give

    .. math:: w = \mathrm{tr}(J I^{-1} J) / \mathrm{tr}(J).

    With one unknown, credible intervals then cover asymptotically as often as they say. With several this holds for
    none of them exactly, unless ``I`` is a multiple of ``J``: see
    :func:`~bayeskit.inference.generalized.checks.mismatch.residual_mismatch`. A trace depends on the coordinates;
    these are the unconstrained ones.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight and prior do not matter.
    at : Tensor, optional
        The minimiser of the loss, unconstrained, ``(d,)``; by default it is searched for. Losses that are bounded have
        plateaus from which no search comes back: give ``minimize(posterior, start=...).position`` there.

    Returns
    -------
    Selection
        With diagnostics ``"information"`` and ``"num_data"``. Nothing is simulated.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or the data are fitted without error.
    SettingsError
        If losses do not add up.

    Notes
    -----
    The curvature of a loss with kinks is a kernel estimate: for the median of 200 normal data the weight has a
    standard deviation of about 12 %, where 1,000 data leave 6 %.

    References
    ----------
    Lyddon, S. P., Holmes, C. C., Walker, S. G. (2019). General Bayesian updating and the loss-likelihood bootstrap.
    Biometrika 106, 465-478.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(10) * 2  # of variance four
    >>> chosen = information_matching(GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x))
    >>> round(chosen.weight, 6)
    0.25
    """
    check_sum(posterior)
    found = information(posterior, at)
    hessian, covariance = found.mean_hessian, found.gradient_covariance
    if not bool((torch.linalg.eigvalsh(covariance) > 0).all()):
        raise DataError(
            "the gradients of the data's losses do not vary in some direction, so that nothing tells how far to trust "
            "the data there; are they fitted without error?"
        )
    weight = torch.trace(hessian @ torch.linalg.solve(covariance, hessian)) / torch.trace(hessian)
    return Selection(
        weight=float(weight),
        target=(
            "The asymptotic Fisher information (in trace) of the loss-likelihood bootstrap: with one unknown, "
            "credible intervals that cover the loss minimiser as often as they say."
        ),
        method="information_matching",
        source=posterior,
        diagnostics={"information": found, "num_data": posterior.num_data},
        warnings=few_data(posterior) + ill_conditioned(found) + on_kinks(posterior, found.position),
    )
