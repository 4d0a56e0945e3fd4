r"""
Parallel MCMC: groups of chains in several processes, and models compared in parallel
=====================================================================================

**What you will learn:** how to divide chains into groups that run in processes of their own, why the draws do not
depend on the number of processes, and how to compare models in parallel.

The data are the strength of 42 specimens of radiata pine, their density, and their density adjusted for resin
:cite:p:`williams1959`. Two regressions compete, and the evidence of both is known in closed form :cite:p:`friel2012`.
"""

import tempfile

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_t
from scipy.stats import t as student

import bayeskit as bk
from bayeskit import exact
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import Budget
from bayeskit.workflows.bayes_factors import compare_models

density, adjusted = exact.radiata_pine("x"), exact.radiata_pine("z")

# %%
# Groups of chains
# ----------------
# Four groups of four chains; each warms up by itself, on random numbers of its own. ``num_groups`` decides what is
# drawn, ``num_jobs`` where: here, one group after another, and in two processes, to the last bit the same.
#
# A process needs seconds to start and to compile, so that this pays where a group works for minutes.

num_warmup, num_samples = (50, 60) if is_small() else (300, 1000)
settings = {"num_chains": 16, "num_groups": 4, "num_warmup": num_warmup, "num_samples": num_samples, "progress": False}
here = bk.sample(density.target(), **settings)
elsewhere = bk.sample(density.target(), **settings, num_jobs=2)
same = torch.equal(here.unconstrained, elsewhere.unconstrained)
print(f"{elsewhere}: {'the same' if same else 'other'} bits in two processes")
assert same

# %%
# Nothing else changes on a cluster (:doc:`/how_to/dask`): with a Dask client, of this machine or of many, the same call
# goes to its workers.
#
# .. code-block:: python
#
#    with joblib.parallel_config(backend="dask"):
#        bk.sample(target, **settings, num_jobs=4)
#
# A worker that dies costs its group and nothing else; with ``checkpoint=FOLDER``, only the time since the last
# checkpoint.

# %%
# An exact twin
# -------------
# With a normal-gamma prior the strengths are jointly Student-t, and so is the slope given them. SciPy's density must
# give the evidence that the package states, and the draws of all groups the mean of the slope.

x, y, prior_mean, prior_precision, shape, rate = (value.numpy() for value in density.args)
design = np.column_stack([np.ones(len(x)), x - x.mean()])
spread = rate / shape * (np.eye(len(x)) + design / prior_precision @ design.T)
by_hand = multivariate_t(design @ prior_mean, spread, df=2 * shape).logpdf(y)
print(f"log evidence {by_hand:.9f}, stated {density.log_evidence:.9f}")
assert abs(by_hand - density.log_evidence) < 1e-9

slope = here.values()["beta"]
mean, error = float(slope.mean()), float(slope.mean(1).std() / len(slope) ** 0.5)
print(f"slope {mean:.3f} +- {error:.3f}, exactly {float(density.posterior_mean['beta']):.3f}")
assert abs(mean - float(density.posterior_mean["beta"])) < 4.5 * error

# %%
# Each group is a sample of the same posterior.

figure = Figure(figsize=(8, 3.5), layout="constrained")
axes = figure.subplots()
for number, (group, style) in enumerate(zip(slope.chunk(4), ("-", "--", "-.", ":"), strict=True), 1):
    values = group.flatten().numpy()
    axes.hist(values, bins=40, density=True, histtype="step", linestyle=style, label=f"group {number}")
df = 2 * shape + len(x)
sd = float(density.posterior_covariance["beta"]) ** 0.5
grid = np.linspace(mean - 4 * sd, mean + 4 * sd, 200)
exact_slope = student(df, float(density.posterior_mean["beta"]), sd * ((df - 2) / df) ** 0.5)
axes.plot(grid, exact_slope.pdf(grid), color="k", linewidth=2, label="exact")
axes.set(xlabel="slope (strength per unit of density)", ylabel="posterior density")
axes.legend(frameon=False)

# %%
# Several models
# --------------
# Here a model is a task. Results are kept in the folder, so that a comparison that was killed goes on.

models = {"density": density.target(), "adjusted density": adjusted.target()}
budget = Budget(num_chains=16, num_warmup=100 if is_small() else 200, num_samples=100 if is_small() else 1000)
with tempfile.TemporaryDirectory() as folder:
    found = compare_models(models, "bridge_sampling", budget=budget, num_jobs=2, checkpoint=folder, progress=False)
print(found)
factor, error = found.log_bayes_factor("adjusted density", "density")
truth = adjusted.log_evidence - density.log_evidence
print(f"log Bayes factor of the adjusted density: {factor:.3f} +- {error:.3f}, exactly {truth:.3f}")
assert all(z.trusted for z in found.results.values()) and abs(factor - truth) < 4.5 * error

# %%
# A failure on purpose
# --------------------
# ``num_groups`` is no number of processes. Who sets it to that of the cores gets other draws on another machine, for
# each group has random numbers and a warm-up of its own. Fix it once, and vary ``num_jobs``.

regrouped = bk.sample(density.target(), **settings | {"num_groups": 2})
same = torch.equal(regrouped.unconstrained, here.unconstrained)
print(f"two groups in place of four: {'the same' if same else 'other'} draws")
assert not same

# %%
# Try it on yours
# ---------------
# Add two arguments to your call. The model has to be importable in another process, as functions of a file are.
#
# .. code-block:: python
#
#    draws = bk.sample(density.target(), num_chains=16, num_groups=4, num_jobs=2)
#    print(draws.summary()["r_hat"].max(), draws.seconds)
#
# Look at R-hat over all groups, and at the seconds with one job and with several: a process takes seconds to start, so
# that small models are faster in one. Chains of one batch are cheap: first raise ``num_chains``, then ``num_jobs``.
#
# Where to go next: :doc:`long_runs` for runs that are interrupted, :doc:`distributed_svi` for training in several
# processes, :doc:`/gallery/evidence/chib_radiata_pine` for the same two models by Gibbs sampling.
