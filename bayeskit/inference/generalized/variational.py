"""Generalized variational inference: loss, divergence and variational family are chosen independently."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, Normal

from bayeskit.core.inputs import real_number
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.objectives.drawing import Particles, Site, unwrapped
from bayeskit.inference.objectives.evidence_lower_bound import divergences, score_function_estimate
from bayeskit.inference.objectives.importance_weighted import renyi_estimate
from bayeskit.inference.objectives.objective import Draw, Objective

__all__ = [
    "Alpha",
    "Divergence",
    "GVI",
    "KullbackLeibler",
    "NormalLaw",
    "RenyiDivergence",
    "ReverseKullbackLeibler",
    "SquaredWasserstein",
]

# Divergences between guide and prior.


class NormalLaw(NamedTuple):
    """Normal distribution with mean ``(d,)`` and lower Cholesky factor of the covariance, ``(d, d)``."""

    mean: Tensor
    scale_tril: Tensor

    @property
    def covariance(self) -> Tensor:
        """Covariance matrix, ``(d, d)``."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def log_determinant(self) -> Tensor:
        """Log determinant of the covariance."""
        return 2 * self.scale_tril.diagonal().log().sum()


@dataclass(frozen=True)
class Divergence(ABC):
    """Base class of divergences between guide and prior.

    Parameters
    ----------
    weight : float, default 1.0
        Factor of the divergence, positive.

    Attributes
    ----------
    adds_up : bool
        Whether the chain rule holds: the divergence is the expected sum of the conditional divergences of the sites.

    Raises
    ------
    SettingsError
        If ``weight`` is not a positive number.
    """

    weight: float = field(default=1.0, kw_only=True)
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", real_number("weight", self.weight, "(0, inf)"))

    @abstractmethod
    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the weighted divergence between normal distributions, scalar; infinite if it does not exist."""

    @abstractmethod
    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the weighted divergence from draws of the guide, ``(*batch)``.

        ``log_ratio (K, *batch)`` is the log density of the guide minus that of the prior; ``log_score (K, *batch)`` is
        the log density of the guide at draws that are not reparametrised.
        """


@dataclass(frozen=True)
class KullbackLeibler(Divergence):
    r"""Kullback-Leibler divergence, :math:`w\,E_q[\log q - \log \pi]`; weight one gives the Gibbs posterior.

    ``weight`` has the same optimum as a loss weight divided by it; above one, the guide stays closer to the prior.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> KullbackLeibler(weight=2.0).between(NormalLaw(torch.ones(1), one), NormalLaw(torch.zeros(1), one)).item()
    1.0
    """

    adds_up: ClassVar[bool] = True

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the weighted divergence between normal distributions, scalar."""
        return self.weight * _kullback_leibler(guide, prior)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the weighted divergence from draws, as in :meth:`Divergence.of_draws`."""
        return self.weight * score_function_estimate(log_ratio, log_score)


@dataclass(frozen=True)
class ReverseKullbackLeibler(Divergence):
    r"""Reverse Kullback-Leibler divergence, :math:`w\,E_\pi[\log \pi - \log q]`, which makes the guide cover the prior.

    Without a closed form it is estimated by importance sampling from the guide. The variance of the estimate is
    infinite if the guide is much narrower than the prior: for normal distributions, if its variance is less than half
    that of the prior. More draws do not help; start from a wide guide, or use another divergence.

    Parameters
    ----------
    weight : float, default 1.0

    Examples
    --------
    >>> import torch
    >>> narrow, wide = (NormalLaw(torch.zeros(1), torch.tensor([[sd]])) for sd in (1.0, 2.0))
    >>> round(ReverseKullbackLeibler().between(narrow, wide).item(), 4)
    0.8069
    """

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the weighted divergence between normal distributions, scalar."""
        return self.weight * _kullback_leibler(prior, guide)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the weighted divergence by importance sampling, as in :meth:`Divergence.of_draws`."""
        return self.weight * score_function_estimate(-log_ratio * (-log_ratio).exp(), log_score)


