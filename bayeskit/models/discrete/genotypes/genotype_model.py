"""Noisy genotypes with unknown error rates, as a Pyro model whose genotypes are summed out."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from bayeskit._transforms import support_of
from bayeskit.errors import SettingsError
from bayeskit.models.discrete.genotypes import noise


class GenotypeModel:
    """Pyro model of a noisy genotype matrix with unknown error rates.

    Calling it samples ``"false_positive_rate"`` and ``"false_negative_rate"`` and adds, as the factor ``"observed"``,
    the log probability of the observed matrix, summed over all conflict-free ones. Given draws of the rates,
    :class:`NoisyGenotypes` has the posterior of the matrix.

    Parameters
    ----------
    observed : Tensor
        Zeros and ones, and NaN where an entry is missing, shape ``(cells, mutations)``; at most 10 cells and 8
        mutations.
    false_positive_prior, false_negative_prior : pyro.distributions.TorchDistribution, optional
        Over ``(0, 1)``; Beta(1, 20) and Beta(2, 6) by default: few false positives, and about a quarter of the
        mutations missed, as where whole genomes of single cells are amplified.

    Raises
    ------
    ShapeError, DataError
        If ``observed`` is not such a matrix.
    SettingsError
        If it is too large, or a prior is not over one number between 0 and 1.

    Examples
    --------
    >>> import torch
    >>> import bayeskit as bk
    >>> observed = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    >>> target = bk.Target.from_pyro(GenotypeModel(observed))
    >>> target.dim
    2
    """

    #: Factors that are log probabilities of data, with all constants.
    normalised_factors = frozenset({"observed"})

    def __init__(
        self,
        observed: Tensor,
        false_positive_prior: dist.TorchDistribution | None = None,
        false_negative_prior: dist.TorchDistribution | None = None,
    ) -> None:
        self.observed = noise.check_observed(observed)
        noise.check_size(*self.observed.shape)
        number = self.observed.new_tensor
        positive = false_positive_prior or dist.Beta(number(1.0), number(20.0))
        negative = false_negative_prior or dist.Beta(number(2.0), number(6.0))
        for prior in (positive, negative):
            if not _is_over_rates(prior):
                raise SettingsError(f"the prior of a rate must be over one number between 0 and 1, not {prior}")
        self.false_positive_prior, self.false_negative_prior = positive, negative

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Sample both rates, add the log probability of the observed matrix, and return the rates."""
        positive = pyro.sample("false_positive_rate", self.false_positive_prior)
        negative = pyro.sample("false_negative_rate", self.false_negative_prior)
        pyro.factor("observed", noise.log_evidence(self.observed, positive, negative))
        return positive, negative


def _is_over_rates(prior: object) -> bool:
    if not isinstance(prior, torch.distributions.Distribution) or prior.batch_shape or prior.event_shape:
        return False
    support = support_of(prior)
    if not isinstance(support, (constraints.interval, constraints.half_open_interval)):
        return False
    return bool(support.lower_bound >= 0) and bool(support.upper_bound <= 1)
