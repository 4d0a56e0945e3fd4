"""Discrete distributions as sequences of categorical variables, the interface used by gradient estimators."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, OneHotCategorical, constraints
from torch.distributions.utils import lazy_property
from torch.nn.functional import logsigmoid

from bayeskit._core.inputs import whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError

#: Default maximum number of enumerated points.
LIMIT = 1 << 16


class Space(ABC):
    """Base class of distributions over codes: `num_variables` categorical variables per point.

    Parameters
    ----------
    distribution : Distribution
        Distribution that defines the event shape and the type of values.
    num_categories : int
        Number of categories of every variable.

    Attributes
    ----------
    batch_shape : torch.Size
        Batch shape of ``distribution``.
    """

    def __init__(self, distribution: Distribution, num_variables: int, num_categories: int) -> None:
        self.distribution = distribution
        self.num_variables = num_variables
        self.num_categories = num_categories
        self.batch_shape = distribution.batch_shape

    @property
    def parameter(self) -> Tensor | None:
        """The logits of all variables as one tensor; None if the distribution has no such tensor."""
        return None

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the log probabilities."""

    @property
    def size(self) -> int:
        """Number of points of the support."""
        return int(self.num_categories**self.num_variables)

    @abstractmethod
    def conditional(self, codes: Tensor) -> Tensor:
        """Return log probabilities of the next variable given the preceding variables.

        Codes have shape `(points, *batch, preceding)`, the result `(points, *batch, categories)` or broadcastable to
        it.
        """

    @abstractmethod
    def log_prob(self, codes: Tensor) -> Tensor:
        """Return log probabilities of points: `(points, *batch, variables)` to `(points, *batch)`."""

    def fixed_log_prob(self, codes: Tensor) -> Tensor:
        """Return log probabilities of points in double precision, detached; used in importance weights."""
        return self.log_prob(codes).detach().double()

    def log_rest(self, codes: Tensor) -> Tensor:
        """Return the log probability, `(*batch)` in double precision, of the complement of distinct points.

        Codes have shape `(points, *batch, variables)`; the result is minus infinity if the points are the whole
        support.
        """
        taken = self.fixed_log_prob(codes).logsumexp(0).clamp_max(0.0)
        if len(codes) == self.size:
            return torch.full_like(taken, -torch.inf)
        return log_complement(taken)

    @abstractmethod
    def value(self, codes: Tensor) -> Tensor:
        """Convert codes `(points, *batch, variables)` to values of the distribution, `(points, *batch, *event)`."""

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return codes of independent draws, shape `(num_samples, *batch, variables)`."""
        shape = (num_samples, *self.batch_shape)
        codes = torch.zeros(*shape, 0, dtype=torch.int64, device=self.like.device)
        with torch.no_grad():
            for _ in range(self.num_variables):
                log_probability = self.conditional(codes)
                noise = gumbel((*shape, self.num_categories), log_probability, generator)
                codes = torch.cat([codes, noise.add_(log_probability).argmax(-1, keepdim=True)], -1)
        return codes

    def enumerate(self, limit: int = LIMIT) -> Tensor:
        """Return the codes of all points, shape `(size, *batch, variables)`; SettingsError if they exceed ``limit``."""
        check_size(self.size, limit)
        single = torch.arange(self.num_categories, device=self.like.device)
        codes = torch.cartesian_prod(*[single] * self.num_variables).reshape(self.size, self.num_variables)
        ones = (1,) * len(self.batch_shape)
        return codes.reshape(self.size, *ones, self.num_variables).expand(self.size, *self.batch_shape, -1)


def unwrapped(fn: Distribution) -> tuple[Distribution, int]:
    """Return the distribution inside ``.to_event`` and the number of event dimensions added by it."""
    events = 0
    while isinstance(fn, Independent):
        events += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, events


class _UnnormalisedCategorical(Categorical):
    """A Categorical with logits ``(*batch, categories)`` that are normalized on access and not validated."""

    def __init__(self, logits: Tensor, validate_args: bool | None = None) -> None:
        self.given = self._param = logits
        self._num_events = logits.shape[-1]
        Distribution.__init__(self, logits.shape[:-1], validate_args=False)

    @lazy_property
    def logits(self) -> Tensor:
        """Return the normalized logits, as torch's Categorical does."""
        return self.given - self.given.logsumexp(-1, keepdim=True)


