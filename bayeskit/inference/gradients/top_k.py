"""Rao-Blackwellised top-k: the most probable points are summed, the others sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.gradients.estimator import GradientEstimator, WeightedPoints, magic
from bayeskit.inference.gradients.space import Space, gumbel
from bayeskit.inference.gradients.without_replacement import check_k, most_probable


@dataclass(frozen=True)
class RaoBlackwell(GradientEstimator):
    r"""Sum the `k` most probable points exactly and sample from what is left.

    With kept points :math:`C` and a draw `v` from the distribution given that it lies outside, the estimate of the
    expectation is :math:`\sum_{z \in C} p(z) f(z) + (1 - p(C)) f(v)`. It is unbiased whatever points are kept.

    Parameters
    ----------
    k : int, default 3
        Points that are summed.
    num_samples : int, default 1
        Draws from what is left.

    Raises
    ------
    SettingsError
        If `k` or `num_samples` is below one, or `k` larger than the support.

    References
    ----------
    Liu, R., Regier, J., Tripuraneni, N., Jordan, M., McAuliffe, J. (2019). Rao-Blackwellized stochastic gradients for
    discrete distributions. ICML.

    Examples
    --------
    >>> import torch
    >>> RaoBlackwell(k=2).estimate(torch.zeros(3), torch.tensor([1.0, 3.0, 8.0]))
    tensor([-1.0000, -0.3333,  1.3333])
    """

    k: int = 3
    num_samples: int = 1

    def __post_init__(self) -> None:
        whole_number("k", self.k, least=1)
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Return the kept points and those drawn from the rest."""
        check_k(self.k, space)
        kept = most_probable(space, self.k)
        weights = space.log_prob(kept).exp()
        if self.k == space.size:
            return WeightedPoints(space.value(kept), weights)
        drawn = sample_outside(space, kept, self.num_samples, generator)
        rest = space.log_rest(kept).exp().to(weights.dtype) / self.num_samples
        drawn_weights = rest * magic(space.log_prob(drawn))
        codes = torch.cat([kept, drawn])
        return WeightedPoints(space.value(codes), torch.cat([weights, drawn_weights]))

    def num_evaluations(self, space: Space) -> int:
        """Return how many points are summed or drawn."""
        return self.k if self.k == space.size else self.k + self.num_samples


def best_k(probabilities: Tensor, num_evaluations: int) -> Tensor:
    r"""Return how many points to sum when so many evaluations may be spent on sums and draws together.

    The variance left over is at most in proportion to the mass of the rest over the draws that share it,
    :math:`(1 - p(C_k)) / (N - k)`, which is made smallest.

    Parameters
    ----------
    probabilities : Tensor
        Shape `(*batch, categories)`.
    num_evaluations : int
        :math:`N`, at least one.

    Returns
    -------
    Tensor
        From zero on, shape `(*batch)`, int64.

    Raises
    ------
    SettingsError
        If there is nothing to spend.
    DataError
        If a probability is NaN.

    References
    ----------
    Liu, R., Regier, J., Tripuraneni, N., Jordan, M., McAuliffe, J. (2019). Rao-Blackwellized stochastic gradients for
    discrete distributions. ICML.

    Examples
    --------
    >>> import torch
    >>> best_k(torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]), 2)
    tensor([1, 0])
    """
    count = whole_number("num_evaluations", num_evaluations, least=1)
    size = probabilities.shape[-1]
    if size < 1:
        raise SettingsError("there are no categories to sum or draw")
    if bool(probabilities.isnan().any()):
        raise DataError("a probability is NaN; look at what the logits are made of")
    ordered = probabilities.sort(-1, descending=True).values[..., : min(count - 1, size)]
    rest = 1 - torch.cat([torch.zeros_like(probabilities[..., :1]), ordered.cumsum(-1)], -1)
    draws = count - torch.arange(rest.shape[-1], device=rest.device)
    return (rest.clamp_min(0) / draws).argmin(-1)


@torch.no_grad()
def sample_outside(space: Space, kept: Tensor, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw points independently, given that they are none of some others.

    Parameters
    ----------
    space : Space
    kept : Tensor
        Codes of different points, `(kept, *batch, variables)`.
    num_samples : int
    generator : torch.Generator, optional

    Returns
    -------
    Tensor
        Codes `(num_samples, *batch, variables)`.

    Raises
    ------
    SettingsError
        If nothing is left.
    """
    if len(kept) >= space.size:
        raise SettingsError(f"all {space.size} points are kept, so that none is left to draw")
    like = space.fixed_log_prob(kept)
    log_mass = like.unsqueeze(1).expand(-1, num_samples, *like.shape[1:])
    alive = torch.ones_like(log_mass, dtype=torch.bool)
    shape = (num_samples, *space.batch_shape)
    codes = torch.zeros(*shape, 0, dtype=torch.int64, device=like.device)
    log_prefix = torch.zeros(shape, dtype=like.dtype, device=like.device)
    for step in range(space.num_variables):
        log_child = space.conditional(codes).to(like).expand(*shape, -1)
        category = torch.arange(space.num_categories, device=like.device)
        own = kept[:, ..., step].unsqueeze(1).unsqueeze(-1) == category  # (kept, 1, *batch, categories)
        # In units of the beginning's probability, for that of many variables is too small for a number.
        share = (log_mass - log_prefix).clamp_max(0.0).exp().unsqueeze(-1)
        left = (log_child.exp() - torch.where(alive.unsqueeze(-1) & own, share, 0.0).sum(0)).clamp_min(0.0)
        if step == space.num_variables - 1:
            # Every continuation is a point, kept or not: no difference of nearly equal numbers decides which.
            left = torch.where((alive.unsqueeze(-1) & own).any(0), 0.0, log_child.exp())
        chosen = (left.log() + gumbel(tuple(left.shape), like, generator)).argmax(-1, keepdim=True)
        alive = alive & (kept[:, ..., step].unsqueeze(1) == chosen.squeeze(-1))
        log_prefix = log_prefix + log_child.gather(-1, chosen).squeeze(-1)
        codes = torch.cat([codes, chosen], -1)
    return codes
