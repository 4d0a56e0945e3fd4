"""Evidence of many topologies: processor seconds, memory, and agreement with what is known.

    python benchmarks/topology_comparison.py --data DIR [--draws 10000]
    python benchmarks/topology_comparison.py --small [--taxa 29 --topologies 212]

`--small` needs no data: it simulates 29 taxa and 1,900 sites on a random tree, of which some inner branches are so
short that many topologies are plausible, and compares at most 212 of them: combinations of nearest-neighbour
interchanges on the short branches, and all such neighbours of the true tree.

`DIR` holds `DS1.fasta`, `DS1_credible_set.txt` and `DS1_per_topology_reference.csv`, and the same of DS2 if there is;
printed is the divergence from the frequencies of long Markov chains to the probabilities, both normalised over the set,
and the evidence over all topologies, by the chains' mass of the set. `tree_samples/DS1_raw_rep*.trprobs` in it are
independent runs, which give that mass with its error. `--free` compares the first topologies of DS1 under a model with
free parameters with bridge sampling on each.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayeskit.errors import SamplingWarning
from bayeskit.inference.evidence import Budget
from bayeskit.models.phylogenetics import GTR, Alignment, GammaRates, Topologies, Tree, TreeSample
from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate
from bayeskit.models.phylogenetics.workflows import compare_topologies
from bayeskit.models.phylogenetics.workflows._topology_comparison import TopologyComparison

#: Below each inner node of an unrooted tree: its children; the root -1 has three.
Children = dict[int, list[int]]
#: Published evidence over all topologies, variational and by stepping stone.
PUBLISHED = {"DS1": (-7108.42, 0.10), "DS2": (-26367.72, 0.12)}


def simulate(num_taxa: int, num_sites: int, num_topologies: int, seed: int) -> tuple[Alignment, Topologies]:
    """Draw an alignment under Jukes-Cantor, and topologies around the true one, which comes first."""
    generator = np.random.default_rng(seed)
    children: Children = {-1: [0, 1, 2]}
    parent = {0: -1, 1: -1, 2: -1}
    for tip in range(3, num_taxa):
        beside, new = int(generator.choice(list(parent))), -len(children) - 1
        above = children[parent[beside]]
        above[above.index(beside)] = new
        children[new] = [beside, tip]
        parent |= {new: parent[beside], beside: new, tip: new}
    lengths = {node: generator.exponential(0.1) for node in parent}
    short: list[int] = []
    for node in map(int, generator.permutation([node for node in parent if node < 0])):
        touching = any(
            parent[node] == other or parent[other] == node or parent[node] == parent[other] for other in short
        )
        if len(short) < 6 and not touching:
            short.append(node)
            lengths[node] = generator.uniform(0.0, 0.002)
    taxa = [f"taxon{tip:02d}" for tip in range(num_taxa)]
    sequences = {}

    def evolve(node: int, bases: np.ndarray) -> None:
        if node != -1:
            kept = generator.random(num_sites) < math.exp(-4 / 3 * lengths[node])
            bases = np.where(kept, bases, generator.integers(0, 4, num_sites))
        if node >= 0:
            sequences[taxa[node]] = "".join("ACGT"[base] for base in bases)
        for child in children.get(node, []):
            evolve(child, bases)

    evolve(-1, generator.integers(0, 4, num_sites))
    found = {written(children, taxa): children}
    for one in interchanges(children, [node for node in children if node != -1]):
        found.setdefault(written(one, taxa), one)
    queue, queued = [children], {written(children, taxa)}
    while len(found) < num_topologies and queue:
        for one in interchanges(queue.pop(0), short):
            text = written(one, taxa)
            if text not in queued and len(found) < num_topologies:
                found.setdefault(text, one)
                queued.add(text)
                queue.append(one)
    trees = [Tree.from_newick(text) for text in found]
    return Alignment.from_sequences(sequences), Topologies.from_trees(trees, taxa=taxa).distinct()[0]


def interchanges(children: Children, nodes: list[int]) -> Iterator[Children]:
    """Yield both nearest-neighbour interchanges across the branch above each node."""
    parent = {child: node for node, below in children.items() for child in below}
    for node in nodes:
        above = parent[node]
        sibling = next(child for child in children[above] if child != node)
        for place, moved in enumerate(children[node]):
            new = {one: list(below) for one, below in children.items()}
            new[node][place] = sibling
            new[above][new[above].index(sibling)] = moved
            yield new


def written(children: Children, taxa: list[str]) -> str:
    """Return a tree as Newick, the same text however children are ordered."""

    def text(node: int) -> str:
        return taxa[node] if node >= 0 else "(" + ",".join(sorted(map(text, children[node]))) + ")"

    return text(-1) + ";"


def measured(name: str, alignment: Alignment, topologies: Any, **settings: Any) -> TopologyComparison:
    """Compare topologies and print what it took."""
    before = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # counted below
        found = compare_topologies(alignment, topologies, **settings)
    seconds = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    results = found.comparison.results.values()
    total = found.total_log_evidence
    print(
        f"{name}: {len(found.topologies)} topologies of {alignment.num_taxa} taxa: {seconds:.1f} processor seconds, "
        f"peak memory of the process {peak:.0f} MB, {sum(z.num_evaluations for z in results)} evaluations"
    )
    print(
        f"  {sum(z.trusted for z in results)} trusted; sum of the evidence {total.value:.4f} +- "
        f"{total.standard_error:.4f}, errors of probabilities {float(found.posterior_errors.norm()):.4f}, "
        f"of log evidences {float(found.standard_error.median()):.3f} (median)"
    )
    return found


def against_chains(name: str, folder: Path, draws: int, seed: int) -> None:
    """Compare probabilities and the whole evidence with those of long Markov chains."""
    import pandas as pd

    alignment = Alignment.from_file(folder / f"{name}.fasta")
    sample = TreeSample.from_file(folder / f"{name}_credible_set.txt")
    found = measured(name, alignment, sample, num_draws=draws, seed=seed)
    reference = folder / f"{name}_per_topology_reference.csv"
    if reference.exists():
        log_mass = torch.tensor(pd.read_csv(reference)["log_srf"].to_numpy())
        frequencies = log_mass.softmax(0)
        divergence = (frequencies * (frequencies.log() - found.posterior_probabilities.log())).sum()
        total = found.total_log_evidence_with(Estimate(float(log_mass.exp().sum()), 0.0))
        print(f"  divergence from the chains' frequencies {divergence:.6f}")
        print(
            f"  all topologies, by the chains' mass: {total.value:.4f} +- {total.standard_error:.4f}", PUBLISHED[name]
        )
    paths = sorted((folder / "tree_samples").glob(f"{name}_raw_rep*.trprobs"))
    if len(paths) > 1:
        mass = found.mass_in([TreeSample.from_file(path) for path in paths])
        total = found.total_log_evidence_with(mass)
        print(f"  mass by {len(paths)} runs {mass.value:.5f} +- {mass.standard_error:.5f}")
        print(f"  all topologies, by it: {total.value:.4f} +- {total.standard_error:.4f}", PUBLISHED[name])


def with_free_parameters(folder: Path, draws: int, seed: int) -> None:
    """Compare the first topologies under GTR+G4 with free parameters with bridge sampling."""
    alignment = Alignment.from_file(folder / "DS1.fasta")
    two = TreeSample.from_file(folder / "DS1_credible_set.txt").topologies[:2]
    model = {"substitution": GTR(), "site_rates": GammaRates(), "seed": seed}
    found = measured("DS1, GTR+G4", alignment, two, num_draws=draws, **model)
    bridge = measured(
        "  bridge sampling", alignment, two, method="bridge_sampling", budget=Budget(4, 500, 1000), **model
    )
    error = torch.hypot(found.standard_error, bridge.standard_error)
    for one in (found, bridge):
        print("  ", one.log_evidence.tolist(), one.standard_error.tolist())
    print("  difference in errors", ((found.log_evidence - bridge.log_evidence) / error).tolist())


def main() -> None:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--taxa", type=int, default=29)
    parser.add_argument("--sites", type=int, default=1900)
    parser.add_argument("--topologies", type=int, default=212)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.small or not options.data:
        alignment, topologies = simulate(options.taxa, options.sites, options.topologies, options.seed)
        measured("simulated", alignment, topologies, num_draws=options.draws, seed=options.seed)
    elif options.free:
        with_free_parameters(options.data, options.draws, options.seed)
    else:
        for name in PUBLISHED:
            if (options.data / f"{name}_credible_set.txt").exists():
                against_chains(name, options.data, options.draws, options.seed)


if __name__ == "__main__":
    main()
