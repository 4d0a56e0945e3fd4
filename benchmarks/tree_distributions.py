"""Fit distributions over topologies to a short run of DS1 and compare them with ten long runs.

Usage::

    python benchmarks/tree_distributions.py --data DIR

`DIR/tree_samples` holds `DS1_short_run_rep1.trprobs`, the sample, and `DS1_raw_rep1.trprobs` to
`DS1_raw_rep10.trprobs`, which are pooled with equal weight a run as the reference. The divergence from the reference is
infinite where a method gives one of its trees probability zero. The column `KL` follows Zhang and Matsen (2018), who
take such a probability as machine epsilon, 2.2e-16; the column `KL smoothed` mixes every method with 1e-4 of the
uniform distribution over all topologies, so that it is a true divergence between distributions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bayeskit.models.phylogenetics._distributions import (  # noqa: E402
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
    TopologyDistribution,
)
from bayeskit.models.phylogenetics._samples import TreeSample  # noqa: E402

FLOOR, EPSILON = float(np.finfo(float).eps), 1e-4
ALPHAS = (1e-5, 1e-4, 1e-3)
SHOWN = (0, 1, 2, 3, 4, 5, 10)


def methods(sample: TreeSample) -> dict[str, Callable[[], TopologyDistribution]]:
    """Return what to fit."""
    network, clades = SubsplitBayesianNetwork.fit, ConditionalCladeDistribution.fit
    return {
        "sample frequencies": lambda: SampleFrequencies.fit(sample),
        "conditional clades, order 0": lambda: clades(sample, order=0),
        "conditional clades, order 1": lambda: clades(sample),
        "conditional clades, order 2": lambda: clades(sample, order=2),
        "network, simple average": lambda: network(sample, "simple_average"),
        "network, EM": lambda: network(sample),
        **{f"network, EM, alpha={alpha:g}": lambda alpha=alpha: network(sample, alpha=alpha) for alpha in ALPHAS},
    }


def compare(sample: TreeSample, reference: TreeSample) -> dict[str, TopologyDistribution]:
    """Print a line for each method."""
    print(f"{'method':30} {'KL':>8} {'KL smoothed':>12} {'outside':>9} {'options':>8} {'seconds':>8} {'CPU':>6}")
    fitted, divergence = {}, {}
    for name, fit in methods(sample).items():
        wall, cpu = time.perf_counter(), time.process_time()
        distribution = fitted[name] = fit()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        divergence[name] = distribution.kl_from(reference, floor=FLOOR)
        smoothed = Smoothed(distribution, EPSILON).kl_from(reference)
        outside = reference.weights[np.isneginf(distribution.log_prob(reference.topologies).numpy())].sum()
        options = distribution.graph.num_options if hasattr(distribution, "graph") else len(distribution.weights)
        print(
            f"{name:30} {divergence[name]:8.5f} {smoothed:12.5f} {outside:9.6f} {options:8} {wall:8.2f} {cpu:6.2f}",
            flush=True,
        )
    beaten = [name for name in divergence if name.startswith(("sample", "conditional"))]
    if any(divergence["network, EM"] >= divergence[name] for name in beaten):
        raise SystemExit("EM did not beat sample frequencies and conditional clades")
    return fitted


def show_climb(network: SubsplitBayesianNetwork) -> None:
    """Print the mean log likelihood over the iterations of EM."""
    history = network.log_likelihoods
    print("\nmean log likelihood a tree by iteration of EM (0 is the simple average)")
    print("  ".join(f"{step}: {history[step]:.6f}" for step in SHOWN), f" {len(history) - 1}: {history[-1]:.6f}")


def time_training_step(network: SubsplitBayesianNetwork, batch: int = 10, repeats: int = 300) -> None:
    """Print what drawing, scoring and differentiating a few topologies takes."""
    logits = network.logits.clamp_min(-30.0).requires_grad_(True)
    network, generator = SubsplitBayesianNetwork(network.graph, logits), torch.Generator().manual_seed(0)
    taken = []
    for _ in range(repeats):
        with torch.no_grad():
            # As after an optimiser's step: everything that follows from the logits is stale.
            logits.mul_(1.0 - 1e-6)
        start = time.perf_counter()
        drawn = network.sample(batch, seed=generator)
        network.log_prob(drawn).sum().backward()
        taken.append(1e3 * (time.perf_counter() - start))
        logits.grad = None
    print(f"\n{batch} topologies drawn, scored and differentiated: median {statistics.median(taken):.2f} ms, ", end="")
    print(f"fastest {min(taken):.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds tree_samples")
    folder = parser.parse_args().data / "tree_samples"
    torch.set_num_threads(1)
    sample = TreeSample.from_file(folder / "DS1_short_run_rep1.trprobs", progress=False)
    reference = TreeSample.from_files([folder / f"DS1_raw_rep{run}.trprobs" for run in range(1, 11)], progress=False)
    print(f"sample: {len(sample.topologies)} distinct trees; reference: {len(reference.topologies)}\n")
    fitted = compare(sample, reference)
    show_climb(fitted["network, EM"])
    time_training_step(fitted["network, simple average"])


if __name__ == "__main__":
    main()
