"""Three ways to the predictive densities of leave-p-out cross-validation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.stats import norm
from scipy.stats import t as student
from torch import Tensor

from bayeskit._pareto_smoothing import pareto_smoothed
from bayeskit._statistics import mean_error
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import MAX_PARETO_SHAPE, belongs, posterior_problems
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.generalized.cross_validation.data_particles import (
    LOWEST,
    Carriage,
    Particles,
    at,
    from_prior,
    merged,
    predict,
)
from bayeskit.inference.generalized.cross_validation.held_out_sets import all_sets, sampled_sets
from bayeskit.inference.generalized.cross_validation.prequential import admit, as_orders, carrying_problems, of_totals
from bayeskit.inference.generalized.cross_validation.weighted_data import WeightedData

MIN_EFFECTIVE = 50
MAX_SHARE = 0.1  # of held-out data may rest on fewer particles
MAX_TYPICAL_SHAPE = 0.25  # of the tails of weights, over the held-out sets of one size
ROWS = 2**15  # particles at a time
LEAST_POPULATIONS = 16
LEAST_ROWS, LEAST_KINDS = 8, 5  # of held-out sets, for a regression
DOUBT = 0.5  # of a shift whose slope is not known
MAX_DISAGREEMENT = 5.0


class Scores(NamedTuple):
    """Scores of ``m`` numbers of held-out data, each ``(m,)``."""

    score: Tensor
    standard_error: Tensor
    cumulative_standard_error: Tensor
    num_sets: Tensor
    problems: list[str]
    num_evaluations: int
    pareto_k: Tensor | None = None
    num_rerun: Tensor | None = None
    prequential: Evidence | None = None


class SetScores(NamedTuple):
    """Scores of held-out sets, each ``(sets,)``."""

    score: Tensor
    variance: Tensor
    short: Tensor  # share of held-out data that rest on few particles
    num_evaluations: int
    acceptance: float


@dataclass(frozen=True, eq=False)
class LeaveOut:
    """What the three ways have in common.

    Parameters
    ----------
    data : WeightedData
    sizes : tuple of int
        Increasing numbers of held-out data.
    num_particles : int
    carriage : Carriage
    generator : torch.Generator
    """

    data: WeightedData
    sizes: tuple[int, ...]
    num_particles: int
    carriage: Carriage
    generator: torch.Generator

    def by_orders(self, num_orders: int) -> Scores:
        """Let a population see the data in each of so many random orders, and predict those it has not seen yet."""
        data, device = self.data, self.data.target.device
        orders = as_orders(num_orders, data.num_data, self.generator).to(device)
        state = from_prior(data, num_orders, self.num_particles, self.generator)
        score = torch.empty(num_orders, len(self.sizes), dtype=torch.float64, device=device)
        increments = torch.empty_like(score)
        surprising = torch.zeros(len(self.sizes), dtype=torch.bool)
        for column, size in reversed(list(enumerate(self.sizes))):
            seen = data.num_data - size
            state, _ = self.carriage.carry(data, state, _mask(orders[:, :seen], data.num_data), self.generator)
            score[:, column], short = _held_out_mean(state, state.data_weights == 0)
            state, increments[:, column] = admit(data, state, orders[:, seen], self.carriage, self.generator)
            surprising[column] = float(short.mean()) > MAX_SHARE
        state, _ = self.carriage.carry(data, state, torch.ones_like(state.data_weights), self.generator)
        # Where the next datum is a surprise to most particles, powers of its likelihood lead to it.
        score = torch.where(surprising.to(device), increments, score)
        rows, doubt = adjusted(score, *self._controls(orders, state, surprising.to(device)))
        few = self._of_few_sets(num_orders)
        problems = max([carrying_problems(state.acceptance), _moved_problems(list(few.values()))], key=len)
        sums, count, spent = None, torch.full((len(self.sizes),), num_orders), state.num_evaluations
        score, own = rows.mean(0), torch.zeros_like(doubt)
        for column, scored in ((self.sizes.index(p), x) for p, x in few.items()):
            rows[:, column], doubt[column], score[column] = 0.0, 0.0, scored.score.mean()
            own[column] = scored.variance.sum() / len(scored.score) ** 2
            count[column], spent = len(scored.score), spent + scored.num_evaluations
        error = (spread(rows).square() + doubt.square() + own).sqrt()
        # What a kind of data that was never held out would add, it would add to every size.
        cumulative_error = (spread(rows.cumsum(1)).square() + doubt.cumsum(0).square() + own.cumsum(0)).sqrt()
        if len(self.sizes) == data.num_data:
            sums = of_totals(increments.sum(1), increments, state)
            problems += [x for x in sums.warnings if x not in problems]
            gap = abs(float(score.sum()) - sums.log_evidence)
            if gap > MAX_DISAGREEMENT * math.hypot(float(cumulative_error[-1]), sums.standard_error):
                problems.append(
                    f"the scores add up to {gap:.2g} nats off the prequential sums of the same particles: use more "
                    "num_particles"
                )
        problems += _impossible(score)
        return Scores(score, error, cumulative_error, count, problems, spent, prequential=sums)

    def _of_few_sets(self, num_orders: int) -> dict[int, SetScores]:
        """Score all sets of sizes that have no more of them than there are orders, where particles can predict them.

        Random sets would repeat some and miss others, and those missed may be the ones that differ.
        """
        n, found = self.data.num_data, {}
        for size in self.sizes:
            if size < n and math.comb(n, size) <= num_orders:
                held = all_sets(n, size).to(self.data.target.device)
                scored = self._scored(held, None, copies=math.ceil(num_orders / len(held)))
                if float(scored.short.mean()) <= MAX_SHARE:
                    found[size] = scored
        return found

    def _controls(self, orders: Tensor, state: Particles, first_only: Tensor) -> tuple[Tensor, Tensor]:
        """Return how well the held-out data of each order and size are predicted by all data, and the mean of that.

        Some data are hard to predict whatever one has seen. Of how well all data predict a datum the mean is known,
        so that it does not matter which data happen to be held out.
        """
        each = predict(state).log_density.mean(0)
        along = each[orders].flip(1)
        means = along.cumsum(1) / torch.arange(1, orders.shape[1] + 1, device=orders.device)
        columns = torch.tensor(self.sizes, device=orders.device) - 1
        return torch.where(first_only, along[:, columns], means[:, columns]), each.mean()

    def by_tempering(self) -> Scores:
        """Carry a population, or several where sets are few, from the prior to the training data of every set."""
        columns: list[SetScores] = []
        for size in self.sizes:
            held = all_sets(self.data.num_data, size).to(self.data.target.device)
            columns.append(self._scored(held, None, copies=math.ceil(LEAST_POPULATIONS / len(held))))
        score = torch.stack([x.score.mean() for x in columns])
        variance = torch.stack([x.variance.sum() / len(x.variance) ** 2 for x in columns])
        count = torch.tensor([math.comb(self.data.num_data, p) for p in self.sizes])
        problems = _moved_problems(columns) + _short_problems(self.sizes, [float(x.short.mean()) for x in columns])
        problems += _impossible(score)
        spent = sum(x.num_evaluations for x in columns)
        return Scores(score, variance.sqrt(), variance.cumsum(0).sqrt(), count, problems, spent)

    def by_importance(self, draws: Draws, num_sets: int | None) -> Scores:
        """Weight draws of the posterior by one over the likelihood of what is held out.

        Where the tail of the weights is too heavy, particles are carried from draws to the training data.
        """
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
        problems += _impossible(score)
        return Scores(
            score,
            (mean_error(influence).square() + own).sqrt(),
            (mean_error(influence.cumsum(0)).square() + own.cumsum(0)).sqrt(),
            torch.tensor([x.num_sets for x in columns]),
            problems,
            sum(x.num_evaluations for x in rerun),
            pareto_k=torch.stack([x.pareto_k for x in columns]),
            num_rerun=torch.tensor([0 if x.rerun is None else len(x.rerun.score) for x in columns]),
        )

    def _of_size(self, size: int, flat: Tensor, pointwise: Tensor, num_sets: int | None) -> _OfSize:
        n = self.data.num_data
        held = all_sets(n, size) if num_sets is None else sampled_sets(n, size, num_sets, self.generator)
        held = held.to(pointwise.device)
        score = torch.empty(len(held), dtype=torch.float64, device=held.device)
        log_weight, pareto_k = pareto_smoothed(-(held.to(pointwise) @ pointwise.mT))
        # Estimates of shapes are uncertain, and lowest where the tail was missed: of sets that are all alike, choosing
        # those that look good would choose those that are too high.
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
            variance = variance + (missing * spread(rows).square() + doubt.square()).squeeze()
        return _OfSize(score.mean(), influence, variance, len(held), pareto_k.max(), rerun)

    def _scored(self, held: Tensor, draws: Tensor | None, copies: int = 1) -> SetScores:
        """Carry ``copies`` populations, of the prior or of posterior draws, to the training data of each set."""
        size = max(1, ROWS // (self.num_particles * copies))
        parts = [self._chunk(held[s : s + size], draws, copies) for s in range(0, len(held), size)]
        score, variance, short = (torch.cat([p[i] for p in parts]) for i in range(3))  # type: ignore[misc]
        return SetScores(
            score, variance, short, sum(p.num_evaluations for p in parts), min(p.acceptance for p in parts)
        )

    def _chunk(self, held: Tensor, draws: Tensor | None, copies: int) -> SetScores:
        rows = held.repeat_interleave(copies, 0)
        if draws is None:
            state = from_prior(self.data, len(rows), self.num_particles, self.generator)
        else:
            like = {"generator": self.generator, "device": draws.device}
            chosen = torch.randint(len(draws), (len(rows), self.num_particles), **like)  # type: ignore[call-overload]
            state = at(self.data, draws[chosen], 1.0)
        state, _ = self.carriage.carry(self.data, state, (~rows).to(torch.float64), self.generator)
        state = merged(state, copies)
        predictive = predict(state)
        share = held / held.sum(1, keepdim=True)
        influence = (predictive.influence * share.unsqueeze(1)).sum(-1)
        short = ((predictive.effective < MIN_EFFECTIVE) * share).sum(1)
        score = (predictive.log_density * share).sum(1)
        return SetScores(score, influence.square().sum(1), short, state.num_evaluations, state.acceptance)


class _OfSize(NamedTuple):
    score: Tensor  # ()
    influence: Tensor  # (draws,), of each posterior draw on the score
    variance: Tensor  # (), of what does not come from the posterior draws
    num_sets: int
    pareto_k: Tensor  # (), of the worst set
    rerun: SetScores | None


def _mask(rows: Tensor, num_data: int) -> Tensor:
    return torch.zeros(len(rows), num_data, dtype=torch.float64, device=rows.device).scatter(1, rows, 1.0)


def _held_out_mean(state: Particles, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean log predictive density of held-out data, and the share of them that rest on few particles."""
    predictive = predict(state)
    share = held / held.sum(1, keepdim=True)
    short = ((predictive.effective < MIN_EFFECTIVE) * share).sum(1)
    return (predictive.log_density * share).sum(1), short


