"""Schwarz's criterion tends to the log evidence as data grow.

Title: Bayesian information criterion (BIC) and the log evidence
Subject: Evidence and model choice
Made in: readings of {cite:t}`schwarz1978`, whose proposition leaves a remainder that is bounded, not one that vanishes;
    {cite:t}`kass1995` say when it is small
Verdict: holds if the prior is worth one datum
Number: at a million data its error is 0.000 nats under a prior of the sd of one datum, and 2.303 nats under ten times
    that sd
"""

import math


def error(n, sd):
    """Return the criterion less the log evidence: n data ~ N(theta, 1) of mean zero, theta ~ N(0, sd^2)."""
    log_likelihood = -0.5 * n * math.log(2 * math.pi) - 0.5 * n  # at its maximum, the data having variance one
    log_evidence = log_likelihood - 0.5 * math.log(1 + n * sd**2)
    return log_likelihood - 0.5 * math.log(n) - log_evidence


found = error(10**6, 1.0), error(10**6, 10.0)
assert found[0] < 1e-5 and abs(found[1] - math.log(10)) < 1e-5 and error(10**12, 10.0) > 2.3
