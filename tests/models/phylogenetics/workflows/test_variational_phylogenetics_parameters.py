"""Free parameters of substitution and site rates in variational inference: densities, gradients, and the evidence."""

import math

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference.objectives import IWAE, Linear
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    K80,
    Alignment,
    ForestLikelihood,
    GammaRates,
    InvariantSites,
    SubsplitBayesianNetwork,
    all_topologies,
)
from bayeskit.models.phylogenetics.workflows import LearningRates, LogNormalLengths, variational_inference
from bayeskit.models.phylogenetics.workflows._parameter_guide import ParameterGuide
from bayeskit.models.phylogenetics.workflows._variational._ascent import Training
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._target import TreeTarget

DOUBLE = torch.float64
FOUR = Alignment.from_sequences({"A": "GTCATTATCC", "B": "CTCATTTTCC", "C": "ATCACTTTCT", "D": "TTCATTCTRT"})
TOPOLOGIES = all_topologies(FOUR.taxa)
LIKE = torch.empty(0, dtype=DOUBLE)
PRIORS = {
    "positive": dist.LogNormal(torch.tensor(1.0), torch.tensor(0.7)),
    "share": dist.Beta(torch.tensor(2.0), torch.tensor(3.0)),
    "simplex": dist.Dirichlet(torch.tensor([2.0, 1.0, 3.0])),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def somewhere(guide):
    return 0.3 * torch.randn(guide.num_parameters, generator=generator(1), dtype=DOUBLE)


def test_draws_have_the_density_that_is_computed_for_given_values():
    guide = ParameterGuide(PRIORS)
    assert guide.dim == 4 and guide.num_parameters == 4 + 4 + 6
    drawn = guide.rsample(somewhere(guide), 50, generator())
    assert (guide.log_prob(somewhere(guide), drawn.values) - drawn.log_prob).abs().max() < 1e-9
    expected = sum(prior.log_prob(drawn.values[name]) for name, prior in PRIORS.items())
    assert (guide.log_prior(drawn.values) - expected).abs().max() < 1e-5  # of priors in single precision
    nothing = ParameterGuide({})
    assert nothing.num_parameters == 0 and nothing.rsample(torch.zeros(0), 5, generator()).values == {}


@pytest.mark.parametrize("name", ["positive", "share"])
def test_densities_integrate_to_one(name):
    guide = ParameterGuide({name: PRIORS[name]})
    coordinates = torch.linspace(-12.0, 12.0, 20_001, dtype=DOUBLE)
    values = {"positive": coordinates.exp(), "share": coordinates.sigmoid()}[name]
    slope = {"positive": values, "share": values * (1 - values)}[name]
    density = guide.log_prob(torch.tensor([0.4, -0.3], dtype=DOUBLE), {name: values}).exp() * slope
    assert abs(float(torch.trapezoid(density, coordinates)) - 1) < 1e-9


@pytest.mark.parametrize("method", ["rsample", "draw_defensive"])
def test_weights_for_a_known_density_have_mean_one(method, limit):
    guide = ParameterGuide(PRIORS)
    parameters = torch.zeros(guide.num_parameters, dtype=DOUBLE)
    if method == "draw_defensive":
        parameters = somewhere(guide) - 0.5
    values, log_q = getattr(guide, method)(parameters, 20_000, generator(2))
    # A narrower normal distribution at the same mean has bounded weights, and so has the prior where it is defended.
    narrow = parameters.clone()
    narrow[guide.dim : 2 * guide.dim] -= 0.4
    narrow[2 * guide.dim :] *= math.exp(-0.4)
    for log_p in [guide.log_prob(narrow, values)] + [guide.log_prior(values)] * (method == "draw_defensive"):
        weights = (log_p - log_q).exp()
        assert abs(float((weights.mean() - 1) / (weights.std() / 20_000**0.5))) < limit(3)


def model(substitution, site_rates, lengths=None):
    likelihood = ForestLikelihood(FOUR, substitution, site_rates=site_rates)
    priors = substitution.priors(LIKE) | site_rates.priors(LIKE)
    target = TreeTarget(likelihood, dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)), priors)
    network = SubsplitBayesianNetwork.from_topologies(TOPOLOGIES)
    return target, TreeFamily(network, lengths or LogNormalLengths(), target.guide)


def test_gradients_by_parameters_are_finite_differences():
    target, family = model(GTR(), InvariantSites(others=GammaRates()))
    algorithm = Training(family, target.log_densities, IWAE(4), LearningRates(), Linear(1), 1)
    parameters = family.start(generator())
    count = target.guide.num_parameters
    assert count == 10 + 10 + 45
    parameters[-count:] = 0.2 * somewhere(target.guide)
    direction = torch.zeros_like(parameters)
    direction[-count:] = torch.randn(count, dtype=DOUBLE, generator=generator(5))
    leaf = parameters.clone().requires_grad_()
    value, _ = algorithm.estimate(leaf, 0.7, generator(6))
    slope = float(torch.autograd.grad(value, leaf)[0] @ direction)
    step = 2e-6
    ends = [float(algorithm.estimate(parameters + h * direction, 0.7, generator(6))[0]) for h in (step, -step)]
    assert abs(slope - (ends[0] - ends[1]) / (2 * step)) < 1e-5 * max(1.0, abs(slope))


