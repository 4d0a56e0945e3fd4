"""Stochastic-gradient Langevin dynamics and Hamiltonian Monte Carlo for a batch of chains."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluation
from bayeskit._core.inputs import affordable, real_number, warn_user, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import mean_error
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import SamplingWarning, SettingsError
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
from bayeskit.inference.samplers._minibatch import AnchoredRows, Epochs, MinibatchTarget, RowState
from bayeskit.inference.samplers._starts import CANDIDATES, starting_points

# Step-size schedules.


class StepSizeSchedule(Protocol):
    """A non-increasing step size for every iteration."""

    def at(self, iteration: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the step size at ``iteration``, a tensor ``()``: shape ``()`` or ``(n,)``, one per chain."""
        ...


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant step size.

    Parameters
    ----------
    value : float or Tensor
        Positive; a tensor of shape ``(n,)`` sets one step size per chain.
    """

    value: float | Tensor

    def __post_init__(self) -> None:
        if not bool((torch.as_tensor(self.value) > 0).all()):
            raise SettingsError(f"step_size must be positive, not {self.value}")

    def at(self, iteration: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the step size."""
        if isinstance(self.value, Tensor):
            return self.value.to(iteration.device, dtype)
        return torch.full((), self.value, dtype=dtype, device=iteration.device)


@dataclass(frozen=True)
class Polynomial:
    r"""Step sizes :math:`a\,(b + t)^{-\gamma}` at iteration :math:`t = 0, 1, \dots`.

    With :math:`1/2 < \gamma \le 1` the sum of the step sizes diverges and that of their squares converges, so the bias
    vanishes in the limit. Averages over draws then need the step sizes as weights, ``sample_stats["step_size"]``.

    Parameters
    ----------
    a, b : float
        Positive.
    gamma : float in (0, 1], default 0.55

    References
    ----------
    Welling, M., Teh, Y. W. (2011). Bayesian learning via stochastic gradient Langevin
    dynamics. International Conference on Machine Learning.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Polynomial
    >>> Polynomial(a=0.1, b=1.0, gamma=0.5).at(torch.tensor(3), torch.float64).item()
    0.05
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        real_number("a", self.a, "(0, inf)")
        real_number("b", self.b, "(0, inf)")
        real_number("gamma", self.gamma, "(0, 1]")

    def at(self, iteration: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the step size at ``iteration``."""
        return self.a * (self.b + iteration.to(dtype)).pow(-self.gamma)


def _as_schedule(step_size: float | Tensor | StepSizeSchedule) -> StepSizeSchedule:
    """Return a number as a constant schedule, a schedule as it is."""
    return Constant(step_size) if isinstance(step_size, (int, float, Tensor)) else step_size


# Stochastic-gradient Langevin dynamics, with and without a preconditioner, for a batch of chains.

State = TypeVar("State", bound=tuple[Any, ...])


class SGLDState(NamedTuple):
    """State of ``n`` chains; ``n`` is the leading dimension."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), estimated from the last minibatch
    gradient: Tensor  # (n, d), of the log density, estimated likewise
    rows: RowState | AnchoredRows
    iteration: Tensor  # (), steps taken


class PreconditionedSGLDState(NamedTuple):
    """State of the chains and the running mean behind their preconditioner."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), estimated
    gradient: Tensor  # (n, d), estimated
    second_moment: Tensor  # (n, d), running mean of the squared gradient of one observation
    rows: RowState | AnchoredRows
    iteration: Tensor  # ()


class StochasticGradientInfo(NamedTuple):
    """Diagnostics of one step."""

    step_size: Tensor  # (n,)
    diverging: Tensor  # (n,), bool: density or gradient was not finite, so the chain kept its position
    temperature: Tensor  # (n,), its mean is the factor by which a normal posterior's variances are too large


