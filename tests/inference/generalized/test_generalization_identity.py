"""How much better a Gibbs posterior looks on its own data than on new ones: an identity, by enumeration."""

import itertools

import torch

from bayeskit.inference.generalized import grid_posterior, losses

GRID = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
WEIGHT = 3.0
PUBLISHED = 0.156063902  # two fair bits, mean squared loss, weight 3


def squared(parameter, data):
    return (data - parameter).square()


def laws(pooling="mean"):
    """Return all data sets ``(4, 2)``, each of probability 1/4, and the posteriors given them, ``(4, 3)``."""
    data = torch.tensor(list(itertools.product([0.0, 1.0], repeat=2)), dtype=torch.float64)
    found = [
        grid_posterior(losses.FunctionLoss(squared), GRID, x, weight=WEIGHT, pooling=pooling).probabilities
        for x in data
    ]
    return data, torch.stack(found)


def generalization_error(data, posterior):
    """Return the expected loss of a new datum less that of the posterior's own."""
    new = (torch.tensor([0.0, 1.0]).double()[:, None] - GRID).square().mean(0)
    own = (data[:, :, None] - GRID).square().mean(1)
    return ((posterior * (new - own)).sum(-1)).mean()


def symmetrised_information(posterior):
    """Return mutual and lautum information of data and parameter, added."""
    marginal = posterior.mean(0)
    mutual = (posterior * (posterior / marginal).log()).sum(-1).mean()
    lautum = (marginal * (marginal / posterior).log()).sum(-1).mean()
    return mutual + lautum


def test_the_error_is_the_symmetrised_information_over_the_weight():
    """Aminian, Bu, Toni, Rodrigues, Wornell (2021), An exact characterization of the generalization error. NeurIPS."""
    data, posterior = laws()
    error = generalization_error(data, posterior)
    assert abs(error - symmetrised_information(posterior) / WEIGHT) < 1e-14
    assert abs(error - PUBLISHED) < 5e-10


def test_the_identity_belongs_to_the_mean():
    data, posterior = laws("sum")  # mutation: twice the weight
    assert abs(generalization_error(data, posterior) - symmetrised_information(posterior) / WEIGHT) > 0.01
