"""Random problems with known answers, on models, data and hyper-parameters that nobody chose.

A family is a frozen dataclass: its fields are hyper-parameters and data, :meth:`Family.random` draws them over extreme
ranges, :meth:`Family.case` computes the answer by means that share no code with the estimators: closed forms, and
quadrature whose error is measured, around filters where there is a chain. The representation of a family builds it
again. Add your own by a subclass; :func:`generate` takes families as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from scipy.special import betaln, gammaln, log_expit
from scipy.stats import norm
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.exact.family import MAX_ERROR, Family, Numbers, log_integral, log_integral_over_space, tensors, wide
from bayeskit.exact.several import (
    Autoregression,
    BetaBinomialGroups,
    CorrelationPair,
    HiddenMarkov,
    IntervalLocation,
    LocalLevel,
    OrderedCuts,
    PoissonGroups,
    PositiveScale,
    SeveralCoefficients,
    SinglePrecision,
    WishartNormal,
)

# -- closed forms ---------------------------------------------------------------------------------------------


def _bits_model(y: Tensor, a: Tensor, b: Tensor, weight: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(a, b))
    with pyro.plate("data", len(y)), poutine.scale(scale=weight):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


@dataclass(frozen=True)
class BetaBernoulli(Family):
    """A probability with a beta prior; zeros and ones, weighted."""

    a: float
    b: float
    weight: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> BetaBernoulli:
        """Draw hyper-parameters and data."""
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
    """A rate with a gamma prior; counts, of which some are masked."""

    shape: float
    rate: float
    y: Numbers
    seen: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> GammaPoisson:
        """Draw hyper-parameters and data."""
        n = int(rng.integers(1, 12))
        y = tuple(map(float, rng.poisson(wide(rng, 0.05, 200), n)))
        return cls(wide(rng, 0.001, 100), wide(rng, 0.001, 100), y, int(rng.integers(1, n + 1)))

    def log_evidence(self) -> tuple[float, float]:
        """Return the negative multinomial probability of the counts that are seen."""
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
        """Draw hyper-parameters and data."""
        y = tuple(np.round(wide(rng, 1e-3, 1e3) * rng.standard_normal(rng.integers(1, 15)), 5).tolist())
        return cls(wide(rng, 0.01, 50), wide(rng, 1e-4, 1e4), y)

    def log_evidence(self) -> tuple[float, float]:
        """Return the multivariate Student-t density."""
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
    """Shares with a Dirichlet prior; counts of three to six kinds."""

    concentration: Numbers
    counts: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> DirichletMultinomial:
        """Draw hyper-parameters and data."""
        kinds = int(rng.integers(3, 7))
        counts = rng.multinomial(int(rng.integers(1, 40)), rng.dirichlet(np.full(kinds, 0.7)))
        return cls(tuple(wide(rng, 0.02, 20) for _ in range(kinds)), tuple(map(float, counts)))

    def log_evidence(self) -> tuple[float, float]:
        """Return the Dirichlet-multinomial probability."""
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
        """Yield the same with one kind less."""
        if len(self.counts) > 2:
            yield replace(self, concentration=self.concentration[:-1], counts=self.counts[:-1])


def _regression_model(y: Tensor, x: Tensor, prior: Tensor, noise: Tensor) -> None:
    coefficients = pyro.sample("coefficients", dist.Normal(0.0, prior).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ coefficients, noise), obs=y)


@dataclass(frozen=True)
class NormalRegression(Family):
    """A regression of known noise; covariates that are correlated, off centre and of different scales."""

    prior: float
    noise: float
    scales: Numbers
    offset: float
    num_data: int
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> NormalRegression:
        """Draw hyper-parameters; the data follow from a seed."""
        scales = tuple(wide(rng, 0.05, 20) for _ in range(rng.integers(1, 5)))
        data = (int(rng.integers(3, 40)), int(rng.integers(1000)))
        return cls(wide(rng, 0.01, 1000), wide(rng, 0.01, 100), scales, wide(rng, 0.01, 30), *data)

    def _data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        x = (rng.standard_normal((self.num_data, len(self.scales))) + self.offset) * np.array(self.scales)
        return x, x @ rng.standard_normal(len(self.scales)) + self.noise * rng.standard_normal(self.num_data)

    def log_evidence(self) -> tuple[float, float]:
        """Return the normal density of the data by the singular values of the covariates."""
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
    """The upper end of a uniform distribution: the likelihood is zero below the largest datum."""

    top: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> UniformWall:
        """Draw the prior's end and data."""
        top = wide(rng, 1, 100)
        return cls(top, tuple(np.round(top * rng.uniform(0.05, 0.9) * rng.random(rng.integers(2, 10)), 6).tolist()))

    def log_evidence(self) -> tuple[float, float]:
        """Return the integral of ``theta ** -n`` from the largest datum on."""
        n, largest = len(self.y), max(self.y)
        log_ratio = (n - 1) * math.log(largest / self.top)
        value = (1 - n) * math.log(largest) + math.log1p(-math.exp(log_ratio)) - math.log(n - 1)
        return value - math.log(self.top), 1e-12

    def model(self) -> Callable[..., Any]:
        """Return the Pyro model."""
        return _wall_model

    def args(self) -> tuple[Tensor, ...]:
        """Return data and the prior's end."""
        return tensors(self.y, self.top)

    def simpler(self) -> Iterator[Family]:
        """Yield the same with fewer data, at least two."""
        if len(self.y) > 3:
            yield replace(self, y=self.y[: len(self.y) // 2])


# -- by quadrature ---------------------------------------------------------------------------------------------


def _cauchy_model(y: Tensor, width: Tensor, noise: Tensor) -> None:
    location = pyro.sample("location", dist.Cauchy(0.0, width))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(4.0, location, noise), obs=y)


@dataclass(frozen=True)
class CauchyStudent(Family):
    """A location with a Cauchy prior; heavy-tailed data, far from each other: several modes."""

    width: float
    noise: float
    y: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> CauchyStudent:
        """Draw hyper-parameters and data."""
        y = tuple(np.round(rng.standard_t(2, rng.integers(1, 6)) * wide(rng, 0.3, 10), 4).tolist())
        return cls(wide(rng, 0.05, 50), wide(rng, 0.1, 10), y)

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over ``location = c sinh(t)``, in which tails are exponential."""
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
    """One slope of a logistic regression, which may be separated."""

    prior: float
    x: Numbers
    seed: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> LogisticSlope:
        """Draw prior and covariate; the response follows from a seed."""
        x = np.round(wide(rng, 0.05, 20) * rng.standard_normal(rng.integers(2, 15)), 4)
        return cls(wide(rng, 0.05, 100), tuple(x.tolist()), int(rng.integers(1000)))

    def _y(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return (rng.random(len(self.x)) < 1 / (1 + np.exp(-np.clip(self.x, -30, 30)))).astype(float)

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over ``slope = c sinh(t)``: a likelihood may be narrow and one-sided under a wide prior."""
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
    """Two components on either side of zero, summed out: two modes, of the same height where the shares are equal."""

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
        """Yield the same with half of the data, a prior of one, or equal shares."""
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
    """Groups whose means vary about a centre, with errors of their own."""

    prior: float
    width: float
    y: Numbers
    errors: Numbers

    @classmethod
    def random(cls, rng: np.random.Generator) -> NormalGroups:
        """Draw hyper-parameters and data."""
        n, spread = int(rng.integers(3, 9)), wide(rng, 0.03, 10)
        y = np.round(spread * rng.standard_normal(n) + rng.standard_normal(), 4)
        return cls(
            wide(rng, 0.3, 30), wide(rng, 0.1, 10), tuple(y.tolist()), tuple(wide(rng, 0.2, 3) for _ in range(n))
        )

    def log_evidence(self) -> tuple[float, float]:
        """Integrate over the logarithm of the spread; centre and groups are normal given it."""
        y, errors = np.array(self.y), np.array(self.errors)

        def log_f(t: np.ndarray) -> np.ndarray:
            spread = np.exp(t)[:, None]
            variance = errors**2 + spread**2
            # The centre summed out: a matrix that is a diagonal and an outer product.
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
        """Return data, their errors, and the priors' scales."""
        return tensors(self.y, self.errors, self.prior, self.width)

    def simpler(self) -> Iterator[Family]:
        """Yield the same with half of the groups."""
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
    HiddenMarkov,
    SinglePrecision,
)


def generate(seed: int, families: Sequence[type[Family]] = FAMILIES) -> Family:
    """Draw a problem with a known answer.

    Parameters
    ----------
    seed : int
        At least 0; the same problem for the same seed and families.
    families : sequence of Family classes, optional

    Returns
    -------
    Family
        ``.case()`` is the :class:`ExactCase`; its representation builds it again.

    Examples
    --------
    >>> from bayeskit import exact
    >>> problem = exact.generate(3)
    >>> problem == exact.generate(3), problem.case().name == repr(problem)
    (True, True)
    """
    rng = np.random.default_rng([whole_number("seed", seed, 0), len(families)])
    return families[int(rng.integers(len(families)))].random(rng)


def shrink(problem: Family, fails: Callable[[Family], bool]) -> Family:
    """Return the smallest form of a problem that still fails, by one step after another.

    Parameters
    ----------
    problem : Family
        That fails.
    fails : callable
        Whether a problem shows the failure.

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


__all__ = ["FAMILIES", "MAX_ERROR", "Family", "generate", "log_integral", "log_integral_over_space", "shrink"]
