"""Which causes have a mechanism that all environments share, by evidence of conjugate linear regressions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import logsumexp
from torch import Tensor

from bayeskit._core.folders import write_csv
from bayeskit._core.inputs import as_numbers, real_number, warn_user, whole_number
from bayeskit._core.page import Cell, Listed, PageTable, measured, number, result_html
from bayeskit._core.plots import BLUE, GREY, ORANGE, axes_or_new
from bayeskit._core.randomness import derived_seed, one_thread
from bayeskit._core.statistics import independent_log_mean_exp_error, log_mean_exp, weight_effective_sample_size
from bayeskit._core.texts import with_error
from bayeskit.errors import DataError, DataWarning, SettingsError, ShapeError, UnknownNameError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_COLUMNS = 12
"""Largest number of candidate causes, which have 4,096 subsets."""

_HYPOTHESES = ("mechanism", "mean", "nothing")
_SETTLED = 0.95
"""Posterior probability of the best subset below which the subset is not settled."""
_LEAST_EFFECTIVE = 100
_MOST_SHOWN, _MOST_NAMED = 30, 5


# Evidence of a linear regression, and of several that share their coefficients.


@dataclass(frozen=True)
class RegressionPrior:
    r"""Normal-inverse-gamma prior of a linear regression.

    .. math:: \sigma^2 \sim \mathrm{InverseGamma}(a, b), \qquad \beta_j \mid \sigma \sim N(0, c^2 \sigma^2).

    The intercept has the prior of a coefficient. If :math:`E` environments share coefficients, but not their noise, the
    prior is the product of these densities over environments, that of coefficients raised to the power :math:`1 / E`,
    and normalised: for one environment it is the same, and given coefficients the variances are independent.

    Attributes
    ----------
    coefficient_sd : float, default 10.0
        ``c``, prior standard deviation of a coefficient in units of that of the noise, between 1e-6 and 1e6.
    noise_shape, noise_scale : float, default 0.5 and 0.005
        ``a`` and ``b``, between 1e-6 and 1e6. The default is worth one observation with a residual of 0.1.

    Raises
    ------
    SettingsError
        If a number lies outside of its limits.

    Examples
    --------
    >>> from bayeskit.workflows._invariance import RegressionPrior
    >>> RegressionPrior(coefficient_sd=3.0)
    RegressionPrior(coefficient_sd=3.0, noise_shape=0.5, noise_scale=0.005)
    """

    coefficient_sd: float = 10.0
    noise_shape: float = 0.5
    noise_scale: float = 0.005

    def __post_init__(self) -> None:
        for name in ("coefficient_sd", "noise_shape", "noise_scale"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), "(1e-6, 1e6)"))


@dataclass(frozen=True)
class _Ridge:
    """Quadratic forms ``rest + |root (b - centre)|^2`` of coefficients ``b``, a batch of ``E``."""

    root: Tensor  # (E, k, k), upper triangular
    centre: Tensor  # (E, k)
    rest: Tensor  # (E,)

    @classmethod
    def of(cls, design: Tensor, response: Tensor, precision: float) -> _Ridge:
        """Complete the square in ``|response - design b|^2 + precision |b|^2``: ``(E, r, k)`` and ``(E, r)``."""
        batch, _, k = design.shape
        ridge = math.sqrt(precision) * torch.eye(k, dtype=design.dtype)
        rows = torch.cat([design, ridge.expand(batch, k, k)], 1)
        sides = torch.cat([response, response.new_zeros(batch, k)], 1).unsqueeze(-1)
        q, root = torch.linalg.qr(rows)
        centre = torch.linalg.solve_triangular(root, q.mT @ sides, upper=True)
        return cls(root, centre.squeeze(-1), (sides - rows @ centre).square().sum((-2, -1)))

    def at(self, b: Tensor) -> Tensor:
        """Return the values at points, ``(*n, k) -> (*n, E)``."""
        deviation = torch.einsum("eij,...ej->...ei", self.root, b.unsqueeze(-2) - self.centre)
        return self.rest + deviation.square().sum(-1)


def _separate(design: Tensor, response: Tensor, counts: Tensor, prior: RegressionPrior) -> Tensor:
    """Return the log evidence of each of a batch of regressions with ``counts`` observations, ``(E,)``."""
    form = _Ridge.of(design, response, prior.coefficient_sd**-2)
    a, b, k = prior.noise_shape, prior.noise_scale, design.shape[-1]
    return (
        -0.5 * counts * math.log(2 * math.pi)
        - k * math.log(prior.coefficient_sd)
        - form.root.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        + a * math.log(b)
        - math.lgamma(a)
        + torch.lgamma(a + 0.5 * counts)
        - (a + 0.5 * counts) * (b + 0.5 * form.rest).log()
    )


@dataclass(frozen=True)
class _PolyT:
    """Product of multivariate t kernels: coefficients that share a prior, each environment's noise integrated out."""

    form: _Ridge
    power: Tensor  # (E,)
    scale: float
    log_constant: float

    @classmethod
    def of(cls, design: Tensor, response: Tensor, counts: Tensor, prior: RegressionPrior) -> _PolyT:
        a, b, (num_environments, _, k) = prior.noise_shape, prior.noise_scale, design.shape
        form = _Ridge.of(design, response, prior.coefficient_sd**-2 / num_environments)
        power = a + 0.5 * counts + 0.5 * k / num_environments
        each = -0.5 * counts * math.log(2 * math.pi) + a * math.log(b) + torch.lgamma(power)
        # What normalises the prior: the integral over coefficients is that of one multivariate t density.
        log_constant = (
            float(each.sum())
            - num_environments * math.lgamma(a + 0.5 * k / num_environments)
            - 0.5 * k * math.log(2 * math.pi * num_environments * prior.coefficient_sd**2)
            + math.lgamma(a * num_environments + 0.5 * k)
            - math.lgamma(a * num_environments)
        )
        return cls(form, power, b, log_constant)

    def log_density(self, b: Tensor) -> Tensor:
        """Return the log of the integrand at coefficients, ``(*n, k) -> (*n)``."""
        return self.log_constant - (self.power * (self.scale + 0.5 * self.form.at(b)).log()).sum(-1)

    def weights(self, b: Tensor) -> Tensor:
        """Return the expected precision of each environment's noise given coefficients, ``(*n, k) -> (*n, E)``."""
        return self.power / (self.scale + 0.5 * self.form.at(b))

    def modes(self) -> Tensor:
        """Return maxima ``(m, k)``, one or more, by expectation-maximisation from several starts."""
        information = self.form.root.mT @ self.form.root  # (E, k, k)
        pulled = (information @ self.form.centre.unsqueeze(-1)).squeeze(-1)
        num_environments = len(pulled)
        some = torch.linspace(0, num_environments - 1, min(num_environments, _MOST_STARTS)).long()
        all_alike = torch.linalg.solve(information.sum(0), pulled.sum(0))
        b = torch.cat([all_alike[None], self.form.centre[some]])
        for _ in range(_MOST_STEPS):
            w = self.weights(b)
            precision = torch.einsum("ne,eij->nij", w, information)
            new = torch.linalg.solve(precision, w @ pulled)
            moved = torch.einsum("ni,nij,nj->n", new - b, precision, new - b)
            b = new
            if float(moved.max()) < _ARRIVED:
                break
        kept: list[int] = []
        for i in torch.argsort(self.log_density(b), descending=True).tolist():
            away = [float((b[i] - b[j]) @ precision[j] @ (b[i] - b[j])) for j in kept]
            if not away or min(away) > _SAME_MODE:
                kept.append(i)
        return b[kept]

    def curvature(self, b: Tensor) -> Tensor:
        """Return the negative Hessian of the log density, or a positive definite bound to it: ``(m, k, k)``."""
        w = self.weights(b)
        bound = torch.einsum("ne,eij->nij", w, self.form.root.mT @ self.form.root)
        pull = torch.einsum("eji,ejk,nek->nei", self.form.root, self.form.root, b.unsqueeze(-2) - self.form.centre)
        hessian = bound - torch.einsum("ne,nei,nej->nij", w.square() / self.power, pull, pull)
        failed = torch.linalg.cholesky_ex(hessian).info > 0
        return torch.where(failed[:, None, None], bound, hessian)

    def log_integral(self, num_draws: int, rng: np.random.Generator) -> tuple[float, float, float]:
        """Return the log of the integral over coefficients, its standard error, and the effective number of draws.

        The draws come from t densities at the modes, with the curvature there; without draws this would be Laplace's
        approximation.
        """
        modes = self.modes()
        m, k = modes.shape
        tril = torch.linalg.cholesky(self.curvature(modes))
        log_volume = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        share = (1 - _SPREAD) * (self.log_density(modes) - log_volume).softmax(0) + _SPREAD / m
        df = min(_DEGREES, float(2 * self.power.sum()) - k)
        chosen = torch.from_numpy(rng.choice(m, num_draws, p=(share / share.sum()).numpy()))
        noise = torch.from_numpy(rng.standard_normal((num_draws, k)) / np.sqrt(rng.chisquare(df, (num_draws, 1)) / df))
        b = modes[chosen] + torch.linalg.solve_triangular(tril[chosen].mT, noise.unsqueeze(-1), upper=True).squeeze(-1)
        apart = torch.einsum("mij,nmi->nmj", tril, b.unsqueeze(1) - modes).square().sum(-1)  # (n, m)
        log_t = log_volume - 0.5 * (df + k) * (apart / df).log1p() + share.log()
        normal = math.lgamma(0.5 * (df + k)) - math.lgamma(0.5 * df) - 0.5 * k * math.log(df * math.pi)
        log_weights = self.log_density(b) - log_t.logsumexp(-1) - normal
        column = log_weights.unsqueeze(0)
        error = float(independent_log_mean_exp_error(column))
        return float(log_mean_exp(column)), error, float(weight_effective_sample_size(log_weights))


