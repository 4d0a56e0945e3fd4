"""Programs of Stan as densities."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluation, tempered
from bayeskit._core.inputs import warn_user
from bayeskit._core.libraries import FLAGS, load_library
from bayeskit._logdensity.foreign_density import ForeignDensity
from bayeskit._logdensity.pyro_density import Site
from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError

_HEADER = Path(__file__).with_name("stan_model.hpp")
_FLAGS = (*FLAGS, "-std=c++17", "-w", "-DSTAN_THREADS", "-D_REENTRANT", "-DBOOST_DISABLE_ASSERTS")
#: Generated quantity with the log likelihood of each observation, as Stan's users call it.
LOG_LIKELIHOOD = "log_lik"
_FILE = "program.stan"
#: Points of a call that are all rejected before a warning says so.
_SEVERAL = 4
_NO_LOG_LIKELIHOOD = (
    f"the program has no generated quantity {LOG_LIKELIHOOD!r}; let it give the log likelihood of each observation"
)


class StanDensity(ForeignDensity):
    """A Stan program with its data, translated by Stan's compiler and compiled with its headers.

    With a program or data of the prior alone, prior and likelihood are known apart.
    """

    package, draws_prior = "Stan", False

    def __init__(self, program: str | Path, data: Any, prior: Any = None) -> None:
        self._program, self._data = _text_of(program, ".stan"), _json_of(data)
        self._folder = Path(program).parent if _is_file(program, ".stan") else None
        self._prior_program, self._prior_data = self._program, self._data
        if isinstance(prior, Mapping):
            self._prior_data = json.dumps(json.loads(self._data) | json.loads(_json_of(prior)))
        elif prior is not None:
            self._prior_program = _text_of(prior, ".stan")
        #: Whether prior and likelihood are known apart.
        self.is_split = prior is not None
        model = self._model
        names = model.names(False, False)
        sites, start = [], 0
        unconstrained = _shapes(model.names_of_vector)
        for name, shape in _shapes(names).items():
            part = unconstrained.get(name, torch.Size((0,)))
            # Within a matrix Stan goes by columns, so that an element of the vector has no name of an element of it.
            part = torch.Size((part.numel(),)) if len(shape) > 1 else part
            sites.append(Site(name, shape, part, start, start + part.numel()))
            start += part.numel()
        if start != model.dim or not sites:
            raise ModelError("the parameters of the program have no unconstrained vector; give it continuous ones")
        if self.is_split and self._prior.names(False, False) != names:
            raise ModelError("the program of the prior has other parameters; declare the same ones in the same order")
        constant = {name: _tensor(x) for name, x in json.loads(self._data).items() if not isinstance(x, str)}
        more = _shapes(model.names(True, True))
        dimensions = {name: (None,) * len(shape) for name, shape in more.items()}
        dimensions |= {name: (None,) * x.dim() for name, x in constant.items()}
        super().__init__(tuple(sites), {}, constant, dimensions, {})
        # Edits of a program show in its text, not always in its density at a few points.
        texts = "\0".join((self._program, self._prior_program, self._data, self._prior_data))
        self.data.append(torch.frombuffer(bytearray(hashlib.sha256(texts.encode()).digest()), dtype=torch.uint8))
        self.no_pointwise = "" if LOG_LIKELIHOOD in more else _NO_LOG_LIKELIHOOD

    @property
    def has_likelihood(self) -> bool:
        """A program does not say what its data are."""
        return True

    @cached_property
    def _model(self) -> _StanModel:
        return _StanModel(self._program, self._data, self._folder)

    @cached_property
    def _prior(self) -> _StanModel:
        return _StanModel(self._prior_program, self._prior_data, self._folder)

    @cached_property
    def functions(self) -> _StanFunctions:
        """The density, compiled with Stan's headers."""
        return _StanFunctions(self._model, self._prior if self.is_split else None)

    def compiled(self, num_vectors: int) -> None:
        """Return None: values alone cost a fraction of those with the gradient."""

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the parameters, ``(n, *shape)``, and of transformed ones."""
        return self._model.constrained(u, deterministic, False)

    def vectors(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of values ``(n, *shape)``; DataError for values outside the support."""
        parts = [_as_stan(values[site.name].to(torch.float64), len(site.shape)) for site in self.sites]
        return self._model.unconstrained(torch.cat(parts, -1))

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained|, ``(n,)``."""
        return self._model.log_jacobian(u)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the generated quantity ``log_lik``, ``(n, *shape)``."""
        if self.no_pointwise:
            raise ModelError(self.no_pointwise)
        return {LOG_LIKELIHOOD: self._model.constrained(u, True, True)[LOG_LIKELIHOOD]}

    def prior_draws(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Raise ``SettingsError``: a program gives densities, and no draws."""
        raise SettingsError("a Stan program cannot draw from its prior; write the model for Pyro, NumPyro or PyMC")

    def predictive(
        self,
        u: Tensor,
        generator: torch.Generator,
        redraw: Collection[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Return the generated quantities but ``log_lik``, ``(n, *shape)``."""
        if redraw or args:
            raise SettingsError("a Stan program draws its generated quantities only, for data given by name")
        model = self._model if not kwargs else _StanModel(self._program, _with(self._data, kwargs), self._folder)
        known = _shapes(model.names(True, False))
        seed = int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))
        found = model.constrained(u, True, True, seed)
        return {name: x for name, x in found.items() if name not in known and name != LOG_LIKELIHOOD}


