r"""
The arc-cosine kernel (NNGP) against random and trained networks of finite width
================================================================================

**What you will learn:** what a network becomes as its hidden layer grows, how far a network of finite width is from
that limit before and after training, and how to measure that the distance falls like one over the width.

:cite:t:`cho2009` integrated the random weights of an infinitely wide layer of rectified linear units in closed form,
and named the covariance of its outputs the arc-cosine kernel. Here it is held against networks that are drawn at random
and trained on images of handwritten threes and eights, of 8 by 8 pixels :cite:p:`alpaydin1998`, in scikit-learn.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import torch
from matplotlib.figure import Figure
from scipy.integrate import dblquad
from scipy.stats import multivariate_normal
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bayeskit.gallery import is_small
from bayeskit.models.wide_networks import InfiniteWidth, infinite_width
from bayeskit.models.wide_networks.gaussian_processes import last_layer_ensemble, nngp_posterior

NOISE = 0.5

# %%
# The model
# ---------
# A network of :math:`n` hidden units has weights of which nothing is known but their normal law,
#
# .. math::
#
#    f(x) = \sqrt{\tfrac 2n} \sum_{j=1}^n v_j \max(0, w_j^\top x), \qquad
#    v_j \sim N(0, 1), \quad w_j \sim N(0, I / d).
#
# As :math:`n` grows, :math:`f` becomes a Gaussian process. If :math:`|x|^2 = d`, as here, its covariance depends on the
# angle :math:`\theta` between two images only,
#
# .. math::
#
#    K(x, x') = J_1(\theta) / \pi, \qquad J_1(\theta) = \sin\theta + (\pi - \theta) \cos\theta .
#
# The package reads it from the module; the module's own width plays no role.

images, digits = load_digits(return_X_y=True)
chosen = (digits == 3) | (digits == 8)
x, y = torch.tensor(images[chosen]), torch.tensor(digits[chosen] == 8).double() * 2 - 1
x = 8 * nn.functional.normalize(x - x[:100].mean(0))  # 64 pixels
x_train, y_train, x_test, y_test = x[:100], y[:100], x[100:], y[100:]

module = nn.Sequential(nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False)).double()
kernel = infinite_width(module, weight_variance={"0": 1.0, "2": 2.0})
print(f"{len(x_train)} images to learn from, {len(x_test)} to predict; {kernel}")


def hidden(x: Tensor, width: int, num_networks: int, generator: torch.Generator) -> Tensor:
    """Return the hidden layers of random networks, (num_networks, images, width)."""
    weights = torch.randn(num_networks, 64, width, generator=generator, dtype=x.dtype)
    return (2 / width) ** 0.5 * torch.relu(x @ (weights / 8))


# %%
# Before the data
# ---------------
# Given its hidden layer, a random network is a Gaussian process already, with the covariance :math:`\hat K` of its
# hidden units. Each dot is a pair of images: with few units the covariance strays from the curve, with many
# hardly. Images at right angles are still expected to have labels that agree a little.

angles = torch.linspace(0, math.pi, 100)
prior_predictive = Figure(figsize=(8, 3.5), layout="constrained")
for ax, width in zip(prior_predictive.subplots(1, 2, sharey=True), (32, 2048), strict=True):
    units = hidden(x[:20], width, 1, torch.Generator().manual_seed(0))[0]
    angle = (x[:20] @ x[:20].mT / 64).clamp(-1, 1).acos()
    ax.plot(angle.flatten().rad2deg(), (units @ units.mT).flatten(), "C1o", markersize=3, label="one random network")
    ax.plot(angles.rad2deg(), (angles.sin() + (math.pi - angles) * angles.cos()) / math.pi, label="arc-cosine kernel")
    ax.set(xlabel="angle between two images (degrees)", title=f"{width} hidden units")
prior_predictive.axes[0].set_ylabel("covariance of their outputs")
prior_predictive.axes[1].legend()

# %%
# An exact twin
# -------------
# For two images the kernel is an integral over two normal variables. With four units only, :math:`\hat K` has the right
# mean: there is no bias at any width. Its variance is a quarter of that of one unit, where Cho and Saul's kernel of
# degree two appears, :math:`J_2(\theta) = 3 \sin\theta \cos\theta + (\pi - \theta)(1 + 2 \cos^2\theta)`.

r = float(x[0] @ x[1]) / 64
angle = math.acos(r)
normal = multivariate_normal([0, 0], [[1, r], [r, 1]])
by_quadrature = 2 * dblquad(lambda a, b: a * b * normal.pdf([a, b]), 0, 9, 0, 9, epsabs=1e-11)[0]
k = float(kernel.nngp(x[:1], x[1:2]))
print(f"covariance: package {k:.10f}, quadrature {by_quadrature:.10f}")
assert max(abs(k - by_quadrature), abs(k - (math.sin(angle) + (math.pi - angle) * r) / math.pi)) < 1e-9

variance = (2 * (3 * math.sin(angle) * r + (math.pi - angle) * (1 + 2 * r**2)) / math.pi - k**2) / 4
units = hidden(x[:2], 4, 20_000, torch.Generator().manual_seed(1))
found = (units[:, 0] * units[:, 1]).sum(1) - k
for name, values, exact in (("bias", found, 0.0), ("mean square", found.square(), variance)):
    value, error = float(values.mean()), float(values.std()) / len(values) ** 0.5
    print(f"four units, {name}: {value:.4f} +- {error:.4f}, exactly {exact:.4f}")
    assert abs(value - exact) < 4.5 * error

# %%
# A failure on purpose
# --------------------
# The gradient of a random network in its *input* is a Gaussian process as well. Its covariance is the mixed derivative
# :math:`\partial^2 K / \partial x \, \partial x'^\top`, here with the trace :math:`(\pi - \theta) / \pi`: two images
# have gradients that agree less, the larger the angle. With each further layer they agree less still, until the
# gradients of two images have nothing in common, as if they were shattered :cite:p:`balduzzi2017`: a deep network of
# this kind is a poor start for training by gradients, although its kernel is as well defined as any.


def gradient_agreement(kernel: InfiniteWidth, a: Tensor, b: Tensor) -> float:
    """Return the expected scalar product of the gradients of a random network at two inputs."""
    inner = torch.func.jacfwd(lambda a, b: kernel.nngp(a[None], b[None])[0, 0], 1)
    return float(torch.func.jacrev(inner, 0)(a, b).trace())


agreement = gradient_agreement(kernel, x[0], x[1])
w = torch.randn(20_000, 64, 4, generator=torch.Generator().manual_seed(3), dtype=x.dtype) / 8
products = (w.square().sum(1) * (x[0] @ w > 0) * (x[1] @ w > 0) / 2).sum(1)  # the mean square of v is one
found, error = float(products.mean()), float(products.std()) / 20_000**0.5
print(f"gradients at two images: {agreement:.6f}, four units {found:.4f} +- {error:.4f}")
assert abs(agreement - (1 - angle / math.pi)) < 1e-9 and abs(found - agreement) < 4.5 * error
for depth in (2, 5, 10):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU())]
    variances = {str(place): 2.0 if place else 1.0 for place in range(0, 2 * depth + 1, 2)}
    deep = infinite_width(nn.Sequential(*layers, nn.Linear(64, 1, bias=False)).double(), weight_variance=variances)
    print(f"{depth:2d} layers: {(agreement := gradient_agreement(deep, x[0], x[1])):.6f}")
assert agreement < 0.03  # of ten layers

# %%
# How do trained networks come in? Let gradient descent fit the last layer to targets with noise of their own, with a
# penalty that pulls weights to where they began: half the noise's variance times the squared distance. It ends at a
# function that linear algebra gives at once, and over initial weights and noise, these functions are draws of the
# posterior of the Gaussian process :cite:p:`matthews2017`.

settings = {"ridge": NOISE, "target_noise": NOISE}
ensemble, posterior = last_layer_ensemble(kernel, x[:5], y[:5], **settings), nngp_posterior(kernel, x[:5], y[:5], NOISE)
assert torch.allclose(ensemble.mean(x_test), posterior.mean(x_test), rtol=0, atol=1e-9)
assert torch.allclose(ensemble.variance(x_test), posterior.variance(x_test), rtol=0, atol=1e-9)

generator = torch.Generator().manual_seed(2)
units = hidden(x[:6], 16, 1, generator)[0]
start = last = torch.randn(16, generator=generator, dtype=x.dtype)
targets = y[:5] + NOISE**0.5 * torch.randn(5, generator=generator, dtype=x.dtype)
for _ in range(1000):
    last = last - 0.1 * (units[:5].mT @ (units[:5] @ last - targets) + NOISE * (last - start))
gram = units[:5] @ units[:5].mT + NOISE * torch.eye(5, dtype=x.dtype)
solved = units[5] @ start + units[5] @ units[:5].mT @ torch.linalg.solve(gram, targets - units[:5] @ start)
print(f"one network, sixth image: by gradient descent {units[5] @ last:.10f}, solved {solved:.10f}")
assert abs(units[5] @ last - solved) < 1e-9

# %%
# The fit
# -------
# The kernel predicts all test images, and so do networks of five widths. The mean over last layers and noise is known
# given the hidden layer; the mean over hidden layers is a Monte Carlo average. It is summarised by the margin, the mean
# of prediction times label. If its bias falls like one over the width, their product is a constant. That is tested on
# the three largest widths, for at small ones higher powers of one over the width take part.

limit = nngp_posterior(kernel, x_train, y_train, NOISE)
assert limit.jitter == 0.0
kernel_margin = float((limit.mean(x_test) * y_test).mean())
widths, number = ((64, 128, 256), 150) if is_small() else ((64, 128, 256, 512, 1024), 1500)
eye = torch.eye(len(x_train), dtype=x.dtype)
bias, error, strays, last_predictions = [], [], [], {}
for width in widths:
    generator, predictions = torch.Generator().manual_seed(width), []
    for _ in range(number // 10):
        units = hidden(x, width, 10, generator)
        train, test = units[:, :100], units[:, 100:]
        solved = torch.linalg.solve(train @ train.mT + NOISE * eye, y_train[:, None].expand(10, -1, -1))
        predictions.append((test @ (train.mT @ solved))[..., 0])
    networks = torch.cat(predictions)
    margin = (networks * y_test).mean(1) - kernel_margin
    bias.append(float(margin.mean()))
    error.append(float(margin.std()) / number**0.5)
    strays.append(float((networks - limit.mean(x_test)).square().mean().sqrt()))
    last_predictions[width] = networks.mean(0)
    print(f"width {width:5d}: margin off by {bias[-1]:.5f} +- {error[-1]:.5f}; one network strays by {strays[-1]:.3f}")

size, values, errors = (torch.tensor(v[-3:], dtype=torch.float64) for v in (widths, bias, error))
products, spreads = size * values, size * errors
constant = float((products / spreads.square()).sum() / (1 / spreads.square()).sum())
print(f"margin off by {constant:.3f} / width, three largest widths; times the width {products.tolist()}")
assert ((products - constant) / spreads).abs().max() < 4.5

# %%
# What it says
# ------------
# One network is off by what its random hidden layer does, which falls like one over the root of the width. The mean
# over networks is much closer: its distance falls like one over the width. It is not zero, for a prediction is not
# linear in the random covariance, so that its mean is not the prediction of the mean covariance.

wrong = int((limit.mean(x_test).sign() != y_test).sum())
print(f"the kernel's margin is {kernel_margin:.4f}, and it takes {wrong} of {len(y_test)} images for the other digit")
print(f"bias of a network's margin times its width: {widths[-1] * bias[-1]:.2f} +- {widths[-1] * error[-1]:.2f}")

figure = Figure(figsize=(8.5, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
left.plot(widths, strays, "C1s", label="one network")
left.plot(widths, [strays[0] * (widths[0] / n) ** 0.5 for n in widths], "C1:", label="1 / root of the width")
left.errorbar(widths, [abs(b) for b in bias], [1.96 * e for e in error], fmt="C0o", capsize=3, label="ensemble, margin")
left.plot(widths, [abs(constant) / n for n in widths], "C0--", label="a constant / width")
left.set(xscale="log", yscale="log", xlabel="hidden units", ylabel="distance from the kernel's prediction")
left.set_xticks(widths, widths)
left.minorticks_off()
left.legend()
for width, mark in ((widths[0], "C3x"), (widths[-1], "C0.")):
    right.plot(limit.mean(x_test), last_predictions[width], mark, label=f"{width} hidden units")
right.axline((0, 0), slope=1, color="grey", linewidth=1)
right.set(xlabel="prediction of the kernel", ylabel="mean prediction of networks")
right.legend()

# %%
# Try it on yours
# ---------------
# Any module of linear and convolutional layers, activations and sums has its kernel:
#
# .. code-block:: python
#
#    kernel = infinite_width(module)
#    posterior = nngp_posterior(kernel, x_train, y_train, noise_variance)
#
# Draw a few networks of your own width first and compare :math:`\hat K` with the kernel, as in the first figure: where
# the dots stray far from the curve, as they do on the left, the limit does not describe your network.
#
# Where to go next: :doc:`four_gaussian_processes` trains all layers, :doc:`torch_module_to_gaussian_process` chooses a
# depth by the evidence.
