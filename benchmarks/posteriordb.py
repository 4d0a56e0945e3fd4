"""Draws at the defaults from posteriors with reference draws (posteriordb): are they right, and what do they cost.

    python benchmarks/posteriordb.py --data data/posteriordb --out results
    python benchmarks/posteriordb.py --data data/posteriordb --out results --peers --environments environments

Each posterior has a process of its own, one thread, and, unless `--warm`, empty caches of compiled code. A row is right
where means and standard deviations are within four Monte Carlo errors (of both sides) of the reference, R-hat is at
most 1.01, and bulk and tail effective sample sizes are at least 400. Seconds are the processor's, ended child processes
included, imports left out. Rows that the same code has made already are kept, unless `--force`.

With `--peers`, NumPyro's NUTS (vectorised chains) and nutpie on the same NumPyro potential take turns with ours, each
in an environment of its own, made by pip in the folder of `--environments` where it is not there yet.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
MAX_Z, MAX_R_HAT, MIN_ESS = 4.0, 1.01, 400.0
PEERS = {"NumPyro": ["numpyro", "jax[cpu]"], "nutpie": ["nutpie", "numpyro", "jax[cpu]"]}
FIELDS = (
    "posterior sampler seed flat right z_mean z_mean_of z_sd z_sd_of r_hat bulk tail gradients steps divergences "
    "building compiling sampling ess_per_second ending warnings version"
).split()


def processor_seconds() -> float:
    """Return what this process and its ended children have used so far."""
    return sum(os.times()[:4])


def draw(arguments: argparse.Namespace) -> None:
    """Sample one posterior with bayeskit at its defaults; draws go to a file, the costs to standard output."""
    import warnings

    import posteriordb_models as models
    import torch

    import bayeskit as bk
    from bayeskit._compiler import engine as _engine

    torch.set_num_threads(1)
    models.FLAT = arguments.flat
    posterior = models.POSTERIORS[arguments.draw]
    data = json.loads((arguments.data / f"{arguments.draw}.json").read_text())["data"]
    compiling = 0.0

    def timed(compile: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiling
            begin = processor_seconds()
            try:
                return compile(*args, **kwargs)
            finally:
                compiling += processor_seconds() - begin

        return call

    torch._inductor.compile = timed(torch._inductor.compile)
    for step in ("row_source", "over_rows"):
        setattr(_engine, step, timed(getattr(_engine, step)))
    begin = processor_seconds()
    target = bk.Target.from_pyro(posterior.model, *posterior.arguments(data))
    building = processor_seconds() - begin
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = bk.sample(target, seed=arguments.seed, progress=False)
    sampling = processor_seconds() - begin - building - compiling
    values = draws.values()
    np.savez(arguments.file, **{name: values[name].detach().numpy() for name in posterior.parameters})
    stats = {name: value.double() for name, value in draws.sample_stats.items()}
    steps = next((float(stats[name].mean()) for name in ("n_steps", "num_steps", "steps") if name in stats), math.nan)
    print(
        json.dumps(
            {
                "gradients": draws.num_gradients,
                "steps": steps,
                "divergences": float(stats["diverging"].sum()) if "diverging" in stats else math.nan,
                "building": building,
                "compiling": compiling,
                "sampling": sampling,
                "warnings": " | ".join(str(one.message) for one in caught),
            }
        )
    )


def agreement(draws: np.ndarray, reference: dict[str, Any]) -> dict[str, Any]:
    """Compare draws ``(chains, draws, d)`` with the reference moments of `d` parameters, in their order."""
    import arviz as az

    found = az.convert_to_dataset({"x": draws})

    def of(kind: str) -> np.ndarray:
        # Some parameters of simplexes are constant sums of others, never constant themselves.
        return np.asarray(az.ess(found, method=kind)["x"])

    names = list(reference)
    mean, sd, ess = (np.array([reference[name][key] for name in names]) for key in ("mean", "sd", "ess"))
    own_sd = draws.std((0, 1), ddof=1)
    z_mean = (draws.mean((0, 1)) - mean) / np.sqrt(own_sd**2 / of("mean") + sd**2 / ess)
    centred = (draws - draws.mean((0, 1))) / own_sd
    excess = np.maximum((centred**4).mean((0, 1)) - 1, 0.1)  # var(x^2) in units of sd^4: 2 for a normal distribution
    own, theirs = own_sd * np.sqrt(excess / of("sd") / 4), sd * np.sqrt(excess / ess / 4)
    z_sd = (own_sd - sd) / np.sqrt(own**2 + theirs**2)
    worst_mean, worst_sd = int(np.nanargmax(abs(z_mean))), int(np.nanargmax(abs(z_sd)))
    result = {
        "z_mean": float(z_mean[worst_mean]),
        "z_mean_of": names[worst_mean],
        "z_sd": float(z_sd[worst_sd]),
        "z_sd_of": names[worst_sd],
        "r_hat": float(az.rhat(found, method="rank")["x"].max()),
        "bulk": float(of("bulk").min()),
        "tail": float(of("tail").min()),
    }
    result["right"] = (
        bool(np.isfinite([z_mean, z_sd]).all())
        and max(abs(result["z_mean"]), abs(result["z_sd"])) <= MAX_Z
        and result["r_hat"] <= MAX_R_HAT
        and min(result["bulk"], result["tail"]) >= MIN_ESS
    )
    return result


def stacked(file: Path, parameters: tuple[str, ...]) -> np.ndarray:
    """Return the draws ``(chains, draws, d)`` of a file, the parameters side by side."""
    with np.load(file, allow_pickle=False) as arrays:
        return np.concatenate([arrays[name].reshape(*arrays[name].shape[:2], -1) for name in parameters], -1)


def environment(caches: str, arguments: argparse.Namespace) -> dict[str, str]:
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    own = {**os.environ, **dict.fromkeys(threads, "1")}
    own["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    if not arguments.warm:
        own["TORCHINDUCTOR_CACHE_DIR"] = own["XDG_CACHE_HOME"] = f"{caches}/inductor"
        own["JAX_COMPILATION_CACHE_DIR"] = f"{caches}/jax"
        own["NUMBA_CACHE_DIR"] = f"{caches}/numba"
    return own


def peer_python(peer: str, folder: Path) -> str:
    """Return the interpreter of a peer's environment, made by pip where it is not there yet."""
    python = folder / peer.lower() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / peer.lower())], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS[peer]], check=True)
    return str(python)


