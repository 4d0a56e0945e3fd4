"""The methods: their coefficients, and one step as a function of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Slope = Callable[..., tuple[Tensor, ...]]
"""``(t (), y (d,), *others) -> (dy/dt (d,),)`` of one chain."""


class Coefficients(NamedTuple):
    """Coefficients of ``s`` stages; rows of lower triangles have one number for each earlier stage."""

    nodes: tuple[float, ...]  # c
    stages: tuple[tuple[float, ...], ...]  # a
    weights: tuple[float, ...]  # b, of the new state
    errors: tuple[float, ...]  # of the difference from the embedded method
    # Of Rosenbrock methods: c_ij, d_i and gamma.
    couplings: tuple[tuple[float, ...], ...] = ()
    slants: tuple[float, ...] = ()
    gamma: float = 0.0


class SteppingMethod(NamedTuple):
    """A method with the name that users give."""

    name: str
    table: Coefficients
    is_implicit: bool


# Dormand and Prince (1980), RK5(4)7M: the last stage is the slope at the new state.
_LAST = (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)
_DOPRI5 = Coefficients(
    nodes=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
    stages=(
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        _LAST,
    ),
    weights=(*_LAST, 0.0),
    errors=(71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40),
)

# Steinebach (2023), Rodas5P: stiffly accurate, so that the last stage is the error.
_FIFTH = (-7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256, 0.030198172008377946)
_RODAS5 = Coefficients(
    nodes=(0.0, 0.6358126895828704, 0.4095798393397535, 0.9769306725060716, 0.4288403609558664, 1.0, 1.0, 1.0),
    stages=(
        (),
        (3.0,),
        (2.849394379747939, 0.45842242204463923),
        (-6.954028509809101, 2.489845061869568, -10.358996098473584),
        (2.8029986275628964, 0.5072464736228206, -0.3988312541770524, -0.04721187230404641),
        _FIFTH,
        (*_FIFTH, 1.0),
        (*_FIFTH, 1.0, 1.0),
    ),
    weights=(*_FIFTH, 1.0, 1.0, 1.0),
    errors=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    couplings=(
        (),
        (-14.155112264123755,),
        (-17.97296035885952, -2.859693295451294),
        (147.12150275711716, -1.41221402718213, 71.68940251302358),
        (165.43517024871676, -0.4592823456491126, 42.90938336958603, -5.961986721573306),
        (24.854864614690072, -3.0009227002832186, 47.4931110020768, 5.5814197821558125, -0.6610691825249471),
        (
            30.91273214028599,
            -3.1208243349937974,
            77.79954646070892,
            34.28646028294783,
            -19.097331116725623,
            -28.087943162872662,
        ),
        (
            37.80277123390563,
            -3.2571969029072276,
            112.26918849496327,
            66.9347231244047,
            -40.06618937091002,
            -54.66780262877968,
            -9.48861652309627,
        ),
    ),
    slants=(
        0.21193756319429014,
        -0.42387512638858027,
        -0.3384627126235924,
        1.8046452872882734,
        2.325825639765069,
        0.0,
        0.0,
        0.0,
    ),
    gamma=0.21193756319429014,
)

METHODS = {"dopri5": SteppingMethod("dopri5", _DOPRI5, False), "rodas5": SteppingMethod("rodas5", _RODAS5, True)}


def step(
    method: SteppingMethod, slope: Slope, t: Tensor, h: Tensor, y: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after a step of length ``h`` and the estimate of its error, each ``(d,)``."""
    table, found = method.table, list[Tensor]()
    if method.is_implicit:
        matrix, slant = jacobian(slope, t, y, *others)
        slant = slant + (0 * matrix).sum(-1)  # NaN where a derivative is infinite, which would end all change
        system = torch.eye(len(y), dtype=y.dtype, device=y.device) / (h * table.gamma) - matrix
    for s, row in enumerate(table.stages):
        scale = 1.0 if method.is_implicit else h
        change = slope(t + table.nodes[s] * h, y + scale * _sum(row, found, y), *others)[0]
        if method.is_implicit:
            change = change + _sum(table.couplings[s], found, y) / h + h * table.slants[s] * slant
            change = torch.linalg.solve_ex(system, change.unsqueeze(-1))[0].squeeze(-1)
        found.append(change)
    scale = 1.0 if method.is_implicit else h
    return y + scale * _sum(table.weights, found, y), scale * _sum(table.errors, found, y)


def _sum(weights: Sequence[float], terms: Sequence[Tensor], like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for weight, term in zip(weights, terms, strict=False):
        if weight:
            total = total + weight * term
    return total


def pull(slope: Slope, moving: Sequence[int], t: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return gradients by the state and the ``moving`` others; ``tensors``: the state, others and a cotangent."""
    *operands, cotangent = tensors
    return _pulled(lambda *x: slope(t, *x), operands, moving, (cotangent,))


def jacobian(slope: Slope, t: Tensor, y: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivatives of the slope by the state, ``(d, d)``, and by time, ``(d,)``."""
    _, back = torch.func.vjp(lambda t, y: slope(t, y, *others)[0], t, y)  # type: ignore[misc]
    identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
    by_time, by_state = torch.func.vmap(back)(identity)
    return by_state, by_time


def bend(slope: Slope, moving: Sequence[int], t: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of :func:`jacobian` as :func:`pull` does; its two cotangents are the last of ``tensors``."""
    *operands, of_state, of_time = tensors
    return _pulled(lambda *x: jacobian(slope, t, *x), operands, moving, (of_state, of_time))


def _pulled(
    function: Callable[..., tuple[Tensor, ...]],
    operands: Sequence[Tensor],
    moving: Sequence[int],
    cotangents: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    at, places = list(operands), (0, *(place + 1 for place in moving))

    def partial(*values: Tensor) -> tuple[Tensor, ...]:
        given = list(at)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return function(*given)

    _, back = torch.func.vjp(partial, *(at[place] for place in places))  # type: ignore[misc]
    found: tuple[Tensor, ...] = back(cotangents)
    return found
