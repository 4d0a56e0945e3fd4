"""Past one process: groups of chains, and several models, at once.

What you will learn: how to divide chains into groups that run in processes of their own, why the draws do not depend
on how many processes there are, how to send the same work to a Dask cluster, and how to compare models in parallel.

The models are two regressions of the strength of radiata pine specimens, whose Bayes factor is known.
"""

import os
import tempfile

import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit.inference.evidence import Budget
from bayeskit.workflows.model_comparison import compare_models

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def main() -> None:
    density, adjusted = exact.radiata_pine("x"), exact.radiata_pine("z")

    # Four groups of chains, each of which warms up by itself. num_groups is part of what is drawn; num_jobs is not.
    # A process needs seconds to start and to compile: it pays where a group works for minutes.
    lengths = {"num_warmup": 20, "num_samples": 10} if SMALL else {"num_warmup": 200, "num_samples": 1000}
    settings = {"num_chains": 16, "num_groups": 4, **lengths}
    here = bk.sample(density.target(), **settings)
    elsewhere = bk.sample(density.target(), **settings, num_jobs=2)
    print(f"{elsewhere}: {torch.equal(here.unconstrained, elsewhere.unconstrained)} to the last bit")
    assert torch.equal(here.unconstrained, elsewhere.unconstrained)

    # With a Dask client, of this machine or of many, the same call goes to its workers:
    #     with joblib.parallel_config(backend="dask"):
    #         bk.sample(target, **settings, num_jobs=8)
    # A worker that dies costs its group and nothing else; with checkpoint=FOLDER, only the last seconds of it.

    # One model a task. Results are kept in the folder, so that a killed comparison goes on.
    models = {"density": density.target(), "adjusted density": adjusted.target()}
    with tempfile.TemporaryDirectory() as folder:
        budget = Budget(16, 100 if SMALL else 200, 100 if SMALL else 1000)
        comparison = compare_models(models, "bridge_sampling", budget=budget, num_jobs=2, checkpoint=folder)
    print(comparison)
    factor, error = comparison.log_bayes_factor("adjusted density", "density")
    truth = adjusted.log_evidence - density.log_evidence
    print(f"log Bayes factor of the resin-adjusted density: {factor:.3f} +- {error:.3f}, exactly {truth:.3f}")
    assert abs(factor - truth) < 4 * error


# Processes import this file, so what it does must wait for this.
if __name__ == "__main__":
    main()
