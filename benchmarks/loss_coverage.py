"""What credible regions of loss-based posteriors cover, at weight one and at weights selected anew for each data set.

Three laws: a normal location whose spread the loss does not know, a median, and a regression whose noise grows with a
covariate, in two dimensions, so that no single weight is right for both. Each selector whose target is coverage runs
on every data set. With ``--time`` instead the time of one calibration over 1,000 bootstrap replicates, 200 data and
two parameters.

    python benchmarks/loss_coverage.py --replicates 1000 --resamples 200
    python benchmarks/loss_coverage.py --cases median --selectors posterior_coverage --processes 2
    python benchmarks/loss_coverage.py --time
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.func import vmap

from bayeskit._core.randomness import new_generator, one_thread, validation_kept
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._coverage import BatchSelector, CoverageReport, coverage_report
from bayeskit.inference.generalized._minimizer import hessian_of_loss, influence, minimize
from bayeskit.inference.generalized.calibrate import (
    bootstrap_score_matching,
    information_matching,
    posterior_coverage,
    weighted_likelihood_bootstrap_matching,
)
from bayeskit.parallel import map_tasks

DOUBLE = torch.float64
WHOLE = "weight one"


@dataclass(frozen=True)
class Case:
    """A law of the data, the loss that meets it, and the minimiser of the expected loss."""

    loss: losses.Loss
    num_unknowns: int
    num_data: int
    simulate: Callable[[torch.Generator, int], Any]
    truth: tuple[float, ...]

    def posterior(self) -> GibbsPosterior:
        """Return a posterior with data of the right shape."""
        prior = Flat((self.num_unknowns,)) if self.num_unknowns > 1 else Flat()
        return GibbsPosterior(prior, self.loss, self.simulate(new_generator(0), self.num_data), compile=False)

    def target(self) -> Tensor:
        """Return the truth as the prior's site has it."""
        return torch.tensor(self.truth, dtype=DOUBLE) if self.num_unknowns > 1 else torch.tensor(*self.truth).double()


