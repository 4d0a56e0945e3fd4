"""Damage files of every kind that bayeskit reads, and see whether it notices.

A case is a kind of file and a seed. It damages a small valid file and reads it, to the end of the run for checkpoints.
Right is a file that was read unchanged, or one that was refused by an error of :mod:`bayeskit.errors`. Text that
people write has no checksum, so a damaged alignment may be another alignment. In half of the cases of other files the
damage is done to bytes; in the others tensors or facts are changed, and the checksum is computed again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from safetensors.torch import load_file

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.folders import RunFolder, Schema, read_facts, write_facts
from bayeskit._core.storage import digest, save_tensors
from bayeskit.errors import BayeskitError
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.samplers import sample_nested
from bayeskit.inference.training import fit
from bayeskit.models.phylogenetics import (
    Alignment,
    MrBayesBlock,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
    Tree,
    TreeSample,
    all_topologies,
)
from bayeskit.models.phylogenetics.workflows import VariationalPosterior, infer_topologies, variational_inference
from bayeskit.parallel import map_tasks

SEQUENCES = {"A": "CCTCATCGAC", "B": "CCTCATCTAC", "C": "CCAGTGATAG", "D": "GCAGTGCCAG", "E": "CTCGAACAAT"}
ALIGNMENT = Alignment.from_sequences(SEQUENCES)
OFTEN = {"checkpoint_seconds": 0, "progress": False}
MATRIX = "\n".join(f"{name} {text}" for name, text in SEQUENCES.items())
DATA = f"#NEXUS\nbegin data;\ndimensions ntax=5 nchar=10;\nformat datatype=dna gap=-;\nmatrix\n{MATRIX}\n;\nend;\n"
SAMPLE = (
    "#NEXUS\nbegin trees;\ntranslate 1 A, 2 B, 3 C, 4 D, 5 E;\n"
    "tree one [&W 1/2] = [&U] ((1:.1,2:.2):.3,3:.1,(4:1e-2,5:2):1);\n"
    "tree two [&W 1/2] = [&U] ((1:.1,3:.2)0.9:.3,2:.1,(4:1e-2,5:2):1);\nend;\n"
)
PARTITIONS = "#nexus\nbegin sets;\ncharset first = 1-4 5-10\\3;\ncharset rest = 6-10\\3 7-10\\3;\nend;\n"
BLOCK = (
    DATA + "begin mrbayes;\nset autoclose=yes;\ncharset a = 1-5;\ncharset b = 6-.;\npartition p = 2: a, b;\n"
    "set partition=p;\n"
    "lset applyto=(1) nst=6 rates=invgamma ngammacat=4;\nprset applyto=(all) ratepr=variable "
    "brlenspr=unconstrained:exp(10.0);\nunlink shape=(all);\nmcmc ngen=1000;\nend;\n"
)


def fasta() -> str:
    return "".join(f">{name}\n{text}\n" for name, text in SEQUENCES.items())


class TextFile(NamedTuple):
    """A file that people write: its text, and what reads it."""

    text: str
    read: Callable[[Path], Any]

    def write(self, path: Path) -> None:
        """Write the valid file."""
        path.write_text(self.text, encoding="utf-8")


class StoredFile(NamedTuple):
    """A file or folder that bayeskit writes: what writes it, and what reads it and returns its numbers."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


def problem() -> bk.Target:
    target = exact.get("beta_binomial").target()
    target.compile = False
    return target


def sampled(path: Path) -> Any:
    draws = bk.sample(problem(), 2, 20, 10, checkpoint=path, **OFTEN)
    return draws.unconstrained, draws.log_likelihood, draws.sample_stats


def nested(path: Path) -> Any:
    run = sample_nested(problem(), 10, checkpoint=path, **OFTEN)
    return run.log_likelihood, run.num_evaluations


def model(x: torch.Tensor) -> None:
    weight = pyro.param("weight", lambda: torch.ones(2))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z[:, None] * weight, 1.0).to_event(1), obs=x)


def guide(x: torch.Tensor) -> None:
    at = pyro.param("at", lambda: torch.zeros(()))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(at * x[:, 0], 1.0))


def trained(path: Path) -> Any:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    pyro.clear_param_store()
    result = fit(
        model, guide, ELBO(), x, num_epochs=2, batch_size=4, patience=2, validation=x, checkpoint=path, **OFTEN
    )
    return result.losses, result.validation_losses, {name: p.detach() for name, p in pyro.get_param_store().items()}


def searched(path: Path) -> Any:
    found = infer_topologies(ALIGNMENT, num_warmup=12, num_samples=10, num_temperatures=3, checkpoint=path, **OFTEN)
    return found.log_likelihood, found.log_prior, found.beta, [one.topologies.children for one in found.samples]


@cache
def network() -> SubsplitBayesianNetwork:
    every = all_topologies(ALIGNMENT.taxa)[::3]
    return SubsplitBayesianNetwork.fit(SampleFrequencies.from_topologies(every))


def approximated(path: Path | None) -> VariationalPosterior:
    return variational_inference(ALIGNMENT, network(), num_steps=4, checkpoint=path, **OFTEN)


