"""Kernels of networks as they are, against gradients of single inputs by plain autograd."""

import math

import pytest
import torch
from scipy.stats import norm, t
from torch import Tensor, nn
from torch.nn import functional

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import _empirical_kernels as factors
from bayeskit.models.wide_networks import _empirical_kernels as kernel
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks._empirical_kernels import empirical_ntk, make_gradient_plan, ntk_vector_product


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def jacobian(module: nn.Module, x: Tensor) -> Tensor:
    """Gradients of each output at each input, one at a time, ``(n, k, parameters)``."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for row in x.split(1):
        y = module(row).reshape(-1)
        found = [torch.autograd.grad(v, parameters, retain_graph=True, materialize_grads=True) for v in y]
        rows.append(torch.stack([torch.cat([g.flatten() for g in one]) for one in found]))
    return torch.stack(rows)


def expected(module: nn.Module, x1: Tensor, x2: Tensor) -> Tensor:
    return torch.einsum("iap,jbp->ijab", jacobian(module, x1), jacobian(module, x2))


class Residual(nn.Module):
    """Calls one layer twice, and normalises a sum."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(torch.relu(self.norm(x + self.inner(torch.tanh(self.inner(x))))))


class Tied(nn.Module):
    """Uses the weights of its embedding once more, without calling it."""

    def __init__(self, tied=True):
        super().__init__()
        self.embedding, self.inner, self.tied = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4), tied

    def forward(self, x):
        h = self.inner(self.embedding(x)).tanh().mean(1)
        return functional.linear(h, self.embedding.weight) if self.tied else h


class Detached(nn.Module):
    """Calls a layer without a gradient and uses its weight with one: as many uses as calls."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.inner(x).detach() * functional.linear(x, self.inner.weight)


class TimeFirst(nn.Module):
    """A layer inside whose first dimension is not that of inputs."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(8, 2)

    def forward(self, x):  # (n, 2, 3)
        return self.outer(self.inner(x.transpose(0, 1)).tanh().transpose(0, 1).flatten(1))


class Double(torch.autograd.Function):
    """Twice its argument; torch cannot batch it."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class InPlaceTanh(nn.Module):
    def forward(self, x):
        return x.tanh_()


class WithoutGradients(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Unbatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(6, 4), nn.Parameter(random(4, seed=3))

    def forward(self, x):
        return Double.apply(self.inner(x).tanh()) * self.gain


class PerSite(nn.Module):
    """A dense layer at each site, and outputs with two dimensions."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def shared_weights() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    network[2].weight = network[0].weight
    return network


def frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3))
    for p in (network[0].weight, network[2].bias, network[4].weight, network[4].bias, network[5].weight):
        p.requires_grad_(False)
    return network


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 3, (3, 2), padding="same", dilation=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 3),
    )


def sequences() -> nn.Module:
    normalization = nn.BatchNorm1d(4).eval()
    with torch.no_grad():
        normalization.running_mean.copy_(random(4))
        normalization.running_var.copy_(random(4, seed=1).square() + 0.5)
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), normalization, nn.ReLU(), nn.Flatten(), nn.Linear(28, 3))


def scaled() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    return infinite_width(module, weight_variance=1.5, bias_variance=0.2).network(seed=0)


INTEGERS = torch.tensor([[0, 1, 2], [3, 3, 1], [6, 5, 0], [2, 4, 4], [1, 2, 6]])
# Network, inputs, how many layers have factors, and how many parameters have none.
CASES = {
    "dense": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)),
        random(5, 6),
        3,
        0,
    ),
    "residual and repeated": (Residual, random(5, 6), 3, 0),
    "convolutions": (convolutions, random(5, 2, 7, 6), 5, 0),
    "sequences": (sequences, random(5, 2, 7), 3, 0),
    "scaled": (scaled, random(5, 2, 4, 3), 2, 0),
    "embedding": (lambda: Tied(tied=False), INTEGERS, 2, 0),
    "frozen": (frozen, random(5, 6), 3, 0),
    "dense at sites": (PerSite, random(5, 4, 3), 2, 0),
    "one output": (lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), random(5, 6), 1, 0),
    "tied": (Tied, INTEGERS, 1, 1),
    "shared": (shared_weights, random(5, 6), 0, 3),
    "detached": (Detached, random(5, 6), 0, 1),
    "time first": (TimeFirst, random(5, 2, 3), 1, 2),
    "unknown layer": (lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 2)), random(5, 6), 2, 1),
    "not batched": (Unbatched, random(5, 6), 1, 1),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    make, x, num_layers, num_rest = CASES[request.param]
    torch_state = torch.get_rng_state()
    torch.manual_seed(1)  # torch's layers draw their weights from its global stream
    module = make().double()
    torch.set_rng_state(torch_state)
    plan = make_gradient_plan(module, x)
    assert (len(plan.layers), len(plan.rest)) == (num_layers, num_rest)
    return module, x


