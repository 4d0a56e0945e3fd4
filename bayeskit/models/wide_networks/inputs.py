"""Covariances of data: products of inputs, averaged over channels."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.wide_networks.covariance import Covariance, visible

CHUNK = 1 << 22  # numbers held at once while near pairs are looked at closely


def check_inputs(x: Tensor, name: str, num_axes: int | None) -> Tensor:
    """Return inputs as they are, or say what is wrong with them."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError(f"{name} must be a tensor of floating-point numbers, not {_kind(x)}")
    if x.dim() < 2 or (num_axes is not None and x.dim() != 2 + num_axes):
        wanted = {0: "(n, features)", 1: "(n, channels, length)", 2: "(n, channels, height, width)"}
        raise ShapeError(f"{name} must be {wanted.get(num_axes or 0, '(n, channels, ...)')}, not {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64):
        raise DataError(f"{name} is {x.dtype}, whose range products of variances leave; pass {name}.float()")
    check_finite(x, name)
    return x


def check_vectors(x: Tensor, name: str) -> Tensor:
    """Return inputs of Pyro's and GPyTorch's kernels as they are, ``(n, features)``, or say what is wrong."""
    if isinstance(x, Tensor) and x.dim() != 2:
        raise ShapeError(f"{name} must be (n, features), not {tuple(x.shape)}; flatten images, and pass input_shape")
    return check_inputs(x, name, 0)


def check_targets(x: Tensor, y: Tensor, one_output: bool = False) -> Tensor:
    """Return values at inputs as they are, ``(n, *outputs)`` or only ``(n,)``, or say what is wrong with them."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise DataError(f"y must be a tensor of floating-point numbers, not {_kind(y)}")
    if y.dim() < 1 or len(y) != len(x) or not len(y):
        raise ShapeError(f"y must have one row for each of the {len(x)} training inputs, not shape {tuple(y.shape)}")
    if one_output and y.dim() > 1:
        raise ShapeError(f"y must have one value an input, ({len(x)},), not {tuple(y.shape)}")
    if x.is_floating_point() and (x.dtype != y.dtype or x.device != y.device):
        raise DataError(f"x is {x.dtype} on {x.device}, y {y.dtype} on {y.device}; convert one of them")
    check_finite(y, "y")
    return y


def check_finite(x: Tensor, name: str) -> None:
    """Refuse values that are not finite, naming the first row that has one."""
    if not visible(x):
        return
    finite = torch.isfinite(x.detach()).unsqueeze(-1).flatten(1).all(1)
    if not bool(finite.all()):
        raise DataError(f"{name} has values that are not finite, first in row {int((~finite).nonzero()[0])}")


def _kind(x: object) -> str:
    """Return what something is instead of a tensor of floating-point numbers, and how to make it one."""
    if isinstance(x, Tensor):
        return str(x.dtype)
    kind = type(x)
    module = kind.__module__.partition(".")[0]
    called = kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
    return called + ("; use torch.from_numpy(...)" if called == "numpy.ndarray" else "; use torch.tensor(...)")


def own_covariance(x: Tensor, all_pairs: bool, ntk: bool) -> Covariance:
    """Return the covariances of each input with itself."""
    num_axes = x.dim() - 2
    if all_pairs:
        flat = x.flatten(2)
        sites = x.shape[2:]
        nngp = (flat.mT @ flat / x.shape[1]).reshape(len(x), *sites, *sites)
    else:
        nngp = x.square().mean(1)
    gap = torch.zeros_like(nngp) if not num_axes else None
    ntk_matrix = torch.zeros_like(nngp) if ntk else None
    return Covariance(nngp, ntk_matrix, x.shape[1], num_axes, all_pairs and num_axes > 0, gap, x.mean(1))


def cross_covariance(
    x1: Tensor, x2: Tensor, variances: tuple[Tensor, Tensor], all_pairs: bool, ntk: bool
) -> Covariance:
    """Return the covariances of all inputs of one set with all of another, each of which has been paired with itself.

    On a grid the inputs of the second set lie side by side in memory, so that parts of the grid are long stretches.
    """
    num_axes, channels = x1.dim() - 2, x1.shape[1]
    gap = None
    if not num_axes:
        nngp = x1 @ x2.mT / channels
        gap = _vector_gap(x1, x2, nngp, *variances)
    elif all_pairs:
        sites = x1.shape[2:]
        rows, columns = (x.flatten(2).permute(2, 0, 1).reshape(-1, channels) for x in (x1, x2))
        product = (rows @ columns.mT).div_(channels).reshape(*sites, len(x1), *sites, len(x2))
        first, second = range(num_axes), range(num_axes + 1, 2 * num_axes + 1)
        nngp = product.permute(num_axes, 2 * num_axes + 1, *first, *second)
    else:
        sites = x1.shape[2:]
        product = (x1.flatten(2).permute(2, 0, 1) @ x2.flatten(2).permute(2, 1, 0)).div_(channels)
        nngp = product.reshape(*sites, len(x1), len(x2)).permute(-2, -1, *range(num_axes))
    ntk_matrix = torch.zeros_like(nngp) if ntk else None
    return Covariance(nngp, ntk_matrix, channels, num_axes, all_pairs and num_axes > 0, gap)


def _vector_gap(x1: Tensor, x2: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the product of squared norms minus the squared product of vectors, all by the number of features.

    Where vectors are nearly parallel the difference has lost its digits, and what is left of one vector beside the
    other is computed instead.
    """
    channels = x1.shape[1]
    product = a[:, None] * b
    gap = torch.addcmul(product, k, k, value=-1)
    limit = (1e-5 if k.dtype == torch.float64 else 4e-3) * product
    if not visible(gap):
        rows, columns = (i.reshape(-1) for i in torch.meshgrid(*map(_places, (x1, x2)), indexing="ij"))
        exact = (_residual(x1[rows], x2[columns]) / channels).reshape(gap.shape) * a[:, None]
        return torch.where(gap > limit, gap, exact)
    if not gap.numel() or bool((gap.detach() - limit).amin() > 0):
        return gap
    near = (gap <= limit).nonzero()
    if not len(near):
        return gap
    found = [
        _residual(x1[pair[:, 0]], x2[pair[:, 1]]) / channels * a[pair[:, 0]]
        for pair in near.split(max(CHUNK // channels, 1))
    ]
    return gap.index_put((near[:, 0], near[:, 1]), torch.cat(found))


def _places(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _residual(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared length of what is left of each ``y`` once its part along ``x`` is gone."""
    size = x.square().sum(1)
    along = (x * y).sum(1) / torch.where(size > 0, size, 1)
    left = y - along[:, None] * x
    # The part along x that rounding has left over is taken away, too.
    left = left - ((x * left).sum(1) / torch.where(size > 0, size, 1))[:, None] * x
    result = left.square().sum(1)
    noise = 4 * torch.finfo(x.dtype).eps * y.square().sum(1).sqrt()
    return torch.where(result > noise.square(), result, 0)
