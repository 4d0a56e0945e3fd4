"""Numbers of an independent implementation, and what follows from closed forms alone."""

import math

import pytest
import torch
from torch import nn

from bayeskit.errors import DataError, JitterWarning, KernelError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    Ensemble,
    GradientFlow,
    PrecomputedKernel,
    last_layer_ensemble,
    nngp_posterior,
    ntk_ensemble,
    ntk_posterior,
    ntk_regression,
)

DOUBLE = torch.float64
X = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7], [-1.0, -0.5, 0.3], [0.9, 0.6, -0.2]], dtype=DOUBLE)
Y = torch.tensor([[1.0, -1.0], [0.5, 0.2], [-0.3, 0.7], [2.0, -0.5]], dtype=DOUBLE)
NEW = torch.tensor([[0.3, 0.4, 0.5], [-0.7, 1.1, 0.2]], dtype=DOUBLE)

# Reference values: means and covariances by kernel, ridge as a share of the kernel's mean diagonal, and time, with the
# mean of squares over all entries as (twice) the loss. With a ridge, the first kernel's networks have noisy targets.
REFERENCE = {
    ("nngp", 0.0, 0.0): (
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.37187499999999996, 0.39143994473511334], [0.39143994473511334, 0.7206249999999998]],
    ),
    ("ntk", 0.0, 0.0): (
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.37187499999999996, 0.39143994473511334], [0.39143994473511334, 0.7206249999999998]],
    ),
    ("nngp", 0.0, 1.0): (
        [[0.13720530956273702, -0.0326269327134777], [0.14317971386908876, -0.025116228551012903]],
        [[0.2718654624020786, 0.27654262451333583], [0.27654262451333583, 0.585469942662061]],
    ),
    ("ntk", 0.0, 1.0): (
        [[0.21876695516019648, -0.06308511151483039], [0.17286405707764863, -0.025901912860025873]],
        [[0.2345227704813184, 0.24429397512272474], [0.24429397512272474, 0.5551415465701522]],
    ),
    ("nngp", 0.0, 20.0): (
        [[0.7311849964817578, -0.19421334255489292], [0.6376202833663328, -0.05711538470415726]],
        [[0.09547155358459014, 0.07764962549992566], [0.07764962549992566, 0.325643509899737]],
    ),
    ("ntk", 0.0, 20.0): (
        [[0.6964148697943091, -0.16863566678437997], [0.4332328763641049, 0.054677452619250534]],
        [[0.10267293525156215, 0.09284938330005174], [0.09284938330005171, 0.34046943195944196]],
    ),
    ("nngp", 0.0, math.inf): (
        [[2.936472755720374, 0.7149607182955173], [3.083393991482473, 1.2062203349222924]],
        [[0.06494335531287965, 0.041942277982314535], [0.041942277982314535, 0.2574052342765854]],
    ),
    ("ntk", 0.0, math.inf): (
        [[1.105213008465539, 0.007756859222440606], [0.8767402209925154, 0.2721048838969118]],
        [[0.09228302276725242, 0.08025049202585777], [0.08025049202585777, 0.3211697623295956]],
    ),
    ("nngp", 0.01, 0.0): (
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.37187499999999996, 0.39143994473511334], [0.39143994473511334, 0.7206249999999998]],
    ),
    ("ntk", 0.01, 0.0): (
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.37187499999999996, 0.39143994473511334], [0.39143994473511334, 0.7206249999999998]],
    ),
    ("nngp", 0.01, 1.0): (
        [[0.1371547120419814, -0.03261486569896986], [0.1431270795470407, -0.025107060914644434]],
        [[0.2719362222453476, 0.2766238905180428], [0.2766238905180428, 0.5855656619872893]],
    ),
    ("ntk", 0.01, 1.0): (
        [[0.21856846966975166, -0.0630279038314643], [0.17270868967215391, -0.025879750791539487]],
        [[0.23462594719962881, 0.24440636214973452], [0.24440636214973452, 0.5552709217113516]],
    ),
    ("nngp", 0.01, 20.0): (
        [[0.7285220949588255, -0.19342272956328152], [0.6358944329165004, -0.05728443375173333]],
        [[0.09642414791492132, 0.07869360110397161], [0.07869360110397167, 0.32726964044528634]],
    ),
    ("ntk", 0.01, 20.0): (
        [[0.6921246035775138, -0.16816366887618497], [0.43159131208452567, 0.05282444105818964]],
        [[0.1030722271409997, 0.09338955825647649], [0.09338955825647652, 0.34155904693742145]],
    ),
    ("nngp", 0.01, math.inf): (
        [[1.5679836858353462, 0.12012731348537667], [1.4383933124194013, 0.4778502512525707]],
        [[0.08515196708627903, 0.06622623210797962], [0.06622623210797968, 0.2888101518823487]],
    ),
    ("ntk", 0.01, math.inf): (
        [[1.0081511087674389, -0.03219371245690787], [0.770605631938267, 0.22326425820832108]],
        [[0.09485159261251708, 0.08342941346880522], [0.08342941346880517, 0.3256035528228485]],
    ),
}


