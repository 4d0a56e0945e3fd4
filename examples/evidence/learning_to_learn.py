r"""
Implicit MAML against empirical Bayes: meta-learning is a hierarchical model
============================================================================

**What you will learn:** that a start learned from many tasks is the mean of a prior, how implicit MAML and empirical
Bayes weigh tasks, why they disagree, and what a task that is unlike all others does to either.

Implicit MAML :cite:p:`rajeswaran2019` learns a start :math:`\theta_0`, from which the parameter of each task is adapted
by a penalised loss. A penalty is the logarithm of a prior, so that the start is the mean of a hierarchy
:cite:p:`grant2018`. The smallest case has eight tasks of one parameter each: the effects of coaching in eight schools
:cite:p:`rubin1981`, where everything has a closed form.
"""

# sphinx_gallery_thumbnail_number = 2
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from scipy.stats import t as student

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import AccuracyWarning
from bayeskit.gallery import is_small
from bayeskit.inference import evidence, hypergradient

# %%
# The model
# ---------
# School :math:`j` reports an effect :math:`y_j` with a known standard error :math:`s_j`, about its own effect
# :math:`\theta_j`. The loss of a task is the negative log likelihood, and adaptation adds a penalty for the distance to
# the start:
#
# .. math::
#    \theta_j^*(\theta_0) = \arg\min_\theta \frac{(y_j - \theta)^2}{2 s_j^2} + \frac{(\theta - \theta_0)^2}{2 \tau^2},
#    \qquad
#    y_j \sim N(\theta_j, s_j^2), \quad \theta_j \sim N(\theta_0, \tau^2).
#
# The two sides are one model: what is adapted on the left is the mode of the posterior on the right. They differ in how
# :math:`\theta_0` is learned.

y, s = (x.double() for x in exact.get("eight_schools").args[:2])


def schools(y, s, spread=None, freedom=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 20.0))
    if spread is None:
        spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        tasks = dist.Normal(mean, spread) if freedom is None else dist.StudentT(freedom, mean, spread)
        effect = pyro.sample("effect", tasks)
        pyro.sample("y", dist.Normal(effect, s), obs=y)


def learned_by_evidence(y, *numbers, over="mean", **options):
    return evidence.maximize(bk.Target.from_pyro(schools, y, s, *numbers), over=over, num_starts=4, **options)


# %%
# Before the data
# ---------------
# The penalty says how different tasks are expected to be. With a spread of 5 points, schools look alike but for the
# errors of their reports, and with 20 points they do not.

rng = np.random.default_rng(0)
prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
for spread, style in ((5, "-"), (20, "--")):
    drawn = rng.normal(8, np.hypot(spread, s.numpy()), (500 if is_small() else 5000, 8))
    axes.hist(np.ptp(drawn, axis=1), bins=40, histtype="step", linestyle=style, linewidth=2, label=f"spread {spread}")
axes.axvline(float(y.max() - y.min()), color="C6", label="observed")
axes.set(xlabel="largest less smallest report, in points", ylabel="draws from the prior")
axes.legend()

# %%
# An exact twin
# -------------
# Empirical Bayes maximises :math:`\log p(y \mid \theta_0)`, where :math:`y_j \sim N(\theta_0, \tau^2 + s_j^2)`: the
# reports are weighted by :math:`1 / (\tau^2 + s_j^2)`. Implicit MAML minimises the loss of the tasks after adaptation,
# :math:`\sum_j (y_j - \theta_j^*)^2 / 2 s_j^2`, and as :math:`y_j - \theta_j^*` is
# :math:`s_j^2 (y_j - \theta_0) / (\tau^2 + s_j^2)`, its weights are :math:`s_j^2 / (\tau^2 + s_j^2)^2`. The gradient
# through the adaptation comes from the implicit function theorem, and has to be that of the closed form.


def weighted(spread):
    by_evidence = 1 / (spread**2 + s**2)
    return by_evidence / by_evidence.sum(), (s * by_evidence).square() / (s * by_evidence).square().sum()


