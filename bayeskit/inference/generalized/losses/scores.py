"""Losses of models whose normaliser is not known: score matching, Stein and Fisher divergences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses.densities import unvalidated
from bayeskit.inference.generalized.losses.loss import Data, Loss, PointwiseLoss, columns
from bayeskit.inference.kernel_discrepancy import Kernel

__all__ = [
    "DiscreteFisherDivergence",
    "GeneralInverseMultiquadric",
    "KernelSteinDiscrepancy",
    "LogDensity",
    "Score",
    "ScoreMatching",
    "check_pairs",
    "mean_over_pairs",
    "own_derivatives",
    "radial_derivatives",
    "score_of",
    "typical_squared_distance",
]

# Kernels for Stein discrepancies, with the derivatives that these need.


@dataclass(frozen=True)
class GeneralInverseMultiquadric:
    r"""``(1 + d**2 / bandwidth**2) ** -exponent``.

    With exponents in (0, 1) the Stein discrepancy of this kernel controls weak convergence; with faster decaying
    kernels such as :class:`~bayeskit.inference.kernel_discrepancy.RadialBasis` it does not beyond two dimensions.

    Parameters
    ----------
    bandwidth : float, default 1.0
        Positive.
    exponent : float, default 0.5
        Positive.

    Raises
    ------
    SettingsError
        If one is not positive.

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
        real_number("bandwidth", self.bandwidth, between=(0.0, float("inf")))
        real_number("exponent", self.exponent, between=(0.0, float("inf")))

    def __call__(self, squared_distance: Tensor, typical: Tensor) -> Tensor:
        """Return the kernel, of the shape of ``squared_distance``."""
        return (1 + squared_distance / self.bandwidth**2) ** -self.exponent


