"""The models of `vague_models.py` and their exact answers, which use none of the package's code.

Where data are normal given the scales, coefficients and effects are integrated analytically and the logarithms of the
scales by Gauss-Legendre quadrature. Student-t, logistic and Poisson regressions are integrated in all coefficients.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import scipy.stats as st
from scipy.special import digamma, gammaln, logsumexp, polygamma

DEGREES = 4.0  # of freedom of the robust regression
#: What a prior's variate is: end of the name of its site, and the power of it that is the standard deviation.
VARIATES = {
    "Gamma": ("_precision", -0.5),
    "InverseGamma": ("_variance", 0.5),
    "HalfCauchy": ("", 1),
    "Uniform": ("", 1),
}


@dataclass(frozen=True)
class ScalePrior:
    """Prior of a standard deviation, of its square or of the inverse of that."""

    family: str
    numbers: tuple[float, ...]

    @property
    def name(self) -> str:
        """Short name."""
        short = {"Gamma": "gamma", "InverseGamma": "inverse_gamma", "HalfCauchy": "half_cauchy", "Uniform": "uniform"}
        return f"{short[self.family]}{self.numbers[-1]:g}"

    @property
    def highest(self) -> float:
        """Upper end of the logarithm of the standard deviation."""
        return math.log(self.numbers[1]) if self.family == "Uniform" else 25.0

    def log_density(self, log_sd: np.ndarray) -> np.ndarray:
        """Return the log density of the logarithm of the standard deviation."""
        if self.family == "HalfCauchy":
            return st.halfcauchy.logpdf(np.exp(log_sd), scale=self.numbers[0]) + log_sd
        if self.family == "Uniform":
            return np.where(log_sd <= self.highest, log_sd - self.highest, -np.inf)
        # The inverse of a variance under InverseGamma(a, a) has the distribution Gamma(a, a).
        shape, rate = self.numbers
        return st.gamma.logpdf(np.exp(-2 * log_sd), shape, scale=1 / rate) + math.log(2) - 2 * log_sd


@dataclass(frozen=True)
class CoefficientPrior:
    """Prior of all coefficients: normal, normal in units of ``sigma``, or flat in one of two spellings."""

    name: str
    family: str
    sd: float = math.inf


BUGS = [ScalePrior(family, (a, a)) for family in ("Gamma", "InverseGamma") for a in (0.1, 0.01, 0.001)]
SCALES = [
    *BUGS,
    ScalePrior("HalfCauchy", (25.0,)),
    ScalePrior("HalfCauchy", (0.01,)),
    ScalePrior("Uniform", (0.0, 100.0)),
]
NORMALS = [CoefficientPrior("normal1e3", "Normal", 1e3), CoefficientPrior("normal1e6", "Normal", 1e6)]
COEFFICIENTS = [*NORMALS, CoefficientPrior("flat", "ImproperUniform"), CoefficientPrior("masked", "masked")]
SCALED = CoefficientPrior("scaled20", "scaled", 20.0)
NONE = CoefficientPrior("shrunk", "none")


@dataclass(frozen=True)
class Kind:
    """A kind of model: the form of its likelihood, its scales, and how its data are made."""

    form: str
    scales: tuple[str, ...]
    make: Callable[[np.random.Generator], dict[str, np.ndarray]]


def line(x: np.ndarray, y: np.ndarray, **others: np.ndarray) -> dict[str, np.ndarray]:
    return {"design": np.column_stack([np.ones(len(x)), x]), "y": y, **others}


def level(y: np.ndarray, **others: np.ndarray) -> dict[str, np.ndarray]:
    return {"design": np.ones((len(y), 1)), "y": y, **others}


def heights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return level(rng.normal(171, 7, 12).round(1))


def sales(rng: np.random.Generator) -> dict[str, np.ndarray]:
    temperature = rng.uniform(5, 30, 14).round(1)
    return line(temperature, (40 + 2.5 * temperature + rng.normal(0, 6, 14)).round(1))


def yearly(rng: np.random.Generator) -> dict[str, np.ndarray]:
    y = [30.0]
    for noise in rng.normal(0, 2, 24):
        y.append(round(12 + 0.6 * y[-1] + noise, 2))
    return line(np.array(y[:-1]), np.array(y[1:]))


def schools(rng: np.random.Generator) -> dict[str, np.ndarray]:
    errors = rng.uniform(3, 8, 9).round(1)
    return level((rng.normal(25, 6, 9) + errors * rng.normal(size=9)).round(1), extra=errors)


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    group = np.repeat(np.arange(7), 4)
    return level((rng.normal(50, 6, 7)[group] + rng.normal(0, 4, 28)).round(1), extra=group)


def river(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return level((30 + np.cumsum(rng.normal(0, 1.5, 24)) + rng.normal(0, 2, 24)).round(1))


def depths(rng: np.random.Generator) -> dict[str, np.ndarray]:
    depth = np.linspace(2, 30, 15)
    return line(depth, (21 - 0.4 * depth + 0.8 * rng.standard_t(3, 15)).round(2))


def doses(rng: np.random.Generator) -> dict[str, np.ndarray]:
    dose = np.tile(np.arange(1.0, 11.0), 4)
    return line(dose, (rng.uniform(size=40) < 1 / (1 + np.exp(3 - 0.5 * dose))).astype(float))


def counts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    size = rng.uniform(1, 5, 16).round(1)
    return line(size, rng.poisson(np.exp(1 + 0.5 * size)).astype(float))


def calibration(rng: np.random.Generator) -> dict[str, np.ndarray]:
    x = np.arange(1.0, 9.0)
    return {"design": x[:, None], "y": (7 * x + rng.normal(0, 2, 8)).round(1), "extra": np.full(8, 2.0)}


KINDS = {
    "mean": Kind("normal", ("sigma",), heights),
    "regression": Kind("normal", ("sigma",), sales),
    "autoregression": Kind("normal", ("sigma",), yearly),
    "conjugate": Kind("normal", ("sigma",), sales),
    "hierarchy": Kind("hierarchy", ("tau",), schools),
    "effects": Kind("effects", ("sigma", "tau"), batches),
    "local_level": Kind("local_level", ("sigma", "tau"), river),
    "robust": Kind("student", ("sigma",), depths),
    "logistic": Kind("logistic", (), doses),
    "poisson": Kind("poisson", (), counts),
    "shrinkage": Kind("shrinkage", ("tau",), calibration),
}


@dataclass(frozen=True)
class Model:
    """One model of the exam: a kind under a prior of its scales and one of its coefficients."""

    kind: str
    scale: ScalePrior | None
    coefficient: CoefficientPrior

    @property
    def name(self) -> str:
        """Kind and priors, joined by hyphens."""
        return "-".join(part for part in (self.kind, self.scale and self.scale.name, self.coefficient.name) if part)

    @property
    def form(self) -> str:
        """Form of the likelihood."""
        return KINDS[self.kind].form

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the scales, which have the same prior."""
        return KINDS[self.kind].scales

    @property
    def proper(self) -> bool:
        """Whether there is an evidence."""
        return self.coefficient.family not in ("ImproperUniform", "masked")

    def data(self) -> dict[str, np.ndarray]:
        """Return the data, the same in every run: `design` ``(n, k)``, `y` ``(n,)`` and, for some forms, `extra`."""
        return KINDS[self.kind].make(np.random.default_rng(zlib.crc32(self.name.encode())))

    def quantities(self) -> list[str]:
        """Return the names of what is judged: coefficients, if they are free, and the logarithms of the scales."""
        free = 0 if self.form == "shrinkage" else self.data()["design"].shape[1]
        return [f"b[{j}]" for j in range(free)] + [f"log {name}" for name in self.scales]

    def description(self) -> dict[str, Any]:
        """Return everything that another program needs to build the model, ready for JSON."""
        suffix, power = VARIATES[self.scale.family] if self.scale else ("", 1)
        return {
            "form": self.form,
            "data": {name: value.tolist() for name, value in self.data().items()},
            "scales": {name: name + suffix for name in self.scales},
            "scale_prior": self.scale and {"family": self.scale.family, "numbers": self.scale.numbers, "power": power},
            "coefficient_prior": {"family": self.coefficient.family, "sd": self.coefficient.sd},
            "degrees": DEGREES,
            "quantities": self.quantities(),
        }


