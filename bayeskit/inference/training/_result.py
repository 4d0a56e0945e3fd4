"""The result of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from bayeskit._core.compatibility import as_inference_data, to_datasets
from bayeskit._core.inputs import whole_number
from bayeskit._core.page import result_html
from bayeskit._core.plots import BLUE, ORANGE, SKY
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity.pyro_distributions import MendedDraws
from bayeskit.inference.objectives._drawing import plate_nesting
from bayeskit.inference.training._history import TrainingEnding
from bayeskit.inference.training._parameter_store import parameters_in_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DRAWS = "_draws"


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
    ending: TrainingEnding
    best_epoch: int | None
    seconds: float
    settings: dict[str, Any] = field(repr=False)
    values: dict[str, Tensor] = field(repr=False, default_factory=dict)

    def _repr_html_(self) -> str:
        facts = {"ending": self.ending, "seconds": f"{self.seconds:.1f}"}
        facts |= {name: str(x) for name, x in self.settings.items() if isinstance(x, str | int | float)}
        return result_html(str(self), facts=facts)

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
        with (
            parameters_in_store({"params": {}, "constraints": {}}),
            global_stream(generator),
            torch.no_grad(),
            poutine.block(),
        ):
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
