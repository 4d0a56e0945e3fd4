"""Finite mixtures of normal distributions, their priors, and mixtures with an unknown number of components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from bayeskit.errors import DataError, InitializationError, SettingsError, ShapeError
from bayeskit.extend import (
    Draws,
    Target,
    as_numbers,
    new_generator,
    real_number,
    short_repr,
    standard_gamma,
    whole_number,
)
from bayeskit.models.discrete._inputs import as_real, site_values

# Velocities of 82 galaxies.


def galaxy_velocities() -> Tensor:
    """Load the velocities of 82 galaxies in six conic sections of the Corona Borealis region.

    Values of Roeder (1990). Observation 78 is 26.960, as in the original survey; many copies have 26.690 (transposed
    digits). Observation 74 is 24.366; some copies have 24.368.

    Returns
    -------
    Tensor
        Ascending, in 1000 km/s, float64, shape ``(82,)``.

    References
    ----------
    Postman, M., Huchra, J. P., Geller, M. J. (1986). Probes of large-scale structure in the Corona Borealis region.
    Astronomical Journal 92, 1238-1247.

    Roeder, K. (1990). Density estimation with confidence sets exemplified by superclusters and voids in the galaxies.
    Journal of the American Statistical Association 85, 617-624.

    Examples
    --------
    >>> y = galaxy_velocities()
    >>> len(y), y[77].item(), round(y.mean().item(), 4)
    (82, 26.96, 20.8315)
    """
    text = resources.files("bayeskit.models.discrete").joinpath("data", "galaxies.csv").read_text(encoding="utf-8")
    return torch.tensor([float(line) for line in text.split()[1:]], dtype=torch.float64)


# Validation of observations.


def as_observations(y: Tensor) -> Tensor:
    """Return observations ``(n,)`` or ``(n, D)`` as finite floats; raise DataError or ShapeError otherwise."""
    y = as_real("y", y)
    if y.dim() not in (1, 2):
        raise ShapeError(f"y must have shape (n,) or (n, D), not {tuple(y.shape)}")
    if y.numel() == 0:
        raise DataError(f"y has shape {tuple(y.shape)}, so it holds no observations")
    if not bool(y.isfinite().all()):
        raise DataError(f"y holds {int((~y.isfinite()).sum())} values that are NaN or infinite; remove them")
    return y


# A gamma distribution whose draws work under vmap.


class _BatchableGamma(dist.Gamma):
    """A gamma distribution with draws that work under ``vmap``; torch clamps its draws in place."""

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw, shape ``(*sample_shape, *batch)``."""
        shape = self._extended_shape(torch.Size(sample_shape))
        value = standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
        return value.clamp(min=torch.finfo(value.dtype).tiny)


# Order statistics of independent draws.


