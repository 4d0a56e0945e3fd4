"""Models with discrete latent variables, with exact results for small problems.

Rooms: :mod:`~bayeskit.models.discrete.sequences` (segmentations, hidden Markov models, change points),
:mod:`~bayeskit.models.discrete.mixtures` and :mod:`~bayeskit.models.discrete.permutations`.
"""

from bayeskit._lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
