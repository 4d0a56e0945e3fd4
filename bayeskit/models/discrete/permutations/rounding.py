"""Normal matrices drawn towards the nearest permutation."""

from __future__ import annotations

import math

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit._settings import real_number
from bayeskit.errors import DataError, SettingsError
from bayeskit.models.discrete.permutations.assignments import (
    check_square,
    nearest_permutation,
    permutation_matrix,
    real_numbers,
)

Shape = torch.Size | list[int] | tuple[int, ...]


class RoundedPermutation(TorchDistribution):  # type: ignore[misc]
    r"""Matrices :math:`X = \tau \Psi + (1 - \tau) \operatorname{round}(\Psi)` of normal :math:`\Psi`.

    The entries of :math:`\Psi` are independent and normal, rounding gives the nearest permutation matrix. At
    temperature one nothing is rounded; as it falls, draws concentrate around permutation matrices. They are not doubly
    stochastic, and there is a hole around the matrices that are as near to one permutation as to another. Rounding
    leaves the nearest permutation as it was, so that the density is known:

    .. math:: q(X) = \tau^{-n^2} \prod_{ij} N(\psi_{ij}; \mu_{ij}, \nu_{ij}), \quad
              \Psi = (X - (1 - \tau) \operatorname{round}(X)) / \tau

    outside of the hole, and zero inside. **Gradients of** ``rsample`` **see rounding as a constant**: expectations of
    functions of :math:`X` jump where the permutation changes, and their gradient misses that part.

    Parameters
    ----------
    loc : Tensor
        :math:`\mu`, shape ``(*batch, n, n)``; often doubly stochastic, such as ``sinkhorn(log_scores).exp()``.
    scale : Tensor
        :math:`\nu`, positive, broadcast to the same shape.
    temperature : float, default 1.0
        :math:`\tau` in ``(0, 1]``.

    Raises
    ------
    ShapeError
        If ``loc`` is not square.
    SettingsError
        If the temperature lies outside.
    DataError
        If ``loc`` is not finite, or ``scale`` not positive and finite.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import RoundedPermutation, nearest_permutation
    >>> rounded = RoundedPermutation(torch.eye(3), torch.tensor(0.1), temperature=0.2)
    >>> matrix = rounded.rsample()
    >>> nearest_permutation(matrix).tolist(), bool((matrix - torch.eye(3)).abs().max() < 0.1)
    ([0, 1, 2], True)
    """

    arg_constraints = {
        "loc": constraints.independent(constraints.real, 2),
        "scale": constraints.independent(constraints.positive, 2),
    }
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, temperature: float = 1.0) -> None:
        size = check_square("loc", loc)
        self.temperature = real_number("temperature", temperature)
        if not 0 < self.temperature <= 1:
            raise SettingsError(f"temperature must lie in (0, 1], not {self.temperature:g}")
        for name, parameter, valid in (("loc", loc, loc.isfinite()), ("scale", scale, scale.isfinite() & (scale > 0))):
            if not valid.all():
                raise DataError(
                    f"{int((~valid).sum())} of {parameter.numel()} entries of {name} are not "
                    f"{'finite' if name == 'loc' else 'positive and finite'}"
                )
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        super().__init__(self.loc.shape[:-2], torch.Size([size, size]), validate_args=False)

    @classmethod
    def near_gibbs(cls, log_weights: Tensor) -> RoundedPermutation:
        r"""Return normal matrices whose :meth:`sample_permutations` are nearly draws of a :class:`GibbsPermutation`.

        Of any number of rows, and without training. Two permutations that differ in two rows are told apart by the sum
        of four entries. Around the log weights, with the scale :math:`\pi / \sqrt{12}`, it has the mean and the
        variance of a logistic variable, and one wins with nearly the probability that it has of the two.

        Parameters
        ----------
        log_weights : Tensor
            Shape ``(*batch, n, n)``, finite.

        References
        ----------
        Papandreou, G., Yuille, A. L. (2011). Perturb-and-MAP random fields: using discrete optimization to learn and
        sample from energy models. ICCV.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.models.discrete.permutations import RoundedPermutation
        >>> log_weights = torch.eye(50).mul(8.0)
        >>> RoundedPermutation.near_gibbs(log_weights).sample_permutations((100,)).shape
        torch.Size([100, 50])
        """
        loc = real_numbers("log_weights", log_weights)
        return cls(loc, torch.full_like(loc, math.pi / math.sqrt(12)))

    def expand(self, batch_shape: Shape, _instance: None = None) -> RoundedPermutation:
        """Return the same distribution with another batch shape."""
        shape = (*batch_shape, *self.event_shape)
        return RoundedPermutation(self.loc.expand(shape), self.scale.expand(shape), self.temperature)

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw matrices, ``sample_shape + (*batch, n, n)``; the gradient takes the permutation as given."""
        normal = self._normal(sample_shape)
        if self.temperature == 1:
            return normal
        rounded = permutation_matrix(nearest_permutation(normal), normal.dtype)
        return self.temperature * normal + (1 - self.temperature) * rounded

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw permutations that matrices are nearest to, at any temperature: ``sample_shape + (*batch, n)``."""
        with torch.no_grad():
            return nearest_permutation(self._normal(sample_shape))

    def _normal(self, sample_shape: Shape) -> Tensor:
        noise = torch.randn(self._extended_shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density with respect to all ``n * n`` entries, ``(*batch)``; ``-inf`` inside the hole.

        Parameters
        ----------
        value : Tensor
            Shape ``(*batch, n, n)``.
        """
        if self.temperature == 1:
            return self._log_normal(value)
        nearest = nearest_permutation(value)
        normal = (value - (1 - self.temperature) * permutation_matrix(nearest, value.dtype)) / self.temperature
        log_density = self._log_normal(normal) - math.log(self.temperature) * self.event_shape.numel()
        return log_density.masked_fill(self._misses_the_best(normal, nearest), -math.inf)

    def _misses_the_best(self, normal: Tensor, nearest: Tensor) -> Tensor:
        """Return whether a permutation is farther from a matrix than another one, by more than rounding errors."""
        totals = (
            normal.gather(-1, permutation.unsqueeze(-1)).sum((-1, -2))
            for permutation in (nearest, nearest_permutation(normal))
        )
        size = normal.shape[-1]
        largest = normal.detach().abs().amax((-1, -2)) + 1 / self.temperature
        room = 4 * size * torch.finfo(normal.dtype).eps * largest
        own, best = totals
        return best - own > room

    def _log_normal(self, normal: Tensor) -> Tensor:
        residual = (normal - self.loc) / self.scale
        return -(0.5 * (residual.square() + math.log(2 * math.pi)) + self.scale.log()).sum((-1, -2))
