r"""
Marginal likelihood of a Pyro model by every estimator, and a Bayes factor: eight schools
=========================================================================================

**What you will learn:** how to compute one marginal likelihood in every way there is, how to read the verdict, how to
find out for yourself whether an error bar is right, and what a Bayes factor of two models owes to their priors.

Coaching for a test was tried in eight schools :cite:p:`rubin1981`. From each school there is an estimated effect, in
points of the test, and its standard error. How probable are these eight numbers under the hierarchical model that
everybody uses for them? Quadrature knows the answer to nine digits, so that each estimator can be told right from
wrong.
"""

# sphinx_gallery_thumbnail_number = -1
import math
import textwrap
import warnings

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.stats import chi2, halfcauchy, multivariate_normal

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import SamplingWarning
from bayeskit.gallery import is_small
from bayeskit.inference import evidence

# %%
# The model
# ---------
# School :math:`j` has an effect :math:`\theta_j`, and effects scatter about a common mean. For a spread such as
# :math:`\tau`, :cite:t:`gelman2006` recommends the half-Cauchy distribution; the scales are those with which the
# example has since become customary:
#
# .. math::
#    \mu \sim N(0, 5^2), \qquad \tau \sim \text{half-Cauchy}(5), \qquad \theta_j \sim N(\mu, \tau^2), \qquad
#    y_j \sim N(\theta_j, s_j^2).
#
# The code writes :math:`\theta_j = \mu + \tau \eta_j` with :math:`\eta_j \sim N(0, 1)`, which is the same model in
# coordinates that are easier to sample. The spread :math:`\tau` may be given; the twin below makes use of that.

effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
errors = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def eight_schools(effects, errors, spread=None, width=5.0):
    mu = pyro.sample("mu", dist.Normal(0.0, width))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0), obs=spread)
    with pyro.plate("schools", len(errors)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("effect", dist.Normal(mu + tau * eta, errors), obs=effects)


target = bk.Target.from_pyro(eight_schools, effects, errors)
print(target)

# %%
# Before the data
# ---------------
# The same function without data draws data. Most imagined schools do what schools can do; the tail of the half-Cauchy
# also allows effects that no coaching has.

predict = pyro.infer.Predictive(eight_schools, num_samples=2000, parallel=True)
with torch.random.fork_rng():
    torch.manual_seed(0)
    imagined = predict(None, errors)["effect"]
prior_predictive = Figure(figsize=(7, 3.2), layout="constrained")
axes = prior_predictive.subplots()
schools = torch.arange(1, 9)
for share, width in ((0.9, 2.0), (0.5, 6.0)):
    low, high = imagined.quantile(imagined.new_tensor([0.5 - share / 2, 0.5 + share / 2]), 0)
    axes.vlines(schools, low, high, color="C5", linewidth=width, label=f"{share:.0%} of the prior predictive")
axes.plot(schools, effects, "o", color="C0", label="observed")
axes.set(xlabel="school", ylabel="effect (points)")
prior_predictive.legend(loc="outside upper center", ncols=3)

# %%
# An exact twin
# -------------
# If the spread :math:`\tau` is known everything is normal, and
# :math:`y \sim N(0, 5^2 \mathbf 1 \mathbf 1^\top + \mathrm{diag}(s^2 + \tau^2))`: the evidence has a closed form. The
# same Pyro model with ``spread=5`` has to have it. (The density of the spread itself then counts as data.)


def log_density_given(tau: float, width: float = 5.0) -> float:
    covariance = width**2 * torch.ones(8, 8).double() + torch.diag(errors**2 + tau**2)
    return multivariate_normal(cov=covariance.numpy()).logpdf(effects.numpy())


def log_evidence_given(tau: float) -> float:
    return log_density_given(tau) + halfcauchy.logpdf(tau, scale=5)


twin = bk.Target.from_pyro(eight_schools, effects, errors, torch.tensor(5.0, dtype=torch.float64))
by_importance = evidence.laplace_importance_sampling(twin)
print(f"spread known: closed form {log_evidence_given(5.0):.5f}, {by_importance}")
error = abs(by_importance.log_evidence - log_evidence_given(5.0))
assert by_importance.trusted and error < 4.5 * by_importance.standard_error

# %%
# Integrated over the spread, one dimension, the closed form gives the evidence of the whole model, the case
# ``eight_schools`` of :mod:`bayeskit.exact`, which has its own quadrature.

case = exact.get("eight_schools")
truth = math.log(quad(lambda tau: math.exp(log_evidence_given(tau)), 0, math.inf, epsabs=0, epsrel=1e-11)[0])
print(f"log evidence by quadrature {truth:.9f}, the package's case {case.log_evidence:.9f}")
assert abs(truth - case.log_evidence) < 1e-9

# %%
# The fit
# -------
# One call runs all methods. Posterior draws, the tempered ladder, the mode and the fits are made once and shared.

budget = (
    evidence.Budget(8, 100, 150, 16, 4, 60, 120, num_particles=16, num_replicates=16, num_live=40)
    if is_small()
    else evidence.Budget(num_chains=32, ladder_chains=16, ladder_samples=500, num_live=300)
)
slow = ("learned_harmonic_mean", "flow_importance_sampling", "generalised_stepping_stone", "nested_sampling")
methods = [name for name in evidence.METHODS if name not in slow] if is_small() else "all"
with warnings.catch_warnings():
    warnings.simplefilter("ignore", SamplingWarning)  # of divergent transitions; their share is printed below
    ways = evidence.compare(target, methods, seed=0, budget=budget, progress=False)
table = ways.to_pandas().dropna(subset="log_evidence")
table["off by"] = table["log_evidence"] - truth
columns = ["method", "log_evidence", "standard_error", "off by", "trusted"]
print(table[columns].to_string(index=False, float_format="%.4f"))

# %%
# The posterior run behind half of them has converged, and hardly a transition diverged. Of those that trust themselves
# none is off by three of its standard errors; naive Monte Carlo and adaptive sequential Monte Carlo are off by just
# over two.

facts = ways["bridge_sampling"].diagnostics
print(f"largest R-hat {facts['r_hat']:.3f}, smallest effective sample size {facts['effective_draws']:.0f}")
print(f"divergent transitions: {facts['diverging']:.3%}")
assert facts["r_hat"] < 1.05 and facts["effective_draws"] > 100
for estimate in ways:
    assert not estimate.trusted or abs(estimate.log_evidence - truth) < 4.5 * estimate.standard_error, str(estimate)

# %%
# Who mistrusts itself says why. The maxima are no integrals; the lower bound is a bound; the harmonic means depend on
# places where posterior draws hardly ever come. Methods for positive parameters do not apply where the mean can be
# negative, nor does Chib's where nobody has given the full conditionals.

for method, reason in ways.verdict.untrusted.items():
    print(textwrap.shorten(f"{method}: {reason}", 110, placeholder=" ..."))
print(f"does not apply: {', '.join(ways.refused)}")

# %%
# A failure on purpose
# --------------------
# A maximum is no integral. That of the likelihood is far above the evidence, that of the posterior density depends on
# the coordinates, and neither has an error bar. Software still reports both as evidence, with or without a penalty for
# the number of parameters.

for method in ("maximum_posterior", "maximum_likelihood"):
    z = ways[method]
    print(f"{method}: {z.log_evidence:.2f}, {z.log_evidence - truth:+.2f} nats off, trusted: {z.trusted}")
    assert not z.trusted and abs(z.log_evidence - truth) > 1

# %%
# What it says
# ------------
# Estimates that share draws are not independent, so the verdict does not average them: the most precise of those that
# trust themselves speaks for the others, if most of them agree with it. Ways that have nothing in common but the model
# agree here, and they are right.

verdict = ways.verdict
print(f"log evidence {verdict.log_evidence:.4f} +- {verdict.standard_error:.4f}, exactly {truth:.4f}")
print(verdict)
assert verdict.is_agreed and abs(verdict.log_evidence - truth) < 4.5 * verdict.standard_error
figure = Figure(figsize=(8, 9), layout="constrained")
ways.plot(reference=truth, ax=figure.subplots())

# %%
# A rival says that coaching does the same in every school, which is a spread of zero. The difference of the two log
# evidences is the log Bayes factor: eight estimates with such standard errors cannot tell. And a prior that is meant to
# say nothing decides the question: each factor of ten in the width of the common mean costs its model :math:`\log 10`
# nats, where the posterior no longer changes. The estimates are right; the prior is wrong.


def pooled(effects, errors, width):
    mu = pyro.sample("mu", dist.Normal(0.0, width))
    with pyro.plate("schools", len(errors)):
        pyro.sample("effect", dist.Normal(mu, errors), obs=effects)


for width in (5.0, 1000.0, 10_000.0):
    rival = bk.Target.from_pyro(pooled, effects, errors, torch.tensor(width, dtype=torch.float64))
    z = evidence.laplace_importance_sampling(rival)
    factor, error = z.log_evidence - verdict.log_evidence, math.hypot(z.standard_error, verdict.standard_error)
    print(f"the same in all schools, prior width {width:5.0f}: log Bayes factor {factor:+.3f} +- {error:.3f}")
    assert z.trusted and abs(z.log_evidence - log_density_given(0.0, width)) < 4.5 * z.standard_error + 1e-6
    assert (factor > 4.5 * error) == (width < 1000)

# %%
# Are the error bars right?
# -------------------------
# One table proves little: an error bar is a statement about repetitions. ``calibrate`` repeats methods on fresh draws
# of a problem whose answer is known. If an error bar is right, the sum of squares of the standardised errors follows,
# nearly, a chi-squared distribution with as many degrees of freedom as there are repetitions. In the figure a dot is a
# repetition, hollow if it was not trusted; what is more than six standard errors off stands at the edge.

replicates = 2 if is_small() else 60
short = evidence.Budget(num_chains=4, num_warmup=150, num_samples=250)
methods = ["harmonic_mean", "bridge_sampling"]
found = evidence.calibrate(methods, case, replicates, budget=short, progress=False)
columns = ["method", "bias", "mean_standard_error", "sd_of_z", "coverage_95", "trusted"]
print(found.to_pandas()[columns].to_string(index=False, float_format="%.3f"))
square = float((found.z("bridge_sampling") ** 2).sum())
assert 1e-5 < chi2.sf(square, replicates) < 1 - 1e-5
calibration = Figure(figsize=(8, 2.6), layout="constrained")
axes = found.plot(ax=calibration.subplots())
axes.set_title("eight schools, repeated")
for text in axes.texts:  # the numbers of those beyond the edge
    text.set_text(text.get_text().replace(" ›", "\nbeyond 6"))
axes.patches[0].set_label("95 % if errors are right")
axes.legend(loc="lower right", frameon=False, fontsize="small")

# %%
# Try it on yours
# ---------------
# Replace ``target`` by your model. The budget decides how long it takes; all methods share one posterior run.
#
# .. code-block:: python
#
#    budget = evidence.Budget(num_chains=8, num_warmup=200, num_samples=500)
#    ways = evidence.compare(target, ["bridge_sampling", "laplace_importance_sampling"], budget=budget, seed=0)
#    print(ways.verdict)
#
# An alignment and a tree are a Pyro model as well: ``bayeskit evidence primates`` computes the nineteen ways that
# :cite:t:`fourment2020` compared, and
#
# .. code-block:: python
#
#    from bayeskit.models.phylogenetics import JC69, TreeModel, primates
#
#    target = bk.Target.from_pyro(TreeModel(*primates(), substitution=JC69()))
#    print(evidence.gamma_laplus_importance_sampling(target))
#
# Look at ``ways.verdict.is_agreed`` and at ``ways.verdict.untrusted``, which has the reason of every method that
# mistrusts itself. If only methods that share draws agree, add one that does not use chains.
#
# Where to go next: :doc:`harmonic_mean_of_a_normal` shows why the harmonic mean fails, :doc:`nested_sampling` is on
# posteriors where most ways fail, :doc:`chib_radiata_pine` and
# :doc:`robust_regression` compare regressions.
