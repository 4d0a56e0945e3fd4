r"""
Which substitution model? Bayesian model averaging of HKY85, GTR and rates across sites
=======================================================================================

**What you will learn:** how the evidence weighs models of sequence evolution, from Jukes and Cantor's to the general
time-reversible one, how to average over them where several are probable, and what rates that differ between sites do
to the length of a tree.

Programs choose a substitution model by a criterion and then forget that it was chosen. The posterior probabilities of
the models say how clear the choice is, and an average carries what is left of the doubt into branch lengths and rates
:cite:p:`huelsenbeck2004`. The data are 898 sites of mitochondrial DNA of twelve primates :cite:p:`hayasaka1988`.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import gammainc, gammaincinv, roots_hermitenorm, roots_laguerre

from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import TN93, Alignment, GammaRates, Tree, primates
from bayeskit.models.phylogenetics.workflows import average_substitution_models

# %%
# The model
# ---------
# A base :math:`i` changes to :math:`j` at a rate proportional to :math:`r_{ij} \pi_j`, with frequencies :math:`\pi` and
# six exchangeabilities :math:`r`. JC69 has all :math:`r` and all :math:`\pi` equal; K80 and HKY85 have one :math:`r`
# for transitions (A-G and C-T) and one for transversions, TN93 two for transitions, TIM2 four values, GTR six. With
# ``+G4`` the rate of a site is drawn from four categories of a gamma distribution of mean one :cite:p:`yang1994`, with
# ``+I`` a share of sites never changes. For a model :math:`M` with parameters :math:`\theta` and branch lengths
# :math:`b` on one topology,
#
# .. math::
#
#    p(D \mid M) = \int p(D \mid b, \theta, M) \, p(b) \, p(\theta \mid M) \, db \, d\theta, \qquad
#    p(M \mid D) = \frac{p(D \mid M)}{\sum_{M'} p(D \mid M')}.

alignment, tree = primates()
names = ["HKY85", "HKY85+I", "JC69+G4", "K80+G4", "HKY85+G4", "TN93+G4", "TIM2+G4", "GTR+G4"]
if is_small():
    apes = ["Hylobates", "Pongo", "Gorilla", "Homo_sapiens", "Pan"]
    alignment, tree = alignment.select(apes), Tree.from_newick("(((Homo_sapiens,Pan),Gorilla),Pongo,Hylobates);")
    names = ["HKY85", "K80+G4", "HKY85+G4", "TN93+G4"]
options = {"num_draws": 500 if is_small() else 2000, "progress": False}

# %%
# Before the data
# ---------------
# The prior of the gamma distribution's shape is exponential with mean one. Four rates from each of forty draws, sorted:
# from sites that are nearly alike to an alignment of which one quarter does all the changing.

drawn = torch.as_tensor(np.sort(np.random.default_rng(0).exponential(size=40)))
before = Figure(figsize=(7, 3), layout="constrained")
axes = before.subplots()
axes.plot(drawn, GammaRates(shape=drawn).categories(drawn).rates, ".")
axes.set(xscale="log", yscale="log", ylim=(1e-5, 8), xlabel="shape", ylabel="rate of a site")
axes.set_title("four equally probable rates, of mean one")

# %%
# An exact twin
# -------------
# Three taxa and fifteen sites have one tree, of three branches. Under JC69, K80 and JC69+G4 probabilities of change
# have a closed form, and Gauss quadrature in three or four dimensions gives the evidence.

sequences = {"a": "ACGTACGTTACGGCA", "b": "ACGTACGTTACGACG", "c": "ACATACGTCACGACT"}
columns = np.array([["ACGT".index(base) for base in sequence] for sequence in sequences.values()])
lengths, length_weights = roots_laguerre(24)
lengths = lengths / 10  # exponential prior of rate 10


def log_evidence(kappas: np.ndarray, rates: np.ndarray, weights: np.ndarray) -> float:
    """Return the evidence; kappas (n,), rates of sites (n, categories) and weights (n,) of a parameter's nodes."""
    beta = 1 / (kappas + 2)[:, None, None]  # one expected change a unit of length
    t = rates[:, :, None] * lengths  # (n, categories, lengths)
    slow, fast = np.exp(-4 * beta * t), np.exp(-2 * (kappas[:, None, None] + 1) * beta * t)
    chances = [(1 + slow + 2 * fast) / 4, (1 + slow - 2 * fast) / 4, (1 - slow) / 4]  # same, transition, transversion
    kind = [[0 if i == j else 1 if (i + j) % 2 == 0 else 2 for j in range(4)] for i in range(4)]  # A, C, G, T
    product = 1.0
    for one, two, three in columns.T:
        sites = (np.einsum("nri,nrj,nrk->nijk", *(chances[kind[u][x]] for x in (one, two, three))) for u in range(4))
        product = product * sum(sites) / (4 * rates.shape[1])
    return math.log(np.einsum("nijk,n,i,j,k->", product, weights, *[length_weights] * 3))


