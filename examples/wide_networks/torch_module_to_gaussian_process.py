r"""
Neural network Gaussian process (NNGP) of a torch module: depth by the evidence
===============================================================================

**What you will learn:** how a torch module that you already have becomes a model whose evidence is known, and how the
evidence chooses the module's depth and the variances of its weights.

The data are ten measurements of patients and the progress of their diabetes a year later :cite:p:`efron2004`,
in scikit-learn. How many hidden layers should a network have that predicts it?
"""

# sphinx_gallery_thumbnail_number = -1
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal
from sklearn.datasets import load_diabetes
from torch import nn

from bayeskit.errors import ModelError
from bayeskit.gallery import is_small
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import fit_depths, nngp_posterior

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


def make_network(depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), *hidden, nn.Linear(64, 1))


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
# Functions from the prior, along a line on which only the body mass index changes, from two standard deviations below
# the mean to two above. With variance two of the weights, a layer hands on the size of what it gets. With one hidden
# layer functions bend gently before data have been seen; with eight they are rougher, and most change less from end to
# end.

line = torch.zeros(81, 10, dtype=x.dtype)
line[:, 2] = torch.linspace(-2, 2, 81)
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
for ax, depth in zip(prior_predictive.subplots(1, 2, sharey=True), (1, 8), strict=True):
    prior = infinite_width(make_network(depth), weight_variance=2.0, bias_variance=0.1).nngp(line).numpy()
    functions = np.random.default_rng(0).multivariate_normal(np.zeros(81), prior, 6, method="eigh")
    ax.plot(line[:, 2], functions.T, linewidth=1)
    ax.set(xlabel="body mass index (standard deviations)", title=f"{depth} hidden layer{'s' * (depth > 1)}")
prior_predictive.axes[0].set_ylabel("progress (standard deviations)")

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

# %%
# What it says
# ------------
# Each depth has three numbers to fit, so that their largest log evidences can be compared. Depth gains nothing here: a
# single hidden layer has the largest. On patients who took no part, the best network is held against a linear
# regression, and is hardly better. Sampling the variances, rather than fitting them, is done by
# :class:`~bayeskit.models.wide_networks.gaussian_processes.RegressionModel` and any sampler.

best = compared.fits[compared.best]
assert compared.best == 1
mean = best.posterior.mean(x_test)
spread = (best.posterior.variance(x_test) + best.noise_variance).sqrt()
square = (mean - y_test).square()
inside = ((mean - y_test).abs() < 1.96 * spread).double()
line_train, line_test = (torch.cat([part, torch.ones_like(part[:, :1])], 1) for part in (x_train, x_test))
coefficients = torch.linalg.lstsq(line_train, y_train[:, None]).solution[:, 0]
added = (line_test @ coefficients - y_test).square() - square
for name, values in (
    ("mean square error", square),
    ("linear regression adds", added),
    ("share in 95 % intervals", inside),
):
    print(f"{name:25s}{float(values.mean()):.3f} +- {float(values.std()) / len(values) ** 0.5:.3f}")

figure = Figure(figsize=(8.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
compared.plot(left).set(xlabel="hidden layers", ylabel="largest log evidence (nats)")
left.get_legend().set_title("chosen")
right.errorbar(mean[:40], y_test[:40], xerr=1.96 * spread[:40], fmt="o", markersize=4, alpha=0.6)
right.axline((0, 0), slope=1, color="grey", linewidth=1)
right.set(xlabel="prediction with 95 % interval\n(standard deviations)", ylabel="progress (standard deviations)")

# %%
# A failure on purpose
# --------------------
# Not every module has a limit. Batch normalisation couples the rows of a batch, so that the covariance of two patients
# would depend on who else is in the room. It is refused, with what to take instead.

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
# the limit of exact linear algebra. If the network you train does better than its Gaussian process, it learns features,
# and the evidence of the limit says nothing of that.
#
# Where to go next: :doc:`arc_cosine_kernel_against_networks` asks how wide a network must be,
# :doc:`four_gaussian_processes` what else goes by the name of its Gaussian process.
