"""Random test problems with known evidence: models, data and hyperparameters are drawn from a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from scipy import stats
from scipy.special import betaln, gammaln, log_expit, logsumexp, multigammaln
from scipy.stats import norm
from torch import Tensor

from bayeskit._core.inputs import whole_number
from bayeskit.errors import SettingsError
from bayeskit.exact._case import ExactCase
from bayeskit.exact._family import (
    MAX_ERROR,
    Density,
    Family,
    Numbers,
    log_integral,
    log_integral_over_space,
    tensors,
    wide,
)
from bayeskit.exact._generated_extremes import (
    EXTREME_FAMILIES,
    AngleAcrossCut,
    ChangePoint,
    ConstantLikelihood,
    FiftyThousandRows,
    HardEdges,
    ManyCoefficients,
    ManyRows,
    NarrowInsideWide,
    NormalModes,
    Ridge,
    ScaledRegression,
    ShrunkMeans,
    VagueScale,
)

__all__ = [
    "AngleAcrossCut",
    "Autoregression",
    "BetaBernoulli",
    "BetaBinomialGroups",
    "CauchyStudent",
    "ChangePoint",
    "ConstantLikelihood",
    "CorrelationPair",
    "Density",
    "DirichletMultinomial",
    "EXTREME_FAMILIES",
    "FAMILIES",
    "Family",
    "FiftyThousandRows",
    "GammaPoisson",
    "HalfCauchyScale",
    "HardEdges",
    "IntervalLocation",
    "InverseGammaNormal",
    "LocalLevel",
    "LogisticSlope",
    "MAX_ERROR",
    "ManyCoefficients",
    "ManyRows",
    "NarrowInsideWide",
    "NormalGroups",
    "NormalModes",
    "NormalRegression",
    "Numbers",
    "OrderedCuts",
    "PoissonGroups",
    "PositiveScale",
    "Ridge",
    "ScaledRegression",
    "SeveralCoefficients",
    "ShrunkMeans",
    "SinglePrecision",
    "TwoMeans",
    "TwoStateMarkov",
    "UniformWall",
    "VagueScale",
    "WishartNormal",
    "generate",
    "log_integral",
    "log_integral_over_space",
    "shrink",
    "tensors",
    "wide",
]


# Families of generated problems: other supports, groups, regressions, time series and single precision.


def _rounded(values: np.ndarray, digits: int = 4) -> Numbers:
    return tuple(np.round(values, digits).tolist())


# -- other supports -------------------------------------------------------------------------------------------

_KINDS = ("LogNormal", "Weibull", "Pareto", "HalfNormal", "Exponential")


def _kind_model(y: Tensor, kind: Tensor, a: Tensor, b: Tensor) -> None:
    prior = (dist.LogNormal(a.log(), b), dist.Weibull(a, b), dist.Pareto(a, b), dist.HalfNormal(a), dist.Exponential(a))
    scale = pyro.sample("scale", prior[int(kind)])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)


@dataclass(frozen=True)
class PositiveScale(Family):
    """A standard deviation with a log-normal, Weibull, Pareto, half-normal or exponential prior."""

    kind: str
    a: float
    b: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> PositiveScale:
        """Draw prior and data."""
        y = wide(rng, 1e-2, 1e2) * rng.standard_normal(rng.integers(1, 12))
        return cls(str(rng.choice(_KINDS)), wide(rng, 0.05, 20), wide(rng, 0.3, 5), _rounded(y, 5))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithm of the scale."""
        a, b, n, square = self.a, self.b, len(self.y), sum(v * v for v in self.y)
        prior = {
            "LogNormal": stats.lognorm(b, scale=a),
            "Weibull": stats.weibull_min(b, scale=a),
            "Pareto": stats.pareto(b, scale=a),
            "HalfNormal": stats.halfnorm(scale=a),
            "Exponential": stats.expon(scale=1 / a),
        }[self.kind]

        def log_f(t: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                likelihood = -n * t - 0.5 * square * np.exp(-2 * t) - 0.5 * n * math.log(2 * math.pi)
                return np.asarray(prior.logpdf(np.exp(t)) + t + likelihood)

        # Offset by rounding error, so that the first node is inside the support of a Pareto distribution.
        low = math.log(a) + 1e-15 if self.kind == "Pareto" else -60.0
        return log_integral(log_f, low, 60.0 + max(0.0, low))

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _kind_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, kind of prior, and its parameters."""
        return tensors(self.y, float(_KINDS.index(self.kind)), self.a, self.b)


def _interval_model(y: Tensor, low: Tensor, width: Tensor, noise: Tensor) -> None:
    location = pyro.sample("location", dist.Uniform(low, low + width))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(location, noise), obs=y)


@dataclass(frozen=True)
class IntervalLocation(Family):
    """A location with a uniform prior on an interval; data may lie outside the interval."""

    low: float
    width: float
    noise: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> IntervalLocation:
        """Draw interval and data."""
        noise, y = wide(rng, 0.05, 5), rng.standard_normal(rng.integers(1, 10)) * 0.3 + rng.uniform(-2, 2)
        return cls(round(float(rng.uniform(-2, 1)), 3), wide(rng, 0.1, 20), noise, _rounded(y))

    def log_evidence(self) -> tuple[float, float]:
        """Compute the probability of the interval under a normal distribution with fifty digits."""
        from mpmath import mp, workdps

        y, n = np.array(self.y), len(self.y)
        with workdps(50):
            mean, error = mp.mpf(float(y.mean())), mp.mpf(self.noise) / mp.sqrt(n)
            ends = [(mp.mpf(end) - mean) / error for end in (self.low, self.low + self.width)]
            if ends[0] > 0:  # use the lower tail, without cancellation
                ends = [-ends[1], -ends[0]]
            inside = float(mp.log(mp.ncdf(ends[1]) - mp.ncdf(ends[0])) + mp.log(error))
        residual = norm.logpdf(y, y.mean(), self.noise).sum() + 0.5 * math.log(2 * math.pi)
        return inside + float(residual) - math.log(self.width), 1e-10

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _interval_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, interval and noise."""
        return tensors(self.y, self.low, self.width, self.noise)


def _wishart_model(y: Tensor, freedom: Tensor, scale: Tensor) -> None:
    d = y.shape[-1]
    eye = torch.eye(d, dtype=y.dtype, device=y.device)
    precision = pyro.sample("precision", dist.Wishart(freedom, scale * eye))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(y.new_zeros(d), precision_matrix=precision), obs=y)


