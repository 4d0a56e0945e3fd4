"""Two thin shells in a box: curved and bimodal, integrated in polar coordinates."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.special import gammaln
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.exact._inputs import positive_scalar
from bayeskit.exact.case import ExactCase

_REACH = 12.0  # widths beyond which a normal density is nothing in double precision
_RADII = 64
_ANGLES = 96


def gaussian_shells_model(centre: Tensor, radius: Tensor, width: Tensor, half_width: Tensor) -> None:
    """Pyro model: ``x`` uniform on a cube, the likelihood a sum of two shells about ``centre`` and ``-centre``.

    Each shell is the normal density with standard deviation ``width`` of the distance from its sphere of
    ``radius``.

    Parameters
    ----------
    centre : Tensor, shape (d,)
        Centre of one shell.
    radius, width, half_width : Tensor, shape ()
        Of the shells, and half the edge of the cube.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact.gaussian_shells import gaussian_shells
    >>> case = gaussian_shells(3)
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["x"]["value"].shape)
    (3,)
    """
    edge = half_width.expand(centre.shape)
    x = pyro.sample("x", dist.Uniform(-edge, edge).to_event(1))
    first, second = (
        dist.Normal(radius, width).log_prob(torch.linalg.vector_norm(x - c, dim=-1)) for c in (centre, -centre)
    )
    pyro.factor("shells", torch.logaddexp(first, second))


def _integrate(dim: int, radius: float, width: float, offset: float, half_width: float) -> tuple[float, np.ndarray]:
    """Return the integral of one shell over the cube, and the second moments of ``x`` under it, ``(dim,)``.

    Gauss-Legendre in the distance from the centre and in the angle to the first axis; what sticks out of the
    nearest face is left out.
    """
    gap = half_width - offset
    low, high = radius - _REACH * width, radius + _REACH * width
    nodes, weights = np.polynomial.legendre.leggauss(_RADII)
    # Where spheres begin to stick out the integrand has a kink, so the rule is split there.
    pieces = [(low, min(gap, high)), (gap, high)] if gap < high else [(low, high)]
    distance = np.concatenate([a + (b - a) * (nodes + 1) / 2 for a, b in pieces])
    log_distance_weight = np.concatenate([np.log(weights * (b - a) / 2) for a, b in pieces])
    density = -0.5 * ((distance - radius) / width) ** 2 - math.log(width * math.sqrt(2 * math.pi))

    nodes, weights = np.polynomial.legendre.leggauss(_ANGLES)
    first = np.arccos(np.minimum(1.0, gap / distance))
    half = (math.pi - first) / 2
    angle = first[:, None] + half[:, None] * (nodes + 1)  # (radii, angles)
    log_weight = (log_distance_weight + density + (dim - 1) * np.log(distance) + np.log(half))[:, None]
    log_weight = log_weight + np.log(weights) + (dim - 2) * np.log(np.sin(angle))
    log_area = math.log(2) + (dim - 1) / 2 * math.log(math.pi) - gammaln((dim - 1) / 2)
    peak = log_weight.max()
    mass = np.exp(log_weight - peak)
    log_integral = float(peak + np.log(mass.sum()) + log_area)
    mass /= mass.sum()
    along = (mass * (offset + distance[:, None] * np.cos(angle)) ** 2).sum()
    across = (mass * (distance[:, None] * np.sin(angle)) ** 2).sum() / (dim - 1)
    return log_integral, np.array([along] + [across] * (dim - 1))


def gaussian_shells(
    dim: int = 2, *, radius: float = 2.0, width: float = 0.1, offset: float = 3.5, half_width: float = 6.0
) -> ExactCase:
    r"""Build the two shells: :math:`L(x) = \sum_\pm N(|x \mp c|; r, w^2)`, uniform on :math:`[-h, h]^d`.

    Parameters
    ----------
    dim : int
        Dimension, at least 2.
    radius, width : float
        Radius ``r`` of the spheres and standard deviation ``w`` of the distance from them.
    offset : float
        The centres are ``+offset`` and ``-offset`` on the first axis.
    half_width : float
        Half the edge ``h`` of the cube. The spheres lie inside it.

    Returns
    -------
    ExactCase
        Latent site ``"x"`` of shape ``(dim,)``, its mean zero by symmetry.

    Raises
    ------
    SettingsError
        If a length is not positive, ``dim`` is below 2, or the shells do not fit into the cube.

    References
    ----------
    Feroz, F., Hobson, M. P., Bridges, M. (2009). MultiNest: an efficient and robust Bayesian inference tool
    for cosmology and particle physics. Monthly Notices of the Royal Astronomical Society 398, 1601-1614.

    Examples
    --------
    >>> from bayeskit.exact.gaussian_shells import gaussian_shells
    >>> round(gaussian_shells(2).log_evidence, 6), round(gaussian_shells(10).log_evidence, 6)
    (-1.745642, -14.590491)
    """
    if int(dim) != dim or dim < 2:
        raise SettingsError(f"dim is {dim}; a shell needs a whole number of at least 2.")
    lengths = {"radius": radius, "width": width, "offset": offset, "half_width": half_width}
    args = {name: positive_scalar(name, value) for name, value in lengths.items()}
    if radius < _REACH * width:
        raise SettingsError(f"width is {width}; a thin shell of radius {radius:g} needs at most {radius / _REACH:g}.")
    if half_width < offset + radius or half_width < radius + _REACH * width:
        raise SettingsError(f"half_width is {half_width}; the shells stick out, pass a larger one.")
    log_integral, moments = _integrate(dim, radius, width, offset, half_width)
    centre = torch.zeros(dim, dtype=torch.float64)
    centre[0] = offset
    return ExactCase(
        name=f"gaussian_shells_{dim}",
        description=f"two thin shells in {dim} dimensions, uniform prior on a cube",
        model=gaussian_shells_model,
        args=(centre, args["radius"], args["width"], args["half_width"]),
        log_evidence=math.log(2) + log_integral - dim * math.log(2 * half_width),
        posterior_mean={"x": torch.zeros(dim, dtype=torch.float64)},
        posterior_covariance={"x": torch.diag(torch.from_numpy(moments))},
        reference="tensor Gauss-Legendre quadrature in polar coordinates (problem: Feroz et al. 2009)",
    )
