"""NNGP and tangent kernels of an infinitely wide network, read from a torch module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import progress_bar, visible
from bayeskit.models.wide_networks import _covariance as tiles
from bayeskit.models.wide_networks._covariance import (
    Covariance,
    Profile,
    check_out,
    check_paths,
    new_matrix,
    tracked,
)
from bayeskit.models.wide_networks._finite import finite_network
from bayeskit.models.wide_networks._layers import (
    Convolution,
    Dense,
    Flatten,
    LayerNormalization,
    Variances,
    check_inputs,
)
from bayeskit.models.wide_networks._reader import INPUT, Graph, read, readable

# Kernels of a graph's output for pairs of inputs: profiles of single inputs first, then block by block.

_MARGIN = 1e-3  # safety factor below overflow of squares, because layers multiply products of variances by factors


class KernelBlock(NamedTuple):
    """One block of both kernel matrices.

    Attributes
    ----------
    rows, columns : slice
        Position in the matrix.
    mirrored : bool
        Whether the transpose is also a block of the matrix; it is not yielded separately.
    nngp : Tensor
        Block of the covariance of outputs.
    ntk : Tensor or None
        Block of the tangent kernel.
    """

    rows: slice
    columns: slice
    mirrored: bool
    nngp: Tensor
    ntk: Tensor | None


class _Singles(NamedTuple):
    """Single inputs, their profile, and the covariance of the output with itself at each input."""

    x: Tensor
    profile: Profile
    own: Covariance


@dataclass(frozen=True)
class _Evaluation:
    """Kernels of two sets of inputs, or of one set with itself."""

    graph: Graph
    variances: Variances
    first: _Singles
    second: _Singles
    symmetric: bool  # whether both sets are the same
    ntk: bool  # whether to compute the tangent kernel
    dtype: torch.dtype  # of results; computations use double precision if its range is too small

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the whole matrices at once; gradients flow through them."""
        profiles = self.first.profile, self.second.profile
        found = self.graph.cross(self.first.x, self.second.x, profiles, self.variances, self.ntk)
        nngp, ntk = found.nngp, found.ntk
        if self.symmetric:
            own = self.first.own
            nngp = nngp.diagonal_scatter(own.nngp)
            if ntk is not None and own.ntk is not None:
                ntk = ntk.diagonal_scatter(own.ntk)
        return nngp.to(self.dtype), None if ntk is None else ntk.to(self.dtype)

    def fill(self, out: Sequence[Tensor | None]) -> None:
        """Write the matrices into tensors block by block; a symmetric matrix is computed by halves and mirrored."""
        chosen = self._blocks()

        def store(block: tiles.Block) -> None:
            found = self._block(block)
            for matrix, values in zip(out, (found.nngp, found.ntk), strict=False):
                if matrix is None or values is None:
                    continue
                matrix[block.rows, block.columns] = values
                if block.mirrored:
                    matrix[block.columns, block.rows] = values.mT

        with progress_bar("kernel", len(chosen)) as bar:
            for i, _ in enumerate(tiles.each(store, chosen, self.first.x.device)):
                bar.update(i + 1)

    def blocks(self) -> Iterator[KernelBlock]:
        """Yield both matrices block by block; only blocks on and above the diagonal if they are symmetric."""
        yield from tiles.each(self._block, self._blocks(), self.first.x.device)

    def _blocks(self) -> list[tiles.Block]:
        num_rows, num_columns = len(self.first.x), len(self.second.x)
        sites = _pairs_of_sites(self.graph, self.first.x)
        length = tiles.side(sites, tiles.shared_size(num_rows * num_columns * sites, self.first.x.device))
        return list(tiles.matrix_blocks(num_rows, num_columns, self.symmetric, length))

    @torch.no_grad()
    def _block(self, block: tiles.Block) -> KernelBlock:
        rows, columns, mirrored = block
        first, second = self.first, self.second
        profiles = first.profile.rows(rows), second.profile.rows(columns)
        found = self.graph.cross(first.x[rows], second.x[columns], profiles, self.variances, self.ntk)
        if self.symmetric and not mirrored:
            for matrix, values in ((found.nngp, first.own.nngp), (found.ntk, first.own.ntk)):
                if matrix is not None and values is not None:
                    matrix.diagonal().copy_(values[rows])
                    # Both triangles of a diagonal block were computed; they may differ in the last digit.
                    matrix.copy_(matrix.triu() + matrix.triu(1).mT)
        ntk = None if found.ntk is None else found.ntk.to(self.dtype)
        return KernelBlock(rows, columns, mirrored, found.nngp.to(self.dtype), ntk)


