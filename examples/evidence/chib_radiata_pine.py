r"""
Chib's method: the marginal likelihood from a Gibbs sampler
===========================================================

**What you will learn:** how to get the evidence from the full conditionals of a Gibbs sampler, which point to evaluate
them at, and how conditionals that are not those of the model are found out.

What tells how strong a piece of wood is? For 42 specimens of radiata pine there are the strength, the density, and the
density adjusted for the resin in it :cite:p:`williams1959`. Two regressions have competed for them since
:cite:t:`carlin1995`; the prior here is that of :cite:t:`friel2012`.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_t
from torch import Tensor

import bayeskit as bk
from bayeskit.errors import ModelError
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import ConjugateBlock, chib

# %%
# The model
# ---------
# The strength :math:`y` is linear in the centred covariate, with intercept and slope :math:`b`,
#
# .. math::
#
#    \tau \sim \mathrm{Gamma}(3, 2 \cdot 300^2), \qquad
#    b \mid \tau \sim N\big(m, (\tau \Lambda)^{-1}\big), \qquad
#    y \mid b, \tau \sim N(D b, \tau^{-1} I), \qquad D = [1, x - \bar x],
#
# where :math:`m = (3000, 185)` and :math:`\Lambda` is diagonal with 0.06 and 6. Given :math:`\tau`, :math:`b` is
# normal; given :math:`b`, :math:`\tau` is gamma distributed. A Gibbs sampler draws from these in turn.

density, strength = bk.exact.radiata_pine("x").args[:2]
adjusted = bk.exact.radiata_pine("z").args[0]
MEAN, PRECISION = density.new_tensor([3000.0, 185.0]), density.new_tensor([0.06, 6.0])
SHAPE, RATE = density.new_tensor(3.0), density.new_tensor(2 * 300.0**2)


def design_of(covariate: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(covariate), covariate - covariate.mean()], 1)


def regression(covariate: Tensor, strength: Tensor) -> None:
    tau = pyro.sample("tau", dist.Gamma(SHAPE, RATE))
    b = pyro.sample("b", dist.Normal(MEAN, (PRECISION * tau).rsqrt()).to_event(1))
    with pyro.plate("specimens", len(strength)):
        pyro.sample("strength", dist.Normal(design_of(covariate) @ b, tau.rsqrt()), obs=strength)


def full_conditionals(covariate: Tensor, strength: Tensor, added: float = 1.0) -> list[ConjugateBlock]:
    design = design_of(covariate)
    precision = PRECISION.diag() + design.mT @ design
    mean = torch.linalg.solve(precision, PRECISION * MEAN + design.mT @ strength)

    def line(others: dict[str, Tensor]) -> dist.MultivariateNormal:
        return dist.MultivariateNormal(mean, precision_matrix=others["tau"][..., None, None] * precision)

    def noise(others: dict[str, Tensor]) -> dist.Gamma:
        misfit = (strength - others["b"] @ design.mT).square().sum(-1)
        misfit = misfit + (PRECISION * (others["b"] - MEAN).square()).sum(-1)
        # The prior of the two coefficients scales with tau, too: that adds one to the shape.
        return dist.Gamma(SHAPE + len(strength) / 2 + added, RATE + misfit / 2)

    return [ConjugateBlock("b", line), ConjugateBlock("tau", noise)]


target = bk.Target.from_pyro(regression, adjusted, strength)

# %%
# Before the data
# ---------------
# Thirty lines from the prior, and the specimens. Most lines rise, for denser wood is expected to be stronger,
# and they are at about the right level.

prior = target.constrain(target.sample_prior(30, seed=0))
prior_predictive = Figure(figsize=(7, 3.4), layout="constrained")
axes = prior_predictive.subplots()
order = adjusted.argsort()
for b in prior["b"]:
    axes.plot(adjusted[order], (design_of(adjusted) @ b)[order], color="C0", alpha=0.4, linewidth=1)
axes.plot(adjusted, strength, "o", color="C1", markersize=4, label="specimens")
axes.set(xlabel="adjusted density (pounds per cubic foot)", ylabel="strength (pounds per sq. inch)")
axes.legend(frameon=False)

# %%
# An exact twin
# -------------
# With :math:`b` and :math:`\tau` integrated out, the strengths are multivariate Student-t, a formula that knows of no
# conditionals. The two are compared on six specimens. Chib's identity needs only one point :math:`(b^*, \tau^*)`:
#
# .. math::
#
#    \log p(y) = \log p(y \mid b^*, \tau^*) + \log p(b^*, \tau^*) - \log p(b^* \mid y) - \log p(\tau^* \mid b^*, y).
#
# The last ordinate is known. The one before is the mean of :math:`p(b^* \mid \tau, y)` over the draws of :math:`\tau`,
# and the only thing that is estimated.


def exact_log_evidence(covariate: Tensor, strength: Tensor) -> float:
    design = design_of(covariate)
    spread = torch.eye(len(strength)) + design @ (design / PRECISION).mT
    return float(multivariate_t(design @ MEAN, RATE / SHAPE * spread, df=2 * float(SHAPE)).logpdf(strength))


few = slice(0, 42, 7)
data = adjusted[few], strength[few]
exact = exact_log_evidence(*data)
num_samples = 300 if is_small() else 3000
z = chib(bk.Target.from_pyro(regression, *data), full_conditionals(*data), num_samples=num_samples, seed=0)
print(f"six specimens: multivariate t {exact:.5f}; {z.log_evidence:.5f} +- {z.standard_error:.5f}")
assert z.trusted and abs(z.log_evidence - exact) < 4.5 * z.standard_error

# %%
# The fit
# -------
# All specimens, both models. By default the point is the posterior mean. The chains start at draws from the prior.

found = {}
for seed, (name, covariate) in enumerate({"density": density, "adjusted density": adjusted}.items(), 1):
    blocks = full_conditionals(covariate, strength)
    z = chib(bk.Target.from_pyro(regression, covariate, strength), blocks, num_samples=num_samples, seed=seed)
    exact = exact_log_evidence(covariate, strength)
    print(f"{name:>16}: {z.log_evidence:.5f} +- {z.standard_error:.5f}, exactly {exact:.5f}")
    facts = ("r_hat", "effective_draws", "pareto_k")
    print(f"{'':>16}  " + ", ".join(f"{key} {z.diagnostics[key]:.4g}" for key in facts))
    assert z.trusted and z.diagnostics["r_hat"] < 1.01 and z.diagnostics["pareto_k"] < 0.7
    assert abs(z.log_evidence - exact) < 4.5 * z.standard_error
    found[name] = z

# %%
# A failure on purpose
# --------------------
# The easiest mistake: to forget that the prior of the coefficients scales with :math:`\tau`. The sampler would run and
# give a number. It is not run, because along each block the conditional has to change as the model does.

try:
    chib(target, full_conditionals(adjusted, strength, added=0.0))
except ModelError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("the conditionals of another model went unnoticed")

# %%
# What it says
# ------------
# The adjusted density wins by far. And the point does not matter to what is estimated, only to the error: within the
# bulk of the posterior the ordinate is a mean of numbers that are much alike, and far outside it is carried by few of
# them. The error is less reliable out there, too: at minus three the estimate is 2.6 of its standard errors off.

one, two = found["density"], found["adjusted density"]
factor, error = two.log_evidence - one.log_evidence, math.hypot(one.standard_error, two.standard_error)
print(f"log Bayes factor for the adjusted density: {factor:.4f} +- {error:.4f}")
print(f"Bayes factor: {math.exp(factor):.0f} +- {math.exp(factor) * error:.0f}")

truth = bk.exact.radiata_pine("z")
sd = truth.posterior_covariance["beta"].sqrt().item()
shifts, estimates = [-2, 0, 2] if is_small() else [-3, -2, -1, 0, 1, 2, 3], []
for shift in shifts:
    b = torch.stack([truth.posterior_mean["alpha"], truth.posterior_mean["beta"] + shift * sd])
    at = {"b": b, "tau": truth.posterior_mean["tau"]}
    z = chib(target, full_conditionals(adjusted, strength), at=at, num_samples=num_samples, seed=10 + shift)
    assert abs(z.log_evidence - truth.log_evidence) < 4.5 * z.standard_error
    estimates.append(z)

figure = Figure(figsize=(7, 3.6), layout="constrained")
axes = figure.subplots()
values, errors = [z.log_evidence for z in estimates], [2 * z.standard_error for z in estimates]
axes.errorbar(shifts, values, yerr=errors, fmt="o", color="C0", capsize=4, label="Chib's method, two standard errors")
axes.axhline(truth.log_evidence, color="C1", linestyle="--", label="exact")
axes.set(xlabel="where the slope is evaluated (posterior sd from its mean)", ylabel="log evidence (nats)")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Write one :class:`~bayeskit.inference.evidence.ConjugateBlock` for each step of your Gibbs sampler: the sites that it
# draws, and a function from all other sites to their distribution. Together the blocks name every site of the model.
#
# .. code-block:: python
#
#    blocks = [ConjugateBlock("b", your_line), ConjugateBlock("tau", your_noise)]
#    z = chib(target, blocks, seed=0)
#    print(z, z.diagnostics["r_hat"], z.diagnostics["pareto_k"])
#
# Look at ``z.trusted`` and at the Pareto shape of the ordinate, which should be below 0.7. Where a full conditional has
# no formula, or the posterior has several modes, take bridge sampling or sequential Monte Carlo.
#
# Where to go next: :doc:`galaxy_mixture` shows a posterior of many modes, of which Chib's method saw one;
# :doc:`eight_schools_by_every_estimator` compares all ways, most of which need no conditionals.
