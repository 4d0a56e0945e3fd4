"""Binomial data with a conjugate beta prior."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from scipy.special import betaln, gammaln
from torch import Tensor

from bayeskit.errors import DataError
from bayeskit.exact._case import Conditionals, ExactCase, positive_scalar


def beta_binomial_model(successes: Tensor, trials: Tensor, alpha: Tensor, beta: Tensor) -> None:
    """Pyro model: ``p ~ Beta(alpha, beta)``, ``successes ~ Binomial(trials, p)``.

    Parameters
    ----------
    successes, trials : Tensor, shape ()
        Data.
    alpha, beta : Tensor, shape ()
        Parameters of the prior, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact import beta_binomial
    >>> case = beta_binomial()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> sorted(trace.stochastic_nodes), sorted(trace.observation_nodes)
    (['p'], ['successes'])
    """
    p = pyro.sample("p", dist.Beta(alpha, beta))
    pyro.sample("successes", dist.Binomial(total_count=trials, probs=p), obs=successes)


def _full_conditionals(successes: Tensor, trials: Tensor, alpha: Tensor, beta: Tensor) -> Conditionals:
    return {("p",): lambda others: dist.Beta(alpha + successes, beta + trials - successes)}


def beta_binomial(successes: int = 2, trials: int = 10, *, alpha: float = 1.0, beta: float = 1.0) -> ExactCase:
    r"""Build the beta-binomial case.

    The evidence is :math:`\binom{n}{k} B(\alpha + k, \beta + n - k) / B(\alpha, \beta)`. Under the uniform prior
    it is :math:`1 / (n + 1)` for all ``k``.

    Parameters
    ----------
    successes : int
        Number of successes ``k``, from 0 to ``trials``.
    trials : int
        Number of trials ``n``, at least 1.
    alpha, beta : float
        Parameters of the beta prior, positive.

    Returns
    -------
    ExactCase
        Latent site ``"p"`` of shape ``()`` on the unit interval, with posterior
        ``Beta(alpha + k, beta + n - k)``.

    Raises
    ------
    DataError
        If the counts are not whole numbers with ``0 <= successes <= trials``.
    SettingsError
        If a prior parameter is not finite and positive.

    References
    ----------
    Gelman, Carlin, Stern, Dunson, Vehtari and Rubin (2013), Bayesian Data Analysis, 3rd edition,
    section 2.4.

    Examples
    --------
    >>> import math
    >>> from bayeskit.exact import beta_binomial
    >>> math.isclose(beta_binomial().log_evidence, -math.log(11))
    True
    """
    if int(successes) != successes or int(trials) != trials or not 0 <= successes <= trials or trials < 1:
        raise DataError(
            f"successes is {successes} and trials is {trials}; pass whole numbers with "
            "0 <= successes <= trials and trials >= 1."
        )
    alpha_tensor, beta_tensor = positive_scalar("alpha", alpha), positive_scalar("beta", beta)
    failures = trials - successes
    log_coefficient = gammaln(trials + 1.0) - gammaln(successes + 1.0) - gammaln(failures + 1.0)
    log_evidence = log_coefficient + betaln(alpha + successes, beta + failures) - betaln(alpha, beta)

    posterior_alpha, total = alpha + successes, alpha + beta + trials
    mean = posterior_alpha / total
    variance = mean * (1.0 - mean) / (total + 1.0)
    return ExactCase(
        name="beta_binomial",
        description=f"{successes} successes in {trials} trials, Beta({alpha:g}, {beta:g}) prior",
        model=beta_binomial_model,
        args=(
            torch.tensor(float(successes), dtype=torch.float64),
            torch.tensor(float(trials), dtype=torch.float64),
            alpha_tensor,
            beta_tensor,
        ),
        log_evidence=float(log_evidence),
        posterior_mean={"p": torch.tensor(mean, dtype=torch.float64)},
        posterior_covariance={"p": torch.tensor([[variance]], dtype=torch.float64)},
        reference="closed form: beta prior conjugate to the binomial (Gelman et al. 2013, section 2.4)",
        full_conditionals=_full_conditionals,
    )
