"""Data drawn from a model at given parameters: their laws in closed form, new arguments, and what cannot be drawn."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import ModelError, SettingsError, ShapeError, UnknownNameError, UnsupportedSiteError

F64 = torch.float64
X = torch.linspace(-1, 1, 6, dtype=F64)
GROUP = torch.tensor([0, 1, 2, 0, 1, 2])
Y = torch.tensor([0.1, 1.2, -0.4, 0.3, 0.9, -0.2], dtype=F64)
COUNT = 20_000


def grouped(x, group, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("groups", int(group.max()) + 1):
        effect = pyro.sample("effect", dist.Normal(mean, 0.5))
    level = pyro.deterministic("level", effect[group] * x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(level, 0.3), obs=y)


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_pyro(grouped, X, GROUP, Y, compile=False)


@pytest.fixture(scope="module")
def u(target):
    one = target.unconstrain({"mean": torch.tensor(0.7), "effect": torch.tensor([0.2, 1.0, -0.5])})
    return one.expand(COUNT, -1)


def check_normal(drawn, mean, deviation, limit):
    """Compare mean and variance of columns with those of independent normal distributions."""
    count = drawn.shape[1]
    z = (drawn.mean(0) - mean) / (deviation / math.sqrt(len(drawn)))
    assert z.abs().max() < limit(2 * count)
    ratio = drawn.var(0) / deviation**2 - 1
    assert ratio.abs().max() < limit(2 * count) * math.sqrt(2 / len(drawn))


def test_data_have_the_law_of_the_model(target, u, limit):
    drawn = target.predictive(u, seed=1)
    assert drawn.keys() == {"y"} and drawn["y"].shape == (COUNT, 6)
    level = torch.tensor([0.2, 1.0, -0.5], dtype=F64)[GROUP] * X
    check_normal(drawn["y"], level, 0.3, limit)
    assert torch.equal(target.predictive(u, seed=1)["y"], drawn["y"])
    assert not torch.equal(target.predictive(u, seed=2)["y"], drawn["y"])
    # Draws at different vectors, and of different data, are independent.
    centred = drawn["y"] - level
    assert (centred[1:] * centred[:-1]).mean().abs() < limit(2) * 0.09 / math.sqrt(6 * COUNT)
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < limit(2) * 0.09 / math.sqrt(5 * COUNT)


def test_other_arguments_give_other_data_and_deterministic_sites(target, u, limit):
    x, group, level = torch.tensor([2.0, -1.0], dtype=F64), torch.tensor([2, 1]), torch.tensor([-1.0, -1.0], dtype=F64)
    for placeholder in (None, torch.zeros(2, dtype=F64)):
        found = target.predictive(u, x, group, placeholder)
        check_normal(found["y"], level, 0.3, limit)
        torch.testing.assert_close(found["level"], level.expand(COUNT, 2))


def test_effects_of_new_groups_are_drawn_anew(target, u, limit):
    with pytest.raises(ShapeError, match=r"'effect' has shape \(5,\).*and \(3,\) in the draws; redraw=\['effect'\]"):
        target.predictive(u, torch.ones(1, dtype=F64), torch.tensor([4]), None)
    found = target.predictive(u, torch.ones(1, dtype=F64), torch.tensor([4]), None, redraw=["effect"])
    assert found["effect"].shape == (COUNT, 5)
    check_normal(found["effect"], torch.tensor(0.7, dtype=F64), 0.5, limit)
    check_normal(found["y"], torch.tensor(0.7, dtype=F64), math.hypot(0.5, 0.3), limit)


def test_batches_keep_their_shape(target, u):
    assert target.predictive(u[:6].reshape(2, 3, -1))["y"].shape == (2, 3, 6)


def test_discrete_sites_are_drawn_with_their_data(limit):
    """A mixture of two known components: shares and moments in closed form."""

    def mixture(y):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(y)):
            kind = pyro.sample("kind", dist.Bernoulli(share), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(4.0 * kind, 1.0), obs=y)

    target = bk.Target.from_pyro(mixture, torch.tensor([0.0, 4.0, 4.1], dtype=F64), compile=False)
    at = target.unconstrain({"share": torch.tensor(0.3)}).expand(COUNT, -1)
    drawn = target.predictive(at)
    assert drawn["kind"].shape == drawn["y"].shape == (COUNT, 3)
    assert abs(drawn["kind"].mean() - 0.3) < limit() * math.sqrt(0.21 / (3 * COUNT))
    check_normal((drawn["y"] - 4 * drawn["kind"]), 0.0, 1.0, limit)


def test_what_cannot_be_drawn_in_a_batch_is_drawn_one_by_one(limit):
    def angles(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.VonMises(mean, 50.0), obs=y)

    target = bk.Target.from_pyro(angles, torch.zeros(3, dtype=F64), compile=False)
    drawn = target.predictive(torch.full((400, 1), 0.4, dtype=F64))["y"]
    assert drawn.shape == (400, 3)
    assert abs(drawn.mean() - 0.4) < limit() * math.sqrt(1 / 49.5 / 1200)  # variance 1 - I1/I0 < 1 / 49.5


def test_posterior_predictive_of_a_normal_mean(limit):
    """Conjugate: the predictive distribution of a new datum is normal, with the posterior's variance added."""
    y = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64)

    def location(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    variance = 1 / (0.25 + 4)
    mean = variance * float(y.sum())
    target = bk.Target.from_pyro(location, y, compile=False)
    noise = torch.randn(COUNT, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    drawn = target.predictive(mean + math.sqrt(variance) * noise, torch.zeros(1, dtype=F64))["y"]
    check_normal(drawn, mean, math.sqrt(1 + variance), limit)


def test_counts_of_one_number_of_trials_are_drawn(limit):
    target = bk.exact.get("beta_binomial").target()  # counts are uniform on 0 to 10 under its prior
    counts = bk.prior_predictive(target, num_draws=2000, seed=0).posterior_predictive["successes"].double()
    assert abs(float(counts.mean()) - 5) < limit() * (10 / 2000) ** 0.5
    assert abs(float((counts**2).mean()) - 35) < limit() * float((counts**2).std()) / 2000**0.5


def test_prior_predictive(limit):
    draws = bk.prior_predictive(grouped, X, GROUP, Y, num_draws=COUNT, compile=False, seed=3)
    drawn = draws.posterior_predictive["y"][0]
    check_normal(draws["mean"][0, :, None], 0.0, 2.0, limit)
    check_normal(drawn, 0.0, (4.25 * X**2 + 0.09).sqrt(), limit)
    assert draws.num_chains == 1 and (draws.beta == 0).all()
    groups = draws.to_datasets()
    assert groups.keys() == {"prior", "prior_predictive"} and groups["prior"]["effect"].dims == (
        "chain",
        "draw",
        "groups",
    )

    def improper(y):
        mean = pyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.raises(SettingsError, match="mean"):
        bk.prior_predictive(improper, torch.tensor(0.0))


def test_what_cannot_be_drawn_is_named(target, u):
    with pytest.raises(UnknownNameError, match="did you mean 'effect'"):
        target.predictive(u, redraw=["efect"])
    with pytest.raises(ModelError, match="fails with these arguments.*grouped"):
        target.predictive(u[:2], X)
    functions = bk.Target.from_functions(lambda u: 0 * u[..., 0], lambda u: -u.square().sum(-1), 2)
    with pytest.raises(ModelError, match="from a model only"):
        functions.predictive(torch.zeros(1, 2, dtype=F64))

    def with_factor(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.factor("likelihood", -((y - mean) ** 2).sum())

    with pytest.raises(UnsupportedSiteError, match="no distribution to draw data from"):
        bk.Target.from_pyro(with_factor, Y).predictive(torch.zeros(1, 1, dtype=F64))


def test_a_predictive_that_keeps_the_data_is_noticed(target, u, limit, monkeypatch):
    """The mutation: observed sites keep their data."""
    from bayeskit._logdensity import pyro_density as pyro_density

    monkeypatch.setattr(pyro_density, "_draw_like", lambda name, fn, value, *_: value)
    level = torch.tensor([0.2, 1.0, -0.5], dtype=F64)[GROUP] * X
    with pytest.raises(AssertionError):
        check_normal(target.predictive(u)["y"], level, 0.3, limit)
