"""Base classes of the variational autoencoders: data shape, likelihood, input checks, plate, and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.distributions import is_validation_enabled
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import global_stream, new_generator
from bayeskit.models.vae._networks import StandardNormal, check_sizes
from bayeskit.models.vae.likelihoods import Likelihood


class GenerativeModel(PyroModule):  # type: ignore[misc]
    """Base class of models with a data shape and a likelihood.

    Raises ``SettingsError`` if ``data_shape`` is empty.

    Parameters
    ----------
    data_shape : tuple of int
        Shape of an observation, such as ``(784,)`` or ``(1, 28, 28)``.
    likelihood : Likelihood
    """

    def __init__(self, data_shape: tuple[int, ...], likelihood: Likelihood) -> None:
        super().__init__()
        if not data_shape or min(data_shape) < 1:
            raise SettingsError(f"data_shape must have at least one dimension, each at least 1, not {data_shape}")
        self.data_shape = tuple(data_shape)
        self.likelihood = likelihood

    @property
    def event_dim(self) -> int:
        """Number of dimensions of an observation."""
        return len(self.data_shape)

    @property
    def _shape_text(self) -> str:
        return ", ".join(map(str, self.data_shape))

    def check(self, x: Tensor) -> None:
        """Check shape, dtype and values of data ``(*batch, *data_shape)``.

        Values are checked only while Pyro's validation is enabled (the default); ``pyro.enable_validation(False)``
        disables it. Raises ``ShapeError`` if the rightmost dimensions are not ``data_shape``; ``DataError`` if the
        dtype differs from that of the parameters, or a value is outside the support of the likelihood.
        """
        self.check_layout(x)
        if is_validation_enabled():
            self.likelihood.check(x)

    def check_layout(self, x: Tensor) -> None:
        """Check shape and dtype as in :meth:`check`, but not values."""
        if x.shape[-self.event_dim :] != self.data_shape:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, but must have shape (*batch, {self._shape_text}); reshape it, or "
                "create the model with another data_shape"
            )
        dtype = next(self.parameters()).dtype
        if x.dtype != dtype:
            raise DataError(
                f"x has dtype {x.dtype}, but the parameters have {dtype}; convert the data with x.to({dtype}) or the "
                f"model with .to({x.dtype})"
            )

    def data_plate(self, x: Tensor, num_data: int | None) -> Any:
        """Return the plate "data" over the rows of ``x (n, *data_shape)``.

        Raises ``ShapeError`` if ``x`` does not have exactly one batch dimension; ``SettingsError`` if ``num_data`` is
        less than ``n``.
        """
        if x.dim() != self.event_dim + 1:
            raise ShapeError(f"x has shape {tuple(x.shape)}; model and guide need (n, {self._shape_text})")
        size = len(x)
        if num_data is None or num_data == size:
            return pyro.plate("data", size, dim=-1)
        if num_data < size:
            raise SettingsError(
                f"num_data is {num_data}, but the minibatch has {size} observations; give the size of the full data set"
            )
        return pyro.plate("data", num_data, subsample=torch.arange(size, device=x.device), dim=-1)

    def observe(self, x: Tensor, outputs: Tensor) -> None:
        """Observe the data under the likelihood given the decoder's outputs."""
        pyro.sample("x", self.likelihood(outputs, self.event_dim), obs=x)

    def draw(self, outputs: Tensor) -> Tensor:
        """Draw data from the likelihood given the decoder's outputs."""
        return self.likelihood(outputs, self.event_dim).sample()

    def expectation(self, outputs: Tensor) -> Tensor:
        """Return the mean of the likelihood given the decoder's outputs."""
        return self.likelihood(outputs, self.event_dim).mean

    @contextmanager
    def drawing(self, seed: int | torch.Generator, stream: str) -> Iterator[None]:
        """Context: disable gradients and seed the random draws."""
        with torch.no_grad(), global_stream(new_generator(seed, stream=stream)):
            yield


class Autoencoder(GenerativeModel):
    """Base class of models with one code ``z`` per observation; its parameters and errors are those of :class:`VAE`."""

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        latent_dim: int,
        likelihood: Likelihood,
        data_shape: tuple[int, ...],
        prior: nn.Module | None = None,
    ) -> None:
        super().__init__(data_shape, likelihood)
        check_sizes(latent_dim)
        self.latent_dim = latent_dim
        self.encoder, self.decoder = encoder, decoder
        self.prior = StandardNormal(latent_dim) if prior is None else prior

    @pyro_method
    def model(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row from the prior and observe the row under the likelihood.

        ``x``: ``(n, *data_shape)``. ``num_data``: size of the full data set if ``x`` is a minibatch; default ``n``.
        Raises ``ShapeError`` if the shape of an argument does not match the model; ``DataError`` if a dtype or value is
        not valid; ``SettingsError`` if ``num_data`` is less than ``n``.
        """
        self.check(x)
        with self.data_plate(x, num_data):
            z = pyro.sample("z", self.prior())
            self.observe(x, self.decoder(z))

    @pyro_method
    def guide(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row from the encoder's distribution; same arguments as :meth:`model`."""
        self.check_layout(x)
        with self.data_plate(x, num_data):
            pyro.sample("z", self.encoder(x))

    def encode(self, x: Tensor, *, num_samples: int = 1000, seed: int | torch.Generator = 0) -> Tensor:
        """Return the mean of the encoder's distribution: ``(*batch, *data_shape)`` to ``(*batch, latent_dim)``.

        ``num_samples``: number of draws to average if the distribution has no closed-form mean (flows). ``seed``: used
        for these draws only.
        """
        self.check(x)
        with self.drawing(seed, "encode"):
            posterior = self.encoder(x)
            try:
                return posterior.mean
            except NotImplementedError:
                return posterior.sample((num_samples,)).mean(0)

    def decode(self, z: Tensor) -> Tensor:
        """Return the mean of the data given codes: ``(*batch, latent_dim)`` to ``(*batch, *data_shape)``.

        Raises ``ShapeError`` if the last dimension of ``z`` is not ``latent_dim``.
        """
        check_last_dim("z", z, self.latent_dim)
        with torch.no_grad():
            return self.expectation(self.decoder(z))

    def reconstruct(self, x: Tensor) -> Tensor:
        """Return the mean of the data given the mean code of ``x``, in the shape of ``x``."""
        return self.decode(self.encode(x))

    def generate(self, n: int, *, seed: int | torch.Generator) -> Tensor:
        """Draw ``n`` observations from the model, shape ``(n, *data_shape)``."""
        with self.drawing(seed, "generate"):
            return self.draw(self.decoder(self.prior().sample((n,))))


def check_last_dim(name: str, value: Tensor, size: int) -> None:
    """Raise a ``ShapeError`` unless the last dimension of ``value`` is ``size``."""
    if value.dim() < 1 or value.shape[-1] != size:
        raise ShapeError(f"{name} has shape {tuple(value.shape)}, but its last dimension must be {size}")
