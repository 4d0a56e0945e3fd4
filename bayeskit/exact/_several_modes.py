"""Multimodal problems, shells and spikes, with evidence by quadrature or in closed form."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.special import gammaln
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.exact._case import ExactCase, positive_scalar

# The egg box: eighteen modes on a square, by quadrature.

_TOLERANCE = 1e-9


def eggbox_model(edge: Tensor, power: Tensor) -> None:
    """Pyro model: ``x`` uniform on a square, log likelihood ``(2 + cos(x_1 / 2) cos(x_2 / 2)) ** power``.

    Parameters
    ----------
    edge : Tensor, shape (2,)
        Edge lengths of the square, whose lower corner is the origin.
    power : Tensor, shape ()

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact._several_modes import eggbox
    >>> case = eggbox()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["x"]["value"].shape)
    (2,)
    """
    x = pyro.sample("x", dist.Uniform(torch.zeros_like(edge), edge).to_event(1))
    pyro.factor("peaks", (2 + (x / 2).cos().prod(-1)) ** power)


def _integrate_square(num_nodes: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return log evidence, mean and covariance by Gauss-Legendre with ``num_nodes`` between adjacent modes."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    # Modes lie at multiples of 2 pi in each coordinate, which are the boundaries of the cells.
    x = (2 * math.pi * (np.arange(5)[:, None] + (nodes + 1) / 2)).reshape(-1)
    weight = np.tile(weights / 10, 5)
    log_likelihood = (2 + np.outer(np.cos(x / 2), np.cos(x / 2))) ** 5
    peak = log_likelihood.max()
    mass = np.exp(log_likelihood - peak) * np.outer(weight, weight)
    log_evidence = float(peak + np.log(mass.sum()))
    mass /= mass.sum()
    mean = np.array([mass.sum(1) @ x, mass.sum(0) @ x])
    first, second = x - mean[0], x - mean[1]
    mixed = first @ mass @ second
    covariance = np.array([[mass.sum(1) @ first**2, mixed], [mixed, mass.sum(0) @ second**2]])
    return log_evidence, mean, covariance


def eggbox(num_nodes: int = 96) -> ExactCase:
    r"""Build the egg box: :math:`\log L = (2 + \cos(x_1/2) \cos(x_2/2))^5`, uniform on :math:`[0, 10\pi]^2`.

    The posterior has eighteen modes, ten of them on the boundary of the square.

    Parameters
    ----------
    num_nodes : int
        Quadrature nodes between adjacent modes, at least 8.

    Returns
    -------
    ExactCase
        Latent site ``"x"`` of shape ``(2,)``.

    Raises
    ------
    SettingsError
        If the quadrature has not converged with ``num_nodes`` nodes.

    References
    ----------
    Feroz, F., Hobson, M. P., Bridges, M. (2009). MultiNest: an efficient and robust Bayesian inference tool
    for cosmology and particle physics. Monthly Notices of the Royal Astronomical Society 398, 1601-1614.

    Examples
    --------
    >>> from bayeskit.exact._several_modes import eggbox
    >>> round(eggbox().log_evidence, 6)
    235.85594
    """
    if int(num_nodes) != num_nodes or num_nodes < 8:
        raise SettingsError(f"num_nodes is {num_nodes}; pass a whole number of at least 8.")
    log_evidence, mean, covariance = _integrate_square(num_nodes)
    coarse, _, _ = _integrate_square(num_nodes * 3 // 4)
    if not abs(log_evidence - coarse) < _TOLERANCE:
        raise SettingsError(
            f"num_nodes is {num_nodes}, too few: with a quarter fewer nodes the log evidence changes by "
            f"{abs(log_evidence - coarse):.1e}. Pass a larger num_nodes."
        )
    return ExactCase(
        name="eggbox",
        description="eighteen equal peaks on a square, uniform prior",
        model=eggbox_model,
        args=(
            torch.full((2,), 10 * math.pi, dtype=torch.float64),
            torch.tensor(5.0, dtype=torch.float64),
        ),
        log_evidence=log_evidence,
        posterior_mean={"x": torch.from_numpy(mean)},
        posterior_covariance={"x": torch.from_numpy(covariance)},
        reference="tensor Gauss-Legendre quadrature (problem: Feroz et al. 2009)",
    )


# Two thin shells in a cube, by quadrature in polar coordinates.

_REACH = 12.0  # standard deviations beyond which a normal density is negligible in double precision
_RADII = 64
_ANGLES = 96


def gaussian_shells_model(centre: Tensor, radius: Tensor, width: Tensor, half_width: Tensor) -> None:
    """Pyro model: ``x`` uniform on a cube, likelihood the sum of two shells with centres ``centre`` and ``-centre``.

    The likelihood of a shell is a normal density with standard deviation ``width`` in the distance from its sphere
    of radius ``radius``.

    Parameters
    ----------
    centre : Tensor, shape (d,)
        Centre of one shell.
    radius, width : Tensor, shape ()
        Radius and standard deviation of the shells.
    half_width : Tensor, shape ()
        Half the edge length of the cube.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact._several_modes import gaussian_shells
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


