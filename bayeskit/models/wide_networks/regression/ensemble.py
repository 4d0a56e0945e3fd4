"""The law of wide networks that gradient flow has trained from random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeskit.errors import ModelError, SettingsError
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.inputs import check_targets
from bayeskit.models.wide_networks.regression.jitter import check_accuracy, not_negative
from bayeskit.models.wide_networks.regression.kernels import WideKernel, both, diagonal, refuse_module
from bayeskit.models.wide_networks.regression.process import GaussianProcess, check_kernel, remaining_variance
from bayeskit.models.wide_networks.regression.spectrum import Spectrum, spectrum
from bayeskit.models.wide_networks.regression.training import GradientDescent, GradientFlow


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble(GaussianProcess):
    """The law of trained networks; made by :func:`ntk_ensemble` or :func:`last_layer_ensemble`.

    Attributes
    ----------
    kernel : WideKernel
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    last_layer : bool
        Whether only the last layer is trained.
    training : GradientFlow or GradientDescent
        How long, and at what rate.
    ridge : float
        Weight of half the squared distance from the initial weights, in the loss.
    target_noise : float
        Variance of the noise that each network's targets have of their own.
    spectrum : Spectrum
        Of the kernel that training follows.
    initial : Tensor
        Covariance of the initial outputs at training inputs, in the basis of the spectrum, ``(n, n)``.
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
        """What rounding made it necessary to add to the diagonal of the kernel matrix."""
        return self.spectrum.jitter

    @property
    def name(self) -> str:
        """What it is called."""
        return "last-layer ensemble" if self.last_layer else "NTK ensemble"

    @property
    def random(self) -> str:
        """What its variance is over, in words."""
        return "the initial weights" + (" and the noise of targets" if self.target_noise else "")

    @property
    def trained(self) -> str:
        """What was trained, in words."""
        return f"{'the last layer' if self.last_layer else 'all layers'}, by {self.training}"

    @property
    def largest_learning_rate(self) -> float:
        """The learning rate beyond which gradient descent diverges."""
        return 2 / float(self._curvature()[-1])

    def at(self, time: float) -> Ensemble:
        """Return the networks at another time of gradient flow; nothing is decomposed again."""
        return replace(self, training=GradientFlow(self.training.learning_rate, time))

    def after(self, num_steps: int) -> Ensemble:
        """Return the networks after some steps of gradient descent at their learning rate, which is exact, too.

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
        return diagonal(self.kernel.nngp, x_new)

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
        """Return the expected loss of a network on its targets along gradient flow, without the ridge's term.

        Parameters
        ----------
        times : Tensor
            ``(T,)``; not negative, inf is fine.

        Returns
        -------
        Tensor
            Half the sum of squared errors over all training data and outputs, ``(T,)``.

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
        # The ridge, and the jitter that acts as one, keep networks from their targets for ever.
        error = remaining + (self.ridge + self.jitter) / curvature * (1 - remaining)
        return 0.5 * error.square() @ start

    def _curvature(self) -> Tensor:
        return self.spectrum.eigenvalues + self.ridge

    def _noisy_initial(self) -> Tensor:
        return self.initial + self.target_noise * torch.eye(len(self.y), dtype=self.y.dtype, device=self.y.device)

    def _smoother(self, cross: Tensor) -> Tensor:
        """Return what each direction of the targets adds to new outputs, ``(n_new, n)``."""
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
    r"""Return the law of infinitely wide networks after training.

    Each network has initial weights :math:`\theta_0` of its own, and gradient flow
    :math:`\dot\theta = -\eta\, \nabla L` minimises half the sum of squares over training data and outputs,

    .. math:: L(\theta) = \tfrac12 \sum_i |f_\theta(x_i) - y_i|^2 + \tfrac\rho2 |\theta - \theta_0|^2.

    With the tangent kernel :math:`\Theta`, outputs at a new input are those at initialisation plus
    :math:`A\,(y - f_{\theta_0}(x))`, where :math:`A = \Theta_{*x} (\Theta + \rho)^{-1} (1 - e^{-\eta (\Theta + \rho)
    t})`, so that they stay normal. Their law is no posterior. For a mean of squares, see :func:`mean_squares_rate`.

    Parameters
    ----------
    kernel : WideKernel
        Such as :func:`~bayeskit.models.wide_networks.infinite_width` returns, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Targets, ``(n,)`` or ``(n, outputs)``.
    learning_rate : float, default 1.0
        :math:`\eta`; only its product with time matters.
    time : float, default inf
        Other times, and steps of gradient descent, are had from the result: :meth:`Ensemble.at`,
        :meth:`Ensemble.after`.
    ridge : float, default 0.0
        :math:`\rho`; see :func:`relative_ridge` for a share of the kernel's diagonal.
    target_noise : float, default 0.0
        Variance of normal noise that is added to each network's targets, drawn once a network.
    max_jitter : float, optional
        What may be added to the diagonal where rounding makes it necessary, in units of its mean; by default the
        square root of the machine's precision, or rounding errors of eigenvalues where these are more. What was added
        is the attribute ``jitter``.

    Returns
    -------
    Ensemble

    Raises
    ------
    ShapeError, DataError
        If data do not fit one another or the kernel.
    SettingsError
        If the learning rate is not positive, or time, ridge or noise are negative.
    KernelError
        If the matrix of the tangent kernel is not positive definite; ``variance`` raises it where that of all inputs
        is not.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If equal inputs, or nearly equal ones, have different targets without a ridge, and training has no end.

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
    NTK ensemble on 3 inputs: gradient flow in the limit, learning rate 1
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
    """Return the law of infinitely wide networks of which only the last layer is trained.

    In the NTK parametrisation, gradients with respect to the last layer have the covariance of the outputs as their
    products. Trained without end, with ``target_noise`` equal to ``ridge``, networks are draws of
    :func:`nngp_posterior` with that noise variance.

    Parameters and errors are those of :func:`ntk_ensemble`.

    Returns
    -------
    Ensemble

    Raises
    ------
    ModelError
        Also if the kernel is in the standard parametrisation, where products of gradients grow with the width.

    References
    ----------
    Matthews, A. G. de G., Hron, J., Turner, R. E., Ghahramani, Z. (2017). Sample-then-optimize posterior sampling for
    Bayesian linear models. NeurIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.regression.kernels import PrecomputedKernel
    >>> kernel = PrecomputedKernel(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    >>> old, new = torch.tensor([0]), torch.tensor([1])
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> last_layer_ensemble(kernel, old, y, ridge=2.0, target_noise=2.0).variance(new)
    tensor([1.7500], dtype=torch.float64)
    """
    if isinstance(kernel, InfiniteWidth) and kernel.parameterization != "ntk":
        raise ModelError(
            f"the kernel is in the {kernel.parameterization} parametrisation, in which the last layer's products of "
            'gradients grow with the width; take infinite_width(module, "ntk", ...)'
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
    ridge, target_noise = not_negative("ridge", ridge), not_negative("target_noise", target_noise)
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
    return Ensemble(kernel, x, y, last_layer, flow, ridge, target_noise, found, initial)
