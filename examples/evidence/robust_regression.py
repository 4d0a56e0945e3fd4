r"""
Robust Bayesian regression: Student-t errors chosen by the evidence (stack loss)
================================================================================

**What you will learn:** how to let the evidence choose between normal and heavy-tailed errors, and what the choice does
to the coefficients and to single observations.

A plant oxidises ammonia to nitric acid. On 21 days the air flow, the temperature of the cooling water and the acid
concentration were recorded, and how much ammonia escaped from the stack :cite:p:`brownlee1965`. Days 1, 3, 4 and 21
have long been suspected to be odd :cite:p:`daniel1971`.
"""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy import stats
from scipy.special import logsumexp
from statsmodels.datasets import stackloss

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import bridge_sampling

# %%
# The model
# ---------
# The loss :math:`y` is linear in the standardised covariates, with errors from Student's t distribution,
#
# .. math::
#
#    y_i = b_0 + x_i^\top b + \sigma e_i, \qquad e_i \sim t_\nu, \qquad b_j \sim N(0, 20^2), \qquad
#    \log \sigma \sim N(1, 1).
#
# The smaller :math:`\nu`, the heavier the tails; :math:`\nu = \infty` is the normal distribution. :cite:t:`lange1989`
# found the likelihood of these data to be largest near :math:`\nu = 1`.

table = stackloss.load_pandas().data
raw = torch.tensor(table[["AIRFLOW", "WATERTEMP", "ACIDCONC"]].to_numpy(), dtype=torch.float64)
covariates = torch.column_stack([torch.ones(len(raw), dtype=torch.float64), (raw - raw.mean(0)) / raw.std(0)])
loss = torch.tensor(table["STACKLOSS"].to_numpy(), dtype=torch.float64)  # tenths of a per cent of the ammonia
odd = np.isin(np.arange(1, 22), [1, 3, 4, 21])


