"""Draws that follow the density, also where those of torch do not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pyro.distributions import ImproperUniform
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, LKJCholesky

from bayeskit._transforms import bijection

FLAT_DRAWS = 2.0


def draw(fn: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """Draw from a distribution with the global stream, shape ``(*shape, *batch, *event)``, without gradient.

    The correlation matrices of torch 2.13 and before, and with them those of Pyro, do not follow their density from
    dimension three on: the squared length of the off-diagonal part of row ``i`` of the factor, counted from zero,
    should be ``Beta(i / 2, ...)`` and is ``Beta(i - 1 / 2, ...)``. Here they are drawn anew, wherever in ``fn`` they
    are wrapped; of any other distribution, these are its own draws. A flat one has none: values of a plausible size,
    uniform in the unconstrained coordinate, stand for them.
    """
    if isinstance(fn, ImproperUniform):
        transform = bijection(fn.support)
        whole = torch.Size(shape) + transform.inverse_shape(fn.batch_shape + fn.event_shape)
        return transform(2 * FLAT_DRAWS * torch.rand(whole) - FLAT_DRAWS)
    value: Tensor = mended(fn).sample(torch.Size(shape))
    return value


def mended(fn: Any) -> Any:
    """Return a distribution whose draws follow its density: ``fn`` itself, unless correlation matrices are in it."""
    if isinstance(fn, LKJCholesky):
        # A subclass with draws of its own is left alone.
        if type(fn).sample is not LKJCholesky.sample:
            return fn
        onion = _Onion.__new__(_Onion)
        vars(onion).update(vars(fn))
        return onion
    inside = {name: part for name, part in getattr(fn, "__dict__", {}).items() if isinstance(part, Distribution)}
    changed = {name: new for name, part in inside.items() if (new := mended(part)) is not part}
    if not changed:
        return fn
    # Distributions may be shared, and are left as they are.
    outside = copy.copy(fn)
    vars(outside).update(changed)
    return outside


class MendedDraws(Messenger):
    """Let models and guides that Pyro itself runs inside of this draw correlation matrices from their density."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and not msg["done"] and not msg["is_observed"]:
            mine = mended(msg["fn"])
            if mine is not msg["fn"]:
                msg["value"] = mine.sample(*msg["args"], **msg["kwargs"])


class _Onion(LKJCholesky):
    r"""Factors of correlation matrices, drawn row by row.

    Row ``i`` is a point of the half-sphere: ``i`` standard normal variables and, on the diagonal, the root of a
    chi-squared variable of ``2 eta + d - 1 - i`` degrees of freedom, over their length. So its direction off the
    diagonal is uniform and its squared length there ``Beta(i / 2, eta + (d - 1 - i) / 2)``.

    References
    ----------
    Lewandowski, D., Kurowicka, D. and Joe, H. (2009). Generating random correlation matrices based on vines and
    extended onion method. Journal of Multivariate Analysis 100, 1989-2001.
    """

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        with torch.no_grad():
            whole = self._extended_shape(torch.Size(sample_shape))
            eta = self.concentration
            later = torch.arange(self.dim - 1, -1, -1, dtype=eta.dtype, device=eta.device)
            # Gamma's own draws are clamped in place, which vmap cannot batch.
            half = torch._standard_gamma((eta.unsqueeze(-1) + later / 2).expand(whole[:-1]))
            diagonal = (2 * half.clamp(min=torch.finfo(eta.dtype).tiny)).sqrt()
            rows = torch.randn(whole, dtype=eta.dtype, device=eta.device).tril(-1) + torch.diag_embed(diagonal)
            return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
