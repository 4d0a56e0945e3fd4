"""Trees from pairwise distances by neighbour joining."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import ShapeError, TreeError
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._newick import quote
from bayeskit.models.phylogenetics._trees import Tree, check_taxa


def jukes_cantor_distances(alignment: Alignment) -> Tensor:
    r"""Compute the distances of all pairs of taxa under the model of Jukes and Cantor.

    With :math:`k` states and a share :math:`p` of sites that differ, the distance is
    :math:`-\frac{k-1}{k} \log\left(1 - \frac{k}{k-1} p\right)`. Sites count where both states are known.

    Parameters
    ----------
    alignment : Alignment
        Of any type of data.

    Returns
    -------
    Tensor
        Expected substitutions per site, shape `(taxa, taxa)`, float64. Infinite where :math:`p \ge \frac{k-1}{k}`, and
        where no site is known of both taxa.

    References
    ----------
    Jukes, T. H., Cantor, C. R. (1969). Evolution of protein molecules. In: Munro, H. N. (ed.), Mammalian protein
    metabolism, Academic Press, New York, 21-132.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "AAAAACCCCC", "B": "AAAAACCCCG", "C": "AAAANCCGGG"})
    >>> jukes_cantor_distances(alignment)[0]
    tensor([0.0000, 0.1073, 0.4408], dtype=torch.float64)
    """
    states, masks = alignment.data_type.num_states, alignment.patterns.long()
    weights = alignment.weights.to(torch.float64)
    same = known = torch.zeros(len(masks), 1, dtype=torch.float64)
    for state in range(states):
        here = (masks == 1 << state).to(torch.float64)
        same, known = same + here * weights @ here.T, known + here
    share = 1 - same / (known * weights @ known.T)
    scale = (states - 1) / states
    related = (share < scale).fill_diagonal_(True)
    distances = -scale * torch.log1p(-torch.where(related, share, 0.0) / scale)
    return torch.where(related, distances, torch.inf).fill_diagonal_(0.0)


def neighbour_joining(distances: Tensor, taxa: Sequence[str]) -> Tree:
    """Build an unrooted tree from distances, joining two neighbours at a time.

    It is the tree itself if the distances are sums of branch lengths along its paths.

    Parameters
    ----------
    distances : Tensor
        Symmetric, finite and at least 0, shape `(taxa, taxa)`.
    taxa : sequence of str
        Names; at least three.

    Returns
    -------
    Tree
        With branch lengths; negative ones are set to zero.

    Raises
    ------
    ShapeError
        If `distances` has another shape.
    TreeError
        If there are fewer than three taxa, a name occurs twice, or a distance lies outside the domain.

    References
    ----------
    Saitou, N., Nei, M. (1987). The neighbor-joining method: a new method for reconstructing phylogenetic trees.
    Molecular Biology and Evolution 4, 406-425.

    Studier, J. A., Keppler, K. J. (1988). A note on the neighbor-joining algorithm of Saitou and Nei. Molecular Biology
    and Evolution 5, 729-731.

    Examples
    --------
    >>> distances = torch.tensor([[0, 3, 7, 8], [3, 0, 8, 9], [7, 8, 0, 9], [8, 9, 9, 0]])
    >>> neighbour_joining(distances, "ABCD").to_newick()
    '((A:1.0,B:2.0):2.0,C:4.0,D:5.0);'
    """
    check_taxa(list(taxa), "taxa")
    gaps = torch.as_tensor(distances, dtype=torch.float64, device="cpu").numpy().copy()
    if gaps.shape != (len(taxa), len(taxa)):
        raise ShapeError(
            f"distances: shape {gaps.shape} does not fit {len(taxa)} taxa. Remedy: give one for each pair."
        )
    wrong = np.argwhere(~(np.isfinite(gaps) & (gaps >= 0) & np.isclose(gaps, gaps.T)))
    if len(wrong):
        one, other = wrong[0].tolist()
        raise TreeError(
            f"distances: {gaps[one, other]} from {taxa[one]!r} to {taxa[other]!r} is negative or not finite, or "
            "differs from that of the way back. Remedy: replace infinite distances by a large one, or leave taxa out."
        )
    texts = [quote(taxon) for taxon in taxa]
    while len(texts) > 3:
        sums = gaps.sum(0)
        criterion = (len(texts) - 2) * gaps - sums - sums[:, None]
        np.fill_diagonal(criterion, np.inf)
        one, other = sorted(int(place) for place in np.unravel_index(criterion.argmin(), gaps.shape))
        length = (gaps[one, other] + (sums[one] - sums[other]) / (len(texts) - 2)) / 2
        joined = _written([texts[one], texts[other]], [length, gaps[one, other] - length])
        gaps[one] = gaps[:, one] = (gaps[one] + gaps[other] - gaps[one, other]) / 2
        gaps[one, one] = 0.0
        gaps = np.delete(np.delete(gaps, other, 0), other, 1)
        texts[one] = joined
        del texts[other]
    half = gaps.sum() / 4  # of the distances of three pairs
    return Tree.from_newick(_written(texts, [half - gaps[1, 2], half - gaps[0, 2], half - gaps[0, 1]]) + ";")


def joined_neighbours(subsets: Sequence[Alignment]) -> Tree:
    """Return the tree of neighbour joining by the mean distances of all subsets."""
    distances = torch.stack([jukes_cantor_distances(subset) for subset in subsets])
    sites = torch.tensor([float(subset.num_sites) for subset in subsets])[:, None, None] * distances.isfinite()
    mean = distances.nan_to_num(posinf=0.0).mul(sites).sum(0) / sites.sum(0)
    largest = mean[mean.isfinite()].max()  # in place of infinite ones
    return neighbour_joining(torch.where(mean.isfinite(), mean, largest), subsets[0].taxa)


def _written(texts: Sequence[str], lengths: Sequence[float]) -> str:
    """Return subtrees that meet in a node as Newick text."""
    return f"({','.join(f'{text}:{max(float(length), 0.0)!r}' for text, length in zip(texts, lengths, strict=True))})"
