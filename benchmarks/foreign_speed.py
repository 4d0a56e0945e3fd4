"""Print effective draws a CPU second on models of PyMC and NumPyro, beside the package's own sampler and nutpie.

    python benchmarks/foreign_speed.py --models DIR [--only NAME ...] [--seeds 0 1] [--calls]

The folder has `pymc` and `numpyro` with a module for each model, as for `foreign_packages.py`. Each run is a process of
its own: 4 chains, 1,000 warm-up steps (bayeskit: its default, 500) and 1,000 draws, with compilation, which finds no
compiled code of an earlier run; imports are left out. Draws are judged by the smallest bulk effective size of the
model's latent variables, and seconds are those of the processor.

With `--calls` instead: microseconds of a gradient of 4, 64 and 1,024 rows, and of a step of a trajectory, beside those
of the compiled function of JAX alone, in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

#: Steps of a trajectory.
_STEPS = 8
SAMPLERS = {"pymc": ("bayeskit", "pymc", "nutpie"), "numpyro": ("bayeskit", "numpyro")}


def _bayeskit(package: str, made: Any, seed: int) -> dict[str, Any]:
    import bayeskit as bk

    draws = bk.sample(_target(package, made), seed=seed, progress=False)
    return {name: x.numpy() for name, x in draws.values(deterministic=False).items()}


def _pymc(package: str, made: Any, seed: int) -> dict[str, Any]:
    import pymc

    with made:
        found = pymc.sample(1000, tune=1000, chains=4, cores=1, random_seed=seed, progressbar=False)
    return {rv.name: found["posterior"][rv.name].values for rv in made.free_RVs}


def _nutpie(package: str, made: Any, seed: int) -> dict[str, Any]:
    import nutpie

    compiled = nutpie.compile_pymc_model(made)
    found = nutpie.sample(compiled, draws=1000, tune=1000, chains=4, cores=1, seed=seed, progress_bar=False)
    return {rv.name: found["posterior"][rv.name].values for rv in made.free_RVs}


def _numpyro(package: str, made: Any, seed: int) -> dict[str, Any]:
    import jax
    from numpyro.infer import MCMC, NUTS

    model, args, kwargs = made
    with jax.enable_x64(True):
        run = MCMC(
            NUTS(model), num_warmup=1000, num_samples=1000, num_chains=4, chain_method="vectorized", progress_bar=False
        )
        run.run(jax.random.PRNGKey(seed), *args, **kwargs)
        draws = run.get_samples(group_by_chain=True)
    latent = jax.tree.map(lambda x: x.shape, run.last_state.z)
    return {name: draws[name] for name in latent}


RUNS = {"bayeskit": _bayeskit, "pymc": _pymc, "nutpie": _nutpie, "numpyro": _numpyro}


def once(path: Path, sampler: str, seed: int) -> None:
    """Run a sampler in this process, and print seconds and the smallest effective size."""
    import numpy as np
    import torch

    warnings.simplefilter("ignore")
    package = path.parent.name
    for name in {sampler, package, "jax", "scipy.stats"}:
        importlib.import_module(name)
    made = _made(path)
    begin = time.process_time()
    draws = RUNS[sampler](package, made, seed)
    seconds = time.process_time() - begin
    import bayeskit as bk
    from bayeskit._core.summaries import summary_table

    tensors = {name: torch.as_tensor(np.array(x)) for name, x in draws.items()}
    table = summary_table(tensors, bk.exact.get("beta_binomial").target().labels.of)
    print(json.dumps({"seconds": seconds, "effective": float(table["ess_bulk"].min())}))


def calls(file: Path) -> None:
    """Print microseconds of a call, and of the function of JAX alone."""
    import jax
    import torch

    target = _target(file.parent.name, _made(file))
    density = target.density.functions
    for rows in (4, 64, 1024):
        u, beta = torch.zeros(rows, target.dim, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        function, given = (
            jax.jit(jax.vmap(lambda u, beta: density._with_gradient(u, 1.0, beta))),
            (u.numpy(), beta.numpy()),
        )
        ours = partial(target.evaluator(rows), u, beta)
        path = partial(density.integrate, u, u, beta, beta, torch.ones(target.dim).double(), False, 0.1, [1.0] * _STEPS)
        with jax.enable_x64(True):
            ratios = _in_turn(ours, partial(_waited_for, function, given), path)
        times = f"{ratios[0]:9.1f} us, a step {ratios[2] / _STEPS:9.1f} us, alone {ratios[1]:9.1f} us"
        print(f"{file.parent.name + '/' + file.stem:32}{rows:6} rows {times}")


def _waited_for(function: Any, given: Any) -> None:
    import jax

    jax.block_until_ready(function(*given))


def _in_turn(*functions: Any) -> list[float]:
    """Return the median microseconds of functions that are called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(200):
        for each, function in zip(times, functions, strict=True):
            begin = time.perf_counter()
            function()
            each.append(1e6 * (time.perf_counter() - begin))
    return [statistics.median(each) for each in times]


def _made(path: Path) -> Any:
    """Return what the module of a model makes."""
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


def _target(package: str, made: Any) -> Any:
    import bayeskit as bk

    if package == "pymc":
        return bk.Target.from_pymc(made)
    model, args, kwargs = made
    return bk.Target.from_numpyro(model, *args, **kwargs)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        once(Path(options.once[0]), options.once[1], int(options.once[2]))
        return
    if not options.calls:
        print(
            f"{'model':32}{'sampler':10}{'effective':>10}{'CPU s':>8}{'a second':>10}   beside the better of the others"
        )
    for package, samplers in SAMPLERS.items():
        for path in sorted((options.models / package).glob("*.py")):
            if options.only and path.stem not in options.only:
                continue
            if options.calls:
                calls(path)
                continue
            rates = {}
            for sampler in samplers:
                found = [_measured(path, sampler, seed) for seed in options.seeds]
                if any(one is None for one in found):
                    print(f"{package + '/' + path.stem:32}{sampler:10}    fails", flush=True)
                    continue
                effective = statistics.median(one["effective"] for one in found if one)
                seconds = statistics.median(one["seconds"] for one in found if one)
                rates[sampler] = effective / seconds
                print(
                    f"{package + '/' + path.stem:32}{sampler:10}{effective:10.0f}{seconds:8.1f}{rates[sampler]:10.0f}"
                )
            others = [rate for name, rate in rates.items() if name != "bayeskit"]
            if "bayeskit" in rates and others:
                print(f"{'':60}{rates['bayeskit'] / max(others):10.2f}", flush=True)


def _measured(path: Path, sampler: str, seed: int) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTENSOR_FLAGS": f"base_compiledir={folder}",
            "NUMBA_CACHE_DIR": folder,
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        }
        command = [sys.executable, __file__, "--models", str(path), "--once", str(path), sampler, str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print("   " + done.stderr.strip().splitlines()[-1][:150])
        return None
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()
