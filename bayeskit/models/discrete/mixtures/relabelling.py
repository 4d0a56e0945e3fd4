"""Undo label switching in draws of a mixture."""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bayeskit.draws import Draws
from bayeskit.errors import DataError, ShapeError
from bayeskit.models.discrete.inputs import as_real
from bayeskit.models.discrete.mixtures.labels import Labels

ALIGNMENTS = 20
FAR = 25.0
SUM_TOLERANCE = 1e-3


def relabel(draws: Draws, labels: Labels, responsibilities: Tensor) -> Draws:
    """Permute the components of every draw so that they mean the same in all, after Stephens.

    The permutations and one matrix of assignment probabilities are chosen in turn, so that the Kullback-Leibler
    divergences of the draws' probabilities from that matrix add up to as little as can be. For pictures and tables of
    single components; densities, predictions and evidence do not need it. Where components overlap there is no right
    labelling, and what comes out has components that are more distinct than the posterior.

    Parameters
    ----------
    draws : Draws
        Of a target with exchangeable components.
    labels : Labels
    responsibilities : Tensor or array
        Probability that each observation comes from each component, shape ``(chains, draws, n, K)``, such as
        :meth:`GaussianMixture.responsibilities` of ``draws``. Where observations are many, those of some are enough.

    Returns
    -------
    Draws
        The densities are those of ``draws``, for no permutation changes them.

    Raises
    ------
    ShapeError
        If ``responsibilities`` do not fit the draws.
    DataError
        If they are no probabilities that add up to one over the components.

    References
    ----------
    Stephens, M. (2000). Dealing with label switching in mixture models. Journal of the Royal Statistical Society B 62,
    795-809.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, Labels, relabel
    >>> y = torch.tensor([-2.1, -1.9, -1.4, 1.6, 2.0, 2.5], dtype=torch.float64)
    >>> mixture = GaussianMixture(y, 2)
    >>> target = bk.Target.from_pyro(mixture)
    >>> draws = bk.sample(target, 4, 50, 50, progress=False)
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
    if not bool((p >= 0).all() and ((p.sum(-1) - 1).abs() < SUM_TOLERANCE).all()):
        raise DataError("responsibilities must be probabilities that add up to one over the components; some do not")
    p = p.flatten(0, 1).clamp(min=torch.finfo(p.dtype).tiny)
    entropy = (p * p.log()).sum(-2).unsqueeze(-2)  # (draws, 1, K)
    chosen = torch.arange(count, device=p.device).expand(len(p), count)
    # The most probable draw is the pivot, for draws split evenly between labellings would average to nothing.
    centre = p[int(draws.log_density.flatten().argmax())]
    for _ in range(ALIGNMENTS):
        cost = entropy - torch.einsum("snj,nk->skj", p, centre.log())
        best = _assign(cost)
        if bool((best == chosen).all()):
            break
        chosen = best
        centre = p.gather(-1, chosen.unsqueeze(1).expand_as(p)).mean(0)
    u = labels.permute(draws.unconstrained.flatten(0, 1), chosen)
    return replace(draws, unconstrained=u.reshape(draws.unconstrained.shape))


def _assign(cost: Tensor) -> Tensor:
    """Return for each draw which component to put in each place, ``(draws, K, K) -> (draws, K)``."""
    rows = [torch.from_numpy(linear_sum_assignment(one)[1]) for one in cost.cpu().numpy()]
    return torch.stack(rows).to(cost.device)


def aligned(u: Tensor, labels: Labels, start: Tensor) -> tuple[Tensor, Tensor]:
    """Permute the components of every draw towards one labelling in unconstrained space.

    A draw takes the permutation nearest to the mean of the draws so aligned, in units of their spread, until no draw
    changes.

    Parameters
    ----------
    u : Tensor
        Shape ``(n, d)``.
    labels : Labels
    start : Tensor
        A draw to start from, shape ``(d,)``.

    Returns
    -------
    u : Tensor
        Shape ``(n, d)``.
    chosen : Tensor
        The permutation that each draw took, shape ``(n, K)``.
    """
    blocks = u[:, labels.coordinates]  # (n, K, c)
    centre = start[labels.coordinates]  # (K, c)
    flat = blocks.flatten(0, 1)
    scale = (flat.quantile(0.75, 0) - flat.quantile(0.25, 0)).clamp(min=1e-8)
    chosen = torch.full((len(u), labels.num_components), -1, device=u.device)
    for _ in range(ALIGNMENTS):
        # Cost of putting component j of a draw where component k of the centre is; one wild coordinate is no reason.
        cost = ((blocks.unsqueeze(1) - centre.unsqueeze(1)) / scale).square().clamp(max=FAR).sum(-1)
        nearest = _assign(cost)
        if bool((nearest == chosen).all()):
            break
        chosen = nearest
        moved = blocks.gather(1, chosen.unsqueeze(-1).expand_as(blocks))
        centre = moved.mean(0)
        scale = (moved - centre).square().mean((0, 1)).sqrt().clamp(min=1e-8)
    return labels.permute(u, chosen), chosen