def relu_kernel(depth=2):
    layers = [nn.Linear(3, 8)]
    for i in range(depth):
        layers += [nn.ReLU(), nn.Linear(8, 8 if i < depth - 1 else 1)]
    return infinite_width(nn.Sequential(*layers), weight_variance=1.5, bias_variance=0.1)


KERNEL = relu_kernel()


def close(found, wanted, tolerance=1e-10):
    return float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def agrees_with_reference(case):
    which, share, time = case
    last_layer = which == "nngp"
    ridge = share * float((KERNEL.nngp_diagonal(X) if last_layer else KERNEL.ntk_diagonal(X)).mean())
    make = last_layer_ensemble if last_layer else ntk_ensemble
    found = make(
        KERNEL, X, Y, learning_rate=1 / Y.numel(), time=time, ridge=ridge, target_noise=ridge if last_layer else 0.0
    )
    mean, covariance = (torch.tensor(values, dtype=DOUBLE) for values in REFERENCE[case])
    same_mean = close(found.mean(NEW), mean) if time else not found.mean(NEW).any()
    return same_mean and close(found.covariance(NEW), covariance) and close(found.variance(NEW), covariance.diagonal())


@pytest.mark.parametrize("case", REFERENCE, ids=str)
def test_ensembles_at_all_times_are_those_of_the_reference(case):
    assert agrees_with_reference(case)


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_posterior_and_regression_are_those_of_the_reference(share):
    mean, covariance = (torch.tensor(values, dtype=DOUBLE) for values in REFERENCE["nngp", share, math.inf])
    posterior = nngp_posterior(KERNEL, X, Y, share * float(KERNEL.nngp_diagonal(X).mean()))
    assert close(posterior.mean(NEW), mean)
    assert close(posterior.covariance(NEW), covariance)
    mean = torch.tensor(REFERENCE["ntk", share, math.inf][0], dtype=DOUBLE)
    ridge = share * float(KERNEL.ntk_diagonal(X).mean())
    assert close(ntk_regression(KERNEL, X, Y, ridge).mean(NEW), mean)
    assert close(ntk_posterior(KERNEL, X, Y, ridge).mean(NEW), mean)


@pytest.mark.parametrize("mutant", ["sign of the cross term", "no ridge", "time twice", "noise in the wrong place"])
def test_the_reference_notices_a_broken_ensemble(mutant, monkeypatch):
    if mutant == "sign of the cross term":
        right = Ensemble._both
        monkeypatch.setattr(Ensemble, "_both", lambda self, x: (right(self, x)[0], -right(self, x)[1]))
    elif mutant == "no ridge":
        monkeypatch.setattr(Ensemble, "_curvature", lambda self: self.spectrum.eigenvalues)
    elif mutant == "time twice":
        right = GradientFlow.learned
        monkeypatch.setattr(GradientFlow, "learned", lambda self, c: right(GradientFlow(self.learning_rate, 2.0), c))
    else:
        monkeypatch.setattr(Ensemble, "_noisy_initial", lambda self: self.initial)
    assert not agrees_with_reference(("nngp", 0.01, 1.0))


