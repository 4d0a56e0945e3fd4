r"""
Neural likelihood estimation: a simulator inside a hierarchical Pyro model
==========================================================================

**What you will learn:** how to learn the likelihood of a simulator, put it into a hierarchical Pyro model as any other
distribution, see how far it is off, and what happens with data that the simulator never gave.

Many simulators have no likelihood that can be written down, and the data come in groups. A network that learns the
posterior would have to know the hierarchy. One that learns the likelihood :cite:p:`papamakarios2019` does not: it is
learned once, from single data, and the groups, priors and further data are those of a Pyro model.
"""

# sphinx_gallery_thumbnail_number = 1
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import DataError
from bayeskit.gallery import is_small
from bayeskit.workflows import learn_likelihood, rejection_abc

DOUBLE = torch.float64

# %%
# The simulator
# -------------
# The g-and-k distribution :cite:p:`rayner2002` turns a normal variable :math:`z` into
#
# .. math:: y = a + \left(1 + 0.8 \tanh \frac{g z}{2}\right) (1 + z^2)^{0.2}\, z,
#
# skewed by :math:`g` and with heavy tails. It is quick to simulate, and its density has no formula.


def quantile(z, g):
    return (1 + 0.8 * torch.tanh(0.5 * g * z)) * (1 + z * z) ** 0.2 * z


def simulator(theta, generator):
    z = torch.randn(len(theta), generator=generator, dtype=DOUBLE)
    return theta[:, 0] + quantile(z, theta[:, 1])


prior = dist.Normal(torch.zeros(2, dtype=DOUBLE), torch.tensor([3.0, 1.0], dtype=DOUBLE)).to_event(1)
num_simulations = 20_000 if is_small() else 40_000
likelihood = learn_likelihood(simulator, prior, num_simulations=num_simulations, progress=False)
print(likelihood)
assert likelihood.trusted

# %%
# An exact twin
# -------------
# Here the truth is known after all: the density at :math:`y` is that of the :math:`z` behind it, which is found on a
# fine grid, divided by the slope. The mean difference of log densities is the divergence from the truth, in nats for a
# datum.

z = torch.linspace(-8, 8, 8001, dtype=DOUBLE)


def exact_log_density(y, g):
    at_grid = quantile(z, torch.as_tensor(g, dtype=DOUBLE))
    (slope,) = torch.gradient(at_grid, spacing=(z,))
    log_density = dist.Normal(0.0, 1.0).log_prob(z) - slope.log()
    return torch.as_tensor(np.interp(y.numpy(), at_grid.numpy(), log_density.numpy()))


def divergence(likelihood, theta, seed=1):
    fresh = simulator(theta, torch.Generator().manual_seed(seed))
    exact = torch.stack([exact_log_density(y - a, g) for y, (a, g) in zip(fresh, theta, strict=True)])
    off = exact - likelihood(theta, validate_args=False).log_prob(fresh)
    print(f"{float(off.mean()):.4f} +- {float(off.std()) / math.sqrt(len(off)):.4f} nats for a datum")
    return float(off.mean())


drawn = torch.randn(1000, 2, generator=torch.Generator().manual_seed(2), dtype=DOUBLE) * torch.tensor([3.0, 1.0])
assert divergence(likelihood, drawn) < 0.05

# %%
# The hierarchy
# -------------
# Six groups of ten data have locations of their own around an unknown mean, and share their skewness. The line with the
# likelihood is as with any distribution; its density is batched and traced with the rest of the model.


