"""A proposal for the posterior of a mixture: fitted about one labelling, then averaged over all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.errors import DrawsError
from bayeskit.models.discrete.mixtures import Labels

EM_STEPS = 40
DRAWS_A_PARAMETER = 4
WIDENED = 1.3
WIDE_WEIGHT, WIDE_FACTOR = 0.1, 4.0
FITTED = 3000
CHUNK = 2_000_000


class SymmetricProposal:
    """Create a mixture of normal distributions fitted to aligned draws, averaged over the labellings.

    A tenth of it is four times as wide, in standard deviations, so that its tails hold those of the posterior.

    Parameters
    ----------
    draws : Tensor
        Aligned, shape ``(n, d)``.
    labels : Labels
    num_parts : int
        Number of normal distributions; fewer where there are too few draws for so many.
    generator : torch.Generator

    Raises
    ------
    DrawsError
        If a coordinate does not move, or there are fewer than ``2 * d`` draws.
    """

    def __init__(self, draws: Tensor, labels: Labels, num_parts: int, generator: torch.Generator) -> None:
        n, d = draws.shape
        if n < 2 * d:
            raise DrawsError(f"{n} draws are too few to fit a {d}-dimensional proposal; give at least {4 * d} in all")
        self.labels = labels
        num_parts = max(1, min(num_parts, n // (DRAWS_A_PARAMETER * d)))
        weight, mean, tril = _fitted(draws, num_parts, generator)
        tril = math.sqrt(WIDENED) * tril
        self._log_weight = torch.cat([weight * (1 - WIDE_WEIGHT), weight * WIDE_WEIGHT]).log()
        self._mean = torch.cat([mean, mean])
        self._tril = torch.cat([tril, WIDE_FACTOR * tril])

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw about the one labelling, shape ``(num_draws, d)``; what is symmetric does not see the difference."""
        part = torch.multinomial(self._log_weight.exp(), num_draws, replacement=True, generator=generator)
        noise = torch.randn(num_draws, self._mean.shape[1], generator=generator, dtype=self._mean.dtype)
        noise = noise.to(self._mean.device)
        return self._mean[part] + (self._tril[part] @ noise.unsqueeze(-1)).squeeze(-1)

    def log_prob(self, u: Tensor) -> Tensor:
        """Return the log density averaged over the labellings, ``(*batch, d) -> (*batch)``."""
        permutations = self.labels.permutations()
        flat = u.reshape(-1, u.shape[-1])
        rows = max(1, CHUNK // (len(permutations) * u.shape[-1] * len(self._mean)))
        parts = []
        for start in range(0, len(flat), rows):
            each = self.labels.permute(flat[start : start + rows].unsqueeze(1), permutations)
            parts.append(self._log_prob(each).logsumexp(-1) - math.log(len(permutations)))
        return torch.cat(parts).reshape(u.shape[:-1])

    def _log_prob(self, u: Tensor) -> Tensor:
        return _log_joint(u, self._log_weight, self._mean, self._tril).logsumexp(-1)


def _log_joint(u: Tensor, log_weight: Tensor, mean: Tensor, tril: Tensor) -> Tensor:
    """Return the log weight and density of each part, ``(*batch, d) -> (*batch, parts)``."""
    d = u.shape[-1]
    inverse = torch.linalg.solve_triangular(tril, torch.eye(d, dtype=u.dtype, device=u.device), upper=False)
    terms = []
    for part in range(len(mean)):
        white = (u - mean[part]) @ inverse[part].T
        constant = inverse[part].diagonal().log().sum() - 0.5 * d * math.log(2 * math.pi)
        terms.append(constant + log_weight[part] - 0.5 * white.square().sum(-1))
    return torch.stack(terms, -1)


def _fitted(draws: Tensor, num_parts: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Fit a mixture of normal distributions by expectation-maximisation: weights, means, Cholesky factors."""
    n, d = draws.shape
    whole = torch.cov(draws.T).reshape(d, d)
    tril = _factor(whole)
    weight = draws.new_full((num_parts,), 1 / num_parts)
    if num_parts == 1:
        return weight, draws.mean(0, keepdim=True), tril.unsqueeze(0)
    order = torch.randperm(n, generator=generator).to(draws.device)
    mean, draws = draws[order[:num_parts]], draws[order[:FITTED]]
    tril = tril.expand(num_parts, d, d)
    for _ in range(EM_STEPS):
        share = _log_joint(draws, weight.log(), mean, tril).softmax(-1)
        size = share.sum(0)
        weight = (size + 1) / (size + 1).sum()
        mean = (share.T @ draws + draws.mean(0)) / (size + 1).unsqueeze(-1)
        deviation = draws.unsqueeze(1) - mean
        scatter = torch.einsum("nj,njd,nje->jde", share, deviation, deviation)
        # A prior worth a few draws a dimension keeps small parts from collapsing.
        covariance = (scatter + DRAWS_A_PARAMETER * d * whole / num_parts) / (size + DRAWS_A_PARAMETER * d)[
            :, None, None
        ]
        tril = torch.stack([_factor(one) for one in covariance])
    return weight, mean, tril


def _factor(covariance: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate does not move, or two move as one; check the chains "
            "and the model"
        )
    return factor
