r"""
Subclonal inference from noisy genotypes: is there noise, and does the tree branch?
===================================================================================

**What you will learn:** how probable it is that a table of cells and mutations obeyed the three-gamete rule before it
was misread, and that its mutations arose one after another on a single line, both from exact sums over all tables.

A tumour evolves on a line, if every new clone replaces part of the last one, or on branches. If each mutation arises
once and is never lost, no two mutations show all three of the gametes 10, 01 and 11 :cite:p:`gusfield1991`. Readings of
single cells break this rule :cite:p:`jahn2016`: is that noise, and what do they say of branches? The readings are
simulated, so that the answers can be checked.
"""

import itertools
import math

import torch
from matplotlib.figure import Figure

from bayeskit.errors import DataError
from bayeskit.gallery import is_small
from bayeskit.models.discrete.genotypes import NoisyGenotypes, conflict_free_matrices, has_conflict, num_conflict_free

# %%
# The model
# ---------
# All :math:`2^{nm}` tables :math:`A` of :math:`n` cells and :math:`m` mutations are equally probable, and readings
# :math:`A'` of the entries have false positives and false negatives. Two questions have exact answers,
#
# .. math:: P(\text{no conflict} \mid A'), \qquad P(\text{linear} \mid A', \text{no conflict}),
#
# the first because the sum over all tables is a product over entries, the second by a recursion over sets of
# mutations: on a line the cells of any two mutations are nested.

cells, mutations = 6, 6
false_positive, false_negative = 0.02, 0.15
line = torch.tensor([[row > column for column in range(mutations)] for row in range(cells)])
branches = torch.zeros(cells, mutations, dtype=torch.bool)
branches[:3, :3], branches[3:, 3:] = line[1:4, :3], line[1:4, :3]
truths = {"a line": line, "two branches": branches}


def misread(table, count, false_positive, false_negative, generator):
    noise = torch.rand(count, *table.shape, generator=generator, dtype=torch.float64)
    return (table ^ (noise < torch.where(table, false_negative, false_positive))).double()


# %%
# Before the data
# ---------------
# Few tables have no conflict, and fewer are linear. Without readings, the exact probabilities are those shares.

nothing = NoisyGenotypes(torch.full((cells, mutations), torch.nan, dtype=torch.float64), 0.02, 0.15)
share = float(nothing.conflict_free_probability())
print(f"{num_conflict_free(cells, mutations):,} of 2**36 tables have no conflict, a share of {share:.1e}")
assert abs(share * 2**36 / num_conflict_free(cells, mutations) - 1) < 1e-9
print(f"of these {float(nothing.linear_probability()):.4f} are linear")

# %%
# An exact twin
# -------------
# Four cells and three mutations have 4,096 tables. Each is checked pair by pair, and weighted by its likelihood.


def gametes(table):
    """Return for each pair of mutations which of 10, 01 and 11 occur."""
    columns = zip(*table, strict=True)
    return [{pair for pair in zip(*two, strict=True) if any(pair)} for two in itertools.combinations(columns, 2)]


generator = torch.Generator().manual_seed(0)
few = misread(line[1:5, :3], 1, 0.2, 0.3, generator)[0]
model = NoisyGenotypes(few, false_positive, false_negative)
everything = {"all": 0.0, "no conflict": 0.0, "linear": 0.0}
for entries in itertools.product([0, 1], repeat=12):
    table = [entries[3 * row : 3 * row + 3] for row in range(4)]
    likelihood = math.exp(float(model.log_likelihood(torch.tensor(table))))
    seen = gametes(table)
    everything["all"] += likelihood
    everything["no conflict"] += likelihood * all(len(pair) < 3 for pair in seen)
    everything["linear"] += likelihood * all(not {(1, 0), (0, 1)} <= pair for pair in seen)
by_hand = everything["no conflict"] / everything["all"], everything["linear"] / everything["no conflict"]
exact = float(model.conflict_free_probability()), float(model.linear_probability())
print(f"no conflict: {exact[0]:.12f}, by hand {by_hand[0]:.12f}; linear: {exact[1]:.12f}, by hand {by_hand[1]:.12f}")
assert max(abs(one - other) for one, other in zip(exact, by_hand, strict=True)) < 1e-9

