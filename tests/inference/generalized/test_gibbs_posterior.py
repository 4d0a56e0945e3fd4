"""A loss-based posterior is a target for every sampler and estimator, and a Pyro model for every objective."""

import functools
import itertools
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.stats import multivariate_normal
from torch.distributions import constraints

import bayeskit as bk
from bayeskit._core.statistics import mean_error
from bayeskit.errors import (
    CoherenceError,
    DataError,
    ImproperPosteriorError,
    ModelError,
    SettingsError,
    ShapeError,
)
from bayeskit.inference import evidence
from bayeskit.inference.generalized import DeepSets, Flat, GibbsPosterior, losses
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.samplers import (
    NUTS,
    SGLD,
    Constant,
    MinibatchTarget,
    sample_ladder,
    sample_nested,
    sample_smc,
    sample_stochastic_gradient,
)

X = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
MEAN, VARIANCE = 1.4, 0.4  # of the half squared loss, weight one half, prior N(0, 1)
# exp(-loss / 2) is a normal density of variance 2 but for its constant.
LOG_EVIDENCE = multivariate_normal(cov=[[3, 1, 1], [1, 3, 1], [1, 1, 3]]).logpdf(X.numpy()) + 1.5 * math.log(
    4 * math.pi
)
STANDARD = dist.Normal(0.0, 1.0)


def normal(**settings):
    return GibbsPosterior(STANDARD, losses.HalfSquared(), X, 0.5, **{"compile": False, **settings})


class WrongSign(GibbsPosterior):
    """Rewards losses."""

    def __call__(self, *data, subsample_size=None):
        theta, _ = self.prior.model()
        pyro.factor("loss", self.weight * self.loss.total(theta, self.data))
        return theta


def score(draws, mean=MEAN, variance=VARIANCE):
    """How many standard errors mean and second moment lie off."""
    x = draws.unconstrained[..., 0] - mean
    first, second = x, x.square() - variance
    return max(abs(float(y.mean() / mean_error(y))) for y in (first, second))


@pytest.mark.calibration
@pytest.mark.parametrize("kernel", [None, NUTS()])
def test_hmc_and_nuts_draw_from_the_exact_posterior(kernel, limit):
    draws = bk.sample(normal(), num_warmup=200, num_samples=400, seed=1, kernel=kernel, progress=False)
    assert score(draws) < limit(2)


@pytest.mark.calibration
def test_a_wrong_sign_of_the_loss_fails_the_same_check(limit):
    x = torch.tensor([0.9], dtype=torch.float64)  # beneath the prior's precision, so that there still is a posterior
    for kind, passes in ((GibbsPosterior, True), (WrongSign, False)):
        target = kind(STANDARD, losses.HalfSquared(), x, 0.5, compile=False)
        draws = bk.sample(target, num_warmup=200, num_samples=400, seed=1, progress=False)
        assert (score(draws, 0.3, 2 / 3) < limit(2)) == passes


@pytest.mark.calibration
def test_groups_of_chains_and_pickled_targets_draw_alike():
    target = normal()
    target.value_and_grad(torch.zeros(4, 1, dtype=torch.float64))  # graphs must not hinder
    arrived = pickle.loads(pickle.dumps(target))
    assert arrived.fingerprint() == target.fingerprint()
    settings = {"num_warmup": 50, "num_samples": 50, "num_groups": 2, "progress": False}
    torch.testing.assert_close(
        bk.sample(target, **settings).unconstrained, bk.sample(arrived, **settings).unconstrained, rtol=0, atol=0
    )


def test_fingerprints_tell_weights_and_data_apart():
    prints = [p.fingerprint() for p in (normal(), normal().with_weight(1.0), normal().with_data(X + 1))]
    assert len(set(prints)) == 3 and prints[0] == normal().fingerprint()


