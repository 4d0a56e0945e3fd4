"""Smaller networks give the outputs of pruned ones; rounding adds the variance that it may."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import ModelError
from bayeskit.models.sparse_networks import sparsify
from bayeskit.models.sparse_networks._compression import SelectedFeatures


def likelihood(outputs):
    return dist.Categorical(logits=outputs)


def with_random_noise(module, groups, prior="log_uniform"):
    """Return a network whose weights differ in what they are worth."""
    network = sparsify(module, likelihood, num_data=10, prior=prior, groups=groups)
    with torch.no_grad():
        for layer in network.layers:
            for name, parameter in layer.weights.named_parameters():
                noisy = "scale_log_scale" if groups else "log_scale"
                if name == noisy or name == "logits":
                    parameter.add_(4 * torch.randn_like(parameter))
    return network


def networks():
    perceptron = nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 15, bias=False), nn.Sigmoid(), nn.Linear(15, 3)
    )
    images = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(32, 10), nn.Softplus(), nn.Linear(10, 3)),
    )
    pooled = nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.MaxPool1d(3, 1, 1), nn.Linear(20, 16), nn.AvgPool1d(2), nn.Linear(8, 3)
    )
    return {"perceptron": (perceptron, (5, 12)), "images": (images, (5, 1, 8, 8)), "pooled": (pooled, (5, 12))}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "images", "pooled"])
@pytest.mark.parametrize("fraction", [0.5, 0.15, 0.02])
def test_smaller_network_has_the_same_outputs(name, groups, fraction):
    with global_stream(new_generator(2)):
        module, shape = networks()[name]
        network = with_random_noise(module.double(), groups)
        x = torch.randn(shape).double()
    pruned, small = network.pruned(fraction), network.compressed(fraction)
    assert (pruned(x) - small(x)).abs().max() < 1e-12
    assert count(small) <= count(pruned) == count(module)
    assert fraction == 0.5 or name == "pooled" or count(small) < count(module)  # pools mix the units of linear layers
    assert not any(type(part).__name__ == "StochasticLayer" for part in [*pruned.modules(), *small.modules()])
    kept = sum(int(k.sum()) for k in network.kept(fraction).values())
    total = sum(k.numel() for k in network.kept().values())
    assert groups or kept == round(fraction * total)


def test_constant_units_move_into_the_next_bias():
    module = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2, bias=False))
    network = sparsify(module, likelihood, num_data=1)
    with torch.no_grad():
        network.layers[0].weights.log_scale[0] = 20.0
    small = network.compressed()
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    assert [tuple(p.shape) for p in small.parameters()] == [(2, 4), (2,), (2, 2), (2,)]
    assert torch.allclose(small(x), network.pruned()(x), atol=1e-6)
    assert bool((small[2].bias != 0).all())


def test_unused_features_are_skipped():
    network = sparsify(nn.Linear(5, 2), likelihood, num_data=1)
    with torch.no_grad():
        network.layers[0].weights.log_scale[:, [0, 3]] = 20.0
    small = network.compressed()
    assert isinstance(small[0], SelectedFeatures) and small[0].index.tolist() == [1, 2, 4]
    assert small[1].weight.shape == (2, 3)


def test_layers_that_mix_units_are_kept():
    module = nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 2))
    network = sparsify(module, likelihood, num_data=1)
    with torch.no_grad():
        network.layers[1].weights.log_scale[:, :3] = 20.0
    small, x = network.compressed(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert count(small) == count(module) and torch.allclose(small(x), network.pruned()(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return x + self.inner(x)


def test_other_modules_are_pruned_but_not_made_smaller():
    network = sparsify(Residual(), likelihood, num_data=1)
    assert torch.allclose(network.pruned()(torch.ones(1, 2)), network(torch.ones(1, 2)))
    with pytest.raises(ModelError, match="not a Sequential"):
        network.compressed()


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_rounding_adds_its_share_of_the_variance(share):
    with global_stream(new_generator(3)):
        network = with_random_noise(nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 4)).double(), False)
    formats, kept = network.precision(share, fraction=0.3), network.kept(0.3)
    rounded = network.pruned(0.3, rounding=share)
    for layer, place in zip(network.layers, (0, 2), strict=True):
        bits, step = formats[layer.name]
        mean, variance = (m[kept[layer.name]].detach() for m in layer.weights.moments())
        assert abs(float((step**2 / 12 / variance).mean()) / share - 1) < 1e-9
        numbers = rounded[place].weight.detach() / step
        assert (numbers - numbers.round()).abs().max() < 1e-9
        assert 2 * float(numbers.abs().max()) + 1 <= 2**bits + 1e-6
        assert (rounded[place].weight.detach()[kept[layer.name]] - mean).abs().max() <= step / 2 + 1e-12
    finer = network.precision(share / 16, fraction=0.3)
    assert all(finer[name].bits >= formats[name].bits + 1 for name in formats)


def test_layer_without_weights_has_no_bits():
    network = sparsify(nn.Linear(3, 2), likelihood, num_data=1)
    with torch.no_grad():
        network.layers[0].weights.log_scale.fill_(20.0)
    assert network.precision()["layer"] == (0, math.inf)
    x = torch.ones(1, 3)
    assert torch.equal(network.compressed(rounding=0.1)(x), network.pruned()(x))
