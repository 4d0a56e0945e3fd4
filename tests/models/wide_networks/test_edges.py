"""Edges of numbers and memory: no variance, tiny and huge inputs, shared memory, fine functions, transforms."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks import _activations as sign
from bayeskit.models.wide_networks import _kernels as evaluation
from bayeskit.models.wide_networks._activations import (
    ExponentialActivation,
    Gelu,
    PiecewiseLinear,
    PolynomialActivation,
    Quadrature,
    Step,
    hermite,
    monomial,
)


def network(*activations, features=3):
    layers = [nn.Linear(features, 8), activations[0]]
    for activation in activations[1:]:
        layers += [nn.Linear(8, 8), activation]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


RELUS = infinite_width(network(nn.ReLU(), nn.ReLU()), weight_variance=2.0)


# Features without variance.


def check_step_at_zero():
    step, a, b = Step(-0.3, 2.0), number([0.0, 0.0, 1.3]), number([0.0, 0.7, 0.0])
    values = 0.85 * torch.stack([step(number(0.0)), number(0.85), number(0.85)])  # f(0) times the mean of f
    torch.testing.assert_close(step.moments(torch.zeros_like(a), a, b).nngp, values, rtol=1e-15, atol=0)
    kernel = infinite_width(network(Elementwise(Step())))
    x = torch.cat([torch.zeros(1, 3).double(), data(2, 3)])
    assert kernel.nngp(x)[0].abs().max() < 1e-15  # as in the finite network, whose features are all sign(0) = 0
    assert kernel.network(64)(x.float())[0].abs().item() == 0
    assert kernel.nngp_diagonal(x).tolist() == pytest.approx([0, 1, 1], abs=1e-15)


def test_a_step_of_a_feature_without_variance_is_its_value_at_zero():
    check_step_at_zero()


def test_the_check_notices_an_angle_of_zero(monkeypatch):
    monkeypatch.setattr(sign, "where_zero", lambda a, b, values, one, both: values)
    with pytest.raises(AssertionError):
        check_step_at_zero()


def test_blank_patches_count_as_zero():
    kernel = infinite_width(nn.Sequential(nn.Conv1d(1, 8, 1), Elementwise(Step()), nn.Flatten(), nn.Linear(32, 1)))
    x = number([[[0.0, 1.0, -1.0, 0.0]], [[2.0, 1.0, 0.0, 0.0]]])
    torch.testing.assert_close(kernel.nngp(x), number([[2.0, 1.0], [1.0, 2.0]]) / 4, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("module", "activation"),
    [(nn.ReLU(), PiecewiseLinear(0.0, 1.0)), (nn.LeakyReLU(0.1), PiecewiseLinear(0.1, 1.0))]
    + [(Elementwise(torch.abs), PiecewiseLinear(-1.0, 1.0))],
)
def test_slopes_at_zero_are_those_of_torch(module, activation):
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).sum(), x)
    mean = 0.5 * (activation.left + activation.right)
    a, b = number([0.0, 0.0]), number([0.0, 1.7])
    found = activation.moments(torch.zeros_like(a), a, b).derivative
    torch.testing.assert_close(found, number([slope[0] ** 2, slope[0] * mean]), rtol=1e-15, atol=0)
    # With biases of no variance the standard parametrisation has gradients at zero nevertheless.
    kernel, zero = infinite_width(network(module), "standard"), torch.zeros(1, 3)
    finite = kernel.network(8)
    gradients = torch.autograd.grad(finite(zero).sum(), [x for x in finite.parameters()])
    if slope[0] == 0:
        assert sum(float(g.square().sum()) for g in gradients) == 1 == float(kernel.ntk(zero))
    torch.testing.assert_close(
        kernel.ntk(zero.double()).squeeze(), 1 + slope[0] ** 2, rtol=1e-14, atol=0
    )  # biases of both layers


# Memory.


def test_memory_that_is_shared_is_refused():
    x = data(3, 3)
    kept = x.clone()
    buffer = torch.empty(2, 3, 3).double()
    for out in (x, x.T, x.view(9).view(3, 3)):
        with pytest.raises(SettingsError, match="shares memory"):
            RELUS.nngp(x, out=out)
    with pytest.raises(SettingsError, match="shares memory"):
        RELUS.ntk(data(3, 3), x, out=x)
    with pytest.raises(SettingsError, match="shares memory"):
        RELUS.both(x, out=(buffer[0], buffer[0].T))
    with pytest.raises(SettingsError, match="expanded"):
        RELUS.nngp(x, out=torch.empty(1, 3).double().expand(3, 3))
    with pytest.raises(SettingsError, match="gradients"):
        RELUS.nngp(x, out=torch.empty(3, 3).double().requires_grad_())
    assert torch.equal(x, kept)
    # Parts of one tensor that do not overlap may be given.
    found = RELUS.both(x, out=(buffer[0], buffer[1]))
    assert torch.equal(found.nngp, RELUS.nngp(x)) and torch.equal(buffer[1], RELUS.ntk(x))
    spaced = torch.empty(3, 6).double()
    assert torch.equal(RELUS.nngp(x, out=spaced[:, ::2]), RELUS.nngp(x))


@pytest.mark.parametrize("make", [lambda o: (o,), lambda o: (None, o), lambda o: o, lambda o: (o, o.numpy())])
def test_results_that_are_no_pair_of_tensors_are_refused(make):
    with pytest.raises(SettingsError, match="pair of tensors"):
        RELUS.both(data(2, 3), out=make(torch.empty(2, 2).double()))


def test_results_that_are_no_tensors_are_refused():
    with pytest.raises(SettingsError, match="must be a tensor"):
        RELUS.nngp(data(2, 3), out=np.empty((2, 2)))


def test_names_of_files_are_checked(tmp_path):
    x, path = data(2, 3), tmp_path / "k.npy"
    with pytest.raises(SettingsError, match="both kernels"):
        RELUS.save(x, nngp=path, ntk=tmp_path / "." / "k.npy")
    with pytest.raises(SettingsError, match="not a tensor"):
        RELUS.save(x, str(path))
    with pytest.raises(SettingsError, match=r"k\.npy"):
        RELUS.save(x, nngp=tmp_path / "k.pt")
    assert not list(tmp_path.iterdir())


# The range of numbers.


def check_scales():
    """A network without biases is homogeneous."""
    x = data(5, 3).float()
    x[4] = x[3] * (1 + 1e-3)
    wanted = RELUS.both(x.double())
    noise = 8 * torch.finfo(torch.float32).eps
    for power in (-50, -40, 34, 55):
        scale = 2.0**power
        for found in (RELUS.both(x * scale), RELUS.both(x * scale, x.clone() * scale)):
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == torch.float32
                assert (one.double() / scale**2 - other).abs().max() < noise * other.abs().max()
    diagonal = RELUS.nngp_diagonal(x * 2.0**-50).double() * 2.0**100
    torch.testing.assert_close(diagonal, RELUS.nngp_diagonal(x.double()), rtol=noise, atol=0)


def test_tiny_and_huge_inputs_keep_their_digits_in_single_precision():
    check_scales()


def test_the_check_notices_products_out_of_range(monkeypatch):
    monkeypatch.setattr(evaluation, "_check_range", lambda *arguments: None)
    with pytest.raises(AssertionError):
        check_scales()


def test_sets_of_different_scales_meet_in_double_precision():
    x, y = data(4, 3).float(), data(3, 3, seed=1).float()
    found = RELUS.nngp(x * 2.0**40, y).double() / 2.0**40
    torch.testing.assert_close(found, RELUS.nngp(x.double(), y.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("scale", "word"), [(1e80, "down"), (1e-80, "up"), (1e-170, "up")])
def test_inputs_beyond_double_precision_are_refused(scale, word):
    with pytest.raises(DataError, match=f"the inputs.*{word}"):
        RELUS.nngp(data(3, 3) * scale)
    with pytest.raises(DataError, match=f"the inputs.*{word}"):
        RELUS.ntk_diagonal(data(3, 3) * scale)


def test_the_layer_is_named_where_numbers_grow():
    kernel = infinite_width(network(Elementwise(ExponentialActivation())))
    with pytest.raises(DataError, match="layer '1'.*down"):
        kernel.both(40 * data(3, 3))
    with pytest.raises(DataError, match="layer '4'.*float32"):  # results alone do not fit
        RELUS.nngp(1e20 * data(3, 3).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype):
    with pytest.raises(DataError, match=r"x1\.float\(\)"):
        RELUS.nngp(data(2, 3).to(dtype))


def test_gelu_of_large_features_is_that_of_a_rectifier():
    a = number([1e10, 1e4, 3e9]).float()
    k = a * number([1.0, 0.5, -0.7]).float()
    found = Gelu().moments(k, a, a)
    wanted = PiecewiseLinear(0.0, 1.0).moments(k.double(), a.double(), a.double())
    # They differ by a part of the order of one by the standard deviation, and by rounding.
    assert ((found.nngp - wanted.nngp) / a).abs().max() < 1e-3
    assert (found.nngp / a)[0] == pytest.approx(0.5, abs=1e-6)


class Beside(nn.Module):
    """A normalisation of data beside the data themselves."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3, elementwise_affine=False)
        self.first, self.second = nn.Linear(3, 8), nn.Linear(3, 8)

    def forward(self, x):
        return self.first(self.norm(x)) + self.second(x)


