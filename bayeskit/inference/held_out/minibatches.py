"""Data taken in minibatches, and what one run of model and guide tells of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from bayeskit._torch import validation_kept
from bayeskit.errors import DataError, ModelError, SettingsError
from bayeskit.inference.objectives.drawing import plate_nesting, run_particles
from bayeskit.inference.objectives.layout import Layout
from bayeskit.inference.objectives.particles import Particles
from bayeskit.inference.objectives.sites import Compatibility

BATCH_SIZE = 100


@dataclass(frozen=True)
class Minibatches:
    """Arguments of model and guide, taken apart along the data.

    Attributes
    ----------
    args : tuple
        All data.
    num_items : int
    batch_size : int
    nesting : int
        Dimensions of the plates of model and guide.
    data_plate : str or None
    particles : Particles
        One draw of the guide for each datum.
    """

    args: tuple[Any, ...]
    num_items: int
    batch_size: int
    nesting: int
    data_plate: str | None
    particles: Particles

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        batch_size: int | None,
        data_plate: str | None,
    ) -> Minibatches:
        """Run guide and model once, which checks both, and see where the data are.

        Parameters
        ----------
        model, guide : callable
        args : tuple
            What both are called with.
        batch_size : int, optional
            By default 100 where a tensor is the only argument and the data are its rows, and all data elsewhere.
        data_plate : str, optional

        Raises
        ------
        ModelError
            If no plate holds all sites, or several do, the model takes a random minibatch itself, or a latent site of
            model or guide is scaled.
        GuideError
            If guide and model do not fit together.
        DataError
            If ``batch_size`` is given and no argument has the data as leading dimension.
        """
        nesting = plate_nesting(model, guide, args, {})
        particles = run(model, guide, args, 1, nesting, data_plate, Compatibility())
        num_items = _num_items(particles.layout)
        _refuse_scales(particles)
        columns = [x for x in args if _is_column(x, num_items)]
        if batch_size is None:
            batch_size = BATCH_SIZE if len(args) == 1 and columns else num_items
        elif batch_size < num_items and not columns:
            raise DataError(
                f"no argument of the model is a tensor with the {num_items} data as leading dimension, so they cannot "
                "be taken in minibatches; leave batch_size out, or give the data as such an argument"
            )
        return cls(args, num_items, min(batch_size, num_items), nesting, data_plate, particles)

    def __iter__(self) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        if self.batch_size >= self.num_items:
            yield slice(0, self.num_items), self.args
            return
        for start in range(0, self.num_items, self.batch_size):
            rows = slice(start, min(start + self.batch_size, self.num_items))
            yield rows, tuple(x[rows] if _is_column(x, self.num_items) else x for x in self.args)


def run(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    num_particles: int,
    nesting: int,
    data_plate: str | None,
    compatibility: Compatibility | None = None,
) -> Particles:
    """Draw particles for each datum, without gradients."""
    with torch.no_grad():
        return run_particles(
            model,
            guide,
            args,
            {},
            num_particles=num_particles,
            nesting=nesting,
            data_plate=data_plate,
            compatibility=compatibility,
        )


@contextmanager
def already_validated() -> Iterator[None]:
    """Leave out checks that the first run has made, and put torch's and Pyro's settings back."""
    with validation_kept(), pyro.validation_enabled(False):
        yield


def _is_column(x: Any, num_items: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == num_items


def _num_items(layout: Layout) -> int:
    if len(layout.plates) != 1:
        found = ", ".join(repr(name) for name in layout.plates)
        raise ModelError(
            (f"the plates {found} hold all sites" if found else "no plate holds all sites of model and guide")
            + ", so there is no likelihood of each datum; put the latent variables of each datum and its observation "
            "into one plate, or name it by data_plate"
        )
    ((name, plate),) = layout.plates.items()
    if plate.size != plate.full_size:
        raise ModelError(
            f"the plate {name!r} takes {plate.size} of {plate.full_size} items; let the model take all items that it "
            "is called with"
        )
    return plate.size


def _refuse_scales(particles: Particles) -> None:
    """Refuse latent sites that count for more or less than their density, as scales for training make them."""
    for what, sites in (("model", particles.model_sites), ("guide", particles.guide_sites)):
        for name, site in sites.items():
            if not site["is_observed"] and bool((torch.as_tensor(site["scale"]) != particles.layout.scale).any()):
                raise ModelError(
                    f"site {name!r} of the {what} is scaled, or in a plate that takes some of its items, so that its "
                    "term is no log density; leave poutine.scale out where nothing is trained, and let plates take all "
                    "items"
                )


def positive(**settings: int | None) -> None:
    """Refuse settings that are no whole number of at least one; None is passed over."""
    for name, value in settings.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingsError(f"{name} must be a whole number of at least 1, not {value!r}")


def require_acceptance(target_acceptance: float) -> None:
    """Refuse a rate of acceptance that cannot be aimed at."""
    if not 0 < target_acceptance < 1:
        raise SettingsError(f"target_acceptance must lie between 0 and 1, not {target_acceptance}")
