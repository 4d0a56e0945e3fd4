r"""
Vague priors, centred hierarchies and hidden modes: which draws to believe
==========================================================================

**What you will learn:** that a vague prior needs no tuning, that a hierarchy may be written as it is thought of, and
what is said of a mode that no chain has visited.

Chains that agree with each other may all be wrong: they stand still, they stay out of the neck of a hierarchy, or they
sit in one mode of two. Here each of the three meets an exact answer.
"""

import math
import warnings

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.stats import norm

import bayeskit as bk
from bayeskit import exact
from bayeskit.gallery import is_small
from bayeskit.inference.samplers import sample_smc

# %%
# The model
# ---------
# Darwin grew fifteen pairs of maize plants, one of each pair crossed and one self-fertilised, and measured by how many
# eighths of an inch the crossed one was taller :cite:p:`darwin1876,fisher1935`. Their mean has a wide prior, and the
# precision the gamma prior of many textbooks that is meant to say nothing,
#
# .. math:: \tau \sim \mathrm{Gamma}(0.001, 0.001).

WORDS = "49 -67 8 16 6 23 28 41 14 29 56 24 75 60 -48"
taller = torch.tensor([float(word) for word in WORDS.split()], dtype=torch.float64)
A, WIDE = torch.tensor(0.001, dtype=torch.float64), torch.tensor(1000.0, dtype=torch.float64)


def maize(taller: torch.Tensor) -> None:
    precision = pyro.sample("precision", dist.Gamma(A, A))
    mean = pyro.sample("mean", dist.Normal(torch.zeros_like(WIDE), WIDE))
    with pyro.plate("pairs", len(taller)):
        pyro.sample("taller", dist.Normal(mean, precision**-0.5), obs=taller)


# %%
# Before the data
# ---------------
# That prior says a lot. Half of its draws are precisions below :math:`10^{-300}`, or standard deviations above
# :math:`10^{150}`. A chain that starts at such a draw, or takes its scale from such draws, cannot move in double
# precision, and a chain that stands still agrees with itself. ``bk.sample`` starts chains also near the origin and from
# short climbs, takes the first scales from gradients, and says by name which coordinate never moved.

tiny = float(torch.special.gammainc(A, A * 1e-300))
print(f"prior probability of a precision below 1e-300: {tiny:.3f}")
assert 0.45 < tiny < 0.55

# %%
# An exact twin
# -------------
# Given the mean, the precision has a gamma distribution and integrates out; one integral over the mean is left, for
# quadrature. The defaults of ``bk.sample`` need no change.


def log_joint(mean: float) -> float:
    n, a = len(taller), float(A)
    half = 0.5 * float((taller - mean).square().sum())
    constant = a * math.log(a) - math.lgamma(a) + math.lgamma(a + n / 2) - n / 2 * math.log(2 * math.pi)
    return constant - (a + n / 2) * math.log(a + half) + norm.logpdf(mean, 0.0, float(WIDE))


highest = log_joint(float(taller.mean()))
area, moment = (
    quad(lambda m, power=power: m**power * math.exp(log_joint(m) - highest), -400, 440, points=[21], epsabs=1e-12)[0]
    for power in (0, 1)
)
draws = bk.sample(maize, taller, seed=0, progress=False)
z = bk.evidence.bridge_sampling(draws.target, draws, seed=0)
row = draws.summary(round_to="none").loc["mean"]
print(f"exactly: log evidence {highest + math.log(area):.4f}, mean {moment / area:.3f} eighths of an inch")
print(f"{z}; mean {row['mean']:.3f} +- {row['mcse_mean']:.3f}")
assert z.trusted and abs(z.log_evidence - highest - math.log(area)) < 4.5 * z.standard_error
assert abs(row["mean"] - moment / area) < 4.5 * row["mcse_mean"]

