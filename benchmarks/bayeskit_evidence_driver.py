"""One of our evidence methods in a process of its own, as the peers have theirs; run by `evidence_peers.py`.

A target is kept from task to task: the first answer holds tracing and compilation, the others do not.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from peer_process import serve
from torch import Tensor

import bayeskit as bk
from bayeskit.gallery import tree_target
from bayeskit.inference import evidence


def regression(design: Tensor, response: Tensor, prior_sd: Tensor, noise_sd: Tensor | None) -> None:
    """Sample the coefficients of a linear, or without noise logistic, regression."""
    b = pyro.sample("b", dist.Normal(torch.zeros_like(design[0]), prior_sd).to_event(1))
    predictor = design @ b
    with pyro.plate("observations", len(response)):
        likelihood = dist.Bernoulli(logits=predictor) if noise_sd is None else dist.Normal(predictor, noise_sd)
        pyro.sample("y", likelihood, obs=response)


def make_target(problem: dict[str, Any]) -> bk.Target:
    """Return the target of a regression, or of a tree where there is an `alignment`."""
    if "alignment" in problem:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree.nwk"
            tree.write_text(problem["tree"] + "\n")
            return tree_target(problem["alignment"], tree)
    names = ("design", "response", "prior_sd", "noise_sd")
    values = [None if problem[n] is None else torch.tensor(problem[n], dtype=torch.float64) for n in names]
    return bk.Target.from_pyro(regression, *values)


targets: dict[str, bk.Target] = {}


def estimate(task: dict[str, Any]) -> dict[str, Any]:
    """Return what `evidence.compare` finds with one method: settings `method` and `budget`."""
    problem, method = task["problem"], task["settings"]["method"]
    if problem["name"] not in targets:
        targets[problem["name"]] = make_target(problem)
    budget = evidence.Budget(**task["settings"]["budget"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = evidence.compare(targets[problem["name"]], [method], seed=task["seed"], budget=budget, progress=False)[
            method
        ]
    return {
        "log_evidence": found.log_evidence,
        "standard_error": found.standard_error,
        "evaluations": found.num_evaluations,
        "trusted": found.trusted,
        "warnings": list(found.warnings),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(f"bayeskit {bk.__version__}", estimate)
