"""Which parts of a model's likelihood are densities of single data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from pyro.distributions import Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._pyro.density import PyroDensity
from bayeskit._pyro.reader import is_deterministic


@runtime_checkable
class FactorTerms(Protocol):
    """A model that knows what its factors add up."""

    def factor_terms(self, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the log likelihoods of unlike data, ``(*batch, n)``, and how often each occurs, ``(n,)``.

        ``values`` are those of the latent sites, ``(*batch, *shape)``; there is one entry for each ``pyro.factor``.
        """
        ...


class LikelihoodParts(NamedTuple):
    """Names of the sites of a model's likelihood that need a closer look."""

    factors: tuple[str, ...]  # pyro.factor outside of every plate
    scaled: tuple[str, ...]  # under poutine.scale
    model: FactorTerms | None  # that can tell what its factors add up


class _Looker(Messenger):
    def __init__(self) -> None:
        super().__init__()
        self.factors: list[str] = []
        self.scaled: list[str] = []

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample) or is_deterministic(msg) or not msg["is_observed"]:
            return
        if isinstance(msg["fn"], Unit) and not any(f.vectorized for f in msg["cond_indep_stack"]):
            self.factors.append(msg["name"])
        if bool((torch.as_tensor(msg["scale"]) != 1).any()):
            self.scaled.append(msg["name"])


def likelihood_parts(density: PyroDensity) -> LikelihoodParts:
    """Run the model once and look at its observed sites."""
    looker = _Looker()
    start = torch.zeros(density.dim, dtype=density.dtype, device=density.device)
    with torch.no_grad(), looker:
        density.joint(start)
    model = density._model if isinstance(density._model, FactorTerms) else None
    return LikelihoodParts(tuple(looker.factors), tuple(looker.scaled), model)
