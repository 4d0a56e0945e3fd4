"""Models with discrete latent variables, with exact results for small problems.

Submodules: :mod:`~bayeskit.models.discrete.sequences` (segmentations,
hidden Markov models, change points), :mod:`~bayeskit.models.discrete.mixtures`,
:mod:`~bayeskit.models.discrete.genotypes`, :mod:`~bayeskit.models.discrete.ising`,
:mod:`~bayeskit.models.discrete.permutations`,
:mod:`~bayeskit.models.discrete.belief_network`,
:mod:`~bayeskit.models.discrete.autoencoders` and
:mod:`~bayeskit.models.discrete.rendering_mixture`.
"""
