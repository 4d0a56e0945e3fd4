"""An energy-based classifier's likelihood cannot be normalised, so that nothing tells whether its training goes well.

Title: Energy-based classifiers (JEM): the normaliser and the training loss
Subject: Models without a normaliser
Made in: section on limitations of {cite:t}`grathwohl2020`
Verdict: holds if annealing from the base to the model and from the model back do not meet
Number: of linear logits the log normaliser is 3.0394, and annealing from the base to the model and back finds
    3.0396 +- 0.0041; of logits 40 times as steep, in 1 step, the estimates of the two ways are 2.1 +- 0.2 apart
Page: sampling/models_without_a_normaliser
"""

import torch
from torch.distributions import Bernoulli, Independent

from bayeskit.models.unnormalised import EnergyModel, log_normaliser

w = torch.tensor([[1.0, -0.5, 0.3], [-0.2, 0.8, -1.0]], dtype=torch.float64)
b = torch.tensor([0.1, -0.4], dtype=torch.float64)
base = Independent(Bernoulli(torch.full((3,), 0.5, dtype=torch.float64)), 1)


def estimate(scale, num_temperatures):
    """Return the truth, the estimate, and the distance of the two ways, which are low and high in expectation."""
    model = EnergyModel.from_classifier(lambda x: scale * (x @ w.T + b), base, tilt=False)
    result = log_normaliser(model, num_temperatures=num_temperatures, num_chains=256, progress=False)
    up, down = result.forward, result.reverse
    apart = down.log_evidence - up.log_evidence, (down.standard_error**2 + up.standard_error**2) ** 0.5
    return float((scale * b + torch.nn.functional.softplus(scale * w).sum(-1)).logsumexp(0)), result, apart


truth, meets, apart = estimate(1.0, 20)
_, fails, far_apart = estimate(40.0, 1)
found = truth, (meets.value, meets.standard_error), 40, 1, far_apart
assert abs(meets.value - truth) < 5 * meets.standard_error and meets.trusted and abs(apart[0]) < 5 * apart[1]
assert not fails.trusted and far_apart[0] > 5 * far_apart[1]  # it is told
