r"""
Marginal likelihood of a phylogenetic tree: nineteen estimators on primate DNA
==============================================================================

**What you will learn:** how an alignment and a tree become a Pyro model, which of the nineteen ways to the marginal
likelihood of a tree topology that Fourment and others compared get it right, and what each of them costs.

:cite:t:`fourment2020` set nineteen methods side by side; all of them are here under the same names. The data are
mitochondrial DNA of twelve primates :cite:p:`hayasaka1988`, on one topology.
"""

# sphinx_gallery_thumbnail_number = 2
import textwrap
import warnings

import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import BayeskitWarning
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import JC69, Alignment, Tree, TreeModel, primates

# %%
# The model
# ---------
# The 21 branches of the unrooted tree have independent lengths :math:`t_e`, in expected substitutions per site; sites
# evolve independently, and bases change by the model of Jukes and Cantor:
#
# .. math::
#    t_e \sim \mathrm{Exponential}(10), \qquad
#    P(\text{another base at the end of branch } e) = \tfrac34 \left(1 - e^{-4 t_e / 3}\right).
#
# Felsenstein's pruning algorithm sums over the bases at the inner nodes. With your own files, replace ``primates()`` by
# ``Alignment.from_file`` and ``Tree.from_file``.

alignment, tree = primates()
model = TreeModel(alignment, tree, substitution=JC69())
target = bk.Target.from_pyro(model, compile=False if is_small() else "auto")
print(alignment)
print(target)

# %%
# Before the data
# ---------------
# Alignments from the model: lengths from the prior, bases down the tree. At how many sites do all twelve taxa agree?
# Few, says the prior, whose branches are long for primates; the data have more than nearly all alignments that it
# imagines.


def share_of_constant_sites(generator):
    lengths = torch.empty(tree.num_edges).exponential_(10.0, generator=generator)
    bases = torch.randint(4, (tree.root + 1, alignment.num_sites), generator=generator)
    for node in reversed(range(tree.root)):  # parents have larger numbers
        changed = torch.rand(alignment.num_sites, generator=generator) < 0.75 * -torch.expm1(-4 / 3 * lengths[node])
        step = torch.randint(1, 4, changed.shape, generator=generator)
        bases[node] = (bases[tree.parents[node]] + changed * step) % 4
    tips = bases[: tree.num_taxa]
    return float((tips == tips[0]).all(0).double().mean())


generator = torch.Generator().manual_seed(0)
imagined = [share_of_constant_sites(generator) for _ in range(300)]
common = alignment.patterns[0].clone()
for taxon in alignment.patterns:
    common &= taxon  # sets of bases as bits; a gap is all four
