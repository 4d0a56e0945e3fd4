"""Starting points of a tempered ladder: prior draws that climb it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.inference.samplers.hmc import HMC
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.inference.samplers.metric import Metric
from bayeskit.target import Target

MOVES = 2  # at each temperature
LEAPFROGS = 3.0  # in each move
ACCEPTANCE = 0.7
FASTER, SLOWER = 1.25, 0.6  # what a step size is multiplied by


@dataclass(frozen=True)
class Climb:
    """Chains start from the prior and climb to their temperature, a few moves on every rung below it.

    A draw from the prior lies so far outside a sharp posterior that chains started there spend a warm-up on the way,
    and the step size of those that do is no help to the others. On a ladder the way is short from rung to rung. The
    chains stay independent of each other, so that R-hat sees modes that they cannot leave.

    Parameters
    ----------
    levels : Tensor
        The whole ladder's inverse temperatures above zero, increasing, shape ``(T,)``.
    variance : Tensor, optional
        The prior's variances, shape ``(d,)``.

    Examples
    --------
    >>> import torch
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers.climb import Climb
    >>> levels = torch.linspace(0.1, 1, 10, dtype=torch.float64)
    >>> target, generator = exact.get("linreg10").target(), torch.Generator().manual_seed(0)
    >>> points, num_gradients = Climb(levels).points(target, levels.repeat_interleave(4), generator)
    >>> points.shape, num_gradients
    (torch.Size([40, 10]), 280)
    """

    levels: Tensor
    variance: Tensor | None = None

    def points(self, target: Target, beta: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
        """Return a starting point for each chain, shape ``(n, d)``, and the gradients spent on them.

        Parameters
        ----------
        target : Target
        beta : Tensor
            Inverse temperatures of the chains, ``(n,)``, as many at each of some neighbouring ``levels``.
        generator : torch.Generator

        Raises
        ------
        InitializationError
            If no chain can start at the lowest temperature.
        """
        wanted = beta.unique()
        num_chains = len(beta) // len(wanted)
        levels = self.levels[self.levels <= wanted[-1]].to(beta)
        position = starting_points(target, num_chains, levels[:1].expand(num_chains), generator)
        deviation = torch.ones_like(position[0]) if self.variance is None else self.variance.to(position).sqrt()
        calls = int(len(levels) * (1 + MOVES * LEAPFROGS))
        kernel = HMC(0.3, Metric(deviation, is_dense=False), LEAPFROGS, planned_calls=calls)
        step_size = torch.full_like(position[:, 0], 0.3)
        reached, num_gradients = [], 0
        for level in levels:
            kernel = kernel.with_settings(beta=level)
            state = kernel.evaluate(target, position)
            num_gradients += num_chains
            for _ in range(MOVES):
                state, info = kernel.with_settings(step_size=step_size).step(target, state, generator=generator)
                num_gradients += int(info.num_steps.sum())
                # Each chain has its own step size: one that is lost must not hold up the others.
                step_size = step_size * torch.where(info.acceptance_rate > ACCEPTANCE, FASTER, SLOWER)
            position = state.position
            if bool(level >= wanted[0]):
                reached.append(position)
        return torch.cat(reached), num_gradients
