"""Models of NumPyro and PyMC as targets, against these packages' own functions and against exact values."""

import copy
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.evaluation import with_gradient
from bayeskit._logdensity import numpyro_density
from bayeskit.errors import (
    DataError,
    ModelError,
    PrecisionWarning,
    SettingsError,
    ShapeError,
    UnknownNameError,
    UnsupportedSiteError,
)
from bayeskit.inference.samplers._hmc import HMC, integrate
from bayeskit.inference.samplers._metric import Metric

jax = pytest.importorskip("jax")
numpyro = pytest.importorskip("numpyro")
import numpyro.distributions as nd  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from numpyro.contrib.control_flow import scan  # noqa: E402
from numpyro.infer.util import potential_energy  # noqa: E402

F64 = torch.float64
Y = np.array([1.2, 0.4, 2.1, 0.9, 1.6, 1.1, 2.9, 0.3])
X = np.linspace(-1.0, 1.0, 8)
GROUP = np.arange(8) % 3


def exact_evidence(y):
    """The log evidence of a normal mean and variance under a normal-inverse-gamma prior, a Student-t density."""
    n = len(y)
    scale = 2 / 3 * (np.eye(n) + 4)
    constant = math.lgamma(3 + n / 2) - math.lgamma(3) - n / 2 * math.log(6 * math.pi)
    return constant - 0.5 * np.linalg.slogdet(scale)[1] - (3 + n / 2) * math.log1p(y @ np.linalg.solve(scale, y) / 6)


@pytest.fixture(scope="module", autouse=True)
def what_jax_has_compiled_is_forgotten():
    """Give its memory back."""
    yield
    jax.clear_caches()


# NumPyro.


def conjugate(y=None):
    variance = numpyro.sample("variance", nd.InverseGamma(3.0, 2.0))
    mean = numpyro.sample("mean", nd.Normal(0.0, 2.0 * variance**0.5))
    with numpyro.plate("row", 8):
        numpyro.sample("y", nd.Normal(mean, variance**0.5), obs=y)


def grouped(x, group, y=None):
    share = numpyro.sample("share", nd.Dirichlet(jnp.ones(3)))
    scale = numpyro.sample("scale", nd.HalfCauchy(1.0))
    with numpyro.plate("group", 3):
        effect = numpyro.sample("effect", nd.Normal(0.0, scale))
    factor = numpyro.sample("factor", nd.LKJCholesky(3, 2.0))
    numpyro.factor("penalty", -0.5 * (effect.sum() ** 2 + factor[2, 0] ** 2))
    with numpyro.plate("row", len(x)):
        line = numpyro.deterministic("line", effect[group] * x + share[group])
        numpyro.sample("y", nd.StudentT(4.0, line, 0.5), obs=y)


def by_row(y):
    with numpyro.plate("row", len(y)):
        level = numpyro.sample("level", nd.Normal(0.0, 1.0))
        numpyro.sample("y", nd.Normal(level, 0.5), obs=y)


def walk(y):
    scale = numpyro.sample("scale", nd.LogNormal(0.0, 1.0))

    def step(level, y):
        level = numpyro.sample("level", nd.Normal(level, scale))
        numpyro.sample("y", nd.Normal(level, 0.5), obs=y)
        return level, None

    scan(step, 0.0, y)


def mixed(y, scale=1.0):
    distance = numpyro.sample("distance", nd.HalfNormal(3.0))
    with numpyro.plate("row", len(y)):
        side = numpyro.sample("side", nd.Bernoulli(0.3), infer={"enumerate": "parallel"})
        numpyro.sample("y", nd.Normal(distance * (2 * side - 1), scale), obs=y)


