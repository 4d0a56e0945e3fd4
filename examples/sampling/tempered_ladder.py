r"""
Thermodynamic integration and stepping-stone sampling of the marginal likelihood
================================================================================

**What you will learn:** how one tempered run serves several estimators of the evidence, what the integral of
thermodynamic integration looks like, and when a ladder has rungs enough.

The data are the strength of 42 specimens of radiata pine and two measurements of their density, the second one adjusted
for resin :cite:p:`williams1959`. Which of the two explains the strength better?
"""

import math

import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.inference.samplers import sample_ladder

# %%
# The model
# ---------
# Any model will do. The power posterior at inverse temperature :math:`\beta` is proportional to prior times likelihood
# to the power :math:`\beta`, and the logarithm of its constant has the mean log likelihood as its derivative, so that
#
# .. math:: \log p(y) = \int_0^1 \mathrm E_\beta[\log L(\theta)]\, d\beta .
#
# Path sampling :cite:p:`gelman1998` adds up this integral by the trapezoidal rule, which its modified form corrects;
# stepping stone sampling :cite:p:`xie2011` multiplies ratios of neighbouring constants. All use the same draws.

# %%
# An exact twin
# -------------
# In a linear regression with known noise, the integrand is known at every temperature, for power posteriors are normal.
# All chains of the ladder run in one batch; they are independent, and the spread of their means is the error.

case = bk.exact.get("linreg10")
design, response, noise, prior = case.args
target = case.target()
size = {"num_warmup": 80, "num_samples": 100} if is_small() else {"num_warmup": 200, "num_samples": 500}
num_chains, num_temperatures = (16, 30) if is_small() else (32, 40)
ladder = sample_ladder(target, num_temperatures, num_chains, seed=0, progress=False, **size)

exact = []
for beta in ladder.beta:
    covariance = torch.linalg.inv(beta * design.mT @ design / noise**2 + torch.eye(10).double() / prior**2)
    centre = beta * covariance @ design.mT @ response / noise**2
    misfit = (response - design @ centre).square().sum() + (design @ covariance @ design.mT).trace()
    exact.append(float(-0.5 * misfit / noise**2) - 0.5 * len(response) * math.log(2 * math.pi * float(noise) ** 2))
by_chain = ladder.log_likelihood.mean(2)
means, errors = by_chain.mean(1), by_chain.std(1) / by_chain.shape[1] ** 0.5
print("  beta   mean log likelihood      exactly")
for beta, mean, error, value in list(zip(ladder.beta, means, errors, exact, strict=True))[::8]:
    print(f"{float(beta):6.4f} {float(mean):12.2f} +- {float(error):6.2f} {value:12.2f}")
z = (means - means.new_tensor(exact)) / errors
print(f"largest distance of {len(z)} means: {float(z.abs().max()):.1f} standard errors")
assert z.abs().max() < 4.5

# %%
# On plain axes, the area under the curve is minus the log evidence. These are stretched near the prior, where the
# integrand falls steeply and where the ladder has most of its rungs.

figure = Figure(figsize=(7, 3.5), layout="constrained")
axes = figure.subplots()
axes.plot(ladder.beta**0.3, [-value for value in exact], label="exact")
axes.plot(ladder.beta**0.3, -means, "C1o", markersize=4, label="means of chains")
ticks = torch.tensor([0.0, 1e-4, 1e-2, 0.1, 0.5, 1.0])
axes.set_xticks(ticks**0.3, [f"{float(t):g}" for t in ticks])
axes.set(yscale="log", xlabel="inverse temperature", ylabel="minus the mean log likelihood (nats)")
axes.legend()

# %%
# The trapezoidal rule alone misses a little between the rungs, and says how much. A ladder has rungs enough if that is
# small beside the Monte Carlo error. The other two estimators do without the rule or correct it: they must agree with
# the exact log evidence.

print(f"exact: {case.log_evidence:.4f}")
plain = evidence.path_sampling(target, ladder)
print(f"{plain}; between rungs it misses about {plain.diagnostics['trapezoid_gap']:.3f}")
for estimate in (evidence.modified_path_sampling(target, ladder), evidence.stepping_stone(target, ladder)):
    print(estimate)
    assert estimate.trusted
    assert abs(estimate.log_evidence - case.log_evidence) < 4.5 * estimate.standard_error

# %%
# The fit
# -------
# A ladder for each regression of the pines, on random numbers of its own; the evidence is known for these, too.

found = {}
for seed, name in enumerate(("radiata_pine_m1", "radiata_pine_m2"), 1):
    pines = bk.exact.get(name)
    target = pines.target()
    ladder = sample_ladder(target, num_temperatures, num_chains, seed=seed, progress=False, **size)
    found[name] = evidence.stepping_stone(target, ladder)
    print(f"{name}: {found[name]}, exactly {pines.log_evidence:.4f}; R-hat {found[name].diagnostics['r_hat']:.3f}")
    assert found[name].trusted
    assert abs(found[name].log_evidence - pines.log_evidence) < 4.5 * found[name].standard_error

# %%
# What it says
# ------------
# The density adjusted for resin explains the strength far better.

first, second = found.values()
error = math.hypot(first.standard_error, second.standard_error)
print(f"log Bayes factor for the adjusted density: {second.log_evidence - first.log_evidence:.3f} +- {error:.3f}")

# %%
# A failure on purpose
# --------------------
# Five steps in place of forty. The trapezoidal rule is off by many times its Monte Carlo error, which knows of draws
# only and not of the space between rungs. The correction does not save it, and the first ratio of stepping stones rests
# on few draws. Each says so.

target = case.target()
coarse = sample_ladder(target, 6, num_chains, seed=0, progress=False, **size)
for method in (evidence.path_sampling, evidence.modified_path_sampling, evidence.stepping_stone):
    z = method(target, coarse)
    print(f"{method.__name__}: {z.log_evidence - case.log_evidence:+.2f} nats off, it says +- {z.standard_error:.2f}")
    print(f"    {z.warnings[0] if z.warnings else 'no warning'}")
    assert method is evidence.stepping_stone or not z.trusted
bias = evidence.path_sampling(target, coarse)
assert case.log_evidence - bias.log_evidence > 4.5 * bias.diagnostics["monte_carlo_error"]

# %%
# Try it on yours
# ---------------
# Replace ``target``. One ladder serves all three estimators, so that it costs nothing to compare them.
#
# .. code-block:: python
#
#    ladder = sample_ladder(target, num_temperatures, num_chains, seed=0)
#    for method in (evidence.path_sampling, evidence.modified_path_sampling, evidence.stepping_stone):
#        print(method(target, ladder))
#
# Look at ``trusted``; add temperatures until ``diagnostics["trapezoid_gap"]`` is below
# ``diagnostics["monte_carlo_error"]``. If the chains at one temperature disagree, let rungs exchange their states.
# Where posterior draws are good already, bridge sampling costs a fraction of a ladder.
#
# Where to go next: :doc:`parallel_tempering` lets the rungs exchange their states, :doc:`tempered_smc` climbs without
# chains.
