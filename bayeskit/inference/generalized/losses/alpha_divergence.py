"""The alpha-divergence between an estimate of the density of the data and a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses.densities import Model, joint_law_of, log_density
from bayeskit.inference.generalized.losses.loss import Data, Loss


class DensityEstimate(ABC):
    """An estimate of the law that data come from."""

    @abstractmethod
    def __call__(self, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return points, the probability that they stand for, and the log density there.

        Parameters
        ----------
        x : Tensor
            Data, shape ``(n, ...)``.
        shares : Tensor
            Their weights, shape ``(n,)``, which sum to one.

        Returns
        -------
        points : Tensor
            Shape ``(m, ...)``: means under the estimate are sums over these.
        masses : Tensor
            Shape ``(m,)``.
        log_density : Tensor
            Shape ``(m,)``.
        """


@dataclass(frozen=True)
class EmpiricalMass(DensityEstimate):
    """The share of each value among the data: for discrete outcomes.

    Examples
    --------
    >>> import torch
    >>> points, masses, log_density = EmpiricalMass()(torch.tensor([0.0, 1.0, 1.0]), torch.full((3,), 1 / 3))
    >>> log_density.exp()
    tensor([0.3333, 0.6667, 0.6667])
    """

    def __call__(self, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the data, their shares, and the log of the share of their value."""
        rows = x.reshape(len(x), -1)
        same = (rows.unsqueeze(0) == rows.unsqueeze(1)).all(-1)
        share = same.to(shares.dtype) @ shares
        # A value all of whose data have weight zero has no mass and must not become nan.
        return x, shares, torch.where(share > 0, share, torch.ones_like(share)).log()


@dataclass(frozen=True)
class KernelDensity(DensityEstimate):
    """A normal kernel about each datum: for outcomes that are real numbers.

    Means under the estimate are taken by Gauss-Hermite quadrature about each datum.

    Parameters
    ----------
    bandwidth : float
        Standard deviation of the kernel, positive.
    num_nodes : int, default 16
        Of the quadrature, for each datum.

    Raises
    ------
    SettingsError
        If ``bandwidth`` is not positive, or ``num_nodes`` below one.
    DataError, ShapeError
        When called, if data are not real numbers.

    Examples
    --------
    >>> import torch
    >>> points, masses, _ = KernelDensity(0.5)(torch.tensor([0.0, 2.0]), torch.full((2,), 0.5))
    >>> round((masses * points**2).sum().item(), 4)  # (0 + 4) / 2 + 0.5**2
    2.25
    """

    bandwidth: float
    num_nodes: int = 16

    def __post_init__(self) -> None:
        real_number("bandwidth", self.bandwidth, between=(0.0, math.inf))
        whole_number("num_nodes", self.num_nodes, least=1)

    def __call__(self, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes of the quadrature, their masses and the log density there, ``(n num_nodes,)``."""
        if x.dim() != 1:
            raise ShapeError(f"KernelDensity takes outcomes that are numbers, (n,), not of shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise DataError("KernelDensity takes outcomes of a floating type; for whole numbers take EmpiricalMass()")
        nodes, masses = (torch.as_tensor(a).to(x) for a in np.polynomial.hermite_e.hermegauss(self.num_nodes))
        masses = masses / masses.sum()
        points = (x.unsqueeze(-1) + self.bandwidth * nodes).flatten()
        standardised = (points.unsqueeze(-1) - x) / self.bandwidth
        exponents = -standardised.square() / 2
        nearest = exponents.amax(-1, keepdim=True)
        # A product of matrices, so that many weightings of the data share the one of the kernel.
        share = ((exponents - nearest).exp() @ shares).clamp_min(torch.finfo(x.dtype).tiny)
        log_density = nearest.squeeze(-1) + share.log() - math.log(self.bandwidth * math.sqrt(2 * math.pi))
        return points, (shares.unsqueeze(-1) * masses).flatten(), log_density


@dataclass(frozen=True)
class AlphaDivergence(Loss):
    r"""``n`` times the alpha-divergence from an estimate of the density of the data to the model.

    With an estimate :math:`\hat g`,

    .. math:: D_\alpha(\hat g \,\|\, p_\theta) = \frac{1}{\alpha(1-\alpha)}
        \Big(1 - \int \hat g(x)^{\alpha}\, p_\theta(x)^{1-\alpha}\,dx\Big), \qquad 0 < \alpha < 1.

    Twice the squared Hellinger distance :math:`\int (\sqrt{\hat g} - \sqrt{p_\theta})^2` for :math:`\alpha = 1/2`; the
    Kullback-Leibler divergence, and so minus the log likelihood up to a constant, as :math:`\alpha \to 1`. Robust, and
    with a good estimate as efficient as the likelihood. It looks at all data at once, so that neither minibatches nor
    sequential updates make sense. It is bounded by :math:`n/(\alpha(1-\alpha))`: only a proper prior gives a posterior.

    Parameters
    ----------
    alpha : float
        In (0, 1).
    distribution : callable
        ``parameter -> distribution`` of a datum.
    estimate : DensityEstimate
        :class:`EmpiricalMass` for discrete outcomes, :class:`KernelDensity` for real ones.

    Raises
    ------
    SettingsError
        If ``alpha`` does not lie in (0, 1), or ``estimate`` is none.

    References
    ----------
    Hooker, G., Vidyashankar, A. N. (2014). Bayesian model robustness via disparities. TEST 23, 556-584.

    Jewson, J., Smith, J. Q., Holmes, C. (2018). Principles of Bayesian inference using general divergence criteria.
    Entropy 20, 442.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> hellinger = AlphaDivergence(0.5, dist.Poisson, EmpiricalMass())
    >>> counts = torch.tensor([0.0, 1.0, 1.0, 2.0, 30.0])
    >>> [round(hellinger.total(torch.tensor(rate), counts).item(), 3) for rate in (1.0, 6.8)]
    [3.067, 17.165]
    """

    alpha: float
    distribution: Model
    estimate: DensityEstimate

    bounded = True

    def __post_init__(self) -> None:
        real_number("alpha", self.alpha, between=(0.0, 1.0))
        if not isinstance(self.estimate, DensityEstimate):
            raise SettingsError(f"estimate must be EmpiricalMass() or KernelDensity(...), not {self.estimate!r:.80}")

    def check(self, data: Data) -> None:
        """Refuse covariates: the estimate is of one law for all data."""
        if isinstance(data, tuple):
            raise ShapeError("AlphaDivergence takes outcomes alone, not covariates and outcomes")

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the divergence times the sum of ``weights (n,)``."""
        law, outcomes = joint_law_of(self.distribution, parameter, data)
        counts = outcomes.new_ones(len(outcomes), dtype=_floating(outcomes)) if weights is None else weights
        points, masses, log_estimate = self.estimate(outcomes, counts / counts.sum())
        log_ratio = log_density(law, points) - log_estimate
        # Points of no mass may lie where the estimate has underflowed, and the ratio has not.
        log_ratio = torch.where(masses > 0, log_ratio, torch.zeros_like(log_ratio))
        affinity = (masses * ((1 - self.alpha) * log_ratio).exp()).sum()
        return counts.sum() * (1 - affinity) / (self.alpha * (1 - self.alpha))


def _floating(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
