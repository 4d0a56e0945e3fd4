"""Enumerated sites: summed out of the model, averaged over in the guide, against sums by hand and Pyro's own."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceEnum_ELBO

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError
from bayeskit.inference.objectives import ELBO, IWAE

DATA = torch.tensor([0.3, -1.2, 2.5, 0.9], dtype=torch.float64)
LOCATIONS = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
PARALLEL = {"enumerate": "parallel"}


def with_stream(function, seed=0):
    with global_stream(new_generator(seed, stream="objectives")):
        return function()


def log_normal(x, mean, sd=1.0):
    return dist.Normal(mean, sd).log_prob(x)


def mixture(x, size=None):
    with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
        y = pyro.sample("y", dist.Categorical(WEIGHTS), infer=PARALLEL)
        z = pyro.sample("z", dist.Normal(LOCATIONS[y], 0.7))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def guide_of_z(x, size=None):
    shift = pyro.param("shift", torch.tensor(0.1, dtype=torch.float64))
    with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
        pyro.sample("z", dist.Normal(x + shift, 0.4))


@pytest.mark.parametrize("num_particles", [1, 3])
def test_a_model_site_is_summed_out_for_each_datum(num_particles):
    shift = torch.tensor(0.1, dtype=torch.float64)
    loss = with_stream(lambda: IWAE(num_particles).loss(mixture, guide_of_z, DATA))
    shape = (num_particles, 4) if num_particles > 1 else (4,)
    z = with_stream(lambda: dist.Normal(DATA + shift, 0.4).expand(shape).rsample()).reshape(-1, 4)
    prior = torch.logsumexp(WEIGHTS.log() + log_normal(z.unsqueeze(-1), LOCATIONS, 0.7), -1)
    log_weight = prior + log_normal(DATA, z, 0.5) - log_normal(z, DATA + shift, 0.4)
    by_hand = (log_weight.logsumexp(0) - math.log(num_particles)).sum()
    assert loss == pytest.approx(-by_hand.item(), rel=1e-12)


def test_a_subsampled_plate_scales_the_sum():
    whole = with_stream(lambda: ELBO().loss(mixture, guide_of_z, DATA))
    scaled = with_stream(lambda: ELBO().loss(mixture, guide_of_z, DATA, 12))
    assert scaled == pytest.approx(3 * whole, rel=1e-12)


def labelled(x):
    with pyro.plate("data", len(x)):
        y = pyro.sample("y", dist.Categorical(WEIGHTS))
        z = pyro.sample("z", dist.Normal(LOCATIONS[y], 0.7))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def guide_of_both(x):
    logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64))
    slope = pyro.param("slope", torch.tensor(0.3, dtype=torch.float64))
    with pyro.plate("data", len(x)):
        y = pyro.sample("y", dist.Categorical(logits=logits + x.unsqueeze(-1) * 0.2), infer=PARALLEL)
        pyro.sample("z", dist.Normal(x + slope * LOCATIONS[y], 0.4))


def elbo_by_hand(logits, slope):
    """Sum over labels and integrate over z in closed form."""
    probability = (logits + DATA.unsqueeze(-1) * 0.2).softmax(-1)
    mean, sd = DATA.unsqueeze(-1) + slope * LOCATIONS, 0.4
    likelihood = log_normal(DATA.unsqueeze(-1), mean, 0.5) - 0.5 * sd**2 / 0.25
    divergence = torch.distributions.kl_divergence(dist.Normal(mean, sd), dist.Normal(LOCATIONS, 0.7))
    terms = WEIGHTS.log() - probability.log() + likelihood - divergence
    return (probability * terms).sum()


def test_a_guide_site_is_averaged_over_with_its_gradient(limit):
    logits = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    by_hand = elbo_by_hand(logits, slope)
    exact = torch.cat([g.reshape(-1) for g in torch.autograd.grad(by_hand, [logits, slope])])
    losses, gradients = [], []
    pyro.clear_param_store()

    def run():
        for _ in range(60):
            losses.append(ELBO(200).loss_and_grads(labelled, guide_of_both, DATA))
            names = [pyro.get_param_store().get_param(n).unconstrained() for n in ("logits", "slope")]
            gradients.append(torch.cat([p.grad.reshape(-1).clone() for p in names]))
            for p in names:
                p.grad = None

    try:
        with_stream(run)
    finally:
        pyro.clear_param_store()
    found = torch.cat([torch.tensor(losses, dtype=torch.float64).unsqueeze(1), torch.stack(gradients)], 1)
    error = found.std(0) / len(found) ** 0.5
    z = (found.mean(0) + torch.cat([by_hand.detach().reshape(1), exact])) / error
    assert z.abs().max() < limit(5)
    assert error.max() < 0.05


def test_the_same_as_pyros_enumeration_without_continuous_noise():
    """With every site enumerated both are sums without any draw, so values and gradients agree to rounding."""

    def model(x):
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(WEIGHTS))
            with pyro.plate("words", 2):
                w = pyro.sample("w", dist.Bernoulli(torch.tensor([0.2, 0.5, 0.9], dtype=x.dtype)[y]))
                pyro.sample("x", dist.Normal(2 * w, 1.0), obs=x.expand(2, len(x)) + torch.tensor([[0.0], [0.5]]))

    def guide(x):
        logits = pyro.param("logits", torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64))
        strength = pyro.param("strength", torch.tensor([0.1, 0.4, -0.6], dtype=torch.float64))
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(logits=logits), infer=PARALLEL)
            with pyro.plate("words", 2):
                pyro.sample("w", dist.Bernoulli(logits=strength[y]), infer=PARALLEL)

    results = []
    for objective in (ELBO(max_plate_nesting=2), TraceEnum_ELBO(max_plate_nesting=2)):
        pyro.clear_param_store()
        loss = objective.loss_and_grads(model, guide, DATA)
        store = pyro.get_param_store()
        results.append([loss, *(store.get_param(n).unconstrained().grad.clone() for n in ("logits", "strength"))])
    pyro.clear_param_store()
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-10, atol=1e-10)


def test_inner_plates_and_sites_outside_every_plate():
    """Topics of words within documents, and a global mean: the whole data are one datum then."""

    def model(x):
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
        with pyro.plate("words", x.shape[-1], dim=-2), pyro.plate("documents", x.shape[0], dim=-1):
            y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.3, dtype=x.dtype)), infer=PARALLEL)
            pyro.sample("x", dist.Normal(mean + 2 * y, 1.0), obs=x.T)

    def guide(x):
        pyro.sample("mean", dist.Normal(torch.full((), 0.2, dtype=x.dtype), 0.5))

    x = torch.arange(6, dtype=torch.float64).reshape(2, 3) / 3
    loss = with_stream(lambda: IWAE(2, max_plate_nesting=2).loss(model, guide, x))
    posterior = dist.Normal(torch.full((), 0.2, dtype=x.dtype), 0.5)
    mean = with_stream(lambda: posterior.expand([2, 1, 1]).rsample()).reshape(2)
    pieces = []
    for m in mean:
        both = [math.log(p) + log_normal(x, m + 2 * y) for y, p in ((0, 0.7), (1, 0.3))]
        likelihood = torch.logsumexp(torch.stack(both), 0).sum()
        pieces.append(likelihood + log_normal(m, torch.zeros((), dtype=x.dtype)) - posterior.log_prob(m))
    by_hand = torch.logsumexp(torch.stack(pieces), 0) - math.log(2)
    assert loss == pytest.approx(-by_hand.item(), rel=1e-12)


def test_a_hidden_markov_chain_is_summed_out():
    transition = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    x = torch.tensor([[0.1, 1.2, 0.8], [-0.5, 0.2, 1.9]], dtype=torch.float64)

    def model(x):
        with pyro.plate("data", len(x)):
            scale = pyro.sample("scale", dist.Gamma(torch.full((), 3.0, dtype=x.dtype), 2.0))
            state = torch.zeros((), dtype=torch.long)
            for t in pyro.markov(range(3)):
                state = pyro.sample(f"state_{t}", dist.Categorical(transition[state]), infer=PARALLEL)
                pyro.sample(f"x_{t}", dist.Normal(state.to(x.dtype), scale), obs=x[:, t])

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("scale", dist.Gamma(torch.full((), 4.0, dtype=x.dtype), 3.0))

    loss = with_stream(lambda: IWAE(2).loss(model, guide, x))
    scale = with_stream(lambda: dist.Gamma(torch.full((), 4.0, dtype=x.dtype), 3.0).expand([2, 2]).rsample())
    paths = []
    for path in itertools.product((0, 1), repeat=3):
        before, term = 0, torch.zeros(2, 2, dtype=x.dtype)
        for t, state in enumerate(path):
            term = term + transition[before, state].log() + log_normal(x[:, t], float(state), scale)
            before = state
        paths.append(term)
    prior = dist.Gamma(torch.full((), 3.0, dtype=x.dtype), 2.0).log_prob(scale)
    posterior = dist.Gamma(torch.full((), 4.0, dtype=x.dtype), 3.0).log_prob(scale)
    log_weight = torch.logsumexp(torch.stack(paths), 0) + prior - posterior
    by_hand = (log_weight.logsumexp(0) - math.log(2)).sum()
    assert loss == pytest.approx(-by_hand.item(), rel=1e-12)


def test_weights_of_an_enumerated_guide_are_refused():
    with pytest.raises(GuideError, match="'y' is enumerated in the guide"):
        IWAE(2).loss(labelled, guide_of_both, DATA)
    pyro.clear_param_store()


def test_enumeration_in_guide_and_model_is_refused():
    def model(x):
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(WEIGHTS))
            w = pyro.sample("w", dist.Bernoulli(0.2), infer=PARALLEL)
            pyro.sample("x", dist.Normal(LOCATIONS[y] + w, 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(WEIGHTS), infer=PARALLEL)

    with pytest.raises(GuideError, match="'y' is enumerated in the guide and 'w' in the model"):
        ELBO().loss(model, guide, DATA)
