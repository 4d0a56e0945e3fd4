"""Drawing the codes of normal data to a point learns which data are normal.

Title: Deep one-class classification (Deep SVDD, Deep SAD): hypersphere collapse
Subject: Likelihoods of images and outliers
Made in: readings of {cite:t}`ruff2020`; propositions 1 to 3 of {cite:t}`ruff2018` say when it collapses, offsets among
    them
Verdict: holds if the map cannot shrink volumes
Number: data have sd 1 and a mean 3 from zero; a linear layer with an offset reaches the loss 0.0000, where a datum 10
    from the mean scores 0.0000; one without offset 0.20 and 0.02, which is less; one of determinant one 2.00 and 100.00
Page: variational_autoencoders/density_is_not_detection
"""

import torch

from bayeskit.extend import new_generator

x = torch.randn(400, 2, dtype=torch.float64, generator=new_generator(0))
x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.mT, correction=0))).mT  # mean 0, covariance 1
mean, centre = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
x, far = x + mean, mean + torch.tensor([0.0, 10.0], dtype=torch.float64)


def train(with_offset, keeps_volumes):
    """Return the loss, the mean squared distance of codes from the centre, and the score of the far datum."""
    weight = torch.tensor([[1.0, 0.5], [0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    offset = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, offset] if with_offset else [weight], max_iter=300, tolerance_change=1e-15)

    def score(y):
        w = weight / weight.det().abs().sqrt() if keeps_volumes else weight
        return (y @ w.mT + offset - centre).square().sum(-1)

    def closure():
        optimiser.zero_grad()
        (loss := score(x).mean()).backward()
        return loss

    optimiser.step(closure)
    return score(x).mean().item(), score(far).item()


free, without, kept = train(True, False), train(False, False), train(True, True)
found = 1, 3, free[0], 10, free[1], *without, *kept
assert max(free) < 1e-6 and without[1] < without[0]  # collapse, or blindness in a direction
assert kept[1] > 40 * kept[0] and abs(kept[1] - 100) < 0.01  # the log determinant makes it a normal density
