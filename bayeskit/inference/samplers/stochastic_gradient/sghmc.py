"""Stochastic-gradient Hamiltonian Monte Carlo with friction, over a batch of chains."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.stochastic_gradient.rows import Epochs, RowState
from bayeskit.inference.samplers.stochastic_gradient.schedules import Constant, Schedule, as_schedule
from bayeskit.inference.samplers.stochastic_gradient.sgld import (
    StochasticGradientInfo,
    is_finite,
    move,
    observe,
    standard_normal,
    step_sizes,
)
from bayeskit.inference.samplers.stochastic_gradient.target import MinibatchTarget


class SGHMCState(NamedTuple):
    """Where the chains are and how they move; the leading dimension ``n`` is the chain."""

    position: Tensor  # (n, d)
    momentum: Tensor  # (n, d), whitened: standard normal where the sampler is exact
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), estimated from the last minibatch
    rows: RowState
    iteration: Tensor  # (), steps taken


@dataclass(frozen=True)
class SGHMC:
    r"""Stochastic-gradient Hamiltonian Monte Carlo.

    A step of size :math:`\epsilon` moves the position by :math:`\epsilon p` and then the momentum by
    :math:`\epsilon \hat g - \epsilon C p` plus normal noise of variance
    :math:`2 \epsilon C - \epsilon^2 \hat V`. The friction :math:`C` takes away the energy that the noise of
    the estimated gradient :math:`\hat g` brings in; what is known of its variance, :math:`\hat V`,
    is left out of the noise added.

    Parameters
    ----------
    step_size : float, Tensor or Schedule
        Positive, of the order of a tenth of the smallest posterior standard deviation; a tensor ``(n,)``
        gives each chain its own.
    friction : float, default 1
        :math:`C`; the chain forgets its momentum in a time of ``1 / friction``, that is in
        ``1 / (friction * step_size)`` steps.
    gradient_noise : float or Tensor, default 0
        :math:`\hat V`, the variance of the estimated gradient (whitened where there is a metric), a
        number or ``(d,)``; see :meth:`MinibatchTarget.gradient_variance`. Only for independent
        minibatches (:class:`IndependentRows`): those of an epoch cancel each other's noise in part,
        and with it left out once more the draws would be too narrow.
    metric : Metric, optional
        Of the posterior's variances or covariance; ``step_size`` is then relative to them.
    planned_calls : int, default 1
        Gradient calls planned in all, from which the target decides whether to compile.

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

    step_size: float | Tensor | Schedule
    friction: float = 1.0
    gradient_noise: float | Tensor = 0.0
    metric: Metric | None = None
    planned_calls: int = 1

    def __post_init__(self) -> None:
        if not self.friction > 0:
            raise SettingsError(f"friction must be positive, not {self.friction}")
        noise = torch.as_tensor(self.gradient_noise)
        if not bool((noise >= 0).all()):
            raise SettingsError("gradient_noise is a variance and must not be negative")
        # Schedules never grow, so their first step is the largest.
        largest = float(as_schedule(self.step_size).at(torch.tensor(0), torch.float64).max())
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
            warnings.warn(
                "gradient_noise is meant for independent minibatches; those of an epoch cancel in part, so the draws "
                "will be too narrow; give the target row_order=IndependentRows(), or leave gradient_noise at 0",
                SamplingWarning,
                stacklevel=2,
            )
        momentum = standard_normal(position, generator)
        rows, estimate = observe(target, position, None, self.planned_calls, generator)
        zero = torch.zeros((), dtype=torch.int64, device=position.device)
        return SGHMCState(position, momentum, estimate.log_prior, estimate.log_likelihood, rows, zero)

    def step(
        self, target: MinibatchTarget, state: SGHMCState, *, generator: torch.Generator
    ) -> tuple[SGHMCState, StochasticGradientInfo]:
        """Take one step per chain."""
        step_size = step_sizes(self.step_size, state.position, state.iteration)
        step = step_size.unsqueeze(-1)
        change = step * state.momentum
        position = state.position + (change if self.metric is None else self.metric.to_position(change))
        rows, estimate = observe(target, position, state.rows, self.planned_calls, generator)
        known = self.gradient_noise.to(position) if isinstance(self.gradient_noise, Tensor) else self.gradient_noise
        noise = (2 * self.friction * step - step.square() * known).sqrt() * standard_normal(position, generator)
        force = estimate.gradient if self.metric is None else self.metric.to_momentum(estimate.gradient)
        momentum = (1 - self.friction * step) * state.momentum + step * force + noise
        moved = SGHMCState(position, momentum, estimate.log_prior, estimate.log_likelihood, rows, state.iteration + 1)
        # A chain that cannot move on starts again from rest; with its old momentum it would only try the same.
        at_rest = state._replace(momentum=torch.zeros_like(momentum))
        finite = is_finite(position, estimate)
        temperature = (1 - 0.5 * self.friction * step_size) * momentum.square().mean(-1)
        info = StochasticGradientInfo(step_size, ~finite, temperature)
        return move(finite, at_rest, moved), info

    def stationary_covariance(self, precision: float | Tensor, gradient_noise: float | Tensor = 0.0) -> Tensor:
        r"""Return the covariance of position and momentum of the draws where the posterior is normal.

        The chain is then a linear recursion :math:`x' = A x + w`, and its covariance solves
        :math:`\Sigma = A \Sigma A^\top + \operatorname{cov} w`. An exact sampler would have variances
        ``1 / precision`` and 1, uncorrelated. The position's variance times the precision equals the
        momentum's times ``1 - friction * step_size / 2``, which is how ``temperature`` is measured.

        Parameters
        ----------
        precision : float or Tensor
            Positive, shape ``(*batch)``.
        gradient_noise : float or Tensor, default 0
            The true variance of the estimated gradient, which the kernel's own setting only estimates.

        Returns
        -------
        Tensor
            Shape ``(*batch, 2, 2)``: position first, then momentum.

        Raises
        ------
        SettingsError
            If the step size changes, a metric is set, or the chain diverges at this precision.

        Examples
        --------
        >>> from bayeskit.inference.samplers import SGHMC
        >>> SGHMC(step_size=0.01).stationary_covariance(1.0).round(decimals=3)
        tensor([[ 1.0000, -0.0050],
                [-0.0050,  1.0050]], dtype=torch.float64)
        """
        schedule = as_schedule(self.step_size)
        if not isinstance(schedule, Constant) or self.metric is not None:
            raise SettingsError("the stationary covariance is known for a constant step size without a metric")
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
