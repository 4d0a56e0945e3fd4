"""Slice sampling of the prior above a likelihood threshold, over a batch of chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.samplers.metric import Metric
from bayeskit.target import Target

MAX_SHRINKS = 200
"""Bracket halvings after which a chain keeps its point: far more than exact arithmetic can need."""
TICKS_BETWEEN_CHECKS = 4
"""Asking whether all chains are done waits for the device, so it is not asked every time."""


class SliceState(NamedTuple):
    """Where the chains are; the leading dimension ``n`` is the chain."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,); what is not a number counts as -inf
    label: Tensor  # (n,), uniform on (0, 1): puts equal likelihoods in order


class SliceInfo(NamedTuple):
    """What happened in one call, for diagnostics."""

    num_evaluations: Tensor  # (n,), evaluations that the chain needed
    num_stuck: Tensor  # (n,), updates that found no new point
    num_nan: Tensor  # (n,), evaluations whose likelihood was not a number
    num_batches: Tensor  # (), evaluations of the whole batch


class _Plan(NamedTuple):
    """What the updates begin with; the leading dimensions are update and chain, ``(num_steps + 1, n)``."""

    brackets: Tensor  # (num_steps + 1, n, d), as vectors
    levels: Tensor  # depth of the slice below the log prior
    starts: Tensor  # where the bracket begins, in its own lengths before the point
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ConstrainedSlice:
    """Hit-and-run slice sampling of ``log_prior`` where the likelihood exceeds a threshold.

    Each update draws a direction, places a bracket at random around the point and
    shrinks it towards the point until a draw lies on the slice: above a level
    drawn under the prior density, and above the threshold. Directions go through an
    orthonormal basis of the metric, randomly turned and drawn anew after each sweep; some are
    replaced by the difference of two members of the ensemble, which know how far modes lie
    apart. As brackets are many standard deviations long, they are not stepped out: one that is
    too long costs a shrinking step for each factor of two.

    Chains do not wait for each other: at every evaluation each is at its own update, until
    all have made ``num_steps``.

    Equal likelihoods are ordered by labels, uniform variables redrawn with each update, so that
    a plateau of the likelihood is cut like any other level.

    Parameters
    ----------
    threshold : Tensor
        Log likelihood to exceed, shape ``()``.
    threshold_label : Tensor
        Label to exceed where the likelihood equals the threshold, shape ``()``.
    metric : Metric
        Of the covariance of the constrained prior, roughly.
    ensemble : Tensor
        Points spread roughly as the constrained prior is, ``(m, d)`` with ``m`` at least 2. Neither they nor the
        metric may depend on the points that are moved, or the kernel would leave another distribution invariant.
    num_steps : int, default 20
        Updates of each chain in one call of :meth:`step`.
    width : float, default 10
        Length of a bracket in standard deviations along a direction of the basis.
    pair_width : float, default 2
        Length of a bracket in multiples of a difference.
    pair_share : float in [0, 1], default 0.25
        Share of directions that are differences.
    planned_calls : int, default 1
        Evaluations planned in all, from which ``Target`` decides whether to compile.

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

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise SettingsError(f"num_steps must be at least 1, not {self.num_steps}")
        if not (self.width > 0 and self.pair_width > 0):
            raise SettingsError(f"width and pair_width must be positive, not {self.width} and {self.pair_width}")
        if not 0 <= self.pair_share <= 1:
            raise SettingsError(f"pair_share must lie in [0, 1], not {self.pair_share}")
        if self.ensemble.dim() != 2 or self.ensemble.shape[0] < 2:
            raise ShapeError(
                f"the ensemble has shape {tuple(self.ensemble.shape)}; needed are at least two points, (m, d)"
            )

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> SliceState:
        """Evaluate the density at ``position``, shape ``(n, d)``, and draw labels."""
        log_prior, log_likelihood = self._evaluate(target, position)
        label = torch.rand(len(position), dtype=torch.float64, device=position.device, generator=generator)
        log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return SliceState(position, log_prior, log_likelihood, label)

    def step(self, target: Target, state: SliceState, *, generator: torch.Generator) -> tuple[SliceState, SliceInfo]:
        """Make ``num_steps`` updates of every chain; a chain must start above the threshold."""
        x, log_prior, log_likelihood, _ = state
        n = x.shape[0]
        plan = self._plan(x, generator)
        chain = torch.arange(n, device=x.device)
        update, evaluations, stuck, nan, shrinks = torch.zeros(5, n, dtype=torch.int64, device=x.device)
        low, high = plan.starts[0], plan.starts[0] + 1
        batches = 0
        while True:
            label = self._label(log_likelihood, plan.labels[update, chain])
            t = low + (high - low) * torch.rand(n, dtype=x.dtype, device=x.device, generator=generator)
            proposal = torch.addcmul(x, t.unsqueeze(-1), plan.brackets[update, chain])
            new_prior, new_likelihood = self._evaluate(target, proposal)
            batches += 1

            active = update < self.num_steps
            on_slice = self._inside(log_prior, new_prior, plan.levels[update, chain])
            accept = active & on_slice & self.above(new_likelihood, label)
            x = torch.where(accept.unsqueeze(-1), proposal, x)
            log_prior = torch.where(accept, new_prior, log_prior)
            log_likelihood = torch.where(accept, new_likelihood, log_likelihood)
            shrinks = shrinks + 1
            give_up = active & ~accept & (shrinks >= MAX_SHRINKS)
            evaluations, stuck = evaluations + active, stuck + give_up
            nan = nan + (active & new_likelihood.isnan())

            done = accept | give_up
            update = update + done
            shrinks = torch.where(done, 0, shrinks)
            start = plan.starts[update, chain]
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
        """Draw what every update begins with, and one more for chains that are done, to no effect."""
        shape = (self.num_steps + 1, x.shape[0])
        brackets = self._brackets(shape, generator)
        uniform = torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator)
        levels = -uniform.clamp(min=torch.finfo(x.dtype).tiny).log()
        starts = -torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator)
        labels = torch.rand(shape, dtype=torch.float64, device=x.device, generator=generator)
        return _Plan(brackets, levels, starts, labels)

    def _brackets(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Return brackets as vectors, ``(num_steps + 1, n, d)``."""
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
        """Tell whether a likelihood exceeds the threshold, its label deciding where they are equal."""
        tied = (log_likelihood == self.threshold) & (label > self.threshold_label)
        return (log_likelihood > self.threshold) | tied

    def _label(self, log_likelihood: Tensor, uniform: Tensor) -> Tensor:
        """Redraw labels given the likelihood: uniform, but above the threshold's label where it is tied with it."""
        low = torch.where(log_likelihood > self.threshold, torch.zeros_like(uniform), self.threshold_label)
        return low + (1 - low) * uniform