def _integrate_shells(
    dim: int, radius: float, width: float, offset: float, half_width: float
) -> tuple[float, np.ndarray]:
    """Return the integral of one shell over the cube and the second moments ``(dim,)`` of ``x`` under the shell."""
    # Gauss-Legendre in the distance from the centre and in the angle to the first axis, without the part outside the
    # nearest face of the cube.
    gap = half_width - offset
    low, high = radius - _REACH * width, radius + _REACH * width
    nodes, weights = np.polynomial.legendre.leggauss(_RADII)
    # The integrand has a kink at the radius where spheres reach the face, so the rule is split there.
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
        Radius ``r`` of the spheres and standard deviation ``w`` of the distance from them, positive.
    offset : float
        The centres are at ``+offset`` and ``-offset`` on the first axis.
    half_width : float
        Half the edge length of the cube, ``h``. The cube must contain the spheres.

    Returns
    -------
    ExactCase
        Latent site ``"x"`` of shape ``(dim,)``.

    Raises
    ------
    SettingsError
        If a length is not positive, ``dim`` is less than 2, ``width`` is too large, or the shells exceed the cube.

    References
    ----------
    Feroz, F., Hobson, M. P., Bridges, M. (2009). MultiNest: an efficient and robust Bayesian inference tool
    for cosmology and particle physics. Monthly Notices of the Royal Astronomical Society 398, 1601-1614.

    Examples
    --------
    >>> from bayeskit.exact._several_modes import gaussian_shells
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
        raise SettingsError(f"half_width is {half_width}; the shells stick out of the cube, pass a larger half_width.")
    log_integral, moments = _integrate_shells(dim, radius, width, offset, half_width)
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


# A narrow normal spike on a broad normal slab in a cube: a phase transition, at which tempering fails.


def spike_and_slab_model(edge: Tensor, scales: Tensor, heights: Tensor) -> None:
    """Pyro model: ``x`` uniform on a cube centred at zero, likelihood a weighted sum of two normal densities.

    Parameters
    ----------
    edge : Tensor, shape (d,)
        Edge lengths of the cube.
    scales, heights : Tensor, shape (2,)
        Standard deviations and weights of spike and slab, positive.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact._several_modes import spike_and_slab
    >>> case = spike_and_slab(5)
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["x"]["value"].shape)
    (5,)
    """
    x = pyro.sample("x", dist.Uniform(-edge / 2, edge / 2).to_event(1))
    densities = dist.Normal(torch.zeros_like(scales), scales).log_prob(x.unsqueeze(-1)).sum(-2)
    pyro.factor("components", (heights.log() + densities).logsumexp(-1))


def spike_and_slab(
    dim: int = 20, *, spike_sd: float = 0.01, slab_sd: float = 0.1, spike_height: float = 100.0, edge: float = 1.0
) -> ExactCase:
    r"""Build the spike on a slab: :math:`L(x) = a N(x; 0, s^2 I) + N(x; 0, S^2 I)`, uniform on a cube.

    The evidence is :math:`(a P_s^d + P_S^d) / e^d`, where :math:`P_\sigma` is the probability of
    :math:`N(0, \sigma^2)` in :math:`[-e/2, e/2]`.

    Parameters
    ----------
    dim : int
        Dimension ``d``, at least 1.
    spike_sd, slab_sd : float
        Standard deviations ``s`` and ``S``, positive.
    spike_height : float
        Weight ``a`` of the spike, positive.
    edge : float
        Edge length ``e`` of the cube, positive.

    Returns
    -------
    ExactCase
        Latent site ``"x"`` of shape ``(dim,)``.

    Raises
    ------
    SettingsError
        If a parameter is not positive.

    References
    ----------
    Sivia, D. S., Skilling, J. (2006). Data Analysis: A Bayesian Tutorial, 2nd edition, chapter 9.

    Examples
    --------
    >>> from bayeskit.exact._several_modes import spike_and_slab
    >>> round(spike_and_slab().log_evidence, 6)
    4.61512
    """
    if int(dim) != dim or dim < 1:
        raise SettingsError(f"dim is {dim}; pass a whole number of at least 1.")
    settings = {"spike_sd": spike_sd, "slab_sd": slab_sd, "spike_height": spike_height, "edge": edge}
    spike, slab, height, width = (positive_scalar(name, value) for name, value in settings.items())
    scales = torch.stack([spike, slab])
    heights = torch.stack([height, torch.ones_like(height)])
    bound = width / (2 * scales)  # half the edge in standard deviations
    inside = torch.special.erf(bound / math.sqrt(2))
    log_terms = heights.log() + dim * inside.log()
    log_sum = log_terms.logsumexp(0)
    density = torch.exp(-0.5 * bound.square()) / math.sqrt(2 * math.pi)
    variances = scales.square() * (1 - 2 * bound * density / inside)
    variance = ((log_terms - log_sum).exp() * variances).sum()
    return ExactCase(
        name="spike_and_slab",
        description=f"normal spike on a normal slab in {dim} dimensions, uniform prior on a cube",
        model=spike_and_slab_model,
        args=(width.expand(dim).clone(), scales, heights),
        log_evidence=float(log_sum) - dim * math.log(edge),
        posterior_mean={"x": torch.zeros(dim, dtype=torch.float64)},
        posterior_covariance={"x": variance * torch.eye(dim, dtype=torch.float64)},
        reference="closed form: error functions (problem: Sivia and Skilling 2006, chapter 9)",
    )
