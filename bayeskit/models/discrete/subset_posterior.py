"""The posterior over all subsets of a regression's predictors, and what it says about coefficients and responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import SettingsError, ShapeError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Subsets whose covariances are computed at a time.
_BATCH = 4096
#: Probability of the least probable subsets that quantiles leave out.
_LEFT_OUT = 1e-10


@dataclass(frozen=True, eq=False, repr=False)
class SubsetPosterior:
    r"""The exact posterior over all subsets of predictors.

    Given its subset, :math:`\sigma^2` is inverse gamma and coefficients are normal with covariance
    :math:`\sigma^2 R R^T`, hence multivariate t with ``2 * noise_shape`` degrees of freedom; averaged over subsets,
    each coefficient has a mixture of t distributions and of a point mass at zero.

    Attributes
    ----------
    subsets : Tensor
        Zeros and ones, ``(2**p, p)``.
    log_evidence_each : Tensor
        Log marginal likelihood of each subset, ``(2**p,)``.
    probabilities : Tensor
        Posterior probability of each subset, ``(2**p,)``.
    log_evidence : float
        Log marginal likelihood, averaged over the prior of subsets.
    coefficients_each : Tensor
        Posterior means given each subset, the intercept first, ``(2**p, 1 + p)``; zero for predictors that are out.
    noise_shape : float
        Of the posterior of the noise variance, whatever the subset.
    noise_rate_each : Tensor
        Of the posterior of the noise variance given each subset, ``(2**p,)``.
    roots : callable
        Returns ``R`` of some subsets, ``(k, p)`` to ``(k, 1 + p, 1 + p)``.
    names : tuple of str
        Of the predictors: the columns of a data frame, otherwise ``"x[0]"``, ``"x[1]"`` and so on.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.spike_and_slab import SpikeAndSlabRegression
    >>> x = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3).repeat(3, 1)
    >>> posterior = SpikeAndSlabRegression().posterior(x, 3.0 * x[:, 0])
    >>> posterior
    SubsetPosterior(log_evidence=-31.363918, 8 subsets of 3 predictors)
    >>> print(posterior.to_pandas(names=["dose", "age", "sex"]).round(2).to_string(index_names=False))
               inclusion  mean    sd  lower  upper
    intercept       1.00  0.00  0.14  -0.22   0.22
    dose            1.00  2.88  0.13   2.66   3.10
    age             0.21  0.00  0.06  -0.09   0.09
    sex             0.21  0.00  0.06  -0.09   0.09
    """

    subsets: Tensor
    log_evidence_each: Tensor
    probabilities: Tensor
    log_evidence: float
    coefficients_each: Tensor
    noise_shape: float
    noise_rate_each: Tensor
    roots: Callable[[Tensor], Tensor]
    names: tuple[str, ...]

    def __repr__(self) -> str:
        count, p = self.subsets.shape
        return f"SubsetPosterior(log_evidence={self.log_evidence:.6f}, {count} subsets of {p} predictors)"

    @property
    def inclusion_probabilities(self) -> Tensor:
        """Posterior probability of each predictor being in, ``(p,)``."""
        return self.probabilities @ self.subsets

    @property
    def coefficients(self) -> Tensor:
        """Posterior means averaged over subsets, the intercept first, ``(1 + p,)``."""
        return self.probabilities @ self.coefficients_each

    @property
    def covariance(self) -> Tensor:
        """Posterior covariance of coefficients, subsets averaged out, the intercept first, ``(1 + p, 1 + p)``.

        Not finite where ``noise_shape`` is at most one, as may be with a single response.
        """
        deviations = self.coefficients_each - self.coefficients
        total = deviations.mT @ (self.probabilities.unsqueeze(-1) * deviations)
        weights = self.probabilities * self._noise_variance_each
        for subsets, weight in zip(self.subsets.split(_BATCH), weights.split(_BATCH), strict=True):
            root = self.roots(subsets)
            total = total + torch.einsum("k,kij,klj->il", weight, root, root)
        return total

    @property
    def standard_deviations(self) -> Tensor:
        """Posterior standard deviations of coefficients, subsets averaged out, the intercept first, ``(1 + p,)``."""
        return self.covariance.diagonal().sqrt()

    @property
    def noise_variance(self) -> float:
        """Posterior mean of the variance of the noise, infinite where ``noise_shape`` is at most one."""
        return float(self.probabilities @ self._noise_variance_each)

    @property
    def size_probabilities(self) -> Tensor:
        """Posterior probability of each number of predictors, ``(p + 1,)``."""
        sizes = self.subsets.sum(-1).long()
        found = self.probabilities.new_zeros(self.subsets.shape[-1] + 1)
        return found.index_add(0, sizes, self.probabilities)

    @property
    def median_probability_subset(self) -> Tensor:
        """Those predictors that are more probably in than out, zeros and ones, ``(p,)``."""
        return (self.inclusion_probabilities > 0.5).to(self.subsets)

    def most_probable(self, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return the most probable subsets ``(count, p)`` and their probabilities ``(count,)``.

        Raises
        ------
        SettingsError
            If there are not so many subsets.
        """
        if whole_number("count", count, 1) > len(self.subsets):
            raise SettingsError(f"count is {count}, but there are {len(self.subsets)} subsets")
        probabilities, index = self.probabilities.topk(count)
        return self.subsets[index], probabilities

    def intervals(self, probability: float = 0.9) -> Tensor:
        """Return central posterior intervals of coefficients, subsets averaged out: ``(1 + p, 2)``.

        Quantiles of the mixture itself; an end is exactly zero where the point mass holds that quantile.

        Parameters
        ----------
        probability : float, default 0.9
            Between 0 and 1.

        Raises
        ------
        SettingsError
            If it lies outside.
        """
        return self._intervals(torch.eye(self.coefficients_each.shape[1]).to(self.subsets), 0.0, probability)

    def predict(self, x: Tensor) -> Tensor:
        """Return posterior means of the response, averaged over subsets: ``(m, p)`` to ``(m,)``.

        Parameters
        ----------
        x : Tensor or array
            Predictors, ``(m, p)``.

        Raises
        ------
        ShapeError
            If there is another number of predictors.
        """
        return self._design(x) @ self.coefficients

    def predictive_deviations(self, x: Tensor) -> Tensor:
        """Return standard deviations of new responses, noise included, averaged over subsets: ``(m, p)`` to ``(m,)``.

        Parameters and errors are those of :meth:`predict`.
        """
        design = self._design(x)
        return (self.noise_variance + ((design @ self.covariance) * design).sum(-1)).sqrt()

    def predictive_intervals(self, x: Tensor, probability: float = 0.9) -> Tensor:
        """Return central intervals of new responses, noise included, averaged over subsets: ``(m, p)`` to ``(m, 2)``.

        Parameters
        ----------
        x : Tensor or array
            Predictors, ``(m, p)``.
        probability : float, default 0.9
            Between 0 and 1.

        Raises
        ------
        ShapeError
            If there is another number of predictors.
        SettingsError
            If ``probability`` lies outside.
        """
        return self._intervals(self._design(x), 1.0, probability)

    def sample(self, num_draws: int, seed: int | torch.Generator = 0) -> dict[str, Tensor]:
        """Draw independently from the joint posterior of subsets, coefficients and noise.

        Parameters
        ----------
        num_draws : int
        seed : int or torch.Generator, default 0

        Returns
        -------
        dict of str to Tensor
            ``"inclusion"``, ``(num_draws, p)``; ``"coefficients"``, the intercept first, ``(num_draws, 1 + p)``; and
            ``"noise_scale"``, the standard deviation of the noise, ``(num_draws,)``.

        Raises
        ------
        SettingsError
            If ``num_draws`` is not a positive whole number.
        """
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, self.subsets.device, stream="subset posterior")
        drawn = torch.multinomial(self.probabilities, num_draws, replacement=True, generator=generator)
        shape = self.probabilities.new_full((num_draws,), self.noise_shape)
        # torch._standard_gamma is what its distributions draw from; only it takes a generator.
        scale = (self.noise_rate_each[drawn] / torch._standard_gamma(shape, generator=generator)).sqrt()
        normal = torch.randn(
            self.coefficients_each[drawn].shape, dtype=scale.dtype, device=scale.device, generator=generator
        )
        subsets, which = drawn.unique(return_inverse=True)
        noise = torch.empty_like(normal)
        for start in range(0, len(subsets), _BATCH):
            root = self.roots(self.subsets[subsets[start : start + _BATCH]])
            here = (which >= start) & (which < start + _BATCH)
            noise[here] = (root[which[here] - start] @ normal[here].unsqueeze(-1)).squeeze(-1)
        coefficients = self.coefficients_each[drawn] + scale.unsqueeze(-1) * noise
        return {"inclusion": self.subsets[drawn], "coefficients": coefficients, "noise_scale": scale}

    def to_pandas(self, names: Sequence[str] | None = None, probability: float = 0.9) -> pd.DataFrame:
        """Return one row a coefficient: inclusion probability, mean, standard deviation and a central interval.

        Parameters
        ----------
        names : sequence of str, optional
            Of the predictors, by default ``self.names``.
        probability : float, default 0.9
            Of the interval.

        Raises
        ------
        ShapeError
            If there are not as many names as predictors.
        SettingsError
            If ``probability`` is not between 0 and 1.
        """
        import pandas as pd

        lower, upper = self.intervals(probability).cpu().numpy().T
        columns = {
            "inclusion": torch.cat([self.probabilities.new_ones(1), self.inclusion_probabilities]).cpu().numpy(),
            "mean": self.coefficients.cpu().numpy(),
            "sd": self.standard_deviations.cpu().numpy(),
            "lower": lower,
            "upper": upper,
        }
        return pd.DataFrame(columns, index=pd.Index(["intercept", *self._names(names)], name="coefficient"))

    def plot(self, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
        """Plot the probability of each predictor to be in, with a line at one half.

        Parameters
        ----------
        names : sequence of str, optional
            Of the predictors, by default ``self.names``.
        ax : Axes, optional
            By default those of a new figure.

        Raises
        ------
        ShapeError
            If there are not as many names as predictors.
        """
        from bayeskit._plots import BLUE, GREY

        names = self._names(names)
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(6.4, 1.2 + 0.3 * len(names)), layout="constrained").subplots()
        ax.barh(range(len(names)), self.inclusion_probabilities.cpu().numpy(), color=BLUE, alpha=0.8)
        ax.axvline(0.5, color=GREY, linestyle="--", linewidth=1.0)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlim(0.0, 1.0)
        ax.set_xlabel("posterior probability of being in")
        return ax

    @property
    def _noise_variance_each(self) -> Tensor:
        over = self.noise_shape - 1
        return self.noise_rate_each / over if over > 0 else torch.full_like(self.noise_rate_each, torch.inf)

    def _names(self, names: Sequence[str] | None) -> tuple[str, ...]:
        found = self.names if names is None else tuple(names)
        if len(found) != self.subsets.shape[-1]:
            raise ShapeError(f"{len(found)} names are given for {self.subsets.shape[-1]} predictors; give one each")
        return found

    def _design(self, x: Any) -> Tensor:
        x, p = as_numbers("x", x), self.subsets.shape[-1]
        if x.dim() != 2 or x.shape[1] != p:
            raise ShapeError(f"x has shape {tuple(x.shape)}; it must be (m, {p})")
        x = x.to(self.coefficients_each)
        return torch.cat([torch.ones_like(x[:, :1]), x], 1)

    def _intervals(self, design: Tensor, noise: float, probability: float) -> Tensor:
        """Return intervals of ``design @ coefficients``, with so much of the noise variance added: ``(m, 2)``."""
        tail = 0.5 * (1 - real_number("probability", probability, between=(0, 1)))
        probabilities, order = self.probabilities.sort(descending=True)
        kept = int((probabilities.cumsum(0) < 1 - _LEFT_OUT).sum()) + 1
        chosen = order[:kept]
        unit = (self.noise_rate_each[chosen] / self.noise_shape).sqrt().unsqueeze(-1)
        parts = [(design @ self.roots(part)).square().sum(-1) for part in self.subsets[chosen].split(_BATCH)]
        spread = torch.cat(parts)
        mixture = _MixtureOfT(
            (probabilities[:kept] / probabilities[:kept].sum()).cpu().numpy()[:, None],
            (self.coefficients_each[chosen] @ design.mT).cpu().numpy(),
            (unit * (noise + spread).sqrt()).cpu().numpy(),
            2 * self.noise_shape,
        )
        ends = [torch.from_numpy(mixture.quantile(level)) for level in (tail, 1 - tail)]
        return torch.stack(ends, -1).to(self.subsets)


