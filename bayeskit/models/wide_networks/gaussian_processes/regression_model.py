"""Regression with normal noise as a Pyro model, the function integrated out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroModule, PyroSample, pyro_method
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks.gaussian_processes.parameters import positive_number
from bayeskit.models.wide_networks.gaussian_processes.predictive import NormalMixture, predict_each
from bayeskit.models.wide_networks.gaussian_processes.pyro_kernel import PyroKernel, log_normal
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.inputs import check_targets, check_vectors
from bayeskit.models.wide_networks.regression.cholesky import Cholesky


class RegressionModel(PyroModule):
    r"""A Gaussian process with noise; called with data, it is a Pyro model of ``y`` given ``x``.

    .. math:: \log v_w, \log v_b, \log \sigma^2 \sim N, \qquad y \mid v \sim N(0, K_v(x, x) + \sigma^2 I)

    Sites are ``noise_variance``, those of the kernel (``kernel.weight_variance``, ``kernel.bias_variance``) and the
    observed ``y``. Assign another ``pyro.nn.PyroSample`` to an attribute for another prior, or a number to fix it.

    The prior's mean is zero; subtract that of ``y`` first.

    Parameters
    ----------
    kernel : InfiniteWidth or pyro.contrib.gp.kernels.Kernel
        A network gets log-normal priors whose medians are its variances; it takes images as they are.
    noise_variance : float, default 0.1
        The median of the noise variance's log-normal prior.
    spread : float, default 1.0
        The standard deviation of logarithms, in these priors.
    jitter : float, default 0.0
        Added to the diagonal, relative to its mean. Where the covariance is not positive definite even so, the
        density of a :class:`~bayeskit.Target` is not a number, and samplers turn back.
    tied : bool, default True
        Whether all layers of a network share one variance of weights and one of biases, or have their own.
    covariance : {"nngp", "ntk"}, default "nngp"
        Of a network.
    input_shape : sequence of int, optional
        Of one input of a network, ``(channels, *grid)``, if images come as vectors.

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
        If a number is out of its domain, also one that is assigned later.
    ShapeError, DataError
        When called, if data do not fit or are not finite.

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
        noise_variance = real_number("noise_variance", noise_variance, between=(0, float("inf")))
        self.kernel = as_kernel(kernel, spread, tied, covariance, input_shape)
        self.jitter = real_number("jitter", jitter, between=(-1e-300, 1))
        median = torch.tensor(noise_variance, dtype=torch.float64)
        self.noise_variance = PyroSample(partial(log_normal, median, spread))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample or observe the data.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
        y : Tensor, optional
            Values, ``(n,)`` or ``(n, 1)``; drawn if they are not given.

        Returns
        -------
        Tensor
            ``(n,)``.
        """
        check_data(self.kernel, x, "x")
        y = None if y is None else one_target(x, y)
        lower = torch.linalg.cholesky(self.covariance(x))
        return pyro.sample("y", dist.MultivariateNormal(x.new_zeros(len(x)), scale_tril=lower), obs=y)

    @pyro_method
    def covariance(self, x: Tensor) -> Tensor:
        """Return the covariance of the data at the present variances, noise and jitter included, ``(n, n)``."""
        prior = self.kernel(x)
        added = torch.as_tensor(self.noise_variance).to(prior) + self.jitter * prior.diagonal().mean()
        return prior + added * torch.eye(len(x), dtype=x.dtype, device=x.device)

    def predict(
        self, values: Mapping[str, Tensor], x: Tensor, y: Tensor, x_new: Tensor, *, noise: bool = False
    ) -> NormalMixture:
        """Return the function at new inputs, or observations there, draw by draw.

        Parameters
        ----------
        values : mapping
            Draws of the sites, ``{site: (*batch, *shape)}``, such as :meth:`bayeskit.Draws.values` returns.
        x, y : Tensor
            The data.
        x_new : Tensor
            ``(m, features)`` or ``(m, channels, *grid)``.
        noise : bool, default False
            Whether variances are those of observations, noise included, or of the function.

        Returns
        -------
        NormalMixture
            With means and variances ``(draws, m)``; one draw if all variances are fixed.

        Raises
        ------
        DrawsError
            If a site has no value.
        KernelError
            If the covariance of the data is not positive definite at some draw.
        """
        check_data(self.kernel, x, "x")
        check_data(self.kernel, x_new, "x_new")
        return predict_each(partial(self._conditional, noise), values, x, one_target(x, y), x_new)

    def __setattr__(self, name: str, value: object) -> None:
        """Take a prior for the noise variance, or a number that fixes it."""
        super().__setattr__(name, positive_number(name, value) if name == "noise_variance" else value)

    @pyro_method
    def _conditional(self, noise: bool, x: Tensor, y: Tensor, x_new: Tensor) -> tuple[Tensor, Tensor]:
        data = Cholesky(torch.linalg.cholesky(self.covariance(x)))
        white = data.whitened(self.kernel(x, x_new))
        mean = white.mT @ data.whitened(y[:, None])[:, 0]
        variance = self.kernel(x_new, diag=True) - white.square().sum(0)
        return mean, variance + torch.as_tensor(self.noise_variance).to(variance) if noise else variance


def as_kernel(
    kernel: InfiniteWidth | Kernel, spread: float, tied: bool, covariance: str, input_shape: Sequence[int] | None
) -> Kernel:
    """Return a kernel as it is, or that of a network, with priors."""
    if not isinstance(kernel, Kernel):
        return PyroKernel(kernel, tied, covariance, input_shape).with_log_normal_priors(spread)
    if not tied or covariance != "nngp" or input_shape is not None:
        raise SettingsError("tied, covariance and input_shape are settings of a network; give them to its PyroKernel")
    return kernel


def check_data(kernel: Kernel, x: Tensor, name: str) -> None:
    """Refuse inputs that a kernel cannot take, or that are not finite."""
    if isinstance(kernel, PyroKernel):
        kernel.shaped(x, name)
    else:
        check_vectors(x, name)


def one_target(x: Tensor, y: Tensor) -> Tensor:
    """Return values at inputs, ``(n,)`` or ``(n, 1)``, as a vector, or say what is wrong with them."""
    if isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    return check_targets(x, y, one_output=True)