@dataclass(frozen=True)
class SGLD:
    r"""Stochastic-gradient Langevin dynamics.

    A step of size :math:`\epsilon` adds :math:`\frac{\epsilon}{2} \hat g + \sqrt\epsilon\, z` to the position, where
    :math:`\hat g` estimates the gradient of the log posterior from a minibatch and :math:`z` is standard normal. There
    is no acceptance step, so the draws have a bias of order :math:`\epsilon`. For normal posteriors
    :meth:`stationary_variance` gives the exact variance of the draws. The mean of ``temperature``, :math:`1 + \epsilon
    |\hat g|^2 / 4d`, then estimates the inflation factor of the variances, averaged over coordinates.

    Parameters
    ----------
    step_size : float, Tensor or Schedule
        Positive; a tensor ``(n,)`` sets one step size per chain. A cautious choice is a twentieth of the smallest
        posterior variance.
    metric : Metric, optional
        Estimate of the posterior variances or covariance, which scales drift and noise; ``step_size`` is relative to
        it. Identity by default.
    planned_calls : int, default 1
        Expected number of gradient calls, which decides whether the target compiles.

    References
    ----------
    Welling, M., Teh, Y. W. (2011). Bayesian learning via stochastic gradient Langevin
    dynamics. International Conference on Machine Learning.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> from bayeskit.inference.samplers import SGLD
    >>> y = torch.arange(10.0, dtype=torch.float64)
    >>> target = MinibatchTarget.from_functions(
    ...     lambda u: -0.5 * u.square().sum(), lambda u, rows: -0.5 * (y[rows] - u).square(), 1, 10, batch_size=5)
    >>> kernel, generator = SGLD(step_size=0.01), torch.Generator().manual_seed(0)
    >>> state = kernel.init(target, torch.zeros(8, 1, dtype=torch.float64), generator=generator)
    >>> state, info = kernel.step(target, state, generator=generator)
    >>> state.position.shape, bool(info.diverging.any())
    (torch.Size([8, 1]), False)
    """

    step_size: float | Tensor | StepSizeSchedule
    metric: Metric | None = None
    planned_calls: int = 1

    def __post_init__(self) -> None:
        _as_schedule(self.step_size)

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> SGLDState:
        """Estimate the density at ``position``, shape ``(n, d)``."""
        rows, estimate = target.observe(position, None, self.planned_calls, generator)
        return SGLDState(position, *_kept(estimate), rows, _zero(position))

    def step(
        self, target: MinibatchTarget, state: SGLDState, *, generator: torch.Generator
    ) -> tuple[SGLDState, StochasticGradientInfo]:
        """Take one step per chain."""
        step_size = _step_sizes(self.step_size, state.position, state.iteration)
        step = step_size.unsqueeze(-1)
        force = state.gradient if self.metric is None else self.metric.to_momentum(state.gradient)
        change = 0.5 * step * force + step.sqrt() * standard_normal(force, generator)
        position = state.position + (change if self.metric is None else self.metric.to_position(change))
        rows, estimate = target.observe(position, state.rows, self.planned_calls, generator)
        moved = SGLDState(position, *_kept(estimate), rows, state.iteration + 1)
        finite = _is_finite(position, estimate)
        temperature = 1 + 0.25 * step_size * force.square().mean(-1)
        return _move(finite, state, moved), StochasticGradientInfo(step_size, ~finite, temperature)

    def stationary_variance(self, precision: float | Tensor, gradient_noise: float | Tensor = 0.0) -> Tensor:
        r"""Return the variance of the draws for a normal posterior.

        With a constant step :math:`\epsilon`, precision :math:`P` and independent gradient noise of variance :math:`V`
        the variance is :math:`(1 + \epsilon V / 4) / (P (1 - \epsilon P / 4))` instead of :math:`1 / P`; in several
        dimensions, along each eigenvector of the precision matrix.

        Parameters
        ----------
        precision : float or Tensor
            Positive, any shape.
        gradient_noise : float or Tensor, default 0
            Variance of the estimated gradient, see :meth:`MinibatchTarget.gradient_variance`.

        Returns
        -------
        Tensor
            Broadcast shape of the arguments.

        Raises
        ------
        SettingsError
            If the step size is not constant, a metric is set, or the chain diverges (``step_size * precision >= 4``).

        Examples
        --------
        >>> from bayeskit.inference.samplers import SGLD
        >>> SGLD(step_size=0.4).stationary_variance(1.0).item()
        1.1111111111111112
        """
        schedule = _as_schedule(self.step_size)
        if not isinstance(schedule, Constant) or self.metric is not None:
            raise SettingsError("the stationary variance is known only for a constant step size without a metric")
        step = torch.as_tensor(schedule.value, dtype=torch.float64)
        precision = torch.as_tensor(precision, dtype=torch.float64)
        if not bool(((precision > 0) & (step * precision < 4)).all()):
            raise SettingsError(
                "the chain has a stationary variance only if the precision is positive and "
                "step_size * precision is below 4; take smaller steps"
            )
        noise = torch.as_tensor(gradient_noise, dtype=torch.float64)
        return (1 + step * noise / 4) / (precision * (1 - step * precision / 4))


