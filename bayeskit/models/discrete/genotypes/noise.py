"""How a genotype is read: the log probabilities of entries, of columns, and of the whole matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.genotypes.conflicts import num_conflict_free
from bayeskit.models.discrete.genotypes.nested_columns import MAX_CELLS, MAX_MUTATIONS, log_sum_over_columns
from bayeskit.models.discrete.inputs import as_real

#: A Gibbs sweep weighs all 2^mutations genotypes of a cell.
MAX_SWEEP_MUTATIONS = 12


def check_observed(observed: Tensor) -> Tensor:
    """Return an observed matrix, integers as floating-point numbers, or say what is wrong with it."""
    observed = as_real("observed", observed)
    if observed.dim() != 2 or not observed.numel():
        raise ShapeError(f"observed has shape {tuple(observed.shape)}; give (cells, mutations), at least one of each")
    wrong = ~((observed == 0) | (observed == 1) | observed.isnan())
    if bool(wrong.any()):
        cell, mutation = wrong.nonzero()[0].tolist()
        raise DataError(
            f"the observed entry of cell {cell} and mutation {mutation} is {observed[cell, mutation]:g}; "
            "give 0, 1, or NaN where it is missing"
        )
    return observed


def check_size(num_cells: int, num_mutations: int) -> None:
    """Refuse a matrix that is too large for the recursion over sets."""
    if num_cells > MAX_CELLS or num_mutations > MAX_MUTATIONS:
        remedy = "use NoisyGenotypes.gibbs_sweep, or " if num_mutations <= MAX_SWEEP_MUTATIONS else "use "
        raise SettingsError(
            f"the exact sum takes at most {MAX_CELLS} cells and {MAX_MUTATIONS} mutations, but there are {num_cells} "
            f"and {num_mutations}; {remedy}fewer cells or mutations"
        )


def members(num_items: int, like: Tensor) -> Tensor:
    """Return which items each subset holds, zeros and ones of the type of ``like``: ``(2**num_items, num_items)``."""
    items = torch.arange(num_items, device=like.device)
    return ((torch.arange(2**num_items, device=like.device).unsqueeze(1) >> items) & 1).to(like)


def entry_terms(observed: Tensor, false_positive: Tensor, false_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probability of each observed entry if it is 0, and if it is 1.

    Both are float64, of shape ``(*batch, cells, mutations)``; the gradient by a rate of exactly zero is NaN.
    """
    positive, negative = (rate.double()[..., None, None] for rate in (false_positive, false_negative))
    read, missing = observed == 1, observed.isnan()
    absent = torch.where(read, positive.log(), (-positive).log1p())
    present = torch.where(read, (-negative).log1p(), negative.log())
    return absent.masked_fill(missing, 0.0), present.masked_fill(missing, 0.0)


def column_terms(observed: Tensor, false_positive: Tensor, false_negative: Tensor) -> Tensor:
    """Return the log probability of each observed column for each set of cells, as :func:`entry_terms` does.

    Shape ``(*batch, mutations, 2**cells)``.
    """
    absent, present = (x.mT.unsqueeze(-2) for x in entry_terms(observed, false_positive, false_negative))
    # A rate of zero has a term of minus infinity, which no product with an indicator would survive.
    return torch.where(members(observed.shape[0], observed) == 1, present, absent).sum(-1)


def log_evidence(observed: Tensor, false_positive: Tensor, false_negative: Tensor) -> Tensor:
    """Return the log probability of an observed matrix, ``(*batch)`` of the rates; nothing is checked but its size."""
    check_size(*observed.shape)
    total = log_sum_over_columns(column_terms(observed, false_positive, false_negative))
    return (total - math.log(num_conflict_free(*observed.shape))).to(false_positive.dtype)


def column_probabilities(terms: Tensor) -> Tensor:
    """Return the posterior of each column, ``(*batch, mutations, 2**cells)``, from such log probabilities."""
    with torch.enable_grad():
        terms = terms.detach().requires_grad_()
        total = log_sum_over_columns(terms)
        check_range(total.detach(), terms.detach())
        check_possible(total.detach())
        (probabilities,) = torch.autograd.grad(total.sum(), terms)
    return probabilities


def check_range(log_sum: Tensor, terms: Tensor) -> None:
    """Refuse a sum over columns that is minus infinity although some conflict-free matrix is possible."""
    lost = log_sum == -torch.inf
    if not bool(lost.any()):
        return
    number = log_sum_over_columns(torch.zeros_like(terms).masked_fill(terms == -torch.inf, -torch.inf))
    if bool((lost & (number > -torch.inf)).any()):
        raise SettingsError(
            "at rates this small, the probability of the observed matrix lies below the range of floating-point "
            "numbers, though it is not zero; raise the rates"
        )


def check_possible(log_evidence: Tensor) -> None:
    """Refuse an observed matrix that no conflict-free one can give rise to."""
    if bool((log_evidence == -torch.inf).any()):
        raise DataError(
            "no conflict-free matrix can give rise to the observed one at these rates; "
            "allow for errors with rates above zero"
        )