@dataclass(frozen=True, eq=False)
class _MixtureOfT:
    """Mixtures of ``k`` t distributions, one a column; where the scale is zero, of a point mass.

    Weights are ``(k, 1)``, locations and scales ``(k, m)``.
    """

    weights: np.ndarray
    locations: np.ndarray
    scales: np.ndarray
    freedom: float

    def cdf(self, x: np.ndarray, *, open_end: bool = False) -> np.ndarray:
        """Return the probability of values up to ``x``, ``(m,)``, without ``x`` itself where the end is open."""
        from scipy.special import stdtr

        point, distance = self.scales == 0, x - self.locations
        each = (distance > 0 if open_end else distance >= 0).astype(float)
        each[~point] = stdtr(self.freedom, distance[~point] / self.scales[~point])
        return (self.weights * each).sum(0)

    def density(self, x: np.ndarray) -> np.ndarray:
        """Return the density of what is not a point mass."""
        nu, z = self.freedom, self._standard(x - self.locations)
        constant = math.exp(math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)) / math.sqrt(nu * math.pi)
        each = constant * (1 + z * z / nu) ** (-(nu + 1) / 2)
        return (self.weights * np.divide(each, self.scales, out=np.zeros_like(each), where=self.scales > 0)).sum(0)

    def quantile(self, level: float) -> np.ndarray:
        """Return the quantiles, by Newton steps that bisection takes over where they do not help, ``(m,)``."""
        from scipy.special import stdtrit

        each = self.locations + self.scales * stdtrit(self.freedom, level)
        low, high = each.min(0), each.max(0)
        zero = np.zeros_like(low)
        at_zero = (self.cdf(zero, open_end=True) < level) & (level <= self.cdf(zero))
        x, before = (self.weights * each).sum(0), np.full_like(low, np.inf)
        resolution = 1e-12 * (self.weights * self.scales).sum(0)
        for _ in range(200):
            excess = self.cdf(x) - level
            low, high = np.where(excess < 0, x, low), np.where(excess < 0, high, x)
            with np.errstate(divide="ignore", invalid="ignore"):
                step = excess / self.density(x)
            done = (np.abs(step) <= resolution) | (high - low <= resolution) | at_zero
            if done.all():
                break
            helps = (x - step >= low) & (x - step <= high) & (np.abs(excess) < 0.5 * before)
            after = np.where(helps, x - step, 0.5 * (low + high))
            x, before = np.where(done, x, after), np.abs(excess)
        return np.where(at_zero, 0.0, x)

    def _standard(self, distance: np.ndarray) -> np.ndarray:
        return np.divide(distance, self.scales, out=np.zeros_like(distance), where=self.scales > 0)