@dataclass(frozen=True)
class WishartNormal(Family):
    """A precision matrix with a Wishart prior; normal data in two or three dimensions."""

    freedom: float
    scale: float
    dim: int
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> WishartNormal:
        """Draw prior and data."""
        d = int(rng.integers(2, 4))
        y = wide(rng, 0.1, 10) * rng.standard_normal((int(rng.integers(1, 10)), d)) @ rng.standard_normal((d, d))
        return cls(d - 1 + wide(rng, 0.3, 20), wide(rng, 0.05, 20), d, _rounded(y.ravel()))

    def log_evidence(self) -> tuple[float, float]:
        """Return the ratio of normalising constants."""
        y, d, v = np.array(self.y).reshape(-1, self.dim), self.dim, self.freedom
        n = len(y)
        _, log_det = np.linalg.slogdet(np.eye(d) / self.scale + y.T @ y)
        value = multigammaln((v + n) / 2, d) - multigammaln(v / 2, d) - 0.5 * v * d * math.log(self.scale)
        return float(value - 0.5 * (v + n) * log_det - 0.5 * n * d * math.log(math.pi)), 1e-9

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _wishart_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data and prior."""
        return tensors(np.array(self.y).reshape(-1, self.dim), self.freedom, self.scale)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with the first observation only, or with scale 1."""
        yield replace(self, y=self.y[: self.dim])
        yield replace(self, scale=1.0)


def _pair_model(y: Tensor, concentration: Tensor) -> None:
    factor = pyro.sample("factor", dist.LKJCholesky(2, concentration))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(y.new_zeros(2), scale_tril=factor), obs=y)


