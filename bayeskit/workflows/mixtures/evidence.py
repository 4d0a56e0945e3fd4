"""The evidence of a mixture, whatever the labels of its components do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._statistics import effective_sample_size, mean_error
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError
from bayeskit.inference.evidence import Evidence, bridge_sampling, smc
from bayeskit.inference.evidence.checks import (
    MIN_DRAWS,
    MIN_EFFECTIVE,
    belongs,
    finite_chains,
    posterior_problems,
    with_rounding,
)
from bayeskit.inference.evidence.posterior.bridge_sampling import MAX_ITERATIONS, iterate, terms
from bayeskit.inference.samplers import sample_smc
from bayeskit.models.discrete.mixtures import Labels, aligned
from bayeskit.target import Target
from bayeskit.workflows.mixtures.proposal import SymmetricProposal

MIN_HALF = 8
MAX_DISAGREEMENT = 4.0


def symmetrised_bridge(
    draws: Draws, labels: Labels, *, num_parts: int = 4, num_proposals: int | None = None, seed: int = 0
) -> Evidence:
    """Bridge between the posterior of a mixture and a proposal that is as symmetric as it is.

    The posterior of exchangeable components has ``K!`` equal modes. A sampler that stays in one of them is no worse
    for that, but an estimator that fits its proposal there takes the one for all, and its log evidence is too low by
    up to ``log K!``. Here the draws are aligned to one labelling, a mixture of normal distributions is fitted to them,
    and its density averaged over all permutations of the components. Posterior over proposal is then a function that
    no permutation changes, so that it does not matter which modes the draws visited, nor how often.

    Not cured is a sampler stuck in modes that differ by more than labels; chains that disagree after alignment say so.

    Parameters
    ----------
    draws : Draws
        From the posterior; the first half of each chain fits the proposal, the second enters the bridge.
    labels : Labels
    num_parts : int, default 4
        Number of normal distributions in the proposal.
    num_proposals : int, optional
        By default as many as posterior draws evaluated.
    seed : int, default 0

    Returns
    -------
    Evidence
        ``diagnostics["labellings"]`` is the number of permutations among which the draws were spread.

    Raises
    ------
    DrawsError
        If the draws come from another target, or are too few.
    SettingsError
        If there are more than seven components.

    References
    ----------
    Fruehwirth-Schnatter, S. (2004). Estimating marginal likelihoods for mixture and Markov switching models using
    bridge sampling techniques. Econometrics Journal 7, 143-167.

    Neal, R. M. (1999). Erroneous results in "Marginal likelihood from the Gibbs output". University of Toronto.

    Lee, J. E., Robert, C. P. (2016). Importance sampling schemes for evidence approximation in mixture models. Bayesian
    Analysis 11, 573-597.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, Labels, MixturePrior, exact_log_evidence
    >>> from bayeskit.workflows.mixtures import symmetrised_bridge
    >>> y = torch.tensor([-2.1, -1.9, -1.4, 1.6, 2.0, 2.5], dtype=torch.float64)
    >>> mixture = GaussianMixture(y, 2, MixturePrior.conjugate(0.0, 0.1, 3.0, 0.5))
    >>> target = bk.Target.from_pyro(mixture)
    >>> start = target.sample_prior(1000)
    >>> start = start[target.log_density(start).argmax()]  # all chains in one mode, which is good for adaptation
    >>> draws = bk.sample(target, 4, 100, 200, initial=start, progress=False)
    >>> z = symmetrised_bridge(draws, Labels(target, mixture.exchangeable))
    >>> abs(z.log_evidence - exact_log_evidence(mixture)) < 4 * z.standard_error
    True
    """
    target = labels.target
    belongs(draws, target)
    num_parts = whole_number("num_parts", num_parts, 1)
    count = None if num_proposals is None else whole_number("num_proposals", num_proposals, 1)
    draws, chosen = _aligned_draws(finite_chains(draws), labels)
    half = draws.num_draws // 2
    if half < MIN_HALF:
        raise DrawsError(f"chains of {draws.num_draws} draws are too few; give at least {2 * MIN_HALF}")
    generator = new_generator(seed, stream="symmetrised bridge")
    proposal = SymmetricProposal(draws.unconstrained[:, :half].flatten(0, 1), labels, num_parts, generator)
    x, log_density = draws.unconstrained[:, half:], draws.log_density[:, half:]
    y = proposal.sample(count or log_density.numel(), generator)
    posterior_ratio = (log_density - proposal.log_prob(x)).to(torch.float64)  # (chains, draws)
    proposal_ratio = (target.log_density(y) - proposal.log_prob(y)).to(torch.float64)
    proposal_ratio = torch.where(proposal_ratio.isnan(), -torch.inf, proposal_ratio)
    effective = min(float(effective_sample_size(posterior_ratio)), posterior_ratio.numel())
    log_z, converged, iterations = iterate(posterior_ratio, proposal_ratio, effective)
    numerator, denominator = terms(posterior_ratio, proposal_ratio, log_z, effective)
    variance = float(numerator.var() / numerator.mean().square()) / len(y)
    variance += float((mean_error(denominator) / denominator.mean()).square())

    problems, diagnostics = posterior_problems(draws)
    if not converged:
        problems.append(f"the bridge did not converge in {MAX_ITERATIONS} iterations: use more draws")
    overlap = float(numerator.sum().square() / numerator.square().sum())
    if overlap < MIN_EFFECTIVE:
        problems.append(
            f"posterior and proposal hardly overlap ({overlap:.0f} effective proposals): use mixture_evidence"
        )
    diagnostics |= {
        "iterations": float(iterations),
        "effective_proposals": overlap,
        "labellings": float(len(chosen.unique(dim=0))),
        "log_num_permutations": labels.log_num_permutations,
    }
    return Evidence(
        "symmetrised_bridge",
        log_z,
        with_rounding(math.sqrt(variance), log_density),
        draws.num_gradients + len(y),
        tuple(problems),
        diagnostics,
    )


def mixture_evidence(
    target: Target,
    exchangeable: Sequence[str] = (),
    *,
    num_particles: int = 64,
    num_replicates: int = 16,
    ess_threshold: float = 0.8,
    seed: int = 0,
    progress: bool = True,
) -> Evidence:
    """Estimate the evidence of a mixture by tempering and by a symmetrised bridge, which check each other.

    Tempered particles start at the prior, which has the symmetry of the posterior, so that they reach all modes, those
    that differ by labels and those that do not; their estimate needs no other remedy. The particles that arrive at the
    posterior then feed :func:`symmetrised_bridge`, which is usually the more precise one. Of the trusted estimates the
    one with the smaller error is returned, and where neither is trusted the tempered one, whose particles feed the
    other. Nor is any trusted where they differ by more than four standard errors, or no bridge can be built.

    Parameters
    ----------
    target : Target
        Such as ``Target.from_pyro(GaussianMixture(...))``.
    exchangeable : sequence of str
        Sites whose first dimension is the component, such as :attr:`GaussianMixture.exchangeable`. Where there are
        none, the bridge is a plain one; with more than seven components tempering stands alone.
    num_particles, num_replicates : int, default 64 and 16
    ess_threshold : float, default 0.8
        Of :func:`~bayeskit.inference.samplers.sample_smc`.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    Evidence
        ``method`` says which of the two it is; ``diagnostics`` have both.

    Raises
    ------
    UnknownNameError, ModelError
        If ``exchangeable`` are not exchangeable sites of the target.
    SettingsError
        If there are fewer than eight particles, or a setting lies outside its domain.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, MixturePrior, exact_log_evidence
    >>> from bayeskit.workflows.mixtures import mixture_evidence
    >>> y = torch.tensor([-2.1, -1.9, -1.4, 1.6, 2.0, 2.5], dtype=torch.float64)
    >>> mixture = GaussianMixture(y, 2, MixturePrior.conjugate(0.0, 0.1, 3.0, 0.5))
    >>> size = {"num_particles": 48, "num_replicates": 10, "ess_threshold": 0.7}
    >>> z = mixture_evidence(bk.Target.from_pyro(mixture), mixture.exchangeable, **size, progress=False)
    >>> abs(z.log_evidence - exact_log_evidence(mixture)) < 4 * z.standard_error
    True
    """
    num_particles = whole_number("num_particles", num_particles, MIN_DRAWS)
    started = time.monotonic()
    labels = Labels(target, exchangeable) if exchangeable else None
    run = sample_smc(target, num_particles, num_replicates, seed, ess_threshold=ess_threshold, progress=progress)
    tempered = smc(target, run, seed=seed)
    estimates = [tempered]
    draws = _halves_of_replicates(run.draws)
    try:
        if labels is None:
            estimates.append(bridge_sampling(target, draws, seed=seed))
        elif labels.listable:
            estimates.append(symmetrised_bridge(draws, labels, seed=seed))
    except DrawsError as error:
        problem = f"no bridge checks this estimate ({error}): raise num_particles"
        estimates = [replace(tempered, warnings=(*tempered.warnings, problem))]
    return replace(_reconciled(estimates), seconds=time.monotonic() - started)


def _halves_of_replicates(draws: Draws) -> Draws:
    """Join replicates in pairs, so that a bridge fits to one half of them and is evaluated on the other.

    Particles of one replicate share ancestors, those of two do not.
    """
    pairs = draws.num_chains // 2
    if pairs == 0:
        return draws

    def joined(x: Tensor) -> Tensor:
        return torch.cat([x[:pairs], x[pairs : 2 * pairs]], 1)

    return replace(
        draws,
        unconstrained=joined(draws.unconstrained),
        log_prior=joined(draws.log_prior),
        log_likelihood=joined(draws.log_likelihood),
        beta=draws.beta[:pairs],
        sample_stats={},
    )


def _reconciled(estimates: Sequence[Evidence]) -> Evidence:
    """Return the better one of one or two estimates, with a warning where they contradict each other."""
    chosen = min((z for z in estimates if z.trusted), key=lambda z: z.standard_error, default=estimates[0])
    facts, problems = dict(chosen.diagnostics), list(chosen.warnings)
    for z in estimates:
        facts |= {f"{z.method}.log_evidence": z.log_evidence, f"{z.method}.standard_error": z.standard_error}
    one, other = estimates[0], estimates[-1]
    difference = abs(one.log_evidence - other.log_evidence)
    error = math.hypot(one.standard_error, other.standard_error)
    if not difference <= MAX_DISAGREEMENT * error:
        problems.append(
            f"{one.method} and {other.method} differ by {difference:.2f} nats where their error is {error:.2g}: raise "
            "ess_threshold and num_particles"
        )
    return replace(
        chosen,
        num_evaluations=max(z.num_evaluations for z in estimates),
        warnings=tuple(problems),
        diagnostics=facts,
    )


def _aligned_draws(draws: Draws, labels: Labels) -> tuple[Draws, Tensor]:
    """Return the draws with one labelling, under which chains can be compared, and the permutations taken."""
    flat = draws.unconstrained.flatten(0, 1)
    u, chosen = aligned(flat, labels, flat[int(draws.log_density.flatten().argmax())])
    return replace(draws, unconstrained=u.reshape(draws.unconstrained.shape)), chosen
