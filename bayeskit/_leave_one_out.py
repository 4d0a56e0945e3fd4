"""Leave-one-out cross-validation from posterior draws, by importance sampling with moment matching."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE, chain_problems
from bayeskit._core.inputs import unknown_name, warn_user
from bayeskit._core.page import frame_table, result_html, warnings_listed
from bayeskit._core.progress import progress_bar
from bayeskit._core.statistics import log_mean_exp, mean_error, pareto_smoothed
from bayeskit._logdensity.observations import Observations, check_values, observed_values
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.target import Target
from bayeskit.errors import (
    DataError,
    DataWarning,
    DrawsError,
    ModelError,
    SettingsError,
    ShapeError,
    UnknownNameError,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Name of a plate, the group of each datum, or the groups of the data of each site.
Groups = str | Sequence[Any] | Tensor | Mapping[str, Any]

_MIN_DRAWS = 8
_AT_A_TIME = 2**22  # numbers of one temporary
_ROUNDS = 30
_INFLUENTIAL = 0.02  # effective parameters of a datum from which its draws are moved
_POWERS = 20
_STRETCH = 2.0  # by which draws are spread further than a normal posterior without the datum
_LEAST_PRECISION = 1e-4  # of that posterior, in units of the posterior with the datum
_FINITE_VARIANCE = 0.5  # Pareto shape below which the error of the mean is reliable
_SIGNIFICANT = 4.0  # squared size of a change of moments, in squared errors, below which it is taken for noise
_DRAWS_PER_DIMENSION = 10  # fewer do not determine a covariance
_NAMED = 3
_SHOWN = 5  # data in a notebook
_OWN_PARAMETERS = 0.2  # effective parameters of a typical datum above which k was seen to be too low


@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOutScore:
    """Log predictive densities of each datum given all others.

    Attributes
    ----------
    elpd : float
        Expected log pointwise predictive density of new data: the sum of ``pointwise``, in nats.
    standard_error : float
        Standard error of ``elpd`` as an estimate for new data: its variation over data, not over draws.
    monte_carlo_error : float
        Standard error of ``elpd`` from the finite number of draws.
    p_loo : float
        Effective number of parameters: how much a datum's own presence raises its log predictive density, in sum.
    pointwise, pointwise_error : Tensor
        Log predictive density of each datum and its Monte Carlo standard error, ``(n,)``.
    pareto_k, pareto_k_before : Tensor
        Pareto ``k`` of the importance weights of each datum, after and before moment matching, ``(n,)``; ``-inf`` where
        all of the largest weights are equal.
    counts : Tensor
        Number of data that share a term, ``(n,)``; 1 except for alignment patterns, 0 for masked data.
    threshold : float
        Largest reliable ``k``: the smaller of 0.7 and ``1 - 1 / log10(draws)``.
    num_draws : int
    sites : dict of dict
        Sizes of the dimensions of each site, in the order of the data: ``{site: {dimension: size}}``.
    num_evaluations : int
        Evaluations of the likelihood.
    warnings : tuple of str
        Problems found by the diagnostics, each with its remedy.
    data : Tensor or None
        Observed values in the order of the model, by which :meth:`difference` knows that two models have the same data.
    groups : tuple
        Labels of the groups, in the order of ``pointwise``, if they were given by labels.
    members : Tensor or None
        Group of each term of the likelihood, ``(terms,)``; None where each is one by itself.

    Examples
    --------
    >>> import bayeskit as bk
    >>> draws = bk.sample(bk.exact.get("radiata_pine_m1").target(), num_samples=500, progress=False)
    >>> score = draws.loo()
    >>> score.trusted, len(score.pointwise), score.to_pandas().columns.tolist()[-3:]
    (True, 42, ['monte_carlo_error', 'pareto_k', 'pareto_k_before'])
    """

    elpd: float
    standard_error: float
    monte_carlo_error: float
    p_loo: float
    pointwise: Tensor
    pointwise_error: Tensor
    pareto_k: Tensor
    pareto_k_before: Tensor
    counts: Tensor
    threshold: float
    num_draws: int
    sites: dict[str, dict[str, int]]
    num_evaluations: int
    warnings: tuple[str, ...] = ()
    data: Tensor | None = None
    groups: tuple[Any, ...] = ()
    members: Tensor | None = None

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.elpd) and math.isfinite(self.monte_carlo_error)

    @property
    def matched(self) -> Tensor:
        """Whether the draws were moved for a datum, ``(n,)``."""
        return self.pareto_k != self.pareto_k_before

    def difference(self, other: LeaveOneOutScore, *, same_data: bool = False) -> tuple[float, float]:
        """Return by how much ``elpd`` exceeds that of another model of the same data, and the standard error of that.

        Parameters
        ----------
        other : LeaveOneOutScore
            Of another model.
        same_data : bool, default False
            Whether you know that the data are the same, in the same order, so that observed values are not compared.

        Returns
        -------
        tuple of float
            Difference in nats, and its standard error, from the variation of the differences over data.

        Raises
        ------
        DataError
            If the models have other data, the same in another order, or in other groups.
        SettingsError
            If ``other`` is no score.
        ShapeError
            If they do not have the same number of terms.

        Examples
        --------
        >>> import bayeskit as bk
        >>> scores = [bk.sample(bk.exact.radiata_pine(name).target(), progress=False).loo() for name in ("x", "z")]
        >>> difference, error = scores[1].difference(scores[0])
        >>> difference > error > 0
        True
        """
        if not isinstance(other, LeaveOneOutScore):
            raise SettingsError(
                f"other must be the score of a model, as draws.loo() returns, not {type(other).__name__}"
            )
        if len(self.pointwise) != len(other.pointwise):
            raise ShapeError(
                f"the scores have {len(self.pointwise)} and {len(other.pointwise)} terms; give the models the same rows"
            )
        if not same_data and self.data is not None and other.data is not None:
            check_values("the two scores", self.data, other.data)
        each, counts = self.pointwise - other.pointwise[self._places_in(other)], self.counts
        total, number = float(counts @ each), float(counts.sum())
        variance = float(counts @ (each - total / number).square()) / max(number - 1, 1)
        return total, math.sqrt(number * variance)

    def _places_in(self, other: LeaveOneOutScore) -> Tensor:
        """Return the place of each group in another score, ``(n,)``."""
        own, theirs = self.members, other.members
        places = torch.arange(len(self.pointwise), device=other.pointwise.device)
        if own is not None and theirs is not None and len(own) == len(theirs):
            pairs = torch.stack([own, theirs], 1).unique(dim=0)
        elif sorted(map(repr, self.groups)) == sorted(map(repr, other.groups)):
            found = [list(map(repr, other.groups)).index(label) for label in map(repr, self.groups)]
            pairs = torch.stack([torch.arange(len(found)), torch.tensor(found, dtype=torch.long)], 1)
        else:
            pairs = torch.zeros(0, 2, dtype=torch.long)
        if not len(pairs) and (own is None) == (theirs is None):
            return places
        if len(pairs) != len(places):
            raise DataError("the two scores leave out other groups of the data; give both the same by=")
        places[pairs[:, 0]] = pairs[:, 1].to(places)
        return places

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per datum: its site and place, ``elpd``, ``monte_carlo_error`` and both Pareto ``k``."""
        import pandas as pd

        indices = {site: (list(sizes), _places(sizes).numpy()) for site, sizes in self.sites.items()}
        places = [
            pd.DataFrame(index, columns=names).assign(site=site)[["site", *names]]
            for site, (names, index) in indices.items()
        ]
        # Whole numbers that may be missing: a dimension of another site.
        table = pd.concat([place.astype(dict.fromkeys(place.columns[1:], "Int64")) for place in places])
        values = {
            "elpd": self.pointwise,
            "monte_carlo_error": self.pointwise_error,
            "pareto_k": self.pareto_k,
            "pareto_k_before": self.pareto_k_before,
        }
        table = table.reset_index(drop=True).assign(**{name: x.cpu().numpy() for name, x in values.items()})
        return table.assign(group=list(self.groups)) if self.groups else table

    def to_arviz(self) -> Any:
        """Return ArviZ's ``ELPDData``, which ``arviz.compare({"name": ...})`` takes.

        Raises
        ------
        ModelError
            If a term stands for several data, which ArviZ does not know.
        """
        if bool((self.counts != 1).any()):
            raise ModelError(
                "ArviZ has no counts: some terms of this likelihood stand for several data, or for masked ones; "
                "compare by the differences of elpd and pointwise"
            )
        from bayeskit._core.compatibility import elpd_data

        return elpd_data(
            self.elpd,
            self.standard_error,
            self.p_loo,
            self.pointwise,
            self.pareto_k,
            self.num_draws,
            self.threshold,
            bool((~(self.pareto_k <= self.threshold)).any()),
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot Pareto ``k`` of each datum, hollow where it was higher before moment matching, and the threshold."""
        from bayeskit._core.plots import BLUE, GREY, VERMILION, axes_or_new

        ax = axes_or_new(ax, 7.0, 4.0)
        number, k, before = torch.arange(len(self.pareto_k)), self.pareto_k.cpu(), self.pareto_k_before.cpu()
        moved, bad = self.matched.cpu() & before.isfinite(), ~(k <= self.threshold)
        ax.vlines(number[moved].numpy(), k[moved].numpy(), before[moved].numpy(), color=GREY, linewidth=0.8)
        for chosen, value, colour, face, label in (
            (moved, before, GREY, "white", "before moment matching"),
            (~bad, k, BLUE, BLUE, "reliable"),
            (bad, k, VERMILION, VERMILION, "not reliable"),
        ):
            if bool(chosen.any()):
                x, y = number[chosen].numpy(), value[chosen].numpy()
                ax.plot(x, y, "o", color=colour, mfc=face, markersize=4, label=label)
        ax.axhline(self.threshold, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        ax.set(xlabel="datum", ylabel="Pareto k")
        ax.legend(frameon=False)
        return ax

    def _repr_html_(self) -> str:
        worst = self.to_pandas().sort_values("pareto_k", ascending=False, kind="stable").head(_SHOWN)
        headline, flag, _ = str(self).partition("  NOT TRUSTED")
        table = frame_table("Data with the largest Pareto k", worst)
        return result_html(headline + flag, [table], warnings_listed("leave-one-out", self.warnings))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return (
            f"leave-one-out of {int(self.counts.sum())} data: elpd {self.elpd:.2f} +- {self.standard_error:.2f}, "
            f"p_loo {self.p_loo:.2f}, Monte Carlo error {self.monte_carlo_error:.2g}, "
            f"Pareto k up to {float(self.pareto_k.max()):.2f}, {int(self.matched.sum())} moment-matched{flag}"
        )


def _places(sizes: dict[str, int]) -> Tensor:
    """Return the indices of all entries, ``(n, dimensions)``."""
    if not sizes:
        return torch.zeros(1, 0, dtype=torch.long)
    return torch.cartesian_prod(*map(torch.arange, sizes.values())).reshape(-1, len(sizes))


def _label(sites: dict[str, dict[str, int]], number: int) -> str:
    """Return the site and the index of a datum."""
    entries = [(site, sizes) for site, sizes in sites.items() for _ in range(math.prod(sizes.values()))]
    site, sizes = entries[number]
    place = _places(sizes)[number - entries.index(entries[number])].tolist()
    return f"{site}[{', '.join(map(str, place))}]" if place else site


def leave_one_out(
    target: Target,
    unconstrained: Tensor,
    *,
    log_density: Tensor | None = None,
    diverging: Tensor | None = None,
    by: Groups | None = None,
    moment_matching: bool = True,
) -> LeaveOneOutScore:
    """Return the log predictive density of each datum given all others, from posterior draws.

    :meth:`bayeskit.Draws.loo` calls it, and describes the method.

    Parameters
    ----------
    target : Target
        Its likelihood has to be a sum over data.
    unconstrained : Tensor
        Posterior draws, ``(chains, draws, d)``.
    log_density : Tensor, optional
        Log density of the draws, ``(chains, draws)``.
    diverging : Tensor, optional
        Whether a transition diverged, ``(chains, draws)``.
    by, moment_matching
        As in :meth:`bayeskit.Draws.loo`.

    Returns
    -------
    LeaveOneOutScore

    Raises
    ------
    DrawsError
        If chains have fewer than 8 draws, or none has a finite density throughout.
    ModelError, ShapeError, UnknownNameError
        If the likelihood is no sum over data, or ``by`` does not fit it; if ``log_density`` or ``diverging`` has
        another shape than the draws.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit._leave_one_out import leave_one_out
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> y = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    >>> u = 0.75 + 0.5 * torch.randn(1, 4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> score = leave_one_out(bk.Target.from_pyro(model, y), u)
    >>> exact = dist.Normal((y.sum() - y) / 3, (1 + 1 / 3) ** 0.5).log_prob(y)
    >>> bool(((score.pointwise - exact).abs() < 4 * score.pointwise_error).all())
    True
    """
    data = LeftOut(target, by)
    chains, count = unconstrained.shape[:2]
    if count < _MIN_DRAWS:
        raise DrawsError(f"chains of {count} draws are too short to estimate errors; draw at least {_MIN_DRAWS}")
    log_density = target.log_density(unconstrained) if log_density is None else log_density
    for name, value in (("log_density", log_density), ("diverging", diverging)):
        if value is not None and value.shape != (chains, count):
            raise ShapeError(f"{name} must have shape {(chains, count)}, as the draws have, not {tuple(value.shape)}")
    finite = log_density.isfinite()
    alive = finite.all(1)
    if not bool(alive.any()):
        raise DrawsError("no chain has a finite density at all of its draws; check the model and the starting points")
    problems, _ = chain_problems(
        unconstrained[alive],
        log_density[alive],
        None if diverging is None else diverging[alive],
        int((finite.any(1) & ~alive).sum()),  # chains without any finite density never left their start
    )
    draws = _PosteriorDraws(data, unconstrained[alive], log_density[alive])
    each = draws.log_likelihood.T  # (n, draws)
    threshold = min(MAX_PARETO_SHAPE, 1 - 1 / math.log10(each.shape[1]))
    found = _Scores.empty(len(each), int(alive.sum()), count, each.device)
    for which in torch.arange(len(each), device=each.device).split(max(1, _AT_A_TIME // each.shape[1])):
        log_weights, shape = pareto_smoothed(-each[which])
        found.put(which, log_weights, each[which], shape)
    before = found.shape.clone()
    raised = log_mean_exp(each.unsqueeze(-1)) - found.elpd
    if moment_matching:
        size = max(1, _AT_A_TIME // (each.shape[1] * target.dim))
        influential = ((before > _FINITE_VARIANCE) | (raised > _INFLUENTIAL)).nonzero().flatten()
        with progress_bar("leave one out", len(influential)) as bar:
            for begin in range(0, len(influential), size):
                which = influential[begin : begin + size]
                found.put(which, *_mixture(draws, which, _without_datum(draws, which)), draws.moves)
                which = which[~(found.shape[which] <= _FINITE_VARIANCE)]
                if len(which):
                    maps = _matched(draws, which, -each[which], before[which])
                    log_weights, one, shape = _mixture(draws, which, _of_influence(draws, which, maps))
                    better = shape < found.shape[which]
                    found.put(which[better], log_weights[better], one[better], shape[better], draws.moves)
                bar.update(min(begin + size, len(influential)))
    # Masked data have likelihood one everywhere, up to rounding if sites were summed out.
    counts = torch.where(each.abs().amax(1) > 8 * torch.finfo(target.dtype).eps, data.counts, 0.0)
    doubtful = ((found.shape > threshold) & (counts > 0)).nonzero().flatten().tolist()
    if doubtful:
        problems.append(_doubt(data.sites, doubtful, found.shape, float(counts.sum()), threshold, moment_matching))
    raised = log_mean_exp(each.unsqueeze(-1)) - found.elpd
    typical = float(raised[counts > 0].median())
    if len(each) == 1:
        problems.append(
            "all data are one term, such as a multivariate normal distribution of all rows, so that without it the "
            "prior alone is left: give rows terms of their own, or compare evidences"
        )
    elif typical > _OWN_PARAMETERS:
        problems.append(
            f"a datum determines {typical:.2f} effective parameters by itself (the median over data, above "
            f"{_OWN_PARAMETERS}), so that draws may miss where they are without it, and Pareto k may not show it: "
            "integrate parameters out that belong to a single datum, or sample again without some of the data"
        )
    total = float(counts @ found.elpd)
    if not math.isfinite(total):
        problems.append("a datum has likelihood zero at posterior draws: check the support of the model")
    num_data = float(counts.sum())
    mean = total / num_data
    variance = float(counts @ (found.elpd - mean).square()) / max(num_data - 1, 1)
    return LeaveOneOutScore(
        elpd=total,
        standard_error=math.sqrt(num_data * variance),
        monte_carlo_error=float(mean_error(found.influence_of_sum(counts))),
        p_loo=float(counts @ raised),
        pointwise=found.elpd,
        pointwise_error=found.error,
        pareto_k=found.shape,
        pareto_k_before=before,
        counts=counts,
        threshold=threshold,
        num_draws=each.shape[1],
        sites=data.sites,
        num_evaluations=data.num_evaluations,
        warnings=tuple(problems),
        data=observed_values(target),
        groups=data.labels,
        members=data.members,
    )


def _doubt(
    sites: dict[str, dict[str, int]], doubtful: list[int], shape: Tensor, num_data: float, limit: float, matched: bool
) -> str:
    worst = sorted(doubtful, key=lambda i: -float(shape[i]))[:_NAMED]
    named = ", ".join(f"{_label(sites, i)}: {float(shape[i]):.2f}" for i in worst)
    more = "" if len(doubtful) <= _NAMED else " and others"
    remedy = "sample again without them for their predictive densities, or take a likelihood with heavier tails"
    return (
        f"a few draws dominate the predictive densities of {len(doubtful)} of {num_data:.0f} data (Pareto k > "
        f"{limit:.2f}; {named}{more}): {remedy if matched else 'leave moment_matching on'}"
    )


# Data that are left out, and the draws.


class LeftOut:
    """The data of a target, which are left out one by one or in groups."""

    def __init__(self, target: Target, by: Groups | None = None) -> None:
        self.target = target
        density = target.density
        plate = by if isinstance(by, str) and isinstance(density, PyroDensity) and density.sums_out else None
        self._observations = Observations(target, plate=plate, keep_factors=True)
        if kept := self._observations.kept:
            # Whether a factor holds data, if only by their number, cannot be seen.
            warn_user(
                f"the factor {', '.join(map(repr, kept))} is outside of every plate and counts as a part of the prior, "
                "which stays whatever is left out; if it depends on data, put a term for each row into their plate",
                DataWarning,
            )
        self.num_evaluations = 0
        dimensions = target.dimensions()
        self.sites = {
            site: _named(site, shape, dimensions.get(site, ()) if plate is None else (plate,))
            for site, shape in self._observations.shapes.items()
        }
        self.counts = self._observations.counts
        self.labels: tuple[Any, ...] = ()
        self._group: Tensor | None = None
        if by is None:
            self._join_rows()
        elif plate is None:
            name, group = (by, _by_plate(by, self.sites)) if isinstance(by, str) else ("group", self._by_labels(by))
            self._group = group.to(target.device)
            size = int(group.max()) + 1
            self.sites, self.counts = {name: {name: size}}, self.counts.new_ones(size)

    @property
    def members(self) -> Tensor | None:
        """Group of each term of the likelihood, ``(terms,)``, or None."""
        return None if self._group is None else self._group.cpu()

    def _join_rows(self) -> None:
        """Let sites that share all of their plates, such as several outcomes of a row, be one datum."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for site, sizes in self.sites.items():
            own = not sizes or any(name.startswith(f"{site}_dim_") for name in sizes)
            rows.setdefault((site,) if own else tuple(sizes), []).append(site)
        if len(rows) == len(self.sites) or not bool((self.counts == 1).all()):
            return
        begin, places, joined = 0, dict[str, Tensor](), dict[str, dict[str, int]]()
        for members in rows.values():
            size = math.prod(self.sites[members[0]].values())
            places |= dict.fromkeys(members, begin + torch.arange(size))
            joined[", ".join(members)] = self.sites[members[0]]
            begin += size
        self._group = torch.cat([places[site] for site in self.sites]).to(self.target.device)
        self.sites, self.counts = joined, self.counts.new_ones(begin)

    def _by_labels(self, labels: Any) -> Tensor:
        """Return the group of each term, ``(terms,)``, from labels of terms, or of rows with several terms each."""
        if isinstance(labels, Mapping):
            labels = self._of_sites(labels)
        given, size = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels), len(self.counts)
        sites, counts = self.sites, self.counts
        self._join_rows()
        (rows, self._group), self.sites, self.counts = (self._group, None), sites, counts
        num_rows = size if rows is None else int(rows.max()) + 1
        if given.shape not in ((size,), (num_rows,)):
            several = "" if num_rows == size else f"{num_rows} labels, the group of each row, or "
            raise ShapeError(
                f"by must be the name of a plate, {several}{size} labels, the group of each datum, not labels of shape "
                f"{given.shape}"
            )
        from pandas import isna

        if (missing := isna(given)).any():
            raise DataError(f"by has no label at place {int(missing.argmax())}; give each datum a group")
        self.labels, codes = _coded(given)
        return codes if given.shape == (size,) or rows is None else codes[rows.cpu()]

    def _of_sites(self, labels: Mapping[str, Any]) -> np.ndarray:
        """Return the labels of all sites in their order; raise if a site has none, or others than data."""
        for site in labels:
            if site not in self.sites:
                raise unknown_name("observed site", site, list(self.sites))
        given = {site: np.asarray(value).reshape(-1) for site, value in labels.items()}
        for site, sizes in self.sites.items():
            if site not in given:
                raise UnknownNameError(f"by has no labels of the observed site {site!r}")
            if len(given[site]) != (size := math.prod(sizes.values())):
                raise ShapeError(f"by has {len(given[site])} labels of site {site!r}, which has {size} data")
        return np.concatenate([given[site] for site in self.sites])

    def log_likelihood(self, u: Tensor) -> Tensor:
        """Return the log likelihood of each datum or group, ``(m, d) -> (m, n)``, in float64."""
        self.num_evaluations += len(u)
        each = self._observations.log_likelihood(u)
        if self._group is None:
            return each
        return each.new_zeros(len(u), len(self.counts)).index_add(1, self._group, each * self._observations.counts)

    def without(self, u: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log density without a datum and the datum's, ``(m, draws, d), (m,) -> (m, draws)`` each."""
        flat, index = u.flatten(0, 1), which.repeat_interleave(u.shape[1]).unsqueeze(1)
        rows = max(1, _AT_A_TIME // len(self.counts))
        parts = [self._without(*part) for part in zip(flat.split(rows), index.split(rows), strict=True)]
        rest, one = (torch.cat(x).reshape(u.shape[:2]) for x in zip(*parts, strict=True))
        return _known(rest), _known(one)

    def _without(self, u: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        each = self.log_likelihood(u)
        times = self.counts.expand_as(each).scatter_add(1, index, -torch.ones_like(index, dtype=each.dtype))
        # A likelihood of zero does not count where its datum is left out.
        rest = torch.where(times == 0, 0.0, times * each).sum(1)
        return self._observations.log_of_others(u) + rest, each.gather(1, index).squeeze(1)


def _coded(labels: np.ndarray) -> tuple[tuple[Any, ...], Tensor]:
    """Return the labels that occur, in the order of their first data, and the place of each datum's, ``(n,)``."""
    places = {label: place for place, label in enumerate(dict.fromkeys(labels.tolist()))}
    return tuple(places), torch.tensor([places[label] for label in labels.tolist()])


def _known(log_density: Tensor) -> Tensor:
    """Take unknown densities, at points that a map has moved too far, for zero."""
    return torch.where(log_density.isnan(), -torch.inf, log_density)


def _named(site: str, shape: Sequence[int], names: Sequence[str | None]) -> dict[str, int]:
    """Return the sizes of the dimensions of a site, by plate where there is one."""
    given = [*names, *[None] * len(shape)]
    return {named or f"{site}_dim_{i}": size for i, (named, size) in enumerate(zip(given, shape, strict=False))}


def _by_plate(plate: str, sites: dict[str, dict[str, int]]) -> Tensor:
    """Return for each datum its place in a plate, ``(n,)``."""
    known = dict.fromkeys(name for sizes in sites.values() for name in sizes)
    if plate not in known:
        raise unknown_name("plate of observations", plate, list(known))
    outside = [site for site, sizes in sites.items() if plate not in sizes]
    if outside:
        raise ModelError(
            f"site {outside[0]!r} is outside of plate {plate!r}, so its data belong to no group of it; pass by= as a "
            "sequence of numbers, the group of each datum"
        )
    return torch.cat([_places(sizes)[:, list(sizes).index(plate)] for sizes in sites.values()])


class _PosteriorDraws:
    """Draws around their mean, the log densities of their data, and which of them move for a mixture."""

    def __init__(self, data: LeftOut, unconstrained: Tensor, log_density: Tensor) -> None:
        self.data = data
        flat = unconstrained.flatten(0, 1)
        rows = max(1, _AT_A_TIME // len(data.counts))
        self.log_likelihood = torch.cat([data.log_likelihood(part) for part in flat.split(rows)])
        self.log_density = log_density.flatten().to(torch.float64)
        self.centre = flat.to(torch.float64).mean(0)
        self.around = flat.to(torch.float64) - self.centre
        #: Every second draw of each chain, so that all chains are in both parts.
        self.moves = (torch.arange(unconstrained.shape[1], device=flat.device) % 2 == 0).repeat(len(unconstrained))


@dataclass
class _Scores:
    """Log predictive densities of data and the influences of draws on them."""

    elpd: Tensor
    error: Tensor
    shape: Tensor
    influence: Tensor  # (n, chains, draws)

    @classmethod
    def empty(cls, num_data: int, chains: int, count: int, device: torch.device) -> _Scores:
        one = torch.full((num_data,), torch.nan, dtype=torch.float64, device=device)
        return cls(one, one.clone(), one.clone(), one.new_empty(num_data, chains, count))

    def put(self, which: Tensor, log_weights: Tensor, one: Tensor, shape: Tensor, part: Tensor | None = None) -> None:
        """Enter data ``which`` by normalised weights and their log likelihoods ``(m, draws)``, of two ``part``s."""
        if not len(which):
            return
        joint = log_weights + one
        influence = (joint.softmax(-1) - log_weights.exp()) * joint.shape[1]
        if part is not None:
            # The number of draws of each part is fixed, so that the difference of their means is no error.
            for rows in (part, ~part):
                influence[:, rows] -= influence[:, rows].mean(-1, keepdim=True)
        self.elpd[which], self.shape[which] = joint.logsumexp(-1), shape
        self.influence[which] = influence.reshape(-1, *self.influence.shape[1:])
        self.error[which] = mean_error(self.influence[which])

    def influence_of_sum(self, counts: Tensor) -> Tensor:
        """Return the influence of each draw on the sum over data, ``(chains, draws)``."""
        return torch.tensordot(counts, self.influence, 1)


# Moment matching: an affine map of the draws for each datum.


class AffineMaps(NamedTuple):
    """Affine maps of the distances from the centre, ``z -> shift + linear z``, one for each datum."""

    linear: Tensor  # lower triangular (m, d, d), or diagonal (m, d)
    shift: Tensor  # (m, d)

    def of(self, which: Tensor) -> AffineMaps:
        """Return some of the maps."""
        return AffineMaps(self.linear[which], self.shift[which])

    def forth(self, z: Tensor) -> Tensor:
        """Map ``(draws, d)`` to ``(m, draws, d)``."""
        linear = self.linear
        return self.shift.unsqueeze(1) + (z * linear.unsqueeze(1) if linear.dim() == 2 else z @ linear.mT)

    def back(self, z: Tensor) -> Tensor:
        """Map ``(draws, d)`` to ``(m, draws, d)`` by the inverse maps."""
        linear, rest = self.linear, z - self.shift.unsqueeze(1)
        if linear.dim() == 2:
            return rest / linear.unsqueeze(1)
        return torch.linalg.solve_triangular(linear, rest.mT, upper=False).mT

    @property
    def log_determinant(self) -> Tensor:
        """Log of the factor by which volumes grow, ``(m,)``."""
        diagonal = self.linear if self.linear.dim() == 2 else self.linear.diagonal(dim1=-2, dim2=-1)
        return diagonal.log().sum(-1)


class WideMaps(NamedTuple):
    """Affine maps that then move a coordinate of distances from their centre, ``t = b'y -> factor t + offset``."""

    maps: AffineMaps
    direction: Tensor  # c, along which points move, (m, d)
    coordinate: Tensor  # b, with b'c = 1, (m, d)
    factor: Tensor  # (m,)
    offset: Tensor  # (m,)

    def forth(self, z: Tensor) -> Tensor:
        """Map ``(draws, d)`` to ``(m, draws, d)``."""
        y = self.maps.forth(z)
        return self._moved(y, lambda t: self.factor[:, None, None] * t + self.offset[:, None, None])

    def back(self, z: Tensor) -> Tensor:
        """Map ``(draws, d)`` to ``(m, draws, d)`` by the inverse maps."""
        y = z.expand(len(self.factor), *z.shape[-2:])
        return self.maps.back(self._moved(y, lambda t: (t - self.offset[:, None, None]) / self.factor[:, None, None]))

    def _moved(self, y: Tensor, new: Callable[[Tensor], Tensor]) -> Tensor:
        t = (y - self.maps.shift.unsqueeze(1)) @ self.coordinate.unsqueeze(-1)  # (m, draws, 1)
        return y + (new(t) - t) * self.direction.unsqueeze(1)

    @property
    def log_determinant(self) -> Tensor:
        """Log of the factor by which volumes grow, ``(m,)``."""
        return self.maps.log_determinant + self.factor.log()


def _of_influence(draws: _PosteriorDraws, which: Tensor, maps: AffineMaps) -> WideMaps:
    """Widen maps along the direction in which the log likelihood of the datum changes, whose coordinate has variance 1.

    The posterior without a datum is wider in this direction, and draws with it may show neither how much wider nor, by
    their weights, that they do not.
    """
    z, one = draws.around, draws.log_likelihood[:, which].T
    full = len(z) >= _DRAWS_PER_DIMENSION * z.shape[1]
    scale = torch.linalg.cholesky_ex(z.T @ z / len(z)).L if full else z.square().mean(0).sqrt().diag()
    white = torch.linalg.solve_triangular(scale.mT, z, upper=True, left=False)
    centred = torch.where(one.isfinite(), one - _finite_mean(one), 0.0) / len(z)
    line = centred @ white
    # Principal Hessian directions (Li 1992), by the power method, beside the mean gradient.
    v = torch.nn.functional.normalize(line + 1e-3 * line.norm(dim=1, keepdim=True), dim=1)
    for _ in range(_POWERS):
        bent = v
        for _ in range(2):
            bent = (centred * (bent @ white.T)) @ white
        v = torch.nn.functional.normalize(bent + line * (line * v).sum(1, keepdim=True), dim=1)
    wide = torch.full_like(v[:, 0], _STRETCH)
    coordinate = torch.linalg.solve_triangular(scale, v, upper=False, left=False)
    return WideMaps(maps, v @ scale.mT, coordinate, wide, torch.zeros_like(wide))


def _finite_mean(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, torch.nan).nanmean(1, keepdim=True)


def _without_datum(draws: _PosteriorDraws, which: Tensor) -> WideMaps:
    """Return maps to the posterior without a datum, were it normal and the log likelihood of the datum quadratic."""
    z, count = draws.around, len(which)
    identity = AffineMaps(torch.ones_like(z[0]).expand(count, -1), torch.zeros_like(z[:1]).expand(count, -1))
    found = _of_influence(draws, which, identity)
    t, one = found.coordinate @ z.T, draws.log_likelihood[:, which].T  # (m, draws)
    terms = torch.stack([torch.ones_like(t), t, t.square()], -1)
    # Where a datum has likelihood zero, a line through its logarithm means nothing.
    known = one.isfinite()
    terms, one = torch.where(known.unsqueeze(-1), terms, 0.0), torch.where(known, one, 0.0)
    gram, moments = terms.mT @ terms, terms.mT @ one.unsqueeze(-1)
    line, curve = torch.linalg.lstsq(gram, moments).solution[:, 1:, 0].unbind(1)
    variance = 1 / (1 + 2 * curve).clamp(min=_LEAST_PRECISION)
    return found._replace(factor=_STRETCH * variance.sqrt(), offset=-line * variance)


def _matched(draws: _PosteriorDraws, which: Tensor, log_weights: Tensor, shape: Tensor) -> AffineMaps:
    """Return maps that bring the draws closer to the posterior without a datum, identities where none does."""
    z = draws.around
    count, dim = z.shape
    full = count >= _DRAWS_PER_DIMENSION * dim
    factor = torch.linalg.cholesky_ex(z.T @ z / count).L if full else z
    identity = torch.eye(dim, dtype=z.dtype, device=z.device) if full else torch.ones_like(z[0])
    linear = identity.expand(len(which), *identity.shape).clone()
    maps = AffineMaps(linear, torch.zeros_like(z[:1]).expand(len(which), dim).clone())
    log_weights, shape = pareto_smoothed(log_weights)[0], shape.clone()
    moving = shape > _FINITE_VARIANCE
    for _ in range(_ROUNDS):
        if not bool(moving.any()):
            break
        waiting = moving.nonzero().flatten()
        # The simplest map that helps: of what changes in the mean, and the variances; of all of the mean; of all.
        for moments in _MOMENTS[: 4 if full else 3]:
            tried = _moved(maps.of(waiting), z, log_weights[waiting].exp(), moments, factor)
            point = draws.centre + tried.forth(z)
            rest, _ = draws.data.without(point.to(draws.data.target.dtype), which[waiting])
            ratio = _known(rest - draws.log_density + tried.log_determinant.unsqueeze(1))
            new_weights, new_shape = pareto_smoothed(ratio)
            better = new_shape < shape[waiting]
            taken = waiting[better]
            maps.linear[taken], maps.shift[taken] = tried.linear[better], tried.shift[better]
            log_weights[taken], shape[taken] = new_weights[better], new_shape[better]
            waiting = waiting[~better]
            if not len(waiting):
                break
        moving = moving.index_fill(0, waiting, False) & (shape > _FINITE_VARIANCE)
    return maps


_MOMENTS = ("changes of the mean", "changes of mean and variances", "mean", "covariance")


def _moved(maps: AffineMaps, z: Tensor, weights: Tensor, moments: str, factor: Tensor) -> AffineMaps:
    """Return maps to moments of the draws where they are, with their weights."""
    here = maps.forth(z)
    mean = (weights.unsqueeze(1) @ here).squeeze(1)
    if moments == "mean":
        return AffineMaps(maps.linear, mean)
    apart = here - mean.unsqueeze(1)
    if moments != "covariance":
        # Most of many dimensions do not depend on the datum: what may be the error of few weights is left out.
        effective, variance = 1 / weights.square().sum(1, keepdim=True), here.var(1, correction=0)
        shift = maps.shift + _significant(mean - maps.shift, variance / effective)
        if moments == "changes of the mean":
            return AffineMaps(maps.linear, shift)
        growth = ((weights.unsqueeze(1) @ apart.square()).squeeze(1) / variance).log()
        scale = (0.5 * _significant(growth, 2 / effective)).exp()
        return AffineMaps(maps.linear * (scale if maps.linear.dim() == 2 else scale.unsqueeze(-1)), shift)
    wanted, _ = torch.linalg.cholesky_ex(apart.mT @ (weights.unsqueeze(-1) * apart))
    # All draws have the covariance of the first ones, mapped; so the map before does not matter.
    return AffineMaps(torch.linalg.solve_triangular(factor, wanted, upper=False, left=False), mean)


def _significant(change: Tensor, variance: Tensor) -> Tensor:
    """Shrink changes towards zero by their error, to zero where they are less than two errors."""
    return change * (1 - _SIGNIFICANT * variance / change.square()).clamp(min=0.0)


def _mixture(draws: _PosteriorDraws, which: Tensor, maps: WideMaps) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised log weights and log likelihoods ``(m, draws)`` and ``k`` of half moved, half unmoved draws."""
    # The unmoved half keeps the numerator reliable, the integral of the posterior with the datum.
    data, moves = draws.data, draws.moves
    z, dtype = draws.around, data.target.dtype
    rest = z.new_empty(len(which), len(z))
    one, plain, mapped = (torch.empty_like(rest) for _ in range(3))
    rest[:, moves], one[:, moves] = data.without((draws.centre + maps.forth(z[moves])).to(dtype), which)
    one[:, ~moves] = draws.log_likelihood[~moves][:, which].T
    rest[:, ~moves] = draws.log_density[~moves] - one[:, ~moves]
    plain[:, moves] = rest[:, moves] + one[:, moves]
    plain[:, ~moves] = draws.log_density[~moves]
    origin = (draws.centre + maps.back(z[~moves])).to(dtype)
    mapped[:, moves] = draws.log_density[moves].expand(len(which), -1)
    mapped[:, ~moves] = _known(data.target.log_density(origin).to(z.dtype))
    data.num_evaluations += origin[..., 0].numel()
    mapped = mapped - maps.log_determinant.unsqueeze(1)
    share = float(moves.to(z.dtype).mean())
    proposal = torch.logaddexp(plain + math.log(1 - share), mapped + math.log(share))
    log_weights, shape = pareto_smoothed(_known(rest - proposal))
    return log_weights, one, shape
