"""The likelihood of sites whose rate is not known, from that of each row of the root at each rate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rates(NamedTuple):
    """The rates that sites may have, for some samples and topologies.

    Attributes
    ----------
    weights : Tensor
        Probability of each rate, `(samples, topologies, rates)`.
    invariant : Tensor or None
        Probability of a site that cannot change, `(samples, topologies)`.
    """

    weights: Tensor
    invariant: Tensor | None = None


class Mixed(NamedTuple):
    """Log-likelihoods `(samples, topologies)` and, on request, their gradients.

    Attributes
    ----------
    values : Tensor
        Shape `(samples, topologies)`.
    by_row : Tensor or None
        By the log-likelihood of each row at each rate, shape `(rates, samples, topologies, rows)`.
    by_rates : tuple of Tensor
        By what `Rates` holds.
    by_frequency : Tensor or None
        By the stationary frequencies, so far as invariant sites go, `(samples, topologies, 4)`.
    """

    values: Tensor
    by_row: Tensor | None = None
    by_rates: tuple[Tensor, ...] = ()
    by_frequency: Tensor | None = None


def mix_rows(logs: Tensor, rates: Rates, frequencies: Tensor, counts: Tensor, constant: Tensor, slopes: bool) -> Mixed:
    """Add up the log-likelihoods of sites that have each rate with some probability.

    Parameters
    ----------
    logs : Tensor
        Log-likelihood of each row of the root at each rate, shape `(rates, samples, topologies, rows)`.
    rates : Rates
        Their probabilities.
    frequencies : Tensor
        Stationary frequencies, shape `(samples, topologies, 4)`.
    counts : Tensor
        Number of sites of each row, shape `(rows,)`.
    constant : Tensor
        The bases that all taxa allow in each row, shape `(rows, 4)`, entries 0 and 1.
    slopes : bool
        Whether to compute gradients.

    Returns
    -------
    Mixed

    Examples
    --------
    >>> logs = torch.tensor([[0.1, 0.2], [0.3, 0.4]]).log()[:, None, None]
    >>> rates, frequencies = Rates(torch.tensor([[[0.5, 0.5]]])), torch.full((1, 1, 4), 0.25)
    >>> mix_rows(logs, rates, frequencies, torch.ones(2), torch.zeros(2, 4), False).values.exp()
    tensor([[0.0600]])
    """
    largest = logs.amax(0)
    chance = log_unchanged = None
    if rates.invariant is not None:
        chance = frequencies @ constant.T
        log_unchanged = chance.log() + rates.invariant.log()[..., None]
        largest = torch.maximum(largest, log_unchanged)
    # A row that is impossible at every rate.
    largest = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    weights = rates.weights.movedim(-1, 0)[..., None]
    scaled = torch.exp(logs - largest)
    total = (weights * scaled).sum(0)
    unchanged = None if log_unchanged is None else torch.exp(log_unchanged - largest)
    total = total if unchanged is None else total + unchanged
    # Thousands of terms are added up; in single precision their sum would lose two more digits.
    values = ((total.log() + largest).double() @ counts.double()).to(logs.dtype)
    if not slopes:
        return Mixed(values)
    by_total = torch.where(total > 0, counts / total, torch.zeros_like(total))
    by_weight = scaled * by_total
    by_rates, by_frequency = [by_weight.sum(-1).movedim(0, -1)], None
    if unchanged is not None and chance is not None and rates.invariant is not None:
        by_unchanged = by_total * unchanged
        by_rates.append(by_unchanged.sum(-1) / rates.invariant)
        by_frequency = torch.where(chance > 0, by_unchanged / chance, torch.zeros_like(chance)) @ constant
    return Mixed(values, by_weight * weights, tuple(by_rates), by_frequency)