@dataclass(frozen=True)
class CorrelationPair(Family):
    """A correlation with an LKJ prior; bivariate normal data with unit variances."""

    concentration: float
    x: Numbers
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> CorrelationPair:
        """Draw prior and data."""
        r, z = math.tanh(rng.normal(0, 1.5)), rng.standard_normal((2, int(rng.integers(1, 15))))
        return cls(wide(rng, 0.1, 20), _rounded(z[0]), _rounded(r * z[0] + math.sqrt(1 - r * r) * z[1]))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over Fisher's transform of the correlation."""
        x, y, c = np.array(self.x), np.array(self.y), self.concentration
        square, product, n = x @ x + y @ y, x @ y, len(x)

        def log_f(t: np.ndarray) -> np.ndarray:
            log_rest = 2 * (math.log(2) - np.logaddexp(t, -t))  # log of one minus the squared correlation
            prior = c * log_rest - (2 * c - 1) * math.log(2) - betaln(c, c)
            quadratic = (square - 2 * np.tanh(t) * product) * np.exp(-log_rest)
            return np.asarray(prior - 0.5 * quadratic - n * (math.log(2 * math.pi) + 0.5 * log_rest))

        with np.errstate(over="ignore"):
            return log_integral(log_f, -300.0, 300.0)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _pair_model

    def args(self) -> tuple[Tensor, ...]:
        """Return pairs and prior."""
        return tensors(np.stack([self.x, self.y], -1), self.concentration)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the pairs, or with a uniform prior."""
        if len(self.x) > 1:
            yield replace(self, x=self.x[: len(self.x) // 2], y=self.y[: len(self.y) // 2])
        yield replace(self, concentration=1.0)


def _cuts_model(y: Tensor, x: Tensor, prior: Tensor, num_cuts: Tensor) -> None:
    base = dist.Normal(torch.zeros_like(prior), prior).expand([len(num_cuts)]).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()]))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(x, cuts), obs=y)


@dataclass(frozen=True)
class OrderedCuts(Family):
    """Two ordered cut points; ordinal data with three categories."""

    prior: float
    x: Numbers
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> OrderedCuts:
        """Draw prior and data."""
        x = rng.standard_normal(int(rng.integers(2, 15))) * wide(rng, 0.2, 4)
        return cls(wide(rng, 0.3, 5), _rounded(x), tuple(map(float, rng.integers(0, 3, len(x)))))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the first cut point and the logarithm of the distance to the second."""
        x, y = np.array(self.x), np.array(self.y)

        def log_f(u: np.ndarray) -> np.ndarray:
            first, gap = u[:, :1], np.exp(u[:, 1:])
            low, high = log_expit(first - x), log_expit(x - first - gap)
            # Probability of the middle category: a difference of two logistic functions, without cancellation.
            middle = np.log(-np.expm1(-gap)) + log_expit(x - first) + log_expit(first + gap - x)
            likelihood = np.select([y == 0, y == 1], [low, middle], high).sum(1)
            return np.asarray(norm.logpdf(u, scale=self.prior).sum(1) + likelihood)

        with np.errstate(over="ignore", divide="ignore"):
            return log_integral_over_space(log_f, [0.0, 0.0])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _cuts_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, predictor, prior scale, and a vector with the length of the cut points."""
        return tensors(self.y, self.x, self.prior, [0.0, 0.0])

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the data, or with prior scale 1."""
        if len(self.x) > 1:
            yield replace(self, x=self.x[: len(self.x) // 2], y=self.y[: len(self.y) // 2])
        yield replace(self, prior=1.0)


# -- regressions and groups -----------------------------------------------------------------------------------


def _logistic_model(y: Tensor, x: Tensor, prior: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros_like(prior), prior).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def _poisson_model(y: Tensor, x: Tensor, prior: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros_like(prior), prior).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((x @ b).exp()), obs=y)


@dataclass(frozen=True)
class SeveralCoefficients(Family):
    """A logistic or Poisson regression with two coefficients; the covariate is uncentred and badly scaled."""

    counts: bool
    prior: float
    scale: float
    offset: float
    num_data: int
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> SeveralCoefficients:
        """Draw hyperparameters; the data are drawn from a seed."""
        counts = bool(rng.random() < 0.5)
        scale, offset = wide(rng, 0.1, 3 if counts else 20), wide(rng, 0.01, 10)
        return cls(counts, wide(rng, 0.2, 5), scale, offset, int(rng.integers(3, 30)), int(rng.integers(1000)))

    def _data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        x = np.stack([np.ones(self.num_data), self.scale * (rng.standard_normal(self.num_data) + self.offset)], 1)
        eta = np.clip(x @ np.array([0.3, 0.5 / (self.scale * (1 + self.offset))]), -20, 8)
        y = rng.poisson(np.exp(eta)) if self.counts else rng.random(self.num_data) < 1 / (1 + np.exp(-eta))
        return x, y.astype(float)

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over both coefficients."""
        x, y = self._data()

        def log_f(b: np.ndarray) -> np.ndarray:
            eta = b @ x.T
            terms = y * eta - np.exp(eta) - gammaln(y + 1) if self.counts else log_expit((2 * y - 1) * eta)
            return np.asarray(norm.logpdf(b, scale=self.prior).sum(1) + terms.sum(1))

        with np.errstate(over="ignore"):
            return log_integral_over_space(log_f, [0.0, 0.0])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _poisson_model if self.counts else _logistic_model

    def args(self) -> tuple[Tensor, ...]:
        """Return response, covariates and prior."""
        x, y = self._data()
        return (torch.from_numpy(y), torch.from_numpy(x), *tensors(self.prior))


def _rates_model(y: Tensor, width: Tensor) -> None:
    shape = pyro.sample("shape", dist.LogNormal(torch.zeros_like(width), width))
    mean = pyro.sample("mean", dist.LogNormal(torch.zeros_like(width), width))
    with pyro.plate("groups", len(y)):
        rate = pyro.sample("rate", dist.Gamma(shape, shape / mean))
        pyro.sample("y", dist.Poisson(rate), obs=y)


@dataclass(frozen=True)
class PoissonGroups(Family):
    """Groups with gamma distributed rates; one Poisson count per group."""

    width: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> PoissonGroups:
        """Draw the prior's width and data."""
        rates = wide(rng, 0.3, 30) * rng.gamma(1.0, 1.0, int(rng.integers(2, 8)))
        return cls(wide(rng, 0.3, 1.5), tuple(map(float, rng.poisson(rates))))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithms of shape and mean; counts are negative binomial given both."""
        y = np.array(self.y)

        def log_f(u: np.ndarray) -> np.ndarray:
            shape, log_share = np.exp(u[:, :1]), u[:, :1] - np.logaddexp(u[:, :1], u[:, 1:])
            other = u[:, 1:] - np.logaddexp(u[:, :1], u[:, 1:])
            terms = gammaln(shape + y) - gammaln(shape) - gammaln(y + 1) + shape * log_share + y * other
            return np.asarray(norm.logpdf(u, scale=self.width).sum(1) + terms.sum(1))

        return log_integral_over_space(log_f, [0.0, math.log(max(y.mean(), 0.3))])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _rates_model

    def args(self) -> tuple[Tensor, ...]:
        """Return counts and prior."""
        return tensors(self.y, self.width)


def _shares_of_groups_model(y: Tensor, total: Tensor, width: Tensor) -> None:
    a = pyro.sample("a", dist.LogNormal(torch.zeros_like(width), width))
    b = pyro.sample("b", dist.LogNormal(torch.zeros_like(width), width))
    with pyro.plate("groups", len(y)):
        p = pyro.sample("p", dist.Beta(a, b))
        pyro.sample("y", dist.Binomial(total, p), obs=y)


@dataclass(frozen=True)
class BetaBinomialGroups(Family):
    """Groups with beta distributed probabilities; binomial counts."""

    width: float
    total: int
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> BetaBinomialGroups:
        """Draw the prior's width and data."""
        total, p = int(rng.integers(2, 30)), rng.beta(2.0, 2.0, int(rng.integers(2, 7)))
        return cls(wide(rng, 0.3, 1.0), total, tuple(map(float, rng.binomial(total, p))))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithms of the beta distribution's parameters."""
        y, n = np.array(self.y), self.total
        constant = float((gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1)).sum())

        def log_f(u: np.ndarray) -> np.ndarray:
            a, b = np.exp(u[:, :1]), np.exp(u[:, 1:])
            terms = betaln(a + y, b + n - y) - betaln(a, b)
            return np.asarray(norm.logpdf(u, scale=self.width).sum(1) + terms.sum(1) + constant)

        return log_integral_over_space(log_f, [0.0, 0.0])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _shares_of_groups_model

    def args(self) -> tuple[Tensor, ...]:
        """Return counts, totals and prior."""
        return tensors(self.y, float(self.total), self.width)


