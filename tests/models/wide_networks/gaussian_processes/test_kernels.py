"""Kernels for Pyro and GPyTorch against the exact posterior, and large regression against small."""

import importlib
import sys

import pyro
import pyro.contrib.gp as gp
import pytest
import torch
from pyro.nn import PyroSample
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit.errors import DataError, MissingPackageError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    ConjugateGradients,
    GPyTorchKernel,
    InducingPoints,
    PyroKernel,
    large_regression,
    nngp_posterior,
    ntk_posterior,
)
from bayeskit.models.wide_networks.gaussian_processes._large_data import Marginals
from bayeskit.models.wide_networks.gaussian_processes._parameters import Parameters, traced_matrix

from linear_operator.utils.warnings import NumericalWarning  # isort: skip
import gpytorch  # isort: skip  after the package, which ignores what GPyTorch warns of as it is imported

NOISE = torch.tensor(0.05, dtype=torch.float64)
POSTERIOR = {"nngp": nngp_posterior, "ntk": ntk_posterior}


def network(weight=1.7, bias=0.3):
    layers = nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)
    return infinite_width(nn.Sequential(*layers), weight_variance=weight, bias_variance=bias)


def images():
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
    return infinite_width(nn.Sequential(*layers), weight_variance=1.7, bias_variance=0.3)


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive()).to(x)
        likelihood.noise = NOISE
        super().__init__(x, y, likelihood)
        self.mean, self.kernel = gpytorch.means.ZeroMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]), torch.randn(4, 3, generator=generator, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("covariance", ["nngp", "ntk"])
def test_pyro_regression_is_the_exact_one(data, covariance):
    x, y, new = data
    exact = POSTERIOR[covariance](network(), x, y, NOISE)
    model = gp.models.GPRegression(x, y, PyroKernel(network(), covariance=covariance), noise=NOISE, jitter=0.0)
    mean, full = model(new, full_cov=True)
    assert float((mean - exact.mean(new)).abs().max()) < 1e-8
    assert float((full - exact.covariance(new)).abs().max()) < 1e-8
    assert float((model(new)[1] - exact.variance(new)).abs().max()) < 1e-8
    trace = pyro.poutine.trace(model.model).get_trace()
    assert abs(float(trace.log_prob_sum().detach() - exact.log_evidence)) < 1e-10
    # A mutation: another variance is another posterior.
    model.kernel.weight_variance = torch.tensor(1.8, dtype=torch.float64)
    assert float((model(new)[0] - exact.mean(new)).abs().max()) > 1e-4


@pytest.mark.parametrize("covariance", ["nngp", "ntk"])
def test_gpytorch_regression_is_the_exact_one(data, covariance):
    x, y, new = data
    kernel = network()
    leaf = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    exact = POSTERIOR[covariance](kernel.with_variances(weight=leaf), x, y, NOISE)
    model = Regression(x, y, GPyTorchKernel(kernel, covariance=covariance))
    density = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y) * len(x)
    assert abs(float((density - exact.log_evidence).detach())) < 1e-10
    density.backward()
    (gradient,) = torch.autograd.grad(exact.log_evidence, leaf)
    assert abs(float(model.kernel.raw_weight_variance.grad - 1.7 * gradient)) < 1e-8  # of the logarithm
    model.eval()
    with torch.no_grad():
        found = model(new)
        assert float((found.mean - exact.mean(new)).abs().max()) < 1e-8
        assert float((found.covariance_matrix - exact.covariance(new)).abs().max()) < 1e-8


@torch.no_grad()
@pytest.mark.parametrize("make", [PyroKernel, GPyTorchKernel])
def test_variances_are_learned_on_a_logarithmic_scale(data, make):
    tied, own = make(network()), make(network(), tied=False)
    assert tied.weight_variance.shape == () and own.weight_variance.shape == own.bias_variance.shape == (3,)
    values = dict(own.named_parameters())
    raw = values.get("weight_variance_unconstrained", values.get("raw_weight_variance"))
    assert torch.allclose(raw, torch.tensor(1.7, dtype=torch.float64).log().expand(3), rtol=0, atol=1e-15)
    with torch.no_grad():
        raw[1] = 0.0
    expected = network().with_variances(weight=dict(zip(network().variances.weight, [1.7, 1.0, 1.7], strict=True)))
    x = data[0]
    found = own(x) if make is PyroKernel else own(x).to_dense()
    assert float((found - expected.nngp(x)).abs().max()) < 1e-12


@torch.no_grad()
def test_biases_without_variance_stay_so(data):
    for kernel in (PyroKernel(network(bias=0.0)), GPyTorchKernel(network(bias=0.0))):
        assert [name for name, _ in kernel.named_parameters() if "bias" in name] == []
    x = data[0]
    assert float((PyroKernel(network(bias=0.0))(x) - network(bias=0.0).nngp(x)).abs().max()) < 1e-12


