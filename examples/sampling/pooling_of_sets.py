r"""
Deep sets: sum, mean or max pooling for a median, a maximum and a posterior
===========================================================================

**What you will learn:** which functions of a set a network can represent if it pools by the sum, the mean or the
maximum, which of them it learns, what the number of observations adds, and what happens on sets that are longer than
those of training.

A network that reads a set must not depend on the order. Deep sets :cite:p:`zaheer2017` add the codes of all members;
PointNet :cite:p:`qi2017` takes the largest of each entry. The encoder of :func:`bayeskit.amortize` uses the mean, the
maximum, and the number of observations. This page shows why it needs all three.
"""

from itertools import pairwise

import torch
from matplotlib.figure import Figure

from bayeskit.gallery import is_small

# %%
# Sets, targets and networks
# --------------------------
# A set has :math:`n` numbers, with :math:`n` uniform from 1 to 20. They are normal with unit variance about a mean, and
# the mean is standard normal. The four targets are the median, the maximum, and the mean and the standard deviation of
# the posterior of the mean, which are :math:`\sum_i y_i / (1 + n)` and :math:`(1 + n)^{-1/2}`. A network is
#
# .. math:: f(y) = \rho\bigl(\operatorname{pool}_{i=1}^n \varphi(y_i)\bigr)
#    \quad\text{or}\quad f(y) = \rho\bigl(\operatorname{pool}_{i=1}^n \varphi(y_i), n\bigr),
#
# where :math:`\varphi` and :math:`\rho` have one hidden layer, and the code has 24 entries. A sum of continuous codes
# can represent every continuous function of at most 20 numbers only if the code has at least 20 entries
# :cite:p:`wagstaff2019`; :doc:`one_network_for_all_sizes` shows the error of a median against that number. Each network
# has one target. Many networks are trained at once, as batched products of matrices.

TARGETS = ("median", "maximum", "posterior mean", "posterior sd")
POOLINGS = {
    "sum": lambda code, member: (code * member).sum(-2) / 10,
    "mean": lambda code, member: (code * member).sum(-2) / member.sum(-2),
    "max": lambda code, member: code.masked_fill(member == 0, -torch.inf).amax(-2),
}
CODES = {pooling + " and n" * counts: (pooling, counts) for counts in (False, True) for pooling in POOLINGS}


def sets(num_networks, num_sets, sizes, generator):
    """Return numbers and their masks, both ``(networks, sets, largest size)``."""
    shape = num_networks, num_sets, sizes[1]
    n = torch.randint(sizes[0], sizes[1] + 1, (*shape[:2], 1), generator=generator)
    mean = torch.randn(*shape[:2], 1, generator=generator)
    return mean + torch.randn(shape, generator=generator), (torch.arange(sizes[1]) < n).to(mean)


