"""Distributions whose own densities cannot be batched: the same values, without the loop over vectors."""

import math
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.distributions.distribution import COERCIONS
from target_checks import F64, assert_close, double, normal, points

from bayeskit import Target
from bayeskit._core.evaluation import with_gradient_loop
from bayeskit._core.randomness import new_generator
from bayeskit._logdensity import pyro_distributions as batching
from bayeskit._logdensity.combinators import Replicas
from bayeskit.errors import SlowModelWarning, UnsupportedSiteError

COUNTS = torch.tensor([[3.0, 0.0, 2.0, 0.0], [0.0, 4.0, 1.0, 0.0]], dtype=F64)  # the last never happens
IMPOSSIBLE = torch.tensor([0.0, 0.0, 0.0, -math.inf], dtype=F64)
WEIGHTS = torch.tensor([0.4, -1.0, 0.3, 0.8], dtype=F64)
SEEN = torch.tensor([True, False])


def logits_of(x):
    return (x * WEIGHTS).log_softmax(-1) + IMPOSSIBLE


def shares_of(x):
    shares = (x * WEIGHTS + IMPOSSIBLE).softmax(-1)
    return shares.where(shares > 0, 0.0)


def flat(x, y):
    pyro.sample("y", dist.Multinomial(5, logits=logits_of(x)), obs=y[0])


def probabilities(x, y):
    pyro.sample("y", dist.Multinomial(5, probs=shares_of(x)), obs=y[0])


def read_total(x, y):
    pyro.sample("y", dist.Multinomial(int(y[0].sum()), logits=logits_of(x)), obs=y[0])


def plated(x, y):
    with pyro.plate("rows", 2):
        pyro.sample("y", dist.Multinomial(5, logits=logits_of(x)), obs=y)


def independent(x, y):
    logits = logits_of(torch.stack([x, 2 * x]).unsqueeze(-1))
    pyro.sample("y", dist.Multinomial(5, logits=logits).to_event(1), obs=y)


def expanded(x, y):
    pyro.sample("y", dist.Multinomial(5, logits=logits_of(x)).expand([2]).to_event(1), obs=y)


def masked_site(x, y):
    with pyro.plate("rows", 2), poutine.mask(mask=SEEN):
        pyro.sample("y", dist.Multinomial(5, logits=logits_of(x)), obs=y)


def masked_distribution(x, y):
    with pyro.plate("rows", 2):
        pyro.sample("y", dist.Multinomial(5, logits=logits_of(x)).mask(SEEN), obs=y)


def scaled(x, y):
    with pyro.plate("rows", 2), poutine.scale(scale=0.3):
        pyro.sample("y", dist.Multinomial(5, logits=logits_of(x)), obs=y)


def mixed(x, y):
    components = dist.Multinomial(5, logits=torch.stack([logits_of(x), logits_of(-x)]))
    pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(logits=torch.stack([x, -x])), components), obs=y[0])


def summed_out(x, y):
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Bernoulli(x.sigmoid()), infer={"enumerate": "parallel"})
        logits = logits_of(torch.where(z > 0, x, -x).unsqueeze(-1))
        pyro.sample("y", dist.Multinomial(5, logits=logits), obs=y)


def ordered(x, y):
    cutpoints = torch.tensor([-1.0, 0.2, 1.5], dtype=F64)
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.OrderedLogistic(x * WEIGHTS, cutpoints), obs=torch.tensor([0, 3, 1, 2]))


def ordered_events(x, y):
    cutpoints = torch.stack([x - 1, x, x + 2])
    pyro.sample("y", dist.OrderedLogistic(x, cutpoints).expand([4]).to_event(1), obs=torch.tensor([0, 3, 1, 2]))


def sparse_dirichlet(x, y):
    with pyro.plate("rows", 2):
        pyro.sample("y", dist.DirichletMultinomial((x * WEIGHTS).exp(), 5, is_sparse=True), obs=y)


def sparse_poisson(x, y):
    pyro.sample("y", dist.Poisson((x * WEIGHTS).exp(), is_sparse=True).to_event(1), obs=y[0])


def zero_inflated(x, y):
    pyro.sample("y", dist.ZeroInflatedPoisson((x * WEIGHTS).exp(), gate=x.sigmoid()).to_event(1), obs=y[0])


def skewed_angles(x, y):
    base = dist.VonMises(x * torch.ones(2, dtype=F64), 1.5).to_event(1)
    skewness = torch.tensor([0.1, -0.3], dtype=F64)
    pyro.sample("y", dist.SineSkewed(base, skewness), obs=torch.tensor([0.2, 1.1], dtype=F64))


