"""Parameters of distributions that leave their domain at some draws from the prior."""

from __future__ import annotations

import sys
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import constraints

from bayeskit._pyro.inspection import is_of_a_library
from bayeskit._pyro.reader import is_deterministic

TOLERANCE = 1e-4  # by which a probability may lie outside of [0, 1] by rounding


class DomainCheck(Messenger):
    """Note for every site how far each of its parameters lies outside of a bound, at one value of the latent sites."""

    def __init__(self) -> None:
        super().__init__()
        self.excess: dict[tuple[str, str], Tensor] = {}
        self.values: dict[tuple[str, str], Tensor] = {}
        self.places: dict[str, str] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if isinstance(fn, _Subsample) or is_deterministic(msg):
            return
        while "base_dist" in vars(fn) and not hasattr(fn, "transforms"):
            fn = fn.base_dist
        for parameter, constraint in fn.arg_constraints.items():
            value = vars(fn).get(parameter)
            lower, upper = getattr(constraint, "lower_bound", None), getattr(constraint, "upper_bound", None)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if isinstance(constraint, constraints.dependent_property) or (lower is None and upper is None):
                continue
            low = -torch.inf if lower is None else lower
            high = torch.inf if upper is None else upper
            outside = torch.maximum(low - value, value - high)
            key = (name, parameter)
            self.excess[key] = (outside - TOLERANCE).amax() if outside.numel() else outside.sum()
            self.values[key] = value.reshape(-1)[outside.reshape(-1).argmax()] if outside.numel() else outside.sum()
            self.places.setdefault(name, _place())


def _place() -> str:
    """Return the line of the model that a messenger is called from."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f", in line {frame.f_lineno} of {frame.f_code.co_name}"
