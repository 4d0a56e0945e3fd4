"""Pyro models of regression and classification with infinitely wide networks, and their kernel for Pyro."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroModule, PyroParam, PyroSample, pyro_method
from torch import Tensor
from torch.distributions import constraints

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.core.process_state import process_state
from bayeskit.core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, DrawsError, KernelError, SettingsError, ShapeError
from bayeskit.models.wide_networks.gaussian_processes.factors import Cholesky
from bayeskit.models.wide_networks.gaussian_processes.parameters import (
    Parameters,
    check_covariance,
    positive_number,
    traced_diagonal,
    traced_matrix,
)
from bayeskit.models.wide_networks.kernels import InfiniteWidth
from bayeskit.models.wide_networks.layers import Dense, check_inputs, check_targets, check_vectors
from bayeskit.models.wide_networks.reader import INPUT

__all__ = [
    "CHUNK",
    "ClassificationModel",
    "NormalMixture",
    "PyroKernel",
    "RegressionModel",
    "kernel_in_words",
    "one_target",
]

# Predictions of a Pyro model of a Gaussian process, draw by draw.

CHUNK = 1 << 22  # largest number of covariances held at once

_Laws = tuple[Tensor, Tensor]
"""Means and variances."""


class NormalMixture(NamedTuple):
    """Normal distributions of the function at new inputs, one per posterior draw.

    Attributes
    ----------
    means, variances : Tensor
        Moments given each draw, ``(draws, ...)``.
    """

    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture over draws."""
        return self.means.mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance of the mixture: mean of the variances plus variance of the means."""
        return self.variances.mean(0) + self.means.var(0, correction=0)


def _predict_each(
    function: Callable[..., _Laws], values: Mapping[str, Tensor], x: Tensor, *rest: Tensor
) -> NormalMixture:
    """Return means and variances ``function(x, *rest)`` at each draw of its sites; new inputs come last.

    ``values`` maps sites to ``(*batch, *shape)``; missing ones raise ``DrawsError``, a failed Cholesky ``KernelError``.
    """
    draws = _flat(values, _event_dims(function, x, *rest))
    number = len(next(iter(draws.values()))) if draws else 1

    def one(row: dict[str, Tensor]) -> _Laws:
        with process_state(), pyro.poutine.condition(data=row):
            return function(x, *rest)

    length = max(CHUNK // (len(x) * (len(x) + len(rest[-1]))), 1)
    with torch.no_grad():
        try:
            if not draws:
                raise RuntimeError("there is nothing to batch")
            means, variances = torch.vmap(one, chunk_size=length)(draws)
        except RuntimeError:  # the kernel's code depends on values, or a covariance is not positive definite
            laws = [_law(one, {name: value[i] for name, value in draws.items()}, i) for i in range(number)]
            means, variances = (torch.stack(column) for column in zip(*laws, strict=True))
    return NormalMixture(means, variances)


def _law(function: Callable[[dict[str, Tensor]], _Laws], row: dict[str, Tensor], number: int) -> _Laws:
    try:
        return function(row)
    except torch.linalg.LinAlgError as error:
        raise KernelError(
            f"the covariance of the data is not positive definite at draw {number}; remove repeated inputs, or raise "
            "the jitter of the model"
        ) from error


def _event_dims(function: Callable[..., _Laws], x: Tensor, *rest: Tensor) -> dict[str, int]:
    """Return the number of dimensions of one draw of each site."""

    def run() -> None:  # a trace does not accept every type of result
        with suppress(torch.linalg.LinAlgError):  # the variances are arbitrary
            function(x, *rest)

    with torch.no_grad(), global_stream(new_generator(0)):
        trace = pyro.poutine.trace(run).get_trace()
    sites = ((name, trace.nodes[name]) for name in trace.stochastic_nodes)
    return {name: torch.as_tensor(node["value"]).dim() for name, node in sites if node["type"] == "sample"}


def _flat(values: Mapping[str, Tensor], event_dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return draws of all sites with one leading dimension."""
    missing = sorted(set(event_dims) - set(values))
    if missing:
        raise DrawsError(f"draws must have values of each site, but {missing} are missing; given: {sorted(values)}")
    batch, flat = None, {}
    for name, event_dim in event_dims.items():
        value = values[name]
        found = value.shape[: value.dim() - event_dim]
        batch = found if batch is None else batch
        if found != batch:
            raise DrawsError(
                f"site {name!r} has shape {tuple(value.shape)}, which does not begin with the batch shape "
                f"{tuple(batch)} of the other sites"
            )
        if not batch.numel():
            raise DrawsError(f"there are no draws: site {name!r} has shape {tuple(value.shape)}")
        flat[name] = value.reshape(batch.numel(), *value.shape[len(batch) :])
    return flat


