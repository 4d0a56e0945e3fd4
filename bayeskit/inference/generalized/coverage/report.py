"""Do credible regions cover? Repeated sampling against the loss minimiser of the true law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from scipy.stats import beta
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.coverage.functionals import as_functional
from bayeskit.inference.generalized.coverage.replicates import ReplicatePosteriors, replicate_posteriors
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, as_data, columns
from bayeskit.inference.generalized.minimizer import minimize
from bayeskit.inference.generalized.posterior import GibbsPosterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
HUGE = 500_000
CONFIDENCE = 0.95
MAX_UNTRUSTED = 0.01
JOINT = "joint"

Simulate = Callable[[torch.Generator], Any]
"""``generator -> data``, a data set as the posterior takes it."""


@dataclass(frozen=True)
class BatchSelector:
    """A selector of learning rates that takes all data sets at once.

    Parameters
    ----------
    function : callable
        ``(posterior, data sets (R, n, ...)) -> (R,)``.

    Examples
    --------
    >>> import torch
    >>> one_over_variance = BatchSelector(lambda posterior, x: 1 / x.var(-1))
    >>> one_over_variance.function(None, torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([1.])
    """

    function: Callable[[GibbsPosterior, Data], Tensor]


@dataclass(frozen=True, eq=False)
class CoverageReport:
    """How often credible regions covered the truth.

    Attributes
    ----------
    names : tuple of str
        Of the regions: ``"joint"`` is the highest-posterior-density region of the whole parameter, in unconstrained
        coordinates; the others are equal-tailed intervals.
    entry_levels : Tensor
        Shape ``(R, len(names))``: the level at which the truth enters the region of each replicate. Uniform where
        regions cover as often as they say.
    levels : tuple of float
        That the report is about.
    truth : Tensor
        Loss minimiser of the true law, unconstrained, ``(d,)``.
    weight : Tensor
        Learning rate of each replicate, ``(R,)``.
    trusted : Tensor
        Boolean, ``(R,)``: whether a replicate's posterior could be computed.
    mismatch : Tensor
        Shape ``(d,)``: variances of the posterior mean over replicates in units of the mean posterior variance, along
        the directions in which the two differ least to most. All one where the posterior's spread is that of
        repeated sampling; no single weight makes unequal ones equal.

    Examples
    --------
    >>> import torch
    >>> level = torch.linspace(0.0, 1.0, 201)[1::2].unsqueeze(-1)  # of a perfect posterior
    >>> one = torch.ones(100)
    >>> report = CoverageReport(("joint",), level, (0.5, 0.9), one[:1], one, one.bool(), one[:1])
    >>> report.coverage
    tensor([[0.5000, 0.9000]])
    """

    names: tuple[str, ...]
    entry_levels: Tensor
    levels: tuple[float, ...]
    truth: Tensor
    weight: Tensor
    trusted: Tensor
    mismatch: Tensor

    @property
    def num_replicates(self) -> int:
        """Number of data sets."""
        return len(self.entry_levels)

    @property
    def coverage(self) -> Tensor:
        """Share of replicates whose region covers the truth, ``(len(names), len(levels))``."""
        levels = self.entry_levels.new_tensor(self.levels)
        return (self.entry_levels[..., None] <= levels).to(self.entry_levels).mean(0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against trusting the numbers, each with its remedy."""
        share = float((~self.trusted).double().mean())
        if share <= MAX_UNTRUSTED:
            return ()
        return (
            f"{100 * share:.1f} % of the replicates' posteriors could not be computed reliably by importance sampling; "
            "take more draws, or reparametrise the model",
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a region and level: coverage, its standard error, and a 95 % band (Clopper-Pearson).

        References
        ----------
        Clopper, C. J., Pearson, E. S. (1934). The use of confidence or fiducial limits illustrated in the case of the
        binomial. Biometrika 26, 404-413.
        """
        rows = []
        for name, covered in zip(self.names, self.coverage, strict=True):
            for level, share in zip(self.levels, covered.tolist(), strict=True):
                lower, upper = binomial_band(round(share * self.num_replicates), self.num_replicates)
                rows.append(
                    {
                        "region": name,
                        "level": level,
                        "coverage": share,
                        "standard_error": math.sqrt(share * (1 - share) / self.num_replicates),
                        "lower": lower,
                        "upper": upper,
                    }
                )
        return pd.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot coverage against the nominal level, region by region, with 95 % bands.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes.
        """
        from matplotlib.figure import Figure

        from bayeskit._plots import CHAIN_COLOURS, GREY

        if ax is None:
            ax = Figure(figsize=(5.0, 4.6), layout="constrained").subplots()
        table = self.to_pandas()
        ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        shift = 0.006  # so that the bands of several regions at one level do not hide one another
        for i, (name, rows) in enumerate(table.groupby("region", sort=False)):
            x = rows["level"] + shift * (i - (len(self.names) - 1) / 2)
            below, above = rows["coverage"] - rows["lower"], rows["upper"] - rows["coverage"]
            colour = CHAIN_COLOURS[i % len(CHAIN_COLOURS)]
            ax.errorbar(
                x, rows["coverage"], [below, above], color=colour, marker="o", markersize=4, capsize=2, label=str(name)
            )
        ax.set_xlim(0, 1.02)
        ax.set_ylim(0, 1.02)
        ax.set_xlabel("nominal level")
        ax.set_ylabel(f"coverage over {self.num_replicates} data sets")
        ax.legend(frameon=False)
        ax.grid(alpha=0.25)
        return ax

    def __repr__(self) -> str:
        weight = self.weight
        spread = f"{float(weight[0]):.4g}"
        if float(weight.amin()) < float(weight.amax()):
            spread = f"{float(weight.median()):.4g} ({float(weight.amin()):.4g} to {float(weight.amax()):.4g})"
        lines = [f"coverage over {self.num_replicates} data sets, weight {spread}"]
        width = max(len("nominal"), *map(len, self.names))
        lines.append("  " + "nominal".ljust(width) + "".join(f"{100 * level:9.1f}" for level in self.levels))
        lines += [
            "  " + name.ljust(width) + "".join(f"{100 * share:9.1f}" for share in covered.tolist())
            for name, covered in zip(self.names, self.coverage, strict=True)
        ]
        lines.append(f"  sampling over posterior variance: {', '.join(f'{x:.3g}' for x in self.mismatch.tolist())}")
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.warnings)])


