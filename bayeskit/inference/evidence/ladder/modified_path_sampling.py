"""Modified path sampling: the trapezoidal rule, corrected by the variances at the temperatures."""

from __future__ import annotations

from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.ladder._integration import curve
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target


@estimator()
def modified_path_sampling(target: Target, ladder: Ladder) -> Evidence:
    """Integrate the expected log likelihood over the inverse temperature, variances correcting the rule.

    The integrand's derivative is the variance of the log likelihood, so the trapezoidal rule can be
    corrected for its leading error: an interval of width ``h`` over which the variance changes by
    ``v`` loses ``h ** 2 * v / 12``. The first interval, up from the prior, is bridged by its
    importance ratio, which needs no moments.

    Parameters
    ----------
    target : Target
    ladder : Ladder
        Draws at every temperature.

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``ladder`` is none.
    DrawsError
        If it comes from another target.

    References
    ----------
    Friel, N., Hurn, M., Wyse, J. (2014). Improving power posterior estimation of
    statistical evidence. Statistics and Computing 24, 709-723.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import modified_path_sampling
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = modified_path_sampling(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    path = curve(target, ladder)
    error = path.error(ladder, corrected=True)
    correction, left = float(path.corrections.sum()), path.coarse_gap()
    problems = path.problems
    if path.has_enough_intervals and not left <= error:
        problems += (f"the ladder is too coarse (gap {left:.3f} after correction): use more temperatures",)
    diagnostics = path.diagnostics | {"trapezoid_gap": correction, "remaining_gap": left, "monte_carlo_error": error}
    value = path.trapezoid + correction
    z = Evidence("modified_path_sampling", value, error, ladder.num_evaluations, problems, diagnostics)
    return with_missed_peak(z, target, ladder.draws)
