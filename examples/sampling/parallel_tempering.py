r"""
Parallel tempering, thermodynamic integration and sequential Monte Carlo for two modes
======================================================================================

**What you will learn:** how plain chains say that they disagree, how one ladder of temperatures weighs the modes and
serves several estimators of the evidence, how particles do both without chains, and how each says that it has failed.

The posterior of one number has two normal modes, forty of their widths apart, of masses 0.3 and 0.7. The problem is
made up, so that its answer is known.
"""

import math
import warnings

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.inference.samplers import sample_ladder, sample_smc

MODES, MASSES = torch.tensor([-6.0, 6.0]).double(), torch.tensor([0.3, 0.7]).double()
WIDTH, PRIOR = 0.3, 6.0

# %%
# The model
# ---------
# Prior and likelihood are two functions of a vector; no more is needed. The power posterior at inverse temperature
# :math:`\beta` is proportional to prior times likelihood to the power :math:`\beta`. The logarithm of its constant has
# the mean log likelihood as its derivative, so that
#
# .. math:: \log p(y) = \int_0^1 \mathrm E_\beta[\log L(\theta)]\, d\beta .
#
# Path sampling :cite:p:`gelman1998` adds up this integral by the trapezoidal rule, which its modified form corrects;
# stepping stone sampling :cite:p:`xie2011` multiplies ratios of neighbouring constants. All use the same draws.


def normal(x: Tensor, mean: Tensor | float, scale: float) -> Tensor:
    return -0.5 * ((x - mean) / scale).square() - math.log(scale * math.sqrt(2 * math.pi))


target = bk.Target.from_functions(
    lambda u: normal(u[..., 0], 0.0, PRIOR),
    lambda u: (MASSES.log() + normal(u, MODES, WIDTH)).logsumexp(-1),
    dim=1,
    sample_prior=lambda n, g: PRIOR * torch.randn(n, 1, generator=g, dtype=torch.float64),
)

# %%
# Plain chains
# ------------
# Each plain chain stays in the mode where it starts, half of them in either here. So they disagree, which R-hat
# notices; had all started in one mode, nothing would have.

starts = torch.linspace(-8, 8, 8, dtype=torch.float64).unsqueeze(1)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    plain = bk.sample(target, 8, 200, 300, initial=starts, seed=1, progress=False)
print(said[-1].message)
upper = (plain.unconstrained[..., 0] > 0).double().mean(1)
print(f"share of the upper mode, chain by chain: {' '.join(f'{float(share):.1f}' for share in upper)}")
assert set(upper.tolist()) == {0.0, 1.0}

# %%
# An exact twin
# -------------
# A ladder of power posteriors joins the two modes to the prior, where moving is easy. After each iteration,
# neighbouring temperatures propose to exchange their states, even and odd pairs in turn, so that states travel straight
# :cite:p:`okabe2001,syed2022`. The masses are known, and so is the evidence: both modes are equally far from the middle
# of the prior. Sixty-four independent ladders run at once, and the spread over them is the error.

size = {"num_warmup": 100, "num_samples": 200} if is_small() else {"num_warmup": 300, "num_samples": 3000}
ladder = sample_ladder(target, 16, num_chains=64, seed=1, exchange=True, progress=False, **size)
tempered = ladder.posterior.unconstrained[..., 0]
shares = (tempered > 0).double().mean(1)
share, error = float(shares.mean()), float(shares.std()) / len(shares) ** 0.5
print(f"share of the upper mode with exchange: {share:.3f} +- {error:.3f}, exactly 0.7")
assert abs(share - 0.7) < 4.5 * error

exact = float(normal(MODES[1], 0.0, math.hypot(PRIOR, WIDTH)))
print(f"log evidence, exactly {exact:.4f}")
for method in (evidence.path_sampling, evidence.modified_path_sampling, evidence.stepping_stone):
    print(method(target, ladder))
for estimate in (evidence.stepping_stone(target, ladder), evidence.modified_path_sampling(target, ladder)):
    assert estimate.trusted and abs(estimate.log_evidence - exact) < 4.5 * estimate.standard_error

# %%
# In one dimension a grid gives the constant of every power posterior, and the integrand of thermodynamic integration.

grid = torch.linspace(-60, 60, 60_001, dtype=torch.float64).unsqueeze(1)
log_prior, log_likelihood = target.evaluate(grid, compiled=False)


def constants(beta: Tensor) -> Tensor:
    return torch.stack([(log_prior + b * log_likelihood).logsumexp(0) for b in beta]) + math.log(0.002)


