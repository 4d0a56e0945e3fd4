"""Tempered sequential Monte Carlo by PyMC, run by `evidence_peers.py` with a Python that has it.

PyMC gives one estimate a chain and no error: the error here is that of their mean, from their spread. What it spends
on building its kernel (compilation) is reported apart where the chains run in this process.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pymc as pm
from peer_process import processor_seconds, serve
from pymc.smc.kernels import IMH

preparing = {"seconds": 0.0, "processor_seconds": 0.0}


@contextmanager
def counted() -> Iterator[None]:
    """Add what is done to what PyMC spends on preparation."""
    clock, processor = time.perf_counter(), processor_seconds()
    yield
    preparing["seconds"] += time.perf_counter() - clock
    preparing["processor_seconds"] += processor_seconds() - processor


class TimedKernel(IMH):
    """PyMC's default kernel, which notes what its preparation costs."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        with counted():
            super().__init__(*args, **settings)

    def _initialize_kernel(self) -> None:
        with counted():
            super()._initialize_kernel()


models: dict[str, pm.Model] = {}


def model_of(problem: dict[str, Any]) -> pm.Model:
    """Return the model, the same object every time."""
    if problem["name"] not in models:
        design = np.asarray(problem["design"], dtype=float)
        response = np.asarray(problem["response"], dtype=float)
        with pm.Model() as model:
            b = pm.Normal("b", 0.0, problem["prior_sd"], shape=design.shape[1])
            predictor = pm.math.dot(design, b)
            if problem["noise_sd"] is None:
                pm.Bernoulli("y", logit_p=predictor, observed=response)
            else:
                pm.Normal("y", predictor, problem["noise_sd"], observed=response)
        models[problem["name"]] = model
    return models[problem["name"]]


def of_chains(stages: Any) -> list[float]:
    """Return the estimate of each chain: the last number of its list, the innermost of however many lists."""
    if not isinstance(stages[0], list):
        values = np.asarray(stages, dtype=float)
        return [float(values[np.isfinite(values)][-1])]
    return [value for one in stages for value in of_chains(one)]


def estimate(task: dict[str, Any]) -> dict[str, Any]:
    """Return the log evidence of one run: settings `draws`, `chains` and `cores`."""
    settings = task["settings"]
    preparing.update(seconds=0.0, processor_seconds=0.0)
    with model_of(task["problem"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = pm.sample_smc(
            draws=settings["draws"],
            kernel=TimedKernel if settings["cores"] == 1 else IMH,
            chains=settings["chains"],
            cores=settings["cores"],
            random_seed=task["seed"],
            progressbar=False,
            compute_convergence_checks=False,
        )
    logs = np.array(of_chains(data.sample_stats["log_marginal_likelihood"].values.tolist()))
    if len(logs) != settings["chains"]:
        raise SystemExit(f"{len(logs)} estimates of {settings['chains']} chains")
    ratios = np.exp(logs - logs.max())
    return {
        "log_evidence": float(logs.max() + np.log(ratios.mean())),
        "standard_error": float(ratios.std(ddof=1) / ratios.mean() / len(ratios) ** 0.5),
        "preparing": dict(preparing),
    }


if __name__ == "__main__":
    logging.getLogger("pymc").setLevel(logging.ERROR)
    serve(f"PyMC {pm.__version__}", estimate)
