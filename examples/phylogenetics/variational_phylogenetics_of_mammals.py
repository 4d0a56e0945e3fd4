r"""
Variational Bayesian phylogenetic inference (VBPI) without a Markov chain: mammals
==================================================================================

**What you will learn:** how a subsplit Bayesian network and log-normal branch lengths are fitted to the posterior of
trees by its lower bound, how importance weights turn the fit into an evidence with an error, and that integrals over
branch lengths alone, tree by tree, agree.

The data are the gene BRCA1 in eight placental mammals :cite:p:`murphy2001`, as it ships with the package cogent3. That
humans and macaques belong together, and cats and dogs, nobody doubts; how carnivores, horses, cows, bats and moles are
related is an old question. The method is that of :cite:t:`zhang2019`.
"""

# sphinx_gallery_thumbnail_number = -1
import math
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp, roots_laguerre

from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import (
    HKY85,
    Alignment,
    ForestLikelihood,
    Topologies,
    Tree,
    TreeSample,
    all_topologies,
    empirical_frequencies,
    greedy_consensus,
    plot_tree,
)
from bayeskit.models.phylogenetics.workflows import LearningRates, compare_topologies, variational_inference

# %%
# The model
# ---------
# Each of the trees :math:`\tau` is equally probable, the thirteen branch lengths are exponential with mean 0.1, and
# sites evolve by the model of Hasegawa, Kishino and Yano with a fixed ratio of rates. The approximation is a network
# over trees times log-normal branch lengths, and both climb the same lower bound of the log evidence,
#
# .. math::
#
#    p(\tau, q \mid D) \propto p(D \mid \tau, q) \, p(q) \, p(\tau), \qquad
#    E \log \frac1K \sum_{k=1}^K \frac{p(D, \tau_k, q_k)}{Q(\tau_k) \, Q(q_k \mid \tau_k)} \le \log p(D).
#
# The support is given as trees; the network can make whatever their parts recombine to. Six groups have 105 trees, in
# which the names of two groups are then replaced by pairs.

pairs = {"Primates": "(Human,Rhesus)", "Carnivores": "(Cat,Dog)"}
alone = ["Horse", "Cow"] if is_small() else ["Horse", "Cow", "FlyingFox", "Mole"]
groups = all_topologies([*pairs, *alone])
texts = [reduce(lambda text, pair: text.replace(*pair), pairs.items(), tree.to_newick(0)) for tree in groups]
taxa = ["Human", "Rhesus", "Cat", "Dog", *alone]
support = Topologies.from_trees([Tree.from_newick(text) for text in texts], taxa)
folder = find_spec("cogent3").submodule_search_locations[0]  # without importing the package, which takes seconds
alignment = Alignment.from_file(Path(folder) / "_dataset" / "brca1.fasta").select(taxa)
substitution = HKY85(4.0, empirical_frequencies(alignment))
print(alignment, support)

# %%
# Before the data
# ---------------
# How many sites should differ among eight such mammals? Trees and branch lengths are drawn from the prior; the
# probability that all eight have the same base, any of the four, is the likelihood of a site that shows it.

shape = (10 if is_small() else 50, len(support), support.num_edges)
lengths = torch.from_numpy(np.random.default_rng(0).exponential(0.1, shape))
constant = [Alignment.from_sequences(dict.fromkeys(taxa, base)) for base in "ACGT"]
likelihoods = [ForestLikelihood(site, substitution).log_likelihood(support, lengths).exp() for site in constant]
prior = 1 - sum(likelihoods).flatten().numpy()
patterns, weights = alignment.patterns.numpy(), alignment.weights.numpy()
complete = np.isin(patterns, [1, 2, 4, 8]).all(0)  # nothing missing
observed = weights[complete] @ (np.ptp(patterns[:, complete], axis=0) > 0) / weights[complete].sum()
print(f"sites that differ: {observed:.2f} in BRCA1, {prior.mean():.2f} on average from the prior")

prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(prior, bins=30)
axes.axvline(observed, color="C1", linestyle="--")
axes.set(xlabel="share of sites that differ among eight mammals (dashed: in BRCA1)", ylabel="draws from the prior")

# %%
# An exact twin
# -------------
# Four taxa and a handful of sites: each of the three trees has five branches, and Gauss-Laguerre quadrature in all five
# gives its evidence to ten digits, by plain sums over the bases at the two inner nodes. Importance sampling from the
# variational fit must find the mean of the three, and their shares of it as the probabilities of the trees; the lower
# bound must be below.

nodes, node_weights = roots_laguerre(14)
stays = 0.25 + 0.75 * np.exp(-4 / 30 * nodes)
change = np.where(np.eye(4, dtype=bool), stays[:, None, None], (1 - stays[:, None, None]) / 3)
columns = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [2, 2, 2, 0], [3, 3, 1, 1], [0, 2, 0, 2], [1, 3, 1, 1]])
three = all_topologies("abcd")
exact = []
for tree in three:
    order = ["abcd".index(letter) for letter in tree.to_newick(0) if letter in "abcd"]  # neighbours, then the others
    product = 1.0
    for site in columns[:, order]:
        a, b, c, d = (change[:, :, base] for base in site)
        product = product * 0.25 * np.einsum("iu,ju,kuv,lv,mv->ijklm", a, b, change, c, d, optimize=True)
    exact.append(np.log(np.einsum("ijklm,i,j,k,l,m->", product, *[node_weights] * 5, optimize=True)))
