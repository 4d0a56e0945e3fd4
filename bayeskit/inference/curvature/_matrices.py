"""Curvature matrices of a network, held as their factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from bayeskit._core.flat_networks import PRODUCT_ROWS, FlatNetwork, row_blocks
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit.errors import BudgetError, DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference.curvature._module_data import BLOCK_SIZE

_LARGEST = 20_000  # largest number of rows of a matrix that is formed
_COLUMNS = 16  # number of vectors multiplied at once


class OutputCurvature(NamedTuple):
    """Curvature in the outputs, ``root diag(signs) root^T`` for each observation."""

    root: Tensor  # (n, k, r)
    signs: Tensor | None = None  # plus and minus one, (n, r); None if all are plus one


class Trace(NamedTuple):
    """A trace and its Monte Carlo standard error, which is zero for an exact trace."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Curvature:
    """Symmetric ``p x p`` matrix ``scale * sum_i J_i^T A_i J_i``.

    ``J_i`` is the Jacobian of the outputs at input ``i`` with respect to the parameters, ``A_i`` the curvature in these
    outputs. Made by :func:`fisher`, :func:`gauss_newton` and :func:`empirical_fisher`.

    Attributes
    ----------
    name : str
        Name of the matrix.
    network : FlatNetwork
    x : Tensor
        Inputs, ``(n, ...)``.
    factor : callable
        Maps a slice of inputs to its :class:`OutputCurvature`.
    num_outputs : int
        ``k``.
    rank : int
        Number of columns of a factor, ``r``.
    scale : float
        1 for the sum over observations, ``1 / n`` for the mean.
    warnings : tuple of str
        Failed diagnostics, each with a remedy.
    diagnostics : dict of float
        Values of the diagnostics.
    """

    name: str
    network: FlatNetwork
    x: Tensor
    factor: Callable[[slice], OutputCurvature]
    num_outputs: int
    rank: int
    scale: float = 1.0
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)

    @property
    def trusted(self) -> bool:
        """Whether all diagnostics passed."""
        return not self.warnings

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, ``(p, p)``."""
        return self.network.num_parameters, self.network.num_parameters

    @property
    def dual_size(self) -> int:
        """Number of rows of :meth:`dual`, ``n * r``."""
        return len(self.x) * self.rank

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.name} of {self.shape[0]} parameters and {len(self.x)} data{flag}"

    def __matmul__(self, v: Tensor) -> Tensor:
        """Multiply by a vector ``(p,)`` or by the columns of a matrix ``(p, m)``, without forming the curvature."""
        if v.dim() not in (1, 2) or len(v) != self.shape[0]:
            raise ShapeError(
                f"the curvature can be multiplied by ({self.shape[0]},) or ({self.shape[0]}, m), not {tuple(v.shape)}"
            )
        if not bool(torch.isfinite(v).all()):
            raise DataError("v has values that are not finite")
        v = v.detach().to(self.network.vector)
        if v.dim() == 1:
            return self._product(v)
        return self._batched_products(v)

    def _batched_products(self, v: Tensor) -> Tensor:
        """Multiply by all columns at once, or one by one if batched products fail or are wrong."""
        weights = torch.arange(1.0, v.shape[1] + 1, dtype=torch.float64).cos().to(v)
        try:
            found = torch.vmap(self._product, in_dims=1, out_dims=1, chunk_size=_COLUMNS)(v)
            total = self._product(v @ weights)
            accuracy = torch.finfo(v.dtype).eps ** 0.5
            if float((found @ weights - total).abs().max()) <= accuracy * float(found.abs().max()) * v.shape[1] ** 0.5:
                return found
        except (RuntimeError, NotImplementedError, UserWarning):  # a function of the module cannot be batched
            pass
        return torch.stack([self._product(column) for column in v.mT], 1)

    def matrix(self) -> Tensor:
        """Return the dense matrix, ``(p, p)``.

        Raises
        ------
        SettingsError
            If there are too many parameters.
        """
        p = _formed("the curvature", self.shape[0], "multiply by vectors (@), or use dual()")
        result = self.network.vector.new_zeros(p, p)
        for rows, signs in self._rows():
            result.addmm_((rows if signs is None else rows * signs.unsqueeze(1)).mT, rows)
        return self.scale * result

    def dual(self) -> Tensor:
        r"""Return the dual matrix ``scale * G G^T``, ``(n r, n r)``, if the matrix is ``scale * G^T G``.

        The nonzero eigenvalues of both are the same. For the Fisher information of normal observations with unit
        variance, ``G = J`` and the dual is the empirical neural tangent kernel.

        Raises
        ------
        ModelError
            If the matrix is indefinite.
        SettingsError
            If there are too many observations.
        """
        rows = self.rows()
        return self.scale * (rows @ rows.mT)

    def rows(self) -> Tensor:
        """Return ``G``, ``(n r, p)``, if the matrix is ``scale * G^T G``; errors are the same as for :meth:`dual`."""
        _formed("the dual", self.dual_size, "multiply by vectors (@), or use matrix()")
        if self.dual_size * self.shape[0] > _LARGEST**2:
            raise SettingsError(
                f"the gradients would be {self.dual_size} x {self.shape[0]} numbers, more than {_LARGEST**2}; multiply "
                "by vectors (@), freeze parameters, or use fewer observations"
            )
        result = self.network.vector.new_empty(self.dual_size, self.shape[0])
        first = 0
        for rows, signs in self._rows():
            if signs is not None and bool((signs < 0).any()):
                raise ModelError(f"the {self.name} is indefinite at these data; use the Fisher information instead")
            result[first : first + len(rows)] = rows if signs is None else rows * signs.unsqueeze(1)
            first += len(rows)
        return result

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``(p,)``."""
        result = torch.zeros_like(self.network.vector)
        for rows, signs in self._rows():
            squares = rows.square()
            result += (squares if signs is None else squares * signs.unsqueeze(1)).sum(0)
        return self.scale * result

    def trace(self, num_probes: int | None = None, *, seed: int | torch.Generator = 0) -> Trace:
        """Return the trace, exact or estimated from products with random vectors.

        Parameters
        ----------
        num_probes : int, optional
            Number of random sign vectors, at least 2. By default the trace is exact and all Jacobians are computed.
        seed : int or torch.Generator, default 0

        References
        ----------
        Hutchinson, M. F. (1989). A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
        splines. Communications in Statistics: Simulation and Computation 18, 1059-1076.
        """
        if num_probes is None:
            return Trace(float(self.diagonal().sum()), 0.0)
        count = whole_number("num_probes", num_probes, least=2)
        generator = new_generator(seed, stream="trace")
        values = []
        for _ in range(count):
            bits = torch.randint(0, 2, (self.shape[0],), generator=generator, device=generator.device)
            probe = (2 * bits - 1).to(self.network.vector)
            values.append(float(probe @ self._product(probe)))
        return Trace(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count))

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, ascending, ``(p,)``, computed from the smaller of the matrix and its dual.

        Raises
        ------
        SettingsError
            If both are too large.
        """
        if self.dual_size >= self.shape[0]:
            return torch.linalg.eigvalsh(self.matrix())
        found = torch.linalg.eigvalsh(self.dual())
        return torch.cat([found.new_zeros(self.shape[0] - len(found)), found]).sort().values

    def solve(
        self, v: Tensor, damping: float, *, tolerance: float | None = None, max_iterations: int | None = None
    ) -> Tensor:
        """Return the solution of ``(matrix + damping I) u = v`` by conjugate gradients, ``(p,)``.

        Parameters
        ----------
        v : Tensor
            ``(p,)``.
        damping : float
            Non-negative.
        tolerance : float, optional
            Norm of the residual relative to the norm of ``v``; by default 1e-10, or 1e-5 in single precision.
        max_iterations : int, optional
            By default ``10 p``.

        Raises
        ------
        BudgetError
            If the iterations do not reach the tolerance.
        DataError
            If ``v`` is not finite.
        """
        v, damping = self._system(v, damping)
        if tolerance is None:
            tolerance = 1e-10 if v.dtype == torch.float64 else 1e-5

        def product(u: np.ndarray) -> np.ndarray:
            given = torch.as_tensor(np.ascontiguousarray(u).reshape(-1)).to(v)
            return (self._product(given) + damping * given).double().cpu().numpy()

        operator = LinearOperator(self.shape, matvec=product, dtype=np.float64)
        found, failed = cg(operator, v.double().cpu().numpy(), rtol=tolerance, atol=0.0, maxiter=max_iterations)
        if failed:
            raise BudgetError(
                f"conjugate gradients did not reach a relative residual of {tolerance:g} in {failed} iterations; "
                "raise damping, tolerance or max_iterations, or call solve_exactly"
            )
        return torch.as_tensor(found).to(v)

    def solve_exactly(self, v: Tensor, damping: float) -> Tensor:
        """Return the solution of ``(matrix + damping I) u = v`` by Cholesky factorisation, ``(p,)``.

        With positive damping the smaller of the matrix and its dual is factorised, otherwise the matrix.

        Raises
        ------
        ModelError
            If the dual is used and the matrix is indefinite.
        SettingsError
            If the damped matrix is not positive definite to working precision, or both matrices are too large.
        """
        v, damping = self._system(v, damping)
        if self.dual_size >= self.shape[0] or damping == 0:
            return _positive_solve(_damped(self.matrix(), damping), v, self.name)
        rows = self.rows()
        kernel = _damped(self.scale * (rows @ rows.mT), damping)
        return (v - self.scale * rows.mT @ _positive_solve(kernel, rows @ v, self.name)) / damping

    def _system(self, v: Tensor, damping: float) -> tuple[Tensor, float]:
        if v.shape != (self.shape[0],):
            raise ShapeError(f"v must be ({self.shape[0]},), not {tuple(v.shape)}")
        if not bool(torch.isfinite(v).all()):
            raise DataError("v has values that are not finite")
        damping = real_number("damping", damping)
        if not 0 <= damping < math.inf:
            raise SettingsError(f"damping must be finite and not negative, not {damping:g}")
        return v.detach().to(self.network.vector), damping

    def _product(self, v: Tensor) -> Tensor:
        result = torch.zeros_like(v)
        for block in row_blocks(len(self.x), self._length(self.num_outputs, PRODUCT_ROWS)):
            root, signs = self.factor(block)
            inner = torch.einsum("nkr,nk->nr", root, self.network.push(self.x[block], v))
            if signs is not None:
                inner = signs * inner
            result = result + self.network.pull(self.x[block], torch.einsum("nkr,nr->nk", root, inner))
        return self.scale * result

    def _rows(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield blocks of ``G``, ``(rows, p)``, and their signs."""
        for block in row_blocks(len(self.x), self._length(self.shape[0] + self.num_outputs, len(self.x))):
            root, signs = self.factor(block)
            rows = self.network.pull_each(self.x[block], root)
            yield rows.flatten(0, 1), None if signs is None else signs.flatten()

    def _length(self, numbers: int, most: int) -> int:
        """Return the number of inputs per block, given the numbers held per input and column of a factor."""
        return max(min(BLOCK_SIZE // (numbers * self.rank), most), 1)


def _formed(name: str, size: int, remedy: str) -> int:
    if size > _LARGEST:
        raise SettingsError(f"{name} would have {size} rows, more than {_LARGEST}; {remedy}")
    return size


def _damped(matrix: Tensor, damping: float) -> Tensor:
    return matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _positive_solve(matrix: Tensor, v: Tensor, name: str) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    # Rounding often makes a singular matrix factorisable; its pivots are then tiny.
    pivots = factor.diagonal().square() / matrix.diagonal()
    if bool(failed) or float(pivots.min()) < 8 * len(matrix) * torch.finfo(matrix.dtype).eps:
        raise SettingsError(f"the {name} with this damping is not positive definite; use a larger damping")
    return torch.cholesky_solve(v.unsqueeze(1), factor).squeeze(1)
