"""The C++ function ``loop`` that serves each row of a batch: its text, its library, its call."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from bayeskit._core.inputs import warn_user
from bayeskit._core.libraries import FLAGS, compiler, load_library, raise_for_status
from bayeskit._core.progress import look
from bayeskit._core.untraceable import first_line
from bayeskit.errors import CompilationWarning

#: Names in C++.
NUMBER_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
VECTOR_FUNCTIONS = "exp log log1p expm1 tanh sin cos"
#: How C++ begins to say what memory it takes from its caller.
_SPACE = "constexpr int64_t space_of_loop"
_LOOP = 'extern "C" int loop('
# The flags of torch's compiler forbid vectors, because its own code writes them out.
_VECTORS = '#pragma GCC optimize("tree-loop-vectorize")'
# Recurrence up to 10, then the asymptotic series with an error below 1e-17; reflection below zero.
_DIGAMMA = """
static double digamma(double x) {
  double result = 0;
  if (x == 0) return std::copysign(INFINITY, -x);
  if (x < 0) {
    if (x == std::floor(x)) return NAN;
    result = -M_PI / std::tan(M_PI * (x - std::nearbyint(x)));
    x = 1 - x;
  }
  for (; x < 10; ++x) result -= 1 / x;
  const double z = 1 / (x * x);
  const double series = z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 - z * (
      691.0 / 32760 - z / 12))))));
  return result + std::log(x) - 0.5 / x - series;
}
"""


def batch_source(lines: Sequence[str], functions: Sequence[str] = (), space: int = 0) -> str:
    """Return the C++ ``loop(void** pointers, int64_t times, int64_t batch, char* space)``, ``lines`` for each ``b``.

    It returns 0, or 1 where memory was not enough. The text begins with the bytes of ``space`` that it needs.
    """
    return "\n".join(
        [
            _VECTORS,
            "#include <cmath>",
            "#include <cstdint>",
            "#include <cstdlib>",
            _vector_functions(),
            *([_DIGAMMA] if "digamma(" in "\n".join([*functions, *lines]) else []),
            # Without a namespace a table inside of a structure is one for all libraries of the process.
            "namespace {",
            *functions,
            "}",
            f"{_SPACE} = {space};",
            f"{_LOOP}void** pointers, int64_t times, int64_t batch, char* space) {{",
            "for (int64_t b = 0; b < batch; ++b) {",
            *lines,
            "}",
            "return 0;",
            "}",
            "",
        ]
    )


@cache
def _vector_functions() -> str:
    """Declare functions that take vectors where the C library has them, exact to two units in the last place."""
    name, version = platform.libc_ver()
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    functions = VECTOR_FUNCTIONS.split()
    if platform.machine() != "x86_64" or name != "glibc" or numbers < [2, 35]:
        declared = [f"using std::{function};" for function in functions]
    else:
        # By another name, because those of the C library set errno; compilers without the attribute call one by one.
        declared = [
            f'{real} {function}({real}) noexcept __asm__("{function}{letter}") '
            '__attribute__((simd("notinbranch"), const));'
            for function in functions
            for real, letter in (("double", ""), ("float", "f"))
        ]
    return "\n".join(["namespace simd {", *declared, "}"])


def named_loop(name: str, source: str) -> str:
    """Return the C++ of a loop as a function with another name, for the text of another loop."""
    return f"static int {name}({source[source.index(_LOOP) + len(_LOOP) :]}"


def space_of_loop(source: str) -> int:
    """Return the bytes of memory that the C++ of a loop takes from its caller."""
    return int(source.partition(f"{_SPACE} = ")[2].partition(";")[0] or 0)


#: Flags of generated code, which has the same digits with any vectors, as no products are fused with sums; of C++14,
#: whose <cmath> takes half of the time to read; whose whole numbers overflow as torch's do.
_CPP_FLAGS = (*FLAGS, "-std=c++14", "-DNDEBUG", "-ffp-contract=off", "-fwrapv")


def has_compiler() -> bool:
    """Tell whether a C++ compiler, which ``torch.compile`` needs on a CPU, is on the path."""
    return compiler() is not None


@lru_cache(maxsize=128)
def library_of(source: str) -> Any:
    """Return the library of C++ source, compiled here or by another process; None if compilation fails."""
    look()  # Ctrl-C at a terminal also ends the compiler, which is not a compilation failure
    try:
        library: Any = load_library("density", {"density.cpp": source}, _CPP_FLAGS)
        library.space = space_of_loop(source)
        return library
    except (OSError, subprocess.SubprocessError) as error:
        look()
        reason = first_line(getattr(error, "stderr", None) or error)
        warn_user(
            f"the generated C++ could not be compiled ({reason}); the same operations run in torch, more slowly",
            CompilationWarning,
        )
        return None


def call_library(library: Any, given: Sequence[Tensor], made: Sequence[Tensor], times: int, batch: int) -> None:
    """Call the function ``loop`` of a library with the pointers of tensors."""
    given = [x.contiguous() for x in given]
    pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(x.data_ptr() for x in (*given, *made)))
    # Most code needs no space, and a tensor for none would cost a tenth of a small density.
    space = torch.empty(library.space, dtype=torch.uint8) if library.space else None
    address = None if space is None else ctypes.c_void_p(space.data_ptr())
    if status := library.loop(pointers, ctypes.c_int64(times), ctypes.c_int64(max(batch, 1)), address):
        raise_for_status(status, "the steps of a differential equation, which its gradient keeps")
