r"""
Neural tangent kernels at finite width: does the kernel stay constant in training?
==================================================================================

**What you will learn:** how to measure by how much the tangent kernel of a network changes in training, how the change
falls with the width in dense, convolutional and residual networks, and for which networks it does not fall.

Trained by gradient descent, a very wide network is a linear model: its tangent kernel stays what it was at the start
:cite:p:`jacot2018,lee2019`, and its outputs follow in closed form. Real networks are not infinitely wide, so the kernel
moves. Some authors report that it does not settle in residual networks :cite:p:`goldblum2020`. Here are handwritten
threes and eights :cite:p:`alpaydin1998` and four architectures.
"""

import math

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bayeskit.gallery import is_small
from bayeskit.models.wide_networks import (
    empirical_ntk,
    infinite_width,
    kernel_regime,
    linearize,
    ntk_drift,
    ntk_drift_against_width,
)

# %%
# The model
# ---------
# The tangent kernel of a network :math:`f(x; \theta)` is the inner product of its gradients,
#
# .. math:: \Theta(x, x') = \nabla_\theta f(x; \theta) \cdot \nabla_\theta f(x'; \theta),
#
# and gradient descent on half the sum of squares moves the outputs of the training data by :math:`-\eta\, \Theta\,
# (f - y)` to first order in the rate :math:`\eta`. Weights are scaled in the forward pass, by one over the root of the
# number of inputs. The drift is :math:`\|\Theta_{\text{end}} - \Theta_{\text{start}}\| / \|\Theta_{\text{start}}\|`.


class Convolutions(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.last, self.residual = nn.Linear(16 * 8, 1), residual

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        new = self.two(torch.relu(h))
        return self.last(torch.flatten(torch.relu(h + new if self.residual else new), 1))


def dense(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 1))


images, labels = load_digits(return_X_y=True)
chosen = [i for i, label in enumerate(labels) if label in (3, 8)][: 6 if is_small() else 8]
x = torch.tensor(images[chosen]) / 8 - 1
y = torch.tensor(labels[chosen] == 8, dtype=torch.float64) * 2 - 1
rows = x.reshape(-1, 8, 8)  # convolutions run along the columns; the rows of an image are channels
networks = {
    "dense, tanh": (infinite_width(dense(nn.Tanh)), x),
    "dense, ReLU": (infinite_width(dense(nn.ReLU), weight_variance=2.0), x),
    "convolutional": (infinite_width(Convolutions(residual=False), weight_variance=2.0), rows),
    "residual": (infinite_width(Convolutions(residual=True), weight_variance=2.0), rows),
}

# %%
# Before the data
# ---------------
# At random weights the kernel of a finite network already differs from that of infinite width.

relu = networks["dense, ReLU"][0]
limit = relu.ntk(x)
for width in (16, 64, 256):
    drawn = [relu.network(width, seed=100 * width + i).double() for i in range(20)]
    kernels = [empirical_ntk(network, x, outputs="trace") for network in drawn]
    away = torch.stack([(kernel - limit).norm() / limit.norm() for kernel in kernels])
    print(f"width {width:3d}: {away.mean():.3f} +- {away.std() / 20**0.5:.3f} away from the kernel of infinite width")

# %%
# An exact twin
# -------------
# With one hidden layer, :math:`f(x) = \sum_j a_j \phi(w_j \cdot x + b_j) + c`, the kernel is
#
# .. math:: \Theta(x, x') = \sum_j \big[ \phi(h_j)\, \phi(h'_j) + a_j^2\, \phi'(h_j)\, \phi'(h'_j)\, (x \cdot x' + 1)
#    \big] + 1.
#
# And a network that is made linear in its weights has a constant kernel, and outputs :math:`f_t = y + (I - \eta
# \Theta)^t (f_0 - y)` after :math:`t` steps.

torch.manual_seed(0)
small = nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 1)).double()
hidden = torch.tanh(x @ small[0].weight.T + small[0].bias).detach()
slopes = (1 - hidden.square()) * small[2].weight.detach()
by_hand = hidden @ hidden.T + slopes @ slopes.T * (x @ x.T + 1) + 1
found = empirical_ntk(small, x, outputs="trace")
print(f"kernel by hand and by the library differ by {(found - by_hand).abs().max():.1e}")
assert torch.allclose(found, by_hand, rtol=1e-9)

