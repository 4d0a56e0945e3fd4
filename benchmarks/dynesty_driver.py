"""Nested sampling by dynesty, run by `evidence_peers.py` with a Python that has it."""

from __future__ import annotations

from typing import Any

import dynesty
import numpy as np
from peer_process import serve
from regression_likelihood import Regression


def estimate(task: dict[str, Any]) -> dict[str, Any]:
    """Return the log evidence of one run: settings `live`, `sample` and `remaining`."""
    problem, settings = Regression(task["problem"]), task["settings"]
    sampler = dynesty.NestedSampler(
        problem.log_likelihood,
        problem.prior_transform,
        problem.dim,
        nlive=settings["live"],
        bound="multi",
        sample=settings["sample"],
        rstate=np.random.default_rng(task["seed"]),
    )
    sampler.run_nested(dlogz=settings["remaining"], print_progress=False)
    found = sampler.results
    return {
        "log_evidence": float(found.logz[-1]),
        "standard_error": float(found.logzerr[-1]),
        "evaluations": problem.evaluations,
    }


if __name__ == "__main__":
    serve(f"dynesty {dynesty.__version__}", estimate)
