"""Guide sites that count for more or less than their log density, by a scale or a mask: gradients in closed form."""

import itertools
import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch.distributions import Normal, kl_divergence

from bayeskit.errors import GuideError, ModelError
from bayeskit.inference.objectives import ELBO, GECO, IWAE, TVO, VCD, AuxiliaryELBO, DReG
from bayeskit.inference.objectives._constrained import MeanSquaredError
from bayeskit.inference.objectives._objective import Draw
from bayeskit.inference.objectives._thermodynamic import LogUniform

F64 = torch.float64
COPIES = 300
DATA = torch.tensor([0.5, -1.0, 2.0], dtype=F64).repeat(COPIES)
SEEN = torch.tensor([True, False, True]).repeat(COPIES)
WEIGHTS = {
    "plain": (nullcontext, torch.ones(3, dtype=F64)),
    "less": (lambda: poutine.scale(scale=0.3), 0.3 * torch.ones(3, dtype=F64)),
    "more": (lambda: poutine.scale(scale=2.0), 2.0 * torch.ones(3, dtype=F64)),
    "masked": (lambda: poutine.mask(mask=SEEN), torch.tensor([1.0, 0.0, 1.0], dtype=F64)),
}


def parameters():
    return [torch.tensor(value, dtype=F64, requires_grad=True) for value in (-0.2, -0.3)]


def make(around, a, b):
    def model(x):
        with pyro.plate("data", len(x)):
            with around():
                z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)), around():
            pyro.sample("z", dist.Normal(a, b.exp()))

    return model, guide


def exact_gradient(weight, a, b):
    """Of minus the lower bound, for one copy of the data."""
    posterior = Normal(a, b.exp())
    prior = Normal(torch.zeros((), dtype=F64), torch.ones((), dtype=F64))
    x = DATA[:3]
    expected = Normal(a, 0.5).log_prob(x) - (2 * b).exp() / (2 * 0.25)
    return torch.autograd.grad((weight * kl_divergence(posterior, prior) - expected).sum(), [a, b])


@pytest.mark.calibration
@pytest.mark.parametrize("name", WEIGHTS)
def test_at_one_temperature_the_thermodynamic_gradient_is_that_of_the_lower_bound(name, limit):
    (around, weight), (a, b) = WEIGHTS[name], parameters()
    exact = torch.stack(exact_gradient(weight, a, b))
    model, guide = make(around, a, b)
    pyro.set_rng_seed(0)
    objective = TVO(8, LogUniform(1))
    found = torch.stack(
        [torch.stack(torch.autograd.grad(objective.differentiable_loss(model, guide, DATA), [a, b])) for _ in range(40)]
    )
    z = (found.mean(0) / COPIES - exact) / (found.std(0) / COPIES / math.sqrt(len(found)))
    assert float(z.abs().max()) < limit(2)


def test_masks_of_distributions_count_each_for_its_own(limit):
    """The prior's mask leaves out one datum of three, the guide's none."""
    a, b = parameters()

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0).mask(SEEN))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(a, b.exp()).mask(torch.ones_like(SEEN)))

    pyro.set_rng_seed(0)
    with torch.no_grad():
        found = torch.tensor([ELBO(4).loss(model, guide, DATA) / COPIES for _ in range(30)], dtype=F64)
        posterior = Normal(a, b.exp())
        prior = -0.5 * (a.square() + (2 * b).exp()) - 0.5 * math.log(2 * math.pi)
        expected = Normal(a, 0.5).log_prob(DATA[:3]) - (2 * b).exp() / (2 * 0.25)
        exact = float(-3 * posterior.entropy() - 2 * prior - expected.sum())
    assert abs(float(found.mean()) - exact) < limit() * float(found.std()) / math.sqrt(len(found))


