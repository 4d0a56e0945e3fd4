"""Permutations: relaxations with densities, exact distributions, and matching models.

Row ``i`` is matched with the column ``permutation[i]`` everywhere. Up to 20 rows `GibbsPermutation` has every answer
exactly. Beyond, `RoundedPermutation.near_gibbs` draws from nearly the same distribution where its log weights are
known, and the relaxations are guides for `pyro.infer.SVI` where they are not.
"""

from bayeskit.models.discrete.permutations.assignments import (
    all_permutations,
    doubly_stochastic,
    nearest_permutation,
    permutation_matrix,
    permutations,
)
from bayeskit.models.discrete.permutations.gibbs import GibbsPermutation
from bayeskit.models.discrete.permutations.gumbel_sinkhorn import GumbelSinkhorn, sinkhorn
from bayeskit.models.discrete.permutations.matching import NoisyMatching
from bayeskit.models.discrete.permutations.permanent import log_permanent
from bayeskit.models.discrete.permutations.relaxations import (
    GumbelSinkhornRelaxation,
    Relaxation,
    RoundingRelaxation,
    StickBreakingRelaxation,
)
from bayeskit.models.discrete.permutations.rounding import RoundedPermutation
from bayeskit.models.discrete.permutations.sequential import SequentialPermutation, StickBreakingPermutation
from bayeskit.models.discrete.permutations.stick_breaking import StickBreakingTransform

__all__ = [
    "GibbsPermutation",
    "GumbelSinkhorn",
    "GumbelSinkhornRelaxation",
    "NoisyMatching",
    "Relaxation",
    "RoundedPermutation",
    "RoundingRelaxation",
    "SequentialPermutation",
    "StickBreakingPermutation",
    "StickBreakingRelaxation",
    "StickBreakingTransform",
    "all_permutations",
    "doubly_stochastic",
    "log_permanent",
    "nearest_permutation",
    "permutation_matrix",
    "permutations",
    "sinkhorn",
]
