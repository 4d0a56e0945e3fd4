"""Kill every call that can resume, at random times, and compare what it ends with to a run that nobody disturbed.

    python benchmarks/kill.py --kills 100 [--calls sample fit] [--seed 1]

Each attempt is a process of its own, which ends by SIGKILL after a random time, or by its result; then the next begins
in the same folder. A row says how many attempts were killed, how many finished chains of attempts had other bits than
the undisturbed run, how many ended in an error, and how many temporary files lay in the folders at the end.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import nn
from typer.testing import CliRunner

import bayeskit as bk
from bayeskit import cli, exact
from bayeskit.core.storage import digest
from bayeskit.inference import evidence
from bayeskit.inference.evidence import Budget
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.samplers import (
    SGLD,
    MinibatchTarget,
    sample_ladder,
    sample_nested,
    sample_smc,
    sample_stochastic_gradient,
    sample_with_pyro,
)
from bayeskit.inference.training import fit
from bayeskit.models.phylogenetics import Alignment, Tree
from bayeskit.parallel import map_tasks
from bayeskit.workflows import compare_models, evidence_in_folder, posterior_in_folder, run_generated_exam
from bayeskit.workflows.phylogenetics import compare_topologies, infer_topologies, variational_inference
from bayeskit.workflows.simulation_based_calibration import sbc

SEQUENCES = {"A": "CCTCATCGAC", "B": "CCTCATCTAC", "C": "CCAGTGATAG", "D": "GCAGTGCCAG", "E": "CTCGAACAAT"}
ALIGNMENT = Alignment.from_sequences(SEQUENCES)
SMALL = Budget(4, 60, 100)
OFTEN = {"checkpoint_seconds": 0, "progress": False}


def problem() -> bk.Target:
    """Return a small target without compiled code."""
    target = exact.get("beta_binomial").target()
    target.compile = False
    return target


def normal(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=20) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


class Line(nn.Module):
    """A model with one latent variable an item, and its guide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.location = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
        nn.init.constant_(self.location.weight, 0.1)
        nn.init.zeros_(self.location.bias)

    def model(self, x: torch.Tensor) -> None:
        """Points on a line through the origin."""
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z[:, None] * self.weight, 1.0).to_event(1), obs=x)

    def guide(self, x: torch.Tensor) -> None:
        """Draw from a normal distribution at a linear function of the point."""
        pyro.module("location", self.location)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.location(x)[:, 0], 1.0))


def drawn(draws: bk.Draws) -> Any:
    return draws.unconstrained, draws.log_likelihood, draws.sample_stats


def estimated(*found: evidence.Evidence) -> Any:
    return [(z.log_evidence, z.standard_error, z.num_evaluations, z.trusted) for z in found]


def sampling(folder: Path) -> Any:
    return drawn(bk.sample(problem(), 4, 60, 80, checkpoint=folder / "run", **OFTEN))


def sampling_in_groups(folder: Path) -> Any:
    return drawn(bk.sample(problem(), 4, 60, 60, num_groups=2, checkpoint=folder / "run", **OFTEN))


def pyro_sampling(folder: Path) -> Any:
    return drawn(sample_with_pyro(problem(), 2, 10, 10, checkpoint=folder / "run", **OFTEN))


def tempering(folder: Path) -> Any:
    ladder = sample_ladder(problem(), 4, 2, 40, 40, exchange=True, checkpoint=folder / "run", **OFTEN)
    return drawn(ladder.draws)


def particles(folder: Path) -> Any:
    run = sample_smc(problem(), 16, 4, num_pilot_particles=32, checkpoint=folder / "run", **OFTEN)
    return run.log_evidence, run.num_gradients


def nested(folder: Path) -> Any:
    run = sample_nested(problem(), 40, checkpoint=folder / "run", **OFTEN)
    return run.log_likelihood, run.num_evaluations


def stochastic_gradients(folder: Path) -> Any:
    y = torch.linspace(-1.0, 3.0, 100, dtype=torch.float64)
    target = MinibatchTarget.from_pyro(normal, y)
    return drawn(sample_stochastic_gradient(target, SGLD(1e-3), 2, 30, 60, checkpoint=folder / "run", **OFTEN))


