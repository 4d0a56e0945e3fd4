"""The marginal likelihood as a sum of cross-validation scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd
import torch
from scipy.stats import norm
from scipy.stats import t as student
from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE
from bayeskit._core.inputs import check_memory, whole_number
from bayeskit._core.plots import CHAIN_COLOURS
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import mean_error, pareto_smoothed
from bayeskit._core.texts import with_error
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import BayeskitError, DataError, InitializationError, SettingsError, ShapeError
from bayeskit.inference.evidence._judging._belonging import belongs
from bayeskit.inference.evidence._judging._chains import posterior_problems
from bayeskit.inference.evidence._prequential_evidence import random_orders
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.evidence._sequential import MIN_REPLICATES, mean_of_replicates
from bayeskit.inference.samplers._populations import PopulationMoves, ResampleMove, SMCInfo, equally_weighted
from bayeskit.inference.samplers._weighted_data import LOWEST, DataPopulations, WeightedData, carry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Held-out sets: all sets of one size, or a random sample of them.


def as_sizes(p: Any, num_data: int) -> tuple[int, ...]:
    """Return increasing sizes of held-out sets, each from 1 to ``num_data``; by default all sizes."""
    if p is None:
        return tuple(range(1, num_data + 1))
    given: Iterable[Any] = p if isinstance(p, Iterable) else (p,)
    sizes = sorted({whole_number("p", x, 1) for x in given})
    if not sizes or sizes[-1] > num_data:
        found = f"not {sizes[-1]}" if sizes else "but none is given"
        raise SettingsError(f"p, the number of data held out, must lie between 1 and {num_data}, {found}")
    return tuple(sizes)


def _check_number(num_data: int, sizes: Iterable[int], most: int, remedy: str) -> None:
    """Raise SettingsError if there are more than ``most`` sets to enumerate."""
    count = sum(math.comb(num_data, p) for p in sizes)
    if count > most:
        raise SettingsError(f"there are {count} sets of data to enumerate, more than max_sets={most}: {remedy}")


def all_sets(num_data: int, size: int) -> Tensor:
    """Return all sets of ``size`` observations as rows of a mask, ``(C(n, size), n)``."""
    rows = torch.tensor(list(combinations(range(num_data), size)), dtype=torch.long)
    return torch.zeros(len(rows), num_data, dtype=torch.bool).scatter(1, rows.reshape(len(rows), size), True)


def sampled_sets(num_data: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` distinct random sets as rows of a mask, ``(count, n)``; all sets if there are no more."""
    if math.comb(num_data, size) <= count:
        return all_sets(num_data, size)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        rows = torch.rand(num_data, generator=generator, device=generator.device).argsort()[:size]
        found.setdefault(tuple(rows.sort().values.tolist()))
    rows = torch.tensor(list(found), dtype=torch.long)
    return torch.zeros(count, num_data, dtype=torch.bool).scatter(1, rows, True)


