r"""
Martingale posteriors: Bayesian uncertainty without a prior, by predicting the data not seen
============================================================================================

**What you will learn:** how a rule that predicts the next datum gives a posterior of a mean or a quantile, why
Bayes's rule of prediction gives back Bayes's posterior, and which question the Bayesian bootstrap cannot answer.

In 1798 Cavendish weighed the Earth :cite:p:`cavendish1798`: 29 measurements of its density as a multiple of that of
water, listed by :cite:t:`stigler1977`. Had he gone on for ever, there would be no uncertainty: the mean
of all measurements would be known. So uncertainty is about measurements which are missing, and a distribution of these
is all it takes :cite:p:`fong2023`.
"""

import math

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.stats import binom
from torch.special import ndtr, ndtri

from bayeskit.gallery import is_small
from bayeskit.inference.generalized import (
    Flat,
    GibbsPosterior,
    loss_likelihood_bootstrap,
    losses,
    posterior_bootstrap,
)

# %%
# The model
# ---------
# The parameter minimises an expected loss: half the squared error for the mean, the pinball loss for
# quantiles. A rule draws :math:`x_{n+1}, x_{n+2}, \dots` one by one, each given all before, and
#
# .. math:: \theta_N = \arg\min_\theta \sum_{i=1}^{n+N} \ell(\theta, x_i)
#
# converges if the predictive distribution is a martingale, that is, if no datum that it draws itself is expected to
# change it. The law of the limit is the martingale posterior.

DENSITIES = """5.50 5.61 4.88 5.07 5.26 5.55 5.36 5.29 5.58 5.65 5.57 5.53 5.62 5.29 5.44 5.34 5.79 5.10 5.27 5.39
5.42 5.47 5.63 5.34 5.46 5.30 5.75 5.68 5.85"""
x = torch.tensor([float(word) for word in DENSITIES.split()], dtype=torch.float64)
n, sd = len(x), float(x.std())
questions = {"mean": losses.HalfSquared(), ".99 quantile": losses.Pinball(0.99)}
posteriors = {name: GibbsPosterior(Flat(), loss, x) for name, loss in questions.items()}
print(f"{n} measurements, mean {x.mean():.3f}, standard deviation {sd:.3f}")

# %%
# Before the data
# ---------------
# Where there is no prior there is no belief before the data. An urn of :math:`m` measurements that draws one and puts
# back two :cite:p:`blackwell1973` is the rule with the least to say: after a single measurement it predicts this one
# for ever. Its posterior of the mean has standard deviation :math:`\hat\sigma / \sqrt{m + 1}`, with :math:`\hat\sigma`
# that of the :math:`m` measurements: too small while there are few.

for m in (1, 5, n):
    urn_sd = float(x[:m].std(correction=0)) / math.sqrt(m + 1)
    print(f"after {m:2d} measurements: mean {x[:m].mean():.3f}, standard deviation by an urn {urn_sd:.3f}")

# %%
# An exact twin
# -------------
# Five measurements with known standard deviation :math:`\sigma`, and their mean. Bayes's predictive distribution under
# :math:`\theta \sim N(5, 0.2^2)` must give back Bayes's posterior :cite:p:`doob1949`, here with the variance of
# :math:`N` future measurements in place of infinitely many. The score-driven rule :cite:p:`holmes2023` plugs in the
# mean so far, without a prior: its variance is :math:`\sigma^2 \sum_{t>n} t^{-2}`, below the :math:`\sigma^2 / n` of a
# flat prior. The urn is the Bayesian bootstrap, with Dirichlet weights. All three have their moments in closed form.

PRIOR_MEAN, PRIOR_SD, SIGMA, FEW, HORIZON = 5.0, 0.2, 0.2, 5, 60 if is_small() else 500


def urn(data, generator):
    """Draw the next datum of each replicate ``(R, t)`` from those that it has."""
    return data.gather(1, torch.randint(data.shape[1], (len(data), 1), generator=generator))[:, 0]


def bayes_rule(data, generator):
    variance = 1 / (PRIOR_SD**-2 + data.shape[1] / SIGMA**2)
    mean = variance * (PRIOR_MEAN / PRIOR_SD**2 + data.sum(1) / SIGMA**2)
    return mean + (variance + SIGMA**2) ** 0.5 * torch.randn(len(data), generator=generator, dtype=data.dtype)