_MOST_STARTS, _MOST_STEPS, _ARRIVED, _SAME_MODE = 12, 500, 1e-10, 1e-2
_SPREAD, _DEGREES = 0.1, 10.0


# What is found.


@dataclass(frozen=True)
class SubsetEvidence:
    """Log evidences of ``y`` given a subset of columns, in nats.

    Attributes
    ----------
    subset : tuple of str
        Names of the columns.
    shared : float
        Coefficients and noise are those of all environments.
    mean_shared : float
        Coefficients are those of all environments, and each has its own noise.
    mean_shared_error : float
        Monte Carlo standard error of ``mean_shared``.
    separate : float
        Each environment has its own coefficients and its own noise.
    effective_draws : float
        Effective number of draws in ``mean_shared``.

    Examples
    --------
    >>> from bayeskit.workflows._invariance import SubsetEvidence
    >>> found = SubsetEvidence(("dose",), -100.0, -104.0, 0.01, -109.0, 1500.0)
    >>> found.log_bayes_factor, found.log_bayes_factor_of_mean
    (9.0, 5.0)
    """

    subset: tuple[str, ...]
    shared: float
    mean_shared: float
    mean_shared_error: float
    separate: float
    effective_draws: float

    @property
    def log_bayes_factor(self) -> float:
        """Log Bayes factor of a shared mechanism against one of each environment's own."""
        return self.shared - self.separate

    @property
    def log_bayes_factor_of_mean(self) -> float:
        """Log Bayes factor of a shared mean with each environment's own noise against nothing shared."""
        return self.mean_shared - self.separate

    def __str__(self) -> str:
        return _braced(self.subset)


