r"""
The marginal likelihood is cross-validation: leave-p-out scores summed over all p
=================================================================================

**What you will learn:** that the log evidence is the sum of leave-p-out cross-validation scores over all p, what the
prior has to do with it, and how to compare models by either.

The strength of 42 planks of radiata pine can be explained by their density, or by their density adjusted for resin
:cite:p:`williams1959`. Which is better? Some ask for the evidence, some for cross-validation, and each side warns of
the other. :cite:t:`fong2020` showed that both ask for the same sum, and differ in how many of its terms they take.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeskit as bk
from bayeskit.errors import SettingsError
from bayeskit.exact import radiata_pine
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import prequential
from bayeskit.inference.held_out import cross_validation_evidence, enumerated_cross_validation
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# Two regressions of strength :math:`y` on a centred covariate, with the prior of :cite:t:`friel2012`,
#
# .. math::
#
#    \tau \sim \mathrm{Gamma}(3, 2 \cdot 300^2), \quad
#    \alpha \mid \tau \sim N(3000, (0.06\, \tau)^{-1}), \quad
#    \beta \mid \tau \sim N(185, (6\, \tau)^{-1}), \quad
#    y_i \sim N(\alpha + \beta (x_i - \bar x), \tau^{-1}).
#
# Let :math:`S(p)` be the mean log density with which a held-out plank is predicted by the :math:`n - p` planks that are
# not held out, over all sets of :math:`p`. Then, with no approximation,
#
# .. math:: \log p(y_1, \dots, y_n) = \sum_{p=1}^n S(p).
#
# Leave-one-out is the first of these scores. The last is what the prior alone predicts, and it counts as much.

cases = {"density": radiata_pine("x"), "adjusted density": radiata_pine("z")}
for name, case in cases.items():
    print(f"{name}: log evidence {case.log_evidence:.4f}, in closed form")

# %%
# Before the data
# ---------------
# What :math:`S(n)` scores: planks that the prior expects, beside those that came. It is a well informed prior, which
# knows about how strong wood is, and by how much strength grows with density.

rng = np.random.default_rng(0)
density, strength = (column.numpy() for column in cases["density"].args[:2])
prior_predictive = Figure(figsize=(8, 3.4), layout="constrained")
axes = prior_predictive.subplots()
for i in range(4):
    precision = rng.gamma(3.0) / (2 * 300.0**2)
    alpha, beta = rng.normal([3000.0, 185.0], (np.array([0.06, 6.0]) * precision) ** -0.5)
    y = rng.normal(alpha + beta * (density - density.mean()), precision**-0.5)
    axes.plot(density, y, "os^D"[i], markersize=3, color=f"C{i}", label=f"from the prior, {i + 1}")
axes.plot(density, strength, "k+", label="came")
axes.set(xlabel="density (lb/ft$^3$)", ylabel="strength (lb/in$^2$)", title="four data sets from the prior")
axes.legend(frameon=False)

# %%
# An exact twin
# -------------
# Four flips of a coin, three of them heads, any chance of heads as probable as any other. All sets can be held out, and
# the evidence is :math:`B(4, 2) = 1/20`. A prior that expects all heads or all tails predicts the first flip just as
# well, and all others worse, which is what the evidence charges a prior for.

FLIPS = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)


def coin_evidence(part: Tensor, pseudo_flips: float = 1.0) -> Tensor:
    """Log evidence of parts of the flips, ``(m, 4) -> (m,)``, the chance of heads being Beta(a, a)."""
    a = torch.tensor(pseudo_flips, dtype=torch.float64)
    heads, tails = a + (part * FLIPS).sum(1), a + (part * (1 - FLIPS)).sum(1)
    return torch.lgamma(heads) + torch.lgamma(tails) - torch.lgamma(heads + tails) - 2 * a.lgamma() + (2 * a).lgamma()


coin = enumerated_cross_validation(coin_evidence, 4)
extreme = enumerated_cross_validation(lambda part: coin_evidence(part, 0.01), 4)
print("held out       " + "".join(f"{p:10d}" for p in coin.held_out.tolist()))
print("Beta(1, 1)     " + "".join(f"{score:10.4f}" for score in coin.score.tolist()))
print("Beta(.01, .01) " + "".join(f"{score:10.4f}" for score in extreme.score.tolist()))
print(f"the first row adds up to {coin.log_evidence:.12f}, and log(1/20) is {math.log(1 / 20):.12f}")
assert abs(coin.log_evidence - math.log(1 / 20)) < 1e-12
assert abs(float(coin.score[-1]) - math.log(1 / 2)) < 1e-12

# %%
# The fit
# -------
# Particles see the planks one by one, in four orders, and predict the next: each order's sum is the log evidence. Then
# draws from the posterior are reweighted to predict planks left out, and replaced where their weights are uneven.

size = {"num_particles": 64, "num_replicates": 2} if is_small() else {"num_particles": 512, "num_replicates": 4}
generator = torch.Generator().manual_seed(0)
orders = torch.stack([torch.randperm(42, generator=generator) for _ in range(4)])  # the same for both models
most = 2 if is_small() else 10
scores, curves = {}, {}
for name, case in cases.items():
    target = case.target()
    curves[name] = curve = prequential(target, order=orders, seed=1, **size)
    off = (curve.log_evidence - case.log_evidence) / curve.standard_error
    print(f"{name}: by prediction {curve.log_evidence:.3f} +- {curve.standard_error:.3f}")
    assert curve.trusted and abs(off) < 4.5

    draws = bk.sample(target, 4, *((100, 150) if is_small() else (300, 1000)), seed=2, progress=False)
    summary = posterior_summary(draws)
    assert summary["r_hat"].max() < 1.05 and summary["ess"].min() > 100
    held_out = 16 if is_small() else 42
    scores[name] = score = cross_validation_evidence(target, draws, p=range(1, most + 1), held_out=held_out, seed=3)
    print(f"    largest Pareto k {float(score.pareto_k.max()):.2f}, sets redone {score.num_rerun.tolist()}")
    assert score.trusted

# %%
# What it says
# ------------
# Both prefer the adjusted density. They differ in how much of the sum they take: the first few scores, of planks that
# nearly all others predict, or all of them, down to what the prior alone predicts. The curves, one for each order,
# tell more: the evidence does not grow steadily, but leaps at a plank whose resin makes it denser, not stronger.

gain = curves["adjusted density"].log_evidence - curves["density"].log_evidence
error = math.hypot(*(curve.standard_error for curve in curves.values()))
known = cases["adjusted density"].log_evidence - cases["density"].log_evidence
print(f"log Bayes factor for the adjusted density: {gain:.2f} +- {error:.2f}, exactly {known:.4f}")
early = float(scores["adjusted density"].cumulative[-1] - scores["density"].cumulative[-1])
error = math.hypot(*(float(score.cumulative_standard_error[-1]) for score in scores.values()))
print(f"of these, when any {most} planks are predicted by the others: {early:.2f} +- {error:.2f}")
gains = curves["adjusted density"].predictives - curves["density"].predictives
leaps = orders[range(4), gains.argmax(1)]
one = int(leaps[0])
print(f"the plank with the largest leap, by order: {(leaps + 1).tolist()}; strength {strength[one]:.0f}, ", end="")
print(f"density {density[one]:.1f}, adjusted for resin {float(cases['adjusted density'].args[0][one]):.1f}")
assert abs(gain - known) < 4.5 * math.hypot(*(curve.standard_error for curve in curves.values()))

figure = Figure(figsize=(8, 6.5), layout="constrained")
top, bottom = figure.subplots(2, 1)
for name, result in scores.items():
    result.plot(top, label=name)
top.set(title="leave-p-out scores", xticks=range(1, most + 1), ylabel="log density of a plank (nats)")
curves["adjusted density"].plot(bottom, against=curves["density"])
bottom.set_title("log Bayes factor for the adjusted density, four orders of the planks")

# %%
# A failure on purpose
# --------------------
# The identity is one of all sets that can be held out, and their number doubles with each datum. For four flips they
# are listed, for 42 planks they cannot be. This is refused; particles in some orders, as above, estimate the sum.

try:
    enumerated_cross_validation(coin_evidence, 42)
except SettingsError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("trillions of sets were listed")

# %%
# Try it on yours
# ---------------
# Replace ``target``: a Pyro model with one likelihood site in a plate, so that rows can be left out.
#
# .. code-block:: python
#
#    curve = prequential(target, order=4, num_particles=64, num_replicates=2, seed=1)
#    score = cross_validation_evidence(target, draws, p=[1, 2], held_out=16, seed=3)
#    print(curve.log_evidence, curve.trusted, score.cumulative, float(score.pareto_k.max()))
#
# Look at the Pareto shapes and at where two models' curves part: early, the priors differ; late, the predictions do.
# Report the evidence if the prior means something, and scores of a few left out if it does not. Rows that depend on
# each other, as in a series, have to be left out in blocks, by ``groups``.
#
# Where to go next: :doc:`/gallery/evidence/chib_radiata_pine` finds this evidence by Gibbs sampling,
# :doc:`safe_bayes_against_coverage` chooses a learning rate by predicting data one by one.
