"""Exact evidence and posterior of small conjugate mixtures by enumeration of the assignments."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, global_stream, new_generator, whole_number
from bayeskit.models.discrete._inputs import digits_of, log_dirichlet_moment
from bayeskit.models.discrete.mixtures._gaussian_mixture import GaussianMixture

_MAX_ASSIGNMENTS = 1 << 20
_BATCH = 1 << 14


def exact_log_evidence(mixture: GaussianMixture) -> float:
    """Compute the exact log evidence under the conjugate prior by enumerating all ``K^n`` assignments.

    Given an assignment, the marginal likelihood is a Dirichlet-multinomial probability times one normal-gamma marginal
    likelihood per component and dimension. Raises ``SettingsError`` if the prior is not conjugate, or there are more
    than about a million assignments.

    Parameters
    ----------
    mixture : GaussianMixture
        With a prior from :meth:`MixturePrior.conjugate`, diagonal covariance and ``equal_scales=False``.

    Returns
    -------
    float
        In nats.

    References
    ----------
    Bernardo, J. M., Smith, A. F. M. (1994). Bayesian Theory, section 5.2 and appendix A. Wiley.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, MixturePrior, exact_log_evidence
    >>> y = torch.tensor([-1.0, -0.8, 2.0, 2.3], dtype=torch.float64)
    >>> one, two = (GaussianMixture(y, k, MixturePrior.conjugate(0.0, 0.2, 2.0, 0.5)) for k in (1, 2))
    >>> round(exact_log_evidence(one), 6), round(exact_log_evidence(two), 6)
    (-11.40327, -8.32227)
    """
    return float(_log_joint_of_all(mixture).logsumexp(0))


def sample_exact_posterior(
    mixture: GaussianMixture, num_draws: int, *, seed: int | torch.Generator = 0
) -> dict[str, Tensor]:
    """Draw independent exact posterior samples: the assignment, then the parameters given the assignment.

    Raises ``SettingsError`` as in :func:`exact_log_evidence`.

    Parameters
    ----------
    mixture : GaussianMixture
        As in :func:`exact_log_evidence`.
    num_draws : int
    seed : int or torch.Generator, default 0

    Returns
    -------
    dict of Tensor
        The sites of the mixture, ``{site: (num_draws, *shape)}``, and ``"assignment"``, ``(num_draws, n)``.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, MixturePrior, sample_exact_posterior
    >>> y = torch.tensor([-1.0, -0.8, 2.0, 2.3], dtype=torch.float64)
    >>> mixture = GaussianMixture(y, 2, MixturePrior.conjugate(0.0, 0.2, 2.0, 0.5))
    >>> {name: tuple(value.shape) for name, value in sample_exact_posterior(mixture, 7).items()}
    {'assignment': (7, 4), 'precision': (7, 2), 'mean': (7, 2), 'share': (7, 2)}
    """
    prior, count = mixture.prior, mixture.num_components
    weight = _log_joint_of_all(mixture).softmax(0)
    generator = new_generator(seed, weight.device, stream="exact posterior of a mixture")
    with global_stream(generator):
        number = torch.multinomial(weight, whole_number("num_draws", num_draws, 1), replacement=True)
        assignments = digits_of(number, count, len(mixture.y))
        update = _update(mixture, assignments)
        precision = torch.distributions.Gamma(update.shape.expand_as(update.rate), update.rate).sample()
        mean = update.location + torch.randn_like(precision) * (update.relative_precision * precision).rsqrt()
        # The sum of the gamma variables is independent of the weights, so its posterior is its prior.
        shares = torch.distributions.Dirichlet(prior.concentration + update.size).sample()
        total = torch.distributions.Gamma(torch.full_like(shares[:, :1], count * prior.concentration), 1.0).sample()
    if mixture.y.dim() == 1:
        precision, mean = precision.squeeze(-1), mean.squeeze(-1)
    values = {"assignment": assignments, "precision": precision, "mean": mean}
    return values | ({"share": shares * total} if count > 1 else {})


def _log_joint_of_all(mixture: GaussianMixture) -> Tensor:
    """Return the log joint probability of every assignment and the data, ``(K^n,)``."""
    _conjugate(mixture)
    count, n = mixture.num_components, len(mixture.y)
    total = count**n
    if total > _MAX_ASSIGNMENTS:
        raise SettingsError(
            f"{n} observations in {count} components have {total} assignments, more than the limit of "
            f"{_MAX_ASSIGNMENTS} for enumeration; use fewer observations"
        )
    numbers = torch.arange(total, device=mixture.y.device).split(_BATCH)
    return torch.cat([log_joint_of_assignments(mixture, digits_of(number, count, n)) for number in numbers])


class _Update(NamedTuple):
    """The normal-gamma posterior of every component and dimension given an assignment."""

    size: Tensor  # (*batch, K)
    location: Tensor  # (*batch, K, D)
    relative_precision: Tensor  # (*batch, K, 1)
    shape: Tensor  # (*batch, K, 1)
    rate: Tensor  # (*batch, K, D)


def _conjugate(mixture: GaussianMixture) -> tuple[float, Tensor]:
    """Return the relative precision of means and the rate of precisions; SettingsError for non-conjugate mixtures."""
    precision, rate = mixture.prior.relative_precision, mixture.prior.rate
    if precision is None or rate is None or mixture.equal_scales or mixture.correlated:
        raise SettingsError(
            "parameters can be integrated out only under MixturePrior.conjugate with diagonal, unequal covariances"
        )
    return precision, rate


def _update(mixture: GaussianMixture, assignments: Tensor) -> _Update:
    prior, y = mixture.prior, mixture.y.double().reshape(len(mixture.y), -1)
    n0, prior_rate = _conjugate(mixture)
    b0 = prior.location.to(y)
    chosen = torch.nn.functional.one_hot(assignments, mixture.num_components).to(y)  # (*batch, n, K)
    size = chosen.sum(-2)
    n = size.unsqueeze(-1)
    first = chosen.mT @ (y - b0)  # (*batch, K, D), about the prior mean
    second = chosen.mT @ (y - b0).square()
    rate = prior_rate.to(y) + 0.5 * (second - first.square() / (n0 + n))
    return _Update(size, b0 + first / (n0 + n), n0 + n, prior.shape + n / 2, rate)


def log_joint_of_assignments(mixture: GaussianMixture, assignments: Tensor) -> Tensor:
    """Return the joint log probability of assignments and data, parameters integrated out, ``(*batch)``.

    Parameters
    ----------
    mixture : GaussianMixture
        As in :func:`exact_log_evidence`.
    assignments : Tensor or array of int
        Values 0 to ``K - 1``, shape ``(*batch, n)``.

    Raises
    ------
    SettingsError
        If the prior is not conjugate, scales are equal, or covariances are full.
    ShapeError
        If the last dimension is not ``n``.
    DataError
        If assignments are not integers from 0 to ``K - 1``.
    """
    prior, count = mixture.prior, mixture.num_components
    assignments = as_numbers("assignments", assignments)
    relative_precision, rate = _conjugate(mixture)
    if not assignments.dim() or assignments.shape[-1] != len(mixture.y):
        raise ShapeError(f"assignments of shape {tuple(assignments.shape)} for {len(mixture.y)} observations")
    if assignments.dtype == torch.bool or assignments.is_floating_point() or assignments.is_complex():
        raise DataError(f"assignments must be integers from 0 to {count - 1}, not {assignments.dtype}; use .long()")
    assignments = assignments.to(mixture.y.device, torch.int64)
    if not bool(((assignments >= 0) & (assignments < count)).all()):
        raise DataError(f"assignments must lie between 0 and {count - 1}, the components")
    c0, rate = prior.shape, rate.to(mixture.y.device)
    update = _update(mixture, assignments)
    log_marginal = (
        0.5 * (math.log(relative_precision) - update.relative_precision.log())
        - 0.5 * update.size.unsqueeze(-1) * math.log(2 * math.pi)
        + c0 * rate.log()
        - math.lgamma(c0)
        + update.shape.lgamma()
        - update.shape * update.rate.log()
    )
    log_prior = log_dirichlet_moment(update.size, update.size.new_full((count,), prior.concentration))
    return log_prior + log_marginal.sum((-1, -2))
