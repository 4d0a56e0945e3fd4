"""Martingale posteriors: uncertainty as what is not yet seen, simulated from predictive rules."""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.special import ndtr, ndtri

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.core.plots import BLUE
from bayeskit.core.progress import Bar, progress_bar
from bayeskit.core.randomness import global_stream, new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import DataError, SamplingWarning, SettingsError, ShapeError
from bayeskit.inference.generalized.bootstrap import joined, minima_as_draws, numbers_of, replicate_batches
from bayeskit.inference.generalized.losses.loss import Data, num_data
from bayeskit.inference.generalized.minimizer import Minimum, minimize
from bayeskit.inference.generalized.posterior import GibbsPosterior, check_pooling
from bayeskit.logdensity.pyro_distributions import draw_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Completed",
    "CopulaState",
    "CopulaUpdate",
    "MartingalePosterior",
    "PolyaUrn",
    "Predictive",
    "ScoreDriven",
    "ScoreState",
    "UrnState",
    "conditional",
    "law_without_data",
    "log_copula_density",
    "martingale_posterior",
    "normal_location",
    "rate",
]


# Predictive rules: the law of the next datum, given all before it.


class Completed(NamedTuple):
    """Data with their simulated future, for each replicate.

    Attributes
    ----------
    data : Tensor, tuple of Tensor or None
        Shapes ``(R, m, ...)``; None stands for the observed data.
    weights : Tensor or None
        Of these data, ``(R, m)``; None if each counts once.
    """

    data: Data | None
    weights: Tensor | None


class Predictive(ABC):
    """A rule that draws the next datum given all before it, in all replicates at once.

    A state is used up by the step that takes it: data are written into room that it brings along. The law that it
    draws from must be a martingale: what is expected of it after the next datum is what it is now.

    Attributes
    ----------
    is_smooth : bool
        Whether a smooth law takes the place of the data, whose spread is then held against the Bayesian bootstrap's.
    """

    is_smooth: ClassVar[bool] = False

    @abstractmethod
    def init(self, data: Data, num_replicates: int, horizon: int) -> Any:
        """Return the state after the observed data, before ``horizon`` further ones."""

    @abstractmethod
    def step(self, state: Any, *, generator: torch.Generator) -> Any:
        """Draw one further datum in each replicate and return the state after it; the one given is used up."""

    @abstractmethod
    def completed(self, state: Any) -> Completed:
        """Return the observed data with those drawn so far."""


class UrnState(NamedTuple):
    """Which observed datum each one is a copy of, ``(R, n + horizon)``, filled up to ``size``; and ``n``."""

    origin: Tensor
    size: int
    num_data: int


@dataclass(frozen=True)
class PolyaUrn(Predictive):
    """Draw a copy of one of all data so far: in the limit the Bayesian bootstrap, exactly.

    References
    ----------
    Blackwell, D., MacQueen, J. B. (1973). Ferguson distributions via Polya urn schemes. Annals of Statistics 1,
    353-355.

    Examples
    --------
    >>> import torch
    >>> urn = PolyaUrn()
    >>> state = urn.init(torch.tensor([1.0, 2.0]), 3, 1)
    >>> urn.completed(urn.step(state, generator=torch.Generator().manual_seed(0))).weights.sum(1)
    tensor([3., 3., 3.])
    """

    def init(self, data: Data, num_replicates: int, horizon: int) -> UrnState:
        """Return an urn with each datum once."""
        n = num_data(data)
        origin = torch.zeros(num_replicates, n + horizon, dtype=torch.long)
        origin[:, :n] = torch.arange(n)
        return UrnState(origin, n, n)

    def step(self, state: UrnState, *, generator: torch.Generator) -> UrnState:
        """Draw from the urn and put two back."""
        chosen = torch.randint(state.size, (len(state.origin), 1), generator=generator)
        state.origin[:, state.size] = state.origin.gather(1, chosen)[:, 0]
        return state._replace(size=state.size + 1)

    def completed(self, state: UrnState) -> Completed:
        """Return how often each observed datum is in the urn."""
        origin = state.origin[:, : state.size]
        counts = torch.zeros(len(origin), state.num_data, dtype=torch.get_default_dtype())
        return Completed(None, counts.scatter_add(1, origin, torch.ones_like(origin, dtype=counts.dtype)))


