"""Radiata pine: two non-nested linear regressions of strength with a normal-gamma prior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.exact._case import Conditionals, ExactCase, finite_tensor, positive_scalar, read_table

_MODEL_NUMBERS = {"x": 1, "z": 2}


def radiata_pine_model(
    covariate: Tensor,
    response: Tensor,
    prior_mean: Tensor,
    prior_precision: Tensor,
    shape: Tensor,
    rate: Tensor,
) -> None:
    """Pyro model: regression on a centred covariate with a normal-gamma prior.

    ``tau ~ Gamma(shape, rate)``; given ``tau``, ``alpha`` and ``beta`` are independent normal with means
    ``prior_mean`` and precisions ``tau * prior_precision``;
    ``y ~ N(alpha + beta * (covariate - mean), 1 / tau)``.

    Parameters
    ----------
    covariate, response : Tensor, shape (n,)
        Data; the model centres the covariate.
    prior_mean, prior_precision : Tensor, shape (2,)
        Prior means of ``alpha`` and ``beta``, and their precisions relative to ``tau``, positive.
    shape, rate : Tensor, shape ()
        Parameters of the gamma prior of ``tau``, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact import radiata_pine
    >>> case = radiata_pine("x")
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> sorted(trace.stochastic_nodes)
    ['alpha', 'beta', 'observations', 'tau']
    """
    tau = pyro.sample("tau", dist.Gamma(shape, rate))
    scale = (prior_precision * tau).rsqrt()
    alpha = pyro.sample("alpha", dist.Normal(prior_mean[0], scale[0]))
    beta = pyro.sample("beta", dist.Normal(prior_mean[1], scale[1]))
    centred = covariate - covariate.mean()
    with pyro.plate("observations", response.shape[0]):
        pyro.sample("y", dist.Normal(alpha + beta * centred, tau.rsqrt()), obs=response)


def _full_conditionals(
    covariate: Tensor, response: Tensor, prior_mean: Tensor, prior_precision: Tensor, shape: Tensor, rate: Tensor
) -> Conditionals:
    design = torch.stack([torch.ones_like(covariate), covariate - covariate.mean()], 1)
    precision = torch.diag(prior_precision) + design.mT @ design
    mean = torch.linalg.solve(precision, prior_precision * prior_mean + design.mT @ response)

    def line(others: dict[str, Tensor]) -> dist.MultivariateNormal:
        return dist.MultivariateNormal(mean, precision_matrix=others["tau"][..., None, None] * precision)

    def noise(others: dict[str, Tensor]) -> dist.Gamma:
        b = torch.stack([others["alpha"], others["beta"]], -1)
        misfit = (response - b @ design.mT).square().sum(-1) + (prior_precision * (b - prior_mean).square()).sum(-1)
        # The prior precision of the two coefficients is proportional to tau, which adds 1 to its shape.
        return dist.Gamma(shape + 0.5 * len(response) + 1, rate + 0.5 * misfit)

    return {("alpha", "beta"): line, ("tau",): noise}


def radiata_pine(
    covariate: Literal["x", "z"] = "x",
    *,
    prior_mean: Sequence[float] = (3000.0, 185.0),
    prior_precision: Sequence[float] = (0.06, 6.0),
    shape: float = 3.0,
    rate: float = 2.0 * 300.0**2,
) -> ExactCase:
    r"""Build a radiata pine case: model 1 regresses on density, model 2 on resin-adjusted density.

    Let :math:`D = [1, x - \bar x]` be the design matrix, :math:`\Lambda_n = \Lambda_0 + D^\top D` and
    :math:`m_n = \Lambda_n^{-1} (\Lambda_0 m_0 + D^\top y)`. The posterior is normal-gamma with
    :math:`a_n = a + n/2`,
    :math:`b_n = b + \tfrac12 \{ \|y - D m_n\|^2 + (m_n - m_0)^\top \Lambda_0 (m_n - m_0) \}`, and

    .. math:: p(y) = (2\pi)^{-n/2} \sqrt{|\Lambda_0| / |\Lambda_n|} \;
              \frac{b^a}{b_n^{a_n}} \frac{\Gamma(a_n)}{\Gamma(a)}.

    Parameters
    ----------
    covariate : {"x", "z"}
        ``"x"``: density (model 1). ``"z"``: density adjusted for resin content (model 2).
    prior_mean : sequence of 2 floats
        Prior means of ``alpha`` and ``beta``.
    prior_precision : sequence of 2 floats
        Prior precisions of ``alpha`` and ``beta`` relative to ``tau``, positive.
    shape, rate : float
        Parameters of the gamma prior of ``tau``, positive.

    Returns
    -------
    ExactCase
        Latent sites ``"tau"``, ``"alpha"`` and ``"beta"`` of shape ``()``. The posterior of ``tau`` is
        ``Gamma(a_n, b_n)``; the posterior of ``(alpha, beta)`` is multivariate t with ``2 a_n`` degrees of freedom.

    Raises
    ------
    SettingsError
        If ``covariate`` is neither ``"x"`` nor ``"z"``, or a prior parameter is outside its domain.
    DataError
        If a prior mean or precision is not finite.
    ShapeError
        If the prior means or precisions are not one-dimensional.

    References
    ----------
    Williams (1959), Regression Analysis, Wiley (the data).
    Carlin and Chib (1995), Bayesian model choice via Markov chain Monte Carlo methods, JRSS B 57.
    Friel and Wyse (2012), Estimating the evidence: a review, Statistica Neerlandica 66 (this prior).

    Examples
    --------
    >>> from bayeskit.exact import radiata_pine
    >>> round(radiata_pine("x").log_evidence, 5), round(radiata_pine("z").log_evidence, 5)
    (-310.12829, -301.7046)
    """
    if covariate not in _MODEL_NUMBERS:
        raise SettingsError(f"covariate is {covariate!r}; pass 'x' (density) or 'z' (resin-adjusted density).")
    mean_0 = finite_tensor("prior_mean", prior_mean, 1)
    precision_0 = finite_tensor("prior_precision", prior_precision, 1)
    if mean_0.numel() != 2 or precision_0.numel() != 2 or not bool((precision_0 > 0).all()):
        raise SettingsError(
            f"prior_mean is {tuple(prior_mean)} and prior_precision is {tuple(prior_precision)}; "
            "pass two numbers each (alpha, beta), the precisions above zero."
        )
    shape_tensor, rate_tensor = positive_scalar("shape", shape), positive_scalar("rate", rate)
    table = read_table("radiata_pine.csv")
    x, y = table[covariate], table["y"]
    num_observations = y.numel()

    design = torch.stack([torch.ones_like(x), x - x.mean()], dim=1)
    precision_n = torch.diag(precision_0) + design.mT @ design
    mean_n = torch.linalg.solve(precision_n, precision_0 * mean_0 + design.mT @ y)
    # Use sums of squares around the posterior mean; raw second moments of 10^8 would cause cancellation.
    misfit = (y - design @ mean_n).square().sum() + (precision_0 * (mean_n - mean_0).square()).sum()
    shape_n = shape + 0.5 * num_observations
    rate_n = rate + 0.5 * misfit.item()
    log_evidence = (
        -0.5 * num_observations * math.log(2.0 * math.pi)
        + 0.5 * (precision_0.log().sum() - torch.logdet(precision_n)).item()
        + shape * math.log(rate)
        - shape_n * math.log(rate_n)
        + math.lgamma(shape_n)
        - math.lgamma(shape)
    )
    # Finite since shape_n > n / 2 > 1.
    covariance = rate_n / (shape_n - 1.0) * torch.linalg.inv(precision_n)
    number = _MODEL_NUMBERS[covariate]
    return ExactCase(
        name=f"radiata_pine_m{number}",
        description=f"radiata pine strength on covariate {covariate} (model {number}), normal-gamma prior",
        model=radiata_pine_model,
        args=(x, y, mean_0, precision_0, shape_tensor, rate_tensor),
        log_evidence=log_evidence,
        posterior_mean={
            "tau": torch.tensor(shape_n / rate_n, dtype=torch.float64),
            "alpha": mean_n[0],
            "beta": mean_n[1],
        },
        posterior_covariance={
            "tau": torch.tensor([[shape_n / rate_n**2]], dtype=torch.float64),
            "alpha": covariance[:1, :1],
            "beta": covariance[1:, 1:],
        },
        reference="closed form: normal-gamma prior conjugate to the normal likelihood (Friel and Wyse 2012)",
        full_conditionals=_full_conditionals,
    )
