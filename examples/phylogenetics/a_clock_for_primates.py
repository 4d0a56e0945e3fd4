r"""
Molecular clock dating of primates: strict, relaxed and no clock by their evidence
==================================================================================

**What you will learn:** how to date the nodes of a tree whose root has a known age, and how the evidence tells a strict
clock, a relaxed clock and no clock at all apart.

A molecular clock turns differences between sequences into time: if every lineage changes at the same rate, the number
of changes along a branch is proportional to its duration. The data are 898 sites of mitochondrial DNA of twelve
primates :cite:p:`hayasaka1988`.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import (
    StrictClock,
    TimeTreeModel,
    Topologies,
    TreeModel,
    UncorrelatedLogNormalClock,
    YuleTree,
    plot_time_tree,
    primates,
)
from bayeskit.workflows import compare_models

# %%
# The model
# ---------
# The height :math:`h_v` of a node is its age. A species splits in two at rate :math:`\lambda` (Yule's process), the
# root is about 65 million years old, and a branch from :math:`v` up to its parent has length
# :math:`r_v (h_{\mathrm{parent}(v)} - h_v)`, where
#
# .. math::
#
#    r_v = r \;\text{ (strict clock)}, \qquad
#    r_v = r \, e^{\sigma z_v - \sigma^2 / 2}, \; z_v \sim \mathrm{Normal}(0, 1) \;\text{ (relaxed clock)}.
#
# Without a clock, each branch of the unrooted tree has its own length, exponential with mean 0.1. The topology is
# fixed, and all heights are sampled at once, in ratios of a height to that of the parent
# :cite:p:`ji2023`. The root lies between the lemur and all others.

alignment, tree = primates()
rooted = Topologies.from_trees([tree]).rooted_at("Lemur_catta")
age = dist.LogNormal(torch.tensor(math.log(65.0)), torch.tensor(0.1))
birth = dist.LogNormal(torch.tensor(math.log(0.05)), torch.tensor(1.0))
prior = YuleTree(birth, root_height=age)
models = {
    "no clock": TreeModel(alignment, tree),
    "strict clock": TimeTreeModel(alignment, rooted, tree_prior=prior),
    "relaxed clock": TimeTreeModel(alignment, rooted, tree_prior=prior, clock=UncorrelatedLogNormalClock()),
}
for name, model in models.items():
    print(f"{name}: {model}")

# %%
# Before the data
# ---------------
# What does the prior say of the split of human and chimpanzee? Draws of all heights come from the process given the
# tree.

strict = bk.Target.from_pyro(models["strict clock"])
split = models["strict clock"].dated.common_ancestor(["Homo_sapiens", "Pan"])
heights = strict.constrain(strict.sample_prior(1000, seed=0))["node_heights"]
low, middle, high = heights[:, split].quantile(torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)).tolist()
print(f"prior: human and chimpanzee split {middle:.0f} million years ago, 95 % between {low:.1f} and {high:.0f}")
assert bool((heights[:, -1] >= heights[:, split]).all())

# %%
# An exact twin
# -------------
# Three tips have two heights, and their evidence is an integral in the plane. Heights are in substitutions per site
# here (the rate is one), and the rate of speciation is fixed. With three tips the root's height and the lower one are
# waiting times: :math:`3 \lambda e^{-3 \lambda h_1} \, 2 \lambda e^{-2 \lambda (h_2 - h_1)}`.

apes = alignment.select(["Homo_sapiens", "Pan", "Gorilla"])
twin = TimeTreeModel(apes, "((Homo_sapiens,Pan),Gorilla);", clock=StrictClock(1.0), tree_prior=YuleTree(10.0))
nodes, weights = np.polynomial.legendre.leggauss(100)
times, weights = torch.as_tensor(0.1 * (nodes + 1)), torch.as_tensor(0.1 * weights)  # on (0, 0.2)
plane = torch.stack(torch.meshgrid(times, times, indexing="ij"), -1).cumsum(-1)
logs = twin.log_likelihood(plane) - 30 * plane[..., 0] - 20 * plane.diff(dim=-1)[..., 0] + math.log(600)
exact = float((logs + (weights[:, None] * weights).log()).logsumexp((0, 1)))
target = bk.Target.from_pyro(twin)
draws = bk.sample(target, num_chains=8, num_warmup=200, num_samples=250 if is_small() else 1000, progress=False)
found = evidence.bridge_sampling(target, draws)
print(f"exact {exact:.4f}; {found}")
assert abs(found.log_evidence - exact) < 4.5 * found.standard_error

# %%
# The fit
# -------
# One call estimates the evidence of each model. With tips of one date it is that of the alignment given the topology,
# so that it can be compared with that of the tree without a clock.

budget = evidence.Budget(8, 250, 250) if is_small() else evidence.Budget(16, 500, 1000)
targets = {name: bk.Target.from_pyro(model) for name, model in models.items()}
comparison = compare_models(targets, budget=budget, progress=False)
for name, found in comparison.results.items():
    print(f"{name:14s} log evidence {found.log_evidence:.2f} +- {found.standard_error:.2f}")
factor, error = comparison.log_bayes_factor("strict clock")
print(f"log Bayes factor of the strict clock against the best model: {factor:.1f} +- {error:.1f}")
assert comparison.best == "relaxed clock" and factor + 4.5 * error < -5

# %%
# What it says
# ------------
# Rates differ between the lineages: against a strict clock the evidence is strong, and the tree without a clock, which
# has no ages to offer, is worse than a clock that may vary. A height, its interval and the date of a split are only as
# good as the age of the root that was put in, and as the model of substitution: that of Jukes and Cantor underestimates
# how often sites of mitochondria have changed.

settings = {"num_chains": 8, "num_warmup": 300, "num_samples": 300, "target_acceptance": 0.95}
relaxed = bk.sample(targets["relaxed clock"], **settings, progress=False)
ages = torch.as_tensor(relaxed["node_heights"])
levels = torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)
low, middle, high = ages[..., split].flatten().quantile(levels).tolist()
print(f"posterior: human and chimpanzee split {middle:.1f} million years ago, 95 % between {low:.1f} and {high:.1f}")
figure = Figure(figsize=(7, 4), layout="constrained")
plot_time_tree(models["relaxed clock"].dated, ages, figure.subplots()).set_xlabel("million years ago")

# %%
# A failure on purpose
# --------------------
# Sequences have no dates. If all heights are ten times as large and the rate is a tenth, the likelihood is the same to
# rounding: only the prior of an age or of the rate says what a million years is. Without one, heights are in
# substitutions per site.

heights, text = torch.tensor([0.03, 0.05], dtype=torch.float64), "((Homo_sapiens,Pan),Gorilla);"
likelihoods = []
for rate in (1.0, 0.1):
    model = TimeTreeModel(apes, text, clock=StrictClock(rate), tree_prior=YuleTree(10.0 * rate))
    likelihoods.append(float(model.log_likelihood(heights / rate)))
    print(f"rate {rate}, root at {float(heights[-1]) / rate:.2f}: log likelihood {likelihoods[-1]:.9f}")
assert abs(likelihoods[0] - likelihoods[1]) < 1e-7

# %%
# Try it on yours
# ---------------
# Replace the alignment and the topology, and give the root, or dated tips, an age.
#
# .. code-block:: python
#
#    model = TimeTreeModel(alignment, rooted, tree_prior=prior, clock=UncorrelatedLogNormalClock())
#    draws = bk.sample(bk.Target.from_pyro(model), num_chains=8, num_samples=300, target_acceptance=0.95, seed=0)
#    print(draws.summary()["r_hat"].max())
#
# ``Alignment.from_file`` reads sequences, ``dates`` are those of the tips. Look at R-hat of the heights, and repeat the
# run with another prior of the age: what moves in proportion came from the prior. If the evidence prefers no clock at
# all, do not date.
#
# Where to go next: :doc:`human_chimp_gorilla` asks which of the apes are neighbours, and shows what a better model of
# substitution does to the answer.
