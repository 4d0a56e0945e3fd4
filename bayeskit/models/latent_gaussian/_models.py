"""Pyro models with a Gaussian field, random walk or random effects, in the form that is integrated out fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, real_number, whole_number
from bayeskit.models.latent_gaussian._fields import AreaGraph, bym2, intrinsic, squared_exponential, walk_covariance
from bayeskit.models.latent_gaussian._likelihoods import Likelihood, PoissonLikelihood
from bayeskit.models.latent_gaussian._priors import PCLength, PCProportion, PCScale, Prior, distribution_of

#: The default prior of a standard deviation.
_SCALE = PCScale(1.0, 0.01)
#: The default prior of a length scale: a probability of 5 % below a tenth of the largest distance.
_SHORT, _SHARE = 0.1, 0.05


class GaussianProcessModel:
    r"""Observations at places whose linear predictor is a Gaussian process.

    The linear predictor is ``intercept + field``, and the field is normal with mean zero and covariance
    :math:`\text{scale}^2 (\rho(r_{ij} / \text{length}) + \text{jitter}\, \delta_{ij})`, for distances :math:`r_{ij}`.
    Sites: ``intercept``, ``scale``, ``length``, ``field`` ``(n,)``, those of the likelihood, and ``y``.

    Parameters
    ----------
    x : Tensor
        Places, ``(n,)`` or ``(n, d)``.
    y : Tensor
        Observations, ``(n,)``.
    likelihood : callable
        From the linear predictor to a distribution of ``y``, such as
        :class:`~bayeskit.models.latent_gaussian.PoissonLikelihood`.
    kernel : callable, default squared_exponential
        Correlation at distances in length scales, ``(n, n)`` to ``(n, n)``.
    scale : Distribution or callable, default PCScale(1.0, 0.01)
        Prior of the standard deviation.
    length : Distribution or callable, optional
        Prior of the length scale, by default :class:`~bayeskit.models.latent_gaussian.PCLength` with a probability of
        0.05 below a tenth of the largest distance.
    intercept_scale : float, default 10.0
        Standard deviation of the normal prior of the intercept, positive.
    jitter : float, default 1e-6
        Share of independent variance, which keeps the covariance positive definite, not negative.

    Raises
    ------
    DataError
        If ``x`` or ``y`` is not finite, or all places are the same.
    ShapeError
        If ``x`` and ``y`` are of different lengths.
    SettingsError
        If the likelihood or the kernel cannot be called, or a number is outside its domain.

    References
    ----------
    Rasmussen, C. E., Williams, C. K. I. (2006). Gaussian Processes for Machine Learning. MIT Press.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.latent_gaussian import GaussianProcessModel, PoissonLikelihood
    >>> y = torch.tensor([1.0, 0, 2, 3, 7, 5], dtype=torch.float64)
    >>> target = bk.Target.from_pyro(GaussianProcessModel(torch.arange(6.0), y, PoissonLikelihood()))
    >>> bk.marginalize(target, ["field"])
    MarginalTarget(dim=3, sites=[intercept(), scale(), length()], over=[field(6,)], curvature='Gaussian field of 6')
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        likelihood: Likelihood,
        *,
        kernel: Callable[[Tensor], Tensor] = squared_exponential,
        scale: Prior = _SCALE,
        length: Prior | None = None,
        intercept_scale: float = 10.0,
        jitter: float = 1e-6,
    ) -> None:
        self.y = _column("y", y)
        places = _columns("x", x, self.y)
        self.distance = (places[:, None] - places).square().sum(-1).sqrt()
        largest = float(self.distance.max())
        if largest == 0:
            raise DataError("all places of x are the same; give at least two")
        self.likelihood, self.kernel = _callable("likelihood", likelihood), _callable("kernel", kernel)
        self.scale = scale
        self.length = PCLength(_SHORT * largest, _SHARE, places.shape[1]) if length is None else length
        self.intercept_scale = real_number("intercept_scale", intercept_scale, "(0, inf)")
        self.jitter = real_number("jitter", jitter, "[0, inf)")

    def __call__(self) -> None:
        """Run the model."""
        eta = _linear(None, self.intercept_scale)
        scale = pyro.sample("scale", distribution_of(self.scale))
        length = pyro.sample("length", distribution_of(self.length))
        n = len(self.y)
        correlation = self.kernel(self.distance / length) + self.jitter * torch.eye(n).to(self.y)
        prior = dist.MultivariateNormal(torch.zeros_like(self.y), covariance_matrix=scale**2 * correlation)
        _observe(self.likelihood(eta + pyro.sample("field", prior)), self.y)


