r"""
Empirical against true Fisher information: natural gradients as vector fields
=============================================================================

**What you will learn:** what a natural gradient does to a likelihood, why the empirical Fisher does not do it, and how
one identity shows that squared gradients of the data cannot tell how curved a likelihood is.

:cite:t:`kunstner2019` drew the two preconditioned gradients as fields over two parameters. Here is such a picture of
real data: the body mass index of 442 patients with diabetes :cite:p:`efron2004`, and how far the disease had
progressed a year later.
"""

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from bayeskit.gallery import is_small
from bayeskit.inference.curvature import GaussianOutputs, empirical_fisher, fisher, gradient_fields

# %%
# The model
# ---------
# A line through standardised data, with normal noise of a variance :math:`s^2` that the model claims to know,
#
# .. math:: y_i \sim N(a x_i + b, s^2), \qquad g_i = \frac{y_i - a x_i - b}{s^2} \binom{x_i}{1},
#
# where :math:`g_i` is the gradient of the log density of datum :math:`i` in :math:`(a, b)`. The *Fisher information* is
# the expectation of :math:`\sum_i g_i g_i^\top` over data of the model,
# :math:`F = \sum_i (x_i, 1)^\top (x_i, 1) / s^2`. It does not depend on :math:`y`. The *empirical Fisher*
# :math:`E = \sum_i g_i g_i^\top` has the data that were observed.

data = load_diabetes()
x, y = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (data.data[:, 2], data.target))
x, y = ((v - v.mean()) / v.std() for v in (x, y))
design = torch.cat([x, torch.ones_like(x)], 1)
fit = torch.linalg.lstsq(design, y).solution.flatten()
spread = float((y.flatten() - design @ fit).square().mean())  # the variance of the residuals
noises = {
    "too small": GaussianOutputs(spread / 9),
    "right": GaussianOutputs(spread),
    "too large": GaussianOutputs(9 * spread),
}
line = nn.Linear(1, 1).double()


def at(parameters: Tensor) -> nn.Linear:
    """Return the line with this slope and this constant."""
    nn.utils.vector_to_parameters(parameters, line.parameters())
    return line


# %%
# Before the data
# ---------------
# If the data come from the model, and the parameters are right, the two matrices agree in the mean over data. Here is
# the trace of :math:`F^{-1} E` over the number of parameters, for data drawn from the model.

right, generator = noises["right"], torch.Generator().manual_seed(0)
inverse = torch.linalg.inv(fisher(at(fit), right, x).matrix())
ratios = []
for _ in range(50 if is_small() else 500):
    simulated = design @ fit + spread**0.5 * torch.randn(len(x), generator=generator, dtype=x.dtype)
    ratios.append(float((inverse @ empirical_fisher(line, right, x, simulated[:, None]).matrix()).trace()) / 2)
ratio = torch.tensor(ratios)
error = float(ratio.std()) / len(ratio) ** 0.5
print(f"data of the model: trace over dimension {ratio.mean():.4f} +- {error:.4f}, expected 1")
assert abs(float(ratio.mean()) - 1) < 4.5 * error

# %%
# An exact twin
# -------------
# The log likelihood is quadratic, so that every natural gradient is an arrow that ends at the fit. Gradients
# preconditioned with :math:`E` obey another identity,
#
# .. math:: \sum_i g_i^\top E^{-1} g_i = \mathrm{tr}\Big(E^{-1} \sum_i g_i g_i^\top\Big) = D,
#
# the number of parameters: always, for any data, at any parameters. A single datum's step has the same mean square at
# the fit and a hundred units off, and so tells nothing of the distance. With :math:`F` it does.

