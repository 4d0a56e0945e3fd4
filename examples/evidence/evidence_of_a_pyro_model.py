r"""
Bayes factor of two Pyro models: the marginal likelihood in a few lines
=======================================================================

**What you will learn:** how to get the marginal likelihood of a Pyro model, and from two models a Bayes factor with an
error bar, in a few lines.

Thirty-two students of economics either took part in a new kind of course, the personalized system of instruction (PSI),
or did not, and the grades of eleven improved :cite:p:`spector1980`. Their grade point average and the score of an
earlier test (TUCE) are known. Did the course help?
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import dblquad
from scipy.special import expit
from scipy.stats import norm
from statsmodels.datasets import spector

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence

# %%
# The model
# ---------
# A logistic regression. Both scores have a standard deviation of one, and PSI is -1/2 or 1/2, so that its coefficient
# is the log odds ratio of taking part:
#
# .. math::
#
#    P(y_i = 1) = \frac{1}{1 + \exp(-b_0 - x_i^\top b)}, \qquad b_0 \sim N(0, 2^2), \qquad b_j \sim N(0, s_j^2).
#
# Any Pyro model will do: its latent sites are found by running it. The rival model is the same function of two
# columns instead of three.

table = spector.load_pandas().data
scores = torch.tensor(table[["GPA", "TUCE"]].to_numpy(), dtype=torch.float64)
scores = (scores - scores.mean(0)) / scores.std(0)
course = torch.tensor(table["PSI"].to_numpy(), dtype=torch.float64) - 0.5
improved = torch.tensor(table["GRADE"].to_numpy(), dtype=torch.float64)


def grades(covariates: torch.Tensor, scales: torch.Tensor, improved: torch.Tensor) -> None:
    intercept = pyro.sample("intercept", dist.Normal(covariates.new_zeros(()), 2.0))
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros_like(scales), scales).to_event(1))
    with pyro.plate("students", len(improved)):
        pyro.sample("improved", dist.Bernoulli(logits=intercept + covariates @ slopes), obs=improved)


everything = torch.column_stack([scores, course])
scales = torch.full((3,), 2.0, dtype=torch.float64)
models = {
    "without PSI": bk.Target.from_pyro(grades, scores, scales[:2], improved),
    "with PSI": bk.Target.from_pyro(grades, everything, scales, improved),
}
print(models["with PSI"])

# %%
# Before the data
# ---------------
# How many of the 32 students would improve, according to the prior? It thinks that any number is possible, those in the
# middle most of all, and that eleven is nothing special.

prior = models["with PSI"].constrain(models["with PSI"].sample_prior(4000, seed=0))
chance = torch.sigmoid(prior["intercept"][:, None] + prior["slopes"] @ everything.mT)
number = torch.bernoulli(chance, generator=torch.Generator().manual_seed(0)).sum(1)
prior_predictive = Figure(figsize=(7, 3.2), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(number, bins=np.arange(34) - 0.5, density=True, alpha=0.7, color="C0")
axes.axvline(float(improved.sum()), color="C1", linestyle="--", label="observed")
axes.set(xlabel="students whose grade improves", ylabel="prior probability")
axes.legend(frameon=False)

# %%
# An exact twin
# -------------
# Eight students and PSI alone: two coefficients, over which an adaptive quadrature can integrate. It is given the
# formula above and knows nothing of Pyro.

few = torch.arange(0, 32, 4)


def integrand(slope: float, intercept: float) -> float:
    p = expit(intercept + slope * course[few].numpy())
    likelihood = np.where(improved[few].numpy() == 1, p, 1 - p).prod()
    return likelihood * norm.pdf(intercept, scale=2.0) * norm.pdf(slope, scale=2.0)


exact = math.log(dblquad(integrand, -16, 16, -16, 16, epsabs=1e-8 if is_small() else 1e-12)[0])
twin = bk.Target.from_pyro(grades, course[few, None], scales[:1], improved[few])
size = {"num_warmup": 100, "num_samples": 200} if is_small() else {"num_warmup": 500, "num_samples": 2000}
z = evidence.bridge_sampling(twin, bk.sample(twin, 8, seed=0, progress=False, **size), seed=0)
print(f"eight students: {z}, by quadrature {exact:.4f}")
assert z.trusted and abs(z.log_evidence - exact) < 4.5 * z.standard_error

# %%
# The fit
# -------
# Draws from the posterior, and a bridge from them to the evidence. Importance sampling around the mode uses no chains:
# that the two agree is worth more than any diagnostic.

found = {}
for seed, (name, target) in enumerate(models.items(), 1):
    draws = bk.sample(target, num_chains=8, seed=seed, progress=False, **size)
    z = evidence.bridge_sampling(target, draws, seed=seed)
    other = evidence.laplace_importance_sampling(target, seed=seed)
    print(f"{name:>11}: {z}")
    print(f"{'':>11}  {other}")
    print(f"{'':>11}  R-hat {z.diagnostics['r_hat']:.4f}, effective draws {z.diagnostics['effective_draws']:.0f}")
    assert z.trusted and z.diagnostics["r_hat"] < 1.05 and z.diagnostics["effective_draws"] > 400
    difference = z.log_evidence - other.log_evidence
    assert other.trusted and abs(difference) < 4.5 * math.hypot(z.standard_error, other.standard_error)
    found[name] = z, draws

# %%
# What it says
# ------------
# The two runs have different seeds and are independent, so the variances of their log evidences add up. The Bayes
# factor is in favour of the course, and its Monte Carlo error is negligible: what matters is the prior. The figure
# shows the factor for other prior standard deviations of PSI's coefficient. A narrow one makes the two models the same,
# and one that allows for absurdly large effects is a bet against moderate ones.

(with_psi, draws), (without, _) = found["with PSI"], found["without PSI"]
factor = with_psi.log_evidence - without.log_evidence
error = math.hypot(with_psi.standard_error, without.standard_error)
p = float(expit(factor))
print(f"log Bayes factor for PSI: {factor:.3f} +- {error:.3f}")
print(f"probability that it matters, at even odds beforehand: {p:.4f} +- {p * (1 - p) * error:.4f}")
slope = draws.values()["slopes"][..., 2]
print(f"log odds ratio of PSI: posterior mean {float(slope.mean()):.2f}, standard deviation {float(slope.std()):.2f}")
assert factor > 4.5 * error

widths = [0.25, 2.0, 16.0] if is_small() else [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
factors = []
for width in widths:
    prior_scales = scales.new_tensor([2.0, 2.0, width])
    wider = bk.Target.from_pyro(grades, everything, prior_scales, improved)
    factors.append(evidence.laplace_importance_sampling(wider, 4096, seed=2).log_evidence - without.log_evidence)
figure = Figure(figsize=(7, 3.4), layout="constrained")
axes = figure.subplots()
axes.semilogx(widths, factors, "o-", color="C0", base=2)
axes.axhline(0.0, color="0.5", linestyle="--", linewidth=1)
axes.set_xticks(widths, [f"{width:g}" for width in widths])
axes.set(xlabel="prior standard deviation of the log odds ratio", ylabel="log Bayes factor for PSI (nats)")

# %%
# A failure on purpose
# --------------------
# A prior that is meant to say nothing decides the question. With a standard deviation of 1000 the posterior of the
# slope is the same as with 16, but the model bets on effects that no course has, and the Bayes factor now speaks
# against the course. Each further factor of ten costs :math:`\log 10` nats. The estimates are right and trusted; the
# prior is wrong.

vague = []
for width in (1000.0, 10_000.0):
    model = bk.Target.from_pyro(grades, everything, scales.new_tensor([2.0, 2.0, width]), improved)
    vague.append(evidence.laplace_importance_sampling(model, 4096, seed=3))
    factor = vague[-1].log_evidence - without.log_evidence
    print(f"prior standard deviation {width:6.0f}: log Bayes factor {factor:+.3f} +- {vague[-1].standard_error:.3f}")
    assert vague[-1].trusted and factor < -4.5 * math.hypot(vague[-1].standard_error, without.standard_error)
cost, error = vague[0].log_evidence - vague[1].log_evidence, math.hypot(*(z.standard_error for z in vague))
assert abs(cost - math.log(10)) < 4.5 * error + 1e-3

# %%
# Try it on yours
# ---------------
# Replace the two models by yours; any Pyro model without discrete sites will do. Three lines give the evidence, and
# :func:`bayeskit.compare_models` gives all factors at once.
#
# .. code-block:: python
#
#    target = bk.Target.from_pyro(grades, everything, scales, improved)  # your model and its arguments
#    z = evidence.bridge_sampling(target, bk.sample(target, num_chains=8, seed=0), seed=0)
#    print(z, z.trusted, z.warnings)
#
# Look at ``z.trusted`` first, and then at the prior: repeat the factor with priors half and twice as wide. For a
# posterior of several modes take sequential Monte Carlo or nested sampling instead.
#
# Where to go next: :doc:`eight_schools_by_every_estimator` computes one evidence in every way there is,
# :doc:`galaxy_mixture` has a posterior of many modes, and :doc:`robust_regression` lets errors have heavy tails.
