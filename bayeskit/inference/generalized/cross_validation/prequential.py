"""The prequential curve: each datum predicted from those before it, whose log densities add up to the log evidence."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._settings import whole_number
from bayeskit._statistics import replicates_log_mean_error
from bayeskit._torch import new_generator
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.generalized.cross_validation.data_particles import LOWEST, Carriage, Particles, from_prior
from bayeskit.inference.generalized.cross_validation.weighted_data import WeightedData
from bayeskit.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_POPULATIONS = 8
MAX_RELATIVE_SPREAD = 0.7
MIN_ACCEPTANCE = 0.3


@dataclass(frozen=True, eq=False)
class Prequential:
    """Log predictive densities of data that come one by one, in one order or several.

    Attributes
    ----------
    orders : Tensor
        Shape ``(q, n)``: which datum comes when.
    log_predictive : Tensor
        Shape ``(q, n)``: that of the datum that comes ``k``-th, given those before it, in nats.
    standard_error : Tensor
        Monte Carlo standard error of each, ``(q, n)``.
    cumulative : Tensor
        Shape ``(q, n)``: the log evidence of the data so far.
    cumulative_standard_error : Tensor
        Of each order's curve, ``(n,)``.
    log_evidence : float
        Of all data; it is the same in every order, so all populations estimate it together.
    log_evidence_standard_error : float
    num_populations : int
        Independent populations, over all orders.
    num_particles : int
        Of each population.
    num_evaluations : int
        Evaluations of the log density or its gradient.
    warnings : tuple of str
        What the diagnostics found, each with its remedy.
    diagnostics : dict of float
    seconds : float

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=0.5)
    >>> curve = prequential(posterior, orders=2, num_replicates=4, num_particles=64)
    >>> curve.log_predictive.shape, abs(curve.log_evidence + 3.258145) < 5 * curve.log_evidence_standard_error
    (torch.Size([2, 3]), True)
    """

    orders: Tensor
    log_predictive: Tensor
    standard_error: Tensor
    cumulative: Tensor
    cumulative_standard_error: Tensor
    log_evidence: float
    log_evidence_standard_error: float
    num_populations: int
    num_particles: int
    num_evaluations: int
    warnings: tuple[str, ...]
    diagnostics: dict[str, float]
    seconds: float = 0.0

    @property
    def trusted(self) -> bool:
        """Whether no diagnostic objected."""
        numbers = (self.log_evidence, self.log_evidence_standard_error)
        return not self.warnings and all(map(math.isfinite, numbers))

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with a row for each order and position: the datum, its log density, and their sums."""
        q, n = self.orders.shape
        return pd.DataFrame(
            {
                "order": torch.arange(q).repeat_interleave(n).numpy(),
                "position": torch.arange(1, n + 1).repeat(q).numpy(),
                "datum": self.orders.flatten().cpu().numpy(),
                "log_predictive": self.log_predictive.flatten().cpu().numpy(),
                "standard_error": self.standard_error.flatten().cpu().numpy(),
                "cumulative": self.cumulative.flatten().cpu().numpy(),
                "cumulative_standard_error": self.cumulative_standard_error.repeat(q).cpu().numpy(),
            }
        )

    def plot(self, ax: Axes | None = None, *, against: Prequential | None = None, label: str = "") -> Axes:
        """Plot the cumulative log predictive density against the number of data, a curve for each order.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default a new figure of ``pyplot``.
        against : Prequential, optional
            Another model on the same data in the same orders: what is plotted is by how much this one has predicted
            better, the log Bayes factor of the data so far.
        label : str, default ""
            Of the curves.

        Raises
        ------
        SettingsError
            If the other model saw the data in other orders.
        """
        from bayeskit._plots import CHAIN_COLOURS, GREY

        if against is not None and not torch.equal(against.orders, self.orders):
            raise SettingsError("the curves are of different orders of the data; give both models the same orders=")
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        value, error = self.cumulative, self.cumulative_standard_error
        if against is not None:
            value, error = value - against.cumulative, torch.hypot(error, against.cumulative_standard_error)
        seen = torch.arange(1, value.shape[1] + 1).numpy()
        colour = CHAIN_COLOURS[len(ax.lines) % len(CHAIN_COLOURS)]
        band = 1.96 * error.nan_to_num(0.0).cpu()
        for row, curve in enumerate(value.cpu()):
            ax.plot(seen, curve.numpy(), color=colour, linewidth=1.2, alpha=0.8, label=label if row == 0 else None)
            ax.fill_between(seen, (curve - band).numpy(), (curve + band).numpy(), color=colour, alpha=0.15, linewidth=0)
        if against is not None:
            ax.axhline(0.0, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        ax.set_xlabel("data seen")
        ax.set_ylabel("cumulative log predictive density (nats)" if against is None else "log Bayes factor (nats)")
        if label:
            ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return (
            f"prequential: log evidence {self.log_evidence:.4f} +- {self.log_evidence_standard_error:.4f} "
            f"from {len(self.orders)} orders of {self.orders.shape[1]} data{flag}"
        )


def prequential(
    target: Target,
    orders: int | Tensor = 4,
    *,
    num_replicates: int = 4,
    num_particles: int = 256,
    carriage: Carriage | None = None,
    groups: Tensor | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Prequential:
    r"""Predict each datum from those before it, and add up: the sum is the log evidence, in whatever order.

    .. math:: \log p(y) = \sum_{k=1}^n \log p(y_{o(k)} \mid y_{o(1)}, \dots, y_{o(k-1)})

    Populations of particles start in the prior and take in one datum after the other: reweighted, and resampled and
    moved where the weights have become uneven. The predictive density is the mean likelihood of the datum that
    comes next or, where it comes as a surprise, a product of such means along powers of it.

    A loss in place of a likelihood is no density of the data, but ``exp(-weight * loss)`` is scored in the same way,
    and adds up to the log normaliser of its posterior.

    Parameters
    ----------
    target : Target
        With a proper prior, and a pointwise log likelihood of data that are independent given its parameter.
    orders : int or Tensor, default 4
        So many random orders, or permutations ``(q, n)`` or ``(n,)`` of the data.
    num_replicates : int, default 4
        Independent populations for each order, from whose spread errors are seen; at least 2.
    num_particles : int, default 256
        Of each population.
    carriage : Carriage, optional
        How the particles are carried from one datum to the next.
    groups : Tensor, optional
        Integers, one for each observation: those of equal number come together, as one datum.
    seed : int, default 0
    progress : bool, default False

    Returns
    -------
    Prequential

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, or the prior cannot be drawn from.
    ShapeError
        If ``orders`` are no permutations of the data.
    ModelError
        If the target has no pointwise log likelihood.

    References
    ----------
    Dawid, A. P. (1984). Statistical theory: the prequential approach. Journal of the Royal Statistical Society A 147,
    278-292.

    Chopin, N. (2002). A sequential particle filter method for static models. Biometrika 89, 539-552.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    >>> result = prequential(target, orders=torch.arange(4), num_replicates=8, num_particles=128)
    >>> abs(result.log_evidence - torch.tensor(1 / 20).log().item()) < 5 * result.log_evidence_standard_error
    True
    """
    begin = time.monotonic()
    num_replicates = whole_number("num_replicates", num_replicates, 2)
    num_particles = whole_number("num_particles", num_particles, 8)
    carriage = carriage or Carriage()
    data = WeightedData(target, groups)
    generator = new_generator(seed, target.device, stream="prequential")
    chosen = as_orders(orders, data.num_data, generator).to(target.device)
    rows = chosen.repeat_interleave(num_replicates, 0)
    increments = torch.zeros(rows.shape, dtype=torch.float64, device=target.device)
    state = from_prior(data, len(rows), num_particles, generator)
    with progress_bar("prequential", data.num_data, progress) as bar:
        for k in range(data.num_data):
            state, increments[:, k] = admit(data, state, rows[:, k], carriage, generator)
            bar.update(k + 1)
    return summarise(chosen, increments, state, num_particles, time.monotonic() - begin)


def admit(
    data: WeightedData, state: Particles, datum: Tensor, carriage: Carriage, generator: torch.Generator
) -> tuple[Particles, Tensor]:
    """Let population ``r`` take in ``datum[r]``; return its log predictive density, ``(r,)``, too."""
    weights = state.data_weights.scatter(1, datum.unsqueeze(1), 1.0)
    return carriage.carry(data, state, weights, generator)


def as_orders(orders: Any, num_data: int, generator: torch.Generator) -> Tensor:
    """Return permutations ``(q, n)``, given or as many random ones as asked for.

    Raises
    ------
    ShapeError
        If they are no permutations.
    """
    if not isinstance(orders, Tensor):
        count = whole_number("orders", orders, 1)
        like = {"generator": generator, "device": generator.device}
        return torch.stack([torch.randperm(num_data, **like) for _ in range(count)])  # type: ignore[call-overload]
    rows = orders.reshape(1, -1) if orders.dim() == 1 else orders
    every = torch.arange(num_data, device=rows.device)
    if rows.dim() != 2 or rows.shape[1] != num_data or not bool((rows.sort(1).values == every).all()):
        raise ShapeError(
            f"orders must be permutations of the {num_data} data, (q, {num_data}) or ({num_data},), not "
            f"{orders.dtype} of shape {tuple(orders.shape)}"
        )
    return rows.long()


def summarise(orders: Tensor, increments: Tensor, state: Particles, num_particles: int, seconds: float) -> Prequential:
    """Average populations: those of one order on its curve, all of them on the evidence.

    ``increments`` are ``(q * replicates, n)``.
    """
    each = increments.reshape(len(orders), -1, increments.shape[1])
    q, r, n = each.shape
    curves = each.cumsum(-1)
    evidence = of_totals(curves[..., -1].flatten(), increments, state)
    # Estimates of the evidence so far are unbiased, so it is those that are averaged, and not their logarithms.
    cumulative = curves.logsumexp(1) - math.log(r)
    cumulative_error, _ = replicates_log_mean_error((curves - cumulative.unsqueeze(1)).movedim(1, -1).movedim(0, 1))
    log_predictive = cumulative.diff(dim=1, prepend=cumulative.new_zeros(q, 1))
    return Prequential(
        orders,
        log_predictive,
        each.std(1) / math.sqrt(r),
        cumulative,
        cumulative_error,
        evidence.log_evidence,
        evidence.standard_error,
        q * r,
        num_particles,
        state.num_evaluations,
        evidence.warnings,
        evidence.diagnostics,
        seconds,
    )


def of_totals(totals: Tensor, increments: Tensor, state: Particles) -> Evidence:
    """Average what populations, whatever their order, say of the evidence, ``(populations,)``."""
    log_evidence = float(totals.logsumexp(0)) - math.log(len(totals))
    error, spread = replicates_log_mean_error((totals - log_evidence).unsqueeze(0))
    problems = carrying_problems(state.acceptance)
    if len(totals) < MIN_POPULATIONS:
        problems.append(
            f"only {len(totals)} populations, too few to see the error: take {MIN_POPULATIONS} or more, over all orders"
        )
    if not float(spread) <= MAX_RELATIVE_SPREAD:
        problems.append(
            f"populations disagree (relative spread {float(spread):.2f} > {MAX_RELATIVE_SPREAD}), so their mean may "
            "rest on a few of them: use more num_particles or more moves, Carriage(num_moves=...)"
        )
    if float(increments.min()) < LOWEST / 2:
        problems.append("the likelihood of a datum is zero at all particles: use more num_particles")
    diagnostics = {"relative_spread": float(spread), "acceptance_rate": state.acceptance}
    return Evidence("prequential", log_evidence, float(error), state.num_evaluations, tuple(problems), diagnostics)


def carrying_problems(acceptance: float) -> list[str]:
    """Check that particles have moved."""
    if acceptance >= MIN_ACCEPTANCE:
        return []
    return [
        f"only {100 * acceptance:.0f} % of moves were accepted somewhere: use more num_particles, or "
        "reparameterise the model"
    ]