def one_row(name: str, sampler: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a sampler on a posterior in a new process and judge its draws."""
    import posteriordb_models as models

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "draws.npz"
        options = ["--data", str(arguments.data), "--seed", str(arguments.seed), "--file", str(file), "--draw", name]
        if sampler == "bayeskit":
            command = [sys.executable, str(HERE / "posteriordb.py"), "--flat", arguments.flat, *options]
        else:
            driver = str(HERE / "posteriordb_numpyro.py")
            command = [peer_python(sampler, arguments.environments), driver, "--sampler", sampler, *options]
        row: dict[str, Any] = {"posterior": name, "sampler": sampler, "seed": arguments.seed, "flat": arguments.flat}
        prefix = ["bash", "-c", f'ulimit -t {int(arguments.limit)}; exec "$@"', "bash"] if arguments.limit else []
        run = subprocess.run(
            [*prefix, *command], env=environment(folder, arguments), capture_output=True, text=True, check=False
        )
        if run.returncode:
            last = run.stderr.strip().splitlines()[-2:]
            return {**row, "right": False, "ending": f"status {run.returncode}: {' '.join(last)[:300]}"}
        row.update(json.loads(run.stdout.strip().splitlines()[-1]))
        draws = stacked(file, models.POSTERIORS[name].parameters)
    reference = json.loads((arguments.data / f"{name}.json").read_text())["reference"]
    row.update(agreement(draws, reference), ending="finished")
    row["ess_per_second"] = row["bulk"] / (row["building"] + row["compiling"] + row["sampling"])
    return row


def version() -> str:
    """Return a digest of the code that a row depends on."""
    digest = hashlib.sha256()
    for file in sorted([*(HERE.parent / "bayeskit").rglob("*.py"), *HERE.glob("posteriordb*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, those of the least seconds first."""
    head = f"{'posterior':42s} {'sampler':8s} ok {'z mean':>7s} {'z sd':>6s} {'R-hat':>6s} {'bulk':>6s} {'tail':>6s} "
    head += f"{'gradients':>9s} {'steps':>6s} {'div':>4s} {'build':>6s} {'comp':>6s} {'sample':>7s} {'ESS/s':>8s}"
    lines = [head]

    def seconds(row: dict[str, Any]) -> float:
        if row["ending"] != "finished":
            return math.inf
        return sum(float(row[part]) for part in ("building", "compiling", "sampling"))

    for row in sorted(rows, key=seconds):
        start = f"{row['posterior']:42s} {row['sampler']:8s} {'ok' if str(row['right']) == 'True' else '--'} "
        if row["ending"] != "finished":
            lines.append(start + str(row["ending"]))
            continue
        f = {key: float(row[key]) for key in FIELDS[5:19] if key not in ("z_mean_of", "z_sd_of")}
        lines.append(
            start + f"{f['z_mean']:7.2f} {f['z_sd']:6.2f} {f['r_hat']:6.3f} {f['bulk']:6.0f} {f['tail']:6.0f} "
            f"{f['gradients']:9.0f} {f['steps']:6.1f} {f['divergences']:4.0f} {f['building']:6.2f} "
            f"{f['compiling']:6.2f} {f['sampling']:7.2f} {f['ess_per_second']:8.2f}"
            + (f"  {row['warnings']}" if row.get("warnings") else "")
        )
    return "\n".join(lines)


def ratios(rows: list[dict[str, Any]]) -> str:
    """Return our effective sample size a second against the better peer that is right."""
    by = {(row["posterior"], row["sampler"]): row for row in rows if row["ending"] == "finished"}
    found = {}
    for name in sorted({row["posterior"] for row in rows}):
        peers = [float(by[name, peer]["ess_per_second"]) for peer in PEERS if (name, peer) in by]
        if peers and (name, "bayeskit") in by:
            found[name] = float(by[name, "bayeskit"]["ess_per_second"]) / max(peers)
    if not found:
        return ""
    lines = [f"{name:42s} {ratio:8.2f}{'  loses' if ratio < 1 else ''}" for name, ratio in found.items()]
    won = sum(ratio >= 1 for ratio in found.values())
    lines.append(f"median ratio {statistics.median(found.values()):.2f}; at least 1 in {won} of {len(found)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.json")
    parser.add_argument("--only", nargs="+", help="names of posteriors")
    parser.add_argument("--out", type=Path, default=Path("posteriordb_results"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flat", choices=("improper", "wide"), default="improper", help="flat priors, or wide ones")
    parser.add_argument("--wide", dest="flat", action="store_const", const="wide", help="the same as --flat wide")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--environments", type=Path, default=Path("environments"))
    parser.add_argument("--warm", action="store_true", help="keep the caches of compiled code")
    parser.add_argument("--cold", dest="warm", action="store_false", help="new caches for each run (default)")
    parser.add_argument("--limit", type=float, help="processor seconds that a process may use")
    parser.add_argument("--force", action="store_true", help="run again what is there already")
    parser.add_argument("--draw", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments)
        return
    import posteriordb_models as models

    names = arguments.only or list(models.POSTERIORS)
    unknown = sorted(set(names) - set(models.POSTERIORS))
    if unknown:
        parser.error(f"unknown posteriors: {', '.join(unknown)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, code = arguments.out / "posteriordb.csv", version()
    rows: list[dict[str, Any]] = []
    if file.exists():
        rows = list(csv.DictReader(file.open()))
    for name in names:
        for sampler in ["bayeskit", *(PEERS if arguments.peers else ())]:
            key = (name, sampler, str(arguments.seed), arguments.flat)
            old = [row for row in rows if tuple(str(row[field]) for field in FIELDS[:4]) == key]
            if not arguments.force and any(row["version"] == code for row in old):
                continue
            row = {**one_row(name, sampler, arguments), "version": code}
            rows = [other for other in rows if other not in old] + [row]
            print(table([row]).splitlines()[-1], flush=True)
            with file.open("w", newline="") as out:
                writer = csv.DictWriter(out, FIELDS, restval="")
                writer.writeheader()
                writer.writerows(rows)
    mine = [row for row in rows if row["posterior"] in names and str(row["seed"]) == str(arguments.seed)]
    mine = [row for row in mine if row["flat"] == arguments.flat and row["version"] == code]
    print(table(mine), ratios(mine), sep="\n\n")
    print(f"right: {sum(str(row['right']) == 'True' for row in mine if row['sampler'] == 'bayeskit')} of {len(names)}")


if __name__ == "__main__":
    main()