def estimates():
    target = normal()
    draws = bk.sample(target, num_warmup=200, num_samples=500, seed=2, progress=False)
    ladder = sample_ladder(target, 16, num_warmup=100, num_samples=200, seed=2, progress=False)
    yield evidence.bridge_sampling(target, draws)
    yield evidence.stepping_stone(target, ladder)
    yield evidence.modified_path_sampling(target, ladder)
    yield evidence.smc(target, sample_smc(target, seed=2, progress=False))
    yield evidence.nested_sampling(target, sample_nested(target, 200, seed=2, progress=False))
    yield evidence.naive_monte_carlo(target, 4000)


@pytest.mark.calibration
def test_the_evidence_is_the_exact_one_by_every_estimator(limit):
    found = list(estimates())
    for z in found:
        assert abs(z.log_evidence - LOG_EVIDENCE) < limit(len(found)) * z.standard_error, str(z)
        assert z.standard_error < 0.2


@pytest.mark.calibration
@pytest.mark.parametrize(("weight", "normalizer"), [(1.0, 0.735759), (2.0, 0.203003)])
def test_bridge_sampling_normalizes_the_absolute_loss_under_a_flat_prior(weight, normalizer, limit):
    assert math.exp(-weight) * (1 + 1 / weight) == pytest.approx(normalizer, abs=5e-7)
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    target = GibbsPosterior(Flat(), losses.Absolute(), x, weight, compile=False)
    draws = bk.sample(target, num_warmup=300, num_samples=800, seed=3, progress=False)
    # The integral of prior times likelihood: no marginal likelihood, as which it is refused.
    z = evidence.bridge_sampling.__wrapped__(target, draws)
    assert abs(z.log_evidence - math.log(math.exp(-weight) * (1 + 1 / weight))) < limit(2) * z.standard_error
    assert z.standard_error < 0.02


def test_methods_that_start_at_the_prior_refuse_an_improper_one():
    target = GibbsPosterior(Flat(), losses.HalfSquared(), X, compile=False)
    assert not target.can_sample_prior
    with pytest.raises(SettingsError, match="site 'theta' is improper"):
        sample_smc(target, progress=False)
    with pytest.raises(SettingsError, match="site 'theta' is improper"):
        target.sample_prior(3)
    with pytest.raises(SettingsError, match="prior"):
        sample_nested(target, progress=False)


# -- as a Pyro model --------------------------------------------------------------------------


def exact_guide(*data):
    pyro.sample("theta", dist.Normal(X.new_tensor(MEAN), X.new_tensor(VARIANCE).sqrt()))


