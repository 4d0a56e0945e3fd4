"""Conditional predictive ordinates: each observation given all others, from one set of posterior draws."""

from __future__ import annotations

from bayeskit.draws import Draws
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.predictive.pointwise_scores import pointwise_score
from bayeskit.inference.evidence.predictive.result import PredictiveScore
from bayeskit.target import Target


@estimator(proper=False)
def conditional_predictive_ordinates(target: Target, draws: Draws, *, seed: int = 0) -> PredictiveScore:
    """Add up the log densities of each observation given all others, the log pseudo-marginal likelihood.

    The conditional predictive ordinate of an observation is the harmonic mean of its likelihood over draws from the
    posterior of all data. The sum of their logarithms is a leave-one-out score, not the log evidence: no observation
    is predicted from fewer than all others. :func:`bayeskit.inference.generalized.cross_validation_evidence` gives
    the scores of larger sets, which do add up to the log evidence.

    Parameters
    ----------
    target : Target
        Whose likelihood is a sum over observations: from a Pyro model with observed sites, or from a
        :class:`~bayeskit.models.phylogenetics.TreeModel`, whose observations are the sites of the alignment.
    draws : Draws
        From the posterior of ``target``.
    seed : int, default 0
        Not used: nothing is drawn.

    Returns
    -------
    PredictiveScore
        Its error is that of the sum, in which the terms of all observations rest on the same draws. Pareto ``k`` of
        each observation's weights tells whether its harmonic mean can be relied on, and that of each draw's sum over
        observations whether the error can: it must lie below one half by the error of its fit.

    Raises
    ------
    DrawsError
        If the draws come from another target.
    ModelError
        If single observations have no likelihood, or the target's loss is no log density of them.

    References
    ----------
    Geisser, S., Eddy, W. F. (1979). A predictive approach to model selection. Journal of the American Statistical
    Association 74, 153-160.
    Gelfand, A. E., Dey, D. K. (1994). Bayesian model choice: asymptotics and exact calculations. Journal of the Royal
    Statistical Society B 56, 501-514.

    Examples
    --------
    Of ten successes each is predicted with the density that nine others give it, 10/11:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence.predictive import conditional_predictive_ordinates
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.ones(10, dtype=torch.float64))
    >>> draws = bk.sample(target, num_warmup=200, num_samples=500, progress=False)
    >>> score = conditional_predictive_ordinates(target, draws)
    >>> abs(score.predictive_score - 10 * math.log(10 / 11)) < 4 * score.standard_error
    True
    """
    return pointwise_score("conditional_predictive_ordinates", target, draws, -1.0)
