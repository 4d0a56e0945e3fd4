"""Regression on 12,000 points: conjugate gradients and inducing points beside a Cholesky factor.

Data are a smooth function of ten inputs with noise. For each method it prints process seconds, peak memory, and how far
predictions at test points are from the exact ones (with --exact) and from the function.

    python benchmarks/wide_large.py --n 12000 --float32
    python benchmarks/wide_large.py --quick
"""

from __future__ import annotations

import argparse
import resource
import time

import pandas as pd
import torch
from torch import Tensor, nn

from bayeskit._core.randomness import new_generator
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    ConjugateGradients,
    InducingPoints,
    large_regression,
    nngp_posterior,
)
from bayeskit.models.wide_networks.gaussian_processes._large_data import Marginals

NOISE = 0.05


def function(x: Tensor) -> Tensor:
    return torch.sin(x[:, 0] + x[:, 1]) + 0.5 * torch.cos(x[:, 2] - x[:, 3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=12_000)
    parser.add_argument("--tests", type=int, default=50)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--exact", action="store_true", help="factorise the covariance, too")
    parser.add_argument("--quick", action="store_true", help="2,000 points, exact, too")
    settings = parser.parse_args()
    if settings.quick:
        settings.n, settings.exact = 2000, True
    dtype = torch.float32 if settings.float32 else torch.float64
    generator = new_generator(0, stream="data")
    x = torch.randn(settings.n, 10, generator=generator, dtype=torch.float64).to(dtype)
    new = torch.randn(settings.tests, 10, generator=generator, dtype=torch.float64).to(dtype)
    noise = NOISE**0.5 * torch.randn(settings.n, generator=generator, dtype=torch.float64).to(dtype)
    y = function(x) + noise
    layers = nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
    network = infinite_width(nn.Sequential(*layers), weight_variance=2.0, bias_variance=0.1)

    methods: list[ConjugateGradients | InducingPoints | None] = [InducingPoints(1000), ConjugateGradients(1e-2)]
    if settings.exact:
        methods = [None, *methods]
    rows, exact = [], None
    for method in methods:
        start = time.process_time()
        with torch.no_grad():
            if method is None:
                posterior = nngp_posterior(network, x, y, NOISE)
                exact = law = Marginals(posterior.mean(new), posterior.variance(new))
            else:
                law = large_regression(network, x, y, NOISE, method).predict(new)
        rows.append(
            {
                "method": "exact" if method is None else type(method).__name__,
                "process_seconds": time.process_time() - start,
                "peak_gigabytes_so_far": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "rmse": float((law.mean - function(new)).square().mean().sqrt()),
                "mean_off_exact": float("nan") if exact is None else float((law.mean - exact.mean).abs().max()),
                "variance_off_exact": float("nan")
                if exact is None
                else float((law.variance - exact.variance).abs().max()),
            }
        )
        print(rows[-1], flush=True)  # a long run shows what it has
    print(f"n = {settings.n}, {dtype}")
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda v: f"{v:.3g}"))


if __name__ == "__main__":
    main()
