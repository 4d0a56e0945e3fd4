"""Different ways of writing one network are read as one network."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import Elementwise, infinite_width

VECTORS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PICTURES = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Written(nn.Module):
    """Layers by name, and a forward method."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.written = forward

    def forward(self, x):
        return self.written(self, x)


def dense(forward, **layers):
    shared = {"one": nn.Linear(3, 8), "two": nn.Linear(8, 8), "three": nn.Linear(8, 8), "last": nn.Linear(8, 1)}
    return Written(forward, **(shared | layers))


def pictures(forward, channels=80, **layers):
    shared = {"one": nn.Conv2d(2, 4, 3, padding=1), "last": nn.Linear(channels, 1)}
    return Written(forward, **(shared | layers))


def kernels(module, x, **variances):
    return torch.stack(infinite_width(module, **({"weight_variance": 1.7, "bias_variance": 0.3} | variances)).both(x))


PLAIN = dense(lambda self, x: self.last(torch.relu(self.one(x))))
FLAT = pictures(lambda self, x: self.last(torch.flatten(torch.relu(self.one(x)), 1)))
POOLED = pictures(lambda self, x: self.last(torch.relu(self.one(x)).mean((2, 3))), channels=4)


def flattened(function):
    return pictures(lambda self, x: self.last(function(torch.relu(self.one(x)), x)))


def pooled(function):
    return pictures(lambda self, x: self.last(function(torch.relu(self.one(x)))), channels=4)


def ended(function):
    return dense(lambda self, x: function(self.last(torch.relu(self.one(x))), x))


ALIKE = {
    "squeeze": (ended(lambda y, x: y.squeeze(-1)), PLAIN),
    "squeeze from the front": (ended(lambda y, x: torch.squeeze(y, dim=1)), PLAIN),
    "vectors flattened": (ended(lambda y, x: y.flatten(start_dim=1)), PLAIN),
    "view": (flattened(lambda h, x: h.view(h.size(0), -1)), FLAT),
    "view of the input's length": (flattened(lambda h, x: h.view(x.size()[0], -1)), FLAT),
    "reshape": (flattened(lambda h, x: h.reshape(h.shape[0], -1)), FLAT),
    "reshape to a tuple": (flattened(lambda h, x: torch.reshape(h, (x.shape[0], -1))), FLAT),
    "length": (flattened(lambda h, x: h.view(len(x), -1)), FLAT),
    "flatten by name": (flattened(lambda h, x: h.flatten(start_dim=1)), FLAT),
    "flatten from behind": (flattened(lambda h, x: h.flatten(-3, 3)), FLAT),
    "mean from behind": (pooled(lambda h: h.mean((-2, -1))), POOLED),
    "mean of both counts": (pooled(lambda h: h.mean(dim=(2, -1))), POOLED),
    "mean by another name": (pooled(lambda h: h.mean(axis=(-1, -2))), POOLED),
    "mean that keeps the grid": (pooled(lambda h: h.mean((2, 3), True).flatten(1)), POOLED),
    "joined from behind": (
        dense(lambda self, x: self.last(torch.cat([(h := self.one(x)), self.two(h)], dim=-1)), last=nn.Linear(16, 1)),
        dense(lambda self, x: self.last(torch.cat([(h := self.one(x)), self.two(h)], dim=1)), last=nn.Linear(16, 1)),
    ),
    "scaled by name": (
        dense(lambda self, x: self.last(torch.relu(torch.mul(input=self.one(x), other=2.0)))),
        dense(lambda self, x: self.last(torch.relu(2.0 * self.one(x)))),
    ),
    "added by name": (
        dense(lambda self, x: self.last(torch.add(input=(h := self.one(x)), other=self.two(torch.relu(h)), alpha=2))),
        dense(lambda self, x: self.last((h := self.one(x)) + 2 * self.two(torch.relu(h)))),
    ),
    "function by name": (dense(lambda self, x: self.last(functional.relu(input=self.one(x)))), PLAIN),
    "function in place": (dense(lambda self, x: self.last(self.one(x).relu_())), PLAIN),
    "group of all channels": (
        pictures(
            lambda self, x: self.last(torch.relu(self.norm(self.one(x))).flatten(1)),
            norm=nn.GroupNorm(1, 4, affine=False),
        ),
        pictures(
            lambda self, x: self.last(torch.relu(self.norm(self.one(x))).flatten(1)),
            norm=nn.LayerNorm([4, 5, 4], elementwise_affine=False),
        ),
    ),
    "group of all features": (
        dense(lambda self, x: self.last(self.norm(torch.relu(self.one(x)))), norm=nn.GroupNorm(1, 8)),
        dense(lambda self, x: self.last(self.norm(torch.relu(self.one(x)))), norm=nn.LayerNorm(8)),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_ways_of_writing_a_network_have_one_kernel(name):
    one, other = ALIKE[name]
    x = PICTURES if hasattr(one, "one") and isinstance(one.one, nn.Conv2d) else VECTORS
    found = kernels(one, x)
    torch.testing.assert_close(found, kernels(other, x), rtol=1e-14, atol=0)
    # The kernel is that of a module which runs, and whose random networks are made.
    with torch.no_grad():
        assert one.double()(x).shape[0] == len(x)


def overwritten(overwrite):
    """A residual sum behind an operation that may be in place."""
    return dense(lambda self, x: self.last((h := self.one(x)) + self.two(overwrite(h))))


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda h: functional.relu(h, True),
        lambda h: functional.relu(h, inplace=True),
        lambda h: h.relu_(),
        nn.ReLU(inplace=True).forward,
    ],
)
def test_what_is_overwritten_is_read_as_it_is_then(overwrite):
    after = dense(lambda self, x: self.last((h := torch.relu(self.one(x))) + self.two(h)))
    torch.testing.assert_close(kernels(overwritten(overwrite), VECTORS), kernels(after, VECTORS), rtol=1e-14, atol=0)
    before = kernels(overwritten(torch.relu), VECTORS)
    assert not torch.allclose(before, kernels(after, VECTORS), rtol=1e-2)


