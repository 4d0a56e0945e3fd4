"""Martingale posteriors: future data simulated from predictive rules instead of a prior and a likelihood."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.special import ndtr, ndtri

from bayeskit.core.inputs import real_number, warn_user, whole_number
from bayeskit.core.plots import BLUE
from bayeskit.core.progress import Bar, progress_bar
from bayeskit.core.randomness import global_stream, new_generator, one_thread
from bayeskit.core.texts import short_repr
from bayeskit.draws import Draws
from bayeskit.errors import DataError, SamplingWarning, SettingsError, ShapeError
from bayeskit.inference.generalized.bootstrap import dirichlet, joined, minima_as_draws, numbers_of, replicate_batches
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


# Predictive rules: the distribution of the next datum given all previous data.


class Completed(NamedTuple):
    """Observed and simulated future data of each replicate, ``(R, m, ...)``, and their weights ``(R, m)``.

    Data are None for the observed data, weights None for unit weights.
    """

    data: Data | None
    weights: Tensor | None


class Predictive(ABC):
    """Base class of predictive rules, which draw the next datum given all previous data, for all replicates at once.

    The predictive distributions must form a martingale: the expected predictive distribution after the next datum is
    the present one. A step may overwrite its input state.

    Attributes
    ----------
    is_smooth : bool
        Whether the completed data are a smooth distribution; :func:`martingale_posterior` then compares the spread of
        the parameter with the Bayesian bootstrap.
    """

    is_smooth: ClassVar[bool] = False

    @abstractmethod
    def init(self, data: Data, num_replicates: int, horizon: int) -> Any:
        """Return the state after the observed data, with room for ``horizon`` future data."""

    @abstractmethod
    def step(self, state: Any, *, generator: torch.Generator) -> Any:
        """Draw one datum in each replicate and return the new state; the input state is overwritten.

        The generator is one of the host, wherever the data are.
        """

    @abstractmethod
    def completed(self, state: Any) -> Completed:
        """Return the observed data and the data drawn so far."""


class UrnState(NamedTuple):
    """Index of the observed datum that each datum copies, ``(R, n + horizon)``, filled up to ``size``; and ``n``."""

    origin: Tensor
    size: int
    num_data: int


@dataclass(frozen=True)
class PolyaUrn(Predictive):
    """Polya urn: copy a random datum of all data so far; the limit is the Bayesian bootstrap.

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
        """Return the urn of the observed data."""
        n = num_data(data)
        origin = torch.zeros(num_replicates, n + horizon, dtype=torch.long)
        origin[:, :n] = torch.arange(n)
        return UrnState(origin, n, n)

    def step(self, state: UrnState, *, generator: torch.Generator) -> UrnState:
        """Draw a datum from the urn and return it with a copy."""
        chosen = torch.randint(state.size, (len(state.origin), 1), generator=generator)
        state.origin[:, state.size] = state.origin.gather(1, chosen)[:, 0]
        return state._replace(size=state.size + 1)

    def completed(self, state: UrnState) -> Completed:
        """Return the counts of the observed data in the urn as weights."""
        origin = state.origin[:, : state.size]
        counts = torch.zeros(len(origin), state.num_data, dtype=torch.get_default_dtype())
        return Completed(None, counts.scatter_add(1, origin, torch.ones_like(origin, dtype=counts.dtype)))


class ScoreState(NamedTuple):
    """Parameters ``(R, k)``; inverse information ``(k, k)``; data ``(R, n + horizon, ...)``; number of data."""

    parameter: Tensor
    step_matrix: Tensor
    data: Tensor
    size: int


@dataclass(frozen=True)
class ScoreDriven(Predictive):
    r"""Parametric plug-in predictive with a score-driven update of the parameter.

    :math:`\theta_{t+1} = \theta_t + \frac{1}{t+1} I^{-1} \nabla \log p(x_{t+1} \mid \theta_t)`. Scores have expectation
    zero, so the parameter is a martingale. If ``I`` is the Fisher information of the model and constant, the limit has
    variance :math:`I^{-1} \sum_{t > n} t^{-2}`.

    Parameters
    ----------
    family : callable
        ``parameters (R, k) -> distribution`` of one datum, with batch shape ``(R,)``; differentiable.
    start : Tensor
        Parameter given the observed data, ``(k,)``, such as the maximum-likelihood estimate.
    information : Tensor, optional
        ``I``, ``(k, k)``, positive definite; by default the mean outer product of the scores of the observed data at
        ``start``.

    Raises
    ------
    ShapeError
        If a shape is wrong.
    DataError
        If the information is not positive definite.

    References
    ----------
    Holmes, C. C., Walker, S. G. (2023). Statistical inference with exchangeability and martingales. Philosophical
    Transactions of the Royal Society A 381, 20220143. Fong, E., Yiu, A. (2024). Asymptotics for parametric martingale
    posteriors. arXiv:2410.17692.

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

    __repr__ = short_repr

    def init(self, data: Data, num_replicates: int, horizon: int) -> ScoreState:
        """Return the state with parameter ``start`` in each replicate."""
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
        """Draw a datum at the present parameters and update them by the score."""
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
    """Return the family of normal distributions with standard deviation ``scale``, for :class:`ScoreDriven`.

    The Fisher information is ``1 / scale**2``.

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
    scale = real_number("scale", scale, "(0, inf)")
    return lambda mean: torch.distributions.Normal(mean[:, 0], torch.full_like(mean[:, 0], scale))


