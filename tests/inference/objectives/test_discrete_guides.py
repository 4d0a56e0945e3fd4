"""Gradients for a guide with one binary site, every outcome of all particles enumerated."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients._score_function import importance_weighted_estimate
from bayeskit.inference.objectives import IWAE
from bayeskit.inference.objectives._evidence_lower_bound import STL
from bayeskit.inference.objectives._importance_weighted import Renyi, leave_one_out_renyi, renyi_bound, renyi_estimate
from bayeskit.inference.objectives._objective import log_mean_weight as log_mean_exp
from bayeskit.inference.objectives._reweighted_wake_sleep import ReweightedWakeSleep, reweighted_estimate
from bayeskit.inference.objectives._sumo import SUMO, GeometricTail, sumo_estimate
from bayeskit.inference.objectives._thermodynamic import thermodynamic_estimate

# z ~ Bernoulli(0.3), x given z ~ N(-1 or 1.5, 1), x = 0.7, guide Bernoulli with logit 0.4.
LOG_MARGINAL = -1.879006
BOUND = {1: -1.880816, 2: -1.879919, 4: -1.879464}
GRADIENT = {1: -0.029383, 2: -0.014887, 4: -0.007484}
LOGIT, SHIFT = 0.4, 0.0
MEANS = torch.tensor([-1.0, 1.5], dtype=torch.float64)


def logit_of(value: float = LOGIT) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


class Enumeration:
    """All outcomes of ``count`` particles as a batch: densities ``(count, 2**count)`` and their probabilities."""

    def __init__(self, count: int, logit: Tensor, shift: Tensor | float = SHIFT) -> None:
        z = torch.tensor(list(itertools.product((0, 1), repeat=count))).T
        log_q = torch.stack([logsigmoid(-logit), logsigmoid(logit)])
        log_p = torch.tensor([0.7, 0.3], dtype=torch.float64).log()
        log_p = log_p - 0.5 * (0.7 - MEANS - shift) ** 2 - 0.5 * math.log(2 * math.pi)
        self.log_guide, self.log_model = log_q[z], log_p[z]
        self.log_weight = self.log_model - self.log_guide
        self.probability = self.log_guide.sum(0).exp()

    def expected(self, outcome: Tensor) -> Tensor:
        return self.probability @ outcome

    def gradient(self, estimate: Tensor, leaf: Tensor) -> Tensor:
        """Return the expectation of the gradient that each outcome's estimate carries."""
        return torch.autograd.grad(self.probability.detach() @ estimate, leaf, retain_graph=True)[0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_importance_weighted_bound_and_its_gradient(count):
    logit = logit_of()
    cases = Enumeration(count, logit)
    estimate = importance_weighted_estimate(cases.log_weight, cases.log_guide)
    assert abs(float(cases.expected(estimate).detach()) - BOUND[count]) < 1e-6
    assert abs(float(cases.gradient(estimate, logit)) - GRADIENT[count]) < 1e-6
    # Without the score term, as one would write it for reparameterised draws, the gradient is another.
    assert abs(float(cases.gradient(log_mean_exp(cases.log_weight), logit)) - GRADIENT[count]) > 1e-3


ORDERS = [0.0, 0.5, 1.0 - 1e-4, 1.0, 1.0 + 1e-9, 2.0, -1.0, -math.inf, math.inf]


@pytest.mark.parametrize("alpha", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_renyi_gradients_for_every_order(alpha, count):
    logit = logit_of()
    cases = Enumeration(count, logit)
    exact = torch.autograd.grad(cases.expected(renyi_bound(cases.log_weight, alpha)), logit)[0]
    cases = Enumeration(count, logit)
    found = cases.gradient(renyi_estimate(cases.log_weight, alpha, cases.log_guide), logit)
    assert abs(float(found - exact)) < 1e-10
    assert count > 1 or abs(float(exact) - GRADIENT[1]) < 1e-6


def test_renyi_bounds_meet_their_neighbours():
    log_weight = torch.linspace(-3.0, 2.0, 12, dtype=torch.float64).reshape(4, 3) ** 2
    assert torch.equal(renyi_bound(log_weight, 0.0), log_mean_exp(log_weight))
    assert torch.equal(renyi_bound(log_weight, 1.0), log_weight.mean(0))
    for alpha in (1 - 1.001e-3, 1 - 0.999e-3, 1 + 0.999e-3):  # either side of the expansion about the mean
        exact = (((1 - alpha) * log_weight).exp().mean(0)).log() / (1 - alpha)
        assert torch.allclose(renyi_bound(log_weight, alpha), exact, atol=1e-11, rtol=0)
    orders = sorted(ORDERS)
    values = torch.stack([renyi_bound(log_weight, a) for a in orders])
    assert bool((values.diff(dim=0) <= 1e-9).all()), "the bound falls as alpha rises"
    assert torch.allclose(renyi_bound(log_weight, -400.0), log_weight.amax(0), atol=1e-12 + math.log(4) / 401, rtol=0)
    assert torch.allclose(renyi_bound(log_weight, 401.0), log_weight.amin(0), atol=1e-12 + math.log(4) / 400, rtol=0)


@pytest.mark.parametrize("alpha", ORDERS)
def test_a_particle_does_not_see_itself_in_its_baseline(alpha):
    log_weight = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    for k, other in itertools.product(range(4), (-30.0, 0.5, 30.0)):
        changed = log_weight.clone()
        changed[k] = other
        before, after = (leave_one_out_renyi(w, alpha)[k] for w in (log_weight, changed))
        assert abs(float(before - after)) < 1e-5  # at alpha = 1 + 1e-9 and 30 nats, of rounding


@pytest.mark.parametrize("alpha", [math.nan, True, "1"])
def test_alpha_must_be_a_number(alpha):
    with pytest.raises(SettingsError, match="alpha"):
        Renyi(alpha)


@pytest.mark.parametrize("count", [2, 4])
def test_the_guide_of_wake_sleep_follows_the_weighted_score(count):
    logit, shift = logit_of(), logit_of(SHIFT)
    cases = Enumeration(count, logit, shift)
    posterior = (cases.log_weight - cases.log_weight.logsumexp(0)).exp()
    ones = cases.log_guide.detach() == logsigmoid(logit.detach())
    score = ones.double() - torch.sigmoid(logit.detach())
    exact = cases.probability @ (posterior * score).sum(0)
    bound = cases.probability.detach() @ log_mean_exp(cases.log_model - cases.log_guide.detach())
    model = torch.autograd.grad(bound, shift, retain_graph=True)[0]
    estimate = reweighted_estimate(cases.log_weight, cases.log_guide, wake_phi=2.0)
    assert abs(float((cases.expected(estimate).detach()) - BOUND[count])) < 1e-6
    guide, model_too = torch.autograd.grad(cases.probability.detach() @ estimate, [logit, shift])
    assert abs(float((guide - 2 * exact).detach())) < 1e-12
    assert abs(float(model - model_too)) < 1e-12


def test_the_bias_of_the_wake_update_falls_as_one_over_the_particles():
    logit = logit_of()
    right = math.exp(math.log(0.3) - 0.5 * 0.8**2 - 0.5 * math.log(2 * math.pi) - LOG_MARGINAL) - float(
        torch.sigmoid(logit.detach())
    )
    bias = []
    for count in (1, 2, 4, 8):
        cases = Enumeration(count, logit)
        bias.append(abs(float(cases.gradient(reweighted_estimate(cases.log_weight, cases.log_guide), logit)) - right))
    assert bias[0] == pytest.approx(abs(right), abs=1e-6), "a single particle has weight one and score zero"
    ratios = [a / b for a, b in itertools.pairwise(bias)]
    assert all(1.9 < r < 2.3 for r in ratios[1:]), ratios


@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_interval_of_the_thermodynamic_objective_is_the_elbo(count):
    logit = logit_of()
    cases = Enumeration(count, logit)
    estimate = thermodynamic_estimate(cases.log_model, cases.log_guide, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert abs(float(cases.expected(estimate).detach()) - BOUND[1]) < 1e-6
    assert abs(float(cases.gradient(estimate, logit)) - GRADIENT[1]) < 1e-6


def replicated(objective, count: int = 40_000, at: float = LOGIT) -> Tensor:
    """Return the gradient in the logit, to be ascended, for independent replicates of the datum."""
    logit = torch.full((count,), at, dtype=torch.float64, requires_grad=True)

    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(x.new_tensor(0.3)))
            pyro.sample("x", dist.Normal(2.5 * z - 1.0, 1.0), obs=x)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=logit))

    with global_stream(new_generator(1, stream="discrete")):
        loss = objective.differentiable_loss(model, guide, torch.full((count,), 0.7, dtype=torch.float64))
    return -torch.autograd.grad(loss, logit)[0]


