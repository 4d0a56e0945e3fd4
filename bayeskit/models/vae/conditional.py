"""VAE of data given what is known about them."""

from __future__ import annotations

from collections.abc import Sequence

import pyro
import torch
from pyro.distributions import is_validation_enabled
from pyro.nn import pyro_method
from torch import Tensor, nn

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.vae.autoencoder import features
from bayeskit.models.vae.generative_model import GenerativeModel, check_last_dim
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood
from bayeskit.models.vae.networks import Activation, DiagonalNormal, StandardNormal, check_hidden, check_sizes, mlp


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return labels as vectors: ``(*batch)`` of whole numbers to ``(*batch, num_classes)``.

    Raises
    ------
    DataError
        If labels are not whole numbers from 0 to ``num_classes - 1``.

    Examples
    --------
    >>> import torch
    >>> one_hot(torch.tensor([2, 0]), 3)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    check_labels(labels, num_classes)
    return torch.nn.functional.one_hot(labels, num_classes).to(dtype)


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise a ``DataError`` unless labels are whole numbers from 0 to ``num_classes - 1``."""
    if labels.dtype != torch.int64:
        raise DataError(f"labels are {labels.dtype}; convert them with labels.long()")
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        raise DataError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, but must lie between 0 and "
            f"{num_classes - 1}; renumber them, or make the model with more classes"
        )


class ConditionalVAE(GenerativeModel):
    r"""VAE of data given a condition: :math:`z \sim N(0, I)`, :math:`x \mid z, y \sim p(x \mid z, y)`.

    Parameters
    ----------
    encoder : Module
        Maps data and condition side by side, ``(*batch, data_dim + condition_dim)``, to the distribution of codes.
    decoder : Module
        Maps code and condition side by side, ``(*batch, latent_dim + condition_dim)``, to what the likelihood needs.
    latent_dim, condition_dim : int
    likelihood : Likelihood
    data_dim : int

    Raises
    ------
    SettingsError
        If a dimension is not positive.

    References
    ----------
    Sohn, K., Lee, H., Yan, X. (2015). Learning structured output representation using deep conditional generative
    models. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import conditional_vae, one_hot
    >>> vae = conditional_vae(data_dim=6, condition_dim=3, hidden=(8,), latent_dim=2)
    >>> vae.generate(one_hot(torch.tensor([0, 2]), 3), seed=0).shape
    torch.Size([2, 6])
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        latent_dim: int,
        condition_dim: int,
        likelihood: Likelihood,
        data_dim: int,
    ) -> None:
        super().__init__((data_dim,), likelihood)
        check_sizes(latent_dim, condition_dim)
        self.latent_dim, self.condition_dim = latent_dim, condition_dim
        self.encoder, self.decoder, self.prior = encoder, decoder, StandardNormal(latent_dim)

    @pyro_method
    def model(self, x: Tensor, y: Tensor, num_items: int | None = None) -> None:
        """Draw a code ``z`` for each row from the prior, and condition the likelihood on the row.

        Parameters
        ----------
        x : Tensor
            Shape ``(n, data_dim)``.
        y : Tensor
            Conditions, ``(n, condition_dim)``; for labels see :func:`one_hot`.
        num_items : int, optional
            Size of the data set of which ``x`` is a minibatch; by default ``x`` is all of it.
        """
        self.check(x)
        self.check_condition(y, x.shape[:-1])
        with self.data_plate(x, num_items):
            z = pyro.sample("z", self.prior())
            self.observe(x, self.decoder(beside(z, y)))

    @pyro_method
    def guide(self, x: Tensor, y: Tensor, num_items: int | None = None) -> None:
        """Draw a code ``z`` for each row from the encoder's distribution; arguments as of :meth:`model`."""
        self.check_layout(x)
        self.check_condition(y, x.shape[:-1])
        with self.data_plate(x, num_items):
            pyro.sample("z", self.encoder(beside(x, y)))

    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the encoder's distribution, ``(*batch, latent_dim)``."""
        self.check(x)
        self.check_condition(y, x.shape[:-1])
        with torch.no_grad():
            return self.encoder(beside(x, y)).mean

    def decode(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the data given code and condition, ``(*batch, data_dim)``."""
        check_last_dim("z", z, self.latent_dim)
        check_last_dim("y", y, self.condition_dim)
        with torch.no_grad():
            return self.expectation(self.decoder(beside(z, y)))

    def reconstruct(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the data given condition and the mean code of ``x``, in the shape of ``x``."""
        return self.decode(self.encode(x, y), y)

    def generate(self, y: Tensor, *, seed: int | torch.Generator) -> Tensor:
        """Draw one datum from the model for each condition: ``(n, condition_dim)`` to ``(n, data_dim)``."""
        check_last_dim("y", y, self.condition_dim)
        with self.drawing(seed, "generate"):
            z = self.prior().sample(y.shape[:-1])
            return self.draw(self.decoder(beside(z, y)))

    def check_condition(self, y: Tensor, batch_shape: torch.Size) -> None:
        """Raise a ``ShapeError`` or ``DataError`` unless there is a finite condition for each datum."""
        if y.shape != (*batch_shape, self.condition_dim):
            raise ShapeError(
                f"y has shape {tuple(y.shape)}, but must have {(*batch_shape, self.condition_dim)}: one row of "
                "conditions for each datum; turn labels into rows with one_hot"
            )
        if is_validation_enabled() and not bool(y.isfinite().all()):
            raise DataError("y has values that are not finite; take out their rows")


def beside(first: Tensor, second: Tensor) -> Tensor:
    """Join vectors ``(*batch, m)`` and ``(*batch, n)`` to ``(*batch, m + n)``; batches are broadcast."""
    batch = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    return torch.cat([first.expand(*batch, -1), second.to(first.dtype).expand(*batch, -1)], -1)


def conditional_vae(
    data_dim: int = 784,
    condition_dim: int = 10,
    hidden: Sequence[int] = (200, 200),
    latent_dim: int = 50,
    likelihood: Likelihood | None = None,
    activation: Activation = nn.Tanh,
) -> ConditionalVAE:
    """Create a conditional VAE of vectors, with multilayer perceptrons as encoder and decoder.

    Parameters
    ----------
    data_dim : int, default 784
    condition_dim : int, default 10
    hidden, latent_dim, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.

    Raises
    ------
    SettingsError
        If a dimension is not positive or there is no hidden layer.
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    check_hidden(hidden)
    check_sizes(data_dim, condition_dim, latent_dim)
    head = DiagonalNormal(hidden[-1], latent_dim)
    encoder = nn.Sequential(features(data_dim + condition_dim, hidden, activation), head)
    outputs = likelihood.num_parameters * data_dim
    decoder = mlp([latent_dim + condition_dim, *reversed(hidden), outputs], activation)
    return ConditionalVAE(encoder, decoder, latent_dim, condition_dim, likelihood, data_dim)
