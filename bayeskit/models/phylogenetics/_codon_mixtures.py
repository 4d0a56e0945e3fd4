"""Codon models in which the ratio of amino-acid changes to silent ones differs between sites or branches."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from pyro.distributions import Beta, Exponential
from torch import Tensor

from bayeskit.errors import SettingsError, TreeError
from bayeskit.extend import whole_number
from bayeskit.models.phylogenetics._codon_models import GY94, SELECTION, exchanges
from bayeskit.models.phylogenetics._data_types import DataType
from bayeskit.models.phylogenetics._mixture_models import MixtureModel, shares
from bayeskit.models.phylogenetics._substitution import Given, Parameter
from bayeskit.models.phylogenetics._trees import Tree

#: Of sites under purifying selection.
_PURIFYING = Parameter(lambda like: Beta(like.new_ones(()), like.new_ones(())), upper=1.0)
#: By how much the ratio exceeds one: exponential with mean one, as in the model Ny98 of MrBayes 3.2.
_EXCESS = Parameter(lambda like: Exponential(like.new_ones(())))


@dataclass(frozen=True, eq=False, kw_only=True)
class CodonMixture(MixtureModel):
    """Base class of mixtures of `GY94` with one ratio of transitions, one set of frequencies and several omegas.

    Branch lengths are expected substitutions per codon, averaged over the classes, so that classes with a larger omega
    change faster, as in PAML.

    Examples
    --------
    >>> isinstance(M2a(), CodonMixture)
    True
    """

    kappa: Given = None
    codon_frequencies: Given | str = "equal"
    genetic_code: str = "standard"

    def __post_init__(self) -> None:
        """Check the settings."""
        object.__setattr__(self, "codon_frequencies", self._process.codon_frequencies)
        super().__post_init__()

    @cached_property
    def _process(self) -> GY94:
        """The process whose parameters are those of each class."""
        return GY94(self.kappa, None, self.codon_frequencies, self.genetic_code)

    @property
    @abstractmethod
    def own_parameters(self) -> Mapping[str, Parameter]:
        """Those that are not of `GY94`."""

    @abstractmethod
    def omegas(self, like: Tensor) -> Tensor:
        """Return the omegas, shape `(*batch, classes)`, with the dtype and device of `like`."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The ratio of transitions, the frequencies and those of the classes."""
        known = self._process.parameters
        return MappingProxyType(
            {"kappa": known["kappa"], "codon_frequencies": known["codon_frequencies"], **self.own_parameters}
        )

    @property
    def data_type(self) -> DataType:
        """Codons of the genetic code."""
        return self._process.data_type

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        size = self.parameters["class_weights"].size
        return 1 if size is None else size

    def weights(self, like: Tensor) -> Tensor:
        """Return the probabilities of the classes, shape `(*batch, classes)`, with the dtype and device of `like`."""
        return self._values("class_weights", like)

    def class_frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 1, codons)`, with the dtype and device of `like`."""
        values = self._values("codon_frequencies", like)
        return (values / values.sum(-1, keepdim=True))[..., None, :]

    def class_transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of each class, shape `(*batch, classes, edges, codons, codons)`."""
        return self._matrices(branch_lengths, self.omegas(branch_lengths.double()))

    def _matrices(self, lengths: Tensor, omegas: Tensor, of_class: Sequence[int] | None = None) -> Tensor:
        """Return the matrices of classes, whose omegas `(*batch, different)` are at the places `of_class`."""
        like = lengths.double()
        kappa, frequencies = self._values("kappa", like), self.class_frequencies(like)
        values = {"kappa": kappa[..., None], "omega": omegas, "codon_frequencies": frequencies}
        # The rate of changes is linear in omega.
        none, one = (self._flow(kappa, frequencies, like.new_tensor(omega)) for omega in (0.0, 1.0))
        speeds = none + omegas * (one - none)
        by_class = speeds if of_class is None else speeds[..., of_class]
        speeds = speeds / (self.weights(like) * by_class).sum(-1, keepdim=True)
        scaled = like[..., None, :] * speeds[..., None]
        matrices = self._process.with_parameters(values).transition_matrices(scaled).to(lengths.dtype)
        return matrices if of_class is None else matrices[..., of_class, :, :, :]

    def _flow(self, kappa: Tensor, frequencies: Tensor, omega: Tensor) -> Tensor:
        """Return the unscaled rate of changes, `(*batch, 1)`, for kappa `(*batch,)`, frequencies `(*batch, 1, n)`."""
        rates = exchanges(kappa, omega, self.data_type)[..., None, :, :]
        return (frequencies * (rates @ frequencies[..., None])[..., 0]).sum(-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class M1a(CodonMixture):
    """The nearly neutral codon model: sites are under purifying selection, or neutral.

    Parameters
    ----------
    omega : float, Tensor or TorchDistribution, optional
        Ratio of the rates of changes with and without another amino acid (dN/dS) at sites under purifying selection,
        shape `(*batch,)`, in (0, 1); or its prior, by default Beta(1, 1). At neutral sites it is 1.
    class_weights : sequence of float, Tensor or TorchDistribution, optional
        Probabilities of both classes, in this order, shape `(*batch, 2)`, above 0, with sum one; or their prior, by
        default Dirichlet(1, 1).
    kappa, codon_frequencies, genetic_code
        As in `GY94`.

    Raises
    ------
    SettingsError
        If values or the support of a prior lie outside the domain, or weights do not sum to one.
    ShapeError
        If there are not two weights, or not one frequency for each codon.
    UnknownNameError
        If there is no such genetic code.

    References
    ----------
    Z. Yang, W. S. W. Wong and R. Nielsen (2005), Bayes empirical Bayes inference of amino acid sites under positive
    selection, Molecular Biology and Evolution 22, 1107-1118.

    Examples
    --------
    >>> M1a(omega=0.1, class_weights=[0.7, 0.3]).omegas(torch.zeros(()))
    tensor([0.1000, 1.0000])
    """

    omega: Given = None
    class_weights: Given = None

    @property
    def own_parameters(self) -> Mapping[str, Parameter]:
        """Omega and the weights."""
        return MappingProxyType({"omega": _PURIFYING, "class_weights": shares(2)})

    def omegas(self, like: Tensor) -> Tensor:
        """Return the omega of each class, shape `(*batch, 2)`, with the dtype and device of `like`."""
        omega = self._values("omega", like)
        return torch.stack([omega, torch.ones_like(omega)], -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class M2a(CodonMixture):
    """The codon model of positive selection: sites are under purifying selection, neutral, or under positive selection.

    With `M1a`, it is a test for sites under positive selection: the difference of the log evidences.

    Parameters
    ----------
    omega : float, Tensor or TorchDistribution, optional
        Ratio of the rates of changes with and without another amino acid (dN/dS) at sites under purifying selection,
        shape `(*batch,)`, in (0, 1); or its prior, by default Beta(1, 1).
    omega_excess : float, Tensor or TorchDistribution, optional
        By how much the ratio exceeds 1 at sites under positive selection, shape `(*batch,)`, above 0; or its prior, by
        default Exponential(1), as in MrBayes 3.2 (Ronquist et al., 2012).
    class_weights : sequence of float, Tensor or TorchDistribution, optional
        Probabilities of sites under purifying selection, of neutral sites, and of sites under positive selection, shape
        `(*batch, 3)`, above 0, with sum one; or their prior, by default Dirichlet(1, 1, 1).
    kappa, codon_frequencies, genetic_code
        As in `GY94`.

    Raises
    ------
    SettingsError
        If values or the support of a prior lie outside the domain, or weights do not sum to one.
    ShapeError
        If there are not three weights, or not one frequency for each codon.
    UnknownNameError
        If there is no such genetic code.

    References
    ----------
    Z. Yang, W. S. W. Wong and R. Nielsen (2005), Bayes empirical Bayes inference of amino acid sites under positive
    selection, Molecular Biology and Evolution 22, 1107-1118.

    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    Examples
    --------
    >>> M2a(omega=0.1, omega_excess=1.5).omegas(torch.zeros(()))
    tensor([0.1000, 1.0000, 2.5000])
    """

    omega: Given = None
    omega_excess: Given = None
    class_weights: Given = None

    @property
    def own_parameters(self) -> Mapping[str, Parameter]:
        """Both omegas and the weights."""
        return MappingProxyType({"omega": _PURIFYING, "omega_excess": _EXCESS, "class_weights": shares(3)})

    def omegas(self, like: Tensor) -> Tensor:
        """Return the omega of each class, shape `(*batch, 3)`, with the dtype and device of `like`."""
        omega, excess = torch.broadcast_tensors(self._values("omega", like), self._values("omega_excess", like))
        return torch.stack([omega, torch.ones_like(omega), 1.0 + excess], -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class M3(CodonMixture):
    """The discrete codon model: each class of sites has an omega of its own.

    Omegas grow from one class to the next, so that no two orders of the classes are the same model.

    Parameters
    ----------
    classes : int, default 3
        At least 2.
    omega_increments : sequence of float, Tensor or TorchDistribution, optional
        The ratio of the rates of changes with and without another amino acid (dN/dS) of the first class, and how much
        each is above the one before, shape `(*batch, classes)`, above 0; or their prior, by default Exponential(1)
        each.
    class_weights : sequence of float, Tensor or TorchDistribution, optional
        Probabilities of the classes, shape `(*batch, classes)`, above 0, with sum one; or their prior, by default
        Dirichlet(1, ..., 1).
    kappa, codon_frequencies, genetic_code
        As in `GY94`.

    Raises
    ------
    SettingsError
        If values or the support of a prior lie outside the domain, weights do not sum to one, or there are fewer than
        two classes.
    ShapeError
        If there is not one increment and one weight for each class, or not one frequency for each codon.
    UnknownNameError
        If there is no such genetic code.

    References
    ----------
    Z. Yang, R. Nielsen, N. Goldman and A.-M. K. Pedersen (2000), Codon-substitution models for heterogeneous selection
    pressure at amino acid sites, Genetics 155, 431-449.

    Examples
    --------
    >>> M3(omega_increments=[0.1, 0.4, 1.5]).omegas(torch.zeros(()))
    tensor([0.1000, 0.5000, 2.0000])
    """

    classes: int = 3
    omega_increments: Given = None
    class_weights: Given = None

    def __post_init__(self) -> None:
        """Check the settings."""
        object.__setattr__(self, "classes", whole_number("classes", self.classes, least=2))
        super().__post_init__()

    @property
    def own_parameters(self) -> Mapping[str, Parameter]:
        """Increments and weights."""
        size = self.classes
        increments = Parameter(lambda like: Exponential(like.new_ones(size)).to_event(1), size=size)
        return MappingProxyType({"omega_increments": increments, "class_weights": shares(size)})

    def omegas(self, like: Tensor) -> Tensor:
        """Return the omega of each class, shape `(*batch, classes)`, with the dtype and device of `like`."""
        return self._values("omega_increments", like).cumsum(-1)


#: A branch: the index of an edge of a `Tree`, or the taxa on one side of it.
Branch = int | str | Sequence[str]


class _Columns(NamedTuple):
    """Places of branch lengths."""

    ahead: list[int]  # of the foreground
    behind: list[int]  # of the others
    order: list[int]  # of each branch among both lists, one after the other


@dataclass(frozen=True, eq=False, kw_only=True)
class _ForegroundMixture(CodonMixture):
    """A codon model in which some branches, the foreground, have omegas of their own."""

    foreground: Branch | Sequence[Branch]
    #: The place of each class among `omegas`, and among `foreground_omegas`.
    of_class: ClassVar[tuple[Sequence[int] | None, Sequence[int] | None]] = (None, None)
    _columns: _Columns | None = field(init=False, repr=False, default=None)

    is_branch_specific: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self._branches:
            raise SettingsError("foreground: there is no branch. Remedy: give the taxa on one side of a branch.")
        super().__post_init__()

    @property
    def _branches(self) -> list[Branch]:
        given: Any = self.foreground
        return [given] if isinstance(given, int | str) or _is_of_names(given) else list(given)

    @abstractmethod
    def foreground_omegas(self, like: Tensor) -> Tensor:
        """Return the different omegas on the foreground, shape `(*batch, different)`, as `like`."""

    def on_tree(self, tree: Tree, edges: Sequence[int]) -> Self:
        """Return the model for branch lengths in the order `edges` of the edges of a tree; TreeError as said there."""
        chosen = {_edge(tree, branch) for branch in self._branches}
        ahead = [place for place, edge in enumerate(edges) if edge in chosen]
        behind = [place for place, edge in enumerate(edges) if edge not in chosen]
        order = sorted(range(len(edges)), key=(ahead + behind).__getitem__)
        made = copy.copy(self)
        object.__setattr__(made, "_columns", _Columns(ahead, behind, order))
        return made

    def class_transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of each class, shape `(*batch, classes, edges, codons, codons)`.

        Raises
        ------
        SettingsError
            If the tree is unknown: `TreeModel` calls `on_tree`.
        """
        if self._columns is None:
            raise SettingsError(
                f"{type(self).__name__}: the branches are those of an unknown tree. Remedy: use TreeModel, or call "
                "on_tree."
            )
        ahead, behind, order = self._columns
        like = branch_lengths.double()
        parts = [
            self._matrices(branch_lengths[..., ahead], self.foreground_omegas(like), self.of_class[1]),
            self._matrices(branch_lengths[..., behind], self.omegas(like), self.of_class[0]),
        ]
        return torch.cat(parts, -3)[..., order, :, :]


def _is_of_names(given: Sequence[object]) -> bool:
    return len(given) > 0 and all(isinstance(taxon, str) for taxon in given)


def _edge(tree: Tree, branch: Branch) -> int:
    """Return the edge of a tree that a branch is; TreeError if there is none."""
    remedy = "Remedy: give the taxa on one side of a branch of the tree, or its index in tree.edge_names."
    if isinstance(branch, int):
        if 0 <= branch < tree.num_edges:
            return branch
        raise TreeError(f"foreground: the tree has no branch {branch}, only 0 to {tree.num_edges - 1}. {remedy}")
    names = {branch} if isinstance(branch, str) else set(branch)
    unknown = sorted(names - set(tree.taxa))
    if unknown:
        raise TreeError(f"foreground: the tree has no taxon {unknown[0]!r}. {remedy}")
    below = [{taxon} for taxon in tree.taxa]
    for children in tree.children:
        below.append(set().union(*(below[child] for child in children)))
    for edge, taxa in enumerate(below[: tree.num_edges]):
        if names in (taxa, set(tree.taxa) - taxa):
            return edge
    raise TreeError(f"foreground: no branch of the tree separates {', '.join(sorted(names))} from the rest. {remedy}")


@dataclass(frozen=True, eq=False, kw_only=True)
class BranchModel(_ForegroundMixture):
    """A codon model with one omega on some branches, the foreground, and another one on all others.

    It is a model on one tree: `TreeModel` and `TimeTreeModel` take it.

    Parameters
    ----------
    foreground : int, str or sequence of str, or sequence of these
        A branch, or several: the taxa on one side of it, or its index in `tree.edge_names`.
    omega : float, Tensor or TorchDistribution, optional
        Ratio of the rates of changes with and without another amino acid (dN/dS) on the other branches, shape
        `(*batch,)`, above 0; or its prior, by default LogNormal(0, 1.25).
    foreground_omega : float, Tensor or TorchDistribution, optional
        The same on the foreground.
    kappa, codon_frequencies, genetic_code
        As in `GY94`.

    Raises
    ------
    SettingsError
        If values or the support of a prior lie outside the domain, or there is no foreground.
    ShapeError
        If there is not one frequency for each codon.
    UnknownNameError
        If there is no such genetic code.
    TreeError
        On use, if a branch of the foreground is not in the tree.

    References
    ----------
    Z. Yang (1998), Likelihood ratio tests for detecting positive selection and application to primate lysozyme
    evolution, Molecular Biology and Evolution 15, 568-573.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Alignment, TreeModel
    >>> alignment = Alignment.from_sequences({"A": "ATG", "B": "ATA", "C": "ACA"}, data_type="codon")
    >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"), BranchModel(foreground="C", kappa=2.0))
    >>> sorted(model.priors)
    ['foreground_omega', 'omega']
    """

    omega: Given = None
    foreground_omega: Given = None

    @property
    def own_parameters(self) -> Mapping[str, Parameter]:
        """Both omegas."""
        return MappingProxyType({"omega": SELECTION, "foreground_omega": SELECTION})

    @property
    def num_classes(self) -> int:
        """One."""
        return 1

    def weights(self, like: Tensor) -> Tensor:
        """Return `(1,)` with the dtype and device of `like`."""
        return like.new_ones(1)

    def omegas(self, like: Tensor) -> Tensor:
        """Return the omega of the other branches, shape `(*batch, 1)`, with the dtype and device of `like`."""
        return self._values("omega", like)[..., None]

    def foreground_omegas(self, like: Tensor) -> Tensor:
        """Return the omega of the foreground, shape `(*batch, 1)`, with the dtype and device of `like`."""
        return self._values("foreground_omega", like)[..., None]


@dataclass(frozen=True, eq=False, kw_only=True)
class BranchSiteModel(_ForegroundMixture):
    """The branch-site codon model A: some sites are under positive selection on some branches, the foreground.

    Sites are under purifying selection everywhere, neutral everywhere, or one of both on other branches and under
    positive selection on the foreground. The test for such sites compares the model with the one without positive
    selection, in which their omega on the foreground is 1: the difference of the log evidences. It is a model on one
    tree: `TreeModel` and `TimeTreeModel` take it.

    Parameters
    ----------
    foreground : int, str or sequence of str, or sequence of these
        A branch, or several: the taxa on one side of it, or its index in `tree.edge_names`.
    positive_selection : bool, default True
        False is the null model of the test, without `omega_excess`.
    omega : float, Tensor or TorchDistribution, optional
        Ratio of the rates of changes with and without another amino acid (dN/dS) at sites under purifying selection,
        shape `(*batch,)`, in (0, 1); or its prior, by default Beta(1, 1).
    omega_excess : float, Tensor or TorchDistribution, optional
        By how much the ratio exceeds 1 under positive selection, shape `(*batch,)`, above 0; or its prior, by default
        Exponential(1).
    class_weights : sequence of float, Tensor or TorchDistribution, optional
        Probabilities of sites under purifying selection everywhere, of sites neutral everywhere, and of sites under
        positive selection on the foreground, shape `(*batch, 3)`, above 0, with sum one; or their prior, by default
        Dirichlet(1, 1, 1). The last are, on other branches, under purifying selection or neutral in proportion to the
        first two.
    kappa, codon_frequencies, genetic_code
        As in `GY94`.

    Raises
    ------
    SettingsError
        If values or the support of a prior lie outside the domain, weights do not sum to one, there is no foreground,
        or the null model is given `omega_excess`.
    ShapeError
        If there are not three weights, or not one frequency for each codon.
    UnknownNameError
        If there is no such genetic code.
    TreeError
        On use, if a branch of the foreground is not in the tree.

    References
    ----------
    J. Zhang, R. Nielsen and Z. Yang (2005), Evaluation of an improved branch-site likelihood method for detecting
    positive selection at the molecular level, Molecular Biology and Evolution 22, 2472-2479.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Alignment, TreeModel
    >>> alignment = Alignment.from_sequences({"A": "ATG", "B": "ATA", "C": "ACA", "D": "ACG"}, data_type="codon")
    >>> tree = Tree.from_newick("((A,B),C,D);")
    >>> models = [BranchSiteModel(foreground=["A", "B"], positive_selection=choice) for choice in (True, False)]
    >>> [sorted(TreeModel(alignment, tree, model).priors) for model in models]
    [['class_weights', 'kappa', 'omega', 'omega_excess'], ['class_weights', 'kappa', 'omega']]
    """

    of_class: ClassVar[tuple[Sequence[int], Sequence[int]]] = ([0, 1, 0, 1], [0, 1, 2, 2])
    positive_selection: bool = True
    omega: Given = None
    omega_excess: Given = None
    class_weights: Given = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.positive_selection and self.omega_excess is not None:
            raise SettingsError(
                "omega_excess: without positive selection, the omega of the foreground is 1. Remedy: leave it out, or "
                "set positive_selection=True."
            )
        super().__post_init__()

    @property
    def own_parameters(self) -> Mapping[str, Parameter]:
        """Both omegas and the weights."""
        excess = {"omega_excess": _EXCESS} if self.positive_selection else {}
        return MappingProxyType({"omega": _PURIFYING, **excess, "class_weights": shares(3)})

    @property
    def num_classes(self) -> int:
        """Four: both kinds of other branches among sites under positive selection are apart."""
        return 4

    def weights(self, like: Tensor) -> Tensor:
        """Return the probabilities of the classes, shape `(*batch, 4)`, with the dtype and device of `like`."""
        two, selected = self._values("class_weights", like).split((2, 1), -1)
        return torch.cat([two, two * (selected / two.sum(-1, keepdim=True))], -1)

    def omegas(self, like: Tensor) -> Tensor:
        """Return the different omegas on other branches, shape `(*batch, 2)`, as `like`."""
        omega = self._values("omega", like)
        return torch.stack([omega, torch.ones_like(omega)], -1)

    def foreground_omegas(self, like: Tensor) -> Tensor:
        """Return the different omegas on the foreground, shape `(*batch, 3)`, as `like`."""
        omega = self._values("omega", like)
        excess = self._values("omega_excess", like) if self.positive_selection else torch.zeros_like(omega)
        omega, excess = torch.broadcast_tensors(omega, excess)
        return torch.stack([omega, torch.ones_like(omega), 1.0 + excess], -1)
