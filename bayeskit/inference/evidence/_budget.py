"""Budgets: the sizes of the runs that estimators share, nested by run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bayeskit._core.inputs import real_number, whole_number
from bayeskit.errors import SettingsError

#: No sampler runs below these numbers. Each method reports runs too short for its error, so the others stand.
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
class PosteriorBudget:
    """Sizes of the posterior run: chains, and iterations of each."""

    num_chains: int = 64
    num_warmup: int = 400
    num_samples: int = 400


@dataclass(frozen=True)
class LadderBudget:
    """Sizes of the tempered ladder; chains and iterations are those of each temperature.

    ``num_reference_temperatures`` is that of generalised stepping stone. With ``exchange`` neighbouring temperatures
    exchange states (parallel tempering).
    """

    num_temperatures: int = 50
    num_chains: int = 32
    num_warmup: int = 150
    num_samples: int = 1000
    num_reference_temperatures: int = 10
    exchange: bool = False


@dataclass(frozen=True)
class SMCBudget:
    """Sizes of sequential Monte Carlo; the adaptive version has twice the particles, half the replicates (>= 16)."""

    num_particles: int = 64
    num_replicates: int = 32


@dataclass(frozen=True)
class NestedSamplingBudget:
    """Live points of nested sampling, more than the dimension, and the share of the evidence in them at the end.

    A narrow peak inside a broad one needs a much smaller ``termination``, such as 1e-15.
    """

    num_live: int = 500
    termination: float = 1e-3


_PARTS = {"posterior": PosteriorBudget, "ladder": LadderBudget, "smc": SMCBudget, "nested": NestedSamplingBudget}
_MAX_COUNTS = 7  # by position
#: Part and field of each flat word, in the order of positional arguments.
_WORDS = {
    "num_chains": ("posterior", "num_chains"),
    "num_warmup": ("posterior", "num_warmup"),
    "num_samples": ("posterior", "num_samples"),
    "num_temperatures": ("ladder", "num_temperatures"),
    "ladder_chains": ("ladder", "num_chains"),
    "ladder_warmup": ("ladder", "num_warmup"),
    "ladder_samples": ("ladder", "num_samples"),
    "num_reference_temperatures": ("ladder", "num_reference_temperatures"),
    "exchange": ("ladder", "exchange"),
    "num_particles": ("smc", "num_particles"),
    "num_replicates": ("smc", "num_replicates"),
    "num_live": ("nested", "num_live"),
    "termination": ("nested", "termination"),
}


@dataclass(frozen=True, init=False)
class Budget:
    """Sizes of the runs shared by estimators.

    Parameters
    ----------
    *counts : int
        ``num_chains``, ``num_warmup``, ``num_samples``, ``num_temperatures``, ``ladder_chains``, ``ladder_warmup`` and
        ``ladder_samples``, as many as are given.
    posterior : PosteriorBudget, optional
        Posterior run: 64 chains of 400 warm-up iterations and 400 draws.
    ladder : LadderBudget, optional
        Tempered ladder: 50 temperatures, 32 chains at each, of 150 warm-up iterations and 1,000 draws.
    smc : SMCBudget, optional
        Sequential Monte Carlo: 32 replicates of 64 particles.
    nested : NestedSamplingBudget, optional
        Nested sampling: 500 live points, which hold a thousandth of the evidence at the end.
    target_acceptance : float, default 0.8
        Acceptance rate of Hamiltonian Monte Carlo, in the posterior run and in the ladder.
    **words : int, float or bool
        Fields of the parts by flat words: those of ``posterior``, ``smc`` and ``nested`` by name, those of ``ladder``
        as ``num_temperatures``, ``ladder_chains``, ``ladder_warmup``, ``ladder_samples``,
        ``num_reference_temperatures`` and ``exchange``. Attributes of the budget have these words, too.

    Raises
    ------
    SettingsError
        If a number is not whole or too small for its sampler, if ``target_acceptance`` or ``termination`` is not
        between 0 and 1, or if a word is unknown or given twice.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Budget
    >>> from bayeskit.inference.evidence._budget import LadderBudget
    >>> budget = Budget(num_chains=16, ladder=LadderBudget(num_temperatures=20))
    >>> budget.posterior
    PosteriorBudget(num_chains=16, num_warmup=400, num_samples=400)
    >>> budget.num_temperatures, budget.ladder_chains
    (20, 32)
    """

    posterior: PosteriorBudget
    ladder: LadderBudget
    smc: SMCBudget
    nested: NestedSamplingBudget
    target_acceptance: float

    def __init__(
        self,
        *counts: int,
        posterior: PosteriorBudget | None = None,
        ladder: LadderBudget | None = None,
        smc: SMCBudget | None = None,
        nested: NestedSamplingBudget | None = None,
        target_acceptance: float = 0.8,
        **words: Any,
    ) -> None:
        given = {"posterior": posterior, "ladder": ladder, "smc": smc, "nested": nested}
        by_place = dict(zip(list(_WORDS)[:_MAX_COUNTS], counts, strict=False))
        if len(counts) > _MAX_COUNTS:
            raise SettingsError(f"a budget takes at most {_MAX_COUNTS} numbers by position, not {len(counts)}")
        if twice := by_place.keys() & words.keys():
            raise SettingsError(f"a budget was given {', '.join(sorted(twice))} by position and by name")
        words |= by_place
        if unknown := words.keys() - _WORDS.keys():
            raise SettingsError(f"a budget has no {', '.join(sorted(unknown))}; it has {', '.join(_WORDS)}")
        for part, kind in _PARTS.items():
            value = given[part]
            if value is not None and not isinstance(value, kind):
                raise SettingsError(f"{part} must be a {kind.__name__}, not a {type(value).__name__}")
            own = {field: words[word] for word, (where, field) in _WORDS.items() if where == part and word in words}
            object.__setattr__(self, part, kind(**_checked(part, asdict(kind() if value is None else value) | own)))
        acceptance = real_number("target_acceptance", target_acceptance, "(0, 1)")
        object.__setattr__(self, "target_acceptance", acceptance)

    def __getattr__(self, name: str) -> Any:
        if name not in _WORDS:
            raise AttributeError(f"a budget has no {name}; it has {', '.join(_WORDS)}")
        part, field = _WORDS[name]
        return getattr(getattr(self, part), field)

    def words(self) -> dict[str, Any]:
        """Return all numbers by their flat words."""
        return {word: getattr(self, word) for word in _WORDS} | {"target_acceptance": self.target_acceptance}

    def __repr__(self) -> str:
        shown = {word: value for word, value in self.words().items() if value != _DEFAULT[word]}
        return f"Budget({', '.join(f'{word}={value!r}' for word, value in shown.items())})"


def _checked(part: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a part with whole numbers as ``int``, or raise SettingsError that names the flat word."""
    found: dict[str, Any] = {}
    for word, (where, field) in _WORDS.items():
        if where != part:
            continue
        number = values[field]
        if word in LEAST:
            found[field] = whole_number(word, number, LEAST[word])
        elif word == "termination":
            found[field] = real_number(word, number, "(0, 1)")
        elif not isinstance(number, bool):
            raise SettingsError(f"{word} must be True or False, not {number!r}")
        else:
            found[field] = number
    return found


_DEFAULT = Budget().words()
