r"""
Stochastic block model: the number of blocks by evidence, in the karate club
============================================================================

**What you will learn:** how the evidence of the stochastic block model finds the number of blocks of a network, and how
annealing says which members belong together, with errors.

:cite:t:`zachary1977` watched the 34 members of a karate club and their 78 friendships until a quarrel between the
instructor, member 1, and the administrator, member 34, split it in two. Do the friendships alone show the two sides?
"""

import itertools
import warnings

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import betaln, gammaln, logsumexp

from bayeskit.errors import AccuracyWarning
from bayeskit.gallery import is_small
from bayeskit.models.discrete.block_model import (
    StochasticBlockModel,
    annealed_evidence,
    compare_num_blocks,
    karate_club,
    plot_co_assignment,
)

# %%
# The model
# ---------
# Each member belongs to one of :math:`K` blocks, and how probable a friendship is depends on the two blocks alone
# :cite:p:`nowicki2001`,
#
# .. math::
#
#    \pi \sim \mathrm{Dirichlet}(1, \dots, 1), \qquad z_i \sim \pi, \qquad
#    \theta_{ab} \sim \mathrm{Beta}(1, 1), \qquad A_{ij} \sim \mathrm{Bernoulli}(\theta_{z_i z_j}).
#
# Proportions and probabilities integrate out, so that only the :math:`K^{34}` assignments are left. A block need not be
# a community: any members whose friends are of the same kinds make one.

club = karate_club()
print(f"{len(club.adjacency)} members, {int(club.adjacency.sum()) // 2} friendships")

# %%
# Before the data
# ---------------
# Clubs drawn from the prior. The probabilities of friendships are anything at all, so most clubs know many more
# friendships than this one; the model is not told that acquaintance is rare.

generator = torch.Generator().manual_seed(0)
print("friendships, quantiles 5, 25, 50, 75, 95 %")
for blocks in (1, 2, 4):
    z = StochasticBlockModel(club.adjacency, blocks).sample_prior(1000, generator=generator)
    theta = torch.rand(1000, blocks, blocks, generator=generator)
    theta = theta.triu() + theta.triu(1).mT
    chance = theta[torch.arange(1000)[:, None, None], z[:, :, None], z[:, None, :]]
    number = (torch.rand(chance.shape, generator=generator) < chance).triu(1).sum((1, 2)).double()
    quantiles = number.quantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64))
    print(f"    {blocks} blocks:" + "".join(f"{float(q):6.0f}" for q in quantiles))

# %%
# An exact twin
# -------------
# The first ten members can be put into two blocks in 1,024 ways. Each is scored here by hand, from beta and gamma
# functions; the sum is the evidence, and annealing has to find it within its error.

ten = club.adjacency[:10, :10].numpy()
scores = []
for blocks in itertools.product([0, 1], repeat=10):
    z = np.array(blocks)
    sizes = np.bincount(z, minlength=2)
    score = gammaln(sizes + 1).sum() + gammaln(2) - gammaln(12)
    for a, b in ((0, 0), (0, 1), (1, 1)):
        pairs = [(i, j) for i, j in itertools.combinations(range(10), 2) if sorted((z[i], z[j])) == [a, b]]
        edges = sum(ten[i, j] for i, j in pairs)
        score += betaln(1 + edges, 1 + len(pairs) - edges)
    scores.append(score)
by_hand = logsumexp(scores)
few = StochasticBlockModel(club.adjacency[:10, :10], num_blocks=2)
annealed = annealed_evidence(few, num_chains=1000, num_steps=20, seed=0, progress=False)
print(f"ten members: exact {by_hand:.6f}, annealed {annealed.log_evidence:.3f} +- {annealed.standard_error:.3f}")
assert abs(float(few.enumerate().log_evidence) - by_hand) < 1e-9
assert abs(annealed.log_evidence - by_hand) < 4.5 * annealed.standard_error

# %%
# The fit
# -------
# Chains start from the prior and sweep through the members while the data gain weight :cite:p:`neal2001`. They are
# independent of each other, and their weights tell how many of them count.

numbers = (1, 2) if is_small() else (1, 2, 3, 4, 5)
size = {"num_chains": 400, "num_steps": 60} if is_small() else {"num_chains": 800, "num_steps": 400}
comparison = compare_num_blocks(club.adjacency, numbers, seed=0, progress=False, **size)
print(comparison)
assert all(result.reliable for result in comparison.results.values())
for better, worse in ((2, 1),) if is_small() else ((2, 1), (4, 2), (4, 3), (5, 4)):
    factor, error = comparison.log_bayes_factor(better, worse)
    print(f"log Bayes factor of {better} blocks against {worse}: {factor:.2f} +- {error:.2f}")
    assert factor > 4.5 * error

