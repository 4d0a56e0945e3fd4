"""Ensembles of wide networks trained by gradient flow or gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeskit.errors import ModelError, SettingsError
from bayeskit.extend import real_number, whole_number
from bayeskit.models.wide_networks._kernels import InfiniteWidth
from bayeskit.models.wide_networks._layers import check_targets
from bayeskit.models.wide_networks.gaussian_processes._factors import Spectrum, check_accuracy, spectrum
from bayeskit.models.wide_networks.gaussian_processes._posterior import (
    GaussianProcess,
    check_kernel,
    remaining_variance,
)
from bayeskit.models.wide_networks.gaussian_processes._wide_kernels import (
    WideKernel,
    both,
    kernel_diagonal,
    refuse_module,
)

# Progress of training in each eigendirection: gradient flow and gradient descent.


@dataclass(frozen=True)
class GradientFlow:
    r"""Gradient flow: gradient descent in the limit of small steps, :math:`\dot\theta = -\eta \nabla L`.

    Attributes
    ----------
    learning_rate : float, default 1.0
        :math:`\eta`.
    time : float, default inf

    Raises
    ------
    SettingsError
        If the learning rate is not positive or time is negative.

    Examples
    --------
    >>> import torch
    >>> GradientFlow(0.1, time=20.0).learned(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8647])
    """

    learning_rate: float = 1.0
    time: float = math.inf

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, "(0, inf)")
        real_number("time", self.time, "[0, inf]")

    def learned(self, curvature: Tensor) -> Tensor:
        """Return the fraction of the error removed in directions with these curvatures of the loss, ``(n,)``."""
        if math.isinf(self.time):
            return torch.ones_like(curvature)
        return -torch.expm1(-self.learning_rate * self.time * curvature)

    def __str__(self) -> str:
        end = "to infinite time" if math.isinf(self.time) else f"to time {self.time:g}"
        return f"gradient flow {end}, learning rate {self.learning_rate:g}"


@dataclass(frozen=True)
class GradientDescent:
    """Full-batch gradient descent.

    Attributes
    ----------
    learning_rate : float
    num_steps : int

    Raises
    ------
    SettingsError
        If the learning rate is not positive or the number of steps negative.

    Examples
    --------
    >>> import torch
    >>> GradientDescent(0.1, num_steps=20).learned(torch.tensor([0.0, 1.0, 15.0]))
    tensor([0.0000, 0.8784, 1.0000])
    """

    learning_rate: float
    num_steps: int

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, "(0, inf)")
        whole_number("num_steps", self.num_steps, least=0)

    def learned(self, curvature: Tensor) -> Tensor:
        """Return the fraction of the error removed in directions with these curvatures of the loss, ``(n,)``.

        Raises
        ------
        SettingsError
            If the learning rate exceeds two over the largest curvature, so that descent diverges.
        """
        step = self.learning_rate * curvature
        if float(step.max()) > 2:
            raise SettingsError(
                f"gradient descent diverges with learning rate {self.learning_rate:g}; the learning rate must be at "
                f"most {2 / float(curvature.max()):.4g}, two over the largest curvature"
            )
        small = step < 0.5
        slowly = -torch.expm1(self.num_steps * torch.log1p(-torch.where(small, step, 0)))
        return torch.where(small, slowly, 1 - (1 - step) ** self.num_steps)

    def __str__(self) -> str:
        return f"{self.num_steps} steps of gradient descent, learning rate {self.learning_rate:g}"


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble(GaussianProcess):
    """Distribution of trained networks; made by :func:`ntk_ensemble` or :func:`last_layer_ensemble`.

    Attributes
    ----------
    kernel : WideKernel
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    last_layer : bool
        Whether only the last layer is trained.
    training : GradientFlow or GradientDescent
        Training algorithm, learning rate and duration.
    ridge : float
        Weight of half the squared distance from the initial weights, in the loss.
    target_noise : float
        Variance of the noise added to each network's targets.
    spectrum : Spectrum
        Eigendecomposition of the kernel of the training dynamics.
    initial : Tensor
        Covariance of initial outputs at training inputs, in the basis of the eigenvectors, ``(n, n)``.
    """

    kernel: WideKernel
    x: Tensor
    y: Tensor
    last_layer: bool
    training: GradientFlow | GradientDescent
    ridge: float
    target_noise: float
    spectrum: Spectrum
    initial: Tensor

    @property
    def jitter(self) -> float:
        """Jitter added to the diagonal of the kernel matrix."""
        return self.spectrum.jitter

    @property
    def name(self) -> str:
        """Name of the process."""
        return "last-layer ensemble" if self.last_layer else "NTK ensemble"

    @property
    def random(self) -> str:
        """Source of the variance, in words."""
        return "the initial weights" + (" and the noise of targets" if self.target_noise else "")

    @property
    def trained(self) -> str:
        """Description of the training, in words."""
        return f"{'the last layer' if self.last_layer else 'all layers'}, by {self.training}"

    @property
    def largest_learning_rate(self) -> float:
        """Largest learning rate at which gradient descent does not diverge."""
        return 2 / float(self._curvature()[-1])

    def at(self, time: float) -> Ensemble:
        """Return the ensemble at another time of gradient flow; the eigendecomposition is reused."""
        return replace(self, training=GradientFlow(self.training.learning_rate, time))

    def after(self, num_steps: int) -> Ensemble:
        """Return the ensemble after ``num_steps`` steps of gradient descent, without discretisation error.

        Raises
        ------
        SettingsError
            If the learning rate is above :attr:`largest_learning_rate`.
        """
        descent = GradientDescent(self.training.learning_rate, num_steps)
        descent.learned(self._curvature())
        return replace(self, training=descent)

    def prior_variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs before training, ``(n_new,)``."""
        return kernel_diagonal(self.kernel.nngp, x_new)

    def mean(self, x_new: Tensor) -> Tensor:
        """Return the mean at new inputs, ``(n_new, *outputs)``."""
        cross = self.kernel.nngp(x_new, self.x) if self.last_layer else self.kernel.ntk(x_new, self.x)
        y = self.spectrum.rotated(self.y.reshape(len(self.y), -1).mT)
        return (self._smoother(cross) @ y.mT).reshape(-1, *self.y.shape[1:])

    def covariance(self, x_new: Tensor) -> Tensor:
        """Return the covariance of each output between new inputs, ``(n_new, n_new)``."""
        smoother, initial = self._both(x_new)
        half = smoother @ (0.5 * self._noisy_initial() @ smoother.mT - initial.mT)
        return self.kernel.nngp(x_new) + half + half.mT

    def variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs, ``(n_new,)``."""
        smoother, initial = self._both(x_new)
        change = (smoother * (smoother @ self._noisy_initial() - 2 * initial)).sum(1)
        return remaining_variance(self.prior_variance(x_new), change)

    def training_loss(self, times: Tensor) -> Tensor:
        """Return the expected training loss along gradient flow, without the ridge term.

        Parameters
        ----------
        times : Tensor
            Non-negative, inf allowed, ``(T,)``.

        Returns
        -------
        Tensor
            Half the expected sum of squared errors over training data and outputs, ``(T,)``.

        Raises
        ------
        SettingsError
            If a time is negative.
        """
        y = self.y.reshape(len(self.y), -1)
        start = self.spectrum.rotated(y.mT).square().sum(0) + y.shape[1] * self._noisy_initial().diagonal()
        if bool((times < 0).any()):
            raise SettingsError("times must not be negative")
        curvature = self._curvature()
        remaining = torch.exp(-self.training.learning_rate * times.to(curvature)[:, None] * curvature)
        # With a ridge or jitter, the training error does not go to zero.
        error = remaining + (self.ridge + self.jitter) / curvature * (1 - remaining)
        return 0.5 * error.square() @ start

    def _curvature(self) -> Tensor:
        return self.spectrum.eigenvalues + self.ridge

    def _noisy_initial(self) -> Tensor:
        return self.initial + self.target_noise * torch.eye(len(self.y), dtype=self.y.dtype, device=self.y.device)

    def _smoother(self, cross: Tensor) -> Tensor:
        """Return the weights of the rotated targets in the outputs at new inputs, ``(n_new, n)``."""
        curvature = self._curvature()
        return self.spectrum.rotated(cross) * (self.training.learned(curvature) / curvature)

    def _both(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smoother, and covariances of initial outputs with those at training inputs, ``(n_new, n)``."""
        if self.last_layer:
            nngp = ntk = self.kernel.nngp(x_new, self.x)
        else:
            nngp, ntk = both(self.kernel, x_new, self.x)
        return self._smoother(ntk), self.spectrum.rotated(nngp)

    def __repr__(self) -> str:
        parts = [f"{self.name} on {len(self.y)} inputs: {self.training}"]
        parts += [f"ridge {self.ridge:g}"] if self.ridge else []
        parts += [f"target noise {self.target_noise:g}"] if self.target_noise else []
        parts += [f"jitter {self.jitter:g}"] if self.jitter else []
        return ", ".join(parts)