def test_modules_may_overwrite_too():
    module = dense(lambda self, x: self.last((h := self.one(x)) + self.two(self.act(h))), act=nn.ReLU(inplace=True))
    kernel = infinite_width(module)
    after = dense(lambda self, x: self.last((h := torch.relu(self.one(x))) + self.two(h)))
    torch.testing.assert_close(kernel.nngp(VECTORS), infinite_width(after).nngp(VECTORS), rtol=1e-14, atol=0)


def test_a_grid_that_is_kept_by_position_overwrites_nothing():
    def forward(self, x):
        h = self.one(x)
        return self.last(torch.cat([h.mean((2, 3), True).flatten(1), torch.relu(self.more(h)).mean((2, 3))], 1))

    layers = {"more": nn.Conv2d(4, 4, 3)}
    by_position = pictures(forward, channels=8, **layers)
    by_name = pictures(
        lambda self, x: self.last(
            torch.cat([(h := self.one(x)).mean((2, 3)), torch.relu(self.more(h)).mean((2, 3))], 1)
        ),
        channels=8,
        **layers,
    )
    torch.testing.assert_close(kernels(by_position, PICTURES), kernels(by_name, PICTURES), rtol=1e-14, atol=0)


def test_memory_overwritten_in_another_shape_is_refused():
    module = pictures(
        lambda self, x: self.last((flat := (h := self.one(x)).flatten(1)) + 0 * h.relu_().flatten(1) + flat)
    )
    with pytest.raises(ModelError, match="'relu_'.*overwrites features.*used later"):
        infinite_width(module)


@pytest.mark.parametrize("layer, x", [(nn.Linear(3, 5), VECTORS), (nn.Linear(3, 1, bias=False), VECTORS)])
def test_a_single_layer_is_a_network(layer, x):
    kernel = infinite_width(layer, weight_variance=2.0, bias_variance=0.5)
    expected = 2.0 * x @ x.T / 3 + (0.5 if layer.bias is not None else 0.0)
    torch.testing.assert_close(kernel.nngp(x), expected, rtol=1e-13, atol=1e-15)
    assert kernel.network(seed=1).double()(x).shape == (4, layer.out_features)


