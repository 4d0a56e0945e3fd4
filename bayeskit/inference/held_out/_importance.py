"""Held-out log likelihood of each observation by importance sampling from the guide."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import global_stream, new_generator, validation_kept
from bayeskit._core.statistics import pareto_shape
from bayeskit._core.texts import with_error
from bayeskit.errors import DataError, ModelError
from bayeskit.inference.objectives._drawing import Compatibility, Layout, Particles, plate_nesting, run_particles

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Data in minibatches, and a first run of model and guide that checks both.

_BATCH_SIZE = 100


@dataclass(frozen=True)
class Minibatches:
    """Arguments of model and guide, divided along the data."""

    args: tuple[Any, ...]  # all data
    num_data: int
    batch_size: int
    nesting: int  # plate dimensions of model and guide
    data_plate: str | None
    particles: Particles  # one draw of the guide for each datum

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        batch_size: int | None,
        data_plate: str | None,
    ) -> Minibatches:
        """Run guide and model once to check them, and find the plate of the data."""
        # ModelError if no plate or several contain all sites, the model subsamples, or a latent site is scaled;
        # GuideError if guide and model do not match; DataError if no argument has the data as leading dimension for
        # ``batch_size``. The default is 100 rows if a tensor is the only argument, otherwise all data.
        nesting = plate_nesting(model, guide, args, {})
        particles = draw_particles(model, guide, args, 1, nesting, data_plate, Compatibility())
        num_data = _num_data(particles.layout)
        _refuse_scales(particles)
        columns = [x for x in args if _is_column(x, num_data)]
        if batch_size is None:
            batch_size = _BATCH_SIZE if len(args) == 1 and columns else num_data
        elif batch_size < num_data and not columns:
            raise DataError(
                f"no argument of the model is a tensor with the {num_data} data as leading dimension, so the data "
                "cannot be divided into minibatches; leave batch_size out, or pass the data as such an argument"
            )
        return cls(args, num_data, min(batch_size, num_data), nesting, data_plate, particles)

    def __iter__(self) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        if self.batch_size >= self.num_data:
            yield slice(0, self.num_data), self.args
            return
        for start in range(0, self.num_data, self.batch_size):
            rows = slice(start, min(start + self.batch_size, self.num_data))
            yield rows, tuple(x[rows] if _is_column(x, self.num_data) else x for x in self.args)


def draw_particles(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    num_particles: int,
    nesting: int,
    data_plate: str | None,
    compatibility: Compatibility | None = None,
) -> Particles:
    """Draw particles for each datum, without gradients."""
    with torch.no_grad():
        return run_particles(
            model,
            guide,
            args,
            {},
            num_particles=num_particles,
            nesting=nesting,
            data_plate=data_plate,
            compatibility=compatibility,
        )


@contextmanager
def already_validated() -> Iterator[None]:
    """Skip the checks made by the first run, and restore the settings of torch and Pyro afterwards."""
    with validation_kept(), pyro.validation_enabled(False):
        yield


def _is_column(x: Any, num_data: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == num_data


def _num_data(layout: Layout) -> int:
    if len(layout.plates) != 1:
        found = ", ".join(repr(name) for name in layout.plates)
        raise ModelError(
            (f"the plates {found} hold all sites" if found else "no plate holds all sites of model and guide")
            + ", so there is no likelihood of each observation; put each observation and its latent variables into "
            "one plate, or name the plate by data_plate"
        )
    ((name, plate),) = layout.plates.items()
    if plate.size != plate.full_size:
        raise ModelError(
            f"the plate {name!r} takes {plate.size} of {plate.full_size} items; the model must take all items of its "
            "arguments"
        )
    return plate.size


def _refuse_scales(particles: Particles) -> None:
    """Raise ModelError for scaled latent sites, whose terms are not log densities."""
    for what, sites in (("model", particles.model_sites), ("guide", particles.guide_sites)):
        for name, site in sites.items():
            if not site["is_observed"] and bool((torch.as_tensor(site["scale"]) != particles.layout.scale).any()):
                raise ModelError(
                    f"site {name!r} of the {what} is scaled, or in a plate that takes some of its items, so its term "
                    "is no log density; use poutine.scale only in training, and let plates take all items"
                )


def positive(**settings: int | None) -> None:
    """Raise SettingsError for settings that are not positive integers; None is allowed."""
    for name, value in settings.items():
        if value is not None:
            whole_number(name, value, least=1)


def require_acceptance(target_acceptance: float) -> None:
    """Raise SettingsError for an acceptance rate outside (0, 1)."""
    real_number("target_acceptance", target_acceptance, "(0, 1)")


# HeldOut: the log likelihood of each held-out observation, with its error.

_MAX_PARETO_SHAPE = 0.7
MAX_SHARE = 0.05  # of the data with unreliable weights; above it the mean is not trusted


@dataclass(frozen=True)
class HeldOut:
    """Estimates of the log likelihood of each observation, with the latent variables integrated out.

    Attributes
    ----------
    method : str
        Name of the estimator.
    log_likelihood : Tensor
        In nats, double precision, shape ``(items,)``.
    pointwise_standard_error : Tensor
        Monte Carlo standard errors of ``log_likelihood``, ``(items,)``.
    num_draws : int
        Draws per observation; evaluations of the density for estimators of evidence.
    pareto_k : Tensor or None
        Pareto shape of each observation's importance weights, ``(items,)``. Above 0.5 the weights have infinite
        variance; above 0.7 the estimate and its error are unreliable.
    warnings : tuple of str
        Problems found by the diagnostics, each with its remedy.
    seconds : float

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.held_out._importance import HeldOut
    >>> result = HeldOut("importance_sampling", torch.tensor([-1.0, -3.0]), torch.tensor([0.3, 0.4]), 1000)
    >>> result.mean, result.total, round(result.standard_error, 3), result.trusted
    (-2.0, -4.0, 0.25, True)
    """

    method: str
    log_likelihood: Tensor
    pointwise_standard_error: Tensor
    num_draws: int
    pareto_k: Tensor | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Mean of the log likelihood over observations."""
        return float(self.log_likelihood.mean())

    @property
    def total(self) -> float:
        """Sum of the log likelihood over observations."""
        return float(self.log_likelihood.sum())

    @property
    def standard_error(self) -> float:
        """Monte Carlo standard error of :attr:`mean`, without the sampling variation of the data."""
        return float(self.pointwise_standard_error.square().sum().sqrt()) / self.log_likelihood.numel()

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.mean) and math.isfinite(self.standard_error)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per observation: log_likelihood, standard_error and, if available, pareto_k."""
        import pandas as pd

        columns = {"log_likelihood": self.log_likelihood, "standard_error": self.pointwise_standard_error}
        if self.pareto_k is not None:
            columns["pareto_k"] = self.pareto_k
        return pd.DataFrame({name: x.cpu().numpy() for name, x in columns.items()}).rename_axis("item")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the sorted log likelihoods with 95 % intervals.

        Observations with unreliable weights are hollow; a dashed line marks the mean.

        Parameters
        ----------
        ax : Axes, optional
            Axes to draw on; by default a new figure of ``pyplot``.
        """
        from bayeskit._core.plots import BLUE, GREY, VERMILION

        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        order = self.log_likelihood.argsort()
        value, error = self.log_likelihood[order].cpu(), self.pointwise_standard_error[order].cpu()
        doubtful = ~error.isfinite()
        if self.pareto_k is not None:
            doubtful |= ~(self.pareto_k[order].cpu() <= _MAX_PARETO_SHAPE)
        rank = torch.arange(len(value))
        for chosen, colour, face in ((~doubtful, BLUE, BLUE), (doubtful, VERMILION, "white")):
            if bool(chosen.any()):
                bars = 1.96 * error[chosen].nan_to_num(0.0, 0.0)
                x, y = rank[chosen].numpy(), value[chosen].numpy()
                ax.errorbar(x, y, bars.numpy(), fmt="o", markersize=4, color=colour, mfc=face, linewidth=1.0)
        if math.isfinite(self.mean):
            ax.axhline(self.mean, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        ax.set_xlabel("observations, sorted by log likelihood")
        ax.set_ylabel("log likelihood (nats)")
        return ax

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        count, mean = self.log_likelihood.numel(), with_error(self.mean, self.standard_error)
        return f"{self.method}: mean log likelihood {mean} of {count} data{flag}"


def _share_above(pareto_k: Tensor) -> float:
    """Return the share of data with unreliable weights."""
    return float((~(pareto_k <= _MAX_PARETO_SHAPE)).to(torch.float64).mean())


def tail_problems(pareto_k: Tensor, remedy: str) -> list[str]:
    """Return a warning if too many observations have heavy-tailed weights."""
    share = _share_above(pareto_k)
    if share <= MAX_SHARE:
        return []
    return [
        f"the largest weights dominate for {100 * share:.1f} % of the data (Pareto k > {_MAX_PARETO_SHAPE}): {remedy}"
    ]


# Held-out log likelihood by importance sampling from the guide.

ROWS = 4000  # particles times data of a run: large against the overhead of Pyro, small enough for the caches


def importance_sampling(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_draws: int = 5000,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    data_plate: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> HeldOut:
    r"""Estimate the log likelihood of each observation by importance sampling from the guide.

    With independent draws :math:`z_s` from the guide, the estimate is the log of the mean of the weights :math:`p(x,
    z_s) / q(z_s \mid x)`. The mean is unbiased. If the weights have a finite variance, the bias of its log is minus
    half its squared standard error, up to terms of higher order. Standard errors use the delta method.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The latent variables of each observation and its likelihood belong to one plate.
    *args
        Arguments of model and guide: the data.
    num_draws : int, default 5000
        Draws per observation.
    chunk_size : int, optional
        Draws per observation and batch. Memory is proportional to ``chunk_size`` times ``batch_size``, which is 4,000
        by default.
    batch_size : int, optional
        Observations per batch; tensors with the data as leading dimension are sliced. By default 100 if a tensor is
        the only argument, otherwise all data.
    data_plate : str, optional
        Name of the plate of observations; by default the only plate that contains all sites.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    HeldOut
        Not trusted if more than 5 % of the observations have a Pareto k above 0.7.

    Raises
    ------
    SettingsError
        If ``num_draws``, ``chunk_size`` or ``batch_size`` is not positive.
    GuideError
        If guide and model do not match, or the guide enumerates a site.
    ModelError
        If there is no plate of observations.

    References
    ----------
    Burda, Y., Grosse, R., Salakhutdinov, R. (2016). Importance weighted autoencoders. ICLR.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
    Machine Learning Research 25(72).

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
        >>> from bayeskit.inference.held_out import importance_sampling
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 0.8))
    >>> x = torch.tensor([1.0, -0.5])
    >>> result = importance_sampling(model, guide, x, num_draws=2000)
    >>> error = result.log_likelihood - dist.Normal(0.0, 2**0.5).log_prob(x)
    >>> result.trusted, bool((error.abs() < 4 * result.pointwise_standard_error).all())
    (True, True)
    """
    positive(num_draws=num_draws, chunk_size=chunk_size, batch_size=batch_size)
    begin = time.monotonic()
    cpu = new_generator(seed, stream="held-out importance sampling")
    with global_stream(cpu):
        data = Minibatches.of(model, guide, args, batch_size, data_plate)
    chunk = min(chunk_size or max(1, ROWS // data.batch_size), num_draws)
    found: list[_Weights] = []
    with progress_bar("importance sampling", data.num_data * num_draws, progress) as bar:
        with already_validated(), global_stream(cpu):
            for rows, batch in data:
                weights = _Weights(num_draws)
                for start in range(0, num_draws, chunk):
                    count = min(chunk, num_draws - start)
                    weights.add(draw_particles(model, guide, batch, count, data.nesting, data_plate).log_weight)
                    bar.update(rows.start * num_draws + (rows.stop - rows.start) * (start + count))
                found.append(weights)
    log_likelihood = torch.cat([w.log_mean() for w in found])
    # The error includes the rounding error of the weights' dtype.
    resolution = torch.finfo(data.particles.log_weight.dtype).eps * log_likelihood.abs()
    error = torch.hypot(torch.cat([w.error() for w in found]), resolution)
    pareto_k = torch.cat([w.pareto_k() for w in found])
    problems = tail_problems(pareto_k, "use annealed importance sampling, a closer guide, or more samples")
    if lost := sum(w.num_nan for w in found):
        problems.append(
            f"{100 * lost / (num_draws * data.num_data):.2g} % of the weights are NaN and were counted as zero: "
            "correct the model or the guide"
        )
    seconds = time.monotonic() - begin
    return HeldOut("importance_sampling", log_likelihood, error, num_draws, pareto_k, tuple(problems), seconds)


class _Weights:
    """Sums of weights of a minibatch, and its largest weights, accumulated chunk by chunk."""

    def __init__(self, num_draws: int) -> None:
        self._count = num_draws
        # One more than the tail of the Pareto fit.
        self._num_kept = min(num_draws, math.ceil(3 * math.sqrt(num_draws)) + 1)
        self._first = self._second = self._smallest = self._largest = torch.empty(0)
        self._waiting: list[Tensor] = []
        self.num_nan = 0

    def add(self, log_weight: Tensor) -> None:
        """Add log weights ``(k, items)``."""
        log_weight = log_weight.to(torch.float64)
        missing = log_weight.isnan()
        if bool(missing.any()):
            self.num_nan += int(missing.sum())
            log_weight = torch.where(missing, -torch.inf, log_weight)
        first, second, smallest = log_weight.logsumexp(0), (2 * log_weight).logsumexp(0), log_weight.amin(0)
        if self._first.numel():
            first, second = first.logaddexp(self._first), second.logaddexp(self._second)
            smallest = smallest.minimum(self._smallest)
        self._first, self._second, self._smallest = first, second, smallest
        self._waiting.append(log_weight)
        if sum(map(len, self._waiting)) >= self._num_kept:
            self._gather()

    def _gather(self) -> None:
        """Keep only the largest weights."""
        if self._waiting:
            candidates = torch.cat([*([self._largest] if self._largest.numel() else []), *self._waiting])
            self._largest = candidates.topk(min(self._num_kept, len(candidates)), dim=0, sorted=False).values
            self._waiting = []

    def log_mean(self) -> Tensor:
        """Return the log of the mean weight, ``(items,)``."""
        return self._first - math.log(self._count)

    def error(self) -> Tensor:
        """Return the standard error of :meth:`log_mean` by the delta method; NaN for one draw."""
        if self._count == 1:
            return torch.full_like(self._first, torch.nan)
        spread = self._count * (self._second - 2 * self._first).exp() - 1
        return (spread.clamp_min(0) / (self._count - 1)).sqrt()

    def pareto_k(self) -> Tensor:
        """Return the shape of the tail of each datum's weights, ``(items,)``."""
        self._gather()
        rest = self._count - len(self._largest)
        # The fit only needs the number of weights outside the tail.
        columns = zip(self._largest.T.cpu(), self._smallest.cpu(), strict=True)
        shapes = [pareto_shape(torch.cat([least.expand(rest), largest])) for largest, least in columns]
        return torch.tensor(shapes, dtype=torch.float64, device=self._first.device)
