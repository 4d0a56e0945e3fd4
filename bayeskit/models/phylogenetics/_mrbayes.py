"""The MrBayes block of a NEXUS file: what it asks for, as models of this package."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from pyro.distributions import Beta, Dirichlet, Exponential, TorchDistribution, TransformedDistribution, Uniform
from torch import Tensor
from torch.distributions.transforms import ExpTransform, SigmoidTransform

from bayeskit.errors import AlignmentError, BayeskitError, ConversionWarning, TreeError
from bayeskit.extend import warn_user
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._amino_acids import AminoAcidModel
from bayeskit.models.phylogenetics._branch_length_priors import GammaDirichlet
from bayeskit.models.phylogenetics._data_files import (
    CODED,
    FilePart,
    called,
    characters,
    check_coding,
    is_ordered,
    layers,
    number_of_sites,
    part_of,
    read_parts,
    type_of,
    with_coding,
)
from bayeskit.models.phylogenetics._newick import nexus_commands, read_text, read_tree_texts, unquoted
from bayeskit.models.phylogenetics._partitions import Partition, PartitionedTreeModel
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites, SiteRates
from bayeskit.models.phylogenetics._site_sets import check_partition, named_set, parse_numbers, ranges
from bayeskit.models.phylogenetics._substitution import GTR, HKY85, JC69, K80, Binary, SubstitutionModel, VariableSites
from bayeskit.models.phylogenetics._tree_model import TreeModel
from bayeskit.models.phylogenetics._trees import Tree

# Names and defaults are those that MrBayes 3.2.7a prints for `help`, `help lset`, `help prset` and `help link`; its
# treatment of links, of one number in dirichlet(...) and of abbreviations was found by `showmodel`.

_USED = "charset constraint ctype delete exclude include link lset outgroup partition prset restore set taxset unlink"
#: Commands of a run or of its summary, which leave the model as it is.
_OF_A_RUN = (
    "about acknowledgments charstat citations comparetree disclaimer help log manual mcmc mcmcp plot propset quit "
    "report showbeagle showmatrix showmcmctrees showmodel showmoves showparams showusertrees ss ssp startvals sump "
    "sumss sumt taxastat version"
)
_WITHOUT_MODEL = "calibrate databreaks execute pairs speciespartition"
_COMMANDS = f"{_USED} {_OF_A_RUN} {_WITHOUT_MODEL}".split()

#: Options of LSET with the only value there is a model for.
_ONLY = {
    **{"nucmodel": "4by4", "code": "universal", "ploidy": "diploid", "omegavar": "equal", "covarion": "no"},
    "parsmodel": "no",
}
_LSET = ["applyto", "nst", "rates", "ngammacat", "nlnormcat", "nmixtcat", "nbetacat", "coding", *_ONLY]
#: Codings, and their names here; None where there is none.
_CODINGS = {
    **{"all": "all", "variable": "variable", "informative": "informative", "noabsencesites": "noabsence"},
    **dict.fromkeys(("nosingletons", "nopresencesites", "nosingletonabsence", "nosingletonpresence")),
}
_RATES = "equal gamma lnorm propinv invgamma adgamma kmixture".split()
_PRSET_USED = "tratiopr revmatpr statefreqpr shapepr pinvarpr topologypr brlenspr ratepr aamodelpr symdirihyperpr"
_PRSET = (
    f"applyto {_PRSET_USED} aarevmatpr omegapr ny98omega1pr ny98omega3pr m3omegapr codoncatfreqs ratecorrpr "
    "covswitchpr treeagepr speciationpr extinctionpr fossilizationpr samplestrat sampleprob popsizepr "
    "popvarpr nodeagepr clockratepr clockvarpr cppratepr cppmultdevpr tk02varpr igrvarpr mixedvarpr generatepr growthpr"
).split()
#: Parameters of LINK and UNLINK, and their names here.
_LINKED = {
    **{"tratio": ("kappa",), "revmat": ("exchangeabilities",), "shape": ("shape",), "pinvar": ("proportion",)},
    **{"statefreq": ("base_frequencies", "amino_acid_frequencies", "state_frequencies"), "brlens": ("branch_lengths",)},
}
_LINK = [
    *_LINKED,
    *"omega correlation ratemultiplier switchrates topology speciationrate extinctionrate popsize growthrate".split(),
    *"aamodel cpprate cppmultdev cppevents tk02var igrvar mixedvar".split(),
]

#: Matrices of amino acids that there are, and their names here; "equalin" has free frequencies.
_AMINO_ACIDS = {
    **{"poisson": "Poisson", "equalin": "Poisson", "jones": "JTT", "dayhoff": "Dayhoff", "mtrev": "mtREV"},
    **{"mtmam": "mtMAM", "wag": "WAG", "cprev": "cpREV", "lg": "LG"},
}
_OTHER_AMINO_ACIDS = ("rtrev", "vt", "blosum", "gtr")
#: Number of states by type of data; characters have their own, with equal frequencies.
_STATES = {"DNA": 4, "protein": 20, "restriction": 2}
#: Types of data that may have invariable sites; for others MrBayes passes over `propinv` and `invgamma`.
_WITH_INVARIABLE_SITES = ("DNA", "protein")

#: Settings of a subset: of LSET, and of PRSET as a distribution with its numbers.
_DEFAULTS: dict[str, Any] = {
    **{"nst": "1", "rates": "equal", "ngammacat": 4, "aamodelpr": "poisson"},
    "tratiopr": ("beta", (1.0, 1.0)),
    "revmatpr": ("dirichlet", (1.0,) * 6),
    "shapepr": ("exponential", (1.0,)),
    "pinvarpr": ("uniform", (0.0, 1.0)),
    "ratepr": None,
    "brlenspr": ("gammadir", (1.0, 0.1, 1.0, 1.0)),
    "topologypr": ("uniform", ()),
}
#: Distributions of each option of PRSET, and how many numbers they have.
_PRIORS: dict[str, dict[str, int]] = {
    "tratiopr": {"beta": 2, "fixed": 1},
    "revmatpr": {"dirichlet": 6, "fixed": 6},
    "statefreqpr": {"dirichlet": 0, "fixed": 0},  # as many as states
    "shapepr": {"uniform": 2, "exponential": 1, "fixed": 1},
    "pinvarpr": {"uniform": 2, "fixed": 1},
    "brlenspr": {"uniform": 2, "exponential": 1, "twoexp": 2, "gammadir": 4, "invgamdir": 4},
}
#: Settings of data of one type.
_BY_TYPE: dict[str, dict[str, Any]] = {
    **{kind: {"statefreqpr": ("dirichlet", (1.0,) * number), "coding": "all"} for kind, number in _STATES.items()},
    "standard": {"statefreqpr": ("equal", ()), "coding": "variable"},
}
_BY_TYPE["restriction"]["coding"] = "noabsence"
_VALUE = r"[^\s()=]*(?:\([^()]*\))?"


@dataclass(frozen=True, eq=False, repr=False)
class MrBayesBlock:
    r"""What the MrBayes blocks of a file ask for; its text says it in words.

    Defaults are those of MrBayes 3.2.7a, checked against its `help lset`, `help prset` and `showmodel`: branch lengths
    `unconstrained:gammadir(1.0,0.1,1.0,1.0)`, the ratio of transitions and transversions `beta(1,1)` for
    `kappa / (1 + kappa)`, exchangeabilities and state frequencies `dirichlet(1,...,1)`, shape `exponential(1.0)`,
    proportion of invariable sites `uniform(0,1)`, four categories of Gamma rates, one substitution type, equal rates.
    Amino acids have `aamodelpr=fixed(poisson)`, equal rates and frequencies. Standard data have equal frequencies and
    `coding=variable`, restriction data `dirichlet(1,1)` and `coding=noabsencesites`; characters that a coding excludes
    are left out, with a warning, and `propinv` and `invgamma` are for bases and amino acids only. A mixed matrix has a
    subset for each type. Parameters of several subsets of one type are linked where they have the same prior, until
    `unlink`; `set partition` restores the defaults. One number in `dirichlet(x)` is the sum of all concentrations, and
    `statefreqpr=fixed(empirical)` counts missing data in equal parts for all states.

    What a block says is followed where the program itself does not: under `coding=variable`, MrBayes 3.2.7a takes the
    probability of two constant patterns from that of characters with three states or more, here it is that of as many
    patterns as states; it uses `coding=all` of some subsets for all of them, until another coding is set, and `ctype`
    only if another command of the model follows. Its `mtrev` and `cprev` differ from the published digits by some
    hundredths of the log-likelihood.

    Commands may be abbreviated as in MrBayes. Those of a run, such as `mcmc`, are not used, which one warning says;
    whatever there is no model for is an error.

    Attributes
    ----------
    source : str
        The file.
    alignment : Alignment or None
        Without deleted taxa and excluded sites; None if the file has data of several types.
    partition : Partition
        Substitution models and site rates of all subsets; of one, called `"all"`, if sites are not divided. Standard
        data have a subset for each number of states, as in `Partition.of_characters`.
    separate_branch_lengths : bool
        Whether each subset, or each of `partition.length_groups`, has its own branch lengths.
    branch_lengths : tuple of str and tuple of float
        Prior of the branch lengths: name and numbers in MrBayes.
    constraints : dict of str to tuple of str
        Taxa on one side of each split that topologies must have.
    topology : Tree or None
        The only topology, if it is fixed.
    outgroup : str or None
        Has no effect on unrooted trees.

    References
    ----------
    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "three.nex"
    >>> _ = path.write_text(
    ...     "#NEXUS begin data; dimensions ntax=3 nchar=4; format datatype=dna;\nmatrix\nA ACGT\nB ACGA\nC ACCA\n; end;"
    ...     "begin mrbayes; lset nst=2 rates=gamma; prset brlenspr=unconstrained:exp(10); end;"
    ... )
    >>> print(str(MrBayesBlock.from_file(path)).partition("three.nex: ")[2])
    3 taxa, 4 sites
      all (4 sites): HKY85, GammaRates with 4 categories
        kappa / (1 + kappa) ~ Beta(1, 1)
        base_frequencies ~ Dirichlet(1, 1, 1, 1)
        shape ~ Exponential(1)
      branch lengths ~ exponential(10)
    """

    source: str
    alignment: Alignment | None
    partition: Partition
    separate_branch_lengths: bool
    branch_lengths: tuple[str, tuple[float, ...]]
    constraints: Mapping[str, tuple[str, ...]]
    topology: Tree | None
    outgroup: str | None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> MrBayesBlock:
        """Read the MrBayes blocks of a NEXUS file, and its alignment.

        Parameters
        ----------
        path : str or os.PathLike

        Returns
        -------
        MrBayesBlock

        Raises
        ------
        AlignmentError
            If there is no MrBayes block, a command is unknown or malformed, or there is no model for what it asks. The
            message gives file, line and command.

        Warns
        -----
        ConversionWarning
            If the block has settings of a run, such as numbers of generations.
        """
        return _Reader(path).read()

    def __str__(self) -> str:
        lines = [f"MrBayes block of {self.source}: {self.partition.num_taxa} taxa, {self.partition.num_sites} sites"]
        for name, alignment in self.partition.subsets.items():
            substitution, site_rates = self.partition.substitution[name], self.partition.site_rates[name]
            models = [substitution, *layers(site_rates)]
            lines.append(f"  {name} ({number_of_sites(alignment)}): {', '.join(map(called, models))}")
            for model in models:
                free = model.model if isinstance(model, VariableSites) else model
                of_the_name = {"F81": ["kappa"]}.get(called(free), ["amino_acid_frequencies"] * _is_published(free))
                lines += [
                    f"    {_in_words(parameter, getattr(free, parameter))}"
                    for parameter in free.parameters
                    if parameter not in of_the_name
                ]
        lines += [
            f"  {parameter}: {'the same' if parameter == 'branch_lengths' else 'one value'} in {', '.join(group)}"
            for parameter, groups in self.partition.linked.items()
            for group in groups
        ]
        prior, numbers = self.branch_lengths
        apart = " in each subset" if self.separate_branch_lengths else ""
        lines.append(f"  branch lengths{apart} ~ {prior}({', '.join(f'{number:g}' for number in numbers)})")
        if isinstance(self.partition.relative_rates, torch.distributions.Distribution):
            lines.append(f"  {_in_words('shares of the relative rates', self.partition.relative_rates)}")
        lines += [f"  constraint {name}: {', '.join(taxa)}" for name, taxa in self.constraints.items()]
        if self.topology is not None:
            lines.append(f"  topology: {replace(self.topology, branch_lengths=None).to_newick()}")
        if self.outgroup is not None:
            lines.append(f"  outgroup: {self.outgroup} (without effect on unrooted trees)")
        return "\n".join(lines)

    def branch_length_prior(self, tree: Tree) -> TorchDistribution:
        """Return the prior of the branch lengths of a tree.

        Parameters
        ----------
        tree : Tree

        Returns
        -------
        TorchDistribution
            Over one length, or over vectors `(edges,)` in the order of `tree.edge_names`.
        """
        name, numbers = self.branch_lengths
        values = [torch.tensor(number, dtype=torch.float64) for number in numbers]
        if name == "exponential":
            return Exponential(values[0])
        if name == "uniform":
            return Uniform(*values)
        if name == "twoexp":
            internal, external = values
            rates = internal.repeat(tree.num_edges)
            rates[: tree.num_taxa] = external
            return Exponential(rates).to_event(1)
        shape, rate, external_concentration, ratio = numbers
        return GammaDirichlet.for_tree(tree, shape, rate, external_concentration, external_concentration * ratio)

    def model(self, tree: Tree | None = None) -> TreeModel | PartitionedTreeModel:
        """Return the model of the alignment on a topology.

        Parameters
        ----------
        tree : Tree, optional
            May be left out if the block fixes the topology.

        Returns
        -------
        TreeModel or PartitionedTreeModel
            The first if sites are not divided.

        Raises
        ------
        TreeError
            If there is no tree, its taxa differ from those of the alignment, or a constraint excludes it.
        """
        tree = self.topology if tree is None else tree
        if tree is None:
            raise TreeError(f"{self.source}: the block fixes no topology. Remedy: give a tree.")
        self.check_topology(tree)
        prior = self.branch_length_prior(tree)
        if len(self.partition.subsets) > 1:
            apart = self.separate_branch_lengths
            return PartitionedTreeModel(self.partition, tree, prior, separate_branch_lengths=apart)
        (name, alignment), *_ = self.partition.subsets.items()
        rates = self.partition.site_rates[name]
        return TreeModel(alignment, tree, self.partition.substitution[name], prior, site_rates=rates)

    def check_topology(self, tree: Tree) -> None:
        """Raise TreeError if a constraint, or a fixed topology, excludes a tree.

        Parameters
        ----------
        tree : Tree

        Raises
        ------
        TreeError
            If so; the message names the constraint.
        """
        splits = _splits(tree)
        for name, taxa in self.constraints.items():
            if not splits & {frozenset(taxa), frozenset(tree.taxa) - frozenset(taxa)}:
                raise TreeError(
                    f"{self.source}: the constraint {name!r} ({', '.join(taxa)}) excludes the tree. Remedy: give a "
                    "tree in which these taxa are on one side of a branch, or remove the constraint."
                )
        if self.topology is not None and splits != _splits(self.topology):
            raise TreeError(
                f"{self.source}: the block fixes another topology. Remedy: leave the tree out, or remove the setting "
                "topologypr=fixed(...)."
            )


def has_mrbayes_block(path: str | os.PathLike[str]) -> bool:
    """Return whether an alignment file has a MrBayes block.

    Raises
    ------
    AlignmentError
        If the file is missing or malformed.
    """
    return bool(_commands(path))


def set_block_aside(path: str | os.PathLike[str]) -> None:
    """Say that the MrBayes blocks of a file are not used.

    Raises
    ------
    AlignmentError
        If a block excludes sites or deletes taxa: the data would not be those that it means.

    Warns
    -----
    ConversionWarning
        If there is a block.
    """
    commands = _commands(path)
    for head, line, rest in commands:
        if len(found := [name for name in _COMMANDS if name.startswith(head)]) == 1 and found[0] in _CHANGES:
            raise AlignmentError(
                f"{os.fspath(path)}, line {line}: the MrBayes block is not used, but '{head} {rest.strip()}' changes "
                "the data. Remedy: let the block choose the model, or change the matrix and remove the command."
            )
    if commands:
        types = ", but for CTYPE" if any(head == "ctype" for head, _, _ in commands) else ""
        warn_user(
            f"{os.fspath(path)}, line {commands[0][1]}: the MrBayes block is not used{types}, because a substitution "
            "model was named. Remedy: to use the block, name no substitution model.",
            ConversionWarning,
        )


_CHANGES = ("delete", "exclude", "execute")


def _commands(path: str | os.PathLike[str]) -> list[tuple[str, int, str]]:
    """Return head, line and rest of the commands of all MrBayes blocks."""
    text = read_text(path, "a NEXUS file", AlignmentError)
    if text.lstrip()[:6].upper() != "#NEXUS" or not re.search(r"mrbayes", text, re.IGNORECASE):
        return []
    commands = nexus_commands(text, os.fspath(path), AlignmentError)
    return [(head, line, rest) for block, head, line, rest in commands if block == "mrbayes" and head]


class _Reader:
    """Reads commands one after another, as MrBayes does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.source = path, os.fspath(path)
        self.commands = _commands(path)
        if not self.commands:
            raise AlignmentError(f"{self.source}: there is no MrBayes block. Remedy: give a NEXUS file with one.")
        self.parts = read_parts(path, blocks_read=("mrbayes",))
        if self.parts[-1].block:
            raise AlignmentError(
                f"{self.source}: MrBayes has one matrix, but the file has {self.parts[-1].block + 1}. Remedy: join "
                "them into one of datatype=mixed(...), or give models by type, which sets the block aside."
            )
        self.num_sites = sum(len(part.columns) for part in self.parts)
        self.all_taxa = self.parts[0].alignment.taxa
        self.where = self.command = ""
        self.charsets: dict[str, np.ndarray] = {}
        self.taxsets: dict[str, np.ndarray] = {}
        self.partitions: dict[str, dict[str, np.ndarray]] = {
            "default": {part.name if self.parts[1:] else "all": part.columns for part in self.parts},
        }
        self.ordered = np.zeros(self.num_sites, dtype=bool)
        self.defined: dict[str, tuple[str, ...]] = {}  # constraints
        self.included = np.ones(self.num_sites, dtype=bool)
        self.present = np.ones(len(self.all_taxa), dtype=bool)
        self.outgroup: str | None = None
        self.unused: list[str] = []
        self.places: dict[str, tuple[str, str]] = {}  # of options, for errors that show only at the end
        self.choose("default")

    def choose(self, partition: str) -> None:
        """Make a partition the active one, with default settings."""
        self.subsets = self.partitions[partition]
        self.kinds = [type_of(self.parts, sites, name, self.where) for name, sites in self.subsets.items()]
        self.settings = [_DEFAULTS | _BY_TYPE[kind] for kind in self.kinds]
        self.groups = {name: [0] * len(self.subsets) for name in _LINKED}
        self.last_group = 0

    def fail(self, problem: str, remedy: str) -> NoReturn:
        raise AlignmentError(f"{self.where}: '{self.command}': {problem}. Remedy: {remedy}.")

    def lack(self, what: str) -> NoReturn:
        self.fail(
            f"there is no model for {what}", "remove it, or name a substitution model, which sets the block aside"
        )

    def name(self, word: str, names: Sequence[str], what: str) -> str:
        """Return the name that a word abbreviates."""
        word = word.strip().lower()
        found = [name for name in names if name == word] or [name for name in names if name.startswith(word)]
        if len(found) == 1:
            return found[0]
        if found:
            self.fail(f"{word!r} is short for {' and '.join(found)}", "write it in full")
        near = difflib.get_close_matches(word, names, 3) or names
        self.fail(
            f"{word!r} is no {what}", f"use {', '.join(near[:-1])} or {near[-1]}" if near[1:] else f"use {near[0]}"
        )

    def pairs(self, text: str) -> list[tuple[str, str]]:
        """Return the options `NAME=VALUE` of a command."""
        plain = re.sub(r"\s*([=:,])\s*", r"\1", unquoted(text))
        plain = re.sub(r"(?<=\w)\s*\(\s*", "(", re.sub(r"\s+\)", ")", plain)).strip()
        if not re.fullmatch(rf"(?:\w+={_VALUE}\s*)*", plain):
            self.fail(
                "it cannot be read", "write options as NAME=VALUE, with values such as gamma, (1,2) or fixed(0.5)"
            )
        return re.findall(rf"(\w+)=({_VALUE})", plain)

    def sites(self, text: str) -> np.ndarray:
        return parse_numbers(unquoted(text), self.num_sites, self.charsets, self.where)

    def taxa(self, text: str) -> np.ndarray:
        names = {name: np.array([place]) for place, name in enumerate(self.all_taxa)}
        return parse_numbers(unquoted(text), len(self.all_taxa), names | self.taxsets, self.where, "taxon")

    def members(self, text: str) -> list[int]:
        """Return the subsets named in parentheses."""
        if not re.fullmatch(r"\(.*\)", text):
            self.fail(f"{text!r} is no list of subsets", "write (all), or numbers such as (1,3)")
        return parse_numbers(text[1:-1], len(self.subsets), {}, self.where, "subset").tolist()

    def read(self) -> MrBayesBlock:
        for head, line, rest in self.commands:
            self.where, self.command = f"{self.source}, line {line}", " ".join(f"{head} {rest}".split())
            command = self.name(head, _COMMANDS, "command")
            if command in _WITHOUT_MODEL.split():
                self.lack(f"the command {command.upper()}")
            elif command in _OF_A_RUN.split():
                self.note_run(command, rest)
            elif command in ("lset", "prset"):
                self.set_model(command, rest)
            elif command in ("link", "unlink"):
                self.set_links(command, rest)
            else:
                getattr(self, f"do_{command}")(rest)
        if self.unused:
            warn_user(
                f"{self.source}: these settings of MrBayes's own run are not used: "
                f"{', '.join(dict.fromkeys(self.unused))}. Remedy: none is needed, the package has its own.",
                ConversionWarning,
            )
        return self.finished()

    # Commands that say what data there are.

    def do_charset(self, rest: str) -> None:
        name, members = named_set(rest, self.where)
        self.charsets[name] = self.sites(members)

    def do_taxset(self, rest: str) -> None:
        name, members = named_set(rest, self.where)
        self.taxsets[name] = self.taxa(members)

    def do_exclude(self, rest: str) -> None:
        self.included[self.sites(rest)] = False

    def do_include(self, rest: str) -> None:
        self.included[self.sites(rest)] = True

    def do_ctype(self, rest: str) -> None:
        word, colon, members = unquoted(rest).partition(":")
        if not colon:
            self.fail("it cannot be read", "write it as 'ctype ordered: 1-3'")
        sites = self.sites(members)
        if "irreversible".startswith(word.strip().lower()):
            self.lack("irreversible characters")
        self.ordered[sites] = is_ordered(word.strip(), self.where)  # data of other types have no order

    def do_delete(self, rest: str) -> None:
        self.present[self.taxa(rest)] = False

    def do_restore(self, rest: str) -> None:
        self.present[self.taxa(rest)] = True

    def do_outgroup(self, rest: str) -> None:
        found = self.taxa(rest)
        if len(found) != 1:
            self.fail("the outgroup is not one taxon", "name one")
        self.outgroup = self.all_taxa[int(found[0])]

    def do_partition(self, rest: str) -> None:
        name, text = named_set(rest, self.where)
        count, colon, parts = text.partition(":")
        pieces = parts.split(",")
        if not (colon and count.strip() == str(len(pieces))):
            self.fail("number and list of subsets do not agree", "write it as 'partition NAME = 2: first, second'")
        known = {found.lower(): found for found in self.charsets}
        subsets: dict[str, np.ndarray] = {}
        for number, piece in enumerate(pieces, start=1):
            called = known.get(piece.strip().lower(), str(number))
            subsets[called if called not in subsets else f"{called}_{number}"] = self.sites(piece)
        check_partition(subsets, self.num_sites, f"{self.where}: '{self.command}'")
        for called_so, sites in subsets.items():
            type_of(self.parts, sites, called_so, f"{self.where}: '{self.command}'")
        self.partitions[name] = subsets

    def do_set(self, rest: str) -> None:
        for option, value in self.pairs(rest):
            if "partition".startswith(option.lower()):
                names = {name.lower(): name for name in self.partitions}
                if value.lower() not in names:
                    self.fail(f"there is no partition {value!r}", f"name one of {', '.join(self.partitions)}")
                self.choose(names[value.lower()])
            elif "speciespartition".startswith(option.lower()) and len(option) > 1:
                self.lack("species trees")
            else:
                self.unused.append(f"set {option}")

    def do_constraint(self, rest: str) -> None:
        match = re.fullmatch(r"\s*(\S+?)(?:\s+(\w+))?\s*=(.*)", unquoted(rest), re.DOTALL)
        if match is None:
            self.fail("it cannot be read", "write it as 'constraint NAME = TAXA'")
        name, kind, taxa = match.groups()
        if kind is not None and self.name(kind, ("hard", "negative", "partial"), "kind of constraint") != "hard":
            self.lack(f"{kind} constraints")
        self.defined[name] = tuple(self.all_taxa[place] for place in self.taxa(taxa))

    def note_run(self, command: str, rest: str) -> None:
        """Note settings of a run; those that change the posterior are refused."""
        options = re.findall(r"(\w+)\s*=\s*(\S+)", rest)
        for option, value in options:
            if command in ("mcmc", "mcmcp", "ss", "ssp"):
                if "data".startswith(option.lower()) and value.lower().startswith("n"):
                    self.lack("runs without data")
                if option.lower().startswith("rew"):
                    self.lack("weights of characters")
        self.unused += [f"{command} {option}" for option, _ in options] or [command]

    # Commands that say what the model is.

    def set_model(self, command: str, rest: str) -> None:
        chosen = list(range(len(self.subsets)))
        for word, value in self.pairs(rest):
            option = self.name(word, _LSET if command == "lset" else _PRSET, f"option of {command.upper()}")
            self.places[option] = (self.where, self.command)
            if option == "applyto":
                chosen = self.members(value)
            elif command == "lset":
                self.set_likelihood(option, value, chosen)
            elif option not in _PRSET_USED.split():
                self.lack(option)
            elif option == "ratepr":
                for place, concentration in zip(chosen, self.rates(value, len(chosen)), strict=True):
                    self.settings[place]["ratepr"] = concentration
            elif option == "aamodelpr":
                self.set_amino_acids(value, chosen)
            elif option == "statefreqpr":
                self.set_frequencies(value, chosen)
            elif option == "symdirihyperpr":
                if not re.fullmatch(r"fixed\(inf\w*\)", value.lower()):
                    self.lack(f"{option}={value}")
            else:
                prior = self.topology(value) if option == "topologypr" else self.prior(option, value)
                for place in chosen:
                    self.settings[place][option] = prior

    def set_amino_acids(self, value: str, chosen: list[int]) -> None:
        """Set the matrix of amino acids of the subsets that have these."""
        word, text = self.call(value)
        name = self.name(word, ("fixed", "mixed"), "prior for aamodelpr")
        if name == "mixed":
            self.lack("aamodelpr=mixed")
        matrix = self.name(text, (*_AMINO_ACIDS, *_OTHER_AMINO_ACIDS), "model of amino acids")
        if matrix in _OTHER_AMINO_ACIDS:
            self.lack(f"aamodelpr=fixed({matrix})")
        for place in chosen:
            self.settings[place]["aamodelpr"] = matrix

    def set_frequencies(self, value: str, chosen: list[int]) -> None:
        """Set the prior of the frequencies; those of characters are equal."""
        for place in chosen:
            if self.kinds[place] != "standard":
                prior = self.prior("statefreqpr", value, _STATES[self.kinds[place]])
                self.settings[place]["statefreqpr"] = prior

    def set_likelihood(self, option: str, value: str, chosen: list[int]) -> None:
        setting: Any = value.lower()
        if option in _ONLY:
            if not _ONLY[option].startswith(setting) or not setting:
                self.lack(f"{option}={value}")
            return
        if option == "nst":
            setting = self.name(value, ("1", "2", "6", "mixed"), "number of substitution types")
            if setting == "mixed":
                self.lack("nst=mixed")
        elif option == "rates":
            setting = self.name(value, _RATES, "distribution of rates")
            if setting in ("lnorm", "adgamma", "kmixture"):
                self.lack(f"rates={setting}")
            if setting in ("propinv", "invgamma"):
                chosen = [place for place in chosen if self.kinds[place] in _WITH_INVARIABLE_SITES]
        elif option == "coding":
            coding = self.name(value, tuple(_CODINGS), "coding")
            coded = [place for place in chosen if self.kinds[place] in CODED]
            setting = _CODINGS[coding]
            if setting is None or (not coded and setting != "all"):
                self.lack(f"coding={coding}" if coded else f"coding={coding} of bases or amino acids")
            chosen = coded
        else:
            if re.fullmatch(r"\d{1,9}", value) is None or int(value) == 0:
                self.fail(f"{value!r} is no number of categories", "give a whole number above 0")
            setting = int(value)
        for place in chosen:
            self.settings[place][option] = setting

    def numbers(self, text: str) -> tuple[float, ...]:
        try:
            return tuple(float(word) for word in text.replace(",", " ").split())
        except ValueError:
            self.fail(f"{text!r} are not numbers", "give numbers separated by commas")

    def call(self, value: str) -> tuple[str, str]:
        """Return name and text in parentheses."""
        match = re.fullmatch(r"(\w*)(?:\((.*)\))?", value)
        if match is None:
            self.fail(f"{value!r} is no distribution", "write it as NAME(NUMBERS)")
        return match.group(1), (match.group(2) or "").strip()

    def prior(self, option: str, value: str, states: int = 0) -> tuple[str, tuple[float, ...]]:
        kind, _, rest = value.rpartition(":")
        if option == "brlenspr":
            self.name(kind or self.call(value)[0], ("unconstrained", "clock", "fixed"), "kind of branch lengths")
            if not "unconstrained".startswith(kind.lower()) or not kind:
                self.lack(f"{option}={value}")
        word, text = self.call(rest)
        name = self.name(word, tuple(_PRIORS[option]), f"prior for {option}")
        if name == "invgamdir":
            self.lack("an inverse Gamma distribution of the tree length")
        if option == "statefreqpr" and name == "fixed" and text.lower() in ("equal", "empirical"):
            return text.lower(), ()
        numbers, expected = self.numbers(text), _PRIORS[option][name] or states
        if name == "dirichlet" and len(numbers) == 1:
            numbers = (numbers[0] / expected,) * expected
        if len(numbers) != expected:
            self.fail(f"{name} has {len(numbers)} numbers instead of {expected}", f"give {expected}")
        ascending = name != "uniform" or 0.0 <= numbers[0] < numbers[1] <= (1.0 if option == "pinvarpr" else np.inf)
        positive = name == "uniform" or min(numbers) > 0.0
        if not (ascending and positive and np.isfinite(numbers).all()):
            self.fail(
                f"{value!r} is outside the domain", "give positive numbers, and ascending bounds of a uniform prior"
            )
        return name, numbers

    def rates(self, value: str, count: int) -> tuple[float | None, ...]:
        """Return the concentration of the relative rate of each chosen subset."""
        word, text = self.call(value)
        name = self.name(word, ("fixed", "variable", "dirichlet"), "prior for ratepr")
        if name != "dirichlet":
            return (None if name == "fixed" else 1.0,) * count
        numbers = self.numbers(text)
        if len(numbers) != count or min(numbers) <= 0:
            self.fail(f"dirichlet needs {count} positive numbers, one for each subset", "give them")
        return numbers

    def topology(self, value: str) -> tuple[str, tuple[str, ...]]:
        word, text = self.call(value)
        name = self.name(word, ("uniform", "constraints", "fixed", "speciestree"), "prior for topologypr")
        if name == "speciestree":
            self.lack("species trees")
        listed = tuple(text.replace(",", " ").split())
        unknown = [item for item in listed if name == "constraints" and item not in self.defined]
        if unknown:
            self.fail(f"there is no constraint {unknown[0]!r}", "define it before, by its name")
        return name, listed

    def set_links(self, command: str, rest: str) -> None:
        for word, value in self.pairs(rest):
            parameter = self.name(word, _LINK, "parameter")
            if (command, parameter) == ("link", "topology"):
                continue  # it is always the same
            if parameter not in _LINKED:
                self.lack(f"{command} {parameter}")
            self.places[parameter] = (self.where, self.command)
            for number, place in enumerate(self.members(value)):
                self.last_group += command == "unlink" or number == 0
                self.groups[parameter][place] = self.last_group

    # The models.

    def finished(self) -> MrBayesBlock:
        taxa = tuple(name for name, present in zip(self.all_taxa, self.present, strict=True) if present)
        subsets: dict[str, Alignment] = {}
        substitution: dict[str, SubstitutionModel] = {}
        division: dict[str, int] = {}  # of each subset: standard data have one for each number of states
        for place, (name, sites) in enumerate(self.subsets.items()):
            for subset, (alignment, model) in self.divided(place, name, sites, taxa).items():
                subset = subset if subset not in subsets else f"{name}_{subset}"
                subsets[subset], substitution[subset], division[subset] = alignment, model, place
        site_rates = {
            name: rates for name, place in division.items() if (rates := _site_rates(self.settings[place])) is not None
        }
        brlens, topology = self.common("brlenspr"), self.common("topologypr")
        separate = len(set(self.groups["brlens"])) > 1
        shares = [setting["ratepr"] for setting in self.settings]
        relative = None
        linked = self.links(substitution, site_rates, division)
        if separate:
            linked |= _together("branch_lengths", division, self.groups["brlens"])
        if len(self.subsets) > 1 and any(shares):
            linked |= _together("relative_rates", division, range(len(self.subsets)))
            if None in shares:
                self.lack_at("ratepr", "relative rates of some subsets only")
            if separate:
                self.lack_at("ratepr", "relative rates beside separate branch lengths")
            relative = Dirichlet(torch.tensor(shares, dtype=torch.float64))
        constraints = {
            name: tuple(taxon for taxon in self.defined[name] if taxon in taxa)
            for name in (topology[1] if topology[0] == "constraints" else ())
        }
        return MrBayesBlock(
            self.source,
            None if len(set(self.kinds)) > 1 else self.kept(np.arange(self.num_sites), "all", taxa).alignment,
            Partition(
                subsets,
                substitution,
                site_rates,
                linked=linked,
                relative_rates=relative,
            ),
            separate,
            brlens,
            constraints,
            self.fixed_tree(topology[1]) if topology[0] == "fixed" else None,
            self.outgroup,
        )

    def kept(self, sites: np.ndarray, name: str, taxa: tuple[str, ...]) -> FilePart:
        """Return the sites of a subset that are not excluded, in the taxa that are not deleted."""
        part = part_of(self.parts, sites[self.included[sites]], name, self.source)
        return part if taxa == self.all_taxa else replace(part, alignment=part.alignment.select(taxa))

    def divided(
        self, place: int, name: str, sites: np.ndarray, taxa: tuple[str, ...]
    ) -> dict[str, tuple[Alignment, SubstitutionModel]]:
        """Return the alignment and the model of each subset with a model of its own in a subset of the file."""
        if not self.included[sites].any():
            raise AlignmentError(
                f"{self.source}: all sites of {name!r} ({ranges(sites)}) are excluded. Remedy: include some."
            )
        part, setting = self.kept(sites, name, taxa), self.settings[place]
        if part.kind in CODED:
            part = check_coding(part, setting["coding"], self.source, "use 'lset coding=all'")
        if part.kind == "standard":
            prefix = f"{name}_" if self.kinds.count("standard") > 1 else ""
            return characters(part, np.flatnonzero(self.ordered), setting["coding"], prefix)
        if part.kind == "protein" and (setting["aamodelpr"], setting["statefreqpr"][0]) == ("equalin", "empirical"):
            self.lack_at("statefreqpr", "empirical frequencies of amino acids")
        model = self.blamed("statefreqpr", _substitution, setting, part)
        return {name: (part.alignment, with_coding(model, setting["coding"]))}

    def lack_at(self, option: str, what: str) -> NoReturn:
        """Refuse what an earlier command asked."""
        self.where, self.command = self.places[option]
        self.lack(what)

    def blamed(self, option: str, make: Any, *arguments: Any) -> Any:
        """Call a function; its errors name the command that set an option."""
        try:
            return make(*arguments)
        except BayeskitError as error:
            where, command = self.places.get(option, (self.source, "begin mrbayes"))
            raise AlignmentError(f"{where}: '{command}': {error}") from error

    def common(self, option: str) -> Any:
        """Return a setting that all subsets must share."""
        found = {setting[option] for setting in self.settings}
        if len(found) > 1:
            self.lack_at(option, f"{option} that differs between subsets")
        return found.pop()

    def links(
        self,
        substitution: Mapping[str, SubstitutionModel],
        site_rates: Mapping[str, SiteRates],
        division: Mapping[str, int],
    ) -> dict[str, list[tuple[str, ...]]]:
        """Return groups of subsets by parameter: linked, of one type of data, and with the same prior."""
        like = torch.empty(0, dtype=torch.float64)
        found: dict[str, dict[Any, list[str]]] = {}
        for name, place in division.items():
            setting = self.settings[place]
            free = substitution[name].priors(like) | (site_rates[name].priors(like) if name in site_rates else {})
            for parameter, names in _LINKED.items():
                for ours in (one for one in names if one in free):
                    categories = setting["ngammacat"] if ours == "shape" else 0
                    key = self.kinds[place], self.groups[parameter][place], setting[f"{parameter}pr"], categories
                    found.setdefault(ours, {}).setdefault(key, []).append(name)
        groups = {ours: [tuple(group) for group in of.values() if len(group) > 1] for ours, of in found.items()}
        return {ours: linked for ours, linked in groups.items() if linked}

    def fixed_tree(self, names: tuple[str, ...]) -> Tree:
        """Return the tree of the file that fixes the topology."""
        texts = self.blamed("topologypr", read_tree_texts, self.path)
        places = [
            place
            for place, text in enumerate(texts)
            if text.name and [text.name.lower()] == [name.lower() for name in names]
        ]
        if not places:
            self.where, self.command = self.places["topologypr"]
            self.fail("there is no such tree in the file", f"name one of {', '.join(str(text.name) for text in texts)}")
        return Tree.from_file(self.path, places[0])


