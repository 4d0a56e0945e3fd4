"""Gradients of models with a loop over time: the loop as Python writes it, and as `bk.scan` does, traced and compiled.

    python benchmarks/loops_in_time.py --data data/posteriordb

The models are posteriordb's GARCH(1,1), hidden Markov model and predators with their prey, and an ARMA(1,1) on the data
of the first. Of the hidden Markov model, whose chain is a `DiscreteHMM`, the first form is the loop over vectors that a
model runs in which cannot be batched; `forward` is the same model by a loop over time, the forward algorithm.

One thread; processor seconds, ended child processes included, of values and gradients of 4 chains. Calls of all forms
take turns, and each number is the median. Building, tracing and compiling are measured once, in an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import posteriordb_models as models
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit._core.evaluation import with_gradient_loop

GARCH, HMM, PREDATORS = "garch-garch11", "hmm_example-hmm_example", "hudson_lynx_hare-lotka_volterra"
CHAINS, ROUNDS = 4, 9


def loop(step: Callable[..., Any], state: Any, inputs: Any = None, length: int | None = None) -> tuple[Any, Any]:
    """Return what `bk.scan` does, by a loop in Python."""
    columns, layout = torch.utils._pytree.tree_flatten(inputs)
    outputs = []
    for t in range(length if length is not None else len(columns[0])):
        state, output = step(state, torch.utils._pytree.tree_unflatten([x[t] for x in columns], layout))
        outputs.append(output)
    return state, None if outputs[0] is None else torch.stack(outputs)


def arma(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    memory = pyro.sample("memory", dist.Normal(0.0, 2.0))
    shock = pyro.sample("shock", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.HalfCauchy(2.5))

    def step(error: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        now, before = pair
        error = now - (mean + memory * before + shock * error)
        return error, error

    first = y[0] - (mean + memory * mean)
    _, later = bk.scan(step, first, (y[1:], y[:-1]))
    with pyro.plate("time", len(y)):
        pyro.sample("error", dist.Normal(torch.cat([first[None], later]), scale), obs=torch.zeros_like(y))


def forward(y: Tensor) -> None:
    ones = torch.ones(2, dtype=y.dtype)
    theta = torch.stack([pyro.sample(f"theta{k}", dist.Dirichlet(ones)) for k in (1, 2)]).log()
    mu = models.ordered_pair("mu", models.positive_normal("mu_lower", 3.0, 1.0), dist.Normal(10.0, 1.0))
    seen = dist.Normal(mu, 1.0).log_prob(y[:, None])

    def step(joint: Tensor, seen: Tensor) -> tuple[Tensor, None]:
        return torch.logsumexp(joint[:, None] + theta, 0) + seen, None

    last, _ = bk.scan(step, seen[0], seen[1:])
    pyro.factor("y", torch.logsumexp(last, 0))


def seconds() -> float:
    """Return what this process and its ended children have used so far."""
    return sum(os.times()[:4])


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    before = seconds()
    return function(), seconds() - before


def cases(folder: Path) -> dict[str, tuple[Callable[..., None], list[Any]]]:
    data = {name: json.loads((folder / f"{name}.json").read_text())["data"] for name in (GARCH, HMM, PREDATORS)}
    arguments = {name: list(models.POSTERIORS[name].arguments(data[name])) for name in data}
    return {
        "garch11": (models.garch, arguments[GARCH]),
        "ARMA(1,1)": (arma, arguments[GARCH][:1]),
        "Lotka-Volterra": (models.lotka_volterra, arguments[PREDATORS]),
        "HMM": (models.hidden_markov, arguments[HMM]),
        "HMM, forward": (forward, arguments[HMM]),
    }


def made(model: Callable[..., None], arguments: list[Any], compile: bool) -> tuple[bk.Target, Any, list[float]]:
    """Return a target, its evaluator, and the seconds of building, and of tracing and compiling."""
    target, building = timed(lambda: bk.Target.from_pyro(model, *arguments, compile=compile))
    target.cost  # noqa: B018  # counted before any evaluator is made
    evaluate, making = timed(lambda: target.evaluator(CHAINS))
    return target, evaluate, [building, making]


def measure(name: str, model: Callable[..., None], arguments: list[Any], rounds: int) -> None:
    """Print the rows of one model."""
    beta = torch.ones(CHAINS, dtype=torch.float64)
    calls: dict[str, Callable[[Tensor, Tensor], Any]] = {}
    costs: dict[str, list[float]] = {}
    if name == "HMM":
        target, building = timed(lambda: bk.Target.from_pyro(model, *arguments))
        calls["loop over vectors"] = with_gradient_loop(target.density.joint)
        costs["loop over vectors"] = [building, 0.0]
    else:
        with mock.patch.object(bk, "scan", loop):
            target, calls["Python, traced"], costs["Python, traced"] = made(model, arguments, False)
    _, calls["bk.scan, traced"], costs["bk.scan, traced"] = made(model, arguments, False)
    _, calls["bk.scan, compiled"], costs["bk.scan, compiled"] = made(model, arguments, True)
    u = 0.1 * torch.randn(CHAINS, target.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: dict[str, list[float]] = {form: [] for form in calls}
    gradients = {}
    for _ in range(rounds):
        for form, call in calls.items():
            repeats = 1 if not found[form] or found[form][0] > 0.05 else 20
            begin = time.process_time()
            for _ in range(repeats):
                gradients[form] = call(u, beta).gradient
            found[form].append((time.process_time() - begin) / repeats)
    first = next(iter(gradients))
    for form, times in found.items():
        median = statistics.median(times)
        ratio = statistics.median(a / b for a, b in zip(found[first], times, strict=True))
        off = float((gradients[form] - gradients[first]).abs().max() / gradients[first].abs().max())
        building, making = costs[form]
        print(
            f"{name:<15} {form:<18} {1e3 * median:10.3f} {ratio:9.1f} {off:9.1e} {building:9.2f} {making:9.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of posteriordb's files")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    chosen = {k: v for k, v in cases(arguments.data).items() if not arguments.only or k in arguments.only}
    print("a gradient in milliseconds, how many times faster than the first form, how far off it,")
    print("seconds of building, and of tracing (and compiling)")
    print(f"{'model':<15} {'form':<18} {'gradient':>10} {'faster':>9} {'off':>9} {'build':>9} {'make':>9}")
    for name, (model, given) in chosen.items():
        measure(name, model, given, arguments.rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
        main()
