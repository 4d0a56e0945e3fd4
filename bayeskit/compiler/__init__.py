"""A compiler of functions of tensors: recorded once, then run by torch's interpreter, by inductor, or as C++.

Everybody's calls are :class:`Engine`, the evaluators of a batched density, traced and compiled where planned work
repays it; :func:`compile_evaluation` and :func:`compile_function`, one function at the shapes of its examples;
:func:`scan`, a recurrence that is one operation of a graph; and :func:`is_traced`. An operation of torch that has code
of its own, such as the solution of a differential equation, takes ``times``, ``batch`` and C++ ``source`` among its
arguments, by which it becomes part of the C++ of a density; the calls from :func:`record` on make such code.
"""

from bayeskit.compiler.compilation import compile_function
from bayeskit.compiler.cost import Cost
from bayeskit.compiler.engine import Compile, Engine, Evaluators, compile_evaluation
from bayeskit.compiler.factorisations import FailingApart
from bayeskit.compiler.native_library import NUMBER_TYPES, batch_source, call_library, has_compiler, library_of
from bayeskit.compiler.native_source import function_source
from bayeskit.compiler.python_text import function_of_text, program_text
from bayeskit.compiler.recurrence import scan
from bayeskit.compiler.tape import Program, record
from bayeskit.compiler.tracing import is_traced

__all__ = [
    "Compile",
    "Cost",
    "Engine",
    "Evaluators",
    "FailingApart",
    "compile_evaluation",
    "compile_function",
    "is_traced",
    "scan",
    # For operations with code of their own.
    "NUMBER_TYPES",
    "Program",
    "batch_source",
    "call_library",
    "function_of_text",
    "function_source",
    "has_compiler",
    "library_of",
    "program_text",
    "record",
]
