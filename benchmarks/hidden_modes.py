"""Runs of `bk.sample` on five targets with two to four modes: how often chains stay in some of them without a word.

python benchmarks/hidden_modes.py [--seeds 8]
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk

DOUBLE = torch.float64


@dataclass(frozen=True)
class Several:
    """A model with several modes, and the number of the mode that a point belongs to."""

    name: str
    model: Callable[[], None]
    mode_of: Callable[[Tensor], Tensor]  # (*batch, d) -> (*batch)
    num_modes: int


def mixture(centres: list[list[float]], deviations: list[float], weights: list[float]) -> Callable[[], None]:
    """Return a model whose likelihood is a mixture of normal densities."""
    places, d = torch.tensor(centres, dtype=DOUBLE), len(centres[0])

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(d, dtype=DOUBLE), 3.0).to_event(1))
        parts = [
            math.log(weight) + dist.Normal(place, deviation).log_prob(x).sum(-1)
            for place, deviation, weight in zip(places, deviations, weights, strict=True)
        ]
        pyro.factor("likelihood", torch.stack(parts).logsumexp(0))

    return model


def square() -> None:
    """Observe the square of a coordinate."""
    x = pyro.sample("x", dist.Normal(torch.zeros(2, dtype=DOUBLE), 3.0).to_event(1))
    pyro.sample("y", dist.Normal(x[..., 0].square(), 0.3), obs=torch.tensor(4.0, dtype=DOUBLE))


def two_camps() -> None:
    """Observe two groups of data that a Cauchy distribution takes for outliers, one or the other."""
    mean = pyro.sample("mean", dist.Normal(torch.tensor(0.0, dtype=DOUBLE), 20.0))
    y = torch.tensor([-5.0, -5.1, -4.9, -5.05, 5.0, 5.1, 4.9, 5.02], dtype=DOUBLE)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(torch.tensor(1.0, dtype=DOUBLE), mean, 0.1), obs=y)


def side(x: Tensor) -> Tensor:
    """Return the side of the origin of the mean coordinate."""
    return (x.mean(-1) > 0).long()


CASES = (
    Several("two, far", mixture([[-4.0] * 3, [4.0] * 3], [0.5, 0.5], [0.5, 0.5]), side, 2),
    Several(
        "four",
        mixture([[-4.0, -4.0], [4.0, 4.0], [-4.0, 4.0], [4.0, -4.0]], [0.5, 0.3, 0.6, 0.4], [0.25] * 4),
        lambda x: 2 * (x[..., 0] > 0).long() + (x[..., 1] > 0).long(),
        4,
    ),
    Several("narrow", mixture([[0.0] * 4, [3.0] * 4], [1.0, 0.1], [0.6, 0.4]), lambda x: (x.mean(-1) > 2.5).long(), 2),
    Several("square", square, lambda x: (x[..., 0] > 0).long(), 2),
    Several("two camps", two_camps, side, 2),
)


def main() -> None:
    """Print a row for each run, and the number of silent ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    arguments, silent, count = parser.parse_args(), 0, 0
    for case in CASES:
        for seed in range(arguments.seeds):
            begin = time.process_time()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                draws = bk.sample(case.model, seed=seed, progress=False)
            visited = len(case.mode_of(draws.unconstrained).unique())
            missed = visited < case.num_modes and not seen
            silent, count = silent + missed, count + 1
            said = str(seen[0].message)[:110] if seen else "no warning"
            word, seconds = "SILENT" if missed else "said", time.process_time() - begin
            print(
                f"{word:6s} {case.name:10s} seed {seed}: {visited} of {case.num_modes} modes, {seconds:.1f} s; {said}"
            )
    print(f"chains in some of the modes without a word: {silent} of {count} runs")


if __name__ == "__main__":
    main()
