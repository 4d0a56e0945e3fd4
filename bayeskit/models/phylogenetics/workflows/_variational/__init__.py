"""Variational inference over topologies and branch lengths."""

from bayeskit.models.phylogenetics.workflows._variational._inference import variational_inference
from bayeskit.models.phylogenetics.workflows._variational._learning_rates import LearningRates
from bayeskit.models.phylogenetics.workflows._variational._length_families import FlowLengths, LogNormalLengths
from bayeskit.models.phylogenetics.workflows._variational._posterior import VariationalPosterior

__all__ = ["FlowLengths", "LearningRates", "LogNormalLengths", "VariationalPosterior", "variational_inference"]
