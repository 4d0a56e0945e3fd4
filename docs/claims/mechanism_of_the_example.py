"""Given its cause, the response has one distribution in all environments of invariant risk minimisation's own example.

Title: Invariant causal prediction on the example of invariant risk minimisation
Subject: Causes and related tasks
Made in: readings of {cite:t}`arjovsky2019`, whose definition asks for a common mean only
Verdict: holds if the mean alone is meant
Number: for 100 rows, given the cause, the log Bayes factor of one mechanism against two is -39.5 +- 1.2, and of one
    mean with each environment's own noise 6.4 +- 0.2; given the effect, that of one mean is -15.1 +- 1.1
Page: evidence/invariant_causes
"""

import warnings

import numpy as np
import torch

from bayeskit.extend import new_generator
from bayeskit.workflows import invariant_subsets

sd = np.repeat([0.2, 1.0], 50)  # of the cause and of the response: y = x1 + N(0, sd^2), x2 = y + N(0, 1)
factors = []
for data in range(30):
    noise = torch.randn(3, 100, dtype=torch.float64, generator=new_generator(data)).numpy()
    cause = sd * noise[0]
    y = cause + sd * noise[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no mechanism is shared
        both = invariant_subsets(np.stack([cause, y + noise[2]], 1), y, sd, names=["cause", "effect"], num_draws=500)
    cause, effect = both.of("cause"), both.of("effect")
    factors.append([cause.log_bayes_factor, cause.log_bayes_factor_of_mean, effect.log_bayes_factor_of_mean])
mean, error = np.mean(factors, 0), np.std(factors, 0, ddof=1) / 30**0.5
found = 100, *zip(mean, error, strict=True)
assert mean[0] < -20 and mean[1] > 1 and mean[2] < -5