steps = 9 if is_small() else 25
slopes, constants = torch.linspace(-2, 3, steps).double(), torch.linspace(-2.5, 2.5, steps).double()
fields = gradient_fields(line, right, x, y, slopes, constants)
print(f"natural gradients end off the fit by {float((fields.points + fields.natural - fit).abs().max()):.1e} at most")
assert float((fields.points + fields.natural - fit).abs().max()) < 1e-6
information = torch.linalg.inv(fisher(line, right, x).matrix())
for offset in (0.0, 1.0, 100.0):
    residuals = (y - design @ (fit + offset)[:, None]) / spread
    gradients = residuals * design
    by_data = empirical_fisher(at(fit + offset), right, x, y)
    with_empirical, with_fisher = (
        float(((gradients @ m) * gradients).sum()) for m in (torch.linalg.inv(by_data.matrix()), information)
    )
    print(f"fit + {offset:5.1f}: sum of squared steps {with_empirical:.9f} by E, {with_fisher:12.3f} by F")
    assert abs(with_empirical - 2) < 1e-8 and torch.allclose(by_data.matrix(), gradients.mT @ gradients, rtol=1e-10)

# %%
# The fit
# -------
# Unit steps of ascent from all points of the grid. With :math:`F` each arrives at once, whatever
# noise the model claims. With :math:`E` the number of steps depends on the claim: far away, squared residuals make
# steps short; near the fit :math:`E` is :math:`F` times the variance of residuals over :math:`s^2`.

starts, longest = fields.points.reshape(-1, 2), 100
lengths = {}
for name, likelihood in noises.items():
    here, count = starts.clone(), torch.zeros(len(starts))
    for _ in range(longest):
        gradients = (y.flatten() - here @ design.mT)[..., None] / likelihood.variance * design  # (starts, data, 2)
        away = (here - fit).norm(dim=1) > 0.05
        count += away
        moves = torch.linalg.solve(gradients.mT @ gradients, gradients.sum(1))
        here = torch.where(away[:, None], here + moves, here)
    lengths[name] = count
    arrived = float((count < longest).double().mean())
    half = float(count.median())
    print(f"noise {name:9s}: {100 * arrived:3.0f} % of the starts arrive by E, half of all in {half:.0f} steps")
gradient = design.mT @ (y.flatten() - design @ starts[0]) / spread
arrival = starts[0] + fisher(at(starts[0]), right, x).solve_exactly(gradient, damping=1e-8)
print(f"by F all arrive in one step, the first at {arrival[0]:.4f}, {arrival[1]:.4f}")
assert float((arrival - fit).abs().max()) < 1e-6

# %%
# A failure on purpose
# --------------------
# Where the model claims more noise than there is, as every network does
# that fits its data nearly exactly, :math:`E` is too small, unit steps overshoot, and those few that arrive do so by
# luck. So "near a minimum the two agree" holds only where residuals are as large as the model says. The package
# compares the two, and says when it cannot be trusted.

assert float(lengths["too large"].median()) == longest and bool((lengths["right"] < longest).all())
flagged = empirical_fisher(at(fit), noises["too large"], x, y)
print(flagged.warnings[0])
assert not flagged.trusted

# %%
# What it says
# ------------
# The slope with three standard errors: by the inverse of :math:`F`, which is right if the model is; by the inverse of
# :math:`E`; and by the sandwich :math:`F^{-1} E F^{-1}` :cite:p:`huber1967`, in which :math:`E` has its place.

squares = empirical_fisher(at(fit), right, x, y).matrix()
covariances = {"F": information, "E": torch.linalg.inv(squares), "sandwich": information @ squares @ information}
for name, covariance in covariances.items():
    print(f"slope {fit[0]:.4f} +- {float(covariance[0, 0].sqrt()):.4f} by {name}")

figure = Figure(figsize=(9, 3.4), layout="constrained")
axes = figure.subplots(1, 3, sharey=True)
fields.plot(list(axes))
for ax in axes:
    ax.plot(*fit.tolist(), "ko", markersize=5)
    ax.set(xlabel="slope", ylabel="")
axes[0].set_ylabel("constant")

# %%
# Try it on yours
# ---------------
# Any module with two free parameters has fields, any module at all has both matrices:
#
# .. code-block:: python
#
#    matrix = empirical_fisher(module, likelihood, x, y)
#    print(matrix.trusted, matrix.warnings)  # does it agree with the Fisher information of this model?
#    gradient_fields(module, likelihood, x, y, first, second).plot(axes)
#
# Look at ``trusted`` before squared gradients stand for a curvature, in an optimiser or in a posterior.
#
# Where to go next: :doc:`laplace_with_the_right_fisher` shows what the wrong matrix does to a posterior.
