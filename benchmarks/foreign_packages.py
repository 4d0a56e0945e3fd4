"""Print what becomes of models of NumPyro, PyMC, Bambi and Stan as targets, beside what these packages compute.

    python benchmarks/foreign_packages.py [--models DIR] [--data DIR] [--only NAME ...] [--no-evidence]
        [--methods NAME ...] [--seconds 600]

The folder of `--models` has folders `numpyro`, `pymc`, `bambi` and `stan` with a module for each model. Its `make()`
returns `(model, args, kwargs)` for NumPyro, the model for PyMC and Bambi, and `(program, data, prior)` for Stan;
`exact()`, if it is there, the log evidence; `pyro_model()`, if it is there, the same model for Pyro, with the same
names of sites, and its arguments. The folder of `--data` has `NAME.stan` and `NAME.json` of posteriordb. Columns:

    density   largest relative difference of the log density from the package's own function at 100 random points:
              `compile_logp` of PyMC, the potential function of NumPyro, which sums out discrete sites, and `log_prob`
              of PyStan, which drops constants, so that differences of differences count
    Pyro      the same for the Pyro model, at the values of these points
    LOO       largest difference of ArviZ's estimate for the draws from that for the package's own pointwise log
              likelihood at the same draws
    evidence  the verdict on several methods, how many of them are trusted, whether they agree, and the distance to
              the exact value, where there is one, in standard errors
    lost      what the package offers, and the target does not

A failure is a row, or a line below it, with its reason; `!` marks an error that is none of bayeskit's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import arviz as az
import jax
import numpy as np
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit.errors import BayeskitError

METHODS = (
    "bridge_sampling",
    "warp_bridge_sampling",
    "laplace_importance_sampling",
    "smc",
    "nested_sampling",
    "stepping_stone",
)
POINTS = 100
NESTED_DIM = 30  # nested sampling takes minutes in more dimensions
Values = Mapping[str, np.ndarray]


class Lost(Exception):
    """What a target gives is not what it should give."""


def reason(error: BaseException) -> str:
    """Return the first words of an error, marked if it is not of bayeskit."""
    if isinstance(error, Lost):
        return str(error)
    mark = "" if isinstance(error, BayeskitError) else "! "
    return f"{mark}{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# Packages: a target and what the package itself computes.


@dataclass
class Package:
    """A model of another package: its target, and functions of the package itself."""

    target: Callable[[], bk.Target]
    #: Log densities ``(n,)`` of rows of a target.
    density: Callable[[bk.Target, Tensor], np.ndarray]
    #: Log likelihood of each observation, ``(chains, draws, ...)``, at draws.
    pointwise: Callable[[Any], Values]
    #: Named dimensions of each variable.
    dims: Callable[[], Mapping[str, Iterable[str]]]
    #: Names of deterministic variables.
    deterministic: Callable[[], Iterable[str]]
    #: Features of targets that the package does not offer.
    absent: tuple[str, ...] = ()
    #: Whether the package's own density lacks constants.
    drops_constants: bool = False


def numpyro_package(made: tuple[Any, tuple[Any, ...], Mapping[str, Any]]) -> Package:
    """Return a NumPyro model with its arguments, in double precision where NumPyro computes."""
    from numpyro.infer import log_likelihood
    from numpyro.infer.util import initialize_model

    model, args, kwargs = made

    def doubled() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return jax.tree.map(lambda x: x.astype("float64") if getattr(x, "dtype", None) == "float32" else x, made[1:])

    @cache
    def initialized() -> Any:
        with jax.enable_x64(True):
            args, kwargs = doubled()
            return initialize_model(jax.random.PRNGKey(1), model, model_args=args, model_kwargs=kwargs)

    def density(target: bk.Target, u: Tensor) -> np.ndarray:
        parts = {s.name: u[:, s.start : s.stop].reshape(-1, *s.unconstrained_shape).numpy() for s in target.sites}
        with jax.enable_x64(True):
            return -np.asarray(jax.jit(jax.vmap(initialized().potential_fn))(parts))

    def pointwise(draws: Any) -> Values:
        shape = draws.unconstrained.shape[:2]
        given = {name: x.reshape(-1, *x.shape[2:]).numpy() for name, x in draws.values(deterministic=False).items()}
        with jax.enable_x64(True):
            args, kwargs = doubled()
            found = log_likelihood(model, given, *args, parallel=True, **kwargs)
        return {name: np.asarray(x).reshape(*shape, *x.shape[1:]) for name, x in found.items()}

    def dims() -> Mapping[str, Iterable[str]]:
        sites = ((name, site) for name, site in initialized().model_trace.items() if site["type"] == "sample")
        return {name: [frame.name for frame in site["cond_indep_stack"] if frame.size > 1] for name, site in sites}

    def deterministic() -> Iterable[str]:
        return [name for name, site in initialized().model_trace.items() if site["type"] == "deterministic"]

    return Package(lambda: bk.Target.from_numpyro(model, *args, **kwargs), density, pointwise, dims, deterministic)


def pymc_package(made: Any) -> Package:
    """Return a PyMC or Bambi model."""
    import pymc

    def own() -> Any:
        return getattr(getattr(made, "backend", None), "model", made)  # which Bambi has once it is built

    def density(target: bk.Target, u: Tensor) -> np.ndarray:
        model = own()
        logp, names = model.compile_logp(), [model.rvs_to_values[rv].name for rv in model.free_RVs]
        layout = [(name, s.start, s.stop, s.unconstrained_shape) for name, s in zip(names, target.sites, strict=True)]
        return np.array([logp({name: row[i:j].reshape(shape) for name, i, j, shape in layout}) for row in u.numpy()])

    def pointwise(draws: Any) -> Values:
        found = pymc.compute_log_likelihood(
            draws.to_arviz(), model=own(), extend_inferencedata=False, progressbar=False
        )
        return {str(name): x.to_numpy() for name, x in found.data_vars.items()}

    def dims() -> Mapping[str, Iterable[str]]:
        named = own().named_vars_to_dims
        variables = (*own().free_RVs, *own().observed_RVs, *own().deterministics)
        return {x.name: [dim for dim in named.get(x.name, ()) if dim] for x in variables}

    return Package(
        lambda: bk.Target.from_pymc(made), density, pointwise, dims, lambda: [x.name for x in own().deterministics]
    )


def stan_package(program: str, data: Mapping[str, Any], prior: Any = None) -> Package:
    """Return a Stan program with its data."""

    @cache
    def built() -> Any:
        import stan

        with redirect_stdout(StringIO()):
            return stan.build(program, data=dict(data), random_seed=1)

    def pointwise(draws: Any) -> Values:
        places = [i for i, name in enumerate(built().constrained_param_names) if name.split(".")[0] == "log_lik"]
        rows = draws.unconstrained.reshape(-1, draws.unconstrained.shape[-1]).tolist()
        found = np.stack([np.asarray(built().constrain_pars(row))[places] for row in rows])
        return {"log_lik": found.reshape(*draws.unconstrained.shape[:2], -1)}

    absent = ["prior draws", "prior predictive"]
    absent += [] if prior else ["tempering"]
    absent += [] if "log_lik" in program else ["pointwise"]
    absent += [] if "_rng(" in program else ["posterior predictive"]
    return Package(
        lambda: bk.Target.from_stan(program, data, prior=prior),
        lambda target, u: np.array([built().log_prob(row) for row in u.tolist()]),
        pointwise,
        dict,
        list,
        tuple(absent),
        drops_constants=True,
    )


# Columns.


def difference(found: np.ndarray, own: np.ndarray, drops_constants: bool = False) -> float:
    """Return the largest relative difference of two log densities; infinite where only one is finite."""
    finite = np.isfinite(own)
    if (finite != np.isfinite(found)).any():
        return math.inf
    if not finite.any():
        return math.nan
    gap = found[finite] - own[finite]
    if drops_constants:
        gap = gap - np.median(gap)
    return float(np.max(np.abs(gap) / np.maximum(1.0, np.abs(own[finite]))))


def pyro_difference(target: bk.Target, pyro: tuple[Any, tuple[Any, ...]], u: Tensor) -> float:
    """Return the difference from a Pyro model, of the densities of values."""
    other = bk.Target.from_pyro(pyro[0], *pyro[1])
    v = other.unconstrain(target.constrain(u))
    found, expected = (t.log_density(x) - t.log_jacobian(x) for t, x in ((target, u), (other, v)))
    return difference(found.numpy(), expected.numpy())


def _kept(terms: np.ndarray, counted: Tensor | None) -> np.ndarray:
    return terms if counted is None else terms[..., counted.numpy()]


def loo_difference(package: Package, draws: Any) -> float:
    """Return the largest difference of ArviZ's leave-one-out estimates, of those that are the same but for names."""
    # Data that a mask leaves out have no terms.
    own = {name: _kept(x, draws.target.counted().get(name)) for name, x in package.pointwise(draws).items()}
    tree = draws.to_arviz()
    found = {str(name) for name in tree["log_likelihood"].data_vars}
    if found != set(own):
        raise Lost(f"pointwise terms of {sorted(found)}, and the package has {sorted(own)}")
    # The posterior counts as well: the estimate smooths weights by its effective sample size.
    posterior = {name: x.to_numpy() for name, x in tree["posterior"].data_vars.items()}
    beside = az.from_dict({"posterior": posterior, "log_likelihood": dict(own)})
    gaps = []
    for name in own:
        a, b = (float(az.loo(x, var_name=name).elpd) for x in (tree, beside))
        gaps.append(abs(a - b) / max(1.0, abs(b)))
    return max(gaps)


