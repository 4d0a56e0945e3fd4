"""Gradient estimators without replacement: unordered set, importance weights, Rao-Blackwellized top-k."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.inputs import whole_number
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.gradients._estimator import GradientEstimator, WeightedPoints, magic
from bayeskit.inference.gradients._space import Space, gumbel, log_complement

# Draws without replacement: Gumbel top-k, and stochastic beam search for sequences.


class Beam(NamedTuple):
    """Distinct points in the order of drawing: codes ``(k, *batch, variables)``, and their perturbed log probabilities.

    The latter are log probabilities plus Gumbel noise in descending order, shape `(k, *batch)`.
    """

    codes: Tensor
    perturbed: Tensor


def _check_k(k: int, space: Space, what: str = "k") -> None:
    """Raise SettingsError if ``k`` exceeds the size of the support."""
    if k > space.size:
        raise SettingsError(
            f"cannot draw {what}={k} points without replacement from a support of {space.size}; use at most "
            f"{space.size}, or Enumeration"
        )


@torch.no_grad()
def stochastic_beam_search(space: Space, k: int, generator: torch.Generator | None = None) -> Beam:
    r"""Draw `k` points sequentially without replacement, in proportion to their probabilities.

    The points have independent Gumbel noise :math:`G_z`. Beam search finds the `k` largest sums
    :math:`\log p(z) + G_z` without enumeration: the sums of the continuations of a prefix are drawn conditional on
    their maximum, the sum of the prefix.

    Parameters
    ----------
    k : int
        Number of points, from 1 to the size of the support.

    Raises
    ------
    SettingsError
        If `k` is less than 1 or exceeds the size of the support.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2019). Stochastic beams and where to find them: the Gumbel-top-k trick for
    sampling sequences without replacement. ICML.
    """
    _check_k(whole_number("k", k, least=1), space)
    like = space.like
    root = (1, *space.batch_shape)
    codes = torch.zeros(*root, 0, dtype=torch.int64, device=like.device)
    log_probability = torch.zeros(root, dtype=like.dtype, device=like.device)
    perturbed = gumbel(root, like, generator)
    for _ in range(space.num_variables):
        children = log_probability.unsqueeze(-1) + space.conditional(codes)
        noisy = children + gumbel(tuple(children.shape), like, generator)
        noisy = _given_maximum(noisy, perturbed.unsqueeze(-1))
        codes, chosen, perturbed = _best(codes, noisy, k)
        flat = children.movedim(-1, 1).flatten(0, 1)
        log_probability = flat.gather(0, chosen)
    return Beam(codes, perturbed)


def gumbel_top_k(logits: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw `k` categories sequentially without replacement, in proportion to their probabilities.

    Parameters
    ----------
    logits : Tensor
        Shape `(*batch, categories)`.

    Returns
    -------
    Tensor
        Indices in the order of drawing, shape `(*batch, k)`.

    Raises
    ------
    SettingsError
        If `k` is less than 1 or exceeds the number of categories.
    DataError
        If a logit is not finite.

    Examples
    --------
    >>> import torch
    >>> gumbel_top_k(torch.tensor([0.0, 0.0, -200.0]), 2).sort().values
    tensor([0, 1])
    """
    count = logits.shape[-1] if logits.ndim else 0
    if whole_number("k", k, least=1) > count:
        raise SettingsError(f"cannot draw k={k} categories without replacement from {count}; use at most {count}")
    if not logits.is_floating_point() or not bool(logits.isfinite().all()):
        raise DataError("logits must be finite floating-point numbers; remove categories of probability zero")
    with torch.no_grad():
        return (logits + gumbel(tuple(logits.shape), logits, generator)).topk(k, dim=-1).indices


def most_probable_codes(space: Space, k: int) -> Tensor:
    """Return the codes of `k` points found by beam search for the most probable points, `(k, *batch, variables)`."""
    # For independent variables these are the k most probable points; otherwise the beam search may miss some.
    _check_k(whole_number("k", k, least=1), space)
    with torch.no_grad():
        like = space.like
        root = (1, *space.batch_shape)
        codes = torch.zeros(*root, 0, dtype=torch.int64, device=like.device)
        log_probability = torch.zeros(root, dtype=like.dtype, device=like.device)
        for _ in range(space.num_variables):
            codes, _, log_probability = _best(codes, log_probability.unsqueeze(-1) + space.conditional(codes), k)
    return codes


