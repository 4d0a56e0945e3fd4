r"""
Dating a tree from samples of different years: the coalescent with dated tips
=============================================================================

**What you will learn:** how sequences that were sampled in different years date their common ancestor without a fossil,
what the coalescent says of a tree and its heights, and which tree priors do not allow dated tips.

A virus changes so fast that samples of a few years ago are measurably closer to the root than those of today. Their
dates calibrate the molecular clock, and the coalescent :cite:p:`kingman1982,rodrigo1999` is the prior of the tree. The
sequences here are simulated, so that the true dates are known.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import SettingsError
from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import (
    JC69,
    Alignment,
    BirthDeathTree,
    ConstantCoalescent,
    DatedTopology,
    StrictClock,
    TimeTreeModel,
    dates_from_names,
    plot_time_tree,
)

# %%
# The model
# ---------
# Going back in time, each pair of lineages joins at rate :math:`1 / N`, and a lineage is there from the date of its
# sample on. With :math:`k(t)` lineages at height :math:`t` and nodes at heights :math:`h_1, \dots, h_{n-1}`,
#
# .. math::
#
#    p(\text{tree}, h) = N^{-(n-1)} \exp\Big\{ -\frac{1}{N} \int \frac{k(t) (k(t) - 1)}{2} \, dt \Big\},
#
# and along a branch the sequence changes at a rate :math:`r` a year. Names end in dates, and
# ``dates_from_names`` reads them. Below, a history of ten samples from the model itself, with :math:`N` of four years,
# and 1,500 sites that change at a rate of 0.004 a year.

rng = np.random.default_rng(0)
size, rate, num_sites = 4.0, 0.004, 600 if is_small() else 1500
years = [2010, 2010, 2008, 2007, 2005, 2005, 2003, 2002, 2001, 2000]
names = [f"{letter}/{year}" for letter, year in zip("ABCDEFGHIJ", years, strict=True)]
names = names[::2] if is_small() else names
dates = dates_from_names(names)
waiting = sorted((2010.0 - dates[name], name) for name in names)
now, lineages, nodes = 0.0, [], {}
while len(lineages) > 1 or waiting:
    pairs = len(lineages) * (len(lineages) - 1) / 2
    then = now + rng.exponential(size / pairs) if pairs else math.inf
    if waiting and waiting[0][0] <= then:
        now, name = waiting.pop(0)
        lineages.append(name)
    else:
        now, (one, other) = then, rng.choice(len(lineages), 2, replace=False)
        joined = f"({lineages[one]},{lineages[other]})"
        nodes[joined] = now, lineages[one], lineages[other]
        lineages = [lineage for place, lineage in enumerate(lineages) if place not in (one, other)] + [joined]
root, sequences = lineages[0], {lineages[0]: rng.integers(4, size=num_sites)}
for node in [root, *sorted(nodes, key=lambda node: -nodes[node][0])]:
    for child in nodes[node][1:]:
        duration = nodes[node][0] - (nodes[child][0] if child in nodes else 2010.0 - dates[child])
        changed = rng.random(num_sites) < 1 - math.exp(-4 / 3 * rate * duration)  # to any base, the same too
        sequences[child] = np.where(changed, rng.integers(4, size=num_sites), sequences[node])
alignment = Alignment.from_sequences({name: "".join("ACGT"[base] for base in sequences[name]) for name in names})
newick = root + ";"
print(f"{newick} root in {2010 - nodes[root][0]:.1f}")

# %%
# Before the data
# ---------------
# What the prior says of the root's date, with the size of the population log-normal around two years.

prior = ConstantCoalescent(dist.LogNormal(torch.tensor(math.log(2.0)), torch.tensor(1.0)))
clock = StrictClock(dist.LogNormal(torch.tensor(math.log(0.01)), torch.tensor(2.0)))
model = TimeTreeModel(alignment, newick, JC69(), dates=dates, clock=clock, tree_prior=prior)
target = bk.Target.from_pyro(model)
heights = target.constrain(target.sample_prior(500, seed=0))["node_heights"]
before = Figure(figsize=(6, 2.6), layout="constrained")
axes = before.subplots()
axes.hist((2010 - heights[:, -1]).clamp(min=1900).numpy(), bins=40, color="0.7")
axes.axvline(2010 - nodes[root][0], color="C3")
axes.set(xlabel="year of the root (1900: or before; line: true)", ylabel="draws from the prior")

# %%
# An exact twin
# -------------
# Three tips at heights 0, 0.4 and 0.9, the first two of them siblings. If they join before the third is there, at
# :math:`h_1 < 0.9`, then there were two lineages and then two again; else there were three for a while.

three = DatedTopology.of("((A,B),C);", tip_heights={"A": 0.0, "B": 0.4, "C": 0.9})
values = {"population_size": torch.tensor(0.7, dtype=torch.float64)}
for low, high in ((0.6, 2.0), (1.3, 2.0)):
    pairs = (low - 0.4) + (high - 0.9) if low < 0.9 else 0.5 + 3 * (low - 0.9) + (high - low)
    by_hand = -2 * math.log(0.7) - pairs / 0.7
    heights = torch.tensor([low, high], dtype=torch.float64)
    coalescent = ConstantCoalescent()
    found = coalescent.heights(three, values).log_prob(heights) + coalescent.log_topology(three, values, heights)
    print(f"nodes at {low} and {high}: log density {float(found):.12f}, by hand {by_hand:.12f}")
    assert abs(float(found) - by_hand) < 1e-12

# %%
# The first two tips are siblings if they join in time, or by a chance of one in three.

toy = Alignment.from_sequences({"A": "A", "B": "A", "C": "A"})
tips = {"A": 0.0, "B": 0.4, "C": 0.9}
of_size = TimeTreeModel(toy, "((A,B),C);", tip_heights=tips, tree_prior=ConstantCoalescent(0.7), clock=StrictClock(1.0))
log_probability, error = of_size.topology_probability(20_000, seed=0)
exact = math.log(1 - math.exp(-0.5 / 0.7) * 2 / 3)
print(f"log probability of the topology {exact:.5f}, by draws {log_probability:.5f} +- {error:.5f}")
assert abs(log_probability - exact) < 4.5 * error

# %%
# The fit
# -------
# First three of the samples, of a known population size. Under JC69 patterns of three bases have closed probabilities,
# of :math:`e^{-4 d / 3}` for the lengths :math:`d` from the node where the tips meet, and a grid of the two heights and
# the log rate gives the exact posterior. Draws must agree with it.

settings = {"num_chains": 16, "num_warmup": 100 if is_small() else 200, "num_samples": 40 if is_small() else 150}
trio = ["A/2010", "E/2005", "I/2001"]
a, b, c = (sequences[name] for name in trio)
counts = [int(((p == q) & (p != r)).sum()) for p, q, r in ((a, b, c), (a, c, b), (b, c, a))]
same, grid = int(((a == b) & (b == c)).sum()), (np.arange(100) + 0.5) / 100
g1, g2, log_r = np.meshgrid(grid, grid, -9 + 7 * grid, indexing="ij", sparse=True)
h1, h2 = 5 + 40 * g1**3, np.maximum(5 + 40 * g1**3, 9) + 60 * g2**3  # dense where a node is near a sample
u, v, w = (np.exp(-4 / 3 * np.exp(log_r) * time) for time in (h1, h1 - 5, 2 * h2 - h1 - 9))
two, all_three = (u * v, u * w, v * w), u * v * w
log_p = -np.where(h1 < 9, h1 - 5 + h2 - 9, 4 + 3 * (h1 - 9) + h2 - h1) / size - (log_r - math.log(0.01)) ** 2 / 8
log_p = log_p + 2 * np.log(g1 * g2) + same * np.log1p(3 * sum(two) + 6 * all_three)
log_p = log_p + (num_sites - same - sum(counts)) * np.log1p(2 * all_three - sum(two))
log_p = log_p + sum(k * np.log1p(4 * e - sum(two) - 2 * all_three) for k, e in zip(counts, two, strict=True))
of_trio = {"dates": {name: dates[name] for name in trio}, "clock": clock, "tree_prior": ConstantCoalescent(size)}
three_model = TimeTreeModel(alignment.select(trio), "((A/2010,E/2005),I/2001);", JC69(), **of_trio)
draws = bk.sample(bk.Target.from_pyro(three_model), **settings, seed=2, progress=False)
roots, log_rates = torch.as_tensor(draws["node_heights"])[..., -1], torch.as_tensor(draws["clock_rate"]).log()
for name, value, exact in (("root", 2010 - roots, 2010 - h2), ("log rate", log_rates, log_r)):
    mean, error = float(value.mean()), float(value.mean(-1).std()) / len(value) ** 0.5
    exact_mean = float(np.average(np.broadcast_to(exact, log_p.shape), weights=np.exp(log_p - log_p.max())))
    print(f"three samples, {name}: exactly {exact_mean:.3f}, by draws {mean:.3f} +- {error:.3f}")
    assert abs(mean - exact_mean) < 4.5 * error

# %%
# Then all samples: heights, rate and population size at once, given the topology. The errors are Monte Carlo errors of
# the mean, from the means of the chains. One data set says only that the true values are not far outside.

draws = bk.sample(target, **settings, seed=0, progress=False)
heights = torch.as_tensor(draws["node_heights"])
true = {"year of the root": 2010 - nodes[root][0], "rate": rate, "population size": size}
found = {"year of the root": 2010 - heights[..., -1], "rate": torch.as_tensor(draws["clock_rate"])}
found["population size"] = torch.as_tensor(draws["population_size"])
for name, value in found.items():
    error = value.mean(-1).std() / len(value) ** 0.5
    low, high = value.flatten().quantile(torch.tensor([0.025, 0.975], dtype=value.dtype)).tolist()
    print(f"{name}: {value.mean():.5g} +- {error:.1g}, 95 % {low:.5g} to {high:.5g}; true {true[name]:.5g}")

# %%
# A failure on purpose: dates left out
# ------------------------------------
# As if all samples were of one year, only the product of rate and time shows in the sequences: the rate keeps the
# doubt of its prior. And a birth-death process of sampled species has no place for tips of the past; it is refused.

undated = TimeTreeModel(alignment, newick, JC69(), clock=clock, tree_prior=prior)
without = bk.sample(bk.Target.from_pyro(undated), **settings, seed=1, progress=False)
known, unknown = (float(torch.as_tensor(rates).log().std()) for rates in (found["rate"], without["clock_rate"]))
print(f"standard deviation of the log rate {known:.2f} with dates, {unknown:.2f} without")
assert unknown > 1.5 * known
try:
    TimeTreeModel(alignment, newick, dates=dates, tree_prior=BirthDeathTree())
except SettingsError as refused:
    print(f"SettingsError: {refused}".splitlines()[0])
else:
    raise AssertionError("a birth-death prior took dated tips")

# %%
# What it says
# ------------
# Ten years of samples date a root that is older than any of them, with an interval of several years: rate and age trade
# off, and only the dates hold them apart. The size of the population is known least, for nine joins of lineages are all
# that there is to know it from.

figure = Figure(figsize=(7, 4), layout="constrained")
plot_time_tree(model.dated, heights, figure.subplots())

# %%
# Try it on yours
# ---------------
# Replace the alignment and the rooted topology by yours; dates come from the names, or from a table by
# ``dates_from_file``. Look at the interval of the rate first: if it is as wide as its prior, the samples are of too few
# years to date anything.
#
# .. code-block:: python
#
#    from bayeskit.models.phylogenetics import HKY85
#
#    alignment = Alignment.from_file("virus.fasta")
#    dates = dates_from_names(alignment.taxa, separator="|")
#    model = TimeTreeModel(alignment, "((A|2009.5,B|2010),C|2007);", HKY85(), dates=dates)
#    draws = bk.sample(bk.Target.from_pyro(model))
#
# Where to go next: :doc:`a_clock_for_primates` dates nodes by the age of the root, and tests the clock.
