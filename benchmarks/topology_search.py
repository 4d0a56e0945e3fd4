"""Topologies from an alignment alone beside MrBayes, in turns: processor seconds, split frequencies, KL and evidence.

Usage::

    python benchmarks/topology_search.py --data DIR [--names DS1 DS2] [--seeds 0 1] [--parts search evidence stepping]
    python benchmarks/topology_search.py --small

`DIR` holds `DS1.fasta`, `DS2.fasta` and `tree_samples/DS1_raw_rep*.trprobs`, long runs whose pooled topologies are the
reference. MrBayes 3.2.7 is the program `mb` on the path. Every tool runs in a process of its own, on one thread; the
model is Jukes-Cantor, branch lengths exponential with rate 10, topologies uniform.

`search`: MrBayes at its defaults until the average standard deviation of split frequencies (ASDSF) is below .01, ours
until the same, and ours at its defaults. MrBayes counts the runs' later three quarters, ours what follows its warm-up.
Seconds of imports and of the first compilation, of which a process with kept code has none, are printed above the
table. `KL` is the divergence from the reference to a search's frequencies, where all topologies outside the reference's
95 % credible set count as one. `KL all` has each topology that the search found, and the others as one, which is mostly
the noise of finite samples: `of draws` is what as many independent draws from the reference give. Where a search has
nothing, half a tree is counted.

`evidence`: `topology_evidence` after the search at its defaults, in three ways. `stepping`: MrBayes' stepping stone
over topologies, `--stepping-generations` in each of some runs, whose standard deviation is the error of one.

`--small` takes the primates and tiny settings, to see that everything works.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402
from evidence_peers import HERE  # noqa: E402
from mrbayes_driver import read_estimates  # noqa: E402
from peer_process import PeerProcess  # noqa: E402
from tree_evidence_peers import sequences_of, write_fasta  # noqa: E402

from bayeskit.errors import MissingPackageError, SettingsError  # noqa: E402
from bayeskit.models.phylogenetics import Alignment, TreeSample, asdsf, primates  # noqa: E402
from bayeskit.models.phylogenetics._distributions import SampleFrequencies  # noqa: E402

#: Published log evidence over all topologies, by stepping stone, and its standard deviation between runs.
PUBLISHED = {"DS1": (-7108.42, 0.18), "DS2": (-26367.57, 0.48)}
MODEL = (
    "lset nst=1 rates=equal;\nprset statefreqpr=fixed(equal) brlenspr=unconstrained:exponential(10) "
    "topologypr=uniform;\n"
)
DEVIATION = re.compile(r"Average standard deviation of split frequencies:\s*([\d.]+)")
#: Ours until the runs agree, however many draws that takes; the small settings have fewer.
UNTIL: dict[str, Any] = {"stop": 0.01, "num_samples": 50_000}
#: Short enough to see that everything works.
SMALL: dict[str, Any] = {"num_warmup": 60, "num_samples": 500, "num_temperatures": 5}


def mrbayes() -> PeerProcess:
    """Return MrBayes in a process of its own.

    Raises
    ------
    MissingPackageError
        If there is no program `mb`.
    """
    program = shutil.which("mb")
    if program is None:
        raise MissingPackageError(
            "MrBayes, the program mb, is not on the path. Remedy: install it (Debian: the package mrbayes)."
        )
    return PeerProcess([sys.executable, str(HERE / "mrbayes_driver.py"), program])


def ours(kept: bool) -> PeerProcess:
    """Return our search in a process of its own, with the code that earlier processes have compiled, or with none."""
    caches = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")} if kept else None
    return PeerProcess([sys.executable, str(HERE / "topology_search_driver.py")], caches)


def pooled(folder: Path | None, name: str, taxa: Sequence[str]) -> TreeSample | None:
    """Return the topologies of long runs with equal weight a run, or None without them."""
    files = sorted((folder / "tree_samples").glob(f"{name}_raw_rep*.trprobs")) if folder else []
    return TreeSample.from_files(files, taxa=taxa, progress=False) if files else None


def classes_divergence(p: np.ndarray, q: np.ndarray, half: float) -> float:
    """Return the divergence between two distributions; a class without draws counts `half` a draw's probability."""
    some = p > 0
    return float((p[some] * np.log(p[some] / np.maximum(q[some], half))).sum())


