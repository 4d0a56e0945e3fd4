"""Evidence lower bound: closed-form and weighted KL divergences, free bits, sticking the landing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit.inference.objectives._drawing import Particles
from bayeskit.inference.objectives._objective import Draw, Objective, with_gradient_of

# Weights that change over the steps of training.


@runtime_checkable
class WeightSchedule(Protocol):
    """Weight as a function of the zero-based step."""

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        ...


@dataclass(frozen=True)
class Linear:
    """Linear annealing from ``start`` to ``end`` in ``num_steps`` equal steps, then constant.

    Examples
    --------
    >>> Linear(10)(0), Linear(10)(5), Linear(10)(100)
    (0.0, 0.5, 1.0)
    """

    num_steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        whole_number("num_steps", self.num_steps, least=1)

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        return self.start + (self.end - self.start) * min(step / self.num_steps, 1.0)


@dataclass(frozen=True)
class Cyclical:
    """Cyclical annealing from ``start`` to ``end`` over the first half of each period, then constant.

    References
    ----------
    Fu, H. et al. (2019). Cyclical annealing schedule: a simple approach to mitigating KL vanishing. NAACL.

    Examples
    --------
    >>> Cyclical(10)(0), Cyclical(10)(5), Cyclical(10)(12)
    (0.0, 1.0, 0.4)
    """

    period: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        whole_number("period", self.period, least=2)

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        return self.start + (self.end - self.start) * min(2 * (step % self.period) / self.period, 1.0)


# The evidence lower bound with closed-form and weighted divergences, and free bits.


def score_function_estimate(value: Tensor, log_score: Tensor | None) -> Tensor:
    """Return the mean over particles of ``value (K, *batch)``, with a gradient that is right for any guide."""
    # log_score: (K, *batch), log guide density of the draws without a gradient, or None. Each particle's baseline is
    # the mean of the other particles; a single particle has no baseline.
    mean = value.mean(0)
    if log_score is None:
        return mean
    count, fixed = len(value), value.detach()
    signal = fixed if count == 1 else (fixed - fixed.mean(0)) * (count / (count - 1))
    return with_gradient_of(mean, mean + (signal * log_score).mean(0))


def divergences(particles: Particles) -> dict[str, Tensor]:
    """Return, for each latent site, its divergence from the prior: in closed form or by its draws, ``(K, *batch)``."""
    prior, guide = particles.log_prior, particles.log_guide
    beyond = [term for name, term in guide.items() if name not in prior]
    if beyond:  # auxiliary sites, as in Pyro's automatic guides: their density is not attributable to one site
        open_ = [guide[n] - prior[n] for n in prior if n not in particles.kl]
        return {"": sum(open_, sum(beyond[1:], beyond[0]))} | particles.kl
    return {n: guide[n] - term for n, term in prior.items() if n not in particles.kl} | particles.kl


class ELBO(Objective):
    """Evidence lower bound: expected log likelihood minus the weighted KL divergence of guide from prior.

    Parameters
    ----------
    analytic_kl : bool, default True
        Use the closed form of a site's divergence if available.
    kl_weight : float or Schedule, default 1.0
        Weight of the divergence. A weight above one gives the beta-VAE, :func:`infomax_weight` the InfoMax-VAE, a
        schedule annealing over the steps.
    free_bits : float, default 0.0
        Nats of divergence without penalty per site and observation, averaged over the minibatch.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If a weight is negative or not a number.

    Notes
    -----
    The gradient estimator of a discrete guide site is set with ``infer={"gradient": LeaveOneOut(4)}``; see
    :mod:`bayeskit.inference.gradients`. With :class:`GumbelSoftmax` without ``hard`` the loss belongs to the relaxed
    problem and is not a bound; it is often too low. Compare such models by a loss without relaxation.

    References
    ----------
    Higgins, I. et al. (2017). beta-VAE: learning basic visual concepts with a constrained variational framework. ICLR.
    Kingma, D. P. et al. (2016). Improved variational inference with inverse autoregressive flow. NeurIPS. Rezaabad, A.
    L., Vishwanath, S. (2020). Learning representations by maximizing mutual information in variational autoencoders.
    ISIT.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import ELBO
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(0.2, 0.9))
    >>> loss = ELBO(num_particles=20_000).loss(model, guide, torch.ones(1))
    >>> abs(loss - 1.674299) < 0.03
    True
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        analytic_kl: bool = True,
        kl_weight: float | WeightSchedule = 1.0,
        free_bits: float = 0.0,
        max_plate_nesting: int | None = None,
        vectorize_particles: bool = True,
        chunk_size: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(
            num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
            chunk_size=chunk_size,
            data_plate=data_plate,
        )
        if not isinstance(kl_weight, WeightSchedule):
            kl_weight = real_number("kl_weight", kl_weight, "[0, inf]")
        self.analytic_kl, self.kl_weight = analytic_kl, kl_weight
        self.free_bits = real_number("free_bits", free_bits, "[0, inf]")
        self.num_steps = 0

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound for each observation, ``(*batch)``."""
        particles = draw(self.num_particles, analytic_kl=self.analytic_kl)
        weight = self.kl_weight(self.num_steps) if isinstance(self.kl_weight, WeightSchedule) else self.kl_weight
        if torch.is_grad_enabled():
            self.num_steps += 1
        if weight != 1 or self.free_bits:
            particles.require_divergences(type(self).__name__ + " with kl_weight or free_bits")
        value = particles.log_likelihood
        for divergence in divergences(particles).values():
            value = value - weight * self._beyond_free(divergence)
        return score_function_estimate(value, particles.log_score)

    def _beyond_free(self, divergence: Tensor) -> Tensor:
        """Replace the divergence by the free bits where its mean over particles and minibatch is below them."""
        if not self.free_bits:
            return divergence
        below = divergence.detach().mean() < self.free_bits
        return torch.where(below, torch.full_like(divergence, self.free_bits), divergence)

    @property
    def is_moving(self) -> bool:
        """Whether the weight is annealed."""
        return isinstance(self.kl_weight, WeightSchedule)

    def reset(self) -> None:
        """Restart annealing at step zero."""
        self.num_steps = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of steps taken, which determines an annealed weight."""
        return {"num_steps": torch.tensor(self.num_steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.num_steps = int(state["num_steps"])


def infomax_weight(information: float) -> float:
    """Return the ``kl_weight`` that rewards mutual information between observation and latent code.

    Let the InfoMax objective be the ELBO plus ``information`` times the decoder's lower bound on the mutual
    information. Divided by ``1 + information``, it is the ELBO with weight ``1 / (1 + information)``.

    Parameters
    ----------
    information : float
        Weight of the mutual information, at least zero.

    Examples
    --------
    >>> infomax_weight(1.0)
    0.5
    """
    return 1 / (1 + real_number("information", information, "[0, inf]"))


# The evidence lower bound with a gradient that is zero on every draw if the guide is exact.


class STL(Objective):
    """Evidence lower bound with the path gradient of the guide ("sticking the landing").

    The guide's log density depends on its parameters through the draw and directly. The direct part of the gradient
    has expectation zero and is omitted. The remaining gradient is zero on every draw if the guide is the exact
    posterior. Sites without reparameterized draws, such as discrete sites, use the score-function gradient, which is
    also zero at the exact posterior with two or more particles.

    Parameters
    ----------
    num_particles : int, default 1
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Notes
    -----
    A guide of several sites runs a second time on its own draws, held fixed. Detaching the parameters of its
    distributions is not enough: the parameters of a later site depend on earlier draws, and the gradient at the exact
    posterior is zero only if that path is kept.

    References
    ----------
    Roeder, G., Wu, Y., Duvenaud, D. (2017). Sticking the landing: simple, lower-variance gradient estimators for
    variational inference. NeurIPS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import STL
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> slope = torch.tensor(0.5, requires_grad=True)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(slope * x, 0.5**0.5))  # the exact posterior
    >>> STL()(model, guide)(torch.tensor(1.0)).backward()
    >>> abs(slope.grad.item()) < 1e-5
    True
    """

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound for each observation, ``(*batch)``."""
        particles = draw(self.num_particles, path_only=True)
        return score_function_estimate(particles.log_weight, particles.log_score)
