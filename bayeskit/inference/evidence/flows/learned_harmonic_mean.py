"""The learned harmonic mean: posterior draws weighed against a normalizing flow inside the posterior."""

from __future__ import annotations

import torch

from bayeskit._settings import real_number
from bayeskit._statistics import (
    effective_sample_size,
    log_mean_exp,
    log_mean_exp_error,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.checks import (
    belongs,
    finite_chains,
    posterior_problems,
    weight_problems,
    with_rounding,
    without_nan,
)
from bayeskit.inference.evidence.flows.fitted_flow import FittedFlow, check_flow, fit_flow, halves
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

CHECK_DRAWS = 2000
MAX_OUTSIDE = 0.01


def learned_harmonic_mean(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, temperature: float = 0.8, seed: int = 0
) -> Evidence:
    """Average, over posterior draws, a narrowed normalizing flow divided by likelihood and prior.

    The flow is fitted to the first half of each chain and the variance of its noise multiplied by ``temperature``, so
    that it lies inside the posterior and the ratios stay bounded; their mean over the second half estimates the
    reciprocal of the evidence. Draws from the narrowed flow show whether it does lie inside: none of them should have
    a larger ratio than the posterior draws have.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    flow : FittedFlow, optional
        What :func:`fit_flow` made of ``draws``; made here by default.
    temperature : float, default 0.8
        Above zero, at most one.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to be split.
    SettingsError
        If the temperature lies outside its domain, or the flow has another dimension.

    References
    ----------
    McEwen, J. D., Wallis, C. G. R., Price, M. A., Spurio Mancini, A. (2021). Machine learning assisted Bayesian model
    comparison: learnt harmonic mean estimator. arXiv 2111.12720.

    Polanska, A., Price, M. A., Piras, D., Spurio Mancini, A., McEwen, J. D. (2024). Learned harmonic mean estimation
    of the Bayesian evidence with normalizing flows. arXiv 2405.05969.

    Gelfand, A. E., Dey, D. K. (1994). Bayesian model choice: asymptotics and exact calculations. Journal of the Royal
    Statistical Society B 56, 501-514.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.flows import learned_harmonic_mean
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = learned_harmonic_mean(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.standard_error < 0.04
    (True, True)
    """
    belongs(draws, target)
    temperature = real_number("temperature", temperature)
    if not 0 < temperature <= 1:
        raise SettingsError(f"temperature must lie above 0 and be at most 1, not {temperature}")
    draws = finite_chains(draws)
    _, second = halves(draws, target.dim)
    flow = fit_flow(target, draws, seed=seed) if flow is None else check_flow(flow, target)
    log_density = (draws.log_prior + draws.log_likelihood)[:, -second.shape[1] :]
    log_ratios = flow.log_prob(second, temperature) - log_density.to(torch.float64)
    shape = pareto_shape(log_ratios)
    relative = (log_ratios - log_mean_exp(log_ratios)).exp()
    independent = min(1.0, float(effective_sample_size(relative)) / relative.numel())
    effective = float(weight_effective_sample_size(log_ratios.flatten())) * independent

    problems, diagnostics = posterior_problems(draws)
    problems += weight_problems(shape, effective)
    inside = flow.sample(CHECK_DRAWS, new_generator(seed, stream="learned harmonic mean"), temperature)
    there, nan_problems = without_nan(target.log_density(inside))
    excess = flow.log_prob(inside, temperature) - there.to(torch.float64) > log_ratios.max()
    outside = float(excess.to(torch.float64).mean())
    problems += nan_problems
    if outside > MAX_OUTSIDE:
        problems.append(
            f"{100 * outside:.0f} % of the flow lies where the posterior has no draws, so the estimate is too high: "
            "lower the temperature or use more draws"
        )
    z = Evidence(
        "learned_harmonic_mean",
        -float(log_mean_exp(log_ratios)),
        with_rounding(float(log_mean_exp_error(log_ratios)), log_density),
        draws.num_gradients + CHECK_DRAWS,
        tuple(problems),
        diagnostics
        | {"pareto_shape": shape, "effective_ratios": effective, "outside": outside, "flow_gain": flow.gain},
    )
    return with_missed_peak(z, target, draws, seed=seed)
