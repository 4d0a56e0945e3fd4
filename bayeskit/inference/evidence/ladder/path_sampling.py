"""Path sampling: the mean log likelihood integrated over the temperature ladder."""

from __future__ import annotations

from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.ladder._integration import MAX_GAP, curve
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target


@estimator()
def path_sampling(target: Target, ladder: Ladder) -> Evidence:
    """Integrate the expected log likelihood over the inverse temperature by the trapezoidal rule.

    The rule's bias, always downwards where the variance of the log likelihood falls along the
    path, does not shrink with more draws; where it exceeds half of the Monte Carlo error the
    estimate is not trusted. :func:`modified_path_sampling` removes most of it from the same ladder.
    The first interval, up from the prior, is bridged by its importance ratio: there the log
    likelihood of a vague prior has a huge mean or none, and on a ladder that crowds towards the
    prior the interval is too narrow for the difference to matter otherwise.

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
    Gelman, A., Meng, X.-L. (1998). Simulating normalizing constants. Statistical
    Science 13, 163-185.
    Lartillot, N., Philippe, H. (2006). Computing Bayes factors using thermodynamic
    integration. Systematic Biology 55, 195-207.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import path_sampling
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = path_sampling(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error or not z.trusted
    True
    """
    path = curve(target, ladder)
    error = path.error(ladder, corrected=False)
    gap = float(path.corrections.sum())
    problems = path.problems
    if path.has_enough_intervals and not abs(gap) + path.coarse_gap() <= MAX_GAP * error:
        problems += (
            f"the trapezoidal rule is off by about {gap:+.3f}, which the standard error {error:.3f} does not contain: "
            "use modified_path_sampling or more temperatures",
        )
    diagnostics = path.diagnostics | {"trapezoid_gap": gap, "monte_carlo_error": error}
    z = Evidence("path_sampling", path.trapezoid, error, ladder.num_evaluations, problems, diagnostics)
    return with_missed_peak(z, target, ladder.draws, known_bias=gap)
