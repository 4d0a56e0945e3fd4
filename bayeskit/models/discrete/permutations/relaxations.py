"""Relaxed permutations with parameters: guides for models whose latent variable is a permutation."""

from __future__ import annotations

import math
from abc import abstractmethod

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor, nn

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.models.discrete.permutations.gumbel_sinkhorn import GumbelSinkhorn, scale
from bayeskit.models.discrete.permutations.rounding import RoundedPermutation
from bayeskit.models.discrete.permutations.sequential import SequentialPermutation, StickBreakingPermutation
from bayeskit.models.discrete.permutations.stick_breaking import break_sticks

POSITIVE = (0.0, math.inf)


class Relaxation(PyroModule):  # type: ignore[misc]
    """A variational distribution over relaxed permutations: what a model draws from, and its guide when called.

    Each draws a value at one site; :meth:`matrix` makes the relaxed permutation of it. Its :meth:`prior` is what the
    model draws the value from, so that a lower bound is one of the relaxed model. The latter differs between
    relaxations, and lower bounds must not be compared across them: compare :meth:`sample_permutations`.

    Parameters
    ----------
    shape : tuple of int
        ``(*batch, n)``: number of rows, at least two, and of independent problems before it.
    temperature : float

    Raises
    ------
    SettingsError
        If the shape or the temperature lies outside its domain.
    """

    site = "relaxed_permutation"

    def __init__(self, shape: tuple[int, ...], temperature: float) -> None:
        super().__init__()
        if not isinstance(shape, (tuple, list)) or not shape:
            raise SettingsError(f"shape is {shape!r}; give (*batch, n), such as (6,) for permutations of six")
        self.size = whole_number("shape[-1]", shape[-1], least=2)
        self.batch_shape = torch.Size(whole_number("shape", length, least=1) for length in shape[:-1])
        self.temperature = real_number("temperature", temperature, between=POSITIVE)

    @abstractmethod
    def prior(self) -> TorchDistribution:
        """Return the distribution of the value in the model, with the whole batch in its event."""

    @abstractmethod
    def posterior(self) -> TorchDistribution:
        """Return the distribution of the value in the guide, with the whole batch in its event."""

    @abstractmethod
    def matrix(self, value: Tensor) -> Tensor:
        """Return the relaxed permutation of a value, ``(..., *batch, n, n)``."""

    @abstractmethod
    def _permutations(self, num_samples: int) -> Tensor: ...

    def forward(self, *args: object) -> None:
        """Draw the value: the guide. What the model is called with is not looked at."""
        pyro.sample(self.site, self.posterior())

    def sample_permutations(self, num_samples: int, seed: int | torch.Generator = 0) -> Tensor:
        """Draw permutations from the variational distribution.

        Parameters
        ----------
        num_samples : int
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor of int64
            Shape ``(num_samples, *batch, n)``.
        """
        num_samples = whole_number("num_samples", num_samples, least=1)
        with torch.no_grad(), global_stream(new_generator(seed, stream="relaxed permutations")):
            return self._permutations(num_samples)

    def _whole(self, distribution: TorchDistribution) -> TorchDistribution:
        return distribution.to_event(len(self.batch_shape))

    def _parameter(self, start: Tensor) -> nn.Parameter:
        return nn.Parameter(start.expand(*self.batch_shape, *start.shape[-2:]).clone())


