"""Plots of draws: chains, ranks, pairs with divergences, energies, and the prior beside the posterior."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.inputs import unknown_name
from bayeskit._core.plots import BLUE, CHAIN_COLOURS, GREY, VERMILION, plot_prior_and_posterior, plot_rank, plot_trace
from bayeskit._logdensity.target import Target, require_target
from bayeskit.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["chains", "ranks", "pairs", "energy", "prior"]
_MOST, _MOST_PAIRS, _POINTS, _BINS, _PRIOR_DRAWS = 8, 5, 1500, 40, 4000


class PlottedDraws(Protocol):
    """What plots ask of draws."""

    @property
    def unconstrained(self) -> Tensor: ...

    @property
    def target(self) -> Target: ...

    @property
    def sites(self) -> dict[str, Tensor]: ...

    @property
    def sample_stats(self) -> dict[str, Tensor]: ...

    def values(self) -> dict[str, Tensor]: ...


class _Quantities(NamedTuple):
    """Scalar components of sites and the chains of each, ``(chains, draws)``."""

    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, draws: PlottedDraws, names: Sequence[str] | None, most: int) -> _Quantities:
        known = draws.target.has_density or draws.sites
        found = _components(draws.values() if known else {"u": draws.unconstrained}, draws)
        if names is None:
            return cls(dict(itertools.islice(found.items(), most)))
        chosen: dict[str, np.ndarray] = {}
        for name in [names] if isinstance(names, str) else names:
            whole = {key: x for key, x in found.items() if key == name or key.startswith(f"{name}[")}
            if not whole:
                raise unknown_name("site or component", name, list(found))
            chosen |= whole
        if not chosen:
            raise SettingsError("names is empty; name a site or a component, or leave names out")
        return cls(chosen)


def _components(sites: dict[str, Tensor], draws: PlottedDraws) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for site, value in sites.items():
        flat = value.detach().cpu().double().reshape(*value.shape[:2], -1).numpy()
        found |= {name: flat[..., i] for i, name in enumerate(draws.target.labels.of(site, value.shape[2:]))}
    return found


def plot_draws(draws: PlottedDraws, kind: Kind, names: Sequence[str] | None) -> Figure:
    """Return the figure of :meth:`bayeskit.Draws.plot`."""
    if kind not in _KINDS:
        raise SettingsError(f"kind must be one of {', '.join(map(repr, _KINDS))}, not {kind!r}")
    return _KINDS[kind](draws, names)


def _new(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _chains(draws: PlottedDraws, names: Sequence[str] | None) -> Figure:
    """Densities of each chain, and their paths."""
    quantities = _Quantities.of(draws, names, _MOST).values
    figure = _new(8.0, 0.4 + 1.5 * len(quantities))
    axes = figure.subplots(len(quantities), 2, squeeze=False, width_ratios=[1, 2])
    for (name, x), (left, right) in zip(quantities.items(), axes, strict=True):
        edges = _edges(x)
        for chain, colour in zip(x, itertools.cycle(CHAIN_COLOURS), strict=False):
            left.stairs(np.histogram(chain, edges, density=True)[0], edges, color=colour, linewidth=0.9)
        left.set_yticks([])
        left.set_ylim(bottom=0)
        left.set_xlabel(name)
        plot_trace(x, name, right)
        right.set_ylabel("")
        _mark(right, draws)
    return figure


def _edges(values: np.ndarray, bins: int = _BINS) -> np.ndarray:
    """Return edges of a histogram of the finite values, of some width also where these are equal."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    half = max(high - low, 1e-9 * max(abs(low), abs(high), 1e-300)) / 2
    return np.linspace((low + high) / 2 - half, (low + high) / 2 + half, bins + 1)


def _mark(ax: Axes, draws: PlottedDraws) -> None:
    """Mark draws that end a divergent transition on the axis of draws."""
    diverging = draws.sample_stats.get("diverging")
    if diverging is not None and bool(diverging.any()):
        at = diverging.cpu().any(0).nonzero().flatten().numpy()
        ax.plot(at, np.zeros(len(at)), "|", color=VERMILION, transform=ax.get_xaxis_transform(), clip_on=False)


def _ranks(draws: PlottedDraws, names: Sequence[str] | None) -> Figure:
    """Ranks of each chain among all, which are uniform where chains sample the same."""
    quantities = _Quantities.of(draws, names, _MOST).values
    return _grid(len(quantities), [lambda ax, n=n, x=x: plot_rank(x, n, ax) for n, x in quantities.items()])


