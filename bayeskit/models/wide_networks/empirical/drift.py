"""How much the tangent kernel of a finite network moves while it is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import grad

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import LossError, ModelError, SettingsError
from bayeskit.models.wide_networks.empirical.descent import (
    as_targets,
    descent_rate,
    flat_outputs,
    largest_eigenvalue,
    relative_change,
)
from bayeskit.models.wide_networks.empirical.kernel import empirical_ntk
from bayeskit.models.wide_networks.empirical.power_law import PowerLaw, fit_power_law
from bayeskit.models.wide_networks.empirical.random_networks import Parameters, RandomNetworks, random_networks
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.inputs import check_inputs
from bayeskit.models.wide_networks.regression.kernels import refuse_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class NTKDrift:
    """The path of one network's tangent kernel; made by :func:`ntk_drift` and :func:`ntk_drift_of_snapshots`.

    Attributes
    ----------
    steps : tuple of int
        Of training, or the numbers of the snapshots.
    relative_change : Tensor
        Frobenius norm of the kernel's change since the first, by that of the first, ``(T,)``. The kernel is that of
        all pairs of inputs and outputs.
    loss : Tensor or None
        Half the sum of squared residuals, ``(T,)``; None for snapshots.
    """

    steps: tuple[int, ...]
    relative_change: Tensor
    loss: Tensor | None = None

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a step."""
        table = {"step": list(self.steps), "relative_change": self.relative_change.tolist()}
        return pd.DataFrame(table if self.loss is None else table | {"loss": self.loss.tolist()})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the relative change against the step.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes.
        """
        from matplotlib.figure import Figure

        from bayeskit._plots import BLUE

        if ax is None:
            ax = Figure(figsize=(5.0, 3.6), layout="constrained").subplots()
        ax.plot(self.steps, self.relative_change.tolist(), color=BLUE, marker="o", markersize=3)
        ax.set_xlabel("snapshot" if self.loss is None else "step")
        ax.set_ylabel("relative change of the NTK")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        return ax

    def __repr__(self) -> str:
        when = f"over {len(self.steps)} snapshots" if self.loss is None else f"in {self.steps[-1]} steps"
        fall = "" if self.loss is None else f", the loss from {float(self.loss[0]):.3g} to {float(self.loss[-1]):.3g}"
        return f"NTK changed by {float(self.relative_change[-1]):.3g} of its size {when}{fall}"


@dataclass(frozen=True)
class DriftAgainstWidth:
    """Changes of the tangent kernels of random networks that were trained; made by :func:`ntk_drift_against_width`.

    Attributes
    ----------
    widths : tuple of int or None
        None for the module's own.
    relative_change : Tensor
        Frobenius norm of the change by that of the first kernel, ``(W, num_networks)``. As for :func:`ntk_drift`, the
        kernel is that of all pairs of inputs and outputs.
    loss : Tensor
        Half the sum of squared residuals, before and after, ``(W, num_networks, 2)``.
    """

    widths: tuple[int | None, ...]
    relative_change: Tensor
    loss: Tensor

    @property
    def typical(self) -> Tensor:
        """Geometric mean of the change over networks, ``(W,)``."""
        return self.relative_change.log().mean(1).exp()

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo error of the typical change, ``(W,)``."""
        logarithms = self.relative_change.log()
        return self.typical * logarithms.std(1) / logarithms.shape[1] ** 0.5

    @cached_property
    def rate(self) -> PowerLaw:
        """The power of the width by which the typical change falls, with its confidence interval.

        Raises
        ------
        SettingsError
            If there is one width only, beside the module's own.
        """
        rows = [row for row, width in enumerate(self.widths) if width is not None]
        if len(rows) < 2:
            raise SettingsError("a rate needs two widths at least, beside the module's own")
        return fit_power_law(
            torch.tensor([self.widths[row] for row in rows], dtype=torch.float64),
            self.typical[rows, None],
            self.standard_error[rows].square()[:, None, None],
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a width."""
        loss = self.loss.mean(1)
        return pd.DataFrame(
            {
                "width": list(self.widths),
                "relative_change": self.typical.tolist(),
                "standard_error": self.standard_error.tolist(),
                "first_loss": loss[:, 0].tolist(),
                "last_loss": loss[:, 1].tolist(),
            }
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the typical change against the width, with 95 % bars, above a line that falls like 1/width.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes.
        """
        from matplotlib.figure import Figure

        from bayeskit._plots import BLUE, GREY

        if ax is None:
            ax = Figure(figsize=(5.0, 3.6), layout="constrained").subplots()
        table = self.to_pandas().dropna()
        ax.errorbar(
            table["width"], table["relative_change"], 1.96 * table["standard_error"], color=BLUE, marker="o", capsize=2
        )
        if len(table):
            line = table["relative_change"].iloc[0] * table["width"].iloc[0] / table["width"]
            ax.plot(table["width"], line, color=GREY, linestyle="--", linewidth=1.0, zorder=0, label="1/width")
            ax.legend(frameon=False)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("width")
        ax.set_ylabel("relative change of the NTK")
        ax.grid(alpha=0.25)
        return ax

    def __repr__(self) -> str:
        lines = [f"change of the NTK of {self.relative_change.shape[1]} trained networks a width"]
        if len(self.widths) - (None in self.widths) > 1:
            lines.append(f"  {self.rate}")
        for width, value, error in zip(self.widths, self.typical.tolist(), self.standard_error.tolist(), strict=True):
            name = "the module's own width" if width is None else f"width {width}"
            lines.append(f"  {name}: {value:.3g} +- {error:.2g}")
        return "\n".join(lines)


def ntk_drift(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    learning_rate: float | None = None,
    num_steps: int = 100,
    num_records: int = 11,
) -> NTKDrift:
    r"""Train a copy of a module by gradient descent, and follow its tangent kernel.

    Parameters
    ----------
    module : torch.nn.Module
        Any, from its present weights, in evaluation mode; it is not changed.
    x : Tensor
        Inputs, ``(n, ...)``: training data, and where the kernel is looked at.
    y : Tensor
        What outputs should be, ``(n, outputs)``, or ``(n,)`` where there is one.
    learning_rate : float, optional
        For half the *sum* of squared residuals; by default half of one over the first kernel's largest eigenvalue.
        Descent is stable below two over it.
    num_steps : int, default 100
    num_records : int, default 11
        How often the kernel is computed, the first and last time included.

    Returns
    -------
    NTKDrift

    Raises
    ------
    ShapeError, DataError
        If inputs do not fit the module, or targets do not fit outputs, or are not finite.
    ModelError
        If no parameter requires gradients, or outputs at one input depend on others or on chance.
    LossError
        If training diverges.

    References
    ----------
    Lee, J., Xiao, L., Schoenholz, S. S., Bahri, Y., Novak, R., Sohl-Dickstein, J., Pennington, J. (2019). Wide neural
    networks of any depth evolve as linear models under gradient descent. Advances in Neural Information Processing
    Systems 32.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> x = torch.linspace(-1.0, 1.0, 5)[:, None]
    >>> bool(ntk_drift(kernel.network(1024), x, x.square()).relative_change[-1] < 0.1)
    True
    """
    num_steps, num_records = whole_number("num_steps", num_steps, 1), whole_number("num_records", num_records, 2)
    model = copy.deepcopy(module).eval()
    first = empirical_ntk(model, x)
    y = as_targets(y, flat_outputs(model, x).detach())
    rate = descent_rate(learning_rate, lambda: largest_eigenvalue(first))
    trained = [p for p in model.parameters() if p.requires_grad]
    recorded = sorted({round(i * num_steps / (num_records - 1)) for i in range(num_records)})
    changes, losses = [], []
    with torch.enable_grad(), one_thread():
        for step in range(num_steps + 1):
            loss = 0.5 * (flat_outputs(model, x) - y).square().sum()
            if not bool(torch.isfinite(loss)):
                raise LossError(f"the loss of step {step} is not finite; lower learning_rate, now {rate:.3g}")
            if step in recorded:
                changes.append(relative_change(empirical_ntk(model, x), first))
                losses.append(loss.detach())
            if step < num_steps:
                # Parameters that outputs do not depend on stay where they are.
                gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        parameter.sub_(rate * gradient)
    return NTKDrift(tuple(recorded), torch.stack(changes), torch.stack(losses))


def ntk_drift_of_snapshots(module: nn.Module, x: Tensor, snapshots: Sequence[Mapping[str, Tensor]]) -> NTKDrift:
    """Follow the tangent kernel of a network along snapshots of its training, however it was trained.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode; it is not changed.
    x : Tensor
        Inputs where the kernel is looked at, ``(n, ...)``.
    snapshots : sequence of state dicts
        The first is what others are compared with.

    Returns
    -------
    NTKDrift

    Raises
    ------
    SettingsError
        If there are none.
    ModelError
        If one is of another module.

    Examples
    --------
    >>> import copy, torch
    >>> from torch import nn
    >>> module = nn.Linear(2, 1)
    >>> snapshots = [copy.deepcopy(module.state_dict()), {name: 2 * w for name, w in module.state_dict().items()}]
    >>> ntk_drift_of_snapshots(module, torch.eye(2), snapshots).relative_change.tolist()  # linear: no drift
    [0.0, 0.0]
    """
    if not snapshots:
        raise SettingsError("snapshots must have one entry at least")
    model = copy.deepcopy(module).eval()
    kernels = []
    for i, snapshot in enumerate(snapshots):
        try:
            model.load_state_dict(dict(snapshot))
        except RuntimeError as error:
            raise ModelError(f"snapshot {i} does not fit {type(module).__name__}: {error}") from error
        kernels.append(empirical_ntk(model, x))
    changes = torch.stack([relative_change(kernel, kernels[0]) for kernel in kernels])
    return NTKDrift(tuple(range(len(kernels))), changes)


def ntk_drift_against_width(
    kernel: InfiniteWidth,
    x: Tensor,
    y: Tensor,
    widths: Sequence[int | None] = (16, 32, 64, 128),
    num_networks: int = 64,
    *,
    learning_rate: float | None = None,
    num_steps: int = 100,
    seed: int = 0,
) -> DriftAgainstWidth:
    r"""Train random networks of several widths, and compare how much their tangent kernels move.

    With smooth activations the change falls like one over the width: each weight moves by one over its square root,
    and of a sum over units the first-order changes, which have random signs, add up no further than the second-order
    ones. With a kink, as in ReLU, it falls more slowly, by a power between one half and three quarters: a share of one
    over the square root of the width crosses the kink, and as units that are off do not feel a datum, those that are
    switched on and off do not cancel.

    Parameters
    ----------
    kernel : InfiniteWidth
        Networks have the law of ``kernel.network(width)``.
    x : Tensor
        Inputs, ``(n, ...)``. Networks are in its precision.
    y : Tensor
        What outputs should be, ``(n, outputs)``, or ``(n,)`` where there is one.
    widths : sequence of int or None
        Of all layers but the last; None for the module's own, of which the rate knows nothing.
    num_networks : int, default 64
        At each width; all are trained at once.
    learning_rate : float, optional
        For half the sum of squared residuals; by default half of one over the largest eigenvalue of the tangent
        kernel of infinite width, so that all widths train for the same time.
    num_steps : int, default 100
    seed : int, default 0

    Returns
    -------
    DriftAgainstWidth

    Raises
    ------
    SettingsError, ShapeError, DataError
        If settings, inputs or targets do not fit.
    ModelError
        If the kernel is a torch module, or its networks do not end in layers with weights or draw noise of their own.
    LossError
        If the training of a network diverges.

    References
    ----------
    Dyer, E., Gur-Ari, G. (2020). Asymptotics of wide networks from Feynman diagrams. International Conference on
    Learning Representations.

    Huang, J., Yau, H.-T. (2020). Dynamics of deep neural networks and neural tangent hierarchy. International
    Conference on Machine Learning.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> x = torch.linspace(-1.0, 1.0, 5)[:, None]
    >>> narrow, wide = ntk_drift_against_width(kernel, x, x.square(), widths=(16, 256)).typical
    >>> bool(4 * wide < narrow)
    True
    """
    num_networks = whole_number("num_networks", num_networks, least=2)
    num_steps = whole_number("num_steps", num_steps, least=1)
    given = {None if width is None else whole_number("widths", width, least=1) for width in widths}
    if not given:
        raise SettingsError("widths must have one entry at least")
    refuse_module(kernel)
    x = check_inputs(x, "x", kernel.graph.num_axes).detach()
    changes, losses = [], []
    found = sorted(given, key=lambda width: width or 0)
    for width in found:
        networks = random_networks(kernel, width, x.dtype)
        rate = descent_rate(learning_rate, lambda limit=networks.limit: largest_eigenvalue(limit.ntk(x.double())))  # type: ignore[misc]
        generator = new_generator(seed, x.device, stream=f"trained networks of width {width}")
        with one_thread():
            change, loss = _trained(networks, x, y, num_networks, rate, num_steps, generator)
        if not bool(torch.isfinite(loss).all() and torch.isfinite(change).all()):
            raise LossError(
                f"training diverges for a network of width {width}; lower learning_rate, now {rate:.3g}, or leave out "
                "small widths"
            )
        changes.append(change)
        losses.append(loss)
    return DriftAgainstWidth(tuple(found), torch.stack(changes), torch.stack(losses))


def _trained(
    networks: RandomNetworks,
    x: Tensor,
    y: Tensor,
    num_networks: int,
    rate: float,
    num_steps: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return relative changes, ``(num_networks,)``, and losses before and after, ``(num_networks, 2)``."""
    changes, losses = [], []
    for first in range(0, num_networks, chunk := networks.chunk(x, all_outputs=True)):
        parameters = networks.draw(min(chunk, num_networks - first), generator)
        fixed = {name: value for name, value in parameters.items() if name not in networks.trained}
        moving = {name: parameters[name] for name in networks.trained}
        targets = as_targets(y, networks.outputs(parameters, x)[0])

        def loss(moving: Parameters, fixed: Parameters, targets: Tensor) -> Tensor:
            return 0.5 * (networks.outputs({**moving, **fixed}, x) - targets).square().sum((1, 2))

        def total(moving: Parameters, fixed: Parameters, targets: Tensor) -> Tensor:
            return loss(moving, fixed, targets).sum()  # networks do not know of one another

        before = networks.full_ntk(parameters, x).double(), loss(moving, fixed, targets)
        for _ in range(num_steps):
            gradients = grad(total)(moving, fixed, targets)
            moving = {name: value - rate * gradients[name] for name, value in moving.items()}
        after = networks.full_ntk({**moving, **fixed}, x).double(), loss(moving, fixed, targets)
        changes.append((after[0] - before[0]).norm(dim=(1, 2)) / before[0].norm(dim=(1, 2)))
        losses.append(torch.stack([before[1], after[1]], 1).double())
    return torch.cat(changes), torch.cat(losses)
