"""Hamiltonian moves of all branch lengths and parameters at once, on the topologies that chains have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.models.phylogenetics import Alignment, Partition, Topologies
from bayeskit.models.phylogenetics._parameters import FreeParameters, PartitionParameters
from bayeskit.models.phylogenetics._partitions import forest_likelihood, sites_of_lengths
from bayeskit.models.phylogenetics._topology_moves._chains import LengthPrior

#: Leapfrog steps of a move.
_NUM_STEPS = 4


class Moved(NamedTuple):
    """States after a move."""

    lengths: Tensor  # (chains, sets * edges)
    position: Tensor  # (chains, P)
    probability: Tensor  # of acceptance, (chains,)


class GradientMoves:
    """Hamiltonian moves in the posterior of branch lengths and parameters, given a topology for each chain.

    The coordinates are the square roots of branch lengths: numbers of changes are nearly Poisson variables, so that all
    roots have a standard deviation of about half the root of one site. Parameters are scaled by a root of their
    covariance.
    """

    def __init__(
        self,
        data: Alignment | Partition,
        space: FreeParameters | PartitionParameters,
        prior: LengthPrior,
        separate_branch_lengths: bool = False,
    ) -> None:
        models = (space.substitution, space.site_rates) if isinstance(space, FreeParameters) else (None, None)
        self._likelihood = forest_likelihood(data, *models, separate_branch_lengths=separate_branch_lengths)
        self._space, self._prior, self._separate = space, prior, separate_branch_lengths
        self._unit = 0.5 / sites_of_lengths(data, separate_branch_lengths).sqrt()  # of each set

    def move(
        self,
        topologies: Topologies,
        lengths: Tensor,
        position: Tensor,
        root: Tensor,
        step: Tensor,
        generator: torch.Generator,
    ) -> Moved:
        """Propose lengths `(chains, sets * edges)` and unconstrained parameters `(chains, P)`.

        The edges of each set are in the order of `topologies`.

        `root @ root.T` is the covariance of parameters `(P, P)`, `step` the size of a leapfrog step `()`.
        """
        edges, taxa, unit = lengths.shape[1], len(topologies.taxa), self._unit.repeat_interleave(topologies.num_edges)

        def state(z: Tensor) -> tuple[Tensor, Tensor]:
            return (unit * z[:, :edges]).square(), position + z[:, edges:] @ root.mT

        def density_and_slope(z: Tensor) -> tuple[Tensor, Tensor]:
            z = z.detach().requires_grad_()
            with torch.enable_grad():
                times, u = state(z)
                of_sets = times.unflatten(1, (len(self._unit), -1)) if self._separate else times
                likelihood = self._likelihood.log_likelihood(topologies, of_sets, **self._space.values(u))
                prior = self._prior.log_density(times, taxa) + self._space.log_prior(u)
                # The derivative of a length by its root is proportional to the root.
                density = likelihood + prior + times.log().sum(-1) / 2
                (slope,) = torch.autograd.grad(density.sum(), z)
            return density.detach(), slope

        z = torch.cat([lengths.sqrt() / unit, torch.zeros_like(position)], -1)
        momentum = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        density, slope = density_and_slope(z)
        before = density - momentum.square().sum(-1) / 2
        for _ in range(_NUM_STEPS):
            momentum = momentum + step / 2 * slope
            z = z + step * momentum
            density, slope = density_and_slope(z)
            momentum = momentum + step / 2 * slope
        # Numbers that are none, from steps that are too long, are rejected.
        probability = (density - momentum.square().sum(-1) / 2 - before).clamp(max=0).exp().nan_to_num(0.0)
        accept = torch.rand(len(z), 1, generator=generator, dtype=z.dtype) < probability[:, None]
        times, u = state(z)
        return Moved(torch.where(accept, times, lengths), torch.where(accept, u, position), probability)
