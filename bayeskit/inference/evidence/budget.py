"""How much to spend on draws."""

from __future__ import annotations

from dataclasses import dataclass

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import SettingsError

#: Below these no sampler runs. What is too short for an error is up to each method to say, so that the others stand.
LEAST = {
    "num_chains": 1,
    "num_warmup": 20,
    "num_samples": 1,
    "num_temperatures": 2,
    "ladder_chains": 1,
    "ladder_warmup": 20,
    "ladder_samples": 1,
    "num_reference_temperatures": 2,
    "num_particles": 2,
    "num_replicates": 1,
    "num_live": 4,
}


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
        Live points of nested sampling; it needs more of them than there are dimensions.
    termination : float, default 1e-3
        Of nested sampling: the share of the evidence that live points may hold at its end. A narrow spike in a broad
        slab needs a much smaller one, such as 1e-15.

    Raises
    ------
    SettingsError
        If a number is not whole, or too small for its sampler to run at all; if ``target_acceptance`` or
        ``termination`` is not between 0 and 1.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Budget
    >>> Budget(num_chains=16).num_samples
    400
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
    termination: float = 1e-3

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("target_acceptance", "termination"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), between=(0, 1)))
        if not isinstance(self.exchange, bool):
            raise SettingsError(f"exchange must be True or False, not {self.exchange!r}")
