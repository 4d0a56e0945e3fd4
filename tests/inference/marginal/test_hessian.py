"""The structure of Hessians as it is found: groups, chains, few products, dense."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from hierarchies import FLOAT, HEIGHTS, counted, gradient_error, marginal, points

import bayeskit as bk
from bayeskit._core import inputs as inputs
from bayeskit.errors import SettingsError
from bayeskit.inference.marginal import _hessian as hessian


@pytest.mark.calibration
def test_groups_and_chains_are_found():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        first = pyro.sample("first", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", len(y)):
            level = pyro.sample("level", dist.Normal(0.0, scale))
            slope = pyro.sample("slope", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(level + slope, 0.5), obs=y)
        pyro.sample("x", dist.Normal(first, 0.5), obs=y[0])

    target = bk.Target.from_pyro(model, HEIGHTS)
    some = bk.marginalize(target, ["slope", "level"])
    assert (some.over, some.curvature) == (("level", "slope"), "normal: 5 groups of 2")
    more = bk.marginalize(target, ["level", "slope", "first"])
    assert more.curvature == "normal: 6 groups of up to 2"
    u = some.unconstrain({"scale": torch.tensor(0.8), "first": torch.tensor(0.3)})
    total = dist.Normal(0.0, math.sqrt(2 * 0.8**2 + 0.5**2)).log_prob(HEIGHTS).sum()
    given = dist.Normal(0.3, 0.5).log_prob(HEIGHTS[0])
    without = dist.Normal(0.0, math.sqrt(1.25)).log_prob(HEIGHTS[0])
    assert float(some.log_likelihood(u)) == pytest.approx(float(total + given), rel=1e-7)
    assert float(more.log_likelihood(u[:1])) == pytest.approx(float(total + without), rel=1e-7)


@pytest.mark.calibration
def test_a_random_walk_is_coloured():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        level = pyro.sample("level", dist.Normal(torch.zeros_like(y), 5.0).to_event(1))
        pyro.factor("steps", dist.Normal(0.0, scale).log_prob(level.diff()).sum())
        pyro.sample("y", dist.Normal(level, 1.0).to_event(1), obs=y)

    target = marginal(model, ["level"], HEIGHTS)
    assert target.curvature == "normal: dense, 5, from 3 products"
    u = target.unconstrain({"scale": torch.tensor([0.4, 1.3])})
    steps = torch.diff(torch.eye(5, dtype=FLOAT), dim=0)
    for row, scale in zip(u, (0.4, 1.3), strict=True):
        precision = torch.eye(5, dtype=FLOAT) * (1 + 1 / 25) + steps.T @ steps / scale**2
        mean = torch.linalg.solve(precision, HEIGHTS)
        height = dist.Normal(0.0, 5.0).log_prob(mean).sum() + dist.Normal(mean, 1.0).log_prob(HEIGHTS).sum()
        height = height + dist.Normal(0.0, scale).log_prob(mean.diff()).sum()
        exact = height + 2.5 * math.log(2 * math.pi) - 0.5 * precision.logdet()
        assert float(target.log_likelihood(row)) == pytest.approx(float(exact), rel=1e-7)
    assert gradient_error(target, u) < 1e-8


def test_a_coupling_in_a_part_of_space_is_seen():
    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(0.0 * y, 1.0).to_event(1))
        pyro.factor("data", -torch.relu(z[0] + z[1] - 1.8).pow(3) - (z - level).square().sum())

    # Three draws may show it, and then its group is known.
    assert marginal(model, ["z"], HEIGHTS).curvature in {"dense, 5", "4 groups of up to 2"}


def test_a_hessian_beyond_the_memory_is_refused_before_it_is_made(monkeypatch):
    target = bk.Target.from_pyro(counted, HEIGHTS.abs().round())
    monkeypatch.setattr(inputs, "_memory", lambda: 300.0)
    with pytest.raises(SettingsError, match="Hessian of 'effect' has 5 x 5 entries"):
        bk.marginalize(target, ["effect"])


def walk(y):
    """Poisson counts along a random walk."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    x = pyro.sample("x", dist.Normal(torch.zeros_like(y), 5.0).to_event(1))
    pyro.factor("walk", dist.Normal(x[:-1], scale).log_prob(x[1:]).sum())
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def bent(y):
    """A random walk of order two, whose likelihood is not quadratic either."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    x = pyro.sample("x", dist.StudentT(8.0, torch.zeros_like(y), 5.0).to_event(1))
    pyro.factor("walk", dist.Normal(2 * x[1:-1] - x[:-2], scale).log_prob(x[2:]).sum())
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


@pytest.mark.long
@pytest.mark.parametrize(("model", "bandwidth"), [(walk, 1), (bent, 2)])
def test_a_long_chain_has_the_value_and_the_gradient_of_a_dense_one(model, bandwidth, monkeypatch):
    y = torch.poisson(torch.full((101,), 1.5), generator=torch.Generator().manual_seed(4)).to(FLOAT)
    chain = marginal(model, ["x"], y)
    assert chain.curvature == f"chain of 101, bandwidth {bandwidth}"
    monkeypatch.setattr(hessian, "_LONG", 1000)
    dense = marginal(model, ["x"], y)
    assert dense.curvature.startswith("dense, 101")
    u = points(chain, 3, 0.3)
    value, gradient = chain.value_and_grad(u)
    again, other = dense.value_and_grad(u)
    torch.testing.assert_close(value, again, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


@pytest.mark.calibration
def test_long_groups_are_found_without_a_dense_pattern():
    y = torch.poisson(torch.full((150,), 1.5), generator=torch.Generator().manual_seed(4)).to(FLOAT)
    target = marginal(counted, ["effect"], y)
    assert target.curvature == "150 groups of 1"
    assert gradient_error(target, points(target, 2, 0.3)) < 1e-8
