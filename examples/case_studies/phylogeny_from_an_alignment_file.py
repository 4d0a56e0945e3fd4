r"""
A phylogeny from an alignment file to a figure: model choice, tree search, clade probabilities
==============================================================================================

**What you will learn:** how to get from a FASTA or NEXUS file to a tree that can be published: checks of the
alignment, a substitution model chosen by its evidence, a search of the posterior of trees with a verdict on its
convergence, and probabilities of clades with their Monte Carlo errors.

The file has 898 sites of mitochondrial DNA of twelve primates :cite:p:`hayasaka1988`.
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
    asdsf,
    check_for_search,
    empirical_frequencies,
    jukes_cantor_distances,
    majority_rule_consensus,
    neighbour_joining,
    parse_substitution,
)
from bayeskit.models.phylogenetics.workflows import average_substitution_models, infer_topologies, write_topology_report
from bayeskit.report import write_page

FILE = data_file("primates.nex")  # or the path of a file of yours: FASTA, NEXUS or PHYLIP
OUTGROUP = "Lemur_catta"
MODELS = ["JC69", "HKY85", "GTR", "HKY85+G4", "GTR+G4"]
FOLDER = Path(tempfile.mkdtemp())

# %%
# The model
# ---------
# A tree :math:`\tau` with branch lengths :math:`q` and a substitution model :math:`M` with parameters :math:`\phi`: all
# trees without a root are equally probable before the data, branch lengths are exponential with mean 0.1,
#
# .. math:: p(\tau, q, \phi \mid D, M) \propto p(D \mid \tau, q, \phi, M)\, p(q)\, p(\phi \mid M).
#
# First, what is in the file? Missing data, identical sequences and sites that do not vary all call for a look.

alignment = Alignment.from_file(FILE)
if is_small():
    alignment = alignment.select([OUTGROUP, "Saimiri_sciureus", "M_mulatta", "Hylobates", "Homo_sapiens", "Pan"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", DataWarning)
    check_for_search(alignment)
remarks = [str(one.message) for one in caught] or ["No taxon or site is without data, and no sequences are identical."]
share = float(alignment.weights[(alignment.patterns == alignment.patterns[0]).all(0)].sum()) / alignment.num_sites
frequencies = ", ".join(f"{base} {p:.2f}" for base, p in zip("ACGT", empirical_frequencies(alignment), strict=True))
remarks += [f"{alignment.num_taxa} taxa, {alignment.num_sites} sites, {share:.0%} of them constant; {frequencies}."]
print("\n".join(remarks))

# %%
# Before the data
# ---------------
# The prior of the tree length, a sum of independent exponential lengths, beside that of the tree which neighbour
# joining :cite:p:`saitou1987` makes of pairwise distances. A length far out in the tail would ask for another prior.

start = neighbour_joining(jukes_cantor_distances(alignment), alignment.taxa)
branches, length = 2 * alignment.num_taxa - 3, float(start.branch_lengths.sum())
prior_predictive = Figure(figsize=(7, 2.8), layout="constrained")
axes, grid = prior_predictive.subplots(), np.linspace(0, branches / 5, 300)
axes.plot(grid, gamma(branches, scale=0.1).pdf(grid), color="C0", label="prior")
axes.axvline(length, color="black", linestyle="--", label="neighbour joining")
axes.set(xlabel="tree length (changes a site)", ylabel="density")
axes.legend(frameon=False)
print(f"tree length {length:.2f}; the prior holds {gamma(branches, scale=0.1).sf(length):.3f} of its mass above")

# %%
# An exact twin
# -------------
# Three taxa have one tree and three branches. Gauss-Laguerre quadrature over the branches, with the probabilities of
# Kimura's model written out and a plain sum over the base at the inner node, gives the evidence of two models, and so
# the posterior probability of each. The library has to agree within its Monte Carlo errors.

columns = np.array([*[[b] * 3 for b in range(4)] * 3, [0, 0, 2], [1, 3, 1], [2, 0, 2], [1, 1, 3], [0, 1, 0]])
nodes, mass = roots_laguerre(30)


def exact_evidence(kappa: float) -> float:
    """Return the log evidence where transitions are kappa times as fast as each of the two transversions."""
    rate = nodes[:, None, None] / 10 / (kappa + 2)  # the prior of lengths has rate 10
    kind = np.array([[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]])  # transversions 1, transitions 2
    slow, fast = np.exp(-4 * rate), np.exp(-2 * (kappa + 1) * rate)
    change = 0.25 * np.where(kind == 1, 1 - slow, np.where(kind == 2, 1 + slow - 2 * fast, 1 + slow + 2 * fast))
    sites = [np.einsum("iu,ju,ku->ijk", *(change[:, :, base] for base in column)) / 4 for column in columns]
    return math.log(np.einsum("ijk,i,j,k->", np.prod(sites, 0), mass, mass, mass))


toy = Alignment.from_sequences({name: "".join("ACGT"[b] for b in columns[:, i]) for i, name in enumerate("abc")})
pair = {"JC69": JC69(), "K80": K80(5.0)}
twin = average_substitution_models(toy, Tree.from_newick("(a,b,c);"), pair, num_draws=3000, seed=0, progress=False)
for name, kappa in (("JC69", 1.0), ("K80", 5.0)):
    found = twin.comparison.results[name]
    print(f"{name}: exactly {exact_evidence(kappa):.5f}, {found.log_evidence:.5f} +- {found.standard_error:.5f}")
    assert abs(found.log_evidence - exact_evidence(kappa)) < 4.5 * found.standard_error

# %%
# The fit
# -------
# Models are weighed on the tree of neighbour joining, with branch lengths and parameters integrated out; the best one
# is used for the search. Four runs start at different trees. They have converged if they agree on the splits.

chosen = average_substitution_models(
    alignment, start, MODELS, num_draws=3000 if is_small() else 10_000, seed=1, progress=False
)
print(chosen, *chosen.warnings, sep="\n")
assert chosen.comparison.results[chosen.comparison.best].trusted
substitution, site_rates = parse_substitution(chosen.comparison.best, alignment)
lengths = {"num_warmup": 30, "num_samples": 50} if is_small() else {"num_warmup": 300, "num_samples": 1200}
options = lengths | {"num_runs": 4, "gradient_moves": False, "progress": False}
search = infer_topologies(alignment, substitution=substitution, site_rates=site_rates, seed=2, **options)
print(search)
assert search.asdsf < 0.05

# %%
# One number can be had in two ways: the evidence over all trees is that of one tree, over the number of trees and its
# posterior probability. The search never saw the importance sampling that weighed the models.

newick = Topologies.from_trees([start], alignment.taxa).to_newick(0)
shares = [sum(w for i, w in enumerate(run.weights) if run.topologies.to_newick(i) == newick) for run in search.samples]
share, error = float(np.mean(shares)), float(np.std(shares, ddof=1)) / 2
one = chosen.comparison.results[chosen.comparison.best]
if share > 0.1:
    expected = one.log_evidence - math.log(math.prod(range(1, branches - 1, 2))) - math.log(share)
    error = math.hypot(one.standard_error, search.evidence.standard_error, error / share)
    print(f"log evidence {search.evidence.log_evidence:.2f} by the search, {expected:.2f} by one tree, +- {error:.2f}")
    assert abs(search.evidence.log_evidence - expected) < 4.5 * error

# %%
# A failure on purpose
# --------------------
# A file that cannot be read as an alignment is refused, with the line and a remedy.

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
table = (
    runs.mean(axis=1)
    .to_frame("probability")
    .assign(error=np.maximum(runs.std(axis=1) / 2, 1 / search.sample.num_samples))
)
for split, row in table.head(10).iterrows():
    print(f"{row['probability']:.3f} +- {row['error']:.3f}  {split}")
figure = Figure(figsize=(7, 0.8 + 0.3 * alignment.num_taxa), layout="constrained")
majority_rule_consensus(search.sample).rooted_at(OUTGROUP).plot(figure.subplots())

# %%
# The page
# --------
# What one would send: the tree, the clades, the models, and the checks; and beside it the report of the search.

sections = {
    "Tree": [str(search), (figure, f"Majority-rule consensus, rooted at {OUTGROUP}, with posterior probabilities.")],
    "Splits": table.map("{:.4f}".format),
    "Models": chosen.to_pandas()[["model", "log_evidence", "standard_error", "posterior_probability"]].astype(str),
    "Alignment": [Path(FILE).name, *remarks],
}
write_page(FOLDER / "phylogeny.html", title="Phylogeny", sections=sections)
write_topology_report(FOLDER / "search.html", search, title="Search of trees")
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
# Where to go next: :doc:`/gallery/phylogenetics/trees_from_an_alignment_alone` checks the evidence in three ways,
# :doc:`/gallery/phylogenetics/human_chimp_gorilla` has a model that leads astray,
# :doc:`/gallery/phylogenetics/a_clock_for_primates` a root without an outgroup.
