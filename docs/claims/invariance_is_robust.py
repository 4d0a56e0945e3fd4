"""A predictor that is invariant over environments has the lower risk in an environment unlike all of them.

Made in: {cite:t}`arjovsky2019`
Verdict: fails
Number: at a new noise variance of 100 least squares has the risk 43.4 and the invariant predictor at its penalty
    limit 100.0
Page: evidence/invariant_causes
"""

import numpy as np

# The cause x1 ~ N(0, e2), y = x1 + N(0, e2), the effect x2 = y + N(0, 1); noise variances e2 of 0.04 and 1.


def moments(e2):
    """Return E x x', E x y and E y y."""
    return np.array([[e2, e2], [e2, 2 * e2 + 1]]), np.array([e2, 2 * e2]), 2 * e2


def risk(w, e2):
    """Return the expected squared error."""
    xx, xy, yy = moments(e2)
    return yy - 2 * w @ xy + w @ xx @ w


pooled = np.linalg.solve(*(moments(0.04)[k] + moments(1.0)[k] for k in (0, 1)))
invariant = np.array([1.0, 0.0])
found = 100, risk(pooled, 100.0), risk(invariant, 100.0)
assert found[1] < found[2]
