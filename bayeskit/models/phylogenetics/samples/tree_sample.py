"""Samples of trees: weighted topologies, with the branch lengths of each sampled tree where there are any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics.samples.distances import comparable
from bayeskit.models.phylogenetics.samples.files import read_runs, write_chain, write_topologies
from bayeskit.models.phylogenetics.samples.ranked_topologies import RankedTopologies
from bayeskit.models.phylogenetics.samples.rooting import reordered, with_outgroup, without_roots
from bayeskit.models.phylogenetics.samples.weights import check_shares, shares
from bayeskit.models.phylogenetics.trees.edge_orders import edges_of_trees, stacked_lengths
from bayeskit.models.phylogenetics.trees.topologies import Topologies
from bayeskit.models.phylogenetics.trees.tree import Tree


@dataclass(frozen=True, eq=False, repr=False)
class TreeSample(RankedTopologies):
    """Trees drawn from a distribution, or trees with their probabilities, over the same taxa.

    Use `from_file`, `from_files`, `from_trees` or `from_topologies` to make one.

    Attributes
    ----------
    topologies : Topologies
        The distinct topologies, in order of first appearance.
    index : ndarray
        Which topology each sampled tree has, shape `(samples,)`.
    sample_weights : ndarray
        Weight of each sampled tree, shape `(samples,)`, float64; they sum to one.
    branch_lengths : Tensor or None
        Branch lengths of each sampled tree in the order of the edges of its topology (see `Topologies`), shape
        `(samples, edges)`, float64. A `Tree` has another order: `sampled_tree(i).branch_lengths` is in that one.
    num_burn_in : int
        How many trees were left out as burn-in when files were read.

    Raises
    ------
    ShapeError, SettingsError
        If shapes do not fit together, weights are negative or do not sum to one, or the index leads nowhere.

    Examples
    --------
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((A,C),B,D);", "((C,D),A,B);")]
    >>> sample = TreeSample.from_trees(trees)
    >>> sample
    TreeSample(3 trees, 2 unrooted topologies, 4 taxa)
    >>> sample.weights.round(3).tolist(), sample.index.tolist()
    ([0.667, 0.333], [0, 1, 0])
    """

    topologies: Topologies
    index: np.ndarray
    sample_weights: np.ndarray
    branch_lengths: Tensor | None = None
    num_burn_in: int = 0

    def __post_init__(self) -> None:
        count = len(self.index)
        shape = None if self.branch_lengths is None else tuple(self.branch_lengths.shape)
        if self.sample_weights.shape != (count,) or shape not in (None, (count, self.topologies.num_edges)):
            raise ShapeError(
                f"{count} trees do not fit weights of shape {self.sample_weights.shape} and branch lengths of shape "
                f"{shape}. Remedy: make samples by TreeSample.from_topologies."
            )
        check_shares(self.sample_weights, self.index, len(self.topologies))

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        burn_in: float | None = None,
        rooted: bool | None = None,
        *,
        taxa: Sequence[str] | None = None,
        resolve: bool = False,
        seed: int | torch.Generator = 0,
        incomplete: str = "error",
        progress: bool = True,
    ) -> TreeSample:
        """Read the trees of a NEXUS or Newick file.

        Read are the `.t` and `.trprobs` files of MrBayes, the `.trees` files of BEAST, whose annotations are left out,
        and lists in Newick, a weight before each tree or not.

        Parameters
        ----------
        path : str or os.PathLike
            The file. Where it weights its trees, by `[&W ...]`, `[p = ...]` or a number before the tree, these are
            the weights; else every tree counts one.
        burn_in : float, optional
            How much to leave out at the start: a fraction from 0 to below 1, or a whole number of trees. By default a
            quarter of a chain (a NEXUS file without weights), and nothing of weighted trees or of a list in Newick. So
            25 per cent are 0.25, and 25 are the first 25 trees; `num_burn_in` says how many were left out.
        rooted : bool, optional
            Whether to read rooted or unrooted topologies; by default what the first tree is: by its mark `[&R]` or
            `[&U]`, or else rooted if its outermost parenthesis joins two nodes, as it is with True whatever its mark.
            Rooted trees are unrooted where unrooted ones are read.
        taxa : sequence of str, optional
            The order of the taxa, such as `alignment.taxa`; by default that of the table of names in the file, or else
            of the first tree.
        resolve : bool, default False
            Whether to resolve nodes of too many children, every way equally likely and anew for each tree, by edges of
            length zero; refused otherwise.
        seed : int or torch.Generator, default 0
        incomplete : {"error", "warn"}, default "error"
            What to do with a file that ends too early, as that of a running chain: refuse it, or read the trees that
            are complete.
        progress : bool, default True
            Whether a long file shows a progress bar.

        Returns
        -------
        TreeSample
            The trees; with branch lengths if the file gives them.

        Raises
        ------
        TreeError
            If the file cannot be read, is truncated, or has no tree after burn-in; if a tree is malformed, has other
            taxa than those before, is not binary, is unrooted among rooted ones, or has no weight or branch lengths
            where others have; if a weight is negative. The message names file and line.
        SettingsError
            If `burn_in` or `incomplete` is outside its domain, or `burn_in` given for weighted trees.

        Warns
        -----
        ConversionWarning
            Once for a file, if rooted trees were unrooted, or if it ended too early and `incomplete` is "warn".

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "list.txt"
        >>> _ = path.write_text("0.6 ((A,B),C,D);  0.4 ((A,C),B,D);")
        >>> TreeSample.from_file(path).weights.tolist()
        [0.6, 0.4]
        """
        return cls._collected(*read_runs([path], burn_in, rooted, taxa, resolve, seed, incomplete, progress)[0])

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        burn_in: float | None = None,
        rooted: bool | None = None,
        *,
        taxa: Sequence[str] | None = None,
        resolve: bool = False,
        seed: int | torch.Generator = 0,
        incomplete: str = "error",
        progress: bool = True,
    ) -> TreeSample:
        """Read several runs and pool them, each run with the same weight.

        Parameters
        ----------
        paths : sequence of str or os.PathLike
            One file a run.
        burn_in, rooted, taxa, resolve, seed, incomplete, progress
            As in `from_file`; taxa and `rooted` are by default those of the first file. Warnings, too, are the same.

        Raises
        ------
        TreeError, SettingsError
            As in `from_file`, or if there is no file.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "1").write_text("((A,B),C,D);"), (folder / "2").write_text("((A,B),C,D); ((A,C),B,D);")
        >>> TreeSample.from_files([folder / "1", folder / "2"]).weights.tolist()
        [0.75, 0.25]
        """
        runs = read_runs(paths, burn_in, rooted, taxa, resolve, seed, incomplete, progress)
        return cls.pooled([cls._collected(*run) for run in runs])

    @classmethod
    def pooled(cls, samples: Sequence[TreeSample]) -> TreeSample:
        """Pool several samples, each with the same weight, in the first one's order of taxa.

        Parameters
        ----------
        samples : sequence of TreeSample
            All rooted or all unrooted, over the same taxa. Branch lengths are kept where all have them.

        Raises
        ------
        TreeError
            If there is no sample, or they differ in taxa or in being rooted.
        """
        first, *_ = samples = comparable(samples)
        starts = np.cumsum([0, *(len(sample.topologies) for sample in samples[:-1])])
        children = np.concatenate([sample.topologies.children for sample in samples])
        lengths = [sample.branch_lengths for sample in samples if sample.branch_lengths is not None]
        return cls._collected(
            Topologies(first.taxa, children, first.rooted),
            np.concatenate([sample.index + start for sample, start in zip(samples, starts, strict=True)]),
            np.concatenate([sample.sample_weights for sample in samples]),
            torch.cat(lengths) if len(lengths) == len(samples) else None,
            sum(sample.num_burn_in for sample in samples),
        )

    @classmethod
    def from_trees(
        cls,
        trees: Sequence[Tree],
        weights: Sequence[float] | np.ndarray | None = None,
        taxa: Sequence[str] | None = None,
    ) -> TreeSample:
        """Make a sample of unrooted trees held in memory.

        Parameters
        ----------
        trees : sequence of Tree
            All over the same taxa, in any order; all with branch lengths or all without.
        weights : sequence of float, optional
            Weights of the trees, at least zero; equal by default.
        taxa : sequence of str, optional
            The order of the taxa; that of the first tree by default.

        Raises
        ------
        TreeError
            If there is no tree, something else is given (such as text), a tree has other taxa, or only some have
            branch lengths.
        SettingsError
            If there are not as many weights, or one is negative.
        """
        topologies, edges = Topologies.from_edges(*edges_of_trees(trees, taxa), rooted=False)
        lengths, index = stacked_lengths(trees), np.arange(len(trees))
        lengths = None if lengths is None else lengths.detach().to("cpu", torch.float64)
        return cls._collected(topologies, index, weights, reordered(lengths, edges, index))

    @classmethod
    def from_topologies(
        cls,
        topologies: Topologies,
        weights: Sequence[float] | np.ndarray | Tensor | None = None,
        branch_lengths: Tensor | None = None,
    ) -> TreeSample:
        """Make a sample of topologies.

        Parameters
        ----------
        topologies : Topologies
            One for each sampled tree; equal ones are counted together.
        weights : sequence of float, optional
            Their weights, at least zero; equal by default. They are divided by their sum.
        branch_lengths : Tensor, optional
            Shape `(topologies, edges)`.

        Raises
        ------
        TreeError
            If there is no topology, or something else is given.
        SettingsError
            If there are not as many weights, or one is negative.
        ShapeError
            If the branch lengths do not fit.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
        >>> TreeSample.from_topologies(all_topologies("ABCD"), [2, 1, 1]).weights.tolist()
        [0.5, 0.25, 0.25]
        """
        if not (isinstance(topologies, Topologies) and len(topologies)):
            kind = type(topologies).__name__
            raise TreeError(f"There is no topology in this {kind}. Remedy: give Topologies; of trees, use from_trees.")
        lengths = None if branch_lengths is None else branch_lengths.detach().to("cpu", torch.float64)
        return cls._collected(topologies, np.arange(len(topologies)), weights, lengths)

    @classmethod
    def _collected(
        cls,
        topologies: Topologies,
        index: np.ndarray,
        weights: Sequence[float] | np.ndarray | Tensor | None,
        lengths: Tensor | None,
        num_burn_in: int = 0,
    ) -> TreeSample:
        distinct, which = topologies.distinct()
        return cls(distinct, which[index], shares(weights, len(index)), lengths, num_burn_in)

    def __repr__(self) -> str:
        kind = "rooted" if self.rooted else "unrooted"
        topologies = f"{len(self.topologies)} {kind} topologies"
        left_out = f"; {self.num_burn_in} trees left out as burn-in" if self.num_burn_in else ""
        return f"TreeSample({self.num_samples} trees, {topologies}, {self.num_taxa} taxa{left_out})"

    def __len__(self) -> int:
        return self.num_samples

    @property
    def taxa(self) -> tuple[str, ...]:
        """Names of the tips."""
        return self.topologies.taxa

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return self.topologies.num_taxa

    @property
    def rooted(self) -> bool:
        """Whether the topologies are rooted."""
        return self.topologies.rooted

    @property
    def num_samples(self) -> int:
        """Number of sampled trees, equal ones and those of weight zero included."""
        return len(self.index)

    @cached_property
    def weights(self) -> np.ndarray:
        """Weight of each distinct topology, shape `(topologies,)`, float64; they sum to one."""
        return np.bincount(self.index, self.sample_weights, minlength=len(self.topologies))

    @cached_property
    def trees(self) -> list[Tree]:
        """The distinct topologies as unrooted trees without branch lengths, in the order of `weights`."""
        return [self.topologies.tree(place) for place in range(len(self.topologies))]

    def sampled_tree(self, sample: int) -> Tree:
        """Return one sampled tree, with its branch lengths where there are any.

        Raises
        ------
        TreeError
            If the trees are rooted.
        SettingsError
            If there is no such sample.
        """
        if not (isinstance(sample, (int, np.integer)) and -self.num_samples <= sample < self.num_samples):
            last = self.num_samples - 1
            raise SettingsError(f"sample={sample!r}: there is no such tree. Remedy: give a number from 0 to {last}.")
        lengths = None if self.branch_lengths is None else self.branch_lengths[sample]
        return self.topologies.tree(int(self.index[sample]), lengths)

    def unrooted(self) -> TreeSample:
        """Dissolve the roots, where there are any; the lengths of the two edges at each add.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
        >>> TreeSample.from_topologies(all_topologies("ABC", rooted=True)).unrooted()
        TreeSample(3 trees, 1 unrooted topologies, 3 taxa)
        """
        if not self.rooted:
            return self
        topologies, lengths = without_roots(self.topologies, self.index, self.branch_lengths)
        return TreeSample._collected(topologies, self.index, self.sample_weights, lengths, self.num_burn_in)

    def rooted_at(self, taxon: str) -> TreeSample:
        """Let all trees hang from an outgroup, with the root in the middle of its edge; `unrooted` undoes it.

        Parameters
        ----------
        taxon : str
            The outgroup.

        Raises
        ------
        TreeError
            If there is no such taxon, or the trees have a root.

        Examples
        --------
        >>> rooted = TreeSample.from_trees([Tree.from_newick("((A:1,B:2):3,C:4,D:5);")]).rooted_at("C")
        >>> rooted.topologies.to_newick(0, rooted.branch_lengths[0])
        '(C:2.0,(D:5.0,(A:1.0,B:2.0):3.0):2.0);'
        """
        topologies, lengths = with_outgroup(self.topologies, taxon, self.index, self.branch_lengths)
        return TreeSample(topologies, self.index, self.sample_weights, lengths, self.num_burn_in)

    def with_taxa(self, taxa: Sequence[str]) -> TreeSample:
        """Return the sample with its taxa in another order.

        Raises
        ------
        TreeError
            If the names are others.
        """
        topologies, edges = self.topologies.with_taxa(taxa)
        lengths = reordered(self.branch_lengths, edges, self.index)
        return TreeSample(topologies, self.index, self.sample_weights, lengths, self.num_burn_in)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the sample as NEXUS; `from_file` reads it back.

        Parameters
        ----------
        path : str or os.PathLike
            With the suffix `.trprobs` the distinct topologies are written, the most probable first; with `.t` or
            `.trees` every sampled tree, with its branch lengths. Weights are written in either.

        Raises
        ------
        SettingsError
            If the suffix is another.
        OutputError
            If the file cannot be written.
        """
        suffix = Path(path).suffix.lower()
        if suffix == ".trprobs":
            order = self.top(len(self.weights))
            write_topologies(path, self.topologies[order], self.weights[order])
        elif suffix in (".t", ".trees"):
            write_chain(path, self.topologies, self.index, self.sample_weights, self.branch_lengths)
        else:
            raise SettingsError(f"{os.fspath(path)}: unknown suffix. Remedy: use '.trprobs', '.trees' or '.t'.")
