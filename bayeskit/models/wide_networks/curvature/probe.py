"""Whether observed data look like the model, so that the empirical Fisher may stand for the Fisher information."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.models.wide_networks.curvature.flat_network import PRODUCT_ROWS, FlatNetwork, row_blocks
from bayeskit.models.wide_networks.curvature.likelihoods import Likelihood

NUM_DIRECTIONS = 8
NUM_REPLICATES = 200
LARGEST_RATIO = 1.25
LARGEST_Z = 5.0
LARGEST_NOISE = 0.3
LARGEST_GRADIENT = 12.0  # a squared normal variable exceeds it once in 2,000 times


def empirical_problems(
    network: FlatNetwork, likelihood: Likelihood, x: Tensor, outputs: Tensor, targets: Tensor, seed: int
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Compare both matrices along random directions, and the gradient with what the model expects.

    Returns
    -------
    problems : tuple of str
        Each with its remedy.
    diagnostics : dict of float
    """
    generator = new_generator(seed, stream="empirical Fisher")
    tangents = torch.randn(
        NUM_DIRECTIONS, network.num_parameters, generator=generator, dtype=network.vector.dtype, device=generator.device
    ).to(network.vector)
    along = _pushed(network, x, tangents)
    root = torch.einsum("nkr,nkm->nrm", likelihood.fisher_root(outputs), along)
    expected = root.square().sum((0, 1))
    score = likelihood.score(outputs, targets)
    ratio = _quadratic(score, along) / expected
    drawn = torch.stack(
        [
            _quadratic(likelihood.score(outputs, likelihood.sample(outputs, generator)), along) / expected
            for _ in range(NUM_REPLICATES)
        ]
    )
    noise = drawn.std(0)
    # The mean of a squared Gaussian projection is the trace.
    projected = torch.einsum("nk,nkm->m", score, along)
    diagnostics = {
        "ratio": float(ratio.mean()),
        "z": float(((ratio - 1) / noise)[((ratio - 1) / noise).abs().argmax()]),
        "noise": float(noise.mean()),
        "gradient": float(projected.square().sum() / expected.sum()),
    }
    return tuple(_problems(ratio, noise, diagnostics)), diagnostics


def _problems(ratio: Tensor, noise: Tensor, diagnostics: dict[str, float]) -> list[str]:
    remedy = "take fisher() or gauss_newton()"
    found = []
    unlike = (torch.maximum(ratio, 1 / ratio) > LARGEST_RATIO) & (((ratio - 1) / noise).abs() > LARGEST_Z)
    if bool(unlike.any()) or not bool(torch.isfinite(ratio).all()):
        worst = float(ratio[ratio.log().abs().argmax()])
        found.append(
            f"residuals do not look like the model: along a random direction the empirical Fisher is {worst:.3g} times "
            f"the Fisher information; {remedy}"
        )
    if diagnostics["gradient"] > LARGEST_GRADIENT:
        found.append(
            f"the parameters are no optimum: the squared gradient is {diagnostics['gradient']:.3g} times what the "
            f"model expects; {remedy}"
        )
    if diagnostics["noise"] > LARGEST_NOISE:
        found.append(
            f"there are too few data: even of data of the model, the empirical Fisher would be off by "
            f"{100 * diagnostics['noise']:.0f} %; {remedy}"
        )
    return found


def _pushed(network: FlatNetwork, x: Tensor, tangents: Tensor) -> Tensor:
    """Return derivatives of outputs along each vector, ``(n, k, m)``."""
    blocks = row_blocks(len(x), PRODUCT_ROWS)
    return torch.cat([torch.stack([network.push(x[rows], v) for v in tangents], 2) for rows in blocks])


def _quadratic(score: Tensor, along: Tensor) -> Tensor:
    return torch.einsum("nk,nkm->nm", score, along).square().sum(0)
