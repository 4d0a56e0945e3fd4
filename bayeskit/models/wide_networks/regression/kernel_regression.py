"""Ridge regression with the tangent kernel: one function, and no law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks.inputs import check_targets
from bayeskit.models.wide_networks.regression.jitter import check_accuracy, not_negative
from bayeskit.models.wide_networks.regression.kernels import WideKernel, refuse_module
from bayeskit.models.wide_networks.regression.process import check_kernel
from bayeskit.models.wide_networks.regression.spectrum import Spectrum, spectrum


@dataclass(frozen=True, eq=False, repr=False)
class KernelRegression:
    """A function fitted by ridge regression with the tangent kernel; made by :func:`ntk_regression`.

    Attributes
    ----------
    kernel : WideKernel
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    ridge : float
    spectrum : Spectrum
        Of the kernel matrix of training inputs.
    """

    kernel: WideKernel
    x: Tensor
    y: Tensor
    ridge: float
    spectrum: Spectrum

    name = "NTK regression"
    random = "nothing"
    trained = "all layers, of a network whose outputs were zero at initialisation"

    @property
    def jitter(self) -> float:
        """What rounding made it necessary to add to the diagonal of the kernel matrix."""
        return self.spectrum.jitter

    def mean(self, x_new: Tensor) -> Tensor:
        """Return the function at new inputs, ``(n_new, *outputs)``."""
        coefficients, _ = self.spectrum.solved(self.y, self.ridge)
        result = self.spectrum.rotated(self.kernel.ntk(x_new, self.x)) @ coefficients
        return result.reshape(-1, *self.y.shape[1:])

    def covariance(self, x_new: Tensor) -> NoReturn:
        """Raise an error: a function has no covariance."""
        _no_law("covariance")

    def variance(self, x_new: Tensor) -> NoReturn:
        """Raise an error: a function has no variance."""
        _no_law("variance")

    def sample(self, x_new: Tensor, num_samples: int = 1, *, seed: int = 0) -> NoReturn:
        """Raise an error: there is nothing to draw from."""
        _no_law("draws")

    def __repr__(self) -> str:
        used = f", jitter {self.jitter:g}" if self.jitter else ""
        return f"{self.name} on {len(self.y)} inputs, ridge {self.ridge:g}{used}; a function, without a variance"


def ntk_regression(
    kernel: WideKernel, x: Tensor, y: Tensor, ridge: float = 0.0, *, max_jitter: float | None = None
) -> KernelRegression:
    """Return the function that ridge regression with the tangent kernel finds.

    It is what a wide network becomes in the limit of training if its outputs are zero at initialisation, and the mean
    of :func:`ntk_ensemble` if they are not. There is no variance: nothing is random.

    Parameters
    ----------
    kernel : WideKernel
        Such as :func:`~bayeskit.models.wide_networks.infinite_width` returns, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Targets, ``(n,)`` or ``(n, outputs)``.
    ridge : float, default 0.0
        What is added to the kernel's diagonal; see :func:`relative_ridge` for a share of it.
    max_jitter : float, optional
        What may be added beside it where rounding makes it necessary, in units of the diagonal's mean; by default the
        square root of the machine's precision, or rounding errors of eigenvalues where these are more. What was added
        is the attribute ``jitter``.

    Returns
    -------
    KernelRegression

    Raises
    ------
    ShapeError, DataError
        If data do not fit one another or the kernel.
    SettingsError
        If the ridge is negative.
    KernelError
        If the kernel matrix is not positive definite.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If equal inputs, or nearly equal ones, have different targets without a ridge.

    References
    ----------
    Jacot, A., Gabriel, F., Hongler, C. (2018). Neural tangent kernel: convergence and generalization in neural
    networks. Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.regression.kernels import PrecomputedKernel
    >>> ntk = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> fitted = ntk_regression(PrecomputedKernel(ntk, ntk), torch.tensor([0]), y)
    >>> fitted
    NTK regression on 1 inputs, ridge 0; a function, without a variance
    >>> fitted.mean(torch.tensor([1]))
    tensor([2.], dtype=torch.float64)
    """
    ridge = not_negative("ridge", ridge)
    refuse_module(kernel)
    return _regression(kernel, x, y, ridge, max_jitter)


def _regression(kernel: WideKernel, x: Tensor, y: Tensor, ridge: float, max_jitter: float | None) -> KernelRegression:
    y = check_targets(x, y)
    matrix = check_kernel(kernel.ntk(x), x, y, "NTK")
    found = spectrum(matrix, ridge, "NTK", max_jitter)
    check_accuracy(*found.solved(y, ridge), float(found.eigenvalues[-1]), "NTK")
    return KernelRegression(kernel, x, y, ridge, found)


def _no_law(what: str) -> NoReturn:
    raise ModelError(
        f"kernel regression finds one function, which has no {what}; take ntk_ensemble for the spread of trained "
        "networks, nngp_posterior for that of a Bayesian network, or ntk_posterior"
    )
