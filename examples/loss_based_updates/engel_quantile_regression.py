r"""
Bayesian quantile regression without a likelihood: Engel's law of food expenditure
==================================================================================

**What you will learn:** how to update beliefs about regression quantiles, each by its own loss and with a weight of its
own.

:cite:t:`engel1857` studied income and food expenditure of 235 Belgian households; :cite:t:`koenker1982` made them the
example of quantile regression, and statsmodels ships them. The poor spend a larger share of their income on food. But
the richer households are, the more they differ, so that one line through the middle tells little: where are the lines
below which a tenth, a half and nine tenths of households lie?
"""

# sphinx_gallery_thumbnail_number = -1
import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.optimize import OptimizeResult, linprog
from statsmodels.datasets import engel

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import GibbsPosterior, calibrate, losses, minimize
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# No density of expenditure is assumed. The pinball loss of level :math:`\tau`,
#
# .. math:: \ell(a, b; x, y) = \big(\tau - 1[y < a + b x]\big)\,(y - a - b x), \qquad
#           \pi_w(a, b) \propto \exp\Big(-w \sum_i \ell(a, b; x_i, y_i)\Big)\, \pi(a, b),
#
# is smallest, in expectation, at the line below which the share :math:`\tau` of expenditures lies. Units are thousands
# of francs; income is counted from its mean, so that the two coefficients are nearly independent.

table = engel.load_pandas().data
income, food = (torch.tensor(table[name].to_numpy() / 1000, dtype=torch.float64) for name in ("income", "foodexp"))
centre = income.mean()
covariates = torch.stack([torch.ones_like(income), income - centre], -1)
prior = dist.Normal(torch.tensor([0.5, 0.5], dtype=torch.float64), 1.0)
posteriors = {
    level: GibbsPosterior(prior, losses.Pinball(level, predict=losses.linear), (covariates, food))
    for level in (0.1, 0.5, 0.9)
}

# %%
# Before the data
# ---------------
# Lines that the prior holds possible, and the households. It allows for much that is absurd, spending more than the
# income or less than nothing, and excludes nothing that is not.

generator = torch.Generator().manual_seed(0)
lines = torch.tensor([0.5, 0.5]) + torch.randn(30, 2, generator=generator)
ends = torch.tensor([0.3, 5.0], dtype=torch.float64)
prior_predictive = Figure(figsize=(8, 3.4), layout="constrained")
axes = prior_predictive.subplots()
axes.plot(ends, (lines[:, :1] + lines[:, 1:] * (ends - centre)).T, color="C0", linewidth=0.8, alpha=0.6)
axes.plot(income, food, "k.", markersize=3)
axes.set(xlabel="income (1000 francs)", ylabel="food (1000 francs)", title="thirty lines from the prior", ylim=(-5, 6))

# %%
# An exact twin
# -------------
# The minimiser of the loss is the solution of a linear programme: split every residual into its parts above and below
# the line, which cost :math:`\tau` and :math:`1 - \tau`. For twelve households scipy's simplex method solves it; the
# library gets there by Newton steps on ever less smoothed losses.


def linear_programme(level: float, rows: slice) -> OptimizeResult:
    n = len(food[rows])
    free = [(None, None)] * 2 + [(0, None)] * (2 * n)
    split = np.hstack([covariates[rows].numpy(), np.eye(n), -np.eye(n)])
    costs = [0.0, 0.0] + [level] * n + [1 - level] * n
    return linprog(costs, A_eq=split, b_eq=food[rows].numpy(), bounds=free, method="highs-ds")


few = slice(0, 240, 20)
for level, posterior in posteriors.items():
    solution = linear_programme(level, few)
    found = minimize(posterior.with_data((covariates[few], food[few])))
    line = found.position.tolist()
    print(f"level {level}: smallest loss {float(found.value):.12f}, linear programme {solution.fun:.12f}")
    assert bool(found.converged) and abs(float(found.value) - solution.fun) < 1e-9
    assert np.allclose(line, solution.x[:2], rtol=0, atol=1e-6)

# %%
# The fit
# -------
# With weight one a posterior would not know how well a line is known: multiply all francs by ten, and it changes. The
# weight is the one at which posterior regions cover in the bootstrap, for each level another.

