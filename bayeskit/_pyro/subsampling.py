"""A Pyro model whose likelihood is estimated from chosen rows of one plate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._pyro.density import PyroDensity
from bayeskit._pyro.reader import is_deterministic, is_enumerated
from bayeskit._tracing import UNTRACEABLE
from bayeskit.errors import DataError, ModelError, SettingsError, UnsupportedSiteError

_REMEDY = 'write "with pyro.plate(name, size, subsample_size=...) as rows" and index every observation with rows'


class Rows(Messenger):
    """Supply the rows of one plate, and note what stands inside and outside of it.

    It is entered inside the density's own messenger, so it meets each site first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plate: str | None = None
        self.indices: Tensor | None = None
        self.device = torch.device("cpu")
        self.sizes: dict[str, tuple[int, int | None]] = {}  # by plate: size, and what the model fixes it to
        self.local: set[str] = set()  # deterministic sites inside the plate
        self.enumerated: set[str] = set()
        self.outside: set[str] = set()  # enumerated and observed sites that the plate does not scale

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            self._supply(msg)
            return
        name = msg["name"]
        frame = next((f for f in msg["cond_indep_stack"] if self._is_subsampled(f)), None)
        deterministic = is_deterministic(msg)
        if frame is None:
            if is_enumerated(msg) or (msg["is_observed"] and not deterministic):
                self.outside.add(name)
        elif deterministic:
            self.local.add(name)
        elif not msg["is_observed"] and not is_enumerated(msg):
            raise UnsupportedSiteError(
                f"latent site {name!r} stands inside the subsampled plate {frame.name!r}, so a minibatch would see "
                "only some of its values; move it out of the plate, integrate it out, or sample with the full data"
            )
        if is_enumerated(msg):
            self.enumerated.add(name)
        if frame is not None and self.enumerated:
            # A sum over a discrete site must see plain probabilities; the estimate is scaled after the sum.
            msg["scale"] = msg["scale"] * frame.size / frame.full_size

    def _is_subsampled(self, frame: Any) -> bool:
        if frame.name == self.plate:
            return True
        return frame.full_size is not None and frame.full_size > frame.size

    def _supply(self, msg: Any) -> None:
        name, size, fixed = msg["name"], int(msg["fn"].size), msg["fn"].subsample_size
        if msg["value"] is not None:
            raise ModelError(
                f"plate {name!r} is given its own subsample, so no other rows can be supplied; give it subsample_size"
            )
        if fixed is not None and fixed > size:
            raise ModelError(f"plate {name!r} has subsample_size={fixed}, but only {size} rows; take at most {size}")
        self.sizes[name] = (size, fixed)
        if name == self.plate:
            msg["value"], msg["stop"] = self.indices, True
        elif fixed is not None and fixed < size:
            msg["value"], msg["stop"] = torch.arange(fixed, device=self.device), True


