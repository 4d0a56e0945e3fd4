"""Programs of Stan as targets, against exact values."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import bayeskit as bk
from bayeskit._logdensity.stan_density import StanDensity
from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError

pytest.importorskip("httpstan")
pytestmark = [pytest.mark.compiler, pytest.mark.calibration]  # Stan's headers take half a minute

F64 = torch.float64
Y = np.array([1.2, 0.4, 2.1, 0.9, 1.6, 1.1, 2.9, 0.3])
PROGRAM = """
data { int<lower=0> n; vector[n] y; int prior_only; }
parameters { real<lower=0> variance; real mean; simplex[3] share; cholesky_factor_corr[3] L; array[2, 3] real z; }
transformed parameters {
  real sd = sqrt(variance);
  matrix[2, 3] table;
  for (i in 1:2) for (j in 1:3) table[i, j] = z[i, j] + 10 * i + j;
}
model {
  variance ~ inv_gamma(3, 2);
  mean ~ normal(0, 2 * sd);
  share ~ dirichlet([1, 1, 1]');
  L ~ lkj_corr_cholesky(2);
  for (i in 1:2) z[i] ~ normal(0, 1);
  if (!prior_only) y ~ normal(mean, sd);
}
generated quantities {
  vector[n] log_lik;
  vector[n] y_rep;
  for (i in 1:n) { log_lik[i] = normal_lpdf(y[i] | mean, sd); y_rep[i] = normal_rng(mean, sd); }
}
"""
DATA = {"n": 8, "y": Y, "prior_only": 0}


def exact_evidence():
    """The log evidence of a normal mean and variance under a normal-inverse-gamma prior, a Student-t density."""
    n = len(Y)
    scale = 2 / 3 * (np.eye(n) + 4)
    constant = math.lgamma(3 + n / 2) - math.lgamma(3) - n / 2 * math.log(6 * math.pi)
    return constant - 0.5 * np.linalg.slogdet(scale)[1] - (3 + n / 2) * math.log1p(Y @ np.linalg.solve(scale, Y) / 6)


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_stan(PROGRAM, DATA)


@pytest.fixture(scope="module")
def split():
    return bk.Target.from_stan(PROGRAM, DATA, prior={"prior_only": 1})


def points(target, count=10):
    return torch.randn(count, target.dim, dtype=F64, generator=torch.Generator().manual_seed(1))


def test_prior_and_likelihood_have_all_constants(split):
    u = points(split)
    log_prior, log_likelihood = split.evaluate(u)
    variance, mean = u[:, 0].exp(), u[:, 1]
    expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(torch.as_tensor(Y)[:, None]).sum(0)
    torch.testing.assert_close(log_likelihood, expected, rtol=1e-10, atol=1e-10)
    # The rest is that of Pyro, whose simplexes and Cholesky factors have other coordinates.
    values = split.constrain(u)
    own = torch.distributions.InverseGamma(torch.tensor(3.0, dtype=F64), 2.0).log_prob(variance)
    own += torch.distributions.Normal(0.0, 2 * variance.sqrt()).log_prob(mean) + math.lgamma(3.0)
    own += torch.distributions.LKJCholesky(3, torch.tensor(2.0, dtype=F64)).log_prob(values["L"])
    own += torch.distributions.Normal(0.0, 1.0).log_prob(values["z"]).sum((1, 2))
    torch.testing.assert_close(log_prior, own + split.log_jacobian(u), rtol=1e-9, atol=1e-9)


def test_gradients_and_temperatures(split):
    u, beta = points(split, 4), torch.tensor([0.0, 0.3, 0.8, 1.0], dtype=F64)
    value, gradient = split.value_and_grad(u, beta)
    step = 1e-5
    for i in range(split.dim):
        aside = torch.zeros(split.dim, dtype=F64)
        aside[i] = step
        slope = (split.log_density(u + aside, beta) - split.log_density(u - aside, beta)) / (2 * step)
        torch.testing.assert_close(gradient[:, i], slope, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value, split.log_density(u, beta))


def test_vectors_values_and_jacobians(target):
    u = points(target)
    values = target.constrain(u, deterministic=True)
    shapes = {"variance": (), "mean": (), "share": (3,), "L": (3, 3), "z": (2, 3), "sd": (), "table": (2, 3)}
    assert {name: tuple(x.shape[1:]) for name, x in values.items()} == shapes
    rows, columns = torch.arange(1, 3).unsqueeze(1), torch.arange(1, 4)
    torch.testing.assert_close(values["table"], values["z"] + 10 * rows + columns)
    torch.testing.assert_close((values["L"] @ values["L"].mT).diagonal(dim1=1, dim2=2), torch.ones(10, 3, dtype=F64))
    assert bool((values["L"].triu(1) == 0).all())
    torch.testing.assert_close(target.unconstrain(target.constrain(u)), u, rtol=1e-9, atol=1e-9)
    simple = bk.Target.from_stan("parameters { real<lower=0> x; } model { x ~ exponential(1); }", {})
    torch.testing.assert_close(simple.log_jacobian(points(simple)), points(simple)[:, 0])
    with pytest.raises(DataError, match="outside of the support: .*must be greater than"):
        target.unconstrain({name: x[0] for name, x in target.constrain(u).items()} | {"variance": torch.tensor(-1.0)})


def test_evidence_leave_one_out_and_predictions(target, split, limit):
    draws = bk.sample(target, num_samples=1000, progress=False)
    assert not target.is_split and not target.can_sample_prior
    table = bk.evidence.compare(
        draws, ["bridge_sampling", "warp_bridge_sampling", "generalised_stepping_stone"], progress=False
    )
    for z in table:
        assert z.trusted and abs(z.log_evidence - exact_evidence()) < limit(3) * z.standard_error
    each = target.pointwise_log_likelihood(draws.unconstrained)["log_lik"]
    assert each.shape == (4, 1000, 8)
    one, other = draws.loo(), bk.sample(split, num_samples=1000, progress=False).loo()
    assert abs(one.elpd - other.elpd) < limit() * math.hypot(one.monte_carlo_error, other.monte_carlo_error)
    drawn = draws.predictive(seed=2).posterior_predictive
    assert drawn.keys() == {"y_rep"} and drawn["y_rep"].shape == (4, 1000, 8)
    residual = (drawn["y_rep"] - draws["mean"].unsqueeze(-1)) / draws["variance"].sqrt().unsqueeze(-1)
    assert abs(residual.mean()) < limit(2) / math.sqrt(32000)
    assert abs(residual.std() - 1) < limit(2) / math.sqrt(2 * 32000)
    other = target.predictive(draws.unconstrained[:, :5], n=3, y=[0.0, 0.0, 0.0])
    assert other["y_rep"].shape == (4, 5, 3)
    assert draws.to_datasets()["log_likelihood"]["log_lik"].shape == (4, 1000, 8)
    with pytest.raises(SettingsError, match="cannot draw from its prior"):
        target.sample_prior(3)


def test_points_that_a_program_rejects_have_density_zero():
    program = 'parameters { real x; } model { if (x > 1) reject("x is ", x); x ~ normal(0, 1); }'
    target = bk.Target.from_stan(program, {})
    value, gradient = target.value_and_grad(torch.tensor([[0.5], [2.0], [-0.5]], dtype=F64))
    assert value[1] == -math.inf and gradient[1] == 0
    with pytest.warns(AccuracyWarning, match="rejects 4 of 4 points, .*x is 2"):
        target.log_density(torch.full((4, 1), 2.0, dtype=F64))
    assert value[0] == value[2] == pytest.approx(-0.5 * math.log(2 * math.pi) - 0.125)


def test_threads_have_tapes_of_their_own(target):
    u = points(target, 8)
    expected = target.value_and_grad(u)
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda _: target.value_and_grad(u), range(4)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning")
def test_programs_with_other_text_or_data_have_other_fingerprints(target):
    other = bk.Target.from_stan(PROGRAM, DATA | {"y": Y + 1e-12})
    assert other.fingerprint() != target.fingerprint()
    with pytest.warns(bk.errors.DataWarning, match="the data of 'a', 'b' are not compared: a Stan program"):
        bk.workflows.compare_models({"a": _sampled(target), "b": _sampled(other)}, progress=False)


def _sampled(target):
    return bk.sample(target, num_samples=300, num_warmup=200, progress=False)


def test_parts_of_tuples_and_of_complex_numbers_are_in_a_row():
    program = """
    parameters { real a; matrix[2, 3] M; }
    transformed parameters { complex c = to_complex(a, 1); tuple(real, vector[2]) q = (a, [a, 2]'); }
    model { a ~ normal(0, 1); to_vector(M) ~ normal(0, 1); }
    """
    target = bk.Target.from_stan(program, {})
    values = target.constrain(torch.arange(7.0, dtype=F64).unsqueeze(0), deterministic=True)
    assert values["c"].tolist() == [[0.0, 1.0]] and values["q"].tolist() == [[0.0, 0.0, 2.0]]
    assert values["M"][0].tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert target.names == ("a", *(f"M[{i}]" for i in range(6)))


def test_files_and_other_processes(target, tmp_path):
    (tmp_path / "model.stan").write_text(PROGRAM)
    (tmp_path / "data.json").write_text(json.dumps({"n": 8, "y": Y.tolist(), "prior_only": 0}))
    again = bk.Target.from_stan(tmp_path / "model.stan", tmp_path / "data.json")
    assert again.fingerprint() == target.fingerprint()
    settings = {"num_samples": 20, "num_warmup": 20, "num_groups": 2, "progress": False}
    one, two = (bk.sample(again, num_jobs=jobs, **settings) for jobs in (1, 2))
    assert one.unconstrained.equal(two.unconstrained)


def test_a_differential_equation_is_linked():
    program = """
    functions { vector decay(real t, vector y, real rate) { return -rate * y; } }
    parameters { real<lower=0> rate; }
    transformed parameters { array[1] vector[1] y = ode_bdf(decay, [1.0]', 0, {1.0}, rate); }
    model { rate ~ exponential(1); }
    """
    target = bk.Target.from_stan(program, {})
    values = target.constrain(torch.tensor([[0.3]], dtype=F64), deterministic=True)
    assert values["y"][0, 0, 0] == pytest.approx(math.exp(-math.exp(0.3)), rel=1e-4)


@pytest.mark.parametrize(
    ("program", "data", "error", "message"),
    [
        ("data { int n }", {}, ModelError, "Stan refuses the program: Syntax error (.|\n)*data . int n ."),
        (PROGRAM, {"n": 2, "prior_only": 0}, DataError, "refuses its data: .*variable name=y"),
        (PROGRAM, DATA | {"y": np.where(Y > 2, np.nan, Y)}, DataError, "data 'y' holds 2 NaN"),
        (PROGRAM, DATA | {"y": np.ma.masked_array(Y, Y > 2)}, DataError, "data 'y' is a masked array"),
        (PROGRAM, DATA | {"y": ["a"] * 8}, DataError, "data 'y' is of type"),
        (PROGRAM, [1, 2], DataError, "a mapping by name"),
        (object(), DATA, SettingsError, "not a object; pass the program that a model of BridgeStan"),
        ("no_such_file.stan", {}, DataError, "no_such_file.stan cannot be read"),
        ("data { int n; } model { }", {"n": 1}, ModelError, "no unconstrained vector"),
    ],
)
def test_what_is_no_program_or_no_data_is_refused(program, data, error, message):
    with pytest.raises(error, match=message):
        bk.Target.from_stan(program, data)


def test_a_prior_with_other_parameters_is_refused():
    with pytest.raises(ModelError, match="the program of the prior has other parameters"):
        StanDensity(PROGRAM, DATA, prior="parameters { real x; } model { x ~ normal(0, 1); }")
    plain = bk.Target.from_stan("parameters { real x; } model { x ~ normal(0, 1); }", {})
    with pytest.raises(ModelError, match="no generated quantity 'log_lik'"):
        bk.sample(plain, num_samples=20, num_warmup=20, progress=False).loo()
