"""The egg box: eighteen peaks on a square, integrated by quadrature."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.exact.case import ExactCase

_TOLERANCE = 1e-9


def eggbox_model(edge: Tensor, power: Tensor) -> None:
    """Pyro model: ``x`` uniform on a square, log likelihood ``(2 + cos(x_1 / 2) cos(x_2 / 2)) ** power``.

    Parameters
    ----------
    edge : Tensor, shape (2,)
        Edges of the square, which begins at the origin.
    power : Tensor, shape ()

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact.eggbox import eggbox
    >>> case = eggbox()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["x"]["value"].shape)
    (2,)
    """
    x = pyro.sample("x", dist.Uniform(torch.zeros_like(edge), edge).to_event(1))
    pyro.factor("peaks", (2 + (x / 2).cos().prod(-1)) ** power)


def _integrate(num_nodes: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return log evidence, mean and covariance, by Gauss-Legendre with ``num_nodes`` between neighbouring peaks."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    # Peaks sit at the multiples of 2 pi, so each cell runs from one to the next.
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

    Five of the eighteen peaks lie on each edge, those at the corners shared by two.

    Parameters
    ----------
    num_nodes : int
        Quadrature nodes between neighbouring peaks, at least 8.

    Returns
    -------
    ExactCase
        Latent site ``"x"`` of shape ``(2,)``.

    Raises
    ------
    SettingsError
        If ``num_nodes`` is too small for the quadrature to have converged.

    References
    ----------
    Feroz, F., Hobson, M. P., Bridges, M. (2009). MultiNest: an efficient and robust Bayesian inference tool
    for cosmology and particle physics. Monthly Notices of the Royal Astronomical Society 398, 1601-1614.

    Examples
    --------
    >>> from bayeskit.exact.eggbox import eggbox
    >>> round(eggbox().log_evidence, 6)
    235.85594
    """
    if int(num_nodes) != num_nodes or num_nodes < 8:
        raise SettingsError(f"num_nodes is {num_nodes}; pass a whole number of at least 8.")
    log_evidence, mean, covariance = _integrate(num_nodes)
    coarse, _, _ = _integrate(num_nodes * 3 // 4)
    if not abs(log_evidence - coarse) < _TOLERANCE:
        raise SettingsError(
            f"num_nodes is {num_nodes}, too few: with a quarter fewer the log evidence moves by "
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