# Copula update of the predictive density of real data.

_EDGE = 1e-13
_REACH = 6.0  # extent of the grid beyond the data, in standard deviations of the initial normal distribution
_QUARTILES = 1.349  # interquartile range of a normal distribution, in standard deviations


class CopulaState(NamedTuple):
    """Distribution functions on the grid, ``(R, G)``; the grid, ``(G,)``; correlation; number of data so far."""

    cdf: Tensor
    grid: Tensor
    correlation: float
    size: int


def rate(size: int) -> float:
    """Return the weight of the update by datum ``size + 1``, ``(2 - 1 / (size + 1)) / (size + 2)``."""
    return (2 - 1 / (size + 1)) / (size + 2)


def conditional(cdf: Tensor, at: Tensor, correlation: float | Tensor) -> Tensor:
    """Return the conditional distribution function of the normal copula, both arguments in (0, 1)."""
    correlation = torch.as_tensor(correlation, dtype=cdf.dtype, device=cdf.device)
    x, y = ndtri(cdf.clamp(_EDGE, 1 - _EDGE)), ndtri(at.clamp(_EDGE, 1 - _EDGE))
    return ndtr((x - correlation * y) / (1 - correlation.square()).sqrt())


def log_copula_density(cdf: Tensor, at: Tensor, correlation: float | Tensor) -> Tensor:
    """Return the log density of the normal copula, both arguments in (0, 1)."""
    correlation = torch.as_tensor(correlation, dtype=cdf.dtype, device=cdf.device)
    x, y = ndtri(cdf.clamp(_EDGE, 1 - _EDGE)), ndtri(at.clamp(_EDGE, 1 - _EDGE))
    rest = 1 - correlation.square()
    quadratic = correlation.square() * (x.square() + y.square()) - 2 * correlation * x * y
    return -quadratic / (2 * rest) - rest.log() / 2


