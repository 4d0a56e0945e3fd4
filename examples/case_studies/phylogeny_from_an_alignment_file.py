r"""
A phylogeny from an alignment file to a figure: model choice, tree search, clade probabilities
==============================================================================================

**What you will learn:** how to get from a FASTA or NEXUS file to a tree that can be published: checks of the
alignment, a substitution model chosen by its evidence, a search of the posterior of trees with a verdict on its
convergence, estimates of the evidence that check each other, and probabilities of clades with their Monte Carlo errors.

The file has 898 sites of mitochondrial DNA of twelve primates :cite:p:`hayasaka1988`. On the command line,
``bayeskit trees --alignment mine.fasta`` searches and writes a report.
"""

# sphinx_gallery_thumbnail_number = -1
import math
import tempfile
import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.special import roots_laguerre
from scipy.stats import gamma

from bayeskit.errors import AlignmentError, DataWarning
from bayeskit.gallery import data_file, is_small
from bayeskit.models.phylogenetics import (
    JC69,
    K80,
    Alignment,
    Topologies,
    Tree,
    all_topologies,
    asdsf,
    check_for_search,
    jukes_cantor_distances,
    majority_rule_consensus,
    neighbour_joining,
    parse_substitution,
)
from bayeskit.models.phylogenetics.workflows import average_substitution_models, infer_topologies, topology_evidence
from bayeskit.report import write_page

FILE = data_file("primates.nex")  # or the path of a file of yours: FASTA, NEXUS or PHYLIP
OUTGROUP = "Lemur_catta"
MODELS = ["JC69", "HKY85", "GTR", "HKY85+G4", "GTR+G4"]
FOLDER = Path(tempfile.mkdtemp())

# %%
# The model
# ---------
# A tree :math:`\tau` with branch lengths :math:`q` and a substitution model :math:`M` with parameters :math:`\phi`: all
# :math:`(2n-5)!!` trees of :math:`n` taxa without a root are equally probable before the data, branch lengths are
# exponential with mean 0.1,
#
# .. math:: p(\tau, q, \phi \mid D, M) \propto p(D \mid \tau, q, \phi, M)\, p(q)\, p(\phi \mid M), \qquad
#           p(D \mid M) = \frac{1}{(2n-5)!!} \sum_\tau p(D \mid \tau, M).
#
# First, what is in the file? Missing data, identical sequences and sites that do not vary all call for a look.

alignment = Alignment.from_file(FILE)
if is_small():
    alignment = alignment.select([OUTGROUP, "Saimiri_sciureus", "M_mulatta", "Hylobates", "Homo_sapiens", "Pan"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", DataWarning)
    check_for_search(alignment)
remarks = [str(one.message) for one in caught] or ["No taxon or site is without data, and no sequences are identical."]
print(alignment, *remarks, sep="\n")

# %%
# Before the data
# ---------------
# That two given species are neighbours is true of one tree in :math:`2n-5`: with the two as one, there is one taxon
# fewer. For five taxa all trees can be counted. The prior of the tree length is that of a sum of exponential variables;
# the tree which neighbour joining :cite:p:`saitou1987` makes of pairwise distances should not be far out in its tail.

five = [tree.to_newick(0) for tree in all_topologies("ABCDE")]
neighbours = sum("(A,B)" in newick or "(A,B,(" in newick for newick in five)
print(f"{neighbours} of {len(five)} trees have A beside B, a share of 1 / {2 * 5 - 5}")
assert neighbours * (2 * 5 - 5) == len(five)
start = neighbour_joining(jukes_cantor_distances(alignment), alignment.taxa)
branches, length = 2 * alignment.num_taxa - 3, float(start.branch_lengths.sum())
num_trees = math.prod(range(1, branches - 1, 2))
print(f"{num_trees:,} trees; length {length:.2f}, the prior has {gamma(branches, scale=0.1).sf(length):.3f} above it")

# %%
# An exact twin
# -------------
# Four taxa have three trees and five branches. Gauss-Laguerre quadrature over the branches, with the probabilities of
# Kimura's model written out and plain sums over the bases at the two inner nodes, gives the evidence of each tree under
# two models. Importance sampling has to agree for one tree, and the search for the mean over all trees.

columns = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [3, 3, 3, 3], [0, 0, 2, 2], [1, 3, 1, 1], [0, 0, 2, 1], [2, 1, 2, 1]])
nodes, mass = roots_laguerre(14)
kind = np.array([[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]])  # transversions 1, transitions 2


