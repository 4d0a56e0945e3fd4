r"""
Bayesian change-point detection without sampling: the Nile in 1898
==================================================================

**What you will learn:** how to compare models with and without change points, and to see all places that are plausible,
without drawing a single sample.

The flow of the Nile at Aswan was measured each year from 1871 to 1970 :cite:p:`cobb1978`. Around 1898 it fell, perhaps
because of a dam, perhaps because there was less rain.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import multivariate_t

from bayeskit.gallery import is_small
from bayeskit.models.discrete.sequences import (
    ChangePoints,
    NegativeBinomialLengths,
    NormalSegments,
    NumberOfChanges,
    load_nile,
    plot_change_points,
)

# %%
# The model
# ---------
# Changes cut the years into segments. Within a segment :math:`s` the flow is normal, with a mean and a variance of its
# own,
#
# .. math::
#
#    \sigma_s^2 \sim \mathrm{InverseGamma}(2, 20000), \qquad
#    \mu_s \mid \sigma_s^2 \sim N(1000, \sigma_s^2 / 0.01), \qquad
#    y_t \mid \mu_s, \sigma_s^2 \sim N(\mu_s, \sigma_s^2),
#
# both of which integrate out. Any number of changes up to five is equally probable, and given their number, so are all
# places. A dynamic programme sums over every way to cut.

years, flow = load_nile()
normal = NormalSegments(mean=1000.0, precision=0.01, shape=2.0, rate=20_000.0)
posterior = ChangePoints(flow, normal, NumberOfChanges.up_to(5))

# %%
# Before the data
# ---------------
# Five series that the prior thinks of as ordinary. It is vague and knows nothing of rivers: levels differ by thousands,
# and a normal density allows less than no water. The hundred years of data will outweigh that.

rng = np.random.default_rng(0)
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
axes = prior_predictive.subplots()
for _ in range(5):
    places = np.sort(rng.choice(np.arange(1, 100), rng.integers(6), replace=False))
    series = []
    for length in np.diff([0, *places, 100]):
        variance = 20_000.0 / rng.gamma(2.0)
        mean = rng.normal(1000.0, (variance / 0.01) ** 0.5)
        series.append(rng.normal(mean, variance**0.5, length))
    axes.plot(years, np.concatenate(series), linewidth=1)
axes.set(xlabel="year", ylabel="flow (10$^8$ m$^3$)", title="five series from the prior")

# %%
# An exact twin
# -------------
# Twelve years can be cut in few enough ways to add them up one by one. A segment's probability is then a multivariate
# Student-t density: a formula that the dynamic programme does not use.


def log_probability_of_segment(y: torch.Tensor) -> float:
    spread = 20_000.0 / 2.0 * (np.eye(len(y)) + 1 / 0.01)
    return float(multivariate_t(np.full(len(y), 1000.0), spread, df=4.0).logpdf(y))


short = flow[22:34]
by_number = []
for number in range(6):
    cuts = [
        sum(log_probability_of_segment(short[a:b]) for a, b in itertools.pairwise([0, *places, 12]))
        for places in itertools.combinations(range(1, 12), number)
    ]
    by_number.append(logsumexp(cuts) - math.log(len(cuts)))
by_hand = logsumexp(by_number) - math.log(6)
programme = float(ChangePoints(short, normal, NumberOfChanges.up_to(5)).log_evidence)
print(f"twelve years: log evidence {programme:.9f}, one by one {by_hand:.9f}")
assert abs(programme - by_hand) < 1e-9

# %%
# The fit
# -------
# There is nothing to converge. The Bayes factor for one change against none is exact, and so is the probability of each
# place. With a single change there are 99 places, so that Student-t densities can still add them up.

none, one = (ChangePoints(flow, normal, NumberOfChanges.exactly(k)) for k in (0, 1))
factor = float(one.log_evidence - none.log_evidence)
places = [log_probability_of_segment(flow[:a]) + log_probability_of_segment(flow[a:]) for a in range(1, 100)]
by_hand = logsumexp(places) - math.log(99) - log_probability_of_segment(flow)
print(f"log Bayes factor for one change: {factor:.9f}, place by place {by_hand:.9f}")
assert abs(factor - by_hand) < 1e-9
where = one.place_probabilities()
for place in where.topk(3).indices.tolist():
    print(f"last year before it {int(years[place])}: probability {float(where[place]):.4f}")

# %%
# How many changes there were depends on what was thought before, here on two priors. The first place does not.

lengths = ChangePoints(flow, normal, NegativeBinomialLengths(probability=0.02, successes=2, most=10))
print("number of changes           " + "".join(f"{k:8d}" for k in range(6)))
for name, found in (("up to five, equally likely", posterior), ("negative binomial lengths", lengths)):
    print(f"{name:28s}" + "".join(f"{float(p):8.4f}" for p in found.number_probabilities[:6]))
    print(f"    most probable: after {years[:-1][found.most_probable()].tolist()}")

# %%
# What it says
# ------------
# Whole segmentations can be drawn independently, which answers what no sum was written for: by how much did the
# mean flow fall at the first change?

draws = posterior.sample(200 if is_small() else 5000, seed=0)
falls = []
for cut in draws[draws.any(1)]:
    first = int(cut.nonzero()[0]) + 1
    rest = cut.nonzero().flatten().tolist()
    second = rest[1] + 1 if len(rest) > 1 else len(flow)
    falls.append(float(flow[:first].mean() - flow[first:second].mean()))
fall = torch.tensor(falls)
error = float(fall.std() / len(fall) ** 0.5)
print(f"the mean flow fell by {float(fall.mean()):.1f} +- {error:.1f} at the first change (10^8 m^3)")

two, exact = float((draws.sum(1) == 2).double().mean()), float(posterior.number_probabilities[2])
error = (exact * (1 - exact) / len(draws)) ** 0.5
print(f"two changes in {two:.4f} +- {error:.4f} of the draws, exactly {exact:.4f}")
assert abs(two - exact) < 4.5 * error

figure = plot_change_points(posterior, years, name="flow (10$^8$ m$^3$)")
series, places, numbers = figure.axes
series.lines[-1].set_label("posterior mean of the level")
series.legend(frameon=False)
places.set_xlabel("year")
numbers.set(xticks=range(6), xlim=(-0.6, 5.6))

# %%
# A failure on purpose
# --------------------
# One number with a slipped decimal point. Segments are normal, and a normal law cannot explain it: the wrong year
# becomes a segment of its own, with a change before and one after. A least length of five years does not help: the
# segment then takes four good years with it. The only remedies are to correct the year or to leave it out.

wrong = flow.clone()
wrong[60] *= 10
misled = ChangePoints(wrong, normal, NumberOfChanges.up_to(5))
print(f"1931 times ten: changes after {years[:-1][misled.most_probable()].tolist()}")
held = ChangePoints(wrong, normal, NumberOfChanges.up_to(5), min_length=5)
print(f"segments of five years at least: after {years[:-1][held.most_probable()].tolist()}")
assert {1930, 1931} <= set(years[:-1][misled.most_probable()].tolist())

# %%
# Try it on yours
# ---------------
# Replace ``flow``, and say with the prior of the segments what levels and spreads are ordinary.
#
# .. code-block:: python
#
#    posterior = ChangePoints(flow, normal, NumberOfChanges.up_to(5), min_length=5)
#    print(posterior.number_probabilities, years[:-1][posterior.most_probable()])
#
# Look at ``place_probabilities()``, not at the most probable places alone, and at segments of one or two data, which
# are outliers. The number of changes depends on its prior; report it for two. For counts take ``PoissonSegments``; if
# levels come back, take a hidden Markov model.
#
# Where to go next: :doc:`text_without_spaces` finds words as segments of a text, :doc:`hidden_states_of_growth` states
# that come back.