# -- time series ----------------------------------------------------------------------------------------------


def _level_model(y: Tensor, seen: Tensor, width: Tensor) -> None:
    drift = pyro.sample("drift", dist.LogNormal(torch.zeros_like(width), width))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros_like(width), width))
    steps = pyro.sample("steps", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    level = drift * steps.cumsum(-1)
    with pyro.plate("data", len(y)), poutine.mask(mask=seen > 0):  # type: ignore[call-overload]
        pyro.sample("y", dist.Normal(level, noise), obs=y)


@dataclass(frozen=True)
class LocalLevel(Family):
    """A random walk observed with noise, both variances unknown; one observation may be missing."""

    width: float
    y: Numbers
    missing: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> LocalLevel:
        """Draw the prior's width and data."""
        n = int(rng.integers(2, 8))
        y = wide(rng, 0.2, 3) * rng.standard_normal(n).cumsum() + wide(rng, 0.2, 3) * rng.standard_normal(n)
        return cls(wide(rng, 0.3, 1.0), _rounded(y), int(rng.integers(-1, n - 1)))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithms of both scales, with a Kalman filter at each point."""

        def log_f(u: np.ndarray) -> np.ndarray:
            drift, noise = np.exp(2 * u[:, 0]), np.exp(2 * u[:, 1])
            mean, variance, value = np.zeros(len(u)), np.zeros(len(u)), norm.logpdf(u, scale=self.width).sum(1)
            for t, y in enumerate(self.y):
                variance = variance + drift
                if t == self.missing:
                    continue
                total = variance + noise
                value = value + norm.logpdf(y, mean, np.sqrt(total))
                mean, variance = mean + variance / total * (y - mean), variance * noise / total
            return np.asarray(value)

        return log_integral_over_space(log_f, [0.0, 0.0])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _level_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, indicators of observed values, and prior."""
        return tensors(self.y, [float(t != self.missing) for t in range(len(self.y))], self.width)


def _autoregression_model(y: Tensor, width: Tensor) -> None:
    phi = pyro.sample("phi", dist.Uniform(-torch.ones_like(width), torch.ones_like(width)))
    scale = pyro.sample("scale", dist.HalfCauchy(width))
    with pyro.plate("data", len(y) - 1):
        pyro.sample("y", dist.Normal(phi * y[:-1], scale), obs=y[1:])


@dataclass(frozen=True)
class Autoregression(Family):
    """A first-order autoregression with mean zero, conditional on its first value."""

    width: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> Autoregression:
        """Draw the prior's width and a series."""
        y, phi, scale = [rng.standard_normal()], rng.uniform(-0.95, 0.95), wide(rng, 0.1, 10)
        for _ in range(int(rng.integers(3, 25))):
            y.append(phi * y[-1] + scale * rng.standard_normal())
        return cls(wide(rng, 0.1, 10), _rounded(np.array(y)))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over Fisher's transform of the coefficient and the logarithm of the scale."""
        y = np.array(self.y)

        def log_f(u: np.ndarray) -> np.ndarray:
            z, t = u[:, :1], u[:, 1:]
            prior = 2 * (math.log(2) - np.logaddexp(z, -z)) - math.log(2)
            r = t - math.log(self.width)
            prior = prior + math.log(2 / math.pi) + r - np.logaddexp(0, 2 * r)
            return np.asarray(prior[:, 0] + norm.logpdf(y[1:], np.tanh(z) * y[:-1], np.exp(t)).sum(1))

        with np.errstate(over="ignore", divide="ignore"):
            return log_integral_over_space(log_f, [0.0, math.log(y.std())])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _autoregression_model

    def args(self) -> tuple[Tensor, ...]:
        """Return series and prior."""
        return tensors(self.y, self.width)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the series (at least three values), or with width 1."""
        if len(self.y) > 5:
            yield replace(self, y=self.y[: len(self.y) // 2])
        yield replace(self, width=1.0)


def _hidden_model(y: Tensor, a: Tensor, b: Tensor, prior: Tensor) -> None:
    stay = pyro.sample("stay", dist.Beta(a, b))
    height = pyro.sample("height", dist.LogNormal(torch.zeros_like(prior), prior))
    state: Any = None
    for t in pyro.markov(range(len(y))):
        one = 0.5 * torch.ones_like(stay) if state is None else torch.where(state > 0, stay, 1 - stay)
        state = pyro.sample(f"state_{t}", dist.Bernoulli(one), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Normal((2 * state - 1) * height, 1.0), obs=y[t])


@dataclass(frozen=True)
class TwoStateMarkov(Family):
    """A two-state hidden Markov model, states summed out; unknown probability to stay and height of the states."""

    a: float
    b: float
    prior: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> TwoStateMarkov:
        """Draw hyperparameters and a series."""
        n = int(rng.integers(2, 7))
        y = wide(rng, 0.3, 3) * np.where(rng.random(n) < 0.3, -1, 1).cumprod() + rng.standard_normal(n)
        return cls(wide(rng, 0.3, 10), wide(rng, 0.3, 10), wide(rng, 0.3, 1.0), _rounded(y))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logit and the logarithm, with the forward algorithm at each point."""

        def log_f(u: np.ndarray) -> np.ndarray:
            log_stay, log_leave = log_expit(u[:, 0]), log_expit(-u[:, 0])
            prior = self.a * log_stay + self.b * log_leave - betaln(self.a, self.b)
            height, forward = np.exp(u[:, 1]), np.full((2, len(u)), math.log(0.5))
            for t, y in enumerate(self.y):
                if t:
                    change = np.stack([[log_stay, log_leave], [log_leave, log_stay]])
                    forward = logsumexp(forward[:, None] + change, axis=0)
                forward = forward + norm.logpdf(y, np.stack([-height, height]))
            return np.asarray(prior + norm.logpdf(u[:, 1], scale=self.prior) + logsumexp(forward, axis=0))

        return log_integral_over_space(log_f, [0.0, 0.0])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _hidden_model

    def args(self) -> tuple[Tensor, ...]:
        """Return series and priors."""
        return tensors(self.y, self.a, self.b, self.prior)


# -- single precision -----------------------------------------------------------------------------------------

_SINGLE: tuple[type[Family], ...] = (PositiveScale, IntervalLocation, PoissonGroups, LocalLevel, Autoregression)


def _single(value: Any) -> Any:
    """Round floating-point numbers to single precision."""
    if isinstance(value, tuple):
        return tuple(map(_single, value))
    return float(np.float32(value)) if isinstance(value, float) else value


@dataclass(frozen=True)
class SinglePrecision(Family):
    """Another problem in single precision, with numbers rounded to single precision."""

    problem: Family

    @classmethod
    def random(cls, rng: np.random.Generator) -> SinglePrecision:
        """Draw another problem and round its numbers."""
        return cls(_SINGLE[int(rng.integers(len(_SINGLE)))].random(rng)).rounded()

    def rounded(self) -> SinglePrecision:
        """Return the problem with numbers rounded to single precision."""
        inner = self.problem
        return SinglePrecision(
            replace(inner, **{f.name: _single(getattr(inner, f.name)) for f in dataclasses.fields(inner)})
        )

    def log_evidence(self) -> tuple[float, float]:
        """Return the log evidence of the problem in double precision, and its error."""
        return self.problem.log_evidence()

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return self.problem.model()

    def args(self) -> tuple[Tensor, ...]:
        """Return the arguments in single precision."""
        return tuple(value.to(torch.float32) for value in self.problem.args())

    def simpler(self) -> Iterator[Family]:
        """Yield simpler problems in single precision, then the problem in double precision."""
        for form in self.problem.simpler():
            yield SinglePrecision(form).rounded()
        yield self.problem

    def case(self) -> ExactCase:
        """Return the problem as an :class:`ExactCase` with arguments in single precision."""
        return replace(super().case(), description=f"{type(self).__doc__} {type(self.problem).__doc__}")


# A family is a frozen dataclass with hyperparameters and data as fields. :meth:`Family.random` draws them over extreme
# ranges. :meth:`Family.case` computes the evidence without code of the estimators: in closed form or by quadrature with
# an error estimate, with filters for time series. Evaluating the ``repr`` of a problem rebuilds it. New families are
# subclasses; :func:`generate` takes families as an argument.

# -- closed forms ---------------------------------------------------------------------------------------------


def _bits_model(y: Tensor, a: Tensor, b: Tensor, weight: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(a, b))
    with pyro.plate("data", len(y)), poutine.scale(scale=weight):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


@dataclass(frozen=True)
class BetaBernoulli(Family):
    """A probability with a beta prior; weighted Bernoulli data."""

    a: float
    b: float
    weight: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> BetaBernoulli:
        """Draw hyperparameters and data."""
        y = tuple(map(float, rng.integers(0, 2, rng.integers(1, 12)))) if rng.random() < 0.6 else (1.0,) * 3
        return cls(wide(rng, 0.005, 50), wide(rng, 0.005, 50), 1.0 if rng.random() < 0.7 else wide(rng, 0.1, 5), y)

    def log_evidence(self) -> tuple[float, float]:
        """Return the ratio of beta functions."""
        ones, zeros = self.weight * sum(self.y), self.weight * (len(self.y) - sum(self.y))
        return float(betaln(self.a + ones, self.b + zeros) - betaln(self.a, self.b)), 1e-12

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _bits_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, prior and weight."""
        return tensors(self.y, self.a, self.b, self.weight)


def _counts_model(y: Tensor, shape: Tensor, rate: Tensor, seen: Tensor) -> None:
    value = pyro.sample("rate", dist.Gamma(shape, rate))
    with pyro.plate("data", len(y)), poutine.mask(mask=seen > 0):  # type: ignore[call-overload]
        pyro.sample("y", dist.Poisson(value), obs=y)


@dataclass(frozen=True)
class GammaPoisson(Family):
    """A rate with a gamma prior; Poisson counts, some of them masked."""

    shape: float
    rate: float
    y: Numbers
    seen: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> GammaPoisson:
        """Draw hyperparameters and data."""
        n = int(rng.integers(1, 12))
        y = tuple(map(float, rng.poisson(wide(rng, 0.05, 200), n)))
        return cls(wide(rng, 0.001, 100), wide(rng, 0.001, 100), y, int(rng.integers(1, n + 1)))

    def log_evidence(self) -> tuple[float, float]:
        """Return the negative multinomial log probability of the observed counts."""
        y = np.array(self.y[: self.seen])
        a, b = self.shape + y.sum(), self.rate + len(y)
        value = self.shape * math.log(self.rate) - gammaln(self.shape) + gammaln(a) - a * math.log(b)
        return float(value - gammaln(y + 1).sum()), 1e-12

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _counts_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, prior and mask."""
        return tensors(self.y, self.shape, self.rate, [float(i < self.seen) for i in range(len(self.y))])


def _variance_model(y: Tensor, shape: Tensor, scale: Tensor) -> None:
    variance = pyro.sample("variance", dist.InverseGamma(shape, scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, variance.sqrt()), obs=y)


@dataclass(frozen=True)
class InverseGammaNormal(Family):
    """A variance with an inverse gamma prior; normal data."""

    shape: float
    scale: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> InverseGammaNormal:
        """Draw hyperparameters and data."""
        y = tuple(np.round(wide(rng, 1e-3, 1e3) * rng.standard_normal(rng.integers(1, 15)), 5).tolist())
        return cls(wide(rng, 0.01, 50), wide(rng, 1e-4, 1e4), y)

    def log_evidence(self) -> tuple[float, float]:
        """Return the multivariate Student-t log density."""
        half, square = 0.5 * len(self.y), 0.5 * sum(v * v for v in self.y)
        value = self.shape * math.log(self.scale) - gammaln(self.shape) + gammaln(self.shape + half)
        return float(value - (self.shape + half) * math.log(self.scale + square) - half * math.log(2 * math.pi)), 1e-11

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _variance_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data and prior."""
        return tensors(self.y, self.shape, self.scale)


def _shares_model(counts: Tensor, concentration: Tensor) -> None:
    shares = pyro.sample("shares", dist.Dirichlet(concentration))
    total = int(counts.sum())
    pyro.sample("counts", dist.Multinomial(total, probs=shares), obs=counts)


@dataclass(frozen=True)
class DirichletMultinomial(Family):
    """Probabilities with a Dirichlet prior; multinomial counts of three to six categories."""

    concentration: Numbers
    counts: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> DirichletMultinomial:
        """Draw hyperparameters and data."""
        kinds = int(rng.integers(3, 7))
        counts = rng.multinomial(int(rng.integers(1, 40)), rng.dirichlet(np.full(kinds, 0.7)))
        return cls(tuple(wide(rng, 0.02, 20) for _ in range(kinds)), tuple(map(float, counts)))

    def log_evidence(self) -> tuple[float, float]:
        """Return the Dirichlet-multinomial log probability."""
        a, n = np.array(self.concentration), np.array(self.counts)
        value = gammaln(a.sum()) - gammaln((a + n).sum()) + (gammaln(a + n) - gammaln(a)).sum()
        return float(value + gammaln(n.sum() + 1) - gammaln(n + 1).sum()), 1e-11

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _shares_model

    def args(self) -> tuple[Tensor, ...]:
        """Return counts and prior."""
        return tensors(self.counts, self.concentration)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with one category less."""
        if len(self.counts) > 2:
            yield replace(self, concentration=self.concentration[:-1], counts=self.counts[:-1])


def _regression_model(y: Tensor, x: Tensor, prior: Tensor, noise: Tensor) -> None:
    coefficients = pyro.sample("coefficients", dist.Normal(0.0, prior).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ coefficients, noise), obs=y)


