"""An energy-based classifier's likelihood cannot be normalised, so that nothing tells whether its training goes well.

Title: Energy-based classifiers (JEM): the normaliser and the training loss
Subject: Models without a normaliser
Made in: section on limitations of {cite:t}`grathwohl2020`
Verdict: holds if annealing from below and from above do not meet
Number: of linear logits the log normaliser is 3.0394, and annealing from both sides finds 3.0396 +- 0.0041
Page: sampling/models_without_a_normaliser
"""

import torch
from torch.distributions import Bernoulli, Independent

from bayeskit.inference.unnormalised import log_normaliser
from bayeskit.models.unnormalised import EnergyModel

w = torch.tensor([[1.0, -0.5, 0.3], [-0.2, 0.8, -1.0]], dtype=torch.float64)
b = torch.tensor([0.1, -0.4], dtype=torch.float64)
base = Independent(Bernoulli(torch.full((3,), 0.5, dtype=torch.float64)), 1)
model = EnergyModel.from_classifier(lambda x: x @ w.T + b, base, tilt=False)
estimate = log_normaliser(model, num_temperatures=20, num_chains=256, progress=False)
truth = float((b + torch.nn.functional.softplus(w).sum(-1)).logsumexp(0))
found = truth, (estimate.value, estimate.standard_error)
assert abs(estimate.value - truth) < 5 * estimate.standard_error and estimate.trusted
