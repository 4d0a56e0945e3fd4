"""Sequences with latent structure, marginalized exactly: segmentations, hidden Markov models, change points.

Dynamic programming over segments or states, in any :class:`Semiring`, gives log marginals, most probable structures,
draws, counts, expectations and entropies.
"""

from bayeskit.models.discrete.sequences._chains import Counting, Expectation, LogSum, MaxWeight, Semiring
from bayeskit.models.discrete.sequences._change_points import (
    ChangePointPrior,
    ChangePoints,
    NegativeBinomialLengths,
    NormalSegments,
    NumberOfChanges,
    PoissonSegments,
    SegmentModel,
)
from bayeskit.models.discrete.sequences._hidden_markov import (
    CategoricalEmission,
    Emission,
    GaussianEmission,
    HiddenMarkov,
    HiddenMarkovModel,
    OrderedNormal,
    categorical_log_evidence,
)
from bayeskit.models.discrete.sequences._plots import (
    Series,
    load_nile,
    plot_boundaries,
    plot_change_points,
    plot_states,
)
from bayeskit.models.discrete.sequences._segmentations import Segmentations
from bayeskit.models.discrete.sequences._text import (
    Lexicon,
    Strings,
    candidate_words,
    learn_lexicon,
)

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
    "Lexicon",
    "LogSum",
    "MaxWeight",
    "NegativeBinomialLengths",
    "NormalSegments",
    "NumberOfChanges",
    "OrderedNormal",
    "PoissonSegments",
    "SegmentModel",
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
