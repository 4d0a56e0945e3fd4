"""Biases of finite networks, against closed forms at finite width and arguments for their absence."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks import _finite_width as finite_width
from bayeskit.models.wide_networks._activations import Erf, PolynomialActivation
from bayeskit.models.wide_networks._finite_width import RandomNetworks, finite_width_bias, random_networks

RARE = 1e-5  # p-values below are failures
# Vectors of length sqrt(3), so that first-layer variances are those of the weights.
X = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7], [-0.5, 0.9, 1.2], [0.8, 0.8, 0.1]])
X = math.sqrt(3) * X / X.norm(dim=1, keepdim=True)


def dense(hidden, activation=nn.ReLU, bias=False):
    layers = [nn.Linear(3, 8, bias=bias)]
    for i in range(hidden):
        layers += [activation(), nn.Linear(8, 8 if i < hidden - 1 else 1, bias=bias)]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.first(x)
        h = h + self.second(torch.relu(h))
        return self.last(torch.relu(h))


def images(n=2):
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


NETWORKS = {
    "dense": lambda: (dense(2, bias=True), X.double()),
    "residual": lambda: (Residual(), X.double()),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)),
        images(),
    ),
    "convolution at the end": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten()),
        images(),
    ),
}


@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_of_many_networks_are_those_of_each(name, parameterization):
    module, x = NETWORKS[name]()
    kernel = infinite_width(module, parameterization, weight_variance=1.7, bias_variance=0.3)
    networks = random_networks(kernel, 5, torch.float64)
    single = [kernel.network(5, seed=i).double() for i in range(3)]
    stacked = {key: torch.stack([n.state_dict()[key] for n in single]) for key in single[0].state_dict()}
    ntk, nngp = networks.ntk(stacked, x), networks.nngp(stacked, x)
    for i, network in enumerate(single):
        jacobian = jacrev(lambda p, network=network: functional_call(network, p, (x,)).flatten(1))(
            dict(network.named_parameters())
        )
        rows = torch.cat([j.flatten(2) for j in jacobian.values()], 2)
        full = torch.einsum("iap,jap->aij", rows, rows)
        wanted = full.mean(0) if name == "convolution at the end" else full[0]
        torch.testing.assert_close(ntk[i], wanted.detach(), rtol=1e-11, atol=1e-11)
        last = [key for key in jacobian if key in networks.last]
        assert 1 <= len(last) <= 2
        rows = torch.cat([networks.spread[key] * jacobian[key].flatten(2) for key in last], 2)
        full = torch.einsum("iap,jap->aij", rows, rows)
        wanted = full.mean(0) if name == "convolution at the end" else full[0]
        torch.testing.assert_close(nngp[i], wanted.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
def test_drawn_weights_have_the_law_of_the_finite_network(parameterization, limit):
    kernel = infinite_width(dense(2, bias=True), parameterization, weight_variance=1.7, bias_variance=0.3)
    drawn = random_networks(kernel, 40, torch.float64).draw(50, torch.Generator().manual_seed(0))
    network = kernel.network(40, seed=1).state_dict()
    for name, value in drawn.items():
        assert value.shape[1:] == network[name].shape
        expected = 1.0 if parameterization == "ntk" else (0.3 if "bias" in name else 1.7 / network[name].shape[-1])
        z = (value.square().mean() / expected - 1) / math.sqrt(2 / value.numel())
        assert abs(float(z)) < limit(12)
        z = (network[name].square().mean() / expected - 1) / math.sqrt(2 / network[name].numel())
        assert abs(float(z)) < limit(12)


def test_outputs_of_sampled_networks_have_the_covariance_given_the_layers_before(limit):
    """The last layer integrated out is the mean over networks that differ in it alone."""
    kernel = infinite_width(dense(1, bias=True), weight_variance=1.7, bias_variance=0.3)
    networks = random_networks(kernel, 4, torch.float64)
    one = networks.draw(1, torch.Generator().manual_seed(0))
    many = networks.draw(20_000, torch.Generator().manual_seed(1))
    many = {key: value if key in networks.last else one[key].expand_as(value) for key, value in many.items()}
    f = networks.outputs(many, X.double())[..., 0]
    products = f[:, :, None] * f[:, None]
    z = (products.mean(0) - networks.nngp(one, X.double())[0]) / (products.std(0) / len(f) ** 0.5)
    assert z.abs().max() < limit(10)


@pytest.mark.parametrize("which", ["nngp", "ntk"])
@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
def test_one_hidden_layer_has_no_bias_at_any_width(which, parameterization):
    kernel = infinite_width(
        dense(1, lambda: Elementwise(Erf()), bias=True), parameterization, weight_variance=1.5, bias_variance=0.2
    )
    result = finite_width_bias(kernel, X, (1, 2, 7), 4000, which)
    assert result.off_diagonal_p_value > RARE
    assert result.diagonal_p_value > RARE


@pytest.mark.calibration
@pytest.mark.parametrize("which", ["nngp", "ntk"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(-0.6)], ids=["relu", "leaky relu"])
def test_diagonals_of_relu_have_no_bias_and_other_pairs_have(which, bias, activation):
    kernel = infinite_width(dense(3, activation, bias), weight_variance=2.0, bias_variance=0.4)
    result = finite_width_bias(kernel, X, (2, 8), 8000, which)
    assert result.diagonal_p_value > RARE
    assert result.off_diagonal_p_value < RARE


@pytest.mark.parametrize("which", ["nngp", "ntk"])
def test_diagonals_of_other_activations_have_a_bias(which):
    kernel = infinite_width(dense(2, lambda: Elementwise(PolynomialActivation((0.0, 0.0, 1.0)))))
    assert finite_width_bias(kernel, X, (8,), 20_000, which).diagonal_p_value < RARE


def test_bias_of_squares_is_known_at_every_width(limit):
    r"""Two hidden layers of squares: E z^2 z'^2 = ab + 2k^2, and the first layer's a, b, k are means of products."""
    kernel = infinite_width(dense(2, lambda: Elementwise(PolynomialActivation((0.0, 0.0, 1.0)))))
    result = finite_width_bias(kernel, X.double(), (3, 12), 40_000)
    r = X.double() @ X.double().T / 3
    first = 1 + 2 * r**2
    fourth = 9 + 72 * r**2 + 24 * r**4  # E z^4 z'^4
    exact = 3 * fourth - 9 - 2 * first**2  # times one over the width, with nothing of higher order
    for width, bias, error in zip(result.widths, result.bias, result.standard_error, strict=True):
        off = ~torch.eye(4, dtype=torch.bool)
        assert ((bias - exact / width) / error)[off].abs().max() < limit(12)
        assert (bias / error)[off].abs().max() > limit(12)


def test_width_one_of_relu_is_known(limit):
    """One unit a layer: the second sees a multiple of the first's, which is never negative."""
    kernel = infinite_width(dense(2), weight_variance=1.5)
    result = finite_width_bias(kernel, X.double(), (1,), 40_000)
    angle = (X.double() @ X.double().T / 3).clamp(-1, 1).acos()
    first = 1.5 * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)  # E relu relu, variance 1.5
    z = (result.limit[0] + result.bias[0] - 1.5**2 / 2 * first) / result.standard_error[0]
    assert z.abs().max() < limit(10)
    assert (result.bias[0, 0, 1] / result.standard_error[0, 0, 1]).abs() > limit(10)


