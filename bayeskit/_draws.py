"""Draws, the result of every sampler."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from bayeskit._arviz_data import DataForArviz, pointwise_log_likelihood
from bayeskit._core.compatibility import as_inference_data, summary, to_datasets
from bayeskit._core.convergence import stands_still
from bayeskit._core.folders import Schema
from bayeskit._core.inputs import real_number, unknown_name, whole_number
from bayeskit._core.page import result_html
from bayeskit._core.storage import loaded_tensors, save_tensors
from bayeskit._core.summaries import summary_table, without_stillness
from bayeskit._foreign_draws import foreign_draws
from bayeskit._leave_one_out import Groups, LeaveOneOutScore, leave_one_out
from bayeskit._logdensity.labels import DimensionLabels, with_names
from bayeskit._logdensity.outcomes import WithOutcomes
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.target import Target, require_target
from bayeskit._logdensity.unknown_target import UnknownTarget
from bayeskit.errors import DrawsError, ModelError, SettingsError, UnknownNameError

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

_SCHEMA = Schema("draws", 2)
_SAVED = ("unconstrained", "log_prior", "log_likelihood", "beta")
_PREDICTIVE = ("posterior_predictive", "predictions")
_BY_DRAW = ("sample_stats", "sites", "discrete", *_PREDICTIVE)
_SHOWN_SETTINGS = ("sampler", "num_warmup", "seed", "ending")
_ENDINGS = ("interrupted", "time budget", "finished", "converged")  # the worst first


class Continuation(Protocol):
    """A run that can go on from where its chains ended."""

    def longer(self, draws: Draws, num_samples: int, *, time_budget: float | None, progress: bool) -> Draws:
        """Return the draws with ``num_samples`` more of each chain."""
        ...


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of one or more chains, in unconstrained space.

    Attributes
    ----------
    unconstrained : Tensor
        Shape ``(chains, draws, d)``.
    log_prior, log_likelihood : Tensor
        Shape ``(chains, draws)``.
    beta : Tensor
        Inverse temperature of each chain, shape ``(chains,)``.
    sample_stats : dict of Tensor
        ``acceptance_rate``, ``diverging``, ``energy``, ``n_steps``, ``step_size``, each
        ``(chains, draws)``, under ArviZ's names.
    num_gradients : int
        Gradient evaluations spent, warm-up included.
    seconds : float
        Wall-clock time spent.
    settings : dict
        Settings of the run: sampler, warm-up, seed.
    target : Target
        Target of the draws. That of draws that were loaded without it knows names only; its ``has_density`` is False,
        and whatever needs the density raises ``DrawsError``.
    posterior_predictive, predictions : dict of Tensor
        Data drawn from the model at each draw, for its own arguments and for new ones, each ``(chains, draws,
        *shape)``; see :meth:`predictive`.
    discrete : dict of Tensor
        Values of the sites that the target sums out, each ``(chains, draws, *shape)``; see :meth:`infer_discrete`.
    continuation : object, optional
        Where the chains ended, for :meth:`extend`. It is not saved.
    sites : dict of Tensor
        Values of the sites of draws that were loaded without their target, each ``(chains, draws, *shape)``.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1) - 0.919 * 2, lambda u: 0 * u.sum(-1), dim=2,
    ...     sample_prior=lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64))
    >>> draws = bk.sample(target, num_chains=2, num_warmup=50, num_samples=10, seed=0)
    >>> draws.unconstrained.shape
    torch.Size([2, 10, 2])
    """

    unconstrained: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    beta: Tensor
    sample_stats: dict[str, Tensor] = field(default_factory=dict)
    num_gradients: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    target: Target = field(default_factory=UnknownTarget)
    posterior_predictive: dict[str, Tensor] = field(default_factory=dict)
    predictions: dict[str, Tensor] = field(default_factory=dict)
    discrete: dict[str, Tensor] = field(default_factory=dict)
    continuation: Continuation | None = field(default=None, repr=False)
    sites: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not hasattr(self.target, "has_density"):
            if self.target is not None:
                raise SettingsError(f"the target of draws is a Target, not a {type(self.target).__name__}")
            object.__setattr__(self, "target", UnknownTarget())
        if self.unconstrained.dim() != 3:
            raise DrawsError(f"draws must have shape (chains, draws, d), not {tuple(self.unconstrained.shape)}")
        shape = self.unconstrained.shape[:2]
        for name in ("log_prior", "log_likelihood"):
            if getattr(self, name).shape != shape:
                raise DrawsError(f"{name} must have shape {tuple(shape)}, not {tuple(getattr(self, name).shape)}")

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return self.unconstrained.shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws of each chain."""
        return self.unconstrained.shape[1]

    @property
    def log_density(self) -> Tensor:
        """Log density that the chains sample, ``(chains, draws)``."""
        beta = self.beta.unsqueeze(-1)
        return torch.where(beta == 0, self.log_prior, self.log_prior + beta * self.log_likelihood)

    def __getitem__(self, name: str) -> Tensor:
        """Return the values of a site, ``(chains, draws, *shape)``; UnknownNameError for a name that is no site."""
        values = self.values()
        if name in values:
            return values[name]
        for part in _PREDICTIVE:
            if name in getattr(self, part):
                raise UnknownNameError(f"{name!r} has no posterior draws; its predictive ones are .{part}[{name!r}]")
        if self._whole is not None and name in self._whole.whole_numbers():
            raise UnknownNameError(f"{name!r} is observed or summed out; draw a summed-out site by .infer_discrete()")
        raise unknown_name("site", name, list(values))

    def summary(self, **settings: Any) -> pd.DataFrame:
        """Return ArviZ's summary: mean, standard deviation, interval, Monte Carlo errors, effective sizes and R-hat.

        Parameters
        ----------
        **settings
            Of ``arviz.summary``, such as ``round_to=3``, ``var_names=["mean"]`` or ``kind="stats"``. All but the first
            import ArviZ, which takes three seconds.

        Returns
        -------
        DataFrame
            A row for each number among the sites. A number that never moves in a chain has no R-hat, and its effective
            size is zero.

        Raises
        ------
        UnknownNameError
            If ``var_names`` has a name that is no site.

        Examples
        --------
        >>> import bayeskit as bk
        >>> draws = bk.sample(bk.exact.get("beta_binomial").target(), num_samples=500, progress=False)
        >>> draws.summary().index.tolist()
        ['p']
        """
        sites, still = self._posterior(), stands_still(self.unconstrained).any(-1)
        own = settings.keys() <= {"round_to"}
        labels = self.target.labels
        if (chosen := settings.get("var_names")) is not None and settings.get("filter_vars") is None:
            for name in [chosen] if isinstance(chosen, str) else chosen:
                if (name := name.removeprefix("~")) not in sites:
                    raise unknown_name("site", name, list(sites))
        if own:
            table = summary_table(sites, labels.of, **settings)
        else:
            table = summary(sites, labels.dimensions, labels.coords, **settings)
        return without_stillness(table, sites, still, labels.of)

    def plot(
        self,
        kind: Literal["chains", "ranks", "pairs", "energy", "prior"] = "chains",
        names: Sequence[str] | None = None,
    ) -> Figure:
        """Plot the draws.

        Parameters
        ----------
        kind : {"chains", "ranks", "pairs", "energy", "prior"}, default "chains"
            Densities and paths of each chain; ranks of each chain among all, less those of a uniform distribution
            (Sailynoja, Burkner and Vehtari 2022); draws of each pair of quantities; the energy and its changes
            (Betancourt 2016); or the prior beside the posterior. Divergent transitions are marked in red.
        names : sequence of str, optional
            Sites, such as ``"effect"``, or components, such as ``"effect[Iowa]"``; by default the first eight
            components, and five of them for pairs.

        Returns
        -------
        Figure
            Of matplotlib, which a notebook shows; ``figure.savefig(path)`` writes it.

        Raises
        ------
        DrawsError
            If the prior is asked for, and the draws were loaded without their target.
        SettingsError
            If there is no such kind, the draws have no energies, a prior is flat, or a pair has one quantity.
        UnknownNameError
            If there is no such site or component.

        Examples
        --------
        >>> import bayeskit as bk
        >>> draws = bk.sample(bk.exact.get("beta_binomial").target(), num_samples=200, progress=False)
        >>> len(draws.plot().axes), len(draws.plot("prior").axes)
        (2, 1)
        """
        from bayeskit._draws_plots import plot_draws

        return plot_draws(self, kind, names)

    def extend(self, num_samples: int, *, time_budget: float | None = None, progress: bool = True) -> Draws:
        """Return longer chains: these draws, and more from where each chain ended.

        They are those that one longer run returns, bit for bit, as far as both compile the density (a long run compiles
        one that a short run does not). Warm-up is not repeated.

        Parameters
        ----------
        num_samples : int
            Draws of each chain beyond those that there are.
        time_budget : float, optional
            Seconds after which the draws made so far are returned.
        progress : bool, default True

        Returns
        -------
        Draws
            Without ``discrete``, ``posterior_predictive`` and ``predictions``, which are to be drawn again.

        Raises
        ------
        DrawsError
            If it is not known where the chains ended: of draws that were loaded, thinned, selected or joined, whose
            groups ended at different times, or that another sampler made. To go on in another process, give
            ``checkpoint`` to :func:`bayeskit.sample`, and more ``num_samples`` to the same call later.
        SettingsError
            If ``num_samples`` is not a positive whole number.

        Warns
        -----
        SamplingWarning
            As :func:`bayeskit.sample`, of all draws.

        Examples
        --------
        >>> import bayeskit as bk
        >>> draws = bk.sample(bk.exact.get("beta_binomial").target(), num_samples=200, progress=False)
        >>> draws.extend(300, progress=False)
        Draws(4 chains x 500 draws, dim 1, sites: p)
        """
        num_samples = whole_number("num_samples", num_samples, 1)
        if self.continuation is None:
            raise DrawsError(
                "it is not known where the chains of these draws ended, so they cannot be extended: extend the draws "
                "that sample returned, in the same process and before a selection; for draws of a file, give sample a "
                "checkpoint, and call it again with more num_samples"
            )
        return self.continuation.longer(self, num_samples, time_budget=time_budget, progress=progress)

    def thin(self, step: int) -> Draws:
        """Return every ``step``-th draw of each chain, from the last back.

        Raises
        ------
        SettingsError
            If ``step`` is not a positive whole number.

        Examples
        --------
        >>> import bayeskit as bk
        >>> draws = bk.sample(bk.exact.get("beta_binomial").target(), num_samples=500, progress=False)
        >>> draws.thin(10)
        Draws(4 chains x 50 draws, dim 1, sites: p)
        """
        step = whole_number("step", step, 1)
        kept = torch.arange(self.num_draws - 1, -1, -step).flip(0).to(self.unconstrained.device)
        settings = self.settings | {"thinning": step * self.settings.get("thinning", 1)}
        return replace(self, settings=settings, continuation=None, **self._picked(lambda x: x[:, kept]))

    def values(self, deterministic: bool = True) -> dict[str, Tensor]:
        """Return the sites' values, ``{site: (chains, draws, *shape)}``, discrete ones after :meth:`infer_discrete`.

        Draws that were loaded without their target have the values of all sites, whatever ``deterministic``.

        Raises
        ------
        DrawsError
            If there is neither a target nor a value.
        """
        own = self.sites or self.target.constrain(self.unconstrained, deterministic=deterministic)
        return own | self.discrete

    def infer_discrete(self, *, seed: int | torch.Generator = 0) -> Draws:
        """Return the same draws with values of the summed-out sites, drawn jointly from their posterior at each draw.

        Parameters
        ----------
        seed : int or torch.Generator, default 0

        Returns
        -------
        Draws
            With ``discrete``; its sites appear among the values, in the summary and in ArviZ's posterior. Their
            probabilities, which vary less, are those of :meth:`Target.discrete_probabilities`.

        Raises
        ------
        DrawsError
            If the draws were loaded without their target.
        ModelError
            If the model has no site that is summed out.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     distance = pyro.sample("distance", dist.HalfNormal(3.0))
        ...     with pyro.plate("data", len(y)):
        ...         side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        ...         pyro.sample("y", dist.Normal(distance * (2 * side - 1), 1.0), obs=y)
        >>> draws = bk.sample(model, torch.tensor([-2.0, 0.0, 1.0]), num_samples=500, progress=False)
        >>> draws.infer_discrete()["side"].shape
        torch.Size([4, 500, 3])
        """
        if not isinstance(self.target, Target):
            raise ModelError("a target of minibatches sums no site out; make a Target of the same model")
        return replace(self, discrete=self.target.infer_discrete(self.unconstrained, seed=seed))

    def predictive(
        self, *args: Any, seed: int | torch.Generator = 0, redraw: Collection[str] = (), **kwargs: Any
    ) -> Draws:
        """Return the same draws with data drawn from the model at each of them.

        Parameters
        ----------
        *args, **kwargs
            Other arguments for the model, such as new covariates, and data as placeholders of the shape that is to be
            drawn, or None where the model then leaves them out. Without arguments, the model's own are used.
        seed : int or torch.Generator, default 0
        redraw : collection of str, optional
            Latent sites that are drawn anew from their distributions, such as the effects of new groups.

        Returns
        -------
        Draws
            With ``posterior_predictive``, or with ``predictions`` where arguments are given: observed sites, discrete
            and redrawn sites and, in predictions, deterministic sites, each ``(chains, draws, *shape)``. They go on to
            ArviZ's groups of these names.

        Raises
        ------
        DrawsError
            If the draws were loaded without their target.
        ModelError, ShapeError, UnsupportedSiteError, UnknownNameError
            As :meth:`Target.predictive`; ModelError also if the model has nothing to draw, no data above all.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(x, y):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.linspace(-1.0, 1.0, 20)
        >>> draws = bk.sample(model, x, 2 * x, num_samples=200, progress=False)
        >>> draws.predictive().posterior_predictive["y"].shape
        torch.Size([4, 200, 20])
        >>> draws.predictive(torch.tensor([2.0, 3.0]), None).predictions["y"].shape
        torch.Size([4, 200, 2])
        """
        if not isinstance(self.target, Target):
            raise ModelError("data cannot be drawn from a target of minibatches; make a Target of the same model")
        found = self.target.predictive(self.unconstrained, *args, seed=seed, redraw=redraw, **kwargs)
        if not found:
            raise ModelError("the model has no observed site, so there are no data to draw; its draws are .values()")
        return replace(self, predictions=found) if args or kwargs else replace(self, posterior_predictive=found)

    def loo(self, *, by: Groups | None = None, moment_matching: bool = True) -> LeaveOneOutScore:
        """Return leave-one-out cross-validation: the log predictive density of each datum given all others.

        The draws are weighted by the inverse likelihood of the datum, with Pareto-smoothed weights. For a datum that
        matters (Pareto ``k`` above 0.5, or more than 0.02 effective parameters) half of the draws are moved towards the
        posterior without it, and spread twice as far in the direction in which its likelihood changes; moved and
        unmoved draws are weighted as one mixture. The move is that of a normal posterior with a quadratic log
        likelihood of the datum, found by principal Hessian directions, or where this leaves ``k`` above 0.5 by matching
        weighted moments, as far as these differ by more than their error. No model is sampled again.

        Parameters
        ----------
        by : str, sequence, Tensor or mapping, optional
            What is left out together: the name of a plate of the observations, whose members are then left out with all
            that is observed of them, or a label for the group of each datum, for several sites as ``{site: labels}``.
            By default each datum alone; sites that share all of their plates, such as several outcomes of a row, are
            one datum. Where labels are summed out, the plate of the labels has to be named, and the sum is exact. A
            factor outside of every plate, such as a prior of latent values or a soft sum to zero, stays, and a warning
            says so.
        moment_matching : bool, default True

        Returns
        -------
        LeaveOneOutScore
            Not trusted if chains have not converged, ``k`` stays above the threshold for any datum, or most data have
            parameters of their own, which ``k`` may not show.

        Raises
        ------
        DrawsError
            If the draws have no target, are tempered, or are fewer than 8 a chain.
        ModelError
            If the likelihood is no sum of log densities of data, or data are coupled by summed-out sites.
        ShapeError, UnknownNameError
            If ``by`` does not fit the data.

        References
        ----------
        Vehtari, A., Gelman, A., Gabry, J. (2017). Practical Bayesian model evaluation using leave-one-out
        cross-validation and WAIC. Statistics and Computing 27, 1413-1432.
        Paananen, T., Piironen, J., Burkner, P.-C., Vehtari, A. (2021). Implicitly adaptive importance sampling.
        Statistics and Computing 31, 16.
        Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
        Machine Learning Research 25(72).
        Li, K.-C. (1992). On principal Hessian directions for data visualization and dimension reduction. Journal of the
        American Statistical Association 87, 1025-1039.

        Examples
        --------
        The last observation is an outlier, whose weights are reliable only after moment matching:

        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     mean, scale = pyro.sample("mean", dist.Normal(0.0, 5.0)), pyro.sample("scale", dist.HalfNormal(5.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mean, scale), obs=y)
        >>> draws = bk.sample(model, torch.tensor([0.2, -0.4, 0.1, 0.3, -0.1, 0.0, -0.2, 0.1, 2.0]), progress=False)
        >>> score = draws.loo()
        >>> score.trusted, score.matched.tolist()[-1], bool(score.pareto_k_before[-1] > 0.7)
        (True, True, True)
        """
        if not isinstance(self.target, Target):
            raise ModelError("a target of minibatches has no likelihood of all data; make a Target of the same model")
        if not bool((self.beta == 1).all()):
            raise DrawsError("the draws are tempered (beta below 1); loo() needs draws from the posterior")
        diverging = self.sample_stats.get("diverging")
        return leave_one_out(
            require_target(self),
            self.unconstrained,
            log_density=self.log_density,
            diverging=diverging,
            by=by,
            moment_matching=moment_matching,
        )

    def to_arviz(
        self,
        *,
        prior: Draws | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
        dims: Mapping[str, Sequence[str]] | None = None,
    ) -> Any:
        """Return the draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Groups are ``posterior`` (constrained sites and deterministic sites), ``sample_stats`` (``lp``, ``diverging``,
        ``acceptance_rate``, ``energy``, ``n_steps``, ``step_size``, ``log_prior``, ``log_likelihood``), ``log_prior``
        (of the constrained values), where known ``log_likelihood`` of single observations, ``observed_data`` and
        ``constant_data``, and ``posterior_predictive`` and ``predictions`` after :meth:`predictive`. Prior draws have
        ``prior`` and ``prior_predictive``. Dimensions have the names of their plates.

        Parameters
        ----------
        prior : Draws, optional
            Of :func:`bayeskit.prior_predictive`; adds its groups.
        coords : mapping of str to sequence, optional
            Labels along dimensions, such as ``{"group": ["A", "B"]}``; by default numbers from 0.
        dims : mapping of str to sequence of str, optional
            Names of the last dimensions of a site, where plates do not name them.

        Raises
        ------
        ShapeError
            If labels or names do not fit the sites.
        """
        return as_inference_data(self.to_datasets(prior=prior, coords=coords, dims=dims))

    def to_datasets(
        self,
        *,
        prior: Draws | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
        dims: Mapping[str, Sequence[str]] | None = None,
    ) -> dict[str, xr.Dataset]:
        """Return the groups of :meth:`to_arviz`, each as an ``xarray.Dataset``; arguments as there."""
        facts = {"sampling_time": float(self.seconds), "num_gradients": int(self.num_gradients)} | self.settings
        if bool((self.beta != 1).any()):
            facts["beta"] = float(self.beta.min())
        names = self._names(dims or {})
        coords = {**self.target.labels.coords, **(coords or {})}
        of_data = DataForArviz(self.target, names, coords)
        if bool((self.beta == 0).all()):
            groups = {"prior": of_data.whole(self._posterior())}
            groups["prior_predictive"] = of_data.counted(self.posterior_predictive)
            return to_datasets(groups, facts, of_data.names, of_data.coords)
        stats = {"lp": self.log_density}
        if self._whole is None or self._whole.is_split:
            stats |= {"log_prior": self.log_prior, "log_likelihood": self.log_likelihood}
        groups = {
            "posterior": of_data.whole(self._posterior()),
            "sample_stats": stats | self.sample_stats,
            "log_likelihood": of_data.counted(pointwise_log_likelihood(self.target, self.unconstrained)),
            "log_prior": self._log_prior(),
            "posterior_predictive": of_data.counted(self.posterior_predictive),
        }
        datasets = to_datasets(groups, facts, of_data.names, of_data.coords)
        # New data have labels of their own, unless they are as many.
        sizes = {
            plate: size
            for site, value in self.predictions.items()
            for plate, size in zip(names.get(site, ()), value.shape[2:], strict=False)
        }
        fitting = {plate: labels for plate, labels in coords.items() if len(labels) == sizes.get(plate)}
        datasets |= to_datasets({"predictions": of_data.whole(self.predictions)}, facts, names, fitting)
        if self._whole is not None:
            observed, constant = self._whole.named_data()
            data = {"observed_data": of_data.counted(observed, 0), "constant_data": constant}
            datasets |= to_datasets(data, facts, of_data.names, of_data.coords, sampled=False)
        return datasets | ({} if prior is None else prior.to_datasets(coords=coords, dims=dims))

    def _names(self, given: Mapping[str, Sequence[str]]) -> dict[str, tuple[str | None, ...]]:
        """Return names of the dimensions of sites: of their plates, or as given."""
        return with_names(self.target.labels.dimensions, given)

    def _log_prior(self) -> dict[str, Tensor]:
        """Return the log prior density of the constrained values, which is what ArviZ scales by powers."""
        if self._whole is None or not self._whole.is_split:
            return {}
        try:
            return {"log_prior": self.log_prior - self._whole.log_jacobian(self.unconstrained)}
        except ModelError:
            return {}

    @property
    def _whole(self) -> Target | None:
        """The target, unless it is unknown or one of minibatches."""
        return self.target if isinstance(self.target, Target) and self.target.has_density else None

    def _posterior(self) -> dict[str, Tensor]:
        return {"u": self.unconstrained} if not (self.target.has_density or self.sites) else self.values()

    def select(self, chains: Tensor | Sequence[int]) -> Draws:
        """Return the draws of some chains; cost and settings stay those of the whole run.

        Parameters
        ----------
        chains : Tensor or sequence of int
            Indices, or a boolean for each chain.
        """
        index = torch.as_tensor(chains, device=self.unconstrained.device)
        return replace(self, beta=self.beta[index], continuation=None, **self._picked(lambda x: x[index]))

    def _picked(self, pick: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return a part of everything that has chains and draws."""
        whole: dict[str, Any] = {name: pick(getattr(self, name)) for name in _SAVED if name != "beta"}
        return whole | {part: {name: pick(x) for name, x in getattr(self, part).items()} for part in _BY_DRAW}

    @classmethod
    def join(cls, parts: Sequence[Draws]) -> Draws:
        """Concatenate the chains of several runs on one target.

        Parameters
        ----------
        parts : sequence of Draws
            If their lengths differ, the last draws of each part are kept, as many as the shortest part has.

        Returns
        -------
        Draws
            ``num_gradients`` and ``seconds`` are sums. A setting that differs between the parts becomes a list;
            ``ending`` is the worst ending, and ``endings`` lists all of them. ``sample_stats`` has the statistics
            common to all parts.

        Raises
        ------
        DrawsError
            If there is no part, or parts come from different targets.

        Examples
        --------
        >>> import bayeskit as bk
        >>> target = bk.exact.get("beta_binomial").target()
        >>> runs = [bk.sample(target, 2, 50, 10, seed=seed, progress=False) for seed in (0, 1)]
        >>> joined = bk.Draws.join(runs)
        >>> joined, joined.settings["seed"]
        (Draws(4 chains x 10 draws, dim 1, sites: p), [0, 1])
        """
        if not parts:
            raise DrawsError("there is nothing to join; pass at least one Draws")
        target = _common_target(parts)
        count = min(part.num_draws for part in parts)

        def joined(kind: str) -> dict[str, Tensor]:
            whole = [getattr(part, kind) for part in parts]
            names = [name for name in whole[0] if all(name in one for one in whole)]
            return {name: torch.cat([one[name][:, one[name].shape[1] - count :] for one in whole]) for name in names}

        by_draw: dict[str, Any] = {part: joined(part) for part in _BY_DRAW[1:]}
        return cls(
            torch.cat([part.unconstrained[:, part.num_draws - count :] for part in parts]),
            torch.cat([part.log_prior[:, part.num_draws - count :] for part in parts]),
            torch.cat([part.log_likelihood[:, part.num_draws - count :] for part in parts]),
            torch.cat([part.beta for part in parts]),
            joined("sample_stats"),
            sum(part.num_gradients for part in parts),
            sum(part.seconds for part in parts),
            _joint_settings([part.settings for part in parts]),
            target,
            **by_draw,
        )

    def save(self, path: str | Path) -> None:
        """Write the draws, and the values of all sites, as one safetensors file, whole or not at all.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        tensors = {name: getattr(self, name) for name in _SAVED}
        known = self.target.has_density
        whole = replace(self, sites=replace(self, discrete={}).values()) if known else self
        tensors |= {f"{part}.{name}": x for part in _BY_DRAW for name, x in getattr(whole, part).items()}
        tensors |= {f"counted.{name}": x for name, x in self.target.counted().items()}
        labels = self.target.labels
        facts = {
            "sites": list(whole.sites),
            "dimensions": {name: list(dims) for name, dims in labels.dimensions.items()},
            "coords": {name: [_plain(x) for x in found] for name, found in labels.coords.items()},
            "num_gradients": self.num_gradients,
            "seconds": self.seconds,
            "settings": self.settings,
            "names": list(self.target.names),
            "whole_numbers": sorted(self.target.whole_numbers()),
            "model": self.target.fingerprint(),
        }
        save_tensors(path, tensors, facts, _SCHEMA)

    @classmethod
    def load(cls, path: str | Path, target: Target | None = None) -> Draws:
        """Read draws from a file, without running code from it.

        Without their target, draws have the values and labels of all sites, summaries and ArviZ's groups. With it they
        can be predicted from, left out of and used for the evidence as those that were saved.

        Parameters
        ----------
        path : path
        target : Target, optional
            Target of the draws.

        Raises
        ------
        CheckpointError
            If the file is damaged, was not written by :meth:`save`, or contains something else.
        DrawsError
            If the file contains draws of another target.
        """
        if target is not None and not hasattr(target, "has_density"):
            target = require_target(target)
        with loaded_tensors(path, _SCHEMA) as (tensors, facts):
            saved: dict[str, Any] = {part: {} for part in (*_BY_DRAW, "counted")}
            for key, tensor in tensors.items():
                part, _, name = key.partition(".")
                if part in saved:
                    saved[part][name] = tensor
            known = UnknownTarget(
                DimensionLabels(
                    {str(name): tuple(dims) for name, dims in facts["dimensions"].items()},
                    {str(name): tuple(found) for name, found in facts["coords"].items()},
                ),
                names=tuple(map(str, facts["names"])),
                counted=saved.pop("counted"),
                whole_numbers=frozenset(facts["whole_numbers"]),
                fingerprint=facts["model"],
            )
            saved["sites"] = {name: saved["sites"][name] for name in facts["sites"]} if target is None else {}
            draws = cls(
                **saved | {name: tensors[name] for name in _SAVED},
                num_gradients=whole_number("num_gradients", facts["num_gradients"], 0),
                seconds=real_number("seconds", facts["seconds"]),
                settings=dict(facts["settings"]),
                target=known if target is None else target,
            )
        if target is not None and known.fingerprint() and known.fingerprint() != target.fingerprint():
            raise DrawsError(f"the draws in {path} come from another model or other data")
        return draws

    @classmethod
    def from_arviz(cls, data: Any, target: Target) -> Draws:
        """Return the draws that another program made of a target.

        They serve for whatever draws of this package serve: leave-one-out scores, predictions, the evidence by bridge
        sampling and its relatives, comparisons.

        Parameters
        ----------
        data : InferenceData, DataTree, Dataset or mapping of arrays
            What ArviZ reads of other programs, the dataset of its posterior, or arrays ``(chains, draws, *shape)`` by
            site. The posterior has a variable for each site of the target, of the same name; other variables are left
            out. Divergences, energies and other statistics of the sampler are kept.
        target : Target
            The target of these draws. It takes names of dimensions and labels from the data where it has none.

        Raises
        ------
        DataError
            If a value lies outside the support of its site, or stored observations are not those of the target.
        DrawsError
            If there is no posterior, the draws are tempered, the density is not finite at a draw, or stored log
            likelihoods of single observations differ from those of the target, as where a scale is a variance in one of
            the models.
        SettingsError
            If ``data`` is nothing of these.
        ShapeError
            If a site has another shape, the posterior has no chains or draws, or another group other numbers of them.
        UnknownNameError
            If the posterior has no variable for a site.

        Warns
        -----
        DataWarning
            If the posterior has variables that are neither sites nor deterministic sites of the target.

        Examples
        --------
        >>> import numpy as np, torch, bayeskit as bk
        >>> target = bk.exact.get("beta_binomial").target()  # 2 successes of 10
        >>> shares = np.random.default_rng(0).beta(3, 9, (4, 500))
        >>> draws = bk.Draws.from_arviz({"p": shares}, target)
        >>> draws
        Draws(4 chains x 500 draws, dim 1, sites: p)
        """
        found = foreign_draws(data, require_target(target))
        beta = torch.ones(len(found.unconstrained), dtype=found.target.dtype, device=found.target.device)
        return cls(**found._asdict(), beta=beta)

    def _repr_html_(self) -> str:
        return result_html(f"{self.num_chains} chains of {self.num_draws} draws", facts=self._facts())

    def _facts(self) -> dict[str, str]:
        """Return what is known without a computation."""
        facts = {"dimension": str(self.unconstrained.shape[-1])}
        if self.target.has_density:
            sites = [f"{site.name} {tuple(site.shape)}" if site.shape else site.name for site in self.target.sites]
            facts["sites"] = ", ".join(sites[:20]) + (f" and {len(sites) - 20} more" if len(sites) > 20 else "")
        for name in _PREDICTIVE:
            if found := getattr(self, name):
                facts[name] = ", ".join(found)
        if (diverging := self.sample_stats.get("diverging")) is not None:
            facts["divergent transitions"] = f"{int(diverging.sum())} of {diverging.numel()}"
        facts |= {name: str(self.settings[name]) for name in _SHOWN_SETTINGS if name in self.settings}
        return facts | {"gradients": str(self.num_gradients), "seconds": f"{self.seconds:.1f}"}

    def __repr__(self) -> str:
        drawn = [f"{part}: {', '.join(getattr(self, part))}" for part in _PREDICTIVE if getattr(self, part)]
        return f"Draws({self.num_chains} chains x {self.num_draws} draws, {', '.join([self.space(), *drawn])})"

    def space(self) -> str:
        """Return a short text with the dimension and the sites of the draws."""
        known = [site.name for site in self.target.sites] if self.target.has_density else self.sites
        sites = [*known, *self.discrete]
        shown = sites if len(sites) <= 6 else [*sites[:5], f"{len(sites) - 5} more"]
        return f"dim {self.unconstrained.shape[-1]}" + (f", sites: {', '.join(shown)}" if shown else "")


def prior_predictive(
    model: Target | Callable[..., Any],
    *args: Any,
    num_draws: int = 1000,
    seed: int = 0,
    sites: Collection[str] | None = None,
    **kwargs: Any,
) -> Draws:
    """Draw parameters from the prior, and data from the model at these.

    Parameters
    ----------
    model : Target or callable
        A target, or a Pyro model, which is called with ``*args`` and ``**kwargs``.
    *args, **kwargs
        Arguments of the model.
    num_draws : int, default 1000
    seed : int, default 0
    sites : collection of str, optional
        Sites of a model without data that are drawn as data. By default, where the model has arguments but no observed
        site, those on which the distribution of no other site depends.

    Returns
    -------
    Draws
        One chain at inverse temperature 0, with the data in ``posterior_predictive``; for ArviZ the groups ``prior``
        and ``prior_predictive``, which ``draws.to_arviz(prior=...)`` joins with those of posterior draws.

    Raises
    ------
    SettingsError
        If a prior is flat or masked.
    ModelError, UnsupportedSiteError
        If the model fails, or data of a site cannot be drawn.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(x, y):
    ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
    >>> x = torch.linspace(-1.0, 1.0, 20)
    >>> prior = bk.prior_predictive(model, x, 2 * x, num_draws=500)
    >>> prior["slope"].shape, prior.posterior_predictive["y"].shape
    (torch.Size([1, 500]), torch.Size([1, 500, 20]))

    The same before there are data:

    >>> bk.prior_predictive(model, x, None).posterior_predictive["y"].shape
    torch.Size([1, 1000, 20])
    """
    begin = time.monotonic()
    if isinstance(model, Target | Draws):
        target = require_target(model)
    else:
        target = _simulator(model, args, kwargs, sites, seed)
    u = target.sample_prior(whole_number("num_draws", num_draws, 1), seed=seed).unsqueeze(0)
    log_prior, log_likelihood = target.evaluate(u)
    beta, settings = torch.zeros(1, dtype=target.dtype, device=target.device), {"sampler": "prior", "seed": seed}
    draws = Draws(u, log_prior, log_likelihood, beta, settings=settings, target=target)
    drawn = target.predictive(u, seed=seed)
    return replace(draws, posterior_predictive=drawn, seconds=time.monotonic() - begin)


def _simulator(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sites: Collection[str] | None,
    seed: int,
) -> Target:
    """Return the target of a model whose data are drawn, without asking for data."""
    if callable(model):
        _check_call(model, args, kwargs)
    without_data = sites is not None or bool(args or kwargs)
    target = Target.from_pyro(WithOutcomes(model, sites) if without_data else model, *args, seed=seed, **kwargs)
    observed = target.density.observed_sites if isinstance(target.density, PyroDensity) else ()
    if missing := next((name for name in sites or () if name not in observed), None):
        raise unknown_name("site", missing, [*observed, *(site.name for site in target.sites)])
    return target


def _check_call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise a typed error for arguments that the model does not take, with the remedies of a prior draw."""
    try:
        signature = inspect.signature(model)
    except ValueError:
        return  # Python does not know what it takes
    if "num_samples" in kwargs and "num_samples" not in signature.parameters:
        raise UnknownNameError("prior_predictive has no setting 'num_samples'; the number of prior draws is num_draws")
    try:
        settings = inspect.signature(Target.from_pyro).parameters  # such as compile, which the model does not take
        signature.bind(*args, **{name: x for name, x in kwargs.items() if name not in settings})
    except TypeError as error:
        raise ModelError(
            f"the model cannot be called with these arguments: {error}; give None for data that are to be drawn"
        ) from error