OBJECTIVES = {
    "pyro": pyro.infer.Trace_ELBO(),
    "pyro, vectorized": pyro.infer.Trace_ELBO(5, vectorize_particles=True, max_plate_nesting=1),
    "ours": ELBO(num_particles=8, analytic_kl=False),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_exact_guide_attains_the_evidence_without_variance(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = float(OBJECTIVES[name].loss(normal(), exact_guide))
    assert loss == pytest.approx(-LOG_EVIDENCE, abs=1e-10)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_automatic_guides_fit(name):
    posterior = normal()
    guide = AutoNormal(posterior)
    guide()
    with torch.no_grad():
        guide.locs.theta.fill_(MEAN)
        guide.scales.theta = torch.tensor(math.sqrt(VARIANCE))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = float(OBJECTIVES[name].loss(posterior, guide))
    assert loss == pytest.approx(-LOG_EVIDENCE, abs=1e-5)  # guides are single precision


def several_sites():
    pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("parts", 3):
        pyro.sample("scale", dist.Gamma(2.0, 1.0))
    pyro.sample("share", dist.Dirichlet(torch.ones(3)))


def loss_of_several(p, x):
    return (x - p["mean"]).square() / p["scale"].sum() + p["share"][0] * x + p["scale"][2]


@pytest.mark.parametrize("pooling", ["sum", "max"])
def test_particles_of_plated_sites_count_one_by_one(pooling):
    posterior = GibbsPosterior(several_sites, loss_of_several, X, 0.5, pooling, compile=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pyro.plate("particles", 6, dim=-2):
            trace = pyro.poutine.trace(posterior).get_trace()
    drawn = {k: trace.nodes[k]["value"] for k in ("mean", "scale", "share")}
    found = trace.nodes["loss"]["fn"].log_factor.reshape(6, -1).sum(-1)
    for i in range(6):
        one = {k: v[i, 0] if k != "scale" else v[i] for k, v in drawn.items()}
        each = loss_of_several(one, X)
        assert float(found[i]) == pytest.approx(-0.5 * float(each.sum() if pooling == "sum" else each.max()), abs=1e-5)


def test_minibatches_are_unbiased():
    posterior = normal()
    theta = {"theta": torch.tensor(0.7, dtype=torch.float64)}

    def log_density(*data):
        return pyro.poutine.trace(pyro.condition(posterior, theta)).get_trace(*data).log_prob_sum()

    parts = [log_density(X[list(rows)]) for rows in itertools.combinations(range(3), 2)]
    torch.testing.assert_close(torch.stack(parts).mean(), log_density(), rtol=0, atol=1e-12)
    assert len({round(float(p), 6) for p in parts}) == 3


def test_minibatches_drawn_by_the_plate_serve_stochastic_gradients():
    minibatch, full = MinibatchTarget.from_pyro(normal(), subsample_size=2), normal()
    u = torch.tensor([[0.7]], dtype=torch.float64)
    parts = [minibatch.estimate(u, torch.tensor(rows)) for rows in itertools.combinations(range(3), 2)]
    value, gradient = full.value_and_grad(u)
    torch.testing.assert_close(torch.stack([p.log_density for p in parts]).mean(0), value, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([p.gradient for p in parts]).mean(0), gradient, rtol=0, atol=1e-12)
    draws = sample_stochastic_gradient(
        minibatch, SGLD(Constant(1e-2)), num_warmup=20, num_samples=30, seed=1, progress=False
    )
    assert draws.unconstrained.shape == (4, 30, 1) and bool(draws.unconstrained.isfinite().all())


def test_training_on_all_data_and_on_minibatches():
    # The posterior's curvature is 2.5, and the loss is that of a datum: this step reaches the optimum of what it sees.
    def fitted(batch_size):
        pyro.clear_param_store()
        step = functools.partial(torch.optim.SGD, lr=3 / 2.5)
        posterior = normal()
        guide = AutoDelta(posterior)
        bk.fit(posterior, guide, ELBO(), X, num_steps=1, batch_size=batch_size, optimizer=step, progress=False)
        return float(guide.median()["theta"])

    assert fitted(3) == pytest.approx(MEAN, abs=1e-5)
    possible = [0.75 * float(a + b) / 2.5 for a, b in itertools.combinations(X, 2)]
    assert min(abs(fitted(2) - x) for x in possible) < 1e-5


def test_minibatches_are_refused_where_they_make_no_sense():
    with pytest.raises(SettingsError, match="Max is no sum over data"):
        normal(pooling="max")(X[:2])
    with pytest.raises(ShapeError, match=r"\[\(2,\), \(2,\)\]"):
        normal()(X[:2], X[:2])
    with pytest.raises(ShapeError, match="larger than the 3 data"):
        normal()(torch.cat([X, X]))
    with pytest.raises(SettingsError, match="subsample_size must lie between 1 and 3"):
        normal()(subsample_size=5)


# -- identities -------------------------------------------------------------------------------


def grid(dim=1):
    return torch.linspace(-2, 3, 7, dtype=torch.float64)[:, None].expand(-1, dim)


def test_the_density_is_that_of_the_exact_posterior():
    u = grid()
    exact = dist.Normal(X.new_tensor(MEAN), X.new_tensor(VARIANCE).sqrt()).log_prob(u[:, 0]) + LOG_EVIDENCE
    torch.testing.assert_close(normal().log_density(u), exact, rtol=0, atol=1e-12)


def test_a_scaled_loss_is_a_scaled_weight():
    scaled = GibbsPosterior(STANDARD, lambda m, x: 3 * (x - m).square() / 2, X, 0.5 / 3, compile=False)
    torch.testing.assert_close(scaled.log_density(grid()), normal().log_density(grid()), rtol=0, atol=1e-12)


def test_beta_changes_the_weight():
    one = normal().with_weight(1.0)
    for found, wanted in zip(one.value_and_grad(grid(), beta=0.5), normal().value_and_grad(grid()), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.total_loss(grid()), normal().total_loss(grid()), rtol=0, atol=1e-12)


def test_updating_is_all_at_once_in_any_order():
    whole = normal().log_density(grid())
    for order in itertools.permutations(range(3)):
        by_parts = normal().with_data(X[[order[0]]]).update(X[[order[1]]]).update(X[[order[2]]])
        torch.testing.assert_close(by_parts.log_density(grid()), whole, rtol=0, atol=1e-12)
        assert by_parts.num_data == 3


def test_updating_with_covariates():
    x = torch.stack([torch.ones_like(X), X.flip(0)], 1)
    whole = GibbsPosterior(dist.Normal(torch.zeros(2), 1.0), losses.Absolute(losses.linear), (x, X), compile=False)
    updated = whole.with_data((x[:1], X[:1])).update((x[1:], X[1:]))
    torch.testing.assert_close(updated.log_density(grid(2)), whole.log_density(grid(2)), rtol=0, atol=1e-12)


def test_losses_of_data():
    found = normal().pointwise_log_likelihood(grid())["loss"]
    torch.testing.assert_close(found, -((X - grid()).square()) / 4, rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match="not a sum over data"):
        normal(pooling="max").pointwise_log_likelihood(grid())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_follows_the_data(dtype):
    posterior = normal().with_data(X.to(dtype))
    u = torch.zeros(2, 1, dtype=dtype)
    value, gradient = posterior.value_and_grad(u)
    assert posterior.dtype == value.dtype == gradient.dtype == posterior.sample_prior(3).dtype == dtype
    assert bk.sample(posterior, num_warmup=20, num_samples=10, progress=False).unconstrained.dtype == dtype


def test_whole_numbers_lists_and_tuples_are_data():
    given = [X, X.tolist(), X.to(torch.int64), X.numpy()]
    values = [normal().with_data(x).log_density(torch.zeros(1, 1)).double() for x in given]
    for value in values:
        torch.testing.assert_close(value, values[0], rtol=0, atol=1e-5)


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1.0, 0.0, math.nan, math.inf, "1", None, True])
def test_weights_that_are_none(weight):
    with pytest.raises(SettingsError, match="weight must"):
        normal().with_weight(weight)


@pytest.mark.parametrize(
    ("data", "error", "place"),
    [
        (torch.tensor([1.0, math.nan]), DataError, "datum 1"),
        (torch.tensor([1.0, 2.0, math.inf]), DataError, "datum 2"),
        (torch.tensor([]), DataError, "no data"),
        (torch.tensor(1.0), ShapeError, "leading dimension"),
        ((X, X[:2]), ShapeError, r"\(3,\), \(2,\)"),
        ((X, torch.tensor([0.0, math.nan, 1.0])), DataError, "column 1"),
        ("abc", DataError, "numbers"),
        ([1.0, None], DataError, "datum 1"),
    ],
)
def test_data_that_are_none(data, error, place):
    with pytest.raises(error, match=place):
        normal().with_data(data)


def fails(parameter, x):
    raise ValueError("out of range")


@pytest.mark.parametrize(
    ("loss", "error", "place"),
    [
        (lambda m, x: torch.where(x > 1.5, torch.nan * m, x - m), DataError, "datum 1 .2 in all. is nan"),
        (lambda m, x: torch.where(x > 3, torch.inf, x - m), DataError, "datum 2 .1 in all. is infinite"),
        (lambda m, x: (x - m).abs().sum(), ShapeError, r"\(\) instead of \(3,\)"),
        (lambda m, x: 1.0, ShapeError, "float instead"),
        (fails, ModelError, "out of range"),
        (lambda m, x: x.nothing, ModelError, "nothing"),
        (lambda m, x: x @ torch.ones(2), ModelError, "FunctionLoss failed"),
        (losses.HalfSquared, SettingsError, r"write HalfSquared\(\.\.\.\)"),
        ("absolute", SettingsError, "'absolute'"),
        (losses.HalfSquared(losses.linear), ShapeError, "covariates"),
    ],
)
def test_losses_that_are_none(loss, error, place):
    with pytest.raises(error, match=place):
        GibbsPosterior(STANDARD, loss, X, compile=False)


def test_a_loss_that_is_infinite_in_places_is_fine():
    inside = GibbsPosterior(
        dist.Normal(0.0, 3.0), lambda m, x: torch.where((x - m).abs() < 3, 0 * m, torch.inf), X, compile=False
    )
    assert inside.log_likelihood(torch.tensor([[2.0], [9.0]], dtype=torch.float64)).tolist() == [0.0, -math.inf]


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        (lambda m, x: (x - m.detach()).square(), "FunctionLoss has no derivative"),
        (lambda m, x: (x - float(m)).square(), "FunctionLoss has no derivative"),
        (lambda m, x: (x > m).double(), "FunctionLoss has no derivative.*smooth"),
        (lambda m, x: torch.as_tensor((x.numpy() - m.numpy()) ** 2), "FunctionLoss failed.*numpy"),
    ],
)
def test_losses_that_autograd_does_not_see_are_refused(loss, place):
    with pytest.raises(ModelError, match=place):
        GibbsPosterior(STANDARD, loss, X, compile=False)