def adjusted(score: Tensor, control: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Regress scores on controls whose mean over all held-out sets is known.

    Parameters
    ----------
    score, control : Tensor
        Shape ``(r, m)``: a row for each held-out set or order.
    centre : Tensor
        The mean of the controls over all sets.

    Returns
    -------
    score : Tensor
        Shape ``(r, m)``.
    doubt : Tensor
        Shape ``(m,)``: a further error of the mean, where sets are of few kinds.
    """
    r = len(score)
    x, y = control - control.mean(0), score - score.mean(0)
    # The slope of each row comes from the others, so that no row is adjusted by what it is itself.
    covariance = (x * y).sum(0) - r / (r - 1) * x * y
    variance = x.square().sum(0) - r / (r - 1) * x.square()
    # A line fits few kinds of sets, as of discrete data, perfectly. Theirs is the slope of scores that differ from
    # controls by a constant, and the shift itself says how much a rare kind not drawn may add.
    kinds = 1 + (control.sort(0).values.diff(dim=0) > 1e-9 * control.abs().amax(0)).sum(0)
    some = (kinds >= LEAST_KINDS) & (r >= LEAST_ROWS) & (variance > 1e-12 * control.square().sum(0))
    slope = torch.where(some, covariance / torch.where(some, variance, 1.0), 1.0)
    shift = (control.mean(0) - centre).abs()
    return score - slope * (control - centre), torch.where(kinds < LEAST_KINDS, DOUBT * shift, 0.0)


def spread(values: Tensor) -> Tensor:
    """Return the standard error of the mean of regressed rows, ``(r, m) -> (m,)``, widened where they are few."""
    r = len(values)
    if r < 3:
        return torch.full_like(values[0], torch.nan)
    return float(student.ppf(0.975, r - 2) / norm.ppf(0.975)) * values.std(0) / math.sqrt(r)


def _moved_problems(scored: list[SetScores]) -> list[str]:
    found = [carrying_problems(x.acceptance) for x in scored]
    return max(found, key=len, default=[])


def _short_problems(sizes: tuple[int, ...], short: list[float]) -> list[str]:
    worst = [p for p, share in zip(sizes, short, strict=True) if share > MAX_SHARE]
    if not worst:
        return []
    return [
        f"with {worst} data held out, densities of new data rest on fewer than {MIN_EFFECTIVE} particles: use more "
        "num_particles, or held_out= a number of random sets, which are reached by powers of the likelihood"
    ]


def _impossible(score: Tensor) -> list[str]:
    if float(score.min()) > LOWEST / 1e6:
        return []
    return ["the likelihood of a held-out datum is zero at all particles: use more num_particles"]
