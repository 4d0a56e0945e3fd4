"""Permuting the components of a mixture in unconstrained space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayeskit.errors import ModelError, SettingsError, UnknownNameError
from bayeskit.target import Target

MAX_LISTED = 5040
SYMMETRY_TOLERANCE = 1e-8


class Labels:
    """Say which coordinates of a target belong to which of ``K`` exchangeable components.

    Permuting the components then permutes coordinates, which preserves volume.

    Parameters
    ----------
    target : Target
    sites : sequence of str, or str
        Sites whose first dimension is the component, such as :attr:`GaussianMixture.exchangeable`.

    Attributes
    ----------
    coordinates : Tensor
        Those of each component, shape ``(K, c)``.

    Raises
    ------
    UnknownNameError
        If the target has no such site.
    ModelError
        If the sites disagree on the number of components, or a permutation changes the density.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, Labels, galaxy_velocities
    >>> mixture = GaussianMixture(galaxy_velocities(), num_components=3)
    >>> labels = Labels(bk.Target.from_pyro(mixture), mixture.exchangeable)
    >>> labels.coordinates.tolist(), len(labels.permutations())
    ([[1, 7, 4], [2, 8, 5], [3, 9, 6]], 6)
    """

    def __init__(self, target: Target, sites: Sequence[str]) -> None:
        sites = (sites,) if isinstance(sites, str) else tuple(sites)
        found = {site.name: site for site in target.sites}
        missing = [name for name in sites if name not in found]
        if missing or not sites:
            said = f"the target has no site {missing[0]!r}" if missing else "no exchangeable sites were named"
            raise UnknownNameError(f"{said}; its sites are: {', '.join(found)}")
        blocks = []
        for name in sites:
            site = found[name]
            shape = site.unconstrained_shape
            if not shape or shape[0] != found[sites[0]].unconstrained_shape[0] or site.shape[:1] != shape[:1]:
                raise ModelError(
                    f"site {name!r} has shape {tuple(site.shape)}, unconstrained {tuple(shape)}; the first dimension "
                    "of an exchangeable site must be the component (weights: use gamma variables over their sum)"
                )
            blocks.append(torch.arange(site.start, site.stop, device=target.device).reshape(shape[0], -1))
        self.target, self.sites = target, sites
        self.coordinates = torch.cat(blocks, 1)
        self._check()

    def __repr__(self) -> str:
        return f"Labels(num_components={self.num_components}, sites={self.sites})"

    @property
    def num_components(self) -> int:
        """Number of components ``K``."""
        return len(self.coordinates)

    @property
    def log_num_permutations(self) -> float:
        """Logarithm of ``K!``: what the evidence lacks where one of the equal modes was taken for all."""
        return math.lgamma(self.num_components + 1)

    @property
    def listable(self) -> bool:
        """Whether :meth:`permutations` lists them."""
        return math.factorial(self.num_components) <= MAX_LISTED

    def permutations(self) -> Tensor:
        """Return every permutation of the components, shape ``(K!, K)``, the identity first.

        Raises
        ------
        SettingsError
            If there are more than 5040, those of seven components.
        """
        if not self.listable:
            count = math.factorial(self.num_components)
            raise SettingsError(
                f"{self.num_components} components have {count} permutations, and no more than {MAX_LISTED} are "
                "listed; use tempering (sample_smc), which needs none"
            )
        return torch.tensor(list(itertools.permutations(range(self.num_components))), device=self.coordinates.device)

    def permute(self, u: Tensor, permutation: Tensor) -> Tensor:
        """Give component ``k`` the parameters of component ``permutation[k]``.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.
        permutation : Tensor
            Shape ``(*batch, K)``; the two batch shapes broadcast.

        Returns
        -------
        Tensor
            Shape ``(*batch, d)``.
        """
        batch = torch.broadcast_shapes(u.shape[:-1], permutation.shape[:-1])
        source = torch.arange(u.shape[-1], device=u.device).expand(*batch, -1).clone()
        taken = self.coordinates[permutation.expand(*batch, -1)]  # (*batch, K, c)
        source[..., self.coordinates.flatten()] = taken.flatten(-2)
        return u.expand(*batch, -1).gather(-1, source)

    def _check(self) -> None:
        u = self.target.sample_prior(4, seed=0)
        turned = torch.arange(self.num_components, device=u.device).roll(1)
        swapped = torch.arange(self.num_components, device=u.device)
        swapped[:2] = swapped[:2].flip(0)
        before = self.target.log_density(u)
        tolerance = SYMMETRY_TOLERANCE if before.dtype == torch.float64 else 1e-3
        for permutation in (turned, swapped):
            change = (self.target.log_density(self.permute(u, permutation)) - before).abs()
            if not bool((change <= tolerance * (1 + before.abs())).all()):
                raise ModelError(
                    f"permuting the components changes the log density by up to {float(change.max()):.3g}, so they are "
                    f"not exchangeable; look at the priors of {', '.join(self.sites)}, and name all sites of components"
                )
