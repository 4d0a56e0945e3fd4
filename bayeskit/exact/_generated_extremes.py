"""Families of random problems on which samplers start badly, miss modes, or meet edges, ridges and extreme numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.special import gammaln, i0e, log_ndtr, logsumexp
from scipy.stats import norm
from torch import Tensor

from bayeskit.exact._family import Family, Numbers, log_integral, tensors, wide

_LOG_2PI = math.log(2 * math.pi)


def _digits(values: Any, digits: int = 9) -> Numbers:
    """Round to significant digits, so that data keep theirs on any scale."""
    return tuple(float(f"{value:.{digits}g}") for value in np.ravel(values))


def _rotated(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return squared singular values of ``x``, ``y`` along its left singular vectors, and the rest's squared length."""
    left, singular, _ = np.linalg.svd(x, full_matrices=False)
    along = left.T @ y
    rest = y - left @ along
    return singular**2, along, float(rest @ rest)


def _level_evidence(y: np.ndarray, prior: float, noise: float) -> float:
    """Return the log density of normal data around one level, which has a normal prior with mean zero."""
    if not len(y):
        return 0.0
    error, mean = noise / math.sqrt(len(y)), y.mean()
    density = norm.logpdf(y, mean, noise).sum() - norm.logpdf(0, 0, error)
    return float(density + norm.logpdf(mean, 0, math.hypot(prior, error)))


# -- vague scales and coefficients ----------------------------------------------------------------------------

_SCALES = ("Gamma", "InverseGamma", "HalfCauchy")


def _vague_model(y: Tensor, x: Tensor, kind: Tensor, tied: Tensor, shape: Tensor, width: Tensor) -> None:
    if int(kind) == 0:
        scale = pyro.sample("precision", dist.Gamma(shape, shape)).rsqrt()
    elif int(kind) == 1:
        scale = pyro.sample("variance", dist.InverseGamma(shape, shape)).sqrt()
    else:
        scale = pyro.sample("scale", dist.HalfCauchy(shape))
    prior = width * scale if tied > 0 else width
    b = pyro.sample("b", dist.Normal(x.new_zeros(x.shape[1]), prior.unsqueeze(-1)).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ b, scale), obs=y)


@dataclass(frozen=True)
class VagueScale(Family):
    """A regression with vague priors of noise and coefficients, whose scales are tied to each other or not."""

    kind: str
    tied: bool
    shape: float
    width: float
    num_columns: int
    num_data: int
    noise: float
    signal: float
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> VagueScale:
        """Draw priors, and scales of the data, which are drawn from a seed."""
        kind, tied, p = str(rng.choice(_SCALES)), bool(rng.random() < 0.5), int(rng.integers(1, 4))
        shape = wide(rng, 0.002, 100) if kind == "HalfCauchy" else wide(rng, 0.001, 1)
        width, n = wide(rng, 1, 1e3) if tied else wide(rng, 1e3, 1e6), p + int(rng.integers(2, 25))
        return cls(kind, tied, shape, width, p, n, wide(rng, 0.01, 100), wide(rng, 0.1, 30), int(rng.integers(1000)))

    def _data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return covariates, the first of which is constant, and responses."""
        rng = np.random.default_rng(self.seed)
        x = np.concatenate([np.ones((self.num_data, 1)), rng.standard_normal((self.num_data, self.num_columns - 1))], 1)
        means = self.signal * x @ rng.standard_normal(self.num_columns)
        return x, self.noise * (means + rng.standard_normal(self.num_data))

    def log_evidence(self) -> tuple[float, float]:
        """Return the multivariate Student-t log density, or integrate over the logarithm of the variance."""
        x, y = self._data()
        square, along, rest = _rotated(x, y)
        a, n, count = self.shape, self.num_data, self.num_data - len(square)
        if self.tied and self.kind != "HalfCauchy":
            spread = 1 + self.width**2 * square
            quadratic = rest + (along**2 / spread).sum()
            value = a * math.log(a) - gammaln(a) + gammaln(a + n / 2) - (a + n / 2) * math.log(a + quadratic / 2)
            return float(value - 0.5 * (n * _LOG_2PI + np.log(spread).sum())), 1e-9

        def log_f(t: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                variance = np.exp(t)
                if self.kind == "HalfCauchy":
                    r = 0.5 * t - math.log(a)
                    prior = r - np.logaddexp(0, 2 * r) - math.log(math.pi)
                else:
                    prior = a * math.log(a) - gammaln(a) - a * t - a / variance
                spread = variance[:, None] + self.width**2 * square * (variance[:, None] if self.tied else 1)
                terms = (np.log(spread) + along**2 / spread).sum(1) + count * t + rest / variance
                return np.asarray(prior - 0.5 * (n * _LOG_2PI + terms))

        return log_integral(log_f, -60.0, 120.0)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _vague_model

    def args(self) -> tuple[Tensor, ...]:
        """Return responses, covariates, kind of prior, whether the scales are tied, and the priors' parameters."""
        x, y = self._data()
        return tensors(y, x, float(_SCALES.index(self.kind)), float(self.tied), self.shape, self.width)