def divergence(reference: TreeSample | None, sample: TreeSample) -> dict[str, float]:
    """Return divergences from a reference to the frequencies of topologies in a sample."""
    if reference is None:
        return {}
    half, p = 0.5 / sample.num_samples, reference.weights / reference.weights.sum()
    q = SampleFrequencies.fit(sample).log_prob(reference.topologies).exp().numpy()
    drawn = np.random.default_rng(0).multinomial(sample.num_samples, p) / sample.num_samples

    def lumped(found: np.ndarray, chosen: np.ndarray) -> float:
        rest = [np.append(share[chosen], max(1 - share[chosen].sum(), 0.0)) for share in (p, found)]
        return classes_divergence(*rest, half)

    credible = np.zeros(len(p), dtype=bool)
    credible[reference.credible_set(0.95)] = True
    return {"KL": lumped(q, credible), "KL all": lumped(q, q > 0), "of draws": lumped(drawn, drawn > 0)}


class Problem:
    """An alignment, its reference, and the processes that take turns on it."""

    def __init__(self, name: str, data: Path | None, folder: Path, small: bool) -> None:
        self.name, self.folder, self.small = name, folder, small
        self.alignment = primates()[0] if data is None else Alignment.from_file(data / f"{name}.fasta")
        self.sequences = sequences_of(self.alignment)
        self.fasta = folder / f"{name}.fasta"
        write_fasta(self.fasta, self.sequences)
        self.reference = pooled(data, name, self.alignment.taxa)

    def ask_mrbayes(self, peer: PeerProcess, commands: str, seed: int) -> tuple[dict[str, Any], Path]:
        """Return the answer of MrBayes to commands, and the folder with its files."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        task = {"sequences": self.sequences, "commands": commands, "seed": seed + 1, "folder": str(folder)}
        return peer.ask(task), folder

    def by_mrbayes(self, peer: PeerProcess, seed: int) -> dict[str, Any]:
        """Return a row of the table."""
        length = "ngen=10000 samplefreq=10 diagnfreq=1000" if self.small else "ngen=20000000"
        commands = f"{MODEL}mcmc {length} stoprule=yes stopval=0.01 filename=run;"
        answer, folder = self.ask_mrbayes(peer, commands, seed)
        found = DEVIATION.findall(answer["output"])
        if not found:
            raise SettingsError(f"MrBayes printed no split frequencies:\n{answer['output'][-2000:]}")
        runs = [TreeSample.from_file(path, taxa=self.alignment.taxa, progress=False) for path in trees_in(folder, "t")]
        return {
            "method": "MrBayes until ASDSF < .01",
            "CPU s": answer["processor_seconds"],
            "ASDSF": float(found[-1]),
            "trees": sum(run.num_samples for run in runs),
            **divergence(self.reference, TreeSample.pooled(runs)),
        }

    def by_us(self, peer: PeerProcess, method: str, seed: int, **settings: Any) -> dict[str, Any]:
        """Return a row of the table."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        task = {"what": "search", "alignment": str(self.fasta), "trees": str(folder), "seed": seed}
        answer = peer.ask(task | {"settings": settings | (SMALL if self.small else {})})
        runs = [
            TreeSample.from_file(path, 0.0, taxa=self.alignment.taxa, progress=False)
            for path in trees_in(folder, "trees")
        ]
        if abs(asdsf(runs).average - answer["asdsf"]) > 1e-9:
            raise SettingsError("the trees that were written are not those of the search")
        value, error, trusted = answer["evidence"]
        return {
            "method": method,
            "CPU s": answer["used"],
            "ASDSF": answer["asdsf"],
            "trees": answer["draws"],
            **divergence(self.reference, TreeSample.pooled(runs)),
            **self.evidence(value, error),
            "trusted": "yes" if trusted and not answer["problems"] else "no",
        }

    def evidence(self, value: float, error: float) -> dict[str, float]:
        """Return the evidence and its distance from what was published."""
        found = {"log evidence": value, "error": error}
        if self.name in PUBLISHED:
            published, spread = PUBLISHED[self.name]
            found["z, published"] = (value - published) / math.hypot(error, spread / math.sqrt(10))
        return found


