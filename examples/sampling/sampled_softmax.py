r"""
Sampled softmax is biased: an importance-weighted bound, and SUMO's correction
==============================================================================

**What you will learn:** how far a softmax over sampled classes is from the whole one, in which direction, and how SUMO
makes its loss and its gradient unbiased.

A softmax over many classes costs a sum over all of them. Sampled softmax takes ``m`` classes from a proposal :math:`Q`
and corrects their logits by :math:`-\log Q`. The sum is estimated without bias, and its logarithm is not: in
expectation it is the importance-weighted bound :cite:p:`burda2016` of the log normalising constant.
"""

# sphinx_gallery_thumbnail_number = 1
import math

import torch
from matplotlib.figure import Figure

from bayeskit.gallery import is_small
from bayeskit.inference.objectives import ReciprocalTail, sumo_estimate

DOUBLE = torch.float64

# %%
# An exact twin
# -------------
# With five classes all :math:`5^m` samples can be listed, so expectations are sums.

logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=DOUBLE)
proposal = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=DOUBLE)
exactly, softmax = logits.logsumexp(0), logits.softmax(0)
log_weights = logits - proposal.log()


def bound(logits, m):
    """Return the expected log normalising constant and the expected probabilities of ``m`` sampled classes."""
    chosen = torch.cartesian_prod(*[torch.arange(5)] * m).reshape(-1, m)
    chance = proposal[chosen].prod(1)
    weights = (logits - proposal.log())[chosen]
    of_class = torch.nn.functional.one_hot(chosen, 5).to(DOUBLE) * weights.softmax(1).unsqueeze(-1)
    return chance @ (weights.logsumexp(1) - math.log(m)), chance @ of_class.sum(1)


for m, low, off in ((1, 0.1596, 0.236), (2, 0.0749, 0.126), (3, 0.0479, 0.082), (5, 0.0276, 0.047)):
    value, probabilities = bound(logits, m)
    print(
        f"m = {m}: log Z is low by {exactly - value:.4f}, the first probability by {softmax[0] - probabilities[0]:.4f}"
    )
    assert abs(exactly - value - low) < 5e-5 and abs(softmax[0] - probabilities[0] - off) < 5e-4

# %%
# What is trained
# ---------------
# The gradient of the expected loss is the vector of expected probabilities minus the class, and the expected
# probabilities lean toward the proposal. With one sample they are the proposal, whatever the logits.

leaning = logits.clone().requires_grad_()
(gradient,) = torch.autograd.grad(bound(leaning, 2)[0], leaning)
assert torch.allclose(gradient, bound(logits, 2)[1]) and torch.allclose(bound(logits, 1)[1], proposal)
assert bool(((gradient - softmax) * (proposal - softmax) >= -0.02).all())
print("softmax          ", softmax.tolist(), "\nexpected gradient", gradient.tolist())

# %%
# SUMO removes it
# ---------------
# The bounds of 1, 2, ... samples increase to the exact value. Their increments, up to a random stop and each divided by
# the probability of reaching it, have the sum that all of them have :cite:p:`luo2020`. Squared increments fall as
# :math:`1/k^2`, so a stop of finite mean leaves an infinite variance. A stop that is reached with probability
# :math:`1/k` and capped at 200 has a finite one, and is low by half the variance of a weight over 201 only. It costs
# seven samples on average.

tail = ReciprocalTail(switch=200, cap=200)
torch.manual_seed(0)
stops = torch.tensor([tail.sample() for _ in range(40_000 if is_small() else 400_000)])
values, gradients = [], []
for stop in stops.unique().tolist():  # all estimates of one cost at once
    count = int((stops == stop).sum())
    sampled = torch.multinomial(proposal, count * (1 + stop), replacement=True).reshape(1 + stop, count)
    given = logits.expand(count, 5).clone().requires_grad_()
    weights = (given - proposal.log()).gather(1, sampled.T).T
    estimate = sumo_estimate(weights, tail.survival(torch.arange(1, stop + 1)))
    gradients.append(torch.autograd.grad(estimate.sum(), given)[0])
    values.append(estimate.detach())
values, gradients = torch.cat(values), torch.cat(gradients)
error, errors = (v.std(0) / math.sqrt(len(values)) for v in (values, gradients))
print(f"SUMO: log Z off by {values.mean() - exactly:+.4f} +- {error:.4f}")
print("gradient off by", (gradients.mean(0) - softmax).tolist(), "\n            +-", errors.tolist())
assert abs(values.mean() - exactly) < 4.5 * error and bool(((gradients.mean(0) - softmax).abs() < 4.5 * errors).all())
left = float(proposal @ (log_weights - exactly).exp().square() - 1) / (2 * 201)
same_cost = float(exactly - bound(logits, 7)[0])
print(f"{1 + tail.mean:.1f} samples a time: the cap leaves {left:.4f}, seven samples without SUMO {same_cost:.4f}")
assert left < 1e-3 and error < same_cost / 2  # that bias would be seen

figure = Figure(figsize=(7, 3.2), layout="constrained")
axes = figure.subplots()
counts = range(1, 8)
axes.plot(counts, [float(bound(logits, m)[0] - exactly) for m in counts], "C1o-", label="sampled softmax, exactly")
axes.errorbar([1 + tail.mean], [float(values.mean() - exactly)], [2 * float(error)], fmt="C0s", capsize=3, label="SUMO")
axes.axhline(0.0, color="C2", label="whole softmax")
axes.set(xlabel="sampled classes, SUMO's on average", ylabel="bias of log Z, in nats")
axes.legend()

# %%
# A failure on purpose
# --------------------
# Negative sampling drops the normaliser: it tells a class from ``k`` samples of noise by logistic regression without
# the correction. Its optimum is not the logits but :math:`\log P / (k Q)`, which ranks classes differently.

k, log_odds = 2, torch.zeros(5, dtype=DOUBLE, requires_grad=True)
optimizer = torch.optim.LBFGS([log_odds], max_iter=100, line_search_fn="strong_wolfe")


def negative_sampling():
    optimizer.zero_grad()
    loss = torch.nn.functional.softplus(-log_odds) @ softmax + k * torch.nn.functional.softplus(log_odds) @ proposal
    loss.backward()
    return loss


optimizer.step(negative_sampling)
expected = softmax.log() - math.log(k) - proposal.log()
print("optimum", log_odds.tolist(), "\nlog P  ", softmax.log().tolist())
assert torch.allclose(log_odds.detach(), expected, atol=1e-3)
assert log_odds.argmin() != 0 and not torch.allclose(log_odds.detach(), softmax.log(), atol=0.1)

# %%
# Try it on yours
# ---------------
# Draw ``m + K`` classes a step, with ``K`` from ``tail.sample()``, and give their corrected logits to
# ``sumo_estimate``; the loss of a datum is that minus the logit of its class. Keep some first samples, ``m`` of 10 or
# more, for a smaller variance.
#
# .. code-block:: python
#
#    stop = tail.sample()
#    chosen = torch.multinomial(proposal, 1 + stop, replacement=True)
#    log_normaliser = sumo_estimate(log_weights[chosen], tail.survival(torch.arange(1, stop + 1)))
#    print(log_normaliser - logits[0])  # the loss of a datum of the first class
#
# Where to go next: :doc:`/gallery/variational_autoencoders/elbo_iwae_sumo` debiases a likelihood in the same way.