def _shrunk_model(y: Tensor, width: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfCauchy(width))
    with pyro.plate("data", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


@dataclass(frozen=True)
class ShrunkMeans(Family):
    """Means with a common scale under a half-Cauchy prior that may be narrow; one observation of each mean."""

    width: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> ShrunkMeans:
        """Draw prior and data."""
        return cls(wide(rng, 0.002, 100), _digits(wide(rng, 0.5, 10) * rng.standard_normal(rng.integers(1, 6)), 4))

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithm of the scale."""
        y, middle = np.array(self.y), math.log(self.width)

        def log_f(t: np.ndarray) -> np.ndarray:
            prior = math.log(2 / math.pi) + t - middle - np.logaddexp(0, 2 * (t - middle))
            return np.asarray(prior + norm.logpdf(y, scale=np.sqrt(1 + np.exp(2 * t))[:, None]).sum(1))

        return log_integral(log_f, middle - 70, max(middle, 0) + 70)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _shrunk_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data and the prior's width."""
        return tensors(self.y, self.width)


# -- several modes --------------------------------------------------------------------------------------------


def _modes_model(means: Tensor, scales: Tensor, log_weights: Tensor) -> None:
    x = pyro.sample("x", dist.Normal(means.new_zeros(means.shape[-1]), 1.0).to_event(1))
    parts = dist.Normal(means, scales.unsqueeze(-1)).log_prob(x.unsqueeze(-2)).sum(-1)
    pyro.factor("modes", (log_weights + parts).logsumexp(-1))


@dataclass(frozen=True)
class NormalModes(Family):
    """A standard normal prior and a sum of normal likelihoods of unequal width and weight."""

    log_weights: Numbers
    means: tuple[Numbers, ...]
    scales: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> NormalModes:
        """Draw two to four modes in one to five dimensions, and their shares of the evidence."""
        kinds, d = int(rng.integers(2, 5)), int(rng.integers(1, 6))
        scales = tuple(wide(rng, 0.02, 1) for _ in range(kinds))
        return cls.with_shares(rng.dirichlet(np.ones(kinds)), 1.5 * rng.standard_normal((kinds, d)), scales)

    @classmethod
    def with_shares(cls, shares: np.ndarray, means: np.ndarray, scales: Numbers) -> NormalModes:
        """Return the problem in which the modes have given shares of the evidence."""
        problem = cls((0.0,) * len(scales), tuple(_digits(mean, 4) for mean in means), scales)
        log_weights = np.log(shares) - problem.log_parts()
        return replace(problem, log_weights=tuple(np.round(log_weights - logsumexp(log_weights), 4).tolist()))

    def log_parts(self) -> np.ndarray:
        """Return the logarithm of what each mode adds to the evidence."""
        spread = np.hypot(1, self.scales)[:, None]
        return np.asarray(self.log_weights + norm.logpdf(np.array(self.means), scale=spread).sum(1))

    def log_evidence(self) -> tuple[float, float]:
        """Return the logarithm of the sum over modes."""
        return float(logsumexp(self.log_parts())), 1e-10

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _modes_model

    def args(self) -> tuple[Tensor, ...]:
        """Return means, scales and logarithms of the weights."""
        return tensors(self.means, self.scales, self.log_weights)

    def simpler(self) -> Iterator[Family]:
        """Yield the problem without one of the modes, in half of the dimensions, or with rounded scales."""
        for k in range(len(self.scales) if len(self.scales) > 1 else 0):
            one, two, three = (v[:k] + v[k + 1 :] for v in (self.log_weights, self.means, self.scales))
            yield type(self)(one, two, three)  # type: ignore[arg-type]
        d = len(self.means[0])
        if d > 1:
            yield replace(self, means=tuple(mean[: d // 2] for mean in self.means))
        yield replace(self, scales=tuple(10.0 ** round(math.log10(scale)) for scale in self.scales))


@dataclass(frozen=True)
class NarrowInsideWide(NormalModes):
    """A narrow normal mode inside a wide one, with a share of the evidence that matters."""

    @classmethod
    def random(cls, rng: np.random.Generator) -> NormalModes:
        """Draw a narrow mode in one to six dimensions from a wide one, and its share of the evidence."""
        d, share = int(rng.integers(1, 7)), float(rng.uniform(0.05, 0.6))
        middle, width = -0.5, wide(rng, 0.5, 2)
        inside = middle / (1 + width**2) + width / math.hypot(1, width) * rng.standard_normal(d)
        means = np.stack([np.full(d, middle), inside])
        return cls.with_shares(np.array([1 - share, share]), means, (width, wide(rng, 0.003, 0.3)))


# -- hard edges and steps -------------------------------------------------------------------------------------

_EDGES = ("wall", "shift", "normal")


def _edges_model(ends: Tensor, kind: Tensor, top: Tensor, steepness: Tensor) -> None:
    x = pyro.sample("x", dist.Uniform(torch.zeros_like(ends), top).to_event(1))
    end = top * ends
    if int(kind) == 0:
        terms = torch.where(x > end, -steepness * (x / end).log(), -math.inf)
    elif int(kind) == 1:
        terms = torch.where(x < end, steepness * (x - end) / top, -math.inf)
    else:
        terms = -0.5 * (steepness * (x - end) / top) ** 2
    pyro.factor("data", terms.sum(-1))


@dataclass(frozen=True)
class HardEdges(Family):
    """A uniform box with the mass at its sides: ends of uniform data, shifts of exponential data, truncated normals."""

    kind: str
    top: float
    steepness: float
    ends: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> HardEdges:
        """Draw the likelihood, and its end or mean in each dimension as a share of the box."""
        kind, d = str(rng.choice(_EDGES)), int(rng.integers(1, 5))
        ends = rng.uniform(-0.5, 0.1, d) if kind == "normal" else rng.uniform(0.05, 0.99, d)
        return cls(kind, wide(rng, 0.01, 100), wide(rng, 2, 300), _digits(ends, 4))

    def log_evidence(self) -> tuple[float, float]:
        """Sum the log integrals over the sides."""
        end, s = np.array(self.ends), self.steepness
        if self.kind == "wall":
            log_ratio = (1 - s) * np.log(1 / end)
            parts = np.log(end) + (np.log(np.log(1 / end)) if s == 1 else np.log(np.expm1(log_ratio) / (1 - s)))
        elif self.kind == "shift":
            parts = np.log(-np.expm1(-s * end) / s)
        else:
            # By symmetry in lower tails, whose logarithms do not cancel.
            high, low = np.where(end < 0.5, s * end, s * (1 - end)), np.where(end < 0.5, s * (end - 1), -s * end)
            parts = log_ndtr(high) + np.log1p(-np.exp(log_ndtr(low) - log_ndtr(high))) + 0.5 * _LOG_2PI - math.log(s)
        return float(parts.sum()), 1e-10

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _edges_model

    def args(self) -> tuple[Tensor, ...]:
        """Return ends, kind of likelihood, size of the box and steepness."""
        return tensors(self.ends, float(_EDGES.index(self.kind)), self.top, self.steepness)


def _change_model(y: Tensor, prior: Tensor, noise: Tensor) -> None:
    time = pyro.sample("time", dist.Uniform(torch.zeros_like(prior), float(len(y))))
    before = pyro.sample("before", dist.Normal(torch.zeros_like(prior), prior))
    after = pyro.sample("after", dist.Normal(torch.zeros_like(prior), prior))
    level = torch.where(torch.arange(len(y), dtype=y.dtype, device=y.device) + 0.5 < time, before, after)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level, noise), obs=y)


@dataclass(frozen=True)
class ChangePoint(Family):
    """A level that changes at a continuous time, in which the likelihood is a staircase."""

    prior: float
    noise: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> ChangePoint:
        """Draw hyperparameters and a series."""
        n, noise = int(rng.integers(3, 31)), wide(rng, 0.1, 10)
        step = wide(rng, 0.1, 10) * (np.arange(n) + 0.5 < rng.uniform(0, n))
        return cls(wide(rng, 1, 100), noise, _digits(step + noise * rng.standard_normal(n), 4))

    def log_evidence(self) -> tuple[float, float]:
        """Sum over the intervals between observations."""
        y, n = np.array(self.y), len(self.y)
        shares = np.full(n + 1, 1 / n)
        shares[[0, -1]] /= 2
        parts = [_level_evidence(part, self.prior, self.noise) for k in range(n + 1) for part in (y[:k], y[k:])]
        return float(logsumexp(np.reshape(parts, (n + 1, 2)).sum(1), b=shares)), 1e-10

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _change_model

    def args(self) -> tuple[Tensor, ...]:
        """Return series, prior and noise."""
        return tensors(self.y, self.prior, self.noise)


# -- ridges, constants and angles -----------------------------------------------------------------------------


def _ridge_model(y: Tensor, noise: Tensor, prior: Tensor, product: Tensor) -> None:
    x = pyro.sample("x", dist.Normal(torch.zeros_like(prior), prior).to_event(1))
    mean = x.prod(-1) if product > 0 else x.sum(-1)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


@dataclass(frozen=True)
class Ridge(Family):
    """Parameters of which only the sum, or the product of two, is known; ridges are up to 10,000 times their width."""

    product: bool
    num_duplicates: int
    prior: float
    noise: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> Ridge:
        """Draw prior and data."""
        product, prior, n = bool(rng.random() < 0.3), wide(rng, 0.1, 100), int(rng.integers(1, 6))
        d = 2 if product else int(rng.integers(2, 6))
        x = prior * rng.standard_normal(d)
        noise = float(f"{wide(rng, 1e-4, 1) * (prior**2 if product else prior):.3g}")
        return cls(
            product, d, prior, noise, _digits((x.prod() if product else x.sum()) + noise * rng.standard_normal(n))
        )

    def log_evidence(self) -> tuple[float, float]:
        """Return the normal log density of the data, for a product integrated over the logarithm of one factor."""
        y = np.array(self.y)
        if not self.product:
            rounding = 1e-13 * len(y) * float(np.abs(y).max()) / self.noise  # of a residual, in its square
            return _level_evidence(y, self.prior * math.sqrt(self.num_duplicates), self.noise), 1e-10 + rounding
        error, mean = self.noise / math.sqrt(len(y)), y.mean()
        rest = float(norm.logpdf(y, mean, self.noise).sum() - norm.logpdf(0, 0, error))

        def log_f(t: np.ndarray) -> np.ndarray:
            factor = np.exp(t)
            density = norm.logpdf(mean, scale=np.hypot(error, self.prior * factor))
            return np.asarray(math.log(2) + norm.logpdf(factor, scale=self.prior) + t + density)

        middle = math.log(self.prior)
        value, wrong = log_integral(log_f, middle - 80, middle + 4)
        return value + rest, wrong

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _ridge_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data, noise, a vector of prior scales, and whether the product is known."""
        return tensors(self.y, self.noise, [self.prior] * self.num_duplicates, float(self.product))

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the data, rounded scales, or two parameters."""
        yield from super().simpler()
        if self.num_duplicates > 2:
            yield replace(self, num_duplicates=2)


_PRIORS = ("Normal", "Uniform", "Gamma", "Beta", "HalfCauchy")


def _constant_model(constant: Tensor, kind: Tensor, a: Tensor) -> None:
    priors = (dist.Normal(a, a), dist.Uniform(-a, a), dist.Gamma(a, a), dist.Beta(a, a), dist.HalfCauchy(a))
    pyro.sample("x", priors[int(kind)].to_event(1))
    pyro.factor("constant", constant)


@dataclass(frozen=True)
class ConstantLikelihood(Family):
    """A likelihood that does not depend on the parameters."""

    kind: str
    constant: float
    a: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> ConstantLikelihood:
        """Draw kind and parameters of the prior, and the constant."""
        a = tuple(wide(rng, 0.05, 20) for _ in range(rng.integers(1, 6)))
        return cls(str(rng.choice(_PRIORS)), round(float(rng.normal(0, 100)), 3), a)

    def log_evidence(self) -> tuple[float, float]:
        """Return the constant."""
        return self.constant, 0.0

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _constant_model

    def args(self) -> tuple[Tensor, ...]:
        """Return the constant, kind and parameters of the prior."""
        return tensors(self.constant, float(_PRIORS.index(self.kind)), self.a)


def _angle_model(y: Tensor, centre: Tensor, prior: Tensor, concentration: Tensor) -> None:
    turn = math.pi * torch.ones_like(centre)
    angle = pyro.sample("angle", dist.VonMises(centre, prior) if prior > 0 else dist.Uniform(-turn, turn))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.VonMises(angle, concentration), obs=y)


@dataclass(frozen=True)
class AngleAcrossCut(Family):
    """A direction near the cut of its circle, with a uniform or von Mises prior and von Mises data."""

    centre: float
    prior: float
    concentration: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> AngleAcrossCut:
        """Draw priors and data around pi; a concentration of the prior of 0 stands for a uniform one."""
        concentration, n = wide(rng, 0.3, 300), int(rng.integers(1, 13))
        y = math.pi + 0.3 * rng.standard_normal() + rng.vonmises(0, concentration, n)
        prior = 0.0 if rng.random() < 0.5 else wide(rng, 0.1, 30)
        wrapped = np.angle(np.exp(1j * y))
        return cls(round(float(rng.uniform(-math.pi, math.pi)), 3), prior, concentration, _digits(wrapped, 4))

    def log_evidence(self) -> tuple[float, float]:
        """Return the ratio of Bessel functions; torch knows its own to seven digits."""
        y, n = np.array(self.y), len(self.y)
        together = abs(self.prior * np.exp(1j * self.centre) + self.concentration * np.exp(1j * y).sum())
        constants = n * (_LOG_2PI + self._log_bessel(self.concentration)) + self._log_bessel(self.prior)
        return self._log_bessel(together) - constants, 5e-7 * (n + 1)

    @staticmethod
    def _log_bessel(x: float) -> float:
        return float(x + np.log(i0e(x)))

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _angle_model

    def args(self) -> tuple[Tensor, ...]:
        """Return angles, prior and concentration."""
        return tensors(self.y, self.centre, self.prior, self.concentration)


# -- regressions with extreme numbers -------------------------------------------------------------------------


def _scaled_model(y: Tensor, x: Tensor, prior: Tensor, noise: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros_like(prior), prior).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ b, noise), obs=y)


