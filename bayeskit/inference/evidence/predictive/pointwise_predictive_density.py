"""Pointwise predictive density: each observation given all of them, itself included."""

from __future__ import annotations

from bayeskit.draws import Draws
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.predictive.pointwise_scores import pointwise_score
from bayeskit.inference.evidence.predictive.result import PredictiveScore
from bayeskit.target import Target


@estimator(proper=False)
def pointwise_predictive_density(target: Target, draws: Draws, *, seed: int = 0) -> PredictiveScore:
    """Add up the log posterior means of each observation's likelihood.

    Each observation helps to predict itself, so that the score is larger than the leave-one-out score of
    :func:`conditional_predictive_ordinates`, by about the effective number of parameters. It is no estimate of the
    log evidence.

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
        Its error is that of the sum, in which the terms of all observations rest on the same draws.

    Raises
    ------
    DrawsError
        If the draws come from another target.
    ModelError
        If single observations have no likelihood, or the target's loss is no log density of them.

    References
    ----------
    Gelman, A., Hwang, J., Vehtari, A. (2014). Understanding predictive information criteria for Bayesian models.
    Statistics and Computing 24, 997-1016.
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    Ten successes, each predicted from all ten with probability 11/12:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence.predictive import pointwise_predictive_density
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.ones(10, dtype=torch.float64))
    >>> draws = bk.sample(target, num_warmup=200, num_samples=500, progress=False)
    >>> score = pointwise_predictive_density(target, draws)
    >>> abs(score.predictive_score - 10 * math.log(11 / 12)) < 4 * score.standard_error
    True
    """
    return pointwise_score("pointwise_predictive_density", target, draws, 1.0)
