"""Comparison of gradient estimators: bias relative to enumeration, variance and cost."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit._core.inputs import as_numbers, whole_number
from bayeskit._core.page import frame_table, result_html
from bayeskit._core.plots import BLUE, GREY, VERMILION
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.texts import short_repr
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.gradients._estimator import Function, GradientEstimator, Table, function_of
from bayeskit.inference.gradients._score_function import Baseline, DisARM, LeaveOneOut, ScoreFunction
from bayeskit.inference.gradients._space import LIMIT, Factorised, Space, space_of
from bayeskit.inference.gradients._without_replacement import RaoBlackwell, UnorderedSet

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# The result of a comparison of estimators, as a table and a plot.

#: Minimum expected number of draws of a category for a z-score of its component; rarer categories are not near normal.
_EXPECTED = 200
#: Threshold of a bias in the absolute z-score; false positive rate 1 in 16,000 for a single component.
_BIASED = 4.0
#: Absolute z-scores are clipped to this value in the plot.
_LAST = 1e3


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of the replicates of one gradient estimator.

    Attributes
    ----------
    mean, standard_error : Tensor
        Mean of the gradient estimates and its standard error by component, shape of the logits.
    exact : Tensor
        Gradient by enumeration, same shape.
    rounding : Tensor
        Tolerance for rounding error by component; smaller differences are ignored.
    judged : Tensor
        True for components with a z-score: the expected number of draws of their category is at least 200, or they
        are exact up to rounding.
    variance : float
        Trace of the covariance of one gradient estimate.
    num_evaluations : int
        Function evaluations per gradient estimate.
    seconds : float
        Median time of a single gradient estimate on one thread.
    unbiased : bool
        The estimator's attribute ``unbiased``.
    """

    name: str
    mean: Tensor
    standard_error: Tensor
    exact: Tensor
    rounding: Tensor
    judged: Tensor
    variance: float
    num_evaluations: int
    seconds: float
    unbiased: bool

    __repr__ = short_repr

    @property
    def without_variance(self) -> bool:
        """Whether all gradient estimates are equal up to rounding."""
        return self.variance <= float(self.rounding.square().sum())

    @property
    def z(self) -> Tensor:
        """Difference from the exact gradient in standard errors, by component; NaN where ``judged`` is False."""
        difference = self.mean - self.exact
        exact = (difference.abs() <= self.rounding) & (self.standard_error <= self.rounding)
        z = torch.where(exact | (difference == 0), 0.0, difference / self.standard_error)
        return torch.where(self.judged, z, torch.nan)

    @property
    def largest_z(self) -> float:
        """The z-score with the largest absolute value; NaN if no component is judged."""
        z = self.z[self.judged]
        return float(z[z.abs().argmax()]) if len(z) else float("nan")


