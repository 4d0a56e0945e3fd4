"""Likelihood of an alignment on a fixed topology as a Pyro model."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyro
import torch
from pyro.distributions import Exponential, TorchDistribution
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._branch_derivatives import BranchDerivatives, Sites, branch_derivatives
from bayeskit.models.phylogenetics._branch_length_priors import check_branch_length_prior, in_double_precision
from bayeskit.models.phylogenetics._mixture_models import (
    MixtureModel,
    check_mixture,
    classes_at_rates,
    pair_matrices,
)
from bayeskit.models.phylogenetics._pruning._evaluation import Passes, log_likelihood
from bayeskit.models.phylogenetics._pruning._native import CompiledPasses, can_run
from bayeskit.models.phylogenetics._pruning._passes import TensorPasses
from bayeskit.models.phylogenetics._pruning._plan import CODE_BASE, SubPatterns, make_plan
from bayeskit.models.phylogenetics._site_rates import Categories, SiteRates, mix, one_rate
from bayeskit.models.phylogenetics._substitution import JC69, SubstitutionModel, VariableSites, check_data_type
from bayeskit.models.phylogenetics._summaries import plot_tree
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import Tree, check_same_taxa, edges_of_trees
from bayeskit.models.phylogenetics._variable_sites import check_variable_sites

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class TreeModel:
    """Pyro model of an alignment on a fixed unrooted topology.

    The model samples `"branch_lengths"`, shape `(edges,)`, and each parameter of the substitution model and of the
    site rates without a fixed value (such as `"kappa"` or `"shape"`). The factor `"alignment"` adds the
    log-likelihood. Sites evolve independently; gaps and unknown bases are missing data.

    Parameters
    ----------
    alignment : Alignment
    tree : Tree
        The topology, over the same taxa in any order; its branch lengths are not used. **All branch lengths of this
        class are in the order of its edges**, `tree.edge_names`. `TreeSample.branch_lengths` and `ForestLikelihood`
        use the order of `Topologies`: convert with `sample.sampled_tree(i).branch_lengths` or
        `topologies.tree_edges(i)`.
    substitution : SubstitutionModel, default JC69()
    branch_length_prior : pyro.distributions.TorchDistribution, optional
        Prior of each branch length, over one positive number; or joint prior, over vectors `(edges,)`, such as
        `GammaDirichlet.for_tree(tree)`. By default exponential with rate 10 (mean 0.1 substitutions per site).
    site_rates : SiteRates, optional
        Distribution of the rate over sites; by default all sites have rate one.
    dtype : torch.dtype, default torch.float64
    device : torch.device or str, default "cpu"

    Attributes
    ----------
    priors : dict of str to TorchDistribution
        Priors of the sampled parameters other than branch lengths.

    Raises
    ------
    TreeError
        If tree and alignment have different taxa.
    SettingsError
        If an argument has the wrong type, the prior has the wrong event shape or allows negative numbers, `dtype`
        is not a floating-point type, or the substitution model is for another type of data.
    AlignmentError
        If the substitution model is one of `VariableSites`, and a site may be constant.

    References
    ----------
    J. Felsenstein (1981), Evolutionary trees from DNA sequences: a maximum likelihood approach,
    Journal of Molecular Evolution 17, 368-376.

    Z. Yang (1994), Maximum likelihood phylogenetic estimation from DNA sequences with variable rates over sites:
    approximate methods, Journal of Molecular Evolution 39, 306-314.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "A", "B": "A", "C": "C", "D": "C"})
    >>> model = TreeModel(alignment, Tree.from_newick("((A,B),C,D);"))
    >>> model.log_likelihood(torch.full((5,), 0.1, dtype=torch.float64)).exp()
    tensor(0.0057, dtype=torch.float64)

    With parameters to sample:

    >>> from bayeskit.models.phylogenetics._site_rates import GammaRates
    >>> from bayeskit.models.phylogenetics._substitution import HKY85
    >>> model = TreeModel(alignment, model.tree, HKY85(kappa=2.0), site_rates=GammaRates())
    >>> sorted(model.priors)
    ['base_frequencies', 'shape']
    """

    #: Names of factors that are normalised log probabilities of data.
    normalised_factors = frozenset({"alignment"})

    def __init__(
        self,
        alignment: Alignment,
        tree: Tree,
        substitution: SubstitutionModel | None = None,
        branch_length_prior: TorchDistribution | None = None,
        *,
        site_rates: SiteRates | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SettingsError(f"dtype={dtype} is not a floating-point type. Remedy: use torch.float64 or float32.")
        _check_arguments(alignment, tree, substitution, branch_length_prior, site_rates)
        check_same_taxa(alignment.taxa, tree.taxa, "the alignment", "the tree")
        self.alignment = alignment
        self.tree = tree
        self.substitution = JC69() if substitution is None else substitution
        check_data_type(alignment, self.substitution)
        check_mixture(self.substitution)
        check_variable_sites(alignment, self.substitution, site_rates)
        self.site_rates = site_rates
        self.dtype = dtype
        self.device = torch.device(device)
        self._like = torch.empty(0, dtype=dtype, device=self.device)
        if branch_length_prior is None:
            branch_length_prior = Exponential(self._like.new_tensor(10.0))
        check_branch_length_prior(branch_length_prior, tree.num_edges, self.device)
        # Some distributions round the values they are given to the precision of their own parameters.
        double = dtype == torch.float64
        self.branch_length_prior: TorchDistribution = (
            in_double_precision(branch_length_prior) if double else branch_length_prior
        )
        self.priors = self.substitution.priors(self._like)
        if site_rates is not None:
            self.priors |= site_rates.priors(self._like)
        row = {taxon: position for position, taxon in enumerate(alignment.taxa)}
        patterns = alignment.patterns[[row[taxon] for taxon in tree.taxa]]
        topology, order = Topologies.from_edges(*edges_of_trees([tree]), rooted=False)
        if isinstance(self.substitution, MixtureModel):
            self.substitution = self.substitution.on_tree(tree, order[0].tolist())
        weights = alignment.weights.numpy()
        uniform, num_states = self.substitution.is_uniform, self.substitution.num_states
        sub_patterns = SubPatterns(tree.taxa, patterns.numpy(), weights, uniform, num_bytes=0, num_states=num_states)
        # Of the data, and of the sites that cannot be in the data.
        tables, self._counts = [sub_patterns], torch.empty(0, dtype=dtype, device=self.device)
        if isinstance(self.substitution, VariableSites):
            left_out = self.substitution.left_out(tree.num_taxa)
            tables += [sub_patterns.of_site(masks) for masks in left_out.patterns.T]
            self._counts = torch.from_numpy(left_out.counts).to(self._like)
        self._plans = [make_plan(topology, table) for table in tables]
        self._edges = torch.as_tensor(order[0], device=self.device)  # of the tree, in the order of the topology
        rows = sub_patterns.codes[tree.num_taxa] // CODE_BASE
        self._row_of_pattern = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        self._made: dict[tuple[bool, int], Passes] = {}  # by compiled code, and as tensor operations; of each plan
        allowed = (patterns.long()[:, None] >> torch.arange(num_states)[:, None]) & 1
        self._sites = Sites(allowed.to(self._like), alignment.weights.to(self._like))

    def __repr__(self) -> str:
        parts = [repr(self.alignment), type(self.substitution).__name__]
        parts += [] if self.site_rates is None else [type(self.site_rates).__name__]
        sampled = ", ".join(["branch_lengths", *self.priors])
        return f"TreeModel({', '.join(parts)}, {self.tree.num_edges} branches; sampled: {sampled})"

    @property
    def element_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the branch lengths: the taxa on one side of each branch."""
        return {"branch_lengths": self.tree.edge_names}

    def plot_values(self, values: Mapping[str, Tensor], ax: Axes) -> tuple[str, str]:
        """Plot the tree with branch lengths `values["branch_lengths"]`, shape `(edges,)`; return words, a caption."""
        tree = replace(self.tree, branch_lengths=values["branch_lengths"].detach().cpu().double())
        plot_tree(tree, ax, numbered=True)
        lengths = [float(f"{length:.3g}") for length in values["branch_lengths"].tolist()]
        caption = "numbers are those of the inner branches among branch_lengths, the bar is in substitutions per site"
        return f"Tree of {tree.num_taxa} taxa: {tree.to_newick(lengths)}", caption

    def __call__(self) -> Tensor:
        """Sample branch lengths and parameters, add the log-likelihood, and return the branch lengths."""
        prior = self.branch_length_prior
        if not prior.event_shape:
            prior = prior.expand([self.tree.num_edges]).to_event(1)
        branch_lengths = pyro.sample("branch_lengths", prior)
        parameters = {name: pyro.sample(name, prior) for name, prior in self.priors.items()}
        pyro.factor("alignment", self.log_likelihood(branch_lengths, **parameters))
        return branch_lengths

    def log_likelihood(self, branch_lengths: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, in the order of `tree.edge_names` (not that of `Topologies`), shape
            `(*batch, edges)`, at least 0. A negative or NaN length gives NaN. Compiled code does 8 vectors at a time,
            16 in single precision.
        **parameters : Tensor
            A value for each of `priors`, shape `(*batch, *event_shape)`.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*batch)`, broadcast over branch lengths and parameters. Differentiable
            once.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of edges, or a parameter has another shape.
        SettingsError
            If a parameter is missing or is not in `priors`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"))
        >>> model.log_likelihood(torch.full((2, 3), 0.1, dtype=torch.float64)).shape
        torch.Size([2])
        """
        state = self._state(branch_lengths, parameters)
        inputs, frequencies, categories, rates = self._inputs(state), state.frequencies, state.categories, []
        dim = state.lengths.dim() - (1 if categories is None else 2)  # of topologies: one
        if categories is not None:
            inputs = inputs.movedim(0, dim)
            frequencies = frequencies.movedim(0, dim) if frequencies.dim() > dim + 1 else frequencies
            rates = [categories.weights] if categories.invariant is None else [categories.weights, categories.invariant]
        tensors = [tensor.unsqueeze(dim) for tensor in (inputs, frequencies, *rates)]
        value = log_likelihood(self._groups, *tensors)[..., 0]
        if isinstance(self.substitution, VariableSites):
            value = value - self.alignment.num_sites * self._log_observable(self.substitution, tensors)
        return value

    def pattern_log_likelihoods(self, branch_lengths: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of each site pattern.

        Index the last dimension with `alignment.site_patterns` to get one value per site. Slower than
        `log_likelihood`, but twice differentiable with respect to branch lengths.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.
        **parameters : Tensor
            A value for each of `priors`, shape `(*batch, *event_shape)`.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*batch, patterns)`, in the order of `alignment.patterns`.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of edges, or a parameter has another shape.
        SettingsError
            If a parameter is missing or is not in `priors`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"))
        >>> model.pattern_log_likelihoods(torch.full((2, 3), 0.1, dtype=torch.float64)).shape
        torch.Size([2, 4])
        """
        state = self._state(branch_lengths, parameters)
        # Tensor operations are differentiable any number of times.
        inputs = self._inputs(state)
        batch = inputs.shape[: -1 if self.substitution.is_uniform else -3]
        inputs = inputs.reshape(batch.numel(), 1, *inputs.shape[len(batch) :])
        frequencies = state.frequencies.expand(*batch, -1).reshape(batch.numel(), 1, self.substitution.num_states)
        rows = [self._passes(False, place).row_values(inputs, frequencies)[:, 0] for place in range(len(self._plans))]
        rows[0] = rows[0][:, self._row_of_pattern]
        logs = [row.unflatten(0, batch) if batch else row[0] for row in rows]
        if state.categories is not None:
            constant = self._sites.tips.amin(0).T
            logs = [
                mix(one.movedim(-1, 0), state.categories, state.frequencies, constant).movedim(0, -1) for one in logs
            ]
        if isinstance(self.substitution, VariableSites):
            return logs[0] - self.substitution.log_observable(torch.stack(logs[1:]), self._counts)
        return logs[0]

    def factor_terms(self, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the terms of the factor `"alignment"` by site pattern, for pointwise estimators.

        Parameters
        ----------
        values : mapping of str to Tensor
            Values of `"branch_lengths"` and each of `priors`, shape `(*batch, *event_shape)`.

        Returns
        -------
        dict of str to tuple of Tensor
            Log-likelihoods of the site patterns, shape `(*batch, patterns)`, and number of sites with each pattern,
            shape `(patterns,)`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGA", "B": "ACGA", "C": "AC-A"})
        >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"))
        >>> model.factor_terms({"branch_lengths": torch.full((3,), 0.1, dtype=torch.float64)})["alignment"][1]
        tensor([2., 1., 1.], dtype=torch.float64)
        """
        parameters = {name: values[name] for name in self.priors}
        terms = self.pattern_log_likelihoods(values["branch_lengths"], **parameters)
        return {"alignment": (terms, self._sites.weights)}

    def branch_derivatives(self, branch_lengths: Tensor, **parameters: Tensor) -> BranchDerivatives:
        """Compute the log-likelihood and its first and second derivatives with respect to each branch length.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.
        **parameters : Tensor
            A value for each of `priors`, shape `(*batch, *event_shape)`.

        Returns
        -------
        BranchDerivatives
            `value` of shape `(*batch)`; `first` and `second` (the diagonal of the Hessian matrix) of shape
            `(*batch, edges)`.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of edges, or a parameter has another shape.
        SettingsError
            If a parameter is missing or is not in `priors`, or the substitution model is one of `VariableSites`, or has
            classes of sites (`MixtureModel`).

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"))
        >>> model.branch_derivatives(torch.full((3,), 0.1, dtype=torch.float64)).second
        tensor([-92.0219,   1.5273,   1.1516], dtype=torch.float64)
        """
        if isinstance(self.substitution, VariableSites):
            raise SettingsError(
                "branch_derivatives has no correction for constant sites that were left out (VariableSites). Remedy: "
                "differentiate pattern_log_likelihoods, with torch.func.hessian."
            )
        if isinstance(self.substitution, MixtureModel):
            raise SettingsError(
                f"branch_derivatives has one rate matrix for all sites, but {type(self.substitution).__name__} has one "
                "for each class of sites. Remedy: differentiate pattern_log_likelihoods, with torch.func.hessian."
            )
        state = self._state(branch_lengths, parameters)
        lengths, categories = state.lengths, state.categories
        if categories is None:
            lengths, categories = lengths[None], one_rate(self._like)
        return branch_derivatives(self.tree, self._sites, lengths, state.substitution, categories)

    def _log_observable(self, substitution: VariableSites, tensors: Sequence[Tensor]) -> Tensor:
        """Return the log probability that a site can be in the data, `(*batch)`."""
        groups = [partial(self._groups, place) for place in range(1, len(self._plans))]
        logs = torch.stack([log_likelihood(one, *tensors)[..., 0] for one in groups])
        return substitution.log_observable(logs, self._counts)

    def _passes(self, compiled: bool, place: int = 0) -> Passes:
        key = compiled, place
        if key not in self._made:
            kind = CompiledPasses if compiled else TensorPasses
            self._made[key] = kind(self._plans[place], self.dtype, self.device)
        return self._made[key]

    def _groups(self, place: int = 0) -> Generator[tuple[slice, Passes]]:
        """Yield the one topology; asked anew each time, because copies may go to machines without a compiler."""
        yield slice(None), self._passes(can_run(self.dtype, self.device, self.substitution.num_states), place)

    def _inputs(self, state: _State) -> Tensor:
        """Return the inputs of the passes: lengths, or matrices, in the order of the topology's edges."""
        lengths = state.lengths[..., self._edges]
        if isinstance(state.substitution, MixtureModel):
            return pair_matrices(state.substitution, lengths)
        return lengths if state.substitution.is_uniform else state.substitution.transition_matrices(lengths)

    def _state(self, branch_lengths: Tensor, parameters: Mapping[str, Tensor]) -> _State:
        edges = self.tree.num_edges
        _check_tensors({"branch_lengths": branch_lengths, **parameters})
        if branch_lengths.dim() == 0 or branch_lengths.shape[-1] != edges:
            raise ShapeError(
                f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit the tree. Remedy: give "
                f"shape (*batch, {edges}), one length for each entry of tree.edge_names."
            )
        if parameters.keys() != self.priors.keys():
            raise SettingsError(
                f"The model's parameters are {sorted(self.priors)}, but values are given for {sorted(parameters)}. "
                "Remedy: give a value for each parameter, by name; set fixed parameters when making the model."
            )
        # Negative and NaN lengths give NaN: a value of -inf would look like an impossible length.
        lengths = branch_lengths.to(self._like)
        lengths = torch.where(lengths >= 0, lengths, torch.nan)
        values = {name: value.to(self._like) for name, value in parameters.items()}
        substitution, site_rates = self.substitution.with_parameters(values), self.site_rates
        batches = [lengths.shape[:-1], substitution.batch_shape]
        if site_rates is not None:
            site_rates = site_rates.with_parameters(values)
            batches.append(site_rates.batch_shape)
        try:
            batch = torch.broadcast_shapes(*batches)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(shape)) for shape in batches)
            raise ShapeError(
                f"The batches of branch lengths, substitution model and site rates do not broadcast: {shapes}. "
                "Remedy: give all parameters the same batch dimensions as branch_lengths, or none."
            ) from error
        lengths = lengths.expand(*batch, edges)
        if isinstance(substitution, MixtureModel):
            categories = None if site_rates is None else site_rates.categories(lengths)
            lengths, frequencies, weights = classes_at_rates(substitution, lengths, categories)
            return _State(substitution, lengths, frequencies, Categories(torch.ones_like(weights), weights))
        frequencies = substitution.frequencies(lengths).expand(*batch, substitution.num_states)
        if site_rates is None:
            return _State(substitution, lengths, frequencies, None)
        categories = site_rates.categories(lengths).expand(batch)
        return _State(substitution, lengths * categories.rates.movedim(-1, 0)[..., None], frequencies, categories)


