"""Time one value-and-gradient call of a logistic regression (200 x 8, float64, one thread).

Four ways, in blocks of 20 calls interleaved in one run, medians: Pyro's own potential function with its gradient,
torch written by hand with its gradient worked out on paper, the same with automatic
differentiation, and ``Target.value_and_grad`` compiled and traced only.

    python benchmarks/gradient_speed.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad

import bayeskit as bk


def model(x, y):
    b = pyro.sample("b", dist.Normal(torch.zeros(8, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def by_hand(x, y):
    def call(u):
        logits = u @ x.T
        value = -0.5 * u.square().sum(-1) + (y * logits - torch.nn.functional.softplus(logits)).sum(-1)
        return value, (y - torch.sigmoid(logits)) @ x - u

    return call


def by_autograd(x, y):
    def call(u):
        u = u.detach().requires_grad_(True)
        logits = u @ x.T
        value = -0.5 * u.square().sum(-1) + (y * logits - torch.nn.functional.softplus(logits)).sum(-1)
        return value, torch.autograd.grad(value.sum(), u)[0]

    return call


def interleaved(calls, repeats, block=20):
    """Median milliseconds of each call: blocks of calls in turn, the first of each block to warm the caches."""
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            begin = time.perf_counter()
            for _ in range(block):
                call()
            times[name].append(1e3 * (time.perf_counter() - begin) / block)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    y = (torch.rand(200, generator=generator) < 0.5).double()

    pyro.enable_validation(False)
    _, potential, _, _ = initialize_model(model, model_args=(x, y))
    compiled = bk.Target.from_pyro(model, x, y, compile=True)
    traced = bk.Target.from_pyro(model, x, y, compile=False)
    hand, autograd = by_hand(x, y), by_autograd(x, y)

    for batch in (1, 64, 1024):
        u = torch.randn(batch, 8, generator=generator, dtype=torch.float64)
        beta = torch.ones(batch, dtype=torch.float64)
        calls = {
            "Target, compiled": lambda u=u, beta=beta: compiled.value_and_grad(u, beta),
            "Target, traced": lambda u=u, beta=beta: traced.value_and_grad(u, beta),
            "by hand": lambda u=u: hand(u),
            "by hand, autograd": lambda u=u: autograd(u),
        }
        if batch == 1:
            calls["Pyro potential"] = lambda u=u: potential_grad(potential, {"b": u[0].clone()})
        gap = (compiled.value_and_grad(u, beta)[1] - hand(u)[1]).abs().max()
        medians = interleaved(calls, arguments.repeats)
        print(f"batch {batch}: largest gradient difference to the one by hand {float(gap):.1e}")
        for name, value in medians.items():
            ratio = value / medians["Target, compiled"]
            print(
                f"  {name:20s} {value:9.4f} ms a call   {1e3 * value / batch:9.3f} us a vector   {ratio:6.2f} x Target"
            )


if __name__ == "__main__":
    main()