class OrderedSample(TorchDistribution):
    """Distribution of ``num_draws`` independent draws from a continuous distribution, in ascending order.

    The density is ``num_draws!`` times the density of the unordered draws, on ascending vectors. This factor makes the
    evidence of a mixture with ordered means equal to the evidence without the constraint.

    Parameters
    ----------
    base : Distribution
        Univariate, continuous, without batch dimensions.
    num_draws : int
        At least 1.
    validate_args : bool, optional
        Raise a ``ValueError`` for values that are not ascending.

    Raises
    ------
    SettingsError
        If ``num_draws`` is less than 1.
    ShapeError
        If ``base`` has batch or event dimensions.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> ordered = OrderedSample(dist.Normal(torch.zeros((), dtype=torch.float64), 1.0), 3)
    >>> ordered.sample().diff().min() > 0
    tensor(True)
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.ordered_vector

    def __init__(self, base: Any, num_draws: int, validate_args: bool | None = None) -> None:
        num_draws = whole_number("num_draws", num_draws, 1)
        if base.batch_shape or base.event_shape:
            shapes = f"batch {tuple(base.batch_shape)} and event {tuple(base.event_shape)}"
            raise ShapeError(f"the distribution of one draw has shapes {shapes}; give one of a single number")
        self.base = base
        super().__init__(torch.Size(), torch.Size([num_draws]), validate_args=validate_args)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw, shape ``(*sample_shape, num_draws)``."""
        return self.base.sample((*torch.Size(sample_shape), *self.event_shape)).sort(-1).values

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density at ascending vectors, ``(*batch, num_draws) -> (*batch)``.

        Raises ``ShapeError`` if the last dimension is not ``num_draws``.
        """
        if value.shape[-1:] != self.event_shape:
            raise ShapeError(f"values have shape {tuple(value.shape)}; the last dimension is {self.event_shape[0]}")
        if self._validate_args:
            self._validate_sample(value)
        return self.base.log_prob(value).sum(-1) + math.lgamma(self.event_shape[0] + 1)


# Priors for mixtures of normal distributions.


@dataclass(frozen=True, eq=False)
class MixturePrior:
    r"""Prior of a mixture of normal distributions in ``D`` dimensions, exchangeable between its components.

    For every component ``k`` and dimension ``d``, with ``Gamma(shape, rate)``,

    .. math::
        w \sim \mathrm{Dirichlet}(e_0, \dots, e_0), \qquad \lambda_{kd} \sim \mathrm{Gamma}(c_0, C_{0d}), \qquad
        \mu_{kd} \sim N(b_{0d}, B_{0d}),

    where :math:`\lambda = \sigma^{-2}`, so :math:`\sigma^2` is inverse gamma. The rate :math:`C_{0d}` is fixed or has
    the prior :math:`\mathrm{Gamma}(g_0, G_{0d})` and is common to all components. The variance :math:`B_{0d}` of a
    mean is fixed, or :math:`1 / (n_0 \lambda_{kd})` if ``relative_precision`` is given. Correlation matrices of full
    covariances have an LKJ prior.

    Attributes
    ----------
    location : Tensor
        :math:`b_0`, shape ``(D,)``.
    spread : Tensor or None
        :math:`\sqrt{B_0}`, shape ``(D,)``; None if ``relative_precision`` is given.
    relative_precision : float or None
        :math:`n_0`, the prior sample size of a mean.
    shape : float
        :math:`c_0`.
    rate : Tensor or None
        :math:`C_0`, shape ``(D,)``; None if ``rate_prior`` is given.
    rate_prior : (float, Tensor) or None
        :math:`g_0`, and :math:`G_0` of shape ``(D,)``.
    concentration : float, default 1
        :math:`e_0` of each component.
    correlation : float, default 1
        Concentration of the LKJ prior; 1 is uniform.

    References
    ----------
    Fruehwirth-Schnatter, S. (2006). Finite Mixture and Markov Switching Models, section 6.2. Springer.

    Examples
    --------
    >>> import torch
    >>> prior = MixturePrior.richardson_green(torch.tensor([1.0, 4.0, 5.0], dtype=torch.float64))
    >>> prior.location.tolist(), prior.spread.tolist(), prior.rate_prior[1].tolist()
    ([3.0], [4.0], [0.625])
    """

    location: Tensor
    spread: Tensor | None
    relative_precision: float | None
    shape: float
    rate: Tensor | None
    rate_prior: tuple[float, Tensor] | None
    concentration: float = 1.0
    correlation: float = 1.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if (self.spread is None) == (self.relative_precision is None):
            raise SettingsError("give exactly one of spread (of the means) and relative_precision")
        if (self.rate is None) == (self.rate_prior is None):
            raise SettingsError("give exactly one of rate (of the precisions) and rate_prior")
        if self.location.dim() != 1 or not len(self.location) or not bool(self.location.isfinite().all()):
            raise SettingsError(f"location must hold a finite number for each dimension, not {self.location}")
        numbers: dict[str, Any] = {
            "spread": self.spread,
            "relative_precision": self.relative_precision,
            "shape": self.shape,
            "rate": self.rate,
            "concentration": self.concentration,
            "correlation": self.correlation,
        }
        if self.rate_prior is not None:
            numbers |= {"shape of rate_prior": self.rate_prior[0], "rate of rate_prior": self.rate_prior[1]}
        for name, value in numbers.items():
            if value is not None and not bool(((t := torch.as_tensor(value)) > 0).all() and t.isfinite().all()):
                raise SettingsError(f"{name} must be positive and finite, not {value}")
            if isinstance(value, Tensor) and value.shape != self.location.shape:
                raise ShapeError(f"{name} has shape {tuple(value.shape)}; location has {tuple(self.location.shape)}")

    @property
    def dim(self) -> int:
        """Dimension of an observation."""
        return len(self.location)

    @classmethod
    def richardson_green(cls, y: Tensor) -> MixturePrior:
        r"""Make the weakly informative, data-dependent prior of Richardson and Green (1997).

        With the range :math:`R` of each dimension, :math:`b_0` is the midrange, :math:`B_0 = R^2`, :math:`c_0 = 2`,
        :math:`C_0 \sim \mathrm{Gamma}(0.2, 10/R^2)` and :math:`e_0 = 1`.

        ``y`` (tensor or array): observations, shape ``(n,)`` or ``(n, D)``. Raises ``DataError`` if there are no
        observations, some are not finite, or a dimension is constant; ``ShapeError`` if ``y`` is neither a vector nor a
        matrix.

        References
        ----------
        Richardson, S., Green, P. J. (1997). On Bayesian analysis of mixtures with an unknown number of components.
        Journal of the Royal Statistical Society B 59, 731-792.
        """
        y = as_observations(y)
        table = y.reshape(len(y), -1)
        low, high = table.amin(0), table.amax(0)
        width = high - low
        if not bool((width > 0).all()):
            raise DataError("a dimension of the data has no range, so this prior has no scale; use independent(...)")
        return cls((low + high) / 2, width, None, 2.0, None, (0.2, 10 / width.square()))

    @classmethod
    def independent(
        cls, location: Any, spread: Any, shape: float, rate: Any, concentration: float = 1.0
    ) -> MixturePrior:
        r"""Make the independence prior: independent means and precisions, all hyperparameters fixed.

        Chib (1995) uses ``independent(20, 10, 3, 20)`` for the galaxy velocities in 1000 km/s. ``location``,
        ``spread``, ``rate``: :math:`b_0`, :math:`\sqrt{B_0}` and :math:`C_0`, shape ``()`` or ``(D,)``. ``shape``:
        :math:`c_0`. ``concentration``: :math:`e_0`.

        References
        ----------
        Chib, S. (1995). Marginal likelihood from the Gibbs output. Journal of the American Statistical Association 90,
        1313-1321.
        """
        b, s, c = _columns(location=location, spread=spread, rate=rate)
        c0, e0 = real_number("shape", shape), real_number("concentration", concentration)
        return cls(b, s, None, c0, c, None, e0)

    @classmethod
    def conjugate(
        cls, location: Any, relative_precision: float, shape: float, rate: Any, concentration: float = 1.0
    ) -> MixturePrior:
        r"""Make the normal-gamma prior, conjugate given the assignments (see :func:`exact_log_evidence`).

        Parameters
        ----------
        location, rate : float or Tensor
            :math:`b_0` and :math:`C_0`, shape ``()`` or ``(D,)``.
        relative_precision : float
            :math:`n_0`.
        shape : float
            :math:`c_0`.
        concentration : float, default 1
            :math:`e_0`.
        """
        b, c = _columns(location=location, rate=rate)
        n0 = real_number("relative_precision", relative_precision)
        c0, e0 = real_number("shape", shape), real_number("concentration", concentration)
        return cls(b, None, n0, c0, c, None, e0)


def _columns(**values: Any) -> list[Tensor]:
    tensors = [as_numbers(name, value).to(torch.float64).reshape(-1) for name, value in values.items()]
    sizes = {len(t) for t in tensors} - {1}
    if len(sizes) > 1:
        given = ", ".join(f"{name} {len(t)}" for name, t in zip(values, tensors, strict=True))
        raise ShapeError(f"numbers of different dimensions: {given}; give one number, or one number per dimension")
    return [t.clone() for t in torch.broadcast_tensors(*tensors)]


# Finite mixtures of normal distributions.

Covariance = Literal["diagonal", "full"]
_CANDIDATES, CHUNK = 200, 4_000_000


class GaussianMixture:
    """Pyro model, without arguments, of a mixture of ``K`` normal distributions with enumerated assignments.

    Sites for observations in ``D`` dimensions (shapes without ``D`` if the data have shape ``(n,)``):

    =============== =============================== ===============================================================
    ``share``       ``(K,)``, where ``K > 1``       gamma variables; weights are ``share / share.sum()``
    ``rate``        ``(D,)``, where it has a prior  shared rate of the precisions
    ``mean``        ``(K, D)``
    ``precision``   ``(K, D)``                      reciprocal variances; ``(D,)`` with equal scales
    ``correlation`` ``(K, D, D)``, where full       Cholesky factor of the correlations
    ``assignment``  ``(n,)``                        component of each observation, enumerated
    =============== =============================== ===============================================================

    The weights are Dirichlet. A permutation of the components permutes the unconstrained coordinates of every site in
    :attr:`exchangeable`.

    Parameters
    ----------
    y : Tensor or array
        Observations, shape ``(n,)`` or ``(n, D)``.
    num_components : int
        ``K``.
    prior : MixturePrior, optional
        Default :meth:`MixturePrior.richardson_green` of the data.
    covariance : {"diagonal", "full"}, default "diagonal"
    equal_scales : bool, default False
        Use the same precisions for all components.
    ordered : bool, default False
        Order the means (univariate data only). The posterior then has one of the ``K!`` symmetric modes; the evidence
        does not change.

    Raises
    ------
    DataError
        If there are no observations, or some are not finite.
    ShapeError
        If ``y`` is neither a vector nor a matrix, or the prior has another dimension.
    SettingsError
        If ``num_components`` is less than 1, or settings are incompatible.

    References
    ----------
    Richardson and Green (1997), see :meth:`MixturePrior.richardson_green`; Fruehwirth-Schnatter (2006), see
    :class:`MixturePrior`.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, galaxy_velocities
    >>> mixture = GaussianMixture(galaxy_velocities(), num_components=3)
    >>> bk.Target.from_pyro(mixture)
    Target(dim=10, sites=[rate(), share(3,), precision(3,), mean(3,)], dtype=torch.float64, device=cpu)
    """

    def __init__(
        self,
        y: Tensor,
        num_components: int,
        prior: MixturePrior | None = None,
        *,
        covariance: Covariance = "diagonal",
        equal_scales: bool = False,
        ordered: bool = False,
    ) -> None:
        y = as_observations(y)
        if covariance not in ("diagonal", "full"):
            raise SettingsError(f"covariance must be 'diagonal' or 'full', not {covariance!r}")
        if ordered and y.dim() == 2:
            raise SettingsError("means of several dimensions have no order; use ordered=False and symmetrised_bridge")
        self.y, self.num_components = y, whole_number("num_components", num_components, 1)
        self.prior = MixturePrior.richardson_green(y) if prior is None else prior
        columns = 1 if y.dim() == 1 else y.shape[1]
        if self.prior.dim != columns:
            raise ShapeError(f"the prior has dimension {self.prior.dim}, the data {columns}")
        self.covariance, self.equal_scales, self.ordered = covariance, equal_scales, ordered
        if self.correlated and self.prior.relative_precision is not None:
            raise SettingsError("a full covariance goes with a spread of the means, not with a relative_precision")
        if ordered and self.prior.relative_precision is not None:
            raise SettingsError("ordered means go with a spread of the means, not with a relative_precision")

    @property
    def correlated(self) -> bool:
        """Whether the model has correlations."""
        return self.covariance == "full" and self.y.dim() == 2 and self.y.shape[1] > 1

    @property
    def exchangeable(self) -> tuple[str, ...]:
        """Sites whose first dimension is the component; empty with ordered means or one component."""
        if self.ordered or self.num_components == 1:
            return ()
        scales = () if self.equal_scales else ("precision",)
        return ("share", "mean", *scales, *(("correlation",) if self.correlated else ()))

    def __call__(self) -> None:
        """Run the model."""
        values = self.sample_parameters()
        self.observe(values, values["share"].log() if self.num_components > 1 else None)

    def observe(self, values: Mapping[str, Tensor], logits: Tensor | None) -> None:
        """Sample the assignments, enumerated, and observe the data; for models that extend this class."""
        precision, correlation = values["precision"], values.get("correlation")
        z: Tensor | int = 0
        with pyro.plate("data", len(self.y)):
            if logits is not None:
                z = pyro.sample("assignment", dist.Categorical(logits=logits), infer={"enumerate": "parallel"})
            scales = precision if self.equal_scales else precision[z]
            component = self.component(values["mean"][z], scales, None if correlation is None else correlation[z])
            pyro.sample("y", component, obs=self.y)

    def start(self, num_chains: int = 4, *, seed: int | torch.Generator = 0) -> Tensor:
        """Return an initial point for each chain: the draw of highest density among 200 prior draws.

        Use these points if the prior is wide and chains started at single prior draws converge slowly. Labellings
        differ between chains. Raises ``InitializationError`` if the density is zero at all prior draws of a chain.

        Returns
        -------
        Tensor
            Unconstrained, shape ``(num_chains, d)``, for ``bayeskit.sample(target, initial=...)``.

        Examples
        --------
        >>> import bayeskit as bk
        >>> from bayeskit.models.discrete.mixtures import GaussianMixture, MixturePrior
        >>> y = [-2.1, -1.9, -1.4, 1.6, 2.0, 2.5]
        >>> mixture = GaussianMixture(y, 2, MixturePrior.independent(0.0, 3.0, 3.0, 1.0))
        >>> start = mixture.start(num_chains=4, seed=0)
        >>> start.shape
        torch.Size([4, 6])
        >>> bk.sample(bk.Target.from_pyro(mixture), 4, 20, 20, initial=start, progress=False)
        Draws(4 chains x 20 draws, dim 6, sites: share, precision, mean)
        """
        num_chains = whole_number("num_chains", num_chains, 1)
        target = Target.from_pyro(self, compile=False)
        generator = new_generator(seed, target.device, stream="starting points of a mixture")
        points = torch.cat([target.sample_prior(_CANDIDATES, seed=generator) for _ in range(num_chains)])
        rows = max(1, CHUNK // (len(self.y) * self.num_components))
        density = torch.cat([target.log_density(some) for some in points.split(rows)])
        density = torch.where(density.isfinite(), density, -torch.inf).reshape(num_chains, _CANDIDATES)
        best = density.max(1)
        if not bool(best.values.isfinite().all()):
            raise InitializationError(
                f"the density is zero at {_CANDIDATES} draws from the prior; check the prior, whose scales may be far "
                "from those of the data"
            )
        return points[torch.arange(num_chains, device=points.device) * _CANDIDATES + best.indices]

    def __repr__(self) -> str:
        settings = [f"num_components={self.num_components}"]
        settings += ["covariance='full'"] if self.covariance == "full" else []
        settings += [f"{name}=True" for name in ("equal_scales", "ordered") if getattr(self, name)]
        return f"GaussianMixture(y of shape {tuple(self.y.shape)}, {', '.join(settings)})"

    def log_component_density(self, values: Draws | Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the log of weight times density, for each point and component, ``(*batch, m, K)``.

        ``values`` (Draws or mapping of str to tensor): draws, or the sites, ``{site: (*batch, *shape)}``, as
        :meth:`bayeskit.Target.constrain` returns them. ``x`` (tensor or array): points, shape ``(m,)`` or ``(m, D)`` as
        the data. Raises ``ShapeError`` if the dimension of ``x`` differs from that of the data.
        """
        values, x = site_values(values), as_real("x", x).to(self.y)
        if x.dim() != self.y.dim() or x.shape[1:] != self.y.shape[1:]:
            raise ShapeError(f"x has shape {tuple(x.shape)}; give (m{''.join(f', {n}' for n in self.y.shape[1:])})")
        event = self.y.dim() - 1
        at = -2 - event  # the dimension of the points, left of the components
        precision = values["precision"].unsqueeze(-1 - event) if self.equal_scales else values["precision"]
        correlation = values["correlation"].unsqueeze(-4) if self.correlated else None
        component = self.component(values["mean"].unsqueeze(at), precision.unsqueeze(at), correlation)
        density = component.log_prob(x.unsqueeze(1))
        if self.num_components == 1:
            return density
        share = values["share"]
        return density + (share.log() - share.sum(-1, keepdim=True).log()).unsqueeze(-2)

    def log_density(self, values: Draws | Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the log mixture density at points, ``(*batch, m)``; see :meth:`log_component_density`."""
        return self.log_component_density(values, x).logsumexp(-1)

    def responsibilities(self, values: Draws | Mapping[str, Tensor]) -> Tensor:
        """Return the component probabilities of each observation given ``values``, shape ``(*batch, n, K)``."""
        return self.log_component_density(values, self.y).softmax(-1)

    def component(self, mean: Tensor, precision: Tensor, correlation: Tensor | None) -> dist.TorchDistribution:
        """Return the distribution of an observation given its component's parameters."""
        sd = precision.rsqrt()
        if correlation is not None:
            return dist.MultivariateNormal(mean, scale_tril=sd.unsqueeze(-1) * correlation)
        return dist.Normal(mean, sd).to_event(self.y.dim() - 1)

    def sample_parameters(self) -> dict[str, Tensor]:
        """Sample the parameters only; for models that extend this class."""
        prior, count, event = self.prior, self.num_components, self.y.dim() - 1
        location, values = self._like_data(prior.location), {}
        if prior.rate_prior is not None:
            shape, inverse_scale = prior.rate_prior
            rate = pyro.sample("rate", dist.Gamma(shape, self._like_data(inverse_scale)).to_event(event))
        elif prior.rate is not None:
            rate = self._like_data(prior.rate)
        else:
            raise SettingsError("the prior has no rate of the precisions; create it with a method of MixturePrior")
        scales = _BatchableGamma(torch.full_like(rate, prior.shape), rate).to_event(event)
        if self.equal_scales:
            values["precision"] = pyro.sample("precision", scales)
        with pyro.plate("components", count):
            if count > 1:
                values["share"] = pyro.sample("share", dist.Gamma(location.new_tensor(prior.concentration), 1.0))
            if not self.equal_scales:
                values["precision"] = pyro.sample("precision", scales)
            if self.correlated:
                flat = dist.LKJCholesky(self.y.shape[1], location.new_tensor(prior.correlation))
                values["correlation"] = pyro.sample("correlation", flat)
            if not self.ordered:
                spread = self._spread(values["precision"])
                values["mean"] = pyro.sample("mean", dist.Normal(location, spread).to_event(event))
        if self.ordered:
            normal = dist.Normal(location, self._spread(values["precision"]))
            values["mean"] = pyro.sample("mean", OrderedSample(normal, count))
        return values

    def _spread(self, precision: Tensor) -> Tensor:
        spread, relative = self.prior.spread, self.prior.relative_precision
        if spread is not None:
            return self._like_data(spread)
        if relative is None:
            raise SettingsError("the prior has no spread of the means; create it with a method of MixturePrior")
        return (relative * precision).rsqrt()

    def _like_data(self, x: Tensor) -> Tensor:
        """Return values per dimension in shape ``(D,)``, or ``()`` if the data are a vector."""
        x = x.to(self.y)
        return x.squeeze(0) if self.y.dim() == 1 else x


# Mixtures with an unknown number of components.


class UnknownSizeMixture:
    """Pyro model of a mixture with an unknown number of components, enumerated like the assignments.

    Given ``k`` components, the weights are the first ``k`` gamma variables ``share`` over their sum (Dirichlet for
    every ``k``); the other components' parameters have their prior. The evidence is the prior mean of the evidence over
    ``k``. The posterior of ``k`` follows from one run (:meth:`size_probabilities`). Components are not exchangeable.

    Parameters
    ----------
    mixture : GaussianMixture
        With the maximum number of components ``K``, at least 2, and ``ordered=False``.
    probabilities : Tensor or array, optional
        Prior of ``1, ..., K`` components, shape ``(K,)``, normalized; default uniform.

    Raises
    ------
    SettingsError
        If the mixture has one component or ordered means, or a probability is negative or not finite.
    ShapeError
        If ``probabilities`` does not have shape ``(K,)``.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, UnknownSizeMixture, galaxy_velocities
    >>> model = UnknownSizeMixture(GaussianMixture(galaxy_velocities(), num_components=6))
    >>> bk.Target.from_pyro(model).dim
    19
    """

    def __init__(self, mixture: GaussianMixture, probabilities: Tensor | None = None) -> None:
        count = mixture.num_components
        if count < 2 or mixture.ordered:
            raise SettingsError("give a mixture with two or more components and ordered=False")
        uniform = torch.full((count,), 1 / count, dtype=mixture.y.dtype, device=mixture.y.device)
        given = uniform if probabilities is None else as_numbers("probabilities", probabilities).to(uniform)
        if given.shape != uniform.shape:
            raise ShapeError(f"probabilities have shape {tuple(given.shape)}; give one for each of {count} components")
        if not bool((given >= 0).all() and given.isfinite().all() and given.sum() > 0):
            raise SettingsError(f"probabilities must be nonnegative and not all zero, not {given.tolist()}")
        self.mixture, self.probabilities = mixture, given / given.sum()

    def __call__(self) -> None:
        """Run the model."""
        mixture = self.mixture
        values = mixture.sample_parameters()
        slots = torch.arange(mixture.num_components, device=mixture.y.device)
        last = pyro.sample("last", dist.Categorical(self.probabilities), infer={"enumerate": "parallel"})
        absent = slots > last.unsqueeze(-1)
        mixture.observe(values, values["share"].log().masked_fill(absent, -torch.inf))

    def __repr__(self) -> str:
        return f"UnknownSizeMixture({self.mixture!r})"

    def size_probabilities(self, values: Draws | Mapping[str, Tensor]) -> Tensor:
        """Return the probability of ``1, ..., K`` components given parameters and data, ``(*batch, K)``.

        Its mean over posterior draws is the posterior of the number of components. ``values`` (Draws or mapping of str
        to tensor): draws, or the sites, ``{site: (*batch, *shape)}``.
        """
        values = site_values(values)
        joint = self.mixture.log_component_density(values, self.mixture.y)  # (*batch, n, K)
        share = values["share"].log()
        normalised = share - share.logsumexp(-1, keepdim=True)
        each = joint.logcumsumexp(-1) - normalised.logcumsumexp(-1).unsqueeze(-2)
        return (each.sum(-2) + self.probabilities.log()).softmax(-1)