def test_two_training_inputs_by_hand():
    # Kernels [[a, b], [b, a]] have the directions (1, 1) and (1, -1), in which everything is a scalar.
    k, theta = (1.3, 0.4), (2.9, 1.1)
    cross_k, cross_theta, prior = (0.7, -0.2), (1.5, 0.3), 1.1
    y, rate, time, ridge = (0.8, -1.7), 0.3, 2.5, 0.6

    def matrix(on, cross, last):
        return torch.tensor([[*on, cross[0]], [on[1], on[0], cross[1]], [*cross, last]], dtype=DOUBLE)

    kernel = PrecomputedKernel(matrix(k, cross_k, prior), matrix(theta, cross_theta, 4.0))
    mean, variance = 0.0, prior
    for sign in (1, -1):
        curvature = theta[0] + sign * theta[1] + ridge
        gain = (cross_theta[0] + sign * cross_theta[1]) / 2 * (1 - math.exp(-rate * curvature * time)) / curvature
        mean += gain * (y[0] + sign * y[1])
        variance += -2 * gain * (cross_k[0] + sign * cross_k[1]) + 2 * gain**2 * (k[0] + sign * k[1])
    old, new = torch.tensor([0, 1]), torch.tensor([2])
    found = ntk_ensemble(kernel, old, torch.tensor(y, dtype=DOUBLE), learning_rate=rate, time=time, ridge=ridge)
    assert float(found.mean(new)) == pytest.approx(mean, rel=1e-13)
    assert float(found.variance(new)) == pytest.approx(variance, rel=1e-13)


def test_the_posterior_is_the_conditional_law_of_a_joint_one():
    noise = 0.3
    posterior = nngp_posterior(KERNEL, X, Y[:, 0], noise)
    matrix = KERNEL.nngp(torch.cat([X, NEW]))
    matrix[: len(X), : len(X)] += noise * torch.eye(len(X), dtype=DOUBLE)
    normal = torch.distributions.MultivariateNormal
    joint, data = normal(torch.zeros(6, dtype=DOUBLE), matrix), normal(torch.zeros(4, dtype=DOUBLE), matrix[:4, :4])
    conditional = normal(posterior.mean(NEW), posterior.covariance(NEW))
    for f in posterior.sample(NEW, 5, seed=1):
        wanted = joint.log_prob(torch.cat([Y[:, 0], f])) - data.log_prob(Y[:, 0])
        assert float(conditional.log_prob(f)) == pytest.approx(float(wanted), abs=1e-10)
    assert float(posterior.log_evidence) == pytest.approx(float(data.log_prob(Y[:, 0])), abs=1e-12)
    both_outputs = float(nngp_posterior(KERNEL, X, Y, noise).log_evidence)
    assert both_outputs == pytest.approx(float(data.log_prob(Y.mT).sum()), abs=1e-12)


def test_before_training_there_is_the_prior_and_in_the_limit_no_error():
    for ensemble in (ntk_ensemble(KERNEL, X, Y, learning_rate=0.7), last_layer_ensemble(KERNEL, X, Y)):
        start = ensemble.at(0.0)
        assert not start.mean(NEW).any()
        torch.testing.assert_close(start.covariance(NEW), KERNEL.nngp(NEW), rtol=1e-14, atol=0)
        assert close(ensemble.mean(X), Y)
        assert float(ensemble.covariance(X).abs().max()) < 1e-10


def test_what_coincides_and_what_does_not():
    ridge = 0.2
    ensemble = ntk_ensemble(KERNEL, X, Y, ridge=ridge)
    posterior = ntk_posterior(KERNEL, X, Y, ridge)
    regression = ntk_regression(KERNEL, X, Y, ridge)
    assert close(regression.mean(NEW), ensemble.mean(NEW), 1e-12)
    assert close(posterior.mean(NEW), ensemble.mean(NEW), 1e-12)
    assert float((posterior.variance(NEW) - ensemble.variance(NEW)).abs().min()) > 0.1
    optimised = last_layer_ensemble(KERNEL, X, Y, ridge=ridge, target_noise=ridge)
    bayesian = nngp_posterior(KERNEL, X, Y, ridge)
    assert close(optimised.mean(NEW), bayesian.mean(NEW), 1e-12)
    assert close(optimised.covariance(NEW), bayesian.covariance(NEW), 1e-12)
    assert not close(last_layer_ensemble(KERNEL, X, Y, ridge=ridge).covariance(NEW), bayesian.covariance(NEW), 1e-3)


def test_a_small_ridge_changes_little():
    without = ntk_ensemble(KERNEL, X, Y)
    errors = [float((ntk_ensemble(KERNEL, X, Y, ridge=r).mean(NEW) - without.mean(NEW)).norm()) for r in (1e-4, 1e-5)]
    assert 0 < errors[1] < errors[0] < 1e-2
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.01)  # linear in the ridge