def _best(codes: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best continuations: codes, flat indices of `(prefix, category)`, and scores."""
    count = scores.shape[-1]
    flat = scores.movedim(-1, 1).flatten(0, 1)
    best, chosen = flat.topk(min(k, len(flat)), dim=0)
    before = codes.gather(0, (chosen // count).unsqueeze(-1).expand(*chosen.shape, codes.shape[-1]))
    return torch.cat([before, (chosen % count).unsqueeze(-1)], -1), chosen, best


def _given_maximum(noisy: Tensor, maximum: Tensor) -> Tensor:
    """Return Gumbel variables conditional on their maximum, in a form that does not overflow."""
    largest = noisy.amax(-1, keepdim=True)
    v = maximum - noisy + torch.log1p(-(noisy - largest).exp())
    # For the largest element the logarithm is minus infinity and the result is the maximum.
    return maximum - v.clamp_min(0) - torch.log1p((-v.abs()).exp())


# Probabilities of drawing a set without replacement, and their leave-one-out ratios.
# Gumbel noise is equivalent to exponential arrival times. The set S arrives before all other points with probability
# p(S) = \int_0^\infty e^{-t} \prod_{s \in S} (1 - e^{-a_s t}) dt, a_s = p_s / (1 - sum of p over S). If s is removed
# from the support, the same integral without the factor of s is the probability of the remaining set.

#: Largest set size for exact sums over all orders of drawing.
EXACT_SIZE = 4
#: Lower limit and maximum step of the integral over log t; the integrand is negligible below the limit.
_FIRST, _STEP = -36.0, 0.2
#: Log rate below which 1 - exp(-rate) equals the rate.
_SMALL = -36.0


def log_leave_one_out_ratios(log_probability: Tensor, rest: Tensor) -> Tensor:
    r"""Return :math:`\log p^{D \setminus s}(S \setminus s) / p(S)` of each member, `(k, *batch)` (Kool et al. 2020)."""
    # log_probability: (k, *batch), of the members; rest: (*batch), log probability of the complement, -inf if empty.
    whole, one = _log_probabilities(log_probability, rest, (0, 1))
    return one - whole


def _log_second_order_ratios(log_probability: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\log R(S, s)`, `(k, *batch)`, and :math:`\log R^{D \setminus s}(S, s')`, `(k, k, *batch)`."""
    # R is the ratio of log_leave_one_out_ratios; k >= 2. The first dimension of the second result is s; its diagonal
    # is zero.
    count = len(log_probability)
    whole, one, two = _log_probabilities(log_probability, rest, (0, 1, 2))
    number = torch.zeros(count, count, dtype=torch.int64, device="cpu")
    first, second = _choices(count, 2).T
    number[first, second] = number[second, first] = torch.arange(len(first), device="cpu")
    ratio = two[number] - one.unsqueeze(1)
    own = torch.eye(count, dtype=torch.bool, device=ratio.device).reshape(count, count, *[1] * rest.dim())
    return one - whole, torch.where(own, 0.0, ratio)


def _log_probabilities(log_probability: Tensor, rest: Tensor, left_out: tuple[int, ...]) -> list[Tensor]:
    """Return, for each number in ``left_out``, log probabilities of the set without each choice of so many members."""
    method = _by_orders if len(log_probability) <= EXACT_SIZE else _by_quadrature
    return method(log_probability, rest, left_out)


@cache
def _choices(count: int, size: int) -> Tensor:
    """Return all subsets of members to leave out, `(choices, size)`."""
    found = list(itertools.combinations(range(count), size))
    return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(len(found), size)


@cache
def _orders(count: int, left_out: int) -> Tensor:
    """Return all orders of the remaining members, `(choices, orders, members)`."""
    found = [
        list(itertools.permutations([i for i in range(count) if i not in out]))
        for out in itertools.combinations(range(count), left_out)
    ]
    return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(len(found), len(found[0]), count - left_out)


def _by_orders(log_probability: Tensor, rest: Tensor, left_out: tuple[int, ...]) -> list[Tensor]:
    """Return log sums over the orders of drawing; all terms are positive, so there is no cancellation."""
    found = []
    for size in left_out:
        drawn = log_probability[_orders(len(log_probability), size)]  # (choices, orders, members, *batch)
        if not drawn.shape[2]:
            found.append(drawn.new_zeros((1, *rest.shape)))
            continue
        remaining = torch.logaddexp(drawn.flip(2).logcumsumexp(2).flip(2), rest)
        found.append((drawn - remaining).sum(2).logsumexp(1))
    return found


def _by_quadrature(log_probability: Tensor, rest: Tensor, left_out: tuple[int, ...]) -> list[Tensor]:
    """Return the log of the integral without each choice of ``left_out`` factors."""
    # As a function of log t the integrand is analytic and decays doubly exponentially on one side and exponentially on
    # the other, so the trapezoid rule is exact up to rounding.
    count = len(log_probability)
    # For improbable members the integrand is a power of t times exp(-t), of width 1 / sqrt(count) around log count.
    step = min(_STEP, 0.4 / math.sqrt(count + 1))
    last = math.log(count + 1) + 4.25
    x = torch.arange(_FIRST, last, step, dtype=log_probability.dtype, device=log_probability.device)
    x = x.reshape(-1, *[1] * log_probability.dim())
    log_rate = (log_probability - rest + x).clamp_max(50.0)
    factor = torch.where(log_rate < _SMALL, log_rate, (-torch.expm1(-log_rate.clamp_min(_SMALL).exp())).log())
    density = (x - x.exp()).squeeze(1)
    everyone = (factor.sum(1) + density).unsqueeze(1)
    total = density.logsumexp(0)
    return [(everyone - factor[:, _choices(count, size)].sum(2)).logsumexp(0) - total for size in left_out]


# Importance weights of draws without replacement.


@dataclass(frozen=True)
class ImportanceWithoutReplacement(GradientEstimator):
    r"""Importance-weighted estimator with draws without replacement (priority sampling).

    Draw `k + 1` points without replacement. The perturbed log probability of the last point is a threshold
    :math:`\kappa`. Given :math:`\kappa`, point :math:`z` is among the first `k` with probability
    :math:`q(z) = 1 - \exp(-\exp(\log p(z) - \kappa))`; its weight is :math:`p(z) / q(z)`.

    Parameters
    ----------
    k : int, default 4
        Number of evaluated points. The point `k + 1` is drawn only for the threshold. If `k` is the size of the
        support, the estimate is exact. With `k = 1` the variance is infinite.
    normalised : bool, default False
        Normalize the weights to sum to one. This reduces the variance and introduces a bias.

    Raises
    ------
    SettingsError
        If `k` is less than 1, or exceeds the size of the support on use.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2019). Stochastic beams and where to find them: the Gumbel-top-k trick for
    sampling sequences without replacement. ICML. Duffield, N., Lund, C., Thorup, M. (2007). Priority sampling for
    estimation of arbitrary subset sums. Journal of the ACM 54(6).

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
        """True unless weights are normalized."""
        return not self.normalised

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw weighted points without replacement."""
        _check_k(self.k, space)
        beam = stochastic_beam_search(space, min(self.k + 1, space.size), generator)
        codes = beam.codes[: self.k]
        fixed, score = space.fixed_log_prob(codes), magic(space.log_prob(codes))
        if self.k == space.size:
            return WeightedPoints(space.value(codes), fixed.exp().to(score.dtype) * score)
        log_rate = (fixed - beam.perturbed[self.k]).clamp_max(50.0)
        # Below this log rate, 1 - exp(-rate) equals the rate, and the rate may underflow.
        log_included = torch.where(log_rate < -36, log_rate, log_complement(-log_rate.clamp_min(-36).exp()))
        weights = (fixed - log_included).exp().to(score.dtype) * score
        if self.normalised:
            weights = weights / weights.sum(0)
        return WeightedPoints(space.value(codes), weights)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of points."""
        return self.k


# Rao-Blackwellized top-k: sum over the most probable points, samples from the rest.


@dataclass(frozen=True)
class RaoBlackwell(GradientEstimator):
    r"""Rao-Blackwellized estimator: exact sum over the `k` most probable points, samples from the rest.

    Let :math:`C` be the summed points and :math:`v` a draw from the distribution restricted to the complement of
    :math:`C`. The estimate of the expectation is :math:`\sum_{z \in C} p(z) f(z) + (1 - p(C)) f(v)`. It is unbiased
    for every choice of :math:`C`. Beam search selects :math:`C`; for dependent variables it may miss some of the most
    probable points.

    Parameters
    ----------
    k : int, default 3
        Number of summed points.
    num_samples : int, default 1
        Number of draws from the complement.

    Raises
    ------
    SettingsError
        If `k` or `num_samples` is less than 1, or `k` exceeds the size of the support on use.

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
        """Return the summed points and the draws from the complement."""
        _check_k(self.k, space)
        kept = most_probable_codes(space, self.k)
        weights = space.log_prob(kept).exp()
        if self.k == space.size:
            return WeightedPoints(space.value(kept), weights)
        drawn = sample_outside(space, kept, self.num_samples, generator)
        rest = space.log_rest(kept).exp().to(weights.dtype) / self.num_samples
        drawn_weights = rest * magic(space.log_prob(drawn))
        codes = torch.cat([kept, drawn])
        return WeightedPoints(space.value(codes), torch.cat([weights, drawn_weights]))

    def num_evaluations(self, space: Space) -> int:
        """Return the number of summed and drawn points."""
        return self.k if self.k == space.size else self.k + self.num_samples


def best_k(probabilities: Tensor, num_evaluations: int) -> Tensor:
    r"""Return the number of points to sum in :class:`RaoBlackwell` for a given number of evaluations.

    The variance of the estimate is bounded by a multiple of :math:`(1 - p(C_k)) / (N - k)`, where :math:`C_k` are the
    `k` most probable points. The result minimizes this bound.

    Parameters
    ----------
    probabilities : Tensor
        Shape `(*batch, categories)`.
    num_evaluations : int
        Total number :math:`N` of summed points and draws, at least 1.

    Returns
    -------
    Tensor
        Number of summed points, 0 or more, shape `(*batch)`, int64.

    Raises
    ------
    SettingsError
        If ``num_evaluations`` is less than 1, or there are no categories.
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
    size = probabilities.shape[-1] if probabilities.ndim else 0
    if size < 1:
        raise SettingsError("there are no categories to sum or draw")
    if bool(probabilities.isnan().any()):
        raise DataError("a probability is NaN; check the computation of the logits")
    ordered = probabilities.sort(-1, descending=True).values[..., : min(count - 1, size)]
    rest = 1 - torch.cat([torch.zeros_like(probabilities[..., :1]), ordered.cumsum(-1)], -1)
    draws = count - torch.arange(rest.shape[-1], device=rest.device)
    return (rest.clamp_min(0) / draws).argmin(-1)


@torch.no_grad()
def sample_outside(space: Space, kept: Tensor, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw codes `(num_samples, *batch, variables)` from the complement of ``kept``, `(kept, *batch, variables)`."""
    if len(kept) >= space.size:
        raise SettingsError(f"all {space.size} points are kept, so no point is left to draw")
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
        # Relative to the probability of the prefix, because the probability of many variables underflows.
        share = (log_mass - log_prefix).clamp_max(0.0).exp().unsqueeze(-1)
        left = (log_child.exp() - torch.where(alive.unsqueeze(-1) & own, share, 0.0).sum(0)).clamp_min(0.0)
        if step == space.num_variables - 1:
            # Every continuation is now a single point, so kept points are excluded without subtraction.
            left = torch.where((alive.unsqueeze(-1) & own).any(0), 0.0, log_child.exp())
        chosen = (left.log() + gumbel(tuple(left.shape), like, generator)).argmax(-1, keepdim=True)
        alive = alive & (kept[:, ..., step].unsqueeze(1) == chosen.squeeze(-1))
        log_prefix = log_prefix + log_child.gather(-1, chosen).squeeze(-1)
        codes = torch.cat([codes, chosen], -1)
    return codes


# The unordered-set estimator: draws without replacement, averaged over their order.


@dataclass(frozen=True)
class UnorderedSet(GradientEstimator):
    r"""Unordered-set estimator: points without replacement, weighted by probability and leave-one-out ratio.

    Let :math:`S` be a set drawn without replacement. The estimate :math:`\sum_{s \in S} p(s) R(S, s) f(s)` with the
    leave-one-out ratio :math:`R(S, s) = p^{D \setminus s}(S \setminus s) / p(S)` is unbiased: it is the conditional
    expectation of the single-draw estimate given :math:`S`. Its variance is at most the variance with one draw, and
    zero if :math:`S` is the whole support.

    Parameters
    ----------
    k : int, default 4
        Number of points in the set.
    baseline : bool, default False
        Subtract a second-order estimate of the expectation from each value. It reduces the variance if the values have
        a large mean, and can increase it otherwise.

    Raises
    ------
    SettingsError
        If `k` is less than 1 (2 with a baseline), or exceeds the size of the support on use.

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
        _check_k(self.k, space)
        codes = stochastic_beam_search(space, self.k, generator).codes
        return self.weighted(space, codes)

    def weighted(self, space: Space, codes: torch.Tensor) -> WeightedPoints:
        """Return the weighted points of a set given its codes, `(k, *batch, variables)`."""
        fixed, rest = space.fixed_log_prob(codes), space.log_rest(codes)
        score = magic(space.log_prob(codes))
        # For many variables the probabilities underflow and the ratios overflow; their products, the weights, do not.
        if not self.baseline:
            log_weight = fixed + log_leave_one_out_ratios(fixed, rest)
            return WeightedPoints(space.value(codes), log_weight.exp().to(score.dtype) * score)
        first, second = _log_second_order_ratios(fixed, rest)
        weights = (fixed + first).exp().to(score.dtype) * score
        # Subtract the estimated mean from each value: a term with value zero and the gradient of the score.
        moved = (weights - weights.detach()).unsqueeze(1) * (second + fixed).exp().to(score.dtype)
        return WeightedPoints(space.value(codes), weights - moved.sum(0))

    def num_evaluations(self, space: Space) -> int:
        """Return the size of the set."""
        return self.k