@dataclass(frozen=True)
class NormalRegression(Family):
    """A linear regression with known noise; covariates are correlated, uncentred and of different scales."""

    prior: float
    noise: float
    scales: Numbers
    offset: float
    num_data: int
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> NormalRegression:
        """Draw hyperparameters; the data are drawn from a seed."""
        scales = tuple(wide(rng, 0.05, 20) for _ in range(rng.integers(1, 5)))
        data = (int(rng.integers(3, 40)), int(rng.integers(1000)))
        return cls(wide(rng, 0.01, 1000), wide(rng, 0.01, 100), scales, wide(rng, 0.01, 30), *data)

    def _data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        x = (rng.standard_normal((self.num_data, len(self.scales))) + self.offset) * np.array(self.scales)
        return x, x @ rng.standard_normal(len(self.scales)) + self.noise * rng.standard_normal(self.num_data)

    def log_evidence(self) -> tuple[float, float]:
        """Return the normal log density of the data, from the singular values of the covariates."""
        x, y = self._data()
        left, singular, _ = np.linalg.svd(x, full_matrices=True)
        variance = np.full(len(y), self.noise**2)
        variance[: len(singular)] += (self.prior * singular) ** 2
        z = left.T @ y
        return float(norm.logpdf(z, scale=np.sqrt(variance)).sum()), 1e-9

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _regression_model

    def args(self) -> tuple[Tensor, ...]:
        """Return response, covariates, prior and noise."""
        x, y = self._data()
        return (torch.from_numpy(y), torch.from_numpy(x), *tensors(self.prior, self.noise))


