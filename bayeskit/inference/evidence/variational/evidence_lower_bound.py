"""The evidence lower bound of a mean field."""

from __future__ import annotations

import math

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.inference.evidence.checks import with_rounding
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.variational.fresh_draws import fresh_weights
from bayeskit.inference.evidence.variational.mean_field import MeanField, fit_mean_field
from bayeskit.target import Target


@estimator()
def evidence_lower_bound(
    target: Target, *, mean_field: MeanField | None = None, num_draws: int = 10_000, seed: int = 0
) -> Evidence:
    """Bound the log evidence from below with independent normal distributions.

    The gap is the divergence of the fit from the posterior. Nothing in the bound says
    how large that is, so it has no standard error as an estimate and is never trusted;
    how well the bound itself is known stands in the diagnostics as ``bound_error``.

    Parameters
    ----------
    target : Target
    mean_field : MeanField, optional
        Of this target; fitted if not given.
    num_draws : int, default 10,000
        Fresh draws, other than those of the fit.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If there are fewer than two draws, or the mean field is of another target.

    References
    ----------
    Jordan, M. I., Ghahramani, Z., Jaakkola, T. S., Saul, L. K. (1999). An introduction
    to variational methods for graphical models. Machine Learning 37, 183-233.
    Kucukelbir, A., Tran, D., Ranganath, R., Gelman, A., Blei, D. M. (2017). Automatic
    differentiation variational inference. Journal of Machine Learning Research 18(14).

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.variational import evidence_lower_bound
    >>> case = bk.exact.get("linreg10")
    >>> z = evidence_lower_bound(case.target())
    >>> z.log_evidence < case.log_evidence, z.diagnostics["bound_error"] < 0.02, z.trusted
    (True, True, False)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    q = mean_field or fit_mean_field(target, seed=seed)
    checked = q.require(target)
    weights = fresh_weights(target, q, num_draws, new_generator(seed, stream="evidence lower bound"))
    bound = float(weights.log_weights.mean())
    problems = [
        "a lower bound, below the log evidence by an unknown divergence: use variational_importance_sampling",
        *q.problems,
        *weights.problems,
    ]
    if bound == -math.inf:
        share = 100 * float((weights.log_weights == -math.inf).double().mean())
        problems.append(f"the density is zero at {share:.2g} % of the draws: use bridge sampling")
    error = float(weights.log_weights.std()) / math.sqrt(num_draws)
    return Evidence(
        "evidence_lower_bound",
        bound,
        math.nan,
        num_draws + q.num_evaluations + checked,
        tuple(problems),
        {
            "bound_error": with_rounding(error, weights.log_density),
            "fitted_bound": q.bound,
            "improvement": q.improvement,
            "gradient": q.gradient,
        },
    )
