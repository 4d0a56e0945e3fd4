"""Normal approximation of the parameters of substitution and site rates, in unconstrained coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Transform, constraints

from bayeskit.errors import SettingsError
from bayeskit.extend import bijection, global_stream, inside, new_generator, standard_gamma, support_of
from bayeskit.models.phylogenetics._branch_length_priors import in_double_precision

#: Number of draws that locate the prior.
_LOCATING = 1001
#: Share of defensive draws from the prior, and degrees of freedom of the others.
_FROM_PRIOR, _FREEDOM = 0.1, 5.0


class ParameterDraws(NamedTuple):
    """Values of parameters by name, `(draws, *event_shape)`, and their log density `(draws,)`."""

    values: dict[str, Tensor]
    log_prob: Tensor


class _Site(NamedTuple):
    """One parameter."""

    prior: dist.TorchDistribution
    support: constraints.Constraint
    transform: Transform  # from unconstrained coordinates
    columns: slice  # of the coordinates


class ParameterGuide:
    """Multivariate normal distribution of all parameters in unconstrained coordinates, shared by all topologies.

    A vector of `num_parameters` numbers describes it: the mean, the logarithms of the diagonal of the Cholesky factor,
    and the rest of this factor, in units of the prior's median and spread. Zeros approximate the prior.

    Parameters
    ----------
    priors : mapping of str to TorchDistribution
        Of each parameter, without batch dimensions; may be empty.

    Raises
    ------
    SettingsError
        If a prior cannot be sampled, or its support has no known bijection to unconstrained space.

    Examples
    --------
    >>> guide = ParameterGuide({"kappa": dist.LogNormal(torch.tensor(1.0), torch.tensor(0.5))})
    >>> drawn = guide.rsample(torch.zeros(guide.num_parameters).double(), 3, torch.Generator().manual_seed(0))
    >>> drawn.values["kappa"].shape, guide.num_parameters
    (torch.Size([3]), 2)
    """

    def __init__(self, priors: Mapping[str, dist.TorchDistribution]) -> None:
        self._sites: dict[str, _Site] = {}
        centres, spreads, used = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)], 0
        for name, given in priors.items():
            prior = in_double_precision(given)
            try:
                support = support_of(prior)
                transform = bijection(support)
                with global_stream(new_generator(0, stream=f"prior of {name}")):
                    values = inside(support, prior.sample((_LOCATING,)))
            except NotImplementedError as error:
                raise SettingsError(
                    f"{name}: the prior {type(prior).__name__} cannot be sampled, or its support is unknown. Remedy: "
                    "give a proper distribution such as LogNormal, Gamma or Dirichlet, or fix the parameter."
                ) from error
            coordinates = transform.inv(values).reshape(_LOCATING, -1)
            low, centre, high = coordinates.quantile(coordinates.new_tensor([0.16, 0.5, 0.84]), dim=0)
            centres.append(centre)
            spreads.append((high - low) / 2)
            self._sites[name] = _Site(prior, support, transform, slice(used, used + len(centre)))
            used += len(centre)
        self.dim = used
        self._centre, self._spread = torch.cat(centres), torch.cat(spreads)
        self._below = torch.tril_indices(used, used, -1)

    @property
    def num_parameters(self) -> int:
        """Length of the vector of parameters."""
        return 2 * self.dim + self.dim * (self.dim - 1) // 2

    def medians(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the values at the mean of the coordinates, `event_shape` each."""
        return {name: value[0] for name, value in self._values(self._moments(parameters)[0][None]).items()}

    def log_prior(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the log prior density of values `(draws, *event_shape)`, `(draws,)`; zero without parameters."""
        return sum((site.prior.log_prob(values[name]) for name, site in self._sites.items()), torch.zeros(()).double())

    def rsample(self, parameters: Tensor, num_draws: int, generator: torch.Generator) -> ParameterDraws:
        """Draw values that are differentiable by `parameters`."""
        mean, factor = self._moments(parameters)
        noise = torch.randn(num_draws, self.dim, generator=generator, dtype=torch.float64)
        coordinates = mean + noise @ factor.T
        log_normal = -0.5 * noise.square().sum(-1) + _log_constant(factor)
        return ParameterDraws(self._values(coordinates), log_normal - self._log_jacobian(coordinates))

    def log_prob(self, parameters: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Return the log density of values `(draws, *event_shape)`, shape `(draws,)`; zero without parameters."""
        if not self.dim:
            return torch.zeros((), dtype=torch.float64)
        mean, factor = self._moments(parameters)
        coordinates = self._coordinates(values)
        noise = _solve(factor, coordinates - mean)
        return -0.5 * noise.square().sum(-1) + _log_constant(factor) - self._log_jacobian(coordinates)

    def draw_defensive(self, parameters: Tensor, num_draws: int, generator: torch.Generator) -> ParameterDraws:
        """Draw for importance sampling: one in ten from the prior, the others from a t distribution."""
        if not self.dim:
            return ParameterDraws({}, torch.zeros(num_draws, dtype=torch.float64))
        mean, factor = self._moments(parameters)
        noise = torch.randn(num_draws, self.dim, generator=generator, dtype=torch.float64)
        half = torch.full((num_draws, 1), _FREEDOM / 2, dtype=torch.float64)
        near = mean + (noise * (half / standard_gamma(half, generator)).sqrt()) @ factor.T
        with global_stream(generator):
            prior = {name: site.prior.sample((num_draws,)) for name, site in self._sites.items()}
        prior = {name: inside(self._sites[name].support, value) for name, value in prior.items()}
        far = torch.rand(num_draws, 1, generator=generator, dtype=torch.float64) < _FROM_PRIOR
        coordinates = torch.where(far, self._coordinates(prior), near)
        values = self._values(coordinates)
        square = _solve(factor, coordinates - mean).square().sum(-1)
        top = (_FREEDOM + self.dim) / 2
        constant = math.lgamma(top) - math.lgamma(_FREEDOM / 2) - 0.5 * self.dim * math.log(_FREEDOM * math.pi)
        log_near = constant - factor.diagonal().log().sum() - top * torch.log1p(square / _FREEDOM)
        parts = (
            log_near - self._log_jacobian(coordinates) + math.log1p(-_FROM_PRIOR),
            self.log_prior(values) + math.log(_FROM_PRIOR),
        )
        return ParameterDraws(values, torch.logaddexp(*parts))

    def _moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and Cholesky factor of the coordinates."""
        mean, log_diagonal, rest = parameters.split([self.dim, self.dim, len(self._below[0])])
        factor = torch.diag_embed(log_diagonal.exp()).index_put(tuple(self._below), rest)
        return self._centre + self._spread * mean, self._spread[:, None] * factor

    def _values(self, coordinates: Tensor) -> dict[str, Tensor]:
        return {name: site.transform(self._part(coordinates, site)) for name, site in self._sites.items()}

    def _coordinates(self, values: Mapping[str, Tensor]) -> Tensor:
        parts = [site.transform.inv(values[name]) for name, site in self._sites.items()]
        return torch.cat([part.reshape(len(part), -1) for part in parts], -1)

    def _part(self, coordinates: Tensor, site: _Site) -> Tensor:
        """Return the coordinates of one parameter, `(draws, *shape)`."""
        part = coordinates[:, site.columns]
        return part if site.prior.event_shape else part[:, 0]

    def _log_jacobian(self, coordinates: Tensor) -> Tensor:
        """Return the log determinant from coordinates to values, `(draws,)`."""
        total = coordinates.new_zeros(len(coordinates))
        for site in self._sites.values():
            part = self._part(coordinates, site)
            total = total + site.transform.log_abs_det_jacobian(part, site.transform(part))
        return total


def _log_constant(factor: Tensor) -> Tensor:
    """Return the log density of a normal distribution at its mean, from its Cholesky factor."""
    return -factor.diagonal().log().sum() - 0.5 * len(factor) * math.log(2 * math.pi)


def _solve(factor: Tensor, deviations: Tensor) -> Tensor:
    """Return the noise `(draws, dim)` that a Cholesky factor turns into deviations of the same shape."""
    return torch.linalg.solve_triangular(factor, deviations.T, upper=False).T
