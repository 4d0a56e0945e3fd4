"""Parameters of GTR+G4 and the evidence of the primates, topologies unknown, beside the tables of MrBayes' `sump`.

Usage::

    python benchmarks/topology_parameters.py [--generations 300000] [--seed 0] [--small]

Both read the same NEXUS file, whose MrBayes block says `lset nst=6 rates=gamma`, with the priors that MrBayes has by
default; ours by `infer_topologies_in_folder`, which is `bayeskit trees`. MrBayes 3.2.7 is the program `mb` on the path.
Every tool runs in a process of its own, on one thread.

The table has posterior means and medians, the means' standard errors (of MrBayes, from variance and effective sample
size of `sump`), and the difference of the means in standard errors. The evidence of MrBayes is by stepping stone, over
`--stepping-generations` of each of four runs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from mrbayes_driver import data_block, read_estimates  # noqa: E402
from topology_search import mrbayes, ours  # noqa: E402
from tree_evidence_peers import sequences_of  # noqa: E402

from bayeskit.models.phylogenetics import MrBayesBlock, primates  # noqa: E402

MODEL = "lset nst=6 rates=gamma;"
BASES = "ACGT"
PAIRS = [(one, other) for place, one in enumerate(BASES) for other in BASES[place + 1 :]]
#: Names of `sump`, and ours.
NAMES = {
    **{f"r({one}<->{other})": f"exchangeabilities[{place}]" for place, (one, other) in enumerate(PAIRS)},
    **{f"pi({base})": f"base_frequencies[{place}]" for place, base in enumerate(BASES)},
    **{"alpha": "shape", "TL": "tree_length"},
}


def compared(peer: pd.DataFrame, summary: pd.DataFrame, medians: dict[str, float], num_runs: int) -> pd.DataFrame:
    """Return a row for each parameter: `peer` is the table of `sump`, `summary` that of ArviZ."""
    rows = []
    for theirs, name in NAMES.items():
        one, other = peer.loc[theirs], summary.loc[name]
        error = math.sqrt(one["Variance"] / (num_runs * one["avgESS"]))
        rows.append(
            {
                "parameter": theirs,
                "ours": other["mean"],
                "error": other["mcse_mean"],
                "median": medians[name],
                "ESS": round(other["ess_bulk"]),
                "MrBayes": one["Mean"],
                "its error": error,
                "its median": one["Median"],
                "its ESS": round(num_runs * one["avgESS"]),
                "z": (other["mean"] - one["Mean"]) / math.hypot(error, other["mcse_mean"]),
            }
        )
    return pd.DataFrame(rows)


def medians_of(file: Path) -> dict[str, float]:
    """Return the posterior medians of all elements of what was sampled."""
    import xarray as xr

    with xr.open_dataset(file, group="posterior") as posterior:
        found = {}
        for name, values in posterior.data_vars.items():
            elements = np.atleast_1d(values.median(("chain", "draw")).to_numpy())
            places = [""] if values.ndim == 2 else [f"[{place}]" for place in range(len(elements))]
            found |= {f"{name}{place}": float(value) for place, value in zip(places, elements, strict=True)}
    return found


def main() -> None:
    """Run both, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=300_000)
    parser.add_argument("--stepping-generations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept-code", action="store_true", help="use what earlier processes have compiled")
    parser.add_argument("--small", action="store_true", help="tiny settings, to see that everything works")
    options = parser.parse_args()
    generations, stones = options.generations, options.stepping_generations
    settings: dict[str, Any] = {}
    if options.small:
        generations, stones, settings = 10_000, 5_000, {"num_warmup": 60, "num_samples": 100, "num_temperatures": 5}
    sequences = sequences_of(primates()[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, out = folder / "primates.nex", folder / "ours"
        out.mkdir()
        file.write_text(f"#NEXUS\n{data_block(sequences)}begin mrbayes;\n{MODEL}\nend;\n")
        print(MrBayesBlock.from_file(file), flush=True)
        peer, tool = mrbayes(), ours(options.kept_code)
        task: dict[str, Any] = {"sequences": sequences, "seed": options.seed + 1, "folder": name}
        chains = f"{MODEL}\nmcmc ngen={generations} samplefreq=100 filename=run;\nsump;"
        theirs = peer.ask(task | {"commands": chains})
        length = f"ngen={stones} nsteps=50 samplefreq={max(1, stones // 10_000)}"
        stepping = peer.ask(task | {"commands": f"{MODEL}\nss {length} nruns=4 nchains=1 filename=stones;"})
        search = {"what": "folder", "alignment": str(file), "folder": str(out), "seed": options.seed}
        found = tool.ask(search | {"settings": settings})
        table = pd.read_csv(folder / "run.pstat", sep="\t", comment="[", index_col="Parameter")
        summary = pd.read_csv(out / "parameters.csv", index_col="parameter")
        rows = compared(table, summary, medians_of(out / "posterior.nc"), 2)
        print(rows.to_string(index=False, float_format="{:.4f}".format))
        print(f"largest |z| {rows['z'].abs().max():.1f} of {len(rows)}")
        print(f"CPU seconds: MrBayes {theirs['processor_seconds']:.1f}, ours {found['processor_seconds']:.1f}")
        print(f"ASDSF of ours {found['asdsf']:.4f}; problems: {found['problems'] or 'none'}")
        estimates = read_estimates(stepping["output"])
        mean, error = float(np.mean(estimates)), float(np.std(estimates, ddof=1)) / math.sqrt(len(estimates))
        value, own = found["evidence"]
        print(
            f"log evidence: ours {value:.3f} +- {own:.3f}; MrBayes by stepping stone {mean:.3f} +- {error:.3f} ", end=""
        )
        print(f"({len(estimates)} runs, {stepping['processor_seconds']:.1f} CPU seconds), ", end="")
        print(f"z {(value - mean) / math.hypot(own, error):.1f}")
        peer.close()
        tool.close()


if __name__ == "__main__":
    sys.exit(main())
