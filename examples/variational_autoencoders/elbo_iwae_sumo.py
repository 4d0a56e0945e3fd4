r"""
ELBO, IWAE and SUMO: bias and variance of three estimates of the log likelihood
===============================================================================

**What you will learn:** how far the evidence lower bound and the importance-weighted bounds lie below the log
likelihood, and what it costs in variance to have an estimate without that bias.

Whoever trains by a bound moves the model to where the bound is tight, and whoever reports one understates it.
:cite:t:`burda2016` raise the bound by averaging :math:`K` weights; :cite:t:`luo2020` stop a sum over such bounds at
random, which is right on average. In a linear-Gaussian model all of it can be computed, so that biases can be measured.
The data are the 150 irises of :cite:t:`anderson1935` and :cite:t:`fisher1936`, from scikit-learn.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import norm
from sklearn.datasets import load_iris

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.objectives import ELBO, IWAE, SUMO, ReciprocalTail, sumo_estimate
from bayeskit.models.vae import LinearVAE

# %%
# The model
# ---------
# One number :math:`z` makes the four measurements of a flower. Of :math:`K` draws from a guide, weights :math:`w_k`
# and their mean make the bound
#
# .. math::
#
#    z \sim N(0, 1), \quad x \mid z \sim N(W z + \mu, \sigma^2 I), \qquad
#    w_k = \frac{p(x, z_k)}{q(z_k \mid x)}, \quad z_k \sim q, \qquad
#    L_K = \mathrm{E} \log \frac{1}{K} \sum_{k \le K} w_k \;\le\; \log p(x).
#
# :math:`L_1` is the evidence lower bound. With the increments :math:`\Delta_j` from :math:`j` weights to :math:`j +
# 1`, SUMO draws a stopping index :math:`J` and returns
#
# .. math::
#
#    \log w_1 + \sum_{j \le J} \frac{\Delta_j}{P(J \ge j)}, \qquad
#    \Delta_j = \log \frac{1}{j + 1} \sum_{k \le j + 1} w_k - \log \frac{1}{j} \sum_{k \le j} w_k .
#
# The model is that of greatest likelihood. Its guide would be the posterior, and every bound the log likelihood; here
# it is spoilt: its means are too small by a tenth, and it is half again as wide as it should be.

x = torch.as_tensor(load_iris().data)
vae = LinearVAE.maximum_likelihood(x, latent_dim=1)
with torch.no_grad():
    vae.encoder.mean.weight *= 0.9
    vae.encoder.mean.bias *= 0.9
    vae.encoder.log_scale += math.log(1.5)
    log_likelihood, lower_bound = vae.log_likelihood(x), vae.lower_bound(x)

# %%
# Before the data
# ---------------
# Parameters stand at their maximum from here on, and what is left to the prior is the codes. Flowers made of codes
# from it lie along one line, where real ones are two clouds and a gap. No better model is needed here: the question is
# how well bounds do for the model as it is.

made = vae.generate(150, seed=0)
before = Figure(figsize=(5, 3.4), layout="constrained")
axes = before.subplots()
for flowers, marker, label in ((x, "o", "150 irises"), (made, "^", "150 from the prior")):
    axes.plot(flowers[:, 2], flowers[:, 3], marker, markersize=4, alpha=0.7, label=label)
axes.set(xlabel="petal length (cm)", ylabel="petal width (cm)")
axes.legend()

# %%
# An exact twin
# -------------
# Of sixteen weights of one flower, SUMO's expectation over the stopping index is a sum of fifteen terms. Increments
# telescope, so that it is the log mean of all sixteen: without bias for :math:`L_{16}`, whatever the weights are.

tail = ReciprocalTail(switch=15, cap=15)  # P(J >= j) = 1 / j, up to 15
survival = tail.survival(torch.arange(1, 17))
log_weight = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
listed = sum((survival[j - 1] - survival[j]) * sumo_estimate(log_weight[: j + 1], survival[:j]) for j in range(1, 16))
log_mean = log_weight.logsumexp(0) - math.log(16)
print(f"expectation over the stopping index {float(listed):.12f}, log mean of all weights {float(log_mean):.12f}")
assert abs(float(listed - log_mean)) < 1e-12

# %%
# Bounds themselves are integrals, for :math:`\log S = \int_0^\infty (e^{-t} - e^{-t S}) \, dt / t`, and under the
# expectation :math:`e^{-t S}` of a sum of :math:`K` independent weights is the :math:`K`-th power of that of one. So
# two nested sums on fine grids give :math:`L_K` for any :math:`K`, here for all flowers together.

noise = np.linspace(-9, 9, 401)
chance = norm.pdf(noise) / norm.pdf(noise).sum()
code = vae.encode(x).numpy() + float(vae.encoder.log_scale.detach().exp()) * noise  # (150, 401)
decoder = {name: value.detach().numpy() for name, value in vae.decoder.named_parameters()}
centre = code[..., None] * decoder["weight"][:, 0] + decoder["bias"]
log_density = norm(centre, float(vae.likelihood.log_scale.detach().exp())).logpdf(x.numpy()[:, None]).sum(-1)
log_weight = log_density + norm.logpdf(code) - norm.logpdf(noise) + float(vae.encoder.log_scale.detach())
weight = np.exp(log_weight - log_likelihood.numpy()[:, None])
t = np.exp(np.arange(-45, 45, 0.25))
of_one = np.stack([np.exp(-each * weight) @ chance for each in t])  # E exp(-t w), (360, 150)


def exact_bias(count: int) -> float:
    """Return the bound of ``count`` weights less the log likelihood, the mean over flowers."""
    return float(0.25 * (np.exp(-t)[:, None] - of_one**count).sum(0).mean() - math.log(count))


closed_form = float((lower_bound - log_likelihood).mean())
print(f"ELBO less log likelihood: {exact_bias(1):.9f} on the grids, {closed_form:.9f} in closed form")
assert abs(exact_bias(1) - closed_form) < 1e-9
assert abs(exact_bias(1_000_000)) < 1e-6  # many weights reach the log likelihood

# %%
# The fit
# -------
# Passes over all flowers, many of each method. Every mean has to agree with the exact bound that belongs to it, within
# its Monte Carlo error, and lies below the log likelihood. SUMO estimates :math:`L_{256}` for the price of about seven
# weights on average.

sumo = SUMO(ReciprocalTail(switch=255, cap=255))
methods = {"ELBO": (ELBO(), 1), "IWAE-4": (IWAE(4), 4), "IWAE-16": (IWAE(16), 16), "IWAE-64": (IWAE(64), 64)}
methods["SUMO"] = sumo, 256
bias, error, spread = {}, {}, {}
print(f"{'':8s} weights   estimate less log likelihood    exactly   sd of a pass")
for seed, (name, (objective, count)) in enumerate(methods.items()):
    num_passes = (500 if is_small() else 5000) if name == "SUMO" else (100 if is_small() else 500)
    with global_stream(torch.Generator().manual_seed(seed)):
        passes = [-objective.loss(vae.model, vae.guide, x) / len(x) for _ in range(num_passes)]
    spread[name] = float(np.std(passes, ddof=1))
    bias[name], error[name] = float(np.mean(passes) - log_likelihood.mean()), spread[name] / num_passes**0.5
    cost = sumo.expected_particles if name == "SUMO" else count
    print(
        f"{name:8s} {cost:7.1f} {bias[name]:13.4f} +- {error[name]:.4f} {exact_bias(count):18.4f} {spread[name]:14.4f}"
    )
    assert abs(bias[name] - exact_bias(count)) < 4.5 * error[name]
assert exact_bias(1) < exact_bias(4) < exact_bias(16) < exact_bias(64) < exact_bias(256) < 0

# %%
# A failure on purpose
# --------------------
# Why stop at 255 at all? Increments are :math:`1 / j` in size, so that the variance is a sum of terms :math:`1 / (j^2
# P(J \ge j))` and the cost one of :math:`P(J \ge j)`: no distribution of :math:`J` without a cap makes both finite.
# Below, simulated weights of one flower, with all stopping indices listed. With :math:`P(J \ge j) = 1 / j` each
# fourfold cap should add the variance of a weight times :math:`\log 4`, and has no end.

quadratic = np.polyfit(noise, log_weight[0] - float(log_likelihood[0]), 2)  # what a log weight is in the noise
rng = np.random.default_rng(0)
drawn = np.polyval(quadratic, rng.normal(size=(1000 if is_small() else 5000, 1024)))
count = np.arange(1, 1025)
log_means = np.logaddexp.accumulate(drawn, axis=1) - np.log(count)
estimates = log_means[:, :1] + np.cumsum(count[:-1] * np.diff(log_means), axis=1)  # stopped at 1, ..., 1023
caps, squares = [15, 63, 255, 1023], []
for cap in caps:
    stops = np.append(1 / count[: cap - 1] - 1 / count[1:cap], 1 / cap)
    squares.append(estimates[:, :cap] ** 2 @ stops)
deviation = [
    math.sqrt(square.mean() - log_means[:, cap].mean() ** 2) for cap, square in zip(caps, squares, strict=True)
]
step = (chance @ weight[0] ** 2 - 1) * math.log(4)
for k in range(1, 4):
    rise = squares[k] - squares[k - 1]
    rise_error = float(rise.std() / len(rise) ** 0.5)
    print(
        f"cap {caps[k - 1]} to {caps[k]}: variance rises by {rise.mean():.3f} +- {rise_error:.3f}, predicted {step:.3f}"
    )
    assert rise.mean() > 4.5 * rise_error

# %%
# What it says
# ------------
# Bias or variance. The bias of a bound falls like one over the number of weights, and it hardly varies; SUMO is right
# on average at a price of seven weights and varies far more. Its passes share one stopping index among all flowers.
# For reporting a likelihood, many weights are the better deal. Where a bias would add up, as in a gradient that is
# followed for long or where log likelihoods are subtracted, SUMO with a cap has as little of it as one likes.

print(f"about seven weights: IWAE-7 is off by {exact_bias(7):.4f}, SUMO by {bias['SUMO']:.4f} +- {error['SUMO']:.4f}")
figure = Figure(figsize=(9, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
grid = np.unique(np.geomspace(1, 256, 60).astype(int))
left.plot(grid, [exact_bias(k) for k in grid], color="C0", label="exact bound")
names = ["ELBO", "IWAE-4", "IWAE-16", "IWAE-64"]
bars = [2 * error[name] for name in names]
left.errorbar([1, 4, 16, 64], [bias[name] for name in names], bars, fmt="o", color="C0", label="ELBO and IWAE")
left.errorbar(
    sumo.expected_particles, bias["SUMO"], 2 * error["SUMO"], fmt="s", color="C1", label="SUMO, capped at 255"
)
left.axhline(0, color="C6", linestyle="--", linewidth=1)
left.set(xscale="log", xlabel="weights (SUMO: on average)", ylabel="estimate less log likelihood (nats)")
right.plot(count[:64], log_means[:, :64].std(0), color="C0", label="IWAE")
costs = [1 + (1 / count[:cap]).sum() for cap in caps]
right.plot(costs, deviation, "s-", color="C1", label="SUMO")
for cap, cost, sd in zip(caps, costs, deviation, strict=True):
    right.annotate(f"cap {cap}", (cost, sd), textcoords="offset points", xytext=(8, -3))
right.set(xscale="log", xlabel="weights (SUMO: on average)", ylabel="sd of one estimate, one flower (nats)")
for axes in (left, right):
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.minorticks_off()
    axes.legend()

# %%
# Try it on yours
# ---------------
# Replace ``vae`` and ``x`` by a trained model, its guide and your data; an objective is exchanged by its name.
#
# .. code-block:: python
#
#    for objective in (ELBO(), IWAE(16), SUMO(ReciprocalTail(switch=255, cap=255))):
#        print(type(objective).__name__, -objective.loss(vae.model, vae.guide, x) / len(x))
#
# Look at how much the bound still rises from 16 weights to 64: that is about the bias that is left. Train by ELBO or by
# IWAE with a few weights, report with many, and take SUMO, capped, where differences of log likelihoods are wanted.
#
# Where to go next: :doc:`variational_autoencoder` trains by two of these, :doc:`held_out_likelihood` reports
# likelihoods with many weights, :doc:`discrete_codes_of_digits` has gradients through codes that are not continuous.
