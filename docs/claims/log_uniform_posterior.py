"""A log-uniform prior gives Bayesian inference for the weights of a network.

Title: Log-uniform prior for the weights of a network: an improper posterior
Subject: Neural networks and sparse priors
Made in: {cite:t}`kingma2015`; refuted by {cite:t}`hron2018`
Verdict: fails
Number: the posterior's mass at weights larger than e grows by 0.7979 for each unit of -log e, without end
Page: wide_networks/weights_that_are_not_there
"""

import math

from scipy.integrate import quad
from scipy.stats import norm


def mass(log_e):
    """Integrate N(0 | w, 1) / |w| over |w| > e, in log |w|."""
    return 2 * quad(lambda log_w: norm.pdf(math.exp(log_w)), log_e, 4.0, epsabs=1e-12, limit=200)[0]


found = ((mass(-40.0) - mass(-20.0)) / 20,)
assert abs(found[0] - 2 * norm.pdf(0)) < 1e-6  # the integral diverges: no posterior, as was soon noticed
