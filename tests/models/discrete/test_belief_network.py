"""Sigmoid belief networks: evidence against a loop over states and the oracle, mean fields against enumeration."""

import itertools
import math

import pytest
import torch
from torch import nn

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact._enumeration import enumerate_latents
from bayeskit.inference.gradients import DisARM, Enumeration, LeaveOneOut
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete._belief_network import SigmoidBeliefNetwork

LAYERS = [[3, 4], [2, 3, 4], [2, 1, 2, 3]]


def network(layers, *, scale=1.0, **settings):
    made = SigmoidBeliefNetwork(layers, **settings).double()
    generator = new_generator(5, stream="weights")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def all_rows(size):
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)


def chance(logit, bit):
    probability = 1 / (1 + math.exp(-logit))
    return probability if bit else 1 - probability


def slow_evidence(made, row):
    """Add up the probabilities of all hidden states, a bit after the other."""
    total = 0.0
    for bits in itertools.product([0, 1], repeat=sum(made.layers[:-1])):
        left, probability, logits = list(bits) + [int(b) for b in row], 1.0, made.top.tolist()
        for size, linear in zip(made.layers, [*made.downwards, None], strict=True):
            layer, left = left[:size], left[size:]
            for logit, bit in zip(logits, layer, strict=True):
                probability *= chance(logit, bit)
            if linear is not None:
                rows = zip(linear.weight.tolist(), linear.bias.tolist(), strict=True)
                logits = [b + sum(w * h for w, h in zip(ws, layer, strict=True)) for ws, b in rows]
        total += probability
    return math.log(total)


def largest_error(made):
    rows = all_rows(made.layers[-1])[::3]
    with torch.no_grad():
        return max(abs(float(e) - slow_evidence(made, r)) for e, r in zip(made.log_evidence(rows), rows, strict=True))


# --- Exact values


@pytest.mark.parametrize("layers", LAYERS)
def test_evidence_is_a_sum_over_all_hidden_states(layers):
    assert largest_error(network(layers)) < 1e-12


def test_a_lost_normaliser_is_seen(monkeypatch):
    monkeypatch.setattr(nn.functional, "softplus", torch.relu)
    assert largest_error(network([2, 3, 4])) > 1e-3


@pytest.mark.parametrize("layers", LAYERS)
def test_probabilities_of_all_rows_add_up_to_one(layers):
    with torch.no_grad():
        assert abs(float(network(layers).log_evidence(all_rows(layers[-1])).logsumexp(0))) < 1e-12


@pytest.mark.calibration
def test_model_is_what_the_oracle_enumerates():
    made, x = network([2, 3, 4]), all_rows(4)[[1, 6]]
    with torch.no_grad():
        assert abs(enumerate_latents(made.model, x).log_evidence - float(made.log_evidence(x).sum())) < 1e-10


def test_rows_that_are_drawn_follow_the_evidence(limit):
    made = network([2, 2, 3])
    drawn = made.generate(20_000, seed=0)
    rows = all_rows(3)
    frequency = (drawn.unsqueeze(1) == rows).all(-1).double().mean(0)
    with torch.no_grad():
        exact = made.log_evidence(rows).exp()
    z = (frequency - exact) / (exact * (1 - exact) / len(drawn)).sqrt()
    assert float(z.abs().max()) < limit(8)
    assert torch.equal(drawn, made.generate(20_000, seed=0))


# --- The guide


def enumerated_bound(made, x):
    """Add up the guide's expectation, state by state."""
    logits = torch.cat(made.guide_logits(x), -1)
    states = all_rows(logits.shape[-1])
    guide = torch.distributions.Bernoulli(logits=logits.unsqueeze(1), validate_args=False).log_prob(states).sum(-1)
    parts, prior, given = states.split(made.layers[:-1], -1), 0.0, made.top
    for linear, part in zip(made.downwards, parts, strict=True):
        prior = prior + torch.distributions.Bernoulli(logits=given).log_prob(part).sum(-1)
        given = linear(part)
    joint = prior + torch.distributions.Bernoulli(logits=given).log_prob(x.unsqueeze(1)).sum(-1)
    return (guide.exp() * (joint - guide)).sum()


