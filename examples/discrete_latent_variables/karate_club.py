r"""
Stochastic block model: the number of blocks by evidence, in the karate club
============================================================================

**What you will learn:** how the evidence of the stochastic block model finds the number of blocks of a network, and how
annealing says which members belong together, with errors.

:cite:t:`zachary1977` watched the 34 members of a karate club and their 78 friendships until a quarrel between the
instructor, member 1, and the administrator, member 34, split it in two. Do the friendships alone show the two sides?
"""

import itertools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import betaln, gammaln, logsumexp
from torch.nn.functional import one_hot

from bayeskit.gallery import data_file, is_small

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
# a community: any members whose friends are of the same kinds make one. With :math:`n_a` members, and :math:`e_{ab}`
# friendships among :math:`m_{ab}` pairs of two blocks,
#
# .. math::
#
#    p(z) = \frac{(K - 1)!}{(n + K - 1)!} \prod_a n_a!, \qquad
#    p(A \mid z) = \prod_{a \le b} \frac{e_{ab}! \, (m_{ab} - e_{ab})!}{(m_{ab} + 1)!}.


LOG_FACTORIALS = torch.arange(1, 35 * 34, dtype=torch.float64).lgamma()


def log_edges(edges, pairs):
    """Return the log probability of the edges among pairs of nodes whose probability of an edge is uniform."""
    edges, pairs = edges.long(), pairs.long()
    return LOG_FACTORIALS[edges] + LOG_FACTORIALS[pairs - edges] - LOG_FACTORIALS[pairs + 1]


def edges_and_pairs(sizes, ends):
    """Return edges and pairs (*batch, K, K) between blocks, of sizes (*batch, K) and ends; those within once."""
    places = sizes[..., None] * sizes[..., None, :] - sizes.diag_embed()
    return (x - 0.5 * x.diagonal(dim1=-2, dim2=-1).diag_embed() for x in (ends, places))


def log_prior_and_likelihood(adjacency, members):
    """Return log probabilities (*batch) of one-hot members (*batch, nodes, K), and of the graph given them."""
    sizes, (num_blocks, nodes) = members.sum(-2), (members.shape[-1], len(adjacency))
    edges, pairs = edges_and_pairs(sizes, members.mT @ (adjacency @ members))
    log_prior = math.lgamma(num_blocks) - math.lgamma(nodes + num_blocks) + LOG_FACTORIALS[sizes.long()].sum(-1)
    return log_prior, log_edges(edges, pairs).triu().sum((-2, -1))


lines = [line.split() for line in data_file("zachary_karate_club.txt").read_text().splitlines() if line[0] != "#"]
adjacency = torch.zeros(34, 34, dtype=torch.float64)
for member, _, *friends in lines:
    adjacency[int(member) - 1, [int(friend) - 1 for friend in friends]] = 1.0
adjacency += adjacency.T.clone()
with_instructor = torch.tensor([side == "instructor" for _, side, *_ in lines])
print(f"{len(adjacency)} members, {int(adjacency.sum()) // 2} friendships")

# %%
# Before the data
# ---------------
# Clubs drawn from the prior with two blocks. The probabilities of friendships are anything at all, so most clubs know
# many more friendships than this one; the model is not told that acquaintance is rare.

generator = torch.Generator().manual_seed(0)
share, theta = torch.rand(1000, 1, generator=generator), torch.rand(1000, 3, generator=generator)
first_block = torch.rand(1000, 34, generator=generator) < share
chance = theta.gather(1, (first_block[:, :, None].int() + first_block[:, None, :].int()).flatten(1).long())
number = (torch.rand(chance.shape, generator=generator) < chance).view(-1, 34, 34).triu(1).sum((1, 2)).double()
quantiles = number.quantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64))
print("friendships, quantiles 5, 25, 50, 75, 95 %:" + "".join(f"{float(q):6.0f}" for q in quantiles))

