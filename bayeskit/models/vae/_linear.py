"""Linear VAE (probabilistic principal component analysis) with exact likelihood and posterior."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import pyro_method
from torch import Tensor, nn

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.vae._distributions import independent
from bayeskit.models.vae._generative_model import Autoencoder
from bayeskit.models.vae._networks import check_sizes
from bayeskit.models.vae.likelihoods import Gaussian


class LinearPosterior(nn.Module):
    """Normal distribution with independent coordinates, linear mean, and scale that does not depend on ``x``."""

    def __init__(self, data_dim: int, latent_dim: int) -> None:
        super().__init__()
        self.mean = nn.Linear(data_dim, latent_dim)
        self.log_scale = nn.Parameter(torch.zeros(latent_dim))

    def forward(self, x: Tensor) -> dist.Distribution:
        """Return the distribution of codes: ``(*batch, data_dim)`` to batch shape ``(*batch)``."""
        return independent(dist.Normal(self.mean(x), self.log_scale.exp(), validate_args=False), 1)


class LinearVAE(Autoencoder):
    r"""Probabilistic PCA: :math:`z \sim N(0, I)`, :math:`x \mid z \sim N(W z + \mu, \sigma^2 I)`.

    Likelihood, posterior of the codes and maximum likelihood estimate have closed forms. The guide has independent
    coordinates. It contains the exact posterior at the maximum likelihood estimate, where the columns of :math:`W` can
    be chosen orthogonal. :meth:`exact_guide` uses the exact posterior for any parameters. Raises ``SettingsError`` if a
    dimension is not positive.

    Parameters
    ----------
    data_dim, latent_dim : int

    References
    ----------
    Tipping, M. E., Bishop, C. M. (1999). Probabilistic principal component analysis. JRSS B 61, 611-622.

    Lucas, J., Tucker, G., Grosse, R., Norouzi, M. (2019). Don't blame the ELBO! A linear VAE perspective on
    posterior collapse. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.vae import LinearVAE
    >>> x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> best = LinearVAE.maximum_likelihood(x, latent_dim=2)
    >>> bool((best.log_likelihood(x) - best.lower_bound(x)).abs().max() < 1e-12)
    True
    """

    encoder: LinearPosterior
    decoder: nn.Linear
    likelihood: Gaussian

    def __init__(self, data_dim: int, latent_dim: int) -> None:
        check_sizes(data_dim, latent_dim)
        super().__init__(
            LinearPosterior(data_dim, latent_dim), nn.Linear(latent_dim, data_dim), latent_dim, Gaussian(), (data_dim,)
        )

    @classmethod
    def maximum_likelihood(cls, x: Tensor, latent_dim: int) -> LinearVAE:
        """Return the maximum likelihood model, with its guide equal to the exact posterior.

        ``x``: ``(n, data_dim)``. ``latent_dim``: less than ``data_dim``. Raises ``ShapeError`` if ``x`` is not a
        matrix; ``SettingsError`` if ``latent_dim`` is not less than ``data_dim``; ``DataError`` if values are not
        finite, or the data lie in a subspace of ``latent_dim`` dimensions (unbounded likelihood).
        """
        if x.dim() != 2:
            raise ShapeError(f"x has shape {tuple(x.shape)}, but must have shape (n, data_dim)")
        if latent_dim >= x.shape[1]:
            raise SettingsError(f"latent_dim is {latent_dim}, but must be less than {x.shape[1]}, the data dimension")
        model = cls(x.shape[1], latent_dim).to(x)
        model.likelihood.check(x)
        mean = x.mean(0)
        eigenvalues, vectors = torch.linalg.eigh(torch.cov(x.T, correction=0))
        variance = eigenvalues[:-latent_dim].mean()
        if not variance > eigenvalues[-1] * torch.finfo(x.dtype).eps * len(eigenvalues):
            raise DataError(
                f"the data lie in a subspace of {latent_dim} dimensions, so the likelihood is unbounded; "
                "lower latent_dim, or add data"
            )
        largest = eigenvalues[-latent_dim:]
        weight = vectors[:, -latent_dim:] * (largest - variance).clamp_min(0).sqrt()
        with torch.no_grad():
            model.decoder.weight.copy_(weight)
            model.decoder.bias.copy_(mean)
            model.likelihood.log_scale.copy_(0.5 * variance.log())
            # At the optimum W'W is diagonal, so the posterior has independent coordinates.
            gain = weight.T / largest.unsqueeze(1)
            model.encoder.mean.weight.copy_(gain)
            model.encoder.mean.bias.copy_(-gain @ mean)
            model.encoder.log_scale.copy_(0.5 * (variance / largest).log())
        return model

    @pyro_method
    def exact_guide(self, x: Tensor, num_data: int | None = None) -> None:
        """Draw the codes from their exact posterior; use in place of :meth:`guide`. It adds no parameters."""
        self.check_layout(x)
        with self.data_plate(x, num_data):
            pyro.sample("z", self.posterior(x))

    def posterior(self, x: Tensor, mask: Tensor | None = None) -> dist.MultivariateNormal:
        """Return the exact posterior of codes: ``(*batch, data_dim)`` to batch shape ``(*batch)``.

        ``mask``: True where ``x`` is observed, same shape; default all True.
        """
        residual, weight, factor = self._terms(x, mask)
        projected = (residual.unsqueeze(-2) @ weight).squeeze(-2)
        mean = torch.cholesky_solve(projected.unsqueeze(-1), factor).squeeze(-1)
        identity = torch.eye(self.latent_dim, dtype=x.dtype, device=x.device)
        half = torch.linalg.solve_triangular(factor, identity, upper=False)
        covariance = half.mT @ half
        return dist.MultivariateNormal(mean, covariance, validate_args=False).expand(x.shape[:-1])

    def log_likelihood(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the exact marginal log density of each observation: ``(*batch, data_dim)`` to ``(*batch)``.

        ``mask``: True where ``x`` is observed, same shape; other entries are integrated out.
        """
        residual, weight, factor = self._terms(x, mask)
        observed = x.shape[-1] if mask is None else mask.sum(-1)
        projected = residual.unsqueeze(-2) @ weight
        explained = torch.linalg.solve_triangular(factor, projected.mT, upper=False).square().sum((-2, -1))
        log_determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_scale = self.likelihood.log_scale
        normalizer = observed * (math.log(2 * math.pi) + 2 * log_scale) + log_determinant
        return -0.5 * (normalizer + residual.square().sum(-1) - explained)

    def lower_bound(self, x: Tensor) -> Tensor:
        """Return the closed-form evidence lower bound of each observation under :meth:`guide`, shape ``(*batch)``."""
        self.check(x)
        posterior = self.encoder(x).base_dist
        mean, variance = posterior.mean, posterior.variance
        precision = (-2 * self.likelihood.log_scale).exp()
        expected_error = (x - self.decoder(mean)).square().sum(-1) + variance @ self.decoder.weight.square().sum(0)
        normalizer = x.shape[-1] * (math.log(2 * math.pi) + 2 * self.likelihood.log_scale)
        divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).sum(-1)
        return -0.5 * (normalizer + precision * expected_error) - divergence

    def _terms(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return residuals and loadings in units of the noise, and the Cholesky factor of the codes' precision."""
        self.check_layout(x)
        weight = self.decoder.weight
        residual = x - self.decoder.bias
        if mask is not None:
            residual = torch.where(mask, residual, 0.0)
            weight = torch.where(mask.unsqueeze(-1), weight, 0.0)
        self.likelihood.check(residual)
        inverse_scale = (-self.likelihood.log_scale).exp()
        residual, weight = residual * inverse_scale, weight * inverse_scale
        identity = torch.eye(self.latent_dim, dtype=x.dtype, device=x.device)
        return residual, weight, torch.linalg.cholesky(identity + weight.mT @ weight)
