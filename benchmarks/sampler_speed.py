"""Smallest effective sample size a second: ours beside Pyro's NUTS and NumPyro's vectorised NUTS, in turns.

Warm-up is included, compilation reported apart (the first run less the median of the others). Medians over rounds; in
a round every sampler runs once. Same models, 500 iterations of warm-up and 1,000 draws a chain for all; Pyro
runs one chain, whose rate more chains on more processes could multiply at best.

Usage::

    python benchmarks/sampler_speed.py --data DIR [--peer-python PATH] [--rounds 5] [--chains 4 64]

`DIR` holds `pima_fw_model1.csv` and `radiata_pine.csv`. `PATH` is a Python with NumPyro and ArviZ 0.x.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import arviz as az  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pyro  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402

import bayeskit as bk  # noqa: E402
from bayeskit import exact  # noqa: E402
from bayeskit.inference.samplers import HMC, NUTS  # noqa: E402

WARMUP, SAMPLES = 500, 1000


def logistic_regression(x, y):
    b = pyro.sample("b", dist.Normal(x.new_zeros(x.shape[1]), 10.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def problems(folder: Path) -> dict[str, tuple[Any, tuple[torch.Tensor, ...], list[np.ndarray]]]:
    """Return each model with its arguments in torch and the data that NumPyro takes."""
    pima = np.loadtxt(folder / "pima_fw_model1.csv", delimiter=",", skiprows=1)
    pine = np.loadtxt(folder / "radiata_pine.csv", delimiter=",", skiprows=1)
    schools, trees = exact.get("eight_schools"), exact.get("radiata_pine_m1")
    x = pine[:, 2] - pine[:, 2].mean()
    return {
        "Pima": (
            logistic_regression,
            (torch.tensor(pima[:, 1:]), torch.tensor(pima[:, 0])),
            [pima[:, 1:], pima[:, 0]],
        ),
        "eight schools": (schools.model, schools.args, [a.numpy() for a in schools.args[:2]]),
        "radiata pine": (trees.model, trees.args, [x, pine[:, 1]]),
    }


def smallest(values: dict[str, torch.Tensor]) -> float:
    posterior = {name: value.numpy() for name, value in values.items()}
    effective = az.ess(az.from_dict(posterior=posterior))
    return min(float(v.min()) for v in effective.data_vars.values())


class Ours:
    """A target that stays compiled from run to run."""

    def __init__(self, model: Any, arguments: tuple, chains: int, kernel: Any) -> None:
        self.target = bk.Target.from_pyro(model, *arguments, compile=True)
        self.chains, self.kernel = chains, kernel
        begin = time.perf_counter()
        self._draw(10_000)
        self.first = time.perf_counter() - begin

    def _draw(self, seed: int) -> bk.Draws:
        return bk.sample(self.target, self.chains, WARMUP, SAMPLES, seed=seed, kernel=self.kernel, progress=False)

    def run(self, seed: int) -> tuple[float, float]:
        """Return the smallest effective sample size and the seconds."""
        begin = time.perf_counter()
        draws = self._draw(seed)
        seconds = time.perf_counter() - begin
        return smallest(draws.values(deterministic=False)), seconds


class PyroNUTS:
    """Pyro's own sampler, one chain in this process."""

    first = 0.0

    def __init__(self, model: Any, arguments: tuple) -> None:
        self.model, self.arguments = model, arguments

    def run(self, seed: int) -> tuple[float, float]:
        """Return the smallest effective sample size and the seconds."""
        pyro.set_rng_seed(seed)
        sampler = pyro.infer.MCMC(
            pyro.infer.NUTS(self.model), num_samples=SAMPLES, warmup_steps=WARMUP, disable_progbar=True
        )
        begin = time.perf_counter()
        sampler.run(*self.arguments)
        seconds = time.perf_counter() - begin
        samples = sampler.get_samples(group_by_chain=True)
        return smallest({k: v for k, v in samples.items() if k != "theta"}), seconds


class NumPyroNUTS:
    """NumPyro in a process of its own."""

    first = 0.0

    def __init__(self, process: subprocess.Popen, model: str, data: list[np.ndarray], chains: int) -> None:
        self.process, self.task = process, {"model": model, "chains": chains, "warmup": WARMUP, "samples": SAMPLES}
        self.task["data"] = [column.tolist() for column in data]

    def run(self, seed: int) -> tuple[float, float]:
        """Return the smallest effective sample size and the seconds."""
        self.process.stdin.write(json.dumps(self.task | {"seed": seed}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.first = max(self.first, answer["first"])
        return answer["effective"], answer["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chains", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--only", nargs="+", help="names of problems")
    parser.add_argument("--without-pyro", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    peers = {}  # one process a number of chains: NumPyro's cached functions do not tell them apart
    if arguments.peer_python:
        command = [arguments.peer_python, str(Path(__file__).with_name("numpyro_driver.py"))]
        for chains in arguments.chains:
            peers[chains] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for name, (model, args, data) in problems(arguments.data).items():
        if arguments.only and name not in arguments.only:
            continue
        samplers: dict[str, Any] = {}
        for chains in arguments.chains:
            samplers[f"ours, HMC, {chains} chains"] = Ours(model, args, chains, HMC())
            if chains <= 8:
                samplers[f"ours, NUTS, {chains} chains"] = Ours(model, args, chains, NUTS())
            if chains in peers:
                samplers[f"NumPyro, {chains} chains"] = NumPyroNUTS(peers[chains], name, data, chains)
        if not arguments.without_pyro:
            samplers["Pyro, 1 chain"] = PyroNUTS(model, args)
        report(name, samplers, arguments.rounds)
    for peer in peers.values():
        peer.stdin.close()
        peer.wait()


def report(name: str, samplers: dict[str, Any], rounds: int) -> None:
    rates, sizes, times = defaultdict(list), defaultdict(list), defaultdict(list)
    for seed in range(rounds):
        for label, sampler in samplers.items():
            effective, seconds = sampler.run(seed)
            rates[label].append(effective / seconds)
            sizes[label].append(effective)
            times[label].append(seconds)
    median = {label: statistics.median(values) for label, values in rates.items()}
    peers = [label for label in median if label.startswith("NumPyro")]
    best_peer = max((median[p] for p in peers), default=float("nan"))
    rows = []
    for label, sampler in samplers.items():
        seconds = statistics.median(times[label])
        same = median.get("NumPyro" + label[label.rindex(",") :], float("nan"))
        rows.append(
            {
                "sampler": label,
                "per second": round(median[label]),
                "effective": round(statistics.median(sizes[label])),
                "seconds": round(seconds, 2),
                "first run more": round(max(sampler.first - seconds, 0.0), 1),
                "x Pyro": round(median[label] / median["Pyro, 1 chain"], 1) if "Pyro, 1 chain" in median else None,
                "x NumPyro, same chains": round(median[label] / same, 2),
                "x NumPyro, its best": round(median[label] / best_peer, 2),
            }
        )
    print(f"\n{name}: smallest effective sample size, medians of {rounds}")
    print(pd.DataFrame(rows).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
