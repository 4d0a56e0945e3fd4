"""What has no limit, or does not fit together, is refused by name and with what to do instead."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import Elementwise, infinite_width


class Graph(nn.Module):
    """Layers by name, and how they are joined."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.joined = forward

    def forward(self, x):
        return self.joined(self, x)


def graph(forward, **layers):
    layers = {"one": nn.Linear(3, 8), "two": nn.Linear(8, 8), "last": nn.Linear(8, 1)} | layers
    return Graph(forward, **layers)


def between(layer, channels=8):
    return nn.Sequential(nn.Linear(3, 8), layer, nn.ReLU(), nn.Linear(channels, 1))


def convolved(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(4, 1))


def image_graph(forward):
    return Graph(forward, one=nn.Conv2d(2, 4, 3), last=nn.Linear(4, 1))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 1)

    def forward(self, x, y):
        return self.one(x) + self.one(y)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 1)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else x


class OwnTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.shift = nn.Linear(3, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.one(x) + self.shift


class SeveralOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 8)

    def forward(self, x):
        h = self.one(x)
        return h, h


def tied():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module[2].weight = module[0].weight
    return module


UNREADABLE = {
    "maximum": (convolved(nn.MaxPool2d(2)), r"'2' \(MaxPool2d\).*maximum.*AvgPool"),
    "batch norm": (between(nn.BatchNorm1d(8)), r"'1' \(BatchNorm1d\).*couples the inputs of a batch.*LayerNorm"),
    "instance norm": (convolved(nn.InstanceNorm2d(4)), r"each channel separately.*GroupNorm\(1, 4\)"),
    "trained slope": (between(nn.PReLU()), "'1'.*slope is trained.*LeakyReLU"),
    "unknown layer": (between(nn.GLU()), r"'1' \(GLU\).*nearest.*Elementwise.*empirical_ntk"),
    "groups": (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 1)), "'0'.*groups"),
    "shared layer": (graph(lambda self, x: self.last(self.two(torch.relu(self.two(self.one(x)))))), "'two'.*twice"),
    "shared weights": (tied(), "'2'.*weights of layer '0'"),
    "correlated sum": (
        graph(lambda self, x: (lambda h: self.last(h + torch.relu(h)))(self.one(x))),
        r"'add'.*correlated.*Linear\(f\(h\)\)",
    ),
    "correlated difference": (
        graph(lambda self, x: (lambda h: self.last(h - h.tanh()))(self.one(x))),
        "'sub'.*correlated",
    ),
    "sum with itself": (graph(lambda self, x: (lambda h: self.last(h + h))(self.one(x))), "'add'.*correlated"),
    "constant": (graph(lambda self, x: self.last(self.one(x) + 1.0)), "'add'.*constant.*bias"),
    "product of features": (
        graph(lambda self, x: (lambda h: self.last(h * torch.sigmoid(h)))(self.one(x))),
        "'mul'.*by one another",
    ),
    "quotient": (graph(lambda self, x: self.last(1.0 / self.one(x))), "divides by features"),
    "quotient by zero": (graph(lambda self, x: self.last(self.one(x) / 0)), "by zero"),
    "weights as features": (
        graph(lambda self, x: self.last(torch.matmul(self.one(x), self.one.weight))),
        "'one.weight'",
    ),
    "activation of the data": (nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), "'0'.*not normal.*apply it to the data"),
    "activation of averages": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1)),
        "'3'.*not normal",
    ),
    "activation of unlike channels": (
        graph(
            lambda self, x: self.last(torch.relu(self.norm(torch.cat([self.one(x), self.more(x)], 1)))),
            more=nn.Linear(3, 8),
            norm=nn.LayerNorm(16, elementwise_affine=False),
            last=nn.Linear(16, 1),
        ),
        "'relu'.*different distributions",
    ),
    "second input": (TwoInputs(), "second input, 'y'"),
    "branches on values": (Branching(), "Branching cannot be traced"),
    "tensor of its own": (OwnTensor(), "'shift'"),
    "two outputs": (SeveralOutputs(), "one tensor"),
    "no layers": (nn.Sequential(), "no layers"),
    "concatenation along rows": (
        graph(lambda self, x: self.last(torch.cat([torch.relu(self.one(x)), self.more(x)])), more=nn.Linear(3, 8)),
        "'cat'.*dim=1.*dim=0",
    ),
    "part of a flattening": (convolved(nn.Flatten(1, 2)), "'2'.*Flatten"),
    "part of a function's flattening": (
        image_graph(lambda self, x: self.last(torch.flatten(self.one(x), 1, 2))),
        "'flatten'",
    ),
    "flattening of rows": (image_graph(lambda self, x: self.last(torch.flatten(self.one(x)))), "'flatten'"),
    "mean over channels": (image_graph(lambda self, x: self.last(self.one(x).mean(1))), "'mean'.*whole grid"),
    "adaptive average": (convolved(nn.AdaptiveAvgPool2d(2)), "'2'.*whole grid"),
    "function's adaptive average": (
        image_graph(lambda self, x: self.last(functional.adaptive_avg_pool2d(self.one(x), (2, 1)).flatten(1))),
        "whole grid",
    ),
    "ceiling": (convolved(nn.AvgPool2d(2, ceil_mode=True)), "'2'.*ceil_mode"),
    "padding that does not count": (convolved(nn.AvgPool2d(2, padding=1, count_include_pad=False)), "'2'.*count"),
    "own divisor": (convolved(nn.AvgPool2d(2, divisor_override=3)), "'2'.*divisor"),
    "functional dropout": (graph(lambda self, x: self.last(functional.dropout(self.one(x)))), "nn.Dropout"),
    "all dropped": (between(nn.Dropout(1.0)), "'1'.*rate below one"),
    "unknown function": (graph(lambda self, x: self.last(torch.cumsum(self.one(x), 1))), "cumsum.*Elementwise"),
    "power of no whole number": (graph(lambda self, x: self.last(self.one(x) ** 0.5)), "pow"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_networks_without_a_limit_are_refused_as_they_are_read(name):
    module, message = UNREADABLE[name]
    with pytest.raises(ModelError, match=message):
        infinite_width(module)


UNCHAINED = {
    "dense": (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(16, 1)),
        "'2' expects 16 channels and receives 8 from '1'",
    ),
    "convolutions": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), "'2' expects 8.*receives 4"),
    "layer norm": (between(nn.LayerNorm(5)), "'1' expects 5.*receives 8"),
    "no flattening": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Linear(4, 1)),
        "'2' needs vectors.*images.*Flatten",
    ),
    "lines and images": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3)), "'2' needs.*line.*images"),
    "sum": (graph(lambda self, x: self.one(x) + self.more(x), more=nn.Linear(3, 5)), r"'add'.* adds.*\[8, 5\]"),
    "joined": (
        Graph(
            lambda self, x: torch.cat([self.one(x), self.two(x).mean((2, 3))], 1) + self.one2(x),
            one=nn.Conv2d(2, 4, 3),
            two=nn.Conv2d(2, 4, 3),
            one2=nn.Conv2d(2, 8, 3),
        ),
        "'cat'.*joins vectors and images",
    ),
    "pooled vectors": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.AvgPool2d(2), nn.Linear(4, 1)),
        "'3' needs images",
    ),
    "mean over one axis": (image_graph(lambda self, x: self.last(self.one(x).mean(2))), "'mean'.* needs.*line.*images"),
}


