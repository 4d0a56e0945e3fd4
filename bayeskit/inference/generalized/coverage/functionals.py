"""Numbers of interest: functions of the parameter, as functions of the unconstrained vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import jacrev

from bayeskit._torch import validation_kept
from bayeskit.errors import ModelError
from bayeskit.inference.generalized.posterior import GibbsPosterior


@dataclass(frozen=True, eq=False)
class Functional:
    """Named numbers as a function of one unconstrained vector.

    Parameters
    ----------
    names : tuple of str
    function : callable
        ``(d,) -> (k,)``, in torch, without branching on values.
    """

    names: tuple[str, ...]
    function: Callable[[Tensor], Tensor]

    def __call__(self, u: Tensor) -> Tensor:
        """Return the numbers, ``(k,)``, at one vector ``(d,)``."""
        return self.function(u)

    def jacobian(self, u: Tensor) -> Tensor:
        """Return their derivatives, ``(k, d)``, at one vector ``(d,)``."""
        result: Tensor = jacrev(self.function)(u)
        return result


def as_functional(posterior: GibbsPosterior, functional: Callable[[Any], Tensor] | None) -> Functional:
    """Return numbers of interest as a function of the unconstrained vector.

    Parameters
    ----------
    posterior : GibbsPosterior
    functional : callable, optional
        From what the loss takes as its parameter to one number or several, ``()`` or ``(k,)``. By default every
        entry of every site of the prior.

    Raises
    ------
    ModelError
        If it returns anything else.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> posterior = GibbsPosterior(dist.Gamma(2.0, 1.0), losses.HalfSquared(), torch.ones(2, dtype=torch.float64))
    >>> numbers = as_functional(posterior, None)
    >>> numbers.names, numbers(torch.zeros(1, dtype=torch.float64))
    (('theta',), tensor([1.], dtype=torch.float64))
    """
    prior = posterior.prior
    if functional is None:
        return Functional(_entries(posterior), lambda u: _flat(prior.values(u)))
    name = getattr(functional, "__name__", type(functional).__name__)
    name = "functional" if name == "<lambda>" else name
    probe = torch.zeros(posterior.dim, dtype=posterior.dtype, device=posterior.device)
    with validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        value = functional(prior.parameter(probe))
    if not isinstance(value, Tensor) or value.dim() > 1:
        what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"the functional {name!r} must return a tensor () or (k,), not {what}")
    names = (name,) if value.dim() == 0 else tuple(f"{name}[{i}]" for i in range(len(value)))
    return Functional(names, lambda u: functional(prior.parameter(u)).reshape(-1))


def _flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in values.values()])


def _entries(posterior: GibbsPosterior) -> tuple[str, ...]:
    names = []
    for site in posterior.prior.sites:
        indices = np.ndindex(*site.shape) if site.shape else [()]
        names += [f"{site.name}[{','.join(map(str, index))}]" if index else site.name for index in indices]
    return tuple(names)
