"""Importance sampling from the gamma distributions of Laplus."""

from __future__ import annotations

import torch

from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.inference.evidence.checks import weight_problems, with_rounding
from bayeskit.inference.evidence.laplus.families import gamma_family
from bayeskit.inference.evidence.laplus.positive import PositiveDensity, PositiveMode
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


def gamma_laplus_importance_sampling(
    target: Target, num_draws: int = 10_000, *, mode: PositiveMode | None = None, seed: int = 0
) -> Evidence:
    """Sample by importance from independent gamma distributions at the posterior mode.

    Parameters
    ----------
    target : Target
        All of its sites are positive.
    num_draws : int, default 10,000
    mode : PositiveMode, optional
        That of the target, if it is known already.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If a site is not positive, naming it, or there are no draws.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import gamma_laplus_importance_sampling
    >>> case = bk.exact.get("three_taxon_tree")
    >>> z = gamma_laplus_importance_sampling(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    density = PositiveDensity(target)
    mode = mode or density.mode(seed=seed)
    gamma, count = gamma_family(density, mode)
    generator = new_generator(seed, target.device, stream="gamma Laplus importance sampling")
    shape = gamma.concentration.expand(num_draws, target.dim)
    # A draw that rounds to zero has no logarithm; the smallest number stands for it.
    x = (torch._standard_gamma(shape, generator=generator) / gamma.rate).clamp(min=torch.finfo(shape.dtype).tiny)
    log_density = density.log_density(x)
    log_weights = (log_density - gamma.log_prob(x).sum(-1)).unsqueeze(0)
    tail, effective = pareto_shape(log_weights), float(weight_effective_sample_size(log_weights[0]))
    return Evidence(
        "gamma_laplus_importance_sampling",
        float(log_mean_exp(log_weights)),
        with_rounding(float(independent_log_mean_exp_error(log_weights)), log_density),
        num_draws + mode.num_evaluations + count,
        (*mode.problems, *weight_problems(tail, effective)),
        {"pareto_shape": tail, "effective_draws": effective},
    )
