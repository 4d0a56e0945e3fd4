"""Time the likelihood and gradient of many different topologies in one call, on one thread, beside torchtree.

Usage::

    python benchmarks/forest_speed.py --data DIR [--peer-python PATH] [--rounds 5]

`DIR` holds `DS1.fasta`, `DS1_fixed_branch_lengths.nwk` and `tree_samples/DS1_short_run_rep1.trprobs`. `PATH` is a
Python with torchtree 1.0.2 and the same torch; it is run as a separate program, in turns with ours, on one topology
and one vector of branch lengths, because it knows no batch of topologies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tree_likelihood_speed import EXPECTED_NORM, EXPECTED_VALUE, make_peer_input, seconds, time_peer  # noqa: E402

from bayeskit.models.phylogenetics import Alignment, Tree  # noqa: E402
from bayeskit.models.phylogenetics._forest import ForestLikelihood  # noqa: E402
from bayeskit.models.phylogenetics._pruning._plan import make_plan  # noqa: E402
from bayeskit.models.phylogenetics._samples import TreeSample  # noqa: E402
from bayeskit.models.phylogenetics._substitution import HKY85, SubstitutionModel  # noqa: E402
from bayeskit.models.phylogenetics._topologies import Topologies  # noqa: E402
from bayeskit.models.phylogenetics._trees import edges_of_trees  # noqa: E402


def lengths_for(topologies: Topologies, *sample: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (*sample, len(topologies), topologies.num_edges)
    return 0.001 + 0.05 * torch.rand(shape, generator=generator, dtype=torch.float64)


def fresh(topologies: Topologies) -> Topologies:
    """Make a new object, which knows nothing yet of its parents and clades."""
    return Topologies(topologies.taxa, topologies.children, topologies.rooted)


def value_and_gradient(forest: ForestLikelihood, topologies: Topologies, lengths: Tensor) -> tuple[Tensor, Tensor]:
    leaf = lengths.detach().to(forest.dtype).requires_grad_()
    values = forest.log_likelihood(fresh(topologies), leaf)
    return values, torch.autograd.grad(values.sum(), leaf)[0]


def check(alignment: Alignment, tree: Tree) -> None:
    if tree.branch_lengths is None:
        raise SystemExit("the tree needs branch lengths")
    topologies, order = Topologies.from_edges(*edges_of_trees([tree]), rooted=False)
    values, slopes = value_and_gradient(ForestLikelihood(alignment), topologies, tree.branch_lengths[order])
    found, norm = values.item(), slopes.norm().item()
    wrong = max(abs(found / EXPECTED_VALUE - 1), abs(norm / EXPECTED_NORM - 1))
    print(f"log-likelihood {found:.9f}, norm of its gradient {norm:.9f}, largest relative difference {wrong:.1e}")
    if wrong > 1e-9:
        raise SystemExit(f"expected {EXPECTED_VALUE} and {EXPECTED_NORM}")


def simulate(num_taxa: int, num_sites: int, count: int) -> tuple[Alignment, Topologies]:
    """Sequences that evolved along a random tree, and some trees near it."""
    generator = np.random.default_rng(num_taxa)
    trees = [random_tree(num_taxa, generator) for _ in range(count)]
    tree = trees[0]
    states = np.empty((tree.num_edges + 1, num_sites), dtype=np.int64)
    states[-1] = generator.integers(4, size=num_sites)
    parents = tree.parents
    for node in reversed(range(tree.num_edges)):
        changed = generator.random(num_sites) < 0.05
        states[node] = np.where(changed, generator.integers(4, size=num_sites), states[parents[node]])
    rows = ["".join(np.array(list("ACGT"))[line]) for line in states[:num_taxa]]
    return Alignment.from_sequences(dict(zip(tree.taxa, rows, strict=True))), Topologies.from_trees(trees)


def random_tree(num_taxa: int, generator: np.random.Generator) -> Tree:
    parts = [f"t{number}" for number in range(num_taxa)]
    while len(parts) > 3:
        one, other = generator.choice(len(parts), 2, replace=False)
        joined = f"({parts[one]},{parts[other]})"
        parts = [part for place, part in enumerate(parts) if place not in (one, other)] + [joined]
    return Tree.from_newick(f"({','.join(parts)});")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the DS1 files")
    parser.add_argument("--peer-python", type=Path, help="a Python with torchtree 1.0.2")
    parser.add_argument("--rounds", type=int, default=5, help="turns of ours and the peer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = options.data.resolve()
    alignment = Alignment.from_file(data / "DS1.fasta")
    check(alignment, Tree.from_file(data / "DS1_fixed_branch_lengths.nwk"))
    sample = TreeSample.from_file(data / "tree_samples" / "DS1_short_run_rep1.trprobs")
    topologies = sample.topologies[:100]

    begin = time.perf_counter()
    value_and_gradient(ForestLikelihood(alignment), topologies[:10], lengths_for(topologies[:10]))
    print(
        f"first call of all, 10 topologies (compiles where the cache has no code): {time.perf_counter() - begin:.2f} s"
    )
    begin = time.perf_counter()
    value_and_gradient(ForestLikelihood(alignment), topologies, lengths_for(topologies))
    print(f"first call with an alignment, 100 topologies: {1e3 * (time.perf_counter() - begin):.1f} ms\n")

    hky = HKY85(kappa=2.0, base_frequencies=[0.3, 0.2, 0.2, 0.3])
    cases: dict[str, tuple[SubstitutionModel | None, torch.dtype, bool, Topologies, tuple[int, ...]]] = {
        "JC69, 100 topologies": (None, torch.float64, True, topologies, ()),
        "JC69, 10 topologies": (None, torch.float64, True, topologies[:10], ()),
        "JC69, 42 topologies x 1000 vectors": (None, torch.float64, True, topologies[:42], (1000,)),
        "JC69, 100 topologies, float32": (None, torch.float32, True, topologies, ()),
        "JC69, 42 topologies x 1000 vectors, float32": (None, torch.float32, True, topologies[:42], (1000,)),
        "HKY85, 100 topologies": (hky, torch.float64, True, topologies, ()),
        "JC69, 100 topologies, not compiled": (None, torch.float64, False, topologies, ()),
    }
    calls: dict[str, tuple[Callable[[], object], int, int]] = {}
    for name, (substitution, dtype, compiled, some, size) in cases.items():
        forest = ForestLikelihood(alignment, substitution, dtype=dtype, compile=compiled)
        lengths = lengths_for(some, *size)
        value_and_gradient(forest, some[:1], lengths[..., :1, :])
        evaluations = lengths[..., 0].numel()
        calls[name] = (
            lambda forest=forest, some=some, lengths=lengths: value_and_gradient(forest, some, lengths),
            evaluations,
            1 if evaluations > 1000 else 20,
        )
        calls[name][0]()
    ours: dict[str, list[float]] = {name: [] for name in calls}
    peer: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.peer_python:
            # Not resolved: a virtual environment's Python is a link that must keep its place.
            python = options.peer_python.absolute()
            tree_file = data / "DS1_fixed_branch_lengths.nwk"
            description = make_peer_input(python, data / "DS1.fasta", tree_file, Path(folder))
        for _ in range(options.rounds):
            for name, (call, evaluations, repeats) in calls.items():
                ours[name].append(seconds(call, repeats) / evaluations)
            if options.peer_python:
                peer.append(time_peer(python, description, 1)["seconds"])
    print("likelihood + gradient of DS1, assembling included, one thread, milliseconds per evaluation, medians")
    other = statistics.median(peer) if peer else float("nan")
    for name, taken in ours.items():
        print(f"{name:<45} {1e3 * statistics.median(taken):>8.4f} {other / statistics.median(taken):>6.1f} x")
    print(f"{'torchtree, one topology':<45} {1e3 * other:>8.4f}")

    forest = ForestLikelihood(alignment)
    forest.log_likelihood(topologies, lengths_for(topologies))
    print("\nassembling alone, all sets of taxa known")
    for count in (1, 10, 100):
        some = topologies[:count]
        taken = seconds(lambda some=some: make_plan(fresh(some), forest._sub_patterns(some)[0]), 50)
        print(f"{count:>4} topologies {1e3 * taken:.3f} ms")

    print("\ngrowth, simulated alignments of 1000 sites, 4 topologies, milliseconds per evaluation")
    print(f"{'taxa':>5} {'patterns':>9} {'value+gradient':>15} {'per taxon':>10} {'first call':>11}")
    for num_taxa in (10, 30, 100, 300, 1000):
        alignment, some = simulate(num_taxa, 1000, 4)
        forest, lengths = ForestLikelihood(alignment), lengths_for(some)
        begin = time.perf_counter()
        value_and_gradient(forest, some, lengths)
        first = (time.perf_counter() - begin) / 4
        taken = seconds(lambda forest=forest, some=some, lengths=lengths: value_and_gradient(forest, some, lengths), 10)
        taken /= 4
        print(
            f"{num_taxa:>5} {alignment.num_patterns:>9} {1e3 * taken:>15.3f} {1e3 * taken / num_taxa:>10.4f} "
            f"{1e3 * first:>11.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