SHIFTED = torch.tensor([[1e4, 1e4 + 1, 1e4], [1e4, 1e4 - 2, 1e4 + 1]])


def check_layer_norm():
    shifted, x = nn.LayerNorm(3, elementwise_affine=False, eps=1e-5), SHIFTED
    for layers in ([shifted], [nn.Flatten(), shifted]):
        kernel = infinite_width(nn.Sequential(*layers, *network(nn.ReLU())))
        exact = shifted(x.double()).double()
        wanted = infinite_width(network(nn.ReLU())).nngp(exact)
        torch.testing.assert_close(kernel.nngp(x).double(), wanted, rtol=1e-6, atol=1e-7)


def test_layer_norm_of_data_keeps_the_digits_of_differences():
    check_layer_norm()


def test_the_check_notices_data_that_are_not_centred(monkeypatch):
    monkeypatch.setattr(evaluation, "_centred", lambda graph, x: x)
    with pytest.raises(AssertionError):
        check_layer_norm()


def test_layer_norm_beside_other_layers_on_data_takes_double_precision():
    weights = {"first": 1.0, "second": 1e-9}
    kernel = infinite_width(Beside(), weight_variance=weights)
    exact = kernel.module.norm(SHIFTED.double())
    wanted = exact @ exact.mT / 3 + 1e-9 * SHIFTED.double() @ SHIFTED.double().mT / 3
    torch.testing.assert_close(kernel.nngp(SHIFTED).double(), wanted, rtol=1e-6, atol=1e-6)


