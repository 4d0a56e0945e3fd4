"""What the code knows of the data: mutual information, and how far the aggregate posterior is from the prior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.held_out.minibatches import Minibatches, already_validated, positive
from bayeskit.inference.objectives.latent_density import LatentDensity

ROWS = 100_000  # draws times data of one evaluation of the guide
NEAR_LIMIT = 0.9


@dataclass(frozen=True)
class Information:
    """An amount of information in nats, with its error.

    Attributes
    ----------
    value : float
    standard_error : float
        Monte Carlo standard error, for the data given.
    limit : float
        The largest value that the number of data allows.
    warnings : tuple of str
    """

    value: float
    standard_error: float
    limit: float = math.inf
    warnings: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether no diagnostic objected."""
        return not self.warnings and math.isfinite(self.value) and math.isfinite(self.standard_error)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.value:.4f} +- {self.standard_error:.4f} nats{flag}"


def mutual_information(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 10,
    data_plate: str | None = None,
    seed: int = 0,
) -> Information:
    r"""Estimate the mutual information of datum and code under the guide.

    With the aggregate posterior :math:`q(z) = \frac{1}{N} \sum_n q(z \mid x_n)` of the ``N`` data given, the mean
    divergence of the guide from the prior is the sum of this mutual information, of the code and the datum's index,
    and :func:`aggregate_kl`. The mixture is taken over all ``N``, so that the estimate is unbiased for these data.
    It cannot exceed :math:`\log N`: of a minibatch, it tells how well the code tells its items apart, and is less
    than for all data, in expectation.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The latent variables of each datum stand in one plate and are continuous.
    *args
        What both are called with: the data.
    num_samples : int, default 10
        Codes drawn for each datum, at least two. Time grows with ``num_samples`` times the square of the number of
        data.
    data_plate : str, optional
        Name of the plate whose items are the data; by default the only one that holds all sites.
    seed : int, default 0

    Returns
    -------
    Information
        Not trusted above 90 % of :math:`\log N`: more data would show more.

    Raises
    ------
    SettingsError
        If there are less than two draws.
    GuideError
        If guide and model do not fit together, or a latent site is discrete.
    ModelError
        If there is no plate of data.

    References
    ----------
    Hoffman, M. D., Johnson, M. J. (2016). ELBO surgery: yet another way to carve up the variational evidence lower
    bound. NIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import mutual_information
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.0 * x, 1.0))  # knows nothing of the data
    >>> result = mutual_information(model, guide, torch.randn(50))
    >>> abs(result.value) < 1e-5
    True
    """
    terms = _Terms.of(model, guide, args, num_samples, data_plate, seed)
    value, error = _mean(terms.guide - terms.aggregate)
    count = terms.guide.shape[1]
    limit, problems = math.log(count), []
    if value > NEAR_LIMIT * limit:
        problems.append(
            f"the codes tell almost all of the {count} data apart, so that there is no telling how much more they "
            "know (the limit is the log of their number): use more data"
        )
    return Information(value, error, limit, tuple(problems))


def aggregate_kl(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 10,
    data_plate: str | None = None,
    seed: int = 0,
) -> Information:
    """Estimate the Kullback-Leibler divergence of the aggregate posterior from the prior.

    The aggregate posterior is the mixture of the guide over all data given; see :func:`mutual_information`, whose
    parameters and errors these are. Where the guide is the exact posterior and the data come from the model, it
    goes to zero as the data grow; of few data, it is larger.

    Parameters
    ----------
    model, guide : callable
    *args
        What both are called with: the data.
    num_samples : int, default 10
        Codes drawn for each datum, at least two.
    data_plate : str, optional
    seed : int, default 0

    Returns
    -------
    Information

    References
    ----------
    Hoffman, M. D., Johnson, M. J. (2016). ELBO surgery: yet another way to carve up the variational evidence lower
    bound. NIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import aggregate_kl
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.0 * x + 2.0, 1.0))  # two standard deviations off: 2 nats
    >>> result = aggregate_kl(model, guide, torch.randn(50))
    >>> abs(result.value - 2.0) < 4 * result.standard_error
    True
    """
    terms = _Terms.of(model, guide, args, num_samples, data_plate, seed)
    return Information(*_mean(terms.aggregate - terms.prior))


@dataclass(frozen=True)
class _Terms:
    """Log densities at ``K`` draws of the guide for each datum, ``(K, items)``."""

    guide: Tensor
    aggregate: Tensor
    prior: Tensor

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        num_samples: int,
        data_plate: str | None,
        seed: int,
    ) -> _Terms:
        positive(num_samples=num_samples)
        if num_samples < 2:
            raise SettingsError("num_samples must be at least 2: the standard error comes from draws that differ")
        with torch.no_grad(), global_stream(new_generator(seed, stream="information of the code")):
            data = Minibatches.of(model, guide, args, None, data_plate)
            with already_validated():
                own, count = _density(model, guide, data, num_samples), data.num_items
                log_guide, log_prior = own.log_guide(own.position), own.log_prior(own.position)
                # Every draw is weighed under the guide of every datum.
                many = max(1, min(ROWS // count, own.num_rows))
                cross, parts = _density(model, guide, data, many), []
                for start in range(0, own.num_rows, many):
                    draws = own.position[start : start + many]
                    rows = torch.cat([draws, draws[:1].expand(many - len(draws), -1)])  # the last chunk is filled up
                    density = cross.log_guide(rows.repeat_interleave(count, 0)).reshape(many, count)
                    parts.append(density[: len(draws)].to(torch.float64).logsumexp(1) - math.log(count))
        shape = (num_samples, count)
        return cls(*(x.to(torch.float64).reshape(shape) for x in (log_guide, torch.cat(parts), log_prior)))


def _density(
    model: Callable[..., Any], guide: Callable[..., Any], data: Minibatches, num_particles: int
) -> LatentDensity:
    return LatentDensity.from_pyro(
        model, guide, data.args, num_particles=num_particles, nesting=data.nesting, data_plate=data.data_plate
    )


def _mean(terms: Tensor) -> tuple[float, float]:
    """Return the mean of ``(K, items)`` and its error, whose items are fixed and whose draws are independent."""
    count = terms.numel()
    return float(terms.mean()), math.sqrt(float(terms.var(0).mean()) / count)