@dataclass(frozen=True)
class RenyiDivergence(Divergence):
    r"""Renyi divergence, :math:`\frac{w}{\alpha - 1} \log E_q[(q / \pi)^{\alpha - 1}]`.

    Parameters
    ----------
    weight : float, default 1.0
        Use ``1 / alpha`` for the definition of Knoblauch, Jewson and Damoulas.
    alpha : float, default 0.5
        Positive; one gives the Kullback-Leibler divergence. Above one, the divergence between normal distributions is
        infinite if the guide is too wide relative to the prior.

    Raises
    ------
    SettingsError
        If ``alpha`` is not a positive number.

    References
    ----------
    van Erven, T., Harremoes, P. (2014). Renyi divergence and Kullback-Leibler divergence. IEEE Transactions on
    Information Theory 60, 3797-3820. Gil, M., Alajaji, F., Linder, T. (2013). Renyi divergence measures for commonly
    used univariate continuous distributions. Information Sciences 249, 124-131.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> RenyiDivergence(alpha=0.5).between(NormalLaw(torch.ones(1), one), NormalLaw(torch.zeros(1), one)).item()
    0.25
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha, "(0, inf)"))

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the weighted divergence between normal distributions, scalar."""
        return self.weight * _renyi(guide, prior, self.alpha)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the weighted divergence as in :meth:`Divergence.of_draws`, with bias ``O(1 / K)``."""
        return -self.weight * renyi_estimate(-log_ratio, self.alpha, log_score)


@dataclass(frozen=True)
class Alpha(Divergence):
    r"""Alpha-divergence, :math:`\frac{w}{\alpha (\alpha - 1)} (E_q[(q / \pi)^{\alpha - 1}] - 1)`.

    For ``alpha`` below one it is bounded by ``weight / (alpha (1 - alpha))``.

    Parameters
    ----------
    weight : float, default 1.0
    alpha : float, default 0.5
        Positive and not one. With ``alpha=2`` and ``weight=1`` it is half the Pearson chi-squared divergence.

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
    >>> far = NormalLaw(torch.tensor([100.0]), one), NormalLaw(torch.zeros(1), one)
    >>> Alpha(alpha=0.5).between(*far).item()
    4.0
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha, "(0, inf)"))
        if self.alpha == 1:
            raise SettingsError("alpha of Alpha must not be one; use KullbackLeibler() instead")

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the weighted divergence between normal distributions, scalar."""
        power = (self.alpha - 1) * _renyi(guide, prior, self.alpha)
        return self.weight / (self.alpha * (self.alpha - 1)) * power.expm1()

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the weighted divergence from draws, as in :meth:`Divergence.of_draws`."""
        value = ((self.alpha - 1) * log_ratio).expm1()
        return self.weight / (self.alpha * (self.alpha - 1)) * score_function_estimate(value, log_score)


@dataclass(frozen=True)
class SquaredWasserstein(Divergence):
    """Squared 2-Wasserstein distance with Euclidean cost, for normal distributions only.

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
    >>> narrow, wide = (NormalLaw(torch.full((1,), sd), torch.tensor([[sd]])) for sd in (1.0, 3.0))
    >>> SquaredWasserstein().between(narrow, wide).item()
    8.0
    """

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the weighted divergence between normal distributions, scalar."""
        # Singular values of the product of the factors are square roots of eigenvalues of the product of covariances.
        cross = torch.linalg.svdvals(guide.scale_tril.mT @ prior.scale_tril).sum()
        spread = guide.scale_tril.square().sum() + prior.scale_tril.square().sum() - 2 * cross
        return self.weight * ((guide.mean - prior.mean).square().sum() + spread)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Raise GuideError: there is no estimate from densities."""
        raise GuideError(
            "SquaredWasserstein has a closed form for normal distributions and no estimate by draws; use a guide and a "
            "prior of independent normal sites on the real line, or another divergence"
        )