@dataclass(frozen=True)
class CopulaUpdate(Predictive):
    r"""Predictive distribution of real data, updated by a normal copula.

    :math:`P_{t+1}(y) = (1 - a_t) P_t(y) + a_t H_\rho(P_t(y), P_t(x_{t+1}))` with
    :math:`a_t = (2 - 1/(t+1)) / (t + 2)`. :math:`P_0` is normal with the median of the data as mean; its standard
    deviation is the smaller of the sample standard deviation and the interquartile range divided by 1.349. Future data
    enter through the uniform variates :math:`P_t(x_{t+1})`, so the distribution function is resampled on a grid, and
    the parameter minimises the expected loss under the final distribution.

    Parameters
    ----------
    correlation : float or "prequential", default 0.5
        ``rho`` in (0, 1). Larger values give rougher densities and wider posteriors: the mean of ``n`` data has
        posterior standard deviation :math:`2 \rho s / \sqrt n`, equal to that of the Bayesian bootstrap at 0.5.
        "prequential" maximises the prequential likelihood, which suits data far from normal; for nearly normal data it
        selects a small value, and the posterior is much too narrow.
    num_points : int, default 400
        Number of grid points, at least 10. The grid extends six standard deviations of :math:`P_0` beyond the data,
        with spacing that grows with the distance from its mean.
    num_permutations : int, default 10
        Number of random orders of the data over which the predictive distribution is averaged.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    ShapeError
        If data are not ``(n,)``.
    DataError
        If data are all equal, or fewer than two.

    References
    ----------
    Fong, E., Holmes, C., Walker, S. G. (2023). Martingale posterior distributions. JRSS B 85, 1357-1391. Hahn, P. R.,
    Martin, R., Walker, S. G. (2018). On recursive Bayesian predictive distributions. JASA 113, 1085-1093.

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
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.correlation, str) and self.correlation != "prequential":
            raise SettingsError(f'correlation must lie between 0 and 1 or be "prequential", not {self.correlation!r}')
        if self.correlation != "prequential":
            real_number("correlation", self.correlation, "(0, 1)")
        whole_number("num_points", self.num_points, least=10)
        whole_number("num_permutations", self.num_permutations, least=1)

    def init(self, data: Data, num_replicates: int, horizon: int) -> CopulaState:
        """Return the predictive distribution given the observed data in each replicate."""
        x = _checked(data)
        grid = _grid(x, self.num_points)
        with one_thread():
            fitted = self.fitted_correlation(x) if self.correlation == "prequential" else self.correlation
            correlation = float(fitted)
            cdf = self._observed(x, grid, torch.tensor([correlation]).to(x))[0].mean(0)[0]
        return CopulaState(cdf.expand(num_replicates, -1), grid, correlation, len(x))

    def step(self, state: CopulaState, *, generator: torch.Generator) -> CopulaState:
        """Draw the uniform variate of a datum and update the distribution."""
        at = torch.rand(len(state.cdf), 1, generator=generator, dtype=torch.float64).to(state.cdf)
        weight = rate(state.size)
        cdf = (1 - weight) * state.cdf + weight * conditional(state.cdf, at, state.correlation)
        return state._replace(cdf=cdf, size=state.size + 1)

    def completed(self, state: CopulaState) -> Completed:
        """Return cell midpoints with cell masses as weights; the tails beyond the grid are placed at its ends."""
        middles = torch.cat([state.grid[:1], (state.grid[1:] + state.grid[:-1]) / 2, state.grid[-1:]])
        mass = torch.cat([state.cdf[:, :1], state.cdf.diff(dim=1), 1 - state.cdf[:, -1:]], 1)
        return Completed(middles.expand(len(mass), -1), mass * state.size)

    def fitted_correlation(self, data: Tensor) -> float:
        """Return the correlation in (0, 1) that maximises the prequential likelihood of data ``(n,)``, to 0.01."""
        coarse = torch.linspace(0.1, 0.9, 9, dtype=data.dtype)
        best = coarse[int(self.prequential(data, coarse).argmax())]
        fine = best + 0.01 * torch.arange(-9, 10, dtype=data.dtype)
        return float(fine[int(self.prequential(data, fine).argmax())])

    def prequential(self, data: Tensor, correlations: Tensor) -> Tensor:
        """Return the joint log density of the data, averaged over orders, ``(n,), (C,) -> (C,)``."""
        return self._observed(data, data[:0], correlations)[1].mean(0)

    def _observed(self, data: Tensor, grid: Tensor, correlations: Tensor) -> tuple[Tensor, Tensor]:
        """Return distribution functions on the grid, ``(M, C, G)``, and joint log densities of the data, ``(M, C)``."""
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
    """Return mean and standard deviation of the initial normal distribution, ``(n,) -> (), ()``."""
    quarter, median, three = data.quantile(torch.tensor([0.25, 0.5, 0.75]).to(data))
    robust, raw = (three - quarter) / _QUARTILES, data.std()
    return median, torch.where(robust > 0, robust.minimum(raw), raw)


def _grid(data: Tensor, count: int) -> Tensor:
    """Return grid points ``(count,)`` equally spaced in the asinh of the standardised value."""
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
_MOST_FACTOR = 2.0  # largest ratio of standard deviations between smooth predictive and Bayesian bootstrap


@dataclass(frozen=True)
class MartingalePosterior:
    """Draws of a martingale posterior and their paths over the horizon.

    Attributes
    ----------
    draws : Draws
        Independent draws at the last horizon, as one chain.
    horizons : tuple of int
        Numbers of future data at which the parameter is recorded, increasing.
    path : Tensor
        Unconstrained parameters at each horizon, ``(H, R, d)``.
    num_data : int
        Number of observed data ``n``.

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
        r"""Estimated share of the limiting variance that lies beyond the last horizon, ``(d,)``.

        Updates by datum ``t`` are of order ``1 / t``, so the variance beyond horizon ``N`` is proportional to
        ``1 / (n + N)``; the factor is estimated from the last two horizons. Zero if replicates differ by rounding only.
        """
        n, (before, last) = self.num_data, self.horizons[-2:]
        beyond = (self.path[-1] - self.path[-2]).var(0) * (n + before) / (last - before)
        settled = self.path[-1].std(0) <= _ROUNDING * self.path[-1].abs().mean(0)
        return torch.where(settled, torch.zeros_like(beyond), beyond / (beyond + self.path[-1].var(0)))

    @property
    def drift(self) -> Tensor:
        """Change of the mean between consecutive horizons in standard errors, ``(H - 1, d)``.

        Parameters that are linear functionals of the distribution, such as means, have expected drift zero.
        """
        change = self.path.diff(dim=0)
        error = change.std(1) / math.sqrt(self.path.shape[1])
        return change.mean(1) / torch.where(error > 0, error, torch.ones_like(error))

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ; see :meth:`bayeskit.Draws.to_arviz`."""
        return self.draws.to_arviz()

    def plot(self, coordinate: int = 0, num_paths: int = 50, ax: Axes | None = None) -> Axes:
        """Plot one unconstrained coordinate of some replicates against the horizon."""
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
    """Draw from the martingale posterior: minimise the loss of data completed by predictive resampling.

    Each replicate draws future data one by one from the predictive rule and minimises the loss of all data. The
    minimisers are draws of the parameter. No prior, likelihood or learning rate is needed.

    Parameters
    ----------
    posterior
        As for :func:`~bayeskit.inference.generalized.loss_likelihood_bootstrap`.
    predictive : Predictive, default PolyaUrn()
        :class:`PolyaUrn`, :class:`ScoreDriven`, :class:`CopulaUpdate` or another subclass of :class:`Predictive`.
    num_draws : int, default 1000
        Number of replicates ``R``.
    horizon : int, optional
        Number of future data, at least two. The default ``20 * n`` omits about 1/21 of the variance.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    Warns
    -----
    SamplingWarning
        If minimisations did not converge; if more than 20 % of the variance lies beyond the horizon; if a standard
        deviation under :class:`CopulaUpdate` is less than half or more than twice that of the Bayesian bootstrap.

    References
    ----------
    Fong, E., Holmes, C., Walker, S. G. (2023). Martingale posterior distributions. JRSS B 85, 1357-1391. Doob, J. L.
    (1949). Application of the theory of martingales. Colloques Internationaux du CNRS 13, 23-27.

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
        warn_user(
            f"about {share:.0%} of the variance lies beyond the horizon of {last} future data; raise horizon to "
            f"{max(20 * n, 2 * last)} or more, and check that the rule is a martingale with updates of order 1/t",
            SamplingWarning,
        )
    if rule.is_smooth:
        _compare_with_bootstrap(posterior, result, first, seed)
    return result


