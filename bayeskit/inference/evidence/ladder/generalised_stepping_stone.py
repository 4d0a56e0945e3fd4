"""Generalised stepping stone: the ladder starts from a reference distribution fitted to posterior draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bayeskit._rebased import RebasedTarget
from bayeskit._settings import whole_number
from bayeskit._statistics import pareto_shape, r_hat
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence.checks import (
    MAX_PARETO_SHAPE,
    MAX_R_HAT,
    belongs,
    finite_chains,
    posterior_problems,
)
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.ladder.reference import SplitStudentT
from bayeskit.inference.evidence.ladder.stepping_stone import stepping_stone
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder, sample_ladder
from bayeskit.target import Target


@estimator()
def generalised_stepping_stone(
    target: Target,
    draws: Draws,
    *,
    num_temperatures: int = 10,
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 500,
    seed: int = 0,
    progress: bool = False,
    checkpoint: str | Path | None = None,
) -> Evidence:
    """Climb by stepping stone from a reference distribution, instead of the prior, to the posterior.

    The reference has independent coordinates, fitted to the first half of every posterior chain,
    and is close to the posterior already: a few evenly spaced steps suffice, also where the prior is
    vague, improper in effect, or cannot be drawn from. In place of the authors' family for each
    kind of parameter stands one for all in unconstrained space, a Student-t with two scales, whose
    tails stay above those of the posterior.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    num_temperatures : int, default 10
        Steps, evenly spaced.
    num_chains : int, default 8
        Chains at each temperature.
    num_warmup, num_samples : int, default 200 and 500
        Iterations of each chain.
    seed : int, default 0
    progress : bool, default False
    checkpoint : path, optional
        File from which an interrupted ladder resumes.

    Returns
    -------
    Evidence
        Not trusted, beside the reasons of :func:`stepping_stone`, if the weights of a step or those of the other
        posterior draws against the reference have too heavy a tail, or the ladder does not end where the
        posterior draws are.

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to fit the reference.
    SettingsError
        If a setting lies outside its domain, or ``draws`` are none.

    References
    ----------
    Fan, Y., Wu, R., Chen, M.-H., Kuo, L., Lewis, P. O. (2011). Choosing among partition
    models in Bayesian phylogenetics. Molecular Biology and Evolution 28, 523-532.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import generalised_stepping_stone
    >>> case = bk.exact.get("three_taxon_tree")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = generalised_stepping_stone(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    num_temperatures = whole_number("num_temperatures", num_temperatures, 2)
    num_samples = whole_number("num_samples", num_samples, 8)
    if not isinstance(draws, Draws):
        raise SettingsError(
            f"draws from the posterior are needed, not {type(draws).__name__}; make them by bayeskit.sample(target), "
            "or take ladder.posterior"
        )
    belongs(draws, target)
    alive = finite_chains(draws)
    reference, rest = fit_reference(alive)
    path = RebasedTarget(target, reference.to(alive.unconstrained))
    ladder = sample_ladder(
        path,
        num_temperatures,
        num_chains,
        num_warmup,
        num_samples,
        seed,
        beta=torch.linspace(0, 1, num_temperatures + 1, dtype=torch.float64),
        checkpoint=checkpoint,
        progress=progress,
    )
    z = stepping_stone(path, ladder)
    problems, facts = posterior_problems(alive)
    chains = [f"posterior draws: {problem}" for problem in problems]
    tails, shapes = _tail_problems(reference, ladder, alive, rest)
    missed, apart = _missed_part(ladder, alive.unconstrained[:, rest])
    estimate = replace(
        z,
        method="generalised_stepping_stone",
        num_evaluations=z.num_evaluations + draws.num_gradients,
        warnings=(*z.warnings, *chains, *tails, *missed),
        diagnostics=z.diagnostics | {f"posterior_{k}": v for k, v in facts.items()} | shapes | apart,
    )
    return with_missed_peak(estimate, target, draws, others=[ladder.posterior])


def fit_reference(draws: Draws) -> tuple[SplitStudentT, slice]:
    """Fit the reference to the first half of every chain; return it with the place of the other half.

    Raises
    ------
    DrawsError
        If there are fewer than 16 draws a chain, or fewer than 50 in the first halves.
    """
    half = draws.num_draws // 2
    if half < 8 or half * draws.num_chains < 50:
        raise DrawsError(
            f"{draws.num_chains} chains of {draws.num_draws} draws are too few to fit a reference distribution; "
            "give at least 16 draws a chain and 100 in all"
        )
    return SplitStudentT.fit(draws.unconstrained[:, :half].flatten(0, 1)), slice(half, None)


def _tail_problems(
    reference: SplitStudentT, ladder: Ladder, draws: Draws, rest: slice
) -> tuple[list[str], dict[str, float]]:
    """Look at the weights of every step, and at those of posterior draws that the reference has not seen."""
    steps = ladder.beta.diff()[:, None, None] * ladder.log_likelihood[:-1]
    step = max(pareto_shape(each) for each in steps)
    seen = draws.unconstrained[:, rest]
    weights = draws.log_density[:, rest] - reference.to(seen).log_prob(seen)
    # Were the last step drawn from the posterior itself, its weights would be these.
    tail = pareto_shape(ladder.beta.diff()[-1] * weights)
    problems = []
    if not step <= MAX_PARETO_SHAPE:
        problems.append(
            f"the weights of a step have a heavy tail (Pareto k {step:.2f} > {MAX_PARETO_SHAPE}): use more temperatures"
        )
    if not tail <= MAX_PARETO_SHAPE:
        problems.append(
            f"the reference has lighter tails than the posterior (Pareto k {tail:.2f} > {MAX_PARETO_SHAPE}): "
            "use more temperatures, or stepping stone from the prior"
        )
    return problems, {"step_pareto_shape": step, "tail_pareto_shape": tail}


def _missed_part(ladder: Ladder, x: Tensor) -> tuple[list[str], dict[str, float]]:
    """Ask whether the ladder's last chains are where the posterior draws are."""
    end = ladder.posterior.unconstrained
    count = min(end.shape[1], x.shape[1])
    both = torch.cat([_evenly(end, count), _evenly(x, count)]).movedim(-1, 0)  # (d, chains, count)
    quartiles: Sequence[Tensor] = [both.flatten(1).quantile(q, 1)[:, None, None] for q in (0.25, 0.5, 0.75)]
    spread = (quartiles[2] - quartiles[0]).clamp(min=torch.finfo(both.dtype).tiny)
    worst = float(r_hat(((both - quartiles[1]) / spread).tanh()).max())
    problems = []
    if not worst <= 2 * MAX_R_HAT - 1:
        problems.append(
            f"the ladder does not end where the posterior draws are (R-hat of both {worst:.3f}): one of them misses "
            "a part of the posterior; run both longer"
        )
    return problems, {"posterior_and_ladder_r_hat": worst}


def _evenly(x: Tensor, count: int) -> Tensor:
    """Return ``count`` evenly spaced draws of every chain."""
    return x[:, torch.linspace(0, x.shape[1] - 1, count, device=x.device).round().long()]
