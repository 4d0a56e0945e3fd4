"""Long runs: stop when it is good enough, survive an interruption, choose the kernel.

What you will learn: how a run ends by convergence, by a time budget or by Ctrl-C, how it goes on from its
checkpoint, and when the No-U-Turn sampler is worth its price.

The model is the hierarchical one of eight schools, non-centred.
"""

import os
import tempfile
import warnings
from pathlib import Path

import torch

import bayeskit as bk
from bayeskit.inference.samplers import NUTS, Convergence

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def main() -> None:
    target = bk.exact.get("eight_schools").target()

    # Many chains, one batch; look every 100 draws whether R-hat and effective sample size are good enough.
    enough = Convergence(r_hat=1.01, effective_draws=400 if SMALL else 4000)
    draws = bk.sample(
        target,
        num_chains=32,
        num_warmup=100 if SMALL else 200,
        num_samples=5000,
        seed=1,
        target_acceptance=0.9,
        stop=enough,
    )
    print(f"{draws.settings['ending']} after {draws.num_draws} of 5000 draws a chain")

    # A time budget ends a run with what it has; the same call with the same checkpoint goes on, bit for bit.
    settings = {
        "num_chains": 4,
        "num_warmup": 60 if SMALL else 100,
        "num_samples": 40 if SMALL else 400,
        "seed": 2,
        "target_acceptance": 0.9,
    }
    whole = bk.sample(target, **settings)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, parts = Path(folder) / "state", 0
        while True:
            parts += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that it was ended by the time budget
                try:
                    part = bk.sample(target, **settings, checkpoint=checkpoint, time_budget=0.5)
                except bk.errors.BudgetError:
                    continue  # the budget ended within the warm-up
            if part.settings["ending"] == "finished":
                break
    print(f"{parts} parts give the same draws: {torch.equal(part.unconstrained, whole.unconstrained)}")
    assert torch.equal(part.unconstrained, whole.unconstrained)

    # NUTS ends each trajectory where it turns back: worth trying where scales vary from place to place.
    trees = bk.sample(target, **settings, kernel=NUTS())
    print(f"NUTS: {trees.num_gradients} gradients, deepest tree {int(trees.sample_stats['tree_depth'].max())}")
    for name, one in (("HMC", whole), ("NUTS", trees)):
        values = one.values()["mu"]
        print(f"{name}: mu {float(values.mean()):.2f} +- {float(values.std()):.2f}")


if __name__ == "__main__":
    main()
