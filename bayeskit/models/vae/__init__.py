"""Variational autoencoders (models with guides), likelihoods, networks, and image data sets.

Train with ``objective.differentiable_loss(vae.model, vae.guide, x)`` and a torch optimiser, or with
``pyro.infer.SVI(vae.model, vae.guide, ...)``. Clear Pyro's parameter store before training another model of the same
class by SVI, because the store is keyed by name. For a minibatch ``x``, pass the size of the full data set as
``num_data``.
"""

from bayeskit.models.vae import likelihoods
from bayeskit.models.vae._autoencoders import (
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
from bayeskit.models.vae._discrete import binary_vae, categorical_vae
from bayeskit.models.vae._flows import ConditionalFlow, FlowDistribution, FlowPrior, flow_vae
from bayeskit.models.vae._generative_model import Autoencoder, GenerativeModel
from bayeskit.models.vae._images import (
    Images,
    binarize,
    load_digits,
    load_mnist5000,
    plot_images,
    plot_reconstructions,
    plot_traversal,
)
from bayeskit.models.vae._linear import LinearVAE
from bayeskit.models.vae._networks import (
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
    "binary_vae",
    "categorical_vae",
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
