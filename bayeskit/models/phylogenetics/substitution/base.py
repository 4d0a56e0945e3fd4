"""What every substitution model offers, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from pyro.distributions import Dirichlet
from torch import Tensor

from bayeskit.errors import AlignmentError
from bayeskit.models.phylogenetics.alignments.alignment import Alignment
from bayeskit.models.phylogenetics.substitution.parameters import Parameter, Parameterized

#: The order of the bases in every vector and matrix.
BASE_ORDER = "ACGT"

#: Stationary frequencies; the usual prior is flat, as in MrBayes.
BASE_FREQUENCIES = Parameter(lambda like: Dirichlet(like.new_ones(4)), size=4)


class SubstitutionModel(Parameterized, ABC):
    """A time-reversible substitution model over the four bases.

    It is scaled so that one substitution is expected per site and unit of branch length. Its parameters are fixed
    where the user gives numbers (with any batch dimensions), and sampled by a `TreeModel` where the user gives a prior
    or nothing.

    A model implements `frequencies`, `rate_matrix` and `transition_matrices`; the likelihood and its derivatives
    follow from these. One that treats all bases alike may also set `is_uniform`, which opens a faster path.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.substitution import JC69, SubstitutionModel
    >>> isinstance(JC69(), SubstitutionModel)
    True
    """

    @property
    def is_uniform(self) -> bool:
        """Whether every change is as likely as every other one, so that Jukes-Cantor's formula holds."""
        return False

    @abstractmethod
    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""

    @abstractmethod
    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rates of change.

        Parameters
        ----------
        like : Tensor
            Has the dtype and device of the result.

        Returns
        -------
        Tensor
            Shape `(*batch, 4, 4)`; entry `[..., i, j]` is the rate at which base `i` becomes `j`, and rows sum to
            zero.
        """

    @abstractmethod
    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, 4, 4)`, with the dtype and device of `branch_lengths`; entry `[..., i, j]` is the
            probability that base `i` has become `j`. The batch is that of branch lengths and parameters, broadcast.
        """


def empirical_frequencies(alignment: Alignment) -> Tensor:
    """Return how often each base stands in an alignment.

    An ambiguity code counts as equal parts of the bases that it allows; gaps and unknown bases do not count.

    Parameters
    ----------
    alignment : Alignment
        The sequences.

    Returns
    -------
    Tensor
        Shape `(4,)`, float64, in the order A, C, G, T; sums to one.

    Raises
    ------
    AlignmentError
        If a base never occurs.

    Examples
    --------
    >>> empirical_frequencies(Alignment.from_sequences({"A": "AACG", "B": "A-RT"}))
    tensor([0.5000, 0.1429, 0.2143, 0.1429], dtype=torch.float64)
    """
    allowed = ((alignment.patterns.long()[..., None] >> torch.arange(4)) & 1).to(torch.float64)
    known = (allowed.sum(-1) < 4).to(torch.float64) * alignment.weights
    counts = (known[..., None] * allowed / allowed.sum(-1, keepdim=True)).sum((0, 1))
    absent = [base for base, count in zip(BASE_ORDER, counts.tolist(), strict=True) if count == 0]
    if absent:
        raise AlignmentError(
            f"The base {absent[0]} never occurs in the alignment, so its frequency would be zero. Remedy: give "
            "frequencies above zero, or leave them to a prior."
        )
    return counts / counts.sum()


def normalised(frequencies: Tensor) -> Tensor:
    """Scale frequencies `(*batch, 4)` so that they sum to one."""
    return frequencies / frequencies.sum(-1, keepdim=True)


def reversible_rate_matrix(exchangeabilities: Tensor, frequencies: Tensor) -> Tensor:
    """Return the rates of a time-reversible model, scaled to one expected change.

    Parameters
    ----------
    exchangeabilities : Tensor
        Of the pairs AC, AG, AT, CG, CT and GT up to a common factor, shape `(*batch, 6)`.
    frequencies : Tensor
        Stationary frequencies, shape `(*batch, 4)`.

    Returns
    -------
    Tensor
        Shape `(*batch, 4, 4)`.
    """
    ac, ag, at, cg, ct, gt = exchangeabilities.unbind(-1)
    none = torch.zeros_like(ac)
    pairs = [none, ac, ag, at, ac, none, cg, ct, ag, cg, none, gt, at, ct, gt, none]
    changes = torch.stack(pairs, -1).reshape(*none.shape, 4, 4) * frequencies[..., None, :]
    leaving = changes.sum(-1)
    speed = (frequencies * leaving).sum(-1)[..., None, None]
    return (changes - torch.diag_embed(leaving)) / speed


def gone(events: Tensor) -> Tensor:
    """Return `1 - exp(-events)` without loss of digits for few expected events.

    Compilers may carry `expm1` out as `exp() - 1`, so it goes by way of the hyperbolic tangent.
    """
    half = torch.tanh(0.5 * events)
    return 2.0 * half / (1.0 + half)
