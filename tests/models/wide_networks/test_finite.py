"""Kernels of each kind of layer against averages over wide networks with random weights."""

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks._activations import Erf
from bayeskit.models.wide_networks._covariance import Covariance

NUM_NETWORKS = 32
NUM_OUTPUTS = 128
FAILURE_RATE = 1e-5


class Graph(nn.Module):
    """Layers by name, and how they are joined."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.joined = forward

    def forward(self, x):
        return self.joined(self, x)


def linear(entering, leaving=128):
    return nn.Linear(entering, leaving)


def readout(entering=128):
    return nn.Linear(entering, NUM_OUTPUTS)


def dense(*between, standard=False):
    return nn.Sequential(linear(3), *between, readout())


def frozen(layer, *names):
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def images(*layers, entering=32):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), readout(entering))


def joined(self, x):
    return self.last(torch.cat([torch.relu(self.one(x)), self.erf(self.two(x))], 1))


def joined_then_activated(self, x):
    return self.last(torch.relu(self.middle(torch.relu(torch.cat([self.one(x), self.two(x)], dim=1)))))


def difference(self, x):
    h = self.one(x)
    return self.last(functional.gelu(0.5 * h - self.two(torch.relu(h)) / 2))


def normalized_sum(self, x):
    h = self.norm(self.one(x))
    return self.last(h + self.two(torch.relu(h)))


VECTORS = {
    "plain": dense(nn.ReLU(), linear(128), nn.GELU()),
    "leaky with a slope of its own": Graph(
        lambda self, x: self.last(functional.leaky_relu(self.one(x), 0.5)), one=linear(3), last=readout()
    ),
    "layer norm after": dense(nn.ReLU(), nn.LayerNorm(128, elementwise_affine=False), linear(128), nn.ReLU()),
    "layer norm after, with gains": dense(nn.ReLU(), nn.LayerNorm(128), linear(128), nn.ReLU()),
    "layer norm before, with gains": dense(nn.LayerNorm(128), nn.GELU()),
    "layer norm before, with shifts only": dense(frozen(nn.LayerNorm(128), "weight"), nn.ReLU()),
    "layer norm of the input": nn.Sequential(
        nn.LayerNorm(3, elementwise_affine=False), linear(3), nn.ReLU(), readout()
    ),
    "layer norm with gains in a sum": Graph(
        normalized_sum, one=linear(3), norm=nn.LayerNorm(128), two=linear(128), last=readout()
    ),
    "dropout": dense(nn.ReLU(), nn.Dropout(0.3), linear(128), nn.ReLU(), nn.Dropout(0.5)),
    "dropout at rest": dense(nn.ReLU(), nn.Dropout(0.3).eval()),
    "frozen": nn.Sequential(
        frozen(linear(3), "weight", "bias"), nn.ReLU(), frozen(linear(128), "bias"), nn.ReLU(), readout()
    ),
    "concatenation": Graph(
        joined, one=linear(3, 128), two=linear(3, 32), erf=Elementwise(Erf()), last=readout(160)
    ),
    "concatenation, then an activation": Graph(
        joined_then_activated, one=linear(3, 96), two=linear(3, 32), middle=linear(128), last=readout()
    ),
    "difference and scales": Graph(difference, one=linear(3), two=linear(128), last=readout()),
    "one activation twice": Graph(
        lambda self, x: self.last(self.act(self.two(self.act(self.one(x))))),
        one=linear(3), two=linear(128), act=nn.ReLU(), last=readout(),
    ),
    "one after another": dense(nn.Tanh(), nn.Softplus()),
}  # fmt: skip
IMAGES = {
    "stride": images(nn.Conv2d(2, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 2), nn.ReLU()),
    "dilation and circles": images(
        nn.Conv2d(2, 32, 3, padding=2, dilation=2, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(32, 32, (1, 3), padding="same"),
        nn.ReLU(),
    ),
    "reflections": images(
        nn.Conv2d(2, 32, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=2, padding_mode="replicate"),
        nn.ReLU(),
    ),
    "windows": images(
        nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2, stride=1, padding=1), nn.Conv2d(32, 32, 2), nn.ReLU()
    ),
    "flattened windows": nn.Sequential(
        nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d((2, 1), stride=2), nn.Flatten(), readout(32 * 2 * 3)
    ),
    "layer norm before, with gains": images(
        nn.Conv2d(2, 32, 3, padding=1), nn.LayerNorm((32, 4, 5)), nn.ReLU(), nn.Conv2d(32, 32, 2), nn.ReLU()
    ),
    "layer norm after, with gains": images(
        nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.LayerNorm((32, 4, 5)), nn.Conv2d(32, 32, 2), nn.ReLU()
    ),
    "layer norm with gains, then the average": images(
        nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.LayerNorm((32, 4, 5))
    ),
    "dropout": images(nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(32, 32, 2), nn.ReLU()),
    "activation behind a flattening": nn.Sequential(
        nn.Conv2d(2, 32, 3), nn.Flatten(), nn.ReLU(), readout(32 * 2 * 3)
    ),
}  # fmt: skip
LINES = {
    "strides": nn.Sequential(
        nn.Conv1d(2, 64, 3, stride=2, padding=1), nn.ReLU(), nn.AvgPool1d(2, stride=1, padding=1),
        nn.Conv1d(64, 64, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), readout(64),
    ),
    "mean": Graph(
        lambda self, x: self.last(torch.relu(self.two(torch.relu(self.one(x)))).mean(-1)),
        one=nn.Conv1d(2, 64, 3, padding=1, padding_mode="circular"), two=nn.Conv1d(64, 64, 3), last=readout(64),
    ),
}  # fmt: skip


def inputs(*shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[2] = x[0] + 0.3 * x[1]
    return x + 0.2


CASES = {
    **{f"vectors, {name}": (module, inputs(3), 384) for name, module in VECTORS.items()},
    **{f"images, {name}": (module, inputs(2, 4, 5), 128) for name, module in IMAGES.items()},
    **{f"lines, {name}": (module, inputs(2, 7), 256) for name, module in LINES.items()},
}


def kernels_of(network, x):
    """Return products of a network's outputs, averaged over them, and of gradients of the first."""
    outputs = network(x)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(y, parameters, retain_graph=True)]) for y in outputs[:, 0]
    ]
    jacobian = torch.stack(gradients)
    return (outputs @ outputs.mT / NUM_OUTPUTS).detach(), jacobian @ jacobian.mT