def test_outputs_and_rows_are_treated_alike():
    together = ntk_ensemble(KERNEL, X, Y, time=3.0, ridge=0.1)
    for j in range(2):
        alone = ntk_ensemble(KERNEL, X, Y[:, j], time=3.0, ridge=0.1)
        torch.testing.assert_close(alone.mean(NEW), together.mean(NEW)[:, j], rtol=1e-13, atol=1e-15)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = ntk_ensemble(KERNEL, X[order], Y[order], time=3.0, ridge=0.1)
    assert close(shuffled.mean(NEW), together.mean(NEW), 1e-13)
    assert close(shuffled.covariance(NEW), together.covariance(NEW), 1e-13)


@pytest.mark.parametrize(("ridge", "noise"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.2)])
def test_the_loss_curve_is_that_of_the_law_at_training_inputs(ridge, noise):
    ensemble = ntk_ensemble(KERNEL, X, Y, learning_rate=0.2, ridge=ridge, target_noise=noise)
    times = torch.tensor([0.0, 0.4, 2.0, 30.0, math.inf], dtype=DOUBLE)
    curve = ensemble.training_loss(times)
    for time, loss in zip(times.tolist(), curve.tolist(), strict=True):
        clean = ntk_ensemble(KERNEL, X, Y, learning_rate=0.2, ridge=ridge).at(time)
        wanted = (clean.mean(X) - Y).square().sum() + 2 * clean.covariance(X).trace()
        # Noise e of its own targets moves a network by A e, and leaves it the error (1 - A) e.
        matrix = KERNEL.ntk(X)
        curved = matrix + ridge * torch.eye(4, dtype=DOUBLE)
        decay = torch.zeros_like(curved) if math.isinf(time) else torch.matrix_exp(-0.2 * time * curved)
        missing = torch.eye(4, dtype=DOUBLE) - matrix @ torch.linalg.inv(curved) @ (torch.eye(4, dtype=DOUBLE) - decay)
        wanted = wanted + 2 * noise * missing.square().sum()
        assert loss == pytest.approx(0.5 * float(wanted), rel=1e-10, abs=1e-12)
    assert (curve.diff() < 0).all()


def test_samples_have_the_mean_and_covariance(limit):
    ensemble = ntk_ensemble(KERNEL, X, Y, time=2.0)
    draws = ensemble.sample(NEW, 20_000, seed=3)
    assert draws.shape == (20_000, 2, 2)
    mean, covariance = ensemble.mean(NEW), ensemble.covariance(NEW)
    z = (draws.mean(0) - mean) / (ensemble.variance(NEW)[:, None] / len(draws)).sqrt()
    assert float(z.abs().max()) < limit(4)
    centred = draws - mean
    for j in range(2):
        products = torch.einsum("si,sj->sij", centred[..., j], centred[..., j])
        z = (products.mean(0) - covariance) / (products.std(0) / len(draws) ** 0.5)
        assert float(z.abs().max()) < limit(6)
    assert float((centred[..., 0] * centred[..., 1]).mean(0).abs().max()) < limit(2) * float(covariance.max()) / 141
    torch.testing.assert_close(ensemble.sample(NEW, 2, seed=5), ensemble.sample(NEW, 2, seed=5), rtol=0, atol=0)
    torch.testing.assert_close(ntk_ensemble(KERNEL, X, Y).sample(X, 3, seed=0), Y.expand(3, 4, 2), rtol=0, atol=1e-6)


def test_precomputed_matrices_give_the_same():
    everything = PrecomputedKernel.of(KERNEL, torch.cat([X, NEW]))
    old, new = torch.arange(4), torch.arange(4, 6)
    for make in (nngp_posterior, ntk_posterior, ntk_ensemble, last_layer_ensemble):
        one, other = make(KERNEL, X, Y), make(everything, old, Y)
        torch.testing.assert_close(one.mean(NEW), other.mean(new), rtol=1e-9, atol=0)
        torch.testing.assert_close(one.covariance(NEW), other.covariance(new), rtol=1e-9, atol=0)
        torch.testing.assert_close(one.variance(NEW), other.covariance(new).diagonal(), rtol=1e-9, atol=0)


def test_single_precision_stays_single():
    ensemble = ntk_ensemble(KERNEL, X.float(), Y.float(), time=2.0)
    assert ensemble.covariance(NEW.float()).dtype == torch.float32
    wanted = ntk_ensemble(KERNEL, X, Y, time=2.0)
    assert close(ensemble.mean(NEW.float()).double(), wanted.mean(NEW), 64 * torch.finfo(torch.float32).eps)


