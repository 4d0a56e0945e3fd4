"""Coarsened posteriors: power posteriors that are robust to small departures from the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.extend import BLUE, VERMILION, real_number, sample_ladder, short_repr, whole_number
from bayeskit.inference.generalized._posterior import GibbsPosterior
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses._loss import as_data, num_data

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Complexity = Callable[[dict[str, Tensor]], Tensor]
"""``{site: (chains, draws, *shape)} -> (chains, draws)``."""


def coarsening_weight(alpha: float, num_data: int) -> float:
    r"""Return the power :math:`\zeta_n = \alpha / (\alpha + n)` of the likelihood.

    Parameters
    ----------
    alpha : float
        Upper bound on the effective sample size :math:`n \zeta_n`, positive; infinity gives the ordinary posterior. Its
        inverse is the mean relative entropy between the observed data and idealised data from the model.
    num_data : int
        Number of data ``n``, at least one.

    Raises
    ------
    SettingsError
        If ``alpha`` or ``num_data`` is not positive.

    Examples
    --------
    >>> coarsening_weight(100.0, 300)
    0.25
    """
    n = whole_number("num_data", num_data, least=1)
    alpha = real_number("alpha", alpha, "(0, inf]")
    return 1.0 if math.isinf(alpha) else alpha / (alpha + n)


def coarsened_posterior(
    prior: Any, distribution: Callable[..., Any], data: Any, alpha: float, *, name: str = "theta"
) -> GibbsPosterior:
    r"""Return the coarsened posterior of a model, :math:`\propto \pi(\theta) \prod_i p(x_i \mid \theta)^{\zeta_n}`.

    It approximates the posterior given that the relative entropy between the observed data and idealised data from the
    model is below an exponential random variable with mean ``1 / alpha``. For another loss use
    ``posterior.with_weight(coarsening_weight(alpha, n))``.

    Parameters
    ----------
    prior, data, name
        As for :class:`~bayeskit.inference.generalized.GibbsPosterior`.
    distribution : callable
        Model, as for :class:`~bayeskit.inference.generalized.losses.NegativeLogLikelihood`.
    alpha : float
        As for :func:`coarsening_weight`; :func:`calibration_curve` helps to choose it.

    Raises
    ------
    SettingsError
        If ``alpha`` is not positive.

    References
    ----------
    Miller, J. W., Dunson, D. B. (2019). Robust Bayesian inference via coarsening. JASA 114, 1113-1125.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> x = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    >>> posterior = coarsened_posterior(dist.Beta(1.0, 1.0), dist.Bernoulli, x, alpha=12.0)
    >>> posterior.weight
    0.75
    """
    given = as_data(data)
    loss = NegativeLogLikelihood(distribution)
    return GibbsPosterior(prior, loss, given, coarsening_weight(alpha, num_data(given)), name=name)


@dataclass(frozen=True)
class CalibrationCurve:
    """Fit and complexity of a coarsened posterior as functions of ``alpha``.

    Attributes
    ----------
    alpha : Tensor
        Increasing, ``(A,)``.
    weight : Tensor
        Power of the likelihood, ``(A,)``.
    log_likelihood, log_likelihood_error : Tensor
        Posterior expectation of the log likelihood (to the power one) and its standard error, ``(A,)``.
    complexity, complexity_error : Tensor
        Posterior expectation of the complexity and its standard error, ``(A,)``.

    Examples
    --------
    >>> alpha = torch.tensor([1.0, 10.0, 100.0])
    >>> fit, complexity, error = torch.tensor([0.0, 9.0, 10.0]), torch.tensor([1.0, 2.0, 9.0]), torch.zeros(3)
    >>> CalibrationCurve(alpha, alpha / (alpha + 50), fit, error, complexity, error).elbow
    10.0
    """

    alpha: Tensor
    weight: Tensor
    log_likelihood: Tensor
    log_likelihood_error: Tensor
    complexity: Tensor
    complexity_error: Tensor

    __repr__ = short_repr

    @property
    def elbow(self) -> float:
        """Value of ``alpha`` at the knee of the curve, beyond which the fit improves little.

        It maximises the distance of the curve above the line between its ends, with both axes scaled to unit length.
        Check the plot.
        """
        fit, complexity = (_unit(x) for x in (self.log_likelihood, self.complexity))
        return float(self.alpha[(fit - complexity).argmax()])

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for each ``alpha``."""
        names = ("weight", "log_likelihood", "log_likelihood_error", "complexity", "complexity_error")
        columns = {name: getattr(self, name).cpu().numpy() for name in names}
        return pd.DataFrame(columns, index=pd.Index(self.alpha.cpu().numpy(), name="alpha"))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot fit against complexity, with the elbow."""
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(5, 4), layout="constrained").add_subplot()
        x, y = (t.cpu().numpy() for t in (self.complexity, self.log_likelihood))
        errors = (2 * t.cpu().numpy() for t in (self.complexity_error, self.log_likelihood_error))
        ax.errorbar(x, y, *reversed(list(errors)), color=BLUE, marker="o", markersize=4, linewidth=1)
        chosen = int((self.alpha == self.elbow).nonzero()[0])
        ax.plot(x[chosen], y[chosen], "o", color=VERMILION, markersize=9, fillstyle="none")
        ax.annotate(f"alpha = {self.elbow:.3g}", (x[chosen], y[chosen]), xytext=(8, -12), textcoords="offset points")
        ax.set(xlabel="complexity", ylabel="expected log likelihood")
        return ax


def calibration_curve(
    posterior: GibbsPosterior,
    alpha: Sequence[float] | Tensor,
    complexity: Complexity | None = None,
    *,
    num_chains: int = 16,
    num_warmup: int = 300,
    num_draws: int = 500,
    seed: int = 0,
    progress: bool = True,
) -> CalibrationCurve:
    r"""Compute fit and complexity of coarsened posteriors for all values of ``alpha`` in one tempered run.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with a proper prior and minus the log likelihood as loss; its weight has no effect.
    alpha : sequence of float
        At least three values, positive and finite.
    complexity : callable, optional
        Complexity of each draw, ``{site: (chains, draws, *shape)} -> (chains, draws)``, such as the number of occupied
        clusters. By default the effective number of parameters: the posterior variance of the log likelihood of each
        datum, summed over data.
    num_chains : int, default 16
        Chains at each ``alpha``, at least two; standard errors come from the variation between chains.

    Raises
    ------
    SettingsError
        If fewer than three values of ``alpha`` are given, one is not positive and finite, or there are fewer than two
        chains.
    ShapeError
        If ``complexity`` returns the wrong shape.

    References
    ----------
    Miller, J. W., Dunson, D. B. (2019). Robust Bayesian inference via coarsening. JASA 114, 1113-1125, section 4.
    Satopaa, V., Albrecht, J., Irwin, D., Raghavan, B. (2011). Finding a "kneedle" in a haystack: detecting knee points
    in system behavior. ICDCS workshops (the elbow).

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> x = torch.tensor([1.0] * 14 + [0.0] * 6, dtype=torch.float64)
    >>> posterior = coarsened_posterior(dist.Beta(1.0, 1.0), dist.Bernoulli, x, alpha=10.0)
    >>> curve = calibration_curve(posterior, [1.0, 10.0, 100.0], num_warmup=100, num_draws=100)
    >>> curve.log_likelihood.diff().sign()
    tensor([1., 1.], dtype=torch.float64)
    """
    chains = whole_number("num_chains", num_chains, least=2)
    if isinstance(alpha, Tensor) and alpha.dim() != 1:
        raise ShapeError(f"alpha has the shape {tuple(alpha.shape)} and must be a vector, (levels,)")
    levels = sorted({float(a) for a in alpha})
    if len(levels) < 3 or not all(0 < a < math.inf for a in levels):
        raise SettingsError(f"alpha must be at least three positive, finite numbers, not {levels}")
    full = posterior.with_weight(1.0)
    powers = [coarsening_weight(a, posterior.num_data) for a in levels]
    beta = [0.0, *powers, 1.0]
    ladder = sample_ladder(
        full, len(beta) - 1, chains, num_warmup, num_draws, seed=seed, beta=beta, exchange=True, progress=progress
    )
    rows = slice(1, len(beta) - 1)
    fit = ladder.log_likelihood[rows].mean(-1)
    drawn = ladder.draws.unconstrained.reshape(len(beta), chains, -1, full.dim)[rows]
    simple = torch.stack([_complexity(full, u, complexity) for u in drawn])
    scale = torch.tensor([levels, powers], dtype=full.dtype, device=full.device)
    return CalibrationCurve(scale[0], scale[1], *_mean(fit), *_mean(simple))


def _complexity(posterior: GibbsPosterior, u: Tensor, complexity: Complexity | None) -> Tensor:
    """Return the mean complexity of each chain, ``(chains, draws, d) -> (chains,)``."""
    if complexity is None:
        return posterior.pointwise_log_likelihood(u)["loss"].var(1).sum(-1)
    value = complexity(posterior.constrain(u))
    if not isinstance(value, Tensor) or value.shape != u.shape[:-1]:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(f"complexity must return (chains, draws) = {tuple(u.shape[:-1])}, not {shape}")
    return value.to(u.dtype).mean(-1)


def _mean(of_chains: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean over chains and its standard error, ``(A, chains) -> (A,), (A,)``."""
    return of_chains.mean(-1), of_chains.std(-1) / math.sqrt(of_chains.shape[-1])


def _unit(x: Tensor) -> Tensor:
    span = x[-1] - x[0]
    return (x - x[0]) / torch.where(span == 0, torch.ones_like(span), span)
