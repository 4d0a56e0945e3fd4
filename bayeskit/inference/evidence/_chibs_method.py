"""Chib's method: the posterior ordinate at one point, from the full conditionals of a Gibbs sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE, MAX_R_HAT, MIN_EFFECTIVE
from bayeskit._core.inputs import whole_number
from bayeskit._core.progress import Bar, progress_bar
from bayeskit._core.randomness import global_stream, new_generator, one_thread
from bayeskit._core.statistics import effective_sample_size, log_mean_exp, log_mean_exp_error, pareto_shape, r_hat
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import BayeskitError, InitializationError, SettingsError
from bayeskit.inference.evidence._conditionals import (
    Blocks,
    ConjugateBlock,
    Values,
    blocks_of,
    check_conditionals,
    log_volume,
)
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import MIN_DRAWS
from bayeskit.inference.evidence._judging._densities import with_rounding
from bayeskit.inference.evidence._judging._diagnostics import from_draws
from bayeskit.inference.evidence._methods import Parts
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers._starts import prior_positions

_NUM_CHECKS = 8
_SWEEPS_BEFORE_CHECK = 5
_NUM_LOOKED_AT = 50  # draws per chain for the search for missed modes
_NO_BLOCKS = (
    "it needs the full conditionals of all blocks, which cannot be derived from a model: "
    "pass blocks=[ConjugateBlock(...)]"
)


def _compared(target: Target, parts: Parts, seed: int) -> Evidence:
    return chib(target, parts.blocks or None, seed=seed, progress=parts.progress)


@estimator(refuses=lambda target, parts: chib_refusal(target, parts.blocks), by=_compared)
def chib(
    target: Target,
    blocks: Sequence[ConjugateBlock] | None = None,
    *,
    num_chains: int = 8,
    num_warmup: int = 100,
    num_samples: int = 1000,
    at: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Evidence:
    r"""Estimate the log evidence by Chib's method from full conditionals.

    .. math:: p(y) = \frac{p(y \mid \theta^*) \, p(\theta^*)}{\prod_b \pi(\theta_b^* \mid \theta_{<b}^*, y)}

    The ordinate of a block is the mean of its full conditional density at the point, over a Gibbs run with the previous
    blocks fixed there: one run for each block but the last. The last ordinate is exact, and so is the evidence with a
    single block.

    A Gibbs sampler that stays in one of several modes, such as one labelling of a mixture, gives the ordinate within
    that mode and an evidence that is too low. Diagnostics report disagreement of chains that start at different prior
    draws, and modes with more posterior mass than draws.

    Parameters
    ----------
    target : Target
    blocks : sequence of ConjugateBlock, optional
        Each latent site belongs to exactly one block. By default ``Target.full_conditionals``. A check before the
        runs compares them with the target.
    num_chains : int, default 8
    num_warmup, num_samples : int, default 100 and 1000
        Iterations of each chain in every run.
    at : mapping of str, optional
        Values of all sites at the point; by default their posterior means in the first run.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    Evidence
        ``num_evaluations`` counts draws and evaluations of conditionals, and evaluations of the density in the search
        for missed modes.

    Raises
    ------
    SettingsError
        If there are no blocks, they do not partition the sites, or ``at`` is not a valid point.
    ModelError
        If a block is not a full conditional of ``target``.
    ShapeError
        If the draws of a block do not have the shape of its sites.
    InitializationError
        If the density at the point is zero.

    References
    ----------
    Chib, S. (1995). Marginal likelihood from the Gibbs output. Journal of the American Statistical Association 90,
    1313-1321.
    Neal, R. M. (1999). Erroneous results in "Marginal likelihood from the Gibbs output". University of Toronto.

    Examples
    --------
    >>> import torch
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence._conditionals import ConjugateBlock
    >>> from bayeskit.inference.evidence._chibs_method import chib
    >>> case = exact.linear_regression([[1.0], [1.0]], [0.0, 2.0], prior_sd=1.0)
    >>> posterior = torch.distributions.MultivariateNormal(
    ...     torch.tensor([2 / 3], dtype=torch.float64), torch.tensor([[1 / 3]], dtype=torch.float64))
    >>> z = chib(case.target(), [ConjugateBlock("b", lambda others: posterior)], num_samples=10)
    >>> abs(z.log_evidence - case.log_evidence) < 1e-12, z.standard_error < 1e-12
    (True, True)
    """
    num_chains = whole_number("num_chains", num_chains, 2)
    num_warmup = whole_number("num_warmup", num_warmup, 0)
    num_samples = whole_number("num_samples", num_samples, MIN_DRAWS)
    chosen = blocks_of(target) if blocks is None else blocks
    if not chosen:
        raise SettingsError(_NO_BLOCKS)
    known = Blocks(target, chosen)
    generator = new_generator(seed, target.device, stream="chib")
    count = len(known.blocks)
    sweeps = num_warmup + num_samples
    with one_thread(), torch.no_grad(), progress_bar("Gibbs", sweeps * max(1, count - 1), progress) as bar:
        start = _dispersed(target, max(num_chains, _NUM_CHECKS), generator)
        with global_stream(generator):
            for index in [*range(count)] * _SWEEPS_BEFORE_CHECK:
                # At distant prior draws, densities are too large for a change to be visible.
                start = known.draw(index, start)
            check_conditionals(known, start)
            state = {name: value[:num_chains] for name, value in start.items()}
            run = _gibbs(known, state, (), num_warmup, num_samples, bar)
            point = _mean(run.values) if at is None else _given(target, at)
            runs, terms = [run], []
            for index in range(count - 1):
                if index:
                    # The previous blocks stay fixed at the point; the last run's states are the starting values.
                    state = runs[-1].state | _of_blocks(known, range(index), point, num_chains)
                    runs.append(_gibbs(known, state, range(index), num_warmup, num_samples, bar))
                terms.append(_ordinates(known, index, runs[-1].values, point, range(index)))
            terms.append(known.log_prob(count - 1, point).reshape(1, 1))
    u = target.unconstrain(point)
    log_prior, log_likelihood = target.evaluate(u)
    if not bool((log_prior + log_likelihood).isfinite().all()):
        raise InitializationError(
            "the density at the point is zero or NaN; give a point of high density: at={site: value, ...}"
        )
    # The conditionals are densities of the values; the prior is a density of the unconstrained vector.
    top = log_prior + log_likelihood - log_volume(target, u)
    ordinates = [log_mean_exp(x.to(torch.float64)) for x in terms]
    log_evidence = float(top.to(torch.float64)) - float(sum(ordinates))
    error = math.sqrt(sum(float(log_mean_exp_error(x.to(torch.float64))) ** 2 for x in terms[:-1]))
    problems, diagnostics = _problems(runs, terms[:-1])
    drawn = num_chains * sweeps * sum(count - held for held in range(len(runs)))
    checked = max(num_chains, _NUM_CHECKS) * count * (_SWEEPS_BEFORE_CHECK + 4)
    z = Evidence(
        "chib",
        log_evidence,
        with_rounding(error, (log_prior + log_likelihood).abs() + log_prior.abs()),
        drawn + checked + sum(x.numel() for x in terms) + 1,
        tuple(problems),
        diagnostics,
    )
    if count == 1:
        return z  # which is exact and uses no draws
    try:
        seen = _as_draws(target, run.values)
    except (BayeskitError, ArithmeticError, ValueError):
        return z  # for example, values rounded to the end of their support; only the search for missed modes fails
    z = replace(z, num_evaluations=z.num_evaluations + seen.log_prior.numel())
    return from_draws(z, seen)


class _Run(NamedTuple):
    """The states of a Gibbs run."""

    values: dict[str, Tensor]  # (chains, draws, *shape)
    state: dict[str, Tensor]  # (chains, *shape), the last


def _gibbs(
    blocks: Blocks, state: dict[str, Tensor], held: Sequence[int], num_warmup: int, num_samples: int, bar: Bar
) -> _Run:
    """Draw every block except those held from its conditional, in turn, for all chains at once."""
    moving = [index for index in range(len(blocks.blocks)) if index not in held]
    kept: dict[str, list[Tensor]] = {name: [] for name in state}
    for step in range(num_warmup + num_samples):
        for index in moving:
            state = blocks.draw(index, state)
        bar.update(len(held) * (num_warmup + num_samples) + step + 1)
        if step >= num_warmup:
            for name, value in state.items():
                kept[name].append(value)
    return _Run({name: torch.stack(rows, 1) for name, rows in kept.items()}, state)


def _as_draws(target: Target, values: Values) -> Draws:
    """Return `NUM_LOOKED_AT` evenly spaced draws of each chain, or somewhat more."""
    every = max(1, next(iter(values.values())).shape[1] // _NUM_LOOKED_AT)
    u = target.unconstrain({name: value[:, every - 1 :: every] for name, value in values.items()})
    return Draws(u, *target.evaluate(u), u.new_ones(len(u)), target=target)


def _ordinates(blocks: Blocks, index: int, values: Values, point: Values, held: Sequence[int]) -> Tensor:
    """Return the log density of a block at the point given each draw of the others, ``(chains, draws)``."""
    chains, draws = next(iter(values.values())).shape[:2]
    flat = {name: value.flatten(0, 1) for name, value in values.items()}
    flat |= _of_blocks(blocks, held, point, chains * draws)
    return blocks.log_prob(index, flat, point).reshape(chains, draws)


def _of_blocks(blocks: Blocks, which: Sequence[int], point: Values, batch: int) -> dict[str, Tensor]:
    """Return the values of some blocks at the point, for a batch of states."""
    names = [name for index in which for name in blocks.blocks[index].sites]
    return {name: point[name].expand(batch, *point[name].shape[1:]) for name in names}


def _dispersed(target: Target, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return starting values: draws from the prior or, if it cannot be sampled, standard normal vectors."""
    start = prior_positions(target, count, generator)
    if start is not None:
        return target.constrain(start)
    like = {"generator": generator, "device": generator.device, "dtype": target.dtype}
    return target.constrain(torch.randn(count, target.dim, **like))  # type: ignore[call-overload]


