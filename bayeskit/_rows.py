"""A small density as C++ over rows, and Hamiltonian trajectories through it without a way back to Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayeskit._evaluation import Evaluation
from bayeskit._native import RowSource
from bayeskit._operations import call_library, library_of
from bayeskit.errors import ShapeError

MAX_EVALUATIONS = 2000  # in one call, during which Ctrl-C is not heard

# One row after the other. `loop` is the density of a row; `x` are positions and momenta, which are changed, inverse
# temperatures, step sizes, factors and kicks, then what is found, and the data. A dense factor is a lower triangle.
_INTEGRATION = """
#include <algorithm>
#include <vector>
extern "C" void integrate(void** pointers, {real} drift, int64_t kicks, int64_t rows, int64_t dim, int64_t groups,
                          int64_t dense, int64_t data) {{
  {real}** x = ({real}**)pointers;
  std::vector<{real}> force(dim);
  std::vector<void*> row(pointers + 5, pointers + 11 + data);  // of which the first six are set for each row
  for (int64_t b = 0; b < rows; ++b) {{
    {real} *q = x[0] + b * dim, *p = x[1] + b * dim, *gradient = x[9] + b * dim, *lowest = x[10] + b;
    const {real} step = x[3][b], *factor = x[4] + b * groups / rows * dim * (dense ? dim : 1);
    void* own[] = {{q, x[2] + b, x[6] + b, x[7] + b, x[8] + b, gradient}};
    std::copy(own, own + 6, row.begin());
    *lowest = INFINITY;
    for (int64_t s = 0; s < kicks; ++s) {{
      for (int64_t i = 0; i < dim; ++i) {{
        {real} moved = dense ? 0 : factor[i] * p[i];
        for (int64_t j = 0; dense && j <= i; ++j) moved += factor[i * dim + j] * p[j];
        q[i] += drift * step * moved;
      }}
      loop(row.data(), 1, 1);
      const {real} density = x[8][b];
      if (density < *lowest || density != density) *lowest = density;
      for (int64_t i = 0; i < dim; ++i) {{
        force[i] = dense ? 0 : factor[i] * gradient[i];
        for (int64_t j = 0; dense && j <= i; ++j) force[j] += factor[i * dim + j] * gradient[i];
      }}
      for (int64_t i = 0; i < dim; ++i) p[i] += x[5][s] * step * force[i];
    }}
  }}
}}
"""


class NativeEvaluator:
    """An evaluator, ``(n, d), (n,) -> Evaluation``, for any number of rows.

    The C++ trusts dtype and sizes, so that they are looked at here.
    """

    def __init__(self, library: Any, data: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> None:
        self._library, self._data, self._dim, self._dtype = library, data, dim, dtype

    def __call__(self, u: Tensor, beta: Tensor) -> Evaluation:
        if u.dim() != 2 or u.shape[1] != self._dim or beta.shape != u.shape[:1]:
            raise ShapeError(
                f"vectors and inverse temperatures must have shapes (n, {self._dim}) and (n,), not {tuple(u.shape)} "
                f"and {tuple(beta.shape)}"
            )
        u, beta = u.to(self._dtype), beta.to(self._dtype)
        found = _empty(u, beta)
        call_library(self._library, (u, beta), (*found, *self._data), 1, len(u))
        return found

    def fits(self, q: Tensor, factor: Tensor, is_dense: bool) -> bool:
        """Tell whether positions ``(n, d)`` and the factor of a metric have the dtype and sizes of the C++."""
        one = factor.dim() == (2 if is_dense else 1)
        return (
            q.dtype == factor.dtype == self._dtype
            and q.shape[1] == factor.shape[-1] == self._dim
            and (one or len(q) % len(factor) == 0)
        )

    def integrate(
        self,
        q: Tensor,
        p: Tensor,
        step: Tensor,
        beta: Tensor,
        factor: Tensor,
        is_dense: bool,
        drift: float,
        kicks: Sequence[float],
    ) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
        """Move ``q`` and ``p``, ``(n, d)``, in turn, a kick after each drift; also return the lowest density, ``(n,)``.

        Parameters
        ----------
        q, p : Tensor
            ``(n, d)``; momenta are whitened.
        step, beta : Tensor
            ``(n,)``
        factor : Tensor
            Of the metric: ``(d,)`` or ``(g, d)``, or lower triangles ``(d, d)`` or ``(g, d, d)`` if ``is_dense``.
        is_dense : bool
        drift : float
            How far positions move each time, in steps.
        kicks : sequence of float
            How far momenta do, in turn.
        """
        (n, d), floating = q.shape, ctypes.c_float if q.dtype == torch.float32 else ctypes.c_double
        q, p = (x.clone(memory_format=torch.contiguous_format) for x in (q, p))
        beta, step, factor = (x.to(q.dtype).contiguous() for x in (beta, step, factor))
        found, part = _empty(q, beta), torch.empty_like(step)
        lowest, numbers = torch.full_like(part, torch.inf), q.new_tensor(kicks)
        groups, at_once = factor.numel() // (d * d if is_dense else d), max(1, MAX_EVALUATIONS // n)
        for some in numbers.split(at_once):
            tensors = (q, p, beta, step, factor, some, *found, part, *self._data)
            pointers = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
            sizes = (ctypes.c_int64(size) for size in (len(some), n, d, groups, is_dense, len(self._data)))
            self._library.integrate(pointers, floating(drift), *sizes)
            lowest = torch.minimum(lowest, part)
        return q, p, found, lowest


def _empty(u: Tensor, beta: Tensor) -> Evaluation:
    log_prior, log_likelihood, log_density = (beta.new_empty(beta.shape) for _ in range(3))
    return Evaluation(log_prior, log_likelihood, log_density, u.new_empty(u.shape))


def over_rows(source: RowSource, dim: int, dtype: torch.dtype) -> NativeEvaluator | None:
    """Compile a density that :func:`bayeskit._native.row_source` has written; None where that fails.

    Parameters
    ----------
    source : RowSource
        Of a function of vectors and inverse temperatures, whose results are those of an :class:`Evaluation`.
    dim : int
        Of the vectors.
    dtype : torch.dtype
    """
    library = library_of(source.text + _INTEGRATION.format(real="float" if dtype == torch.float32 else "double"))
    return None if library is None else NativeEvaluator(library, source.data, dim, dtype)


__all__ = ["NativeEvaluator", "over_rows"]
