"""Mixtures of substitution processes: sites belong to classes, and each class has a process of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self

import torch
from pyro.distributions import Dirichlet
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import unknown_name
from bayeskit.models._substitution_names import PROFILES
from bayeskit.models.phylogenetics._amino_acids import AminoAcidModel
from bayeskit.models.phylogenetics._data_types import PROTEIN, DataType
from bayeskit.models.phylogenetics._site_rates import Categories, one_rate
from bayeskit.models.phylogenetics._substitution import Given, Parameter, SubstitutionModel, VariableSites
from bayeskit.models.phylogenetics._trees import Tree

#: Largest difference from one of the sum of weights; published ones are rounded.
_ROUNDING = 1e-6


class MixtureModel(SubstitutionModel):
    """A substitution model in which each site belongs to one of several classes, with a process of its own.

    The class of a site is unknown: its likelihood is the sum over classes of their weights times the likelihood under
    the process of the class. Branch lengths are expected substitutions per site, averaged over the classes. With site
    rates, a site has a class and, independently, a rate.

    A subclass implements `num_classes`, `weights`, `class_frequencies` and `class_transition_matrices`. `TreeModel`,
    `ForestLikelihood` and what is made of them (`TimeTreeModel`, `PartitionedTreeModel`, `compare_topologies`,
    `variational_inference`) take such models. There is no single rate matrix, so that chains over topologies do not.

    Examples
    --------
    >>> isinstance(ProfileMixture("C10"), MixtureModel)
    True
    """

    #: Whether branches of one tree have processes of their own.
    is_branch_specific: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the parameters, and that weights sum to one."""
        super().__post_init__()
        weights = getattr(self, "class_weights", None)
        if isinstance(weights, Tensor) and bool(((weights.sum(-1) - 1.0).abs() > _ROUNDING).any()):
            raise SettingsError(
                f"{type(self).__name__}, class_weights: {weights.tolist()} do not sum to one. Remedy: divide them by "
                "their sum, or give a Dirichlet prior."
            )

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes of sites."""

    @abstractmethod
    def weights(self, like: Tensor) -> Tensor:
        """Return the probabilities of the classes, shape `(*batch, classes)`, with the dtype and device of `like`."""

    @abstractmethod
    def class_frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies of each class.

        Parameters
        ----------
        like : Tensor
            Sets dtype and device of the result.

        Returns
        -------
        Tensor
            Shape `(*batch, classes, states)`, or `(*batch, 1, states)` if all classes have the same.
        """

    @abstractmethod
    def class_transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities of each class.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, averaged over the classes, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, classes, edges, states, states)`, with the dtype and device of `branch_lengths`.
        """

    def on_tree(self, tree: Tree, edges: Sequence[int]) -> Self:
        """Return the model for branch lengths in the order `edges` of the edges of a tree.

        Raises
        ------
        TreeError
            If a branch that has a process of its own is not in the tree.
        """
        return self

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies over all sites, shape `(*batch, states)`."""
        return (self.weights(like)[..., None] * self.class_frequencies(like)).sum(-2)

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Raise SettingsError: each class has its own."""
        raise self._without_one("rate matrix")

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Raise SettingsError: each class has its own."""
        raise self._without_one("matrix of transition probabilities")

    def _without_one(self, what: str) -> SettingsError:
        name = type(self).__name__
        return SettingsError(
            f"{name}: this calculation needs one {what} for all sites, but {name} has one for each class of sites. "
            "Remedy: use TreeModel, ForestLikelihood, compare_topologies or variational_inference, or choose a model "
            "without classes of sites."
        )


class ClassesAtRates(NamedTuple):
    """Pairs of a rate and a class of sites, in the order of the rates."""

    lengths: Tensor  # at each rate, (rates, *batch, edges)
    frequencies: Tensor  # of each pair, (pairs, *batch, states)
    weights: Tensor  # of each pair, (*batch, pairs)


def classes_at_rates(model: MixtureModel, lengths: Tensor, categories: Categories | None) -> ClassesAtRates:
    """Return the pairs of rates and classes for branch lengths `(*batch, edges)` and rates with the same batch."""
    batch, n = lengths.shape[:-1], model.num_states
    rates, weights, invariant = (one_rate(lengths) if categories is None else categories).expand(batch)
    if invariant is not None:  # each class has frequencies of its own, also at sites that cannot change
        rates = torch.cat([rates, torch.zeros_like(rates[..., :1])], -1)
        weights = torch.cat([weights, invariant[..., None]], -1)
    pairs = weights[..., :, None] * model.weights(lengths)[..., None, :]
    frequencies = model.class_frequencies(lengths).expand(*batch, model.num_classes, n).movedim(-2, 0)
    return ClassesAtRates(
        lengths * rates.movedim(-1, 0)[..., None],
        frequencies.expand(rates.shape[-1], *frequencies.shape).flatten(0, 1),
        pairs.flatten(-2),
    )


def pair_matrices(model: MixtureModel, lengths: Tensor) -> Tensor:
    """Return the matrices of each pair, `(rates, *batch, edges) -> (pairs, *batch, edges, states, states)`."""
    return model.class_transition_matrices(lengths).movedim(-4, 1).flatten(0, 1)


def check_mixture(model: SubstitutionModel) -> None:
    """Raise SettingsError for a mixture with the correction for constant sites, which no likelihood has."""
    if isinstance(model, VariableSites) and isinstance(model.model, MixtureModel):
        raise SettingsError(
            f"VariableSites (+ASC) has no correction for {type(model.model).__name__}, whose sites belong to classes. "
            "Remedy: use a model without classes of sites, or data with their constant sites."
        )


class _Profiles(NamedTuple):
    weights: Tensor  # (classes,), float64
    frequencies: Tensor  # (classes, 20), float64


@lru_cache
def _published_profiles(name: str) -> _Profiles:
    """Return profiles that ship with the package."""
    text = (resources.files(__package__) / "data" / "profiles.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    first = lines.index(name) + 1
    rows = [[float(number) for number in line.split()] for line in lines[first : first + int(name[1:])]]
    table = torch.tensor(rows, dtype=torch.float64)
    return _Profiles(table[:, 0] / table[:, 0].sum(), table[:, 1:])


@dataclass(frozen=True, eq=False)
class ProfileMixture(MixtureModel):
    """Amino-acid replacement with classes of sites that differ in their stationary frequencies: C10 to C60.

    All classes have the same exchangeabilities. `InvariantSites` and `GammaRates` are added as to other models; the
    published profiles were estimated with `GammaRates()`.

    Parameters
    ----------
    profiles : {"C10", "C20", "C30", "C40", "C50", "C60"}, sequence of sequence of float, or Tensor, default "C20"
        Those of Le, Gascuel and Lartillot (2008), or frequencies of each class, shape `(classes, 20)`, above 0, scaled
        to sum to one, in the order of `PROTEIN.states`.
    matrix : str, default "Poisson"
        The exchangeabilities, one of those of `AminoAcidModel`; by default all are equal.
    class_weights : "own", sequence of float, Tensor or TorchDistribution, optional
        Probabilities of the classes, shape `(*batch, classes)`, above 0, with sum one; or their prior, by None
        Dirichlet(1, ..., 1). By default those published with the profiles.

    Raises
    ------
    UnknownNameError
        If there are no such profiles, or there is no such matrix.
    SettingsError
        If frequencies or weights are not above 0, weights do not sum to one, or profiles without a name have no
        weights.
    ShapeError
        If a profile has not twenty frequencies, or there is not one weight for each.

    References
    ----------
    S. Q. Le, O. Gascuel and N. Lartillot (2008), Empirical profile mixture models for phylogenetic reconstruction,
    Bioinformatics 24, 2317-2323.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Alignment, TreeModel
    >>> alignment = Alignment.from_sequences({"A": "MKV", "B": "MRV", "C": "IKI"}, data_type="protein")
    >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"), ProfileMixture("C20", "LG"))
    >>> model.log_likelihood(torch.full((3,), 0.3, dtype=torch.float64))
    tensor(-17.4822, dtype=torch.float64)
    """

    profiles: str | Sequence[Sequence[float]] | Tensor = "C20"
    matrix: str = "Poisson"
    class_weights: Given | str = "own"

    def __post_init__(self) -> None:
        """Check the settings, and take the published weights."""
        if len(self._process.batch_shape) != 1:
            raise SettingsError(
                "profiles: the frequencies are not a table of classes. Remedy: give shape (classes, 20), one row for "
                "each class of sites."
            )
        if isinstance(self.class_weights, str) and self.class_weights == "own" and isinstance(self.profiles, str):
            object.__setattr__(self, "class_weights", _published_profiles(self.profiles).weights)
        super().__post_init__()

    @cached_property
    def _process(self) -> AminoAcidModel:
        """The processes of all classes, which are its batch."""
        if not isinstance(self.profiles, str):
            return AminoAcidModel(self.matrix, torch.as_tensor(self.profiles, dtype=torch.float64))
        if self.profiles not in PROFILES:
            raise unknown_name("set of profiles", self.profiles, PROFILES)
        return AminoAcidModel(self.matrix, _published_profiles(self.profiles).frequencies)

    @property
    def parameters(self) -> MappingProxyType[str, Parameter]:
        """The weights."""
        return MappingProxyType({"class_weights": shares(self.num_classes)})

    @property
    def data_type(self) -> DataType:
        """Amino acids."""
        return PROTEIN

    @property
    def num_classes(self) -> int:
        """Number of profiles."""
        return self._process.batch_shape[0]

    def weights(self, like: Tensor) -> Tensor:
        """Return the probabilities of the classes, shape `(*batch, classes)`, with the dtype and device of `like`."""
        return self._values("class_weights", like)

    def class_frequencies(self, like: Tensor) -> Tensor:
        """Return the profiles, shape `(classes, 20)`, with the dtype and device of `like`."""
        return self._process.frequencies(like)

    def class_transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of each class, shape `(*batch, classes, edges, 20, 20)`."""
        return self._process.transition_matrices(branch_lengths[..., None, :])


def shares(size: int) -> Parameter:
    """Return the parameter of the weights of so many classes."""
    return Parameter(lambda like: Dirichlet(like.new_ones(size)), size=size)