def _require(fine: bool, why: str) -> None:
    if not fine:
        raise Lost(why)


def _drawn(found: Mapping[str, Tensor], target: bk.Target) -> None:
    for name, x in target.named_data()[0].items():
        _require(name in found, f"no draws of {name!r}")
        shape = tuple(found[name].shape)
        _require(shape[len(shape) - x.dim() :] == tuple(x.shape), f"draws of {name!r} have shape {shape}")
        _require(not bool(found[name].double().isnan().any()), f"draws of {name!r} hold NaN")
    _require(bool(found), "nothing is drawn")


def features(
    target: bk.Target, draws: Any, u: Tensor, named: Mapping[str, Iterable[str]], computed: Iterable[str]
) -> dict[str, Callable[[], None]]:
    """Return checks by feature, which raise an error where it is lost.

    The package names dimensions of variables, and the deterministic variables.
    """

    def prior_draws() -> None:
        v = target.sample_prior(POINTS)
        _require(bool(v.isfinite().all()), f"{int((~v.isfinite()).any(-1).sum())} of {POINTS} draws are not finite")
        _require(bool(target.log_prior(v).isfinite().all()), "some draws have no prior density")

    def pointwise() -> None:
        parts = target.pointwise_log_likelihood(u)
        total = sum(x.reshape(len(u), -1).sum(-1) for x in parts.values())
        expected = target.evaluate(u)[1] if target.is_split else total
        gap = difference(np.asarray(total), expected.numpy())
        _require(not gap > 1e-9, f"terms do not sum to the likelihood: relative difference {gap:.1g}")

    def round_trip() -> None:
        gap = (target.unconstrain(target.constrain(u)) - u).abs().max()
        _require(float(gap) < 1e-6, f"coordinates differ by {float(gap):.1g}")

    def dims() -> None:
        tree = draws.to_arviz()
        for name, expected in named.items():
            group = next((tree[x] for x in ("posterior", "observed_data") if x in tree and name in tree[x]), None)
            if group is None:  # summed out
                continue
            missing = [d for d in expected if d not in group[name].dims]
            _require(not missing, f"{name!r} has no dimension {missing}: {group[name].dims}")

    def deterministic() -> None:
        missing = set(computed) - set(draws.values())
        _require(not missing, f"no values of {sorted(missing)}")

    def tempering() -> None:
        _require(target.is_split, "prior and likelihood are not known apart")
        prior, likelihood = target.evaluate(u)
        gap = difference(target.log_density(u, 0.5).numpy(), (prior + 0.5 * likelihood).numpy())
        _require(not gap > 1e-10, "the tempered density is another one")

    return {
        "prior draws": prior_draws,
        "prior predictive": lambda: _drawn(
            bk.prior_predictive(target, num_draws=50).posterior_predictive or {}, target
        ),
        "posterior predictive": lambda: _drawn(draws.thin(20).predictive().posterior_predictive or {}, target),
        "pointwise": pointwise,
        "round trip": round_trip,
        "dims": dims,
        "deterministic": deterministic,
        "tempering": tempering,
    }


