"""Simulations for an amortised posterior: latent coordinates and data of a Pyro model, at many sizes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity.combinators import call_of
from bayeskit._logdensity.pyro_density import PyroDensity, parts_of
from bayeskit._logdensity.target import Target
from bayeskit.errors import BayeskitWarning, DataError, DataWarning, ModelError, SettingsError, ShapeError
from bayeskit.inference.amortization._networks import Inputs, Widths

Arguments = tuple[Any, ...] | Callable[[int], tuple[Any, ...]]
"""Arguments of the model, or a function of the size that returns them."""

Encoding = Literal["set", "attention", "sequence", "vector"]
_FEW = 16  # simulations that tell models apart
_MOST_NOT_FINITE = 0.5


class SimulatedBatch(NamedTuple):
    """Latent coordinates and data of a batch: global ``(B, g)``, local ``(B, n, l)``, and the data."""

    top: Tensor
    local: Tensor
    rows: Tensor
    shared: Tensor

    @property
    def inputs(self) -> Inputs:
        """The data."""
        return Inputs(self.rows, self.shared)


class SizeStructure(NamedTuple):
    """Which latent sites and which data of a model grow with its size.

    ``sites`` and ``data`` say so by name: True for a site or a tensor with one row for each observation. ``constants``
    are the tensors among the arguments that were the same in all simulations, ``plain`` the numbers and words.
    """

    sites: dict[str, bool]
    data: dict[str, bool]
    constants: dict[str, Tensor]
    plain: dict[str, Any]

    @classmethod
    def of(cls, small: Target, large: Target, sizes: tuple[int, int] | None) -> SizeStructure:
        """Compare a model with itself at another size."""

        def grows(name: str, one: torch.Size, other: torch.Size) -> bool:
            if sizes is None:
                return False
            if one[:1] == sizes[:1] and other[:1] == sizes[1:] and one[1:] == other[1:]:
                return True
            if one != other:
                raise ShapeError(
                    f"{name} has shape {tuple(one)} at size {sizes[0]} and {tuple(other)} at size {sizes[1]}; only its "
                    "first dimension may grow with the size, and must be equal to it"
                )
            return False

        in_plates = {name: plates[:1] != (None,) for name, plates in small.dimensions().items()}
        if [site.name for site in small.sites] != [site.name for site in large.sites]:
            raise ModelError("the latent sites of the model depend on its size; they must be the same at all sizes")
        # Where there is one size only, a site of this length may be a vector; one in a plate is not.
        sites = {
            a.name: grows(f"site {a.name!r}", a.unconstrained_shape, b.unconstrained_shape)
            and (sizes is None or sizes[0] != sizes[1] or in_plates[a.name])
            for a, b in zip(small.sites, large.sites, strict=True)
        }
        seen, others = small.named_data()
        seen_large, others_large = large.named_data()
        data = {name: grows(f"site {name!r}", value.shape, seen_large[name].shape) for name, value in seen.items()}
        constants = {}
        for name, value in others.items():
            if grows(f"argument {name!r}", value.shape, others_large[name].shape):
                data[name] = True
            elif torch.equal(value, others_large[name]):
                constants[name] = value
            else:
                data[name] = False
        return cls(sites, data, constants, _plain_constants(small, large, sizes))

    def layout(self, target: Target, size: int) -> Widths:
        """Return the numbers of coordinates and of columns."""
        top = sum(site.stop - site.start for site in target.sites if not self.sites[site.name])
        rows, shared = self.numbers(_joined(target.named_data()))
        return Widths(top, (target.dim - top) // size, rows.shape[-1], shared.shape[-1])

    def split(self, target: Target, u: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return global ``(B, g)`` and local coordinates ``(B, n, l)`` of vectors ``(B, d)``."""
        pieces = {site.name: u[:, site.start : site.stop] for site in target.sites}
        top = [piece for name, piece in pieces.items() if not self.sites[name]]
        local = [piece.unflatten(-1, (size, -1)) for name, piece in pieces.items() if self.sites[name]]
        empty = u.new_zeros(len(u), 0)
        return (
            torch.cat(top, -1) if top else empty,
            torch.cat(local, -1) if local else empty.unsqueeze(1).expand(-1, size, -1),
        )

    def join(self, target: Target, top: Tensor, local: Tensor) -> Tensor:
        """Return vectors ``(B, d)`` from global and local coordinates."""
        columns, first, inner = [], 0, 0
        size = local.shape[1] if local.dim() > 2 else 1
        for site in target.sites:
            width = site.stop - site.start
            if self.sites[site.name]:
                columns.append(local[:, :, inner : inner + width // size].flatten(1))
                inner += width // size
            else:
                columns.append(top[:, first : first + width])
                first += width
        return torch.cat(columns, -1)

    def numbers(self, data: Mapping[str, Tensor], batch: int | None = None) -> Inputs:
        """Return data by name, each ``(B, *shape)`` or of one data set, as rows ``(B, n, k)`` and shared numbers."""
        count = 1 if batch is None else batch

        def lifted(name: str) -> Tensor:
            value = data[name].double()
            return value.unsqueeze(0) if batch is None else value

        rows = [(x := lifted(name)).reshape(*x.shape[:2], -1) for name, grows in self.data.items() if grows]
        shared = [lifted(name).reshape(count, -1) for name, grows in self.data.items() if not grows]
        nothing = (rows or shared)[0].new_zeros(count, 0)
        return Inputs(
            torch.cat(rows, -1) if rows else nothing.unsqueeze(1),
            torch.cat(shared, -1) if shared else nothing,
        )

    def inputs(self, target: Target) -> tuple[Inputs, int]:
        """Return the data of a target, and their size; DataError if they are not of this structure."""
        data = _joined(target.named_data())
        for name, value in self.constants.items():
            if name not in data or data[name].shape != value.shape or not torch.equal(data[name], value):
                raise DataError(
                    f"argument {name!r} was the same in all simulations and has another value or shape here; let args "
                    "be a function of the size, lambda size: (...), that returns many values of it"
                )
        found_plain = _plain_arguments(target)
        for name, value in self.plain.items():
            if name not in found_plain or found_plain[name] != value:
                raise DataError(
                    f"{name} was {value!r} in all simulations and is {found_plain.get(name)!r} here; amortize the "
                    "model with this value, or let args be a function of the size that returns tensors of many values"
                )
        if missing := [name for name in self.data if name not in data]:
            raise DataError(f"the data lack {', '.join(map(repr, missing))}, of which the network has learnt")
        lengths = {name: tuple(data[name].shape[:1]) for name, grows in self.data.items() if grows}
        if len(set(lengths.values())) > 1:
            raise ShapeError(f"the data differ in their numbers of rows: {lengths}")
        try:
            found = self.numbers(data)
        except RuntimeError as error:
            raise ShapeError(f"the data do not have the shapes of the simulations: {error}") from error
        return found, found.rows.shape[1]


def _plain_arguments(target: Target) -> dict[str, Any]:
    """Return the numbers and words among the arguments of a target's model."""
    _, args, kwargs = call_of(target)
    given = {f"argument {i + 1}": value for i, value in enumerate(args)} | {
        f"argument {k!r}": v for k, v in kwargs.items()
    }
    return {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}


def _plain_constants(small: Target, large: Target, sizes: tuple[int, int] | None) -> dict[str, Any]:
    """Return the plain arguments that do not depend on the size; SettingsError if one does and is not the size."""
    first, second = _plain_arguments(small), _plain_arguments(large)
    constants = {}
    for name, value in first.items():
        if name in second and second[name] == value and (sizes is None or sizes[0] != sizes[1] or value != sizes[0]):
            constants[name] = value
        elif sizes is None or (value, second.get(name)) != sizes:
            raise SettingsError(
                f"{name} is {value!r} in one simulation and {second.get(name)!r} in another; the network reads "
                "tensors: let args return torch.tensor(...)"
            )
    return constants


def _refuse_masks(target: Target, generator: torch.Generator) -> None:
    """Raise ``ModelError`` if data are masked or scaled, so that simulations hold what the likelihood leaves out."""
    density = target.density
    for part in parts_of(density, generator) if isinstance(density, PyroDensity) else ():
        if part.masked or bool((part.scale != 1).any()):
            raise ModelError(
                f"site {part.name!r} is {'masked' if part.masked else 'scaled'}, and the network would learn from "
                "numbers that the likelihood leaves out; leave them out of the data, with sizes=(smallest, largest)"
            )


def _joined(named: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    observed, others = named
    return others | observed


class Simulator:
    """A Pyro model that is drawn from at random sizes."""

    def __init__(
        self, model: Callable[..., Any], args: Arguments, sizes: tuple[int, int] | None, encoding: Encoding, seed: int
    ) -> None:
        self.model, self.args, self.sizes, self.encoding = model, args, sizes, encoding
        self.num_drawn = self.num_dropped = 0
        self._targets: dict[int, Target] = {}
        self.varies, self._has_target = True, False
        generator = new_generator(seed, stream="structure of simulations")
        self._length = self._full_length()
        if sizes is None:
            size = self._length if encoding != "vector" else 1
            probes = (self.target(0, generator), self.target(0, generator))
            around = (size, size) if encoding != "vector" else None
        else:
            around = sizes
            probes = (self.target(around[0], generator), self.target(around[1], generator))
        self.structure = SizeStructure.of(*probes, around)
        if encoding != "vector" and not any(self.structure.data.values()):
            raise SettingsError(
                f'the encoding "{encoding}" needs data with a row for each observation, and no observed site has one; '
                'leave sizes out, with encoding="vector"'
            )
        _refuse_masks(probes[0], generator)
        self.varies = any(name not in probes[0].named_data()[0] for name in self.structure.data)
        self.largest = probes[1]
        self.layout = self.structure.layout(self.largest, 1 if around is None else around[1])

    @classmethod
    def at(cls, structure: SizeStructure) -> Simulator:
        """Return what draws from given targets only."""
        simulator = cls.__new__(cls)
        simulator.structure, simulator.num_drawn, simulator.num_dropped = structure, 0, 0
        return simulator

    def _full_length(self) -> int:
        """Return the number of rows of the arguments, 0 for a function of the size."""
        if callable(self.args):
            return 0
        observed, _ = Target.from_pyro(self.model, *self.args, compile=False).named_data()
        lengths = {len(value) for value in observed.values() if value.dim()}
        if self.sizes is not None and len(lengths) != 1:
            raise ShapeError(
                f"observed sites have lengths {sorted(lengths)}, so that rows cannot be left out of the arguments; let "
                "args be a function of the size, lambda size: (...)"
            )
        length = max(lengths, default=0)
        if self.sizes is not None and length < self.sizes[1]:
            raise SettingsError(
                f"the arguments have {length} rows and the largest size is {self.sizes[1]}; give arguments of at least "
                "this length, or let args be a function of the size, lambda size: (...)"
            )
        return length

    def arguments(self, size: int, generator: torch.Generator) -> tuple[Any, ...]:
        """Return arguments of the model for a size: those of a function, or random rows of the given ones."""
        if callable(self.args):
            with global_stream(generator):
                given = self.args(size)
            if not isinstance(given, tuple):
                raise SettingsError(f"args({size}) returned a {type(given).__name__}; return a tuple such as (data,)")
            return given
        if self.sizes is None:
            return self.args
        kept = torch.randperm(self._length, generator=generator)[:size]
        return tuple(
            x[kept.to(x.device)] if isinstance(x, Tensor) and x.dim() and len(x) == self._length else x
            for x in self.args
        )

    def target(self, size: int, generator: torch.Generator) -> Target:
        """Return the model at a size; made once where its arguments are nothing but data."""
        if size in self._targets:
            return self._targets[size]
        with warnings.catch_warnings():
            if self._has_target:
                warnings.simplefilter("ignore", BayeskitWarning)  # the first target has warned
            self._has_target = True
            target = Target.from_pyro(self.model, *self.arguments(size, generator), compile=False)
        if not self.varies:
            self._targets[size] = target
        return target

    def size(self, generator: torch.Generator) -> int:
        """Draw a size, uniform on the scale of its logarithm."""
        if self.sizes is None:
            return 0
        low, high = self.sizes
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        return min(high, math.floor(math.exp(math.log(low) + uniform * (math.log(high + 1) - math.log(low)))))

    def batch(self, count: int, generator: torch.Generator, size: int | None = None) -> SimulatedBatch:
        """Draw ``count`` data sets of one size with their latent coordinates; those that are not finite are dropped."""
        return self.batch_of(self.target(self.size(generator) if size is None else size, generator), count, generator)

    def batch_of(self, target: Target, count: int, generator: torch.Generator) -> SimulatedBatch:
        """Draw from a given target."""
        u = target.sample_prior(count, seed=generator)
        observed, others = target.named_data()
        drawn = target.predictive(u, seed=generator)
        data = {name: value.expand(count, *value.shape) for name, value in others.items()}
        inputs = self.structure.numbers(data | {name: drawn[name] for name in observed}, count)
        top, local = self.structure.split(target, u.double(), inputs.rows.shape[1])
        parts = [top, local, *inputs]
        finite = torch.stack([part.reshape(count, -1).isfinite().all(-1) for part in parts]).all(0)
        self.num_drawn += count
        self.num_dropped += count - int(finite.sum())
        if float(finite.double().mean()) < 1 - _MOST_NOT_FINITE:
            raise ModelError(
                f"{count - int(finite.sum())} of {count} simulated data sets hold NaN or infinite numbers; narrow the "
                "priors, or mend the simulator"
            )
        return SimulatedBatch(*(part[finite] for part in parts))

    def report(self) -> None:
        """Warn of simulations that were dropped."""
        if self.num_dropped:
            warn_user(
                f"{self.num_dropped} of {self.num_drawn} simulated data sets held NaN or infinite numbers and were "
                "left out, so that the posterior is the one given that data are finite; narrow the priors",
                DataWarning,
            )


class Simulations:
    """Batches of simulations, drawn anew in each epoch from torch's global stream."""

    def __init__(self, simulator: Simulator, batch_size: int, num_batches: int) -> None:
        self.simulator, self.batch_size, self.num_batches = simulator, batch_size, num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(self.num_batches):
            generator = new_generator(int(torch.randint(2**62, ())))
            yield tuple(self.simulator.batch(self.batch_size, generator))

    def fingerprint(self) -> dict[str, float]:
        """Return sums over some simulations, which differ for another model."""
        return _sums(self.simulator.batch(_FEW, new_generator(0, stream="fingerprint of simulations")))


def _sums(batch: SimulatedBatch) -> dict[str, float]:
    """Return a weighted sum of each part of a batch."""
    weights = (torch.linspace(1.0, 2.0, x.numel(), dtype=torch.float64) for x in batch)
    return {
        f"the sum of {name} over simulations": float(x.double().cpu().flatten() @ weight)
        for (name, x), weight in zip(batch._asdict().items(), weights, strict=True)
    }


class KeptSimulations:
    """Batches of simulations that are drawn once, in another order in each epoch."""

    def __init__(self, batches: Sequence[SimulatedBatch]) -> None:
        self.batches, self._batch_size = batches, max(len(batch.top) for batch in batches)
        sizes = {batch.rows.shape[1] for batch in batches}
        self._whole = [torch.cat(parts) for parts in zip(*batches, strict=True)] if len(sizes) == 1 else None

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if self._whole is None:
            for i in torch.randperm(len(self.batches)).tolist():
                yield tuple(self.batches[i])
        else:  # data sets of one size are combined anew
            order = torch.randperm(len(self._whole[0])).to(self._whole[0].device)
            for rows in order.split(self._batch_size):
                yield tuple(part[rows] for part in self._whole)

    def fingerprint(self) -> dict[str, float]:
        """Return sums over some simulations, which differ for another model."""
        return _sums(self.batches[0])