def test_leading_order_of_relu_is_half_the_curvature_times_the_variance(limit):
    """At width 32, from arc-cosine moments of degree two and the second derivatives of degree one."""
    kernel = infinite_width(dense(2), weight_variance=2.0)
    result = finite_width_bias(kernel, X, (32,), 20_000)
    theta = torch.linspace(0, 2 * math.pi, 200_001, dtype=torch.float64)[:-1]

    def moment(i, j, phi):  # E relu(z)^i relu(z')^j of unit normals at an angle
        radial = 2 ** ((i + j) / 2) * math.gamma(1 + (i + j) / 2)
        return radial * (theta.cos().clamp_min(0) ** i * (theta - phi).cos().clamp_min(0) ** j).mean()

    def relu(k):  # second layer's E relu relu, times two, of moments (a, b, k)
        a, b, c = k
        angle = (c / (a * b).sqrt()).acos()
        return (a * b).sqrt() * (angle.sin() + (math.pi - angle) * angle.cos()) / math.pi

    for i, j in [(0, 1), (0, 3), (1, 3), (2, 3)]:
        phi = float((X[i].double() @ X[j].double() / 3).acos())
        powers = [(2, 0), (0, 2), (1, 1)]
        means = torch.stack([2 * 2 * moment(*p, phi) for p in powers])
        products = torch.stack(
            [torch.stack([16 * moment(p[0] + q[0], p[1] + q[1], phi) for q in powers]) for p in powers]
        )
        variance = products - means[:, None] * means
        curvature = jacrev(jacrev(relu))(means)
        leading = 0.5 * (curvature * variance).sum() / 32
        assert abs(float((result.bias[0, i, j] - leading) / result.standard_error[0, i, j])) < limit(4)


def fall(result, power_law):
    """Return the power law of biases off the diagonal, relative to the limit's diagonal."""
    values, errors = zip(*[finite_width._relative(m, ~m.is_diagonal) for m in result.moments], strict=True)
    return power_law(torch.tensor(result.widths, dtype=torch.float64), torch.stack(values), torch.stack(errors))


