"""Losses for models with unknown normalising constant: score matching, Stein and Fisher divergences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import Kernel, own_derivatives, real_number, score_matching, whole_number
from bayeskit.inference.generalized.losses._loss import Data, Loss, PointwiseLoss, columns, unvalidated

# Kernels for Stein discrepancies, with derivatives.


@dataclass(frozen=True)
class GeneralInverseMultiquadric:
    r"""Generalised inverse multiquadric kernel ``(1 + d**2 / bandwidth**2) ** -exponent`` of the distance ``d``.

    With an exponent in (0, 1) the Stein discrepancy controls weak convergence; with faster decaying kernels such as
    :class:`~bayeskit.inference.RadialBasis` it does not in more than two dimensions.

    Parameters
    ----------
    bandwidth : float, default 1.0
        Positive.
    exponent : float, default 0.5
        Positive.

    Raises
    ------
    SettingsError
        If ``bandwidth`` or ``exponent`` is not positive.

    References
    ----------
    Gorham, J., Mackey, L. (2017). Measuring sample quality with kernels. ICML.

    Examples
    --------
    >>> import torch
    >>> GeneralInverseMultiquadric()(torch.tensor(3.0), torch.tensor(1.0)).item()
    0.5
    """

    bandwidth: float = 1.0
    exponent: float = 0.5

    def __post_init__(self) -> None:
        real_number("bandwidth", self.bandwidth, "(0, inf)")
        real_number("exponent", self.exponent, "(0, inf)")

    def __call__(self, squared_distance: Tensor, typical: Tensor) -> Tensor:
        """Return the kernel, with the shape of ``squared_distance``."""
        return (1 + squared_distance / self.bandwidth**2) ** -self.exponent


def radial_derivatives(kernel: Kernel, squared_distance: Tensor, typical: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a kernel and its first two derivatives with respect to the squared distance, elementwise."""

    def value(t: Tensor) -> Tensor:
        return kernel(t, typical)

    def first(t: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda s: value(s).sum())(t)
        return gradient

    second = torch.func.grad(lambda s: first(s).sum())(squared_distance)
    return value(squared_distance), first(squared_distance), second


def _check_bandwidth(kernel: Kernel, x: Tensor) -> None:
    """Raise DataError if a kernel takes its bandwidth from data ``(n, ...)`` with median distance zero."""
    probe, one = x.new_tensor([0.5, 1.0, 2.0]), x.new_ones(())
    if len(x) < 2 or torch.equal(kernel(probe, one), kernel(probe, 2 * one)):
        return
    rows = x.detach().reshape(len(x), -1)
    squared = (rows.unsqueeze(1) - rows).square().sum(-1)
    if not bool(_median_squared_distance(squared) > 0):
        raise DataError(
            f"at least half of the pairs of data are tied, so the median distance, from which "
            f"{type(kernel).__name__} takes its bandwidth, is zero; give the kernel a bandwidth"
        )


def typical_squared_distance(squared_distance: Tensor) -> Tensor:
    """Return the median squared distance between different data, ``(n, n) -> ()``, detached."""
    if len(squared_distance) < 2:
        return squared_distance.new_ones(())
    median = _median_squared_distance(squared_distance)
    return median.clamp_min(torch.finfo(median.dtype).tiny)


def _median_squared_distance(squared_distance: Tensor) -> Tensor:
    count = len(squared_distance)
    rows, others = torch.triu_indices(count, count, offset=1, device=squared_distance.device)
    return squared_distance.detach()[rows, others].median()


# Losses over pairs of data: checks and weighted means.


def check_pairs(name: str, data: Data, kernel: Kernel, statistic: Literal["V", "U"]) -> None:
    """Raise ShapeError for covariates, DataError for integer or tied data, or one datum with a U-statistic."""
    if isinstance(data, tuple):
        raise ShapeError(f"{name} takes one tensor of data, not covariates and outcomes")
    if not data.is_floating_point():
        raise DataError(f"{name} takes data of a floating type, not whole numbers; convert them if they are continuous")
    if statistic == "U" and len(data) < 2:
        raise DataError("the U-statistic needs two data at least")
    _check_bandwidth(kernel, data)


