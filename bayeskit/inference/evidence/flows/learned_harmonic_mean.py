"""The learned harmonic mean: posterior draws weighed against a normalizing flow inside the posterior."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.stats import chi2
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit._statistics import (
    effective_sample_size,
    log_mean_exp,
    log_mean_exp_error,
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
from bayeskit.inference.evidence.flows.fitted_flow import (
    FittedFlow,
    check_flow,
    fit_flow,
    halves,
    normal_density,
    shape_that_matters,
)
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

CHECK_DRAWS = 2000
MIN_INSIDE = 100
"""Draws of the flow from which a mean square is taken; in many dimensions the narrowest cuts hold none."""
MAX_OUTSIDE = 0.01
TEMPERATURES = (0.5, 0.65, 0.8, 0.95)
SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)


@estimator()
def learned_harmonic_mean(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, temperature: float | None = None, seed: int = 0
) -> Evidence:
    """Average, over posterior draws, a narrowed normalizing flow divided by likelihood and prior.

    The flow is fitted to the first half of each chain, the variance of its noise multiplied by a temperature and the
    noise cut off at a distance, so that it lies inside the posterior and the ratios stay bounded; their mean over the
    second half estimates the reciprocal of the evidence. Draws from the flow say for which temperature and cut the
    ratios vary least, and whether the narrowed flow does lie inside: none of it should have a larger ratio than the
    posterior draws have.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    flow : FittedFlow, optional
        What :func:`fit_flow` made of ``draws``; made here by default.
    temperature : float, optional
        Above zero, at most one; the noise is then not cut off.
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
    if temperature is not None:
        temperature = real_number("temperature", temperature)
        if not 0 < temperature <= 1:
            raise SettingsError(f"temperature must lie above 0 and be at most 1, not {temperature}")
    draws = finite_chains(draws)
    _, second = halves(draws, target.dim)
    flow = fit_flow(target, draws, seed=seed) if flow is None else check_flow(flow, target)
    log_density = (draws.log_prior + draws.log_likelihood)[:, -second.shape[1] :]
    check, nan_problems = _Check.of(flow, target, seed)
    narrow = check.least_variable() if temperature is None else _Narrow(temperature, 1.0)
    log_ratios = narrow.log_prob(*flow.to_noise(second)) - log_density.to(torch.float64)
    relative = (log_ratios - log_mean_exp(log_ratios)).exp()
    independent = min(1.0, float(effective_sample_size(relative)) / relative.numel())
    effective = float(weight_effective_sample_size(log_ratios.flatten())) * independent

    problems, diagnostics = posterior_problems(draws)
    problems += nan_problems
    shape = shape_that_matters(log_ratios, check.log_ratios(narrow))
    problems += weight_problems(shape, effective)
    outside = check.share_above(narrow, float(log_ratios.max()))
    if not outside <= MAX_OUTSIDE:  # nan where no draw was inside
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
        | {"pareto_shape": shape, "effective_ratios": effective, "outside": outside, "flow_gain": flow.gain}
        | {"temperature": narrow.temperature, "share": narrow.share},
    )
    return with_missed_peak(z, target, draws)


class _Narrow(NamedTuple):
    """Normal noise of variance ``temperature``, of which only the inner ``share`` is left."""

    temperature: float
    share: float

    def radius(self, dim: int) -> float:
        return math.sqrt(self.temperature * float(chi2.ppf(self.share, dim)))

    def log_prob(self, noise: Tensor, log_volume: Tensor) -> Tensor:
        density = log_volume + normal_density(noise, self.temperature) - math.log(self.share)
        return torch.where(noise.norm(dim=-1) <= self.radius(noise.shape[-1]), density, -torch.inf)


class _Check(NamedTuple):
    """Draws from the flow, which find large ratios far sooner than the posterior draws do."""

    noise: Tensor
    log_volume: Tensor
    log_density: Tensor

    @classmethod
    def of(cls, flow: FittedFlow, target: Target, seed: int) -> tuple[_Check, list[str]]:
        x = flow.sample(CHECK_DRAWS, new_generator(seed, stream="learned harmonic mean"))
        log_density, problems = without_nan(target.log_density(x))
        return cls(*flow.to_noise(x), log_density.to(torch.float64)), problems

    def log_ratios(self, narrow: _Narrow) -> Tensor:
        own = narrow.log_prob(self.noise, self.log_volume)
        # Beyond the cut the ratio is zero even where the posterior has no mass.
        return torch.where(own > -torch.inf, own - self.log_density, own)

    def log_shares(self, narrow: _Narrow) -> Tensor:
        """Log density of the narrowed flow against the one drawn from, in the mean one."""
        return narrow.log_prob(self.noise, self.log_volume) - normal_density(self.noise) - self.log_volume

    def least_variable(self) -> _Narrow:
        """Return the temperature and cut for which the mean square of the posterior draws' ratios is smallest.

        It is, up to the evidence, the mean ratio of draws from the narrowed flow.
        """

        def mean_square(narrow: _Narrow) -> float:
            return float((self.log_shares(narrow) + self.log_ratios(narrow)).logsumexp(0))

        norms = self.noise.norm(dim=-1)
        candidates = [_Narrow(t, s) for t in TEMPERATURES for s in SHARES]
        known = [n for n in candidates if int((norms <= n.radius(self.noise.shape[-1])).sum()) >= MIN_INSIDE]
        return min(known or candidates[-1:], key=mean_square)

    def share_above(self, narrow: _Narrow, largest: float) -> float:
        """Share of the narrowed flow in which the ratio is above ``largest``."""
        shares = self.log_shares(narrow).exp()
        return float(shares[self.log_ratios(narrow) > largest].sum() / shares.sum())
