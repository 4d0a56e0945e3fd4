r"""
Evidence of a mixture model with label switching: how many groups of galaxies?
==============================================================================

**What you will learn:** how the labels of a Pyro mixture are summed out, why its evidence from well-behaved chains can
be wrong by :math:`\log K!`, what to do about it, and how to choose the number of components by evidence.

Eighty-two galaxies in the region of Corona Borealis recede from us at velocities that seem to come in groups
:cite:p:`postman1986`; these are the values of :cite:t:`roeder1990`. How many groups are there? :cite:t:`chib1995`
published evidences for two and three; :cite:t:`neal1999` showed that they were wrong, and why; :cite:t:`richardson1997`
let the number jump.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.special import gammaln, logsumexp
from scipy.stats import betaprime, multivariate_normal, multivariate_t, norm

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import bridge_sampling
from bayeskit.models.discrete.mixtures import (
    GaussianMixture,
    Labels,
    MixturePrior,
    TemperingBudget,
    compare_num_components,
    galaxy_velocities,
    plot_predictive,
    symmetrised_bridge,
)

# %%
# The model
# ---------
# Velocities come from :math:`K` normal distributions. With :math:`R` the range of the data and :math:`m` its middle,
# the prior of Richardson and Green is
#
# .. math::
#
#    p(y_i) = \sum_{k=1}^K w_k \, N(y_i; \mu_k, 1 / \lambda_k), \qquad
#    w \sim \mathrm{Dirichlet}(1, \dots, 1), \qquad \mu_k \sim N(m, R^2),
#
#    \lambda_k \mid c \sim \mathrm{Gamma}(2, c), \qquad c \sim \mathrm{Gamma}(0.2, 10 / R^2).
#
# To which group a galaxy belongs is summed out. Renaming the components changes nothing, so every mode of the posterior
# comes in :math:`K!` copies.

y = galaxy_velocities()  # in 1000 km/s
mixture = GaussianMixture(y, num_components=3)
print(f"{len(y)} galaxies, from {float(y.min()):.1f} to {float(y.max()):.1f} thousand km/s")

# %%
# Before the data
# ---------------
# Five densities drawn from the prior. Its components are anywhere in the range of the data or beyond it, broad or
# narrow; the prior says hardly more than that velocities are of this order.

target = bk.Target.from_pyro(mixture)
x = np.linspace(0.0, 45.0, 600)
prior_predictive = Figure(figsize=(7, 3.2), layout="constrained")
axes = prior_predictive.subplots()
axes.plot(x, mixture.log_density(target.constrain(target.sample_prior(5, seed=3)), x).exp().T)
axes.plot(y, np.full(len(y), -0.01), "|", color="0.3")
axes.set(xlabel="velocity (1000 km/s)", ylabel="density", ylim=(-0.02, 0.5), title="prior densities, and the galaxies")

# %%
# An exact twin
# -------------
# Nine galaxies can be assigned to three groups in :math:`3^9` ways. Where weights, means and precisions have conjugate
# priors, the galaxies of a group are multivariate Student-t, and the groups' sizes Dirichlet-multinomial: the evidence
# is a finite sum.

few = y[[0, 3, 6, 30, 40, 50, 79, 80, 81]].numpy()
conjugate = MixturePrior.conjugate(20.0, 0.02, 3.0, 3.0)  # mean, relative precision, shape and rate of the precisions
log_marginal = {(): 0.0}
for size in range(1, len(few) + 1):
    spread = 3.0 / 3.0 * (np.eye(size) + 1 / 0.02)
    for group in itertools.combinations(range(len(few)), size):
        log_marginal[group] = multivariate_t(np.full(size, 20.0), spread, df=6.0).logpdf(few[list(group)])
terms = []
for assignment in itertools.product(range(3), repeat=len(few)):
    groups = [tuple(i for i, k in enumerate(assignment) if k == component) for component in range(3)]
    sizes = np.array([len(group) for group in groups])
    log_prior = gammaln(3) - gammaln(3 + len(few)) + gammaln(1 + sizes).sum()
    terms.append(log_prior + sum(log_marginal[group] for group in groups))
exact = logsumexp(terms)

# %%
# In a Pyro model of your own, ``infer={"enumerate": "parallel"}`` at the site of the labels does the same: what is left
# is a density of continuous variables. At any point it must be the sum over all labellings, here of two groups.


def two_groups(y: torch.Tensor) -> None:
    share = pyro.sample("share", dist.Beta(y.new_ones(()), 1.0))
    means = pyro.sample("means", dist.Normal(y.new_tensor([10.0, 30.0]), 10.0).to_event(1))
    with pyro.plate("galaxies", len(y)):
        label = pyro.sample("label", dist.Bernoulli(share), infer={"enumerate": "parallel"}).long()
        pyro.sample("y", dist.Normal(means[label], 2.0), obs=y)


enumerated = bk.Target.from_pyro(two_groups, torch.as_tensor(few))
values = {"share": torch.tensor(0.3, dtype=torch.float64), "means": torch.tensor([12.0, 25.0], dtype=torch.float64)}
sums = [
    sum(norm(12.0 + 13.0 * k, 2.0).logpdf(v) + math.log(0.3 if k else 0.7) for k, v in zip(labels, few, strict=True))
    for labels in itertools.product((0, 1), repeat=len(few))
]
at_point = float(enumerated.log_likelihood(enumerated.unconstrain(values)))
print(f"{len(sums)} labellings: log likelihood {logsumexp(sums):.10f}, enumerated {at_point:.10f}")
assert abs(logsumexp(sums) - at_point) < 1e-9

# %%
# The chains of the model of three groups all start at one point, and stay in one of the six modes.

twin = GaussianMixture(few, 3, conjugate)
twin_target = bk.Target.from_pyro(twin)
labels = Labels(twin_target, twin.exchangeable)
start = twin.start(1, seed=0)[0]
size = {"num_warmup": 150, "num_samples": 400} if is_small() else {"num_warmup": 300, "num_samples": 2000}
draws = bk.sample(twin_target, 4, seed=0, initial=start, progress=False, **size)
z = symmetrised_bridge(draws, labels, seed=0)
print(f"nine galaxies: one by one {exact:.4f}; {z}")
assert z.trusted and abs(z.log_evidence - exact) < 4.5 * z.standard_error

# %%
# A failure on purpose
# --------------------
# One of Chib's models has a common variance, and other numbers in its prior. From one draw of one chain all chains stay
# in the same mode. They agree with each other perfectly, and a bridge fitted to them takes that mode for the whole
# posterior: its evidence lacks :math:`\log 3!`. Only a search that starts elsewhere notices. A proposal that is
# averaged over all labellings needs no chain to switch. (Both estimates rest on the same draws. The error of their
# difference is computed as if they did not, which if anything makes it too large.)

chibs_prior = MixturePrior.independent(location=20.0, spread=10.0, shape=3.0, rate=20.0)
chibs = GaussianMixture(y, 3, chibs_prior, equal_scales=True)
target = bk.Target.from_pyro(chibs)
labels = Labels(target, chibs.exchangeable)
size = {"num_warmup": 100, "num_samples": 150} if is_small() else {"num_warmup": 500, "num_samples": 2000}
pilot = bk.sample(target, 1, 150, 50, seed=0, initial=chibs.start(1, seed=1)[0], progress=False)
draws = bk.sample(target, 4, seed=0, initial=pilot.unconstrained[0, -1], progress=False, **size)
plain, right = bridge_sampling(target, draws, seed=0), symmetrised_bridge(draws, labels, seed=0)
difference, error = right.log_evidence - plain.log_evidence, math.hypot(right.standard_error, plain.standard_error)
print(f"R-hat {plain.diagnostics['r_hat']:.3f}, divergent transitions {plain.diagnostics['diverging']:.1%}")
print(f"one mode:  {plain.log_evidence:.3f} +- {plain.standard_error:.3f}, published by Chib (1995): -228.620")
print(f"all modes: {right.log_evidence:.3f} +- {right.standard_error:.3f}, by Neal (1999): -226.803")
print(f"difference {difference:.3f} +- {error:.3f}, log 3! = {math.log(6):.3f}")
print(f"the search says: {plain.warnings[0]}")
assert plain.diagnostics["r_hat"] < 1.05 and not plain.trusted and right.trusted
assert abs(difference - math.log(6)) < 4.5 * error
# Importance sampling without chains gives -226.808 +- 0.007.
assert abs(right.log_evidence + 226.808) < 4.5 * math.hypot(right.standard_error, 0.007)

# %%
# The fit
# -------
# Back to the prior of Richardson and Green, for one to four components. Particles are tempered from the prior to the
# posterior, and those that arrive feed a symmetrised bridge; the two estimates check each other. One component needs
# only one integral, for the mean and the rate :math:`c` integrate out.

sizes = [1, 2] if is_small() else [1, 2, 3, 4]
budget = TemperingBudget(48, 8, 0.7) if is_small() else TemperingBudget(48, 12, 0.7)
found = compare_num_components(y, sizes, budget=budget, progress=False)
print(found)
middle, width = float(y.min() + y.max()) / 2, float(y.max() - y.min())


def integrand(log_precision: float) -> float:
    precision = math.exp(log_precision)
    log_likelihood = multivariate_normal([middle] * len(y), np.eye(len(y)) / precision + width**2).logpdf(y)
    log_prior = betaprime(2.0, 0.2, scale=10 / width**2).logpdf(precision) + log_precision
    return math.exp(log_likelihood + 247.0 + log_prior)


one = math.log(quad(integrand, -8.0, 0.0, epsabs=0.0)[0]) - 247.0
print(f"one component by quadrature: {one:.4f}")
assert abs(found["1"].log_evidence - one) < 4.5 * found["1"].standard_error
assert all(found[name].trusted for name in found)

# %%
# What it says
# ------------
# One or two groups are out of the question. Beyond that the evidence does not name a number: three and four are both
# plausible, as they were in 1997 by reversible jumps, of which three digits are known. Those went on to thirty
# components and found six the most probable by a little; here ``range(1, 7)`` and a full ``TemperingBudget()`` take
# some minutes. On the left, what three groups of one variance make of the data.

published = {3: 0.061, 4: 0.128}  # of all numbers from one to thirty; those of one and two are 0.000
share = {int(name): value for name, value in found.posterior_probabilities.items()}
for fewer in sizes[: len(sizes) // 2]:
    factor, error = found.log_bayes_factor(found.best, str(fewer))
    print(f"log Bayes factor of {found.best} components against {fewer}: {factor:.2f} +- {error:.2f}")
    assert factor > 4.5 * error

figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
plot_predictive(chibs, draws, left)
left.set(xlabel="velocity (1000 km/s)", ylabel="density", title="three groups of one variance")
heights, errors = zip(*share.values(), strict=True)
right.bar(sizes, heights, yerr=errors, color="C0", alpha=0.8, capsize=3, label="here")
total = sum(published.values())
right.plot(list(published), [p / total for p in published.values()], "D", color="C1", label="Richardson and Green")
right.set(xlabel="number of components", xticks=sizes, ylabel="posterior probability", title="of up to four groups")
right.legend(frameon=False, loc="upper left")

# %%
# Try it on yours
# ---------------
# Replace ``y`` by your data, a vector or rows of vectors, and choose the numbers of components to compare.
#
# .. code-block:: python
#
#    found = compare_num_components(y, range(1, 4), budget=TemperingBudget(48, 8, 0.7), seed=0)
#    print(found)
#
# Look at ``trusted`` of every number, and at how much the two estimates of each differ. For a mixture of your own, in
# Pyro, sum the assignments out and pass its exchangeable sites to ``Labels``; an evidence from chains that never switch
# lacks up to :math:`\log K!`. Components in order by a positive difference of their means cannot swap their names.
#
# Where to go next: :doc:`/gallery/discrete_latent_variables/hidden_states_of_growth` has labels that depend on each
# other, :doc:`chib_radiata_pine` shows Chib's method where it is right, and
# :doc:`nested_sampling` a mode that tempering does not find.
