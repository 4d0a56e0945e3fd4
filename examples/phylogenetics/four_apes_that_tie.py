r"""
Unresolved phylogeny: three ape trees whose marginal likelihoods tie in one gene
================================================================================

**What you will learn:** how to see that data leave a question open, by the evidence of every answer with its error, and
that posterior probabilities near one third are then the right result and no failure of the method.

The data are three thousand sites of a nuclear gene, BRCA1, in human, chimpanzee, gorilla and orangutan, part of the
alignment of :cite:t:`murphy2001` that ships with the package cogent3. Beside them stand the same four apes in 898 sites
of mitochondrial DNA, which changes many times as fast :cite:p:`hayasaka1988`.
"""

# sphinx_gallery_thumbnail_number = -1
from collections import Counter
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.signal import convolve
from scipy.special import logsumexp

from bayeskit.gallery import is_small
from bayeskit.models.phylogenetics import HKY85, JC69, Alignment, all_topologies, empirical_frequencies, primates
from bayeskit.workflows.phylogenetics import compare_topologies

# %%
# The model
# ---------
# Four species have three unrooted trees :math:`\tau`, told apart by which two are neighbours. Each has five branches
# with lengths :math:`q`, along which every site evolves by a substitution model,
#
# .. math::
#
#    q_1, \dots, q_5 \sim \mathrm{Exponential}(10), \qquad
#    p(D \mid \tau) = \int \prod_{\text{sites } s} p(D_s \mid \tau, q) \, p(q) \, dq, \qquad
#    p(\tau \mid D) = \frac{p(D \mid \tau)}{\sum_{\tau'} p(D \mid \tau')}.
#
# A site speaks plainly for one of the trees only if two species share one base and the other two another: it needs one
# change on that tree and two on the others. In this gene there is no such site.

folder = find_spec("cogent3").submodule_search_locations[0]  # without importing the package, which takes seconds
gene = Alignment.from_file(Path(folder) / "_dataset" / "brca1.fasta")
gene = gene.select(["Human", "Chimpanzee", "Gorilla", "Orangutan"])
mitochondria = primates()[0].select(["Homo_sapiens", "Pan", "Gorilla", "Pongo"])
trees = ["human with chimpanzee", "human with gorilla", "human with orangutan"]


def informative_sites(alignment: Alignment) -> list[int]:
    """Count the sites of which two taxa have one base and two another, by the partner of the first taxon."""
    counts = [0, 0, 0]
    for column, number in zip(alignment.patterns.T.tolist(), alignment.weights.tolist(), strict=True):
        if sorted(Counter(column).values()) == [2, 2] and set(column) <= {1, 2, 4, 8}:  # nothing missing
            counts[column.index(column[0], 1) - 1] += int(number)
    return counts


for name, alignment in (("BRCA1", gene), ("mitochondria", mitochondria)):
    counts = informative_sites(alignment)
    print(f"{name:13s} {alignment.num_sites} sites; informative for {dict(zip(trees, counts, strict=True))}")
assert informative_sites(gene) == [0, 0, 0]

# %%
# Before the data
# ---------------
# How many informative sites does the prior expect in a gene of this length? Branches of 0.1 changes a site are a
# customary guess, made for species much farther apart than apes. Under it hardly any data set has as few informative
# sites as this gene: the tie is a property of the data, not something that the prior put in.

rng = np.random.default_rng(0)


def evolve(bases: np.ndarray, length: float) -> np.ndarray:
    """Let bases change along a branch by the model of Jukes and Cantor."""
    changed = rng.random(len(bases)) > np.exp(-4 / 3 * length)
    return np.where(changed, rng.integers(4, size=len(bases)), bases)


expected = []
for _ in range(100 if is_small() else 1000):
    lengths = rng.exponential(0.1, 5)
    left = rng.integers(4, size=gene.num_sites)
    right = evolve(left, lengths[4])
    a, b, c, d = (evolve(end, t) for end, t in zip((left, left, right, right), lengths, strict=False))
    pairings = ((a, b, c, d), (a, c, b, d), (a, d, b, c))
    expected.append(sum(int(((w == x) & (y == z) & (w != y)).sum()) for w, x, y, z in pairings))
prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(expected, bins=40)
axes.axvline(0, color="C1", linestyle="--", label="BRCA1")
axes.set(xlabel=f"informative sites among {gene.num_sites}", ylabel="data sets from the prior")
axes.legend(frameon=False)
print(f"from the prior: {np.mean(expected):.0f} informative sites on average")
print(f"{expected.count(0)} of {len(expected)} data sets have none")

# %%
# An exact twin
# -------------
# Under the model of Jukes and Cantor the probability of a site is a polynomial in :math:`x_e = e^{-4 q_e / 3}`, one
# variable a branch: a branch ends in the base that it began with with probability :math:`\tfrac14 + \tfrac34 x_e`, and
# in a given other one with :math:`\tfrac14 - \tfrac14 x_e`. Those of a few sites can be multiplied out, and every term
# integrates in closed form, :math:`E[x_e^k] = 10 / (10 + 4k/3)`. No sum over draws, and no pruning of a tree.
#
# Where at every site at most one species differs from the others, and each of the four does so equally often, the three
# trees are exactly equally probable, and importance sampling has to find that tie. With one informative site more they
# are not.


def polynomial(a: str, b: str, c: str, d: str) -> np.ndarray:
    """Return the coefficients of a site's probability on the tree ((a, b), (c, d)), a dimension for each branch."""
    change = np.array([[0.25, 0.75], [0.25, -0.25]])
    total = np.zeros([2] * 5)
    for left in "ACGT":
        for right in "ACGT":
            ends = ((left, a), (left, b), (right, c), (right, d), (left, right))
            total += 0.25 * reduce(np.multiply.outer, [change[int(start != end)] for start, end in ends])
    return total


def exact_log_evidence(columns: list[str], order: tuple[int, int, int, int]) -> float:
    sites = [polynomial(*(column[taxon] for taxon in order)) for column in columns]
    product = reduce(lambda one, other: convolve(one, other, method="fft"), sites)
    moments = 10 / (10 + 4 / 3 * np.arange(len(columns) + 1))
    return float(np.log(np.einsum("ijklm,i,j,k,l,m->", product, *[moments] * 5)))


def three_trees(taxa):
    """Return the trees in which the first species is the neighbour of the second, of the third and of the fourth."""
    found = all_topologies(taxa)
    partners = [taxa.index(found.to_newick(place).split(",")[1]) for place in range(3)]
    return found[np.argsort(partners)]


def exact_of_three(columns: list[str]) -> np.ndarray:
    return np.array([exact_log_evidence(columns, order) for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2))])


symmetric = ["AAAA"] * 11 + ["CAAA", "ACAA", "AACA", "AAAC"]
for columns in ([*symmetric, "AACC", "AACC"], [*symmetric, "AACC"], symmetric):
    exact = exact_of_three(columns)
    print(f"{len(columns)} sites: exact posterior probabilities {np.exp(exact - logsumexp(exact)).round(9)}")
    assert (np.ptp(exact) < 1e-9) == (columns is symmetric)

toy = Alignment.from_sequences({name: "".join(site[i] for site in columns) for i, name in enumerate("abcd")})
found = compare_topologies(toy, three_trees(toy.taxa), num_draws=10_000 if is_small() else 60_000, progress=False)
z = (found.log_evidence.numpy() - exact) / found.standard_error.numpy()
print(f"importance sampling: log evidence off by {z.round(2)} standard errors")
assert np.abs(z).max() < 4.5

# %%
# The fit
# -------
# All three trees are weighed in one batch, by importance sampling from gamma distributions matched to the posterior of
# the branch lengths. Neither another substitution model, in which transitions are four times as fast, nor a prior of
# branches ten times as short makes a difference. :cite:t:`kass1995` call a Bayes factor below :math:`e` "not worth more
# than a bare mention", and one above :math:`e^5` "very strong".

