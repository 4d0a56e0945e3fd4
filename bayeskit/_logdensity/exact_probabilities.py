"""Discrete distributions with exact probabilities, zero and one included."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pyro.distributions import Bernoulli, Binomial
from pyro.ops.special import log_binomial
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import logsigmoid


def unclamped(fn: Any, *, finite: bool = False) -> Any:
    """Return ``fn`` with exact log probabilities at zero and one: ``-inf``, or the lowest ones if ``finite``."""
    # torch clamps probabilities to the rounding unit before it takes logarithms.
    parts = vars(fn)
    if "base_dist" in parts and not hasattr(fn, "transforms"):
        return _changed(fn, base_dist=unclamped(fn.base_dist, finite=finite))
    if "_categorical" in parts:
        return _changed(fn, _categorical=unclamped(fn._categorical, finite=finite))
    if finite and isinstance(fn, torch.distributions.Bernoulli) and parts.get("logits") is parts["_param"]:
        # For data of zeros and ones: two operations instead of nine.
        return _BernoulliOfLogits(logits=parts["logits"], validate_args=fn._validate_args)
    probability = parts.get("probs")
    if probability is None or probability is not parts.get("_param"):  # computed by torch from logits
        return fn
    if finite:
        # Clamped by the smallest representable distance from zero and one, so that gradients are finite.
        limits = torch.finfo(probability.dtype)
        probability = probability.clamp(limits.tiny, 1 - limits.eps / 2)
    if isinstance(fn, Categorical):
        return _changed(fn, logits=probability.log())
    if isinstance(fn, torch.distributions.NegativeBinomial):
        return _changed(fn, logits=probability.log() - torch.log1p(-probability))
    if isinstance(fn, torch.distributions.Bernoulli):
        return _Bernoulli(probability, validate_args=fn._validate_args)
    if isinstance(fn, torch.distributions.Binomial):
        return _Binomial(fn.total_count, probability, validate_args=fn._validate_args)
    return fn


class _Bernoulli(Bernoulli):  # type: ignore[misc]
    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return _log_bits(self.probs, value, 1 - value)


class _BernoulliOfLogits(Bernoulli):  # type: ignore[misc]
    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return logsigmoid((2 * value - 1) * self.logits)


class _Binomial(Binomial):  # type: ignore[misc]
    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        rest = self.total_count - value
        return log_binomial(self.total_count, value) + _log_bits(self.probs, value, rest)


def _log_bits(probability: Tensor, ones: Tensor, zeros: Tensor) -> Tensor:
    """Return the log probability of some ones and zeros in a known order."""
    return torch.xlogy(ones, probability) + torch.special.xlog1py(zeros, -probability)


def _changed(fn: Any, **parts: Any) -> Any:
    """Return a copy with changed attributes; the original, which may be shared, stays unchanged."""
    changed = copy.copy(fn)
    vars(changed).update(parts)
    return changed
