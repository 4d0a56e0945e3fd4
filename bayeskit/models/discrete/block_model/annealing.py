"""The evidence of a block model where assignments cannot be listed."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import AccuracyWarning
from bayeskit.models.discrete.block_model.stochastic_block_model import StochasticBlockModel, co_assignment

#: Of the chains; half of them where there are few.
_LEAST_EFFECTIVE = 50


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
    """

    log_evidence: float
    standard_error: float
    assignments: Tensor
    log_weights: Tensor

    @property
    def effective_sample_size(self) -> float:
        """How many equally weighted chains these are worth."""
        weights = self.log_weights.softmax(0)
        return float(1 / weights.square().sum())

    def co_assignment(self) -> Tensor:
        """Return the posterior probability of each pair of nodes to share a block: ``(nodes, nodes)``."""
        return co_assignment(self.assignments, self.log_weights.softmax(0))


@one_thread()
def annealed_evidence(
    model: StochasticBlockModel, num_chains: int = 1000, num_steps: int = 100, *, seed: int | torch.Generator = 0
) -> AnnealedEvidence:
    r"""Estimate the evidence of a block model by annealed importance sampling with Gibbs sweeps.

    Chains start from the prior and move, a sweep at a time, through :math:`p(z) \, p(A \mid z)^{\beta_t}` to the
    posterior, with powers :math:`\beta_t = (t / T)^2`. Each chain is independent of the others, so that multiple
    modes do not mislead the standard error as they would that of one long chain.

    Parameters
    ----------
    model : StochasticBlockModel
    num_chains : int, default 1000
        At least two.
    num_steps : int, default 100
        Sweeps of each chain.
    seed : int or torch.Generator, default 0

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
    num_steps = whole_number("num_steps", num_steps, least=1)
    generator = new_generator(seed, model.adjacency.device, stream="annealed_evidence")
    assignments = model.sample_prior(num_chains, generator=generator)
    log_weights = model.adjacency.new_zeros(num_chains, dtype=torch.float64)
    before = 0.0
    for step in range(1, num_steps + 1):
        power = (step / num_steps) ** 2
        log_weights = log_weights + (power - before) * model.log_likelihood(assignments)
        assignments = model.gibbs_sweep(assignments, generator=generator, power=power)
        before = power
    log_evidence = float(log_weights.logsumexp(0)) - math.log(num_chains)
    error = float((log_weights - log_evidence).exp().std()) / math.sqrt(num_chains)
    estimate = AnnealedEvidence(log_evidence, error, assignments, log_weights.to(model.adjacency.dtype))
    if estimate.effective_sample_size < min(_LEAST_EFFECTIVE, num_chains / 2):
        warnings.warn(
            f"the {num_chains} chains are worth {estimate.effective_sample_size:.0f} equally weighted ones, too few to "
            f"rely on the evidence or its error; raise num_steps above {num_steps}, or num_chains",
            AccuracyWarning,
            stacklevel=3,
        )
    return estimate