def radial_derivatives(kernel: Kernel, squared_distance: Tensor, typical: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a kernel and its first two derivatives by the squared distance, entry by entry."""

    def value(t: Tensor) -> Tensor:
        return kernel(t, typical)

    def first(t: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda s: value(s).sum())(t)
        return gradient

    second = torch.func.grad(lambda s: first(s).sum())(squared_distance)
    return value(squared_distance), first(squared_distance), second


def _check_bandwidth(kernel: Kernel, x: Tensor) -> None:
    """Raise DataError where a kernel takes its bandwidth from data ``(n, ...)`` of median distance zero."""
    probe, one = x.new_tensor([0.5, 1.0, 2.0]), x.new_ones(())
    if len(x) < 2 or torch.equal(kernel(probe, one), kernel(probe, 2 * one)):
        return
    rows = x.detach().reshape(len(x), -1)
    squared = (rows.unsqueeze(1) - rows).square().sum(-1)
    if not bool(_median_squared_distance(squared) > 0):
        raise DataError(
            f"at least half of the pairs of data are tied, so that the median distance between them, from which "
            f"{type(kernel).__name__} takes its bandwidth, is zero; give the kernel a bandwidth"
        )


def typical_squared_distance(squared_distance: Tensor) -> Tensor:
    """Return the median between different data, of all squared distances ``(n, n)``, as a constant."""
    if len(squared_distance) < 2:
        return squared_distance.new_ones(())
    median = _median_squared_distance(squared_distance)
    return median.clamp_min(torch.finfo(median.dtype).tiny)


def _median_squared_distance(squared_distance: Tensor) -> Tensor:
    count = len(squared_distance)
    rows, others = torch.triu_indices(count, count, offset=1, device=squared_distance.device)
    return squared_distance.detach()[rows, others].median()


# Losses over pairs of data: checks of the data, and weighted means.


def check_pairs(name: str, data: Data, kernel: Kernel, statistic: Literal["V", "U"]) -> None:
    """Refuse covariates (ShapeError), and data that are integer, tied, or too few for a U-statistic (DataError)."""
    if isinstance(data, tuple):
        raise ShapeError(f"{name} takes one tensor of data, not covariates and outcomes")
    if not data.is_floating_point():
        raise DataError(f"{name} takes data of a floating type, not whole numbers; convert them if they are continuous")
    if statistic == "U" and len(data) < 2:
        raise DataError("the U-statistic needs two data at least")
    _check_bandwidth(kernel, data)


def mean_over_pairs(values: Tensor, weights: Tensor | None, statistic: Literal["V", "U"]) -> Tensor:
    """Return the mean of symmetric ``values (n, n)`` over pairs of data, weighted by products of ``weights (n,)``."""
    counts = values.new_ones(len(values)) if weights is None else weights.to(values)
    total, pairs = counts @ values @ counts, counts.sum().square()
    if statistic == "U":  # over pairs of different data
        total = total - (counts.square() * values.diagonal()).sum()
        pairs = pairs - counts.square().sum()
    return total / pairs


# Scores: the gradient of a log density with respect to the data, which needs no normaliser.

LogDensity = Callable[..., Tensor]
"""``(parameter, x (n, ...)) -> (n,)``: log densities of data, up to a number that depends on the parameter alone."""

Score = Callable[..., Tensor]
"""``(parameter, x (n, ...)) -> (n, ...)``: its gradient with respect to each datum."""


def score_of(log_density: LogDensity) -> Score:
    """Return the score of a log density by automatic differentiation.

    Parameters
    ----------
    log_density : callable
        ``(parameter, x) -> (n,)`` or ``(parameter, *covariates, x) -> (n,)`` for data ``x`` of shape ``(n, ...)``,
        each on its own, up to a constant.

    Returns
    -------
    callable
        With the same arguments, of the shape of ``x``.

    Raises
    ------
    ShapeError
        When called, if ``log_density`` does not return one number for each datum.

    Examples
    --------
    >>> import torch
    >>> score = score_of(lambda mean, x: -(x - mean) ** 2 / 2)
    >>> score(torch.tensor(1.0), torch.tensor([0.0, 3.0]))
    tensor([ 1., -2.])
    """

    def score(parameter: Any, *data: Tensor) -> Tensor:
        def summed(x: Tensor) -> Tensor:
            with unvalidated():
                each = log_density(parameter, *data[:-1], x)
            if each.shape != x.shape[:1]:
                raise ShapeError(
                    f"log_density returns shape {tuple(each.shape)} instead of ({len(x)},) for data of shape "
                    f"{tuple(x.shape)}"
                )
            return each.sum()

        gradient: Tensor = torch.func.grad(summed)(data[-1])
        return gradient

    return score


def own_derivatives(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function of ``x (n, ...)`` and the diagonal of each datum's Jacobian matrix, both ``(n, ...)``."""
    value, pull = torch.func.vjp(function, x)[:2]
    if value.shape != x.shape:
        raise ShapeError(f"expected a function that keeps the shape {tuple(x.shape)}, not one to {tuple(value.shape)}")
    size = x[0].numel()
    directions = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *x.shape[1:])
    rows = torch.func.vmap(lambda e: pull(e.expand_as(x))[0] * e)(directions)
    return value, rows.sum(0)


# Score matching: the distance between gradients of log densities, for models whose normaliser is unknown.


