r"""
Subsplit Bayesian networks: tree probabilities from a posterior sample, on DS1
==============================================================================

**What you will learn:** how a subsplit Bayesian network gives probabilities to trees that were never sampled, by how
much it, conditional clades and plain frequencies differ from a posterior of 27 tetrapods, at which sample size each is
best, and how much that hangs on what trees are charged that a method rules out.

DS1, ribosomal RNA of 27 tetrapods :cite:p:`hedges1990`, is what tree samplers and variational methods are measured on.
Ten long runs of MrBayes, pooled, stand for its posterior here: their 2,784 trees have frequencies to about one in a
million. A single short run is what a method is given, as in :cite:t:`zhang2018`.
"""

import math
import re
import warnings
from ast import literal_eval
from collections import Counter

import numpy as np
from matplotlib.figure import Figure

from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import (
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
    TreeSample,
    all_topologies,
    tetrapods,
)

# %%
# The model
# ---------
# Three distributions over trees :math:`\tau`, made of the clades :math:`C` of the tree. A clade splits in two with a
# probability that depends on nothing but the clade (conditional clades :cite:p:`hohna2012,larget2013`), on the clade
# and its sister (subsplit networks), or on the whole tree (frequencies):
#
# .. math::
#
#    \prod_{C} Q(C \to A, B \mid C), \qquad
#    \sum_{\text{roots}} Q(\text{root}) \prod_{C} Q(C \to A, B \mid C, \mathrm{sister}(C)), \qquad
#    Q(\tau).
#
# The root of a network is not seen. The simple average takes every place as equally probable, expectation maximisation
# (EM) climbs to a maximum of the likelihood.

fits = {
    "frequencies": SampleFrequencies.fit,
    "conditional clades": ConditionalCladeDistribution.fit,
    "network, simple average": lambda sample: SubsplitBayesianNetwork.fit(sample, "simple_average"),
    "network, EM": SubsplitBayesianNetwork.fit,
    "network, EM with prior": lambda sample: SubsplitBayesianNetwork.fit(sample, alpha=0.001),
}
short_run, long_runs = tetrapods()
posterior = SampleFrequencies.fit(long_runs)
print(f"long runs: {long_runs}")
print(f"as spread out as {np.exp(posterior.entropy().value):.0f} equally probable trees")
print(f"the most probable {np.count_nonzero(np.sort(long_runs.weights)[::-1].cumsum() < 0.95) + 1} hold 95 %")

# %%
# Before the data
# ---------------
# The trees of a sample say which subsplits are possible below each clade. A network that takes all of these for equally
# probable spreads over every tree that they can be combined to, far more than were sampled, and hardly ever draws one
# of the posterior's.

untrained = SubsplitBayesianNetwork.from_topologies(short_run.topologies)
drawn = SampleFrequencies.fit(untrained.sample(1000, seed=0))
shared = float(posterior.log_prob(drawn.topologies).exp().sum())
print(f"27 taxa have {math.prod(range(1, 50, 2)):.1e} trees; {untrained}")
print(f"1000 draws of it show {len(drawn.topologies)} trees, of {shared:.2f} of the posterior's mass")

# %%
# An exact twin
# -------------
# Six taxa have 105 trees with nine places of a root each. The simple average can then be written out: take every
# rooting of every tree, count the splits with their sisters, divide, multiply. The network's probabilities must be the
# same to rounding, add up to one, and be those of its own draws.


def tips(tree) -> frozenset[str]:
    return frozenset([tree]) if isinstance(tree, str) else tips(tree[0]) | tips(tree[1])


def splits(tree, sister=frozenset()) -> list:
    """Return, for each inner node of a rooted tree, its clade with the sister, and how the clade is split."""
    if isinstance(tree, str):
        return []
    left, right = map(tips, tree)
    return [((left | right, sister), frozenset([left, right])), *splits(tree[0], right), *splits(tree[1], left)]


every_tree = all_topologies("ABCDEF")
weights = np.random.default_rng(1).dirichlet(np.full(105, 10.0))
rootings = []
for tree in every_tree:
    texts = [tree.rooted_at(place).to_newick(0)[:-1] for place in range(9)]
    rootings.append([splits(literal_eval(re.sub("([A-F])", "'\\1'", text))) for text in texts])
counts, totals = Counter(), Counter()
for weight, nine in zip(weights, rootings, strict=True):
    for parent, split in sum(nine, []):
        counts[parent, split] += weight / 9
        totals[parent] += weight / 9
by_hand = [sum(np.prod([counts[use] / totals[use[0]] for use in one]) for one in nine) for nine in rootings]
network = SubsplitBayesianNetwork.fit(TreeSample.from_topologies(every_tree, weights), "simple_average")
probabilities = network.log_prob(every_tree).exp().numpy()
print(f"105 trees: off by at most {np.abs(probabilities - by_hand).max():.1e}, sum {probabilities.sum():.12f}")
assert np.abs(probabilities - by_hand).max() < 1e-12
assert abs(probabilities.sum() - 1) < 1e-12

drawn = SampleFrequencies.fit(network.sample(20_000, seed=0)).log_prob(every_tree).exp().numpy()
z = (drawn - probabilities) / np.sqrt(probabilities * (1 - probabilities) / 20_000)
print(f"its draws: off by at most {np.abs(z).max():.2f} standard errors")
assert np.abs(z).max() < 4.5

