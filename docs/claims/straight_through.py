"""Gradients through a discrete choice taken as the identity point downhill on average.

Made in: {cite:t}`bengio2013`
Verdict: holds if the loss is near to linear in the choice
Number: for a squared distance from 0.45 and a chance of 0.3 the true slope in the logit is 0.021 and the estimate's
    mean is -0.063
Page: discrete_latent_variables/gradients_of_choices
"""

import torch

logit = torch.logit(torch.tensor(0.3, dtype=torch.float64)).requires_grad_()


def loss(b):
    """Return a loss of a choice b in {0, 1}."""
    return (b - 0.45).square()


chance = logit.sigmoid()
one, zero = torch.tensor(1.0).double(), torch.tensor(0.0).double()
(truth,) = torch.autograd.grad(chance * loss(one) + (1 - chance) * loss(zero), logit, retain_graph=True)
through = [torch.autograd.grad(loss(b + chance - chance.detach()), logit, retain_graph=True)[0] for b in (one, zero)]
mean = (chance * through[0] + (1 - chance) * through[1]).item()
found = 0.45, 0.3, truth.item(), mean
assert truth > 0 > mean
