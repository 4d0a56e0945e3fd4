r"""
Amortised neural posterior estimation for every sample size: Newcomb's times
============================================================================

**What you will learn:** how one network gives the posterior for any number of observations at once, how its error is
taken away where the model has a likelihood, how it says that it has never seen such data, and why it pools by means,
maxima and the number of observations.

Simon Newcomb measured the passage time of light 66 times in 1882 :cite:p:`stigler1977`. A posterior after each
measurement takes 66 runs of a sampler. A network that is trained on simulations of the model answers all of them, and
any other data of the model, in milliseconds.
"""

import math
import time
from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import DataError
from bayeskit.gallery import is_small

# %%
# The model
# ---------
# Deviations from 24,800 nanoseconds are normal, with unknown mean and spread. The network reads sets: it takes means
# and maxima over the measurements of what it computes from each, and their number :cite:p:`zaheer2017`.


def model(times):
    mean = pyro.sample("mean", dist.Normal(25.0, 10.0))
    spread = pyro.sample("spread", dist.LogNormal(2.0, 0.7))
    with pyro.plate("measurements", len(times)):
        pyro.sample("times", dist.Normal(mean, spread), obs=times)


start = time.perf_counter()
posterior = bk.amortize(
    model, (torch.zeros(66, dtype=torch.float64),), sizes=(1, 66), num_steps=400 if is_small() else 5000, progress=False
)
print(f"{posterior}: {time.perf_counter() - start:.0f} s of training")

# %%
# The posterior after 1, 2, ... measurements
# ------------------------------------------
# The measurements in Newcomb's order, without the two that he himself doubted, -44 and -2.

newcomb = torch.tensor(
    [28, 26, 33, 24, 34, 27, 16, 40, 29, 22, 24, 21, 25, 30, 23, 29, 31, 19, 24, 20, 36, 32, 36, 28, 25, 21, 28, 29,
     37, 25, 28, 26, 30, 32, 36, 26, 30, 22, 36, 23, 27, 27, 28, 27, 31, 27, 26, 33, 26, 32, 32, 24, 39, 28, 24, 25,
     32, 25, 29, 27, 28, 29, 16, 23.0], dtype=torch.float64,
)  # fmt: skip
sizes = (1, 2, 4, 8, 16, 32, 64)
start = time.perf_counter()
bands = [
    posterior.sample(newcomb[:n])["mean"].flatten().quantile(torch.tensor([0.05, 0.5, 0.95]).double()) for n in sizes
]
print(f"{len(sizes)} posteriors: {time.perf_counter() - start:.2f} s")

# %%
# An exact twin
# -------------
# Two parameters can be integrated on a grid. ``correct`` weights draws of the network by the model's own likelihood, so
# that its draws are those of the posterior and its evidence is unbiased, whatever the network has learnt.


def on_a_grid(data):
    """Return log evidence and mean of the posterior of the mean, by quadrature in unconstrained space."""
    target = posterior.target(data)
    grid = torch.cartesian_prod(torch.linspace(-25, 75, 801).double(), torch.linspace(-2, 6, 401).double())
    density = target.log_density(grid)
    evidence = float(density.logsumexp(0)) + math.log(100 / 800 * 8 / 400)
    return evidence, float(density.softmax(0) @ grid[:, 0])


errors = []
for n in sizes:
    draws, z = posterior.correct(newcomb[:n], num_draws=4000)
    evidence, mean = on_a_grid(newcomb[:n])
    network = float(posterior.sample(newcomb[:n], num_draws=4000)["mean"].mean())
    corrected = float(draws["mean"].mean())
    print(f"{n:>2}: mean {mean:.3f}, network {network:.3f}, corrected {corrected:.3f}; {z}, exactly {evidence:.3f}")
    errors.append((z.log_evidence - evidence) / z.standard_error)
assert max(map(abs, errors)) < 5

figure = Figure(figsize=(7, 4), layout="constrained")
ax = figure.subplots()
low, middle, high = torch.stack(bands).T
ax.fill_between(sizes, low, high, alpha=0.3, label="network: 90 % interval")
ax.plot(sizes, middle, label="network: median")
ax.plot(sizes, [on_a_grid(newcomb[:n])[1] for n in sizes], "ko", markersize=4, label="exact mean")
ax.set(xscale="log", xlabel="number of measurements", ylabel="mean (ns above 24,800)", xticks=sizes)
ax.set_xticklabels(sizes)
ax.legend(frameon=False)

# %%
# Where it fails
# --------------
# Of data in other units the network knows nothing, and would extrapolate without a word. They are compared with
# simulations first.

