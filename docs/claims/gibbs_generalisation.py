"""A Gibbs posterior's loss of new data exceeds that of its own by its symmetrised information over its weight.

Title: Generalisation error of the Gibbs algorithm
Subject: Information and generalisation
Made in: abstract of {cite:t}`aminian2021`
Verdict: holds
Number: of a normal mean from ten data at inverse temperature one both are 0.1333
Page: loss_based_updates/certificate_for_a_network
"""

import pyro.distributions as dist
import torch

from bayeskit.inference.generalized import GibbsPosterior, generalization_gap, losses

x = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=2 * 1.0 / 10)
by_information = 2 * generalization_gap(posterior).gap

# Directly: w = shrunken mean + noise, whose gap is twice the covariance of w with one datum.
precision = 1 + 2 * 1.0
directly = 2 * (2 * 1.0 / 10) / precision
found = (by_information,)
assert abs(by_information - directly) < 1e-9
