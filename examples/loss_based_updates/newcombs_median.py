r"""
Generalised Bayes for a median and for quantiles: Newcomb's times and Engel's households
========================================================================================

**What you will learn:** how to update beliefs by a loss in place of a likelihood, why its weight matters, how to choose
it, and how regression quantiles follow, each by its own loss and with a weight of its own.

In 1882 Newcomb timed light over the Potomac and back; his 66 times, as deviations from 24,800 nanoseconds, were listed
by :cite:t:`stigler1977`, and two of them went astray. A normal model has to explain these two and shifts. What is the
median of such times? :cite:t:`bissiri2016` say how to be Bayesian about a number that is defined by a loss. The same
question with a covariate: where are the lines below which a tenth, a half and nine tenths of 235 Belgian households
:cite:p:`engel1857,koenker1982` spend on food?
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.optimize import OptimizeResult, linprog
from statsmodels.datasets import engel

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import GibbsPosterior, calibrate, losses, minimize
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# There is none of the data. The median minimises the expected absolute error; the line below which the share
# :math:`\tau` of responses lies minimises the expected pinball loss, which is half the absolute one at
# :math:`\tau = 1/2`. Beliefs become
#
# .. math:: \pi_w(\theta \mid x) \propto \exp\Big(-w \sum_i |\theta - x_i|\Big)\, \pi(\theta), \qquad
#           \ell_\tau(a, b; x, y) = \big(\tau - 1[y < a + b x]\big)\,(y - a - b x).
#
# A loss has no natural unit, in nanoseconds or in microseconds, so that the weight :math:`w` has to be chosen. Incomes
# are in thousands of francs, from their mean, so that the two coefficients of a line are nearly independent.

TIMES = """28 26 33 24 34 -44 27 16 40 -2 29 22 24 21 25 30 23 29 31 19 24 20 36 32 36 28 25 21 28 29 37 25 28 26
30 32 36 26 30 22 36 23 27 27 28 27 31 27 26 33 26 32 32 24 39 28 24 25 32 25 29 27 28 29 16 23"""
x = torch.tensor([float(word) for word in TIMES.split()], dtype=torch.float64)
prior = dist.Normal(torch.tensor(25.0, dtype=torch.float64), 100.0)
median = GibbsPosterior(prior, losses.Absolute(), x)
income, food = (torch.tensor(engel.load_pandas().data[name].to_numpy() / 1000) for name in ("income", "foodexp"))
covariates = torch.stack([torch.ones_like(income), income - income.mean()], -1)
of_lines = dist.Normal(torch.tensor([0.5, 0.5], dtype=torch.float64), 1.0)
pinball = [(level, losses.Pinball(level, predict=losses.linear)) for level in (0.1, 0.5, 0.9)]
quantiles = {level: GibbsPosterior(of_lines, loss, (covariates, food)) for level, loss in pinball}

# %%
# Before the data
# ---------------
# A loss predicts nothing. Read as if it were a likelihood, though, :math:`e^{-w|\theta - x|}` is a Laplace density, and
# tells what a weight takes for granted: with weight one, times that scatter far less about their median than Newcomb's
# did.

generator = torch.Generator().manual_seed(0)
for weight in (1.0, 0.2):
    away = -torch.rand(20_000, generator=generator, dtype=torch.float64).log() / weight
    print(f"as if a likelihood, weight {weight}: half of the times within {away.median():.2f} ns of their median")
print(f"what came: half of the times within {(x - x.median()).abs().median():.2f} ns")

# %%
# An exact twin
# -------------
# Three data and a prior that is flat between 0 and 10. Between neighbouring data the sum of absolute errors is a
# straight line, so that integrals are those of exponentials, piece by piece. The library's density is integrated by
# quadrature instead.

few, weight = [1.0, 2.0, 7.0], 0.8
ends = [0.0, *few, 10.0]
mass = moment = 0.0
for left, right in zip(ends[:-1], ends[1:], strict=True):
    slope = weight * (sum(a >= right for a in few) - sum(a <= left for a in few))  # of the log density
    start = -weight * sum(abs(left - a) for a in few)
    piece = math.exp(start) * math.expm1(slope * (right - left)) / slope
    mass += piece
    bend = math.exp(slope * (right - left)) * ((right - left) / slope - slope**-2) + slope**-2
    moment += left * piece + math.exp(start) * bend
uniform_prior = dist.Uniform(torch.tensor(0.0, dtype=torch.float64), 10.0)
twin = GibbsPosterior(uniform_prior, losses.Absolute(), torch.tensor(few, dtype=torch.float64), weight)


def density(value: float) -> float:
    u = twin.unconstrain({"theta": torch.tensor(value, dtype=torch.float64)})
    return math.exp(float(twin.log_likelihood(u)))


integral, first = (
    sum(quad(f, a, b, epsabs=1e-13)[0] for a, b in zip(ends[:-1], ends[1:], strict=True))
    for f in (density, lambda value: value * density(value))
)
print(f"integral {integral:.12f}, by hand {mass:.12f}; mean {first / integral:.12f}, by hand {moment / mass:.12f}")
assert abs(integral - mass) < 1e-9 * mass and abs(first / integral - moment / mass) < 1e-9

draws = bk.sample(twin, 4, 100 if is_small() else 200, 300 if is_small() else 1000, seed=0, progress=False)
row = posterior_summary(draws).loc["theta"]
assert abs(row["mean"] - moment / mass) < 4.5 * row["mcse"]

# %%
# The minimiser of a pinball loss is the solution of a linear programme: split every residual into its parts above and
# below the line, which cost :math:`\tau` and :math:`1 - \tau`. scipy's simplex method solves it; the library gets there
# by Newton steps on ever less smoothed losses.


def linear_programme(level: float, rows: slice) -> OptimizeResult:
    n = len(food[rows])
    split = np.hstack([covariates[rows].numpy(), np.eye(n), -np.eye(n)])
    costs, free = [0.0, 0.0] + [level] * n + [1 - level] * n, [(None, None)] * 2 + [(0, None)] * (2 * n)
    return linprog(costs, A_eq=split, b_eq=food[rows].numpy(), bounds=free, method="highs-ds")


some = slice(0, 240, 20)
for level, posterior in quantiles.items():
    solution, found = linear_programme(level, some), minimize(posterior.with_data((covariates[some], food[some])))
    assert bool(found.converged) and abs(float(found.value) - solution.fun) < 1e-9
    assert np.allclose(found.position, solution.x[:2], rtol=0, atol=1e-6)
    assert abs(float(minimize(posterior).value) - linear_programme(level, slice(None)).fun) < 1e-9

# %%
# The fit
# -------
# Two ways to a weight. One matches the information in the posterior with that in the bootstrap of the median, by the
# density of the data at their median :cite:p:`lyddon2019`. The other looks for the weight at which posterior intervals
# cover in the bootstrap :cite:p:`syring2019`. The same is done for Huber's loss, which is squared near zero and
# absolute beyond a threshold, here 1.345 times the spread of the bulk. Its minimiser is no median, but a mean to which
# no time adds much.

spread = 1.4826 * float((x - x.median()).abs().median())
huber = GibbsPosterior(prior, losses.Huber(1.345 * spread), x)
weights = {}
for name, posterior in (("absolute", median), ("Huber", huber)):
    matched = calibrate.information_matching(posterior)
    covering = calibrate.posterior_coverage(posterior, num_replicates=60 if is_small() else 1000, seed=0)
    assert matched.trusted and covering.trusted
    weights[name] = covering.weight
    print(f"{name}: weight by information {matched.weight:.4f}, by coverage {covering.weight:.4f}")

# %%
# The posterior is a target like any other: samplers take it. Each quantile gets a weight of its own.

calibrated = median.with_weight(weights["absolute"])
draws = bk.sample(calibrated, num_samples=250 if is_small() else 2000, seed=0, progress=False)
row = posterior_summary(draws).loc["theta"]
assert row["r_hat"] < 1.05 and row["ess"] > 100
replicates, num_draws = (50, 512) if is_small() else (500, 2048)
for level, posterior in quantiles.items():
    chosen = calibrate.posterior_coverage(posterior, num_replicates=replicates, num_draws=num_draws, seed=0)
    drawn = bk.sample(chosen.posterior, 4, *((80, 100) if is_small() else (500, 1000)), seed=0, progress=False)
    summary = posterior_summary(drawn)
    assert chosen.trusted and summary["r_hat"].max() < 1.05 and summary["ess"].min() > 100
    slope, error = summary.loc["theta[1]", ["mean", "mcse"]]
    print(f"level {level}: weight {chosen.weight:.1f} +- {chosen.standard_error:.1f}, slope {slope:.4f} +- {error:.4f}")

# %%
# What it says
# ------------
# With one unknown nothing need be left to chance: a fine grid has the moments of all posteriors. The normal model is
# drawn away by two times of 66. Weight one claims a precision that the data do not have. The calibrated posteriors of
# both losses agree about where the times lie, and about how well that is known. The lines of food fan out: the lowest
# rises by far less for each franc of income than the highest. No normal model with one variance could say so.

grid = torch.linspace(20.0, 34.0, 14_001, dtype=torch.float64)
normal = losses.NegativeLogLikelihood(lambda mean: dist.Normal(mean, x.std()))
rows = {
    "normal model": GibbsPosterior(prior, normal, x),
    "absolute, weight 1": median,
    "absolute, by coverage": calibrated,
    "Huber, by coverage": huber.with_weight(weights["Huber"]),
}
exact_means = {}
figure = Figure(figsize=(9, 4), layout="constrained")
axes, right = figure.subplots(1, 2)
for line, (name, posterior) in zip(("-", "--", "-.", ":"), rows.items(), strict=True):
    share = posterior.log_density(grid[:, None]).softmax(0)
    exact_means[name] = mean = float((share * grid).sum())
    sd = float((share * (grid - mean).square()).sum().sqrt())
    print(f"{name:22s} mean {mean:.3f}, sd {sd:.3f}")
    axes.plot(grid, share / (grid[1] - grid[0]), line, label=name)
assert abs(row["mean"] - exact_means["absolute, by coverage"]) < 4.5 * row["mcse"]
axes.axvline(33.02, color="black", linewidth=1)
axes.set(xlabel="deviation from 24,800 ns (line: today's value)", ylabel="posterior density (1/ns)")
axes.legend(frameon=False, fontsize="small")
right.plot(income, food, ".", color="grey", markersize=4)
at = torch.tensor([0.3, 5.0], dtype=torch.float64)
lines = {level: minimize(posterior).position for level, posterior in quantiles.items()}
for constant, slope in lines.values():
    right.plot(at, constant + slope * (at - income.mean()))
right.set(xlabel="income (1000 francs)", ylabel="food (1000 francs), quantiles 0.1, 0.5 and 0.9")

# %%
# A failure on purpose
# --------------------
# How well is the median of 66 such times known? The bootstrap needs no weight. Weight one, taken as if the loss were a
# log likelihood, promises about half of that error. In microseconds it would promise another.

drawn = x[torch.randint(len(x), (1000, len(x)), generator=generator)]
by_bootstrap = float(drawn.quantile(0.5, dim=1).std())
share = median.log_density(grid[:, None]).softmax(0)
promised = float((share * (grid - (share * grid).sum()).square()).sum().sqrt())
print(f"standard error of the median: {by_bootstrap:.3f} in the bootstrap, {promised:.3f} by weight one")
assert by_bootstrap > 1.5 * promised

# %%
# And each line has a posterior of its own: none knows of the others. Outside of the data they cross, which no
# distribution allows. The poorest household has 377 francs.

low, half, high = (float(line[0] + line[1] * (0.1 - income.mean())) for line in lines.values())
assert low > half > high and float(income.min()) > 0.377

# %%
# No posterior reaches today's value, 33.02 :cite:p:`stigler1977`: a method that is robust against two bad times is not
# robust against an error that all times share.

# %%
# Try it on yours
# ---------------
# Replace ``x``, and the loss by one whose minimiser is what you want to know: a median, a mean without outliers, a
# quantile, a line.
#
# .. code-block:: python
#
#    posterior = GibbsPosterior(prior, losses.Absolute(), x)
#    chosen = calibrate.posterior_coverage(posterior, num_replicates=60, seed=0)
#    draws = bk.sample(chosen.posterior, num_samples=250, seed=0)
#    print(chosen.weight, chosen.standard_error, chosen.trusted)
#
# Look at whether the two ways to a weight agree. With fewer than about twenty data neither is reliable. Where the data
# have a model that fits, its likelihood is more precise. For quantiles take ``losses.Pinball(level,
# predict=losses.linear)`` and covariates near one in size, counted from their means; levels near zero or one need many
# rows.
#
# Where to go next: :doc:`safe_bayes_against_coverage` for weights that do not cover, :doc:`contaminated_location` for
# one wrong datum, :doc:`/gallery/case_studies/clinical_trial_from_a_csv_file` for a loss that is no sum.
