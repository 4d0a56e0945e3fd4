"""Through a single layer of binary choices, the straight-through gradient is biased but has the right sign.

Title: Straight-through estimator: the sign of the gradient
Subject: Variational inference and discrete choices
Made in: {cite:t}`bengio2013`
Verdict: holds if the loss only rises, or only falls, between the choices
Number: for a squared distance from 0.45 and a chance of 0.3 the true slope in the logit is 0.021 and the estimate's
    mean is -0.063
Page: discrete_latent_variables/gradients_of_choices
"""

import torch

logit = torch.logit(torch.tensor(0.3, dtype=torch.float64)).requires_grad_()
chance, (zero, one) = logit.sigmoid(), torch.tensor([0.0, 1.0], dtype=torch.float64)


def slopes(loss):
    """Return the slope of the mean of a loss of a choice b in {0, 1}, and the mean of the straight-through slope."""
    (truth,) = torch.autograd.grad(chance * loss(one) + (1 - chance) * loss(zero), logit, retain_graph=True)
    through = [
        torch.autograd.grad(loss(b + chance - chance.detach()), logit, retain_graph=True)[0] for b in (one, zero)
    ]
    return truth.item(), (chance * through[0] + (1 - chance) * through[1]).item()


found = 0.45, 0.3, *slopes(lambda b: (b - 0.45).square())
assert found[2] > 0 > found[3]
for rising in (torch.exp, lambda b: (8 * b - 4).sigmoid(), lambda b: (b + 0.1).square()):
    assert min(slopes(rising)) > 0