def _kullback_leibler(first: NormalLaw, second: NormalLaw) -> Tensor:
    standard = _solve(second.scale_tril, torch.cat([first.scale_tril, (first.mean - second.mean)[:, None]], 1))
    return (standard.square().sum() - len(first.mean) + second.log_determinant - first.log_determinant) / 2


def _renyi(first: NormalLaw, second: NormalLaw, alpha: float) -> Tensor:
    if alpha == 1:
        return _kullback_leibler(first, second)
    mixed, failed = torch.linalg.cholesky_ex(alpha * second.covariance + (1 - alpha) * first.covariance)
    distance = _solve(mixed, (first.mean - second.mean)[:, None]).square().sum()
    volume = 2 * mixed.diagonal().log().sum() - (1 - alpha) * first.log_determinant - alpha * second.log_determinant
    value = alpha / 2 * distance - volume / (2 * (alpha - 1))
    return torch.where(failed == 0, value, torch.full_like(value, math.inf))


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, right, upper=False)


def _as_divergence(divergence: Any) -> Divergence:
    """Return the divergence; SettingsError if it is not a ``Divergence``."""
    if isinstance(divergence, Divergence):
        return divergence
    hint = f"; write {divergence.__name__}()" if isinstance(divergence, type) else ""
    raise SettingsError(
        f"divergence must be an object such as KullbackLeibler() or RenyiDivergence(0.5), not {divergence!r:.80}{hint}"
    )


