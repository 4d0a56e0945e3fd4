"""A predictor that is invariant over environments has the lower risk in an environment unlike all of them.

Title: Invariant risk minimisation: risk in a new environment
Subject: Causes and related tasks
Made in: readings of {cite:t}`arjovsky2019`, who compare the largest risk over all environments, not that in one
Verdict: holds if the effect's own mechanism changes far enough
Number: where the effect's coefficient goes from 1 to 0.5, least squares over both environments has the risk 0.83, and
    where it goes to -1, 2.39, while invariance has 1.00: the lower risk below 0.27 and above 3.65 only
Page: evidence/invariant_causes
"""

import numpy as np
from scipy.optimize import brentq

# The cause x1 ~ N(0, e2), y = x1 + N(0, e2), the effect x2 = b y + N(0, 1); known are noise variances e2 of 0.04 and 1.


def moments(e2, b=1.0):
    """Return E x x', E x y and E y y."""
    return np.array([[e2, b * e2], [b * e2, 2 * b**2 * e2 + 1]]), np.array([e2, 2 * b * e2]), 2 * e2


def risk(w, e2, b=1.0):
    """Return the expected squared error."""
    xx, xy, yy = moments(e2, b)
    return yy - 2 * w @ xy + w @ xx @ w


pooled = np.linalg.solve(*(moments(0.04)[k] + moments(1.0)[k] for k in (0, 1)))
invariant = np.array([1.0, 0.0])
low, high = (brentq(lambda b: risk(pooled, 1.0, b) - risk(invariant, 1.0, b), *ends) for ends in ((-9, 1), (1, 9)))
found = 1, 0.5, risk(pooled, 1.0, 0.5), -1, risk(pooled, 1.0, -1.0), risk(invariant, 1.0, -1.0), low, high
assert risk(pooled, 1.0, 0.5) < risk(invariant, 1.0, 0.5) and risk(pooled, 100.0) < 0.5 * risk(invariant, 100.0)
for b in np.linspace(-8, 8, 161):
    assert (risk(invariant, 1.0, b) < risk(pooled, 1.0, b)) == (not low <= b <= high)
