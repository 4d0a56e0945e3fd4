"""Sampled softmax gives an unbiased estimate of the log probability and of its gradient.

Title: Sampled softmax: bias of the log probability
Subject: Models without a normaliser
Made in: introductions to {cite:t}`bengio2008`, whose own text says that the bias vanishes as samples grow
Verdict: fails
Number: the log normaliser of five words is low by 0.1596 nats with one sample and by 0.0276 with five: IWAE's bound
Page: sampling/sampled_softmax
"""

import itertools

import torch

energy = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=torch.float64)  # the true word is the first
q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
log_normaliser = energy.logsumexp(0)


def shortfall(m):
    """Return by how much the mean over all samples of ``m`` words is below the log normaliser."""
    words = torch.tensor(list(itertools.product(range(5), repeat=m)))
    estimate = (energy[words] - q[words].log()).logsumexp(1) - torch.tensor(float(m)).log()
    return float(log_normaliser - (q[words].prod(1) * estimate).sum())


found = shortfall(1), shortfall(5)
assert found[0] > found[1] > 0.02
