"""Amortised posteriors beside exact ones: divergence at each size, evidence after correction, calibration.

    python benchmarks/amortized_posteriors.py --out results
    python benchmarks/amortized_posteriors.py --models normal_mean mixture --steps 5000 --datasets 200 --sbc 1000
    python benchmarks/amortized_posteriors.py --models mixture --encoding attention

For each model a network is trained at the defaults. Then, at each size: the mean and the largest divergence KL(exact
posterior, network) over data sets, in nats; the divergence of a normal fitted to 10,000 draws before and after the
correction, from exact moments, beside what draws of the exact posterior would have; and, over data sets of random
sizes, z of the corrected evidence, which has standard deviation 1 where its error is right. With --sbc the ranks of
simulation-based calibration.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk

FLOAT = torch.float64
SIZES = (1, 2, 5, 10, 20, 50, 100, 200)


def normal_mean(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def coin(y):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(share), obs=y)


def regression(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(3, dtype=FLOAT), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ weights, 0.5), obs=y)


def mixture(y):
    means = pyro.sample("means", dist.Normal(torch.tensor([-1.0, 1.0], dtype=FLOAT), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        component = dist.Categorical(torch.tensor([0.3, 0.7], dtype=FLOAT))
        pyro.sample("y", dist.MixtureSameFamily(component, dist.Normal(means, 0.5)), obs=y)


def newcomb(times):
    """Draw as the model of the page on one network for all sample sizes does."""
    mean = pyro.sample("mean", dist.Normal(25.0, 10.0))
    spread = pyro.sample("spread", dist.LogNormal(2.0, 0.7))
    with pyro.plate("measurements", len(times)):
        pyro.sample("times", dist.Normal(mean, spread), obs=times)


def _grid(target, dim):
    """Return points ``(m, d)``, exact log posterior ``(m,)`` and log evidence by the trapezium rule on a fine grid."""
    prior = target.sample_prior(2000, seed=0)
    low, high = prior.amin(0) - prior.std(0), prior.amax(0) + prior.std(0)
    axes = [
        torch.linspace(float(a), float(b), 4001 if dim == 1 else 401, dtype=FLOAT)
        for a, b in zip(low, high, strict=True)
    ]
    for _ in range(3):  # narrow the grid to where the posterior is
        points = torch.cartesian_prod(*axes).reshape(-1, dim)
        density = target.log_density(points)
        inside = points[density > density.max() - 45]
        low, high = inside.amin(0), inside.amax(0)
        axes = [
            torch.linspace(float(a) - (x[1] - x[0]), float(b) + (x[1] - x[0]), len(x), dtype=FLOAT)
            for a, b, x in zip(low, high, axes, strict=True)
        ]
    points = torch.cartesian_prod(*axes).reshape(-1, dim)
    density = target.log_density(points)
    cell = math.prod(float(x[1] - x[0]) for x in axes)
    total = float(density.logsumexp(0)) + math.log(cell)
    return points, density - total, cell, total


def _normal_regression(x, y):
    """Return mean, covariance and log evidence of the conjugate regression."""
    precision = torch.eye(3, dtype=FLOAT) + x.T @ x / 0.25
    covariance = torch.linalg.inv(precision)
    mean = covariance @ (x.T @ y) / 0.25
    whole = 0.25 * torch.eye(len(y), dtype=FLOAT) + x @ x.T
    zero = torch.zeros(len(y), dtype=FLOAT)
    return mean, covariance, float(torch.distributions.MultivariateNormal(zero, whole).log_prob(y))


@dataclass(frozen=True)
class Twin:
    """A model, its arguments of a size, and how its posterior is known."""

    model: Callable
    arguments: Callable
    dim: int
    sizes: tuple[int, int] | None = (1, 200)


def _zeros(size):
    return (torch.zeros(size, dtype=FLOAT),)


def _predictors(size):
    return torch.randn(size, 3, dtype=FLOAT), torch.zeros(size, dtype=FLOAT)


def _case(name):
    case = bk.exact.eight_schools() if name == "eight_schools" else bk.exact.linear_regression()
    return Twin(case.model, case.args, 10, None)


TWINS = {
    "normal_mean": Twin(normal_mean, _zeros, 1),
    "coin": Twin(coin, _zeros, 1),
    "regression": Twin(regression, _predictors, 3),
    "mixture": Twin(mixture, _zeros, 2),
    "newcomb": Twin(newcomb, _zeros, 2),
    "linear_regression": None,
    "eight_schools": None,
}


def exact(name, data, target):
    """Return (draws or points, log posterior, weights, log evidence, mean, covariance) of the exact posterior."""
    if name == "regression":
        mean, covariance, total = _normal_regression(*data)
        posterior = torch.distributions.MultivariateNormal(mean, covariance)
        points = mean + torch.randn(4000, 3, dtype=FLOAT) @ torch.linalg.cholesky(covariance).T
        log_posterior, weights = posterior.log_prob(points), torch.full((4000,), 1 / 4000, dtype=FLOAT)
        return points, log_posterior, weights, total, mean, covariance
    if name in ("eight_schools", "linear_regression"):
        total = _exact_evidence(name, data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draws = bk.sample(target, num_samples=1000, progress=False)
        points = draws.unconstrained.flatten(0, 1)
        weights = torch.full((len(points),), 1 / len(points), dtype=FLOAT)
        return points, target.log_density(points) - total, weights, total, points.mean(0), points.T.cov()
    points, log_posterior, cell, total = _grid(target, target.dim)
    weights = log_posterior.exp() * cell
    mean = weights @ points
    return points, log_posterior, weights, total, mean, (weights * (points - mean).T) @ (points - mean)


def _exact_evidence(name, data):
    if name == "eight_schools":
        return bk.exact.eight_schools(data[0], data[1]).log_evidence
    return bk.exact.linear_regression(data[0], data[1]).log_evidence


def divergence_of_normals(draws, mean, covariance):
    """Return KL of a normal with the moments of draws ``(n, d)`` from the exact one, in nats."""
    x = draws.flatten(0, -2)
    found = torch.distributions.MultivariateNormal(x.mean(0), x.T.cov().reshape(len(mean), len(mean)))
    truth = torch.distributions.MultivariateNormal(mean, covariance)
    return float(torch.distributions.kl_divergence(truth, found))


def simulated(target, arguments, seed):
    """Return the arguments of the model with data drawn from its prior."""
    u = target.sample_prior(1, seed=seed)
    drawn = target.predictive(u, seed=seed)
    observed, _ = target.named_data()
    return with_data(arguments, observed, {name: value[0] for name, value in drawn.items() if name in observed})


def arguments_of(name, twin, size, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return twin.arguments(size) if callable(twin.arguments) else twin.arguments


def with_data(arguments, observed, values):
    """Return the arguments with values in place of the observed data."""
    (before,), (after,) = observed.values(), values.values()
    return tuple(after.to(x.dtype) if x is before else x for x in arguments)


def study(name, steps, datasets, per_size, sbc, seed, rows, encoding=None):
    twin = TWINS[name] or _case(name)
    begin = time.perf_counter()
    posterior = bk.amortize(twin.model, twin.arguments, sizes=twin.sizes, encoding=encoding, num_steps=steps, seed=seed)
    seconds = time.perf_counter() - begin
    print(f"\n{name}: {posterior}, {steps} steps, {seconds:.0f} s", flush=True)
    print(f"{'size':>5} {'KL mean':>9} {'KL max':>9} {'moments':>9} {'corrected':>10} {'of exact':>9}")
    sizes = SIZES if twin.sizes is not None else (0,)
    for size in sizes:
        found, before, after = [], [], []
        for replicate in range(per_size if twin.sizes is not None else min(per_size, 10)):
            arguments = arguments_of(name, twin, size, 1000 * size + replicate)
            target = posterior.target(*arguments)
            data = simulated(target, arguments, 77_000 + 1000 * size + replicate)
            target = posterior.target(*data)
            points, log_posterior, weights, _, mean, covariance = exact(name, data, target)
            found.append(float(weights @ (log_posterior - posterior.log_prob(points, *data)).nan_to_num(0.0)))
            if replicate < 5:
                drawn = posterior.sample(*data, num_draws=10_000, check=False)
                before.append(divergence_of_normals(drawn.unconstrained, mean, covariance))
                corrected = posterior.correct(*data, progress=False).draws
                after.append(divergence_of_normals(corrected.unconstrained, mean, covariance))
        noise = target.dim * (target.dim + 3) / (4 * 10_000)
        numbers = torch.tensor(found)
        line = [float(numbers.mean()), float(numbers.max()), *(sum(x) / len(x) for x in (before, after)), noise]
        print(f"{size:>5} " + " ".join(f"{x:>9.5f}" for x in line), flush=True)
        rows.append([name, "KL", size, *line, seconds])
    scores, ways, untrusted = [], {}, 0
    for replicate in range(datasets):
        generator = torch.Generator().manual_seed(500_000 + replicate)
        size = 0 if twin.sizes is None else int(200 ** float(torch.rand((), generator=generator, dtype=FLOAT)))
        arguments = arguments_of(name, twin, size, 500_000 + replicate)
        data = simulated(posterior.target(*arguments), arguments, 500_000 + replicate)
        if name == "regression":
            truth = _normal_regression(*data)[2]
        elif twin.sizes is None:
            truth = _exact_evidence(name, data)
        else:
            truth = exact(name, data, posterior.target(*data))[3]
        z = posterior.correct(*data, seed=replicate, progress=False).evidence
        scores.append((z.log_evidence - truth) / z.standard_error)
        ways[z.method] = ways.get(z.method, 0) + 1
        untrusted += not z.trusted
    if scores:
        z = torch.tensor(scores)
        said = f"z of {len(z)} corrected evidences: mean {float(z.mean()):.3f}, sd {float(z.std()):.3f}"
        print(f"{said}, largest {float(z.abs().max()):.2f}; not trusted {untrusted}; {ways}", flush=True)
        rows.append([name, "z", len(z), float(z.mean()), float(z.std()), untrusted, "", "", ""])
    if sbc:
        for size in (3, 30, 150) if twin.sizes is not None else (0,):
            arguments = arguments_of(name, twin, size, size)
            result = bk.sbc(twin.model, posterior, args=arguments, num_replicates=sbc, progress=False, seed=seed)
            print(f"size {size}: {result}", flush=True)
            rows.append([name, "SBC", size, result.smallest_p_value, "", "", "", "", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TWINS), default=list(TWINS))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--datasets", type=int, default=200)
    parser.add_argument("--per-size", type=int, default=50)
    parser.add_argument("--sbc", type=int, default=0, help="replicates of simulation-based calibration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoding", help="of all models, such as attention")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[list] = []
    for name in options.models:
        study(
            name, options.steps, options.datasets, options.per_size, options.sbc, options.seed, rows, options.encoding
        )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "amortized_posteriors.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow("model what size first second third fourth fifth seconds".split())
            writer.writerows(rows)


if __name__ == "__main__":
    main()
