"""Tasks of the simulation-based inference benchmark: samples of amortised posteriors beside exact ones, and beside sbi.

    python benchmarks/simulator_tasks.py --simulations 10000
    python benchmarks/simulator_tasks.py --simulations 10000 --sbi ENVIRONMENT/bin/python

Two moons, a Gaussian mixture with components of two widths, and five parameters with a simple likelihood and a
complicated posterior (SLCP; Lueckmann et al. 2021). A classifier is trained to tell draws of a posterior from exact
draws, by cross-validation: its accuracy (C2ST) is .5 for the exact posterior and 1 for one beside it. The network gets
the given number of simulations, once; with --sbi, the neural posterior estimation of sbi at its defaults gets as many
in an environment of its own, takes the time it takes, and ours has the same time at most. A second row has new
simulations in each step, and a third the correction by the likelihood, which sbi does not have.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

import bayeskit as bk
from bayeskit.inference.samplers import sample_smc

FLOAT = torch.float64
NUM_DRAWS, NUM_DATA = 2000, 5


class Moon(TorchDistribution):
    """A point on a half circle of radius about .1, moved by two parameters."""

    arg_constraints: dict = {}
    support = constraints.real_vector
    has_rsample = False

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta
        super().__init__(theta.shape[:-1], torch.Size((2,)), validate_args=False)

    def expand(self, batch_shape, _instance=None):
        """Return the distribution with another batch shape."""
        return Moon(self.theta.expand(*batch_shape, 2))

    def _shift(self) -> Tensor:
        first, second = self.theta.unbind(-1)
        return torch.stack([-(first + second).abs(), second - first], -1) / math.sqrt(2)

    def sample(self, sample_shape=()):
        """Draw points."""
        shape = (*sample_shape, *self.batch_shape)
        angle = math.pi * (torch.rand(shape, dtype=FLOAT) - 0.5)
        radius = 0.1 + 0.01 * torch.randn(shape, dtype=FLOAT)
        return torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1) + self._shift()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density; that of negative radii, ten standard deviations away, is left out."""
        place = value - self._shift() - torch.tensor([0.25, 0.0], dtype=FLOAT)
        radius = place.square().sum(-1).sqrt().clamp(min=1e-12)
        density = dist.Normal(torch.tensor(0.1, dtype=FLOAT), 0.01).log_prob(radius) - math.log(math.pi) - radius.log()
        return torch.where(place[..., 0] > 0, density, -torch.inf)


def two_moons(x):
    theta = pyro.sample("theta", dist.Uniform(-torch.ones(2, dtype=FLOAT), 1.0).to_event(1))
    pyro.sample("x", Moon(theta), obs=x)


def gaussian_mixture(x):
    theta = pyro.sample("theta", dist.Uniform(torch.full((2,), -10.0, dtype=FLOAT), 10.0).to_event(1))
    scales = torch.tensor([1.0, 0.1], dtype=FLOAT).unsqueeze(-1).expand(2, 2)
    parts = dist.Normal(theta.unsqueeze(-2).expand(*theta.shape[:-1], 2, 2), scales).to_event(1)
    pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.full((2,), 0.5, dtype=FLOAT)), parts), obs=x)


def slcp(x):
    theta = pyro.sample("theta", dist.Uniform(torch.full((5,), -3.0, dtype=FLOAT), 3.0).to_event(1))
    first, second, correlation = theta[2].square(), theta[3].square(), theta[4].tanh()
    root = torch.stack([correlation * second, (1 - correlation.square()).clamp(min=1e-12).sqrt() * second])
    factor = torch.stack([torch.stack([first, torch.zeros_like(first)]), root])
    with pyro.plate("points", 4):
        pyro.sample("x", dist.MultivariateNormal(theta[:2], scale_tril=factor), obs=x)


TASKS = {"two_moons": (two_moons, (2,)), "gaussian_mixture": (gaussian_mixture, (2,)), "slcp": (slcp, (4, 2))}


