"""The log marginal likelihood of data as a function of a network's variances, with its gradient."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import AccuracyWarning, JitterWarning
from bayeskit.models.wide_networks.gaussian_processes.parameters import Parameters, matrix
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.regression.posterior import Posterior, nngp_posterior, ntk_posterior

REACH = 1e4  # by which a variance may leave its first value, either way
LEAST_NOISE = 1e-8  # relative to the mean square of the data
MAX_JITTER = 1e-4  # relative to the mean of the covariance's diagonal
FEW = 6  # variances up to which differences of matrices on grids are cheaper than automatic derivatives


@dataclass(frozen=True)
class Objective:
    """Minus the log marginal likelihood, as a function of logarithms of variances.

    Attributes
    ----------
    parameters : Parameters
        The variances that are learned.
    covariance : str
        ``"nngp"`` or ``"ntk"``.
    x, y : Tensor
        The data.
    noise : float or None
        Learned too, if it is None.
    """

    parameters: Parameters
    covariance: str
    x: Tensor
    y: Tensor
    noise: float | None

    @property
    def first(self) -> Tensor:
        """The logarithms of the variances at which the network begins, those of the noise last."""
        parts = [self.parameters.weight.reshape(-1)]
        if self.parameters.bias is not None:
            parts.append(self.parameters.bias.reshape(-1))
        if self.noise is None:
            parts.append(0.1 * self.scale.reshape(1))
        return torch.cat(parts).log()

    @property
    def scale(self) -> Tensor:
        """The mean square of the data."""
        return self.y.square().mean().double()

    @property
    def names(self) -> list[str]:
        """What the logarithms are of."""
        found = []
        for kind, value in (("weight_variance", self.parameters.weight), ("bias_variance", self.parameters.bias)):
            if value is not None:
                found += [f"{kind}[{i}]" for i in range(len(value))] if value.dim() else [kind]
        return found + (["noise_variance"] if self.noise is None else [])

    def bounds(self) -> list[tuple[float, float]]:
        """Return between what the logarithms may lie."""
        found = [(float(v) - math.log(REACH), float(v) + math.log(REACH)) for v in self.first]
        if self.noise is None:
            centre = float(self.scale.log())
            found[-1] = (centre + math.log(LEAST_NOISE), centre + math.log(REACH))
        return found

    def network(self, logarithms: Tensor) -> InfiniteWidth:
        """Return the network with such variances."""
        values = logarithms.exp().to(self.x)
        weight, bias = self.parameters.weight, self.parameters.bias
        end = weight.numel() + (0 if bias is None else bias.numel())
        return self.parameters.at(
            values[: weight.numel()].reshape(weight.shape),
            None if bias is None else values[weight.numel() : end].reshape(bias.shape),
        )

    def posterior(self, logarithms: Tensor) -> Posterior:
        """Return the posterior with such variances."""
        noise = logarithms[-1].exp().to(self.x) if self.noise is None else self.noise
        posterior = nngp_posterior if self.covariance == "nngp" else ntk_posterior
        return posterior(self.network(logarithms), self.x, self.y, noise, max_jitter=MAX_JITTER)

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the value and its gradient."""
        at = torch.tensor(logarithms, dtype=torch.float64)
        num_variances = len(at) - (self.noise is None)
        with warnings.catch_warnings():
            # Where the search passes by, these do not matter; where it ends, they are reported.
            warnings.simplefilter("ignore", JitterWarning)
            warnings.simplefilter("ignore", AccuracyWarning)
            few = self.x.dim() > 2 and num_variances <= FEW
            value, gradient = self._by_differences(at, num_variances) if few else self._by_backpropagation(at)
        return -float(value), -gradient.numpy()

    def _by_backpropagation(self, at: Tensor) -> tuple[Tensor, Tensor]:
        leaf = at.requires_grad_()
        with torch.enable_grad():
            value = self.posterior(leaf).log_evidence
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    @torch.no_grad()
    def _by_differences(self, at: Tensor, num_variances: int) -> tuple[Tensor, Tensor]:
        """Differentiate matrices by central differences, and all that comes after exactly.

        On a grid nearly all time goes into matrices, which without gradients are computed block by block in the cache.
        """
        posterior = self.posterior(at)
        lower = posterior.cholesky.lower
        solved = torch.cholesky_solve(self.y[:, None], lower)
        weights = 0.5 * (solved @ solved.mT - torch.cholesky_inverse(lower))
        step = torch.finfo(self.x.dtype).eps ** (1 / 3)  # where truncation and rounding are of one size
        gradient = torch.zeros_like(at)
        for i in range(num_variances):
            shift = torch.zeros_like(at)
            shift[i] = step
            above, below = (matrix(self.network(at + s), self.covariance, self.x) for s in (shift, -shift))
            gradient[i] = (weights * (above - below)).sum() / (2 * step)
        if self.noise is None:
            gradient[-1] = weights.diagonal().sum() * at[-1].exp()
        return posterior.log_evidence, gradient
