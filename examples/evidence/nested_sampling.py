r"""
Nested sampling: two Gaussian shells, its diagnostics, and a phase transition that tempering misses
===================================================================================================

**What you will learn:** how nested sampling finds the evidence of a posterior that is curved and has two modes, how a
run tells whether to believe it, and how a tempered ladder whose chains all mix can miss nearly all of a posterior.

The likelihood is high on two thin spherical shells and next to nothing elsewhere. There are no data: it is a problem on
which :cite:t:`feroz2009` tried their method, because chains do not get from one shell to the other. They published what
its evidence is in several dimensions.
"""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import erf
from scipy.stats import norm

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import nested_sampling, stepping_stone
from bayeskit.inference.samplers import sample_ladder, sample_nested

# %%
# The model
# ---------
# A point is uniform on the cube :math:`[-6, 6]^d`; with radius 2, width 0.1 and centres :math:`\pm c` on the first
# axis, :math:`c_1 = 3.5`, its likelihood is
#
# .. math::
#
#    L(x) = N(|x - c|; \, 2, 0.1^2) + N(|x + c|; \, 2, 0.1^2).
#
# Nested sampling sees of it one function of one number. Let :math:`X` be the prior mass where the likelihood exceeds
# :math:`\ell`; then
#
# .. math::
#
#    Z = \int L(x) \, p(x) \, dx = \int_0^1 \ell(X) \, dX.
#
# Live points start as draws from the prior. Again and again the worst half of them dies, and is replaced by points
# above the likelihood reached: further draws from the prior and, where these are too rare, copies of the others that
# slice sampling moves about. Each death shrinks :math:`X` by a factor of known distribution.

RADIUS, WIDTH, OFFSET, EDGE = 2.0, 0.1, 3.5, 6.0


def shells(centre: torch.Tensor) -> None:
    edge = torch.full_like(centre, EDGE)
    x = pyro.sample("x", dist.Uniform(-edge, edge).to_event(1))
    distances = [torch.linalg.vector_norm(x - c) for c in (centre, -centre)]
    pyro.factor("shells", torch.logaddexp(*(dist.Normal(RADIUS, WIDTH).log_prob(r) for r in distances)))


def target_of(dim: int) -> bk.Target:
    centre = torch.zeros(dim, dtype=torch.float64)
    centre[0] = OFFSET
    return bk.Target.from_pyro(shells, centre)


# %%
# Before the data
# ---------------
# How many of ten thousand prior draws come to lie within two widths of a shell? Averaging the likelihood over the
# prior needs no cleverness in two dimensions, and is hopeless in ten.

for dim in (2, 5, 10):
    target = target_of(dim)
    high = target.log_likelihood(target.sample_prior(10_000, seed=0)) > norm.logpdf(2 * WIDTH, scale=WIDTH)
    print(f"{dim:2d} dimensions: {int(high.sum()):3d} of 10,000 prior draws on a shell")

# %%
# An exact twin
# -------------
# In one dimension a sphere is two points: the likelihood has four bumps, whose integral is a difference of normal
# distribution functions.

inside = norm(RADIUS, WIDTH)
one_shell = inside.cdf(EDGE - OFFSET) + inside.cdf(EDGE + OFFSET) - 2 * inside.cdf(0.0)
exact = math.log(2 * one_shell / (2 * EDGE))
z = nested_sampling(target_of(1), num_live=100 if is_small() else 2000, seed=0)
print(f"one dimension: {z}, exactly {exact:.4f}")
assert z.trusted and abs(z.log_evidence - exact) < 4.5 * z.standard_error

# %%
# The fit
# -------
# Two dimensions and ten. New points should come to lie anywhere among those that they join: a test of uniformity of
# their ranks runs along, and another of whether they remember the point that they were copied from. The exact values
# are integrals in polar coordinates.

num_live = 50 if is_small() else 1000
runs = {}
for dim in (2, 10):
    target = target_of(dim)
    run = sample_nested(target, num_live, seed=1, progress=False)
    z, exact = nested_sampling(target, run), bk.exact.gaussian_shells(dim).log_evidence
    print(f"{dim} dimensions: {z}, exactly {exact:.4f}")
    print(f"   {run.ending} with {len(run.position)} dead points, information {run.information:.2f} nats")
    print(f"   uniform ranks: p = {run.insertion_index_p_value:.2f}, memory: {run.start_correlation:+.3f}")
    assert z.trusted and run.ending == "converged" and run.insertion_index_p_value > 1e-4
    assert abs(z.log_evidence - exact) < 4.5 * z.standard_error
    runs[dim] = run, z

# %%
# A failure on purpose
# --------------------
# One slice move for each copy, where twenty are usual. Copies stay near where they started, so that the volume is not
# what the method takes it for. Of four such runs in ten dimensions two miss the evidence by more than six standard
# errors, and a third by more than two. The ranks may well look uniform; the memory of the new points gives all four
# away.

target, exact = target_of(10), bk.exact.gaussian_shells(10).log_evidence
for seed in range(1 if is_small() else 4):
    hasty = nested_sampling(target, num_live=200, num_slice_steps=1, seed=seed)
    off, p = (hasty.log_evidence - exact) / hasty.standard_error, hasty.diagnostics["insertion_p_value"]
    memory = hasty.diagnostics["start_correlation"]
    print(f"one slice move: {off:+.1f} standard errors off, uniform ranks: p = {p:.3f}, memory: {memory:+.2f}")
    assert not hasty.trusted
print(hasty.warnings[0])

# %%
# What it says
# ------------
# The evidence is known to about a tenth of a nat, whatever the shape of the posterior. The error is about the square
# root of information over live points, and only more live points reduce it.
#
# On the left, where in the prior the posterior lies: in a few per cent of it in two dimensions, and in less than a
# millionth in ten. On the right, posterior draws of the run in two dimensions.

