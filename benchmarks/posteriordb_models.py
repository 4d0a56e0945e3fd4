"""The posteriors of `posteriordb.py` as Pyro models, each the density of its Stan program to a constant.

`POSTERIORS` has, by name, the model, its arguments from the data of the Stan program, and the parameters of the Stan
program from the values of the model's sites. A flat prior is `ImproperUniform`, or, where `FLAT` is "wide", a proper
one so wide that the moments stay the same: Normal(0, 1e4), and HalfNormal(1e4) for what is positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

import bayeskit as bk

FLAT = "improper"
WIDE_SCALE = 1e4
STEPS_A_YEAR = 20  # of Runge and Kutta's fourth order, for the populations of lynx and hare

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Posterior:
    """A model, its arguments from the data, and the Stan program's parameters ``(..., size)`` from sites' values."""

    model: Callable[..., None]
    arguments: Callable[[dict[str, Any]], Sequence[Any]]
    parameters: tuple[str, ...]


def flat(name: str, size: int | None = None) -> Tensor:
    """Draw a real number, or a vector of them, with a flat prior."""
    shape = () if size is None else (size,)
    if FLAT == "improper":
        return pyro.sample(name, dist.ImproperUniform(constraints.real, (), shape))
    return pyro.sample(name, dist.Normal(0.0, WIDE_SCALE).expand(shape).to_event(len(shape)))


def flat_positive(name: str) -> Tensor:
    """Draw a positive number with a flat prior."""
    if FLAT == "improper":
        return pyro.sample(name, dist.ImproperUniform(constraints.positive, (), ()))
    return pyro.sample(name, dist.HalfNormal(WIDE_SCALE))


def normal_regression(x, y, sigma_scale=None):
    beta = flat("beta", x.shape[1])
    sigma = flat_positive("sigma") if sigma_scale is None else pyro.sample("sigma", dist.HalfCauchy(sigma_scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def bayesian_regression(x, y):
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def diamonds(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    intercept = pyro.sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
    sigma = pyro.sample("sigma", dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 10.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(intercept + x @ b, sigma), obs=y)


def kilpisjarvi(x, y, alpha_mean, alpha_sd, beta_mean, beta_sd):
    alpha = pyro.sample("alpha", dist.Normal(alpha_mean, alpha_sd))
    beta = pyro.sample("beta", dist.Normal(beta_mean, beta_sd))
    sigma = flat_positive("sigma")
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def autoregression(lags, y):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([lags.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("time", len(y)):
        pyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y)


def eight_schools_centered(y, sigma):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(y, sigma):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        standardised = pyro.sample("theta_trans", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * standardised)
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def garch(y, first_sigma):
    mu = flat("mu")
    alpha0 = flat_positive("alpha0")
    alpha1 = pyro.sample("alpha1", dist.Uniform(0.0, 1.0))
    share = pyro.sample("share", dist.Uniform(0.0, 1.0))
    beta1 = pyro.deterministic("beta1", share * (1 - alpha1))
    pyro.factor("flat_in_beta1", torch.log1p(-alpha1))  # d beta1 / d share

    def step(variance, before):
        variance = alpha0 + alpha1 * (before - mu).square() + beta1 * variance
        return variance, variance

    first = first_sigma.square() + 0 * mu
    _, later = bk.scan(step, first, y[:-1])
    sigma = torch.cat([first[None], later]).sqrt()
    with pyro.plate("time", len(y)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def squared_exponential(x: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
    return alpha.square() * torch.exp(-0.5 * ((x[:, None] - x) / rho).square())


def gaussian_process_counts(x, k):
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
    standardised = pyro.sample("f_tilde", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    jitter = 1e-10 * torch.eye(len(x), dtype=x.dtype)
    factor = torch.linalg.cholesky(squared_exponential(x, alpha, rho) + jitter)
    f = pyro.deterministic("f", factor @ standardised)
    with pyro.plate("data", len(x)):
        pyro.sample("k", dist.Poisson(f.exp()), obs=k)


def gaussian_process_regression(x, y):
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    covariance = squared_exponential(x, alpha, rho) + sigma * torch.eye(len(x), dtype=x.dtype)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(x), covariance), obs=y)


def ordered_pair(name: str, lower: Tensor, upper_prior: Any) -> Tensor:
    """Return ``(lower, upper)``, the upper one with the density of `upper_prior` above the lower."""
    if FLAT == "improper":
        gap = pyro.sample(f"{name}_gap", dist.ImproperUniform(constraints.positive, (), ()))
    else:
        prior = dist.HalfNormal(10.0)
        gap = pyro.sample(f"{name}_gap", prior)
        pyro.factor(f"{name}_gap_is_flat", -prior.log_prob(gap))
    pyro.factor(f"{name}_upper", upper_prior.log_prob(lower + gap))
    return pyro.deterministic(name, torch.stack([lower, lower + gap], -1))


def positive_normal(name: str, mean: float, sd: float) -> Tensor:
    """Draw a positive number with the density of a normal one."""
    if FLAT == "improper":
        value = pyro.sample(name, dist.ImproperUniform(constraints.positive, (), ()))
        pyro.factor(f"{name}_prior", dist.Normal(mean, sd).log_prob(value))
        return value
    prior = dist.HalfNormal(abs(mean) + sd)
    value = pyro.sample(name, prior)
    pyro.factor(f"{name}_prior", dist.Normal(mean, sd).log_prob(value) - prior.log_prob(value))
    return value


def mixture(y):
    mu = ordered_pair("mu", pyro.sample("mu_lower", dist.Normal(0.0, 2.0)), dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    weights = dist.Categorical(torch.stack([theta, 1 - theta], -1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def hidden_chain(theta: Tensor, emission: Any, length: int) -> dist.DiscreteHMM:
    """Return the distribution of a hidden Markov chain whose first state is either one, `theta` ``(K, K)``."""
    free = torch.zeros_like(theta).unsqueeze(0)
    transitions = torch.cat([free, theta.log().expand(length - 1, -1, -1)])
    return dist.DiscreteHMM(torch.zeros_like(theta[0]), transitions, emission, duration=length)


def hidden_markov(y):
    ones = torch.ones(2, dtype=y.dtype)
    theta1 = pyro.sample("theta1", dist.Dirichlet(ones))
    theta2 = pyro.sample("theta2", dist.Dirichlet(ones))
    mu = ordered_pair("mu", positive_normal("mu_lower", 3.0, 1.0), dist.Normal(10.0, 1.0))
    pyro.sample("y", hidden_chain(torch.stack([theta1, theta2]), dist.Normal(mu, 1.0), len(y)), obs=y)


def basketball(u, v, alpha):
    theta1 = pyro.sample("theta1", dist.Dirichlet(alpha[0]))
    theta2 = pyro.sample("theta2", dist.Dirichlet(alpha[1]))
    phi = ordered_pair("phi", pyro.sample("phi_lower", dist.HalfNormal(1.0)), dist.Normal(3.0, 1.0))
    rate = ordered_pair("lambda", pyro.sample("lambda_lower", dist.HalfNormal(1.0)), dist.Normal(3.0, 1.0))
    emission = dist.Exponential(torch.stack([phi, rate], -1)).to_event(1)
    chain = hidden_chain(torch.stack([theta1, theta2]), emission, len(u))
    pyro.sample("uv", chain, obs=torch.stack([u, v], -1))


def lotka_volterra(times, first, y):
    scales = torch.tensor([0.5, 0.05, 0.5, 0.05], dtype=y.dtype)
    means = torch.tensor([1.0, 0.05, 1.0, 0.05], dtype=y.dtype)
    if FLAT == "improper":
        theta = pyro.sample("theta", dist.ImproperUniform(constraints.positive, (), (4,)))
        pyro.factor("theta_prior", dist.Normal(means, scales).log_prob(theta).sum(-1))
    else:
        prior = dist.HalfNormal(2 * means).to_event(1)
        theta = pyro.sample("theta", prior)
        pyro.factor("theta_prior", dist.Normal(means, scales).log_prob(theta).sum(-1) - prior.log_prob(theta))
    start = pyro.sample("z_init", dist.LogNormal(torch.full_like(first, 10.0).log(), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(torch.full_like(first, -1.0), 1.0).to_event(1))

    def slope(z):
        u, v = z[0], z[1]
        return torch.stack([(theta[0] - theta[1] * v) * u, (theta[3] * u - theta[2]) * v])

    def step(z, width):
        one = slope(z)
        two = slope(z + width / 2 * one)
        three = slope(z + width / 2 * two)
        four = slope(z + width * three)
        z = z + width / 6 * (one + 2 * two + 2 * three + four)
        return z, z

    widths = torch.diff(times, prepend=times.new_zeros(1)).repeat_interleave(STEPS_A_YEAR) / STEPS_A_YEAR
    _, path = bk.scan(step, start, widths)
    z = path[STEPS_A_YEAR - 1 :: STEPS_A_YEAR]
    pyro.sample("y_init", dist.LogNormal(start.log(), sigma).to_event(1), obs=first)
    with pyro.plate("years", len(y)):
        pyro.sample("y", dist.LogNormal(z.log(), sigma).to_event(1), obs=y)


def column(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def design(*columns: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(columns[0]), *columns], -1)


def standardised(x: Tensor, scales: float = 1.0) -> Tensor:
    return (x - x.mean()) / (scales * x.std())


def earnings(data: dict[str, Any], kind: str) -> tuple[Tensor, Tensor]:
    earn, height, male = (column(data[name]) for name in ("earn", "height", "male"))
    columns = {
        "height": [height],
        "interaction": [height, male, height * male],
        "interaction_z": [standardised(height), male, standardised(height) * male],
        "logheight_male": [height.log(), male],
    }[kind]
    return design(*columns), earn.log()


def child_scores(data: dict[str, Any], kind: str) -> tuple[Any, ...]:
    score, school, iq = (column(data[name]) for name in ("kid_score", "mom_hs", "mom_iq"))
    if kind == "c":
        school, iq = school - school.mean(), iq - iq.mean()
    if kind == "z":
        school, iq = standardised(school, 2.0), standardised(iq, 2.0)
    columns = {"momhs": [school], "momhsiq": [school, iq]}.get(kind, [school, iq, school * iq])
    return (design(*columns), score) if kind in "cz" else (design(*columns), score, 2.5)


def mesquite(data: dict[str, Any], kind: str) -> tuple[Tensor, Tensor]:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density", "group", "weight")
    one, two, canopy, total, density, group, weight = (column(data[name]) for name in names)
    volume, area, shape = (one * two * canopy).log(), (one * two).log(), (one / two).log()
    if kind == "plain":
        return design(one, two, canopy, total, density, group), weight
    columns = {
        "log": [one.log(), two.log(), canopy.log(), total.log(), density.log(), group],
        "vas": [volume, area, shape, total.log(), density.log(), group],
        "vash": [volume, area, shape, total.log(), group],
        "volume": [volume],
    }[kind]
    return design(*columns), weight.log()


def election(data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    age = column(data["age_discrete"])
    ages = [(age == group).to(age) for group in (2, 3, 4)]
    ideology, race, education, gender, income = (
        column(data[name]) for name in ("real_ideo", "race_adj", "educ1", "gender", "income")
    )
    return design(ideology, race, *ages, education, gender, income), column(data["partyid7"])


def lagged(data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    y, order = column(data["y"]), data["K"]
    return torch.stack([y[order - k - 1 : len(y) - k - 1] for k in range(order)], -1), y[order:]


def centred_diamonds(data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = column(data["X"])[:, 1:]
    return x - x.mean(0), column(data["Y"])


def columns_of(*names: str) -> Callable[[dict[str, Any]], list[Tensor]]:
    return lambda data: [column(data[name]) for name in names]


REGRESSION = ("beta", "sigma")
SCHOOLS = ("theta", "mu", "tau")
KILPISJARVI = ("x", "y", "pmualpha", "psalpha", "pmubeta", "psbeta")

POSTERIORS: dict[str, Posterior] = {
    "arK-arK": Posterior(autoregression, lagged, ("alpha", "beta", "sigma")),
    "bball_drive_event_0-hmm_drive_0": Posterior(
        basketball, columns_of("u", "v", "alpha"), ("theta1", "theta2", "phi", "lambda")
    ),
    "diamonds-diamonds": Posterior(diamonds, centred_diamonds, ("b", "Intercept", "sigma")),
    **{
        f"earnings-logearn_{kind}": Posterior(
            normal_regression, lambda data, kind=kind: earnings(data, kind), REGRESSION
        )
        for kind in ("height", "interaction", "interaction_z", "logheight_male")
    },
    "eight_schools-eight_schools_centered": Posterior(eight_schools_centered, columns_of("y", "sigma"), SCHOOLS),
    "eight_schools-eight_schools_noncentered": Posterior(eight_schools_noncentered, columns_of("y", "sigma"), SCHOOLS),
    "garch-garch11": Posterior(garch, columns_of("y", "sigma1"), ("mu", "alpha0", "alpha1", "beta1")),
    "gp_pois_regr-gp_pois_regr": Posterior(gaussian_process_counts, columns_of("x", "k"), ("rho", "alpha", "f")),
    "gp_pois_regr-gp_regr": Posterior(gaussian_process_regression, columns_of("x", "y"), ("rho", "alpha", "sigma")),
    "hmm_example-hmm_example": Posterior(hidden_markov, columns_of("y"), ("theta1", "theta2", "mu")),
    "hudson_lynx_hare-lotka_volterra": Posterior(
        lotka_volterra, columns_of("ts", "y_init", "y"), ("theta", "z_init", "sigma")
    ),
    **{
        f"kidiq-kidscore_{kind}": Posterior(
            normal_regression, lambda data, kind=kind: child_scores(data, kind), REGRESSION
        )
        for kind in ("interaction", "momhs", "momhsiq")
    },
    **{
        f"kidiq_with_mom_work-kidscore_interaction_{kind}": Posterior(
            normal_regression, lambda data, kind=kind: child_scores(data, kind), REGRESSION
        )
        for kind in ("c", "z")
    },
    "kilpisjarvi_mod-kilpisjarvi": Posterior(kilpisjarvi, columns_of(*KILPISJARVI), ("alpha", "beta", "sigma")),
    "low_dim_gauss_mix-low_dim_gauss_mix": Posterior(mixture, columns_of("y"), ("mu", "sigma", "theta")),
    **{
        f"mesquite-{name}": Posterior(normal_regression, lambda data, kind=kind: mesquite(data, kind), REGRESSION)
        for name, kind in (
            ("logmesquite", "log"),
            ("logmesquite_logvas", "vas"),
            ("logmesquite_logvash", "vash"),
            ("logmesquite_logvolume", "volume"),
            ("mesquite", "plain"),
        )
    },
    **{
        f"nes{year}-nes": Posterior(normal_regression, election, REGRESSION)
        for year in (1972, 1976, 1984, 1988, 1992, 2000)
    },
    "sblrc-blr": Posterior(bayesian_regression, columns_of("X", "y"), REGRESSION),
}
