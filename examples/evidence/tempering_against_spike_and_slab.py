r"""
Tempering fails at a phase transition: power posteriors miss a narrow spike
===========================================================================

**What you will learn:** how a tempered ladder whose chains all mix can miss nearly all of a posterior, which warning
says so, and which methods find what it missed.

The posterior has two parts: a narrow normal spike that holds almost all of the mass, in the middle of a slab ten times
as wide. :cite:t:`sivia2006` use such problems in their chapter 9 to show a first-order phase transition, the
statistical physicist's name for what undoes every method that raises the likelihood to a power. There are no data; the
evidence is known in closed form.
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
from scipy.special import erf
from scipy.stats import norm

import bayeskit as bk
from bayeskit import exact
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.inference.samplers import sample_ladder, sample_nested, sample_smc

# %%
# The model
# ---------
# A point in the unit cube of :math:`d = 20` dimensions, and a likelihood of two terms, with :math:`s = 0.01` and
# :math:`S = 0.1`:
#
# .. math::
#    x \sim U(-\tfrac12, \tfrac12)^d, \qquad
#    L(x) = 100 \, N(x; 0, s^2 I) + N(x; 0, S^2 I).
#
# Both terms lie inside the cube but for the rim of the slab, so that the evidence is close to 101, of which 100 are the
# spike's.


def spike_and_slab(half_edges, deviations):
    x = pyro.sample("x", dist.Uniform(-half_edges, half_edges).to_event(1))
    spike, slab = (dist.Normal(0.0, sd).expand(x.shape).to_event(1).log_prob(x) for sd in deviations)
    pyro.factor("likelihood", torch.logaddexp(spike + math.log(100), slab))


def make_target(dim, *deviations):
    half_edges = torch.full((dim,), 0.5, dtype=torch.float64)
    return bk.Target.from_pyro(spike_and_slab, half_edges, torch.tensor(deviations, dtype=torch.float64))


DIM = 10 if is_small() else 20
target = make_target(DIM, 0.01, 0.1)

# %%
# Before the data
# ---------------
# What the prior sees of this likelihood: no draw comes near the heights at which the posterior lives, least of all the
# spike's. So there has to be a path, and tempering takes the likelihood to a power that rises from zero to one.

typical = {"slab": (0.1, 0.0, "C0", "--"), "spike": (0.01, math.log(100), "C3", ":")}
prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
from_prior = target.log_likelihood(target.sample_prior(5000, seed=0))
axes.hist(from_prior.numpy(), bins=60, color="C5", label="draws from the prior")
for name, (sd, log_height, colour, style) in typical.items():
    level = log_height - DIM * (math.log(sd) + 0.5 * math.log(2 * math.pi) + 0.5)
    axes.axvline(level, color=colour, linestyle=style, label=f"mean over the {name}")
axes.set(xlabel="log likelihood (nats)", ylabel="draws", title="how far the posterior is from the prior")
prior_predictive.legend(loc="outside lower center", ncols=3)

# %%
# An exact twin
# -------------
# In one dimension quadrature gives the evidence, and so does the closed form of the package's case. If the spike is
# only half as wide as the slab the ladder of temperatures gets it right, too.


def likelihood(x):
    return 100 * norm.pdf(x, 0, 0.05) + norm.pdf(x, 0, 0.1)


lengths = (100, 200) if is_small() else (150, 500)


def ladder_of(target, **options):
    return sample_ladder(target, 30, 8, *lengths, progress=False, **options)


by_quadrature = math.log(2 * quad(likelihood, 0, 0.5, points=[0.1, 0.2], epsabs=0, epsrel=1e-12)[0])
closed_form = exact.spike_and_slab(1, spike_sd=0.05).log_evidence
line = make_target(1, 0.05, 0.1)
works = evidence.stepping_stone(line, sample_ladder(line, 30, 8, 150, 1000, progress=False))
print(f"one dimension: quadrature {by_quadrature:.9f}, closed form {closed_form:.9f}")
print(works)
assert abs(by_quadrature - closed_form) < 1e-9
assert works.trusted and abs(works.log_evidence - by_quadrature) < 4.5 * works.standard_error

# %%
# The fit
# -------
# Twenty dimensions: a ladder of temperatures, one whose neighbours exchange their states (parallel tempering), and
# sequential Monte Carlo. All of them stand on chains without any fault.

truth, slab_alone = exact.spike_and_slab(DIM).log_evidence, DIM * math.log(erf(5 / 2**0.5))
ladder, exchanged = ladder_of(target), ladder_of(target, exchange=True)
run = sample_smc(target, 32, 16, num_pilot_particles=128 if is_small() else 512, progress=False)
tempered = {
    "stepping stone": evidence.stepping_stone(target, ladder),
    "path sampling": evidence.modified_path_sampling(target, ladder),
    "parallel tempering": evidence.stepping_stone(target, exchanged),
    "sequential Monte Carlo": evidence.smc(target, run),
}
print(f"exactly {truth:.4f}; the slab alone {slab_alone:.6f}")
for name, z in tempered.items():
    r_hat = f"R-hat {z.diagnostics['r_hat']:.3f}" if "r_hat" in z.diagnostics else "no R-hat: particles, not chains"
    print(f"{name:22s} {z.log_evidence:7.4f} +- {z.standard_error:.4f}, {r_hat}")
    assert abs(z.log_evidence - slab_alone) < 4.5 * z.standard_error  # it is the evidence of the slab, precisely
    assert not z.trusted
print(textwrap.fill(tempered["stepping stone"].warnings[0], 110))

# %%
# Chains, temperatures and replicates agree, and no diagnostic of theirs can object. What does is a search: it climbs
# from the best of the draws, weighs what lies about the modes where it ends by importance sampling, and compares that
# with the share of the draws found there. It is cheap, but it has to find the peak, and in a rugged landscape it may
# not.

assert all(len(z.warnings) == 1 and z.diagnostics["missed_share"] > 50 for z in tempered.values())

# %%
# A phase transition
# ------------------
# Let :math:`Z_\beta = \int \pi L^\beta`. It is, to good approximation, a sum of two parts, one for each term of
# :math:`L`, and its logarithm is the integral of the mean log likelihood over :math:`\beta`. As :math:`\beta` rises the
# slab shrinks to a width of :math:`S / \sqrt{\beta}`. At :math:`\beta = d / (d + 2)` the spike holds as much, and soon
# after that nearly everything: within a narrow range the mean log likelihood rises by about fifty nats. No chain can
# follow, because what lies between slab and spike is all but empty. The chains stay on the slab's branch, as water can
# be cooled below its freezing point.


def branch(beta, sd, log_height):
    """Return log mass and mean log likelihood of one term, tempered; a normal distribution cut off by the cube."""
    edge, width = 0.5 * np.sqrt(beta) / sd, sd / np.sqrt(beta)
    inside = erf(edge / 2**0.5)
    constant = log_height - DIM * math.log(sd * math.sqrt(2 * math.pi))
    square = width**2 * (1 - 2 * edge * norm.pdf(edge) / inside)
    log_mass = beta * constant + DIM * np.log(width * math.sqrt(2 * math.pi) * inside)
    return log_mass, constant - DIM * square / (2 * sd**2)


beta = np.linspace(0.02, 1, 2000)
(mass_slab, slab), (mass_spike, spike) = (branch(beta, sd, height) for sd, height, *_ in typical.values())
weight = 1 / (1 + np.exp(mass_slab - mass_spike))
right = weight * spike + (1 - weight) * slab
missing = np.trapezoid(right - slab, beta)
print(f"area between the curves {missing:.3f} nats, error of the tempered estimates {truth - slab_alone:.3f}")

phases = Figure(figsize=(7.5, 4), layout="constrained")
axes = phases.subplots()
axes.fill_between(beta, slab, right, color="C1", alpha=0.3, label="evidence that is missed")
axes.plot(beta, right, color="C3", label="slab and spike")
axes.plot(beta, slab, "--", color="C0", label="slab alone")
means = ladder.log_likelihood.mean((1, 2))
axes.plot(ladder.beta[ladder.beta > 0.02], means[ladder.beta > 0.02], "o", color="C2", label="mean of the chains")
axes.set(xlabel=r"inverse temperature $\beta$", ylabel="mean log likelihood (nats)")
axes.legend()

# %%
# What it says
# ------------
# Nested sampling needs no temperatures: it asks how the prior volume shrinks as the likelihood rises, and passes a
# phase transition as it passes anything else, if it is not stopped before. With the usual rule, to end when the live
# points can add no more than a thousandth to the evidence, it is, for it judges by the likelihoods that it has seen; it
# says so. Importance sampling about the highest mode that a search finds gets the mass of the spike, and not the
# hundredth of the slab; in twenty dimensions it does not trust itself either.

num_live = 40 if is_small() else 400
stopped = evidence.nested_sampling(target, sample_nested(target, num_live, progress=False))
patient = evidence.nested_sampling(target, sample_nested(target, num_live, termination=1e-15, progress=False))
by_importance = evidence.laplace_importance_sampling(target)
print(f"exactly        {truth:7.4f}")
for name, z in (("stopped early", stopped), ("patient", patient), ("importance", by_importance)):
    print(f"{name:14s} {z.log_evidence:7.4f} +- {z.standard_error:.4f}, trusted: {z.trusted}")
    if z.warnings:
        print(textwrap.indent(textwrap.fill(z.warnings[0], 100), "    "))
assert patient.trusted
for z in (stopped, patient, by_importance):
    assert not z.trusted or abs(z.log_evidence - truth) < 4.5 * z.standard_error

# %%
# Try it on yours
# ---------------
# Run the ladder that you would run anyway, and a method that does not temper.
#
# .. code-block:: python
#
#    tempered = evidence.stepping_stone(target, ladder)
#    other = evidence.nested_sampling(target, num_live=40, termination=1e-15)
#    print(tempered.trusted, tempered.diagnostics["missed_share"], tempered.log_evidence - other.log_evidence)
#
# Look at ``missed_share``: the mass that a search found outside of what the chains visited, over what they visited. If
# it is not small, or the two estimates differ, believe nested sampling, with more live points.
#
# Where to go next: :doc:`nested_sampling` shows how such a run works and is checked, :doc:`galaxy_mixture` is about
# modes that are missed and can be counted, :doc:`/gallery/sampling/parallel_tempering` about those that exchange finds.
