"""A sampler whose ranks in simulation-based calibration are uniform draws from the posterior.

Title: Simulation-based calibration: uniform ranks are not enough
Subject: Monte Carlo and calibration
Made in: readings of {cite:t}`talts2018`; the counterexample is one of {cite:t}`modrak2023`
Verdict: fails
Number: draws from the prior have a mean rank of 0.500 +- 0.004 of the most, and miss 0.347 nats that the data tell
Page: sampling/simulation_based_calibration
"""

import math

import torch
from scipy.stats import chisquare

from bayeskit.extend import new_generator

n, draws = 5000, 19
theta = torch.randn(n, 1, dtype=torch.float64, generator=new_generator(0))
from_prior = torch.randn(n, draws, dtype=torch.float64, generator=new_generator(1))  # whatever the data
ranks = (from_prior < theta).sum(1)
share = ranks.double() / draws
mean, error = float(share.mean()), float(share.std()) / math.sqrt(n)
found = (mean, error), 0.5 * math.log(2)  # the information that y ~ N(theta, 1) has about theta ~ N(0, 1)
assert chisquare(torch.bincount(ranks, minlength=draws + 1)).pvalue > 1e-6 and abs(mean - 0.5) < 5 * error
