"""Ensembles against networks that are trained: linearised ones exactly, finite ones up to one over their width."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    Ensemble,
    PrecomputedKernel,
    nngp_posterior,
    ntk_ensemble,
    ntk_posterior,
)

DOUBLE = torch.float64
X = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7], [-1.0, -0.5, 0.3], [0.9, 0.6, -0.2]], dtype=DOUBLE)
Y = torch.tensor([1.0, -0.5, 0.3, 2.0], dtype=DOUBLE)
NEW = torch.tensor([[0.3, 0.4, 0.5], [-0.7, 1.1, 0.2]], dtype=DOUBLE)
ROWS, NEW_ROWS = torch.arange(4), torch.arange(4, 6)
RATE, TIME, RIDGE = 0.3, 1.7, 0.2
KERNEL = infinite_width(
    nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).double(), weight_variance=1.5, bias_variance=0.1
)


def flowed(jacobian, residual):
    """Return how far parameters have moved, by the exponential of a matrix in their own space."""
    count = jacobian.shape[1]
    generator = torch.zeros(count + 1, count + 1, dtype=DOUBLE)
    generator[:count, :count] = -RATE * (jacobian.mT @ jacobian + RIDGE * torch.eye(count, dtype=DOUBLE))
    generator[:count, count] = -RATE * jacobian.mT @ residual
    return torch.matrix_exp(TIME * generator)[:count, count]


def test_a_network_linear_in_its_weights_moves_as_the_ensemble_says():
    network = KERNEL.network(10, seed=4)
    names = [name for name, _ in network.named_parameters()]
    weights = tuple(p.detach() for p in network.parameters())
    everything = torch.cat([X, NEW])

    def outputs(*values):
        return functional_call(network, dict(zip(names, values, strict=True)), (everything,))[:, 0]

    jacobian = torch.cat([j.flatten(1) for j in jacrev(outputs, tuple(range(len(weights))))(*weights)], 1)
    start = outputs(*weights)
    moved = flowed(jacobian[:4], start[:4] - Y)
    parts = tuple(m.reshape(w.shape) for m, w in zip(moved.split([w.numel() for w in weights]), weights, strict=True))
    _, change = torch.autograd.functional.jvp(outputs, weights, parts)
    tangent = jacobian @ jacobian.mT
    kernel = PrecomputedKernel(tangent, tangent)
    # One network's way from where it starts is the mean's way from zero.
    found = ntk_ensemble(kernel, ROWS, Y - start[:4], learning_rate=RATE, time=TIME, ridge=RIDGE)
    torch.testing.assert_close(found.mean(NEW_ROWS), change[4:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.mean(ROWS), change[:4], rtol=1e-10, atol=1e-12)


def law_of_linear_networks(target_noise=0.0):
    """Return kernels and the exact law of networks linear in weights, which start anywhere normal."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(6, 9, generator=generator, dtype=DOUBLE)
    spread = torch.randn(9, 9, generator=generator, dtype=DOUBLE) / 3
    kernel = PrecomputedKernel(features @ spread @ spread.mT @ features.mT, features @ features.mT)
    old, new = features[:4], features[4:]
    shift = new @ flowed(old, -Y)
    # The way is linear in the initial residual; its columns are the ways of unit residuals.
    ways = torch.stack([new @ flowed(old, unit) for unit in torch.eye(4, dtype=DOUBLE)], 1)
    factor = (new + ways @ old) @ spread
    return kernel, shift, factor @ factor.mT + target_noise * ways @ ways.mT


def agrees_with_linear_networks(target_noise=0.0):
    kernel, mean, covariance = law_of_linear_networks(target_noise)
    found = ntk_ensemble(kernel, ROWS, Y, learning_rate=RATE, time=TIME, ridge=RIDGE, target_noise=target_noise)
    return all(
        torch.allclose(law(NEW_ROWS), exact, rtol=1e-10, atol=1e-12)
        for law, exact in (
            (found.mean, mean),
            (found.covariance, covariance),
            (found.variance, covariance.diagonal()),
        )
    )


@pytest.mark.parametrize("target_noise", [0.0, 0.4])
def test_linear_networks_have_the_law_of_the_ensemble(target_noise):
    assert agrees_with_linear_networks(target_noise)


@pytest.mark.parametrize("mutant", ["kernels exchanged", "half the initial covariance"])
def test_linear_networks_notice_a_broken_ensemble(mutant, monkeypatch):
    right = Ensemble._both
    if mutant == "kernels exchanged":
        monkeypatch.setattr(
            Ensemble, "_both", lambda self, x: (right(self, x)[0], self.spectrum.rotated(self.kernel.ntk(x, self.x)))
        )
    else:
        monkeypatch.setattr(Ensemble, "_noisy_initial", lambda self: self.initial / 2)
    assert not agrees_with_linear_networks()


