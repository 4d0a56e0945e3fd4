"""Simulation-based calibration of the default sampler on the gallery's models.

Prints, for each model, the smallest p-value for uniform ranks, adjusted for the number of quantities and tests,
the quantity it belongs to, and what makes the ranks doubtful, if anything. `primates_quartet` is the likelihood of
the gallery's primates for four of the taxa, where all 256 site patterns can be listed and so be simulated.

    python benchmarks/sbc.py --replicates 200 --jobs 2 --out sbc
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit import exact
from bayeskit.models.phylogenetics import Alignment, Tree, TreeModel
from bayeskit.workflows._simulation_based_calibration import sbc

GALLERY = ("linreg10", "radiata_pine_m1", "radiata_pine_m2", "beta_binomial", "eight_schools", "three_taxon_tree")
PATTERNS_PER_CLASS = torch.tensor([4.0, 12.0, 12.0, 12.0, 24.0], dtype=torch.float64)


def simulate_three_taxa(values: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the classes of 72 site patterns."""
    counts, rate = exact.get("three_taxon_tree").args
    shares = PATTERNS_PER_CLASS * exact.pattern_log_probabilities(values["branch_lengths"]).exp()
    drawn = torch.multinomial(shares, int(counts.sum()), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(shares)).to(counts.dtype), rate


class Quartet:
    """Counts of all site patterns of four primates, a multinomial given the branch lengths."""

    def __init__(self, num_sites: int = 898) -> None:
        sequences = map("".join, zip(*itertools.product("ACGT", repeat=4), strict=True))
        names = ("Homo_sapiens", "Pan", "Gorilla", "Pongo")
        alignment = Alignment.from_sequences(dict(zip(names, sequences, strict=True)))
        tree = Tree.from_newick("((Homo_sapiens,Pan),Gorilla,Pongo);")
        self.model, self.num_sites = TreeModel(alignment, tree), num_sites
        self.num_edges = tree.num_edges

    def __call__(self, counts: Tensor) -> None:
        """Sample branch lengths and observe the counts."""
        prior = dist.Exponential(counts.new_full((self.num_edges,), 10.0)).to_event(1)
        branch_lengths = pyro.sample("branch_lengths", prior)
        pyro.factor("counts", (counts * self.model.pattern_log_likelihoods(branch_lengths)).sum())

    def simulate(self, values: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor]:
        """Draw the counts."""
        shares = self.model.pattern_log_likelihoods(values["branch_lengths"]).exp()
        drawn = torch.multinomial(shares, self.num_sites, replacement=True, generator=generator)
        return (torch.bincount(drawn, minlength=len(shares)).to(shares.dtype),)


def settings_of(name: str) -> dict[str, Any]:
    if name == "primates_quartet":
        quartet = Quartet()
        return {"model": quartet, "args": (torch.ones(256, dtype=torch.float64),), "simulate": quartet.simulate}
    case = exact.get(name)
    simulate = simulate_three_taxa if name == "three_taxon_tree" else None
    return {"model": case.model, "args": case.args, "simulate": simulate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*GALLERY, "primates_quartet"])
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--draws", type=int, default=63)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for plots, and for finished replicates")
    arguments = parser.parse_args()
    print(f"{'model':<18}{'quantities':>11}{'p chi2':>9}{'p ecdf':>9}{'adjusted':>10}{'worst':>24}{'seconds':>9}")
    for name in arguments.models:
        begin = time.monotonic()
        result = sbc(
            **settings_of(name),
            num_replicates=arguments.replicates,
            num_draws=arguments.draws,
            seed=arguments.seed,
            num_jobs=arguments.jobs,
            checkpoint=arguments.out and arguments.out / name,
        )
        smallest, worst = result.p_values.min(), result.p_values.min(axis=1).idxmin()
        print(
            f"{name:<18}{len(result.ranks):>11}{smallest['chi_square']:>9.3g}{smallest['ecdf']:>9.3g}"
            f"{result.smallest_p_value:>10.3g}{worst:>24}{time.monotonic() - begin:>9.0f}",
            *result.warnings,
            sep="\n  ",
            flush=True,
        )
        if arguments.out:
            result.plot().savefig(arguments.out / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
