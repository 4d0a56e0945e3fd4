"""VAE with several layers of codes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyro
from pyro.nn import pyro_method
from torch import Tensor, nn

from bayeskit.errors import SettingsError
from bayeskit.models.vae.autoencoder import features
from bayeskit.models.vae.generative_model import GenerativeModel, check_last_dim
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood
from bayeskit.models.vae.networks import Activation, DiagonalNormal, StandardNormal, check_hidden, check_sizes, mlp


class HierarchicalVAE(GenerativeModel):
    r"""VAE with a chain of codes: :math:`p(z_L) \cdots p(z_1 \mid z_2)\, p(x \mid z_1)`.

    The guide runs bottom-up, :math:`q(z_1 \mid x)\, q(z_2 \mid z_1) \cdots`, against the direction of the model.
    Sites are named ``z1`` (next to the data) to ``zL``.

    Parameters
    ----------
    encoders : sequence of Module
        The first maps data to the distribution of ``z1``, each further one a code to the distribution of the next.
    priors : sequence of Module
        One less: the first maps ``z2`` to the distribution of ``z1``, and so on. The last code is standard normal.
    decoder : Module
        Maps ``z1`` to what the likelihood needs.
    latent_dims : sequence of int
        Dimensions of ``z1`` to ``zL``.
    likelihood : Likelihood
    data_shape : tuple of int

    Raises
    ------
    SettingsError
        If there are fewer than two layers, or their numbers do not agree.

    References
    ----------
    Burda, Y., Grosse, R., Salakhutdinov, R. (2016). Importance weighted autoencoders. ICLR (the two-layer model).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import hierarchical_vae
    >>> vae = hierarchical_vae(data_dim=6, hidden=((8,), (8,)), latent_dims=(3, 2))
    >>> [code.shape[1] for code in vae.encode(torch.zeros(5, 6))]
    [3, 2]
    """

    def __init__(
        self,
        encoders: Sequence[nn.Module],
        priors: Sequence[nn.Module],
        decoder: nn.Module,
        latent_dims: Sequence[int],
        likelihood: Likelihood,
        data_shape: tuple[int, ...],
    ) -> None:
        super().__init__(data_shape, likelihood)
        counts = len(encoders), len(priors) + 1, len(latent_dims)
        if len(set(counts)) > 1 or len(encoders) < 2:
            raise SettingsError(
                f"{counts[0]} encoders, {counts[1] - 1} priors and {counts[2]} dimensions; L >= 2 layers need L "
                "encoders, L - 1 priors and L dimensions"
            )
        check_sizes(*latent_dims)
        self.latent_dims = tuple(latent_dims)
        self.encoders, self.priors = nn.ModuleList(encoders), nn.ModuleList(priors)
        self.decoder, self.top = decoder, StandardNormal(latent_dims[-1])

    @pyro_method
    def model(self, x: Tensor, num_items: int | None = None) -> None:
        """Draw codes from the top down, and condition the likelihood on the data.

        Parameters
        ----------
        x : Tensor
            Shape ``(n, *data_shape)``.
        num_items : int, optional
            Size of the data set of which ``x`` is a minibatch; by default ``x`` is all of it.
        """
        self.check(x)
        with self.data_plate(x, num_items):
            z = pyro.sample(f"z{len(self.latent_dims)}", self.top())
            for layer, prior in reversed(list(enumerate(self.priors, start=1))):
                z = pyro.sample(f"z{layer}", prior(z))
            self.observe(x, self.decoder(z))

    @pyro_method
    def guide(self, x: Tensor, num_items: int | None = None) -> None:
        """Draw codes from the bottom up; arguments as of :meth:`model`."""
        self.check_layout(x)
        with self.data_plate(x, num_items):
            z = x
            for layer, encoder in enumerate(self.encoders, start=1):
                z = pyro.sample(f"z{layer}", encoder(z))

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return, for each layer, the mean of its code given the mean of the one below: ``(*batch, dim)`` each."""
        self.check(x)
        codes = [x]
        with self.drawing(0, "encode"):
            for encoder in self.encoders:
                codes.append(encoder(codes[-1]).mean)
        return codes[1:]

    def decode(self, z: Tensor) -> Tensor:
        """Return the mean of the data given ``z1``: ``(*batch, latent_dims[0])`` to ``(*batch, *data_shape)``."""
        check_last_dim("z", z, self.latent_dims[0])
        with self.drawing(0, "decode"):
            return self.expectation(self.decoder(z))

    def reconstruct(self, x: Tensor) -> Tensor:
        """Return the mean of the data given the mean of ``z1``, in the shape of ``x``."""
        return self.decode(self.encode(x)[0])

    def generate(self, n: int, *, seed: int) -> Tensor:
        """Draw ``n`` data from the model: shape ``(n, *data_shape)``."""
        with self.drawing(seed, "generate"):
            z = self.top().sample((n,))
            for prior in reversed(list(self.priors)):
                z = prior(z).sample()
            return self.draw(self.decoder(z))


def hierarchical_vae(
    data_dim: int = 784,
    hidden: Sequence[Sequence[int]] = ((200, 200), (100, 100)),
    latent_dims: Sequence[int] = (100, 50),
    likelihood: Likelihood | None = None,
    activation: Activation = nn.Tanh,
) -> HierarchicalVAE:
    """Create a hierarchical VAE of vectors, with multilayer perceptrons between its layers.

    Parameters
    ----------
    data_dim : int, default 784
    hidden : sequence of sequence of int
        Units of the hidden layers between data and ``z1``, between ``z1`` and ``z2``, and so on.
    latent_dims : sequence of int, default (100, 50)
        Dimensions of ``z1``, ``z2``, ...
    likelihood : Likelihood, optional
        By default Bernoulli.
    activation : callable, default torch.nn.Tanh

    Raises
    ------
    SettingsError
        If a dimension is not positive, or ``hidden`` and ``latent_dims`` are not of one length of at least two.
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    if len(hidden) != len(latent_dims):
        raise SettingsError(f"hidden has {len(hidden)} layers, latent_dims has {len(latent_dims)}; give as many")
    check_sizes(data_dim, *latent_dims)
    for units in hidden:
        check_hidden(units)
    sizes = [data_dim, *latent_dims]
    encoders = [
        nn.Sequential(features(below, units, activation), DiagonalNormal(units[-1], above))
        for (below, above), units in zip(pairwise(sizes), hidden, strict=True)
    ]
    priors = [
        nn.Sequential(features(above, units[::-1], activation), DiagonalNormal(units[0], below))
        for (below, above), units in zip(pairwise(latent_dims), hidden[1:], strict=True)
    ]
    decoder = mlp([latent_dims[0], *reversed(hidden[0]), likelihood.num_parameters * data_dim], activation)
    return HierarchicalVAE(encoders, priors, decoder, latent_dims, likelihood, (data_dim,))