def _singles(graph: Graph, variances: Variances, x: Tensor, ntk: bool) -> _Singles:
    """Return the profile of single inputs, in double precision if the range of their dtype is too small."""
    if not len(x):
        raise ShapeError("there must be at least one input")
    try:
        return _checked(graph, variances, x, ntk, x.dtype)
    except DataError:
        if x.dtype == torch.float64:
            raise
    return _checked(graph, variances, x.double(), ntk, x.dtype)


def _checked(graph: Graph, variances: Variances, x: Tensor, ntk: bool, dtype: torch.dtype) -> _Singles:
    """Return the profile of single inputs; moments outside the dtype's range raise a ``DataError``."""
    x = _centred(graph, x)
    result = _Singles(x, *_profile(graph, variances, x, ntk))
    if all(visible(y) for y in result.profile.variance.values()) and visible(x):
        _check_range(graph, result, dtype)
    return result


def _check_range(graph: Graph, found: _Singles, dtype: torch.dtype) -> None:
    limits = torch.finfo(found.x.dtype)
    least, most = math.sqrt(limits.tiny / limits.eps), _MARGIN * math.sqrt(limits.max)
    output = graph.nodes[-1].name
    moments = {name: x.detach().reshape(-1) for name, x in found.profile.variance.items() if name != output}
    low, high = _extremes(torch.cat(list(moments.values())))
    if not (least <= low and high <= most):
        for name, variance in moments.items():
            low, high = _extremes(variance)
            if not high <= most:
                raise _out_of_range(name, high, found.x.dtype, "down")
            if low < least:
                raise _out_of_range(name, low, found.x.dtype, "up")
    if _vanished(found.x, found.profile.variance[INPUT].detach()):
        raise _out_of_range(INPUT, 0.0, found.x.dtype, "up")
    for own in (found.own.nngp, found.own.ntk):
        largest = 0.0 if own is None else float(own.detach().max())
        if not largest <= torch.finfo(dtype).max:
            raise _out_of_range(output, largest, dtype, "down")


