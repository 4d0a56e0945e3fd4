"""Variational autoencoders, and ready ones for vectors and images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bayeskit.models.vae.generative_model import Autoencoder
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood
from bayeskit.models.vae.networks import (
    Activation,
    ConvolutionalDecoder,
    ConvolutionalFeatures,
    DiagonalNormal,
    check_hidden,
    check_sizes,
    mlp,
)


class VAE(Autoencoder):
    """Variational autoencoder: a network of a normal code generates each datum, another one guesses the code.

    Parameters
    ----------
    encoder : Module
        Maps data ``(*batch, *data_shape)`` to the distribution of their codes, batch shape ``(*batch)`` and event
        shape ``(latent_dim,)``: for example features followed by
        :class:`~bayeskit.models.vae.DiagonalNormal` or :class:`~bayeskit.models.vae.ConditionalFlow`.
    decoder : Module
        Maps codes ``(*batch, latent_dim)`` to what the likelihood needs; see
        :class:`~bayeskit.models.vae.likelihoods.Likelihood`.
    latent_dim : int
    likelihood : Likelihood
    data_shape : tuple of int
        Shape of a datum, such as ``(784,)`` or ``(1, 28, 28)``.
    prior : Module, optional
        Called without arguments it returns the distribution of codes; by default standard normal.

    Raises
    ------
    SettingsError
        If there is no code, or the shape is empty.

    References
    ----------
    Kingma, D. P., Welling, M. (2014). Auto-encoding variational Bayes. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import VAE, DiagonalNormal, likelihoods, mlp
    >>> encoder = torch.nn.Sequential(mlp([6, 8]), torch.nn.Tanh(), DiagonalNormal(8, 2))
    >>> vae = VAE(encoder, mlp([2, 8, 6]), 2, likelihoods.Bernoulli(), data_shape=(6,))
    >>> vae.encode(torch.zeros(5, 6)).shape, vae.generate(3, seed=0).shape
    (torch.Size([5, 2]), torch.Size([3, 6]))
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        latent_dim: int,
        likelihood: Likelihood,
        data_shape: tuple[int, ...],
        prior: nn.Module | None = None,
    ) -> None:
        super().__init__(encoder, decoder, latent_dim, likelihood, data_shape, prior)


def mlp_vae(
    data_dim: int = 784,
    hidden: Sequence[int] = (200, 200),
    latent_dim: int = 50,
    likelihood: Likelihood | None = None,
    activation: Activation = nn.Tanh,
) -> VAE:
    """Create a VAE of vectors, with multilayer perceptrons as encoder and decoder.

    Parameters
    ----------
    data_dim : int, default 784
    hidden : sequence of int, default (200, 200)
        Units of the encoder's hidden layers; the decoder has them in reverse.
    latent_dim : int, default 50
    likelihood : Likelihood, optional
        By default Bernoulli.
    activation : callable, default torch.nn.Tanh

    Raises
    ------
    SettingsError
        If a dimension is not positive or there is no hidden layer.

    Examples
    --------
    >>> import torch, pyro
    >>> from bayeskit.inference.objectives import IWAE
    >>> from bayeskit.models.vae import mlp_vae
    >>> vae = mlp_vae(data_dim=64, hidden=(20,), latent_dim=5)
    >>> optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
    >>> loss = IWAE(num_particles=4).differentiable_loss(vae.model, vae.guide, torch.zeros(10, 64))
    >>> loss.backward()
    >>> optimizer.step()
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    check_hidden(hidden)
    check_sizes(data_dim, latent_dim)
    encoder = nn.Sequential(features(data_dim, hidden, activation), DiagonalNormal(hidden[-1], latent_dim))
    decoder = mlp([latent_dim, *reversed(hidden), likelihood.num_parameters * data_dim], activation)
    return VAE(encoder, decoder, latent_dim, likelihood, (data_dim,))


def convolutional_vae(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    channels: Sequence[int] = (32, 64),
    num_features: int = 256,
    latent_dim: int = 50,
    likelihood: Likelihood | None = None,
    activation: Activation = nn.ReLU,
) -> VAE:
    """Create a VAE of images ``(channels, height, width)``, with convolutional encoder and decoder.

    Parameters
    ----------
    image_shape : tuple of int, default (1, 28, 28)
        Height and width must be divisible by two once for each of ``channels``.
    channels : sequence of int, default (32, 64)
        Of the encoder's convolutions, each of which halves height and width; the decoder has them in reverse.
    num_features : int, default 256
        Units between convolutions and code.
    latent_dim : int, default 50
    likelihood : Likelihood, optional
        By default Bernoulli.
    activation : callable, default torch.nn.ReLU

    Raises
    ------
    SettingsError
        If a dimension is not positive, or height or width cannot be halved often enough.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import convolutional_vae
    >>> convolutional_vae((1, 8, 8), latent_dim=5).reconstruct(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 1, 8, 8])
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    check_sizes(*image_shape, *channels, num_features, latent_dim)
    convolutions = ConvolutionalFeatures(image_shape, channels, num_features, activation)
    encoder = nn.Sequential(convolutions, DiagonalNormal(num_features, latent_dim))
    output_shape = (likelihood.num_parameters * image_shape[0], *image_shape[1:])
    decoder = ConvolutionalDecoder(latent_dim, output_shape, list(reversed(channels)), num_features, activation)
    return VAE(encoder, decoder, latent_dim, likelihood, image_shape)


def features(num_inputs: int, hidden: Sequence[int], activation: Activation = nn.Tanh) -> nn.Sequential:
    """Create a multilayer perceptron with an activation after its last layer, too."""
    return nn.Sequential(*mlp([num_inputs, *hidden], activation), activation())