def exam() -> list[Model]:
    """Return all models; the priors of coefficients take turns."""
    models, turns = [], cycle(COEFFICIENTS)
    for kind, about in KINDS.items():
        if kind == "conjugate":
            models += [Model(kind, scale, SCALED) for scale in BUGS]
        elif kind == "shrinkage":
            models += [Model(kind, scale, NONE) for scale in SCALES]
        elif about.scales:
            models += [Model(kind, scale, next(turns)) for scale in SCALES]
        else:
            models += [Model(kind, None, coefficient) for coefficient in COEFFICIENTS]
    return models


# Exact answers.


@dataclass(frozen=True)
class Answer:
    """Log evidence (of flat priors with density one), moments of the quantities, and the errors of the quadrature."""

    log_evidence: float
    mean: np.ndarray
    covariance: np.ndarray
    error: float = 0.0
    moment_error: float = 0.0  # in standard deviations

    @property
    def sd(self) -> np.ndarray:
        """Standard deviations of the quantities."""
        return np.sqrt(np.diag(self.covariance))


#: Log density, means ``(m, q)`` and covariances ``(m, q, q)`` of the quantities given points ``(m, d)``.
Density = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | float]]


def normal_parts(model: Model) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return `y`, the design of free coefficients, known variances, and the effects' covariance for ``tau = 1``."""
    data = model.data()
    y, design, extra, n = data["y"], data["design"], data.get("extra"), len(data["y"])
    if model.form == "hierarchy":
        return y, design, extra**2, np.eye(n)
    if model.form == "shrinkage":
        return y, design[:, :0], extra**2, design @ design.T
    if model.form == "effects":
        return y, design, np.zeros(n), np.equal.outer(extra, extra).astype(float)
    if model.form == "local_level":
        steps = np.tril(np.ones((n, n)))[:, 1:]
        return y, design, np.zeros(n), steps @ steps.T
    return y, design, np.zeros(n), np.zeros((n, n))


