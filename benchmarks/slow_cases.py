"""CPU seconds of comparisons at their defaults on five problems that once took long.

    python benchmarks/slow_cases.py [--cases NAME ...] [--repeats 1]

Prints for each case the CPU seconds of the process, imports not counted, beside the limit, and the verdict beside the
exact log evidence. Each case is run in a process of its own, which has compiled nothing.
"""

from __future__ import annotations

import argparse
import importlib
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk

Case = tuple[bk.Target, float]


def mean_of_many_rows() -> Case:
    """Make the mean of 50,000 rows in single precision."""
    y = torch.as_tensor(np.random.default_rng(1).normal(1.5, 2.0, 50_000), dtype=torch.float32)

    def model(y: torch.Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(y.new_tensor(0.0), 10.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 2.0), obs=y)

    return bk.Target.from_pyro(model, y), normal_evidence(np.ones((len(y), 1)), y.double().numpy(), 2.0, 10.0)


def normal_evidence(design: np.ndarray, y: np.ndarray, noise: float, scale: float) -> float:
    """Return the log evidence of a regression with independent normal coefficients of one scale."""
    n, d = design.shape
    precision = design.T @ design / noise**2 + np.eye(d) / scale**2
    mean = np.linalg.solve(precision, design.T @ y / noise**2)
    residual = y - design @ mean
    quadratic = residual @ residual / noise**2 + mean @ mean / scale**2
    log_det = np.linalg.slogdet(precision)[1] + 2 * d * math.log(scale)
    return float(-0.5 * (n * math.log(2 * math.pi) + 2 * n * math.log(noise) + log_det + quadratic))


def condition_of_1e8() -> Case:
    """Make a normal likelihood in 30 dimensions, with variances over eight orders of magnitude rotated."""
    rotation, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((30, 30)))
    design, y = np.diag(10.0 ** np.linspace(-2, 2, 30)) @ rotation, np.zeros(30)
    x = torch.as_tensor(design)

    def model(y: torch.Tensor) -> None:
        b = pyro.sample("b", dist.Normal(y.new_zeros(30), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ b, 0.01).to_event(1), obs=y)

    return bk.Target.from_pyro(model, torch.as_tensor(y)), normal_evidence(design, y, 0.01, 1.0)


def more_coefficients_than_rows() -> Case:
    """Make a regression with 50 coefficients and 30 rows."""
    rng = np.random.default_rng(3)
    design = rng.standard_normal((30, 50))
    y = design[:, :3].sum(1) + rng.standard_normal(30)
    x = torch.as_tensor(design)

    def model(y: torch.Tensor) -> None:
        b = pyro.sample("b", dist.Normal(y.new_zeros(50), 1.0).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    return bk.Target.from_pyro(model, torch.as_tensor(y)), normal_evidence(design, y, 1.0, 1.0)


def shifted_exponential() -> Case:
    """Make exponential waiting times after an unknown start, with a hard edge at the first of them."""
    y = np.sort(2.0 + np.random.default_rng(4).exponential(1.0, 12))
    n, first = len(y), float(y.min())

    def model(y: torch.Tensor) -> None:
        start = pyro.sample("start", dist.Uniform(y.new_tensor(0.0), 10.0))
        pyro.factor("y", torch.where(start < y.min(), -(y - start).sum(), -torch.inf))

    # The integral over the start of exp(n start - sum y) / 10 from 0 to the first time.
    return bk.Target.from_pyro(model, torch.as_tensor(y)), math.log(math.expm1(n * first) / n / 10) - float(y.sum())


def uniform_box() -> Case:
    """Make a likelihood that is one in a box of two dimensions and zero outside; the draws alone."""

    def model() -> None:
        x = pyro.sample("x", dist.Uniform(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        pyro.factor("inside", torch.where(((x - 0.4).abs() < 0.15).all(-1), 0.0, -torch.inf).to(x))

    return bk.Target.from_pyro(model), math.log(0.3**2)


CASES: dict[str, tuple[Callable[[], Case], float]] = {
    "mean_of_many_rows": (mean_of_many_rows, 10.0),
    "condition_of_1e8": (condition_of_1e8, 15.0),
    "more_coefficients_than_rows": (more_coefficients_than_rows, 10.0),
    "shifted_exponential": (shifted_exponential, 10.0),
    "uniform_box": (uniform_box, 4.0),
}


def run(name: str) -> None:
    """Run one case in this process, and print its row."""
    make, limit = CASES[name]
    for module in ("bayeskit.inference.evidence", "torch._dynamo", "torch._inductor.standalone_compile"):
        importlib.import_module(module)
    begin = time.process_time()
    warnings.simplefilter("ignore")
    target, exact = make()
    if name == "uniform_box":
        draws = bk.sample(target, progress=False)
        said = f"bridge {bk.evidence.bridge_sampling(draws.target, draws)}"
    else:
        said = str(bk.evidence.compare(target, progress=False).verdict)
    seconds = time.process_time() - begin
    print(f"{name:28s} {seconds:6.1f} CPU s (limit {limit:g}); exact {exact:.4f}; {said[:150]}", flush=True)


def main() -> None:
    """Run each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this process")
    arguments = parser.parse_args()
    for name in arguments.cases * arguments.repeats:
        if arguments.here:
            run(name)
        else:
            subprocess.run([sys.executable, __file__, "--here", "--cases", name], check=True)


if __name__ == "__main__":
    main()
