"""If the treated fare worse in the data, the treatment harms.

Title: Simpson's paradox: seeing a treatment against doing it
Subject: Causes and related tasks
Made in: {cite:t}`pearl2009`, as the error to avoid
Verdict: fails
Number: with a common cause, 0.44 of the treated fare well and 0.56 of others, while doing it gives 0.60 against 0.40
Page: discrete_latent_variables/seen_against_done
"""

import math

import pyro
import pyro.distributions as dist
import torch

from bayeskit.exact import enumerate_latents


def model(a, y=None, done=False):
    """Sick patients (z = 1) are treated more often, and fare worse either way."""
    z = pyro.sample("z", dist.Bernoulli(0.5))
    if not done:
        pyro.sample("a", dist.Bernoulli(torch.tensor([0.1, 0.9])[z.long()]), obs=a)
    if y is not None:
        pyro.sample("y", dist.Bernoulli(torch.tensor([[0.6, 0.2], [0.8, 0.4]])[a.long(), z.long()]), obs=y)


def well(a, done):
    """Return the chance that y = 1 beside a, or after doing a."""
    a, one = torch.tensor(a), torch.tensor(1.0)
    both, given = enumerate_latents(model, a, one, done=done), enumerate_latents(model, a, done=done)
    return math.exp(both.log_evidence - given.log_evidence)


found = tuple(well(a, done) for done in (False, True) for a in (1.0, 0.0))
assert found[0] < found[1] and found[2] > found[3]
