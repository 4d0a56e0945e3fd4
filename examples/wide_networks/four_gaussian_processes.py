r"""
NNGP and NTK: four Gaussian processes of one wide neural network
================================================================

**What you will learn:** that "the Gaussian process of a wide network" can mean four things, how they differ, and which
of them networks follow that gradient descent has trained.

The data are monthly temperatures of the sea off Peru during the El Nino of 1997 and 1998 (NOAA, in statsmodels). Four
of them are given, those of January and July; the others wait for the predictions.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from statsmodels.datasets import elnino
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bayeskit.gallery import is_small
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import compare_gaussian_processes, ntk_ensemble

NOISE = 0.05

# %%
# The model
# ---------
# A network with one hidden layer has a covariance of its outputs at initialisation, :math:`K` (the NNGP kernel), and
# products of gradients, :math:`\Theta`, the tangent kernel :cite:p:`jacot2018`. With noise variance :math:`\rho`, the
# four are
#
# - the *NNGP posterior*, Bayes' rule with the prior :math:`f \sim N(0, K)`;
# - the *NTK ensemble*, the law of trained networks :cite:p:`lee2019`. Training minimises half the sum of squared errors
#   and half of :math:`\rho` times the squared distance from the initial weights, and takes outputs from :math:`f_0` to
#
#   .. math::
#
#      f = f_0 + \Theta_{\cdot x} (\Theta + \rho)^{-1} \left(1 - (1 - \eta (\Theta + \rho))^t\right) (y - f_0(x)),
#      \qquad f_0 \sim N(0, K),
#
#   after :math:`t` steps of gradient descent at rate :math:`\eta`;
# - *NTK regression*, the mean of that law at the end of training: a function without a variance;
# - the *NTK posterior*, Bayes' rule with the prior :math:`f \sim N(0, \Theta)`, the law of no wide network.

table = elnino.load_pandas().data
celsius = torch.tensor(table[table["YEAR"].isin([1997, 1998])].drop(columns="YEAR").to_numpy(dtype=float).flatten())
month = torch.arange(24, dtype=torch.float64)
given = month % 6 == 0
centre, spread = celsius[given].mean(), celsius[given].std()
position = ((month - 11.5) / 6)[:, None]
x, y = position[given], (celsius[given] - centre) / spread
x_new = ((torch.linspace(0, 23, 93, dtype=torch.float64) - 11.5) / 6)[:, None]  # every quarter of a month

width = 512 if is_small() else 1024
module = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 1)).double()
kernel = infinite_width(module, weight_variance={"0": 2.0, "2": 16.0}, bias_variance=1.0)
four = compare_gaussian_processes(kernel, x, y, x_new, noise_variance=NOISE)
print(four)

# %%
# Before the data
# ---------------
# Six networks with random weights, and two standard deviations of their limit. Functions are smooth and nearly straight
# far out, and they know nothing of seasons.


def random_weights(network: nn.Module, number: int, seed: int) -> dict[str, Tensor]:
    """Return the weights of many networks; scales are applied inside the network."""
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(number, *p.shape, generator=generator, dtype=p.dtype) for k, p in network.named_parameters()}


def outputs(network: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return what all networks make of inputs, (networks, inputs)."""
    return vmap(lambda one: functional_call(network, one, (x,))[:, 0])(weights)


network = kernel.network(seed=0).requires_grad_(False)
when = 6 * x_new[:, 0] + 11.5
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
axes = prior_predictive.subplots()
axes.plot(when, (centre + spread * outputs(network, random_weights(network, 6, seed=1), x_new)).mT, linewidth=1)
band = 2 * spread * kernel.nngp_diagonal(x_new).sqrt()
axes.fill_between(when, centre - band, centre + band, color="grey", alpha=0.2)
axes.set(xlabel="months from January 1997", ylabel="temperature (degrees C)", title="before training")

# %%
# An exact twin
# -------------
# Two data and one new input. Both kernels follow from the angle between inputs, the bias as one more coordinate; the
# rest is matrices of two rows, and a power of one for the steps of training.

points = np.array([-1.0, 0.5, 1.2])
below = 1.0 + 2.0 * np.outer(points, points)
scale = np.sqrt(np.outer(below.diagonal(), below.diagonal()))
angle = np.arccos(np.clip(below / scale, -1, 1))
nngp = 1.0 + 8 * scale * (np.sin(angle) + (math.pi - angle) * np.cos(angle)) / math.pi
ntk = nngp + 8 * below * (math.pi - angle) / math.pi
old, new, few = [0, 1], 2, np.array([0.3, -0.8])


