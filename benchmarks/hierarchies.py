"""Centred hierarchies at the defaults of `bk.sample`, with and without automatic centring, against quadrature.

For each model and seed: divergences, smallest bulk and tail effective sizes, the largest |z| of means and standard
deviations of log scales and means of groups, and CPU seconds, all compilation included. The truth is integrated on a
grid over log scales; effects are integrated out analytically, or on a grid of their own.

Usage::

    python benchmarks/hierarchies.py [--seeds 7] [--only NAME ...] [--modes auto False]
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pyro  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402
from scipy import stats  # noqa: E402
from scipy.special import expit, logsumexp  # noqa: E402

import bayeskit as bk  # noqa: E402
from bayeskit import exact  # noqa: E402
from bayeskit._core.statistics import effective_sample_size  # noqa: E402

Moments = dict[str, tuple[float, float]]  # mean and standard deviation of each quantity


class Problem(NamedTuple):
    """A model with its data, the true moments of some quantities, and these quantities of draws."""

    model: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    truth: Moments
    quantities: Callable[[Any], dict[str, torch.Tensor]]


def summed_up(grids: list[np.ndarray], log_weight: np.ndarray, means: Moments | dict[str, Any]) -> Moments:
    """Return moments of log scales on the grids, and of other quantities with conditional means and variances."""
    weight = np.exp(log_weight - logsumexp(log_weight))
    found = {}
    for axis, grid in enumerate(grids):
        marginal = weight.sum(tuple(k for k in range(weight.ndim) if k != axis))
        mean = marginal @ grid
        found[f"log_tau{axis}" if len(grids) > 1 else "log_tau"] = (mean, np.sqrt(marginal @ (grid - mean) ** 2))
    for name, (mean, variance) in means.items():
        overall = (weight * mean).sum()
        found[name] = (overall, np.sqrt((weight * (variance + (mean - overall) ** 2)).sum()))
    return found


def normal_truth(
    y: np.ndarray,
    noise: np.ndarray,
    designs: list[np.ndarray],
    log_priors: list[Callable[[np.ndarray], np.ndarray]],
    fixed: dict[str, tuple[np.ndarray, float]],
    grid: np.ndarray,
) -> Moments:
    """Integrate normal effects: ``y ~ N(sum of fixed * normal + designs @ effects, noise^2)``, scales on a grid."""
    grids = [grid] * len(designs)
    mesh = np.stack(np.meshgrid(*grids, indexing="ij"), -1).reshape(-1, len(designs))
    base = np.diag(noise**2) + sum(s**2 * np.outer(x, x) for x, s in fixed.values())
    crossed = [z @ z.T for z in designs]
    log_weight, means = np.empty(len(mesh)), {name: (np.empty(len(mesh)), np.empty(len(mesh))) for name in fixed}
    for k, logs in enumerate(mesh):
        root = np.linalg.cholesky(base + sum(np.exp(2 * t) * zz for t, zz in zip(logs, crossed, strict=True)))
        white = np.linalg.solve(root, np.column_stack([y, *(x for x, _ in fixed.values())]))
        log_weight[k] = -0.5 * white[:, 0] @ white[:, 0] - np.log(np.diag(root)).sum()
        log_weight[k] += sum(prior(t) for prior, t in zip(log_priors, logs, strict=True))
        for place, (name, (_, s)) in enumerate(fixed.items(), 1):
            means[name][0][k] = s**2 * white[:, place] @ white[:, 0]
            means[name][1][k] = s**2 - s**4 * white[:, place] @ white[:, place]
    shape = (len(grid),) * len(designs)
    shaped = {name: (m.reshape(shape), v.reshape(shape)) for name, (m, v) in means.items()}
    return summed_up(grids, log_weight.reshape(shape), shaped)


def grid_truth(
    log_likelihood: Callable[[np.ndarray], np.ndarray],  # of effects (...,) -> (..., groups)
    noise: Callable[[np.ndarray], np.ndarray],  # log density of standardised effects
    z: np.ndarray,
    log_prior: Callable[[np.ndarray], np.ndarray],
    mu_scale: float,
    mu: np.ndarray,
    grid: np.ndarray,
) -> Moments:
    """Integrate the effects ``mu + tau z`` of each group on a grid of ``z``, and ``mu`` and log scale on theirs."""
    log_step = np.log(np.gradient(z)) + noise(z)
    log_weight = np.empty((len(grid), len(mu)))
    for i, t in enumerate(grid):
        for j, m in enumerate(mu):
            terms = log_likelihood(m + np.exp(t) * z) + log_step[:, None]
            log_weight[i, j] = logsumexp(terms, 0).sum() + log_prior(t) + stats.norm.logpdf(m, 0, mu_scale)
    centre = np.broadcast_to(mu, log_weight.shape)
    return summed_up([grid], log_weight.sum(1) * 0 + logsumexp(log_weight, 1), {}) | {
        "mu": summed_up([], log_weight, {"mu": (centre, 0.0)})["mu"]
    }


def of_log(density: Any) -> Callable[[Any], Any]:
    """Return the log density of the logarithm of a scale."""
    return lambda t: density.logpdf(np.exp(t)) + t


def of_log_variance(density: Any) -> Callable[[Any], Any]:
    return lambda t: density.logpdf(np.exp(2 * t)) + 2 * t


def tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.as_tensor(x, dtype=torch.float64) for x in arrays)


GRID = np.linspace(-14, 6, 1201)
PLANE = np.linspace(-8, 4, 97)


def tau_and_mu(draws: Any) -> dict[str, torch.Tensor]:
    return {"log_tau": draws["tau"].log(), "mu": draws["mu"]}


def one_level(prior: Any, density: Any, y: np.ndarray, noise: np.ndarray) -> Problem:
    def model(y, noise):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", prior)
        with pyro.plate("groups", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, noise), obs=y)

    truth = normal_truth(y, noise, [np.eye(len(y))], [of_log(density)], {"mu": (np.ones(len(y)), 5.0)}, GRID)
    return Problem(model, tensors(y, noise), truth, tau_and_mu)


def on_variance(y: np.ndarray, noise: np.ndarray) -> Problem:
    def model(y, noise):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        variance = pyro.sample("variance", dist.InverseGamma(0.5, 0.5))
        with pyro.plate("groups", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, variance.sqrt()))
            pyro.sample("y", dist.Normal(theta, noise), obs=y)

    prior = of_log_variance(stats.invgamma(0.5, scale=0.5))
    truth = normal_truth(y, noise, [np.eye(len(y))], [prior], {"mu": (np.ones(len(y)), 5.0)}, GRID)
    return Problem(
        model, tensors(y, noise), truth, lambda draws: {"log_tau": 0.5 * draws["variance"].log(), "mu": draws["mu"]}
    )


def two_levels(rng: np.random.Generator) -> Problem:
    regions = np.repeat(np.arange(6), 5)
    noise = np.full(30, 1.0)
    y = 2 + rng.normal(0, 1.0, 6)[regions] + rng.normal(0, 0.5, 30) + noise * rng.normal(size=30)

    def model(y, noise, regions):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        between = pyro.sample("between", dist.HalfNormal(2.0))
        within = pyro.sample("within", dist.HalfNormal(2.0))
        with pyro.plate("regions", 6):
            region = pyro.sample("region", dist.Normal(mu, between))
        with pyro.plate("groups", len(y)):
            theta = pyro.sample("theta", dist.Normal(region[regions], within))
            pyro.sample("y", dist.Normal(theta, noise), obs=y)

    priors = [of_log(stats.halfnorm(scale=2.0))] * 2
    designs = [np.eye(6)[regions], np.eye(30)]
    truth = normal_truth(y, noise, designs, priors, {"mu": (np.ones(30), 5.0)}, PLANE)
    args = (*tensors(y, noise), torch.as_tensor(regions))
    return Problem(
        model,
        args,
        truth,
        lambda d: {"log_tau0": d["between"].log(), "log_tau1": d["within"].log(), "mu": d["mu"]},
    )


def varying_slopes(rng: np.random.Generator) -> Problem:
    groups, x = np.repeat(np.arange(10), 6), rng.normal(size=60)
    noise = np.full(60, 1.0)
    y = (1 + rng.normal(0, 1.0, 10))[groups] + (0.5 + rng.normal(0, 0.2, 10))[groups] * x + rng.normal(size=60)

    def model(y, x, noise, groups):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(2.0))
        spread = pyro.sample("spread", dist.HalfCauchy(2.0))
        with pyro.plate("groups", 10):
            a = pyro.sample("a", dist.Normal(mu, tau))
            b = pyro.sample("b", dist.Normal(slope, spread))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a[groups] + b[groups] * x, noise), obs=y)

    one = np.eye(10)[groups]
    priors = [of_log(stats.halfcauchy(scale=2.0))] * 2
    fixed = {"mu": (np.ones(60), 5.0), "slope": (x, 5.0)}
    truth = normal_truth(y, noise, [one, one * x[:, None]], priors, fixed, np.linspace(-12, 4, 97))
    args = (*tensors(y, x, noise), torch.as_tensor(groups))
    return Problem(
        model,
        args,
        truth,
        lambda d: {
            "log_tau0": d["tau"].log(),
            "log_tau1": d["spread"].log(),
            "mu": d["mu"],
            "slope": d["slope"],
        },
    )


def student_effects(rng: np.random.Generator) -> Problem:
    noise = np.full(20, 1.0)
    y = 1 + stats.t(4).rvs(20, random_state=rng) * 1.0 + noise * rng.normal(size=20)

    def model(y, noise):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfNormal(2.0))
        with pyro.plate("groups", len(y)):
            theta = pyro.sample("theta", dist.StudentT(4.0, mu, tau))
            pyro.sample("y", dist.Normal(theta, noise), obs=y)

    truth = grid_truth(
        lambda theta: stats.norm.logpdf(y, theta[:, None], noise),
        stats.t(4).logpdf,
        np.sinh(np.linspace(-7, 7, 401)),
        of_log(stats.halfnorm(scale=2.0)),
        5.0,
        np.linspace(-2, 4, 61),
        np.linspace(-10, 3, 79),
    )
    return Problem(model, tensors(y, noise), truth, tau_and_mu)


def logistic_intercepts(rng: np.random.Generator) -> Problem:
    trials = np.array([5, 5, 5, 8, 8, 8, 10, 10, 10, 12, 12, 12, 20, 20, 40])
    y = rng.binomial(trials, expit(-0.5 + rng.normal(0, 0.6, 15)))

    def model(y, trials):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.Exponential(1.0))
        with pyro.plate("groups", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Binomial(trials, logits=theta), obs=y)

    truth = grid_truth(
        lambda t: -y * np.logaddexp(0, -t[:, None]) - (trials - y) * np.logaddexp(0, t[:, None]),
        stats.norm.logpdf,
        np.linspace(-8, 8, 241),
        of_log(stats.expon()),
        2.0,
        np.linspace(-3, 2, 61),
        np.linspace(-12, 3, 91),
    )
    return Problem(model, tensors(y, trials), truth, tau_and_mu)


def problems() -> dict[str, Callable[[], Problem]]:
    """Return the builders of the problems by name; data are drawn from fixed seeds."""
    schools = exact.eight_schools(centered=True)

    def groups(count: int, tau: float, noise: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        noise = np.broadcast_to(np.asarray(noise, float), (count,)).copy()
        return 1 + rng.normal(0, tau, count) + noise * rng.normal(size=count), noise

    cauchy, half = dist.HalfCauchy(5.0), dist.HalfNormal(2.0)
    sizes = np.array([1, 1, 1, 2, 2, 2, 3, 4, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 900])
    return {
        "eight schools": lambda: one_level(cauchy, stats.halfcauchy(scale=5.0), *(x.numpy() for x in schools.args[:2])),
        "weak data": lambda: one_level(cauchy, stats.halfcauchy(scale=5.0), *groups(20, 0.5, 1.5, 1)),
        "strong data": lambda: one_level(cauchy, stats.halfcauchy(scale=5.0), *groups(20, 1.0, 0.1, 2)),
        "uneven data": lambda: one_level(half, stats.halfnorm(scale=2.0), *groups(20, 0.5, 2 / np.sqrt(sizes), 3)),
        "exponential": lambda: one_level(dist.Exponential(1.0), stats.expon(), *groups(20, 0.7, 1.0, 4)),
        "inverse gamma": lambda: on_variance(*groups(20, 0.7, 1.0, 5)),
        "Student-t": lambda: student_effects(np.random.default_rng(6)),
        "two levels": lambda: two_levels(np.random.default_rng(7)),
        "slopes": lambda: varying_slopes(np.random.default_rng(8)),
        "logistic": lambda: logistic_intercepts(np.random.default_rng(9)),
    }


def scores(x: torch.Tensor, truth: tuple[float, float]) -> tuple[float, float]:
    """Return z of the mean and of the standard deviation of draws ``(chains, draws)``."""
    mean, deviation = truth
    x = x.double()
    error = float(x.std() / effective_sample_size(x).sqrt())
    square = (x - mean).square()
    wide = float(square.std() / effective_sample_size(square).sqrt())
    return (float(x.mean()) - mean) / error, (float(square.mean()) - deviation**2) / wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--modes", nargs="*", default=["auto", "False"])
    options = parser.parse_args()
    # The first call of a process measures the machine.
    bk.sample(exact.get("eight_schools").target(), progress=False)
    print(f"{'model':15} {'mode':5} {'seed':>4} {'div':>4} {'bulk':>5} {'tail':>5} {'|z|':>5}  where    {'CPU s':>5}")
    for name, build in problems().items():
        if options.only and name not in options.only:
            continue
        problem = build()
        target = bk.Target.from_pyro(problem.model, *problem.args)
        for mode in options.modes:
            table = []
            for seed in range(options.seeds):
                target = bk.Target.from_pyro(problem.model, *problem.args)
                begin = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    draws = bk.sample(
                        target, seed=seed, reparameterize="auto" if mode == "auto" else False, progress=False
                    )
                seconds = time.process_time() - begin
                summary = draws.summary()
                found = problem.quantities(draws)
                z = {
                    f"{what} {key}": score
                    for key, x in found.items()
                    for what, score in zip(("mean", "sd"), scores(x, problem.truth[key]), strict=True)
                }
                worst = max(z, key=lambda key: abs(z[key]))
                divergences = int(draws.sample_stats["diverging"].sum())
                row = (divergences, summary.ess_bulk.min(), summary.ess_tail.min(), abs(z[worst]), seconds)
                table.append(row)
                print(
                    f"{name:15} {mode:5} {seed:4} {row[0]:4} {row[1]:5.0f} {row[2]:5.0f} {z[worst]:5.1f}  {worst:12} "
                    f"{seconds:5.1f}  {draws.num_gradients}",
                    flush=True,
                )
            total = np.array(table)
            print(
                f"{name:15} {mode:5} all  divergences {total[:, 0].sum():.0f}, bulk >= {total[:, 1].min():.0f}, "
                f"tail >= {total[:, 2].min():.0f}, |z| <= {total[:, 3].max():.1f}, CPU {np.median(total[:, 4]):.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
