"""Models as users of other packages write them, each in eight forms of its data, against exact answers.

    python benchmarks/foreign_models.py [--models NAME ...] [--evidence] [--seed 0]
    python benchmarks/foreign_models.py --coins

A form is right where the log density at draws from the prior is that of double-precision vectors, up to the rounding of
its precision; refused where an error of bayeskit names the reason; wrong, or a foreign error, otherwise. With
``--evidence`` the marginal likelihood of each model is estimated at the defaults by two methods and compared with the
exact answer, where there is one, or with each other. Prints a table, and the counts of each. With ``--coins`` it prints
instead what 200,000 coins cost as whole numbers of each width, relative to doubles.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from scipy import integrate, special, stats
from torch import Tensor

import bayeskit as bk
from bayeskit.errors import BayeskitError

Data = dict[str, np.ndarray]


@dataclass
class Model:
    """A model, its data, and its log evidence where a closed form or quadrature gives it."""

    function: Callable[..., Any]
    data: Data
    exact: float | None = None
    others: Mapping[str, Any] = field(default_factory=dict)  # arguments that have one form only


MODELS: dict[str, Callable[[np.random.Generator], Model]] = {}


def model(make: Callable[[np.random.Generator], Model]) -> Callable[[np.random.Generator], Model]:
    """Put a model into the corpus under its name."""
    MODELS[make.__name__] = make
    return make


def normal_evidence(design: np.ndarray, y: np.ndarray, noise: float, scales: np.ndarray) -> float:
    """Return the log evidence of a regression with normal coefficients."""
    covariance = (design * scales**2) @ design.T + noise**2 * np.eye(len(y))
    return float(stats.multivariate_normal.logpdf(y, np.zeros(len(y)), covariance))


def by_quadrature(log_joint: Callable[[float], float], low: float, high: float) -> float:
    """Return the log integral of one variable."""
    grid = np.linspace(low, high, 2001)
    top = max(map(log_joint, grid))
    return top + math.log(integrate.quad(lambda u: math.exp(log_joint(u) - top), low, high, limit=500)[0])


# Regressions.


def _line(x: Tensor, y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 3.0))
    b = pyro.sample("b", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a + b * x, 0.7), obs=y)


@model
def simple_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=18)
    y = -1 + 1.5 * x + rng.normal(0, 0.7, 18)
    design = np.stack([np.ones(18), x], 1)
    return Model(_line, {"x": x, "y": y}, normal_evidence(design, y, 0.7, np.full(2, 3.0)))


@model
def regression_on_whole_numbers(rng: np.random.Generator) -> Model:
    x = np.arange(12)
    y = rng.integers(0, 9, 12)
    design = np.stack([np.ones(12), x], 1)
    return Model(_line, {"x": x, "y": y}, normal_evidence(design, y.astype(float), 0.7, np.full(2, 3.0)))


@model
def two_covariates(rng: np.random.Generator) -> Model:
    x, z = rng.normal(size=(2, 20))
    y = x - z + rng.normal(0, 1, 20)

    def function(x: Tensor, z: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(b[0] + b[1] * x + b[2] * z, 1.0), obs=y)

    design = np.stack([np.ones(20), x, z], 1)
    return Model(function, {"x": x, "z": z, "y": y}, normal_evidence(design, y, 1.0, np.full(3, 2.0)))


@model
def unknown_noise(rng: np.random.Generator) -> Model:
    x = rng.normal(size=15)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(b * x, sigma), obs=y)

    return Model(function, {"x": x, "y": 0.8 * x + rng.normal(0, 0.5, 15)})


@model
def robust_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=20)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.StudentT(nu, b * x, 0.6), obs=y)

    return Model(function, {"x": x, "y": x + 0.6 * rng.standard_t(3, 20)})


@model
def heteroscedastic(rng: np.random.Generator) -> Model:
    x = rng.uniform(0, 2, 25)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        g = pyro.sample("g", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(b * x, (g * x - 1).exp()), obs=y)

    return Model(function, {"x": x, "y": x + np.exp(0.5 * x - 1) * rng.normal(size=25)})


def _logistic(x: Tensor, y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


@model
def logistic_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=30)
    return Model(_logistic, {"x": x, "y": rng.binomial(1, special.expit(0.5 + x))})


@model
def probit_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=30)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(dist.Normal(0.0, 1.0).cdf(b * x).clamp(1e-9, 1 - 1e-9)), obs=y)

    return Model(function, {"x": x, "y": rng.binomial(1, stats.norm.cdf(0.7 * x))})


@model
def binomial_regression(rng: np.random.Generator) -> Model:
    dose, n = np.array([-0.86, -0.3, -0.05, 0.73]), np.array([5, 5, 5, 5])

    def function(dose: Tensor, n: Tensor, deaths: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        b = pyro.sample("b", dist.Normal(0.0, 10.0))
        with pyro.plate("groups", len(dose)):
            pyro.sample("deaths", dist.Binomial(n, logits=a + b * dose), obs=deaths)

    return Model(function, {"dose": dose, "n": n, "deaths": np.array([0, 1, 3, 5])})


@model
def poisson_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=25)

    def function(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson((a + b * x).exp()), obs=y)

    return Model(function, {"x": x, "y": rng.poisson(np.exp(1 + 0.5 * x))})


@model
def poisson_with_exposure(rng: np.random.Generator) -> Model:
    hours = rng.integers(1, 30, 20)
    y = rng.poisson(3.0 * hours)

    def function(hours: Tensor, y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(3.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(rate * hours), obs=y)

    s, t = y.sum(), hours.sum()
    exact = -special.gammaln(3) + special.gammaln(3 + s) - (3 + s) * np.log(1 + t)
    return Model(function, {"hours": hours, "y": y}, exact + (y * np.log(hours) - special.gammaln(y + 1)).sum())


@model
def negative_binomial_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=30)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        size = pyro.sample("size", dist.Gamma(2.0, 0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.GammaPoisson(size, size / (1 + b * x).exp()), obs=y)

    return Model(function, {"x": x, "y": rng.negative_binomial(3, 3 / (3 + np.exp(1 + 0.4 * x)))})


@model
def gamma_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=20)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        shape = pyro.sample("shape", dist.Gamma(2.0, 0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Gamma(shape, shape / (b * x).exp()), obs=y)

    return Model(function, {"x": x, "y": rng.gamma(3, np.exp(0.5 * x) / 3)})


@model
def beta_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=20)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        k = pyro.sample("k", dist.Gamma(4.0, 0.2))
        mean = torch.sigmoid(b * x)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Beta(mean * k, (1 - mean) * k), obs=y)

    share = special.expit(0.5 * x)
    return Model(function, {"x": x, "y": rng.beta(20 * share, 20 * (1 - share))})


@model
def softmax_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=30)

    def function(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        logits = torch.cat([a + x[:, None] * b, x.new_zeros(len(x), 1)], -1)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return Model(function, {"x": x, "y": rng.integers(0, 3, 30)})


@model
def ordinal_regression(rng: np.random.Generator) -> Model:
    x = rng.normal(size=30)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        first = pyro.sample("first", dist.Normal(-1.0, 1.0))
        gaps = pyro.sample("gaps", dist.Exponential(1.0).expand([2]).to_event(1))
        cuts = torch.cat([first[None], first + gaps.cumsum(-1)])
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.OrderedLogistic(b * x, cuts), obs=y)

    return Model(function, {"x": x, "y": np.digitize(x + rng.logistic(size=30), [-1, 0, 1])})


@model
def lasso(rng: np.random.Generator) -> Model:
    x, z = rng.normal(size=(2, 20))

    def function(x: Tensor, z: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Laplace(0.0, 0.5).expand([2]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(torch.stack([x, z], -1) @ b, 1.0), obs=y)

    return Model(function, {"x": x, "z": z, "y": x + rng.normal(size=20)})


@model
def interaction_and_square(rng: np.random.Generator) -> Model:
    x, group = rng.normal(size=20), rng.integers(0, 2, 20)

    def function(x: Tensor, group: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(b[0] + b[1] * x + b[2] * group * x + b[3] * x**2, 1.0), obs=y)

    y = x + group * x + rng.normal(size=20)
    design = np.stack([np.ones(20), x, group * x, x**2], 1)
    return Model(function, {"x": x, "group": group, "y": y}, normal_evidence(design, y, 1.0, np.full(4, 2.0)))


@model
def dummy_variable(rng: np.random.Generator) -> Model:
    male = rng.integers(0, 2, 20).astype(bool)

    def function(male: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(torch.where(male.bool(), b[0], b[1]), 1.0), obs=y)

    y = male + rng.normal(size=20)
    design = np.stack([male, ~male], 1).astype(float)
    return Model(function, {"male": male, "y": y}, normal_evidence(design, y, 1.0, np.full(2, 2.0)))


# Means, proportions, rates.


@model
def coin(rng: np.random.Generator) -> Model:
    y = np.array([True, False, True, True, False, True])

    def function(y: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(p), obs=y)

    return Model(function, {"y": y}, special.betaln(2 + y.sum(), 2 + (~y).sum()) - special.betaln(2, 2))


@model
def waiting_times(rng: np.random.Generator) -> Model:
    y = rng.exponential(0.5, 12)

    def function(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Exponential(rate), obs=y)

    return Model(function, {"y": y}, special.gammaln(14) - 14 * np.log(1 + y.sum()))


@model
def geometric_trials(rng: np.random.Generator) -> Model:
    y = rng.geometric(0.3, 12) - 1

    def function(y: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Geometric(p), obs=y)

    return Model(function, {"y": y}, special.betaln(1 + 12, 1 + y.sum()))


@model
def die(rng: np.random.Generator) -> Model:
    y = rng.integers(0, 6, 25)

    def function(y: Tensor) -> None:
        p = pyro.sample("p", dist.Dirichlet(torch.ones(6)))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Categorical(p), obs=y)

    counts = np.bincount(y, minlength=6)
    return Model(function, {"y": y}, special.gammaln(6) - special.gammaln(31) + special.gammaln(1 + counts).sum())


@model
def large_counts(rng: np.random.Generator) -> Model:
    y = rng.poisson(50_000, 40)

    def function(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(3.0, 1e-4))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    s = y.sum()
    exact = 3 * np.log(1e-4) - special.gammaln(3) + special.gammaln(3 + s) - (3 + s) * np.log(1e-4 + 40)
    return Model(function, {"y": y}, exact - special.gammaln(y + 1).sum())


@model
def two_groups(rng: np.random.Generator) -> Model:
    a, b = rng.normal(0, 1, 8), rng.normal(1, 1, 11)

    def function(a: Tensor, b: Tensor) -> None:
        means = pyro.sample("means", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with pyro.plate("first", len(a)):
            pyro.sample("a", dist.Normal(means[0], 1.0), obs=a)
        with pyro.plate("second", len(b)):
            pyro.sample("b", dist.Normal(means[1], 1.0), obs=b)

    parts = [normal_evidence(np.ones((len(y), 1)), y, 1.0, np.full(1, 2.0)) for y in (a, b)]
    return Model(function, {"a": a, "b": b}, sum(parts))


@model
def angles(rng: np.random.Generator) -> Model:
    y = rng.vonmises(2.0, 3.0, 12)

    def function(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(1.5, 0.7))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.VonMises(mean, 3.0), obs=y)

    exact = by_quadrature(lambda m: stats.norm.logpdf(m, 1.5, 0.7) + stats.vonmises.logpdf(y, 3.0, m).sum(), -4.0, 7.0)
    return Model(function, {"y": y}, exact)


@model
def extreme_values(rng: np.random.Generator) -> Model:
    y = rng.gumbel(2.0, 1.0, 15)

    def function(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Gumbel(mean, 1.0), obs=y)

    exact = by_quadrature(lambda m: stats.norm.logpdf(m, 0, 3) + stats.gumbel_r.logpdf(y, m).sum(), -8.0, 10.0)
    return Model(function, {"y": y}, exact)


@model
def pareto_tail(rng: np.random.Generator) -> Model:
    y = 1 + rng.pareto(2.5, 15)

    def function(y: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Pareto(1.0, alpha), obs=y)

    s = np.log(y).sum()
    return Model(function, {"y": y}, special.gammaln(17) - 17 * np.log(1 + s) - s)


@model
def log_normal_sizes(rng: np.random.Generator) -> Model:
    y = np.exp(rng.normal(0.5, 0.4, 14))

    def function(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.LogNormal(mean, 0.4), obs=y)

    exact = normal_evidence(np.ones((14, 1)), np.log(y), 0.4, np.ones(1)) - np.log(y).sum()
    return Model(function, {"y": y}, exact)


# Groups.


@model
def group_means(rng: np.random.Generator) -> Model:
    group = np.repeat(np.arange(3), 4)
    y = 2.0 * group + rng.normal(size=12)

    def function(group: Tensor, y: Tensor) -> None:
        with pyro.plate("group", 3):
            level = pyro.sample("level", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(level[group], 1.0), obs=y)

    return Model(function, {"group": group, "y": y}, normal_evidence(np.eye(3)[group], y, 1.0, np.full(3, 5.0)))


@model
def varying_intercepts(rng: np.random.Generator) -> Model:
    group, x = np.repeat(np.arange(5), 4), rng.normal(size=20)

    def function(group: Tensor, x: Tensor, y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("group", 5):
            a = pyro.sample("a", dist.Normal(0.0, tau))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a[group] + b * x, 0.8), obs=y)

    return Model(function, {"group": group, "x": x, "y": rng.normal(size=5)[group] + x + rng.normal(0, 0.8, 20)})


@model
def varying_slopes(rng: np.random.Generator) -> Model:
    group, x = np.repeat(np.arange(4), 6), rng.normal(size=24)

    def function(group: Tensor, x: Tensor, y: Tensor) -> None:
        cholesky = pyro.sample("cholesky", dist.LKJCholesky(2, 2.0))
        with pyro.plate("group", 4):
            effects = pyro.sample("effects", dist.MultivariateNormal(torch.zeros(2), scale_tril=cholesky))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(effects[group, 0] + effects[group, 1] * x, 0.7), obs=y)

    return Model(function, {"group": group, "x": x, "y": x + rng.normal(0, 0.7, 24)})


@model
def eight_schools(rng: np.random.Generator) -> Model:
    y, sigma = np.array([28, 8, -3, 7, -1, 1, 18, 12]), np.array([15, 10, 16, 11, 9, 11, 10, 18])

    def function(y: Tensor, sigma: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sigma), obs=y)

    def log_joint(u: float) -> float:
        tau = math.exp(u)
        covariance = np.diag(sigma.astype(float) ** 2 + tau**2) + 25.0
        prior = math.log(2 / (math.pi * 5 * (1 + (tau / 5) ** 2))) + u
        return prior + float(stats.multivariate_normal.logpdf(y, np.zeros(8), covariance))

    return Model(function, {"y": y, "sigma": sigma}, by_quadrature(log_joint, -14.0, 12.0))


@model
def rat_tumours(rng: np.random.Generator) -> Model:
    n = rng.integers(10, 30, 8)

    def function(n: Tensor, y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Beta(2.0, 5.0))
        size = pyro.sample("size", dist.Gamma(4.0, 0.2))
        with pyro.plate("groups", len(y)):
            pyro.sample("y", dist.BetaBinomial(mean * size, (1 - mean) * size, n), obs=y)

    return Model(function, {"n": n, "y": rng.binomial(n, 0.2)})


@model
def item_response(rng: np.random.Generator) -> Model:
    person, item = np.repeat(np.arange(8), 4), np.tile(np.arange(4), 8)

    def function(person: Tensor, item: Tensor, right: Tensor) -> None:
        with pyro.plate("person", 8):
            ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("item", 4):
            difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", len(right)):
            pyro.sample("right", dist.Bernoulli(logits=ability[person] - difficulty[item]), obs=right)

    return Model(function, {"person": person, "item": item, "right": rng.integers(0, 2, 32)})


@model
def crossed_effects(rng: np.random.Generator) -> Model:
    row, column = np.repeat(np.arange(3), 4), np.tile(np.arange(4), 3)
    y = rng.normal(size=12)

    def function(row: Tensor, column: Tensor, y: Tensor) -> None:
        with pyro.plate("row", 3):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("column", 4):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a[row] + b[column], 1.0), obs=y)

    design = np.concatenate([np.eye(3)[row], np.eye(4)[column]], 1)
    return Model(function, {"row": row, "column": column, "y": y}, normal_evidence(design, y, 1.0, np.ones(7)))


@model
def item_response_with_guessing(rng: np.random.Generator) -> Model:
    item = np.tile(np.arange(3), 10)

    def function(item: Tensor, right: Tensor) -> None:
        with pyro.plate("item", 3):
            guess = pyro.sample("guess", dist.Beta(2.0, 8.0))
            skill = pyro.sample("skill", dist.Normal(0.0, 1.5))
        share = guess[item] + (1 - guess[item]) * torch.sigmoid(skill[item])
        with pyro.plate("answers", len(right)):
            pyro.sample("right", dist.Bernoulli(share), obs=right)

    return Model(function, {"item": item, "right": rng.integers(0, 2, 30)})


@model
def bradley_terry(rng: np.random.Generator) -> Model:
    first = rng.integers(0, 4, 30)
    second = (first + rng.integers(1, 4, 30)) % 4

    def function(first: Tensor, second: Tensor, won: Tensor) -> None:
        with pyro.plate("team", 4):
            strength = pyro.sample("strength", dist.Normal(0.0, 1.0))
        with pyro.plate("matches", len(won)):
            pyro.sample("won", dist.Bernoulli(logits=strength[first] - strength[second]), obs=won)

    return Model(function, {"first": first, "second": second, "won": rng.integers(0, 2, 30)})


@model
def goals(rng: np.random.Generator) -> Model:
    home, away = rng.integers(0, 3, 18), rng.integers(0, 3, 18)

    def function(home: Tensor, away: Tensor, scored: Tensor, conceded: Tensor) -> None:
        with pyro.plate("team", 3):
            attack = pyro.sample("attack", dist.Normal(0.0, 0.5))
            defence = pyro.sample("defence", dist.Normal(0.0, 0.5))
        with pyro.plate("matches", len(scored)):
            pyro.sample("scored", dist.Poisson((0.3 + attack[home] - defence[away]).exp()), obs=scored)
            pyro.sample("conceded", dist.Poisson((attack[away] - defence[home]).exp()), obs=conceded)

    data = {"home": home, "away": away, "scored": rng.poisson(1.4, 18), "conceded": rng.poisson(1.0, 18)}
    return Model(function, data)


# Counts with zeros, censoring, truncation, mixtures.


@model
def zero_inflated_counts(rng: np.random.Generator) -> Model:
    def function(y: Tensor) -> None:
        gate = pyro.sample("gate", dist.Beta(2.0, 2.0))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.ZeroInflatedPoisson(rate, gate=gate), obs=y)

    return Model(function, {"y": rng.poisson(2.5, 25) * rng.binomial(1, 0.6, 25)})


@model
def hurdle_counts(rng: np.random.Generator) -> Model:
    y = rng.poisson(2.0, 20)
    any_, positive = y > 0, y[y > 0]

    def function(any_: Tensor, positive: Tensor) -> None:
        share = pyro.sample("share", dist.Beta(1.0, 1.0))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(any_)):
            pyro.sample("any", dist.Bernoulli(share), obs=any_)
        with pyro.plate("positive", len(positive)):
            pyro.sample("count", dist.Poisson(rate), obs=positive)
        pyro.factor("truncation", -len(positive) * torch.log(-torch.expm1(-rate)))

    log_joint = stats.poisson.logpmf
    exact = by_quadrature(
        lambda u: (
            stats.gamma.logpdf(math.exp(u), 2)
            + u
            + log_joint(positive, math.exp(u)).sum()
            - len(positive) * math.log(-math.expm1(-math.exp(u)))
        ),
        -6.0,
        4.0,
    )
    return Model(
        function,
        {"any_": any_, "positive": positive},
        exact + special.betaln(1 + any_.sum(), 1 + (~any_).sum()),
    )


@model
def censored_survival(rng: np.random.Generator) -> Model:
    times, event = rng.exponential(2.0, 15), rng.binomial(1, 0.7, 15)

    def function(times: Tensor, event: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(times)):
            pyro.factor("survival", event * rate.log() - rate * times)

    d = event.sum()
    return Model(function, {"times": times, "event": event}, special.gammaln(2 + d) - (2 + d) * np.log(1 + times.sum()))


@model
def weibull_survival(rng: np.random.Generator) -> Model:
    times, event = rng.weibull(1.5, 15), rng.binomial(1, 0.8, 15).astype(bool)

    def function(times: Tensor, event: Tensor) -> None:
        shape = pyro.sample("shape", dist.Gamma(4.0, 3.0))
        scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        with pyro.plate("rows", len(times)):
            with pyro.poutine.mask(mask=event.bool()):
                pyro.sample("times", dist.Weibull(scale, shape), obs=times)
            with pyro.poutine.mask(mask=~event.bool()):
                pyro.factor("survived", -((times / scale) ** shape))

    return Model(function, {"times": times, "event": event})


@model
def nobody_was_censored(rng: np.random.Generator) -> Model:
    seen = rng.exponential(2.0, 10)

    def function(seen: Tensor, limits: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("seen", len(seen)):
            pyro.sample("t", dist.Exponential(rate), obs=seen)
        with pyro.plate("censored", len(limits)):
            pyro.factor("beyond", -rate * limits)

    exact = special.gammaln(12) - 12 * np.log(1 + seen.sum())
    return Model(function, {"seen": seen, "limits": np.zeros(0)}, exact)


@model
def tobit(rng: np.random.Generator) -> Model:
    x = rng.normal(size=20)
    y = np.maximum(x + rng.normal(0, 0.8, 20), 0.0)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        normal = dist.Normal(b * x, 0.8)
        with pyro.plate("rows", len(y)):
            log_below = torch.special.log_ndtr(-b * x / 0.8)
            pyro.factor("y", torch.where(y > 0, normal.log_prob(y), log_below))

    def log_joint(b: float) -> float:
        above = stats.norm.logpdf(y, b * x, 0.8)
        return stats.norm.logpdf(b, 0, 2) + np.where(y > 0, above, stats.norm.logcdf(-b * x / 0.8)).sum()

    return Model(function, {"x": x, "y": y}, by_quadrature(log_joint, -8.0, 8.0))


@model
def truncated_normal(rng: np.random.Generator) -> Model:
    y = np.abs(rng.normal(0.5, 1.0, 15))

    def function(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        pyro.factor("truncation", -len(y) * torch.special.log_ndtr(mean))

    def log_joint(m: float) -> float:
        return stats.norm.logpdf(m) + (stats.norm.logpdf(y, m) - stats.norm.logcdf(m)).sum()

    return Model(function, {"y": y}, by_quadrature(log_joint, -7.0, 7.0))


@model
def mixture_of_two(rng: np.random.Generator) -> Model:
    y = np.concatenate([rng.normal(-2, 0.7, 8), rng.normal(2, 0.7, 8)])

    def function(y: Tensor) -> None:
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        with pyro.plate("rows", len(y)):
            side = pyro.sample("side", dist.Bernoulli(share), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(4.0 * side - 2.0, 0.7), obs=y)

    def log_joint(u: float) -> float:
        p = special.expit(u)
        terms = np.logaddexp(np.log(p) + stats.norm.logpdf(y, 2, 0.7), np.log1p(-p) + stats.norm.logpdf(y, -2, 0.7))
        return stats.beta.logpdf(p, 2, 2) + math.log(p * (1 - p)) + terms.sum()

    return Model(function, {"y": y}, by_quadrature(log_joint, -10.0, 10.0))


@model
def annotators(rng: np.random.Generator) -> Model:
    item, coder = np.repeat(np.arange(6), 3), np.tile(np.arange(3), 6)

    def function(item: Tensor, coder: Tensor, mark: Tensor) -> None:
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        with pyro.plate("coder", 3):
            skill = pyro.sample("skill", dist.Beta(6.0, 2.0))
        right = torch.stack([1 - skill, skill])  # by label
        table = torch.zeros(6, 3, dtype=share.dtype).index_put((item, coder), mark.to(share.dtype))
        with pyro.plate("item", 6, dim=-2):
            label = pyro.sample("label", dist.Bernoulli(share), infer={"enumerate": "parallel"})
            with pyro.plate("coders", 3, dim=-1):
                pyro.sample("mark", dist.Bernoulli(label * right[1] + (1 - label) * right[0]), obs=table)

    return Model(function, {"item": item, "coder": coder, "mark": rng.integers(0, 2, 18)})


@model
def change_point(rng: np.random.Generator) -> Model:
    y = np.concatenate([rng.poisson(3, 8), rng.poisson(1, 7)])

    def function(y: Tensor) -> None:
        early = pyro.sample("early", dist.Gamma(2.0, 1.0))
        late = pyro.sample("late", dist.Gamma(2.0, 1.0))
        before = torch.distributions.Poisson(early).log_prob(y).cumsum(0)
        after = torch.distributions.Poisson(late).log_prob(y).flip(0).cumsum(0).flip(0)
        pyro.factor("when", (before[:-1] + after[1:]).logsumexp(0) - math.log(len(y) - 1))

    def one(part: np.ndarray) -> float:
        s = part.sum()
        return special.gammaln(2 + s) - (2 + s) * math.log(1 + len(part)) - special.gammaln(part + 1).sum()

    exact = special.logsumexp([one(y[:k]) + one(y[k:]) for k in range(1, 15)]) - math.log(14)
    return Model(function, {"y": y}, float(exact))


# Series, fields, covariances, gaps.


@model
def random_walk(rng: np.random.Generator) -> Model:
    y = rng.normal(0, 0.5, 12).cumsum() + rng.normal(0, 0.5, 12)

    def function(y: Tensor) -> None:
        level = pyro.sample("start", dist.Normal(0.0, 1.0))
        for t in range(len(y)):
            level = pyro.sample(f"level_{t}", dist.Normal(level, 0.5))
            pyro.sample(f"y_{t}", dist.Normal(level, 0.5), obs=y[t])

    time_ = np.arange(1, 13)
    covariance = 1 + 0.25 * np.minimum.outer(time_, time_) + 0.25 * np.eye(12)
    return Model(function, {"y": y}, float(stats.multivariate_normal.logpdf(y, np.zeros(12), covariance)))


@model
def autoregression(rng: np.random.Generator) -> Model:
    y = rng.normal(size=25)

    def function(y: Tensor) -> None:
        phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
        with pyro.plate("times", len(y) - 1):
            pyro.sample("y", dist.Normal(phi * y[:-1], 1.0), obs=y[1:])

    def log_joint(phi: float) -> float:
        return math.log(0.5) + stats.norm.logpdf(y[1:], phi * y[:-1]).sum()

    return Model(function, {"y": y}, by_quadrature(log_joint, -1.0, 1.0))


@model
def stochastic_volatility(rng: np.random.Generator) -> Model:
    def function(returns: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.Exponential(5.0))
        with pyro.plate("steps", len(returns)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("days", len(returns)):
            pyro.sample("returns", dist.Normal(0.0, (sigma * z.cumsum(-1)).exp()), obs=returns)

    return Model(function, {"returns": rng.normal(size=15)})


@model
def gaussian_process(rng: np.random.Generator) -> Model:
    x = np.sort(rng.uniform(0, 4, 12))
    y = np.sin(x) + rng.normal(0, 0.3, 12)

    def function(x: Tensor, y: Tensor) -> None:
        u = pyro.sample("log_length", dist.Normal(0.0, 0.5))
        kernel = torch.exp(-0.5 * ((x[:, None] - x) / u.exp()) ** 2) + 0.09 * torch.eye(len(x), dtype=x.dtype)
        pyro.sample("y", dist.MultivariateNormal(x.new_zeros(len(x)), kernel), obs=y)

    def log_joint(u: float) -> float:
        kernel = np.exp(-0.5 * ((x[:, None] - x) / math.exp(u)) ** 2) + 0.09 * np.eye(12)
        return stats.norm.logpdf(u, 0, 0.5) + float(stats.multivariate_normal.logpdf(y, np.zeros(12), kernel))

    return Model(function, {"x": x, "y": y}, by_quadrature(log_joint, -4.0, 4.0))


@model
def conditional_autoregression(rng: np.random.Generator) -> Model:
    first, second = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 4])

    def function(first: Tensor, second: Tensor, y: Tensor) -> None:
        with pyro.plate("area", 5):
            effect = pyro.sample("effect", dist.Normal(0.0, 2.0))
            pyro.sample("y", dist.Poisson(effect.exp()), obs=y)
        pyro.factor("neighbours", -0.5 * (effect[first] - effect[second]).square().sum())

    return Model(function, {"first": first, "second": second, "y": rng.poisson(2.0, 5)})


@model
def wishart_prior(rng: np.random.Generator) -> Model:
    a, b = rng.normal(size=(2, 15))

    def function(a: Tensor, b: Tensor) -> None:
        precision = pyro.sample("precision", dist.Wishart(torch.tensor(4.0), torch.eye(2)))
        with pyro.plate("rows", len(a)):
            pyro.sample(
                "y", dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision), obs=torch.stack([a, b], -1)
            )

    y = np.stack([a, b], 1)
    _, log_det = np.linalg.slogdet(np.eye(2) + y.T @ y)
    exact = special.multigammaln(19 / 2, 2) - special.multigammaln(2, 2) - 15 * math.log(math.pi) - 19 / 2 * log_det
    return Model(function, {"a": a, "b": b}, float(exact))


@model
def correlations(rng: np.random.Generator) -> Model:
    a, b = rng.multivariate_normal(np.zeros(2), [[1, 0.5], [0.5, 1]], 15).T

    def function(a: Tensor, b: Tensor) -> None:
        cholesky = pyro.sample("cholesky", dist.LKJCholesky(2, 2.0))
        with pyro.plate("rows", len(a)):
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=cholesky), obs=torch.stack([a, b], -1))

    def log_joint(u: float) -> float:
        r = math.tanh(u)
        prior = stats.beta.logpdf((1 + r) / 2, 2, 2) - math.log(2) + math.log1p(-(r**2))
        covariance = [[1, r], [r, 1]]
        return prior + float(stats.multivariate_normal.logpdf(np.stack([a, b], 1), [0, 0], covariance).sum())

    return Model(function, {"a": a, "b": b}, by_quadrature(log_joint, -6.0, 6.0))


@model
def measurements_with_error(rng: np.random.Generator) -> Model:
    truth = rng.normal(size=15)
    x, y = truth + rng.normal(0, 0.3, 15), truth + rng.normal(0, 0.5, 15)

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(x)):
            real = pyro.sample("real", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(real, 0.3), obs=x)
            pyro.sample("y", dist.Normal(b * real, 0.5), obs=y)

    def log_joint(b: float) -> float:
        covariance = [[1.09, b], [b, b**2 + 0.25]]
        both = stats.multivariate_normal.logpdf(np.stack([x, y], 1), [0, 0], covariance)
        return stats.norm.logpdf(b, 0, 2) + float(both.sum())

    return Model(function, {"x": x, "y": y}, by_quadrature(log_joint, -8.0, 8.0))


@model
def normal_data_with_gaps(rng: np.random.Generator) -> Model:
    y = rng.normal(1.0, 1.0, 12)
    y[[3, 7]] = np.nan

    def function(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.NanMaskedNormal(mean, 1.0), obs=y)

    known = y[~np.isnan(y)]
    return Model(function, {"y": y}, normal_evidence(np.ones((10, 1)), known, 1.0, np.full(1, 2.0)))


@model
def missing_covariates(rng: np.random.Generator) -> Model:
    x, y = rng.normal(size=12), rng.normal(size=12)
    x[[2, 5]] = np.nan

    def function(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        missing = x.isnan()
        with pyro.plate("gaps", int(missing.sum())):
            drawn = pyro.sample("drawn", dist.Normal(0.0, 1.0))
        whole = x.masked_fill(missing, 0.0).masked_scatter(missing, drawn)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(b * whole, 1.0), obs=y)

    kept = ~np.isnan(x)

    def log_joint(b: float) -> float:
        gaps = stats.norm.logpdf(y[~kept], 0, math.sqrt(1 + b**2)).sum()
        return stats.norm.logpdf(b) + gaps + stats.norm.logpdf(y[kept], b * x[kept]).sum()

    return Model(function, {"x": x, "y": y}, by_quadrature(log_joint, -7.0, 7.0))


@model
def capture_recapture(rng: np.random.Generator) -> Model:
    def function(caught: Tensor, days: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.5))
        with pyro.plate("animals", len(caught)):
            pyro.sample("caught", dist.Binomial(days, logits=mean), obs=caught)
        seen = -torch.expm1(5 * torch.nn.functional.logsigmoid(-mean))
        pyro.factor("seen", -len(caught) * seen.log())

    caught = np.array([1, 2, 1, 3, 1, 1, 2])

    def log_joint(u: float) -> float:
        p = special.expit(u)
        return (
            stats.norm.logpdf(u, 0, 1.5)
            + stats.binom.logpmf(caught, 5, p).sum()
            - 7 * math.log(-math.expm1(5 * math.log1p(-p)))
        )

    return Model(function, {"caught": caught, "days": np.full(7, 5)}, by_quadrature(log_joint, -10.0, 10.0))


@model
def dose_response(rng: np.random.Generator) -> Model:
    dose = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])

    def function(dose: Tensor, y: Tensor) -> None:
        top = pyro.sample("top", dist.LogNormal(1.0, 0.5))
        half = pyro.sample("half", dist.LogNormal(0.0, 0.5))
        with pyro.plate("doses", len(dose)):
            pyro.sample("y", dist.Normal(top * dose / (half + dose), 0.2), obs=y)

    return Model(function, {"dose": dose, "y": 3 * dose / (1 + dose) + rng.normal(0, 0.2, 6)})


@model
def seasonal_series(rng: np.random.Generator) -> Model:
    month = np.tile(np.arange(4), 5)
    y = np.array([1.0, 0.0, -1.0, 0.0])[month] + rng.normal(0, 0.5, 20)

    def function(month: Tensor, y: Tensor) -> None:
        with pyro.plate("month", 4):
            season = pyro.sample("season", dist.Normal(0.0, 1.0))
        trend = pyro.sample("trend", dist.Normal(0.0, 0.1))
        with pyro.plate("times", len(y)):
            pyro.sample("y", dist.Normal(season[month] + trend * torch.arange(len(y)), 0.5), obs=y)

    design = np.concatenate([np.eye(4)[month], np.arange(20)[:, None]], 1)
    return Model(function, {"month": month, "y": y}, normal_evidence(design, y, 0.5, np.array([1, 1, 1, 1, 0.1])))


@model
def mark_by_category(rng: np.random.Generator) -> Model:
    style = rng.integers(0, 3, 18)

    def function(style: Tensor, mark: Tensor) -> None:
        with pyro.plate("style", 3):
            p = pyro.sample("p", dist.Dirichlet(torch.ones(4)))
        with pyro.plate("rows", len(mark)):
            pyro.sample("mark", dist.Categorical(p[style]), obs=mark)

    mark = rng.integers(0, 4, 18)
    exact = 0.0
    for s in range(3):
        counts = np.bincount(mark[style == s], minlength=4)
        exact += special.gammaln(4) - special.gammaln(4 + counts.sum()) + special.gammaln(1 + counts).sum()
    return Model(function, {"style": style, "mark": mark}, float(exact))


@model
def meta_analysis(rng: np.random.Generator) -> Model:
    error = rng.uniform(0.2, 0.6, 7)

    def function(effect: Tensor, error: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(0.5))
        with pyro.plate("studies", len(effect)):
            pyro.sample("effect", dist.Normal(mean, (tau**2 + error**2).sqrt()), obs=effect)

    return Model(function, {"effect": 0.3 + rng.normal(0, error), "error": error})


# The forms of data.


def double(data: Data) -> dict[str, Any]:
    """Return vectors in double precision, and whole numbers with 64 bits."""
    return {name: torch.as_tensor(x.astype(np.int64) if x.dtype.kind in "iu" else x) for name, x in data.items()}


def columns_of_pandas(data: Data) -> dict[str, Any]:
    """Return columns, those of indices as categories."""
    return {name: pd.Series(x, name=name) for name, x in data.items()}


def lists(data: Data) -> dict[str, Any]:
    """Return lists of Python numbers."""
    return {name: x.tolist() for name, x in data.items()}


def narrow(data: Data) -> dict[str, Any]:
    """Return whole numbers in the fewest bytes that hold them."""
    found: dict[str, Any] = {}
    for name, x in data.items():
        kinds = ("bool", "uint8", "int8", "int16", "int32")
        whole = x.dtype.kind in "iub" and len(x)
        found[name] = x.astype(next((k for k in kinds if (x.astype(k) == x).all()), "int64")) if whole else x
    return found


def two_dimensional(data: Data) -> dict[str, Any]:
    """Return columns ``(n, 1)``."""
    return {name: x[:, None] for name, x in data.items()}


def single(data: Data) -> dict[str, Any]:
    """Return real numbers in single precision."""
    return {name: torch.as_tensor(x.astype(np.float32) if x.dtype.kind == "f" else x) for name, x in data.items()}


def frames(data: Data) -> dict[str, Any]:
    """Return columns of data frames, of which the model gets each by its name."""
    return {name: _Column(pd.DataFrame({name: x, "note": "text"}), name) for name, x in data.items()}


def masked(data: Data) -> dict[str, Any]:
    """Return masked arrays, in which what is NaN is masked."""
    return {
        name: np.ma.masked_invalid(x) if x.dtype.kind == "f" else np.ma.array(x, mask=False) for name, x in data.items()
    }


@dataclass
class _Column:
    frame: pd.DataFrame
    name: str


FORMS: dict[str, Callable[[Data], dict[str, Any]]] = {
    "double": double,
    "pandas": columns_of_pandas,
    "lists": lists,
    "integers": narrow,
    "columns": two_dimensional,
    "single": single,
    "frames": frames,
    "masked": masked,
}


def target_of(case: Model, form: str) -> bk.Target:
    """Return the target of a model with its data in a form."""
    given = FORMS[form](case.data)
    if form != "frames":
        return bk.Target.from_pyro(case.function, **given, **case.others)
    names = {column: value.name for column, value in given.items()}

    def from_frames(**tables: Any) -> None:
        case.function(**{column: tables[column][name] for column, name in names.items()}, **case.others)

    return bk.Target.from_pyro(from_frames, **{column: value.frame for column, value in given.items()})


def judged(case: Model, form: str, base: bk.Target, u: Tensor, expected: Tensor) -> tuple[str, str]:
    """Return how a form fares, and what was said."""
    try:
        target = target_of(case, form)
        found = target.log_density(u.to(target.dtype)).double()
        compiled = target.value_and_grad(u.to(target.dtype))[0].double()
    except BayeskitError as error:
        return "refused", str(error).splitlines()[0]
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    near = 1e-9 if target.dtype == torch.float64 else 1e-3
    for value in (found, compiled):
        if not value.allclose(expected, rtol=near, atol=near, equal_nan=True):
            return "wrong", f"off by {float((value - expected).abs().max()):.3g}"
    return "right", ""


def evidence_of(case: Model, target: bk.Target, seed: int) -> tuple[str, str]:
    """Return whether trusted estimates hold the exact answer, or agree."""
    draws = bk.sample(target, seed=seed, progress=False)
    found = [bk.evidence.bridge_sampling(target, draws), bk.evidence.laplace_importance_sampling(target, seed=seed)]
    trusted = [z for z in found if z.trusted]
    answer, error = (case.exact, 0.0) if case.exact is not None else (found[0].log_evidence, found[0].standard_error)
    off = [z for z in trusted if abs(z.log_evidence - answer) > 4 * math.hypot(z.standard_error, error)]
    said = f"exact {case.exact}, {'; '.join(map(str, found))}"
    return ("wrong" if off else "right" if trusted else "not trusted"), said


def cost_of_coins() -> None:
    """Print the seconds of gradients of 200,000 coins in each width, in turns with those of doubles."""

    def coins(y: Tensor) -> None:
        share = pyro.sample("share", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(share), obs=y)

    torch.set_num_threads(1)
    heads = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) < 0.3
    widths = (torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)
    targets = {width: bk.Target.from_pyro(coins, heads.to(width), compile=True) for width in widths}
    u = torch.zeros(4, 1, dtype=torch.float64)
    spent: dict[torch.dtype, list[float]] = {width: [] for width in widths}
    for turn in range(33):
        for width, target in targets.items():
            begin = time.process_time()
            for _ in range(10):
                target.value_and_grad(u)
            if turn > 2:
                spent[width].append(time.process_time() - begin)
    reference = float(np.median(spent[torch.float64]))
    for width in widths:
        median = float(np.median(spent[width]))
        print(
            f"{str(width):14s} {median / 10 * 1e3:6.2f} ms a gradient of 4 chains, {median / reference:.2f} of doubles"
        )


def main() -> None:
    """Print how each form of each model fares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--evidence", action="store_true", help="estimate the marginal likelihood of each model as well"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coins", action="store_true", help="print the cost of whole numbers")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.coins:
        cost_of_coins()
        return
    begin, counts, answers = time.process_time(), Counter[str](), Counter[str]()
    print(f"{'model':30s} " + " ".join(f"{form:9s}" for form in FORMS), flush=True)
    for name in arguments.models:
        case = MODELS[name](np.random.default_rng(arguments.seed))
        base = target_of(case, "double")
        u = base.sample_prior(5, seed=1)
        expected = base.log_density(u)
        row, said = [], []
        for form in FORMS:
            verdict, words = judged(case, form, base, u, expected)
            counts[verdict] += 1
            row.append(verdict)
            said += (
                [f"    {form}: {words}"]
                if verdict in ("wrong", "foreign") or form not in ("columns",) and words
                else []
            )
        print(f"{name:30s} " + " ".join(f"{verdict:9s}" for verdict in row), flush=True)
        if arguments.evidence:
            verdict, words = evidence_of(case, base, arguments.seed)
            answers[verdict] += 1
            said += [f"    evidence {verdict}: {words}"] if verdict != "right" else []
        print("\n".join(said), end="\n" if said else "", flush=True)
    print(f"{len(arguments.models)} models, forms: {dict(counts)}")
    if arguments.evidence:
        print(f"evidence: {dict(answers)}")
    print(f"{time.process_time() - begin:.0f} CPU s")


if __name__ == "__main__":
    main()