powers = [(log_prior + b * log_likelihood).softmax(0) for b in ladder.beta[1:]]
expected = torch.stack([(p * log_likelihood).sum() for p in powers])
by_chain = ladder.log_likelihood[1:].mean(2)
means, errors = by_chain.mean(1), by_chain.std(1) / by_chain.shape[1] ** 0.5
z = (means - expected) / errors
print(f"constant by the grid {float(constants(ladder.beta[-1:])):.6f}; integrand off by {z.abs().max():.1f} errors")
assert abs(float(constants(ladder.beta[-1:])) - exact) < 1e-9 and z.abs().max() < 4.5

# %%
# Sequential Monte Carlo carries particles from the prior to the posterior through a sequence of temperatures: weighted
# anew, resampled, moved :cite:p:`delmoral2006`. A pilot learns the sequence; then independent replicates follow it,
# each of which estimates every constant on the way without bias. Their spread gives the error.

few = {"num_particles": 32, "num_pilot_particles": 256, "ess_threshold": 0.9} if is_small() else {}
run = sample_smc(target, seed=1, progress=False, **few)
ratios = (run.log_evidence_increments.cumsum(1) - constants(run.beta)).exp()  # of estimate and truth, with mean one
error = ratios.std(0) / len(ratios) ** 0.5
estimate = evidence.smc(target, run)
print(f"{len(run.beta)} temperatures; {estimate}")
assert ((ratios.mean(0) - 1).abs() < 4.5 * error + 1e-9).all()
assert estimate.trusted and abs(estimate.log_evidence - exact) < 4.5 * estimate.standard_error

# %%
# What it says
# ------------
# A round trip is a state's way from the prior to the posterior and back; each brings news of the other mode. The
# barrier, the sum of the rejection probabilities of all pairs, is a property of the problem. It bounds how many round
# trips any number of temperatures can bring, and about twice as many rungs as the barrier is a good ladder.

trips = ladder.exchange
print(f"{float(trips.round_trips.sum()):.0f} round trips; barrier {trips.barrier:.2f}")
print(f"round trips an iteration of a ladder: {trips.round_trip_rate:.3f}, at best {trips.ideal_round_trip_rate:.3f}")

figure = Figure(figsize=(8.5, 3.4), layout="constrained")
left, right = figure.subplots(1, 2, sharey=True)
left.plot(plain.unconstrained[:4, :, 0].mT, linewidth=0.8)
left.set(xlabel="iteration", ylabel="the number", title="four plain chains")
right.plot(tempered[0, :300], "C0.", markersize=3)
right.set(xlabel="iteration", title="one ladder's posterior, with exchange")

# %%
# A failure on purpose
# --------------------
# Six steps in place of sixteen: the trapezoidal rule is off by many times its Monte Carlo error, which knows of draws
# and not of the space between rungs. And eight replicates of eight particles: still without bias, but a replicate whose
# ancestors all went to one side has lost a mode, and its draws do not show it. Both say so.

coarse = evidence.path_sampling(target, sample_ladder(target, 6, 64, seed=0, exchange=True, progress=False, **size))
gap, monte_carlo = coarse.diagnostics["trapezoid_gap"], coarse.diagnostics["monte_carlo_error"]
print(
    f"six steps: {coarse.log_evidence - exact:+.2f} nats off, Monte Carlo error {monte_carlo:.3f}, said gap {gap:+.2f}"
)
assert exact - coarse.log_evidence > 4.5 * monte_carlo and abs(gap) > monte_carlo
particles = sample_smc(target, 8, 8, num_pilot_particles=256, ess_threshold=0.9, seed=1, progress=False)
sides = (particles.draws.unconstrained[..., 0] > 0).double().mean(1)
print(f"{int(((sides == 0) | (sides == 1)).sum())} of 8 replicates end with all particles in one mode")
assert not evidence.smc(target, particles).trusted

# %%
# Try it on yours
# ---------------
# Replace ``target``; any model with a prior that can be sampled will do. Take about twice as many temperatures as the
# barrier that a first short run reports.
#
# .. code-block:: python
#
#    ladder = sample_ladder(target, 16, num_chains=64, exchange=True, seed=1)
#    print(ladder.exchange.barrier, float(ladder.exchange.round_trips.sum()))
#    print(evidence.stepping_stone(target, ladder))
#
# Look at the round trips: with fewer than a few for each ladder, the weights of the modes are hardly known. Add
# temperatures until ``diagnostics["trapezoid_gap"]`` of path sampling is below ``diagnostics["monte_carlo_error"]``. If
# the trips do not come however many temperatures there are, the posterior may have a phase transition, and nested
# sampling is the better choice. With one mode, chains and bridge sampling need fewer gradients.
#
# Where to go next: :doc:`/gallery/evidence/nested_sampling` shows where temperatures fail,
# :doc:`/gallery/evidence/eight_schools_by_every_estimator` compares all estimators.
