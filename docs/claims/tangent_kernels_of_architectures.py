"""Tangent kernels become constant with width in convolutional networks, but residual connections prevent it.

Title: Neural tangent kernel of convolutional and residual networks
Subject: Neural networks and sparse priors
Made in: readings of the abstract of {cite:t}`goldblum2020`, which names skip connections together with batch
    normalisation
Verdict: fails
Number: the kernel's change in training falls with the power 0.97 +- 0.06 of the width without, and 0.92 +- 0.06 with a
    residual sum
Page: wide_networks/does_the_tangent_kernel_stay
"""

import math

import torch
from torch import nn

from bayeskit.models.wide_networks import infinite_width, ntk_drift_against_width


class Convolutions(nn.Module):
    """Two convolutions, the second with or without a residual sum, and a linear layer."""

    def __init__(self, residual):
        super().__init__()
        self.one, self.two = nn.Conv1d(1, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.last, self.residual = nn.Linear(16 * 4, 1), residual

    def forward(self, x):
        """Return one output for each row of ``x``."""
        h = self.one(x)
        new = self.two(torch.relu(h))
        return self.last(torch.flatten(torch.relu(h + new if self.residual else new), 1))


x, y = torch.eye(4).double()[:, None] + 0.2, torch.tensor([[1.0], [-1.0], [0.5], [0.0]]).double()
found = []
for residual in (False, True):
    drift = ntk_drift_against_width(infinite_width(Convolutions(residual)), x, y, (8, 64), 48, num_steps=40)
    relative = (drift.standard_error / drift.typical).square().sum().sqrt()
    found.append((float((drift.typical[0] / drift.typical[1]).log()) / math.log(8), float(relative) / math.log(8)))
assert all(power > 5 * error and power > 0.4 for power, error in found)
