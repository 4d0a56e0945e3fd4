"""MrBayes in a process of its own; needs the program `mb` alone.

For `tree_evidence_peers.py`, stepping stone on a fixed topology. The model is that of `bayeskit.gallery.tree_target`:
Jukes-Cantor, branch lengths with exponential priors of rate 10. For `topology_search.py` and
`topology_parameters.py`, whatever commands they give.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer_process import serve

ESTIMATE = re.compile(r"^\s*(\d+)\s+(-\d+\.\d+)\s*$", re.MULTILINE)


def data_block(sequences: dict[str, str]) -> str:
    """Return the alignment as a NEXUS block."""
    sites = len(next(iter(sequences.values())))
    rows = "\n".join(f"{name}  {row}" for name, row in sequences.items())
    return (
        f"begin data;\ndimensions ntax={len(sequences)} nchar={sites};\n"
        f"format datatype=dna interleave=no gap=- missing=?;\nmatrix\n{rows}\n;\nend;\n"
    )


def script(task: dict[str, Any]) -> str:
    """Return what MrBayes is to do: settings `generations`, `steps`, `runs`."""
    settings, seed = task["settings"], task["seed"]
    return (
        "#NEXUS\n"
        + data_block(task["problem"]["sequences"])
        + f"begin trees;\ntree fixed_tree = {task['problem']['tree']}\nend;\n"
        + "begin mrbayes;\n"
        + f"set autoclose=yes nowarn=yes seed={seed} swapseed={seed};\n"
        + "lset nst=1 rates=equal;\n"
        + "prset statefreqpr=fixed(equal) brlenspr=unconstrained:exponential(10) topologypr=fixed(fixed_tree);\n"
        + f"ss ngen={settings['generations']} nsteps={settings['steps']} alpha=0.3 nruns={settings['runs']} nchains=1 "
        + f"samplefreq={settings['sample_every']} printfreq={settings['generations']} diagnfreq=5000 filename=run;\n"
        + "quit;\nend;\n"
    )


def read_estimates(output: str) -> list[float]:
    """Return the log marginal likelihood of each run from what MrBayes printed."""
    heading = output.rfind("Marginal likelihood (ln)")
    if heading < 0:
        raise SystemExit(f"MrBayes printed no marginal likelihood:\n{output[-3000:]}")
    table = output[heading:].split("Mean:")[0]
    return [float(value) for _, value in ESTIMATE.findall(table)]


def run(folder: str | Path, text: str) -> str:
    """Let MrBayes execute a file in a folder, and return what it printed."""
    (Path(folder) / "script.nex").write_text(text)
    done = subprocess.run([program, "script.nex"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout


def estimate(task: dict[str, Any]) -> dict[str, Any]:
    """Return the estimates of all runs; of a task with `commands`, what MrBayes printed, its files in `folder`."""
    if "commands" in task:
        block = f"begin mrbayes;\nset autoclose=yes nowarn=yes seed={task['seed']} swapseed={task['seed']};\n"
        text = "#NEXUS\n" + data_block(task["sequences"]) + block + task["commands"] + "\nquit;\nend;\n"
        return {"output": run(task["folder"], text)}
    with tempfile.TemporaryDirectory() as folder:
        output = run(folder, script(task))
    found = read_estimates(output)
    if len(found) != task["settings"]["runs"]:
        raise SystemExit(f"{len(found)} estimates of {task['settings']['runs']} runs:\n{output[-3000:]}")
    return {"estimates": found}


if __name__ == "__main__":
    program = sys.argv[1]
    version = subprocess.run([program, "-v"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    serve("MrBayes " + re.sub(r".*Version:\s*(\S+).*", r"\1", version, flags=re.DOTALL), estimate)
