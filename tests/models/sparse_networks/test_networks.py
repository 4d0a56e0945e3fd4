"""Sparse networks against exact optima, exact evidence, and draws of weights."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from torch import nn
from torch.distributions import kl_divergence

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, UnknownNameError, UnsupportedSiteError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses, propriety_check
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.models.sparse_networks import (
    HorseshoePrior,
    HyperbolicSecant,
    ImproperLogUniform,
    LogUniformPrior,
    SpikeAndSlab,
    SpikeAndSlabPrior,
    log_uniform_divergence,
    sparsify,
)
from bayeskit.models.sparse_networks._layers import given_values

Z = torch.tensor([0.3, -0.8, 1.3, -2.0, 4.0], dtype=torch.float64)
EVERY = [(prior, groups) for prior in ("log_uniform", "horseshoe", "spike_and_slab") for groups in (False, True)]


def orthonormal(rows=8):
    """Return predictors with orthonormal columns, and responses with estimates Z and noise of scale one."""
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64)).Q
    return q[:, : len(Z)], q @ torch.cat([Z, torch.tensor([0.5, -1.0, 0.7], dtype=torch.float64)])


def regression(prior="log_uniform", **options):
    module = nn.Linear(len(Z), 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(Z)
    return sparsify(module, lambda f: dist.Normal(f[:, 0], 1.0), num_data=8, prior=prior, **options)


def one_weight(z):
    """Return mean and log scale at the minimum of the exact bound of one weight under the log-uniform prior."""

    def objective(p):
        log_alpha = torch.tensor(2 * (p[1] - math.log(abs(p[0]))), dtype=torch.float64)
        return 0.5 * ((z - p[0]) ** 2 + math.exp(2 * p[1])) + float(log_uniform_divergence(log_alpha))

    return minimize(objective, [z, -1.0], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14}).x


def mean_and_error(values):
    return values.mean(0), values.std(0) / len(values) ** 0.5


def losses_and_gradients(network, x, y, count, seed=0):
    """Return losses and gradients in all parameters for independent draws."""
    objective, parameters = ELBO(), list(network.parameters())
    found = []
    with global_stream(new_generator(seed, stream="losses")):
        for _ in range(count):
            loss = objective.differentiable_loss(network.model, network.guide, x, y)
            gradient = torch.autograd.grad(loss, parameters)
            found.append(torch.cat([loss.detach().reshape(1), *(g.flatten() for g in gradient)]))
    return torch.stack(found)


@pytest.mark.calibration
def test_one_weight_is_at_its_exact_optimum(limit):
    network, (x, y) = regression(), orthonormal()
    weights = network.layers[0].weights
    best = np.array([one_weight(z) if abs(z) > 1 else (1e-8 * z, math.log(1e-4)) for z in Z.tolist()])
    with torch.no_grad():
        weights.loc.copy_(torch.tensor(best[:, 0]))
        weights.log_scale.copy_(torch.tensor(best[:, 1]))
    mean, error = mean_and_error(losses_and_gradients(network, x, y, 200))
    exact = 4 * math.log(2 * math.pi) + 0.5 * (0.5**2 + 1 + 0.7**2)
    exact += 0.5 * sum((z - m) ** 2 + math.exp(2 * s) for z, (m, s) in zip(Z.tolist(), best, strict=True))
    exact += float(log_uniform_divergence(torch.tensor(2 * best[:, 1]) - torch.tensor(best[:, 0]).square().log()).sum())
    assert abs(float(mean[0]) - exact) < limit() * float(error[0])
    kept = torch.cat([Z.abs() > 1, Z.abs() > 1])
    assert bool((mean[1:].abs() < limit(10) * error[1:] + 1e-6)[kept].all())
    # Below one, the slope towards zero wins whatever the sign of the weight: a soft threshold at |z| = 1.
    for z in (0.99, 1.01):
        m = torch.logspace(-6, -2, 50, dtype=torch.float64)
        log_alpha = -m.log()  # the best variance is |m|
        bound = 0.5 * ((z - m).square() + m) + log_uniform_divergence(log_alpha) - 0.5 * z**2
        assert bool((bound[:10] > 0).all()) == (z < 1)


@pytest.mark.calibration
def test_fit_prunes_below_one():
    network, (x, y) = regression(initial_scale=0.3), orthonormal()
    result = bk.fit(
        network.model,
        network.guide,
        ELBO(),
        (x, y),
        num_steps=600,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 600),
        progress=False,
    )
    assert result.num_steps == 600
    assert network.kept()["layer"].tolist() == [[False, False, True, True, True]]
    loc = network.layers[0].weights.loc.detach()[0]
    exact = torch.tensor([one_weight(z)[0] for z in Z.tolist()[3:]])
    assert (loc[3:] - exact).abs().max() < 0.15 and loc[:2].abs().max() < 0.05


def test_spike_and_slab_is_exact_with_orthonormal_predictors(limit):
    prior = SpikeAndSlabPrior(probability=0.3, scale=2.0)
    network, (x, y) = regression(prior), orthonormal()
    weights = network.layers[0].weights
    slab = prior.scale**2
    inside = math.log(0.3) - 0.5 * math.log1p(slab) - 0.5 * Z.square() / (1 + slab)
    outside = math.log(0.7) - 0.5 * Z.square()
    with torch.no_grad():
        weights.logits.copy_(inside - outside)
        weights.loc.copy_(Z * slab / (1 + slab))
        weights.log_scale.fill_(0.5 * math.log(slab / (1 + slab)))
    found = losses_and_gradients(network, x, y, 200)
    mean, error = mean_and_error(found)
    evidence = float(torch.logaddexp(inside, outside).sum()) - 4 * math.log(2 * math.pi) - 0.5 * (0.5**2 + 1 + 0.7**2)
    assert abs(float(mean[0]) + evidence) < limit() * float(error[0])
    assert bool((mean[1:].abs() < limit(15) * error[1:]).all())
    assert network.kept()["layer"][0].tolist() == (inside > outside).tolist()


def layer_of(kind):
    with global_stream(new_generator(1)):
        layer = nn.Linear(3, 2) if kind == "linear" else nn.Conv2d(3, 2, 2, padding=1, stride=2)
        x = torch.randn(2, 3) if kind == "linear" else torch.randn(2, 3, 4, 4)
    return layer.double(), x.double()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize(("prior", "groups"), EVERY)
def test_outputs_have_the_moments_of_drawn_weights(kind, prior, groups, limit):
    layer, x = layer_of(kind)
    network = sparsify(layer, lambda f: dist.Normal(f, 1.0), num_data=2, prior=prior, groups=groups, initial_scale=0.1)
    count = 1000
    with torch.no_grad():
        for name, parameter in network.layers[0].weights.named_parameters():
            if name in ("log_scale", "scale_log_scale"):
                parameter.add_(0.7)
        by_weights = network.sample_outputs(x, count, seed=2).flatten(1)
        with global_stream(new_generator(3)):
            by_outputs = []
            for _ in range(count):
                with given_values(network.layers, None):
                    by_outputs.append(network(x))
    by_outputs = torch.stack(by_outputs).flatten(1)
    comparisons = 2 * by_outputs.shape[1]
    for power in (1, 2):
        (a, ea), (b, eb) = (mean_and_error(values**power) for values in (by_weights, by_outputs))
        assert bool(((a - b).abs() <= limit(comparisons) * (ea.square() + eb.square()).sqrt()).all())
    assert float(by_outputs.std(0).min()) > 0.01


def test_minibatches_are_scaled():
    network, (x, y) = regression(initial_scale=1e-9), orthonormal()
    loss = ELBO().loss
    halves = loss(network.model, network.guide, x[:4], y[:4]) + loss(network.model, network.guide, x[4:], y[4:])
    assert abs(halves - 2 * loss(network.model, network.guide, x, y)) < 1e-5


def test_divergences(limit):
    for loc, scale in ((0.0, 0.3), (-4.0, 1.0), (1.0, 1.0)):
        ours = kl_divergence(dist.Normal(torch.tensor(loc).double(), scale), HyperbolicSecant(torch.zeros(()).double()))

        def integrand(z, loc=loc, scale=scale):
            normal = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
            return normal * (math.log(math.pi * math.cosh(loc + scale * z)) - 0.5 * z * z)

        exact = quad(integrand, -12, 12, epsabs=1e-12)[0] - 0.5 * math.log(2 * math.pi) - math.log(scale)
        assert abs(float(ours) - exact) < 1e-8
    # Groups of three entries, and an entry of its own: by draws.
    generator = torch.Generator().manual_seed(0)
    logits, loc = torch.randn(1, 2, generator=generator), torch.randn(3, 2, generator=generator)
    posterior = SpikeAndSlab(logits, loc, torch.full((3, 2), 0.5))
    prior = SpikeAndSlab(torch.full((1, 2), -1.0), torch.zeros(3, 2), torch.ones(3, 2))
    with global_stream(new_generator(4)):
        values = posterior.sample((20_000,))
    mean, error = mean_and_error(posterior.log_prob(values) - prior.log_prob(values))
    assert abs(float(mean - kl_divergence(posterior, prior))) < limit() * float(error)
    for ours, exact in ((values.mean(0), posterior.mean), (values.var(0), posterior.variance)):
        assert (ours - exact).abs().max() < 0.06
    zero = (values == 0).all(1).float()
    assert bool(((values == 0).any(1).float() == zero).all())


def test_log_half_cauchy(limit):
    with global_stream(new_generator(5)):
        draws = HyperbolicSecant(torch.tensor(0.7)).sample((20_000,))
    share = (draws.double().exp() < 2 * math.exp(0.7)).double().mean()
    exact = 2 / math.pi * math.atan(2.0)
    assert abs(float(share) - exact) < limit() * (exact * (1 - exact) / 20_000) ** 0.5


def test_posterior_under_the_log_uniform_prior_is_improper():
    x, y = orthonormal()
    loss = losses.FunctionLoss(lambda w, data: 0.5 * (data[1] - data[0] @ w).square())
    report = propriety_check(GibbsPosterior(ImproperLogUniform((len(Z),)), loss, (x, y)))
    assert not report.proper and report.worst.slope > 0.9
    assert any(abs(v) < 1e-100 for v in report.worst.toward["theta"].tolist())
    assert propriety_check(GibbsPosterior(Flat((len(Z),)), loss, (x, y))).proper


class HalfPower(ImproperLogUniform):
    """Density |w|**-1/2, whose pole at zero has finite mass."""

    def log_prob(self, value):
        return super().log_prob(value) / 2


def test_integrable_poles_are_proper():
    x, y = orthonormal()
    loss = losses.FunctionLoss(lambda w, data: 0.5 * (data[1] - data[0] @ w).square())
    assert propriety_check(GibbsPosterior(HalfPower((len(Z),)), loss, (x, y))).proper


def test_horseshoe_is_a_target():
    network, (x, y) = regression("horseshoe"), orthonormal()
    target = bk.Target.from_pyro(network.model, x, y)
    u = torch.linspace(-1, 1, 10, dtype=torch.float64)[None]
    values = target.constrain(u)
    scale, weight = values["layer.log_scale"][0, 0], values["layer.weight"][0, 0]
    prior = dist.HalfCauchy(torch.tensor(0.1, dtype=torch.float64))
    exact = prior.log_prob(scale.exp()).sum() + scale.sum() + dist.Normal(0.0, 1.0).log_prob(weight).sum()
    exact = exact + dist.Normal(x @ (scale.exp() * weight), 1.0).log_prob(y).sum()
    assert abs(float(target.log_density(u)[0] - exact)) < 1e-9


@pytest.mark.parametrize(("prior", "groups"), EVERY)
def test_deterministic_for_a_seed(prior, groups):
    layer, x = layer_of("linear")
    network = sparsify(layer, lambda f: dist.Normal(f, 1.0), num_data=2, prior=prior, groups=groups)
    one, two = (network.sample_outputs(x, 3, seed=1) for _ in range(2))
    assert one.shape == (3, 2, 2) and torch.equal(one, two)
    assert torch.equal(network(x), network(x))


def categorical(outputs):
    return dist.Categorical(logits=outputs)


def _tied():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"layer '1' \(BatchNorm1d\).*fuse_conv_bn_eval"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), "BatchNorm1d"),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "LayerNorm.*elementwise_affine=False"),
        (nn.Sequential(nn.LSTM(2, 2)), "LSTM.*Conv1d along time"),
        (nn.GRUCell(2, 2), "GRUCell.*Conv1d along time"),
        (nn.TransformerEncoderLayer(4, 2), "MultiheadAttention"),
        (nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)), "one_hot"),
        (nn.Sequential(nn.ConvTranspose2d(1, 1, 2)), "Upsample"),
        (nn.Bilinear(2, 2, 1), "products of the two inputs"),
        (nn.Sequential(nn.Linear(2, 2), nn.PReLU()), "LeakyReLU"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "Identity"),
        (nn.Sequential(nn.LazyLinear(2)), "call the module once"),
        (nn.Sequential(nn.ReLU()), "no linear or convolutional layer"),
        (nn.Sequential(nn.Conv2d(1, 1, 2, padding_mode="reflect")), "ReflectionPad2d"),
        (nn.ParameterList([nn.Parameter(torch.ones(2))]), "ParameterList.*Linear, Conv1d"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 2), "has the weights of the layer '0' again"),
        (_tied(), "has the weights of the layer '0' again"),
    ],
)
def test_modules_that_are_refused(module, text):
    with pytest.raises(ModelError, match=text):
        sparsify(module, categorical, num_data=2)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(self.inner(x))


def test_settings_that_are_refused():
    line = nn.Linear(2, 2)
    x, y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UnknownNameError, match="log_uniform"):
        sparsify(line, categorical, num_data=2, prior="log-uniform")
    with pytest.raises(SettingsError, match="leave draws"):
        sparsify(line, categorical, num_data=2, prior="spike_and_slab", draws="weights")
    with pytest.raises(SettingsError, match="initial_scale"):
        sparsify(line, categorical, num_data=2, initial_scale=0.0)
    with pytest.raises(SettingsError, match="probability"):
        SpikeAndSlabPrior(probability=1.0)
    with pytest.raises(SettingsError, match="scale"):
        HorseshoePrior(scale=-1.0)
    with pytest.raises(SettingsError, match="threshold"):
        LogUniformPrior(threshold="high")
    with pytest.raises(ModelError, match="no part of the module"):
        sparsify(line, categorical, num_data=2, deterministic=["head"])
    with pytest.raises(ModelError, match="groups=False"):
        sparsify(nn.Conv1d(2, 2, 1, groups=2), categorical, num_data=2, groups=True)
    broken = nn.Linear(2, 2)
    broken.weight.data.fill_(math.nan)
    with pytest.raises(DataError, match="not finite"):
        sparsify(broken, categorical, num_data=2)
    network = sparsify(line, categorical, num_data=4)
    for fraction in (0.0, 1.5):
        with pytest.raises(SettingsError, match="fraction"):
            network.kept(fraction)
    with pytest.raises(SettingsError, match="share"):
        network.precision(0.0)
    with pytest.raises(ShapeError, match="one y for each row"):
        network.model(x, y[:3])
    with pytest.raises(SettingsError, match="more than num_data"):
        sparsify(line, categorical, num_data=3).model(x, y)
    with pytest.raises(ShapeError, match="must be \\(4,\\)"):
        sparsify(line, lambda f: dist.Normal(f, 1.0), num_data=4).model(x, x)
    with pytest.raises(ModelError, match="vectorize_particles=False"):
        ELBO(2).loss(network.model, network.guide, x, y)
    assert math.isfinite(ELBO(2, vectorize_particles=False).loss(network.model, network.guide, x, y))
    with pytest.raises(ModelError, match="'inner' acts twice"):
        ELBO().loss(*(getattr(sparsify(Twice(), categorical, num_data=4), n) for n in ("model", "guide")), x, y)


def test_spikes_are_refused_where_gradients_would_be_wrong():
    network, (x, y) = regression("spike_and_slab"), orthonormal()
    with pytest.raises(ModelError, match="no gradient in its probability"):
        IWAE(2, vectorize_particles=False).differentiable_loss(network.model, network.guide, x, y)
    with pytest.raises(UnsupportedSiteError):
        bk.Target.from_pyro(network.model, x, y)
