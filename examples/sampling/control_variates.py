r"""
Control variates for stochastic-gradient MCMC: less noisy minibatches
=====================================================================

**What you will learn:** how a control variate and unequal row probabilities shrink the noise of minibatch gradients
without touching their mean, what that buys in steps, and where it makes things worse.

The gradient of a log posterior is a sum over rows, and a minibatch estimates it. Near the mode :math:`a` most of that
sum is known: only :math:`\nabla \ell_i(u) - \nabla \ell_i(a)` has to be estimated :cite:p:`baker2019`. Anchors that
follow the chains :cite:p:`johnson2013` need no mode, but a pass over the data each time they move.
"""

import itertools

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes

from bayeskit.gallery import is_small
from bayeskit.inference.samplers import (
    SGLD,
    IndependentRows,
    Metric,
    MinibatchTarget,
    sample_stochastic_gradient,
)

# %%
# Diabetes
# --------
# A linear regression of the progress of 442 patients on ten measures, with a known residual variance of one half. The
# posterior is normal, so all that follows can be compared with closed forms.

x, y = (torch.as_tensor(part) for part in load_diabetes(return_X_y=True))
y = (y - y.mean()) / y.std(correction=0)
covariance = torch.linalg.inv(torch.eye(10).double() + x.T @ x / 0.5)
mean = covariance @ (x.T @ y) / 0.5


def regression(x: torch.Tensor, y: torch.Tensor, batch_size: int | None = None) -> None:
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ weights, 0.5**0.5), obs=y[rows])


both = {"control": "mode", "weights": "optimal"}
settings = {
    "plain": {"row_order": IndependentRows()},
    "optimal weights": {"weights": "optimal"},
    "control at the mode": {"control": "mode", "row_order": IndependentRows()},
    "both": both,
}
targets = {name: MinibatchTarget.from_pyro(regression, x, y, batch_size=20, **own) for name, own in settings.items()}

# %%
# An exact twin
# -------------
# Six patients, two at a time: with all 36 batches and their probabilities, the mean of the estimated gradients is the
# gradient of all rows, whatever the weights and the anchor.

few = MinibatchTarget.from_pyro(
    regression, x[:6], y[:6], batch_size=2, control="mode", weights="optimal", compile=False
)
chances = few.row_order.probabilities
point = torch.full((1, 10), 0.3, dtype=torch.float64)
batches = [torch.tensor(pair) for pair in itertools.product(range(6), repeat=2)]
gradient = sum(chances[rows].prod() * few.gradient(point, rows) for rows in batches)
exact = few.full_target().value_and_grad(point)[1]
print(f"probabilities {chances.numpy().round(3)}; largest difference {float((gradient - exact).abs().max()):.1e}")
assert torch.allclose(gradient, exact, rtol=1e-11, atol=1e-11)

# %%
# The variance
# ------------
# On average over the posterior, the trace of the gradient's variance is, by formula and as the targets measure it:

generator = torch.Generator().manual_seed(0)
noise = torch.randn(200, 10, generator=generator, dtype=torch.float64)
points = mean + noise @ torch.linalg.cholesky(covariance).mT
equal = torch.full((442,), 1 / 442, dtype=torch.float64)
formula, measured = {}, {}
for name, target in targets.items():
    p = equal if name in ("plain", "control at the mode") else target.row_order.probabilities
    away = (y - points @ x.T) if target.anchor is None else (target.anchor - points) @ x.T
    slopes = away[:, :, None] * x / 0.5  # (points, rows, 10)
    spread = (slopes.square().sum(-1) / p).sum(-1) - slopes.sum(1).square().sum(-1)
    formula[name] = float(spread.mean()) / 20
    measured[name] = float(target.gradient_variance(points, 50 if is_small() else 400).sum(1).mean())
for name in targets:
    share = formula[name] / formula["plain"]
    print(f"{name:>20}: {formula[name]:9.2f}, measured {measured[name]:9.2f}, {share:.4f} of plain")
    assert abs(measured[name] / formula[name] - 1) < 0.1
