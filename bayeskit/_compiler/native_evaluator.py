"""Small densities as compiled C++ over rows, and Hamiltonian trajectories that run in C++ alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bayeskit._compiler.native_library import call_library, library_of
from bayeskit._compiler.native_source import RowSource
from bayeskit._core.evaluation import Evaluation, Integrator
from bayeskit._core.libraries import raise_for_status
from bayeskit.errors import ShapeError

MAX_EVALUATIONS = 2000  # in one call, during which Ctrl-C has no effect
# One row after the other. `loop` is the density of a row; `x` are positions and momenta (both changed), inverse
# temperatures, step sizes, metric factors and kicks, then results, what was met on the way, and data. A dense factor is
# lower triangular. With `turns`, results hold the evaluation of the positions; a step into zero density keeps both and
# reverses the momentum.
_INTEGRATION = """
static void pull(const {real}* gradient, const {real}* factor, int64_t dim, int64_t dense, {real}* force) {{
  for (int64_t i = 0; i < dim; ++i) {{
    force[i] = dense ? 0 : factor[i] * gradient[i];
    for (int64_t j = 0; dense && j <= i; ++j) force[j] += factor[i * dim + j] * gradient[i];
  }}
}}
extern "C" int integrate(void** pointers, {real} drift, int64_t kicks, int64_t rows, int64_t dim, int64_t groups,
                         int64_t dense, int64_t turns, int64_t data, char* space) {{
  {real}** x = ({real}**)pointers;
  void** row = (void**)space;  // of which the first six are set for each row
  {real} *force = ({real}*)(row + 6 + data), *before = force + dim;
  space += (6 + data + 3 * dim + 3) * 8;
  for (int64_t i = 0; i < data; ++i) row[6 + i] = pointers[11 + i];
  for (int64_t b = 0; b < rows; ++b) {{
    {real} *q = x[0] + b * dim, *p = x[1] + b * dim, *gradient = x[9] + b * dim, *lowest = x[10] + b;
    {real} *highest = x[10] + rows + b, *reversals = x[10] + 2 * rows + b;
    const {real} step = x[3][b], *factor = x[4] + b * groups / rows * dim * (dense ? dim : 1);
    void* own[] = {{q, x[2] + b, x[6] + b, x[7] + b, x[8] + b, gradient}};
    for (int i = 0; i < 6; ++i) row[i] = own[i];
    const bool inside = turns && x[10][3 * rows + b] > 0;
    if (turns) pull(gradient, factor, dim, dense, force);
    for (int64_t s = 0; s < kicks; ++s) {{
      for (int64_t i = 0; inside && i < dim; ++i) before[i] = q[i], before[dim + i] = gradient[i];
      for (int i = 0; inside && i < 3; ++i) before[2 * dim + i] = x[6 + i][b];
      for (int64_t i = 0; i < dim; ++i) {{
        {real} moved = dense ? 0 : factor[i] * p[i];
        for (int64_t j = 0; dense && j <= i; ++j) moved += factor[i * dim + j] * p[j];
        q[i] += drift * step * moved;
      }}
      if (loop(row, 1, 1, space)) return 1;
      const {real} density = x[8][b];
      if (density < *lowest || density != density) *lowest = density;
      if (inside && density == -INFINITY) {{
        for (int64_t i = 0; i < dim; ++i) q[i] = before[i], gradient[i] = before[dim + i], p[i] = -p[i];
        for (int i = 0; i < 3; ++i) x[6 + i][b] = before[2 * dim + i];
        ++*reversals;
      }} else {{
        pull(gradient, factor, dim, dense, force);
      }}
      if (turns) {{
        {real} energy = 0;
        for (int64_t i = 0; i < dim; ++i) {{
          const {real} middle = p[i] + ({real})0.5 * step * force[i];
          energy += middle * middle;
        }}
        energy = ({real})0.5 * energy - x[8][b];
        if (energy > *highest || energy != energy) *highest = energy;
      }}
      for (int64_t i = 0; i < dim; ++i) p[i] += x[5][s] * step * force[i];
    }}
  }}
  return 0;
}}
"""


class NativeEvaluator(Integrator):
    """A compiled evaluator, ``(n, d), (n,) -> Evaluation``, for any number of rows."""

    def __init__(self, library: Any, data: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> None:
        self._library, self._data, self._dim, self._dtype = library, data, dim, dtype
        self._data_pointers = [x.data_ptr() for x in data]
        self._pointers = ctypes.c_void_p * (11 + len(data))

    def __call__(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate rows ``(n, d)`` at inverse temperatures ``(n,)``."""
        # The C++ does not check dtype and sizes.
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
        start: Evaluation | None = None,
    ) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
        """Move positions and momenta in C++, for at most ``MAX_EVALUATIONS`` evaluations a call."""
        (n, d), floating = q.shape, ctypes.c_float if q.dtype == torch.float32 else ctypes.c_double
        q, p = (x.clone(memory_format=torch.contiguous_format) for x in (q, p))
        beta, step, factor = (x.to(q.dtype).contiguous() for x in (beta, step, factor))
        found = _empty(q, beta) if start is None else _copied(start, q, beta)
        met = step.new_tensor([torch.inf, -torch.inf, 0.0, 0.0]).unsqueeze(-1).repeat(1, n)
        if start is not None:
            met[3] = start.log_density > -torch.inf
        space = torch.empty(8 * (6 + len(self._data) + 3 * d + 3) + self._library.space, dtype=torch.uint8)
        address = ctypes.c_void_p(space.data_ptr())
        groups, at_once = factor.numel() // (d * d if is_dense else d), max(1, MAX_EVALUATIONS // n)
        for some in _numbers_of(tuple(kicks), q.dtype, at_once):
            tensors = (q, p, beta, step, factor, some, *found, met)
            pointers = self._pointers(*[x.data_ptr() for x in tensors], *self._data_pointers)
            sizes = (some.shape[0], n, d, groups, is_dense, start is not None, len(self._data))
            status = self._library.integrate(pointers, floating(drift), *map(ctypes.c_int64, sizes), address)
            raise_for_status(status, "the steps of a differential equation")
        return q, p, found, met


@lru_cache(maxsize=128)
def _numbers_of(kicks: tuple[float, ...], dtype: torch.dtype, at_once: int) -> tuple[Tensor, ...]:
    return torch.tensor(kicks, dtype=dtype).split(at_once)


def _empty(u: Tensor, beta: Tensor) -> Evaluation:
    log_prior, log_likelihood, log_density = (beta.new_empty(beta.shape) for _ in range(3))
    return Evaluation(log_prior, log_likelihood, log_density, u.new_empty(u.shape))


def _copied(evaluation: Evaluation, u: Tensor, beta: Tensor) -> Evaluation:
    """Return a copy in memory of our own, in which C++ may write."""
    found = _empty(u, beta)
    for copy, original in zip(found, evaluation, strict=True):
        copy.copy_(original)
    return found


def over_rows(source: RowSource, dim: int, dtype: torch.dtype) -> NativeEvaluator | None:
    """Compile a density of rows ``(n, dim)`` that :func:`row_source` has written, or return None where that fails."""
    library = library_of(source.text + _INTEGRATION.format(real="float" if dtype == torch.float32 else "double"))
    return None if library is None else NativeEvaluator(library, source.data, dim, dtype)
