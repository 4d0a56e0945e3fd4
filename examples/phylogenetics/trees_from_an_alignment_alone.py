r"""
Bayesian phylogenetic inference from an alignment: tree search and convergence
==============================================================================

**What you will learn:** how to sample the posterior of trees with nothing but sequences, how two runs tell whether the
search has converged, and how three estimates of the evidence over all trees check each other.

The data are 898 sites of mitochondrial DNA of twelve primates :cite:p:`hayasaka1988`. For sequences of yours, write
``Alignment.from_file("mine.fasta")``. On the command line, ``bayeskit trees --alignment mine.fasta`` does all that this
page does and writes a report.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import roots_laguerre

from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import (
    Alignment,
    all_topologies,
    majority_rule_consensus,
    plot_split_frequencies,
    primates,
)
from bayeskit.models.phylogenetics.workflows import infer_topologies, topology_evidence

# %%
# The model
# ---------
# All unrooted trees :math:`\tau` of :math:`n` taxa are equally probable before the data. There are :math:`(2n-5)!!` of
# them, each with :math:`2n - 3` branch lengths :math:`q_i`, which are independent and exponential with mean 0.1. Under
# the model of Jukes and Cantor all changes of a base are equally fast. The posterior and the evidence are
#
# .. math::
#
#    p(\tau, q \mid D) = \frac{p(D \mid \tau, q) \, p(q)}{(2n-5)!! \; p(D)}, \qquad
#    p(D) = \frac{1}{(2n-5)!!} \sum_\tau \int p(D \mid \tau, q) \, p(q) \, dq.

alignment, _ = primates()
if is_small():
    alignment = alignment.select(["Lemur_catta", "Saimiri_sciureus", "Hylobates", "Homo_sapiens", "Pan"])
num_taxa = alignment.num_taxa
num_trees = math.prod(range(1, 2 * num_taxa - 4, 2))
print(f"{alignment}: {num_trees:,} trees")

# %%
# Before the data
# ---------------
# That two given species are next to each other is true of few trees. With the two as one, there is one taxon fewer and
# there are :math:`(2n-7)!!` trees, a share of :math:`1 / (2n - 5)`. For five taxa, all trees can be counted.

five = all_topologies("ABCDE")
neighbours = sum("(A,B)" in tree.to_newick(0) or "(A,B,(" in tree.to_newick(0) for tree in five)
print(f"{neighbours} of {len(five)} trees have A beside B, a share of 1 / {2 * 5 - 5}")
print(f"of {num_taxa} species, two given ones are neighbours with probability {1 / (2 * num_taxa - 5):.3f}")
assert neighbours * (2 * 5 - 5) == len(five)

# %%
# An exact twin
# -------------
# Four taxa have three trees and five branches. Gauss-Laguerre quadrature in all five, with the probabilities of Jukes
# and Cantor and plain sums over the bases at the two inner nodes, gives the evidence of each tree. The search must find
# their mean and, as shares of its draws, the probabilities of the trees.

columns = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [3, 3, 3, 3], [0, 0, 2, 2], [1, 3, 1, 1], [0, 0, 2, 1], [2, 1, 2, 1]])
nodes, weights = roots_laguerre(14)
same = np.exp(-4 / 3 * nodes / 10)  # the prior has rate 10
change = 0.25 * (1 - same)[:, None, None] + same[:, None, None] * np.eye(4)


def evidence_of(order: list[int]) -> float:
    """Return that of the tree whose first two and last two taxa are neighbours."""
    product = 1.0
    for column in columns:
        one, two, three, four = (change[:, :, column[taxon]] for taxon in order)
        product = product * np.einsum("iu,ju,kuv,lv,mv->ijklm", one, two, change, three, four, optimize=True) / 4
    return float(np.einsum("ijklm,i,j,k,l,m->", product, *[weights] * 5, optimize=True))


toy = Alignment.from_sequences({name: "".join("ACGT"[x] for x in columns[:, i]) for i, name in enumerate("abcd")})
exact = {
    tree.to_newick(0): evidence_of(["abcd".index(x) for x in tree.to_newick(0) if x in "abcd"])
    for tree in all_topologies("abcd")
}
log_evidence = math.log(sum(exact.values()) / 3)
twin = infer_topologies(toy, num_warmup=300, num_samples=500 if is_small() else 10_000, progress=False)
print(f"exactly {log_evidence:.4f}; {twin.evidence}")
for place, share in enumerate(twin.sample.weights):
    text = twin.sample.topologies.to_newick(place)
    print(f"{text}  exactly {exact[text] / sum(exact.values()):.3f}, share of the draws {share:.3f}")
assert abs(twin.evidence.log_evidence - log_evidence) < 4.5 * twin.evidence.standard_error

# %%
# The fit
# -------
# Two runs start from different trees. Each has a ladder of temperatures :cite:p:`altekar2004`: hot chains cross valleys
# between good trees, and the exchange of neighbours brings what they find to the posterior. From the trees found, the
# warm-up learns a distribution that trees can be drawn from :cite:p:`larget2013,holder2014`; the ladder then leads from
# there to the posterior. The runs have converged if they agree on how often each split of the species occurs: the
# average standard deviation of split frequencies (ASDSF) should be below 0.01.

settings = {"num_warmup": 200, "num_samples": 800} if is_small() else {}
search = infer_topologies(alignment, **settings, progress=False)
print(search)
print(f"R-hat at most {max(search.r_hat.values()):.3f}; {int(search.exchange.round_trips.sum())} round trips")
assert search.asdsf < 0.03

# %%
# The density of the learnt distribution is known, so that ratios of neighbouring temperatures multiply to the evidence.
# A sum over the trees that were found, and a variational approximation, are two other ways to it. They share no draws,
# so that an error of one of them would show.

ways = topology_evidence(search, num_steps=200 if is_small() else 20_000, progress=False)
print(ways)
assert ways.verdict.is_agreed
agreement = Figure(figsize=(7, 2.2), layout="constrained")
ways.table.plot(ax=agreement.subplots())
runs = Figure(figsize=(4, 4), layout="constrained")
plot_split_frequencies(*search.samples, runs.subplots())

# %%
# What it says
# ------------
# The consensus has the splits of more than half of the trees, with their posterior probabilities. Old World monkeys
# and apes are apart, and so are gibbons and great apes. Where a number is not close to one, the question is open:
# chimpanzees stand beside humans with probability 0.93, beside gorillas otherwise. A number is also only as good as the
# model: for the apes alone, this one has it the other way round.

consensus = majority_rule_consensus(search.sample)
figure = Figure(figsize=(7, 4), layout="constrained")
consensus.plot(figure.subplots())
inner = consensus.supports[num_taxa:]
print(f"{len(inner)} splits, the least certain with probability {inner.min():.2f}")
lengths = torch.as_tensor(search.sample.branch_lengths).sum(-1)
low, high = lengths.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
print(f"tree length {float(lengths.mean()):.2f}, 90 % between {low:.2f} and {high:.2f} changes a site")

# %%
# A failure on purpose
# --------------------
# Twenty draws. The runs may even agree on all splits by then, so that the usual rule would call them converged. The
# lengths of the trees do not agree yet, no state has travelled along the path, and the result says both.

hasty = infer_topologies(alignment, num_warmup=20, num_samples=20, progress=False)
print(f"ASDSF {hasty.asdsf:.3f}, R-hat at most {max(hasty.r_hat.values()):.3f}; {hasty.evidence}")
assert not hasty.evidence.trusted

# %%
# Try it on yours
# ---------------
# Replace the alignment; nothing else is needed. Ten or twenty taxa take minutes.
#
# .. code-block:: python
#
#    search = infer_topologies(alignment, num_warmup=200, num_samples=800)  # Alignment.from_file("mine.fasta")
#    print(search.asdsf, search.r_hat, search.evidence.trusted)
#
# Look at the ASDSF, at R-hat of tree length and likelihood, and at the round trips. If the runs disagree, lengthen the
# warm-up first; if states do not travel, take more temperatures. Give the model of substitution before you read a tree
# off.
#
# Where to go next: :doc:`human_chimp_gorilla` decides that question by a better model of substitution, which
# ``infer_topologies`` takes as ``substitution=HKY85()``; :doc:`subsplit_networks_on_ds1` gives a probability
# to trees that no run has seen.
