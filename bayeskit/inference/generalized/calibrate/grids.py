"""Learning rates to compare, and posteriors of parts of the data at each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from bayeskit._settings import real_number
from bayeskit._torch import one_thread, validation_kept
from bayeskit.errors import SettingsError
from bayeskit.inference.generalized.coverage.replicates import ReplicatePosteriors, replicate_posteriors
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, columns
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import information

OCTAVES = 6
MAX_UNTRUSTED = 0.01
NUMBERS_AT_ONCE = 2**22


def as_grid(posterior: GibbsPosterior, grid: Sequence[float] | Tensor | None) -> Tensor:
    """Return increasing learning rates ``(g,)``; by default octaves about one that matches the loss's scale.

    Raises
    ------
    SettingsError
        If there are fewer than two, or one is not positive.
    """
    if grid is None:
        found = information(posterior)
        hessian = found.mean_hessian
        # Where ``I`` is a multiple of ``J``, this is the weight of information matching; the trace needs no inverse.
        centre = torch.trace(hessian) / torch.trace(found.gradient_covariance)
        return centre * 2.0 ** torch.arange(-OCTAVES, OCTAVES + 1, dtype=posterior.dtype, device=posterior.device)
    values = [real_number("grid", x, between=(0.0, float("inf"))) for x in grid]
    if len(set(values)) < 2:
        raise SettingsError("grid must have at least two different weights")
    return torch.tensor(sorted(set(values)), dtype=posterior.dtype, device=posterior.device)


class PartPosteriors(NamedTuple):
    """Posteriors of parts of the data at each learning rate.

    Attributes
    ----------
    replicates : ReplicatePosteriors
        Part by part, for each all learning rates, ``p * g`` rows.
    log_weights : Tensor
        Normalised importance weights of the draws, ``(p * g, S)``.
    warnings : tuple of str
    """

    replicates: ReplicatePosteriors
    log_weights: Tensor
    warnings: tuple[str, ...]


def part_posteriors(
    posterior: GibbsPosterior, parts: Tensor, grid: Tensor, num_draws: int, seed: int
) -> PartPosteriors:
    """Compute the posteriors of parts, the rows ``(p, n)`` of zeros and ones, at all learning rates in one batch."""
    weight = grid.repeat(len(parts))
    weights = parts.to(grid).repeat_interleave(len(grid), 0)
    found = replicate_posteriors(posterior, weights=weights, weight=weight, num_draws=num_draws, seed=seed)
    lost = int((~found.trusted).sum())
    warnings: tuple[str, ...] = ()
    if lost > MAX_UNTRUSTED * len(weight):
        warnings = (
            f"{lost} of {len(weight)} posteriors of parts of the data could not be computed reliably by importance "
            "sampling; take more draws, fewer weights, or larger parts",
        )
    return PartPosteriors(found, found.points.log_ratio(weight).log_softmax(-1), warnings)


def losses_at(posterior: GibbsPosterior, loss: PointwiseLoss, draws: Tensor, data: Data) -> Tensor:
    """Return the losses ``(R, S, m)`` at draws ``(R, S, d)`` of the rows' own data ``(R, m, ...)``."""

    def one(u: Tensor, own: tuple[Tensor, ...]) -> Tensor:
        return loss.pointwise(posterior.prior.parameter(u), own if isinstance(data, tuple) else own[0])

    size = columns(data)[0].shape[1] * draws.shape[1]
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        batched = vmap(vmap(one, in_dims=(0, None)), chunk_size=max(1, NUMBERS_AT_ONCE // size))
        result: Tensor = batched(draws, columns(data))
    return result


def at_edge(grid: Tensor, chosen: int, *, lowest_only: bool = False) -> tuple[str, ...]:
    """Return a warning where the best weight of a grid is its first or last."""
    if chosen == 0 or (chosen == len(grid) - 1 and not lowest_only):
        side = "smallest" if chosen == 0 else "largest"
        return (f"the {side} weight of the grid, {float(grid[chosen]):.4g}, is best; extend the grid that way",)
    return ()