def ntk_ensemble(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    *,
    learning_rate: float = 1.0,
    time: float = math.inf,
    ridge: float = 0.0,
    target_noise: float = 0.0,
    max_jitter: float | None = None,
) -> Ensemble:
    r"""Return the distribution of infinitely wide networks after training.

    Each network starts from independent random weights :math:`\theta_0` and is trained by gradient flow
    :math:`\dot\theta = -\eta\, \nabla L` on the loss

    .. math:: L(\theta) = \tfrac12 \sum_i |f_\theta(x_i) - y_i|^2 + \tfrac\rho2 |\theta - \theta_0|^2.

    With the tangent kernel :math:`\Theta`, outputs at a new input are the initial outputs plus
    :math:`A\,(y - f_{\theta_0}(x))`, where :math:`A = \Theta_{*x} (\Theta + \rho)^{-1} (1 - e^{-\eta (\Theta + \rho)
    t})`, and therefore normal. This distribution is not a posterior. The rate for a mean of squares,
    ``torch.nn.MSELoss``, times ``2 / y.numel()`` is :math:`\eta`.

    Parameters
    ----------
    kernel : WideKernel
        For example from :func:`~bayeskit.models.wide_networks.infinite_width`, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Targets, ``(n,)`` or ``(n, outputs)``.
    learning_rate : float, default 1.0
        :math:`\eta`; only its product with time matters.
    time : float, default inf
        :math:`t`. :meth:`Ensemble.at` gives other times, :meth:`Ensemble.after` steps of gradient descent.
    ridge : float, default 0.0
        :math:`\rho`.
    target_noise : float, default 0.0
        Variance of normal noise added to the targets, drawn once per network.
    max_jitter : float, optional
        Largest jitter allowed, relative to the mean of the kernel's diagonal; by default the square root of the machine
        precision, or more if the rounding error of eigenvalues is larger. The attribute ``jitter`` is the jitter added.

    Returns
    -------
    Ensemble

    Raises
    ------
    ShapeError, DataError
        If the shapes or types of the data do not match each other or the kernel.
    SettingsError
        If the learning rate is not positive, or time, ridge or noise are negative.
    KernelError
        If the matrix of the tangent kernel is not positive definite. ``variance`` raises it if the matrix of all inputs
        is not.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If the ridge is too small for equal or nearly equal inputs that have different targets, and time is infinite.

    References
    ----------
    Lee, J., Xiao, L., Schoenholz, S. S., Bahri, Y., Novak, R., Sohl-Dickstein, J., Pennington, J. (2019). Wide neural
    networks of any depth evolve as linear models under gradient descent. Advances in Neural Information Processing
    Systems 32. Equations 14 to 16.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), bias_variance=0.1)
    >>> x = torch.tensor([[-1.0], [0.5], [1.0]], dtype=torch.float64)
    >>> ensemble = ntk_ensemble(kernel, x, torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64))
    >>> ensemble
    NTK ensemble on 3 inputs: gradient flow to infinite time, learning rate 1
    >>> ensemble.mean(x).round(decimals=9).abs()  # they interpolate
    tensor([1.0000, 0.0000, 0.5000], dtype=torch.float64)
    >>> ensemble.at(0.0).variance(x) == kernel.nngp_diagonal(x)
    tensor([True, True, True])
    """
    flow = GradientFlow(learning_rate, time)
    return _ensemble(kernel, x, y, False, flow, ridge, target_noise, max_jitter)


