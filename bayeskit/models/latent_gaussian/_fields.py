"""Gaussian fields with dense covariances: random walks, areas of a map, correlations of places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, check_memory, whole_number


def random_walk(order: int, size: int, scale: float | Tensor, ridge: float = 1e-6) -> Any:
    r"""Return an intrinsic Gaussian random walk, of covariance :math:`\text{scale}^2 (G + \text{ridge}\, I)`.

    First or second differences are independent normal variables of equal variance. :math:`G` is the generalised inverse
    of the precision of the walk, divided by the geometric mean of its diagonal, so that ``scale`` means the same for
    every size: values sum to zero, and if ``order`` is 2, their slope over time is zero as well. The ridge makes the
    density proper.

    Parameters
    ----------
    order : int
        1 or 2: of the differences.
    size : int
        Number of steps, above ``order``.
    scale : float or Tensor
        Standard deviation, positive: the geometric mean over steps, scalar.
    ridge : float, default 1e-6
        Positive.

    Returns
    -------
    pyro.distributions.MultivariateNormal
        Of event shape ``(size,)``.

    Raises
    ------
    SettingsError
        If the order is neither 1 nor 2, the size not above it, or the covariance not positive definite.

    References
    ----------
    Rue, H., Held, L. (2005). Gaussian Markov Random Fields: Theory and Applications. Chapman and Hall/CRC, chapter 3.

    Sørbye, S. H., Rue, H. (2014). Scaling intrinsic Gaussian Markov random field priors in spatial modelling. Spatial
    Statistics 8, 39-51.

    Examples
    --------
    >>> import torch
    >>> walk = random_walk(1, 3, torch.tensor(1.0, dtype=torch.float64))
    >>> walk.variance.log().mean().abs() < 1e-5
    tensor(True)
    """
    return intrinsic(walk_covariance(order, size), scale, ridge)


def walk_covariance(order: int, size: int) -> Tensor:
    """Return the scaled generalised inverse of the precision of a random walk, ``(size, size)``, float64."""
    if whole_number("order", order, 1) > 2:
        raise SettingsError(f"order must be 1 or 2, not {order}")
    check_memory("size", whole_number("size", size, order + 1), 8 * size)
    differences = np.diff(np.eye(size), order, axis=0)
    return torch.from_numpy(_scaled_inverse(differences.T @ differences, np.vander(np.linspace(-1, 1, size), order)))


class AreaGraph:
    r"""Neighbouring areas of a map, and the scaled covariance of an intrinsic autoregression on them.

    The intrinsic conditional autoregression has precision :math:`D - W`, for the adjacency :math:`W` and the numbers of
    neighbours :math:`D`, and values that sum to zero within each connected component. Its covariance is the generalised
    inverse of the precision, divided by the geometric mean of the marginal variances of the component, so that a
    standard deviation means the same on every map. An area without neighbours has variance 1.

    Parameters
    ----------
    size : int
        Number of areas.
    edges : array_like of int
        Pairs of neighbours, counted from zero, ``(e, 2)``. A pair may be given in either order, or in both.

    Attributes
    ----------
    size : int
    edges : Tensor of int
        Each pair once, the lower number first, ``(e, 2)``.
    components : Tensor of int
        Number of the connected component of each area, ``(size,)``.
    precision : Tensor
        :math:`D - W`, ``(size, size)``, float64.
    covariance : Tensor
        Scaled generalised inverse, ``(size, size)``, float64.
    eigenvalues : Tensor
        Of ``covariance``, ascending, ``(size,)``.

    Raises
    ------
    DataError
        If an edge names no area, joins an area with itself, or is no pair of whole numbers.

    References
    ----------
    Besag, J., York, J., Mollié, A. (1991). Bayesian image restoration, with two applications in spatial statistics.
    Annals of the Institute of Statistical Mathematics 43, 1-20.

    Sørbye, S. H., Rue, H. (2014). Scaling intrinsic Gaussian Markov random field priors in spatial modelling. Spatial
    Statistics 8, 39-51.

    Freni-Sterrantino, A., Ventrucci, M., Rue, H. (2018). A note on intrinsic conditional autoregressive models for
    disconnected graphs. Spatial and Spatio-temporal Epidemiology 26, 25-34.

    Examples
    --------
    >>> AreaGraph(4, [(0, 1), (1, 2)]).components
    tensor([0, 0, 0, 1])
    """

    def __init__(self, size: int, edges: Sequence[tuple[int, int]] | Tensor) -> None:
        self.size = whole_number("size", size, 1)
        pairs = _pairs(edges, self.size)
        self.edges = torch.from_numpy(pairs)
        i, j = pairs.T
        near = coo_array((np.ones(len(pairs)), (i, j)), shape=(size, size))
        labels = connected_components(near, directed=False)[1]
        precision = np.zeros((size, size))
        precision[i, j] = precision[j, i] = -1.0
        np.fill_diagonal(precision, -precision.sum(1))
        covariance = np.zeros_like(precision)
        for label in range(labels.max() + 1):
            inside = np.flatnonzero(labels == label)
            block = np.ix_(inside, inside)
            alone = len(inside) == 1
            covariance[block] = 1.0 if alone else _scaled_inverse(precision[block], np.ones((len(inside), 1)))
        self.components = torch.from_numpy(labels).long()
        self.precision, self.covariance = torch.from_numpy(precision), torch.from_numpy(covariance)
        self.eigenvalues = torch.from_numpy(np.linalg.eigvalsh(covariance))

    def __repr__(self) -> str:
        parts = int(self.components.max()) + 1
        return f"AreaGraph({self.size} areas, {len(self.edges)} edges, {parts} components)"


def icar(graph: AreaGraph, scale: float | Tensor, ridge: float = 1e-6) -> Any:
    r"""Return an intrinsic autoregression on areas, of covariance :math:`\text{scale}^2 (G + \text{ridge}\, I)`.

    :math:`G` is the graph's scaled covariance, which is singular: sums over connected components are zero. The ridge
    makes the density proper, so that these sums have variance ``scale**2 * ridge`` times the number of areas.

    Parameters
    ----------
    graph : AreaGraph
        Of n areas.
    scale : float or Tensor
        Standard deviation, positive: the geometric mean over areas of each component, scalar.
    ridge : float, default 1e-6
        Positive.

    Returns
    -------
    pyro.distributions.MultivariateNormal
        Of event shape ``(n,)``.

    Raises
    ------
    SettingsError
        If the covariance is not positive definite, as for a scale of zero.

    Examples
    --------
    >>> import torch
    >>> icar(AreaGraph(2, [(0, 1)]), torch.tensor(2.0, dtype=torch.float64)).covariance_matrix
    tensor([[ 4.0000, -4.0000],
            [-4.0000,  4.0000]], dtype=torch.float64)
    """
    return intrinsic(graph.covariance, scale, ridge)


def bym2(graph: AreaGraph, scale: float | Tensor, proportion: float | Tensor, ridge: float = 1e-6) -> Any:
    r"""Return areas with independent and spatial effects, BYM2.

    The covariance is :math:`\text{scale}^2 ((1 - \varphi) I + \varphi G + \text{ridge}\, I)`, where
    :math:`G` is the graph's scaled covariance. An area without neighbours has the same variance for every proportion.

    Parameters
    ----------
    graph : AreaGraph
        Of n areas.
    scale : float or Tensor
        Standard deviation of a typical area, positive, scalar.
    proportion : float or Tensor
        :math:`\varphi`, the share of the variance that is spatial, between 0 and 1, scalar.
    ridge : float, default 1e-6
        Share of independent variance that is left at a proportion of 1, not negative.

    Returns
    -------
    pyro.distributions.MultivariateNormal
        Of event shape ``(n,)``.

    Raises
    ------
    SettingsError
        If the covariance is not positive definite, as for a scale of zero.

    References
    ----------
    Riebler, A., Sørbye, S. H., Simpson, D., Rue, H. (2016). An intuitive Bayesian spatial model for disease mapping
    that accounts for scaling. Statistical Methods in Medical Research 25, 1145-1165.

    Examples
    --------
    >>> import torch
    >>> bym2(AreaGraph(2, [(0, 1)]), torch.tensor(2.0, dtype=torch.float64), 0.25).covariance_matrix
    tensor([[ 4.0000, -1.0000],
            [-1.0000,  4.0000]], dtype=torch.float64)
    """
    scale = _real(scale)
    one = torch.eye(graph.size, dtype=scale.dtype, device=scale.device)
    return _centred(scale**2 * ((1 + ridge - proportion) * one + proportion * graph.covariance.to(scale)))


def squared_exponential(distance: Tensor) -> Tensor:
    """Return the correlation exp(-r^2 / 2) at distances r in length scales, ``(*batch)``.

    Examples
    --------
    >>> import torch
    >>> squared_exponential(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 0.6065])
    """
    return (-0.5 * torch.as_tensor(distance).square()).exp()


def matern_32(distance: Tensor) -> Tensor:
    """Return the Matérn correlation of smoothness 3/2 at distances in length scales, ``(*batch)``.

    Examples
    --------
    >>> import torch
    >>> matern_32(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 0.4834])
    """
    r = math.sqrt(3) * torch.as_tensor(distance)
    return (1 + r) * (-r).exp()


def matern_52(distance: Tensor) -> Tensor:
    """Return the Matérn correlation of smoothness 5/2 at distances in length scales, ``(*batch)``.

    Examples
    --------
    >>> import torch
    >>> matern_52(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 0.5240])
    """
    r = math.sqrt(5) * torch.as_tensor(distance)
    return (1 + r + r.square() / 3) * (-r).exp()


def _scaled_inverse(precision: np.ndarray, null: np.ndarray) -> np.ndarray:
    """Return the generalised inverse ``(n, n)`` with marginal variances of geometric mean 1, given the null space."""
    basis = np.linalg.qr(null)[0]
    along = basis @ basis.T
    # The precision is one along its null space while it is inverted, and that part is taken away again.
    found = np.linalg.inv(precision + along) - along
    found = 0.5 * (found + found.T)
    scaled: np.ndarray = found / np.exp(np.log(found.diagonal()).mean())
    return scaled


def intrinsic(covariance: Tensor, scale: float | Tensor, ridge: float = 1e-6) -> Any:
    """Return a field of covariance ``scale**2 * (covariance + ridge * I)``, ``(n, n)``."""
    scale = _real(scale)
    one = torch.eye(len(covariance), dtype=scale.dtype, device=scale.device)
    return _centred(scale**2 * (covariance.to(scale) + ridge * one))


def _real(number: float | Tensor) -> Tensor:
    """Return a number as a tensor of real numbers, because whole ones would cut a covariance off."""
    value = torch.as_tensor(number)
    return value.to(torch.result_type(value, 1.0))


def _centred(covariance: Tensor) -> Any:
    try:
        return dist.MultivariateNormal(covariance.new_zeros(len(covariance)), covariance_matrix=covariance)
    except ValueError as error:
        raise SettingsError(
            "the covariance of the field is not positive definite; give a scale that is positive and finite, a "
            "positive ridge, and a proportion between 0 and 1"
        ) from error


def _pairs(edges: Any, size: int) -> np.ndarray:
    """Return each edge once, the lower number first, ``(e, 2)``."""
    given = as_numbers("edges", edges).cpu().numpy()
    if given.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    if given.ndim != 2 or given.shape[1] != 2:
        raise ShapeError(f"edges has shape {given.shape}; give pairs of areas, (e, 2)")
    if not (given == np.floor(given)).all():
        raise DataError("edges holds numbers that are not whole; give pairs of areas, counted from zero")
    outside = (given < 0) | (given >= size)
    pairs = np.where(outside & ~(abs(given) < 2**53), -1, given).astype(np.int64)
    if outside.any():
        row = int(outside.any(1).argmax())
        raise DataError(
            f"edge {row}, {tuple(pairs[row].tolist())}, names no area: the {size} areas are counted from 0 to "
            f"{size - 1}"
        )
    if (loops := pairs[:, 0] == pairs[:, 1]).any():
        row = int(loops.argmax())
        raise DataError(f"edge {row} joins area {int(pairs[row, 0])} with itself; leave it out")
    return np.unique(np.sort(pairs, 1), axis=0)
