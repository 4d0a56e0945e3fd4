r"""
Stochastic-gradient MCMC (SGLD, SGHMC): a posterior from minibatches, and its bias
==================================================================================

**What you will learn:** how to sample a Pyro model from a few hundred rows at a time, by how much that makes the
posterior too wide, how a run measures this by itself, and how a control variate takes most of the noise away.

Langevin dynamics needs one gradient a step :cite:p:`welling2011`. Estimated from :math:`B` of :math:`N` rows it is
cheaper by :math:`N / B`, but noisy, and nothing is accepted or rejected. The model is a logistic regression on
simulated data; draws of :func:`bayeskit.sample`, which sees all rows in every gradient, are the reference.
"""

import itertools
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.samplers import (
    SGHMC,
    SGLD,
    IndependentRows,
    Metric,
    MinibatchTarget,
    sample_stochastic_gradient,
)

# %%
# An exact twin
# -------------
# Where the posterior is normal with precision :math:`P`, a step of size :math:`\epsilon` is linear,
#
# .. math::
#
#    u' - m = (1 - \tfrac{\epsilon P}{2}) (u - m) + \tfrac{\epsilon}{2} \eta + \sqrt\epsilon \, z,
#    \qquad \eta \sim (0, V), \quad z \sim N(0, 1),
#
# with :math:`\eta` the noise of the gradient. So the variance of the draws, which should be :math:`1/P`, is the fixed
# point of :math:`v = (1 - \epsilon P / 2)^2 v + \epsilon^2 V / 4 + \epsilon`, and the sampler must have just this bias.
# For :math:`N` data with unit variance about an unknown mean, and :math:`B` of them drawn with replacement,
# :math:`V = (N^2 / B)` times the variance of the data.

generator = torch.Generator().manual_seed(0)
y = torch.randn(100, generator=generator, dtype=torch.float64)


def normal_mean(y: torch.Tensor, batch_size: int | None = None) -> None:
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y), subsample_size=batch_size):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=pyro.subsample(y, event_dim=0))


precision, step_size, num_chains = 101.0, 0.001, 128
gradient_noise = 100**2 / 10 * float(y.var(unbiased=False))
variance = 0.0
for _ in range(10_000):
    variance = (1 - step_size * precision / 2) ** 2 * variance + step_size**2 * gradient_noise / 4 + step_size
kernel = SGLD(step_size)
assert abs(float(kernel.stationary_variance(precision, gradient_noise)) - variance) < 1e-12

twin = MinibatchTarget.from_pyro(normal_mean, y, 10, row_order=IndependentRows())
draws = sample_stochastic_gradient(twin, kernel, num_chains, 200, 800 if is_small() else 2000, seed=0, progress=False)
squares = (draws.unconstrained - y.sum() / precision).square().mean((1, 2))  # one for each chain, all independent
found, error = float(squares.mean()), float(squares.std()) / num_chains**0.5
print(f"variance: right {1 / precision:.5f}, expected {variance:.5f}, found {found:.5f} +- {error:.5f}")
assert abs(found - variance) < 4.5 * error
assert found - 4.5 * error > 1 / precision  # the bias is there, and is seen

# %%
# The bias that is left without minibatches
# -----------------------------------------
# With all rows in every
# gradient, :math:`V = 0`, the variance is still :math:`1 / (1 - \epsilon P / 4)` times the right one. This is the other
# side of *implicit gradient regularisation* :cite:p:`barrett2021`: a step of :math:`\epsilon / 2` down the slope of
# :math:`U = P u^2 / 2` decays like the flow of a stiffer potential, :math:`U + (\epsilon / 8) U'^2`, whose curvature is
# :math:`P (1 + \epsilon P / 4)`. That alone would make the posterior narrower. But the noise of a step is not damped
# within the step, so that it acts like one of temperature :math:`1 + \epsilon P / 2`.

