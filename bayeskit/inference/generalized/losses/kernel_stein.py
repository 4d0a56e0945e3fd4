"""The kernel Stein discrepancy: a distance to a model that needs its score only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data, Loss, columns
from bayeskit.inference.generalized.losses.pairs import check_pairs
from bayeskit.inference.generalized.losses.scores import Score, own_derivatives
from bayeskit.inference.generalized.losses.stein_kernels import (
    GeneralInverseMultiquadric,
    radial_derivatives,
    typical_squared_distance,
)
from bayeskit.inference.kernel_discrepancy import Kernel


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
    """What the Stein kernel takes from data alone: weight, its derivative ``(n, d)``, and terms of each pair."""

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
