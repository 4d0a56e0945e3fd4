"""The registry of named models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bayeskit._core.inputs import unknown_name
from bayeskit.gallery._trees import primates_target

if TYPE_CHECKING:
    from bayeskit._logdensity.target import Target
    from bayeskit.exact import ExactCase


@dataclass(frozen=True)
class Entry:
    """A model that can be run by name.

    Attributes
    ----------
    name : str
    description : str
        One line.
    build : callable
        Makes its :class:`~bayeskit.Target`.
    reference : float or None
        Known log evidence, in nats.
    reference_source : str
        Where ``reference`` comes from.
    budget : mapping
        Settings of :class:`~bayeskit.inference.evidence.Budget` that suit this model.
    reference_error : float, default 0
        Standard error of ``reference``, zero if exact.
    """

    name: str
    description: str
    build: Callable[[], Target]
    reference: float | None = None
    reference_source: str = ""
    budget: Mapping[str, int] = field(default_factory=dict)
    reference_error: float = 0.0


_ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "primates",
            "mitochondrial DNA of 12 primates on a fixed topology, Jukes-Cantor",
            primates_target,
            reference=-6468.912,
            reference_source="importance sampling with 40,000 draws, standard error 0.004",
            reference_error=0.004,
            # The ladder is short enough for a demonstration of less than a minute, with standard errors of
            # 0.04; --ladder-samples 1000 halves them. Few particles and live points for the same reason.
            budget={
                "num_chains": 64,
                "num_warmup": 300,
                "num_samples": 250,
                "ladder_samples": 250,
                "num_particles": 16,
                "num_live": 128,
            },
        ),
    )
}


#: Descriptions and log evidence of :data:`bayeskit.exact.CASES`, so that a list of them needs no torch.
EXACT_CASES = {
    "linreg10": ("linear regression, 50 x 10, known noise, normal prior", -94.0845),
    "radiata_pine_m1": ("radiata pine strength on covariate x (model 1), normal-gamma prior", -310.1283),
    "radiata_pine_m2": ("radiata pine strength on covariate z (model 2), normal-gamma prior", -301.7046),
    "beta_binomial": ("2 successes in 10 trials, Beta(1, 1) prior", -2.3979),
    "eight_schools": ("normal hierarchy of 8 groups, half-Cauchy scale, non-centred", -31.3113),
    "three_taxon_tree": ("three-taxon star tree, 72 sites, Jukes-Cantor, Exponential(10) prior", -220.3197),
    "pima_m1": ("logistic regression of diabetes, 532 x 5, normal prior", -257.2326),
    "pima_m2": ("logistic regression of diabetes, 532 x 6, normal prior", -259.8576),
    "gaussian_shells_2": ("two thin shells in 2 dimensions, uniform prior on a cube", -1.7456),
    "gaussian_shells_10": ("two thin shells in 10 dimensions, uniform prior on a cube", -14.5905),
    "eggbox": ("eighteen equal peaks on a square, uniform prior", 235.8559),
    "spike_and_slab": ("normal spike on a normal slab in 20 dimensions, uniform prior on a cube", 4.6151),
    "neals_funnel": ("Neal's funnel in 10 dimensions as a prior, one coordinate measured", -2.9929),
}


def names() -> tuple[str, ...]:
    """Return the names of all models.

    Examples
    --------
    >>> from bayeskit import gallery
    >>> gallery.names()[:2]
    ('primates', 'linreg10')
    """
    return (*_ENTRIES, *EXACT_CASES)


def listed() -> list[tuple[str, float | None, str]]:
    """Return name, log evidence to four decimals, and description of all models; unlike entries, without torch.

    Examples
    --------
    >>> from bayeskit import gallery
    >>> [name for name, log_evidence, description in gallery.listed() if "pine" in description]
    ['radiata_pine_m1', 'radiata_pine_m2']
    """
    own = [(entry.name, entry.reference, entry.description) for entry in _ENTRIES.values()]
    return [*own, *((name, known, description) for name, (description, known) in EXACT_CASES.items())]


def entries() -> tuple[Entry, ...]:
    """Return all models; their targets are not built yet.

    Examples
    --------
    >>> from bayeskit.gallery import entries
    >>> "eight_schools" in {entry.name for entry in entries()}
    True
    """
    return tuple(get_model(name) for name in names())


def get_model(name: str) -> Entry:
    """Return the model of that name; UnknownNameError, with the nearest names, if there is none."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    from bayeskit.exact import CASES

    if name not in CASES:
        raise unknown_name("model", name, names())
    return _of_case(CASES[name]())


def _of_case(case: ExactCase) -> Entry:
    return Entry(
        case.name,
        case.description,
        case.target,
        case.log_evidence,
        case.reference,
        reference_error=case.standard_error,
    )
