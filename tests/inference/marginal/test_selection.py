"""The mode from which others are found, several modes, none, and sites that cannot be integrated out."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from hierarchies import FLOAT, HEIGHTS, counted, marginal, passed, trials

import bayeskit as bk
from bayeskit.errors import AccuracyWarning, InitializationError, ModelError
from bayeskit.inference import evidence
from bayeskit.inference.samplers._starts import starting_points


def two_humps(y):
    """A coordinate that is known up to its sign only."""
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        z = pyro.sample("z", dist.Normal(0.2, scale))
        pyro.sample("y", dist.Normal(z.square(), 0.5), obs=y)


@pytest.mark.long
def test_several_modes_are_flagged_and_estimates_repeat_it():
    with pytest.warns(AccuracyWarning, match="density of 'z' has several modes given the other sites"):
        target = marginal(two_humps, ["z"], HEIGHTS.abs() + 2)
    assert len(target.problems) == 1
    draws = bk.sample(target, num_samples=200, progress=False)
    found = evidence.bridge_sampling(target, draws)
    assert not found.trusted
    assert found.warnings[-1] == target.problems[0]


@pytest.mark.calibration
@pytest.mark.filterwarnings("error")
def test_one_mode_is_not_taken_for_several():
    y = torch.poisson(torch.full((30,), 2.0), generator=torch.Generator().manual_seed(1)).to(FLOAT)
    for target in (marginal(counted, ["effect"], y), marginal(passed, ["intercept"], trials())):
        assert target.problems == ()


@pytest.mark.long
def test_vague_priors_do_not_lead_the_search_astray():
    """All draws from these priors have rates beyond any number, or of nothing."""

    def model(y):
        place = torch.arange(len(y), dtype=FLOAT)
        level = pyro.sample("level", dist.Normal(0.0, torch.tensor(1000.0, dtype=FLOAT)))
        slope = pyro.sample("slope", dist.Normal(0.0, torch.tensor(300.0, dtype=FLOAT)))
        size = pyro.sample("size", dist.HalfNormal(1.0))
        covariance = size**2 * (-(place[:, None] - place).abs() / 3).exp()
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((level + slope * place / 8 + f).exp()), obs=y)

    target = marginal(model, ["f"], torch.tensor([2.0, 3, 1, 4, 6, 2, 3, 5], dtype=FLOAT))
    start = target.density.start
    value, gradient = target.value_and_grad(start.unsqueeze(0))
    assert float(gradient.norm()) < 1
    assert float(target.log_likelihood(start)) > -20
    # Chains may begin there, and each is where the density is not negligible.
    points = starting_points(target, 4, torch.ones(4, dtype=FLOAT), torch.Generator().manual_seed(1))
    assert bool((target.log_density(points) > value - 200).all())
    assert len(points.unique(dim=0)) == 4


def test_a_density_without_a_mode_is_refused():
    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("data", z.square() + level)

    with pytest.raises(InitializationError, match=r"no mode of 'z' .* Remedy: .* proper prior, .* log-concave"):
        marginal(model, ["z"], HEIGHTS)


def test_a_prior_that_is_a_sum_is_refused():
    def model(y):
        side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        level = pyro.sample("level", dist.Normal(4.0 * side, 1.0))
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(level + effect, 1.0), obs=y[0])

    with pytest.raises(ModelError, match="prior of site 'level' depends on a summed-out site"):
        marginal(model, ["effect"], HEIGHTS)