def second_moment(count: int, logit: Tensor) -> Tensor:
    """Return minus the expected square, about -1, of the randomly stopped sum with every tail index taken."""
    cases = Enumeration(count, logit)
    survival = GeometricTail(0.6).survival(torch.arange(1, count))
    return -cases.expected((sumo_estimate(cases.log_weight, survival) + 1.0).square())


class Always(GeometricTail):
    """A tail that stops at 3."""

    def sample(self) -> int:
        return 3


def exact_gradient(objective) -> float:
    logit = logit_of()
    count = objective.num_particles
    if isinstance(objective, SUMO):
        return float(torch.autograd.grad(second_moment(count + 3, logit), logit)[0])
    if isinstance(objective, ReweightedWakeSleep):
        cases = Enumeration(count, logit)
        return float(cases.gradient(reweighted_estimate(cases.log_weight, cases.log_guide), logit))
    if isinstance(objective, STL):
        return GRADIENT[1]
    alpha = objective.alpha if isinstance(objective, Renyi) else 0.0
    expected = Enumeration(count, logit)
    return float(torch.autograd.grad(expected.expected(renyi_bound(expected.log_weight, alpha)), logit)[0])


OBJECTIVES = [
    IWAE(2),
    IWAE(4),
    STL(1),
    STL(4),
    Renyi(0.5, 3),
    Renyi(-math.inf, 3),
    SUMO(Always(0.6), centre=-1.0),
    ReweightedWakeSleep(4),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_simulated_gradients_agree_with_enumeration(objective, limit):
    found = replicated(objective)
    z = (found.mean() - exact_gradient(objective)) / (found.std() / len(found) ** 0.5)
    assert abs(float(z)) < limit()


def test_with_several_particles_stl_vanishes_at_a_discrete_posterior():
    exact = math.log(0.3) - math.log(0.7) - 0.5 * 0.8**2 + 0.5 * 1.7**2
    assert float(replicated(STL(4), 500, exact).abs().max()) < 1e-12
    assert float(replicated(IWAE(4), 500, exact).std()) > 0.01
