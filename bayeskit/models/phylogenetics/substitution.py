"""Substitution models: how bases change along an edge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

#: The order of the bases in every vector and matrix.
BASE_ORDER = "ACGT"


class SubstitutionModel(ABC):
    """A time-reversible substitution model over the four bases.

    It is scaled so that one substitution is expected per site and unit of branch length.

    A model implements `frequencies` and `transition_matrices`; the likelihood and its gradient
    follow from these two. One that treats all bases alike may also set `is_uniform`, which opens a
    faster path.

    Examples
    --------
    >>> isinstance(JC69(), SubstitutionModel)
    True
    """

    @property
    def is_uniform(self) -> bool:
        """Whether every change is as likely as every other one, so that Jukes-Cantor's formula holds."""
        return False

    @abstractmethod
    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(4,)`, with the dtype and device of `like`."""

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
            Shape `(*batch, edges, 4, 4)`; entry `[..., i, j]` is the probability that base `i`
            has become `j`.
        """


@dataclass(frozen=True)
class JC69(SubstitutionModel):
    """The model of Jukes and Cantor: equal frequencies, and all changes equally likely.

    References
    ----------
    T. H. Jukes and C. R. Cantor (1969), Evolution of protein molecules, in H. N. Munro (ed.),
    Mammalian Protein Metabolism III, 21-132.

    Examples
    --------
    >>> JC69().transition_matrices(torch.tensor([0.0, 0.1], dtype=torch.float64))[1, 0]
    tensor([0.9064, 0.0312, 0.0312, 0.0312], dtype=torch.float64)
    """

    @property
    def is_uniform(self) -> bool:
        """Always true."""
        return True

    def frequencies(self, like: Tensor) -> Tensor:
        """Return `(1/4, 1/4, 1/4, 1/4)` with the dtype and device of `like`."""
        return like.new_full((4,), 0.25)

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities, shape `(*batch, edges, 4, 4)`.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, 4, 4)`, with the dtype and device of `branch_lengths`.
        """
        events = branch_lengths[..., None, None] * (4.0 / 3.0)
        identity = torch.eye(4, dtype=branch_lengths.dtype, device=branch_lengths.device)
        # expm1 keeps the digits of a change along a very short branch.
        return torch.exp(-events) * identity - torch.expm1(-events) * 0.25
