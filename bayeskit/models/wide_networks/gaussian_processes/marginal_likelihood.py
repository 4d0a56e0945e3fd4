"""Variances, noise and depth of a network of infinite width by marginal likelihood."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, JitterWarning, SettingsError
from bayeskit.models.wide_networks.gaussian_processes.parameters import Parameters, check_covariance
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth, infinite_width
from bayeskit.models.wide_networks.inputs import check_targets
from bayeskit.models.wide_networks.regression.posterior import Posterior, nngp_posterior, ntk_posterior

REACH = 1e4  # by which a variance may leave its first value, either way
LEAST_NOISE = 1e-8  # relative to the mean square of the data
MAX_JITTER = 1e-4  # relative to the mean of the covariance's diagonal


@dataclass(frozen=True)
class Fit:
    """Variances at which data are most likely; made by :func:`fit`.

    Attributes
    ----------
    network : InfiniteWidth
        With the variances found.
    posterior : Posterior
        Of that network; its ``jitter`` tells whether any was needed.
    log_evidence : float
        The largest found.
    gradient : float
        The largest of its derivatives with respect to logarithms of variances that lie on no bound.
    starts : tuple of float
        What was reached from each start, in the order of starts.
    at_bound : tuple of str
        The variances that have reached the end of where they may lie.
    """

    network: InfiniteWidth
    posterior: Posterior
    log_evidence: float
    gradient: float
    starts: tuple[float, ...]
    at_bound: tuple[str, ...]

    @property
    def noise_variance(self) -> float:
        """The noise found, or given."""
        return float(self.posterior.noise_variance)


@dataclass(frozen=True)
class DepthComparison:
    """Fits of networks of several depths to the same data; made by :func:`fit_depths`.

    Attributes
    ----------
    fits : mapping of int to Fit
        By depth.
    """

    fits: Mapping[int, Fit]

    @property
    def best(self) -> int:
        """The depth of the largest marginal likelihood."""
        return max(self.fits, key=lambda depth: self.fits[depth].log_evidence)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a depth."""
        return pd.DataFrame(
            {
                "depth": depth,
                "log_evidence": found.log_evidence,
                "noise_variance": found.noise_variance,
                "jitter": found.posterior.jitter,
                "at_bound": ", ".join(found.at_bound),
            }
            for depth, found in self.fits.items()
        )


