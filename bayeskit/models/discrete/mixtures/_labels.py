"""Permutation of mixture components, and relabelling of draws to undo label switching."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, UnknownNameError
from bayeskit.extend import Draws, Target
from bayeskit.models.discrete._inputs import as_real
from bayeskit.models.discrete.permutations._distributions import nearest_permutation

# Permutation of mixture components in unconstrained space.

_MAX_LISTED = 5040
_SYMMETRY_TOLERANCE = 1e-8


class Labels:
    """Map from ``K`` exchangeable components to the coordinates of a target.

    A permutation of the components permutes coordinates, so its Jacobian determinant is 1.

    Parameters
    ----------
    target : Target
    sites : sequence of str, or str
        Sites whose first dimension is the component, such as :attr:`GaussianMixture.exchangeable`.

    Attributes
    ----------
    coordinates : Tensor
        Coordinates of each component, shape ``(K, c)``.

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
        """``log(K!)``, to be added to a log evidence computed from one of the symmetric modes."""
        return math.lgamma(self.num_components + 1)

    @property
    def listable(self) -> bool:
        """Whether ``K!`` is small enough for :meth:`permutations`."""
        return math.factorial(self.num_components) <= _MAX_LISTED

    def permutations(self) -> Tensor:
        """Return every permutation of the components, shape ``(K!, K)``, the identity first.

        Raises ``SettingsError`` if there are more than 5040 (``K > 7``).
        """
        if not self.listable:
            count = math.factorial(self.num_components)
            raise SettingsError(
                f"{self.num_components} components have {count} permutations, more than the limit of {_MAX_LISTED} for "
                "enumeration; use tempering (sample_smc), which needs no enumeration"
            )
        return torch.tensor(list(itertools.permutations(range(self.num_components))), device=self.coordinates.device)

    def permute(self, u: Tensor, permutation: Tensor) -> Tensor:
        """Give component ``k`` the parameters of component ``permutation[k]``, ``(*batch, d)``.

        ``u``: unconstrained vectors, shape ``(*batch, d)``. ``permutation``: ``(*batch, K)``; the two batch shapes
        broadcast.
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
        tolerance = _SYMMETRY_TOLERANCE if before.dtype == torch.float64 else 1e-3
        for permutation in (turned, swapped):
            change = (self.target.log_density(self.permute(u, permutation)) - before).abs()
            if not bool((change <= tolerance * (1 + before.abs())).all()):
                raise ModelError(
                    f"permuting the components changes the log density by up to {float(change.max()):.3g}, so they are "
                    f"not exchangeable; check the priors of {', '.join(self.sites)}, and name all sites of components"
                )


# Relabelling of draws of a mixture, to undo label switching.

_ALIGNMENTS = 20
_FAR = 25.0
_SUM_TOLERANCE = 1e-3


def relabel(draws: Draws, labels: Labels, responsibilities: Tensor) -> Draws:
    """Permute the components of every draw to a common labelling, by the algorithm of Stephens.

    The algorithm alternates between the permutations and an average matrix of assignment probabilities to minimize the
    sum of Kullback-Leibler divergences of the draws' probabilities from that matrix. Use it for summaries of single
    components; densities, predictions and evidence are invariant. With overlapping components no labelling is correct,
    and relabelled components are more distinct than in the posterior.

    Parameters
    ----------
    draws : Draws
        Draws of a target with exchangeable components.
    labels : Labels
    responsibilities : Tensor or array
        Probability that each observation comes from each component, shape ``(chains, draws, n, K)``, such as
        :meth:`GaussianMixture.responsibilities` of ``draws``. A subset of the observations is sufficient.

    Returns
    -------
    Draws
        Relabelled draws, with the densities of ``draws`` (invariant under permutation).

    Raises
    ------
    ShapeError
        If the shape of ``responsibilities`` does not match the draws.
    DataError
        If ``responsibilities`` are not probabilities that sum to 1 over components.

    References
    ----------
    Stephens, M. (2000). Dealing with label switching in mixture models. Journal of the Royal Statistical Society B 62,
    795-809.

    Examples
    --------
    >>> import torch, warnings, bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, Labels, relabel
    >>> y = torch.tensor([-2.1, -1.9, -1.4, 1.6, 2.0, 2.5], dtype=torch.float64)
    >>> mixture = GaussianMixture(y, 2)
    >>> target = bk.Target.from_pyro(mixture)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # each chain has labels of its own
    ...     draws = bk.sample(target, 4, 300, 100, progress=False)
    >>> relabelled = relabel(draws, Labels(target, mixture.exchangeable), mixture.responsibilities(draws))
    >>> means = relabelled.values()["mean"].mean((0, 1)).sort().values
    >>> bool(means[0] < -1), bool(means[1] > 1)
    (True, True)
    """
    p = as_real("responsibilities", responsibilities).to(draws.unconstrained.device)
    count = labels.num_components
    if p.dim() != 4 or p.shape[:2] != draws.unconstrained.shape[:2] or p.shape[3] != count or not p.shape[2]:
        chains, length = draws.unconstrained.shape[:2]
        raise ShapeError(f"responsibilities have shape {tuple(p.shape)}; give ({chains}, {length}, n, {count})")
    if not bool((p >= 0).all() and ((p.sum(-1) - 1).abs() < _SUM_TOLERANCE).all()):
        raise DataError("responsibilities must be probabilities that add up to one over the components; some do not")
    p = p.flatten(0, 1).clamp(min=torch.finfo(p.dtype).tiny)
    entropy = (p * p.log()).sum(-2).unsqueeze(-2)  # (draws, 1, K)
    chosen = torch.arange(count, device=p.device).expand(len(p), count)
    # Start from the most probable draw: the mean of draws split evenly between labellings is uninformative.
    centre = p[int(draws.log_density.flatten().argmax())]
    for _ in range(_ALIGNMENTS):
        cost = entropy - torch.einsum("snj,nk->skj", p, centre.log())
        best = nearest_permutation(-cost)
        if bool((best == chosen).all()):
            break
        chosen = best
        centre = p.gather(-1, chosen.unsqueeze(1).expand_as(p)).mean(0)
    u = labels.permute(draws.unconstrained.flatten(0, 1), chosen)
    return replace(draws, unconstrained=u.reshape(draws.unconstrained.shape))


def aligned(u: Tensor, labels: Labels, start: Tensor) -> tuple[Tensor, Tensor]:
    """Permute the components of every draw to a common labelling in unconstrained space.

    Each draw is permuted to be nearest to the mean of the aligned draws, in units of their standard deviation. Iterated
    until no permutation changes.

    Parameters
    ----------
    u : Tensor
        Shape ``(n, d)``.
    labels : Labels
    start : Tensor
        Initial centre, shape ``(d,)``.

    Returns
    -------
    u : Tensor
        Shape ``(n, d)``.
    chosen : Tensor
        Permutation of each draw, shape ``(n, K)``.

    Raises
    ------
    ShapeError
        If draws and centre do not fit each other.
    """
    if u.dim() != 2 or start.shape != u.shape[1:]:
        raise ShapeError(
            f"u has the shape {tuple(u.shape)} and start {tuple(start.shape)}; give draws (n, d) and a centre (d,)"
        )
    blocks = u[:, labels.coordinates]  # (n, K, c)
    centre = start[labels.coordinates]  # (K, c)
    flat = blocks.flatten(0, 1)
    scale = (flat.quantile(0.75, 0) - flat.quantile(0.25, 0)).clamp(min=1e-8)
    chosen = torch.full((len(u), labels.num_components), -1, device=u.device)
    for _ in range(_ALIGNMENTS):
        # Cost of assigning component j of a draw to component k of the centre, bounded against outlying coordinates.
        cost = ((blocks.unsqueeze(1) - centre.unsqueeze(1)) / scale).square().clamp(max=_FAR).sum(-1)
        nearest = nearest_permutation(-cost)
        if bool((nearest == chosen).all()):
            break
        chosen = nearest
        moved = blocks.gather(1, chosen.unsqueeze(-1).expand_as(blocks))
        centre = moved.mean(0)
        scale = (moved - centre).square().mean((0, 1)).sqrt().clamp(min=1e-8)
    return labels.permute(u, chosen), chosen