def binomial_band(successes: int, trials: int) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a probability, at 95 %.

    Examples
    --------
    >>> lower, upper = binomial_band(0, 10)
    >>> lower, round(upper, 4)
    (0.0, 0.3085)
    """
    tail = (1 - CONFIDENCE) / 2
    lower = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    upper = 1.0 if successes == trials else float(beta.isf(tail, successes + 1, trials - successes))
    return lower, upper


def coverage_report(
    posterior: GibbsPosterior,
    simulate: Simulate,
    truth: Any = None,
    weight: float | Tensor | BatchSelector | Callable[[GibbsPosterior], Any] | None = None,
    *,
    levels: Sequence[float] = LEVELS,
    num_replicates: int = 1000,
    functional: Callable[[Any], Tensor] | None = None,
    num_draws: int = 1024,
    seed: int = 0,
) -> CoverageReport:
    """Draw data sets from a known law and count how often credible regions cover.

    A loss makes no claim about the law of the data; what its posterior is after, and what regions ought to cover, is
    the minimiser of the expected loss under that law.

    Parameters
    ----------
    posterior : GibbsPosterior
        Whose prior and loss are studied; its data only say what a data set looks like.
    simulate : callable
        ``generator -> data``: one data set of the true law.
    truth : Tensor or dict of Tensor, optional
        Loss minimiser under the true law: the value of the prior's only site, or of its sites by name. By default
        that of half a million simulated data, if the loss is a sum over them.
    weight : float, Tensor, BatchSelector or callable, optional
        Learning rate; one each, ``(R,)``; or what selects it anew for each data set: a function of the posterior of
        that data set (such as those of :mod:`~bayeskit.inference.generalized.calibrate`), or a
        :class:`BatchSelector`. By default the posterior's own.
    levels : sequence of float
    num_replicates : int, default 1000
    functional : callable, optional
        From what the loss takes as its parameter to one number or several; by default every entry of every site.
    num_draws : int, default 1024
        From each posterior.
    seed : int, default 0

    Returns
    -------
    CoverageReport

    Raises
    ------
    SettingsError
        If a level does not lie in (0, 1), a weight is not positive, or no truth is given for a loss that is no sum
        over data.
    ShapeError
        If simulated data do not look like the posterior's, or truth has not the shape of its site.
    DataError
        If they are not finite, or no minimiser of the expected loss is found.

    References
    ----------
    Syring, N., Martin, R. (2019). Calibrating general posterior credible regions. Biometrika 106, 479-486.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> def simulate(generator):
    ...     return 2.0 * torch.randn(50, generator=generator, dtype=torch.float64)
    >>> posterior = GibbsPosterior(Flat(), losses.HalfSquared(), torch.zeros(50, dtype=torch.float64))
    >>> coverage_report(posterior, simulate, truth=0.0, levels=(0.95,), num_replicates=200)  # 67.3 % in the limit
    coverage over 200 data sets, weight 1
      nominal     95.0
      joint       ...
      theta       ...
      sampling over posterior variance: ...
    """
    num_replicates = whole_number("num_replicates", num_replicates, least=2)
    levels = _levels(levels)
    numbers = as_functional(posterior, functional)
    generator = new_generator(seed, stream="coverage report")
    target = _truth(posterior, simulate, truth, generator)
    data = _stacked([_simulated(posterior, simulate, generator) for _ in range(num_replicates)], posterior)
    weights = _weights(posterior, data, weight, num_replicates)
    replicates = replicate_posteriors(posterior, data=data, weight=weights, num_draws=num_draws, seed=seed)
    return CoverageReport(
        (JOINT, *numbers.names),
        torch.cat([replicates.hpd_level(target)[:, None], replicates.central_level(numbers, numbers(target))], -1),
        levels,
        target,
        replicates.weight,
        replicates.trusted,
        _mismatch(replicates),
    )


def _levels(levels: Sequence[float]) -> tuple[float, ...]:
    try:
        given = tuple(levels)
    except TypeError as error:
        raise SettingsError(f"levels must be several numbers in (0, 1), such as (0.5, 0.95), not {levels!r}") from error
    return tuple(real_number("level", level, between=(0.0, 1.0)) for level in given)


def _truth(posterior: GibbsPosterior, simulate: Simulate, truth: Any, generator: torch.Generator) -> Tensor:
    if truth is not None:
        if not isinstance(truth, dict) and len(posterior.sites) > 1:
            raise SettingsError(f"truth must be a dict of the sites {[site.name for site in posterior.sites]}")
        values = truth if isinstance(truth, dict) else {posterior.sites[0].name: truth}
        values = {k: torch.as_tensor(v, dtype=posterior.dtype) for k, v in values.items()}
        for site in posterior.sites:
            if site.name in values and tuple(values[site.name].shape) != tuple(site.shape):
                given = tuple(values[site.name].shape)
                raise ShapeError(f"truth of site {site.name!r} must be {tuple(site.shape)}, not {given}")
        return posterior.unconstrain(values)
    if not isinstance(posterior.loss, PointwiseLoss):
        raise SettingsError(
            f"{type(posterior.loss).__name__} looks at all data at once, so that no minimiser is searched for with "
            "half a million of them; give truth="
        )
    sets = [_simulated(posterior, simulate, generator) for _ in range(math.ceil(HUGE / posterior.num_data))]
    huge = tuple(torch.cat(parts) for parts in zip(*map(columns, sets), strict=True))
    batch = tuple(x[None] for x in huge)
    found = minimize(posterior, data=batch if isinstance(posterior.data, tuple) else batch[0])
    if not bool(found.converged.all()):
        raise DataError("no minimiser of the expected loss was found from simulated data; give truth=")
    return found.position[0]


def _simulated(posterior: GibbsPosterior, simulate: Simulate, generator: torch.Generator) -> Data:
    data = as_data(simulate(generator))
    shapes = [tuple(x.shape) for x in columns(data)], [tuple(x.shape) for x in columns(posterior.data)]
    if isinstance(data, tuple) != isinstance(posterior.data, tuple) or shapes[0] != shapes[1]:
        raise ShapeError(f"simulate returned data of shapes {shapes[0]}, the posterior has {shapes[1]}")
    posterior.loss.check(data)
    return data


def _stacked(sets: list[Data], posterior: GibbsPosterior) -> Data:
    stacked = tuple(torch.stack(parts) for parts in zip(*map(columns, sets), strict=True))
    return stacked if isinstance(posterior.data, tuple) else stacked[0]


def _weights(posterior: GibbsPosterior, data: Data, weight: Any, num_replicates: int) -> float | Tensor:
    """Return one learning rate for all, or one each."""
    if weight is None:
        return posterior.weight
    if isinstance(weight, BatchSelector):
        return weight.function(posterior, data)
    if not callable(weight) or isinstance(weight, Tensor):
        return weight  # type: ignore[no-any-return]
    selected = []
    for i in range(num_replicates):
        one = tuple(x[i] for x in data) if isinstance(data, tuple) else data[i]
        found = weight(posterior.with_data(one))
        selected.append(float(found if isinstance(found, (float, int, Tensor)) else found.weight))
    return torch.tensor(selected, dtype=posterior.dtype, device=posterior.device)


def _mismatch(replicates: ReplicatePosteriors) -> Tensor:
    """Return the eigenvalues of the posterior mean's covariance over replicates, in units of the posterior's."""
    mean, within = replicates.mean(), replicates.covariance().mean(0)
    between = torch.cov(mean.mT).reshape(within.shape)
    lower = torch.linalg.cholesky(within)
    half = torch.linalg.solve_triangular(lower, between, upper=False)
    whitened = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    return torch.linalg.eigvalsh(0.5 * (whitened + whitened.mT))