assert formula["control at the mode"] < 0.02 * formula["plain"]

# %%
# Row probabilities alone gain a third; those that would be best at one point cannot be had without all gradients there.
#
# What it buys
# ------------
# Steps of SGLD add noise of their own, and the noise of the gradient is as if the temperature were raised. It is paid
# in step size: the same step is nearly right with control, and twice as hot without.

metric = Metric.dense(covariance)
kernel = SGLD(0.2, metric=metric)
right = float(SGLD(0.2).stationary_variance(1.0))  # without any noise of the gradient
length = (32, 50, 100) if is_small() else (64, 100, 1000)
excess = {}
for seed, (name, target) in enumerate(targets.items()):
    draws = sample_stochastic_gradient(target, kernel, *length, seed=seed, initial=mean, progress=False)
    whitened = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (draws.unconstrained - mean).flatten(0, 1).mT, upper=False
    )
    by_chain = whitened.square().mean(0).unflatten(0, (length[0], -1)).mean(1)
    excess[name] = float(by_chain.mean()), float(by_chain.std()) / length[0] ** 0.5
    print(f"{name:>20}: variance {excess[name][0]:.3f} +- {excess[name][1]:.3f} of the posterior's")
print(f"{'without noise':>20}: variance {right:.3f}, the bias of the step")
assert abs(excess["both"][0] - right) < 0.05 + 4.5 * excess["both"][1]
assert excess["plain"][0] > excess["both"][0] + 4.5 * np.hypot(excess["plain"][1], excess["both"][1])

# %%
# **A failure on purpose.** An anchor in the wrong place is worse than none: the variance grows with the square of the
# distance. Anchors that move forget a bad start.

deviation = float(covariance.diagonal().mean().sqrt())
distances, plain, moving = np.geomspace(0.3, 30, 7), [], []
for distance in distances:
    anchor = mean + distance * deviation
    far = MinibatchTarget.from_pyro(
        regression, x, y, batch_size=20, control=anchor, row_order=IndependentRows(), compile=False
    )
    plain.append(float(far.gradient_variance(points[:20], 50).sum(1).mean()))
assert plain[0] < 0.05 * formula["plain"] and plain[-1] > formula["plain"]
follower = MinibatchTarget.from_pyro(regression, x, y, batch_size=20, control="svrg", compile=False)
draws = sample_stochastic_gradient(follower, kernel, 32, *length[1:], initial=mean + 30 * deviation, progress=False)
print(f"from a far start, moving anchors: temperature {float(draws.sample_stats['temperature'].mean()):.3f}")
assert float(draws.sample_stats["temperature"].mean()) < 1.2

figure = Figure(figsize=(6, 3.4), layout="constrained")
axes = figure.subplots()
axes.loglog(distances, plain, "o-", label="control at a given point")
for style, name in zip((":", "--"), ("plain", "control at the mode"), strict=True):
    axes.axhline(formula[name], color="0.4", linestyle=style, label=name)
axes.set(xlabel="distance of the anchor (posterior deviations a coordinate)", ylabel="trace of the gradient's variance")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Add ``control="mode"`` to a :class:`~bayeskit.inference.samplers.MinibatchTarget` of any model with one mode,
# ``weights="optimal"`` where rows differ in size, and ``control="svrg"`` where there is no mode to climb to, as for
# networks. Look at ``target.gradient_variance(u)`` before and after. With 442 rows none of this is worth it:
# :func:`bayeskit.sample`, which sees all of them, is faster and has no bias.
#
# .. code-block:: python
#
#    target = MinibatchTarget.from_pyro(regression, x, y, batch_size=20, control="mode", weights="optimal")
#    print(target.gradient_variance(points[:4]).sum(1))
#
# Where to go next: :doc:`stochastic_gradient` has the kernels and the bias of a step.
