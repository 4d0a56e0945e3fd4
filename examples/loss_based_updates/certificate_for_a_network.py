r"""
PAC-Bayes certificate of a neural network: a bound on its error on new images
=============================================================================

**What you will learn:** how a posterior over the weights of a network gets an upper limit of its error on new images
that holds with 95 % probability, what that limit costs, and how to obtain one that is worthless.

A test set measures the error of one network. A PAC-Bayes certificate bounds the mean error of a *posterior* of networks
from the data that trained it, for whatever posterior you come up with: the price is its divergence from a prior.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy

from bayeskit.errors import SettingsError
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import (
    GibbsPosterior,
    certify,
    generalization_gap,
    losses,
    pac_bayes_certificate,
)

# %%
# An exact twin
# -------------
# A coin shows heads in 20 of 100 tosses. Under a uniform prior its chance of heads has the posterior Beta(21, 81), and
# a toss of a coin drawn from it predicts the next toss: wrong with a chance of .32 on the tosses seen. With probability
# 95 % over the tosses it is wrong with a chance of at most .52 on new ones :cite:p:`maurer2004`,
#
# .. math:: \mathrm{kl}(\hat L \| L) \le \frac{\mathrm{KL}(\rho \| \pi) + \log(2 \sqrt n / \delta)}{n}.

one, chance = torch.ones((), dtype=torch.float64), 21 / 102
divergence = float(kl_divergence(dist.Beta(21 * one, 81 * one), dist.Beta(one, one)))
coin = pac_bayes_certificate(0.2 * (1 - chance) + 0.8 * chance, divergence, 100)
print(coin)
assert abs(coin.bound - 0.519304) < 1e-6

# %%
# The expected gap between new and own data needs no inequality: for a Gibbs posterior it *is* the information that data
# and parameter have about each other, over the weight :cite:p:`aminian2021`. For ten data of unit variance, the squared
# error about an unknown mean, and a weight of ``gamma / 10`` a datum:

x = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
for gamma, known in ((1.0, 2 / 15), (5.0, 2 / 11), (20.0, 8 / 41)):
    found = generalization_gap(GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=2 * gamma / 10))
    print(f"gamma {gamma:4.0f}: gap {2 * found.gap:.6f}, {found.information:.4f} nats")
    assert abs(2 * found.gap - known) < 1e-12

# %%
# Before the data
# ---------------
# Images of digits, 8 by 8. A prior about the weights at which training starts knows nothing, and every posterior that
# reads digits is thousands of nats away from it. So half of the images make a better prior, about a network trained on
# them; they are not certified. The third part is for a test that a certificate does not need.

digits = load_digits()
generator = torch.Generator().manual_seed(0)
order = torch.randperm(1797, generator=generator)
images, labels = torch.as_tensor(digits.data / 16, dtype=torch.float32)[order], torch.as_tensor(digits.target)[order]
test, before, ours = ((images[part], labels[part]) for part in (slice(360), slice(360, 1078), slice(1078, None)))
hidden, spread, steps = 32, 0.03, 400 if is_small() else 600
start = torch.randn(64 * hidden + hidden + hidden * 10 + 10, generator=generator) / math.sqrt(32)

# %%
# The model
# ---------
# A network with one hidden layer, whose weights :math:`w` are one vector with the prior :math:`N(w_0, .03^2)`, and a
# posterior :math:`N(m, \operatorname{diag} s^2)`. The loss that is certified counts misread images.


def scores(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    first, bias, second, last = weights.split([64 * hidden, hidden, hidden * 10, 10])
    return torch.relu(x @ first.reshape(64, hidden) + bias) @ second.reshape(hidden, 10) + last


def errors(weights: torch.Tensor, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (scores(weights, data[0]).argmax(-1) != data[1]).float()


def trained(prior: Normal, data: tuple[torch.Tensor, torch.Tensor], price: float) -> Normal:
    """Minimise the mean log loss of draws plus ``price`` times the divergence from the prior."""
    mean, log_spread = (x.clone().requires_grad_() for x in (prior.mean, prior.stddev.log()))
    optimizer = torch.optim.Adam([mean, log_spread], 4e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        posterior = Normal(mean, log_spread.exp())
        noise = torch.randn(mean.shape, generator=generator)
        loss = cross_entropy(scores(mean + noise * log_spread.exp(), data[0]), data[1])
        (loss + price * kl_divergence(posterior, prior).sum()).backward()
        optimizer.step()
    return Normal(mean.detach(), log_spread.exp().detach())


# %%
# The fit
# -------
# The prior is trained on its half without regard to a divergence, the posterior on the other half.

wide = Normal(start, torch.full_like(start, spread))
prior = Normal(trained(wide, before, 0.0).mean, wide.stddev)
posterior = trained(prior, ours, 1 / (4 * len(ours[1])))
num_draws = 500 if is_small() else 1000
certificate = certify(posterior, prior, errors, ours, num_draws=num_draws)
by_image = torch.stack([errors(posterior.sample(), test) for _ in range(100)]).mean(0)
tested, error = float(by_image.mean()), float(by_image.std()) / 360**0.5
print(certificate)
print(f"on test images: {tested:.3f} +- {error:.3f}; of the mean {float(errors(posterior.mean, test).mean()):.3f}")
print(certificate.promise)
assert certificate.trusted and tested < certificate.bound < 0.2

# %%
# What it says
# ------------
# The limit is a few times the error. A good part of the price is the number of images: even at divergence zero,
# ``log(2 sqrt(n) / .05)`` is seven nats. The certificate of the prior that knows nothing is right, and says little.

blind = certify(trained(wide, ours, 1 / len(ours[1])), wide, errors, ours, num_draws=num_draws)
free = pac_bayes_certificate(certificate.risk, 0.0, len(ours[1]))
print(
    f"prior at the start: {blind.divergence:.0f} nats, certificate {blind.bound:.3f}; without a price {free.bound:.3f}"
)

# %%
# **A failure on purpose.** Labels are drawn at random, so that no network is right more often than one time in ten. A
# "prior" trained on the very data that it certifies is not one: the divergence is small, and the certificate false.

wrong = (ours[0], torch.randint(10, ours[1].shape, generator=generator))
cheat = Normal(trained(wide, wrong, 0.0).mean, torch.full_like(start, 0.003))
false = certify(cheat, cheat, errors, wrong, num_draws=num_draws)
random = (test[0], torch.randint(10, test[1].shape, generator=generator))
truth = float(errors(cheat.mean, random).mean())
print(f"'at most {false.bound:.3f}', and on new images {truth:.3f}")
assert false.bound < truth - 0.1

# %%
# A loss without a limit has no certificate: one image might cost more than any number of others have shown.

try:
    certify(dist.Normal(one, 0.1), dist.Normal(one, 1.0), losses.HalfSquared(), x)
except SettingsError as refusal:
    print(refusal)

figure = Figure(figsize=(7, 2.6), layout="constrained")
axes = figure.subplots()
rows = {"prior of other images": (certificate, tested), "prior made of the data": (false, truth)}
for place, (found, new) in enumerate(rows.values()):
    axes.plot([found.risk, found.bound], [place, place], color="C0")
    axes.plot(found.risk, place, "o", color="C0", label="error on the certified images" if not place else None)
    axes.plot(found.bound, place, "|", color="C0", markersize=16, label="certificate" if not place else None)
    axes.plot(new, place, "x", color="C1", markersize=9, label="error on new images" if not place else None)
axes.set_yticks([0, 1], list(rows))
axes.set(xlabel="share of misread images", xlim=(0, 1), ylim=(1.5, -0.5))
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Any two torch distributions with a known divergence will do, and any function ``(parameter, data) -> (n,)`` with
# values in a known range. Keep the prior's data and the certified data apart. For draws of a sampler take
# :func:`~bayeskit.inference.generalized.divergence_from_prior`, with the evidence, and for runs of SGLD
# :func:`~bayeskit.inference.generalized.path_information`.
#
# .. code-block:: python
#
#    certificate = certify(posterior, prior, errors, ours, num_draws=500)
#    print(certificate, certificate.trusted, certificate.promise)
#
# Where to go next: :doc:`safe_bayes_against_coverage` chooses the weight of a Gibbs posterior,
# :doc:`evidence_is_cross_validation` compares models on data left out.
