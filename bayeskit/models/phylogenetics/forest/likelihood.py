"""Likelihood of an alignment on many topologies in one call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.logdensity.tracing import is_traced
from bayeskit.models.phylogenetics.alignments import Alignment
from bayeskit.models.phylogenetics.forest import native as forest_native
from bayeskit.models.phylogenetics.forest import passes as forest_passes
from bayeskit.models.phylogenetics.forest.passes import Rates, mix_rows
from bayeskit.models.phylogenetics.forest.plan import ForestPlan, SubPatterns, make_forest_plan
from bayeskit.models.phylogenetics.site_rates import SiteRates
from bayeskit.models.phylogenetics.substitution import JC69, SubstitutionModel
from bayeskit.models.phylogenetics.topologies import Topologies
from bayeskit.models.phylogenetics.trees import check_same_taxa

__all__ = ["ForestLikelihood"]

# One evaluation of many topologies, in groups that fit into the tables, with rules for autograd and `vmap`.

#: Number of elements in the largest table of the tensor operations, and in that of the root rows at each rate.
_TABLE_SIZE = 2**22
_ROWS_SIZE = 2**20


class _Evaluation:
    """Log-likelihoods of given topologies, evaluated in groups that fit into the tables of `patterns`."""

    def __init__(self, topologies: Topologies, patterns: SubPatterns, compile: bool) -> None:
        self._topologies, self._patterns, self._compile = topologies, patterns, compile

    def log_likelihood(self, inputs: Tensor, frequencies: Tensor, *rates: Tensor) -> Tensor:
        """Return log-likelihoods `(*sample, topologies)`, differentiable once by all arguments."""
        # `inputs` are branch lengths (*sample, topologies, edges) or matrices (*sample, topologies, edges, 4, 4); with
        # site rates, those at each rate, a dimension after that of topologies. `frequencies` are
        # (*sample, topologies, 4), and `rates` the fields of `Rates`, (*sample, topologies, ...).
        tensors = (inputs, frequencies, *rates)
        at_once = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        values: Tensor = _LogLikelihood.apply(self, at_once, *tensors)[0]
        return values

    def run(self, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return values and, on request, gradients by all tensors."""
        inputs, frequencies = tensors[:2]
        sample, count = frequencies.shape[:-2], len(self._topologies)
        if frequencies.numel() == 0:
            empty = inputs.new_zeros((*sample, count))
            return (empty, *(torch.zeros_like(tensor) for tensor in tensors)) if slopes else (empty,)
        tensors = tuple(tensor.reshape(sample.numel(), *tensor.shape[len(sample) :]) for tensor in tensors)
        # Tracing records tensor operations only.
        recorded = is_traced() or torch.compiler.is_compiling()
        native = self._compile and not recorded and forest_native.can_run(inputs.dtype, inputs.device)
        step = self._patterns.num_topologies
        if not native:
            step = min(step, max(1, _TABLE_SIZE // (4 * self._patterns.masks.size)))
        parts = []
        for first in range(0, count, step):
            group = slice(first, min(first + step, count))
            # The whole object keeps its cached parents and clades.
            topologies = self._topologies if step >= count else self._topologies[group]
            # Another thread's plan would take slots away from this one.
            with self._patterns.lock:
                plan = make_forest_plan(topologies, self._patterns)
                parts.append(_run(plan, native, slopes, *(tensor[:, group] for tensor in tensors)))
        return tuple(column.reshape(*sample, *column.shape[1:]) for column in _joined(parts, 1))


def _run(plan: ForestPlan, native: bool, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run the passes, in parts of the vectors of branch lengths if tables would become large."""
    inputs, frequencies, *rates = tensors
    if native and not rates:
        return forest_native.native_log_likelihoods(plan, inputs, frequencies, slopes)
    tables = None if native else forest_passes.tabulate(plan, inputs.dtype, inputs.device)
    step = inputs.shape[0] if tables is None else _TABLE_SIZE // (4 * tables.num_rows)
    if rates:
        step = min(step, _ROWS_SIZE // (len(plan.slots) * plan.patterns.num_root_rows)) // inputs.shape[2]
    parts = []
    for part, at_root, *more in zip(*(tensor.split(max(1, step)) for tensor in tensors), strict=True):
        if more:
            parts.append(_run_rates(plan, tables, slopes, part, at_root, *more))
        elif tables is not None:
            parts.append(forest_passes.tensor_log_likelihoods(tables, part, at_root, slopes))
    return tuple(_joined(parts, 0))


def _run_rates(
    plan: ForestPlan,
    tables: forest_passes.Tables | None,
    slopes: bool,
    inputs: Tensor,
    frequencies: Tensor,
    *rates: Tensor,
) -> tuple[Tensor, ...]:
    """Return values and gradients for several rates of sites."""
    number = inputs.shape[2]
    # Vectors at each rate are treated as separate vectors.
    lengths = inputs.movedim(2, 0).flatten(0, 1)
    repeated = frequencies.expand(number, *frequencies.shape).flatten(0, 1)
    if tables is None:
        logs = forest_native.native_row_values(plan, lengths, repeated)
    else:
        logs = forest_passes.tensor_row_values(tables, lengths, repeated)
    patterns = plan.patterns
    counts, constant = (torch.as_tensor(array).to(inputs) for array in (patterns.root_weights, patterns.constant))
    mixed = mix_rows(logs.unflatten(0, (number, -1)), Rates(*rates), frequencies, counts, constant, slopes)
    if mixed.by_row is None:
        return (mixed.values,)
    weights = mixed.by_row.flatten(0, 1)
    if tables is None:
        by_length, by_frequency = forest_native.native_row_slopes(plan, lengths, repeated, weights)
    else:
        by_length, by_frequency = forest_passes.tensor_row_slopes(tables, lengths, repeated, weights)
    by_frequency = by_frequency.unflatten(0, (number, -1)).sum(0)
    if mixed.by_frequency is not None:
        by_frequency = by_frequency + mixed.by_frequency
    return mixed.values, by_length.unflatten(0, (number, -1)).movedim(0, 2), by_frequency, *mixed.by_rates


def _joined(parts: list[tuple[Tensor, ...]], dim: int) -> list[Tensor]:
    return [column[0] if len(column) == 1 else torch.cat(column, dim) for column in zip(*parts, strict=True)]


class _LogLikelihood(torch.autograd.Function):
    """Log-likelihoods `(*sample, topologies)`; the gradients, if computed at once, are outputs, too."""

    @staticmethod
    def forward(evaluation: _Evaluation, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return evaluation.run(slopes, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.evaluation, ctx.count = inputs[0], len(inputs) - 2
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[2:], *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, *_Gradient.apply(ctx.evaluation, ctx.count, cotangent, *ctx.saved_tensors))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], evaluation: _Evaluation, slopes: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = _LogLikelihood.apply(evaluation, slopes, *_to_front(tensors, in_dims[2:], info.batch_size))
        return out, (0,) * len(out)


class _Gradient(torch.autograd.Function):
    """Gradients times cotangents, as a function of its own, so that `vmap` of a gradient stays one call."""

    @staticmethod
    def forward(evaluation: _Evaluation, count: int, cotangent: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the products; `tensors` are `count` inputs and then, if computed before, their gradients."""
        slopes = tensors[count:] or evaluation.run(True, *tensors)[1:]
        dims = (slope.dim() - cotangent.dim() for slope in slopes)
        lines = (cotangent.reshape(*cotangent.shape, *(1,) * more) for more in dims)
        return tuple(slope * line for slope, line in zip(slopes, lines, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError(
            "The likelihood has first derivatives only. Remedy: use finite differences of its gradient."
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], evaluation: _Evaluation, count: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = _Gradient.apply(evaluation, count, *_to_front(tensors, in_dims[2:], info.batch_size))
        return out, (0,) * len(out)


def _to_front(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...], size: int) -> list[Tensor]:
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


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
        If `dtype` is neither float64 nor float32.

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
        self.site_rates = site_rates
        self.dtype, self.device = dtype, torch.device(device)
        # Created once: priors check their parameters, which tracing does not allow.
        models = [self.substitution] if site_rates is None else [self.substitution, site_rates]
        self._free = {name for model in models for name in model.priors(torch.empty(0, dtype=dtype))}
        self._compile, self._cache_bytes = compile, cache_bytes
        self._masks, self._weights = alignment.patterns.numpy(), alignment.weights.numpy()
        self._patterns: SubPatterns | None = None

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
        patterns = self._sub_patterns(topologies)
        expected = (len(topologies), topologies.num_edges)
        if branch_lengths.shape[-2:] != expected:
            raise ShapeError(
                f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit the topologies. Remedy: give shape "
                f"(*sample, {expected[0]}, {expected[1]}), one vector for each topology."
            )
        lengths = branch_lengths.to(dtype=self.dtype, device=self.device)
        # Negative and NaN lengths give NaN: a value of -inf would look like an impossible length.
        lengths = torch.where(lengths >= 0, lengths, torch.nan)
        evaluation = _Evaluation(topologies, patterns, self._compile)
        return evaluation.log_likelihood(*self._tensors(lengths, parameters))

    def __getstate__(self) -> dict[str, Any]:
        """Omit the cached tables, which are rebuilt on use."""
        return {**self.__dict__, "_patterns": None}

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
        frequencies = substitution.frequencies(lengths).expand(*batch, 4)
        if site_rates is None:
            return [lengths if substitution.is_uniform else substitution.transition_matrices(lengths), frequencies]
        categories = site_rates.categories(lengths).expand(batch)
        scaled = lengths * categories.rates.movedim(-1, 0)[..., None]
        inputs = scaled if substitution.is_uniform else substitution.transition_matrices(scaled)
        rates = [categories.weights] if categories.invariant is None else [categories.weights, categories.invariant]
        return [inputs.movedim(0, len(batch)), frequencies, *rates]

    def _sub_patterns(self, topologies: Topologies) -> SubPatterns:
        """Return the tables in the order of the topologies' taxa."""
        if topologies.rooted:
            raise TreeError(
                "The topologies are rooted, but the likelihood does not depend on the root. Remedy: use "
                "topologies.unrooted(), and add the lengths of the two edges at the root."
            )
        # Another thread may replace the tables by tables for another order of taxa at any time.
        patterns = self._patterns
        if patterns is None or patterns.taxa != topologies.taxa:
            check_same_taxa(self.alignment.taxa, topologies.taxa, "the alignment", "the topologies")
            row = {taxon: place for place, taxon in enumerate(self.alignment.taxa)}
            patterns = self._patterns = SubPatterns(
                topologies.taxa,
                self._masks[[row[taxon] for taxon in topologies.taxa]],
                self._weights,
                self.substitution.is_uniform,
                self._cache_bytes,
            )
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