@pytest.mark.parametrize("num_data", [None, 3])
def test_objective_by_enumeration_is_the_exact_bound(num_data):
    made, x = network([2, 3, 4], num_data=num_data, gradient=Enumeration()), all_rows(4)[[1, 6, 15]]
    loss, bound = ELBO().differentiable_loss(made.model, made.guide, x), enumerated_bound(made, x)
    assert abs(float((loss + bound).detach())) < 1e-10
    assert float(bound.detach()) < float(made.log_evidence(x).sum().detach())
    found, exact = (torch.autograd.grad(y, list(made.parameters())) for y in (loss, bound))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, -b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gradient", [DisARM(), LeaveOneOut(num_samples=3)], ids=["DisARM", "leave one out"])
def test_gradients_of_several_layers_are_unbiased(gradient, limit):
    x = all_rows(3)[[5]].expand(400, 3)
    made = network([2, 2, 3], scale=0.7, num_data=400, gradient=gradient)
    with torch.no_grad():
        made.upwards.weight.copy_(torch.tensor([0.3, -0.4, 0.8, 0.1]).expand(400, 4))
    (exact,) = torch.autograd.grad(-enumerated_bound(made, x), made.upwards.weight)
    drawn = []
    with global_stream(new_generator(1, stream="bias")):
        for _ in range(20):
            loss = ELBO().differentiable_loss(made.model, made.guide, x)
            drawn.append(torch.autograd.grad(loss, made.upwards.weight)[0])
    found = torch.cat(drawn)

    def largest_z(expected):
        return float(((found.mean(0) - expected) / (found.std(0) / len(found) ** 0.5)).abs().max())

    assert largest_z(exact[0]) < limit(4)
    assert largest_z(-exact[0]) > limit(4)


def test_importance_sampling_agrees_with_enumeration(limit):
    made, x = network([2, 3, 4], scale=0.5), all_rows(4)
    result = importance_sampling(made.model, made.guide, x, num_draws=4000, seed=0, progress=False)
    with torch.no_grad():
        error = result.log_likelihood - made.log_evidence(x)
    assert bool((error.abs() < limit(16) * result.pointwise_standard_error).all())


def test_bad_input():
    with pytest.raises(SettingsError, match="visible"):
        SigmoidBeliefNetwork([3])
    with pytest.raises(SettingsError, match="layers"):
        SigmoidBeliefNetwork([3, 0])
    made = SigmoidBeliefNetwork([2, 3])
    with pytest.raises(ShapeError, match=r"\(n, 3\)"):
        made.log_evidence(torch.zeros(4, 2))
    with pytest.raises(DataError, match="float64"):
        made.log_evidence(torch.zeros(4, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="0 and 1"):
        made.model(torch.full((4, 3), 0.5))
    with pytest.raises(ShapeError, match="num_data=5"):
        SigmoidBeliefNetwork([2, 3], num_data=5).guide(torch.zeros(4, 3))
    with pytest.raises(SettingsError, match=str(2**24)):
        SigmoidBeliefNetwork([12, 12, 3]).log_evidence(torch.zeros(1, 3))


def test_data_come_from_any_library():
    made, rows = network([2, 3]), all_rows(3)
    with torch.no_grad():
        evidence = made.log_evidence(rows)
        for x in (rows.numpy(), rows.tolist(), rows.bool(), rows.long(), rows.numpy().astype("float32")):
            assert torch.equal(made.log_evidence(x), evidence)
        assert ELBO().loss(made.model, made.guide, rows.tolist()) > 0


def test_settings_are_refused_at_once():
    with pytest.raises(SettingsError, match=r"such as \[3, 5\]"):
        SigmoidBeliefNetwork(5)
    for wrong in ("DisARM", DisARM):
        with pytest.raises(SettingsError, match="no gradient estimator"):
            SigmoidBeliefNetwork([2, 3], gradient=wrong)