# Quadrature of functions that it does not suit.


def box(x):
    return ((x > 0.37) & (x < 0.40)).to(x)


def test_functions_finer_than_nodes_have_honest_errors():
    one = number(1.0)
    exact = 0.5 * (math.erf(0.40 / math.sqrt(2)) - math.erf(0.37 / math.sqrt(2)))
    wrong = abs(float(Quadrature(box).moments(one, one, one).nngp) - exact)
    assert wrong > 0.5 * exact
    assert float(Quadrature(box).error_bound(one).nngp) > 0.9 * wrong
    # The slope of tanh(100 z) is a hundredth wide.
    large, nodes = number(1e4), torch.linspace(-1, 1, 200_001).double()
    density = torch.exp(-0.5 * nodes.square()) / math.sqrt(2 * math.pi)
    exact = float(torch.trapezoid((1 / torch.cosh(100 * nodes)) ** 4 * density, nodes))
    wrong = abs(float(Quadrature(torch.tanh).moments(large, large, large).derivative) - exact)
    assert wrong > 1e-6 * exact
    assert float(Quadrature(torch.tanh).error_bound(large).derivative) >= wrong
    # That of smooth functions does not grow.
    assert float(Quadrature(torch.tanh).error_bound(one).nngp) < 1e-12


@pytest.mark.parametrize("function", [box, lambda x: (x.abs() < 1e-3).to(x)])
def test_functions_that_all_nodes_miss_warn(function):
    kernel = infinite_width(network(Elementwise(Quadrature(function))), weight_variance=3.0)
    with pytest.warns(AccuracyWarning, match="layer '1'"):
        kernel.nngp(number([[1.0, 1.0, 1.0]]))


@pytest.mark.parametrize("function", [nn.Softmax(-1), nn.Softmax(0), nn.Dropout(0.5), lambda x: x / x.std()])
def test_functions_of_more_than_one_number_are_refused(function):
    kernel = infinite_width(network(Elementwise(Quadrature(function))))
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match="not elementwise"):
        kernel.nngp(data(3, 3))
    assert torch.equal(state, torch.get_rng_state())


