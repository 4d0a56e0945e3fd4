"""Stochastic-gradient Langevin dynamics, plain and with a preconditioner, over a batch of chains."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bayeskit._evaluation import Evaluation
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.stochastic_gradient.rows import RowState
from bayeskit.inference.samplers.stochastic_gradient.schedules import Constant, Schedule, as_schedule
from bayeskit.inference.samplers.stochastic_gradient.target import MinibatchTarget

State = TypeVar("State", bound=tuple[Any, ...])


class SGLDState(NamedTuple):
    """Where the chains are; the leading dimension ``n`` is the chain."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), estimated from the last minibatch
    gradient: Tensor  # (n, d), of the log density, estimated likewise
    rows: RowState
    iteration: Tensor  # (), steps taken


class PreconditionedSGLDState(NamedTuple):
    """Where the chains are, and the running mean that their preconditioner is made of."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), estimated
    gradient: Tensor  # (n, d), estimated
    second_moment: Tensor  # (n, d), running mean of the squared gradient of one observation
    rows: RowState
    iteration: Tensor  # ()


class StochasticGradientInfo(NamedTuple):
    """What happened in one step."""

    step_size: Tensor  # (n,)
    diverging: Tensor  # (n,), bool: density or gradient were not finite, so the chain stayed where it was
    temperature: Tensor  # (n,), its mean is the factor by which a normal posterior's variances are too large


@dataclass(frozen=True)
class SGLD:
    r"""Stochastic-gradient Langevin dynamics.

    A step of size :math:`\epsilon` adds :math:`\frac{\epsilon}{2} \hat g + \sqrt\epsilon\, z` to the
    position, where :math:`\hat g` estimates the gradient of the log posterior from a minibatch
    and :math:`z` is standard normal. Nothing is accepted or rejected, so that the draws
    have a bias of order :math:`\epsilon`. For normal posteriors :meth:`stationary_variance` gives it
    exactly; ``temperature``, which is :math:`1 + \epsilon |\hat g|^2 / 4d`, measures it: its mean is then
    the factor by which the variances are too large, averaged over coordinates.

    Parameters
    ----------
    step_size : float, Tensor or Schedule
        Positive; a tensor ``(n,)`` gives each chain its own. The smallest posterior variance
        sets the scale: a twentieth of it is a careful choice.
    metric : Metric, optional
        Of the posterior's variances or covariance; drift and noise are stretched alike, and
        ``step_size`` is then relative to them. By default the identity.
    planned_calls : int, default 1
        Gradient calls planned in all, from which the target decides whether to compile.

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

    step_size: float | Tensor | Schedule
    metric: Metric | None = None
    planned_calls: int = 1

    def __post_init__(self) -> None:
        as_schedule(self.step_size)

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> SGLDState:
        """Estimate the density at ``position``, shape ``(n, d)``."""
        rows, estimate = observe(target, position, None, self.planned_calls, generator)
        return SGLDState(position, *_kept(estimate), rows, _zero(position))

    def step(
        self, target: MinibatchTarget, state: SGLDState, *, generator: torch.Generator
    ) -> tuple[SGLDState, StochasticGradientInfo]:
        """Take one step per chain."""
        step_size = step_sizes(self.step_size, state.position, state.iteration)
        step = step_size.unsqueeze(-1)
        force = state.gradient if self.metric is None else self.metric.to_momentum(state.gradient)
        change = 0.5 * step * force + step.sqrt() * standard_normal(force, generator)
        position = state.position + (change if self.metric is None else self.metric.to_position(change))
        rows, estimate = observe(target, position, state.rows, self.planned_calls, generator)
        moved = SGLDState(position, *_kept(estimate), rows, state.iteration + 1)
        finite = is_finite(position, estimate)
        temperature = 1 + 0.25 * step_size * force.square().mean(-1)
        return move(finite, state, moved), StochasticGradientInfo(step_size, ~finite, temperature)

    def stationary_variance(self, precision: float | Tensor, gradient_noise: float | Tensor = 0.0) -> Tensor:
        r"""Return the variance of the draws where the posterior is normal.

        With a constant step :math:`\epsilon`, precision :math:`P` and independent gradient noise of
        variance :math:`V` it is :math:`(1 + \epsilon V / 4) / (P (1 - \epsilon P / 4))` instead of
        :math:`1 / P`; in several dimensions, along each eigenvector of the precision matrix.

        Parameters
        ----------
        precision : float or Tensor
            Positive, any shape.
        gradient_noise : float or Tensor, default 0
            Variance of the estimated gradient, see :meth:`MinibatchTarget.gradient_variance`.

        Returns
        -------
        Tensor
            The shape to which the arguments broadcast.

        Raises
        ------
        SettingsError
            If the step size changes, a metric is set, or ``step_size * precision`` is 4 or
            more, where the chain diverges.

        Examples
        --------
        >>> from bayeskit.inference.samplers import SGLD
        >>> SGLD(step_size=0.4).stationary_variance(1.0).item()
        1.1111111111111112
        """
        schedule = as_schedule(self.step_size)
        if not isinstance(schedule, Constant) or self.metric is not None:
            raise SettingsError("the stationary variance is known for a constant step size without a metric")
        step = torch.as_tensor(schedule.value, dtype=torch.float64)
        precision = torch.as_tensor(precision, dtype=torch.float64)
        if not bool(((precision > 0) & (step * precision < 4)).all()):
            raise SettingsError(
                "the chain has a stationary variance only where the precision is positive and "
                "step_size * precision is below 4; take smaller steps"
            )
        noise = torch.as_tensor(gradient_noise, dtype=torch.float64)
        return (1 + step * noise / 4) / (precision * (1 - step * precision / 4))


