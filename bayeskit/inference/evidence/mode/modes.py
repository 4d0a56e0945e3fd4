"""Modes in unconstrained space and the curvature around them."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bayeskit._torch import new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import InitializationError
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.target import Target


def find_modes(target: Target, *, seed: int = 0, draws: Draws | None = None) -> tuple[Tensor, int]:
    """Find the modes reachable from a few starting points by L-BFGS.

    Parameters
    ----------
    target : Target
    seed : int, default 0
    draws : Draws, optional
        Posterior draws; the best of them becomes a starting point.

    Returns
    -------
    modes : Tensor
        Ends of all searches, the highest first, shape ``(searches, d)``, unconstrained.
    num_evaluations : int

    Raises
    ------
    InitializationError
        If no search ends at a finite density.
    """
    one = torch.ones(1, dtype=target.dtype, device=target.device)
    start = starting_points(target, 4, one.expand(4), new_generator(seed, target.device, "mode"))
    if draws is not None:
        best = draws.log_density.flatten().argmax()
        start = torch.cat([draws.unconstrained.flatten(0, 1)[best].unsqueeze(0), start[:2]])
    count = 0

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal count
        count += 1
        u = torch.as_tensor(x, dtype=target.dtype, device=target.device).unsqueeze(0)
        value, gradient = target.value_and_grad(u, one)
        result = -float(value)
        if not math.isfinite(result):
            return 1e300, np.zeros_like(x)
        return result, -gradient[0].double().cpu().numpy()

    found: list[tuple[float, np.ndarray]] = []
    with one_thread():
        for point in start:
            outcome = minimize(
                loss,
                point.double().cpu().numpy(),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": 2000, "maxls": 50},
            )
            found.append((float(outcome.fun), outcome.x))
    ends = [x for value, x in sorted(found, key=lambda pair: pair[0]) if value < 1e299]
    if not ends:
        raise InitializationError("the search for the mode met no finite density; pass posterior draws to start from")
    return torch.as_tensor(np.stack(ends), dtype=target.dtype, device=target.device), count


def curvature(target: Target, mode: Tensor) -> tuple[Tensor, int]:
    """Negative Hessian of the log density at ``mode``, ``(d, d)``, by central differences of the exact gradient."""
    d = target.dim
    step = torch.finfo(target.dtype).eps ** (1 / 3) * mode.abs().clamp(min=1.0)
    offsets = torch.diag(step)
    _, gradient = target.value_and_grad(torch.cat([mode + offsets, mode - offsets]))
    hessian = (gradient[:d] - gradient[d:]) / (2 * step.unsqueeze(-1))
    return -0.5 * (hessian + hessian.T), 2 * d