@dataclass(frozen=True, repr=False)
class InvariantSubsets:
    """Which subsets of columns have a mechanism that all environments share, and which columns they have in common.

    Attributes
    ----------
    evidences : tuple of SubsetEvidence
        One for each subset of the columns, in any order.
    columns : tuple of str
        Names of the candidate causes.
    num_rows : dict of int
        Number of rows by environment.
    prior_probabilities : dict of float
        Of ``"mechanism"``, ``"mean"`` and ``"nothing"``, with sum one.
    remarks : tuple of str
        What was found in the data and adds to :attr:`warnings`.

    Raises
    ------
    SettingsError
        If ``evidences`` are not those of all subsets, or prior probabilities do not fit.

    Examples
    --------
    >>> from bayeskit.workflows._invariance import InvariantSubsets, SubsetEvidence
    >>> nothing = SubsetEvidence((), -140.0, -128.0, 0.0, -120.0, 2000.0)
    >>> dose = SubsetEvidence(("dose",), -100.0, -104.0, 0.01, -109.0, 1500.0)
    >>> found = InvariantSubsets((nothing, dose), ("dose",), {"a": 50, "b": 50})
    >>> found.best, found.trusted, found.holds("dose"), found.holds()
    (('dose',), True, 'mechanism shared', 'nothing shared')
    >>> {name: round(p, 3) for name, p in found.column_probabilities.items()}
    {'dose': 0.982}
    """

    evidences: tuple[SubsetEvidence, ...]
    columns: tuple[str, ...]
    num_rows: dict[Any, int]
    prior_probabilities: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_HYPOTHESES, 1 / 3))
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prior_probabilities", _as_prior(self.prior_probabilities))
        subsets = {frozenset(z.subset) for z in self.evidences}
        if not len(subsets) == len(self.evidences) == 2 ** len(self.columns) or not subsets <= _subsets(self.columns):
            raise SettingsError(f"evidences must be those of all {2 ** len(self.columns)} subsets of the columns")

    def __iter__(self) -> Iterator[SubsetEvidence]:
        return iter(self.evidences)

    def of(self, *columns: str) -> SubsetEvidence:
        """Return the evidences of a subset, by the names of its columns; of the empty set without names.

        Raises
        ------
        UnknownNameError
            If there is no such column.
        """
        for name in columns:
            if name not in self.columns:
                raise UnknownNameError(f"no column is called {name!r}; there are: {', '.join(self.columns)}")
        return next(found for found in self.evidences if set(found.subset) == set(columns))

    def probabilities(self, *columns: str) -> dict[str, float]:
        """Return the posterior probabilities of ``"mechanism"``, ``"mean"`` and ``"nothing"`` shared given a subset.

        Parameters
        ----------
        *columns : str
            Names of the columns of the subset.
        """
        return {name: math.exp(p) for name, p in self._log_probabilities(self.of(*columns)).items()}

    def holds(self, *columns: str) -> str:
        """Return what the environments share given a subset, by name: the most probable of three.

        Parameters
        ----------
        *columns : str
            Names of the columns of the subset.

        Returns
        -------
        str
            ``"mechanism shared"``, ``"mean shared"`` (only: the noise is each environment's own) or
            ``"nothing shared"``.
        """
        return self._what_holds(self.of(*columns))

    def _log_probabilities(self, found: SubsetEvidence) -> dict[str, float]:
        gains = dict(zip(_HYPOTHESES, (found.shared, found.mean_shared, found.separate), strict=True))
        log_joint = {name: gains[name] + _log(self.prior_probabilities[name]) for name in _HYPOTHESES}
        total = float(logsumexp(list(log_joint.values())))
        return {name: value - total for name, value in log_joint.items()}

    def _what_holds(self, found: SubsetEvidence) -> str:
        p = self._log_probabilities(found)
        return max(_HYPOTHESES, key=lambda name: p[name]) + " shared"

    @cached_property
    def _common(self) -> tuple[dict[tuple[str, ...], float], dict[str, float], float]:
        """Posterior of the common columns, of each column to be among them, and of no invariant subset."""
        bits = {name: 1 << j for j, name in enumerate(self.columns)}
        codes = np.array([sum(bits[name] for name in z.subset) for z in self.evidences])
        rejected = np.empty(len(codes))  # log probabilities that mechanisms are not shared
        for code, z in zip(codes, self.evidences, strict=True):
            p = self._log_probabilities(z)
            rejected[code] = np.logaddexp(p["mean"], p["nothing"])
        places = np.arange(len(codes))
        none = math.exp(rejected.sum())
        # That all invariant subsets hold T is that all others are rejected; differences give what is held exactly.
        within = np.array([math.exp(rejected[(places & code) != code].sum()) for code in places]) - none
        exactly = within.copy()
        for bit in bits.values():
            without = places[(places & bit) == 0]
            exactly[without] -= exactly[without | bit]
        subsets = {z.subset: max(float(exactly[code]), 0.0) for code, z in zip(codes, self.evidences, strict=True)}
        return subsets, {name: float(within[bit]) for name, bit in bits.items()}, none

    @property
    def posterior_probabilities(self) -> dict[tuple[str, ...], float]:
        """Posterior probability of each subset to be what all subsets with a shared mechanism have in common.

        The questions whether the mechanism is shared are answered for each subset separately, and their answers are
        combined as independent events. What the sum lacks to one is :attr:`probability_of_none`.
        """
        return dict(self._common[0])

    @property
    def column_probabilities(self) -> dict[str, float]:
        """Posterior probability of each column that some mechanism is shared, and none without this column."""
        return dict(self._common[1])

    @property
    def probability_of_none(self) -> float:
        """Posterior probability that no subset has a shared mechanism."""
        return self._common[2]

    @property
    def invariant(self) -> tuple[tuple[str, ...], ...]:
        """Subsets whose mechanism is shared more probably than their mean only or nothing."""
        return tuple(z.subset for z in self.evidences if self._what_holds(z) == "mechanism shared")

    @property
    def best(self) -> tuple[str, ...] | None:
        """The most probable set of common columns; None if it is more probable that no mechanism is shared."""
        p = self.posterior_probabilities
        top = max(p, key=lambda subset: p[subset])
        return top if p[top] > self.probability_of_none else None

    @property
    def trusted(self) -> bool:
        """True if one set of common columns stands out, is not empty, and nothing casts doubt on its numbers."""
        return not self.warnings

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to rely on :attr:`best`, each with a remedy."""
        result, best = list(self.remarks), self.best
        ranked = [(_braced(subset), p) for subset, p in self.posterior_probabilities.items()]
        (first, p), (second, q) = sorted([*ranked, ("no subset", self.probability_of_none)], key=lambda row: -row[1])[
            :2
        ]
        if best is None and not self.invariant:
            result.append(self._why_none())
        elif p < _SETTLED:
            result.append(
                f"what mechanisms that are shared have in common is not settled: {first} has probability {p:.2g} and "
                f"{second} has {q:.2g}; more rows or environments that differ more would tell them apart"
            )
        elif not best:
            result.append(
                f"{len(self.invariant)} of {len(self.evidences)} subsets have a shared mechanism and no column in "
                "common, so that no cause is identified: environments that differ more, in causes and in effects, "
                "would reject more of them"
            )
        vague = [z for z in self.evidences if z.effective_draws < _LEAST_EFFECTIVE]
        if vague:
            worst = min(vague, key=lambda z: z.effective_draws)
            result.append(
                f"the evidence of a shared mean rests on {worst.effective_draws:.0f} effective draws for {worst}: "
                "raise num_draws"
            )
        return tuple(result)

    def _why_none(self) -> str:
        top = self._ranked[0]
        text = (
            f"no subset has a mechanism that the environments share (the largest log Bayes factor is "
            f"{top.log_bayes_factor:.1f}, of {top})"
        )
        means = [z for z in self.evidences if self._what_holds(z) == "mean shared"]
        if means:
            means.sort(key=lambda z: -z.log_bayes_factor_of_mean)
            more = f" and {len(means) - _MOST_NAMED} more" if len(means) > _MOST_NAMED else ""
            return (
                f"{text}: only a mean is shared, that given {' or '.join(map(str, means[:_MOST_NAMED]))}{more}, and "
                "the noise varies by environment; coefficients may carry over to another environment, and predictive "
                "spreads do not"
            )
        return (
            f"{text}, nor a mean: a cause may be missing from x, environments may act on y itself, or the mechanism is "
            "not linear; add columns or transform them"
        )

    @property
    def _ranked(self) -> list[SubsetEvidence]:
        order = np.argsort([-z.log_bayes_factor for z in self.evidences], kind="stable")
        return [self.evidences[i] for i in order]

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per subset, in descending order of the log Bayes factor of a shared mechanism."""
        import pandas as pd

        common = self.posterior_probabilities
        rows = [
            {
                "subset": str(z),
                "log_evidence_shared": z.shared,
                "log_evidence_mean_shared": z.mean_shared,
                "log_evidence_mean_shared_error": z.mean_shared_error,
                "log_evidence_separate": z.separate,
                "log_bayes_factor": z.log_bayes_factor,
                "log_bayes_factor_of_mean": z.log_bayes_factor_of_mean,
                **{f"probability_of_{name}": math.exp(p) for name, p in self._log_probabilities(z).items()},
                "probability_of_common": common[z.subset],
                "holds": self._what_holds(z),
            }
            for z in self.evidences
        ]
        table = pd.DataFrame(rows).sort_values("log_bayes_factor", ascending=False, kind="stable")
        return table.reset_index(drop=True)

    def to_csv(self, path: str | Path) -> None:
        """Write the table to a CSV file, atomically.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_csv(path, self.to_pandas())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the log Bayes factors of a shared mechanism and of a shared mean of the best subsets.

        To the right of zero something is shared.

        Parameters
        ----------
        ax : Axes, optional
            By default those of a new figure.
        """
        shown = self._ranked[:_MOST_SHOWN]
        ax = axes_or_new(ax, 7.0, 1.4 + 0.42 * len(shown))
        rows = np.arange(len(shown))
        ax.barh(rows - 0.2, [z.log_bayes_factor for z in shown], 0.36, color=BLUE, label="mechanism")
        ax.barh(rows + 0.2, [z.log_bayes_factor_of_mean for z in shown], 0.36, color=ORANGE, label="mean only")
        ax.axvline(0.0, color=GREY, linewidth=1.0)
        ax.set_xscale("symlog", linthresh=10.0)
        ax.set_ylim(len(shown) - 0.5, -0.5)
        ax.set_yticks(rows, [f"{z}: {self._what_holds(z)}" for z in shown])
        ax.set_xlabel("log Bayes factor against nothing shared (nats)")
        ax.legend(frameon=False)
        return ax

    def _headline(self) -> str:
        if self.best is None:
            return f"no shared mechanism among {len(self.evidences)} subsets of {len(self.columns)} columns"
        p = self.posterior_probabilities[self.best]
        return (
            f"{len(self.invariant)} of {len(self.evidences)} subsets have a mechanism that {len(self.num_rows)} "
            f"environments share; in common: {_braced(self.best)}, probability {p:.3g}"
        )

    def __str__(self) -> str:
        lines = [self._headline()]
        for z in self._ranked[:_MOST_SHOWN]:
            factor = with_error(z.log_bayes_factor_of_mean, z.mean_shared_error)
            lines.append(f"{z}: {self._what_holds(z)}; log Bayes factor {z.log_bayes_factor:.2f}, of the mean {factor}")
        if len(self.evidences) > _MOST_SHOWN:
            lines.append(f"... and {len(self.evidences) - _MOST_SHOWN} more subsets in .to_pandas()")
        return "\n".join([*lines, *(f"  {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        columns = ["subset", "holds", "log Bayes factor", "of the mean", "error", "probability of a mechanism"]
        rows: list[list[Cell]] = [
            [
                str(z),
                self._what_holds(z),
                number(z.log_bayes_factor, ".2f"),
                *measured(z.log_bayes_factor_of_mean, z.mean_shared_error),
                number(math.exp(self._log_probabilities(z)["mechanism"]), ".3g"),
            ]
            for z in self._ranked[:_MOST_SHOWN]
        ]
        count, more = len(self.warnings), len(self.evidences) - len(rows)
        remarks = Listed(f"{count} warning{'s' * (count > 1)}", [("subsets", why) for why in self.warnings])
        return result_html(
            self._headline(),
            [PageTable("Subsets, log Bayes factors against nothing shared", columns, rows)],
            [remarks] if count else [],
            notes=[f"{more} more subsets are in .to_pandas()."] if more else [],
        )


# The workflow.


def invariant_subsets(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    environment: Any,
    *,
    names: Sequence[str] | None = None,
    prior: RegressionPrior | None = None,
    prior_probabilities: Mapping[str, float] | None = None,
    standardize: bool = True,
    num_draws: int = 2000,
    seed: int = 0,
) -> InvariantSubsets:
    r"""Find subsets of candidate causes whose mechanism is shared by all environments, by evidence.

    If ``x`` holds the direct causes :math:`S` of ``y`` and environments act on anything but ``y``, then
    :math:`p(y \mid x_S)` is the same in all of them, while predictors that are effects of ``y`` change theirs. For each
    subset, three linear regressions with an intercept and normal noise are compared:

    * mechanism shared: all environments have the same coefficients and the same noise;
    * mean shared: the same coefficients, and each its own noise;
    * nothing shared: each its own coefficients and its own noise.

    The first and the last are conjugate, and their evidence is exact. The evidence of the second is an integral over
    coefficients of a product of multivariate t kernels, estimated by importance sampling around its modes.

    The three are a priori equally probable for each subset. A mechanism is usually shared given several subsets,
    because columns that are neither causes nor effects can be added to the causes. As in invariant causal prediction,
    what these subsets have in common is a set of causes. Its posterior combines the answers for different subsets as
    independent events. It is the empty set if the environments leave ``y`` alone.

    With :math:`n` rows in all, minus the log Bayes factor divided by :math:`n` tends to the mutual information
    :math:`I(y; e \mid x_S)` of normal approximations to the data, zero for a shared mechanism. A subset is rejected
    also if its mechanism is shared but not linear. A shared mean alone says little of causes: it holds without any,
    where ``y`` has the same mean everywhere.

    Parameters
    ----------
    x : array_like, shape (n, p)
        Candidate causes; a data frame names its columns. At most 12 columns, which have 4,096 subsets.
    y : array_like, shape (n,)
        Effect.
    environment : sequence of hashable, shape (n,)
        Label of the environment of each row, such as a number or a text. Each environment has at least ``p + 2`` rows.
    names : sequence of str, optional
        Names of the columns; by default those of a data frame, or ``x0``, ``x1``, and so on.
    prior : RegressionPrior, optional
        Prior of every regression.
    prior_probabilities : mapping of str to float, optional
        Nonnegative weights of ``"mechanism"``, ``"mean"`` and ``"nothing"`` shared, normalised; equal by default.
    standardize : bool, default True
        Shift and scale ``y`` and the columns of ``x`` to mean zero and variance one over all rows, so that the result
        does not depend on units. Evidences are still those of ``y`` as given.
    num_draws : int, default 2000
        Number of draws for the evidence of a shared mean of each subset.
    seed : int, default 0

    Returns
    -------
    InvariantSubsets
        Not trusted, with the reason in ``warnings``, if no mechanism is shared, or those that are have no column in
        common or are not settled.

    Raises
    ------
    DataError
        If there is one environment only, a value is missing or not finite, a column or ``y`` is constant, a label is
        missing, or an environment has too few rows.
    ShapeError
        If ``x`` is no matrix, or the lengths differ.
    SettingsError
        If there are more than 12 columns, or names or prior probabilities do not fit.

    Warns
    -----
    DataWarning
        If the result is not trusted.

    References
    ----------
    Peters, J., Buehlmann, P., Meinshausen, N. (2016). Causal inference by using invariant prediction: identification
    and confidence intervals. Journal of the Royal Statistical Society B 78, 947-1012.

    Arjovsky, M., Bottou, L., Gulrajani, I., Lopez-Paz, D. (2019). Invariant risk minimization. arXiv:1907.02893.

    Dreze, J. H. (1977). Bayesian regression analysis using poly-t densities. Journal of Econometrics 6, 329-354.

    Examples
    --------
    The cause acts alike in both environments, its effect is noisier in one of them:

    >>> import numpy as np
    >>> from bayeskit.workflows import invariant_subsets
    >>> rng = np.random.default_rng(0)
    >>> environment = np.repeat(["a", "b"], 200)
    >>> spread = np.where(environment == "a", 0.5, 2.0)
    >>> cause = rng.normal(0, spread)
    >>> y = cause + rng.normal(0, 1, 400)
    >>> effect = y + rng.normal(0, spread)
    >>> found = invariant_subsets(np.stack([cause, effect], 1), y, environment, names=["cause", "effect"])
    >>> found.best, found.holds("effect"), found.holds("cause", "effect")
    (('cause',), 'nothing shared', 'nothing shared')
    """
    labels = _as_names(x, names)
    design, response = _as_matrix(x), _as_vector(y)
    rows, codes, counts = _as_environments(environment, design, response)
    columns = _checked_names(labels, design.shape[1])
    weights = _as_prior({name: 1.0 for name in _HYPOTHESES} if prior_probabilities is None else prior_probabilities)
    _check_columns(design, response, columns, rows)
    belief = RegressionPrior() if prior is None else prior
    draws, base = whole_number("num_draws", num_draws, _LEAST_EFFECTIVE), whole_number("seed", seed)

    unit = 1.0
    remarks = []
    if standardize:
        design, response, unit = _standardized(design), _standardized(response), float(response.std(correction=0))
    if int(torch.linalg.matrix_rank(_standardized(design))) < design.shape[1]:
        remarks.append(
            "the columns of x are linearly dependent, so that several subsets say the same and share its probability: "
            "leave out columns that follow from others"
        )
    factors = _factors(design, response, codes, len(rows))
    constant = len(response) * math.log(unit)
    evidences = []
    sizes = range(len(columns) + 1)
    with one_thread():
        for chosen in itertools.chain.from_iterable(
            itertools.combinations(range(len(columns)), size) for size in sizes
        ):
            own = factors[..., [0, *(j + 1 for j in chosen)]]
            rng = np.random.default_rng(derived_seed(base, f"subset {chosen}"))
            subset = tuple(columns[j] for j in chosen)
            evidences.append(_evidence(subset, own, factors[..., -1], counts, belief, constant, draws, rng))
    found = InvariantSubsets(tuple(evidences), columns, rows, weights, tuple(remarks))
    for warning in found.warnings:
        warn_user(warning, DataWarning)
    return found


def _evidence(
    subset: tuple[str, ...],
    design: Tensor,
    response: Tensor,
    counts: Tensor,
    prior: RegressionPrior,
    constant: float,
    num_draws: int,
    rng: np.random.Generator,
) -> SubsetEvidence:
    separate = float(_separate(design, response, counts, prior).sum())
    shared = _separate(design.flatten(0, 1)[None], response.flatten()[None], counts.sum(0, keepdim=True), prior)
    mean, error, effective = _PolyT.of(design, response, counts, prior).log_integral(num_draws, rng)
    return SubsetEvidence(subset, float(shared) - constant, mean - constant, error, separate - constant, effective)


def _factors(x: Tensor, y: Tensor, codes: Tensor, num_environments: int) -> Tensor:
    """Return square roots of the second moments of ``(1, x, y)`` in each environment, ``(E, p + 2, p + 2)``."""
    table = torch.cat([torch.ones_like(y).unsqueeze(1), x, y.unsqueeze(1)], 1)
    each = [torch.linalg.qr(table[codes == e], mode="r").R.cpu() for e in range(num_environments)]
    return torch.stack(each)


def _standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0, correction=0)


def _braced(subset: Sequence[str]) -> str:
    return "{" + ", ".join(subset) + "}"


def _subsets(columns: Sequence[str]) -> set[frozenset[str]]:
    return {frozenset(c) for size in range(len(columns) + 1) for c in itertools.combinations(columns, size)}


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


# Input.


def _as_matrix(x: Any) -> Tensor:
    design = _as_double("x", x)
    if design.ndim != 2 or 0 in design.shape:
        raise ShapeError(
            f"x must be a matrix of rows and candidate causes, not of shape {tuple(design.shape)}; give one column as "
            "x[:, None]"
        )
    if design.shape[1] > MOST_COLUMNS:
        raise SettingsError(
            f"x has {design.shape[1]} columns, which have {2 ** design.shape[1]:,} subsets; give at most "
            f"{MOST_COLUMNS} candidate causes ({2**MOST_COLUMNS:,} subsets), chosen by what is known of them"
        )
    return design


def _as_vector(y: Any) -> Tensor:
    response = _as_double("y", y)
    if response.ndim != 1:
        raise ShapeError(f"y must be a vector, not of shape {tuple(response.shape)}")
    return response


def _as_double(name: str, value: Any) -> Tensor:
    numbers = as_numbers(name, value).detach()
    if numbers.is_complex():
        raise DataError(f"{name} is complex; give real numbers")
    numbers = numbers.to(torch.float64)
    bad = (~numbers.isfinite()).nonzero()
    if len(bad):
        place = ", ".join(map(str, bad[0].tolist()))
        raise DataError(
            f"{name}[{place}] is {float(numbers[tuple(bad[0])])}: {len(bad)} of {numbers.numel()} entries are missing "
            "or not finite; leave out their rows or impute them"
        )
    return numbers


def _as_environments(environment: Any, x: Tensor, y: Tensor) -> tuple[dict[Any, int], Tensor, Tensor]:
    """Return the number of rows by label, the place of each row's label among them, and the numbers as reals."""
    labels = environment.tolist() if hasattr(environment, "tolist") else environment
    if not isinstance(labels, Sequence) or isinstance(labels, (str, bytes)):
        raise ShapeError(f"environment must be a list of labels, one for each row, not a {type(environment).__name__}")
    if not len(labels) == len(x) == len(y):
        raise ShapeError(
            f"x has {len(x)} rows, y has {len(y)} entries and environment has {len(labels)} labels; they must agree"
        )
    places: dict[Any, int] = {}
    codes = []
    for row, label in enumerate(labels):
        try:
            known = label == label and label is not None
            codes.append(places.setdefault(label, len(places)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"environment[{row}] is of type {type(label).__name__}, which is no label; give numbers or texts"
            ) from error
        if not known:
            raise DataError(f"environment[{row}] is missing ({label!r}); leave out its row or name its environment")
    if len(places) < 2:
        raise DataError(
            f"all rows are of environment {labels[0]!r}; give rows of at least two environments, without which nothing "
            "can vary"
        )
    counts = torch.bincount(torch.tensor(codes), minlength=len(places))
    needed = x.shape[1] + 2
    for label, count in zip(places, counts.tolist(), strict=True):
        if count < needed:
            raise DataError(
                f"environment {label!r} has {count} rows, fewer than the {needed} parameters of its regression; give "
                "more rows or fewer columns, or join environments"
            )
    rows = dict(zip(places, counts.tolist(), strict=True))
    return rows, torch.tensor(codes, device=x.device), counts.to(torch.float64)


def _as_names(x: Any, names: Sequence[str] | None) -> list[str] | None:
    if names is not None:
        if isinstance(names, str):
            raise SettingsError(f"names must be a list of texts, one for each column, not {names!r}")
        return list(names)
    columns = getattr(x, "columns", None)
    return None if columns is None else [str(name) for name in columns]


def _checked_names(labels: list[str] | None, num_columns: int) -> tuple[str, ...]:
    if labels is None:
        return tuple(f"x{j}" for j in range(num_columns))
    if len(labels) != num_columns or len(set(labels)) != num_columns or not all(isinstance(n, str) for n in labels):
        raise SettingsError(f"names must be {num_columns} different texts, one for each column of x, not {labels}")
    return tuple(labels)


def _check_columns(x: Tensor, y: Tensor, columns: tuple[str, ...], rows: Mapping[Any, int]) -> None:
    for name, values in (*((f"column {name!r} of x", x[:, j]) for j, name in enumerate(columns)), ("y", y)):
        low, high = float(values.min()), float(values.max())
        spread = float(values.std(correction=0))
        if low == high or spread == 0:
            raise DataError(f"{name} is constant ({low:g}) in all {sum(rows.values())} rows; leave it out")
        if not math.isfinite(spread):
            raise DataError(f"{name} reaches from {low:g} to {high:g}, too far to be squared; change its unit")


def _as_prior(given: Mapping[str, float]) -> dict[str, float]:
    """Return prior probabilities with sum one; SettingsError if they are not those of the three hypotheses."""
    if not isinstance(given, Mapping) or set(given) != set(_HYPOTHESES):
        raise SettingsError(
            f"prior_probabilities must be a dict of numbers for {', '.join(_HYPOTHESES)}, not {given!r}"
        )
    weights = {name: real_number(f"the prior probability of {name!r}", given[name]) for name in _HYPOTHESES}
    total = sum(weights.values())
    if min(weights.values()) < 0 or not 0 < total < math.inf:
        raise SettingsError(f"prior_probabilities must be nonnegative, and one of them positive, not {dict(given)}")
    return {name: weight / total for name, weight in weights.items()}