@dataclass(frozen=True, repr=False)
class GradientComparison:
    """Statistics of several gradient estimators on one problem.

    Attributes
    ----------
    results : dict of GradientStatistics
        Statistics by estimator name, in input order.
    enough : float
        Smallest number of replicates for which every component is judged.
    notes : tuple of str
        Caveats for this problem.
    """

    results: dict[str, GradientStatistics]
    num_replicates: int
    enough: float = 0.0
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> GradientStatistics:
        return self.results[name]

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per estimator.

        Columns: `estimator`; `largest_z`, the largest z-score relative to enumeration; `judged`, the number of
        components with a z-score; `components`, the number of components of the gradient; `variance`, the trace of the
        covariance; `num_evaluations` per gradient estimate; `variance_per_cost`, the product of variance and
        evaluations; `seconds` per gradient estimate; `unbiased`, as stated by the estimator.
        """
        import pandas as pd

        rows = [
            {
                "estimator": name,
                "largest_z": found.largest_z,
                "judged": int(found.judged.sum()),
                "components": found.judged.numel(),
                "variance": found.variance,
                "num_evaluations": found.num_evaluations,
                "variance_per_cost": found.variance * found.num_evaluations,
                "seconds": found.seconds,
                "unbiased": found.unbiased,
            }
            for name, found in self.results.items()
        ]
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        table = frame_table("Estimators of one gradient", self.to_pandas(), judged="d", components="d")
        return result_html(f"{self.num_replicates} replicates", [table], notes=self.notes)

    def __repr__(self) -> str:
        table = self.to_pandas()
        few = bool((table["judged"] < table["components"]).any())
        table["judged"] = [f"{k} of {n}" for k, n in zip(table["judged"], table.pop("components"), strict=True)]
        lines = [f"{self.num_replicates} replicates", table.to_string(index=False, float_format="{:.4g}".format)]
        if few:
            lines.append(
                f"judged: components of the gradient whose category is expected {_EXPECTED} times or more, of all; "
                f"raise num_replicates to {self.enough:.7g} to judge all of them"
            )
        return "\n".join([*lines, *self.notes])

    def plot(self, axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
        """Plot variance times evaluations and the largest absolute z-score; filled markers are stated unbiased."""
        figure = None
        if axes is None:
            from matplotlib.figure import Figure

            width = 7.0 + 0.075 * max(map(len, self.results))
            figure = Figure(figsize=(width, 1.8 + 0.4 * len(self.results)), layout="constrained")
            axes = list(figure.subplots(1, 2, sharey=True))
        left, right = axes
        costs = []
        for row, found in enumerate(self.results.values()):
            if found.without_variance:
                text = "exact" if found.unbiased else "no variance"
                left.annotate(text, (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY)
            else:
                costs.append(found.variance * found.num_evaluations)
                left.plot(costs[-1], row, **_mark(BLUE, found.unbiased))
            if bool(found.judged.any()):
                z = abs(found.largest_z)
                right.plot(min(z, _LAST), row, **_mark(VERMILION if z > _BIASED else BLUE, found.unbiased))
            else:
                right.annotate(
                    "too few draws", (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY
                )
        _logarithmic(left, costs)
        _by_size(right, max([0.0, *(abs(x.largest_z) for x in self.results.values() if bool(x.judged.any()))]))
        right.axvline(_BIASED, color=GREY, linestyle="--", linewidth=1.0, label=f"a bias beyond |z| = {_BIASED:g}")
        right.plot([], [], **_mark(BLUE, True), label="claims no bias")
        if not all(found.unbiased for found in self.results.values()):
            right.plot([], [], **_mark(BLUE, False), label="biased by its own account")
        if figure is None:
            right.legend(frameon=False, fontsize="small")
        else:
            figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize="small")
        left.set_yticks(range(len(self.results)), list(self.results))
        left.set_ylim(len(self.results) - 0.5, -0.5)
        left.set_xlabel("variance x evaluations")
        right.set_xlabel("largest |z| against\nenumeration")
        return axes


def _mark(colour: str, filled: bool) -> dict[str, Any]:
    return {"marker": "o", "linestyle": "", "color": colour, "markerfacecolor": colour if filled else "white"}


def _by_size(axes: Axes, largest: float) -> None:
    """Set an axis for absolute z-scores that is linear near zero and clips the largest values."""
    end = min(max(2 * largest, 2 * _BIASED), 1.2 * _LAST)
    axes.set_xscale("symlog", linthresh=_BIASED)
    ticks = [x for x in (0.0, 2.0, 4.0, 10.0, 100.0, _LAST) if x <= end]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(-0.2, end)


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Set a logarithmic axis wide enough for at least one tick label and without overlapping labels."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * 2)
    if high / low < 20:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


#: Maximum number of tensor elements for the points of one block of replicates.
_BLOCK = 1 << 21
#: Number of gradient estimates that train a baseline before the comparison.
_LESSONS = 200
#: Number of timed gradient estimates.
_CALLS = 25
_TABULATED = (
    "values at the categories are continued linearly to relaxed points, so relaxed estimators may look better than for "
    "the nonlinear function of a model"
)


def compare_estimators(
    distribution: Distribution | Space | Tensor,
    f: Function | Tensor,
    estimators: Sequence[GradientEstimator] | GradientEstimator | None = None,
    *,
    num_replicates: int = 10_000,
    seed: int = 0,
    limit: int = LIMIT,
    progress: bool = True,
) -> GradientComparison:
    """Compare bias, variance and cost of gradient estimators on a problem small enough to enumerate.

    Parameters
    ----------
    distribution : Distribution or Tensor
        Bernoulli, Categorical or OneHotCategorical, also with ``to_event``; or logits of a Categorical,
        `(*batch, categories)`.
    f : callable or Tensor
        Function from values `(points, *more, *event)` to `(points, *more)` for any dimensions `more`; or the values at
        the categories, a tensor or array. Relaxed estimators pass relaxed one-hot vectors, so an `f` that indexes
        fails. Values at the categories are continued linearly to relaxed points; for this linear function
        `StraightThrough` has neither bias nor variance, which does not hold for the nonlinear function of a model.
    estimators : GradientEstimator or sequence of them, optional
        By default, with 4 evaluations each: the score function with and without leave-one-out baselines, the unordered
        set with and without its baseline, Rao-Blackwellized top-k and, for bits, DisARM. Small supports use fewer.
    num_replicates : int, default 10,000
        Number of gradient estimates per estimator, at least 2.
    limit : int, default 65,536
        Maximum number of enumerated points.

    Raises
    ------
    SettingsError
        If the number of points exceeds ``limit``, there are no estimators or only one point, an item is not an
        estimator, or the distribution has no logits.
    DataError
        If `f` or a gradient estimate is not finite.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference import gradients
    >>> logits = torch.tensor([0.3, -0.5, 1.1, 0.0, -1.2], dtype=torch.float64)
    >>> f = torch.tensor([1.0, 3.0, -2.0, 0.5, 4.0], dtype=torch.float64)
    >>> estimators = [gradients.LeaveOneOut(2), gradients.UnorderedSet(2)]
    >>> table = gradients.compare_estimators(logits, f, estimators, num_replicates=2000)
    >>> table["UnorderedSet(k=2)"].variance < table["LeaveOneOut(num_samples=2)"].variance
    True
    """
    whole_number("num_replicates", num_replicates, least=2)
    space = space_of(_given(distribution))
    function = function_of(f if callable(f) else as_numbers("f", f).to(space.like), space)
    if not isinstance(space, Factorised):
        raise SettingsError(
            f"{type(space.distribution).__name__} has no logits for gradients; compare on a Categorical, "
            "OneHotCategorical or Bernoulli"
        )
    chosen = _usual(space) if estimators is None else _listed(estimators)
    if not chosen:
        raise SettingsError("there are no estimators to compare; omit estimators to use the defaults")
    names = _names(chosen)
    results = {}
    with progress_bar("gradients", len(chosen), enabled=progress) as bar:
        for i, (name, estimator) in enumerate(zip(names, chosen, strict=True)):
            results[name] = _measured(name, estimator, space, function, num_replicates, seed, limit)
            bar.update(i + 1)
    enough = math.ceil(_EXPECTED / float(space.least_probability().min()))
    tabulated = isinstance(function, Table) and any(e.relaxed and not e.unbiased for e in chosen)
    return GradientComparison(results, num_replicates, enough, (_TABULATED,) if tabulated else ())


def _given(distribution: Any) -> Distribution | Space | Tensor:
    """Return a distribution unchanged and logits as a tensor of floating-point numbers."""
    if isinstance(distribution, (Distribution, Space)):
        return distribution
    logits = as_numbers("distribution", distribution)
    return logits if logits.is_floating_point() else logits.to(torch.get_default_dtype())


def _listed(estimators: Any) -> list[GradientEstimator]:
    found: list[Any]
    try:
        found = [estimators] if isinstance(estimators, (GradientEstimator, str)) else list(estimators)
    except TypeError:
        found = [estimators]
    for estimator in found:
        if not isinstance(estimator, GradientEstimator):
            raise SettingsError(f"{estimator!r:.80} is not a gradient estimator; use objects such as UnorderedSet(k=4)")
    return found


def _usual(space: Factorised) -> list[GradientEstimator]:
    if space.size < 2:
        raise SettingsError("there is one point only, so every gradient is zero; use a larger support")
    count = min(4, space.size)
    found: list[GradientEstimator] = [
        ScoreFunction(count),
        LeaveOneOut(count),
        UnorderedSet(count),
        UnorderedSet(count, baseline=True),
        RaoBlackwell(max(count - 1, 1)),
    ]
    return [*found, DisARM(max(count // 2, 1))] if space.binary else found


def _names(estimators: Sequence[GradientEstimator]) -> list[str]:
    """Return the estimators' names, numbered if equal."""
    found = [_name(estimator) for estimator in estimators]
    return [f"{name} #{found[: i + 1].count(name)}" if found.count(name) > 1 else name for i, name in enumerate(found)]