def slope(start, spread, method="cholesky"):
    def adapted(theta, start):
        return (((y - theta) / s).square() + ((theta - start) / spread).square()).sum() / 2

    def left(theta, start):
        return ((y - theta) / s).square().sum() / 2

    start = torch.tensor(start, dtype=y.dtype)
    return float(hypergradient(adapted, left, torch.zeros_like(y), start, method=method).gradient)


for method in ("cholesky", "conjugate_gradients"):
    closed_form = float((s**2 * (3.0 - y) / (25 + s**2) ** 2).sum())
    print(f"gradient at a start of 3 by {method}: {slope(3.0, 5.0, method):.12f}, exactly {closed_form:.12f}")
    assert abs(slope(3.0, 5.0, method) - closed_form) < 1e-12

# %%
# The fit
# -------
# :func:`~bayeskit.inference.evidence.maximize` integrates the effects of the schools out and gives the start with a
# standard error. The loss of implicit MAML is a parabola, so that two gradients tell where it is lowest.

for spread, by_evidence, by_adaptation in ((5.0, 7.851, 8.017), (20.0, 8.464, 9.235)):
    z = learned_by_evidence(y, spread)
    a, b = slope(0.0, spread), slope(1.0, spread)
    start = a / (a - b)
    print(f"spread {spread:g}: implicit MAML starts at {start:.3f}, and empirical Bayes says\n{z}")
    assert z.trusted and abs(float(z.values["mean"]) - by_evidence) < 1e-3 and abs(start - by_adaptation) < 1e-3
    evidence_weights, adaptation_weights = weighted(spread)
    assert (
        abs(float(z.values["mean"] - evidence_weights @ y)) < 1e-6 and abs(start - float(adaptation_weights @ y)) < 1e-9
    )
    assert abs(float(z.standard_errors["mean"]) - float((1 / (spread**2 + s**2)).sum()) ** -0.5) < 1e-5

# %%
# What it says
# ------------
# Adaptation leaves the loss of a task high where the report is noisy, so that implicit MAML attends to it: with a large
# spread, its weight even grows with the error of a report. Empirical Bayes gives less to noisy tasks at any spread.

figure = Figure(figsize=(7, 3.2), layout="constrained")
for panel, spread in zip(figure.subplots(1, 2, sharey=True), (5.0, 20.0), strict=True):
    for weights, marker, label in zip(weighted(spread), "os", ("empirical Bayes", "implicit MAML"), strict=True):
        panel.plot(s.numpy(), weights.numpy(), marker, label=label)
    panel.set(xlabel="standard error of a report", title=f"spread {spread:g}")
figure.axes[0].set(ylabel="weight of the task", ylim=(0, None))
figure.axes[0].legend()
noisiest, most_precise = int(s.argmax()), int(s.argmin())
assert weighted(20.0)[1][noisiest] > weighted(20.0)[1][most_precise]
assert weighted(20.0)[0][noisiest] < weighted(20.0)[0][most_precise]

# %%
# How strong the penalty should be, the hierarchy can ask, too. Adaptation cannot: the sum of loss and penalty of all
# tasks, as a log density with its constant, rises without a bound as the spread goes to zero. The evidence is bounded,
# but eight schools do not tell their spread, and :func:`~bayeskit.inference.evidence.maximize` says so. A prior on the
# spread keeps it from zero :cite:p:`chung2013`.

joint = [float(-(((y - 8).square() / (t**2 + s**2)).sum() / 2) - 8 * np.log(t)) for t in (10.0, 1.0, 0.1, 0.01)]
assert joint == sorted(joint)
both = learned_by_evidence(y, over=["mean", "spread"])
print(both)
assert not both.trusted and "no interior maximum by spread" in both.warnings[0]
print(learned_by_evidence(y, over=["mean", "spread"], prior=True))