class StickBreakingRelaxation(Relaxation):
    r"""Sticks broken at normal logits, with normal logits in the prior too.

    The site has the logits. They map one to one to matrices, so that the bound is that of
    :class:`StickBreakingPermutation` in posterior and prior, without the determinants that cancel. The means of the
    prior are such that its limit is nearly uniform.

    Parameters
    ----------
    shape : tuple of int
        ``(*batch, n)``.
    temperature : float, default 0.6
        Here a unit normal logit has a fraction close to its normal distribution function, so that relaxed and limiting
        decisions have about the same mean.
    scale : float, default 1.0
        Standard deviation that the guide starts with; the prior has one.
    dtype : torch.dtype, optional
        By default torch's default.

    Raises
    ------
    SettingsError
        If the shape, the temperature or the scale lies outside its domain.

    Notes
    -----
    Every entry depends on those before it, so that training often ends in a mode it met early, and with dozens of rows
    far from the posterior. Where the density of matrices is not needed, prefer :class:`RoundingRelaxation`.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> from bayeskit.models.discrete.permutations import StickBreakingRelaxation
    >>> relaxation = StickBreakingRelaxation((5,))
    >>> relaxation.matrix(relaxation.posterior().sample()).shape
    torch.Size([5, 5])
    """

    def __init__(
        self, shape: tuple[int, ...], temperature: float = 0.6, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(shape, temperature)
        start = torch.special.ndtri(SequentialPermutation.near_uniform(self.size, dtype).logits.sigmoid())
        self.register_buffer("prior_loc", start)
        log_scale = math.log(real_number("scale", scale, between=POSITIVE))
        self.loc, self.log_scale = self._parameter(start), self._parameter(torch.full_like(start, log_scale))

    def prior(self) -> TorchDistribution:
        """Return normal logits with unit scale."""
        loc = self.prior_loc.expand_as(self.loc)
        return dist.Normal(loc, torch.ones_like(loc)).to_event(loc.dim())

    def posterior(self) -> TorchDistribution:
        """Return normal logits."""
        return dist.Normal(self.loc, self.log_scale.exp()).to_event(self.loc.dim())

    def matrix(self, value: Tensor) -> Tensor:
        """Return the doubly stochastic matrix of logits."""
        return break_sticks(value.double() / self.temperature)[0].exp().to(value.dtype)

    def distribution(self) -> StickBreakingPermutation:
        """Return the variational distribution of matrices."""
        return StickBreakingPermutation(self.loc, self.log_scale.exp(), self.temperature)

    def _permutations(self, num_samples: int) -> Tensor:
        return self.distribution().sample_permutations((num_samples,))


class RoundingRelaxation(Relaxation):
    r"""Normal matrices around a doubly stochastic one, drawn towards permutations.

    The prior has two normal distributions a pair, around zero and one. Only :meth:`sample_permutations` looks at how
    far the noise carries a matrix, the bound does not: the two scales decide how certain the permutations are.

    Parameters
    ----------
    shape : tuple of int
        ``(*batch, n)``.
    temperature : float, default 1.0
        In ``(0, 1]``. At one the matrices are not rounded in training, and gradients are unbiased.
    prior_scale : float, default 0.7
        Standard deviation of the prior around zero and one. Below one half the prior has two modes, which drives means
        to zero or one where the data leave a choice; permutations are then too certain.
    scales : (float, float), optional
        Least and greatest standard deviation of the guide, which starts between them. By default 0.001, and what
        carries a permutation matrix to another one, two rows exchanged, with a probability of about 0.04: 0.36 for 6
        rows, 0.25 for 50.
    num_iterations : int, default 20
        Of Sinkhorn's scaling of the means.
    dtype : torch.dtype, optional
        By default torch's default.

    Raises
    ------
    SettingsError
        If the shape, the temperature, a scale or the number of iterations lies outside its domain.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> from bayeskit.models.discrete.permutations import RoundingRelaxation
    >>> relaxation = RoundingRelaxation((3, 5))
    >>> relaxation.sample_permutations(100, seed=0).shape
    torch.Size([100, 3, 5])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        temperature: float = 1.0,
        prior_scale: float = 0.7,
        scales: tuple[float, float] | None = None,
        num_iterations: int = 20,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, temperature)
        if self.temperature > 1:
            raise SettingsError(f"temperature must lie in (0, 1], not {self.temperature:g}")
        self.prior_scale = real_number("prior_scale", prior_scale, between=POSITIVE)
        scales = (0.001, _greatest_scale(self.size)) if scales is None else scales
        if not isinstance(scales, (tuple, list)) or len(scales) != 2:
            raise SettingsError(f"scales are {scales!r}; give the least and the greatest, such as (0.001, 0.5)")
        least, greatest = (real_number("scales", bound, between=POSITIVE) for bound in scales)
        if not least < greatest:
            raise SettingsError(f"scales are ({least:g}, {greatest:g}); the second must be greater")
        self.scales = (least, greatest)
        self.num_iterations = whole_number("num_iterations", num_iterations, least=1)
        start = torch.zeros(self.size, self.size, dtype=dtype)
        self.log_scores, self.scale_logits = self._parameter(start), self._parameter(start)

    def distribution(self) -> RoundedPermutation:
        """Return the variational distribution of matrices."""
        least, greatest = self.scales
        loc = scale(self.log_scores, self.num_iterations).exp()
        return RoundedPermutation(loc, least + (greatest - least) * self.scale_logits.sigmoid(), self.temperature)

    def prior(self) -> TorchDistribution:
        """Return a mixture of normal distributions around zero and one for each pair."""
        ends = torch.arange(2, dtype=self.log_scores.dtype, device=self.log_scores.device)
        mixture = dist.MixtureSameFamily(
            dist.Categorical(torch.ones_like(ends)), dist.Normal(ends, self.prior_scale), validate_args=False
        )
        return mixture.expand(self.log_scores.shape).to_event(self.log_scores.dim())

    def posterior(self) -> TorchDistribution:
        """Return the distribution of matrices."""
        return self._whole(self.distribution())

    def matrix(self, value: Tensor) -> Tensor:
        """Return the value itself."""
        return value

    def _permutations(self, num_samples: int) -> Tensor:
        return self.distribution().sample_permutations((num_samples,))


class GumbelSinkhornRelaxation(Relaxation):
    r"""Scores with Gumbel noise, scaled by Sinkhorn's iteration.

    The site has the scores with noise, divided by the temperature; in the prior scores are zero.

    Parameters
    ----------
    shape : tuple of int
        ``(*batch, n)``.
    temperature : float, default 1.0
    prior_temperature : float, optional
        Of the prior; by default the temperature itself. A lower one is a wider prior, that costs less.
    num_iterations : int, default 20
        Of Sinkhorn's scaling.
    dtype : torch.dtype, optional
        By default torch's default.

    Raises
    ------
    SettingsError
        If the shape, a temperature or the number of iterations lies outside its domain.

    References
    ----------
    Mena, G., Belanger, D., Linderman, S., Snoek, J. (2018). Learning latent permutations with Gumbel-Sinkhorn
    networks. ICLR.

    Examples
    --------
    >>> from bayeskit.models.discrete.permutations import GumbelSinkhornRelaxation
    >>> relaxation = GumbelSinkhornRelaxation((5,), temperature=2.0, prior_temperature=0.5)
    >>> relaxation.sample_permutations(100, seed=0).shape
    torch.Size([100, 5])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        temperature: float = 1.0,
        prior_temperature: float | None = None,
        num_iterations: int = 20,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, temperature)
        wide = self.temperature if prior_temperature is None else prior_temperature
        self.prior_temperature = real_number("prior_temperature", wide, between=POSITIVE)
        self.num_iterations = whole_number("num_iterations", num_iterations, least=1)
        self.log_scores = self._parameter(torch.zeros(self.size, self.size, dtype=dtype))

    def distribution(self) -> GumbelSinkhorn:
        """Return the variational distribution of matrices, whose density is not known."""
        return GumbelSinkhorn(self.log_scores, self.temperature, self.num_iterations)

    def prior(self) -> TorchDistribution:
        """Return Gumbel noise over the temperature of the prior."""
        return self._gumbel(torch.zeros_like(self.log_scores), self.prior_temperature)

    def posterior(self) -> TorchDistribution:
        """Return scores with Gumbel noise, over the temperature."""
        return self._gumbel(self.log_scores, self.temperature)

    def _gumbel(self, scores: Tensor, temperature: float) -> TorchDistribution:
        return dist.Gumbel(scores / temperature, torch.full_like(scores, 1 / temperature)).to_event(scores.dim())

    def matrix(self, value: Tensor) -> Tensor:
        """Return the doubly stochastic matrix of scores with noise."""
        return scale(value, self.num_iterations).exp()

    def _permutations(self, num_samples: int) -> Tensor:
        return self.distribution().sample_permutations((num_samples,))


def _greatest_scale(size: int) -> float:
    """Return the scale of normal noise that exchanges some two rows of a permutation with a probability of 0.04.

    Two rows and columns are exchanged where four entries of noise sum to two or more.
    """
    pairs = size * (size - 1) / 2
    return float(-1 / torch.special.ndtri(torch.tensor(0.04 / pairs, dtype=torch.float64)))
