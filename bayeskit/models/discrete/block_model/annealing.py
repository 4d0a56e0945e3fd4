"""The evidence of a block model where assignments cannot be listed."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import AccuracyWarning
from bayeskit.models.discrete.block_model.stochastic_block_model import StochasticBlockModel, co_assignment

#: Effective chains below which a result is not to be relied on, or half of the chains where they are few.
_LEAST_EFFECTIVE = 50
#: Steps of the first pilot run.
_FIRST_PILOT = 50


class AnnealedEvidence(NamedTuple):
    """Annealed importance sampling of assignments.

    Attributes
    ----------
    log_evidence : float
        Log of the mean weight; the mean weight is unbiased.
    standard_error : float
        Of ``log_evidence``, from the spread of the weights.
    assignments : Tensor of int
        Where the chains ended, ``(chains, nodes)``.
    log_weights : Tensor
        Of the chains, ``(chains,)``.
    num_steps : int
        Sweeps of each chain.
    """

    log_evidence: float
    standard_error: float
    assignments: Tensor
    log_weights: Tensor
    num_steps: int

    def __repr__(self) -> str:
        chains, nodes = self.assignments.shape
        return (
            f"AnnealedEvidence({self.log_evidence:.4f} +- {self.standard_error:.4f}, {chains} chains of "
            f"{self.num_steps} steps on {nodes} nodes, worth {self.effective_sample_size:.0f} chains)"
        )

    @property
    def weights(self) -> Tensor:
        """Of the chains, adding up to one, ``(chains,)``."""
        return self.log_weights.softmax(0)

    @property
    def effective_sample_size(self) -> float:
        """How many equally weighted chains these are worth."""
        return float(1 / self.weights.square().sum())

    @property
    def reliable(self) -> bool:
        """Whether that is 50 or more, or half of the chains where there are few."""
        return self.effective_sample_size >= min(_LEAST_EFFECTIVE, len(self.log_weights) / 2)

    def co_assignment(self) -> Tensor:
        """Return the posterior probability of each pair of nodes to share a block: ``(nodes, nodes)``.

        Warns
        -----
        AccuracyWarning
            If a few chains carry most of the weight.
        """
        if not self.reliable:
            warnings.warn(_too_few(self, "probabilities to share a block"), AccuracyWarning, stacklevel=2)
        return co_assignment(self.assignments, self.weights)


@one_thread()
def annealed_evidence(
    model: StochasticBlockModel,
    num_chains: int = 1000,
    num_steps: int | None = None,
    *,
    max_num_steps: int = 6400,
    seed: int | torch.Generator = 0,
    progress: bool = True,
) -> AnnealedEvidence:
    r"""Estimate the evidence of a block model by annealed importance sampling with Gibbs sweeps.

    Chains start from the prior and move, a sweep at a time, through :math:`p(z) \, p(A \mid z)^{\beta_t}` to the
    posterior, with powers :math:`\beta_t = (t / T)^2`. Each chain is independent of the others, so that multiple
    modes do not mislead the standard error as they would that of one long chain.

    By default, pilot runs of 50, 100, 200, ... steps look for a number of steps that leaves enough effective chains
    (50, or half of few chains). The estimate is then another run, of twice as many steps: pilots choose its
    schedule but take no part in it, so that the mean weight stays unbiased.

    Parameters
    ----------
    model : StochasticBlockModel
    num_chains : int, default 1000
        At least two.
    num_steps : int, optional
        Sweeps of each chain, without pilot runs.
    max_num_steps : int, default 6400
        The most to choose, at least 100.
    seed : int or torch.Generator, default 0
    progress : bool, default True
        Show a progress bar on a terminal, of each run that takes more than two seconds.

    Returns
    -------
    AnnealedEvidence

    Raises
    ------
    SettingsError
        If there are fewer than two chains or no steps.

    Warns
    -----
    AccuracyWarning
        If a few chains carry most of the weight, so that neither estimate nor error can be relied on.

    References
    ----------
    Neal, R. M. (2001). Annealed importance sampling. Statistics and Computing 11, 125-139.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.block_model import StochasticBlockModel, annealed_evidence
    >>> two_triangles = torch.block_diag(*[1 - torch.eye(3, dtype=torch.float64)] * 2)
    >>> model = StochasticBlockModel(two_triangles, num_blocks=2)
    >>> estimate = annealed_evidence(model, num_chains=500, num_steps=20)
    >>> abs(estimate.log_evidence - float(model.enumerate().log_evidence)) < 4 * estimate.standard_error
    True
    """
    num_chains = whole_number("num_chains", num_chains, least=2)
    generator = new_generator(seed, model.adjacency.device, stream="annealed_evidence")
    if num_steps is None:
        most = whole_number("max_num_steps", max_num_steps, least=2 * _FIRST_PILOT)
        steps = _steps_by_pilots(model, num_chains, most, generator, progress)
    else:
        steps = whole_number("num_steps", num_steps, least=1)
    estimate = _anneal(model, num_chains, steps, generator, f"annealing, {steps} steps", progress)
    if not estimate.reliable:
        warnings.warn(_too_few(estimate, "the evidence or its error"), AccuracyWarning, stacklevel=3)
    return estimate


def _steps_by_pilots(
    model: StochasticBlockModel, num_chains: int, most: int, generator: torch.Generator, progress: bool
) -> int:
    """Return twice the number of steps of the first pilot run that is reliable."""
    steps = _FIRST_PILOT
    while 2 * steps < most:
        pilot = _anneal(model, num_chains, steps, generator, f"annealing, pilot of {steps} steps", progress)
        if pilot.reliable:
            break
        steps *= 2
    return min(2 * steps, most)


def _anneal(
    model: StochasticBlockModel,
    num_chains: int,
    num_steps: int,
    generator: torch.Generator,
    description: str,
    progress: bool,
) -> AnnealedEvidence:
    assignments = model.sample_prior(num_chains, generator=generator)
    log_weights = model.adjacency.new_zeros(num_chains, dtype=torch.float64)
    before = 0.0
    with progress_bar(description, num_steps, progress) as bar:
        for step in range(1, num_steps + 1):
            power = (step / num_steps) ** 2
            log_weights = log_weights + (power - before) * model.log_likelihood(assignments)
            assignments = model.gibbs_sweep(assignments, generator=generator, power=power)
            before = power
            bar.update(step)
    log_evidence = float(log_weights.logsumexp(0)) - math.log(num_chains)
    error = float((log_weights - log_evidence).exp().std()) / math.sqrt(num_chains)
    return AnnealedEvidence(
        log_evidence, error, assignments, log_weights.to(model.adjacency.dtype), num_steps=num_steps
    )


def _too_few(estimate: AnnealedEvidence, what: str) -> str:
    return (
        f"the {len(estimate.log_weights)} chains are worth {estimate.effective_sample_size:.0f} equally weighted ones, "
        f"too few to rely on {what}; raise num_steps above {estimate.num_steps}, or num_chains"
    )
