r"""
Which experiment tells most
===========================

**What you will learn:** how much an experiment is expected to tell before it is made, which design tells most about
what you want to know and not about the rest, and why a popular bound cannot tell good experiments apart.

What an experiment tells is the mutual information of its data and the unknowns: the expected divergence of the
posterior from the prior :cite:p:`lindley1956`. It needs no data, only a model that can be simulated. Estimates of it
are nested, one Monte Carlo mean inside another, and biased :cite:p:`rainforth2018`. So two of them are made, one too
low and one too high, and the truth is between them.
"""

# sphinx_gallery_thumbnail_number = 2
import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import best_design, information_gradient

DOUBLE = torch.float64
experiments = {"num_outer": 1000 if is_small() else 5000}

# %%
# An exact twin
# -------------
# A line is measured at four places between -1 and 1, with noise. With a standard normal prior on level and slope, and
# the rows :math:`(1, x_i)` of :math:`X`, the information is :math:`\frac12 \log\det(I + X X^\top / \sigma^2)`.


def line(places):
    level = pyro.sample("level", dist.Normal(torch.zeros_like(places[0]), 1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros_like(places[0]), 1.0))
    with pyro.plate("places", len(places)):
        pyro.sample("y", dist.Normal(level + slope * places, 0.5))


def exactly(places, noise=0.25):
    x = torch.stack([torch.ones_like(places), places], 1)
    return 0.5 * torch.logdet(torch.eye(2, dtype=DOUBLE) + x.T @ x / noise)


both = {"of": ["level", "slope"], "about": ["y"]}
for name, places in (
    ("all at 0.2", [0.2] * 4),
    ("spread out", [-1.0, -0.3, 0.3, 1.0]),
    ("at the ends", [-1, -1, 1, 1]),
):
    places = torch.tensor(places, dtype=DOUBLE)
    found = bk.information(line, places, **both, **experiments)
    print(f"{name:12}: {found}, exactly {float(exactly(places)):.4f}")
    assert found.trusted and found.gap < 0.01 and abs(found.value - float(exactly(places))) < 5 * found.standard_error

# %%
# The model is called without data, and whatever it draws at ``y`` is the experiment. The gradient by the design is that
# of the closed form, and a climb along it ends where the line is held best: at the ends.

start = torch.tensor([-0.4, -0.1, 0.2, 0.3], dtype=DOUBLE)
slope = information_gradient(line, start, **both, **experiments)
print("gradient:", slope.gradient, "\nexactly: ", torch.func.grad(exactly)(start))
assert bool(((slope.gradient - torch.func.grad(exactly)(start)).abs() < 5 * slope.standard_error).all())
climbed = best_design(line, start, **both, within=(-1.0, 1.0), num_steps=40 if is_small() else 100)
print(f"from {climbed.start.value:.3f} to {climbed.information.value:.3f} nats at {climbed.design.tolist()}")
assert float(exactly(climbed.design)) > float(exactly(torch.tensor([-1, -1, 1, 1], dtype=DOUBLE))) - 0.05

# %%
# What it says: the question decides
# ----------------------------------
# A pulse is answered by yes or no; answers turn from one to the other at an unknown threshold, a standard normal
# variable, with an unknown steepness, a log-normal one. To learn the threshold, two pulses have to be where it probably
# is. To learn the steepness, they do best far from each other, or both at one place. Sites that are not asked for are
# integrated out. The twin sums over the four answers and integrates by quadrature.


def answers(pulses):
    threshold = pyro.sample("threshold", dist.Normal(torch.zeros_like(pulses[0]), 1.0))
    steepness = pyro.sample("steepness", dist.LogNormal(torch.ones_like(pulses[0]), 0.7))
    with pyro.plate("pulses", len(pulses)):
        pyro.sample("answer", dist.Bernoulli(logits=steepness * (pulses - threshold)))


grid = torch.linspace(-6, 6, 401, dtype=DOUBLE)
weights = dist.Normal(0.0, 1.0).log_prob(grid).exp()
weights = weights / weights.sum()
sharp = (1 + 0.7 * grid).exp()


def entropy(p):
    return -torch.xlogy(p, p).sum(-1)


