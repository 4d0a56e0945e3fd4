"""Generalized variational inference: a loss, a divergence and a family of guides, each chosen by itself."""

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

from bayeskit._moved import answer_to_old_names
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

__getattr__ = answer_to_old_names(__name__)

# Divergences from the prior: the second of the three choices of generalized variational inference.


class NormalLaw(NamedTuple):
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
    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
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
    >>> KullbackLeibler(weight=2.0).between(NormalLaw(torch.ones(1), one), NormalLaw(torch.zeros(1), one)).item()
    1.0
    """

    adds_up: ClassVar[bool] = True

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
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
    >>> narrow, wide = (NormalLaw(torch.zeros(1), torch.tensor([[sd]])) for sd in (1.0, 2.0))
    >>> round(ReverseKullbackLeibler().between(narrow, wide).item(), 4)
    0.8069
    """

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
        """Return the divergence of two normal laws."""
        return self.weight * _kullback_leibler(prior, guide)

    def of_draws(self, log_ratio: Tensor, log_score: Tensor | None) -> Tensor:
        """Estimate the divergence by draws, each weighed by its ratio of densities."""
        return self.weight * score_function_estimate(-log_ratio * (-log_ratio).exp(), log_score)


@dataclass(frozen=True)
class RenyiDivergence(Divergence):
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
    >>> RenyiDivergence(alpha=0.5).between(NormalLaw(torch.ones(1), one), NormalLaw(torch.zeros(1), one)).item()
    0.25
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha, between=(0.0, math.inf)))

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
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
    >>> far = NormalLaw(torch.tensor([100.0]), one), NormalLaw(torch.zeros(1), one)
    >>> Alpha(alpha=0.5).between(*far).item()
    4.0
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha, between=(0.0, math.inf)))
        if self.alpha == 1:
            raise SettingsError("alpha of Alpha must not be one, where it is Kullback and Leibler's: KullbackLeibler()")

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
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
    >>> narrow, wide = (NormalLaw(torch.full((1,), sd), torch.tensor([[sd]])) for sd in (1.0, 3.0))
    >>> SquaredWasserstein().between(narrow, wide).item()
    8.0
    """

    def between(self, guide: NormalLaw, prior: NormalLaw) -> Tensor:
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
    """Return a divergence as it is; SettingsError if it is none."""
    if isinstance(divergence, Divergence):
        return divergence
    hint = f"; write {divergence.__name__}()" if isinstance(divergence, type) else ""
    raise SettingsError(
        f"the divergence must be one such as KullbackLeibler() or Renyi(0.5), not {divergence!r:.80}{hint}"
    )


class GVI(Objective):
    r"""Expected loss plus a divergence of guide from prior, :math:`E_q[w \sum_i \ell(\theta, x_i)] + D(q \| \pi)`.

    The rule of three: the loss and its weight are those of the model, such as a
    :class:`~bayeskit.inference.generalized.GibbsPosterior` (or any Pyro model, whose loss is minus its log
    likelihood), the divergence is the argument, and the family is the guide. With :class:`KullbackLeibler` and a guide
    that can be the Gibbs posterior, that is the optimum; other divergences give other beliefs, not approximations of
    these.

    The divergence is computed in closed form where guide and prior are normal, their sites independent of each
    other, including Pyro's automatic guides of unconstrained parameters; otherwise by the guide's draws.

    Parameters
    ----------
    divergence : Divergence, default KullbackLeibler()
        One of :mod:`~bayeskit.inference.generalized.variational`.
    num_particles : int, default 16
        Draws of the guide.
    max_plate_nesting, data_plate
        As in :class:`~bayeskit.inference.objectives.Objective`. With plates that hold all sites, the divergence
        is that of each datum's own latent variables.

    Raises
    ------
    SettingsError
        If ``divergence`` is none, or one that does not add up has to be estimated from a single draw.
    GuideError
        If the divergence has no estimate by draws and is needed where there is no closed form.

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
        """Return minus the expected loss and the divergence of each datum, ``(*batch)``."""
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
    """Return the joint normal laws of guide and prior over all latent sites, or None where either is not normal."""
    # None where a site is not normal, is masked, scaled or belongs to a datum, or depends on another site, which shows
    # in particles that differ in its law.
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
        return None  # a single particle cannot show what depends on it
    split = len(guide)
    drawn, taken = (torch.cat(part, -1) for part in (values[:split], values[split:]))  # type: ignore[arg-type]
    if drawn.shape != taken.shape or not torch.equal(drawn, taken):
        return None
    like = drawn + taken
    return _joint(laws[:split], like), _joint(laws[split:], like)


def _free_sites(guide: Mapping[str, Site], prior: Mapping[str, Site]) -> dict[str, Site] | None:
    """Return the sites that the guide draws from: the prior's, in its order, or those of an automatic guide."""
    if set(guide) == set(prior):
        return {name: guide[name] for name in prior}
    free: dict[str, Site] = {}
    for name, site in guide.items():
        base = unwrapped(site["fn"])[0]
        if not isinstance(base, Delta):
            free[name] = site
        elif bool((torch.as_tensor(base.log_density) != 0).any()):
            return None  # a transform bends the law
    return free


def _flat(value: Tensor, count: int) -> Tensor | None:
    """Return values as ``(K, d)``."""
    if count > 1 and (value.dim() == 0 or len(value) != count):
        return None
    return value.reshape(count, -1)


def _normal_law(site: Site, count: int) -> NormalLaw | None:
    """Return the law of a site if it is normal and the same for all particles."""
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
