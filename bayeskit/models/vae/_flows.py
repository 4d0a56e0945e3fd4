"""Normalizing flows from zuko as priors and posteriors of codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor, nn
from torch.distributions import constraints

from bayeskit.errors import SettingsError
from bayeskit.extend import check_memory, zuko
from bayeskit.models.vae._autoencoders import VAE, features
from bayeskit.models.vae._distributions import Shape
from bayeskit.models.vae._networks import Activation, DiagonalNormal, check_hidden, check_sizes, mlp
from bayeskit.models.vae.likelihoods import Bernoulli, Likelihood


class FlowDistribution(TorchDistribution):  # type: ignore[misc]
    """Pyro distribution over real vectors defined by a zuko normalizing flow.

    Parameters
    ----------
    flow : zuko.distributions.NormalizingFlow
        Return value of a call of a ``zuko.flows.Flow``.

    Examples
    --------
    >>> import torch, zuko
    >>> from bayeskit.models.vae import FlowDistribution
    >>> flow = zuko.flows.MAF(features=3, context=2)
    >>> distribution = FlowDistribution(flow(torch.zeros(5, 2)))
    >>> distribution.batch_shape, distribution.event_shape
    (torch.Size([5]), torch.Size([3]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, flow: Any) -> None:
        self.flow = flow
        self._last: tuple[Tensor, Tensor] | None = None
        super().__init__(flow.batch_shape, flow.event_shape, validate_args=False)

    def expand(self, batch_shape: Shape, _instance: None = None) -> FlowDistribution:
        """Return the same distribution with another batch shape."""
        return FlowDistribution(self.flow.expand(torch.Size(batch_shape)))

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw reparameterized samples and cache their log density."""
        value, log_prob = self.flow.rsample_and_log_prob(torch.Size(sample_shape))
        self._last = value, log_prob
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density; for the most recent draw it is cached."""
        if self._last is not None and value is self._last[0]:
            return self._last[1]
        return self.flow.log_prob(value)


class ConditionalFlow(nn.Module):
    """Last module of an encoder: a zuko flow conditioned on the features.

    Parameters
    ----------
    flow : zuko.flows.Flow
        Flow with ``context`` equal to the number of features.

    Examples
    --------
    >>> import torch, zuko
    >>> from bayeskit.models.vae import ConditionalFlow, mlp
    >>> encoder = torch.nn.Sequential(mlp([6, 8]), ConditionalFlow(zuko.flows.NSF(features=2, context=8)))
    >>> encoder(torch.zeros(5, 6)).sample().shape
    torch.Size([5, 2])
    """

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, features: Tensor) -> FlowDistribution:
        """Return the distribution: ``(*batch, num_features)`` to batch shape ``(*batch)``."""
        return FlowDistribution(self.flow(features))


class FlowPrior(nn.Module):
    """Prior of codes defined by an unconditional zuko flow.

    Parameters
    ----------
    flow : zuko.flows.Flow

    Examples
    --------
    >>> import zuko
    >>> from bayeskit.models.vae import FlowPrior
    >>> FlowPrior(zuko.flows.NSF(features=2))().event_shape
    torch.Size([2])
    """

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self) -> FlowDistribution:
        """Return the distribution."""
        return FlowDistribution(self.flow())


def inverse_autoregressive_flow(dim: int, context: int, num_transforms: int, hidden: Sequence[int]) -> nn.Module:
    """Create an inverse autoregressive flow (Kingma et al. 2016); the density of other points takes ``dim`` passes."""
    flow = zuko.flows.MAF(dim, context, transforms=num_transforms, hidden_features=tuple(hidden))
    return zuko.flows.Flow(flow.transform.inv, flow.base)


def flow_vae(
    data_dim: int = 784,
    hidden: Sequence[int] = (200, 200),
    latent_dim: int = 50,
    likelihood: Likelihood | None = None,
    activation: Activation = nn.Tanh,
    *,
    posterior_transforms: int = 2,
    prior_transforms: int = 2,
) -> VAE:
    """Create a VAE of vectors whose posterior, prior or both are autoregressive normalizing flows.

    The posterior is an inverse autoregressive flow (one pass per draw). The prior is a masked autoregressive flow (one
    pass per density evaluation). Raises ``SettingsError`` if a dimension is not positive, a number of transforms is
    negative, or there is no hidden layer.

    Parameters
    ----------
    data_dim, hidden, latent_dim, likelihood, activation
        As in :func:`~bayeskit.models.vae.mlp_vae`.
    posterior_transforms, prior_transforms : int, default 2
        Number of transforms of each flow; 0 gives a normal distribution.

    References
    ----------
    Rezende, D. J., Mohamed, S. (2015). Variational inference with normalizing flows. ICML.

    Kingma, D. P. et al. (2016). Improved variational inference with inverse autoregressive flow. NeurIPS.

    Chen, X. et al. (2017). Variational lossy autoencoder. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import flow_vae
    >>> flow_vae(data_dim=6, hidden=(8,), latent_dim=2).generate(3, seed=0).shape
    torch.Size([3, 6])
    """
    likelihood = Bernoulli() if likelihood is None else likelihood
    check_hidden(hidden)
    check_sizes(data_dim, latent_dim)
    if min(posterior_transforms, prior_transforms) < 0:
        raise SettingsError(
            f"posterior_transforms and prior_transforms must be at least 0, not {posterior_transforms} and "
            f"{prior_transforms}"
        )
    width = hidden[-1]
    check_memory("posterior_transforms", posterior_transforms, 8 * width * latent_dim)
    check_memory("prior_transforms", prior_transforms, 8 * width * latent_dim)
    head: nn.Module = DiagonalNormal(width, latent_dim)
    if posterior_transforms:
        head = ConditionalFlow(inverse_autoregressive_flow(latent_dim, width, posterior_transforms, hidden[-1:]))
    prior = None
    if prior_transforms:
        flow = zuko.flows.MAF(latent_dim, transforms=prior_transforms, hidden_features=tuple(hidden[-1:]))
        prior = FlowPrior(flow)
    encoder = nn.Sequential(features(data_dim, hidden, activation), head)
    decoder = mlp([latent_dim, *reversed(hidden), likelihood.num_parameters * data_dim], activation)
    return VAE(encoder, decoder, latent_dim, likelihood, (data_dim,), prior)
