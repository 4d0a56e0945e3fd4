"""Variational autoencoders: standard, conditional, hierarchical, for missing data, and semi-supervised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import is_validation_enabled
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import global_stream, new_generator, real_number, whole_number
from bayeskit.models.vae._distributions import independent
from bayeskit.models.vae._generative_model import Autoencoder, GenerativeModel, check_last_dim
from bayeskit.models.vae._networks import (
    Activation,
    ConvolutionalDecoder,
    ConvolutionalFeatures,
    DiagonalNormal,
    StandardNormal,
    check_hidden,
    check_sizes,
    mlp,
)
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood

# Variational autoencoders, and constructors for vectors and images.


class VAE(Autoencoder):
    """Variational autoencoder: a decoder defines the likelihood, an encoder the variational posterior.

    Raises ``SettingsError`` if ``latent_dim`` is not positive or ``data_shape`` is empty.

    Parameters
    ----------
    encoder : Module
        Maps observations ``(*batch, *data_shape)`` to the distribution of their codes, batch shape ``(*batch)`` and
        event shape ``(latent_dim,)``. Its last layer is for example :class:`~bayeskit.models.vae.DiagonalNormal` or
        :class:`~bayeskit.models.vae.ConditionalFlow`.
    decoder : Module
        Maps codes ``(*batch, latent_dim)`` to the parameters of the likelihood; see
        :class:`~bayeskit.models.vae.likelihoods.Likelihood`.
    latent_dim : int
    likelihood : Likelihood
    data_shape : tuple of int
        Shape of an observation, such as ``(784,)`` or ``(1, 28, 28)``.
    prior : Module, optional
        Returns the distribution of codes when called without arguments; default standard normal.

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


def mlp_vae(
    data_dim: int = 784,
    hidden: Sequence[int] = (200, 200),
    latent_dim: int = 50,
    likelihood: Likelihood | None = None,
    activation: Activation = nn.Tanh,
) -> VAE:
    """Create a VAE of vectors, with multilayer perceptrons as encoder and decoder.

    Raises ``SettingsError`` if a dimension is not positive or there is no hidden layer.

    Parameters
    ----------
    data_dim : int, default 784
    hidden : sequence of int, default (200, 200)
        Widths of the encoder's hidden layers; the decoder uses the reverse order.
    latent_dim : int, default 50
    likelihood : Likelihood, default Bernoulli()
    activation : callable, default torch.nn.Tanh

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

    Raises ``SettingsError`` if a dimension is not positive, or height or width is not divisible by ``2 **
    len(channels)``.

    Parameters
    ----------
    image_shape : tuple of int, default (1, 28, 28)
        Height and width must be divisible by ``2 ** len(channels)``.
    channels : sequence of int, default (32, 64)
        Channels of the encoder's stride-2 convolutions; the decoder uses the reverse order.
    num_features : int, default 256
        Width of the dense layer between convolutions and code.
    latent_dim : int, default 50
    likelihood : Likelihood, default Bernoulli()
    activation : callable, default torch.nn.ReLU

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
    """Create a multilayer perceptron with an activation after every layer, including the last."""
    return nn.Sequential(*mlp([num_inputs, *hidden], activation), activation())


# VAE of data given a condition.


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the one-hot encoding of integer labels: ``(*batch)`` to ``(*batch, num_classes)``.

    Raises ``DataError`` if labels are not whole numbers from 0 to ``num_classes - 1``.

    Examples
    --------
    >>> import torch
    >>> one_hot(torch.tensor([2, 0]), 3)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    _check_labels(labels, num_classes)
    return torch.nn.functional.one_hot(labels, num_classes).to(dtype)


def _check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise a ``DataError`` unless labels are whole numbers from 0 to ``num_classes - 1``."""
    if labels.dtype != torch.int64:
        raise DataError(f"labels have dtype {labels.dtype}, but must be int64; convert them with labels.long()")
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        raise DataError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, but must lie between 0 and "
            f"{num_classes - 1}; renumber the labels, or create the model with more classes"
        )


