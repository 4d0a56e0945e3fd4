"""Variational autoencoders with binary or categorical codes, with exact likelihood by enumeration."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import pyro_method
from torch import Tensor, nn

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.extend import as_numbers, checked_gradient, whole_number
from bayeskit.models.vae._autoencoders import features
from bayeskit.models.vae._distributions import independent
from bayeskit.models.vae._generative_model import GenerativeModel
from bayeskit.models.vae._networks import Activation, check_hidden, check_sizes, mlp
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood

#: Maximum number of enumerated codes.
_MAX_CODES = 1 << 16


class DiscreteVAE(GenerativeModel):
    r"""Base class of variational autoencoders with a discrete code, uniform a priori.

    The code of an observation is a single event of site ``z``, as required by the gradient estimators. Raises
    ``SettingsError`` if a shape is empty, or ``gradient`` is not an estimator.

    Parameters
    ----------
    encoder : Module
        Maps data ``(*batch, *data_shape)`` to code logits, ``(*batch, *parameter_shape)`` or flattened.
    decoder : Module
        Maps codes ``(*batch, *code_shape)`` to likelihood parameters. Some estimators pass relaxed (continuous) codes.
    code_shape : tuple of int
    likelihood : Likelihood
    data_shape : tuple of int
    gradient : object, optional
        Estimator of the guide's gradient from :mod:`bayeskit.inference.gradients`, set at the guide's site as
        ``infer={"gradient": gradient}``. None draws without an estimator, e.g. for importance sampling.
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        code_shape: tuple[int, ...],
        likelihood: Likelihood,
        data_shape: tuple[int, ...],
        gradient: object | None = None,
    ) -> None:
        super().__init__(data_shape, likelihood)
        check_sizes(*code_shape)
        self.encoder, self.decoder = encoder, decoder
        self.code_shape = code_shape
        self.gradient = checked_gradient(gradient)

    @property
    @abstractmethod
    def num_codes(self) -> int:
        """Number of codes."""

    @abstractmethod
    def code_distribution(self, logits: Tensor) -> Any:
        """Return the distribution of codes given logits, event shape ``code_shape``."""

    @abstractmethod
    def most_probable(self, logits: Tensor) -> Tensor:
        """Return the most probable code given logits, ``(*batch, *code_shape)``."""

    @abstractmethod
    def codes(self) -> Tensor:
        """Return all codes, ``(num_codes, *code_shape)``.

        This and the exact results below raise ``SettingsError`` if there are more than 65,536 codes.
        """

    def posterior(self, x: Tensor) -> Any:
        """Return the encoder's distribution of codes: data ``(*batch, *data_shape)`` to event shape ``code_shape``."""
        return self.code_distribution(self._logits(self._numbers(x)))

    def prior(self) -> Any:
        """Return the uniform distribution of codes."""
        like = next(self.parameters())
        return self.code_distribution(like.new_zeros(self.code_shape))

    @pyro_method
    def model(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row of ``x (n, *data_shape)`` and observe it, as in :meth:`Autoencoder.model`."""
        x = self._numbers(x)
        self.check(x)
        with self.data_plate(x, num_data):
            z = pyro.sample("z", self.prior())
            self.observe(x, self.decoder(z))

    @pyro_method
    def guide(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw a code ``z`` for each row from the encoder's distribution; same arguments as :meth:`model`."""
        x = self._numbers(x)
        self.check_layout(x)
        infer: Any = {} if self.gradient is None else {"gradient": self.gradient}
        with self.data_plate(x, num_data):
            pyro.sample("z", self.posterior(x), infer=infer)

    def encode(self, x: Tensor) -> Tensor:
        """Return the encoder's most probable codes: ``(*batch, *data_shape)`` to ``(*batch, *code_shape)``."""
        x = self._numbers(x)
        self.check(x)
        with torch.no_grad():
            return self.most_probable(self._logits(x))

    def decode(self, z: Tensor) -> Tensor:
        """Return the mean of the data given codes: ``(*batch, *code_shape)`` to ``(*batch, *data_shape)``.

        Raises ``ShapeError`` if the codes have a wrong shape.
        """
        z = self._numbers(z, "z")
        if z.shape[-len(self.code_shape) :] != self.code_shape:
            raise ShapeError(f"z has shape {tuple(z.shape)}, but codes have shape (*batch, *{self.code_shape})")
        with torch.no_grad():
            return self.expectation(self.decoder(z))

    def reconstruct(self, x: Tensor) -> Tensor:
        """Return the mean of the data given the most probable code of ``x``, in the shape of ``x``."""
        return self.decode(self.encode(x))

    def generate(self, n: int, *, seed: int | torch.Generator) -> Tensor:
        """Draw ``n`` observations from the model, shape ``(n, *data_shape)``."""
        with self.drawing(seed, "generate"):
            return self.draw(self.decoder(self.prior().sample((n,))))

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log joint density of each observation with every code, ``(num_codes, n)``, differentiable."""
        x = self._numbers(x)
        self.check(x)
        codes = self.codes()
        outputs = self.decoder(codes.unsqueeze(1))
        return self.likelihood(outputs, self.event_dim).log_prob(x) - math.log(self.num_codes)

    def log_evidence(self, x: Tensor) -> Tensor:
        """Return the exact marginal log likelihood of each observation: ``(n, *data_shape)`` to ``(n,)``."""
        return self.log_joint(x).logsumexp(0)

    def evidence_lower_bound(self, x: Tensor) -> Tensor:
        """Return the exact evidence lower bound of each observation by enumeration of the codes, ``(n,)``."""
        log_joint = self.log_joint(x)
        log_guide = self.posterior(x).log_prob(self.codes().unsqueeze(1))
        return (log_guide.exp() * (log_joint - log_guide)).sum(0)

    def _logits(self, x: Tensor) -> Tensor:
        return self.encoder(x).reshape(*x.shape[: x.dim() - self.event_dim], *self.code_shape)

    def _numbers(self, x: Tensor, name: str = "x") -> Tensor:
        """Return array-like data as a tensor; integers and bools get the dtype of the parameters."""
        found = as_numbers(name, x)
        return x if found is x and x.is_floating_point() else found.to(next(self.parameters()))

    def _digits(self, base: int) -> Tensor:
        """Return the numbers of all codes in a base, ``(num_codes, code_shape[0])``."""
        if self.num_codes > _MAX_CODES:
            raise SettingsError(
                f"there are {self.num_codes} codes, more than the limit of {_MAX_CODES} for enumeration; use a smaller "
                "code, or held_out.importance_sampling"
            )
        device = next(self.parameters()).device
        numbers = torch.arange(self.num_codes, device=device).unsqueeze(-1)
        return numbers // base ** torch.arange(self.code_shape[0], device=device) % base


class BinaryVAE(DiscreteVAE):
    """Variational autoencoder with binary codes; bits are independent with prior probability 1/2.

    Raises ``SettingsError`` if ``num_bits`` is less than 1, or ``data_shape`` is empty.

    Parameters
    ----------
    encoder : Module
        Maps data ``(*batch, *data_shape)`` to bit logits, ``(*batch, num_bits)``.
    decoder : Module
        Maps bits (0 and 1), ``(*batch, num_bits)``, to likelihood parameters.
    num_bits : int
    likelihood, data_shape, gradient
        As in :class:`DiscreteVAE`.

    References
    ----------
    Mnih, A., Gregor, K. (2014). Neural variational inference and learning in belief networks. ICML.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.gradients import DisARM
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.models.vae import binary_vae
    >>> vae = binary_vae(data_dim=6, hidden=(8,), num_bits=3, gradient=DisARM())
    >>> ELBO().differentiable_loss(vae.model, vae.guide, torch.zeros(5, 6)).backward()
    >>> vae.log_evidence(torch.zeros(5, 6)).shape, vae.generate(2, seed=0).shape
    (torch.Size([5]), torch.Size([2, 6]))
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        num_bits: int,
        likelihood: Likelihood,
        data_shape: tuple[int, ...],
        gradient: object | None = None,
    ) -> None:
        bits = whole_number("num_bits", num_bits, 1)
        super().__init__(encoder, decoder, (bits,), likelihood, data_shape, gradient)

    @property
    def num_codes(self) -> int:
        """``2**num_bits``."""
        return int(2 ** self.code_shape[0])

    def code_distribution(self, logits: Tensor) -> Any:
        """Return independent Bernoulli distributions, event shape ``(num_bits,)``."""
        return independent(dist.Bernoulli(logits=logits, validate_args=False), 1)

    def most_probable(self, logits: Tensor) -> Tensor:
        """Return 1 where logits are positive, else 0."""
        return (logits > 0).to(logits.dtype)

    def codes(self) -> Tensor:
        """Return all codes, ``(2**num_bits, num_bits)``."""
        return self._digits(2).to(next(self.parameters()))


