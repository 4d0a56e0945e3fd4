"""Gradient estimators on small problems: bias over many draws, variance per unit cost, and time beside storchastic.

Usage::

    python benchmarks/gradient_estimators.py [--replicates 100000]
    python benchmarks/gradient_estimators.py --speed [--peer-python PATH] [--rounds 15]

Problems: three and eight bits and ten categories, at uniform and at extreme logits. A component of the gradient is
judged where its rarer event is expected 200 times: with 100,000 replicates all of them, for the problem with the rarest
events gets four times as many. Of some 500 components one lies beyond four standard errors in 3 % of all runs: such an
estimator is run again on ten times as many fresh draws, and both are printed. `PATH` is a Python with torch and
storchastic, which runs as a separate program, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bayeskit.inference import gradients  # noqa: E402
from bayeskit.inference.gradients import GradientEstimator  # noqa: E402

DRIVER = Path(__file__).with_name("storchastic_driver.py")
Problem = tuple[object, Callable[[Tensor], Tensor]]


def quadratic(z: Tensor) -> Tensor:
    """Return a function of bits in which pairs of them meet."""
    weights = torch.linspace(1.0, 2.0, z.shape[-1], dtype=torch.float64)
    return ((z - 0.499) * weights).sum(-1).square()


#: Replicates of a problem, in units of what was asked for: one category in 1,800 draws is to be expected 200 times.
TIMES = {"10 categories, extreme": 4}
#: Values of ten categories.
WAVE = torch.sin(1.0 + 3.0 * torch.arange(10.0, dtype=torch.float64)) * 3.0 + 1.0


def problems() -> dict[str, Problem]:
    """Return what gradients are taken of, by name."""

    def bits(*logits: float) -> object:
        return dist.Bernoulli(logits=torch.tensor(logits, dtype=torch.float64)).to_event(1)

    def category(*logits: float) -> object:
        return dist.Categorical(logits=torch.tensor(logits, dtype=torch.float64))

    return {
        "3 bits, uniform": (bits(0.0, 0.0, 0.0), quadratic),
        "3 bits, extreme": (bits(5.0, -4.0, 0.5), quadratic),
        "8 bits, uniform": (bits(*[0.0] * 8), quadratic),
        "8 bits, extreme": (bits(5.0, -4.0, 0.5, 3.0, -3.0, 2.0, -5.0, 1.0), quadratic),
        "10 categories, uniform": (category(*[0.0] * 10), gradients.Table(WAVE)),
        "10 categories, extreme": (category(6.0, 5.0, 0.0, 2.0, 1.0, 4.0, -1.0, 3.0, 0.5, 1.5), gradients.Table(WAVE)),
    }


def curved(z: Tensor) -> Tensor:
    """Return a fixed control variate of relaxed points: squares of their entries, with weights."""
    return (z.square() * torch.linspace(1.0, -0.5, z.shape[-1], dtype=torch.float64)).sum(-1)


def linear(z: Tensor) -> Tensor:
    """Return a control variate whose expectation is known: a weighted sum of bits."""
    return (z * torch.linspace(1.0, 2.0, z.shape[-1], dtype=torch.float64)).sum(-1)


def estimators(binary: bool) -> list[GradientEstimator]:
    """Return all that claim to be unbiased."""
    coarse = WAVE.round()
    if binary:
        control = gradients.ControlVariate(linear, lambda q: linear(q.mean))
    else:
        control = gradients.ControlVariate(gradients.Table(coarse), lambda q: (q.probs * coarse).sum(-1))
    found: list[GradientEstimator] = [
        gradients.ScoreFunction(),
        gradients.ScoreFunction(4, baseline=gradients.MovingAverage()),
        control,
        gradients.LeaveOneOut(4),
        gradients.VIMCO(2),
        gradients.RaoBlackwell(3),
        gradients.ImportanceWithoutReplacement(4),
        gradients.UnorderedSet(4),
        gradients.UnorderedSet(4, baseline=True),
        gradients.REBAR(),
        gradients.RELAX(curved),
    ]
    return [*found, gradients.ARM(2), gradients.DisARM(2)] if binary else found


def table(replicates: int) -> None:
    """Print biases and variances, and how the unordered set compares with leave-one-out."""
    worst, better, few, total = 0.0, [], 0, 0
    for name, (distribution, f) in problems().items():
        count = TIMES.get(name, 1) * replicates
        chosen = estimators("bits" in name)
        found = gradients.compare_estimators(distribution, f, chosen, num_replicates=count)
        print(f"\n{name}: {found}", flush=True)
        judged = [x.judged for x in found.results.values()]
        few += sum(int((~x).sum()) for x in judged)
        total += sum(x.numel() for x in judged)
        for estimator, x in zip(chosen, found.results.values(), strict=True):
            if not abs(x.largest_z) < 4:
                again = gradients.compare_estimators(distribution, f, estimator, num_replicates=10 * count, seed=1)
                fresh = next(iter(again.results.values())).largest_z
                print(f"{estimator}: {x.largest_z:.2f}, and {fresh:.2f} on {10 * count} fresh draws", flush=True)
                x = next(iter(again.results.values()))
            worst = max(worst, abs(x.largest_z))
        by_name = {n: x.variance * x.num_evaluations for n, x in found.results.items()}
        ours = min(by_name["UnorderedSet(k=4)"], by_name["UnorderedSet(k=4, baseline=True)"])
        better.append((name, by_name["UnorderedSet(k=4)"], ours, by_name["LeaveOneOut(num_samples=4)"]))
    print(f"\nlargest |z| of all (of the fresh draws, where there are): {worst:.2f}")
    print(f"judged: {total - few} of {total} components")
    print("\nvariance x evaluations at four evaluations")
    print(f"{'':28s}{'unordered set':>16s}{'its better form':>18s}{'leave-one-out':>16s}")
    for name, plain, best, other in better:
        print(f"{name:28s}{plain:16.4g}{best:18.4g}{other:16.4g}")


def single(estimator: GradientEstimator, logits: Tensor, values: Tensor) -> float:
    """Return the seconds of one gradient, as a user takes it in training."""
    begin = time.perf_counter()
    leaf = logits.clone().requires_grad_(True)
    estimator.surrogate(leaf, gradients.Table(values)).backward()
    return time.perf_counter() - begin


def speed(options: argparse.Namespace) -> None:
    """Print the time of one gradient of ten categories with four evaluations, in turns with the peer."""
    logits = torch.zeros(10, dtype=torch.float64)
    values = WAVE
    ours = {
        "score function": gradients.LeaveOneOut(4),
        "unordered set": gradients.UnorderedSet(4),
        "unordered set, baseline": gradients.UnorderedSet(4, baseline=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ours}
    peer: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, estimator in ours.items():
            seconds[name].append(statistics.median(single(estimator, logits, values) for _ in range(40)))
        if options.peer_python:
            command = [options.peer_python, str(DRIVER)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise SystemExit(f"the peer failed:\n{result.stderr[-2000:]}")
            for name, value in json.loads(result.stdout.strip().splitlines()[-1]).items():
                peer.setdefault(name, []).append(value)
    for name, found in seconds.items():
        mine = statistics.median(found)
        print(f"{name:26s} bayeskit {1e3 * mine:7.3f} ms", end="")
        if name in peer:
            theirs = statistics.median(peer[name])
            print(f"   storchastic {1e3 * theirs:7.3f} ms   ratio {mine / theirs:.3f}", end="")
        print()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicates", type=int, default=100_000)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        speed(options)
    else:
        table(options.replicates)


if __name__ == "__main__":
    sys.exit(main())
