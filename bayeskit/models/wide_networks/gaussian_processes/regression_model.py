"""Regression with normal noise as a Pyro model, the function integrated out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroModule, PyroSample, pyro_method
from torch import Tensor

from bayeskit._settings import real_number
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

    Parameters
    ----------
    kernel : InfiniteWidth or pyro.contrib.gp.kernels.Kernel
        A network gets log-normal priors whose medians are its variances.
    noise_variance : float, default 0.1
        The median of the noise variance's log-normal prior.
    spread : float, default 1.0
        The standard deviation of logarithms, in these priors.
    jitter : float, default 0.0
        Added to the diagonal, relative to its mean. Where the covariance is not positive definite even so, the
        density of a :class:`~bayeskit.Target` is not a number, and samplers turn back.

    Attributes
    ----------
    kernel : Kernel
    noise_variance : Tensor
    jitter : float

    Raises
    ------
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
    ) -> None:
        super().__init__()
        real_number("noise_variance", noise_variance, between=(0, float("inf")))
        self.kernel = as_kernel(kernel, spread)
        self.jitter = real_number("jitter", jitter, between=(-1e-300, 1))
        self.noise_variance = PyroSample(partial(log_normal, torch.tensor(noise_variance).double(), spread))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample or observe the data.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, features)``.
        y : Tensor, optional
            Values, ``(n,)``; drawn if they are not given.

        Returns
        -------
        Tensor
            ``(n,)``.
        """
        check_vectors(x, "x")
        if y is not None:
            check_targets(x, y, one_output=True)
        lower = torch.linalg.cholesky(self.covariance(x))
        return pyro.sample("y", dist.MultivariateNormal(x.new_zeros(len(x)), scale_tril=lower), obs=y)

    @pyro_method
    def covariance(self, x: Tensor) -> Tensor:
        """Return the covariance of the data at the present variances, noise and jitter included, ``(n, n)``."""
        prior = self.kernel(x)
        added = torch.as_tensor(self.noise_variance).to(prior) + self.jitter * prior.diagonal().mean()
        return prior + added * torch.eye(len(x), dtype=x.dtype, device=x.device)

    def predict(self, values: Mapping[str, Tensor], x: Tensor, y: Tensor, x_new: Tensor) -> NormalMixture:
        """Return the function at new inputs, draw by draw.

        Parameters
        ----------
        values : mapping
            Draws of the sites, ``{site: (*batch, *shape)}``, such as :meth:`bayeskit.Draws.values` returns.
        x, y : Tensor
            The data.
        x_new : Tensor
            ``(m, features)``.

        Returns
        -------
        NormalMixture
            With means and variances ``(draws, m)``.

        Raises
        ------
        DrawsError
            If a site has no value.
        """
        check_vectors(x, "x")
        check_vectors(x_new, "x_new")
        check_targets(x, y, one_output=True)
        return predict_each(self._conditional, values, "noise_variance", 0, x, y, x_new)

    @pyro_method
    def _conditional(self, x: Tensor, y: Tensor, x_new: Tensor) -> tuple[Tensor, Tensor]:
        data = Cholesky(torch.linalg.cholesky(self.covariance(x)))
        white = data.whitened(self.kernel(x, x_new))
        mean = white.mT @ data.whitened(y[:, None])[:, 0]
        return mean, self.kernel(x_new, diag=True) - white.square().sum(0)


def as_kernel(kernel: InfiniteWidth | Kernel, spread: float) -> Kernel:
    """Return a kernel as it is, or that of a network, with priors."""
    if isinstance(kernel, InfiniteWidth):
        return PyroKernel(kernel).with_log_normal_priors(spread)
    return kernel
