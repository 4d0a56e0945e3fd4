"""The divergence from the log-uniform prior has no closed form and is matched very tightly by three fitted constants.

Title: Variational dropout: closed form of the divergence from the log-uniform prior
Subject: Neural networks and sparse priors
Made in: {cite:t}`molchanov2017`
Verdict: fails
Number: the closed form, a Poisson mean, agrees with quadrature within 0.000000 nats, the constants within 0.0094
Page: wide_networks/weights_that_are_not_there
"""

import torch
from scipy.integrate import quad
from scipy.stats import norm

from bayeskit.models.sparse_networks import log_uniform_divergence

log_alpha = torch.linspace(-8.0, 8.0, 1601, dtype=torch.float64)
closed = log_uniform_divergence(log_alpha)
k1, k2, k3 = 0.63576, 1.87320, 1.48695
fitted = k1 - k1 * (k2 + k3 * log_alpha).sigmoid() + 0.5 * (-log_alpha).exp().log1p()  # zero for large alpha


def by_quadrature(log_a):
    """Return E log |1 + sqrt(alpha) e| - log(alpha) / 2, up to its limit for large alpha."""
    root = float(torch.tensor(log_a / 2).double().exp())
    split = [-1 / root] if root > 0.03 else None
    mean = quad(lambda e: norm.pdf(e) * torch.tensor(abs(1 + root * e)).double().log().item(), -12, 12, points=split)[0]
    return mean - log_a / 2 + 0.5 * (0.5772156649015329 + torch.tensor(2.0).double().log().item())


exact = [abs(by_quadrature(a) - float(log_uniform_divergence(torch.tensor(a).double()))) for a in (-1.0, 0.0, 3.0)]
found = max(exact), float((closed - fitted).abs().max())
assert max(exact) < 1e-6 and found[1] > 0.009
