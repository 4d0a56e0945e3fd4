"""Spike-and-slab linear regression with the exact posterior over all subsets of predictors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.core.inputs import as_numbers, real_number, whole_number
from bayeskit.core.randomness import new_generator
from bayeskit.core.torch_internals import standard_gamma
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.inputs import digits_of, new_axes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "BetaBinomialInclusion",
    "InclusionPrior",
    "IndependentInclusion",
    "MAX_PREDICTORS",
    "SpikeAndSlabRegression",
    "SubsetPosterior",
]


# The posterior over all subsets of predictors, and posterior summaries of coefficients and responses.

#: Number of subsets per batch.
_BATCH = 4096
#: Total probability of the subsets omitted from quantiles.
_LEFT_OUT = 1e-10


@dataclass(frozen=True, eq=False, repr=False)
class SubsetPosterior:
    r"""The exact posterior over all subsets of predictors.

    Given the subset, :math:`\sigma^2` is inverse gamma and the coefficients are normal with covariance
    :math:`\sigma^2 R R^T`, hence multivariate t with ``2 * noise_shape`` degrees of freedom. The marginal posterior of
    each coefficient is a mixture of t distributions and a point mass at zero.

    Attributes
    ----------
    subsets : Tensor
        Inclusion indicators (zeros and ones), ``(2**p, p)``.
    log_evidence_each : Tensor
        Log marginal likelihood of each subset, ``(2**p,)``.
    probabilities : Tensor
        Posterior probability of each subset, ``(2**p,)``.
    log_evidence : float
        Log of the marginal likelihood averaged over the prior of subsets.
    coefficients_each : Tensor
        Posterior means given each subset, intercept first, ``(2**p, 1 + p)``; zero for excluded predictors.
    noise_shape : float
        Shape of the inverse gamma posterior of the noise variance, equal for all subsets.
    noise_rate_each : Tensor
        Rate of the inverse gamma posterior of the noise variance given each subset, ``(2**p,)``.
    roots : callable
        Function from subsets ``(k, p)`` to ``R``, ``(k, 1 + p, 1 + p)``.
    names : tuple of str
        Names of the predictors: the columns of a data frame, otherwise ``"x[0]"``, ``"x[1]"`` and so on.

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
        """Posterior inclusion probability of each predictor, ``(p,)``."""
        return self.probabilities @ self.subsets

    @property
    def coefficients(self) -> Tensor:
        """Posterior means of the coefficients averaged over subsets, intercept first, ``(1 + p,)``."""
        return self.probabilities @ self.coefficients_each

    @property
    def covariance(self) -> Tensor:
        """Posterior covariance of the coefficients averaged over subsets, intercept first, ``(1 + p, 1 + p)``.

        Not finite if ``noise_shape`` is at most 1, which can happen with a single response.
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
        """Posterior standard deviations of the coefficients averaged over subsets, intercept first, ``(1 + p,)``."""
        return self.covariance.diagonal().sqrt()

    @property
    def noise_variance(self) -> float:
        """Posterior mean of the noise variance; infinite if ``noise_shape`` is at most 1."""
        return float(self.probabilities @ self._noise_variance_each)

    @property
    def size_probabilities(self) -> Tensor:
        """Posterior distribution of the number of included predictors, ``(p + 1,)``."""
        sizes = self.subsets.sum(-1).long()
        found = self.probabilities.new_zeros(self.subsets.shape[-1] + 1)
        return found.index_add(0, sizes, self.probabilities)

    @property
    def median_probability_subset(self) -> Tensor:
        """Median probability model: indicators of inclusion probability above 0.5, ``(p,)``."""
        return (self.inclusion_probabilities > 0.5).to(self.subsets)

    def most_probable(self, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return the most probable subsets ``(count, p)`` and their probabilities ``(count,)``.

        Raises ``SettingsError`` if ``count`` exceeds the number of subsets.
        """
        if whole_number("count", count, 1) > len(self.subsets):
            raise SettingsError(f"count is {count}, but there are {len(self.subsets)} subsets")
        probabilities, index = self.probabilities.topk(count)
        return self.subsets[index], probabilities

    def intervals(self, probability: float = 0.9) -> Tensor:
        """Return central posterior intervals of the coefficients averaged over subsets, ``(1 + p, 2)``.

        The ends are quantiles of the mixture, exactly zero if the quantile falls on the point mass. ``probability``:
        between 0 and 1. Raises ``SettingsError`` if ``probability`` is not between 0 and 1.
        """
        return self._intervals(torch.eye(self.coefficients_each.shape[1]).to(self.subsets), 0.0, probability)

    def predict(self, x: Tensor) -> Tensor:
        """Return posterior means of new responses averaged over subsets, ``(m,)``.

        ``x`` (tensor or array): predictors, ``(m, p)``. Raises ``ShapeError`` if the shape of ``x`` is not ``(m, p)``.
        """
        return self._design(x) @ self.coefficients

    def predictive_deviations(self, x: Tensor) -> Tensor:
        """Return predictive standard deviations of new responses, including noise, ``(m,)``.

        Parameters and errors are the same as for :meth:`predict`.
        """
        design = self._design(x)
        return (self.noise_variance + ((design @ self.covariance) * design).sum(-1)).sqrt()

    def predictive_intervals(self, x: Tensor, probability: float = 0.9) -> Tensor:
        """Return central predictive intervals of new responses, including noise, ``(m, 2)``.

        ``x`` (tensor or array): predictors, ``(m, p)``. ``probability``: between 0 and 1. Raises ``ShapeError`` if the
        shape of ``x`` is not ``(m, p)``; ``SettingsError`` if ``probability`` is not between 0 and 1.
        """
        return self._intervals(self._design(x), 1.0, probability)

    def sample(self, num_draws: int, *, seed: int | torch.Generator = 0) -> dict[str, Tensor]:
        """Draw independent samples from the joint posterior of subset, coefficients and noise.

        Raises ``SettingsError`` if ``num_draws`` is not a positive whole number.

        Returns
        -------
        dict of str to Tensor
            ``"inclusion"``, ``(num_draws, p)``; ``"coefficients"``, intercept first, ``(num_draws, 1 + p)``;
            ``"noise_scale"``, the standard deviation of the noise, ``(num_draws,)``.
        """
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, self.subsets.device, stream="subset posterior")
        drawn = torch.multinomial(self.probabilities, num_draws, replacement=True, generator=generator)
        shape = self.probabilities.new_full((num_draws,), self.noise_shape)
        scale = (self.noise_rate_each[drawn] / standard_gamma(shape, generator=generator)).sqrt()
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
        """Return one row per coefficient: inclusion probability, mean, standard deviation and central interval.

        ``names`` (sequence of str): names of the predictors, default ``self.names``. ``probability``: probability of
        the interval. Raises ``ShapeError`` if the number of names is not ``p``; ``SettingsError`` if ``probability`` is
        not between 0 and 1.
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
        """Plot inclusion probabilities with a reference line at 0.5.

        ``names`` (sequence of str): names of the predictors, default ``self.names``. ``ax``: default: a new figure.
        Raises ``ShapeError`` if the number of names is not ``p``.
        """
        from bayeskit.core.plots import BLUE, GREY

        names = self._names(names)
        ax = new_axes(6.4, 1.2 + 0.3 * len(names)) if ax is None else ax
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
        """Return intervals of ``design @ coefficients`` plus ``noise`` times the noise variance, ``(m, 2)``."""
        tail = 0.5 * (1 - real_number("probability", probability, "(0, 1)"))
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
    """``m`` mixtures of ``k`` t distributions; a component with scale zero is a point mass."""

    weights: np.ndarray  # (k, 1)
    locations: np.ndarray  # (k, m)
    scales: np.ndarray  # (k, m)
    freedom: float

    def cdf(self, x: np.ndarray, *, open_end: bool = False) -> np.ndarray:
        """Return P(value <= x), ``(m,)``; with ``open_end`` P(value < x)."""
        from scipy.special import stdtr

        point, distance = self.scales == 0, x - self.locations
        each = (distance > 0 if open_end else distance >= 0).astype(float)
        each[~point] = stdtr(self.freedom, distance[~point] / self.scales[~point])
        return (self.weights * each).sum(0)

    def density(self, x: np.ndarray) -> np.ndarray:
        """Return the density of the continuous components, ``(m,)``."""
        nu, z = self.freedom, self._standard(x - self.locations)
        constant = math.exp(math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)) / math.sqrt(nu * math.pi)
        each = constant * (1 + z * z / nu) ** (-(nu + 1) / 2)
        return (self.weights * np.divide(each, self.scales, out=np.zeros_like(each), where=self.scales > 0)).sum(0)

    def quantile(self, level: float) -> np.ndarray:
        """Return the quantiles by Newton's method, safeguarded by bisection, ``(m,)``."""
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


