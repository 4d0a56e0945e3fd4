"""`draws.loo()` against exact leave-one-out densities, or against sampling again without each datum, on 8 data sets.

All posteriors without a datum are sampled in one batch, four chains each. For each data set one line: elpd both ways
with Monte Carlo errors, the largest Pareto k before and after moment matching, the number of data matched, the
difference of the sums in units of its error, how many of the data with reliable k differ by more than two errors, and
the largest difference in errors. With replicates, also over all posterior runs: the root mean square of z of the sums
and of the data, and the spread of estimates over runs in units of their errors, which are 1 where errors are right.

    python benchmarks/loo.py --data DIR      # a folder with mesquite-logmesquite.json of posteriordb
    python benchmarks/loo.py --replicates 20 --only normal linreg10 radiata_pine eight_schools
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.statistics import mean_error, r_hat
from bayeskit.errors import SamplingWarning
from bayeskit.inference.evidence._judging._constants import bridge
from bayeskit.inference.samplers._weighted_data import WeightedData

STACK_LOSS = """80 27 89 42; 80 27 88 37; 75 25 90 37; 62 24 87 28; 62 22 87 18; 62 23 87 18; 62 24 93 19; 62 24 93 20;
58 23 87 15; 58 18 80 14; 58 18 89 14; 58 17 88 13; 58 18 82 11; 58 19 93 12; 50 18 89 8; 50 18 86 7; 50 19 72 8;
50 19 79 8; 50 20 80 9; 56 20 82 15; 70 20 91 15"""  # Brownlee 1965: air flow, water temperature, acid, loss


class Problem(NamedTuple):
    """A target and, where known, the exact log predictive density of each datum given the others."""

    target: bk.Target
    answer: Tensor | None


def normal_mean(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def regression(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(x[0]), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def counts(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(x[0]), 3.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((x @ beta).exp()), obs=y)


def counts_with_effects(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(x[0]), 3.0).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson((x @ beta + spread * effect).exp()), obs=y)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def with_intercept(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1]), x], 1)


def linear_answer(x: Tensor, y: Tensor, noise_sd: float, prior_sd: float) -> Tensor:
    """Return the normal predictive log densities of a linear regression with known noise."""
    answer = []
    for i in range(len(y)):
        kept = torch.arange(len(y)) != i
        precision = x[kept].T @ x[kept] / noise_sd**2 + torch.eye(x.shape[1], dtype=x.dtype) / prior_sd**2
        mean = torch.linalg.solve(precision, x[kept].T @ y[kept] / noise_sd**2)
        variance = noise_sd**2 + x[i] @ torch.linalg.solve(precision, x[i])
        answer.append(dist.Normal(x[i] @ mean, variance.sqrt()).log_prob(y[i]))
    return torch.stack(answer)


def normal_gamma_answer(x: Tensor, y: Tensor, mean: Tensor, precision: Tensor, shape: float, rate: float) -> Tensor:
    """Return the t predictive log densities of a linear regression with a normal-gamma prior."""
    answer = []
    for i in range(len(y)):
        d, z = x[torch.arange(len(y)) != i], y[torch.arange(len(y)) != i]
        total = torch.diag(precision) + d.T @ d
        centre = torch.linalg.solve(total, precision * mean + d.T @ z)
        a = shape + len(z) / 2
        b = rate + 0.5 * float((z - d @ centre).square().sum() + (precision * (centre - mean).square()).sum())
        scale = math.sqrt(b / a * (1 + float(x[i] @ torch.linalg.solve(total, x[i]))))
        answer.append(dist.StudentT(2 * a, x[i] @ centre, scale).log_prob(y[i]))
    return torch.stack(answer)


def normal() -> Problem:
    y = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y[0] = 9.0
    return Problem(bk.Target.from_pyro(normal_mean, y), linear_answer(torch.ones_like(y).unsqueeze(1), y, 1.0, 10.0))


def linreg10() -> Problem:
    case = exact.get("linreg10")
    x, y, noise_sd, prior_sd = case.args
    return Problem(case.target(), linear_answer(x, y, float(noise_sd), float(prior_sd)))


def radiata_pine() -> Problem:
    case = exact.radiata_pine("x")
    x, y, mean, precision, shape, rate = case.args
    design = torch.stack([torch.ones_like(x), x - x.mean()], 1)
    return Problem(case.target(), normal_gamma_answer(design, y, mean, precision, float(shape), float(rate)))


def eight_schools() -> Problem:
    case = exact.eight_schools()
    y, s = case.args[:2]
    kept = [torch.arange(len(y)) != i for i in range(len(y))]
    less = [exact.eight_schools(y[k], s[k]).log_evidence for k in kept]
    return Problem(case.target(), case.log_evidence - torch.tensor(less, dtype=torch.float64))


def stack_loss() -> Problem:
    table = torch.tensor([list(map(float, row.split())) for row in STACK_LOSS.split(";")], dtype=torch.float64)
    return Problem(bk.Target.from_pyro(regression, with_intercept(standardised(table[:, :3])), table[:, 3]), None)


def overdispersed_counts() -> Problem:
    """Return a Poisson regression whose counts vary more, as the roaches of Gelman and Hill (2007) do."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    slopes = torch.tensor([0.6, -0.4, 0.2], dtype=torch.float64)
    y = torch.poisson((1.5 + x @ slopes + 1.2 * noise).exp(), generator)
    return Problem(bk.Target.from_pyro(counts, with_intercept(x), y), None)


