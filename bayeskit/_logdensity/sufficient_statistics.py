"""Log likelihoods of many rows that share their parameters, from sufficient statistics of the rows.

The statistics are computed from the data in double precision wherever the density runs; a traced graph holds their
values, so an evaluation no longer reads the rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import ExpandedDistribution, Independent
from pyro.ops.special import log_binomial
from torch import Tensor

from bayeskit._core.torch_internals import is_wrapped, without_idle_gradients
from bayeskit._logdensity.exact_probabilities import unclamped

#: Largest number of categories that are counted, each in a pass over the data.
_MOST_CATEGORIES = 32
#: Attribute of an expanded distribution.
_ORIGINAL = "_bayeskit_original"
_WRAPPERS = (Independent, torch.distributions.Independent, ExpandedDistribution)
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class _Rows:
    """Data ``(*batch)`` in double precision, of which dimensions ``dims`` are averaged over."""

    value: Tensor
    dims: tuple[int, ...]
    dtype: torch.dtype  # of the log density
    trials: Tensor  # of binomial counts

    def mean_in_double(self, x: Tensor) -> Tensor:
        """Return the mean over rows of a function of the data, ``(*batch)`` with one row."""
        dims = [dim for dim in self.dims if -dim <= x.dim()]
        return x.mean(dims, keepdim=True) if dims else x

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean in the dtype of the log density."""
        return self.mean_in_double(x).to(self.dtype)


Parameters = Mapping[str, Tensor]
"""Parameters of a distribution by name, with size one where rows share them."""


def _normal(of: Parameters, rows: _Rows, value: Tensor | None = None) -> Tensor:
    value = rows.value if value is None else value
    mean = rows.mean(value)
    # The mean is a sum of two numbers, so that its distance from a location near it has all digits.
    left = value - mean.double()
    rest = rows.mean_in_double(left)
    spread = rows.mean_in_double((left - rest) ** 2)
    rest, spread = torch.where(mean.isinf(), 0.0, rest), torch.where(mean.isinf(), 0.0, spread)
    distance = (mean - of["loc"]) + rest.to(rows.dtype)
    squares = distance**2 + spread.to(rows.dtype)
    return -squares / (2 * of["scale"] ** 2) - of["scale"].log() - _HALF_LOG_TWO_PI


def _log_normal(of: Parameters, rows: _Rows) -> Tensor:
    logarithm = rows.value.log()
    return _normal(of, rows, logarithm) - rows.mean(logarithm)


def _exponential(of: Parameters, rows: _Rows) -> Tensor:
    return of["rate"].log() - of["rate"] * rows.mean(rows.value)


def _gamma(of: Parameters, rows: _Rows) -> Tensor:
    shape, rate, logarithm = of["concentration"], of["rate"], rows.mean(rows.value.log())
    power = torch.where((shape == 1) & logarithm.isinf(), 0.0, (shape - 1) * logarithm)  # rows of zero
    return torch.xlogy(shape, rate) + power - rate * rows.mean(rows.value) - torch.lgamma(shape)


def _poisson(of: Parameters, rows: _Rows) -> Tensor:
    factorial = rows.mean((rows.value + 1).lgamma())
    return torch.xlogy(rows.mean(rows.value), of["rate"]) - of["rate"] - factorial


def _bernoulli(of: Parameters, rows: _Rows) -> Tensor:
    return _of_trials(of, rows.mean(rows.value), rows.mean(1 - rows.value))


def _binomial(of: Parameters, rows: _Rows) -> Tensor:
    trials = rows.trials.double()
    coefficient = rows.mean(log_binomial(trials, rows.value))
    return coefficient + _of_trials(of, rows.mean(rows.value), rows.mean(trials - rows.value))


def _of_trials(of: Parameters, ones: Tensor, zeros: Tensor) -> Tensor:
    """Return the log probability of numbers of ones and of zeros in a known order."""
    fn = unclamped(dist.Bernoulli(**of, validate_args=False), finite=True)
    (like,) = of.values()
    return _times(ones, fn.log_prob(torch.ones_like(like))) + _times(zeros, fn.log_prob(torch.zeros_like(like)))


def _categorical(of: Parameters, rows: _Rows) -> Tensor | None:
    (number,) = {parameter.shape[-1] for parameter in of.values()}
    if number > _MOST_CATEGORIES:
        return None
    fn = unclamped(dist.Categorical(**of, validate_args=False), finite=True)
    shares = torch.stack([rows.mean((rows.value == k).double()) for k in range(number)], -1)
    return _times(shares, fn.logits).sum(-1)