def mean_over_pairs(values: Tensor, weights: Tensor | None, statistic: Literal["V", "U"]) -> Tensor:
    """Return the mean of symmetric ``values (n, n)`` over pairs, weighted by products of ``weights (n,)``."""
    counts = values.new_ones(len(values)) if weights is None else weights.to(values)
    total, pairs = counts @ values @ counts, counts.sum().square()
    if statistic == "U":  # over pairs of different data
        total = total - (counts.square() * values.diagonal()).sum()
        pairs = pairs - counts.square().sum()
    return total / pairs


# Scores: gradients of the log density with respect to the data, which need no normalising constant.

LogDensity = Callable[..., Tensor]
"""``(parameter, x (n, ...)) -> (n,)``: log density of each datum, up to a constant that may depend on the parameter."""

Score = Callable[..., Tensor]
"""``(parameter, x (n, ...)) -> (n, ...)``: gradient of the log density with respect to each datum."""


def score_of(log_density: LogDensity) -> Score:
    """Return the score of a log density by automatic differentiation.

    Parameters
    ----------
    log_density : callable
        ``(parameter, x) -> (n,)`` or ``(parameter, *covariates, x) -> (n,)`` for data ``x (n, ...)``: log density of
        each datum, up to a constant.

    Returns
    -------
    callable
        Function of the same arguments that returns the gradient, with the shape of ``x``.

    Raises
    ------
    ShapeError
        When called, if ``log_density`` does not return ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> score = score_of(lambda mean, x: -(x - mean) ** 2 / 2)
    >>> score(torch.tensor(1.0), torch.tensor([0.0, 3.0]))
    tensor([ 1., -2.])
    """

    def score(parameter: Any, *data: Tensor) -> Tensor:
        def summed(x: Tensor) -> Tensor:
            return _of_each("log_density", log_density, parameter, *data[:-1], x).sum()

        gradient: Tensor = torch.func.grad(summed)(data[-1])
        return gradient

    return score


def _of_each(name: str, function: LogDensity, parameter: Any, *data: Tensor) -> Tensor:
    """Return a function of parameter and data, ``(n,)``; ShapeError for another shape."""
    with unvalidated():
        each = function(parameter, *data)
    if each.shape != data[-1].shape[:1]:
        raise ShapeError(
            f"{name} returns shape {tuple(each.shape)} instead of ({len(data[-1])},) for data of shape "
            f"{tuple(data[-1].shape)}"
        )
    return each


# Score matching.


@dataclass(frozen=True)
class ScoreMatching(PointwiseLoss):
    r"""Score matching (Hyvarinen) loss of an unnormalised density.

    .. math:: \ell(\theta, x) = \sum_j \tfrac12\, h_j(x)\, s_j(x)^2 + \partial_j \big(h_j(x)\, s_j(x)\big),
        \qquad s = \nabla_x \log p_\theta,

    where :math:`h_j = 1` by default. Up to a constant, the mean loss is half the Fisher divergence, weighted by
    :math:`h`, between data distribution and model. It is quadratic in the natural parameter of an exponential family;
    see :func:`~bayeskit.inference.generalized.gaussian_posterior`.

    Parameters
    ----------
    log_density : callable
        ``(parameter, x) -> (n,)`` for data ``x (n, ...)``, or ``(parameter, *covariates, x) -> (n,)`` for data
        ``(*covariates, x)``; twice differentiable in ``x``, up to a constant.
    weight : callable, optional
        ``h: x -> (n, ...)``, positive and zero at the boundary of the support, such as ``x**2`` for positive data.
    bounded : bool, default False
        Whether the loss stays bounded as the parameter tends to infinity, as for the scale of a normal distribution.

    References
    ----------
    Hyvarinen, A. (2005). Estimation of non-normalized statistical models by score matching. JMLR 6, 695-709. Hyvarinen,
    A. (2007). Some extensions of score matching. Computational Statistics and Data Analysis 51, 2499-2512. Yu, S.,
    Drton, M., Shojaie, A. (2019). Generalized score matching for non-negative data. JMLR 20, 76.

    Examples
    --------
    >>> import torch
    >>> loss = ScoreMatching(lambda mean, x: -(x - mean) ** 2 / 2)
    >>> loss.pointwise(torch.tensor(0.0), torch.tensor([0.0, 2.0]))
    tensor([-1.,  1.])
    """

    log_density: LogDensity
    weight: Callable[[Tensor], Tensor] | None = None
    bounded: bool = False

    def check(self, data: Data) -> None:
        """Raise DataError unless data have a floating dtype."""
        if not columns(data)[-1].is_floating_point():
            raise DataError("ScoreMatching needs data of a floating type; convert them if they are continuous")

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        *covariates, x = columns(data)
        score = score_of(self.log_density)
        if self.weight is None:
            return score_matching(lambda y: score(parameter, *covariates, y), x)
        weight = self.weight
        _, derivative = own_derivatives(lambda y: weight(y) * score(parameter, *covariates, y), x)
        each = weight(x) * score(parameter, *covariates, x).square() / 2 + derivative
        return each.flatten(1).sum(-1) if each.dim() > 1 else each


