"""Jumps of chains along the scales of a model, across necks and plateaus that trajectories seldom cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._logdensity.target import Target
from bayeskit.inference.samplers._hmc import HMCState, choose
from bayeskit.inference.samplers._scale_profiles import Knot, knots_along, scales_of

_MOST_DIMENSIONS = 64  # a jump differentiates the gradient along all coordinates that are no scales
_LONG = 12.0  # half widths of the peak between the quantiles below; a normal distribution has 6.2
_QUANTILES = (0.001, 0.999)
_PILOTS, _REACH = 400, math.log(30.0)  # proposals that show the mean weight, and how much larger one may be
_EVERY = 2  # iterations of which one jumps
_DIFFERENCE, _STEPS = 1e-3, 2  # of gradients, in widths; steps of Newton's to the maximum given the scales
_DEGREES = 8  # of freedom of what is proposed for the other coordinates; even


class ScaleJumps(NamedTuple):
    """What jumps propose: knots along some scales, between which the logarithm of the marginal density is linear."""

    column: Tensor  # (r,), int64, on the host: the scale of a knot
    position: Tensor  # (r, d), the other coordinates at their maximum; increases along the scale
    width: Tensor  # (r, d), standard deviations of the others given the scale
    log_density: Tensor  # (r,), marginal
    log_weight: Tensor  # (r,), log of the mean of density over proposal, the same for all knots of a scale
    is_scale: Tensor  # (r, d), bool, the same for all knots

    @classmethod
    def none(cls, like: Tensor) -> ScaleJumps:
        """Return no knots, in dtype, device and dimension of ``like (*batch, d)``."""
        empty, scalars = like.new_zeros(0, like.shape[-1]), like.new_zeros(0)
        return cls(torch.zeros(0, dtype=torch.int64), empty, empty, scalars, scalars, empty.bool())

    @property
    def columns(self) -> list[int]:
        """The scales along which chains jump."""
        return [int(column) for column in self.column.unique()]

    def along(self, column: int) -> ScaleJumps:
        """Return the knots of one scale."""
        return ScaleJumps(*(part[(self.column == column).to(part.device)] for part in self))


def scale_jumps(
    target: Target, centre: Tensor, width: Tensor, budget: int, generator: torch.Generator
) -> tuple[ScaleJumps, int]:
    """Return jumps along the scales whose marginal distribution is long for the width of its peak, and gradients.

    ``centre (d,)`` and ``width (d,)`` are rough means and standard deviations; ``budget`` is a number of gradients.
    """
    found, spent = ScaleJumps.none(centre), 0
    with density_may_fail():  # then chains move by trajectories, and by the jumps found so far
        scales = scales_of(target) if target.dim <= _MOST_DIMENSIONS and not target.loops else []
        widths = {place: float(width[place]) for place in scales}
        for column in scales:
            knots, looks = knots_along(target, centre, column, widths, budget - spent)
            spent += looks
            if not _is_long(knots, column):
                continue
            table = _table(knots, column, scales)
            there, log_proposal = Proposal(target, table, column).draw(centre.expand(_PILOTS, -1), generator)
            log_weight = (target.log_density(there) - log_proposal).nan_to_num(nan=-torch.inf)
            table = table._replace(log_weight=(log_weight.logsumexp(0) - math.log(_PILOTS)).expand(len(knots)))
            spent += _PILOTS * (target.dim - len(scales) + 3)
            found = ScaleJumps(*(torch.cat(pair) for pair in zip(found, table, strict=True)))
    return found, spent


def _table(knots: Sequence[Knot], column: int, scales: Sequence[int]) -> ScaleJumps:
    """Return the knots of a scale, without weights."""
    position = torch.stack([one.position for one in knots])
    height = position.new_tensor([one.log_density for one in knots])
    is_scale = torch.zeros_like(position, dtype=torch.bool)
    is_scale[:, list(scales)] = True
    width = torch.stack([one.width for one in knots])
    column_of = torch.full((len(knots),), column)
    return ScaleJumps(column_of, position, width, height - height.max(), torch.zeros_like(height), is_scale)


def _is_long(knots: Sequence[Knot], column: int) -> bool:
    """Tell whether quantiles of a marginal density lie far from each other for the width of its peak."""
    if len(knots) < 3:
        return False
    x = torch.stack([knot.position[column] for knot in knots]).double().cpu()
    height = torch.tensor([knot.log_density for knot in knots], dtype=torch.float64)
    share = _log_masses(x, height).softmax(0).cumsum(0)
    low, high = (int((share < quantile).sum()) for quantile in _QUANTILES)
    high = min(high + 1, len(x) - 1)
    top = int(height.argmax())
    near = (height > height[top] - 0.5).nonzero().flatten()
    around = slice(max(int(near[0]) - 1, 0), int(near[-1]) + 2)
    drop = (height[top] - height[around]).clamp(min=0)
    # A knot lies at sqrt(2 drop) standard deviations of a normal distribution.
    widths = (x[around] - x[top]).abs()[drop > 0] / (2 * drop[drop > 0]).sqrt()
    return bool(len(widths)) and float(x[high] - x[low]) > _LONG * float(widths.min())


def _log_masses(x: Tensor, height: Tensor) -> Tensor:
    """Return log masses of segments ``(m - 1,)`` of a density whose logarithm is linear between knots ``(m,)``."""
    rise = height.diff().abs()
    part = torch.where(rise > 1e-6, -torch.expm1(-rise) / rise.clamp(min=1e-6), 1 - 0.5 * rise)
    return torch.maximum(height[1:], height[:-1]) + x.diff().log() + part.log()


def jump(
    target: Target, kernel: Any, chains: HMCState, jumps: ScaleJumps, generator: torch.Generator
) -> tuple[HMCState, int]:
    """Propose to each chain independent values of all coordinates, in some iterations, by each scale in turn.

    Metropolis' rule accepts them, so that the posterior stays what it is whatever is proposed. Also return gradients.
    """
    turn, rest = divmod(int(chains.iteration), _EVERY)
    if rest:
        return chains, 0
    columns = jumps.columns
    proposal = Proposal(target, jumps.along(column := columns[turn % len(columns)]), column)
    there, log_proposal = proposal.draw(chains.position, generator)
    fresh = kernel.init(target, there)
    uniform = torch.rand(log_proposal.shape, generator=generator, dtype=there.dtype, device=there.device)
    gain = fresh.log_density - log_proposal - chains.log_density + proposal.log_density(chains.position)
    moved = choose(uniform.log() < gain, fresh, chains)._replace(iteration=chains.iteration)
    return moved, proposal.num_gradients + len(there)


def within_reach(target: Target, chains: HMCState, jumps: ScaleJumps) -> tuple[Tensor, int]:
    """Return which chains ``(n,)`` are where the jumps along one scale lead often enough, and gradients."""
    found, spent = torch.zeros_like(chains.log_density, dtype=torch.bool), 0
    for column in jumps.columns:
        proposal = Proposal(target, jumps.along(column), column)
        log_weight = chains.log_density - proposal.log_density(chains.position)
        found |= log_weight < proposal.table.log_weight[0] + _REACH
        spent += proposal.num_gradients
    return found, spent


@dataclass
class Proposal:
    """Independent proposals: a scale from its knots, other scales about their maxima, and all else given the scales.

    Given the scales, what is no scale has Laplace's approximation, which is found anew for every value of them.
    """

    target: Target
    table: ScaleJumps  # of one scale
    column: int
    num_gradients: int = 0

    def __post_init__(self) -> None:
        self.is_scale = self.table.is_scale[0]
        self.others = self.is_scale.clone()
        self.others[self.column] = False
        self.rest = ~self.is_scale

    def draw(self, like: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return proposals in the shape of ``like (n, d)`` and their log densities, up to a constant."""
        n, d = like.shape
        settings: dict[str, Any] = {"generator": generator, "dtype": like.dtype, "device": like.device}
        uniform = torch.rand(2, n, **settings)
        half_square = -torch.rand(_DEGREES // 2, n, d, **settings).log().sum(0)
        noise = torch.randn(n, d, **settings) * (0.5 * _DEGREES / half_square).sqrt()
        heights = self.table.log_density
        masses = _log_masses(self.table.position[:, self.column], heights).softmax(0)
        segment = torch.searchsorted(masses.cumsum(0), uniform[0]).clamp(max=len(masses) - 1)
        rise = heights.diff()[segment]
        inside, steep = uniform[1], rise.abs().clamp(min=1e-6)
        # By the inverse of the distribution function, from the higher end.
        place = -torch.log1p(inside * torch.expm1(-steep)) / steep
        place = torch.where(rise.abs() > 1e-6, torch.where(rise > 0, 1 - place, place), inside)
        u, width, height = self._between(segment, place)
        u = torch.where(self.others, u + width * noise, u)
        mean, factor = self._given_scales(u, width)
        noise_of_rest = noise[:, self.rest].unsqueeze(-1)
        away = torch.linalg.solve_triangular(factor.mT, noise_of_rest, upper=True).squeeze(-1)
        u = u.masked_scatter(self.rest.expand_as(u), mean + width[:, self.rest] * away)
        return u, self._log_density(height, noise, factor, width)

    def log_density(self, u: Tensor) -> Tensor:
        """Return the log density of proposals at points ``(n, d)``, up to the same constant; -inf beyond the knots."""
        x, knots = u[:, self.column].contiguous(), self.table.position[:, self.column].contiguous()
        segment = (torch.searchsorted(knots, x) - 1).clamp(0, len(knots) - 2)
        place = (x - knots[segment]) / (knots[segment + 1] - knots[segment])
        inside = (place >= 0) & (place <= 1)
        start, width, height = self._between(segment, place.clamp(0, 1))
        noise = torch.where(self.others, (u - start) / width, 0.0)
        mean, factor = self._given_scales(torch.where(self.is_scale, u, start), width)
        away = (u[:, self.rest] - mean) / width[:, self.rest]
        noise = noise.masked_scatter(self.rest.expand_as(u), (factor.mT @ away.unsqueeze(-1)).squeeze(-1))
        return torch.where(inside, self._log_density(height, noise, factor, width), -torch.inf)

    def _log_density(self, height: Tensor, noise: Tensor, factor: Tensor, width: Tensor) -> Tensor:
        moved = noise.index_fill(1, torch.tensor([self.column], device=noise.device), 0.0)
        log_student = -0.5 * (_DEGREES + 1) * torch.log1p(moved.square() / _DEGREES).sum(-1)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        widths = width.index_fill(1, torch.tensor([self.column], device=noise.device), 1.0)
        return height + log_student + log_det - widths.log().sum(-1)

    def _between(self, segment: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Interpolate positions and widths ``(n, d)`` and log densities ``(n,)`` at places in [0, 1]."""
        column, table = place.unsqueeze(-1), self.table
        position = torch.lerp(table.position[segment], table.position[segment + 1], column)
        log_width = table.width.clamp(min=torch.finfo(position.dtype).tiny).log()
        width = torch.lerp(log_width[segment], log_width[segment + 1], column).exp()
        return position, width, torch.lerp(table.log_density[segment], table.log_density[segment + 1], place)

    def _given_scales(self, u: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean ``(n, f)`` and the Cholesky factor of the precision ``(n, f, f)``, in units of the widths.

        Of ``u (n, d)`` the scales count; where the rest is normal given the scales, one step of Newton's is exact.
        """
        n, f = len(u), int(self.rest.sum())
        unit = width[:, self.rest]
        if not f:
            return u[:, self.rest], u.new_zeros(n, 0, 0)
        offsets = _DIFFERENCE * torch.diag_embed(torch.where(self.rest, width, 0.0))[:, self.rest]  # (n, f, d)
        points = torch.cat([u.unsqueeze(1) + offsets, u.unsqueeze(1)], 1)
        gradients = self._gradients(points.flatten(0, 1)).unflatten(0, (n, -1)) * unit.unsqueeze(1)
        bend = (gradients[:, -1:] - gradients[:, :-1]) / _DIFFERENCE
        factor, failed = torch.linalg.cholesky_ex(0.5 * (bend + bend.mT))
        factor = torch.where((failed == 0)[:, None, None], factor, torch.nan)
        mean, gradient = u[:, self.rest], gradients[:, -1]
        for step in range(_STEPS):
            if step:
                gradient = unit * self._gradients(u.masked_scatter(self.rest.expand_as(u), mean))
            mean = mean + unit * torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
        return mean, factor

    def _gradients(self, points: Tensor) -> Tensor:
        self.num_gradients += len(points)
        return self.target.value_and_grad(points)[1][..., self.rest]
