r"""
Subsplit Bayesian networks: tree probabilities from a posterior sample of trees
===============================================================================

**What you will learn:** how a subsplit Bayesian network turns a few hundred sampled trees into a distribution that
gives probabilities to trees which were never sampled, and why the fit of the highest likelihood is not the nearest to
the truth.

A Markov chain over trees visits each of them in proportion to its posterior probability, but there are so many trees
that most are visited once or never. :cite:t:`zhang2018` share what trees have in common. The question here is how well
that works, so the posterior has to be known. It is made of the gene BRCA1 of :cite:t:`murphy2001`, as it ships with the
package cogent3: six mammals have 105 unrooted trees, few enough to weigh every one by its evidence. The gene cannot
tell how human, chimpanzee and gorilla are related (:doc:`four_apes_that_tie`); so human is replaced by each of the
three arrangements, a third each, and there are 315 trees of eight mammals.
"""

import re
from ast import literal_eval
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import (
    HKY85,
    Alignment,
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
    Topologies,
    Tree,
    TreeSample,
    all_topologies,
    empirical_frequencies,
)
from bayeskit.workflows.phylogenetics import compare_topologies

# %%
# The model
# ---------
# A rooted tree is built from the root down. Every clade :math:`C` is split in two, and how it is split may depend on
# the clade itself and on its sister, and on nothing else; an unrooted tree is the sum over the :math:`2n - 3` places of
# its root :math:`\rho`,
#
# .. math::
#
#    Q(\tau) = \sum_{\rho} Q(S_\rho) \prod_{C \in (\tau, \rho)} Q(C \to A, B \mid C, \mathrm{sister}(C)).
#
# The same split with the same sister occurs in many trees, and has one parameter in all of them. Where the root was is
# not seen: it is either taken as equally probable everywhere (the simple average), or summed out by expectation
# maximisation, which climbs to a maximum of the likelihood.

taxa = ["Human", "Horse", "Cat", "Cow", "FlyingFox", "Mole"]
folder = find_spec("cogent3").submodule_search_locations[0]  # without importing the package, which takes seconds
alignment = Alignment.from_file(Path(folder) / "_dataset" / "brca1.fasta").select(taxa)
six = all_topologies(taxa)
apes = ["((Human,Chimpanzee),Gorilla)", "((Human,Gorilla),Chimpanzee)", "((Chimpanzee,Gorilla),Human)"]
trees = Topologies.from_trees(
    [Tree.from_newick(tree.to_newick(0).replace("Human", three)) for tree in six for three in apes]
)
fits = {
    "frequencies": SampleFrequencies.fit,
    "conditional clades": ConditionalCladeDistribution.fit,
    "network, simple average": lambda sample: SubsplitBayesianNetwork.fit(sample, "simple_average"),
    "network, em": SubsplitBayesianNetwork.fit,
    "network, em with prior": lambda sample: SubsplitBayesianNetwork.fit(sample, "em", alpha=0.1),
}

# %%
# Before the data
# ---------------
# The support of a network comes from the trees that it is made of. With all options of every choice alike, before any
# sample is seen, it is not the uniform distribution over these trees, though not far from it: a sample drawn from it
# shows most of them, none very often, where one from the posterior will show few trees many times.

untrained = SubsplitBayesianNetwork.from_topologies(trees)
ratio = np.sort(untrained.log_prob(trees).exp().numpy())[::-1] * len(trees)
print(f"{untrained}, {len(trees)} trees")
print(f"untrained, times the uniform probability: from {ratio[-1]:.2f} to {ratio[0]:.2f}")
before = SampleFrequencies.fit(untrained.sample(600, seed=0)).log_prob(trees).exp().numpy()
print(f"600 trees drawn from it: {np.count_nonzero(before)} kinds, the most frequent {600 * before.max():.0f} times")

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
# The posterior of the trees comes from their evidence, one integral over branch lengths each. From it samples of
# different sizes are drawn, and each is given to five methods: counting, conditional clades
# :cite:p:`hohna2012,larget2013`, and three fits of the network, the last with a Dirichlet prior worth a tenth of the
# sample. A share of one in a thousand is spread evenly over all trees of these taxa, so that the Kullback-Leibler
# divergence of each fit from the posterior, in nats, is finite.

substitution = HKY85(4.0, empirical_frequencies(alignment))
found = compare_topologies(alignment, six, substitution=substitution, num_draws=2000, progress=False)
assert found.untrusted_probability < 0.01
posterior = SampleFrequencies.fit(TreeSample.from_topologies(trees, found.posterior_probabilities.repeat_interleave(3)))
print(f"the posterior is spread over the equivalent of {np.exp(posterior.entropy().value):.1f} trees")

