import doctest
import importlib
import math
import pickle
import pkgutil
from collections.abc import Callable

import numpy as np
import pyro
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.func import grad, vmap

from bayeskit import exact
from bayeskit.errors import DataError, SettingsError, UnknownNameError
from bayeskit.exact import ExactCase

NAMES = list(exact.CASES)
STATED_ERRORS = {"pima_m1": 1e-9, "pima_m2": 1e-8}
PUBLISHED = {
    "linreg10": -94.0845074111,
    "radiata_pine_m1": -310.1282855,
    "radiata_pine_m2": -301.7046021,
    "beta_binomial": -2.3978952728,
    "eight_schools": -31.3113474,
    "pima_m1": -257.2325883,
    "pima_m2": -259.8576009,
    "gaussian_shells_2": -1.745642,
    "gaussian_shells_10": -14.590491,
    "eggbox": 235.855940,
    "spike_and_slab": 4.615120,
}
BUILDERS: dict[str, Callable[[], ExactCase]] = {
    **{name: exact.CASES[name] for name in exact.EASY},
    "eight_schools_centered": lambda: exact.eight_schools(centered=True),
}


def pyro_log_joint(model: Callable[..., object], args: tuple[Tensor, ...], sites: dict[str, Tensor]) -> Tensor:
    conditioned = pyro.poutine.condition(model, data=sites)
    return pyro.poutine.trace(conditioned).get_trace(*args).log_prob_sum()


def batched_log_joint(model: Callable[..., object], args: tuple[Tensor, ...], sites: dict[str, Tensor]) -> Tensor:
    with pyro.validation_enabled(False):
        return vmap(lambda values: pyro_log_joint(model, args, values))(sites)


# ---------------------------------------------------------------------------------------------------------
# The density of each Pyro model, written a second time with SciPy.


def _normal(value, mean, sd) -> float:
    return float(stats.norm.logpdf(value, mean, sd).sum())


def _density_linreg(args, b) -> float:
    design, response, noise_sd, prior_sd = args
    return _normal(b, 0.0, prior_sd) + _normal(response, design @ b, noise_sd)


def _density_radiata(args, tau, alpha, beta) -> float:
    covariate, response, mean, precision, shape, rate = args
    line = alpha + beta * (covariate - covariate.mean())
    prior = stats.gamma.logpdf(tau, shape, scale=1.0 / rate)
    prior += _normal(alpha, mean[0], 1.0 / math.sqrt(precision[0] * tau))
    prior += _normal(beta, mean[1], 1.0 / math.sqrt(precision[1] * tau))
    return prior + _normal(response, line, 1.0 / math.sqrt(tau))


def _density_beta_binomial(args, p) -> float:
    successes, trials, alpha, beta = args
    return stats.beta.logpdf(p, alpha, beta) + stats.binom.logpmf(successes, trials, p)


def _density_schools(args, mu, tau, eta) -> float:
    y, s, mu_scale, tau_scale = args
    prior = _normal(mu, 0.0, mu_scale) + stats.halfcauchy.logpdf(tau, scale=tau_scale) + _normal(eta, 0.0, 1.0)
    return prior + _normal(y, mu + tau * eta, s)


def _density_schools_centered(args, mu, tau, theta) -> float:
    y, s, mu_scale, tau_scale = args
    prior = _normal(mu, 0.0, mu_scale) + stats.halfcauchy.logpdf(tau, scale=tau_scale) + _normal(theta, mu, tau)
    return prior + _normal(y, theta, s)


def _density_tree(args, branch_lengths) -> float:
    counts, rate = args
    a, b, c = np.exp(-4.0 / 3.0 * branch_lengths)
    pairs = np.array([a * b, a * c, b * c])
    polynomials = [1.0 + 3.0 * pairs.sum() + 6.0 * a * b * c]
    polynomials += [1.0 + 4.0 * pair - pairs.sum() - 2.0 * a * b * c for pair in pairs]
    polynomials += [1.0 - pairs.sum() + 2.0 * a * b * c]
    return stats.expon.logpdf(branch_lengths, scale=1.0 / rate).sum() + counts @ np.log(np.array(polynomials) / 64.0)


DENSITIES: dict[str, tuple[Callable[..., float], Callable[[np.random.Generator], dict[str, np.ndarray]]]] = {
    "linreg10": (_density_linreg, lambda g: {"b": 2.0 * g.standard_normal(10)}),
    "radiata_pine_m1": (
        _density_radiata,
        lambda g: {"tau": g.gamma(3.0) / 1.8e5, "alpha": g.normal(3e3, 300.0), "beta": g.normal(185.0, 50.0)},
    ),
    "beta_binomial": (_density_beta_binomial, lambda g: {"p": g.uniform()}),
    "eight_schools": (
        _density_schools,
        lambda g: {"mu": g.normal(0.0, 5.0), "tau": g.gamma(1.0) * 5.0, "eta": g.standard_normal(8)},
    ),
    "eight_schools_centered": (
        _density_schools_centered,
        lambda g: {"mu": g.normal(0.0, 5.0), "tau": g.gamma(2.0) * 5.0, "theta": g.normal(5.0, 9.0, size=8)},
    ),
    "three_taxon_tree": (_density_tree, lambda g: {"branch_lengths": g.exponential(0.2, size=3)}),
}
DENSITIES["radiata_pine_m2"] = DENSITIES["radiata_pine_m1"]


