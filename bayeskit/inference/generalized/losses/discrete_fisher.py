"""The discrete Fisher divergence: ratios of masses of neighbours, for discrete models whose normaliser is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized.losses.densities import unvalidated
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, columns
from bayeskit.inference.generalized.losses.scores import LogDensity


@dataclass(frozen=True)
class DiscreteFisherDivergence(PointwiseLoss):
    r"""The loss of the discrete Fisher divergence.

    .. math:: \ell(\theta, x) = \sum_j \left(\frac{p_\theta(x^{j-})}{p_\theta(x)}\right)^2
        - 2\,\frac{p_\theta(x)}{p_\theta(x^{j+})},

    where :math:`x^{j\pm}` is :math:`x` with its entry j one higher or lower. Entries are counts, and
    :math:`p_\theta(x^{j-}) = 0` where there is no lower one, or one of ``num_states`` states, of which the last is
    followed by the first; with two states, ``x`` with its entry j flipped. Only ratios of masses enter, so that no
    normaliser is needed. Up to a constant the mean is that of
    :math:`\sum_j (p_\theta(x^{j-})/p_\theta(x) - q(x^{j-})/q(x))^2` under the law :math:`q` of the data.

    Parameters
    ----------
    log_mass : callable
        ``(parameter, x) -> (n,)`` for data ``x (n, ...)``, up to a constant; ``(parameter, *covariates, x)`` where the
        data are ``(*covariates, x)``. It is evaluated at the neighbours of the data, too.
    num_states : int, optional
        States ``0, ..., num_states - 1`` of each entry; two for binary data. By default entries are counts without
        a largest one.
    bounded : bool, default True
        Whether the loss stays below a bound however far the parameter goes, as it does for a Poisson law's rate: only
        a proper prior then gives a posterior. Set it to False only for a model where it is known to grow.

    Raises
    ------
    SettingsError
        If there are fewer than two states.

    References
    ----------
    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2024). Generalized Bayesian inference for discrete
    intractable likelihood. JASA 119, 2345-2355.

    Examples
    --------
    A Poisson law: ``(x / rate)**2 - 2 (x + 1) / rate``.

    >>> import torch
    >>> loss = DiscreteFisherDivergence(lambda rate, x: x * rate.log() - torch.lgamma(x + 1))
    >>> loss.pointwise(torch.tensor(2.0), torch.tensor([0.0, 4.0]))
    tensor([-1., -1.])
    """

    log_mass: LogDensity
    num_states: int | None = None
    bounded: bool = True

    def __post_init__(self) -> None:
        if self.num_states is not None:
            whole_number("num_states", self.num_states, least=2)

    def check(self, data: Data) -> None:
        """Refuse data that are no such counts or states.

        Raises
        ------
        DataError
            The datum is named.
        """
        x = columns(data)[-1]
        wrong = (x < 0) | (x != x.round())
        if self.num_states is not None:
            wrong = wrong | (x >= self.num_states)
        bad = wrong.reshape(len(x), -1).any(-1)
        if bool(bad.any()):
            what = "counts" if self.num_states is None else f"states 0, ..., {self.num_states - 1}"
            raise DataError(
                f"DiscreteFisherDivergence takes {what}, unlike datum {int(bad.nonzero()[0])} ({int(bad.sum())} in all)"
            )

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        *covariates, x = columns(data)
        entries = x[0].numel()
        steps = torch.eye(entries, dtype=x.dtype, device=x.device).reshape(entries, 1, *x.shape[1:])

        def log_mass(y: Tensor) -> Tensor:
            with unvalidated():
                value = self.log_mass(parameter, *covariates, y)
            if value.shape != y.shape[:1]:
                raise ShapeError(
                    f"log_mass returns shape {tuple(value.shape)} instead of ({len(y)},) for data of shape "
                    f"{tuple(y.shape)}"
                )
            return value

        # Neighbours outside the support are replaced by the datum itself and masked afterwards.
        lower, higher = x - steps, x + steps
        if self.num_states is not None:
            lower, higher = lower % self.num_states, higher % self.num_states
        outside = (lower < 0).reshape(entries, len(x), -1).any(-1)
        lower = lower.clamp_min(0)
        here = log_mass(x)
        masses = torch.func.vmap(log_mass)
        down = torch.where(outside, torch.zeros_like(outside, dtype=here.dtype), (masses(lower) - here).exp())
        up = (here - masses(higher)).exp()
        return (down.square() - 2 * up).sum(0)