@dataclass(frozen=True)
class ScoreMatching(PointwiseLoss):
    r"""Hyvarinen's loss of a density known up to its normaliser.

    .. math:: \ell(\theta, x) = \sum_j \tfrac12\, h_j(x)\, s_j(x)^2 + \partial_j \big(h_j(x)\, s_j(x)\big),
        \qquad s = \nabla_x \log p_\theta,

    with all :math:`h_j = 1` by default: half the squared score plus the trace of the Hessian. Up to a constant its
    mean is the Fisher divergence between the law of the data and the model. Quadratic in the natural parameter of an
    exponential family; see :func:`~bayeskit.inference.generalized.gaussian_posterior`.

    Parameters
    ----------
    log_density : callable
        ``(parameter, x) -> (n,)`` for data ``x`` of shape ``(n, ...)``, twice differentiable in ``x``, up to a
        constant; ``(parameter, *covariates, x) -> (n,)`` where the data are ``(*covariates, x)``.
    weight : callable, optional
        ``h: x -> `` positive numbers of the shape of ``x``, that vanish where the support ends, such as ``x**2`` for
        positive data.
    bounded : bool, default False
        Whether the loss stays below a bound however far the parameter goes, as for a normal law's scale.

    References
    ----------
    Hyvarinen, A. (2005). Estimation of non-normalized statistical models by score matching. JMLR 6, 695-709.

    Hyvarinen, A. (2007). Some extensions of score matching. Computational Statistics and Data Analysis 51, 2499-2512.

    Yu, S., Drton, M., Shojaie, A. (2019). Generalized score matching for non-negative data. JMLR 20, 76.

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
        """Refuse data without derivatives.

        Raises
        ------
        DataError
            If they are whole numbers by type.
        """
        if not columns(data)[-1].is_floating_point():
            raise DataError("ScoreMatching differentiates with respect to the data, which are not of a floating type")

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        *covariates, x = columns(data)
        score = score_of(self.log_density)
        if self.weight is None:
            value, derivative = own_derivatives(lambda y: score(parameter, *covariates, y), x)
            each = value.square() / 2 + derivative
        else:
            weight = self.weight
            _, derivative = own_derivatives(lambda y: weight(y) * score(parameter, *covariates, y), x)
            each = weight(x) * score(parameter, *covariates, x).square() / 2 + derivative
        return each.flatten(1).sum(-1) if each.dim() > 1 else each


# The kernel Stein discrepancy: a distance to a model that needs only its score.


@dataclass(frozen=True)
class KernelSteinDiscrepancy(Loss):
    r"""``n`` times the squared kernel Stein discrepancy between data and model.

    The discrepancy is the mean of the Stein kernel over pairs of data,

    .. math:: k_\theta(x, y) = \sum_j \big[s_j(x) s_j(y) + s_j(x)\,\partial_{y_j} + s_j(y)\,\partial_{x_j}
        + \partial_{x_j}\partial_{y_j}\big]\, m_j(x)\,k(x, y)\,m_j(y), \qquad s = \nabla \log p_\theta,

    over all pairs (V-statistic, never negative) or those of different data (U-statistic, unbiased). The weight
    :math:`m` makes it robust: the influence of a datum is bounded if :math:`m(x)\,s(x)` is. Its derivative belongs to
    the kernel. Quadratic in the natural parameter of an exponential family; see
    :func:`~bayeskit.inference.generalized.gaussian_posterior`.

    It looks at pairs of data, so that neither minibatches nor sequential updates make sense.

    Parameters
    ----------
    score : callable
        ``(parameter, x) -> `` the gradient of the model's log density with respect to ``x``, of its shape; of a log
        density, :func:`~bayeskit.inference.generalized.losses.score_of` makes one.
    kernel : Kernel, optional
        :class:`GeneralInverseMultiquadric` of bandwidth one by default. A kernel that leaves its scale to the data
        gets the median squared distance between them, and so cannot be used where more than half of these are zero.
    weight : callable, optional
        ``m: x -> `` numbers, one for each datum, ``(n,)``, or for each of its entries, the shape of ``x``, each
        datum on its own.
    statistic : {"V", "U"}, default "V"
    bounded : bool, default False
        Whether the loss stays below a bound however far the parameter goes, as for a normal law's scale.

    Raises
    ------
    SettingsError
        If ``statistic`` is neither.

    Notes
    -----
    Under the V-statistic a datum of weight two equals two data. Under the U-statistic it does not: two equal data make
    a pair, but a datum makes none with itself, whatever its weight.

    References
    ----------
    Liu, Q., Lee, J., Jordan, M. (2016). A kernelized Stein discrepancy for goodness-of-fit tests. ICML.

    Barp, A., Briol, F.-X., Duncan, A., Girolami, M., Mackey, L. (2019). Minimum Stein discrepancy estimators. NeurIPS.

    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2022). Robust generalised Bayesian inference for
    intractable likelihoods. JRSS B 84, 997-1022.

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
        """Refuse covariates, whole numbers, a single datum for a U-statistic, and ties without a bandwidth.

        Raises
        ------
        DataError, ShapeError
        """
        check_pairs("KernelSteinDiscrepancy", data, self.kernel, self.statistic)

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the squared discrepancy times the sum of ``weights (n,)``."""
        (x,) = columns(data)
        counts = x.new_ones(len(x)) if weights is None else weights.to(x)
        parts = self._parts(x)
        # The kernel is bilinear in the drift: products with matrices that no parameter and no weight changes.
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
    """Parts of the Stein kernel by data alone: weight, its derivative ``(n, d)``, and terms of each pair."""

    weight: Tensor
    slope: Tensor
    value: Tensor  # (n, n): the kernel
    cross: Tensor  # (n, n, d): weight of the first times its derivative, to be multiplied by the drift of the second
    mixed: Tensor  # (n, n): the term without drift


def _spread(weight: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Let a weight of each datum be that of each of its entries."""

    def spread(x: Tensor) -> Tensor:
        value = weight(x)
        if value.shape == x.shape[:1] and x.dim() > 1:
            value = value.reshape(-1, *[1] * (x.dim() - 1)).expand(x.shape)
        return value

    return spread


