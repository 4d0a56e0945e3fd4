"""Choice of an infinitely wide network's variances and depth by marginal likelihood."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from bayeskit.errors import AccuracyWarning, DataError, JitterWarning, SettingsError
from bayeskit.extend import (
    Bar,
    SearchEnd,
    axes_or_new,
    new_generator,
    progress_bar,
    real_number,
    scipy_lbfgs,
    warn_user,
    whole_number,
)
from bayeskit.models.wide_networks._kernels import InfiniteWidth, infinite_width
from bayeskit.models.wide_networks._layers import check_targets
from bayeskit.models.wide_networks.gaussian_processes._parameters import Parameters, check_covariance, matrix
from bayeskit.models.wide_networks.gaussian_processes._posterior import Posterior, nngp_posterior, ntk_posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The log marginal likelihood of data as a function of a network's variances, with its gradient.

_REACH = 1e4  # largest factor between a variance and its initial value, up or down
_LEAST_NOISE = 1e-8  # relative to the mean square of the data
_MAX_JITTER = 1e-4  # relative to the mean of the covariance's diagonal
_FEW = 6  # number of variances up to which finite differences are cheaper than automatic derivatives on grids


@dataclass(frozen=True)
class MarginalLikelihoodObjective:
    """Log marginal likelihood as a function of the logarithms of variances."""

    parameters: Parameters  # the variances that are learned
    covariance: str  # "nngp" or "ntk"
    x: Tensor
    y: Tensor
    noise: float | None  # None if it is learned

    @property
    def first(self) -> Tensor:
        """Logarithms of the network's initial variances, and last of the noise variance if it is learned."""
        noise = 0.1 * self.scale if self.noise is None else None
        parts = (self.parameters.weight, self.parameters.bias, noise)
        return torch.cat([part.reshape(-1).cpu() for part in parts if part is not None]).log()

    @property
    def scale(self) -> Tensor:
        """The mean square of the data."""
        return self.y.square().mean().double()

    @property
    def names(self) -> list[str]:
        """Names of the variances, in the order of the logarithms."""
        found = []
        for kind, value in (("weight_variance", self.parameters.weight), ("bias_variance", self.parameters.bias)):
            if value is not None:
                found += [f"{kind}[{i}]" for i in range(len(value))] if value.dim() else [kind]
        return found + (["noise_variance"] if self.noise is None else [])

    def bounds(self) -> list[tuple[float, float]]:
        """Return lower and upper bounds of the logarithms."""
        found = [(float(v) - math.log(_REACH), float(v) + math.log(_REACH)) for v in self.first]
        if self.noise is None:
            centre = float(self.scale.log())
            found[-1] = (centre + math.log(_LEAST_NOISE), centre + math.log(_REACH))
        return found

    def network(self, logarithms: Tensor) -> InfiniteWidth:
        """Return the network with variances ``exp(logarithms)``."""
        values = logarithms.exp().to(self.x)
        weight, bias = self.parameters.weight, self.parameters.bias
        end = weight.numel() + (0 if bias is None else bias.numel())
        return self.parameters.at(
            values[: weight.numel()].reshape(weight.shape),
            None if bias is None else values[weight.numel() : end].reshape(bias.shape),
        )

    def posterior(self, logarithms: Tensor) -> Posterior:
        """Return the posterior with variances ``exp(logarithms)``."""
        noise = logarithms[-1].exp().to(self.x) if self.noise is None else self.noise
        posterior = nngp_posterior if self.covariance == "nngp" else ntk_posterior
        return posterior(self.network(logarithms), self.x, self.y, noise, max_jitter=_MAX_JITTER)

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the value and its gradient."""
        at = torch.tensor(logarithms, dtype=torch.float64)
        num_variances = len(at) - (self.noise is None)
        with warnings.catch_warnings():
            # Warnings are shown for the final variances only.
            warnings.simplefilter("ignore", JitterWarning)
            warnings.simplefilter("ignore", AccuracyWarning)
            few = self.x.dim() > 2 and num_variances <= _FEW
            value, gradient = self._by_differences(at, num_variances) if few else self._by_backpropagation(at)
        return float(value), gradient.numpy()

    def _by_backpropagation(self, at: Tensor) -> tuple[Tensor, Tensor]:
        leaf = at.requires_grad_()
        with torch.enable_grad():
            value = self.posterior(leaf).log_evidence
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    @torch.no_grad()
    def _by_differences(self, at: Tensor, num_variances: int) -> tuple[Tensor, Tensor]:
        """Return the log evidence and its gradient; only derivatives of kernel matrices are central differences."""
        # On a grid kernel matrices take nearly all the time; without gradients they are computed in cache-sized blocks.
        posterior = self.posterior(at)
        solved = posterior.cholesky.solved(self.y[:, None])
        weights = 0.5 * (solved @ solved.mT - torch.cholesky_inverse(posterior.cholesky.lower))
        step = torch.finfo(self.x.dtype).eps ** (1 / 3)  # balances truncation and rounding errors
        gradient = torch.zeros_like(at)
        for i in range(num_variances):
            shift = torch.zeros_like(at)
            shift[i] = step
            above, below = (matrix(self.network(at + s), self.covariance, self.x) for s in (shift, -shift))
            gradient[i] = (weights * (above - below)).sum() / (2 * step)
        if self.noise is None:
            gradient[-1] = weights.diagonal().sum() * at[-1].exp()
        return posterior.log_evidence, gradient


# Weight and bias variances of a network of infinite width by marginal likelihood.

_AGREEMENT = 1e-6  # largest difference of log evidences that count as the same maximum


@dataclass(frozen=True, eq=False, repr=False)
class VarianceFit:
    """Maximum marginal likelihood fit of variances; made by :func:`fit_variances`.

    Attributes
    ----------
    network : InfiniteWidth
        Network with the fitted variances.
    posterior : Posterior
        Posterior of that network; ``posterior.jitter`` is the jitter added.
    log_evidence : float
        Maximum of the log marginal likelihood.
    variances : mapping of str to float
        Fitted values of ``weight_variance``, ``bias_variance`` and ``noise_variance``; names are numbered if layers
        have separate variances.
    gradient : float
        Largest absolute derivative of the log evidence with respect to log variances inside their bounds.
    starts : tuple of float
        Log evidence reached from each start; the search stops after two starts that agree.
    at_bound : tuple of str
        Names of variances at a bound of the search range.
    finished : bool
        Whether the best start converged within the limits of iterations and time.
    """

    network: InfiniteWidth
    posterior: Posterior
    log_evidence: float
    variances: Mapping[str, float]
    gradient: float
    starts: tuple[float, ...]
    at_bound: tuple[str, ...]
    finished: bool

    @property
    def noise_variance(self) -> float:
        """Noise variance, fitted or given."""
        return float(self.posterior.noise_variance)

    def __repr__(self) -> str:
        agree = sum(value > self.log_evidence - _AGREEMENT for value in self.starts)
        parts = [f"log evidence {self.log_evidence:.6g}"]
        for kind, called in (("weight_variance", "weights"), ("bias_variance", "biases")):
            values = [f"{v:.3g}" for name, v in self.variances.items() if name.startswith(kind)]
            if values:
                parts.append(f"{called} {' '.join(values)}")
        parts += [f"noise {self.noise_variance:.3g}", f"{agree} of {len(self.starts)} starts agree"]
        parts += [f"{name} at its bound" for name in self.at_bound]
        if self.posterior.jitter:
            parts.append(f"jitter {self.posterior.jitter:.3g}")
        if not self.finished:
            parts.append("not finished")
        return f"Fit: {', '.join(parts)}"


def fit_variances(
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
    time_budget: float | None = None,
    seed: int | torch.Generator = 0,
    progress: bool = True,
) -> VarianceFit:
    """Maximise the marginal likelihood over the variances of weights, biases and noise.

    The log marginal likelihood is exact. A bounded quasi-Newton method maximises it over log variances from several
    starts. If inputs lie on a grid and there are few variances, derivatives of the covariance are central differences.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the first start. Bias variances that are zero stay zero.
    x : Tensor
        Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
    y : Tensor
        Observations with mean zero, ``(n,)`` or ``(n, 1)``.
    noise_variance : float, optional
        Fixed noise variance; by default it is fitted.
    tied : bool, default True
        Whether all layers share one weight variance and one bias variance.
    covariance : {"nngp", "ntk"}, default "nngp"
    num_starts : int, default 4
        Largest number of starts; the search stops when two starts agree in log marginal likelihood to 1e-6.
    spread : float, default 1.0
        Standard deviation of the log variances of random starts, about the first start.
    max_iterations : int, default 200
        Limit for each start.
    time_budget : float, optional
        Time limit of the search, in seconds.
    seed : int or torch.Generator, default 0
        Seed for the random starts.
    progress : bool, default True
        Whether to show a progress bar.

    Returns
    -------
    VarianceFit

    Raises
    ------
    ModelError
        If the network is a torch module, or its output is not normal.
    SettingsError
        If a setting is outside its domain.
    DataError, ShapeError
        If the data have the wrong shape or are not finite, or ``y`` is zero everywhere.
    KernelError
        If the covariance of the observations is not positive definite.

    Warns
    -----
    JitterWarning
        If jitter was added at the fitted variances.
    AccuracyWarning
        If the mean of ``y`` is far from zero, or the search reached its limit of iterations or time.

    References
    ----------
    Rasmussen, C. E., Williams, C. K. I. (2006). Gaussian processes for machine learning. MIT Press (chapter 5).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> fit_variances(network, x, x[:, 0].abs() - 0.5, noise_variance=0.01)
    Fit: log evidence -38.7608, weights 0.397, noise 0.01, 2 of 2 starts agree
    """
    check_covariance(covariance)
    parameters = Parameters(network, tied)
    y = check_targets(x, y, one_output=True)
    num_starts = whole_number("num_starts", num_starts, least=1)
    max_iterations = whole_number("max_iterations", max_iterations, least=1)
    spread = real_number("spread", spread, "(0, inf)")
    if time_budget is not None:
        time_budget = real_number("time_budget", time_budget, "(0, inf)")
    if noise_variance is not None:
        noise_variance = real_number("noise_variance", noise_variance, "[0, inf)")
    elif not bool((y != 0).any()):
        raise DataError("y is zero everywhere, so the noise variance cannot be estimated; give noise_variance")
    _check_mean(y)
    objective = MarginalLikelihoodObjective(parameters, covariance, x, y, noise_variance)
    generator = new_generator(seed, stream="starts")
    shifts = spread * torch.randn(num_starts, len(objective.first), generator=generator, dtype=torch.float64)
    shifts[0] = 0
    with progress_bar("fit", None, progress) as bar:
        search = _Search(objective, max_iterations, time_budget, bar)
        for shift in shifts:
            search.climb(shift)
            if search.agreed or search.out_of_time:
                break
    return search.result()


class _Search:
    """Maximise from several starts, until the time limit."""

    def __init__(
        self, objective: MarginalLikelihoodObjective, max_iterations: int, time_budget: float | None, bar: Bar
    ) -> None:
        self.objective, self.max_iterations, self.bar = objective, max_iterations, bar
        self.bounds = objective.bounds()
        self.end = None if time_budget is None else time.monotonic() + time_budget
        self.found: list[SearchEnd] = []
        self.evaluations, self.best = 0, -np.inf

    @property
    def out_of_time(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    @property
    def agreed(self) -> bool:
        """Whether two starts have reached the largest value so far."""
        largest = sorted(result.value for result in self.found)[-2:]
        return len(largest) == 2 and largest[1] - largest[0] < _AGREEMENT

    def climb(self, shift: Tensor) -> None:
        low, high = np.array(self.bounds).T
        start = np.clip((self.objective.first + shift).numpy(), low, high)
        end = scipy_lbfgs(
            self._evaluate,
            start,
            bounds=self.bounds,
            stop=lambda: self.out_of_time,
            maxiter=self.max_iterations,
            ftol=1e-12,
            gtol=1e-5,
        )
        self.found.append(end)

    def result(self) -> VarianceFit:
        objective, best = self.objective, max(self.found, key=lambda result: result.value)
        low, high = np.array(self.bounds).T
        edge = (best.position <= low + 1e-6) | (best.position >= high - 1e-6)
        gradient = float(np.abs(best.gradient[~edge]).max(initial=0.0))
        if not best.finished:
            warn_user(
                f"the search ended before it converged, with a gradient of {gradient:.2g}; raise "
                f"{'time_budget' if self.out_of_time else 'max_iterations'}",
                AccuracyWarning,
            )
        with torch.no_grad():
            logarithms = torch.tensor(best.position, dtype=torch.float64)
            network, posterior = objective.network(logarithms), objective.posterior(logarithms)
        return VarianceFit(
            network=network,
            posterior=posterior,
            log_evidence=best.value,
            variances=dict(zip(objective.names, logarithms.exp().tolist(), strict=True)),
            gradient=gradient,
            starts=tuple(result.value for result in self.found),
            at_bound=tuple(name for name, reached in zip(objective.names, edge, strict=True) if reached),
            finished=best.finished,
        )

    def _evaluate(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.objective(logarithms)
        self.evaluations, self.best = self.evaluations + 1, max(self.best, value)
        self.bar.update(self.evaluations, f"start {len(self.found) + 1}, log evidence {self.best:.6g}")
        return value, gradient


def _check_mean(y: Tensor) -> None:
    """Warn if the mean of ``y`` is far from the prior mean, zero."""
    mean = float(y.mean())
    if len(y) > 1 and abs(mean) > float(y.std()):
        warn_user(
            f"y has mean {mean:.4g} and standard deviation {float(y.std()):.3g}, but the prior mean is zero; subtract "
            "the mean of y",
            AccuracyWarning,
        )


# The depth of a network of infinite width by marginal likelihood.


@dataclass(frozen=True, eq=False, repr=False)
class DepthComparison:
    """Fits of networks of several depths to the same data; made by :func:`fit_depths`.

    Attributes
    ----------
    fits : mapping of int to VarianceFit
        Fits by depth.
    """

    fits: Mapping[int, VarianceFit]

    @property
    def best(self) -> int:
        """Depth with the largest marginal likelihood."""
        return max(self.fits, key=lambda depth: self.fits[depth].log_evidence)

    def to_pandas(self) -> pd.DataFrame:
        """Return the fitted variances, one row per depth."""
        return pd.DataFrame(
            {
                "depth": depth,
                "log_evidence": found.log_evidence,
                **found.variances,
                "noise_variance": found.noise_variance,
                "jitter": found.posterior.jitter,
                "at_bound": ", ".join(found.at_bound),
            }
            for depth, found in self.fits.items()
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the log evidence against depth.

        Parameters
        ----------
        ax : Axes, optional
            By default axes of a new figure.

        Returns
        -------
        Axes
        """
        ax = axes_or_new(ax, 4.5, 3.5)
        depths = sorted(self.fits)
        ax.plot(depths, [self.fits[depth].log_evidence for depth in depths], "o-")
        ax.plot(self.best, self.fits[self.best].log_evidence, "o", color="C1", label=f"depth {self.best}")
        ax.set(xlabel="depth", ylabel="log evidence", xticks=depths)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        fits = "\n".join(f"    {depth}: {found!r}" for depth, found in self.fits.items())
        return f"DepthComparison: depth {self.best} is best\n{fits}"


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
    time_budget: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> DepthComparison:
    """Fit networks of several depths, each with its own variances, and compare their marginal likelihoods.

    Parameters
    ----------
    make_network : callable
        Maps a depth to a torch module, or to an infinitely wide network with its own initial variances.
    depths : sequence of int
    x, y : Tensor
        As in :func:`fit_variances`.
    weight_variance, bias_variance : float, default 2.0 and 0.1
        Initial variances for torch modules.
    noise_variance, tied, covariance, num_starts, seed, progress
        As in :func:`fit_variances`.
    time_budget : float, optional
        Time limit for each depth, in seconds.

    Returns
    -------
    DepthComparison

    Raises
    ------
    SettingsError, DataError, ShapeError, ModelError, KernelError
        As in :func:`fit_variances`.

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
        raise SettingsError("depths must have at least one entry")
    fits = {}
    for depth in depths:
        made = make_network(depth)
        if not isinstance(made, InfiniteWidth):
            made = infinite_width(made, weight_variance=weight_variance, bias_variance=bias_variance)
        fits[depth] = fit_variances(
            made,
            x,
            y,
            noise_variance=noise_variance,
            tied=tied,
            covariance=covariance,
            num_starts=num_starts,
            time_budget=time_budget,
            seed=seed,
            progress=progress,
        )
    return DepthComparison(fits)
