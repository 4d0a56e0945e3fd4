"""Families of generated problems: other supports, groups, regressions, chains in time, and single precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
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

from bayeskit.exact.case import ExactCase
from bayeskit.exact.family import Family, Numbers, log_integral, log_integral_over_space, tensors, wide


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

        # Half-way into rounding, so that the first node of a Pareto distribution is inside its support.
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
    """A location in an interval, beyond which the data may lie."""

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
        """Return the mass that a normal distribution has in the interval, to fifty digits."""
        from mpmath import mp, workdps

        y, n = np.array(self.y), len(self.y)
        with workdps(50):
            mean, error = mp.mpf(float(y.mean())), mp.mpf(self.noise) / mp.sqrt(n)
            ends = [(mp.mpf(end) - mean) / error for end in (self.low, self.low + self.width)]
            if ends[0] > 0:  # in the lower tail nothing cancels
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
    """A precision matrix with a Wishart prior; normal data of two or three dimensions."""

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
        """Yield the same with the first datum, or a scale of one."""
        yield replace(self, y=self.y[: self.dim])
        yield replace(self, scale=1.0)


def _pair_model(y: Tensor, concentration: Tensor) -> None:
    factor = pyro.sample("factor", dist.LKJCholesky(2, concentration))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(y.new_zeros(2), scale_tril=factor), obs=y)


@dataclass(frozen=True)
class CorrelationPair(Family):
    """A correlation with an LKJ prior; pairs of standard deviation one."""

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
            log_rest = 2 * (math.log(2) - np.logaddexp(t, -t))  # of one less the square
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
        """Yield the same with half of the pairs, or a uniform prior."""
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
    """Two ordered cut points; answers of three grades."""

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
            # What lies between: the difference of two logistic functions, written without cancellation.
            middle = np.log(-np.expm1(-gap)) + log_expit(x - first) + log_expit(first + gap - x)
            likelihood = np.select([y == 0, y == 1], [low, middle], high).sum(1)
            return np.asarray(norm.logpdf(u, scale=self.prior).sum(1) + likelihood)

        with np.errstate(over="ignore", divide="ignore"):
            return log_integral_over_space(log_f, [0.0, 0.0])

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _cuts_model

    def args(self) -> tuple[Tensor, ...]:
        """Return answers, predictor, prior, and a cut point each."""
        return tensors(self.y, self.x, self.prior, [0.0, 0.0])

    def simpler(self) -> Iterator[Family]:
        """Yield the same with half of the data, or a prior of one."""
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
    """A logistic or Poisson regression with two coefficients; an uncentred covariate, badly scaled."""

    counts: bool
    prior: float
    scale: float
    offset: float
    num_data: int
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> SeveralCoefficients:
        """Draw hyper-parameters; the data follow from a seed."""
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
    """Groups whose rates vary by a gamma distribution; a count each."""

    width: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> PoissonGroups:
        """Draw the prior's width and data."""
        rates = wide(rng, 0.3, 30) * rng.gamma(1.0, 1.0, int(rng.integers(2, 8)))
        return cls(wide(rng, 0.3, 1.5), tuple(map(float, rng.poisson(rates))))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over logarithms of shape and mean; counts are negative binomial given them."""
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
    """Groups whose probabilities vary by a beta distribution."""

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


# -- chains in time -------------------------------------------------------------------------------------------


def _level_model(y: Tensor, seen: Tensor, width: Tensor) -> None:
    drift = pyro.sample("drift", dist.LogNormal(torch.zeros_like(width), width))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros_like(width), width))
    steps = pyro.sample("steps", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    level = drift * steps.cumsum(-1)
    with pyro.plate("data", len(y)), poutine.mask(mask=seen > 0):  # type: ignore[call-overload]
        pyro.sample("y", dist.Normal(level, noise), obs=y)


@dataclass(frozen=True)
class LocalLevel(Family):
    """A random walk seen with noise, of which one observation may be missing; both variances are unknown."""

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
        """Integrate over the logarithms of both scales, a Kalman filter at each point."""

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
        """Return data, which of them are seen, and prior."""
        return tensors(self.y, [float(t != self.missing) for t in range(len(self.y))], self.width)


def _autoregression_model(y: Tensor, width: Tensor) -> None:
    phi = pyro.sample("phi", dist.Uniform(-torch.ones_like(width), torch.ones_like(width)))
    scale = pyro.sample("scale", dist.HalfCauchy(width))
    with pyro.plate("data", len(y) - 1):
        pyro.sample("y", dist.Normal(phi * y[:-1], scale), obs=y[1:])


@dataclass(frozen=True)
class Autoregression(Family):
    """A series that returns to zero; its first value is given."""

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
        """Yield the same with half of the series, at least three values of it, or a width of one."""
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
class HiddenMarkov(Family):
    """A hidden chain of two states, summed out; the probability to stay and the height of the states are unknown."""

    a: float
    b: float
    prior: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> HiddenMarkov:
        """Draw hyper-parameters and a series."""
        n = int(rng.integers(2, 7))
        y = wide(rng, 0.3, 3) * np.where(rng.random(n) < 0.3, -1, 1).cumprod() + rng.standard_normal(n)
        return cls(wide(rng, 0.3, 10), wide(rng, 0.3, 10), wide(rng, 0.3, 1.0), _rounded(y))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logit and the logarithm, the forward algorithm at each point."""

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
    """Round what is a number with a point to single precision."""
    if isinstance(value, tuple):
        return tuple(map(_single, value))
    return float(np.float32(value)) if isinstance(value, float) else value


@dataclass(frozen=True)
class SinglePrecision(Family):
    """Another problem in single precision, whose numbers single precision can hold."""

    problem: Family

    @classmethod
    def random(cls, rng: np.random.Generator) -> SinglePrecision:
        """Draw another problem and round its numbers."""
        return cls(_SINGLE[int(rng.integers(len(_SINGLE)))].random(rng)).rounded()

    def rounded(self) -> SinglePrecision:
        """Return the same with numbers that single precision can hold."""
        inner = self.problem
        return SinglePrecision(
            replace(inner, **{f.name: _single(getattr(inner, f.name)) for f in dataclasses.fields(inner)})
        )

    def log_evidence(self) -> tuple[float, float]:
        """Return the answer to the problem, in double precision."""
        return self.problem.log_evidence()

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return self.problem.model()

    def args(self) -> tuple[Tensor, ...]:
        """Return the same arguments in single precision."""
        return tuple(value.to(torch.float32) for value in self.problem.args())

    def simpler(self) -> Iterator[Family]:
        """Yield simpler forms in single precision, and in double."""
        for form in self.problem.simpler():
            yield SinglePrecision(form).rounded()
        yield self.problem

    def case(self) -> ExactCase:
        """Return the problem; whatever runs on it runs in single precision."""
        return replace(super().case(), description=f"{type(self).__doc__} {type(self.problem).__doc__}")