class ScoreState(NamedTuple):
    """Parameters ``(R, k)``; what scores are multiplied by, ``(k, k)``; data ``(R, n + horizon, ...)``."""

    parameter: Tensor
    step_matrix: Tensor
    data: Tensor
    size: int


@dataclass(frozen=True)
class ScoreDriven(Predictive):
    r"""Draw from a parametric model at a plug-in parameter, which then follows the score.

    :math:`\theta_{t+1} = \theta_t + \frac{1}{t+1} I^{-1} \nabla \log p(x_{t+1} \mid \theta_t)`. Scores have expectation
    zero, so that the parameter is a martingale. With the model's Fisher information for ``I``, it spreads by
    :math:`I^{-1} \sum_{t > n} t^{-2}` where ``I`` is constant.

    Parameters
    ----------
    family : callable
        ``parameters (R, k) -> distribution`` of a datum, batch shape ``(R,)``; differentiable.
    start : Tensor
        The parameter after the observed data, ``(k,)``, such as that of maximum likelihood.
    information : Tensor, optional
        ``I``, ``(k, k)``, positive definite; by default the mean outer product of the observed data's scores at
        ``law_without_data``.

    Raises
    ------
    ShapeError
        If shapes do not fit.
    DataError
        If the information is not positive definite.

    References
    ----------
    Holmes, C. C., Walker, S. G. (2023). Statistical inference with exchangeability and martingales. Philosophical
    Transactions of the Royal Society A 381, 20220143.

    Fong, E., Yiu, A. (2024). Asymptotics for parametric martingale posteriors. arXiv:2410.17692.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 6.0])
    >>> rule = ScoreDriven(lambda mean: torch.distributions.Normal(mean[:, 0], 1.0), x.mean()[None], torch.eye(1))
    >>> state = rule.step(rule.init(x, 5, 1), generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(state.parameter[:, 0], rule.completed(state).data.mean(1))  # the running mean
    True
    """

    family: Callable[[Tensor], Distribution]
    start: Tensor
    information: Tensor | None = None

    def init(self, data: Data, num_replicates: int, horizon: int) -> ScoreState:
        """Return the starting parameter in each replicate."""
        if isinstance(data, tuple):
            raise ShapeError("ScoreDriven draws data of one column, not of covariates and outcomes")
        if self.start.dim() != 1:
            raise ShapeError(f"start must be (k,), not {tuple(self.start.shape)}")
        if not data.is_floating_point():
            data = data.to(self.start.dtype if self.start.is_floating_point() else torch.get_default_dtype())
        start = self.start.to(data)
        information = self.information
        if information is None:
            scores = self._scores(start.expand(len(data), -1), data)
            information = scores.mT @ scores / len(scores)
        if information.shape != (len(start), len(start)):
            raise ShapeError(f"information must be ({len(start)}, {len(start)}), not {tuple(information.shape)}")
        factor, failed = torch.linalg.cholesky_ex(information.to(data))
        if int(failed):
            raise DataError("the information of ScoreDriven is not positive definite; give information=, or more data")
        room = torch.zeros(num_replicates, len(data) + horizon, *data.shape[1:], dtype=data.dtype, device=data.device)
        room[:, : len(data)] = data
        return ScoreState(start.repeat(num_replicates, 1), torch.cholesky_inverse(factor), room, len(data))

    def step(self, state: ScoreState, *, generator: torch.Generator) -> ScoreState:
        """Draw at the present parameters and move these along the score."""
        with global_stream(generator):
            drawn = draw_values(self.family(state.parameter))
        if drawn.shape != state.data[:, 0].shape:
            raise ShapeError(
                f"family draws data of shape {tuple(drawn.shape)} instead of {tuple(state.data[:, 0].shape)}"
            )
        state.data[:, state.size] = drawn
        move = self._scores(state.parameter, drawn.to(state.data)) @ state.step_matrix / (state.size + 1)
        return state._replace(parameter=state.parameter + move, size=state.size + 1)

    def _scores(self, parameter: Tensor, data: Tensor) -> Tensor:
        """Return the gradient of each datum's log density, ``(R, k), (R, ...) -> (R, k)``."""
        with torch.enable_grad():
            at = parameter.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.family(at).log_prob(data).sum(), at)
        return score

    def completed(self, state: ScoreState) -> Completed:
        """Return all data so far."""
        return Completed(state.data[:, : state.size], None)


