"""Training of a model and guide by stochastic optimization of an objective."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import pyro
import torch
import torch.distributed as dist
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.nn import PyroModule
from pyro.optim import PyroOptim
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree

from bayeskit.core.arguments import arrays_as_tensors
from bayeskit.core.compatibility import as_inference_data, to_datasets
from bayeskit.core.compiler_cache import compiler_cache
from bayeskit.core.folders import Schema, save_or_warn
from bayeskit.core.functions_of_users import lines_named
from bayeskit.core.inputs import as_numbers, real_number, warn_user, whole_number
from bayeskit.core.plots import BLUE, ORANGE, SKY
from bayeskit.core.process_state import process_state
from bayeskit.core.progress import progress_bar, watching
from bayeskit.core.randomness import global_stream, new_generator, validation_kept
from bayeskit.core.storage import loaded_tensors, save_tensors
from bayeskit.distributed import Ranks
from bayeskit.errors import (
    BayeskitError,
    BayeskitWarning,
    CheckpointError,
    CompilationWarning,
    DataError,
    GuideError,
    LossError,
    ModelError,
    SettingsError,
    ShapeError,
)
from bayeskit.inference.gradients.relaxed import Annealed
from bayeskit.inference.objectives.drawing import GRADIENT, plate_nesting, rows_of_minibatch
from bayeskit.inference.objectives.objective import Objective, not_finite_as_loss_error
from bayeskit.inference.samplers.driver import CHECKPOINT_SECONDS, Control, nothing_done, say_early
from bayeskit.logdensity.pyro_distributions import MendedDraws
from bayeskit.logdensity.pyro_runs import check_plates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Batch",
    "Batches",
    "Columns",
    "Ending",
    "Fit",
    "Given",
    "History",
    "Nothing",
    "Precision",
    "TrainingOutcome",
    "TrainingPlan",
    "adam",
    "as_batches",
    "compiled",
    "fit",
    "in_mixed_precision",
    "named_modules",
    "named_modules_in_settings",
    "networks",
    "setting_as_json",
    "train",
]


# The result of training.

Ending = Literal["finished", "early stopping", "time budget", "interrupted"]
_DRAWS = "_draws"


@contextmanager
def _in_store(state: Any) -> Iterator[None]:
    """Let parameters be read from ``state`` and stored in it; other threads wait."""
    with process_state(), pyro.get_param_store().scope(state):
        yield


class _InStore:
    """A function with ``pyro.param`` statements and its own parameter values, outside Pyro's global store."""

    def __init__(self, function: Callable[..., Any], state: Any) -> None:
        self.function, self.state = function, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on its own parameters."""
        with _in_store(self.state):
            return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"InStore({getattr(self.function, '__name__', self.function)}: {', '.join(self.state['params'])})"


@dataclass(frozen=True)
class Fit:
    """A trained model and guide with the loss history.

    Attributes
    ----------
    model, guide : callable
        The trained functions. Modules are the objects passed in. A function with ``pyro.param`` statements is returned
        with its parameter values attached, so it does not need Pyro's global store.
    parameters : dict of Tensor
        Unconstrained parameters by name.
    values : dict of Tensor
        Constrained parameters by name.
    losses : Tensor
        Loss per observation at each step, ``(steps,)``.
    epoch_losses : Tensor
        Mean loss over the steps of each epoch, ``(epochs,)``.
    validation_losses : Tensor
        Validation loss per observation after each epoch, ``(epochs,)``, or ``(0,)`` without validation data.
    epoch_ends : tuple of int
        Number of steps taken by the end of each epoch.
    ending : str
        ``"finished"``, ``"early stopping"``, ``"time budget"`` or ``"interrupted"``.
    best_epoch : int or None
        Zero-based epoch whose parameters were restored at the end.
    seconds : float
    settings : dict

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.inference.training import fit
    >>> result = fit(
    ...     lambda: pyro.sample("z", dist.Normal(0.0, 1.0)),
    ...     lambda: pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor(1.0)), 1.0)),
    ...     ELBO(), None, num_steps=5)
    >>> result.ending, result.num_steps, result.sample_posterior(3)["z"].shape
    ('finished', 5, torch.Size([3]))
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    parameters: dict[str, Tensor] = field(repr=False)
    losses: Tensor = field(repr=False)
    epoch_losses: Tensor = field(repr=False)
    validation_losses: Tensor = field(repr=False)
    epoch_ends: tuple[int, ...] = field(repr=False)
    ending: Ending
    best_epoch: int | None
    seconds: float
    settings: dict[str, Any] = field(repr=False)
    values: dict[str, Tensor] = field(repr=False, default_factory=dict)

    def __repr__(self) -> str:
        rows = [f"{self.num_epochs} epochs, {self.num_steps} steps"]
        if self.num_epochs:
            rows.append(f"loss {float(self.epoch_losses[0]):.4g} -> {float(self.epoch_losses[-1]):.4g}")
        if len(self.validation_losses):
            rows.append(f"validation {float(self.validation_losses.min()):.4g} at best")
        return f"Fit({', '.join(rows)}, ending={self.ending!r}, {self.seconds:.1f} s)"

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return len(self.losses)

    @property
    def num_epochs(self) -> int:
        """Number of epochs completed."""
        return len(self.epoch_losses)

    def sample_posterior(self, num_draws: int, *args: Any, seed: int = 0, **kwargs: Any) -> dict[str, Tensor]:
        """Draw from the guide.

        Parameters
        ----------
        num_draws : int
        *args, **kwargs
            Arguments of the guide, such as the observations whose latent variables are drawn.
        seed : int, default 0

        Returns
        -------
        dict of Tensor
            Draws by site, each ``(num_draws, *shape)``.

        Raises
        ------
        SettingsError
            If ``num_draws`` is not at least 1.
        """
        num_draws = whole_number("num_draws", num_draws, least=1)
        generator = new_generator(seed, stream="guide draws")
        # Module parameters stay out of the global store.
        with _in_store({"params": {}, "constraints": {}}), global_stream(generator), torch.no_grad(), poutine.block():
            single = _latent(self.guide, args, kwargs)
            nesting = plate_nesting(self.guide, self.guide, args, kwargs)
            many = _latent(pyro.plate(_DRAWS, num_draws, dim=-nesting - 1)(self.guide), args, kwargs)
            return {name: many[name].reshape(num_draws, *value.shape) for name, value in single.items()}

    def to_arviz(self, draws: dict[str, Tensor] | None = None) -> Any:
        """Return the loss history for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Parameters
        ----------
        draws : dict of Tensor, optional
            Draws from :meth:`sample_posterior`, stored as group ``posterior`` with one chain.

        Returns
        -------
        InferenceData or DataTree
            Group ``optimization`` holds ``loss`` over ``step``, ``epoch_loss`` over ``epoch`` and, with validation
            data, ``validation_loss`` over ``epoch``.
        """
        import xarray as xr

        history = {"loss": ("step", self.losses.numpy()), "epoch_loss": ("epoch", self.epoch_losses.numpy())}
        if len(self.validation_losses):
            history["validation_loss"] = ("epoch", self.validation_losses.numpy())
        facts: dict[str, Any] = {"seconds": self.seconds, "ending": self.ending}
        facts |= {name: value for name, value in self.settings.items() if isinstance(value, (str, int, float))}
        library = {"inference_library": "bayeskit", "inference_library_version": version("bayeskit")}
        coordinates = {"step": range(self.num_steps), "epoch": range(self.num_epochs)}
        datasets = {"optimization": xr.Dataset(history, coords=coordinates, attrs=library | facts)}
        if draws is not None:
            datasets |= to_datasets({"posterior": {name: value[None] for name, value in draws.items()}}, facts)
        return as_inference_data(datasets)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss at each step, the epoch means and the validation loss.

        Parameters
        ----------
        ax : Axes, optional
            New ``pyplot`` axes by default.
        """
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
        ax.plot(range(1, self.num_steps + 1), self.losses, color=SKY, linewidth=0.6, label="step")
        if self.num_epochs:
            ends = self.epoch_ends
            ax.plot(ends, self.epoch_losses, color=BLUE, linewidth=1.6, label="epoch")
            if len(self.validation_losses):
                ax.plot(ends, self.validation_losses, color=ORANGE, linewidth=1.6, label="validation")
            if self.best_epoch is not None:
                ax.axvline(ends[self.best_epoch], color=ORANGE, linestyle="--", linewidth=1.0, zorder=0)
        # The large losses of the first steps would hide later changes.
        late = self.losses[self.num_steps // 10 :]
        if len(late) > 20:
            low, high = float(late.min()), float(late.max())
            ax.set_ylim(low - 0.05 * (high - low) - 1e-9, high + 0.05 * (high - low) + 1e-9)
        ax.set_xlabel("step")
        ax.set_ylabel("loss per observation (nats)")
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
        return ax


def _latent(guide: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    with MendedDraws():
        nodes: Any = prune_subsample_sites(poutine.trace(guide).get_trace(*args, **kwargs)).nodes
    return {
        name: site["value"]
        for name, site in nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not site["infer"].get("is_auxiliary")
    }


# Settings and events of a training run.


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a run; see :func:`~bayeskit.inference.training.fit`."""

    num_epochs: int | None
    num_steps: int | None
    batch_size: int | None
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    gradient_clipping: float | None
    patience: int | None
    validation_objective: Any
    seed: int
    compile: bool | tuple[nn.Module, ...]
    precision: str
    ranks: Ranks
    on_ranks_device: bool
    control: Control


