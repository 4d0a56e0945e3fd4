"""Estimators based on the mode: Laplace, importance sampling from a Laplace fit, and maxima."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.statistics import (
    log_mean_exp,
    pareto_shape,
    pareto_smoothed,
    replicates_log_mean_error,
    weight_effective_sample_size,
)
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import ModelError, SettingsError
from bayeskit.inference._optimize import negative_hessian
from bayeskit.inference._proposals import Mixture, StudentT
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._densities import with_rounding, without_infinity, without_nan
from bayeskit.inference.evidence._judging._missed_mass import (
    NUM_MOVED,
    exceeds_error,
    missed_mass,
    moved_draws,
    same_likelihood,
    share_beyond,
)
from bayeskit.inference.evidence._judging._weights import MIN_MISSED_SHARE, missed_draws, weight_problems
from bayeskit.inference.evidence._laplus import PositiveDensity, positive_modes
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._modes import (
    Mode,
    ObjectiveFunction,
    find_mode,
    find_modes,
    likelihood,
    not_a_maximum,
    posterior_of_values,
    require_draws,
)
from bayeskit.inference.evidence._result import Evidence

# The scale of a proposal from the curvature of the posterior.

#: Curvatures below this share of the largest count as flat; their replacement, as a share of the largest.
_FLAT, _NARROWEST = 1e-20, 1e-8


def _scaled_curvature(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal of a negative Hessian, and eigenvalues after scaling it to a unit diagonal; NaN if not positive."""
    diagonal = precision.diagonal()
    if not bool(precision.isfinite().all() & (diagonal > 0).all()):
        return diagonal, torch.full_like(diagonal, torch.nan)
    scale = diagonal.rsqrt()
    return diagonal, torch.linalg.eigvalsh(scale[:, None] * precision * scale)


def scale_factor(precision: Tensor) -> Tensor:
    """Cholesky factor of the inverse of ``precision``; directions without curvature get a finite width."""
    dtype, precision = precision.dtype, precision.double()  # single precision cannot factorise such narrow matrices
    diagonal = precision.diagonal().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    if not bool(precision.isfinite().all()):
        precision = torch.diag(diagonal)
    # Coordinates may have any units, so a coordinate is flat only relative to the largest curvature.
    highest = diagonal.max() if bool(diagonal.any()) else torch.ones_like(diagonal[0])
    diagonal = torch.where(diagonal > _FLAT * highest, diagonal, _NARROWEST * highest)
    scale = diagonal.rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * precision * scale)
    floor = _NARROWEST * values.abs().max().clamp(min=1.0)
    covariance = (vectors / values.clamp(min=floor)) @ vectors.T
    return (scale[:, None] * torch.linalg.cholesky(covariance)).to(dtype)


# The Laplace approximation: a normal distribution at the mode with full covariance.

_UNKNOWN = "an approximation of unknown error: use laplace_importance_sampling, which estimates it"

#: Log density lost by a step of one standard deviation in a curved direction, in nats; 0.5 for a normal posterior.
_MIN_FALL = 0.01


@estimator(Part.MODE, kind="approximation")
def laplace(target: Target, *, draws: Draws | None = None, mode: Mode | None = None, seed: int = 0) -> Evidence:
    r"""Estimate the log evidence by the Laplace approximation in unconstrained space.

    :math:`\log Z = f(m) + \frac{d}{2} \log 2 \pi - \frac{1}{2} \log \det(-f''(m))`, where `f` is the log of prior times
    likelihood over unconstrained space and `m` its mode.

    Parameters
    ----------
    target : Target
    draws : Draws, optional
        Posterior draws; one mode search starts from the best draw.
    mode : Mode, optional
        Known mode of the target.
    seed : int, default 0
        Seed of the starting points of the mode search.

    Returns
    -------
    Evidence
        Never trusted, because it has no standard error; NaN if the curvature is not positive definite.

    Raises
    ------
    InitializationError
        If no mode search ends at a finite density.
    DrawsError, SettingsError, ShapeError
        If draws or mode belong to another target.

    References
    ----------
    Tierney, L., Kadane, J. B. (1986). Accurate approximations for posterior moments and marginal densities. Journal of
    the American Statistical Association 81, 82-86.

    Examples
    --------
    Exact where the posterior is normal:

    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._laplace_approximation import laplace
    >>> case = bk.exact.get("linreg10")
    >>> z = laplace(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 1e-6, z.trusted
    (True, False)
    """
    require_draws(draws, target)
    mode = mode or find_mode(target, draws=draws, seed=seed)
    spent = mode.require(target)
    problems = (_UNKNOWN, *mode.problems)
    log_evidence = math.nan
    diagonal, eigenvalues = _scaled_curvature(mode.precision)
    smallest, largest = float(eigenvalues.min()), float(eigenvalues.max())
    # A curvature within the error of the finite differences counts as zero.
    resolved = torch.finfo(mode.precision.dtype).eps ** (2 / 3) * largest
    bends, probes = _falls_off(target, mode, diagonal)
    if bends and smallest > resolved:
        log_determinant = float(eigenvalues.log().sum() + diagonal.log().sum())
        log_evidence = mode.value + 0.5 * (target.dim * math.log(2 * math.pi) - log_determinant)
    else:
        problems += (
            "the log posterior is not concave in all directions at its mode, so no normal distribution fits: use "
            "bridge_sampling or stepping_stone",
        )
    return Evidence(
        "laplace",
        log_evidence,
        math.nan,
        mode.num_evaluations + spent + probes + (0 if draws is None else draws.num_gradients),
        problems,
        {"smallest_curvature": smallest, "largest_curvature": largest},
    )


