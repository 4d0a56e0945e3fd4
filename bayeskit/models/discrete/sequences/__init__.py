"""Sequences with hidden structure, summed out exactly: segmentations, hidden states, change points.

One dynamic programme over segments and one over states, each in any :class:`Semiring`, answer all questions: log
marginals, most probable structures, draws, numbers of structures, expectations and entropies.
"""

from bayeskit.models.discrete.sequences.change_points import (
    ChangePointPrior,
    ChangePoints,
    NegativeBinomialLengths,
    NumberOfChanges,
)
from bayeskit.models.discrete.sequences.conjugate_segments import NormalSegments, PoissonSegments, SegmentModel
from bayeskit.models.discrete.sequences.datasets import Series, load_nile
from bayeskit.models.discrete.sequences.hidden_markov import HiddenMarkov
from bayeskit.models.discrete.sequences.hidden_markov_exact import categorical_log_evidence
from bayeskit.models.discrete.sequences.hidden_markov_model import (
    CategoricalEmission,
    Emission,
    GaussianEmission,
    HiddenMarkovModel,
    OrderedNormal,
)
from bayeskit.models.discrete.sequences.lexicon_learning import LearnedLexicon, candidate_words, learn_lexicon
from bayeskit.models.discrete.sequences.plots import plot_boundaries, plot_change_points, plot_states
from bayeskit.models.discrete.sequences.segmentations import Segmentations
from bayeskit.models.discrete.sequences.segmented_text import SegmentedText
from bayeskit.models.discrete.sequences.semirings import Counting, Expectation, LogSum, Max, Semiring
from bayeskit.models.discrete.sequences.strings import Lexicon, Strings

__all__ = [
    "CategoricalEmission",
    "ChangePointPrior",
    "ChangePoints",
    "Counting",
    "Emission",
    "Expectation",
    "GaussianEmission",
    "HiddenMarkov",
    "HiddenMarkovModel",
    "LearnedLexicon",
    "Lexicon",
    "LogSum",
    "Max",
    "NegativeBinomialLengths",
    "NormalSegments",
    "NumberOfChanges",
    "OrderedNormal",
    "PoissonSegments",
    "SegmentModel",
    "SegmentedText",
    "Segmentations",
    "Semiring",
    "Series",
    "Strings",
    "candidate_words",
    "categorical_log_evidence",
    "learn_lexicon",
    "load_nile",
    "plot_boundaries",
    "plot_change_points",
    "plot_states",
]
