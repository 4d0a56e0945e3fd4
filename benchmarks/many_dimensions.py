"""Evidence in many dimensions: a conjugate regression of 500 and 2,000 coefficients, and a hierarchy of 1,000 groups.

Both have a known answer. The regression ``y ~ N(X b, 1)``, ``b ~ N(0, 1)``, has one in closed form. Of the hierarchy
``y_g ~ N(theta_g, 1)``, ``theta_g ~ N(mean, sd)`` with ``mean ~ N(0, 5)`` and ``sd`` lognormal, the groups integrate
out in closed form, and so does the mean given ``sd``, which leaves an integral over one variable. Prints a row a
method: how many errors it is off, whether it trusts itself, and the CPU seconds of the whole comparison.

    python benchmarks/many_dimensions.py
    python benchmarks/many_dimensions.py --case regression --size 100 --methods bridge_sampling warp_bridge_sampling
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.integrate import quad
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

from bayeskit._logdensity.target import Target
from bayeskit.inference import evidence

#: Fewer chains than by default, which in many dimensions cost the more and are needed the less.
BUDGET = evidence.Budget(num_chains=16, num_warmup=300, num_samples=300, ladder_chains=8, ladder_samples=300)
SMALL = evidence.Budget(num_chains=8, num_warmup=200, num_samples=200)
MANY = 1500
METHODS = {
    "regression": ("laplace_importance_sampling", "bridge_sampling", "warp_bridge_sampling"),
    "hierarchy": ("bridge_sampling", "warp_bridge_sampling", "generalised_stepping_stone"),
}
SIZES = {"regression": (500, 2000), "hierarchy": (1000,)}


def regression(size: int, seed: int = 0) -> tuple[Target, float]:
    """Return the target with that many coefficients and twice as many data, and its log evidence."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((2 * size, size))
    y = x @ draw.standard_normal(size) + draw.standard_normal(2 * size)
    factor = cho_factor(np.eye(2 * size) + x @ x.T, lower=True)
    log_determinant = 2 * np.log(np.diag(factor[0])).sum()
    exact = -0.5 * (y @ cho_solve(factor, y) + log_determinant + 2 * size * math.log(2 * math.pi))
    design, data = torch.from_numpy(x), torch.from_numpy(y)

    def model(design: Tensor, data: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(design.new_zeros(size), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(b @ design.mT, 1.0).to_event(1), obs=data)

    return Target.from_pyro(model, design, data), float(exact)


def hierarchy(size: int, seed: int = 0) -> tuple[Target, float]:
    """Return the target with that many groups, non-centred, and its log evidence."""
    draw = np.random.default_rng(seed)
    y = 1.0 + draw.standard_normal(size) + draw.standard_normal(size)

    def model(data: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(data.new_zeros(()), 5.0))
        sd = pyro.sample("sd", dist.LogNormal(data.new_zeros(()), 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros_like(data), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(mean + sd * z, 1.0).to_event(1), obs=data)

    return Target.from_pyro(model, torch.from_numpy(y)), hierarchy_evidence(y)


def hierarchy_evidence(y: np.ndarray) -> float:
    """Integrate over the log of the groups' standard deviation what is normal given it."""

    def log_term(s: float) -> float:
        variance, n = 1 + math.exp(2 * s), len(y)
        # The covariance of the data is a multiple of one plus a constant.
        total = variance + 25 * n
        log_determinant = (n - 1) * math.log(variance) + math.log(total)
        misfit = ((y - y.mean()) ** 2).sum() / variance + n * y.mean() ** 2 / total
        return float(-0.5 * (s * s + misfit + log_determinant + (n + 1) * math.log(2 * math.pi)))

    top = max(np.linspace(-4, 4, 4001), key=log_term)
    height = log_term(top)
    area = quad(lambda s: math.exp(log_term(s) - height), top - 4, top + 4, points=[top], limit=400, epsabs=0)[0]
    return height + math.log(area)


CASES: dict[str, Callable[[int], tuple[Target, float]]] = {"regression": regression, "hierarchy": hierarchy}


def report(case: str, size: int, methods: tuple[str, ...], seed: int) -> None:
    """Compare the methods on one case and print a row for each."""
    target, exact = CASES[case](size)
    begin = time.process_time()
    budget = SMALL if target.dim > MANY else BUDGET
    table = evidence.compare(target, methods, seed=seed, budget=budget, progress=False)
    print(f"\n{case} of {size}, {target.dim} parameters: exact {exact:.4f}, {time.process_time() - begin:.0f} CPU s")
    for z in table:
        off = (z.log_evidence - exact) / z.standard_error
        print(
            f"  {z.method:30s} {z.log_evidence:12.4f} +- {z.standard_error:.4f}  {off:+6.2f} errors off, "
            f"{z.num_evaluations:9d} evaluations, {'trusted' if z.trusted else 'not trusted: ' + '; '.join(z.warnings)}"
        )
    for part, seconds in table.part_seconds.items():
        print(f"  {part}: {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--size", type=int, nargs="+", help="by default 500 and 2,000, and 1,000 groups")
    parser.add_argument("--methods", choices=evidence.METHODS, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for case in given.case:
        for size in given.size or SIZES[case]:
            report(case, size, tuple(given.methods or METHODS[case]), given.seed)


if __name__ == "__main__":
    main()