class RandomWalkModel:
    r"""Observations in a row whose linear predictor is a line, or a constant, and a Gaussian random walk.

    The linear predictor is ``intercept + field`` for order 1 and ``intercept + slope * t + field`` for order 2, where t
    runs from -1 to 1. The walk is :func:`~bayeskit.models.latent_gaussian.random_walk`, which has neither constant nor
    (for order 2) slope of its own. Sites: ``intercept``, ``coefficients`` ``(1,)``, the slope of order 2, ``scale``,
    ``field`` ``(n,)``, those of the likelihood, and ``y``.

    Parameters
    ----------
    y : Tensor
        Observations at equal distances, ``(n,)``, more of them than ``order``.
    order : int
        1 or 2: which differences of the walk are independent.
    likelihood : callable
        From the linear predictor to a distribution of ``y``.
    scale : Distribution or callable, default PCScale(1.0, 0.01)
        Prior of the standard deviation of a typical step of the walk around its mean or line.
    intercept_scale, coefficient_scale : float, default 10.0
        Standard deviations of the normal priors of intercept and slope, positive.

    Raises
    ------
    DataError
        If ``y`` is not finite.
    ShapeError
        If ``y`` is no vector.
    SettingsError
        If the order is neither 1 nor 2, there are too few observations, the likelihood cannot be called, or a number
        is outside its domain.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.latent_gaussian import BinomialLikelihood, RandomWalkModel
    >>> y = torch.tensor([0.0, 0, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    >>> target = bk.Target.from_pyro(RandomWalkModel(y, 1, BinomialLikelihood()))
    >>> bk.marginalize(target, ["field"])
    MarginalTarget(dim=2, sites=[intercept(), scale()], over=[field(8,)], curvature='Gaussian field of 8')
    """

    def __init__(
        self,
        y: Tensor,
        order: int,
        likelihood: Likelihood,
        *,
        scale: Prior = _SCALE,
        intercept_scale: float = 10.0,
        coefficient_scale: float = 10.0,
    ) -> None:
        self.y = _column("y", y)
        self.order = whole_number("order", order, 1)
        self.likelihood, self.scale = _callable("likelihood", likelihood), scale
        self.covariance = walk_covariance(self.order, len(self.y)).to(self.y)
        self.line = torch.linspace(-1, 1, len(self.y)).to(self.y).unsqueeze(1) if self.order == 2 else None
        self.intercept_scale = real_number("intercept_scale", intercept_scale, "(0, inf)")
        self.coefficient_scale = real_number("coefficient_scale", coefficient_scale, "(0, inf)")

    def __call__(self) -> None:
        """Run the model."""
        eta = _linear(self.line, self.intercept_scale, self.coefficient_scale)
        scale = pyro.sample("scale", distribution_of(self.scale))
        field = pyro.sample("field", intrinsic(self.covariance, scale.to(self.y)))
        _observe(self.likelihood(eta + field), self.y)