@dataclass(frozen=True)
class PreconditionedSGLD:
    r"""Stochastic-gradient Langevin dynamics with an RMSprop preconditioner.

    Drift and noise of each coordinate are scaled by :math:`G = 1 / (\lambda + \sqrt v)`, where :math:`v` is a running
    mean of the squared gradient per observation (the estimated gradient, prior included, divided by the number of
    rows).

    The term :math:`\Gamma`, the divergence of :math:`G`, is omitted, as is common: it needs second derivatives and
    vanishes as ``decay`` approaches 1. With ``decay`` below 1 the draws keep a bias that does not shrink with the step
    size. For accurate results, estimate a :class:`Metric` in a first run and use it with :class:`SGLD`.

    Parameters
    ----------
    step_size : float, Tensor or Schedule
        Relative to the preconditioner.
    decay : float in (0, 1], default 0.99
        Weight of the past in the running mean; with 1 the first gradient fixes it.
    regularization : float, default 1e-5
        :math:`\lambda`, which bounds the scale if gradients vanish.
    planned_calls : int, default 1

    References
    ----------
    Li, C., Chen, C., Carlson, D., Carin, L. (2016). Preconditioned stochastic gradient
    Langevin dynamics for deep neural networks. AAAI Conference on Artificial Intelligence.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> from bayeskit.inference.samplers import PreconditionedSGLD
    >>> y = torch.arange(10.0, dtype=torch.float64)
    >>> target = MinibatchTarget.from_functions(
    ...     lambda u: -0.5 * u.square().sum(), lambda u, rows: -0.5 * (y[rows] - u).square(), 1, 10, batch_size=5)
    >>> kernel, generator = PreconditionedSGLD(step_size=0.01), torch.Generator().manual_seed(0)
    >>> state = kernel.init(target, torch.zeros(8, 1, dtype=torch.float64), generator=generator)
    >>> kernel.preconditioner(state).shape
    torch.Size([8, 1])
    """

    step_size: float | Tensor | StepSizeSchedule
    decay: float = 0.99
    regularization: float = 1e-5
    planned_calls: int = 1

    def __post_init__(self) -> None:
        _as_schedule(self.step_size)
        real_number("decay", self.decay, "(0, 1]")
        real_number("regularization", self.regularization, "(0, inf)")

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> PreconditionedSGLDState:
        """Estimate the density at ``position``, shape ``(n, d)``."""
        rows, estimate = target.observe(position, None, self.planned_calls, generator)
        second_moment = (estimate.gradient / target.num_data).square()
        return PreconditionedSGLDState(position, *_kept(estimate), second_moment, rows, _zero(position))

    def step(
        self, target: MinibatchTarget, state: PreconditionedSGLDState, *, generator: torch.Generator
    ) -> tuple[PreconditionedSGLDState, StochasticGradientInfo]:
        """Take one step per chain."""
        step_size = _step_sizes(self.step_size, state.position, state.iteration)
        scale = self.preconditioner(state)
        step = step_size.unsqueeze(-1) * scale
        noise = standard_normal(state.position, generator)
        position = state.position + 0.5 * step * state.gradient + step.sqrt() * noise
        rows, estimate = target.observe(position, state.rows, self.planned_calls, generator)
        square = (estimate.gradient / target.num_data).square()
        second_moment = self.decay * state.second_moment + (1 - self.decay) * square
        moved = PreconditionedSGLDState(position, *_kept(estimate), second_moment, rows, state.iteration + 1)
        finite = _is_finite(position, estimate)
        temperature = 1 + 0.25 * (step * state.gradient.square()).mean(-1)
        return _move(finite, state, moved), StochasticGradientInfo(step_size, ~finite, temperature)

    def preconditioner(self, state: PreconditionedSGLDState) -> Tensor:
        """Return ``G``, the scale of each coordinate of each chain, ``(n, d)``."""
        return 1 / (self.regularization + state.second_moment.sqrt())


def settled(settings: Any, like: Tensor) -> Any:
    """Return settings with their tensors in dtype and on the device of ``like``, to avoid a copy in every step."""
    if isinstance(settings, Tensor):
        return settings.to(like)
    if not is_dataclass(settings) or isinstance(settings, type):
        return settings
    return replace(settings, **{f.name: settled(getattr(settings, f.name), like) for f in fields(settings)})


