"""A compiler of functions of tensors: recorded once, then run by torch's interpreter, by inductor, or as C++."""

from bayeskit.compiler.compilation import compile_graph
from bayeskit.compiler.cost import CHUNK_BYTES, Cost, recorded
from bayeskit.compiler.engine import Compile, Engine, Evaluators
from bayeskit.compiler.factorisations import FailingApart, UncheckedFactors
from bayeskit.compiler.graph_passes import trace_call
from bayeskit.compiler.inductor import compile_with_inductor, settle
from bayeskit.compiler.native_evaluator import NativeEvaluator
from bayeskit.compiler.native_library import NUMBER_TYPES, batch_source, call_library, has_compiler, library_of
from bayeskit.compiler.native_source import function_source
from bayeskit.compiler.python_text import function_of_text, program_text
from bayeskit.compiler.recurrence import scan
from bayeskit.compiler.tape import NoSites, Program, Tape
from bayeskit.compiler.tracing import is_traced, traced

__all__ = [
    "CHUNK_BYTES",
    "Compile",
    "Cost",
    "Engine",
    "Evaluators",
    "FailingApart",
    "NUMBER_TYPES",
    "NativeEvaluator",
    "NoSites",
    "Program",
    "Tape",
    "UncheckedFactors",
    "batch_source",
    "call_library",
    "compile_graph",
    "compile_with_inductor",
    "function_of_text",
    "function_source",
    "has_compiler",
    "is_traced",
    "library_of",
    "program_text",
    "recorded",
    "scan",
    "settle",
    "trace_call",
    "traced",
]