def score_driven(data, generator):
    return data.mean(1) + SIGMA * torch.randn(len(data), generator=generator, dtype=data.dtype)


def completed(rule, data, num_draws, horizon, seed):
    """Draw as many further data as the horizon says by a rule, ``(num_draws, n + horizon)``."""
    generator, n = torch.Generator().manual_seed(seed), len(data)
    room = torch.cat([data.expand(num_draws, n), data.new_zeros(num_draws, horizon)], 1)
    for size in range(n, n + horizon):
        room[:, size] = rule(room[:, :size], generator)
    return room


few, share = x[:FEW], HORIZON / (FEW + HORIZON)
bayes_variance = 1 / (PRIOR_SD**-2 + FEW / SIGMA**2)
bayes_mean = bayes_variance * (PRIOR_MEAN / PRIOR_SD**2 + float(few.sum()) / SIGMA**2)
inverse_squares = sum(t**-2 for t in range(FEW + 1, FEW + HORIZON + 1))
twins = {
    bayes_rule: ((1 - share) * few.mean() + share * bayes_mean, share**2 * (bayes_variance + SIGMA**2 / HORIZON)),
    score_driven: (few.mean(), SIGMA**2 * inverse_squares),
    urn: (few.mean(), share * few.var(correction=0) / (FEW + 1)),
}
for rule, (mean, variance) in twins.items():
    futures = completed(rule, few, 500 if is_small() else 20_000, HORIZON, seed=0)
    theta = futures.mean(1)
    print(rule.__name__)
    for what, values, exact in (("mean", theta, mean), ("variance", (theta - mean).square(), variance)):
        error = values.std() / len(theta) ** 0.5
        print(f"    {what}: {values.mean():.5f} +- {error:.5f}, exactly {exact:.5f}")
        assert abs(values.mean() - exact) < 4.5 * error

# %%
# The fit
# -------
# All measurements, two parameters, and three ways to complete the data: by the urn in the limit, which is one step
# with random weights :cite:p:`lyddon2019`; by a smooth predictive distribution, which every datum updates through a
# normal copula :cite:p:`fong2023`; and by weights that count a normal model as ten further measurements
# :cite:p:`lyddon2018`. The law of a quantile under the urn is exact: the :math:`q`-quantile is the :math:`k`-th
# smallest measurement if a binomial variable of :math:`n - 1` trials with probability :math:`q` is :math:`k - 1`.


def updated(cdf, at, size, rho=0.5):
    """Return distribution functions ``(R, G)`` after a datum that has values ``at (R, 1)`` of them."""
    rate = (2 - 1 / (size + 1)) / (size + 2)
    standard = ndtri(cdf.clamp(1e-13, 1 - 1e-13)) - rho * ndtri(at.clamp(1e-13, 1 - 1e-13))
    return (1 - rate) * cdf + rate * ndtr(standard / math.sqrt(1 - rho**2))


def smooth_laws(data, num_draws, horizon, seed, num_orders=10, num_points=200):
    """Return points ``(G,)`` and distribution functions ``(num_draws, G)`` after data and a horizon of further ones."""
    generator, scale = torch.Generator().manual_seed(seed), data.std()
    points = torch.linspace(float(data.min() - 6 * scale), float(data.max() + 6 * scale), num_points, dtype=data.dtype)
    orders = torch.stack([data[torch.randperm(len(data), generator=generator)] for _ in range(num_orders)])
    cdf = ndtr((torch.cat([orders, points.expand(num_orders, -1)], 1) - data.median()) / scale)
    for i in range(len(data)):
        cdf = updated(cdf, cdf[:, i : i + 1], i)
    cdf = cdf[:, len(data) :].mean(0).expand(num_draws, -1)
    for size in range(len(data), len(data) + horizon):
        cdf = updated(cdf, torch.rand(num_draws, 1, generator=generator, dtype=data.dtype), size)
    return points, cdf


R, LATER, normal = 150 if is_small() else 3000, 400, dist.Normal(x.mean(), sd)
points, cdf = smooth_laws(x, R, LATER, seed=2)
middles, mass = (points[1:] + points[:-1]) / 2, cdf.diff(dim=1)
drawn = {("mean", "copula"): (mass * middles).sum(1) / mass.sum(1)}
drawn[".99 quantile", "copula"] = points[(cdf < 0.99).sum(1)]
ways = {
    "urn": lambda p: loss_likelihood_bootstrap(p, R, seed=1, progress=False),
    "normal added": lambda p: posterior_bootstrap(p, R, concentration=10, centring=normal, seed=3, progress=False),
}
for question, posterior in posteriors.items():
    for way, run in ways.items():
        drawn[question, way] = run(posterior).values()["theta"].flatten()
