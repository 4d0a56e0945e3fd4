"""A classifier that mixes its density with one of the background is unsure far from the data, with a guarantee.

Title: Certified low confidence far from the data (CCU)
Subject: Likelihoods of images and outliers
Made in: {cite:t}`meinke2020`
Verdict: holds if the background is wider than the data's density
Number: at distance six the confidence of ten classes is 0.1000 with background sd three, and 1.0000 with sd one half
Page: variational_autoencoders/density_is_not_detection
"""

from scipy.stats import norm


def confidence(r, background):
    """Return the largest class probability: one within the data's N(0, 1), 1/10 in the background, equal weights."""
    inside, outside = norm.pdf(r), norm.pdf(r, scale=background)
    return (inside + outside / 10) / (inside + outside)


found = confidence(6.0, 3.0), confidence(6.0, 0.5)
assert found[0] < 0.101 and found[1] > 0.99
bound = 0.1 * (1 + 10 * norm.pdf(6.0) / norm.pdf(6.0, scale=3.0))  # for all data beyond distance six
beyond = [6 + k / 10 for k in range(200)]
assert max(confidence(r, 3.0) for r in beyond) <= bound < 0.101
assert min(confidence(r, 0.5) for r in beyond[:60]) > 0.99  # further out, both densities are zero in this arithmetic