try:
    posterior.sample(newcomb[:8] + 24_800)
except DataError as error:
    print(error)
else:
    raise AssertionError("data in other units were not noticed")

# %%
# What do poolings not see?
# -------------------------
# Deep sets :cite:p:`zaheer2017` add the codes of all members, PointNet :cite:p:`qi2017` takes the largest of each
# entry. The mean and the maximum of codes are the same for a set and for the same set twice, whatever the codes are,
# but the posteriors differ: the standard deviation of a normal mean with a standard normal prior is :math:`(1 +
# n)^{-1/2}`. Half the difference is an error that no network with such a code can go below. The number repairs this. It
# does not repair all: the maximum is the same for two sets of three with the same two values and different medians
# :cite:p:`bueno2021`. And a sum grows with the set, beyond what a network has seen.

with torch.random.fork_rng():
    torch.manual_seed(0)
    code = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.SiLU(), torch.nn.Linear(32, 24))
code = code.double().requires_grad_(False)
poolings = {"sum": lambda y: code(y).sum(0), "mean": lambda y: code(y).mean(0), "max": lambda y: code(y).amax(0)}
few, low_median, high_median = (
    torch.tensor(values).double()[:, None] for values in ([0.7, -0.7, 0.4], [-1.0, -1.0, 1.0], [-1.0, 1.0, 1.0])
)
for name, pool in poolings.items():
    twice = float((pool(few) - pool(few.repeat(2, 1))).abs().max())
    medians = float((pool(low_median) - pool(high_median)).abs().max())
    print(f"{name:>4}: a set and the set twice differ by {twice:.4f}, medians of -1 and 1 by {medians:.4f}")
    assert (twice < 1e-12) == (name != "sum") and (medians < 1e-12) == (name == "max")
print(f"posterior sd without the number: error at least {(4**-0.5 - 7**-0.5) / 2:.4f}")

# %%
# How small may the code be?
# --------------------------
# A sum over rows of codes can represent every function of a set of :math:`M` numbers only if codes have :math:`M`
# dimensions at least :cite:p:`wagstaff2019`; the median is such a function. Networks with codes of few and of many
# numbers learn the median of five: the error falls until the code has five numbers, and no further.


def perceptron(*widths):
    layers = [layer for pair in pairwise(widths) for layer in (torch.nn.Linear(*pair), torch.nn.SiLU())]
    return torch.nn.Sequential(*layers[:-1])


def error_with_codes_of(width, num_steps):
    """Return the root mean square error of the median of five uniform numbers, after training."""
    with torch.random.fork_rng():
        torch.manual_seed(width)
        of_row, of_sum = perceptron(1, 64, 64, width), perceptron(width, 64, 64, 1)
        optimizer = torch.optim.Adam([*of_row.parameters(), *of_sum.parameters()], lr=3e-3)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        for _ in range(num_steps):
            x = 2 * torch.rand(256, 5, 1) - 1
            loss = (of_sum(of_row(x).sum(1)) - x.median(1).values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
        x = 2 * torch.rand(10_000, 5, 1) - 1
        with torch.no_grad():
            return float((of_sum(of_row(x).sum(1)) - x.median(1).values).square().mean().sqrt())


widths = (1, 10) if is_small() else (1, 2, 3, 5, 10)
found = [error_with_codes_of(width, 400 if is_small() else 3000) for width in widths]
for width, error in zip(widths, found, strict=True):
    print(f"codes of {width:>2} numbers: error {error:.4f}")
assert found[-1] < (1.0 if is_small() else 0.5) * found[0]  # small networks have hardly learnt

# %%
# Try it on yours
# ---------------
# ``args`` takes your model's arguments of the largest size, or a function of the size where there are covariates.
# Look at the errors of ``posterior.correct``, where the model has a likelihood, and at a
# :class:`~bayeskit.errors.DataError`: it says that your data are unlike all simulations. :func:`bayeskit.sbc` takes the
# network as a sampler, ``bk.sbc(model, posterior, args=...)``. For one data set, :func:`bayeskit.sample` is quicker.
#
# .. code-block:: python
#
#    posterior = bk.amortize(model, (torch.zeros(66, dtype=torch.float64),), sizes=(1, 66), num_steps=400)
#    draws, z = posterior.correct(newcomb[:8], num_draws=4000)
#    print(draws["mean"].mean(), z.trusted)
#
# Where to go next: :doc:`simulator_in_a_hierarchy` learns a likelihood in place of a posterior,
# :doc:`simulation_based_calibration` checks either, :doc:`/gallery/loss_based_updates/newcombs_median` asks these times
# for their median.