class SubsampledDensity:
    """A Pyro model as a density whose likelihood is estimated from rows of one plate.

    Every method but :meth:`sample_prior` takes and returns single (unbatched) vectors.

    Attributes
    ----------
    num_data : int
        Size ``N`` of the plate.
    batch_size : int
        Number of rows ``B`` that estimates take.
    fixed : bool
        Whether the model itself fixes ``B``, so that no other number of rows can be taken.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plate: str | None,
        batch_size: int | None,
        generator: torch.Generator,
    ) -> None:
        self._rows = rows = Rows()

        def on_rows(*args: Any, **kwargs: Any) -> None:
            with rows:
                model(*args, **kwargs)

        self._density = PyroDensity(on_rows if callable(model) else model, args, kwargs, generator)
        self.sites, self.dim = self._density.sites, self._density.dim
        self.dtype, self.device, self.data = self._density.dtype, self._density.device, self._density.data
        rows.device = self.device
        rows.plate = _choose_plate(rows.sizes, plate, batch_size)
        self.num_data, fixed = rows.sizes[rows.plate]
        self.fixed = fixed is not None and fixed < self.num_data
        self.batch_size = _choose_batch_size(rows.plate, self.num_data, fixed, batch_size)
        self._check_data()
        self._try_rows(generator)

    def _check_data(self) -> None:
        for tensor in self.data:
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise DataError(
                    f"a tensor of shape {tuple(tensor.shape)} in the model holds NaN; with minibatches, "
                    "drop the rows with missing data or impute them"
                )

    def _try_rows(self, generator: torch.Generator) -> None:
        """Run the model on the first rows, so that a model that ignores them is found out here."""
        self._rows.outside.clear()
        try:
            with self._at(self._first_rows()):
                self._density.joint(self._density.probe(generator))
        except ModelError:
            raise
        except UNTRACEABLE as error:
            raise ModelError(
                f"the model cannot be evaluated on {self.batch_size} rows of plate {self._rows.plate!r}: {error}; "
                f"{_REMEDY}"
            ) from error
        if self._rows.enumerated and self._rows.outside:
            names = ", ".join(sorted(map(repr, self._rows.outside)))
            raise UnsupportedSiteError(
                f"the model sums out {sorted(self._rows.enumerated)}, but {names} stand outside the subsampled plate "
                f"{self._rows.plate!r}; with summed-out sites, all of them and all observations must stand inside it"
            )

    def _first_rows(self) -> Tensor:
        return torch.arange(self.batch_size, device=self.device)

    @contextmanager
    def _at(self, indices: Tensor) -> Iterator[None]:
        self._rows.indices = indices
        try:
            yield
        finally:
            self._rows.indices = None

    def joint(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log prior and the estimated log likelihood at ``u`` ``(dim,)`` from rows ``(B,)``."""
        with self._at(rows):
            log_prior, log_likelihood = self._density.joint(u)
        if self._rows.enumerated:
            log_likelihood = log_likelihood * (self.num_data / rows.shape[0])
        return log_prior, log_likelihood

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return each site's constrained value; deterministic sites inside the plate are left out."""
        with self._at(self._first_rows()):
            values = self._density.values(u, deterministic)
        return {name: value for name, value in values.items() if name not in self._rows.local}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector of one set of constrained values."""
        with self._at(self._first_rows()):
            return self._density.vector(values)

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained| at one vector ``u``, which no row changes."""
        with self._at(self._first_rows()):
            return self._density.log_jacobian(u)

    @property
    def improper_sites(self) -> tuple[str, ...]:
        """Sites whose prior is flat or masked."""
        return self._density.improper_sites

    @property
    def can_sample_prior(self) -> bool:
        """Whether what the sites draw follows their density."""
        return not self.improper_sites

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw vectors from the prior, shape ``(num_draws, dim)``."""
        with self._at(self._first_rows()):
            return self._density.prior_draws(num_draws, generator, batched=True)


def _choose_plate(sizes: dict[str, tuple[int, int | None]], plate: str | None, batch_size: int | None) -> str:
    subsampled = [name for name, (size, fixed) in sizes.items() if fixed is not None and fixed < size]
    known = ", ".join(map(repr, sizes)) or "none"
    if len(subsampled) > 1:
        raise ModelError(f"plates {subsampled} all subsample their data; only one may")
    if plate is not None:
        if plate not in sizes:
            raise ModelError(f"the model has no plate {plate!r}; it has {known}")
        if subsampled and plate != subsampled[0]:
            raise ModelError(
                f"plate {subsampled[0]!r} subsamples its data, so minibatches cannot be taken of {plate!r}"
            )
        return plate
    said = subsampled or [name for name, (_, fixed) in sizes.items() if fixed is not None]
    if len(said) == 1:
        return said[0]
    if not sizes:
        raise ModelError(f"the model has no plate to take minibatches from; {_REMEDY}")
    if batch_size is None:
        raise ModelError(f"no plate of the model subsamples its data (plates: {known}); {_REMEDY}, or give batch_size")
    if len(sizes) > 1:
        raise ModelError(f"the model has the plates {known}; say with plate=... which one minibatches are taken of")
    return next(iter(sizes))


def _choose_batch_size(plate: str, num_data: int, fixed: int | None, batch_size: int | None) -> int:
    if fixed is not None and batch_size is not None and fixed != batch_size:
        raise SettingsError(
            f"plate {plate!r} has subsample_size={fixed}, but batch_size={batch_size}; "
            "make them equal, or call the model with subsample_size=None"
        )
    chosen = batch_size if fixed is None else fixed
    if chosen is None:
        raise ModelError(f"plate {plate!r} does not subsample its data; give batch_size")
    if not 1 <= chosen <= num_data:
        raise SettingsError(f"batch_size must lie between 1 and the {num_data} rows of plate {plate!r}, not {chosen}")
    return chosen
