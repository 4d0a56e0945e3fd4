"""Divergences: how far beliefs may go from the prior, as the second of the three choices of generalized variation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.objectives.evidence_lower_bound import score_function_estimate
from bayeskit.inference.objectives.renyi import renyi_estimate


class Gaussian(NamedTuple):
    """A normal law: mean ``(d,)`` and the lower triangular factor of its covariance, ``(d, d)``."""

    mean: Tensor
    scale_tril: Tensor

    @property
    def covariance(self) -> Tensor:
        """Covariance, ``(d, d)``."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def log_determinant(self) -> Tensor:
        """Log determinant of the covariance."""
        return 2 * self.scale_tril.diagonal().log().sum()


@dataclass(frozen=True)
class Divergence(ABC):
    """A divergence of guide from prior.

    Parameters
    ----------
    weight : float, default 1.0
        What it is multiplied by. Positive.

    Attributes
    ----------
    adds_up : bool
        Whether the divergence of a guide of several sites is the expected sum of those of each given the ones before.

    Raises
    ------
    SettingsError
        If ``weight`` is not a positive number.
    """

    weight: float = field(default=1.0, kw_only=True)
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", real_number("weight", self.weight, between=(0.0, math.inf)))

    @abstractmethod
    def between(self, guide: Gaussian, prior: Gaussian) -> Tensor:
        """Return the divergence of two normal laws, a scalar, weight included; infinite where it does not exist."""

    @abstractmethod
    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the divergence by draws of the guide, weight included.

        Parameters
        ----------
        log_ratio : Tensor
            Log density under guide less that under prior, ``(K, *batch)``.
        log_score : Tensor or None
            Log density under the guide of draws that carry no gradient, ``(K, *batch)``.

        Returns
        -------
        Tensor
            Shape ``(*batch)``.
        """


@dataclass(frozen=True)
class KullbackLeibler(Divergence):
    r"""Kullback and Leibler's, :math:`w\,E_q[\log q - \log \pi]`: with weight one it gives the Gibbs posterior.

    Parameters
    ----------
    weight : float, default 1.0
        Above one it keeps the guide nearer to the prior, and is the same as a loss of less weight.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> KullbackLeibler(weight=2.0).between(Gaussian(torch.ones(1), one), Gaussian(torch.zeros(1), one)).item()
    1.0
    """

    adds_up: ClassVar[bool] = True

    def between(self, guide: Gaussian, prior: Gaussian) -> Tensor:
        """Return the divergence of two normal laws."""
        return self.weight * _kullback_leibler(guide, prior)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the divergence by draws."""
        return self.weight * score_function_estimate(log_ratio, log_score)


