r"""
Which substitution model, and one for all sites? Model averages and partitions by their evidence
================================================================================================

**What you will learn:** how the evidence weighs models of sequence evolution, from Jukes and Cantor's to the general
time-reversible one, how to average over them where several are probable, how to give subsets of sites their own rates
and models on one tree, and how the evidence refuses a partition that means nothing.

Programs choose a substitution model by a criterion and then forget that it was chosen; an average carries what is left
of the doubt into branch lengths and rates :cite:p:`huelsenbeck2004`. And the third base of a codon often changes
without changing the protein, the second hardly ever does: partitioned models :cite:p:`ronquist2012` give codon
positions a rate of their own. The data are 898 sites of mitochondrial DNA of twelve primates :cite:p:`hayasaka1988`:
two stretches that encode proteins, and transfer RNA between.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import gammainc, gammaincinv, roots_hermitenorm, roots_laguerre

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import (
    HKY85,
    TN93,
    Alignment,
    GammaRates,
    Partition,
    PartitionedTreeModel,
    Tree,
    primates,
)
from bayeskit.models.phylogenetics.workflows import average_substitution_models, compare_topologies

# %%
# The model
# ---------
# A base :math:`i` changes to :math:`j` at a rate proportional to :math:`r_{ij} \pi_j`, with frequencies :math:`\pi` and
# six exchangeabilities :math:`r`. JC69 has all :math:`r` and all :math:`\pi` equal; K80 and HKY85 have one :math:`r`
# for transitions (A-G and C-T) and one for transversions, TN93 two for transitions, TIM2 four values, GTR six. With
# ``+G4`` the rate of a site is drawn from four categories of a gamma distribution of mean one :cite:p:`yang1994`, with
# ``+I`` a share of sites never changes. Subset :math:`s` of :math:`n_s` among :math:`n` sites has the branch lengths
# :math:`m_s b`, where :math:`b` is shared,
#
# .. math::
#
#    p(D \mid M) = \int \prod_s p(D_s \mid m_s b, \theta_s, M) \, p(b) \, p(\theta \mid M)\, p(m) \, db \, d\theta\, dm,
#    \qquad m_s = \frac{n}{n_s} w_s, \quad w \sim \mathrm{Dirichlet}(1, \dots, 1),
#
# so that the mean rate of a site is one. Parameters :math:`\theta_s` of subsets are each shared (linked) or not. Which
# reading frame is right shows in the data: no codon may be a stop, in mitochondria TAA, TAG, AGA or AGG.

everything, tree = primates()
alignment = everything
apes = Tree.from_newick("(((Homo_sapiens,Pan),Gorilla),Pongo,Hylobates);")
names = ["HKY85", "HKY85+I", "JC69+G4", "K80+G4", "HKY85+G4", "TN93+G4", "TIM2+G4", "GTR+G4"]
if is_small():
    alignment, tree, names = everything.select(apes.taxa), apes, [names[place] for place in (0, 3, 4, 5)]
bits = everything.patterns[:, everything.site_patterns].numpy()  # A 1, C 2, G 4, T 8
stops = [(8, 1, 1), (8, 1, 4), (1, 4, 1), (1, 4, 4)]
starts = np.array([*range(1, 455, 3), *range(659, 894, 3)])  # of codons: sites 2 to 457 and 660 to 896
for shift in range(3):
    codon = np.stack([bits[:, starts + shift + k] for k in range(3)], -1)
    number = sum(int((codon == stop).all(-1).sum()) for stop in stops)
    assert (number == 0) == (shift == 0)
subsets = {f"position {k + 1}": starts + k for k in range(3)}
subsets["RNA"] = np.setdiff1d(np.arange(898), np.concatenate(list(subsets.values())))

# %%
# Before the data
# ---------------
# The prior of the gamma distribution's shape is exponential with mean one: from sites that are nearly alike to an
# alignment of which one quarter does all the changing.

parts = everything.select(apes.taxa).partitioned(subsets)
quarters = GammaRates(shape=torch.tensor(0.3)).categories(torch.tensor(0.3)).rates
print(f"rates of quarters of the sites for a shape of 0.3: {quarters.numpy().round(3)}")

# %%
# An exact twin
# -------------
# Three taxa have one tree, of three branches. Under JC69, K80 and JC69+G4, and for two subsets with a rate each,
# probabilities of change have a closed form, and Gauss quadrature in three or four dimensions gives the evidence.

slow, fast = ("ACGTACGT", "ACGTACGA", "ACGTACGT"), ("TTACGGCA", "TCACGACG", "CTACGACT")
columns = np.array([["ACGT".index(base) for base in one + two] for one, two in zip(slow, fast, strict=True)])
lengths, length_weights = roots_laguerre(24)
kind = [[0 if i == j else 1 if (i + j) % 2 == 0 else 2 for j in range(4)] for i in range(4)]  # A, C, G, T


def log_evidence(weights: np.ndarray, *parts: tuple[np.ndarray, np.ndarray], kappas: np.ndarray | float = 1.0) -> float:
    """Return the evidence of columns (3, sites) with rates (n, categories) at n nodes of a parameter."""
    product, kappas = 1.0, np.broadcast_to(kappas, len(weights))[:, None, None]
    for columns, rates in parts:
        t = rates[:, :, None] * lengths / 10 / (kappas + 2)  # one expected change a unit; lengths have rate 10
        little, much = np.exp(-4 * t), np.exp(-2 * (kappas + 1) * t)
        chances = [(1 + little + 2 * much) / 4, (1 + little - 2 * much) / 4, (1 - little) / 4]
        for three in columns.T:
            sites = (np.einsum("nri,nrj,nrk->nijk", *(chances[kind[u][x]] for x in three)) for u in range(4))
            product = product * sum(sites) / (4 * rates.shape[1])
    return math.log(np.einsum("nijk,n,i,j,k->", product, weights, *[length_weights] * 3))


one, (nodes, normal), (shapes, gamma) = np.ones((1, 1)), roots_hermitenorm(40), roots_laguerre(40)
cuts = gammaincinv(shapes[:, None], np.arange(5) / 4)  # quarters; in units of the scale
share, uniform = np.polynomial.legendre.leggauss(60)
exact = {
    "JC69": log_evidence(one[0], (columns, one)),
    "K80": log_evidence(normal / normal.sum(), (columns, np.ones((40, 1))), kappas=np.exp(1 + 1.25 * nodes)),
    "JC69+G4": log_evidence(gamma, (columns, 4 * np.diff(gammainc(shapes[:, None] + 1, cuts)))),
}
halves = (columns[:, :8], 1 + share[:, None]), (columns[:, 8:], 1 - share[:, None])
exact["own rates"] = log_evidence(uniform / 2, *halves)
toy = Alignment.from_sequences({name: one + two for name, one, two in zip("abc", slow, fast, strict=True)})
star = Tree.from_newick("(a,b,c);")
options = {"num_draws": 5000 if is_small() else 20_000, "progress": False}
twin = average_substitution_models(toy, star, list(exact)[:3], **options).comparison.results
found = {name: (z.log_evidence, z.standard_error) for name, z in twin.items()}
flat = dist.Dirichlet(torch.ones(2, dtype=torch.float64))
two = Partition(toy.partitioned({"slow": range(8), "fast": range(8, 16)}), relative_rates=flat)
found["own rates"] = compare_topologies(two, [star], **options).total_log_evidence
for name, (value, error) in found.items():
    print(f"{name:9s} exactly {exact[name]:.5f}, by importance sampling {value:.5f} +- {error:.5f}")
    assert abs(value - exact[name]) < 4.5 * error

# %%
# The fit
# -------
# One call weighs the models, by importance sampling from a proposal that is matched to the posterior of branch lengths
# and parameters, and averages over them. A model whose evidence is not to be trusted is named in ``.warnings``.

options["num_draws"] = 500 if is_small() else 2000
average = average_substitution_models(alignment, tree, names, **options)
constant = average_substitution_models(alignment, tree, ["HKY85", "TN93"], **options)
assert not average.warnings and not constant.warnings
print(average)
factor, error = average.comparison.log_bayes_factor("HKY85")
same = average.probability_of_equal("A-G", "C-T")
print(f"both transitions have the same exchangeability: probability {same.value:.3f} +- {same.standard_error:.3f}")
assert factor + 4.5 * error < 0 and 0 < same.value < 1

# %%
# Then, for the five apes: from one model for all sites to one for each subset.


def partition(parts: dict[str, Alignment], *linked: str, own_rates: bool = True) -> Partition:
    shares = dist.Dirichlet(torch.ones(len(parts), dtype=torch.float64)) if own_rates else None
    return Partition(parts, HKY85(), GammaRates(), linked=linked, relative_rates=shares)


linked = ("kappa", "base_frequencies", "shape")
models = {"one model": partition(parts, *linked, own_rates=False), "own rates": partition(parts, *linked)}
models |= {} if is_small() else {"own frequencies": partition(parts, "kappa", "shape"), "all own": partition(parts)}
options["num_draws"] = 1000 if is_small() else 5000
# Sites dealt out at random, for the failure below.
dealt = np.split(np.random.default_rng(1).permutation(898), np.cumsum([len(sites) for sites in subsets.values()])[:-1])
random_parts = everything.select(apes.taxa).partitioned(dict(zip(subsets, dealt, strict=True)))
models["random subsets"] = partition(random_parts, *linked)
evidence = {name: compare_topologies(model, [apes], **options).total_log_evidence for name, model in models.items()}
least, its_error = evidence["one model"]
gains = {name: (z - least, math.hypot(error, its_error)) for name, (z, error) in evidence.items()}
print(*(f"{name:16s} log evidence {value:.2f} +- {error:.2f}" for name, (value, error) in evidence.items()), sep="\n")
assert gains["own rates"][0] - 4.5 * gains["own rates"][1] > 5

# %%
# A failure on purpose: a prior that is wide to be safe, and a partition that means nothing
# -----------------------------------------------------------------------------------------
# The evidence is a mean under the prior. TN93 has two ratios, of which the logarithms are normal with standard
# deviation 1.25 by default. With a hundred times that, the posterior of the ratios stays where it is, but the model
# pays several nats. There is no end to it: wherever the prior is flat, ten times the width costs :math:`\log 10` for
# each ratio. And own rates of four subsets of sites that were dealt out at random buy nothing, and the evidence charges
# for them.

wide = {"usual": 1.25, "wide": 125.0, "wider": 1250.0}
pair = {name: TN93(*[dist.LogNormal(torch.tensor(1.0).double(), width)] * 2) for name, width in wide.items()}
options["num_draws"] = 500 if is_small() else 2000
widened = average_substitution_models(alignment, tree, pair, site_rates=GammaRates(), **options).comparison
(loss, error), (more, its_error) = (widened.log_bayes_factor(*two) for two in (("wide", "usual"), ("wider", "wide")))
print(f"the wide prior costs {-loss:.2f} +- {error:.2f} nats, ten times wider {-more:.3f} more, 2 log 10 is 4.605")
assert loss + 4.5 * error < -5
assert abs(more + 2 * math.log(10)) < 4.5 * its_error + 0.005  # the rest by which the wide prior is not flat
assert gains["random subsets"][0] + 4.5 * gains["random subsets"][1] < 0

# %%
# What it says
# ------------
# Rates differ between sites: that outweighs all else by hundreds of nats. Then transitions differ from transversions,
# and bases in frequency. Whether A-G and C-T have the same exchangeability is less clear, and the average keeps both
# answers. With equal rates at all sites, changes that were overwritten are not seen, and the tree comes out shorter.
# One model for all positions is not enough: own rates are worth most, and third positions evolve many times as fast as
# second ones.

assert float(constant.branch_lengths.sum()) < float(average.branch_lengths.sum())
lengths = (2, 30, 20) if is_small() else (8, 200, 150)
draws = bk.sample(bk.Target.from_pyro(PartitionedTreeModel(models["own rates"], apes)), *lengths, progress=False)
relative = torch.as_tensor(draws["relative_rates"])
times = relative[..., 2] / relative[..., 1]
error = times.mean(-1).std() / len(times) ** 0.5
print(f"third against second positions: {times.mean():.1f} +- {error:.2f} times as fast")
assert bool((times > 1).all())
figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
average.plot(left)
right.barh(list(gains), [value for value, _ in gains.values()], xerr=[error for _, error in gains.values()])
right.set(xlabel="log Bayes factor against one model")

# %%
# Try it on yours
# ---------------
# Replace the alignment and the topology by those of your files, and the subsets: indices of sites from zero, or a file
# of NEXUS character sets or of RAxML. Without ``models``, all 203 reversible models of bases are weighed, in minutes.
# Look at ``.warnings`` first, and do not compare estimates that came with a ``SamplingWarning``: they need more draws,
# or ``compare_topologies(..., method="bridge_sampling")``.
#
# .. code-block:: python
#
#    alignment, tree = Alignment.from_file("sequences.nex"), Tree.from_file("topology.nwk")
#    average = average_substitution_models(alignment, tree, ["HKY85+G4", "GTR+G4", "GTR+I+G4"], num_draws=10_000)
#    average.averages_to_pandas()
#    compare_topologies(partition(alignment.partitioned("partitions.txt"), *linked), [tree])
#
# Where to go next: :doc:`human_chimp_gorilla` shows a model that gives the wrong tree,
# :doc:`/gallery/case_studies/phylogeny_from_an_alignment_file` finds the topology as well.