class CategoricalVAE(DiscreteVAE):
    """Variational autoencoder with one-hot codes of independent, a priori uniform categorical variables.

    Raises ``SettingsError`` if there is no variable, there are fewer than two categories, or ``data_shape`` is empty.

    Parameters
    ----------
    encoder : Module
        Maps data ``(*batch, *data_shape)`` to logits, ``(*batch, num_variables * num_categories)``.
    decoder : Module
        Maps codes ``(*batch, num_variables, num_categories)`` to likelihood parameters.
    num_variables, num_categories : int
    likelihood, data_shape, gradient
        As in :class:`DiscreteVAE`.

    References
    ----------
    Jang, E., Gu, S., Poole, B. (2017). Categorical reparameterization with Gumbel-softmax. ICLR.

    Kool, W., van Hoof, H., Welling, M. (2020). Estimating gradients for discrete random variables by sampling without
    replacement. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.gradients import UnorderedSet
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.models.vae import categorical_vae
    >>> vae = categorical_vae(data_dim=6, hidden=(8,), num_variables=4, num_categories=3, gradient=UnorderedSet(k=4))
    >>> ELBO().differentiable_loss(vae.model, vae.guide, torch.zeros(5, 6)).backward()
    >>> vae.encode(torch.zeros(5, 6)).shape
    torch.Size([5, 4, 3])
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        num_variables: int,
        num_categories: int,
        likelihood: Likelihood,
        data_shape: tuple[int, ...],
        gradient: object | None = None,
    ) -> None:
        shape = whole_number("num_variables", num_variables, 1), whole_number("num_categories", num_categories, 2)
        super().__init__(encoder, decoder, shape, likelihood, data_shape, gradient)

    @property
    def num_codes(self) -> int:
        """``num_categories**num_variables``."""
        return int(self.code_shape[1] ** self.code_shape[0])

    def code_distribution(self, logits: Tensor) -> Any:
        """Return independent one-hot categorical distributions, event shape ``(num_variables, num_categories)``."""
        return independent(dist.OneHotCategorical(logits=logits, validate_args=False), 1)

    def most_probable(self, logits: Tensor) -> Tensor:
        """Return the one-hot vectors of the largest logits."""
        return nn.functional.one_hot(logits.argmax(-1), self.code_shape[1]).to(logits.dtype)

    def codes(self) -> Tensor:
        """Return all codes, ``(num_categories**num_variables, num_variables, num_categories)``."""
        categories = self.code_shape[1]
        return nn.functional.one_hot(self._digits(categories), categories).to(next(self.parameters()))


def binary_vae(
    data_dim: int = 784,
    hidden: Sequence[int] = (200,),
    num_bits: int = 50,
    likelihood: Likelihood | None = None,
    gradient: object | None = None,
    activation: Activation = nn.Tanh,
) -> BinaryVAE:
    """Create a :class:`BinaryVAE` of vectors, with multilayer perceptrons as encoder and decoder.

    Raises ``SettingsError`` if a dimension is not positive or there is no hidden layer.

    Parameters
    ----------
    data_dim, hidden, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    num_bits : int, default 50
    gradient : object, optional
        As in :class:`DiscreteVAE`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import binary_vae
    >>> binary_vae(data_dim=4, hidden=(5,), num_bits=3).codes().shape
    torch.Size([8, 3])
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    encoder, decoder = _perceptrons(data_dim, hidden, num_bits, likelihood, activation)
    return BinaryVAE(encoder, decoder, num_bits, likelihood, (data_dim,), gradient)