class DiseaseMap:
    r"""Counts of cases in areas of a map, with independent and spatial effects of the areas (BYM2).

    .. math:: \text{counts}_i \sim \mathrm{Poisson}(\text{expected}_i \exp(\alpha + x_i \beta + \text{field}_i)).

    Sites: ``intercept`` :math:`\alpha`, ``coefficients`` :math:`\beta` ``(p,)`` if there are covariates, ``scale``,
    ``proportion``, ``field`` ``(n,)`` of :func:`~bayeskit.models.latent_gaussian.bym2`, and ``y``. Connected
    components of the map are scaled apart, and an area without neighbours has an independent effect.

    Parameters
    ----------
    counts : Tensor
        Cases, whole numbers, not negative, ``(n,)``.
    expected : Tensor
        Expected cases, positive, ``(n,)``.
    edges : array_like of int
        Pairs of neighbouring areas, counted from zero, ``(e, 2)``, or an
        :class:`~bayeskit.models.latent_gaussian.AreaGraph`.
    covariates : Tensor, optional
        ``(n,)`` or ``(n, p)``.
    scale : Distribution or callable, default PCScale(1.0, 0.01)
        Prior of the standard deviation of a typical area.
    proportion : Distribution or callable, optional
        Prior of the share of spatial variance, by default
        :class:`~bayeskit.models.latent_gaussian.PCProportion` with a probability of 2/3 below 0.5.
    intercept_scale, coefficient_scale : float, default 10.0
        Standard deviations of the normal priors of the intercept and of the coefficients, positive.

    Raises
    ------
    DataError
        If counts are negative or no whole numbers, expected cases not positive, a number not finite, or an edge names
        no area.
    ShapeError
        If lengths differ.
    SettingsError
        If a number is outside its domain, or there is neither an edge nor a prior of the proportion.

    References
    ----------
    Riebler, A., Sørbye, S. H., Simpson, D., Rue, H. (2016). An intuitive Bayesian spatial model for disease mapping
    that accounts for scaling. Statistical Methods in Medical Research 25, 1145-1165.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.models.latent_gaussian import DiseaseMap, scottish_lip_cancer
    >>> data = scottish_lip_cancer()
    >>> model = DiseaseMap(data.counts, data.expected, data.edges, data.outdoor_work / 10)
    >>> bk.marginalize(bk.Target.from_pyro(model), ["field"]).dim
    4
    """

    def __init__(
        self,
        counts: Tensor,
        expected: Tensor,
        edges: Any,
        covariates: Tensor | None = None,
        *,
        scale: Prior = _SCALE,
        proportion: Prior | None = None,
        intercept_scale: float = 10.0,
        coefficient_scale: float = 10.0,
    ) -> None:
        self.counts = _column("counts", counts)
        if bool(((self.counts < 0) | (self.counts != self.counts.round())).any()):
            raise DataError("counts must be whole numbers, not negative")
        self.expected = _column("expected", expected, self.counts)
        if bool((self.expected <= 0).any()):
            raise DataError("expected cases must be positive; leave out areas without population")
        self.graph = edges if isinstance(edges, AreaGraph) else AreaGraph(len(self.counts), edges)
        if self.graph.size != len(self.counts):
            raise ShapeError(f"the graph has {self.graph.size} areas, and counts has {len(self.counts)}")
        self.covariates = None if covariates is None else _columns("covariates", covariates, self.counts)
        self.scale = scale
        eigenvalues = self.graph.eigenvalues.to(self.counts)
        self.proportion = PCProportion(eigenvalues) if proportion is None else proportion
        self.intercept_scale = real_number("intercept_scale", intercept_scale, "(0, inf)")
        self.coefficient_scale = real_number("coefficient_scale", coefficient_scale, "(0, inf)")
        self.likelihood = PoissonLikelihood(self.expected.log())

    def __call__(self) -> None:
        """Run the model."""
        eta = _linear(self.covariates, self.intercept_scale, self.coefficient_scale)
        scale = pyro.sample("scale", distribution_of(self.scale))
        proportion = pyro.sample("proportion", distribution_of(self.proportion))
        field = pyro.sample("field", bym2(self.graph, scale.to(self.counts), proportion))
        _observe(self.likelihood(eta + field), self.counts)


