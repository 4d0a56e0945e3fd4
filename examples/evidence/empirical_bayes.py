r"""
Empirical Bayes: choosing a prior's scale by the marginal likelihood
====================================================================

**What you will learn:** how to choose the scale of a prior by maximising the evidence, what that costs beside a prior
on the scale, and when it fails.

The data are 442 patients with diabetes: ten measurements each, and how far the disease had progressed a year later
:cite:p:`efron2004`. How far should the ten coefficients be shrunk towards zero? A ridge regression asks
cross-validation. The evidence answers without leaving anything out, and with a normal likelihood it has a closed form,
so that it can be seen how good estimates are.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import halfcauchy, multivariate_normal, norm
from sklearn.datasets import load_diabetes

import bayeskit as bk
from bayeskit import exact
from bayeskit.gallery import is_small
from bayeskit.inference import evidence

# %%
# The model
# ---------
# Response and predictors are standardised. Coefficients have a normal prior of one scale :math:`\lambda`, which is what
# we want to know; the noise is taken to be what least squares leaves, as if that were known.
#
# .. math::
#    b \sim N(0, \lambda^2 I), \quad y \sim N(X b, \sigma^2 I)
#    \qquad\Rightarrow\qquad y \sim N(0, \sigma^2 I + \lambda^2 X X^\top).
#
# If no scale is given, it gets a prior of its own, a half-Cauchy distribution.

x, y = load_diabetes(return_X_y=True)
x, y = x / x.std(0), (y - y.mean()) / y.std()
noise = float(np.std(y - x @ np.linalg.lstsq(x, y)[0]))


def regression(x, y, noise, scale=None):
    if scale is None:
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros_like(x[0]), 1.0).to_event(1))
    with pyro.plate("patients", len(x)):
        pyro.sample("y", dist.Normal(x @ (scale * b), noise), obs=y)


def make_target(x, y, *numbers):
    return bk.Target.from_pyro(regression, *(torch.as_tensor(a, dtype=torch.float64) for a in (x, y, *numbers)))


def closed_form(x, y, noise, scale):
    return exact.linear_regression(x, y, noise_sd=noise, prior_sd=scale).log_evidence


# %%
# Before the data
# ---------------
# The scale says how much of the progress the measurements are expected to explain. The prior predictive of that share,
# :math:`R^2`, at three scales: a small one thinks that measurements are useless, a large one that they say everything.

rng = np.random.default_rng(0)
prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
for scale, style in ((0.05, "-"), (0.2, "--"), (1.0, ":")):
    explained = (x @ rng.normal(0, scale, (10, 4000))).var(0)
    share = explained / (explained + noise**2)
    axes.hist(share, bins=50, range=(0, 1), histtype="step", linestyle=style, linewidth=2, label=f"scale {scale}")
axes.axvline(1 - noise**2, color="C6", label="least squares")
axes.set(xlabel="share of the variance that is explained, $R^2$", ylabel="draws from the prior")
axes.legend(loc=(0.6, 0.4))

# %%
# An exact twin
# -------------
# One predictor and six patients: the evidence is an integral over one coefficient. Quadrature, the normal density of
# all responses, and the determinants by which the package's own case has it have to agree, and an estimator has to find
# them.

few, first = y[:6], x[:6, 2:3]


def joint(b):
    return norm.pdf(b, 0, 0.5) * np.exp(norm.logpdf(few, first[:, 0] * b, noise).sum())


by_quadrature = math.log(quad(joint, -8, 8, points=[0], epsabs=0, epsrel=1e-12)[0])
by_density = multivariate_normal(cov=noise**2 * np.eye(6) + 0.5**2 * first @ first.T).logpdf(few)
by_determinants = closed_form(first, few, noise, 0.5)
print(f"quadrature {by_quadrature:.9f}, normal density {by_density:.9f}, determinants {by_determinants:.9f}")
assert abs(by_quadrature - by_density) < 1e-9
assert abs(by_quadrature - by_determinants) < 1e-9
small = make_target(first, few, noise, 0.5)
z = evidence.laplace_importance_sampling(small)
print(z)
assert z.trusted and abs(z.log_evidence - by_quadrature) < 4.5 * z.standard_error

# %%
# The fit
# -------
# The evidence at a grid of scales, by bridge sampling from posterior draws. Where there is a closed form nobody would
# do that, but a logistic regression has none and needs the same three lines.

num_warmup, num_samples = (100, 120) if is_small() else (200, 500)
size = {"num_chains": 8, "num_warmup": num_warmup, "num_samples": num_samples, "progress": False}
scales = np.geomspace(0.02, 5, 3 if is_small() else 11)
found = []
for seed, scale in enumerate(scales):
    target = make_target(x, y, noise, scale)
    z = evidence.bridge_sampling(target, bk.sample(target, seed=seed, **size), seed=seed)
    exactly = closed_form(x, y, noise, scale)
    print(f"scale {scale:6.3f}: log evidence {z.log_evidence:9.4f} +- {z.standard_error:.4f}, exactly {exactly:9.4f}")
    assert z.trusted and abs(z.log_evidence - exactly) < 4.5 * z.standard_error
    found.append(z)
worst = max(z.diagnostics["r_hat"] for z in found)
print(f"largest R-hat of all runs {worst:.3f}")
assert worst < 1.05

# %%
# The largest evidence of the closed form is the empirical Bayes estimate.

best = minimize_scalar(lambda log_scale: -closed_form(x, y, noise, math.exp(log_scale)), bracket=(-3, -1))
assert best.success
best_scale, best_evidence = math.exp(best.x), -best.fun
print(f"best scale {best_scale:.4f}, log evidence there {best_evidence:.4f}")

# %%
# What it says
# ------------
# With a prior on the scale, the posterior averages over it. Its evidence is what a comparison with other models may
# use. The maximum is not: it has looked at the data to choose the prior, and then asks how well that prior foretells
# the same data, which counts them twice. For one scale the difference is as large as a log Bayes factor that
# :cite:t:`kass1995` call positive evidence, and it grows with every number that is chosen so.

full_target = make_target(x, y, noise)
draws = bk.sample(full_target, target_acceptance=0.95, **size)
full = evidence.bridge_sampling(full_target, draws)
density = np.vectorize(lambda scale: math.exp(closed_form(x, y, noise, scale) - best_evidence) * halfcauchy.pdf(scale))
mass = quad(density, 0, 1, points=[best_scale], epsabs=0, epsrel=1e-8)[0] + quad(density, 1, np.inf)[0]
exactly = best_evidence + math.log(mass)
print(f"log evidence of the whole {full.log_evidence:.4f} +- {full.standard_error:.4f}, exactly {exactly:.4f}")
print(f"the maximum promises {best_evidence - exactly:.3f} nats more")
assert full.trusted and abs(full.log_evidence - exactly) < 4.5 * full.standard_error

sampled = draws.values()["scale"].flatten().numpy()
low, high = np.quantile(sampled, [0.05, 0.95])
print(f"the scale is {best_scale:.3f} by empirical Bayes, and with 90 % probability between {low:.2f} and {high:.2f}")

figure = Figure(figsize=(7, 5), layout="constrained")
curve, posterior = figure.subplots(2, sharex=True)
grid = np.geomspace(scales[0], scales[-1], 200)
curve.plot(grid, [closed_form(x, y, noise, scale) for scale in grid], "--", color="C0", label="closed form")
values, halves = [z.log_evidence for z in found], [1.96 * z.standard_error for z in found]
curve.errorbar(scales, values, halves, fmt="o", color="C1", label="bridge sampling")
curve.axvline(best_scale, color="C6", linestyle=":", label="empirical Bayes")
curve.set(xscale="log", ylabel="log evidence (nats)")
curve.legend()
posterior.hist(sampled, bins=grid[::4], density=True, color="C5", label="draws")
posterior.plot(grid, density(grid) / mass, color="C0", label="quadrature")
posterior.axvline(best_scale, color="C6", linestyle=":")
posterior.set(xlabel=r"scale $\lambda$ of the coefficients' prior", ylabel="posterior density")
posterior.legend()

# %%
# A failure on purpose
# --------------------
# Ten coefficients tell their scale. Eight schools hardly do: the evidence of the spread :math:`\tau` of their effects
# is highest at zero, so that empirical Bayes is sure that all schools are alike. The posterior is not.

schools = exact.get("eight_schools")
effects, errors = (a.numpy() for a in schools.args[:2])
spreads = np.linspace(0, 25, 251)
heights = [multivariate_normal(cov=25 + np.diag(errors**2 + tau**2)).logpdf(effects) for tau in spreads]
mean = float(schools.posterior_mean["tau"])
print(f"spread: the evidence is largest at {spreads[np.argmax(heights)]:.1f}, the posterior mean is {mean:.1f} points")
assert np.argmax(heights) == 0

# %%
# Try it on yours
# ---------------
# Leave the scale of your prior an argument or a site of the model. With few data, sample it; with many, its maximum is
# nearly as good and needs no chains. :func:`~bayeskit.inference.evidence.maximize` finds it without a closed form.
#
# .. code-block:: python
#
#    found = evidence.maximize(full_target, over="scale", seed=0)
#    print(found, found.trusted, found.warnings)
#
# Look at the warnings: a maximum at the edge, as that of eight schools, is reported there. For a Bayes factor use the
# evidence of the model with a prior on the scale, not the maximum.
#
# Where to go next: :doc:`eight_schools_by_every_estimator` has the evidence of the whole hierarchy,
# :doc:`learning_to_learn` estimates a hyperparameter where there is no closed form, with its standard error,
# :doc:`/gallery/loss_based_updates/evidence_is_cross_validation` says what the evidence has to do with leaving out
# data.