class GVI(Objective):
    r"""Generalized variational objective, :math:`E_q[w \sum_i \ell(\theta, x_i)] + D(q \| \pi)`.

    The model defines the loss and its weight: a :class:`~bayeskit.inference.generalized.GibbsPosterior`, or any Pyro
    model with minus its log likelihood as loss. The guide is the variational family. With :class:`KullbackLeibler` and
    a sufficiently flexible guide the optimum is the Gibbs posterior; other divergences define other posteriors, not
    approximations of it.

    The divergence has a closed form if guide and prior consist of independent normal sites, including Pyro's automatic
    guides of unconstrained parameters; otherwise it is estimated from draws of the guide.

    Parameters
    ----------
    divergence : Divergence, default KullbackLeibler()
        One of :mod:`~bayeskit.inference.generalized.variational`.
    num_particles : int, default 16
        Draws of the guide.
    max_plate_nesting, data_plate
        As in :class:`~bayeskit.inference.objectives.Objective`. If plates contain all sites, the divergence is that of
        the latent variables of each datum.

    Raises
    ------
    SettingsError
        If ``divergence`` is not a :class:`Divergence`, or must be estimated from a single draw although the chain rule
        does not hold.
    GuideError
        If the divergence has neither a closed form nor an estimate from draws.

    References
    ----------
    Knoblauch, J., Jewson, J., Damoulas, T. (2022). An optimization-centric view on Bayes' rule: reviewing and
    generalizing variational inference. JMLR 23 (132), 1-109.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> from bayeskit.inference.generalized.variational import RenyiDivergence
    >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=0.5)
    >>> def guide():
    ...     return pyro.sample("theta", dist.Normal(torch.tensor(1.4, dtype=torch.float64), 0.4**0.5))
    >>> bound = GVI(num_particles=10_000).loss(posterior, guide)  # at the Gibbs posterior: minus its log evidence
    >>> abs(bound - 3.2581) < 0.1
    True
    >>> GVI(RenyiDivergence(0.5), num_particles=10_000).loss(posterior, guide) < bound
    True
    """

    def __init__(
        self,
        divergence: Divergence | None = None,
        num_particles: int = 16,
        *,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        self.divergence = KullbackLeibler() if divergence is None else _as_divergence(divergence)

    def estimate(self, draw: Draw) -> Tensor:
        """Return minus the sum of expected loss and divergence, ``(*batch)``."""
        particles = draw(self.num_particles, analytic_kl=self.divergence.adds_up)
        return score_function_estimate(particles.log_likelihood, particles.log_score) - self._divergence(particles)

    def _divergence(self, particles: Particles) -> Tensor:
        pair = _normal_laws(particles)
        if pair is not None:
            return self.divergence.between(*pair)
        particles.require_divergences(type(self).__name__)
        if self.divergence.adds_up:
            return self.divergence.of_draws(sum(divergences(particles).values(), _none(particles)), particles.log_score)
        ratio = particles.log_guide_total - sum(particles.log_prior.values(), _none(particles))
        if len(ratio) < 2:
            raise SettingsError(
                f"{type(self.divergence).__name__} has no closed form between this guide and prior and needs several "
                "draws; raise num_particles"
            )
        return self.divergence.of_draws(ratio, particles.log_score)


def _normal_laws(particles: Particles) -> tuple[NormalLaw, NormalLaw] | None:
    """Return the joint normal distributions of guide and prior over all latent sites, or None if not normal."""
    # None if a site is not normal, is masked, scaled or in a data plate, or depends on another site: then its
    # distribution differs between particles.
    prior = {name: site for name, site in particles.model_sites.items() if not site["is_observed"]}
    guide = _free_sites(particles.guide_sites, prior)
    if guide is None or particles.layout.plates or not prior:
        return None
    count = particles.layout.num_particles
    values = [_flat(site["value"], count) for site in (*guide.values(), *prior.values())]
    laws = [_normal_law(site, count) for site in (*guide.values(), *prior.values())]
    if any(value is None for value in values) or any(law is None for law in laws):
        return None
    if count == 1 and len(prior) > 1:
        return None  # a single particle cannot reveal dependence
    split = len(guide)
    drawn, taken = (torch.cat(part, -1) for part in (values[:split], values[split:]))  # type: ignore[arg-type]
    if drawn.shape != taken.shape or not torch.equal(drawn, taken):
        return None
    like = drawn + taken
    return _joint(laws[:split], like), _joint(laws[split:], like)


def _free_sites(guide: Mapping[str, Site], prior: Mapping[str, Site]) -> dict[str, Site] | None:
    """Return the random sites of the guide: those of the prior, in its order, or of an automatic guide."""
    if set(guide) == set(prior):
        return {name: guide[name] for name in prior}
    free: dict[str, Site] = {}
    for name, site in guide.items():
        base = unwrapped(site["fn"])[0]
        if not isinstance(base, Delta):
            free[name] = site
        elif bool((torch.as_tensor(base.log_density) != 0).any()):
            return None  # a nonlinear transform
    return free


def _flat(value: Tensor, count: int) -> Tensor | None:
    """Return values as ``(K, d)``."""
    if count > 1 and (value.dim() == 0 or len(value) != count):
        return None
    return value.reshape(count, -1)


def _normal_law(site: Site, count: int) -> NormalLaw | None:
    """Return the distribution of a site if it is normal and the same for all particles."""
    if site["mask"] not in (None, True) or isinstance(site["scale"], Tensor) or site["scale"] != 1:
        return None
    base, shape = unwrapped(site["fn"])[0], site["value"].shape
    if isinstance(base, Normal):
        scale = _flat(base.scale.expand(shape), count)
        factor = None if scale is None else torch.diag_embed(scale)
    elif isinstance(base, (MultivariateNormal, LowRankMultivariateNormal)):
        size = shape[-1]
        blocks = base.scale_tril.expand(*shape, size).reshape(count, -1, size, size)
        factor = torch.stack([torch.block_diag(*row) for row in blocks[: 1 if _alike(blocks) else count]])
    else:
        return None
    mean = _flat(base.loc.expand(shape), count)
    if mean is None or factor is None or not _alike(mean) or not _alike(factor):
        return None
    return NormalLaw(mean[0], factor[0])


def _alike(rows: Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _joint(laws: list[Any], like: Tensor) -> NormalLaw:
    mean = torch.cat([law.mean for law in laws])
    return NormalLaw(mean.to(like), torch.block_diag(*(law.scale_tril for law in laws)).to(like))


def _none(particles: Particles) -> Tensor:
    return torch.zeros_like(particles.log_likelihood)