def _wall_model(y: Tensor, top: Tensor) -> None:
    theta = pyro.sample("theta", dist.Uniform(0.0, top))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Uniform(0.0, theta, validate_args=False), obs=y)


@dataclass(frozen=True)
class UniformWall(Family):
    """The upper end of a uniform distribution; the likelihood is zero below the largest observation."""

    top: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> UniformWall:
        """Draw the upper end of the prior, and data."""
        top = wide(rng, 1, 100)
        return cls(top, tuple(np.round(top * rng.uniform(0.05, 0.9) * rng.random(rng.integers(2, 10)), 6).tolist()))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate ``theta ** -n`` from the largest observation to the upper end of the prior."""
        n, largest = len(self.y), max(self.y)
        log_ratio = (n - 1) * math.log(largest / self.top)
        value = (1 - n) * math.log(largest) + math.log1p(-math.exp(log_ratio)) - math.log(n - 1)
        return value - math.log(self.top), 1e-12

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _wall_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data and the upper end of the prior."""
        return tensors(self.y, self.top)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with fewer observations, at least two."""
        if len(self.y) > 3:
            yield replace(self, y=self.y[: len(self.y) // 2])


# -- by quadrature ---------------------------------------------------------------------------------------------


def _cauchy_model(y: Tensor, width: Tensor, noise: Tensor) -> None:
    location = pyro.sample("location", dist.Cauchy(0.0, width))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(4.0, location, noise), obs=y)


@dataclass(frozen=True)
class CauchyStudent(Family):
    """A location with a Cauchy prior; Student-t data far from each other, so the posterior is multimodal."""

    width: float
    noise: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> CauchyStudent:
        """Draw hyperparameters and data."""
        y = tuple(np.round(rng.standard_t(2, rng.integers(1, 6)) * wide(rng, 0.3, 10), 4).tolist())
        return cls(wide(rng, 0.05, 50), wide(rng, 0.1, 10), y)

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over ``t``, ``location = c sinh(t)``, with exponential tails."""
        y, c = np.array(self.y), max(self.noise, self.width)

        def log_f(t: np.ndarray) -> np.ndarray:
            location = c * np.sinh(t)
            prior = -np.log(math.pi * self.width) - np.log1p((location / self.width) ** 2)
            z = (y[:, None] - location) / self.noise
            constant = gammaln(2.5) - gammaln(2.0) - 0.5 * math.log(4 * math.pi) - math.log(self.noise)
            likelihood = (constant - 2.5 * np.log1p(z * z / 4)).sum(0)
            return np.asarray(prior + likelihood + math.log(c) + np.log(np.cosh(t)))

        return log_integral(log_f, -18.0, 18.0)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _cauchy_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, prior and noise."""
        return tensors(self.y, self.width, self.noise)


def _slope_model(y: Tensor, x: Tensor, prior: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, prior))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


@dataclass(frozen=True)
class LogisticSlope(Family):
    """One slope of a logistic regression; the data may be separable."""

    prior: float
    x: Numbers
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> LogisticSlope:
        """Draw prior and covariate; the response is drawn from a seed."""
        x = np.round(wide(rng, 0.05, 20) * rng.standard_normal(rng.integers(2, 15)), 4)
        return cls(wide(rng, 0.05, 100), tuple(x.tolist()), int(rng.integers(1000)))

    def _y(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return (rng.random(len(self.x)) < 1 / (1 + np.exp(-np.clip(self.x, -30, 30)))).astype(float)

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over ``t``, ``slope = c sinh(t)``, for narrow or one-sided likelihoods under a wide prior."""
        sign, x = 2 * self._y() - 1, np.array(self.x)
        c = 1 / max(np.abs(x).max(), 1e-3)

        def log_f(t: np.ndarray) -> np.ndarray:
            slope = c * np.sinh(t)
            likelihood = log_expit(sign[:, None] * x[:, None] * slope).sum(0)
            return np.asarray(norm.logpdf(slope, scale=self.prior) + likelihood + math.log(c) + np.log(np.cosh(t)))

        end = math.asinh(12 * self.prior / c)
        return log_integral(log_f, -end, end)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _slope_model

    def args(self) -> tuple[Tensor, ...]:
        """Return response, covariate and prior."""
        return (torch.from_numpy(self._y()), *tensors(self.x, self.prior))


