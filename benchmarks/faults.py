"""Disturb every call that lasts, and compare what it ends with to a run that nobody disturbed.

    python benchmarks/faults.py [--tries 3] [--faults kill disk] [--calls sample fit] [--seed 1]
    python benchmarks/faults.py --faults kill --tries 100

Each attempt is a process of its own. The faults are:

- kill, terminate, interrupt: SIGKILL, SIGTERM or SIGINT after a random time;
- disk: the folder lies on a disk that is full after a random part of what the run writes;
- memory: the process may take a random part of the memory that the run takes;
- twins: two processes in one folder;
- copy: a killed run goes on in a copy of its folder;
- read-only: a killed run goes on where it must not write;
- linker: the folder of compiled code is on a disk that is full after a random part of it.

A disturbed attempt may end with the result of the undisturbed run, with a part of it and a warning, or with an error of
bayeskit, of a keyboard or of memory. Then an attempt without a fault follows in the same folder, and has to end with
the result of the undisturbed run, bit for bit. Disks are mounted, so the table needs a superuser of Linux.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.linalg import solve
from scipy.optimize import minimize, rosen, rosen_der
from torch import nn
from typer.testing import CliRunner

import bayeskit as bk
from bayeskit import cli, exact
from bayeskit._core.storage import digest
from bayeskit.errors import BayeskitError
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
from bayeskit.models.phylogenetics.workflows import compare_topologies, infer_topologies, variational_inference
from bayeskit.models.sparse_networks import sparsify
from bayeskit.models.unnormalised import fit_energy
from bayeskit.models.unnormalised._models import EnergyModel
from bayeskit.parallel import map_tasks
from bayeskit.workflows import (
    compare_models,
    evidence_in_folder,
    learn_likelihood,
    posterior_in_folder,
    run_generated_exam,
)
from bayeskit.workflows._simulation_based_calibration import sbc

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


def compiled_sampling(folder: Path) -> Any:
    target = exact.get("beta_binomial").target()
    target.compile = True
    return drawn(bk.sample(target, 4, 60, 80, checkpoint=folder / "run", **OFTEN))


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


def sparse_training(folder: Path) -> Any:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    module = nn.Linear(4, 1, bias=False)
    nn.init.ones_(module.weight)
    network = sparsify(module, lambda f: dist.Normal(f[:, 0], 1.0), num_data=40, initial_scale=0.1)
    data = (x, 2 * x[:, 0])
    found = fit(network.model, network.guide, ELBO(), data, num_steps=20, checkpoint=folder / "run", **OFTEN)
    return found.losses, {name: p.detach() for name, p in network.named_parameters()}


def energies(folder: Path) -> Any:
    weight = nn.Parameter(torch.zeros(3))
    model = EnergyModel.of_bits(lambda x: (x * weight).sum(-1), 3)
    model.weight = weight
    found = fit_energy(model, torch.eye(3), num_steps=30, checkpoint=folder / "run", progress=False)
    return found.losses, weight.detach()


def networks(folder: Path) -> Any:
    y = torch.tensor([0.3, 1.0, -0.2, 0.4], dtype=torch.float64)
    settings = {"sizes": (1, 4), "num_steps": 20, "batch_size": 8}
    found = bk.amortize(some_numbers, (y,), checkpoint=folder / "run", **settings, **OFTEN)
    return [(name, p.detach()) for name, p in found.network.named_parameters()]


def some_numbers(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def learned(folder: Path) -> Any:
    prior = dist.Normal(torch.zeros(1), 2.0).to_event(1)
    settings = {"num_simulations": 500, "num_epochs": 3, "progress": False}
    found = learn_likelihood(noisy, prior, checkpoint=folder / "run", **settings)
    return [(name, p.detach()) for name, p in found.network.named_parameters()]


def noisy(theta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return theta + torch.randn(theta.shape, generator=generator)


def effects(y: torch.Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Poisson(effect.exp()), obs=y)


def marginal(folder: Path) -> Any:
    target = bk.Target.from_pyro(effects, torch.tensor([1.0, 0.0, 3.0, 5.0], dtype=torch.float64))
    target.compile = False
    return drawn(bk.sample(bk.marginalize(target, ["effect"]), 2, 20, 20, checkpoint=folder / "run", **OFTEN))


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
        raise RuntimeError(done.output) from (done.exception if done.exit_code == 1 else BayeskitError(done.output))
    return [(out / name).read_text() for name in names]


TREES = "trees --runs 2 --warmup 30 --samples 40 --temperatures 3 --no-evidence".split()
Call = Callable[[Path], Any]
CALLS: dict[str, Call] = {
    "sample": sampling,
    "sample, compiled": compiled_sampling,
    "sample, in groups": sampling_in_groups,
    "sample_with_pyro": pyro_sampling,
    "sample_ladder": tempering,
    "sample_smc": particles,
    "sample_nested": nested,
    "sample_stochastic_gradient": stochastic_gradients,
    "fit": training,
    "fit, sparsified": sparse_training,
    "fit_energy": energies,
    "amortize": networks,
    "learn_likelihood": learned,
    "sample, marginalized": marginal,
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


# One attempt.


class Ending(NamedTuple):
    """How an attempt has ended: a result, an error, or a signal."""

    how: str  # "result", "error", "signal 9" or "hangs"
    digest: Any = ""
    said: tuple[str, ...] = ()  # warnings, or the error
    is_typed: bool = False  # an error of bayeskit, a keyboard, or memory
    peak: int = 0  # bytes of address space beyond those at the start

    @property
    def is_partial(self) -> bool:
        """Whether it is a result of a part of the run."""
        return self.how == "result" and any("resumes" in text or "interrupted" in text for text in self.said)

    def is_sound(self, expected: str) -> bool:
        """Whether a disturbed attempt may end so."""
        if self.how == "error":
            return self.is_typed
        is_slow = any("tensor operations" in text or "more slowly" in text for text in self.said)
        return self.how == "result" and (self.digest == expected or self.is_partial or is_slow)


_NO_MEMORY = re.compile("memory|bad_alloc", re.IGNORECASE)
_LONGEST = 600.0


def _bytes_of(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _is_typed(error: BaseException | None) -> bool:
    if error is None:
        return False
    if isinstance(error, BayeskitError | KeyboardInterrupt | MemoryError):
        return True
    # An allocation that fails: of torch, or of a library that says so in its own way; Python's import loses the error.
    if isinstance(error, SystemError) and "exception" in str(error):
        return True
    memory = isinstance(error, RuntimeError | OSError | ImportError) and _NO_MEMORY.search(str(error))
    return bool(memory) or (type(error) is RuntimeError and _is_typed(error.__cause__))


def _child(
    call: Call, folder: Path, report: Path, prepare: Callable[[], None] | None, summary: Callable[[Any], Any]
) -> None:
    torch.set_num_threads(1)
    try:
        before = _bytes_of("VmSize")
        if prepare is not None:
            prepare()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = summary(call(folder))
        said = tuple(str(one.message) for one in caught)
        ending = Ending("result", found, said, True, _bytes_of("VmPeak") - before)
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        last = "".join(traceback.format_exception(error)[-3:])
        ending = Ending("error", "", (f"{type(error).__name__}: {error}", last), _is_typed(error))
    report.write_text(json.dumps(ending))


class Attempt:
    """A call in a process of its own."""

    def __init__(
        self,
        call: Call,
        folder: Path,
        prepare: Callable[[], None] | None = None,
        summary: Callable[[Any], Any] = digest,
    ) -> None:
        handle, name = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        os.chmod(name, 0o666)
        self._report = Path(name)
        self._process = os.fork()
        if self._process == 0:
            try:
                _child(call, folder, self._report, prepare, summary)
                os._exit(0)
            finally:
                os._exit(1)

    def end(self, signal_number: int | None = None, seconds: float = 0.0) -> Ending:
        """Wait, send a signal after some seconds if one is given, and return how the attempt has ended."""
        begin, sent, status = time.monotonic(), signal_number is None, 0
        while True:
            process, status = os.waitpid(self._process, os.WNOHANG)
            passed = time.monotonic() - begin
            if process:
                break
            if not sent and passed >= seconds:
                os.kill(self._process, cast(int, signal_number))
                sent = True
            if passed > _LONGEST:
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                return Ending("hangs")
            time.sleep(1e-3)
        code = os.waitstatus_to_exitcode(status)
        text = self._report.read_text()
        self._report.unlink()
        if code < 0:
            return Ending(f"signal {-code}")
        how, found, said, is_typed, peak = json.loads(text) if text else ("error", "", ["no report"], False, 0)
        return Ending(how, found, tuple(said), is_typed, peak)


@contextmanager
def disk(place: Path, size: int) -> Iterator[Path]:
    """Mount a disk of ``size`` bytes at ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={max(size, 4096)},mode=777", "tmpfs", str(place)]
    subprocess.run(options, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


# The faults. Each disturbs attempts in a folder, and returns their endings that are not sound.


class Study(NamedTuple):
    """A call, its undisturbed result, seconds, bytes of files and of memory, and random numbers for the faults."""

    call: Call
    is_folder_of_results: bool
    expected: str
    seconds: float
    files: int
    memory: int
    moments: random.Random

    def unsound(self, *endings: Ending) -> list[Ending]:
        """Return the endings that no fault excuses."""
        return [one for one in endings if not one.is_sound(self.expected)]

    def moment(self) -> float:
        """Return a random time."""
        # Beyond the time of a whole run, because a call between two checkpoints has to come through at times.
        return self.moments.uniform(0.0, 1.3 * self.seconds)

    def part(self) -> float:
        """Return a random share."""
        return self.moments.uniform(0.02, 0.98)


def signalled(number: int, study: Study, folder: Path) -> list[Ending]:
    """Send a signal at a random time, three times in the same folder at most."""
    unsound = []
    for _ in range(3):
        ending = Attempt(study.call, folder).end(number, study.moment())
        if ending.how == f"signal {number}":
            continue
        unsound += study.unsound(ending)
        if not ending.is_partial:
            break
    return unsound


def on_full_disk(study: Study, folder: Path) -> list[Ending]:
    place = folder.with_name(f"{folder.name}-disk")
    with disk(place, int(study.part() * study.files)):
        ending = Attempt(study.call, place).end()
        shutil.copytree(place, folder, dirs_exist_ok=True)
    # A checkpoint that cannot be written is a warning, once a part is done; results that cannot be are an error.
    begun = [path for path in folder.rglob("*") if path.is_file() and path.name != "tasks.json"]
    is_lost = ending.how == "error" and bool(begun) and not study.is_folder_of_results
    return [ending] if is_lost else study.unsound(ending)


def limited_memory(size: int) -> Callable[[], None]:
    """Return a function that leaves a process ``size`` bytes of memory."""

    def prepare() -> None:
        # OpenBLAS waits for ever where it cannot allocate its own memory, which it does at its first use.
        matrix = np.eye(200) @ np.eye(200)
        solve(matrix + matrix, matrix, assume_a="pos")
        minimize(rosen, np.zeros(20), jac=rosen_der, method="L-BFGS-B")
        limit = _bytes_of("VmSize") + size
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    return prepare


def without_memory(study: Study, folder: Path) -> list[Ending]:
    prepare = limited_memory(int(study.part() * study.memory))
    return study.unsound(Attempt(study.call, folder, prepare).end())


def twins(study: Study, folder: Path) -> list[Ending]:
    first = Attempt(study.call, folder)
    time.sleep(study.moments.uniform(0.0, 0.5 * study.seconds))
    second = Attempt(study.call, folder)
    return study.unsound(first.end(), second.end())


def copied(study: Study, folder: Path) -> list[Ending]:
    before = folder.with_name(f"{folder.name}-before")
    before.mkdir()
    Attempt(study.call, before).end(signal.SIGKILL, study.moment())
    shutil.copytree(before, folder, dirs_exist_ok=True)
    return []


def read_only(study: Study, folder: Path) -> list[Ending]:
    Attempt(study.call, folder).end(signal.SIGKILL, study.moment())

    def contents() -> list[tuple[str, bytes]]:
        return sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())

    def prepare() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)

    before = contents()
    for place in (folder.parent, folder, *folder.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    ending = Attempt(study.call, folder, prepare).end()
    changed = [] if contents() == before else [Ending("wrote into a folder that is read-only")]
    return study.unsound(ending) + changed


def with_full_cache(study: Study, folder: Path) -> list[Ending]:
    place = folder.with_name(f"{folder.name}-cache")
    with disk(place, int(study.part() * 400_000)):

        def prepare() -> None:
            os.environ["XDG_CACHE_HOME"] = str(place)

        ending = Attempt(study.call, folder, prepare).end()
    for path in folder.iterdir():  # uncompiled chains have other digits, with which compiled ones would go on
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return study.unsound(ending)


FAULTS: dict[str, Callable[[Study, Path], list[Ending]]] = {
    "kill": partial(signalled, signal.SIGKILL),
    "terminate": partial(signalled, signal.SIGTERM),
    "interrupt": partial(signalled, signal.SIGINT),
    "disk": on_full_disk,
    "memory": without_memory,
    "twins": twins,
    "copy": copied,
    "read-only": read_only,
    "linker": with_full_cache,
}


def examined(study: Study, fault: str, tries: int, work: Path) -> list[str]:
    """Return what went wrong in some tries of a fault."""
    wrong = []
    for number in range(tries):
        folder = work / f"{fault}-{number}"
        folder.mkdir()
        wrong += [f"{fault}: {one.how} {'; '.join(one.said)[-600:]}" for one in FAULTS[fault](study, folder)]
        after = Attempt(study.call, folder).end()
        # Chains that went on without compiled code, as a warning said, are not those of compiled code.
        is_other_code = after.is_typed and "compiled=False" in " ".join(after.said)
        if (after.digest != study.expected or after.is_partial) and not is_other_code:
            wrong.append(f"after {fault}: {after.how} {'; '.join(after.said)[-600:]}")
        # Files of another host, or of a process that lives, may stay; here there are neither.
        if left := [path.name for path in folder.rglob("*.tmp")]:
            wrong.append(f"after {fault}: {left} are left")
        shutil.rmtree(folder)
    return wrong


def calm(name: str, work: Path, moments: random.Random) -> Study | Ending:
    """Run a call twice without a fault; return the study of it, or how it has ended."""
    call, ending, seconds, files = CALLS[name], Ending(""), 0.0, 0
    for number in range(2):  # the second finds the compiled code
        folder = work / f"calm-{number}"
        folder.mkdir()
        begin = time.monotonic()
        ending = Attempt(call, folder).end()
        seconds = time.monotonic() - begin
        if ending.how != "result":
            return ending
        files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Study(
        call,
        name.endswith("folder") or name.startswith("bayeskit"),
        ending.digest,
        seconds,
        files,
        ending.peak,
        moments,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=3, help="of each fault in each call")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for heavy in ("arviz", "h5netcdf", "matplotlib.pyplot", "scipy.stats", "torch._dynamo", "xarray"):
            importlib.import_module(heavy)  # once, and not in each process
    print(f"{'wrong of ' + str(given.tries):28}" + "".join(f"{name:>11}" for name in given.faults), flush=True)
    seen: Counter[str] = Counter()
    for name in given.calls:
        complaints = []
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            work.chmod(0o755)
            study = calm(name, work, random.Random(f"{given.seed} {name}"))
            if isinstance(study, Ending):
                print(f"{name:28} fails without a fault: {study.said}", flush=True)
                seen["calm"] += 1
                continue
            row = ""
            for fault in given.faults:
                wrong = examined(study, fault, given.tries, work)
                seen[fault] += len(wrong)
                complaints += wrong
                row += f"{len(wrong):11}"
        print(f"{name:28}{row}", *complaints, sep="\n    " if complaints else "", flush=True)
    print(f"{'all':28}" + "".join(f"{seen[fault]:11}" for fault in given.faults))
    return int(bool(seen.total()))


if __name__ == "__main__":
    sys.exit(main())
