"""Unbiased estimates of the log marginal likelihood, by a randomly stopped sum over importance-weighted bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayeskit.core.inputs import real_number
from bayeskit.errors import SettingsError
from bayeskit.inference.objectives.drawing import Gate, Particles
from bayeskit.inference.objectives.objective import Draw, Objective, with_gradient_of
from bayeskit.inference.objectives.objective import log_mean_weight as log_mean_exp

__all__ = ["GeometricTail", "ReciprocalTail", "SUMO", "Tail", "sumo_estimate"]

# Distributions of the stopping index of a randomly truncated infinite sum, given by their tails.


@runtime_checkable
class Tail(Protocol):
    """Distribution of a whole number of at least one."""

    @property
    def mean(self) -> float:
        """Expected number."""
        ...

    def survival(self, k: Tensor) -> Tensor:
        """Return the probability of reaching ``k``: float64, of the shape of ``k``, one for ``k <= 1``."""
        ...

    def sample(self) -> int:
        """Draw a number from torch's global random stream."""
        ...


@dataclass(frozen=True)
class ReciprocalTail:
    """Reaches ``k`` with probability ``1 / k`` up to ``switch``, from there on falling geometrically.

    Parameters
    ----------
    switch : int, default 80
    decay : float, default 0.9
        Factor by which the probability falls at each step from ``switch`` on.
    cap : int, optional
        Never go beyond it: bounded cost, at the price of a bias, for the terms beyond are never seen. What is
        estimated then is the sum up to ``cap``.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Luo, Y. et al. (2020). SUMO: unbiased estimation of log marginal probability for latent variable models. ICLR.

    Examples
    --------
    >>> round(ReciprocalTail().mean, 4)
    5.078
    >>> ReciprocalTail().survival(torch.tensor([1, 4, 80]))
    tensor([1.0000, 0.2500, 0.0125], dtype=torch.float64)
    """

    switch: int = 80
    decay: float = 0.9
    cap: int | None = None

    def __post_init__(self) -> None:
        _check_count("switch", self.switch)
        _check_decay(self.decay)
        _check_cap(self.cap)

    @classmethod
    def of_mean(cls, mean: float, decay: float = 0.9) -> ReciprocalTail:
        """Return the tail without a cap whose mean comes closest to ``mean`` by choice of ``switch``.

        Examples
        --------
        >>> tail = ReciprocalTail.of_mean(4.0)
        >>> tail.switch, round(tail.mean, 2)
        (18, 4.0)
        """
        _check_decay(decay)
        switch = max(1, math.ceil(decay / (1 - decay) - 1e-9))  # where the mean is smallest
        tail = cls(switch, decay)
        if mean < tail.mean:
            raise SettingsError(
                f"no ReciprocalTail with decay {decay} has a mean below {tail.mean:.4g}; lower decay, or use "
                "GeometricTail.of_mean"
            )
        if mean > 12:
            raise SettingsError(
                f"a ReciprocalTail of mean {mean} would reach {math.exp(mean - 1):.1e} terms; leave it at 12 or less "
                "and raise SUMO's minimum_particles instead"
            )
        while (after := cls(tail.switch + 1, decay)).mean <= mean:
            tail = after
        return after if after.mean - mean < mean - tail.mean else tail

    @property
    def mean(self) -> float:
        """Expected number."""
        if self.cap is not None:
            return float(self.survival(torch.arange(1, self.cap + 1)).sum())
        return float((1.0 / torch.arange(1, self.switch, dtype=torch.float64)).sum()) + 1 / (
            self.switch * (1 - self.decay)
        )

    def survival(self, k: Tensor) -> Tensor:
        """Return the probability of reaching ``k``."""
        k = k.to(torch.float64)
        beyond = self.decay ** (k - self.switch).clamp(min=0) / self.switch
        return _capped(torch.where(k < self.switch, 1 / k.clamp(min=1), beyond), k, self.cap)

    def sample(self) -> int:
        """Draw a number from torch's global random stream."""
        u = _uniform()
        if u > 1 / self.switch:
            drawn = math.floor(1 / u)
        else:
            drawn = self.switch + math.floor(math.log(self.switch * u) / math.log(self.decay))
        return drawn if self.cap is None else min(drawn, self.cap)


@dataclass(frozen=True)
class GeometricTail:
    """Reaches ``k`` with probability ``decay ** (k - 1)``.

    Parameters
    ----------
    decay : float, default 0.9
    cap : int, optional
        As in :class:`ReciprocalTail`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    Examples
    --------
    >>> round(GeometricTail(0.75).mean, 4), round(GeometricTail(0.75, cap=2).mean, 4)
    (4.0, 1.75)
    """

    decay: float = 0.9
    cap: int | None = None

    def __post_init__(self) -> None:
        _check_decay(self.decay)
        _check_cap(self.cap)

    @classmethod
    def of_mean(cls, mean: float) -> GeometricTail:
        """Return the tail without a cap that has this mean, above one."""
        if not (mean > 1 and math.isfinite(mean)):
            raise SettingsError(f"mean must be a finite number above 1, not {mean}")
        return cls(1 - 1 / mean)

    @property
    def mean(self) -> float:
        """Expected number."""
        lost = 0.0 if self.cap is None else self.decay**self.cap
        return (1 - lost) / (1 - self.decay)

    def survival(self, k: Tensor) -> Tensor:
        """Return the probability of reaching ``k``."""
        k = k.to(torch.float64)
        return _capped(self.decay ** (k - 1).clamp(min=0), k, self.cap)

    def sample(self) -> int:
        """Draw a number from torch's global random stream."""
        drawn = 1 + math.floor(math.log(_uniform()) / math.log(self.decay))
        return drawn if self.cap is None else min(drawn, self.cap)


def _uniform() -> float:
    """Draw from (0, 1], whose logarithm is finite."""
    return 1.0 - float(torch.rand((), dtype=torch.float64))


def _capped(survival: Tensor, k: Tensor, cap: int | None) -> Tensor:
    return survival if cap is None else torch.where(k <= cap, survival, 0.0)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_cap(cap: int | None) -> None:
    if cap is not None:
        _check_count("cap", cap)


def _check_decay(decay: float) -> None:
    if not 0 < decay < 1:
        raise SettingsError(
            f"decay must lie between 0 and 1, not {decay}: at 0 later terms would have probability zero, at 1 the "
            "sum would never end"
        )


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
