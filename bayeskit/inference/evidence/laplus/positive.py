"""A target as a density of positive coordinates, and its mode."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.checks import require_own
from bayeskit.inference.evidence.laplus.matching import BENT
from bayeskit.inference.evidence.laplus.modes import Modes, climb_to_modes
from bayeskit.inference.samplers.initial import CANDIDATES, starting_points
from bayeskit.target import Target

_PROBES, _STARTS = 3, 4
#: Modes below this are small beside the steps of :func:`climb_to_modes`.
_SMALL = 1e-3


class PositiveMode(NamedTuple):
    """The mode and what the density does around it.

    Attributes
    ----------
    position : Tensor
        Positive, shape `(d,)`.
    value : float
        Log of prior times likelihood, as a density of the positive coordinates.
    first, second : Tensor
        Derivatives by each coordinate, shape `(d,)`.
    num_evaluations : int
        Spent on the search.
    problems : tuple of str
        What may be wrong with it.
    """

    position: Tensor
    value: float
    first: Tensor
    second: Tensor
    num_evaluations: int
    problems: tuple[str, ...]


class PositiveDensity:
    """Prior times likelihood as a density of positive coordinates, each the exponential of an unconstrained one.

    Parameters
    ----------
    target : Target
        All of its sites are positive, such as branch lengths, rates and scales.

    Raises
    ------
    SettingsError
        If a site is not positive, naming it.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model():
    ...     x = pyro.sample("x", dist.Gamma(torch.tensor(3.0).double(), 3.0))
    ...     pyro.factor("likelihood", -x)
    >>> mode = PositiveDensity(bk.Target.from_pyro(model)).mode()
    >>> round(float(mode.position), 6)  # (shape - 1) / rate
    0.5
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        _require_positive(target)

    def log_density(self, x: Tensor) -> Tensor:
        """Return the log density, `(*batch, d) -> (*batch)`; zero counts as improbable as NaN does."""
        u = x.log()
        found = self.target.log_density(u.reshape(-1, u.shape[-1])).reshape(u.shape[:-1]) - u.sum(-1)
        return found.nan_to_num(nan=-torch.inf)

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log density and gradient by the positive coordinates, `(*batch, d) -> (*batch), (*batch, d)`."""
        u = x.log()
        value, gradient = self.target.value_and_grad(u.reshape(-1, u.shape[-1]))
        return value.reshape(u.shape[:-1]) - u.sum(-1), (gradient.reshape(u.shape) - 1) / x

    def log_slope(self, x: Tensor) -> Tensor:
        """Return the derivative by each coordinate times the coordinate, `(*batch, d) -> (*batch, d)`.

        It is that by the logarithm, which keeps its digits where `x` is small.
        """
        u = x.log()
        return self.target.value_and_grad(u.reshape(-1, u.shape[-1]))[1].reshape(u.shape) - 1

    def own(self, mode: PositiveMode | None, *, seed: int = 0) -> tuple[PositiveMode, int]:
        """Return the mode, searched for where none is given, and evaluations spent on looking whether it fits.

        Raises
        ------
        SettingsError
            If it is no :class:`PositiveMode`, or the density there is another one than it says.
        ShapeError
            If its dimension is not the target's.
        """
        if mode is None:
            return self.mode(seed=seed), 0
        if not isinstance(mode, PositiveMode):
            raise SettingsError(
                f"mode is a {type(mode).__name__}; this estimator needs the PositiveMode that PositiveDensity(target)"
                ".mode() returns, or none"
            )
        return mode, require_own("mode", mode.position, mode.value, self.target, self.log_density)

    def mode(self, *, seed: int = 0) -> PositiveMode:
        """Return the highest mode that searches from a few starting points end at.

        Parameters
        ----------
        seed : int, default 0
            Of the starting points.
        """
        one = torch.ones(_STARTS, dtype=self.target.dtype, device=self.target.device)
        generator = new_generator(seed, self.target.device, stream="positive mode")
        start = starting_points(self.target, _STARTS, one, generator).exp()
        with one_thread():
            found: Modes = climb_to_modes(self.log_density, start, value_and_gradient=self.value_and_gradient)
        best = int(found.value.argmax())
        problems = () if bool(found.converged[best]) else ("the search for the mode did not converge",)
        position = found.position[best]
        second, count = self._second_of_small(position, found.second[best])
        return PositiveMode(
            position,
            float(found.value[best]),
            found.gradient[best],
            second,
            (found.num_evaluations + CANDIDATES) * _STARTS + count,
            problems,
        )

    def _second_of_small(self, x: Tensor, second: Tensor) -> tuple[Tensor, int]:
        """Return second derivatives, by differences of logarithms where a small coordinate has its mode inside."""
        small = (x < _SMALL).nonzero().flatten()
        if not len(small):
            return second, 0
        step = torch.finfo(x.dtype).eps ** (1 / 3)
        u = x.log().repeat(2, len(small), 1)
        row = torch.arange(len(small), device=x.device)
        u[0, row, small] += step
        u[1, row, small] -= step
        upper, lower = self.log_slope(u.exp())[:, row, small]
        middle = self.log_slope(x.unsqueeze(0))[0, small]
        # That of the logarithm is x times the first derivative plus the square of x times the second.
        bent = (upper - lower) / (2 * step) - middle
        found = second.clone()
        found[small] = torch.where(-bent > BENT, bent / x[small].square(), second[small])
        return found, 2 * len(small) + 1


def _require_positive(target: Target) -> None:
    """Refuse a target with a coordinate that is not the exponential of its unconstrained one."""
    u = torch.linspace(-1.0, 1.5, _PROBES * target.dim, dtype=target.dtype, device=target.device)
    u = u.reshape(_PROBES, target.dim)
    values = target.constrain(u)
    for site in target.sites:
        wanted = u[:, site.start : site.stop].exp()
        value = values[site.name].reshape(_PROBES, -1)
        if value.shape != wanted.shape or not torch.allclose(value, wanted, rtol=1e-5, atol=0):
            raise SettingsError(
                f"site {site.name!r} is not a positive number, or not each of its entries by itself; this estimator "
                "is for positive coordinates alone, such as branch lengths and rates: use laplace_importance_sampling"
            )