# %%
# A failure on purpose
# --------------------
# Let the first school report up to 150 points. Either learner follows it, as both are weighted means. Weights of losses
# that are learned, too, are one answer to tasks that are unlike the others :cite:p:`lee2020`; a heavy-tailed prior over
# tasks is the hierarchy's own. With Student's t distribution, the estimate follows at first and then returns.
#
# Laplace's approximation is not exact now: the log evidence is off by a nat, and the mean by little where the effect of
# the first school has one mode. At 70 and 80 points it has two, one beside the other schools and one beside its report.
# The approximation jumps from one to the other, and the result says that it is not to be trusted.


def by_quadrature(y, mean, spread, freedom):
    total = 0.0
    for effect, error in zip(y.tolist(), s.tolist(), strict=True):
        ends = min(mean, effect) - 60, max(mean, effect) + 60
        both = quad(
            lambda x, at=effect, sd=error: norm.pdf(at, x, sd) * student.pdf(x, freedom, mean, spread),
            *ends,
            limit=300,
            points=[mean, effect],
        )
        total += np.log(both[0])
    return total


reports = (28.0, 80.0, 150.0) if is_small() else (28.0, 45.0, 60.0, 70.0, 80.0, 100.0, 125.0, 150.0)
normal, heavy, exactly = {}, {}, {}
for report in reports:
    changed = torch.cat([torch.tensor([report], dtype=y.dtype), y[1:]])
    normal[report] = learned_by_evidence(changed, 5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccuracyWarning)  # of two modes: the result is not trusted, as printed below
        heavy[report] = learned_by_evidence(changed, 5.0, 4.0)
    peak = minimize_scalar(lambda m, y=changed: -by_quadrature(y, m, 5.0, 4.0), bounds=(0, 20), method="bounded")
    exactly[report] = peak.x
    means = [float(found[report].values["mean"]) for found in (normal, heavy)]
    trust = "" if heavy[report].trusted else " (not trusted)"
    print(f"report {report:3g}: normal {means[0]:.2f}, heavy-tailed {means[1]:.2f}{trust}, exactly {peak.x:.2f}")
    print(f"  log evidence with heavy tails {heavy[report].log_evidence:.2f}, exactly {-peak.fun:.2f}")
    assert heavy[report].trusted == (report not in (70, 80))
    assert not heavy[report].trusted or abs(means[1] - peak.x) < 0.1 * float(heavy[report].standard_errors["mean"])
assert normal[150.0].values["mean"] > normal[28.0].values["mean"] + 9
assert heavy[150.0].values["mean"] < heavy[28.0].values["mean"]

outlier = Figure(figsize=(7, 3.2), layout="constrained")
axes = outlier.subplots()
for found, style, label in ((normal, "C0o-", "normal tasks"), (heavy, "C1s", "heavy-tailed tasks")):
    fine = [report for report in found if found[report].trusted]
    axes.plot(fine, [float(found[report].values["mean"]) for report in fine], style, label=label)
axes.plot(list(exactly), list(exactly.values()), "C2:", label="heavy-tailed tasks by quadrature")
axes.set(xlabel="report of the first school", ylabel="estimated mean of all schools")
axes.legend()

# %%
# Try it on yours
# ---------------
# Replace ``schools`` by a Pyro model with a plate of tasks, and name the sites that all tasks share.
#
# .. code-block:: python
#
#    found = evidence.maximize(bk.Target.from_pyro(schools, y, s), over=["mean", "spread"], prior=True)
#    print(found.values, found.standard_errors, found.trusted)
#
# Look at ``found.warnings``: they name a site without an interior maximum, and a posterior of a task that has two
# modes. :func:`~bayeskit.inference.hypergradient` is for losses that are no likelihoods. With few tasks,
# sample the shared sites instead of maximising over them.
#
# Where to go next: :doc:`empirical_bayes` compares the maximum of the evidence with an average over the scale,
# :doc:`eight_schools_by_every_estimator` has the evidence of the whole hierarchy.
