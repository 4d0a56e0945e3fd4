"""The step of a solver matters to the path but hardly to the evidence of a model with a differential equation.

Title: Numerical solvers and the evidence of models with differential equations
Subject: Differential equations
Made in: practice around {cite:t}`rubanova2019`, whose published code has Euler's method in the encoder and a tolerance
    of 0.001 in the model
Verdict: fails
Number: of a decay seen three times the log evidence is 1.6324, and 1.5817 by Euler's method with four steps a unit
Page: sampling/predator_and_prey
"""

import torch
from torch.distributions import MultivariateNormal

y = torch.tensor([0.62, 0.35, 0.15], dtype=torch.float64)
times = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def log_evidence(path):
    """Of z(t) = z(0) path(t), z(0) ~ N(0, 1), seen with sd 0.1."""
    covariance = path[:, None] * path + 0.01 * torch.eye(3, dtype=torch.float64)
    return float(MultivariateNormal(torch.zeros(3, dtype=torch.float64), covariance).log_prob(y))


found = log_evidence((-times).exp()), log_evidence((1 - 1 / 4) ** (4 * times))
assert abs(found[0] - found[1]) > 0.05
assert abs(log_evidence((1 - 1 / 4096) ** (4096 * times)) - found[0]) < 1e-3
