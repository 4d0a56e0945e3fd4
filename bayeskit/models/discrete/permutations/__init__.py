"""Permutations: relaxations with densities, exact distributions, and matching models.

Row ``i`` is matched with the column ``permutation[i]`` everywhere. Up to 20 rows `GibbsPermutation` has every answer
exactly. Beyond, `RoundedPermutation.near_gibbs` draws from nearly the same distribution where its log weights are
known, and the relaxations are guides for `pyro.infer.SVI` where they are not.
"""

from bayeskit.models.discrete.permutations.distributions import (
    GibbsPermutation,
    all_permutations,
    doubly_stochastic,
    log_permanent,
    nearest_permutation,
    permutation_matrix,
    permutations,
)
from bayeskit.models.discrete.permutations.matching import NoisyMatching
from bayeskit.models.discrete.permutations.relaxations import (
    GumbelSinkhorn,
    GumbelSinkhornRelaxation,
    Relaxation,
    RoundedPermutation,
    RoundingRelaxation,
    SequentialPermutation,
    StickBreakingPermutation,
    StickBreakingRelaxation,
    StickBreakingTransform,
    sinkhorn,
)

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