def _step_sizes(step_size: float | Tensor | StepSizeSchedule, position: Tensor, iteration: Tensor) -> Tensor:
    """Return each chain's step size, shape ``(n,)``."""
    # Numbers are checked when the kernel is made; a check here would synchronise with the device.
    if isinstance(step_size, (int, float)):
        return position.new_full((len(position),), step_size)
    if isinstance(step_size, Tensor):
        return step_size.to(position).expand(len(position))
    return step_size.at(iteration, position.dtype).expand(len(position))


def standard_normal(position: Tensor, generator: torch.Generator) -> Tensor:
    """Draw noise shaped like ``position``."""
    return torch.randn(position.shape, dtype=position.dtype, device=position.device, generator=generator)


def _is_finite(position: Tensor, estimate: Evaluation) -> Tensor:
    """Tell for each chain whether position, density and gradient are finite, shape ``(n,)``."""
    return (position.sum(-1) + estimate.gradient.sum(-1) + estimate.log_density).isfinite()


def _move(finite: Tensor, old: State, new: State) -> State:
    """Move the chains with a finite new state; the others keep their position but advance their rows."""

    def choose(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) or a.dim() == 0:
            return b
        return torch.where(finite.unsqueeze(-1) if a.dim() == 2 else finite, b, a)

    return type(new)(*(choose(a, b) for a, b in zip(old, new, strict=True)))


def _kept(estimate: Evaluation) -> tuple[Tensor, Tensor, Tensor]:
    return estimate.log_prior, estimate.log_likelihood, estimate.gradient


def _zero(position: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=position.device)


# Stochastic-gradient Hamiltonian Monte Carlo with friction, for a batch of chains.


class SGHMCState(NamedTuple):
    """Positions and momenta of ``n`` chains; ``n`` is the leading dimension."""

    position: Tensor  # (n, d)
    momentum: Tensor  # (n, d), whitened: standard normal if the sampler is exact
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), estimated from the last minibatch
    rows: RowState | AnchoredRows
    iteration: Tensor  # (), steps taken