def _substitution(setting: Mapping[str, Any], part: FilePart) -> SubstitutionModel:
    """Return the substitution model of a subset of bases, amino acids or restriction sites."""
    kind, numbers = setting["statefreqpr"]
    frequencies: Any = list(numbers)
    if kind == "dirichlet":
        frequencies = Dirichlet(torch.tensor(numbers, dtype=torch.float64))
    elif kind == "empirical":
        frequencies = _counted(part.alignment)
    elif kind == "equal":
        frequencies = [1 / _STATES[part.kind]] * _STATES[part.kind]
    if part.kind == "restriction":
        return Binary(frequencies)
    if part.kind == "protein":
        matrix = setting["aamodelpr"]
        return AminoAcidModel(_AMINO_ACIDS[matrix], frequencies if matrix == "equalin" else "own")
    if setting["nst"] == "6":
        prior, rates = setting["revmatpr"]
        values = torch.tensor(rates, dtype=torch.float64)
        exchangeabilities = values if prior == "fixed" else Dirichlet(values)
        return GTR(exchangeabilities, frequencies)
    if setting["nst"] == "1":
        return JC69() if kind == "equal" else HKY85(1.0, frequencies)
    prior, numbers = setting["tratiopr"]
    kappa: Any = numbers[0] if prior == "fixed" else _ratio_of_beta(*numbers)
    return K80(kappa) if kind == "equal" else HKY85(kappa, frequencies)