class Factorised(Space):
    """Independent variables of a Categorical, OneHotCategorical or Bernoulli; SettingsError for other types."""

    def __init__(self, distribution: Distribution) -> None:
        base, events = unwrapped(distribution)
        self.base = base
        logits = _logits(base)
        self._parameter = logits
        _check_logits(logits.detach())
        self.binary = isinstance(base, Bernoulli)
        log_probabilities = self._normalised(logits)
        own = log_probabilities.shape[log_probabilities.dim() - 1 - events : -1]
        self._event = tuple(own)
        shape = (*distribution.batch_shape, math.prod(own), log_probabilities.shape[-1])
        self.log_probabilities = log_probabilities.reshape(shape)
        super().__init__(distribution, shape[-2], shape[-1])

    @cached_property
    def _exact(self) -> Tensor:
        """Log probabilities in double precision, so that the probability of a small complement is accurate."""
        return self._normalised(self._parameter.detach().double()).reshape(self.log_probabilities.shape)

    def _normalised(self, logits: Tensor) -> Tensor:
        return torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1) if self.binary else logits.log_softmax(-1)

    @property
    def parameter(self) -> Tensor:
        """The distribution's logits."""
        return self._parameter

    @property
    def like(self) -> Tensor:
        """The logits."""
        return self._parameter

    def conditional(self, codes: Tensor) -> Tensor:
        """Return log probabilities of the next variable, independent of the values of ``codes``."""
        return self.log_probabilities[..., codes.shape[-1], :].unsqueeze(0)

    def log_prob(self, codes: Tensor) -> Tensor:
        """Return log probabilities of points."""
        return _gathered(self.log_probabilities, codes)

    def fixed_log_prob(self, codes: Tensor) -> Tensor:
        """Return log probabilities of points in double precision, detached."""
        return _gathered(self._exact, codes)

    def log_rest(self, codes: Tensor) -> Tensor:
        """Return the log probability of the complement of a set of distinct points."""
        if self.num_variables > 1:
            return super().log_rest(codes)
        left = self._exact.squeeze(-2).scatter(-1, codes.squeeze(-1).movedim(0, -1), -torch.inf)
        return left.logsumexp(-1)

    def value(self, codes: Tensor) -> Tensor:
        """Convert codes to values of the distribution."""
        codes = codes.reshape(*codes.shape[:-1], *self._event)
        if self.binary:
            return codes.to(self._parameter.dtype)
        if isinstance(self.base, OneHotCategorical):
            return torch.nn.functional.one_hot(codes, self.num_categories).to(self._parameter.dtype)
        return codes

    def least_probability(self) -> Tensor:
        """Return, for each logit, the smaller of its category's probability and one minus it; shape of the logits."""
        probability = self._exact.exp()
        least = probability.amin(-1) if self.binary else torch.minimum(probability, 1 - probability)
        return least.reshape(self._parameter.shape)

    def copies(self, shape: tuple[int, ...]) -> Factorised:
        """Return independent copies with separate logits that require a gradient, batch shape `(*shape, *batch)`."""
        logits = self._parameter.detach().expand((*shape, *self._parameter.shape)).clone().requires_grad_(True)
        kind: Any = type(self.base)
        copied = kind(logits=logits, validate_args=False)
        events = len(self._event)
        return Factorised(Independent(copied, events, validate_args=False) if events else copied)

    def soft(self, relaxed: Tensor) -> Tensor:
        """Convert relaxed points from `(points, *batch, variables, categories)` to `(points, *batch, *event)`."""
        # The input has a probability for each category. A Categorical is treated as a OneHotCategorical.
        relaxed = relaxed.reshape(*relaxed.shape[:-2], *self._event, self.num_categories)
        return relaxed[..., 1] if self.binary else relaxed


