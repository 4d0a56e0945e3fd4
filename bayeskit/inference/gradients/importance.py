"""Importance weights of draws without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bayeskit._settings import whole_number
from bayeskit.inference.gradients.estimator import GradientEstimator, WeightedPoints, magic
from bayeskit.inference.gradients.space import Space, log_complement
from bayeskit.inference.gradients.without_replacement import check_k, stochastic_beam_search


@dataclass(frozen=True)
class ImportanceWithoutReplacement(GradientEstimator):
    r"""Different points, each weighted by its probability over that of passing the next one's threshold.

    Of `k + 1` points drawn without replacement the last sets a threshold :math:`\kappa` on perturbed log
    probabilities. Given :math:`\kappa`, a point is among the first `k` with probability
    :math:`q(z) = 1 - \exp(-\exp(\log p(z) - \kappa))`, and :math:`p(z) / q(z)` is its weight (priority sampling).

    Parameters
    ----------
    k : int, default 4
        Points; `k + 1` are drawn, and `k` evaluated, unless they are the whole support. With one the variance is
        infinite: the threshold can then be far above all that is left.
    normalised : bool, default False
        Whether weights are made to sum to one, which lowers the variance and is biased.

    Raises
    ------
    SettingsError
        If `k` is below one or larger than the support.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2019). Stochastic beams and where to find them: the Gumbel-top-k trick for
    sampling sequences without replacement. ICML.

    Duffield, N., Lund, C., Thorup, M. (2007). Priority sampling for estimation of arbitrary subset sums. Journal of the
    ACM 54(6).

    Examples
    --------
    >>> import torch
    >>> ImportanceWithoutReplacement(k=3).estimate(torch.zeros(3), torch.tensor([1.0, 3.0, 8.0]))
    tensor([-1.0000, -0.3333,  1.3333])
    """

    k: int = 4
    normalised: bool = False

    def __post_init__(self) -> None:
        whole_number("k", self.k, least=1)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether weights are left as they are."""
        return not self.normalised

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points."""
        check_k(self.k, space)
        beam = stochastic_beam_search(space, min(self.k + 1, space.size), generator)
        codes = beam.codes[: self.k]
        fixed, score = space.fixed_log_prob(codes), magic(space.log_prob(codes))
        if self.k == space.size:
            return WeightedPoints(space.value(codes), fixed.exp().to(score.dtype) * score)
        log_rate = (fixed - beam.perturbed[self.k]).clamp_max(50.0)
        # Below this 1 - exp(-rate) is the rate, which itself may be too small for a number.
        log_included = torch.where(log_rate < -36, log_rate, log_complement(-log_rate.clamp_min(-36).exp()))
        weights = (fixed - log_included).exp().to(score.dtype) * score
        if self.normalised:
            weights = weights / weights.sum(0)
        return WeightedPoints(space.value(codes), weights)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of points."""
        return self.k
