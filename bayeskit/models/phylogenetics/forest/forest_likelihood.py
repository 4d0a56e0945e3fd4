"""The likelihood of an alignment on many different topologies in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics.alignments.alignment import Alignment
from bayeskit.models.phylogenetics.forest import native as forest_native
from bayeskit.models.phylogenetics.forest import passes as forest_passes
from bayeskit.models.phylogenetics.forest.plan import Plan, SubPatterns, make_plan
from bayeskit.models.phylogenetics.substitution import JC69, SubstitutionModel
from bayeskit.models.phylogenetics.trees.topologies import Topologies
from bayeskit.models.phylogenetics.trees.tree import check_same_taxa

#: Numbers in the largest table of the tensor operations.
_TABLE_SIZE = 2**22


class ForestLikelihood:
    """Log-likelihood of an alignment on many different topologies in one call.

    Sub-patterns are found once for every set of taxa that turns up below an edge, and kept: a topology made of sets
    that were met before costs no search. The value and its gradient come from two passes over the distinct
    sub-patterns of each topology, every partial likelihood scaled. On a CPU the passes are compiled code, made on
    first use by the machine's C++ compiler and kept in the user's cache folder; elsewhere, and where there is no
    compiler, they are tensor operations.

    Parameters
    ----------
    alignment : Alignment
        The sequences. Gaps and unknown bases are missing data.
    substitution : SubstitutionModel, optional
        How bases change; Jukes-Cantor, the fastest, by default.
    dtype : torch.dtype, optional
        Type of all computing, float64 (default) or float32.
    device : torch.device or str, optional
        Where to compute.
    compile : bool, optional
        Whether to use compiled code where that is possible.
    cache_bytes : int, optional
        Largest size of the tables of sub-patterns, 256 MiB by default: 17 bytes for each pattern of each set of taxa,
        and never more than 65,536 sets. Where they are full, the set that was used longest ago makes room. A change of
        the order of taxa empties them.

    Raises
    ------
    SettingsError
        If `dtype` is neither of the two.

    References
    ----------
    J. Felsenstein (1981), Evolutionary trees from DNA sequences: a maximum likelihood approach, Journal of Molecular
    Evolution 17, 368-376.

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
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        compile: bool = True,
        cache_bytes: int = 2**28,
    ) -> None:
        if dtype not in (torch.float64, torch.float32):
            raise SettingsError(f"dtype={dtype} is not supported. Remedy: use torch.float64 or torch.float32.")
        self.alignment = alignment
        self.substitution = JC69() if substitution is None else substitution
        self.dtype, self.device = dtype, torch.device(device)
        self._compile, self._cache_bytes = compile, cache_bytes
        self._masks, self._weights = alignment.patterns.numpy(), alignment.weights.numpy()
        self._patterns: SubPatterns | None = None

    def log_likelihood(self, topologies: Topologies, branch_lengths: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment on each topology.

        Parameters
        ----------
        topologies : Topologies
            Unrooted, over the taxa of the alignment in any order. Some may be equal.
        branch_lengths : Tensor
            Expected substitutions per site in the order of edges of `Topologies`, at least 0, shape
            `(*sample, topologies, edges)`.
        **parameters : Tensor
            A value for each parameter of the substitution model that has none: `(*batch, *event_shape)`, where `batch`
            broadcasts with `(*sample, topologies)`.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*sample, topologies)`. Differentiable once, by all arguments.

        Raises
        ------
        TreeError
            If the topologies are rooted, or over other taxa than the alignment.
        ShapeError
            If the branch lengths do not fit the topologies.
        """
        patterns = self._sub_patterns(topologies)
        expected = (len(topologies), topologies.num_edges)
        if branch_lengths.shape[-2:] != expected:
            raise ShapeError(
                f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit the topologies. Remedy: give shape "
                f"(*sample, {expected[0]}, {expected[1]}), one vector for each topology."
            )
        lengths = branch_lengths.to(dtype=self.dtype, device=self.device)
        substitution = self._substitution(lengths, parameters)
        sample = torch.broadcast_shapes(lengths.shape[:-1], substitution.batch_shape)
        lengths = lengths.expand(*sample, expected[1])
        inputs = lengths if substitution.is_uniform else substitution.transition_matrices(lengths)
        frequencies = substitution.frequencies(lengths).expand(*sample, 4)
        at_once = torch.is_grad_enabled() and (inputs.requires_grad or frequencies.requires_grad)
        return _LogLikelihood.apply(inputs, frequencies, _Call(topologies, patterns, self._compile), at_once)[0]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tables, mostly empty memory, behind; they fill again."""
        return {**self.__dict__, "_patterns": None}

    def _substitution(self, like: Tensor, parameters: Mapping[str, Tensor]) -> SubstitutionModel:
        """Return the substitution model with values for all of its parameters."""
        free = self.substitution.priors(like).keys()
        if parameters.keys() != free:
            raise SettingsError(
                f"Values are needed for the parameters {sorted(free)}, but given for {sorted(parameters)}. Remedy: "
                "give one for each, by name; fixed parameters are set where the substitution model is made."
            )
        values = {name: value.to(dtype=like.dtype, device=like.device) for name, value in parameters.items()}
        return self.substitution.with_parameters(values)

    def _sub_patterns(self, topologies: Topologies) -> SubPatterns:
        """Return the tables in the order of the topologies' taxa."""
        if topologies.rooted:
            raise TreeError(
                "The topologies are rooted, but where a root stands does not change the likelihood. Remedy: make them "
                "unrooted by topologies.unrooted(), and add the lengths of the two edges at the root."
            )
        if self._patterns is None or self._patterns.taxa != topologies.taxa:
            check_same_taxa(self.alignment.taxa, topologies.taxa, "the alignment", "the topologies")
            row = {taxon: place for place, taxon in enumerate(self.alignment.taxa)}
            self._patterns = SubPatterns(
                topologies.taxa,
                self._masks[[row[taxon] for taxon in topologies.taxa]],
                self._weights,
                self.substitution.is_uniform,
                self._cache_bytes,
            )
        return self._patterns


class _Call:
    """One call's topologies, evaluated in groups that fit into the tables."""

    def __init__(self, topologies: Topologies, patterns: SubPatterns, compile: bool) -> None:
        self._topologies, self._patterns, self._compile = topologies, patterns, compile

    def __call__(self, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
        """Return values and, on request, gradients for inputs `(*sample, topologies, edges, ...)`."""
        sample, count = frequencies.shape[:-2], len(self._topologies)
        if frequencies.numel() == 0:
            empty = inputs.new_zeros((*sample, count))
            return (empty, torch.zeros_like(inputs), torch.zeros_like(frequencies)) if slopes else (empty,)
        inputs = inputs.reshape(sample.numel(), *inputs.shape[len(sample) :])
        frequencies = frequencies.reshape(sample.numel(), count, 4)
        # What records operations on tensors must be shown some.
        recorded = get_proxy_mode() is not None or torch.compiler.is_compiling()
        native = self._compile and not recorded and forest_native.can_run(inputs.dtype, inputs.device)
        step = self._patterns.num_topologies
        if not native:
            step = min(step, max(1, _TABLE_SIZE // (4 * self._patterns.masks.size)))
        run = forest_native.run if native else _by_tensors
        parts = []
        for first in range(0, count, step):
            group = slice(first, min(first + step, count))
            # The whole object knows its parents and clades already.
            topologies = self._topologies if step >= count else self._topologies[group]
            plan = make_plan(topologies, self._patterns)
            parts.append(run(plan, inputs[:, group], frequencies[:, group], slopes))
        columns = (column[0] if len(column) == 1 else torch.cat(column, 1) for column in zip(*parts, strict=True))
        return tuple(column.reshape(*sample, *column.shape[1:]) for column in columns)


def _by_tensors(plan: Plan, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
    """Run the tensor operations on as many vectors at a time as keep the tables small."""
    tables = forest_passes.tabulate(plan, inputs.dtype, inputs.device)
    step = max(1, _TABLE_SIZE // (4 * tables.num_rows))
    parts = [
        forest_passes.run(tables, some, other, slopes)
        for some, other in zip(inputs.split(step), frequencies.split(step), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class _LogLikelihood(torch.autograd.Function):
    """Log-likelihoods `(*sample, topologies)`; the gradients, if computed at once, are outputs, too."""

    @staticmethod
    def forward(inputs: Tensor, frequencies: Tensor, call: _Call, slopes: bool) -> tuple[Tensor, ...]:
        return call(inputs, frequencies, slopes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[2]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        return (*_Gradient.apply(cotangent, ctx.call, *ctx.saved_tensors), None, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, frequencies: Tensor, call: _Call, slopes: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        inputs = _to_front(inputs, in_dims[0], info.batch_size)
        frequencies = _to_front(frequencies, in_dims[1], info.batch_size)
        out = _LogLikelihood.apply(inputs, frequencies, call, slopes)
        return out, (0,) * len(out)


class _Gradient(torch.autograd.Function):
    """Gradients times cotangents, as a function of its own, so that `vmap` of a gradient stays one call."""

    @staticmethod
    def forward(
        cotangent: Tensor, call: _Call, inputs: Tensor, frequencies: Tensor, *slopes: Tensor
    ) -> tuple[Tensor, Tensor]:
        by_input, by_frequency = slopes or call(inputs, frequencies, True)[1:]
        lines = cotangent.reshape(*cotangent.shape, *(1 for _ in by_input.shape[cotangent.dim() :]))
        return by_input * lines, by_frequency * cotangent[..., None]

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
        info: Any, in_dims: tuple[int | None, ...], cotangent: Tensor, call: _Call, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        front = [_to_front(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims[2:], strict=True)]
        return _Gradient.apply(_to_front(cotangent, in_dims[0], info.batch_size), call, *front), (0, 0)


def _to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
