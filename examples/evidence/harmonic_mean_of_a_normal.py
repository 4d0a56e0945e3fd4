r"""
Harmonic mean estimator of the marginal likelihood: why it fails, and what to use
=================================================================================

**What you will learn:** why the harmonic mean of the likelihood over posterior draws does not give the evidence, why
its error bar does not tell you so, what does tell you, and what to compute from the same draws instead.

The data are the sepal lengths of 50 flowers of *Iris setosa* :cite:p:`fisher1936`. The model is the simplest that has
an evidence: a normal mean with a normal prior, where everything is known in closed form. :cite:t:`newton1994` proposed
the estimator and saw that its variance may be infinite; Neal, in the discussion of that paper, said what to think of
it.
"""

# sphinx_gallery_thumbnail_number = -1
import math
import textwrap

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from sklearn.datasets import load_iris

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence

# %%
# The model
# ---------
# The mean length :math:`\mu` of :math:`n` flowers has a prior of standard deviation :math:`\tau`; lengths scatter by
# :math:`\sigma = 0.35` cm, taken as known. The evidence is a normal density of all flowers together:
#
# .. math::
#    \mu \sim N(0, \tau^2), \quad y_i \sim N(\mu, \sigma^2)
#    \qquad\Rightarrow\qquad y \sim N(0, \sigma^2 I + \tau^2 \mathbf 1 \mathbf 1^\top).
#
# The identity behind the estimator is right. The posterior mean of one over the likelihood is one over the evidence,
#
# .. math::
#    \int \frac{1}{L(\mu)} \frac{L(\mu) \pi(\mu)}{Z} \, d\mu = \frac{1}{Z}.

lengths = torch.tensor(load_iris().data[:50, 0])


def flowers(y, sigma, tau):
    mu = pyro.sample("mu", dist.Normal(0.0, tau))
    with pyro.plate("flowers", len(y)):
        pyro.sample("length", dist.Normal(mu, sigma), obs=y)


def make_target(y, sigma, tau):
    numbers = (torch.tensor(value, dtype=torch.float64) for value in (sigma, tau))
    return bk.Target.from_pyro(flowers, y, *numbers, compile=False)


def closed_form(y, sigma, tau):
    covariance = sigma**2 * np.eye(len(y)) + tau**2
    return float(multivariate_normal(cov=covariance).logpdf(y.numpy()))


# %%
# Before the data
# ---------------
# The prior that many would call vague, with :math:`\tau` a metre: flowers of minus one metre are as likely as flowers
# of plus one. That is no harm to the posterior, which the data decide, but the evidence has to pay for it.