def test_steps_of_gradient_descent_are_exact():
    kernel, _, _ = law_of_linear_networks()
    ensemble = ntk_ensemble(kernel, ROWS, Y, learning_rate=0.04, ridge=RIDGE)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(6, 9, generator=generator, dtype=DOUBLE)
    old, weights = features[:4], torch.zeros(9, dtype=DOUBLE)
    for _ in range(30):
        weights = weights - 0.04 * (old.mT @ (old @ weights - Y) + RIDGE * weights)
    torch.testing.assert_close(ensemble.after(30).mean(NEW_ROWS), features[4:] @ weights, rtol=1e-11, atol=0)
    # Ten times smaller steps are ten times closer to the flow.
    flow = ensemble.at(30.0).mean(NEW_ROWS)
    slower = ntk_ensemble(kernel, ROWS, Y, learning_rate=0.004, ridge=RIDGE).after(300)
    errors = [float((one.mean(NEW_ROWS) - flow).norm()) for one in (ensemble.after(30), slower)]
    assert 8 < errors[0] / errors[1] < 14
    largest = ensemble.largest_learning_rate
    assert largest == pytest.approx(2 / float(torch.linalg.eigvalsh(old @ old.mT)[-1] + RIDGE), rel=1e-12)
    ntk_ensemble(kernel, ROWS, Y, learning_rate=0.999 * largest, ridge=RIDGE).after(10)
    with pytest.raises(SettingsError, match="diverges"):
        ntk_ensemble(kernel, ROWS, Y, learning_rate=1.001 * largest, ridge=RIDGE).after(10)


NUM_STEPS, STEP, WIDTHS, NUM_NETWORKS = 40, 0.1, (128, 512), 1000


@pytest.fixture(scope="module")
def trained():
    """Return outputs at new inputs of networks of two widths after gradient descent, ``(networks, 2)`` each."""
    found = {}
    for width in WIDTHS:
        network = KERNEL.network(width, seed=0)
        generator = torch.Generator().manual_seed(width)
        weights = {
            name: torch.randn(NUM_NETWORKS, *p.shape, generator=generator, dtype=DOUBLE)
            for name, p in network.named_parameters()
        }

        def loss(values, network=network):
            return 0.5 * (functional_call(network, values, (X,))[:, 0] - Y).square().sum()

        gradient = vmap(grad(loss))
        parts = []
        for first in range(0, NUM_NETWORKS, 500):
            values = {name: w[first : first + 500] for name, w in weights.items()}
            for _ in range(NUM_STEPS):
                steps = gradient(values)
                values = {name: w - STEP * steps[name] for name, w in values.items()}
            parts.append(vmap(lambda v, net=network: functional_call(net, v, (NEW,))[:, 0])(values))
        found[width] = torch.cat(parts)
    return found


def moments(outputs, mean):
    """Return outputs, and their products about the mean that is claimed, a row a network."""
    centred = outputs - mean
    return torch.cat([outputs, centred.square(), centred[:, :1] * centred[:, 1:]], 1)


def largest_z(trained, law):
    """Return how far the law lies from trained networks, extrapolated to infinite width, in standard errors."""
    narrow, wide = WIDTHS
    mean, covariance = law.mean(NEW_ROWS), law.covariance(NEW_ROWS)
    claimed = torch.cat([mean, covariance.diagonal(), covariance[0, 1:]])
    values = {width: moments(outputs, mean) for width, outputs in trained.items()}
    # An error of c / width cancels, so that what is left of it is measured, and is part of the standard error.
    shares = {narrow: -narrow / (wide - narrow), wide: wide / (wide - narrow)}
    estimate = sum(shares[w] * values[w].mean(0) for w in WIDTHS)
    error = sum(shares[w] ** 2 * values[w].var(0) / NUM_NETWORKS for w in WIDTHS).sqrt()
    return float(((estimate - claimed) / error).abs().max())


@pytest.mark.calibration
def test_trained_networks_have_the_law_of_the_ensemble(trained, limit):
    kernel = PrecomputedKernel.of(KERNEL, torch.cat([X, NEW]))
    ensemble = ntk_ensemble(kernel, ROWS, Y, learning_rate=STEP)
    assert largest_z(trained, ensemble.after(NUM_STEPS)) < limit(5)
    # None of the others has: not the limit of training, nor either posterior.
    for other in (ensemble, nngp_posterior(kernel, ROWS, Y), ntk_posterior(kernel, ROWS, Y)):
        assert largest_z(trained, other) > 3 * limit(5)