def _compare_with_bootstrap(posterior: GibbsPosterior, result: MartingalePosterior, start: Tensor, seed: int) -> None:
    """Warn if a standard deviation under a smooth predictive is far from that of the Bayesian bootstrap."""
    n, last = result.num_data, result.horizons[-1]
    ones = torch.ones(_NUM_WEIGHTINGS, n, dtype=torch.float64)
    weights = (n * dirichlet(ones, new_generator(seed, stream="weightings of the data"))).to(start)
    limit = minimize(posterior, weights=weights, start=start.expand(_NUM_WEIGHTINGS, -1)).position.std(0)
    expected = limit * math.sqrt(last / (n + last))
    if bool((expected <= _ROUNDING * start.abs()).all()):
        return
    ratio = result.spread[-1] / expected.clamp(min=torch.finfo(expected.dtype).tiny)
    worst = int(ratio.log().abs().argmax())
    if not 1 / _MOST_FACTOR <= float(ratio[worst]) <= _MOST_FACTOR:
        warn_user(
            f"under a smooth predictive {posterior.names[worst]} has {float(ratio[worst]):.2g} times the standard "
            "deviation under the Bayesian bootstrap; take another correlation= (the standard deviation of a mean is "
            "about proportional to it), or PolyaUrn() if tails are heavy",
            SamplingWarning,
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
    """Simulate future data and yield the completed data at each horizon."""
    state = rule.init(posterior.data, replicates, horizons[-1])
    for t in range(1, horizons[-1] + 1):
        with one_thread():
            state = rule.step(state, generator=generator)
        if t in horizons:
            yield rule.completed(state)
        bar.update(done + t)


def _followed(posterior: GibbsPosterior, futures: Iterator[Completed], start: Tensor) -> list[Minimum]:
    """Minimise the loss at each horizon, starting from the minimiser at the previous horizon."""
    path: list[Minimum] = []
    for future in futures:
        weights = None if future.weights is None else future.weights.to(start)
        path.append(minimize(posterior, weights=weights, data=future.data, start=start))
        start = path[-1].position
    return path
