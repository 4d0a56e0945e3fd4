"""The vaguer the prior of an effect, the more the data speak for themselves in a test of the effect.

Title: Vague priors in Bayes factors: the Lindley-Bartlett paradox
Subject: Evidence and model choice
Made in: an error that {cite:t}`bartlett1957` shows and {cite:t}`kass1995` warn of
Verdict: fails
Number: an estimate at 3 standard errors from zero has the log Bayes factor 1.90 against zero with prior sd 1, and -2.41
    with sd 1,000
Page: evidence/nested_sampling
"""

from scipy.stats import norm


def log_bayes_factor(z, sd):
    """Return the log evidence of theta ~ N(0, sd^2) against theta = 0, for z ~ N(theta, 1)."""
    return norm.logpdf(z, scale=(1 + sd**2) ** 0.5) - norm.logpdf(z)


found = 3, log_bayes_factor(3.0, 1.0), 1, log_bayes_factor(3.0, 1000.0), 1000
assert found[1] > 0 > found[3]
