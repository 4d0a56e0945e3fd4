"""The substitution model of Jukes and Cantor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.models.phylogenetics.substitution.base import SubstitutionModel, gone


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

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return 1/3 everywhere but on the diagonal, shape `(4, 4)`, with the dtype and device of `like`."""
        return like.new_full((4, 4), 1.0 / 3.0) - torch.eye(4, dtype=like.dtype, device=like.device) * (4.0 / 3.0)

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
        return torch.exp(-events) * identity + gone(events) * 0.25
