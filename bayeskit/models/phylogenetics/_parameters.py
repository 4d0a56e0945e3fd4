"""Free parameters of substitution models and of the rates of sites, as one unconstrained vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import bijection, coordinate_log_density, draw_coordinates, global_stream, inside, support_of
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._branch_length_priors import in_double_precision
from bayeskit.models.phylogenetics._partitions import Partition
from bayeskit.models.phylogenetics._site_rates import Categories, SiteRates, one_rate
from bayeskit.models.phylogenetics._substitution import JC69, SubstitutionModel


class _Coordinates:
    """Values with priors as one vector of unconstrained coordinates in float64.

    SettingsError if a prior has no unconstrained coordinates.
    """

    def __init__(self, priors: Mapping[str, TorchDistribution]) -> None:
        self.priors = {name: in_double_precision(prior) for name, prior in priors.items()}
        try:
            self._transforms = {name: bijection(support_of(prior)) for name, prior in self.priors.items()}
        except NotImplementedError as error:
            raise SettingsError(
                f"a prior of {', '.join(self.priors)} has no unconstrained coordinates ({error}). Remedy: give another "
                "prior, or the value of the parameter."
            ) from error
        shapes = [
            self._transforms[name].inverse_shape(torch.Size(prior.event_shape)) for name, prior in self.priors.items()
        ]
        self._shapes, self._sizes = shapes, [shape.numel() for shape in shapes]

    @property
    def dim(self) -> int:
        """Number of unconstrained coordinates."""
        return sum(self._sizes)

    def _pieces(self, u: Tensor) -> Iterator[tuple[str, TorchDistribution, Tensor]]:
        pieces = u.split(self._sizes, -1) if self.priors else ()
        for (name, prior), piece, shape in zip(self.priors.items(), pieces, self._shapes, strict=True):
            yield name, prior, piece.reshape(u.shape[:-1] + shape)

    def values(self, u: Tensor) -> dict[str, Tensor]:
        """Return the value of each parameter, `(*batch, dim) -> (*batch, *event_shape)`."""
        return {
            name: inside(support_of(prior), self._transforms[name](piece)) for name, prior, piece in self._pieces(u)
        }

    def coordinates(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the coordinates of values of each parameter, `(*batch, *event_shape) -> (*batch, dim)`."""
        pieces = [torch.empty(0, dtype=torch.float64)]
        for name, prior in self.priors.items():
            piece = self._transforms[name].inv(values[name])
            pieces.append(piece.reshape(*values[name].shape[: values[name].dim() - len(prior.event_shape)], -1))
        return torch.cat(pieces, -1)

    def log_prior(self, u: Tensor) -> Tensor:
        """Return the log prior density of the coordinates, `(*batch, dim) -> (*batch)`."""
        total = u.new_zeros(u.shape[:-1])
        for name, prior, piece in self._pieces(u):
            found = coordinate_log_density(prior, piece)
            if found is None:
                transform = self._transforms[name]
                value = inside(support_of(prior), transform(piece))
                jacobian = transform.log_abs_det_jacobian(piece, value)
                found = prior.log_prob(value) + jacobian.reshape(total.shape)
            total = total + found
        return total

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw coordinates from the prior, `(num_draws, dim)`; SettingsError if a prior cannot be sampled."""
        parts = [torch.empty(num_draws, 0, dtype=torch.float64)]
        for (name, prior), size in zip(self.priors.items(), self._sizes, strict=True):
            try:
                with global_stream(generator):
                    drawn = draw_coordinates(prior, torch.Size((num_draws,)))
                    if drawn is None:
                        drawn = self._transforms[name].inv(prior.sample((num_draws,)))
            except NotImplementedError as error:
                raise SettingsError(
                    f"{name}: {type(prior).__name__} cannot be sampled, and may be improper. Remedy: give a proper "
                    "prior, or the value of the parameter."
                ) from error
            parts.append(drawn.reshape(num_draws, size).to(torch.float64))
        return torch.cat(parts, -1)


class FreeParameters(_Coordinates):
    """Parameters of a substitution model and site rates without a value."""

    def __init__(self, substitution: SubstitutionModel, site_rates: SiteRates | None) -> None:
        self.substitution, self.site_rates = substitution, site_rates
        like = torch.empty(0, dtype=torch.float64)
        super().__init__(substitution.priors(like) | ({} if site_rates is None else site_rates.priors(like)))

    def parts(self, u: Tensor) -> list[tuple[SubstitutionModel, Categories | None]]:
        """Return the substitution model and the rates of sites, as numbers, of the one part, at `(*batch, dim)`."""
        values = self.values(u)
        rates = None if self.site_rates is None else self.site_rates.with_parameters(values)
        numbers = None if rates is None else rates.category_numbers(u.new_zeros(()))
        return [(self.substitution.with_parameters(values), numbers)]


class PartitionParameters(_Coordinates):
    """Parameters of a partition without a value, shares of its relative rates included."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.substitution, self.site_rates = partition.substitution, partition.site_rates
        super().__init__(partition.priors(torch.empty(0, dtype=torch.float64)))

    def parts(self, u: Tensor) -> list[tuple[SubstitutionModel, Categories]]:
        """Return the substitution model and the rates of sites, as numbers, of each subset at `(*batch, dim)`."""
        found = []
        for subset, rate, own in self.partition.arguments(u.new_ones(*u.shape[:-1], 1), self.values(u)):
            rates, none = self.site_rates[subset], u.new_zeros(())
            categories = one_rate(none) if rates is None else rates.with_parameters(own).category_numbers(none)
            # The relative rate, by which branch lengths are multiplied, does the same to the rates of sites.
            scaled = categories._replace(rates=categories.rates * rate)
            found.append((self.substitution[subset].with_parameters(own), scaled))
        return found


def free_parameters(
    data: Alignment | Partition, substitution: SubstitutionModel | None, site_rates: SiteRates | None
) -> FreeParameters | PartitionParameters:
    """Return the free parameters of the models of an alignment, or of a partition, which has its own."""
    if isinstance(data, Partition):
        return PartitionParameters(data)
    return FreeParameters(JC69() if substitution is None else substitution, site_rates)