LIKELIHOODS = (
    *(flat, probabilities, read_total, plated, independent, expanded, masked_site, masked_distribution, scaled),
    *(mixed, ordered, ordered_events, sparse_dirichlet, sparse_poisson, zero_inflated, skewed_angles),
)


@dataclass(frozen=True)
class Model:
    """One normal latent site with a likelihood."""

    likelihood: Any

    def __call__(self, y):
        self.likelihood(pyro.sample("x", dist.Normal(y.new_zeros(()), 1.0)), y)


def target_of(likelihood) -> Target:
    target = Target.from_pyro(Model(likelihood), COUNTS, compile=False)  # the warning of a loop is an error here
    assert not target.loops
    return target


def own_terms(likelihood, x):
    """Log likelihood and its gradient at one value, as Pyro's own handlers give them."""
    x = x.clone().requires_grad_(True)
    with double():
        log_likelihood = poutine.trace(lambda: likelihood(x, COUNTS)).get_trace().log_prob_sum()
    (gradient,) = torch.autograd.grad(log_likelihood, x)
    return log_likelihood.detach(), gradient


def check(likelihood):
    target = target_of(likelihood)
    u = points(target)
    expected = [own_terms(likelihood, x) for x in u[:, 0]]
    values, gradients = (torch.stack(column) for column in zip(*expected, strict=True))
    assert values.isfinite().all()
    log_prior = -0.5 * u[:, 0] ** 2 - 0.5 * math.log(2 * math.pi)
    for result in (target.log_likelihood(u), target.value_and_grad(u)[0] - log_prior):
        assert_close(result, values, 1e-12)
    assert_close(target.value_and_grad(u)[1][:, 0], gradients - u[:, 0], 1e-12)
    assert not target._engine._eager  # traced, too


@pytest.mark.calibration
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_distributions_own(likelihood):
    check(likelihood)


def test_counts_below_a_summed_out_site():
    target = target_of(summed_out)
    u = points(target)
    expected = []
    for x in u[:, 0]:
        each = [torch.distributions.Multinomial(5, logits=logits_of(s * x)).log_prob(COUNTS) for s in (1, -1)]
        share = torch.stack([x.sigmoid().log(), (-x).sigmoid().log()])
        expected.append((torch.stack(each, -1) + share).logsumexp(-1).sum())
    assert_close(target.log_likelihood(u), torch.stack(expected), 1e-12)


def test_a_hand_written_density():
    u = torch.tensor([[0.7]], dtype=F64)
    counts, logits = COUNTS[0][:3], (u[0] * WEIGHTS[:3]).log_softmax(-1)
    expected = math.lgamma(6) - (counts + 1).lgamma().sum() + (counts * logits).sum()
    assert_close(target_of(flat).log_likelihood(u), expected.unsqueeze(0), 1e-12)


@pytest.mark.parametrize("likelihood", [flat, plated, read_total, ordered, sparse_dirichlet], ids=lambda f: f.__name__)
def test_simulated_data_share_the_density(likelihood):
    target = target_of(likelihood)
    replicas, generator = Replicas(target, 1), new_generator(2)
    u = points(target)
    for _ in range(2):
        given = replicas.given_observed(replicas.simulate(generator).observed)
        values, _ = given.value_and_grad(u)
        single = with_gradient_loop(given.density.joint)(u, torch.ones(len(u), dtype=F64))
        assert_close(values, single.log_density, 1e-12)


def test_arguments_that_numbers_are_read_from_share_no_graph():
    replicas = Replicas(target_of(read_total), 1)
    y = torch.stack([COUNTS[1] + 1.0, COUNTS[0]]).clamp(max=2.0)
    y[:, -1] = 0
    given, own = replicas.given_args((y,)), Target.from_pyro(Model(read_total), y, compile=False)
    u = points(own)
    torch.testing.assert_close(given.value_and_grad(u), own.value_and_grad(u), rtol=1e-12, atol=1e-12)


def test_prior_draws_go_through_as_a_batch(monkeypatch):
    target = target_of(ordered)
    monkeypatch.setattr(target.density, "root_draws", lambda n: {"x": (normal(n, seed=5), normal(n, seed=5))})
    assert_close(target.sample_prior(3)[:, 0], normal(3, seed=5))