# A network's covariance as a kernel of ``pyro.contrib.gp``.


class PyroKernel(Kernel):
    """Pyro kernel of an infinitely wide network, with trainable variances.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the initial values.
    tied : bool, default True
        Whether all layers share one weight variance and one bias variance.
    covariance : {"nngp", "ntk"}, default "nngp"
    input_shape : sequence of int, optional
        Shape of one input, ``(channels, *grid)``, for networks of images in Pyro's own models. These models pass inputs
        as vectors, ``(n, features)``, which are reshaped to it.
    active_dims : list of int, optional
        Indices of the features used; by default as many as the network takes.

    Attributes
    ----------
    weight_variance, bias_variance : Tensor
        Positive, stored as logarithms, in double precision; ``()`` if tied, else ``(layers,)``. Assign a
        ``pyro.nn.PyroSample`` to give them a prior, or a number to fix them. Bias variances that are initially zero
        stay zero; without any other, there is no ``bias_variance``.

    Raises
    ------
    ModelError
        If the network is a torch module, or its output is not normal.
    SettingsError
        If a weight variance is zero, or tied variances are initially not equal.
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
        shape = _first_features(network) if input_shape is None else torch.Size(input_shape)
        # If the number of features is unknown, active_dims are unused: vectors are refused, images passed unchanged.
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
        """Return the covariance matrix, ``(n, m)``, or with ``diag`` the variances of single inputs, ``(n,)``.

        Parameters
        ----------
        X, Z : Tensor
            Inputs, ``(n, features)`` and ``(m, features)``, or ``(n, channels, *grid)``; by default ``Z`` is ``X``.
        diag : bool, default False
            Whether to return variances only.
        """
        network = self.current_network(X.dtype)
        first = self.shaped(X)
        if diag:
            return traced_diagonal(network, self.covariance, first)
        second = None if Z is None or Z is X else self.shaped(Z)
        return traced_matrix(network, self.covariance, first, second)

    def current_network(self, dtype: torch.dtype = torch.float64) -> InfiniteWidth:
        """Return the network with the current variances."""
        bias = self.bias_variance.to(dtype) if self.parameters_of_network.bias is not None else None
        return self.parameters_of_network.at(self.weight_variance.to(dtype), bias)

    def with_log_normal_priors(self, spread: float = 1.0) -> PyroKernel:
        """Give each variance a log-normal prior with its initial value as median, and return the kernel itself.

        Parameters
        ----------
        spread : float, default 1.0
            Standard deviation of the log variances.
        """
        first = self.parameters_of_network
        self.weight_variance = PyroSample(partial(_log_normal, first.weight, spread))
        if first.bias is not None:
            self.bias_variance = PyroSample(partial(_log_normal, first.bias, spread))
        return self

    def shaped(self, x: Tensor, name: str = "x") -> Tensor:
        """Return inputs in the network's shape, or raise an error if they do not fit."""
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
                f"{name} must be images, (n, channels, ...), not {tuple(x.shape)}; for flattened images set "
                "input_shape=(channels, *grid)"
            )
        features = x.shape[1] if x.dim() == 2 else 1
        least = max(self.active_dims) + 1
        if features < least or (features > least and not self._chosen):
            raise ShapeError(
                f"{name} must have {'at least ' if self._chosen else ''}{least} features, not {features}"
                + ("; active_dims selects features" if features > least else "")
            )
        return self._slice_input(x).reshape(len(x), *self.input_shape)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a variance may be given a prior, or a number that fixes it."""
        if name in ("weight_variance", "bias_variance"):
            value = positive_number(name, value)
            if isinstance(value, Tensor):
                first = getattr(self.parameters_of_network, name.removesuffix("_variance"))
                if first is None or value.dim() and value.shape != first.shape:
                    wanted = (
                        "be absent for a network without biases"
                        if first is None
                        else f"have shape {tuple(first.shape)}"
                    )
                    raise ShapeError(f"{name} must {wanted}, not {tuple(value.shape)}")
                value = value.expand(first.shape)
                if name in self._pyro_samples:
                    delattr(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return kernel_in_words(self)


def kernel_in_words(kernel: Any) -> str:
    """Describe a kernel for Pyro or GPyTorch in one line, with its network and variances."""
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


def _log_normal(median: Tensor, spread: float, module: object) -> Any:
    """Return a log-normal distribution; Pyro passes the module as the last argument."""
    # Priors have torch's default dtype, like numbers in a model; the kernel uses the dtype of its inputs.
    median = median.to(torch.get_default_dtype())
    return dist.LogNormal(median.log(), spread).to_event(median.dim())


def _first_features(network: InfiniteWidth) -> torch.Size | None:
    """Return the shape of the network's inputs if they are vectors whose length its layers determine."""
    for node in network.graph.nodes:
        if INPUT in node.inputs and isinstance(node.layer, Dense):
            return torch.Size((node.layer.fan_in,))
    return None