def gaps(y, seen):
    mean = numpyro.sample("mean", nd.Normal(0.0, 3.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", nd.Normal(mean, 1.0), obs=y, obs_mask=seen)


def masked(y, seen):
    mean = numpyro.sample("mean", nd.Normal(0.0, 3.0))
    with numpyro.plate("row", len(y)), numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", nd.Normal(mean, 1.0), obs=y)


def bounded(y):
    with numpyro.plate("side", 2, dim=-2):
        width = numpyro.sample("width", nd.Uniform(0.5, 2.0))
        with numpyro.plate("row", 4, dim=-1):
            level = numpyro.sample("level", nd.Gamma(2.0, 1.0))
            numpyro.sample("y", nd.Normal(level, width), obs=y)


MODELS = {
    "bounded": (bounded, (Y.reshape(2, 4),)),
    "conjugate": (conjugate, (Y,)),
    "grouped": (grouped, (X, GROUP, Y)),
    "walk": (walk, (Y,)),
    "mixed": (mixed, (Y,)),
    "gaps": (gaps, (Y, Y > 0.5)),
    "masked": (masked, (Y, Y > 0.5)),
}


def points(target, count=20):
    return torch.randn(count, target.dim, dtype=F64, generator=torch.Generator().manual_seed(1))


def parts_of(target, row):
    return {s.name: row[s.start : s.stop].numpy().reshape(s.unconstrained_shape) for s in target.sites}


@pytest.fixture(scope="module", params=MODELS)
def of_numpyro(request):
    model, args = MODELS[request.param]
    return bk.Target.from_numpyro(model, *args), model, args


def test_the_density_is_that_of_numpyro(of_numpyro):
    target, model, args = of_numpyro
    u = points(target)
    with jax.enable_x64(True):
        enumerated = bool(target.density.summed_sites)
        if enumerated:
            from numpyro.contrib.funsor import config_enumerate, enum

            model = enum(config_enumerate(model), -2)
        given = tuple(jnp.asarray(x) for x in args)
        rows = [{name: jnp.asarray(x) for name, x in parts_of(target, row).items()} for row in u]
        expected = [-float(potential_energy(model, given, {}, row, enum=enumerated)) for row in rows]
    if model is gaps:  # NumPyro has no density for what stands in place of observed rows
        rows = target.constrain(u)["y_unobserved"][:, Y > 0.5] - target.constrain(u)["mean"].unsqueeze(-1)
        expected = torch.tensor(expected, dtype=F64) + torch.distributions.Normal(0.0, 1.0).log_prob(rows).sum(-1)
    np.testing.assert_allclose(target.log_density(u), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.calibration
def test_the_evidence_with_missing_data_is_that_of_the_data(limit):
    target = bk.Target.from_numpyro(gaps, Y, Y > 0.5)
    seen = Y[Y > 0.5]
    exact = -0.5 * np.linalg.slogdet(2 * math.pi * (np.eye(len(seen)) + 9))[1]
    exact -= 0.5 * seen @ np.linalg.solve(np.eye(len(seen)) + 9, seen)
    z = bk.evidence.bridge_sampling(bk.sample(target, progress=False))
    assert z.trusted and abs(z.log_evidence - exact) < limit() * z.standard_error


def imputed(x, seen, y):
    with numpyro.plate("row", len(y)):
        x = numpyro.sample("x", nd.Normal(0.0, 1.0), obs=x, obs_mask=seen)
        numpyro.sample("y", nd.Normal(x, 0.5), obs=y)


@pytest.mark.calibration
def test_predictors_with_missing_values_are_imputed_by_their_mask(limit):
    seen = np.arange(8) % 3 > 0
    target = bk.Target.from_numpyro(imputed, np.where(seen, X, 0.0), seen, Y)
    found = bk.evidence.bridge_sampling(bk.sample(target, seed=1, progress=False))
    normal = torch.distributions.Normal
    x, y = torch.as_tensor(X), torch.as_tensor(Y)
    known = (normal(0.0, 1.0).log_prob(x) + normal(x, 0.5).log_prob(y))[seen].sum()
    exact = float(known + normal(0.0, 1.25**0.5).log_prob(y[~seen]).sum())
    assert abs(found.log_evidence - exact) < limit() * found.standard_error


def test_what_takes_a_pyro_model_says_so():
    target = bk.Target.from_numpyro(by_row, Y)
    with pytest.raises(ModelError, match="second derivatives.*made from a model of NumPyro; write the model for Pyro"):
        bk.marginalize(target, ["level"])
    with pytest.raises(SettingsError, match="made from a model of NumPyro; write the model for Pyro"):
        bk.sbc(target)
    with pytest.raises(ModelError, match="amortize takes a Pyro model and its arguments, not a target"):
        bk.amortize(target)


def test_gradients_and_temperatures(of_numpyro):
    target, *_ = of_numpyro
    u, beta = points(target, 5), torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0], dtype=F64)
    value, gradient = target.value_and_grad(u, beta)
    log_prior, log_likelihood = target.evaluate(u)
    torch.testing.assert_close(value, log_prior + beta * log_likelihood, rtol=1e-12, atol=1e-12)
    by_torch = with_gradient(target.density.joint)(u, beta)
    torch.testing.assert_close(by_torch.gradient, gradient, rtol=1e-12, atol=1e-12)
    step = 1e-5
    for i in range(target.dim):
        aside = torch.zeros(target.dim, dtype=F64)
        aside[i] = step
        slope = (target.log_density(u + aside, beta) - target.log_density(u - aside, beta)) / (2 * step)
        torch.testing.assert_close(gradient[:, i], slope, rtol=1e-5, atol=1e-5)


def test_vectors_and_values_belong_together(of_numpyro):
    target, *_ = of_numpyro
    u = points(target)
    values = target.constrain(u)
    torch.testing.assert_close(target.unconstrain(values), u, rtol=1e-8, atol=1e-8)
    assert {name: x.shape[1:] for name, x in values.items()} == {site.name: site.shape for site in target.sites}


def test_mutation_a_density_without_its_jacobian_fails(monkeypatch):
    monkeypatch.setattr(numpyro_density, "_log_jacobian", lambda trace, parts: 0.0)
    target = bk.Target.from_numpyro(conjugate, Y)
    with pytest.raises(AssertionError):
        test_the_density_is_that_of_numpyro((target, conjugate, (Y,)))


def test_what_is_summed_out_equals_the_sum():
    target = bk.Target.from_numpyro(mixed, Y)
    u = points(target)
    distance = u.exp()

    def normal(mean):
        return torch.distributions.Normal(mean, 1.0).log_prob(torch.as_tensor(Y))

    sides = [normal(distance) + math.log(0.3), normal(-distance) + math.log(0.7)]
    expected = torch.stack(sides).logsumexp(0).sum(-1)
    torch.testing.assert_close(target.log_likelihood(u), expected, rtol=1e-11, atol=1e-11)
    with pytest.raises(ModelError, match="'side' is summed out"):
        target.pointwise_log_likelihood(u)


@pytest.mark.calibration
def test_masked_data_do_not_count():
    target = bk.Target.from_numpyro(masked, Y, Y > 0.5)
    assert target.counted()["y"].tolist() == (Y > 0.5).tolist()
    draws = bk.sample(target, num_samples=50, num_warmup=100, progress=False)
    assert draws.to_datasets()["log_likelihood"]["y"].shape[-1] == int((Y > 0.5).sum())
    assert {site.name for site in bk.Target.from_numpyro(gaps, Y, Y > 0.5).sites} == {"mean", "y_unobserved"}


@pytest.mark.calibration
def test_names_of_plates_and_data():
    target = bk.Target.from_numpyro(grouped, X, GROUP, Y)
    dimensions = target.dimensions()
    assert dimensions["effect"] == ("group",) and dimensions["line"] == dimensions["y"] == ("row",)
    observed, constant = target.named_data()
    assert observed["y"].tolist() == Y.tolist() and constant.keys() == {"x", "group"}
    assert target.density.factor_sites == ("penalty",)
    draws = bk.sample(target, num_samples=100, num_warmup=100, progress=False)
    data = draws.predictive().to_datasets()
    assert data["posterior"]["line"].dims[-1] == "row" and data["posterior_predictive"]["y"].dims[-1] == "row"
    with pytest.warns(bk.errors.DataWarning, match="'penalty' is outside of every plate"):
        assert len(draws.loo().pointwise) == 8


@pytest.mark.calibration
def test_the_evidence_is_exact(limit):
    target = bk.Target.from_numpyro(conjugate, Y)
    methods = ["bridge_sampling", "stepping_stone", "smc", "laplace_importance_sampling", "generalised_stepping_stone"]
    table = bk.evidence.compare(target, methods, progress=False)
    assert set(table.verdict.agreeing) == set(methods)
    for z in table:
        assert abs(z.log_evidence - exact_evidence(Y)) < limit(len(methods)) * z.standard_error


def test_prior_draws_and_predictions(limit):
    target = bk.Target.from_numpyro(conjugate, Y)
    prior = target.constrain(target.sample_prior(4000, seed=3))["mean"]  # a Student-t of 6 degrees, scaled by 1.633
    sd = math.sqrt(4 * 2 / 3 * 6 / 4)
    assert abs(prior.mean()) < limit(2) * sd / math.sqrt(4000)
    inside = (prior.abs() < 1.1719).double().mean()  # its quartiles, 0.7176 scales from zero
    assert abs(inside - 0.5) < limit(2) * 0.5 / math.sqrt(4000)
    u = target.unconstrain({"variance": torch.tensor(0.25), "mean": torch.tensor(3.0)})
    drawn = target.predictive(u.expand(2000, 2), seed=1)["y"]
    assert drawn.shape == (2000, 8) and abs(drawn.mean() - 3) < limit() * 0.5 / math.sqrt(16000)
    assert abs(drawn.std() / 0.5 - 1) < limit() / math.sqrt(2 * 16000)
    torch.testing.assert_close(drawn, target.predictive(u.expand(2000, 2), seed=1)["y"])


@pytest.mark.calibration
def test_predictions_for_other_arguments():
    target = bk.Target.from_numpyro(grouped, X, GROUP, Y)
    u = target.sample_prior(6)
    found = target.predictive(u, X[:3], GROUP[:3], None)
    assert found["y"].shape == found["line"].shape == (6, 3)
    values = target.constrain(u)
    line = values["effect"][:, GROUP[:3]] * torch.as_tensor(X[:3]) + values["share"][:, GROUP[:3]]
    torch.testing.assert_close(found["line"], line)
    again = target.predictive(u, redraw=["effect"])
    assert again["effect"].shape == (6, 3) and not again["effect"].equal(values["effect"])
    fewer = bk.Target.from_numpyro(by_row, Y)
    with pytest.raises(ShapeError, match=r"site 'level' has shape \(3,\), and its draws have \(8,\)"):
        fewer.predictive(fewer.sample_prior(2), Y[:3])
    assert fewer.predictive(fewer.sample_prior(2), Y[:3], redraw=["level"])["y"].shape == (2, 3)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_trajectories_within_jax_are_those_step_by_step(is_dense, groups):
    target = bk.Target.from_numpyro(conjugate, Y)
    u, generator = points(target, 4), torch.Generator().manual_seed(2)
    p = torch.randn(4, 2, dtype=F64, generator=generator)
    step, beta = torch.full((4,), 0.1, dtype=F64), torch.tensor([0.0, 0.5, 1.0, 1.0], dtype=F64)
    if is_dense:
        covariance = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=F64)
        metric = Metric.dense(covariance if groups == 1 else torch.stack([covariance, 2 * covariance]))
    else:
        variance = torch.tensor([0.5, 2.0], dtype=F64)
        metric = Metric.diagonal(variance if groups == 1 else torch.stack([variance, 2 * variance]))
    kicks = [1.0, 1.0, 0.5]
    evaluate = target.evaluator(4)
    within = integrate(evaluate, metric, u, p, step, beta, 1.0, kicks)
    outside = integrate(lambda u, beta: evaluate(u, beta), metric, u, p, step, beta, 1.0, kicks)
    for one, other in zip((*within[:2], *within[2], within[3]), (*outside[:2], *outside[2], outside[3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def walled(y):
    x = numpyro.sample("x", nd.Normal(0.0, 1.0))
    numpyro.factor("wall", jnp.where(x > 0, 0.0, -jnp.inf))
    numpyro.sample("y", nd.Normal(x, 1.0), obs=y)


def test_trajectories_turn_at_walls_as_step_by_step(monkeypatch):
    target = bk.Target.from_numpyro(walled, 0.0)
    kernel = HMC(step_size=0.4, num_steps=6.0)
    state = kernel.init(target, torch.full((64, 1), 0.3, dtype=F64))
    within, info = kernel.step(target, state, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr("bayeskit.inference.samplers._hmc._in_one_call", lambda *given: False)
    outside, other = kernel.step(target, state, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(within.position, outside.position, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(info.acceptance_rate, other.acceptance_rate, rtol=1e-9, atol=1e-9)
    assert bool((within.position > 0).all()) and not within.position.equal(state.position)


def by_largest(group, y):
    effect = numpyro.sample("effect", nd.Normal(0.0, 1.0).expand([int(np.max(group)) + 1]).to_event(1))
    numpyro.sample("y", nd.Normal(effect[group], 1.0).to_event(1), obs=y)


def test_arrays_of_numpy_stay_arrays_of_numpy():
    target = bk.Target.from_numpyro(by_largest, torch.as_tensor(GROUP), Y)
    assert target.dim == 3 and bool(target.log_density(points(target)).isfinite().all())


def states(y):
    level = numpyro.sample("level", nd.Normal(0.0, 1.0))

    def step(state, y):
        shift = numpyro.sample("shift", nd.Normal(0.0, 0.1))
        share = jnp.array([[0.9, 0.1], [0.2, 0.8]])[state]
        state = numpyro.sample("state", nd.Categorical(share), infer={"enumerate": "parallel"})
        numpyro.sample("y", nd.Normal(level + shift + 2.0 * state, 1.0), obs=y)
        return state, None

    scan(step, 0, y)


@pytest.mark.calibration
def test_states_of_a_loop_are_summed_out_beside_its_latent_values():
    target = bk.Target.from_numpyro(states, Y)
    u = points(target, 3)
    share = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    values = target.constrain(u)
    for row in range(3):
        forward = torch.tensor([1.0, 0.0], dtype=F64)
        for place, y in enumerate(target.named_data()[0]["y"]):
            mean = values["level"][row] + values["shift"][row, place] + torch.tensor([0.0, 2.0], dtype=F64)
            forward = (forward @ share) * torch.distributions.Normal(mean, 1.0).log_prob(y).exp()
        assert target.log_likelihood(u[row]) == pytest.approx(float(forward.sum().log()), rel=1e-10)


def test_double_precision_is_for_the_call_alone():
    target = bk.Target.from_numpyro(conjugate, Y)
    target.value_and_grad(points(target))
    assert jnp.zeros(1).dtype == jnp.float32 and not jax.config.read("jax_enable_x64")


@pytest.mark.calibration
def test_processes_have_the_same_draws():
    target = bk.Target.from_numpyro(conjugate, Y)
    settings = {"num_samples": 50, "num_warmup": 50, "progress": False, "num_groups": 2}
    one, two = (bk.sample(target, num_jobs=jobs, **settings) for jobs in (1, 2))
    torch.testing.assert_close(one.unconstrained, two.unconstrained, rtol=0, atol=0)


@pytest.mark.calibration
def test_draws_of_numpyro_serve(limit):
    from numpyro.infer import MCMC, NUTS

    run = MCMC(
        NUTS(conjugate), num_warmup=300, num_samples=1000, num_chains=2, chain_method="sequential", progress_bar=False
    )
    run.run(jax.random.PRNGKey(0), jnp.asarray(Y))
    draws = bk.Draws.from_arviz(run.get_samples(group_by_chain=True), bk.Target.from_numpyro(conjugate, Y))
    z = bk.evidence.bridge_sampling(draws)
    assert abs(z.log_evidence - exact_evidence(Y)) < limit() * z.standard_error


def subsampled(y):
    mean = numpyro.sample("mean", nd.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y), subsample_size=4) as rows:
        numpyro.sample("y", nd.Normal(mean, 1.0), obs=y[rows])


def counted_without_end(y):
    rate = numpyro.sample("rate", nd.HalfNormal(1.0))
    count = numpyro.sample("count", nd.Poisson(rate))
    numpyro.sample("y", nd.Normal(count, 1.0), obs=y)


def optimised(y):
    scale = numpyro.param("scale", 1.0)
    numpyro.sample("y", nd.Normal(numpyro.sample("mean", nd.Normal(0.0, 1.0)), scale), obs=y)


def switched(y):
    side = numpyro.sample("side", nd.Bernoulli(0.5), infer={"enumerate": "parallel"})
    level = numpyro.sample("level", nd.Normal(4.0 * side, 1.0))
    numpyro.sample("y", nd.Normal(level, 1.0).expand([8]).to_event(1), obs=y)


def rarely_switched(y):
    side = numpyro.sample("side", nd.Bernoulli(0.001), infer={"enumerate": "parallel"})
    level = numpyro.sample("level", nd.Normal(4.0 * side, 1.0))
    numpyro.sample("y", nd.Normal(level, 1.0).expand([8]).to_event(1), obs=y)


def masked_sum(y):
    mean = numpyro.sample("mean", nd.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)), numpyro.handlers.mask(mask=y < 1.5):
        side = numpyro.sample("side", nd.Bernoulli(0.3), infer={"enumerate": "parallel"})
        numpyro.sample("y", nd.Normal(mean + 2 * side, 1.0), obs=y)


def imputed_by_hand(y):
    """As in NumPyro's notebook on imputation: the density of the missing values comes through the data."""
    missing = numpyro.sample("missing", nd.Normal(0.0, 1.0).expand([2]).to_event(1).mask(False))
    numpyro.sample("y", nd.Normal(0.0, 1.0).expand([8]).to_event(1), obs=jnp.asarray(y).at[:2].set(missing))


def scaled_prior(y):
    with numpyro.handlers.scale(scale=5.0):
        mean = numpyro.sample("mean", nd.Normal(0.0, 1.0))
    numpyro.sample("y", nd.Normal(mean, 1.0).expand([8]).to_event(1), obs=y)


def scaled_data(y):
    mean = numpyro.sample("mean", nd.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)), numpyro.handlers.scale(scale=0.2):
        numpyro.sample("y", nd.Normal(mean, 1.0), obs=y)


def of_32_bits(y):
    def step(count, y):
        numpyro.sample("y", nd.Normal(numpyro.sample("level", nd.Normal(0.0, 1.0)), 1.0), obs=y)
        return count + jnp.ones((), dtype=int), None

    scan(step, jnp.zeros((), dtype=jnp.int32), y)


def flat(y):
    mean = numpyro.sample("mean", nd.ImproperUniform(nd.constraints.real, (), ()))
    numpyro.sample("y", nd.Normal(mean, 1.0).expand([8]).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("model", "data", "error", "message"),
    [
        (subsampled, Y, UnsupportedSiteError, "plate 'row' draws 4 of 8 rows"),
        (counted_without_end, 2.0, UnsupportedSiteError, "'count' is discrete, and its support is infinite"),
        (optimised, Y, UnsupportedSiteError, "'scale' is a parameter to be optimised"),
        (conjugate, np.where(Y > 2, np.nan, Y), DataError, "'y' holds 2 NaN"),
        (rarely_switched, Y, UnsupportedSiteError, "site 'level' depends on 'side', which is summed out"),
        (masked_sum, Y, UnsupportedSiteError, "site 'side' is not observed, and masked"),
        (imputed_by_hand, Y, UnsupportedSiteError, "site 'missing' is not observed, and masked.*as obs_mask"),
        (scaled_prior, Y, UnsupportedSiteError, "site 'mean' is scaled"),
        (conjugate, np.ma.masked_array(Y, Y > 2), DataError, "masked; pass its data, and the mask as obs_mask"),
        (of_32_bits, Y, ModelError, "runs in single precision, but not in double(.|\n)*dtype=int"),
        (switched, Y, UnsupportedSiteError, "site 'level' depends on 'side', which is summed out"),
        (lambda y: None, Y, ModelError, "no continuous latent site"),
        (lambda y: y.nothing, Y, ModelError, "running the NumPyro model once failed: .*nothing"),
    ],
)
def test_what_is_no_target_is_refused(model, data, error, message):
    with pytest.raises(error, match=message):
        bk.Target.from_numpyro(model, data)


def test_scaled_data_have_no_scores_and_forgotten_data_are_named():
    draws = bk.sample(bk.Target.from_numpyro(scaled_data, Y), num_samples=50, num_warmup=50, progress=False)
    with pytest.raises(ModelError, match="'y' is scaled, so its terms are powers of predictive densities"):
        draws.loo()
    with pytest.warns(bk.errors.DataWarning, match="the model has no observed site.*'x' are data"):
        target = bk.Target.from_numpyro(grouped_without_data, X)
    assert target.has_constant_likelihood


def grouped_without_data(x, y=None):
    slope = numpyro.sample("slope", nd.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", nd.Normal(slope * x, 1.0), obs=y)


def test_improper_priors_and_lost_digits_are_named():
    target = bk.Target.from_numpyro(flat, Y)
    assert not target.can_sample_prior
    with pytest.raises(SettingsError, match="'mean' is improper"):
        target.sample_prior(3)
    with pytest.raises(SettingsError, match="'mean' is improper, so no marginal likelihood exists"):
        bk.evidence.bridge_sampling(bk.sample(target, num_samples=50, num_warmup=50, progress=False))
    with pytest.warns(PrecisionWarning, match="single precision"):
        bk.Target.from_numpyro(conjugate, Y.astype(np.float32))
    with pytest.raises(DataError, match="'variance' lie outside of its support"):
        bk.Target.from_numpyro(conjugate, Y).unconstrain({"variance": torch.tensor(-1.0), "mean": torch.tensor(0.0)})


# PyMC.

pymc = pytest.importorskip("pymc")


@pytest.fixture(scope="module")
def of_pymc():
    with pymc.Model(coords={"group": ["a", "b", "c"], "row": [f"r{i}" for i in range(8)]}) as model:
        x = pymc.Data("x", X, dims="row")
        share = pymc.Dirichlet("share", np.ones(3), dims="group")
        scale = pymc.HalfCauchy("scale", 1.0)
        bound = pymc.Uniform("bound", -2.0, 3.0)
        effect = pymc.Normal("effect", 0.0, scale, dims="group")
        line = pymc.Deterministic("line", effect[GROUP] * x + share[GROUP] + bound, dims="row")
        pymc.StudentT("y", 4.0, line, sigma=0.5, observed=Y, dims="row")
    return model, bk.Target.from_pymc(model)


def test_the_density_is_that_of_pymc(of_pymc):
    model, target = of_pymc
    u, function = points(target), model.compile_logp()
    names = {rv.name: model.rvs_to_values[rv].name for rv in model.free_RVs}
    expected = [function({names[site]: x for site, x in parts_of(target, row).items()}) for row in u]
    # PyMC computes logarithms and gamma functions of some constants in single precision.
    np.testing.assert_allclose(target.log_density(u), expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(target.unconstrain(target.constrain(u)), u, rtol=1e-8, atol=1e-8)
    each = target.pointwise_log_likelihood(u)["y"]
    torch.testing.assert_close(each.sum(-1), target.log_likelihood(u), rtol=1e-11, atol=1e-11)
    test_gradients_and_temperatures((target,))


@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning")
def test_names_labels_and_data_of_pymc(of_pymc):
    _, target = of_pymc
    assert target.names[3:] == ("bound", "effect[a]", "effect[b]", "effect[c]")
    draws = bk.sample(target, num_samples=100, num_warmup=100, progress=False).predictive()
    data = draws.to_datasets()
    assert data["posterior"]["line"].dims[-1] == "row" and data["posterior"]["group"].values.tolist() == ["a", "b", "c"]
    assert data["observed_data"]["y"].values.tolist() == Y.tolist()
    assert data["constant_data"]["x"].values.tolist() == X.tolist()
    assert data["posterior_predictive"]["y"].shape == (4, 100, 8) and draws.loo().pointwise.shape == (8,)


def test_predictions_with_other_data_leave_the_model_as_it_was(of_pymc):
    model, target = of_pymc
    u = target.sample_prior(5, seed=1)
    found = target.predictive(u, x=X + 1.0)
    values = target.constrain(u)
    line = values["effect"][:, GROUP] * torch.as_tensor(X + 1) + values["share"][:, GROUP] + values["bound"][:, None]
    torch.testing.assert_close(found["line"], line)
    assert found["y"].shape == (5, 8) and model["x"].get_value().tolist() == X.tolist()
    with pytest.raises(UnknownNameError, match="no pymc.Data is called 'z'"):
        target.predictive(u, z=X)
    with pytest.raises(SettingsError, match="no arguments"):
        target.predictive(u, X)


def test_a_twin_in_pyro_has_the_same_density_and_prior(limit):
    with pymc.Model() as model:
        variance = pymc.InverseGamma("variance", 3.0, 2.0)
        mean = pymc.Normal("mean", 0.0, 2.0 * variance**0.5)
        pymc.Normal("y", mean, variance**0.5, observed=Y)

    def twin(y):
        variance = pyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0 * variance.sqrt()))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(mean, variance.sqrt()), obs=y)

    one, other = bk.Target.from_pymc(model), bk.Target.from_pyro(twin, Y)
    u = points(one)
    for mine, theirs in zip(one.evaluate(u), other.evaluate(u), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    prior = one.constrain(one.sample_prior(4000, seed=3))["mean"]
    assert abs((prior.abs() < 1.1719).double().mean() - 0.5) < limit() * 0.5 / math.sqrt(4000)
    z = bk.evidence.bridge_sampling(bk.sample(one, progress=False))
    assert z.trusted and abs(z.log_evidence - exact_evidence(Y)) < limit() * z.standard_error


def test_missing_values_of_pymc_are_coordinates():
    with pymc.Model() as model, pytest.warns(Warning, match="missing|imput"):
        mean = pymc.Normal("mean", 0.0, 3.0)
        pymc.Normal("y", mean, 1.0, observed=np.ma.masked_array(Y, Y < 0.5))
    target = bk.Target.from_pymc(model)
    assert {site.name for site in target.sites} == {"mean", "y_unobserved"}
    assert bool(target.log_density(points(target)).isfinite().all())


def test_potentials_are_factors_of_the_likelihood():
    with pymc.Model() as model:
        mean = pymc.Normal("mean", 0.0, 3.0)
        pymc.Potential("penalty", -0.5 * mean**2)
        pymc.Normal("y", mean, 1.0, observed=Y)
    target = bk.Target.from_pymc(model)
    u = points(target)
    normal = torch.distributions.Normal(u, 1.0).log_prob(torch.as_tensor(Y)).sum(-1)
    torch.testing.assert_close(target.log_likelihood(u), normal - 0.5 * u[:, 0].square(), rtol=1e-11, atol=1e-11)


def _discrete():
    pymc.Normal("y", pymc.Poisson("count", 3.0), 1.0, observed=Y)


def _minibatch():
    rows = pymc.Minibatch(Y, batch_size=4)
    pymc.Normal("y", pymc.Normal("mean", 0.0, 1.0), 1.0, observed=rows, total_size=len(Y))


def _potential_of_a_minibatch():
    rows = pymc.Minibatch(Y, batch_size=4)
    mean = pymc.Normal("mean", 0.0, 1.0)
    pymc.Potential("rows", pymc.logp(pymc.Normal.dist(mean, 1.0), rows).sum())


def _cholesky():
    pymc.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pymc.Exponential.dist(1.0, shape=2))


def _nothing():
    pymc.Normal("y", 0.0, 1.0, observed=Y)


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (_discrete, UnsupportedSiteError, "'count' is discrete"),
        (_minibatch, UnsupportedSiteError, "'y' is of a minibatch"),
        (_potential_of_a_minibatch, UnsupportedSiteError, "'rows' is of a minibatch"),
        pytest.param(
            _cholesky,
            UnsupportedSiteError,
            "'chol' is an LKJCholeskyCov, whose density has another constant before PyMC 6",
            marks=pytest.mark.skipif(int(pymc.__version__[0]) > 5, reason="PyMC 6 has the right constant"),
        ),
        (_nothing, ModelError, "no continuous latent variable"),
    ],
)
def test_what_is_no_target_of_pymc_is_refused(write, error, message):
    with pymc.Model() as model:
        write()
    with pytest.raises(error, match=message):
        bk.Target.from_pymc(model)


