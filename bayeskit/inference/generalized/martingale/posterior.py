"""Martingale posteriors: uncertainty as what is not yet seen, simulated from predictive rules."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeskit._plots import BLUE
from bayeskit._progress import Bar, progress_bar
from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.generalized.bootstrap.loss_likelihood_bootstrap import (
    as_draws,
    blocks,
    joined,
    numbers_of,
)
from bayeskit.inference.generalized.martingale.predictive import Completed, PolyaUrn, Predictive
from bayeskit.inference.generalized.minimizer import Minimum, minimize
from bayeskit.inference.generalized.pooling import check_pooling
from bayeskit.inference.generalized.posterior import GibbsPosterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    sizes = blocks(count, numbers_of(posterior.data) * (n + last) // n)
    paths: list[list[Minimum]] = []
    with progress_bar("predictive resampling", len(sizes) * last, progress) as bar:
        for number, size in enumerate(sizes):
            futures = _futures(rule, posterior, size, horizons, generator, bar, number * last)
            paths.append(_followed(posterior, futures, first.expand(size, -1)))
    ends = joined([path[-1] for path in paths])
    settings = {"method": "martingale_posterior", "predictive": type(rule).__name__, "horizon": last, "seed": seed}
    draws = as_draws(posterior, ends, time.monotonic() - begin, settings)
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