def effects_of_places() -> Problem:
    """Return a Poisson regression with an effect for each count, which no other datum determines."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(30, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(30, generator=generator, dtype=torch.float64)
    y = torch.poisson((1.0 + 0.5 * x[:, 0] + 0.8 * noise).exp(), generator)
    return Problem(bk.Target.from_pyro(counts_with_effects, with_intercept(x), y), None)


def mesquite(folder: Path) -> Problem:
    data = json.loads((folder / "mesquite-logmesquite.json").read_text(encoding="utf-8"))["data"]
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    x = torch.stack([torch.tensor(data[name], dtype=torch.float64).log() for name in names], 1)
    group = torch.tensor(data["group"], dtype=torch.float64).unsqueeze(1)
    y = torch.tensor(data["weight"], dtype=torch.float64).log()
    return Problem(bk.Target.from_pyro(regression, with_intercept(torch.cat([standardised(x), group], 1)), y), None)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "normal": normal,
    "linreg10": linreg10,
    "radiata_pine": radiata_pine,
    "eight_schools": eight_schools,
    "stack_loss": stack_loss,
    "overdispersed_counts": overdispersed_counts,
    "effects_of_places": effects_of_places,
}


def refitted(target: bk.Target, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sample with all data and without each; return log predictive densities and their errors, by bridges of the two.

    The mean likelihood of an outlier at draws without it is no better than the mean inverse at draws with it. NaN where
    the two posteriors do not overlap enough.
    """
    data = WeightedData(target)
    n = data.num_data
    whole = bk.sample(target, num_samples=num_samples, seed=seed, progress=False)
    flat = whole.unconstrained.flatten(0, 1)
    chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))[: 4 * n]
    less = data.counting(1 - torch.eye(n, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # chains of different posteriors do not agree
        found = bk.sample(
            less, num_chains=4 * n, num_samples=num_samples, seed=seed, initial=flat[chosen], progress=False
        )
    worst = max(float(r_hat(part.movedim(-1, 0)).max()) for part in found.unconstrained.chunk(n))
    if worst > 1.02:
        print(f"refitting: R-hat up to {worst:.2f}")
    answer, error = [], []
    each = data.pointwise(whole.unconstrained)
    for i, u in enumerate(found.unconstrained.chunk(n)):
        with_it, without = each[..., i], data.pointwise(u)[..., i]
        found_ratio = bridge(with_it.flatten(), without.flatten())
        value = found_ratio.log_value if found_ratio.reliable else math.nan
        parts = torch.sigmoid(without - value), torch.sigmoid(value - with_it)
        answer.append(value)
        error.append(math.hypot(*(float(mean_error(part) / part.mean()) for part in parts)))
    return torch.tensor(answer, dtype=torch.float64), torch.tensor(error, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mesquite-logmesquite.json of posteriordb")
    parser.add_argument("--only", nargs="+", help="names of data sets")
    parser.add_argument("--samples", type=int, default=1000, help="draws of each of four chains")
    parser.add_argument("--replicates", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pointwise", action="store_true", help="print the data that differ by more than two errors")
    parser.add_argument("--out", type=Path, help="folder for pointwise values")
    given = parser.parse_args()
    problems = PROBLEMS | ({"mesquite": lambda: mesquite(given.data)} if given.data else {})
    pd.set_option("display.width", 200, "display.max_columns", 30)
    rows, tables = [], []
    for name in given.only or problems:
        target, answer = problems[name]()
        truth, truth_error = answer, None if answer is None else torch.zeros_like(answer)
        z_sum, z_each, runs = [], [], []
        for seed in range(given.seed, given.seed + given.replicates):
            draws = bk.sample(target, num_samples=given.samples, seed=seed, progress=False)
            if truth is None or truth_error is None:
                truth, truth_error = refitted(target, given.samples, seed=given.seed + 1000)
            begin = time.process_time()
            score, plain = draws.loo(), draws.loo(moment_matching=False)
            seconds = time.process_time() - begin
            known = truth.isfinite()
            good = (score.pareto_k <= score.threshold) & known
            z = (score.pointwise - truth) / (score.pointwise_error.square() + truth_error.square()).sqrt()
            its_error = float(truth_error[known].square().sum().sqrt())
            elpd, total = float(score.pointwise[known].sum()), float(truth[known].sum())
            z_sum.append((elpd - total) / math.hypot(score.monte_carlo_error, its_error))
            z_each.append(z[good])
            runs.append(torch.stack([score.pointwise, score.pointwise_error]))
            tables.append(score.to_pandas().assign(problem=name, seed=seed, truth=truth, truth_error=truth_error, z=z))
        rows.append(
            {
                "data set": name,
                "n": len(z),
                "compared": int(known.sum()),
                "elpd": round(elpd, 3),
                "error": round(score.monte_carlo_error, 3),
                "truth": round(total, 3),
                "its error": round(its_error, 3),
                "plain": round(float(plain.pointwise[known].sum()), 3),
                "k before": round(float(score.pareto_k_before.max()), 2),
                "k after": round(float(score.pareto_k.max()), 2),
                "matched": int(score.matched.sum()),
                "bad k": int((~(score.pareto_k <= score.threshold)).sum()),
                "z of sum": round(z_sum[-1], 2),
                "|z| > 2": f"{int((z[good].abs() > 2).sum())} of {int(good.sum())}",
                "largest |z|": round(float(z[good].abs().max()), 2),
                "trusted": score.trusted,
                "seconds": round(seconds, 2),
            }
        )
        if given.replicates > 1:
            together, sums = torch.cat(z_each), torch.tensor(z_sum)
            print(
                f"{name}: {given.replicates} runs, rms z of sums {sums.square().mean().sqrt():.2f}, of data "
                f"{together.square().mean().sqrt():.2f}; beyond two errors are {int((sums.abs() > 2).sum())} sums and "
                f"{100 * (together.abs() > 2).double().mean():.1f} % of {len(together)} data"
            )
            # Whatever the truth: refits share the draws of one full posterior, so that their errors do too.
            estimates, errors = torch.stack(runs).unbind(1)
            ratio = (estimates.var(0) / errors.square().mean(0)).mean().sqrt()
            print(
                f"{name}: standard deviation over runs in units of the errors, root mean square over data {ratio:.2f}"
            )
    print(pd.DataFrame(rows).to_string(index=False))
    whole = pd.concat(tables)
    if given.pointwise:
        beyond = whole[(whole.z.abs() > 2)]
        print(beyond[["problem", "seed", "site", "elpd", "monte_carlo_error", "truth", "truth_error", "pareto_k", "z"]])
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        whole.to_csv(given.out / "loo.csv", index=False)


if __name__ == "__main__":
    main()
