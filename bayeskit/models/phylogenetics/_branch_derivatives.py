"""First and second derivatives of the likelihood of one tree by its branch lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.models.phylogenetics._site_rates import Categories, mix
from bayeskit.models.phylogenetics._substitution import SubstitutionModel
from bayeskit.models.phylogenetics._trees import Tree

# Two passes over all site patterns (X. Ji et al. 2020, Mol. Biol. Evol. 37, 3047-3060): the second derivative of a
# logarithm needs the square of each pattern's first derivative, which shared sub-patterns do not keep. The product of
# an edge's messages from below and from above is the likelihood; with the rate matrix between them it is the derivative
# by the length of that edge. Only ratios to the likelihood are needed, so all partial likelihoods are scaled freely.


class BranchDerivatives(NamedTuple):
    """Log-likelihood and its derivatives with respect to each branch length.

    Attributes
    ----------
    value : Tensor
        Log-likelihood in nats, shape `(*batch)`.
    first : Tensor
        First derivatives, shape `(*batch, edges)`.
    second : Tensor
        Second derivatives, the diagonal of the Hessian matrix, shape `(*batch, edges)`.
    """

    value: Tensor
    first: Tensor
    second: Tensor


class Sites(NamedTuple):
    """The data, pattern by pattern."""

    tips: Tensor  # allowed states, entries 0 and 1, (taxa, n, patterns), taxa in the order of the tree
    weights: Tensor  # number of sites of each pattern, (patterns,)


#: About how many numbers all messages of a chunk may take.
_CHUNK_NUMBERS = 2**24


def branch_derivatives(
    tree: Tree, sites: Sites, lengths: Tensor, substitution: SubstitutionModel, categories: Categories
) -> BranchDerivatives:
    """Return a log-likelihood, `(*batch)`, and its first and second derivatives by branch lengths, `(*batch, edges)`.

    `lengths` `(categories, *batch, edges)` include the rate of each category; the models' batches broadcast.
    """
    batch = lengths.shape[1:-1]
    size = batch.numel()
    n = substitution.num_states
    matrices = substitution.transition_matrices(lengths).reshape(len(lengths), size, tree.num_edges, n, n)
    rate_matrix = substitution.rate_matrix(lengths).expand(*batch, n, n).reshape(size, n, n)
    frequencies = substitution.frequencies(lengths).expand(*batch, n).reshape(size, n)
    rates, weights, invariant = categories.expand(batch)
    rates, weights = rates.reshape(size, len(lengths)), weights.reshape(size, len(lengths))
    invariant = None if invariant is None else invariant.reshape(size)
    step = max(1, _CHUNK_NUMBERS // max(1, matrices[:, :1, :, 0].numel() * len(sites.weights)))
    parts = []
    for start in range(0, max(size, 1), step):
        part = slice(start, start + step)
        chunk = Categories(rates[part], weights[part], None if invariant is None else invariant[part])
        parts.append(_derivatives(tree, sites, matrices[:, part], rate_matrix[part], frequencies[part], chunk))
    value, first, second = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return BranchDerivatives(
        value.reshape(batch), first.reshape(*batch, tree.num_edges), second.reshape(*batch, tree.num_edges)
    )


def _derivatives(
    tree: Tree, sites: Sites, matrices: Tensor, rate_matrix: Tensor, frequencies: Tensor, categories: Categories
) -> BranchDerivatives:
    """Compute the derivatives of one chunk, from transition matrices `(categories, chunk, edges, n, n)`."""
    messages, logs = _derivatives_upward(tree, sites, matrices, frequencies)
    mixed = mix(logs.movedim(-1, 0), categories, frequencies, sites.tips.amin(0).T).movedim(0, -1)
    possible = mixed != -torch.inf
    # The probability of each category, given the site.
    rates, weights = (vector.movedim(-1, 0)[..., None] for vector in categories[:2])
    posterior = weights * torch.exp(logs - torch.where(possible, mixed, 0.0))
    weight = torch.where(possible, sites.weights, 0.0)
    first: list[Tensor] = [torch.empty(0)] * tree.num_edges
    second = list(first)
    for edge, above in _derivatives_downward(tree, matrices, frequencies, messages):
        message = messages[edge]
        changed = rate_matrix @ message
        likelihood = (above * message).sum(-2)
        inverse = posterior * rates / torch.where(likelihood > 0, likelihood, 1.0)
        slope = (inverse * (above * changed).sum(-2)).sum(0)
        bend = (inverse * rates * ((rate_matrix.mT @ above) * changed).sum(-2)).sum(0)
        first[edge] = (weight * slope).sum(-1)
        second[edge] = (weight * (bend - slope.square())).sum(-1)
    value = (sites.weights * mixed).sum(-1)
    return BranchDerivatives(value, torch.stack(first, -1), torch.stack(second, -1))


def _derivatives_upward(tree: Tree, sites: Sites, matrices: Tensor, frequencies: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the message of each edge, `(categories, chunk, n, patterns)`, and the log-likelihoods of the patterns."""
    logs = torch.zeros_like(matrices[..., 0, 0, 0, None])
    messages: list[Tensor] = [torch.empty(0)] * tree.num_edges
    partials = {tip: sites.tips[tip] for tip in range(tree.num_taxa)}
    for node in range(tree.num_edges + 1):
        if node >= tree.num_taxa:
            below = tree.children[node - tree.num_taxa]
            product = messages[below[0]]
            for child in below[1:]:
                product = product * messages[child]
            partials[node], scaler = _scaled(product)
            logs = logs + scaler.log()
        if node < tree.num_edges:
            messages[node] = matrices[..., node, :, :] @ partials.pop(node)
    likelihood = (frequencies[..., None] * partials[tree.root]).sum(-2)
    return messages, logs + likelihood.log()


def _derivatives_downward(
    tree: Tree, matrices: Tensor, frequencies: Tensor, messages: list[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each edge with the probability of all data not below it, `(categories, chunk, n, patterns)`, scaled."""
    outside = {tree.root: frequencies[..., None]}
    for node in range(tree.root, tree.num_taxa - 1, -1):
        below, rest = tree.children[node - tree.num_taxa], outside.pop(node)
        for child in below:
            above = rest
            for sibling in below:
                if sibling != child:
                    above = above * messages[sibling]
            above, _ = _scaled(above)
            if child >= tree.num_taxa:
                outside[child] = matrices[..., child, :, :].mT @ above
            yield child, above


def _scaled(partial: Tensor) -> tuple[Tensor, Tensor]:
    """Divide partial likelihoods `(..., n, patterns)` by their largest entry, and return it too."""
    largest = partial.amax(-2)
    largest = torch.where(largest > 0, largest, 1.0)
    return partial / largest[..., None, :], largest
