"""Time the likelihood and gradient of DS1 (27 taxa, 1949 sites) on one thread, beside torchtree.

Ours is ``Target.value_and_grad``: prior, transform of the branch lengths and their gradients included. A second table
has what else a user may call, for a batch of 100 vectors in turns: the likelihood of `TreeModel` and that of
`ForestLikelihood`, each with a gradient by torch's autograd, and targets that are traced or compiled.

Usage::

    python benchmarks/tree_likelihood_speed.py --data DIR [--peer-python PATH] [--rounds 5] [--calls-only]

`DIR` holds `DS1.fasta` and `DS1_fixed_branch_lengths.nwk`. `PATH` is a Python with torchtree 1.0.2
and the same torch; it is run as a separate program, in turns with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import bayeskit as bk  # noqa: E402
from bayeskit.models.phylogenetics import Alignment, ForestLikelihood, Topologies, Tree, TreeModel  # noqa: E402
from bayeskit.models.phylogenetics._trees import edges_of_trees  # noqa: E402

EXPECTED_VALUE, EXPECTED_NORM = -10145.701953426, 9596.131342050
BATCHES = (1, 100)


def check(model: TreeModel, lengths: Tensor) -> None:
    """Print the likelihood and the norm of its gradient at the tree's lengths; stop if they are wrong."""
    leaf = lengths.clone().requires_grad_(True)
    value = model.log_likelihood(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    found, norm = value.item(), gradient.norm().item()
    print(f"log-likelihood {found:.9f}, norm of its gradient {norm:.9f}")
    wrong = max(abs(found / EXPECTED_VALUE - 1), abs(norm / EXPECTED_NORM - 1))
    print(f"largest relative difference to the reference values {wrong:.1e}")
    if wrong > 1e-9:
        raise SystemExit(f"expected {EXPECTED_VALUE} and {EXPECTED_NORM}")


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of the seconds that one call takes."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def with_gradient(function: Callable[[Tensor], Tensor], lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient by autograd."""
    leaf = lengths.clone().requires_grad_(True)
    values = function(leaf)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def compare_calls(alignment: Alignment, tree: Tree, lengths: Tensor, rounds: int) -> None:
    """Print the milliseconds of value and gradient for 100 vectors, by all ways that a user has to call them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100, tree.num_edges, generator=generator, dtype=torch.float64)
    u, beta = lengths.log() + 0.01 * noise, torch.ones(100, dtype=torch.float64)
    topologies, order = Topologies.from_edges(*edges_of_trees([tree]), rooted=False)
    model, forest = TreeModel(alignment, tree), ForestLikelihood(alignment)
    traced = bk.Target.from_pyro(TreeModel(alignment, tree), compile=False)
    compiled = bk.Target.from_pyro(TreeModel(alignment, tree), compile=True)
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "ForestLikelihood": lambda: with_gradient(
            lambda given: forest.log_likelihood(topologies, given[:, order])[:, 0], u.exp()
        ),
        "TreeModel.log_likelihood": lambda: with_gradient(model.log_likelihood, u.exp()),
        "Target, traced": lambda: traced.value_and_grad(u, beta),
        "Target, compiled": lambda: compiled.value_and_grad(u, beta),
    }
    expected, slopes = calls["ForestLikelihood"]()
    found = calls["TreeModel.log_likelihood"]()
    wrong = max(
        float((found[0] / expected - 1).abs().max()), float((found[1] - slopes).abs().max() / slopes.abs().max())
    )
    print(f"TreeModel against ForestLikelihood: largest relative difference {wrong:.1e}")
    if wrong > 1e-9:
        raise SystemExit("they differ")
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(1e3 * seconds(call, 9))
    print("value and gradient of 100 vectors, float64, milliseconds, medians, and over ForestLikelihood")
    base = statistics.median(taken["ForestLikelihood"])
    for name, values in taken.items():
        print(f"{name:<26} {statistics.median(values):>7.1f} {statistics.median(values) / base:>6.2f}")


def make_peer_input(python: Path, alignment: Path, tree: Path, folder: Path) -> Path:
    """Let torchtree's own command line describe the model."""
    program = "from torchtree.cli.cli import main; main()"
    arguments = ["advi", "-i", alignment, "-t", tree, "-m", "JC69", "--keep"]
    made = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, check=True, cwd=folder)
    path = folder / "torchtree_ds1.json"
    path.write_text(made.stdout)
    return path