@dataclass(frozen=True)
class SGHMC:
    r"""Stochastic-gradient Hamiltonian Monte Carlo.

    A step of size :math:`\epsilon` adds :math:`\epsilon p` to the position and then
    :math:`\epsilon \hat g - \epsilon C p` plus normal noise of variance :math:`2 \epsilon C - \epsilon^2 \hat V` to the
    momentum. The friction :math:`C` dissipates the energy from the noise of the estimated gradient :math:`\hat g`. The
    known part of its variance, :math:`\hat V`, is subtracted from the added noise.

    Parameters
    ----------
    step_size : float, Tensor or Schedule
        Positive, about a tenth of the smallest posterior standard deviation; a tensor ``(n,)`` sets one step size per
        chain.
    friction : float, default 1
        :math:`C`; the momentum decorrelates in ``1 / (friction * step_size)`` steps.
    gradient_noise : float or Tensor, default 0
        :math:`\hat V`, the variance of the estimated gradient (whitened if there is a metric), a number or ``(d,)``;
        see :meth:`MinibatchTarget.gradient_variance`. Only for independent minibatches (:class:`IndependentRows`):
        the noise of minibatches of one epoch cancels in part, and the draws would be too narrow.
    metric : Metric, optional
        Estimate of the posterior variances or covariance; ``step_size`` is relative to it.
    planned_calls : int, default 1
        Expected number of gradient calls, which decides whether the target compiles.

    References
    ----------
    Chen, T., Fox, E. B., Guestrin, C. (2014). Stochastic gradient Hamiltonian Monte Carlo.
    International Conference on Machine Learning.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> from bayeskit.inference.samplers import SGHMC
    >>> y = torch.arange(10.0, dtype=torch.float64)
    >>> target = MinibatchTarget.from_functions(
    ...     lambda u: -0.5 * u.square().sum(), lambda u, rows: -0.5 * (y[rows] - u).square(), 1, 10, batch_size=5)
    >>> kernel, generator = SGHMC(step_size=0.05, friction=2.0), torch.Generator().manual_seed(0)
    >>> state = kernel.init(target, torch.zeros(8, 1, dtype=torch.float64), generator=generator)
    >>> state, info = kernel.step(target, state, generator=generator)
    >>> state.momentum.shape, bool(info.diverging.any())
    (torch.Size([8, 1]), False)
    """

    step_size: float | Tensor | StepSizeSchedule
    friction: float = 1.0
    gradient_noise: float | Tensor = 0.0
    metric: Metric | None = None
    planned_calls: int = 1

    def __post_init__(self) -> None:
        real_number("friction", self.friction, "(0, inf)")
        noise = torch.as_tensor(self.gradient_noise)
        if not bool((noise >= 0).all()):
            raise SettingsError("gradient_noise is a variance and must not be negative")
        # Schedules never increase, so the first step is the largest.
        largest = float(_as_schedule(self.step_size).at(torch.tensor(0), torch.float64).max())
        if largest * self.friction > 1:
            raise SettingsError(
                f"step_size * friction must not exceed 1, but is {largest * self.friction:.3g}; lower one of them"
            )
        if largest * float(noise.max()) > 2 * self.friction:
            raise SettingsError(
                f"gradient_noise {float(noise.max()):.3g} exceeds 2 * friction / step_size, so no noise is left to "
                "add; raise the friction, lower the step size, or take larger minibatches"
            )

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> SGHMCState:
        """Draw momenta and estimate the density at ``position``, shape ``(n, d)``."""
        if isinstance(target.row_order, Epochs) and bool((torch.as_tensor(self.gradient_noise) > 0).any()):
            warn_user(
                "gradient_noise assumes independent minibatches; the noise of one epoch cancels in part, so the draws "
                "will be too narrow; give the target row_order=IndependentRows(), or leave gradient_noise at 0",
                SamplingWarning,
            )
        momentum = standard_normal(position, generator)
        rows, estimate = target.observe(position, None, self.planned_calls, generator)
        zero = torch.zeros((), dtype=torch.int64, device=position.device)
        return SGHMCState(position, momentum, estimate.log_prior, estimate.log_likelihood, rows, zero)

    def step(
        self, target: MinibatchTarget, state: SGHMCState, *, generator: torch.Generator
    ) -> tuple[SGHMCState, StochasticGradientInfo]:
        """Take one step per chain."""
        step_size = _step_sizes(self.step_size, state.position, state.iteration)
        step = step_size.unsqueeze(-1)
        change = step * state.momentum
        position = state.position + (change if self.metric is None else self.metric.to_position(change))
        rows, estimate = target.observe(position, state.rows, self.planned_calls, generator)
        known = self.gradient_noise.to(position) if isinstance(self.gradient_noise, Tensor) else self.gradient_noise
        noise = (2 * self.friction * step - step.square() * known).sqrt() * standard_normal(position, generator)
        force = estimate.gradient if self.metric is None else self.metric.to_momentum(estimate.gradient)
        momentum = (1 - self.friction * step) * state.momentum + step * force + noise
        moved = SGHMCState(position, momentum, estimate.log_prior, estimate.log_likelihood, rows, state.iteration + 1)
        # A chain with a non-finite density restarts with zero momentum; its old momentum would repeat the same step.
        at_rest = state._replace(momentum=torch.zeros_like(momentum))
        finite = _is_finite(position, estimate)
        temperature = (1 - 0.5 * self.friction * step_size) * momentum.square().mean(-1)
        info = StochasticGradientInfo(step_size, ~finite, temperature)
        return _move(finite, at_rest, moved), info

    def stationary_covariance(self, precision: float | Tensor, gradient_noise: float | Tensor = 0.0) -> Tensor:
        r"""Return the covariance of position and momentum of the draws for a normal posterior.

        The chain is a linear recursion :math:`x' = A x + w`, and its covariance solves :math:`\Sigma = A \Sigma A^\top
        + \operatorname{cov} w`. The exact values are the variances ``1 / precision`` and 1 and a covariance of zero.
        The position's variance times the precision equals the momentum's variance times ``1 - friction * step_size /
        2``, which ``temperature`` estimates.

        Parameters
        ----------
        precision : float or Tensor
            Positive, shape ``(*batch)``.
        gradient_noise : float or Tensor, default 0
            True variance of the estimated gradient; the kernel's own setting is an estimate.

        Returns
        -------
        Tensor
            Shape ``(*batch, 2, 2)``: position first, then momentum.

        Raises
        ------
        SettingsError
            If the step size is not constant, a metric is set, or the chain diverges at this precision.

        Examples
        --------
        >>> from bayeskit.inference.samplers import SGHMC
        >>> SGHMC(step_size=0.01).stationary_covariance(1.0).round(decimals=3)
        tensor([[ 1.0000, -0.0050],
                [-0.0050,  1.0050]], dtype=torch.float64)
        """
        schedule = _as_schedule(self.step_size)
        if not isinstance(schedule, Constant) or self.metric is not None:
            raise SettingsError("the stationary covariance is known only for a constant step size without a metric")
        given = (schedule.value, precision, self.gradient_noise, gradient_noise)
        step, p, known, true = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.float64) for x in given))
        decay = 1 - self.friction * step
        matrix = torch.stack([torch.ones_like(p), step, -step * p, decay - step.square() * p], -1).unflatten(-1, (2, 2))
        if not bool((torch.linalg.eigvals(matrix).abs() < 1).all()):
            raise SettingsError("the chain diverges at this precision; take smaller steps")
        added = 2 * self.friction * step + step.square() * (true - known)
        noise = torch.zeros_like(matrix)
        noise[..., 1, 1] = added
        # vec(A S A^T) = (A x A) vec(S), so the fixed point is a linear system of four equations.
        product = torch.einsum("...ij,...kl->...ikjl", matrix, matrix).flatten(-4, -3).flatten(-2)
        identity = torch.eye(4, dtype=torch.float64)
        return torch.linalg.solve(identity - product, noise.flatten(-2)).unflatten(-1, (2, 2))


