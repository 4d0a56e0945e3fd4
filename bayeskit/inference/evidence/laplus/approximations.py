"""Laplus approximations of the evidence: the height of the density over that of what stands for it, at the mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.laplus.families import Fit, beta_prime_family, gamma_family, lognormal_family
from bayeskit.inference.evidence.laplus.positive import PositiveDensity, PositiveMode
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

_UNKNOWN = "an approximation whose error is not known: use gamma_laplus_importance_sampling, which measures it"


@estimator()
def gamma_laplus(target: Target, *, mode: PositiveMode | None = None, seed: int = 0) -> Evidence:
    r"""Approximate the posterior of positive coordinates by independent gamma distributions at its mode.

    :math:`\log Z = f(m) - \sum_i \log q_i(m_i)` with the log of prior times likelihood `f` as a density of the positive
    coordinates, its mode `m`, and gamma distributions with the same modes and second derivatives. Where a mode is at
    zero or not concave, the rate is the slope there and the shape one; where the density has a pole at zero, the shape,
    from .001 to 1, is that of the pole, and the rate that of the density of the coordinate's logarithm at its mode.

    Parameters
    ----------
    target : Target
        All of its sites are positive.
    mode : PositiveMode, optional
        That of the target, if it is known already.
    seed : int, default 0
        Of the points where searches for the mode start.

    Returns
    -------
    Evidence
        Without a standard error, and so never trusted.

    Raises
    ------
    SettingsError
        If a site is not positive, naming it, or the mode is of another target or no :class:`PositiveMode`.
    ShapeError
        If the mode is of another dimension.

    References
    ----------
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    Exact where the posterior is such a product:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence import gamma_laplus
    >>> def model(count):
    ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     pyro.sample("count", dist.Poisson(rate), obs=count)
    >>> target = bk.Target.from_pyro(model, torch.tensor(3.0, dtype=torch.float64))
    >>> z = gamma_laplus(target)
    >>> abs(z.log_evidence - math.log(math.comb(4, 3) * 0.5**5)) < 1e-6, z.trusted  # negative binomial
    (True, False)
    """
    return _approximated("gamma_laplus", target, gamma_family, mode, seed)


@estimator()
def beta_prime_laplus(target: Target, *, mode: PositiveMode | None = None, seed: int = 0) -> Evidence:
    """Approximate the posterior of positive coordinates by independent beta prime distributions at its mode.

    Parameters
    ----------
    target, mode, seed
        As of :func:`gamma_laplus`.

    Returns
    -------
    Evidence
        Without a standard error; NaN where tails would be too heavy for any such distribution.

    Raises
    ------
    SettingsError
        If a site is not positive, naming it.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence import beta_prime_laplus
    >>> def model(rate):
    ...     x = pyro.sample("x", dist.Exponential(rate))
    ...     pyro.factor("likelihood", x + 2 * x.log() - 7 * x.log1p())
    >>> z = beta_prime_laplus(bk.Target.from_pyro(model, torch.ones(()).double()))
    >>> abs(z.log_evidence - torch.tensor(1 / 60).log()) < 1e-6  # the beta function at 3 and 4
    tensor(True)
    """
    return _approximated("beta_prime_laplus", target, beta_prime_family, mode, seed)


@estimator()
def lognormal_laplus(target: Target, *, mode: PositiveMode | None = None, seed: int = 0) -> Evidence:
    """Approximate the posterior of positive coordinates by independent lognormal distributions at its mode.

    Parameters
    ----------
    target, mode, seed
        As of :func:`gamma_laplus`. Where a mode is at zero, the lognormal distribution has mean and variance of the
        exponential one with the same slope.

    Returns
    -------
    Evidence
        Without a standard error.

    Raises
    ------
    SettingsError
        If a site is not positive, naming it.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence import lognormal_laplus
    >>> def model(y):
    ...     x = pyro.sample("x", dist.LogNormal(torch.zeros(()).double(), 1.0))
    ...     pyro.sample("y", dist.Normal(x.log(), 1.0), obs=y)
    >>> z = lognormal_laplus(bk.Target.from_pyro(model, torch.tensor(0.5).double()))
    >>> abs(z.log_evidence - dist.Normal(0.0, 2**0.5).log_prob(torch.tensor(0.5))) < 1e-6
    tensor(True)
    """
    return _approximated("lognormal_laplus", target, lognormal_family, mode, seed)


def _approximated(
    name: str,
    target: Target,
    family: Callable[[PositiveDensity, PositiveMode], Fit[Any]],
    mode: PositiveMode | None,
    seed: int,
) -> Evidence:
    density = PositiveDensity(target)
    mode, looked = density.own(mode, seed=seed)
    fit, value, count = family(density, mode), mode.value, mode.num_evaluations + looked
    if not bool((fit.point == mode.position).all()):
        value, count = float(density.log_density(fit.point.to(target.dtype).unsqueeze(0))), count + 1
    log_evidence = value - float(fit.distribution.log_prob(fit.point).sum())
    problems = (_UNKNOWN, *mode.problems, *fit.problems)
    if not math.isfinite(log_evidence):
        log_evidence = math.nan
        if not fit.problems:
            problems += ("no such distribution has the mode and curvature of the posterior",)
    return Evidence(name, log_evidence, math.nan, count + fit.num_evaluations, problems)