def _falls_off(target: Target, mode: Mode, diagonal: Tensor) -> tuple[bool, int]:
    """Tell whether the density falls along coordinates whose curvature may be rounding; also return evaluations."""
    if not bool((diagonal > 0).all()):
        return False, 0
    # Units differ between coordinates, so a small curvature alone is not informative: test a step of matching length.
    doubtful = (diagonal <= torch.finfo(diagonal.dtype).eps ** (2 / 3) * diagonal.max()).nonzero().flatten()
    if not len(doubtful):
        return True, 0
    steps = torch.diag(diagonal.rsqrt())[doubtful]
    reached = target.log_density(torch.cat([mode.position + steps, mode.position - steps]))
    falls = (mode.value - reached).nan_to_num(nan=-torch.inf, posinf=torch.inf) > _MIN_FALL
    return bool(falls.reshape(2, -1).any(0).all()), len(reached)


# Importance sampling from a Laplace fit with Student-t tails.

_MAX_ROUNDS, _PILOT_DRAWS, _MAX_PILOT_DRAWS = 15, 4000, 10_000
#: Above this dimension the random radius of heavy tails hides the fit of the proposal.
_FEW_DIMENSIONS = 50
#: Above it a last refit is accepted if the noise of its draws costs no more than so many nats.
_MAX_LOSS = 0.1
#: Number of independent quasi-random sets, and smallest number of draws per set.
_NUM_SETS, _LEAST_SET = 32, 8
#: A smaller share of effective draws is not trusted; a share below the larger number triggers a check by moved draws.
_MIN_SHARE, _MAX_SHARE = 0.01, 0.5
#: Degrees of freedom of the pilot rounds and of the defensive draws; share and relative width of the defensive draws
#: if the proposal fits and if it does not.
_GUARD_DF, _GUARD, _GUARD_OF_MISFIT = 5.0, (0.1, 2.0), (0.5, 1.5)
#: Widths of the probes for mass outside the proposal, in multiples of its scale, and number of draws per width.
_PROBE_WIDTHS, _NUM_PROBES = (3.0, 6.0, 10.0), 500
#: Distances, in standard deviations, at which tails are compared along the axes. A difference counts if the posterior
#: mass there exceeds a share of the standard error, and if the tail decays more slowly than a power of -3.
_FAR, _MIN_TAIL, _MIN_LEFT = (30.0, 100.0), 0.1, 0.1
_CHOICES = (3.0, 5.0, 10.0, 20.0, 50.0, 200.0)
_MANY_CHOICES = (*_CHOICES, 1000.0, 10_000.0)


class _Pilot(NamedTuple):
    """Draws of a round: effective share, proposal, refitted proposal, points and log weights."""

    share: float
    proposal: StudentT
    refitted: StudentT
    x: Tensor
    log_weights: Tensor


