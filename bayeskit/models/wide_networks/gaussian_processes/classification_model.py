"""Classification as a Pyro model, with whitened values of the latent functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroModule, pyro_method
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, ShapeError
from bayeskit.models.wide_networks.gaussian_processes.predictive import NormalMixture, predict_each
from bayeskit.models.wide_networks.gaussian_processes.regression_model import as_kernel, check_data
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth

WHITE = "white"


class ClassificationModel(PyroModule):
    r"""A Gaussian process whose values are logits; called with data, it is a Pyro model of labels given ``x``.

    With :math:`K_v = L L^\top` and white values :math:`z \sim N(0, I)` the function is :math:`f = L z`. Two classes
    have one function, the logit of class one; more have one each, independent a priori, and the softmax.

    Sites are those of the kernel (``kernel.weight_variance``, ``kernel.bias_variance``), ``white``, of shape ``(n,)``
    or ``(classes, n)``, and the observed ``labels``.

    Parameters
    ----------
    kernel : InfiniteWidth or pyro.contrib.gp.kernels.Kernel
        A network gets log-normal priors whose medians are its variances; it takes images as they are.
    num_classes : int, default 2
    spread : float, default 1.0
        The standard deviation of logarithms, in these priors.
    jitter : float, default 1e-8
        Added to the diagonal of :math:`K_v`, relative to its mean. Where it is not positive definite even so, the
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
    num_classes : int
    jitter : float

    Raises
    ------
    ModelError
        If the kernel is a torch module, or the output of its network is not normal.
    SettingsError
        If a number is out of its domain.
    ShapeError, DataError
        When called, if data do not fit or are not finite, or labels are no classes.

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
        self.kernel = as_kernel(kernel, spread, tied, covariance, input_shape)
        self.num_classes = whole_number("num_classes", num_classes, least=2)
        self.jitter = real_number("jitter", jitter, between=(-1e-300, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Sample or observe labels.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
        labels : Tensor, optional
            Integers from zero, ``(n,)``; drawn if they are not given.

        Returns
        -------
        Tensor
            ``(n,)``.
        """
        check_data(self.kernel, x, "x")
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
        """Return the functions at the data, ``(n,)`` or ``(classes, n)``."""
        lower, white = self._whitened(x)
        return white @ lower.mT

    def predict(self, values: Mapping[str, Tensor], x: Tensor, x_new: Tensor) -> NormalMixture:
        """Return the functions at new inputs, draw by draw.

        Parameters
        ----------
        values : mapping
            Draws of the sites, ``{site: (*batch, *shape)}``, such as :meth:`bayeskit.Draws.values` returns.
        x : Tensor
            The inputs of the data.
        x_new : Tensor
            ``(m, features)`` or ``(m, channels, *grid)``.

        Returns
        -------
        NormalMixture
            Means ``(draws, m)`` or ``(draws, classes, m)``; variances ``(draws, m)`` or ``(draws, 1, m)``.

        Raises
        ------
        DrawsError
            If a site has no value.
        """
        check_data(self.kernel, x, "x")
        check_data(self.kernel, x_new, "x_new")
        return predict_each(self._conditional, values, x, x_new)

    def predict_probabilities(
        self, values: Mapping[str, Tensor], x: Tensor, x_new: Tensor, seed: int | torch.Generator = 0
    ) -> Tensor:
        """Return probabilities of classes at new inputs, draw by draw; their mean over draws is the prediction.

        Parameters
        ----------
        values, x, x_new
            As in :meth:`predict`.
        seed : int or torch.Generator, default 0
            The function at a new input is drawn once, given each draw of its values at the data.

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
    def _whitened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the triangle of the covariance and the white values."""
        prior = self.kernel(x)
        shape = (len(x),) if self.num_classes == 2 else (self.num_classes, len(x))
        white = pyro.sample(WHITE, dist.Normal(x.new_zeros(shape), 1.0).to_event(len(shape)))
        jitter = self.jitter * prior.diagonal().mean()
        return torch.linalg.cholesky(prior + jitter * torch.eye(len(x), dtype=x.dtype, device=x.device)), white

    @pyro_method
    def _conditional(self, x: Tensor, x_new: Tensor) -> tuple[Tensor, Tensor]:
        lower, white = self._whitened(x)
        rest = torch.linalg.solve_triangular(lower, self.kernel(x, x_new), upper=False)
        variance = self.kernel(x_new, diag=True) - rest.square().sum(0)
        return white @ rest, variance if white.dim() == 1 else variance[None]

    def _check_labels(self, x: Tensor, labels: Tensor) -> None:
        if labels.shape != (len(x),):
            raise ShapeError(f"labels must have one for each of {len(x)} inputs, not {tuple(labels.shape)}")
        if labels.is_floating_point() or labels.is_complex():
            raise DataError(f"labels must be integers, not {labels.dtype}")
        if not bool(((labels >= 0) & (labels < self.num_classes)).all()):
            raise DataError(
                f"labels must lie from 0 to {self.num_classes - 1}; those given reach {labels.min()} and {labels.max()}"
            )
