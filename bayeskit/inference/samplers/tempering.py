"""Parallel tempering: neighbouring temperatures of a ladder exchange their states, non-reversibly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.inference.samplers.adaptation import AdaptationState
from bayeskit.inference.samplers.chains import Chains
from bayeskit.inference.samplers.driver import Ending, Records
from bayeskit.inference.samplers.hmc import choose
from bayeskit.target import Target

BLOCK = 64


class PriorBlock(NamedTuple):
    """Independent prior draws, ``m`` for each of ``N`` iterations."""

    position: Tensor  # (N, m, d)
    log_prior: Tensor  # (N, m)
    log_likelihood: Tensor  # (N, m)


class PriorDraws:
    """Independent prior draws for every iteration, made a block at a time when an iteration asks for them.

    Blocks have random numbers of their own, so that a resumed run meets the same draws without storing them.

    Parameters
    ----------
    target : Target
    num_chains : int
        Draws ``m`` for each iteration.
    seed : int
    """

    def __init__(self, target: Target, num_chains: int, seed: int) -> None:
        self._target, self.num_chains, self._seed = target, num_chains, seed
        self._blocks: dict[int, PriorBlock] = {}

    def __getitem__(self, iteration: int) -> PriorBlock:
        """Return those of one iteration: ``(m, d)``, ``(m,)`` and ``(m,)``."""
        block = self._block(iteration // BLOCK)
        return PriorBlock(*(x[iteration % BLOCK] for x in block))

    def between(self, start: int, stop: int) -> PriorBlock:
        """Return those of the iterations from ``start`` to before ``stop``."""
        blocks = [self._block(i) for i in range(start // BLOCK, -(-stop // BLOCK))]
        cut = slice(start % BLOCK, start % BLOCK + stop - start)
        return PriorBlock(*(torch.cat(column)[cut] for column in zip(*blocks, strict=True)))

    def _block(self, index: int) -> PriorBlock:
        if index not in self._blocks:
            target, m = self._target, self.num_chains
            position = target.sample_prior(BLOCK * m, new_generator(self._seed, stream=f"ladder prior, block {index}"))
            position = position.to(target.device)
            log_prior, log_likelihood = target.evaluate(position, compiled=False)
            shape = (BLOCK, m)
            self._blocks[index] = PriorBlock(
                position.reshape(*shape, -1), log_prior.reshape(shape), log_likelihood.reshape(shape)
            )
        return self._blocks[index]


class TemperingState(NamedTuple):
    """State of ``m`` independent ladders of ``T`` temperatures above the prior.

    A replica is a state on its way through the temperatures; ``heading`` is 1 after it was at the
    prior, 0 after it was at the posterior or as long as it has been at neither.
    """

    chains: AdaptationState
    replica: Tensor  # (T + 1, m), int64: which replica is at each temperature, the prior's first
    heading: Tensor  # (T + 1, m), int64, by replica
    round_trips: Tensor  # (m,), int64, since warm-up


@dataclass(frozen=True)
class Tempering:
    """Chains of a ladder, and after each of their steps an exchange, as a driver's algorithm.

    Exchanges alternate between even and odd pairs of neighbours instead of choosing at random,
    which makes replicas travel straight instead of diffuse. The prior's place takes a fresh
    independent draw each time.

    Parameters
    ----------
    chains : Chains
        Levels in groups of ``m`` neighbouring chains, coldest last; ``beta`` increases from group to group.
    prior : PriorDraws

    References
    ----------
    Okabe, T., Kawata, M., Okamoto, Y., Mikami, M. (2001). Replica-exchange Monte Carlo method for the
    isobaric-isothermal ensemble. Chemical Physics Letters 335, 435-439 (alternating pairs).
    Syed, S., Bouchard-Cote, A., Deligiannidis, G., Doucet, A. (2022). Non-reversible parallel
    tempering: a scalable highly parallel MCMC scheme. JRSS B 84, 321-350.
    """

    chains: Chains
    prior: PriorDraws

    @property
    def description(self) -> str:
        """What the bar says."""
        return self.chains.description

    @property
    def num_steps(self) -> int:
        """Iterations, warm-up included."""
        return self.chains.num_steps

    def start(self, generator: torch.Generator) -> TemperingState:
        """Start the chains; every replica is where it begins."""
        state = self.chains.start(generator)
        levels, m = self.chains.adaptation.num_groups + 1, self.prior.num_chains
        place = torch.arange(levels * m, device=self.chains.target.device).reshape(levels, m)
        heading = torch.zeros_like(place)
        return TemperingState(state, place, heading, torch.zeros_like(heading[0]))

    def advance(
        self, state: TemperingState, iteration: int, generator: torch.Generator
    ) -> tuple[TemperingState, Mapping[str, Tensor]]:
        """Move all chains once, then exchange every second pair of neighbours."""
        chains, row = self.chains.advance(state.chains, iteration, generator)
        state = state._replace(chains=chains)
        accept, probability = self._decide(state, iteration, generator)
        state = self._exchange(state, accept, iteration)
        if row:
            row = {**row, "exchange_probability": probability}
        return self._count(state, iteration >= self.chains.adaptation.num_warmup), row

    def _decide(self, state: TemperingState, iteration: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return which pairs exchange, ``(T, m)`` bool, and with what probability each would have."""
        kernel = state.chains.kernel
        m = self.prior.num_chains
        log_likelihood = torch.cat([self.prior[iteration].log_likelihood, kernel.log_likelihood]).reshape(-1, m)
        beta = torch.as_tensor(self.chains.adaptation.kernel.beta).to(log_likelihood)[::m]
        width = torch.diff(beta, prepend=beta.new_zeros(1)).unsqueeze(-1)
        # A prior draw of likelihood zero never moves up; NaN compares as false.
        probability = (width * (log_likelihood[:-1] - log_likelihood[1:])).exp().clamp(max=1.0)
        uniform = torch.rand(probability.shape, generator=generator, device=probability.device).to(probability)
        turn = (torch.arange(len(probability), device=probability.device) + iteration) % 2 == 0
        return (uniform < probability) & turn.unsqueeze(-1), probability.nan_to_num(nan=0.0)

    def _exchange(self, state: TemperingState, accept: Tensor, iteration: int) -> TemperingState:
        levels, m = state.replica.shape
        up = torch.zeros_like(state.replica)
        up[:-1] += accept.to(up)
        up[1:] -= accept.to(up)
        source = torch.arange(levels, device=up.device).unsqueeze(-1) + up  # (T + 1, m)
        kernel = state.chains.kernel
        position = torch.cat([self.prior[iteration].position, kernel.position]).reshape(levels, m, -1)
        position = position.gather(0, source.unsqueeze(-1).expand_as(position))[1:].reshape(kernel.position.shape)
        # Densities could travel along, but the gradient belongs to its temperature and must be found anew.
        inner = self.chains.adaptation.planned(state.chains)
        fresh = inner.evaluate(self.chains.target, position)
        moved = (up[1:] != 0).reshape(-1)
        kernel = choose(moved, fresh, kernel)._replace(iteration=kernel.iteration)
        chains = state.chains._replace(
            kernel=kernel, num_gradients=state.chains.num_gradients + kernel.position.shape[0]
        )
        return state._replace(chains=chains, replica=state.replica.gather(0, source))

    def _count(self, state: TemperingState, counting: bool) -> TemperingState:
        """Follow replicas: a trip is from the prior up to the posterior and back."""
        heading = state.heading.flatten()
        top, bottom = state.replica[-1], state.replica[0]
        arrived = heading[top] == 1
        heading = heading.index_fill(0, top, 0).index_fill(0, bottom, 1)
        trips = state.round_trips + arrived.to(torch.int64) if counting else state.round_trips
        return state._replace(heading=heading.reshape(state.heading.shape), round_trips=trips)

    def ending(self, state: TemperingState, iteration: int, records: Records) -> Ending | None:
        """End where the chains end."""
        return self.chains.ending(state.chains, iteration, records)

    def note(self, state: TemperingState, iteration: int, records: Records) -> str:
        """Say where the run is."""
        trips = float(state.round_trips.double().mean())
        return f"{self.chains.note(state.chains, iteration, records)}, {trips:.0f} round trips"

    def facts(self) -> dict[str, Any]:
        """Return everything that must agree between a checkpoint and the run that resumes it."""
        return self.chains.facts() | {"exchange": True, "prior_block": BLOCK}