whole = MinibatchTarget.from_pyro(normal_mean, y, len(y))
for relative_step in (0.1, 0.5):
    kernel = SGLD(relative_step / precision)
    decay, widening = -2 * np.log(1 - relative_step / 2) / relative_step, 1 / (1 - relative_step / 4)
    draws = sample_stochastic_gradient(whole, kernel, num_chains, 100, 400, seed=1, progress=False)
    squares = (draws.unconstrained - y.sum() / precision).square().mean((1, 2)) * precision
    found, error = float(squares.mean()), float(squares.std()) / num_chains**0.5
    print(f"step {relative_step} / P: decay {decay:.4f} P, by the stiffer potential {1 + relative_step / 4:.4f} P")
    print(f"    variance {found:.4f} +- {error:.4f} times the right one, expected {widening:.4f}")
    assert abs(found - widening) < 4.5 * error
    assert abs(float(kernel.stationary_variance(precision, 0.0)) * precision - widening) < 1e-12

# %%
# A failure on purpose
# --------------------
# From a step of :math:`4 / P` on, a chain overshoots by more than it came from, and runs away. Every density on the way
# is finite. What shows is the temperature, about one in a good run, and the run warns.

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    draws = sample_stochastic_gradient(whole, SGLD(4.5 / precision), 8, 20, 50, seed=2, progress=False)
print(said[-1].message)
assert "mean temperature" in str(said[-1].message) and not bool(draws.sample_stats["diverging"].any())

# %%
# Twenty thousand rows
# --------------------
# A plate with a ``subsample_size`` makes any model one for minibatches. Without a batch size, it takes all rows.

num_data, dim = (2_000, 5) if is_small() else (20_000, 10)
x = torch.randn(num_data, dim, generator=generator, dtype=torch.float64)
labels = torch.bernoulli(torch.sigmoid(x @ torch.linspace(-1, 1, dim, dtype=torch.float64)), generator=generator)


def logistic(x: torch.Tensor, y: torch.Tensor, batch_size: int | None = None) -> None:
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size):
        inputs, outputs = pyro.subsample(x, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Bernoulli(logits=inputs @ weights), obs=outputs)


reference = bk.sample(bk.Target.from_pyro(logistic, x, labels), 16, 200, 100, seed=0, progress=False)
mean, sd = (f(reference.unconstrained.flatten(0, 1), dim=0) for f in (torch.mean, torch.std))

# %%
# Three runs
# ----------
# Minibatches that go through the data in epochs cancel part of each other's noise. Hamiltonian dynamics with friction
# :cite:p:`chen2014` takes out what is known of the noise. All report a ``temperature``, whose mean foretells, here
# within the errors, the factor by which variances are too large if minibatches are independent; with epochs the truth
# is better. The errors printed are those of the runs, by the spread of their chains; that of the reference comes on
# top, the same for all three.

batch_size = num_data // 20
epochs = MinibatchTarget.from_pyro(logistic, x, labels, batch_size)
independent = MinibatchTarget.from_pyro(logistic, x, labels, batch_size, row_order=IndependentRows())
# Steps are relative to a rough scale: the curvature of a row's log likelihood is at most 1/4, often about 1/8.
metric = Metric.diagonal(1 / (1 + x.square().sum(0) / 8))
noise = independent.gradient_variance(mean.expand(4, -1)).mean(0) * metric.factor.square()
runs = {
    "SGLD, independent": (independent, SGLD(0.1, metric=metric)),
    "SGLD, epochs": (epochs, SGLD(0.1, metric=metric)),
    "SGHMC, independent": (independent, SGHMC(0.1, friction=2.0, gradient_noise=noise, metric=metric)),
}
length = (100, 100, 5) if is_small() else (300, 300, 20)  # warm-up, draws, steps from one to the next
print(f"{num_data} rows, {batch_size} at a time; variance is too large by a factor")
excess, predicted = {}, {}
for seed, (name, (target, kernel)) in enumerate(runs.items(), 1):
    draws = sample_stochastic_gradient(target, kernel, 16, *length, seed=seed, progress=False)
    by_chain = ((draws.unconstrained - mean) / sd).square().mean((1, 2))
    excess[name] = float(by_chain.mean()), float(by_chain.std()) / 4
    predicted[name] = float(draws.sample_stats["temperature"].mean())
    print(f"{name:>18}: {excess[name][0]:.3f} +- {excess[name][1]:.3f}, by its own temperature {predicted[name]:.3f}")
    assert not bool(draws.sample_stats["diverging"].any())
