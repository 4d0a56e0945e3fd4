"""How much to spend on draws."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How much to spend on the draws that estimators share.

    Parameters
    ----------
    num_chains, num_warmup, num_samples : int, default 64, 400, 400
        Of the posterior run.
    num_temperatures, ladder_chains, ladder_warmup, ladder_samples : int, default 50, 32, 150, 1000
        Of the tempered ladder.
    num_reference_temperatures : int, default 10
        Of the generalised stepping stone, from a reference distribution to the posterior; chains and iterations at each
        are those of the ladder.
    target_acceptance : float, default 0.8
    exchange : bool, default False
        Let neighbouring temperatures of the ladder exchange states (parallel tempering).
    num_particles, num_replicates : int, default 64 and 32
        Of sequential Monte Carlo; where populations adapt to themselves they are twice as large and half as many.
    num_live : int, default 500
        Live points of nested sampling.
    """

    num_chains: int = 64
    num_warmup: int = 400
    num_samples: int = 400
    num_temperatures: int = 50
    ladder_chains: int = 32
    ladder_warmup: int = 150
    ladder_samples: int = 1000
    num_reference_temperatures: int = 10
    target_acceptance: float = 0.8
    exchange: bool = False
    num_particles: int = 64
    num_replicates: int = 32
    num_live: int = 500