def coefficients_given_normal(model: Model) -> Density:
    """Return the density of the log scales with normal coefficients and effects integrated out."""
    y, design, known, structure = normal_parts(model)
    # Rotated, all observations are independent: known variances are equal, or the structure is the identity.
    eigenvalues, rotation = np.linalg.eigh(structure)
    y, design = rotation.T @ y, rotation.T @ design
    k = design.shape[1]

    def density(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        variance = dict(zip(model.scales, np.exp(2 * points.T)[..., None], strict=True))
        total = known + variance.get("sigma", 0.0) + variance.get("tau", 0.0) * eigenvalues.clip(0)  # (m, n)
        of_prior = np.full(len(points), model.coefficient.sd**2)
        if model.coefficient.family == "scaled":
            of_prior *= variance["sigma"][:, 0]
        precision = np.einsum("ni,mn,nj->mij", design, 1 / total, design) + np.eye(k) / of_prior[:, None, None]
        covariance = np.linalg.inv(precision)
        mean = np.einsum("mij,nj,mn->mi", covariance, design, y / total)
        value = -0.5 * np.log(2 * math.pi * total).sum(1) - 0.5 * ((y - mean @ design.T) ** 2 / total).sum(1)
        value -= 0.5 * (mean**2).sum(1) / of_prior + 0.5 * np.linalg.slogdet(precision)[1]
        value += -0.5 * k * np.log(of_prior) if model.proper and k else 0.5 * k * math.log(2 * math.pi)
        value += sum(model.scale.log_density(column) for column in points.T)
        padding = len(model.scales)
        return value, np.column_stack([mean, points]), np.pad(covariance, ((0, 0), (0, padding), (0, padding)))

    return density


def log_likelihood(model: Model, centre: np.ndarray, log_sd: np.ndarray | float) -> np.ndarray:
    """Return the log likelihood of a linear predictor ``(m, n)``, for the forms that have no effects."""
    y = model.data()["y"]
    if model.form == "logistic":
        return (y * centre - np.logaddexp(0, centre)).sum(1)
    if model.form == "poisson":
        return (y * centre - np.exp(centre) - gammaln(y + 1)).sum(1)
    constant = gammaln((DEGREES + 1) / 2) - gammaln(DEGREES / 2) - 0.5 * math.log(DEGREES * math.pi)
    residual = (y - centre) * np.exp(-log_sd)
    return len(y) * constant - len(y) * log_sd[:, 0] - (DEGREES + 1) / 2 * np.log1p(residual**2 / DEGREES).sum(1)


def log_prior(model: Model, b: np.ndarray) -> np.ndarray:
    """Return the log prior of coefficients ``(m, k)``."""
    return st.norm.logpdf(b, 0, model.coefficient.sd).sum(1) if model.proper else np.zeros(len(b))


def coefficients_on_a_grid(model: Model) -> Density:
    """Return the density of coefficients, in standard units about a centre, and of the log scale if there is one."""
    data = model.data()
    y, design, k = data["y"], data["design"], data["design"].shape[1]
    centre, weight = np.linalg.lstsq(design, y, rcond=None)[0], np.ones(len(y))
    if model.form != "student":
        centre = np.zeros(k)
        for _ in range(50):  # Newton's method for the canonical links
            fitted = 1 / (1 + np.exp(-design @ centre)) if model.form == "logistic" else np.exp(design @ centre)
            weight = fitted * (1 - fitted) if model.form == "logistic" else fitted
            step = np.linalg.solve(design.T @ (weight[:, None] * design), design.T @ (y - fitted))
            centre = centre + step * min(1, 2 / np.abs(design @ step).max())
    root = np.linalg.cholesky(np.linalg.inv(design.T @ (weight[:, None] * design)))

    def density(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        log_sd = points[:, k:] if model.scales else np.zeros((len(points), 1))
        b = centre + np.exp(log_sd) * (points[:, :k] @ root.T)
        value = log_likelihood(model, b @ design.T, log_sd) + log_prior(model, b)
        value += k * log_sd[:, 0] + np.linalg.slogdet(root)[1]
        if model.scales:
            value += model.scale.log_density(log_sd[:, 0])
        return value, np.column_stack([b, points[:, k:]]), 0.0

    return density


def grid(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def in_parts(density: Density, points: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what the density gives for many points, few at a time."""
    parts = [density(part) for part in np.array_split(points, len(points) // 50_000 + 1)]
    return tuple(np.concatenate([np.atleast_1d(part[i]) for part in parts]) for i in range(3))


def integrated(density: Density, box: list[tuple[float, float]], panels: int) -> Answer:
    """Integrate by composite Gauss-Legendre rules, with a number of panels an axis."""
    abscissae, weights = np.polynomial.legendre.leggauss(8)
    edges = [np.linspace(low, high, panels + 1) for low, high in box]
    axes = [(e[:-1, None] + np.diff(e)[:, None] * (abscissae + 1) / 2).ravel() for e in edges]
    log_weights = sum(np.log(grid([np.outer(np.diff(e), weights / 2).ravel() for e in edges])).T)
    value, mean, covariance = in_parts(density, grid(axes))
    log_evidence = logsumexp(value + log_weights)
    mass = np.exp(value + log_weights - log_evidence)
    centred = mean - mass @ mean
    within = np.einsum("m,mij->ij", mass, covariance) if covariance.ndim == 3 else 0.0
    return Answer(float(log_evidence), mass @ mean, (centred.T * mass) @ centred + within)


def exact(model: Model) -> Answer:
    """Return the exact answer, integrated where the density is within 36 nats of its maximum."""
    highest = [(-45.0, model.scale.highest)] * len(model.scales) if model.scale else []
    if model.form in ("student", "logistic", "poisson"):
        density = coefficients_on_a_grid(model)
        box = [(-40.0, 40.0)] * model.data()["design"].shape[1] + highest
    else:
        density, box = coefficients_given_normal(model), highest
    num_points, panels = {1: (1000, (120, 80)), 2: (200, (96, 64)), 3: (60, (12, 9))}[len(box)]
    for _ in range(2):  # the second grid sees where the first was too coarse
        axes = [np.linspace(low, high, num_points) for low, high in box]
        value = in_parts(density, grid(axes))[0].reshape([num_points] * len(box))
        rows = np.argwhere(value > value.max() - 36)
        ends = zip(axes, (rows.min(0) - 1).clip(0), (rows.max(0) + 1).clip(max=num_points - 1), strict=True)
        box = [(axis[first], axis[last]) for axis, first, last in ends]
    fine, coarse = (integrated(density, box, count) for count in panels)
    moved = np.abs(np.concatenate([fine.mean - coarse.mean, fine.sd - coarse.sd]) / np.tile(fine.sd, 2)).max()
    return Answer(fine.log_evidence, fine.mean, fine.covariance, abs(fine.log_evidence - coarse.log_evidence), moved)


def closed_form(model: Model) -> Answer | None:
    """Return the answer of a normal linear model in closed form, if its prior is conjugate."""
    flat = not model.proper
    if model.form != "normal" or model.scale not in BUGS or not (flat or model.coefficient == SCALED):
        return None
    data, a = model.data(), model.scale.numbers[0]
    y, design, (n, k) = data["y"], data["design"], data["design"].shape
    precision = design.T @ design + (0 if flat else np.eye(k) / model.coefficient.sd**2)
    mean = np.linalg.solve(precision, design.T @ y)
    shape, rate = a + (n - k if flat else n) / 2, a + y @ (y - design @ mean) / 2
    covariance = np.zeros((k + 1, k + 1))
    covariance[:k, :k] = np.linalg.inv(precision) * rate / (shape - 1)
    covariance[k, k] = polygamma(1, shape) / 4
    shapes = np.eye(n) + model.coefficient.sd**2 * design @ design.T if not flat else np.eye(n)
    log_evidence = math.nan if flat else float(st.multivariate_t.logpdf(y, np.zeros(n), shapes, df=2 * a))
    return Answer(log_evidence, np.append(mean, (math.log(rate) - digamma(shape)) / 2), covariance)


def log_weights_of_regressions(model: Model, answer: Answer, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return draws ``(m, q)`` of Student's distribution with an answer's moments, and their log weights ``(m,)``."""
    proposal = st.multivariate_t(answer.mean, 1.5 * answer.covariance, df=5, seed=zlib.crc32(model.name.encode()))
    draws, data = proposal.rvs(num_draws), model.data()
    b, log_sd = np.split(draws, [data["design"].shape[1]], 1)
    centre = b @ data["design"].T
    if model.form == "logistic":
        likelihood = st.bernoulli.logpmf(data["y"], 1 / (1 + np.exp(-centre)))
    elif model.form == "poisson":
        likelihood = st.poisson.logpmf(data["y"], np.exp(centre))
    else:
        likelihood = st.t.logpdf(data["y"], DEGREES, centre, np.exp(log_sd))
    of_scales = model.scale.log_density(log_sd).sum(1) if model.scale else 0.0
    return draws, likelihood.sum(1) + log_prior(model, b) + of_scales - proposal.logpdf(draws)


def log_weights_of_normal(model: Model, answer: Answer, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same for models that are normal given the scales; coefficients are proposed about their estimates."""
    y, design, known, structure = normal_parts(model)
    k, seed, limit = design.shape[1], zlib.crc32(model.name.encode()), 12 if len(model.scales) == 1 else 7
    random, narrow = np.random.default_rng(seed), 1.5 * answer.covariance[k:, k:]
    # Every second draw of the log scales is wide: far from the bulk there may be narrow second modes.
    wide = narrow + 9 * np.eye(len(narrow))
    proposals = [st.multivariate_t(answer.mean[k:], shape, df=5, seed=random) for shape in (narrow, wide)]
    log_sd = np.concatenate([one.rvs(num_draws // 2).reshape(num_draws // 2, -1) for one in proposals])
    z = random.normal(size=(num_draws, k))
    log_weights = model.scale.log_density(log_sd).sum(1) - st.norm.logpdf(z).sum(1)
    log_weights -= np.logaddexp(*(one.logpdf(log_sd) for one in proposals)) - math.log(2)
    b = np.empty((num_draws, k))
    for rows in np.array_split(np.arange(num_draws), 20):
        # Beyond this limit the likelihood is constant or zero, and matrices are singular to rounding.
        variance = dict(zip(model.scales, np.exp(2 * log_sd[rows].T.clip(-limit, limit))[..., None, None], strict=True))
        total = known * np.eye(len(y)) + variance.get("sigma", 0) * np.eye(len(y)) + variance.get("tau", 0) * structure
        inverse = np.linalg.inv(total)
        covariance = np.linalg.inv(design.T @ inverse @ design)
        root = 1.3 * np.linalg.cholesky(covariance)
        b[rows] = (covariance @ design.T @ inverse @ y) + np.einsum("mij,mj->mi", root, z[rows])
        residual = y - b[rows] @ design.T
        log_weights[rows] += np.linalg.slogdet(root)[1] - 0.5 * np.linalg.slogdet(2 * math.pi * total)[1]
        log_weights[rows] -= 0.5 * np.einsum("mi,mij,mj->m", residual, inverse, residual)
    if model.coefficient == SCALED:
        log_weights += st.norm.logpdf(b, 0, SCALED.sd * np.exp(log_sd)).sum(1)
    else:
        log_weights += log_prior(model, b)
    return np.column_stack([b, log_sd]), log_weights


def by_importance_sampling(model: Model, answer: Answer, num_draws: int = 10_000) -> tuple[dict[str, float], float]:
    """Return how many errors of importance sampling evidence, means and sds are off, and the effective sample size."""
    grid_of_all = model.form in ("student", "logistic", "poisson")
    weighted = log_weights_of_regressions if grid_of_all else log_weights_of_normal
    draws, log_weights = weighted(model, answer, num_draws)
    log_evidence = logsumexp(log_weights) - math.log(num_draws)
    weights = np.exp(log_weights - log_evidence)
    off = {"evidence": (log_evidence - answer.log_evidence) * math.sqrt(num_draws) / weights.std()}
    for name, column, mean, sd in zip(model.quantities(), draws.T, answer.mean, answer.sd, strict=True):
        for moment, difference in {"mean": column - mean, "sd": (column - mean) ** 2 - sd**2}.items():
            parts = weights * difference
            off[f"{moment} of {name}"] = parts.mean() * math.sqrt(num_draws) / parts.std()
    return off, num_draws**2 / float(weights @ weights)


def check(models: Iterable[Model]) -> None:
    """Print how far the exact answers are from closed forms and from importance sampling."""
    farthest = 0.0
    for model in models:
        answer, closed = exact(model), closed_form(model)
        off, effective = by_importance_sampling(model, answer)
        name = max(off, key=lambda key: abs(off[key]))
        farthest = max(farthest, abs(off[name]))
        line = f"{model.name:42s} quadrature {answer.error:.0e} {answer.moment_error:.0e}  importance sampling "
        line += f"{off[name]:5.1f} errors ({name}, {effective:.0f} effective)"
        if closed is not None:
            moments = np.abs(np.r_[closed.mean - answer.mean, closed.sd - answer.sd] / np.tile(answer.sd, 2)).max()
            evidence = f", evidence {abs(closed.log_evidence - answer.log_evidence):.0e}" if model.proper else ""
            line += f"  closed form: moments {moments:.0e}{evidence}"
        print(line, flush=True)
    print(f"importance sampling is at most {farthest:.1f} errors off")
