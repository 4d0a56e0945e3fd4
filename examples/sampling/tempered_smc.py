r"""
Sequential Monte Carlo samplers: multimodal posteriors and unbiased evidence
============================================================================

**What you will learn:** how sequential Monte Carlo weighs modes between which no chain can move, and how it estimates
the evidence without bias.

Two unknown numbers have a wide normal prior. Two instruments measured them together; the one says that both are near
minus four, the other that both are near four, and the second is believed in seven cases of ten. The problem is made up,
so that its answer is known.
"""

import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import smc
from bayeskit.inference.samplers import sample_smc

CENTRES, SHARES, WIDTH, PRIOR = (-4.0, 4.0), (0.3, 0.7), 0.3, 5.0

# %%
# The model
# ---------
# Particles start in the prior and are carried to the posterior through a sequence of inverse temperatures :math:`0 =
# \beta_0 < \dots < \beta_K = 1`: weighted anew, resampled, moved :cite:p:`delmoral2006`. A pilot learns the sequence;
# then independent replicates follow it, each of which estimates the evidence :math:`Z` without bias,
#
# .. math:: \mathrm E[\hat Z_r] = Z, \qquad
#    \hat Z_r = \prod_k \sum_i W^{(k-1)}_i L(u_i)^{\beta_k - \beta_{k-1}},
#
# so that their mean is unbiased, too, and their spread gives its standard error.


def model(centres: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(torch.zeros_like(centres), PRIOR).to_event(1))
    left, right = (dist.Normal(c, WIDTH).log_prob(mean).sum() for c in centres)
    pyro.factor("instruments", torch.logaddexp(left + math.log(SHARES[0]), right + math.log(SHARES[1])))


target = bk.Target.from_pyro(model, torch.tensor(CENTRES, dtype=torch.float64))
size = {"num_particles": 32, "num_pilot_particles": 256, "ess_threshold": 0.9} if is_small() else {}
run = sample_smc(target, seed=1, progress=False, **size)
print(run)

# %%
# An exact twin
# -------------
# In two dimensions, a fine grid gives the integral of prior times likelihood to any power to all digits that matter.
# The particles' estimate is compared with it at every temperature on their way, replicate by replicate.

axis = torch.linspace(-40.0, 40.0, 801, dtype=torch.float64)
grid = torch.cartesian_prod(axis, axis)
log_prior, log_likelihood = target.evaluate(grid, compiled=False)
cell = 2 * math.log(float(axis[1] - axis[0]))
exact = torch.stack([(log_prior + beta * log_likelihood).logsumexp(0) + cell for beta in run.beta])
variance = PRIOR**2 + WIDTH**2  # of what an instrument shows, before anything is known
closed = -math.log(2 * math.pi * variance) - CENTRES[1] ** 2 / variance
print(f"log evidence by the grid {float(exact[-1]):.9f}, in closed form {closed:.9f}")
assert abs(float(exact[-1]) - closed) < 1e-9

paths = run.log_evidence_increments.cumsum(1)
ratios = (paths - exact).exp()  # of estimate and truth, each with mean one
error = ratios.std(0) / len(ratios) ** 0.5
print("  beta   mean ratio of estimate and truth   acceptance")
for k in range(0, len(run.beta), max(1, len(run.beta) // 8)):
    accepted = float(run.info.acceptance_rate[:, k].mean())
    print(f"{float(run.beta[k]):6.4f} {float(ratios[:, k].mean()):18.4f} +- {float(error[k]):.4f} {accepted:16.2f}")
assert ((ratios.mean(0) - 1).abs() < 4.5 * error).all()

# %%
# What it says
# ------------
# The particles weigh both modes as they should be weighed, though nothing can move between them at the end.

shares = (run.draws.values()["mean"][..., 0] > 0).double().mean(1)
error = float(shares.std()) / math.sqrt(len(shares))
print(f"share of the right mode: {float(shares.mean()):.3f} +- {error:.3f}, exactly {SHARES[1]}")
assert abs(float(shares.mean()) - SHARES[1]) < 4.5 * error
estimate = smc(target, run)
print(f"{estimate}; exactly {closed:.4f}")
assert estimate.trusted and abs(estimate.log_evidence - closed) < 4.5 * estimate.standard_error

figure = Figure(figsize=(8.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
left.plot(run.beta, (paths - exact).mT, color="C0", alpha=0.3, linewidth=0.8)
left.axhline(0, color="black", linewidth=1)
left.set(xscale="log", xlabel="inverse temperature", ylabel="log evidence, less exact (nats)", title="replicates")
u = run.draws.unconstrained.flatten(0, 1)
right.plot(u[:, 0], u[:, 1], "C1.", markersize=2)
right.set(xlabel="first number", ylabel="second number", title="particles at the end")

# %%
# A failure on purpose
# --------------------
# Eight replicates of eight particles. The estimate is still without bias, but a replicate whose ancestors all went to
# one side at an early temperature cannot come back: such a replicate has lost a mode, and its draws do not show it. The
# estimate counts its effective particles and says that there are too few.

few = sample_smc(target, 8, 8, num_pilot_particles=256, ess_threshold=0.9, seed=1, progress=False)
sides = (few.draws.values()["mean"][..., 0] > 0).double().mean(1)
poor = smc(target, few)
print(f"{int(((sides == 0) | (sides == 1)).sum())} of 8 replicates end with all particles in one mode")
print(poor)
assert not poor.trusted

# %%
# Try it on yours
# ---------------
# Replace ``target``; its prior has to be one that can be sampled, and wide enough to reach every mode.
#
# .. code-block:: python
#
#    run = sample_smc(target, num_particles=32, num_pilot_particles=256, ess_threshold=0.9, seed=1)
#    z = smc(target, run)
#    print(run, z, z.trusted, z.warnings)
#
# Look at ``trusted`` and at the spread of the replicates in the figure. If it is large, take more particles and a
# higher ``ess_threshold`` before you take more replicates. With one mode, chains and bridge sampling need fewer
# gradients.
#
# Where to go next: :doc:`parallel_tempering` has chains at all temperatures at once, :doc:`tempered_ladder` reads the
# evidence from them in several ways.