for (question, way), theta in drawn.items():
    low, high = theta.quantile(0.025), theta.quantile(0.975)
    print(f"{question:13s}{way:13s}{theta.mean():.4f} +- {theta.std() / R**0.5:.4f}, 95 %: {low:.3f} to {high:.3f}")
law = torch.as_tensor(binom.pmf(range(n), n - 1, 0.99))
for question, exact in (("mean", x.mean()), (".99 quantile", law @ x.sort().values)):
    theta = drawn[question, "urn"]
    print(f"{question} by the urn: exactly {exact:.4f}")
    assert abs(theta.mean() - exact) < 4.5 * theta.std() / R**0.5

# %%
# A failure on purpose
# --------------------
# Which density is exceeded by one measurement in a hundred? An urn never draws what it has not seen, so that the
# largest of 29 measurements is the answer with probability :math:`.99^{28}`, and nothing above it is possible. No
# number of draws repairs this. The smooth rule and the added model do see beyond, each by what it assumes of tails.

beyond = {way: drawn[".99 quantile", way] - x.max() for way in ("urn", "copula", "normal added")}
stuck, known = float((beyond["urn"].abs() < 1e-6).double().mean()), 0.99 ** (n - 1)
error = math.sqrt(known * (1 - known) / R)
print(f"the urn answers {x.max():.2f}, the largest, in {stuck:.3f} +- {error:.3f} of the draws, exactly {known:.4f}")
assert abs(stuck - known) < 4.5 * error and float(beyond["urn"].max()) < 1e-6
for way in ("copula", "normal added"):
    above = float((beyond[way] > 1e-6).double().mean())
    print(f"{way:12s} puts {above:.2f} +- {math.sqrt(above * (1 - above) / R):.2f} above it")
    assert above > 4.5 * math.sqrt(above * (1 - above) / R)

# %%
# What it says
# ------------
# About the mean all three posteriors say about the same, about the tail they disagree. A martingale posterior needs no
# prior and no learning rate, but the rule is an assumption all the same, and it decides the more, the fewer data there
# are near what is asked. Today's value of 5.517 :cite:p:`stigler1977` lies at the upper edge of what the mean can be.

for way in beyond:
    print(f"{way}: the mean exceeds today's value with probability {(drawn['mean', way] > 5.517).double().mean():.3f}")
figure = Figure(figsize=(8, 6), layout="constrained")
top, bottom = figure.subplots(2, 1)
later = torch.arange(1, HORIZON + 1)
top.plot(later, (futures[:50].cumsum(1)[:, FEW:] / (FEW + later)).T, color="C0", linewidth=0.6, alpha=0.5)
top.set(
    xscale="log",
    xlabel="future measurements",
    ylabel="mean of all measurements",
    title="five measurements, completed by an urn: 50 futures",
)
for way in beyond:
    bottom.ecdf(drawn[".99 quantile", way].numpy(), label=way)
bottom.axvline(float(x.max()), color="grey", linestyle="--", linewidth=1, label="largest measurement")
bottom.set(xlabel=".99 quantile of the density", ylabel="posterior probability of less", xlim=(5.7, 6.15))
bottom.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Any data and any rule that draws the next datum will do, and any loss whose minimum over the completed data you can
# find. Double the horizon, and see that the spread settles. In the limit an urn is one weighting of the data, which
# :func:`~bayeskit.inference.generalized.loss_likelihood_bootstrap` does for any loss and data.
#
# .. code-block:: python
#
#    medians = completed(urn, your_numbers, num_draws=1000, horizon=20 * len(your_numbers), seed=0).median(1).values
#    posterior = GibbsPosterior(Flat(), losses.Huber(1.5), your_numbers)
#    print(loss_likelihood_bootstrap(posterior, 1000).summary())
#
# Where to go next: :doc:`newcombs_median` gives a loss a prior and a weight, :doc:`safe_bayes_against_coverage` says
# which weights cover.
