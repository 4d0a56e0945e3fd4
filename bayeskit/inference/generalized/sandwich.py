"""How much data say of where a loss is smallest: curvature, gradient covariance, and the sandwich of both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev

from bayeskit._torch import one_thread, validation_kept
from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data, Loss, columns
from bayeskit.inference.generalized.minimizer import minimize
from bayeskit.inference.generalized.posterior import GibbsPosterior


class Information(NamedTuple):
    """Curvature and gradient covariance of a loss at its minimiser, for each datum, in unconstrained coordinates.

    Attributes
    ----------
    position : Tensor
        The minimiser, ``(d,)``.
    gradient_covariance : Tensor
        ``I``, the covariance of a datum's influence on the gradient, ``(d, d)``.
    mean_hessian : Tensor
        ``J``, ``(d, d)``.
    num_data : int
    """

    position: Tensor
    gradient_covariance: Tensor
    mean_hessian: Tensor
    num_data: int

    @property
    def sandwich(self) -> Tensor:
        """Asymptotic covariance of the minimiser, ``J^-1 I J^-1 / n``, ``(d, d)``."""
        half = torch.linalg.solve(self.mean_hessian, self.gradient_covariance)
        return torch.linalg.solve(self.mean_hessian, half.mT) / self.num_data

    @property
    def posterior_covariance(self) -> Tensor:
        """Asymptotic covariance of the posterior of weight one, ``J^-1 / n``, ``(d, d)``."""
        return torch.linalg.inv(self.mean_hessian) / self.num_data


def influence(posterior: GibbsPosterior, position: Tensor, data: Data | None = None) -> Tensor:
    """Return how each datum's weight changes the gradient of the loss, ``(n, d)``.

    For losses that add up these are the gradients of the data's own losses; for others the first-order effect of
    a datum's weight in the empirical law.

    Parameters
    ----------
    posterior : GibbsPosterior
    position : Tensor
        Unconstrained, ``(d,)``.
    data : Tensor or tuple of Tensor, optional
        In place of the posterior's own.
    """
    data = posterior.data if data is None else data
    ones = torch.ones(len(columns(data)[0]), dtype=posterior.dtype, device=posterior.device)

    def gradient(weights: Tensor) -> Tensor:
        result: Tensor = grad(_total(posterior, posterior.loss, data))(position, weights)
        return result

    result: Tensor = jacrev(gradient)(ones)
    return result.mT


def curvature(posterior: GibbsPosterior, position: Tensor, data: Data | None = None) -> Tensor:
    """Return the mean Hessian of the loss of a datum, ``(d, d)``.

    That of a loss with kinks is estimated from a smoothed version of it, whose width shrinks with the number of data.

    Parameters
    ----------
    posterior, position, data
        As in :func:`influence`.
    """
    data = posterior.data if data is None else data
    n = len(columns(data)[0])
    loss = posterior.loss.smoothed(1.0)
    if loss is not posterior.loss:
        outcome = columns(data)[-1].to(posterior.dtype)
        spread = (outcome - outcome.median()).abs().mean()  # stays a tensor: data sets may be batched
        loss = posterior.loss.smoothed(0.5 * spread * n**-0.2)  # type: ignore[arg-type]
    result: Tensor = hessian(_total(posterior, loss, data))(position, None)
    return result / n


def information(posterior: GibbsPosterior, at: Tensor | None = None) -> Information:
    r"""Return curvature and gradient covariance of the loss at its minimiser.

    The minimiser has the asymptotic covariance :math:`J^{-1} I J^{-1} / n`, the posterior of weight one
    :math:`J^{-1} / n`: no single weight makes them equal, unless ``I`` is a multiple of ``J``.

    Parameters
    ----------
    posterior : GibbsPosterior
    at : Tensor, optional
        Unconstrained, ``(d,)``; by default the minimiser of the loss.

    Returns
    -------
    Information

    Raises
    ------
    DataError
        If the loss has no proper minimum there: its mean Hessian is not positive definite.

    References
    ----------
    White, H. (1982). Maximum likelihood estimation of misspecified models. Econometrica 50, 1-25. Powell, J. L. (1991).
    Estimation of monotonic regression models under quantile restrictions (the curvature of losses with kinks).

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    >>> found = information(GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x))
    >>> found.mean_hessian.item(), round(found.gradient_covariance.item(), 4)  # one, and the variance of the data
    (1.0, 4.6667)
    """
    if at is None:
        at = minimize(posterior).position
    if tuple(at.shape) != (posterior.dim,):
        raise ShapeError(f"at must be ({posterior.dim},), not {tuple(at.shape)}")
    with one_thread(), validation_kept():
        torch.distributions.Distribution.set_default_validate_args(False)
        each, mean_hessian = influence(posterior, at), curvature(posterior, at)
    centred = each - each.mean(0)
    if not bool((torch.linalg.eigvalsh(mean_hessian) > 0).all()):
        raise DataError(
            "the mean Hessian of the loss is not positive definite at its minimiser, so that the data leave a "
            "direction undetermined; look at propriety_check, or give at="
        )
    return Information(at, centred.mT @ centred / len(each), mean_hessian, len(each))


def _total(posterior: GibbsPosterior, loss: Loss, data: Any) -> Any:
    return lambda u, weights: loss.total(posterior.prior.parameter(u), data, weights)
