"""Our search for topologies in a process of its own, as MrBayes has its.

Run by `topology_search.py` and `topology_parameters.py`.

A search is kept, so that the evidence over all topologies can be asked for afterwards.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from peer_process import processor_seconds, serve

import bayeskit as bk
from bayeskit.models.phylogenetics import Alignment
from bayeskit.models.phylogenetics.workflows import TopologyInference, infer_topologies, topology_evidence
from bayeskit.models.phylogenetics.workflows._topology_folder import infer_topologies_in_folder

searches: dict[str, TopologyInference] = {}


def in_folder(task: dict[str, Any]) -> dict[str, Any]:
    """Do what `bayeskit trees` does with a file whose MrBayes block chooses the model: `alignment`, `folder`."""
    found, _ = infer_topologies_in_folder(
        task["alignment"], task["folder"], evidence=False, seed=task["seed"], progress=False, **task["settings"]
    )
    evidence = found.evidence
    return {
        "asdsf": found.asdsf,
        "problems": list(found.problems),
        "evidence": [evidence.log_evidence, evidence.standard_error],
    }


def search(task: dict[str, Any]) -> dict[str, Any]:
    """Search from an `alignment` under Jukes-Cantor: `settings`, and `trees`, the folder for the trees of each run."""
    begin = processor_seconds()
    alignment = Alignment.from_file(task["alignment"])
    settings = dict(task["settings"])
    if "dtype" in settings:
        settings["dtype"] = getattr(torch, settings["dtype"])
    found = infer_topologies(alignment, seed=task["seed"], progress=False, **settings)
    evidence, convergence = found.evidence, found.asdsf
    used = processor_seconds() - begin
    for number, sample in enumerate(found.samples, start=1):
        sample.to_file(Path(task["trees"]) / f"run{number}.trees")
    searches["last"] = found
    return {
        "used": used,
        "asdsf": convergence,
        "draws": int(found.sample.num_samples),
        "ending": found.ending,
        "problems": list(found.problems),
        "evidence": [evidence.log_evidence, evidence.standard_error, evidence.trusted],
    }


def three_ways(task: dict[str, Any]) -> dict[str, Any]:
    """Return the evidence over all topologies of the last search: `settings` of `topology_evidence`."""
    found = topology_evidence(searches["last"], seed=task["seed"], progress=False, **task["settings"])
    ways = [[z.method, z.log_evidence, z.standard_error, z.trusted, z.seconds or math.nan] for z in found.table]
    verdict = found.verdict
    return {"ways": ways, "verdict": str(verdict), "total": [verdict.log_evidence, verdict.standard_error]}


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Do what a task asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"search": search, "evidence": three_ways, "folder": in_folder}[task["what"]](task)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(f"bayeskit {bk.__version__}, {processor_seconds():.1f} CPU seconds of imports", answer)