def numbers_of(posterior: VariationalPosterior) -> Any:
    return posterior.parameters, posterior.bounds, posterior.positions, posterior.family.network.logits.detach()


def draws_of(path: Path) -> Any:
    found = bk.Draws.load(path)
    return (
        found.unconstrained,
        found.log_prior,
        found.log_likelihood,
        found.beta,
        found.sample_stats,
        json.dumps(found.settings),
    )


def options_of(path: Path) -> Any:
    found = SubsplitBayesianNetwork.load(path)
    return found.taxa, found.logits.detach(), found.log_likelihoods, found.graph.parts, found.graph.clades


def mixture_of(path: Path) -> Any:
    found = Smoothed.load(path)
    return found.taxa, found.epsilon, found.base.logits.detach(), found.base.graph.parts


def opened_run(path: Path) -> RunFolder:
    return RunFolder(path, {"seed": 1, "method": "search"})


def halves(number: int) -> dict[str, Any]:
    return {"half": torch.full((2,), number / 2, dtype=torch.float64), "of": [number, None, "text"]}


def tasks(path: Path) -> Any:
    return map_tasks(halves, range(2), checkpoint=path, progress=False)


FILES: dict[str, TextFile | StoredFile] = {
    "fasta": TextFile(fasta(), Alignment.from_file),
    "phylip": TextFile(f"5 10\n{MATRIX}\n", Alignment.from_file),
    "nexus": TextFile(DATA, Alignment.from_file),
    "newick": TextFile("((A:0.1,B:2e-1)0.9:.3,'C c':1[note],(D:1,E:1):1);\n", Tree.from_file),
    "tree sample": TextFile(SAMPLE, TreeSample.from_file),
    "partitions": TextFile(PARTITIONS, ALIGNMENT.partitioned),
    "MrBayes block": TextFile(BLOCK, MrBayesBlock.from_file),
    "checkpoint of sample": StoredFile(sampled, sampled),
    "checkpoint of sample_nested": StoredFile(nested, nested),
    "checkpoint of fit": StoredFile(trained, trained),
    "checkpoint of infer_topologies": StoredFile(searched, searched),
    "checkpoint of variational_inference": StoredFile(approximated, lambda path: numbers_of(approximated(path))),
    "Draws": StoredFile(lambda path: bk.sample(problem(), 2, 20, 10, progress=False).save(path), draws_of),
    "SubsplitBayesianNetwork": StoredFile(lambda path: network().save(path), options_of),
    "mixture of distributions over topologies": StoredFile(
        lambda path: Smoothed(network(), 0.1).save(path), mixture_of
    ),
    "VariationalPosterior": StoredFile(
        lambda path: approximated(None).save(path), lambda path: numbers_of(VariationalPosterior.load(path))
    ),
    "TaskFolder": StoredFile(tasks, tasks),
    "run.json": StoredFile(
        lambda path: opened_run(path).finish("a verdict", 3), lambda path: opened_run(path).finished
    ),
}
KINDS: tuple[str, ...] = tuple(FILES)


# Damage to bytes, and to what a file with a right checksum says. Each is a function of a random stream, so that a part
# of the changes of a case can be made alone.

TOKENS = (
    b"(",
    b")",
    b";",
    b"[",
    b"]",
    b"'",
    b"\0",
    b"\xff\xfe",
    b"\n",
    b"{",
    b'"',
    b"999999999999999999999",
    b"nan",
    b"-1",
)


def flip(data: bytearray, chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data) + 1) :]


def delete(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.randint(1, 40)]