def exact_draws(name: str, x: Tensor, seed: int) -> Tensor:
    """Draw from the exact posterior, ``(NUM_DRAWS, d)``."""
    generator = torch.Generator().manual_seed(seed)
    if name == "two_moons":
        kept: list[Tensor] = []
        while sum(len(part) for part in kept) < NUM_DRAWS:
            angle = math.pi * (torch.rand(20_000, generator=generator, dtype=FLOAT) - 0.5)
            radius = 0.1 + 0.01 * torch.randn(20_000, generator=generator, dtype=FLOAT)
            noise = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1)
            shift = (x - noise) * math.sqrt(2)
            sign = 2.0 * torch.randint(2, (20_000,), generator=generator) - 1
            total, difference = -shift[:, 0] * sign, shift[:, 1]
            theta = torch.stack([total - difference, total + difference], -1) / 2
            kept.append(theta[(shift[:, 0] <= 0) & (theta.abs() <= 1).all(-1)])
        return torch.cat(kept)[:NUM_DRAWS]
    if name == "gaussian_mixture":
        kept = []
        while sum(len(part) for part in kept) < NUM_DRAWS:
            noise = torch.randn(20_000, 2, generator=generator, dtype=FLOAT)
            scale = torch.where(torch.rand(20_000, 1, generator=generator) < 0.5, 1.0, 0.1)
            theta = x + scale * noise
            kept.append(theta[(theta.abs() <= 10).all(-1)])
        return torch.cat(kept)[:NUM_DRAWS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = sample_smc(bk.Target.from_pyro(slcp, x), seed=seed, progress=False)
    theta = run.draws["theta"].flatten(0, 1)
    # Signs of the third and the fourth parameter do not matter.
    signs = 2.0 * torch.randint(2, (len(theta), 2), generator=generator) - 1
    theta = torch.cat([theta[:, :2], theta[:, 2:4].abs() * signs, theta[:, 4:]], -1)
    return theta[torch.randperm(len(theta), generator=generator)[:NUM_DRAWS]]


def c2st(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cross-validated accuracy of a classifier between two samples ``(n, d)``."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neural_network import MLPClassifier

    mean, sd = one.mean(0), one.std(0)
    data = np.concatenate([(one - mean) / sd, (other - mean) / sd])
    label = np.r_[np.zeros(len(one)), np.ones(len(other))]
    width = 10 * one.shape[1]
    classifier = MLPClassifier((width, width), max_iter=500, random_state=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return float(cross_val_score(classifier, data, label, cv=KFold(5, shuffle=True, random_state=1)).mean())


PEER = """
import sys, time
import numpy as np, torch
torch.set_num_threads(1)
from sbi.inference import NPE
from sbi.utils import BoxUniform
folder, limit = sys.argv[1], float(sys.argv[2])
given = np.load(folder + "/simulations.npz")
torch.manual_seed(0)
prior = BoxUniform(-limit * torch.ones(given["theta"].shape[1]), limit * torch.ones(given["theta"].shape[1]))
theta, x = (torch.as_tensor(given[name], dtype=torch.float32) for name in ("theta", "x"))
start = time.perf_counter()
inference = NPE(prior=prior)
inference.append_simulations(theta, x).train()
posterior = inference.build_posterior()
seconds = time.perf_counter() - start
drawn = [posterior.sample((int(sys.argv[3]),), x=torch.as_tensor(y, dtype=torch.float32), show_progress_bars=False)
         for y in given["data"]]
np.savez(folder + "/drawn.npz", seconds=seconds, **{str(i): part.numpy() for i, part in enumerate(drawn)})
"""


def by_sbi(python: str, name: str, theta: Tensor, x: Tensor, data: list[Tensor]) -> tuple[list[np.ndarray], float]:
    """Train sbi's estimator on simulations in its own environment; return draws for each data set, and seconds."""
    limit = {"two_moons": 1.0, "gaussian_mixture": 10.0, "slcp": 3.0}[name]
    with tempfile.TemporaryDirectory() as folder:
        flat = np.stack([y.flatten().numpy() for y in data])
        np.savez(f"{folder}/simulations.npz", theta=theta.numpy(), x=x.flatten(1).numpy(), data=flat)
        command = [python, "-c", PEER, folder, str(limit), str(NUM_DRAWS)]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)  # sbi logs where it runs
        found = np.load(f"{folder}/drawn.npz")
        return [found[str(i)] for i in range(len(data))], float(found["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--sbi", help="python of an environment with sbi")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'task':>17} {'method':>36} {'seconds':>8}  C2ST of {NUM_DATA} data sets, median", flush=True)
    for name in options.tasks:
        model, shape = TASKS[name]
        target = bk.Target.from_pyro(model, torch.full(shape, 0.1, dtype=FLOAT))
        u = target.sample_prior(options.simulations + NUM_DATA, seed=options.seed + 1)
        theta, x = target.constrain(u)["theta"], target.predictive(u, seed=options.seed + 1)["x"]
        data = list(x[options.simulations :])
        references = [exact_draws(name, y, 100 + i) for i, y in enumerate(data)]

        def row(method: str, seconds: float, drawn: list[np.ndarray], references=references, name=name) -> None:
            scores = [c2st(one.numpy(), other) for one, other in zip(references, drawn, strict=True)]
            said = " ".join(f"{score:.3f}" for score in scores)
            print(f"{name:>17} {method:>36} {seconds:>8.0f}  {said}   {statistics.median(scores):.3f}", flush=True)

        budget = None
        if options.sbi:
            drawn, budget = by_sbi(options.sbi, name, theta[:-NUM_DATA], x[:-NUM_DATA], data)
            row("sbi, NPE", budget, drawn)
        example = (torch.full(shape, 0.1, dtype=FLOAT),)
        settings = {"time_budget": budget, "seed": options.seed, "progress": False, "num_transforms": 3}
        for method, more in (
            (f"ours, {options.simulations} simulations", {"num_simulations": options.simulations, "num_steps": 50_000}),
            ("ours, new simulations in each step", {"num_steps": options.steps}),
        ):
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the end of the time budget
                posterior = bk.amortize(model, example, **settings, **more)
            seconds = time.perf_counter() - start
            row(method, seconds, [_theta(posterior.sample(y, num_draws=NUM_DRAWS, check=False)) for y in data])
        start = time.perf_counter()
        corrected = [posterior.correct(y, num_draws=5 * NUM_DRAWS, progress=False) for y in data]
        seconds = (time.perf_counter() - start) / NUM_DATA
        row("ours, corrected (seconds a data set)", seconds, [_theta(one.draws)[:NUM_DRAWS] for one in corrected])
        print(f"{'':>17} ways: {sorted({one.evidence.method for one in corrected})}", flush=True)


def _theta(draws: bk.Draws) -> np.ndarray:
    x = draws["theta"].flatten(0, 1).numpy()
    return x[np.random.default_rng(0).permutation(len(x))]


if __name__ == "__main__":
    sys.exit(main())