@dataclass
class History:
    """Losses and epochs so far."""

    losses: list[float] = field(default_factory=list)
    epoch_ends: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best_epoch: int | None = None

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return len(self.losses)

    @property
    def num_epochs(self) -> int:
        """Epochs completed."""
        return len(self.epoch_ends)

    @property
    def steps_of_epoch(self) -> int:
        """Steps taken in the current epoch."""
        return self.num_steps - (self.epoch_ends[-1] if self.epoch_ends else 0)

    def epoch_losses(self) -> list[float]:
        """Return the mean loss of each epoch."""
        starts = [0, *self.epoch_ends]
        return [math.fsum(self.losses[a:b]) / (b - a) for a, b in zip(starts[:-1], self.epoch_ends, strict=True)]


class _Moment(NamedTuple):
    """State before a forward pass, which may change it."""

    stream: Tensor
    learnt: dict[str, Tensor]
    buffers: dict[str, Tensor]


class _Good(NamedTuple):
    """Last parameters with a finite loss, with objective state and buffers."""

    parameters: dict[str, Tensor]
    learnt: dict[str, Tensor]
    buffers: dict[str, Tensor]


class TrainingOutcome(NamedTuple):
    """Result of a training run."""

    history: History
    parameters: dict[str, Tensor]
    ending: Ending
    best_epoch: int | None
    seconds: float


# Networks inside a model or guide: search, compilation and mixed precision.


def _owner(function: Any) -> nn.Module | None:
    """Return the module of a model or guide that is a module or one of its methods, or None."""
    found = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def named_modules(function: Any) -> dict[str, nn.Module]:
    """Return the modules in the closure and globals of a plain function."""
    return {} if _owner(function) is not None else {n: v for n, v in _around(function) if isinstance(v, nn.Module)}


def named_modules_in_settings(function: Any) -> dict[str, nn.Module]:
    """Return the modules in dataclasses that a model or guide holds or reads, as ``{'estimator.baseline': ...}``."""
    whole = _owner(function)
    values: Iterable[tuple[str, Any]] = _around(function)
    if whole is not None:
        values = (
            (f"{at}.{name}", v)
            for at, part in whole.named_modules()
            for name, v in vars(part).items()
            if _is_dataclass(v) or (type(v) is dict and not name.startswith("_"))
        )
    return dict(found for name, value in values for found in _in_settings(name, value))


def _is_dataclass(value: Any) -> bool:
    """Like dataclasses.is_dataclass for objects, but faster, because each step calls it for all attributes."""
    return hasattr(type(value), "__dataclass_fields__")


def _around(function: Any) -> Iterable[tuple[str, Any]]:
    if not inspect.isfunction(function):
        return ()
    around = inspect.getclosurevars(function)
    return {**around.globals, **around.nonlocals}.items()