def _scale_model(y: Tensor, width: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfCauchy(width))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)


@dataclass(frozen=True)
class HalfCauchyScale(Family):
    """A standard deviation with a half-Cauchy prior."""

    width: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> HalfCauchyScale:
        """Draw prior and data."""
        y = np.round(wide(rng, 1e-2, 1e2) * rng.standard_normal(rng.integers(1, 12)), 5)
        return cls(wide(rng, 1e-3, 1e3), tuple(y.tolist()))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithm of the scale."""
        n, square = len(self.y), sum(v * v for v in self.y)

        def log_f(t: np.ndarray) -> np.ndarray:
            prior = math.log(2 / math.pi) + (t - math.log(self.width)) - np.logaddexp(0, 2 * (t - math.log(self.width)))
            return np.asarray(prior - n * t - 0.5 * square * np.exp(-2 * t) - 0.5 * n * math.log(2 * math.pi))

        return log_integral(log_f, -40.0, 60.0)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _scale_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data and prior."""
        return tensors(self.y, self.width)


def _two_means_model(y: Tensor, prior: Tensor, share: Tensor) -> None:
    distance = pyro.sample("distance", dist.Normal(0.0, prior))
    with pyro.plate("data", len(y)):
        side = pyro.sample("side", dist.Bernoulli(share), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal((2 * side - 1) * distance, 1.0), obs=y)


