"""VAE of data with missing entries."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.vae.generative_model import Autoencoder
from bayeskit.models.vae.likelihoods import independent


class MissingDataVAE(PyroModule):  # type: ignore[misc]
    """An autoencoder trained on the observed entries of its data, which must be missing at random.

    The likelihood of missing entries contributes nothing, so that they are integrated out exactly; the encoder sees
    zeros in their place.

    Parameters
    ----------
    vae : Autoencoder
        A :class:`~bayeskit.models.vae.VAE` or :class:`~bayeskit.models.vae.LinearVAE`; it shares its parameters.

    References
    ----------
    Mattei, P.-A., Frellsen, J. (2019). MIWAE: deep generative modelling and imputation of incomplete data sets. ICML.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import MissingDataVAE, mlp_vae
    >>> model = MissingDataVAE(mlp_vae(data_dim=3, hidden=(8,), latent_dim=2))
    >>> x = torch.tensor([[1.0, torch.nan, 0.0]])
    >>> model.impute(x, ~x.isnan(), 5, seed=0).shape
    torch.Size([5, 1, 3])
    """

    def __init__(self, vae: Autoencoder) -> None:
        super().__init__()
        self.vae = vae

    @pyro_method
    def model(self, x: Tensor, mask: Tensor, num_items: int | None = None) -> None:
        """Draw a code ``z`` for each row from the prior, and condition the likelihood on the row's observed entries.

        Parameters
        ----------
        x : Tensor
            Shape ``(n, *data_shape)``; missing entries may hold anything, also NaN.
        mask : Tensor of bool
            True where an entry is observed, same shape.
        num_items : int, optional
            Size of the data set of which ``x`` is a minibatch; by default ``x`` is all of it.

        Raises
        ------
        ShapeError, DataError, SettingsError
            If the data do not fit.
        """
        vae = self.vae
        filled = self.fill(x, mask)
        vae.check(filled)
        with vae.data_plate(filled, num_items):
            z = pyro.sample("z", vae.prior())
            pyro.sample("x", self._observed(vae.decoder(z), mask), obs=filled)

    @pyro_method
    def guide(self, x: Tensor, mask: Tensor, num_items: int | None = None) -> None:
        """Draw a code ``z`` for each row from the encoder's distribution; arguments as of :meth:`model`."""
        vae = self.vae
        filled = self.fill(x, mask)
        vae.check_layout(filled)
        with vae.data_plate(filled, num_items):
            pyro.sample("z", vae.encoder(filled))

    def fill(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the data with zeros in place of missing entries.

        Raises
        ------
        ShapeError
            If the mask has another shape.
        DataError
            If it is not of bool.
        """
        if mask.dtype != torch.bool:
            raise DataError(f"the mask is {mask.dtype}; give bool, True where an entry is observed: mask.bool()")
        if mask.shape != x.shape:
            raise ShapeError(f"the mask has shape {tuple(mask.shape)}, but the data have {tuple(x.shape)}")
        return torch.where(mask, x, 0.0)

    def impute(
        self, x: Tensor, mask: Tensor, n: int = 1, *, num_particles: int = 100, seed: int | torch.Generator
    ) -> Tensor:
        """Draw the missing entries given the observed ones.

        Codes are drawn from the encoder's distribution and resampled by their importance weights, so that the
        draws follow the model's posterior predictive as ``num_particles`` grows, however good the encoder is.

        Parameters
        ----------
        x, mask : Tensor
            Shape ``(*batch, *data_shape)``.
        n : int, default 1
        num_particles : int, default 100
            Codes from which each draw's is chosen; one keeps the encoder's distribution.
        seed : int or torch.Generator

        Returns
        -------
        Tensor
            Shape ``(n, *batch, *data_shape)``; observed entries are those of ``x``.

        Raises
        ------
        SettingsError
            If there is nothing to draw.
        """
        if min(n, num_particles) < 1:
            raise SettingsError(f"n and num_particles must be at least 1, not {n} and {num_particles}")
        vae = self.vae
        filled = self.fill(x, mask)
        vae.check(filled)
        with torch.no_grad(), global_stream(new_generator(seed, stream="impute")):
            posterior = vae.encoder(filled)
            z = posterior.rsample((num_particles,))
            log_weight = vae.prior().log_prob(z) - posterior.log_prob(z)
            log_weight = log_weight + self._observed(vae.decoder(z), mask).log_prob(filled)
            chosen = torch.distributions.Categorical(logits=log_weight.movedim(0, -1), validate_args=False).sample((n,))
            z = z.gather(0, chosen.unsqueeze(-1).expand(*chosen.shape, z.shape[-1]))
            return torch.where(mask, filled, vae.draw(vae.decoder(z)))

    def _observed(self, outputs: Tensor, mask: Tensor) -> Any:
        """Return the likelihood in which missing entries have density one."""
        event_dim = self.vae.event_dim
        return independent(self.vae.likelihood(outputs, event_dim).base_dist.mask(mask), event_dim)