# %%
# The fit
# -------
# Eight schools, written as one thinks of them: effects around a mean, with a scale that may be near zero
# :cite:p:`rubin1981,gelman2006`. Where the scale is small the effects are squeezed into a neck, in which a sampler with
# one step size gets stuck. Warm-up learns how far to centre each effect, and the draws are those of the model as it is
# written.

case = exact.eight_schools(centered=True)
schools = bk.sample(case.target(), num_samples=500 if is_small() else 2000, seed=0, progress=False)
table = schools.summary(round_to="none")
print(table.loc[["mu", "tau"], ["mean", "mcse_mean", "ess_bulk", "ess_tail", "r_hat"]].round(3))
assert not bool(schools.sample_stats["diverging"].any())
for name in ("mu", "tau"):
    off = table.loc[name, "mean"] - float(case.posterior_mean[name])
    assert abs(off) < 4.5 * table.loc[name, "mcse_mean"]

# %%
# A failure on purpose
# --------------------
# A detector squares what it hears: the sign of the signal is lost, and only the prior prefers one. All chains are
# started on one side. They agree, they mix, and they are wrong; the search after the run finds the other side, and says
# how much of the posterior is there.


def detector(power: torch.Tensor) -> None:
    signal = pyro.sample("signal", dist.Normal(torch.ones_like(power), 4.0))
    pyro.sample("power", dist.Normal(signal**2, 0.5), obs=power)


target = bk.Target.from_pyro(detector, torch.tensor(9.0, dtype=torch.float64))
one_side = {"signal": torch.tensor([2.9, 3.0, 3.1, 3.2], dtype=torch.float64)}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    stuck = bk.sample(target, initial=one_side, seed=0, progress=False)
said = [str(each.message) for each in caught if issubclass(each.category, bk.errors.SamplingWarning)]
print(f"R-hat {float(stuck.summary(round_to='none')['r_hat'].max()):.3f}, smallest signal {stuck['signal'].min():.2f}")
print(*said, sep="\n")
assert float(stuck["signal"].min()) > 0 and len(said) == 1 and "mode" in said[0]


# %%
# What it says
# ------------
# Particles that come down from the prior arrive on both sides, each with its share.


def density(signal: float) -> float:
    return float(norm.pdf(signal, 1.0, 4.0) * norm.pdf(9.0, signal**2, 0.5))


left, right = (quad(density, *ends, points=[middle])[0] for *ends, middle in ((-6, 0, -3), (0, 6, 3)))
share = left / (left + right)
run = sample_smc(target, seed=0, progress=False)
both = run.draws["signal"]
by_replicate = (both < 0).double().mean(-1)
error = float(by_replicate.std()) / math.sqrt(len(by_replicate))
print(f"share of negative signals {by_replicate.mean():.3f} +- {error:.3f}, exactly {share:.3f}")
assert abs(float(by_replicate.mean()) - share) < 4.5 * error

figure = Figure(figsize=(7, 3), layout="constrained")
axes = figure.subplots()
grid = torch.linspace(-4, 4, 801)
axes.plot(grid, [density(float(x)) / (left + right) for x in grid], color="black", linewidth=1, label="exact")
axes.hist(both.flatten(), bins=100, density=True, alpha=0.4, label="tempered particles")
axes.hist(stuck["signal"].flatten(), bins=50, density=True, histtype="step", label="chains on one side")
axes.set(xlabel="signal", ylabel="density", title="Chains that agree, and what they have missed")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Write the model as you think of it, run ``bk.sample`` at its defaults, and read what it warns of.
#
# .. code-block:: python
#
#    draws = bk.sample(your_model, your_data)
#    print(draws.summary())
#    print(bk.evidence.bridge_sampling(draws.target, draws))
#
# A warning names the coordinate and the remedy. No search sees everything: :doc:`/concepts/trust` says what none can.
#
# Where to go next: :doc:`parallel_tempering` visits several modes,
# :doc:`latent_fields_integrated_out` does without the neck, :doc:`simulation_based_calibration` tests a sampler.
