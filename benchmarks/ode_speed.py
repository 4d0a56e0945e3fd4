"""Differential equations in models: value and gradient beside other solvers, and draws at the defaults.

    python benchmarks/ode_speed.py --data data/posteriordb [--torchdiffeq PYTHON] [--diffrax PYTHON]

The model of the first table is posteriordb's `hudson_lynx_hare-lotka_volterra`, whose path is solved to rtol = atol =
1e-6 in double precision by the method of Dormand and Prince, for 64 chains around the posterior mode. torchdiffeq
shares its steps among the rows of a batch, so the model cannot be batched and its chains are evaluated one by one;
PYTHON is an interpreter that has bayeskit and torchdiffeq. diffrax runs in NumPyro's model, whose value and gradient
are batched by `jax.vmap` and compiled by `jax.jit`; its interpreter needs neither torch nor bayeskit. Each tool has a
process of its own with one thread; calls take turns, and each number is the median, in seconds of the processor.
The first call includes building and compiling, by ended child processes, too.

The second table has 4 chains of 1,000 draws by `bk.sample` with all its defaults, in a cache of compiled code that is
empty, and the largest distance of a posterior mean from posteriordb's, in standard errors of the two. The second model
is `one_comp_mm_elim_abs-one_comp_mm_elim_abs`, with its data from posteriordb (BSD-3).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peer_process import PeerProcess, processor_seconds, serve

PREDATORS = "hudson_lynx_hare-lotka_volterra"
CHAINS, CALLS, ROUNDS, TOLERANCE = 64, {"bayeskit": 50, "diffrax": 10, "torchdiffeq": 1}, 7, 1e-6
MODE = [-0.607, -3.586, -0.223, -3.726, 3.523, 1.775, -1.386, -1.386]  # logarithms of all parameters

# One compartment with absorption of first order and Michaelis-Menten elimination: concentrations, at half-days.
CONCENTRATIONS = [
    5.70812264865215, 7.10126075072086, 8.38520678426651, 9.79008249883381, 13.4390409239245, 11.4478987597702,
    11.2124282696837, 11.4269217682577, 12.2432859438401, 13.8201804108938, 13.8408670746042, 11.422291744251,
    10.5031943081843, 11.9121452242965, 14.0849980781312, 10.5505145523917, 10.1905539351877, 12.2232272590821,
    11.7290653047821, 12.2719396535996,
]  # fmt: skip
DOSE, VOLUME = 30.0, 2.0
#: Means and their standard errors by posteriordb.
REFERENCE = {
    "k_a": (0.761013422876304, 0.000780642770834883),
    "K_m": (2.53728053955015, 0.0782881153190289),
    "V_m": (0.981820806365048, 0.00603334688230323),
    "sigma": (0.128834841818538, 0.000236057749956237),
}


def bodies() -> dict[str, Any]:
    """Return the models; torch is imported by the processes that need it."""
    import pyro
    import pyro.distributions as dist
    import torch

    import bayeskit as bk

    def predators(times: Any, first: Any, y: Any, solve: Any) -> None:
        scales = torch.tensor([0.5, 0.05, 0.5, 0.05], dtype=y.dtype)
        means = torch.tensor([1.0, 0.05, 1.0, 0.05], dtype=y.dtype)
        prior = dist.HalfNormal(2 * means).to_event(1)
        theta = pyro.sample("theta", prior)
        pyro.factor("theta_prior", dist.Normal(means, scales).log_prob(theta).sum(-1) - prior.log_prob(theta))
        start = pyro.sample("z_init", dist.LogNormal(torch.full_like(first, 10.0).log(), 1.0).to_event(1))
        sigma = pyro.sample("sigma", dist.LogNormal(torch.full_like(first, -1.0), 1.0).to_event(1))

        def slope(t: Any, z: Any, theta: Any) -> Any:
            return torch.stack([(theta[0] - theta[1] * z[1]) * z[0], (theta[3] * z[0] - theta[2]) * z[1]])

        z = solve(slope, start, times, theta)[1:]
        pyro.sample("y_init", dist.LogNormal(start.log(), sigma).to_event(1), obs=first)
        with pyro.plate("years", len(y)):
            pyro.sample("y", dist.LogNormal(z.log(), sigma).to_event(1), obs=y)

    def compartment(times: Any, y: Any) -> None:
        k_a, K_m, V_m, sigma = (pyro.sample(name, dist.HalfCauchy(torch.ones_like(y[0]))) for name in REFERENCE)

        def slope(t: Any, c: Any, rates: Any) -> Any:
            k_a, K_m, V_m = rates
            return torch.exp(-k_a * t) * DOSE * k_a / VOLUME - V_m / VOLUME * c / (K_m + c)

        c = bk.ode.solve(slope, torch.zeros_like(y[:1]), times, (k_a, K_m, V_m), method="rodas5")[1:, 0]
        with pyro.plate("measurements", len(y)):
            pyro.sample("y", dist.LogNormal(c.log(), sigma), obs=y)

    return {"predators": predators, "compartment": compartment}


def predators_by(tool: str, data: dict[str, Any]) -> Any:
    """Return the target with the solver of a tool."""
    import torch

    import bayeskit as bk

    def solved(f: Any, y0: Any, times: Any, theta: Any) -> Any:
        if tool == "torchdiffeq":
            from torchdiffeq import odeint

            return odeint(lambda t, z: f(t, z, theta), y0, times, rtol=TOLERANCE, atol=TOLERANCE, method="dopri5")
        return bk.ode.solve(f, y0, times, theta, rtol=TOLERANCE, atol=TOLERANCE)

    times = torch.tensor([0.0, *data["ts"]], dtype=torch.float64)
    first, y = (torch.tensor(data[name], dtype=torch.float64) for name in ("y_init", "y"))
    return bk.Target.from_pyro(bodies()["predators"], times, first, y, solved, compile=True)


def answer(tool: str) -> None:
    """Serve values and gradients: one thread, one tool."""
    import warnings

    import torch

    torch.set_num_threads(1)
    state: dict[str, Any] = {}

    def evaluate(task: dict[str, Any]) -> dict[str, Any]:
        u = torch.tensor(task["u"], dtype=torch.float64)
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the model is slow is what is measured
            if not state:
                state["target"] = predators_by(tool, task["data"])
            for _ in range(task["calls"]):
                value, gradient = state["target"].value_and_grad(u)
        seconds = (time.process_time() - begin) / task["calls"]
        return {"per_call": seconds, "value": value.tolist(), "gradient": gradient.tolist()}

    serve(tool, evaluate)


def speed(data: dict[str, Any], pythons: dict[str, str]) -> None:
    """Print the first table."""
    import torch

    noise = 0.05 * torch.randn(CHAINS, len(MODE), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = (torch.tensor(MODE, dtype=torch.float64) + noise).tolist()
    task = {"u": u, "data": {name: data[name] for name in ("ts", "y_init", "y")}, "tolerance": TOLERANCE}
    folder = Path(__file__).parent
    drivers = {"bayeskit": [sys.executable, __file__, "--serve", "bayeskit"]}
    if "torchdiffeq" in pythons:
        drivers["torchdiffeq"] = [pythons["torchdiffeq"], __file__, "--serve", "torchdiffeq"]
    if "diffrax" in pythons:
        drivers["diffrax"] = [pythons["diffrax"], str(folder / "ode_speed_diffrax.py")]
    one_thread = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    peers = {name: PeerProcess(command, one_thread) for name, command in drivers.items()}
    found = {name: peer.ask({**task, "calls": 1}) for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, peer in peers.items():
            seconds[name].append(peer.ask({**task, "calls": CALLS[name]})["per_call"])
    ours = found["bayeskit"]
    print(f"value and gradient of {CHAINS} chains, {PREDATORS}\n| tool | first call | call | value | gradient |")
    print("|---|---|---|---|---|")
    for name, times in seconds.items():
        pairs = [[torch.tensor(x[what]) for x in (found[name], ours)] for what in ("value", "gradient")]
        apart = " | ".join(f"{float(((a - b) / (1 + b.abs())).abs().max()):.1e}" for a, b in pairs)
        print(f"| {name} | {found[name]['processor_seconds']:.2f} | {statistics.median(times):.5f} | {apart} |")
    for peer in peers.values():
        peer.close()


def draws(record: dict[str, Any]) -> None:
    """Print the second table."""
    import torch

    import bayeskit as bk

    torch.set_num_threads(1)
    reference = {name: (x["mean"], x["sd"] / x["ess"] ** 0.5) for name, x in record["reference"].items()}
    half_days = torch.arange(21, dtype=torch.float64) / 2
    y = torch.tensor(CONCENTRATIONS, dtype=torch.float64)
    targets = {
        PREDATORS: (lambda: predators_by("bayeskit", record["data"]), reference),
        "one_comp_mm_elim_abs": (lambda: bk.Target.from_pyro(bodies()["compartment"], half_days, y), REFERENCE),
    }
    print("\n4 chains of 1,000 draws at the defaults")
    print("| model | processor seconds | largest error of a mean | largest R-hat | smallest ESS |")
    print("|---|---|---|---|---|")
    for name, (make, right) in targets.items():
        begin = processor_seconds()
        found = bk.sample(make(), seed=0, progress=False)
        seconds, table = processor_seconds() - begin, found.summary(round_to="none")
        errors = []
        for row in table.index:
            key = re.sub(r"\[(\d+)\]", lambda index: f"[{int(index[1]) + 1}]", row)
            mean, error = right[key]
            errors.append(abs(table["mean"][row] - mean) / math.hypot(error, table["mcse_mean"][row]))
        worst = table["r_hat"].max(), table["ess_bulk"].min()
        print(f"| {name} | {seconds:.1f} | {max(errors):.1f} | {worst[0]:.3f} | {worst[1]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with posteriordb's posteriors, as for posteriordb.py")
    parser.add_argument("--torchdiffeq", help="an interpreter with bayeskit and torchdiffeq")
    parser.add_argument("--diffrax", help="an interpreter with numpyro and diffrax")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        answer(options.serve)
        return
    if options.data is None:
        parser.error("--data is needed")
    record = json.loads((options.data / f"{PREDATORS}.json").read_text())
    pythons = {name: getattr(options, name) for name in ("torchdiffeq", "diffrax") if getattr(options, name)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        speed(record["data"], pythons)
        draws(record)


if __name__ == "__main__":
    main()