def followed_by(before: Draws, after: Draws) -> Draws:
    """Return the chains of two runs of which one continues the other."""

    def joined(part: str) -> dict[str, Tensor]:
        one, other = getattr(before, part), getattr(after, part)
        return {name: torch.cat([x, other[name]], 1) for name, x in one.items() if name in other}

    whole: dict[str, Any] = {n: torch.cat([getattr(before, n), getattr(after, n)], 1) for n in _SAVED if n != "beta"}
    stats = joined("sample_stats")
    return replace(after, **whole, sample_stats=stats, seconds=before.seconds + after.seconds)


def _joint_settings(settings: list[dict[str, Any]]) -> dict[str, Any]:
    joint: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in settings for name in one):
        values = [one.get(name) for one in settings]
        joint[name] = values[0] if all(value == values[0] for value in values) else values
    endings = [one.get("ending") for one in settings]
    if any(endings):
        joint |= {"ending": next(e for e in (*_ENDINGS, *endings) if e in endings), "endings": endings}
    return joint


def _common_target(parts: Sequence[Draws]) -> Target:
    """Return the target of all parts, one with a density where there is one."""
    dims = sorted({part.unconstrained.shape[-1] for part in parts})
    if len(dims) > 1:
        raise DrawsError(f"draws of dimensions {', '.join(map(str, dims))} come from different targets")
    targets = list({id(part.target): part.target for part in parts}.values())
    if len(targets) > 1 and len({target.fingerprint() for target in targets} - {""}) > 1:
        raise DrawsError("the draws come from different models or other data, so their chains cannot be joined")
    return next((target for target in targets if target.has_density), targets[0])


def _plain(label: Any) -> str | int | float | bool:
    """Return a label as JSON holds it."""
    label = label.item() if isinstance(label, np.generic) else label
    return label if isinstance(label, str | int | float | bool) else str(label)


def as_numpy(x: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array on the host.

    Examples
    --------
    >>> import torch
    >>> from bayeskit._draws import as_numpy
    >>> as_numpy(torch.ones(2, requires_grad=True))
    array([1., 1.], dtype=float32)
    """
    return x.detach().cpu().numpy()
