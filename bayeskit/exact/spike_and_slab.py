"""A narrow normal spike on a broad normal slab in a box: a phase transition that tempering misses."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.exact._inputs import positive_scalar
from bayeskit.exact.case import ExactCase


def spike_and_slab_model(edge: Tensor, scales: Tensor, heights: Tensor) -> None:
    """Pyro model: ``x`` uniform on a cube about zero, the likelihood a weighted sum of two normal densities.

    Parameters
    ----------
    edge : Tensor, shape (d,)
        Edges of the cube.
    scales, heights : Tensor, shape (2,)
        Standard deviation and weight of spike and slab, above zero.

    Examples
    --------
    >>> import pyro
    >>> from bayeskit.exact.spike_and_slab import spike_and_slab
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

    With :math:`P_\sigma` the mass of a normal variable inside one edge :math:`e`, the evidence is
    :math:`(a P_s^d + P_S^d) / e^d`.

    Parameters
    ----------
    dim : int
        Dimension ``d``, at least 1.
    spike_sd, slab_sd : float
        Standard deviations ``s`` and ``S``, above zero.
    spike_height : float
        Weight ``a`` of the spike, above zero.
    edge : float
        Edge ``e`` of the cube, above zero.

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
    >>> from bayeskit.exact.spike_and_slab import spike_and_slab
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
