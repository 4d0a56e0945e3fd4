"""The likelihood of an alignment on a fixed topology as a Pyro model."""

from __future__ import annotations

import pyro
import torch
from pyro.distributions import Exponential, TorchDistribution
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics.alignment import Alignment
from bayeskit.models.phylogenetics.pruning import Plan, log_likelihood, pattern_log_likelihoods
from bayeskit.models.phylogenetics.schedule import build_schedule
from bayeskit.models.phylogenetics.substitution import JC69, SubstitutionModel
from bayeskit.models.phylogenetics.transport import MatrixTransport, UniformTransport
from bayeskit.models.phylogenetics.tree import Tree, check_same_taxa


class TreeModel:
    """Pyro model of an alignment that evolved along a fixed unrooted topology.

    Calling it samples one site, `"branch_lengths"` of shape `(edges,)`, with independent priors,
    and adds the log-likelihood of the alignment as the factor `"alignment"`. Sites evolve
    independently at one rate; gaps and unknown bases are missing data.

    Parameters
    ----------
    alignment : Alignment
        The sequences.
    tree : Tree
        The topology, over the same taxa in any order. Its branch lengths are not used.
    substitution : SubstitutionModel, optional
        How bases change; Jukes-Cantor by default.
    branch_length_prior : pyro.distributions.TorchDistribution, optional
        Prior of each branch length: a distribution over one positive number. Exponential with
        rate 10 (mean 0.1 substitutions per site) by default.
    dtype : torch.dtype, optional
        Type of all computing, float64 by default.
    device : torch.device or str, optional
        Where to compute.

    Raises
    ------
    TreeError
        If tree and alignment have different taxa.
    SettingsError
        If the prior is not over single numbers, or `dtype` is not a floating-point type.

    References
    ----------
    J. Felsenstein (1981), Evolutionary trees from DNA sequences: a maximum likelihood approach,
    Journal of Molecular Evolution 17, 368-376.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "A", "B": "A", "C": "C", "D": "C"})
    >>> model = TreeModel(alignment, Tree.from_newick("((A,B),C,D);"))
    >>> model.log_likelihood(torch.full((5,), 0.1, dtype=torch.float64)).exp()
    tensor(0.0057, dtype=torch.float64)
    """

    def __init__(
        self,
        alignment: Alignment,
        tree: Tree,
        substitution: SubstitutionModel | None = None,
        branch_length_prior: TorchDistribution | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if not dtype.is_floating_point:
            raise SettingsError(f"dtype={dtype} is not a floating-point type. Remedy: use torch.float64 or float32.")
        check_same_taxa(alignment.taxa, tree.taxa, "the alignment", "the tree")
        self.alignment = alignment
        self.tree = tree
        self.substitution = JC69() if substitution is None else substitution
        self.dtype = dtype
        self.device = torch.device(device)
        if branch_length_prior is None:
            branch_length_prior = Exponential(torch.tensor(10.0, dtype=dtype, device=self.device))
        if branch_length_prior.batch_shape or branch_length_prior.event_shape:
            shapes = tuple(branch_length_prior.batch_shape), tuple(branch_length_prior.event_shape)
            raise SettingsError(
                "branch_length_prior must be over one number, but has batch_shape and event_shape "
                f"{shapes}. Remedy: give one such as Exponential(10.0); it is repeated for every edge."
            )
        self.branch_length_prior = branch_length_prior
        row = {taxon: position for position, taxon in enumerate(alignment.taxa)}
        uniform = self.substitution.is_uniform
        kind = UniformTransport if uniform else MatrixTransport
        schedule = build_schedule(
            tree,
            alignment.patterns.numpy()[[row[taxon] for taxon in tree.taxa]],
            alignment.weights.numpy(),
            kind.num_coefficients,
            uniform,
            dtype,
            self.device,
        )
        self._plan = Plan(schedule, kind(schedule))
        self._uniform = uniform
        self._frequencies = self.substitution.frequencies(torch.empty(0, dtype=dtype, device=self.device))

    def __call__(self) -> Tensor:
        """Sample branch lengths, add the log-likelihood, and return the branch lengths."""
        prior = self.branch_length_prior.expand([self.tree.num_edges]).to_event(1)
        branch_lengths = pyro.sample("branch_lengths", prior)
        pyro.factor("alignment", self.log_likelihood(branch_lengths))
        return branch_lengths

    def log_likelihood(self, branch_lengths: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, in the order of `tree.edge_names`, shape
            `(*batch, edges)`, at least 0. Compiled code is fastest on batches of 32 to 128
            vectors, a multiple of 16.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*batch)`. Differentiable once.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of edges.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"))
        >>> model.log_likelihood(torch.full((2, 3), 0.1, dtype=torch.float64)).shape
        torch.Size([2])
        """
        return log_likelihood(*self._inputs(branch_lengths), self._plan)

    def pattern_log_likelihoods(self, branch_lengths: Tensor) -> Tensor:
        """Compute the log-likelihood of each site pattern.

        Index the last dimension with `alignment.site_patterns` to get one value a site. This is
        slower than `log_likelihood`.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*batch, patterns)`, in the order of
            `alignment.patterns`.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of edges.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"))
        >>> model.pattern_log_likelihoods(torch.full((2, 3), 0.1, dtype=torch.float64)).shape
        torch.Size([2, 4])
        """
        return pattern_log_likelihoods(*self._inputs(branch_lengths), self._plan)

    def _inputs(self, branch_lengths: Tensor) -> tuple[Tensor, Tensor]:
        edges = self.tree.num_edges
        if branch_lengths.dim() == 0 or branch_lengths.shape[-1] != edges:
            raise ShapeError(
                f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit the tree. Remedy: give "
                f"shape (*batch, {edges}), one length for each entry of tree.edge_names."
            )
        lengths = branch_lengths.to(dtype=self.dtype, device=self.device)
        inputs = lengths if self._uniform else self.substitution.transition_matrices(lengths)
        return inputs, self._frequencies.expand(*lengths.shape[:-1], 4)
