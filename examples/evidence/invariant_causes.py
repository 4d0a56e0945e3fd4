r"""
Invariant causal prediction by Bayes factors: causes whose mechanism stays the same
===================================================================================

**What you will learn:** how data from several environments say which predictors are causes, by the evidence that a
regression is the same in all of them, and what the evidence says when only a part of the mechanism stays.

An effect can predict its cause as well as a cause predicts its effect. Where circumstances change, they differ: how a
response follows from its causes stays as it is, and how it is guessed from its effects does not
:cite:p:`peters2016`. The data are made from the example of invariant risk minimisation :cite:p:`arjovsky2019`, so that
what is found can be checked.
"""

# sphinx_gallery_thumbnail_number = -1
import math
import warnings

import numpy as np
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import invgamma

from bayeskit import exact
from bayeskit.gallery import is_small
from bayeskit.workflows import RegressionPrior, invariant_subsets

# %%
# The model
# ---------
# A cause, a response and an effect, in environments :math:`e` of which each has its own spread :math:`s_e`:
#
# .. math::
#
#    x_1 \sim N(0, s_e^2), \qquad y \sim N(x_1, r_e^2), \qquad x_2 \sim N(y, t_e^2).
#
# As long as :math:`r_e = 1` everywhere, :math:`p(y \mid x_1)` is the same in all environments. For every subset
# :math:`S` of the predictors, ``invariant_subsets`` compares regressions of :math:`y` on :math:`x_S` that have
# coefficients and noise in common, only coefficients, or neither.

spreads = np.array([0.5, 1.0, 2.0])
names = ["x1", "x2"]


def three_environments(num_rows, noise, noise_of_effect, seed=0):
    rng = np.random.default_rng(seed)
    environment = np.repeat([0, 1, 2], num_rows)
    cause = spreads[environment] * rng.standard_normal(3 * num_rows)
    y = cause + np.broadcast_to(noise, 3)[environment] * rng.standard_normal(3 * num_rows)
    effect = y + np.broadcast_to(noise_of_effect, 3)[environment] * rng.standard_normal(3 * num_rows)
    return np.stack([cause, effect], 1), y, environment


# %%
# Before the data
# ---------------
# Responses from the prior, half of them with one mechanism, half with one for each environment. Twenty rows of each
# are enough for the evidence to tell which is which nearly always. (That no mechanism is shared is a warning, but here
# it is on purpose for half of the data.)

prior = RegressionPrior(coefficient_sd=1.0, noise_shape=2.0, noise_scale=1.0)
rng = np.random.default_rng(1)
predictor, environment = rng.standard_normal((60, 1)), np.repeat([0, 1, 2], 20)
factors = {"one mechanism": [], "one for each": []}


