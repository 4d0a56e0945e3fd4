"""How far kernels of finite networks are, on average, from their limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pandas as pd
import torch
from scipy.stats import chi2
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks.empirical.moments import Moments, kernel_moments, pairs_of
from bayeskit.models.wide_networks.empirical.power_law import PowerLaw, fit_power_law, precisions
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class FiniteWidthBias:
    """Mean deviation of random networks' kernels from their limit; made by :func:`finite_width_bias`.

    Attributes
    ----------
    which : str
        ``"nngp"`` or ``"ntk"``.
    moments : tuple of Moments
        One a width.
    """

    which: str
    moments: tuple[Moments, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths, in ascending order."""
        return tuple(int(m.width or 0) for m in self.moments)

    @property
    def limit(self) -> Tensor:
        """The kernel of infinite width, ``(W, n, n)``; in the standard parametrisation it depends on the width."""
        return torch.stack([m.limit for m in self.moments])

    @property
    def bias(self) -> Tensor:
        """Mean of the finite kernels minus the limit, ``(W, n, n)``."""
        return torch.stack([m.matrix(m.bias) for m in self.moments])

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo error of the bias, ``(W, n, n)``."""
        return torch.stack([m.matrix((m.covariance.diagonal() / m.num_networks).sqrt()) for m in self.moments])

    @cached_property
    def rate(self) -> PowerLaw:
        """The power of the width by which biases off the diagonal fall, with its confidence interval.

        Raises
        ------
        SettingsError
            If there is one width, or one input, only.
        """
        if len(self.moments) < 2 or len(self.moments[0].limit) < 2:
            raise SettingsError("a rate needs two widths and two inputs at least")
        chosen = ~self.moments[0].is_diagonal
        values, errors = zip(*[_relative(m, chosen) for m in self.moments], strict=True)
        return fit_power_law(torch.tensor(self.widths, dtype=torch.float64), torch.stack(values), torch.stack(errors))

    @property
    def diagonal_p_value(self) -> float:
        """How often kernels without any bias on the diagonal would seem to have more (a chi-squared test)."""
        return self._p_value(self.moments[0].is_diagonal)

    @property
    def off_diagonal_p_value(self) -> float:
        """How often kernels without any bias off the diagonal would seem to have more."""
        return self._p_value(~self.moments[0].is_diagonal)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a width and pair of inputs: limit, bias, its standard error, and both by the limit."""
        rows, columns = (x.tolist() for x in pairs_of(len(self.moments[0].limit)))
        bias, error, limit = self.bias, self.standard_error, self.limit
        table = []
        for k, width in enumerate(self.widths):
            for i, j in zip(rows, columns, strict=True):
                value, b, e = (float(matrix[k, i, j]) for matrix in (limit, bias, error))
                by = (b / value, e / abs(value)) if value else (math.nan, math.nan)
                table.append(
                    {
                        "width": width,
                        "first": i,
                        "second": j,
                        "limit": value,
                        "bias": b,
                        "standard_error": e,
                        "relative_bias": by[0],
                        "relative_standard_error": by[1],
                    }
                )
        return pd.DataFrame(table)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the size of relative biases against the width: pairs off the diagonal with 95 % bars, and 1/width.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes.
        """
        from matplotlib.figure import Figure

        from bayeskit._plots import CHAIN_COLOURS, GREY

        if ax is None:
            ax = Figure(figsize=(5.4, 4.2), layout="constrained").subplots()
        table = self.to_pandas()
        off = table[table["first"] != table["second"]]
        for i, ((first, second), rows) in enumerate(off.groupby(["first", "second"])):
            ax.errorbar(
                rows["width"] * (1 + 0.02 * i),  # so that bars do not hide one another
                rows["relative_bias"].abs(),
                1.96 * rows["relative_standard_error"],
                color=CHAIN_COLOURS[i % len(CHAIN_COLOURS)],
                marker="o",
                markersize=4,
                linestyle="none",
                capsize=2,
                label=f"inputs {first}, {second}",
            )
        start = off[off["width"] == self.widths[0]]["relative_bias"].abs().max()
        width = torch.tensor(self.widths, dtype=torch.float64)
        ax.plot(width, start * width[0] / width, color=GREY, linestyle="--", linewidth=1.0, zorder=0, label="1/width")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("width")
        ax.set_ylabel(f"relative bias of the {self.which.upper()}, size")
        ax.legend(frameon=False, fontsize="small")
        ax.grid(alpha=0.25)
        return ax

    def __repr__(self) -> str:
        number = self.moments[0].num_networks
        lines = [f"bias of the {self.which.upper()} of {number} networks of widths {', '.join(map(str, self.widths))}"]
        if len(self.moments[0].limit) > 1:
            if len(self.moments) > 1:
                lines.append(f"  off the diagonal: {self.rate}")
            lines.append(f"  none off the diagonal: p = {self.off_diagonal_p_value:.2g}")
        lines.append(f"  none on the diagonal: p = {self.diagonal_p_value:.2g}")
        return "\n".join(lines)

    def _p_value(self, chosen: Tensor) -> float:
        values, errors = (torch.stack(x) for x in zip(*[_relative(m, chosen) for m in self.moments], strict=True))
        precision, num_directions = precisions(errors)
        statistic = float(torch.einsum("wp,wpq,wq->", values, precision, values))
        return float(chi2.sf(statistic, sum(num_directions)))


def _relative(moments: Moments, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return biases by the size of both inputs' own kernels, which is never zero, and their covariance."""
    rows, columns = pairs_of(len(moments.limit))
    diagonal = moments.limit.diagonal()
    size = (diagonal[rows] * diagonal[columns]).sqrt()[chosen]
    covariance = moments.covariance[chosen][:, chosen] / moments.num_networks
    return moments.bias[chosen] / size, covariance / (size[:, None] * size)


