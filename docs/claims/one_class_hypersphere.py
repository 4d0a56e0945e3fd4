"""Drawing the codes of normal data to a point learns which data are normal.

Title: Deep one-class classification (Deep SVDD, Deep SAD): hypersphere collapse
Subject: Likelihoods of images and outliers
Made in: readings of {cite:t}`ruff2020`; propositions 1 to 3 of {cite:t}`ruff2018` say when it collapses, offsets among
    them
Verdict: holds if the network cannot map all data to the point
Number: a linear layer with an offset reaches the loss 0.0000, where a datum at ten sds has the score 0.0000 as well
Page: variational_autoencoders/density_is_not_detection
"""

import torch

from bayeskit.core.randomness import new_generator

x = torch.randn(200, 2, dtype=torch.float64, generator=new_generator(0))
centre = torch.tensor([1.0, -1.0], dtype=torch.float64)
weight = torch.eye(2, dtype=torch.float64, requires_grad=True)
offset = torch.zeros(2, dtype=torch.float64, requires_grad=True)
for _ in range(300):
    loss = (x @ weight.T + offset - centre).square().sum(1).mean()
    slopes = torch.autograd.grad(loss, [weight, offset])
    weight, offset = ((p - 0.2 * s).detach().requires_grad_() for p, s in zip((weight, offset), slopes, strict=True))
far = torch.tensor([10.0, 0.0], dtype=torch.float64)
score = (weight @ far + offset - centre).square().sum()
found = loss.item(), score.item()
assert found[0] < 1e-6 and found[1] < 1e-4  # the log determinant that a density has is missing
