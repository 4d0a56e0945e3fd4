"""A predictor that is invariant over environments has the lower risk in an environment unlike all of them.

Title: Invariant risk minimisation: risk in a new environment
Subject: Causes and related tasks
Made in: readings of {cite:t}`arjovsky2019`, who compare the largest risk over all environments, not that in one
Verdict: holds if the effect's own mechanism changes
Number: at a new noise variance of 100 the invariant predictor has the risk 100.0 and least squares over both
    environments 43.4; where the effect changes its sign, invariance has 1.00 and least squares 2.39
Page: evidence/invariant_causes
"""

import numpy as np

# The cause x1 ~ N(0, e2), y = x1 + N(0, e2), the effect x2 = sign y + N(0, 1); noise variances e2 of 0.04 and 1.


def moments(e2, sign=1):
    """Return E x x', E x y and E y y."""
    return np.array([[e2, sign * e2], [sign * e2, 2 * e2 + 1]]), np.array([e2, 2 * sign * e2]), 2 * e2


def risk(w, e2, sign=1):
    """Return the expected squared error."""
    xx, xy, yy = moments(e2, sign)
    return yy - 2 * w @ xy + w @ xx @ w


pooled = np.linalg.solve(*(moments(0.04)[k] + moments(1.0)[k] for k in (0, 1)))
invariant = np.array([1.0, 0.0])
found = 100, risk(invariant, 100.0), risk(pooled, 100.0), risk(invariant, 1.0, -1), risk(pooled, 1.0, -1)
assert found[2] < found[1] and found[4] > found[3]
