r"""
Gradient estimators for discrete latent variables compared on Darwin's maize
============================================================================

**What you will learn:** how gradient estimators for discrete variables compare in bias, variance and cost, how one is
named in a Pyro guide, and what a smooth relaxation does to the answer.

Darwin grew pairs of maize plants, one cross-fertilised and one self-fertilised, and published the differences of their
heights, fifteen of them :cite:p:`darwin1876`; :cite:t:`fisher1935` analysed them. Two are strongly negative. Which
pairs are outliers? That is one choice a pair, and 32,768 sets of outliers in all: few enough to judge every estimator
by enumeration.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_t

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference import gradients
from bayeskit.inference.objectives import ELBO

# %%
# The model
# ---------
# An outlier has a standard deviation five times as large :cite:p:`box1968`. With :math:`z_i = 1` for an outlier,
#
# .. math::
#
#    z_i \sim \mathrm{Bernoulli}(0.05), \quad \sigma^2 \sim \mathrm{InverseGamma}(1, 8), \quad
#    \mu \sim N(0, \sigma^2 / 0.1), \quad y_i \sim N(\mu, \sigma^2 \{1 + 24 z_i\}).
#
# Mean and variance integrate out. What is left is a function of the choices; it is written such that it also takes
# points between zero and one, because relaxed estimators ask for them.

heights = torch.tensor([49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48], dtype=torch.float64) / 8


def mean_of_difference(z: torch.Tensor, y: torch.Tensor = heights) -> torch.Tensor:
    weight = 1 / (1 + 24 * z)
    return (weight * y).sum(-1) / (0.1 + weight.sum(-1))


def log_likelihood(z: torch.Tensor, y: torch.Tensor = heights) -> torch.Tensor:
    weight = 1 / (1 + 24 * z)
    precision, shape = 0.1 + weight.sum(-1), 1.0 + len(y) / 2
    rate = 8.0 + 0.5 * ((weight * y.square()).sum(-1) - precision * mean_of_difference(z, y).square())
    constant = math.lgamma(shape) + math.log(8.0) - len(y) / 2 * math.log(2 * math.pi)
    return constant + 0.5 * (weight.log().sum(-1) + math.log(0.1) - precision.log()) - shape * rate.log()


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(torch.full((15,), 0.05, dtype=torch.float64)).to_event(1))
    pyro.factor("heights", log_likelihood(z))


# %%
# Before the data
# ---------------
# Eight sets of fifteen differences from the prior. Outliers are few, and both means and scales differ by inches.

generator = torch.Generator().manual_seed(4)
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
axes = prior_predictive.subplots()
for row in range(8):
    outlier = torch.rand(15, generator=generator) < 0.05
    sd = (8.0 / torch.empty(()).exponential_(generator=generator)).sqrt()  # InverseGamma(1, 8)
    mean = sd / math.sqrt(0.1) * torch.randn((), generator=generator)
    y = mean + sd * torch.where(outlier, 5.0, 1.0) * torch.randn(15, generator=generator)
    axes.plot(y[~outlier], torch.full_like(y[~outlier], row), "|", color="C0", markersize=12)
    axes.plot(y[outlier], torch.full_like(y[outlier], row), "x", color="C3")
axes.set(xlabel="difference in height (inches)", ylabel="set", title="from the prior; crosses are outliers")

# %%
# An exact twin
# -------------
# Five pairs have 32 sets of outliers. Given a set, the differences are jointly Student-t, a formula of its own, and the
# gradient of :math:`E f(z)` in the logit of pair :math:`i` is :math:`E\, (z_i - p_i) f(z)`.

logits = torch.linspace(-2.0, 1.0, 5, dtype=torch.float64, requires_grad=True)
bits = dist.Bernoulli(logits=logits).to_event(1)
by_hand = torch.zeros(5, dtype=torch.float64)
for z in torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 5):
    spread = 8.0 * (torch.diag(1 + 24 * z) + 1 / 0.1)
    f = float(multivariate_t(torch.zeros(5), spread, df=2.0).logpdf(heights[:5]))
    by_hand += (z - logits.detach().sigmoid()) * f * bits.log_prob(z).exp().detach()
enumerated = gradients.Enumeration().estimate(bits, lambda z: log_likelihood(z, heights[:5]))
print(f"gradients by hand and by enumeration differ by {float((by_hand - enumerated).abs().max()):.0e} at most")
assert torch.allclose(by_hand, enumerated, rtol=0, atol=1e-9)

# %%
# Estimators side by side
# -----------------------
# All fifteen pairs, fifty thousand gradients of each estimator, and the exact gradient beside them. A baseline is what
# counts most, then that a set drawn without replacement never asks for the same point twice. The relaxed estimator has
# the least variance, and is wrong: its difference from the exact gradient is many standard errors, and no number of
# draws mends that. (Both the table and the figure have the size of the largest z.)

estimators = [
    gradients.ScoreFunction(4),
    gradients.LeaveOneOut(4),
    gradients.UnorderedSet(4),
    gradients.UnorderedSet(4, baseline=True),
    gradients.DisARM(2),
    gradients.GumbelSoftmax(1.0, num_samples=4),
]
bits = dist.Bernoulli(logits=torch.full((15,), -3.0, dtype=torch.float64)).to_event(1)
table = gradients.compare_estimators(
    bits, log_likelihood, estimators, num_replicates=5_000 if is_small() else 50_000, progress=False
)
print(table.to_pandas().set_index("estimator")[["largest_z", "variance", "num_evaluations"]].abs().to_string())
comparison = Figure(figsize=(9, 3.4), layout="constrained")
left, right = table.plot(comparison.subplots(1, 2, sharey=True))
right.lines[len(estimators) - 1].set_color(left.lines[-1].get_color())
right.get_legend().remove()
comparison.legend(loc="outside upper center", ncols=3, frameon=False, fontsize="small")
for found in table.results.values():
    assert (abs(found.largest_z) < 4.5) == found.unbiased
assert table["UnorderedSet(k=4)"].variance < table["ScoreFunction(num_samples=4)"].variance

# %%
# The fit
# -------
# In a guide, an estimator is named where the site is. Guides of independent bits are trained by two estimators, and
# judged by their exact bound of the log evidence, a sum over all sets. The relaxed training comes to rest as well, but
# elsewhere.

points = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 15)
log_prior = dist.Bernoulli(torch.tensor(0.05, dtype=torch.float64)).log_prob(points).sum(-1)
log_joint = log_prior + log_likelihood(points)
log_evidence = float(log_joint.logsumexp(0))


def exact_bound(logits: torch.Tensor) -> torch.Tensor:
    log_guide = dist.Bernoulli(logits=logits).to_event(1).log_prob(points)
    return (log_guide.exp() * (log_joint - log_guide)).sum()


guides, bounds = {}, {}
num_steps = 160 if is_small() else 1500
trained_by = {
    "UnorderedSet": gradients.UnorderedSet(4, baseline=True),
    "GumbelSoftmax": gradients.GumbelSoftmax(1.0, num_samples=4),
}
for name, estimator in trained_by.items():
    logits, bounds[name] = torch.full((15,), -3.0, dtype=torch.float64, requires_grad=True), []

    def guide(logits: torch.Tensor = logits, estimator: gradients.GradientEstimator = estimator) -> None:
        pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1), infer={"gradient": estimator})

    optimizer, objective = torch.optim.Adam([logits], lr=0.1), ELBO()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    with global_stream(torch.Generator().manual_seed(0)):
        for step in range(1, num_steps + 1):
            optimizer.zero_grad()
            objective.differentiable_loss(model, guide).backward()
            optimizer.step()
            schedule.step()
            if step % (num_steps // 20) == 0:
                bounds[name].append(float(exact_bound(logits.detach())))
    guides[name] = logits.detach()
    print(f"guide trained by {name:13s}: bound {bounds[name][-1]:.4f} of {log_evidence:.4f}")
    # At rest within a hundredth of a nat, over the last tenth of the steps.
    assert bounds[name][-1] < log_evidence and abs(bounds[name][-1] - bounds[name][-3]) < 0.01
assert bounds["UnorderedSet"][-1] > bounds["GumbelSoftmax"][-1]

# %%
# What it says
# ------------
# The second pair is more likely an outlier than not, and the last one may be. Guides of independent bits cannot know
# that both are outliers together more often than the last one alone, but weighting their draws corrects for that: the
# mean difference, averaged over all sets, with its error.

num_draws = 5_000 if is_small() else 50_000
bits = dist.Bernoulli(logits=guides["UnorderedSet"]).to_event(1)
with global_stream(torch.Generator().manual_seed(0)):
    z = bits.sample((num_draws,))
log_weight = math.log(0.05) * z.sum(-1) + math.log(0.95) * (1 - z).sum(-1) + log_likelihood(z) - bits.log_prob(z)
weight = (log_weight - log_weight.logsumexp(0)).exp()
effective = float(1 / weight.square().sum())
estimate = float((weight * mean_of_difference(z)).sum())
error = float((weight * (mean_of_difference(z) - estimate)).square().sum().sqrt())
posterior = log_joint.softmax(0)
exact = float((posterior * mean_of_difference(points)).sum())
print(f"mean difference {estimate:.4f} +- {error:.4f} inches, exactly {exact:.4f}; all alike: {heights.mean():.4f}")
print(f"{effective:.0f} effective draws of {num_draws}")
assert effective > 100 and abs(estimate - exact) < 4.5 * error

figure = Figure(figsize=(8, 3.4), layout="constrained")
axes = figure.subplots()
axes.bar(range(1, 16), (posterior @ points).numpy(), color="0.8", label="exact")
for (name, logits), marker, shift in zip(guides.items(), "os", (-0.2, 0.2), strict=True):
    axes.plot(torch.arange(1, 16) + shift, logits.sigmoid(), marker, label=name)
axes.set_xticks(range(1, 16), [f"{n}\n{float(8 * height):.0f}" for n, height in enumerate(heights, 1)])
axes.set(xlabel="pair, and its difference in eighths of an inch", ylabel="probability of an outlier")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Replace ``bits`` and ``log_likelihood`` by your distribution and function, and compare before you train.
#
# .. code-block:: python
#
#    table = gradients.compare_estimators(bits, log_likelihood, estimators, num_replicates=1000)
#    print(table.to_pandas()[["estimator", "largest_z", "variance", "num_evaluations"]])
#
# Look at the variance times the number of evaluations, and at ``largest_z``: beyond 4 the estimator is biased. Then
# name the best in the guide, ``infer={"gradient": gradients.LeaveOneOut(4)}``. With few values, enumerate instead; take
# a relaxation only where the function is smooth between the values, and judge it by an exact bound.
#
# Where to go next: :doc:`spike_and_slab_regression` trains bits that choose predictors, :doc:`matching_permutations`
# relaxes permutations, :doc:`/gallery/variational_autoencoders/discrete_codes_of_digits` has discrete codes in a
# network.
