"""The posterior of a loss on a finite grid of parameters, by enumeration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import CoherenceError, DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data, Loss, PointwiseLoss, as_data, columns, num_data
from bayeskit.inference.generalized.pooling import Pooling, Sum, as_pooling
from bayeskit.inference.generalized.posterior import as_loss

ENTRIES = 2**22  # of the losses of all data at some of the grid's values, held at a time
NEAR_ONE = 1e-2  # sums of rounded probabilities lie closer to one


@dataclass(frozen=True, eq=False)
class GridPosterior:
    """The exact posterior of a loss on a grid, as :func:`grid_posterior` returns it.

    Attributes
    ----------
    values : Tensor
        The grid, ``(m, ...)``.
    log_probabilities : Tensor
        ``(m,)``, normalised.
    log_evidence : float
        The logarithm of the prior mean of ``exp(-weight * loss)``, over all data so far.
    loss : Loss
    weight : float
    pooling : Pooling
    """

    values: Tensor
    log_probabilities: Tensor
    log_evidence: float
    loss: Loss
    weight: float
    pooling: Pooling

    @property
    def probabilities(self) -> Tensor:
        """Of the grid's values, ``(m,)``."""
        return self.log_probabilities.exp()

    @property
    def mean(self) -> Tensor:
        """The posterior mean, of the shape of one value."""
        weights = self.probabilities.reshape(-1, *[1] * (self.values.dim() - 1))
        return (weights * self.values).sum(0)

    def quantile(self, level: float) -> Tensor:
        """Return the smallest value below or at which the posterior has this mass.

        Parameters
        ----------
        level : float
            In (0, 1).

        Raises
        ------
        SettingsError
            If ``level`` is no probability.
        ShapeError
            If the values are not scalars, and so have no order.
        """
        level = real_number("level", level, between=(0.0, 1.0))
        if self.values.dim() != 1:
            raise ShapeError(f"values of shape {tuple(self.values.shape[1:])} have no order, and so no quantiles")
        values, order = self.values.sort()
        mass = self.probabilities[order].cumsum(0)
        # Masses such as .1 + .2 must reach the level .3 in spite of rounding.
        reached = mass >= level - 4 * len(mass) * torch.finfo(mass.dtype).eps
        return values[int(reached.int().argmax())]

    def update(self, new_data: Any) -> GridPosterior:
        """Return the posterior after more data, this one being the prior.

        Raises
        ------
        CoherenceError
            If losses do not add up: the answer would depend on how the data are divided.
        """
        if not (isinstance(self.loss, PointwiseLoss) and self.pooling.coherent):
            raise CoherenceError(
                f"{type(self.loss).__name__} pooled by {type(self.pooling).__name__} cannot be updated sequentially: "
                "updating by all data and by one part after the other give different answers; call grid_posterior "
                "with all data"
            )
        return _enumerated(self, as_data(new_data))

    def __repr__(self) -> str:
        return f"GridPosterior({type(self.loss).__name__}, {len(self.values)} values, weight={self.weight:g})"


def grid_posterior(
    loss: Any,
    grid: Any,
    data: Any,
    log_prior: Any = None,
    weight: float = 1.0,
    pooling: Pooling | Literal["sum", "mean", "max"] = "sum",
) -> GridPosterior:
    """Return the exact posterior of a loss where the parameter takes finitely many values.

    Parameters
    ----------
    loss : Loss or callable
        As for :class:`GibbsPosterior`; it gets one value of the grid at a time, and may branch on it.
    grid : Tensor
        The values, ``(m, ...)``.
    data : Tensor or tuple of Tensor
        Shapes ``(n, ...)``.
    log_prior : Tensor, optional
        Logarithms of the prior masses, ``(m,)``; ``-inf`` excludes a value. They need not be normalised. By default
        all values are equally likely.
    weight : float, default 1.0
        The learning rate. Positive.
    pooling : {"sum", "mean", "max"} or Pooling, default "sum"

    Returns
    -------
    GridPosterior

    Raises
    ------
    SettingsError
        If ``weight`` is not positive, pooling does not fit the loss, or ``log_prior`` holds probabilities.
    ShapeError
        If grid, prior or losses have another shape.
    DataError
        If the grid or the prior is not finite, or a loss is nan, or infinite wherever the prior has mass.

    References
    ----------
    Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief distributions. JRSS B
    78, 1103-1130.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import losses
    >>> x = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
    >>> posterior = grid_posterior(losses.Absolute(), torch.arange(5.0), x)
    >>> [round(p, 6) for p in posterior.probabilities.tolist()]
    [0.009694, 0.194706, 0.529266, 0.194706, 0.071628]
    >>> round(posterior.mean.item(), 6), posterior.quantile(0.5).item()
    (2.123869, 2.0)
    """
    data = as_data(data)
    loss, pooling = as_loss(loss), as_pooling(pooling)
    weight = real_number("weight", weight, between=(0.0, float("inf")))
    if not isinstance(loss, PointwiseLoss) and not isinstance(pooling, Sum):
        raise SettingsError(
            f"{type(loss).__name__} looks at all data at once, so that there is nothing to pool; leave pooling at 'sum'"
        )
    values = _as_grid(grid, data)
    empty = GridPosterior(values, _as_masses(log_prior, values, data), 0.0, loss, weight, pooling)
    return _enumerated(empty, data)