#: Maximum number of predictors for enumeration of all subsets.
MAX_PREDICTORS = 20
#: Minimum ratio of the residual norm of a predictor given the preceding predictors to its norm, both with the prior.
_LEAST_PIVOT = 1e-6


@runtime_checkable
class InclusionPrior(Protocol):
    """Protocol for priors over subsets of predictors."""

    def log_prob(self, inclusion: Tensor) -> Tensor:
        """Return log probabilities of inclusion indicators: ``(*batch, p)`` to ``(*batch)``."""
        ...


@dataclass(frozen=True)
class IndependentInclusion:
    """Independent inclusion of predictors with a common probability.

    Raises ``SettingsError`` if ``probability`` is not in (0, 1).

    Parameters
    ----------
    probability : float, default 0.5
        In (0, 1).

    Examples
    --------
    >>> import torch
    >>> IndependentInclusion(0.25).log_prob(torch.tensor([1.0, 0.0])).exp()
    tensor(0.1875)
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        real_number("probability", self.probability, "(0, 1)")

    def log_prob(self, inclusion: Tensor) -> Tensor:
        """Return log probabilities of inclusion indicators: ``(*batch, p)`` to ``(*batch)``."""
        size = inclusion.sum(-1)
        return size * math.log(self.probability) + (inclusion.shape[-1] - size) * math.log1p(-self.probability)


@dataclass(frozen=True)
class BetaBinomialInclusion:
    """Inclusion of predictors with a common unknown probability that has a beta prior.

    This prior adjusts for multiplicity. With ``alpha = beta = 1`` all subset sizes are equally probable. Raises
    ``SettingsError`` if a parameter is not positive.

    Parameters
    ----------
    alpha, beta : float, default 1.0
        Positive.

    References
    ----------
    Scott, J. G., Berger, J. O. (2010). Bayes and empirical-Bayes multiplicity adjustment in the variable-selection
    problem. Annals of Statistics 38, 2587-2619.

    Examples
    --------
    >>> import torch
    >>> BetaBinomialInclusion().log_prob(torch.tensor([1.0, 0.0])).exp()
    tensor(0.1667)
    """

    alpha: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        real_number("alpha", self.alpha, "(0, inf)")
        real_number("beta", self.beta, "(0, inf)")

    def log_prob(self, inclusion: Tensor) -> Tensor:
        """Return log probabilities of inclusion indicators: ``(*batch, p)`` to ``(*batch)``."""
        p = inclusion.shape[-1]
        inside = inclusion.sum(-1, dtype=torch.float64)
        found = _log_rising(self.alpha, inside) + _log_rising(self.beta, p - inside)
        found = found - _log_rising(self.alpha + self.beta, torch.full_like(inside, p))
        return found.to(inclusion.dtype if inclusion.is_floating_point() else torch.get_default_dtype())


def _log_rising(start: float, count: Tensor) -> Tensor:
    """Return ``lgamma(start + count) - lgamma(start)`` without cancellation for large ``start``."""
    if start < 20:
        return torch.lgamma(start + count) - math.lgamma(start)
    end = start + count
    return (start - 0.5) * (count / start).log1p() + count * (end.log() - 1) + _stirling(end) - _stirling(start)


def _stirling(x: Tensor | float) -> Tensor | float:
    """Return the correction to Stirling's formula for ``lgamma``, to double precision for x >= 20."""
    y = 1 / x
    return y * (1 / 12 - y * y * (1 / 360 - y * y * (1 / 1260 - y * y / 1680)))


