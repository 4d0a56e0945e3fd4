"""Evaluation of a marginal density at many vectors: by a traced pass, by more of them, and by a guarded search.

An engine traces functions of one tensor whose last result has the shape of that tensor. So a traced pass takes the
remaining coordinates and starts of the inner ones side by side, ``(n, p + m)``, and returns the gradient and the next
starts side by side; :func:`evaluate_integral` gives them their names again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._compiler import FailingApart
from bayeskit._core.evaluation import Evaluation, Evaluator, tempered
from bayeskit.inference.marginal._inner_density import RemainingPrior
from bayeskit.inference.marginal._integral import InnerIntegral, IntegralValue, SearchedIntegral

#: Further passes, each from where the last one ended, before a guarded search.
_MAX_PASSES = 8


class MarginalEvaluation(NamedTuple):
    """The marginal density at ``n`` vectors."""

    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,), NaN where neither mode nor finite integral is found
    gradient: Tensor  # (n, p), of the tempered density
    next_start: Tensor  # (n, m), from where a further pass goes on

    def log_density(self, beta: Tensor) -> Tensor:
        """Return the log density at inverse temperatures, ``(n,) -> (n,)``."""
        return tempered(self.log_prior, self.log_likelihood, beta)

    def zero_where_lost(self) -> MarginalEvaluation:
        """Return the evaluation with density zero where neither mode nor finite integral is found."""
        lost = self.log_likelihood.isnan()
        return self._replace(log_likelihood=torch.where(lost, -torch.inf, self.log_likelihood))

    def with_rows(self, rows: Tensor, other: MarginalEvaluation, where: Tensor) -> MarginalEvaluation:
        """Return the evaluation with those of ``rows`` ``(k,)`` from another where ``where`` ``(k,)``."""
        pairs = zip(self, other, strict=True)
        return MarginalEvaluation(*(a.index_put((rows[where],), b[where]) for a, b in pairs))


def traced_pass(integral: InnerIntegral, u: Tensor, beta: Tensor) -> Evaluation:
    """Evaluate remaining coordinates and starts side by side, ``(n, p + m), (n,)``; the gradient holds next starts."""
    r, start = u.split([integral.density.dim, integral.density.num_inner], -1)
    prior = integral.density.prior(r)
    found = _evaluation(prior, integral.evaluate(r, start, prior), beta)
    return Evaluation(
        log_prior=found.log_prior,
        log_likelihood=found.log_likelihood,
        log_density=found.log_density(beta),
        gradient=torch.cat([found.gradient, found.next_start], -1),
    )


def evaluate_integral(
    integral: InnerIntegral, one_pass: Evaluator, r: Tensor, beta: Tensor, chunk: int
) -> MarginalEvaluation:
    """Evaluate at ``(n, p), (n,)`` by a traced pass from predicted modes, and where it ends at none, by a search.

    ``one_pass`` evaluates ``chunk`` rows at a time.
    """
    start = integral.start(r)
    found = _one_pass(one_pass, r, start, beta)
    lost = found.log_likelihood.isnan()
    if not isinstance(integral, SearchedIntegral) or not bool(lost.any()):
        return found
    for _ in range(_MAX_PASSES):
        start = torch.where(lost.unsqueeze(-1), found.next_start, start)
        some = (lost & start.isfinite().all(-1)).nonzero()[:, 0]
        if not len(some):
            break
        if len(some) > len(r) - chunk:  # as many calls as for all
            some = torch.arange(len(r), device=r.device)
        again = _one_pass(one_pass, r[some], start[some], beta[some])
        found = found.with_rows(some, again, lost[some])
        lost = found.log_likelihood.isnan()
        if not bool(lost.any()):
            return found
    for some in lost.nonzero()[:, 0].split(chunk):
        with torch.no_grad(), FailingApart():
            prior = integral.density.prior(r[some])
            searched = _evaluation(prior, integral.searched(r[some], prior), beta[some])
        found = found.with_rows(some, searched, lost[some])
    return found


def evaluate_untraced(integral: InnerIntegral, r: Tensor) -> MarginalEvaluation:
    """Evaluate at ``(n, p)`` without a graph, all rows at a time."""

    def one_pass(u: Tensor, beta: Tensor) -> Evaluation:
        with torch.no_grad(), FailingApart():
            return traced_pass(integral, u, beta)

    return evaluate_integral(integral, one_pass, r, torch.ones_like(r[:, 0]), len(r))


def _one_pass(one_pass: Evaluator, r: Tensor, start: Tensor, beta: Tensor) -> MarginalEvaluation:
    """Name the results of a traced pass."""
    found = one_pass(torch.cat([r, start], -1), beta)
    gradient, next_start = found.gradient.split([r.shape[-1], start.shape[-1]], -1)
    return MarginalEvaluation(
        log_prior=found.log_prior, log_likelihood=found.log_likelihood, gradient=gradient, next_start=next_start
    )


def _evaluation(prior: RemainingPrior, integral: IntegralValue, beta: Tensor) -> MarginalEvaluation:
    """Join prior and integral, NaN and without a slope of its own where no integral is found."""
    slope = torch.where(integral.found.unsqueeze(-1), integral.gradient, 0.0)
    return MarginalEvaluation(
        log_prior=prior.value,
        log_likelihood=torch.where(integral.found, integral.log_likelihood, torch.nan),
        gradient=prior.gradient + beta.unsqueeze(-1) * slope,
        next_start=integral.next_start,
    )
