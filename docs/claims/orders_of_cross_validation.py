"""The log evidence of N data is a mean of sums of predictive scores over the N (N + 1) / 2 orders of the data.

Title: Marginal likelihood as cross-validation: number of orders
Subject: Evidence and model choice
Made in: introductions to {cite:t}`fong2020`, whose own identity is over all held-out sets
Verdict: fails
Number: four data have not 10 orders but 24, and 32 scores of a datum given others; the scores of every order have the
    sum -2.9957, and those over all 15 held-out sets as well
Page: loss_based_updates/evidence_is_cross_validation
"""

import itertools
import math

import torch

from bayeskit.inference.held_out import enumerated_cross_validation

y = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)


def log_evidence(part):
    """Of coin flips, the chance of heads uniform, for rows that say which flips are in."""
    heads, flips = (part * y).sum(1), part.sum(1)
    return torch.lgamma(1 + heads) + torch.lgamma(1 + flips - heads) - torch.lgamma(2 + flips)


sums, scores = [], {}
for order in itertools.permutations(range(4)):
    part, total = torch.zeros(1, 4, dtype=torch.float64), 0.0
    for k, datum in enumerate(order):
        before, part = part, part + torch.eye(4, dtype=torch.float64)[datum]
        scores[datum, frozenset(order[:k])] = score = float(log_evidence(part) - log_evidence(before))
        total += score
    sums.append(total)
result = enumerated_cross_validation(log_evidence, 4)
found = 4 * 5 // 2, len(sums), len(scores), sums[0], sum(math.comb(4, p) for p in range(1, 5))
assert max(abs(total - result.log_evidence) for total in [*sums, float(result.score.sum())]) < 1e-12
assert max(scores.values()) - min(scores.values()) > 1 and found[0] not in found[1:3]
