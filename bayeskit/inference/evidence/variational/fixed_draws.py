"""Fixed standard normal draws whose averages stand for expectations while something is optimised."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._quasi_random import normal_points


def balanced_normal_draws(num_draws: int, dim: int, generator: torch.Generator) -> Tensor:
    """Make normal draws with mean exactly zero and, where there are enough, covariance exactly the identity.

    A scrambled Sobol sequence, its mirror image, and a linear map that mends the
    second moments. Averages of quadratic functions over them are exact, so that the
    mean field of a normal posterior is found without any sampling error.

    Parameters
    ----------
    num_draws : int
        Even.
    dim : int
    generator : torch.Generator
        On the CPU.

    Returns
    -------
    Tensor
        Shape ``(num_draws, dim)``, double precision, on the CPU.

    References
    ----------
    Owen, A. B. (1995). Randomly permuted (t, m, s)-nets and (t, s)-sequences. In:
    Monte Carlo and Quasi-Monte Carlo Methods in Scientific Computing, 299-317.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence.variational.fixed_draws import balanced_normal_draws
    >>> z = balanced_normal_draws(64, 3, torch.Generator().manual_seed(0))
    >>> torch.allclose(z.T @ z / 64, torch.eye(3, dtype=z.dtype)), bool(z.mean(0).abs().max() < 1e-12)
    (True, True)
    """
    half = num_draws // 2
    z = normal_points(half, dim, generator)
    moments = z.T @ z / half if half >= 2 * dim else torch.diag(z.square().mean(0))
    factor = torch.linalg.cholesky(moments)
    z = torch.linalg.solve_triangular(factor.T, z, upper=True, left=False)
    return torch.cat([z, -z])


def power_of_two(number: float) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(0, math.ceil(math.log2(number)))