def by_prior_draws(substitution, site_rates=None, count=20_000):
    """Evidence and its error, by the mean likelihood of draws from all priors: unbiased, and good for short data."""
    stream = torch.Generator().manual_seed(11)
    row = torch.randint(3, (count,), generator=stream)
    priors = substitution.priors(LIKE) | ({} if site_rates is None else site_rates.priors(LIKE))
    lengths = -torch.rand(count, 5, generator=stream, dtype=DOUBLE).log() / 10
    with torch.random.fork_rng():
        torch.random.set_rng_state(stream.get_state())
        values = {name: prior.sample((count,)) for name, prior in priors.items()}
    likelihood = ForestLikelihood(FOUR, substitution, site_rates=site_rates)
    log_likelihood = likelihood.log_likelihood(TOPOLOGIES[row.numpy()], lengths, **values)
    share = (log_likelihood - log_likelihood.max()).exp()
    evidence = float(log_likelihood.max() + share.mean().log())
    error = float(share.std() / share.mean()) / math.sqrt(count)
    mean = {name: (value.movedim(0, -1) * share).mean(-1) / share.mean() for name, value in values.items()}
    return evidence, error, mean


def fitted(**settings):
    rates = LearningRates(0.03, 0.03, factor=0.5, every=60)
    settings = {"num_steps": 200, "learning_rates": rates, "annealing": Linear(50, start=0.01)} | settings
    return variational_inference(FOUR, TOPOLOGIES, progress=False, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("substitution", "site_rates"), [(K80(), None), (GTR(), GammaRates())], ids=["K80", "GTR with Gamma rates"]
)
def test_the_evidence_integrates_over_parameters(substitution, site_rates, limit, monkeypatch):
    truth, error, mean = by_prior_draws(substitution, site_rates)
    found = fitted(substitution=substitution, site_rates=site_rates)
    evidence = found.log_evidence(3000)
    assert evidence.trusted and error < 0.1 and evidence.standard_error < 0.1
    assert abs(evidence.log_evidence - truth) < limit(2) * math.hypot(error, evidence.standard_error)
    drawn = found.weighted_trees(3000, seed=3)
    weights = drawn.log_weight.softmax(0)
    for name, expected in mean.items():
        rows = drawn.parameters[name].reshape(3000, -1)
        average = weights @ rows
        spread = (weights.square() @ (rows - average).square()).sqrt()
        # The draws of the prior have fewer effective draws than these, so that their error is at most as large again.
        assert ((average - expected.reshape(-1)).abs() < limit(10) * 2 * spread).all()
    # The mutation: densities that forget the Jacobian of the coordinates.
    monkeypatch.setattr(ParameterGuide, "_log_jacobian", lambda self, coordinates: coordinates.new_zeros(()))
    wrong = found.log_evidence(3000)
    assert abs(wrong.log_evidence - truth) > limit(2) * math.hypot(error, wrong.standard_error)


def test_parameters_reach_arviz_and_the_checkpoint(tmp_path):
    settings = {"substitution": HKY85(), "site_rates": GammaRates(), "annealing": Linear(10, start=0.1)}
    whole = fitted(**settings, num_steps=12)
    path = tmp_path / "run"
    fitted(**settings, num_steps=5, checkpoint=path)
    again = fitted(**settings, num_steps=12, checkpoint=path)
    assert torch.equal(whole.parameters, again.parameters)
    narrow = HKY85(kappa=dist.LogNormal(torch.tensor(1.0), torch.tensor(0.1)))
    for other in (HKY85(2.0), narrow):
        with pytest.raises(CheckpointError, match="another model or of other data"):
            fitted(**(settings | {"substitution": other}), num_steps=12, checkpoint=path)
    drawn = whole.sample_parameters(30, seed=4)
    assert {name: value.shape for name, value in drawn.items()} == {
        "kappa": (30,),
        "base_frequencies": (30, 4),
        "shape": (30,),
    }
    posterior = whole.to_arviz(30, seed=4)["posterior"]
    for name, value in drawn.items():
        assert posterior[name].values[0].tolist() == value.tolist()


class Improper(dist.LogNormal):
    """A prior that cannot be sampled."""

    def sample(self, *shape):
        raise NotImplementedError


def test_a_prior_that_cannot_be_sampled_is_named():
    prior = Improper(torch.tensor(0.0), torch.tensor(1.0))
    with pytest.raises(SettingsError, match="kappa: the prior Improper cannot be sampled"):
        fitted(substitution=K80(prior))