for dim, (run, z) in runs.items():
    rough = math.sqrt(run.information / num_live)
    print(f"{dim} dimensions: {z.log_evidence:.3f} +- {z.standard_error:.3f}, rule of thumb for the error {rough:.3f}")

figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
for number, (dim, (run, _)) in enumerate(runs.items()):
    mass, edges = np.histogram(run.log_volume, 60, weights=run.log_weights.exp(), density=True)
    left.stairs(mass, edges, color=f"C{number}", linestyle=["-", "--"][number], label=f"{dim} dimensions")
left.set(xlabel="log prior mass of higher likelihood (nats)", ylabel="density of the posterior")
left.legend(frameon=False, loc="upper left")
x = runs[2][0].draws.values()["x"].flatten(0, 1)
right.plot(x[:, 0], x[:, 1], ".", color="C0", markersize=2)
right.set(xlabel="$x_1$", ylabel="$x_2$", xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), aspect="equal")

# %%
# Where tempering fails
# ---------------------
# A narrow normal spike with 100 parts of the mass stands in the middle of a slab ten times as wide, with one part
# (:cite:t:`sivia2006`, chapter 9). Both lie inside the unit cube, so that the evidence is close to 101.


def spike_and_slab(half_edges: torch.Tensor) -> None:
    x = pyro.sample("x", dist.Uniform(-half_edges, half_edges).to_event(1))
    spike, slab = (dist.Normal(0.0, sd).expand(x.shape).to_event(1).log_prob(x) for sd in (0.01, 0.1))
    pyro.factor("likelihood", torch.logaddexp(spike + math.log(100), slab))


dim = 10 if is_small() else 20
target = bk.Target.from_pyro(spike_and_slab, torch.full((dim,), 0.5, dtype=torch.float64))
truth, slab_alone = bk.exact.spike_and_slab(dim).log_evidence, dim * math.log(erf(5 / 2**0.5))
ladder = sample_ladder(target, 30, 8, *((100, 200) if is_small() else (150, 500)), progress=False)
tempered = stepping_stone(target, ladder)
print(f"exactly {truth:.4f}, the slab alone {slab_alone:.4f}; {tempered}, R-hat {tempered.diagnostics['r_hat']:.3f}")
print(tempered.warnings[0])
assert abs(tempered.log_evidence - slab_alone) < 4.5 * tempered.standard_error  # the evidence of the slab, precisely
assert not tempered.trusted and tempered.diagnostics["missed_share"] > 50

# %%
# Chains and temperatures agree; what objects is a search for modes that the draws missed. The logarithm of
# :math:`Z_\beta = \int \pi L^\beta` is the integral of the mean log likelihood. As :math:`\beta` rises, the slab
# shrinks to a width of :math:`S / \sqrt\beta`. At :math:`\beta = d / (d + 2)` the spike holds as much, and soon after
# that nearly everything: a first-order phase transition, through which no chain can follow. The chains stay on the
# slab's branch, as water can be cooled below its freezing point, and the area between the branches is what the estimate
# lacks.


def branch(beta: np.ndarray, sd: float, log_height: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log mass and mean log likelihood of one term, tempered; a normal distribution cut off by the cube."""
    edge, width = 0.5 * np.sqrt(beta) / sd, sd / np.sqrt(beta)
    inside = erf(edge / 2**0.5)
    constant = log_height - dim * math.log(sd * math.sqrt(2 * math.pi))
    square = width**2 * (1 - 2 * edge * norm.pdf(edge) / inside)
    log_mass = beta * constant + dim * np.log(width * math.sqrt(2 * math.pi) * inside)
    return log_mass, constant - dim * square / (2 * sd**2)


beta = np.linspace(0.02, 1, 2000)
(mass_slab, of_slab), (mass_spike, of_spike) = branch(beta, 0.1, 0.0), branch(beta, 0.01, math.log(100))
missing = np.trapezoid((of_spike - of_slab) / (1 + np.exp(mass_slab - mass_spike)), beta)
print(f"area between the branches {missing:.3f} nats, error of the estimate {truth - slab_alone:.3f}")
assert abs(missing - (truth - slab_alone)) < 0.1

# %%
# Nested sampling asks how the prior volume shrinks as the likelihood rises, and passes a phase transition as it passes
# anything else, if it is not stopped before: with the usual rule it is, and says so.

for name, options in (("stopped early", {}), ("patient", {"termination": 1e-15})):
    z = nested_sampling(target, sample_nested(target, 40 if is_small() else 400, progress=False, **options))
    print(f"{name:14s} {z.log_evidence:7.4f} +- {z.standard_error:.4f}, trusted: {z.trusted}")
    assert not z.trusted or abs(z.log_evidence - truth) < 4.5 * z.standard_error
assert z.trusted

# %%
# Try it on yours
# ---------------
# Replace the target; its prior has to be one that can be sampled, as that of every Pyro model.
#
# .. code-block:: python
#
#    run = sample_nested(target, num_live=200, seed=0)
#    z = nested_sampling(target, run)
#    print(z, run.ending, run.insertion_index_p_value, run.start_correlation)
#
# Look at ``z.trusted``, the p-value of the ranks and the memory of the copies. If a copy remembers, raise
# ``num_slice_steps``; if the error is too large, raise ``num_live``: four times as many halve it. For a posterior of
# one mode in many dimensions, bridge sampling from chains costs far less.
#
# Where to go next: :doc:`/gallery/sampling/parallel_tempering` has modes that temperatures find, :doc:`galaxy_mixture`
# many modes by symmetry, and :doc:`eight_schools_by_every_estimator` shows nested sampling beside all others.
