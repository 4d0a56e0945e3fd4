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
from torch import Tensor

from bayeskit.gallery import is_small
from bayeskit.inference.generalized import (
    CopulaUpdate,
    Flat,
    GibbsPosterior,
    PolyaUrn,
    Predictive,
    ScoreDriven,
    loss_likelihood_bootstrap,
    losses,
    martingale_posterior,
    normal_location,
    posterior_bootstrap,
)
from bayeskit.inference.generalized.martingale import Completed

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

for m in (1, 2, 5, n):
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


class BayesRule(Predictive):
    def init(self, data: Tensor, num_replicates: int, horizon: int) -> tuple[Tensor, int]:
        return torch.cat([data.expand(num_replicates, -1), data.new_zeros(num_replicates, horizon)], 1), len(data)

    def step(self, state: tuple[Tensor, int], *, generator: torch.Generator) -> tuple[Tensor, int]:
        room, size = state
        variance = 1 / (PRIOR_SD**-2 + size / SIGMA**2)
        mean = variance * (PRIOR_MEAN / PRIOR_SD**2 + room[:, :size].sum(1) / SIGMA**2)
        noise = torch.randn(len(room), generator=generator, dtype=room.dtype)
        room[:, size] = mean + (variance + SIGMA**2) ** 0.5 * noise
        return room, size + 1

    def completed(self, state: tuple[Tensor, int]) -> Completed:
        return Completed(state[0][:, : state[1]], None)


few, share = x[:FEW], HORIZON / (FEW + HORIZON)
bayes_variance = 1 / (PRIOR_SD**-2 + FEW / SIGMA**2)
bayes_mean = bayes_variance * (PRIOR_MEAN / PRIOR_SD**2 + float(few.sum()) / SIGMA**2)
inverse_squares = sum(t**-2 for t in range(FEW + 1, FEW + HORIZON + 1))
plug_in = ScoreDriven(normal_location(SIGMA), few.mean()[None], torch.eye(1, dtype=x.dtype) / SIGMA**2)
twins = {
    "Bayes's rule": (
        BayesRule(),
        (1 - share) * float(few.mean()) + share * bayes_mean,
        share**2 * (bayes_variance + SIGMA**2 / HORIZON),
    ),
    "score-driven": (plug_in, float(few.mean()), SIGMA**2 * inverse_squares),
    "urn": (PolyaUrn(), float(few.mean()), share * float(few.var(correction=0)) / (FEW + 1)),
}
for name, (rule, mean, variance) in twins.items():
    posterior = GibbsPosterior(Flat(), losses.HalfSquared(), few)
    found = martingale_posterior(
        posterior, rule, 500 if is_small() else 20_000, horizon=HORIZON, seed=0, progress=False
    )
    theta = found.path[-1, :, 0]
    squares = (theta - mean).square()
    errors = theta.std() / len(theta) ** 0.5, squares.std() / len(theta) ** 0.5
    print(f"{name:12s} mean {theta.mean():.4f} +- {errors[0]:.4f}, exactly {mean:.4f}; ", end="")
    print(f"variance {squares.mean():.5f} +- {errors[1]:.5f}, exactly {variance:.5f}")
    assert abs(theta.mean() - mean) < 4.5 * errors[0] and abs(squares.mean() - variance) < 4.5 * errors[1]

# %%
# The fit
# -------
# All measurements, two parameters, and three ways to complete the data: by the urn in the limit, which is one step
# with random weights :cite:p:`lyddon2019`; by a smooth predictive distribution, which every datum updates through a
# normal copula :cite:p:`fong2023`; and by weights that count a normal model as ten further measurements
# :cite:p:`lyddon2018`. The law of a quantile under the urn is exact: the :math:`q`-quantile is the :math:`k`-th
# smallest measurement if a binomial variable of :math:`n - 1` trials with probability :math:`q` is :math:`k - 1`.

R, LATER = 150 if is_small() else 3000, 400
copula, normal = CopulaUpdate(num_points=200), dist.Normal(x.mean(), sd)
ways = {
    "urn": lambda p: loss_likelihood_bootstrap(p, R, seed=1, progress=False),
    "copula": lambda p: martingale_posterior(p, copula, R, horizon=LATER, seed=2, progress=False).draws,
    "normal added": lambda p: posterior_bootstrap(p, R, concentration=10, centring=normal, seed=3, progress=False),
}
drawn = {(q, way): run(p).values()["theta"].flatten() for q, p in posteriors.items() for way, run in ways.items()}
print("                          mean                 sd      95 % interval")
for (question, way), theta in drawn.items():
    low, high = theta.quantile(0.025), theta.quantile(0.975)
    print(f"{question:13s}{way:13s}{theta.mean():.4f} +- {theta.std() / R**0.5:.4f}   {theta.std():.3f}   ", end="")
    print(f"{low:.3f} to {high:.3f}")
law = torch.as_tensor(binom.pmf(range(n), n - 1, 0.99))
for question, exact in (("mean", float(x.mean())), (".99 quantile", float(law @ x.sort().values))):
    theta = drawn[question, "urn"]
    print(f"{question} by the urn: exactly {exact:.4f}")
    assert abs(theta.mean() - exact) < 4.5 * theta.std() / R**0.5

# %%
# A failure on purpose
# --------------------
# Which density is exceeded by one measurement in a hundred? An urn never draws what it has not seen, so that the
# largest of 29 measurements is the answer with probability :math:`.99^{28}`, and nothing above it is possible. No
# number of draws repairs this. The smooth rule and the added model do see beyond, each by what it assumes of tails.

beyond = {way: drawn[".99 quantile", way] - x.max() for way in ways}
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

today = {way: float((drawn["mean", way] > 5.517).double().mean()) for way in ways}
print("the mean exceeds today's value with probability " + ", ".join(f"{p:.3f} ({way})" for way, p in today.items()))
figure = Figure(figsize=(8, 6), layout="constrained")
top, bottom = figure.subplots(2, 1)
found.plot(ax=top)
top.set_xticks(found.horizons, [str(later) for later in found.horizons])
top.minorticks_off()
top.set(ylabel="mean of all measurements", title="five measurements, completed by an urn: 50 futures")
for way in ways:
    bottom.ecdf(drawn[".99 quantile", way].numpy(), label=way)
bottom.axvline(float(x.max()), color="grey", linestyle="--", linewidth=1, label="largest measurement")
bottom.set(xlabel=".99 quantile of the density", ylabel="posterior probability of less", xlim=(5.7, 6.15))
bottom.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Any data and any loss of the package will do: give the posterior of your loss to
# :func:`~bayeskit.inference.generalized.martingale_posterior`, by default with an urn. Look at ``remaining``, the share
# of the variance beyond the horizon, and at ``drift``, which must be zero within its errors for means. A rule of your
# own is a subclass of :class:`~bayeskit.inference.generalized.Predictive` with three methods.
#
# .. code-block:: python
#
#    posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.Huber(1.5), your_numbers)
#    result = martingale_posterior(posterior, PolyaUrn(), num_draws=1000)
#    print(result, result.drift)
#
# Where to go next: :doc:`newcombs_median` gives a loss a prior and a weight, :doc:`safe_bayes_against_coverage` says
# which weights cover.