def by_quadrature(pulses, of):
    yes = torch.sigmoid(sharp[:, None, None] * (pulses - grid[:, None]))  # (steepness, threshold, pulses)
    table = torch.stack([1 - yes, yes], -1)
    p = torch.einsum("sta,stb->stab", table[:, :, 0], table[:, :, 1]).flatten(2)
    known = torch.einsum("sta,s->ta" if of == "threshold" else "sta,t->sa", p, weights)
    return float(entropy(weights @ known) - weights @ entropy(known))


distances = torch.linspace(0.0, 2.0, 3 if is_small() else 7, dtype=DOUBLE)
found = {of: [] for of in ("threshold", "steepness")}
for of, distance in ((of, distance) for of in found for distance in distances):
    pulses = torch.stack([-distance, distance])
    at = bk.information(answers, pulses, of=[of], about=["answer"], **experiments)
    found[of].append(at)
    truth = by_quadrature(pulses, of)
    print(
        f"{of:9} with pulses at +-{float(distance):.2f}: {at.value:.4f} +- {at.standard_error:.4f}, exactly {truth:.4f}"
    )
    assert at.lower - 5 * at.lower_error < truth < at.upper + 5 * at.upper_error and at.gap < 0.02

figure = Figure(figsize=(7, 3.2), layout="constrained")
for axes, of in zip(figure.subplots(1, 2), found, strict=True):
    fine = torch.linspace(0.0, 2.0, 50, dtype=DOUBLE)
    axes.plot(fine, [by_quadrature(torch.stack([-d, d]), of) for d in fine], "C2-", label="quadrature")
    axes.errorbar(
        distances, [x.value for x in found[of]], [2 * x.standard_error for x in found[of]], fmt="o", capsize=3
    )
    axes.set(title=of, xlabel="pulses at plus and minus", ylabel="information, in nats")

# %%
# A failure on purpose
# --------------------
# The contrastive bound with draws from the prior, as InfoNCE :cite:p:`oord2018`, compares the unknowns of an experiment
# with ``num_inner`` others. It cannot exceed the logarithm of their number and one :cite:p:`foster2020`. With 15 draws
# it says 2.77 nats for every good instrument, and the upper bound is far off. The result says its limit, and that it is
# not to be trusted. Draws that are fitted to the data of each experiment have a limit, too, but out of reach.


def instrument(precision):
    theta = pyro.sample("theta", dist.Normal(torch.zeros_like(precision), 1.0))
    pyro.sample("y", dist.Normal(theta, 1 / precision))


of_one = {"of": ["theta"], "about": ["y"], "num_inner": 15, **experiments}
lows, truths, precisions = [], [], torch.tensor([1.0, 3.0, 10.0, 30.0, 100.0, 300.0], dtype=DOUBLE)
for precision in precisions:
    poor = bk.information(instrument, precision, proposal="prior", **of_one)
    good = bk.information(instrument, precision, **of_one)
    lows.append(poor.lower)
    truths.append(0.5 * math.log1p(float(precision) ** 2))
    print(
        f"precision {float(precision):3g}: from the prior {poor.lower:.3f} of at most {poor.limit:.3f}, fitted {good}"
    )
    assert good.trusted and abs(good.value - truths[-1]) < 5 * good.standard_error + good.gap
    assert abs(poor.limit - math.log(16)) < 1e-6 and poor.lower < poor.limit
assert not poor.trusted and "near its limit" in poor.warnings[0] and truths[-1] > 2 * poor.limit

limits = Figure(figsize=(7, 3.2), layout="constrained")
axes = limits.subplots()
axes.semilogx(precisions, truths, "C2-", label="exactly")
axes.semilogx(precisions, lows, "C1o", label="contrastive bound, prior draws")
axes.axhline(math.log(16), color="C1", linestyle=":", label="its limit")
axes.set(xlabel="precision of the instrument", ylabel="information, in nats")
axes.legend()

# %%
# Try it on yours
# ---------------
# Take a model that you have fitted, leave out its data or give data of the planned shape, and name what you want to
# know: ``bk.information(model, *args, of=["effect"], about=["y"])``. Look at ``gap`` and ``warnings`` before ``value``.
#
# .. code-block:: python
#
#    found = bk.information(answers, torch.tensor([-0.5, 0.5], dtype=DOUBLE), of=["threshold"], about=["answer"])
#    print(found, found.gap, found.warnings)
#
# Where to go next: :doc:`/gallery/evidence/eight_schools_by_every_estimator` uses the data once they are there.
