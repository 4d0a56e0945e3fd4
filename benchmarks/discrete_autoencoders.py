"""Gradient estimators compared by held-out log likelihood of discrete autoencoders, at equal function evaluations.

4,000 images of MNIST to train, 1,000 to test, binarised once with a fixed seed; perceptrons 784-200 and back, with 30
one-hot variables of 10 categories, or 50 bits; minibatches of 100. Every estimator evaluates the decoder at four codes
for each image and step, REBAR at three. The log likelihood of a test image is estimated from importance samples of
its guide, and too low by what those miss (Pareto k above .7 for nearly all images: compare rows, not with exact
values); the bound is of 20 draws an image, and of the very codes, also where training saw relaxed ones, whose loss is
no bound. Adam, learning rate 1e-3, norms of gradients clipped at 1,000. Each training is a task: with
``--checkpoint DIR`` a run that was cut off goes on where it stopped.

    python benchmarks/discrete_autoencoders.py --seeds 3 --epochs 60 --jobs 2 --checkpoint DIR [--only DisARM]
    python benchmarks/discrete_autoencoders.py --quick
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import pyro
import torch

from bayeskit.inference.gradients import (
    ARM,
    REBAR,
    DisARM,
    GradientEstimator,
    GumbelSoftmax,
    ImportanceWithoutReplacement,
    LeaveOneOut,
    MovingAverage,
    RaoBlackwell,
    ScoreFunction,
    StraightThrough,
    UnorderedSet,
)
from bayeskit.inference.gradients._space import space_of
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.training import fit
from bayeskit.models.vae import binarize, load_mnist5000
from bayeskit.models.vae._discrete import DiscreteVAE, binary_vae, categorical_vae
from bayeskit.parallel import map_tasks

EVALUATIONS = 4
#: Far above usual norms, some 10 to 100, so that it is for the rare step alone.
CLIPPING = 1000.0
ESTIMATORS: dict[str, Callable[[], GradientEstimator]] = {
    "moving average": lambda: ScoreFunction(EVALUATIONS, MovingAverage()),
    "leave one out": lambda: LeaveOneOut(EVALUATIONS),
    "unordered set": lambda: UnorderedSet(EVALUATIONS),
    "unordered set, baseline": lambda: UnorderedSet(EVALUATIONS, baseline=True),
    "importance, normalised": lambda: ImportanceWithoutReplacement(EVALUATIONS, normalised=True),
    "top 3 and a draw": lambda: RaoBlackwell(EVALUATIONS - 1, 1),
    "Gumbel-softmax": lambda: GumbelSoftmax(num_samples=EVALUATIONS),
    "straight-through": lambda: StraightThrough(EVALUATIONS),
    "REBAR": lambda: REBAR(),
}
FOR_BITS: dict[str, Callable[[], GradientEstimator]] = {
    "ARM": lambda: ARM(EVALUATIONS // 2),
    "DisARM": lambda: DisARM(EVALUATIONS // 2),
}
MODELS: dict[str, Callable[[], DiscreteVAE]] = {
    "categorical": categorical_vae,
    "binary": binary_vae,
}


@dataclass(frozen=True)
class Training:
    """One row of one seed."""

    model: str
    estimator: str
    seed: int
    epochs: int
    samples: int
    num_train: int
    num_test: int


def run(task: Training) -> dict[str, float]:
    """Train one network and estimate its held-out log likelihood."""
    pyro.enable_validation(False)
    data = load_mnist5000()
    train, test = binarize(data.train, seed=0)[: task.num_train], binarize(data.test, seed=1)[: task.num_test]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        vae = MODELS[task.model]()
    estimator = {**ESTIMATORS, **FOR_BITS}[task.estimator]()
    vae.gradient = estimator
    evaluations = estimator.num_evaluations(space_of(vae.posterior(train[:1])))
    begin = time.process_time()
    result = fit(
        vae.model,
        vae.guide,
        ELBO(),
        train,
        num_epochs=task.epochs,
        batch_size=100,
        gradient_clipping=CLIPPING,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        seed=task.seed,
        progress=False,
    )
    trained = time.process_time()
    vae.gradient = None
    held_out = importance_sampling(vae.model, vae.guide, test, num_draws=task.samples, seed=0, progress=False)
    steps = -(-len(train) // 100)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        bound = -ELBO(num_particles=20).differentiable_loss(vae.model, vae.guide, test) / len(test)
    return {
        "evaluations": evaluations,
        "log_likelihood": float(held_out.mean),
        "standard_error": float(held_out.standard_error),
        "bound": float(bound),
        "training_loss": float(result.losses[-steps:].mean()),
        "pareto_k_above": float((held_out.pareto_k > 0.7).double().mean()),
        "training_seconds": trained - begin,
    }


def tasks_of(options: argparse.Namespace, seed: int) -> list[Training]:
    """Return the trainings of one seed."""
    epochs, samples, sizes = options.epochs, options.samples, (4000, 1000)
    if options.quick:
        epochs, samples, sizes = 1, 50, (200, 20)
    return [
        Training(model, name, seed, epochs, samples, *sizes)
        for model in options.models
        for name in (ESTIMATORS | FOR_BITS if model == "binary" else ESTIMATORS)
        if options.only is None or name in options.only
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--checkpoint", help="folder that keeps finished trainings, one below it a seed and row")
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--only", nargs="*", choices=[*ESTIMATORS, *FOR_BITS])
    parser.add_argument("--quick", action="store_true", help="one epoch of 200 images, to see that it runs")
    options = parser.parse_args()
    rows = []
    for seed in range(1 if options.quick else options.seeds):
        tasks = tasks_of(options, seed)
        folder = None if options.checkpoint is None else f"{options.checkpoint}/seed_{seed}"
        results = map_tasks(run, tasks, num_jobs=options.jobs, checkpoint=folder, description=f"seed {seed}")
        rows += [{"model": t.model, "estimator": t.estimator, **r} for t, r in zip(tasks, results, strict=True)]
        table = pd.DataFrame(rows).groupby(["model", "estimator"], sort=False)
        summary = table.agg("mean")
        if seed:
            summary.insert(2, "sd_over_seeds", table["log_likelihood"].std())
        print(f"\nafter {seed + 1} seeds\n{summary.round(3).to_string()}", flush=True)


if __name__ == "__main__":
    main()
