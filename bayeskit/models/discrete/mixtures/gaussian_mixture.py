"""Finite mixtures of normal distributions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import InitializationError, SettingsError, ShapeError
from bayeskit.models.discrete.inputs import as_real, site_values
from bayeskit.models.discrete.mixtures.batchable_gamma import BatchableGamma
from bayeskit.models.discrete.mixtures.inputs import as_observations
from bayeskit.models.discrete.mixtures.ordered_sample import OrderedSample
from bayeskit.models.discrete.mixtures.priors import MixturePrior
from bayeskit.target import Target

Covariance = Literal["diagonal", "full"]
CANDIDATES, CHUNK = 200, 4_000_000


class GaussianMixture:
    """Create a mixture of ``K`` normal distributions as a Pyro model without arguments; assignments are summed out.

    The sites, for observations in ``D`` dimensions (no ``D`` where the data are one column of shape ``(n,)``):

    =============== =============================== ===============================================================
    ``share``       ``(K,)``, where ``K > 1``       gamma variables; weights are shares of their sum
    ``rate``        ``(D,)``, where it has a prior  shared rate of the precisions
    ``mean``        ``(K, D)``
    ``precision``   ``(K, D)``                      reciprocal variances; ``(D,)`` with equal scales
    ``correlation`` ``(K, D, D)``, where full       Cholesky factor of the correlations
    ``assignment``  ``(n,)``                        the component of each observation, marked for enumeration
    =============== =============================== ===============================================================

    Independent gamma variables over their sum are Dirichlet, and permuting the components permutes coordinates of the
    unconstrained vector, of every site in :attr:`exchangeable`.

    Parameters
    ----------
    y : Tensor or array
        Observations, shape ``(n,)`` or ``(n, D)``.
    num_components : int
        ``K``.
    prior : MixturePrior, optional
        By default that of Richardson and Green for these data.
    covariance : {"diagonal", "full"}, default "diagonal"
    equal_scales : bool, default False
        One vector of precisions for all components.
    ordered : bool, default False
        Let the means ascend (one column of data only). The prior density is then ``K!`` times as large, and the
        evidence the same; one of ``K!`` equal modes is left.

    Raises
    ------
    DataError
        If there are no observations, or some are not finite.
    ShapeError
        If ``y`` is neither a vector nor a matrix, or the prior has another dimension.
    SettingsError
        If ``num_components`` is less than one, or settings do not go together.

    References
    ----------
    Richardson, S., Green, P. J. (1997). On Bayesian analysis of mixtures with an unknown number of components. Journal
    of the Royal Statistical Society B 59, 731-792.

    Fruehwirth-Schnatter, S. (2006). Finite Mixture and Markov Switching Models. Springer.

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
        """The sites whose first dimension is the component; with ordered means there are none."""
        if self.ordered or self.num_components == 1:
            return ()
        scales = () if self.equal_scales else ("precision",)
        return ("share", "mean", *scales, *(("correlation",) if self.correlated else ()))

    def __call__(self) -> None:
        """Run the model."""
        values = self.sample_parameters()
        mean, precision, correlation = values["mean"], values["precision"], values.get("correlation")
        z: Tensor | int = 0
        with pyro.plate("data", len(self.y)):
            if self.num_components > 1:
                weights = dist.Categorical(logits=values["share"].log())
                z = pyro.sample("assignment", weights, infer={"enumerate": "parallel"})
            component = self.component(
                mean[z],
                precision if self.equal_scales else precision[z],
                None if correlation is None else correlation[z],
            )
            pyro.sample("y", component, obs=self.y)

    def start(self, num_chains: int = 4, seed: int | torch.Generator = 0) -> Tensor:
        """Return a point for each chain to start from: the best of many draws from the prior.

        A prior as wide as the data puts few draws near the posterior, and chains that start far off take long there.
        Each has a labelling of its own.

        Parameters
        ----------
        num_chains : int, default 4
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor
            Unconstrained, shape ``(num_chains, d)``, for ``bayeskit.sample(target, initial=...)``.

        Raises
        ------
        InitializationError
            If the density is zero at every draw of a chain.

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
        points = torch.cat([target.sample_prior(CANDIDATES, generator) for _ in range(num_chains)])
        rows = max(1, CHUNK // (len(self.y) * self.num_components))
        density = torch.cat([target.log_density(some) for some in points.split(rows)])
        density = torch.where(density.isfinite(), density, -torch.inf).reshape(num_chains, CANDIDATES)
        best = density.max(1)
        if not bool(best.values.isfinite().all()):
            raise InitializationError(
                f"the density is zero at {CANDIDATES} draws from the prior; look at the prior, whose scales may be far "
                "from those of the data"
            )
        return points[torch.arange(num_chains, device=points.device) * CANDIDATES + best.indices]

    def __repr__(self) -> str:
        settings = [f"num_components={self.num_components}"]
        settings += ["covariance='full'"] if self.covariance == "full" else []
        settings += [f"{name}=True" for name in ("equal_scales", "ordered") if getattr(self, name)]
        return f"GaussianMixture(y of shape {tuple(self.y.shape)}, {', '.join(settings)})"

    def log_component_density(self, values: Draws | Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the log density of points under every component, times its weight.

        Parameters
        ----------
        values : Draws or mapping of str to Tensor
            Draws, or the sites, ``{site: (*batch, *shape)}``, as :meth:`bayeskit.Target.constrain` returns them.
        x : Tensor or array
            Points, shape ``(m,)`` or ``(m, D)`` like the data.

        Returns
        -------
        Tensor
            Shape ``(*batch, m, K)``.

        Raises
        ------
        ShapeError
            If ``x`` is not shaped like the data.
        """
        values, x = site_values(values), as_real("x", x).to(self.y)
        if x.dim() != self.y.dim() or x.shape[1:] != self.y.shape[1:]:
            raise ShapeError(f"x has shape {tuple(x.shape)}; give (m{''.join(f', {n}' for n in self.y.shape[1:])})")
        event = self.y.dim() - 1
        at = -2 - event  # where the points stand, left of the components
        precision = values["precision"].unsqueeze(-1 - event) if self.equal_scales else values["precision"]
        correlation = values["correlation"].unsqueeze(-4) if self.correlated else None
        component = self.component(values["mean"].unsqueeze(at), precision.unsqueeze(at), correlation)
        density = component.log_prob(x.unsqueeze(1))
        if self.num_components == 1:
            return density
        share = values["share"]
        return density + (share.log() - share.sum(-1, keepdim=True).log()).unsqueeze(-2)

    def log_density(self, values: Draws | Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the log density of points under the mixture, shape ``(*batch, m)``; as above."""
        return self.log_component_density(values, x).logsumexp(-1)

    def responsibilities(self, values: Draws | Mapping[str, Tensor]) -> Tensor:
        """Return the probability that each observation comes from each component, ``(*batch, n, K)``; as above."""
        return self.log_component_density(values, self.y).softmax(-1)

    def component(self, mean: Tensor, precision: Tensor, correlation: Tensor | None) -> dist.TorchDistribution:
        """Create the distribution of an observation of one component."""
        sd = precision.rsqrt()
        if correlation is not None:
            return dist.MultivariateNormal(mean, scale_tril=sd.unsqueeze(-1) * correlation)
        return dist.Normal(mean, sd).to_event(self.y.dim() - 1)

    def sample_parameters(self) -> dict[str, Tensor]:
        """Run the statements of the parameters alone, for models that extend this one."""
        prior, count, event = self.prior, self.num_components, self.y.dim() - 1
        location, values = self._like_data(prior.location), {}
        if prior.rate_prior is not None:
            shape, inverse_scale = prior.rate_prior
            rate = pyro.sample("rate", dist.Gamma(shape, self._like_data(inverse_scale)).to_event(event))
        elif prior.rate is not None:
            rate = self._like_data(prior.rate)
        else:
            raise SettingsError("the prior has no rate of the precisions; make it by a method of MixturePrior")
        scales = BatchableGamma(torch.full_like(rate, prior.shape), rate).to_event(event)
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
            raise SettingsError("the prior has no spread of the means; make it by a method of MixturePrior")
        return (relative * precision).rsqrt()

    def _like_data(self, x: Tensor) -> Tensor:
        """Return numbers of each dimension, shape ``(D,)``, or ``()`` where the data are a vector."""
        x = x.to(self.y)
        return x.squeeze(0) if self.y.dim() == 1 else x