# Kernel Stein discrepancy.


@dataclass(frozen=True)
class KernelSteinDiscrepancy(Loss):
    r"""``n`` times the squared kernel Stein discrepancy between data and model.

    The squared discrepancy is the mean of the Stein kernel over pairs of data,

    .. math:: k_\theta(x, y) = \sum_j \big[s_j(x) s_j(y) + s_j(x)\,\partial_{y_j} + s_j(y)\,\partial_{x_j}
        + \partial_{x_j}\partial_{y_j}\big]\, m_j(x)\,k(x, y)\,m_j(y), \qquad s = \nabla \log p_\theta,

    over all pairs (V-statistic, never negative) or pairs of different data (U-statistic, unbiased). The weight
    :math:`m` makes the loss robust: the influence of a datum is bounded if :math:`m(x)\,s(x)` is. The derivatives act
    on the weights too. The loss is quadratic in the natural parameter of an exponential family; see
    :func:`~bayeskit.inference.generalized.gaussian_posterior`. It is not pointwise, so minibatches and sequential
    updates are not supported.

    Parameters
    ----------
    score : callable
        Gradient of the log density with respect to the data, ``(parameter, x (n, ...)) -> (n, ...)``, for instance from
        :func:`~bayeskit.inference.generalized.losses.score_of`.
    kernel : Kernel, optional
        :class:`GeneralInverseMultiquadric` with bandwidth one by default. A kernel without a bandwidth uses the median
        distance between data, so fewer than half of the pairs may be tied.
    weight : callable, optional
        ``m: x -> (n,)`` or ``(n, ...)``, a function of each datum.
    statistic : {"V", "U"}, default "V"
    bounded : bool, default False
        Whether the loss stays bounded as the parameter tends to infinity, as for the scale of a normal distribution.

    Raises
    ------
    SettingsError
        If ``statistic`` is unknown.

    Notes
    -----
    A datum of weight two equals two data for the V-statistic, but not for the U-statistic, which excludes pairs of a
    datum with itself.

    References
    ----------
    Liu, Q., Lee, J., Jordan, M. (2016). A kernelized Stein discrepancy for goodness-of-fit tests. ICML. Barp, A.,
    Briol, F.-X., Duncan, A., Girolami, M., Mackey, L. (2019). Minimum Stein discrepancy estimators. NeurIPS. Matsubara,
    T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2022). Robust generalised Bayesian inference for intractable
    likelihoods. JRSS B 84, 997-1022.

    Examples
    --------
    >>> import torch
    >>> loss = KernelSteinDiscrepancy(lambda mean, x: mean - x)
    >>> x = torch.tensor([-1.0, 0.0, 2.0])
    >>> round(loss.total(torch.tensor(0.253076), x).item() / 3, 4)
    0.4057
    """

    score: Score
    kernel: Kernel = field(default_factory=GeneralInverseMultiquadric)
    weight: Callable[[Tensor], Tensor] | None = None
    statistic: Literal["V", "U"] = "V"
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.statistic not in ("V", "U"):
            raise SettingsError(f"statistic must be 'V' or 'U', not {self.statistic!r}")

    def check(self, data: Data) -> None:
        """Raise DataError or ShapeError for covariates, integers, one datum with "U", and ties without a bandwidth."""
        check_pairs("KernelSteinDiscrepancy", data, self.kernel, self.statistic)

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the squared discrepancy times the sum of ``weights (n,)``."""
        (x,) = columns(data)
        counts = x.new_ones(len(x)) if weights is None else weights.to(x)
        parts = self._parts(x)
        # The kernel is bilinear in the drift, with matrices that do not depend on parameter and weights.
        drift = self._drift(parameter, x, parts)
        counted = counts.unsqueeze(-1) * drift
        total = (counted * (parts.value @ counted)).sum() + counts @ parts.mixed @ counts
        total = total + 2 * (torch.tensordot(counts, parts.cross, 1) * counted).sum()
        pairs = counts.sum().square()
        if self.statistic == "U":
            own = parts.value.diagonal() * drift.square().sum(-1) + parts.mixed.diagonal()
            total, pairs = total - (counts.square() * own).sum(), pairs - counts.square().sum()
        return counts.sum() * total / pairs

    def stein_kernel(self, parameter: Any, x: Tensor) -> Tensor:
        """Return the Stein kernel between all data, ``(n, ...) -> (n, n)``."""
        parts = self._parts(x)
        drift = self._drift(parameter, x, parts)
        cross = torch.einsum("ikj,kj->ik", parts.cross, drift)
        return parts.value * (drift @ drift.mT) + cross + cross.mT + parts.mixed

    def _drift(self, parameter: Any, x: Tensor, parts: _Parts) -> Tensor:
        """Return ``m s + dm/dx``, ``(n, d)``."""
        score = self.score(parameter, x)
        if score.shape != x.shape:
            raise ShapeError(f"score returns shape {tuple(score.shape)} for data of shape {tuple(x.shape)}")
        return parts.weight * score.reshape(parts.weight.shape) + parts.slope

    def _parts(self, x: Tensor) -> _Parts:
        rows = x.reshape(len(x), -1)
        weight, slope = torch.ones_like(rows), torch.zeros_like(rows)
        if self.weight is not None:
            weight, slope = (a.reshape(rows.shape) for a in own_derivatives(_spread(self.weight), x))
        difference = rows.unsqueeze(1) - rows.unsqueeze(0)
        squared = difference.square().sum(-1)
        value, first, second = radial_derivatives(self.kernel, squared, typical_squared_distance(squared))
        # With k = f(|x - y|**2): dk/dx = 2 f' (x - y) = -dk/dy, and d2k/dxdy = -2 f' - 4 f'' (x - y)**2.
        cross = 2 * first.unsqueeze(-1) * weight.unsqueeze(1) * difference
        bent = torch.einsum("ij,kj,ikj->ik", weight, weight, difference.square())
        return _Parts(weight, slope, value, cross, -2 * first * (weight @ weight.mT) - 4 * second * bent)


class _Parts(NamedTuple):
    """Terms of the Stein kernel that depend on data only: weight, its derivative ``(n, d)``, and terms of pairs."""

    weight: Tensor
    slope: Tensor
    value: Tensor  # (n, n): the kernel
    cross: Tensor  # (n, n, d): weight of the first times its derivative, to be multiplied by the drift of the second
    mixed: Tensor  # (n, n): the term without drift


def _spread(weight: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Expand a weight of each datum to its entries."""

    def spread(x: Tensor) -> Tensor:
        value = weight(x)
        if value.shape == x.shape[:1] and x.dim() > 1:
            value = value.reshape(-1, *[1] * (x.dim() - 1)).expand(x.shape)
        return value

    return spread


