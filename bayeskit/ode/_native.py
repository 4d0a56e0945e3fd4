"""The integration of each chain, and its gradient, as C++ around the generated code of the slope."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayeskit._compiler import NUMBER_TYPES, batch_source, function_source
from bayeskit.ode._methods import Slope, SteppingMethod, bend, jacobian, pull

_ON_STACK = 8192  # numbers of all arrays of a chain, beyond which they are in the caller's memory

# Explicit Runge-Kutta methods. `k` are the slopes of the stages, of which the first is given.
_EXPLICIT = """
constexpr int64_t kept = stages * dim;
auto stage_of = [&](real h, const real* y, const real* k, int64_t s, real* out) {
  for (int64_t i = 0; i < dim; ++i) {
    real sum = 0;
    for (int64_t j = 0; j < s; ++j) sum += a[s][j] * k[j * dim + i];
    out[i] = y[i] + h * sum;
  }
};
auto attempt = [&](real t, real h, const real* y, real* k, real* next, real* error) {
  for (int64_t s = 1; s < stages; ++s) {
    stage_of(h, y, k, s, next);
    slope_at(t + c[s] * h, next, k + s * dim);
  }
  for (int64_t i = 0; i < dim; ++i) {
    real sum = 0;
    for (int64_t s = 0; s < stages; ++s) sum += e[s] * k[s * dim + i];
    error[i] = h * sum;
  }
};
auto renew = [&](real* k) { for (int64_t i = 0; i < dim; ++i) k[i] = k[(stages - 1) * dim + i]; };
"""
_EXPLICIT_BACK = """
auto pull_back = [&](real t, real h, const real* y, const real* k, real* later) {
  for (int64_t s = 0; s + 1 < stages; ++s)
    for (int64_t i = 0; i < dim; ++i) bar[s * dim + i] = h * a[stages - 1][s] * later[i];
  for (int64_t s = stages - 2; s >= 0; --s) {
    stage_of(h, y, k, s, point);
    pull_at(t + c[s] * h, point, bar + s * dim, part);
    for (int64_t i = 0; i < dim; ++i) {
      later[i] += part[i];
      for (int64_t j = 0; j < s; ++j) bar[j * dim + i] += h * a[s][j] * part[i];
    }
  }
};
"""

# Rosenbrock methods: `k` are the solutions u of (I / (h gamma) - J) u = rhs, found from one factorisation a step.
_IMPLICIT = """
constexpr int64_t kept = stages * dim;
auto factorise = [&](real t, real h, const real* y) {
  jacobian_at(t, y, system, slant);
  // NaN where a derivative is infinite, which would end all change.
  for (int64_t i = 0; i < dim * dim; ++i) slant[i / dim] += 0 * system[i], system[i] = -system[i];
  for (int64_t i = 0; i < dim; ++i) system[i * dim + i] += 1 / (h * gamma);
  for (int64_t j = 0; j < dim; ++j) {
    int64_t largest = j;
    for (int64_t i = j + 1; i < dim; ++i)
      if (std::abs(system[i * dim + j]) > std::abs(system[largest * dim + j])) largest = i;
    pivots[j] = largest;
    for (int64_t l = 0; largest != j && l < dim; ++l) {
      const real x = system[j * dim + l];
      system[j * dim + l] = system[largest * dim + l];
      system[largest * dim + l] = x;
    }
    for (int64_t i = j + 1; i < dim; ++i) {
      const real ratio = system[i * dim + j] /= system[j * dim + j];
      for (int64_t l = j + 1; l < dim; ++l) system[i * dim + l] -= ratio * system[j * dim + l];
    }
  }
};
auto swapped = [&](real* x, int64_t i) {
  const real kept_number = x[i];
  x[i] = x[pivots[i]];
  x[pivots[i]] = kept_number;
};
auto solve = [&](real* x) {
  for (int64_t i = 0; i < dim; ++i) swapped(x, i);
  for (int64_t i = 0; i < dim; ++i)
    for (int64_t j = 0; j < i; ++j) x[i] -= system[i * dim + j] * x[j];
  for (int64_t i = dim - 1; i >= 0; --i) {
    for (int64_t j = i + 1; j < dim; ++j) x[i] -= system[i * dim + j] * x[j];
    x[i] /= system[i * dim + i];
  }
};
auto stage_of = [&](const real* y, const real* k, int64_t s, real* out) {
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = y[i];
    for (int64_t j = 0; j < s; ++j) out[i] += a[s][j] * k[j * dim + i];
  }
};
auto attempt = [&](real t, real h, const real* y, real* k, real* next, real* error) {
  factorise(t, h, y);
  for (int64_t s = 0; s < stages; ++s) {
    real* u = k + s * dim;
    stage_of(y, k, s, next);
    slope_at(t + c[s] * h, next, u);
    for (int64_t i = 0; i < dim; ++i) {
      for (int64_t j = 0; j < s; ++j) u[i] += couplings[s][j] / h * k[j * dim + i];
      u[i] += h * slants[s] * slant[i];
    }
    solve(u);
  }
  for (int64_t i = 0; i < dim; ++i) next[i] += error[i] = k[(stages - 1) * dim + i];
};
auto renew = [&](real*) {};
"""
_IMPLICIT_BACK = """
auto solve_transposed = [&](real* x) {
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < i; ++j) x[i] -= system[j * dim + i] * x[j];
    x[i] /= system[i * dim + i];
  }
  for (int64_t i = dim - 1; i >= 0; --i)
    for (int64_t j = i + 1; j < dim; ++j) x[i] -= system[j * dim + i] * x[j];
  for (int64_t i = dim - 1; i >= 0; --i) swapped(x, i);
};
auto pull_back = [&](real t, real h, const real* y, const real* k, real* later) {
  for (int64_t i = 0; i < dim * dim; ++i) of_state[i] = of_time[i % dim] = 0;
  factorise(t, h, y);
  for (int64_t s = 0; s < stages; ++s)
    for (int64_t i = 0; i < dim; ++i) bar[s * dim + i] = (s + 1 < stages ? a[stages - 1][s] : 1) * later[i];
  for (int64_t s = stages - 1; s >= 0; --s) {
    real* w = bar + s * dim;
    solve_transposed(w);
    stage_of(y, k, s, point);
    pull_at(t + c[s] * h, point, w, part);
    for (int64_t i = 0; i < dim; ++i) {
      later[i] += part[i];
      of_time[i] += h * slants[s] * w[i];
      for (int64_t j = 0; j < s; ++j) bar[j * dim + i] += a[s][j] * part[i] + couplings[s][j] / h * w[i];
      for (int64_t j = 0; j < dim; ++j) of_state[i * dim + j] += w[i] * k[s * dim + j];
    }
  }
  bend_at(t, y, of_state, of_time, part);
  for (int64_t i = 0; i < dim; ++i) later[i] += part[i];
};
"""

# Steps end at the times of the solution. `t` is the time since the last of them and a step the difference of rounded
# times, so that late times round no step. A cut step is not followed by a much longer or shorter one. The step size is
# controlled by the present and the last error (Hairer, Noersett and Wanner 1993, sections II.4 and IV.2). Without an
# `atol`, the tolerance of a component is relative to its peak, but at least the rounding error of the largest one.
_DRIVER = """
const real* grid = (const real*)pointers[0];
real* tape = nullptr;
int64_t done = 1, steps = 0, room = 0;
bool failed = false, is_late = false;
real t = 0, h = 0, before = 1e-4;
auto larger = [](real x, real y) { return x > y ? x : y; };
auto largest = [&](const real* x) {
  real found = 0;
  for (int64_t i = 0; i < dim; ++i) found = larger(x[i], found);
  return found;
};
for (int64_t i = 0; i < dim; ++i) {
  state[i] = ((const real*)pointers[1])[b * dim + i];
  peak[i] = std::abs(state[i]);
}
arrived(0, state);
if (times > 1) {
  slope_at(grid[0], state, k);
  const real highest = largest(peak), unit = rtol * (highest > 0 ? highest : 1);
  auto norm_of = [&](const real* x, const real* x0) {
    real sum = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const real part = (x[i] - (x0 ? x0[i] : 0)) / (atol > 0 ? atol + rtol * peak[i] : unit);
      sum += part * part;
    }
    return std::sqrt(sum / dim);
  };
  const real size = norm_of(state, nullptr), speed = norm_of(k, nullptr), span = grid[times - 1] - grid[0];
  real first = size < 1e-5 || speed < 1e-5 ? 1e-6 : 0.01 * size / speed;
  first = first < span ? first : span;
  for (int64_t i = 0; i < dim; ++i) next[i] = state[i] + first * k[i];
  slope_at(grid[0] + first, next, error);
  const real turn = norm_of(error, k) / first, most = turn > speed ? turn : speed;
  h = most <= 1e-15 ? first * 1e-3 : std::pow(real(0.01) / most, real(0.2));
  h = most <= 1e-15 && h < 1e-6 ? real(1e-6) : h;
  h = h < 100 * first ? h : 100 * first;
}
for (int64_t tries = 0; done < times && !is_short_of_memory; ++tries) {
  const real origin = grid[done - 1], left = grid[done] - origin - t;
  const real later = h >= left ? t + left : t + (2 * h > left ? left / 2 : h), step = h >= left ? left : later - t;
  failed = tries == most_steps || !(later > t);
  if (failed) break;
  attempt(origin + t, step, state, k, next, error);
  real norm = 0;
  for (int64_t i = 0; i < dim; ++i) reached[i] = larger(std::abs(next[i]), peak[i]);
  const real least = larger(epsilon * largest(reached), smallest);
  for (int64_t i = 0; i < dim; ++i) {
    const real old = std::abs(state[i]), now = std::abs(next[i]);
    const real absolute = atol > 0 ? atol : larger(real(0.01) * rtol * reached[i], least);
    const real part = error[i] / (absolute + rtol * larger(now, old)) + 0 * next[i];
    norm += part * part;
  }
  norm = std::sqrt(norm / dim);
  if (norm <= 1) {
    const bool has_landed = step == left;
    record(origin + t, step, has_landed ? done : -1);
    real factor = real(0.9) * std::pow(norm > 1e-10 ? norm : real(1e-10), real(-0.17)) * std::pow(before, real(0.04));
    factor = factor < 0.2 ? real(0.2) : factor > 10 ? real(10) : factor;
    if (is_late && factor > 1) factor = 1;
    h = step < h && factor == 10 && 10 * step < h ? h : step * factor;
    before = norm > 1e-4 ? norm : real(1e-4);
    is_late = false;
    t = has_landed ? 0 : later;
    for (int64_t i = 0; i < dim; ++i) state[i] = next[i], peak[i] = reached[i];
    renew(k);
    if (has_landed) arrived(done++, state);
  } else {
    const real factor = real(0.9) * std::pow(norm, real(-0.2));
    h = step * (factor > 0.2 ? factor : real(0.2));
    h = t + h == later ? step / 4 : h;  // not the same step again
    is_late = true;
  }
}
"""
# Times below zero ask for the slope and its Jacobian, or for their gradients, at the first time and state, to be
# compared with torch. The gradients of the Jacobian are added to those of the slope.
_SOLUTION = """
if (times < 0) {{
  slope_at(((const real*)pointers[0])[0], (const real*)pointers[1], (real*)pointers[{result}]);
{more}
  return is_short_of_memory;
}}
real* path = (real*)pointers[{result}] + b * times * dim;
auto arrived = [&](int64_t place, const real* y) {{ for (int64_t i = 0; i < dim; ++i) path[place * dim + i] = y[i]; }};
auto record = [](real, real, int64_t) {{}};
{driver}
if (is_short_of_memory) return 1;
for (int64_t i = 0; failed && i < times * dim; ++i) path[i] = NAN;
"""
_GRADIENT = """
if (times < 0) {{
  pull_at(((const real*)pointers[0])[0], (const real*)pointers[1], (const real*)pointers[{cotangent}], part);
{pulled}
{bent}
  return is_short_of_memory;
}}
const real* cotangent = (const real*)pointers[{cotangent}] + b * times * dim;
constexpr int64_t width = 3 + dim + kept;
auto arrived = [](int64_t, const real*) {{}};
{driver}
for (int64_t i = 0; i < dim; ++i) later[i] = 0;
for (int64_t n = steps - 1; !failed && !is_short_of_memory && n >= 0; --n) {{
  const real* row = tape + n * width;
  if (row[2] >= 0)
    for (int64_t i = 0; i < dim; ++i) later[i] += cotangent[(int64_t)row[2] * dim + i];
  pull_back(row[0], row[1], row + 3, row + 3 + dim, later);
}}
std::free(tape);
if (is_short_of_memory) return 1;
for (int64_t i = 0; i < dim; ++i) later[i] += cotangent[i];
bool is_used = false;  // a solution that failed has no gradient where it is used, and elsewhere zero
for (int64_t i = 0; i < times * dim; ++i) is_used |= cotangent[i] != 0;
{results}
"""
_RECORD = """
auto record = [&](real t, real h, int64_t place) {
  if (steps == room) {
    room = room ? 2 * room : 64;
    real* larger = (real*)std::realloc(tape, room * width * sizeof(real));
    if (!larger) {
      is_short_of_memory = true;
      return;
    }
    tape = larger;
  }
  real* row = tape + steps++ * width;
  row[0] = t, row[1] = h, row[2] = place;
  for (int64_t i = 0; i < dim; ++i) row[3 + i] = state[i];
  for (int64_t i = 0; i < kept; ++i) row[3 + dim + i] = k[i];
};
"""


def solution_source(
    method: SteppingMethod,
    slope: Slope,
    examples: Sequence[Tensor],  # time, state and others of one chain
    batched: Sequence[bool],
    settings: tuple[float, float, float],
) -> str:
    """Return C++ of the solution, or "" if the slope has an operation that cannot be written."""
    head, space = _head(method, slope, examples, batched, settings, None)
    if not head:
        return ""
    at, place = "((const real*)pointers[0])[0], (const real*)pointers[1]", len(examples) + 1
    more = f"jacobian_at({at}, (real*)pointers[{place}], (real*)pointers[{place + 1}]);" * method.is_implicit
    body = _SOLUTION.format(result=len(examples), driver=_DRIVER, more=more)
    return batch_source([head, _IMPLICIT if method.is_implicit else _EXPLICIT, body], space=space)


def solution_gradient_source(
    method: SteppingMethod,
    slope: Slope,
    examples: Sequence[Tensor],
    batched: Sequence[bool],
    settings: tuple[float, float, float],
    wanted: Sequence[int],  # places of operands, of which 1 is the state
) -> str:
    """Return C++ of the gradients by the ``wanted`` operands, or ""."""
    moving = [place for place in wanted if place > 1]
    head, space = _head(method, slope, examples, batched, settings, moving)
    if not head:
        return ""
    results, count = [], len(examples) + 1
    for q, place in enumerate(wanted):
        size = examples[place].numel()
        target = f"((real*)pointers[{count + q}] + {f'b * {size}' if batched[place] else '0'})"
        value = "later[i]" if place == 1 else f"total{place}[i]"
        results.append(f"for (int64_t i = 0; i < {size}; ++i) {target}[i] += failed && is_used ? NAN : {value};")
    # The record stands inside the driver's text, after the variables that it uses.
    before, after = _DRIVER.split("arrived(0, state);")
    driver = f"{before}{_RECORD}{after}"
    forward, back = (_IMPLICIT, _IMPLICIT_BACK) if method.is_implicit else (_EXPLICIT, _EXPLICIT_BACK)
    pulled, bent = (
        [
            f"for (int64_t i = 0; i < {examples[place].numel()}; ++i) "
            f"((real*)pointers[{first + q}])[i] = {'part[i]' if place == 1 else f'total{place}[i]'};"
            for q, place in enumerate(wanted)
        ]
        for first in (count, count + len(wanted))
    )
    at, last = "((const real*)pointers[0])[0], (const real*)pointers[1]", count + 2 * len(wanted)
    bent.insert(0, f"bend_at({at}, (const real*)pointers[{last}], (const real*)pointers[{last + 1}], part);")
    places = {"results": "\n".join(results), "pulled": "\n".join(pulled)}
    places["bent"] = "\n".join(bent) if method.is_implicit else ""
    body = _GRADIENT.format(cotangent=len(examples), driver=driver, **places)
    return batch_source([head, forward, back, body], space=space)


def _head(
    method: SteppingMethod,
    slope: Slope,
    examples: Sequence[Tensor],
    batched: Sequence[bool],
    settings: tuple[float, float, float],
    moving: Sequence[int] | None,  # None without gradients
) -> tuple[str, int]:
    """Return the generated functions, which fill in the other operands, coefficients and arrays, and bytes of space."""
    t, y, *others = examples
    dim, real, table = len(y), NUMBER_TYPES[y.dtype], method.table
    functions = [function_source("slope", lambda *x: slope(*x), examples)]
    if method.is_implicit:
        functions.append(function_source("jacobian", lambda *x: jacobian(slope, *x), examples))
    if moving is not None:
        places, later = [place - 2 for place in moving], y.clone()
        functions.append(function_source("pull", lambda t, *x: pull(slope, places, t, *x), [*examples, later]))
        if method.is_implicit:
            given = [*examples, y.new_zeros(dim, dim), later]
            functions.append(function_source("bend", lambda t, *x: bend(slope, places, t, *x), given))
    written = [function for function in functions if function is not None]
    if len(written) < len(functions):
        return "", 0
    operands = "".join(f", x{place}" for place in range(2, len(examples)))
    lines = [
        f"typedef {real} real;",
        f"constexpr int64_t dim = {dim}, stages = {len(table.nodes)};",
        f"constexpr real rtol = {settings[0]!r}, atol = {settings[1]!r}, gamma = {table.gamma!r};",
        f"constexpr real epsilon = {torch.finfo(y.dtype).eps!r}, smallest = {torch.finfo(y.dtype).tiny!r};",
        f"constexpr int64_t most_steps = {int(settings[2])};",
        _array("c", [table.nodes]),
        _array("e", [table.errors]),
        _array("a", table.stages, len(table.nodes)),
        *(function.text for function in written),
    ]
    for place, x in enumerate(others, 2):
        offset = f"b * {x.numel()}" if batched[place] else "0"
        lines.append(
            f"const {NUMBER_TYPES[x.dtype]}* x{place} = (const {NUMBER_TYPES[x.dtype]}*)pointers[{place}] + {offset};"
        )
    arrays, space = _arrays(method, examples, moving)
    lines += [*arrays, "bool is_short_of_memory = false;", f"char* const rest = space + {space};"]
    call = f"is_short_of_memory |= slope::call(rest, &t, y{operands}, out);"
    lines.append(f"auto slope_at = [&](real t, const real* y, real* out) {{ {call} }};")
    if method.is_implicit:
        lines += [
            _array("slants", [table.slants]),
            _array("couplings", table.couplings, len(table.nodes)),
            "auto jacobian_at = [&](real t, const real* y, real* by_state, real* by_time) {",
            f"is_short_of_memory |= jacobian::call(rest, &t, y{operands}, by_state, by_time);",
            "};",
        ]
    if moving is not None:
        lines += _pulls(method, examples, moving, operands)
    return "\n".join(lines), space + max(function.space for function in written)


def _arrays(method: SteppingMethod, examples: Sequence[Tensor], moving: Sequence[int] | None) -> tuple[list[str], int]:
    """Return the declarations of the arrays of a chain, and the bytes of those that are in the caller's memory."""
    y = examples[1]
    dim, real = len(y), NUMBER_TYPES[y.dtype]
    kept = dim * len(method.table.nodes)
    sizes = dict.fromkeys(("state", "next", "error", "peak", "reached"), dim) | {"k": kept}
    if method.is_implicit:
        sizes |= {"system": dim * dim, "slant": dim, "pivots": dim}
    if moving is not None:
        sizes |= {"bar": kept, "point": dim, "part": dim, "later": dim}
        sizes |= {f"{name}{place}": examples[place].numel() for place in moving for name in ("total", "own")}
        if method.is_implicit:
            sizes |= {"of_state": dim * dim, "of_time": dim}
    on_stack, space, lines = sum(sizes.values()) <= _ON_STACK, 0, list[str]()
    for name, size in sizes.items():
        kind = "int64_t" if name == "pivots" else real
        if on_stack:
            lines.append(f"{kind} {name}[{max(size, 1)}];")
        else:
            lines.append(f"{kind}* const {name} = ({kind}*)(space + {space});")
            space += 8 * size
    return lines, space


