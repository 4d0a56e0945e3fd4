"""Regression and drift at the edges: kernels that are none, inputs that repeat, single precision, many outputs."""

import math

import pytest
import torch
from torch import nn

from bayeskit._core.randomness import new_generator
from bayeskit.errors import AccuracyWarning, DataError, JitterWarning, KernelError, ModelError, ShapeError
from bayeskit.models.wide_networks import (
    empirical_ntk,
    finite_width_bias,
    infinite_width,
    kernel_regime,
    ntk_drift,
    ntk_drift_against_width,
)
from bayeskit.models.wide_networks._finite_width import Interval, KernelRegime, random_networks
from bayeskit.models.wide_networks.gaussian_processes import (
    PrecomputedKernel,
    compare_gaussian_processes,
    last_layer_ensemble,
    nngp_posterior,
    ntk_ensemble,
    ntk_posterior,
    ntk_regression,
)
from bayeskit.models.wide_networks.gaussian_processes import _ensemble as ensembles
from bayeskit.models.wide_networks.gaussian_processes import _posterior as posteriors
from bayeskit.models.wide_networks.gaussian_processes._factors import needed_jitter

DOUBLE = torch.float64
EVERY = (nngp_posterior, ntk_posterior, ntk_ensemble, last_layer_ensemble, ntk_regression)