def finite_width_bias(
    kernel: InfiniteWidth,
    x: Tensor,
    widths: Sequence[int] = (8, 16, 32, 64),
    num_networks: int = 10_000,
    which: str = "nngp",
    *,
    seed: int = 0,
    num_jobs: int = 1,
    progress: bool = True,
) -> FiniteWidthBias:
    r"""Average the kernels of random finite networks, and compare the mean with the limit, entry by entry.

    Networks have the law of ``kernel.network(width)``. The last layer of each is integrated out: given the layers
    before, the covariance of outputs is known.

    Parameters
    ----------
    kernel : InfiniteWidth
        The limit, made by :func:`~bayeskit.models.wide_networks.infinite_width`.
    x : Tensor
        Inputs, ``(n, ...)``, few. Networks are in its precision (float32 halves the time, and its rounding errors are
        far below the Monte Carlo error of any number of networks that one can afford); sums over networks are in
        float64.
    widths : sequence of int
        Of all layers but the last.
    num_networks : int, default 10_000
        At each width.
    which : {"nngp", "ntk"}, default "nngp"
    seed : int, default 0
    num_jobs : int, default 1
        Processes; results do not depend on it.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    FiniteWidthBias
        With standard errors, and the rate at which the bias falls.

    Raises
    ------
    SettingsError
        If widths or numbers are below 1, or ``which`` is unknown.
    ShapeError, DataError
        If inputs do not fit the network.
    ModelError
        If the network does not end in a layer with weights, or draws noise of its own.

    Notes
    -----
    With one hidden layer there is no bias at any width: both kernels are averages over independent units. From the
    second on, a layer meets a random covariance and bends it, :math:`E\,g(\hat K) = g(K) + \tfrac12 g''(K)
    \operatorname{var} \hat K + \dots`, and the variance is of order one over the width.

    On the diagonal of ReLU, leaky ReLU and absolute value there is none at any depth, with biases or without. Half of
    the second moment passes such a unit whatever the layers before have made it, which is linear, so that nothing is
    bent. In the tangent kernel the squared slope of a unit depends on the sign of its argument alone, and that sign is
    independent of all else on the diagonal: turning the unit's incoming weights turns the sign and leaves the squared
    length of the gradient as it is.

    References
    ----------
    Dyer, E., Gur-Ari, G. (2020). Asymptotics of wide networks from Feynman diagrams. International Conference on
    Learning Representations.

    Yaida, S. (2020). Non-Gaussian processes and neural networks at finite widths. Mathematical and Scientific Machine
    Learning.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> kernel = infinite_width(network, weight_variance=2.0)
    >>> result = finite_width_bias(kernel, torch.tensor([[1.0, 0.0], [-0.5, 1.0]]), widths=(4, 8, 16))
    >>> result.diagonal_p_value > 0.01, result.off_diagonal_p_value < 1e-6, result.rate.covers(1.0)
    (True, True, True)
    """
    found = sorted({whole_number("widths", width, least=1) for width in widths})
    if not found:
        raise SettingsError("widths must have one entry at least")
    num_networks = whole_number("num_networks", num_networks, least=2)
    return FiniteWidthBias(
        which, tuple(kernel_moments(kernel, x, found, num_networks, which, seed, num_jobs, progress))
    )
