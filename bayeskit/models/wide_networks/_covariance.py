"""Covariances between pairs of inputs at an infinitely wide layer, and storage of large matrices."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from bayeskit.errors import DataError, OutputError, SettingsError, ShapeError
from bayeskit.extend import batching_level, one_thread, temporary_name

# Covariances of one channel of a layer of infinite width between pairs of inputs.

_SNAP = 16  # for parallel features: rounding errors by which the product of variances may exceed the squared covariance


@dataclass(frozen=True)
class Covariance:
    """Second moments of one channel's features between pairs of inputs, per site or per pair of sites of a grid."""

    nngp: Tensor  # (*batch, *sites), or (*batch, *sites, *sites) with all_pairs
    ntk: Tensor | None  # inner products of the features' gradients with respect to all parameters so far, same shape
    channels: int  # of the finite network
    num_axes: int = 0  # of the grid: 0 for vectors, 2 for images
    all_pairs: bool = False  # whether all pairs of sites are present, or each site with itself only
    gap: Tensor | None = None  # product of variances minus squared covariance, if known better than by subtraction
    mean: Tensor | None = None  # nonzero first moments, (*batch, *sites); only for pairs of an input with itself
    gain: bool = False  # features were just multiplied by trainable gains, whose gradients the next layer adds to ntk
    mixed: bool = False  # ntk includes gradients of gains, averaged over channels

    @property
    def sites(self) -> torch.Size:
        """The size of the grid."""
        return self.nngp.shape[self.nngp.dim() - self.num_axes :]

    def variance(self) -> Tensor:
        """Return the second moment at each site, of an input with itself, ``(*batch, *sites)``."""
        if not self.all_pairs:
            return self.nngp
        size = self.sites
        batch = self.nngp.shape[: self.nngp.dim() - 2 * self.num_axes]
        flat = self.nngp.reshape(*batch, size.numel(), size.numel())
        return flat.diagonal(dim1=-2, dim2=-1).reshape(*batch, *size)

    def same_sites(self) -> Covariance:
        """Return the covariances of each site with itself only."""
        if not self.all_pairs:
            return self
        ntk = None if self.ntk is None else replace(self, nngp=self.ntk).variance()
        return replace(self, nngp=self.variance(), ntk=ntk, all_pairs=False, gap=None)

    @property
    def same_site(self) -> Tensor | float:
        """Indicator of pairs of equal sites, ``(*sites, *sites)``."""
        if not self.all_pairs:
            return 1.0
        size = self.sites.numel()
        ones = torch.eye(size, dtype=self.nngp.dtype, device=self.nngp.device)
        return ones.reshape(*self.sites, *self.sites)

    def settled(self) -> Covariance:
        """Return a copy with the gradients of gains, one per channel and site, added to ``ntk``."""
        if not self.gain:
            return self
        ntk = None if self.ntk is None else self.ntk + self.nngp * self.same_site
        return replace(self, ntk=ntk, gain=False, mixed=True)

    def with_values(self, nngp: Tensor, ntk: Tensor | None, **changes: object) -> Covariance:
        """Return a copy with other moments of the same layout; ``gap`` is None unless given."""
        return replace(self, nngp=nngp, ntk=ntk, **({"gap": None, "gain": False} | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Profile:
    """Second and first moments of each layer's features at single inputs, ``(n, *sites)``."""

    variance: Mapping[str, Tensor]
    mean: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, chosen: Tensor | slice) -> Profile:
        """Return the profile of the chosen inputs."""
        return Profile({k: v[chosen] for k, v in self.variance.items()}, {k: v[chosen] for k, v in self.mean.items()})


class Joint(NamedTuple):
    """Second moments of two sets of features: covariances ``k``, variances ``a`` and ``b``, and the gap."""

    k: Tensor
    a: Tensor
    b: Tensor
    gap: Tensor

    def scaled(self, factor: float) -> Joint:
        """Return the moments of covariances multiplied by a factor."""
        return Joint(factor * self.k, factor * self.a, factor * self.b, factor * factor * self.gap)

    def plus(self, other: Joint) -> Joint:
        """Return the moments of a sum of features that are uncorrelated."""
        return Joint(self.k + other.k, self.a + other.a, self.b + other.b, _gap_of_sum(self, other))


def gap_of(k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b - k**2``, set to zero where it is within rounding error."""
    product = a * b
    gap = torch.addcmul(product, k, k, value=-1)
    noise = _SNAP * torch.finfo(k.dtype).eps * product
    if _plain(gap) and bool((gap.detach() - noise).amin() > 0):
        return gap  # skips the slow torch.where below
    return torch.where(gap > noise, gap, torch.zeros_like(gap))


def root(x: Tensor) -> Tensor:
    """Return the square root, with gradient zero at zero."""
    if not tracked(x):
        return x.clamp_min(0).sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def angle(sine: Tensor, cosine: Tensor) -> Tensor:
    """Return the angle with the given sine and cosine, up to a common factor; zero, also its gradient, if both are."""
    if tracked(sine, cosine):
        cosine = torch.where((sine == 0) & (cosine == 0), 1, cosine)
    return torch.atan2(sine, cosine)


def acute_angle(sine: Tensor, cosine: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``min(t, pi - t)``, accurate where small, and ``pi / 2 - t`` of the angle ``t`` in ``[0, pi]``."""
    if tracked(sine, cosine):
        between = angle(sine, cosine)
        return torch.where(cosine < 0, math.pi - between, between), 0.5 * math.pi - between
    # The same without branches and without the slower atan2.
    acute = torch.atan(sine / cosine.abs().clamp_min(torch.finfo(cosine.dtype).tiny))
    return acute, torch.copysign(0.5 * math.pi - acute, cosine)


def _gap_of_sum(one: Joint, other: Joint) -> Tensor:
    """Return the gap of the sum of two covariances, as accurately as their gaps."""
    apart = (root(one.a) * root(other.b) - root(other.a) * root(one.b)).square()
    alike = one.k * other.k > 0
    first, second = (torch.where(alike, x.k.abs(), x.k) for x in (one, other))
    scale = root(one.a) * root(one.b)
    missing = scale * excess(second, other.gap, other.a, other.b) + second * excess(first, one.gap, one.a, one.b)
    return one.gap + other.gap + apart + 2 * missing


def excess(k: Tensor, gap: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``sqrt(a b) - k`` as accurately as the gap."""
    size = k.abs()
    return excess_of_size(size, gap, a, b) + (size - k)


def excess_of_size(size: Tensor, gap: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the excess for a non-negative covariance."""
    below = torch.addcmul(size, root(a), root(b))
    if tracked(below):
        return gap / torch.where(below > 0, below, 1)
    return gap / below.clamp_min_(torch.finfo(size.dtype).tiny)


def where_zero(a: Tensor, b: Tensor, values: Tensor, one: float, both: float) -> Tensor:
    """Return ``values``, replaced by ``one`` or ``both`` where one or both variances are zero."""
    if all(_plain(x) and int(x.count_nonzero()) == x.numel() for x in (a, b)):
        return values
    first, second = a == 0, b == 0
    return torch.where(first & second, both, torch.where(first | second, one, values))


def tracked(*tensors: Tensor) -> bool:
    """Whether derivatives may be needed; always True in function transforms, where tensors do not show it."""
    if transformed() or any(unpack_dual(x).tangent is not None for x in tensors):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def transformed() -> bool:
    """Whether a function transform, such as differentiation or batching, is active."""
    return batching_level() is not None


def _plain(x: Tensor) -> bool:
    """Whether values can be read cheaply: on the CPU, and not in a function transform or while compiling."""
    return x.device.type == "cpu" and x.numel() > 0 and not (transformed() or torch.compiler.is_compiling())


# Storage of matrices: given tensors, and files in NumPy's format for matrices larger than memory.


def check_out(out: Sequence[Tensor | None], shape: tuple[int, int], inputs: Sequence[Tensor]) -> None:
    """Raise ``ShapeError`` or ``SettingsError`` unless each tensor fits and shares no memory with inputs or others."""
    dtype, taken = inputs[0].dtype, list(inputs)
    for matrix in out:
        if matrix is None:
            continue
        if not isinstance(matrix, Tensor):
            raise SettingsError(f"out must be a tensor, not {type(matrix).__name__}; convert it by torch.from_numpy")
        if matrix.shape != shape or matrix.dtype != dtype:
            raise ShapeError(f"out must be {shape} {dtype}, not {tuple(matrix.shape)} {matrix.dtype}")
        if matrix.requires_grad:
            raise SettingsError("out requires gradients, but results have no gradients; pass out.detach()")
        if _overlaps_itself(matrix):
            raise SettingsError("entries of out share memory, as in expanded tensors; pass out.contiguous()")
        if any(_overlap(matrix, x) for x in taken):
            raise SettingsError("out shares memory with the inputs or another result; pass a separate tensor")
        taken.append(matrix)


def check_paths(*paths: str | Path | None) -> None:
    """Raise a ``SettingsError`` unless there is a path, every path ends in ``.npy``, and no two are the same file."""
    named = [Path(path) for path in paths if path is not None]
    if not named:
        raise SettingsError("no file is given; name a file for at least one kernel: save(x, nngp=..., ntk=...)")
    for path in named:
        if path.suffix != ".npy":
            raise SettingsError(
                f"file names must end in .npy: use {str(path.with_suffix('.npy'))!r} instead of {str(path)!r}"
            )
    if len({path.resolve() for path in named}) < len(named):
        raise SettingsError(f"{str(named[0])!r} is the file of both kernels; name a separate file for each kernel")


def _overlaps_itself(x: Tensor) -> bool:
    """Whether entries of a matrix may share memory, according to its strides."""
    passed = 0
    for step, count in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if step <= passed:
            return True
        passed += step * (count - 1)
    return False


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap."""
    if x.device != y.device or not (x.numel() and y.numel()):
        return False
    (first, last), (start, end) = _stretch(x), _stretch(y)
    return first < end and start < last


def _stretch(x: Tensor) -> tuple[int, int]:
    length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + length * x.element_size()


@contextmanager
def new_matrix(path: str | Path, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a matrix mapped to a temporary file, which is renamed to ``path`` when the body ends without an error.

    Failures to write raise an ``OutputError``, dtypes that NumPy lacks a ``DataError``.
    """
    path = Path(path)
    try:
        numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise DataError(f"files in NumPy's format cannot store {dtype}; convert inputs to torch.float32") from error
    temporary = temporary_name(path)
    try:
        try:
            matrix = np.lib.format.open_memmap(temporary, mode="w+", dtype=numpy_dtype, shape=shape)
            _reserve(temporary)
            yield torch.from_numpy(matrix)
            matrix.flush()
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that exists, is writable and has "
            f"{shape[0] * shape[1] * numpy_dtype.itemsize / 1e9:.3g} GB of space"
        ) from error


def _reserve(path: Path) -> None:
    """Reserve the disk space, because writing to a memory map on a full disk ends the process."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


# Matrices of pairs of inputs, block by block, so that intermediate results of layers stay in the cache.

SIZE = 1 << 16  # number of covariances of pairs of sites per block
WIDE_SIZE = 1 << 18  # the same for large matrices shared among threads: small blocks contend for the interpreter's lock
WIDE_BLOCKS = 8  # smallest number of wide blocks per thread; with fewer, small blocks are used
GROUP = 16  # blocks per side of a square that is completed before the next one, so that pages of files fill up
_BATCH = 32  # blocks for each thread before threads wait for each other

Result = TypeVar("Result")


class Block(NamedTuple):
    """Rows and columns of one block of a matrix."""

    rows: slice
    columns: slice
    mirrored: bool  # whether the block's transpose is a block of the matrix, too, and need not be computed


def shared_size(num_covariances: int, device: torch.device) -> int:
    """Return the number of covariances per block of a matrix with ``num_covariances``, if all threads work."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    return WIDE_SIZE if workers > 1 and num_covariances >= WIDE_BLOCKS * workers * WIDE_SIZE else SIZE


def side(num_pairs_of_sites: int, size: int) -> int:
    """Return the number of inputs per side of a block of ``size`` covariances, given their number per pair."""
    return max(int(math.sqrt(size / max(num_pairs_of_sites, 1))), 1)


def matrix_blocks(num_rows: int, num_columns: int, symmetric: bool, length: int) -> Iterator[Block]:
    """Yield the blocks of a matrix; only those on and above the diagonal if it is symmetric."""
    wide = GROUP * length
    for top in range(0, num_rows, wide):
        for left in range(top if symmetric else 0, num_columns, wide):
            for first in range(top, min(top + wide, num_rows), length):
                rows = slice(first, min(first + length, num_rows))
                for second in range(max(first, left) if symmetric else left, min(left + wide, num_columns), length):
                    columns = slice(second, min(second + length, num_columns))
                    yield Block(rows, columns, symmetric and second > first)


def each(function: Callable[[Block], Result], chosen: Sequence[Block], device: torch.device) -> Iterator[Result]:
    """Yield ``function(block)`` of each block, in order."""
    # One block per thread on a CPU: operations that fit in the cache are too small to be shared among threads.
    workers = min(torch.get_num_threads(), len(chosen)) if device.type == "cpu" else 1
    # torch's number of threads is restored between batches, when the caller's code runs.
    for first in range(0, len(chosen), _BATCH * workers):
        batch = chosen[first : first + _BATCH * workers]
        if workers == 1:
            for block in batch:
                with one_thread():
                    result = function(block)
                yield result
            continue
        with one_thread(), ThreadPoolExecutor(workers, thread_name_prefix="bayeskit-kernel") as pool:
            results = list(pool.map(function, batch))
        yield from results