def by_this_prior(*data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return invariant_subsets(*data, prior=prior, standardize=False)


count = 30 if is_small() else 150
for _ in range(count):
    for kind, found in factors.items():
        size = 1 if kind == "one mechanism" else 3
        sd = np.resize(np.sqrt(1.0 / rng.gamma(2.0, size=size)), 3)[environment]
        shift, slope = (np.resize(rng.standard_normal(size), 3)[environment] for _ in range(2))
        y = sd * (shift + slope * predictor[:, 0] + rng.standard_normal(60))
        found.append(by_this_prior(predictor, y, environment).of("x0").log_bayes_factor)
right = np.mean([np.array(factors["one mechanism"]) > 0, np.array(factors["one for each"]) < 0])
print(f"the log Bayes factor has the right sign for {right:.0%} of {2 * count} data sets")
assert right > 0.8

prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
for (kind, found), style in zip(factors.items(), ("-", "--"), strict=True):
    axes.hist(found, bins=40, range=(-80, 10), histtype="step", linestyle=style, linewidth=2, label=kind)
axes.set(xlabel="log Bayes factor of one mechanism (nats)", ylabel="data sets from the prior")
axes.legend(loc="upper left")

# %%
# An exact twin
# -------------
# The evidence of one regression with unknown noise, by quadrature over its standard deviation: given that, it is the
# package's own case of a linear regression.

x, y, environment = three_environments(8, 1.0, spreads)
found = by_this_prior(x, y, environment).of("x0")


def integrand(sd, rows):
    design = np.stack([np.ones(rows.sum()), x[rows, 0]], 1)
    given = exact.linear_regression(design, y[rows], noise_sd=sd, prior_sd=sd).log_evidence
    return math.exp(given + 30) * invgamma.pdf(sd**2, 2, scale=1) * 2 * sd


def by_quadrature(rows):
    return math.log(quad(integrand, 0.01, 20, args=(rows,), points=[0.5, 1, 2], epsabs=0, limit=200)[0]) - 30


shared = by_quadrature(environment >= 0)
separate = sum(by_quadrature(environment == e) for e in range(3))
print(f"shared: {found.shared:.7f}, by quadrature {shared:.7f}")
print(f"separate: {found.separate:.7f}, by quadrature {separate:.7f}")
assert abs(found.shared - shared) < 1e-6 and abs(found.separate - separate) < 1e-6

# %%
# The fit
# -------
# A thousand rows of each environment. Only the cause has a mechanism for all; nothing else is close. The mean of the
# response given nothing is zero everywhere, and so the evidence says that this is shared, without its spread.

num_rows = 1000
x, y, environment = three_environments(num_rows, 1.0, spreads)
found = invariant_subsets(x, y, environment, names=names)
print(found)
assert found.trusted and found.best == ("x1",)
assert found.holds() == "mean shared" and found.holds("x2") == found.holds("x1", "x2") == "nothing shared"

# %%
# What it says
# ------------
# Minus the log Bayes factor by row tends to the mutual information :math:`I(y; e \mid x_S)`, what the environment says
# about the response once :math:`x_S` is known. For normal data it is a difference of logarithms of residual variances.

moments = [np.array([[v, v, v], [v, 2 * v + 1, v + 1], [v, v + 1, v + 1]]) for v in spreads**2]


def log_residual_variance(covariance, subset):
    whole = [*subset, 2]
    return sum(s * np.linalg.slogdet(covariance[np.ix_(w, w)])[1] for s, w in ((1, whole), (-1, whole[:-1])))


for subset in ((0,), (), (1,), (0, 1)):
    each = np.mean([log_residual_variance(one, subset) for one in moments])
    information = 0.5 * (log_residual_variance(np.mean(moments, 0), subset) - each)
    z = found.of(*(names[j] for j in subset))
    print(f"{z}: I(y; e | x) = {information:.4f}, minus log Bayes factor by row {-z.log_bayes_factor / len(y):.4f}")
    assert abs(information + z.log_bayes_factor / len(y)) < 0.03  # the sampling error of a log variance
for name, p in found.column_probabilities.items():
    print(f"{name} is in every subset with a shared mechanism with probability {p:.4f}")

# %%
# Invariant risk minimisation looks for the same coefficients, by a penalty :math:`\lambda` on the gradient of each
# environment's risk. It finds :math:`(1, 0)` in the limit only. And invariance is no promise of a small risk: with the
# noise of the original example, whose variances are 0.04 and 1, in an environment with the variance 100 the plain fit
# is better, because the effect shows much of what the noise was there.


def risk(b, v):
    return v * (1 - b.sum()) ** 2 + v * (1 - b[1]) ** 2 + b[1] ** 2


def penalty(b, v):
    second = np.array([[v, v], [v, 2 * v + 1]])
    return (2 * b @ (second @ b - np.array([v, 2 * v]))) ** 2


weights, paths = (0.0, 1.0, 10.0, 100.0, 1e4), []
for weight in weights:
    fit = minimize(lambda b, w: sum(risk(b, v) + w * penalty(b, v) for v in (0.04, 1.0)), [1.0, 0.0], (weight,))
    paths.append(fit.x)
    print(f"penalty {weight:7.0f}: coefficients ({fit.x[0]:.3f}, {fit.x[1]:.3f}), unseen risk {risk(fit.x, 100.0):.1f}")
known = [(0.658, 0.342), (0.802, 0.289), (0.918, 0.184), (0.975, 0.098), (0.998, 0.023)]
assert np.allclose(paths, known, atol=2e-3)
assert abs(risk(paths[0], 100.0) - 43.4) < 0.2 and abs(risk(paths[-1], 100.0) - 95.4) < 0.2

# %%
# A failure on purpose
# --------------------
# In the original example the noise of the response varies as well, :math:`r_e = s_e`. No mechanism is shared, all
# subsets are rejected, and that of the true cause most clearly. The result says so, and that a mean is left: given
# the cause, but also given nothing, so that a mean alone would identify no cause here.

x, y, environment = three_environments(num_rows, spreads, 1.0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    failed = invariant_subsets(x, y, environment, names=names)
print(failed)
assert len(caught) == 1 and not failed.trusted and failed.best is None
assert "only a mean is shared, that given {x1} or {}, and the noise varies" in failed.warnings[0]
assert failed.holds("x1") == "mean shared" and failed.column_probabilities["x1"] < 0.01

figure = Figure(figsize=(8, 5.4), layout="constrained")
for axes, result, title in zip(figure.subplots(2), (found, failed), ("same noise", "own noise"), strict=True):
    result.plot(axes).set_title(f"{title} of the response in each environment")

# %%
# Try it on yours
# ---------------
# Replace ``x``, ``y`` and the label of each row's environment: a site, a year, an arm of an experiment.
#
# .. code-block:: python
#
#    found = invariant_subsets(x, y, environment, names=names)
#    print(found.best, found.trusted, found.column_probabilities)
#
# Look at ``found.holds("x1")``, which says how much of a mechanism is shared, and at ``found.warnings``. Environments
# have to differ, and not by an intervention on the response itself. With more than about fifteen predictors choose some
# first: all subsets are weighed.
#
# Where to go next: :doc:`/gallery/discrete_latent_variables/seen_against_done` asks what follows from an act,
# :doc:`eight_schools_by_every_estimator` compares regressions that are no longer conjugate.