def hierarchy(y, likelihood):
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 2.0))
    skewness = pyro.sample("skewness", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("groups", y.shape[1], dim=-1):
        location = pyro.sample("location", dist.Normal(mean, 1.0))
        with pyro.plate("data", len(y), dim=-2):
            theta = torch.stack([location, skewness.expand_as(location)], -1)
            pyro.sample("y", likelihood(theta.expand(*y.shape, 2)), obs=y)


generator = torch.Generator().manual_seed(0)
locations = 1 + torch.randn(6, generator=generator, dtype=DOUBLE)
each = torch.stack([locations, torch.full((6,), 0.8, dtype=DOUBLE)], 1).repeat(10, 1)
y = simulator(each, generator).reshape(10, 6)
target = bk.Target.from_pyro(hierarchy, y, likelihood)
num_warmup, num_samples = (100, 100) if is_small() else (500, 1000)
draws = bk.sample(target, num_warmup=num_warmup, num_samples=num_samples, progress=False)
drawn = {name: draws[name].flatten(0, 1) for name in ("mean", "skewness", "location")}
inside = torch.stack([drawn["location"], drawn["skewness"].unsqueeze(-1).expand_as(drawn["location"])], -1)
inside = inside.reshape(-1, 2)
assert bool(likelihood.covers(inside).all())  # no draw is where nothing was simulated

# %%
# An error of a hundredth of a nat adds up over 60 data. So a second round simulates at parameters from this posterior,
# where alone the likelihood matters, and the draws are weighted by what changes. Their effective number tells how much.

refined = likelihood.refine(parameters=inside, num_simulations=num_simulations // 2, num_epochs=20, progress=False)
before, after = (divergence(x, inside[:: len(inside) // 500], seed=3) for x in (likelihood, refined))
assert after < 0.02 and after < before + 0.005
better = bk.Target.from_pyro(hierarchy, y, refined)
u = draws.unconstrained.reshape(-1, target.dim)
weights_of_draws = (better.log_density(u) - target.log_density(u)).softmax(0).detach()
print(f"{float(1 / weights_of_draws.square().sum()):.0f} of {len(u)} draws are effective")

# %%
# What it says
# ------------
# With the exact density, locations are integrated out by quadrature for every mean and skewness on a grid.

means, skews = torch.linspace(-2, 4, 121, dtype=DOUBLE), torch.linspace(-1, 3, 61, dtype=DOUBLE)
a = torch.linspace(-5, 7, 241, dtype=DOUBLE)
by_location = torch.stack([exact_log_density(y - a[:, None, None], g).sum(1) for g in skews])  # (skews, a, groups)
around = (dist.Normal(means[:, None], 1.0).log_prob(a) + math.log(a[1] - a[0])).unsqueeze(-1)  # (means, a, 1)
table = torch.stack([(around + grid).logsumexp(1).sum(1) for grid in by_location])
table = table + dist.Normal(0.0, 2.0).log_prob(means) + dist.Normal(0.0, 1.0).log_prob(skews)[:, None]
weights = (table - table.logsumexp((0, 1))).exp()

figure = Figure(figsize=(7, 3.2), layout="constrained")
grids = {"mean": (means, weights.sum(0)), "skewness": (skews, weights.sum(1))}
for axes, (name, (grid, mass)) in zip(figure.subplots(1, 2), grids.items(), strict=True):
    centre = float(mass @ grid)
    spread = math.sqrt(float(mass @ (grid - centre).square()))
    found = float(weights_of_draws @ drawn[name])
    width = math.sqrt(float(weights_of_draws @ (drawn[name] - found).square()))
    print(f"{name}: {found:.3f} +- {width:.3f}, exactly {centre:.3f} +- {spread:.3f}")
    assert abs(found - centre) < 0.5 * spread and 0.6 < width / spread < 1.5
    axes.hist(drawn[name].numpy(), bins=30, weights=weights_of_draws, density=True, alpha=0.5, label="learned")
    axes.plot(grid, mass / (grid[1] - grid[0]), "C2", label="quadrature")
    axes.set(xlabel=name)
axes.legend()

# %%
# The baseline
# ------------
# Rejection :cite:p:`pritchard1999` keeps parameters whose data sets look like the observed one. For one group alone,
# with as many simulations as the network had, it is farther from the posterior: summaries lose something, and those
# kept are near the observed ones but not equal.

first, grid = y[:, 0], torch.cartesian_prod(a, skews)
log_prior = prior.log_prob(grid)
exact = log_prior + by_location[:, :, 0].T.reshape(-1)
with torch.no_grad():
    learned = log_prior + sum(likelihood(grid, validate_args=False).log_prob(v.expand(len(grid))) for v in first)
kept = rejection_abc(simulator, prior, first, num_simulations=num_simulations, share=0.02)
moments = {}
for name, points, log_weights in (
    ("exact", grid, exact),
    ("learned", grid, learned),
    ("rejection", kept, torch.zeros(len(kept), dtype=DOUBLE)),
):
    w = log_weights.softmax(0)
    centre = w @ points
    moments[name] = torch.cat([centre, (w @ (points - centre).square()).sqrt()])
    print(f"{name}: location and skewness {centre.tolist()}, spreads {moments[name][2:].tolist()}")
worst = {
    name: float(((x - moments["exact"]) / moments["exact"][2:].repeat(2)).abs().max()) for name, x in moments.items()
}
assert worst["learned"] < 0.3 and worst["learned"] < worst["rejection"]

# %%
# A failure on purpose
# --------------------
# A likelihood is learned where simulations were. Let them come from a narrow prior: the network would still give a
# number for data of the sixth group moved by 30, and a sampler would follow it. The target is refused instead.

narrow = dist.Normal(torch.zeros(2, dtype=DOUBLE), torch.tensor([0.3, 1.0], dtype=DOUBLE)).to_event(1)
narrowly = learn_likelihood(simulator, narrow, num_simulations=2000, num_epochs=10, progress=False)
moved = y + 30 * (torch.arange(6) == 5)
print("density of a datum at 33:", float(narrowly(torch.zeros(2), validate_args=False).log_prob(torch.tensor(33.0))))
try:
    bk.Target.from_pyro(hierarchy, moved, narrowly)
except DataError as refused:
    print(refused)
else:
    raise AssertionError("data far from all simulations were taken")

# %%
# Try it on yours
# ---------------
# Write a simulator of one datum, ``simulator(parameters, generator)``, or ``batched=False`` for one that takes a vector
# at a time, and a prior wide enough for all groups. Simulations that fail are counted. Look at ``likelihood.warnings``,
# and call ``likelihood.refine(parameters=...)`` with draws from your posterior until the score no longer rises.
#
# .. code-block:: python
#
#    likelihood = learn_likelihood(simulator, prior, num_simulations=20_000)
#    draws = bk.sample(bk.Target.from_pyro(hierarchy, y, likelihood))
#    print(likelihood.trusted, likelihood.warnings)
#
# Where to go next: :doc:`simulation_based_calibration` checks a sampler with a simulator's own data.