def time_peer(python: Path, description: Path, batch: int) -> dict[str, float]:
    """Run torchtree once in a process of its own."""
    driver = Path(__file__).with_name("torchtree_driver.py")
    made = subprocess.run(
        [python, driver, description, str(batch)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the DS1 files")
    parser.add_argument("--peer-python", type=Path, help="a Python with torchtree 1.0.2")
    parser.add_argument("--rounds", type=int, default=5, help="turns of ours and the peer")
    parser.add_argument("--calls-only", action="store_true", help="the second table only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alignment_file = options.data.resolve() / "DS1.fasta"
    tree_file = options.data.resolve() / "DS1_fixed_branch_lengths.nwk"
    tree = Tree.from_file(tree_file)
    alignment = Alignment.from_file(alignment_file)
    lengths = tree.branch_lengths
    if lengths is None:
        raise SystemExit(f"{tree_file} has no branch lengths")

    check(TreeModel(alignment, tree), lengths)
    if options.calls_only:
        return compare_calls(alignment, tree, lengths, options.rounds)
    calls: dict[tuple[torch.dtype, int], Callable[[], tuple[Tensor, Tensor]]] = {}
    for dtype in (torch.float64, torch.float32):
        target = bk.Target.from_pyro(TreeModel(alignment, tree, dtype=dtype), compile=True)
        for batch in BATCHES:
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(batch, tree.num_edges, generator=generator, dtype=torch.float64)
            u = (lengths.log() + 0.01 * noise).to(dtype)
            beta = torch.ones(batch, dtype=dtype)
            start = time.perf_counter()
            target.value_and_grad(u, beta)
            print(f"{dtype}, batch {batch}: traced and compiled in {time.perf_counter() - start:.1f} s")
            calls[dtype, batch] = lambda target=target, u=u, beta=beta: target.value_and_grad(u, beta)

    ours: dict[tuple[torch.dtype, int], list[float]] = {key: [] for key in calls}
    peer: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    description = None
    if options.peer_python:
        # Not resolved: a virtual environment's Python is a link that must keep its place.
        python = options.peer_python.absolute()
        folder = Path(os.environ.get("TMPDIR", "/tmp"))
        description = make_peer_input(python, alignment_file, tree_file, folder)
    for _ in range(options.rounds):
        for key, call in calls.items():
            ours[key].append(seconds(call, 60) / key[1])
        if description is not None:
            for batch in BATCHES:
                result = time_peer(python, description, batch)
                if abs(result["log_likelihood"] / EXPECTED_VALUE - 1) > 1e-9:
                    raise SystemExit(f"torchtree's log-likelihood is {result['log_likelihood']}")
                peer[batch].append(result["seconds"])
    print("\nlikelihood + gradient, one thread, milliseconds per evaluation, medians")
    print(f"{'batch':>6} {'float64':>9} {'float32':>9} {'torchtree':>10} {'ratio':>6}")
    for batch in BATCHES:
        double = 1e3 * statistics.median(ours[torch.float64, batch])
        single = 1e3 * statistics.median(ours[torch.float32, batch])
        line = f"{batch:>6} {double:>9.4f} {single:>9.4f}"
        if peer[batch]:
            other = 1e3 * statistics.median(peer[batch])
            line += f" {other:>10.4f} {other / double:>6.1f}"
        print(line)
    compare_calls(alignment, tree, lengths, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
