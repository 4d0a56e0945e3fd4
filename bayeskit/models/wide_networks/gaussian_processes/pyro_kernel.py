"""A network's covariance as a kernel of ``pyro.contrib.gp``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.wide_networks.gaussian_processes.parameters import (
    Parameters,
    check_covariance,
    positive_number,
    traced_diagonal,
    traced_matrix,
)
from bayeskit.models.wide_networks.graph import INPUT
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.inputs import check_inputs
from bayeskit.models.wide_networks.layers.dense import Dense


class PyroKernel(Kernel):
    """The covariance of a network of infinite width, with variances that can be learned.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the first ones.
    tied : bool, default True
        Whether all layers share one variance of weights and one of biases, or have their own.
    covariance : {"nngp", "ntk"}, default "nngp"
    input_shape : sequence of int, optional
        Of one input, ``(channels, *grid)``. Pyro's own models need inputs as vectors, ``(n, features)``; with this
        they are given their shape back. By default vectors are for networks of vectors.
    active_dims : list of int, optional
        Which of the features enter; by default as many as the network takes.

    Attributes
    ----------
    weight_variance, bias_variance : Tensor
        Positive, stored as logarithms, in double precision; ``()`` if tied, else ``(layers,)``. Assign a
        ``pyro.nn.PyroSample`` to give them a prior, or a number to fix them. Biases whose variance is zero at first
        stay without one; ``bias_variance`` is there only if some is left.

    Raises
    ------
    ModelError
        If the network is a torch module, or its output is not normal.
    SettingsError
        If a variance of weights is zero, or tied ones are not equal at first.
    ShapeError, DataError
        When called, if inputs do not fit the network or are not finite.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> kernel = PyroKernel(network)
    >>> kernel
    PyroKernel(Sequential, weight_variance=1, covariance='nngp')
    >>> kernel(torch.eye(2, dtype=torch.float64)).detach()
    tensor([[0.2500, 0.0796],
            [0.0796, 0.2500]], dtype=torch.float64)
    """

    weight_variance: Any
    bias_variance: Any

    def __init__(
        self,
        network: InfiniteWidth,
        tied: bool = True,
        covariance: str = "nngp",
        input_shape: Sequence[int] | None = None,
        active_dims: list[int] | None = None,
    ) -> None:
        parameters = Parameters(network, tied)
        shape = first_features(network) if input_shape is None else torch.Size(input_shape)
        # Without any, active_dims are not used: vectors are refused, and images come as they are.
        super().__init__(
            1 if shape is None else shape.numel() if active_dims is None else len(active_dims), active_dims
        )
        self.input_shape, self._chosen = shape, active_dims is not None
        self.parameters_of_network = parameters
        self.covariance = check_covariance(covariance)
        self.weight_variance = PyroParam(self.parameters_of_network.weight, constraints.positive)
        bias = self.parameters_of_network.bias
        if bias is not None:
            self.bias_variance = PyroParam(bias, constraints.positive)

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:  # noqa: N803
        """Return covariances, ``(n, m)``, or of each input with itself, ``(n,)``.

        Parameters
        ----------
        X, Z : Tensor
            Inputs, ``(n, features)`` and ``(m, features)``, or ``(n, channels, *grid)``; by default ``Z`` is ``X``.
        diag : bool, default False
            Whether each input is paired with itself only.
        """
        network = self.current_network(X.dtype)
        first = self.shaped(X)
        if diag:
            return traced_diagonal(network, self.covariance, first)
        second = None if Z is None or Z is X else self.shaped(Z)
        return traced_matrix(network, self.covariance, first, second)

    def current_network(self, dtype: torch.dtype = torch.float64) -> InfiniteWidth:
        """Return the network with the present variances."""
        bias = self.bias_variance.to(dtype) if self.parameters_of_network.bias is not None else None
        return self.parameters_of_network.at(self.weight_variance.to(dtype), bias)

    def with_log_normal_priors(self, spread: float = 1.0) -> PyroKernel:
        """Give each variance a log-normal prior whose median is its first value, and return the kernel itself.

        Parameters
        ----------
        spread : float, default 1.0
            The standard deviation of logarithms.
        """
        first = self.parameters_of_network
        self.weight_variance = PyroSample(partial(log_normal, first.weight, spread))
        if first.bias is not None:
            self.bias_variance = PyroSample(partial(log_normal, first.bias, spread))
        return self

    def shaped(self, x: Tensor, name: str = "x") -> Tensor:
        """Return inputs as the network takes them, or say what is wrong with them."""
        if not isinstance(x, Tensor):
            raise DataError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dim() <= 2:
            x = self._vectors(x, name)
        elif self.input_shape is not None and x.shape[1:] != self.input_shape:
            raise ShapeError(f"inputs of {name} must be {tuple(self.input_shape)}, not {tuple(x.shape[1:])}")
        return check_inputs(x, name, self.parameters_of_network.network.graph.num_axes)

    def _vectors(self, x: Tensor, name: str) -> Tensor:
        """Return vectors in the shape of the network's inputs."""
        if self.input_shape is None:
            raise ShapeError(
                f"{name} must be images, (n, channels, ...), not {tuple(x.shape)}; flat ones need "
                "input_shape=(channels, *grid)"
            )
        features = x.shape[1] if x.dim() == 2 else 1
        least = max(self.active_dims) + 1
        if features < least or (features > least and not self._chosen):
            raise ShapeError(
                f"{name} must have {'at least ' if self._chosen else ''}{least} features, not {features}"
                + ("; active_dims chooses some" if features > least else "")
            )
        return self._slice_input(x).reshape(len(x), *self.input_shape)

    def __setattr__(self, name: str, value: object) -> None:
        """Take a prior for a variance, or a number that fixes it."""
        if name in ("weight_variance", "bias_variance"):
            value = positive_number(name, value)
            if isinstance(value, Tensor):
                first = getattr(self.parameters_of_network, name.removesuffix("_variance"))
                if first is None or value.dim() and value.shape != first.shape:
                    wanted = "not be there" if first is None else f"have shape {tuple(first.shape)}"
                    raise ShapeError(f"{name} must {wanted}, not {tuple(value.shape)}")
                value = value.expand(first.shape)
                if name in self._pyro_samples:
                    delattr(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return described(self)


def described(kernel: Any) -> str:
    """Return the network and the variances of a kernel for Pyro or GPyTorch in one line."""
    parameters = kernel.parameters_of_network
    variances = []
    for kind, first in (("weight_variance", parameters.weight), ("bias_variance", parameters.bias)):
        if first is not None:
            fixed = kind not in getattr(kernel, "_pyro_samples", {})
            value = getattr(kernel, kind).detach() if fixed else None
            variances.append(f"{kind}={_digits(value) if value is not None else 'by its prior'}")
    module = type(parameters.network.module).__name__
    return f"{type(kernel).__name__}({module}, {', '.join(variances)}, covariance={kernel.covariance!r})"


def _digits(value: Tensor) -> str:
    numbers = [f"{float(x):.3g}" for x in value.reshape(-1)]
    return f"[{', '.join(numbers)}]" if value.dim() else numbers[0]


def log_normal(median: Tensor, spread: float, module: object) -> Any:
    """Return a log-normal law; the last argument is the module that Pyro passes on."""
    # In the default type, as numbers written into a model would be; the kernel takes the type of its inputs.
    median = median.to(torch.get_default_dtype())
    return dist.LogNormal(median.log(), spread).to_event(median.dim())


def first_features(network: InfiniteWidth) -> torch.Size | None:
    """Return the shape of the network's inputs if they are vectors and its layers tell how long."""
    for node in network.graph.nodes:
        if INPUT in node.inputs and isinstance(node.layer, Dense):
            return torch.Size((node.layer.fan_in,))
    return None