@dataclass(frozen=True)
class ReverseKullbackLeibler(Divergence):
    r"""Kullback and Leibler's of prior from guide, :math:`w\,E_\pi[\log \pi - \log q]`: the guide covers the prior.

    Where it is not closed, the guide's draws estimate it by ratios of densities, whose variance is infinite where the
    guide is much narrower than the prior: for normal laws, where its variance is less than half the prior's. More
    draws do not help then; start from a wide guide, or take another divergence.

    Parameters
    ----------
    weight : float, default 1.0

    Examples
    --------
    >>> import torch
    >>> narrow, wide = (Gaussian(torch.zeros(1), torch.tensor([[sd]])) for sd in (1.0, 2.0))
    >>> round(ReverseKullbackLeibler().between(narrow, wide).item(), 4)
    0.8069
    """

    def between(self, guide: Gaussian, prior: Gaussian) -> Tensor:
        """Return the divergence of two normal laws."""
        return self.weight * _kullback_leibler(prior, guide)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the divergence by draws, each weighed by its ratio of densities."""
        return self.weight * score_function_estimate(-log_ratio * (-log_ratio).exp(), log_score)


@dataclass(frozen=True)
class Renyi(Divergence):
    r"""Renyi's, :math:`\frac{w}{\alpha - 1} \log E_q[(q / \pi)^{\alpha - 1}]`.

    Parameters
    ----------
    weight : float, default 1.0
        Knoblauch, Jewson and Damoulas divide by ``alpha`` in addition: take ``weight=1 / alpha``.
    alpha : float, default 0.5
        Positive; one is Kullback and Leibler's. Between normal laws and above one it is infinite where the guide is
        too wide for the prior.

    Raises
    ------
    SettingsError
        If ``alpha`` is not a positive number.

    References
    ----------
    van Erven, T., Harremoes, P. (2014). Renyi divergence and Kullback-Leibler divergence. IEEE Transactions on
    Information Theory 60, 3797-3820.

    Gil, M., Alajaji, F., Linder, T. (2013). Renyi divergence measures for commonly used univariate continuous
    distributions. Information Sciences 249, 124-131.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> Renyi(alpha=0.5).between(Gaussian(torch.ones(1), one), Gaussian(torch.zeros(1), one)).item()
    0.25
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha, between=(0.0, math.inf)))

    def between(self, guide: Gaussian, prior: Gaussian) -> Tensor:
        """Return the divergence of two normal laws."""
        return self.weight * _renyi(guide, prior, self.alpha)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the divergence by draws: the log of a mean, biased by ``O(1 / K)``."""
        return -self.weight * renyi_estimate(-log_ratio, self.alpha, log_score)


@dataclass(frozen=True)
class Alpha(Divergence):
    r"""Cichocki and Amari's, :math:`\frac{w}{\alpha (\alpha - 1)} (E_q[(q / \pi)^{\alpha - 1}] - 1)`.

    For ``alpha`` below one it is bounded by ``weight / (alpha (1 - alpha))``: far from the prior it costs no more.

    Parameters
    ----------
    weight : float, default 1.0
    alpha : float, default 0.5
        Positive and not one. ``weight=1`` and ``alpha=2`` is half of Pearson's chi-squared divergence.

    Raises
    ------
    SettingsError
        If ``alpha`` is not a positive number, or one.

    References
    ----------
    Cichocki, A., Amari, S. (2010). Families of alpha- beta- and gamma-divergences: flexible and robust measures of
    similarities. Entropy 12, 1532-1568.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> far = Gaussian(torch.tensor([100.0]), one), Gaussian(torch.zeros(1), one)
    >>> Alpha(alpha=0.5).between(*far).item()
    4.0
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha, between=(0.0, math.inf)))
        if self.alpha == 1:
            raise SettingsError("alpha of Alpha must not be one, where it is Kullback and Leibler's: KullbackLeibler()")

    def between(self, guide: Gaussian, prior: Gaussian) -> Tensor:
        """Return the divergence of two normal laws."""
        power = (self.alpha - 1) * _renyi(guide, prior, self.alpha)
        return self.weight / (self.alpha * (self.alpha - 1)) * power.expm1()

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the divergence by draws."""
        value = ((self.alpha - 1) * log_ratio).expm1()
        return self.weight / (self.alpha * (self.alpha - 1)) * score_function_estimate(value, log_score)


@dataclass(frozen=True)
class SquaredWasserstein(Divergence):
    """The squared distance of Wasserstein, with squared Euclidean cost; between normal laws alone.

    Parameters
    ----------
    weight : float, default 1.0

    References
    ----------
    Olkin, I., Pukelsheim, F. (1982). The distance between two random vectors with given dispersion matrices. Linear
    Algebra and its Applications 48, 257-263.

    Examples
    --------
    >>> import torch
    >>> narrow, wide = (Gaussian(torch.full((1,), sd), torch.tensor([[sd]])) for sd in (1.0, 3.0))
    >>> SquaredWasserstein().between(narrow, wide).item()
    8.0
    """

    def between(self, guide: Gaussian, prior: Gaussian) -> Tensor:
        """Return the divergence of two normal laws."""
        # Singular values of the product of the factors are the roots of the eigenvalues of that of the covariances.
        cross = torch.linalg.svdvals(guide.scale_tril.mT @ prior.scale_tril).sum()
        spread = guide.scale_tril.square().sum() + prior.scale_tril.square().sum() - 2 * cross
        return self.weight * ((guide.mean - prior.mean).square().sum() + spread)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Refuse: densities do not tell a distance of places."""
        raise GuideError(
            "SquaredWasserstein has a closed form between normal laws and none by draws; take a guide and a prior of "
            "normal sites on the whole real line, independent of each other, or another divergence"
        )


def _kullback_leibler(first: Gaussian, second: Gaussian) -> Tensor:
    standard = _solve(second.scale_tril, torch.cat([first.scale_tril, (first.mean - second.mean)[:, None]], 1))
    return (standard.square().sum() - len(first.mean) + second.log_determinant - first.log_determinant) / 2


def _renyi(first: Gaussian, second: Gaussian, alpha: float) -> Tensor:
    if alpha == 1:
        return _kullback_leibler(first, second)
    mixed, failed = torch.linalg.cholesky_ex(alpha * second.covariance + (1 - alpha) * first.covariance)
    distance = _solve(mixed, (first.mean - second.mean)[:, None]).square().sum()
    volume = 2 * mixed.diagonal().log().sum() - (1 - alpha) * first.log_determinant - alpha * second.log_determinant
    value = alpha / 2 * distance - volume / (2 * (alpha - 1))
    return torch.where(failed == 0, value, torch.full_like(value, math.inf))


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, right, upper=False)


def as_divergence(divergence: Any) -> Divergence:
    """Return a divergence.

    Raises
    ------
    SettingsError
        If it is none.
    """
    if isinstance(divergence, Divergence):
        return divergence
    hint = f"; write {divergence.__name__}()" if isinstance(divergence, type) else ""
    raise SettingsError(
        f"the divergence must be one such as KullbackLeibler() or Renyi(0.5), not {divergence!r:.80}{hint}"
    )