# Result of leave-p-out cross-validation.


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """Leave-p-out cross-validation of the log predictive density.

    Attributes
    ----------
    method : str
        Method of computing the predictive densities: "enumeration", "tempering", "orders" or "importance".
    held_out : Tensor
        Sizes ``p`` of held-out sets, increasing, ``(m,)``.
    score : Tensor
        Mean log predictive density of a held-out datum given the training data, in nats, ``(m,)``.
    standard_error : Tensor
        Standard error of each score, from Monte Carlo and from the sampling of held-out sets, ``(m,)``.
    cumulative_standard_error : Tensor
        Standard error of the cumulative sums of the scores, ``(m,)``.
    num_sets : Tensor
        Number of held-out sets of each size, ``(m,)``.
    warnings : tuple of str
        Failed diagnostics, each with a remedy.
    pareto_k : Tensor or None
        Largest Pareto ``k`` over held-out sets of each size, ``(m,)``, if posterior draws were weighted.
    num_rerun : Tensor or None
        Number of held-out sets recomputed by particles because importance weights were unreliable, ``(m,)``.
    prequential : Evidence or None
        Prequential estimate of the evidence from the same particles, if all sizes were computed by random orders. Its
        error is smaller, since it does not depend on the choice of held-out sets.
    num_evaluations : int
        Evaluations of the log density or its gradient, without those for the draws passed in.

    Examples
    --------
    >>> import torch
    >>> score, error = torch.tensor([-1.0, -1.5]), torch.tensor([0.01, 0.01])
    >>> result = CrossValidation("orders", 2, torch.tensor([1, 2]), score, error, error, torch.tensor([2, 1]))
    >>> result.log_evidence, result.trusted
    (-2.5, True)
    """

    method: str
    num_data: int
    held_out: Tensor
    score: Tensor
    standard_error: Tensor
    cumulative_standard_error: Tensor
    num_sets: Tensor
    warnings: tuple[str, ...] = ()
    pareto_k: Tensor | None = None
    num_rerun: Tensor | None = None
    prequential: Evidence | None = None
    num_evaluations: int = 0
    seconds: float = 0.0

    @property
    def cumulative(self) -> Tensor:
        """Cumulative sums of the scores of ``1, ..., p`` held-out data, ``(m,)``; SettingsError for other sizes.

        The sum up to ``p`` is the mean, over held-out sets of ``p`` data, of their joint log predictive density given
        the remaining data: the log of the geometric intrinsic evidence.
        """
        if self.held_out.tolist() != list(range(1, len(self.held_out) + 1)):
            raise SettingsError(
                f"cumulative scores need all sizes of held-out sets from 1 on, not {self.held_out.tolist()}; use "
                f"p=range(1, {int(self.held_out[-1]) + 1})"
            )
        return self.score.cumsum(0)

    @property
    def log_evidence(self) -> float:
        """Sum of all scores; SettingsError if the sizes are not ``1, ..., n``."""
        self._check_complete()
        return float(self.cumulative[-1])

    @property
    def log_evidence_standard_error(self) -> float:
        """Standard error of :attr:`log_evidence`."""
        self._check_complete()
        return float(self.cumulative_standard_error[-1])

    @property
    def trusted(self) -> bool:
        """Whether there are no warnings, and scores and errors are finite."""
        return not self.warnings and bool((self.score.isfinite() & self.standard_error.isfinite()).all())

    def _check_complete(self) -> None:
        if len(self.held_out) != self.num_data:
            raise SettingsError(
                f"the log evidence is the sum of the scores of 1 to {self.num_data} held-out data, but only those of "
                f"{self.held_out.tolist()} were computed; leave p=None"
            )

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row for each size of held-out sets."""
        columns = {"score": self.score, "standard_error": self.standard_error}
        if self.held_out.tolist() == list(range(1, len(self.held_out) + 1)):
            columns |= {"cumulative": self.cumulative, "cumulative_standard_error": self.cumulative_standard_error}
        columns["num_sets"] = self.num_sets
        for name in ("pareto_k", "num_rerun"):
            if (value := getattr(self, name)) is not None:
                columns[name] = value
        table = {name: x.cpu().numpy() for name, x in columns.items()}
        return pd.DataFrame(table, index=pd.Index(self.held_out.cpu().numpy(), name="held_out"))

    def plot(self, ax: Axes | None = None, *, cumulative: bool = False, label: str = "") -> Axes:
        """Plot the scores or their cumulative sums against the number of data held out, with 95 % bands."""
        value = self.cumulative if cumulative else self.score
        error = self.cumulative_standard_error if cumulative else self.standard_error
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        size, band = self.held_out.cpu().numpy(), 1.96 * error.nan_to_num(0.0, 0.0).cpu()
        colour = CHAIN_COLOURS[len(ax.lines) % len(CHAIN_COLOURS)]
        few = len(size) <= 40
        face = colour if self.trusted else "white"
        ax.plot(size, value.cpu().numpy(), color=colour, marker="o" if few else "", mfc=face, label=label or None)
        low, high = (value.cpu() - band).numpy(), (value.cpu() + band).numpy()
        ax.fill_between(size, low, high, color=colour, alpha=0.2, linewidth=0)
        name = "cumulative score (nats)" if cumulative else "log predictive density of a datum (nats)"
        ax.set(xlabel="data held out", ylabel=name)
        if label:
            ax.legend(frameon=False)
        return ax

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        if len(self.held_out) == self.num_data:
            number = with_error(self.log_evidence, self.log_evidence_standard_error)
            return f"cross-validation of {self.num_data} data: log evidence {number}{flag}"
        scores = ", ".join(
            f"{p}: {with_error(s, e)}"
            for p, s, e in zip(self.held_out.tolist(), self.score.tolist(), self.standard_error.tolist(), strict=True)
            if math.isfinite(s)
        )
        return f"cross-validation of {self.num_data} data, score by number held out: {scores}{flag}"


# Populations at the posteriors of different training sets.

# Few particles are moved seldom, so copies of one have to lose what they have in common.
_STEPS = ResampleMove(moves=PopulationMoves(max_correlation=0.1))


def prior_populations(
    data: WeightedData, num_populations: int, num_particles: int, generator: torch.Generator
) -> DataPopulations:
    """Draw populations from the prior; InitializationError if the likelihood of a datum is zero at all draws."""
    position = data.target.sample_prior(num_populations * num_particles, seed=generator)
    state = _populations(data, position.reshape(num_populations, num_particles, -1), 0.0)
    hopeless = (state.pointwise <= LOWEST / 2).all(1).all(0)
    if bool(hopeless.any()):
        raise InitializationError(
            f"the likelihood of datum {int(hopeless.nonzero()[0])} is zero at all {len(position)} prior draws; check "
            "that data and likelihood fit, or use more particles"
        )
    return state


def _populations(data: WeightedData, position: Tensor, weight: float) -> DataPopulations:
    """Return equally weighted particles at ``position (r, N, d)``, with one ``weight`` of all data."""
    unknown = torch.full_like(position[..., 0], torch.nan)  # until they are moved
    return DataPopulations.at(data, equally_weighted(position, unknown, unknown), weight)


def _merged(state: DataPopulations, copies: int) -> tuple[Tensor, Tensor]:
    """Return log weights ``(r, N)`` and likelihoods ``(r, N, n)`` of ``copies`` populations with equal data as one."""
    log_weight = state.particles.log_weight.unflatten(0, (-1, copies)).flatten(1, 2) - math.log(copies)
    return log_weight, state.pointwise.unflatten(0, (-1, copies)).flatten(1, 2)


def _acceptance_rate(infos: Iterable[SMCInfo]) -> float:
    """Return the lowest mean acceptance rate of the moves of any step."""
    return min((float(info.acceptance_rate.mean()) for info in infos), default=1.0)


class PredictiveDensity(NamedTuple):
    """Log predictive density of each datum given the training data of each population."""

    log_density: Tensor  # (r, n), corrected for the bias of the logarithm to first order
    effective: Tensor  # (r, n), effective number of particles
    influence: Tensor  # (r, N, n), of each particle on the log density


def predict(log_weight: Tensor, pointwise: Tensor) -> PredictiveDensity:
    """Return the log predictive density of every datum, in the training data or not, from ``(r, N)``, ``(r, N, n)``."""
    log_weight = log_weight.unsqueeze(-1)
    log_density = (log_weight + pointwise).logsumexp(1)
    relative = (pointwise - log_density.unsqueeze(1)).exp()
    influence = log_weight.exp() * (relative - 1)
    effective = 1 / (2 * (log_weight + relative.log())).exp().sum(1)
    # E log X is smaller than log E X by half the relative variance of X, to first order.
    return PredictiveDensity(log_density + influence.square().sum(1) / 2, effective, influence)


# What is wrong with populations.

_MIN_ACCEPTANCE = 0.3


def _of_totals(totals: Tensor, increments: Tensor, acceptance: float, num_evaluations: int) -> Evidence:
    """Combine the log evidence estimates of all populations, ``(populations,)``."""
    log_evidence, error, spread, disagreement = mean_of_replicates(totals)
    problems = [*_carrying_problems(acceptance), *disagreement]
    if len(totals) < MIN_REPLICATES:
        problems.append(
            f"only {len(totals)} orders, too few to see the error: use held_out of {MIN_REPLICATES} or more"
        )
    if float(increments.min()) < LOWEST / 2:
        problems.append("the likelihood of a datum is zero at all particles: use more num_particles")
    diagnostics = {"relative_spread": spread, "acceptance_rate": acceptance}
    return Evidence("prequential", log_evidence, error, num_evaluations, tuple(problems), diagnostics)


def _carrying_problems(acceptance: float) -> list[str]:
    """Return a warning if the acceptance rate of moves is low."""
    if acceptance >= _MIN_ACCEPTANCE:
        return []
    return [
        f"the acceptance rate of moves fell to {100 * acceptance:.0f} %: use more num_particles, or "
        "reparameterise the model"
    ]


# Three estimators of the predictive densities of leave-p-out cross-validation.

_MIN_EFFECTIVE = 50
_MAX_SHARE = 0.1  # share of held-out data that may have fewer effective particles
MAX_TYPICAL_SHAPE = 0.25  # largest median Pareto k over the held-out sets of one size
ROWS = 2**15  # particles in one batch
_LEAST_POPULATIONS = 16
_LEAST_ROWS, _LEAST_KINDS = 8, 5  # least rows and distinct control values for a regression
_DOUBT = 0.5  # share of the absolute shift that is added to the error if the slope is set to one
_MAX_DISAGREEMENT = 5.0


class _SetScores(NamedTuple):
    """Scores of held-out sets, each ``(sets,)``."""

    score: Tensor
    variance: Tensor
    short: Tensor  # share of held-out data with few effective particles
    num_evaluations: int
    acceptance: float


@dataclass(frozen=True, eq=False)
class _LeaveOut:
    """Leave-p-out cross-validation scores by random orders, tempering, or importance weights."""

    data: WeightedData
    sizes: tuple[int, ...]  # increasing numbers of held-out data
    num_particles: int
    steps: ResampleMove
    generator: torch.Generator

    def _result(
        self, method: str, score: Tensor, errors: tuple[Tensor, Tensor], sets: Tensor, problems: list[str], **more: Any
    ) -> CrossValidation:
        sizes, warnings = torch.tensor(self.sizes), tuple(problems + _impossible(score))
        return CrossValidation(method, self.data.num_data, sizes, score, *errors, sets, warnings, **more)

    def by_orders(self, num_orders: int) -> CrossValidation:
        """Assimilate the data in ``num_orders`` random orders and predict the data not yet assimilated."""
        data, device = self.data, self.data.target.device
        orders = random_orders(num_orders, data.num_data, self.generator).to(device)
        state = prior_populations(data, num_orders, self.num_particles, self.generator)
        infos: list[SMCInfo] = []
        score = torch.empty(num_orders, len(self.sizes), dtype=torch.float64, device=device)
        increments = torch.empty_like(score)
        surprising = torch.zeros(len(self.sizes), dtype=torch.bool)
        for column, size in reversed(list(enumerate(self.sizes))):
            seen = data.num_data - size
            state = self._carried(state, _mask(orders[:, :seen], data.num_data), infos)
            predictive = predict(state.particles.log_weight, state.pointwise)
            score[:, column], short, _ = _held_out_mean(predictive, state.data_weights == 0)
            weights = state.data_weights.scatter(1, orders[:, seen : seen + 1], 1.0)
            state, increments[:, column], new, _ = carry(data, state, weights, self.steps, self.generator)
            infos += new
            surprising[column] = float(short.mean()) > _MAX_SHARE
        state = self._carried(state, torch.ones_like(state.data_weights), infos)
        acceptance = _acceptance_rate(infos)
        # If few particles support the held-out data, use the tempered estimate for the next datum instead.
        score = torch.where(surprising.to(device), increments, score)
        rows, doubt = adjusted(score, *self._controls(orders, state, surprising.to(device)))
        few = self._of_few_sets(num_orders)
        problems = max([_carrying_problems(acceptance), _moved_problems(list(few.values()))], key=len)
        sums, count, spent = None, torch.full((len(self.sizes),), num_orders), state.num_evaluations
        score, own = rows.mean(0), torch.zeros_like(doubt)
        for column, scored in ((self.sizes.index(p), x) for p, x in few.items()):
            rows[:, column], doubt[column], score[column] = 0.0, 0.0, scored.score.mean()
            own[column] = scored.variance.sum() / len(scored.score) ** 2
            count[column], spent = len(scored.score), spent + scored.num_evaluations
        error = (widened_standard_error(rows).square() + doubt.square() + own).sqrt()
        # The error from data values never held out is common to all sizes, so it adds linearly.
        cumulative_error = (
            widened_standard_error(rows.cumsum(1)).square() + doubt.cumsum(0).square() + own.cumsum(0)
        ).sqrt()
        if len(self.sizes) == data.num_data:
            sums = _of_totals(increments.sum(1), increments, acceptance, state.num_evaluations)
            problems += [x for x in sums.warnings if x not in problems]
            gap = abs(float(score.sum()) - sums.log_evidence)
            if gap > _MAX_DISAGREEMENT * math.hypot(float(cumulative_error[-1]), sums.standard_error):
                problems.append(
                    f"the sum of the scores differs by {gap:.2g} nats from the prequential log evidence of the same "
                    "particles: use more num_particles"
                )
        errors = error, cumulative_error
        return self._result("orders", score, errors, count, problems, num_evaluations=spent, prequential=sums)

    def _carried(self, state: DataPopulations, weights: Tensor, infos: list[SMCInfo]) -> DataPopulations:
        """Carry populations to data ``weights``, and add those of its steps to ``infos``."""
        state, _, new, _ = carry(self.data, state, weights, self.steps, self.generator)
        infos += new
        return state

    def _of_few_sets(self, num_orders: int) -> dict[int, _SetScores]:
        """Score every set of each size with at most ``num_orders`` sets, if the particles suffice."""
        # Random orders would repeat some of these sets and miss others.
        n, found = self.data.num_data, {}
        for size in self.sizes:
            if size < n and math.comb(n, size) <= num_orders:
                held = all_sets(n, size).to(self.data.target.device)
                scored = self._scored(held, None, copies=math.ceil(num_orders / len(held)))
                if float(scored.short.mean()) <= _MAX_SHARE:
                    found[size] = scored
        return found

    def _controls(self, orders: Tensor, state: DataPopulations, first_only: Tensor) -> tuple[Tensor, Tensor]:
        """Return log densities of held-out data given all data, ``(orders, sizes)``, and the mean over data, ``()``."""
        # Control variates for the choice of held-out data: their mean over all data is known.
        each = predict(state.particles.log_weight, state.pointwise).log_density.mean(0)
        along = each[orders].flip(1)
        means = along.cumsum(1) / torch.arange(1, orders.shape[1] + 1, device=orders.device)
        columns = torch.tensor(self.sizes, device=orders.device) - 1
        return torch.where(first_only, along[:, columns], means[:, columns]), each.mean()

    def by_tempering(self) -> CrossValidation:
        """Temper one population, or several if sets are few, from the prior to the training data of every set."""
        sets = [all_sets(self.data.num_data, size).to(self.data.target.device) for size in self.sizes]
        columns = [self._scored(held, None, copies=math.ceil(_LEAST_POPULATIONS / len(held))) for held in sets]
        score = torch.stack([x.score.mean() for x in columns])
        variance = torch.stack([x.variance.sum() / len(x.variance) ** 2 for x in columns])
        count = torch.tensor([len(held) for held in sets])
        problems = _moved_problems(columns) + _short_problems(self.sizes, [float(x.short.mean()) for x in columns])
        spent = sum(x.num_evaluations for x in columns)
        errors = variance.sqrt(), variance.cumsum(0).sqrt()
        return self._result("tempering", score, errors, count, problems, num_evaluations=spent)

    def by_importance(self, draws: Draws, num_sets: int | None) -> CrossValidation:
        """Weight posterior draws by the inverse held-out likelihood, or use particles if Pareto ``k`` is large."""
        belongs(draws, self.data.target)
        problems, _ = posterior_problems(draws)
        flat = draws.unconstrained.flatten(0, 1)
        pointwise = self.data.pointwise(flat).to(torch.float64)
        shape = draws.unconstrained.shape[:2]
        columns = [self._of_size(size, flat, pointwise, num_sets) for size in self.sizes]
        rerun = [x.rerun for x in columns if x.rerun is not None]
        problems += _moved_problems(rerun) + _short_problems(
            self.sizes, [0.0 if x.rerun is None else float(x.rerun.short.mean()) for x in columns]
        )
        influence = torch.stack([x.influence for x in columns]).unflatten(1, shape)
        own = torch.stack([x.variance for x in columns])
        score = torch.stack([x.score for x in columns])
        error = (mean_error(influence).square() + own).sqrt()
        cumulative_error = (mean_error(influence.cumsum(0)).square() + own.cumsum(0)).sqrt()
        return self._result(
            "importance",
            score,
            (error, cumulative_error),
            torch.tensor([x.num_sets for x in columns]),
            problems,
            num_evaluations=sum(x.num_evaluations for x in rerun),
            pareto_k=torch.stack([x.pareto_k for x in columns]),
            num_rerun=torch.tensor([0 if x.rerun is None else len(x.rerun.score) for x in columns]),
        )

    def _of_size(self, size: int, flat: Tensor, pointwise: Tensor, num_sets: int | None) -> _OfSize:
        n = self.data.num_data
        held = all_sets(n, size) if num_sets is None else sampled_sets(n, size, num_sets, self.generator)
        held = held.to(pointwise.device)
        score = torch.empty(len(held), dtype=torch.float64, device=held.device)
        log_weight, pareto_k = pareto_smoothed(-(held.to(pointwise) @ pointwise.mT))
        # Estimates of k are noisy, and too low where the tail was missed. If the median is large, keeping only the sets
        # with a small estimate would bias the score upward, so all sets are recomputed.
        good = (pareto_k <= MAX_PARETO_SHAPE) & (pareto_k.median() <= MAX_TYPICAL_SHAPE)
        influence = torch.zeros(len(flat), dtype=torch.float64, device=held.device)
        for row in good.nonzero().flatten().tolist():
            weighted = log_weight[row].unsqueeze(1) + pointwise[:, held[row]]
            log_density = weighted.logsumexp(0)
            score[row] = log_density.mean()
            relative = (weighted - log_density).exp() - log_weight[row].exp().unsqueeze(1)
            influence += len(flat) * relative.mean(1) / len(held)
        rerun = self._scored(held[~good], flat) if not bool(good.all()) else None
        variance = torch.zeros((), dtype=torch.float64, device=held.device)
        if rerun is not None:
            score[~good] = rerun.score
            variance = variance + rerun.variance.sum() / len(held) ** 2
        missing = 1 - len(held) / math.comb(n, size)
        if missing > 0:
            each = pointwise.logsumexp(0) - math.log(len(flat))
            control = (held.to(each) @ each) / size
            rows, doubt = adjusted(score.unsqueeze(1), control.unsqueeze(1), each.mean())
            score = rows.squeeze(1)
            variance = variance + (missing * widened_standard_error(rows).square() + doubt.square()).squeeze()
        return _OfSize(score.mean(), influence, variance, len(held), pareto_k.max(), rerun)

    def _scored(self, held: Tensor, draws: Tensor | None, copies: int = 1) -> _SetScores:
        """Move ``copies`` populations of prior or posterior draws to the training data of each set."""
        size = max(1, ROWS // (self.num_particles * copies))
        parts = [self._chunk(held[s : s + size], draws, copies) for s in range(0, len(held), size)]
        score, variance, short = (torch.cat([p[i] for p in parts]) for i in range(3))  # type: ignore[misc]
        return _SetScores(
            score, variance, short, sum(p.num_evaluations for p in parts), min(p.acceptance for p in parts)
        )

    def _chunk(self, held: Tensor, draws: Tensor | None, copies: int) -> _SetScores:
        rows = held.repeat_interleave(copies, 0)
        if draws is None:
            state = prior_populations(self.data, len(rows), self.num_particles, self.generator)
        else:
            like = {"generator": self.generator, "device": draws.device}
            chosen = torch.randint(len(draws), (len(rows), self.num_particles), **like)  # type: ignore[call-overload]
            state = _populations(self.data, draws[chosen], 1.0)
        infos: list[SMCInfo] = []
        state = self._carried(state, (~rows).to(torch.float64), infos)
        score, short, influence = _held_out_mean(predict(*_merged(state, copies)), held)
        return _SetScores(score, influence.square().sum(1), short, state.num_evaluations, _acceptance_rate(infos))


class _OfSize(NamedTuple):
    score: Tensor  # ()
    influence: Tensor  # (draws,), of each posterior draw on the score
    variance: Tensor  # (), not including the variance from the posterior draws
    num_sets: int
    pareto_k: Tensor  # (), of the worst set
    rerun: _SetScores | None


def _mask(rows: Tensor, num_data: int) -> Tensor:
    return torch.zeros(len(rows), num_data, dtype=torch.float64, device=rows.device).scatter(1, rows, 1.0)


def _held_out_mean(predictive: PredictiveDensity, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean log predictive density of held-out data, their share with few particles, and the influences."""
    share = held / held.sum(1, keepdim=True)
    short = ((predictive.effective < _MIN_EFFECTIVE) * share).sum(1)
    return (predictive.log_density * share).sum(1), short, (predictive.influence * share.unsqueeze(1)).sum(-1)


