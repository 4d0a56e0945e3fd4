"""Effective draws a second of models with latent fields: all sites sampled, and the field integrated out.

    python benchmarks/latent_fields.py --data DIR [--models gaussian_process radon logistic] [--numpyro PYTHON]

For a Poisson regression with a Gaussian process of 200 cells, the radon levels of 919 houses in 85 counties and a
logistic regression with 500 random intercepts, the smallest bulk effective sample size of the parameters that are not
integrated out is divided by the seconds of the processor, warm-up included and compilation apart, for ``bk.sample`` of
all sites, ``bk.sample`` of the marginal target, and NumPyro's NUTS if ``--numpyro`` names a Python that has it. Joint
models are sampled in the better of two parametrisations, centred and not centred; both are printed. Medians of runs in
turn. ``--data`` names a folder with ``radon.csv`` (columns ``floor``, ``county``, ``log_radon``), from Gelman and Hill
(2007). The evidence by several methods is printed with ``--evidence``.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference import evidence

CHAINS, WARMUP, SAMPLES = 4, 500, 1000
CELLS, GROUPS, ROWS = 200, 500, 10


def gaussian_process(x, y, centred=True):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.LogNormal(-1.5, 0.5))
    mean = pyro.sample("mean", dist.Normal(1.0, 1.0))
    gram = scale**2 * torch.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
    root = torch.linalg.cholesky(gram + 1e-6 * torch.eye(len(x), dtype=x.dtype))
    if centred:
        field = pyro.sample("field", dist.MultivariateNormal(torch.zeros_like(x), scale_tril=root))
    else:
        field = root @ pyro.sample("white", dist.Normal(torch.zeros_like(x), 1.0).to_event(1))
    with pyro.plate("cells", len(x)):
        pyro.sample("y", dist.Poisson((mean + field).exp()), obs=y)


def radon(county, floor, y, centred=True):
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    within = pyro.sample("within", dist.HalfNormal(1.0))
    with pyro.plate("counties", int(county.max()) + 1):
        if centred:
            effect = pyro.sample("effect", dist.Normal(mean, between))
        else:
            effect = mean + between * pyro.sample("white", dist.Normal(torch.zeros_like(mean), 1.0))
    with pyro.plate("houses", len(y)):
        pyro.sample("y", dist.Normal(effect[county] + slope * floor, within), obs=y)


def logistic(group, x, y, centred=True):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    with pyro.plate("groups", int(group.max()) + 1):
        if centred:
            effect = pyro.sample("effect", dist.Normal(mean, between))
        else:
            effect = mean + between * pyro.sample("white", dist.Normal(torch.zeros_like(mean), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=effect[group] + slope * x), obs=y)


def data_of(name: str, folder: Path) -> tuple[Callable[..., None], tuple[np.ndarray, ...], tuple[str, ...]]:
    """Return a model, its data, and the names of its field in both parametrisations."""
    rng = np.random.default_rng(0)
    if name == "gaussian_process":
        x = np.linspace(0.0, 1.0, CELLS)
        return gaussian_process, (x, rng.poisson(np.exp(1.0 + np.sin(9 * x) * x)).astype(float)), ("field", "white")
    if name == "logistic":
        group = np.repeat(np.arange(GROUPS), ROWS)
        x = rng.normal(size=len(group))
        logit = (0.5 + 0.8 * rng.normal(size=GROUPS))[group] - 0.7 * x
        return logistic, (group, x, (rng.uniform(size=len(x)) < 1 / (1 + np.exp(-logit))) * 1.0), ("effect", "white")
    with open(folder / "radon.csv") as file:
        rows = list(csv.DictReader(file))
    county = np.unique([row["county"] for row in rows], return_inverse=True)[1]
    return (
        radon,
        (county, *(np.array([float(row[k]) for row in rows]) for k in ("floor", "log_radon"))),
        (
            "effect",
            "white",
        ),
    )


def effective(draws: bk.Draws, names: list[str]) -> float:
    """Return the smallest bulk effective sample size of the named sites."""
    found = az.ess(draws.to_arviz(), var_names=names)
    return min(float(found[name]) for name in names)


def target_of(name: str, folder: Path, centred: bool) -> tuple[bk.Target, str]:
    """Return the joint target and the name of its field."""
    model, data, fields = data_of(name, folder)
    return bk.Target.from_pyro(model, *map(torch.as_tensor, data), centred=centred), fields[not centred]


def timed(target: bk.Target, names: list[str], seed: int) -> tuple[float, float]:
    """Return the smallest effective sample size and the seconds of the processor of one run."""
    begin = time.process_time()
    draws = bk.sample(target, num_chains=CHAINS, num_warmup=WARMUP, num_samples=SAMPLES, seed=seed, progress=False)
    seconds = time.process_time() - begin
    return effective(draws, names), seconds


def by_numpyro(python: str, name: str, data: tuple[np.ndarray, ...], centred: bool, seeds: list[int]) -> list[Any]:
    """Return the same by NumPyro's NUTS, in a process of its own."""
    task = {"model": name, "data": [x.tolist() for x in data], "centred": centred, "seeds": seeds}
    task |= {"chains": CHAINS, "warmup": WARMUP, "samples": SAMPLES}
    driver = Path(__file__).with_name("latent_fields_numpyro.py")
    done = subprocess.run([python, str(driver)], input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["gaussian_process", "radon", "logistic"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--numpyro", help="a Python that has NumPyro")
    parser.add_argument("--evidence", action="store_true")
    parser.add_argument("--cold", action="store_true", help="count the compilation, and run once less")
    parser.add_argument("--ways", nargs="+", default=["marginal", "centred", "not centred"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in arguments.models:
        rates: dict[str, list[tuple[float, float]]] = {}
        ways: dict[str, bk.Target] = {}
        for centred in (True, False):
            target, field = target_of(name, arguments.data, centred)
            kind = "centred" if centred else "not centred"
            ways[f"joint, {kind}"] = target
            if centred:
                marginal = ways["marginal"] = bk.marginalize(target, [field])
        ways = {way: target for way, target in ways.items() if way.removeprefix("joint, ") in arguments.ways}
        names = [site.name for site in marginal.sites]
        for target in () if arguments.cold else ways.values():
            timed(target, names, 100)  # compiles
        for seed in arguments.seeds:
            for way, target in ways.items():
                rates.setdefault(way, []).append(timed(target, names, seed))
        if arguments.numpyro:
            for centred in (True, False):
                if ("centred" if centred else "not centred") not in arguments.ways:
                    continue
                way = f"NumPyro, {'centred' if centred else 'not centred'}"
                found = by_numpyro(arguments.numpyro, name, data_of(name, arguments.data)[1], centred, arguments.seeds)
                rates[way] = [tuple(pair) for pair in found]
        print(f"{name}: {marginal!r}", flush=True)
        medians = {way: statistics.median(n / s for n, s in pairs) for way, pairs in rates.items()}
        for way, pairs in rates.items():
            sizes, seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
            gain = medians["marginal"] / medians[way]
            print(f"  {way:24} {sizes:7.0f} effective, {seconds:7.2f} s: {medians[way]:8.1f} a second; {gain:6.2f}")
        if arguments.evidence:
            draws = bk.sample(marginal, num_chains=CHAINS, num_samples=SAMPLES, progress=False)
            found = evidence.bridge_sampling(marginal, draws)
            begin = time.process_time()
            correction = marginal.correction(draws)
            seconds = time.process_time() - begin
            print(f"  {found!r}; Laplace's error {correction!r} in {seconds:.1f} s")
            print(f"  corrected: {correction.applied(found)!r}")


if __name__ == "__main__":
    main()