def test_ordered_values_of_pymc_have_no_prior_draws():
    with pymc.Model() as model:
        ordered = pymc.distributions.transforms.ordered
        cuts = pymc.Normal("cuts", 0.0, 1.0, shape=3, transform=ordered, initval=[-1.0, 0.0, 1.0])
        pymc.OrderedLogistic("y", eta=0.0, cutpoints=cuts, observed=GROUP)
    target = bk.Target.from_pymc(model)
    assert not target.can_sample_prior and bool(target.log_density(points(target)).isfinite().all())
    with pytest.raises(SettingsError, match="'cuts' cannot be drawn: its transform restricts it"):
        target.sample_prior(3)
    report = bk.evidence.check_constants(target)
    assert abs(report.log_prior_integral + math.log(6)) < 5 * report.standard_error and report.warnings


def test_prior_draws_that_round_to_an_end_stay_finite():
    with pymc.Model() as model:
        share = pymc.Beta("share", 1.0, 0.001)
        pymc.Normal("y", share, 1.0, observed=Y)
    u = bk.Target.from_pymc(model).sample_prior(50)
    assert bool(u.isfinite().all()) and bool((u == 37).any())


def test_constants_are_in_double_precision():
    """PyTensor takes numbers of Python that single precision holds exactly as such, and their gamma functions too."""
    with pymc.Model() as model:
        share = pymc.Beta("share", 100001.0, 100003.0)
        pymc.StudentT("y", nu=1501.0, mu=share, sigma=1.0, observed=Y)
    target = bk.Target.from_pymc(model)
    u = torch.tensor([[0.01]], dtype=F64)
    value = u.sigmoid()
    prior = (
        torch.distributions.Beta(torch.tensor(100001.0, dtype=F64), 100003.0).log_prob(value)
        + (value * (1 - value)).log()
    )
    likelihood = torch.distributions.StudentT(torch.tensor(1501.0, dtype=F64), value, 1.0).log_prob(torch.as_tensor(Y))
    assert abs(target.log_prior(u) - prior.sum()) < 1e-8 and abs(target.log_likelihood(u) - likelihood.sum()) < 1e-8