nodes, weights = roots_hermitenorm(40)
shapes, shape_weights = roots_laguerre(40)
cuts = gammaincinv(shapes[:, None], np.arange(5) / 4)  # quarters; in units of the scale
category_rates = 4 * np.diff(gammainc(shapes[:, None] + 1, cuts))
one = np.ones(1)
exact = {
    "JC69": log_evidence(one, one[:, None], one),
    "K80": log_evidence(np.exp(1 + 1.25 * nodes), np.ones((40, 1)), weights / weights.sum()),
    "JC69+G4": log_evidence(np.ones(40), category_rates, shape_weights),
}
three = Alignment.from_sequences(sequences)
twin = average_substitution_models(three, Tree.from_newick("(a,b,c);"), list(exact), num_draws=20_000, progress=False)
for name, value in exact.items():
    found = twin.comparison[name]
    print(
        f"{name:8s} exactly {value:.5f}, by importance sampling {found.log_evidence:.5f} +- {found.standard_error:.5f}"
    )
    assert abs(found.log_evidence - value) < 4.5 * found.standard_error

# %%
# The fit
# -------
# One call weighs the models, by importance sampling from a proposal that is matched to the posterior of branch lengths
# and parameters, and averages over them. A model whose evidence is not to be trusted is named in ``.warnings``.

average = average_substitution_models(alignment, tree, names, **options)
print(average)
constant = average_substitution_models(alignment, tree, ["HKY85", "TN93"], **options)
assert not average.warnings and not constant.warnings
factor, error = average.comparison.log_bayes_factor("HKY85")
print(f"log Bayes factor of equal rates at all sites against the best model: {factor:.2f} +- {error:.2f}")
same = average.probability_of_equal("A-G", "C-T")
print(f"both transitions have the same exchangeability: probability {same.value:.3f} +- {same.standard_error:.3f}")
assert factor + 4.5 * error < 0 and 0 < same.value < 1

# %%
# A failure on purpose: a prior that is wide to be safe
# -----------------------------------------------------
# The evidence is a mean under the prior. TN93 has two ratios, of which the logarithms are normal with standard
# deviation 1.25 by default. With a hundred times that, the posterior of the ratios stays where it is, but the model
# pays several nats, since the prior density there is lower. Data that are worth fewer nats are overruled. There is no
# end to it: wherever the prior is flat, ten times the width costs :math:`\log 10` for each ratio.

ratio = torch.tensor(1.0, dtype=torch.float64)
widths = {"usual": 1.25, "wide": 125.0, "wider": 1250.0}
priors = {name: dist.LogNormal(ratio, width * ratio) for name, width in widths.items()}
pair = {name: TN93(prior, prior) for name, prior in priors.items()}
widened = average_substitution_models(alignment, tree, pair, site_rates=GammaRates(), **options)
loss, error = widened.comparison.log_bayes_factor("wide", "usual")
print(f"the wide prior costs {-loss:.2f} +- {error:.2f} nats")
assert loss + 4.5 * error < -5
loss, error = widened.comparison.log_bayes_factor("wider", "wide")
print(f"ten times wider costs {-loss:.3f} +- {error:.3f} more, exactly {2 * math.log(10):.3f}")
assert abs(loss + 2 * math.log(10)) < 4.5 * error + 0.005  # the rest by which the wide prior is not flat

# %%
# What it says
# ------------
# Rates differ between sites: that outweighs all else by hundreds of nats. Then transitions differ from transversions,
# and bases in frequency. Whether A-G and C-T have the same exchangeability is less clear, and the average keeps both
# answers. The general time-reversible model, a common default, is improbable: its further parameters buy nothing that
# the data show. A wrong choice has a size, too: with equal rates at all sites, changes that were overwritten are not
# seen, and the tree comes out shorter.

total = {"rates differ": average, "equal rates": constant}
for name, found in total.items():
    size, error = float(found.branch_lengths.sum()), float(found.branch_length_errors.norm())
    print(f"{name}: length of the tree {size:.3f} +- {error:.3f} substitutions a site")
short, long = (float(found.branch_lengths.sum()) for found in (constant, average))
figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
average.plot(left)
for name, found in total.items():
    right.errorbar(range(6), found.exchangeabilities, 2 * found.exchangeability_errors, fmt="o", label=name)
right.set_xticks(range(6), average.pairs)
right.set(ylabel="exchangeability, posterior mean", ylim=(0, None))
right.legend(frameon=False)
assert short < long

# %%
# Try it on yours
# ---------------
# Replace the alignment and the topology by those of your files. Without ``models``, all 203 reversible models of bases
# are weighed, in minutes. Look at ``.warnings`` first: a model named there needs more draws, or bridge sampling; then
# at the probabilities, and at the averages with their errors.
#
# .. code-block:: python
#
#    alignment = Alignment.from_file("sequences.nex")
#    tree = Tree.from_file("topology.nwk")
#    average = average_substitution_models(alignment, tree, ["HKY85+G4", "GTR+G4", "GTR+I+G4"], num_draws=10_000)
#    average.averages_to_pandas()
#
# Where to go next: :doc:`human_chimp_gorilla` shows a model that gives the wrong tree,
# :doc:`trees_from_an_alignment_alone` finds the topology as well.