def regression(covariates: torch.Tensor, loss: torch.Tensor, freedom: float) -> None:
    b = pyro.sample("b", dist.Normal(covariates.new_zeros(covariates.shape[1]), 20.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(covariates.new_tensor(1.0), 1.0))
    mean = covariates @ b
    with pyro.plate("days", len(loss)):
        errors = dist.Normal(mean, scale) if math.isinf(freedom) else dist.StudentT(freedom, mean, scale)
        pyro.sample("loss", errors, obs=loss)


# %%
# Before the data
# ---------------
# Percentiles of the loss on a day of average conditions, as the prior expects it under two of the models: a wide range
# in either case, which even allows for negative losses. It is in the tails that the two differ.

target = bk.Target.from_pyro(regression, covariates, loss, 2.0)
prior = target.constrain(target.sample_prior(100_000, seed=0))
rng = np.random.default_rng(0)
for name, error in (("normal errors", rng.normal(size=100_000)), ("t errors, 2 df", rng.standard_t(2.0, size=100_000))):
    simulated = prior["b"][:, 0].numpy() + prior["scale"].numpy() * error
    print(f"{name:>14}: " + ", ".join(f"{q:g} % {np.percentile(simulated, q):z7.1f}" for q in (0.5, 5, 50, 95, 99.5)))
print(f"{'observed':>14}: from {float(loss.min()):.0f} to {float(loss.max()):.0f}")

# %%
# An exact twin
# -------------
# Seven days, the intercept and the scale: two parameters, over which quadrature integrates formulas of SciPy.

few = slice(0, 21, 3)
size = {"num_warmup": 120, "num_samples": 250} if is_small() else {"num_warmup": 500, "num_samples": 2000}
intercept, log_scale = np.linspace(-60, 100, 1601)[:, None], np.linspace(-3, 7, 301)
for freedom, errors in ((math.inf, stats.norm), (2.0, stats.t(2.0))):
    log_density = stats.norm.logpdf(intercept, scale=20.0) + stats.norm.logpdf(log_scale, loc=1.0)
    for value in loss[few].numpy():
        log_density = log_density + errors.logpdf((value - intercept) / np.exp(log_scale)) - log_scale
    exact = logsumexp(log_density) + math.log(0.1 * 10 / 300)
    twin = bk.Target.from_pyro(regression, covariates[few, :1], loss[few], freedom)
    z = bridge_sampling(twin, bk.sample(twin, 8, seed=0, progress=False, **size), seed=0)
    print(f"seven days, {freedom:g} degrees of freedom: {z}, by quadrature {exact:.4f}")
    assert z.trusted and abs(z.log_evidence - exact) < 4.5 * z.standard_error

# %%
# The fit
# -------
# Five kinds of errors, all days. For comparison the normal model without the odd days: this would be the answer if we
# knew beforehand which they are.

degrees = (math.inf, 2.0) if is_small() else (math.inf, 8.0, 4.0, 2.0, 1.0)
found, draws = {}, {}
for seed, freedom in enumerate(degrees, 1):
    target = bk.Target.from_pyro(regression, covariates, loss, freedom)
    draws[freedom] = bk.sample(target, 8, seed=seed, progress=False, **size)
    found[freedom] = z = bridge_sampling(target, draws[freedom], seed=seed)
    facts = f"R-hat {z.diagnostics['r_hat']:.3f}, effective draws {z.diagnostics['effective_draws']:.0f}"
    print(f"degrees of freedom {freedom:3g}: {z.log_evidence:.3f} +- {z.standard_error:.3f}, {facts}")
    assert z.trusted and z.diagnostics["r_hat"] < 1.05 and z.diagnostics["effective_draws"] > 400
target = bk.Target.from_pyro(regression, covariates[~odd], loss[~odd], math.inf)
without = bk.sample(target, 8, seed=1, progress=False, **size)
assert bridge_sampling(target, without).trusted

# %%
# What it says
# ------------
# Heavy tails are preferred, but by no means overwhelmingly: 21 days are few. With all five equally probable
# beforehand, the probability of normal errors is printed below. Averaging is better than choosing.
#
# On the left, what it is all about. Normal errors let the odd days move the coefficients. With t errors and all days
# they are about where the normal model has them without the odd days, which nobody had to name. On the right, the
# weight of each day, the mean of :math:`(\nu + 1) / (\nu + e_i^2)`: the days that count for little are the odd ones.

normal, heavy = found[math.inf], found[2.0]
factor, error = heavy.log_evidence - normal.log_evidence, math.hypot(heavy.standard_error, normal.standard_error)
print(f"log Bayes factor, two degrees of freedom against normal: {factor:.3f} +- {error:.3f}")
assert factor > 4.5 * error
share = np.exp([z.log_evidence for z in found.values()] - logsumexp([z.log_evidence for z in found.values()]))
for freedom, p in zip(found, share, strict=True):
    print(f"degrees of freedom {freedom:3g}: posterior probability {p:.3f}")

figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
names = ["air flow", "water temperature", "acid"]
fits = {"normal, all days": draws[math.inf], "t, all days": draws[2.0], "normal, odd days left out": without}
for number, (name, some) in enumerate(fits.items()):
    b = some.values()["b"][..., 1:].flatten(0, 1)
    at = np.arange(3) + 0.2 * (number - 1)
    left.errorbar(at, b.mean(0), b.std(0), fmt="os^"[number], color=f"C{number}", capsize=3, label=name)
left.axhline(0.0, color="0.7", linewidth=1)
left.set_xticks(range(3), names)
left.set(ylabel="coefficient (loss per standard deviation)", title="posterior mean and standard deviation")
left.legend(frameon=False)
values = draws[2.0].values()
residuals = (loss - values["b"] @ covariates.mT) / values["scale"][..., None]
weight = (3.0 / (2.0 + residuals.square())).mean((0, 1)).numpy()
right.bar(np.arange(1, 22)[~odd], weight[~odd], color="C0", label="other days")
right.bar(np.arange(1, 22)[odd], weight[odd], color="C1", hatch="//", label="days under suspicion")
right.set(xlabel="day", ylabel="weight in the t model", ylim=(0, 1.8))
right.legend(frameon=False)
assert weight[odd].max() < np.median(weight[~odd])

# %%
# A failure on purpose
# --------------------
# A robust model finds what most of the data agree on, and has no other notion of right. Let the meter be broken on two
# days of three, and show 40 too much. Now the broken days have the weight, and the others are the outliers. The
# intercept is off by several of its posterior standard deviations, as far as its prior allows, and the chains agree.

broken = np.arange(21) % 3 != 0
target = bk.Target.from_pyro(regression, covariates, loss + 40 * torch.tensor(broken), 2.0)
misled = bk.sample(target, 8, seed=1, progress=False, **size)
before, after = (some.values()["b"][..., 0] for some in (draws[2.0], misled))
shift, sd = float(after.mean() - before.mean()), float(after.std())
print(f"intercept {float(after.mean()):.1f} in place of {float(before.mean()):.1f}, with a posterior sd of {sd:.1f};")
print(f"largest R-hat {misled.summary()['r_hat'].max():.3f}")
assert shift > 20 and shift > 4 * sd

# %%
# Try it on yours
# ---------------
# Replace ``covariates`` and ``loss``; give covariates a standard deviation of one, so that one prior suits all.
#
# .. code-block:: python
#
#    models = {f"t, {v:g} df": bk.Target.from_pyro(regression, covariates, loss, v) for v in (math.inf, 4.0)}
#    found = bk.compare_models(models, seed=0)
#    print(found)
#
# Look at the probabilities of the error models and at the weights of single rows. Heavy tails help against odd
# responses. Against odd covariates they do not: look at those before. If whole groups of rows differ, give them
# parameters of their own.
#
# Where to go next: :doc:`/gallery/loss_based_updates/contaminated_location` protects against outliers by a loss instead
# of a likelihood, :doc:`eight_schools_by_every_estimator` is the shortest way to an evidence, and
# :doc:`/gallery/loss_based_updates/newcombs_median` regresses on quantiles.
