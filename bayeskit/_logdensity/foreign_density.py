"""Models of other packages as densities: their own functions, compiled by their own libraries."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from bayeskit._compiler import Compile, Cost, is_traced
from bayeskit._core.evaluation import Evaluation, Evaluator
from bayeskit._core.untraceable import OfAnotherLibrary
from bayeskit._logdensity.pyro_density import NO_DATA, Site
from bayeskit.errors import DataError, SettingsError


class ForeignFunctions(Protocol):
    """An evaluator of another library, which weights both parts of a density."""

    def __call__(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate rows ``(n, d)`` at inverse temperatures ``(n,)``."""
        ...

    def weighted(self, u: Tensor, prior: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log prior and log likelihood ``(n,)``, and the gradient of their sum with weights ``(n,)`` each."""
        ...

    def values(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood of rows, ``(n, d) -> (n,)``."""
        ...


class ForeignDensity(ABC):
    """A model of another package, split into prior and likelihood; the source of its own evaluators.

    Methods take rows of unconstrained vectors ``(n, d)`` in double precision.
    """

    #: Name of the package, for messages.
    package: str
    #: Whether prior and likelihood are known apart, and vectors are drawn from the prior.
    is_split, draws_prior = True, True
    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(
        self,
        sites: tuple[Site, ...],
        observed: Mapping[str, Tensor],
        constant: Mapping[str, Tensor],
        dimensions: Mapping[str, tuple[str | None, ...]],
        labels: Mapping[str, tuple[Any, ...]],
        improper_sites: tuple[str, ...] = (),
    ) -> None:
        self.sites, self.dim = sites, sites[-1].stop
        self._observed, self._constant = dict(observed), dict(constant)
        self._dimensions = dict(dimensions)
        #: Labels by name of a dimension.
        self.categories = dict(labels)
        #: Sites whose prior has no integral.
        self.improper_sites = improper_sites
        self.observed_sites = tuple(observed)
        #: Why the log likelihood of single observations is not known, if it is not.
        self.no_pointwise = "" if observed else NO_DATA
        #: Which data of a site count, of the sites of which a mask leaves some out.
        self.counted: dict[str, Tensor] = {}
        #: Terms of the likelihood that are no data.
        self.factor_sites: tuple[str, ...] = ()
        self.data = [*observed.values(), *constant.values()]

    # -- what an adapter computes -----------------------------------------------------------

    @property
    @abstractmethod
    def functions(self) -> ForeignFunctions:
        """The density and its gradient."""

    @abstractmethod
    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites, ``(n, *shape)``, and of deterministic ones."""

    @abstractmethod
    def vectors(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of values ``(n, *shape)``; DataError for values outside the support."""

    @abstractmethod
    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained|, ``(n,)``."""

    @abstractmethod
    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation, ``(n, *shape)`` by observed site."""

    @abstractmethod
    def prior_draws(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Return vectors drawn from the prior, ``(num_draws, d)``."""

    @abstractmethod
    def predictive(
        self,
        u: Tensor,
        generator: torch.Generator,
        redraw: Collection[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Draw data at each vector, ``(n, *shape)`` by site, for other arguments where there are any."""

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions are made again where they are needed.
        return {k: v for k, v in self.__dict__.items() if not isinstance(getattr(type(self), k, None), cached_property)}

    @property
    def has_likelihood(self) -> bool:
        """Whether there are data or factors."""
        return bool(self.observed_sites or self.factor_sites)

    def require_prior_draws(self) -> None:
        """Raise ``SettingsError`` if the prior cannot be drawn."""
        if self.improper_sites:
            name = self.improper_sites[0]
            raise SettingsError(f"the prior of {name!r} is improper and cannot be drawn; give a proper one")

    def require_inside(self, values: Mapping[str, Tensor], u: Tensor) -> None:
        """Raise ``DataError`` for values ``(n, *shape)`` that their unconstrained vectors do not give back."""
        back = self.values(u)
        for site in self.sites:
            given, again = values[site.name].to(torch.float64).reshape(len(u), -1), back[site.name].reshape(len(u), -1)
            fine = ((given - again).abs() <= 1e-6 * (1 + given.abs())).all(-1)
            if not bool(fine.all()):
                raise DataError(f"{int((~fine).sum())} values of site {site.name!r} lie outside of its support")

    # -- what densities of this package give ------------------------------------------------

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood, ``(n, d) -> (n,)``, differentiable once."""
        if is_traced():
            raise OfAnotherLibrary(f"a log density of {self.package} cannot be traced")
        log_prior, log_likelihood = _Joint.apply(u, self)
        return log_prior, log_likelihood

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector ``(d,)`` of values ``(*shape)``."""
        return self.vectors({name: torch.as_tensor(x).unsqueeze(0) for name, x in values.items()})[0]

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        """Return the evaluator, which serves any number of rows."""
        return self.functions

    def compiled(self, num_vectors: int) -> Evaluator | None:
        """Return the evaluator: the other package has compiled it."""
        return self.functions

    @property
    def cost(self) -> Cost:
        """Nothing is known of the cost."""
        return Cost(0, 1)

    def dimensions(self) -> dict[str, tuple[str | None, ...]]:
        """Return the name along each dimension of each site's value, None where there is none."""
        return self._dimensions

    def named_data(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the data of the observed sites, and constant data."""
        return self._observed, self._constant

    def data_as_given(self) -> dict[str, Tensor]:
        """Return the data of each observed site in double precision."""
        return {name: x.to(torch.float64) for name, x in self._observed.items()}

    @property
    def whole_numbers(self) -> set[str]:
        """Names of the observed sites whose values are whole numbers."""
        return {name for name, x in self._observed.items() if not x.is_floating_point()}


def origin_of(density: Any) -> str:
    """Return what a density that is no Pyro model is made from, for messages."""
    return f"a model of {density.package}" if isinstance(density, ForeignDensity) else "functions"


def kept_inside(u: Tensor) -> Tensor:
    """Return unconstrained vectors of values of which some are rounded to an end of their support."""
    return u.nan_to_num(nan=math.nan, posinf=_TO_ONE, neginf=_TO_ZERO)


#: Logits of the number before one, and logarithms of the least number above zero.
_TO_ONE, _TO_ZERO = 37.0, -745.0


class _Joint(torch.autograd.Function):
    """Log prior and log likelihood of another package, for automatic differentiation."""

    generate_vmap_rule = False

    @staticmethod
    def forward(u: Tensor, density: ForeignDensity) -> tuple[Tensor, Tensor]:
        rows = u.reshape(-1, density.dim)
        log_prior, log_likelihood = density.functions.values(rows)
        return log_prior.reshape(u.shape[:-1]), log_likelihood.reshape(u.shape[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        u, ctx.density = inputs
        ctx.save_for_backward(u)

    @staticmethod
    def backward(ctx: Any, prior: Tensor, likelihood: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (u,) = ctx.saved_tensors
        return _Slope.apply(u, prior, likelihood, ctx.density), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], u: Tensor, density: ForeignDensity) -> tuple[Any, Any]:
        return _Joint.apply(u.movedim(in_dims[0] or 0, 0), density), (0, 0)


class _Slope(torch.autograd.Function):
    """The gradient of log prior and log likelihood with weights; the other package has no second derivatives."""

    generate_vmap_rule = False

    @staticmethod
    def forward(u: Tensor, prior: Tensor, likelihood: Tensor, density: ForeignDensity) -> Tensor:
        weights = (x.expand(u.shape[:-1]).reshape(-1) for x in (prior, likelihood))
        return density.functions.weighted(u.reshape(-1, density.dim), *weights)[2].reshape(u.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.package = inputs[3].package

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        raise RuntimeError(f"a log density of {ctx.package} has no second derivatives")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        u: Tensor,
        prior: Tensor,
        likelihood: Tensor,
        density: ForeignDensity,
    ) -> tuple[Any, Any]:
        rows, *weights = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((u, prior, likelihood), in_dims[:3], strict=True)
        )
        return _Slope.apply(rows, *weights, density), 0
