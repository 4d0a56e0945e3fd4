"""Likelihood of an alignment on many topologies in one call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._mixture_models import (
    MixtureModel,
    check_mixture,
    classes_at_rates,
    pair_matrices,
)
from bayeskit.models.phylogenetics._pruning._evaluation import log_likelihood, planned_groups
from bayeskit.models.phylogenetics._pruning._plan import SubPatterns
from bayeskit.models.phylogenetics._site_rates import SiteRates
from bayeskit.models.phylogenetics._substitution import JC69, SubstitutionModel, VariableSites, check_data_type
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import check_same_taxa
from bayeskit.models.phylogenetics._variable_sites import check_variable_sites


class ForestLikelihood:
    """Log-likelihood of an alignment on many different topologies in one call.

    Site sub-patterns are cached for each set of taxa below an edge: a topology of known sets needs no search. Value and
    gradient take two passes over the distinct sub-patterns, with scaled partial likelihoods. On a CPU the passes are
    C++ code, compiled on first use and kept in the user's cache folder; otherwise, or without a compiler, they are
    tensor operations. The object is thread-safe; calls from several threads run one after another.

    Parameters
    ----------
    alignment : Alignment
        Gaps and unknown bases are missing data.
    substitution : SubstitutionModel, default JC69()
        `JC69` is the fastest.
    site_rates : SiteRates, optional
        Distribution of the rate over sites; by default all sites have rate one. The cost is proportional to the number
        of rates above zero (1.5 evaluations each with gradients).
    dtype : torch.dtype, default torch.float64
        float64 or float32.
    device : torch.device or str, default "cpu"
    compile : bool, default True
        Use compiled code if possible.
    cache_bytes : int, default 2**28
        Maximum size of the cache: 17 bytes for each pattern of each set of taxa, at most 65,536 sets. The least
        recently used set is replaced. A change of the order of taxa clears the cache.

    Raises
    ------
    SettingsError
        If `dtype` is neither float64 nor float32, or the substitution model is for another type of data, or names
        branches of one tree.
    AlignmentError
        If the substitution model is one of `VariableSites`, and a site may be constant.

    References
    ----------
    J. Felsenstein (1981), Evolutionary trees from DNA sequences: a maximum likelihood approach, Journal of Molecular
    Evolution 17, 368-376.

    Z. Yang (1994), Maximum likelihood phylogenetic estimation from DNA sequences with variable rates over sites:
    approximate methods, Journal of Molecular Evolution 39, 306-314.

    X. Ji, Z. Zhang, A. Holbrook, A. Nishimura, G. Baele, A. Rambaut, P. Lemey and M. A. Suchard (2020), Gradients do
    grow on trees, Molecular Biology and Evolution 37, 3047-3060.

    K. Kobert, A. Stamatakis and T. Flouri (2017), Efficient detection of repeating sites to accelerate phylogenetic
    likelihood calculations, Systematic Biology 66, 205-217.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Tree
    >>> alignment = Alignment.from_sequences({"A": "A", "B": "A", "C": "C", "D": "C"})
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((A,C),B,D);", "((A,D),B,C);")]
    >>> topologies = Topologies.from_trees(trees)
    >>> lengths = torch.full((3, topologies.num_edges), 0.1, dtype=torch.float64)
    >>> ForestLikelihood(alignment).log_likelihood(topologies, lengths).exp()
    tensor([0.0057, 0.0004, 0.0004], dtype=torch.float64)
    """

    def __init__(
        self,
        alignment: Alignment,
        substitution: SubstitutionModel | None = None,
        *,
        site_rates: SiteRates | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        compile: bool = True,
        cache_bytes: int = 2**28,
    ) -> None:
        if dtype not in (torch.float64, torch.float32):
            raise SettingsError(f"dtype={dtype} is not supported. Remedy: use torch.float64 or torch.float32.")
        self.alignment = alignment
        self.substitution = JC69() if substitution is None else substitution
        check_data_type(alignment, self.substitution)
        check_mixture(self.substitution)
        check_variable_sites(alignment, self.substitution, site_rates)
        if isinstance(self.substitution, MixtureModel) and self.substitution.is_branch_specific:
            raise SettingsError(
                f"{type(self.substitution).__name__} names branches of one tree, so that it has no likelihood on many "
                "topologies. Remedy: use TreeModel."
            )
        self.site_rates = site_rates
        self.dtype, self.device = dtype, torch.device(device)
        # Created once: priors check their parameters, which tracing does not allow.
        models = [self.substitution] if site_rates is None else [self.substitution, site_rates]
        self._free = {name for model in models for name in model.priors(torch.empty(0, dtype=dtype))}
        self._compile, self._cache_bytes = compile, cache_bytes
        self._masks, self._weights = alignment.patterns.numpy(), alignment.weights.numpy()
        self._patterns: list[SubPatterns] = []

    def log_likelihood(self, topologies: Topologies, branch_lengths: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment on each topology.

        Parameters
        ----------
        topologies : Topologies
            Unrooted, over the taxa of the alignment in any order; repetition is allowed.
        branch_lengths : Tensor
            Expected substitutions per site in the edge order of `Topologies`, shape `(*sample, topologies, edges)`, at
            least 0. A negative or NaN length gives NaN for its topology.
        **parameters : Tensor
            A value for each parameter without a fixed value, shape `(*batch, *event_shape)`, where `batch` broadcasts
            with `(*sample, topologies)`.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*sample, topologies)`. Differentiable once, in all arguments.

        Raises
        ------
        TreeError
            If the topologies are rooted, or their taxa differ from those of the alignment.
        ShapeError
            If the shapes of branch lengths, parameters and topologies are inconsistent.
        SettingsError
            If a parameter has no value, or a name is unknown.
        """
        patterns, *left_out = self._sub_patterns(topologies)
        expected = (len(topologies), topologies.num_edges)
        if branch_lengths.shape[-2:] != expected:
            raise ShapeError(
                f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit the topologies. Remedy: give shape "
                f"(*sample, {expected[0]}, {expected[1]}), one vector for each topology."
            )
        lengths = branch_lengths.to(dtype=self.dtype, device=self.device)
        # Negative and NaN lengths give NaN: a value of -inf would look like an impossible length.
        lengths = torch.where(lengths >= 0, lengths, torch.nan)
        tensors = self._tensors(lengths, parameters)

        def of(patterns: SubPatterns) -> Tensor:
            groups = partial(planned_groups, topologies, patterns, self.dtype, self.device, self._compile)
            return log_likelihood(groups, *tensors)

        value = of(patterns)
        if isinstance(self.substitution, VariableSites):
            counts = torch.from_numpy(self.substitution.left_out(self.alignment.num_taxa).counts)
            logs = torch.stack([of(site) for site in left_out])
            value = value - self.alignment.num_sites * self.substitution.log_observable(logs, counts)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Omit the cached tables, which are rebuilt on use."""
        return {**self.__dict__, "_patterns": []}

    def _tensors(self, lengths: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the inputs of an evaluation."""
        if parameters.keys() != self._free:
            raise SettingsError(
                f"Values are needed for the parameters {sorted(self._free)}, but given for {sorted(parameters)}. "
                "Remedy: give a value for each parameter, by name; set fixed parameters when making the substitution "
                "model and the site rates."
            )
        values = {name: value.to(dtype=lengths.dtype, device=lengths.device) for name, value in parameters.items()}
        substitution = self.substitution.with_parameters(values)
        site_rates = None if self.site_rates is None else self.site_rates.with_parameters(values)
        batch = _common_batch(lengths, substitution, site_rates)
        lengths = lengths.expand(*batch, lengths.shape[-1])
        if isinstance(substitution, MixtureModel):
            categories = None if site_rates is None else site_rates.categories(lengths)
            scaled, frequencies, weights = classes_at_rates(substitution, lengths, categories)
            inputs = pair_matrices(substitution, scaled)
            return [inputs.movedim(0, len(batch)), frequencies.movedim(0, len(batch)), weights]
        frequencies = substitution.frequencies(lengths).expand(*batch, substitution.num_states)
        if site_rates is None:
            return [lengths if substitution.is_uniform else substitution.transition_matrices(lengths), frequencies]
        categories = site_rates.categories(lengths).expand(batch)
        scaled = lengths * categories.rates.movedim(-1, 0)[..., None]
        inputs = scaled if substitution.is_uniform else substitution.transition_matrices(scaled)
        rates = [categories.weights] if categories.invariant is None else [categories.weights, categories.invariant]
        return [inputs.movedim(0, len(batch)), frequencies, *rates]

    def _sub_patterns(self, topologies: Topologies) -> list[SubPatterns]:
        """Return the tables in the order of the topologies' taxa, of the data and of sites that cannot be in them."""
        if topologies.rooted:
            raise TreeError(
                "The topologies are rooted, but the likelihood does not depend on the root. Remedy: use "
                "topologies.unrooted(), and add the lengths of the two edges at the root."
            )
        # Another thread may replace the tables by tables for another order of taxa at any time.
        patterns = self._patterns
        if not patterns or patterns[0].taxa != topologies.taxa:
            check_same_taxa(self.alignment.taxa, topologies.taxa, "the alignment", "the topologies")
            row = {taxon: place for place, taxon in enumerate(self.alignment.taxa)}
            data = SubPatterns(
                topologies.taxa,
                self._masks[[row[taxon] for taxon in topologies.taxa]],
                self._weights,
                self.substitution.is_uniform,
                self._cache_bytes,
                self.substitution.num_states,
            )
            model = self.substitution
            left_out = model.left_out(len(data.taxa)).patterns.T if isinstance(model, VariableSites) else ()
            patterns = self._patterns = [data, *(data.of_site(masks) for masks in left_out)]
        return patterns


def _common_batch(lengths: Tensor, substitution: SubstitutionModel, site_rates: SiteRates | None) -> torch.Size:
    """Return `(*sample, topologies)` for lengths `(*sample, topologies, edges)` and parameters."""
    models = [substitution] if site_rates is None else [substitution, site_rates]
    with suppress(RuntimeError):  # shapes that do not broadcast
        batch = torch.broadcast_shapes(lengths.shape[:-1], *(model.batch_shape for model in models))
        if batch[-1] == lengths.shape[-2]:
            return batch
    raise ShapeError(
        f"The parameters do not broadcast with branch lengths of shape {tuple(lengths.shape)}. Remedy: give all "
        f"parameters the batch dimensions (*sample, {lengths.shape[-2]}), the last for topologies, or none."
    )