class Gappy(dist.TorchDistribution):
    """Rows of standard normals around ``loc``, of which those that are missing do not count."""

    arg_constraints = {}
    support = dist.constraints.independent(dist.constraints.real, 2)
    shape = torch.Size([3, 3])

    def __init__(self, loc, seen):
        self.loc, self.seen = loc, seen
        super().__init__(torch.Size(), self.shape, validate_args=False)

    def sample(self, sample_shape=()):
        return self.loc.new_zeros(*sample_shape, *self.shape)

    def log_prob(self, value):
        terms = -0.5 * (value - self.loc * torch.arange(1, 10, dtype=F64).reshape(self.shape)) ** 2
        terms[~self.seen] = 0.0
        return terms.sum((-1, -2))


@pytest.mark.parametrize("shape", [(3,), (3, 3)], ids=["rows", "entries"])
def test_a_mask_of_fewer_dimensions_is_that_of_the_first_ones(shape):
    seen = torch.tensor([True, False, True, True, True, False, False, True, True])[: math.prod(shape)].reshape(shape)
    data = torch.arange(9, dtype=F64).reshape(3, 3)

    def gappy(x, y):
        pyro.sample("y", Gappy(x, seen), obs=data)

    target = target_of(gappy)
    u = points(target)
    missing = (data - u[:, :1, None] * (data + 1)).square() * ~seen.reshape(*shape, *(1,) * (2 - len(shape)))
    whole = (data - u[:, :1, None] * (data + 1)).square()
    assert_close(target.log_likelihood(u), -0.5 * (whole - missing).sum((-1, -2)), 1e-12)


# -- what still cannot be batched ---------------------------------------------------------------------------


def test_the_warning_names_site_and_distribution():
    def stable(x, y):
        pyro.sample("y", dist.Stable(1.5, 0.1, 1.0, x).expand([2]).to_event(1), obs=y[0, :2])

    with pytest.warns(SlowModelWarning, match=r"batched at site 'y', of distribution Stable \(.*torch\.where"):
        Target.from_pyro(Model(stable), COUNTS)


def test_the_warning_quotes_the_line_of_the_model():
    def branching(x, y):
        scale = 1.0 if x > 0 else 2.0
        pyro.sample("y", dist.Normal(x, scale).expand([4]).to_event(1), obs=y[0])

    with pytest.warns(SlowModelWarning, match=r"batched in .*, line \d+, in branching \(scale = 1\.0 if x > 0"):
        Target.from_pyro(Model(branching), COUNTS)


def test_the_hook_for_distributions_is_given_back():
    def failing(x, y):
        flat(x, y)
        if x.item() > 100:
            raise RuntimeError("beyond")

    with pytest.warns(SlowModelWarning, match="batched in .*, line"):
        target = Target.from_pyro(Model(failing), COUNTS)
    with pytest.raises(RuntimeError, match="beyond"):
        target.log_density(torch.full((1, 1), 200.0))
    assert not COERCIONS


class Waiting(dist.Exponential):
    """An exponential law whose half-line is declared as an interval, as that of torch's GeneralizedPareto is."""

    support = constraints.interval(0.0, math.inf)


@pytest.mark.parametrize(("law", "parameters"), [(Waiting, (1.0,)), ("GeneralizedPareto", (0.0, 1.0, 0.3))])
def test_a_support_that_torch_calls_an_interval_of_infinite_length_is_refused(law, parameters):
    if isinstance(law, str):
        if not hasattr(dist, law):
            pytest.skip(f"this torch has no {law}")
        law = getattr(dist, law)

    def model(y):
        x = pyro.sample("x", law(*parameters))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pytest.raises(UnsupportedSiteError, match="'x' has support Interval.*inf.*reparameterise"):
        Target.from_pyro(model, COUNTS[0, 0])


# -- mutations ----------------------------------------------------------------------------------------------


def test_a_density_that_keeps_impossible_categories_is_noticed(monkeypatch):
    def forgetful(self, func, types, args=(), kwargs=None):
        return None if func is torch.Tensor.__setitem__ else func(*args, **(kwargs or {}))

    monkeypatch.setattr(batching.MaskedFill, "__torch_function__", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        check(flat)


def test_categories_in_another_order_are_noticed(monkeypatch):
    right = batching._ordered_logistic

    def reversed_order(predictor, cutpoints, validate_args=None):
        return right(-predictor, -cutpoints.flip(-1), validate_args)

    monkeypatch.setattr(batching, "_ordered_logistic", reversed_order)
    with pytest.raises(AssertionError, match="not close"):
        check(ordered)