def exact_evidence(newick: str, kappa: float) -> float:
    """Return the log evidence where transitions are kappa times as fast as each of the two transversions."""
    rate = nodes[:, None, None] / 10 / (kappa + 2)  # the prior of lengths has rate 10
    slow, fast = np.exp(-4 * rate), np.exp(-2 * (kappa + 1) * rate)
    change = 0.25 * np.where(kind == 1, 1 - slow, np.where(kind == 2, 1 + slow - 2 * fast, 1 + slow + 2 * fast))
    product, order = 1.0, ["abcd".index(x) for x in newick if x in "abcd"]  # the first two and last two are neighbours
    for column in columns:
        tips = (change[:, :, column[taxon]] for taxon in order)
        product = product * np.einsum("iu,ju,lv,mv,kuv->ijklm", *tips, change, optimize=True) / 4
    return math.log(np.einsum("ijklm,i,j,k,l,m->", product, *[mass] * 5, optimize=True))


toy = Alignment.from_sequences({name: "".join("ACGT"[b] for b in columns[:, i]) for i, name in enumerate("abcd")})
newicks, pair = [tree.to_newick(0) for tree in all_topologies("abcd")], {"JC69": JC69(), "K80": K80(5.0)}
twin = average_substitution_models(toy, Tree.from_newick(newicks[0]), pair, num_draws=3000, seed=0, progress=False)
for name, kappa in (("JC69", 1.0), ("K80", 5.0)):
    found, exact = twin.comparison.results[name], exact_evidence(newicks[0], kappa)
    print(f"{name}: exactly {exact:.5f}, {found.log_evidence:.5f} +- {found.standard_error:.5f}")
    assert abs(found.log_evidence - exact) < 4.5 * found.standard_error
exact = math.log(sum(math.exp(exact_evidence(newick, 1.0)) for newick in newicks) / 3)
searched = infer_topologies(toy, num_warmup=300, num_samples=500 if is_small() else 10_000, progress=False)
print(f"over all trees exactly {exact:.4f}; {searched.evidence}")
assert abs(searched.evidence.log_evidence - exact) < 4.5 * searched.evidence.standard_error

# %%
# The fit
# -------
# Models are weighed on the tree of neighbour joining, with branch lengths and parameters integrated out; the best one
# is used for the search. Four runs start at different trees. Each has a ladder of temperatures :cite:p:`altekar2004`,
# of which the hottest draws from a distribution over trees that the warm-up learns :cite:p:`larget2013,holder2014`. The
# runs have converged if they agree on the splits: their average standard deviation (ASDSF) should be below 0.01.

chosen = average_substitution_models(
    alignment, start, MODELS, num_draws=3000 if is_small() else 10_000, seed=1, progress=False
)
print(chosen, *chosen.warnings, sep="\n")
assert chosen.comparison.results[chosen.comparison.best].trusted
substitution, site_rates = parse_substitution(chosen.comparison.best, alignment)
lengths = {"num_warmup": 100, "num_samples": 400} if is_small() else {"num_warmup": 300, "num_samples": 1200}
options = lengths | {"num_runs": 4, "gradient_moves": False, "progress": False}
search = infer_topologies(alignment, substitution=substitution, site_rates=site_rates, seed=2, **options)
print(search)
assert search.asdsf < 0.05