@torch.no_grad()
def test_diagonals_batches_and_pairs(data):
    x, _, new = data
    kernel, other = GPyTorchKernel(network()), PyroKernel(network())
    exact = network().nngp(x, new)
    batch = kernel(torch.stack([x, x + 1]), new[None]).to_dense().detach()
    assert float((batch[0] - exact).abs().max()) < 1e-12
    assert float((batch[1] - network().nngp(x + 1, new)).abs().max()) < 1e-12
    assert float((other(x, new) - exact).abs().max()) < 1e-12
    own = network().nngp_diagonal(x)
    assert float((kernel(x, diag=True) - own).abs().max()) < 1e-12
    assert float((other(x, diag=True) - own).abs().max()) < 1e-12
    assert float((kernel(x[:4], new, diag=True) - exact[:4].diagonal()).abs().max()) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("make", [PyroKernel, GPyTorchKernel])
def test_images_come_as_vectors(make):
    x = torch.linspace(-1, 1, 3 * 16, dtype=torch.float64).sin().reshape(3, 1, 4, 4)
    kernel = make(images(), input_shape=(1, 4, 4))
    found = kernel(x.flatten(1)) if make is PyroKernel else kernel(x.flatten(1)).to_dense()
    assert float((found - images().nngp(x)).abs().max()) < 1e-12


def test_priors_on_variances(data):
    x, y, _ = data
    kernel = PyroKernel(network())
    kernel.weight_variance = PyroSample(lambda module: pyro.distributions.LogNormal(x.new_tensor(0.0), 1.0))
    trace = pyro.poutine.trace(kernel).get_trace(x)
    assert "weight_variance" in trace.nodes
    with_priors = PyroKernel(network(), tied=False).with_log_normal_priors()
    trace = pyro.poutine.trace(with_priors).get_trace(x)
    assert trace.nodes["weight_variance"]["value"].shape == trace.nodes["bias_variance"]["value"].shape == (3,)


def test_bad_kernels():
    with pytest.raises(SettingsError, match="cannot be learned"):
        PyroKernel(network(weight=0.0))
    first = dict(zip(network().variances.weight, [1.0, 2.0, 1.0], strict=True))
    with pytest.raises(SettingsError, match="tied=False"):
        GPyTorchKernel(network(weight=first))
    with pytest.raises(SettingsError, match="nngp"):
        PyroKernel(network(), covariance="matern")
    with pytest.raises(ShapeError, match="input_shape"):
        PyroKernel(images())(torch.eye(16))
    for make in (PyroKernel, GPyTorchKernel):
        with pytest.raises(ModelError, match="wrap it: infinite_width"):
            make(network().module)
        with pytest.raises(ModelError, match="layer '1', is not normal"):
            make(infinite_width(network().module[:2]))
        with pytest.raises(ShapeError, match="16 features, not 15"):
            make(images(), input_shape=(1, 4, 4)).forward(torch.ones(2, 15), torch.ones(2, 15))
    with pytest.raises(ShapeError, match="last_dim_is_batch"):
        GPyTorchKernel(network()).forward(torch.eye(3), torch.eye(3), last_dim_is_batch=True)


def test_features_that_no_one_asked_for_are_refused(data):
    x = data[0]
    wide = torch.cat([x, x], 1)
    with pytest.raises(ShapeError, match="3 features, not 6; active_dims"):
        PyroKernel(network())(wide)
    with pytest.raises(ShapeError, match="3 features, not 2"):
        PyroKernel(network())(x[:, :2])
    with pytest.raises(DataError, match="row 1"):
        PyroKernel(network())(x.index_fill(0, torch.tensor([1]), float("nan")))
    chosen = [4, 2, 0]
    with torch.no_grad():
        found = PyroKernel(network(), active_dims=chosen)(wide)
    assert float((found - network().nngp(wide[:, chosen])).abs().max()) < 1e-12


def test_variances_are_fixed_by_numbers(data):
    kernel = PyroKernel(network(), tied=False).with_log_normal_priors()
    assert repr(kernel) == (
        "PyroKernel(Sequential, weight_variance=by its prior, bias_variance=by its prior, covariance='nngp')"
    )
    kernel.weight_variance, kernel.bias_variance = 2.0, 0.1
    assert "weight_variance=[2, 2, 2], bias_variance=[0.1, 0.1, 0.1]" in repr(kernel)
    assert float((kernel(data[0]) - network(2.0, 0.1).nngp(data[0])).abs().max()) < 1e-12
    with pytest.raises(SettingsError, match="weight_variance"):
        kernel.weight_variance = -1.0
    with pytest.raises(SettingsError, match="positive"):
        kernel.weight_variance = torch.tensor([1.0, 0.0, 1.0])
    with pytest.raises(ShapeError, match="shape"):
        kernel.weight_variance = torch.ones(2)


