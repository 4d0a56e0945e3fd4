"""Posterior probabilities of the 42 credible topologies of DS1 against the frequencies of long Markov chains.

Prints the divergence from the chains' frequencies to the probabilities by Gamma-Laplus importance sampling, both
normalised over the set, and the evidence over all topologies that follows; with its time.

    python benchmarks/topology_comparison.py --data DIR [--draws 10000]

`DIR` holds `DS1.fasta`, `DS1_credible_set.txt` and `DS1_per_topology_reference.csv`.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from pathlib import Path

import pandas as pd
import torch

from bayeskit.errors import SamplingWarning
from bayeskit.models.phylogenetics import Alignment, TreeSample
from bayeskit.workflows.phylogenetics import compare_topologies


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    alignment = Alignment.from_file(options.data / "DS1.fasta")
    sample = TreeSample.from_file(options.data / "DS1_credible_set.txt")
    mass = pd.read_csv(options.data / "DS1_per_topology_reference.csv")["log_srf"]
    frequencies = torch.tensor(mass.to_numpy()).softmax(0)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # counted below
        found = compare_topologies(alignment, sample, num_draws=options.draws, seed=options.seed)
    seconds = time.perf_counter() - begin
    divergence = (frequencies * (frequencies.log() - found.posterior_probabilities.log())).sum()
    trusted = sum(z.trusted for z in found.comparison.results.values())
    print(f"{len(sample.topologies)} topologies, {options.draws} draws each: {seconds:.1f} s, {trusted} trusted")
    print(f"KL from the chains' frequencies: {divergence:.6f}")
    first = found.comparison["tree 1"]
    print(f"log evidence of the first topology {first.log_evidence:.4f} +- {first.standard_error:.4f}")
    errors = (found.posterior_probabilities * found.standard_error).norm()
    topologies = sum(math.log(odd) for odd in range(3, 2 * alignment.num_taxa - 4, 2))
    total = found.log_evidence.logsumexp(0) - torch.tensor(mass.to_numpy()).logsumexp(0) - topologies
    print(f"log evidence over all topologies, by the chains' mass of the set: {total:.4f} +- {errors:.4f}")
    print(f"largest standard error {found.standard_error.max():.4f}")


if __name__ == "__main__":
    main()
