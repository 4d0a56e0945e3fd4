"""Normalised models as losses see them: log densities of the data, and integrals of powers of a density."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Exponential,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    Poisson,
)

from bayeskit.errors import ModelError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data

Model = Callable[..., Distribution]
"""``parameter -> distribution`` of a datum, or ``(parameter, *covariates) -> distributions``, one for each datum."""

POISSON_TERMS = 256


@contextmanager
def unvalidated() -> Iterator[None]:
    """Let distributions take their arguments unseen: validation branches on values, which cannot be batched."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def law_of(model: Model, parameter: Any, data: Data) -> tuple[Distribution, Tensor]:
    """Return the distribution of the outcomes, and these: the last column, all others being covariates."""
    covariates, outcomes = (data[:-1], data[-1]) if isinstance(data, tuple) else ((), data)
    with unvalidated():
        return model(parameter, *covariates), outcomes


def joint_law_of(model: Model, parameter: Any, data: Data) -> tuple[Distribution, Tensor]:
    """Return the joint distribution of the entries of an outcome, independent where it says nothing else.

    Raises
    ------
    ModelError
        If the model returns no distribution.
    ShapeError
        If it does not fit the outcomes.
    """
    law, outcomes = law_of(model, parameter, data)
    if not isinstance(law, Distribution):
        raise ModelError(f"distribution must return a distribution, not {law!r:.80}")
    entries = outcomes.dim() - 1 - len(law.event_shape)
    if entries <= 0:
        return law, outcomes
    try:
        shape = torch.broadcast_shapes(law.batch_shape, outcomes.shape[1 : 1 + entries])
    except RuntimeError as error:
        raise ShapeError(
            f"a distribution of batch shape {tuple(law.batch_shape)} and event shape {tuple(law.event_shape)} "
            f"does not fit outcomes of shape {tuple(outcomes.shape)}"
        ) from error
    with unvalidated():
        return Independent(law.expand(shape), entries), outcomes


def log_density(law: Distribution, outcomes: Tensor) -> Tensor:
    """Return the log density of each outcome, ``(n,)``; minus infinity for those outside the support.

    Raises
    ------
    ShapeError
        If the distribution does not fit the outcomes.
    """
    inside: Tensor = law.support.check(outcomes)  # type: ignore[union-attr]
    with unvalidated():
        value = law.log_prob(_replaced(outcomes, inside))
    if value.shape != outcomes.shape[:1]:
        raise ShapeError(
            f"{type(law).__name__} returns log densities of shape {tuple(value.shape)} for {len(outcomes)} outcomes "
            f"of shape {tuple(outcomes.shape[1:])}"
        )
    # Without validation a Poisson law has a log density also at -1 and at one half.
    return torch.where(inside, value, value.new_full((), -math.inf))


def _replaced(outcomes: Tensor, inside: Tensor) -> Tensor:
    """Put an outcome inside the support in the place of those outside, whose derivatives may be nan."""
    if inside.shape != outcomes.shape[:1]:
        return outcomes
    one = outcomes.index_select(0, inside.int().argmax().reshape(1))
    return torch.where(inside.reshape(-1, *[1] * (outcomes.dim() - 1)), outcomes, one)


@singledispatch
def log_power_integral(law: Distribution, power: float) -> Tensor:
    r"""Return :math:`\log \int p(x)^{s}\,dx` of a distribution, of its batch shape; sums for discrete ones.

    In closed form for ``Normal``, ``MultivariateNormal``, ``Laplace`` and ``Exponential``; summed over all outcomes
    for ``Bernoulli``, ``Categorical`` and ``OneHotCategorical``; summed over 256 counts about the mean for ``Poisson``,
    which lie closer than a third of a standard deviation where they are not all in a row, so that the sum is exact to
    rounding. ``Independent`` adds up. For another family, register a function of it,
    ``log_power_integral.register``.

    Parameters
    ----------
    law : Distribution
        Batch shape ``(*batch)``.
    power : float
        ``s``, positive.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    Raises
    ------
    ModelError
        If the integral is not known for this family.

    Examples
    --------
    >>> import torch
    >>> round(log_power_integral(Normal(torch.tensor(0.0), torch.tensor(1.0)), 2.0).exp().item(), 6)  # 1 / 2 sqrt(pi)
    0.282095
    """
    raise ModelError(
        f"the integral of a power of the density of {type(law).__name__} is not known; pass power_integral="
        "(distribution, power) -> integral"
    )


@log_power_integral.register
def _(law: Normal, power: float) -> Tensor:
    return (1 - power) * (law.scale.log() + math.log(2 * math.pi) / 2) - math.log(power) / 2


@log_power_integral.register
def _(law: MultivariateNormal, power: float) -> Tensor:
    dim = law.event_shape[0]
    log_volume = law._unbroadcasted_scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_volume = (log_volume + dim * math.log(2 * math.pi) / 2).expand(law.batch_shape)
    return (1 - power) * log_volume - dim * math.log(power) / 2


@log_power_integral.register
def _(law: Laplace, power: float) -> Tensor:
    return (1 - power) * (2 * law.scale).log() - math.log(power)


@log_power_integral.register
def _(law: Exponential, power: float) -> Tensor:
    return (power - 1) * law.rate.log() - math.log(power)


@log_power_integral.register
def _(law: Bernoulli, power: float) -> Tensor:
    log_sigmoid = torch.nn.functional.logsigmoid
    return torch.logaddexp(power * log_sigmoid(law.logits), power * log_sigmoid(-law.logits))


@log_power_integral.register(Categorical)
@log_power_integral.register(OneHotCategorical)
def _(law: Categorical | OneHotCategorical, power: float) -> Tensor:
    return (power * law.logits).logsumexp(-1)


@log_power_integral.register
def _(law: Poisson, power: float) -> Tensor:
    rate = law.rate.detach()
    # By Poisson summation a lattice of spacing s misses the sum by a share of 2 exp(-2 (pi sd / s)**2).
    spacing = ((rate / power).sqrt() / 3).floor().clamp_min(1.0)
    start = (rate - spacing * (POISSON_TERMS // 2)).floor().clamp_min(0.0)
    steps = torch.arange(POISSON_TERMS, dtype=rate.dtype, device=rate.device)
    counts = start.unsqueeze(-1) + spacing.unsqueeze(-1) * steps
    log_mass = torch.xlogy(counts, law.rate.unsqueeze(-1)) - law.rate.unsqueeze(-1) - torch.lgamma(counts + 1)
    return (power * log_mass).logsumexp(-1) + spacing.log()


@log_power_integral.register
def _(law: Independent, power: float) -> Tensor:
    value = log_power_integral(law.base_dist, power)
    return value.flatten(-law.reinterpreted_batch_ndims).sum(-1) if law.reinterpreted_batch_ndims else value
