"""Posterior probabilities of the states of ancestors at single sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import AlignmentError, SettingsError, ShapeError
from bayeskit.models.phylogenetics._site_rates import mix, one_rate
from bayeskit.models.phylogenetics._tree_model import TreeModel

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

#: About how many numbers the partial likelihoods and matrices of a chunk of draws may take.
_CHUNK_NUMBERS = 2**24


def ancestral_states(
    model: TreeModel, values: Any, sites: Sequence[int] | NDArray[np.integer[Any]] | None = None
) -> pd.DataFrame:
    """Compute the marginal posterior probability of each state at each inner node of the tree.

    Each node is considered alone, given the data of all taxa: the states of the other inner nodes and the rate of the
    site are summed out. Probabilities are averaged over draws, which gives those under the posterior.

    Parameters
    ----------
    model : TreeModel
        Its alignment may be of any type of data.
    values : Tensor, mapping of str to array_like, or Draws
        Branch lengths, shape `(*draws, edges)`, in the order of `model.tree.edge_names`. For a model with parameters
        `"branch_lengths"` and each of `model.priors`, shape `(*draws, *event_shape)`, such as the draws of `sample`.
    sites : sequence of int, optional
        Indices of the sites, counted from 0; by default all.

    Returns
    -------
    DataFrame
        One row for each node, site and state: `node` (the taxa below it in the order of the tree, joined by `|`; all
        taxa for the node that serves as root), `site`, `state` (a base, amino acid, codon or symbol) and `probability`.

    Raises
    ------
    SettingsError
        If `model` is not a `TreeModel`, a parameter is missing, or a branch length is negative or NaN.
    ShapeError
        If a shape does not fit.
    AlignmentError
        If a site is outside the alignment, or its likelihood is zero.

    References
    ----------
    Z. Yang, S. Kumar and M. Nei (1995), A new method of inference of ancestral nucleotide and amino acid sequences,
    Genetics 141, 1641-1650.

    J. P. Huelsenbeck and J. P. Bollback (2001), Empirical and hierarchical Bayesian estimation of ancestral states,
    Systematic Biology 50, 351-366.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Alignment, Tree
    >>> alignment = Alignment.from_sequences({"A": "AC", "B": "AC", "C": "CC", "D": "CC"})
    >>> model = TreeModel(alignment, Tree.from_newick("((A,B),C,D);"))
    >>> table = ancestral_states(model, torch.full((5,), 0.1, dtype=torch.float64), sites=[0])
    >>> table[table["state"].isin(["A", "C"])].round(4)
          node  site state  probability
    0      A|B     0     A       0.9656
    1      A|B     0     C       0.0321
    4  A|B|C|D     0     A       0.0321
    5  A|B|C|D     0     C       0.9656
    """
    import pandas as pd

    if not isinstance(model, TreeModel):
        raise SettingsError(
            f"model: {type(model).__name__} is not a TreeModel. Remedy: give TreeModel(alignment, tree)."
        )
    alignment, tree = model.alignment, model.tree
    chosen = np.arange(alignment.num_sites) if sites is None else np.asarray(sites)
    alignment.select_sites(chosen)  # raises for sites that are not there
    patterns, place = np.unique(alignment.site_patterns.numpy()[chosen], return_inverse=True)
    row = {taxon: position for position, taxon in enumerate(alignment.taxa)}
    masks = alignment.patterns.long()[[row[taxon] for taxon in tree.taxa]][:, patterns]
    states = alignment.data_type.states
    allowed = ((masks[:, None] >> torch.arange(len(states))[:, None]) & 1).to(model.device, model.dtype)
    lengths, parameters = _flattened(model, values)
    total = torch.zeros(len(tree.children), *allowed.shape[1:], dtype=model.dtype, device=model.device)
    numbers = 8 * tree.num_edges * len(states) * (len(patterns) + len(states))  # with up to 8 rates
    step = max(1, _CHUNK_NUMBERS // numbers)
    for start in range(0, len(lengths), step):
        part = slice(start, start + step)
        logs, added = _summed(model, allowed, lengths[part], {name: value[part] for name, value in parameters.items()})
        if bool(logs.isnan().any()):
            raise SettingsError("values: a branch length is negative or NaN. Remedy: give lengths of at least 0.")
        if bool((logs == -torch.inf).any()):
            pattern = int((logs == -torch.inf).any(0).nonzero()[0])
            raise AlignmentError(
                f"site {chosen[(place == pattern).argmax()]}: its likelihood is zero, so its ancestral states have no "
                "probabilities. Remedy: give branch lengths above 0."
            )
        total += added
    probabilities = (total / len(lengths)).movedim(-1, 1)[:, place.ravel()].cpu()
    index = pd.MultiIndex.from_product([_node_names(model), chosen, states], names=["node", "site", "state"])
    return pd.DataFrame({"probability": probabilities.flatten().numpy()}, index).reset_index()


def _node_names(model: TreeModel) -> list[str]:
    """Return the taxa below each inner node."""
    below = [[taxon] for taxon in model.tree.taxa]
    for children in model.tree.children:
        below.append([taxon for child in children for taxon in below[child]])
    return ["|".join(taxa) for taxa in below[model.tree.num_taxa :]]


def _flattened(model: TreeModel, values: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return branch lengths `(draws, edges)` and parameters `(draws, *event_shape)`."""
    shapes = {"branch_lengths": torch.Size([model.tree.num_edges])}
    shapes |= {name: prior.event_shape for name, prior in model.priors.items()}
    given = {"branch_lengths": values} if isinstance(values, Tensor | np.ndarray) else values
    found: dict[str, Tensor] = {}
    for name, event in shapes.items():
        try:
            value = torch.as_tensor(given[name], dtype=model.dtype, device=model.device).detach()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SettingsError(
                f"values: there are no numbers for {name!r}. Remedy: give values of {', '.join(shapes)}, by name."
            ) from error
        if value.shape[value.dim() - len(event) :] != event:
            raise ShapeError(
                f"values: {name!r} has shape {tuple(value.shape)}. Remedy: give shape (*draws, "
                f"{', '.join(map(str, event))})."
            )
        found[name] = value
    batches = [value.shape[: value.dim() - len(shapes[name])] for name, value in found.items()]
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError as error:
        raise ShapeError(
            f"values: the numbers of draws differ: {', '.join(str(tuple(one)) for one in batches)}. Remedy: give all "
            "values the same draws."
        ) from error
    if not batch.numel():
        raise ShapeError("values: there is no draw. Remedy: give at least one.")
    flat = {name: value.expand(batch + shapes[name]).reshape(-1, *shapes[name]) for name, value in found.items()}
    return flat.pop("branch_lengths"), flat