(by_epochs, error), (by_independent, other_error) = excess["SGLD, epochs"], excess["SGLD, independent"]
assert by_independent - by_epochs > 4.5 * np.hypot(error, other_error)
by_chain = ((reference.unconstrained - mean) / sd).square().mean((1, 2))
reference_error = float(by_chain.std()) / len(by_chain) ** 0.5
print(f"the reference adds an error of {100 * reference_error:.1f} % to each factor")
for name in ("SGLD, independent", "SGHMC, independent"):
    factor, error = excess[name]
    assert abs(factor - predicted[name]) < 4.5 * np.hypot(error, factor * reference_error)

# %%
# Control variates
# ----------------
# Near the mode :math:`a` most of the gradient is known: only :math:`\nabla \ell_i(u) - \nabla \ell_i(a)` has to be
# estimated :cite:p:`baker2019`, and rows may be drawn with unequal probabilities. Neither touches the mean: over all
# batches of two of six rows, weighted by their probabilities, it is the gradient of all rows.

both = {"control": "mode", "weights": "optimal"}
few = MinibatchTarget.from_pyro(logistic, x[:6], labels[:6], batch_size=2, compile=False, **both)
chances, point = few.row_order.probabilities, torch.full((1, dim), 0.3, dtype=torch.float64)
batches = [torch.tensor(pair) for pair in itertools.product(range(6), repeat=2)]
gradient = sum(chances[rows].prod() * few.gradient(point, rows) for rows in batches)
exact = few.full_target().value_and_grad(point)[1]
print(f"mean over all batches, largest difference {float((gradient - exact).abs().max()):.1e}")
assert torch.allclose(gradient, exact, rtol=1e-11, atol=1e-11)

# %%
# The variance is measured at draws of the posterior, and the same step of SGLD is then nearly right. An anchor in the
# wrong place is worse than none: the variance grows with the square of the distance. Where there is no mode to climb
# to, anchors may follow the chains, ``control="svrg"`` :cite:p:`johnson2013`.

points = reference.unconstrained.flatten(0, 1)[:20]
anchors = {"none": None, "the mode": "mode", "far away": mean + 300 * sd}
variance = {}
for name, anchor in anchors.items():
    given = {} if anchor is None else {"control": anchor}
    target = MinibatchTarget.from_pyro(logistic, x, labels, batch_size=batch_size, row_order=IndependentRows(), **given)
    variance[name] = float(target.gradient_variance(points).sum(1).mean())
    print(f"anchor {name:8s}: trace of the gradient's variance {variance[name]:.3g}")
assert variance["the mode"] < 0.1 * variance["none"] < variance["none"] < variance["far away"]
controlled = MinibatchTarget.from_pyro(logistic, x, labels, batch_size=batch_size, **both)
draws = sample_stochastic_gradient(controlled, SGLD(0.1, metric=metric), 16, *length, seed=4, progress=False)
by_chain = ((draws.unconstrained - mean) / sd).square().mean((1, 2))
factor, error = float(by_chain.mean()), float(by_chain.std()) / 4
print(f"with control and weights: variance is too large by a factor {factor:.3f} +- {error:.3f}")
assert by_independent - factor > 4.5 * np.hypot(error, other_error)

# %%
# Try it on yours
# ---------------
# Give every plate over rows a ``subsample_size``, and read rows by ``pyro.subsample``; then
#
# .. code-block:: python
#
#    target = MinibatchTarget.from_pyro(model, x, y, batch_size)
#    draws = sample_stochastic_gradient(target, SGLD(step_size), num_chains=16, num_samples=1000)
#    print(draws.sample_stats["temperature"].mean())  # variances are too large by about this factor
#
# Halve the step until the temperature is as near to one as the question needs. Add ``control="mode"`` for a model with
# one mode, ``weights="optimal"`` where rows differ in size. If all rows fit into memory and a
# gradient takes less than a millisecond, :func:`bayeskit.sample` is exact and usually faster.
#
# Where to go next: :doc:`long_runs` stops and resumes runs like these, :doc:`distributed_svi` trains a guide on
# minibatches in several processes.
