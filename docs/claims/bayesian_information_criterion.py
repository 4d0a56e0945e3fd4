"""Schwarz's criterion tends to the log evidence as data grow.

Title: Bayesian information criterion (BIC) and the log evidence
Subject: Evidence and model choice
Made in: readings of {cite:t}`schwarz1978`, whose proposition leaves a remainder that is bounded, not one that vanishes;
    {cite:t}`kass1995` say when it is small
Verdict: holds if the prior is worth one datum and is centred at the estimate
Number: at a million data its error is 0.000 nats under a prior of the sd of one datum at the estimate, 2.303 nats under
    ten times that sd, and 2.000 nats under a prior of the sd of one datum whose mean is 2 sds from the estimate
"""

import math


def error(n, sd, distance):
    """Return the criterion less the log evidence of n data ~ N(theta, 1), theta ~ N(their mean + distance, sd^2)."""
    log_likelihood = -0.5 * n * math.log(2 * math.pi) - 0.5 * n  # at its maximum, the data having variance one
    log_evidence = log_likelihood - 0.5 * math.log(1 + n * sd**2) - 0.5 * distance**2 / (sd**2 + 1 / n)
    return log_likelihood - 0.5 * math.log(n) - log_evidence


found = error(10**6, 1.0, 0.0), error(10**6, 10.0, 0.0), error(10**6, 1.0, 2.0), 2
assert abs(found[0]) < 1e-5 < 0.1 * error(10**3, 1.0, 0.0)
for sd, distance, limit in ((10.0, 0.0, math.log(10)), (1.0, 2.0, 2.0)):  # of the error, as data grow
    assert abs(error(10**6, sd, distance) - limit) < 1e-5 and error(10**9, sd, distance) > 1.99