def _counted(alignment: Alignment) -> Tensor:
    """Return the frequencies of the states, where MrBayes counts missing data in equal parts for all of them."""
    states = torch.arange(alignment.data_type.num_states)
    allowed = ((alignment.patterns.long()[..., None] >> states) & 1).to(torch.float64)
    counts = (allowed / allowed.sum(-1, keepdim=True) * alignment.weights[:, None]).sum((0, 1))
    absent = [state for state, count in zip(alignment.data_type.states, counts.tolist(), strict=True) if not count]
    if absent:
        raise AlignmentError(
            f"the state {absent[0]} never occurs, so that its frequency would be zero. Remedy: write "
            "statefreqpr=dirichlet(1), or numbers above zero."
        )
    return counts / counts.sum()


def _ratio_of_beta(first: float, second: float) -> TorchDistribution:
    """Return the distribution of `x / (1 - x)` for a beta-distributed `x`."""
    base = Beta(*torch.tensor([first, second], dtype=torch.float64))
    return TransformedDistribution(base, [SigmoidTransform().inv, ExpTransform()])


def _site_rates(setting: Mapping[str, Any]) -> SiteRates | None:
    """Return the site rates of a subset."""

    def given(option: str) -> Any:
        prior, numbers = setting[option]
        values = torch.tensor(numbers, dtype=torch.float64)
        kinds = {"uniform": Uniform, "exponential": Exponential}
        return kinds[prior](*values) if prior in kinds else values[0]

    rates = None
    if setting["rates"] in ("gamma", "invgamma"):
        rates = GammaRates(given("shapepr"), num_categories=setting["ngammacat"])
    return InvariantSites(given("pinvarpr"), rates) if setting["rates"] in ("propinv", "invgamma") else rates