def _times(share: Tensor, log_prob: Tensor) -> Tensor:
    """Return the product; what does not occur may be impossible."""
    return torch.where(share == 0, 0.0, share * log_prob)


_FAMILIES: dict[Any, Callable[[Parameters, _Rows], Tensor | None]] = {
    kind: function
    for name, function in {
        "Normal": _normal,
        "LogNormal": _log_normal,
        "Exponential": _exponential,
        "Gamma": _gamma,
        "Poisson": _poisson,
        "Bernoulli": _bernoulli,
        "Binomial": _binomial,
        "Categorical": _categorical,
    }.items()
    for kind in (getattr(dist, name), getattr(torch.distributions, name))
}
"""Mean log density of rows by their distribution, whose subclasses may have other densities."""


def sum_of_log_prob(fn: Any, value: Tensor) -> Tensor | None:
    """Return the log density of data, summed over the rows that certainly share all parameters.

    Parameters
    ----------
    fn : distribution
        Of batch and event shape ``(*batch)`` together.
    value : Tensor
        Data, broadcastable to ``(*batch)``.

    Returns
    -------
    Tensor or None
        ``(*batch)`` with size one in place of the summed dimensions. None if nothing can be summed: for other
        distributions, where parameters had a number for each row before they were expanded, and where data depend on
        what is batched or differentiated. What was expanded outside of :func:`originals_kept` counts as numbers.
    """
    base, shape = fn, fn.batch_shape + fn.event_shape
    while type(base) in _WRAPPERS:
        base = base.base_dist
    family = _FAMILIES.get(type(base))
    if family is None:
        return None
    trials = vars(base).get("total_count", torch.ones((), dtype=torch.float64, device=value.device))
    value, trials = without_idle_gradients(value), without_idle_gradients(trials)
    if any(is_wrapped(x) or x.requires_grad for x in (value, trials)):
        return None
    base = vars(base).get("base_dist", base)  # of a log-normal distribution
    shape = np.broadcast_shapes(shape, value.shape)  # torch's imports SymPy
    expanded, parameters = _parameters(base), _parameters(vars(base).get(_ORIGINAL, base))
    vectors = int(family is _categorical)  # dimensions of a parameter to the right of its rows
    dims = tuple(
        dim
        for dim in range(-len(shape), 0)
        if shape[dim] > 1
        and all(_is_shared(x, dim - vectors) for x in parameters.values())
        and all(_is_repeated(x, dim - vectors) for x in expanded.values())
    )
    if not dims:
        return None
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in parameters.values()))
    if value.is_floating_point():
        dtype = torch.promote_types(dtype, value.dtype)
    mean = family(parameters, _Rows(value.double(), dims, dtype, trials))
    return None if mean is None else math.prod(shape[dim] for dim in dims) * mean


def _parameters(fn: Any) -> Parameters:
    if not hasattr(fn, "_param"):
        return {name: getattr(fn, name) for name in fn.arg_constraints}
    # Probabilities or logits, of which torch computes the other on demand.
    return {"logits" if vars(fn).get("logits") is fn._param else "probs": fn._param}


def _is_shared(parameter: Tensor, dim: int) -> bool:
    """Tell whether a parameter is one number along a dimension, counted from the right."""
    return -dim > parameter.dim() or parameter.shape[dim] == 1


def _is_repeated(parameter: Tensor, dim: int) -> bool:
    """Tell whether all numbers along a dimension are one in memory."""
    return _is_shared(parameter, dim) or parameter.stride(dim) == 0


def _remembering(expand: Callable[..., Any]) -> Callable[..., Any]:
    def expanded(self: Any, *args: Any, **kwargs: Any) -> Any:
        new = expand(self, *args, **kwargs)
        vars(new)[_ORIGINAL] = vars(self).get(_ORIGINAL, self)
        return new

    return expanded


#: How torch's classes expand, and Pyro's with them, and how they do here; a log-normal one expands its normal one.
_EXPAND: dict[Any, tuple[Any, Any]] = {
    kind: (kind.expand, _remembering(kind.expand))
    for name in "Normal Exponential Gamma Poisson Bernoulli Binomial Categorical".split()
    for kind in (getattr(torch.distributions, name),)
}


@contextmanager
def originals_kept() -> Iterator[None]:
    """Let distributions that are expanded, as plates do, remember what they were before."""
    # An expanded parameter has the shape of the rows, and its gradient one number for each of them.
    for kind, (_, ours) in _EXPAND.items():
        kind.expand = ours
    try:
        yield
    finally:
        for kind, (theirs, _) in _EXPAND.items():
            kind.expand = theirs
