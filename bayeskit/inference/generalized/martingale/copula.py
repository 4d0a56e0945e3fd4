"""A predictive density for data on the real line that each datum updates by a normal copula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data
from bayeskit.inference.generalized.martingale.predictive import Completed, Predictive

_EDGE = 1e-13
_REACH = 6.0  # of the grid beyond the data, in scales of the first law
_QUARTILES = 1.349  # how far those of a normal law lie apart, in standard deviations


class CopulaState(NamedTuple):
    """Distribution functions on the grid, ``(R, G)``; the grid, ``(G,)``; correlation; number of data so far."""

    cdf: Tensor
    grid: Tensor
    correlation: float
    size: int


def rate(size: int) -> float:
    """Return the weight of the update by datum ``size + 1``, ``(2 - 1 / (size + 1)) / (size + 2)``.

    Examples
    --------
    >>> rate(0), rate(1)
    (0.5, 0.5)
    """
    return (2 - 1 / (size + 1)) / (size + 2)


def conditional(cdf: Tensor, at: Tensor, correlation: float | Tensor) -> Tensor:
    """Return the conditional distribution function of the normal copula, both arguments in (0, 1).

    Examples
    --------
    >>> import torch
    >>> half = torch.tensor(0.5)
    >>> conditional(half, half, 0.8).item()
    0.5
    """
    correlation = torch.as_tensor(correlation, dtype=cdf.dtype, device=cdf.device)
    x, y = ndtri(cdf.clamp(_EDGE, 1 - _EDGE)), ndtri(at.clamp(_EDGE, 1 - _EDGE))
    return ndtr((x - correlation * y) / (1 - correlation.square()).sqrt())


def log_copula_density(cdf: Tensor, at: Tensor, correlation: float | Tensor) -> Tensor:
    """Return the log density of the normal copula, both arguments in (0, 1).

    Examples
    --------
    >>> import torch
    >>> log_copula_density(torch.tensor(0.5), torch.tensor(0.5), 0.6).exp().item()
    1.25
    """
    correlation = torch.as_tensor(correlation, dtype=cdf.dtype, device=cdf.device)
    x, y = ndtri(cdf.clamp(_EDGE, 1 - _EDGE)), ndtri(at.clamp(_EDGE, 1 - _EDGE))
    rest = 1 - correlation.square()
    quadratic = correlation.square() * (x.square() + y.square()) - 2 * correlation * x * y
    return -quadratic / (2 * rest) - rest.log() / 2


@dataclass(frozen=True)
class CopulaUpdate(Predictive):
    r"""Update a distribution function by a normal copula: a Bayesian density estimate without a Markov chain.

    :math:`P_{t+1}(y) = (1 - a_t) P_t(y) + a_t H_\rho(P_t(y), P_t(x_{t+1}))` with
    :math:`a_t = (2 - 1/(t+1)) / (t + 2)`, from a normal law on. Its mean is the data's median and its standard
    deviation that of the data or of a normal law of their quartiles, whichever is less, so that it is not outliers
    that say how wide it is. A future datum enters through its uniform :math:`P_t(x_{t+1})` alone, so that the whole
    law is resampled on a grid, and its parameter is that of this law, not of data.

    Parameters
    ----------
    correlation : float or "prequential", default 0.5
        ``rho`` in (0, 1): the larger, the rougher the density, and the wider the posterior. A datum ``z`` standard
        deviations from the mean of a normal law moves it by :math:`a_t \rho z` of these, so that the mean of ``n``
        data has standard deviation :math:`2 \rho s / \sqrt n`: at 0.5 that of the Bayesian bootstrap. With
        "prequential" it is that of greatest prequential likelihood, which suits densities that are far from normal.
        Where the normal law fits the data already, no update is the most likely, and the posterior much too narrow.
    num_points : int, default 400
        Of the grid, which reaches beyond the data by six standard deviations of the normal law, and whose points lie
        further apart the further they are from its mean.
    num_permutations : int, default 10
        Orders of the data over which the observed law is averaged, for it depends on them.
    seed : int, default 0
        Of these.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    ShapeError, DataError
        If data are not numbers ``(n,)``, or all equal.

    References
    ----------
    Fong, E., Holmes, C., Walker, S. G. (2023). Martingale posterior distributions. JRSS B 85, 1357-1391.

    Hahn, P. R., Martin, R., Walker, S. G. (2018). On recursive Bayesian predictive distributions. JASA 113, 1085-1093.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    >>> rule = CopulaUpdate(correlation=0.7)
    >>> law = rule.completed(rule.init(x, 2, 10))
    >>> round(law.weights[0].sum().item(), 9)  # as many as there are data
    4.0
    """

    is_smooth: ClassVar[bool] = True

    correlation: float | Literal["prequential"] = 0.5
    num_points: int = 400
    num_permutations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.correlation, str) and self.correlation != "prequential":
            raise SettingsError(f'correlation must lie between 0 and 1 or be "prequential", not {self.correlation!r}')
        if self.correlation != "prequential":
            real_number("correlation", self.correlation, between=(0.0, 1.0))
        whole_number("num_points", self.num_points, least=10)
        whole_number("num_permutations", self.num_permutations, least=1)

    def init(self, data: Data, num_replicates: int, horizon: int) -> CopulaState:
        """Return the observed law in each replicate."""
        x = _checked(data)
        grid = _grid(x, self.num_points)
        with one_thread():
            fitted = self.fitted_correlation(x) if self.correlation == "prequential" else self.correlation
            correlation = float(fitted)
            cdf = self._observed(x, grid, torch.tensor([correlation]).to(x))[0].mean(0)[0]
        return CopulaState(cdf.expand(num_replicates, -1), grid, correlation, len(x))

    def step(self, state: CopulaState, *, generator: torch.Generator) -> CopulaState:
        """Draw a datum by its uniform and update the law."""
        at = torch.rand(len(state.cdf), 1, generator=generator, dtype=torch.float64).to(state.cdf)
        weight = rate(state.size)
        cdf = (1 - weight) * state.cdf + weight * conditional(state.cdf, at, state.correlation)
        return state._replace(cdf=cdf, size=state.size + 1)

    def completed(self, state: CopulaState) -> Completed:
        """Return the law on the grid: mass of each cell at its middle, what lies beyond at the ends."""
        middles = torch.cat([state.grid[:1], (state.grid[1:] + state.grid[:-1]) / 2, state.grid[-1:]])
        mass = torch.cat([state.cdf[:, :1], state.cdf.diff(dim=1), 1 - state.cdf[:, -1:]], 1)
        return Completed(middles.expand(len(mass), -1), mass * state.size)

    def fitted_correlation(self, data: Tensor) -> float:
        """Return the correlation of greatest prequential likelihood, to two digits, ``(n,)`` -> number in (0, 1)."""
        coarse = torch.linspace(0.1, 0.9, 9, dtype=data.dtype)
        best = coarse[int(self.prequential(data, coarse).argmax())]
        fine = best + 0.01 * torch.arange(-9, 10, dtype=data.dtype)
        return float(fine[int(self.prequential(data, fine).argmax())])

    def prequential(self, data: Tensor, correlations: Tensor) -> Tensor:
        """Return the mean over orders of the data's joint log density, ``(n,), (C,) -> (C,)``."""
        return self._observed(data, data[:0], correlations)[1].mean(0)

    def _observed(self, data: Tensor, grid: Tensor, correlations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the law after all data on the grid, ``(M, C, G)``, and their joint log density, ``(M, C)``."""
        generator = new_generator(self.seed, stream="orders of the data")
        orders = torch.stack([torch.randperm(len(data), generator=generator) for _ in range(self.num_permutations)])
        mean, scale = start(data)
        places = torch.cat([data[orders], grid.expand(len(orders), -1)], 1)
        standard = ((places - mean) / scale)[:, None]
        rho = correlations[:, None]
        cdf = ndtr(standard).expand(-1, len(rho), -1)
        log_density = (-standard.square() / 2 - math.log(2 * math.pi) / 2 - scale.log()).expand_as(cdf)
        total = log_density.new_zeros(cdf.shape[:2])
        for i in range(len(data)):
            at, weight = cdf[..., i : i + 1], rate(i)
            total = total + log_density[..., i]
            grown = math.log(weight) + log_copula_density(cdf, at, rho)
            log_density = log_density + torch.logaddexp(grown, torch.full_like(grown, math.log1p(-weight)))
            cdf = (1 - weight) * cdf + weight * conditional(cdf, at, rho)
        return cdf[..., len(data) :], total


def start(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the normal law without data, ``(n,) -> (), ()``.

    Examples
    --------
    >>> import torch
    >>> mean, scale = start(torch.cat([torch.linspace(-1, 1, 101), torch.tensor([1e4])]))
    >>> round(mean.item(), 3), round(scale.item(), 3)
    (0.01, 0.749)
    """
    quarter, median, three = data.quantile(torch.tensor([0.25, 0.5, 0.75]).to(data))
    robust, raw = (three - quarter) / _QUARTILES, data.std()
    return median, torch.where(robust > 0, robust.minimum(raw), raw)


def _grid(data: Tensor, count: int) -> Tensor:
    """Return points over all data whose distance grows with that from the median, where this exceeds the scale."""
    mean, scale = start(data)
    ends = torch.stack([(data.min() - mean) / scale - _REACH, (data.max() - mean) / scale + _REACH]).asinh()
    share = torch.linspace(0, 1, count, dtype=data.dtype, device=data.device)
    return mean + scale * (ends[0] + share * (ends[1] - ends[0])).sinh()


def _checked(data: Data) -> Tensor:
    if isinstance(data, tuple) or data.dim() != 1:
        raise ShapeError("CopulaUpdate takes numbers (n,), not columns or vectors")
    data = data if data.is_floating_point() else data.to(torch.get_default_dtype())
    if len(data) < 2 or float(data.std()) == 0:
        raise DataError("CopulaUpdate needs at least two data that differ")
    return data