rng = np.random.default_rng(0)
imagined = rng.normal(rng.normal(0, 100, 20_000), 0.35)
prior_predictive = Figure(figsize=(7, 2.8), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(imagined, bins=80, color="C5")
axes.axvline(float(lengths.mean()), color="C0", linestyle="--", label="mean of the observed flowers")
axes.set(xlabel="sepal length (cm)", ylabel="imagined flowers", title="flowers from a vague prior")
axes.legend()

# %%
# An exact twin
# -------------
# The tail of one over the likelihood decides. Under the posterior it falls like a power, of Pareto shape
#
# .. math::
#    k = \frac{n / \sigma^2}{n / \sigma^2 + 1 / \tau^2},
#
# and the variance is finite only where :math:`k < 1/2`: **where the prior is narrower than the likelihood**. Take one
# flower, measured badly, and a prior that knows more than it. Its posterior is a normal distribution that can be
# written down without the evidence. There the integral is right, and so is the estimator.

one, badly, narrow = lengths[:1] - 5, 1.0, 0.4
twin = closed_form(one, badly, narrow)
precision = 1 / badly**2 + 1 / narrow**2
posterior = norm(float(one) / badly**2 / precision, precision**-0.5)


def posterior_over_likelihood(mu):
    return posterior.pdf(mu) / norm.pdf(float(one), mu, badly)


inverse = quad(posterior_over_likelihood, -5, 5, points=[0], epsabs=0, epsrel=1e-12)[0]
print(f"log evidence of one flower {twin:.9f}, from the integral of the identity {-math.log(inverse):.9f}")
assert abs(twin + math.log(inverse)) < 1e-9

size = {"num_chains": 8, "num_warmup": 200, "num_samples": 300 if is_small() else 1000, "progress": False}
target = make_target(one, badly, narrow)
works = evidence.harmonic_mean(target, bk.sample(target, **size))
k = 1 / (1 + (badly / narrow) ** 2)
print(f"Pareto shape {k:.2f}: {works}")
assert works.trusted and abs(works.log_evidence - twin) < 4.5 * works.standard_error

# %%
# The fit
# -------
# Now fifty flowers and the vague prior, where :math:`k` is all but one. The draws are excellent.

target, truth = make_target(lengths, 0.35, 100.0), closed_form(lengths, 0.35, 100.0)
draws = bk.sample(target, **size)
methods = ["harmonic_mean", "stabilised_harmonic_mean", "bridge_sampling", "learned_harmonic_mean"]
ways = evidence.compare(target, methods, draws=draws, progress=False)
facts = ways["bridge_sampling"].diagnostics
print(f"largest R-hat {facts['r_hat']:.3f}, smallest effective sample size {facts['effective_draws']:.0f}")
assert facts["r_hat"] < 1.01 and facts["effective_draws"] > 1000
print(f"log evidence in closed form {truth:.4f}, shape {1 / (1 + (0.35 / 100) ** 2 / 50):.7f}")
for estimate in ways:
    print(textwrap.fill(str(estimate), 110, subsequent_indent="    "))

# %%
# Bridge sampling and the learned harmonic mean get the evidence right from the very draws on which the harmonic mean
# fails. The second keeps the identity, but puts a density :math:`q` that lies inside the posterior in place of the
# prior: the mean of :math:`q / (L \pi)` is also :math:`1 / Z`, and its terms are bounded.

for name in ("bridge_sampling", "learned_harmonic_mean"):
    assert ways[name].trusted and abs(ways[name].log_evidence - truth) < 4.5 * ways[name].standard_error
assert not ways["harmonic_mean"].trusted and not ways["stabilised_harmonic_mean"].trusted

# %%
# A failure on purpose
# --------------------
# Is that bad luck? The posterior is normal, so independent draws are to be had for nothing, and the estimator is one
# line. How often does an interval of two of its standard errors hold the truth, if it rests on 4000 draws?

replicates = 100 if is_small() else 1000
variance = 1 / (50 / 0.35**2 + 1 / 100**2)
mu = rng.normal(variance * float(lengths.sum()) / 0.35**2, variance**0.5, (replicates, 4000))
log_likelihood = norm.logpdf(lengths.numpy(), 5, 0.35).sum() + (mu - 5) * float((lengths - 5).sum()) / 0.35**2
log_likelihood -= 50 * (mu - 5) ** 2 / (2 * 0.35**2)
estimates = math.log(4000) - logsumexp(-log_likelihood, axis=1)
weights = np.exp(-log_likelihood + estimates[:, None])  # their mean is one
spread = weights.std(1) / 4000**0.5
covered = np.mean(np.abs(estimates - truth) < 1.96 * spread)
print(f"{replicates} replicates are {np.mean(estimates) - truth:+.2f} nats off on average; they report standard errors")
print(f"of {np.median(spread):.2f} (median), and {covered:.1%} of their 95 % intervals hold the truth")
assert covered < 0.05

replicated = Figure(figsize=(7, 3.2), layout="constrained")
axes = replicated.subplots()
axes.errorbar(np.arange(1, 41), estimates[:40], 1.96 * spread[:40], fmt="^", color="C3", label="harmonic mean")
axes.axhline(truth, color="C0", linestyle="--", label="closed form")
axes.set(xlabel="replicate", ylabel="log evidence (nats)", title="error bars that lie")
axes.legend(loc=(0.6, 0.12))

# %%
# What it says
# ------------
# The harmonic mean sees of the prior only where the posterior draws are, and there every wide prior looks the same. So
# it does not notice how vague the prior is, which is what an evidence is for: once the prior is wide, one that is ten
# times wider costs :math:`\log 10` nats.

scales = [10.0, 1000.0] if is_small() else [10.0, 30.0, 100.0, 300.0, 1000.0]
rows = []
for seed, tau in enumerate(scales):
    target = make_target(lengths, 0.35, tau)
    draws = bk.sample(target, seed=seed, **size)
    found = evidence.compare(target, ["harmonic_mean", "bridge_sampling"], seed=seed, draws=draws, progress=False)
    harmonic, its_error = found["harmonic_mean"].log_evidence, found["harmonic_mean"].standard_error
    bridge, error = found["bridge_sampling"].log_evidence, found["bridge_sampling"].standard_error
    rows.append([harmonic, its_error, bridge, error])
    exactly = closed_form(lengths, 0.35, tau)
    print(f"prior sd {tau:4.0f} cm: exactly {exactly:.4f}, bridge sampling {bridge:.4f} +- {error:.4f}, ", end="")
    print(f"harmonic mean {harmonic:.2f} (it says +- {its_error:.2f})")
    assert abs(bridge - exactly) < 4.5 * error

rows, grid = np.array(rows).T, np.geomspace(scales[0], scales[-1], 50)
figure = Figure(figsize=(7, 4), layout="constrained")
axes = figure.subplots()
axes.plot(grid, [closed_form(lengths, 0.35, tau) for tau in grid], "--", color="C0", label="closed form")
axes.errorbar(scales, rows[2], 1.96 * rows[3], fmt="o", color="C2", label="bridge sampling")
axes.errorbar(scales, rows[0], 1.96 * rows[1], fmt="^", color="C3", label="harmonic mean, with its own error bar")
axes.set(xscale="log", xlabel="standard deviation of the prior (cm)", ylabel="log evidence (nats)")
axes.legend()

# %%
# Try it on yours
# ---------------
# You have draws already? Use them, but not for a harmonic mean of the likelihood.
#
# .. code-block:: python
#
#    draws = bk.sample(target, num_chains=8, seed=0)  # or the draws that you have
#    ways = evidence.compare(target, ["bridge_sampling", "learned_harmonic_mean"], draws=draws)
#    print(ways.verdict, ways.verdict.untrusted)
#
# Look at whether both are trusted and agree. If the posterior has several modes, neither can see those that the chains
# did not visit: take a ladder, sequential Monte Carlo or nested sampling.
#
# Where to go next: :doc:`eight_schools_by_every_estimator` has all estimators side by side, :doc:`empirical_bayes`
# chooses a prior's scale by its evidence, :doc:`nested_sampling` is a failure of another kind.