@dataclass(frozen=True)
class TwoMeans(Family):
    """Two components on either side of zero, summed out; two modes, of equal height for equal shares."""

    prior: float
    share: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> TwoMeans:
        """Draw prior, share and data."""
        share = 0.5 if rng.random() < 0.5 else round(float(rng.uniform(0.05, 0.95)), 3)
        centre = wide(rng, 0.1, 6)
        y = np.where(rng.random(rng.integers(2, 12)) < share, centre, -centre)
        return cls(wide(rng, 0.3, 30), share, tuple(np.round(y + rng.standard_normal(len(y)), 4).tolist()))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the distance."""
        y = np.array(self.y)[:, None]

        def log_f(d: np.ndarray) -> np.ndarray:
            right, left = math.log(self.share) + norm.logpdf(y - d), math.log1p(-self.share) + norm.logpdf(y + d)
            return np.asarray(norm.logpdf(d, scale=self.prior) + np.logaddexp(right, left).sum(0))

        return log_integral(log_f, -12 * self.prior - 20, 12 * self.prior + 20)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _two_means_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, prior and share."""
        return tensors(self.y, self.prior, self.share)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the data, prior scale 1, or equal shares."""
        for form in super().simpler():
            if isinstance(form, TwoMeans):
                yield replace(form, share=0.5) if form.share >= 1 else form


def _groups_model(y: Tensor, errors: Tensor, prior: Tensor, width: Tensor) -> None:
    centre = pyro.sample("centre", dist.Normal(0.0, prior))
    spread = pyro.sample("spread", dist.HalfNormal(width))
    with pyro.plate("groups", len(y)):
        noise = pyro.sample("noise", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(centre + spread * noise, errors), obs=y)


@dataclass(frozen=True)
class NormalGroups(Family):
    """Groups with normal means around a common centre; observations with known errors."""

    prior: float
    width: float
    y: Numbers
    errors: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> NormalGroups:
        """Draw hyperparameters and data."""
        n, spread = int(rng.integers(3, 9)), wide(rng, 0.03, 10)
        y = np.round(spread * rng.standard_normal(n) + rng.standard_normal(), 4)
        return cls(
            wide(rng, 0.3, 30), wide(rng, 0.1, 10), tuple(y.tolist()), tuple(wide(rng, 0.2, 3) for _ in range(n))
        )

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithm of the spread; the data are normal given the spread."""
        y, errors = np.array(self.y), np.array(self.errors)

        def log_f(t: np.ndarray) -> np.ndarray:
            spread = np.exp(t)[:, None]
            variance = errors**2 + spread**2
            # With the centre integrated out, the covariance is a diagonal plus an outer product.
            precision = 1 / self.prior**2 + (1 / variance).sum(1)
            mean = (y / variance).sum(1)
            quadratic = (y * y / variance).sum(1) - mean**2 / precision
            log_det = np.log(variance).sum(1) + np.log(precision) + 2 * math.log(self.prior)
            density = -0.5 * (quadratic + log_det + len(y) * math.log(2 * math.pi))
            prior = 0.5 * math.log(2 / math.pi) - math.log(self.width) - 0.5 * (spread[:, 0] / self.width) ** 2 + t
            return np.asarray(density + prior)

        return log_integral(log_f, math.log(self.width) - 70, math.log(self.width) + 6)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _groups_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, their errors, and prior scales."""
        return tensors(self.y, self.errors, self.prior, self.width)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the groups."""
        if len(self.y) > 2:
            half = len(self.y) // 2
            yield replace(self, y=self.y[:half], errors=self.errors[:half])


FAMILIES: tuple[type[Family], ...] = (
    BetaBernoulli,
    GammaPoisson,
    InverseGammaNormal,
    DirichletMultinomial,
    NormalRegression,
    UniformWall,
    CauchyStudent,
    LogisticSlope,
    HalfCauchyScale,
    TwoMeans,
    NormalGroups,
    PositiveScale,
    IntervalLocation,
    WishartNormal,
    CorrelationPair,
    OrderedCuts,
    SeveralCoefficients,
    PoissonGroups,
    BetaBinomialGroups,
    LocalLevel,
    Autoregression,
    TwoStateMarkov,
    SinglePrecision,
    *EXTREME_FAMILIES,
)


def generate(seed: int, families: Sequence[type[Family]] = FAMILIES) -> Family:
    """Draw a random problem with known evidence.

    Parameters
    ----------
    seed : int
        At least 0. The problem is determined by seed and families.
    families : sequence of Family classes, optional
        Default :data:`FAMILIES`.

    Returns
    -------
    Family
        Its :meth:`~Family.case` is the :class:`ExactCase`; evaluating its ``repr`` rebuilds it.

    Raises
    ------
    SettingsError
        If the seed is negative, or there is no family.

    Examples
    --------
    >>> from bayeskit import exact
    >>> problem = exact.generate(3)
    >>> problem == exact.generate(3), problem.case().name == repr(problem)
    (True, True)
    """
    if not len(families):
        raise SettingsError("families is empty; give at least one class, such as bayeskit.exact.FAMILIES")
    rng = np.random.default_rng([whole_number("seed", seed, 0), len(families)])
    return families[int(rng.integers(len(families)))].random(rng)


def shrink(problem: Family, fails: Callable[[Family], bool]) -> Family:
    """Simplify a failing problem step by step while it still fails.

    Parameters
    ----------
    problem : Family
        A failing problem.
    fails : callable
        Function that returns True if a problem fails.

    Returns
    -------
    Family
        A failing problem for which no simpler form (:meth:`Family.simpler`) fails.

    Examples
    --------
    >>> from bayeskit.exact.generated import GammaPoisson, shrink
    >>> shrink(GammaPoisson(0.02, 3.0, (1.0, 0.0, 4.0, 2.0), 1), lambda problem: problem.shape < 0.1)
    GammaPoisson(shape=0.01, rate=1.0, y=(1.0,), seen=1)
    """
    while True:
        smaller = next((form for form in problem.simpler() if form != problem and fails(form)), None)
        if smaller is None:
            return problem
        problem = smaller