def test_elementwise_functions_pass():
    for function in (torch.tanh, torch.sign, torch.log, nn.Softplus(), lambda x: torch.tanh(x.float()).double()):
        Quadrature(function).check_elementwise()


def test_functions_without_derivative_have_the_kernel_that_needs_none():
    def tanh(x):
        return torch.from_numpy(np.tanh(x.numpy()))

    kernel = infinite_width(network(Elementwise(Quadrature(tanh))))
    wanted = infinite_width(network(nn.Tanh())).nngp(data(3, 3))
    torch.testing.assert_close(kernel.nngp(data(3, 3)), wanted, rtol=1e-13, atol=0)
    with pytest.raises(ModelError, match="derivative"):
        kernel.ntk(data(3, 3))


@pytest.mark.parametrize("degree", [20, 25, 40])
def test_polynomials_of_high_degree_have_both_moments(degree):
    one, k = number(1.0), number(0.9)
    found = hermite(degree).moments(k, one, one)
    assert float(found.nngp) == pytest.approx(0.9**degree, rel=1e-12)
    assert float(found.derivative) == pytest.approx(degree * 0.9 ** (degree - 1), rel=1e-12)
    double_factorial = math.prod(range(2 * degree - 1, 0, -2))
    assert float(monomial(degree).moments(one, one, one).nngp) == pytest.approx(double_factorial, rel=1e-12)


def test_polynomials_whose_digits_cancel_are_refused():
    with pytest.raises(SettingsError, match="40"):
        hermite(41)
    with pytest.raises(SettingsError, match="150"):
        PolynomialActivation((0.0,) * 151 + (1.0,))


# Transforms.


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as forward mode is loaded
@pytest.mark.parametrize("bias", [0.0, 0.1])
@pytest.mark.parametrize("two_sets", [False, True])
def test_derivatives_by_all_of_torchs_ways_agree(bias, two_sets):
    x, weight = data(3, 3), number(2.0)
    x2 = data(2, 3, seed=1) if two_sets else None

    def total(w):
        return sum(k.square().sum() for k in RELUS.with_variances(w, bias).both(x, x2))

    leaf = weight.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(leaf), leaf)
    value, change = torch.func.jvp(total, (weight,), (torch.ones_like(weight),))
    torch.testing.assert_close(value, total(weight), rtol=1e-12, atol=0)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.unpack_dual(total(forward_ad.make_dual(weight, torch.ones_like(weight)))).tangent
    found = change, torch.func.jacfwd(total)(weight), torch.func.grad(total)(weight), dual
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
def test_batches_of_variances_and_of_inputs(activation):
    kernel, x = infinite_width(network(activation())), 0.5 * data(3, 3)
    x[2] = x[1] * (1 + 1e-7)
    weights = number([1.0, 2.0])
    found = torch.func.vmap(lambda w: kernel.with_variances(weight=w).ntk(x))(weights)
    for one, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(one, kernel.with_variances(weight=weight).ntk(x), rtol=1e-12, atol=1e-13)
    batch = torch.stack([x, x + 0.1])
    found = torch.func.vmap(lambda y: kernel.nngp(y))(batch)
    torch.testing.assert_close(found, torch.stack([kernel.nngp(y) for y in batch]), rtol=1e-12, atol=1e-13)


# The rest.


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x):
        return self.last(self.norm(torch.relu(self.second(self.norm(self.first(x))))))


def test_a_normalisation_may_be_used_twice():
    finite = infinite_width(Twice()).network(16)
    assert finite.norm.normalized_shape == (16,)
    assert finite(torch.ones(2, 3)).shape == (2, 1)


def test_sets_without_inputs_are_refused():
    for x2 in (data(0, 3), None):
        with pytest.raises(ShapeError, match="at least one"):
            RELUS.nngp(data(2, 3) if x2 is not None else data(0, 3), x2)


def test_a_network_shows_itself_in_one_line():
    assert repr(RELUS.with_variances(bias=0.1)) == (
        "InfiniteWidth(3 layers with weights, ntk parametrisation, weight variance 2, bias variance 0.1)"
    )
    assert "weight variance 1 to 3," in repr(RELUS.with_variances(weight={"0": 1.0, "2": 2.0, "4": number(3.0)}))


@pytest.mark.parametrize("value", ["2", None, True, [1.0]])
def test_variances_that_are_no_numbers_are_refused(value):
    with pytest.raises(SettingsError, match="weight_variance"):
        infinite_width(network(nn.ReLU()), weight_variance=value)