class RandomEffects:
    """Observations in groups, with a normal effect of each group.

    The linear predictor is ``intercept + x @ coefficients + effect[groups]``. Sites: ``intercept``, ``coefficients``
    ``(p,)`` if there is ``x``, ``scale``, ``effect`` ``(groups,)``, which ``bk.marginalize`` integrates out group by
    group, those of the likelihood, and ``y``.

    Parameters
    ----------
    groups : Tensor of int
        Group of each observation, counted from zero, ``(n,)``.
    y : Tensor
        Observations, ``(n,)``.
    likelihood : callable
        From the linear predictor to a distribution of ``y``.
    x : Tensor, optional
        Covariates, ``(n,)`` or ``(n, p)``.
    scale : Distribution or callable, default PCScale(1.0, 0.01)
        Prior of the standard deviation of the effects.
    intercept_scale, coefficient_scale : float, default 10.0
        Standard deviations of the normal priors of the intercept and of the coefficients, positive.

    Raises
    ------
    DataError
        If groups are negative or no whole numbers, or a number is not finite.
    ShapeError
        If lengths differ.
    SettingsError
        If the likelihood cannot be called, or a number is outside its domain.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.latent_gaussian import BinomialLikelihood, RandomEffects
    >>> y = torch.tensor([3.0, 7, 5, 1], dtype=torch.float64)
    >>> target = bk.Target.from_pyro(RandomEffects(torch.tensor([0, 0, 1, 2]), y, BinomialLikelihood(10)))
    >>> bk.marginalize(target, ["effect"])
    MarginalTarget(dim=2, sites=[intercept(), scale()], over=[effect(3,)], curvature='3 groups of 1')
    """

    def __init__(
        self,
        groups: Tensor,
        y: Tensor,
        likelihood: Likelihood,
        x: Tensor | None = None,
        *,
        scale: Prior = _SCALE,
        intercept_scale: float = 10.0,
        coefficient_scale: float = 10.0,
    ) -> None:
        self.y = _column("y", y)
        given = _column("groups", groups, self.y)
        self.groups = given.long()
        if bool(((self.groups < 0) | (self.groups != given)).any()):
            raise DataError("groups must be whole numbers, counted from zero")
        self.num_groups = int(self.groups.max()) + 1
        self.x = None if x is None else _columns("x", x, self.y)
        self.likelihood, self.scale = _callable("likelihood", likelihood), scale
        self.intercept_scale = real_number("intercept_scale", intercept_scale, "(0, inf)")
        self.coefficient_scale = real_number("coefficient_scale", coefficient_scale, "(0, inf)")

    def __call__(self) -> None:
        """Run the model."""
        eta = _linear(self.x, self.intercept_scale, self.coefficient_scale)
        scale = pyro.sample("scale", distribution_of(self.scale))
        with pyro.plate("groups", self.num_groups):
            effect = pyro.sample("effect", dist.Normal(0.0, scale))
        _observe(self.likelihood(eta + effect[self.groups]), self.y)


def _linear(x: Tensor | None, intercept_scale: float, coefficient_scale: float = 1.0) -> Tensor:
    """Sample intercept and coefficients, and return the linear predictor, scalar or ``(n,)``."""
    intercept: Tensor = pyro.sample("intercept", dist.Normal(0.0, intercept_scale))
    if x is None:
        return intercept
    prior = dist.Normal(x.new_zeros(x.shape[1]), coefficient_scale).to_event(1)
    return intercept + x @ pyro.sample("coefficients", prior)


def _observe(law: Any, y: Tensor) -> None:
    with pyro.plate("data", len(y)):
        pyro.sample("y", law, obs=y)


def _numbers(name: str, value: Any) -> Tensor:
    """Return finite real numbers, whole ones in double precision."""
    values = as_numbers(name, value)
    values = values if values.is_floating_point() else values.double()
    if bad := int((~values.isfinite()).sum()):
        raise DataError(f"{bad} of {values.numel()} values of {name} are not finite")
    return values


def _column(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """Return a vector, of the length, dtype and device of another."""
    values = _numbers(name, value)
    if values.dim() != 1 or not len(values) or (like is not None and len(values) != len(like)):
        wanted = "(n,)" if like is None else f"({len(like)},)"
        raise ShapeError(f"{name} has shape {tuple(values.shape)}; give {wanted}")
    return values if like is None else values.to(like)


def _columns(name: str, value: Any, like: Tensor) -> Tensor:
    """Return a matrix ``(n, p)`` from a vector or matrix with as many rows as another, in its dtype."""
    values = _numbers(name, value)
    if values.dim() not in (1, 2) or len(values) != len(like) or values.numel() == 0:
        raise ShapeError(f"{name} has shape {tuple(values.shape)}; give ({len(like)},) or ({len(like)}, p)")
    return values.reshape(len(like), -1).to(like)


def _callable(name: str, value: Any) -> Any:
    if isinstance(value, type) or not callable(value):
        raise SettingsError(f"{name} is {value!r:.80}; give a function or an object that can be called")
    return value
