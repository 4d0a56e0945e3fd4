"""Functions of tensors, traced once, and run by torch's interpreter, by inductor, or as generated C++.

:class:`Engine` has the evaluators of a batched density, one for each number of vectors. :func:`compile_evaluation` and
:func:`compile_function` compile one function for tensors like its examples. :func:`scan` is a recurrence in time, one
operation of a graph. :func:`is_traced` tells a function that it is being traced.

The other functions serve operations of torch that have generated code, such as solutions of differential equations.
Such an operation has the arguments ``tensors``, ``times``, ``batch`` and ``source``, which is C++ of
:func:`batch_source`, and becomes part of the C++ of a density.
"""

from bayeskit._compiler.compilation import compile_function
from bayeskit._compiler.cost import Cost
from bayeskit._compiler.engine import Compile, Engine, Evaluators, compile_evaluation
from bayeskit._compiler.factorisations import FailingApart
from bayeskit._compiler.native_library import NUMBER_TYPES, batch_source, call_library, has_compiler, library_of
from bayeskit._compiler.native_source import function_source
from bayeskit._compiler.python_text import function_of_text, program_text
from bayeskit._compiler.recurrence import scan
from bayeskit._compiler.tape import Program, record
from bayeskit._compiler.tracing import is_traced

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