def network(features=2, outputs=1):
    middle = (nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    return nn.Sequential(nn.Linear(features, 8), *middle, nn.Linear(8, outputs))


def relu(features=2, parameterization="ntk", outputs=1):
    return infinite_width(network(features, outputs), parameterization, weight_variance=2.0, bias_variance=0.1)


def normal(*shape, stream="data", dtype=DOUBLE):
    return torch.randn(*shape, generator=new_generator(0, stream=stream), dtype=dtype)


@pytest.mark.parametrize("process", [nngp_posterior, ntk_posterior, ntk_ensemble, last_layer_ensemble])
def test_a_variance_below_zero_is_an_error(process):
    """The training block has eigenvalues 0.1 and 1.9, and the third input 1 - 2 x 0.81 / 0.1 of a variance."""
    matrix = torch.tensor([[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]], dtype=DOUBLE)
    found = process(PrecomputedKernel(matrix, matrix), torch.tensor([0, 1]), torch.ones(2, dtype=DOUBLE))
    new = torch.tensor([2])
    assert found.covariance(new).item() == pytest.approx(-15.2, rel=1e-12)
    with pytest.raises(KernelError, match=r"-15\.2"):
        found.variance(new)
    with pytest.raises(KernelError, match="positive definite"):
        found.sample(new)


def test_variances_within_rounding_of_zero_are_zero():
    x = normal(12, 2)
    for process in (nngp_posterior, ntk_posterior, ntk_ensemble):
        variance = process(relu(), x, x[:, 0]).variance(x)
        assert float(variance.min()) >= 0 and float(variance.max()) < 1e-9


def test_the_check_notices_a_clamp_that_hides_it(monkeypatch):
    for module in (posteriors, ensembles):
        monkeypatch.setattr(module, "remaining_variance", lambda prior, change: (prior + change).clamp_min(0))
    for process in (nngp_posterior, ntk_ensemble):
        with pytest.raises(pytest.fail.Exception):
            test_a_variance_below_zero_is_an_error(process)


def test_the_last_layer_is_refused_in_the_standard_parametrisation():
    x, y = normal(4, 2), normal(4, stream="targets")
    with pytest.raises(ModelError, match="grow with the width"):
        last_layer_ensemble(relu(parameterization="standard"), x, y)
    assert ntk_ensemble(relu(parameterization="standard"), x, y).mean(x).shape == (4,)


def test_the_last_layers_gradients_are_the_kernel_in_the_other_one_alone(limit):
    """What was refused: products of the last layer's gradients, of many wide networks, against the NNGP kernel."""
    x, width, number = normal(3, 2), 256, 40
    found = {}
    for name in ("ntk", "standard"):
        kernel = relu(parameterization=name)
        products = []
        for seed in range(number):
            one = kernel.network(width, seed=seed).double()
            for parameter in list(one.parameters())[:-2]:
                parameter.requires_grad_(False)
            products.append(empirical_ntk(one, x, outputs="trace"))
        stack = torch.stack(products)
        found[name] = (stack.mean(0) - kernel.nngp(x)) / (stack.std(0) / math.sqrt(number))
    assert float(found["ntk"].abs().max()) < limit(6)
    assert float(found["standard"].abs().max()) > 3 * limit(6)


@pytest.mark.parametrize("process", EVERY)
def test_repeated_inputs_with_different_targets_are_warned_of(process):
    x = normal(5, 2)
    twice, y = torch.cat([x, x[:1]]), torch.tensor([1.0, 0.3, -0.2, 0.5, 0.1, 0.0], dtype=DOUBLE)
    with pytest.warns(JitterWarning), pytest.warns(AccuracyWarning, match="different targets") as caught:
        process(relu(), twice, y)
    assert {warning.filename for warning in caught if warning.category is AccuracyWarning} == {__file__}
    agreeing = torch.cat([y[:5], y[:1]])
    with pytest.warns(JitterWarning):  # and of nothing else, which would be an error here
        found = process(relu(), twice, agreeing)
    new = normal(3, 2, stream="new")
    torch.testing.assert_close(found.mean(new), process(relu(), x, y[:5]).mean(new), rtol=0, atol=1e-9)
    # Half of both targets, once there is noise.
    noisy = process(relu(), twice, y, **{"ridge" if "ensemble" in process.__name__ else NOISE[process]: 1e-6})
    halved = torch.cat([torch.tensor([0.5], dtype=DOUBLE), y[1:5]])
    torch.testing.assert_close(noisy.mean(new), process(relu(), x, halved).mean(new), rtol=0, atol=1e-4)


NOISE = {nngp_posterior: "noise_variance", ntk_posterior: "noise_variance", ntk_regression: "ridge"}


def test_the_warning_is_for_errors_that_are_there():
    """Where it is not given, means are right to the precision it speaks of."""
    x, new = normal(60, 3), normal(20, 3, stream="new")
    y = x.sum(1).sin()
    single = nngp_posterior(relu(3), x.float(), y.float()).mean(new.float()).double()
    gap = float((single - nngp_posterior(relu(3), x, y).mean(new)).abs().max())
    assert 0 < gap < torch.finfo(torch.float32).eps ** 0.25 * float(y.norm())


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_single_precision_with_a_thousand_inputs_needs_no_jitter_beside_noise(noise):
    x = normal(1000, 5)
    x = torch.cat([x, x[:5] + 1e-4])
    y, new = x.sum(1).sin(), normal(20, 5, stream="new")
    single = nngp_posterior(relu(5), x.float(), y.float(), noise)
    exact = nngp_posterior(relu(5), x, y, noise)
    assert single.jitter == exact.jitter == 0.0
    error = torch.finfo(torch.float32).eps ** 0.5 * float(y.norm())
    assert float((single.mean(new.float()).double() - exact.mean(new)).abs().max()) < error
    assert float((single.variance(new.float()).double() - exact.variance(new)).abs().max()) < error


def test_nearly_equal_inputs_in_single_precision_get_what_rounding_takes():
    x = normal(300, 2)
    x = torch.cat([x, x[:5] + 1e-4]).float()
    with pytest.warns(JitterWarning):
        found = ntk_posterior(relu(), x, x.sum(1))
    largest = float(torch.linalg.eigvalsh(relu().ntk(x).double())[-1])
    assert 0 < found.jitter <= 20 * torch.finfo(torch.float32).eps * largest * (1 + 1e-5)
    assert float(found.variance(x).min()) >= 0


def test_jitter_is_no_more_than_allowed_and_the_message_tells_what_is_missing():
    values, diagonal = torch.tensor([-1e-7, 2.0], dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)
    with pytest.warns(JitterWarning):
        assert needed_jitter(values, diagonal, 0.0, "NNGP", max_jitter=2e-7) == 2e-7  # not rounded up to 1e-6
    with pytest.raises(KernelError, match=r"jitter needed is 1e-07, and the largest jitter allowed is 5e-08"):
        needed_jitter(values, diagonal, 0.0, "NNGP", max_jitter=5e-8)
    many = torch.linspace(0.0, 4e3, 1000)  # more than the square root of the precision, for rounding alone
    with pytest.warns(JitterWarning):
        assert 0 < needed_jitter(many - 3e-3, torch.full((1000,), 2.0), 0.0, "NNGP") < 0.01


def test_a_module_is_no_kernel():
    x, y, module = normal(4, 2), normal(4, stream="targets"), network().double()
    calls = [lambda process=process: process(module, x, y) for process in EVERY]
    calls += [
        lambda: compare_gaussian_processes(module, x, y, x),
        lambda: ntk_drift_against_width(module, x, y),
        lambda: finite_width_bias(module, x),
    ]
    for call in calls:
        with pytest.raises(ModelError, match=r"wrap it: infinite_width\(module"):
            call()


def test_a_column_of_targets_is_as_good_as_a_vector():
    x, y, new = normal(5, 2), normal(5, stream="targets"), normal(3, 2, stream="new")
    for process in EVERY:
        vector, column = process(relu(), x, y).mean(new), process(relu(), x, y[:, None]).mean(new)
        assert vector.shape == (3,) and column.shape == (3, 1)
        assert torch.equal(vector, column[:, 0])
    one, other = (compare_gaussian_processes(relu(), x, t, new) for t in (y, y[:, None]))
    assert one.to_pandas().equals(other.to_pandas())
    module = network().double()
    assert torch.equal(ntk_drift(module, x, y).loss, ntk_drift(module, x, y[:, None]).loss)


def test_mixed_precisions_are_refused_by_name():
    x, y, new = normal(5, 2), normal(5, stream="targets"), normal(3, 2, stream="new")
    for process in EVERY:
        with pytest.raises(DataError, match="float32"):
            process(relu(), x, y.float())
        with pytest.raises((DataError, ShapeError), match="float32"):
            process(relu(), x, y).mean(new.float())
    with pytest.raises(DataError, match="x_new is torch.float32"):
        compare_gaussian_processes(relu(), x, y, new.float())
    with pytest.raises(DataError, match="float32"):
        ntk_drift(network(), x, y)
    with pytest.raises(DataError, match="numbers"):
        ntk_drift(network().double(), x, ["a"] * 5)
    with pytest.raises(ShapeError, match="one number"):
        ntk_drift(network().double(), x, y[0])


def test_the_modules_own_width_has_no_part_in_the_others():
    x, y = normal(4, 2), normal(4, stream="targets")
    found = ntk_drift_against_width(relu(), x, y, (None, 16, 32), 4, num_steps=3)
    without = ntk_drift_against_width(relu(), x, y, (16, 32), 4, num_steps=3)
    assert torch.equal(found.typical[1:], without.typical)
    assert "the module's own width" in repr(found) and "nan" not in repr(found)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.number = nn.Linear(2, 1), nn.Linear(2, 2), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.used(x)[:, 0]


def test_parameters_that_do_not_matter_stay():
    x, y, module = normal(4, 2), normal(4, stream="targets"), Unused().double()
    found, alone = ntk_drift(module, x, y, num_steps=10), ntk_drift(module.used, x, y, num_steps=10)
    torch.testing.assert_close(found.loss, alone.loss, rtol=1e-12, atol=0)
    assert "\n" not in repr(found) and "in 10 steps" in repr(found)


def test_drift_of_several_outputs_is_that_of_the_full_kernel():
    """Both ways of training look at all pairs of outputs; means over them would differ."""
    kernel, x, y = relu(outputs=3), normal(4, 2), normal(4, 3, stream="targets")
    together = ntk_drift_against_width(kernel, x, y, (6,), 2, num_steps=15, seed=1)
    networks = random_networks(kernel, 6, DOUBLE)
    drawn = networks.draw(2, new_generator(1, stream="trained networks of width 6"))
    rate = 0.5 / float(torch.linalg.eigvalsh(networks.limit.ntk(x))[-1])
    for i in range(2):
        one = {name: value[i] for name, value in drawn.items()}
        networks.template.load_state_dict(one)
        single = ntk_drift(networks.template, x, y, learning_rate=rate, num_steps=15, num_records=2)
        assert together.relative_change[0, i].item() == pytest.approx(single.relative_change[1].item(), rel=1e-9)
        full = empirical_ntk(networks.template, x).permute(2, 0, 3, 1).flatten(2).flatten(0, 1)
        torch.testing.assert_close(networks.full_ntk(drawn, x)[i], full, rtol=1e-10, atol=1e-12)


def test_the_regime_names_the_law_and_takes_another():
    # Targets that a random network is far from: the log drift of 32 shrinks by 1.4 with a deviation of 0.11 over seeds.
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=DOUBLE)
    y = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=DOUBLE)
    settings = {"num_networks": 40, "num_trained": 32, "num_steps": 20}
    plain = kernel_regime(network(), x, y, **settings)
    assert "own widths 8, 8 are not" in plain.verdict and "weight_variance=2 (He)" in plain.verdict
    assert "weight variance 1 over the number of inputs, bias variance 0, NTK" in repr(plain)
    assert "not the module's own weights" in repr(plain)
    he = kernel_regime(network(), x, y, weight_variance=2.0, bias_variance=0.1, **settings)
    wrapped = kernel_regime(relu(), x, y, **settings)
    assert he == wrapped and "weight variance 2" in repr(he) and "He" not in he.verdict
    # Without biases outputs of ReLU scale with their weights: relative fluctuations stay, drift does not.
    scaled = kernel_regime(network(), x, y, weight_variance=2.0, **settings)
    assert scaled.fluctuation.value == pytest.approx(plain.fluctuation.value, rel=1e-9)
    assert scaled.drift.value < plain.drift.value


@pytest.mark.parametrize(
    ("factor", "words"), [(965.3, "1000"), (32.7, "30"), (3.27, "3.3"), (1.4, "1.4"), (9.97, "10")]
)
def test_factors_are_round(factor, words):
    drift = 0.1 * factor
    numbers = (Interval(0.0, 0.0, 0.0), Interval(0.0, 0.0, 0.0), Interval(drift, drift, drift))
    assert f"about {words} times the width" in KernelRegime(8, 50, 0.1, *numbers).verdict