def test_data_that_are_set_later_do_not_change_the_target():
    with pymc.Model() as model:
        x = pymc.Data("x", np.ones(8))
        slope = pymc.Normal("slope", 0.0, 1.0)
        pymc.Normal("y", slope * x, 0.01, observed=Y)
    first, second = bk.Target.from_pymc(model), bk.Target.from_pymc(model)
    u = points(first, 3)
    expected = first.log_density(u)
    with model:
        pymc.set_data({"x": np.full(8, 10.0)})
    for target in (second, copy.deepcopy(first)):
        torch.testing.assert_close(target.log_density(u), expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(target.pointwise_log_likelihood(u)["y"].sum(-1), target.log_likelihood(u))
    drawn = first.predictive(u)["y"]
    assert bool((drawn - u).abs().max() < 0.1) and model["x"].get_value()[0] == 10
    assert bool((first.predictive(u, x=np.full(8, 2.0))["y"] - 2 * u).abs().max() < 0.1)
    assert model["x"].get_value()[0] == 10


def test_transforms_of_the_user_have_no_prior_draws():
    with pymc.Model() as model:
        mean = pymc.Normal("mean", 0.0, 1.0, transform=pymc.distributions.transforms.log, initval=1.0)
        pymc.Normal("y", mean, 1.0, observed=Y)
    target = bk.Target.from_pymc(model)
    assert not target.can_sample_prior
    report = bk.evidence.check_constants(target)
    assert abs(report.log_prior_integral + math.log(2)) < 5 * report.standard_error + 1e-6 and report.warnings


def test_densities_without_a_generator_are_sampled_all_the_same():
    with pymc.Model() as model:
        mean = pymc.CustomDist("mean", logp=lambda value: -0.5 * value**2 - 0.5 * np.log(2 * np.pi))
        pymc.Normal("y", mean, 1.0, observed=Y)
    target = bk.Target.from_pymc(model)
    assert not target.can_sample_prior
    draws = bk.sample(target, num_samples=200, num_warmup=200, progress=False)
    assert abs(draws["mean"].mean() - Y.sum() / 9) < 0.1


def test_the_precision_of_jax_stays_as_it_was(of_pymc):
    of_pymc[1].log_density(points(of_pymc[1]))
    assert not jax.config.read("jax_enable_x64") and jnp.zeros(1).dtype == jnp.float32


def test_flat_priors_of_pymc_are_improper():
    with pymc.Model() as model:
        pymc.Normal("y", pymc.Flat("mean"), pymc.HalfFlat("scale"), observed=Y)
    target = bk.Target.from_pymc(model)
    assert target.density.improper_sites == ("mean", "scale") and not target.can_sample_prior
    with pytest.raises(ModelError, match="a PyMC or Bambi model is needed, not a function"):
        bk.Target.from_pymc(_nothing)


def test_a_model_of_another_package_without_its_call_names_it(of_pymc):
    for take in (bk.sample, bk.Target.from_pyro, bk.evidence.bridge_sampling, bk.prior_predictive):
        with pytest.raises((SettingsError, ModelError), match=r"becomes a target by bk.Target.from_pymc\(model\)"):
            take(of_pymc[0])
    with pytest.raises(ModelError, match=r"becomes a target by bk.Target.from_numpyro\(model, \*args\)"):
        bk.sample(conjugate, Y)
