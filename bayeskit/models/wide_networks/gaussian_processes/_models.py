"""Pyro models of regression and classification with infinitely wide networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroModule, PyroSample, pyro_method
from torch import Tensor

from bayeskit.errors import DataError, DrawsError, KernelError, SettingsError, ShapeError
from bayeskit.extend import global_stream, new_generator, process_state, real_number, whole_number
from bayeskit.models.wide_networks._kernels import InfiniteWidth
from bayeskit.models.wide_networks._layers import check_targets, check_vectors
from bayeskit.models.wide_networks.gaussian_processes._factors import Cholesky
from bayeskit.models.wide_networks.gaussian_processes._parameters import positive_number
from bayeskit.models.wide_networks.gaussian_processes._pyro_kernel import PyroKernel, log_normal

# Predictions of a Pyro model of a Gaussian process, draw by draw.

_CHUNK = 1 << 22  # largest number of covariances held at once

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

    length = max(_CHUNK // (len(x) * (len(x) + len(rest[-1]))), 1)
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
    tied, covariance, input_shape
        For a network, as in :class:`PyroKernel`.

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
        self.noise_variance = PyroSample(partial(log_normal, median, spread))

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
        y = None if y is None else check_targets(x, y, one_output=True)
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
        return _predict_each(partial(self._conditional, noise), values, x, check_targets(x, y, one_output=True), x_new)

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
    tied, covariance, input_shape
        For a network, as in :class:`PyroKernel`.

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
