"""Negative sampling learns the probabilities of words as noise-contrastive estimation does.

Title: Negative sampling (word2vec) against noise-contrastive estimation
Subject: Models without a normaliser
Made in: introductions to {cite:t}`mikolov2013`, whose own text says that the property does not matter for its use;
    {cite:t}`dyer2014` has the condition
Verdict: holds if the noise is uniform and there are as many negative samples as words
Number: with five negatives, the score of the commonest of five words is -1.145 where its log probability is -0.452
Page: sampling/sampled_softmax
"""

import torch

p = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=torch.float64).softmax(0)


def scores(q, k):
    """Minimise the expected loss over free scores, by scoring steps."""
    s = torch.zeros(5, dtype=torch.float64)
    for _ in range(2000):  # each word by itself
        slope = -p * (-s).sigmoid() + k * q * s.sigmoid()
        s -= slope / ((p + k * q) * s.sigmoid() * (-s).sigmoid())
    return s


q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
found = float(scores(q, 5)[0]), float(p[0].log())
assert torch.allclose(scores(q, 5), (p / (5 * q)).log())
assert torch.allclose(scores(torch.full((5,), 0.2, dtype=torch.float64), 5), p.log())
