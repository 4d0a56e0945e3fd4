"""Nested sampling: the prior is compressed towards the largest likelihood by factors of known distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import scipy
import torch
from torch import Tensor

from bayeskit._core.compatibility import as_inference_data
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.texts import short_repr
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import DataError, InitializationError, SettingsError, ShapeError
from bayeskit.inference.samplers._driver import (
    CHECKPOINT_SECONDS,
    Control,
    Ending,
    Outcome,
    Records,
    drive,
    nothing_done,
    say_early,
)
from bayeskit.inference.samplers._metric import Metric

# Slice sampling of the prior above a likelihood threshold, for a batch of chains.

_MAX_SHRINKS = 200
"""Largest number of bracket shrinkages before a chain keeps its point; exact arithmetic needs far fewer."""
TICKS_BETWEEN_CHECKS = 4
"""Batches between tests for completion, which synchronise with the device."""


class SliceState(NamedTuple):
    """State of ``n`` chains; ``n`` is the leading dimension."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,); NaN counts as -inf
    label: Tensor  # (n,), uniform on (0, 1): puts equal likelihoods in order


class SliceInfo(NamedTuple):
    """Diagnostics of one call."""

    num_evaluations: Tensor  # (n,), evaluations of the chain
    num_stuck: Tensor  # (n,), updates that found no new point
    num_nan: Tensor  # (n,), evaluations with a NaN likelihood
    num_batches: Tensor  # (), evaluations of the whole batch


class _Plan(NamedTuple):
    """Random numbers of the updates; the leading dimensions are update and chain, ``(num_steps, n)``."""

    brackets: Tensor  # (num_steps, n, d), as vectors
    levels: Tensor  # depth of the slice below the log prior
    starts: Tensor  # start of the bracket relative to the point, in bracket lengths
    labels: Tensor  # (num_steps + 1, n), the last for the points that remain