@pytest.mark.calibration
def test_no_number_of_near_pairs_is_left_to_a_compiler(data):
    """Inputs that are nearly parallel are found among the data, outside of what is traced."""
    x = torch.cat([data[0][:3], data[0][:3] * (1 + 1e-9)])
    parameters = Parameters(network())

    def trace(function):
        return make_fx(torch.func.vmap(lambda w: function(parameters.at(w, parameters.bias))))(weight)

    weight = parameters.weight.expand(2)
    graph = trace(lambda one: traced_matrix(one, "nngp", x))
    assert torch.ops.aten.nonzero.default not in {node.target for node in graph.graph.nodes}
    assert float((graph(weight) - network().nngp(x)).abs().max()) < 1e-12

    # A mutation: with the covariance of inputs among what is traced, its values decide what follows.
    def plain(one):
        profile = one.graph.profile(x, one.variances, False)[0]
        return one.graph.cross(x, x, (profile, profile), one.variances, False).nngp

    with pytest.raises(RuntimeError, match="data-dependent"):
        trace(plain)


def test_gpytorch_is_optional(monkeypatch):
    name = "bayeskit.models.wide_networks.gaussian_processes._gpytorch_kernel"
    module = importlib.import_module(name)
    for one in ("gpytorch.constraints", "gpytorch.kernels"):
        monkeypatch.setitem(sys.modules, one, None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingPackageError, match=r"bayeskit\[gaussian_processes\]"):
        importlib.import_module(name)
    assert module.GPyTorchKernel is GPyTorchKernel


@pytest.fixture(scope="module")
def many():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(500, generator=generator, dtype=torch.float64)
    new = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    exact = nngp_posterior(network(), x, y, NOISE)
    return x, y, new, exact, Marginals(exact.mean(new), exact.variance(new))


def apart(found, law):
    return max(float((found.mean - law.mean).abs().max()), float((found.variance - law.variance).abs().max()))


def residual_bounds(many, tolerance):
    """How far mean and variances may be off if all columns' residuals together are within the tolerance."""
    x, y, new, exact, _ = many
    cross = network().nngp(x, new)
    solved = torch.cholesky_solve(cross, exact.cholesky.lower).norm(dim=0)
    return tolerance * y.norm() * solved, len(new) * tolerance * cross.norm(dim=0) * solved


def test_conjugate_gradients_find_the_exact_posterior(many):
    x, y, new, _, law = many
    found = large_regression(network(), x, y, float(NOISE), ConjugateGradients(1e-5))
    bounds = residual_bounds(many, 1e-5)
    near = found.predict(new)
    assert bool(((near.mean - law.mean).abs() <= bounds[0]).all())
    assert bool(((near.variance - law.variance).abs() <= bounds[1]).all())
    assert float(bounds[0].max()) < 1e-3 and found.jitter == 0.0 and found.bound is None
    # A mutation: a residual that may be large leaves the posterior outside these bounds.
    loose = large_regression(network(), x, y, float(NOISE), ConjugateGradients(0.5, preconditioner_rank=0))
    assert not bool(((loose.predict(new).mean - law.mean).abs() <= bounds[0]).all())


def test_inducing_points(many):
    x, y, new, exact, law = many
    truth = float(exact.log_evidence)
    few, more, all_points = (
        large_regression(network(), x, y, float(NOISE), InducingPoints(number)) for number in (30, 200, 500)
    )
    assert few.bound < more.bound < truth
    assert few.jitter == more.jitter == 0.0
    noisy = few.predict(new, noise=True)
    assert float((noisy.variance - few.predict(new).variance - NOISE).abs().max()) < 1e-12
    with pytest.warns(NumericalWarning, match="added jitter"):
        twice = large_regression(network(), x[:40].repeat(3, 1), y[:40].repeat(3), 0.05, InducingPoints(120))
    assert 1e-9 < twice.jitter < 1e-5
    assert apart(more.predict(new), law) < apart(few.predict(new), law)
    # With a point at every datum only the jitter is left.
    assert abs(all_points.bound - truth) < 1e-3 and apart(all_points.predict(new), law) < 1e-6


def test_inducing_points_learn(many):
    x, y, _, _, _ = many
    kernel = GPyTorchKernel(network())
    before = large_regression(kernel, x, y, float(NOISE), InducingPoints(20))
    after = large_regression(kernel, x, y, float(NOISE), InducingPoints(20, num_steps=5))
    assert after.bound > before.bound + 1 and after.noise_variance != before.noise_variance
    assert torch.equal(kernel.weight_variance, before.kernel.weight_variance)
    assert not torch.equal(kernel.weight_variance, after.kernel.weight_variance)


def test_bad_settings(many):
    x, y, _, _, _ = many
    with pytest.raises(SettingsError, match="num_points"):
        large_regression(network(), x, y, 0.1, InducingPoints(501))
    with pytest.raises(SettingsError, match="tolerance"):
        ConjugateGradients(tolerance=0.0)
    with pytest.raises(SettingsError, match="noise_variance"):
        large_regression(network(), x, y, 0.0)
    with pytest.raises(ShapeError, match="flatten"):
        large_regression(network(), x[:, None], y, 0.1)
