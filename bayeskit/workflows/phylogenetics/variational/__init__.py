"""Variational inference over topologies and branch lengths."""

from bayeskit.workflows.phylogenetics.variational.inference import variational_inference
from bayeskit.workflows.phylogenetics.variational.learning_rates import LearningRates
from bayeskit.workflows.phylogenetics.variational.length_families import FlowLengths, LogNormalLengths
from bayeskit.workflows.phylogenetics.variational.posterior import VariationalPosterior

__all__ = ["FlowLengths", "LearningRates", "LogNormalLengths", "VariationalPosterior", "variational_inference"]