@dataclass(frozen=True, eq=False)
class ConstrainedSlice:
    """Hit-and-run slice sampling of the prior restricted to likelihoods above a threshold.

    Each update draws a direction, places a bracket at random around the point and shrinks it towards the point until a
    draw lies on the slice: above a level drawn under the prior density, and above the threshold. Directions come from a
    randomly rotated orthonormal basis of the metric, redrawn after each sweep. A share of them is replaced by the
    difference of two ensemble members, which allows jumps between modes. Brackets are many standard deviations long and
    are not stepped out; a bracket that is too long costs one shrinking step for each factor of two.

    Chains run asynchronously: at each evaluation a chain is at its own update, until all have made ``num_steps``.

    Equal likelihoods are ordered by labels, uniform variables redrawn with each update, so plateaus of the likelihood
    need no special treatment.

    Parameters
    ----------
    threshold : Tensor
        Lower bound of the log likelihood, shape ``()``.
    threshold_label : Tensor
        Lower bound of the label at a likelihood equal to the threshold, shape ``()``.
    metric : Metric
        Approximate covariance of the constrained prior.
    ensemble : Tensor
        Points with approximately the spread of the constrained prior, ``(m, d)`` with ``m`` at least 2. Ensemble and
        metric must not depend on the points that are moved, or the kernel has another invariant distribution.
    num_steps : int, default 20
        Updates per chain in one call of :meth:`step`.
    width : float, default 10
        Bracket length in standard deviations along a basis direction.
    pair_width : float, default 2
        Bracket length in multiples of an ensemble difference.
    pair_share : float in [0, 1], default 0.25
        Share of directions that are ensemble differences.
    planned_calls : int, default 1
        Expected number of evaluations, which decides whether ``Target`` compiles.

    References
    ----------
    Neal, R. M. (2003). Slice sampling. Annals of Statistics 31, 705-767.
    ter Braak, C. J. F. (2006). A Markov chain Monte Carlo version of the genetic
    algorithm differential evolution. Statistics and Computing 16, 239-249.

    Examples
    --------
    A standard normal prior restricted to a disc:

    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import Metric
    >>> from bayeskit.inference.samplers import ConstrainedSlice
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: -u.square().sum(-1), dim=2)
    >>> generator = torch.Generator().manual_seed(0)
    >>> ensemble = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    >>> level = torch.tensor(-1.0, dtype=torch.float64)
    >>> kernel = ConstrainedSlice(level, torch.zeros_like(level), Metric.dense(ensemble.T.cov()), ensemble)
    >>> state = kernel.init(target, torch.zeros(8, 2, dtype=torch.float64), generator=generator)
    >>> state, info = kernel.step(target, state, generator=generator)
    >>> bool((state.position.square().sum(-1) < 1).all())
    True
    """

    threshold: Tensor
    threshold_label: Tensor
    metric: Metric
    ensemble: Tensor
    num_steps: int = 20
    width: float = 10.0
    pair_width: float = 2.0
    pair_share: float = 0.25
    planned_calls: int = 1

    __repr__ = short_repr

    def __post_init__(self) -> None:
        whole_number("num_steps", self.num_steps, least=1)
        real_number("width", self.width, "(0, inf)")
        real_number("pair_width", self.pair_width, "(0, inf)")
        real_number("pair_share", self.pair_share, "[0, 1]")
        if self.ensemble.dim() != 2 or self.ensemble.shape[0] < 2:
            raise ShapeError(
                f"the ensemble must hold at least two points, shape (m, d), and has shape {tuple(self.ensemble.shape)}"
            )

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> SliceState:
        """Evaluate the density at ``position``, shape ``(n, d)``, and draw labels."""
        log_prior, log_likelihood = self._evaluate(target, position)
        label = torch.rand(len(position), dtype=torch.float64, device=position.device, generator=generator)
        log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return SliceState(position, log_prior, log_likelihood, label)

    def step(self, target: Target, state: SliceState, *, generator: torch.Generator) -> tuple[SliceState, SliceInfo]:
        """Make ``num_steps`` updates of every chain; chains have to start above the threshold."""
        x, log_prior, log_likelihood, _ = state
        n = x.shape[0]
        plan = self._plan(x, generator)
        chain = torch.arange(n, device=x.device)
        update, evaluations, stuck, nan, shrinks = torch.zeros(5, n, dtype=torch.int64, device=x.device)
        low, high = plan.starts[0], plan.starts[0] + 1
        batches = 0
        while True:
            now = update.clamp(max=self.num_steps - 1)  # a finished chain repeats its last update in vain
            label = self._label(log_likelihood, plan.labels[update, chain])
            t = low + (high - low) * torch.rand(n, dtype=x.dtype, device=x.device, generator=generator)
            proposal = torch.addcmul(x, t.unsqueeze(-1), plan.brackets[now, chain])
            new_prior, new_likelihood = self._evaluate(target, proposal)
            batches += 1

            active = update < self.num_steps
            on_slice = self._inside(log_prior, new_prior, plan.levels[now, chain])
            accept = active & on_slice & self.above(new_likelihood, label)
            x = torch.where(accept.unsqueeze(-1), proposal, x)
            log_prior = torch.where(accept, new_prior, log_prior)
            log_likelihood = torch.where(accept, new_likelihood, log_likelihood)
            shrinks = shrinks + 1
            give_up = active & ~accept & (shrinks >= _MAX_SHRINKS)
            evaluations, stuck = evaluations + active, stuck + give_up
            nan = nan + (active & new_likelihood.isnan())

            done = accept | give_up
            update = update + done
            shrinks = torch.where(done, 0, shrinks)
            start = plan.starts[update.clamp(max=self.num_steps - 1), chain]
            low = torch.where(done, start, torch.where(t < 0, t, low))
            high = torch.where(done, start + 1, torch.where(t < 0, high, t))
            if batches % TICKS_BETWEEN_CHECKS == 0 and not bool((update < self.num_steps).any()):
                break
        label = self._label(log_likelihood, plan.labels[-1])
        total = torch.full((), batches, dtype=torch.int64, device=x.device)
        return SliceState(x, log_prior, log_likelihood, label), SliceInfo(evaluations, stuck, nan, total)

    def _evaluate(self, target: Target, position: Tensor) -> tuple[Tensor, Tensor]:
        evaluation = target.evaluator(position.shape[0], self.planned_calls)(position, torch.ones_like(position[:, 0]))
        return evaluation.log_prior, evaluation.log_likelihood

    def _plan(self, x: Tensor, generator: torch.Generator) -> _Plan:
        """Draw the random numbers of every update."""
        shape = (self.num_steps, x.shape[0])
        brackets = self._brackets(shape, generator)
        uniform = torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator)
        levels = -uniform.clamp(min=torch.finfo(x.dtype).tiny).log()
        starts = -torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator)
        labels = torch.rand(shape[0] + 1, shape[1], dtype=torch.float64, device=x.device, generator=generator)
        return _Plan(brackets, levels, starts, labels)

    def _brackets(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Return brackets as vectors, ``(num_steps, n, d)``."""
        m, d = self.ensemble.shape
        device, n = self.ensemble.device, shape[1]
        sweeps = -(-shape[0] // d)
        noise = torch.randn(sweeps, n, d, d, dtype=self.ensemble.dtype, device=device, generator=generator)
        basis = torch.linalg.qr(noise).Q.transpose(1, 2).reshape(-1, n, d)[: shape[0]]
        turned = self.metric.to_position(self.width * basis.reshape(-1, d)).reshape(*shape, d)
        first = torch.randint(m, shape, device=device, generator=generator)
        second = (first + torch.randint(1, m, shape, device=device, generator=generator)) % m
        pairs = self.pair_width * (self.ensemble[first] - self.ensemble[second])
        choose_pair = torch.rand(shape, device=device, generator=generator) < self.pair_share
        return torch.where(choose_pair.unsqueeze(-1), pairs, turned)

    def _inside(self, log_prior: Tensor, new_prior: Tensor, level: Tensor) -> Tensor:
        """Tell whether a point lies on the slice under the prior density."""
        return new_prior >= log_prior - level

    def above(self, log_likelihood: Tensor, label: Tensor) -> Tensor:
        """Return whether the likelihood exceeds the threshold; labels decide ties."""
        tied = (log_likelihood == self.threshold) & (label > self.threshold_label)
        return (log_likelihood > self.threshold) | tied

    def _label(self, log_likelihood: Tensor, uniform: Tensor) -> Tensor:
        """Redraw labels given the likelihood: uniform, and above the threshold's label if tied with the threshold."""
        low = torch.where(log_likelihood > self.threshold, torch.zeros_like(uniform), self.threshold_label)
        return low + (1 - low) * uniform


# New live points by rejection: independent prior draws above the threshold.

_MAX_ROUNDS = 4


class PointsAbove(NamedTuple):
    """Points above a threshold, as many as were found but no more than wanted."""

    points: SliceState
    num_evaluations: int
    num_nan: Tensor  # (), evaluations with a NaN likelihood


def draw_above(
    target: Target, kernel: ConstrainedSlice, num_points: int, share: float, most: int, generator: torch.Generator
) -> PointsAbove:
    """Draw ``num_points`` from the prior above a kernel's threshold; fewer if its mass is below ``share``.

    At most ``most`` prior draws are evaluated at once.
    """
    # These points are independent of all others. Copies become independent only by moving far, which fails on a funnel.
    parts: list[SliceState] = []
    found, spent = 0, 0
    num_nan = torch.zeros((), dtype=torch.int64, device=kernel.threshold.device)
    for _ in range(_MAX_ROUNDS * math.ceil(num_points / (most * share))):
        rows = min(math.ceil(1.2 * (num_points - found) / share), most)
        position = target.sample_prior(rows, seed=generator).to(target.device)
        log_prior, log_likelihood = target.evaluate(position, compiled=False)
        spent, num_nan = spent + rows, num_nan + log_likelihood.isnan().sum()
        log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        label = torch.rand(rows, dtype=torch.float64, device=position.device, generator=generator)
        # A draw may overflow, as under a wide prior in single precision: it is rejected, as in slice sampling.
        above = kernel.above(log_likelihood, label) & log_prior.isfinite() & position.isfinite().all(-1)
        parts.append(SliceState(*(x[above] for x in (position, log_prior, log_likelihood, label))))
        found += len(parts[-1].label)
        if found >= num_points:
            break
    return PointsAbove(
        SliceState(*(torch.cat(column)[:num_points] for column in zip(*parts, strict=True))), spent, num_nan
    )


# Results of nested sampling: dead points, their prior volumes, and the insertion index test.

_SIMULATIONS_AT_ONCE = 64
_MIN_INSERTIONS = 20


@dataclass(frozen=True, eq=False)
class NestedRun:
    """Dead points in order of death, followed by the last live points.

    Attributes
    ----------
    position : Tensor
        Unconstrained, shape ``(N, d)``.
    log_prior, log_likelihood : Tensor
        Shape ``(N,)``; the likelihood is non-decreasing.
    live_counts : Tensor
        Number of live points at each death, ``(N,)``.
    insertion : Tensor
        Relative rank of each new point among the live points, ``(M,)``; independent and uniform on (0, 1) under
        correct sampling.
    start, end : Tensor
        Share of survivors below the point from which each new point was copied (NaN if drawn from the prior), and below
        its final position, ``(M,)``.
    num_live : int
    num_evaluations : int
        Evaluations of the density, counted in whole batches.
    num_nan, num_stuck : int
        Evaluations with a NaN likelihood, and slice updates that found no new point.
    ending : str
        "converged", "finished" (``max_blocks`` reached), "time budget" or "interrupted".
    seconds : float
    settings : dict
    target : Target

    Raises
    ------
    DataError, ShapeError
        If ``live_counts`` has no number of at least one for each dead point.

    References
    ----------
    Skilling, J. (2006). Nested sampling for general Bayesian computation. Bayesian
    Analysis 1, 833-859.
    Fowlie, A., Handley, W., Su, L. (2020). Nested sampling cross-checks using order
    statistics. Monthly Notices of the Royal Astronomical Society 497, 5256-5263.
    Higson, E., Handley, W., Hobson, M., Lasenby, A. (2018). Sampling errors in nested sampling parameter estimation.
    Bayesian Analysis 13, 873-896.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_nested
    >>> run = sample_nested(exact.get("beta_binomial").target(), num_live=100, progress=False)
    >>> run.draws  # doctest: +ELLIPSIS
    Draws(4 chains x ... draws, dim 1, sites: p)
    >>> run.insertion_index_p_value > 1e-3
    True
    """

    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    live_counts: Tensor
    insertion: Tensor
    start: Tensor
    end: Tensor
    num_live: int
    num_evaluations: int
    num_nan: int
    num_stuck: int
    ending: Ending
    seconds: float
    settings: dict[str, Any]
    target: Target

    def __post_init__(self) -> None:
        counts = self.live_counts
        if not isinstance(counts, Tensor) or counts.dim() != 1 or not bool((counts >= 1).all()):
            raise DataError("live_counts must be a tensor (N,) of numbers of live points, at least one at each death")
        if (shape := getattr(self.log_likelihood, "shape", None)) != counts.shape:
            raise ShapeError(
                f"log_likelihood must have the shape {tuple(counts.shape)} of live_counts, not "
                f"{shape and tuple(shape)}; give the likelihood of each dead point"
            )

    @cached_property
    def log_volume(self) -> Tensor:
        """Expected log prior volume above the likelihood of each dead point, ``(N,)``."""
        return (-1 / self.live_counts).cumsum(0)

    @cached_property
    def log_weights(self) -> Tensor:
        """Normalised log posterior weight of each dead point, ``(N,)``."""
        mass = self._log_mass
        return mass - mass.logsumexp(0)

    @property
    def log_evidence(self) -> float:
        """Log evidence at the expected log volumes."""
        return float(self._log_mass.logsumexp(0))

    @property
    def information(self) -> float:
        """Kullback-Leibler divergence from prior to posterior, in nats."""
        weights = self.log_weights.exp()
        mean = torch.where(weights > 0, weights * self.log_likelihood, 0.0).sum()
        return float(mean) - self.log_evidence

    @property
    def effective_draws(self) -> float:
        """Effective sample size of the weighted dead points."""
        return float((-(2 * self.log_weights).logsumexp(0)).exp())

    @property
    def remaining_share(self) -> float:
        """Posterior mass of the last live points; close to one if the run ended too early."""
        return float(self.log_weights[-self.num_live :].exp().sum())

    @property
    def _log_mass(self) -> Tensor:
        return log_shells(self.log_volume) + self.log_likelihood

    def simulate_log_evidence(self, num_simulations: int = 1000, *, seed: int | torch.Generator = 0) -> Tensor:
        """Redraw the prior volumes and return ``(num_simulations,)`` values of the log evidence.

        Their standard deviation is the standard error of nested sampling.

        Raises
        ------
        SettingsError
            If ``num_simulations`` is below 2.
        """
        num_simulations = whole_number("num_simulations", num_simulations, least=2)
        generator = new_generator(seed, self.live_counts.device, stream="simulated volumes")
        parts = []
        for first in range(0, num_simulations, _SIMULATIONS_AT_ONCE):
            shape = (min(_SIMULATIONS_AT_ONCE, num_simulations - first), len(self.live_counts))
            uniform = torch.rand(shape, dtype=torch.float64, device=generator.device, generator=generator)
            # Of n points uniform in the volume, the outermost leaves a share whose n-th power is uniform.
            log_volume = (torch.log1p(-uniform) / self.live_counts).cumsum(1)
            parts.append((log_shells(log_volume) + self.log_likelihood).logsumexp(1))
        return torch.cat(parts)

    @cached_property
    def insertion_index_p_value(self) -> float:
        """P-value of the Kolmogorov-Smirnov test of uniform insertion indices, over all copies."""
        return _uniform_p_value(self.insertion[~self.start.isnan()])

    @cached_property
    def rolling_insertion_index_p_value(self) -> float:
        """Smallest p-value over blocks of ``num_live`` insertions of copies, corrected for multiple testing."""
        insertion = self.insertion[~self.start.isnan()]  # insertions of prior draws are uniform in any case
        stretches = [part for part in insertion.split(self.num_live) if len(part) >= _MIN_INSERTIONS]
        if not stretches:
            return 1.0
        smallest = min(_uniform_p_value(part) for part in stretches)
        return -math.expm1(len(stretches) * math.log1p(-min(smallest, 1 - 1e-16)))

    @cached_property
    def start_correlation(self) -> float:
        """Rank correlation between the first and last positions of copies; about 0 if they are independent."""
        copied = ~self.start.isnan()
        if int(copied.sum()) < _MIN_INSERTIONS:
            return 0.0
        return float(torch.stack([self.start[copied], self.end[copied]]).corrcoef()[0, 1].nan_to_num(nan=1.0))

    @property
    def draws(self) -> Draws:
        """Equally weighted posterior draws in four chains, as many as the effective sample size.

        Their Monte Carlo errors ignore the uncertainty of the prior volumes (Higson and others 2018). For quantities
        that change along the run these errors are too small, by a factor of 1.2 to 1.5 in a small hierarchical model.
        The standard error of the evidence includes it, see :meth:`simulate_log_evidence`.
        """
        return self.resample()

    def resample(self, num_draws: int | None = None, num_chains: int = 4, *, seed: int | torch.Generator = 0) -> Draws:
        """Draw from the weighted dead points by systematic resampling.

        Parameters
        ----------
        num_draws : int, optional
            Draws per chain; by default the effective sample size divided by the number of chains.
        num_chains : int, default 4
            The order of draws is random, so the division into chains is arbitrary.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Draws
            ``sample_stats`` has ``log_weight``, the normalised log posterior weight of the dead point of each draw.

        Raises
        ------
        SettingsError
            If ``num_draws`` or ``num_chains`` is below 1.
        """
        num_chains = whole_number("num_chains", num_chains, least=1)
        count = max(1, int(self.effective_draws) // num_chains)
        if num_draws is not None:
            count = whole_number("num_draws", num_draws, least=1)
        total = num_chains * count
        generator = new_generator(seed, self.live_counts.device, stream="nested resampling")
        like = {"dtype": torch.float64, "device": generator.device, "generator": generator}
        # Systematic resampling: the number of copies of a point is its expectation, rounded up or down.
        grid = torch.arange(total, device=generator.device) + torch.rand((), **like)  # type: ignore[call-overload]
        cumulative = self.log_weights.exp().cumsum(0)
        index = torch.searchsorted(cumulative / cumulative[-1], grid / total)
        index = index.clamp(max=len(cumulative) - 1)[torch.rand(total, **like).argsort()]  # type: ignore[call-overload]
        shape = (num_chains, count)
        return Draws(
            self.position[index].reshape(*shape, -1),
            self.log_prior[index].reshape(shape),
            self.log_likelihood[index].reshape(shape),
            torch.ones(num_chains, dtype=self.position.dtype, device=self.position.device),
            {"log_weight": self.log_weights[index].reshape(shape)},
            num_gradients=self.num_evaluations,
            seconds=self.seconds,
            settings=dict(self.settings),
            target=self.target,
        )

    def to_arviz(self) -> Any:
        """Return the run as ``InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (ArviZ 1.x).

        ArviZ does not support weighted draws, so its groups hold the equally weighted :attr:`draws`, named by site.
        ``sample_stats`` has ``log_weight``, the log posterior weight of the dead point of each draw. The attributes of
        ``posterior`` include the evidence and the ending of the run.
        """
        groups = self.draws.to_datasets()
        facts = {
            "log_evidence": self.log_evidence,
            "log_evidence_error": float(self.simulate_log_evidence().std()),
            "information": self.information,
            "effective_draws": self.effective_draws,
            "num_live": self.num_live,
            "ending": self.ending,
        }
        groups["posterior"] = groups["posterior"].assign_attrs(facts)
        return as_inference_data(groups)

    def __repr__(self) -> str:
        return (
            f"NestedRun(log_evidence={self.log_evidence:.3f}, information={self.information:.2f}, "
            f"dead={len(self.position)}, ending={self.ending!r})"
        )


def _uniform_p_value(x: Tensor) -> float:
    return float(scipy.stats.kstest(x.cpu().numpy(), "uniform").pvalue) if len(x) else 1.0


def log_shells(log_volume: Tensor) -> Tensor:
    """Return the log prior mass of the shell of each dead point, ``(*batch, N) -> (*batch, N)``."""
    # Shell boundaries are midpoints of neighbours; the first shell begins at the whole prior, the last ends at zero.
    halfway = torch.logaddexp(log_volume[..., :-1], log_volume[..., 1:]) - math.log(2)
    whole = torch.zeros_like(log_volume[..., :1])
    return _log_difference(torch.cat([whole, halfway], -1), torch.cat([halfway, whole - torch.inf], -1))


def _log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """Return ``log(exp(larger) - exp(smaller))``."""
    return larger + torch.log(-torch.expm1(smaller - larger))


# Nested sampling: the prior is compressed towards the largest likelihoods by factors of known distribution.

_EXPECTED_BLOCKS = 50
_EVALUATIONS_PER_UPDATE = 5
_MIN_SLICE_STEPS = 20
PRIOR_DRAWS_PER_EVALUATION = 1.0  # prior draws worth one evaluation of slice sampling, because they are independent


class NestedState(NamedTuple):
    """Live points and running sums over the dead points."""

    live: SliceState
    log_volume: Tensor  # (), expected log prior mass above the last threshold
    log_evidence: Tensor  # (), of the dead points
    num_evaluations: Tensor  # ()
    num_nan: Tensor  # ()
    num_stuck: Tensor  # ()


@dataclass(frozen=True)
class NestedSampler:
    """Nested sampling as an algorithm for :func:`~bayeskit.inference.samplers.drive`.

    Parameters
    ----------
    target : Target
    num_live, num_delete, num_slice_steps : int
    termination : float
    max_blocks : int
    seed : int
        As in :func:`sample_nested`.
    """

    target: Target
    num_live: int
    num_delete: int
    num_slice_steps: int
    termination: float
    max_blocks: int
    seed: int = field(kw_only=True)

    def __post_init__(self) -> None:
        for name, minimum in (("num_live", None), ("num_delete", None), ("num_slice_steps", 1), ("max_blocks", 1),
                              ("seed", None)):  # fmt: skip
            object.__setattr__(self, name, whole_number(name, getattr(self, name), minimum))
        least = max(4, self.target.dim + 1)
        if self.num_live < least:
            raise SettingsError(
                f"num_live must be at least {least} in {self.target.dim} dimensions, not {self.num_live}"
            )
        if not 2 <= self.num_delete < self.num_live:
            raise SettingsError(
                f"num_delete must be at least 2 and below num_live={self.num_live}, not {self.num_delete}"
            )
        real_number("termination", self.termination, "(0, 1)")

    @property
    def description(self) -> str:
        """Text of the progress bar."""
        return "nested sampling"

    @property
    def num_steps(self) -> int | None:
        """None: the number of steps depends on convergence."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a resumed run; the stopping rule may differ."""
        return {
            "model": self.target.fingerprint(),
            "algorithm": "nested sampling, from the prior while that is cheap",
            "num_live": self.num_live,
            "num_delete": self.num_delete,
            "num_slice_steps": self.num_slice_steps,
            "seed": self.seed,
            "compile": str(self.target.compile),
        }

    def start(self, generator: torch.Generator) -> NestedState:
        """Draw the live points from the prior."""
        position = self.target.sample_prior(self.num_live, seed=generator).to(self.target.device)
        log_prior, log_likelihood = self.target.evaluate(position, compiled=False)
        _check_start(log_prior, log_likelihood)
        nan = log_likelihood.isnan()
        label = torch.rand(self.num_live, dtype=torch.float64, device=generator.device, generator=generator)
        live = SliceState(position, log_prior, torch.where(nan, -torch.inf, log_likelihood), label)
        zero = torch.zeros((), dtype=torch.float64, device=position.device)
        count = torch.zeros((), dtype=torch.int64, device=position.device)
        return NestedState(live, zero, zero - torch.inf, count + self.num_live, count + nan.sum(), count)

    def advance(
        self, state: NestedState, iteration: int, generator: torch.Generator
    ) -> tuple[NestedState, Mapping[str, Tensor]]:
        """Remove the block of lowest likelihood and replace it by new points above it."""
        k, kept = self.num_delete, self.num_live - self.num_delete
        ordered = _take(state.live, _ascending(state.live))
        dead, survivors = _take(ordered, slice(0, k)), _take(ordered, slice(k, None))
        log_volume = state.log_volume + (-1 / self.block_counts).cumsum(0)
        parent = torch.randint(kept, (k,), generator=generator, device=generator.device)
        born, drawn, spent, num_nan, num_stuck = self._born(
            dead, _take(survivors, parent), float(log_volume[-1]), generator
        )
        uniform = torch.rand(k, dtype=torch.float64, device=generator.device, generator=generator)
        rank = _num_below(born, survivors)
        row = {
            "position": dead.position,
            "log_prior": dead.log_prior,
            "log_likelihood": dead.log_likelihood,
            "insertion": insertion_quantiles(born, survivors, uniform),
            "start": (parent.to(torch.float64) / kept).index_fill(
                0, torch.arange(drawn, device=rank.device), torch.nan
            ),
            "end": rank.to(torch.float64) / kept,
        }
        outer = torch.cat([state.log_volume.unsqueeze(0), log_volume[:-1]])
        mass = _log_difference(outer, log_volume) + dead.log_likelihood
        state = NestedState(
            SliceState(*(torch.cat([old, new]) for old, new in zip(survivors, born, strict=True))),
            log_volume[-1],
            torch.logaddexp(state.log_evidence, mass.logsumexp(0)),
            state.num_evaluations + spent,
            state.num_nan + num_nan,
            state.num_stuck + num_stuck,
        )
        return state, row

    def _born(
        self, dead: SliceState, copies: SliceState, log_share: float, generator: torch.Generator
    ) -> tuple[SliceState, int, Tensor | int, Tensor, Tensor | int]:
        """Return new points above the last death, and numbers of prior draws, evaluations, NaNs and stuck moves."""
        # Prior draws come first, if the expected number is smaller than the number of slice sampling evaluations.
        kernel, k = self._kernel(dead), self.num_delete
        found, spent, num_nan = _take(dead, slice(0, 0)), 0, torch.zeros_like(dead.label[0], dtype=torch.int64)
        # The reciprocal of a tiny share may overflow.
        share = math.exp(log_share)
        if 1 <= share * PRIOR_DRAWS_PER_EVALUATION * self.num_slice_steps * _EVALUATIONS_PER_UPDATE:
            # As many as there are live points, which start together: small blocks take few evaluations of many rows.
            most = max(self.num_live, 2 * k)
            found, spent, num_nan = draw_above(self.target, kernel, k, share, most, generator)
        drawn = len(found.label)
        if drawn == k:
            return found, drawn, spent, num_nan, 0
        moved, info = kernel.step(self.target, copies, generator=generator)
        missing = _take(moved, slice(drawn, None))
        born = SliceState(*(torch.cat(both) for both in zip(found, missing, strict=True)))
        return born, drawn, spent + k * info.num_batches, num_nan + info.num_nan.sum(), info.num_stuck[drawn:].sum()

    def ending(self, state: NestedState, iteration: int, records: Records) -> Ending | None:
        """Return "converged" if the live points can add only a small share to the evidence; None to continue."""
        highest = state.live.log_likelihood.max()
        best = state.log_volume + highest
        share = float(best - torch.logaddexp(best, state.log_evidence))
        if math.isnan(share):
            raise DataError(
                f"the log likelihood is {float(highest)} at a live point, so the evidence is infinite; look for a "
                "scale that can become zero"
            )
        # Where all live points tie, nothing is left to climb, and labels can tell no smaller shares apart.
        tied = share < math.log(torch.finfo(torch.float64).eps) and bool(state.live.log_likelihood.min() == highest)
        if share < math.log(self.termination) or tied:
            return "converged"
        return "finished" if iteration >= self.max_blocks else None

    def note(self, state: NestedState, iteration: int, records: Records) -> str:
        """Return the compression of the prior for the progress bar."""
        return f"log evidence {float(state.log_evidence):.2f}, log volume {float(state.log_volume):.1f}"

    @property
    def block_counts(self) -> Tensor:
        """Number of live points at each death of a block, ``(k,)``: ``n``, ``n - 1``, ..."""
        least = self.num_live - self.num_delete
        return torch.arange(self.num_live, least, -1, dtype=torch.float64, device=self.target.device)

    def _kernel(self, dead: SliceState) -> ConstrainedSlice:
        # Given the threshold, the dead points are independent of the survivors. A metric estimated from the survivors
        # depends on the points that it moves, which then drift inwards: in ten dimensions with 200 live points the bias
        # of the log evidence is two standard errors.
        return ConstrainedSlice(
            threshold=dead.log_likelihood[-1],
            threshold_label=dead.label[-1],
            metric=metric_of(dead.position),
            ensemble=dead.position,
            num_steps=self.num_slice_steps,
            planned_calls=_EXPECTED_BLOCKS * self.num_slice_steps * _EVALUATIONS_PER_UPDATE,
        )


@takes_draws
def sample_nested(
    target: Target,
    num_live: int = 500,
    *,
    seed: int = 0,
    num_delete: int | None = None,
    num_slice_steps: int | None = None,
    termination: float = 1e-3,
    max_blocks: int = 10_000,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> NestedRun:
    """Run nested sampling in unconstrained space, for any target with draws from its prior.

    Live points start as prior draws. In each iteration the block of lowest likelihood dies, which compresses the prior
    by a factor of known distribution. New points are drawn from the prior above the likelihood of the last death: by
    rejection while that takes fewer evaluations, then by slice sampling from copies of survivors.

    Parameters
    ----------
    target : Target
    num_live : int, default 500
        Number of live points ``n``, greater than the dimension. The standard error is proportional to ``n ** -0.5``.
        Several modes need many points each.
    seed : int, default 0
    num_delete : int, optional
        Number of points ``k`` that die together, below ``num_live``; by default half. The metric is estimated from the
        dead block, and diagonal if the block is not larger than the dimension.
    num_slice_steps : int, optional
        Slice updates per copy; by default twice the dimension, at least 20.
    termination : float, default 1e-3
        The run ends if the live points can add no more than this share to the evidence. A smaller value can reveal a
        narrow peak inside a broad one; each factor of two costs about ``num_live / 2`` new points. Below 2e-16 the run
        ends, too, once all live points have the same likelihood.
    max_blocks : int, default 10,000
        Largest number of blocks.
    checkpoint, checkpoint_seconds, time_budget, progress
        See :class:`~bayeskit.inference.samplers.Control`.

    Returns
    -------
    NestedRun

    Raises
    ------
    BudgetError
        If the time budget ends in the first block; Ctrl-C there raises ``KeyboardInterrupt``.
    SettingsError
        If a setting lies outside its domain, or the target cannot draw from its prior.
    InitializationError
        If the likelihood is zero at every prior draw, or the log prior is not finite at one of them.
    DataError
        If the likelihood is NaN at every prior draw, or infinite at any.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the time budget or Ctrl-C ends the run early; ``ending`` is the reason.

    References
    ----------
    Skilling, J. (2006). Nested sampling for general Bayesian computation. Bayesian
    Analysis 1, 833-859.
    Henderson, R. W., Goggans, P. M. (2014). Parallelized nested sampling. AIP Conference
    Proceedings 1636, 100-105.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_nested
    >>> case = exact.get("beta_binomial")
    >>> run = sample_nested(case.target(), num_live=200, progress=False)
    >>> abs(run.log_evidence - case.log_evidence) < 0.3, run.ending
    (True, 'converged')
    """
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    num_live = whole_number("num_live", num_live)
    sampler = NestedSampler(
        target,
        num_live,
        num_live // 2 if num_delete is None else num_delete,
        max(_MIN_SLICE_STEPS, 2 * target.dim) if num_slice_steps is None else num_slice_steps,
        termination,
        max_blocks,
        seed=seed,
    )
    generator = new_generator(seed, target.device, stream="nested sampling")
    outcome = drive(sampler, control, generator, target.device)
    if outcome.num_iterations == 0 and outcome.ending != "converged":
        raise nothing_done(outcome.ending, control, "in the first block")
    say_early(outcome.ending, control, sampler.description, f"after {outcome.num_iterations} blocks")
    return _as_run(sampler, outcome)


def _as_run(sampler: NestedSampler, outcome: Outcome) -> NestedRun:
    """Return the run with the dead points of all blocks, then the last live points."""
    state, blocks = outcome.state, outcome.records.as_dict()
    live = _take(state.live, _ascending(state.live))

    def column(name: str, last: Tensor) -> Tensor:
        return torch.cat([blocks[name].flatten(0, 1), last]) if blocks else last

    last_counts = torch.arange(len(live.label), 0, -1, dtype=torch.float64, device=live.label.device)
    none = last_counts[:0]
    return NestedRun(
        position=column("position", live.position),
        log_prior=column("log_prior", live.log_prior),
        log_likelihood=column("log_likelihood", live.log_likelihood),
        live_counts=torch.cat([sampler.block_counts.repeat(outcome.num_iterations), last_counts]),
        insertion=column("insertion", none),
        start=column("start", none),
        end=column("end", none),
        num_live=sampler.num_live,
        num_evaluations=int(state.num_evaluations),
        num_nan=int(state.num_nan),
        num_stuck=int(state.num_stuck),
        ending=outcome.ending,
        seconds=outcome.seconds,
        settings={"sampler": "nested sampling"} | {k: v for k, v in sampler.facts().items() if k != "model"},
        target=sampler.target,
    )


def _take(state: SliceState, index: Any) -> SliceState:
    return SliceState(*(tensor[index] for tensor in state))


def _ascending(state: SliceState) -> Tensor:
    """Return the order of increasing likelihood, with ties broken by labels, ``(n,)``."""
    by_label = state.label.argsort()
    return by_label[state.log_likelihood[by_label].argsort(stable=True)]


def metric_of(position: Tensor) -> Metric:
    """Return the metric of the points' covariance, diagonal if they do not span the space."""
    centred = position - position.mean(0)
    covariance = centred.mT @ centred / (len(position) - 1)  # torch.cov synchronises with the host
    variance = covariance.diagonal().clamp(min=torch.finfo(position.dtype).tiny)
    correlation = covariance * variance.rsqrt() * variance.rsqrt().unsqueeze(-1)
    # torch.where instead of an exception, which would synchronise with the device.
    factor, failed = torch.linalg.cholesky_ex(correlation)
    flat = (failed != 0) | (factor.diagonal().min() < math.sqrt(torch.finfo(position.dtype).eps))
    factor = torch.where(flat, torch.eye(len(variance), dtype=position.dtype, device=position.device), factor)
    return Metric(variance.sqrt().unsqueeze(-1) * factor, True)


def _num_below(born: SliceState, others: SliceState) -> Tensor:
    """Return how many of ``others`` lie below each new point, ``(k,)``."""
    return _is_below(born, others).sum(1)


def insertion_quantiles(born: SliceState, survivors: SliceState, uniform: Tensor) -> Tensor:
    """Return each new point's rank among the points it joins, spread over the unit interval, ``(k,)``."""
    # Points are inserted one after another, so their ranks are independent under correct sampling; ``uniform (k,)``
    # randomises each rank within its share of the interval.
    earlier = _is_below(born, born).tril(-1).sum(1)
    size = survivors.label.shape[0] + torch.arange(len(uniform), device=uniform.device)
    return (_num_below(born, survivors) + earlier + uniform) / (size + 1)


def _is_below(first: SliceState, second: SliceState) -> Tensor:
    """Tell which points of ``second`` lie below those of ``first``, ``(len(first), len(second))``."""
    a, b = first.log_likelihood.unsqueeze(1), second.log_likelihood
    return (b < a) | ((b == a) & (second.label < first.label.unsqueeze(1)))


def _check_start(log_prior: Tensor, log_likelihood: Tensor) -> None:
    if bool(log_likelihood.isnan().all()):
        raise DataError("the log likelihood is NaN at every prior draw; look for NaN or infinite values in the data")
    if bool((log_likelihood == torch.inf).any()):
        raise DataError("the log likelihood is infinite at a prior draw; look for a scale that can become zero")
    if not bool(log_prior.isfinite().all()):
        raise InitializationError(
            "the log prior is not finite at some draws of sample_prior; check that sample_prior draws from log_prior"
        )
    if not bool((log_likelihood > -torch.inf).any()):
        raise InitializationError(
            f"the likelihood is zero at all {len(log_likelihood)} prior draws, so none can be ranked; use more live "
            "points, or check that data and likelihood fit"
        )
