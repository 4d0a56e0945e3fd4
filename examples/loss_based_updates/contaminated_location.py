r"""
Robust generalised Bayes: beta-divergence and Stein discrepancy with an outlier
===============================================================================

**What you will learn:** how an outlier moves the posterior of a location under four losses, and how a robust posterior
can fail to exist without a sign of it.

Ten patients took two sleeping drugs, and the second let them sleep longer by 1.2, 2.4, 1.3, 1.3, 0, 1, 1.8, .8, 4.6 and
1.4 hours :cite:p:`cushny1905`, made famous by :cite:t:`student1908`. By how much usually? Nine patients say less than
two and a half hours, one says 4.6. Two say 1.3, which looks harmless and is not.
"""

import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeskit as bk
from bayeskit.errors import ImproperPosteriorError
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import (
    Flat,
    GibbsPosterior,
    gaussian_posterior,
    losses,
    minimize,
    propriety_check,
)
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# Gains are :math:`N(\theta, 1)`, with :math:`\theta \sim N(0, 10^2)`. Besides minus the log likelihood, three losses
# measure how far data :math:`x` are from such a law: the kernel Stein discrepancy :cite:p:`matsubara2022`, made of the
# score :math:`s(x) = \theta - x` alone, the same with a weight, :math:`m(x)\, k(x, y)\, m(y)` in place of its kernel
# :math:`k`, and the beta-divergence :cite:p:`basu1998`,
#
# .. math::
#
#    n\, \mathrm{KSD}^2 = \frac1n \sum_{i,j} k_\theta(x_i, x_j), \qquad
#    k_\theta(x, y) = \big[s(x) s(y) + s(x)\, \partial_y + s(y)\, \partial_x + \partial_x \partial_y\big] k(x, y),
#
# .. math::
#
#    \ell_\beta(\theta, x) = -\frac1\beta\, p_\theta(x)^\beta + \frac{1}{1+\beta} \int p_\theta(y)^{1+\beta}\, dy .

x = torch.tensor([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4], dtype=torch.float64)
prior = dist.Normal(torch.tensor(0.0, dtype=torch.float64), 10.0)


def unit_normal(mean: Tensor) -> dist.Normal:
    return dist.Normal(mean, 1.0)


def score(mean: Tensor, x: Tensor) -> Tensor:
    return mean - x


def falling(x: Tensor) -> Tensor:
    return (1 + (x - 1.3).square()).rsqrt()  # about the sample median


chosen = {
    "minus log likelihood": losses.NegativeLogLikelihood(unit_normal),
    "Stein discrepancy": losses.KernelSteinDiscrepancy(score),
    "Stein, weighted": losses.KernelSteinDiscrepancy(score, weight=falling),
    "beta-divergence .5": losses.BetaDivergence(0.5, unit_normal),
}

# %%
# Before the data
# ---------------
# What the prior and the normal law expect of the largest of ten gains, seen from their median: the one that came is
# farther away than nearly all of these.

generator = torch.Generator().manual_seed(0)
expected = 10 * torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
expected = (expected + torch.randn(20_000, 10, generator=generator, dtype=torch.float64)).sort(1).values
away = expected[:, 9] - (expected[:, 4] + expected[:, 5]) / 2
came = float(x.max() - (x.sort().values[4] + x.sort().values[5]) / 2)
levels = [float(away.quantile(q)) for q in (0.05, 0.5, 0.95)]
print("largest minus median, expected (5 %, 50 %, 95 %): " + ", ".join(f"{level:.2f}" for level in levels))
print(f"came: {came:.2f}, exceeded by a share {float((away > came).double().mean()):.4f} of what was expected")

# %%
# An exact twin
# -------------
# The Stein kernel is quadratic in :math:`\theta`, so that its posterior is normal. With the kernel :math:`k = (1 +
# (x - y)^2)^{-1/2}` and its derivatives written out, mean and variance follow by hand, for three data.