# Rows.


@dataclass
class Row:
    """A row of the table, with lines below it."""

    name: str
    dim: int = 0
    density: float = math.nan
    pyro: float = math.nan
    loo: float = math.nan
    evidence: str = ""
    trusted: int = 0
    agreed: bool = False
    lost: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failed: bool = False

    def attempt(self, what: str, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return what a call returns; a failure becomes a line."""
        try:
            return call()
        except Exception as error:
            self.lines.append(f"{what}: {reason(error)}")
            return otherwise

    def __str__(self) -> str:
        numbers = ["" if math.isnan(x) else f"{x:.0e}" for x in (self.density, self.pyro, self.loo)]
        cells = (f"{self.name:42}", f"{self.dim:4}", *(f"{x:>8}" for x in numbers), f"{self.evidence:52}")
        lost = "no target" if self.failed else ", ".join(self.lost) or "-"
        return " ".join([*cells, f"{self.seconds:5.0f}", lost]) + "".join(f"\n      {line}" for line in self.lines)


def judge_evidence(row: Row, target: bk.Target, exact: float | None, names: Iterable[str]) -> None:
    """Estimate the evidence by the methods of these that apply."""
    methods = [name for name in names if name != "nested_sampling" or target.dim <= NESTED_DIM]
    found = bk.evidence.compare(target, methods, progress=False)
    verdict = found.verdict
    row.lines += [f"evidence: {name} does not apply: {why[:120]}" for name, why in verdict.refused.items()]
    row.lines += [f"evidence: {name} is not trusted: {why[:160]}" for name, why in verdict.untrusted.items()]
    row.lines += [f"evidence: {name} disagrees, {x:.1f} errors away" for name, x in verdict.disagreeing.items()]
    row.lines += [f"evidence: {name} is higher, {x:.1f} errors away" for name, x in verdict.contradicted_by.items()]
    row.lines += [f"evidence: {note[:200]}" for note in verdict.notes if " known, after" not in note]
    row.trusted, row.agreed = len(verdict.agreeing) + len(verdict.disagreeing), verdict.is_agreed
    if verdict.best is None:
        row.evidence = "none is trusted"
        return
    best = verdict.best
    row.evidence = f"{best.log_evidence:.3f} +- {best.standard_error:.1g}, {row.trusted} of {len(methods)}"
    row.evidence += ", agreed" if row.agreed else ", DISAGREED"
    if exact is not None:
        row.evidence += f", exact {(best.log_evidence - exact) / best.standard_error:+.1f}"


def judge(row: Row, package: Package, module: ModuleType | None) -> bk.Target | None:
    """Fill all of the row of a model but the evidence; return its target."""
    target = row.attempt("target", package.target)
    if target is None:
        return None
    row.dim = target.dim
    u = torch.randn(POINTS, target.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    density = row.attempt("density", lambda: target.log_density(u).numpy())
    if density is None:
        return None
    own = row.attempt("the package's own density", lambda: package.density(target, u))
    if own is not None:
        row.density = difference(density, own, package.drops_constants)
        finite, of_own = (int(np.isfinite(x).sum()) for x in (density, own))
        if min(finite, of_own) < POINTS:
            row.lines.append(f"density: {finite} of {POINTS} points are finite, {of_own} by the package itself")
    if hasattr(module, "pyro_model"):
        row.pyro = row.attempt("Pyro", lambda: pyro_difference(target, module.pyro_model(), u), math.nan)
    improper = getattr(target.density, "improper_sites", ())  # nobody draws from these priors
    draws = row.attempt("draws", lambda: bk.sample(target, progress=False))
    if draws is not None:
        named = row.attempt("the package's own dimensions", package.dims, {})
        computed = row.attempt("the package's own deterministic variables", package.deterministic, ())
        for what, check in features(target, draws, u, named, computed).items():
            try:
                check()
            except Exception as error:
                if what in package.absent or (improper and what.startswith("prior")):
                    continue
                row.lost.append(what)
                row.lines.append(f"{what}: {reason(error)}")
        if "pointwise" not in (*row.lost, *package.absent):
            few = draws.thin(20) if package.drops_constants else draws  # PyStan takes them one by one
            row.loo = row.attempt("LOO", lambda: loo_difference(package, few), math.nan)
    return target


# Models, each in a process that may be ended.


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of_module(path: Path) -> tuple[Package, ModuleType]:
    module = _module(path)
    made = module.make()
    if path.parent.name == "stan":
        return stan_package(*made), module
    return (numpyro_package if path.parent.name == "numpyro" else pymc_package)(made), module


def _of_posteriordb(folder: Path, name: str) -> tuple[Package, None]:
    data = json.loads((folder / f"{name}.json").read_text())["data"]
    return stan_package((folder / f"{name}.stan").read_text(), data), None


def _cases(models: Path | None, data: Path | None) -> dict[str, Callable[[], tuple[Package, ModuleType | None]]]:
    paths = [] if models is None else sorted(models.glob("*/*.py"))
    found: dict[str, Callable[[], tuple[Package, ModuleType | None]]] = {
        f"{path.parent.name}/{path.stem}": partial(_of_module, path) for path in paths
    }
    programs = [] if data is None else [path.stem for path in sorted(data.glob("*.stan"))]
    return found | {f"posteriordb/{name}": partial(_of_posteriordb, data, name) for name in programs}


def work(connection: Connection, models: Path | None, data: Path | None, methods: tuple[str, ...]) -> None:
    """Answer each name with its row, first without and then with the evidence."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = _cases(models, data)
    while (name := connection.recv()) is not None:
        row, begin = Row(name), time.monotonic()
        package, module = row.attempt("the model itself", cases[name], (None, None))
        target = None if package is None else judge(row, package, module)
        row.failed, row.seconds = target is None, time.monotonic() - begin
        connection.send((row, row.failed or not methods))
        if methods and target is not None:
            exact = row.attempt("exact", module.exact) if hasattr(module, "exact") else None
            row.attempt("evidence", partial(judge_evidence, row, target, exact, methods))
            row.seconds = time.monotonic() - begin
            connection.send((row, True))


@dataclass
class Worker:
    """A process for models one after the other, started anew after one that takes too long or ends it."""

    arguments: tuple[Any, ...]
    limit: float
    process: Any = None
    connection: Any = None

    def row(self, name: str) -> Row:
        """Return the row of a model."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=work, args=(other, *self.arguments), daemon=True)
            self.process.start()
            other.close()
        self.connection.send(name)
        row, begin = Row(name), time.monotonic()
        while True:
            try:
                if not self.connection.poll(max(0.0, begin + self.limit - time.monotonic())):
                    why = f"not done in {self.limit:.0f} s"
                    break
                row, done = self.connection.recv()
                if done:
                    return row
            except (EOFError, OSError):
                self.process.join()
                why = f"the process has ended with status {self.process.exitcode}"
                break
        self.process.kill()
        self.process = None
        row.lines.append(f"{'evidence' if row.dim else 'target'}: {why}")
        row.failed, row.seconds = not row.dim, time.monotonic() - begin
        return row

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.connection.send(None)
            self.process.join()


def main() -> None:
    """Print the table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names, such as pymc/ or eight_schools")
    parser.add_argument("--no-evidence", action="store_true")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, help="methods for the evidence")
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds for a model")
    options = parser.parse_args()
    methods = () if options.no_evidence else tuple(options.methods)
    worker = Worker((options.models, options.data, methods), options.seconds)
    rows = []
    print(f"{'model':42} {'d':>4} {'density':>8} {'Pyro':>8} {'LOO':>8} {'evidence':52} {'s':>5} lost")
    for name in _cases(options.models, options.data):
        if not options.only or any(part in name for part in options.only):
            rows.append(worker.row(name))
            print(rows[-1], flush=True)
    worker.end()
    lost = Counter(what for row in rows for what in row.lost)
    print(f"{len(rows)} models, {sum(row.failed for row in rows)} of them without a target")
    for what in ("density", "pyro"):
        known = [getattr(row, what) for row in rows if not math.isnan(getattr(row, what))]
        print(f"densities equal to 1e-10 ({what}): {sum(x <= 1e-10 for x in known)} of {len(known)}")
    known = [row.loo for row in rows if not math.isnan(row.loo)]
    print(f"LOO equal to 1e-8: {sum(x <= 1e-8 for x in known)} of {len(known)}")
    print(
        f"evidence by three or more trusted methods that agree: "
        f"{sum(row.trusted >= 3 and row.agreed for row in rows)} of {sum(bool(row.evidence) for row in rows)}"
    )
    print(f"features lost: {', '.join(f'{what} {count}' for what, count in lost.most_common()) or 'none'}")
    foreign = [line for row in rows for line in row.lines if ": ! " in line and not line.startswith("the ")]
    print(f"errors that are none of bayeskit's own: {len(foreign)}")


if __name__ == "__main__":
    main()
