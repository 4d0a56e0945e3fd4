"""Randomised quasi-random draws: each has its distribution, and together they fill it more evenly than chance would."""

from __future__ import annotations

import torch
from scipy.special import gammaincinv
from torch import Tensor

_MAX_DIM = torch.quasirandom.SobolEngine.MAXDIM
#: The sequence has 30 bits; half a step away from its ends quantiles are finite.
_END = 2.0**-31


def uniform_points(num_points: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return points of a scrambled Sobol sequence inside the unit cube, double precision on the CPU.

    Parameters
    ----------
    num_points : int
        Powers of two fill the cube most evenly.
    dim : int
        Where the sequence has fewer dimensions (21,201), the points are independent.
    generator : torch.Generator
        On the CPU; every call scrambles anew, so that several calls give independent sets.

    Returns
    -------
    Tensor
        Shape ``(num_points, dim)``.

    References
    ----------
    Owen, A. B. (1995). Randomly permuted (t, m, s)-nets and (t, s)-sequences. In: Monte Carlo and Quasi-Monte Carlo
    Methods in Scientific Computing, 299-317.

    Examples
    --------
    >>> import torch
    >>> points = uniform_points(1024, 3, torch.Generator().manual_seed(0))
    >>> bool(((points.mean(0) - 0.5).abs() < 0.002).all())  # independent ones would be .009 off
    True
    """
    if dim > _MAX_DIM:
        points = torch.rand(num_points, dim, generator=generator, dtype=torch.float64)
    else:
        seed = int(torch.randint(2**31, (), generator=generator))
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        points = engine.draw(num_points, dtype=torch.float64)
    return points.clamp(_END, 1 - _END)


def normal_points(num_points: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return points of the standard normal distribution, as of :func:`uniform_points`, ``(num_points, dim)``.

    Examples
    --------
    >>> import torch
    >>> points = normal_points(1024, 3, torch.Generator().manual_seed(0))
    >>> bool(((points.square().mean(0) - 1).abs() < 0.02).all())  # independent ones would be .044 off
    True
    """
    return torch.special.ndtri(uniform_points(num_points, dim, generator))


def student_points(num_points: int, dim: int, degrees_of_freedom: float, generator: torch.Generator) -> Tensor:
    """Return points of a standard multivariate Student-t, as of :func:`uniform_points`, ``(num_points, dim)``.

    Examples
    --------
    >>> import torch
    >>> points = student_points(1024, 2, 6.0, torch.Generator().manual_seed(0))
    >>> bool(((points.square().mean(0) - 1.5).abs() < 0.1).all())
    True
    """
    uniform = uniform_points(num_points, dim + 1, generator)
    half = 0.5 * degrees_of_freedom
    # Of a chi-squared variable, the quantile over the degrees of freedom.
    mixing = torch.as_tensor(gammaincinv(half, uniform[:, :1].numpy())) / half
    return torch.special.ndtri(uniform[:, 1:]) * mixing.rsqrt()