def _pulls(method: SteppingMethod, examples: Sequence[Tensor], moving: Sequence[int], operands: str) -> list[str]:
    """Return functions that give a gradient by the state and add gradients by others to their totals."""
    lines, own, added = [], "", ""
    for place in moving:
        size = examples[place].numel()
        lines.append(f"for (int64_t j = 0; j < {size}; ++j) total{place}[j] = 0;")
        own += f", own{place}"
        added += f"for (int64_t j = 0; j < {size}; ++j) total{place}[j] += own{place}[j];\n"
    lines += [
        "auto pull_at = [&](real t, const real* y, const real* later, real* out) {",
        f"is_short_of_memory |= pull::call(rest, &t, y{operands}, later, out{own});",
        f"{added}}};",
    ]
    if method.is_implicit:
        lines += [
            "auto bend_at = [&](real t, const real* y, const real* of_state, const real* of_time, real* out) {",
            f"is_short_of_memory |= bend::call(rest, &t, y{operands}, of_state, of_time, out{own});",
            f"{added}}};",
        ]
    return lines


def _array(name: str, rows: Sequence[Sequence[float]], width: int = 0) -> str:
    """Return the C++ of constants, as a matrix with rows of length ``width`` if that is given."""
    texts = [", ".join(repr(x) for x in row) for row in rows]
    if not width:
        return f"constexpr real {name}[] = {{{texts[0]}}};"
    inner = ", ".join(f"{{{text}}}" for text in texts)
    return f"constexpr real {name}[][{width}] = {{{inner}}};"
