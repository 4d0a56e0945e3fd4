"""Improper priors, under which the marginal likelihood does not exist."""

from __future__ import annotations

from pyro.distributions import Delta

from bayeskit._core.randomness import new_generator
from bayeskit._logdensity.pyro_density import PyroDensity, WitnessedSite, parts_of
from bayeskit._logdensity.pyro_runs import base_of
from bayeskit._logdensity.target import Target


def improper(target: Target) -> str | None:
    """Return a message if the prior is known to be improper, naming known sites, or None; runs a Pyro model once."""
    density = target.density
    found: set[str] = set(getattr(density, "improper_sites", ()))
    if isinstance(density, PyroDensity):
        names = {site.name for site in target.sites}
        parts = parts_of(density, new_generator(0, stream="improper priors"))
        found |= {part.name for part in parts if part.name in names and _is_flat(part)}
    # Targets from functions have no site information; :func:`check_constants` examines their priors.
    elif not found:
        return None
    if not found and target.can_sample_prior:
        return None
    where = "the prior"
    if found:
        where += f" of the site{'s' if len(found) > 1 else ''} {first_five([repr(name) for name in sorted(found)])}"
    return f"{where} is improper, so no marginal likelihood exists; give a proper prior, such as a wide normal"


def first_five(names: list[str]) -> str:
    """Return the first five names and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_flat(part: WitnessedSite) -> bool:
    """Whether a log density is zero at all values."""
    known = part.own is not None or part.normalised or isinstance(base_of(part.distribution), Delta)
    return not known and bool((part.distribution.log_prob(part.value) == 0).all())
