"""Drift under training and the verdict on a width, against recursions and variances that are known."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bayeskit._core.randomness import new_generator
from bayeskit.errors import DataError, LossError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import _finite_width as drift
from bayeskit.models.wide_networks import _finite_width as moments
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks._finite_width import (
    Interval,
    KernelRegime,
    kernel_regime,
    ntk_drift,
    ntk_drift_against_width,
    ntk_drift_of_snapshots,
    random_networks,
)

X = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7], [-0.5, 0.9, 1.2], [0.8, 0.8, 0.1]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)


def shallow(activation=nn.GELU):
    return nn.Sequential(nn.Linear(3, 8, bias=False), activation(), nn.Linear(8, 1, bias=False))


def deep(activation=nn.GELU):
    middle = [activation(), nn.Linear(8, 8, bias=False)]
    return nn.Sequential(nn.Linear(3, 8, bias=False), *middle, activation(), nn.Linear(8, 1, bias=False))


def test_drift_of_a_product_of_two_weights_follows_its_recursion():
    """For f(x) = b a x the kernel is (a^2 + b^2) x x', and both weights move by hand."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    before = copy.deepcopy(module.state_dict())
    x, y = torch.tensor([[1.0], [-0.5]], dtype=torch.float64), torch.tensor([2.0, 0.3], dtype=torch.float64)
    found = ntk_drift(module, x, y, learning_rate=0.1, num_steps=7, num_records=8)
    a, b = module[0].weight.item(), module[1].weight.item()
    first = a * a + b * b
    for step in range(8):
        residual = b * a * x[:, 0] - y
        assert found.relative_change[step].item() == pytest.approx(abs(a * a + b * b - first) / first, rel=1e-11)
        assert found.loss[step].item() == pytest.approx(0.5 * residual.square().sum().item(), rel=1e-11)
        slope = (residual * x[:, 0]).sum().item()
        a, b = a - 0.1 * b * slope, b - 0.1 * a * slope
    assert found.steps == tuple(range(8))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert found.plot().get_xlabel() == "step"
    assert list(found.to_pandas().columns) == ["step", "relative_change", "loss"]


def test_a_linear_network_does_not_drift():
    module = nn.Linear(3, 2).double()
    assert ntk_drift(module, X, torch.stack([Y, -Y], 1)).relative_change.max() < 1e-12


