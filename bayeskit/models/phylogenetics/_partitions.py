"""Subsets of sites with their own substitution models and site rates, on one tree."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from numpy.typing import NDArray
from pyro.distributions import Dirichlet, Exponential, TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import AlignmentError, DataWarning, SettingsError, ShapeError
from bayeskit.extend import warn_user
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._data_files import FileData, by_states
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._site_rates import SiteRates
from bayeskit.models.phylogenetics._site_sets import ranges
from bayeskit.models.phylogenetics._substitution import (
    JC69,
    Given,
    Mk,
    Parameter,
    SubstitutionModel,
    VariableSites,
)
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._tree_model import TreeModel
from bayeskit.models.phylogenetics._trees import Tree
from bayeskit.models.phylogenetics._variable_sites import sites_left_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARES = "rate_shares"
#: Names of what subsets may share beside the parameters of their models.
_OF_BRANCHES = ("relative_rates", "branch_lengths")


class Partition:
    """Subsets of the sites of an alignment, with substitution models, site rates and relative rates.

    A parameter of one subset is called by its name and the name of the subset, such as `"kappa_first"`; a linked
    parameter has one value for all subsets and keeps its name, `"kappa"`; one that is linked in some of them only has
    all their names, `"kappa_first_third"`.

    Parameters
    ----------
    subsets : mapping of str to Alignment
        As `Alignment.partitioned` returns them.
    substitution : SubstitutionModel or mapping of str to SubstitutionModel, default JC69()
        For all subsets, or by subset.
    site_rates : SiteRates or mapping of str to SiteRates or None, optional
        For all subsets, or by subset, where a missing one has equal rates. By default all sites of a subset have one
        rate.
    linked : collection of str, or mapping of str to collection of collections of str
        Names of parameters that are linked in all subsets that have them; or groups of linked subsets by parameter,
        such as `{"kappa": [("first", "second")]}`. By default none. Subsets that are linked in `"relative_rates"` have
        one rate, such as the characters of one matrix beside a gene; those that are linked in `"branch_lengths"` have
        the same lengths where subsets have their own.
    relative_rates : sequence of float, Tensor or TorchDistribution, optional
        Rate of each subset, or of each of `rate_groups`, by which its branch lengths are multiplied, shape
        `(groups,)`; numbers are used as they are. Or the prior of the shares `rate * sites of the group / all sites`, a
        Dirichlet distribution, as in MrBayes (`prset ratepr`): the mean rate over all sites is one. By default all
        rates are one.

    Attributes
    ----------
    subsets : dict of str to Alignment
    substitution : dict of str to SubstitutionModel
    site_rates : dict of str to SiteRates or None
    relative_rates : Tensor, TorchDistribution or None
    linked : dict of str to tuple of tuple of str
        Groups of linked subsets by parameter, each of at least two.

    Raises
    ------
    SettingsError
        If there is no subset, a name is unknown, priors of a linked parameter differ, names of parameters clash, or
        `relative_rates` are not positive.
    ShapeError
        If there is not one relative rate for each of `rate_groups`.

    References
    ----------
    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import HKY85, GammaRates, primates
    >>> alignment, tree = primates()
    >>> subsets = alignment.partitioned({"coding": range(457), "others": range(457, 898)})
    >>> partition = Partition(subsets, HKY85(), {"coding": GammaRates()}, linked=["kappa"])
    >>> sorted(partition.priors(torch.empty(0)))
    ['base_frequencies_coding', 'base_frequencies_others', 'kappa', 'shape_coding']

    Characters with two and with three states have one rate beside the bases:

    >>> rows = {"A": "0010", "B": "0111", "C": "1020", "D": "1?21"}
    >>> characters = Partition.of_characters(Alignment.from_sequences(rows, data_type="standard"))
    >>> bases = Alignment.from_sequences({"A": "ACGTA", "B": "ACGCA", "C": "AGTCA", "D": "AGTTA"})
    >>> Partition(
    ...     {"bases": bases} | characters.subsets, {"bases": HKY85()} | characters.substitution,
    ...     linked=characters.linked, relative_rates=Dirichlet(torch.ones(2)),
    ... ).rate_groups
    (('bases',), ('states_2', 'states_3'))
    """

    def __init__(
        self,
        subsets: Mapping[str, Alignment],
        substitution: SubstitutionModel | Mapping[str, SubstitutionModel] | None = None,
        site_rates: SiteRates | Mapping[str, SiteRates | None] | None = None,
        *,
        linked: Collection[str] | Mapping[str, Collection[Collection[str]]] = (),
        relative_rates: Given = None,
    ) -> None:
        if not (isinstance(subsets, Mapping) and subsets):
            raise SettingsError(
                f"subsets: {subsets!r:.60} are not subsets of sites. Remedy: give alignment.partitioned(...)."
            )
        self.subsets = dict(subsets)
        self.substitution = {
            name: JC69() if model is None else model for name, model in self._by_subset("substitution", substitution)
        }
        self.site_rates = dict(self._by_subset("site_rates", site_rates))
        self._names = self._named(linked)
        number = len(self.rate_groups)
        rates = Parameter(lambda like: Dirichlet(like.new_ones(number)), size=number)
        self.relative_rates = rates.checked("Partition, relative_rates", relative_rates)
        if isinstance(self.relative_rates, torch.distributions.Distribution):
            support: Any = self.relative_rates.support
            if support is not constraints.simplex:
                raise SettingsError(
                    f"relative_rates: {self.relative_rates} is not a prior of shares. Remedy: give a Dirichlet "
                    "distribution, with one concentration for each subset or group of subsets with one rate."
                )

    @classmethod
    def of_characters(
        cls,
        alignment: Alignment,
        *,
        ordered: Sequence[int] | NDArray[np.integer[Any]] = (),
        coding: str = "all",
        site_rates: SiteRates | None = None,
    ) -> Partition:
        """Divide morphological characters by their numbers of states, for the model of Lewis (Mk, Mkv).

        A character has the states up to the last one that a taxon shows, two at least; a character that is missing in
        a taxon shows nothing there. Characters share branch lengths and site rates: they are `linked` in all of them.

        Parameters
        ----------
        alignment : Alignment
            Standard data.
        ordered : sequence of int
            Sites of the ordered characters, counted from 0, in which only neighbouring states change into each other.
        coding : {"all", "variable", "informative", "noabsence"}, default "all"
            Which characters can be in the data; see `VariableSites`. The others are left out, with a warning.
        site_rates : SiteRates, optional
            One for all characters; by default all have the same rate.

        Returns
        -------
        Partition
            Subsets `states_2`, `states_3` and so on, and `ordered_3` and so on.

        Raises
        ------
        AlignmentError
            If the data are no standard characters, none is left, or there is no such site.
        SettingsError
            If `coding` is unknown.

        Warns
        -----
        DataWarning
            If characters are left out; they are named, counted from 1.

        References
        ----------
        P. O. Lewis (2001), A likelihood approach to estimating phylogeny from discrete morphological character data,
        Systematic Biology 50, 913-925.

        Examples
        --------
        >>> rows = {"A": "0010", "B": "0111", "C": "1020", "D": "1?30"}
        >>> alignment = Alignment.from_sequences(rows, data_type="standard")
        >>> Partition.of_characters(alignment, ordered=[2], coding="variable")
        Partition(states_2: 3 sites, VariableSites; ordered_4: 1 sites, VariableSites)
        """
        if not isinstance(alignment, Alignment) or alignment.data_type.name != "standard":
            kind = getattr(alignment, "data_type", type(alignment).__name__)
            raise AlignmentError(f"The data are {kind}, not standard characters. Remedy: give them as Partition(...).")
        in_order = alignment.site_indices(ordered, "ordered")
        if coding != "all":
            VariableSites(Mk(2), coding)  # an unknown one is an error
            left_out = sites_left_out(alignment, coding)
            if len(left_out):
                warn_user(
                    f"The characters {ranges(left_out)} (counted from 1) cannot be in data of coding={coding!r}, and "
                    "are left out.",
                    DataWarning,
                )
            kept = np.setdiff1d(np.arange(alignment.num_sites), left_out)
            if not len(kept):
                raise AlignmentError(f"No character can be in data of coding={coding!r}. Remedy: use coding='all'.")
            alignment, in_order = alignment.select_sites(kept), np.flatnonzero(np.isin(kept, in_order))
        found = by_states(alignment, in_order, coding)
        subsets = {name: subset for name, (subset, _) in found.items()}
        models = {name: model for name, (_, model) in found.items()}
        shared = {} if site_rates is None else site_rates.priors(torch.empty(0, dtype=torch.float64))
        return cls(subsets, models, site_rates, linked=[*shared, *_OF_BRANCHES])

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        models: Mapping[str, SubstitutionModel | str] | SubstitutionModel | str | None = None,
        site_rates: Mapping[str, SiteRates] | SiteRates | None = None,
        coding: Mapping[str, str] | str | None = None,
        subsets: Mapping[str, Sequence[int] | NDArray[np.integer[Any]]] | str | os.PathLike[str] | None = None,
    ) -> Partition:
        r"""Read the data of a file, of one type or several, with the usual model of each type.

        Bases have JC69, amino acids LG, restriction sites `Binary`, and morphological characters Mk with the states
        that each character shows, in subsets as those of `of_characters`. Characters are ordered where an active
        TYPESET, OPTIONS DEFTYPE, or CTYPE of a MRBAYES or PAUP block says so. The usual coding of characters is
        "variable" if none of them may be constant, and that of restriction sites "noabsence" if none of them may be
        absent in all taxa; else it is "all": so none is left out. Settings of a MrBayes block are not used; see
        `MrBayesBlock`.

        Parameters
        ----------
        path : str or os.PathLike
            A file that `read_matrices` reads.
        models : mapping of str to SubstitutionModel or str, optional
            Models by type ("DNA", "protein", "standard", "restriction"), or by name as in `read_matrices`, which goes
            first; or one, for a file with data of one type. Texts are those of `parse_substitution`, such as "GTR+G4";
            "Mk" and "Mkv" mean the states that each character shows, with coding "all" and "variable"; "Binary" is for
            restriction sites. An object is the model of all characters, ordered or not.
        site_rates : mapping of str to SiteRates, or SiteRates, optional
            By type or name, or for all; characters of one matrix share its parameters, others do not. They are also
            linked in relative rates and branch lengths of their own.
        coding : mapping of str to str, or str, optional
            Coding of standard and restriction data, as in `of_characters`, by type or name, or for both.
        subsets : mapping of str to sequence of int, or path, optional
            Divides the sites further, as in `Alignment.partitioned`, each subset of one type; the sites are counted
            through all matrices of the file. `models` and the others are then by type or by subset.

        Returns
        -------
        Partition

        Raises
        ------
        AlignmentError
            If the file is missing or malformed, characters are of a type such as irreversible or a step matrix, a
            subset has sites of two types, or no character can be in data of the coding.
        SettingsError
            If there are no such data, a coding is unknown, or a model is for another type of data.

        Warns
        -----
        DataWarning
            If characters are left out by `coding`; they are named, counted from 1.

        References
        ----------
        P. O. Lewis (2001), A likelihood approach to estimating phylogeny from discrete morphological character data,
        Systematic Biology 50, 913-925.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "mixed.nex"
        >>> _ = path.write_text(
        ...     "#NEXUS\nbegin data;\ndimensions ntax=3 nchar=7;\nformat datatype=mixed(DNA:1-4,standard:5-7);\n"
        ...     "matrix\nA ACGT010\nB ACGA112\nC ACGA001\n;\nend;\nbegin mrbayes; ctype ordered: 7; end;\n"
        ... )
        >>> Partition.from_file(path, models={"DNA": "HKY85+G4"})
        Partition(DNA: 4 sites, HKY85, GammaRates; states_2: 2 sites, VariableSites; ordered_3: 1 sites, VariableSites)
        """
        found = FileData(path, models, site_rates, coding, subsets)
        return cls(found.subsets, found.substitution, found.site_rates, linked=found.linked)

    def __repr__(self) -> str:
        parts = [
            f"{name}: {alignment.num_sites} sites, {type(self.substitution[name]).__name__}"
            + ("" if self.site_rates[name] is None else f", {type(self.site_rates[name]).__name__}")
            for name, alignment in self.subsets.items()
        ]
        return f"Partition({'; '.join(parts)})"

    @property
    def taxa(self) -> tuple[str, ...]:
        """Taxa in the order of the first subset."""
        return next(iter(self.subsets.values())).taxa

    @property
    def num_taxa(self) -> int:
        """Number of taxa."""
        return len(self.taxa)

    @property
    def num_sites(self) -> int:
        """Number of sites of all subsets."""
        return sum(alignment.num_sites for alignment in self.subsets.values())

    @property
    def rate_groups(self) -> tuple[tuple[str, ...], ...]:
        """Subsets with one relative rate, in the order of the first of each group."""
        return self._groups_of("relative_rates")

    @property
    def length_groups(self) -> tuple[tuple[str, ...], ...]:
        """Subsets with the same branch lengths where they are separate, in the order of the first of each group."""
        return self._groups_of("branch_lengths")

    def _groups_of(self, name: str) -> tuple[tuple[str, ...], ...]:
        linked = {subset: group for group in self.linked.get(name, ()) for subset in group}
        return tuple(dict.fromkeys(linked.get(subset, (subset,)) for subset in self.subsets))

    def _group_indices(self, groups: Sequence[Collection[str]]) -> list[int]:
        """Return the group of each subset."""
        return [next(place for place, group in enumerate(groups) if subset in group) for subset in self.subsets]

    @property
    def length_indices(self) -> list[int]:
        """Place of each subset's group in `length_groups`, one for each subset."""
        return self._group_indices(self.length_groups)

    def priors(self, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of all parameters without a value.

        Parameters
        ----------
        like : Tensor
            Sets dtype and device of the default priors.

        Returns
        -------
        dict of str to TorchDistribution
            By name: parameters of the models, and `"rate_shares"`.
        """
        priors = {
            self._names[subset][name]: prior
            for subset in self.subsets
            for name, prior in self._own_priors(subset, like).items()
        }
        if isinstance(self.relative_rates, torch.distributions.Distribution):
            priors[_SHARES] = self.relative_rates
        return priors

    def rates(self, values: Mapping[str, Tensor], like: Tensor) -> Tensor | None:
        """Return the rates of the subsets.

        Parameters
        ----------
        values : mapping of str to Tensor
            Holds `"rate_shares"`, shape `(*batch, groups)`, if they have a prior.
        like : Tensor
            Sets dtype and device.

        Returns
        -------
        Tensor or None
            Shape `(*batch, subsets)`; None if all are one.
        """
        if self.relative_rates is None:
            return None
        of_subsets = self._group_indices(self.rate_groups)
        if isinstance(self.relative_rates, Tensor):
            return self.relative_rates.to(like)[..., of_subsets]
        sizes = [sum(self.subsets[name].num_sites for name in group) for group in self.rate_groups]
        return (values[_SHARES].to(like) * (self.num_sites / torch.tensor(sizes).to(like)))[..., of_subsets]

    def arguments(
        self, branch_lengths: Tensor, values: Mapping[str, Tensor], separate: bool = False
    ) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Yield name, branch lengths and parameters of each subset.

        Parameters
        ----------
        branch_lengths : Tensor
            Shape `(*batch, edges)`, of rate one; if `separate`, `(*batch, length groups, edges)`.
        values : mapping of str to Tensor
            A value for each of `priors`.
        separate : bool, default False

        Raises
        ------
        SettingsError
            If a value is missing, or a name is unknown.
        """
        known = {name for own in self._names.values() for name in own.values()}
        known |= {_SHARES} if isinstance(self.relative_rates, torch.distributions.Distribution) else set()
        if values.keys() != known:
            raise SettingsError(
                f"The model's parameters are {sorted(known)}, but values are given for {sorted(values)}. Remedy: give "
                "a value for each parameter, by name; set fixed parameters when making the model."
            )
        rates, groups = self.rates(values, branch_lengths), self.length_indices
        for place, subset in enumerate(self.subsets):
            lengths = branch_lengths[..., groups[place], :] if separate else branch_lengths
            lengths = lengths if rates is None else lengths * rates[..., place, None]
            yield subset, lengths, {name: values[sampled] for name, sampled in self._names[subset].items()}

    def _by_subset(self, place: str, given: Any) -> list[tuple[str, Any]]:
        """Return a model for each subset."""
        if not isinstance(given, Mapping):
            return [(name, given) for name in self.subsets]
        unknown = [name for name in given if name not in self.subsets]
        if unknown:
            raise SettingsError(
                f"{place}: there is no subset {unknown[0]!r}. Remedy: choose from {', '.join(self.subsets)}."
            )
        return [(name, given.get(name)) for name in self.subsets]

    def _own_priors(self, subset: str, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of the models of a subset, by their own names."""
        site_rates = self.site_rates[subset]
        return self.substitution[subset].priors(like) | ({} if site_rates is None else site_rates.priors(like))

    def _named(self, linked: Any) -> dict[str, dict[str, str]]:
        """Return the name of each parameter of each subset among all parameters."""
        owners: dict[str, dict[str, TorchDistribution]] = {}
        for subset in self.subsets:
            for name, prior in self._own_priors(subset, torch.empty(0, dtype=torch.float64)).items():
                owners.setdefault(name, {})[subset] = prior
        groups = self._groups(linked, owners)
        names: dict[str, dict[str, str]] = {subset: {} for subset in self.subsets}
        taken = {_SHARES, "branch_lengths", "relative_rates", "alignment"}
        for name, priors in owners.items():
            apart = [(subset,) for subset in priors if not any(subset in group for group in groups.get(name, ()))]
            for group in [*groups.get(name, ()), *apart]:
                everywhere = len(group) == len(priors) and len(group) > 1
                sampled = name if everywhere else "_".join([name, *group])
                if sampled in taken:
                    raise SettingsError(f"Two parameters would be called {sampled!r}. Remedy: rename a subset.")
                taken.add(sampled)
                for subset in group:
                    if not _same(priors[group[0]], priors[subset]):
                        raise SettingsError(
                            f"linked: {name!r} has different priors in {group[0]!r} and {subset!r}. Remedy: give both "
                            "the same prior, or do not link them."
                        )
                    names[subset][name] = sampled
        self.linked = {name: tuple(group for group in found if len(group) > 1) for name, found in groups.items()}
        return names

    def _groups(self, linked: Any, owners: Mapping[str, Collection[str]]) -> dict[str, list[tuple[str, ...]]]:
        """Return groups of subsets by parameter; SettingsError for names that there are not."""
        if isinstance(linked, str):
            raise SettingsError(f"linked: {linked!r} is one name. Remedy: give a list of names, such as [{linked!r}].")
        owners = {**owners, **dict.fromkeys(_OF_BRANCHES, self.subsets)}
        asked = linked if isinstance(linked, Mapping) else {name: [owners.get(name, ())] for name in linked}
        found: dict[str, list[tuple[str, ...]]] = {}
        for name, groups in asked.items():
            if name not in owners:
                raise SettingsError(f"linked: no subset samples {name!r}. Remedy: choose from {', '.join(owners)}.")
            members = [subset for group in groups for subset in group]
            wrong = [subset for subset in members if subset not in owners[name] or members.count(subset) > 1]
            if wrong:
                raise SettingsError(
                    f"linked: {name!r} is not sampled in {wrong[0]!r}, or this subset is in two groups. Remedy: give "
                    f"groups of the subsets {', '.join(owners[name])}."
                )
            found[name] = [
                tuple(subset for subset in owners[name] if subset in set(group)) for group in groups if group
            ]
        return found


def _same(one: Any, other: Any) -> bool:
    """Whether two priors are the same distribution."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, torch.distributions.TransformedDistribution | torch.distributions.Independent):
        return _same(one.base_dist, other.base_dist) and vars(one).get("transforms") == vars(other).get("transforms")
    constrained = getattr(one, "arg_constraints", {})
    return bool(constrained) and all(_same(getattr(one, name), getattr(other, name)) for name in constrained)


class PartitionedTreeModel:
    """Pyro model of a partitioned alignment on a fixed unrooted topology.

    The model samples `"branch_lengths"`, shape `(edges,)`, and the parameters of the partition; with a prior of
    relative rates, `"rate_shares"`, and the deterministic site `"relative_rates"`. The factor `"alignment"` adds the
    log-likelihood, the sum over subsets of that of a `TreeModel`.

    Parameters
    ----------
    partition : Partition
    tree : Tree
        The topology; its branch lengths are not used. Branch lengths are in the order of `tree.edge_names`.
    branch_length_prior : TorchDistribution, optional
        As in `TreeModel`: by default exponential with rate 10.
    separate_branch_lengths : bool, default False
        Each subset, or each of `partition.length_groups`, has its own branch lengths, with the same prior:
        `"branch_lengths"` has shape `(groups, edges)`.
    dtype : torch.dtype, default torch.float64
    device : torch.device or str, default "cpu"

    Attributes
    ----------
    models : dict of str to TreeModel
        The model of each subset.
    priors : dict of str to TorchDistribution
        Priors of the sampled parameters other than branch lengths.

    Raises
    ------
    TreeError
        If the tree and a subset have different taxa.
    SettingsError
        If an argument has the wrong type, or separate branch lengths are combined with relative rates.

    References
    ----------
    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import HKY85, primates
    >>> alignment, tree = primates()
    >>> subsets = alignment.partitioned({"coding": range(457), "others": range(457, 898)})
    >>> partition = Partition(subsets, HKY85(), linked=["base_frequencies"], relative_rates=Dirichlet(torch.ones(2)))
    >>> sorted(PartitionedTreeModel(partition, tree).priors)
    ['base_frequencies', 'kappa_coding', 'kappa_others', 'rate_shares']
    """

    #: Names of factors that are normalised log probabilities of data.
    normalised_factors = frozenset({"alignment"})

    def __init__(
        self,
        partition: Partition,
        tree: Tree,
        branch_length_prior: TorchDistribution | None = None,
        *,
        separate_branch_lengths: bool = False,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_partition(partition)
        if separate_branch_lengths:
            check_separate_lengths(partition)
        self.partition, self.tree, self.separate_branch_lengths = partition, tree, separate_branch_lengths
        self._like = torch.empty(0, dtype=dtype, device=device)
        if branch_length_prior is None:
            branch_length_prior = Exponential(self._like.new_tensor(10.0))
        self.models = {
            name: TreeModel(
                alignment,
                tree,
                partition.substitution[name],
                branch_length_prior,
                site_rates=partition.site_rates[name],
                dtype=dtype,
                device=device,
            )
            for name, alignment in partition.subsets.items()
        }
        self.branch_length_prior: TorchDistribution = next(iter(self.models.values())).branch_length_prior
        self.priors = partition.priors(self._like)

    def __repr__(self) -> str:
        sampled = ", ".join(["branch_lengths", *self.priors])
        return f"PartitionedTreeModel({self.partition!r}, {self.tree.num_edges} branches; sampled: {sampled})"

    @property
    def element_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the branch lengths, where all subsets share them, and of the shares."""
        return {"branch_lengths": self.tree.edge_names, _SHARES: tuple(map("_".join, self.partition.rate_groups))}

    def plot_values(self, values: Mapping[str, Tensor], ax: Axes) -> tuple[str, str] | None:
        """Plot the tree with branch lengths `values["branch_lengths"]`, where all subsets share them."""
        if self.separate_branch_lengths:
            return None
        return next(iter(self.models.values())).plot_values(values, ax)

    def __call__(self) -> Tensor:
        """Sample branch lengths and parameters, add the log-likelihood, and return the branch lengths."""
        prior = self.branch_length_prior
        if not prior.event_shape:
            prior = prior.expand([self.tree.num_edges]).to_event(1)
        if self.separate_branch_lengths:
            prior = prior.expand([len(self.partition.length_groups)]).to_event(1)
        branch_lengths = pyro.sample("branch_lengths", prior)
        parameters = {name: pyro.sample(name, prior) for name, prior in self.priors.items()}
        rates = self.partition.rates(parameters, self._like) if _SHARES in parameters else None
        if rates is not None:
            pyro.deterministic("relative_rates", rates, event_dim=1)
        pyro.factor("alignment", self.log_likelihood(branch_lengths, **parameters))
        return branch_lengths

    def log_likelihood(self, branch_lengths: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, at least 0, in the order of `tree.edge_names`: shape `(*batch, edges)`, or
            `(*batch, length groups, edges)` if they are separate.
        **parameters : Tensor
            A value for each of `priors`, shape `(*batch, *event_shape)`.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*batch)`. Differentiable once.

        Raises
        ------
        ShapeError
            If branch lengths or a parameter have another shape.
        SettingsError
            If a parameter is missing or is not in `priors`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> subsets = alignment.partitioned({"first": [0, 1], "last": [2, 3]})
        >>> lengths = torch.full((3,), 0.1, dtype=torch.float64)
        >>> model = PartitionedTreeModel(Partition(subsets, relative_rates=[1.0, 2.0]), Tree.from_newick("(A,B,C);"))
        >>> model.log_likelihood(lengths)
        tensor(-9.6524, dtype=torch.float64)
        """
        terms = [
            self.models[name].log_likelihood(lengths, **own)
            for name, lengths, own in self._arguments(branch_lengths, parameters)
        ]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0)

    def factor_terms(self, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the terms of the factor `"alignment"` by site pattern of each subset, for pointwise estimators.

        Parameters
        ----------
        values : mapping of str to Tensor
            Values of `"branch_lengths"` and each of `priors`, shape `(*batch, *event_shape)`.

        Returns
        -------
        dict of str to tuple of Tensor
            Log-likelihoods, shape `(*batch, patterns)`, the patterns of one subset after those of another, and number
            of sites with each pattern, shape `(patterns,)`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGA", "B": "ACGA", "C": "AC-A"})
        >>> partition = Partition(alignment.partitioned({"first": [0, 1], "last": [2, 3]}))
        >>> model = PartitionedTreeModel(partition, Tree.from_newick("(A,B,C);"))
        >>> model.factor_terms({"branch_lengths": torch.full((3,), 0.1, dtype=torch.float64)})["alignment"][1]
        tensor([1., 1., 1., 1.], dtype=torch.float64)
        """
        parameters = {name: values[name] for name in self.priors}
        terms = [
            self.models[name].pattern_log_likelihoods(lengths, **own)
            for name, lengths, own in self._arguments(values["branch_lengths"], parameters)
        ]
        weights = torch.cat([alignment.weights for alignment in self.partition.subsets.values()])
        return {"alignment": (torch.cat(terms, -1), weights.to(self._like))}

    def _arguments(
        self, branch_lengths: Tensor, parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Yield name, branch lengths and parameters of each subset."""
        expected: tuple[int, ...] = (self.tree.num_edges,)
        if self.separate_branch_lengths:
            expected = (len(self.partition.length_groups), *expected)
        for name, value in {"branch_lengths": branch_lengths, **parameters}.items():
            if not isinstance(value, Tensor):
                raise ShapeError(
                    f"{name}: {type(value).__name__} is not a tensor. Remedy: give torch.tensor(..., "
                    "dtype=torch.float64)."
                )
        if branch_lengths.shape[-len(expected) :] != expected:
            raise ShapeError(
                f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit the model. Remedy: give shape "
                f"(*batch, {', '.join(map(str, expected))})."
            )
        return self.partition.arguments(branch_lengths.to(self._like), parameters, self.separate_branch_lengths)


class PartitionedForestLikelihood:
    """Log-likelihood of a partitioned alignment on many topologies in one call.

    It is the sum over subsets of that of a `ForestLikelihood`.

    Parameters
    ----------
    partition : Partition
    separate_branch_lengths : bool, default False
        As in `PartitionedTreeModel`.
    dtype, device, compile, cache_bytes
        As in `ForestLikelihood`; the size of the cache is that of all subsets together.

    Attributes
    ----------
    likelihoods : dict of str to ForestLikelihood
        The likelihood of each subset.

    Raises
    ------
    SettingsError
        If `partition` has another type, or a setting is wrong.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "AC", "B": "AC", "C": "CC", "D": "CA"})
    >>> partition = Partition(alignment.partitioned({"first": [0], "last": [1]}), relative_rates=[0.5, 1.5])
    >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);"), Tree.from_newick("((A,C),B,D);")])
    >>> lengths = torch.full((2, topologies.num_edges), 0.1, dtype=torch.float64)
    >>> PartitionedForestLikelihood(partition).log_likelihood(topologies, lengths)
    tensor([-10.6826, -14.0836], dtype=torch.float64)
    """

    def __init__(
        self,
        partition: Partition,
        *,
        separate_branch_lengths: bool = False,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        compile: bool = True,
        cache_bytes: int = 2**28,
    ) -> None:
        _check_partition(partition)
        if separate_branch_lengths:
            check_separate_lengths(partition)
        self.partition, self.separate_branch_lengths = partition, separate_branch_lengths
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.likelihoods = {
            name: ForestLikelihood(
                alignment,
                partition.substitution[name],
                site_rates=partition.site_rates[name],
                dtype=dtype,
                device=device,
                compile=compile,
                cache_bytes=cache_bytes // len(partition.subsets),
            )
            for name, alignment in partition.subsets.items()
        }

    def log_likelihood(self, topologies: Topologies, branch_lengths: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment on each topology.

        Parameters
        ----------
        topologies : Topologies
        branch_lengths : Tensor
            Shape `(*sample, topologies, edges)`, at least 0, in the edge order of `Topologies`; or `(*sample,
            topologies, length groups, edges)` if they are separate.
        **parameters : Tensor
            A value for each of `partition.priors`, shape `(*batch, *event_shape)`, where `batch` broadcasts with
            `(*sample, topologies)`.

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
        of_subsets = self.partition.arguments(branch_lengths.to(self._like), parameters, self.separate_branch_lengths)
        terms = [self.likelihoods[name].log_likelihood(topologies, lengths, **own) for name, lengths, own in of_subsets]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0)


def subsets_of(data: Alignment | Partition) -> dict[str, Alignment]:
    """Return the alignment, without a name, or the subsets of a partition, all with taxa in the order of the first."""
    if isinstance(data, Alignment):
        return {"": data}
    return {name: one if one.taxa == data.taxa else one.select(data.taxa) for name, one in data.subsets.items()}


def sites_of_lengths(data: Alignment | Partition, separate_branch_lengths: bool) -> Tensor:
    """Return the number of sites with each set of branch lengths, `(sets,)`, float64."""
    if not (isinstance(data, Partition) and separate_branch_lengths):
        return torch.tensor([data.num_sites], dtype=torch.float64)
    sites = torch.zeros(len(data.length_groups), dtype=torch.float64)
    own = torch.tensor([subset.num_sites for subset in data.subsets.values()], dtype=torch.float64)
    return sites.index_add(0, torch.tensor(data.length_indices), own)


def forest_likelihood(
    data: Alignment | Partition,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
    *,
    separate_branch_lengths: bool = False,
    cache_bytes: int = 2**28,
) -> ForestLikelihood | PartitionedForestLikelihood:
    """Return the likelihood of an alignment, or that of a partition, which has its own models."""
    if isinstance(data, Partition):
        apart = separate_branch_lengths
        return PartitionedForestLikelihood(data, separate_branch_lengths=apart, cache_bytes=cache_bytes)
    return ForestLikelihood(data, substitution, site_rates=site_rates, cache_bytes=cache_bytes)


def check_separate_lengths(data: object) -> Partition:
    """Return data; SettingsError if their subsets cannot have branch lengths of their own."""
    if not isinstance(data, Partition):
        raise SettingsError(
            f"separate_branch_lengths: {type(data).__name__} has no subsets. Remedy: give "
            "Partition(alignment.partitioned(...)), or leave out separate_branch_lengths."
        )
    if data.relative_rates is not None:
        raise SettingsError(
            "relative_rates are not supported beside separate_branch_lengths. Remedy: use one of the two."
        )
    return data


def _check_partition(partition: object) -> None:
    """Raise SettingsError for anything but a partition."""
    if not isinstance(partition, Partition):
        raise SettingsError(
            f"partition: {type(partition).__name__} has the wrong type. Remedy: give "
            "Partition(alignment.partitioned(...))."
        )
