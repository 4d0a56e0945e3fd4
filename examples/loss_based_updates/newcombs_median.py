r"""
Generalised Bayes for the median: Newcomb's speed of light without a likelihood
===============================================================================

**What you will learn:** how to update beliefs by a loss in place of a likelihood, why its weight matters, and how to
choose it.

In 1882 Newcomb timed light over the Potomac and back; his 66 times, as deviations from 24,800 nanoseconds, were listed
by :cite:t:`stigler1977`, and two of them went astray. A normal model has to explain these two and shifts. The question
asked here needs no model: what is the median of such times? :cite:t:`bissiri2016` say how to be Bayesian about a number
that is defined by a loss.
"""

import math

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import GibbsPosterior, calibrate, losses
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# There is none of the data. The median minimises the expected absolute error, and beliefs about it become
#
# .. math:: \pi_w(\theta \mid x) \propto \exp\Big(-w \sum_i |\theta - x_i|\Big)\, \pi(\theta), \qquad
#           \theta \sim N(25, 100^2).
#
# A loss has no natural unit, in nanoseconds or in microseconds, so that the weight :math:`w` has to be chosen.

TIMES = """28 26 33 24 34 -44 27 16 40 -2 29 22 24 21 25 30 23 29 31 19 24 20 36 32 36 28 25 21 28 29 37 25 28 26
30 32 36 26 30 22 36 23 27 27 28 27 31 27 26 33 26 32 32 24 39 28 24 25 32 25 29 27 28 29 16 23"""
x = torch.tensor([float(word) for word in TIMES.split()], dtype=torch.float64)
prior = dist.Normal(torch.tensor(25.0, dtype=torch.float64), 100.0)
median = GibbsPosterior(prior, losses.Absolute(), x)
print(f"{len(x)} times, mean {x.mean():.2f}, median {x.median():.0f}, smallest {x.min():.0f} and {x.sort()[0][1]:.0f}")

# %%
# Before the data
# ---------------
# A loss predicts nothing. Read as if it were a likelihood, though, :math:`e^{-w|\theta - x|}` is a Laplace density, and
# tells what a weight takes for granted: with weight one, times that scatter far less about their median than Newcomb's
# did. The prior of the median itself says next to nothing.

generator = torch.Generator().manual_seed(0)
theta = 25 + 100 * torch.randn(20_000, generator=generator, dtype=torch.float64)
low, high = theta.quantile(0.025), theta.quantile(0.975)
print(f"the median, before: {low:.0f} to {high:.0f} ns with probability .95")
for weight in (1.0, 0.2):
    uniform = torch.rand(20_000, generator=generator, dtype=torch.float64)
    away = -uniform.log() / weight  # distance of a Laplace variable from its median
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
    moment += left * piece + math.exp(start) * (
        math.exp(slope * (right - left)) * ((right - left) / slope - slope**-2) + slope**-2
    )
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
print(f"its mean by sampling: {row['mean']:.4f} +- {row['mcse']:.4f}")
assert abs(row["mean"] - moment / mass) < 4.5 * row["mcse"]

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
    print(
        f"{name:8s} weight by information {matched.weight:.4f}, "
        f"by coverage {covering.weight:.4f} +- {covering.standard_error:.4f}"
    )

# %%
# The posterior is a target like any other: samplers take it.

calibrated = median.with_weight(weights["absolute"])
draws = bk.sample(calibrated, num_samples=250 if is_small() else 2000, seed=0, progress=False)
row = posterior_summary(draws).loc["theta"]
print(f"R-hat {row['r_hat']:.3f}, effective sample size {row['ess']:.0f}")
assert row["r_hat"] < 1.05 and row["ess"] > 100

# %%
# What it says
# ------------
# With one unknown nothing need be left to chance: a fine grid has the moments of all posteriors. The normal model is
# drawn away by two times of 66. Weight one claims a precision that the data do not have. The calibrated posteriors of
# both losses agree about where the times lie, and about how well that is known.

grid = torch.linspace(20.0, 34.0, 14_001, dtype=torch.float64)
normal = losses.NegativeLogLikelihood(lambda mean: dist.Normal(mean, x.std()))
rows = {
    "normal model": GibbsPosterior(prior, normal, x),
    "absolute, weight 1": median,
    "absolute, by coverage": calibrated,
    "Huber, by coverage": huber.with_weight(weights["Huber"]),
}
exact_means = {}
figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
for line, (name, posterior) in zip(("-", "--", "-.", ":"), rows.items(), strict=True):
    share = posterior.log_density(grid[:, None]).softmax(0)
    exact_means[name] = mean = float((share * grid).sum())
    sd = float((share * (grid - mean).square()).sum().sqrt())
    print(f"{name:22s} mean {mean:.3f}, sd {sd:.3f}")
    axes.plot(grid, share / (grid[1] - grid[0]), line, label=name)
print(f"absolute, by coverage, sampled: mean {row['mean']:.3f} +- {row['mcse']:.3f}")
assert abs(row["mean"] - exact_means["absolute, by coverage"]) < 4.5 * row["mcse"]
axes.axvline(33.02, color="black", linewidth=1)
axes.annotate("today's value", (32.9, axes.get_ylim()[1] * 0.6), rotation=90, ha="right", fontsize="small")
axes.set(xlabel="deviation from 24,800 ns", ylabel="posterior density (1/ns)", title="Newcomb's times, four posteriors")
axes.legend(frameon=False)

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
# have a model that fits, its likelihood is more precise.
#
# Where to go next: :doc:`engel_quantile_regression` for other quantiles and covariates,
# :doc:`safe_bayes_against_coverage` for weights that do not cover, :doc:`contaminated_location` for one wrong datum.