# Posterior draws from minibatches.

_TOO_HOT = 2.0
_FEWEST_DRAWS = 16  # to estimate a temperature
_MOST_NAMED = 10


class StochasticGradientKernel(Protocol):
    """Protocol of kernels for :func:`sample_stochastic_gradient`: SGLD, PreconditionedSGLD, SGHMC."""

    @property
    def planned_calls(self) -> int:
        """Expected number of gradient calls."""
        ...

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> Any:
        """Return the state at ``position``."""
        ...

    def step(
        self, target: MinibatchTarget, state: Any, *, generator: torch.Generator
    ) -> tuple[Any, StochasticGradientInfo]:
        """Return the next state."""
        ...


def sample_stochastic_gradient(
    target: MinibatchTarget,
    kernel: StochasticGradientKernel,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    thinning: int = 1,
    *,
    seed: int = 0,
    initial: Tensor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> Draws:
    """Draw from a posterior with gradients estimated from minibatches.

    The draws have a bias from the finite step size that does not shrink with their number. The mean of
    ``sample_stats["temperature"]`` measures it: for a normal posterior and independent minibatches it is the inflation
    factor of the variances. With :class:`Epochs` it overestimates the bias, because the noise of minibatches cancels in
    part.

    Parameters
    ----------
    target : MinibatchTarget
    kernel : SGLD, PreconditionedSGLD or SGHMC
    num_chains : int, default 4
        Each chain has its own minibatches, so chains are independent.
    num_warmup : int, default 1000
        Discarded steps.
    num_samples : int, default 1000
        Draws per chain.
    thinning : int, default 1
        Steps per draw.
    seed : int, default 0
    initial : Tensor, optional
        Unconstrained starting points, ``(d,)`` or ``(num_chains, d)``; by default the best of ten prior draws per
        chain, on a minibatch.
    checkpoint : path, optional
        File with the state of the run. If it exists, the run resumes from it; the draws are bitwise identical to
        those of an uninterrupted run.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    time_budget : float, optional
        Seconds after which the draws made so far are returned, as after Ctrl-C.
    progress : bool, default True
        Show a progress bar for runs longer than two seconds.

    Returns
    -------
    Draws
        ``log_prior`` is exact. ``log_likelihood`` is NaN, because no step evaluates all data;
        ``sample_stats["log_likelihood_estimate"]`` has the minibatch estimates. Other ``sample_stats`` are
        ``step_size``, ``temperature`` and ``diverging`` (since the previous draw, the chain met a non-finite density
        or gradient and kept its position). ``num_gradients`` counts minibatch gradients,
        two for a step with a control variate.

    Raises
    ------
    BudgetError
        If the time budget ends before the first draw; Ctrl-C there raises ``KeyboardInterrupt``.
    InitializationError
        If no chain has a finite density at its start.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    SettingsError
        If there is nothing to run, or the target is not a :class:`MinibatchTarget`.

    Warns
    -----
    SamplingWarning
        If chains diverge, if their temperature is far above 1, or if the run ends early.

    References
    ----------
    Nemeth, C., Fearnhead, P. (2021). Stochastic gradient Markov chain Monte Carlo. Journal of
    the American Statistical Association 116, 433-450.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> from bayeskit.inference.samplers import SGLD
    >>> from bayeskit.inference.samplers import sample_stochastic_gradient
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y), subsample_size=20) as rows:
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
    >>> y = torch.linspace(-1.0, 3.0, 100, dtype=torch.float64)
    >>> target = MinibatchTarget.from_pyro(model, y)
    >>> draws = sample_stochastic_gradient(target, SGLD(step_size=1e-3), num_samples=2000)
    >>> abs(float(draws.values()["mean"].mean()) - 100 / 101) < 0.05
    True
    """
    if not isinstance(target, MinibatchTarget):
        raise SettingsError(
            f"sample_stochastic_gradient takes a MinibatchTarget, not a {type(target).__name__}; make one with "
            "MinibatchTarget.from_pyro(model, data)"
        )
    num_chains = whole_number("num_chains", num_chains, 1)
    num_warmup = whole_number("num_warmup", num_warmup, 0)
    num_samples = whole_number("num_samples", num_samples, 1)
    thinning = whole_number("thinning", thinning, 1)
    seed = whole_number("seed", seed)
    planned = num_warmup + affordable("num_samples * thinning", num_samples * thinning)
    kernel = replace(cast(Any, kernel), planned_calls=planned)
    kernel = settled(kernel, torch.empty((), dtype=target.dtype, device=target.device))
    run = StochasticGradientRun(target, kernel, num_chains, num_warmup, num_samples, thinning, seed, initial)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    outcome = drive(run, control, new_generator(seed, target.device, "stochastic gradient"), target.device)
    done = outcome.records.count("position")
    if done == 0:
        raise nothing_done(outcome.ending, control, f"after {outcome.num_iterations} steps, before the first draw")
    say_early(outcome.ending, control, run.description, f"after {done} of {num_samples} draws a chain")
    draws = _as_draws(run, outcome)
    _warn(run, outcome, draws)
    return draws


class RunState(NamedTuple):
    """A kernel's state and the number of divergences of each chain."""

    kernel: Any
    divergences: Tensor  # (n,)


@dataclass(frozen=True)
class StochasticGradientRun:
    """Algorithm for :func:`~bayeskit.inference.samplers.drive`."""

    target: MinibatchTarget
    kernel: StochasticGradientKernel
    num_chains: int
    num_warmup: int
    num_samples: int
    thinning: int
    seed: int
    initial: Tensor | None = None
    description: str = "stochastic gradient"

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.num_warmup + self.num_samples * self.thinning

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and in the run that resumes it."""
        return {
            "model": self.target.fingerprint(),
            "kernel": _describe(replace(cast(Any, self.kernel), planned_calls=1)),
            "num_chains": self.num_chains,
            "num_warmup": self.num_warmup,
            "num_samples": self.num_samples,
            "thinning": self.thinning,
            "seed": self.seed,
            "batch_size": self.target.batch_size,
            "num_data": self.target.num_data,
            "row_order": _describe(self.target.row_order),
            "control": f"{self.target.control} {_describe(self.target.anchor)}",
            "compile": str(self.target.compile),
            "initial": _describe(self.initial),
        }

    def start(self, generator: torch.Generator) -> RunState:
        """Find starting points on one random minibatch."""
        target, n = self.target, self.num_chains
        _, rows = target.next_rows(target.start_rows(1, generator), generator)
        beta = torch.ones(n, dtype=target.dtype, device=target.device)
        position = starting_points(target.on_rows(rows[0]), n, beta, generator, self.initial)
        state = self.kernel.init(target, position, generator=generator)
        return RunState(state, torch.zeros(n, dtype=torch.int64, device=target.device))

    def advance(
        self, state: RunState, iteration: int, generator: torch.Generator
    ) -> tuple[RunState, Mapping[str, Tensor]]:
        """Take one step of every chain; after warm-up, record every ``thinning``-th."""
        kernel_state, info = self.kernel.step(self.target, state.kernel, generator=generator)
        state = RunState(kernel_state, state.divergences + info.diverging)
        done = iteration + 1 - self.num_warmup
        if done <= 0 or done % self.thinning:
            return state, {"divergences": state.divergences} if done == 0 else {}
        return state, {
            "position": kernel_state.position,
            "log_prior": kernel_state.log_prior,
            "log_likelihood_estimate": kernel_state.log_likelihood,
            "step_size": info.step_size,
            "temperature": info.temperature,
            "divergences": state.divergences,
        }

    def ending(self, state: RunState, iteration: int, records: Records) -> Ending | None:
        """End after the last step."""
        return "finished" if iteration >= self.num_steps else None

    def note(self, state: RunState, iteration: int, records: Records) -> str:
        """Return phase, chains and divergences."""
        phase = "warm-up" if iteration <= self.num_warmup else "sampling"
        divergences = int(state.divergences.sum())
        text = f"{phase}, {self.num_chains} chains"
        return f"{text}, divergences: {divergences}" if divergences else text


def _is_at(points: Tensor | None, anchor: Tensor | None) -> bool:
    """Tell whether one of the points ``(..., d)`` is the anchor ``(d,)``."""
    if points is None or anchor is None or points.shape[-1:] != anchor.shape:
        return False
    return bool((points.to(anchor) == anchor).all(-1).any())


def _describe(settings: Any) -> str:
    """Return a text that is equal for equal settings, with tensors as digests."""
    if isinstance(settings, Tensor):
        values = ",".join(f"{float(v):.12e}" for v in settings.flatten().tolist())
        return f"{tuple(settings.shape)} {hashlib.sha256(values.encode()).hexdigest()[:16]}"
    if is_dataclass(settings):
        parts = (f"{f.name}={_describe(getattr(settings, f.name))}" for f in fields(settings))
        return f"{type(settings).__name__}({', '.join(parts)})"
    return repr(settings)


def _as_draws(run: StochasticGradientRun, outcome: Outcome) -> Draws:
    target, n = run.target, run.num_chains
    per_chain = {
        name: outcome.records[name].movedim(0, 1).contiguous()
        for name in ("position", "log_prior", "log_likelihood_estimate", "step_size", "temperature")
    }
    position, log_prior = per_chain.pop("position"), per_chain.pop("log_prior")
    # After a warm-up, the row before the first draw is the count at its end.
    counts = outcome.records["divergences"]
    if run.num_warmup == 0:
        counts = torch.cat([counts.new_zeros(1, n), counts])
    diverging = (counts.diff(dim=0) > 0).movedim(0, 1).contiguous()
    settings = {
        "sampler": type(run.kernel).__name__,
        "kernel": _describe(replace(cast(Any, run.kernel), planned_calls=1)),
        "num_warmup": run.num_warmup,
        "thinning": run.thinning,
        "seed": run.seed,
        "batch_size": target.batch_size,
        "num_data": target.num_data,
        "starts_at_anchor": _is_at(run.initial, target.anchor),
        # Choosing one of several prior draws by the data tells at most the logarithm of their number.
        "start_information": math.log(CANDIDATES) if run.initial is None else 0.0,
        "ending": outcome.ending,
    }
    return Draws(
        position,
        log_prior,
        torch.full_like(log_prior, torch.nan),
        torch.ones(n, dtype=target.dtype, device=target.device),
        per_chain | {"diverging": diverging},
        round(n * (outcome.num_iterations + 1) * target.gradients_per_step),
        outcome.seconds,
        settings,
        cast(Target, target),  # it has the methods of Target that Draws uses
    )


def _warn(run: StochasticGradientRun, outcome: Outcome, draws: Draws) -> None:
    divergences = outcome.state.divergences
    lost = divergences.nonzero().flatten().tolist()
    if lost:
        _say(
            f"chains {_named(lost)} diverged, {int(divergences.sum())} times in all: their density or gradient was not "
            "finite, and they kept their positions; lower the step size, or start them closer to the posterior. "
            "The draws of the other chains are not affected"
        )
    if draws.num_draws < _FEWEST_DRAWS:
        return
    temperature = draws.sample_stats["temperature"]
    mean, error = temperature.mean(1), mean_error(temperature.unsqueeze(1))
    # Where a chain runs away, temperatures grow without end, and so does the error of their mean.
    too_hot = torch.maximum(mean - 4 * error, temperature.median(1).values) > _TOO_HOT
    hot = [chain for chain in too_hot.nonzero().flatten().tolist() if chain not in lost]
    if hot:
        _say(
            f"chains {_named(hot)} have a mean temperature up to {float(mean[hot].max()):.3g} instead of 1: drift or "
            "gradient noise outweighs the noise added, so the variances are far too large or the chains have not "
            "converged yet; lower the step size, take larger minibatches, or warm up for longer"
        )


def _named(chains: list[int]) -> str:
    if len(chains) <= _MOST_NAMED:
        return str(chains)
    return f"{chains[:_MOST_NAMED]} and {len(chains) - _MOST_NAMED} more"


def _say(message: str) -> None:
    warn_user(message, SamplingWarning)