def normal_location(scale: float) -> Callable[[Tensor], Distribution]:
    """Return the family of normal laws of known standard deviation, for :class:`ScoreDriven`.

    Its information is ``1 / scale**2``.

    Raises
    ------
    SettingsError
        If ``scale`` is not positive.

    Examples
    --------
    >>> import torch
    >>> normal_location(2.0)(torch.zeros(3, 1)).scale
    tensor([2., 2., 2.])
    """
    if not 0 < scale < math.inf:
        raise SettingsError(f"scale must be positive, not {scale}")
    return lambda mean: torch.distributions.Normal(mean[:, 0], torch.full_like(mean[:, 0], scale))


# A predictive density for data on the real line, updated by each datum through a normal copula.

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
        mean, scale = law_without_data(data)
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


def law_without_data(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the normal law without data, ``(n,) -> (), ()``.

    Examples
    --------
    >>> import torch
    >>> mean, scale = law_without_data(torch.cat([torch.linspace(-1, 1, 101), torch.tensor([1e4])]))
    >>> round(mean.item(), 3), round(scale.item(), 3)
    (0.01, 0.749)
    """
    quarter, median, three = data.quantile(torch.tensor([0.25, 0.5, 0.75]).to(data))
    robust, raw = (three - quarter) / _QUARTILES, data.std()
    return median, torch.where(robust > 0, robust.minimum(raw), raw)


def _grid(data: Tensor, count: int) -> Tensor:
    """Return points over all data whose distance grows with that from the median, where this exceeds the scale."""
    mean, scale = law_without_data(data)
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


_MUCH = 0.2
_CHECKPOINTS = 5
_ROUNDING = 1e-7
_NUM_WEIGHTINGS = 200
_MOST_FACTOR = 2.0  # between standard deviations of a smooth law and of the data


@dataclass(frozen=True)
class MartingalePosterior:
    """Draws of a parameter after simulated futures, and how they got there.

    Attributes
    ----------
    draws : Draws
        At the last horizon, one chain of independent draws.
    horizons : tuple of int
        Numbers of future data, increasing.
    path : Tensor
        Unconstrained parameters at each horizon, ``(H, R, d)``.
    num_data : int
        ``n``, how many data were observed.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> result = martingale_posterior(GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x), num_draws=100)
    >>> result.horizons, result.path.shape, result.spread.shape
    ((5, 10, 20, 40, 80), torch.Size([5, 100, 1]), torch.Size([5, 1]))
    """

    draws: Draws
    horizons: tuple[int, ...]
    path: Tensor
    num_data: int

    @property
    def spread(self) -> Tensor:
        """Standard deviation of the parameters at each horizon, ``(H, d)``."""
        return self.path.std(1)

    @property
    def remaining(self) -> Tensor:
        r"""Share of the limit's variance that lies beyond the last horizon, ``(d,)``.

        Updates by datum ``t`` are of order ``1 / t``, so that increments beyond horizon ``N`` have variance
        proportional to ``1 / (n + N)``; the factor is that of the last two horizons. Parameters that move in jumps,
        such as quantiles, are further from their limit than others, and this says so. Zero where replicates differ
        by rounding alone.
        """
        n, (before, last) = self.num_data, self.horizons[-2:]
        beyond = (self.path[-1] - self.path[-2]).var(0) * (n + before) / (last - before)
        settled = self.path[-1].std(0) <= _ROUNDING * self.path[-1].abs().mean(0)
        return torch.where(settled, torch.zeros_like(beyond), beyond / (beyond + self.path[-1].var(0)))

    @property
    def drift(self) -> Tensor:
        """How many standard errors the mean has moved between neighbouring horizons, ``(H - 1, d)``.

        Parameters that are linear in the law, such as means, do not drift; others do a little.
        """
        change = self.path.diff(dim=0)
        error = change.std(1) / math.sqrt(self.path.shape[1])
        return change.mean(1) / torch.where(error > 0, error, torch.ones_like(error))

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ; see :meth:`bayeskit.Draws.to_arviz`."""
        return self.draws.to_arviz()

    def plot(self, coordinate: int = 0, num_paths: int = 50, ax: Axes | None = None) -> Axes:
        """Plot some replicates of one unconstrained coordinate over the horizon."""
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(6, 3.5), layout="constrained").add_subplot()
        ax.plot(self.horizons, self.path[:, :num_paths, coordinate].cpu().numpy(), color=BLUE, linewidth=0.6, alpha=0.5)
        ax.set(xscale="log", xlabel="future data", ylabel=self.draws.target.names[coordinate])  # type: ignore[union-attr]
        return ax

    def __repr__(self) -> str:
        return (
            f"MartingalePosterior({self.draws.num_draws} draws, horizon {self.horizons[-1]}, "
            f"remaining variance {float(self.remaining.max()):.1%})"
        )


