"""Whether a finite network is wide enough for its kernels of infinite width to describe it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
import torch
from scipy.stats import norm, t
from torch import Tensor, nn

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import DataError, ShapeError
from bayeskit.models.wide_networks.activations.piecewise_linear import PiecewiseLinear
from bayeskit.models.wide_networks.activations.sign import Step
from bayeskit.models.wide_networks.empirical.drift import DriftAgainstWidth, ntk_drift_against_width
from bayeskit.models.wide_networks.empirical.moments import Moments, kernel_moments, pairs_of
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth, Variance, infinite_width
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.nonlinearity import Nonlinearity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVEL = 0.975
Weighted = Dense | Convolution


class Interval(NamedTuple):
    """A number with its 95 % confidence interval.

    Attributes
    ----------
    value, lower, upper : float
        None is below zero.
    """

    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.lower:.3g} to {self.upper:.3g})"


@dataclass(frozen=True)
class KernelRegime:
    """How far networks of one width are from their limit; made by :func:`kernel_regime`.

    Attributes
    ----------
    width : int or None
        None for the module's own widths.
    num_networks : int
        Of random weights.
    tolerance : float
        Below which a relative number counts as small.
    bias : Interval
        Frobenius norm of the mean tangent kernel minus its limit, by that of the limit, off the diagonal. Falls like
        one over the width.
    fluctuation : Interval
        Root mean square, over networks, of the Frobenius norm of the tangent kernel minus its mean, by that of the
        limit. Falls like one over the square root of the width.
    drift : Interval or None
        Typical change of a network's tangent kernel under training, by the kernel; None where there were no targets.
        Falls like one over the width, or nearly its square root where activations have kinks.
    has_kinks : bool
        Whether activations have.
    widths : tuple of int
        Of the layers before the last, one after another, where ``width`` is None.
    law : str
        That of the random weights, in words.
    he_variance : float or None
        The weight variance with which ReLU keeps the size of what it passes on, if weights have a smaller one.
    """

    width: int | None
    num_networks: int
    tolerance: float
    bias: Interval
    fluctuation: Interval
    drift: Interval | None
    has_kinks: bool = False
    widths: tuple[int, ...] = ()
    law: str = ""
    he_variance: float | None = None

    @property
    def numbers(self) -> dict[str, Interval]:
        """All that was measured, by name."""
        found = {"bias": self.bias, "fluctuation": self.fluctuation}
        return found if self.drift is None else found | {"drift": self.drift}

    @property
    def trusted(self) -> bool:
        """Whether all numbers are below the tolerance, with their intervals."""
        return all(number.upper <= self.tolerance for number in self.numbers.values())

    @property
    def rejected(self) -> bool:
        """Whether a number is above the tolerance, with its interval."""
        return any(number.lower > self.tolerance for number in self.numbers.values())

    @property
    def factor(self) -> float:
        """How many times the width would bring all numbers to the tolerance, or at least one if they are below."""
        powers = {"bias": 1.0, "fluctuation": 2.0, "drift": 2.0 if self.has_kinks else 1.0}
        return max(1.0, *((number.value / self.tolerance) ** powers[name] for name, number in self.numbers.items()))

    @property
    def verdict(self) -> str:
        """One sentence: whether this width is in the kernel regime, what speaks against it, and what to do."""
        width = "random networks of " + (f"width {self.width}" if self.width is not None else self._own_widths)
        if self.trusted:
            text = f"{width} are in the kernel regime: all of {', '.join(self.numbers)} are below {self.tolerance:g}"
            return text if self.drift is not None else f"{text} (at initialisation; give y for the drift)"
        large = [f"{name} {number}" for name, number in self.numbers.items() if number.lower > self.tolerance]
        if large:
            return (
                f"{width} are not in the kernel regime: {', '.join(large)} above {self.tolerance:g}; about "
                f"{_rounded(self.factor)} times the width would be{self._remedy}"
            )
        open_ones = [f"{name} {number}" for name, number in self.numbers.items() if number.upper > self.tolerance]
        return f"{width} are undecided: {', '.join(open_ones)} about {self.tolerance:g}; take more networks"

    @property
    def _own_widths(self) -> str:
        if not self.widths:
            return "the module's own widths"
        return f"the module's own width{'s' * (len(self.widths) > 1)} {', '.join(map(str, self.widths))}"

    @property
    def _remedy(self) -> str:
        if self.he_variance is None or self.drift is None or self.drift.lower <= self.tolerance:
            return ""
        return (
            f". The drift also shrinks with weight_variance={self.he_variance:g} (He), with which the kernel does not "
            "get smaller from layer to layer"
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a number."""
        rows = [{"number": name, **number._asdict()} for name, number in self.numbers.items()]
        return pd.DataFrame(rows).set_index("number")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the numbers with their 95 % intervals beside the tolerance; filled ones are below it.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes.
        """
        from matplotlib.figure import Figure

        from bayeskit._plots import BLUE, GREY, VERMILION

        if ax is None:
            ax = Figure(figsize=(5.6, 2.2), layout="constrained").subplots()
        floor = 1e-2 * self.tolerance
        for row, number in enumerate(self.numbers.values()):
            small = number.upper <= self.tolerance
            colour = BLUE if small else VERMILION
            ends = [max(number.lower, floor), max(number.upper, floor)]
            ax.plot(ends, [row, row], color=colour, linewidth=1.8)
            value = max(number.value, floor)
            ax.plot([value], [row], marker="o", color=colour, markerfacecolor=colour if small else "white")
        ax.axvline(self.tolerance, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        ax.set_xscale("log")
        ax.set_yticks(range(len(self.numbers)), list(self.numbers))
        ax.set_ylim(len(self.numbers) - 0.5, -0.5)
        ax.set_xlabel("relative to the tangent kernel")
        ax.grid(axis="x", alpha=0.25)
        return ax

    def __repr__(self) -> str:
        law = [f"  {self.law}; not the module's own weights"] if self.law else []
        return "\n".join([self.verdict, *law, *(f"  {name} {number}" for name, number in self.numbers.items())])


def kernel_regime(
    kernel: InfiniteWidth | nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    *,
    width: int | None = None,
    weight_variance: Variance | None = None,
    bias_variance: Variance | None = None,
    tolerance: float = 0.1,
    num_networks: int = 500,
    num_trained: int = 32,
    learning_rate: float | None = None,
    num_steps: int = 100,
    seed: int = 0,
    num_jobs: int = 1,
    progress: bool = True,
) -> KernelRegime:
    """Tell whether random networks of a given width behave as their tangent kernel of infinite width says.

    They have the layers of a module and random weights of the law that is given here, not the module's own weights,
    whatever law these have. Three things must hold: the mean of their kernels is the limit, each is close to the mean,
    and training leaves it where it was.

    Parameters
    ----------
    kernel : InfiniteWidth or torch.nn.Module
        Networks have the law of ``kernel.network(width)``. A module is read by
        :func:`~bayeskit.models.wide_networks.infinite_width`.
    x : Tensor
        Inputs, ``(n, ...)``, two at least. Networks are in its precision.
    y : Tensor, optional
        What outputs should be, ``(n, outputs)`` or ``(n,)``; without it nothing is trained.
    width : int, optional
        Of all layers but the last; by default the module's own widths.
    weight_variance, bias_variance : float, Tensor or mapping, optional
        As for :func:`~bayeskit.models.wide_networks.infinite_width`, times the number of inputs of a layer for weights;
        by default those of the kernel, or 1 and 0 for a module. Before ReLU, 2 for weights (He) keeps variances as they
        are from layer to layer.
    tolerance : float, default 0.1
        Below which relative numbers count as small.
    num_networks : int, default 500
        Random networks, for bias and fluctuation.
    num_trained : int, default 32
        Those that are trained, for the drift.
    learning_rate, num_steps
        Of training, see :func:`ntk_drift_against_width`.
    seed : int, default 0
    num_jobs : int, default 1
        Processes for the random networks; results do not depend on it.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    KernelRegime
        With the numbers, a verdict in words, and ``trusted``.

    Raises
    ------
    SettingsError, ShapeError, DataError, ModelError
        If settings, inputs, targets or the network do not fit.
    LossError
        If training diverges.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> kernel = infinite_width(network, weight_variance=2.0)
    >>> x = torch.tensor([[1.0, 0.0], [0.5, 1.0], [-0.5, 1.0]])
    >>> report = kernel_regime(kernel, x, x.sum(1), width=8)
    >>> report.trusted, report.verdict.startswith("random networks of width 8 are not in the kernel regime")
    (False, True)
    """
    if isinstance(kernel, nn.Module):
        kernel = infinite_width(kernel)
    if weight_variance is not None or bias_variance is not None:
        kernel = kernel.with_variances(weight_variance, bias_variance)
    if not isinstance(x, Tensor) or x.dim() < 2 or len(x) < 2:
        raise ShapeError("x must hold two inputs at least, (n, ...): the bias is that of pairs")
    width = None if width is None else whole_number("width", width, least=1)
    tolerance = real_number("tolerance", tolerance, between=(0.0, math.inf))
    num_networks = whole_number("num_networks", num_networks, least=2)
    (moments,) = kernel_moments(kernel, x, [width], num_networks, "ntk", seed, num_jobs, progress)
    bias, fluctuation = _bias(moments), _fluctuation(moments)
    drift = None
    if y is not None:
        trained = ntk_drift_against_width(
            kernel, x, y, [width], num_trained, learning_rate=learning_rate, num_steps=num_steps, seed=seed
        )
        drift = _drift(trained)
    return KernelRegime(
        width,
        num_networks,
        tolerance,
        bias,
        fluctuation,
        drift,
        _has_kinks(kernel),
        _widths(kernel),
        _law(kernel),
        _he_variance(kernel),
    )


def _has_kinks(kernel: InfiniteWidth) -> bool:
    layers = [node.layer for node in kernel.graph.nodes]
    functions = [layer.activation for layer in layers if isinstance(layer, Nonlinearity)]
    return any(isinstance(f, Step) or (isinstance(f, PiecewiseLinear) and f.left != f.right) for f in functions)


def _widths(kernel: InfiniteWidth) -> tuple[int, ...]:
    """Return the numbers of channels of layers with weights before the last."""
    layers = [node.layer for node in kernel.graph.nodes]
    channels = [x.channels if isinstance(x, Dense) else x.dense.channels for x in layers if isinstance(x, Weighted)]
    return tuple(channels[:-1])


def _law(kernel: InfiniteWidth) -> str:
    """Return the law of random weights, in words."""
    weight, bias = (_numbers(x) for x in (kernel.variances.weight, kernel.variances.bias))
    which = "NTK" if kernel.parameterization == "ntk" else kernel.parameterization
    return f"weight variance {weight} over the number of inputs, bias variance {bias}, {which} parametrisation"


def _numbers(variances: Mapping[str, float | Tensor]) -> str:
    found = [f"{float(x):.3g}" for x in variances.values()]
    return found[0] if len(set(found)) == 1 else f"({', '.join(found)})"


def _he_variance(kernel: InfiniteWidth) -> float | None:
    """Return the weight variance with which activations with a kink keep second moments, if one is smaller."""
    layers = [node.layer for node in kernel.graph.nodes]
    functions = [layer.activation for layer in layers if isinstance(layer, Nonlinearity)]
    slopes = {(f.left, f.right) for f in functions if isinstance(f, PiecewiseLinear) and f.left != f.right}
    if len(slopes) != 1:
        return None
    left, right = slopes.pop()
    wanted = 2 / (left**2 + right**2)
    return wanted if min(float(x) for x in kernel.variances.weight.values()) < 0.99 * wanted else None


def _rounded(factor: float) -> str:
    """Return a number to one digit, or to two if it is below ten."""
    return f"{factor:.2g}" if factor < 9.95 else f"{float(f'{factor:.0e}'):.0f}"


def _bias(moments: Moments) -> Interval:
    """Return the relative Frobenius norm of the bias off the diagonal.

    The square of an estimated bias is too large by the variance of the estimate, which is taken off.
    """
    chosen = ~moments.is_diagonal
    value = moments.bias[chosen]
    error = moments.covariance[chosen][:, chosen] / moments.num_networks
    rows, columns = pairs_of(len(moments.limit))
    size = float(moments.limit[rows, columns][chosen].square().sum())
    if size == 0:
        raise DataError("the tangent kernel is zero for all pairs of inputs, so that there is no relative bias")
    square = float(value @ value - error.trace())
    twice = 2 * float(error.square().sum())  # the variance of the square, if there is no bias at all
    spread = math.sqrt(max(4 * float(value @ error @ value) - twice, twice))
    return _root(square / size, norm.ppf(LEVEL) * spread / size)


def _fluctuation(moments: Moments) -> Interval:
    """Return the relative root mean square of the deviation from the mean."""
    error = moments.distance[1]
    weight = torch.where(moments.is_diagonal, 1.0, 2.0).double()
    size = float(moments.limit.square().sum())
    spread = float(weight @ moments.covariance.diagonal())
    # The error is that of the distance from the limit, which differs from the one of the mean by less than itself.
    return _root(spread / size, norm.ppf(LEVEL) * error / size)


def _drift(trained: DriftAgainstWidth) -> Interval:
    logarithms = trained.relative_change[0].log()
    number = len(logarithms)
    half = float(t.ppf(LEVEL, number - 1) * logarithms.std()) / math.sqrt(number)
    mean = float(logarithms.mean())
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _root(square: float, half: float) -> Interval:
    lower, value, upper = (math.sqrt(max(x, 0.0)) for x in (square - half, square, square + half))
    return Interval(value, lower, upper)