class ConditionalVAE(GenerativeModel):
    r"""VAE of data given a condition: :math:`z \sim N(0, I)`, :math:`x \mid z, y \sim p(x \mid z, y)`.

    Raises ``SettingsError`` if a dimension is not positive.

    Parameters
    ----------
    encoder : Module
        Maps concatenated data and condition, ``(*batch, data_dim + condition_dim)``, to the distribution of codes.
    decoder : Module
        Maps concatenated code and condition, ``(*batch, latent_dim + condition_dim)``, to likelihood parameters.
    latent_dim, condition_dim : int
    likelihood : Likelihood
    data_dim : int

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
    def model(self, x: Tensor, y: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row of ``x (n, data_dim)`` and observe the row under the likelihood.

        ``y``: conditions, ``(n, condition_dim)``; encode class labels with :func:`one_hot`. ``num_data`` as in
        :meth:`VAE.model`.
        """
        self.check(x)
        self.check_condition(y, x.shape[:-1])
        with self.data_plate(x, num_data):
            z = pyro.sample("z", self.prior())
            self.observe(x, self.decoder(beside(z, y)))

    @pyro_method
    def guide(self, x: Tensor, y: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row from the encoder's distribution; same arguments as :meth:`model`."""
        self.check_layout(x)
        self.check_condition(y, x.shape[:-1])
        with self.data_plate(x, num_data):
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
        """Draw one observation for each condition: ``(n, condition_dim)`` to ``(n, data_dim)``."""
        check_last_dim("y", y, self.condition_dim)
        with self.drawing(seed, "generate"):
            z = self.prior().sample(y.shape[:-1])
            return self.draw(self.decoder(beside(z, y)))

    def check_condition(self, y: Tensor, batch_shape: torch.Size) -> None:
        """Raise a ``ShapeError`` or ``DataError`` unless there is a finite condition for each observation."""
        if y.shape != (*batch_shape, self.condition_dim):
            raise ShapeError(
                f"y has shape {tuple(y.shape)}, but must have {(*batch_shape, self.condition_dim)}: one row of "
                "conditions per observation; encode class labels with one_hot"
            )
        if is_validation_enabled() and not bool(y.isfinite().all()):
            raise DataError("y has values that are not finite; remove their rows")


def beside(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate ``(*batch, m)`` and ``(*batch, n)`` to ``(*batch, m + n)``; batch shapes broadcast."""
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

    Raises ``SettingsError`` if a dimension is not positive or there is no hidden layer.

    Parameters
    ----------
    data_dim : int, default 784
    condition_dim : int, default 10
    hidden, latent_dim, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    check_hidden(hidden)
    check_sizes(data_dim, condition_dim, latent_dim)
    head = DiagonalNormal(hidden[-1], latent_dim)
    encoder = nn.Sequential(features(data_dim + condition_dim, hidden, activation), head)
    outputs = likelihood.num_parameters * data_dim
    decoder = mlp([latent_dim + condition_dim, *reversed(hidden), outputs], activation)
    return ConditionalVAE(encoder, decoder, latent_dim, condition_dim, likelihood, data_dim)


# VAE with several layers of latent codes.


class HierarchicalVAE(GenerativeModel):
    r"""VAE with several latent layers: :math:`p(z_L) \cdots p(z_1 \mid z_2)\, p(x \mid z_1)`.

    The guide factorizes bottom-up, :math:`q(z_1 \mid x)\, q(z_2 \mid z_1) \cdots`. Sites are named ``z1`` (adjacent to
    the data) to ``zL``. Raises ``SettingsError`` if there are fewer than two layers, or the numbers of encoders, priors
    and dimensions do not match.

    Parameters
    ----------
    encoders : sequence of Module
        Module 1 maps data to the distribution of ``z1``; module ``l`` maps ``z{l-1}`` to the distribution of ``z{l}``.
    priors : sequence of Module
        ``L - 1`` modules: module ``l`` maps ``z{l+1}`` to the distribution of ``z{l}``. ``zL`` is standard normal.
    decoder : Module
        Maps ``z1`` to the parameters of the likelihood.
    latent_dims : sequence of int
        Dimensions of ``z1`` to ``zL``.
    likelihood : Likelihood
    data_shape : tuple of int

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
                f"the model has {counts[0]} encoders, {counts[1] - 1} priors and {counts[2]} dimensions; L >= 2 layers "
                "need L encoders, L - 1 priors and L dimensions"
            )
        check_sizes(*latent_dims)
        self.latent_dims = tuple(latent_dims)
        self.encoders, self.priors = nn.ModuleList(encoders), nn.ModuleList(priors)
        self.decoder, self.top = decoder, StandardNormal(latent_dims[-1])

    @pyro_method
    def model(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw the codes top-down and observe the data ``(n, *data_shape)``; ``num_data`` as in :meth:`VAE.model`."""
        self.check(x)
        with self.data_plate(x, num_data):
            z = pyro.sample(f"z{len(self.latent_dims)}", self.top())
            for layer, prior in reversed(list(enumerate(self.priors, start=1))):
                z = pyro.sample(f"z{layer}", prior(z))
            self.observe(x, self.decoder(z))

    @pyro_method
    def guide(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw the codes bottom-up; same arguments as :meth:`model`."""
        self.check_layout(x)
        with self.data_plate(x, num_data):
            z = x
            for layer, encoder in enumerate(self.encoders, start=1):
                z = pyro.sample(f"z{layer}", encoder(z))

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the mean code of each layer given the mean code of the layer below, shapes ``(*batch, dim)``."""
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
        """Draw ``n`` observations from the model, shape ``(n, *data_shape)``."""
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

    Raises ``SettingsError`` if a dimension is not positive, or ``hidden`` and ``latent_dims`` differ in length or have
    fewer than two items.

    Parameters
    ----------
    data_dim, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    hidden : sequence of sequence of int
        Widths of the hidden layers between data and ``z1``, between ``z1`` and ``z2``, and so on.
    latent_dims : sequence of int, default (100, 50)
        Dimensions of ``z1``, ``z2``, ...
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    if len(hidden) != len(latent_dims):
        raise SettingsError(
            f"hidden has {len(hidden)} entries and latent_dims has {len(latent_dims)}; give both the same length"
        )
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


# VAE of data with missing entries.


class MissingDataVAE(PyroModule):  # type: ignore[misc]
    """Variational autoencoder for data with entries missing at random.

    Missing entries are integrated out exactly by masking the likelihood. The encoder receives zeros in their place, or
    what ``inputs`` makes of data and mask.

    Parameters
    ----------
    vae : Autoencoder
        A :class:`~bayeskit.models.vae.VAE` or :class:`~bayeskit.models.vae.LinearVAE`; parameters are shared.
    inputs : callable, optional
        Function of the data with zeros in place of missing entries, and of the mask, which returns the input of the
        encoder. A module's parameters are trained with the rest. Default: the data with zeros.

    References
    ----------
    Mattei, P.-A., Frellsen, J. (2019). MIWAE: deep generative modelling and imputation of incomplete data sets. ICML.

    Yi, J., Lee, J., Kim, K. J., Hwang, S. J., Yang, E. (2020). Why not to use zero imputation? Correcting sparsity bias
    in training neural networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import MissingDataVAE, mlp_vae
    >>> model = MissingDataVAE(mlp_vae(data_dim=3, hidden=(8,), latent_dim=2))
    >>> x = torch.tensor([[1.0, torch.nan, 0.0]])
    >>> model.impute(x, ~x.isnan(), 5, seed=0).shape
    torch.Size([5, 1, 3])

    Inputs divided by the share of observed entries (sparsity normalisation):

    >>> normalised = MissingDataVAE(model.vae, lambda x, mask: x / mask.to(x).mean(-1, keepdim=True).clamp_min(0.01))
    >>> normalised.impute(x, ~x.isnan(), 5, seed=0).shape
    torch.Size([5, 1, 3])
    """

    def __init__(self, vae: Autoencoder, inputs: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        if inputs is not None and not callable(inputs):
            raise SettingsError(f"inputs must be a function of data and mask, not {inputs!r:.80}")
        self.vae, self.inputs = vae, inputs

    @pyro_method
    def model(self, x: Tensor, mask: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row from the prior and observe the non-missing entries of the row.

        ``x``: ``(n, *data_shape)``; missing entries may have any value, including NaN. ``mask``: True where an entry is
        observed, same shape. ``num_data`` and errors as in :meth:`VAE.model`.
        """
        vae = self.vae
        filled = self.fill(x, mask)
        vae.check(filled)
        with vae.data_plate(filled, num_data):
            z = pyro.sample("z", vae.prior())
            pyro.sample("x", self._observed(vae.decoder(z), mask), obs=filled)

    @pyro_method
    def guide(self, x: Tensor, mask: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row from the encoder's distribution; same arguments as :meth:`model`."""
        vae = self.vae
        filled = self.fill(x, mask)
        vae.check_layout(filled)
        with vae.data_plate(filled, num_data):
            pyro.sample("z", self.posterior(filled, mask))

    def posterior(self, x: Tensor, mask: Tensor) -> Any:
        """Return the encoder's distribution of codes given the observed entries; arguments as of :meth:`impute`."""
        filled = self.fill(x, mask)
        return self.vae.encoder(filled if self.inputs is None else self.inputs(filled, mask))

    def fill(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the data with zeros in place of missing entries.

        Raises ``ShapeError`` if ``mask`` and ``x`` differ in shape; ``DataError`` if ``mask`` is not boolean.
        """
        if mask.dtype != torch.bool:
            raise DataError(
                f"mask has dtype {mask.dtype}, but must be bool, True for observed entries; convert it with mask.bool()"
            )
        if mask.shape != x.shape:
            raise ShapeError(f"mask has shape {tuple(mask.shape)}, but must have the shape of x, {tuple(x.shape)}")
        return torch.where(mask, x, 0.0)

    def impute(
        self, x: Tensor, mask: Tensor, n: int = 1, *, num_particles: int = 100, seed: int | torch.Generator
    ) -> Tensor:
        """Draw the missing entries given the observed entries, by sampling importance resampling.

        Codes are drawn from the encoder's distribution and resampled by their importance weights. The draws converge to
        the posterior predictive distribution as ``num_particles`` grows. ``x``, ``mask``: ``(*batch, *data_shape)``.
        ``num_particles``: number of codes resampled from; 1 uses the encoder's distribution without correction. Returns
        ``(n, *batch, *data_shape)``; observed entries are copied from ``x``. Raises ``SettingsError`` if ``n`` or
        ``num_particles`` is less than 1.
        """
        if min(n, num_particles) < 1:
            raise SettingsError(f"n and num_particles must be at least 1, not {n} and {num_particles}")
        vae = self.vae
        filled = self.fill(x, mask)
        vae.check(filled)
        with torch.no_grad(), global_stream(new_generator(seed, stream="impute")):
            posterior = self.posterior(filled, mask)
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


# VAE with a class label that is observed for some observations.


class SemiSupervisedVAE(GenerativeModel):
    r"""VAE with a class label: :math:`y \sim` uniform, :math:`z \sim N(0, I)`, :math:`x \sim p(x \mid y, z)`.

    Call model and guide once on the labelled observations with ``y`` and once on the unlabelled observations without
    it; the loss of the data set is the sum. Unknown labels are enumerated (``infer={"enumerate": "parallel"}`` in the
    guide). Raises ``SettingsError`` if a dimension is not positive, there are fewer than two classes, or the weight is
    negative.

    Parameters
    ----------
    classifier : Module
        Maps data ``(*batch, data_dim)`` to class logits ``(*batch, num_classes)``, used by the guide.
    encoder : Module
        Maps concatenated data and one-hot label, ``(*batch, data_dim + num_classes)``, to the distribution of codes.
    decoder : Module
        Maps concatenated code and one-hot label, ``(*batch, latent_dim + num_classes)``, to likelihood parameters.
    latent_dim, num_classes : int
    likelihood : Likelihood
    data_dim : int
    classification_weight : float, default 0.0
        Weight of the classifier's log probability of known labels in the objective. With weight 0 the classifier is
        trained on unlabelled data only.

    References
    ----------
    Kingma, D. P., Rezende, D. J., Mohamed, S., Welling, M. (2014). Semi-supervised learning with deep generative
    models. NeurIPS (model M2).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import semi_supervised_vae
    >>> vae = semi_supervised_vae(data_dim=6, num_classes=3, hidden=(8,), latent_dim=2)
    >>> vae.classify(torch.zeros(5, 6)).shape
    torch.Size([5, 3])
    """

    class_logits: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        encoder: nn.Module,
        decoder: nn.Module,
        latent_dim: int,
        num_classes: int,
        likelihood: Likelihood,
        data_dim: int,
        classification_weight: float = 0.0,
    ) -> None:
        super().__init__((data_dim,), likelihood)
        check_sizes(latent_dim)
        num_classes = whole_number("num_classes", num_classes, least=2)
        classification_weight = real_number("classification_weight", classification_weight, "[0, inf)")
        self.latent_dim, self.num_classes = latent_dim, num_classes
        self.classification_weight = classification_weight
        self.classifier, self.encoder, self.decoder = classifier, encoder, decoder
        self.prior = StandardNormal(latent_dim)
        self.register_buffer("class_logits", torch.zeros(num_classes), persistent=False)

    @pyro_method
    def model(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
        """Draw a label ``y`` and a code ``z`` for each row of ``x (n, data_dim)``; observe the row and a known label.

        ``y``: integer labels, ``(n,)``; None if unknown. ``num_data`` (of the labelled or unlabelled set) and errors
        as in :meth:`VAE.model`.
        """
        self.check(x)
        self._check_labels(x, y)
        with self.data_plate(x, num_data):
            label = pyro.sample("y", dist.Categorical(logits=self.class_logits, validate_args=False), obs=y)
            if y is not None and self.classification_weight:
                log_probability = self._classes(x).log_prob(y)
                pyro.factor("classification", self.classification_weight * log_probability)
            z = pyro.sample("z", self.prior())
            self.observe(x, self.decoder(beside(z, self._one_hot(label))))

    @pyro_method
    def guide(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
        """Draw the label (unless given) from the classifier and the code from the encoder; see :meth:`model`."""
        self.check_layout(x)
        with self.data_plate(x, num_data):
            label = y
            if label is None:
                label = pyro.sample("y", self._classes(x), infer={"enumerate": "parallel"})
            pyro.sample("z", self.encoder(beside(x, self._one_hot(label))))

    def classify(self, x: Tensor) -> Tensor:
        """Return the classifier's probabilities: ``(*batch, data_dim)`` to ``(*batch, num_classes)``."""
        self.check(x)
        with torch.no_grad():
            return self.classifier(x).softmax(-1)

    def encode(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean code ``(*batch, latent_dim)`` given the label, default the most probable label."""
        self._check_labels(x, y)
        label = self.classify(x).argmax(-1) if y is None else y
        with torch.no_grad():
            return self.encoder(beside(x, self._one_hot(label))).mean

    def decode(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the data given codes ``(*batch, latent_dim)`` and labels ``(*batch)``."""
        check_last_dim("z", z, self.latent_dim)
        _check_labels(y, self.num_classes)
        with torch.no_grad():
            return self.expectation(self.decoder(beside(z, self._one_hot(y))))

    def reconstruct(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean of the data given the mean code and the label, default the most probable label."""
        self._check_labels(x, y)
        label = self.classify(x).argmax(-1) if y is None else y
        return self.decode(self.encode(x, label), label)

    def generate(self, n: int, *, seed: int | torch.Generator, y: Tensor | None = None) -> Tensor:
        """Draw ``n`` observations, ``(n, data_dim)``, given labels ``y (n,)``, default drawn uniformly."""
        if y is not None:
            _check_labels(y, self.num_classes)
            if y.shape != (n,):
                raise ShapeError(f"y has shape {tuple(y.shape)}, but must have one label for each observation, ({n},)")
        with self.drawing(seed, "generate"):
            label = dist.Categorical(logits=self.class_logits).sample((n,)) if y is None else y
            return self.draw(self.decoder(beside(self.prior().sample((n,)), self._one_hot(label))))

    def _classes(self, x: Tensor) -> dist.Categorical:
        return dist.Categorical(logits=self.classifier(x), validate_args=False)

    def _one_hot(self, label: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(label, self.num_classes)

    def _check_labels(self, x: Tensor, y: Tensor | None) -> None:
        if y is None:
            return
        if y.shape != x.shape[:-1]:
            raise ShapeError(
                f"y has shape {tuple(y.shape)}, but must have one label for each observation, {tuple(x.shape[:-1])}"
            )
        _check_labels(y, self.num_classes)


def semi_supervised_vae(
    data_dim: int = 784,
    num_classes: int = 10,
    hidden: Sequence[int] = (200, 200),
    latent_dim: int = 50,
    likelihood: Likelihood | None = None,
    activation: Activation = nn.Tanh,
    classification_weight: float = 0.0,
) -> SemiSupervisedVAE:
    """Create a semi-supervised VAE of vectors, with multilayer perceptrons as classifier, encoder and decoder.

    Raises ``SettingsError`` if a dimension is not positive, there is no hidden layer, or there are fewer than two
    classes.

    Parameters
    ----------
    data_dim : int, default 784
    num_classes : int, default 10
    hidden, latent_dim, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    classification_weight : float, default 0.0
        As in :class:`SemiSupervisedVAE`.
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    check_hidden(hidden)
    check_sizes(data_dim, num_classes, latent_dim)
    classifier = mlp([data_dim, *hidden, num_classes], activation)
    head = DiagonalNormal(hidden[-1], latent_dim)
    encoder = nn.Sequential(features(data_dim + num_classes, hidden, activation), head)
    outputs = likelihood.num_parameters * data_dim
    decoder = mlp([latent_dim + num_classes, *reversed(hidden), outputs], activation)
    return SemiSupervisedVAE(
        classifier, encoder, decoder, latent_dim, num_classes, likelihood, data_dim, classification_weight
    )