def test_losses_are_probed_with_gradients_wherever_one_is_made():
    flat_in_places = lambda m, x: torch.relu((x - m).abs() - 100)  # noqa: E731  its derivative is zero, but known
    assert GibbsPosterior(STANDARD, flat_in_places, X, compile=False).dim == 1
    with torch.no_grad():
        assert normal().dim == 1
    with torch.inference_mode():
        assert normal().dim == 1


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (torch.tensor([1, 2]), torch.tensor([1.5, 2.7]), torch.float32),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1e9 + 0.5], dtype=torch.float64), torch.float64),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3, 4]), torch.float64),
        (torch.tensor([True, False]), torch.tensor([3, 4]), torch.int64),
    ],
)
def test_updates_keep_the_precision_of_new_data(old, new, wanted):
    data = normal().with_data(old).update(new).data
    assert data.dtype == wanted
    assert data.double().tolist() == [*old.double().tolist(), *new.double().tolist()]


def test_a_bounded_loss_needs_a_proper_prior():
    bounded = losses.FunctionLoss(lambda m, x: (x - m).tanh().square(), bounded=True)
    with pytest.raises(ImproperPosteriorError, match="site 'theta' counts as improper.*FunctionLoss"):
        GibbsPosterior(Flat(), bounded, X)
    with pytest.raises(ImproperPosteriorError, match="site 'shift'"):
        GibbsPosterior(lambda: pyro.sample("shift", dist.ImproperUniform(constraints.real, (), ())), bounded, X)
    assert GibbsPosterior(STANDARD, bounded, X, compile=False).dim == 1


