r"""
Single-cell genotypes read with errors: exact posterior over perfect phylogenies
================================================================================

**What you will learn:** how to infer a table of cells and mutations that has to fit a tree, with unknown error rates,
from a sum over all tables and an integral over the rates that are both exact; and how probable it is that readings
obeyed the rule before they were misread, and that mutations arose on a single line.

When single cells of a tumour are sequenced, mutations are missed, others are seen that are not there, and some entries
have no reading at all. If each mutation arises once and is never lost, the true table fits a tree
:cite:p:`gusfield1991`, and that is what corrects the readings :cite:p:`jahn2016`. The readings here are made from a
known tree, so that what is inferred can be checked.
"""

import itertools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import betaln, logsumexp, roots_jacobi

from bayeskit.gallery import is_small
from bayeskit.models.discrete import (
    MutationTree,
    NoisyGenotypes,
    conflict_free_matrices,
    conflicting_pairs,
    num_conflict_free,
    plot_genotypes,
)

# %%
# The model
# ---------
# The cells of any two mutations are nested or disjoint: a table without such a conflict fits a tree, and all of these
# tables are equally probable,
#
# .. math::
#
#    G \sim \mathrm{Uniform}(\text{tables without conflict}), \qquad
#    \alpha \sim \mathrm{Beta}(1, 20), \qquad \beta \sim \mathrm{Beta}(2, 6),
#
# .. math::
#
#    P(\text{read } 1 \mid G_{ij} = 0) = \alpha, \qquad P(\text{read } 0 \mid G_{ij} = 1) = \beta.
#
# A recursion over sets of cells sums over the tables. Six cells and four mutations are misread as often as whole
# genomes of single cells are, and one entry in twenty is missing.

truth = torch.tensor(
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]], dtype=torch.bool
)
generator = torch.Generator().manual_seed(19)
wrong, lost = (torch.rand(truth.shape, generator=generator, dtype=torch.float64) for _ in range(2))
observed = (truth ^ (wrong < torch.where(truth, 0.2, 0.03))).double().masked_fill(lost < 0.05, torch.nan)
misread = int(((observed == 1) != truth)[~observed.isnan()].sum())
print(f"{int(observed.isnan().sum())} of {observed.numel()} entries are missing, {misread} misread;", end=" ")
print(f"{int(conflicting_pairs(observed == 1).sum()) // 2} pairs of mutations conflict")
print(f"{num_conflict_free(*truth.shape):,} of 2**{truth.numel()} tables have no conflict")

# %%
# Before the data
# ---------------
# A table without readings has the prior for its posterior. Of all tables few have no conflict, and of these fewer are
# linear, with mutations that arose one after another, so that the cells of any two are nested.

nothing_read = NoisyGenotypes(torch.full_like(observed, torch.nan), 0.01, 0.2)
share = float(nothing_read.conflict_free_probability())
linear = float(nothing_read.linear_probability())
print(f"no conflict: a share of {share:.1e} of all tables; linear: {linear:.4f} of these")
assert abs(share * 2 ** truth.numel() / num_conflict_free(*truth.shape) - 1) < 1e-9

# %%
# An exact twin
# -------------
# Four cells and three mutations have 4,096 tables, few enough to check the rule by hand. Given a table, the rates
# integrate out, because the readings of zeros and of ones are beta-binomial. The recursion instead sums tables for
# given rates; as that sum is a polynomial in the rates, Gauss-Jacobi quadrature integrates it without error. For given
# rates, the probabilities of no conflict and of a line are shares of the likelihoods of all tables.


def fits_a_tree(table: np.ndarray) -> bool:
    for first, second in itertools.combinations(table.T, 2):
        if (first & second).any() and (first & ~second).any() and (~first & second).any():
            return False
    return True


