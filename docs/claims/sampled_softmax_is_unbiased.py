"""Sampled softmax gives an unbiased estimate of the log probability and of its gradient.

Title: Sampled softmax: bias of the log probability
Subject: Models without a normaliser
Made in: introductions to {cite:t}`bengio2008`, whose own text says that the bias vanishes as samples grow
Verdict: fails
Number: the log normaliser of five words is low by 0.1596 nats with one sample and by 0.0276 with five (IWAE's bound),
    and its slopes in the words' scores are off by up to 0.236 and 0.047
Page: sampling/sampled_softmax
"""

import itertools

import torch

energy = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
log_normaliser = energy.logsumexp(0)


def shortfall(m):
    """Return by how much the mean over all samples of ``m`` words is below the log normaliser."""
    words = torch.tensor(list(itertools.product(range(5), repeat=m)))
    estimate = (energy[words] - q[words].log()).logsumexp(1) - torch.tensor(float(m)).log()
    return log_normaliser - (q[words].prod(1) * estimate).sum()


values = {m: shortfall(m) for m in (1, 5)}
slopes = {m: torch.autograd.grad(value, energy, retain_graph=True)[0] for m, value in values.items()}
bias = {m: float(slope.abs().max()) for m, slope in slopes.items()}  # the mean slope is the slope of the mean
found = values[1].item(), values[5].item(), bias[1], bias[5]
assert found[0] > found[1] > 0.02 and bias[1] > bias[5] > 0.01
assert torch.allclose(
    slopes[1], energy.softmax(0) - q
)  # one sample pushes down the words of the proposal, not the model
