r"""
Bayesian Cox regression by the partial likelihood: rearrests of released prisoners
==================================================================================

**What you will learn:** how to be Bayesian about a partial likelihood, which is a loss and no likelihood, and why its
weight may stay one.

:cite:t:`rossi1980` followed 432 men for a year after their release from prisons in Maryland; half of them, at random,
got financial aid. The data come with lifelines. Does aid keep men from being arrested again? A full model would need a
prior on the hazard of arrest as a function of time. Cox :cite:yearpar:`cox1972,cox1975` does without, and so can a
posterior.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import pyro.distributions as dist
import torch
from lifelines.datasets import load_rossi
from matplotlib.figure import Figure
from scipy.integrate import quad

import bayeskit as bk
from bayeskit.errors import ImproperPosteriorError
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import Flat, GibbsPosterior, information_matrices, losses, minimize
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# The hazard of arrest is :math:`\lambda_0(t) \exp(x^\top \theta)`, with any :math:`\lambda_0`. Given that somebody is
# arrested at a time, the probability that it is this man and not another one at risk is free of it, and the loss is
# minus the logarithm of the product of these probabilities,
#
# .. math:: \ell(\theta) = \sum_{i\text{ arrested}} \Big( \log \sum_{j:\, t_j \ge t_i} e^{x_j^\top \theta}
#           - x_i^\top \theta \Big), \qquad \theta_k \sim N(0, 2^2),
#
# with Efron's rule :cite:p:`efron1977` for arrests in the same week. Men are coupled by who is at risk: this is no sum
# over data.

COVARIATES = {
    "fin": "financial aid",
    "age": "age, by year",
    "race": "black",
    "wexp": "work experience",
    "mar": "married",
    "paro": "on parole",
    "prio": "convictions before, each",
}
table = load_rossi()
x = torch.tensor(table[list(COVARIATES)].to_numpy(float))
time, event = (torch.tensor(table[name].to_numpy(float)) for name in ("week", "arrest"))
prior = dist.Normal(torch.zeros(len(COVARIATES), dtype=torch.float64), 2.0)
data = (x - x.mean(0), time, event)
posterior = GibbsPosterior(prior, losses.CoxPartialLikelihood(), data, compile=not is_small())  # pays in long runs
print(f"{len(x)} men, {int(event.sum())} arrested within {int(time.max())} weeks")

# %%
# Before the data
# ---------------
# What the prior thinks of the effect of aid: how many of the men that are arrested first have it, for as many as were
# arrested in the year. Whatever the baseline hazard is, they come in the order of exponential variables. Aid that
# saves nearly everybody is as probable as aid that does as much harm.

generator = torch.Generator().manual_seed(0)
first, shares = int(event.sum()), []
for effect in 2.0 * torch.randn(400, generator=generator, dtype=torch.float64):
    exponential = -torch.rand(len(x), generator=generator, dtype=torch.float64).log()
    order = (exponential / (effect * x[:, 0]).exp()).argsort()
    shares.append(float(x[order[:first], 0].mean()))
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(shares, bins=30, color="C0")
axes.axvline(float(x[event == 1, 0].mean()), color="black", linestyle="--", label="what came")
axes.set(xlabel=f"share with financial aid among the first {first} arrested", ylabel="draws from the prior")
axes.legend(frameon=False)

# %%
# An exact twin
# -------------
# Four men, one covariate, all arrested at different times. Then the partial likelihood is the probability of the order
# in which it happens, so that over all 24 orders it adds up to one. For the posterior of one order, the product of
# probabilities is written out and integrated by quadrature; draws have to agree with its mean.

men = torch.tensor([[0.0], [1.0], [0.0], [2.0]], dtype=torch.float64)
loss = losses.CoxPartialLikelihood()
effect, ones = torch.tensor([0.7], dtype=torch.float64), torch.ones(4, dtype=torch.float64)
total = sum(
    math.exp(-float(loss.total(effect, (men, torch.tensor(times, dtype=torch.float64), ones))))
    for times in itertools.permutations([1.0, 2.0, 3.0, 4.0])
)
print(f"probabilities of all 24 orders add up to {total:.12f}")
assert abs(total - 1) < 1e-12


def by_hand(theta: float) -> float:
    """Partial likelihood of the order 2, 4, 1, 3, times the prior density up to a constant."""
    hazards = [math.exp(theta * value) for value in (1.0, 2.0, 0.0, 0.0)]
    return math.prod(hazards[i] / sum(hazards[i:]) for i in range(4)) * math.exp(-(theta**2) / 8)


mass = quad(by_hand, -20, 20, epsabs=1e-13, limit=200)[0]
mean = quad(lambda theta: theta * by_hand(theta), -20, 20, epsabs=1e-13, limit=200)[0] / mass
times = torch.tensor([3.0, 1.0, 4.0, 2.0], dtype=torch.float64)
twin = GibbsPosterior(dist.Normal(torch.zeros(1, dtype=torch.float64), 2.0), loss, (men, times, ones))
for theta in (-1.5, 0.3, 2.0):
    u = torch.tensor([theta], dtype=torch.float64)
    ratio = float((twin.log_density(u) - twin.log_density(0 * u)).exp())
    assert abs(ratio * by_hand(0.0) / by_hand(theta) - 1) < 1e-9
draws = bk.sample(twin, 4, 100 if is_small() else 200, 150 if is_small() else 2000, seed=0, progress=False)
row = posterior_summary(draws).iloc[0]
print(f"mean effect by quadrature {mean:.4f}, by draws {row['mean']:.4f} +- {row['mcse']:.4f}")
assert abs(row["mean"] - mean) < 4.5 * row["mcse"]

# %%
# The fit
# -------
# The minimiser is the estimate that other programs print, R's package survival among them :cite:p:`fox2011`. More
# remarkable is the width. A posterior of a loss can be too narrow or too wide by any factor; here its variance is
# within a factor of 1.5 of that which the minimiser has under repeated sampling (the sandwich), in every direction.

PUBLISHED = torch.tensor([-0.37942, -0.05744, 0.31390, -0.14980, -0.43370, -0.08487, 0.09150], dtype=torch.float64)
worst = float((minimize(posterior).position - PUBLISHED).abs().max())
print(f"largest difference from the published maximum: {worst:.1e}")
assert worst < 1e-5

found = information_matrices(posterior)
ratio = torch.linalg.eigvals(torch.linalg.solve(found.sandwich, found.posterior_covariance)).real
print(f"variance of the posterior over that of the minimiser: {ratio.min():.2f} to {ratio.max():.2f}")
assert 1 / 1.5 < float(ratio.min()) and float(ratio.max()) < 1.5

draws = bk.sample(posterior, 4, *((80, 100) if is_small() else (500, 2000)), seed=0, progress=False)
summary = posterior_summary(draws)
print(f"largest R-hat {summary['r_hat'].max():.3f}, smallest effective sample size {summary['ess'].min():.0f}")
assert summary["r_hat"].max() < 1.05 and summary["ess"].min() > 100

# %%
# What it says
# ------------
# Aid lowers the hazard of arrest, in all probability. By how much is not known well. Age and earlier convictions matter
# almost certainly.

hazard_ratio = draws.values()["theta"].flatten(0, 1).exp()
lowers = (hazard_ratio < 1).double().mean(0)
for (name, words), low_share, (_, row) in zip(COVARIATES.items(), lowers.tolist(), summary.iterrows(), strict=True):
    print(
        f"{name:5s}{words:25s} effect {row['mean']:+.4f} +- {row['mcse']:.4f}, "
        f"lowers the hazard with probability {low_share:.3f}"
    )
figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
low, middle, high = hazard_ratio.quantile(torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64), 0)
places = range(len(COVARIATES))
axes.errorbar(middle, places, xerr=torch.stack([middle - low, high - middle]).numpy(), fmt="o", color="C0", capsize=3)
axes.axvline(1.0, color="grey", linestyle="--", linewidth=1)
axes.set_yticks(places, COVARIATES.values())
axes.invert_yaxis()
axes.set(xscale="log", xlabel="hazard ratio, with 95 % intervals", xticks=[0.25, 0.5, 1, 2, 4])
axes.set_xticklabels(["0.25", "0.5", "1", "2", "4"])
axes.minorticks_off()

# %%
# A failure on purpose
# --------------------
# With few events a covariate may order them perfectly: here, whoever has the larger value is arrested first. The
# partial likelihood then rises for ever with the effect. Other programs stop at some large number with a huge standard
# error; under a flat prior there is no posterior, and the library says so. Under a proper prior there is one, but its
# scale is that of the prior.

ordered = (men, torch.tensor([3.0, 2.0, 4.0, 1.0], dtype=torch.float64), ones)
try:
    minimize(GibbsPosterior(Flat((1,)), loss, ordered))
except ImproperPosteriorError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("a posterior was made up")

# %%
# Try it on yours
# ---------------
# Replace the table: covariates, times, and one for an event or zero for a censored row. Centre the covariates.
#
# .. code-block:: python
#
#    data = (x - x.mean(0), time, event)
#    posterior = GibbsPosterior(prior, losses.CoxPartialLikelihood(), data)
#    found = information_matrices(posterior)
#    print(torch.linalg.eigvals(torch.linalg.solve(found.sandwich, found.posterior_covariance)).real)
#
# Look at these ratios: near one, the weight of one is right; far from one, hazards are not proportional or rows belong
# together, and the weight has to be chosen. If absolute risks are wanted, and not their ratios, model the hazard.
#
# Where to go next: :doc:`safe_bayes_against_coverage` for losses whose weight must not stay one,
# :doc:`newcombs_median` for how it is chosen.
