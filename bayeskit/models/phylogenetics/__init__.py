"""Phylogenetics: alignments, trees and samples of trees, substitution models and their likelihoods."""

from bayeskit.models.phylogenetics._alignment_checks import check_for_search
from bayeskit.models.phylogenetics._alignments import Alignment, primates, read_matrices
from bayeskit.models.phylogenetics._amino_acids import AminoAcidModel
from bayeskit.models.phylogenetics._ancestral_states import ancestral_states
from bayeskit.models.phylogenetics._branch_length_priors import GammaDirichlet
from bayeskit.models.phylogenetics._clocks import StrictClock, UncorrelatedLogNormalClock
from bayeskit.models.phylogenetics._codon_mixtures import M3, BranchModel, BranchSiteModel, M1a, M2a
from bayeskit.models.phylogenetics._codon_models import GY94, MG94, codon_frequencies
from bayeskit.models.phylogenetics._data_types import DNA, PROTEIN, DataType, codons, standard_characters
from bayeskit.models.phylogenetics._dated_topologies import DatedTopology
from bayeskit.models.phylogenetics._distributions import (
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
    TopologyDistribution,
)
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._mixture_models import MixtureModel, ProfileMixture
from bayeskit.models.phylogenetics._model_names import parse_substitution
from bayeskit.models.phylogenetics._mrbayes import MrBayesBlock
from bayeskit.models.phylogenetics._neighbour_joining import jukes_cantor_distances, neighbour_joining
from bayeskit.models.phylogenetics._partitions import (
    Partition,
    PartitionedForestLikelihood,
    PartitionedTreeModel,
)
from bayeskit.models.phylogenetics._samples import (
    TreeSample,
    asdsf,
    robinson_foulds,
    split_frequencies,
    tetrapods,
)
from bayeskit.models.phylogenetics._site_rates import FreeRates, GammaRates, InvariantSites, SiteRates
from bayeskit.models.phylogenetics._site_sets import read_partitions
from bayeskit.models.phylogenetics._substitution import (
    GTR,
    HKY85,
    JC69,
    K80,
    TN93,
    Binary,
    GTRSubmodel,
    Mk,
    OrderedMk,
    ReversibleModel,
    SubstitutionModel,
    VariableSites,
    all_reversible_models,
    empirical_frequencies,
)
from bayeskit.models.phylogenetics._summaries import (
    AnnotatedTree,
    greedy_consensus,
    majority_rule_consensus,
    maximum_clade_credibility,
    plot_credible_set,
    plot_split_frequencies,
    plot_tree,
)
from bayeskit.models.phylogenetics._time_tree_plots import plot_time_tree
from bayeskit.models.phylogenetics._time_trees import TimeTreeModel
from bayeskit.models.phylogenetics._tip_dates import TipDates, dates_from_file, dates_from_names
from bayeskit.models.phylogenetics._topological_effective_size import topological_effective_size
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies
from bayeskit.models.phylogenetics._tree_model import TreeModel
from bayeskit.models.phylogenetics._tree_priors import BirthDeathTree, ConstantCoalescent, YuleTree
from bayeskit.models.phylogenetics._trees import Tree

__all__ = [
    "Alignment",
    "AminoAcidModel",
    "AnnotatedTree",
    "Binary",
    "BirthDeathTree",
    "BranchModel",
    "BranchSiteModel",
    "ConditionalCladeDistribution",
    "ConstantCoalescent",
    "DNA",
    "DataType",
    "DatedTopology",
    "ForestLikelihood",
    "FreeRates",
    "GTR",
    "GTRSubmodel",
    "GY94",
    "GammaDirichlet",
    "GammaRates",
    "HKY85",
    "InvariantSites",
    "JC69",
    "K80",
    "M1a",
    "M2a",
    "M3",
    "MG94",
    "MixtureModel",
    "Mk",
    "MrBayesBlock",
    "OrderedMk",
    "PROTEIN",
    "Partition",
    "PartitionedForestLikelihood",
    "PartitionedTreeModel",
    "ProfileMixture",
    "ReversibleModel",
    "SampleFrequencies",
    "SiteRates",
    "Smoothed",
    "StrictClock",
    "SubsplitBayesianNetwork",
    "SubstitutionModel",
    "TN93",
    "TimeTreeModel",
    "TipDates",
    "Topologies",
    "TopologyDistribution",
    "Tree",
    "TreeModel",
    "TreeSample",
    "UncorrelatedLogNormalClock",
    "VariableSites",
    "YuleTree",
    "all_reversible_models",
    "all_topologies",
    "ancestral_states",
    "asdsf",
    "check_for_search",
    "codon_frequencies",
    "codons",
    "dates_from_file",
    "dates_from_names",
    "empirical_frequencies",
    "greedy_consensus",
    "jukes_cantor_distances",
    "majority_rule_consensus",
    "maximum_clade_credibility",
    "neighbour_joining",
    "parse_substitution",
    "plot_credible_set",
    "plot_split_frequencies",
    "plot_time_tree",
    "plot_tree",
    "primates",
    "read_matrices",
    "read_partitions",
    "robinson_foulds",
    "split_frequencies",
    "standard_characters",
    "tetrapods",
    "topological_effective_size",
]
