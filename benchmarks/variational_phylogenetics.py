"""Fit a subsplit Bayesian network to DS1 by variational inference: steps a second, bounds and evidence as they grow.

Usage::

    python benchmarks/variational_phylogenetics.py --data DIR [--minutes 60] [--steps 200000] [--splits-only] [--wake]
    python benchmarks/variational_phylogenetics.py --data DIR --support none|few|short [--grow] [--name DS2]
    python benchmarks/variational_phylogenetics.py --data DIR --speed-only [--peer-python PATH --peer DIR]

`DIR` holds `DS1.fasta` and `tree_samples/DS1_short_run_rep1.trprobs`, whose topologies make the support; `few` takes
the ten best only, and `none` searches from the alignment alone. `tree_samples/DS1_raw_rep*.trprobs`, pooled, are what
the topologies are compared with. The run ends after `--steps`, or after `--minutes` if that comes first; the inverse
temperature rises over the first half of the steps or of the minutes. With `--checkpoint FILE` it goes on where it was
ended.

`PATH` is a Python with torch, ete3, biopython, bitarray and dendropy, and the peer's folder is `unrooted` of
vbpi-torch; it is run as a separate program on the same support and with as many particles.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bayeskit.errors import SamplingWarning  # noqa: E402
from bayeskit.inference.objectives import IWAE, Linear, ReweightedWakeSleep  # noqa: E402
from bayeskit.models.phylogenetics import Alignment, Topologies, TreeSample  # noqa: E402
from bayeskit.models.phylogenetics.workflows import SupportGrowth  # noqa: E402
from bayeskit.models.phylogenetics.workflows._variational import (
    LearningRates,  # noqa: E402
    LogNormalLengths,  # noqa: E402
    VariationalPosterior,  # noqa: E402
    variational_inference,  # noqa: E402
)

#: Published lower bound of one sample, and log evidence.
PUBLISHED = {"DS1": (-7110.24, -7108.42), "DS2": (-26368.88, -26367.57)}
#: A tree is starved where its probability is less than this share of that in the reference.
STARVED = 0.1
PEER = """
import sys, time
import numpy as np
sys.path.insert(0, sys.argv[1])
from dataManipulation import loadData
from utils import get_support_from_mcmc, mcmc_treeprob
from vbpi import VBPI
trees, names, _ = mcmc_treeprob(sys.argv[3], "nexus", taxon="keep")
data, taxa = loadData(sys.argv[2], "fasta")
support = get_support_from_mcmc(taxa, trees, names)
model = VBPI(taxa, *support, data, pden=np.ones(4) / 4, subModel=("JC", 1.0), psp=True)
model.learn(0.001, maxiter=5, test_freq=1000)
begin, used = time.perf_counter(), time.process_time()
model.learn(0.001, maxiter=int(sys.argv[4]), test_freq=10**6, n_particles=int(sys.argv[5]))
count = int(sys.argv[4])
print("steps a second", count / (time.perf_counter() - begin), count / (time.process_time() - used))
"""


def report(found: VariationalPosterior, draws: int, name: str) -> None:
    bound, evidence = PUBLISHED[name]
    one, ten = found.lower_bound(1, draws), found.lower_bound(10, draws // 10)
    print(f"lower bound, 1 sample    {one.value:.3f} +- {one.standard_error:.3f}   (published {bound})")
    print(f"lower bound, 10 samples  {ten.value:.3f} +- {ten.standard_error:.3f}")
    print(found.log_evidence(draws), f"  (published {evidence})")


def pooled(data: Path, name: str, taxa: tuple[str, ...]) -> TreeSample:
    files = sorted((data / "tree_samples").glob(f"{name}_raw_rep*.trprobs"))
    runs = [TreeSample.from_file(file, taxa=taxa, progress=False) for file in files]
    topologies = Topologies(taxa, np.concatenate([run.topologies.children for run in runs]))
    return TreeSample.from_topologies(topologies, np.concatenate([run.weights for run in runs]))


def compare(found: VariationalPosterior, reference: TreeSample) -> None:
    credible = reference.credible_set(0.95)
    share = reference.weights[credible]
    log_q = found.topologies.log_prob(reference.topologies).numpy()
    inside = np.isfinite(log_q)
    log_p, p = np.log(reference.weights), reference.weights
    starved = np.exp(log_q[credible]) < STARVED * share
    print(
        f"support: {found.topologies.graph.num_options} options, {int(inside[credible].sum())} of {len(credible)} ",
        end="",
    )
    print(f"credible trees, {p[inside].sum():.4f} of the reference's mass")
    print(f"KL from the reference, of what is in the support: {(p * (log_p - log_q))[inside].sum():.4f}")
    print(f"starved: {int(starved.sum())} credible trees with {share[starved].sum():.4f} of the mass")


def run_peer(python: Path, folder: Path, data: Path, particles: int, steps: int) -> str:
    inputs = [folder.resolve(), data / "DS1.fasta", data / "tree_samples" / "DS1_short_run_rep1.trprobs"]
    arguments = [str(python.absolute()), "-c", PEER, *map(str, inputs), str(steps), str(particles)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"the peer failed:\n{result.stderr[-2000:]}")
    return result.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the DS1 files")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--particles", type=int, default=10)
    parser.add_argument("--draws", type=int, default=10_000, help="for bounds and evidence at the end")
    parser.add_argument("--rate", type=float, default=0.001, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--splits-only", action="store_true", help="no primary subsplit pairs")
    parser.add_argument("--wake", action="store_true", help="reweighted wake-sleep in place of the bound")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--name", default="DS1", choices=list(PUBLISHED))
    parser.add_argument("--support", default="short", choices=["short", "few", "none"])
    parser.add_argument("--grow", action="store_true", help="let a given support grow, too")
    parser.add_argument("--speed-only", action="store_true", help="200 steps, and no bounds")
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--peer", type=Path, help="the folder `unrooted` of vbpi-torch")
    parser.add_argument("--peer-steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = options.data.resolve()
    alignment = Alignment.from_file(data / f"{options.name}.fasta")
    short = data / "tree_samples" / f"{options.name}_short_run_rep1.trprobs"
    support: TreeSample | Topologies | None = None
    if options.support != "none":
        sample = TreeSample.from_file(short, taxa=alignment.taxa)
        support = sample if options.support == "short" else sample.topologies[sample.top(10)]
    steps = 200 if options.speed_only else options.steps
    kind = ReweightedWakeSleep if options.wake else IWAE
    if options.speed_only:
        # The first step compiles where the cache has no code.
        variational_inference(alignment, support, num_steps=5, annealing=Linear(1000, start=0.001), progress=False)
    used = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # the budget ends it
        found = variational_inference(
            alignment,
            support,
            lengths=LogNormalLengths(with_pairs=not options.splits_only),
            objective=kind(options.particles),
            num_steps=steps,
            growth=SupportGrowth() if options.grow else None,
            learning_rates=LearningRates(options.rate, options.rate, every=max(1, options.steps // 10)),
            seed=options.seed,
            checkpoint=options.checkpoint,
            checkpoint_seconds=60.0,
            time_budget=60 * options.minutes,
        )
    used = time.process_time() - used
    print(f"{found.num_steps} steps in {found.seconds:.1f} s: {found.num_steps / found.seconds:.1f} a second, ", end="")
    print(f"{found.num_steps / used:.1f} a second of one core's own time (if not resumed)")
    if options.peer_python and options.peer:
        print("vbpi-torch, by the clock and by its own time:", end=" ")
        print(run_peer(options.peer_python, options.peer, data, options.particles, options.peer_steps))
    if options.speed_only:
        return
    print(f"\n{'step':>8} {'mean bound of ' + str(options.particles) + ' samples':>28}")
    done = 0
    for block in found.bounds.tensor_split(20):
        done += len(block)
        print(f"{done:>8} {float(block.mean()):>28.3f}")
    report(found, options.draws, options.name)
    compare(found, pooled(data, options.name, alignment.taxa))


if __name__ == "__main__":
    sys.exit(main())