# %%
# Ratios of neighbouring temperatures multiply to the evidence over all trees. A sum over the trees that were found and
# a variational approximation are other ways to it, and it is that of one tree, over the number of trees and the tree's
# posterior probability. They share no draws, so that an error of one of them would show.

ways = topology_evidence(search, num_steps=200 if is_small() else 5000, progress=False)
print(ways)
assert ways.verdict.is_agreed
newick = Topologies.from_trees([start], alignment.taxa).to_newick(0)
shares = [sum(w for i, w in enumerate(run.weights) if run.topologies.to_newick(i) == newick) for run in search.samples]
share, error = float(np.mean(shares)), float(np.std(shares, ddof=1)) / 2
one = chosen.comparison.results[chosen.comparison.best]
if share > 0.1:
    expected = one.log_evidence - math.log(num_trees) - math.log(share)
    error = math.hypot(one.standard_error, search.evidence.standard_error, error / share)
    print(f"log evidence {search.evidence.log_evidence:.2f} by the search, {expected:.2f} by one tree, +- {error:.2f}")
    assert abs(search.evidence.log_evidence - expected) < 4.5 * error

# %%
# A failure on purpose
# --------------------
# Twenty draws: the runs may even agree on the splits, but no state has travelled along the ladder, and the result says
# so. A file that cannot be read as an alignment is refused, with the line and a remedy.

hasty = infer_topologies(alignment, num_warmup=20, num_samples=20, progress=False)
assert not hasty.evidence.trusted, hasty

bad = FOLDER / "bad.fasta"
bad.write_text(">one\nACGT\n>two\nACG\n>three\nACGA\n>four\nACGA\n")
try:
    Alignment.from_file(bad)
except AlignmentError as refusal:
    print(str(refusal).splitlines()[0])
else:
    raise AssertionError("a sequence that is too short was read")

# %%
# What it says
# ------------
# The consensus, rooted at the outgroup, has the splits of more than half of the trees; errors of their probabilities
# are those of the mean of four runs. A probability is as good as the model of substitution.

splits = asdsf(search.samples, 0.0).to_pandas().set_index("split")
runs = splits[[f"sample_{run}" for run in range(4)]]
table = runs.mean(axis=1).to_frame("probability")
table["error"] = np.maximum(runs.std(axis=1) / 2, 1 / search.sample.num_samples)
for split, row in table.head(10).iterrows():
    print(f"{row['probability']:.3f} +- {row['error']:.3f}  {split}")
figure = Figure(figsize=(7, 0.8 + 0.3 * alignment.num_taxa), layout="constrained")
majority_rule_consensus(search.sample).rooted_at(OUTGROUP).plot(figure.subplots())

# %%
# The page
# --------
# What one would send: the tree, the clades, the models, and the checks. ``write_topology_report`` adds a page
# about the search.

sections = {
    "Tree": [str(search), (figure, f"Majority-rule consensus, rooted at {OUTGROUP}, with posterior probabilities.")],
    "Splits": table.map("{:.4f}".format),
    "Models": chosen.to_pandas()[["model", "log_evidence", "standard_error", "posterior_probability"]].astype(str),
    "Alignment": [Path(FILE).name, *remarks],
}
write_page(FOLDER / "phylogeny.html", title="Phylogeny", sections=sections)
print(f"the page is {FOLDER / 'phylogeny.html'}")

# %%
# Try it on yours
# ---------------
# Give your file and an outgroup, and look at ``search.problems`` before the tree: if runs disagree, take longer ones.
#
# .. code-block:: python
#
#    FILE, OUTGROUP, FOLDER = "mine.fasta", "name_of_a_taxon", Path(".")
#    lengths = {"num_warmup": 1000, "num_samples": 10_000}
#
# Where to go next: :doc:`/gallery/phylogenetics/human_chimp_gorilla` has a model that leads astray,
# :doc:`/gallery/phylogenetics/a_clock_for_primates` a root without an outgroup,
# :doc:`/gallery/phylogenetics/subsplit_networks_on_ds1` gives a probability to trees that no run has seen.