toy = Alignment.from_sequences({name: "".join("ACGT"[base] for base in columns[:, i]) for i, name in enumerate("abcd")})
steps = 120 if is_small() else 2000
rates = LearningRates(0.02, 0.02, factor=0.5, every=steps // 4)
twin = variational_inference(toy, three, num_steps=steps, learning_rates=rates, progress=False)
total, found = logsumexp(exact) - math.log(3), twin.log_evidence(10_000)
print(f"log evidence: exactly {total:.5f}, variational {found.log_evidence:.5f} +- {found.standard_error:.5f}")
assert found.trusted and abs(found.log_evidence - total) < 4.5 * found.standard_error
bound = twin.lower_bound(1, 1000)
print(f"lower bound  {bound.value:.5f} +- {bound.standard_error:.5f}")
assert bound.value - 4.5 * bound.standard_error < total


def probability(sample: TreeSample, start: str) -> tuple[float, float]:
    """Return the share of trees in a weighted sample whose text starts so, and its standard error."""
    has = np.array([sample.topologies.to_newick(i).startswith(start) for i in range(len(sample.topologies))])
    share = float(sample.weights[has].sum())
    return share, float(np.linalg.norm(sample.sample_weights * (has[sample.index] - share)))


drawn = twin.sample(10_000, weighted=True)
for number, tree in enumerate(exact):
    share, error = probability(drawn, three.to_newick(number))
    print(f"tree {number + 1}: exactly {math.exp(tree - logsumexp(exact)):.4f}, variational {share:.4f} +- {error:.4f}")
    assert abs(share - math.exp(tree - logsumexp(exact))) < 4.5 * error

# %%
# The fit
# -------
# Both parts climb by stochastic gradients: branch lengths by reparameterised draws, trees by a score function with a
# leave-one-out baseline :cite:p:`mnih2016`. Importance sampling from the result gives the evidence, and says whether
# its weights can be trusted; bounds must lie below it.

steps, rates = (800, (0.05, 0.03)) if is_small() else (6000, (0.02, 0.02))
rates = LearningRates(*rates, factor=0.5, every=steps // 5)
posterior = variational_inference(
    alignment, support, substitution=substitution, num_steps=steps, learning_rates=rates, progress=False
)
evidence = posterior.log_evidence(2000 if is_small() else 5000)
bounds = [posterior.lower_bound(count, 1000 // count) for count in (1, 10)]
print(f"log evidence              {evidence.log_evidence:.3f} +- {evidence.standard_error:.3f}")
assert evidence.trusted
for bound, of in zip(bounds, ("one tree", "ten trees"), strict=True):
    print(f"lower bound of {of:11s}{bound.value:.3f} +- {bound.standard_error:.3f}")
    assert bound.value - evidence.log_evidence < 4.5 * math.hypot(bound.standard_error, evidence.standard_error)

# %%
# The same by one integral a tree, which knows nothing of networks.

one_by_one = compare_topologies(alignment, support, substitution=substitution, progress=False)
value, error = one_by_one.total_log_evidence
print(f"from {len(support)} integrals       {value:.3f} +- {error:.3f}")
assert all(estimate.trusted for estimate in one_by_one.comparison.results.values())
assert abs(evidence.log_evidence - value) < 4.5 * math.hypot(error, evidence.standard_error)

# %%
# What it says
# ------------
# Weighted trees from the approximation are a sample of the posterior like any other, whose probabilities carry errors.
# They agree with those from the integrals. No tree has even a third of the probability: it is settled which mammal is
# next to the primates in this gene, the mole, and not how the others are related.

sample = posterior.sample(1000 if is_small() else 5000, weighted=True)
print("variational       by integrals      tree")
for place in one_by_one.to_sample().top(5):
    text, right = support.to_newick(place), float(one_by_one.posterior_probabilities[place])
    found, error = probability(sample, text)
    right_error = float(one_by_one.posterior_errors[place])
    print(f"{found:.4f} +- {error:.4f}  {right:.4f} +- {right_error:.4f}  {text}")
    # A share of all draws, or of none, has no error.
    assert not 0.01 < right < 0.99 or abs(found - right) < 4.5 * math.hypot(error, right_error)
if not is_small():
    share, error = probability(sample, "(Human,Rhesus,(Mole,")
    print(f"the mole next to the primates: {share:.3f} +- {error:.3f}")
    assert share > 4.5 * error + 0.5 and one_by_one.posterior_probabilities.max() < 1 / 3

figure = Figure(figsize=(8.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
smooth = np.convolve(posterior.bounds.numpy(), np.ones(50) / 50, "valid")
left.plot(np.arange(len(smooth)) + 50, smooth - evidence.log_evidence)
left.axhline(0, color="C1", linestyle="--")
left.set(xlabel="step", ylabel="bound less log evidence (nats)", ylim=(-30, 3))
plot_tree(greedy_consensus(sample), right)

# %%
# A failure on purpose
# --------------------
# Three steps of training. The fit is a distribution like any other, its lower bound is a bound, and its draws look like
# trees. The weights of importance sampling tell: a few of them have nearly all the weight.

untrained = variational_inference(toy, three, num_steps=3, progress=False).log_evidence(2000)
print(f"after three steps, {untrained}")
assert not untrained.trusted

# %%
# Try it on yours
# ---------------
# Replace the alignment, and give a support: all trees of few groups, as here, or trees that a search has found.
#
# .. code-block:: python
#
#    posterior = variational_inference(alignment, support, substitution=substitution, num_steps=200)
#    z = posterior.log_evidence(1000)
#    print(z, z.trusted, posterior.lower_bound(1, 200).value)
#
# Look at ``z.trusted`` and at whether the bound still rises. A tree outside of the support has probability zero,
# whatever the data say: without a good support take :func:`~bayeskit.models.phylogenetics.workflows.infer_topologies`,
# and compare.
#
# Where to go next: :doc:`subsplit_networks_on_ds1` shows what such a network makes of sampled trees,
# :doc:`human_chimp_gorilla` how a model of evolution leads astray.
