"""Seen from a datum at x = 10, the tangent kernel of a sum of two bumps has its maximum at 7, and negative values.

Title: Neural tangent kernel of two bumps
Subject: Neural networks and sparse priors
Made in: an introduction on the web to {cite:t}`jacot2018`, "Some intuition on the neural tangent kernel"
Verdict: fails
Number: for the parameters printed the maximum is at 10.0, the kernel is 0.870 of it at seven and never below 0.500
Page: wide_networks/torch_module_to_gaussian_process
"""

import torch

from bayeskit.models.wide_networks import empirical_ntk


class Bumps(torch.nn.Module):
    """Two bumps of heights, places and an offset that are trained."""

    def __init__(self, *theta):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.tensor(theta, dtype=torch.float64))

    def forward(self, x):
        """Return the function at ``x`` of shape (n, 1)."""
        height, place, height2, place2, offset = self.theta
        return height * (-((x - place) ** 2) / 30).exp() + height2 * (-((x - place2) ** 2) / 30).exp() + offset


x = torch.linspace(-30.0, 30.0, 601, dtype=torch.float64)[:, None]
kernel = empirical_ntk(Bumps(4.0, -10.0, 25.0, 10.0, 50.0), x, torch.full((1, 1), 10.0).double(), outputs="trace")[:, 0]
top = float(kernel.max())
found = float(x[kernel.argmax()]), float(kernel[370]) / top, float(kernel.min()) / top
assert found[2] > 0 and abs(found[0] - 10) < 0.1
