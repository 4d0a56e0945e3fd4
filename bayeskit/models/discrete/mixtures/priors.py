"""Priors of the parameters of a mixture of normal distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._settings import real_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.mixtures.inputs import as_observations


@dataclass(frozen=True, eq=False)
class MixturePrior:
    r"""Prior of a mixture of normal distributions in ``D`` dimensions, exchangeable between its components.

    For every component ``k`` and dimension ``d``, with ``Gamma(shape, rate)``,

    .. math::
        w \sim \mathrm{Dirichlet}(e_0, \dots, e_0), \qquad \lambda_{kd} \sim \mathrm{Gamma}(c_0, C_{0d}), \qquad
        \mu_{kd} \sim N(b_{0d}, B_{0d}),

    where :math:`\lambda = \sigma^{-2}`, so that :math:`\sigma^2` is inverse gamma. The rate :math:`C_{0d}` is a number
    or, shared by all components, :math:`\mathrm{Gamma}(g_0, G_{0d})`; the variance :math:`B_{0d}` of a mean is a
    number or, where ``relative_precision`` is given, :math:`1 / (n_0 \lambda_{kd})`. Correlations within a component,
    where the model has them, are LKJ.

    Attributes
    ----------
    location : Tensor
        :math:`b_0`, shape ``(D,)``.
    spread : Tensor or None
        :math:`\sqrt{B_0}`, shape ``(D,)``; None where ``relative_precision`` stands for it.
    relative_precision : float or None
        :math:`n_0`: a prior mean counts as so many observations.
    shape : float
        :math:`c_0`.
    rate : Tensor or None
        :math:`C_0`, shape ``(D,)``; None where it has a prior.
    rate_prior : (float, Tensor) or None
        :math:`g_0` and :math:`G_0`, the latter of shape ``(D,)``.
    concentration : float, default 1
        :math:`e_0` of each component.
    correlation : float, default 1
        Concentration of the LKJ prior; 1 is uniform.

    References
    ----------
    Fruehwirth-Schnatter, S. (2006). Finite Mixture and Markov Switching Models, section 6.2. Springer.

    Examples
    --------
    >>> import torch
    >>> prior = MixturePrior.richardson_green(torch.tensor([1.0, 4.0, 5.0], dtype=torch.float64))
    >>> prior.location.tolist(), prior.spread.tolist(), prior.rate_prior[1].tolist()
    ([3.0], [4.0], [0.625])
    """

    location: Tensor
    spread: Tensor | None
    relative_precision: float | None
    shape: float
    rate: Tensor | None
    rate_prior: tuple[float, Tensor] | None
    concentration: float = 1.0
    correlation: float = 1.0

    def __post_init__(self) -> None:
        if (self.spread is None) == (self.relative_precision is None):
            raise SettingsError("give either the spread of the means or their relative_precision, not both or neither")
        if (self.rate is None) == (self.rate_prior is None):
            raise SettingsError("give either the rate of the precisions or its rate_prior, not both or neither")
        if self.location.dim() != 1 or not len(self.location) or not bool(self.location.isfinite().all()):
            raise SettingsError(f"location must hold a finite number for each dimension, not {self.location}")
        numbers: dict[str, Any] = {
            "spread": self.spread,
            "relative_precision": self.relative_precision,
            "shape": self.shape,
            "rate": self.rate,
            "concentration": self.concentration,
            "correlation": self.correlation,
        }
        if self.rate_prior is not None:
            numbers |= {"shape of rate_prior": self.rate_prior[0], "rate of rate_prior": self.rate_prior[1]}
        for name, value in numbers.items():
            if value is not None and not bool(((t := torch.as_tensor(value)) > 0).all() and t.isfinite().all()):
                raise SettingsError(f"{name} must be positive and finite, not {value}")
            if isinstance(value, Tensor) and value.shape != self.location.shape:
                raise ShapeError(f"{name} has shape {tuple(value.shape)}; location has {tuple(self.location.shape)}")

    @property
    def dim(self) -> int:
        """Dimension of an observation."""
        return len(self.location)

    @classmethod
    def richardson_green(cls, y: Tensor) -> MixturePrior:
        r"""Make the weakly informative prior of Richardson and Green, from midrange and range :math:`R` of the data.

        :math:`b_0` is the midrange, :math:`B_0 = R^2`, :math:`c_0 = 2`, :math:`C_0 \sim \mathrm{Gamma}(0.2, 10/R^2)`
        and :math:`e_0 = 1`; with several dimensions each has its own. It looks at the data, if only at their range.

        Parameters
        ----------
        y : Tensor or array
            Observations, shape ``(n,)`` or ``(n, D)``.

        Raises
        ------
        DataError
            If there are no observations, some are not finite, or a dimension has no range.
        ShapeError
            If ``y`` is neither a vector nor a matrix.

        References
        ----------
        Richardson, S., Green, P. J. (1997). On Bayesian analysis of mixtures with an unknown number of components.
        Journal of the Royal Statistical Society B 59, 731-792.
        """
        y = as_observations(y)
        table = y.reshape(len(y), -1)
        low, high = table.amin(0), table.amax(0)
        width = high - low
        if not bool((width > 0).all()):
            raise DataError("a dimension of the data has no range, so this prior has no scale; use independent(...)")
        return cls((low + high) / 2, width, None, 2.0, None, (0.2, 10 / width.square()))

    @classmethod
    def independent(
        cls, location: Any, spread: Any, shape: float, rate: Any, concentration: float = 1.0
    ) -> MixturePrior:
        r"""Make the independence prior: means and precisions independent, all numbers given.

        ``independent(20, 10, 3, 20)`` is that of Chib (1995) for the galaxy velocities in 1000 km/s.

        Parameters
        ----------
        location, spread, rate : float or Tensor
            :math:`b_0`, :math:`\sqrt{B_0}` and :math:`C_0`, shape ``()`` or ``(D,)``.
        shape : float
            :math:`c_0`.
        concentration : float, default 1
            :math:`e_0`.

        References
        ----------
        Chib, S. (1995). Marginal likelihood from the Gibbs output. Journal of the American Statistical Association 90,
        1313-1321.
        """
        b, s, c = _columns(location=location, spread=spread, rate=rate)
        c0, e0 = real_number("shape", shape), real_number("concentration", concentration)
        return cls(b, s, None, c0, c, None, e0)

    @classmethod
    def conjugate(
        cls, location: Any, relative_precision: float, shape: float, rate: Any, concentration: float = 1.0
    ) -> MixturePrior:
        r"""Make the conditionally conjugate prior, normal-gamma, under which assignments can be enumerated.

        Parameters
        ----------
        location, rate : float or Tensor
            :math:`b_0` and :math:`C_0`, shape ``()`` or ``(D,)``.
        relative_precision : float
            :math:`n_0`.
        shape : float
            :math:`c_0`.
        concentration : float, default 1
            :math:`e_0`.
        """
        b, c = _columns(location=location, rate=rate)
        n0 = real_number("relative_precision", relative_precision)
        c0, e0 = real_number("shape", shape), real_number("concentration", concentration)
        return cls(b, None, n0, c0, c, None, e0)


def _columns(**values: Any) -> list[Tensor]:
    tensors = [as_numbers(name, value).to(torch.float64).reshape(-1) for name, value in values.items()]
    sizes = {len(t) for t in tensors} - {1}
    if len(sizes) > 1:
        given = ", ".join(f"{name} {len(t)}" for name, t in zip(values, tensors, strict=True))
        raise ShapeError(f"numbers of different dimensions: {given}; give one number, or one for each dimension")
    return [t.clone() for t in torch.broadcast_tensors(*tensors)]