def close(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and bool((found - right).abs().max() <= 1e-12 * right.abs().max())


@pytest.mark.calibration
@pytest.mark.parametrize("block_size", [None, 2])
def test_all_outputs_agree_with_gradients_of_single_inputs(case, block_size):
    module, x = case
    right, other = expected(module, x, x), expected(module, x[:3], x[1:])
    diagonal, other_diagonal = (m.diagonal(dim1=2, dim2=3) for m in (right, other))
    full = empirical_ntk(module, x, block_size=block_size)
    assert close(full, right)
    assert torch.equal(full, full.permute(1, 0, 3, 2))
    assert close(empirical_ntk(module, x[:3], x[1:], block_size=block_size), other)
    for outputs, one, two in (
        ("diagonal", diagonal, other_diagonal),
        ("trace", diagonal.mean(-1), other_diagonal.mean(-1)),
    ):
        found = empirical_ntk(module, x, outputs=outputs, block_size=block_size)
        assert close(found, one)
        assert torch.equal(found, found.transpose(0, 1))
        assert close(empirical_ntk(module, x[:3], x[1:], outputs=outputs, block_size=block_size), two)


def test_the_matrix_has_no_negative_eigenvalue(case):
    module, x = case
    matrix = empirical_ntk(module, x).permute(0, 2, 1, 3)
    eigenvalues = torch.linalg.eigvalsh(matrix.reshape(2 * [matrix.shape[0] * matrix.shape[1]]))
    assert eigenvalues[0] >= -1e-14 * eigenvalues[-1]


@pytest.mark.parametrize("block_size", [None, 2])
def test_products_with_a_vector_need_no_matrix(case, block_size):
    module, x = case
    right = expected(module, x[:3], x)
    v = random(5, right.shape[-1], seed=2)
    found = ntk_vector_product(module, x[:3], x, v, block_size=block_size)
    assert close(found, torch.einsum("ijab,jb->ia", right, v))
    assert not found.requires_grad


@pytest.mark.parametrize("by_sites", [True, False])
def test_both_ways_to_multiply_convolutions_agree(monkeypatch, by_sites):
    module, x = convolutions().double(), random(5, 2, 7, 6)
    monkeypatch.setattr(factors, "_by_sites", lambda *args: by_sites)
    monkeypatch.setattr(factors, "CHUNK", 200)
    right = expected(module, x, x)
    assert close(empirical_ntk(module, x), right)
    assert close(empirical_ntk(module, x, outputs="trace"), right.diagonal(dim1=2, dim2=3).mean(-1))
    assert close(empirical_ntk(module, x[:2], x, outputs="diagonal"), right[:2].diagonal(dim1=2, dim2=3))


@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (factors, "_activation_products", lambda first, second: first.activations[:, 0] @ second.activations[:, 0].mT),
        (kernel, "_rest", lambda plan, x: []),
        (kernel, "_mirror", lambda block, outputs: None),
    ],
    ids=["no biases", "no other parameters", "half of the matrix"],
)
def test_a_broken_kernel_is_noticed(monkeypatch, place, name, broken):
    module = nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 2)).double()
    x = random(5, 6)
    right = expected(module, x, x)
    assert close(empirical_ntk(module, x), right)
    monkeypatch.setattr(place, name, broken)
    if name == "_rest":
        with pytest.raises(ModelError, match="do not add up"):
            empirical_ntk(module, x)
    else:
        assert not close(empirical_ntk(module, x), right)


def test_single_precision_stays_single_precision():
    module = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3))
    x = random(8, 20)
    right = expected(module.double(), x, x)
    found = empirical_ntk(module.float(), x.float())
    assert found.dtype == torch.float32
    assert (found - right).abs().max() <= 32 * torch.finfo(torch.float32).eps * right.abs().max()


def test_little_memory_means_small_blocks(monkeypatch):
    module, x = Residual().double(), random(9, 6)
    sizes = []
    whole = kernel.gradient_factors
    monkeypatch.setattr(kernel, "gradient_factors", lambda plan, x: (sizes.append(len(x)), whole(plan, x))[1])
    assert close(empirical_ntk(module, x, max_memory=16000), expected(module, x, x))
    assert 1 < max(sizes) < 9
    assert sum(s.numel() for s in x.split(max(sizes))) * 8 < 16000


