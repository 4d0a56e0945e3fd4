"""Importance weights of draws that a mean field was not fitted to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._torch import one_thread
from bayeskit.inference.evidence.checks import without_nan
from bayeskit.inference.evidence.variational.mean_field import MeanField
from bayeskit.target import Target


class Weights(NamedTuple):
    """Draws of a mean field and how the density compares with it there.

    Attributes
    ----------
    log_weights : Tensor
        Shape ``(1, num_draws)``, double precision.
    log_density : Tensor
        Shape ``(num_draws,)``.
    problems : list of str
    """

    log_weights: Tensor
    log_density: Tensor
    problems: list[str]


def fresh_weights(target: Target, mean_field: MeanField, num_draws: int, generator: torch.Generator) -> Weights:
    """Draw from a mean field and weigh the draws."""
    x = mean_field.sample(num_draws, generator)
    with one_thread():
        log_density, problems = without_nan(target.log_density(x))
        return Weights((log_density.double() - mean_field.log_prob(x)).unsqueeze(0), log_density, problems)
