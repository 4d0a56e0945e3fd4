"""Prequential evidence: the sum of log predictive densities of each observation given those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeskit._core.inputs import whole_number
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import new_generator, one_thread
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
    from matplotlib.axes import Axes

#: Largest number of log likelihoods, of each observation at each particle, in a comparison: 128 MiB.
_MOST_TERMS = 2**24


@dataclass(frozen=True, repr=False)
class PrequentialEvidence(Evidence):
    """An :class:`Evidence` with its terms, one per observation.

    Attributes
    ----------
    predictives : Tensor
        Log density of each observation given those before it, in their order, ``(n,)``.
    predictive_errors : Tensor
        Monte Carlo standard errors of ``predictives``, ``(n,)``.
    start : float
        Log density of the observations of other sites that precede them; zero without any.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence._prequential_evidence import PrequentialEvidence
    >>> z = PrequentialEvidence("prequential", -3.0, 0.1, 1000, predictives=torch.tensor([-1.0, -2.0]))
    >>> z.cumulative
    tensor([-1., -3.])
    """

    predictives: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    predictive_errors: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    start: float = 0.0

    @property
    def cumulative(self) -> Tensor:
        """Log evidence of the first ``1, ..., n`` observations, ``(n,)``."""
        return self.start + self.predictives.cumsum(0)

    def plot(self, ax: Axes | None = None, *, label: str = "") -> Axes:
        """Plot the log evidence against the number of observations.

        Parameters
        ----------
        ax : Axes, optional
            Axes to draw on; by default a new figure of ``pyplot``. Curves of several models on the same axes show after
            which observation one model predicts better.
        label : str, default ""
        """
        from bayeskit._core.plots import CHAIN_COLOURS

        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        seen = torch.arange(1, len(self.predictives) + 1).numpy()
        colour = CHAIN_COLOURS[len(ax.lines) % len(CHAIN_COLOURS)]
        ax.plot(seen, self.cumulative.cpu().numpy(), color=colour, linewidth=1.4, label=label or None)
        ax.set_xlabel("observations seen")
        ax.set_ylabel("cumulative log score (nats)")
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
    order: Tensor | None = None,
    num_particles: int = 128,
    num_replicates: int = 16,
    ess_threshold: float = 0.8,
    seed: int = 0,
    progress: bool = True,
) -> PrequentialEvidence:
    r"""Estimate the log evidence as a sum of log predictive densities, in any order of the observations.

    .. math:: \log p(y) = \sum_{i=1}^n \log p(y_i \mid y_1, \dots, y_{i-1})

    Independent populations of particles start in the prior and process one observation after another: the weights are
    multiplied by its likelihood, in tempered steps if needed, and uneven weights trigger resampling and moves.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior and a pointwise log likelihood that adds up to the log likelihood.
    site : str, optional
        Observed site whose observations are processed one by one, after those of all other sites. By default all sites
        in model order.
    order : Tensor, optional
        Order of the observations, a permutation ``(n,)``.
    num_particles : int, default 128
        Per population.
    num_replicates : int, default 16
        Number of independent populations, whose variance gives the standard error.
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
        If ``order`` is not a permutation.
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
    >>> torch.allclose(z.predictives.exp(), exact, atol=0.05)
    True
    """
    num_particles = whole_number("num_particles", num_particles, 8)
    num_replicates = whole_number("num_replicates", num_replicates, 2)
    steps = ResampleMove(ess_threshold)
    seed = whole_number("seed", seed)
    generator = new_generator(seed, target.device, stream="prequential")
    with one_thread(), torch.no_grad():
        data, has_start = _data(target, site)
        come = _as_order(order, data.num_data, has_start)
        particles = start_populations(target, num_replicates, num_particles, generator)
        state = DataPopulations.at(data, particles, 0.0)
        totals: list[Tensor] = []  # of each observation, (r,)
        infos: list[SMCInfo] = []
        correlations: list[Tensor] = []
        with progress_bar("prequential", len(come), progress) as bar:
            for done, datum in enumerate(come):
                weights = state.data_weights.clone()
                weights[:, datum] = 1.0
                carried = carry(data, state, weights, steps, generator, is_common=True)
                state = carried.state
                totals.append(carried.log_ratio)
                infos += carried.infos
                correlations += carried.correlations
                bar.update(done + 1)
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
    increments = torch.stack(totals, 1)  # (r, n)
    # Averages of evidence estimates, not of their logs, which would be biased.
    curve = increments.cumsum(1).logsumexp(0) - math.log(num_replicates)
    each = curve.diff(prepend=curve.new_zeros(1))
    errors = increments.std(0) / math.sqrt(num_replicates)
    first = int(has_start)
    return PrequentialEvidence(
        **vars(whole),
        predictives=each[first:],
        predictive_errors=errors[first:],
        start=float(each[0]) if first else 0.0,
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


def _data(target: Target, site: str | None) -> tuple[WeightedData, bool]:
    """Return the data one by one, and whether the first is all observations of sites other than ``site``."""
    whole = WeightedData(target)
    if site is None:
        return whole, False
    if site not in whole.counts:
        raise SettingsError(f"there is no observed site {site!r}; there are: {', '.join(whole.counts)}")
    if len(whole.counts) == 1:
        return whole, False
    labels = [torch.arange(1, n + 1) if name == site else torch.zeros(n).long() for name, n in whole.counts.items()]
    return WeightedData(target, torch.cat(labels)), True


def _as_order(order: Any, num_data: int, has_start: bool) -> list[int]:
    """Return which observation comes when, those of other sites first."""
    first = int(has_start)
    count = num_data - first
    if order is None:
        return list(range(num_data))
    try:
        chosen = torch.as_tensor(order)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"order must hold {count} whole numbers, a permutation of the observations, not {order!r}"
        ) from error
    if tuple(chosen.shape) != (count,) or sorted(chosen.tolist()) != list(range(count)):
        raise ShapeError(f"order must be a permutation of the {count} observations, not of shape {tuple(chosen.shape)}")
    return [*range(first), *(int(i) + first for i in chosen)]
