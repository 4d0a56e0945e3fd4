"""Prequential evidence: the sum of log predictive densities of each observation given those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.inputs import check_memory, whole_number
from bayeskit._core.plots import CHAIN_COLOURS, GREY
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import replicates_log_mean_error
from bayeskit._logdensity.target import Target
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import NO_PRIOR_DRAWS
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, from_draws
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.evidence._sequential import average, fewer_and_larger, finished_run
from bayeskit.inference.samplers._populations import ResampleMove, SMCInfo, start_populations
from bayeskit.inference.samplers._weighted_data import DataPopulations, WeightedData, carry

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Largest number of log likelihoods, of each observation at each particle, in a comparison: 128 MiB.
_MOST_TERMS = 2**24


def _missing(*shape: int) -> Any:
    return field(default_factory=lambda: torch.zeros(*shape), repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class PrequentialEvidence(Evidence):
    """An :class:`Evidence` with its terms, one per datum, in one or several orders of the data.

    Attributes
    ----------
    order : Tensor
        Permutations of the data, ``(q, n)``.
    predictives : Tensor
        Log density of the ``k``-th datum of each order given those before it, ``(q, n)``.
    predictive_errors : Tensor
        Monte Carlo standard errors of ``predictives``, ``(q, n)``.
    cumulative_errors : Tensor
        Standard errors of each row of ``cumulative``, pooled over orders, ``(n,)``.
    start : Tensor
        Log density of the observations of other sites that precede the data, ``(q,)``; zero without any.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence._prequential_evidence import PrequentialEvidence
    >>> z = PrequentialEvidence("prequential", -3.0, 0.1, 1000, predictives=torch.tensor([[-1.0, -2.0]]))
    >>> z.cumulative
    tensor([[-1., -3.]])
    """

    order: Tensor = _missing(1, 0)
    predictives: Tensor = _missing(1, 0)
    predictive_errors: Tensor = _missing(1, 0)
    cumulative_errors: Tensor = _missing(0)
    start: Tensor = _missing(1)

    @property
    def cumulative(self) -> Tensor:
        """Log evidence of the first ``1, ..., n`` data of each order, ``(q, n)``."""
        return self.start.unsqueeze(1) + self.predictives.cumsum(1)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table of the terms and their cumulative sums, one row for each order and position."""
        import pandas as pd

        q, n = self.order.shape
        columns = {
            "order": torch.arange(q).repeat_interleave(n),
            "position": torch.arange(1, n + 1).repeat(q),
            "datum": self.order,
            "predictive": self.predictives,
            "predictive_error": self.predictive_errors,
            "cumulative": self.cumulative,
            "cumulative_error": self.cumulative_errors.repeat(q),
        }
        return pd.DataFrame({name: x.flatten().cpu().numpy() for name, x in columns.items()})

    def plot(self, ax: Axes | None = None, *, against: PrequentialEvidence | None = None, label: str = "") -> Axes:
        """Plot the log evidence against the number of data, one curve for each order, with 95 % bands.

        Parameters
        ----------
        ax : Axes, optional
            Axes to draw on; by default a new figure of ``pyplot``. Curves of several models on the same axes show after
            which datum one model predicts better.
        against : PrequentialEvidence, optional
            Result of another model for the same orders: the log Bayes factor is plotted.
        label : str, default ""

        Raises
        ------
        SettingsError
            If the orders of ``against`` are different.
        """
        value, error = self.cumulative, self.cumulative_errors
        if against is not None:
            if not torch.equal(against.order, self.order):
                raise SettingsError("the curves have different orders of the data; give both models the same order=")
            value, error = value - against.cumulative, torch.hypot(error, against.cumulative_errors)
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        seen = torch.arange(1, value.shape[1] + 1).numpy()
        colour = CHAIN_COLOURS[len(ax.lines) % len(CHAIN_COLOURS)]
        band = 1.96 * error.nan_to_num(0.0).cpu()
        for row, curve in enumerate(value.cpu()):
            ax.plot(seen, curve.numpy(), color=colour, linewidth=1.2, alpha=0.8, label=None if row else label or None)
            ax.fill_between(seen, (curve - band).numpy(), (curve + band).numpy(), color=colour, alpha=0.15, linewidth=0)
        if against is not None:
            ax.axhline(0.0, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        name = "cumulative log score (nats)" if against is None else "log Bayes factor (nats)"
        ax.set(xlabel="data seen", ylabel=name)
        if label:
            ax.legend(frameon=False)
        return ax


def _compared(target: Target, parts: Parts, seed: int) -> Evidence:
    return prequential(target, **fewer_and_larger(parts.budget.smc), seed=seed, progress=parts.progress)


@estimator(Part.PRIOR, refuses=lambda target, parts: _refusal(target, parts), by=_compared)
def prequential(
    target: Target,
    *,
    site: str | None = None,
    order: int | Tensor | None = None,
    groups: Tensor | None = None,
    num_particles: int = 128,
    num_replicates: int = 16,
    ess_threshold: float = 0.8,
    seed: int = 0,
    progress: bool = True,
) -> PrequentialEvidence:
    r"""Estimate the log evidence as a sum of log predictive densities, in one or several orders of the data.

    .. math:: \log p(y) = \sum_{k=1}^n \log p(y_{o(k)} \mid y_{o(1)}, \dots, y_{o(k-1)})

    This holds for every order ``o``. Independent populations of particles start in the prior and process one datum
    after another: the weights are multiplied by its likelihood, in tempered steps if needed, and uneven weights trigger
    resampling and moves. For a loss, the likelihood is ``exp(-weight * loss)``, and the sum the log normalising
    constant of the Gibbs posterior.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior and a pointwise log likelihood that adds up to the log likelihood.
    site : str, optional
        Observed site whose observations are processed one by one, after those of all other sites. By default all sites
        in model order.
    order : int or Tensor, optional
        Number ``q`` of random orders of the data, or permutations ``(q, n)`` or ``(n,)``. By default the order of the
        model.
    groups : Tensor, optional
        Integer label of each observation, ``(num_observations,)``; observations with equal labels form one datum, and
        data are numbered in the order of their labels. By default each observation is a datum.
    num_particles : int, default 128
        Per population.
    num_replicates : int, default 16
        Number of independent populations of each order, whose variance gives the standard error.
    ess_threshold : float in (0, 1), default 0.8
        Conditional effective share of all particles after each step.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    PrequentialEvidence
        Estimate with its terms and their plot.

    Raises
    ------
    ModelError
        If there is no pointwise log likelihood, or it does not add up to the log likelihood.
    SettingsError
        If a setting lies outside its domain, there is no such site, or the target cannot draw from its prior.
    ShapeError
        If ``order`` does not hold permutations of the data, or ``groups`` has the wrong shape.
    InitializationError
        If the likelihood is zero at all prior draws.

    References
    ----------
    Dawid, A. P. (1984). Statistical theory: the prequential approach. Journal of the Royal Statistical Society A 147,
    278-292.
    Chopin, N. (2002). A sequential particle filter method for static models. Biometrika 89, 539-552.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence._prequential_evidence import prequential
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> z = prequential(bk.Target.from_pyro(model, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)))
    >>> abs(z.log_evidence - torch.tensor(1 / 20).log().item()) < 4 * z.standard_error, z.trusted
    (True, True)
    >>> exact = torch.tensor([1 / 2, 2 / 3, 1 / 4, 3 / 5], dtype=torch.float64)
    >>> torch.allclose(z.predictives[0].exp(), exact, atol=0.05)
    True
    """
    num_particles = whole_number("num_particles", num_particles, 8)
    num_replicates = whole_number("num_replicates", num_replicates, 2)
    steps = ResampleMove(ess_threshold)
    seed = whole_number("seed", seed)
    generator = new_generator(seed, target.device, stream="prequential")
    with torch.no_grad():
        data, first = _data(target, site, groups)
        orders = _as_orders(order, data.num_data - first, generator).to(target.device)
        rows = torch.cat([torch.zeros_like(orders[:, :first]), orders + first], 1).repeat_interleave(num_replicates, 0)
        particles = start_populations(target, len(rows), num_particles, generator)
        state = DataPopulations.at(data, particles, 0.0)
        totals: list[Tensor] = []  # of each datum, (q * r,)
        infos: list[SMCInfo] = []
        correlations: list[Tensor] = []
        with progress_bar("prequential", data.num_data, progress) as bar:
            for k in range(data.num_data):
                weights = state.data_weights.scatter(1, rows[:, k : k + 1], 1.0)
                carried = carry(data, state, weights, steps, generator, is_common=len(orders) == 1)
                state = carried.state
                totals.append(carried.log_ratio)
                infos += carried.infos
                correlations += carried.correlations
                bar.update(k + 1)
    run = finished_run(
        target,
        state.particles._replace(log_likelihood=state.pointwise.sum(-1).to(target.dtype)),
        SMCInfo(*(torch.stack(column, 1) for column in zip(*infos, strict=True))),
        state.step_size,
        state.num_evaluations + particles.log_weight.numel(),  # the prior draws were evaluated twice
        {"sampler": "prequential", "seed": seed, "ending": "finished"},
        torch.ones(len(infos)),
        torch.stack(correlations) if correlations else None,
    )
    whole = Diagnostics(target).judge(from_draws(average(target, run, "prequential"), run.draws))
    increments = torch.stack(totals, 1).unflatten(0, (len(orders), num_replicates))  # (q, r, n)
    # Averages of evidence estimates, not of their logs, which would be biased.
    curves = increments.cumsum(2)
    curve = curves.logsumexp(1) - math.log(num_replicates)
    curve_errors, _ = replicates_log_mean_error((curves - curve.unsqueeze(1)).permute(2, 0, 1))
    each = curve.diff(prepend=torch.zeros_like(curve[:, :1]))
    errors = increments.std(1) / math.sqrt(num_replicates)
    return PrequentialEvidence(
        **vars(whole),
        order=orders,
        predictives=each[:, first:],
        predictive_errors=errors[:, first:],
        cumulative_errors=curve_errors[first:],
        start=each[:, :first].sum(1),
    )


def prequential_refusal(target: Target) -> str | None:
    """Return the reason why the prequential identity does not apply to a target, or None if it does."""
    if not target.can_sample_prior:
        return NO_PRIOR_DRAWS
    try:
        WeightedData(target)
    except ModelError as error:
        return str(error)
    return None


def _refusal(target: Target, parts: Parts) -> str | None:
    """Return the reason why a comparison leaves the method out."""
    if (reason := prequential_refusal(target)) is not None:
        return reason
    num_data, sizes = WeightedData(target).num_data, fewer_and_larger(parts.budget.smc)
    num_particles = sizes["num_particles"] * sizes["num_replicates"]
    if num_data * num_particles <= _MOST_TERMS:
        return None
    return (
        f"{num_data} observations one by one, each with its log likelihood at {num_particles} particles, take more "
        "time and memory than all other methods; call prequential(target, num_particles=...) by itself"
    )


def _data(target: Target, site: str | None, groups: Tensor | None) -> tuple[WeightedData, int]:
    """Return the data one by one, and 1 if the first is all observations of sites other than ``site``, else 0."""
    whole = WeightedData(target, groups)
    if site is None:
        return whole, 0
    if site not in whole.counts:
        raise SettingsError(f"there is no observed site {site!r}; there are: {', '.join(whole.counts)}")
    if len(whole.counts) == 1:
        return whole, 0
    of_site = torch.cat([torch.full((n,), name == site) for name, n in whole.counts.items()])
    labels = torch.arange(len(of_site)) if groups is None else torch.as_tensor(groups).cpu()
    return WeightedData(target, torch.where(of_site, labels - labels.min() + 1, 0)), 1


def random_orders(count: int, num_data: int, generator: torch.Generator) -> Tensor:
    """Return random permutations, ``(count, num_data)``."""
    check_memory("order", count, 8 * num_data)
    like = {"generator": generator, "device": generator.device}
    return torch.stack([torch.randperm(num_data, **like) for _ in range(count)])  # type: ignore[call-overload]


def _as_orders(order: Any, num_data: int, generator: torch.Generator) -> Tensor:
    """Return permutations ``(q, num_data)``, from given ones, a number of random ones, or the order of the model."""
    if order is None:
        return torch.arange(num_data).unsqueeze(0)
    if isinstance(order, SupportsIndex) and getattr(order, "ndim", 0) == 0:
        return random_orders(whole_number("order", order, 1), num_data, generator)
    try:
        chosen = order if isinstance(order, Tensor) else torch.as_tensor(np.array(order))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"order must hold {num_data} whole numbers, a permutation of the data, or be a number of random orders, "
            f"not {order!r}"
        ) from error
    rows = chosen.unsqueeze(0) if chosen.dim() == 1 else chosen
    every = torch.arange(num_data, device=rows.device)
    if rows.dim() != 2 or rows.shape[1] != num_data or not bool((rows.sort(1).values == every).all()):
        raise ShapeError(
            f"order must hold permutations of the {num_data} data, (q, {num_data}) or ({num_data},), not "
            f"{chosen.dtype} of shape {tuple(chosen.shape)}"
        )
    return rows.long()