def heteroskedastic(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Draw outcomes whose noise has the standard deviation of the covariate itself, which lies in (0, 2)."""
    x = 2 * torch.rand(n, generator=generator, dtype=DOUBLE)
    noise = x * torch.randn(n, generator=generator, dtype=DOUBLE)
    return torch.stack([torch.ones(n, dtype=DOUBLE), x], -1), 1 + x + noise


CASES = {
    "location": Case(losses.HalfSquared(), 1, 100, lambda g, n: 2 * torch.randn(n, generator=g, dtype=DOUBLE), (0.0,)),
    "median": Case(losses.Absolute(), 1, 400, lambda g, n: torch.randn(n, generator=g, dtype=DOUBLE), (0.0,)),
    "regression": Case(losses.HalfSquared(losses.linear), 2, 200, heteroskedastic, (1.0, 1.0)),
}


def information_weights(posterior: GibbsPosterior, data: Any) -> Tensor:
    """Match information in all data sets at once, ``(R,)``: what ``information_matching`` does one by one."""
    position = minimize(posterior, data=data).position

    def one(u: Tensor, x: Any) -> Tensor:
        each, hessian = influence(posterior, u, x), hessian_of_loss(posterior, u, x)
        away = each - each.mean(0)
        covariance = away.mT @ away / len(each)
        ratio = hessian @ torch.linalg.solve(covariance, hessian)
        return torch.einsum("ii->", ratio) / torch.einsum("ii->", hessian)

    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        result: Tensor = vmap(one, chunk_size=50)(position, data)
    return result


def selected(name: str, posterior: GibbsPosterior, num_resamples: int) -> float:
    """Return the weight that one selector gives one data set."""
    if name == "posterior_coverage":
        return posterior_coverage(posterior, num_replicates=num_resamples, num_draws=128).weight
    if name == "bootstrap_score_matching":
        return bootstrap_score_matching(posterior, num_replicates=num_resamples).weight
    if name == "weighted_likelihood_bootstrap_matching":
        return weighted_likelihood_bootstrap_matching(posterior, num_replicates=num_resamples).weight
    return information_matching(posterior).weight


SELECTORS = (
    WHOLE,
    "information_matching",
    "bootstrap_score_matching",
    "posterior_coverage",
    "weighted_likelihood_bootstrap_matching",
)


@dataclass(frozen=True)
class Task:
    """One data set whose weight a process of its own may select."""

    case: str
    selector: str
    num_resamples: int
    data: Any


def run_task(task: Task) -> float:
    """Return the weight of one data set; a function, so that it can travel."""
    posterior = CASES[task.case].posterior().with_data(task.data)
    return selected(task.selector, posterior, task.num_resamples)


def report(case: str, selector: str, arguments: argparse.Namespace) -> CoverageReport:
    """Return the coverage of one selector in one case."""
    law = CASES[case]

    def weights(posterior: GibbsPosterior, data: Any) -> Tensor:
        if selector == "information_matching":
            return information_weights(posterior, data)
        # Copies, for a view would take the data of all replicates with it to the other process.
        sets = zip(*data, strict=True) if isinstance(data, tuple) else data
        copies = [tuple(x.clone() for x in one) if isinstance(one, tuple) else one.clone() for one in sets]
        tasks = [Task(case, selector, arguments.resamples, one) for one in copies]
        name = f"{case}-{selector}"
        folder = arguments.checkpoint and arguments.checkpoint / name
        found = map_tasks(run_task, tasks, num_jobs=arguments.processes, checkpoint=folder, description=name)
        return torch.tensor(found, dtype=DOUBLE)

    def simulate(generator: torch.Generator) -> Any:
        return law.simulate(generator, law.num_data)

    weight: Any = 1.0 if selector == WHOLE else BatchSelector(weights)
    return coverage_report(law.posterior(), simulate, law.target(), weight, num_replicates=arguments.replicates)


def one_calibration() -> None:
    """Print how long one calibration by posterior coverage takes."""
    design, outcome = heteroskedastic(new_generator(1), 200)
    for name, loss in (
        ("half squared error", losses.HalfSquared(losses.linear)),
        ("absolute error", losses.Absolute(losses.linear)),
    ):
        posterior = GibbsPosterior(Flat((2,)), loss, (design, outcome), compile=False)
        wall, cpu = time.perf_counter(), time.process_time()
        found = posterior_coverage(posterior)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{name:20s} {wall:6.1f} s on the clock, {cpu:5.1f} s of one core: {found!r}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, default=list(SELECTORS))
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="folder that keeps the weights of a run that is stopped")
    parser.add_argument("--time", action="store_true", help="time one calibration instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.time:
        one_calibration()
    else:
        coverage_table(arguments)


def coverage_table(arguments: argparse.Namespace) -> None:
    """Print the coverage of every selector in every case, row by row as they come and then together."""
    rows = []
    for case in arguments.cases:
        for selector in arguments.selectors:
            started = time.perf_counter()
            found = report(case, selector, arguments)
            row = {"case": case, "selector": selector, "weight": float(found.weight.median())}
            table = found.to_pandas()
            for region, share in table[table["level"] == 0.95].set_index("region")["coverage"].items():
                row[str(region)] = 100 * share
            spread = found.mismatch.tolist()
            row |= {"least_mismatch": spread[0], "most_mismatch": spread[-1]}
            row |= {"trusted": float(found.trusted.double().mean()), "seconds": time.perf_counter() - started}
            rows.append(row)
            print(pd.DataFrame(rows[-1:]).to_string(index=False, float_format=lambda x: f"{x:.4g}"), flush=True)
    print(f"\ncoverage in % of nominal 95 %, standard error {100 * math.sqrt(0.0475 / arguments.replicates):.2f}")
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda x: f"{x:.4g}"))


if __name__ == "__main__":
    main()