@dataclass(frozen=True)
class _Objective:
    """Minus the log marginal likelihood, as a function of logarithms of variances."""

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
        return self.y.square().mean().double()

    @property
    def names(self) -> list[str]:
        found = []
        for kind, value in (("weight_variance", self.parameters.weight), ("bias_variance", self.parameters.bias)):
            if value is not None:
                found += [f"{kind}[{i}]" for i in range(len(value))] if value.dim() else [kind]
        return found + (["noise_variance"] if self.noise is None else [])

    def bounds(self) -> list[tuple[float, float]]:
        found = [(float(v) - math.log(REACH), float(v) + math.log(REACH)) for v in self.first]
        if self.noise is None:
            centre = float(self.scale.log())
            found[-1] = (centre + math.log(LEAST_NOISE), centre + math.log(REACH))
        return found

    def network(self, logarithms: Tensor) -> InfiniteWidth:
        values = logarithms.exp().to(self.x)
        weight, bias = self.parameters.weight, self.parameters.bias
        end = weight.numel() + (0 if bias is None else bias.numel())
        return self.parameters.at(
            values[: weight.numel()].reshape(weight.shape),
            None if bias is None else values[weight.numel() : end].reshape(bias.shape),
        )

    def posterior(self, logarithms: Tensor) -> Posterior:
        noise = logarithms[-1].exp().to(self.x) if self.noise is None else self.noise
        posterior = nngp_posterior if self.covariance == "nngp" else ntk_posterior
        return posterior(self.network(logarithms), self.x, self.y, noise, max_jitter=MAX_JITTER)

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(logarithms, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad(), warnings.catch_warnings():
            # Where the search passes by, jitter does not matter; where it ends, it is reported.
            warnings.simplefilter("ignore", JitterWarning)
            value = -self.posterior(leaf).log_evidence
            (gradient,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), gradient.numpy()


def fit(
    network: InfiniteWidth,
    x: Tensor,
    y: Tensor,
    *,
    noise_variance: float | None = None,
    tied: bool = True,
    covariance: str = "nngp",
    num_starts: int = 4,
    spread: float = 1.0,
    max_iterations: int = 200,
    seed: int | torch.Generator = 0,
) -> Fit:
    """Find the variances at which data are most likely, the function integrated out.

    The log marginal likelihood is exact, its gradient is taken with respect to logarithms of variances, and a
    quasi-Newton method with bounds climbs from several starts.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the first start. Biases whose variance is zero stay without one.
    x : Tensor
        Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
    y : Tensor
        Values with mean zero, ``(n,)``.
    noise_variance : float, optional
        By default it is found with the others.
    tied : bool, default True
        Whether all layers share one variance of weights and one of biases, or have their own.
    covariance : {"nngp", "ntk"}, default "nngp"
    num_starts : int, default 4
    spread : float, default 1.0
        The standard deviation of logarithms of further starts about the first.
    max_iterations : int, default 200
        Of each start.
    seed : int or torch.Generator, default 0
        For the starts.

    Returns
    -------
    Fit

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    DataError, ShapeError
        If the data do not fit or are not finite, or ``y`` is zero everywhere.
    KernelError
        If the covariance of the data is not positive definite.

    Warns
    -----
    JitterWarning
        If it needed jitter at the variances found.

    References
    ----------
    Rasmussen, C. E., Williams, C. K. I. (2006). Gaussian processes for machine learning. MIT Press (chapter 5).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> found = fit(network, x, x[:, 0].abs() - 0.5, num_starts=2)
    >>> found.gradient < 1e-3
    True
    """
    check_covariance(covariance)
    check_targets(x, y, one_output=True)
    num_starts = whole_number("num_starts", num_starts, least=1)
    max_iterations = whole_number("max_iterations", max_iterations, least=1)
    spread = real_number("spread", spread, between=(0, float("inf")))
    if noise_variance is None and not bool((y != 0).any()):
        raise DataError("y is zero everywhere, so that no noise variance can be found; give noise_variance")
    objective = _Objective(Parameters(network, tied), covariance, x, y, noise_variance)
    first, bounds = objective.first, objective.bounds()
    generator = new_generator(seed, stream="starts")
    shifts = spread * torch.randn(num_starts, len(first), generator=generator, dtype=torch.float64)
    shifts[0] = 0
    low, high = np.array(bounds).T
    found = [
        minimize(
            objective,
            np.clip((first + shift).numpy(), low, high),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": max_iterations, "ftol": 1e-13, "gtol": 1e-6},
        )
        for shift in shifts
    ]
    best = min(found, key=lambda result: result.fun)
    edge = (best.x <= low + 1e-6) | (best.x >= high - 1e-6)
    with torch.no_grad():
        logarithms = torch.tensor(best.x, dtype=torch.float64)
        network, posterior = objective.network(logarithms), objective.posterior(logarithms)
    return Fit(
        network,
        posterior,
        -float(best.fun),
        float(np.abs(best.jac[~edge]).max(initial=0.0)),
        tuple(-float(result.fun) for result in found),
        tuple(name for name, reached in zip(objective.names, edge, strict=True) if reached),
    )


def fit_depths(
    make_network: Callable[[int], nn.Module | InfiniteWidth],
    depths: Sequence[int],
    x: Tensor,
    y: Tensor,
    *,
    weight_variance: float = 2.0,
    bias_variance: float = 0.1,
    noise_variance: float | None = None,
    tied: bool = True,
    covariance: str = "nngp",
    num_starts: int = 4,
    seed: int = 0,
) -> DepthComparison:
    """Fit networks of several depths, each with its own variances, and compare their marginal likelihoods.

    Parameters
    ----------
    make_network : callable
        From a depth to a torch module, or to a network of infinite width with variances of its own.
    depths : sequence of int
    x, y : Tensor
        As in :func:`fit`.
    weight_variance, bias_variance : float, default 2.0 and 0.1
        Where learning begins, for torch modules.
    noise_variance, tied, covariance, num_starts, seed
        As in :func:`fit`.

    Returns
    -------
    DepthComparison

    Raises
    ------
    SettingsError, DataError, ShapeError, KernelError
        As in :func:`fit`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> def make_network(depth):
    ...     hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(8, 8), nn.ReLU())]
    ...     return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), *hidden, nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> fit_depths(make_network, [1, 3], x, torch.sin(6 * x[:, 0]), num_starts=1).best
    3
    """
    if not len(depths):
        raise SettingsError("depths must name at least one depth")
    fits = {}
    for depth in depths:
        made = make_network(depth)
        if not isinstance(made, InfiniteWidth):
            made = infinite_width(made, weight_variance=weight_variance, bias_variance=bias_variance)
        fits[depth] = fit(
            made,
            x,
            y,
            noise_variance=noise_variance,
            tied=tied,
            covariance=covariance,
            num_starts=num_starts,
            seed=seed,
        )
    return DepthComparison(fits)