def _in_settings(name: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    if _is_dataclass(value):
        for field in dataclasses.fields(value):
            if isinstance(part := getattr(value, field.name, None), nn.Module):
                yield f"{name}.{field.name}", part
    elif type(value) is dict and not name.rpartition(".")[2].startswith("_"):  # skip a module's private dictionaries
        for key, part in value.items():
            yield from _in_settings(f"{name}.{key}", part)


def networks(*functions: Any) -> list[nn.Module]:
    """Return the largest Pyro-free modules inside models and guides or in their closures."""
    found: dict[int, nn.Module] = {}
    for function in functions:
        whole = _owner(function)
        parts = list(named_modules(function).values()) if whole is None else list(whole.children())
        for part in parts:
            for network in _plain(part):
                found[id(network)] = network
    return list(found.values())


def _plain(module: nn.Module) -> Iterator[nn.Module]:
    container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not container and not any(isinstance(part, PyroModule) for part in module.modules()):
        if any(True for _ in module.parameters()):
            yield module
        return
    for child in module.children():
        yield from _plain(child)


@contextmanager
def _replaced_forward(modules: Sequence[nn.Module], wrap: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward method of each module by ``wrap(module)`` inside the context."""
    before = [vars(module).get("forward") for module in modules]
    with validation_kept():
        try:
            for module in modules:
                module.forward = wrap(module)  # type: ignore[method-assign]
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward  # type: ignore[method-assign]


def in_mixed_precision(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the module's computation under autocast to ``dtype``, with results in the parameters' dtype."""
    # Log densities are computed outside autocast, in full precision.
    forward = module.forward
    parameter = next(module.parameters())

    def full(x: Any) -> Any:
        return x.to(parameter.dtype) if isinstance(x, Tensor) and x.dtype == dtype else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(parameter.device.type, dtype=dtype):
            result = forward(*args, **kwargs)
        return _pytree.tree_map(full, result)

    return run


def compiled(module: nn.Module, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return the module's computation, compiled on first call with options of torch's compiler."""
    return torch.compile(module.forward, options=options or None)


# Minibatches: the arguments of model and guide, epoch by epoch.


class Batch(NamedTuple):
    """Arguments of one call of model and guide, with the row indices of the data if known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Tensor | None = None
    num_data: int = 0

    @property
    def num_items(self) -> int:
        """Length of the leading dimension; 1 for a batch without tensors of at least one dimension."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor) and x.dim()]
        return len(tensors[0]) if tensors else 1

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``."""

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        args, kwargs = tuple(moved(x) for x in self.args), {name: moved(x) for name, x in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs)


def _as_batch(value: Any) -> Batch:
    """Return the arguments of a batch: a tuple or list is unpacked, a mapping gives keywords."""
    if isinstance(value, Mapping):
        return Batch((), dict(value))
    return Batch(tuple(value), {}) if isinstance(value, (tuple, list)) else Batch((value,), {})


class Batches:
    """Reproducible minibatches of each epoch."""

    @property
    @abstractmethod
    def num_items(self) -> int | None:
        """Number of items per epoch, or None if unknown."""

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's batches of an epoch, skipping the first ``start``."""

    @abstractmethod
    def all(self) -> Iterator[Batch]:
        """Yield all items in order."""

    def num_batches(self) -> int | None:
        """Return the number of batches per epoch, or None if unknown."""
        return None

    def fingerprint(self) -> Any:
        """Return what identifies the data set before iteration, for example by a method ``fingerprint`` of its own."""
        return "iterable"


class Columns(Batches):
    """Tensors indexed by item along the leading dimension; ``batch_size`` is the total over all processes."""

    # Items are shuffled in each epoch; without a batch size a single process yields all items in order. Raises
    # DataError if the tensors differ in length or are empty, SettingsError if the processes cannot share the batches.

    def __init__(self, value: Any, batch_size: int | None, ranks: Ranks, seed: int) -> None:
        self._all, self._seed = _as_batch(value), seed
        lengths = {len(x) if x.dim() else 0 for x in (*self._all.args, *self._all.kwargs.values())}
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"the data must have one leading dimension, the number of items, not {sorted(lengths)}; give tensors "
                "of shape (items, ...), and other arguments to the model itself"
            )
        self._count = lengths.pop()
        self._whole = batch_size is None and ranks.world_size == 1
        self._batch_size = self._count - self._count % ranks.world_size if batch_size is None else batch_size
        device = next(iter((*self._all.args, *self._all.kwargs.values()))).device
        self._ranks = Ranks(ranks.rank, ranks.world_size, device)
        next(self._ranks.minibatches(self._count, self._batch_size, seed=seed))  # raises for an invalid batch size

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self._count

    def num_batches(self) -> int:
        """Return the number of batches of an epoch."""
        return self._count // self._batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's batches of an epoch; an incomplete last batch is dropped."""
        if self._whole:
            if start == 0:
                yield self._all
            return
        order = self._ranks.minibatches(self._count, self._batch_size, seed=self._seed, epoch=number)
        for rows in islice(order, start, None):
            yield self._taken(rows)._replace(rows=rows, num_data=self._count)

    def all(self) -> Iterator[Batch]:
        """Yield all items in order; the last batch may be smaller."""
        if self._whole:
            yield self._all
            return
        for start in range(0, self._count, self._batch_size):
            yield self._taken(slice(start, start + self._batch_size))

    def _taken(self, rows: Tensor | slice) -> Batch:
        return Batch(tuple(x[rows] for x in self._all.args), {name: x[rows] for name, x in self._all.kwargs.items()})

    def fingerprint(self) -> str:
        """Return a digest of the data."""
        digest = hashlib.sha256()
        for name, x in [*enumerate(self._all.args), *self._all.kwargs.items()]:
            digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
            digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


class Given(Batches):
    """Batches of a user-supplied iterable, such as a ``DataLoader``; each epoch iterates anew."""

    # Torch's global stream is seeded from the seed and the epoch number while the iterable runs.

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        if iter(source) is source:
            raise DataError(
                "the data are an iterator, which is used up after one epoch; give an iterable, such as a list or a "
                "DataLoader"
            )
        self._source, self._seed = source, seed

    @property
    def num_items(self) -> None:
        """Unknown: None."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        generator = new_generator(self._seed, stream=f"minibatches {number}")
        with global_stream(generator):
            source = iter(self._source)
        nothing = object()
        for position in range(2**63):
            with global_stream(generator):
                value = next(source, nothing)
            if value is nothing:
                if position == 0:
                    raise DataError("the data have no batches")
                return
            if value is None:
                raise DataError(f"batch {position} of the data is None; give a tensor, a tuple or a mapping")
            if position >= start:
                yield _as_batch(_tensors(value))

    def all(self) -> Iterator[Batch]:
        """Yield the batches with a fixed random seed."""
        return self.epoch(0)

    def fingerprint(self) -> Any:
        """Return the fingerprint of the iterable, if it has one."""
        own = getattr(self._source, "fingerprint", None)
        return super().fingerprint() if own is None else own()


class Nothing(Batches):
    """No data: model and guide are called without arguments."""

    @property
    def num_items(self) -> int:
        """Always 1."""
        return 1

    def num_batches(self) -> int:
        """Return 1."""
        return 1

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield one empty batch."""
        if start == 0:
            yield Batch((), {})

    def all(self) -> Iterator[Batch]:
        """Yield one empty batch."""
        return self.epoch(0)

    def fingerprint(self) -> str:
        """Return a constant."""
        return "none"


def _tensors(data: Any) -> Any:
    """Return arrays, columns and frames, also those in a tuple or mapping, as tensors."""
    return arrays_as_tensors(dict(data) if isinstance(data, Mapping) else data)


def as_batches(data: Any, batch_size: int | None, ranks: Ranks, seed: int) -> Batches:
    """Return the minibatches of a user's data; DataError if it is neither tensors nor an iterable of batches."""
    if data is None:
        return Nothing()
    data = _tensors(data)
    if isinstance(data, list) and data and isinstance(data[0], (bool, int, float)):
        data = as_numbers("data", data)
    columns = data if isinstance(data, tuple) else data.values() if isinstance(data, Mapping) else (data,)
    if columns and all(isinstance(x, Tensor) for x in columns):
        return Columns(data, batch_size, ranks, seed)
    if isinstance(data, (tuple, Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise DataError(
            f"data must be a tensor or array, a tuple or mapping of these, or an iterable of batches, not {data!r:.80}"
        )
    return Given(data, seed)


# States of optimisers and schedules as tensors and JSON, and the checkpoint of a training run.

_SCHEMA = Schema("a checkpoint of training", 3)
_ROUNDING = 1e-4  # of log densities in single precision on several machines


def _encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return ``value`` as JSON, its tensors in ``tensors`` with prefix ``name``; SettingsError if that fails."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"mapping": [[_encode(k, {}, name), _encode(v, tensors, f"{name}.{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]}
    raise SettingsError(
        f"{name} holds {value!r:.80}, which a checkpoint cannot store without running code; use an optimiser and a "
        "schedule whose states are tensors and numbers, or train without a checkpoint"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert :func:`_encode`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "mapping":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in content}
    items = (_decode(item, tensors) for item in content)
    return tuple(items) if kind == "tuple" else list(items)


def setting_as_json(value: Any) -> Any:
    """Return a setting as JSON that is equal for equal settings."""
    # Functions and other objects are compared by name only; tensors, numbers, containers and distributions by value.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous()
        digest = hashlib.sha256(content.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return [str(content.dtype), list(content.shape), digest]
    if isinstance(value, Mapping):
        return {str(key): setting_as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [setting_as_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            {f.name: setting_as_json(getattr(value, f.name)) for f in dataclasses.fields(value)},
        ]
    if isinstance(value, torch.distributions.Distribution):
        names = [*value.arg_constraints, "base_dist", "transforms"]
        return [type(value).__qualname__, {name: setting_as_json(getattr(value, name, None)) for name in names}]
    if isinstance(value, torch.distributions.Transform):
        own = {name: part for name, part in vars(value).items() if not name.startswith("_")}
        return [type(value).__qualname__, setting_as_json(own)]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _write_checkpoint(path: str | Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a run atomically, with the ``settings`` that a resumed run must share."""
    tensors: dict[str, Tensor] = {}
    coded = _encode(state, tensors, "state")
    save_tensors(path, tensors, {"settings": dict(settings), "state": coded}, _SCHEMA)


@contextmanager
def _checkpoint(path: str | Path, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the state of the same run to a block that restores it; CheckpointError for any other file."""
    with loaded_tensors(path, _SCHEMA) as (tensors, facts):
        _compare_settings(path, facts["settings"], settings)
        yield _decode(facts["state"], tensors)


def _compare_settings(path: str | Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*settings, *saved]):
        if saved.get(name) == settings.get(name):
            continue
        if name in ("model", "data"):
            place = _difference(saved.get(name), settings.get(name))
            if place is not None:
                raise CheckpointError(
                    f"{path} is a checkpoint of {'another model' if name == 'model' else 'other data'}{place}; give "
                    "another path or move it away"
                )
            continue
        raise CheckpointError(
            f"{path} was written with {name}={saved.get(name)!r}, this run has {name}={settings.get(name)!r}; resume "
            "with the same settings, or give another path"
        )


def _difference(saved: Any, now: Any, name: str = "") -> str | None:
    """Return where two fingerprints differ by more than the rounding of other machines, or None."""
    if isinstance(saved, dict) and isinstance(now, dict):
        differences = (_difference(saved.get(key), now.get(key), key) for key in dict.fromkeys([*saved, *now]))
        return next((place for place in differences if place is not None), None)
    if isinstance(saved, float) and isinstance(now, float):
        same = math.isclose(saved, now, rel_tol=_ROUNDING, abs_tol=_ROUNDING) or saved != saved and now != now
        return None if same else f": {name} is {saved:.6g} there and {now:.6g} here"
    return None if saved == now else f": {name} is {saved!r:.60} there and {now!r:.60} here" if name else ""


# Model, guide and objective as one module whose call returns the loss.


class _Learner(nn.Module):
    """The loss of model and guide as a function of a minibatch, with all state on which it depends."""

    # Construct it in an empty scope of Pyro's parameter store. Model and guide run once on ``first`` to create the
    # guide's parameters.

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], objective: Any, first: Batch) -> None:
        super().__init__()
        if isinstance(objective, type) or not hasattr(objective, "differentiable_loss"):
            raise SettingsError(
                "objective must be one of bayeskit.inference.objectives or a pyro.infer.ELBO, such as ELBO(), not "
                f"{objective!r:.80}"
            )
        for what, function in (("model", model), ("guide", guide)):
            _check_call(what, function, first)
        self._call = (model, guide, objective)
        self.model, self.guide = _owner(model), _owner(guide)
        if isinstance(objective, Objective):
            objective.reset()
        before, learnt = self.copied_buffers(), self.learnt()
        try:
            # Later steps may raise what a user throws on purpose.
            with torch.no_grad(), lines_named("the model or the guide"):
                # Full data size of a plate that rescales minibatches, or None; whether a latent site lies outside all
                # plates.
                self.whole, self.has_global_latents = self._plates(first)
                self(*first.args, **first.kwargs)
        except (ValueError, LossError) as error:
            foreign = isinstance(error, LossError) or not isinstance(error.__cause__ or error, BayeskitError)
            if not foreign or not (where := _not_finite(first)):
                raise
            raise DataError(f"{where}; leave such rows out, or mask them in the model") from error
        self.load_buffers(before)
        self.load_learnt(learnt)
        if not self.trained():
            raise SettingsError(
                "model and guide have no parameters to train; use modules, pyro.module or pyro.param, and check "
                "requires_grad"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a minibatch."""
        model, guide, objective = self._call
        with not_finite_as_loss_error():  # of objectives of Pyro too
            loss: Tensor = objective.differentiable_loss(model, guide, *args, **kwargs)
        if torch.is_grad_enabled() and torch.distributed.is_initialized():
            # Distributed processes wait for the gradient of every parameter, including unused parameters.
            loss = loss + sum(p.flatten()[:0].sum().to(loss.dtype) for p in self.parameters() if p.requires_grad)
        return loss

    def loss(self, batch: Batch, objective: Any = None) -> Tensor:
        """Return the loss of ``batch`` under ``objective``, by default the own one."""
        model, guide, own = self._call
        loss: Tensor = (objective or own).differentiable_loss(model, guide, *batch.args, **batch.kwargs)
        return loss

    def num_data(self, batch: Batch) -> int:
        """Return the number of observations to which the loss of ``batch`` refers."""
        return batch.num_items if self.whole is None else self.whole

    def culprit(self, batch: Batch) -> str:
        """Return a message with the site that makes the loss of ``batch`` non-finite."""
        model, guide, objective = self._call
        if isinstance(objective, Objective):
            try:
                objective.loss(model, guide, *batch.args, **batch.kwargs)
            except LossError as error:
                return str(error)
        return "the loss or its gradient is not finite; lower the learning rate or clip the gradient"

    def trained(self) -> dict[str, Tensor]:
        """Return all parameters by name: of modules, then of Pyro's store."""
        found: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        known = {id(p) for p in self.parameters()}
        for name, parameter in pyro.get_param_store().named_parameters():
            if id(parameter) not in known and parameter.requires_grad:
                found[f"store.{name}"] = parameter
        return found

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Return the buffers of modules, such as running means."""
        found = dict(self.named_buffers())
        for function in self._call[:2]:
            for name, module in {**named_modules(function), **named_modules_in_settings(function)}.items():
                found |= {f"function.{name}.{key}": value for key, value in module.named_buffers()}
        return found

    def count_step(self) -> None:
        """Advance annealed temperatures by one step."""
        inside = [module for function in self._call[:2] for module in named_modules_in_settings(function).values()]
        for module in {id(m): m for m in [*self.all_modules(), *inside]}.values():
            if isinstance(module, Annealed):
                module.step()

    def copied_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers."""
        return {name: buffer.clone() for name, buffer in self.buffers_by_name().items()}

    def load_buffers(self, state: Mapping[str, Tensor]) -> None:
        """Write into the buffers; buffers not in ``state`` stay."""
        _write(self.buffers_by_name(), state)

    def load_trained(self, state: Mapping[str, Tensor]) -> None:
        """Write into the parameters."""
        _write(self.trained(), state)

    def groups(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of the guide, on which its draws or their density depend, and the others."""
        trained = list(self.trained().values())
        with poutine.block(), torch.enable_grad():
            trace = poutine.trace(self._call[1]).get_trace(*batch.args, **batch.kwargs)
            trace.compute_log_prob()
            sites = [s for s in prune_subsample_sites(trace).nodes.values() if s["type"] == "sample"]
            seen: list[Any] = [x for s in sites for x in (s["value"], s["log_prob"])]
            total = sum((x.sum() for x in seen if x.requires_grad), torch.zeros((), requires_grad=True))
            found = torch.autograd.grad(total, trained, allow_unused=True)
        used = [gradient is not None for gradient in found]
        return (
            [p for p, of_guide in zip(trained, used, strict=True) if of_guide],
            [p for p, of_guide in zip(trained, used, strict=True) if not of_guide],
        )

    def learnt(self) -> dict[str, Tensor]:
        """Return a copy of the objective's state."""
        objective = self._call[2]
        state = objective.state_dict() if isinstance(objective, Objective) else {}
        return {name: value.clone() for name, value in state.items()}

    def load_learnt(self, state: Mapping[str, Tensor]) -> None:
        """Restore the objective's state from :meth:`learnt`."""
        objective = self._call[2]
        if isinstance(objective, Objective):
            objective.load_state_dict(state)

    def all_modules(self) -> list[nn.Module]:
        """Return all modules of model and guide."""
        around = [m for function in self._call[:2] for part in named_modules(function).values() for m in part.modules()]
        return [*self.modules(), *around]

    def fingerprint(self, batch: Batch) -> dict[str, Any]:
        """Return shapes of parameters and buffers, and log densities of all sites where training does not lead.

        Parameters, and buffers that a run changes, have values from a seed, so that a run and the run that resumes it
        have one fingerprint; what else the densities depend on belongs to the model.
        """
        trained, buffers = self.trained(), self.copied_buffers()
        tensors = {**trained, **self.buffers_by_name()}
        before, learnt = {name: x.detach().clone() for name, x in trained.items()}, self.learnt()
        generator = new_generator(0, stream="fingerprint of model and guide")
        try:
            self._densities(batch)
            changed = {name: x for name, x in self.copied_buffers().items() if not torch.equal(x, buffers[name])}
            self.load_buffers(buffers)
            seeded = {
                name: (0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(x)
                for name, x in sorted({**before, **changed}.items())
                if x.is_floating_point()
            }
            _write({**trained, **self.buffers_by_name()}, seeded)
            densities = self._densities(batch)
        finally:
            _write(trained, before)
            self.load_buffers(buffers)
            self.load_learnt(learnt)
        shapes = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in tensors.items()}
        fixed = {
            name: float(x.double().sum()) for name, x in buffers.items() if name not in changed and not x.is_complex()
        }
        return {"parameters": shapes, "buffers": fixed, "log densities": densities}

    def _densities(self, batch: Batch) -> dict[str, Any]:
        """Return the log density of each site of guide and model, as far as a run at any parameters gets."""
        model, guide, _ = self._call
        found: dict[str, Any] = {}
        stream = global_stream(new_generator(0, stream="draws of the fingerprint of model and guide"))
        try:
            with poutine.block(), torch.no_grad(), stream, MendedDraws():
                drawn = poutine.trace(guide).get_trace(*batch.args, **batch.kwargs)
                trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*batch.args, **batch.kwargs)
                for what, one in (("guide", drawn), ("model", trace)):
                    for name, site in prune_subsample_sites(one).nodes.items():
                        if site["type"] == "sample":
                            fn: Any = site["fn"]
                            terms = scale_and_mask(fn.log_prob(site["value"]), site["scale"], site["mask"])
                            total = float(torch.as_tensor(terms).double().sum())
                            place = f"the log density of site {name!r} of the {what}"
                            found[place] = total if math.isfinite(total) else repr(total)
                if not found:  # an objective that needs no sites
                    found["the loss"] = float(self(*batch.args, **batch.kwargs))
        except Exception as error:  # such as parameters outside of a domain; up to there the sites are known
            found["the end of a run"] = type(error).__name__
        return found

    def _plates(self, batch: Batch) -> tuple[int | None, bool]:
        model, guide, objective = self._call
        with poutine.block(), torch.no_grad(), not_finite_as_loss_error():
            drawn = poutine.trace(guide).get_trace(*batch.args, **batch.kwargs)
            trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*batch.args, **batch.kwargs)
        if not isinstance(objective, Objective):
            _refuse_marks(drawn, objective)
        of_guide, sites = (
            [s for s in prune_subsample_sites(t).nodes.values() if s["type"] == "sample"] for t in (drawn, trace)
        )
        for site in (*of_guide, *sites):
            check_plates(site)
        frames = [f for s in sites for f in s["cond_indep_stack"]]
        whole = max((f.full_size for f in frames if f.full_size and f.full_size > f.size), default=None)
        return whole, any(not s["cond_indep_stack"] for s in sites if not s["is_observed"])


def _check_call(what: str, function: Callable[..., Any], batch: Batch) -> None:
    """Raise a typed error if a model or guide cannot be called with a minibatch."""
    if inspect.isclass(function):
        raise SettingsError(f"{what} is a class; give an object of it, such as {function.__name__}(model)")
    try:
        inspect.signature(function).bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise ModelError(
            f"the {what} cannot be called with minibatches of {len(batch.args) + len(batch.kwargs)} arguments: {error}"
            "; give the arguments in a tuple or a mapping, as a list is taken for batches"
        ) from error
    except ValueError:
        return  # it has no signature, as functions in C


def _refuse_marks(trace: Any, objective: Any) -> None:
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and GRADIENT in site["infer"]:
            raise GuideError(
                f"site {name!r} has infer['gradient'], which {type(objective).__name__} of Pyro does not support; "
                "train by bayeskit.inference.objectives.ELBO"
            )


def _not_finite(batch: Batch) -> str | None:
    """Return a message with the place of the first non-finite value of the data, or None."""
    for name, x in [*enumerate(batch.args), *batch.kwargs.items()]:
        if isinstance(x, Tensor) and x.is_floating_point() and not bool((good := x.isfinite()).all()):
            place = tuple(int(i) for i in (~good).nonzero()[0])
            return f"argument {name!r} of model and guide is {float(x[place])} at {place} of the first minibatch"
    return None


def _write(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            if name in values:
                if (found := values[name]).shape != target.shape or found.dtype != target.dtype:
                    raise ShapeError(f"{name} is {found.dtype}, {tuple(found.shape)}, not of the shape and type here")
                target.copy_(found)


# Steps, epochs, checkpoints and endings of a training run.


def train(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    objective: Any,
    data: Any,
    validation: Any,
    plan: TrainingPlan,
    state: dict[str, dict[str, Any]],
) -> TrainingOutcome:
    """Run to the end; see :func:`~bayeskit.inference.training.fit`."""
    # ``state``: the parameters outside of modules, which are in Pyro's store while a step is made.
    batches = as_batches(data, plan.batch_size, plan.ranks, plan.seed)
    held_out = _held_out(validation, plan)
    first = next(batches.epoch(0), None)
    if first is None:
        raise DataError("the data have no batches")
    if plan.on_ranks_device:
        first = first.to(plan.ranks.device)
    with _in_store(state), global_stream(new_generator(plan.seed, stream="first parameters")):
        learner = _Learner(model, guide, objective, first)
    if plan.patience is not None and plan.validation_objective is None and getattr(objective, "is_moving", False):
        warn_user(
            f"the loss of {type(objective).__name__} changes in training even if model and guide do not, so patience "
            "may stop early and restore the wrong epoch; give validation_objective, such as ELBO()",
            BayeskitWarning,
        )
    count = batches.num_batches()
    if learner.has_global_latents and learner.whole is None and count is not None and count > 1:
        warn_user(
            "a latent variable stands outside every plate, and no plate rescales minibatches, so its prior is counted "
            'once per minibatch; write pyro.plate("data", size, subsample_size=len(x)) in the model',
            BayeskitWarning,
        )
    with ExitStack() as stack:
        if plan.precision == "bfloat16":
            found = networks(model, guide)
            stack.enter_context(_replaced_forward(found, partial(in_mixed_precision, dtype=torch.bfloat16)))
        if plan.compile:
            chosen = networks(model, guide) if isinstance(plan.compile, bool) else list(plan.compile)
            with _in_store(state):
                stack.enter_context(_compiled(learner, chosen, first, plan.seed))
        with _in_store(state):
            training = _Run(learner, objective, batches, held_out, plan, first, state)
        return training.run()


def _held_out(validation: Any, plan: TrainingPlan) -> Batches | None:
    """Return the validation data; every process evaluates all of them."""
    if validation is None:
        return None
    whole = as_batches(validation, None, Ranks(), plan.seed)
    if plan.batch_size is None or not isinstance(whole, Columns) or plan.batch_size >= whole.num_items:
        return whole
    return as_batches(validation, plan.batch_size, Ranks(), plan.seed)


def _compiled(learner: _Learner, modules: list[nn.Module], first: Batch, seed: int) -> ExitStack:
    """Compile ``modules`` and run them once; if that fails, warn and leave them unchanged."""
    stack = ExitStack()
    if not modules:
        warn_user(
            "model and guide contain no networks to compile; name the networks, compile=[encoder, decoder]",
            CompilationWarning,
        )
        return stack
    before, learnt = learner.copied_buffers(), learner.learnt()
    try:
        stream = global_stream(new_generator(seed, stream="compilation"))
        with warnings.catch_warnings(), stream, validation_kept():
            warnings.simplefilter("ignore")  # deprecation warnings of the compiler itself
            # Until training ends: a network is compiled again whenever the shapes of its arguments change.
            cache = stack.enter_context(compiler_cache())
            stack.enter_context(_replaced_forward(modules, partial(compiled, options=cache.options)))
            learner(*first.args, **first.kwargs).backward()
    except Exception as error:  # the compiler may raise any exception
        stack.close()
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warn_user(
            f"the networks could not be compiled ({reason[0]}); training continues without compilation",
            CompilationWarning,
        )
    else:
        if cache.problem is not None:
            warn_user(cache.problem, CompilationWarning)
    for parameter in learner.trained().values():
        parameter.grad = None
    learner.load_buffers(before)
    learner.load_learnt(learnt)
    return stack


class _Run:
    def __init__(
        self,
        learner: _Learner,
        objective: Any,
        batches: Batches,
        held_out: Batches | None,
        plan: TrainingPlan,
        first: Batch,
        state: dict[str, dict[str, Any]],
    ) -> None:
        self.learner, self.batches, self.held_out, self.plan = learner, batches, held_out, plan
        self.state = state
        self.ranks, self.control = plan.ranks, plan.control
        self.parameters = learner.trained()
        self.generator = self.ranks.generator(plan.seed, shared=learner.has_global_latents)
        self.optimizer = _optimizer(plan.optimizer, list(self.parameters.values()))
        self.clipped: tuple[list[Tensor], ...] = ()
        if plan.gradient_clipping is not None:
            with global_stream(new_generator(plan.seed, stream="roles of parameters")):
                self.clipped = learner.groups(first)
        self.scheduler = None if plan.schedule is None else plan.schedule(self.optimizer)
        if self.ranks.world_size > 1 and any(name.startswith("store.") for name in self.parameters):
            raise SettingsError("several processes train modules only; replace pyro.param by PyroModule parameters")
        self.module = self.ranks.wrap(learner) if self.ranks.world_size > 1 else learner
        self.history = History()
        self.good = _Good({}, {}, {})
        self.best: dict[str, Tensor] = {}
        self.source: Iterator[Batch] = iter(())
        self.settings = self._settings(objective)
        self.earlier = 0.0  # seconds of the runs before the last resume
        self.agreed: Ending | None = None
        self.last_save = -math.inf

    def run(self) -> TrainingOutcome:
        self.begin = time.monotonic()
        path = self.control.checkpoint
        if path is not None and Path(path).exists():
            with _in_store(self.state), _checkpoint(path, self.settings) as state:
                self._load(state)
            self.last_save = self.begin
        self.source = self.batches.epoch(self.history.num_epochs, self.history.steps_of_epoch)
        first, count = self.history.num_steps, self.batches.num_batches()
        total = self.plan.num_steps
        if self.plan.num_epochs is not None:
            total = None if count is None else count * self.plan.num_epochs
        with (
            watching(self.control.time_budget) as self.watch,
            progress_bar("training", total, self.control.progress and self.ranks.rank == 0) as bar,
        ):
            while (ending := self._ending()) is None:
                # Handlers that pyro.infer.SVI has set up in another thread do not see this step.
                with _in_store(self.state), poutine.block():
                    self._advance()
                if bar.due(done := self.history.num_steps):
                    speed = (done - first) / (time.monotonic() - self.begin)
                    recent = self.history.losses[-100:]
                    bar.update(done, f"loss {math.fsum(recent) / len(recent):.6g}, {speed:.3g} steps/s")
        if self.ranks.world_size == 1 and self.watch.interrupted.is_set():
            ending = "interrupted"  # also at the last step, so that a calling loop sees the interrupt
        if not self.history.losses:
            raise nothing_done(ending, self.control, "before the first step")  # type: ignore[arg-type]
        restored = self.plan.patience is not None and bool(self.best)
        with _in_store(self.state):
            if self.history.num_steps > first:
                self._save_last()
            seconds = self._seconds()
            if restored:
                self._restore_best()
        say_early(ending, self.control, "training", f"after {self.history.num_steps} steps")  # type: ignore[arg-type]
        parameters = {name: p.detach().clone() for name, p in self.parameters.items()}
        return TrainingOutcome(self.history, parameters, ending, self.history.best_epoch if restored else None, seconds)

    def _ending(self) -> Ending | None:
        history, plan = self.history, self.plan
        if plan.num_steps is not None and history.num_steps >= plan.num_steps:
            return "finished"
        if plan.num_epochs is not None and history.num_epochs >= plan.num_epochs:
            return "finished"
        if plan.patience is not None and history.num_epochs:
            best = -1 if history.best_epoch is None else history.best_epoch
            if history.num_epochs - 1 - best >= plan.patience:
                return "early stopping"
        return self.agreed if self.ranks.world_size > 1 else self.watch.reason()

    def _advance(self) -> None:
        """Take a step, and end the epoch after its last step."""
        batch = next(self.source, None)
        if batch is not None:
            self._step(batch.to(self.ranks.device) if self.plan.on_ranks_device else batch)
            count = self.batches.num_batches()
            if count is None or self.history.steps_of_epoch < count:
                return
        elif self.history.steps_of_epoch == 0:
            raise DataError("the data have no batches in this epoch")
        self._end_epoch()
        self.source = self.batches.epoch(self.history.num_epochs)

    def _step(self, batch: Batch) -> None:
        learner = self.learner
        before = _Moment(self.generator.get_state(), learner.learnt(), learner.copied_buffers())
        self.optimizer.zero_grad()
        with global_stream(self.generator), rows_of_minibatch(batch.rows, batch.num_data):
            try:
                loss = self.module(*batch.args, **batch.kwargs) / learner.num_data(batch)
            except LossError as error:
                self._fail(batch, before, str(error))
            value, due = self._agree(float(loss.detach()))
            if math.isfinite(value) and loss.requires_grad:
                loss.backward()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else loss.new_zeros(())
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._fail(batch, before)
        self._remember_good(before)
        if due:
            first = self.last_save == -math.inf
            save_or_warn(lambda: self._save(before), "training goes on, and writes again", first=first)
        if self.plan.gradient_clipping is not None:
            for group in self.clipped:
                torch.nn.utils.clip_grad_norm_(group, self.plan.gradient_clipping)
        self.optimizer.step()
        learner.count_step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.history.losses.append(value)

    def _remember_good(self, moment: _Moment) -> None:
        copies = self.good.parameters or {n: torch.empty_like(p) for n, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            copies[name].copy_(parameter.detach())
        self.good = _Good(copies, moment.learnt, moment.buffers)

    def _agree(self, loss: float) -> tuple[float, bool]:
        """Return the loss and whether to write a checkpoint, equal on all processes."""
        due = self.control.checkpoint is not None and (
            time.monotonic() - self.last_save >= self.control.checkpoint_seconds
        )
        if self.ranks.world_size == 1:
            return loss, due
        reason = self.watch.reason()
        facts = [loss, reason == "interrupted", reason == "time budget", due and self.ranks.rank == 0]
        shared = torch.tensor(facts, dtype=torch.float64, device=self.ranks.device)
        dist.all_reduce(shared)
        total, interrupted, out_of_time, save = shared.tolist()
        self.agreed = "interrupted" if interrupted else "time budget" if out_of_time else None
        self._share_learnt()
        return total / self.ranks.world_size, bool(save)

    def _share_learnt(self) -> None:
        """Replace the objective's state by its mean over the processes."""
        learnt = self.learner.learnt()
        for name, value in learnt.items():
            if value.is_floating_point():
                learnt[name] = self._mean_of_known(value)
        self.learner.load_learnt(learnt)

    def _mean_of_known(self, value: Tensor) -> Tensor:
        """Return the mean over the processes whose value is not NaN."""
        unknown = value.isnan()
        shared = torch.stack([value.masked_fill(unknown, 0.0), (~unknown).to(value.dtype)]).to(self.ranks.device)
        dist.all_reduce(shared)
        total, count = shared.to(value.device)
        return total / count

    def _mean(self, value: Tensor) -> Tensor:
        shared = value.to(self.ranks.device, copy=True)
        dist.all_reduce(shared)
        return (shared / self.ranks.world_size).to(value.device)

    def _fail(self, batch: Batch, before: _Moment, reason: str = "") -> NoReturn:
        """Restore the last parameters with a finite loss, and raise LossError with the responsible site."""
        self._restore(before)
        if not reason:
            stream = torch.Generator()
            stream.set_state(before.stream)
            with global_stream(stream):
                reason = self.learner.culprit(batch)
        # In the first step no loss was finite yet, and the parameters are those of the start.
        good = self.good if self.good.parameters else _Good({}, before.learnt, before.buffers)
        self.learner.load_trained(good.parameters)
        self.learner.load_learnt(good.learnt)
        self.learner.load_buffers(good.buffers)
        number = self.history.num_steps
        kept = "" if number == 0 else f"; the parameters of step {number - 1} are restored"
        raise LossError(f"step {number} in epoch {self.history.num_epochs}: {reason}{kept}")

    def _restore(self, moment: _Moment) -> None:
        self.learner.load_learnt(moment.learnt)
        self.learner.load_buffers(moment.buffers)

    def _end_epoch(self) -> None:
        history = self.history
        history.epoch_ends.append(history.num_steps)
        if self.held_out is not None:
            history.validation.append(loss := self._validation_loss(self.held_out))
            if history.best_epoch is None or not loss >= history.validation[history.best_epoch]:
                if not math.isnan(loss):
                    history.best_epoch = history.num_epochs - 1
                    self._remember_best()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(history.validation[-1] if history.validation else history.epoch_losses()[-1])

    def _validation_loss(self, batches: Batches) -> float:
        """Return the mean loss of the validation data, always with the same random numbers."""
        modes = [(module, module.training) for module in self.learner.all_modules()]
        for module, _ in modes:
            module.training = False
        total, items = 0.0, 0
        try:
            with torch.no_grad(), global_stream(new_generator(self.plan.seed, stream="validation")):
                for batch in batches.all():
                    here = batch.to(self.ranks.device) if self.plan.on_ranks_device else batch
                    try:
                        loss = self.learner.loss(here, self.plan.validation_objective) / self.learner.num_data(here)
                    except BayeskitError:
                        raise
                    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                        raise DataError(
                            f"model and guide run with the data and fail with the validation data, where they raise "
                            f"{type(error).__name__}: {error}"
                        ) from error
                    total += float(loss) * here.num_items
                    items += here.num_items
        finally:
            for module, mode in modes:
                module.training = mode
        mean = total / items
        return mean if self.ranks.world_size == 1 else float(self._mean(torch.tensor(mean, dtype=torch.float64)))

    def _remember_best(self) -> None:
        if self.plan.patience is not None:
            tensors = {f"parameter.{n}": p.detach().clone() for n, p in self.parameters.items()}
            self.best = tensors | {f"buffer.{n}": b for n, b in self.learner.copied_buffers().items()}

    def _restore_best(self) -> None:
        for prefix, load in (("parameter.", self.learner.load_trained), ("buffer.", self.learner.load_buffers)):
            load({n.removeprefix(prefix): x for n, x in self.best.items() if n.startswith(prefix)})

    def _seconds(self) -> float:
        return self.earlier + time.monotonic() - self.begin

    def _save_last(self) -> None:
        if self.control.checkpoint is None:
            return
        moment = _Moment(self.generator.get_state(), self.learner.learnt(), self.learner.copied_buffers())
        save_or_warn(lambda: self._save(moment), "the last one is missing")  # a failed write must not lose the result

    def _save(self, moment: _Moment) -> None:
        """Write the state at ``moment``, before the current step; all processes take part."""
        streams = [moment.stream]
        if self.ranks.world_size > 1:
            mine = moment.stream.to(self.ranks.device)
            shared = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
            dist.all_gather(shared, mine)
            streams = [stream.cpu() for stream in shared]
        self.last_save = time.monotonic()
        if self.ranks.rank > 0 or self.control.checkpoint is None:
            return
        history = self.history
        state = {
            "losses": torch.tensor(history.losses, dtype=torch.float64),
            "validation": torch.tensor(history.validation, dtype=torch.float64),
            "epoch_ends": history.epoch_ends,
            "best_epoch": history.best_epoch,
            "seconds": self._seconds(),
            "streams": streams,
            "parameters": self.parameters,
            "buffers": moment.buffers,
            "learnt": moment.learnt,
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.scheduler is None else self.scheduler.state_dict(),
        }
        _write_checkpoint(self.control.checkpoint, self.settings, state)

    def _load(self, state: dict[str, Any]) -> None:
        best_epoch = state["best_epoch"]
        self.history = History(
            [float(loss) for loss in state["losses"].tolist()],
            [whole_number("epoch_ends", end, 0) for end in state["epoch_ends"]],
            [float(loss) for loss in state["validation"].tolist()],
            None if best_epoch is None else whole_number("best_epoch", best_epoch, 0),
        )
        self.earlier, self.best = real_number("seconds", state["seconds"]), dict(state["best"])
        self._restore_best()  # only to see that it fits; the state of now follows
        self.generator.set_state(state["streams"][self.ranks.rank])
        self.learner.load_trained(state["parameters"])
        self.learner.load_buffers(state["buffers"])
        self.learner.load_learnt(state["learnt"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            now = self.scheduler.state_dict()
            # Mapping subclasses such as Counter are restored as plain mappings.
            kept = {n: type(now[n])(v) if isinstance(v, dict) else v for n, v in state["schedule"].items()}
            self.scheduler.load_state_dict(kept)

    def _settings(self, objective: Any) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and in the run that resumes it."""
        if self.control.checkpoint is None:
            return {}
        defaults = {n: v for n, v in self.optimizer.defaults.items() if not isinstance(v, Tensor)}
        plan, device = self.plan, next(iter(self.parameters.values())).device
        settings = {
            "data": self.batches.fingerprint(),
            "objective": _objective_settings(objective),
            "optimizer": [type(self.optimizer).__name__, setting_as_json(defaults)],
            "schedule": type(self.scheduler).__name__,
            "batch_size": plan.batch_size,
            "gradient_clipping": plan.gradient_clipping,
            "patience": plan.patience,
            "validation": None if self.held_out is None else self.held_out.fingerprint(),
            "validation_objective": _objective_settings(plan.validation_objective),
            "seed": plan.seed,
            "compile": bool(plan.compile),
            "precision": plan.precision,
            "processes": self.ranks.world_size,
            "torch": torch.__version__,
            "device": device.type,
            # After the settings on which it depends, such as the first minibatch.
            "model": self.learner.fingerprint(next(self.batches.all()).to(device)),
        }
        settings_as_read: dict[str, Any] = json.loads(json.dumps(settings))
        return settings_as_read


def _objective_settings(objective: Any) -> list[Any] | None:
    if objective is None:
        return None
    learnt = objective.state_dict() if isinstance(objective, Objective) else {}
    found = {*learnt, "max_plate_nesting"}  # set during the first run unless given
    return [
        type(objective).__name__,
        {n: setting_as_json(v) for n, v in vars(objective).items() if n not in found and not n.startswith("_")},
    ]


def _optimizer(make: Callable[[list[Tensor]], Any], parameters: list[Tensor]) -> torch.optim.Optimizer:
    if isinstance(make, PyroOptim):
        raise SettingsError(
            f"optimizer is a Pyro optimiser, {type(make).__name__}, for pyro.infer.SVI; give a torch optimiser, such "
            "as functools.partial(torch.optim.Adam, lr=1e-3)"
        )
    try:
        optimizer = make(parameters)
    except (AssertionError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"optimizer={make!r:.80} does not make a torch optimiser of a list of parameters ({error}); give a class "
            "of torch.optim, or functools.partial of it with its settings"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise SettingsError(
            "optimizer must make, from a list of parameters, a torch optimiser that needs no closure, such as "
            f"functools.partial(torch.optim.Adam, lr=1e-3), not {type(optimizer).__name__}"
        )
    return optimizer


# The training loop.

Precision = Literal["float32", "bfloat16"]


def adam(parameters: list[Tensor]) -> torch.optim.Adam:
    """Return Adam with learning rate 1e-3, fused over all parameters if torch supports it."""
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)
    return torch.optim.Adam(parameters, fused=fused)


def fit(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    objective: Any,
    data: Any,
    *,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    batch_size: int | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = adam,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    gradient_clipping: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    validation_objective: Any = None,
    seed: int = 0,
    compile: bool | Sequence[nn.Module] = False,
    precision: Precision = "float32",
    ranks: Ranks | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> Fit:
    """Train model and guide by an objective.

    Parameters
    ----------
    model, guide : callable
        Modules, their methods, or functions with ``pyro.param`` and ``pyro.module``; modules are trained in place.
        Both are called with each minibatch: a tensor as the only argument, a tuple or list as positional arguments,
        a mapping as keyword arguments.
    objective : Objective or pyro.infer.ELBO
        State from earlier runs, such as a multiplier or annealing progress, is reset unless the run resumes from a
        checkpoint.
    data : Tensor, tuple or mapping of Tensor, iterable of batches, or None
        Tensors are indexed by item along the leading dimension and shuffled in each epoch. An iterable, such as a
        ``DataLoader``, is iterated anew in each epoch. With None, model and guide have no arguments.
    num_epochs, num_steps : int
        Length of the run; set exactly one. It may be increased when a run resumes.
    batch_size : int, optional
        Minibatch size, summed over processes; all items by default. An incomplete last minibatch is dropped.
    optimizer : callable, default Adam
        Function from a list of parameters to a torch optimizer, such as
        ``functools.partial(torch.optim.Adam, lr=0.01, fused=True)``. The default is fused Adam with learning rate 1e-3.
    schedule : callable, optional
        Function from the optimizer to a torch scheduler, which advances after every step. ``ReduceLROnPlateau``
        advances after every epoch, using the validation loss if available and the epoch loss otherwise.
    gradient_clipping : float, optional
        Maximum gradient norm, applied separately to the guide's parameters and to all other parameters.
    validation : like ``data``, optional
        Validation data; their loss is computed after each epoch with a fixed random seed.
    patience : int, optional
        Number of epochs without a lower validation loss before training stops. The parameters of the best epoch are
        restored however the run ends.
    validation_objective : Objective or pyro.infer.ELBO, optional
        Objective of the validation loss; ``objective`` by default. Losses of different epochs are not comparable under
        an annealed weight, :class:`GECO` or :class:`VCD`; ``patience`` then needs a fixed objective, such as
        ``ELBO()`` or ``IWAE(50)``.
    seed : int, default 0
        Seed of minibatches, initial parameters and draws.
    compile : bool or sequence of Module, default False
        Compile all networks inside model and guide, or only the given modules.
    precision : str, default "float32"
        ``"bfloat16"`` runs the networks inside model and guide in mixed precision. Network outputs and log densities
        keep the dtype of the parameters.
    ranks : Ranks, optional
        Processes that share each minibatch, from :func:`~bayeskit.distributed.process_group`.
    checkpoint : path, optional
        File for the state of the run. If it exists, the run resumes from it with bitwise identical results.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints; 0 writes a checkpoint at every step.
    time_budget : float, optional
        Seconds after which the run stops and returns the current fit, as on Ctrl-C.
    progress : bool, default True
        Show a progress bar if the run takes more than two seconds.

    Returns
    -------
    Fit

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    GuideError
        If guide and model do not match.
    LossError
        If the loss or its gradient is not finite; the message names step and site. Modules keep the parameters of the
        last step with a finite loss, and the checkpoint precedes the failure.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Notes
    -----
    The loss is minimized and recorded *per observation*, so learning rates and losses do not depend on the sizes of
    data and minibatches. The loss is divided by ``size`` if the model rescales minibatches with
    ``pyro.plate("data", size, subsample_size=len(x))``, and by ``len(x)`` otherwise. Both are equivalent if all
    latent variables are local to an observation. A model with global latent variables needs the rescaling plate;
    without it the prior is counted once per minibatch, and a warning is issued.

    Pyro's global parameter store and torch's random states stay unchanged.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.inference.training import fit
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", 100, subsample_size=len(x)):
    ...         pyro.sample("x", dist.Normal(mean, 1.0), obs=x)
    >>> def guide(x):
    ...     loc = pyro.param("loc", torch.tensor(0.0))
    ...     pyro.sample("mean", dist.Normal(loc, 0.1))
    >>> x = 3.0 + torch.randn(100, generator=torch.Generator().manual_seed(0))
    >>> result = fit(model, guide, ELBO(), x, num_epochs=40, batch_size=10,
    ...              optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    >>> result.num_steps, bool(abs(result.parameters["store.loc"] - x.mean()) < 0.3)
    (400, True)
    """
    if (num_epochs is None) == (num_steps is None):
        raise SettingsError("give exactly one of num_epochs and num_steps")
    if gradient_clipping is not None:
        gradient_clipping = real_number("gradient_clipping", gradient_clipping, "(0, inf)")
    if precision not in ("float32", "bfloat16"):
        raise SettingsError(f'precision must be "float32" or "bfloat16", not {precision!r}')
    if patience is not None and validation is None:
        raise SettingsError("patience needs validation data; give validation=...")
    if validation_objective is not None and validation is None:
        raise SettingsError("validation_objective needs validation data; give validation=...")
    if validation_objective is not None and not hasattr(validation_objective, "differentiable_loss"):
        raise SettingsError(
            "validation_objective must be one of bayeskit.inference.objectives or a pyro.infer.ELBO, not "
            f"{validation_objective!r:.80}"
        )
    plan = TrainingPlan(
        num_epochs=None if num_epochs is None else whole_number("num_epochs", num_epochs, least=1),
        num_steps=None if num_steps is None else whole_number("num_steps", num_steps, least=1),
        batch_size=None if batch_size is None else whole_number("batch_size", batch_size, least=1),
        optimizer=optimizer,
        schedule=schedule,
        gradient_clipping=gradient_clipping,
        patience=None if patience is None else whole_number("patience", patience, least=1),
        validation_objective=validation_objective,
        seed=whole_number("seed", seed),
        compile=compile if isinstance(compile, bool) else tuple(compile),
        precision=precision,
        ranks=ranks or Ranks(),
        on_ranks_device=ranks is not None,
        control=Control(checkpoint, checkpoint_seconds, time_budget, progress),
    )
    (bare_model, bare_guide), state = _apart(model, guide)
    outcome = train(bare_model, bare_guide, objective, data, validation, plan, state)
    with _in_store(state):
        values = {name: _constrained(name, x, bare_model, bare_guide) for name, x in outcome.parameters.items()}
    known = {id(p) for module in (_owner(bare_model), _owner(bare_guide)) if module for p in module.parameters()}
    loose = any(id(p) not in known for p in state["params"].values())
    return Fit(
        model=_InStore(bare_model, state) if loose and not isinstance(bare_model, nn.Module) else bare_model,
        guide=_InStore(bare_guide, state) if loose and not isinstance(bare_guide, nn.Module) else bare_guide,
        parameters=outcome.parameters,
        losses=torch.tensor(outcome.history.losses, dtype=torch.float64),
        epoch_losses=torch.tensor(outcome.history.epoch_losses(), dtype=torch.float64),
        validation_losses=torch.tensor(outcome.history.validation, dtype=torch.float64),
        epoch_ends=tuple(outcome.history.epoch_ends),
        ending=outcome.ending,
        best_epoch=outcome.best_epoch,
        seconds=outcome.seconds,
        settings={"objective": type(objective).__name__, "seed": plan.seed, "precision": precision},
        values={name.removesuffix("_unconstrained"): x for name, x in values.items()},
    )


def _constrained(name: str, parameter: Tensor, model: Any, guide: Any) -> Tensor:
    """Return the constrained value of a parameter."""
    kind, _, rest = name.partition(".")
    if kind == "store":
        return pyro.get_param_store()[rest].detach().clone()
    if not rest.endswith("_unconstrained"):
        return parameter
    path, _, own = rest.removesuffix("_unconstrained").rpartition(".")
    module = _owner(model if kind == "model" else guide)
    value: Tensor = getattr(module.get_submodule(path), own)  # type: ignore[union-attr]
    return value.detach().clone()


def _apart(*functions: Callable[..., Any]) -> tuple[list[Callable[..., Any]], Any]:
    """Separate functions returned by an earlier fit from their parameters."""
    state: dict[str, dict[str, Any]] = {"params": {}, "constraints": {}}
    for function in functions:
        if isinstance(function, _InStore):
            for name, values in state.items():
                values.update(function.state[name])
    return [f.function if isinstance(f, _InStore) else f for f in functions], state
