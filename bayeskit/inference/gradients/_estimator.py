"""Base class of gradient estimators and the exact gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit._core.inputs import whole_number
from bayeskit._core.randomness import new_generator
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.gradients._space import LIMIT, Factorised, Space, space_of

# Gradient estimators: rules that draw weighted points.

#: What is averaged: points `(points, *batch, *event)` to values `(points, *batch)`.
Function = Callable[[Tensor], Tensor]


class WeightedPoints(NamedTuple):
    r"""Points :math:`z_i`, weights :math:`w_i`, offset: :math:`\sum_i w_i f(z_i) + o` estimates :math:`E f(z)`.

    Its gradient, through weights, relaxed points and offset, estimates the gradient of the expectation. This holds for
    every `f`, so the offset has expectation zero and expected gradient zero.

    Attributes
    ----------
    values : Tensor
        Shape `(points, *batch, *event)`.
    weights : Tensor
        Shape `(points, *batch)`; some may be negative.
    offset : Tensor, optional
        Contribution of a control variate that does not depend on `f`, `(*batch)`.
    """

    values: Tensor
    weights: Tensor
    offset: Tensor | None = None


class GradientEstimator(ABC):
    """Base class of gradient estimators for expectations over discrete variables.

    Subclasses are frozen dataclasses.

    Attributes
    ----------
    unbiased : bool
        Whether the gradient estimate is unbiased.
    relaxed : bool
        Whether points may be relaxed or carry gradients; only for bits and one-hot vectors.
    """

    unbiased: ClassVar[bool] = True
    relaxed: ClassVar[bool] = False

    @abstractmethod
    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw weighted points, by default with torch's global generator."""

    @abstractmethod
    def num_evaluations(self, space: Space) -> int:
        """Return the number of function evaluations per estimate."""

    def surrogate(
        self, distribution: Distribution | Space | Tensor, f: Function, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return an estimate of the expectation, `(*batch)`, whose gradient estimates that of the expectation.

        Parameters
        ----------
        distribution : Distribution or Tensor
            Bernoulli, Categorical or OneHotCategorical, also with ``to_event``, or `Autoregressive`; or logits of a
            Categorical, `(*batch, categories)`.
        f : callable
            Function from values `(points, *batch, *event)` to `(points, *batch)`. Values of a Categorical are indices;
            relaxed estimators pass relaxed one-hot vectors.

        Raises
        ------
        ShapeError, SettingsError
            If `f` returns a different shape, or the estimator does not support the distribution.
        """
        drawn = self.points(space_of(distribution), generator)
        total = (drawn.weights * evaluated(f, drawn)).sum(0)
        return total + drawn.offset if isinstance(drawn.offset, Tensor) else total

    def expectation(self, distribution: Distribution | Space | Tensor, f: Function, limit: int = LIMIT) -> Tensor:
        """Return the differentiable expectation by enumeration, `(*batch)`, for arguments as in :meth:`surrogate`.

        SettingsError if the number of points exceeds ``limit``.
        """
        points = Enumeration(limit).points(space_of(distribution))
        return (points.weights * evaluated(f, points)).sum(0)

    def estimate(self, distribution: Distribution | Space | Tensor, f: Function | Tensor, *, seed: int = 0) -> Tensor:
        """Return an estimate of the gradient of the expectation with respect to the logits, with their shape.

        ``f`` is a function, or a tensor of its values at the categories; ``distribution`` is as in :meth:`surrogate`.
        """
        with torch.enable_grad():
            space, logits = with_surrogate_gradient(distribution)
            function = function_of(f, space)
            generator = new_generator(seed, logits.device, stream="gradient estimate")
            total = self.surrogate(space, function, generator).sum()
            (gradient,) = torch.autograd.grad(total, logits, allow_unused=True)
        return torch.zeros_like(logits) if gradient is None else gradient


def checked_gradient(gradient: object | None) -> object | None:
    """Return the gradient estimator or None; raise SettingsError for other types, including names and classes."""
    if gradient is None or not isinstance(gradient, type) and callable(getattr(gradient, "points", None)):
        return gradient
    raise SettingsError(
        f"gradient is {gradient!r:.80}, no gradient estimator; use an object of bayeskit.inference.gradients such as "
        "UnorderedSet(k=4)"
    )


class Table:
    """Function of one categorical variable, defined by its values.

    Parameters
    ----------
    values : Tensor
        Value at each category, `(*batch, categories)`.

    Examples
    --------
    >>> import torch
    >>> function = Table(torch.tensor([1.0, 5.0]))
    >>> function(torch.tensor([1, 0])), function(torch.tensor([[0.5, 0.5]]))
    (tensor([5., 1.]), tensor([3.]))
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __call__(self, z: Tensor) -> Tensor:
        """Return the values at indices `(points, *batch)`, or interpolated at points `(points, *batch, categories)`."""
        if z.is_floating_point():
            return (z * self.values).sum(-1)
        if self.values.dim() == 1:
            return self.values[z]
        return self.values.expand(*z.shape, -1).gather(-1, z.unsqueeze(-1)).squeeze(-1)


def function_of(f: Function | Tensor, space: Space) -> Function:
    """Return a function; a tensor is a table over the categories of one variable, else SettingsError or ShapeError."""
    if not isinstance(f, Tensor):
        return f
    if space.num_variables > 1 or isinstance(space, Factorised) and space.binary:
        raise SettingsError(
            f"values in a tensor are those at the categories of one variable, but {type(space.distribution).__name__} "
            "has bits or several variables; give a function"
        )
    if not f.dim() or f.shape[-1] != space.num_categories:
        raise ShapeError(f"values of shape {tuple(f.shape)} for {space.num_categories} categories; give one for each")
    return Table(f)


def evaluated(f: Function, drawn: WeightedPoints) -> Tensor:
    """Return a function's values at points, of the shape of their weights; ShapeError if it returns another."""
    found = f(drawn.values)
    if not isinstance(found, Tensor) or found.shape != drawn.weights.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ShapeError(
            f"the function returned {shape} for points of shape {tuple(drawn.values.shape)}; it must return one number "
            f"for each: {tuple(drawn.weights.shape)}"
        )
    return found


def magic(log_probability: Tensor) -> Tensor:
    """Return ones whose gradient is that of the log probability, the score (Foerster et al. 2018)."""
    return (log_probability - log_probability.detach()).exp()


def with_surrogate_gradient(distribution: Distribution | Space | Tensor) -> tuple[Space, Tensor]:
    if isinstance(distribution, Tensor):
        distribution = distribution.detach()
        if distribution.is_floating_point():
            distribution.requires_grad_(True)
    space = space_of(distribution)
    if space.parameter is not None and space.parameter.requires_grad:
        return space, space.parameter
    name = type(space.distribution).__name__
    if space.parameter is None:
        raise SettingsError(
            f"{name} has no logits of its own to differentiate by; use surrogate(...), and let autograd find the "
            "gradient of what its logits are made of"
        )
    raise SettingsError(f"the logits of {name} require no gradient; make them with requires_grad_() first")


class DrawsEstimator(GradientEstimator):
    """Base class of estimators from ``num_samples`` draws, a field of the subclass, at least ``least``."""

    num_samples: int
    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, least=self.least)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples


# The exact gradient, by a sum over all points.


@dataclass(frozen=True)
class Enumeration(GradientEstimator):
    """Exact gradient by enumeration of all points, weighted by their probabilities.

    Parameters
    ----------
    limit : int, default 65,536
        Maximum number of points.

    Raises
    ------
    SettingsError
        If ``limit`` is less than 1, or the number of points exceeds it.

    Examples
    --------
    >>> import torch
    >>> Enumeration().estimate(torch.zeros(2), torch.tensor([1.0, 3.0]))
    tensor([-0.5000,  0.5000])
    """

    limit: int = LIMIT

    def __post_init__(self) -> None:
        whole_number("limit", self.limit, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Return all points."""
        codes = space.enumerate(self.limit)
        return WeightedPoints(space.value(codes), space.log_prob(codes).exp())

    def num_evaluations(self, space: Space) -> int:
        """Return the number of points."""
        return space.size
