"""With more noise for each observation, noise-contrastive estimation becomes as exact as maximum likelihood.

Title: Noise-contrastive estimation: efficiency against the amount of noise
Subject: Models without a normaliser
Made in: {cite:t}`gutmann2012`
Verdict: holds
Number: of a normal's precision its asymptotic variance is 1.482 times as large at equal shares, 1.006 times at a
    hundred to one
Page: sampling/models_without_a_normaliser
"""

import numpy as np
from scipy.stats import norm

x = np.linspace(-14.0, 14.0, 40001)
step = x[1] - x[0]
p, q = norm.pdf(x, scale=0.5**0.5), norm.pdf(x, scale=1.5**0.5)
g = np.stack([-0.5 * x**2, np.ones_like(x)])  # slopes of the log density in the precision and in the constant


def variance(nu):
    """Return the asymptotic variance of the precision, nu noise points for one datum."""
    mean = (g * nu * q / (p + nu * q) * p).sum(1) * step
    info = (g[:, None] * g * nu * q / (p + nu * q) * p).sum(2) * step
    inverse = np.linalg.inv(info)
    return (inverse - (1 + 1 / nu) * inverse @ np.outer(mean, mean) @ inverse)[0, 0]


best = 1 / (((0.5 * x**2) ** 2 * p).sum() * step - ((0.5 * x**2 * p).sum() * step) ** 2)
found = variance(1.0) / best, variance(100.0) / best
assert 1 < found[1] < 1.01 < found[0]
