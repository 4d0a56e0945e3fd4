"""A network's expansion in its parameters: linear in them, with a kernel that stays."""

import copy
import math

import pytest
import torch
from torch import nn

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks._empirical_kernels import empirical_ntk, linearize


@pytest.fixture
def network():
    generator = torch.Generator().manual_seed(0)
    result = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for p in result.parameters():
            p.normal_(generator=generator)
    result[2].bias.requires_grad_(False)
    return result


@pytest.fixture
def x():
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def moved(module: nn.Module, size: float) -> nn.Module:
    """Return a copy whose trainable parameters are changed by random numbers."""
    result, generator = copy.deepcopy(module), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in result.parameters():
            if p.requires_grad:
                p += size * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return result


def gradients(module, x):
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(module(x)[:, 0].sum(), parameters)])


def test_it_starts_at_the_network(network, x):
    assert torch.equal(linearize(network)(x), network(x))


def test_gradients_are_those_at_the_start_wherever_it_is(network, x):
    expansion = linearize(network)
    for size in (0.0, 1.0):
        found = gradients(moved(expansion, size), x)
        torch.testing.assert_close(found, gradients(network, x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(gradients(moved(network, 1.0), x), gradients(network, x), rtol=1e-2)


def test_its_kernel_does_not_change(network, x):
    expansion, right = linearize(network), empirical_ntk(network, x)
    for size in (0.0, 1.0):
        found = empirical_ntk(moved(expansion, size), x)
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(empirical_ntk(moved(network, 1.0), x), right, rtol=1e-2)


def test_the_remainder_is_of_second_order(network, x):
    remainders = [(moved(network, size)(x) - moved(linearize(network), size)(x)).norm().item() for size in (1e-3, 1e-4)]
    assert remainders[0] > 0
    # Ten times as small a step has a hundredth of the remainder, up to terms of the third order.
    assert math.log10(remainders[0] / remainders[1]) == pytest.approx(2, abs=0.05)


def test_gradient_descent_follows_the_kernel(network, x):
    """The residuals of least squares shrink by one matrix at each step."""
    expansion, y = linearize(network), torch.ones(6, 2, dtype=torch.float64)
    matrix = empirical_ntk(network, x).permute(0, 2, 1, 3).reshape(12, 12)
    rate = 1.0 / torch.linalg.eigvalsh(matrix)[-1].item()
    residual = (network(x) - y).detach().flatten()
    optimizer = torch.optim.SGD([p for p in expansion.parameters() if p.requires_grad], lr=rate)
    for _ in range(5):
        optimizer.zero_grad()
        (0.5 * (expansion(x) - y).square().sum()).backward()
        optimizer.step()
        residual = residual - rate * matrix @ residual
    torch.testing.assert_close((expansion(x) - y).flatten(), residual, rtol=1e-10, atol=1e-10)


def test_the_network_itself_is_left_alone(network, x):
    before = copy.deepcopy(network.state_dict())
    expansion = linearize(network)
    expansion(x).sum().backward()
    with torch.no_grad():
        expansion.network[0].weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    assert expansion.network[2].bias.grad is None


def test_a_saved_expansion_can_be_loaded(network, x):
    expansion = moved(linearize(network), 0.5)
    other = linearize(moved(network, 2.0))
    other.load_state_dict(expansion.state_dict())
    assert torch.equal(other(x), expansion(x))


def test_nothing_to_train_is_refused(network):
    with pytest.raises(ModelError, match="no trainable"):
        linearize(network.requires_grad_(False))
