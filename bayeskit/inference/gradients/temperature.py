"""Temperatures of relaxed draws: fixed, learned, or falling from step to step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayeskit._settings import real_number
from bayeskit.errors import SettingsError

#: A number, a scalar tensor such as a parameter, or what returns either when a draw needs it.
Temperature = float | Tensor | Callable[[], float | Tensor]


@dataclass(frozen=True)
class ExponentialDecay:
    """From ``start`` down to ``end`` by a constant factor a step, then ``end``: a schedule.

    Parameters
    ----------
    rate : float
        Fall of the logarithm in one step, above zero.
    start, end : float, default 1.0 and 0.5

    Raises
    ------
    SettingsError
        If a setting is not above zero, or ``end`` above ``start``.

    References
    ----------
    Jang, E., Gu, S., Poole, B. (2017). Categorical reparameterization with Gumbel-Softmax. ICLR.

    Examples
    --------
    >>> import math
    >>> schedule = ExponentialDecay(rate=math.log(2) / 100, start=1.0, end=0.3)
    >>> round(schedule(0), 6), round(schedule(100), 6), schedule(10_000)
    (1.0, 0.5, 0.3)
    """

    rate: float
    start: float = 1.0
    end: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rate", "start", "end"):
            if not 0 < real_number(name, getattr(self, name)) < math.inf:
                raise SettingsError(f"{name} must be above zero and finite, not {getattr(self, name)}")
        if self.end > self.start:
            raise SettingsError(f"end must be at most start, not {self.end} above {self.start}")

    def __call__(self, step: int) -> float:
        """Return the value at ``step``."""
        return max(self.end, self.start * math.exp(-self.rate * step))


class Annealed(nn.Module):
    """A temperature that follows a schedule.

    :func:`bayeskit.fit` counts a step after each of the optimiser's, where the object, or the estimator with it,
    belongs to the guide or is a variable that the guide reads; in a loop of your own, call :meth:`step`. Drawing counts
    nothing: all sites that share the object, all particles, and draws made again in a backward pass have one
    temperature.

    Parameters
    ----------
    schedule : Schedule
        From the number of the step, counted from zero, to the temperature; such as :class:`ExponentialDecay` or
        ``objectives.Linear(1000, start=1.0, end=0.3)``.

    Attributes
    ----------
    num_steps : Tensor
        Steps counted so far: a module's buffer, so that checkpoints of :func:`bayeskit.fit` keep it. As a network's
        running means, a new training run does not set it back.

    Examples
    --------
    >>> from bayeskit.inference.objectives.annealing import Linear
    >>> temperature = Annealed(Linear(4, start=1.0, end=0.5))
    >>> temperature(), temperature.step(), temperature()
    (1.0, None, 0.875)
    """

    num_steps: Tensor

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self) -> float:
        """Return the temperature of the present step."""
        return self.schedule(int(self.num_steps))

    def step(self) -> None:
        """Count a step."""
        self.num_steps += 1


def check_temperature(temperature: Temperature) -> None:
    """Refuse what cannot be a temperature; what it is at a draw is looked at then.

    Raises
    ------
    SettingsError
        If it is no positive number, no scalar tensor, or a function that wants arguments.
    """
    if callable(temperature):
        try:
            inspect.signature(temperature.forward if isinstance(temperature, nn.Module) else temperature).bind()
        except TypeError:
            raise SettingsError(
                f"the temperature {temperature!r:.60} cannot be called without arguments; give Annealed(schedule), "
                "which counts the steps"
            ) from None
        return
    if isinstance(temperature, Tensor) and temperature.dim():
        raise SettingsError(f"the temperature has shape {tuple(temperature.shape)}; give a number or a scalar tensor")
    _positive(temperature)


def present(temperature: Temperature) -> float | Tensor:
    """Return the temperature of a draw.

    Raises
    ------
    SettingsError
        If it is not above zero.
    """
    found = temperature() if callable(temperature) else temperature
    _positive(found)
    return found


def _positive(temperature: float | Tensor) -> None:
    value = real_number("temperature", temperature.detach() if isinstance(temperature, Tensor) else temperature)
    if not 0 < value < math.inf:
        raise SettingsError(
            f"the temperature must be above zero and finite, not {value:g}; without a relaxation there is no path: use "
            "StraightThrough, or an estimator of scores such as LeaveOneOut. A learned one stays above zero as "
            "lambda: log_temperature.exp()"
        )
