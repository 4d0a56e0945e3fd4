"""Hierarchical, conditional and semi-supervised autoencoders, and missing data, against sums by hand."""

import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from torch import nn
from torch.distributions import Normal

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.vae import (
    HierarchicalVAE,
    LinearVAE,
    MissingDataVAE,
    conditional_vae,
    hierarchical_vae,
    likelihoods,
    mlp_vae,
    one_hot,
    semi_supervised_vae,
)


def made(build):
    with global_stream(new_generator(0)):
        return build().double()


def binary(rows=5, dim=6, seed=0):
    return (torch.rand(rows, dim, generator=torch.Generator().manual_seed(seed)) < 0.4).double()


def log_bernoulli(outputs, x):
    return -nn.functional.binary_cross_entropy_with_logits(outputs, x.expand_as(outputs), reduction="none").sum(-1)


def log_normal(distribution, z):
    base = distribution.base_dist
    return (-0.5 * ((z - base.loc) / base.scale).square() - base.scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


# Hierarchical


class WrongWayUp(HierarchicalVAE):
    """Take the conditional distributions of the codes in the wrong order."""

    def model(self, x, num_data=None):
        with self.data_plate(x, num_data):
            z = pyro.sample("z3", self.top())
            for layer, prior in zip((1, 2), self.priors, strict=True):
                z = pyro.sample(f"z{layer}", prior(z))
            self.observe(x, self.decoder(z))


def error_of_hierarchy(cls):
    vae = made(lambda: hierarchical_vae(6, ((8,), (7,), (5,)), (3, 3, 3)))
    other = cls(vae.encoders, vae.priors, vae.decoder, (3, 3, 3), vae.likelihood, (6,)).double()
    x = binary()
    with global_stream(new_generator(1)):
        guide = poutine.trace(other.guide).get_trace(x)
        joint = poutine.trace(poutine.replay(other.model, trace=guide)).get_trace(x)
    z1, z2, z3 = (guide.nodes[name]["value"] for name in ("z1", "z2", "z3"))
    log_guide = log_normal(vae.encoders[0](x), z1) + log_normal(vae.encoders[1](z1), z2)
    log_guide = log_guide + log_normal(vae.encoders[2](z2), z3)
    log_joint = Normal(0, 1).log_prob(z3).sum(-1) + log_normal(vae.priors[1](z3), z2)
    log_joint = log_joint + log_normal(vae.priors[0](z2), z1) + log_bernoulli(vae.decoder(z1), x)
    errors = guide.log_prob_sum() - log_guide.sum(), joint.log_prob_sum() - log_joint.sum()
    return max(abs(float(error.detach())) for error in errors)


def test_log_joint_of_the_hierarchy():
    assert error_of_hierarchy(HierarchicalVAE) < 1e-10


def test_that_check_notices_layers_in_the_wrong_order():
    assert error_of_hierarchy(WrongWayUp) > 0.1


def test_hierarchy_encodes_and_generates():
    vae = made(lambda: hierarchical_vae(6, ((8,), (7,)), (4, 2)))
    x = binary()
    first, second = vae.encode(x)
    torch.testing.assert_close(first, vae.encoders[0](x).mean)
    torch.testing.assert_close(second, vae.encoders[1](first).mean)
    torch.testing.assert_close(vae.reconstruct(x), vae.decoder(first).sigmoid())
    draws = vae.generate(3, seed=0)
    assert draws.shape == (3, 6) and torch.equal(draws, vae.generate(3, seed=0))
    with pytest.raises(ShapeError, match="last dimension must be 4"):
        vae.decode(second)
    with pytest.raises(SettingsError, match="1 encoders, 0 priors and 1 dim"):
        HierarchicalVAE([vae.encoders[0]], [], vae.decoder, (4,), vae.likelihood, (6,))


# Conditional


def test_condition_reaches_encoder_and_decoder():
    vae = made(lambda: conditional_vae(6, 3, (8,), 2))
    x, y = binary(), one_hot(torch.tensor([0, 1, 2, 0, 1]), 3, torch.float64)
    with global_stream(new_generator(1)):
        guide = poutine.trace(vae.guide).get_trace(x, y)
        joint = poutine.trace(poutine.replay(vae.model, trace=guide)).get_trace(x, y)
    z = guide.nodes["z"]["value"]
    expected = log_normal(vae.encoder(torch.cat([x, y], 1)), z)
    torch.testing.assert_close(guide.log_prob_sum(), expected.sum())
    expected = Normal(0, 1).log_prob(z).sum(-1) + log_bernoulli(vae.decoder(torch.cat([z, y], 1)), x)
    torch.testing.assert_close(joint.log_prob_sum(), expected.sum())
    assert vae.encode(x, y).shape == (5, 2) and vae.reconstruct(x, y).shape == x.shape
    assert vae.generate(y, seed=0).shape == (5, 6)
    assert not torch.allclose(vae.reconstruct(x, y), vae.reconstruct(x, y.flip(1)))


def test_bad_conditions_are_named():
    vae, x = made(lambda: conditional_vae(6, 3, (8,), 2)), binary()
    for call in (vae.model, vae.guide, vae.encode):
        with pytest.raises(ShapeError, match=r"must have \(5, 3\)"):
            call(x, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(DataError, match="y has values"):
        vae.model(x, torch.full((5, 3), math.nan))
    with pytest.raises(ShapeError, match="last dimension must be 3"):
        vae.generate(torch.zeros(5, 2), seed=0)
    with pytest.raises(DataError, match="range from 0 to 3"):
        one_hot(torch.tensor([0, 3]), 3)
    with pytest.raises(DataError, match=r"labels\.long"):
        one_hot(torch.tensor([0.0]), 3)


# Semi-supervised


def bound_by_hand(vae, x, z, labels):
    """Return log joint less log guide of codes ``z`` for given labels, without the labels' own guide."""
    y = nn.functional.one_hot(labels, 3).double()
    y = y.expand(*z.shape[:-1], 3)
    inputs = torch.cat([x.expand(*z.shape[:-1], 6), y], -1)
    log_joint = Normal(0, 1).log_prob(z).sum(-1) + log_bernoulli(vae.decoder(torch.cat([z, y], -1)), x)
    return log_joint - math.log(3) - log_normal(vae.encoder(inputs), z)


def test_unknown_labels_are_summed_out():
    vae, x = made(lambda: semi_supervised_vae(6, 3, (8,), 2)), binary()
    objective = TraceEnum_ELBO(max_plate_nesting=1)
    with global_stream(new_generator(1)):
        loss = objective.loss(vae.model, vae.guide, x)
    with global_stream(new_generator(1)):
        _, guide = next(iter(objective._get_traces(vae.model, vae.guide, (x,), {})))
    z = guide.nodes["z"]["value"]
    assert z.shape == (3, 5, 2)
    value = bound_by_hand(vae, x, z, torch.arange(3).unsqueeze(1))
    log_q = vae.classifier(x).log_softmax(-1).T
    expected = (log_q.exp() * (value - log_q)).sum()
    assert abs(loss + float(expected.detach())) < 1e-9
    missing_entropy = (log_q.exp() * value).sum()  # the sum would be noticed without the classifier's entropy
    assert abs(loss + float(missing_entropy.detach())) > 1


@pytest.mark.parametrize("weight", [0.0, 2.5])
def test_known_labels_are_conditioned_on(weight):
    vae, x = made(lambda: semi_supervised_vae(6, 3, (8,), 2, classification_weight=weight)), binary()
    y = torch.tensor([0, 2, 1, 1, 0])
    with global_stream(new_generator(1)):
        loss = Trace_ELBO().loss(vae.model, vae.guide, x, y, 50)
    with global_stream(new_generator(1)):
        z = poutine.trace(vae.guide).get_trace(x, y).nodes["z"]["value"]
    expected = bound_by_hand(vae, x, z, y) + weight * vae.classifier(x).log_softmax(-1)[torch.arange(5), y]
    assert abs(loss + 10 * float(expected.sum().detach())) < 1e-8


def test_classifies_and_generates_by_label():
    vae, x = made(lambda: semi_supervised_vae(6, 3, (8,), 2)), binary()
    probabilities = vae.classify(x)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(vae.encode(x), vae.encode(x, probabilities.argmax(-1)))
    assert torch.equal(vae.reconstruct(x), vae.reconstruct(x, probabilities.argmax(-1)))
    assert vae.generate(4, seed=0).shape == (4, 6)
    y = torch.tensor([0, 1, 2, 2])
    assert torch.equal(vae.generate(4, seed=1, y=y), vae.generate(4, seed=1, y=y))
    with pytest.raises(DataError, match="between 0 and 2"):
        vae.generate(4, seed=0, y=y + 1)
    with pytest.raises(DataError, match="range from -1"):
        vae.model(x, torch.tensor([0, 1, 2, -1, 0]))
    with pytest.raises(ShapeError, match="one label for each"):
        vae.model(x, y)
    with pytest.raises(ShapeError, match="one label for each"):
        vae.generate(3, seed=0, y=y)


# Missing data


def some_linear_vae(latent_dim=1):
    vae = made(lambda: LinearVAE(4, latent_dim))
    with torch.no_grad():
        vae.likelihood.log_scale.fill_(-0.4)
        vae.decoder.weight.mul_(1.5)
    return vae


MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("mask", [MASK, torch.ones_like(MASK)])
def test_missing_entries_are_integrated_out(mask):
    vae = some_linear_vae()
    x = torch.linspace(-2, 2, 16, dtype=torch.float64).view(4, 4).sin() * 2
    grid = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    conditioned = poutine.condition(MissingDataVAE(vae).model, {"z": grid.view(-1, 1, 1).expand(-1, 4, 1)})
    trace = poutine.trace(pyro.plate("grid", 2001, dim=-2)(conditioned)).get_trace(x.where(mask, math.nan), mask)
    trace.compute_log_prob()
    log_joint = trace.nodes["z"]["log_prob"] + trace.nodes["x"]["log_prob"]
    integral = log_joint.logsumexp(0) + math.log(float(grid[1] - grid[0]))
    torch.testing.assert_close(integral, vae.log_likelihood(x, mask), rtol=0, atol=1e-10)


@pytest.mark.parametrize("likelihood", [likelihoods.Bernoulli(), likelihoods.DiscretizedLogistic(17, 2)])
def test_nothing_missing_is_the_model_itself_and_missing_values_do_not_matter(likelihood):
    vae = made(lambda: mlp_vae(6, (8,), 2, likelihood=likelihood))
    model, x = MissingDataVAE(vae), binary()
    mask = binary(seed=3).bool()

    def log_joint(function, *args):
        with global_stream(new_generator(1)):
            trace = poutine.trace(function).get_trace(*args)
        return float(trace.log_prob_sum().detach())

    for mine, its in ((model.model, vae.model), (model.guide, vae.guide)):
        assert log_joint(mine, x, torch.ones_like(mask)) == pytest.approx(log_joint(its, x), abs=1e-10)
        assert log_joint(mine, x, mask) == log_joint(mine, x.where(mask, math.nan), mask)
    assert log_joint(model.model, x, mask) > log_joint(model.model, x, torch.ones_like(mask))


def test_the_encoder_gets_what_inputs_make_of_data_and_mask():
    vae = some_linear_vae(2)
    x = torch.linspace(-2, 2, 16, dtype=torch.float64).view(4, 4).sin()
    with_nan = x.where(MASK, math.nan)

    def expected(x, mask):
        return torch.where(mask, x, vae.decoder(vae.posterior(x, mask).mean))

    best = LinearVAE.maximum_likelihood(torch.randn(50, 4, generator=new_generator(0), dtype=torch.float64), 2)
    for inputs in (None, lambda x, mask: x / mask.to(x).mean(-1, keepdim=True).clamp_min(0.1), expected):
        model = MissingDataVAE(vae, inputs)
        filled = x.where(MASK, 0.0)
        wanted = vae.encoder(filled if inputs is None else inputs(filled, MASK)).mean
        found = poutine.trace(model.guide).get_trace(with_nan, MASK).nodes["z"]["fn"].mean
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(model.posterior(with_nan, MASK).mean, wanted, rtol=0, atol=1e-12)
    vae = best  # whose encoder is the posterior of complete data: expectations make it that of incomplete data
    found = MissingDataVAE(best, expected).posterior(with_nan, MASK).mean
    torch.testing.assert_close(found, best.posterior(x, MASK).mean, rtol=0, atol=1e-12)
    assert not torch.allclose(MissingDataVAE(best).posterior(with_nan, MASK).mean, found)
    with pytest.raises(SettingsError, match="function of data and mask, not 'mean'"):
        MissingDataVAE(vae, "mean")


def z_of_imputations(num_particles, rows, size=1.0):
    """Return z values of mean and square of imputed entries against their exact conditional distribution."""
    vae = some_linear_vae(2)
    x, mask = size * torch.tensor([1.5, -1.0, 0.5, 2.0]).double(), torch.tensor([True, False, True, True])
    model = MissingDataVAE(vae)
    # Rows are independent, so one draw of each is as good as many of one.
    draws = model.impute(x.expand(rows, 4), mask.expand(rows, 4), num_particles=num_particles, seed=0)[0]
    assert torch.equal(draws[:, mask], x[mask].expand(rows, 3))
    codes = vae.posterior(x, mask)
    weight = vae.decoder.weight[1].detach()
    mean = weight @ codes.mean.detach() + vae.decoder.bias[1].detach()
    noise = (2 * vae.likelihood.log_scale.detach()).exp()
    variance = weight @ codes.covariance_matrix.detach() @ weight + noise
    standard = (draws[:, 1] - mean) / variance.sqrt()
    return [float(standard.mean()) * rows**0.5, float(standard.square().mean() - 1) * (rows / 2) ** 0.5]


def test_imputations_follow_the_posterior_predictive(limit):
    assert max(map(abs, z_of_imputations(num_particles=1000, rows=1000))) < limit(2)


def test_that_check_notices_draws_that_are_not_weighed(limit):
    """Where the guide is far from the posterior, as it is for large data."""
    z = z_of_imputations(num_particles=1, rows=4000, size=5.0)
    assert max(map(abs, z)) > limit(2)


def test_bad_masks_are_named():
    model, x = MissingDataVAE(mlp_vae(6, (8,), 2)), binary().float()
    for call in (model.model, model.guide):
        with pytest.raises(DataError, match=r"mask\.bool"):
            call(x, torch.ones_like(x))
        with pytest.raises(ShapeError, match=r"\(5, 5\)"):
            call(x, torch.ones(5, 5, dtype=torch.bool))
        with pytest.raises(ShapeError, match=r"\(\*batch, 6\)"):
            call(x[:, :5], torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(DataError, match="range from 0 to 9"):
        model.model(9 * x, torch.ones_like(x).bool())
    with pytest.raises(SettingsError, match="at least 1"):
        model.impute(x, x.bool(), 0, seed=0)
    assert model.impute(x[0], x[0].bool(), 3, seed=0).shape == (3, 6)