@pytest.mark.parametrize("name", UNCHAINED)
def test_layers_that_do_not_chain_are_refused_as_they_are_read(name):
    module, message = UNCHAINED[name]
    with pytest.raises(ShapeError, match=message):
        infinite_width(module)


VECTORS, PICTURES = torch.ones(2, 3), torch.ones(2, 2, 6, 6)
MISFITS = {
    "features": (between(nn.ReLU()), torch.ones(2, 4), "'0' expects 3 features and receives 4"),
    "one dimension": (between(nn.ReLU()), torch.ones(3), r"x1 must be \(n, features\).*\(3,\)"),
    "images into a dense layer": (between(nn.ReLU()), PICTURES, r"x1 must be \(n, features\)"),
    "vectors into a convolution": (convolved(), VECTORS, r"x1 must be \(n, channels, height, width\)"),
    "channels": (convolved(), torch.ones(2, 3, 6, 6), "'0' expects 2 channels and receives 3"),
    "flattened images": (convolved(), PICTURES, "'3' expects 4 features and receives 144"),
    "window": (nn.Sequential(nn.Conv2d(2, 4, 7), nn.Flatten(), nn.Linear(4, 1)), PICTURES, "'0'.*window is larger"),
    "no readout": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()),
        PICTURES,
        r"ends in features on a grid \(4, 4\).*Flatten",
    ),
    "part of the normalized shape": (
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.LayerNorm((4, 5, 6)), nn.Flatten(), nn.Linear(144, 1)),
        PICTURES,
        r"'1' normalizes \(4, 5, 6\) and receives \(4, 6, 6\)",
    ),
    "none": (between(nn.ReLU()), torch.ones(0, 3), "at least one"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_inputs_that_do_not_fit_are_refused(name):
    module, x, message = MISFITS[name]
    with pytest.raises(ShapeError, match=message):
        infinite_width(module).nngp(x)


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.tensor([[1.0, 2.0, 3.0], [1.0, float("nan"), 0.0]]), "x1.*row 1"),
        (torch.tensor([[float("inf"), 2.0, 3.0]]), "x1.*row 0"),
        (torch.ones(2, 3, dtype=torch.int64), "x1.*floating-point.*int64"),
        ([[1.0, 2.0, 3.0]], "x1.*tensor.*list"),
    ],
)
def test_inputs_that_are_no_numbers_are_refused(x, message):
    with pytest.raises(DataError, match=message):
        infinite_width(between(nn.ReLU())).both(x)


