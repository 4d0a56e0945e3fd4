"""The gradient in a differential equation's parameter is that in its end times the integral of df/dtheta.

Title: Neural ODE: the gradient is no product of two factors
Subject: Differential equations
Made in: derivations that take the adjoint out of the integral in equation 5 of {cite:t}`chen2018`
Verdict: fails
Number: of h' = theta h, with all ones, the product is 1.7183 and the gradient 2.7183
Page: sampling/predator_and_prey
"""

import math

import torch

from bayeskit import ode

theta = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
times = torch.linspace(0.0, 1.0, 201, dtype=torch.float64)
path = ode.solve(lambda t, h, theta: theta * h, torch.ones(1, 1).double(), times, theta)[0, :, 0]
(gradient,) = torch.autograd.grad(path[-1], theta)
product = 1.0 * torch.trapezoid(path.detach(), times)  # dL/dh at the end is one, df/dtheta is h
found = float(product), float(gradient)
assert abs(found[1] - math.e) < 1e-4 and abs(found[0] - (math.e - 1)) < 1e-4
