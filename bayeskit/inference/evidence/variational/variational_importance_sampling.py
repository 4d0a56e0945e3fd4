"""Importance sampling from a mean field."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit._statistics import log_mean_exp, pareto_shape, weight_effective_sample_size
from bayeskit._torch import new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.checks import belongs, weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.coverage import missed_draws
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.mode.missed import missed_mass, same_likelihood, without_infinity
from bayeskit.inference.evidence.modes import curvature
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.variational.mean_field import MeanField, fit_mean_field
from bayeskit.inference.evidence.variational.normal import normal_log_prob, sample_normal, sample_tails, tails_log_prob
from bayeskit.target import Target

CHECK_DRAWS = 4000
MAX_UNSEEN = 0.5
MAX_LOCAL_SHAPE = {"normal": 0.5, "mixture": 0.6}
"""Where normal weights lose their variance, and where replicates show that the mixture's error becomes too small."""


@estimator()
def variational_importance_sampling(
    target: Target,
    *,
    mean_field: MeanField | None = None,
    draws: Draws | None = None,
    num_draws: int = 10_000,
    tail_share: float = 0.5,
    seed: int = 0,
) -> Evidence:
    """Sample by importance from independent normal distributions fitted by the evidence lower bound.

    The fit is narrower than the posterior where coordinates are correlated, and its
    tails are lighter than most. So half of the draws come from Student-t
    distributions of the same locations and scales, and all are weighed by the mixture
    of both, which costs at most half of the effective draws. What even these do not
    reach is looked for with wider draws, at the other optima of the bound, and in the
    curvature of the density.

    Parameters
    ----------
    target : Target
    mean_field : MeanField, optional
        Of this target; fitted if not given.
    draws : Draws, optional
        Posterior draws, to see whether the proposal covers them.
    num_draws : int, default 10,000
    tail_share : float, default 0.5
        Share of the draws that come from the Student-t distributions, from zero
        (the normal distributions alone) to below one.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target.
    SettingsError
        If there are fewer than two draws, the share is not in [0, 1), or the mean field is of another
        target.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture
    distributions. Technometrics 37, 185-194.
    Domke, J., Sheldon, D. (2018). Importance weighting and variational inference.
    Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.variational import variational_importance_sampling
    >>> case = bk.exact.get("three_taxon_tree")
    >>> z = variational_importance_sampling(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    tail_share = real_number("tail_share", tail_share)
    if not 0 <= tail_share < 1:
        raise SettingsError(f"tail_share must be at least 0 and below 1, not {tail_share!r}")
    # However few the draws, those of the normal distributions are not left out of the mixture.
    num_tail_draws = min(round(tail_share * num_draws), num_draws - 1)
    if draws is not None:
        belongs(draws, target)
    q = mean_field or fit_mean_field(target, seed=seed)
    spent = q.require(target) + q.num_evaluations + (0 if draws is None else draws.num_gradients)
    generator = new_generator(seed, stream="variational importance sampling")
    proposal = _Proposal(q, num_draws, num_tail_draws)
    x = proposal.sample(generator)
    with one_thread():
        log_prior, log_likelihood = target.evaluate(x)
    log_density, problems = without_nan(log_prior + log_likelihood)
    log_density, infinite = without_infinity(log_density)
    log_weights = log_density.double() - proposal.log_prob(x)
    log_z, largest = float(log_mean_exp(log_weights.unsqueeze(0))), float(log_weights.max())
    error = with_rounding(proposal.error((log_weights - log_z).exp()), log_density)
    shape, effective = pareto_shape(log_weights), float(weight_effective_sample_size(log_weights))
    local, differences = _local_shape(target, q)
    unseen = _unseen_variance(target, q, proposal, log_z, largest, generator) / (num_draws * error**2)
    problems = [*q.problems, *problems, *(infinite or weight_problems(shape, effective))]
    if local > MAX_LOCAL_SHAPE["mixture" if tail_share else "normal"]:
        problems.append(
            f"the posterior is much wider than the mean field in some direction (Pareto k {local:.2f} by its "
            "curvature): use bridge sampling"
        )
    if unseen > MAX_UNSEEN:
        problems.append(
            f"part of the posterior lies where the proposal hardly reaches (it adds {100 * unseen:.3g} % to the "
            "variance of the weights): use bridge sampling or nested sampling"
        )
    others = torch.stack([location for location, _ in q.others]) if q.others else None
    missed, looks = missed_mass(
        target, x, log_weights, log_z, error, log_prob=proposal.log_prob, others=others, seed=seed
    )
    problems += missed_draws(proposal.log_prob, draws, largest) + missed + same_likelihood(log_likelihood)
    return Evidence(
        "variational_importance_sampling",
        log_z,
        error,
        num_draws + spent + differences + looks + CHECK_DRAWS * (1 + len(q.others)),
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective, "local_pareto_shape": local, "unseen_variance": unseen},
    )


class _Proposal:
    """A mixture of a mean field and of Student-t distributions, with a fixed number of draws from each."""

    def __init__(self, mean_field: MeanField, num_draws: int, num_tail_draws: int) -> None:
        self._q, self._counts = mean_field, (num_draws - num_tail_draws, num_tail_draws)

    def sample(self, generator: torch.Generator) -> Tensor:
        location, scale = self._q.location, self._q.scale
        return torch.cat(
            [
                sample_normal(location, scale, self._counts[0], generator),
                sample_tails(location, scale, self._counts[1], generator),
            ]
        )

    def log_prob(self, x: Tensor) -> Tensor:
        location, scale = self._q.location, self._q.scale
        narrow = normal_log_prob(location, scale, x)
        if not self._counts[1]:
            return narrow
        share = self._counts[1] / sum(self._counts)
        return torch.logaddexp(narrow + math.log1p(-share), tails_log_prob(location, scale, x) + math.log(share))

    def error(self, weights: Tensor) -> float:
        """Return the standard error of the mean weight; how many draws each part gives is not left to chance."""
        parts = [part for part in weights.split(self._counts) if len(part) > 1]
        return math.sqrt(sum(len(part) * float(part.var()) for part in parts)) / len(weights)


def _local_shape(target: Target, q: MeanField) -> tuple[float, int]:
    """Pareto shape of the weights of the normal distributions if the log density were quadratic, and evaluations.

    Along an eigenvector of the curvature, in units of the mean field, the weight is
    ``exp((1 - eigenvalue) z^2 / 2)`` with ``z`` normal.
    """
    precision, spent = curvature(target, q.location)
    if not bool(precision.isfinite().all()):
        return math.inf, spent
    return 1 - float(torch.linalg.eigvalsh(q.scale.unsqueeze(-1) * precision * q.scale).min()), spent


def _unseen_variance(
    target: Target, q: MeanField, proposal: _Proposal, log_z: float, largest: float, generator: torch.Generator
) -> float:
    """Estimate what regions with larger weights than any that was drawn add to the weights' relative variance.

    From Student-t distributions at every optimum of the bound, at the best one twice as wide as the fit.
    """
    unseen = 0.0
    for location, scale in ((q.location, 2 * q.scale), *q.others):
        x = sample_tails(location, scale, CHECK_DRAWS, generator)
        with one_thread():
            log_density = target.log_density(x).double().nan_to_num(nan=-torch.inf, posinf=-torch.inf)
            log_weights = log_density - proposal.log_prob(x)
            squared = log_weights + log_density - tails_log_prob(location, scale, x) - 2 * log_z
        terms = torch.where(log_weights > largest, squared, -torch.inf)
        unseen = max(unseen, float(log_mean_exp(terms.unsqueeze(0)).clamp(max=700.0).exp()))
    return unseen