REPLICATES, NUM_DRAWS = (50, 512) if is_small() else (500, 2048)
LENGTHS = (80, 100) if is_small() else (500, 1000)  # of warm-up and of what is kept
slopes, bands, income_grid = {}, {}, torch.linspace(0.3, 5.0, 50, dtype=torch.float64)
for level, posterior in posteriors.items():
    found = minimize(posterior)
    at_mean, slope = found.position.tolist()
    intercept = 1000 * (at_mean - slope * float(centre))
    assert abs(float(found.value) - linear_programme(level, slice(None)).fun) < 1e-9
    chosen = calibrate.posterior_coverage(posterior, num_replicates=REPLICATES, num_draws=NUM_DRAWS, seed=0)
    assert chosen.trusted
    draws = bk.sample(chosen.posterior, 4, *LENGTHS, seed=0, progress=False)
    summary = posterior_summary(draws)
    assert summary["r_hat"].max() < 1.05 and summary["ess"].min() > 100
    theta = draws.values()["theta"].flatten(0, 1)
    slopes[level] = (summary.loc["theta[1]"], theta[:, 1])
    bands[level] = theta[:, :1] + theta[:, 1:] * (income_grid - centre)
    print(
        f"level {level}: {intercept:.2f} + {slope:.4f} income, weight {chosen.weight:.1f} +- "
        f"{chosen.standard_error:.1f}, largest R-hat {summary['r_hat'].max():.3f}"
    )

# %%
# What it says
# ------------
# The lines fan out: the lowest rises by far less for each franc of income than the highest, and the intervals of the
# three slopes do not overlap. No normal model with one variance could say so.

for level, (row, slope) in slopes.items():
    low, high = (float(slope.quantile(q)) for q in (0.025, 0.975))
    print(f"level {level}: slope {row['mean']:.4f} +- {row['mcse']:.4f}, 95 % interval {low:.4f} to {high:.4f}")
figure = Figure(figsize=(8, 4.5), layout="constrained")
axes = figure.subplots()
axes.plot(income, food, ".", color="grey", markersize=4)
for style, (level, band) in zip((":", "-", "--"), bands.items(), strict=True):
    color = {0.1: "C0", 0.5: "C1", 0.9: "C2"}[level]
    axes.plot(income_grid, band.mean(0), style, color=color, label=f"level {level}")
    axes.fill_between(income_grid, band.quantile(0.025, 0), band.quantile(0.975, 0), color=color, alpha=0.25, lw=0)
axes.set(xlabel="income (1000 francs)", ylabel="food (1000 francs)", title="three regression quantiles, 95 % bands")
axes.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# Each line has a posterior of its own, and none knows of the others. Outside of the data they cross: at an income of
# 100 francs the line of the tenth lies above that of the half, and that above the line of nine tenths, which no
# distribution allows. The poorest household has 377 francs.

lines = {level: minimize(posterior).position for level, posterior in posteriors.items()}
low, half, high = (float(line[0] + line[1] * (0.1 - centre)) for line in lines.values())
print(f"at 100 francs: {1000 * low:.0f}, {1000 * half:.0f} and {1000 * high:.0f} francs for food")
assert low > half > high and float(income.min()) > 0.377

# %%
# Try it on yours
# ---------------
# Replace income and food; keep covariates near one in size, and count them from their means.
#
# .. code-block:: python
#
#    posterior = GibbsPosterior(prior, losses.Pinball(0.5, predict=losses.linear), (covariates, food))
#    chosen = calibrate.posterior_coverage(posterior, num_replicates=50, num_draws=512, seed=0)
#    print(chosen.weight, chosen.standard_error, chosen.trusted)
#
# Look at ``chosen.trusted`` and do not use weight one: its intervals depend on the unit of the response. Levels near
# zero or one need many rows. If whole distributions are wanted, which never cross, model the scale as a function of the
# covariates.
#
# Where to go next: :doc:`newcombs_median` is the quantile of level one half without covariates,
# :doc:`/gallery/evidence/robust_regression` has heavy tails for odd data, :doc:`cox_without_a_hazard` a loss that is no
# sum.