def _mean(values: Values) -> dict[str, Tensor]:
    """Return the mean of all draws as a batch of one."""
    return {name: value.mean((0, 1)).unsqueeze(0) for name, value in values.items()}


def _given(target: Target, at: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the user's point as a batch of one; SettingsError for missing, unknown or non-numeric sites."""
    if not isinstance(at, Mapping):
        raise SettingsError(f"at must be a mapping {{site: value, ...}}, not {type(at).__name__}")
    names = [site.name for site in target.sites]
    unknown = [str(name) for name in at if name not in names]
    if unknown:
        raise SettingsError(f"at= names unknown sites {', '.join(unknown)}; the latent sites are: {', '.join(names)}")
    missing = [name for name in names if name not in at]
    if missing:
        raise SettingsError(f"at= has no value for {', '.join(missing)}; give all sites")
    point = {}
    for name in names:
        try:
            point[name] = torch.as_tensor(at[name], dtype=target.dtype, device=target.device).unsqueeze(0)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"the value of {name!r} in at must be numeric, not {at[name]!r}") from error
    target.unconstrain(point)  # checks shapes and supports
    return point


def _problems(runs: Sequence[_Run], terms: Sequence[Tensor]) -> tuple[list[str], dict[str, float]]:
    """Check that chains agree, and that no ordinate depends on a few draws."""
    if not terms:
        return [], {}  # one block: no ordinate is estimated
    worst = max(_disagreement(run.values) for run in runs)
    relative = [(x - log_mean_exp(x)).exp().to(torch.float64) for x in terms]
    effective = min(float(effective_sample_size(x)) for x in relative)
    spread = [float(r_hat(x)) for x in relative]
    shape = max(pareto_shape(x) for x in terms)
    problems = []
    if not max(worst, *spread) <= MAX_R_HAT:
        problems.append(
            f"chains disagree (R-hat {max(worst, *spread):.3f} > {MAX_R_HAT}): run longer chains; if the posterior has "
            "several modes, such as the labellings of a mixture, the ordinate covers only the visited modes"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"an ordinate rests on {effective:.0f} effective draws: run longer chains")
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(
            f"the largest densities dominate an ordinate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): give a point of "
            "higher density as at=..., or larger blocks"
        )
    return problems, {"r_hat": max(worst, *spread), "effective_draws": effective, "pareto_k": shape}


def _disagreement(values: Values) -> float:
    """Return the worst R-hat of all sites' entries that move."""
    entries = torch.cat([x.reshape(*x.shape[:2], -1) for x in values.values()], 2).movedim(2, 0)
    moving = entries[(entries != entries[:, :1, :1]).flatten(1).any(1)]
    return float(r_hat(moving.to(torch.float64)).max()) if len(moving) else 1.0


def chib_refusal(target: Target, blocks: Sequence[ConjugateBlock] | None = None) -> str | None:
    """Return the reason why Chib's method does not apply to a target, or None if it does."""
    chosen = blocks or blocks_of(target)
    if not chosen:
        return _NO_BLOCKS
    try:
        Blocks(target, chosen)
    except SettingsError as error:
        return str(error)
    return None