def _name(estimator: GradientEstimator) -> str:
    """Return the estimator's constructor call without default values, except for the first field."""
    if not dataclasses.is_dataclass(estimator):
        return type(estimator).__name__
    parts = []
    for i, field in enumerate(dataclasses.fields(estimator)):
        value = getattr(estimator, field.name)
        if i == 0 or value != field.default:
            if isinstance(value, Tensor) and value.numel() == 1:
                value = f"{float(value):.4g}"
            shown = value if isinstance(value, (int, float, bool, str)) else type(value).__name__
            parts.append(f"{field.name}={shown}")
    return f"{type(estimator).__name__}({', '.join(parts)})"


def _measured(
    name: str,
    estimator: GradientEstimator,
    space: Factorised,
    function: Function,
    num_replicates: int,
    seed: int,
    limit: int,
) -> GradientStatistics:
    exact, rounding = _exact(estimator, space, function, limit)
    estimator = _trained(estimator, space, function, seed)
    count = estimator.num_evaluations(space)
    size = max(count * space.num_variables * space.num_categories * space.batch_shape.numel(), 1)
    block = max(min(_BLOCK // size, num_replicates), 1)
    generator = new_generator(seed, exact.device, stream=f"comparison of gradients: {name}")
    total, squares, done = torch.zeros_like(exact), torch.zeros_like(exact), 0
    while done < num_replicates:
        copies = min(block, num_replicates - done)
        found = _gradient(space, (copies,), lambda q: estimator.surrogate(q, function, generator)) - exact
        total, squares, done = total + found.sum(0), squares + found.square().sum(0), done + copies
    if not bool(squares.isfinite().all()):
        raise DataError(f"gradients of {name} are not finite; check f at its points, which may lie between corners")
    shift = total / done
    variance = (squares / done - shift.square()).clamp_min(0) * done / (done - 1)
    error = (variance / done).sqrt()
    often = space.least_probability().reshape(exact.shape) * num_replicates >= _EXPECTED
    seconds = []
    with one_thread():
        for _ in range(_CALLS):
            begin = time.perf_counter()
            _gradient(space, (), lambda q: estimator.surrogate(q, function, generator))
            seconds.append(time.perf_counter() - begin)
    return GradientStatistics(
        name,
        exact + shift,
        error,
        exact,
        rounding,
        often | ((shift.abs() <= rounding) & (error <= rounding)),
        float(variance.sum()),
        count,
        statistics.median(seconds),
        estimator.unbiased,
    )


class _Fixed:
    """A trained baseline without further updates, which would make the replicates of a block dependent."""

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline

    def __call__(self, values: Tensor) -> Tensor:
        return copy.deepcopy(self._baseline)(values)


def _trained(estimator: GradientEstimator, space: Factorised, function: Function, seed: int) -> GradientEstimator:
    """Return the estimator with a trained, fixed copy of its baseline; unchanged without a baseline."""
    baseline = getattr(estimator, "baseline", None)
    if not isinstance(estimator, ScoreFunction) or baseline is None:
        return estimator
    learned = copy.deepcopy(baseline)
    learning = dataclasses.replace(estimator, baseline=learned)
    generator = new_generator(seed, space.like.device, stream="comparison of gradients: baseline")
    for _ in range(_LESSONS):
        _gradient(space, (), lambda q: learning.surrogate(q, function, generator))
    return dataclasses.replace(estimator, baseline=_Fixed(learned))


def _exact(estimator: GradientEstimator, space: Factorised, function: Function, limit: int) -> tuple[Tensor, Tensor]:
    """Return the exact gradient and the tolerance for rounding error, by component."""
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(points: Tensor) -> Tensor:
        seen.append((points.detach(), function(points)))
        return seen[-1][1]

    exact = _gradient(space, (), lambda q: estimator.expectation(q, watched, limit))
    points, values = seen[-1]
    bad = ~values.detach().isfinite()
    if bool(bad.any()):
        place = tuple(int(i) for i in bad.nonzero()[0])
        raise DataError(f"f is {float(values[place])} at {points[place].tolist()}; it must be finite everywhere")
    # An exact gradient near zero is a difference of values, so its rounding error scales with the values.
    own = exact.abs().reshape(*space.batch_shape, -1).amax(-1)
    largest = torch.maximum(own, values.detach().abs().amax(0).to(exact))
    largest = largest.reshape(*largest.shape, *[1] * (exact.dim() - largest.dim()))
    return exact, (100 * torch.finfo(exact.dtype).eps * largest).expand(exact.shape)


def _gradient(space: Factorised, copies: tuple[int, ...], value: Callable[[Space], Tensor]) -> Tensor:
    """Return the gradient of a sum for the logits of independent copies of a distribution, `(*copies, *logits)`."""
    with torch.enable_grad():
        copied = space.copies(copies)
        (gradient,) = torch.autograd.grad(value(copied).sum(), copied.parameter, allow_unused=True)
    return torch.zeros_like(copied.parameter) if gradient is None else gradient
