"""The mutual information of an algorithm's output and its data says by how much it overfits.

Title: Mutual information bounds on generalisation
Subject: Information and generalisation
Made in: readings of {cite:t}`xu2017`, who prove a bound from above
Verdict: holds if a bound from above is enough
Number: the mean of ten numbers with noise of variance 1 added predicts new numbers worse than its own by 0.200, and
    with variance 0.01 by 0.200; its information goes from 0.048 to 1.199 nats
"""

import math

n = 10


def gap(t):
    """Return E (w - x_new)^2 - E (w - x_train)^2 of w = mean(x) + N(0, t), x ~ N(0, 1)."""
    new = 1 + 1 / n + t
    train = 1 - 1 / n + t
    return new - train


def information(t):
    """Return I(w; x) of two normals."""
    return 0.5 * math.log1p(1 / (n * t))


found = 1, gap(1.0), 0.01, gap(0.01), information(1.0), information(0.01)
assert abs(gap(1.0) - gap(1e-9)) < 1e-9 and information(1e-9) > 9
