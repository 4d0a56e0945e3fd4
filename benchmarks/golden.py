"""Record what every public name computes at fixed seeds, and compare it with an earlier record, bit by bit.

    python benchmarks/golden.py --out before.json
    python benchmarks/golden.py --against before.json [--only doctest page case] [--jobs 2]

Three kinds of unit are run, each in a process of its own:

* ``doctest``: the examples of a module's docstrings, so every public class and function. Recorded are the variables
  that an example leaves behind, under the name of the object that it documents.
* ``page``: a page of the gallery in its small mode. Recorded are the variables that it leaves behind.
* ``case``: every estimator of the evidence on one exact case, at the default budget. Recorded are its estimate, its
  error, its number of evaluations and what it warns of.

Names of modules are not recorded, so that code may move. Of a number all bits are recorded; of an array a digest and a
few numbers, by which the size of a difference is estimated. Bits depend on the processor, on torch and on the compiler:
both records must be made on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import doctest
import hashlib
import importlib
import io
import json
import math
import multiprocessing
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import bayeskit

Entry = list[Any]  # a digest or all bits, and a few numbers
Record = dict[str, list[Entry]]  # as many entries as things of one name, in order
KINDS = ("case", "page", "doctest")
DEPTH = 5
#: Measured on a clock, or different in every process.
NOT_RECORDED = ("seconds", "time", "elapsed", "path", "folder")
NUMBERS_SHOWN = 4


def described(values: np.ndarray) -> Entry:
    """Return a digest of an array's type, shape and bytes, and a few numbers spread over it."""
    values = np.ascontiguousarray(values)
    digest = hashlib.sha256(f"{values.dtype} {values.shape}".encode() + values.tobytes()).hexdigest()[:16]
    shown = values.reshape(-1)[:: max(1, values.size // NUMBERS_SHOWN)][:NUMBERS_SHOWN]
    return [digest, *([float(v) for v in shown.real] if shown.dtype.kind in "biufc" else [])]


def flattened(value: Any, name: str, depth: int = DEPTH) -> Iterator[tuple[str, Entry]]:
    """Yield the numbers, texts and arrays that a value is made of, each with its name."""
    if isinstance(value, bool | str | None):
        yield name, [repr(value)]
    elif isinstance(value, int | float | np.number):
        yield name, [float(value).hex(), float(value)]
    elif isinstance(value, Tensor):
        if value.layout == torch.strided and value.device.type == "cpu":
            value = value.detach()
            yield name, described((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufcUS":
            yield name, described(value)
    elif depth:
        for part, inner in parts(value):
            if not (part.startswith("_") or any(word in part for word in NOT_RECORDED)):
                yield from flattened(inner, f"{name}.{part}", depth - 1)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a container, a dataclass, a module or a table."""
    if isinstance(value, nn.Module):
        yield from value.state_dict().items()
    elif isinstance(value, Mapping | MappingProxyType):
        yield from ((str(key), inner) for key, inner in value.items() if isinstance(key, str | int | tuple))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(index), inner) for index, inner in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif type(value).__name__ in ("DataFrame", "Series"):
        yield from ((str(key), np.asarray(column)) for key, column in value.items())


def variables(namespace: Mapping[str, Any], name: str) -> Record:
    """Return what a script's or an example's variables hold."""
    named = {key: value for key, value in namespace.items() if not key.startswith("_")}
    return {f"{name}: {key[1:]}": [entry] for key, entry in flattened(named, "")}


def seeded() -> None:
    """Start torch's global stream anew, for examples that draw from it, as they may."""
    torch.manual_seed(0)


def of_doctest(module: str) -> Record:
    """Run the examples of a module."""
    record: Record = {}
    found = importlib.import_module(module)
    for test in doctest.DocTestFinder(exclude_empty=True).find(found, module):
        seeded()
        name = test.name.removeprefix(module).strip(".") or module.rpartition(".")[2]
        before = dict(test.globs)
        shown: list[Any] = []
        # Examples are run as if typed: what an expression gives is handed to this hook.
        runner = doctest.DocTestRunner(verbose=False)
        with mock.patch.object(sys, "__displayhook__", shown.append):
            runner.run(test, out=lambda text: None, clear_globs=False)
        left = {key: value for key, value in test.globs.items() if before.get(key, runner) is not value}
        if test.examples:
            record |= variables(left | {"shown": shown}, f"doctest {name}")
    return record


def of_page(path: str) -> Record:
    """Run a page."""
    import runpy

    from bayeskit.gallery._run_script import set_style

    set_style()
    seeded()
    sys.path.insert(0, os.path.dirname(path))
    sys.argv = [path]
    return variables(runpy.run_path(path, run_name="__main__"), f"page {Path(path).stem}")


def of_case(name: str) -> Record:
    """Estimate the evidence of an exact case in every way."""
    from bayeskit.inference import evidence

    table = evidence.compare(bayeskit.exact.get(name).target(), methods="all", seed=0, progress=False)
    rows = table.to_pandas().set_index("method").drop(columns="seconds").to_dict("index")
    return variables(rows, f"case {name}")


def run(unit: tuple[str, str]) -> Record:
    """Run one unit, silently; what it raises is recorded."""
    kind, name = unit
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return {"case": of_case, "page": of_page, "doctest": of_doctest}[kind](name)
    except Exception as error:
        return {f"{kind} {Path(name).stem}: raised": [[f"{type(error).__name__}: {error}"]]}


def units(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Return all units of some kinds, those that may take long first."""
    from bayeskit.gallery import pages

    found = {
        "case": lambda: sorted(bayeskit.exact.CASES),
        "page": lambda: [str(page.path) for page in pages() if not page.missing_packages],
        "doctest": lambda: [
            module.name
            for module in pkgutil.walk_packages(bayeskit.__path__, "bayeskit.")
            if "__main__" not in module.name
        ],
    }
    return [(kind, name) for kind in KINDS if kind in kinds for name in found[kind]()]


def record(kinds: Sequence[str], jobs: int) -> Record:
    """Run all units of some kinds."""
    os.environ["BAYESKIT_SMALL_EXAMPLES"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    # A process is forked from one that has imported everything, and ends with its unit.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch", "pyro", "arviz", "bayeskit", "matplotlib.pyplot", "pandas"])
    gathered: Record = {}
    everything = units(kinds)
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        for count, future in enumerate(as_completed([pool.submit(run, unit) for unit in everything]), 1):
            for name, entries in future.result().items():
                gathered[name] = sorted([*gathered.get(name, []), *entries], key=str)
            print(f"\r{count} of {len(everything)} units", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return dict(sorted(gathered.items()))


def difference(before: Entry, after: Entry) -> str:
    """Say how far two values lie apart."""
    pairs = list(zip(before[1:], after[1:], strict=False))
    if not pairs or len(before) != len(after):
        return f"{before[0]} -> {after[0]}"
    largest = max(abs(a - b) / max(abs(a), abs(b), 1e-300) if a != b else 0.0 for a, b in pairs)
    return "not a number" if math.isnan(largest) else f"about {largest:.1e} of {before[1]:.6g}"


def compare(before: Record, after: Record) -> bool:
    """Print what differs; return whether anything does."""
    changed = [name for name in before if name in after and before[name] != after[name]]
    lost, new = ([name for name in a if name not in b] for a, b in ((before, after), (after, before)))
    for name in changed:
        if len(before[name]) != len(after[name]):
            print(f"changed  {name}  {len(before[name])} of that name -> {len(after[name])}")
        for pair in zip(before[name], after[name], strict=False):
            if pair[0] != pair[1]:
                print(f"changed  {name}  {difference(*pair)}")
    for title, names in (("lost", lost), ("new", new)):
        for name in names:
            print(f"{title:8s} {name}")
    same = len(before) - len(changed) - len(lost)
    print(f"{same} the same, {len(changed)} changed, {len(lost)} lost, {len(new)} new")
    return bool(changed or lost)


def main() -> None:
    """Record, and compare if there is something to compare with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--against", type=Path, help="an earlier record; the exit status is 1 where something differs")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--jobs", type=int, default=2)
    settings = parser.parse_args()
    found = record(settings.only, settings.jobs)
    if settings.out:
        settings.out.write_text(json.dumps(found, indent=0))
    if settings.against:
        earlier = {k: v for k, v in json.loads(settings.against.read_text()).items() if k.split()[0] in settings.only}
        sys.exit(compare(earlier, found))


if __name__ == "__main__":
    main()