def _summed(model: TreeModel, allowed: Tensor, lengths: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods `(draws, patterns)`, and node probabilities summed over draws `(inner, n, patterns)`.

    `allowed` `(taxa, n, patterns)` is one for the states that the tips may have, else zero.
    """
    # With a weight for each state of each inner node, the likelihood is a sum over all their states of terms that are
    # proportional to the weights. The derivative of its logarithm at weights of one is the probability of the state.
    tree = model.tree
    weights = allowed.new_ones(len(tree.children), *allowed.shape[1:]).requires_grad_()
    with torch.no_grad():
        state = model._state(lengths, parameters)
        matrices = model._inputs(state)
        if model.substitution.is_uniform:
            matrices = state.substitution.transition_matrices(matrices)
        categories = one_rate(allowed) if state.categories is None else state.categories
        matrices = matrices[None] if state.categories is None else matrices
        matrices = matrices[..., model._edges.argsort(), :, :]  # in the order of the tree
    with torch.enable_grad():
        logs, messages = allowed.new_zeros(()), list[Tensor]()
        for node in range(tree.num_edges + 1):
            if node < tree.num_taxa:
                partial = allowed[node]
            else:
                partial = weights[node - tree.num_taxa]
                for child in tree.children[node - tree.num_taxa]:
                    partial = partial * messages[child]
                largest = partial.detach().amax(-2)
                largest = torch.where(largest > 0, largest, 1.0)
                partial, logs = partial / largest[..., None, :], logs + largest.log()
            if node < tree.num_edges:
                messages.append(matrices[..., node, :, :] @ partial)
        likelihood = (state.frequencies[..., None] * partial).sum(-2)
        possible = likelihood > 0
        logs = torch.where(possible, torch.where(possible, likelihood, 1.0).log() + logs, -torch.inf)
        logs = torch.where(likelihood.isnan(), torch.nan, logs)
        # An invariant site has one state at all nodes.
        constant = (allowed.amin(0) * weights.prod(0)).T
        mixed = mix(logs.movedim(-1, 0), categories.expand(lengths.shape[:1]), state.frequencies, constant)
        (added,) = torch.autograd.grad(mixed.sum(), weights)
    return mixed.detach().movedim(0, -1), added