def _check_arguments(
    alignment: object, tree: object, substitution: object, branch_length_prior: object, site_rates: object
) -> None:
    """Raise SettingsError for arguments of the wrong type."""
    if isinstance(alignment, Tree) and isinstance(tree, Alignment):
        raise SettingsError("alignment and tree are swapped. Remedy: give the alignment first.")
    if isinstance(branch_length_prior, SiteRates):
        kind = type(branch_length_prior).__name__
        raise SettingsError(
            f"branch_length_prior: {kind} is a model of site rates. Remedy: pass site_rates={kind}(...)."
        )
    expected = (
        ("alignment", alignment, Alignment, "read a file with Alignment.from_file(path)"),
        ("tree", tree, Tree, "read a file with Tree.from_file(path); for Topologies, give topologies.tree(0)"),
        ("substitution", substitution, SubstitutionModel | None, "give an instance such as JC69(), HKY85() or GTR()"),
        ("site_rates", site_rates, SiteRates | None, "give an instance such as GammaRates() or InvariantSites()"),
    )
    for name, given, kinds, remedy in expected:
        if not isinstance(given, kinds):
            what = f"the class {given.__name__}" if isinstance(given, type) else f"{type(given).__name__} {given!r:.60}"
            raise SettingsError(f"{name}: {what} has the wrong type. Remedy: {remedy}.")


def _check_tensors(values: Mapping[str, object]) -> None:
    """Raise ShapeError for branch lengths and parameters that are not tensors."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ShapeError(
                f"{name}: {type(value).__name__} is not a tensor. Remedy: give torch.tensor(..., dtype=torch.float64)."
            )


class _State(NamedTuple):
    """A model at given branch lengths and parameters."""

    substitution: SubstitutionModel  # with values for all parameters
    lengths: Tensor  # (*batch, edges); with site rates or classes those of each rate, (rates, *batch, edges)
    frequencies: Tensor  # (*batch, states); with classes of sites those of pairs of rate and class, (pairs, ...)
    categories: Categories | None  # batched as (*batch); None for one rate; with classes, the pairs
