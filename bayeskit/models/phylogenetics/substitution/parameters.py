"""Parameters of a model that are either given as numbers or left to a prior."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError

#: What a user may give for a parameter: numbers fix it, a distribution is its prior, None takes the usual prior.
Given = float | Sequence[float] | Tensor | TorchDistribution | None


@dataclass(frozen=True)
class Parameter:
    """What is known of one parameter beforehand.

    Attributes
    ----------
    usual_prior : callable
        Makes the prior that is taken where the user names none, with dtype and device of the tensor given.
    size : int or None
        Length of the vector; None for a number.
    upper : float
        All values lie above 0 and below this.

    Examples
    --------
    >>> from pyro.distributions import Exponential
    >>> Parameter(lambda like: Exponential(like.new_ones(()))).checked("GammaRates, shape", 2)
    tensor(2., dtype=torch.float64)
    """

    usual_prior: Callable[[Tensor], TorchDistribution]
    size: int | None = None
    upper: float = math.inf

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one value, `()` or `(size,)`."""
        return () if self.size is None else (self.size,)

    def checked(self, place: str, given: Given) -> Tensor | TorchDistribution | None:
        """Return what the user gave, numbers as a tensor.

        Parameters
        ----------
        place : str
            Where the parameter belongs, for messages.
        given : float, sequence of float, Tensor, TorchDistribution or None
            Values, shape `(*batch, *event_shape)`, or a prior.

        Raises
        ------
        SettingsError
            If values lie outside the domain, or a prior has other shapes or reaches outside the domain.
        ShapeError
            If values have another shape.
        """
        if given is None:
            return None
        if isinstance(given, torch.distributions.Distribution):
            self._check_prior(place, given)
            return given
        try:
            values = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"{place}: {given!r} is neither numbers nor a prior. {self._remedy}") from error
        if not values.is_floating_point() or not isinstance(given, Tensor):
            # Plain numbers keep all their digits.
            values = torch.as_tensor(given, dtype=torch.float64)
        self.check_shape(place, values)
        if not ((values > 0) & (values < self.upper)).all():
            raise SettingsError(f"{place}: {values.tolist()} does not lie {self._domain}. {self._remedy}")
        return values

    def check_shape(self, place: str, values: Tensor) -> None:
        """Refuse values without the event shape.

        Raises
        ------
        ShapeError
            If the last dimension is missing or has another size.
        """
        if self.size is not None and (values.dim() == 0 or values.shape[-1] != self.size):
            raise ShapeError(f"{place}: shape {tuple(values.shape)} is not (*batch, {self.size}). {self._remedy}")

    @property
    def _domain(self) -> str:
        return "above 0" if self.upper == math.inf else f"between 0 and {self.upper:g}"

    @property
    def _remedy(self) -> str:
        values = "one number" if self.size is None else f"{self.size} numbers"
        return f"Remedy: give {values} {self._domain}, a prior over such, or nothing for the usual prior."

    def _check_prior(self, place: str, prior: TorchDistribution) -> None:
        if prior.batch_shape or tuple(prior.event_shape) != self.event_shape:
            shapes = tuple(prior.batch_shape), tuple(prior.event_shape)
            raise SettingsError(f"{place}: the prior has batch_shape and event_shape {shapes}. {self._remedy}")
        support: Any = prior.support
        for outside in (-1.0, 2.0 * self.upper):
            if math.isfinite(outside) and support.check(torch.full(self.event_shape, outside)).all():
                raise SettingsError(f"{place}: the prior {prior} allows {outside:g}. {self._remedy}")


class Parameterized:
    """Base of frozen dataclasses with fields that are parameters.

    A subclass names them in `parameters`. Each such field holds values as a tensor, a prior, or None for the usual
    prior.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.substitution import HKY85
    >>> model = HKY85(base_frequencies=[0.4, 0.2, 0.1, 0.3])
    >>> sorted(model.priors(torch.zeros(())))
    ['kappa']
    >>> sorted(model.with_parameters({"kappa": torch.tensor(2.0)}).priors(torch.zeros(())))
    []
    """

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({})

    def __post_init__(self) -> None:
        """Check the fields that are parameters."""
        for name, parameter in self.parameters.items():
            given = parameter.checked(f"{type(self).__name__}, {name}", getattr(self, name))
            object.__setattr__(self, name, given)

    def priors(self, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of all parameters that have no value.

        Parameters
        ----------
        like : Tensor
            Has the dtype and device of the usual priors.

        Returns
        -------
        dict of str to TorchDistribution
            By name of the parameter.
        """
        free = {name: getattr(self, name) for name in self.parameters}
        return {
            name: self.parameters[name].usual_prior(like) if prior is None else prior
            for name, prior in free.items()
            if not isinstance(prior, Tensor)
        }

    def with_parameters(self, values: Mapping[str, Tensor]) -> Self:
        """Return the same model with values for some of its parameters.

        The numbers are not checked, so that this may be mapped and traced; their shapes are. Names of parameters
        that the model does not have are passed over.

        Parameters
        ----------
        values : mapping of str to Tensor
            Shapes `(*batch, *event_shape)`.

        Raises
        ------
        ShapeError
            If values do not have the shape of the parameter.
        """
        made = copy.copy(self)
        for name, parameter in self.parameters.items():
            if name in values:
                parameter.check_shape(name, values[name])
                object.__setattr__(made, name, values[name])
        return made

    @property
    def batch_shape(self) -> torch.Size:
        """The shape over which the values of the parameters are batched."""
        found = {name: getattr(self, name) for name in self.parameters}
        return torch.broadcast_shapes(
            *(
                values.shape[: values.dim() - len(self.parameters[name].event_shape)]
                for name, values in found.items()
                if isinstance(values, Tensor)
            )
        )

    def _values(self, name: str, like: Tensor) -> Tensor:
        """Return the values of a parameter with the dtype and device of `like`."""
        values = getattr(self, name)
        if not isinstance(values, Tensor):
            model = type(self).__name__
            raise SettingsError(
                f"{model}, {name}: it is left to a prior and has no value here. Remedy: give one, as in "
                f"{model}({name}=...), or use with_parameters."
            )
        return values.to(dtype=like.dtype, device=like.device)
