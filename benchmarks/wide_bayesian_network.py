"""The Gaussian process of a network of infinite width beside Hamiltonian Monte Carlo on networks of growing width.

A network with one hidden layer, whose weights have their prior, sees ten points with known noise. For each width the
posterior of the function at test points is sampled by many chains over all weights, and its mean and standard deviation
are set beside those of the limit: the largest and the root mean squared difference, with the Monte Carlo error that
sampling alone would make. It prints a table, and with --out writes it as a file.

    python benchmarks/wide_bayesian_network.py --widths 2 4 8 16 32 64 --out DIR
    python benchmarks/wide_bayesian_network.py --quick
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit.errors import SamplingWarning
from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks.gaussian_processes import nngp_posterior

WEIGHT, BIAS, NOISE = 2.0, 0.5, 0.05
DOUBLE = torch.float64


def outputs(u: Tensor, x: Tensor, width: int) -> Tensor:
    """Return a network's outputs, ``(*batch, n)``, at inputs ``(n, d)``, of its white weights, ``(*batch, dim)``."""
    features = x.shape[1]
    first, shift, last, end = u.split([width * features, width, width, 1], -1)
    first = first.reshape(*u.shape[:-1], width, features) * math.sqrt(WEIGHT / features)
    hidden = torch.erf(first @ x.mT + math.sqrt(BIAS) * shift[..., None])
    return math.sqrt(WEIGHT / width) * (last[..., None, :] @ hidden)[..., 0, :] + math.sqrt(BIAS) * end


def target_of(x: Tensor, y: Tensor, width: int) -> bk.Target:
    """Return the posterior of all weights."""
    dim = width * (x.shape[1] + 2) + 1

    def log_prior(u: Tensor) -> Tensor:
        return -0.5 * u.square().sum(-1) - 0.5 * dim * math.log(2 * math.pi)

    def log_likelihood(u: Tensor) -> Tensor:
        error = (y - outputs(u, x, width)).square().sum(-1)
        return -0.5 * error / NOISE - 0.5 * len(y) * math.log(2 * math.pi * NOISE)

    def sample_prior(n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, dim, generator=generator, dtype=DOUBLE)

    return bk.Target.from_functions(log_prior, log_likelihood, dim, sample_prior)


def row(
    x: Tensor, y: Tensor, new: Tensor, width: int, law: tuple[Tensor, Tensor], settings: argparse.Namespace
) -> dict[str, float]:
    """Sample one width, and compare."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        draws = bk.sample(
            target_of(x, y, width),
            num_chains=settings.chains,
            num_warmup=settings.warmup,
            num_samples=settings.samples,
            seed=width,
            progress=False,
        )
    found = outputs(draws.values()["u"], new, width)  # (chains, draws, m)
    centre = found.mean((0, 1))
    mean_error = found.mean(1).std(0) / math.sqrt(settings.chains)
    square = (found - centre).square().mean(1)
    deviation = square.mean(0).sqrt()
    deviation_error = square.std(0) / math.sqrt(settings.chains) / (2 * deviation)
    off, spread_off = centre - law[0], deviation - law[1]
    return {
        "width": width,
        "rms_mean_off": float(off.square().mean().sqrt()),
        "rms_mean_error": float(mean_error.square().mean().sqrt()),
        "rms_sd_off": float(spread_off.square().mean().sqrt()),
        "rms_sd_error": float(deviation_error.square().mean().sqrt()),
        "largest_z_of_mean": float((off / mean_error).abs().max()),
        "largest_z_of_sd": float((spread_off / deviation_error).abs().max()),
        "process_seconds": time.process_time() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="short chains of widths 2, 8 and 32")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    if settings.quick:
        settings.widths, settings.chains, settings.warmup, settings.samples = [2, 8, 32], 32, 150, 150
    generator = new_generator(0, stream="data")
    x = 1.5 * torch.randn(10, 2, generator=generator, dtype=DOUBLE)
    new = 1.5 * torch.randn(8, 2, generator=generator, dtype=DOUBLE)
    y = torch.sin(x[:, 0]) + x[:, 1] / 2 + math.sqrt(NOISE) * torch.randn(10, generator=generator, dtype=DOUBLE)

    module = nn.Sequential(nn.Linear(2, 8), Elementwise(torch.erf), nn.Linear(8, 1))
    network = infinite_width(module, weight_variance=WEIGHT, bias_variance=BIAS)
    posterior = nngp_posterior(network, x, y, NOISE)
    mean, spread = posterior.mean(new), posterior.variance(new).sqrt()
    print(f"limit: means {[round(v, 3) for v in mean.tolist()]}")
    print(f"       standard deviations {[round(v, 3) for v in spread.tolist()]}")
    rows = [row(x, y, new, width, (mean, spread), settings) for width in settings.widths]
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}"))
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        table.to_csv(settings.out / "wide_bayesian_network.csv", index=False)


if __name__ == "__main__":
    main()
