"""The gradient of a neural differential equation by its adjoint assumes that the parameters have converged.

Title: Neural ODE: the adjoint method away from convergence
Subject: Differential equations
Made in: readings of appendix B of {cite:t}`chen2018`, where the parameters' adjoint is zero at the end; no convergence
    is assumed
Verdict: fails
Number: far from a stationary point, where the gradient is 2.7183, the adjoint's error is 0.0000
Page: sampling/predator_and_prey
"""

import math

import torch

from bayeskit import ode

# h' = theta h, h(0) = 1, and the loss is h(1): its gradient is e. The adjoint a' = -theta a ends in a(1) = 1; the
# gradient is the integral of a h, an equation that starts from zero because it is an integral.
h_end = ode.solve(
    lambda t, h, theta: theta * h,
    torch.ones(1, 1).double(),
    torch.tensor([0.0, 1.0]).double(),
    torch.ones(1, 1).double(),
)[0, -1, 0]


def backwards(t, state, theta):
    """Run h, a and the gradient from t = 1 to 0, in the time 1 - t."""
    h, a, _ = state.unbind(-1)
    return torch.stack([-theta[..., 0] * h, theta[..., 0] * a, a * h], -1)


start = torch.stack([h_end, torch.tensor(1.0).double(), torch.tensor(0.0).double()])[None]
gradient = ode.solve(backwards, start, torch.tensor([0.0, 1.0]).double(), torch.ones(1, 1).double())[0, -1, 2]
found = float(gradient), abs(float(gradient) - math.e)
assert found[1] < 1e-4