def trees_in(folder: Path, ending: str) -> list[Path]:
    """Return the files of trees in a folder."""
    return sorted(folder.glob(f"*.{ending}"))


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print a table."""
    digits = {"CPU s": "{:.1f}", "seconds": "{:.1f}", "log evidence": "{:.3f}", "error": "{:.3f}", "sd": "{:.3f}"}
    formats = {name: digits.get(name, "{:.4f}").format for name in pd.DataFrame(rows).select_dtypes("float")}
    formats["z, published"] = "{:.1f}".format
    print(f"\n{title}\n" + pd.DataFrame(rows).to_string(index=False, formatters=formats, na_rep="-"), flush=True)


def search(problem: Problem, seeds: Sequence[int], peers: bool, kept: bool) -> None:
    """Let MrBayes and the search take turns."""
    peer, tool = mrbayes() if peers else None, ours(kept)
    versions = [process.about["version"] for process in (peer, tool) if process is not None]
    print(f"\n{problem.name}: {'; '.join(versions)}")
    task = {"what": "search", "alignment": str(problem.fasta), "trees": str(problem.folder), "seed": 0}
    shortest = {"num_warmup": 10, "num_samples": 8, "num_temperatures": 3}
    seconds = [tool.ask(task | {"settings": shortest})["used"] for _ in range(2)]
    print(f"first search, compiled in it: {seconds[0] - seconds[1]:.1f} CPU seconds more")
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        turns = [
            lambda seed=seed: problem.by_us(tool, "ours until ASDSF < .01", seed, **UNTIL),
            lambda seed=seed: problem.by_us(tool, "ours", seed),
        ]
        if peer is not None:
            turns.insert(0, lambda seed=seed, peer=peer: problem.by_mrbayes(peer, seed))
        for turn in turns:
            rows.append({"seed": seed} | turn())
            print(rows[-1], file=sys.stderr, flush=True)
    show(rows, f"{problem.name}, {problem.alignment.num_taxa} taxa, published {PUBLISHED.get(problem.name, '-')}")
    if peer is not None:
        peer.close()
    tool.close()


def evidence(problem: Problem, seeds: Sequence[int], kept: bool) -> None:
    """Print the evidence over all topologies in three ways."""
    tool = ours(kept)
    settings = {"num_steps": 200, "num_draws": 500, "most": 4} if problem.small else {}
    for seed in seeds:
        problem.by_us(tool, "ours", seed)
        found = tool.ask({"what": "evidence", "seed": seed, "settings": settings})
        rows = [
            {
                "method": name,
                **problem.evidence(value, error),
                "trusted": "yes" if trusted else "no",
                "seconds": seconds,
            }
            for name, value, error, trusted, seconds in found["ways"]
        ]
        used = found["processor_seconds"]
        show(rows, f"{problem.name}, seed {seed}, three ways: {used:.1f} CPU seconds after the search's")
        print(found["verdict"], flush=True)
    tool.close()


def stepping(problem: Problem, generations: int, runs: int) -> None:
    """Print the evidence by MrBayes' stepping stone."""
    peer = mrbayes()
    length = f"ngen={generations} nsteps=50 samplefreq={max(1, generations // 10_000)}"
    commands = f"{MODEL}ss {length} nruns={runs} nchains=1 diagnfreq=5000 filename=run;"
    answer, _ = problem.ask_mrbayes(peer, commands, 0)
    found = read_estimates(answer["output"])
    used, spread = answer["processor_seconds"], float(np.std(found, ddof=1))
    row = {"method": f"MrBayes, {generations} generations", "runs": runs, "CPU s": used / runs, "sd": spread}
    mean = problem.evidence(float(np.mean(found)), spread / runs**0.5)
    show([row | mean], f"{problem.name}, stepping stone of MrBayes, seconds of one run, mean and its error")
    print("all runs", found, flush=True)
    peer.close()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--names", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--parts", nargs="+", default=["search", "evidence", "stepping"], metavar="PART")
    parser.add_argument("--without-mrbayes", action="store_true", help="ours alone")
    parser.add_argument("--kept-code", action="store_true", help="use what earlier processes have compiled")
    parser.add_argument("--stepping-generations", type=int, default=1_000_000)
    parser.add_argument("--stepping-runs", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="the primates with tiny settings")
    options = parser.parse_args()
    if not (options.small or options.data):
        parser.error("--data is needed, or --small")
    torch.set_num_threads(1)
    names = ["primates"] if options.small else options.names
    generations = 5000 if options.small else options.stepping_generations
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            problem = Problem(name, None if options.small else options.data, Path(folder), options.small)
            if "search" in options.parts:
                search(problem, options.seeds, not options.without_mrbayes, options.kept_code)
            if "evidence" in options.parts:
                evidence(problem, options.seeds, options.kept_code)
            if "stepping" in options.parts and not options.without_mrbayes:
                stepping(problem, generations, options.stepping_runs)


if __name__ == "__main__":
    main()