def largest_distance(kernel, x, width, limits=None):
    """Return the largest distance of averages over networks from the kernels, by what chance and width allow.

    Errors by chance come from the networks' own spread. The law of finite networks is off by order 1/width; as many
    times that as there are layers with weights is allowed for, of the product of standard deviations.
    """
    generator = new_generator(0, stream="networks")
    drawn = [[], []]
    for seed in range(NUM_NETWORKS):
        network = kernel.network(width, seed=seed).float()
        with global_stream(generator):  # of dropout
            for kept, matrix in zip(drawn, kernels_of(network, x.float()), strict=True):
                kept.append(matrix.double())
    width = width or min(len(p) for p in kernel.module.parameters() if p.dim() > 1)
    rows, columns = torch.triu_indices(len(x), len(x))
    quantile = stats.t.isf(FAILURE_RATE / (4 * len(rows)), NUM_NETWORKS - 1)
    distances = []
    for kept, limit in zip(drawn, limits or kernel.both(x), strict=True):
        stack = torch.stack(kept)
        size = (limit.diagonal()[:, None] * limit.diagonal()).sqrt()
        allowed = quantile * stack.std(0) / NUM_NETWORKS**0.5 + len(kernel.variances.weight) / width * size
        distances.append(((stack.mean(0) - limit).abs() / allowed)[rows, columns].max())
    return float(torch.stack(distances).max())


def read(module, parameterization="ntk"):
    return infinite_width(module.double(), parameterization, weight_variance=1.6, bias_variance=0.2)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_averages_over_wide_networks(name):
    module, x, width = CASES[name]
    assert largest_distance(read(module), x, width) < 1


WIDE = nn.Sequential(linear(3, 512), nn.ReLU(), nn.LayerNorm(512), linear(512, 512), nn.GELU(), readout(512))
STANDARD = {
    "vectors": (WIDE, inputs(3)),
    "images": (
        images(nn.Conv2d(2, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 2), nn.ReLU(), entering=128),
        inputs(2, 4, 5),
    ),
}


@pytest.mark.calibration
@pytest.mark.parametrize("name", STANDARD)
def test_kernels_of_the_standard_parametrization_are_those_of_the_modules_own_widths(name):
    module, x = STANDARD[name]
    assert largest_distance(read(module, "standard"), x, None) < 1


@pytest.mark.parametrize("name", ["layer norm before, with gains", "layer norm after, with gains"])
def test_the_check_notices_gains_that_are_shared_between_sites(name, monkeypatch):
    module, x, width = CASES[f"images, {name}"]
    monkeypatch.setattr(Covariance, "same_site", 1.0)
    assert largest_distance(read(module), x, width) > 1


@pytest.mark.parametrize("change", [(1.6, 0.3), (1.75, 0.2)])
def test_the_check_notices_other_variances(change):
    module, x, width = CASES["vectors, plain"]
    kernel = read(module)
    assert largest_distance(kernel, x, width, kernel.with_variances(*change).both(x)) > 1


def test_the_check_notices_noise_that_is_left_out():
    module, x, width = CASES["vectors, dropout"]
    without = infinite_width(dense(nn.ReLU(), linear(128), nn.ReLU()), weight_variance=1.6, bias_variance=0.2)
    assert largest_distance(read(module), x, width, without.both(x)) > 1


def test_networks_keep_the_proportions_of_what_they_join():
    module = VECTORS["concatenation"]
    network = read(module).network(256)
    assert (network.one.out_features, network.two.out_features, network.last.in_features) == (256, 64, 320)
    with pytest.raises(SettingsError, match="whole numbers"):
        read(module).network(30)
    beside = Graph(
        lambda self, x: self.last(torch.cat([x, torch.relu(self.one(x))], 1)), one=linear(3), last=readout(131)
    )
    with pytest.raises(SettingsError, match="input itself"):
        read(beside).network(256)
    assert largest_distance(read(beside), inputs(3), None) < 1


def test_networks_forget_the_weights_of_the_module():
    module = nn.Sequential(nn.LayerNorm(3), linear(3), nn.LayerNorm(128), nn.ReLU(), readout())
    for parameter in module.parameters():
        nn.init.constant_(parameter, 7.0)
    network = read(module).network(seed=1)
    assert all(bool((network[i].weight == 1).all() and (network[i].bias == 0).all()) for i in (0, 2))
    assert float(network[1].weight.detach().abs().max()) < 6
    for one, other in zip(network.parameters(), read(module).network(seed=1).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