def repeat(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = data[at : at + chance.randint(1, 60)] * chance.choice([1, 1, 2, 50])


def insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(
        [chance.randbytes(chance.randint(1, 9)), chance.choice(TOKENS) * chance.choice([1, 2, 3000])]
    )


def swap(data: bytearray, chance: random.Random) -> None:
    one, other = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    size = min(chance.randint(1, 30), other - one)
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


BYTES = (flip, flip, flip, truncate, delete, repeat, insert, swap)


def deep() -> Any:
    nested: Any = 0
    for _ in range(400):
        nested = [nested]
    return nested


VALUES = (None, True, -1, 10**30, 1e308, float("nan"), "text", [], {}, [1, "a"], {"a": 1}, deep())


def change_fact(facts: dict[str, Any], chance: random.Random) -> None:
    """Change, remove or add something at a random place of nested facts."""
    node: Any = facts
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and chance.random() < 0.8:
            node = node[key]
            continue
        action = chance.choice(["value", "value", "value", "remove", "add"])
        if action == "value":
            node[key] = deepcopy(chance.choice(VALUES))
        elif action == "remove":
            del node[key]
        elif isinstance(node, dict):
            node["more"] = deepcopy(chance.choice(VALUES))
        else:
            node.append(deepcopy(chance.choice(VALUES)))
        return


def change_tensor(tensors: dict[str, torch.Tensor], chance: random.Random) -> None:
    """Remove, rename or add a tensor, or give one another shape or type."""
    if not tensors:
        return
    name = chance.choice(sorted(tensors))
    x = tensors[name]
    action = chance.choice(["remove", "rename", "add", "cut", "flat", "more", "type"])
    if action in ("remove", "rename"):
        del tensors[name]
        if action == "rename":
            tensors[f"{name}.more"] = x
    elif action == "add":
        tensors["more"] = torch.zeros(3)
    elif action == "cut" and x.dim():
        tensors[name] = x[: len(x) // 2].clone()
    elif action == "flat" and x.dim() != 1:
        tensors[name] = x.reshape(-1).clone()
    elif action == "more":
        tensors[name] = torch.stack([x, x])
    else:
        other = chance.choice(
            [kind for kind in (torch.float32, torch.int32, torch.bool, torch.uint8) if kind != x.dtype]
        )
        tensors[name] = x.to(other)


class Damage(NamedTuple):
    """Changes to a file, each with a seed of its own."""

    way: str  # "bytes", "facts", "tensors", or "layout": tensors, and what the file says of their shapes
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.way} changed by {list(self.seeds)}"


def planned(kind: str, seed: int) -> Damage:
    """Return the damage of a case."""
    chance = random.Random(f"{kind} {seed}")
    ways = ("bytes",) if isinstance(FILES[kind], TextFile) else ("bytes", "bytes", "facts", "tensors", "layout")
    count = chance.choice([1, 1, 1, 2, 4])
    return Damage(chance.choice(ways), tuple(chance.randrange(10**6) for _ in range(count)))


def record_in(path: Path) -> dict[str, Any]:
    """Return the record of a file of bayeskit."""
    if path.suffix == ".json":
        return dict(json.loads(path.read_bytes()))
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(json.loads(header["__metadata__"]["bayeskit"]))


def inflict(damage: Damage, path: Path) -> bool:
    """Damage a file, or one file of a folder; return whether nobody could take it for another valid file."""
    streams = [random.Random(seed) for seed in damage.seeds]
    if path.is_dir():
        path = streams[0].choice(sorted(path.iterdir()))
    if damage.way == "bytes":
        data = bytearray(path.read_bytes())
        for chance in streams:
            chance.choice(BYTES)(data, chance)
        path.write_bytes(data)
        return True
    record = record_in(path)
    schema = Schema(record["schema"], record["version"])
    if path.suffix == ".json":
        facts = read_facts(path, schema)
        for chance in streams:
            change_fact(facts, chance)
        write_facts(path, facts, schema)
        return False
    facts, tensors = record["facts"], load_file(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    layout = facts.pop("tensors")
    for chance in streams:
        if damage.way == "facts":
            change_fact(facts, chance)
        else:
            change_tensor(tensors, chance)
    save_tensors(path, tensors, facts if damage.way != "tensors" else facts | {"tensors": layout}, schema)
    return damage.way == "tensors"


def expected(kind: str, folder: Path) -> tuple[Path, str]:
    """Return the valid file of a kind, made once in a folder, and the digest of what it holds."""
    place = folder / kind.replace(" ", "-")
    if not place.exists():
        own = folder / f"{place.name}-{os.getpid()}"
        own.mkdir(parents=True)
        FILES[kind].write(own / "valid")
        (own / "digest").write_text(described(kind, own / "valid"))
        try:
            own.rename(place)
        except OSError:  # another process was faster
            shutil.rmtree(own)
    return place / "valid", (place / "digest").read_text()


def described(kind: str, path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = FILES[kind].read(path)
    return "text" if isinstance(FILES[kind], TextFile) else digest(found)


def failure(kind: str, damage: Damage, folder: Path) -> str | None:
    """Return what is wrong with how a damaged file is read, or None."""
    whole, right = expected(kind, folder)
    path = whole.with_name(f"damaged-{os.getpid()}")
    if path.is_dir():
        shutil.rmtree(path)
    shutil.copytree(whole, path) if whole.is_dir() else shutil.copy(whole, path)
    wrong = inflict(damage, path)
    try:
        found = described(kind, path)
    except BayeskitError:
        return None
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {str(error).splitlines()[:1]}"
    return "silent change of a number" if wrong and found != right else None


def run_case(kind: str, seed: int, folder: Path) -> str | None:
    """Damage a file of a kind; return None if that was noticed or changed nothing, else one line on what happened.

    The valid file is made once in ``folder``.
    """
    damage = planned(kind, seed)
    said = failure(kind, damage, folder)
    return None if said is None else f"{kind}, seed {seed}, {damage}: {said}"


def shrink(kind: str, seed: int, folder: Path) -> str:
    """Return the smallest part of the changes of a failed case that fails in the same way, and how."""
    damage = planned(kind, seed)
    said = failure(kind, damage, folder)
    for seeds in [(one,) for one in damage.seeds] if said is not None else []:
        smaller = Damage(damage.way, seeds)
        again = failure(kind, smaller, folder)
        if again is not None and again.split(":")[0] == (said or "").split(":")[0]:
            damage, said = smaller, again
            break
    return f"{kind}, {damage}: {said}"
