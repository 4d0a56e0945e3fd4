r"""
Simulation-based calibration: can this sampler be trusted on this model?
========================================================================

**What you will learn:** how to check a sampler, and find a mistake in it, by simulation alone, without knowing the
right answer for any data.

Draw parameters from the prior and data from the model, and let the sampler draw from the posterior given these data. If
it is right, the parameters rank anywhere among its draws with equal chance :cite:p:`talts2018,modrak2023`. The model is
a logistic dose response with four doses, much like the bioassay in :cite:t:`gelman2013`, but with ten animals at each;
the deaths are simulated.
"""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.stats import binom, norm

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.workflows import sbc

# %%
# A model and two samplers
# ------------------------
# One sampler is as it should be. The other pulls all draws towards their mean, as an approximation does that claims too
# much certainty.


def dose_response(dose: torch.Tensor, deaths: torch.Tensor) -> None:
    intercept = pyro.sample("intercept", dist.Normal(dose.new_zeros(()), 1.5))
    slope = pyro.sample("slope", dist.Normal(dose.new_zeros(()), 1.5))
    with pyro.plate("groups", len(dose)):
        pyro.sample("deaths", dist.Binomial(10, logits=intercept + slope * dose), obs=deaths)


length = 25 if is_small() else 100  # of warm-up, and of what is kept


def right(target: bk.Target, seed: int) -> bk.Draws:
    return bk.sample(target, num_chains=4, num_warmup=length, num_samples=length, seed=seed, progress=False)


def overconfident(target: bk.Target, seed: int) -> bk.Draws:
    draws = right(target, seed)
    mean = draws.unconstrained.mean((0, 1))
    narrow = mean + 0.4 * (draws.unconstrained - mean)
    return bk.Draws(narrow, *target.evaluate(narrow), draws.beta, target=target)


# %%
# An exact twin
# -------------
# Of a normal mean with prior :math:`N(0, 1)` and five observations with unit variance the posterior is known,
# :math:`N(m, 1/6)`, so that draws can be exact, or too narrow by a known factor :math:`f`. The truth is then
# :math:`m + z/\sqrt6`, a draw lies below it with probability :math:`\Phi(z/f)`, and the rank among :math:`L` draws is
# :math:`r` with probability
#
# .. math::
#
#    P(r) = \int \binom{L}{r} \Phi(z/f)^r \, (1 - \Phi(z/f))^{L-r} \, \phi(z) \, dz,
#
# which is :math:`1 / (L + 1)` for :math:`f = 1`. The ranks that are found must have these probabilities.


def normal_mean(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def exact_draws(target: bk.Target, seed: int, factor: float) -> bk.Draws:
    # The gradient at zero is the sum of the data, of which the posterior mean is one sixth.
    mean = target.value_and_grad(torch.zeros(1, 1, dtype=torch.float64))[1] / 6
    noise = torch.randn(4, 15, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u = mean + factor * noise / 6**0.5
    return bk.Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)


num_replicates, num_draws = 24 if is_small() else 1000, 15


def rank_probability(rank: int, factor: float) -> float:
    return quad(lambda z: binom.pmf(rank, num_draws, norm.cdf(z / factor)) * norm.pdf(z), -9, 9, epsabs=1e-12)[0]


for factor in (1.0, 0.4):
    probability = np.array([rank_probability(rank, factor) for rank in range(num_draws + 1)])
    found = sbc(
        normal_mean,
        lambda target, seed, f=factor: exact_draws(target, seed, f),
        args=(torch.zeros(5, dtype=torch.float64),),
        num_replicates=num_replicates,
        num_draws=num_draws,
        progress=False,
    )
    counts = np.bincount(found.ranks["mean"], minlength=num_draws + 1)
    z = (counts / num_replicates - probability) / np.sqrt(probability * (1 - probability) / num_replicates)
    print(f"width times {factor}: passed {found.passed}, largest error {np.abs(z).max():.2f} standard errors")
    assert abs(probability.sum() - 1) < 1e-9
    assert factor < 1 or np.abs(probability - 1 / 16).max() < 1e-9
    assert np.abs(z).max() < 4.5
    assert (
        found.smallest_p_value > 1e-5 if factor == 1 else not found.passed
    )  # a right one fails at .01 in 1 % of seeds

# %%
# The dose response
# -----------------
# Where the posterior is not known, only uniformity can be tested, of every parameter and of the log likelihood. The
# second sampler fails in all of them.

dose = torch.tensor([-0.9, -0.3, 0.0, 0.7], dtype=torch.float64)
deaths = torch.zeros(4, dtype=torch.float64)  # only its shape matters
size = {"num_replicates": 20, "num_draws": 15} if is_small() else {"num_replicates": 120, "num_draws": 31}
results = {}
for sampler in (right, overconfident):
    found = results[sampler.__name__] = sbc(dose_response, sampler, args=(dose, deaths), seed=1, progress=False, **size)
    print(f"{sampler.__name__}: " + str(found).replace("p-value 0 ", "p-value < 1e-12 "))  # it is zero to rounding
    columns = ["quantity", "mean_rank", "z", "spread", "adjusted", "passed"]
    small = {"adjusted": lambda p: f"{p:.3g}" if p > 1e-12 else "< 1e-12"}
    table = found.to_pandas()[columns]
    print(table.to_string(index=False, float_format=lambda x: f"{x:.3g}", formatters=small))
assert results["right"].smallest_p_value > 1e-5 and not results["overconfident"].passed
assert is_small() or not results["overconfident"].to_pandas()["passed"].any()

# %%
# A failure on purpose
# --------------------
# Ranks of the second sampler crowd at both ends: the truth lies outside its draws far too often. So do intervals fail
# that leave out a twentieth of the draws on either side: how often do they hold the truth, and how often should they?

figure = Figure(figsize=(8.5, 3.2), layout="constrained")
for axes, (name, found) in zip(figure.subplots(1, 2, sharey=True), results.items(), strict=True):
    ranks = found.ranks["slope"] / found.num_draws
    inside = (np.abs(ranks - 0.5) <= 0.45).mean()
    ideal = (np.abs(np.arange(found.num_draws + 1) / found.num_draws - 0.5) <= 0.45).mean()
    error = (inside * (1 - inside) / len(ranks)) ** 0.5
    print(f"{name}: {inside:.3f} +- {error:.3f}, ideally {ideal:.3f}")
    axes.hist(ranks, bins=16, range=(0, 1))
    axes.axhline(len(ranks) / 16, color="C1", linestyle="--", label="if ranks are uniform")
    axes.set(xlabel="rank of the true slope, as a share", title=name)
    if name == "right":
        axes.set_ylabel("data sets")
        axes.legend(loc="upper right")

# %%
# Try it on yours
# ---------------
# Pass your Pyro model with arguments of the right shape; their observed values play no role, for data are simulated.
#
# .. code-block:: python
#
#    found = sbc(dose_response, right, args=(dose, deaths), num_replicates=20, num_draws=15, seed=1, progress=False)
#    print(found, found.passed)
#
# Without a sampler, :func:`bayeskit.sample` with its defaults is checked. Look at ``passed`` and at the shape of the
# ranks: crowded at both ends, draws are too narrow; in the middle, too wide; at one end, shifted. Twenty replicates
# find gross mistakes, a few hundred small ones. A sampler that passes is right for data like those of the prior; for
# data far from them, check the run itself.
#
# Where to go next: :doc:`/gallery/loss_based_updates/safe_bayes_against_coverage` weighs a loss so that intervals
# cover; :doc:`long_runs` spreads replicates like these over processes.