three = torch.tensor([-0.5, 0.2, 3.0], dtype=torch.float64)
found = gaussian_posterior(GibbsPosterior(prior, chosen["Stein discrepancy"], three))
a = three.numpy()
d = a[:, None] - a
k, kx, kxy = (1 + d**2) ** -0.5, -d * (1 + d**2) ** -1.5, (1 + d**2) ** -1.5 - 3 * d**2 * (1 + d**2) ** -2.5
# (t - x)(t - y) k + (t - x) dk/dy + (t - y) dk/dx + d2k/dxdy, by powers of t, with dk/dy = -dk/dx.
curvature = 2 * k.sum() / 3
linear = (-(a[:, None] + a) * k).sum() / 3
variance = 1 / (curvature + 0.01)
print(f"mean {float(found.mean):.12f}, by hand {-linear * variance:.12f}")
print(f"variance {float(found.covariance):.12f}, by hand {variance:.12f}")
assert abs(float(found.mean) + linear * variance) < 1e-9 and abs(float(found.covariance) - variance) < 1e-9
constant = (a[:, None] * a * k + d * kx + kxy).sum() / 3
at_zero = float(chosen["Stein discrepancy"].total(torch.tensor(0.0, dtype=torch.float64), three))
assert abs(at_zero - constant) < 1e-9

# %%
# The fit
# -------
# The posterior mean under each loss, by a fine grid, as the odd patient's gain moves from 1.4 to a thousand hours.
# The likelihood follows this one patient. So does the Stein discrepancy, only later: a score grows without bound, and
# only a weight in the kernel stops it. Weighted, it forgets the patient, as does the beta-divergence.

num_points, num_outliers = (1_401, 3) if is_small() else (7_001, 12)
grid = torch.linspace(-20.0, 120.0, num_points, dtype=torch.float64)
outliers = torch.cat([torch.linspace(1.4, 10.0, num_outliers), torch.tensor([20.0, 100.0, 1000.0])]).double()


def moments(posterior: GibbsPosterior) -> tuple[float, float]:
    share = posterior.log_density(grid[:, None]).softmax(0)
    mean = (share * grid).sum()
    return float(mean), float((share * (grid - mean).square()).sum().sqrt())


paths = {}
print(f"{'':21s} minimiser    mean      sd  mean, 1000 hours")
for name, loss in chosen.items():
    paths[name] = []
    for y in outliers:
        moved = torch.where(x == 4.6, y, x)
        paths[name].append(moments(GibbsPosterior(prior, loss, moved, compile=False))[0])
    mean, sd = moments(GibbsPosterior(prior, loss, x))
    best = minimize(GibbsPosterior(prior, loss, x), start=x.median()[None])
    assert bool(best.converged)
    print(f"{name:21s}{float(best.position):10.3f}{mean:8.3f}{sd:8.3f}{paths[name][-1]:18.3f}")
assert abs(paths["minus log likelihood"][-1] - (x.sum() - 4.6 + 1000) / (10 + 0.01)) < 1e-9

# %%
# A failure on purpose
# --------------------
# A bounded loss buys robustness at a price: far away :math:`e^{-w \ell}` does not fall off, and only the prior makes a
# posterior proper. Under a flat one there is none, and the library does not make one up.

try:
    GibbsPosterior(Flat(), chosen["beta-divergence .5"], x)
except ImproperPosteriorError as refusal:
    print(str(refusal).replace("; ", ";\n    "))

# %%
# Now let the standard deviation :math:`s` be unknown as well, under a proper prior, and take :math:`\beta = .2`. With
# the mean at a value that occurs :math:`k` times among :math:`n` data, the loss is, as :math:`s \to 0`,
#
# .. math:: (2 \pi)^{-\beta/2} s^{-\beta} \Big( \frac{n}{(1+\beta)^{3/2}} - \frac{k}{\beta} \Big),
#
# and falls without end if :math:`n < k (1+\beta)^{3/2} / \beta`. One patient cannot bring that about here. The two
# with 1.3 hours can: :math:`e^{-w \ell}` has a pole there that no prior density of the scale makes up for, unless it
# vanishes fast enough. ``propriety_check`` finds it.

