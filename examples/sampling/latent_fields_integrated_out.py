r"""
Laplace marginalisation of a latent Gaussian field, as in INLA: Scottish lip cancer
===================================================================================

**What you will learn:** how a field of 56 districts is integrated out, so that four parameters are left to sample, and
how its values are drawn afterwards.

Between 1975 and 1980, 536 men fell ill with lip cancer in 56 districts of Scotland :cite:p:`clayton1987`. Sunlight is a
cause: does the share of work in agriculture, fishing and forestry explain where?
"""

import time

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import ModelError
from bayeskit.gallery import is_small
from bayeskit.models.latent_gaussian import DiseaseMap, scottish_lip_cancer

# %%
# The model
# ---------
# Counts are Poisson, and the log rate of a district has an independent and a spatial part (BYM2,
# :cite:t:`riebler2016`),
#
# .. math::
#
#    y_i \sim \mathrm{Poisson}(e_i \exp(\alpha + \beta x_i + f_i)), \qquad
#    f \sim N(0, \sigma^2 ((1 - \varphi) I + \varphi G)),
#
# with the expected cases :math:`e_i` from the ages of the population, and :math:`G` the scaled covariance of a field in
# which neighbours are alike. ``bk.marginalize`` integrates :math:`f` out by Laplace's approximation, and with
# ``correct=True``, what that misses is estimated by importance sampling after the fit. The prior of
# :math:`\varphi` is uniform: that of the paper, the default, has a long tail towards 1 on the logit scale, in which
# chains stay for long.

data = scottish_lip_cancer()
work = (data.outdoor_work - data.outdoor_work.mean()) / data.outdoor_work.std()
model = DiseaseMap(data.counts, data.expected, data.edges, work, proportion=dist.Beta(1.0, 1.0))
target = bk.Target.from_pyro(model)
marginal = bk.marginalize(target, ["field"], correct=True)
print(f"{target.dim} dimensions, of which {marginal.dim} are sampled")

# %%
# The fit
# -------

size = {"num_chains": 2, "num_warmup": 50, "num_samples": 50} if is_small() else {"num_chains": 4, "num_samples": 500}
start = time.perf_counter()
draws = bk.sample(marginal, seed=0, progress=False, **size)
seconds = time.perf_counter() - start
table = draws.summary()
print(table[["mean", "sd", "mcse_mean"]].round(3))
row = table.loc["coefficients[0]"]
print(f"effect of one standard deviation of work: {row['mean']:.3f} +- {row['mcse_mean']:.3f} ({seconds:.0f} s)")
assert row["mean"] > row["sd"] + 4.5 * row["mcse_mean"]

# %%
# An exact twin
# -------------
# R-INLA integrates over a grid of the two parameters of the field instead of sampling them. With the
# prior of the paper, and a map made from polygons, which may differ by a few borders, it gives an effect of 0.318 and
# an intercept of 0.078; neither prior nor borders should matter much.

for name, known in (("coefficients[0]", 0.318), ("intercept", 0.078)):
    row = table.loc[name]
    gap = row["mean"] - known
    print(f"{name}: {gap:+.3f} +- {row['mcse_mean']:.3f} from R-INLA, sd {row['sd']:.3f}")
    assert abs(gap) < 0.2 * row["sd"] + 4.5 * row["mcse_mean"]  # 0.2 for borders and prior

# %%
# What it says
# ------------
# The field is drawn for each draw of the parameters, and both are weighted by the likelihood itself. Rates vary less
# than raw ratios, above all where few cases are expected.

whole = marginal.with_latents(draws)
log_rate = whole["intercept"].unsqueeze(-1) + whole["coefficients"] * work + whole["field"]
rate = log_rate.exp().flatten(0, 1)
raw = data.counts / data.expected
print(f"raw ratios from {float(raw.min()):.2f} to {float(raw.max()):.2f}, ", end="")
print(f"posterior means from {float(rate.mean(0).min()):.2f} to {float(rate.mean(0).max()):.2f}")
assert float(rate.mean(0).max()) < float(raw.max()) and float(rate.mean(0).min()) > float(raw.min())

figure = Figure(figsize=(7, 4.5), layout="constrained")
ax = figure.subplots()
low, high = rate.quantile(torch.tensor([0.05, 0.95], dtype=rate.dtype), dim=0)
mean = rate.mean(0)
ax.errorbar(raw, mean, [mean - low, high - mean], fmt="o", markersize=3, elinewidth=0.7)
ax.plot([0, 7], [0, 7], color="0.7", zorder=0)
ax.set(xlabel="cases over expected cases", ylabel="relative rate: mean and 90 % interval")

# %%
# A failure on purpose
# --------------------
# Laplace's approximation is for what is nearly normal given the rest, as the field is. The scale of the field is not,
# and without it the field has no density of its own: to integrate the scale out and keep the field is refused.

try:
    bk.marginalize(target, ["scale"])
except ModelError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("the prior of the field depends on what was integrated out")

# %%
# Try it on yours
# ---------------
# Name the site of your Pyro model that has many coordinates and is nearly normal given all others.
#
# .. code-block:: python
#
#    marginal = bk.marginalize(target, ["field"], correct=True)
#    draws = bk.sample(marginal, num_chains=2, num_warmup=50, num_samples=50)
#    whole = marginal.with_latents(draws)
#
# Look at the warnings of ``with_latents``: with ``correct=True`` they say when the weights are too uneven for Laplace's
# approximation to be trusted. Then, or where the conditional has several modes, sample all sites.
#
# Where to go next: :func:`~bayeskit.models.latent_gaussian.random_walk` and
# :class:`~bayeskit.models.latent_gaussian.GaussianProcessModel` for series and places.