# Words.


def _is_published(model: SubstitutionModel | SiteRates) -> bool:
    """Whether a model of amino acids has the frequencies of its matrix."""
    if not isinstance(model, AminoAcidModel):
        return False
    own: Any = AminoAcidModel(model.matrix).amino_acid_frequencies
    given = model.amino_acid_frequencies
    return isinstance(given, Tensor) and torch.equal(given, own)


def _in_words(name: str, given: Any) -> str:
    """Return value or prior of a parameter as text."""

    def text(values: Tensor) -> str:
        return ", ".join(f"{value:.4g}" for value in values.flatten().tolist())

    if isinstance(given, Tensor):
        return f"{name} = {text(given)}"
    if isinstance(given, TransformedDistribution):
        base = given.base_dist
        return f"{name} / (1 + {name}) ~ Beta({text(base.concentration1)}, {text(base.concentration0)})"
    numbers = [text(getattr(given, parameter)) for parameter in given.arg_constraints]
    return f"{name} ~ {type(given).__name__}({', '.join(numbers)})"


def _splits(tree: Tree) -> set[frozenset[str]]:
    """Return both sides of each branch."""
    below = [frozenset([taxon]) for taxon in tree.taxa]
    for children in tree.children:
        below.append(frozenset().union(*(below[child] for child in children)))
    every = frozenset(tree.taxa)
    return {side for part in below[:-1] for side in (part, every - part)}


def _together(name: str, division: Mapping[str, int], groups: Sequence[Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return the groups of at least two subsets whose subsets of the file, by place, are in one group."""
    found: dict[Any, list[str]] = {}
    for subset, place in division.items():
        found.setdefault(groups[place], []).append(subset)
    linked = [tuple(group) for group in found.values() if len(group) > 1]
    return {name: linked} if linked else {}
