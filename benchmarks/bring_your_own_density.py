"""One posterior brought in several ways: its evidence by our estimators, by R's bridgesampling, and exactly.

Usage::

    python benchmarks/bring_your_own_density.py [--python PATH ...] [--r Rscript] [--stan FILE] [--small]

The posterior is that of a linear regression with a normal-inverse-gamma prior, whose evidence is known. It comes as a
Pyro model, as NumPy code, and by `Target.from_log_density` from NumPyro (its potential), PyMC (its compiled log
density) and a Stan program (by BridgeStan), as far as they are installed beside bayeskit: here, or for an interpreter
named by `--python`. `--stan` names the program, or a library that BridgeStan has compiled from `own_density.stan`.
R takes part where `--r` names an Rscript with the package bridgesampling; it draws from the known posterior.

Printed are, for each source, the largest difference of its log density from the Pyro model's at random points, and of
each estimate the error, the standard error and their ratio, which should be within 4.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pyro  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402

import bayeskit as bk  # noqa: E402
from bayeskit.inference import evidence  # noqa: E402

HERE = Path(__file__).resolve().parent
X = np.random.default_rng(0).normal(size=(40, 3))
Y = X @ np.array([1.0, -1.0, 0.5]) + 0.7 * np.random.default_rng(1).normal(size=40)
SHAPE, RATE, SPREAD = 3.0, 2.0, 2.0
METHODS = ("bridge_sampling", "warp_bridge_sampling", "laplace_importance_sampling")


def exact() -> float:
    """Return the log density of the data, a Student-t with `2 SHAPE` degrees of freedom."""
    n, df, scale = len(Y), 2 * SHAPE, RATE / SHAPE * (np.eye(len(Y)) + SPREAD**2 * X @ X.T)
    constant = math.lgamma((df + n) / 2) - math.lgamma(df / 2) - n / 2 * math.log(df * math.pi)
    square = float(Y @ np.linalg.solve(scale, Y))
    return float(constant - 0.5 * np.linalg.slogdet(scale)[1] - (df + n) / 2 * math.log1p(square / df))


def by_pyro(stan: str) -> bk.Target:
    """Return the Pyro model; its vector is the log of the variance and then the coefficients."""

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        variance = pyro.sample("variance", dist.InverseGamma(x.new_tensor(SHAPE), x.new_tensor(RATE)))
        beta = pyro.sample("beta", dist.Normal(x.new_zeros(3), SPREAD * variance.sqrt()).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ beta, variance.sqrt()), obs=y)

    return bk.Target.from_pyro(model, torch.from_numpy(X), torch.from_numpy(Y))


def by_numpy(stan: str) -> bk.Target:
    """Return the same, written by hand for the rows of a matrix."""
    n, d = X.shape
    constant = SHAPE * math.log(RATE) - math.lgamma(SHAPE) - (n + d) / 2 * math.log(2 * math.pi) - d * math.log(SPREAD)
    power = SHAPE + (n + d) / 2

    def value_and_grad(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log_variance, beta = u[:, 0], u[:, 1:]
        residual = Y - beta @ X.T
        over = (RATE + 0.5 * (beta**2).sum(1) / SPREAD**2 + 0.5 * (residual**2).sum(1)) / np.exp(log_variance)
        slope = (residual @ X - beta / SPREAD**2) / np.exp(log_variance)[:, None]
        return constant - power * log_variance - over, np.column_stack([over - power, slope])

    return bk.Target.from_log_density(value_and_grad, 4, names={"log_variance": (), "beta": (3,)}, batched=True)


def by_numpyro(stan: str) -> bk.Target:
    """Return the potential of a NumPyro model, for the rows of a matrix."""
    import jax
    import numpyro
    import numpyro.distributions as ndist
    from jax.flatten_util import ravel_pytree
    from numpyro.infer.util import initialize_model

    jax.config.update("jax_enable_x64", True)

    def model(x: Any, y: Any) -> None:
        variance = numpyro.sample("variance", ndist.InverseGamma(SHAPE, RATE))
        beta = numpyro.sample("beta", ndist.Normal(0, SPREAD * variance**0.5).expand([3]).to_event(1))
        numpyro.sample("y", ndist.Normal(x @ beta, variance**0.5), obs=y)

    start = initialize_model(jax.random.PRNGKey(0), model, model_args=(X, Y))
    vector, as_sites = ravel_pytree(start.param_info.z)
    log_density = lambda u: -start.potential_fn(as_sites(u))  # noqa: E731
    return bk.Target.from_log_density(
        jax.jit(jax.vmap(jax.value_and_grad(log_density))),
        len(vector),
        names={name: value.shape for name, value in sorted(start.param_info.z.items())},
        constrain=jax.jit(jax.vmap(lambda u: start.postprocess_fn(as_sites(u)))),
        batched=True,
    )


def by_pymc(stan: str) -> bk.Target:
    """Return the compiled log density of a PyMC model, for one vector."""
    import pymc as pm

    with pm.Model() as model:
        variance = pm.InverseGamma("variance", SHAPE, RATE)
        beta = pm.Normal("beta", 0, SPREAD * variance**0.5, shape=3)
        pm.Normal("y", X @ beta, variance**0.5, observed=Y)

    value_and_grad = model.logp_dlogp_function(ravel_inputs=True)
    value_and_grad.set_extra_values({})
    start = model.initial_point()
    return bk.Target.from_log_density(
        value_and_grad,
        sum(np.size(value) for value in start.values()),
        names={name: np.shape(value) for name, value in start.items()},
    )


def by_bridgestan(stan: str) -> bk.Target:
    """Return the log density of a Stan program, for one vector."""
    import bridgestan

    data = {"n": len(Y), "d": 3, "x": X.tolist(), "y": Y.tolist()}
    program = bridgestan.StanModel(stan, data=json.dumps(data))
    return bk.Target.from_log_density(
        lambda u: program.log_density_gradient(u, propto=False, jacobian=True),
        program.param_unc_num(),
        names=program.param_unc_names(),
        constrain=lambda u: dict(zip(program.param_names(), program.param_constrain(u), strict=True)),
    )


SOURCES: dict[str, tuple[str, Callable[[str], bk.Target], tuple[int, ...]]] = {
    # Package, and the places of the log of the variance and of the coefficients in the vector.
    "Pyro": ("pyro", by_pyro, (0, 1, 2, 3)),
    "NumPy": ("numpy", by_numpy, (0, 1, 2, 3)),
    "NumPyro": ("numpyro", by_numpyro, (3, 0, 1, 2)),
    "PyMC": ("pymc", by_pymc, (0, 1, 2, 3)),
    "Stan": ("bridgestan", by_bridgestan, (3, 0, 1, 2)),
}


def measured(stan: str, small: bool, sources: list[str]) -> list[dict[str, Any]]:
    """Return a row for each source that is installed here and each estimator."""
    rows: list[dict[str, Any]] = []
    points = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    twin = by_pyro(stan).log_density(points)
    for name in sources:
        package, bring, places = SOURCES[name]
        if importlib.util.find_spec(package) is None:
            continue
        target = bring(stan)
        vectors = torch.empty_like(points)
        vectors[:, list(places)] = points
        apart = float((target.log_density(vectors) - twin).abs().max())
        begin = time.perf_counter()
        count = 150 if small else 1000
        draws = bk.sample(target, num_chains=8, num_warmup=count, num_samples=count, progress=False)
        seconds = time.perf_counter() - begin
        for method in METHODS:
            z = getattr(evidence, method)(target, draws=draws)
            row = {"source": name, "method": method, "apart": apart, "sampling": seconds, "trusted": z.trusted}
            rows.append(row | {"log_evidence": z.log_evidence, "error": z.standard_error})
    return rows


def by_r(command: str, num_draws: int) -> list[dict[str, Any]]:
    """Return the rows of R's bridgesampling."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as table:
        np.savetxt(table, np.column_stack([Y, X]), delimiter=",", fmt="%.17g")
        table.flush()
        given = [
            command,
            str(HERE / "own_density_driver.R"),
            table.name,
            str(num_draws),
            *map(str, (SHAPE, RATE, SPREAD)),
        ]
        lines = subprocess.run(given, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = []
    for method, value, error in (line.split() for line in lines):
        found = {"log_evidence": float(value), "error": math.nan if error == "NA" else float(error)}
        rows.append({"source": "R bridgesampling", "method": method} | found)
    return rows


def main() -> None:
    """Measure here and elsewhere, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], help="interpreters with bayeskit and one of the packages")
    parser.add_argument("--r", help="an Rscript with the package bridgesampling")
    parser.add_argument("--stan", default=str(HERE / "own_density.stan"), help="program or compiled library")
    parser.add_argument("--small", action="store_true", help="short chains, to see that everything works")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rows:
        print(json.dumps(measured(given.stan, given.small, ["NumPyro", "PyMC", "Stan"])))
        return
    rows = measured(given.stan, given.small, list(SOURCES))
    for python in given.python:
        command = [python, __file__, "--rows", "--stan", given.stan, *(["--small"] if given.small else [])]
        rows += json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
    if given.r:
        rows += by_r(given.r, 1200 if given.small else 8000)
    answer = exact()
    print(f"exact log evidence {answer:.6f}")
    print(
        f"{'source':17}{'method':29}{'log evidence':>13}{'error':>10}{'claimed':>9}{'ratio':>7}{'sampling':>10}  apart"
    )
    for row in rows:
        off = row["log_evidence"] - answer
        line = f"{row['source']:17}{row['method']:29}{row['log_evidence']:13.5f}{off:10.5f}{row['error']:9.5f}"
        line += f"{off / row['error']:7.2f}"
        if "apart" in row:
            line += f"{row['sampling']:8.1f} s  {row['apart']:.1e}" + ("" if row["trusted"] else "  not trusted")
        print(line)


if __name__ == "__main__":
    main()
