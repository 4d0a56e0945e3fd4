"""Pyro models of regression and classification: densities, gradients and predictions at given variances."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch import nn

import bayeskit as bk
from bayeskit.errors import DataError, DrawsError, KernelError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    ClassificationModel,
    PyroKernel,
    RegressionModel,
    nngp_posterior,
)

VARIANCES = {"kernel.weight_variance": 1.4, "kernel.bias_variance": 0.2, "noise_variance": 0.05}


def network(weight=1.7, bias=0.3):
    return infinite_width(
        nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), weight_variance=weight, bias_variance=bias
    )


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]), torch.randn(4, 2, generator=generator, dtype=torch.float64)


def batch(*rows):
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}


@pytest.fixture(scope="module")
def regression(data):
    return bk.Target.from_pyro(RegressionModel(network()), *data[:2])


def test_likelihood_is_the_closed_form(data, regression):
    x, y, _ = data
    other = {name: 2 * value for name, value in VARIANCES.items()}
    found = regression.log_likelihood(regression.unconstrain(batch(VARIANCES, other)))
    for value, row in zip(found, (VARIANCES, other), strict=True):
        changed = network(row["kernel.weight_variance"], row["kernel.bias_variance"])
        exact = float(nngp_posterior(changed, x, y, row["noise_variance"]).log_evidence)
        assert abs(float(value) - exact) < 1e-10
    # A mutation: the variances exchanged.
    changed = network(VARIANCES["kernel.bias_variance"], VARIANCES["kernel.weight_variance"])
    assert abs(float(nngp_posterior(changed, x, y, 0.05).log_evidence - found[0])) > 0.1


def test_prior_is_log_normal_about_the_network_s_variances(regression):
    u = regression.unconstrain(batch(VARIANCES))
    medians = {"kernel.weight_variance": 1.7, "kernel.bias_variance": 0.3, "noise_variance": 0.1}
    exact = sum(-0.5 * math.log(VARIANCES[k] / medians[k]) ** 2 - 0.5 * math.log(2 * math.pi) for k in medians)
    # Medians come in single precision.
    assert abs(float(regression.log_prior(u)[0]) - exact) < 1e-7


def test_gradient_is_the_difference(regression):
    u = regression.unconstrain(batch(VARIANCES, VARIANCES)) + torch.tensor([[0.0], [0.4]], dtype=torch.float64)
    _, gradient = regression.value_and_grad(u)
    for i in range(3):
        e = torch.zeros(3, dtype=torch.float64)
        e[i] = 1e-4
        difference = (regression.log_density(u + e) - regression.log_density(u - e)) / 2e-4
        assert float((difference - gradient[:, i]).abs().max()) < 1e-6


def test_prediction_is_the_exact_one_draw_by_draw(data):
    x, y, new = data
    other = {name: 2 * value for name, value in VARIANCES.items()}
    found = RegressionModel(network()).predict(batch(VARIANCES, other), x, y, new)
    laws = []
    for row in (VARIANCES, other):
        changed = network(row["kernel.weight_variance"], row["kernel.bias_variance"])
        laws.append(nngp_posterior(changed, x, y, row["noise_variance"]))
    means, variances = (torch.stack(v) for v in zip(*((law.mean(new), law.variance(new)) for law in laws), strict=True))
    assert float((found.means - means).abs().max()) < 1e-10
    assert float((found.variances - variances).abs().max()) < 1e-10
    mixture = variances.mean(0) + means.square().mean(0) - means.mean(0).square()
    assert float((found.variance - mixture).abs().max()) < 1e-12


class Counting(PyroKernel):
    """A kernel that counts its calls, and may have code that depends on values."""

    calls, branches = 0, False

    def forward(self, X, Z=None, diag=False):  # noqa: N803
        self.calls += 1
        if self.branches and float(self.current_network().variances.weight["0"]) < 0:
            raise AssertionError
        return super().forward(X, Z, diag)


@pytest.mark.parametrize("branches", [False, True])
def test_draws_are_predicted_together_where_the_kernel_lets_them(data, branches):
    x, y, new = data
    rows = [{name: scale * value for name, value in VARIANCES.items()} for scale in (1.0, 1.5, 2.0, 2.5)]
    kernel = Counting(network()).with_log_normal_priors()
    kernel.branches = branches
    found = RegressionModel(kernel).predict(batch(*rows), x, y, new)
    # One draw alone looks for sites, then come all at once; or each, after one attempt.
    assert kernel.calls == (3 + 1 + 4 * 3 if branches else 2 * 3)
    for row, mean in zip(rows, found.means, strict=True):
        changed = network(row["kernel.weight_variance"], row["kernel.bias_variance"])
        assert float((mean - nngp_posterior(changed, x, y, row["noise_variance"]).mean(new)).abs().max()) < 1e-10


def test_variances_that_are_given_are_no_sites(data):
    x, y, _ = data
    model = RegressionModel(PyroKernel(network()))
    target = bk.Target.from_pyro(model, x, y)
    assert [site.name for site in target.sites] == ["noise_variance"]
    model.noise_variance = PyroSample(lambda module: dist.Exponential(x.new_tensor(2.0)))
    target = bk.Target.from_pyro(model, x, y)
    u = target.unconstrain({"noise_variance": torch.tensor([0.3], dtype=torch.float64)})
    assert abs(float(target.log_prior(u)[0]) - (math.log(2.0) - 0.6 + math.log(0.3))) < 1e-12


def test_data_can_be_drawn(data):
    x = data[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert RegressionModel(network())(x).shape == (9,)
        assert set(ClassificationModel(network())(x).tolist()) <= {0.0, 1.0}
        assert set(ClassificationModel(network(), num_classes=3)(x).tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels_given_white_values(data, num_classes):
    x, _, new = data
    labels = torch.arange(9) % num_classes
    model = ClassificationModel(PyroKernel(network()), num_classes, jitter=0.0)
    shape = (9,) if num_classes == 2 else (num_classes, 9)
    white = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trace = pyro.poutine.trace(pyro.condition(model, {"white": white[0]})).get_trace(x, labels)
    trace.compute_log_prob()
    kernel = network().nngp(x)
    function = white @ torch.linalg.cholesky(kernel).mT
    if num_classes == 2:
        exact = torch.nn.functional.logsigmoid((2 * labels - 1) * function[0])
    else:
        exact = function[0].log_softmax(0).mT.gather(1, labels[:, None])[:, 0]
    with torch.no_grad():
        assert float((trace.nodes["labels"]["log_prob"] - exact).abs().max()) < 1e-12
        # New values given those at the data are those of a noiseless regression.
        found = model.predict({"white": white}, x, new)
        first = function[0] if num_classes == 2 else function[0][1]
        law = nngp_posterior(network(), x, first)
        means, variances = (v[0] if num_classes == 2 else v[0][min(1, len(v[0]) - 1)] for v in found)
        assert float((means - law.mean(new)).abs().max()) < 1e-8
        assert float((variances - law.variance(new)).abs().max()) < 1e-8


def test_probabilities_are_means_over_the_function(data, limit):
    x, _, new = data
    model, number = ClassificationModel(PyroKernel(network())), 4000
    white = torch.randn(9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    new = 4 * new  # far from the data, where the function varies
    law = model.predict({"white": white[None]}, x, new)
    grid = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weights = (-0.5 * grid.square()).softmax(0)
    exact = (torch.sigmoid(law.means[0] + law.variances[0].sqrt() * grid[:, None]) * weights[:, None]).sum(0)
    drawn = model.predict_probabilities({"white": white.expand(200, 9)}, x, new.repeat(number // 200, 1), seed=3)
    ones = drawn[..., 1].reshape(number, len(new))
    error = ones.std(0) / math.sqrt(number)
    assert float(((ones.mean(0) - exact) / error).abs().max()) < limit(len(new))
    assert float((drawn.sum(-1) - 1).abs().max()) < 1e-12
    # A mutation: the function's mean alone is too sure of itself.
    assert float(((torch.sigmoid(law.means[0]) - exact) / error).abs().max()) > limit(len(new))


def test_bad_data_and_draws(data):
    x, y, new = data
    model, classes = RegressionModel(network()), ClassificationModel(network())
    with pytest.raises(DataError, match="not finite"):
        model(x.index_fill(0, torch.tensor([1]), float("nan")), y)
    with pytest.raises(ShapeError, match="one row for each of the 9"):
        model(x, y[:4])
    with pytest.raises(ShapeError, match="one value per input"):
        model(x, y[:, None].expand(-1, 2))
    with pytest.raises(ShapeError, match="inputs of x"):
        model(x[:, None], y)
    with pytest.raises(ShapeError, match="2 features, not 4"):
        classes(torch.cat([x, x], 1))
    with pytest.raises(DataError, match="from 0 to 1"):
        classes(x, torch.arange(9))
    with pytest.raises(DataError, match="integers"):
        classes(x, y)
    with pytest.raises(ShapeError, match="labels"):
        classes(x, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DrawsError, match="noise_variance"):
        model.predict({}, x, y, new)
    with pytest.raises(DrawsError, match="no draws"):
        model.predict({name: y[:0] for name in VARIANCES}, x, y, new)
    with pytest.raises(DrawsError, match=r"kernel\.\w+_variance"):
        model.predict({"noise_variance": y[:1].abs()}, x, y, new)
    with pytest.raises(SettingsError, match="jitter"):
        RegressionModel(network(), jitter=-1.0)
    with pytest.raises(SettingsError, match="num_classes"):
        ClassificationModel(network(), num_classes=1)
    with pytest.raises(DrawsError, match="does not begin"):
        model.predict({name: y[: 1 + i].abs() for i, name in enumerate(VARIANCES)}, x, y, new)
    with pytest.raises(SettingsError, match="noise_variance"):
        RegressionModel(network(), noise_variance=0.0)
    with pytest.raises(SettingsError, match="noise_variance"):
        model.noise_variance = -1e-3
    with pytest.raises(ModelError, match="wrap it"):
        RegressionModel(network().module)
    with pytest.raises(SettingsError, match="its PyroKernel"):
        ClassificationModel(PyroKernel(network()), tied=False)
    singular = ClassificationModel(PyroKernel(network()), jitter=0.0)
    with pytest.raises(KernelError, match="draw 0"):
        singular.predict({"white": torch.ones(1, 9, dtype=x.dtype)}, x[:1].expand(9, -1), new)


def test_fixed_variances_and_noise(data):
    x, y, new = data
    exact = nngp_posterior(network(1.4, 0.2), x, y, 0.3)
    model = RegressionModel(network())
    model.noise_variance, model.kernel.weight_variance = 0.3, 1.4
    values = {"kernel.bias_variance": torch.full((3, 2), 0.2, dtype=x.dtype)}
    found = model.predict(values, x, y[:, None], new)
    assert found.means.shape == (6, 4) and float((found.mean - exact.mean(new)).abs().max()) < 1e-10
    observed = model.predict(values, x, y, new, noise=True)
    assert float((observed.variances - found.variances - 0.3).abs().max()) < 1e-12
    model.kernel.bias_variance = 0.2
    alone = model.predict({}, x, y, new)
    assert alone.means.shape == (1, 4) and float((alone.variance - exact.variance(new)).abs().max()) < 1e-10


def test_images_come_as_they_are_or_flat(data):
    layers = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
    kernel = infinite_width(nn.Sequential(*layers), weight_variance=1.7, bias_variance=0.3)
    x = torch.linspace(-1, 1, 5 * 9, dtype=torch.float64).sin().reshape(5, 1, 3, 3)
    y, values = data[1][:5], batch(VARIANCES)
    exact = nngp_posterior(kernel.with_variances(1.4, 0.2), x, y, 0.05).mean(x)
    shaped = RegressionModel(kernel).predict(values, x, y, x).mean
    flat = RegressionModel(kernel, input_shape=(1, 3, 3)).predict(values, x.flatten(1), y, x.flatten(1)).mean
    assert float((shaped - exact).abs().max()) < 1e-10 and float((flat - exact).abs().max()) < 1e-10
    target = bk.Target.from_pyro(ClassificationModel(kernel, tied=False), x, torch.tensor([0, 1, 0, 1, 1]))
    assert target.dim == 5 + 2 + 2