# %%
# An exact twin
# -------------
# The first ten members can be put into two blocks in 1,024 ways. Each is scored here by hand, from beta and gamma
# functions. Annealing has to find their sum, the evidence, within its error. Its chains start from the prior and sweep
# through the members while the data gain weight :cite:p:`neal2001`; they are independent of each other, and the mean of
# their weights is an unbiased estimate of the evidence.


def gibbs_sweep(adjacency, members, power, generator):
    """Draw the block of each node in turn given the others, the likelihood raised to a power; changes members."""
    sizes, ends = members.sum(1), members.mT @ (adjacency @ members)
    for node, friends in enumerate(adjacency.bool()):
        near = members[:, friends].sum(1)
        met = members[:, node, :, None] * near[:, None, :]
        sizes, ends = sizes - members[:, node], ends - met - met.mT
        edges, pairs = edges_and_pairs(sizes, ends)
        gains = log_edges(edges + near[:, None, :], pairs + sizes[:, None, :]) - log_edges(edges, pairs)
        logits = power * gains.sum(-1) + (sizes + 1).log()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        members[:, node] = one_hot(drawn, members.shape[-1]).to(members)
        met = members[:, node, :, None] * near[:, None, :]
        sizes, ends = sizes + members[:, node], ends + met + met.mT


def anneal(adjacency, num_blocks, num_chains, num_steps, seed=0):
    """Return final one-hot members (chains, nodes, K) and log weights (chains,) of chains from prior to posterior."""
    generator = torch.Generator().manual_seed(seed)
    shares = -torch.rand(num_chains, num_blocks, generator=generator, dtype=torch.float64).log()
    assignments = torch.multinomial(shares, len(adjacency), replacement=True, generator=generator)
    members, log_weights, before = one_hot(assignments, num_blocks).to(adjacency), 0.0, 0.0
    for power in (torch.arange(1, num_steps + 1) / num_steps).square().tolist():
        log_weights = log_weights + (power - before) * log_prior_and_likelihood(adjacency, members)[1]
        gibbs_sweep(adjacency, members, power, generator)
        before = power
    return members, log_weights


def evidence(log_weights):
    """Return the log of the mean weight, its standard error, and the number of chains that the weights are worth."""
    mean = float(log_weights.logsumexp(0)) - math.log(len(log_weights))
    worth = float(1 / log_weights.softmax(0).square().sum())
    return mean, float((log_weights - mean).exp().std()) / len(log_weights) ** 0.5, worth


ten, scores = adjacency[:10, :10], []
for blocks in itertools.product([0, 1], repeat=10):
    z = np.array(blocks)
    sizes = np.bincount(z, minlength=2)
    score = gammaln(sizes + 1).sum() + gammaln(2) - gammaln(12)
    for kind in ((0, 0), (0, 1), (1, 1)):
        among = [float(ten[i, j]) for i, j in itertools.combinations(range(10), 2) if tuple(sorted(z[[i, j]])) == kind]
        score += betaln(1 + sum(among), 1 + len(among) - sum(among))
    scores.append(score)
all_members = one_hot(torch.cartesian_prod(*[torch.arange(2)] * 10), 2).to(ten)
assert np.abs(sum(log_prior_and_likelihood(ten, all_members)).numpy() - scores).max() < 1e-9

log_evidence, error, worth = evidence(anneal(ten, 2, num_chains=1000, num_steps=20)[1])
print(f"ten members: exact {logsumexp(scores):.6f}, annealed {log_evidence:.3f} +- {error:.3f}")
assert abs(log_evidence - logsumexp(scores)) < 4.5 * error

# %%
# The fit
# -------
# The whole club has too many assignments to list. The weights tell how many of the chains count.

(num_chains, num_steps), chains, found = (400, 60) if is_small() else (800, 400), {}, {}
for k in (1, 2) if is_small() else (1, 2, 3, 4, 5):
    chains[k] = anneal(adjacency, k, num_chains, num_steps, seed=k)
    found[k] = evidence(chains[k][1])
    print(f"{k} blocks: log evidence {found[k][0]:.2f} +- {found[k][1]:.2f}, worth {found[k][2]:.0f} chains")
    assert found[k][2] > 50
