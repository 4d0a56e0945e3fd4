"""Sinkhorn's scaling of a matrix to a doubly stochastic one, and Gumbel noise sent through it."""

from __future__ import annotations

import math
from typing import NoReturn

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import ModelError
from bayeskit.models.discrete.permutations.assignments import (
    check_log_weights,
    check_possible,
    nearest_permutation,
    real_numbers,
)

EULER = 0.5772156649015329
Shape = torch.Size | list[int] | tuple[int, ...]


def sinkhorn(log_weights: Tensor, num_iterations: int = 20) -> Tensor:
    """Scale rows and columns of positive matrices in turn until both sum to one, nearly.

    Parameters
    ----------
    log_weights : Tensor
        Logs of the matrices, ``(*batch, n, n)``; ``-inf`` where an entry is zero.
    num_iterations : int, default 20
        Each scales the rows and then the columns; columns sum to one exactly, rows up to what the next would change.
        Logs that are far apart take more: hundreds, at differences of hundreds.

    Returns
    -------
    Tensor
        Logs of the scaled matrices, same shape.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or a row or column is ``-inf`` everywhere.
    SettingsError
        If there is no iteration.

    References
    ----------
    Sinkhorn, R., Knopp, P. (1967). Concerning nonnegative matrices and doubly stochastic matrices. Pacific Journal of
    Mathematics 21, 343-348.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import sinkhorn
    >>> sinkhorn(torch.tensor([[1.0, 2.0], [2.0, 16.0]]).log(), 50).exp()
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]])
    """
    log_weights = real_numbers("log_weights", log_weights)
    check_log_weights("log_weights", log_weights)
    return scale(log_weights, whole_number("num_iterations", num_iterations, least=1))


def scale(log_weights: Tensor, num_iterations: int) -> Tensor:
    """Do what :func:`sinkhorn` does, without a look at the entries."""
    for _ in range(num_iterations):
        log_weights = log_weights.log_softmax(-1).log_softmax(-2)
    return log_weights


class GumbelSinkhorn(TorchDistribution):  # type: ignore[misc]
    r"""Matrices :math:`S((L + G) / \tau)`: scores with Gumbel noise, scaled by Sinkhorn's iteration.

    Draws approach permutations as the temperature falls, those of greatest :math:`\sum_i (L + G)_{i \pi_i}`. There is
    **no density in closed form**, because the scaling forgets the sums of rows and columns that it started with, and
    :meth:`log_prob` says so. A lower bound of the evidence takes the noise as the latent variable, whose divergence
    from a prior is known: :meth:`noise_divergence`. It bounds the divergence of the matrices from above, loosely.

    Columns of draws sum to one up to rounding, rows only as nearly as the iterations bring them there: with 10 rows,
    scores of zero and 20 iterations, a third of draws have a row off by 0.01 or more at temperature 0.5, and most by
    0.1 or more at 0.05. :attr:`support` is therefore that of matrices without negative entries.

    Parameters
    ----------
    log_scores : Tensor
        :math:`L`, shape ``(*batch, n, n)``; finite, or ``-inf`` where a pair is impossible.
    temperature : float, default 1.0
        :math:`\tau`, positive.
    num_iterations : int, default 20
        Of Sinkhorn's scaling.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or no permutation avoids those that are ``-inf``.
    SettingsError
        If the temperature is not positive, or there is no iteration.

    References
    ----------
    Mena, G., Belanger, D., Linderman, S., Snoek, J. (2018). Learning latent permutations with Gumbel-Sinkhorn
    networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import GumbelSinkhorn
    >>> matrices = GumbelSinkhorn(torch.zeros(3, 3), temperature=0.5).rsample((10,))
    >>> matrices.shape, bool((matrices.sum(-2) - 1).abs().max() < 1e-5)
    (torch.Size([10, 3, 3]), True)
    """

    arg_constraints = {"log_scores": constraints.independent(constraints.real, 2)}
    support = constraints.independent(constraints.nonnegative, 2)
    has_rsample = True

    def __init__(self, log_scores: Tensor, temperature: float = 1.0, num_iterations: int = 20) -> None:
        log_scores = real_numbers("log_scores", log_scores)
        size = check_possible("log_scores", log_scores)
        self.log_scores = log_scores
        self.temperature = real_number("temperature", temperature, between=(0.0, math.inf))
        self.num_iterations = whole_number("num_iterations", num_iterations, least=1)
        super().__init__(log_scores.shape[:-2], torch.Size([size, size]), validate_args=False)

    def expand(self, batch_shape: Shape, _instance: None = None) -> GumbelSinkhorn:
        """Return the same distribution with another batch shape."""
        scores = self.log_scores.expand(*batch_shape, *self.event_shape)
        return GumbelSinkhorn(scores, self.temperature, self.num_iterations)

    @property
    def noise(self) -> TorchDistribution:
        """Distribution of the scores with noise, before they are divided by the temperature and scaled."""
        return dist.Gumbel(self.log_scores, torch.ones_like(self.log_scores), validate_args=False).to_event(2)

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw matrices, differentiable in the scores: ``sample_shape + (*batch, n, n)``."""
        return scale(self.noise.rsample(torch.Size(sample_shape)) / self.temperature, self.num_iterations).exp()

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw what matrices approach as the temperature falls, permutations ``sample_shape + (*batch, n)``."""
        with torch.no_grad():
            return nearest_permutation(self.noise.sample(torch.Size(sample_shape)))

    def log_prob(self, value: Tensor) -> NoReturn:
        """Refuse: there is no closed form.

        Raises
        ------
        ModelError
            Always.
        """
        raise ModelError(
            "GumbelSinkhorn has no density in closed form, because Sinkhorn's scaling cannot be inverted. Draw its "
            "noise in the guide, a Gumbel distribution, and scale it in the model (see GumbelSinkhornRelaxation); or "
            "use StickBreakingPermutation, whose density is known."
        )

    def noise_divergence(self, prior_temperature: float | None = None) -> Tensor:
        r"""Return the divergence of :math:`(L + G) / \tau` from :math:`G / \tau_0`, ``(*batch)``.

        Pairs that are impossible are so in the prior too, and count nothing.

        Parameters
        ----------
        prior_temperature : float, optional
            :math:`\tau_0`, positive; by default the temperature itself.

        Raises
        ------
        SettingsError
            If the temperature of the prior is not positive.
        """
        prior = self.temperature if prior_temperature is None else prior_temperature
        ratio = real_number("prior_temperature", prior, between=(0.0, math.inf)) / self.temperature
        # Gumbel distributions with scales 1 / tau and 1 / tau_0: the ratio of scales is tau_0 / tau.
        constant = -math.log(ratio) + EULER * (ratio - 1) - 1
        impossible = self.log_scores == -math.inf
        shifted = ratio * self.log_scores.masked_fill(impossible, 0.0)
        terms = shifted + (math.lgamma(ratio + 1) - shifted).exp() + constant
        return terms.masked_fill(impossible, 0.0).sum((-1, -2))
