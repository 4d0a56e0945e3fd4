"""The unordered-set estimator: draws without replacement, whatever their order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bayeskit._settings import whole_number
from bayeskit.inference.gradients.estimator import GradientEstimator, WeightedPoints, magic
from bayeskit.inference.gradients.leave_one_out_ratios import log_leave_one_out_ratios, log_second_order_ratios
from bayeskit.inference.gradients.space import Space
from bayeskit.inference.gradients.without_replacement import check_k, stochastic_beam_search


@dataclass(frozen=True)
class UnorderedSet(GradientEstimator):
    r"""Different points, each weighted by its probability times its leave-one-out ratio.

    With :math:`S` drawn without replacement, :math:`\sum_{s \in S} p(s) R(S, s) f(s)` has the expectation of `f`: it is
    the mean of a single draw's value over the orders in which :math:`S` may have come. It never has more variance than
    one draw, and is exact where :math:`S` is the support.

    Parameters
    ----------
    k : int, default 4
        Points in the set.
    baseline : bool, default False
        Whether a second-order estimate of the expectation is subtracted from each value. It helps where values have a
        large mean, and costs variance where they have not.

    Raises
    ------
    SettingsError
        If `k` is below one (two with a baseline), or larger than the support.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2020). Estimating gradients for discrete random variables by sampling without
    replacement. ICLR.

    Examples
    --------
    >>> import torch
    >>> UnorderedSet(k=3).estimate(torch.zeros(3), torch.tensor([1.0, 3.0, 8.0]))
    tensor([-1.0000, -0.3333,  1.3333])
    """

    k: int = 4
    baseline: bool = False

    def __post_init__(self) -> None:
        whole_number("k", self.k, least=2 if self.baseline else 1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw a set."""
        check_k(self.k, space)
        codes = stochastic_beam_search(space, self.k, generator).codes
        return self.weighted(space, codes)

    def weighted(self, space: Space, codes: torch.Tensor) -> WeightedPoints:
        """Return the points of one set with their weights, codes `(k, *batch, variables)`."""
        fixed, rest = space.fixed_log_prob(codes), space.log_rest(codes)
        score = magic(space.log_prob(codes))
        # Of many variables, probabilities are too small and ratios too large for a number; weights are not.
        if not self.baseline:
            log_weight = fixed + log_leave_one_out_ratios(fixed, rest)
            return WeightedPoints(space.value(codes), log_weight.exp().to(score.dtype) * score)
        first, second = log_second_order_ratios(fixed, rest)
        weights = (fixed + first).exp().to(score.dtype) * score
        # Each member's value has the others' mean subtracted: a term without value, whose gradient is the score's.
        moved = (weights - weights.detach()).unsqueeze(1) * (second + fixed).exp().to(score.dtype)
        return WeightedPoints(space.value(codes), weights - moved.sum(0))

    def num_evaluations(self, space: Space) -> int:
        """Return the size of the set."""
        return self.k
