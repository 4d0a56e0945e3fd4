r"""
Neural network Gaussian process (NNGP) of a torch module: depth by the evidence, many data
==========================================================================================

**What you will learn:** how a torch module that you already have becomes a model whose evidence is known, how the
evidence chooses the module's depth and the variances of its weights, and how to predict where the data are too many for
a Cholesky factor.

The data are ten measurements of patients and the progress of their diabetes a year later :cite:p:`efron2004`. How many
hidden layers should a network have that predicts it? The exact posterior takes time of order :math:`n^3`. Inducing
points :cite:p:`titsias2009` summarise the data, conjugate gradients :cite:p:`gardner2018` solve the same equations step
by step; what they lose is measured on handwritten digits :cite:p:`alpaydin1998`, even or odd, all in scikit-learn.
"""

# sphinx_gallery_thumbnail_number = -1
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal
from sklearn.datasets import load_diabetes, load_digits
from torch import nn

from bayeskit.errors import ModelError
from bayeskit.gallery import is_small
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    ConjugateGradients,
    InducingPoints,
    fit_depths,
    large_regression,
    nngp_posterior,
)

# %%
# The model
# ---------
# As hidden layers grow, a network with random weights becomes a Gaussian process :cite:p:`lee2018`, whose covariance
# :math:`K_v` follows from the module's layers and the variances :math:`v` of weights and biases. With normal noise,
#
# .. math:: f \sim GP(0, K_v), \qquad y \mid f \sim N(f(x), \sigma^2) \quad\Rightarrow\quad y \sim N(0, K_v(x, x) +
#    \sigma^2 I),
#
# so that the function is integrated out, and depths and variances can be compared by the likelihood that is left. The
# widths in the module do not matter.


def make_network(depth: int, num_inputs: int = 10) -> nn.Module:
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), *hidden, nn.Linear(64, 1))


num_train, depths = (60, (1, 2, 4)) if is_small() else (250, (1, 2, 3, 5, 8))
measured, progress = load_diabetes(return_X_y=True)
order = torch.randperm(len(measured), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(measured)[order], torch.tensor(progress)[order]
x = x / x[:num_train].std(0)
y = (y - y[:num_train].mean()) / y[:num_train].std()
x_train, y_train, x_test, y_test = x[:num_train], y[:num_train], x[num_train:], y[num_train:]

# %%
# Before the data
# ---------------
# Functions from the prior, along a line on which only the body mass index changes. With variance two of the weights, a
# layer hands on the size of what it gets. With one hidden layer functions bend gently before data have been seen; with
# eight they are rougher, and most change less from end to end.

line = torch.zeros(81, 10, dtype=x.dtype)
line[:, 2] = torch.linspace(-2, 2, 81)
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
for ax, depth in zip(prior_predictive.subplots(1, 2, sharey=True), (1, 8), strict=True):
    prior = infinite_width(make_network(depth), weight_variance=2.0, bias_variance=0.1).nngp(line).numpy()
    ax.plot(line[:, 2], np.random.default_rng(0).multivariate_normal(np.zeros(81), prior, 6, method="eigh").T)
    ax.set(xlabel="body mass index (standard deviations)", title=f"hidden layers: {depth}")

# %%
# An exact twin
# -------------
# Four patients, three hidden layers. A layer of rectified linear units turns variances and covariances into new ones by
# a formula of the angle :cite:p:`cho2009`; the evidence is the density of four normal variables.

covariance = 0.1 + 2.0 * (x[:4] @ x[:4].mT).numpy() / 10
for _ in range(3):
    size = np.sqrt(np.outer(covariance.diagonal(), covariance.diagonal()))
    angle = np.arccos(np.clip(covariance / size, -1, 1))
    covariance = 0.1 + 2.0 * size * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)
