"""Minibatches: the arguments of model and guide, epoch by epoch."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.arguments import arrays_as_tensors
from bayeskit._core.inputs import as_numbers
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.distributed import Ranks
from bayeskit.errors import DataError


class Batch(NamedTuple):
    """Arguments of one call of model and guide, with the row indices of the data if known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Tensor | None = None
    num_data: int = 0

    @property
    def num_rows(self) -> int:
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
    def num_data(self) -> int | None:
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
    def num_data(self) -> int:
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


class _Given(Batches):
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
    def num_data(self) -> None:
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


class _Nothing(Batches):
    """No data: model and guide are called without arguments."""

    @property
    def num_data(self) -> int:
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
        return _Nothing()
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
    return _Given(data, seed)
