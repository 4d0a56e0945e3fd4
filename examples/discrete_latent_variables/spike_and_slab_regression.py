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
# All but the subset integrates out :cite:p:`george1997`, and there are only 1,024 subsets. With :math:`D` the columns
# of ones and of the predictors that are in, times the deviations of their priors, responses are multivariate Student-t
# with the scale matrix :math:`I + D D^\top`, whose determinant and inverse need only :math:`D^\top D` and
# :math:`D^\top y`.


def log_prior(subsets: torch.Tensor) -> torch.Tensor:
    size, number = subsets.sum(-1), subsets.shape[-1]
    return torch.lgamma(size + 1) + torch.lgamma(number - size + 1) - math.lgamma(number + 2)


def log_likelihood(subsets: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the log density (*batch) of responses, all but the subsets (*batch, predictors) integrated out."""
    design, half = torch.cat([torch.ones_like(x[:, :1]), x], 1), len(y) / 2
    scales = torch.cat([torch.full_like(subsets[..., :1], 10.0), subsets / 2], -1)
    gram = scales[..., None] * scales[..., None, :] * (design.T @ design)
    root = torch.linalg.cholesky(torch.eye(design.shape[1], dtype=x.dtype) + gram)
    solved = torch.linalg.solve_triangular(root, (scales * (design.T @ y))[..., None], upper=False)
    square = y @ y - solved.square().sum((-2, -1))
    volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return math.lgamma(1 + half) - half * math.log(2 * math.pi) - volume - (1 + half) * (square / 2).log1p()


def posterior(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return all subsets, their probabilities, and the log evidence."""
    subsets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=x.dtype)] * x.shape[1])
    log_joint = log_prior(subsets) + log_likelihood(subsets, x, y)
    return subsets, log_joint.softmax(0), float(log_joint.logsumexp(0))


data = load_diabetes()
x, y = torch.as_tensor(data.data), torch.as_tensor(data.target)
x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()

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
quantiles = np.quantile(explained, [0.05, 0.25, 0.5, 0.75, 0.95]).round(2)
print(f"share of variance explained, quantiles 5, 25, 50, 75, 95 %: {quantiles}")

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
few_subsets, few_probabilities, few_evidence = posterior(few_x, few_y)
print(f"twelve patients: log evidence {few_evidence:.12f}, subset by subset {by_hand:.12f}")
assert abs(few_evidence - by_hand) < 1e-9
assert np.abs((few_probabilities @ few_subsets).numpy() - inclusion).max() < 1e-9

# %%
# The fit
# -------
# The posterior is a sum, so that nothing has to converge. Where there are too many subsets to list, a guide is trained
# instead: here bits that are in or out whatever the others are, by a gradient estimator for discrete sites
# :cite:p:`kool2020`. With 1,024 subsets its bound can be computed, too, and it has to lie below the log evidence.

subsets, probabilities, log_evidence = posterior(x, y)
logits = torch.zeros(10, dtype=torch.float64, requires_grad=True)


def model(x: torch.Tensor, y: torch.Tensor) -> None:
    bits = pyro.sample("inclusion", dist.Bernoulli(logits=torch.zeros_like(x[0])).to_event(1))
    fair = x.shape[1] * math.log(2)  # takes the coins' probabilities out
    pyro.factor("responses", fair + log_prior(bits) + log_likelihood(bits, x, y))


def guide(x: torch.Tensor, y: torch.Tensor) -> None:
    """Draw the subset, one predictor independently of the next."""
    bits = dist.Bernoulli(logits=logits).to_event(1)
    pyro.sample("inclusion", bits, infer={"gradient": UnorderedSet(k=4, baseline=True)})


def bound_of(logits: torch.Tensor) -> torch.Tensor:
    """Sum the evidence lower bound over all subsets."""
    log_guide = dist.Bernoulli(logits=logits).to_event(1).log_prob(subsets)
    log_joint = probabilities.log() + log_evidence
    return (log_guide.exp() * (log_joint - log_guide)).sum()


optimizer = torch.optim.Adam([logits], lr=0.05)
with global_stream(torch.Generator().manual_seed(0)):
    for _ in range(100 if is_small() else 1500):
        optimizer.zero_grad()
        ELBO().differentiable_loss(model, guide, x, y).backward()
        optimizer.step()
bound = float(bound_of(logits.detach()))
print(f"log evidence {log_evidence:.3f}, bound of the guide {bound:.3f}")
assert bound < log_evidence

# %%
# What it says
# ------------
# Sex, body mass index, blood pressure and the serum measurement s5 are in, almost without doubt; age is rather out. For
# the other measurements of serum it is a question of which stand in for which: pairs are in together more or less often
# than if they were independent. That is what the guide cannot express, and it puts each of them in too
# often.

names = np.array(data.feature_names)
single, of_guide = probabilities @ subsets, logits.detach().sigmoid()
for name, exact, approximate in zip(names, single.tolist(), of_guide.tolist(), strict=True):
    print(f"{name:4s} in with probability {exact:.3f}, by the guide {approximate:.3f}")
for place in probabilities.topk(3).indices.tolist():
    print(f"{float(probabilities[place]):.3f}: " + " ".join(names[subsets[place].bool().numpy()]))

generator = torch.Generator().manual_seed(0)
draws = subsets[torch.multinomial(probabilities, 2000 if is_small() else 20000, replacement=True, generator=generator)]
both = subsets.T @ (probabilities[:, None] * subsets)
dependence = (both - single[:, None] * single).abs().triu(1)
for pair in dependence.flatten().topk(3).indices.tolist():
    a, b = divmod(pair, 10)
    exact = float(both[a, b])
    share, error = float((draws[:, a] * draws[:, b]).mean()), (exact * (1 - exact) / len(draws)) ** 0.5
    print(f"{names[a]} and {names[b]} both in: {share:.3f} +- {error:.3f},", end=" ")
    print(f"exactly {exact:.3f}; {float(single[a] * single[b]):.3f} if they were independent")
    assert abs(share - exact) < 4.5 * error

figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
axes.barh(names, single, color="C0", alpha=0.8, label="exact")
axes.plot(of_guide, range(10), "D", color="C1", label="guide of independent bits", clip_on=False)
axes.set(xlabel="probability to be in")
figure.legend(loc="outside upper center", ncols=2, frameon=False)

# %%
# A failure on purpose
# --------------------
# The body mass index twice, as if it had been recorded by two nurses. Each copy can stand in for the other, so that
# neither is sure to be in, though one of them is. Who reads probabilities one by one would drop the best predictor.

more, chances, _ = posterior(torch.cat([x, x[:, 2:3]], 1), y)
first, second = (chances @ more)[[2, 10]].tolist()
either = float(((more[:, 2] + more[:, 10]) > 0).double() @ chances)
print(f"body mass index: {first:.3f} and {second:.3f}, at least one of them {either:.6f}; alone {float(single[2]):.6f}")
assert abs(first - second) < 1e-9 and first < 0.9 < 0.999 < either

# %%
# Try it on yours
# ---------------
# Replace ``x`` and ``y``, both with a standard deviation of one; up to about fifteen predictors can be summed over.
#
# .. code-block:: python
#
#    subsets, probabilities, log_evidence = posterior(x, y)
#    print(log_evidence, probabilities @ subsets)
#
# Look at pairs as well as at single predictors, and repeat with another scale of the slab: a wide one drops small
# effects. With more predictors train a guide, as here, and do not read its probabilities of correlated ones.
#
# Where to go next: :doc:`gradients_of_choices` compares estimators of such gradients,
# :doc:`/gallery/evidence/empirical_bayes` chooses the scale of a prior by the evidence.
