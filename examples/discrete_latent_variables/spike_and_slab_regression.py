r"""
Spike-and-slab regression: exact inclusion probabilities of predictors of diabetes
==================================================================================

**What you will learn:** how probable it is that each predictor belongs in a linear regression, exactly, and what a
guide of independent bits can and cannot say about it.

Of 442 patients ten measurements are known, age, sex, body mass index, blood pressure and six of blood serum, and how
far diabetes had progressed a year later :cite:p:`efron2004`. The measurements of serum are correlated, so that some can
stand in for others.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import multivariate_t
from sklearn.datasets import load_diabetes

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.gradients import UnorderedSet
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete.spike_and_slab import SpikeAndSlabRegression

# %%
# The model
# ---------
# Each predictor is in or out; all numbers of predictors are equally probable, and given their number all subsets,
#
# .. math::
#
#    p(\gamma) = \frac{1}{11} \binom{10}{|\gamma|}^{-1}, \qquad
#    \sigma^2 \sim \mathrm{InverseGamma}(1, 1), \qquad \mu \mid \sigma \sim N(0, 100 \sigma^2),
#
# .. math::
#
#    \beta_j \mid \gamma_j = 1, \sigma \sim N(0, \sigma^2 / 4), \qquad \beta_j = 0 \text{ where } \gamma_j = 0, \qquad
#    y \sim N(\mu + X \beta, \sigma^2 I).
#
# All but the subset integrates out :cite:p:`george1997`, and there are only 1,024 subsets.

data = load_diabetes()
x, y = torch.as_tensor(data.data), torch.as_tensor(data.target)
x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
regression = SpikeAndSlabRegression(slab_scale=0.5, intercept_scale=10.0, noise_shape=1.0, noise_rate=1.0)

# %%
# Before the data
# ---------------
# How much of the variance do the predictors explain, if they are drawn from the prior? Having no predictor is as
# probable as having any other number of them, and otherwise the share may be anything, most probably somewhat more
# than a half.

rng = np.random.default_rng(0)
explained = []
for _ in range(2000):
    chosen = rng.permutation(10)[: rng.integers(11)]
    signal = x[:, chosen].numpy() @ rng.normal(0.0, 0.5, len(chosen))
    explained.append(signal.var() / (signal.var() + 1))
prior_predictive = Figure(figsize=(6, 2.6), layout="constrained")
axes = prior_predictive.subplots()
axes.hist(explained, bins=40)
axes.set(xlabel="share of variance that the predictors explain", ylabel="draws of the prior")

# %%
# An exact twin
# -------------
# With three predictors of twelve patients there are eight subsets, and given one of them the responses are multivariate
# Student-t: a formula that says nothing of coefficients.

few_x, few_y = x[:12, 2:5], y[:12]
subsets = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
joint = []
for subset in subsets:
    design = few_x.numpy() * subset
    spread = np.eye(12) + 100 * np.ones((12, 12)) + design @ design.T / 4
    size = int(subset.sum())
    prior = -math.log(4 * math.comb(3, size))
    joint.append(prior + multivariate_t(np.zeros(12), spread, df=2).logpdf(few_y.numpy()))
by_hand, inclusion = logsumexp(joint), np.exp(joint - logsumexp(joint)) @ subsets
twin = regression.posterior(few_x, few_y)
print(f"twelve patients: log evidence {twin.log_evidence:.12f}, subset by subset {by_hand:.12f}")
assert abs(twin.log_evidence - by_hand) < 1e-9
assert np.abs(twin.inclusion_probabilities.numpy() - inclusion).max() < 1e-9

# %%
# The fit
# -------
# The posterior is a sum, so that nothing has to converge. Where there are too many subsets to list, a guide is trained
# instead: here bits that are in or out whatever the others are, by a gradient estimator for discrete sites
# :cite:p:`kool2020`. With 1,024 subsets its bound can be computed, too, and it has to lie below the log evidence.

posterior = regression.posterior(x, y)
logits = torch.zeros(10, dtype=torch.float64, requires_grad=True)


def guide(x: torch.Tensor, y: torch.Tensor) -> None:
    """Draw the subset, one predictor independently of the next."""
    bits = dist.Bernoulli(logits=logits).to_event(1)
    pyro.sample("inclusion", bits, infer={"gradient": UnorderedSet(k=4, baseline=True)})


def bound_of(logits: torch.Tensor) -> torch.Tensor:
    """Sum the evidence lower bound over all subsets."""
    log_guide = dist.Bernoulli(logits=logits).to_event(1).log_prob(posterior.subsets)
    log_joint = posterior.probabilities.log() + posterior.log_evidence
    return (log_guide.exp() * (log_joint - log_guide)).sum()


optimizer = torch.optim.Adam([logits], lr=0.05)
with global_stream(torch.Generator().manual_seed(0)):
    for _ in range(100 if is_small() else 1500):
        optimizer.zero_grad()
        ELBO().differentiable_loss(regression.model, guide, x, y).backward()
        optimizer.step()
bound = float(bound_of(logits.detach()))
print(f"log evidence {posterior.log_evidence:.3f}, bound of the guide {bound:.3f}")
assert bound < posterior.log_evidence

# %%
# What it says
# ------------
# Sex, body mass index, blood pressure and the serum measurement s5 are in, almost without doubt; age is rather out. For
# the other measurements of serum it is a question of which stand in for which: pairs are in together more or less often
# than if they were independent. That is what the guide cannot express, and it puts each of them in too
# often.

table = posterior.to_pandas(data.feature_names)
table.insert(1, "guide", [1.0, *logits.detach().sigmoid().tolist()])
print(table.round(3).to_string())
subsets, probabilities = posterior.most_probable(3)
for subset, probability in zip(subsets, probabilities, strict=True):
    print(f"{float(probability):.3f}: " + " ".join(np.array(data.feature_names)[subset.bool().numpy()]))

draws = posterior.sample(2000 if is_small() else 20000, seed=0)["inclusion"]
single = posterior.inclusion_probabilities
both = posterior.subsets.T @ (posterior.probabilities[:, None] * posterior.subsets)
dependence = (both - single[:, None] * single).abs().triu(1)
for pair in dependence.flatten().topk(3).indices.tolist():
    a, b = divmod(pair, 10)
    exact = float(both[a, b])
    share, error = float((draws[:, a] * draws[:, b]).mean()), (exact * (1 - exact) / len(draws)) ** 0.5
    print(f"{data.feature_names[a]} and {data.feature_names[b]} both in: {share:.3f} +- {error:.3f},", end=" ")
    print(f"exactly {exact:.3f}; {float(single[a] * single[b]):.3f} if they were independent")
    assert abs(share - exact) < 4.5 * error

figure = Figure(figsize=(6, 4), layout="constrained")
axes = posterior.plot(data.feature_names, figure.subplots())
axes.containers[0].set_label("exact")
axes.lines[0].set_label("one half")
axes.plot(logits.detach().sigmoid(), range(10), "D", color="C1", label="guide of independent bits", clip_on=False)
figure.legend(loc="outside upper center", ncols=3, frameon=False)

# %%
# A failure on purpose
# --------------------
# The body mass index twice, as if it had been recorded by two nurses. Each copy can stand in for the other, so that
# neither is sure to be in, though one of them is. Who reads probabilities one by one would drop the best predictor.

twice = regression.posterior(torch.cat([x, x[:, 2:3]], 1), y)
first, second = twice.inclusion_probabilities[[2, 10]].tolist()
either = float(((twice.subsets[:, 2] + twice.subsets[:, 10]) > 0).double() @ twice.probabilities)
print(f"body mass index: {first:.3f} and {second:.3f}, at least one of them {either:.6f}; alone {float(single[2]):.6f}")
assert abs(first - second) < 1e-9 and first < 0.9 < 0.999 < either

# %%
# Try it on yours
# ---------------
# Replace ``x`` and ``y``, both with a standard deviation of one; up to about fifteen predictors can be summed over.
#
# .. code-block:: python
#
#    posterior = regression.posterior(x, y)
#    print(posterior.to_pandas(data.feature_names))
#    print(posterior.most_probable(3))
#
# Look at pairs as well as at single predictors, and repeat with another scale of the slab: a wide one drops small
# effects. With more predictors train a guide, as here, and do not read its probabilities of correlated ones.
#
# Where to go next: :doc:`gradients_of_choices` compares estimators of such gradients,
# :doc:`/gallery/evidence/empirical_bayes` chooses the scale of a prior by the evidence.
