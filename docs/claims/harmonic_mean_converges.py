"""The harmonic mean of the likelihood has an error that falls as one over the root of the number of draws.

Title: Harmonic mean estimator of the marginal likelihood
Subject: Evidence and model choice
Made in: readings of {cite:t}`newton1994`, who warn that no central limit theorem need hold
Verdict: holds if the prior is narrower than the likelihood
Number: with prior sd 0.8 of the likelihood's the relative variance of a draw is 0.301, from sd 1 on it is infinite
Page: evidence/harmonic_mean_of_a_normal
"""

import math

from scipy.integrate import quad


def moment(power, sd, bound):
    """Return the posterior mean of L^-power up to |theta| = bound, y = 0 ~ N(theta, 1), theta ~ N(0, sd^2)."""
    precision = 1 + sd**-2
    log_density = 0.5 * math.log(precision / (2 * math.pi))
    return 2 * quad(lambda t: math.exp(log_density + (power - precision) * t * t / 2), 0, bound, limit=500)[0]


def relative_variance(sd, bound):
    """Return the variance of 1 / L over its squared mean."""
    return moment(2, sd, bound) / moment(1, sd, bound) ** 2 - 1


found = 0.8, relative_variance(0.8, 40.0), 1
assert relative_variance(0.8, 40.0) < 1.001 * relative_variance(0.8, 20.0)
assert moment(2, 1.0, 40.0) > 1.99 * moment(2, 1.0, 20.0)  # grows with the bound, without end