def random_points(name: str, count: int) -> list[dict[str, Tensor]]:
    generator = np.random.default_rng(20240607)
    draw = DENSITIES[name][1]
    return [
        {site: torch.as_tensor(value, dtype=torch.float64) for site, value in draw(generator).items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_the_joint_density_of_the_pyro_model_is_the_one_defined(name: str) -> None:
    case = BUILDERS[name]()
    args = tuple(argument.numpy() for argument in case.args)
    for point in random_points(name, 20):
        expected = DENSITIES[name][0](args, **{site: value.numpy() for site, value in point.items()})
        value = pyro_log_joint(case.model, case.args, point)
        assert value.dtype == torch.float64
        # A constant rounded to float32 would show at 1e-8.
        assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_model_and_its_gradient_run_under_vmap(name: str) -> None:
    case = BUILDERS[name]()
    points = random_points(name, 7)
    batch = {site: torch.stack([point[site] for point in points]) for site in points[0]}
    looped = torch.stack([pyro_log_joint(case.model, case.args, point) for point in points])
    torch.testing.assert_close(batched_log_joint(case.model, case.args, batch), looped, rtol=1e-13, atol=1e-13)
    with pyro.validation_enabled(False):
        gradients = vmap(grad(lambda sites: pyro_log_joint(case.model, case.args, sites)))(batch)
    for site, gradient in gradients.items():
        assert gradient.shape == batch[site].shape
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", BUILDERS)
def test_the_model_follows_the_dtype_of_its_arguments(name: str) -> None:
    case = BUILDERS[name]()
    args = case.converted_args(dtype=torch.float32)
    point = {site: value.float() for site, value in random_points(name, 1)[0].items()}
    value = pyro_log_joint(case.model, args, point)
    assert value.dtype == torch.float32
    with torch.random.fork_rng(devices=[]):
        trace = pyro.poutine.trace(case.model).get_trace(*args)
    for site in point:
        assert trace.nodes[site]["value"].dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------
# The Pyro density, integrated numerically or divided by the exact posterior, gives the evidence.


def _candidate_linreg(case, model, args, jacobian) -> Tensor:
    b = torch.stack([point["b"] for point in random_points("linreg10", 5)])
    posterior = torch.distributions.MultivariateNormal(
        case.posterior_mean["b"], covariance_matrix=case.posterior_covariance["b"]
    )
    return batched_log_joint(model, args, {"b": b}) - posterior.log_prob(b)


def _candidate_radiata(case, model, args, jacobian) -> Tensor:
    mean, variance = case.posterior_mean, case.posterior_covariance
    points = random_points("radiata_pine_m1", 5)
    batch = {site: torch.stack([point[site] for point in points]) for site in points[0]}
    rate = mean["tau"] / variance["tau"].squeeze()
    shape = mean["tau"] * rate
    log_posterior = torch.distributions.Gamma(shape, rate).log_prob(batch["tau"])
    for site in ("alpha", "beta"):
        sd = (variance[site].squeeze() * (shape - 1.0) / rate / batch["tau"]).sqrt()
        log_posterior = log_posterior + torch.distributions.Normal(mean[site], sd).log_prob(batch[site])
    return batched_log_joint(model, args, batch) - log_posterior


def _integral_beta_binomial(case, model, args, jacobian) -> Tensor:
    logit = torch.linspace(-40.0, 40.0, 4001, dtype=torch.float64)
    log_density = batched_log_joint(model, args, {"p": logit.sigmoid()})
    if jacobian:
        log_density = log_density + torch.nn.functional.logsigmoid(logit) + torch.nn.functional.logsigmoid(-logit)
    return (log_density.logsumexp(0) + math.log(80.0 / 4000.0)).reshape(1)


def _integral_schools(case, model, args, jacobian) -> Tensor:
    """Divide by the exact conditional of the eight effects, integrate mu and log tau on a grid."""
    y, s = case.args[:2]
    site = "eta" if "eta" in case.posterior_mean else "theta"
    mu = torch.linspace(-40.0, 40.0, 121, dtype=torch.float64)
    log_tau = torch.linspace(-22.0, 9.0, 249, dtype=torch.float64)
    mu_grid, log_tau_grid = (axis.reshape(-1) for axis in torch.meshgrid(mu, log_tau, indexing="ij"))
    tau = log_tau_grid.exp()
    # eta given mu and tau; theta is its image.
    precision = 1.0 + (tau.unsqueeze(-1) / s) ** 2
    centre = tau.unsqueeze(-1) * (y - mu_grid.unsqueeze(-1)) / s**2 / precision
    effects = centre + 0.3
    log_conditional = torch.distributions.Normal(centre, precision.rsqrt()).log_prob(effects).sum(-1)
    if site == "theta":
        log_conditional = log_conditional - 8.0 * log_tau_grid
        effects = mu_grid.unsqueeze(-1) + tau.unsqueeze(-1) * effects
    log_density = batched_log_joint(model, args, {"mu": mu_grid, "tau": tau, site: effects}) - log_conditional
    if jacobian:
        log_density = log_density + log_tau_grid
    log_cell = math.log((mu[1] - mu[0]).item() * (log_tau[1] - log_tau[0]).item())
    return (log_density.logsumexp(0) + log_cell).reshape(1)


def _integral_tree(case, model, args, jacobian) -> Tensor:
    """Gauss-Legendre on the unit cube, with exp(-10 t) the square of the coordinate."""
    abscissae, weights = np.polynomial.legendre.leggauss(48)
    v = torch.from_numpy(0.5 * (abscissae + 1.0))
    log_weight = torch.from_numpy(np.log(0.5 * weights))
    if jacobian:
        log_weight = log_weight + (0.2 / v).log()
    t = -0.2 * v.log()
    log_density = batched_log_joint(model, args, {"branch_lengths": torch.cartesian_prod(t, t, t)})
    log_density = log_density + torch.cartesian_prod(log_weight, log_weight, log_weight).sum(-1)
    return log_density.logsumexp(0).reshape(1)


# How to get the evidence from the Pyro density, and how closely.
RECOVER = {
    "linreg10": (_candidate_linreg, 1e-10),
    "radiata_pine_m1": (_candidate_radiata, 1e-10),
    "radiata_pine_m2": (_candidate_radiata, 1e-10),
    "beta_binomial": (_integral_beta_binomial, 1e-10),
    "eight_schools": (_integral_schools, 1e-9),
    "eight_schools_centered": (_integral_schools, 1e-9),
    "three_taxon_tree": (_integral_tree, 1e-10),
}


def _evidence_error(case: ExactCase, name: str, model, args, jacobian: bool = True) -> float:
    recovered = RECOVER[name][0](case, model, args, jacobian)
    return (recovered - case.log_evidence).abs().max().item()


@pytest.mark.parametrize("name", BUILDERS)
def test_the_pyro_model_has_the_evidence_of_its_case(name: str) -> None:
    case = BUILDERS[name]()
    assert _evidence_error(case, name, case.model, case.args) < RECOVER[name][1]


def _with_factor(model, log_factor: float):
    def mutant(*args):
        model(*args)
        pyro.factor("dropped_constant", torch.tensor(log_factor, dtype=torch.float64))

    return mutant


def _replaced(args, position: int, value: Tensor):
    return (*args[:position], value, *args[position + 1 :])


# Each mutant is a slip that an implementation could make; the check above must not let it pass.
MUTANTS = {
    "variance for standard deviation": ("linreg10", lambda m, a: (m, _replaced(a, 3, a[3] ** 2))),
    "normal constant of the noise dropped": (
        "linreg10",
        lambda m, a: (_with_factor(m, 25.0 * math.log(2.0 * math.pi)), a),
    ),
    "precision for variance": ("radiata_pine_m1", lambda m, a: (m, _replaced(a, 3, 1.0 / a[3]))),
    "the other covariate": (
        "radiata_pine_m2",
        lambda m, a: (m, _replaced(a, 0, exact.radiata_pine("x").args[0])),
    ),
    "binomial coefficient dropped": ("beta_binomial", lambda m, a: (_with_factor(m, -math.log(45.0)), a)),
    "Cauchy for half-Cauchy": ("eight_schools", lambda m, a: (_with_factor(m, -math.log(2.0)), a)),
    "precision for standard error": ("eight_schools_centered", lambda m, a: (m, _replaced(a, 1, a[1] ** -2))),
    "rate of the exponential prior dropped": (
        "three_taxon_tree",
        lambda m, a: (_with_factor(m, -3.0 * math.log(10.0)), a),
    ),
    "root frequency dropped": ("three_taxon_tree", lambda m, a: (_with_factor(m, 72.0 * math.log(4.0)), a)),
}


@pytest.mark.parametrize("mutation", MUTANTS)
def test_a_mutated_model_is_caught(mutation: str) -> None:
    name, mutate = MUTANTS[mutation]
    case = BUILDERS[name]()
    assert _evidence_error(case, name, *mutate(case.model, case.args)) > 1e3 * RECOVER[name][1]


@pytest.mark.parametrize("name", ["beta_binomial", "eight_schools", "three_taxon_tree"])
def test_a_dropped_jacobian_is_caught(name: str) -> None:
    case = BUILDERS[name]()
    assert _evidence_error(case, name, case.model, case.args, jacobian=False) > 1e3 * RECOVER[name][1]


# ---------------------------------------------------------------------------------------------------------
# The registry and the record.


def test_the_registry_holds_the_cases_and_their_published_answers() -> None:
    assert set(NAMES) == {*PUBLISHED, "three_taxon_tree", "neals_funnel"}
    assert list(exact.EASY) == NAMES[:6]
    for name, value in PUBLISHED.items():
        digits = 6e-8 if name in exact.EASY or name.startswith("pima") else 6e-7
        case = exact.get(name)
        assert case.log_evidence == pytest.approx(value, abs=digits)
        assert case.standard_error == STATED_ERRORS.get(name, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_complete(name: str) -> None:
    case = exact.get(name)
    assert case.name == name
    assert case.description and "\n" not in case.description
    assert case.reference.startswith(("closed form", "one-dimensional", "tensor"))
    assert isinstance(case.log_evidence, float)
    assert all(argument.dtype == torch.float64 for argument in case.args)
    with torch.random.fork_rng(devices=[]):
        trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    latent = {site for site in trace.stochastic_nodes if trace.nodes[site]["type"] == "sample"}
    latent -= {"observations", "schools", "women"}
    assert latent <= set(case.posterior_mean) == set(case.posterior_covariance)
    for site, mean in case.posterior_mean.items():
        covariance = case.posterior_covariance[site]
        assert mean.dtype == covariance.dtype == torch.float64
        assert mean.shape == trace.nodes[site]["value"].shape
        assert covariance.shape == (mean.numel(), mean.numel())
        torch.testing.assert_close(covariance, covariance.mT)
        assert (torch.linalg.eigvalsh(covariance) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_case_survives_pickling(name: str) -> None:
    case = exact.get(name)
    copy = pickle.loads(pickle.dumps(case))
    assert copy.model is case.model
    assert copy.log_evidence == case.log_evidence
    assert all(one.equal(other) for one, other in zip(copy.args, case.args, strict=True))


@pytest.mark.parametrize("name", exact.EASY)
def test_the_target_of_a_case_is_its_density(name: str) -> None:
    case = exact.get(name)
    target = case.target()
    points = random_points(name, 4)
    values = target.log_density(torch.stack([target.unconstrain(point) for point in points]))
    for point, value in zip(points, values.tolist(), strict=True):
        # The Jacobian is what separates the two densities; it is that of the logarithm or the logit.
        positive = [point[site].log().sum().item() for site in ("tau", "branch_lengths") if site in point]
        unit = [(point[site].log() + (1.0 - point[site]).log()).item() for site in ("p",) if site in point]
        expected = pyro_log_joint(case.model, case.args, point).item() + sum(positive) + sum(unit)
        assert value == pytest.approx(expected, rel=1e-10, abs=1e-9)


@pytest.mark.parametrize(("wrong", "right"), [("linreg", "linreg10"), ("eight_school", "eight_schools")])
def test_an_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{right}'"):
        exact.get(wrong)


def test_a_name_like_no_other_lists_them_all() -> None:
    with pytest.raises(UnknownNameError) as caught:
        exact.get("qqq")
    assert "Did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


def test_a_target_needs_a_floating_point_type() -> None:
    with pytest.raises(SettingsError, match="float64"):
        exact.beta_binomial().target(dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"log_evidence": math.nan}, "log_evidence"),
        ({"standard_error": -0.1}, "standard_error"),
        ({"standard_error": math.inf}, "standard_error"),
        ({"args": (3.0,)}, "argument 0"),
        ({"posterior_mean": None}, "no mean"),
        ({"posterior_covariance": {"p": torch.ones(2)}}, r"needs \(1, 1\)"),
    ],
)
def test_an_inconsistent_case_is_refused(change, word) -> None:
    fields = {**vars(exact.beta_binomial()), **change}
    with pytest.raises(DataError, match=word):
        ExactCase(**fields)


def test_building_and_evaluating_leaves_torch_as_it_was() -> None:
    state, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    for name in NAMES:
        exact.get(name)
    assert torch.random.get_rng_state().equal(state)
    assert torch.get_default_dtype() == dtype


MODULES = [
    exact.__name__,
    *(f"{exact.__name__}.{module.name}" for module in pkgutil.iter_modules(exact.__path__)),
]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    with torch.random.fork_rng(devices=[]):
        outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0
