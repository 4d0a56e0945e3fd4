"""Deviation of finite networks from the infinite-width limit: kernel bias, drift in training, and the kernel regime."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from scipy.stats import chi2, norm, t
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bayeskit.errors import DataError, LossError, ModelError, SettingsError, ShapeError
from bayeskit.extend import (
    BLUE,
    CHAIN_COLOURS,
    GREY,
    VERMILION,
    axes_or_new,
    map_tasks,
    new_generator,
    one_thread,
    real_number,
    short_repr,
    whole_number,
    with_error,
)
from bayeskit.models.wide_networks._activations import Activation, PiecewiseLinear, Step
from bayeskit.models.wide_networks._empirical_kernels import (
    as_targets,
    descent_rate,
    empirical_ntk,
    flat_outputs,
    largest_eigenvalue,
    relative_change,
)
from bayeskit.models.wide_networks._finite import finite_network, last_layers
from bayeskit.models.wide_networks._kernels import InfiniteWidth, Variance, infinite_width, weighted_layers
from bayeskit.models.wide_networks._layers import (
    Convolution,
    Dense,
    Dropout,
    LayerNormalization,
    Nonlinearity,
    check_inputs,
)
from bayeskit.models.wide_networks._reader import INPUT
from bayeskit.models.wide_networks.gaussian_processes._wide_kernels import refuse_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Kernels of many random networks of the same width at once.

CHUNK = 1 << 22  # number of gradient entries of a chunk of networks; a larger chunk does not fit in the cache

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class RandomNetworks:
    """Distribution of a finite network's weights, with its kernels."""

    template: nn.Module  # a network of the same architecture; its weights are ignored
    limit: InfiniteWidth  # of the kernels
    spread: Mapping[str, float]  # standard deviation of each random parameter, by name
    trained: tuple[str, ...]  # names of the parameters in the tangent kernel
    last: tuple[str, ...]  # names of the random parameters in which outputs are linear
    alike: bool  # whether all outputs have the same distribution; then a single output is used

    def draw(self, num_networks: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parameters of independent networks, ``{name: (num_networks, *shape)}``."""
        result = {}
        for name, parameter in self.template.named_parameters():
            value = parameter.detach()
            if name in self.spread:
                value = value.new_empty(num_networks, *value.shape).normal_(generator=generator)
                result[name] = value if self.spread[name] == 1 else value.mul_(self.spread[name])
            else:
                result[name] = value.expand(num_networks, *value.shape)
        return result

    def outputs(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return the outputs of each network, ``(networks, n, outputs)``."""
        return vmap(lambda p: functional_call(self.template, p, (x,)).flatten(1))(dict(parameters))

    def nngp(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return the covariance of an output given all but the last layer, ``(networks, n, n)``.

        Outputs are linear in the last layer, so its weights are integrated out instead of sampled.
        """
        return self._products(parameters, x, {name: self.spread[name] for name in self.last})

    def ntk(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return inner products of an output's gradients with respect to all parameters, ``(networks, n, n)``."""
        return self._products(parameters, x, dict.fromkeys(self.trained, 1.0))

    def full_ntk(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return inner products of all outputs' gradients, ordered by output, ``(networks, outputs n, outputs n)``."""
        rows = self._gradients(parameters, x, self.trained, self._num_outputs(x, all_outputs=True))
        first, *others = (values.flatten(1, 2) for values in rows)
        total = first @ first.mT
        for other in others:
            total += other @ other.mT
        return total

    def chunk(self, x: Tensor, all_outputs: bool = False) -> int:
        """Return the number of networks whose gradients are held at once."""
        numbers = sum(p.numel() for p in self.template.parameters())
        return max(CHUNK // (numbers * len(x) * self._num_outputs(x, all_outputs)), 1)

    def _num_outputs(self, x: Tensor, all_outputs: bool = False) -> int:
        """Return the number of outputs used: one if all have the same distribution, unless ``all_outputs``."""
        if self.alike and not all_outputs:
            return 1
        with torch.no_grad():
            return self.template(x[:1]).numel()

    def _products(self, parameters: Parameters, x: Tensor, scales: Mapping[str, float]) -> Tensor:
        found = self._gradients(parameters, x, tuple(scales), self._num_outputs(x))
        total: Tensor | None = None
        for rows, scale in zip(found, scales.values(), strict=True):
            rows = rows * scale
            product = (rows @ rows.mT).mean(1)
            total = product if total is None else total + product
        assert total is not None
        return total

    def _gradients(self, parameters: Parameters, x: Tensor, names: Sequence[str], num_outputs: int) -> Iterator[Tensor]:
        """Yield the gradients with respect to each parameter in turn, ``(networks, outputs, n, numbers)``."""
        chosen = {name: parameters[name] for name in names}
        others = {name: value for name, value in parameters.items() if name not in names}

        def output(chosen: Parameters, others: Parameters, one: Tensor, index: Tensor) -> Tensor:
            return functional_call(self.template, {**chosen, **others}, (one[None],)).flatten().gather(0, index)[0]

        gradient = vmap(vmap(grad(output), (None, None, None, 0)), (None, None, 0, None))
        index = torch.arange(num_outputs, device=x.device)[:, None]
        found = vmap(gradient, (0, 0, None, None))(chosen, others, x, index)
        for name in names:
            yield found[name].flatten(3).permute(0, 2, 1, 3)


def random_networks(kernel: InfiniteWidth, width: int | None, dtype: torch.dtype) -> RandomNetworks:
    """Return the distribution of ``kernel.network(width)``; it must have no dropout and end in layers with weights."""
    last = _last_layers(kernel)
    standard = kernel.parameterization == "standard"
    template = kernel.network(width).to(dtype)
    # The same network with torch's layers, to read the limit at these widths.
    plain = finite_network(kernel.module, kernel.graph, kernel.variances, True, width, 0)
    variances = kernel.variances
    limit = infinite_width(plain, kernel.parameterization, dict(variances.weight), dict(variances.bias))
    spread = {}
    for layer in weighted_layers(kernel.graph):
        for name, parameter in template.get_submodule(layer).named_parameters():
            variance = float((variances.weight if name == "weight" else variances.bias)[layer])
            scale = parameter[0].numel() if name == "weight" else 1
            spread[f"{layer}.{name}"] = math.sqrt(variance / scale) if standard else 1.0
    return RandomNetworks(
        template=template,
        limit=limit,
        spread=spread,
        trained=tuple(name for name, parameter in template.named_parameters() if parameter.requires_grad),
        last=tuple(name for name in spread if name.rpartition(".")[0] in last),
        alike=isinstance(kernel.graph.nodes[-1].layer, Dense),
    )


def _last_layers(kernel: InfiniteWidth) -> frozenset[str]:
    """Return the names of the layers in whose weights outputs are linear."""
    for node in reversed(kernel.graph.nodes):
        if isinstance(node.layer, Dropout):
            raise ModelError(f"layer {node.name!r} draws random noise; put the module into evaluation mode")
    last, behind = last_layers(kernel.graph)
    for node in behind:
        if isinstance(node.layer, Nonlinearity | LayerNormalization) or INPUT in node.inputs:
            raise ModelError(
                f"no layer with weights follows layer {node.name!r}; end the network with a dense layer, so that "
                "outputs are normal given the preceding layers"
            )
    return last


# Moments of the entries of kernels over random networks of the same width.

_NUM_BLOCKS = 8  # tasks per width, each with its own random numbers: enough for a few processes
_KERNELS = ("nngp", "ntk")


@dataclass(frozen=True)
class DeviationMoments:
    """Moments of the deviation of random networks' kernels from the limit.

    Attributes
    ----------
    width : int or None
        None for the module's own widths.
    num_networks : int
        Number of networks in the averages.
    limit : Tensor
        Kernel of infinite width, ``(n, n)``.
    bias : Tensor
        Mean deviation of the entries on and above the diagonal, row by row, ``(n (n + 1) / 2,)``.
    covariance : Tensor
        Covariance of one network's entries, ``(n (n + 1) / 2, n (n + 1) / 2)``. Divided by ``num_networks``, it is the
        covariance of ``bias``.
    distance : tuple of float
        Mean squared Frobenius norm of the deviation over networks, and its standard error.
    """

    width: int | None
    num_networks: int
    limit: Tensor
    bias: Tensor
    covariance: Tensor
    distance: tuple[float, float]

    __repr__ = short_repr

    @property
    def is_diagonal(self) -> Tensor:
        """Mask of the diagonal entries, ``(n (n + 1) / 2,)``."""
        rows, columns = _pairs_of(len(self.limit))
        return rows == columns

    def matrix(self, entries: Tensor) -> Tensor:
        """Return entries as a symmetric matrix, ``(n, n)``."""
        rows, columns = _pairs_of(len(self.limit))
        result = entries.new_empty(self.limit.shape)
        result[rows, columns] = entries
        result[columns, rows] = entries
        return result


def _pairs_of(n: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the entries on and above the diagonal."""
    rows, columns = torch.triu_indices(n, n)
    return rows, columns


def _kernel_moments(
    kernel: InfiniteWidth,
    x: Tensor,
    widths: Sequence[int | None],
    num_networks: int,
    which: str,
    seed: int,
    num_jobs: int,
    progress: bool,
) -> list[DeviationMoments]:
    """Return the moments of the deviations of random networks' kernels from the limit, one for each width."""
    refuse_module(kernel)
    if which not in _KERNELS:
        raise SettingsError(f'which must be "nngp" or "ntk", not {which!r}')
    if isinstance(seed, torch.Generator):
        raise SettingsError("seed must be a whole number, because each block of networks has its own random stream")
    x = check_inputs(x, "x", kernel.graph.num_axes).detach()
    blocks = min(_NUM_BLOCKS, num_networks)
    sizes = [num_networks // blocks + (i < num_networks % blocks) for i in range(blocks)]
    networks = [random_networks(kernel, width, x.dtype) for width in widths]
    limits = [_limit(law, x, which) for law in networks]
    tasks = [
        _Task(law, limit, size, f"networks of width {width}, block {i}")
        for law, limit, width in zip(networks, limits, widths, strict=True)
        for i, size in enumerate(sizes)
    ]
    sums = map_tasks(
        partial(_block, x, which, seed), tasks, num_jobs=num_jobs, progress=progress, description="networks"
    )
    return [
        _moments(width, limit, num_networks, torch.stack(sums[i * blocks : (i + 1) * blocks]).sum(0))
        for i, (width, limit) in enumerate(zip(widths, limits, strict=True))
    ]


class _Task(NamedTuple):
    """A block of networks of one width, with its own random stream."""

    networks: RandomNetworks
    limit: Tensor
    size: int
    stream: str


def _limit(networks: RandomNetworks, x: Tensor, which: str) -> Tensor:
    """Return the infinite-width kernel ``(n, n)`` in float64, so that its rounding errors are not taken for a bias."""
    result: Tensor = (networks.limit.nngp if which == "nngp" else networks.limit.ntk)(x.double())
    if not bool((result.diagonal() > 0).all()):
        row = int((result.diagonal() <= 0).nonzero()[0])
        raise DataError(
            f"the kernel of row {row} of x with itself is zero, so its relative bias is undefined; remove this row"
        )
    return result


def _block(x: Tensor, which: str, seed: int, task: _Task) -> Tensor:
    """Return sums over a block of networks in one vector: entries, their products, squared distances and squares."""
    networks = task.networks
    generator = new_generator(seed, x.device, stream=task.stream)
    rows, columns = _pairs_of(len(x))
    total: Tensor | None = None
    for first in range(0, task.size, chunk := networks.chunk(x)):
        parameters = networks.draw(min(chunk, task.size - first), generator)
        found = (networks.nngp if which == "nngp" else networks.ntk)(parameters, x)
        # Networks have the precision of x, whose rounding errors are below the Monte Carlo error; sums are in float64.
        away = found.double() - task.limit
        entries, distance = away[:, rows, columns], away.square().sum((1, 2))
        sums = [entries.sum(0), (entries.mT @ entries).flatten(), distance.sum()[None], distance.square().sum()[None]]
        total = torch.cat(sums) if total is None else total + torch.cat(sums)
    assert total is not None
    return total


def _moments(width: int | None, limit: Tensor, num_networks: int, total: Tensor) -> DeviationMoments:
    size = len(limit) * (len(limit) + 1) // 2
    total = total / num_networks
    bias, products, distance = total[:size], total[size:-2].reshape(size, size), total[-2:]
    unbiased = num_networks / (num_networks - 1)
    error = ((distance[1] - distance[0].square()).clamp_min(0) * unbiased / num_networks).sqrt()
    covariance = (products - bias[:, None] * bias) * unbiased
    return DeviationMoments(width, num_networks, limit, bias, covariance, (float(distance[0]), float(error)))


# Mean deviation of the kernels of finite networks from their limit.

_DEGENERATE = 1e-10  # share of the largest variance below which the variance of a direction counts as zero
_ONE_OVER_WIDTH: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 1.0, "zorder": 0, "label": "1/width"}


@dataclass(frozen=True)
class FiniteWidthBias:
    """Mean deviation of random networks' kernels from their limit; made by :func:`finite_width_bias`.

    Attributes
    ----------
    which : str
        ``"nngp"`` or ``"ntk"``.
    moments : tuple of DeviationMoments
        One per width.
    """

    which: str
    moments: tuple[DeviationMoments, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths, ascending."""
        return tuple(int(m.width or 0) for m in self.moments)

    @property
    def limit(self) -> Tensor:
        """Kernel of infinite width, ``(W, n, n)``; it depends on the width in the standard parametrisation only."""
        return torch.stack([m.limit for m in self.moments])

    @property
    def bias(self) -> Tensor:
        """Mean of the finite kernels minus the limit, ``(W, n, n)``."""
        return torch.stack([m.matrix(m.bias) for m in self.moments])

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of the bias, ``(W, n, n)``."""
        return torch.stack([m.matrix((m.covariance.diagonal() / m.num_networks).sqrt()) for m in self.moments])

    @property
    def diagonal_p_value(self) -> float:
        """P-value of a chi-squared test that the bias on the diagonal is zero."""
        return self._p_value(self.moments[0].is_diagonal)

    @property
    def off_diagonal_p_value(self) -> float:
        """P-value of a chi-squared test that the bias off the diagonal is zero."""
        return self._p_value(~self.moments[0].is_diagonal)

    def to_pandas(self) -> pd.DataFrame:
        """Return limit, bias and standard error, also relative to the limit, one row per width and pair of inputs."""
        rows, columns = (x.tolist() for x in _pairs_of(len(self.moments[0].limit)))
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
        """Plot the absolute relative bias of off-diagonal pairs against the width, with 95 % bars and a 1/width line.

        Parameters
        ----------
        ax : Axes, optional
            By default new axes.
        """
        ax = axes_or_new(ax, 5.4, 4.2)
        table = self.to_pandas()
        off = table[table["first"] != table["second"]]
        for i, ((first, second), rows) in enumerate(off.groupby(["first", "second"])):
            ax.errorbar(
                rows["width"] * (1 + 0.02 * i),  # offset, to keep bars from overlapping
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
        ax.plot(width, start * width[0] / width, **_ONE_OVER_WIDTH)
        ax.legend(frameon=False, fontsize="small")
        return _axes_of_widths(ax, f"absolute relative bias of the {self.which.upper()}")

    def __repr__(self) -> str:
        number = self.moments[0].num_networks
        lines = [f"bias of the {self.which.upper()}, widths {', '.join(map(str, self.widths))}, {number} networks each"]
        if len(self.moments[0].limit) > 1:
            lines.append(f"  test of zero bias off the diagonal: p = {self.off_diagonal_p_value:.2g}")
        lines.append(f"  test of zero bias on the diagonal: p = {self.diagonal_p_value:.2g}")
        return "\n".join(lines)

    def _p_value(self, chosen: Tensor) -> float:
        values, errors = (torch.stack(x) for x in zip(*[_relative(m, chosen) for m in self.moments], strict=True))
        precision, num_directions = _precisions(errors)
        statistic = float(torch.einsum("wp,wpq,wq->", values, precision, values))
        return float(chi2.sf(statistic, sum(num_directions)))


def _precisions(covariance: Tensor) -> tuple[Tensor, list[int]]:
    """Return pseudo-inverses of covariances, without directions of variance zero, and their ranks."""
    variance, direction = torch.linalg.eigh(covariance)
    kept = variance > _DEGENERATE * variance[..., -1:]
    inverse = torch.where(kept, variance, 1).reciprocal() * kept
    return direction * inverse[..., None, :] @ direction.mT, kept.sum(-1).tolist()


def _axes_of_widths(ax: Axes, label: str) -> Axes:
    """Make both axes logarithmic, the horizontal one that of widths."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="width", ylabel=label)
    ax.grid(alpha=0.25)
    return ax


def _relative(moments: DeviationMoments, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return biases relative to the root of the product of both diagonal entries (positive), and their covariance."""
    rows, columns = _pairs_of(len(moments.limit))
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
    r"""Estimate the bias of finite networks' kernels relative to the infinite-width limit, by Monte Carlo.

    Networks have the distribution of ``kernel.network(width)``. The NNGP kernel of each network is the covariance of
    outputs given all layers but the last, whose weights are integrated out.

    Parameters
    ----------
    kernel : InfiniteWidth
        The limit, made by :func:`~bayeskit.models.wide_networks.infinite_width`.
    x : Tensor
        Inputs, ``(n, ...)``, with small n. Networks have its dtype: float32 takes half the time, and its rounding
        errors are negligible relative to the Monte Carlo error. Sums over networks are in float64.
    widths : sequence of int
        Widths of all layers but the last.
    num_networks : int, default 10_000
        Number of networks per width.
    which : {"nngp", "ntk"}, default "nngp"
    seed : int, default 0
    num_jobs : int, default 1
        Number of processes; results do not depend on it.
    progress : bool, default True
        Whether to show a progress bar after two seconds.

    Returns
    -------
    FiniteWidthBias

    Raises
    ------
    SettingsError
        If a width or number is below 1, or ``which`` is unknown.
    ShapeError, DataError
        If inputs do not fit the network.
    ModelError
        If the network does not end in a layer with weights, or is random given its weights.

    Notes
    -----
    With one hidden layer both kernels are averages over independent units, so the bias is zero at any width. With more
    layers, a layer maps the random covariance :math:`\hat K` of the layer below by a nonlinear function,
    :math:`E\,g(\hat K) = g(K) + \tfrac12 g''(K) \operatorname{var} \hat K + \dots`, and this variance is of order one
    over the width.

    For ReLU, leaky ReLU and the absolute value the bias on the diagonal is zero at any depth. On the diagonal these
    functions scale the second moment by a constant, so :math:`g` is linear. In the tangent kernel the squared slope of
    a unit depends only on the sign of its argument. This sign is independent of all other factors on the diagonal:
    flipping the sign of the unit's incoming weights does not change the squared norm of the gradient.

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
    >>> result.diagonal_p_value > 0.01, result.off_diagonal_p_value < 1e-6
    (True, True)
    """
    found = sorted({whole_number("widths", width, least=1) for width in widths})
    if not found:
        raise SettingsError("widths must have at least one entry")
    num_networks = whole_number("num_networks", num_networks, least=2)
    return FiniteWidthBias(
        which, tuple(_kernel_moments(kernel, x, found, num_networks, which, seed, num_jobs, progress))
    )


# Drift of the tangent kernel of a finite network during training.


@dataclass(frozen=True)
class NTKDrift:
    """Change of a tangent kernel in training; made by :func:`ntk_drift` and :func:`ntk_drift_of_snapshots`.

    Attributes
    ----------
    steps : tuple of int
        Training steps, or indices of the snapshots.
    relative_change : Tensor
        Frobenius norm of the change from the first kernel, relative to the norm of the first kernel, ``(T,)``. The
        kernel includes all pairs of inputs and outputs.
    loss : Tensor or None
        Half the sum of squared residuals, ``(T,)``; None for snapshots.
    """

    steps: tuple[int, ...]
    relative_change: Tensor
    loss: Tensor | None = None

    def to_pandas(self) -> pd.DataFrame:
        """Return the relative change and loss, one row per step."""
        table = {"step": list(self.steps), "relative_change": self.relative_change.tolist()}
        return pd.DataFrame(table if self.loss is None else table | {"loss": self.loss.tolist()})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the relative change against the step.

        Parameters
        ----------
        ax : Axes, optional
            By default new axes.
        """
        ax = axes_or_new(ax, 5.0, 3.6)
        ax.plot(self.steps, self.relative_change.tolist(), color=BLUE, marker="o", markersize=3)
        ax.set_xlabel("snapshot" if self.loss is None else "step")
        ax.set_ylabel("relative change of the NTK")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        return ax

    def __repr__(self) -> str:
        when = f"over {len(self.steps)} snapshots" if self.loss is None else f"in {self.steps[-1]} steps"
        fall = "" if self.loss is None else f"; loss from {float(self.loss[0]):.3g} to {float(self.loss[-1]):.3g}"
        return f"relative change of the NTK {float(self.relative_change[-1]):.3g} {when}{fall}"


@dataclass(frozen=True)
class DriftAgainstWidth:
    """Changes of random networks' tangent kernels in training; made by :func:`ntk_drift_against_width`.

    Attributes
    ----------
    widths : tuple of int or None
        None for the module's own widths.
    relative_change : Tensor
        Relative change of each network's kernel as in :class:`NTKDrift`, ``(W, num_networks)``.
    loss : Tensor
        Half the sum of squared residuals before and after training, ``(W, num_networks, 2)``.
    """

    widths: tuple[int | None, ...]
    relative_change: Tensor
    loss: Tensor

    @property
    def typical(self) -> Tensor:
        """Geometric mean of the relative change over networks, ``(W,)``."""
        return self.relative_change.log().mean(1).exp()

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of the typical change, ``(W,)``."""
        logarithms = self.relative_change.log()
        return self.typical * logarithms.std(1) / logarithms.shape[1] ** 0.5

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per width."""
        loss = self.loss.mean(1)
        return pd.DataFrame(
            {
                "width": list(self.widths),
                "relative_change": self.typical.tolist(),
                "standard_error": self.standard_error.tolist(),
                "first_loss": loss[:, 0].tolist(),
                "last_loss": loss[:, 1].tolist(),
            }
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the typical change against the width, with 95 % bars and a 1/width line.

        Parameters
        ----------
        ax : Axes, optional
            By default new axes.
        """
        ax = axes_or_new(ax, 5.0, 3.6)
        table = self.to_pandas().dropna()
        ax.errorbar(
            table["width"], table["relative_change"], 1.96 * table["standard_error"], color=BLUE, marker="o", capsize=2
        )
        if len(table):
            line = table["relative_change"].iloc[0] * table["width"].iloc[0] / table["width"]
            ax.plot(table["width"], line, **_ONE_OVER_WIDTH)
            ax.legend(frameon=False)
        return _axes_of_widths(ax, "relative change of the NTK")

    def __repr__(self) -> str:
        lines = [f"relative change of the NTK, {self.relative_change.shape[1]} trained networks per width"]
        for width, value, error in zip(self.widths, self.typical.tolist(), self.standard_error.tolist(), strict=True):
            name = "the module's own width" if width is None else f"width {width}"
            lines.append(f"  {name}: {with_error(value, error)}")
        return "\n".join(lines)


def ntk_drift(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    learning_rate: float | None = None,
    num_steps: int = 100,
    num_records: int = 11,
) -> NTKDrift:
    r"""Train a copy of a module by gradient descent, and measure the change of its tangent kernel.

    Parameters
    ----------
    module : torch.nn.Module
        Training starts from its current weights, in evaluation mode; it is not changed.
    x : Tensor
        Training inputs, ``(n, ...)``; the kernel is evaluated at the same inputs.
    y : Tensor
        Targets, ``(n, outputs)``, or ``(n,)`` for one output.
    learning_rate : float, optional
        Learning rate for half the *sum* of squared residuals. The default is ``0.5 / L`` with the largest eigenvalue
        ``L`` of the initial kernel; descent is stable below ``2 / L``.
    num_steps : int, default 100
    num_records : int, default 11
        Number of evaluations of the kernel, first and last step included.

    Returns
    -------
    NTKDrift

    Raises
    ------
    ShapeError, DataError
        If inputs do not fit the module, targets do not fit outputs, or values are not finite.
    ModelError
        If no parameter requires gradients, or the output at one input depends on other inputs or is random.
    LossError
        If training diverges.

    References
    ----------
    Lee, J., Xiao, L., Schoenholz, S. S., Bahri, Y., Novak, R., Sohl-Dickstein, J., Pennington, J. (2019). Wide neural
    networks of any depth evolve as linear models under gradient descent. Advances in Neural Information Processing
    Systems 32.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> x = torch.linspace(-1.0, 1.0, 5)[:, None]
    >>> bool(ntk_drift(kernel.network(1024), x, x.square()).relative_change[-1] < 0.1)
    True
    """
    num_steps, num_records = whole_number("num_steps", num_steps, 1), whole_number("num_records", num_records, 2)
    model = copy.deepcopy(module).eval()
    first = empirical_ntk(model, x)
    y = as_targets(y, flat_outputs(model, x).detach())
    rate = descent_rate(learning_rate, lambda: largest_eigenvalue(first))
    trained = [p for p in model.parameters() if p.requires_grad]
    recorded = sorted({round(i * num_steps / (num_records - 1)) for i in range(num_records)})
    changes, losses = [], []
    with torch.enable_grad(), one_thread():
        for step in range(num_steps + 1):
            loss = 0.5 * (flat_outputs(model, x) - y).square().sum()
            if not bool(torch.isfinite(loss)):
                raise LossError(f"the loss of step {step} is not finite; lower learning_rate (now {rate:.3g})")
            if step in recorded:
                changes.append(relative_change(empirical_ntk(model, x), first))
                losses.append(loss.detach())
            if step < num_steps:
                # Parameters without effect on the outputs have gradient zero.
                gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        parameter.sub_(rate * gradient)
    return NTKDrift(tuple(recorded), torch.stack(changes), torch.stack(losses))


def ntk_drift_of_snapshots(module: nn.Module, x: Tensor, snapshots: Sequence[Mapping[str, Tensor]]) -> NTKDrift:
    """Measure the change of a network's tangent kernel over snapshots of any training algorithm.

    Parameters
    ----------
    module : torch.nn.Module
        Evaluated in evaluation mode; it is not changed.
    x : Tensor
        Inputs at which the kernel is evaluated, ``(n, ...)``.
    snapshots : sequence of state dicts
        Changes are relative to the first.

    Returns
    -------
    NTKDrift

    Raises
    ------
    SettingsError
        If there are no snapshots.
    ModelError
        If a snapshot does not fit the module.

    Examples
    --------
    >>> import copy, torch
    >>> from torch import nn
    >>> module = nn.Linear(2, 1)
    >>> snapshots = [copy.deepcopy(module.state_dict()), {name: 2 * w for name, w in module.state_dict().items()}]
    >>> ntk_drift_of_snapshots(module, torch.eye(2), snapshots).relative_change.tolist()  # linear: no drift
    [0.0, 0.0]
    """
    if not snapshots:
        raise SettingsError("snapshots must have at least one entry")
    model = copy.deepcopy(module).eval()
    kernels = []
    for i, snapshot in enumerate(snapshots):
        try:
            model.load_state_dict(dict(snapshot))
        except RuntimeError as error:
            raise ModelError(f"snapshot {i} does not fit {type(module).__name__}: {error}") from error
        kernels.append(empirical_ntk(model, x))
    changes = torch.stack([relative_change(kernel, kernels[0]) for kernel in kernels])
    return NTKDrift(tuple(range(len(kernels))), changes)


def ntk_drift_against_width(
    kernel: InfiniteWidth,
    x: Tensor,
    y: Tensor,
    widths: Sequence[int | None] = (16, 32, 64, 128),
    num_networks: int = 64,
    *,
    learning_rate: float | None = None,
    num_steps: int = 100,
    seed: int = 0,
) -> DriftAgainstWidth:
    r"""Train random networks of several widths, and measure the change of their tangent kernels.

    With smooth activations the change is of order one over the width. Each weight moves by order one over the square
    root of the width. First-order changes of the units have random signs, so their sum has the order of the
    second-order changes. With a kink, as in ReLU, the change falls with a power between one half and three quarters:
    a fraction of order one over the square root of the width of the units crosses the kink, and their changes do not
    cancel.

    Parameters
    ----------
    kernel : InfiniteWidth
        Networks have the distribution of ``kernel.network(width)``.
    x : Tensor
        Inputs, ``(n, ...)``. Networks have its dtype.
    y : Tensor
        Targets, ``(n, outputs)``, or ``(n,)`` for one output.
    widths : sequence of int or None
        Widths of all layers but the last; None for the module's own widths.
    num_networks : int, default 64
        Number of networks per width; all are trained at once.
    learning_rate : float, optional
        Learning rate for half the sum of squared residuals. The default is half of one over the largest eigenvalue of
        the infinite-width tangent kernel, so all widths train for the same time.
    num_steps : int, default 100
    seed : int, default 0

    Returns
    -------
    DriftAgainstWidth

    Raises
    ------
    SettingsError, ShapeError, DataError
        If settings, inputs or targets do not fit.
    ModelError
        If the kernel is a torch module, or its networks do not end in layers with weights or are random given weights.
    LossError
        If the training of a network diverges.

    References
    ----------
    Dyer, E., Gur-Ari, G. (2020). Asymptotics of wide networks from Feynman diagrams. International Conference on
    Learning Representations.

    Huang, J., Yau, H.-T. (2020). Dynamics of deep neural networks and neural tangent hierarchy. International
    Conference on Machine Learning.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> x = torch.linspace(-1.0, 1.0, 5)[:, None]
    >>> narrow, wide = ntk_drift_against_width(kernel, x, x.square(), widths=(16, 256)).typical
    >>> bool(4 * wide < narrow)
    True
    """
    num_networks = whole_number("num_networks", num_networks, least=2)
    num_steps = whole_number("num_steps", num_steps, least=1)
    given = {None if width is None else whole_number("widths", width, least=1) for width in widths}
    if not given:
        raise SettingsError("widths must have at least one entry")
    refuse_module(kernel)
    x = check_inputs(x, "x", kernel.graph.num_axes).detach()
    changes, losses = [], []
    found = sorted(given, key=lambda width: width or 0)
    for width in found:
        networks = random_networks(kernel, width, x.dtype)
        rate = descent_rate(learning_rate, lambda limit=networks.limit: largest_eigenvalue(limit.ntk(x.double())))  # type: ignore[misc]
        generator = new_generator(seed, x.device, stream=f"trained networks of width {width}")
        with one_thread():
            change, loss = _trained(networks, x, y, num_networks, rate, num_steps, generator)
        if not bool(torch.isfinite(loss).all() and torch.isfinite(change).all()):
            raise LossError(
                f"training diverges for a network of width {width}; lower learning_rate (now {rate:.3g}), or leave out "
                "small widths"
            )
        changes.append(change)
        losses.append(loss)
    return DriftAgainstWidth(tuple(found), torch.stack(changes), torch.stack(losses))


def _trained(
    networks: RandomNetworks,
    x: Tensor,
    y: Tensor,
    num_networks: int,
    rate: float,
    num_steps: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return relative changes, ``(num_networks,)``, and losses before and after, ``(num_networks, 2)``."""
    changes, losses = [], []
    for first in range(0, num_networks, chunk := networks.chunk(x, all_outputs=True)):
        parameters = networks.draw(min(chunk, num_networks - first), generator)
        fixed = {name: value for name, value in parameters.items() if name not in networks.trained}
        moving = {name: parameters[name] for name in networks.trained}
        targets = as_targets(y, networks.outputs(parameters, x)[0])

        def loss(moving: Parameters, fixed: Parameters, targets: Tensor) -> Tensor:
            return 0.5 * (networks.outputs({**moving, **fixed}, x) - targets).square().sum((1, 2))

        def total(moving: Parameters, fixed: Parameters, targets: Tensor) -> Tensor:
            return loss(moving, fixed, targets).sum()  # networks are independent

        before = networks.full_ntk(parameters, x).double(), loss(moving, fixed, targets)
        for _ in range(num_steps):
            gradients = grad(total)(moving, fixed, targets)
            moving = {name: value - rate * gradients[name] for name, value in moving.items()}
        after = networks.full_ntk({**moving, **fixed}, x).double(), loss(moving, fixed, targets)
        changes.append((after[0] - before[0]).norm(dim=(1, 2)) / before[0].norm(dim=(1, 2)))
        losses.append(torch.stack([before[1], after[1]], 1).double())
    return torch.cat(changes), torch.cat(losses)


# Test whether a finite network is wide enough for the infinite-width kernels.

_LEVEL = 0.975
_Weighted = Dense | Convolution


class Interval(NamedTuple):
    """An estimate with its 95 % confidence interval.

    Attributes
    ----------
    value, lower, upper : float
        Non-negative.
    """

    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.lower:.3g} to {self.upper:.3g})"


@dataclass(frozen=True)
class KernelRegime:
    """Deviation of networks of one width from the infinite-width limit; made by :func:`kernel_regime`.

    Attributes
    ----------
    width : int or None
        None for the module's own widths.
    num_networks : int
        Number of random networks for bias and fluctuation.
    tolerance : float
        Threshold for bias, fluctuation and drift.
    bias : Interval
        Frobenius norm of the mean tangent kernel minus its limit, relative to the limit, off the diagonal. Its order is
        one over the width.
    fluctuation : Interval
        Root mean square Frobenius norm of the tangent kernel minus its mean, relative to the limit. Its order is one
        over the square root of the width.
    drift : Interval or None
        Typical relative change of a network's tangent kernel in training; None without targets. Its order is one over
        the width, or about one over the square root of the width if activations have kinks.
    has_kinks : bool
        Whether an activation has a kink.
    widths : tuple of int
        Widths of the layers before the last, in order, if ``width`` is None.
    law : str
        Distribution of the random weights, in words.
    he_variance : float or None
        Weight variance at which ReLU-like activations preserve second moments; None if no layer has a smaller variance.
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
        """Bias, fluctuation and, if measured, drift, by name."""
        found = {"bias": self.bias, "fluctuation": self.fluctuation}
        return found if self.drift is None else found | {"drift": self.drift}

    @property
    def trusted(self) -> bool:
        """Whether the upper confidence limits of all numbers are at most the tolerance."""
        return all(number.upper <= self.tolerance for number in self.numbers.values())

    @property
    def rejected(self) -> bool:
        """Whether the lower confidence limit of a number exceeds the tolerance."""
        return any(number.lower > self.tolerance for number in self.numbers.values())

    @property
    def factor(self) -> float:
        """Factor by which to increase the width so that all numbers reach the tolerance; at least one."""
        powers = {"bias": 1.0, "fluctuation": 2.0, "drift": 2.0 if self.has_kinks else 1.0}
        return max(1.0, *((number.value / self.tolerance) ** powers[name] for name, number in self.numbers.items()))

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: whether this width is in the kernel regime, with reason and remedy."""
        width = "random networks of " + (f"width {self.width}" if self.width is not None else self._own_widths)
        if self.trusted:
            text = f"{width} are in the kernel regime: {', '.join(self.numbers)} are all below {self.tolerance:g}"
            return text if self.drift is not None else f"{text} (at initialisation; give y to measure the drift)"
        large = [f"{name} {number}" for name, number in self.numbers.items() if number.lower > self.tolerance]
        if large:
            return (
                f"{width} are not in the kernel regime: {', '.join(large)} above {self.tolerance:g}; about "
                f"{_rounded(self.factor)} times the width is needed{self._remedy}"
            )
        open_ones = [f"{name} {number}" for name, number in self.numbers.items() if number.upper > self.tolerance]
        return (
            f"{width} are undecided: the 95 % interval contains {self.tolerance:g} for {', '.join(open_ones)}; use "
            "more networks"
        )

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
            f". The drift is also smaller with weight_variance={self.he_variance:g} (He), because the kernel then does "
            "not shrink from layer to layer"
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return estimates and confidence limits, one row per number."""
        rows = [{"number": name, **number._asdict()} for name, number in self.numbers.items()]
        return pd.DataFrame(rows).set_index("number")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the numbers with their 95 % intervals and the tolerance; filled markers are below it.

        Parameters
        ----------
        ax : Axes, optional
            By default new axes.
        """
        ax = axes_or_new(ax, 5.6, 2.2)
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
    """Test whether random networks of a given width are described by the infinite-width tangent kernel.

    The test measures three relative numbers: the bias of the mean kernel, the fluctuation of kernels about their mean,
    and the drift of kernels in training. Networks have the layers of the module and random weights; the module's own
    weights are ignored.

    Parameters
    ----------
    kernel : InfiniteWidth or torch.nn.Module
        Networks have the distribution of ``kernel.network(width)``. A module is converted by
        :func:`~bayeskit.models.wide_networks.infinite_width`.
    x : Tensor
        At least two inputs, ``(n, ...)``. Networks have its dtype.
    y : Tensor, optional
        Targets, ``(n, outputs)`` or ``(n,)``; without targets the drift is not measured.
    width : int, optional
        Width of all layers but the last; by default the module's own widths.
    weight_variance, bias_variance : float, Tensor or mapping, optional
        As for :func:`~bayeskit.models.wide_networks.infinite_width`; by default the kernel's own, or 1 and 0 for a
        module. Weight variance 2 (He) preserves second moments in networks with ReLU.
    tolerance : float, default 0.1
        Threshold for the relative numbers.
    num_networks : int, default 500
        Number of random networks for bias and fluctuation.
    num_trained : int, default 32
        Number of networks trained for the drift.
    learning_rate, num_steps
        As for :func:`ntk_drift_against_width`.
    seed : int, default 0
    num_jobs : int, default 1
        Number of processes; results do not depend on it.
    progress : bool, default True
        Whether to show a progress bar after two seconds.

    Returns
    -------
    KernelRegime

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
        raise ShapeError("x must have at least two inputs, (n, ...), because the bias is measured for pairs")
    width = None if width is None else whole_number("width", width, least=1)
    tolerance = real_number("tolerance", tolerance, "(0, inf)")
    num_networks = whole_number("num_networks", num_networks, least=2)
    (moments,) = _kernel_moments(kernel, x, [width], num_networks, "ntk", seed, num_jobs, progress)
    bias, fluctuation = _bias(moments), _fluctuation(moments)
    drift = None
    if y is not None:
        trained = ntk_drift_against_width(
            kernel, x, y, [width], num_trained, learning_rate=learning_rate, num_steps=num_steps, seed=seed
        )
        drift = _drift(trained)
    kinks = (isinstance(f, Step) or (isinstance(f, PiecewiseLinear) and f.left != f.right) for f in _functions(kernel))
    return KernelRegime(
        width=width,
        num_networks=num_networks,
        tolerance=tolerance,
        bias=bias,
        fluctuation=fluctuation,
        drift=drift,
        has_kinks=any(kinks),
        widths=_widths(kernel),
        law=_law(kernel),
        he_variance=_he_variance(kernel),
    )


def _functions(kernel: InfiniteWidth) -> list[Activation]:
    """Return the activations of a network."""
    return [node.layer.activation for node in kernel.graph.nodes if isinstance(node.layer, Nonlinearity)]


def _widths(kernel: InfiniteWidth) -> tuple[int, ...]:
    """Return the numbers of channels of layers with weights before the last."""
    layers = [node.layer for node in kernel.graph.nodes]
    channels = [x.channels if isinstance(x, Dense) else x.dense.channels for x in layers if isinstance(x, _Weighted)]
    return tuple(channels[:-1])


def _law(kernel: InfiniteWidth) -> str:
    """Describe the distribution of the random weights in words."""
    weight, bias = (_numbers(x) for x in (kernel.variances.weight, kernel.variances.bias))
    which = "NTK" if kernel.parameterization == "ntk" else kernel.parameterization
    return f"weight variance {weight} over the number of inputs, bias variance {bias}, {which} parametrisation"


def _numbers(variances: Mapping[str, float | Tensor]) -> str:
    found = [f"{float(x):.3g}" for x in variances.values()]
    return found[0] if len(set(found)) == 1 else f"({', '.join(found)})"


def _he_variance(kernel: InfiniteWidth) -> float | None:
    """Return the weight variance that preserves second moments with ReLU-like activations; None if none is smaller."""
    slopes = {(f.left, f.right) for f in _functions(kernel) if isinstance(f, PiecewiseLinear) and f.left != f.right}
    if len(slopes) != 1:
        return None
    left, right = slopes.pop()
    wanted = 2 / (left**2 + right**2)
    return wanted if min(float(x) for x in kernel.variances.weight.values()) < 0.99 * wanted else None


def _rounded(factor: float) -> str:
    """Return a number to one digit, or to two if it is below ten."""
    return f"{factor:.2g}" if factor < 9.95 else f"{float(f'{factor:.0e}'):.0f}"


def _bias(moments: DeviationMoments) -> Interval:
    """Return the bias off the diagonal as a relative Frobenius norm, with its interval."""
    chosen = ~moments.is_diagonal
    value = moments.bias[chosen]
    error = moments.covariance[chosen][:, chosen] / moments.num_networks
    rows, columns = _pairs_of(len(moments.limit))
    size = float(moments.limit[rows, columns][chosen].square().sum())
    if size == 0:
        raise DataError("the tangent kernel is zero for all pairs of inputs, so the relative bias is undefined")
    # The squared estimate overestimates the squared bias by its variance; subtract it.
    square = float(value @ value - error.trace())
    twice = 2 * float(error.square().sum())  # variance of the squared estimate if the bias is zero
    spread = math.sqrt(max(4 * float(value @ error @ value) - twice, twice))
    return _root(square / size, norm.ppf(_LEVEL) * spread / size)


def _fluctuation(moments: DeviationMoments) -> Interval:
    """Return the relative root mean square of the deviation from the mean."""
    error = moments.distance[1]
    weight = torch.where(moments.is_diagonal, 1.0, 2.0).to(moments.covariance)
    size = float(moments.limit.square().sum())
    spread = float(weight @ moments.covariance.diagonal())
    # Standard error of the squared distance from the limit, an approximation to that of the distance from the mean.
    return _root(spread / size, norm.ppf(_LEVEL) * error / size)


def _drift(trained: DriftAgainstWidth) -> Interval:
    logarithms = trained.relative_change[0].log()
    number = len(logarithms)
    half = float(t.ppf(_LEVEL, number - 1) * logarithms.std()) / math.sqrt(number)
    mean = float(logarithms.mean())
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _root(square: float, half: float) -> Interval:
    lower, value, upper = (math.sqrt(max(x, 0.0)) for x in (square - half, square, square + half))
    return Interval(value, lower, upper)
