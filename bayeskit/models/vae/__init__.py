"""Variational autoencoders: models with a guide each, likelihoods, networks, and images that ship in wheels.

Train one with any objective, ``objective.differentiable_loss(vae.model, vae.guide, x)`` and an optimiser of torch, or
with ``pyro.infer.SVI(vae.model, vae.guide, ...)``; before another model of the same kind is trained by SVI, clear
Pyro's parameter store, which goes by names. A minibatch ``x`` of a larger data set is given together with
``num_items``, the size of the whole.
"""

from bayeskit.models.vae import likelihoods
from bayeskit.models.vae.autoencoders import (
    VAE,
    ConditionalVAE,
    HierarchicalVAE,
    MissingDataVAE,
    SemiSupervisedVAE,
    conditional_vae,
    convolutional_vae,
    hierarchical_vae,
    mlp_vae,
    one_hot,
    semi_supervised_vae,
)
from bayeskit.models.vae.flows import ConditionalFlow, FlowDistribution, FlowPrior, flow_vae
from bayeskit.models.vae.generative_model import Autoencoder, GenerativeModel
from bayeskit.models.vae.images import (
    Images,
    binarize,
    load_digits,
    load_mnist5000,
    plot_images,
    plot_reconstructions,
    plot_traversal,
)
from bayeskit.models.vae.linear import LinearVAE
from bayeskit.models.vae.networks import (
    ConvolutionalDecoder,
    ConvolutionalFeatures,
    DiagonalNormal,
    StandardNormal,
    mlp,
)

__all__ = [
    "Autoencoder",
    "ConditionalFlow",
    "ConditionalVAE",
    "ConvolutionalDecoder",
    "ConvolutionalFeatures",
    "DiagonalNormal",
    "FlowDistribution",
    "FlowPrior",
    "GenerativeModel",
    "HierarchicalVAE",
    "Images",
    "LinearVAE",
    "MissingDataVAE",
    "SemiSupervisedVAE",
    "StandardNormal",
    "VAE",
    "binarize",
    "conditional_vae",
    "convolutional_vae",
    "flow_vae",
    "hierarchical_vae",
    "likelihoods",
    "load_digits",
    "load_mnist5000",
    "mlp",
    "mlp_vae",
    "one_hot",
    "plot_images",
    "plot_reconstructions",
    "plot_traversal",
    "semi_supervised_vae",
]