# %%
# What it says
# ------------
# Two blocks are not the two sides: one of them holds the few members whom everybody knows, the leaders of both sides
# among them. With four blocks the sides appear: leaders and followers of each. The evidence wants at least four kinds
# of members, and a fifth rather than not.

shown = (2,) if is_small() else (2, 4)
best, degrees = {}, club.adjacency.sum(0)
for k in shown:
    ends = comparison[k].assignments
    best[k] = ends[StochasticBlockModel(club.adjacency, k).log_joint(ends).argmax()]
    sides = [club.with_instructor[best[k] == block] for block in best[k].unique()]
    told = sum(max(int(side.sum()), int((~side).sum())) for side in sides)
    print(f"{k} blocks of {sorted(map(len, sides))} members: their majorities tell the side of {told} of 34")
    assert k < 4 or told >= 32
popular = best[2] == best[2][33]
print(f"in member 34's block of two: {float(degrees[popular].mean()):.1f} friends each,", end=" ")
print(f"in the other {float(degrees[~popular].mean()):.1f}")
assert bool(popular[0]) and int(popular.sum()) < 8

k = shown[-1]
ends, weights = comparison[k].assignments, comparison[k].weights
for first, second in ((33, 34), (1, 34), (3, 9)):
    same = (ends[:, first - 1] == ends[:, second - 1]).double()
    share = float(weights @ same)
    error = float((weights * (same - share)).norm())
    print(f"members {first} and {second} share one of {k} blocks with probability {share:.3f} +- {error:.3f}")

figure = Figure(figsize=(9, 4.6), layout="constrained")
left, right = figure.subplots(1, 2)
# Positions: eigenvectors of the graph, its degrees raised a little lest single branches dominate.
scale = (degrees + 5).rsqrt()
x, y = torch.linalg.eigh(scale[:, None] * (club.adjacency + 5 / 34) * scale).eigenvectors.mT[[-2, -3]]
for i, j in club.adjacency.triu(1).nonzero().tolist():
    left.plot(x[[i, j]], y[[i, j]], color="0.8", linewidth=0.6, zorder=1)
for side, marker in ((True, "o"), (False, "s")):
    for block in range(k):
        here = (club.with_instructor == side) & (best[k] == block)
        left.scatter(x[here], y[here], s=70, color=f"C{block}", marker=marker, zorder=2)
for i in (0, 33):
    left.annotate(f"member {i + 1}", (float(x[i]), float(y[i])), (0, 8), textcoords="offset points", ha="center")
for i, block in enumerate(best[k].tolist()):
    left.text(float(x[i]), float(y[i]), block + 1, color="white", fontsize=6, ha="center", va="center_baseline")
left.margins(0.15)
left.set(xticks=[], yticks=[], title="number: block; circle: the instructor's side,\nsquare: the administrator's")
plot_co_assignment(comparison[k].co_assignment(), best[k], right)
sizes = best[k].bincount()
ticks, labels = (sizes.cumsum(0) - sizes / 2 - 0.5).tolist(), range(1, len(sizes) + 1)
right.set_xticks(ticks, labels, color="black", fontsize=10, rotation=0)
right.set_yticks(ticks, labels, color="black", fontsize=10)
right.set(xlabel="members, by block", ylabel="members, by block")

# %%
# A failure on purpose
# --------------------
# Three steps from the prior to the posterior. Of the chains, one or two happen to end in a good place and carry all of
# the weight, and the error bar is one of the few that are left. A warning says so, and the result is not reliable.

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", AccuracyWarning)
    hasty = annealed_evidence(StochasticBlockModel(club.adjacency, 2), num_chains=400, num_steps=3, progress=False)
print(f"two blocks in three steps: {hasty.log_evidence:.1f}, as above: {comparison[2].log_evidence:.1f}")
print(caught[0].message)
assert not hasty.reliable

# %%
# Try it on yours
# ---------------
# Replace the adjacency matrix: symmetric, of zeros and ones, with a zero diagonal.
#
# .. code-block:: python
#
#    found = compare_num_blocks(club.adjacency, (1, 2), num_chains=400, num_steps=60, seed=0)
#    print(found, all(result.reliable for result in found.results.values()))
#
# Look at ``reliable``, and at ``co_assignment()``: who shares a block with whom does not depend on the blocks' names.
# If a number is not reliable, raise ``num_steps``. Blocks need not be communities: for those, give edges within blocks
# a prior of larger probabilities, ``within_prior``.
#
# Where to go next: :doc:`/gallery/evidence/galaxy_mixture` asks for the number of components of a mixture,
# :doc:`matching_permutations` sums over all ways to match one set with another.