def test_jitter_is_reported_and_can_be_forbidden():
    twice = torch.cat([X, X[:1]])
    y = torch.cat([Y, Y[:1]])
    for make in (nngp_posterior, ntk_posterior, ntk_ensemble, ntk_regression, last_layer_ensemble):
        with pytest.warns(JitterWarning, match="repeated inputs"):
            found = make(KERNEL, twice, y)
        assert 0 < found.jitter < 1e-12
        assert "jitter 1e-" in repr(found)
        assert close(found.mean(NEW), make(KERNEL, X, Y).mean(NEW), 1e-6)
        assert make(KERNEL, X, Y).jitter == 0.0
        assert "jitter" not in repr(make(KERNEL, X, Y))
        with pytest.raises(KernelError, match="repeated inputs"):
            make(KERNEL, twice, y, max_jitter=0.0)
    assert nngp_posterior(KERNEL, twice, y, 0.1).jitter == 0.0


def test_an_indefinite_matrix_is_refused():
    matrix = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=DOUBLE)
    kernel, rows, y = PrecomputedKernel(matrix, matrix), torch.arange(2), torch.ones(2, dtype=DOUBLE)
    for make in (nngp_posterior, ntk_posterior, ntk_ensemble, ntk_regression, last_layer_ensemble):
        with pytest.raises(KernelError, match="smallest eigenvalue is -1"):
            make(kernel, rows, y)
    matrix = torch.tensor([[1.0, 0.0, 0.9], [0.0, 1.0, 0.9], [0.9, 0.9, 1.0]], dtype=DOUBLE)
    with pytest.raises(KernelError, match="at new inputs"):
        nngp_posterior(PrecomputedKernel(matrix), rows, y).sample(torch.tensor([2]))
    with pytest.raises(KernelError, match="symmetric"):
        PrecomputedKernel(torch.tensor([[1.0, 0.5], [0.2, 1.0]]))


def test_kernel_regression_has_no_law():
    fitted = ntk_regression(KERNEL, X, Y)
    for ask in (fitted.variance, fitted.covariance, fitted.sample):
        with pytest.raises(ModelError, match="ntk_ensemble"):
            ask(NEW)


def test_the_mean_of_squares_has_the_rate_that_torch_gives_it():
    weight = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True)
    (step,) = torch.autograd.grad(nn.MSELoss()(X @ weight, Y), weight)
    (unit,) = torch.autograd.grad(0.5 * (X @ weight - Y).square().sum(), weight)
    torch.testing.assert_close(0.3 * step, 2 / Y.numel() * 0.3 * unit)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"y": Y[:3]}, ShapeError, "4 training inputs"),
        ({"y": Y.float()}, DataError, "convert"),
        ({"y": Y.long()}, DataError, "floating-point"),
        ({"y": torch.cat([Y[:3], Y[:1] * math.nan])}, DataError, "row 3"),
        ({"x": X * math.inf}, DataError, "not finite"),
        ({"time": -1.0}, SettingsError, "time"),
        ({"time": math.nan}, SettingsError, "time"),
        ({"learning_rate": 0.0}, SettingsError, "learning_rate"),
        ({"ridge": -0.1}, SettingsError, "ridge"),
        ({"target_noise": -0.1}, SettingsError, "target_noise"),
    ],
)
def test_bad_input_is_named(change, error, match):
    with pytest.raises(error, match=match):
        ntk_ensemble(KERNEL, **({"x": X, "y": Y} | change))


def test_bad_settings_of_the_others_are_named():
    with pytest.raises(SettingsError, match="noise_variance"):
        nngp_posterior(KERNEL, X, Y, -1.0)
    with pytest.raises(SettingsError, match="ridge"):
        ntk_regression(KERNEL, X, Y, math.nan)
    with pytest.raises(SettingsError, match="times"):
        ntk_ensemble(KERNEL, X, Y).training_loss(torch.tensor([-1.0]))
    with pytest.raises(DataError, match="ntk_matrix"):
        ntk_regression(PrecomputedKernel(KERNEL.nngp(X)), torch.arange(4), Y)
    with pytest.raises(ShapeError, match="outside 0 to 3"):
        PrecomputedKernel(KERNEL.nngp(X)).nngp(torch.tensor([4]))
    with pytest.raises(DataError, match="row indices"):
        PrecomputedKernel(KERNEL.nngp(X)).nngp(X)
    with pytest.raises(ShapeError, match="one shape"):
        PrecomputedKernel(KERNEL.nngp(X), KERNEL.nngp(NEW))