@estimator(Part.MODE)
def laplace_importance_sampling(
    target: Target,
    num_draws: int = 32_768,
    *,
    degrees_of_freedom: float | None = None,
    smoothed: bool = True,
    draws: Draws | None = None,
    mode: Mode | None = None,
    seed: int = 0,
) -> Evidence:
    """Estimate the log evidence by importance sampling from a multivariate Student-t at the posterior mode.

    The scale matrix is the inverse negative Hessian in unconstrained space. Short pilot rounds refit the t to their own
    weighted draws while that helps, which corrects for skewness or a mode far from the bulk of the mass (the scale of a
    hierarchical model), and select the degrees of freedom. A tenth of the draws then comes from a wider t with 5
    degrees of freedom, centred where the proposal has too little mass; half of the draws if no t fits the posterior. In
    that case, Hamiltonian Monte Carlo moves some draws to check for mass outside the proposal and for weights larger
    than any drawn. Only draws from the last proposal enter the estimate.

    Parameters
    ----------
    target : Target
    num_draws : int, default 32,768
        Draws of the final round, in up to 32 randomised quasi-Monte Carlo sets of equal size; a remainder is not used.
        The variance between sets gives the standard error.
    degrees_of_freedom : float, optional
        Above 2; selected by the pilot rounds if not given.
    smoothed : bool, default True
        Pareto-smooth the largest weights.
    draws : Draws, optional
        Posterior draws, for the mode search and for a check that the proposal covers them.
    mode : Mode, optional
        Known mode of the target.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``num_draws`` is below two, ``degrees_of_freedom`` is not above 2, or the mode is of another target.
    InitializationError
        If no mode search ends at a finite density.
    DrawsError, ShapeError
        If draws or mode belong to another target.

    References
    ----------
    Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo
    integration. Econometrica 57, 1317-1339.

    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture
    distributions. Technometrics 37, 185-194.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed
    importance sampling. Journal of Machine Learning Research 25(72).

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import laplace_importance_sampling
    >>> z = laplace_importance_sampling(exact.get("beta_binomial").target(), seed=1)
    >>> abs(z.log_evidence + 2.3978953) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    if degrees_of_freedom is not None:
        degrees_of_freedom = real_number("degrees_of_freedom", degrees_of_freedom, "(2, inf)")
    require_draws(draws, target)
    mode = mode or find_mode(target, seed=seed, draws=draws)
    spent = mode.require(target) + mode.num_evaluations + (0 if draws is None else draws.num_gradients)
    generator = new_generator(seed, stream="laplace importance sampling")
    proposal, pilots = _adapted(target, mode, degrees_of_freedom, generator)
    # The proposal depends on the pilot rounds, so only this last round enters the estimate.
    num_sets = max(2, min(_NUM_SETS, num_draws // _LEAST_SET))
    size = math.ceil(num_draws / num_sets)
    proposal = proposal.with_share_of(size)
    x = torch.cat([proposal.spread(size, generator) for _ in range(num_sets)])
    log_prior, log_likelihood = target.evaluate(x)
    log_density, problems = without_nan(log_prior + log_likelihood)
    log_density, infinite = without_infinity(log_density)
    log_weights = (log_density - proposal.log_prob(x)).unsqueeze(0)
    shape, largest = pareto_shape(log_weights), float(log_weights.max())
    effective = float(weight_effective_sample_size(log_weights[0]))
    counted = _smoothed(log_weights) if smoothed else log_weights
    log_z = float(log_mean_exp(counted))
    sets = log_mean_exp(counted.reshape(num_sets, 1, size)) - log_z
    error = float(replicates_log_mean_error(sets.unsqueeze(0))[0])
    beyond, moves = 0.0, 0
    if effective < _MAX_SHARE * len(x):
        beyond, moves = share_beyond(target, x, log_weights[0], proposal.log_prob, seed=seed)
        # Mass beyond the largest weight is missing in the estimate; smoothing reduces the weights below it.
        certain = max(0.0, beyond - math.sqrt(beyond * (1 - beyond) / NUM_MOVED))
        error = math.hypot(error, certain, log_z - float(log_mean_exp(log_weights)))
    error = with_rounding(error, log_density)
    missed, looks = missed_mass(
        target, x, log_weights[0], log_z, error, log_prob=proposal.log_prob, others=mode.others, seed=seed
    )
    around, probes = _missed_around(target, proposal, log_z, largest, error, generator)
    if not effective >= _MIN_SHARE * len(x):
        # With so few effective draws, even spacing hides how little of the posterior the draws cover.
        problems.append(
            f"only {100 * effective / len(x):.2g} % of the draws are effective, so the proposal is unlike the "
            "posterior: use bridge sampling"
        )
    problems += (infinite or weight_problems(shape, effective)) + around + missed
    if beyond > MIN_MISSED_SHARE:
        problems.append(
            f"{100 * beyond:.2g} % of the posterior lies where weights are larger than all drawn weights: use bridge "
            "sampling or stepping stone"
        )
    problems += same_likelihood(target, log_likelihood) + missed_draws(proposal.log_prob, draws, largest)
    return Evidence(
        "laplace_importance_sampling",
        log_z,
        error,
        len(x) + spent + pilots + looks + probes + moves,
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective, "degrees_of_freedom": _main(proposal).df},
    )


def _adapted(
    target: Target, mode: Mode, degrees_of_freedom: float | None, generator: torch.Generator
) -> tuple[StudentT | Mixture, int]:
    """Return a proposal fitted to the posterior by pilot rounds, and evaluations."""
    d = target.dim
    num_draws = max(_PILOT_DRAWS, min(40 * d, _MAX_PILOT_DRAWS))
    tails = _GUARD_DF if d <= _FEW_DIMENSIONS else d / 4
    start = StudentT(mode.position, scale_factor(mode.precision), degrees_of_freedom or tails)
    best = last = _pilot(target, start, num_draws, generator)
    rounds, stalls = 1, 0
    while rounds < _MAX_ROUNDS and stalls < 3 and best.share < 0.5:
        rounds += 1
        last = _pilot(target, last.refitted, num_draws, generator)
        stalls = 0 if last.share > 1.1 * best.share else stalls + 1
        best = last if last.share > best.share else best
    too_few = d > _FEW_DIMENSIONS and d * (d + 3) > 4 * _MAX_LOSS * best.share * num_draws
    chosen = best.proposal if stalls or too_few else best.refitted
    spent = rounds * num_draws
    if degrees_of_freedom is not None:
        return chosen, spent
    if best.share >= _MAX_SHARE:
        log_density = best.log_weights + best.proposal.log_prob(best.x)
        return _with_tails(chosen, best.proposal, best.x, best.log_weights, log_density, *_GUARD), spent
    # The proposal's own draws hardly reveal the mass that it lacks.
    x, log_density, moves = moved_draws(target, best.x, best.log_weights, generator)
    equal = torch.zeros_like(log_density)
    return _with_tails(chosen, best.proposal, x, equal, log_density, *_GUARD_OF_MISFIT), spent + moves


def _pilot(target: Target, proposal: StudentT, num_draws: int, generator: torch.Generator) -> _Pilot:
    x = proposal.sample(num_draws, generator)
    log_weights = target.log_density(x) - proposal.log_prob(x)
    # An infinite or NaN density counts as zero.
    log_weights = log_weights.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    share = float(weight_effective_sample_size(log_weights).nan_to_num(nan=0.0)) / num_draws
    return _Pilot(share, proposal, _refit(x, log_weights, proposal), x, log_weights)


def _main(proposal: StudentT | Mixture) -> StudentT:
    return cast(StudentT, proposal.parts[0]) if isinstance(proposal, Mixture) else proposal


def _smoothed(log_weights: Tensor) -> Tensor:
    """Pareto-smooth the largest weights without normalising them."""
    smooth = pareto_smoothed(log_weights)[0].to(log_weights.dtype)
    # Weights below the tail are only shifted, all by the same amount.
    moved = (log_weights - smooth)[log_weights <= log_weights.median()]
    moved = moved[moved.isfinite()]
    return smooth + moved.median() if len(moved) else log_weights


def _missed_around(
    target: Target,
    proposal: StudentT | Mixture,
    log_z: float,
    largest: float,
    standard_error: float,
    generator: torch.Generator,
) -> tuple[list[str], int]:
    """Return a warning if wider draws or far points along axes find more mass than the error, and evaluations."""
    main, spent = _main(proposal), 0
    for width in _PROBE_WIDTHS:
        probe = StudentT(main.location, width * main.factor, _GUARD_DF)
        x = probe.sample(_NUM_PROBES, generator)
        log_density = target.log_density(x).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        spent += _NUM_PROBES
        # Only if no draw of the proposal had as large a weight.
        outside = log_density - proposal.log_prob(x) > largest
        if exceeds_error((log_density - probe.log_prob(x) - log_z)[outside], _NUM_PROBES, standard_error):
            problem = "wider draws find mass that the proposal does not cover: use bridge sampling or stepping stone"
            return [problem], spent
    axes = torch.cat([main.factor.T, torch.diag(main.factor.norm(dim=1))])
    far = torch.tensor(_FAR, dtype=axes.dtype, device=axes.device)[:, None, None]
    x = main.location + far * torch.cat([axes, -axes])
    log_density = target.log_density(x).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    spent += log_density.numel()
    # Posterior mass at such distances if it is as wide across the axis as in the centre.
    near, further = (log_density - log_z - main.log_prob(main.location[None])).exp() * far[..., 0]
    heavy = (near > _MIN_TAIL * standard_error) & (further > _MIN_LEFT * near)
    if bool((heavy & (log_density[0] - proposal.log_prob(x[0]) > largest)).any()):
        return ["the posterior has heavier tails than the proposal: use bridge sampling or nested_sampling"], spent
    return [], spent


def _with_tails(
    fitted: StudentT,
    current: StudentT,
    x: Tensor,
    log_weights: Tensor,
    log_density: Tensor,
    guard_share: float,
    guard_width: float,
) -> StudentT | Mixture:
    """Choose the degrees of freedom of least third moment of the weights, mixed with a wider defensive component."""
    many = len(fitted.location) > _FEW_DIMENSIONS
    covariance = fitted.factor * math.sqrt(fitted.df / (fitted.df - 2))
    lowest = math.inf
    chosen: StudentT | Mixture = fitted
    for df in _MANY_CHOICES if many else _CHOICES:
        main = StudentT(fitted.location, covariance * math.sqrt((df - 2) / df), df)
        if many:
            # The draws missing from the proposal are too few for a fit, and twice the width is far too small.
            guard = StudentT(fitted.location, fitted.factor, _GUARD_DF)
        else:
            lacking = _refit(x, log_weights + log_density - main.log_prob(x), current)
            guard = StudentT(lacking.location, guard_width * lacking.factor, lacking.df)
        candidate = Mixture([main, guard], [1 - guard_share, guard_share])
        log_ratio = log_density - candidate.log_prob(x)
        # The third moment, unlike the second, is dominated by the tail. If it is small, the mean is nearly normal, as
        # the standard error assumes.
        moment = float((log_weights + 2 * log_ratio).logsumexp(0))
        if moment < lowest:
            lowest, chosen = moment, candidate
    return chosen


def _refit(x: Tensor, log_weights: Tensor, current: StudentT) -> StudentT:
    """Fit location and scale to the weighted draws ``(n, d)``, the scale blended with the current one."""
    d = x.shape[1]
    # Weights too uneven for a covariance estimate are tempered by a power; the next round corrects the result.
    weights = _flattened(log_weights, needed=max(100.0, 10.0 * d))
    mean = weights @ x
    centred = x - mean
    covariance = (weights * centred.T) @ centred
    df = current.df
    # A t with df degrees of freedom has covariance df / (df - 2) times its scale matrix.
    scale = covariance * (df - 2) / df
    effective = float(1 / weights.square().sum())
    trust = effective / (effective + d)
    blended = trust * scale + (1 - trust) * current.factor @ current.factor.T
    factor, failed = torch.linalg.cholesky_ex(blended)
    return current if bool(failed) else StudentT(mean, factor, df)


def _flattened(log_weights: Tensor, needed: float) -> Tensor:
    """Normalised weights, raised to the largest power up to one with ``needed`` effective draws."""
    low, high = 0.0, 1.0
    if float(weight_effective_sample_size(log_weights)) < needed:
        for _ in range(30):
            middle = 0.5 * (low + high)
            enough = float(weight_effective_sample_size(middle * log_weights)) >= needed
            low, high = (middle, high) if enough else (low, middle)
        return torch.softmax(low * log_weights, 0)
    return torch.softmax(log_weights, 0)


# Maxima instead of integrals: the largest likelihood, and the largest prior times likelihood.


@estimator(Part.MODE, Part.LIKELIHOOD, kind="approximation")
def maximum_likelihood(
    target: Target, *, draws: Draws | None = None, mode: Mode | None = None, seed: int = 0
) -> Evidence:
    """Return the maximum log likelihood, an upper bound of the log evidence.

    The prior only affects the starting points of the searches. The maximum can rank models of equal dimension.

    Parameters
    ----------
    target : Target
    draws : Draws, optional
        Posterior draws; one search starts from the best draw.
    mode : Mode, optional
        Known mode of the target; searches start there and not at prior draws.
    seed : int, default 0
        Seed of the starting points.

    Returns
    -------
    Evidence
        Never trusted, because it has no standard error.

    Raises
    ------
    InitializationError
        If no search ends at a finite likelihood.
    DrawsError, SettingsError, ShapeError
        If draws or mode belong to another target.

    References
    ----------
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence._laplace_approximation import maximum_likelihood
    >>> def model(heads):
    ...     p = pyro.sample("p", dist.Beta(1.0, 1.0))
    ...     pyro.sample("heads", dist.Binomial(10, p), obs=heads)
    >>> z = maximum_likelihood(bk.Target.from_pyro(model, torch.tensor(3.0, dtype=torch.float64)))
    >>> abs(z.log_evidence - math.log(120 * 0.3**3 * 0.7**7)) < 1e-9, z.trusted
    (True, False)
    """
    return _maximized("maximum_likelihood", target, likelihood, draws, mode, seed)


def _of_unknown_scale(target: Target, parts: Parts) -> str | None:
    try:
        target.log_jacobian(torch.zeros(1, target.dim, dtype=target.dtype, device=target.device))
    except ModelError as error:
        return str(error)
    return None


@estimator(Part.MODE, kind="approximation", refuses=_of_unknown_scale)
def maximum_posterior(
    target: Target, *, draws: Draws | None = None, mode: Mode | None = None, seed: int = 0
) -> Evidence:
    """Return the maximum log of prior times likelihood, as a density of the constrained values.

    The Jacobian of the map from unconstrained space is removed, so the maximum does not depend on the parametrisation;
    the density of a simplex is over all entries but the last.

    Parameters
    ----------
    target, draws, mode, seed
        As for :func:`maximum_likelihood`.

    Returns
    -------
    Evidence
        Never trusted, because it has no standard error.

    Raises
    ------
    InitializationError
        If no search ends at a finite density.
    DrawsError, SettingsError, ShapeError
        If draws or mode belong to another target.
    ModelError
        If the constraints of the target's values are unknown.

    References
    ----------
    Fourment et al. (2020), as of :func:`maximum_likelihood`.

    Examples
    --------
    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence._laplace_approximation import maximum_posterior
    >>> def model(heads):
    ...     p = pyro.sample("p", dist.Beta(2.0, 1.0))
    ...     pyro.sample("heads", dist.Binomial(10, p), obs=heads)
    >>> z = maximum_posterior(bk.Target.from_pyro(model, torch.tensor(3.0, dtype=torch.float64)))
    >>> p = 4 / 11
    >>> abs(z.log_evidence - math.log(2 * p * 120 * p**3 * (1 - p) ** 7)) < 1e-9, z.trusted
    (True, False)
    """
    return _maximized("maximum_posterior", target, posterior_of_values, draws, mode, seed)


def _maximized(
    name: str,
    target: Target,
    objective_of: Callable[[Target], ObjectiveFunction],
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
    precision, differences = negative_hessian(objective.value_and_gradient, end)
    problems, probes = not_a_maximum(target, objective, end, precision)
    count += (
        1
        + checked
        + objective.cost * differences
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


def _towards_zero(objective: ObjectiveFunction, end: Tensor, value: float) -> tuple[Tensor, float, int]:
    """Continue a search in positive coordinates; return its unconstrained end, the value there and evaluations."""

    def of_positive(x: Tensor) -> Tensor:
        found = objective.value(x.log().flatten(0, -2)).reshape(x.shape[:-1])
        return torch.where(found.isnan(), -torch.inf, found)

    def with_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        found, gradient = objective.value_and_gradient(x.log().flatten(0, -2))
        return found.reshape(x.shape[:-1]), gradient.reshape(x.shape) / x

    # Some coordinates may have their maximum at zero. A search that diverged may have no finite logarithm.
    furthest = 0.5 * math.log(torch.finfo(end.dtype).max)
    with one_thread():
        start = end.clamp(-furthest, furthest).exp().unsqueeze(0)
        found = positive_modes(of_positive, start, value_and_gradient=with_gradient)
    spent = objective.cost * int(found.num_evaluations.sum())
    # At an unbounded density the search may leave the range of positive floating-point numbers.
    if not float(found.value[0]) > value:
        return end, value, spent
    return found.position[0].log(), float(found.value[0]), spent
