"""Four chains of NUTS, of batched HMC and of nutpie's NUTS on the same compiled density, side by side.

Prints the smallest bulk effective sample size a second, warm-up included and compilation apart,
on the eight schools (non-centred) and on a logistic regression of Pima diabetes: medians of runs in turn,
by the clock and by the processor's time, which a busy machine disturbs less.

    python benchmarks/nuts_speed.py --data data/evidence

``--data`` names the folder of ``pima_fw_model1.csv`` (column 0 the outcome, the others the predictors). nutpie, a
sampler written in Rust, takes part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference.samplers import HMC, NUTS

CHAINS, WARMUP, SAMPLES = 4, 500, 1000


def eight_schools(effects, standard_errors):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(effects)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("effects", dist.Normal(mu + tau * z, standard_errors), obs=effects)


def logistic_regression(x, y):
    b = pyro.sample("b", dist.Normal(torch.zeros(x.shape[1], dtype=x.dtype), 10.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def targets(data: Path) -> dict[str, bk.Target]:
    effects = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
    errors = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)
    pima = torch.as_tensor(np.loadtxt(data / "pima_fw_model1.csv", delimiter=",", skiprows=1))
    return {
        "eight schools": bk.Target.from_pyro(eight_schools, effects, errors, compile=True),
        "Pima": bk.Target.from_pyro(
            logistic_regression, pima[:, 1:].contiguous(), pima[:, 0].contiguous(), compile=True
        ),
    }


def smallest_ess(draws: np.ndarray) -> float:
    """Smallest bulk effective sample size of draws ``(chains, draws, d)``."""
    return float(az.ess(az.convert_to_dataset({"u": draws}), method="bulk")["u"].min())


def with_kernel(target: bk.Target, kernel: object) -> Callable[[int], np.ndarray]:
    def run(seed: int) -> np.ndarray:
        draws = bk.sample(target, CHAINS, WARMUP, SAMPLES, seed=seed, kernel=kernel, progress=False)
        return draws.unconstrained.numpy()

    return run


def with_nutpie(target: bk.Target) -> Callable[[int], np.ndarray]:
    import nutpie
    from nutpie.compiled_pyfunc import from_pyfunc

    evaluate = target.evaluator(1, 10**6)
    one = torch.ones(1, dtype=target.dtype)

    def make_log_density():
        def log_density(u):
            with torch.no_grad():
                result = evaluate(torch.from_numpy(u).unsqueeze(0), one)
            return float(result.log_density), result.gradient[0].numpy()

        return log_density

    def make_expand(seed1, seed2, chain):
        return lambda u: {"u": u}

    model = from_pyfunc(
        target.dim, make_log_density, make_expand, [np.dtype("float64")], [(target.dim,)], ["u"],
        make_initial_point_fn=lambda seed: np.random.default_rng(seed).uniform(-2, 2, target.dim),
    )  # fmt: skip

    def run(seed: int) -> np.ndarray:
        result = nutpie.sample(
            model, draws=SAMPLES, tune=WARMUP, chains=CHAINS, seed=seed, progress_bar=False, save_warmup=False
        )
        return result.posterior["u"].values

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    has_nutpie = importlib.util.find_spec("nutpie") is not None
    if not has_nutpie:
        print("nutpie is not installed and is left out; pip install nutpie")
    heads = f"{'first run s':>12s}{'run s':>8s}{'min ESS':>9s}{'min ESS/s':>11s}{'per CPU s':>11s}"
    print(f"{CHAINS} chains, {WARMUP} + {SAMPLES} iterations, {arguments.repeats} runs each in turn")
    print(f"{'model':15s}{'sampler':16s}{heads}")
    for name, target in targets(arguments.data).items():
        runs = {"bayeskit NUTS": with_kernel(target, NUTS()), "bayeskit HMC": with_kernel(target, HMC())}
        if has_nutpie:
            runs["nutpie"] = with_nutpie(target)
        first, seconds, work, sizes = {}, *({r: [] for r in runs} for _ in range(3))
        for label, run in runs.items():
            begin = time.perf_counter()
            run(1000)
            first[label] = time.perf_counter() - begin
        for seed in range(arguments.repeats):
            for label, run in runs.items():
                begin, work_begin = time.perf_counter(), time.process_time()
                draws = run(seed)
                seconds[label].append(time.perf_counter() - begin)
                work[label].append(time.process_time() - work_begin)
                sizes[label].append(smallest_ess(draws))
        for label in runs:
            speed = statistics.median(e / s for e, s in zip(sizes[label], seconds[label], strict=True))
            per_work = statistics.median(e / s for e, s in zip(sizes[label], work[label], strict=True))
            middle = statistics.median(seconds[label]), statistics.median(sizes[label])
            numbers = f"{first[label]:12.1f}{middle[0]:8.2f}{middle[1]:9.0f}{speed:11.0f}{per_work:11.0f}"
            print(f"{name:15s}{label:16s}{numbers}", flush=True)


if __name__ == "__main__":
    main()