# %%
# The fit
# -------
# Readings of a line and of two branches, many times each. Then tables are drawn from the prior: among these, lines must
# be as frequent as their readings foretell.

count = 20 if is_small() else 200
found = {}
for name, table in truths.items():
    readings = misread(table, count, false_positive, false_negative, generator)
    models = [NoisyGenotypes(reading, false_positive, false_negative) for reading in readings]
    found[name] = torch.tensor([[float(m.conflict_free_probability()), float(m.linear_probability())] for m in models])
    mean, error = found[name].mean(0), found[name].std(0) / math.sqrt(count)
    print(f"{name}: {has_conflict(readings).double().mean():.2f} of the readings break the rule;", end=" ")
    print(f"no conflict {mean[0]:.3f} +- {error[0]:.3f}, linear {mean[1]:.3f} +- {error[1]:.3f}")
difference = found["a line"][:, 1] - found["two branches"][:, 1]
assert difference.mean() > 4.5 * difference.std() / math.sqrt(count)

every = conflict_free_matrices(4, 3)
drawn = every[torch.randint(len(every), (10 * count,), generator=generator)]
columns = drawn.mT.unsqueeze(-2), drawn.mT.unsqueeze(-3)
linear = ((columns[0] & ~columns[1]).any(-1) & (columns[1] & ~columns[0]).any(-1)).flatten(1).any(-1).logical_not()
foretold = [NoisyGenotypes(misread(table, 1, 0.1, 0.3, generator)[0], 0.1, 0.3).linear_probability() for table in drawn]
surprise = linear.double() - torch.stack(foretold)
error = float(surprise.std()) / math.sqrt(len(surprise))
print(
    f"lines among drawn tables: {linear.double().mean():.3f}, off from foretold by {surprise.mean():.3f} +- {error:.3f}"
)
assert abs(float(surprise.mean())) < 4.5 * error

# %%
# What it says
# ------------
# Branches are seen clearly: readings of two branches hardly ever pass for a line. A line is harder to prove, since one
# missed reading makes it look branched, and lines are few in the prior. Whether there was a conflict before the noise
# is harder still: most readings of both tables break the rule, and tables without conflict are so few that six cells
# seldom make them probable. That no mutation is lost is therefore something to assume, not something that small tables
# show.

figure = Figure(figsize=(7, 3.6), layout="constrained")
axes = figure.subplots()
for name, probabilities in found.items():
    ordered = probabilities[:, 1].sort().values
    axes.step(ordered, torch.linspace(0, 1, count), where="post", label=f"readings of {name}")
axes.set(xlabel="posterior probability of a line", ylabel="share of readings below", xlim=(0, 1))
axes.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# Rates are taken as known here. With rates of zero, readings that break the rule are impossible, and an error is
# raised. With rates that are too low every misreading is taken for evidence, so that answers scatter more from reading
# to reading, on both sides of what the right rates say.

readings = misread(line, count, false_positive, false_negative, generator)
too_low = torch.stack([NoisyGenotypes(reading, 0.02, 0.01).linear_probability() for reading in readings])
for rate, probabilities in ((false_negative, found["a line"][:, 1]), (0.01, too_low)):
    error = float(probabilities.std()) / math.sqrt(count)
    print(f"a line, false negative rate {rate}: linear {probabilities.mean():.3f} +- {error:.3f}", end=", ")
    print(f"standard deviation over readings {probabilities.std():.3f}")
try:
    NoisyGenotypes(readings[has_conflict(readings)][0], 0.0, 0.0).linear_probability()
except DataError as refused:
    print(refused)
else:
    raise AssertionError("readings with a conflict were taken as free of errors")

# %%
# Try it on yours
# ---------------
# Put your table in place of the readings, at most ten cells and eight mutations, ``nan`` where nothing was read, and
# the rates of your sequencing, or a tensor of rates to see how much they matter. Look at the probability of a line over
# the rates that you hold possible.
#
# .. code-block:: python
#
#    rates = torch.linspace(0.05, 0.3, 6, dtype=torch.float64)
#    NoisyGenotypes(table, torch.full_like(rates, 0.02), rates).linear_probability()
#
# Where to go next: :doc:`noisy_genotypes` infers the table itself, with unknown rates, :doc:`karate_club` finds groups
# without a tree.
