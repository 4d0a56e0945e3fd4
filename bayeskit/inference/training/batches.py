"""Minibatches: what model and guide are called with, epoch by epoch."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._torch import global_stream, new_generator
from bayeskit.distributed import Ranks
from bayeskit.errors import DataError


class Batch(NamedTuple):
    """Arguments of one call of model and guide, and which rows of the data they hold, where that is known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Tensor | None = None
    num_data: int = 0

    @property
    def num_items(self) -> int:
        """Length of the leading dimension; 1 where there is none."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor) and x.dim()]
        return len(tensors[0]) if tensors else 1

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``."""

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        args, kwargs = tuple(moved(x) for x in self.args), {name: moved(x) for name, x in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs)


def as_batch(value: Any) -> Batch:
    """Return the arguments that a batch stands for: a tuple or list is spread, a mapping gives keywords."""
    if isinstance(value, Mapping):
        return Batch((), dict(value))
    return Batch(tuple(value), {}) if isinstance(value, (tuple, list)) else Batch((value,), {})


class Batches:
    """The minibatches of every epoch, the same whenever they are asked for."""

    @property
    @abstractmethod
    def num_items(self) -> int | None:
        """Number of items of an epoch, if it is known."""

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's batches of an epoch, the first ``start`` of them left out."""

    @abstractmethod
    def all(self) -> Iterator[Batch]:
        """Yield all items in their order."""

    def num_batches(self) -> int | None:
        """Return the number of batches of an epoch, if it is known."""
        return None

    def fingerprint(self) -> str:
        """Return what tells one data set from another, as far as that is known beforehand."""
        return "iterable"


class Columns(Batches):
    """Tensors whose leading dimension is the items, shuffled anew in each epoch.

    Parameters
    ----------
    value : Tensor, or tuple or mapping of them
    batch_size : int, optional
        Over all processes. All items by default, in their order.
    ranks : Ranks
    seed : int

    Raises
    ------
    DataError
        If the tensors are of different length, or there are no items.
    SettingsError
        If the batches cannot be shared by the processes.
    """

    def __init__(self, value: Any, batch_size: int | None, ranks: Ranks, seed: int) -> None:
        self._all, self._seed = as_batch(value), seed
        lengths = {len(x) if x.dim() else 0 for x in (*self._all.args, *self._all.kwargs.values())}
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"the leading dimensions of the data must be one number of items, not {sorted(lengths)}; give tensors "
                "of shape (items, ...), and other arguments to the model itself"
            )
        self._count = lengths.pop()
        self._whole = batch_size is None and ranks.world_size == 1
        self._batch_size = self._count - self._count % ranks.world_size if batch_size is None else batch_size
        device = next(iter((*self._all.args, *self._all.kwargs.values()))).device
        self._ranks = Ranks(ranks.rank, ranks.world_size, device)
        next(
            self._ranks.minibatches(self._count, self._batch_size, seed=seed)
        )  # refuses a batch size that does not fit

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self._count

    def num_batches(self) -> int:
        """Return the number of batches of an epoch."""
        return self._count // self._batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's batches of an epoch; items that do not fill a last one are left out of it."""
        if self._whole:
            if start == 0:
                yield self._all
            return
        order = self._ranks.minibatches(self._count, self._batch_size, seed=self._seed, epoch=number)
        for rows in islice(order, start, None):
            yield self._taken(rows)._replace(rows=rows, num_data=self._count)

    def all(self) -> Iterator[Batch]:
        """Yield all items in their order; the last batch may be smaller."""
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
    """Batches that somebody else makes, such as a ``DataLoader``; each epoch iterates anew.

    Whatever it draws from torch's global stream follows from the seed and the epoch's number.
    """

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        if iter(source) is source:
            raise DataError(
                "the data are an iterator, which is used up after one epoch; give what it iterates over, such as a "
                "list or a DataLoader"
            )
        self._source, self._seed = source, seed

    @property
    def num_items(self) -> None:
        """Not known."""

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
            if position >= start:
                yield as_batch(_tensors(value))

    def all(self) -> Iterator[Batch]:
        """Yield the batches, always the same."""
        return self.epoch(0)


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
    """Return arrays as the tensors that they stand for, also where they are columns of a tuple or mapping."""
    if isinstance(data, tuple):
        return tuple(_tensors(x) for x in data)
    if isinstance(data, Mapping):
        return {name: _tensors(x) for name, x in data.items()}
    return as_numbers("data", data) if hasattr(data, "__array__") and not isinstance(data, Tensor) else data


def as_batches(data: Any, batch_size: int | None, ranks: Ranks, seed: int) -> Batches:
    """Return the minibatches of whatever a user gives as data.

    Raises
    ------
    DataError
        If it is neither tensors nor an iterable of batches.

    Examples
    --------
    >>> import torch
    >>> batches = as_batches(torch.arange(4.0), 2, Ranks(), 0)
    >>> [batch.num_items for batch in batches.epoch(0)]
    [2, 2]
    """
    if data is None:
        return Nothing()
    data = _tensors(data)
    if isinstance(data, list) and data and isinstance(data[0], (bool, int, float)):
        data = as_numbers("data", data)
    columns = data if isinstance(data, tuple) else data.values() if isinstance(data, Mapping) else (data,)
    if columns and all(isinstance(x, Tensor) for x in columns):
        return Columns(data, batch_size, ranks, seed)
    if isinstance(data, (tuple, Mapping)) or not isinstance(data, Iterable):
        raise DataError(
            f"data must be a tensor or array, a tuple or mapping of these, or an iterable of batches, not {data!r:.80}"
        )
    return Given(data, seed)