@dataclass(frozen=True)
class PreconditionedSGLD:
    r"""Stochastic-gradient Langevin dynamics with an RMSprop preconditioner.

    Drift and noise of each coordinate are scaled by :math:`G = 1 / (\lambda + \sqrt v)`, where
    :math:`v` is a running mean of the squared gradient of one observation (the estimated
    gradient divided by the number of rows, prior included).

    The term :math:`\Gamma`, the divergence of :math:`G`, is left out, as in most uses of this
    method: it would need second derivatives, and it vanishes as ``decay`` approaches 1. At a finite
    ``decay`` the draws keep a bias that does not shrink with the step size, so where exactness
    matters, learn a :class:`Metric` in a first run and use :class:`SGLD` with it.

    Parameters
    ----------
    step_size : float, Tensor or Schedule
        In units of the preconditioner.
    decay : float in (0, 1], default 0.99
        Share of the past in the running mean; with 1 the first gradient decides for good.
    regularization : float, default 1e-5
        :math:`\lambda`, which bounds the scale where gradients vanish.
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

    step_size: float | Tensor | Schedule
    decay: float = 0.99
    regularization: float = 1e-5
    planned_calls: int = 1

    def __post_init__(self) -> None:
        as_schedule(self.step_size)
        if not 0 < self.decay <= 1:
            raise SettingsError(f"decay must lie in (0, 1], not {self.decay}")
        if not self.regularization > 0:
            raise SettingsError(f"regularization must be positive, not {self.regularization}")

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> PreconditionedSGLDState:
        """Estimate the density at ``position``, shape ``(n, d)``."""
        rows, estimate = observe(target, position, None, self.planned_calls, generator)
        second_moment = (estimate.gradient / target.num_data).square()
        return PreconditionedSGLDState(position, *_kept(estimate), second_moment, rows, _zero(position))

    def step(
        self, target: MinibatchTarget, state: PreconditionedSGLDState, *, generator: torch.Generator
    ) -> tuple[PreconditionedSGLDState, StochasticGradientInfo]:
        """Take one step per chain."""
        step_size = step_sizes(self.step_size, state.position, state.iteration)
        scale = self.preconditioner(state)
        step = step_size.unsqueeze(-1) * scale
        noise = standard_normal(state.position, generator)
        position = state.position + 0.5 * step * state.gradient + step.sqrt() * noise
        rows, estimate = observe(target, position, state.rows, self.planned_calls, generator)
        square = (estimate.gradient / target.num_data).square()
        second_moment = self.decay * state.second_moment + (1 - self.decay) * square
        moved = PreconditionedSGLDState(position, *_kept(estimate), second_moment, rows, state.iteration + 1)
        finite = is_finite(position, estimate)
        temperature = 1 + 0.25 * (step * state.gradient.square()).mean(-1)
        return move(finite, state, moved), StochasticGradientInfo(step_size, ~finite, temperature)

    def preconditioner(self, state: PreconditionedSGLDState) -> Tensor:
        """Return ``G``, the scale of each coordinate of each chain, ``(n, d)``."""
        return 1 / (self.regularization + state.second_moment.sqrt())


def observe(
    target: MinibatchTarget, position: Tensor, rows: RowState | None, planned_calls: int, generator: torch.Generator
) -> tuple[RowState, Evaluation]:
    """Draw each chain's next minibatch, the first one if ``rows`` is None, and estimate the density from it."""
    rows = target.start_rows(len(position), generator) if rows is None else rows
    rows, minibatch = target.next_rows(rows, generator)
    return rows, target.estimator(len(position), planned_calls)(position, minibatch)


def settled(settings: Any, like: Tensor) -> Any:
    """Return settings with their tensors in dtype and device of ``like``, so that no step has to copy them there."""
    if isinstance(settings, Tensor):
        return settings.to(like)
    if not is_dataclass(settings) or isinstance(settings, type):
        return settings
    return replace(settings, **{f.name: settled(getattr(settings, f.name), like) for f in fields(settings)})


def step_sizes(step_size: float | Tensor | Schedule, position: Tensor, iteration: Tensor) -> Tensor:
    """Return each chain's step size, shape ``(n,)``."""
    # A number was looked at when the kernel was made; looking again would be a look at the device.
    if isinstance(step_size, (int, float)):
        return position.new_full((len(position),), step_size)
    if isinstance(step_size, Tensor):
        return step_size.to(position).expand(len(position))
    return step_size.at(iteration, position.dtype).expand(len(position))


def standard_normal(position: Tensor, generator: torch.Generator) -> Tensor:
    """Draw noise shaped like ``position``."""
    return torch.randn(position.shape, dtype=position.dtype, device=position.device, generator=generator)


def is_finite(position: Tensor, estimate: Evaluation) -> Tensor:
    """Tell for each chain whether position, density and gradient are finite, shape ``(n,)``."""
    return (position.sum(-1) + estimate.gradient.sum(-1) + estimate.log_density).isfinite()


def move(finite: Tensor, old: State, new: State) -> State:
    """Move the chains with a finite new state; the others stay, though they, too, go on to other rows."""

    def choose(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) or a.dim() == 0:
            return b
        return torch.where(finite.unsqueeze(-1) if a.dim() == 2 else finite, b, a)

    return type(new)(*(choose(a, b) for a, b in zip(old, new, strict=True)))


def _kept(estimate: Evaluation) -> tuple[Tensor, Tensor, Tensor]:
    return estimate.log_prior, estimate.log_likelihood, estimate.gradient


def _zero(position: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=position.device)