@dataclass(frozen=True)
class ScaledRegression(Family):
    """A regression whose covariates, noise and offset have scales from 1e-6 to 1e6.

    The covariates have condition number and scale, and prior and offset are in units of the noise.
    """

    num_columns: int
    condition: float
    scale: float
    offset: float
    prior: float
    noise: float
    num_data: int
    seed: int

    dtype: ClassVar[torch.dtype] = torch.float64

    @classmethod
    def random(cls, rng: np.random.Generator) -> ScaledRegression:
        """Draw hyperparameters; the data are drawn from a seed."""
        p, scale, noise = int(rng.integers(1, 5)), wide(rng, 1e-6, 1e6), wide(rng, 1e-6, 1e6)
        scale, noise = ((scale, 1.0), (1.0, noise), (scale, noise))[int(rng.integers(3))]
        offset = 0.0 if rng.random() < 0.4 else wide(rng, 1, 1e6)
        n, seed = int(rng.integers(3, 40)), int(rng.integers(1000))
        return cls(p, wide(rng, 1, 100), scale, offset, wide(rng, 0.1, 100), noise, n, seed)

    def _data(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Return covariates, responses, prior scales and noise, as the model gets them."""
        rng, p, n = np.random.default_rng(self.seed), self.num_columns, self.num_data
        turned = np.linalg.qr(rng.standard_normal((p, p)))[0]
        x = rng.standard_normal((n, p)) @ (np.geomspace(1, 1 / self.condition, p)[:, None] * turned)
        y = x @ (min(self.prior, 3) * rng.standard_normal(p)) + rng.standard_normal(n) + self.offset
        x, prior = self.scale * x, np.full(p, self.prior / self.scale)
        if self.offset:  # an intercept
            x, prior = np.concatenate([np.ones((n, 1)), x], 1), np.append(2 * self.offset, prior)
        given = tensors(x, self.noise * y, self.noise * prior, self.noise)
        x, y, prior, noise = (value.to(self.dtype).double().numpy() for value in given)
        return x, y, prior, float(noise)

    def log_evidence(self) -> tuple[float, float]:
        """Return the normal log density of the data, from the singular values of the covariates."""
        x, y, prior, noise = self._data()
        square, along, rest = _rotated(x * prior / noise, y / noise)
        terms = (np.log1p(square) + along**2 / (1 + square)).sum() + rest
        value = -0.5 * terms - len(y) * (0.5 * _LOG_2PI + math.log(noise))
        return float(value), 1e-9 + 1e-15 * len(y) * (1 + self.offset)

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _scaled_model

    def args(self) -> tuple[Tensor, ...]:
        """Return responses, covariates, prior scales and noise."""
        x, y, prior, noise = self._data()
        return tuple(value.to(self.dtype) for value in tensors(y, x, prior, noise))

    def simpler(self) -> Iterator[Family]:
        """Yield the problem with half of the columns or of the data, no offset, or rounded scales."""
        if self.num_columns > 1:
            yield replace(self, num_columns=self.num_columns // 2)
        if self.num_data > 1:
            yield replace(self, num_data=self.num_data // 2)
        if self.offset:
            yield replace(self, offset=0.0)
        yield from super().simpler()


@dataclass(frozen=True)
class ManyCoefficients(ScaledRegression):
    """A regression with up to fifty coefficients and condition numbers up to a million."""

    @classmethod
    def random(cls, rng: np.random.Generator) -> ManyCoefficients:
        """Draw hyperparameters; there may be fewer data than coefficients."""
        p = round(wide(rng, 5, 50))
        n, seed = int(rng.integers(p // 2, 3 * p)), int(rng.integers(1000))
        return cls(p, wide(rng, 1, 1e6), 1.0, 0.0, wide(rng, 0.1, 1000), 1.0, n, seed)


@dataclass(frozen=True)
class ManyRows(ScaledRegression):
    """A regression on thousands of rows in single precision."""

    dtype: ClassVar[torch.dtype] = torch.float32

    @classmethod
    def random(cls, rng: np.random.Generator) -> ManyRows:
        """Draw hyperparameters; more rows would take all methods together more than the exam's five minutes."""
        return cls.with_rows(round(wide(rng, 1000, 8000)), rng)

    @classmethod
    def with_rows(cls, n: int, rng: np.random.Generator) -> ManyRows:
        """Draw hyperparameters other than the number of rows."""
        p, offset, seed = int(rng.integers(1, 4)), wide(rng, 0.01, 10), int(rng.integers(1000))
        return cls(p, wide(rng, 1, 10), 1.0, offset, wide(rng, 1, 100), wide(rng, 0.1, 10), n, seed)


@dataclass(frozen=True)
class FiftyThousandRows(ManyRows):
    """A regression on 50,000 rows in single precision; not in the exam, where ladders take longer than its limit."""

    @classmethod
    def random(cls, rng: np.random.Generator) -> ManyRows:
        """Draw hyperparameters."""
        return cls.with_rows(50_000, rng)


EXTREME_FAMILIES: tuple[type[Family], ...] = (
    VagueScale,
    ShrunkMeans,
    NormalModes,
    NarrowInsideWide,
    HardEdges,
    ChangePoint,
    Ridge,
    ConstantLikelihood,
    AngleAcrossCut,
    ScaledRegression,
    ManyCoefficients,
    ManyRows,
)
"""All families of this module that the exam draws from."""