short = dist.Exponential(torch.tensor(100.0, dtype=torch.float64))
gene_model = HKY85(4.0, empirical_frequencies(gene))
mitochondrial_model = HKY85(10.0, empirical_frequencies(mitochondria))
settings = {
    "BRCA1, JC69": (gene, JC69(), None),
    "BRCA1, HKY85": (gene, gene_model, None),
    "BRCA1, HKY85, short": (gene, gene_model, short),
    "mitochondria, HKY85": (mitochondria, mitochondrial_model, None),
}
options = {"num_draws": 1500 if is_small() else 20_000, "seed": 2, "progress": False}
results = {}
print(f"log Bayes factors of {trees[1]}, and of {trees[2]}, against {trees[0]}")
for name, (alignment, substitution, prior) in settings.items():
    found = results[name] = compare_topologies(
        alignment, three_trees(alignment.taxa), substitution=substitution, branch_length_prior=prior, **options
    )
    factors = (found.log_evidence[1:] - found.log_evidence[0]).tolist()
    errors = torch.hypot(found.standard_error[1:], found.standard_error[0]).tolist()
    print(f"{name:20s}" + "".join(f"{f:11.3f} +- {e:.3f}" for f, e in zip(factors, errors, strict=True)))
    assert all(estimate.trusted for estimate in found.comparison.results.values())
    for factor, error in zip(factors, errors, strict=True):
        assert abs(factor) + 4.5 * error < 1 if alignment is gene else factor + 4.5 * error < -5

# %%
# What it says
# ------------
# BRCA1 alone does not say who is our closest relative, and its posterior probabilities say that it does not. Where the
# Monte Carlo errors cannot tell the two best trees apart, the comparison remarks by itself that this is a tie: more
# draws make those errors smaller, not the doubt. That needs other data, such as those of mitochondria.

print(*results["BRCA1, HKY85"].warnings, sep="\n")
figure = Figure(figsize=(7, 3.4), layout="constrained")
axes = figure.subplots()
for place, (name, hatch) in enumerate({"BRCA1, HKY85": "", "mitochondria, HKY85": "//"}.items()):
    values, errors = results[name].posterior_probabilities.numpy(), results[name].posterior_errors.numpy()
    bars = axes.bar(np.arange(3) + 0.38 * (place - 0.5), values, 0.36, yerr=errors, label=name, hatch=hatch)
    axes.bar_label(bars, fmt="%.4f", padding=2, fontsize="small")
    for tree, value, error in zip(trees, values, errors, strict=True):
        print(f"{name:20s} {tree:22s} {value:.6f} +- {error:.6f}")
axes.axhline(1 / 3, color="C5", linestyle="--", linewidth=1, label="no information")
axes.set_xticks(range(3), [tree.replace(" with ", "\nwith ") for tree in trees])
axes.set(ylabel="posterior probability", ylim=(0, 1.12))
axes.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# Who reports only the best tree reports a throw of a die. For the sites of the twin the three trees are exactly equally
# probable; with twelve seeds the best tree is now one and now another.

winners = Counter()
for seed in range(12):
    tied = compare_topologies(toy, three_trees(toy.taxa), num_draws=200, seed=seed, progress=False)
    winners[int(tied.log_evidence.argmax())] += 1
print(f"best tree of twelve runs, of which none is right: {[winners[tree] for tree in range(3)]} times")
assert len(winners) > 1

# %%
# Try it on yours
# ---------------
# Replace the alignment, and list the trees that are in question: all of four or five taxa, or your own candidates.
#
# .. code-block:: python
#
#    found = compare_topologies(gene, all_topologies(gene.taxa), substitution=gene_model, num_draws=1500)
#    print(found.posterior_probabilities, found.posterior_errors, found.warnings)
#
# ``Alignment.from_file`` reads a file. Look at ``warnings``: a tie is named there. If more draws do not separate the
# best trees, the data do not; take other genes. With more than about seven taxa search the trees instead of listing
# them.
#
# Where to go next: :doc:`human_chimp_gorilla` asks the mitochondria of five apes, and shows what a poor substitution
# model does to the answer; :doc:`variational_phylogenetics_of_mammals` takes BRCA1 where it does have something to say.