sizes, num_replicates = ([60, 200], 6) if is_small() else ([60, 200, 600, 2000], 20)
divergence = {name: np.zeros((len(sizes), num_replicates)) for name in fits}
for row, size in enumerate(sizes):
    for replicate in range(num_replicates):
        sample = posterior.sample(size, seed=replicate)
        for name, fit in fits.items():
            divergence[name][row, replicate] = Smoothed(fit(sample), epsilon=0.001).kl_from(posterior)
print("trees sampled           " + "".join(f"{size:>18d}" for size in sizes))
for name, table in divergence.items():
    errors = table.std(1, ddof=1) / num_replicates**0.5
    print(f"{name:24s}" + "".join(f"{m:10.3f} +- {e:.3f} " for m, e in zip(table.mean(1), errors, strict=True)))

# Sharing pays at every size, by conditional clades and by the simple average. In em the likelihood never falls.
for name in ("conditional clades", "network, simple average"):
    gain = divergence["frequencies"] - divergence[name]
    assert (gain.mean(1) > 4.5 * gain.std(1, ddof=1) / num_replicates**0.5).all()
assert np.diff(SubsplitBayesianNetwork.fit(sample).log_likelihoods).min() > -1e-12

# %%
# What it says
# ------------
# Counting gives a tree that was not sampled nothing. The simple average gives all such trees together about half of
# what they deserve, and conditional clades about four fifths. Expectation maximisation (em) climbs from the simple
# average to a higher likelihood, which it gains on the sampled trees, and gives the others far less: with few trees it
# comes close to counting again. A prior holds it back.

sample = posterior.sample(200, seed=0)
never = np.isneginf(SampleFrequencies.fit(sample).log_prob(trees).numpy())
exact, shares = posterior.log_prob(trees).exp().numpy(), {}
print(f"{never.sum()} of {len(trees)} trees are not among 200 sampled ones; their share is {exact[never].sum():.3f}")
for name, fit in fits.items():
    fitted = fit(sample)
    likelihood = float(fitted.log_prob(sample).mean())
    shares[name] = float(fitted.log_prob(trees).exp()[never].sum())
    print(f"{name:24s} gives them {shares[name]:.3f}, log likelihood a tree {likelihood:.3f}")

average = fits["network, simple average"](sample).log_prob(trees).exp().numpy()
figure = Figure(figsize=(8.5, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
for (name, table), marker in zip(divergence.items(), "os^Dv", strict=True):
    left.errorbar(sizes, table.mean(1), table.std(1, ddof=1) / num_replicates**0.5, marker=marker, label=name)
left.set(xscale="log", yscale="log", xlabel="trees sampled", ylabel="divergence (nats)")
left.legend(frameon=False, fontsize="small", loc="lower left")
for chosen, marker, label in ((~never, "o", "sampled"), (never, "x", "never sampled")):
    right.plot(exact[chosen], average[chosen], marker, markersize=4, label=label)
right.plot([1e-6, 1], [1e-6, 1], color="0.5", linewidth=1, zorder=0)
right.set(xscale="log", yscale="log", xlim=(1e-6, 1), ylim=(1e-6, 1))
right.set(xlabel="posterior probability", ylabel="simple average of 200 trees")
right.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# The frequencies of a sample are no distribution to compute with: a tree that was not drawn has probability zero, so
# that its divergence from the posterior is infinite. (The table above has it after smoothing.) The fit of the highest
# likelihood, by em, gives such trees less than the simple average does, although it is the better fit to the sample.

print(f"trees that were not drawn: {shares['frequencies']:.3f} by counting, exactly {exact[never].sum():.3f}")
assert shares["frequencies"] == 0 < exact[never].sum()
assert shares["network, em"] < shares["network, simple average"]

# %%
# Try it on yours
# ---------------
# Replace ``sample`` by trees of your own program: a file with one tree a line, its burn-in left out.
#
# .. code-block:: python
#
#    network = SubsplitBayesianNetwork.fit(sample, "simple_average")
#    print(network.log_prob(trees[:3]).exp(), network.entropy())
#
# ``TreeSample.from_file`` reads such files. Look at how much probability the sampled trees have in all: if it is near
# one the network adds little, and if it is small the sample was too short. Use a network for trees that were not drawn
# and to propose new ones; for the splits of a well sampled posterior, frequencies are enough.
#
# Where to go next: :doc:`variational_phylogenetics_of_mammals` fits such a network to a posterior without a sample;
# :doc:`four_apes_that_tie` has a posterior of three trees that agree about nothing.
