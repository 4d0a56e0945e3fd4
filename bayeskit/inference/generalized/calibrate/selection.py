"""What a selector of the learning rate returns: the weight, what it aims at, and how far to rely on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.generalized.posterior import GibbsPosterior


class Curve(NamedTuple):
    """What a selector measured at each of several weights.

    Attributes
    ----------
    weights, values : Tensor
        Shape ``(g,)``.
    standard_errors : Tensor or None
        Shape ``(g,)``.
    label : str
        What the values are.
    """

    weights: Tensor
    values: Tensor
    standard_errors: Tensor | None
    label: str


@dataclass(frozen=True)
class Selection:
    """A learning rate, and what it was chosen for.

    Selectors aim at different targets: their weights need not agree, and are no estimates of one number.

    Attributes
    ----------
    weight : float
        The learning rate.
    target : str
        A sentence that names what the weight aims at.
    method : str
        Name of the selector.
    source : GibbsPosterior
        The posterior it was chosen for, whose own weight played no part.
    standard_error : float
        Of the weight, from simulation alone, given the data; zero where nothing is simulated, nan where unknown.
    diagnostics : dict
        What the selector measured on the way.
    warnings : tuple of str
        Assumptions that do not hold, each with its remedy.
    curve : Curve or None
        What was compared, where the weight was chosen from a grid.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> source = GibbsPosterior(dist.Normal(0.0, 9.0), losses.HalfSquared(), x)
    >>> chosen = Selection(0.25, "The variance of the minimiser.", "by_hand", source)
    >>> chosen
    Selection(weight=0.25, method='by_hand', target='The variance of the minimiser.')
    >>> chosen.posterior.weight
    0.25
    """

    weight: float
    target: str
    method: str
    source: GibbsPosterior = field(repr=False)
    standard_error: float = 0.0
    diagnostics: dict[str, Any] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()
    curve: Curve | None = field(default=None, repr=False)

    @property
    def trusted(self) -> bool:
        """Whether no assumption was found to fail."""
        return not self.warnings

    @property
    def posterior(self) -> GibbsPosterior:
        """The posterior with this weight."""
        return self.source.with_weight(self.weight)

    def plot(self, ax: Any = None) -> Any:
        """Plot what was compared against the weight, on a logarithmic axis, and return the axes of matplotlib.

        Raises
        ------
        SettingsError
            If the weight was not chosen from a grid, so that there is nothing to plot.
        """
        if self.curve is None:
            raise SettingsError(f"{self.method} computes its weight at once and compares no others; there is no curve")
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots()[1]
        weights, values, errors, label = self.curve
        ax.errorbar(weights.numpy(), values.numpy(), None if errors is None else errors.numpy(), marker="o")
        ax.axvline(self.weight, color="black", linestyle=":", label=f"chosen: {self.weight:.3g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel=label)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        error = f", standard_error={self.standard_error:.2g}" if self.standard_error > 0 else ""
        warned = f", warnings={list(self.warnings)}" if self.warnings else ""
        return f"Selection(weight={self.weight:.6g}{error}, method={self.method!r}, target={self.target!r}{warned})"
