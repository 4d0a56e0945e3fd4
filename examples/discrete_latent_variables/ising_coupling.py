r"""
Ising model on a grid: exact posterior of the coupling against pseudo-likelihood
================================================================================

**What you will learn:** how an exact partition function makes the posterior of a coupling exact, and what it costs to
replace the likelihood by a product of conditional probabilities.

Spins on a grid, each pulled towards its neighbours, model magnets, and in images or on fields the tendency of things to
be like what is beside them. Their likelihood has a partition function with more terms than can be listed, so that
:cite:t:`besag1975` proposed the pseudo-likelihood, which has none. Pictures are simulated here, so that the true
coupling of each is known.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp

from bayeskit.models.discrete import CRITICAL_COUPLING, IsingGrid, kaufman_log_partition

# %%
# The model
# ---------
# Spins :math:`s_i = \pm 1` on a free grid of 8 by 8, with one coupling between all neighbours,
#
# .. math::
#
#    J \sim \mathrm{Uniform}(0, 0.8), \qquad
#    p(s \mid J) = \frac{1}{Z(J)} \exp\Big( J \sum_{i \sim j} s_i s_j \Big).
#
# :math:`Z` has :math:`2^{64}` terms. A transfer matrix adds them up row by row, and draws exact pictures on the way
# back. The pseudo-likelihood is the product of :math:`p(s_i \mid \text{all others}, J)`, each a logistic function of
# the sum of the neighbours.

SIDE, LARGEST = 8, 0.8
count = 6000
couplings = LARGEST * (torch.arange(400, dtype=torch.float64) + 0.5) / 400
grids = IsingGrid.homogeneous(SIDE, SIDE, couplings)

# %%
# Before the data
# ---------------
# Pictures from the prior. Above the coupling at which an infinite grid starts to order, about 0.44, one colour wins.

shown = torch.tensor([0.1, 0.3, CRITICAL_COUPLING, 0.6, 0.8], dtype=torch.float64)
with torch.random.fork_rng():
    torch.manual_seed(0)
    pictures = IsingGrid.homogeneous(SIDE, SIDE, shown).sample()
    truth = LARGEST * torch.rand(count, dtype=torch.float64)
    spins = IsingGrid.homogeneous(SIDE, SIDE, truth).sample()
prior_predictive = Figure(figsize=(8, 2), layout="constrained")
for axes, picture, coupling in zip(prior_predictive.subplots(1, 5), pictures, shown, strict=True):
    axes.imshow(picture.numpy(), vmin=-1, vmax=1)
    axes.set(xticks=[], yticks=[], title=f"J = {float(coupling):.2f}")

# %%
# An exact twin
# -------------
# Twelve spins have 4,096 states, and their sum needs no matrix. The conditional probability of a spin compares the
# picture with the one in which it is turned. A torus has a closed form at every size :cite:p:`kaufman1949`.

J = 0.37
states = np.array(list(itertools.product([-1.0, 1.0], repeat=12))).reshape(-1, 3, 4)
pairs = (states[:, 1:] * states[:, :-1]).sum((1, 2)) + (states[..., 1:] * states[..., :-1]).sum((1, 2))
by_hand = logsumexp(J * pairs)
small = IsingGrid.homogeneous(3, 4, torch.tensor(J, dtype=torch.float64))
print(f"3 x 4, log partition function: {float(small.log_partition):.12f}, one by one {by_hand:.12f}")
assert abs(float(small.log_partition) - by_hand) < 1e-9

log_prob = dict(zip(map(tuple, states.reshape(-1, 12)), J * pairs - by_hand, strict=True))
picture = tuple(states[1234].ravel())
conditionals = 0.0
for i in range(12):
    turned = (*picture[:i], -picture[i], *picture[i + 1 :])
    conditionals += log_prob[picture] - np.logaddexp(log_prob[picture], log_prob[turned])
assert abs(float(small.log_pseudolikelihood(torch.tensor(states[1234]))) - conditionals) < 1e-9

torus = IsingGrid.homogeneous(SIDE, SIDE, torch.tensor(CRITICAL_COUPLING, dtype=torch.float64), periodic=True)
closed_form = float(kaufman_log_partition(SIDE, SIDE, CRITICAL_COUPLING))
print(f"critical torus of 8 x 8: {float(torus.log_partition):.12f}, closed form {closed_form:.12f}")
assert abs(float(torus.log_partition) - closed_form) < 1e-9

# %%
# The fit
# -------
# The posterior of each picture is a sum over cells of the prior's range; the sum of products of neighbours is all that
# the likelihood needs of a picture. Where posteriors are right, the probability below the truth is uniform over
# couplings and pictures :cite:p:`cook2006`, and the central 90 % holds the truth in 90 % of cases.

products = IsingGrid.homogeneous(SIDE, SIDE, torch.ones((), dtype=torch.float64)).log_potential(spins)
log_likelihoods = {
    "likelihood": products[:, None] * couplings - grids.log_partition,
    "pseudo-likelihood": torch.stack(
        [IsingGrid.homogeneous(SIDE, SIDE, coupling).log_pseudolikelihood(spins) for coupling in couplings], -1
    ),
}
cell = (truth * 400 / LARGEST).long()[:, None]
ranks, covered = {}, {}
for name, log_likelihood in log_likelihoods.items():
    mass = log_likelihood.softmax(-1)
    within = truth[:, None] * 400 / LARGEST - cell
    below = (mass.cumsum(-1).gather(-1, cell) - mass.gather(-1, cell) * (1 - within)).squeeze(-1)
    ranks[name], covered[name] = below, float(((below > 0.05) & (below < 0.95)).double().mean())
error = math.sqrt(0.9 * 0.1 / count)
assert abs(covered["likelihood"] - 0.9) < 4.5 * error
assert abs(float(ranks["likelihood"].mean()) - 0.5) < 4.5 * math.sqrt(1 / 12 / count)
assert covered["pseudo-likelihood"] < 0.9 - 4.5 * error

# %%
# What it says
# ------------
# The pseudo-likelihood counts every pair of neighbours twice, once from each side, as if that were more information.
# Where neighbours pull weakly, its intervals are as long as the exact ones but hold the truth less often: the estimate
# is noisier and does not know it. Where one colour wins, they are longer than they need be.

for name, log_likelihood in log_likelihoods.items():
    cumulated = log_likelihood.softmax(-1).cumsum(-1)
    lengths = LARGEST * ((cumulated > 0.05) & (cumulated < 0.95)).double().mean(-1)
    inside = ((ranks[name] > 0.05) & (ranks[name] < 0.95)).double()
    for where, chosen in (("all", truth >= 0), ("J < 0.4", truth < 0.4), ("J > 0.4", truth > 0.4)):
        share = float(inside[chosen].mean())
        spread = math.sqrt(share * (1 - share) / int(chosen.sum()))
        print(f"{name:18s} {where:8s} covers {100 * share:.1f} +- {100 * spread:.1f} %,", end=" ")
        print(f"mean length of 90 % intervals {float(lengths[chosen].mean()):.3f}")

one = int((truth < 0.3).nonzero()[0])
figure = Figure(figsize=(8, 3.4), layout="constrained")
left, right = figure.subplots(1, 2)
for (name, log_likelihood), style in zip(log_likelihoods.items(), ("-", "--"), strict=True):
    left.plot(couplings, log_likelihood[one].softmax(0) * 400 / LARGEST, style, label=name)
    right.hist(ranks[name], bins=20, range=(0, 1), density=True, histtype="step", linestyle=style, linewidth=1.6)
left.axvline(float(truth[one]), color="0.5", linewidth=1)
left.set(xlabel="coupling (grey: the truth)", ylabel="posterior density", title="one picture")
left.legend(frameon=False, fontsize="small")
right.axhline(1, color="0.5", linewidth=1)
right.set(xlabel="posterior probability below the truth", ylabel="density", title="all pictures")

# %%
# Try it on yours
# ---------------
# Replace ``spins`` by your picture of plus and minus ones, with one side of at most about fifteen.
#
# .. code-block:: python
#
#    picture = spins[0]
#    pairs = IsingGrid.homogeneous(SIDE, SIDE, torch.ones((), dtype=torch.float64)).log_potential(picture)
#    posterior = (pairs * couplings - grids.log_partition).softmax(0)
#    print(posterior @ couplings)
#
# Look at whether the posterior ends at the edge of the prior's range. For larger grids, where the partition function
# cannot be summed, the exchange algorithm is exact with exact draws; a pseudo-likelihood needs its intervals checked by
# simulation, as here.
#
# Where to go next: :doc:`/gallery/loss_based_updates/safe_bayes_against_coverage` shortens or lengthens posteriors of
# other objectives until they cover, :doc:`/gallery/sampling/simulation_based_calibration` checks samplers by the same
# ranks.