def last_layer_ensemble(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    *,
    learning_rate: float = 1.0,
    time: float = math.inf,
    ridge: float = 0.0,
    target_noise: float = 0.0,
    max_jitter: float | None = None,
) -> Ensemble:
    """Return the distribution of infinitely wide networks after training the last layer only.

    In the NTK parametrisation, the tangent kernel of the last layer is the covariance of the outputs. If training time
    is infinite and ``target_noise`` equals ``ridge``, the distribution is :func:`nngp_posterior` with that noise
    variance.

    Parameters and errors are the same as for :func:`ntk_ensemble`.

    Returns
    -------
    Ensemble

    Raises
    ------
    ModelError
        Also if the kernel is in the standard parametrisation, in which products of gradients grow with the width.

    References
    ----------
    Matthews, A. G. de G., Hron, J., Turner, R. E., Ghahramani, Z. (2017). Sample-then-optimize posterior sampling for
    Bayesian linear models. NeurIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.gaussian_processes import PrecomputedKernel
    >>> kernel = PrecomputedKernel(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    >>> old, new = torch.tensor([0]), torch.tensor([1])
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> last_layer_ensemble(kernel, old, y, ridge=2.0, target_noise=2.0).variance(new)
    tensor([1.7500], dtype=torch.float64)
    """
    if isinstance(kernel, InfiniteWidth) and kernel.parameterization != "ntk":
        raise ModelError(
            f"the kernel is in the {kernel.parameterization} parametrisation, in which the last layer's products of "
            'gradients grow with the width; use infinite_width(module, "ntk", ...)'
        )
    flow = GradientFlow(learning_rate, time)
    return _ensemble(kernel, x, y, True, flow, ridge, target_noise, max_jitter)


def _ensemble(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    last_layer: bool,
    flow: GradientFlow,
    ridge: float,
    target_noise: float,
    max_jitter: float | None,
) -> Ensemble:
    ridge, target_noise = real_number("ridge", ridge, "[0, inf]"), real_number("target_noise", target_noise, "[0, inf]")
    refuse_module(kernel)
    y = check_targets(x, y)
    nngp, ntk = (kernel.nngp(x), None) if last_layer else both(kernel, x)
    nngp = check_kernel(nngp, x, y, "NNGP")
    followed = nngp if ntk is None else check_kernel(ntk, x, y, "NTK")
    name = "NNGP" if last_layer else "NTK"
    found = spectrum(followed, ridge, name, max_jitter)
    if math.isinf(flow.time):
        check_accuracy(*found.solved(y, ridge), float(found.eigenvalues[-1]), name)
    initial = found.eigenvectors.mT @ nngp @ found.eigenvectors
    return Ensemble(
        kernel=kernel,
        x=x,
        y=y,
        last_layer=last_layer,
        training=flow,
        ridge=ridge,
        target_noise=target_noise,
        spectrum=found,
        initial=initial,
    )
