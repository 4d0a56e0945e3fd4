"""Permutations: exact distributions, continuous relaxations, and matching models.

Convention: row ``i`` is matched with column ``permutation[i]``. Up to 20 rows, `GibbsPermutation` is exact. With more
rows, use `RoundedPermutation.near_gibbs` for approximate draws if the log weights are known, and the relaxations as
guides for `pyro.infer.SVI` otherwise.
"""

from bayeskit.models.discrete.permutations._distributions import (
    GibbsPermutation,
    all_permutations,
    doubly_stochastic,
    log_permanent,
    nearest_permutation,
    permutation_matrix,
    permutations,
)
from bayeskit.models.discrete.permutations._matching import NoisyMatching
from bayeskit.models.discrete.permutations._relaxations import (
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
