"""Are the errors of corrected evidences right? Replicates of a Poisson model with normal effects, against quadrature.

    python benchmarks/laplace_correction.py [--replicates 200]

For each replicate the marginal target is sampled, bridge sampling estimates its evidence, and the correction of
Laplace's approximation is applied, once by quadrature along independent effects and once by importance sampling, for
the same effects in rotated coordinates. Printed are the error of Laplace's approximation, and mean and standard
deviation of the scores (estimate - truth) / standard error, which should be 0 and 1.
"""

from __future__ import annotations

import argparse
import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference import evidence

COUNTS = torch.tensor([1.0, 0.0, 3.0, 7.0, 2.0, 0.0, 1.0, 4.0], dtype=torch.float64)


def counted(y, rotation=None):
    level = pyro.sample("level", dist.Normal(0.5, 1.0))
    log_scale = pyro.sample("log_scale", dist.Normal(0.0, 0.7))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, log_scale.exp()))
    rate = effect if rotation is None else rotation @ effect
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + rate).exp()), obs=y)


def truth() -> float:
    """Return the log evidence by trapezoidal rules over both parameters and each effect."""
    level, log_scale = np.meshgrid(0.5 + np.linspace(-8, 8, 161), 0.7 * np.linspace(-8, 8, 161), indexing="ij")
    x = np.linspace(-14, 14, 2001)
    total = np.zeros_like(level)
    for y in COUNTS.tolist():
        for i in range(len(level)):
            eta = level[i][:, None] + np.exp(log_scale[i])[:, None] * x
            logs = y * eta - np.exp(np.minimum(eta, 700)) - math.lgamma(y + 1) - x**2 / 2 - 0.5 * math.log(2 * math.pi)
            total[i] += np.logaddexp.reduce(logs, axis=1) + math.log(x[1] - x[0])
    prior = -((level - 0.5) ** 2) / 2 - (log_scale / 0.7) ** 2 / 2 - math.log(2 * math.pi * 0.7)
    return float(np.logaddexp.reduce((total + prior).ravel()) + math.log(0.1 * 0.07))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicates", type=int, default=200)
    count = parser.parse_args().replicates
    warnings.simplefilter("ignore")
    exact, size = truth(), len(COUNTS)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(2)).double())[0]
    print(f"log evidence by quadrature {exact:.6f}")
    for name, turned in (("quadrature", None), ("importance sampling", rotation)):
        target = bk.marginalize(bk.Target.from_pyro(counted, COUNTS, turned), ["effect"])
        scores, plain, errors, trusted = [], [], [], 0
        for seed in range(count):
            draws = bk.sample(target, num_warmup=300, num_samples=500, seed=seed, progress=False)
            bridge = evidence.bridge_sampling(target, draws, seed=seed)
            correction = target.correction(draws, seed=seed)
            found = correction.applied(bridge)
            scores.append((found.log_evidence - exact) / found.standard_error)
            plain.append((bridge.log_evidence - exact) / bridge.standard_error)
            errors.append(correction.log_ratio)
            trusted += found.trusted
        print(
            f"{name}: Laplace off by {-np.mean(errors):+.4f}; z of the corrected evidence {np.mean(scores):+.2f}, sd "
            f"{np.std(scores, ddof=1):.3f}; trusted {trusted} of {count}; z without correction {np.mean(plain):+.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