def test_snapshots_tell_what_training_told():
    module = deep(nn.Tanh).double()
    trained, snapshots = copy.deepcopy(module), []
    for step in range(5):
        if step % 2 == 0:
            snapshots.append(copy.deepcopy(trained.state_dict()))
        loss = 0.5 * (trained(X)[:, 0] - Y).square().sum()
        gradients = torch.autograd.grad(loss, list(trained.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
    wanted = ntk_drift(module, X, Y, learning_rate=0.05, num_steps=4, num_records=3)
    found = ntk_drift_of_snapshots(module, X, snapshots)
    torch.testing.assert_close(found.relative_change, wanted.relative_change, rtol=1e-10, atol=1e-14)
    assert found.plot().get_xlabel() == "snapshot"


@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
def test_networks_trained_together_drift_as_each_by_itself(parameterization):
    kernel = infinite_width(deep(), parameterization, weight_variance=1.5)
    together = ntk_drift_against_width(kernel, X, Y, (6,), 3, num_steps=20, seed=4)
    networks = random_networks(kernel, 6, torch.float64)
    drawn = networks.draw(3, new_generator(4, stream="trained networks of width 6"))
    rate = 0.5 / float(torch.linalg.eigvalsh(networks.limit.ntk(X))[-1])
    for i in range(3):
        networks.template.load_state_dict({name: value[i] for name, value in drawn.items()})
        single = ntk_drift(networks.template, X, Y, learning_rate=rate, num_steps=20, num_records=2)
        assert together.relative_change[0, i].item() == pytest.approx(single.relative_change[1].item(), rel=1e-9)
        assert together.loss[0, i, 1].item() == pytest.approx(single.loss[1].item(), rel=1e-9)


def fall(result, power_law):
    """Return the power law of typical drifts."""
    widths = torch.tensor(result.widths, dtype=torch.float64)
    return power_law(widths, result.typical[:, None], result.standard_error.square()[:, None, None])


def test_drift_falls_like_one_over_the_width_if_activations_are_smooth(power_law):
    kernel = infinite_width(deep(), weight_variance=2.0)
    result = ntk_drift_against_width(kernel, X, Y / 2, (32, 64, 128), 40, num_steps=50)
    assert fall(result, power_law).covers(1.0)
    assert not fall(result, power_law).covers(0.5)
    assert result.plot().get_ylabel() == "relative change of the NTK"
    assert list(result.to_pandas()["width"]) == [32, 64, 128]


def test_drift_falls_more_slowly_with_relu(power_law):
    kernel = infinite_width(shallow(nn.ReLU), weight_variance=2.0)
    result = ntk_drift_against_width(kernel, X, Y, (64, 256, 1024), 64, num_steps=50)
    low, high = fall(result, power_law).interval
    assert 0.4 < low and high < 0.75


def test_a_last_layer_of_the_wrong_scale_drifts_at_another_rate(monkeypatch, power_law):
    """Outputs that are divided by the width, not its root, must learn features to change at all."""

    def scaled(kernel, width, dtype):
        networks = random_networks(kernel, width, dtype)
        networks.template[2].weight_scale /= math.sqrt(width)
        limit = infinite_width(networks.limit.module, weight_variance={"0": 1.0, "2": 1.0 / width})
        return replace(networks, limit=limit)

    monkeypatch.setattr(drift, "random_networks", scaled)
    result = ntk_drift_against_width(infinite_width(shallow()), X, Y, (32, 64, 128), 40)
    assert not fall(result, power_law).covers(1.0)
    assert fall(result, power_law).rate < 0.3


def test_fluctuations_of_products_of_two_linear_layers_are_known(limit):
    """One entry is a mean over units of z z' + a^2 k, whose variance is (k(x,x) k(x',x') + k^2) + 2 k^2."""
    kernel = infinite_width(shallow(nn.Identity))
    report = kernel_regime(kernel, X, width=5, num_networks=4000)
    k = X @ X.T / 3
    exact = float((k.diagonal()[:, None] * k.diagonal() + 3 * k**2).sum() / 5 / (4 * k**2).sum())
    error = (report.fluctuation.upper**2 - report.fluctuation.value**2) / 1.96
    assert abs(report.fluctuation.value**2 - exact) < limit() * error
    assert error < 0.1 * exact
    assert report.bias.lower == 0.0  # with one hidden layer there is none


def test_bias_interval_covers_what_was_added_to_the_kernel(monkeypatch):
    before = moments._limit
    monkeypatch.setattr(moments, "_limit", lambda *arguments: before(*arguments) / 1.25)
    report = kernel_regime(infinite_width(shallow(nn.Identity)), X, width=50, num_networks=2000)
    assert report.bias.lower <= 0.25 <= report.bias.upper
    assert report.bias.upper - report.bias.lower < 0.1
    assert not report.trusted


@pytest.mark.calibration
def test_squared_bias_has_no_bias_of_its_own(limit):
    """Where there is none, the square must be zero on average, and the interval begins at zero as often as it says."""
    kernel = infinite_width(shallow())
    found = [kernel_regime(kernel, X[:2], width=4, num_networks=100, seed=seed).bias for seed in range(60)]
    missed = sum(interval.lower > 0 for interval in found) / 60
    assert missed < 0.025 + limit() * math.sqrt(0.025 * 0.975 / 60)
    zero = sum(interval.value == 0 for interval in found) / 60
    assert abs(zero - 0.68) < limit() * math.sqrt(0.68 * 0.32 / 60)  # how often a squared normal is below its mean


def test_verdicts():
    kernel = infinite_width(shallow())
    wide = kernel_regime(kernel, X.float(), Y.float(), width=2048, num_networks=60, num_trained=6, num_steps=40)
    assert wide.trusted and wide.verdict.startswith("random networks of width 2048 are in the kernel regime")
    narrow = kernel_regime(kernel, X, Y, width=8, num_networks=200)
    assert narrow.rejected and not narrow.trusted
    assert "are not in the kernel regime" in narrow.verdict and narrow.factor > 5
    assert narrow.drift.lower > wide.drift.upper
    assert list(narrow.to_pandas().index) == ["bias", "fluctuation", "drift"]
    assert narrow.plot().get_xlabel() == "relative to the tangent kernel"
    assert "fluctuation" in repr(narrow)
    own = kernel_regime(shallow(), X, num_networks=50, tolerance=10.0)
    assert own.trusted and own.drift is None and "give y" in own.verdict
    unclear = KernelRegime(8, 50, 0.1, Interval(0.05, 0.0, 0.2), Interval(0.05, 0.04, 0.06), None)
    assert not unclear.trusted and not unclear.rejected and "more networks" in unclear.verdict


def test_kinks_ask_for_more_width():
    numbers = (Interval(0.0, 0.0, 0.0), Interval(0.05, 0.05, 0.05), Interval(0.3, 0.3, 0.3))
    assert KernelRegime(8, 50, 0.1, *numbers).factor == pytest.approx(3.0)
    assert KernelRegime(8, 50, 0.1, *numbers, has_kinks=True).factor == pytest.approx(9.0)
    assert kernel_regime(shallow(nn.ReLU), X, num_networks=20).has_kinks
    assert not kernel_regime(shallow(), X, num_networks=20).has_kinks


def test_bad_input_is_refused():
    kernel, module = infinite_width(shallow()), shallow().double()
    with pytest.raises(ShapeError, match="y must be"):
        ntk_drift(module, X, Y[:2])
    with pytest.raises(DataError, match="finite"):
        ntk_drift(module, X, Y * math.nan)
    with pytest.raises(LossError, match="learning_rate"):
        ntk_drift(infinite_width(deep()).network(64).double(), X, Y, learning_rate=1e3)
    with pytest.raises(LossError, match="width 4"):
        ntk_drift_against_width(kernel, X, Y, (4,), 2, learning_rate=1e4)
    with pytest.raises(SettingsError, match="learning_rate"):
        ntk_drift(module, X, Y, learning_rate=-1.0)
    with pytest.raises(SettingsError, match="snapshots"):
        ntk_drift_of_snapshots(module, X, [])
    with pytest.raises(ModelError, match="snapshot 1"):
        ntk_drift_of_snapshots(module, X, [module.state_dict(), {}])
    with pytest.raises(ShapeError, match="two inputs"):
        kernel_regime(kernel, X[:1])
    with pytest.raises(SettingsError, match="tolerance"):
        kernel_regime(kernel, X, tolerance=0.0)
    with pytest.raises(DataError, match="zero for all pairs"):
        kernel_regime(infinite_width(shallow(nn.Identity)), torch.eye(3, dtype=torch.float64), num_networks=10)