def test_a_single_convolution_is_read():
    with pytest.raises(ShapeError, match="ends in features on a grid"):
        infinite_width(nn.Conv2d(2, 4, 3)).nngp(PICTURES)


@pytest.mark.parametrize("name", ["input", "output", "x"])
def test_layers_may_have_any_name(name):
    module = nn.Sequential()
    for key, layer in ((name, nn.Linear(3, 8)), ("relu", nn.ReLU()), ("last", nn.Linear(8, 1))):
        module.add_module(key, layer)
    torch.testing.assert_close(kernels(module, VECTORS), kernels(PLAIN, VECTORS), rtol=1e-14, atol=0)


class Squared(nn.ReLU):
    def forward(self, x):
        return torch.relu(x) ** 2


def test_a_changed_activation_is_not_taken_for_its_parent():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kink, to six digits
        found = kernels(nn.Sequential(nn.Linear(3, 8), Elementwise(Squared()), nn.Linear(8, 1)), VECTORS)[0]
    diagonal = 1.7 * VECTORS.square().mean(1) + 0.3
    expected = 1.7 * 1.5 * diagonal.square() + 0.3  # half of the fourth moment
    torch.testing.assert_close(found.diagonal(), expected, rtol=1e-4, atol=0)


def test_gains_that_sites_share_have_no_tangent_kernel():
    module = pictures(lambda self, x: self.last(torch.relu(self.norm(self.one(x))).flatten(1)), norm=nn.GroupNorm(1, 4))
    kernel = infinite_width(module)
    assert kernel.nngp(PICTURES).shape == (3, 3)
    with pytest.raises(ModelError, match="'norm'.*GroupNorm.*affine=False"):
        kernel.ntk(PICTURES)


def behind_a_sum():
    block = Written(lambda self, x: torch.relu(x + self.one(torch.relu(x))), one=nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), block, nn.Linear(8, 1))


def unrecorded(self, x):
    with torch.no_grad():
        h = torch.relu(self.one(x))
    return self.last(h)


def hooked():
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    module[1].register_forward_hook(lambda module, inputs, output: 3 * output)
    return module


def several():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1)),
    )


def attending(self, x):
    h, _ = self.attention(self.one(x), self.one(x), self.one(x))
    return self.last(h)


