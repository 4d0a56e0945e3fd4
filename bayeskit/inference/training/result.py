"""What training returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import pyro
import torch
import xarray as xr
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from bayeskit._arviz import as_inference_data, to_datasets
from bayeskit._plots import BLUE, ORANGE, SKY
from bayeskit._pyro.draws import MendedDraws
from bayeskit._settings import whole_number
from bayeskit._torch import global_stream, new_generator
from bayeskit.inference.objectives.drawing import plate_nesting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ending = Literal["finished", "early stopping", "time budget", "interrupted"]
_DRAWS = "_draws"


class InStore:
    """A function of ``pyro.param`` statements together with their values, apart from Pyro's global store."""

    def __init__(self, function: Callable[..., Any], state: Any) -> None:
        self.function, self.state = function, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on its own parameters."""
        with pyro.get_param_store().scope(self.state):
            return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"InStore({getattr(self.function, '__name__', self.function)}: {', '.join(self.state['params'])})"


@dataclass(frozen=True)
class Fit:
    """A trained model and guide, and how they came about.

    Attributes
    ----------
    model, guide : callable
        Modules are those that were given, now trained. A function whose parameters came from ``pyro.param`` is
        returned together with their values, so that calling it does not need Pyro's global store.
    parameters : dict of Tensor
        Unconstrained parameters by name.
    values : dict of Tensor
        The same as model and guide see them, within their constraints.
    losses : Tensor
        Loss of each step, for each datum, ``(steps,)``.
    epoch_losses : Tensor
        Mean over the steps of each epoch, ``(epochs,)``.
    validation_losses : Tensor
        Loss of the validation data after each epoch, for each datum, ``(epochs,)``; empty without such data.
    epoch_ends : tuple of int
        Number of steps taken by the end of each epoch.
    ending : str
        ``"finished"``, ``"early stopping"``, ``"time budget"`` or ``"interrupted"``.
    best_epoch : int or None
        The epoch whose parameters were restored at the end, counted from zero.
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
            What model and guide are called with, such as the data whose codes are asked for.
        seed : int, default 0

        Returns
        -------
        dict of Tensor
            By site, ``(num_draws, *shape)``.

        Raises
        ------
        SettingsError
            If ``num_draws`` is not at least 1.
        """
        num_draws = whole_number("num_draws", num_draws, least=1)
        generator = new_generator(seed, stream="guide draws")
        store = pyro.get_param_store().scope()  # modules would leave their parameters in the global one
        with global_stream(generator), torch.no_grad(), poutine.block(), store:
            single = _latent(self.guide, args, kwargs)
            nesting = plate_nesting(self.guide, self.guide, args, kwargs)
            many = _latent(pyro.plate(_DRAWS, num_draws, dim=-nesting - 1)(self.guide), args, kwargs)
            return {name: many[name].reshape(num_draws, *value.shape) for name, value in single.items()}

    def to_arviz(self, draws: dict[str, Tensor] | None = None) -> Any:
        """Return the loss history for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Parameters
        ----------
        draws : dict of Tensor, optional
            What :meth:`sample_posterior` returned, to become group ``posterior`` with one chain.

        Returns
        -------
        InferenceData or DataTree
            Group ``optimization`` holds ``loss`` over ``step`` and ``epoch_loss`` and, if there were validation
            data, ``validation_loss`` over ``epoch``.
        """
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
        """Plot the loss of each step, the mean of each epoch and the validation loss.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes of ``pyplot``.
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
        # The first steps from random parameters would flatten everything that follows.
        late = self.losses[self.num_steps // 10 :]
        if len(late) > 20:
            low, high = float(late.min()), float(late.max())
            ax.set_ylim(low - 0.05 * (high - low) - 1e-9, high + 0.05 * (high - low) + 1e-9)
        ax.set_xlabel("step")
        ax.set_ylabel("loss for each datum (nats)")
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
