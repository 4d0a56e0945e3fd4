"""Maxima in place of integrals: the largest likelihood, and the largest prior times likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit._torch import one_thread
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.laplus.modes import climb_to_modes
from bayeskit.inference.evidence.laplus.positive import PositiveDensity
from bayeskit.inference.evidence.modes import (
    Mode,
    Objective,
    curvature,
    find_modes,
    likelihood,
    not_a_maximum,
    posterior_of_values,
    require_draws,
)
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


@estimator()
def maximum_likelihood(
    target: Target, *, draws: Draws | None = None, mode: Mode | None = None, seed: int = 0
) -> Evidence:
    """Return the log likelihood at its maximum, which lies above the log evidence.

    The prior has no say but in where searches start. Models of equal size can be ranked by it, nothing more.

    Parameters
    ----------
    target : Target
    draws : Draws, optional
        Posterior draws; a search starts from the best of them.
    mode : Mode, optional
        Of the target, if it is known already: searches start there and not at draws from the prior.
    seed : int, default 0
        Of the points where searches start.

    Returns
    -------
    Evidence
        Without a standard error, and so never trusted.

    Raises
    ------
    InitializationError
        If no search ends at a finite likelihood.
    DrawsError, SettingsError, ShapeError
        If draws or mode are of another target.

    References
    ----------
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence.mode import maximum_likelihood
    >>> def model(heads):
    ...     p = pyro.sample("p", dist.Beta(1.0, 1.0))
    ...     pyro.sample("heads", dist.Binomial(10, p), obs=heads)
    >>> z = maximum_likelihood(bk.Target.from_pyro(model, torch.tensor(3.0, dtype=torch.float64)))
    >>> abs(z.log_evidence - math.log(120 * 0.3**3 * 0.7**7)) < 1e-9, z.trusted
    (True, False)
    """
    return _maximised("maximum_likelihood", target, likelihood, draws, mode, seed)


@estimator()
def maximum_posterior(
    target: Target, *, draws: Draws | None = None, mode: Mode | None = None, seed: int = 0
) -> Evidence:
    """Return the largest log of prior times likelihood, as a density of the constrained values.

    The Jacobian of the map from unconstrained space is taken out, so the number is one of the model and not of how its
    values are represented; of a simplex all entries but the last count as its values.

    Parameters
    ----------
    target, draws, mode, seed
        As of :func:`maximum_likelihood`.

    Returns
    -------
    Evidence
        Without a standard error, and so never trusted.

    Raises
    ------
    InitializationError
        If no search ends at a finite density.
    DrawsError, SettingsError, ShapeError
        If draws or mode are of another target.
    ModelError
        If it is not known how the target's values are constrained.

    References
    ----------
    Fourment et al. (2020), as of :func:`maximum_likelihood`.

    Examples
    --------
    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence.mode import maximum_posterior
    >>> def model(heads):
    ...     p = pyro.sample("p", dist.Beta(2.0, 1.0))
    ...     pyro.sample("heads", dist.Binomial(10, p), obs=heads)
    >>> z = maximum_posterior(bk.Target.from_pyro(model, torch.tensor(3.0, dtype=torch.float64)))
    >>> p = 4 / 11
    >>> abs(z.log_evidence - math.log(2 * p * 120 * p**3 * (1 - p) ** 7)) < 1e-9, z.trusted
    (True, False)
    """
    return _maximised("maximum_posterior", target, posterior_of_values, draws, mode, seed)


def _maximised(
    name: str,
    target: Target,
    objective_of: Callable[[Target], Objective],
    draws: Draws | None,
    mode: Mode | None,
    seed: int,
) -> Evidence:
    require_draws(draws, target)
    checked = 0 if mode is None else mode.require(target)
    objective = objective_of(target)
    start = None if mode is None else mode.ends
    modes, count = find_modes(target, seed=seed, draws=draws, objective=objective, start=start)
    end, value = modes[0], float(objective.value(modes[:1]))
    if _is_positive(target):
        end, value, spent = _towards_zero(objective, end, value)
        count += spent
    precision, differences = curvature(target, end, objective)
    problems, probes = not_a_maximum(target, objective, end, precision)
    count += (
        1
        + checked
        + differences
        + probes
        + (0 if draws is None else draws.num_gradients)
        + (0 if mode is None else mode.num_evaluations)
    )
    warnings = ("a maximum and not an integral: use an estimator with a standard error", *problems)
    return Evidence(name, value, math.nan, count, warnings)


def _is_positive(target: Target) -> bool:
    try:
        PositiveDensity(target)
    except SettingsError:
        return False
    return True


def _towards_zero(objective: Objective, end: Tensor, value: float) -> tuple[Tensor, float, int]:
    """Go on from the end of a search in the positive coordinates, some of which may be largest at zero.

    Returns the new end in unconstrained space, the value there, and evaluations spent.
    """

    def of_positive(x: Tensor) -> Tensor:
        found = objective.value(x.log().flatten(0, -2)).reshape(x.shape[:-1])
        return torch.where(found.isnan(), -torch.inf, found)

    def with_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        found, gradient = objective.value_and_gradient(x.log().flatten(0, -2))
        return found.reshape(x.shape[:-1]), gradient.reshape(x.shape) / x

    # Where a search ran off to, a logarithm may not be one of a number.
    furthest = 0.5 * math.log(torch.finfo(end.dtype).max)
    with one_thread():
        start = end.clamp(-furthest, furthest).exp().unsqueeze(0)
        found = climb_to_modes(of_positive, start, value_and_gradient=with_gradient)
    spent = objective.cost * found.num_evaluations
    # At a density without bound the search may have got further than positive coordinates can.
    if not float(found.value[0]) > value:
        return end, value, spent
    return found.position[0].log(), float(found.value[0]), spent
