"""A Gaussian process over functions, as regression returns it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, KernelError, ShapeError


class GaussianProcess(ABC):
    """A normal law of functions, given training data.

    Outputs are independent and have one covariance. All of it is about the function itself; an observation's noise
    comes on top.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called."""

    @property
    @abstractmethod
    def random(self) -> str:
        """What its variance is over, in words."""

    @property
    @abstractmethod
    def trained(self) -> str:
        """What was trained, in words."""

    @abstractmethod
    def prior_variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs before any data, ``(n_new,)``."""

    @abstractmethod
    def mean(self, x_new: Tensor) -> Tensor:
        """Return the mean at new inputs, ``(n_new, *outputs)`` for ``y`` of shape ``(n, *outputs)``."""

    @abstractmethod
    def covariance(self, x_new: Tensor) -> Tensor:
        """Return the covariance of each output between new inputs, ``(n_new, n_new)``."""

    @abstractmethod
    def variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs, ``(n_new,)``."""

    def sample(self, x_new: Tensor, num_samples: int = 1, *, seed: int | torch.Generator = 0) -> Tensor:
        """Return functions at new inputs.

        Parameters
        ----------
        x_new : Tensor
            Inputs, ``(n_new, ...)``.
        num_samples : int, default 1
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor
            ``(num_samples, n_new, *outputs)``.

        Raises
        ------
        KernelError
            If the covariance has negative eigenvalues beyond rounding.
        """
        count = whole_number("num_samples", num_samples, least=1)
        mean = self.mean(x_new)
        generator = new_generator(seed, mean.device, stream="Gaussian process")
        noise = torch.randn(count, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        factor = _root(self.covariance(x_new), float(self.prior_variance(x_new).max()))
        return mean + torch.einsum("ij,sj...->si...", factor, noise)


def _root(covariance: Tensor, scale: float) -> Tensor:
    """Return a matrix whose product with its transpose is the covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    # What data leave of a variance is a difference, whose rounding errors have the size of the prior's.
    if float(values[0]) < -(torch.finfo(covariance.dtype).eps ** 0.5) * len(values) * scale:
        raise KernelError(
            f"the covariance at new inputs has the eigenvalue {float(values[0]):.3g}; take float64, or a kernel "
            "that is positive definite on training and new inputs together"
        )
    return vectors * values.clamp_min(0).sqrt()


def remaining_variance(prior: Tensor, change: Tensor) -> Tensor:
    """Return the sum of variances before data and what data change, ``(n_new,)``; rounding leaves none below zero.

    Raises
    ------
    KernelError
        If one is negative beyond rounding.
    """
    result = prior + change
    if not result.numel():
        return result
    smallest, scale = float(result.detach().min()), float(prior.detach().max())
    if smallest < -(torch.finfo(result.dtype).eps ** 0.5) * scale:
        raise KernelError(
            f"the variance at a new input is {smallest:.3g}, beside {scale:.3g} before any data; take float64, or a "
            "kernel that is positive definite on training and new inputs together"
        )
    return result.clamp_min(0)


def check_kernel(matrix: Tensor, x: Tensor, y: Tensor, name: str) -> Tensor:
    """Return a kernel matrix of training inputs, or say what is wrong with it."""
    if matrix.shape != (len(x), len(x)):
        raise ShapeError(f"the {name} matrix of {len(x)} training inputs has shape {tuple(matrix.shape)}")
    if matrix.dtype != y.dtype or matrix.device != y.device:
        raise DataError(
            f"the {name} matrix is {matrix.dtype} on {matrix.device}, y {y.dtype} on {y.device}; convert one of them"
        )
    return matrix
