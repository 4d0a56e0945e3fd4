"""Whitened by the empirical Fisher information, gradients have one mean squared length, near a minimum or far from it.

Title: Gradients whitened by the empirical Fisher information
Subject: Neural networks and sparse priors
Made in: follows from section 5 of {cite:t}`kunstner2019`: the matrix is the gradients' own second moment
Verdict: holds
Number: of three parameters the mean is 3.000000 wherever they are
Page: wide_networks/laplace_with_the_right_fisher
"""

import torch

from bayeskit.extend import new_generator

x = torch.randn(50, 3, dtype=torch.float64, generator=new_generator(0))
y = torch.poisson(x.sum(1).exp(), generator=new_generator(1))
lengths = []
for w in (torch.zeros(3), torch.ones(3), torch.tensor([2.0, -1.0, 0.5])):
    gradients = ((x @ w.double()).exp() - y)[:, None] * x  # of a Poisson regression
    empirical = gradients.T @ gradients / 50
    lengths.append(float((gradients @ empirical.inverse() * gradients).sum(1).mean()))
found = (lengths[2],)
assert max(abs(length - 3) for length in lengths) < 1e-9  # it is a trace, so the length says nothing about the fit