BETA, n = 0.2, len(x)
for k in (1, 2):
    print(f"{k} equal gains: a pole if there are fewer than {k * (1 + BETA) ** 1.5 / BETA:.2f} data; there are {n}")


def half_normal_scale() -> tuple[Tensor, Tensor]:
    return pyro.sample("mean", dist.Normal(0.0, 10.0)), pyro.sample("scale", dist.HalfNormal(2.0))


def inverse_gamma_scale() -> tuple[Tensor, Tensor]:
    return pyro.sample("mean", dist.Normal(0.0, 10.0)), pyro.sample("scale", dist.InverseGamma(2.0, 1.0))


robust = losses.BetaDivergence(BETA, lambda law: dist.Normal(*law))
tie = GibbsPosterior(half_normal_scale, robust, x)
s = torch.tensor(1e-8, dtype=torch.float64)
at_pole = float(robust.total((torch.tensor(1.3, dtype=torch.float64), s), x))
by_formula = (2 * math.pi) ** (-BETA / 2) * float(s) ** -BETA * (n / (1 + BETA) ** 1.5 - 2 / BETA)
print(f"loss at the pole, scale 1e-8: {at_pole:.6f}, by the formula {by_formula:.6f}")
assert abs(at_pole / by_formula - 1) < 1e-9

untied = x.clone()
untied[3] = 1.31
reports = {
    "half-normal prior of the scale": propriety_check(tie),
    "the same, 1.31 in place of one 1.3": propriety_check(tie.with_data(untied)),
    "inverse gamma prior of the scale": propriety_check(GibbsPosterior(inverse_gamma_scale, robust, x)),
}
for name, report in reports.items():
    print(f"{name}: {'seems proper' if report.proper else f'improper, towards {report.worst!r}'}")
assert [report.proper for report in reports.values()] == [False, True, True]

# %%
# A sampler that starts among the data may never see the pole, and its diagnostics stay silent.

lengths = (100, 150) if is_small() else (500, 1000)
silent = posterior_summary(bk.sample(tie, 4, *lengths, seed=0, progress=False))
print(f"of the posterior that does not exist: largest R-hat {silent['r_hat'].max():.3f}")

# %%
# What it says
# ------------
# Under a prior of the scale that vanishes at zero fast enough, the robust posterior exists, and its mean lies near that
# of the nine other patients. The figure has the means of the four posteriors of known variance: two of them go with
# the odd patient, however wrong that gain may be, and two do not.

proper = GibbsPosterior(inverse_gamma_scale, robust, x)
draws = bk.sample(proper, 4, *lengths, seed=0, progress=False)
summary = posterior_summary(draws)
assert summary["r_hat"].max() < 1.05 and summary["ess"].min() > 100
for name, row in summary.iterrows():
    print(f"{name}: {row['mean']:.3f} +- {row['mcse']:.3f}, sd {row['sd']:.3f}")

figure = Figure(figsize=(8, 4.5), layout="constrained")
axes = figure.subplots()
axes.axvline(4.6, color="grey", linewidth=1, label="as it came")
for style, (name, path) in zip(("-", "--", "-.", ":"), paths.items(), strict=True):
    axes.plot(outliers, path, style, marker="o", markersize=4, label=name)
axes.set(xscale="log", yscale="log", xlabel="gain of the odd patient (hours)", ylabel="posterior mean (hours)")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Replace ``x``, the model ``unit_normal`` and, for the Stein discrepancy, its score. Ask whether there is a posterior
# before you sample it.
#
# .. code-block:: python
#
#    posterior = GibbsPosterior(prior, losses.BetaDivergence(0.5, unit_normal), x)
#    print(propriety_check(posterior).proper, float(minimize(posterior).position))
#
# Look at ``worst`` of the check, the direction in which the density does not fall off, and move one datum far away to
# see whether the mean follows. With an unknown scale take a prior that vanishes at zero. Where outliers are part of
# what is to be predicted, model them, with heavy tails, in place of a robust loss.
#
# Where to go next: :doc:`newcombs_median` for losses that are not bounded and resist outliers all the same,
# :doc:`/gallery/evidence/robust_regression` for covariates.