def training(folder: Path) -> Any:
    x = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    line = Line()
    result = fit(line.model, line.guide, ELBO(), x, num_epochs=8, batch_size=8, checkpoint=folder / "run", **OFTEN)
    return result.losses, {name: p.detach() for name, p in line.named_parameters()}


def topologies(folder: Path) -> Any:
    settings = {"num_warmup": 40, "num_samples": 60, "num_temperatures": 3}
    found = infer_topologies(ALIGNMENT, checkpoint=folder / "run", **settings, **OFTEN)
    return found.log_likelihood, found.log_prior, [one.topologies.children for one in found.samples]


def variational(folder: Path) -> Any:
    posterior = variational_inference(ALIGNMENT, num_steps=30, checkpoint=folder / "run", **OFTEN)
    return posterior.bounds, posterior.parameters


def populations(folder: Path) -> Any:
    settings = {"num_particles": 32, "num_replicates": 4, "progress": False}
    return estimated(evidence.adaptive_smc(problem(), checkpoint=folder / "run", **settings))


def path(folder: Path) -> Any:
    settings = {"num_warmup": 40, "num_samples": 60, "progress": False}
    return estimated(evidence.thermodynamic_integration(problem(), checkpoint=folder / "run", **settings))


def comparison(folder: Path) -> Any:
    methods = ["bridge_sampling", "stepping_stone", "laplace_importance_sampling"]
    table = evidence.compare(problem(), methods, budget=SMALL, checkpoint=folder / "run", progress=False)
    return estimated(*(table[name] for name in methods))


def calibration(folder: Path) -> Any:
    settings = {"budget": SMALL, "checkpoint": folder / "run", "progress": False}
    found = evidence.calibrate(["laplace_importance_sampling"], "beta_binomial", 6, **settings)
    return dict(found.estimates), dict(found.trusted)


def square(number: int) -> dict[str, Any]:
    time.sleep(0.02)
    return {"square": torch.full((3,), number, dtype=torch.float64) ** 2, "number": number}


def tasks(folder: Path) -> Any:
    return map_tasks(square, range(8), checkpoint=folder / "run", progress=False)


def models(folder: Path) -> Any:
    both = {"one": problem(), "other": exact.beta_binomial(3, 10).target()}
    both["other"].compile = False
    found = compare_models(both, budget=SMALL, same_data=True, checkpoint=folder / "run", progress=False)
    return estimated(*found.results.values())


def given_topologies(folder: Path) -> Any:
    trees = [Tree.from_newick(text) for text in ("((A,B),C,(D,E));", "((A,C),B,(D,E));", "((A,D),B,(C,E));")]
    found = compare_topologies(
        ALIGNMENT, trees, "bridge_sampling", budget=SMALL, checkpoint=folder / "run", progress=False
    )
    return estimated(*found.comparison.results.values())


def simulated_calibration(folder: Path) -> Any:
    y = torch.tensor([0.3, 1.0], dtype=torch.float64)
    settings = {"num_replicates": 20, "num_draws": 7, "checkpoint": folder / "run", "progress": False}
    return sbc(two_numbers, args=(y,), **settings).ranks


def two_numbers(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 2):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def generated_exam(folder: Path) -> Any:
    found = run_generated_exam(4, ["naive_monte_carlo"], checkpoint=folder / "run", progress=False)
    return [(row.case, estimated(row.evidence) if row.evidence else None) for row in found.rows]


def evidence_folder(folder: Path) -> Any:
    settings = {"title": "x", "methods": ["bridge_sampling"], "budget": SMALL, "progress": False}
    return estimated(evidence_in_folder(problem(), folder / "run", **settings)["bridge_sampling"])


def posterior_folder(folder: Path) -> Any:
    settings = {"title": "x", "num_warmup": 60, "num_samples": 80, "progress": False}
    return drawn(posterior_in_folder(problem(), folder / "run", **settings))


