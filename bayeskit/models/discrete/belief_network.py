"""Sigmoid belief networks: layers of bits, each drawn given the one above, with exact evidence of small ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from bayeskit.core.inputs import as_numbers, whole_number
from bayeskit.core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.autoencoders import checked_gradient

__all__ = ["SigmoidBeliefNetwork"]


#: Hidden bits of two neighbouring layers, of which all joint states are listed at most.
_MAX_BITS = 20


class SigmoidBeliefNetwork(PyroModule):  # type: ignore[misc]
    r"""Bits in layers, each layer drawn given the one above.

    Bits :math:`h` of the top are independent; each bit below is one with probability
    :math:`\sigma(b_j + \sum_i w_{ji} h_i)`.

    The guide is the mean field of a recognition network: given a datum, all hidden bits are independent, with logits
    linear in the datum, or free for each datum of a data set if ``num_data`` is given.

    Parameters
    ----------
    layers : sequence of int
        Number of bits of each layer, the top first and the visible one last; at least two.
    num_data : int, optional
        Let the guide have logits of its own for each of so many data, which model and guide then always get together.
    gradient : object, optional
        How the guide's part of the gradient is estimated: one of :mod:`bayeskit.inference.gradients`, put into each
        of its sites as ``infer={"gradient": gradient}``. An attribute, too: None draws plainly.
    seed : int, default 0
        Of the weights where training starts.

    Raises
    ------
    SettingsError
        If there are fewer than two layers, one is empty, or the gradient is no estimator.

    References
    ----------
    Neal, R. M. (1992). Connectionist learning of belief networks. Artificial Intelligence 56, 71-113.

    Saul, L. K., Jaakkola, T., Jordan, M. I. (1996). Mean field theory for sigmoid belief networks. JAIR 4, 61-76.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.gradients import DisARM
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.models.discrete.belief_network import SigmoidBeliefNetwork
    >>> network = SigmoidBeliefNetwork([2, 3, 5], gradient=DisARM())
    >>> x = torch.ones(4, 5)
    >>> ELBO().differentiable_loss(network.model, network.guide, x).backward()
    >>> network.log_evidence(x).shape
    torch.Size([4])
    """

    def __init__(
        self, layers: Sequence[int], num_data: int | None = None, gradient: object | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if isinstance(layers, int):
            raise SettingsError(f"layers must name at least a hidden and a visible one, such as [3, {layers}]")
        self.layers = tuple(whole_number("layers", size, 1) for size in layers)
        if len(self.layers) < 2:
            raise SettingsError(f"layers must name at least a hidden and a visible one, not {list(layers)}")
        self.num_data = None if num_data is None else whole_number("num_data", num_data, 1)
        self.gradient = checked_gradient(gradient)
        hidden, visible = sum(self.layers[:-1]), self.layers[-1]
        with global_stream(new_generator(seed, stream="belief network")):
            self.top = nn.Parameter(torch.zeros(self.layers[0]))
            self.downwards = nn.ModuleList(
                nn.Linear(above, below) for above, below in zip(self.layers, self.layers[1:], strict=False)
            )
            self.upwards = nn.Linear(visible, hidden) if num_data is None else nn.Embedding(num_data, hidden)
        if num_data is not None:
            nn.init.zeros_(self.upwards.weight)

    @pyro_method
    def model(self, x: Tensor) -> None:
        """Draw hidden layers ``h0`` (the top), ``h1``, ... for each row, and condition the visible one on the row.

        Parameters
        ----------
        x : Tensor or array
            Zeros and ones, ``(n, visible)``.

        Raises
        ------
        ShapeError, DataError
            If the data do not fit.
        """
        x = self._checked(x)
        with pyro.plate("data", len(x), dim=-1):
            logits = self.top
            for level, linear in enumerate(self.downwards):
                logits = linear(pyro.sample(f"h{level}", _bits(logits)))
            pyro.sample("x", _bits(logits), obs=x)

    @pyro_method
    def guide(self, x: Tensor) -> None:
        """Draw all hidden layers for each row, independently of each other; arguments as of :meth:`model`."""
        infer: Any = {} if self.gradient is None else {"gradient": self.gradient}
        each = self.guide_logits(x)
        with pyro.plate("data", len(each[0]), dim=-1):
            for level, logits in enumerate(each):
                pyro.sample(f"h{level}", _bits(logits), infer=infer)

    def guide_logits(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the guide's logits of each hidden layer, the top first, each ``(n, size)``.

        Raises
        ------
        ShapeError, DataError
            If the data do not fit.
        """
        x = self._checked(x)
        joint = self.upwards(x) if self.num_data is None else self.upwards.weight
        return joint.split(self.layers[:-1], -1)

    def log_evidence(self, x: Tensor) -> Tensor:
        r"""Return the exact log likelihood of each row, ``(n,)``, differentiable.

        States of a layer are summed over given those of the layer below, from the top down: the cost is that of the
        largest pair of neighbouring layers, not of all hidden bits together.

        Raises
        ------
        ShapeError, DataError
            If the data do not fit.
        SettingsError
            If there are too many states to list, naming their number.
        """
        x = self._checked(x)
        largest = max([self.layers[0]] + [a + b for a, b in zip(self.layers, self.layers[1:-1], strict=False)])
        if largest > _MAX_BITS:
            raise SettingsError(
                f"neighbouring hidden layers have {2**largest} joint states, more than the {2**_MAX_BITS} that are "
                "listed; use smaller layers, or importance sampling by held_out.importance_sampling"
            )
        states = self._states(self.layers[0])
        log_prior = _bits(self.top).log_prob(states)
        for size, linear in zip(self.layers[1:-1], self.downwards, strict=False):
            below = self._states(size)
            conditional = _bits(linear(states).unsqueeze(1)).log_prob(below)
            log_prior, states = (log_prior.unsqueeze(1) + conditional).logsumexp(0), below
        logits = self.downwards[-1](states)
        # Of all pairs of states and rows at once, by one product of matrices.
        log_likelihood = x @ logits.mT - nn.functional.softplus(logits).sum(-1)
        return (log_prior + log_likelihood).logsumexp(-1)

    def generate(self, n: int, *, seed: int | torch.Generator) -> Tensor:
        """Draw ``n`` rows from the model: zeros and ones, ``(n, visible)``."""
        with torch.no_grad(), global_stream(new_generator(seed, stream="generate")):
            drawn = _bits(self.top).sample((n,))
            for linear in self.downwards:
                drawn = _bits(linear(drawn)).sample()
        return drawn

    def _states(self, size: int) -> Tensor:
        number = torch.arange(2**size, device=self.top.device).unsqueeze(-1)
        return (number >> torch.arange(size, device=self.top.device) & 1).to(self.top.dtype)

    def _checked(self, x: Tensor) -> Tensor:
        found = as_numbers("x", x)
        if found is not x or not x.is_floating_point():
            x = found.to(self.top)
        if x.dim() != 2 or x.shape[1] != self.layers[-1]:
            raise ShapeError(f"x has shape {tuple(x.shape)}; it must be (n, {self.layers[-1]})")
        if self.num_data not in (None, len(x)):
            raise ShapeError(
                f"x has {len(x)} rows, but the guide has logits for num_data={self.num_data}; give all of them at once"
            )
        if x.dtype != self.top.dtype:
            raise DataError(f"x is {x.dtype}, but the parameters are {self.top.dtype}; convert one of them")
        if not bool(((x == 0) | (x == 1)).all()):
            raise DataError("x has values other than 0 and 1; binarise the data first")
        return x


def _bits(logits: Tensor) -> Any:
    """Return independent bits as one event."""
    return dist.Bernoulli(logits=logits, validate_args=False).to_event(1)