@pytest.mark.parametrize("scale", [0.1, 0.5, 3.0])
def test_the_mean_error_of_a_constraint_knows_no_scale(scale):
    def model(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))
            with poutine.scale(scale=scale):
                pyro.sample("x", dist.Normal(torch.zeros((), dtype=F64), 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))

    x = DATA[:3]
    particles = Draw(GECO(MeanSquaredError("x", 1.0)), model, guide, (x,), {})(2)
    torch.testing.assert_close(MeanSquaredError("x", 1.0)(particles), (x.square() - 1).expand(2, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", [ELBO, IWAE])
def test_a_last_chunk_may_be_smaller(objective, limit):
    """The same value on average as in equal chunks."""
    model, guide = make(nullcontext, *parameters())
    pyro.set_rng_seed(0)
    with torch.no_grad():
        one, other = (
            torch.tensor([objective(8, chunk_size=size).loss(model, guide, DATA) for _ in range(30)]) for size in (3, 4)
        )
    error = math.hypot(float(one.std()), float(other.std())) / math.sqrt(30)
    assert abs(float(one.mean() - other.mean())) < limit() * error


@pytest.mark.parametrize("name", ["less", "more", "masked"])
def test_a_doubly_reparameterised_gradient_of_other_weights_is_refused(name):
    model, guide = make(WEIGHTS[name][0], *parameters())
    with pytest.raises(GuideError, match="'z' is masked, scaled, or subsampled otherwise than the data"):
        DReG(8).loss(model, guide, DATA)
    DReG(1).loss(model, guide, DATA)  # which is STL


def test_a_doubly_reparameterised_gradient_needs_the_rows_of_the_data():
    """A global site counts once where a local one counts for four."""

    def model():
        m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        with pyro.plate("data", 4, subsample_size=1):
            pyro.sample("x", dist.Normal(m, 1.0), obs=torch.ones(1, dtype=F64))

    def guide():
        pyro.sample("m", dist.Normal(torch.zeros((), dtype=F64), 1.0))

    with pytest.raises(GuideError, match="'m' is masked, scaled, or subsampled otherwise"):
        DReG(4).loss(model, guide)


def learned(site):
    def model(x):
        with pyro.plate("data", len(x)):
            m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=F64), 1.0))
            z = pyro.sample("z", dist.Normal(m, 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def guide(x):
        a, b = (pyro.param(name, torch.tensor(0.1, dtype=F64)) for name in "ab")
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(a, 0.8))
            pyro.sample("m", site(z, b.expand(len(x))))

    return model, guide


def test_doubly_reparameterised_gradients_take_points_for_draws_only_where_they_are():
    """A Delta may be a transformed draw, as in automatic guides, but not a parameter, alone or beside a draw."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    DReG(4).loss_and_grads(*learned(lambda z, b: dist.Delta(z.exp())), DATA)
    for site in (lambda z, b: dist.Delta(b), lambda z, b: dist.Delta(b + z), lambda z, b: dist.Delta(2 * b)):
        model, guide = learned(site)
        with pytest.raises(GuideError, match="'m' is a Delta of learned values"):
            DReG(4).loss_and_grads(model, guide, DATA)
        DReG(1).loss_and_grads(model, guide, DATA)
        IWAE(4).loss_and_grads(model, guide, DATA)
    guide = AutoNormal(model)
    DReG(4).loss_and_grads(model, guide, DATA)
    pyro.clear_param_store()


@pytest.mark.calibration
@pytest.mark.parametrize("name", WEIGHTS)
def test_chains_of_no_steps_have_no_gradient(name, limit):
    """The loss is a difference of two equal means, whatever a site counts for."""
    a, b = parameters()
    model, guide = make(WEIGHTS[name][0], a, b)
    pyro.set_rng_seed(0)
    objective = VCD(4, num_steps=0, target_acceptance=None)
    found = torch.stack(
        [torch.stack(torch.autograd.grad(objective.differentiable_loss(model, guide, DATA), [a, b])) for _ in range(40)]
    )
    assert float((found.mean(0) / (found.std(0) / math.sqrt(len(found)))).abs().max()) < limit(2)


@pytest.mark.parametrize("around", [poutine.mask(mask=SEEN[:3]), poutine.scale(scale=torch.tensor([1.0, 2.0, 3.0]))])
def test_masks_and_scales_outside_every_plate_are_refused(around):
    """Beside several particles their dimension would be taken for these."""

    def model():
        with around:
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))

    with pytest.raises(ModelError, match=r"site 'z' has a (mask|scale) of shape \(3,\), .* of size 3 is outside every"):
        ELBO(4).loss(model, model)


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.0])
def test_scores_of_further_auxiliary_draws_know_no_scale(scale, limit):
    """Exactly, by a sum over all values of the auxiliary draw, the latent one and the further draw."""
    shift = torch.tensor(0.4, dtype=F64, requires_grad=True)
    first = torch.tensor(0.3, dtype=F64)

    def log_bernoulli(logit, value):
        return dist.Bernoulli(logits=torch.as_tensor(logit, dtype=F64)).log_prob(torch.tensor(float(value), dtype=F64))

    def model():
        with poutine.scale(scale=scale):
            pyro.sample("z", dist.Bernoulli(torch.tensor(0.3, dtype=F64)))

    def guide():
        with poutine.scale(scale=scale):
            k = pyro.sample("k", dist.Bernoulli(logits=first), infer={"is_auxiliary": True})
            pyro.sample("z", dist.Bernoulli(logits=2 * k - 1))

    def reverse(values):
        with poutine.scale(scale=scale):
            pyro.sample("k", dist.Bernoulli(logits=shift + values["z"]))

    bound = torch.zeros((), dtype=F64)
    for k, z, further in itertools.product((0, 1), repeat=3):
        chance = log_bernoulli(first, k) + log_bernoulli(2 * k - 1, z) + log_bernoulli(shift + z, further)
        ratios = torch.stack(
            [
                scale * (log_bernoulli(first, i) + log_bernoulli(2 * i - 1, z) - log_bernoulli(shift + z, i))
                for i in (k, further)
            ]
        )
        prior = scale * log_bernoulli(math.log(0.3 / 0.7), z)
        bound = bound + chance.exp() * (prior - ratios.logsumexp(0) + math.log(2))
    exact = -float(torch.autograd.grad(bound, shift)[0])
    pyro.set_rng_seed(0)
    objective = AuxiliaryELBO(reverse, num_particles=3000, num_auxiliary=1)
    found = torch.stack([torch.autograd.grad(objective.differentiable_loss(model, guide), shift)[0] for _ in range(25)])
    assert abs(float(found.mean()) - exact) < limit() * float(found.std()) / 5