def test_the_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.ReLU(), nn.Linear(8, 2)).double()
    instance = nn.InstanceNorm1d(2, track_running_stats=True, affine=True).double()  # in training, it moves averages
    network = nn.Sequential(nn.Unflatten(1, (2, 3)), instance, nn.Flatten(), module)
    x = random(4, 6)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    flags, state = [m.training for m in network.modules()], torch.get_rng_state()
    empirical_ntk(network, x)
    ntk_vector_product(network, x, None, torch.ones(4, 2, dtype=torch.float64))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in module.parameters())
    assert all(p.grad is None for p in instance.parameters())
    assert flags == [m.training for m in network.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in network.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert not x.requires_grad


def test_kernels_of_wide_networks_approach_their_limit(limit):
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    wide = infinite_width(module, weight_variance=2.0, bias_variance=0.1)
    x = random(4, 6)
    right, draws = wide.ntk(x), 40
    logarithms, variance = [], 0.0
    for width in (32, 256):
        networks = [wide.network(width, seed=s).double() for s in range(draws)]
        error = torch.stack([empirical_ntk(network, x, outputs="trace") for network in networks]) - right
        squares = error.square().mean((1, 2))
        logarithms.append(squares.mean().log().item())
        variance += (squares.var() / (draws * squares.mean().square())).item()
    # The error of one draw goes with one over the square root of the width, its square with one over the width.
    assert abs(logarithms[0] - logarithms[1] - math.log(256 / 32)) < limit() * variance**0.5
    # The bias, of order 1/width, is below the noise of so few draws of the wider networks.
    largest = (error.mean(0) / (error.std(0) / draws**0.5)).abs().max()
    assert largest < t.isf(norm.sf(limit(16)), draws - 1)


def test_inputs_are_left_alone_by_functions_in_place():
    module, x = nn.Sequential(nn.Tanh(), nn.Linear(6, 3)).double(), random(5, 6)
    right, before = expected(module, x, x), x.clone()
    module[0] = InPlaceTanh()
    found = empirical_ntk(module, x)
    assert torch.equal(x, before)
    assert close(found, right)
    ntk_vector_product(module, x, None, random(5, 3))
    assert torch.equal(x, before)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_does_not_matter_whether_gradients_are_on(context):
    module, x = Residual().double(), random(5, 6)
    right = expected(module, x, x)
    with context():
        found = empirical_ntk(module, x.clone())
        product = ntk_vector_product(module, x.clone(), None, torch.ones(5, 3, dtype=torch.float64))
    assert close(found, right)
    assert close(product, right.sum((1, 3)))


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "layer '1' normalises over the batch"),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout()), "random numbers"),
        (nn.Linear(6, 4).requires_grad_(False), "no trainable"),
        (WithoutGradients(6, 4), "do not depend on trainable"),
        (lambda x: x, "torch.nn.Module"),
    ],
    ids=["batch norm", "dropout", "frozen", "no gradients", "no module"],
)
def test_modules_without_a_kernel_are_refused(module, match):
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match=match):
        empirical_ntk(module, torch.ones(3, 6))
    assert torch.equal(torch.get_rng_state(), state)


class Mixing(nn.Module):
    """Takes the mean of inputs, or of features, away."""

    def __init__(self, where):
        super().__init__()
        self.inner, self.outer, self.where = nn.Linear(6, 4), nn.Linear(4, 3), where

    def forward(self, x):
        if self.where == "inputs":
            x = x - x.mean(0)
        h = self.inner(x)
        if self.where == "in place":
            x += 1
        if self.where == "features":
            h = h - h.mean(0)
        y = self.outer(h.tanh())
        return y.softmax(0) if self.where == "outputs" else (y, y) if self.where == "pair" else y


@pytest.mark.parametrize("where", ["inputs", "features", "outputs"])
def test_modules_that_mix_inputs_are_refused(where):
    with pytest.raises(ModelError, match="depend on other inputs"):
        empirical_ntk(Mixing(where), random(5, 6).float())
    with pytest.raises(ModelError, match="depend on other inputs"):
        ntk_vector_product(Mixing(where), random(5, 6).float(), None, torch.ones(5, 3))


def test_other_modules_that_cannot_be_read_are_refused():
    with pytest.raises(ModelError, match="must return a real tensor"):
        empirical_ntk(Mixing("pair"), torch.ones(3, 6))
    with pytest.raises(ModelError, match="in place"):
        empirical_ntk(nn.Sequential(nn.ReLU(), Mixing("in place")), torch.ones(3, 6))
    with pytest.raises(ModelError, match="cannot be differentiated"):
        empirical_ntk(nn.Sequential(InPlaceTanh(), nn.ReLU(inplace=True), nn.Linear(6, 3)), torch.ones(3, 6))


@pytest.mark.parametrize(
    ("x1", "x2", "error", "match"),
    [
        (torch.ones(3, 5), None, ShapeError, "cannot be applied to inputs of shape"),
        (torch.ones(3, 6, dtype=torch.float64), None, DataError, "float64"),
        (torch.tensor([[1.0] * 6, [float("nan")] * 6]), None, DataError, "row 1"),
        (torch.ones(3, 6), torch.full((2, 6), float("inf")), DataError, "x2 has values"),
        (torch.ones(3, 6), torch.ones(2, 2, 6), ShapeError, "one shape"),
        (torch.ones(0, 6), None, DataError, "at least one input"),
        (["a"], None, DataError, "tensor"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x1, x2, error, match):
    with pytest.raises(error, match=match):
        empirical_ntk(nn.Linear(6, 4), x1, x2)


def test_settings_outside_their_domain_are_refused():
    for settings in ({"outputs": "sum"}, {"block_size": 0}, {"max_memory": 0.5}):
        with pytest.raises(SettingsError, match=next(iter(settings))):
            empirical_ntk(nn.Linear(6, 4), torch.ones(3, 6), **settings)
    with pytest.raises(ShapeError, match="v must be"):
        ntk_vector_product(nn.Linear(6, 4), torch.ones(3, 6), None, torch.ones(3))