# %%
# The fit
# -------
# Independent draws from the posterior of four sizes, each five times over, then the short run, once. Divergences are in
# nats; a tree outside the support counts as if it had a probability of 2.2e-16, as in :cite:t:`zhang2018`. They report
# .0155 for frequencies, .0136 for EM, and .60 for conditional clades on DS1, as averages over runs of their own.

floor = float(np.finfo(float).eps)
sizes, num_replicates = ((1000,), 3) if is_small() else ((300, 1000, 3000, 10_000), 5)
found = {name: np.zeros((2, len(sizes), num_replicates)) for name in fits}
for row, size in enumerate(sizes):
    for replicate in range(num_replicates):
        sample = posterior.sample(size, seed=replicate)
        for name, fit in fits.items():
            one = fit(sample)
            found[name][0, row, replicate] = one.kl_from(long_runs, floor=floor)
            found[name][1, row, replicate] = Smoothed(one, epsilon=1e-4).kl_from(long_runs)
print(f"{'independent draws':24}" + "".join(f"{size:>17d}" for size in sizes) + f"{'short run':>14}")
fitted = {name: fits[name](short_run) for name in list(fits)[: 3 if is_small() else 5]}
for name, (table, _) in found.items():
    errors = table.std(1, ddof=1) / math.sqrt(num_replicates)
    short = f"{fitted[name].kl_from(long_runs, floor=floor):14.4f}" if name in fitted else ""
    print(f"{name:24}" + "".join(f"{m:9.3f} +- {e:.3f}" for m, e in zip(table.mean(1), errors, strict=True)) + short)


def gain(one: str, other: str, charge: int = 0) -> np.ndarray:
    """Return by how many standard errors one method is nearer to the posterior than another, for each size."""
    difference = found[other][charge] - found[one][charge]
    return difference.mean(1) * math.sqrt(num_replicates) / difference.std(1, ddof=1)


least = 0.0 if is_small() else 4.5
for sharing in ("network, simple average", "network, EM with prior"):
    assert (gain(sharing, "frequencies") > least).all()
assert is_small() or gain("network, EM with prior", "network, simple average")[-1] > 4.5

# %%
# What it says
# ------------
# How much should be shared depends on how long the run is. With a few hundred independent trees the simple average is
# best, and EM close to counting: it gains its likelihood on the trees it has seen. Conditional clades share so much
# that more trees do not help beyond about .6 nats. The table's errors are those over few samples, and the short run is
# one run. So a chain that has converged gains little from a network, and one that has not gains most from the simple
# average or from EM with a prior.

name = "network, simple average" if is_small() else "network, EM with prior"
exact, network = posterior.log_prob(long_runs.topologies).exp(), fitted[name].log_prob(long_runs.topologies).exp()
seen = SampleFrequencies.fit(short_run).log_prob(long_runs.topologies).isfinite()
print(
    f"{int((~seen).sum())} trees of the long runs, of probability {exact[~seen].sum():.6f}, are not in the short run;"
)
print(f"the network gives them {network[~seen].sum():.6f}")
figure = Figure(figsize=(8.5, 4), layout="constrained")
left, right = figure.subplots(1, 2)
for (name, (table, _)), marker in zip(found.items(), "os^Dv", strict=True):
    left.errorbar(sizes, table.mean(1), table.std(1, ddof=1) / math.sqrt(num_replicates), marker=marker, label=name)
left.set(xscale="log", yscale="log", xlabel="independent trees", ylabel="divergence from the posterior (nats)")
left.legend(frameon=False, fontsize="small")
for chosen, marker, label in ((seen, "o", "in the short run"), (~seen, "x", "not in it")):
    right.plot(exact[chosen], network[chosen], marker, markersize=3, label=label)
right.plot([1e-7, 1], [1e-7, 1], color="0.5", linewidth=1, zorder=0)
right.set(
    xscale="log", yscale="log", xlim=(1e-8, 1), ylim=(1e-12, 1), xlabel="long runs", ylabel="network of the short run"
)
right.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# Frequencies rule out what was not sampled, so that their divergence is infinite, and any finite number is a matter of
# what such a tree is charged. With 2.2e-16 each, frequencies of three thousand trees are nearer to the posterior than
# conditional clades; mixed with one in ten thousand of the uniform distribution, which gives a tree 1e-36, they are
# farther. A ranking of methods with different supports means something only with the charge said.

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert fits["frequencies"](short_run).kl_from(long_runs) == math.inf
print(said[-1].message)
by_floor, by_mixture = (gain("frequencies", "conditional clades", charge) for charge in (0, 1))
print(
    f"frequencies nearer than conditional clades, in standard errors: {by_floor.round(1)}, mixed {by_mixture.round(1)}"
)
assert is_small() or by_floor[2] > 4.5 and by_mixture[2] < -4.5

# %%
# Try it on yours
# ---------------
# Read the trees of your chain, from MrBayes or BEAST, fit, and ask for trees that were never sampled. Look at how the
# network of one run predicts another: where ``kl_from`` is large or warns, the runs are too short.
#
# .. code-block:: python
#
#    sample = TreeSample.from_file("yours.t", burn_in=0.25)
#    network = SubsplitBayesianNetwork.fit(sample, alpha=0.001)
#    network.kl_from(TreeSample.from_file("another_run.t", burn_in=0.25))
#
# Use a network for trees that were not drawn and to propose new ones; for the splits of a well sampled posterior,
# frequencies are enough.
#
# Where to go next: :doc:`variational_phylogenetics_of_mammals` trains a network without a sample.