linear, steps = linearize(small), 50
drift = ntk_drift(linear, x, y, num_steps=steps)
rate = 0.5 / float(torch.linalg.eigvalsh(by_hand)[-1])
residual = small(x)[:, 0].detach() - y
left = torch.linalg.matrix_power(torch.eye(len(x)).double() - rate * by_hand, steps) @ residual
print(f"linear in its weights: drift {drift.relative_change[-1]:.1e}, ", end="")
print(f"loss {drift.loss[-1]:.9f}, in closed form {left.square().sum() / 2:.9f}")
assert drift.relative_change[-1] < 1e-9 and abs(drift.loss[-1] - left.square().sum() / 2) < 1e-9
curved = ntk_drift(small, x, y, num_steps=steps)
print(f"the network itself: drift {curved.relative_change[-1]:.3f}, loss {curved.loss[-1]:.4f}")

# %%
# The fit
# -------
# Random networks of each width, all trained for the same time. Whatever the architecture, the drift falls with the
# width: a residual sum does not keep the kernel from settling. With ReLU it falls more slowly in the end than with a
# smooth activation, since some units cross the kink.

widths, num_networks, steps = ((16, 256), 8, 15) if is_small() else ((64, 256, 1024), 6, 20)
drifts = {}
for seed, (name, (kernel, inputs)) in enumerate(networks.items(), 1):
    found = ntk_drift_against_width(kernel, inputs, y, widths, num_networks, num_steps=steps, seed=seed)
    drifts[name] = found
    values = zip(widths, found.typical.tolist(), found.standard_error.tolist(), strict=True)
    print(f"{name:14s}" + ", ".join(f"width {w}: {value:.4f} +- {error:.4f}" for w, value, error in values))
    logs = found.relative_change.log()
    fall, error = logs[0].mean() - logs[-1].mean(), (logs[[0, -1]].var(1).sum() / num_networks).sqrt()
    scale = math.log(widths[-1] / widths[0])
    print(f"              falls with the power {fall / scale:.2f} +- {error / scale:.2f} of the width")
    assert 0.5 * scale - 4.5 * error < fall < scale + 4.5 * error
    assert fall > (0 if is_small() else 4.5 * error) and bool((found.loss[..., 1] < found.loss[..., 0]).all())

# %%
# Is a network of a given width in the kernel regime? Three numbers answer: how far the mean kernel is from its limit,
# how much kernels of different weights differ, and the drift.

report = kernel_regime(
    *networks["dense, ReLU"], y, width=widths[-1], num_networks=20, num_trained=4, num_steps=steps, progress=False
)
print(report)
assert set(report.numbers) == {"bias", "fluctuation", "drift"}

# %%
# A failure on purpose
# --------------------
# The kernel settles because of the scale of the outputs, not because of the width alone :cite:p:`chizat2019`. Divided
# by the root of the width, as in the mean-field limit, outputs start near zero, and weights have to move by much. No
# width helps.


class Divided(nn.Module):
    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        self.network, self.root = network, math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) / self.root


divided = {}
for width in widths:
    module = Divided(networks["dense, tanh"][0].network(width, seed=1).double(), width)
    divided[width] = float(ntk_drift(module, x, y, num_steps=steps, num_records=2).relative_change[-1])
    print(f"width {width}: drift {divided[width]:.2f} with outputs divided by the root of the width")
assert min(divided.values()) > 3 * float(drifts["dense, tanh"].typical[-1])

# %%
# What it says
# ------------
# In the usual scaling the drift of four architectures falls with the width, and no power of the width is outside of one
# half to one by more than its error allows. A claim that
# residual sums keep kernels from settling does not hold for these networks; those in which it was observed also have
# batch normalisation. Whether a network is in the kernel regime is a number to be measured, at its own width.

figure = Figure(figsize=(7, 4.5), layout="constrained")
axes = figure.subplots()
for marker, (name, found) in zip("osD^", drifts.items(), strict=True):
    axes.errorbar(widths, found.typical, 2 * found.standard_error, marker=marker, capsize=2, label=name)
axes.plot(list(divided), list(divided.values()), "k:", marker="x", label="tanh, outputs divided")
axes.set(xscale="log", yscale="log", ylim=(1e-3, 4), xlabel="width", ylabel="drift (bars: 2 standard errors)")
axes.set_xticks(widths, [str(width) for width in widths])
axes.minorticks_off()
axes.legend(frameon=False, loc="lower left")

# %%
# Try it on yours
# ---------------
# Give :func:`~bayeskit.models.wide_networks.kernel_regime` your module, some of your inputs and targets; it says
# which of the three numbers is too large, and about how much wider the network would have to be. For a run of your own
# keep ``state_dict`` copies, and look at :func:`~bayeskit.models.wide_networks.ntk_drift_of_snapshots`.
#
# .. code-block:: python
#
#    print(kernel_regime(your_module, your_inputs, your_targets))
#
# Where to go next: :doc:`torch_module_to_gaussian_process` takes the width to infinity, :doc:`four_gaussian_processes`
# compares what trained networks converge to, :doc:`arc_cosine_kernel_against_networks` looks at random ones.