def martingale_posterior(
    posterior: GibbsPosterior,
    predictive: Predictive | None = None,
    num_draws: int = 1000,
    *,
    horizon: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> MartingalePosterior:
    """Complete the data by predictive resampling and take the parameter of least loss: a martingale posterior.

    A rule draws the next datum given all before, again and again; every replicate ends in a data set so large that its
    parameter is known. How these parameters differ is the uncertainty. There is no prior and no likelihood, and no
    learning rate to be chosen.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its loss and data; neither its weight nor its prior matter, but for the parameter's shape and support.
    predictive : Predictive, default PolyaUrn()
        :class:`PolyaUrn`, :class:`ScoreDriven`, :class:`CopulaUpdate` or one of your own.
    num_draws : int, default 1000
        Number of replicates ``R``, simulated and minimised in a few batches.
    horizon : int, optional
        Number of future data, at least two; by default 20 times as many as there are, which leaves a share of about
        1/21 of the variance unseen.
    seed : int, default 0
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    MartingalePosterior

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    Warns
    -----
    SamplingWarning
        If minimisations did not converge, or more than about a fifth of the variance lies beyond the horizon; if
        :class:`CopulaUpdate` spreads a parameter less than half or more than twice as far as the Bayesian bootstrap.

    References
    ----------
    Fong, E., Holmes, C., Walker, S. G. (2023). Martingale posterior distributions. JRSS B 85, 1357-1391.

    Doob, J. L. (1949). Application of the theory of martingales. Colloques Internationaux du CNRS 13, 23-27.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x)
    >>> result = martingale_posterior(posterior, num_draws=4000, horizon=400)
    >>> theta = result.draws.values()["theta"]  # in the limit the Bayesian bootstrap: mean 4, variance 1.9
    >>> bool(abs(theta.mean() - 4) < 0.1), bool(abs(theta.var() - 1.9) < 0.2)
    (True, True)
    """
    count = whole_number("num_draws", num_draws, least=2)
    rule = PolyaUrn() if predictive is None else predictive
    if not isinstance(rule, Predictive):
        raise SettingsError(f"predictive must be a rule such as PolyaUrn() or ScoreDriven(...), not {rule!r:.80}")
    check_pooling(posterior)
    n = posterior.num_data
    last = 20 * n if horizon is None else whole_number("horizon", horizon, least=2)
    horizons = tuple(sorted({max(1, last // 2**k) for k in range(_CHECKPOINTS)}))
    generator = new_generator(seed, stream="martingale posterior")
    begin, first = time.monotonic(), minimize(posterior, seed=seed).position
    sizes = replicate_batches(count, numbers_of(posterior.data) * (n + last) // n)
    paths: list[list[Minimum]] = []
    with progress_bar("predictive resampling", len(sizes) * last, progress) as bar:
        for number, size in enumerate(sizes):
            futures = _futures(rule, posterior, size, horizons, generator, bar, number * last)
            paths.append(_followed(posterior, futures, first.expand(size, -1)))
    ends = joined([path[-1] for path in paths])
    settings = {"method": "martingale_posterior", "predictive": type(rule).__name__, "horizon": last, "seed": seed}
    draws = minima_as_draws(posterior, ends, time.monotonic() - begin, settings)
    path = torch.cat([torch.stack([minimum.position for minimum in path]) for path in paths], 1)
    result = MartingalePosterior(draws, horizons, path, n)
    share = float(result.remaining.nan_to_num(0.0).max())
    if share > _MUCH:
        warnings.warn(
            f"about {share:.0%} of the variance lies beyond the horizon of {last} future data; raise horizon to "
            f"{max(20 * n, 2 * last)} or more, and see that the rule is a martingale with updates of order 1/t",
            SamplingWarning,
            stacklevel=2,
        )
    if rule.is_smooth:
        _compare_with_bootstrap(posterior, result, first, seed)
    return result


def _compare_with_bootstrap(posterior: GibbsPosterior, result: MartingalePosterior, start: Tensor, seed: int) -> None:
    """Warn where a smooth law has another spread than the data themselves give."""
    n, last = result.num_data, result.horizons[-1]
    generator = new_generator(seed, posterior.device, stream="weightings of the data")
    like = {"generator": generator, "device": generator.device, "dtype": posterior.dtype}
    each = -torch.rand(_NUM_WEIGHTINGS, n, **like).clamp(min=1e-7).log()  # type: ignore[call-overload]
    weights = n * each / each.sum(1, keepdim=True)
    limit = minimize(posterior, weights=weights, start=start.expand(_NUM_WEIGHTINGS, -1)).position.std(0)
    expected = limit * math.sqrt(last / (n + last))
    if bool((expected <= _ROUNDING * start.abs()).all()):
        return
    ratio = result.spread[-1] / expected.clamp(min=torch.finfo(expected.dtype).tiny)
    worst = int(ratio.log().abs().argmax())
    if not 1 / _MOST_FACTOR <= float(ratio[worst]) <= _MOST_FACTOR:
        warnings.warn(
            f"under a smooth law {posterior.names[worst]} has {float(ratio[worst]):.2g} times the standard deviation "
            "that it has under the Bayesian bootstrap; take another correlation=, to which that of a mean is about "
            "proportional, or PolyaUrn() if tails are heavy",
            SamplingWarning,
            stacklevel=3,
        )


def _futures(
    rule: Predictive,
    posterior: GibbsPosterior,
    replicates: int,
    horizons: tuple[int, ...],
    generator: torch.Generator,
    bar: Bar,
    done: int,
) -> Iterator[Completed]:
    """Simulate forward and yield what there is at each horizon."""
    state = rule.init(posterior.data, replicates, horizons[-1])
    for t in range(1, horizons[-1] + 1):
        with one_thread():
            state = rule.step(state, generator=generator)
        if t in horizons:
            yield rule.completed(state)
        bar.update(done + t)


def _followed(posterior: GibbsPosterior, futures: Iterator[Completed], start: Tensor) -> list[Minimum]:
    """Minimise the loss at each horizon, from where it was smallest at the one before."""
    path: list[Minimum] = []
    for future in futures:
        weights = None if future.weights is None else future.weights.to(start)
        path.append(minimize(posterior, weights=weights, data=future.data, start=start))
        start = path[-1].position
    return path
