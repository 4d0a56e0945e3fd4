"""Print processor seconds until two runs agree, of MrBayes and of `infer_topologies`, in turns on any alignments.

    python benchmarks/topology_turns.py FILE ... [--model JC69 | HKY+G4] [--seeds 0 1 2] [--limit 600]

Each run is a process of its own on one thread. MrBayes 3.2.7 is the program `mb` on the path, at its defaults (two runs
of four chains) until the average standard deviation of split frequencies (ASDSF) is below .01; ours at its defaults,
which ask for 100 effective draws of each split as well. Branch lengths have exponential priors of rate 10 in both.
Seconds of imports and of the first compilation are left out; `limit` ends a run. `min ESS` is the effective size of the
worst split by our draws, `difference` the largest difference of a split's frequency between the programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from mrbayes_driver import data_block  # noqa: E402

from bayeskit.models.phylogenetics import Alignment, TreeSample, asdsf, parse_substitution, split_frequencies  # noqa: E402
from bayeskit.models.phylogenetics.workflows import infer_topologies  # noqa: E402

LSETS = {
    "JC69": "lset nst=1 rates=equal;\nprset statefreqpr=fixed(equal);",
    "HKY+G4": "lset nst=2 rates=gamma ngammacat=4;\nprset statefreqpr=dirichlet(1,1,1,1);",
}
DEVIATION = re.compile(r"Average standard deviation of split frequencies:\s*([\d.]+)")
CODES = "?ACMGRSVTWYHKDB?"  # of sets of bases as bits


def sequences_of(alignment: Alignment) -> dict[str, str]:
    """Return the sequences of bases of an alignment."""
    rows = alignment.patterns[:, alignment.site_patterns].tolist()
    return {f"t{place}": "".join(CODES[base] for base in row) for place, row in enumerate(rows)}


def of_mrbayes(alignment: Alignment, model: str, seed: int, limit: float, folder: Path) -> dict[str, Any]:
    """Run MrBayes until its runs agree; return its seconds, its ASDSF and its trees."""
    script = (
        f"#NEXUS\n{data_block(sequences_of(alignment))}begin mrbayes;\n"
        f"set autoclose=yes nowarn=yes seed={seed + 1} swapseed={seed + 1};\n{LSETS[model]}\n"
        "prset brlenspr=unconstrained:exponential(10);\n"
        "mcmcp ngen=50000000 stoprule=yes stopval=0.01 printfreq=1000000;\nmcmc;\nend;\n"
    )
    (folder / "data.nex").write_text(script)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["mb", "data.nex"], cwd=folder, stdout=log)
        begin = time.monotonic()
        while process.poll() is None and time.monotonic() - begin < limit:
            time.sleep(0.2)
        process.kill()
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = DEVIATION.findall((folder / "log").read_text())
    runs = [folder / f"data.nex.run{number}.t" for number in (1, 2)]
    samples = [TreeSample.from_file(run, burn_in=0.25, incomplete="warn", progress=False) for run in runs]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "asdsf": float(found[-1]), "sample": TreeSample.pooled(samples)}


def of_ours(path: str, model: str, seed: int, limit: float, folder: Path) -> dict[str, Any]:
    """Run ours in a process of its own, with its trees in a file."""
    command = [sys.executable, __file__, path, "--model", model, "--once", str(seed), str(limit), str(folder)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found | {"sample": TreeSample.from_file(folder / "ours.trees", burn_in=0, progress=False)}


def once(path: str, model: str, seed: int, limit: float, folder: Path) -> None:
    """Search in this process, and leave seconds, ASDSF and trees in the folder."""
    from bayeskit.models.phylogenetics.workflows._topology_inference import _split_effective_sizes

    warnings.simplefilter("ignore")
    alignment = Alignment.from_file(path)
    alignment = Alignment.from_sequences(sequences_of(alignment), data_type="DNA")
    substitution, site_rates = parse_substitution(model, alignment)
    given: dict[str, Any] = {"substitution": substitution, "site_rates": site_rates, "progress": False}
    infer_topologies(alignment, **given, num_warmup=10, num_samples=10)  # which compiles
    before = time.process_time()
    search = infer_topologies(alignment, **given, seed=seed, time_budget=limit)
    seconds = time.process_time() - before
    search.sample.to_file(folder / "ours.trees")
    sizes = _split_effective_sizes(search.samples)
    (folder / "found.json").write_text(
        json.dumps(
            {
                "seconds": seconds,
                "asdsf": asdsf(search.samples).average,
                "ending": search.ending,
                "effective": float(min(sizes)) if len(sizes) else float("nan"),
                "evidence": search.log_evidence,
                "error": search.evidence.standard_error,
            }
        )
    )


def main() -> None:
    """Print a row for each alignment and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--model", choices=LSETS, default="JC69")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a run is ended")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        seed, limit, folder = given.once
        once(given.files[0], given.model, int(seed), float(limit), Path(folder))
        return
    print(
        f"{'alignment':28}{'seed':>5}{'MrBayes s':>11}{'ASDSF':>8}{'ours s':>9}{'ASDSF':>8}{'min ESS':>9}"
        f"{'ratio':>7}{'difference':>12}   evidence"
    )
    for path in given.files:
        alignment = Alignment.from_file(path)
        for seed in given.seeds:
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
                theirs = of_mrbayes(alignment, given.model, seed, given.limit, Path(one))
                ours = of_ours(path, given.model, seed, given.limit, Path(other))
                table = split_frequencies([theirs["sample"], ours["sample"]]).frequencies
            print(
                f"{Path(path).name[:27]:28}{seed:5}{theirs['seconds']:11.1f}{theirs['asdsf']:8.4f}{ours['seconds']:9.1f}"
                f"{ours['asdsf']:8.4f}{ours['effective']:9.0f}{ours['seconds'] / theirs['seconds']:7.2f}"
                f"{abs(table[0] - table[1]).max():12.3f}   {ours['evidence']:.2f} +- {ours['error']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
