"""Free parameters of a substitution model and of the rates of sites, as one unconstrained vector."""

from __future__ import annotations

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import biject_to

from bayeskit.core.randomness import global_stream
from bayeskit.models.phylogenetics.site_rates import Categories, SiteRates
from bayeskit.models.phylogenetics.substitution import SubstitutionModel

__all__ = ["ParameterSpace"]


class ParameterSpace:
    """The parameters without a value, with their priors, in float64.

    Parameters
    ----------
    substitution : SubstitutionModel
    site_rates : SiteRates or None
    """

    def __init__(self, substitution: SubstitutionModel, site_rates: SiteRates | None) -> None:
        self.substitution, self.site_rates = substitution, site_rates
        like = torch.zeros((), dtype=torch.float64)
        self.priors: dict[str, TorchDistribution] = substitution.priors(like)
        if site_rates is not None:
            self.priors |= site_rates.priors(like)
        self._transforms = {name: biject_to(prior.support) for name, prior in self.priors.items()}
        self._sizes = {
            name: self._transforms[name].inverse_shape(torch.Size(prior.event_shape)).numel()
            for name, prior in self.priors.items()
        }

    @property
    def dim(self) -> int:
        """Number of unconstrained coordinates."""
        return sum(self._sizes.values())

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the priors, `(count, dim)`."""
        parts = [torch.zeros(count, 0, dtype=torch.float64)]
        for name, prior in self.priors.items():
            with global_stream(generator):
                values = prior.sample((count,)).to(torch.float64)
            parts.append(self._transforms[name].inv(values).reshape(count, self._sizes[name]))
        return torch.cat(parts, -1)

    def constrain(self, position: Tensor) -> dict[str, Tensor]:
        """Return the values of the parameters at coordinates `(*batch, dim)`."""
        return {name: self._transforms[name](part) for name, part in self._split(position).items()}

    def log_prior(self, position: Tensor) -> Tensor:
        """Return the log prior density of coordinates, Jacobian included, `(*batch, dim) -> (*batch)`."""
        total = position.new_zeros(position.shape[:-1])
        for name, part in self._split(position).items():
            transform, prior = self._transforms[name], self.priors[name]
            values = transform(part)
            jacobian = transform.log_abs_det_jacobian(part, values)
            total = total + prior.log_prob(values).to(total) + jacobian.reshape(*total.shape, -1).sum(-1)
        return total

    def models(self, position: Tensor) -> tuple[SubstitutionModel, Categories | None]:
        """Return the substitution model and the rates of sites at coordinates `(*batch, dim)`."""
        values = self.constrain(position)
        like = position.new_zeros(())
        rates = None if self.site_rates is None else self.site_rates.with_parameters(values).categories(like)
        return self.substitution.with_parameters(values), rates

    def _split(self, position: Tensor) -> dict[str, Tensor]:
        parts = position.split(list(self._sizes.values()), -1) if self._sizes else ()
        scalar = {name for name, prior in self.priors.items() if not prior.event_shape}
        return {name: part[..., 0] if name in scalar else part for name, part in zip(self._sizes, parts, strict=True)}
