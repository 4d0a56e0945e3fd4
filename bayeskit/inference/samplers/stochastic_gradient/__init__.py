"""Langevin samplers on minibatches: target, rows, step-size schedules, one kernel a file, and the run."""

from bayeskit.inference.samplers.stochastic_gradient.rows import Epochs, IndependentRows
from bayeskit.inference.samplers.stochastic_gradient.run import sample_stochastic_gradient
from bayeskit.inference.samplers.stochastic_gradient.schedules import Constant, Polynomial
from bayeskit.inference.samplers.stochastic_gradient.sghmc import SGHMC
from bayeskit.inference.samplers.stochastic_gradient.sgld import SGLD, PreconditionedSGLD
from bayeskit.inference.samplers.stochastic_gradient.target import MinibatchTarget

__all__ = [
    "SGHMC",
    "SGLD",
    "Constant",
    "Epochs",
    "IndependentRows",
    "MinibatchTarget",
    "Polynomial",
    "PreconditionedSGLD",
    "sample_stochastic_gradient",
]
