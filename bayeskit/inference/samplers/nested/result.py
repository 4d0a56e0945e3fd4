"""What nested sampling leaves behind: dead points, their prior volumes, and a test of how they came about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from scipy.stats import kstest
from torch import Tensor

from bayeskit._arviz import as_inference_data
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.driver import Ending
from bayeskit.target import Target

SIMULATIONS_AT_ONCE = 64
MIN_INSERTIONS = 20


@dataclass(frozen=True, eq=False)
class NestedRun:
    """Dead points in the order of their death, the last live points at the end.

    Attributes
    ----------
    position : Tensor
        Unconstrained, shape ``(N, d)``.
    log_prior, log_likelihood : Tensor
        Shape ``(N,)``; the likelihood never falls.
    live_counts : Tensor
        How many points were alive at each death, ``(N,)``.
    insertion : Tensor
        Where each new point came to lie among those it joined, ``(M,)``; independent and uniform on
        (0, 1) if the sampling was right.
    start, end : Tensor
        Share of the survivors below the one that each new point was copied from, NaN where it was drawn from the
        prior, and below where it came to lie, ``(M,)``.
    num_live : int
    num_evaluations : int
        Evaluations of the density, batches counted whole.
    num_nan, num_stuck : int
        Evaluations whose likelihood was not a number, and slice updates that found no new point.
    ending : str
        "converged", or why the run ended before: "finished" (``max_blocks``), "time budget" or
        "interrupted".
    seconds : float
    settings : dict
    target : Target

    References
    ----------
    Skilling, J. (2006). Nested sampling for general Bayesian computation. Bayesian
    Analysis 1, 833-859.
    Fowlie, A., Handley, W., Su, L. (2020). Nested sampling cross-checks using order
    statistics. Monthly Notices of the Royal Astronomical Society 497, 5256-5263.
    Higson, E., Handley, W., Hobson, M., Lasenby, A. (2018). Sampling errors in nested sampling parameter estimation.
    Bayesian Analysis 13, 873-896.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_nested
    >>> run = sample_nested(exact.get("beta_binomial").target(), num_live=100, progress=False)
    >>> run.draws  # doctest: +ELLIPSIS
    Draws(4 chains x ... draws, dim 1, sites: p)
    >>> run.insertion_index_p_value > 1e-3
    True
    """

    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    live_counts: Tensor
    insertion: Tensor
    start: Tensor
    end: Tensor
    num_live: int
    num_evaluations: int
    num_nan: int
    num_stuck: int
    ending: Ending
    seconds: float
    settings: dict[str, Any]
    target: Target

    @cached_property
    def log_volume(self) -> Tensor:
        """Expected log prior mass above the likelihood of each dead point, ``(N,)``."""
        return (-1 / self.live_counts).cumsum(0)

    @cached_property
    def log_weights(self) -> Tensor:
        """Log posterior mass of each dead point, ``(N,)``; the masses add up to one."""
        mass = self._log_mass
        return mass - mass.logsumexp(0)

    @property
    def log_evidence(self) -> float:
        """Log evidence at the expected volumes."""
        return float(self._log_mass.logsumexp(0))

    @property
    def information(self) -> float:
        """Kullback-Leibler divergence from prior to posterior, in nats."""
        weights = self.log_weights.exp()
        mean = torch.where(weights > 0, weights * self.log_likelihood, 0.0).sum()
        return float(mean) - self.log_evidence

    @property
    def effective_draws(self) -> float:
        """Effective number of independent posterior draws behind the weights."""
        return float((-(2 * self.log_weights).logsumexp(0)).exp())

    @property
    def remaining_share(self) -> float:
        """Posterior mass of the last live points; near one where the run ended too early."""
        return float(self.log_weights[-self.num_live :].exp().sum())

    @property
    def _log_mass(self) -> Tensor:
        return log_shells(self.log_volume) + self.log_likelihood

    def simulate_log_evidence(self, num_simulations: int = 1000, seed: int | torch.Generator = 0) -> Tensor:
        """Redraw the unknown volumes, ``(num_simulations,)`` values of the log evidence.

        Their standard deviation is the standard error of nested sampling.

        Raises
        ------
        SettingsError
            If there are fewer than 2 simulations.
        """
        if num_simulations < 2:
            raise SettingsError(f"num_simulations must be at least 2, not {num_simulations}")
        generator = new_generator(seed, self.live_counts.device, stream="simulated volumes")
        parts = []
        for first in range(0, num_simulations, SIMULATIONS_AT_ONCE):
            shape = (min(SIMULATIONS_AT_ONCE, num_simulations - first), len(self.live_counts))
            uniform = torch.rand(shape, dtype=torch.float64, device=generator.device, generator=generator)
            # Of n points uniform in the volume, the outermost leaves a share whose n-th power is uniform.
            log_volume = (torch.log1p(-uniform) / self.live_counts).cumsum(1)
            parts.append((log_shells(log_volume) + self.log_likelihood).logsumexp(1))
        return torch.cat(parts)

    @cached_property
    def insertion_index_p_value(self) -> float:
        """P-value of the Kolmogorov-Smirnov test that the insertion indices of all copies are uniform."""
        return _uniform_p_value(self.insertion[~self.start.isnan()])

    @cached_property
    def rolling_insertion_index_p_value(self) -> float:
        """Smallest p-value among stretches of ``num_live`` insertions of copies, corrected for their number."""
        insertion = self.insertion[~self.start.isnan()]  # those of draws from the prior are uniform in any case
        stretches = [part for part in insertion.split(self.num_live) if len(part) >= MIN_INSERTIONS]
        if not stretches:
            return 1.0
        smallest = min(_uniform_p_value(part) for part in stretches)
        return -math.expm1(len(stretches) * math.log1p(-min(smallest, 1 - 1e-16)))

    @cached_property
    def start_correlation(self) -> float:
        """Rank correlation between where copies started and where they came to lie; about 0 if they forget."""
        copied = ~self.start.isnan()
        if int(copied.sum()) < MIN_INSERTIONS:
            return 0.0
        return float(torch.stack([self.start[copied], self.end[copied]]).corrcoef()[0, 1].nan_to_num(nan=1.0))

    @property
    def draws(self) -> Draws:
        """As many equally weighted posterior draws as are effective, in four chains.

        Their Monte Carlo errors leave out that volumes are estimated (Higson and others 2018): for quantities that
        change along the run they are too small, by 1.2 to 1.5 times in a small hierarchical model. That of the evidence
        knows, see :meth:`simulate_log_evidence`.
        """
        return self.resample()

    def resample(self, num_draws: int | None = None, num_chains: int = 4, seed: int | torch.Generator = 0) -> Draws:
        """Draw from the dead points by their weights.

        Parameters
        ----------
        num_draws : int, optional
            Draws of each chain; by default as many in all as are effective.
        num_chains : int, default 4
            Draws are independent of their order, so that chains are a mere form.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Draws
            ``sample_stats`` has ``log_weight``, the log posterior mass of the dead point that a draw is.

        Raises
        ------
        SettingsError
            If there is nothing to draw.
        """
        if num_chains < 1 or (num_draws is not None and num_draws < 1):
            raise SettingsError(f"num_draws and num_chains must be at least 1, not {num_draws} and {num_chains}")
        count = num_draws or max(1, int(self.effective_draws) // num_chains)
        total = num_chains * count
        generator = new_generator(seed, self.live_counts.device, stream="nested resampling")
        like = {"dtype": torch.float64, "device": generator.device, "generator": generator}
        # Systematic: a point appears its expected number of times, rounded up or down.
        grid = torch.arange(total, device=generator.device) + torch.rand((), **like)  # type: ignore[call-overload]
        cumulative = self.log_weights.exp().cumsum(0)
        index = torch.searchsorted(cumulative / cumulative[-1], grid / total)
        index = index.clamp(max=len(cumulative) - 1)[torch.rand(total, **like).argsort()]  # type: ignore[call-overload]
        shape = (num_chains, count)
        return Draws(
            self.position[index].reshape(*shape, -1),
            self.log_prior[index].reshape(shape),
            self.log_likelihood[index].reshape(shape),
            torch.ones(num_chains, dtype=self.position.dtype, device=self.position.device),
            {"log_weight": self.log_weights[index].reshape(shape)},
            num_gradients=self.num_evaluations,
            seconds=self.seconds,
            settings=dict(self.settings),
            target=self.target,
        )

    def to_arviz(self) -> Any:
        """Return the run for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Dead points are weighted, which ArviZ does not know, so its groups hold :attr:`draws`, equally
        weighted and named by site. ``sample_stats`` also has ``log_weight``, the log posterior mass of the
        dead point that a draw is; ``posterior`` carries the evidence and how the run ended as attributes.
        """
        groups = self.draws.to_datasets()
        facts = {
            "log_evidence": self.log_evidence,
            "log_evidence_error": float(self.simulate_log_evidence().std()),
            "information": self.information,
            "effective_draws": self.effective_draws,
            "num_live": self.num_live,
            "ending": self.ending,
        }
        groups["posterior"] = groups["posterior"].assign_attrs(facts)
        return as_inference_data(groups)

    def __repr__(self) -> str:
        return (
            f"NestedRun(log_evidence={self.log_evidence:.3f}, information={self.information:.2f}, "
            f"dead={len(self.position)}, ending={self.ending!r})"
        )


def _uniform_p_value(x: Tensor) -> float:
    return float(kstest(x.cpu().numpy(), "uniform").pvalue) if len(x) else 1.0


def log_shells(log_volume: Tensor) -> Tensor:
    """Return the log prior mass that each dead point stands for, ``(*batch, N) -> (*batch, N)``.

    Borders lie halfway between neighbours; the first shell begins at the whole prior, and
    the last goes down to nothing.
    """
    halfway = torch.logaddexp(log_volume[..., :-1], log_volume[..., 1:]) - math.log(2)
    whole = torch.zeros_like(log_volume[..., :1])
    return log_difference(torch.cat([whole, halfway], -1), torch.cat([halfway, whole - torch.inf], -1))


def log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """Return ``log(exp(larger) - exp(smaller))``."""
    return larger + torch.log(-torch.expm1(smaller - larger))