def _grid(count: int, drawn: Sequence[Callable[..., object]]) -> Figure:
    columns = min(2, count)
    rows = -(-count // columns)
    figure = _new(7.0, 0.3 + 2.1 * rows)
    for ax, draw in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).flat, drawn):
        if draw is None:
            ax.set_axis_off()
        else:
            draw(ax)
    return figure


def _prior(draws: PlottedDraws, names: Sequence[str] | None) -> Figure:
    """Densities of prior and posterior."""
    target = require_target(draws)
    quantities = _Quantities.of(draws, names, _MOST).values
    u = target.sample_prior(_PRIOR_DRAWS, seed=0)
    prior = _components(target.constrain(u.unsqueeze(0), deterministic=True), draws)
    known = {name: x for name, x in quantities.items() if name in prior}
    if not known:
        raise SettingsError(f"the prior has no draws of {', '.join(quantities)}; name sites that are not summed out")
    return _grid(
        len(known),
        [
            lambda ax, n=n, x=x: plot_prior_and_posterior(prior[n].flatten(), x.flatten(), n, ax)
            for n, x in known.items()
        ],
    )


def _pairs(draws: PlottedDraws, names: Sequence[str] | None) -> Figure:
    """Draws of each pair of quantities, those of divergent transitions marked."""
    quantities = _Quantities.of(draws, names, _MOST_PAIRS).values
    if len(quantities) < 2:
        raise SettingsError(f"pairs need two quantities, and there is one, {next(iter(quantities))!r}; plot its chains")
    flat = {name: x.reshape(-1) for name, x in quantities.items()}
    diverging = draws.sample_stats.get("diverging", torch.zeros(draws.unconstrained.shape[:2])).bool()
    marked = diverging.flatten().cpu().numpy()
    shown = np.linspace(0, len(marked) - 1, min(_POINTS, len(marked))).astype(int)
    count = len(flat)
    figure = _new(1.2 + 1.6 * count, 0.8 + 1.6 * count)
    axes = figure.subplots(count, count, squeeze=False, sharex="col")
    for (row, below), (column, x) in itertools.product(enumerate(flat.items()), enumerate(flat.items())):
        ax = axes[row, column]
        if column > row:
            ax.set_axis_off()
        elif column == row:
            ax.stairs(np.histogram(x[1], _edges(x[1]))[0], _edges(x[1]), fill=True, color=BLUE, alpha=0.75)
            ax.set_yticks([])
        else:
            ax.plot(x[1][shown], below[1][shown], ".", color=BLUE, alpha=0.3, markersize=2)
            ax.plot(x[1][marked], below[1][marked], ".", color=VERMILION, markersize=4)
        if row == count - 1:
            ax.set_xlabel(x[0])
        if column == 0 and row > 0:
            ax.set_ylabel(below[0])
    return figure


def _energy(draws: PlottedDraws, names: Sequence[str] | None) -> Figure:
    """Energies beside their changes from draw to draw: where these are narrower, momenta explore slowly."""
    energy = draws.sample_stats.get("energy")
    if energy is None:
        raise SettingsError("these draws have no energies; Hamiltonian Monte Carlo has")
    values = energy.detach().cpu().double().numpy()
    changes = np.diff(values, axis=1).reshape(-1)
    fraction = (np.diff(values, axis=1) ** 2).mean(1) / values.var(1)
    centred = (values - values.mean(1, keepdims=True)).reshape(-1)
    figure = _new(6.0, 3.2)
    ax = figure.subplots()
    edges = _edges(np.concatenate([centred, changes]), 2 * _BINS)
    ax.stairs(
        np.histogram(centred, edges, density=True)[0], edges, fill=True, color=GREY, alpha=0.5, label="energy, centred"
    )
    ax.stairs(np.histogram(changes, edges, density=True)[0], edges, color=BLUE, linewidth=1.3, label="its changes")
    ax.set_title(f"E-BFMI from {fraction.min():.2f} to {fraction.max():.2f} by chain", fontsize="small")
    ax.set_yticks([])
    ax.set_xlabel("energy (nats)")
    ax.legend(frameon=False)
    return figure


_KINDS: dict[str, Callable[[PlottedDraws, Sequence[str] | None], Figure]] = {
    "chains": _chains,
    "ranks": _ranks,
    "pairs": _pairs,
    "energy": _energy,
    "prior": _prior,
}