# Discrete Fisher divergence.


@dataclass(frozen=True)
class DiscreteFisherDivergence(PointwiseLoss):
    r"""Loss of the discrete Fisher divergence.

    .. math:: \ell(\theta, x) = \sum_j \left(\frac{p_\theta(x^{j-})}{p_\theta(x)}\right)^2
        - 2\,\frac{p_\theta(x)}{p_\theta(x^{j+})},

    where :math:`x^{j\pm}` is :math:`x` with entry j increased or decreased by one. For counts, :math:`p_\theta(x^{j-})
    = 0` if entry j is zero; states ``0, ..., num_states - 1`` are cyclic, so with two states entry j is flipped. Only
    ratios of probabilities are needed, so the normalising constant may be unknown. Up to a constant, the mean loss is
    that of :math:`\sum_j (p_\theta(x^{j-})/p_\theta(x) - q(x^{j-})/q(x))^2` under the data distribution :math:`q`.

    Parameters
    ----------
    log_mass : callable
        Log probability up to a constant, ``(parameter, x) -> (n,)`` for data ``x (n, ...)``, or ``(parameter,
        *covariates, x) -> (n,)`` for data ``(*covariates, x)``. It is also evaluated at neighbours of the data.
    num_states : int, optional
        Number of states of each entry, two for binary data; by default entries are unbounded counts.
    bounded : bool, default True
        Whether the loss stays bounded as the parameter tends to infinity, as for the rate of a Poisson distribution;
        the prior must then be proper. Set it to False only for models whose loss is known to grow.

    Raises
    ------
    SettingsError
        If ``num_states`` is less than two.

    References
    ----------
    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2024). Generalized Bayesian inference for discrete
    intractable likelihood. JASA 119, 2345-2355.

    Examples
    --------
    For a Poisson distribution: ``(x / rate)**2 - 2 (x + 1) / rate``.

    >>> import torch
    >>> loss = DiscreteFisherDivergence(lambda rate, x: x * rate.log() - torch.lgamma(x + 1))
    >>> loss.pointwise(torch.tensor(2.0), torch.tensor([0.0, 4.0]))
    tensor([-1., -1.])
    """

    log_mass: LogDensity
    num_states: int | None = None
    bounded: bool = True

    def __post_init__(self) -> None:
        if self.num_states is not None:
            whole_number("num_states", self.num_states, least=2)

    def check(self, data: Data) -> None:
        """Raise DataError, with the first such datum, unless data are counts or states in range."""
        x = columns(data)[-1]
        wrong = (x < 0) | (x != x.round())
        if self.num_states is not None:
            wrong = wrong | (x >= self.num_states)
        bad = wrong.reshape(len(x), -1).any(-1)
        if bool(bad.any()):
            what = "counts" if self.num_states is None else f"states 0, ..., {self.num_states - 1}"
            raise DataError(
                f"DiscreteFisherDivergence takes {what}, unlike datum {int(bad.nonzero()[0])} ({int(bad.sum())} in all)"
            )

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        *covariates, x = columns(data)
        entries = x[0].numel()
        steps = torch.eye(entries, dtype=x.dtype, device=x.device).reshape(entries, 1, *x.shape[1:])

        def log_mass(y: Tensor) -> Tensor:
            return _of_each("log_mass", self.log_mass, parameter, *covariates, y)

        # Neighbours outside the support are replaced by the datum itself and masked afterwards.
        lower, higher = x - steps, x + steps
        if self.num_states is not None:
            lower, higher = lower % self.num_states, higher % self.num_states
        outside = (lower < 0).reshape(entries, len(x), -1).any(-1)
        lower = lower.clamp_min(0)
        here = log_mass(x)
        masses = torch.func.vmap(log_mass)
        down = torch.where(outside, torch.zeros_like(outside, dtype=here.dtype), (masses(lower) - here).exp())
        up = (here - masses(higher)).exp()
        return (down.square() - 2 * up).sum(0)
