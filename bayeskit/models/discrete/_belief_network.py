"""Sigmoid belief networks, with exact evidence for small networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, checked_gradient, global_stream, new_generator, whole_number
from bayeskit.models.discrete._inputs import digits_of

#: Maximum number of hidden bits in two adjacent layers whose joint states are enumerated.
_MAX_BITS = 20


class SigmoidBeliefNetwork(PyroModule):  # type: ignore[misc]
    r"""Sigmoid belief network: layers of binary variables, each conditional on the layer above.

    Bits of the top layer are independent. Given the layer above, bit :math:`j` is 1 with probability
    :math:`\sigma(b_j + \sum_i w_{ji} h_i)`.

    The guide is a mean-field distribution: hidden bits are independent, with logits linear in the observation or, if
    ``num_data`` is given, with separate parameters for each observation. Raises ``SettingsError`` if there are fewer
    than two layers, a layer is empty, or ``gradient`` is not an estimator.

    Parameters
    ----------
    layers : sequence of int
        Number of bits of each layer, from top to visible; at least two layers.
    num_data : int, optional
        Use separate guide logits for each of ``num_data`` observations; always pass the full data set.
    gradient : object, optional
        Estimator of the guide's gradient from :mod:`bayeskit.inference.gradients`, set at each of its sites as
        ``infer={"gradient": gradient}``. None draws without an estimator.
    seed : int, default 0
        Seed of the initial weights.

    References
    ----------
    Neal, R. M. (1992). Connectionist learning of belief networks. Artificial Intelligence 56, 71-113.

    Saul, L. K., Jaakkola, T., Jordan, M. I. (1996). Mean field theory for sigmoid belief networks. JAIR 4, 61-76.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.gradients import DisARM
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.models.discrete._belief_network import SigmoidBeliefNetwork
    >>> network = SigmoidBeliefNetwork([2, 3, 5], gradient=DisARM())
    >>> x = torch.ones(4, 5)
    >>> ELBO().differentiable_loss(network.model, network.guide, x).backward()
    >>> network.log_evidence(x).shape
    torch.Size([4])
    """

    def __init__(
        self, layers: Sequence[int], num_data: int | None = None, gradient: object | None = None, *, seed: int = 0
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
        """Draw hidden layers ``h0`` (top), ``h1``, ... for each row and observe the row in the visible layer.

        ``x`` (tensor or array): zeros and ones, ``(n, visible)``. This and later methods raise ``ShapeError`` if ``x``
        has a wrong shape; ``DataError`` if it has a wrong dtype, or values other than 0 and 1.
        """
        x = self._checked(x)
        with pyro.plate("data", len(x), dim=-1):
            logits = self.top
            for level, linear in enumerate(self.downwards):
                logits = linear(pyro.sample(f"h{level}", _bits(logits)))
            pyro.sample("x", _bits(logits), obs=x)

    @pyro_method
    def guide(self, x: Tensor) -> None:
        """Draw all hidden layers independently for each row; same arguments as :meth:`model`."""
        infer: Any = {} if self.gradient is None else {"gradient": self.gradient}
        each = self.guide_logits(x)
        with pyro.plate("data", len(each[0]), dim=-1):
            for level, logits in enumerate(each):
                pyro.sample(f"h{level}", _bits(logits), infer=infer)

    def guide_logits(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the guide's logits of each hidden layer, top first, shapes ``(n, size)``."""
        x = self._checked(x)
        joint = self.upwards(x) if self.num_data is None else self.upwards.weight
        return joint.split(self.layers[:-1], -1)

    def log_evidence(self, x: Tensor) -> Tensor:
        """Return the exact log likelihood of each row, ``(n,)``, differentiable.

        Layers are marginalized from the top down. The largest pair of adjacent hidden layers determines the cost.
        Raises ``SettingsError`` if there are too many states to enumerate.
        """
        x = self._checked(x)
        largest = max([self.layers[0]] + [a + b for a, b in zip(self.layers, self.layers[1:-1], strict=False)])
        if largest > _MAX_BITS:
            raise SettingsError(
                f"adjacent hidden layers have {2**largest} joint states, more than the limit of {2**_MAX_BITS} for "
                "enumeration; use smaller layers, or held_out.importance_sampling"
            )
        states = self._states(self.layers[0])
        log_prior = _bits(self.top).log_prob(states)
        for size, linear in zip(self.layers[1:-1], self.downwards, strict=False):
            below = self._states(size)
            conditional = _bits(linear(states).unsqueeze(1)).log_prob(below)
            log_prior, states = (log_prior.unsqueeze(1) + conditional).logsumexp(0), below
        logits = self.downwards[-1](states)
        # One matrix product for all pairs of states and rows.
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
        return digits_of(2**size, 2, size, self.top.device).to(self.top.dtype)

    def _checked(self, x: Tensor) -> Tensor:
        found = as_numbers("x", x)
        if found is not x or not x.is_floating_point():
            x = found.to(self.top)
        if x.dim() != 2 or x.shape[1] != self.layers[-1]:
            raise ShapeError(f"x has shape {tuple(x.shape)}; it must be (n, {self.layers[-1]})")
        if self.num_data not in (None, len(x)):
            raise ShapeError(
                f"x has {len(x)} rows, but the guide has logits for num_data={self.num_data}; pass all observations"
            )
        if x.dtype != self.top.dtype:
            raise DataError(f"x is {x.dtype}, but the parameters are {self.top.dtype}; convert one of them")
        if not bool(((x == 0) | (x == 1)).all()):
            raise DataError("x has values other than 0 and 1; binarise the data first")
        return x


def _bits(logits: Tensor) -> Any:
    """Return the distribution of independent bits as one event."""
    return dist.Bernoulli(logits=logits, validate_args=False).to_event(1)
