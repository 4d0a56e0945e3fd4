"""The general time-reversible substitution model, GTR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from pyro.distributions import Dirichlet
from torch import Tensor

from bayeskit.models.phylogenetics.substitution.base import (
    BASE_FREQUENCIES,
    SubstitutionModel,
    gone,
    normalised,
    reversible_rate_matrix,
)
from bayeskit.models.phylogenetics.substitution.parameters import Given, Parameter

#: Exchangeabilities, which count up to a common factor; the usual prior is flat, as in MrBayes.
EXCHANGEABILITIES = Parameter(lambda like: Dirichlet(like.new_ones(6)), size=6)


@dataclass(frozen=True, eq=False)
class GTR(SubstitutionModel):
    """The general time-reversible model: any frequencies, and a rate of its own for each pair of bases.

    The transition matrices come from the eigenvalues of the symmetrised rate matrix. Their derivative by the
    parameters is exact where eigenvalues are equal too, as they are where the model comes down to Jukes and Cantor's.
    They may be differentiated once by the parameters, and as often as one likes by branch lengths.

    Parameters
    ----------
    exchangeabilities : sequence of float, Tensor or TorchDistribution, optional
        Rates of A-C, A-G, A-T, C-G, C-T and G-T up to a common factor and before they are multiplied with the
        frequency of the base that arises, shape `(*batch, 6)`, above 0. Or their prior; by default it is flat,
        Dirichlet(1, 1, 1, 1, 1, 1).
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of A, C, G and T, shape `(*batch, 4)`, above 0; they are scaled to sum to one. Or their
        prior; by default it is flat, Dirichlet(1, 1, 1, 1). `empirical_frequencies` counts them in an alignment.

    Raises
    ------
    SettingsError
        If values are not above 0, or a prior is not over such values.
    ShapeError
        If there are not six exchangeabilities or not four frequencies.

    References
    ----------
    S. Tavare (1986), Some probabilistic and statistical problems in the analysis of DNA sequences, Lectures on
    Mathematics in the Life Sciences 17, 57-86.

    R. Bhatia (1997), Matrix Analysis, chapter V (the derivative of a matrix function by divided differences).

    Examples
    --------
    >>> model = GTR(exchangeabilities=[1, 2, 1, 1, 2, 1], base_frequencies=[0.4, 0.3, 0.2, 0.1])
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9193, 0.0309, 0.0395, 0.0103], dtype=torch.float64)
    """

    exchangeabilities: Given = None
    base_frequencies: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"exchangeabilities": EXCHANGEABILITIES, "base_frequencies": BASE_FREQUENCIES}
    )

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""
        return normalised(self._values("base_frequencies", like))

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rates of change, shape `(*batch, 4, 4)`, with the dtype and device of `like`."""
        return reversible_rate_matrix(self._values("exchangeabilities", like), self.frequencies(like))

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

        Raises
        ------
        SettingsError
            If a parameter has no value.
        """
        # Differences of almost equal numbers give rare changes along short branches: single precision loses them.
        # Along more than this nothing of the start is left, and infinity times an eigenvalue of zero is no number.
        lengths = branch_lengths.double().clamp(max=1e100)
        roots = self.frequencies(lengths).sqrt()
        scaling = roots[..., None, :] / roots[..., :, None]
        symmetric = self.rate_matrix(lengths) / scaling
        change = _exponential_minus_identity(0.5 * (symmetric + symmetric.mT), lengths)
        identity = torch.eye(4, dtype=lengths.dtype, device=lengths.device)
        # Rounding may take a chance that is all but zero below it.
        return (identity + scaling[..., None, :, :] * change).clamp(min=0.0).to(branch_lengths.dtype)


def _exponential_minus_identity(matrix: Tensor, times: Tensor) -> Tensor:
    """Return `exp(times * matrix) - 1` of symmetric matrices whose largest eigenvalue is zero.

    The value is that of the eigendecomposition. The derivative in a direction `E`, seen in the eigenvectors, is `E`
    times the divided differences of `exp` between each two eigenvalues (Daleckii and Krein), so it does not matter
    whether eigenvalues are equal and eigenvectors not unique.

    Parameters
    ----------
    matrix : Tensor
        Shape `(*batch, 4, 4)`.
    times : Tensor
        Shape `(*batch, edges)`.

    Returns
    -------
    Tensor
        Shape `(*batch, edges, 4, 4)`.
    """
    values, vectors = torch.linalg.eigh(matrix.detach())
    # The last is the largest; what rounding makes of it would let very long branches decay for ever.
    decay = torch.cat([-values[..., :-1].clamp(max=0.0), torch.zeros_like(values[..., -1:])], -1)
    direction = _Direction.apply(matrix, vectors)
    events = times[..., None] * decay[..., None, :]
    in_eigenvectors = torch.diag_embed(-gone(events))
    in_eigenvectors = in_eigenvectors + _divided_differences(decay, times) * direction[..., None, :, :]
    pairs = torch.einsum("...ik,...jl->...klij", vectors, vectors).flatten(-2).flatten(-3, -2)
    return (in_eigenvectors.flatten(-2) @ pairs).unflatten(-1, (4, 4))


def _divided_differences(decay: Tensor, times: Tensor) -> Tensor:
    """Return `(exp(-a t) - exp(-b t)) / (b - a)` for each two of `decay`, shape `(*batch, edges, 4, 4)`."""
    slower = torch.minimum(decay[..., :, None], decay[..., None, :])[..., None, :, :]
    times = times[..., None, None]
    apart = (decay[..., :, None] - decay[..., None, :]).abs()[..., None, :, :] * times
    distinct = apart > 0
    apart = torch.where(distinct, apart, torch.ones_like(apart))
    return times * torch.exp(-slower * times) * torch.where(distinct, gone(apart) / apart, torch.ones_like(apart))


class _Direction(torch.autograd.Function):
    """Zeros that carry the derivative of `vectors.T @ matrix @ vectors` by the matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, vectors: Tensor) -> Tensor:
        return torch.zeros_like(matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _FromEigenvectors.apply(cotangent, *ctx.saved_tensors), None


class _FromEigenvectors(torch.autograd.Function):
    """`vectors @ matrix @ vectors.T`; refuses a derivative, which would lack that of the eigenvectors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, vectors: Tensor) -> Tensor:
        return vectors @ matrix @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError(
            "GTR has first derivatives only by its parameters. Remedy: use finite differences of its gradient."
        )
