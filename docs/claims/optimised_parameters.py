"""The scores of cross-validation still sum to the log evidence where parameters are optimised, not integrated out.

Title: Evidence as cross-validation with optimised parameters
Subject: Evidence and model choice
Made in: a question that readers of {cite:t}`fong2020` leave open; their own identity integrates
Verdict: fails
Number: with one parameter, a normal mean, the sum is low by 0.2886 nats on average, half of Euler's constant, however
    many data, if the noise is the model's; at a million data whose residuals have twice the model's sd, by 20.91 nats
Page: loss_based_updates/evidence_is_cross_validation
"""

import numpy as np


def shortfall(n, sd):
    """Return log evidence less the sum of scores: theta ~ N(0, 1), model y ~ N(theta, 1), data y ~ N(theta, sd^2)."""
    v = 1 / (1 + np.arange(n))  # variance of theta given k data; all held-out sets of one size have one expected score
    square = sd**2 + v**2 * (sd**2 * np.arange(n) + 1)  # expected, of a new datum about the optimum
    return 0.5 * (square - square / (1 + v) - np.log1p(v)).sum()


found = shortfall(10**6, 1.0), shortfall(10**6, 2.0)
assert abs(found[0] - np.euler_gamma / 2) < 1e-5 and abs(shortfall(10**4, 1.0) - found[0]) < 1e-4
rng = np.random.default_rng(0)
theta = rng.standard_normal((200_000, 1))
y, k = theta + 2 * rng.standard_normal((200_000, 5)), np.arange(5)
optimum = (y.cumsum(1) - y) / (k + 1)  # of the data before
gap = 0.5 * ((y - optimum) ** 2 * (1 - 1 / (1 + 1 / (k + 1))) - np.log1p(1 / (k + 1))).sum(1)
assert abs(gap.mean() - shortfall(5, 2.0)) < 5 * gap.std() / len(gap) ** 0.5 and found[1] > 15