def space_of(distribution: Distribution | Space | Tensor) -> Space:
    """Return a distribution as a Space; a tensor is read as the logits of a Categorical.

    Raises
    ------
    SettingsError
        If the type of the distribution is not supported.
    ShapeError
        If the logits have no dimension, or are not floating-point numbers.
    DataError
        If a category has probability zero, or a logit is not finite.

    Examples
    --------
    >>> import torch
    >>> space_of(torch.zeros(3)).size
    3
    >>> bits = torch.distributions.Independent(torch.distributions.Bernoulli(logits=torch.zeros(4)), 1)
    >>> space_of(bits).size
    16
    """
    if isinstance(distribution, Space):
        return distribution
    if isinstance(distribution, Tensor):
        if not distribution.dim() or not distribution.is_floating_point():
            raise ShapeError(
                f"logits of shape {tuple(distribution.shape)} and {distribution.dtype} have no categories; give "
                "floating-point numbers of shape (*batch, categories)"
            )
        distribution = _UnnormalisedCategorical(logits=distribution)
    own = getattr(distribution, "space", None)
    space = own() if callable(own) else None
    return space if isinstance(space, Space) else Factorised(distribution)


def gumbel(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard Gumbel draws with a given shape, and the dtype and device of ``like``."""
    exponential = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_(generator=generator)
    return -exponential.clamp_min_(torch.finfo(like.dtype).tiny).log_()


def log_complement(log_probability: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0 in a numerically stable form."""
    near = (-torch.expm1(log_probability)).log()
    far = torch.log1p(-log_probability.exp())
    return torch.where(log_probability > -math.log(2), near, far)


def check_size(size: int, limit: int) -> None:
    """Raise SettingsError if the number of points exceeds the limit."""
    whole_number("limit", limit, least=1)
    if size > limit:
        count = str(size) if size < 10**9 else f"about 1e{len(str(size)) - 1}"
        raise SettingsError(
            f"there are {count} points to enumerate, more than the limit of {limit}; use an estimator that draws "
            "points, or raise the limit"
        )


def _gathered(table: Tensor, codes: Tensor) -> Tensor:
    found = table.expand(len(codes), *table.shape).gather(-1, codes.unsqueeze(-1)).squeeze(-1)
    return found.squeeze(-1) if found.shape[-1] == 1 else found.sum(-1)


def _logits(base: Distribution) -> Tensor:
    if isinstance(base, _UnnormalisedCategorical):
        return base.given
    if isinstance(base, (Categorical, OneHotCategorical, Bernoulli)):
        inner = getattr(base, "_categorical", base)
        given = vars(inner).get("probs")
        if isinstance(given, Tensor) and inner._param is given:  # not probabilities computed by torch from logits
            # torch clamps probabilities of zero and one, so the logits would be finite.
            edge = (given <= 0) | ((given >= 1) & isinstance(base, Bernoulli))
            if bool(edge.any()):
                raise impossible("probability", given.detach(), edge)
        logits: Tensor = base.logits
        return logits
    raise SettingsError(
        f"gradient estimators do not support {type(base).__name__}; use Bernoulli, Categorical or OneHotCategorical, "
        "with or without .to_event, or Autoregressive"
    )


def _check_logits(logits: Tensor) -> None:
    if math.isfinite(float(logits.sum())):  # fast path: this check runs at every training step
        return
    good = logits.isfinite()
    if not bool(good.all()):
        raise impossible("logit", logits, ~good)


def impossible(what: str, values: Tensor, where: Tensor) -> DataError:
    """Return the error for the first value that gives a category probability zero."""
    place = tuple(int(i) for i in where.nonzero()[0])
    return DataError(
        f"the {what} at {place} is {float(values[place])}; categories of probability zero have no gradient: remove "
        "them, or use a large negative logit"
    )


# A distribution over sequences in which each variable depends on the preceding variables.

#: Function from the preceding codes, `(points, *batch, preceding)`, to the logits of the next variable,
#: `(points, *batch, categories)`.
Logits = Callable[[Tensor], Tensor]


class Autoregressive(TorchDistribution):  # type: ignore[misc]
    """Autoregressive distribution over sequences of categorical variables.

    Parameters
    ----------
    logits : callable
        Function from the preceding codes, `(points, *batch, preceding)`, int64, to the logits of the next variable,
        `(points, *batch, categories)` or broadcastable to it.
    batch_shape : sequence of int, default ()

    Raises
    ------
    SettingsError
        If ``num_variables`` is less than 1, or ``num_categories`` less than 2.
    ShapeError
        On use, if ``logits`` returns a different shape.
    DataError
        On use, if a logit is not finite.

    Examples
    --------
    >>> import torch
    >>> def sticky(codes):  # the second variable tends to be as the first
    ...     if not codes.shape[-1]:
    ...         return torch.zeros(*codes.shape[:-1], 2)
    ...     return 2.0 * torch.nn.functional.one_hot(codes[..., -1], 2)
    >>> pair = Autoregressive(sticky, num_variables=2, num_categories=2)
    >>> pair.log_prob(pair.enumerate_support()).exp()
    tensor([0.4404, 0.0596, 0.0596, 0.4404])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_enumerate_support = True

    def __init__(
        self, logits: Logits, num_variables: int, num_categories: int, batch_shape: Sequence[int] = ()
    ) -> None:
        self.logits = logits
        self.num_variables = whole_number("num_variables", num_variables, least=1)
        self.num_categories = whole_number("num_categories", num_categories, least=2)
        super().__init__(torch.Size(batch_shape), torch.Size((self.num_variables,)), validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Vectors of whole numbers from 0 to ``num_categories - 1``."""
        return constraints.independent(constraints.integer_interval(0, self.num_categories - 1), 1)

    def space(self) -> Space:
        """Return the distribution as a Space for gradient estimators."""
        return _Sequences(self)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw sequences, shape `(*sample_shape, *batch, num_variables)`."""
        shape = torch.Size(sample_shape)
        return self.space().sample(shape.numel()).reshape(*shape, *self.batch_shape, self.num_variables)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log probabilities of sequences: `(*sample, *batch, num_variables)` to `(*sample, *batch)`."""
        shape = torch.broadcast_shapes(value.shape, (*self.batch_shape, self.num_variables))
        codes = value.expand(shape)
        flat = codes.reshape(-1, *self.batch_shape, self.num_variables)
        return self.space().log_prob(flat).reshape(shape[:-1])

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all sequences, shape `(size, *batch, num_variables)`."""
        return self.space().enumerate()

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Autoregressive:
        """Return independent copies; ``logits`` is then called with the new batch shape."""
        return Autoregressive(self.logits, self.num_variables, self.num_categories, batch_shape)


class _Sequences(Space):
    def __init__(self, distribution: Autoregressive) -> None:
        super().__init__(distribution, distribution.num_variables, distribution.num_categories)
        self._logits = distribution.logits
        with torch.no_grad():
            self._like = self.conditional(torch.zeros(1, *self.batch_shape, 0, dtype=torch.int64))

    @property
    def like(self) -> Tensor:
        """Log probabilities of the first variable."""
        return self._like

    def conditional(self, codes: Tensor) -> Tensor:
        """Return log probabilities of the next variable."""
        logits = self._logits(codes)
        wanted = (*codes.shape[:-1], self.num_categories)
        try:
            fits = torch.broadcast_shapes(logits.shape, wanted) == wanted
        except (RuntimeError, AttributeError):
            fits = False
        if not fits:
            raise ShapeError(
                f"the logits of variable {codes.shape[-1]} have shape {tuple(getattr(logits, 'shape', ()))} for codes "
                f"of shape {tuple(codes.shape)}; return shape {wanted}"
            )
        good = logits.detach().isfinite()
        if not bool(good.all()):
            raise impossible(f"logit of variable {codes.shape[-1]}", logits.detach(), ~good)
        return logits.log_softmax(-1).expand(wanted)

    def log_prob(self, codes: Tensor) -> Tensor:
        """Return log probabilities of points."""
        terms = [
            self.conditional(codes[..., :i]).gather(-1, codes[..., i : i + 1]).squeeze(-1)
            for i in range(self.num_variables)
        ]
        return torch.stack(terms).sum(0)

    def value(self, codes: Tensor) -> Tensor:
        """Return the codes, which are the values."""
        return codes
