"""Vague priors at the defaults: are draws and evidence right, does the package say where not, or is it silently wrong.

    python benchmarks/vague_models.py [--seeds 0 1 2 3 4] [--models mean effects-gamma ...]
                                      [--numpyro PYTHON [--peer-only]]
    python benchmarks/vague_models.py --list | --check

Small data of natural size, far from zero, under priors that users take for "no information": BUGS' gamma priors of
precisions and variances, half-Cauchy priors much wider or narrower than the scale, wide normal and flat coefficients.
Each model is sampled by `bayeskit.sample` at its defaults, and bridge sampling estimates the evidence from the draws.
The answers of `vague_models_exact.py` are exact; `--check` compares them with closed forms where those exist, and with
importance sampling from the joint density in all models.

A run is right where the evidence is trusted and within four standard errors (plus that of the quadrature), or refused
by name because the prior is improper, and where the means and standard deviations of the coefficients and of the
logarithms of the scales are within four Monte Carlo errors, without a warning. It is wrong where the evidence is
trusted and further off, or where moments are more than 4.5 errors off without a warning of `bayeskit.sample` and R-hat
is at most 1.01. All others are flagged: warnings, estimates that are not trusted, typed refusals, and moments between
the two limits.

With `--numpyro`, an interpreter that has NumPyro, its NUTS at its defaults (four chains of 1000 draws after 1000 of
warm-up) is judged by the moments alone. It is flagged where it reports divergences or an R-hat above 1.01.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyro  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402
from peer_process import PeerProcess, processor_seconds  # noqa: E402
from vague_models_exact import DEGREES, VARIATES, Answer, Model, check, exact, exam  # noqa: E402

import bayeskit as bk  # noqa: E402
from bayeskit._core.statistics import mean_error  # noqa: E402

MAX_ERRORS, WRONG_ERRORS, MAX_R_HAT = 4.0, 4.5, 1.01
WORDS = ("right", "flagged", "wrong")
#: Warnings that say nothing about the draws.
ABOUT_SPEED = (bk.errors.CompilationWarning, bk.errors.SlowModelWarning)


def pyro_model(model: Model) -> Callable[..., None]:
    """Return the model as a user of Pyro writes it, a function of its data."""
    scale, prior, form = model.scale, model.coefficient, model.form

    def run(design: torch.Tensor, y: torch.Tensor, extra: torch.Tensor | None = None) -> None:
        sd = {}
        for name in model.scales:
            suffix, power = VARIATES[scale.family]
            numbers = (torch.tensor(number, dtype=y.dtype) for number in scale.numbers)
            sd[name] = pyro.sample(name + suffix, getattr(dist, scale.family)(*numbers)) ** power
        zeros = torch.zeros(design.shape[1], dtype=y.dtype)
        if prior.family == "ImproperUniform":
            of_coefficients = dist.ImproperUniform(dist.constraints.real_vector, (), zeros.shape)
        elif prior.family == "masked":
            of_coefficients = dist.Normal(zeros, 1.0).mask(False).to_event(1)
        else:
            unit = {"none": sd.get("tau"), "scaled": prior.sd * sd.get("sigma", 1.0)}.get(prior.family, prior.sd)
            of_coefficients = dist.Normal(zeros, unit).to_event(1)
        b = pyro.sample("b", of_coefficients)
        centre = design @ b
        if form == "hierarchy":
            with pyro.plate("groups", len(y)):
                centre = pyro.sample("effect", dist.Normal(centre, sd["tau"]))
        elif form == "effects":
            with pyro.plate("groups", int(extra.max()) + 1):
                centre = pyro.sample("effect", dist.Normal(b[0], sd["tau"]))[extra]
        elif form == "local_level":
            with pyro.plate("years", len(y) - 1):
                step = pyro.sample("step", dist.Normal(zeros[0], sd["tau"]))
            centre = centre + torch.cat([zeros, step.cumsum(0)])
        with pyro.plate("rows", len(y)):
            if form == "logistic":
                likelihood = dist.Bernoulli(logits=centre)
            elif form == "poisson":
                likelihood = dist.Poisson(centre.exp())
            elif form == "student":
                likelihood = dist.StudentT(DEGREES, centre, sd["sigma"])
            else:
                likelihood = dist.Normal(centre, sd.get("sigma", extra))
            pyro.sample("y", likelihood, obs=y)

    return run


@dataclass(frozen=True)
class Run:
    """What became of one run."""

    word: str
    seconds: float
    trouble: str


def errors_off(draws: torch.Tensor, answer: Answer, names: list[str]) -> tuple[float, str]:
    """Return how many errors the worst moment of draws ``(q, chains, draws)`` is off, and which moment that is."""
    centred = draws - draws.mean((1, 2), keepdim=True)
    sd = centred.square().mean((1, 2)).sqrt()
    means = (draws.mean((1, 2)) - torch.as_tensor(answer.mean)) / mean_error(draws)
    sds = (sd - torch.as_tensor(answer.sd)) * 2 * sd / mean_error(centred.square())
    off = torch.cat([means, sds]).nan_to_num(nan=math.inf)  # chains that never move have no error
    at = int(off.abs().argmax())
    return float(off[at]), f"{('mean', 'sd')[at // len(names)]} of {names[at % len(names)]}"


def quantities_of(values: Mapping[str, torch.Tensor], model: Model) -> torch.Tensor:
    """Return draws ``(q, chains, draws)`` of the quantities."""
    rows = []
    for name in model.quantities():
        if name.startswith("b["):
            rows.append(values["b"][..., int(name[2:-1])])
        else:
            suffix, power = VARIATES[model.scale.family]
            rows.append(power * values[name.removeprefix("log ") + suffix].log())
    return torch.stack(rows).double()


def with_bayeskit(model: Model, answer: Answer, seed: int) -> Run:
    """Sample at the defaults, estimate the evidence from the draws, and judge both."""
    arguments = [torch.as_tensor(value) for value in model.data().values()]
    begin = processor_seconds()
    wrong, trouble = False, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            draws = bk.sample(pyro_model(model), *arguments, seed=seed, progress=False)
        except bk.errors.BayeskitError as error:
            return Run("flagged", processor_seconds() - begin, f"refused: {error}")
        kinds = [one for one in caught if issubclass(one.category, bk.errors.BayeskitWarning)]
        said = [str(one.message) for one in kinds if not issubclass(one.category, ABOUT_SPEED)]
        try:
            estimate = bk.evidence.bridge_sampling(draws.target, draws)
            evidence = (estimate.log_evidence - answer.log_evidence) / (estimate.standard_error + answer.error)
            if not model.proper and estimate.trusted:
                wrong, trouble = True, ["evidence under an improper prior"]
            elif not estimate.trusted:
                trouble.append("not trusted: " + " ".join(estimate.warnings))
            elif not abs(evidence) <= MAX_ERRORS:
                wrong, trouble = True, [f"evidence {evidence:+.1f} errors off"]
        except bk.errors.BayeskitError as error:
            if model.proper or "improper" not in str(error):
                trouble.append(f"evidence refused: {error}")
        seconds = processor_seconds() - begin
        r_hat = float(draws.summary()["r_hat"].max())
        off, where = errors_off(quantities_of(draws.values(), model), answer, model.quantities())
    if not abs(off) <= MAX_ERRORS:
        trouble.append(f"{where} {off:+.1f} errors off, R-hat {r_hat:.3f}")
    wrong |= not abs(off) <= WRONG_ERRORS and not said and r_hat <= MAX_R_HAT
    trouble += [f"warned: {message}" for message in said]
    return Run("wrong" if wrong else "flagged" if trouble else "right", seconds, "; ".join(trouble))


def with_numpyro(peer: PeerProcess, model: Model, answer: Answer, seed: int) -> Run:
    """Let NumPyro sample the model and judge the moments."""
    found = peer.ask({"model": model.description(), "seed": seed})
    off, where = errors_off(torch.tensor(found["draws"], dtype=torch.float64), answer, model.quantities())
    flagged = found["divergences"] > 0 or not found["r_hat"] <= MAX_R_HAT
    trouble = f"{where} {off:+.1f} errors off" if not abs(off) <= MAX_ERRORS else ""
    if flagged or trouble:
        reported = f"R-hat {found['r_hat']:.3f}, n_eff {found['n_eff']:.0f}, {found['divergences']:.0f} divergences"
        trouble = f"{trouble or 'moments right'}, {reported}"
    wrong = not abs(off) <= WRONG_ERRORS and not flagged
    return Run("wrong" if wrong else "flagged" if trouble else "right", found["processor_seconds"], trouble)


def counts_of(runs: list[Run]) -> str:
    seconds = sum(run.seconds for run in runs) / len(runs)
    return "".join(f"{sum(run.word == word for run in runs):8d}" for word in WORDS) + f"{seconds:8.1f}"


def worst(name: str, seeds: list[int], runs: list[Run]) -> str:
    """Return what the worst run of a model suffered from, in one short line."""
    seed, run = max(zip(seeds, runs, strict=True), key=lambda pair: WORDS.index(pair[1].word))
    return f"  {name}, seed {seed}: {' '.join(run.trouble.split())[:110]}" if run.trouble else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="names, or how names start (default: all)")
    parser.add_argument("--numpyro", metavar="PYTHON", help="interpreter of an environment that has NumPyro")
    parser.add_argument("--peer-only", action="store_true", help="judge NumPyro alone")
    parser.add_argument("--check", action="store_true", help="check the exact answers in other ways")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    options = parser.parse_args()
    if options.peer_only and not options.numpyro:
        parser.error("--peer-only needs --numpyro")
    models = exam()
    if unknown := [name for name in options.models or () if not any(m.name.startswith(name) for m in models)]:
        parser.error(f"unknown models: {', '.join(unknown)}")
    models = [model for model in models if model.name.startswith(tuple(options.models or ("",)))]
    if options.list:
        return print(*(model.name for model in models), sep="\n")
    if options.check:
        return check(models)
    torch.set_num_threads(1)
    peer = None
    if options.numpyro:
        threads = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
        peer = PeerProcess([options.numpyro, str(Path(__file__).with_name("vague_models_numpyro.py"))], threads)
    judges: dict[str, Callable[[Model, Answer, int], Run]] = {}
    if not options.peer_only:
        judges["bayeskit"] = with_bayeskit
    if peer:
        judges["NumPyro"] = partial(with_numpyro, peer)
    runs: dict[str, list[Run]] = {name: [] for name in judges}
    head = "".join(f"{word:>8s}" for word in (*WORDS, "CPU s"))
    print(" " * 42 + "".join(f"{name:>10s}{head}" for name in judges))
    for model in models:
        answer = exact(model)
        row, notes = f"{model.name:42s}", ""
        for name, judge in judges.items():
            found = [judge(model, answer, seed) for seed in options.seeds]
            runs[name] += found
            row += " " * 10 + counts_of(found)
            notes += worst(name, options.seeds, found)
        print(row + notes, flush=True)
    for name, found in runs.items():
        silent, right = (sum(run.word == word for run in found) for word in ("wrong", "right"))
        print(f"{name}: wrong without a warning {silent} of {len(found)}, right {right / len(found):.1%}")
    if peer:
        peer.close()


if __name__ == "__main__":
    main()
