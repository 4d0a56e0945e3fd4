"""Unbiased estimates of the log marginal likelihood, by a randomly stopped sum over importance-weighted bounds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayeskit._settings import real_number
from bayeskit.errors import SettingsError
from bayeskit.inference.objectives.gate import Gate
from bayeskit.inference.objectives.objective import Draw, Objective, log_mean_exp, with_gradient_of
from bayeskit.inference.objectives.particles import Particles
from bayeskit.inference.objectives.tails import ReciprocalTail, Tail


def sumo_estimate(log_weight: Tensor, survival: Tensor) -> Tensor:
    """Return the first bound plus the increments of the later ones, each divided by the chance to see it.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(m + K, *batch)``.
    survival : Tensor
        Probability that the stopping index reaches ``1, ..., K``, counted from the first ``m`` particles: shape
        ``(K,)``.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    Raises
    ------
    SettingsError
        If a probability is zero or otherwise impossible.

    Examples
    --------
    >>> import torch
    >>> log_weight = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    >>> increment = log_weight.logsumexp(0) - log_weight[:2].logsumexp(0) + math.log(2 / 3)
    >>> estimate = sumo_estimate(log_weight, torch.tensor([0.5]))  # one of three particles lies beyond m = 2
    >>> torch.allclose(estimate, log_mean_exp(log_weight[:2]) + 2 * increment)
    True
    """
    bad = ~((survival > 0) & (survival <= 1))
    if bool(bad.any()):
        k = int(bad.nonzero()[0]) + 1
        raise SettingsError(
            f"the tail gives probability {float(survival[k - 1])} to reaching k = {k}, which it has reached; survival "
            "must be above zero, and at most one, wherever sample can go"
        )
    count, first = len(log_weight), len(log_weight) - len(survival)
    peak = log_weight.detach().amax(0)  # a common factor would cost digits of the small increments
    shifted = log_weight - peak
    before = shifted.logcumsumexp(0)[first - 1 : -1]
    index = torch.arange(first, count, dtype=torch.float64)
    shape = (-1, *(1,) * (log_weight.dim() - 1))
    # log of (j + w_{j+1} / mean of w_1..j) / (j + 1), without subtracting one bound from the next.
    increments = -logsigmoid(before - shifted[first:]) - torch.log1p(1 / index).to(log_weight).reshape(shape)
    return peak + log_mean_exp(shifted[:first]) + (increments / survival.to(log_weight).reshape(shape)).sum(0)


class SUMO(Objective):
    """Unbiased estimate of the log marginal likelihood: the model maximises it, the guide minimises its second moment.

    The importance-weighted bounds of ``m``, ``m + 1``, ... particles rise to the log marginal likelihood. The sum of
    their increments is stopped at a random index ``K``, counted from ``m``, and the k-th increment divided by the
    probability that ``K`` reaches ``k``. As the guide cannot change the expectation, it is trained to lower the
    variance: the second moment about ``centre``.

    Parameters
    ----------
    tail : Tail, optional
        Distribution of ``K``, by default ``ReciprocalTail()``, of mean 5.08. A capped tail ends the sum: what is
        estimated is then the bound of ``m + cap`` particles.
    minimum_particles : int, default 1
        ``m``. Each step takes ``m + K`` particles.
    centre : float, default 0.0
        The guide minimises the expected square of the estimate less this. Without a cap, any constant has the same
        expected gradient, and one near the log marginal likelihood the least variance. Yet keep it above every
        datum's log marginal likelihood, as zero is for discrete data: see the notes.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, or, when run, if the tail gives probability zero to an index that it
        has reached.

    Notes
    -----
    One ``K`` is drawn for each step and shared by its data. Each datum's estimate is unbiased, and the expected cost
    is ``m + tail.mean``; with one ``K`` for each datum, all would have to be computed up to the largest. Estimates
    within a batch are correlated for it.

    Increments fall as ``1 / k**2`` on average but ``1 / k`` in size. The variance is therefore infinite for tails
    that fall as fast as ``1 / k``, the default included. Clip gradients when training, guide and model apart as
    :func:`bayeskit.fit` does, and do not trust a sample variance; a cap makes the variance finite, at the price of its
    bias.

    Over few steps the expectation is not what one sees: increments that are rare and large do not occur. Below
    ``centre`` the guide then raises the estimate, as an importance-weighted bound would have it, and above it lowers
    it. With a centre among the estimates, or one that follows them, guides contract until all estimates agree and
    none is right: on images of digits the test log likelihood fell from -113 to -387.

    References
    ----------
    Luo, Y., Beatson, A., Norouzi, M., Zhu, J., Duvenaud, D., Adams, R. P., Chen, R. T. Q. (2020). SUMO: unbiased
    estimation of log marginal probability for latent variable models. ICLR.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import SUMO
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior: no increment is left
    >>> x = torch.tensor([1.0, -0.5])
    >>> loss = SUMO().loss(model, guide, x)
    >>> abs(loss + dist.Normal(0.0, 2**0.5).log_prob(x).sum().item()) < 1e-4
    True
    """

    def __init__(
        self,
        tail: Tail | None = None,
        minimum_particles: int = 1,
        *,
        centre: float = 0.0,
        max_plate_nesting: int | None = None,
        vectorize_particles: bool = True,
        chunk_size: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        if isinstance(minimum_particles, bool) or not isinstance(minimum_particles, int) or minimum_particles < 1:
            raise SettingsError(f"minimum_particles must be a whole number of at least 1, not {minimum_particles!r}")
        centre = real_number("centre", centre, between=(-math.inf, math.inf))
        super().__init__(
            minimum_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
            chunk_size=chunk_size,
            data_plate=data_plate,
        )
        self.tail: Tail = ReciprocalTail() if tail is None else tail
        if not isinstance(self.tail, Tail):
            raise SettingsError(
                f"tail must be a distribution of the stopping index, such as ReciprocalTail(), not {tail!r:.80}"
            )
        self.minimum_particles, self.centre = minimum_particles, centre

    @classmethod
    def of_cost(
        cls, particles: float, *, centre: float = 0.0, chunk_size: int | None = None, data_plate: str | None = None
    ) -> SUMO:
        """Return the objective that takes so many particles on average, as near as can be.

        Parameters
        ----------
        particles : float
            Wanted expectation of ``m + K``, at least 4.83. With the tail of mean 5.08, ``minimum_particles`` makes up
            the difference; below 6.08, ``m`` is one and the tail is switched earlier.
        centre, chunk_size, data_plate
            As for the class.

        Examples
        --------
        >>> for cost in (5, 15, 50):
        ...     sumo = SUMO.of_cost(cost)
        ...     print(sumo.minimum_particles, sumo.tail.switch, round(sumo.expected_particles, 2))
        1 18 5.0
        10 80 15.08
        45 80 50.08
        """
        tail = ReciprocalTail()
        if particles < 1 + tail.mean:
            tail = ReciprocalTail.of_mean(particles - 1)
        first = max(1, round(particles - tail.mean))
        return cls(tail, first, centre=centre, chunk_size=chunk_size, data_plate=data_plate)

    @property
    def expected_particles(self) -> float:
        """Expected number of particles of a step, ``m + tail.mean``."""
        return self.minimum_particles + self.tail.mean

    def estimate(self, draw: Draw) -> Tensor:
        """Return the estimate for each datum, ``(*batch)``."""
        gate, reached = Gate(), self._reached()
        particles = draw(self.minimum_particles + len(reached), gate=gate)
        value = sumo_estimate(particles.log_weight, self.tail.survival(reached))
        # What is returned is maximised, the guide's second moment minimised: hence the sign.
        excess = value.detach() - self.centre
        gate.factor = (-2 * excess).expand(particles.log_weight.shape)
        if particles.log_score is None:
            return value
        return with_gradient_of(value, value - excess.square() * particles.log_score.sum(0))

    def log_marginal(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return an unbiased estimate of each datum's log marginal likelihood, to be used in losses of one's own.

        Its gradient reaches the model and, through the model, the data: both are unbiased, so that it serves
        as score of the log marginal likelihood and in reverse Kullback-Leibler divergences, where ``log p(x)`` is
        averaged over draws ``x`` from the model. The guide gets no gradient; train it by steps of the objective
        with an optimiser of the guide's parameters alone.

        Returns
        -------
        Tensor
            Shape ``(*batch)``, not scaled up from a minibatch.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> x = torch.tensor([1.0, -0.5], requires_grad=True)
        >>> SUMO(minimum_particles=2).log_marginal(model, guide, x).shape
        torch.Size([2])
        """
        reached = self._reached()
        draw = Draw(self, model, guide, args, kwargs)
        particles: Particles = draw(self.minimum_particles + len(reached), detached=True)
        log_guide = particles.log_guide_total
        log_weight = particles.log_weight + (log_guide - log_guide.detach())
        return sumo_estimate(log_weight, self.tail.survival(reached))

    def _reached(self) -> Tensor:
        """Draw the stopping index and return all indices up to it."""
        return torch.arange(1, self.tail.sample() + 1)
