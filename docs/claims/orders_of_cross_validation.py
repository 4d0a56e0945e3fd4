"""The log evidence of N data is a mean over N (N + 1) / 2 orders of the data.

Title: Marginal likelihood as cross-validation: number of orders
Subject: Evidence and model choice
Made in: introductions to {cite:t}`fong2020`, whose own identity is over all held-out sets
Verdict: fails
Number: of four data it is the mean of 24 orders' sums, the scores being sums over all 15 held-out sets
Page: loss_based_updates/evidence_is_cross_validation
"""

import itertools
import math

import torch

from bayeskit.inference.generalized import enumerated_cross_validation

y = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)


def log_evidence(part):
    """Of coin flips, the chance of heads uniform, for rows that say which flips are in."""
    heads, flips = (part * y).sum(1), part.sum(1)
    return torch.lgamma(1 + heads) + torch.lgamma(1 + flips - heads) - torch.lgamma(2 + flips)


result = enumerated_cross_validation(log_evidence, 4)
orders = set(itertools.permutations(range(4)))
held_out = sum(math.comb(4, p) for p in range(1, 5))
found = len(orders), held_out
assert abs(float(result.score.sum()) - result.log_evidence) < 1e-12
assert len(orders) == math.factorial(4) != 4 * 5 // 2
