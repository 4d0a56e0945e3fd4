"""What control variates and row weights buy: gradient variance, step size and effective draws a second.

Run ``python benchmarks/minibatch_control.py``; about five minutes on one core. The data are those of diabetes (442
patients, 10 measures), and with ``--rows`` simulated ones of many rows; the model is a linear regression with a known
residual variance, whose posterior is known. Every sampler of the SGLD family takes the longest step at which the
variances of its draws are 5 % too large, by the closed form. Printed are the trace of the gradient's variance over that
without control, as formula over the posterior; the step relative to the posterior; the variance found over that of the
posterior; the smallest effective sample size of all coordinates; and effective draws a second of CPU time, compiled,
without warm-up and compilation. ``oracle`` are the probabilities that are best at each point, which need all gradients.
The sampler of ``bayeskit.sample``, which sees all rows, has no bias.
"""

from __future__ import annotations

import argparse
import time

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

import bayeskit as bk
from bayeskit._core.statistics import effective_sample_size
from bayeskit.inference.samplers import SGLD, IndependentRows, Metric, MinibatchTarget, sample_stochastic_gradient

NOISE, BIAS = 0.5, 1.05


def regression(x: Tensor, y: Tensor, batch_size: int | None = None) -> None:
    """Linear regression with a standard normal prior on each weight."""
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ weights, NOISE**0.5), obs=y[rows])


def diabetes() -> tuple[Tensor, Tensor]:
    """Return covariates and outcome, the latter with variance one."""
    x, y = (torch.as_tensor(part) for part in load_diabetes(return_X_y=True))
    return x, (y - y.mean()) / y.std(correction=0)


def simulated(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return ten covariates of unequal spread, and an outcome."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 10, generator=generator, dtype=torch.float64)
    x = x * torch.randn(num_rows, 1, generator=generator, dtype=torch.float64).exp() / 3
    noise = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return x, x @ torch.linspace(-1, 1, 10, dtype=torch.float64) + NOISE**0.5 * noise


def spread(x: Tensor, away: Tensor, chances: Tensor | None) -> float:
    """Return the mean trace of the variance of a gradient estimated from one row; ``away (points, rows)``."""
    total = 0.0
    for one in away:
        slopes = x * one[:, None] / NOISE
        norms = slopes.norm(dim=1)
        p = norms / norms.sum() if chances is None else chances
        used = norms > 0
        total += float((norms[used].square() / p[used]).sum() - slopes.sum(0).square().sum())
    return total / len(away)


def compare(x: Tensor, y: Tensor, batch_size: int, num_draws: int) -> None:
    """Print the table of one data set."""
    n = len(y)
    covariance = torch.linalg.inv(torch.eye(10).double() + x.T @ x / NOISE)
    mean, factor = covariance @ (x.T @ y) / NOISE, torch.linalg.cholesky(covariance)
    metric = Metric.dense(covariance)
    noise = torch.randn(200, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = mean + noise @ factor.mT
    plain, change = y - points @ x.T, (mean - points) @ x.T
    equal = torch.full_like(y, 1 / n)
    base = spread(x, plain, equal)
    both = {"control": "mode", "weights": "optimal"}
    settings = {
        "plain": {"row_order": IndependentRows()},
        "plain, epochs": {},
        "weights": {"weights": "optimal"},
        "control": {"control": "mode", "row_order": IndependentRows()},
        "both": both,
        "svrg": {"control": "svrg"},
    }
    print(f"\n{n} rows, {batch_size} at a time; oracle: {spread(x, plain, None) / base:.4f} alone, ", end="")
    print(f"{spread(x, change, None) / base:.2e} with control")
    print(f"{'':14s}  variance    step  variance found  effective   gradients  seconds  effective a second")
    for name, own in settings.items():
        target = MinibatchTarget.from_pyro(regression, x, y, batch_size=batch_size, compile=True, **own)
        chances = getattr(target.row_order, "probabilities", equal)
        share = f"{spread(x, change if 'control' in own else plain, chances) / base:.2e}"
        share = "" if name in ("svrg", "plain, epochs") else share
        anchor = {"anchor": points.roll(1, 0)} if name == "svrg" else {}  # any other draw: the most cautious choice
        # In coordinates in which the posterior is standard normal.
        estimates = []
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            _, rows = target.next_rows(target.start_rows(len(points), generator), generator)
            estimates.append(target.gradient(points, rows, **anchor) @ factor)
        noise_level = float(torch.stack(estimates).var(0).mean())
        step = (BIAS - 1) / (noise_level / 4 + BIAS / 4)  # (1 + step V / 4) / (1 - step / 4) = BIAS
        kernel = SGLD(step, metric=metric)
        for _ in range(2):  # the second run finds what the first has compiled
            begin = time.process_time()
            draws = sample_stochastic_gradient(target, kernel, 16, 100, num_draws, seed=1, initial=mean, progress=False)
            seconds = time.process_time() - begin
        report(name, share, step, draws, mean, factor, seconds)
    full = bk.Target.from_pyro(regression, x, y, compile=True)
    for _ in range(2):
        begin = time.process_time()
        draws = bk.sample(full, 16, 200, max(50, num_draws // 40), seed=1, progress=False)
        seconds = time.process_time() - begin
    report("bk.sample", "", 0.0, draws, mean, factor, seconds)


def report(name: str, share: str, step: float, draws: bk.Draws, mean: Tensor, factor: Tensor, seconds: float) -> None:
    """Print a row."""
    away = (draws.unconstrained - mean).flatten(0, 1)
    white = torch.linalg.solve_triangular(factor, away.mT, upper=False)
    effective = float(effective_sample_size(draws.unconstrained.movedim(-1, 0)).min())
    print(
        f"{name:14s}{share:>10s}{step:8.4f}{float(white.square().mean()):16.3f}{effective:11.0f}"
        f"{draws.num_gradients:12d}{seconds:9.2f}{effective / seconds:20.0f}",
        flush=True,
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the simulated data")
    parser.add_argument("--draws", type=int, default=4000)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    compare(*diabetes(), 20, settings.draws)
    compare(*simulated(settings.rows), 200, settings.draws)


if __name__ == "__main__":
    main()