def moved(matrix: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Return how a new output follows those of the data, (2,)."""
    return matrix[new, old] @ np.linalg.solve(matrix[:2, :2] + NOISE * np.eye(2), change)


stay = np.eye(2)
slow = stay - np.linalg.matrix_power(stay - 0.01 * (ntk[:2, :2] + NOISE * stay), 50)
a, b, c = moved(nngp, stay), moved(ntk, stay), moved(ntk, slow)
by_hand = {
    "NNGP posterior": (a @ few, nngp[new, new] - a @ nngp[old, new]),
    "NTK ensemble": (b @ few, nngp[new, new] - 2 * b @ nngp[old, new] + b @ nngp[:2, :2] @ b),
    "NTK posterior": (b @ few, ntk[new, new] - b @ ntk[old, new]),
    "after 50 steps": (c @ few, nngp[new, new] - 2 * c @ nngp[old, new] + c @ nngp[:2, :2] @ c),
}
inputs, targets = torch.tensor(points)[:, None], torch.tensor(few)
small = compare_gaussian_processes(kernel, inputs[:2], targets, inputs[2:], noise_variance=NOISE)
early = ntk_ensemble(kernel, inputs[:2], targets, learning_rate=0.01, ridge=NOISE).after(50)
found = {one.name: (one.mean, one.variance) for one in small}
found["after 50 steps"] = early.mean(inputs[2:]), early.variance(inputs[2:])
for name, law in by_hand.items():
    print(f"{name:16s} mean {float(found[name][0]):.9f}, variance {float(found[name][1]):.9f}")
    assert abs(float(found[name][0]) - law[0]) < 1e-9 and abs(float(found[name][1]) - law[1]) < 1e-9

# %%
# The fit
# -------
# Many networks of finite width are trained by gradient descent on all their weights, each from its own random ones. The
# width is large for so few data, and so is the variance of the last layer's weights: small movements of many weights
# are then enough, and networks stay in the regime where the tangent kernel holds :cite:p:`chizat2019`.

num_networks, num_steps = (60, 100) if is_small() else (200, 100)
ensemble = ntk_ensemble(kernel, x, y, ridge=NOISE)
rate = 0.5 * ensemble.largest_learning_rate
limit = ntk_ensemble(kernel, x, y, learning_rate=rate, ridge=NOISE).after(num_steps)
start = random_weights(network, num_networks, seed=2)
weights = dict(start)
gradient = vmap(grad(lambda one: 0.5 * (functional_call(network, one, (x,))[:, 0] - y).square().sum()))
for _ in range(num_steps):
    steps = gradient(weights)
    weights = {k: w - rate * (steps[k] + NOISE * (w - start[k])) for k, w in weights.items()}
trained = outputs(network, weights, position)
mean, deviation = trained.mean(0), trained.std(0)

# %%
# At all 24 months, means and standard deviations of trained networks agree with the NTK ensemble within three Monte
# Carlo errors, and with neither posterior. A width of 1024 is large, but finite.

months = compare_gaussian_processes(kernel, x, y, position, noise_variance=NOISE)
laws = {one.name: (one.mean, one.variance.sqrt()) for one in months if one.variance is not None}
laws["NTK ensemble"] = limit.mean(position), limit.variance(position).sqrt()
for name, law in laws.items():
    z_mean = (mean - law[0]) / (deviation / num_networks**0.5)
    z_spread = (deviation / law[1]).log() * (2 * (num_networks - 1)) ** 0.5
    largest = [float(z.abs().max()) for z in (z_mean, z_spread)]
    print(f"{name:16s} largest z of means {largest[0]:5.1f}, of standard deviations {largest[1]:5.1f}")
    assert (max(largest) < 4.5) == (name == "NTK ensemble")

# %%
# What it says
# ------------
# A trained ensemble is no posterior. Its spread is what random initial weights leave behind, and the tangent kernel's
# posterior, though its mean is the same, claims a much larger one. Many of the months left out lie more than two
# standard deviations from the means of the NNGP posterior and of the ensemble: neither law knows of seasons.

april = float(spread * deviation[3])  # of 1997, between two months that were given
error = april / (2 * (num_networks - 1)) ** 0.5
print("April 1997, standard deviation in degrees")
print(f"    trained networks  {april:.3f} +- {error:.3f}")
for name, law in laws.items():
    print(f"    {name:18s}{float(spread * law[1][3]):.3f}")

figure = Figure(figsize=(8.5, 6), layout="constrained")
dashed = [centre + spread * (mean + sign * 2 * deviation) for sign in (-1, 1)]
for ax, one in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, four, strict=True):
    middle = centre + spread * one.mean
    ax.plot(when, middle)
    if one.variance is not None:
        band = 2 * spread * one.variance.sqrt()
        ax.fill_between(when, middle - band, middle + band, alpha=0.2, label="2 standard deviations")
    for line in dashed:
        ax.plot(month, line, "k--", linewidth=0.8, label="trained networks" if line is dashed[0] else None)
    ax.plot(month[given], celsius[given], "C1o", label="given")
    ax.plot(month[~given], celsius[~given], "C1o", fillstyle="none", label="left out")
    ax.set_title(one.name)
figure.supxlabel("months from January 1997")
figure.supylabel("temperature (degrees C)")
figure.axes[0].legend(fontsize="small")

# %%
# A failure on purpose
# --------------------
# A prior without seasons does not make them up. If the intervals of the NNGP posterior held, one month in twenty would
# lie outside of two standard deviations, noise included. Of the months left out, many times as many do.

posterior = next(one for one in months if one.name == "NNGP posterior")
expected = (posterior.variance + NOISE).sqrt()
away = (((celsius - centre) / spread - posterior.mean) / expected).abs()[~given]
print(f"{int((away > 2).sum())} of {len(away)} months lie outside, the farthest {float(away.max()):.1f} deviations off")
assert float((away > 2).double().mean()) > 0.2

# %%
# Try it on yours
# ---------------
# Replace ``module``, the variances of its weights, and the data; scale inputs and responses to about one.
#
# .. code-block:: python
#
#    kernel = infinite_width(module, weight_variance={"0": 2.0, "2": 16.0}, bias_variance=1.0)
#    four = compare_gaussian_processes(kernel, x, y, x_new, noise_variance=NOISE)
#    print(four)
#
# For what you believe, take the NNGP posterior, and check its intervals on data left out; for what training from random
# weights gives, the NTK ensemble. Look at how far networks of your width are from the limit before you rely on either:
# networks that learn features leave it.
#
# Where to go next: :doc:`arc_cosine_kernel_against_networks` measures how the distance falls with the width,
# :doc:`laplace_with_the_right_fisher` asks for a posterior of a network as it is.