def command(words: list[str], names: list[str], folder: Path) -> Any:
    """Run a command of bayeskit on the alignment and return what its files hold."""
    alignment, out = folder / "data.fasta", folder / "run"
    if not alignment.exists():
        alignment.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in SEQUENCES.items()))
    done = CliRunner().invoke(cli.app, [*words, "--alignment", str(alignment), "--out", str(out), "--quiet"])
    if done.exit_code:
        raise RuntimeError(done.output) from done.exception
    return [(out / name).read_text() for name in names]


TREES = "trees --runs 2 --warmup 30 --samples 40 --temperatures 3 --no-evidence".split()
CALLS: dict[str, Callable[[Path], Any]] = {
    "sample": sampling,
    "sample, in groups": sampling_in_groups,
    "sample_with_pyro": pyro_sampling,
    "sample_ladder": tempering,
    "sample_smc": particles,
    "sample_nested": nested,
    "sample_stochastic_gradient": stochastic_gradients,
    "fit": training,
    "infer_topologies": topologies,
    "variational_inference": variational,
    "adaptive_smc": populations,
    "thermodynamic_integration": path,
    "compare": comparison,
    "calibrate": calibration,
    "map_tasks": tasks,
    "compare_models": models,
    "compare_topologies": given_topologies,
    "sbc": simulated_calibration,
    "run_generated_exam": generated_exam,
    "evidence_in_folder": evidence_folder,
    "posterior_in_folder": posterior_folder,
    "bayeskit trees": partial(command, TREES, ["consensus.nwk", "run1.trees", "split_frequencies.csv"]),
    "bayeskit vi": partial(command, "vi --steps 30".split(), ["trees.trprobs", "consensus.nwk"]),
}


class Row(NamedTuple):
    """What came of one call."""

    kills: int
    finished: int
    different: int
    errors: int
    stale: int
    seconds: float


def attempt(call: Callable[[Path], Any], folder: Path, result: Path, seconds: float | None = None) -> int:
    """Run a call in a process of its own, kill it after `seconds`, and return how it ended, as `os.waitstatus` does."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            found = digest(call(folder))
            result.write_text(found)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        process, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            end = None
        time.sleep(1e-3)


def killed(call: Callable[[Path], Any], kills: int, moments: random.Random, work: Path) -> Row:
    """Kill a call `kills` times or a few more, and return what came of it."""
    begin = time.monotonic()
    calm = work / "calm"
    calm.mkdir()
    if attempt(call, calm, work / "expected") != 0:
        return Row(0, 0, 0, 1, 0, time.monotonic() - begin)
    whole, expected = time.monotonic() - begin, (work / "expected").read_text()
    done = finished = different = errors = stale = 0
    while done < kills:
        folder, result = work / f"folder-{finished}", work / f"result-{finished}"
        folder.mkdir()
        start, before = time.monotonic(), done
        # Beyond the time of a whole run, because a call between two checkpoints has to come through at times.
        while (code := attempt(call, folder, result, moments.uniform(0.0, 1.3 * whole))) == -signal.SIGKILL:
            done += 1
        if done == before:  # the first run may have been slower than the others
            whole = min(whole, time.monotonic() - start)
        finished += 1
        errors += code != 0
        different += code == 0 and result.read_text() != expected
        stale += sum(1 for _ in folder.rglob("*.tmp"))
    return Row(done, finished, different, errors, stale, time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each call")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for heavy in ("arviz", "h5netcdf", "matplotlib.pyplot", "scipy.stats", "torch._dynamo", "xarray"):
            importlib.import_module(heavy)  # once, and not in each process
    print(f"{'call':28}" + "".join(f"{name:>10}" for name in Row._fields), flush=True)
    rows = []
    for name in given.calls:
        with tempfile.TemporaryDirectory() as folder:
            row = killed(CALLS[name], given.kills, random.Random(f"{given.seed} {name}"), Path(folder))
        print(f"{name:28}" + "".join(f"{value:10}" for value in row[:-1]) + f"{row.seconds:10.1f}", flush=True)
        rows.append(row)
    total = Row(*(sum(values) for values in zip(*rows, strict=True)))
    print(f"{'all':28}" + "".join(f"{value:10}" for value in total[:-1]) + f"{total.seconds:10.1f}")
    return int(bool(total.different or total.errors or total.stale))


if __name__ == "__main__":
    sys.exit(main())