class _StanFunctions:
    """The density of a program, and that of its prior where it is known."""

    def __init__(self, both: _StanModel, prior: _StanModel | None) -> None:
        self._both, self._prior = both, prior

    def weighted(self, u: Tensor, prior: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log prior and log likelihood ``(n,)``, and the gradient of their sum with weights ``(n,)`` each."""
        both, slope = self._both.evaluate(u)
        if self._prior is None:
            return torch.zeros_like(both), both, likelihood.unsqueeze(-1) * slope
        log_prior, of_prior = self._prior.evaluate(u)
        log_likelihood = torch.where(both == -math.inf, both, both - log_prior)
        gradient = prior.unsqueeze(-1) * of_prior + likelihood.unsqueeze(-1) * (slope - of_prior)
        return log_prior, log_likelihood, gradient

    def values(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood of rows, ``(n, d) -> (n,)``."""
        both, _ = self._both.evaluate(u, False)
        if self._prior is None:
            return torch.zeros_like(both), both
        log_prior, _ = self._prior.evaluate(u, False)
        return log_prior, torch.where(both == -math.inf, both, both - log_prior)

    def __call__(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate rows ``(n, d)`` at inverse temperatures ``(n,)``."""
        log_prior, log_likelihood, gradient = self.weighted(u.detach(), torch.ones_like(beta), beta)
        return Evaluation(log_prior, log_likelihood, tempered(log_prior, log_likelihood, beta), gradient)


class _StanModel:
    """A compiled program with its data."""

    _has_warned = False

    def __init__(self, program: str, data: str, folder: Path | None) -> None:
        self._library = _compiled(program, folder)
        self._pointer = ctypes.c_void_p()
        if self._library.make(data.encode(), ctypes.byref(self._pointer)):
            raise DataError(f"the Stan program refuses its data: {self._said()}")
        self.dim = int(self._library.dimension(self._pointer))
        self.names_of_vector = self._lines(1, 0, 0)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._library.discard(self._pointer)

    def _said(self) -> str:
        return str(self._library.last_text().decode(errors="replace")).strip().split("\n")[0]

    def _lines(self, unconstrained: int, transformed: int, generated: int) -> list[str]:
        text = self._library.names(self._pointer, unconstrained, transformed, generated)
        return str(text.decode()).split()

    def names(self, transformed: bool, generated: bool) -> list[str]:
        """Return the names of the elements of values, such as ``beta.1``."""
        return self._lines(0, transformed, generated)

    def evaluate(self, u: Tensor, with_gradient: bool = True) -> tuple[Tensor, Tensor]:
        """Return log densities ``(n,)``, and gradients ``(n, d)`` or none, ``(0, d)``."""
        u = u.detach().contiguous()
        value, gradient = u.new_empty(len(u)), u.new_empty(len(u) if with_gradient else 0, u.shape[-1])
        slopes = _pointers(gradient)[0] if with_gradient else None
        rejected = self._library.evaluate(self._pointer, *_pointers(u), len(u), *_pointers(value), slopes)
        if rejected < 0:
            raise MemoryError("Stan had too little memory")
        # Stan rejects points far away, where numbers overflow, as a matter of course; not all points of a call.
        if rejected == len(u) >= _SEVERAL and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"the Stan program rejects {rejected} of {len(u)} points, which count as points of density zero: "
                f"{self._said()}",
                AccuracyWarning,
            )
        return value, gradient

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log Jacobians ``(n,)``."""
        u = u.detach().contiguous()
        value = u.new_empty(len(u))
        self._library.log_jacobian(self._pointer, *_pointers(u), len(u), *_pointers(value))
        return value

    def constrained(self, u: Tensor, transformed: bool, generated: bool, seed: int = 0) -> dict[str, Tensor]:
        """Return values, ``(n, *shape)`` by name."""
        u, names = u.detach().contiguous(), self.names(transformed, generated)
        found = u.new_empty(len(u), len(names))
        arguments = (len(u), int(transformed), int(generated), seed, len(names))
        if self._library.constrain(self._pointer, *_pointers(u), *arguments, *_pointers(found)):
            raise MemoryError("Stan had too little memory")
        values, start = {}, 0
        for name, shape in _shapes(names).items():
            part = found[:, start : start + shape.numel()].reshape(len(u), *reversed(shape))
            values[name] = part.permute(0, *range(len(shape), 0, -1)).contiguous()
            start += shape.numel()
        return values

    def unconstrained(self, values: Tensor) -> Tensor:
        """Return the vectors ``(n, d)`` of values in Stan's order, ``(n, size)``."""
        values = values.contiguous()
        u = values.new_empty(len(values), self.dim)
        if self._library.unconstrain(self._pointer, *_pointers(values), *values.shape, *_pointers(u)):
            raise DataError(f"values lie outside of the support: {self._said()}")
        return u


def _pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(x.data_ptr()) for x in tensors)


def _as_stan(x: Tensor, event_dim: int) -> Tensor:
    """Return values ``(n, *shape)`` in the order of Stan, in which the first index changes fastest, ``(n, size)``."""
    return x.permute(0, *range(event_dim, 0, -1)).reshape(len(x), -1)


def _shapes(names: Sequence[str]) -> dict[str, torch.Size]:
    """Return the shape of each variable, by the names of its elements, such as ``beta.2.3``; the last one counts."""
    found: dict[str, torch.Size] = {}
    counts = Counter[str]()
    for name in names:
        stem, *places = re.split(r"[.:]", name)
        counts[stem] += 1
        # Parts of tuples and of complex numbers are in a row.
        plain = ":" not in name and all(place.isdigit() for place in places)
        found[stem] = torch.Size(map(int, places)) if plain else torch.Size((counts[stem],))
    return found


# Programs and data.


def _is_file(program: str | Path, suffix: str) -> bool:
    return isinstance(program, Path) or program.strip().endswith(suffix)


def _text_of(program: str | Path, suffix: str) -> str:
    """Return the text of a program, or of the file of this name."""
    if not isinstance(program, str | Path):
        raise SettingsError(
            f"a Stan program is a text or a path, not a {type(program).__name__}; pass the program that a model of "
            "BridgeStan, CmdStanPy or PyStan was compiled from"
        )
    if not _is_file(program, suffix):
        return str(program)
    try:
        return Path(program).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{program} cannot be read: {error.strerror}") from error


def _json_of(data: Any) -> str:
    """Return data as the JSON that Stan reads; DataError for missing numbers."""
    if isinstance(data, str | Path):
        data = json.loads(_text_of(Path(data), ".json"))
    if not isinstance(data, Mapping):
        raise DataError(f"data of a Stan program are a mapping by name, or a JSON file, not a {type(data).__name__}")
    plain = {str(name): _plain(str(name), x) for name, x in data.items()}
    return json.dumps(plain)


def _plain(name: str, x: Any) -> Any:
    if np.ma.is_masked(x):
        raise DataError(f"data {name!r} is a masked array; Stan has no missing data: leave them out")
    array = x.numpy(force=True) if isinstance(x, Tensor) else np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise DataError(f"data {name!r} is of type {array.dtype}, not numbers")
    if array.dtype.kind == "f" and bool(np.isnan(array).any()):
        raise DataError(
            f"data {name!r} holds {int(np.isnan(array).sum())} NaN; Stan has no missing data: leave them out"
        )
    return (array.astype(np.int64) if array.dtype.kind == "b" else array).tolist()


def _with(data: str, changes: Mapping[str, Any]) -> str:
    given = json.loads(data)
    for name in changes:
        if name not in given:
            raise DataError(f"the program has no data {name!r}; it has {', '.join(map(repr, given))}")
    return json.dumps(given | json.loads(_json_of(changes)))


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.asarray(x))