def targets(y, member):
    """Return the four targets of each set, ``(networks, sets, 4)``."""
    n, ordered = member.sum(-1), y.masked_fill(member == 0, torch.inf).sort(-1).values
    middle = [ordered.gather(-1, half.long().unsqueeze(-1)).squeeze(-1) for half in ((n - 1) // 2, n // 2)]
    largest = y.masked_fill(member == 0, -torch.inf).amax(-1)
    return torch.stack([sum(middle) / 2, largest, (y * member).sum(-1) / (1 + n), (1 + n) ** -0.5], -1)


class Perceptrons(torch.nn.Module):
    """Independent networks of the same shape."""

    def __init__(self, number, widths, generator):
        super().__init__()
        draws = [torch.randn(number, a + 1, b, generator=generator) for a, b in pairwise(widths)]
        self.offsets = torch.nn.ParameterList(draw[:, :1] / 2 for draw in draws)
        self.weights = torch.nn.ParameterList(draw[:, 1:] / (draw.shape[1] - 1) ** 0.5 for draw in draws)

    def forward(self, x):
        x = torch.baddbmm(self.offsets[0], x, self.weights[0])
        return torch.baddbmm(self.offsets[1], torch.nn.functional.silu(x), self.weights[1])


class SetNetworks(torch.nn.Module):
    """Networks of sets with one pooling, which read the number of members if ``counts``."""

    def __init__(self, number, pooling, counts, generator):
        super().__init__()
        self.pool, self.counts = POOLINGS[pooling], counts
        self.phi = Perceptrons(number, (1, 32, 24), generator)
        self.rho = Perceptrons(number, (24 + counts, 32, 1), generator)

    def code(self, y, member):
        """Return what is left of the sets, ``(networks, sets, entries)``."""
        pooled = self.pool(self.phi(y.flatten(1).unsqueeze(-1)).unflatten(1, y.shape[1:]), member.unsqueeze(-1))
        return torch.cat([pooled, member.sum(-1, keepdim=True) / 10], -1) if self.counts else pooled

    def forward(self, y, member):
        return self.rho(self.code(y, member)).squeeze(-1)


# %%
# An exact twin
# -------------
# The number of observations and their sum are sufficient: with :math:`\varphi(y) = (1, y)`, a sum gives the posterior
# exactly. The mean and the maximum of codes are the same for a set and for the same set twice,
# whatever :math:`\varphi` is. But the posteriors differ. So half the difference is an error that no network with such a
# code can go below, on average over the two sets. The number repairs this. It does not repair all: the maximum of
# codes, even with the number, is the same for two sets of three that have the same two values, but different medians.
# Averages are beyond max pooling for this reason :cite:p:`bueno2021`.

few = torch.tensor([[[0.7, -0.7, 0.4]]], dtype=torch.float64)
tied = torch.tensor([-1.0, -1.0, 1.0]).expand_as(few).double(), torch.tensor([-1.0, 1.0, 1.0]).expand_as(few).double()
pairs, same_code = ((few, torch.cat([few, few], -1)), tied), {}
for y in pairs[0]:
    print(f"{y.shape[-1]} data: posterior mean and sd", targets(y, torch.ones_like(y))[0, 0, 2:].tolist())
for name, (pooling, counts) in CODES.items():
    code = SetNetworks(1, pooling, counts, torch.Generator().manual_seed(0)).double().code
    apart = [(code(a, torch.ones_like(a)) - code(b, torch.ones_like(b))).abs().max().item() for a, b in pairs]
    print(f"{name:>10}: a set and the set twice differ by {apart[0]:.4f}, medians of -1 and 1 by {apart[1]:.4f}")
    same_code[name] = apart[0] < 1e-12, apart[1] < 1e-12
assert [name for name, (twice, _) in same_code.items() if twice] == ["mean", "max"]
assert [name for name, (_, tied) in same_code.items() if tied] == ["max", "max and n"]

# %%
# Errors on new sets
# ------------------
# Each error is the root mean square over new sets, in units of the target's standard deviation over sets, so that 1 is
# the error of the best constant. It is the median over networks that began at different weights and saw different
# sets. The standard error is that of the median network over sets.

generator = torch.Generator().manual_seed(1)
of_many = targets(*sets(1, 20_000, (1, 20), generator))[0]
centre, unit = of_many.mean(0), of_many.std(0)
num_networks, num_steps = 3, 120 if is_small() else 600
number = 4 * num_networks


def train(pooling, counts):
    """Return trained networks, one after another for the four targets."""
    generator = torch.Generator().manual_seed(2)
    networks = SetNetworks(number, pooling, counts, generator)
    optimizer = torch.optim.Adam(networks.parameters(), lr=0.01)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        y, member = sets(number, 32, (1, 20), generator)
        wanted = ((targets(y, member) - centre) / unit)[torch.arange(number), :, torch.arange(number) % 4]
        loss = (networks(y, member) - wanted).square().mean(-1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falling.step()
    return networks


@torch.no_grad()
def errors(networks, y, member):
    """Return the median error and its standard error for each target, and the errors of all networks."""
    found = networks(*(x.expand(number, -1, -1) for x in (y, member))).unflatten(0, (-1, 4))
    squares = (found - ((targets(y, member)[0] - centre) / unit).T).square()
    of_all, place = squares.mean(-1).sqrt(), squares.mean(-1).median(0).indices
    error = squares.std(-1) / squares.shape[-1] ** 0.5 / (2 * of_all)
    return of_all[place, range(4)], error[place, range(4)], of_all


trained = {name: train(*code) for name, code in CODES.items()}
new = sets(1, 1000 if is_small() else 4000, (1, 20), generator)
found = {name: errors(networks, *new) for name, networks in trained.items()}
print(" " * 12 + "".join(f"{target:>18}" for target in TARGETS))
for name, (median, error, _) in found.items():
    print(f"{name:>12}" + "".join(f"{x:>9.3f} +- {e:.3f}" for x, e in zip(median, error, strict=True)))


# %%
# The maximum is learnt by max pooling, and by an order of magnitude better than by the others. The median is learnt
# best by the mean, the posterior mean best by the mean with the number, and almost as well by the sum. The standard
# deviation needs the number, which the sum has, and which can be given to the others. For the median and the posterior
# mean, the number hardly helps max pooling. Differences are held against 4.5 standard errors over sets.

for better, worse, factor, target in (
    ("max", "mean and n", 1 / 3, 1),
    ("mean", "max and n", 0.8, 0),
    ("mean and n", "max and n", 1.0, 2),
    ("sum", "mean", 0.6, 3),
    ("mean and n", "mean", 0.7, 3),
):
    (a, a_error), (b, b_error) = ([x[target] for x in found[name][:2]] for name in (better, worse))
    assert factor * b - a > 4.5 * (a_error.square() + (factor * b_error).square()).sqrt(), (better, worse, target)

# %%
# A failure on purpose: the same set twice
# ----------------------------------------
# New sets, each with the set that has all its members twice. No mean and no maximum can have an error of the standard
# deviation below the exact bound of the twin, however long it is trained. The sum, and the mean with the number, can.

y, member = sets(1, 2000, (1, 10), generator)
pair = [(y, member), (torch.cat([y, y], -1), torch.cat([member, member], -1))]
bound = ((targets(*pair[0]) - targets(*pair[1]))[0, :, 3] / unit[3] / 2).square().mean().sqrt()
for name, networks in trained.items():
    both = sum(errors(networks, *of_one)[2][:, 3].square() / 2 for of_one in pair).sqrt()
    print(f"{name:>10}: posterior sd, error {both.median():.3f}; for one code at least {bound:.3f}")
    assert name not in ("mean", "max") or float(both.min()) > 0.999 * float(bound)
    assert name != "sum" or float(both.median()) < float(bound)

# %%
# A failure on purpose: longer sets
# ---------------------------------
# A sum grows with the set, so that sets longer than those of training have codes that :math:`\rho` has never seen. The
# mean and the maximum of codes stay in their range; but with the number, the same happens to them for the standard
# deviation. The error of max pooling for the maximum of 80 numbers stays small. Training ends at the grey line.

sizes = (5, 10, 20, 40, 80)
by_size = [sets(1, 200 if is_small() else 1000, (n, n), generator) for n in sizes]
longer = {name: torch.stack([errors(each, *data)[0] for data in by_size]) for name, each in trained.items()}
for name, error in longer.items():
    print(f"{name:>10}: maximum of 80 numbers, error {error[-1, 1]:.3f}; posterior sd, {error[-1, 3]:.3f}")
assert longer["sum"][-1, 3] > 3 * found["sum"][0][3] and longer["sum"][-1, 1] > 3 * longer["max"][-1, 1]

figure = Figure(figsize=(9, 4), layout="constrained")
for k, axes in zip((1, 3), figure.subplots(1, 2), strict=True):
    for place, (name, error) in enumerate(longer.items()):
        style = f"C{place % 3}" + ("o-", "s--")[place // 3]
        axes.plot(sizes, error[:, k], style, label=name)
    axes.axvline(20, color="0.5", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="members of a set", ylabel="error / sd over sets", title=TARGETS[k])
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)

# %%
# Try it on yours
# ---------------
# Replace ``targets`` by your function of a set, and ``sets`` by your simulator. Hold the code of a set against that of
# the same set twice: if they agree and your target differs, append the number of observations. Look at the errors by
# size, and beyond the largest size of training. With a Pyro model, :func:`bayeskit.amortize` has all three parts:
#
# .. code-block:: python
#
#    import bayeskit as bk
#
#    posterior = bk.amortize(model, (torch.zeros(20, dtype=torch.float64),), sizes=(1, 20))
#    draws = posterior.sample(data)
#
# Where to go next: :doc:`one_network_for_all_sizes` amortises a posterior over sizes,
# :doc:`simulator_in_a_hierarchy` learns the likelihood of one observation, and sums its logarithm over the set.
