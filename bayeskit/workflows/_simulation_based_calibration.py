"""Simulation-based calibration: test whether a sampler draws from the posterior of a model."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from bayeskit._compiler import Compile
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.page import frame_table, result_html, warnings_listed
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import effective_sample_size
from bayeskit._core.storage import digest
from bayeskit._core.uniformity import chi_square_p_value, deviation_sd, ecdf_p_value, holm, local_p_value
from bayeskit._draws import Draws
from bayeskit._logdensity.combinators import Replicas, call_of
from bayeskit._logdensity.target import Target
from bayeskit.errors import DataError, SamplingWarning, SettingsError, UnknownNameError
from bayeskit.inference.samplers._driver import obey
from bayeskit.inference.samplers._sampling import sample
from bayeskit.parallel import map_tasks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Sampler = Callable[[Target, int], Draws]
"""``(target, seed) -> Draws``."""

Simulate = Callable[[dict[str, Tensor], torch.Generator], tuple[Any, ...]]
"""``(values of the latent sites, generator) -> arguments of the model``."""

_LOG_LIKELIHOOD = "log_likelihood"
MIN_REPLICATES = 20
# Draws at least two autocorrelation times apart count as independent.
_NEEDED_PER_RANKED_DRAW = 2.0
_MOST_SIMULATIONS = 1000  # of one replicate


@dataclass(frozen=True)
class SBCResult:
    """Ranks of true parameter values among posterior draws, over data sets simulated from the model.

    Attributes
    ----------
    ranks : dict of ndarray
        By scalar quantity, such as ``b[3]`` or ``log_likelihood``: shape ``(replicates,)``, integers from 0 to
        ``num_draws``. Uniform if the sampler is correct.
    num_draws : int
        Number of posterior draws per replicate in the ranking.
    effective_sample_size : ndarray
        Smallest effective sample size of each replicate over its quantities, shape ``(replicates,)``.
    num_diverging : ndarray
        Divergent transitions of each replicate, shape ``(replicates,)``.
    significance : float
        Level of :attr:`passed`, over all quantities and both tests together.
    data_statistics : dict of ndarray
        By name, such as ``mean of y``: a statistic of each replicate's data, shape ``(replicates,)``.
    num_not_finite : ndarray of int
        Simulations of each replicate before its own that had numbers that are not finite, shape ``(replicates,)``.

    Examples
    --------
    >>> import numpy as np
    >>> from bayeskit.workflows._simulation_based_calibration import SBCResult
    >>> ranks = np.arange(100) % 10
    >>> SBCResult({"mean": ranks}, 9, np.full(100, 50.0), np.zeros(100, dtype=int)).passed
    True
    >>> SBCResult({"mean": ranks // 2}, 9, np.full(100, 50.0), np.zeros(100, dtype=int)).passed
    False
    """

    ranks: dict[str, NDArray[np.int64]]
    num_draws: int
    effective_sample_size: NDArray[np.float64]
    num_diverging: NDArray[np.int64]
    significance: float = 0.01
    data_statistics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    num_not_finite: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=int))

    @property
    def num_replicates(self) -> int:
        """Number of simulated data sets."""
        return len(self.effective_sample_size)

    @functools.cached_property
    def p_values(self) -> pd.DataFrame:
        """Unadjusted p-values of each quantity: columns ``chi_square`` and ``ecdf``."""
        import pandas as pd

        rows = {
            name: {
                "chi_square": chi_square_p_value(ranks, self.num_draws),
                "ecdf": ecdf_p_value(ranks, self.num_draws),
            }
            for name, ranks in self.ranks.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    @functools.cached_property
    def local_p_values(self) -> pd.DataFrame:
        """Unadjusted p-values of uniform ranks whatever the data, a column for each statistic of the data.

        A posterior that is too high for some data and too low for others has uniform ranks over all of them. Here the
        mean and the spread of the ranks are compared between data with low, middle and high values of a statistic
        (local coverage; Zhao et al. 2021).
        """
        import pandas as pd

        rows = {
            name: {of: local_p_value(ranks, self.num_draws, x) for of, x in self.data_statistics.items()}
            for name, ranks in self.ranks.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def passed_locally(self) -> bool:
        """Whether no dependence of the ranks on the data is found for any quantity and statistic."""
        values = self.local_p_values.to_numpy()
        return values.size == 0 or float(holm(values).min()) >= self.significance

    @property
    def smallest_p_value(self) -> float:
        """Smallest p-value, adjusted for the number of quantities and tests."""
        return float(holm(self.p_values.to_numpy()).min())

    @property
    def passed(self) -> bool:
        """Whether uniformity is not rejected for any quantity."""
        return self.smallest_p_value >= self.significance

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the ranks themselves, each with a remedy."""
        result = []
        short = int((self.effective_sample_size < _NEEDED_PER_RANKED_DRAW * self.num_draws).sum())
        if short:
            result.append(
                f"in {short} of {self.num_replicates} replicates the effective sample size is below "
                f"{_NEEDED_PER_RANKED_DRAW:g} times the {self.num_draws} draws ranked, so ranks accumulate at both "
                "ends even if the sampler is correct; draw more samples or lower num_draws"
            )
        diverging = int((self.num_diverging > 0).sum())
        if diverging:
            result.append(
                f"transitions diverged in {diverging} of {self.num_replicates} replicates; raise target_acceptance "
                "or reparameterise the model"
            )
        return tuple(result)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per quantity.

        ``mean_rank`` is the mean rank divided by ``num_draws``, ideally 0.5 (larger if draws are too low), with its
        z-score; ``spread`` is the ratio of the standard deviation of the ranks to that of a uniform distribution
        (above one if the posterior is too narrow); ``adjusted`` is the smaller p-value after Holm's adjustment over
        all quantities and tests.
        """
        adjusted = holm(self.p_values.to_numpy()).min(1)
        table = self.p_values.assign(adjusted=adjusted, passed=adjusted >= self.significance)
        mean = np.array([r.mean() / self.num_draws for r in self.ranks.values()])
        uniform = np.sqrt(((self.num_draws + 1) ** 2 - 1) / 12)
        table.insert(0, "mean_rank", mean)
        table.insert(1, "z", (mean - 0.5) / deviation_sd(self.num_replicates, self.num_draws))
        table.insert(2, "spread", [r.std() / uniform for r in self.ranks.values()])
        return table.rename_axis("quantity").reset_index()

    def plot(self, names: Sequence[str] | None = None) -> Figure:
        """Plot the rank histogram and the ECDF difference of several quantities, one row each.

        Parameters
        ----------
        names : sequence of str, optional
            By default the six quantities with the smallest p-values.

        Raises
        ------
        UnknownNameError
            If there is no such quantity.
        """
        from matplotlib.figure import Figure

        from bayeskit._core.plots import plot_rank_uniformity

        if names is None:
            names = list(self.p_values.min(axis=1).sort_values(kind="stable").index[:6])
        figure = Figure(figsize=(7.0, 0.4 + 1.9 * len(names)), layout="constrained")
        for name, (left, right) in zip(names, figure.subplots(len(names), 2, squeeze=False), strict=True):
            if name not in self.ranks:
                raise UnknownNameError(f"no quantity is called {name!r}; known are: {', '.join(self.ranks)}")
            plot_rank_uniformity(self.ranks[name], self.num_draws, name, left, right)
        return figure

    def _repr_html_(self) -> str:
        headline, *_ = str(self).partition("\n")
        table = frame_table("Ranks of each quantity", self.to_pandas())
        return result_html(headline, [table], warnings_listed("ranks", self.warnings))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        verdict = "uniform" if self.passed else "NOT uniform"
        worst = self.p_values.min(axis=1).idxmin()
        again = int(self.num_not_finite.sum())
        text = (
            f"ranks of {len(self.ranks)} quantities over {self.num_replicates} replicates are {verdict}: smallest "
            f"adjusted p-value {self.smallest_p_value:.3g} ({worst})"
        )
        if again:
            text += f"; {again} of {again + self.num_replicates} simulated data were not finite, and were drawn again"
        return "\n".join([text, *(f"  {warning}" for warning in self.warnings)])


def sbc(
    model: Callable[..., Any] | Target,
    sampler: Sampler | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    simulate: Simulate | None = None,
    num_replicates: int = 200,
    num_draws: int = 63,
    significance: float = 0.01,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> SBCResult:
    """Validate a sampler on a model by simulation-based calibration.

    Each replicate draws parameters from the prior and data from the model, samples the posterior given these data,
    and ranks the parameters and their log likelihood among posterior draws. All ranks are uniform if the sampler is
    correct. The log likelihood depends on the data: its rank detects a sampler that ignores them and returns prior
    draws, which the ranks of parameters do not.

    Parameters and data are drawn again, and the result counts it, where data are not finite, such as those of a
    differential equation without a solution, at which the density is zero.

    Parameters
    ----------
    model : callable or Target
        A Pyro model, or a target made from one, such as ``bk.exact.get("eight_schools").target()``.
    sampler : callable, optional
        ``(target, seed) -> Draws``; by default :func:`bayeskit.sample` with four chains, run longer if draws are
        correlated.
    args, kwargs : tuple and mapping
        Arguments of a Pyro model. Observed sites are simulated in the shape of the data given here; everything else,
        such as predictors, is fixed.
    simulate : callable, optional
        ``(values, generator) -> args``, for models whose data cannot be drawn site by site, such as those with a
        ``pyro.factor``: simulates data given the latent sites and returns the model's arguments.
    num_replicates : int, default 200
        At least 20.
    num_draws : int, default 63
        Number of draws in the ranking, at least 3, evenly spaced over all chains.
    significance : float in (0, 1), default 0.01
    seed : int, default 0
    num_jobs : int, default 1
        Number of processes; see :func:`bayeskit.parallel.map_tasks`.
    checkpoint : path, optional
        Folder for finished replicates, from which a later call resumes.
    progress : bool, default True

    Returns
    -------
    SBCResult

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, the sampler does not return :class:`~bayeskit.Draws`, or a target was
        made from functions or is given together with arguments.
    DataError
        If data are not finite again and again.
    UnsupportedSiteError
        If the likelihood cannot be sampled and ``simulate`` is not given.
    ModelError
        If the model is not a Pyro model, or an observed site is scaled.
    CheckpointError
        If the folder belongs to another run.

    References
    ----------
    Talts, S., Betancourt, M., Simpson, D., Vehtari, A., Gelman, A. (2018). Validating Bayesian inference
    algorithms with simulation-based calibration. arXiv:1804.06788.
    Modrak, M., Moon, A. H., Kim, S., Buerkner, P., Huurre, N., Faltejskova, K., Gelman, A., Vehtari, A. (2023).
    Simulation-based calibration checking for Bayesian computation: the choice of test quantities shapes
    sensitivity. Bayesian Analysis.
    Zhao, D., Dalmasso, N., Izbicki, R., Lee, A. B. (2021). Diagnostics for conditional density models and Bayesian
    inference algorithms. Uncertainty in Artificial Intelligence.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.workflows._simulation_based_calibration import sbc
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> result = sbc(model, args=(torch.zeros(5, dtype=torch.float64),), num_replicates=20, num_draws=19)
    >>> sorted(result.ranks), result.passed
    (['log_likelihood', 'mean'], True)
    """
    num_replicates = whole_number("num_replicates", num_replicates, least=MIN_REPLICATES)
    num_draws = whole_number("num_draws", num_draws, least=3)
    significance = real_number("significance", significance, "(0, 1)")
    if not isinstance(args, tuple):
        raise SettingsError(f"args must be a tuple such as (data,), not a {type(args).__name__}")
    for name, function in (("sampler", sampler), ("simulate", simulate)):
        if function is not None and not callable(function):
            raise SettingsError(f"{name} must be a function, not {function!r}")
    compile: Compile = "auto"
    if isinstance(model, Target):
        if args or kwargs:
            raise SettingsError("a target already holds the arguments of its model; leave args and kwargs out")
        compile = model.compile
        model, args, kwargs = call_of(model)
    # Planned for all replicates whatever the number of jobs, so that compilation and rounding do not depend on it.
    study = _Study(model, tuple(args), dict(kwargs or {}), compile, sampler, simulate, num_draws, num_replicates, seed)
    names = _names(study.workspace().target)  # before any process starts, so that an invalid model is reported at once
    results = map_tasks(
        study,
        range(num_replicates),
        num_jobs=num_jobs,
        checkpoint=checkpoint,
        progress=progress,
        description="simulation-based calibration",
    )
    _workspace.cache_clear()
    statistics = results[0]["data_statistics"] if results else {}
    ranks = np.array([result["ranks"] for result in results])
    return SBCResult(
        {name: ranks[:, i] for i, name in enumerate(names)},
        num_draws,
        np.array([result["effective_sample_size"] for result in results]),
        np.array([result["num_diverging"] for result in results]),
        significance,
        {name: np.array([result["data_statistics"][name] for result in results]) for name in statistics},
        np.array([result.get("num_not_finite", 0) for result in results], dtype=int),
    )


@dataclass(frozen=True, eq=False)
class _Study:
    """Function of a replicate's index, sent to other processes."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compile: Compile
    sampler: Sampler | None
    simulate: Simulate | None
    num_draws: int
    replicates_per_process: int
    seed: int
    key: str = field(default_factory=lambda: uuid4().hex)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Study) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def workspace(self) -> _Workspace:
        return _workspace(self)

    def fingerprint(self) -> str:
        """Identify the study to a later run, independently of the number of processes."""
        parts = [self.workspace().target.fingerprint(), digest(self.sampler), digest(self.simulate)]
        return hashlib.sha256(":".join([*parts, str(self.num_draws), str(self.seed)]).encode()).hexdigest()

    def __call__(self, index: int) -> dict[str, Any]:
        workspace = self.workspace()
        generator = new_generator(self.seed, stream=f"simulation-based calibration {index}")
        truth, target, num_not_finite = workspace.replicate(generator)
        sampler_seed = int(torch.randint(2**31, (), generator=generator))
        if self.sampler is None:
            draws = _enough_draws(target, sampler_seed, self.num_draws)
        else:
            draws = self.sampler(target, sampler_seed)
        if not isinstance(draws, Draws):
            raise SettingsError(f"the sampler must return bayeskit.Draws, not {type(draws).__name__}")
        quantities = _quantities(target, draws.unconstrained)  # (Q, chains, draws)
        pooled = quantities.flatten(1)
        spaced = (torch.arange(self.num_draws) + 0.5) * pooled.shape[1] / self.num_draws
        ranks = _rank(_quantities(target, truth.unsqueeze(0)), pooled[:, spaced.long()], generator)
        diverging = draws.sample_stats.get("diverging")
        return {
            "ranks": ranks.tolist(),
            "effective_sample_size": float(effective_sample_size(quantities).min()),
            "num_diverging": 0 if diverging is None else int(diverging.sum()),
            "data_statistics": _data_statistics(target),
            "num_not_finite": num_not_finite,
        }


class _Workspace:
    """Target and replicas shared by the replicates of one process."""

    def __init__(self, study: _Study) -> None:
        self._study = study
        self.target = Target.from_pyro(study.model, *study.args, compile=study.compile, **study.kwargs)
        self._replicas = Replicas(self.target, study.replicates_per_process)
        if study.simulate is None:
            self._replicas.simulate(new_generator(0))  # raises here if the model cannot be simulated

    def replicate(self, generator: torch.Generator) -> tuple[Tensor, Target, int]:
        """Draw parameters and finite data.

        Return the unconstrained vector ``(d,)``, the target given the data, and how many data were not finite.
        """
        simulate = self._study.simulate
        for tries in range(_MOST_SIMULATIONS):
            if simulate is None:
                latent, observed = self._replicas.simulate(generator)
                if _are_finite(observed.values()):
                    return self.target.unconstrain(latent), self._replicas.given_observed(observed), tries
            else:
                truth, args = self._simulated(simulate, generator)
                # Arguments may hold infinite bounds, and NaN where data are masked, so that the density decides.
                target = self._replicas.given_args(args)
                if _are_finite(args) or bool(target.log_density(truth).isfinite()):
                    return truth, target, tries
        raise DataError(
            f"data were not finite in {_MOST_SIMULATIONS} simulations in turn, as where a differential equation has no "
            "solution or a scale overflows; make the prior narrower, or see what the model returns at draws from it"
        )

    def _simulated(self, simulate: Callable[..., Any], generator: torch.Generator) -> tuple[Tensor, tuple[Any, ...]]:
        truth = self.target.sample_prior(1, seed=generator)[0]
        args = simulate(self.target.constrain(truth), generator)
        if not isinstance(args, (tuple, list)):
            raise SettingsError(
                f"simulate returned {type(args).__name__} and must return the arguments of the model as a tuple, such "
                "as lambda values, generator: (y,)"
            )
        return truth, tuple(args)


def _are_finite(values: Iterable[Any]) -> bool:
    return all(bool(x.isfinite().all()) for x in values if isinstance(x, Tensor))


@functools.lru_cache(maxsize=1)
def _workspace(study: _Study) -> _Workspace:
    return _Workspace(study)


def _enough_draws(target: Target, seed: int, num_draws: int) -> Draws:
    """Sample until the draws can be thinned to ``num_draws`` independent ones, up to a limit."""
    needed = _NEEDED_PER_RANKED_DRAW * num_draws
    num_samples = max(200, -(-2 * num_draws // 4))
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)  # the result counts divergences
            draws = sample(target, 4, 300, num_samples, seed=seed, progress=False)
        obey(draws.settings.get("ending"))
        if float(effective_sample_size(_quantities(target, draws.unconstrained)).min()) >= needed:
            break
        num_samples *= 3
    return draws


def _quantities(target: Target, u: Tensor) -> Tensor:
    """Return every scalar parameter and the log likelihood, ``(*batch, d) -> (Q, *batch)``."""
    batch = u.dim() - 1
    values = target.constrain(u)
    columns = [
        values[site.name].flatten(batch) if site.shape else values[site.name].unsqueeze(-1) for site in target.sites
    ]
    columns.append(target.log_likelihood(u).unsqueeze(-1))
    return torch.cat(columns, -1).movedim(-1, 0).cpu()


def _data_statistics(target: Target) -> dict[str, float]:
    """Return the mean and the standard deviation of the data of each observed site."""
    found = {}
    for name, value in target.named_data()[0].items():
        numbers = value.double().flatten()
        found[f"mean of {name}"] = float(numbers.mean())
        if len(numbers) > 1:
            found[f"sd of {name}"] = float(numbers.std())
    return found


def _names(target: Target) -> list[str]:
    names = []
    for site in target.sites:
        indices = np.ndindex(*site.shape) if site.shape else [()]
        names += [f"{site.name}[{','.join(map(str, index))}]" if index else site.name for index in indices]
    return [*names, _LOG_LIKELIHOOD]


def _rank(truth: Tensor, draws: Tensor, generator: torch.Generator) -> Tensor:
    """Rank ``truth (Q, 1)`` among ``draws (Q, L)``, ties broken at random; integers from 0 to L, shape ``(Q,)``."""
    below, equal = (draws < truth).sum(1), (draws == truth).sum(1)
    uniform = torch.rand(len(equal), generator=generator, dtype=torch.float64)
    return below + (uniform * (equal + 1)).long()