def _compiled(program: str, folder: Path | None) -> ctypes.CDLL:
    """Return the library of a program; ModelError if Stan or the C++ compiler refuses it."""
    try:
        home = files("httpstan")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Stan's compiler and headers are missing; pip install 'bayeskit[stan]' brings them", name="httpstan"
        ) from error
    with as_file(home / "stanc") as stanc, as_file(home / "include") as include, as_file(home / "lib") as libraries:
        source = _translated(str(stanc), program, folder)
        sources = {"model.cpp": f'{source}\n#include "model.hpp"\n', "model.hpp": _HEADER.read_text(encoding="utf-8")}
        linked = [f"-L{libraries}", "-ltbb", f"-Wl,-rpath,{libraries}"]
        if re.search(r"\b(ode|dae|algebra|solve)_", source):
            linked = [*(str(x) for x in sorted(libraries.glob("libsundials_*.a"))), *linked]
        try:
            library = load_library("stan", sources, (*_FLAGS, f"-I{include}"), linked)
        except subprocess.CalledProcessError as error:
            raise ModelError(f"the C++ compiler fails with the Stan program: {str(error.stderr)[:300]}") from error
    for name in ("last_text", "names"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("dimension", "evaluate"):
        getattr(library, name).restype = ctypes.c_int64
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    library.dimension.argtypes = library.discard.argtypes = [pointer]
    library.evaluate.argtypes = [pointer, pointer, whole, pointer, pointer]
    library.log_jacobian.argtypes = [pointer, pointer, whole, pointer]
    library.constrain.argtypes = [pointer, pointer, whole, ctypes.c_int, ctypes.c_int, ctypes.c_uint, whole, pointer]
    library.unconstrain.argtypes = [pointer, pointer, whole, whole, pointer]
    library.names.argtypes = [pointer, *[ctypes.c_int] * 3]
    return library


def _translated(stanc: str, program: str, includes: Path | None) -> str:
    """Return the C++ of a program, whose includes are in a folder; ModelError with Stan's words if it is none."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_text(program, encoding="utf-8")
        # Stan's messages, and the C++, name the file as it is given.
        found = [] if includes is None else [f"--include-paths={includes.resolve()}"]
        command = [stanc, "--name", "model", "--print-cpp", *found, _FILE]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError("Stan refuses the program: " + "\n".join(lines[:12]))
    return done.stdout
