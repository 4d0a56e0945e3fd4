"""Layers that move features about, exactly: networks that are linear in the weights of each layer.

Without nonlinearities and biases an output is a sum of products of one weight a layer, so that its covariance is the
sum of squares of their coefficients, at any width; and the tangent kernel is as many times that as there are layers.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayeskit.models.wide_networks import _layers as dense
from bayeskit.models.wide_networks import infinite_width


def conv(*settings, entering=1, **options):
    return nn.Conv2d(entering, 1, *settings, bias=False, **options)


def line(*settings, entering=1, **options):
    return nn.Conv1d(entering, 1, *settings, bias=False, **options)


def flat(sites, *layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(sites, 1, bias=False))


def averaged(*layers):
    return flat(1, *layers, nn.AdaptiveAvgPool2d(1))


class Joined(nn.Module):
    """The difference of two branches of two layers each, with shares of one to three, before a third."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(40, 1, bias=False), nn.Linear(40, 3, bias=False)
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        x = x.flatten(1)
        return self.last(torch.cat([2 * self.one(x), -self.two(x)], 1) / 3)


IMAGES = {
    "strides": averaged(conv(3, stride=2, padding=1, entering=2), conv(2)),
    "strides, flattened": flat(4, conv(3, stride=(1, 2), padding=1, entering=2), conv((3, 2))),
    "dilation": averaged(conv(3, padding=2, dilation=2, entering=2), conv(2, dilation=(1, 2))),
    "circles": averaged(conv(3, padding=(1, 2), padding_mode="circular", entering=2), conv(2)),
    "the same size": averaged(
        conv((1, 5), padding="same", entering=2), conv(3, padding="same", padding_mode="reflect")
    ),
    "no padding": flat(2, conv(3, padding="valid", entering=2), conv((2, 2))),
    "reflections": averaged(conv(3, padding=2, padding_mode="reflect", entering=2), conv(3)),
    "edges": averaged(conv(3, padding=2, padding_mode="replicate", entering=2), conv(3)),
    "windows": averaged(conv(3, padding=1, entering=2), nn.AvgPool2d(2, stride=1, padding=1), conv(2)),
    "windows, flattened": flat(
        6, conv(3, padding=1, entering=2), nn.AvgPool2d((2, 3), stride=2, padding=(0, 1)), conv(1, 1)
    ),
    "windows of the input": flat(4, nn.AvgPool2d(2), conv(1, entering=2)),
    "the average of the input": nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(2, 1, bias=False)),
    "a kept grid": flat(1, conv(3, entering=2), nn.AdaptiveAvgPool2d(1), conv(1)),
}
LINES = {
    "strides": flat(3, line(3, stride=2, padding=1, entering=2), line(2)),
    "windows": flat(2, line(3, padding=2, padding_mode="circular", entering=2), nn.AvgPool1d(3, 2, 1), line(2, 2)),
    "average": flat(1, line(3, dilation=2, entering=2), nn.AdaptiveAvgPool1d(1)),
}


def inputs(*shape):
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


CASES = {
    **{f"images, {name}": (module, inputs(2, 4, 5)) for name, module in IMAGES.items()},
    **{f"lines, {name}": (module, inputs(2, 7)) for name, module in LINES.items()},
}


def exact_covariance(network, x):
    """Return sums over all products of one weight a layer of their coefficients' products."""
    names = [name for name, _ in network.named_parameters()]
    weights = [torch.zeros_like(weight) for weight in network.parameters()]

    def output(*values):
        return functional_call(network, dict(zip(names, values, strict=True)), (x,))[:, 0]

    coefficients = output
    for i in range(len(names)):
        coefficients = jacrev(coefficients, argnums=i)
    found = coefficients(*weights).flatten(1)
    return found @ found.mT


def worst_error(name):
    module, x = CASES[name]
    module = module.double()
    kernel = infinite_width(module, weight_variance=1.3)
    wanted = exact_covariance(kernel.network(seed=0), x)
    num_layers = len(list(module.parameters()))
    scale = wanted.abs().max()
    found = kernel.both(x)
    cross = kernel.both(x, x[:2].clone())
    return max(
        float((got - times * reference).abs().max() / scale)
        for times, got, reference in (
            (1, found.nngp, wanted),
            (num_layers, found.ntk, wanted),
            (1, cross.nngp, wanted[:, :2]),
            (num_layers, cross.ntk, wanted[:, :2]),
            (1, kernel.nngp_diagonal(x), wanted.diagonal()),
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_exact(name):
    assert worst_error(name) < 1e-12


@pytest.mark.parametrize("name", ["images, circles", "images, reflections", "images, edges"])
def test_the_check_notices_another_padding(name, monkeypatch):
    before, others = dense.padded, {"circular": "replicate", "reflect": "circular", "replicate": "reflect"}
    monkeypatch.setattr(dense, "padded", lambda x, axis, width, mode: before(x, axis, width, others[mode]))
    assert worst_error(name) > 1e-3


def test_joined_branches_keep_their_shares_and_scales():
    module, x = Joined().double(), inputs(2, 4, 5)
    products = x.flatten(1) @ x.flatten(1).mT / 40
    # Two layers of variance 1.3; a quarter of the channels carries (2/3)**2, the others (1/3)**2.
    wanted = 1.3**2 * products * (0.25 * 4 + 0.75) / 9
    found = infinite_width(module, weight_variance=1.3).both(x)
    torch.testing.assert_close(found.nngp, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.ntk, 2 * wanted, rtol=1e-12, atol=1e-13)