# Regression with normal noise as a Pyro model, the function integrated out.


class RegressionModel(PyroModule):
    r"""Pyro model of Gaussian-process regression with normal noise.

    .. math:: \log v_w, \log v_b, \log \sigma^2 \sim N, \qquad y \mid v \sim N(0, K_v(x, x) + \sigma^2 I)

    Sites are ``noise_variance``, ``kernel.weight_variance``, ``kernel.bias_variance`` and the observed ``y``. Assign a
    ``pyro.nn.PyroSample`` to an attribute for a different prior, or a number to fix it.

    The prior mean is zero: subtract the mean of ``y`` first.

    Parameters
    ----------
    kernel : InfiniteWidth or pyro.contrib.gp.kernels.Kernel
        A network gets log-normal priors with its variances as medians; it accepts images directly.
    noise_variance : float, default 0.1
        Median of the log-normal prior of the noise variance.
    spread : float, default 1.0
        Standard deviation of the log variances in these priors.
    jitter : float, default 0.0
        Jitter on the diagonal, relative to its mean. If the covariance is still not positive definite, the log density
        of a :class:`~bayeskit.Target` is NaN, and samplers reject the point.
    tied : bool, default True
        For a network: whether all layers share one weight variance and one bias variance.
    covariance : {"nngp", "ntk"}, default "nngp"
        For a network.
    input_shape : sequence of int, optional
        For a network: shape of one input, ``(channels, *grid)``, if images are passed as vectors.

    Attributes
    ----------
    kernel : Kernel
    noise_variance : Tensor
    jitter : float

    Raises
    ------
    ModelError
        If the kernel is a torch module, or the output of its network is not normal.
    SettingsError
        If a number is outside its domain, also if it is assigned later.
    ShapeError, DataError
        When called, if data have the wrong shape or are not finite.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> module = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> model = RegressionModel(infinite_width(module, weight_variance=2.0, bias_variance=0.1))
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    >>> target = bk.Target.from_pyro(model, x, x[:, 0].abs())
    >>> [site.name for site in target.sites]
    ['kernel.bias_variance', 'kernel.weight_variance', 'noise_variance']
    """

    def __init__(
        self,
        kernel: InfiniteWidth | Kernel,
        noise_variance: float = 0.1,
        spread: float = 1.0,
        jitter: float = 0.0,
        *,
        tied: bool = True,
        covariance: str = "nngp",
        input_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        noise_variance = real_number("noise_variance", noise_variance, "(0, inf)")
        self.kernel = _as_kernel(kernel, spread, tied, covariance, input_shape)
        self.jitter = real_number("jitter", jitter, "[0, 1)")
        median = torch.tensor(noise_variance, dtype=torch.float64)
        self.noise_variance = PyroSample(partial(_log_normal, median, spread))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Run the model: sample ``y``, or condition on it.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
        y : Tensor, optional
            Observations, ``(n,)`` or ``(n, 1)``; sampled if absent.

        Returns
        -------
        Tensor
            ``(n,)``.
        """
        _check_data(self.kernel, x, "x")
        y = None if y is None else one_target(x, y)
        lower = torch.linalg.cholesky(self.covariance(x))
        return pyro.sample("y", dist.MultivariateNormal(x.new_zeros(len(x)), scale_tril=lower), obs=y)

    @pyro_method
    def covariance(self, x: Tensor) -> Tensor:
        """Return the covariance of observations at the current variances, noise and jitter included, ``(n, n)``."""
        prior = self.kernel(x)
        return _with_jitter(prior, self.jitter, torch.as_tensor(self.noise_variance).to(prior))

    def predict(
        self, values: Mapping[str, Tensor], x: Tensor, y: Tensor, x_new: Tensor, *, noise: bool = False
    ) -> NormalMixture:
        """Return the predictive distribution at new inputs for each posterior draw.

        Parameters
        ----------
        values : mapping
            Posterior draws of the sites, ``{site: (*batch, *shape)}``, for example from :meth:`bayeskit.Draws.values`.
        x, y : Tensor
            Training data.
        x_new : Tensor
            New inputs, ``(m, features)`` or ``(m, channels, *grid)``.
        noise : bool, default False
            Whether variances include observation noise.

        Returns
        -------
        NormalMixture
            Means and variances ``(draws, m)``; one draw if all variances are fixed.

        Raises
        ------
        DrawsError
            If a site has no value.
        KernelError
            If the covariance of the observations is not positive definite at a draw.
        """
        _check_data(self.kernel, x, "x")
        _check_data(self.kernel, x_new, "x_new")
        return _predict_each(partial(self._conditional, noise), values, x, one_target(x, y), x_new)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; the noise variance may be given a prior, or a number that fixes it."""
        super().__setattr__(name, positive_number(name, value) if name == "noise_variance" else value)

    @pyro_method
    def _conditional(self, noise: bool, x: Tensor, y: Tensor, x_new: Tensor) -> tuple[Tensor, Tensor]:
        data = Cholesky(torch.linalg.cholesky(self.covariance(x)))
        mean, less = data.conditional(self.kernel(x, x_new), data.whitened(y[:, None]).mT)
        variance = self.kernel(x_new, diag=True) - less
        return mean[0], variance + torch.as_tensor(self.noise_variance).to(variance) if noise else variance


def _as_kernel(
    kernel: InfiniteWidth | Kernel, spread: float, tied: bool, covariance: str, input_shape: Sequence[int] | None
) -> Kernel:
    """Return a kernel unchanged, or the kernel of a network with log-normal priors."""
    if not isinstance(kernel, Kernel):
        return PyroKernel(kernel, tied, covariance, input_shape).with_log_normal_priors(spread)
    if not tied or covariance != "nngp" or input_shape is not None:
        raise SettingsError(
            "tied, covariance and input_shape are for networks; for a kernel, set them in its PyroKernel"
        )
    return kernel


def _with_jitter(prior: Tensor, jitter: float, noise: Tensor | float = 0.0) -> Tensor:
    """Return a covariance ``(n, n)`` with noise, and jitter relative to its mean diagonal, as a traceable function."""
    added = noise + jitter * prior.diagonal().mean()
    return prior + added * torch.eye(len(prior), dtype=prior.dtype, device=prior.device)


def _check_data(kernel: Kernel, x: Tensor, name: str) -> None:
    """Raise an error if inputs do not fit a kernel or are not finite."""
    if isinstance(kernel, PyroKernel):
        kernel.shaped(x, name)
    else:
        check_vectors(x, name)


def one_target(x: Tensor, y: Tensor) -> Tensor:
    """Return targets, ``(n,)`` or ``(n, 1)``, as a vector, or raise an error if they do not fit."""
    if isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    return check_targets(x, y, one_output=True)


# Classification as a Pyro model, with whitened values of the latent functions.

_WHITE = "white"


class ClassificationModel(PyroModule):
    r"""Pyro model of Gaussian-process classification, with a Gaussian process for the logits.

    The function is :math:`f = L z` with :math:`K_v = L L^\top` and whitened values :math:`z \sim N(0, I)`. Two classes
    have one function, the logit of class 1. More classes have one function each, independent a priori, and a softmax.

    Sites are ``kernel.weight_variance``, ``kernel.bias_variance``, ``white``, of shape ``(n,)`` or ``(classes, n)``,
    and the observed ``labels``.

    Parameters
    ----------
    kernel : InfiniteWidth or pyro.contrib.gp.kernels.Kernel
        A network gets log-normal priors with its variances as medians; it accepts images directly.
    num_classes : int, default 2
    spread : float, default 1.0
        Standard deviation of the log variances in these priors.
    jitter : float, default 1e-8
        Jitter on the diagonal of :math:`K_v`, relative to its mean. If :math:`K_v` is still not positive definite, the
        log density of a :class:`~bayeskit.Target` is NaN, and samplers reject the point.
    tied : bool, default True
        For a network: whether all layers share one weight variance and one bias variance.
    covariance : {"nngp", "ntk"}, default "nngp"
        For a network.
    input_shape : sequence of int, optional
        For a network: shape of one input, ``(channels, *grid)``, if images are passed as vectors.

    Attributes
    ----------
    kernel : Kernel
    num_classes : int
    jitter : float

    Raises
    ------
    ModelError
        If the kernel is a torch module, or the output of its network is not normal.
    SettingsError
        If a number is outside its domain.
    ShapeError, DataError
        When called, if data have the wrong shape or are not finite, or labels are not valid classes.

    References
    ----------
    Murray, I., Adams, R. P. (2010). Slice sampling covariance hyperparameters of latent Gaussian models. Advances in
    Neural Information Processing Systems 23 (whitened values).

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> module = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> model = ClassificationModel(infinite_width(module, weight_variance=2.0, bias_variance=0.1))
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    >>> bk.Target.from_pyro(model, x, torch.tensor([0, 0, 1, 1, 1])).dim
    7
    """

    def __init__(
        self,
        kernel: InfiniteWidth | Kernel,
        num_classes: int = 2,
        spread: float = 1.0,
        jitter: float = 1e-8,
        *,
        tied: bool = True,
        covariance: str = "nngp",
        input_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.kernel = _as_kernel(kernel, spread, tied, covariance, input_shape)
        self.num_classes = whole_number("num_classes", num_classes, least=2)
        self.jitter = real_number("jitter", jitter, "[0, 1)")

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run the model: sample labels, or condition on them.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
        labels : Tensor, optional
            Class indices from zero, ``(n,)``; sampled if absent.

        Returns
        -------
        Tensor
            ``(n,)``.
        """
        _check_data(self.kernel, x, "x")
        if labels is not None:
            self._check_labels(x, labels)
        values = self.latent(x)
        with pyro.plate("data", len(x)):
            if self.num_classes > 2:
                return pyro.sample("labels", dist.Categorical(logits=values.mT), obs=labels)
            observed = None if labels is None else labels.to(x.dtype)
            return pyro.sample("labels", dist.Bernoulli(logits=values), obs=observed)

    @pyro_method
    def latent(self, x: Tensor) -> Tensor:
        """Return the latent functions at the training inputs, ``(n,)`` or ``(classes, n)``."""
        data, white = self._whitened(x)
        return white @ data.lower.mT

    def predict(self, values: Mapping[str, Tensor], x: Tensor, x_new: Tensor) -> NormalMixture:
        """Return the distribution of the latent functions at new inputs for each posterior draw.

        Parameters
        ----------
        values : mapping
            Posterior draws of the sites, ``{site: (*batch, *shape)}``, for example from :meth:`bayeskit.Draws.values`.
        x : Tensor
            Training inputs.
        x_new : Tensor
            New inputs, ``(m, features)`` or ``(m, channels, *grid)``.

        Returns
        -------
        NormalMixture
            Means ``(draws, m)`` or ``(draws, classes, m)``; variances ``(draws, m)`` or ``(draws, 1, m)``.

        Raises
        ------
        DrawsError
            If a site has no value.
        """
        _check_data(self.kernel, x, "x")
        _check_data(self.kernel, x_new, "x_new")
        return _predict_each(self._conditional, values, x, x_new)

    def predict_probabilities(
        self, values: Mapping[str, Tensor], x: Tensor, x_new: Tensor, *, seed: int | torch.Generator = 0
    ) -> Tensor:
        """Return class probabilities at new inputs for each posterior draw; predict with their mean over draws.

        Parameters
        ----------
        values, x, x_new
            As in :meth:`predict`.
        seed : int or torch.Generator, default 0
            For each posterior draw the latent functions at new inputs are sampled once.

        Returns
        -------
        Tensor
            ``(draws, m, classes)``.
        """
        laws = self.predict(values, x, x_new)
        generator = new_generator(seed, laws.means.device, stream="latent function")
        noise = torch.randn(laws.means.shape, generator=generator, dtype=laws.means.dtype, device=laws.means.device)
        function = laws.means + laws.variances.clamp_min(0).sqrt() * noise
        if self.num_classes > 2:
            return function.softmax(1).mT
        return torch.stack([torch.sigmoid(-function), torch.sigmoid(function)], -1)

    @pyro_method
    def _whitened(self, x: Tensor) -> tuple[Cholesky, Tensor]:
        """Return the Cholesky factor of the covariance, and the whitened values."""
        prior = self.kernel(x)
        shape = (len(x),) if self.num_classes == 2 else (self.num_classes, len(x))
        white = pyro.sample(_WHITE, dist.Normal(x.new_zeros(shape), 1.0).to_event(len(shape)))
        return Cholesky(torch.linalg.cholesky(_with_jitter(prior, self.jitter))), white

    @pyro_method
    def _conditional(self, x: Tensor, x_new: Tensor) -> tuple[Tensor, Tensor]:
        data, white = self._whitened(x)
        mean, less = data.conditional(self.kernel(x, x_new), white)
        variance = self.kernel(x_new, diag=True) - less
        return mean, variance if white.dim() == 1 else variance[None]

    def _check_labels(self, x: Tensor, labels: Tensor) -> None:
        if labels.shape != (len(x),):
            raise ShapeError(f"labels must have one entry per input, ({len(x)},), not {tuple(labels.shape)}")
        if labels.is_floating_point() or labels.is_complex():
            raise DataError(f"labels must be integers, not {labels.dtype}")
        if not bool(((labels >= 0) & (labels < self.num_classes)).all()):
            raise DataError(
                f"labels must be from 0 to {self.num_classes - 1}, but range from {labels.min()} to {labels.max()}"
            )