def test_updates_that_are_refused():
    with pytest.raises(CoherenceError, match="pooled by Mean"):
        normal(pooling="mean").update(X)
    with pytest.raises(CoherenceError, match="pooled by DeepSets"):
        normal(pooling=DeepSets(torch.square, torch.sqrt)).update(X)
    with pytest.raises(ShapeError, match=r"\[\(2, 2\)\] do not continue"):
        normal().update(torch.zeros(2, 2))
    with pytest.raises(DataError, match="datum 1"):
        normal().update(torch.tensor([1.0, math.nan]))


class Spread(losses.Loss):
    """A loss that looks at all data at once."""

    def total(self, parameter, data, weights=None):
        return (data.var() - parameter).abs()


def test_losses_of_all_data_at_once():
    posterior = GibbsPosterior(STANDARD, Spread(), X, 2.0, compile=False)
    found = posterior.log_likelihood(grid())
    torch.testing.assert_close(found, -2 * (X.var() - grid()[:, 0]).abs(), rtol=0, atol=1e-12)
    with pytest.raises(CoherenceError, match="Spread, which looks at all data at once"):
        posterior.update(X)
    with pytest.raises(SettingsError, match="nothing to pool"):
        GibbsPosterior(STANDARD, Spread(), X, pooling="max")
    with pytest.raises(SettingsError, match="Spread"):
        posterior(X[:2])