def test_two_sets_of_inputs_must_be_alike():
    kernel = infinite_width(between(nn.ReLU()))
    for other in (torch.ones(2, 4), torch.ones(2, 3, dtype=torch.float64)):
        with pytest.raises(ShapeError, match="x1 and x2"):
            kernel.nngp(VECTORS, other)
    with pytest.raises(DataError, match="x2.*row 1"):
        kernel.nngp(VECTORS, torch.tensor([[1.0, 1.0, 1.0], [0.0, float("inf"), 0.0]]))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"parameterization": "mup"}, "ntk.*standard.*mup"),
        ({"weight_variance": -1.0}, "weight_variance"),
        ({"bias_variance": float("nan")}, "bias_variance"),
        ({"weight_variance": torch.ones(2)}, "weight_variance"),
        ({"weight_variance": torch.tensor(float("inf"))}, "weight_variance"),
        ({"weight_variance": {"0": 1.0}}, r"entry for each of \['0', '3'\]"),
        ({"weight_variance": {"0": 1.0, "3": -2.0}}, r"weight_variance\['3'\]"),
    ],
)
def test_settings_outside_their_domain_are_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        infinite_width(between(nn.Identity()), **settings)


def test_gains_that_a_nonlinearity_meets_mixed_have_no_tangent_kernel():
    module = graph(
        lambda self, x: self.last(torch.relu(self.norm(self.one(x)) + self.two(x))),
        norm=nn.LayerNorm(8),
        two=nn.Linear(3, 8),
    )
    kernel = infinite_width(module)
    assert kernel.nngp(VECTORS).shape == (2, 2)
    with pytest.raises(ModelError, match="'relu'.*LayerNorm.*elementwise_affine=False"):
        kernel.ntk(VECTORS)


def test_elementwise_needs_a_function():
    with pytest.raises(SettingsError, match="function"):
        Elementwise(3.0)