observed = float(alignment.weights[common > 0].sum()) / alignment.num_sites
prior_predictive = Figure(figsize=(7, 2.8), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(imagined, bins=30, color="C5", label="from the prior")
axes.axvline(observed, color="C0", linestyle="--", label="primates")
axes.set(xlabel="share of sites at which all taxa agree", ylabel="alignments")
axes.legend()

# %%
# An exact twin
# -------------
# Three taxa have a star for a tree, whose likelihood is a formula in five numbers: how often which of them agree. The
# pruning algorithm has to give the same, and methods have to find what quadrature makes of it in three dimensions.

case = exact.get("three_taxon_tree")
star = TreeModel(Alignment.from_sequences(exact.three_taxon_sequences()), Tree.from_newick("(taxon1,taxon2,taxon3);"))
lengths = torch.tensor([0.02, 0.3, 1.5], dtype=torch.float64)
by_pruning, by_formula = star.log_likelihood(lengths), exact.pattern_log_probabilities(lengths) @ case.args[0]
print(f"log likelihood by pruning {float(by_pruning):.9f}, by the formula {float(by_formula):.9f}")
assert abs(by_pruning - by_formula) < 1e-9

quick = ["gamma_laplus_importance_sampling", "bridge_sampling"]
few = evidence.Budget(num_chains=8, num_warmup=100, num_samples=100)
twin = evidence.compare(bk.Target.from_pyro(star, compile=False), quick, budget=few, progress=False)
for z in twin:
    print(f"{z}, by quadrature {case.log_evidence:.4f}")
    assert z.trusted and abs(z.log_evidence - case.log_evidence) < 4.5 * z.standard_error

# %%
# The fit
# -------
# All nineteen. Six work on one run of posterior draws, three on one tempered ladder, six on a mode, two on a
# variational fit, and two run by themselves.

NINETEEN = (
    "evidence_lower_bound gamma_laplus_importance_sampling variational_importance_sampling beta_prime_laplus "
    "gamma_laplus lognormal_laplus maximum_posterior maximum_likelihood naive_monte_carlo bridge_sampling "
    "conditional_predictive_ordinates harmonic_mean stabilised_harmonic_mean nested_sampling "
    "pointwise_predictive_density path_sampling modified_path_sampling stepping_stone generalised_stepping_stone"
).split()
SLOW = ("nested_sampling", "path_sampling", "modified_path_sampling", "stepping_stone", "generalised_stepping_stone")
budget = (
    evidence.Budget(num_chains=8, num_warmup=80, num_samples=60)
    if is_small()
    else evidence.Budget(num_warmup=300, num_samples=250, ladder_samples=250, num_live=128)
)
methods = [name for name in NINETEEN if not (is_small() and name in SLOW)]
with warnings.catch_warnings():
    warnings.simplefilter("ignore", BayeskitWarning)  # what methods say against themselves is in the table
    ways = evidence.compare(target, methods, seed=0, budget=budget, progress=False)

REFERENCE, ITS_ERROR = -6468.912, 0.004  # importance sampling with 40,000 draws
table = ways.to_pandas().dropna(subset="log_evidence")
table["off by"] = table["log_evidence"] - REFERENCE
columns = ["method", "log_evidence", "standard_error", "off by", "trusted", "seconds"]
print(table[columns].to_string(index=False, float_format="%.3f"))

# %%
# Seconds include the draws that a method needs, as if it had been alone. Whoever trusts itself is right:

facts = ways["bridge_sampling"].diagnostics
print(f"largest R-hat {facts['r_hat']:.3f}, smallest effective sample size {facts['effective_draws']:.0f}")
assert facts["r_hat"] < 1.05 and facts["effective_draws"] > 100
for z in ways:
    assert not z.trusted or abs(z.log_evidence - REFERENCE) < 4.5 * (z.standard_error**2 + ITS_ERROR**2) ** 0.5, str(z)

# %%
# The others say why not:

for method, reason in ways.verdict.untrusted.items():
    print(textwrap.shorten(f"{method}: {reason}", 110, placeholder=" ..."))

# %%
# A failure on purpose
# --------------------
# The harmonic means rest on the draws of the bridge, and most of their terms are alike, so that their own error bars
# are small beside what they are off by. Software reported them for many years.

for method in ("harmonic_mean", "stabilised_harmonic_mean"):
    z = ways[method]
    print(f"{method}: {z.log_evidence - REFERENCE:+.1f} nats off; it says +- {z.standard_error:.1f}")
    assert not z.trusted and z.log_evidence - REFERENCE > 5

# %%
# What it says
# ------------
# Accuracy has little to do with cost, as the paper says, too. Importance sampling about a mode or from a variational
# fit takes seconds and is as good as what rests on long runs; the harmonic means rest on the same draws as bridge
# sampling and are off by tens of nats.

verdict = ways.verdict
print(f"log evidence {verdict.log_evidence:.3f} +- {verdict.standard_error:.3f}, reference {REFERENCE} +- {ITS_ERROR}")
print(verdict)
for score in ways.scores.values():
    print(f"{score} (how well sites are foretold; no evidence)")
assert verdict.is_agreed

cost = Figure(figsize=(7.5, 3.4), layout="constrained")
axes = cost.subplots()
for row, marker in zip(table[table["trusted"]].itertuples(), "osD^v<>P*X", strict=False):
    name = row.method.replace("_", " ")  # hollow, for some lie upon each other
    axes.loglog(row.seconds, row.standard_error, marker, ms=10, mew=1.8, markerfacecolor="none", label=name)
axes.set(xlabel="seconds", ylabel="standard error (nats)", title="what the methods that trust themselves cost")
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)

# %%
# The intervals hold 95 %; the blue ones are those of methods that trust themselves.

figure = Figure(figsize=(8, 8), layout="constrained")
ways.plot(reference=REFERENCE, ax=figure.subplots())

# %%
# Try it on yours
# ---------------
# Read your own alignment and tree; ``TreeModel`` also takes other models of substitution and priors of the lengths.
#
# .. code-block:: python
#
#    model = TreeModel(alignment, tree, substitution=JC69())  # Alignment.from_file(...), Tree.from_file(...)
#    target = bk.Target.from_pyro(model)
#    z = evidence.gamma_laplus_importance_sampling(target)
#    print(z, z.trusted)
#
# Look at ``z.trusted``. Where importance sampling about the mode is not trusted, because a branch is nearly zero or the
# model has many parameters, take bridge sampling from draws, and check it by a stepping stone ladder.
#
# Where to go next: :doc:`/gallery/phylogenetics/human_chimp_gorilla` compares topologies by their evidence,
# :doc:`/gallery/phylogenetics/four_apes_that_tie` all trees of a few taxa, :doc:`eight_schools_by_every_estimator`
# repeats the exercise where the answer is exact.
