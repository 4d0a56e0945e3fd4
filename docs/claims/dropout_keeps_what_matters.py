"""Variational dropout with the rule log alpha > 3 removes the weights that are not needed.

Title: Variational dropout: pruning by log alpha > 3
Subject: Neural networks and sparse priors
Made in: readings of {cite:t}`molchanov2017`, who measure what is removed, not what should be
Verdict: fails
Number: of null weights of a normal regression 29.8 % stay: the rule is a test at 1.041 standard errors
Page: wide_networks/weights_that_are_not_there
"""

import torch
from scipy.optimize import brentq, minimize
from scipy.stats import norm

from bayeskit.models.sparse_networks import log_uniform_divergence


def log_alpha(z):
    """Return the optimal log alpha of one weight, with estimate ``z`` and variance one."""

    def objective(point):
        mean, log_a = point
        expected = 0.5 * ((mean - z) ** 2 + mean**2 * torch.tensor(log_a).exp().item())
        return expected + float(log_uniform_divergence(torch.tensor(log_a, dtype=torch.float64)))

    starts = ((z, -1.0), (0.5 * z, 1.0), (0.2 * z, 3.0))
    fits = [
        minimize(objective, start, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-11}) for start in starts
    ]
    return min(fits, key=lambda fit: fit.fun).x[1]


threshold = brentq(lambda z: log_alpha(z) - 3.0, 1.01, 1.1, xtol=1e-4)
found = 200 * norm.sf(threshold), threshold
assert found[0] > 25