# The discrete Fisher divergence: ratios of masses of neighbours, for discrete models whose normaliser is unknown.


@dataclass(frozen=True)
class DiscreteFisherDivergence(PointwiseLoss):
    r"""The loss of the discrete Fisher divergence.

    .. math:: \ell(\theta, x) = \sum_j \left(\frac{p_\theta(x^{j-})}{p_\theta(x)}\right)^2
        - 2\,\frac{p_\theta(x)}{p_\theta(x^{j+})},

    where :math:`x^{j\pm}` is :math:`x` with its entry j one higher or lower. Entries are counts, and
    :math:`p_\theta(x^{j-}) = 0` where there is no lower one, or one of ``num_states`` states, of which the last is
    followed by the first; with two states, ``x`` with its entry j flipped. Only ratios of masses enter, so that no
    normaliser is needed. Up to a constant the mean is that of
    :math:`\sum_j (p_\theta(x^{j-})/p_\theta(x) - q(x^{j-})/q(x))^2` under the law :math:`q` of the data.

    Parameters
    ----------
    log_mass : callable
        ``(parameter, x) -> (n,)`` for data ``x (n, ...)``, up to a constant; ``(parameter, *covariates, x)`` where the
        data are ``(*covariates, x)``. It is evaluated at the neighbours of the data, too.
    num_states : int, optional
        States ``0, ..., num_states - 1`` of each entry; two for binary data. By default entries are counts without
        a largest one.
    bounded : bool, default True
        Whether the loss stays below a bound however far the parameter goes, as it does for a Poisson law's rate: only
        a proper prior then gives a posterior. Set it to False only for a model where it is known to grow.

    Raises
    ------
    SettingsError
        If there are fewer than two states.

    References
    ----------
    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2024). Generalized Bayesian inference for discrete
    intractable likelihood. JASA 119, 2345-2355.

    Examples
    --------
    A Poisson law: ``(x / rate)**2 - 2 (x + 1) / rate``.

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
        """Refuse data that are no such counts or states.

        Raises
        ------
        DataError
            The datum is named.
        """
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
            with unvalidated():
                value = self.log_mass(parameter, *covariates, y)
            if value.shape != y.shape[:1]:
                raise ShapeError(
                    f"log_mass returns shape {tuple(value.shape)} instead of ({len(y)},) for data of shape "
                    f"{tuple(y.shape)}"
                )
            return value

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
