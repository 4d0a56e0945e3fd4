"""Information of experiments between two bounds, beside closed forms and quadratures, with the gap and its cost.

Run from the project's root: ``python benchmarks/information_bounds.py``, with ``--num-outer`` and ``--num-inner`` for
other numbers of draws. The gap between the bounds has to be below 0.01 nats in ten processor seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit.inference._experiments import information_gradient

DOUBLE = torch.float64


def pair(rho: Tensor) -> None:
    """Draw two normal variables of a correlation."""
    theta = pyro.sample("theta", dist.Normal(torch.zeros_like(rho), 1.0))
    pyro.sample("y", dist.Normal(rho * theta, (1 - rho * rho).sqrt()))


def regression(x: Tensor, with_shift: bool) -> None:
    """Regress on some columns, with a further unknown that is not asked for."""
    theta = pyro.sample("theta", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    shift = pyro.sample("shift", dist.Normal(x.new_zeros(()), 2.0)) if with_shift else 0.0
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ theta + shift, 0.5))


def answers(x: Tensor) -> None:
    """Draw yes or no to questions of different slopes."""
    theta = pyro.sample("theta", dist.Normal(x.new_zeros(()), 2.0))
    with pyro.plate("questions", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x * theta))


def of_answers(x: Tensor) -> Tensor:
    """Return the information by a sum over all answers and a quadrature."""
    grid = torch.linspace(-20, 20, 20001, dtype=DOUBLE)
    weights = dist.Normal(0.0, 2.0).log_prob(grid).exp() * (grid[1] - grid[0])
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=DOUBLE)] * len(x))
    log_p = dist.Bernoulli(logits=(grid[:, None] * x)[:, None]).log_prob(every).sum(-1)
    marginal = (weights[:, None] * log_p.exp()).sum(0)
    return (weights[:, None] * log_p.exp() * (log_p - marginal.log())).sum()


def main() -> None:
    """Print one row for each twin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-outer", type=int, default=5000)
    parser.add_argument("--num-inner", type=int, default=100)
    numbers = parser.parse_args()
    options: dict[str, Any] = {"of": ["theta"], "about": ["y"], **vars(numbers)}
    rho, x = torch.tensor(0.9, dtype=DOUBLE), torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).double()
    slopes, one, ones = (
        torch.tensor([0.5, 1.0, -1.0], dtype=DOUBLE),
        torch.eye(10).double(),
        torch.ones(10, 10).double(),
    )
    without, shifted = 0.25 * one, 0.25 * one + 4 * ones

    def closed(noise: Tensor) -> float:
        return 0.5 * float(torch.logdet(noise + x @ x.T) - torch.logdet(noise))

    twins: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
        "bivariate normal, 0.9": (pair, (rho,), -0.5 * math.log(1 - 0.81)),
        "regression, 4 unknowns": (regression, (x, False), closed(without)),
        "with another unknown": (regression, (x, True), closed(shifted)),
        "three answers": (answers, (slopes,), float(of_answers(slopes))),
    }
    print(
        "| twin | exactly | lower | upper | gap | standard error | processor seconds |\n|---|---|---|---|---|---|---|"
    )
    for name, (model, args, truth) in twins.items():
        begin = time.process_time()
        found = bk.information(model, *args, **options)
        seconds = time.process_time() - begin
        row = (truth, found.lower, found.upper, found.gap, found.standard_error)
        print(f"| {name} | " + " | ".join(f"{number:.5f}" for number in row) + f" | {seconds:.1f} |", flush=True)
    slope = information_gradient(pair, rho, **options)
    print(f"\ngradient at 0.9: {float(slope.gradient):.3f} +- {float(slope.standard_error):.3f}, exactly 4.736842")


if __name__ == "__main__":
    main()
