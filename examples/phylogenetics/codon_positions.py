r"""
Is one substitution model enough for all codon positions? Partitioned models by their evidence
==============================================================================================

**What you will learn:** how to give subsets of sites their own rates and models on one tree, which parameters should be
shared, and how the evidence refuses a partition that means nothing.

The third base of a codon often changes without changing the protein, the second hardly ever does. A partitioned model
:cite:p:`ronquist2012` gives codon positions a rate or a substitution model of their own. The data are 898 sites of
mitochondrial DNA of five apes :cite:p:`hayasaka1988`: two stretches that encode proteins, and transfer RNA between.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from pyro.distributions import Dirichlet
from scipy.special import roots_laguerre

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import HKY85, Alignment, GammaRates, Partition, PartitionedTreeModel, Tree, primates
from bayeskit.models.phylogenetics.workflows import compare_topologies

# %%
# The model
# ---------
# Subset :math:`s` of :math:`n_s` among :math:`n` sites has the branch lengths :math:`m_s b`, where :math:`b` is shared,
#
# .. math::
#
#    p(D \mid b, \theta, m) = \prod_s p(D_s \mid m_s b, \theta_s), \qquad
#    m_s = \frac{n}{n_s} w_s, \quad w \sim \mathrm{Dirichlet}(1, \dots, 1),
#
# so that the mean rate of a site is one. Parameters :math:`\theta_s` of the substitution model HKY85 and of gamma
# distributed rates within a subset are each shared (linked) or not.
#
# Which reading frame is right shows in the data: within a protein no codon may be a stop. In the genetic code of
# vertebrate mitochondria those are TAA, TAG, AGA and AGG.

everything = primates()[0]
tree = Tree.from_newick(
    "((Homo_sapiens,Pan),Gorilla,Pongo);" if is_small() else "(((Homo_sapiens,Pan),Gorilla),Pongo,Hylobates);"
)
bits = everything.patterns[:, everything.site_patterns].numpy()  # A 1, C 2, G 4, T 8
stops = [(8, 1, 1), (8, 1, 4), (1, 4, 1), (1, 4, 4)]
starts = np.array([*range(1, 455, 3), *range(659, 894, 3)])  # of codons: sites 2 to 457 and 660 to 896
for shift in range(3):
    codon = np.stack([bits[:, starts + shift + k] for k in range(3)], -1)
    number = sum(int((codon == stop).all(-1).sum()) for stop in stops)
    print(f"reading frame {shift}: {number} stop codons in twelve primates")
    assert (number == 0) == (shift == 0)
subsets = {f"position {k + 1}": starts + k for k in range(3)}
subsets["RNA"] = np.setdiff1d(np.arange(898), np.concatenate(list(subsets.values())))
alignment = everything.select(tree.taxa)
parts = alignment.partitioned(subsets)

# %%
# Before the data
# ---------------
# A hundred sets of relative rates from the prior, and for each subset the share of its sites at which apes differ.

shares = np.random.default_rng(0).dirichlet(np.ones(4), 100)
rates = shares * 898 / np.array([len(sites) for sites in subsets.values()])
before = Figure(figsize=(8, 3), layout="constrained")
left, right = before.subplots(1, 2)
left.boxplot(rates, tick_labels=list(subsets), whis=(2.5, 97.5))
left.set(ylabel="relative rate", title="prior", ylim=(0, None))
differ = [
    float((part.weights * (part.patterns != part.patterns[:1]).any(0)).sum()) / part.num_sites
    for part in parts.values()
]
right.bar(list(subsets), differ)
right.set(ylabel="share of variable sites", title="data")
for axes in (left, right):
    axes.tick_params(axis="x", labelsize="small")

# %%
# An exact twin
# -------------
# Three taxa, two subsets of eight sites, and the model of Jukes and Cantor: the evidence is an integral over three
# branch lengths, by Gauss-Laguerre quadrature, and one share, by Gauss-Legendre quadrature.

slow = {"a": "ACGTACGT", "b": "ACGTACGA", "c": "ACGTACGT"}
fast = {"a": "TTACGGCA", "b": "TCACGACG", "c": "CTACGACT"}
lengths, length_weights = roots_laguerre(32)
share, share_weights = np.polynomial.legendre.leggauss(60)
share, share_weights = (share + 1) / 2, share_weights / 2
product = 1.0
for sequences, rate in ((slow, 2 * share), (fast, 2 * (1 - share))):  # shares times sites over sites of the subset
    decay = np.exp(-4 / 3 * rate[:, None] * lengths / 10)  # exponential prior of rate 10
    change = [(1 - decay) / 4, (1 + 3 * decay) / 4]  # to a given other base; to the same
    for column in zip(*sequences.values(), strict=True):
        site = (np.einsum("ni,nj,nk->nijk", *(change[base == root] for base in column)) for root in "ACGT")
        product = product * sum(site) / 4
exact = math.log(np.einsum("nijk,n,i,j,k->", product, share_weights, *[length_weights] * 3))
toy = Alignment.from_sequences({name: slow[name] + fast[name] for name in slow})
toy = toy.partitioned({"slow": range(8), "fast": range(8, 16)})
uniform = Dirichlet(torch.ones(2, dtype=torch.float64))
twin = compare_topologies(
    Partition(toy, relative_rates=uniform),
    [Tree.from_newick("(a,b,c);")],
    num_draws=5000 if is_small() else 20_000,
    progress=False,
)
estimate, error = twin.total_log_evidence
print(f"log evidence exactly {exact:.5f}, by importance sampling {estimate:.5f} +- {error:.5f}")
assert abs(estimate - exact) < 4.5 * error

# %%
# The fit
# -------
# From one model for all sites to one for each subset.


def partition(parts: dict[str, Alignment], linked: tuple[str, ...], own_rates: bool = True) -> Partition:
    shares = Dirichlet(torch.ones(len(parts), dtype=torch.float64)) if own_rates else None
    return Partition(parts, HKY85(), GammaRates(), linked=linked, relative_rates=shares)


linked = ("kappa", "base_frequencies", "shape")
models = {
    "one model": partition(parts, linked, own_rates=False),
    "own rates": partition(parts, linked),
    "own rates and frequencies": partition(parts, ("kappa", "shape")),
    "own model each": partition(parts, ()),
}
if is_small():
    models = {name: models[name] for name in ("one model", "own rates")}
options = {"num_draws": 1000 if is_small() else 5000, "progress": False}
evidence = {name: compare_topologies(model, [tree], **options).total_log_evidence for name, model in models.items()}
for name, (value, error) in evidence.items():
    print(f"{name:26s} log evidence {value:.2f} +- {error:.2f}")
gain = evidence["own rates"].value - evidence["one model"].value
error = math.hypot(evidence["own rates"].standard_error, evidence["one model"].standard_error)
print(f"log Bayes factor of own rates against one model: {gain:.2f} +- {error:.2f}")
assert gain - 4.5 * error > 5

# %%
# A failure on purpose: a partition that means nothing
# ----------------------------------------------------
# The same four sizes, sites dealt out at random. Own rates now buy nothing, and the evidence charges for
# them.

dealt = np.split(np.random.default_rng(1).permutation(898), np.cumsum([len(sites) for sites in subsets.values()])[:-1])
random_parts = alignment.partitioned(dict(zip(subsets, dealt, strict=True)))
value, error = compare_topologies(partition(random_parts, linked), [tree], **options).total_log_evidence
loss, error = evidence["one model"].value - value, math.hypot(error, evidence["one model"].standard_error)
print(f"random subsets with own rates: {loss:.2f} +- {error:.2f} nats worse than one model")
assert loss > 4.5 * error

# %%
# What it says
# ------------
# One model for all sites is not enough. Own rates are worth most, then own frequencies; that each subset also gets
# gamma rates and a ratio of transitions of its own is worth little more. Draws from the posterior of the relative rates
# say why: third positions evolve many times as fast as second ones.

target = bk.Target.from_pyro(PartitionedTreeModel(models["own rates"], tree))
budget = (2, 30, 20) if is_small() else (8, 200, 150)
settings = dict(zip(("num_chains", "num_warmup", "num_samples"), budget, strict=True))
draws = bk.sample(target, **settings, seed=0, progress=False)
relative = torch.as_tensor(draws["relative_rates"])
ratio = relative[..., 2] / relative[..., 1]
chains = ratio.mean(-1)
print(f"third against second positions: {ratio.mean():.1f} +- {chains.std() / len(chains) ** 0.5:.2f} times as fast")
assert bool((ratio > 1).all())
figure = Figure(figsize=(8, 3.2), layout="constrained")
left, right = figure.subplots(1, 2)
values, errors = zip(*(evidence.values()), strict=True)
left.barh(list(evidence), np.array(values) - values[0], xerr=np.array(errors))
left.set(xlabel="log Bayes factor against one model")
left.invert_yaxis()
right.boxplot(relative.flatten(0, 1).numpy(), tick_labels=list(subsets), whis=(2.5, 97.5), showfliers=False)
right.set(ylabel="relative rate, posterior", yscale="log")
right.tick_params(axis="x", labelsize="small")

# %%
# Try it on yours
# ---------------
# Replace the alignment, the topology, and the subsets: indices of sites from zero, or a file of NEXUS character sets or
# of RAxML. Look at the log evidence with its error, and do not compare estimates that came with a ``SamplingWarning``:
# with twelve primates and a model for each subset, importance sampling is not enough, and
# ``compare_topologies(..., method="bridge_sampling")`` is the way. Start with own rates and all else ``linked``.
#
# .. code-block:: python
#
#    parts = Alignment.from_file("genes.nex").partitioned("partitions.txt")
#    shares = Dirichlet(torch.ones(len(parts), dtype=torch.float64))
#    linked = ("kappa", "base_frequencies", "shape")
#    model = Partition(parts, HKY85(), GammaRates(), linked=linked, relative_rates=shares)
#    compare_topologies(model, [tree])
#
# Where to go next: :doc:`average_of_substitution_models` averages over models of one set of sites,
# :doc:`human_chimp_gorilla` asks the same data for the tree.
