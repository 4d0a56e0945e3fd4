"""Importance sampling has the least variance if draws are in proportion to density times the integrand's size.

Title: Importance sampling: the proposal of least variance
Subject: Monte Carlo and calibration
Made in: section 3.3 of {cite:t}`robert2004`; importance sampling is that of {cite:t}`kahn1953`
Verdict: holds
Number: of three values the variance is 13.09 by plain draws, 10.44 in proportion to the size alone, 5.44 to the product
"""

import numpy as np
from scipy.optimize import minimize

p, f = np.array([0.7, 0.2, 0.1]), np.array([1.0, -4.0, 10.0])


def variance(q):
    """Return the variance of f p / q under q."""
    q = q / q.sum()
    return ((f * p) ** 2 / q).sum() - (f @ p) ** 2


best = minimize(lambda logits: variance(np.exp(logits)), np.zeros(3), method="Nelder-Mead", options={"fatol": 1e-12})
found = variance(p), variance(np.abs(f)), variance(p * np.abs(f))
assert abs(best.fun - found[2]) < 1e-6