def categorical_vae(
    data_dim: int = 784,
    hidden: Sequence[int] = (200,),
    num_variables: int = 30,
    num_categories: int = 10,
    likelihood: Likelihood | None = None,
    gradient: object | None = None,
    activation: Activation = nn.Tanh,
) -> CategoricalVAE:
    """Create a :class:`CategoricalVAE` of vectors, with multilayer perceptrons as encoder and decoder.

    Raises ``SettingsError`` if a dimension is not positive, there are fewer than two categories, or there is no hidden
    layer.

    Parameters
    ----------
    data_dim, hidden, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    num_variables, num_categories : int, default 30 and 10
    gradient : object, optional
        As in :class:`DiscreteVAE`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import categorical_vae
    >>> categorical_vae(data_dim=4, hidden=(5,), num_variables=3, num_categories=4).codes().shape
    torch.Size([64, 3, 4])
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    size = whole_number("num_variables", num_variables, 1) * whole_number("num_categories", num_categories, 2)
    encoder, decoder = _perceptrons(data_dim, hidden, size, likelihood, activation)
    decoder = nn.Sequential(nn.Flatten(-2), *decoder)
    return CategoricalVAE(encoder, decoder, num_variables, num_categories, likelihood, (data_dim,), gradient)


def _perceptrons(
    data_dim: int, hidden: Sequence[int], code_size: int, likelihood: Likelihood, activation: Activation
) -> tuple[nn.Sequential, nn.Sequential]:
    """Return an encoder to logits and a decoder from flat codes."""
    if isinstance(hidden, int):
        raise SettingsError(f"hidden is {hidden}, but must be a sequence of layer widths, such as ({hidden},)")
    check_hidden(hidden)
    check_sizes(data_dim, code_size)
    encoder = nn.Sequential(features(data_dim, hidden, activation), nn.Linear(hidden[-1], code_size))
    return encoder, mlp([code_size, *reversed(hidden), likelihood.num_parameters * data_dim], activation)
