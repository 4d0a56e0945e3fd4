"""The log evidence as a sum of leave-p-out cross-validation scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.generalized.cross_validation.data_particles import Carriage
from bayeskit.inference.generalized.cross_validation.held_out_sets import all_sets, as_sizes, check_number
from bayeskit.inference.generalized.cross_validation.leave_out import LeaveOut
from bayeskit.inference.generalized.cross_validation.result import CrossValidation, no_error
from bayeskit.inference.generalized.cross_validation.weighted_data import WeightedData
from bayeskit.target import Target

BLOCK = 4096  # training sets at a time


def cross_validation_evidence(
    target: Target,
    draws: Draws | None = None,
    *,
    p: int | Iterable[int] | None = None,
    held_out: int | Literal["all"] = 32,
    num_particles: int = 256,
    carriage: Carriage | None = None,
    groups: Tensor | None = None,
    max_sets: int = 1024,
    seed: int = 0,
) -> CrossValidation:
    r"""Cross-validate a posterior by leaving out any number of data; over all numbers, the scores sum to the evidence.

    With :math:`S(p)` the mean, over all sets of :math:`p` held-out data and over the data of each, of the log
    density of one held-out datum given those not held out,

    .. math:: \log p(y_1, \dots, y_n) = \sum_{p=1}^n S(p).

    The evidence thus counts :math:`S(n)`, which only the prior predicts, as much as leave-one-out. Summing from
    ``p = 1`` to some ``P < n`` instead spends ``n - P`` data on preparing the prior.

    Where ``draws`` are given, they are weighted by one over the likelihood of what is held out, the tails of the
    weights smoothed; sets with Pareto k above 0.7, which are soon all but those of few data, are redone by
    particles carried from draws to the training data. Without draws, particles start in the prior: for random sets
    they see the data in random orders and predict, at every step, all they have not seen; for all sets they are
    tempered to the training data of each.

    Parameters
    ----------
    target : Target
        With a pointwise log likelihood of data that are independent given its parameter. For a
        :class:`GibbsPosterior` the score is minus the weighted loss in place of the log density. Its prior must be
        proper, unless draws are given and fewer than all data held out.
    draws : Draws, optional
        Of the posterior.
    p : int or iterable of int, optional
        How many data are held out; by default every number from 1 to ``n``. ``range(1, P + 1)`` gives the cumulative
        score of ``P`` data after ``n - P`` preparatory ones.
    held_out : int or "all", default 32
        So many random sets, or all of them, which are also taken where there are no more. Where random sets are of few
        kinds, as of discrete data, a rare kind may be missed, and errors are widened for that.
    num_particles : int, default 256
        Of each population.
    carriage : Carriage, optional
        How particles are carried from one part of the data to another.
    groups : Tensor, optional
        Integers, one for each observation: those of equal number are held out together, as one datum.
    max_sets : int, default 1024
        Enumerate no more than this.
    seed : int, default 0

    Returns
    -------
    CrossValidation

    Raises
    ------
    SettingsError
        If ``p`` does not lie between 1 and ``n``, there are too many sets to enumerate, or the prior cannot be drawn
        from and is needed.
    ModelError
        If the target has no pointwise log likelihood, or one that does not add up to its log likelihood.
    DrawsError
        If the draws are not those of the target's posterior.

    References
    ----------
    Fong, E., Holmes, C. C. (2020). On the marginal likelihood and cross-validation. Biometrika 107, 489-496.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
    Machine Learning Research 25(72).

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    >>> result = cross_validation_evidence(target, held_out="all")
    >>> abs(result.log_evidence - torch.tensor(1 / 20).log().item()) < 5 * result.log_evidence_standard_error
    True
    """
    begin = time.monotonic()
    data = WeightedData(target, groups)
    sizes = as_sizes(p, data.num_data)
    count = None if held_out == "all" else whole_number("held_out", held_out, 2)
    if count is None:
        most = whole_number("max_sets", max_sets, 1)
        check_number(data.num_data, sizes, most, "take held_out= a number of random sets, or raise max_sets")
    if draws is not None and sizes[-1] == data.num_data and not target.can_sample_prior:
        raise SettingsError(
            f"with all {data.num_data} data held out only the prior predicts, and it cannot be drawn from; take "
            f"p=range(1, {data.num_data}) or fewer"
        )
    leave_out = LeaveOut(
        data,
        sizes,
        whole_number("num_particles", num_particles, 8),
        carriage or Carriage(),
        new_generator(seed, target.device, stream="cross-validation"),
    )
    if draws is not None:
        method, scores = "importance", leave_out.by_importance(draws, count)
    elif count is not None:
        method, scores = "orders", leave_out.by_orders(count)
    else:
        method, scores = "tempering", leave_out.by_tempering()
    return CrossValidation(
        method,
        data.num_data,
        torch.tensor(sizes),
        scores.score,
        scores.standard_error,
        scores.cumulative_standard_error,
        scores.num_sets,
        tuple(scores.problems),
        scores.pareto_k,
        scores.num_rerun,
        scores.prequential,
        scores.num_evaluations,
        time.monotonic() - begin,
    )


def enumerated_cross_validation(
    log_evidence: Callable[[Tensor], Tensor],
    num_data: int,
    p: int | Iterable[int] | None = None,
    *,
    max_sets: int = 2**16,
) -> CrossValidation:
    """Cross-validate a model whose evidence of any part of the data is known, by enumerating held-out sets.

    Parameters
    ----------
    log_evidence : callable
        ``(m, n) -> (m,)``: log evidence of the data that each row of zeros and ones marks; of none it is zero.
        The rows are in double precision, so that what is computed from them is.
    num_data : int
        The number of data ``n``.
    p : int or iterable of int, optional
        How many data are held out; by default every number from 1 to ``n``.
    max_sets : int, default 65536
        Enumerate no more than this.

    Returns
    -------
    CrossValidation
        Exact.

    Raises
    ------
    SettingsError
        If ``p`` does not lie between 1 and ``n``, or there are too many sets.
    ShapeError
        If ``log_evidence`` returns another shape.

    References
    ----------
    Fong, E., Holmes, C. C. (2020). On the marginal likelihood and cross-validation. Biometrika 107, 489-496.

    Examples
    --------
    >>> import torch
    >>> y = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    >>> def log_evidence(part):  # of coin flips, the chance of heads uniform
    ...     heads, flips = (part * y).sum(1), part.sum(1)
    ...     return torch.lgamma(1 + heads) + torch.lgamma(1 + flips - heads) - torch.lgamma(2 + flips)
    >>> result = enumerated_cross_validation(log_evidence, 4)
    >>> result.score, round(result.log_evidence, 6)
    (tensor([-0.7855, -0.7651, -0.7520, -0.6931], dtype=torch.float64), -2.995732)
    """
    num_data = whole_number("num_data", num_data, 1)
    sizes = as_sizes(p, num_data)
    remedy = "estimate them with cross_validation_evidence(target, held_out=...), or raise max_sets"
    check_number(num_data, sizes, whole_number("max_sets", max_sets, 1), remedy)
    scores, counts = [], []
    for size in sizes:
        training = ~all_sets(num_data, size)
        total = sum(float(_gains(log_evidence, block).sum()) for block in training.split(BLOCK))
        scores.append(total / (size * len(training)))
        counts.append(len(training))
    exact = no_error(sizes)
    score = torch.tensor(scores, dtype=torch.float64)
    return CrossValidation("enumeration", num_data, torch.tensor(sizes), score, exact, exact, torch.tensor(counts))


def _gains(log_evidence: Callable[[Tensor], Tensor], training: Tensor) -> Tensor:
    """Return the log predictive density of each datum that is not among the training data ``(m, n)``."""
    which, datum = (~training).nonzero(as_tuple=True)
    one_more = training[which].scatter(1, datum.unsqueeze(1), True)
    return _evidence_of(log_evidence, one_more) - _evidence_of(log_evidence, training)[which]


def _evidence_of(log_evidence: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
    value = torch.as_tensor(log_evidence(part.to(torch.float64)))
    if tuple(value.shape) != (len(part),):
        raise ShapeError(f"log_evidence maps {tuple(part.shape)} to {tuple(value.shape)} instead of ({len(part)},)")
    return value.to(torch.float64).cpu()