def _extremes(x: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number, with zeros replaced by one."""
    low, high = torch.where(x == 0, 1, x).aminmax()
    return float(low), float(high)


def _vanished(x: Tensor, variance: Tensor) -> bool:
    """Whether squares of nonzero inputs underflow to zero."""
    if int(variance.count_nonzero()) == variance.numel():
        return False
    return bool(((variance == 0) & (x.detach() != 0).any(1)).any())


def _out_of_range(name: str, value: float, dtype: torch.dtype, direction: str) -> DataError:
    what = "the inputs" if name == INPUT else f"layer {name!r}"
    return DataError(
        f"second moments of {what} reach {value:.3g}, and their products are outside the range of {dtype}; scale the "
        f"inputs or the weight variances {direction}"
    )


def _centred(graph: Graph, x: Tensor) -> Tensor:
    """Subtract the mean of the inputs if every layer that reads them does so; otherwise squares may lose digits."""
    same, readers = {INPUT}, []
    for node in graph.nodes:
        if same.isdisjoint(node.inputs):
            continue
        if isinstance(node.layer, Flatten):
            same.add(node.name)
        else:
            readers.append(isinstance(node.layer, LayerNormalization))
    if not any(readers):
        return x
    if not all(readers):
        return x.double()
    axes = tuple(range(1, x.dim()))
    for _ in range(2):  # the second pass removes rounding errors
        x = x - x.mean(axes, keepdim=True)
    return x


def _profile(graph: Graph, variances: Variances, x: Tensor, ntk: bool) -> tuple[Profile, Covariance]:
    """Return the profile of single inputs and the output's covariances, computed in pieces that fit in the cache."""
    length = max(tiles.side(_pairs_of_sites(graph, x), tiles.SIZE) ** 2, 1)
    if len(x) <= length or _derivatives_wanted(variances, x):
        return graph.profile(x, variances, ntk)
    parts = [graph.profile(piece, variances, ntk) for piece in x.split(length)]
    profile = Profile(
        {k: torch.cat([p.variance[k] for p, _ in parts]) for k in parts[0][0].variance},
        {k: torch.cat([p.mean[k] for p, _ in parts]) for k in parts[0][0].mean},
    )
    own = parts[0][1].with_values(
        torch.cat([c.nngp for _, c in parts]),
        torch.cat([c.ntk for _, c in parts if c.ntk is not None]) if ntk else None,
    )
    return profile, own


def _derivatives_wanted(variances: Variances, *x: Tensor) -> bool:
    """Whether derivatives with respect to inputs or variances may be needed."""
    numbers = (*x, *variances.weight.values(), *variances.bias.values())
    return tracked(*(y for y in numbers if isinstance(y, Tensor)))


def _pairs_of_sites(graph: Graph, x: Tensor) -> int:
    """Return the number of covariances per pair of inputs at the network's input."""
    sites = x.shape[2:].numel()
    return sites * sites if INPUT in graph.all_pairs else sites


Variance = float | Tensor | Mapping[str, float | Tensor]
_PARAMETERIZATIONS = ("ntk", "standard")


class Kernels(NamedTuple):
    """Both kernels of a network.

    Attributes
    ----------
    nngp : Tensor
        Covariance of outputs at initialisation, ``(n1, n2)``.
    ntk : Tensor
        Tangent kernel: inner products of gradients with respect to all parameters, ``(n1, n2)``.
    """

    nngp: Tensor
    ntk: Tensor


@dataclass(frozen=True, repr=False)
class InfiniteWidth:
    """Kernels of an infinitely wide network; made by :func:`infinite_width`.

    Attributes
    ----------
    module : torch.nn.Module
        The finite network.
    graph : Graph
        Its layers.
    variances : Variances
        Variances of weights and biases, by layer.
    parameterization : str
        ``"ntk"`` or ``"standard"``.
    """

    module: nn.Module
    graph: Graph
    variances: Variances
    parameterization: str

    def __repr__(self) -> str:
        """Return one line."""
        weight, bias = (_range(x.values()) for x in (self.variances.weight, self.variances.bias))
        return (
            f"InfiniteWidth({len(self.variances.weight)} layers with weights, {self.parameterization} parametrisation, "
            f"weight variance {weight}, bias variance {bias})"
        )

    def nngp(self, x1: Tensor, x2: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return the covariance of a network's outputs at initialisation (the NNGP kernel).

        Parameters
        ----------
        x1 : Tensor
            Inputs, ``(n1, features)`` or ``(n1, channels, *grid)``.
        x2 : Tensor, optional
            Second set of inputs, ``(n2, ...)``; by default ``x1``.
        out : Tensor, optional
            Tensor for the result, filled block by block; it may be on another device or memory-mapped from a file.
            By default a new tensor on the device of the inputs.

        Returns
        -------
        Tensor
            ``(n1, n2)``. Outputs are independent and all have this covariance.

        Raises
        ------
        ShapeError, DataError
            If inputs do not fit the network, are not finite, or overflow or underflow.
        SettingsError
            If ``out`` shares memory with inputs, itself or another result, or requires gradients.

        Warns
        -----
        AccuracyWarning
            If the relative error of moments by quadrature may exceed 1e-6.
        """
        result = self._matrices(x1, x2, ntk=False, out=None if out is None else [out])[0]
        assert result is not None
        return result

    def ntk(self, x1: Tensor, x2: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return the neural tangent kernel: inner products of gradients with respect to all parameters, ``(n1, n2)``.

        Parameters and errors are the same as for :meth:`nngp`.
        """
        result = self._matrices(x1, x2, ntk=True, out=(None, out) if out is not None else None)[1]
        assert result is not None
        return result

    def both(self, x1: Tensor, x2: Tensor | None = None, *, out: tuple[Tensor, Tensor] | None = None) -> Kernels:
        """Return both kernels, computed in one pass.

        Parameters and errors are the same as for :meth:`nngp`; ``out`` is a pair of tensors.
        """
        if out is not None and not (
            isinstance(out, tuple | list) and len(out) == 2 and all(isinstance(y, Tensor) for y in out)
        ):
            raise SettingsError(
                "out must be a pair of tensors, (nngp, ntk); for a single kernel call the method nngp or ntk"
            )
        nngp, ntk = self._matrices(x1, x2, ntk=True, out=out)
        assert nngp is not None and ntk is not None
        return Kernels(nngp, ntk)

    def blocks(self, x1: Tensor, x2: Tensor | None = None, *, ntk: bool = True) -> Iterator[KernelBlock]:
        """Yield both kernels block by block, without gradients.

        Parameters
        ----------
        x1, x2 : Tensor
            As for :meth:`nngp`.
        ntk : bool, default True
            Whether to compute the tangent kernel.

        Yields
        ------
        KernelBlock
            For symmetric kernels only blocks on and above the diagonal are yielded; see ``mirrored``.
        """
        yield from self._evaluation(*self._checked_pair(x1, x2), ntk).blocks()

    def save(
        self, x1: Tensor, x2: Tensor | None = None, *, nngp: str | Path | None = None, ntk: str | Path | None = None
    ) -> None:
        """Write kernels to files, which may be larger than memory.

        Parameters
        ----------
        x1, x2 : Tensor
            As for :meth:`nngp`.
        nngp, ntk : str or Path, optional
            Files in NumPy's format; a kernel without a file is not computed. ``numpy.load(path, mmap_mode="r")`` reads
            parts of a file. An existing file is replaced after the new file is complete.

        Raises
        ------
        OutputError
            If a file cannot be written, or the disk is full.
        SettingsError
            If no file is given, both files are the same, or a name does not end in ``.npy``.
        """
        if isinstance(x2, str | Path):
            raise SettingsError(f"x2 is {str(x2)!r}, not a tensor; pass files by name: save(x, nngp=..., ntk=...)")
        check_paths(nngp, ntk)
        first, second = self._checked_pair(x1, x2)
        shape = len(first), len(first if second is None else second)
        with ExitStack() as stack, torch.no_grad():
            out = [
                None if path is None else stack.enter_context(new_matrix(path, shape, x1.dtype)) for path in (nngp, ntk)
            ]
            self._evaluation(first, second, ntk is not None).fill(out)

    def nngp_diagonal(self, x: Tensor) -> Tensor:
        """Return the variance of outputs at each input, ``(n,)``."""
        return _singles(self.graph, self.variances, self._checked(x, "x"), ntk=False).own.nngp.to(x.dtype)

    def ntk_diagonal(self, x: Tensor) -> Tensor:
        """Return the squared norm of the gradient at each input, ``(n,)``."""
        result = _singles(self.graph, self.variances, self._checked(x, "x"), ntk=True).own.ntk
        assert result is not None
        return result.to(x.dtype)

    def with_variances(self, weight: Variance | None = None, bias: Variance | None = None) -> InfiniteWidth:
        """Return the same network with different variances of weights or biases.

        Parameters
        ----------
        weight, bias : float, Tensor or mapping, optional
            For all layers, or by layer name; by default unchanged. Gradients flow through tensors.
        """
        names = weighted_layers(self.graph)
        return replace(
            self,
            variances=Variances(
                self.variances.weight if weight is None else _by_layer("weight_variance", weight, names),
                self.variances.bias if bias is None else _by_layer("bias_variance", bias, names),
            ),
        )

    def network(self, width: int | None = None, *, seed: int | torch.Generator = 0) -> nn.Module:
        """Return a finite network with random weights, whose kernels converge to these as the width grows.

        Parameters
        ----------
        width : int, optional
            Width of all layers but the last, or of the widest layer if features are concatenated; by default the
            module's own widths.
        seed : int or torch.Generator, default 0

        Returns
        -------
        torch.nn.Module
            Its gradients are in the parametrisation of the kernel.

        Raises
        ------
        SettingsError
            If the width does not keep the proportions of concatenated layers, or the network concatenates or adds its
            own input.
        """
        return finite_network(self.module, self.graph, self.variances, self.parameterization == "standard", width, seed)

    def _checked(self, x: Tensor, name: str) -> Tensor:
        return check_inputs(x, name, self.graph.num_axes)

    def _checked_pair(self, x1: Tensor, x2: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return both sets of inputs; the second is None if both are the same."""
        x1 = self._checked(x1, "x1")
        if x2 is None or x2 is x1:
            return x1, None
        x2 = self._checked(x2, "x2")
        if x1.shape[1:] != x2.shape[1:] or x1.dtype != x2.dtype or x1.device != x2.device:
            raise ShapeError(
                f"x1 and x2 must have inputs of one shape, dtype and device, not {tuple(x1.shape)} {x1.dtype} "
                f"{x1.device} and {tuple(x2.shape)} {x2.dtype} {x2.device}"
            )
        return x1, x2

    def _matrices(
        self, x1: Tensor, x2: Tensor | None, ntk: bool, out: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        x1, x2 = self._checked_pair(x1, x2)
        inputs = (x1,) if x2 is None else (x1, x2)
        if _derivatives_wanted(self.variances, *inputs):
            if out is not None:
                raise SettingsError(
                    "out cannot be used if inputs or variances require gradients; use torch.no_grad(), or omit out"
                )
            return self._evaluation(x1, x2, ntk, derivatives=True).whole()
        shape = len(x1), len(inputs[-1])
        if out is None:
            out = [x1.new_empty(shape) for _ in range(2 if ntk else 1)]
        else:
            check_out(out, shape, inputs)
        self._evaluation(x1, x2, ntk).fill(out)
        return out[0], out[1] if ntk else None

    def _evaluation(self, x1: Tensor, x2: Tensor | None, ntk: bool, derivatives: bool = False) -> _Evaluation:
        """Return the kernels of checked inputs, not yet computed; ``x2`` None means ``x1``.

        Empty inputs raise a ``ShapeError``, second moments outside the dtype's range a ``DataError``.
        """
        graph, variances = self.graph, self.variances
        with torch.set_grad_enabled(derivatives and torch.is_grad_enabled()):
            first = _singles(graph, variances, x1, ntk)
            second = first if x2 is None else _singles(graph, variances, x2, ntk)
            if first.x.dtype != second.x.dtype:
                assert x2 is not None
                first, second = (_checked(graph, variances, x.double(), ntk, x.dtype) for x in (x1, x2))
        return _Evaluation(graph, variances, first, second, x2 is None, ntk, x1.dtype)


def infinite_width(
    module: nn.Module,
    parameterization: str = "ntk",
    weight_variance: Variance = 1.0,
    bias_variance: Variance = 0.0,
) -> InfiniteWidth:
    r"""Return the kernels of a torch module in the limit of infinite width.

    Weights have variance ``weight_variance / fan_in``, biases ``bias_variance``. As the width of hidden layers grows,
    outputs converge to a Gaussian process with covariance :meth:`InfiniteWidth.nngp`, and inner products of gradients
    converge to :meth:`InfiniteWidth.ntk`.

    Parameters
    ----------
    module : torch.nn.Module
        A ``Sequential``, or any module that ``torch.fx`` can trace. Layers: ``Linear``, ``Conv1d``, ``Conv2d``,
        elementwise functions, sums, concatenations of channels, ``Flatten``, averages, ``LayerNorm`` and ``Dropout``.
        The values of its weights are ignored. Its widths matter only for concatenations and in the standard
        parametrisation. ``Dropout`` adds noise in training mode. Parameters that do not require gradients are left
        out of the tangent kernel.
    parameterization : {"ntk", "standard"}, default "ntk"
        ``"ntk"``: gradients are with respect to weights of unit variance, which the forward pass scales.
        ``"standard"``: gradients are with respect to the weights themselves; the tangent kernel grows with the width,
        and is computed to leading order for the module's own widths.
    weight_variance, bias_variance : float, Tensor or mapping, default 1.0 and 0.0
        For all layers, or by layer name. Gradients flow through tensors.

    Returns
    -------
    InfiniteWidth

    Raises
    ------
    ModelError
        If a layer has no known limit; the message names the layer and a replacement.
    ShapeError
        If the shapes of consecutive layers do not match.
    SettingsError
        If variances are negative, or the parametrisation is unknown.

    References
    ----------
    Lee, J., Bahri, Y., Novak, R., Schoenholz, S. S., Pennington, J., Sohl-Dickstein, J. (2018). Deep neural networks
    as Gaussian processes. International Conference on Learning Representations.

    Jacot, A., Gabriel, F., Hongler, C. (2018). Neural tangent kernel: convergence and generalization in neural
    networks. Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> kernel = infinite_width(network, weight_variance=2.0)
    >>> x = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7]], dtype=torch.float64)
    >>> kernel.nngp(x)
    tensor([[0.8933, 0.1533],
            [0.1533, 1.0200]], dtype=torch.float64)
    """
    if parameterization not in _PARAMETERIZATIONS:
        raise SettingsError(f'parameterization must be "ntk" or "standard", not {parameterization!r}')
    graph = read(module := readable(module), parameterization == "standard")
    names = weighted_layers(graph)
    variances = Variances(
        _by_layer("weight_variance", weight_variance, names), _by_layer("bias_variance", bias_variance, names)
    )
    return InfiniteWidth(module, graph, variances, parameterization)


def weighted_layers(graph: Graph) -> tuple[str, ...]:
    """Return the names of layers with weights."""
    return tuple(node.name for node in graph.nodes if isinstance(node.layer, Dense | Convolution))


def _by_layer(name: str, variance: Variance, names: tuple[str, ...]) -> dict[str, float | Tensor]:
    """Return one variance per layer."""
    if isinstance(variance, Mapping):
        if set(variance) != set(names):
            raise SettingsError(f"{name} must have an entry for each of {list(names)}, not for {list(variance)}")
        return {key: _variance(f"{name}[{key!r}]", variance[key]) for key in names}
    return dict.fromkeys(names, _variance(name, variance))


def _range(variances: Iterable[float | Tensor]) -> str:
    """Format variances: one number, or the smallest and the largest."""
    numbers = sorted(float(x) for x in variances if not isinstance(x, Tensor) or visible(x))
    if not numbers:
        return "unknown"
    return f"{numbers[0]:g}" if numbers[0] == numbers[-1] else f"{numbers[0]:g} to {numbers[-1]:g}"


def _variance(name: str, value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        if value.dim() or (visible(value) and not 0 <= float(value.detach()) < float("inf")):
            raise SettingsError(f"{name} must be a single number, finite and not negative, not {value!r}")
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise SettingsError(
            f"{name} must be a number, a tensor, or a mapping from layer names to numbers or tensors, not {value!r}"
        )
    number = float(value)
    if not 0 <= number < float("inf"):
        raise SettingsError(f"{name} must be finite and not negative, not {value!r}")
    return number
