"""Gradients of a logistic regression with much data, beside torch by hand.

    python benchmarks/large_data.py [--num-data 100000] [--dim 50] [--repeats 15]

Prints CPU seconds of value and gradient as ratios to code written by hand for this model, calls interleaved, medians:
traced, as for a few calls, and compiled, as for runs that repay it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk


def regression(x: Tensor, y: Tensor) -> None:
    coefficients = pyro.sample("coefficients", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ coefficients), obs=y)


def by_hand(x: Tensor, y: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        logits = u @ x.T
        value = (y * logits - torch.nn.functional.softplus(logits)).sum(-1) - 0.5 * u.square().sum(-1)
        return value, (y - torch.sigmoid(logits)) @ x - u

    return value_and_gradient


def seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=15)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(settings.num_data, settings.dim, generator=generator, dtype=torch.float64)
    y = (torch.rand(settings.num_data, generator=generator, dtype=torch.float64) < torch.sigmoid(x[:, 0])).double()
    hand = by_hand(x, y)
    targets = {
        name: bk.Target.from_pyro(regression, x, y, compile=name == "compiled") for name in ("traced", "compiled")
    }
    print(f"{settings.num_data} data, {settings.dim} coefficients, one thread; ratio to torch by hand (CPU seconds)")
    for chains in (1, 4, 64):
        u = 0.1 * torch.randn(chains, settings.dim, generator=generator, dtype=torch.float64)
        calls: dict[str, Callable[[], object]] = {"hand": lambda u=u: hand(u)}
        for name, target in targets.items():
            gradient = target.value_and_grad(u)[1]
            error = float((gradient - hand(u)[1]).abs().max() / gradient.abs().max())
            if not error < 1e-12:
                raise SystemExit(f"{name}: the gradient differs by {error:.1e}")
            calls[name] = lambda u=u, target=target: target.value_and_grad(u)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(settings.repeats):
            for name, call in calls.items():
                times[name].append(seconds(call))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = ", ".join(f"{name} {medians[name] / medians['hand']:.2f}" for name in targets)
        print(f"{chains:3d} chains: {ratios} (by hand {1e3 * medians['hand']:.1f} ms)")


if __name__ == "__main__":
    main()