few = observed[:4, :3]
read = few.numpy() == 1
known = ~few.isnan().numpy()
at_rates, likelihoods = NoisyGenotypes(few, 0.02, 0.15), {"all": 0.0, "no conflict": 0.0, "linear": 0.0}
joint = []
for entries in itertools.product([False, True], repeat=few.numel()):
    table = np.array(entries).reshape(few.shape)
    likelihood = math.exp(float(at_rates.log_likelihood(torch.tensor(table))))
    likelihoods["all"] += likelihood
    if fits_a_tree(table):
        columns = itertools.combinations(table.T, 2)
        likelihoods["no conflict"] += likelihood
        likelihoods["linear"] += likelihood * all(not ((a & ~b).any() and (~a & b).any()) for a, b in columns)
        zeros, ones = read[~table & known], read[table & known]
        false_positives, false_negatives = zeros.sum(), (~ones).sum()
        joint.append(
            betaln(1 + false_positives, 20 + len(zeros) - false_positives)
            - betaln(1, 20)
            + betaln(2 + false_negatives, 6 + len(ones) - false_negatives)
            - betaln(2, 6)
        )
by_hand = logsumexp(joint) - np.log(len(joint))


def rates_and_weights(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of rates and the prior's weights, exact for polynomials up to degree ``2 * number - 1``."""
    (x, u), (y, v) = roots_jacobi(number, 19, 0), roots_jacobi(number, 5, 1)
    pairs = torch.cartesian_prod(torch.tensor((x + 1) / 2), torch.tensor((y + 1) / 2))
    return pairs, torch.tensor(np.outer(u / u.sum(), v / v.sum()).ravel())


pairs, weights = rates_and_weights(7)
recursion = logsumexp(NoisyGenotypes(few, *pairs.T).log_evidence(), b=weights)
print(f"log evidence: {recursion:.12f} by recursion and quadrature, {by_hand:.12f} by listing tables")
assert abs(recursion - by_hand) < 1e-9
no_conflict, linear = float(at_rates.conflict_free_probability()), float(at_rates.linear_probability())
print(f"at given rates: no conflict {no_conflict:.9f}, a line {linear:.9f}")
assert abs(no_conflict - likelihoods["no conflict"] / likelihoods["all"]) < 1e-9
assert abs(linear - likelihoods["linear"] / likelihoods["no conflict"]) < 1e-9

# %%
# The fit
# -------
# The same quadrature, with enough points for all 24 entries, gives the evidence and the posterior of the rates. With so
# few cells all tables can still be listed, and each given its beta-binomial weight: the evidence is the same. (With
# other priors of the rates, sample them: ``bk.sample(bk.Target.from_pyro(GenotypeModel(observed)))``.)

pairs, weights = rates_and_weights(13)
log_joint = NoisyGenotypes(observed, *pairs.T).log_evidence() + weights.log()
log_evidence, posterior = float(log_joint.logsumexp(0)), log_joint.softmax(0)
for name, rate in zip(("false positive", "false negative"), pairs.T, strict=True):
    mean = float(posterior @ rate)
    print(f"{name} rate: {mean:.3f}, standard deviation {float(posterior @ (rate - mean) ** 2) ** 0.5:.3f}")

listed = conflict_free_matrices(6, 4, limit=2**20).flatten(1)
entry, known = observed.flatten() == 1, ~observed.flatten().isnan()
absent, present = listed.logical_not() & known, listed & known
false_positives, false_negatives = (absent & entry).sum(1).numpy(), (present & ~entry).sum(1).numpy()
log_weights = betaln(1 + false_positives, 20 + absent.sum(1).numpy() - false_positives) - betaln(1, 20)
log_weights += betaln(2 + false_negatives, 6 + present.sum(1).numpy() - false_negatives) - betaln(2, 6)
by_list = logsumexp(log_weights) - math.log(len(listed))
print(f"log evidence: {log_evidence:.12f} by quadrature, {by_list:.12f} from {len(listed):,} tables")
assert abs(log_evidence - by_list) < 1e-9

# %%
# What it says
# ------------
# Rates are drawn from the points of the quadrature, and for each pair one table from its exact posterior: independent
# draws of tables, from which whether one mutation came before another is a matter of counting. In the figure, the only
# filled circle on a field lighter than one half is the entry that was misread. That mutations arose on two branches is
# seen clearly; that there was no conflict before the noise is something to assume, not something that small tables
# show, because tables without conflict are so few.

number = 40 if is_small() else 500
rates = pairs[torch.multinomial(posterior, number, replacement=True, generator=generator)]
tables = torch.cat([NoisyGenotypes(observed, *pair).sample(1, seed=i) for i, pair in enumerate(rates)])
marginals = (posterior[:, None, None] * NoisyGenotypes(observed, *pairs.T).marginals()).sum(0)
mistakes = int(((marginals > 0.5) != truth).sum())
print(f"entries misread or missing: {int((observed != truth).sum())}; wrong as inferred: {mistakes}")
assert mistakes < int((observed != truth).sum())


def came_before(tables: torch.Tensor, earlier: int, later: int) -> torch.Tensor:
    """Say in which tables the cells of one mutation are some, but not all, of those of another."""
    first, second = tables[..., earlier], tables[..., later]
    return (first | ~second).all(-1) & (first & ~second).any(-1) & second.any(-1)


weight_of_table = np.exp(log_weights - logsumexp(log_weights))
for earlier, later in ((0, 1), (1, 2), (0, 3)):
    exact = float(weight_of_table @ came_before(listed.unflatten(1, (6, 4)), earlier, later).numpy())
    share, error = float(came_before(tables, earlier, later).double().mean()), (exact * (1 - exact) / number) ** 0.5
    print(f"mutation {earlier} came before {later}: probability {share:.3f} +- {error:.3f}, exactly {exact:.3f}")
    assert abs(share - exact) < 4.5 * error
given = NoisyGenotypes(observed, *pairs.T)
print(f"on a single line: probability {float(posterior @ given.linear_probability()):.4f}")
among_all = float(NoisyGenotypes(observed, 0.03, 0.2).conflict_free_probability())
print(f"no conflict, among all tables and with the rates of the simulation: {among_all:.4f}")
found, counts = tables.unique(dim=0, return_counts=True)
print(f"{len(found)} different tables in {len(tables)} draws; the tree of the most frequent:")
print(MutationTree.from_genotypes(found[counts.argmax()]).to_text())

figure = Figure(figsize=(5.4, 5), layout="constrained")
axes = plot_genotypes(marginals, observed, figure.subplots())
axes.set_title("filled: read as 1, hollow: read as 0, no mark: missing", fontsize="small")

# %%
# A failure on purpose
# --------------------
# The rule may be wrong: cells do lose mutations. Let the third cell have lost the first one, and let all be read
# without an error. The model has no table for that. It thinks it more probable than not that the right reading is a
# misread one.

lossy = truth.double()
lossy[2, 0] = 0
log_joint = NoisyGenotypes(lossy, *pairs.T).log_evidence() + weights.log()
restored = float(log_joint.softmax(0) @ NoisyGenotypes(lossy, *pairs.T).marginals()[:, 2, 0])
print(f"the mutation that was lost, and read as lost, is there with probability {restored:.3f}")
assert restored > 0.5

# %%
# Try it on yours
# ---------------
# Replace ``observed``: a row for each cell, a column for each mutation, and ``nan`` where there is no reading.
#
# .. code-block:: python
#
#    log_joint = NoisyGenotypes(observed, *pairs.T).log_evidence() + weights.log()
#    posterior = log_joint.softmax(0)
#    print((posterior[:, None, None] * NoisyGenotypes(observed, *pairs.T).marginals()).sum(0))
#
# Look at the posterior of the error rates: if it sits far from what the laboratory measured, the rule is broken, by
# losses or by two cells read as one. The exact sum takes ten cells and eight mutations, so group cells with the same
# readings; to twelve mutations, ``NoisyGenotypes.gibbs_sweep`` samples tables.
#
# Where to go next: :doc:`hidden_states_of_growth` sums out states in the same way, :doc:`karate_club` finds groups
# where there are too many assignments to sum over.