REFUSED = {
    "nonlinearity behind a sum": (
        behind_a_sum,
        r"'relu_?\d*'.*in module '2'.*line \d+ of test_reading.py.*torch.relu\(x \+.*shortcut.*x \+ Conv2d\(relu",
    ),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
        r"couples the inputs of a batch.*nn.LayerNorm\(\[4, height, width\]\) or nn.GroupNorm\(1, 4\)",
    ),
    "batch norm in evaluation": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(),
        r"eval mode.*statistics of past data.*nn.LayerNorm\(4\)",
    ),
    "several groups": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)), r"nn.GroupNorm\(1, 4\)"),
    "all at once": (
        several,
        r"(?s)'1' \(BatchNorm2d\), layer '5' \(BatchNorm2d\): it couples.*'3' \(MaxPool2d\)",
    ),
    "product": (
        lambda: dense(lambda self, x: self.last((h := self.one(x)) * torch.sigmoid(h))),
        r"'mul'.*nn.SiLU, or Elementwise\(lambda h",
    ),
    "recurrent": (
        lambda: dense(lambda self, x: self.last(self.cell(self.one(x))[0]), cell=nn.LSTM(8, 8)),
        r"'cell' \(LSTM\): a recurrent network.*empirical_ntk",
    ),
    "attention": (
        lambda: dense(attending, attention=nn.MultiheadAttention(8, 2)),
        r"'attention' \(MultiheadAttention\): attention multiplies.*empirical_ntk",
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2), r"TransformerEncoderLayer\): attention.*empirical_ntk"),
    "softmax": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Softmax(-1)), r"'1' \(Softmax\).*likelihood.*empirical_ntk"),
    "function softmax": (lambda: dense(lambda self, x: torch.softmax(self.one(x), 1)), "'softmax'.*likelihood"),
    "rounding": (
        lambda: dense(lambda self, x: self.last(torch.div(self.one(x), 0.3, rounding_mode="floor"))),
        "'div'.*rounds",
    ),
    "no gradients": (lambda: dense(unrecorded), "torch.no_grad.*requires_grad_"),
    "detached": (lambda: dense(lambda self, x: self.last(self.one(x).detach())), "'detach'.*requires_grad_"),
    "parametrization": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), spectral_norm(nn.Linear(8, 1))),
        "'2'.*spectral_norm.*without parametrization",
    ),
    "hook": (hooked, r"'1' \(ReLU\): hooks"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1)), "'0'.*run the module once"),
    "infinite power": (lambda: dense(lambda self, x: self.last(self.one(x) ** float("inf"))), "pow"),
    "part of the outputs": (lambda: ended(lambda y, x: y[:, 0]), "'getitem'.*leave it out"),
    "squeeze of images": (
        lambda: pictures(lambda self, x: self.last(self.one(x).squeeze(-1))),
        r"'squeeze'.*vectors.*x.flatten\(1\)",
    ),
    "squeeze within": (lambda: dense(lambda self, x: torch.relu(self.one(x).squeeze(-1))), "'squeeze'.*end"),
    "reshape": (lambda: flattened(lambda h, x: h.view(-1, 80)), r"'view'.*x.flatten\(1\)"),
    "reshape by channels": (lambda: flattened(lambda h, x: h.view(h.size(1), -1)), r"'view'.*x.flatten\(1\)"),
    "arithmetic of sizes": (
        lambda: dense(lambda self, x: self.last(torch.relu(self.one(x)) / x.size(1))),
        "'truediv'.*size of a tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_say_what_to_write(name):
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        infinite_width(make())


def test_gradients_need_not_be_wanted_by_the_caller():
    with torch.no_grad():
        torch.testing.assert_close(kernels(PLAIN, VECTORS), kernels(PLAIN, VECTORS), rtol=0, atol=0)


def test_reading_leaves_modules_as_they_are():
    kernels(ALIKE["length"][0], PICTURES)
    assert "len" not in globals()


@pytest.mark.parametrize("module", [lambda x: x, "net", None])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(SettingsError, match="takes a torch.nn.Module, not"):
        infinite_width(module)


def test_arrays_are_no_tensors():
    with pytest.raises(DataError, match=r"x1.*not numpy.ndarray; use torch.from_numpy"):
        infinite_width(PLAIN).nngp(VECTORS.numpy())


@pytest.mark.parametrize("mode, most", [("reflect", 4), ("circular", 5)])
def test_padding_is_no_wider_than_the_input(mode, most):
    def network(padding):
        convolution = nn.Conv1d(2, 4, 3, padding=padding, padding_mode=mode)
        return infinite_width(nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()))

    x = PICTURES[..., 0]
    assert network(most).nngp(x).shape == (3, 3)
    with pytest.raises(ShapeError, match=f"'0' adds {most + 1} sites to 5.*{most} at most"):
        network(most + 1).nngp(x)


@pytest.mark.parametrize(
    "function, message",
    [
        (nn.Softmax(-1), "mixes the entries"),
        (lambda x: x / x.std(), "mixes the entries"),
        (nn.Dropout(0.5), "random"),
        (nn.PReLU(), "trainable"),
    ],
)
def test_functions_of_several_numbers_are_no_activations(function, message):
    with pytest.raises((ModelError, SettingsError), match=message):
        Elementwise(function)


def test_networks_of_another_width_keep_their_group_normalization():
    module = pictures(
        lambda self, x: self.last(torch.relu(self.norm(self.one(x))).flatten(1)), norm=nn.GroupNorm(1, 4, affine=False)
    )
    network = infinite_width(module).network(12, seed=0)
    assert network.norm.num_channels == 12
    assert network(PICTURES.float()).shape == (3, 1)