@pytest.mark.calibration
@pytest.mark.parametrize("which", ["nngp", "ntk"])
def test_bias_falls_like_one_over_the_width(which, power_law):
    result = finite_width_bias(infinite_width(dense(2), weight_variance=2.0), X, (8, 16, 32), 10_000, which)
    found = fall(result, power_law)
    assert found.covers(1.0)
    assert not found.covers(2.0) and not found.covers(0.5)
    assert found.p_value > RARE


@pytest.mark.parametrize("which", ["nngp", "ntk"])
def test_a_last_layer_of_the_wrong_scale_is_found(which, monkeypatch, power_law):
    before = getattr(RandomNetworks, which)

    def scaled(self, parameters, x):
        return 1.3 * before(self, parameters, x)

    monkeypatch.setattr(RandomNetworks, which, scaled)
    result = finite_width_bias(infinite_width(dense(2), weight_variance=2.0), X, (8, 16), 8000, which)
    assert result.diagonal_p_value < RARE
    assert not fall(result, power_law).covers(1.0)


def test_results_depend_on_the_seed_alone():
    kernel = infinite_width(dense(2), weight_variance=2.0)
    one, same, other = (finite_width_bias(kernel, X, (4,), 101, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.bias, same.bias) and torch.equal(one.standard_error, same.standard_error)
    assert not torch.equal(one.bias, other.bias)


@pytest.mark.calibration
def test_standard_errors_are_those_of_independent_repetitions(limit):
    kernel = infinite_width(dense(2), weight_variance=2.0)
    found = [finite_width_bias(kernel, X, (8,), 200, seed=seed) for seed in range(60)]
    z = torch.stack([r.bias[0] / r.standard_error[0] for r in found])[:, range(4), range(4)]  # no bias there
    assert (z.mean(0) * math.sqrt(60)).abs().max() < limit(8)
    assert ((z.var(0) - 1) * math.sqrt(59 / 2)).abs().max() < 1.5 * limit(8)  # heavier tails than the normal's


@pytest.mark.calibration
def test_power_law_is_found_exactly_and_its_interval_covers(limit, power_law):
    widths = torch.tensor([8.0, 16.0, 32.0, 64.0], dtype=torch.float64)
    amplitude = torch.tensor([2.0, -0.7], dtype=torch.float64)
    covariance = 1e-3 * torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=torch.float64).expand(4, 2, 2)
    values = widths[:, None] ** -1.3 * amplitude
    exact = power_law(widths, values, covariance)
    assert abs(exact.rate - 1.3) < 1e-5 and abs(float(exact.misfits(torch.tensor([1.3]).double()))) < 1e-9
    root = torch.linalg.cholesky(covariance[0])
    generator = torch.Generator().manual_seed(0)
    laws = [
        power_law(
            widths,
            values + torch.randn(4, 2, generator=generator, dtype=torch.float64) @ root.mT / 10,
            covariance / 100,
        )
        for _ in range(200)
    ]
    covered = sum(law.covers(1.3) for law in laws) / 200
    assert abs(covered - 0.95) < limit() * math.sqrt(0.95 * 0.05 / 200)
    p = torch.tensor([law.p_value for law in laws])
    assert abs(float(p.mean()) - 0.5) < limit() / math.sqrt(12 * 200)
    doubled = power_law(widths, values + 1.0, covariance / 100)
    assert doubled.p_value < RARE or not doubled.covers(1.3)


def test_table_and_plot():
    result = finite_width_bias(infinite_width(dense(2), weight_variance=2.0), X[:2], (4, 8), 500)
    table = result.to_pandas()
    assert len(table) == 2 * 3
    row = table[(table["width"] == 8) & (table["first"] == 0) & (table["second"] == 1)].iloc[0]
    assert row["bias"] == pytest.approx(float(result.bias[1, 0, 1]), abs=1e-15)
    assert row["relative_bias"] * row["limit"] == pytest.approx(row["bias"], rel=1e-12)
    assert result.plot().get_xlabel() == "width"
    assert torch.equal(result.bias, result.bias.mT)


def test_bad_input_is_refused():
    kernel = infinite_width(dense(2))
    with pytest.raises(SettingsError, match="which"):
        finite_width_bias(kernel, X, which="both")
    with pytest.raises(SettingsError, match="widths"):
        finite_width_bias(kernel, X, (0,))
    with pytest.raises(SettingsError, match="num_networks"):
        finite_width_bias(kernel, X, num_networks=1)
    with pytest.raises(SettingsError, match="seed"):
        finite_width_bias(kernel, X, seed=torch.Generator())
    with pytest.raises(ShapeError):
        finite_width_bias(kernel, X[:, :, None])
    with pytest.raises(DataError, match="row 0"):
        finite_width_bias(kernel, torch.zeros(1, 3))
    with pytest.raises(ModelError, match="noise"):
        finite_width_bias(infinite_width(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).train()), X)
    with pytest.raises(ModelError, match="end the network"):
        finite_width_bias(infinite_width(nn.Sequential(nn.Linear(3, 8), nn.ReLU())), X)