by_hand = float(multivariate_normal(np.zeros(4), covariance + 0.5 * np.eye(4)).logpdf(y[:4]))
three = infinite_width(make_network(3), weight_variance=2.0, bias_variance=0.1)
exact = float(nngp_posterior(three, x[:4], y[:4], noise_variance=0.5).log_evidence)
print(f"four patients: log evidence {exact:.10f}, by hand {by_hand:.10f}")
assert np.abs(three.nngp(x[:4]).numpy() - covariance).max() < 1e-9
assert abs(exact - by_hand) < 1e-9

# %%
# The fit
# -------
# For each depth, the variances and the noise at which the data are most likely. The search has ended when the slope is
# zero in all directions that are free, from two starts at the same value; no jitter was needed. Three starts are
# allowed, but once two agree there are no more.

compared = fit_depths(make_network, depths, x_train, y_train, num_starts=3, seed=0, progress=False)
for depth, fit in compared.fits.items():
    print(f"{depth} hidden: {fit}")
    assert fit.finished and fit.posterior.jitter == 0.0 and fit.gradient < 1e-3
    assert sum(value > fit.log_evidence - 1e-6 for value in fit.starts) > 1

best = compared.fits[compared.best]
dense = best.network.nngp(x_train) + best.noise_variance * torch.eye(num_train, dtype=x.dtype)
evidence = float(multivariate_normal(cov=dense.numpy()).logpdf(y_train.numpy()))
assert compared.best == 1 and abs(best.log_evidence - evidence) < 1e-5

# %%
# Many data: images of digits, 1 for even and -1 for odd, treated as numbers. As many inducing points as data lose
# nothing, and neither do conjugate gradients that run to the end. Fewer points give a lower bound of the log evidence,
# which rises with their number; conjugate gradients stop at a relative residual, and predictions come nearer to the
# exact ones as it falls, here without a preconditioner, with which a dozen steps leave nothing to be seen.

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
pixels, even = torch.tensor(images)[order] / 8 - 1, 1.0 - 2.0 * (torch.tensor(labels)[order] % 2).double()
n, subset, NOISE = (200, 60, 0.1) if is_small() else (1500, 300, 0.1)
network, new = infinite_width(make_network(2, 64), weight_variance=2.0, bias_variance=0.1), pixels[1500:]
dense = network.nngp(pixels[:subset]) + NOISE * torch.eye(subset, dtype=x.dtype)
evidence = float(multivariate_normal(cov=dense.numpy()).logpdf(even[:subset].numpy()))
solved = torch.cholesky_solve(even[:subset, None], torch.linalg.cholesky(dense))[:, 0]
predicted = network.nngp(new, pixels[:subset]) @ solved
for method in (InducingPoints(subset), ConjugateGradients(1e-5)):
    found = large_regression(network, pixels[:subset], even[:subset], NOISE, method)
    assert float((found.predict(new).mean - predicted).abs().max()) < 1e-3
    assert found.bound is None or abs(found.bound - evidence) < 1e-2
exactly = nngp_posterior(network, pixels[:n], even[:n], NOISE)
mean, spread, largest = exactly.mean(new), exactly.variance(new).sqrt(), float(exactly.log_evidence)
numbers, tolerances = ((20, 60), (1e-1, 1e-4)) if is_small() else ((50, 150, 500), (1e-1, 1e-2, 1e-4))
methods = [InducingPoints(m, seed=0) for m in numbers]
methods += [ConjugateGradients(tolerance, preconditioner_rank=0) for tolerance in tolerances]
away, bounds = [], []
for method in methods:
    found = large_regression(network, pixels[:n], even[:n], NOISE, method)
    law = found.predict(new)
    away.append(float(((law.mean - mean) / spread).square().mean().sqrt()))
    bounds += [] if found.bound is None else [found.bound]
    wrong = (law.mean.sign() != even[1500:]).double()
    print(f"{method}: {away[-1]:.1e} deviations off, wrong {wrong.mean():.3f} +- {wrong.std() / len(wrong) ** 0.5:.3f}")