assert abs(found[1][0] - betaln(1 + 78, 1 + 483)) < 1e-9
for better, worse in ((2, 1),) if is_small() else ((2, 1), (4, 2), (4, 3), (5, 4)):
    factor, error = found[better][0] - found[worse][0], math.hypot(found[better][1], found[worse][1])
    print(f"log Bayes factor of {better} blocks against {worse}: {factor:.2f} +- {error:.2f}")
    assert factor > 4.5 * error

# %%
# What it says
# ------------
# Two blocks are not the two sides: one of them holds the few members whom everybody knows, the leaders of both sides
# among them. With four blocks the sides appear: leaders and followers of each. The evidence wants at least four kinds
# of members, and a fifth rather than not.

best, degrees = {}, adjacency.sum(0)
for k in (2,) if is_small() else (2, 4):
    members = chains[k][0]
    best[k] = members[sum(log_prior_and_likelihood(adjacency, members)).argmax()].argmax(-1)
    sides = [with_instructor[best[k] == block] for block in best[k].unique()]
    told = sum(max(int(side.sum()), int((~side).sum())) for side in sides)
    print(f"{k} blocks of {sorted(map(len, sides))} members: their majorities tell the side of {told} of 34")
    assert k < 4 or told >= 32
popular = best[2] == best[2][33]
few, many = degrees[~popular].mean(), degrees[popular].mean()
print(f"friends of a member: {many:.1f} in member 34's block of two, {few:.1f} in the other")
assert bool(popular[0]) and int(popular.sum()) < 8

members, weights = chains[k][0], chains[k][1].softmax(0)
same = members @ members.mT
together = torch.einsum("c,cij->ij", weights, same)
for first, second in ((33, 34), (1, 34), (3, 9)):
    share = float(together[first - 1, second - 1])
    error = float((weights * (same[:, first - 1, second - 1] - share)).norm())
    print(f"members {first} and {second} share one of {k} blocks with probability {share:.3f} +- {error:.3f}")

figure = Figure(figsize=(9, 4.4), layout="constrained")
order = (2 * best[k] + with_instructor).argsort(stable=True)
for axes, matrix, title in zip(figure.subplots(1, 2), (adjacency, together), ("friends", "share a block"), strict=True):
    axes.imshow(matrix[order][:, order], cmap="Greys", vmin=0, vmax=1)
    axes.set_yticks(range(34), (order + 1).tolist(), fontsize=5)
    for label, side in zip(axes.get_yticklabels(), with_instructor[order].tolist(), strict=True):
        label.set_color("C0" if side else "C1")
    axes.set(title=title, xticks=[], ylabel="blue: the instructor's side, orange: the administrator's")

# %%
# A failure on purpose
# --------------------
# Three steps from the prior to the posterior. Of the chains, one or two happen to end in a good place and carry all of
# the weight, and the error bar is one of the few that are left: what the weights are worth says so.

log_evidence, error, worth = evidence(anneal(adjacency, 2, num_chains=400, num_steps=3)[1])
print(
    f"two blocks in three steps: {log_evidence:.1f} +- {error:.1f}, worth {worth:.0f} chains; above {found[2][0]:.1f}"
)
assert worth < 20

# %%
# Try it on yours
# ---------------
# Replace the adjacency matrix: symmetric, of zeros and ones, with a zero diagonal.
#
# .. code-block:: python
#
#    members, log_weights = anneal(adjacency, num_blocks=3, num_chains=400, num_steps=200)
#    print(evidence(log_weights))
#    print(torch.einsum("c,cij->ij", log_weights.softmax(0), members @ members.mT))
#
# If the weights are worth few chains, raise ``num_steps``. Who shares a block with whom does not depend on the blocks'
# names. Blocks need not be communities.
#
# Where to go next: :doc:`/gallery/evidence/galaxy_mixture` asks for the number of components of a mixture,
# :doc:`matching_permutations` sums over all ways to match one set with another.
