"""Chains of every datum on their way between guide or prior and the joint density."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayeskit._progress import Bar
from bayeskit.inference.objectives.latent_density import LatentDensity
from bayeskit.inference.samplers import HMC

STEEPNESS = 4.0  # of the sigmoid that spaces the temperatures
FIRST_MOVES = 10  # at the first temperature, to find a step size at all
PILOT_SHARE = 4  # the pilot takes one temperature in so many
RATE = 0.5  # change of the log step size per unit of acceptance missing


def sigmoid_schedule(num_temperatures: int) -> Tensor:
    """Return inverse temperatures from 0 to 1, dense at both ends: ``(num_temperatures + 1,)``.

    References
    ----------
    Wu, Y., Burda, Y., Salakhutdinov, R., Grosse, R. (2017). On the quantitative analysis of decoder-based generative
    models. ICLR.

    Examples
    --------
    >>> sigmoid_schedule(2)
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    raw = torch.linspace(-STEEPNESS, STEEPNESS, num_temperatures + 1, dtype=torch.float64).sigmoid()
    return (raw - raw[0]) / (raw[-1] - raw[0])


class AnnealingPath:
    """Chains of every datum on their way through the temperatures."""

    def __init__(self, density: LatentDensity, kernel: HMC, generator: torch.Generator) -> None:
        self._density, self._kernel, self._generator = density, kernel, generator
        self._num_chains = density.layout.num_particles

    def pilot(self, betas: Tensor, target_acceptance: float) -> Tensor:
        """Return a step size for each temperature and datum, ``(T, items)``, learnt on draws thrown away."""
        density = self._density
        position = density.sample_initial(self._generator)
        log_step = torch.as_tensor(self._kernel.step_size).to(position).log().expand(density.layout.batch_shape)
        steps = len(betas) - 1
        index = torch.arange(1, steps + 1, PILOT_SHARE)
        found = []
        for number, i in enumerate(index.tolist()):
            for _ in range(FIRST_MOVES if number == 0 else 1):
                position, _, acceptance_rate = self._step(position, float(betas[i]), log_step.exp())
                acceptance = density.by_datum(acceptance_rate).mean(0)
                log_step = log_step + RATE * (acceptance - target_acceptance)
            found.append(log_step)
        return torch.stack(found).exp().repeat_interleave(PILOT_SHARE, 0)[:steps]

    def anneal(self, betas: Tensor, step_sizes: Tensor, bar: Bar, done: int) -> Tensor:
        """Return the log weight of every chain and datum, ``(K, items)``."""
        density = self._density
        position = density.sample_initial(self._generator)
        log_weight = torch.zeros(density.num_rows, dtype=torch.float64, device=position.device)
        _, rest = density.joint(position)
        for i in range(1, len(betas)):
            log_weight += float(betas[i] - betas[i - 1]) * rest
            if i + 1 < len(betas):  # where the last weight is taken, no move follows
                position, rest, _ = self._step(position, float(betas[i]), step_sizes[i - 1])
            bar.update(done + i)
        return density.by_datum(log_weight)

    def anneal_back(self, betas: Tensor, step_sizes: Tensor, position: Tensor, bar: Bar, done: int) -> Tensor:
        """Return what :meth:`anneal` would, of chains that start at draws of the posterior: ``(K, items)``."""
        density = self._density
        log_weight = torch.zeros(density.num_rows, dtype=torch.float64, device=position.device)
        _, rest = density.joint(position)
        last = len(betas) - 1
        for i in range(last, 0, -1):
            log_weight += float(betas[i] - betas[i - 1]) * rest
            if i > 1:
                position, rest, _ = self._step(position, float(betas[i - 1]), step_sizes[i - 2])
            bar.update(done + last + 1 - i)
        return density.by_datum(log_weight)

    def _step(self, position: Tensor, beta: float, step_size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move all chains at a temperature; return positions, what tempering adds there, and acceptance rates."""
        # Rows of one datum share a step size.
        kernel: Any = self._kernel.with_settings(beta=beta, step_size=step_size.repeat(self._num_chains))
        state = kernel.init(self._density, position)
        state, info = kernel.step(self._density, state, generator=self._generator)
        return state.position, state.log_likelihood, info.acceptance_rate