@dataclass(frozen=True)
class SpikeAndSlabRegression:
    r"""Linear regression with a point mass at zero and a normal slab for each coefficient.

    Inclusion indicators :math:`\gamma \in \{0, 1\}^p`, noise variance :math:`\sigma^2 \sim \mathrm{IG}(a, b)`,
    intercept :math:`\mu \mid \sigma \sim N(0, \sigma^2 t^2)`, coefficients :math:`\beta_j = 0` if
    :math:`\gamma_j = 0` and :math:`\beta_j \mid \sigma \sim N(0, \sigma^2 s^2)` otherwise, responses
    :math:`y \sim N(\mu + X \beta, \sigma^2 I)`. All parameters except :math:`\gamma` are integrated out in closed form.

    Raises ``SettingsError`` if a scale, shape or rate is not positive, or ``inclusion`` is not an
    :class:`InclusionPrior`.

    Parameters
    ----------
    slab_scale : float, default 1.0
        Slab standard deviation ``s`` relative to the noise. It is common to all predictors, so standardize them or
        choose it for their units.
    intercept_scale : float, default 10.0
        Prior standard deviation ``t`` of the intercept relative to the noise.
    noise_shape, noise_rate : float, default 1.0
        ``a`` and ``b``, positive.
    inclusion : InclusionPrior, optional
        Prior over subsets, default :class:`BetaBinomialInclusion`.

    References
    ----------
    Mitchell, T. J., Beauchamp, J. J. (1988). Bayesian variable selection in linear regression. JASA 83, 1023-1032.

    George, E. I., McCulloch, R. E. (1997). Approaches for Bayesian variable selection. Statistica Sinica 7, 339-373.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.spike_and_slab import SpikeAndSlabRegression
    >>> x = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3).repeat(3, 1)
    >>> posterior = SpikeAndSlabRegression().posterior(x, 3.0 * x[:, 0])
    >>> posterior.median_probability_subset
    tensor([1., 0., 0.], dtype=torch.float64)
    """

    slab_scale: float = 1.0
    intercept_scale: float = 10.0
    noise_shape: float = 1.0
    noise_rate: float = 1.0
    inclusion: InclusionPrior = field(default_factory=BetaBinomialInclusion)

    def __post_init__(self) -> None:
        for name in ("slab_scale", "intercept_scale", "noise_shape", "noise_rate"):
            real_number(name, getattr(self, name), "(0, inf)")
        if not isinstance(self.inclusion, InclusionPrior):
            raise SettingsError(
                f"inclusion is {self.inclusion!r}, not a prior of subsets; use for example IndependentInclusion(0.5)"
            )

    def log_evidence(self, inclusion: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return log marginal likelihoods given subsets, ``(*batch)``.

        The computation is in double precision. The result has the wider dtype of ``x`` and ``y``, where integers count
        as double precision. ``inclusion``: inclusion indicators, ``(*batch, p)``. ``x`` (tensor or array): predictors,
        ``(n, p)``. ``y`` (tensor or array): responses, ``(n,)``. Raises ``ShapeError`` if shapes do not match;
        ``DataError`` if a value is not finite, or the full regression is numerically singular in double precision.
        """
        x, y = _read(x, y)
        if inclusion.shape[-1:] != x.shape[1:]:
            raise ShapeError(f"inclusion has shape {tuple(inclusion.shape)}, but x has {x.shape[1]} predictors")
        solved = self._solved(inclusion, self._summary(x.double(), y.double()))
        return solved.log_evidence.to(torch.promote_types(x.dtype, y.dtype))

    def model(self, x: Tensor, y: Tensor) -> None:
        """Pyro model with one latent site ``inclusion``, event shape ``(p,)``; coefficients are integrated out.

        The site has a Bernoulli(0.5) distribution; the factor ``inclusion_prior`` corrects it to the prior. ``x``,
        ``y`` (tensor or array): as in :meth:`log_evidence`. Raises ``ShapeError`` or ``DataError`` as in
        :meth:`log_evidence`.
        """
        x, y = _read(x, y)
        p = x.shape[1]
        inclusion = pyro.sample("inclusion", dist.Bernoulli(probs=x.new_full((p,), 0.5)).to_event(1))
        pyro.factor("inclusion_prior", self.inclusion.log_prob(inclusion) + p * math.log(2))
        pyro.factor("y", self.log_evidence(inclusion, x, y))

    def posterior(self, x: Tensor, y: Tensor) -> SubsetPosterior:
        """Return the exact posterior over all subsets of predictors.

        ``x``, ``y`` (tensor or array): as in :meth:`log_evidence`. The columns of a data frame name the predictors.
        Results have double precision. Raises ``ShapeError`` or ``DataError`` as in :meth:`log_evidence`;
        ``SettingsError`` if there are more than 20 predictors.
        """
        names = getattr(x, "columns", None)
        x, y = (value.double() for value in _read(x, y))
        p = x.shape[1]
        if p > MAX_PREDICTORS:
            raise SettingsError(
                f"{p} predictors have {2**p} subsets, but enumeration allows at most {MAX_PREDICTORS} predictors; "
                "remove predictors, or fit a guide for the site 'inclusion' with a gradient estimator"
            )
        subsets = digits_of(2**p, 2, p, x.device).to(x.dtype)
        summary = self._summary(x, y)
        parts = [self._solved(part, summary) for part in subsets.split(_BATCH)]
        log_evidence, coefficients, rate = (torch.cat(each) for each in zip(*parts, strict=True))
        log_joint = log_evidence + self.inclusion.log_prob(subsets)
        return SubsetPosterior(
            subsets,
            log_evidence,
            log_joint.softmax(0),
            float(log_joint.logsumexp(0)),
            coefficients,
            self.noise_shape + 0.5 * len(x),
            rate,
            partial(self._roots, summary),
            tuple(f"x[{j}]" for j in range(p)) if names is None else tuple(map(str, names)),
        )

    def _summary(self, x: Tensor, y: Tensor) -> _Summary:
        """Return the summary statistics of the data."""
        (n, p), mean_x, mean_y = x.shape, x.mean(0), y.mean()
        centred = self.slab_scale * (x - mean_x)
        responses = y - mean_y
        # The prior of each coefficient, in units of the slab, is equivalent to one additional response of zero.
        orthogonal, triangle = torch.linalg.qr(torch.cat([centred, torch.eye(p).to(x)]))
        best = torch.linalg.solve_triangular(triangle, (orthogonal[:n].mT @ responses).unsqueeze(-1), upper=True)
        best = best.squeeze(-1)
        least = (responses - centred @ best).square().sum() + best.square().sum()
        pivot = (triangle.diagonal() / torch.linalg.vector_norm(triangle, dim=0)).abs().min()
        if not bool((pivot > _LEAST_PIVOT) & least.isfinite()):
            raise DataError(
                f"with slab_scale {self.slab_scale:g}, x or y are too large or predictors too nearly collinear for "
                "double precision; centre and scale x and y, remove predictors that are linearly dependent on others, "
                "or lower slab_scale"
            )
        return _Summary(n, mean_x, mean_y, centred.mT @ centred, centred.mT @ responses, triangle, best, least)

    def _solved(self, inclusion: Tensor, data: _Summary) -> _Solved:
        """Integrate out coefficients and noise for each row of ``inclusion (*batch, p)``."""
        kept = inclusion.to(data.gram)
        unit, row, factor = self._precision(kept, data)
        # Condition on the centred responses first, then on their mean as one more response, scaled by its prior
        # standard deviation from intercept and noise. Only sums of squares occur, so an offset causes no cancellation.
        right = torch.stack([kept * data.projected, kept * row], -1)
        half = torch.linalg.solve_triangular(factor, right, upper=False)
        weights, gain = torch.linalg.solve_triangular(factor.mT, half, upper=True).unbind(-1)
        # The minimum of the squares for a subset exceeds the minimum for all predictors by the squared distance of the
        # solutions.
        distance = (kept * weights - data.best) @ data.triangle.mT
        squares = data.least + distance.square().sum(-1) + (weights.square() * (1 - kept.square())).sum(-1)
        leverage = half[..., 1].square().sum(-1)
        surprise = data.mean_y / unit - (kept * weights) @ row
        squares = squares + surprise.square() / (1 + leverage)
        weights = weights + gain * (surprise / (1 + leverage)).unsqueeze(-1)

        slopes = self.slab_scale * kept * weights
        intercept = (self.intercept_scale / unit) ** 2 * (data.mean_y - slopes @ data.mean_x)
        log_determinant = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * leverage.log1p()
        log_determinant = log_determinant + math.log(unit) + 0.5 * math.log(data.n)
        shape = self.noise_shape + 0.5 * data.n
        constant = self.noise_shape * math.log(self.noise_rate) - math.lgamma(self.noise_shape) + math.lgamma(shape)
        log_evidence = constant - 0.5 * data.n * math.log(2 * math.pi) - log_determinant
        rate = self.noise_rate + 0.5 * squares
        return _Solved(log_evidence - shape * rate.log(), torch.cat([intercept.unsqueeze(-1), slopes], -1), rate)

    def _roots(self, data: _Summary, inclusion: Tensor) -> Tensor:
        """Return square roots of coefficient covariances divided by the noise variance, ``(k, 1 + p, 1 + p)``."""
        kept = inclusion.to(data.gram)
        unit, row, factor = self._precision(kept, data)
        half = torch.linalg.solve_triangular(factor, (kept * row).unsqueeze(-1), upper=False).squeeze(-1)
        # The mean response adds a rank-one term to the precision, so the root of the inverse is downdated.
        growth = (1 + half.square().sum(-1)).sqrt()
        less = half.unsqueeze(-1) * half.unsqueeze(-2) / (growth * (1 + growth)).unsqueeze(-1).unsqueeze(-1)
        root = torch.linalg.solve_triangular(factor.mT, torch.eye(len(row)).to(kept) - less, upper=True)
        slopes = self.slab_scale * kept.unsqueeze(-1) * root
        share = (self.intercept_scale / unit) ** 2
        intercept = -share * (data.mean_x @ slopes)
        own = torch.full_like(intercept[..., :1], math.sqrt(share / data.n))
        first = torch.cat([own, intercept], -1).unsqueeze(-2)
        return torch.cat([first, torch.nn.functional.pad(slopes, (1, 0))], -2)

    def _precision(self, kept: Tensor, data: _Summary) -> tuple[float, Tensor, Tensor]:
        """Return scale and predictors of the mean response, and the Cholesky factor of the centred data's precision."""
        unit = math.hypot(self.intercept_scale, data.n**-0.5)
        # Excluded predictors have a unit row in the precision.
        precision = kept.unsqueeze(-1) * data.gram * kept.unsqueeze(-2) + torch.eye(len(data.gram)).to(kept)
        factor, _ = torch.linalg.cholesky_ex(precision)
        return unit, self.slab_scale / unit * data.mean_x, factor


class _Solved(NamedTuple):
    """Marginal likelihoods and posterior moments of subsets of predictors."""

    log_evidence: Tensor  # (*batch)
    coefficients: Tensor  # (*batch, 1 + p): posterior means, intercept first
    noise_rate: Tensor  # (*batch): rate of the posterior of the noise variance


class _Summary(NamedTuple):
    """Means and centred cross products of the data, with predictors multiplied by the slab scale."""

    n: int
    mean_x: Tensor  # (p,)
    mean_y: Tensor  # ()
    gram: Tensor  # (p, p): cross products of predictors
    projected: Tensor  # (p,): cross products of predictors and responses
    triangle: Tensor  # (p, p): upper triangular root of gram plus the identity (prior precision)
    best: Tensor  # (p,): posterior mode of the coefficients with all predictors
    least: Tensor  # (): residual sum of squares plus squared norm of these coefficients


def _read(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return predictors and responses as floating-point tensors."""
    x, y = (_floating(as_numbers(name, value)) for name, value in (("x", x), ("y", y)))
    if x.dim() != 2 or y.shape != x.shape[:1]:
        raise ShapeError(f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; they must be (n, p) and (n,)")
    if not x.numel():
        raise ShapeError(f"x has {x.shape[0]} rows and {x.shape[1]} predictors; give at least one of each")
    for name, value in (("x", x), ("y", y)):
        if not bool(value.isfinite().all()):
            position = tuple((~value.isfinite()).nonzero()[0].tolist())
            raise DataError(f"{name} is not finite at index {position}; remove or impute that entry")
    return x, y


def _floating(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.double()