print(f"log evidence {largest:.2f}, bounds {', '.join(f'{bound:.2f}' for bound in bounds)}")
assert bounds == sorted(bounds) and bounds[-1] < largest + 1e-6
by_points, by_residual = away[: len(numbers)], away[len(numbers) :]
assert by_points == sorted(by_points, reverse=True) and by_residual == sorted(by_residual, reverse=True)
assert len(set(by_residual)) == len(tolerances) and by_residual[-1] < 0.05

# %%
# What it says
# ------------
# Each depth has three numbers to fit, so that their largest log evidences can be compared. Depth gains nothing here: a
# single hidden layer has the largest. On patients who took no part, the best network is held against a linear
# regression, and is hardly better. Sampling the variances, rather than fitting them, is done by
# :class:`~bayeskit.models.wide_networks.gaussian_processes.RegressionModel` and any sampler.
#
# With many data conjugate gradients come nearer to the exact predictions as the residual falls, and need the covariance
# in memory; inducing points need a part of it only, but a network's process on images has no short summary. With
# :math:`n` data the dense factor costs :math:`n^3 / 3` multiplications, a step of conjugate gradients :math:`n^2`, and
# :math:`m` inducing points :math:`n m^2`.

mean = best.posterior.mean(x_test)
spread = (best.posterior.variance(x_test) + best.noise_variance).sqrt()
square, inside = (mean - y_test).square(), ((mean - y_test).abs() < 1.96 * spread).double()
line_train, line_test = (torch.cat([part, torch.ones_like(part[:, :1])], 1) for part in (x_train, x_test))
coefficients = torch.linalg.lstsq(line_train, y_train[:, None]).solution[:, 0]
added = (line_test @ coefficients - y_test).square() - square
for name, values in {"mean square error": square, "linear regression adds": added, "in 95 % intervals": inside}.items():
    print(f"{name:25s}{float(values.mean()):.3f} +- {float(values.std()) / len(values) ** 0.5:.3f}")

figure = Figure(figsize=(8.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
compared.plot(left).set(xlabel="hidden layers", ylabel="largest log evidence (nats)")
right.plot(numbers, bounds, "o-", label="bound by inducing points")
right.axhline(largest, color="C1", linestyle="--", label="exact")
right.set(xlabel="inducing points", ylabel="log evidence, images")
right.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# Not every module has a limit. Batch normalisation couples the rows of a batch, so that the covariance of two patients
# would depend on who else is in the room. It is refused, with what to take instead. And inducing points that are too
# few cannot follow the function: if the noise is fitted to their bound, what they miss is called noise. The bound
# rises, and looks like progress.

few = InducingPoints(10, num_steps=20 if is_small() else 100, learning_rate=0.1, seed=0)
fitted = large_regression(network, pixels[:n], even[:n], NOISE, few)
print(f"noise variance {NOISE} to begin with, {fitted.noise_variance:.3f} by ten inducing points")
assert fitted.noise_variance > 1.5 * NOISE and fitted.bound < largest

try:
    infinite_width(nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)))
except ModelError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("batch normalisation was taken for a kernel")

# %%
# Try it on yours
# ---------------
# Replace ``make_network`` by a function from a depth, or from anything else that you want to choose, to your module.
#
# .. code-block:: python
#
#    fit = fit_depths(make_network, (1,), x_train, y_train, num_starts=3, seed=0).fits[1]
#    print(fit, fit.finished, fit.posterior.jitter)
#
# Look at ``finished``, at ``jitter``, which should be zero, and at intervals on data left out. A few thousand rows are
# the limit of exact linear algebra: beyond, fit on a random subset, predict by ``large_regression(fit.network, x, y,
# fit.noise_variance, InducingPoints(500))``, and double the number of points until the bound stays. If the network you
# train does better than its Gaussian process, it learns features, and the evidence of the limit says nothing of that.
#
# Where to go next: :doc:`arc_cosine_kernel_against_networks` asks how wide a network must be,
# :doc:`four_gaussian_processes` what else goes by the name of its Gaussian process.
