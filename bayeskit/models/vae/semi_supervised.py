"""VAE with a class label that is known for some of the data."""

from __future__ import annotations

from collections.abc import Sequence

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import pyro_method
from torch import Tensor, nn

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.vae.autoencoder import features
from bayeskit.models.vae.conditional import beside, check_labels
from bayeskit.models.vae.generative_model import GenerativeModel, check_last_dim
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood
from bayeskit.models.vae.networks import Activation, DiagonalNormal, StandardNormal, check_hidden, check_sizes, mlp


class SemiSupervisedVAE(GenerativeModel):
    r"""VAE with a class label: :math:`y \sim` uniform, :math:`z \sim N(0, I)`, :math:`x \sim p(x \mid y, z)`.

    Call model and guide with labels where they are known and without where they are not; the loss of a data set is
    the sum of both. Unknown labels are summed out: the guide marks them ``infer={"enumerate": "parallel"}``.

    Parameters
    ----------
    classifier : Module
        Maps data ``(*batch, data_dim)`` to logits of the guide's classes, ``(*batch, num_classes)``.
    encoder : Module
        Maps data and one-hot label side by side, ``(*batch, data_dim + num_classes)``, to the distribution of codes.
    decoder : Module
        Maps code and one-hot label side by side, ``(*batch, latent_dim + num_classes)``, to what the likelihood needs.
    latent_dim, num_classes : int
    likelihood : Likelihood
    data_dim : int
    classification_weight : float, default 0.0
        Weight of the classifier's log probability of a known label, which is added to the log density: without it the
        classifier learns from unlabelled data alone.

    Raises
    ------
    SettingsError
        If a dimension is not positive, there are fewer than two classes, or the weight is negative.

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
        if num_classes < 2:
            raise SettingsError(f"num_classes must be at least 2, not {num_classes}")
        if not classification_weight >= 0:
            raise SettingsError(f"classification_weight must not be negative, not {classification_weight}")
        self.latent_dim, self.num_classes = latent_dim, num_classes
        self.classification_weight = classification_weight
        self.classifier, self.encoder, self.decoder = classifier, encoder, decoder
        self.prior = StandardNormal(latent_dim)
        self.register_buffer("class_logits", torch.zeros(num_classes), persistent=False)

    @pyro_method
    def model(self, x: Tensor, y: Tensor | None = None, num_items: int | None = None) -> None:
        """Draw a label ``y`` and a code ``z`` for each row, and condition on the row and, if given, its label.

        Parameters
        ----------
        x : Tensor
            Shape ``(n, data_dim)``.
        y : Tensor, optional
            Labels, whole numbers of shape ``(n,)``; None where they are not known.
        num_items : int, optional
            Size of the data set (labelled or unlabelled) of which ``x`` is a minibatch; by default ``x`` is all of it.

        Raises
        ------
        ShapeError, DataError, SettingsError
            If the data do not fit.
        """
        self.check(x)
        self._check_labels(x, y)
        with self.data_plate(x, num_items):
            label = pyro.sample("y", dist.Categorical(logits=self.class_logits, validate_args=False), obs=y)
            if y is not None and self.classification_weight:
                log_probability = self._classes(x).log_prob(y)
                pyro.factor("classification", self.classification_weight * log_probability)
            z = pyro.sample("z", self.prior())
            self.observe(x, self.decoder(beside(z, self._one_hot(label))))

    @pyro_method
    def guide(self, x: Tensor, y: Tensor | None = None, num_items: int | None = None) -> None:
        """Draw label, unless it is given, and code from classifier and encoder; arguments as of :meth:`model`."""
        self.check_layout(x)
        with self.data_plate(x, num_items):
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
        """Return the mean code given the label, by default the most probable: ``(*batch, latent_dim)``."""
        self._check_labels(x, y)
        label = self.classify(x).argmax(-1) if y is None else y
        with torch.no_grad():
            return self.encoder(beside(x, self._one_hot(label))).mean

    def decode(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the data given codes ``(*batch, latent_dim)`` and labels ``(*batch)``."""
        check_last_dim("z", z, self.latent_dim)
        check_labels(y, self.num_classes)
        with torch.no_grad():
            return self.expectation(self.decoder(beside(z, self._one_hot(y))))

    def reconstruct(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean of the data given label, by default the most probable, and mean code."""
        self._check_labels(x, y)
        label = self.classify(x).argmax(-1) if y is None else y
        return self.decode(self.encode(x, label), label)

    def generate(self, n: int, *, seed: int | torch.Generator, y: Tensor | None = None) -> Tensor:
        """Draw ``n`` data, ``(n, data_dim)``, with the labels ``y`` of shape ``(n,)`` or with labels of all classes."""
        if y is not None:
            check_labels(y, self.num_classes)
            if y.shape != (n,):
                raise ShapeError(f"y has shape {tuple(y.shape)}, but must have one label for each of {n} data")
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
            raise ShapeError(f"y has shape {tuple(y.shape)}, but must have one label for each of {tuple(x.shape[:-1])}")
        check_labels(y, self.num_classes)


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

    Parameters
    ----------
    data_dim : int, default 784
    num_classes : int, default 10
    hidden, latent_dim, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    classification_weight : float, default 0.0
        As in :class:`SemiSupervisedVAE`.

    Raises
    ------
    SettingsError
        If a dimension is not positive, there is no hidden layer, or there are fewer than two classes.
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