def adjusted(score: Tensor, control: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Regress ``score (r, m)`` on ``control (r, m)`` of mean ``centre``; return scores and a further error ``(m,)``."""
    r = len(score)
    x, y = control - control.mean(0), score - score.mean(0)
    # The slope of each row is estimated from the other rows, so that the adjustment is unbiased.
    covariance = (x * y).sum(0) - r / (r - 1) * x * y
    variance = x.square().sum(0) - r / (r - 1) * x.square()
    # With fewer than five distinct control values (discrete data) the slope is set to one and half the absolute shift
    # is added to the error, to cover values not sampled.
    kinds = 1 + (control.sort(0).values.diff(dim=0) > 1e-9 * control.abs().amax(0)).sum(0)
    some = (kinds >= _LEAST_KINDS) & (r >= _LEAST_ROWS) & (variance > 1e-12 * control.square().sum(0))
    slope = torch.where(some, covariance / torch.where(some, variance, 1.0), 1.0)
    shift = (control.mean(0) - centre).abs()
    return score - slope * (control - centre), torch.where(kinds < _LEAST_KINDS, _DOUBT * shift, 0.0)


def widened_standard_error(values: Tensor) -> Tensor:
    """Return the standard error of the mean over rows, ``(r, m) -> (m,)``, widened by Student-t quantiles."""
    r = len(values)
    if r < 3:
        return torch.full_like(values[0], torch.nan)
    return float(student.ppf(0.975, r - 2) / norm.ppf(0.975)) * values.std(0) / math.sqrt(r)


def _moved_problems(scored: list[_SetScores]) -> list[str]:
    return max((_carrying_problems(x.acceptance) for x in scored), key=len, default=[])


def _short_problems(sizes: tuple[int, ...], short: list[float]) -> list[str]:
    worst = [p for p, share in zip(sizes, short, strict=True) if share > _MAX_SHARE]
    if not worst:
        return []
    return [
        f"with {worst} data held out, predictive densities have fewer than {_MIN_EFFECTIVE} effective particles: use "
        "more num_particles, or set held_out= to a number of random sets"
    ]


def _impossible(score: Tensor) -> list[str]:
    if float(score.min()) > LOWEST / 1e6:
        return []
    return ["the likelihood of a held-out datum is zero at all particles: use more num_particles"]


# The log evidence as a sum of leave-p-out cross-validation scores.

BLOCK = 4096  # training sets in one batch


@takes_draws
def cross_validation_evidence(
    target: Target,
    draws: Draws | None = None,
    *,
    p: int | Iterable[int] | None = None,
    held_out: int | Literal["all"] = 32,
    num_particles: int = 256,
    steps: ResampleMove | None = None,
    groups: Tensor | None = None,
    max_sets: int = 1024,
    seed: int = 0,
) -> CrossValidation:
    r"""Leave-p-out cross-validation scores of a posterior; the scores for all ``p`` sum to the log evidence.

    With :math:`S(p)` the mean log predictive density of a held-out datum given the training data, over all sets of
    :math:`p` held-out data,

    .. math:: \log p(y_1, \dots, y_n) = \sum_{p=1}^n S(p).

    :math:`S(n)` depends on the prior alone. The sum up to ``P < n`` is the score after ``n - P`` data have updated the
    prior.

    Given ``draws``, they are weighted by the inverse likelihood of the held-out data (Pareto smoothed). Sets with
    Pareto ``k`` above 0.7, and all sets of a size whose median ``k`` exceeds 0.25, are recomputed by SMC from the draws
    to the training data. Without draws, SMC starts from the prior: for random sets, particles assimilate the data in
    random orders and predict the remaining data at each step; for all sets, they are tempered to each training set.

    Parameters
    ----------
    target : Target
        Target with a pointwise log likelihood of conditionally independent data; for a Gibbs posterior, minus the
        weighted loss. The prior must be proper, unless ``draws`` are given and ``p < n``.
    draws : Draws, optional
        Posterior draws of ``target``.
    p : int or iterable of int, optional
        Number of data held out; by default all of ``1, ..., n``. Use ``range(1, P + 1)`` for the cumulative score up to
        ``P``.
    held_out : int or "all", default 32
        Number of random sets of each size, at least 2, or all sets; sizes with no more sets use all. If the data are
        discrete, errors are widened for values that random sets may miss.
    num_particles : int, default 256
        Particles in each population, at least 8.
    steps : ResampleMove, optional
        Settings of the SMC steps; by default moves end at a correlation of 0.1.
    groups : Tensor, optional
        Integer label of each observation, ``(num_observations,)``; observations with equal labels form one datum.
    max_sets : int, default 1024
        Maximum number of sets to enumerate, over all sizes.

    Raises
    ------
    SettingsError
        If ``p`` is not between 1 and ``n``, there are too many sets to enumerate, or the prior is needed and cannot be
        sampled.
    ModelError
        If the target has no pointwise log likelihood, or its terms do not add up to the log likelihood.
    DrawsError
        If the draws belong to another target.
    InitializationError
        If the likelihood of a datum is zero at all prior draws.
    ShapeError
        If ``groups`` has the wrong shape.

    References
    ----------
    Fong, E., Holmes, C. C. (2020). On the marginal likelihood and cross-validation. Biometrika 107, 489-496. Vehtari,
    A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of Machine
    Learning Research 25(72).

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    >>> result = cross_validation_evidence(target, held_out="all")
    >>> abs(result.log_evidence - torch.tensor(1 / 20).log().item()) < 5 * result.log_evidence_standard_error
    True
    """
    begin = time.monotonic()
    data = WeightedData(target, groups)
    sizes = as_sizes(p, data.num_data)
    count = None if held_out == "all" else whole_number("held_out", held_out, 2)
    if count is None:
        most = whole_number("max_sets", max_sets, 1)
        _check_number(data.num_data, sizes, most, "set held_out= to a number of random sets, or raise max_sets")
    else:
        check_memory("held_out", count, 8 * num_particles)
    if draws is not None and sizes[-1] == data.num_data and not target.can_sample_prior:
        raise SettingsError(
            f"with all {data.num_data} data held out only the prior predicts, and it cannot be sampled; use "
            f"p=range(1, {data.num_data}) or fewer"
        )
    leave_out = _LeaveOut(
        data,
        sizes,
        whole_number("num_particles", num_particles, 8),
        steps or _STEPS,
        new_generator(seed, target.device, stream="cross-validation"),
    )
    if draws is not None:
        found = leave_out.by_importance(draws, count)
    else:
        found = leave_out.by_tempering() if count is None else leave_out.by_orders(count)
    return replace(found, seconds=time.monotonic() - begin)


def enumerated_cross_validation(
    log_evidence: Callable[[Tensor], Tensor],
    num_data: int,
    p: int | Iterable[int] | None = None,
    *,
    max_sets: int = 2**16,
) -> CrossValidation:
    """Exact leave-p-out scores by enumeration, without error, for a model with known evidence of every subset of data.

    The scores are those of Fong and Holmes (2020), as in :func:`cross_validation_evidence`.

    Parameters
    ----------
    log_evidence : callable
        ``(m, n) -> (m,)``: log evidence of the subsets marked by rows of zeros and ones, in double precision; zero for
        the empty subset.
    num_data : int
        Number of data ``n``.
    p, max_sets
        As for :func:`cross_validation_evidence`.

    Raises
    ------
    SettingsError
        If ``p`` is not between 1 and ``n``, or there are too many sets.
    ShapeError
        If ``log_evidence`` returns the wrong shape.

    Examples
    --------
    >>> import torch
    >>> y = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    >>> def log_evidence(part):  # of coin flips, the chance of heads uniform
    ...     heads, flips = (part * y).sum(1), part.sum(1)
    ...     return torch.lgamma(1 + heads) + torch.lgamma(1 + flips - heads) - torch.lgamma(2 + flips)
    >>> result = enumerated_cross_validation(log_evidence, 4)
    >>> result.score, round(result.log_evidence, 6)
    (tensor([-0.7855, -0.7651, -0.7520, -0.6931], dtype=torch.float64), -2.995732)
    """
    num_data = whole_number("num_data", num_data, 1)
    sizes = as_sizes(p, num_data)
    remedy = "estimate them with cross_validation_evidence(target, held_out=...), or raise max_sets"
    _check_number(num_data, sizes, whole_number("max_sets", max_sets, 1), remedy)
    scores, counts = [], []
    for size in sizes:
        training = ~all_sets(num_data, size)
        total = sum(float(_gains(log_evidence, block).sum()) for block in training.split(BLOCK))
        scores.append(total / (size * len(training)))
        counts.append(len(training))
    score = torch.tensor(scores, dtype=torch.float64)
    exact = torch.zeros_like(score)
    return CrossValidation("enumeration", num_data, torch.tensor(sizes), score, exact, exact, torch.tensor(counts))


def _gains(log_evidence: Callable[[Tensor], Tensor], training: Tensor) -> Tensor:
    """Return the log predictive density of each datum outside the training data ``(m, n)``."""
    which, datum = (~training).nonzero(as_tuple=True)
    one_more = training[which].scatter(1, datum.unsqueeze(1), True)
    return _evidence_of(log_evidence, one_more) - _evidence_of(log_evidence, training)[which]


def _evidence_of(log_evidence: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
    try:
        value = torch.as_tensor(log_evidence(part.to(torch.float64)))
    except BayeskitError:
        raise
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"log_evidence fails for training data of shape {tuple(part.shape)} ({error}); num_data must be the number "
            "of its data"
        ) from error
    if tuple(value.shape) != (len(part),):
        raise ShapeError(f"log_evidence maps {tuple(part.shape)} to {tuple(value.shape)} instead of ({len(part)},)")
    return value.to(torch.float64).cpu()