def _as_grid(grid: Any, data: Data) -> Tensor:
    values = torch.as_tensor(grid)
    if values.dim() == 0 or len(values) == 0:
        raise ShapeError(f"grid must hold values, (m, ...), not have shape {tuple(values.shape)}")
    bad = ~values.isfinite().reshape(len(values), -1).all(-1)
    if bool(bad.any()):
        raise DataError(f"value {int(bad.nonzero()[0])} of the grid is not finite")
    # Whole numbers stay such: they may count or index.
    return values.to(_dtype(values, data)) if values.is_floating_point() else values


def _dtype(values: Tensor, data: Data) -> torch.dtype:
    """Return the most precise floating dtype among these; torch's default where there is none."""
    found = [x.dtype for x in (values, *columns(data)) if x.is_floating_point()]
    return max(found, key=lambda dtype: torch.finfo(dtype).bits, default=torch.get_default_dtype())


def _as_masses(log_prior: Any, values: Tensor, data: Data) -> Tensor:
    dtype, device = _dtype(values, data), values.device
    if log_prior is None:
        log_masses = torch.zeros(len(values), dtype=dtype, device=device)
    else:
        log_masses = torch.as_tensor(log_prior).to(device, dtype)
    if log_masses.shape != values.shape[:1]:
        raise ShapeError(f"log_prior must have shape {(len(values),)}, not {tuple(log_masses.shape)}")
    bad = log_masses.isnan() | (log_masses == torch.inf)
    if bool(bad.any()):
        raise DataError(
            f"the prior of value {int(bad.nonzero()[0])} of the grid is nan or inf; give logarithms of masses"
        )
    if bool((log_masses == -torch.inf).all()):
        raise DataError("the prior excludes every value of the grid")
    if bool((log_masses >= 0).all()) and abs(float(log_masses.sum()) - 1) < NEAR_ONE:
        raise SettingsError("log_prior looks like probabilities, which sum to one; give their logarithms")
    return log_masses.log_softmax(0)


def _enumerated(before: GridPosterior, data: Data) -> GridPosterior:
    """Return the posterior whose prior is the one before."""
    before.loss.check(data)
    total = _pooled(before.loss, before.pooling, before.values, data).to(before.log_probabilities)
    allowed = before.log_probabilities > -torch.inf
    wrong = total.isnan() & allowed
    if bool(wrong.any()):
        raise DataError(f"the loss is nan at value {int(wrong.nonzero()[0])} of the grid, {_at(before.values, wrong)}")
    # An excluded value stays excluded, whatever its loss is.
    unnormalized = torch.where(allowed, before.log_probabilities - before.weight * total, -torch.inf)
    step = unnormalized.logsumexp(0)
    if not bool(step.isfinite()):
        raise DataError("the loss is infinite at every value of the grid that the prior allows; widen the grid")
    return GridPosterior(
        before.values,
        unnormalized - step,
        before.log_evidence + float(step),
        before.loss,
        before.weight,
        before.pooling,
    )


def _at(values: Tensor, which: Tensor) -> str:
    return f"{values[int(which.nonzero()[0])].tolist()!r:.80}"


def _pooled(loss: Loss, pooling: Pooling, values: Tensor, data: Data) -> Tensor:
    """Return the pooled loss at each value, ``(m,)``."""

    def of_one(value: Tensor) -> Tensor:
        if not isinstance(loss, PointwiseLoss):
            return loss.total(value, data)
        each = loss.pointwise(value, data)
        if tuple(each.shape) != (num_data(data),):
            raise ShapeError(
                f"the loss {type(loss).__name__} returns {tuple(each.shape)} instead of {(num_data(data),)} for a "
                f"single value of the grid, of shape {tuple(value.shape)}"
            )
        return pooling(each)

    chunk = max(1, ENTRIES // num_data(data))
    try:
        result: Tensor = torch.func.vmap(of_one, chunk_size=chunk)(values)
    except RuntimeError:
        # A loss that branches on values cannot be batched; one that is wrong fails here again, with its own error.
        result = torch.stack([of_one(value) for value in values])
    return result
