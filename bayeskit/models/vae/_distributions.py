"""Distributions missing from torch and Pyro, and checks of their values."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from bayeskit.errors import DataError

Shape = torch.Size | list[int] | tuple[int, ...]


class DiscretizedLogisticMixture(TorchDistribution):  # type: ignore[misc]
    """Logistic variable, or mixture, rounded to levels ``k / (num_levels - 1)`` in ``[0, 1]`` (Salimans et al. 2017).

    ``loc`` and ``log_scale`` are ``(*batch)``; with the mixture's ``logits``, all three are ``(*batch, components)``.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.unit_interval

    def __init__(self, loc: Tensor, log_scale: Tensor, logits: Tensor | None = None, num_levels: int = 256) -> None:
        self.loc, self.log_scale, self.logits, self.num_levels = loc, log_scale, logits, num_levels
        super().__init__(loc.shape if logits is None else loc.shape[:-1], validate_args=False)

    def expand(self, batch_shape: Shape, _instance: None = None) -> DiscretizedLogisticMixture:
        """Return the same distribution with another batch shape."""
        shape = torch.Size(batch_shape) if self.logits is None else torch.Size(batch_shape) + self.loc.shape[-1:]
        logits = None if self.logits is None else self.logits.expand(shape)
        return DiscretizedLogisticMixture(self.loc.expand(shape), self.log_scale.expand(shape), logits, self.num_levels)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log mass of levels, ``(*batch)``."""
        if self.logits is None:
            return self._log_mass(value)
        weights = self.logits.log_softmax(-1)
        return (weights + self._log_mass(value.unsqueeze(-1))).logsumexp(-1)

    def _log_mass(self, value: Tensor) -> Tensor:
        # The outermost levels include the tails, so the masses sum to one.
        # With edges a < b in units of the scale, F(b) - F(a) = F(b) F(-a) (1 - exp(a - b)) has no cancellation.
        spacing, inverse_scale = 1 / (self.num_levels - 1), (-self.log_scale).exp()
        level = (value / spacing).round()
        centre = (level * spacing - self.loc) * inverse_scale
        half = 0.5 * spacing * inverse_scale
        first, last = level <= 0, level >= self.num_levels - 1
        below_upper = logsigmoid(centre + half).masked_fill(last, 0.0)
        above_lower = logsigmoid(half - centre).masked_fill(first, 0.0)
        # A width that underflows would make the unused terms of the outermost levels infinite.
        width = (-(-2 * half).expm1()).clamp_min(torch.finfo(half.dtype).tiny).log().masked_fill(first | last, 0.0)
        return below_upper + above_lower + width

    def sample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw levels, ``sample_shape + (*batch)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            loc, log_scale = self.loc, self.log_scale
            if self.logits is not None:
                which = torch.distributions.Categorical(logits=self.logits, validate_args=False)
                which = which.sample(torch.Size(sample_shape))
                loc, log_scale = (
                    parameter.expand(*shape, -1).gather(-1, which.unsqueeze(-1)).squeeze(-1)
                    for parameter in (loc, log_scale)
                )
            uniform = torch.rand(shape, dtype=loc.dtype, device=loc.device)
            top = self.num_levels - 1
            value = loc + log_scale.exp() * uniform.logit(eps=torch.finfo(loc.dtype).tiny)
            return (value * top).round().clamp(0, top) / top

    @property
    def mean(self) -> Tensor:
        """Mean, ``(*batch)``: the probability of exceeding a midpoint between adjacent levels, averaged over these."""
        top = self.num_levels - 1
        gaps = (torch.arange(top, dtype=self.loc.dtype, device=self.loc.device) + 0.5) / top
        above = ((self.loc.unsqueeze(-1) - gaps) * (-self.log_scale).exp().unsqueeze(-1)).sigmoid().mean(-1)
        return above if self.logits is None else (self.logits.softmax(-1) * above).sum(-1)


def independent(base: Any, event_dim: int) -> Any:
    """Make the last ``event_dim`` dimensions event dimensions, without value checks (the models check their data)."""
    return dist.Independent(base, event_dim, validate_args=False)


def check_unit_interval(x: Tensor, where: str) -> None:
    """Raise a ``DataError`` unless all values lie in ``[0, 1]``."""
    if not bool(((x >= 0) & (x <= 1)).all()):
        check_finite_values(x)
        raise DataError(
            f"values of x range from {float(x.min()):.4g} to {float(x.max()):.4g}, but {where} needs values in [0, 1]; "
            "divide by the largest possible intensity, or use a Gaussian likelihood"
        )


def check_finite_values(x: Tensor) -> None:
    """Raise a ``DataError`` unless all values are finite."""
    if not bool(x.isfinite().all()):
        count = int((~x.isfinite()).sum())
        raise DataError(
            f"x has {count} values that are not finite; remove their rows, or use MissingDataVAE with a mask"
        )
