"""Relaxed permutations: Sinkhorn's scaling, rounding and stick-breaking, and guides made of them."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import NoReturn

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Transform, constraints
from torch.nn.functional import logsigmoid

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, ModelError, SettingsError
from bayeskit.models.discrete.permutations.distributions import (
    check_log_weights,
    check_possible,
    check_square,
    doubly_stochastic,
    nearest_permutation,
    permutation_matrix,
    permutations,
    real_numbers,
)

__all__ = [
    "GumbelSinkhorn",
    "GumbelSinkhornRelaxation",
    "Relaxation",
    "RoundedPermutation",
    "RoundingRelaxation",
    "SequentialPermutation",
    "Shape",
    "StickBreakingPermutation",
    "StickBreakingRelaxation",
    "StickBreakingTransform",
    "break_sticks",
    "scale",
    "sinkhorn",
    "taken_and_left",
]

# Sinkhorn's scaling of a matrix to a doubly stochastic one, and Gumbel noise sent through it.

_EULER = 0.5772156649015329
Shape = torch.Size | list[int] | tuple[int, ...]


def sinkhorn(log_weights: Tensor, num_iterations: int = 20) -> Tensor:
    """Scale rows and columns of positive matrices in turn until both sum to one, nearly.

    Parameters
    ----------
    log_weights : Tensor
        Logs of the matrices, ``(*batch, n, n)``; ``-inf`` where an entry is zero.
    num_iterations : int, default 20
        Each scales the rows and then the columns; columns sum to one exactly, rows up to what the next would change.
        Logs that are far apart take more: hundreds, at differences of hundreds.

    Returns
    -------
    Tensor
        Logs of the scaled matrices, same shape.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or a row or column is ``-inf`` everywhere.
    SettingsError
        If there is no iteration.

    References
    ----------
    Sinkhorn, R., Knopp, P. (1967). Concerning nonnegative matrices and doubly stochastic matrices. Pacific Journal of
    Mathematics 21, 343-348.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import sinkhorn
    >>> sinkhorn(torch.tensor([[1.0, 2.0], [2.0, 16.0]]).log(), 50).exp()
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]])
    """
    log_weights = real_numbers("log_weights", log_weights)
    check_log_weights("log_weights", log_weights)
    return scale(log_weights, whole_number("num_iterations", num_iterations, least=1))


def scale(log_weights: Tensor, num_iterations: int) -> Tensor:
    """Do what :func:`sinkhorn` does, without a look at the entries."""
    for _ in range(num_iterations):
        log_weights = log_weights.log_softmax(-1).log_softmax(-2)
    return log_weights


class GumbelSinkhorn(TorchDistribution):  # type: ignore[misc]
    r"""Matrices :math:`S((L + G) / \tau)`: scores with Gumbel noise, scaled by Sinkhorn's iteration.

    Draws approach permutations as the temperature falls, those of greatest :math:`\sum_i (L + G)_{i \pi_i}`. There is
    **no density in closed form**, because the scaling forgets the sums of rows and columns that it started with, and
    :meth:`log_prob` says so. A lower bound of the evidence takes the noise as the latent variable, whose divergence
    from a prior is known: :meth:`noise_divergence`. It bounds the divergence of the matrices from above, loosely.

    Columns of draws sum to one up to rounding, rows only as nearly as the iterations bring them there: with 10 rows,
    scores of zero and 20 iterations, a third of draws have a row off by 0.01 or more at temperature 0.5, and most by
    0.1 or more at 0.05. :attr:`support` is therefore that of matrices without negative entries.

    Parameters
    ----------
    log_scores : Tensor
        :math:`L`, shape ``(*batch, n, n)``; finite, or ``-inf`` where a pair is impossible.
    temperature : float, default 1.0
        :math:`\tau`, positive.
    num_iterations : int, default 20
        Of Sinkhorn's scaling.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or no permutation avoids those that are ``-inf``.
    SettingsError
        If the temperature is not positive, or there is no iteration.

    References
    ----------
    Mena, G., Belanger, D., Linderman, S., Snoek, J. (2018). Learning latent permutations with Gumbel-Sinkhorn
    networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import GumbelSinkhorn
    >>> matrices = GumbelSinkhorn(torch.zeros(3, 3), temperature=0.5).rsample((10,))
    >>> matrices.shape, bool((matrices.sum(-2) - 1).abs().max() < 1e-5)
    (torch.Size([10, 3, 3]), True)
    """

    arg_constraints = {"log_scores": constraints.independent(constraints.real, 2)}
    support = constraints.independent(constraints.nonnegative, 2)
    has_rsample = True

    def __init__(self, log_scores: Tensor, temperature: float = 1.0, num_iterations: int = 20) -> None:
        log_scores = real_numbers("log_scores", log_scores)
        size = check_possible("log_scores", log_scores)
        self.log_scores = log_scores
        self.temperature = real_number("temperature", temperature, between=(0.0, math.inf))
        self.num_iterations = whole_number("num_iterations", num_iterations, least=1)
        super().__init__(log_scores.shape[:-2], torch.Size([size, size]), validate_args=False)

    def expand(self, batch_shape: Shape, _instance: None = None) -> GumbelSinkhorn:
        """Return the same distribution with another batch shape."""
        scores = self.log_scores.expand(*batch_shape, *self.event_shape)
        return GumbelSinkhorn(scores, self.temperature, self.num_iterations)

    @property
    def noise(self) -> TorchDistribution:
        """Distribution of the scores with noise, before they are divided by the temperature and scaled."""
        return dist.Gumbel(self.log_scores, torch.ones_like(self.log_scores), validate_args=False).to_event(2)

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw matrices, differentiable in the scores: ``sample_shape + (*batch, n, n)``."""
        return scale(self.noise.rsample(torch.Size(sample_shape)) / self.temperature, self.num_iterations).exp()

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw what matrices approach as the temperature falls, permutations ``sample_shape + (*batch, n)``."""
        with torch.no_grad():
            return nearest_permutation(self.noise.sample(torch.Size(sample_shape)))

    def log_prob(self, value: Tensor) -> NoReturn:
        """Refuse: there is no closed form.

        Raises
        ------
        ModelError
            Always.
        """
        raise ModelError(
            "GumbelSinkhorn has no density in closed form, because Sinkhorn's scaling cannot be inverted. Draw its "
            "noise in the guide, a Gumbel distribution, and scale it in the model (see GumbelSinkhornRelaxation); or "
            "use StickBreakingPermutation, whose density is known."
        )

    def noise_divergence(self, prior_temperature: float | None = None) -> Tensor:
        r"""Return the divergence of :math:`(L + G) / \tau` from :math:`G / \tau_0`, ``(*batch)``.

        Pairs that are impossible are so in the prior too, and count nothing.

        Parameters
        ----------
        prior_temperature : float, optional
            :math:`\tau_0`, positive; by default the temperature itself.

        Raises
        ------
        SettingsError
            If the temperature of the prior is not positive.
        """
        prior = self.temperature if prior_temperature is None else prior_temperature
        ratio = real_number("prior_temperature", prior, between=(0.0, math.inf)) / self.temperature
        # Gumbel distributions with scales 1 / tau and 1 / tau_0: the ratio of scales is tau_0 / tau.
        constant = -math.log(ratio) + _EULER * (ratio - 1) - 1
        impossible = self.log_scores == -math.inf
        shifted = ratio * self.log_scores.masked_fill(impossible, 0.0)
        terms = shifted + (math.lgamma(ratio + 1) - shifted).exp() + constant
        return terms.masked_fill(impossible, 0.0).sum((-1, -2))


# Normal matrices drawn towards the nearest permutation.


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


# The stick-breaking reparameterisation of the Birkhoff polytope, its density, and its limit at temperature zero.


class StickBreakingTransform(Transform):
    r"""Map real matrices one to one onto doubly stochastic matrices with one more row and column.

    Entries are broken off their row and their column one by one: entry :math:`x_{mn}` lies between the least and the
    greatest value that the entries before it leave possible, at the fraction
    :math:`\beta_{mn} = \sigma(\psi_{mn} / \tau)` of the way. Every other one of the four sums

    .. math:: x_{mn}, \quad r = \sum_{j > n} x_{mj}, \quad c = \sum_{i > m} x_{in}, \quad q = \sum_{i > m, j > n} x_{ij}

    follows from it, and the length of the way is :math:`w_{mn} = \min(x, q) + \min(r, c)`. The inverse needs no order:
    :math:`\psi_{mn} = \tau (\log \min(x, q) - \log \min(r, c))`. All sums are kept as logarithms in double precision,
    so that entries may be far below the smallest number of their own. Sums that differ by less than the rounding error
    of a double count as equal: determinants are accurate for :math:`|\psi| / \tau` up to about 60, far beyond they
    can be wrong by several. Entries of one antidiagonal do not depend on each other and are computed together.

    As the temperature falls, the matrices approach permutations. The map is continuous, with kinks where two of the
    four sums are equal.

    Parameters
    ----------
    temperature : float, default 1.0
        :math:`\tau`, positive.
    cache_size : int, default 0

    Raises
    ------
    SettingsError
        If the temperature is not positive.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import StickBreakingTransform
    >>> matrix = StickBreakingTransform()(torch.zeros(2, 2))
    >>> matrix.tolist()
    [[0.5, 0.25, 0.25], [0.25, 0.375, 0.375], [0.25, 0.375, 0.375]]
    >>> bool(StickBreakingTransform().inv(matrix).abs().max() < 1e-6)
    True
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = doubly_stochastic
    bijective = True

    def __init__(self, temperature: float = 1.0, cache_size: int = 0) -> None:
        super().__init__(cache_size=cache_size)
        self.temperature = real_number("temperature", temperature, between=(0.0, math.inf))
        self._latest: tuple[Tensor, Tensor] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StickBreakingTransform) and self.temperature == other.temperature

    __hash__ = Transform.__hash__

    def with_cache(self, cache_size: int = 1) -> StickBreakingTransform:
        """Return the same map with a cache of another size."""
        return self if cache_size == self._cache_size else StickBreakingTransform(self.temperature, cache_size)

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of what a matrix of this shape is mapped to."""
        return torch.Size([*shape[:-2], shape[-2] + 1, shape[-1] + 1])

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of what is mapped to a matrix of this shape."""
        return torch.Size([*shape[:-2], shape[-2] - 1, shape[-1] - 1])

    def _call(self, x: Tensor) -> Tensor:
        log_matrix, log_lengths = break_sticks(x.double() / self.temperature)
        if self._cache_size:
            self._latest = (x, log_lengths)
        return log_matrix.exp().to(x.dtype)

    def _inverse(self, y: Tensor) -> Tensor:
        taken, left = taken_and_left(y.double())
        return (self.temperature * (taken.log() - left.log())).to(y.dtype)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log determinant of the derivative of all rows and columns but the last, ``(*batch)``.

        Parameters
        ----------
        x : Tensor
            Shape ``(*batch, n - 1, n - 1)``.
        y : Tensor
            What it is mapped to, ``(*batch, n, n)``.
        """
        if self._latest is not None and self._latest[0] is x:
            # Entries of the matrix may have underflowed, their logarithms have not.
            log_lengths = self._latest[1]
        else:
            log_lengths = torch.add(*taken_and_left(y.double())).log()
        logits = x.double() / self.temperature
        slopes = logsigmoid(logits) + logsigmoid(-logits) - math.log(self.temperature)
        return (log_lengths + slopes).sum((-1, -2)).to(x.dtype)


def taken_and_left(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is taken and left of each way, ``min(x, q)`` and ``min(r, c)``, ``(*batch, n - 1, n - 1)`` each."""
    check_square("the doubly stochastic matrix", matrix)
    right = _sum_after(matrix, -1)
    below, corner = _sum_after(matrix, -2), _sum_after(right, -2)
    inner = (..., slice(-1), slice(-1))
    return torch.minimum(matrix, corner)[inner], torch.minimum(right, below)[inner]


def _sum_after(matrix: Tensor, dim: int) -> Tensor:
    """Return the sum of all later entries, added up from the end: nothing is subtracted, so nothing cancels."""
    ends = matrix.flip(dim).cumsum(dim).flip(dim)
    return torch.cat([ends.narrow(dim, 1, ends.shape[dim] - 1), torch.zeros_like(ends.narrow(dim, 0, 1))], dim)


def break_sticks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return logs of the doubly stochastic matrix ``(*batch, n, n)`` and lengths, as ``logits (*batch, n-1, n-1)``."""
    # A cell divides what its row and its column have left, by the same share of the length of the way: the row's
    # remainder goes to the next column, the column's to the next row, and that of both to both.
    size = check_square("the matrix to map", logits)
    batch = logits.shape[:-2]
    order, place, end = _antidiagonals(size)
    taken, left = (
        part.flatten(-2).index_select(-1, order.to(logits.device)) for part in (logsigmoid(logits), logsigmoid(-logits))
    )
    shares = torch.stack([taken, left])
    one = logits.new_zeros(*batch, 1)
    row = rest_below = logits.new_zeros(*batch, 0)
    rest_right_and_column = logits.new_zeros(2, *batch, 0)
    entries, lengths, last_column, last_row = [], [], [], []
    start = 0
    for diagonal in range(2 * size - 1):
        if diagonal < size:  # another row begins on the left, and another column at the top
            others = one + math.log(size - diagonal)
            row, rest_below = torch.cat([row, one], -1), torch.cat([rest_below, others], -1)
            rest_right_and_column = torch.cat([torch.stack([others, one]), rest_right_and_column], -1)
        else:
            row, rest_below = row[..., 1:], rest_below[..., 1:]
            rest_right_and_column = rest_right_and_column[..., :-1]
        here = slice(start, start + row.shape[-1])
        start = here.stop
        length = torch.minimum(torch.minimum(row, rest_below), rest_right_and_column.amin(0))
        (entry, row), rest_right_and_column = _split(row, rest_right_and_column, shares[..., here] + length)
        rest_below = rest_right_and_column[0]
        entries.append(entry)
        lengths.append(length)
        if diagonal >= size - 1:
            last_column.append(row[..., :1])
            last_row.append(rest_right_and_column[1, ..., -1:])
    flat = torch.cat([*entries, *last_column, *last_row, rest_below], -1)
    log_matrix = flat.index_select(-1, end.to(logits.device)).unflatten(-1, (size + 1, size + 1))
    log_lengths = torch.cat(lengths, -1).index_select(-1, place.to(logits.device)).unflatten(-1, (size, size))
    return log_matrix, log_lengths


def _split(first: Tensor, second: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return logs of ``max(0, first - second) + share`` and ``max(0, second - first) + share``, all given as logs."""
    gap = (first - second).abs()
    equal = gap == 0
    log_difference = torch.maximum(first, second) + (-torch.expm1(-gap.masked_fill(equal, 1.0))).log()
    more = torch.logaddexp(log_difference.masked_fill(equal, -math.inf), share)
    greater = first > second
    return torch.where(greater, more, share), torch.where(greater, share, more)


@functools.lru_cache(maxsize=32)
def _antidiagonals(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cells by antidiagonal, the place of each cell in that order, and the same with the last row and column."""
    cells = torch.arange(size)
    row, column = cells.repeat_interleave(size), cells.repeat(size)
    order = ((row + column) * size + row).argsort()
    place = order.argsort()
    inner = size * size
    end = torch.empty(size + 1, size + 1, dtype=torch.int64)
    end[:size, :size] = place.reshape(size, size)
    end[:size, size] = inner + cells
    end[size, :size] = inner + size + cells
    end[size, size] = inner + 2 * size
    return order, place, end.flatten()


# Stick-breaking distributions over the Birkhoff polytope and over permutations.


class StickBreakingPermutation(dist.TransformedDistribution):  # type: ignore[misc]
    r"""Doubly stochastic matrices broken off sticks at fractions :math:`\sigma(\psi / \tau)` of normal :math:`\psi`.

    As the temperature falls, draws approach permutations, whose distribution is known too: :attr:`limit`. Draws are
    continuous functions of ``loc`` and ``scale``, so that their gradients are unbiased. The distribution depends on
    the order of rows and columns.

    Parameters
    ----------
    loc : Tensor
        Of :math:`\psi`, shape ``(*batch, n - 1, n - 1)``.
    scale : Tensor
        Positive, broadcast to the same shape.
    temperature : float, default 1.0
        :math:`\tau`, positive.

    Raises
    ------
    ShapeError
        If ``loc`` is not square.
    DataError
        If ``loc`` is not finite, or ``scale`` not positive and finite.
    SettingsError
        If the temperature is not positive.

    Notes
    -----
    The density is that of all rows and columns but the last. A matrix that was just drawn has the density of the
    :math:`\psi` it was made from; entries of any other that are exactly zero make its density zero. It is accurate for
    :math:`|\psi| / \tau` up to about 60, such as at temperatures from 0.05 with unit scales; at 0.01 it can be wrong by
    several, since differences of sums below the rounding error of a double are lost.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import StickBreakingPermutation
    >>> broken = StickBreakingPermutation(torch.zeros(2, 2), torch.ones(2, 2), temperature=0.5)
    >>> matrix = broken.rsample()
    >>> matrix.shape, bool((matrix.sum(-1) - 1).abs().max() < 1e-6), bool(broken.log_prob(matrix).isfinite())
    (torch.Size([3, 3]), True, True)
    """

    arg_constraints = {
        "loc": constraints.independent(constraints.real, 2),
        "scale": constraints.independent(constraints.positive, 2),
    }

    def __init__(self, loc: Tensor, scale: Tensor, temperature: float = 1.0, validate_args: bool | None = None) -> None:
        check_square("loc", loc)
        for name, parameter, valid in (("loc", loc, loc.isfinite()), ("scale", scale, scale.isfinite() & (scale > 0))):
            if not valid.all():
                raise DataError(
                    f"{int((~valid).sum())} of {parameter.numel()} entries of {name} are not "
                    f"{'finite' if name == 'loc' else 'positive and finite'}"
                )
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        transform = StickBreakingTransform(temperature, cache_size=1)
        self.temperature = transform.temperature
        base = dist.Normal(self.loc, self.scale, validate_args=False).to_event(2)
        super().__init__(base, [transform], validate_args=validate_args)

    def expand(self, batch_shape: Shape, _instance: None = None) -> StickBreakingPermutation:
        """Return the same distribution with another batch shape."""
        shape = (*batch_shape, *self.loc.shape[-2:])
        return StickBreakingPermutation(
            self.loc.expand(shape), self.scale.expand(shape), self.temperature, self._validate_args
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of all rows and columns but the last, ``(*batch)``.

        Parameters
        ----------
        value : Tensor
            Doubly stochastic, ``(*batch, n, n)``.
        """
        log_density = super().log_prob(value)
        # At a face of the polytope the logit is infinite and its slope zero; the density tends to zero.
        at_face = log_density.isnan() & ~value.isnan().any(-1).any(-1)
        return log_density.masked_fill(at_face, -math.inf)

    @property
    def limit(self) -> SequentialPermutation:
        """Distribution of the permutations that draws approach as the temperature falls."""
        standardized = self.loc / self.scale
        return SequentialPermutation(torch.special.log_ndtr(standardized) - torch.special.log_ndtr(-standardized))

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw from :attr:`limit`, permutations ``sample_shape + (*batch, n)``."""
        return self.limit.sample(sample_shape)


class SequentialPermutation(TorchDistribution):  # type: ignore[misc]
    r"""Permutations from one decision a pair, row by row and column by column.

    A row that is still free takes a column that is still free with the probability of that pair, and the last free
    column with certainty. It is what :class:`StickBreakingPermutation` tends to as its temperature falls, with
    :math:`p = \Phi(\mu / \nu)`, and has a probability in closed form for any number of rows.

    Parameters
    ----------
    logits : Tensor
        Log odds of the decisions, ``(*batch, n - 1, n - 1)``.

    Raises
    ------
    ShapeError
        If ``logits`` are not square.
    DataError
        If there are NaN among them.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import SequentialPermutation, all_permutations
    >>> decisions = SequentialPermutation(torch.zeros(2, 2))
    >>> decisions.log_prob(all_permutations(3)).exp().tolist()
    [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    """

    arg_constraints = {"logits": constraints.independent(constraints.real, 2)}
    support = permutations

    def __init__(self, logits: Tensor, validate_args: bool | None = None) -> None:
        logits = real_numbers("logits", logits)
        size = check_square("logits", logits) + 1
        if logits.isnan().any():
            raise DataError(f"{int(logits.isnan().sum())} of {logits.numel()} logits are NaN")
        self.logits = logits
        # Infinite logits are decisions that are certain, which torch's own check of arguments would refuse.
        super().__init__(logits.shape[:-2], torch.Size([size]), validate_args=False)
        self._validate_args = TorchDistribution._validate_args if validate_args is None else validate_args

    @classmethod
    def near_uniform(cls, size: int, dtype: torch.dtype | None = None) -> SequentialPermutation:
        r"""Return decisions with the probabilities that they have, one by one, in a uniform permutation.

        Given that row :math:`m` took none of the :math:`n` columns before, and column :math:`n` none of the :math:`m`
        rows, counted from zero, it is :math:`1 / (N - m - n + m n / (N - 1))`. In a uniform permutation decisions
        depend on each other, so that this one is not exactly uniform from three rows on.

        Parameters
        ----------
        size : int
            Number of rows, at least two.
        dtype : torch.dtype, optional
            By default torch's default.

        Raises
        ------
        SettingsError
            If there are fewer than two rows.
        """
        size = whole_number("size", size, least=2)
        before = torch.arange(size - 1, dtype=dtype or torch.get_default_dtype())
        row, column = before.unsqueeze(1), before
        odds_against = size - row - column + row * column / (size - 1) - 1
        return cls(-odds_against.log())

    def expand(self, batch_shape: Shape, _instance: None = None) -> SequentialPermutation:
        """Return the same distribution with another batch shape."""
        return SequentialPermutation(self.logits.expand(*batch_shape, *self.logits.shape[-2:]), self._validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of permutations, ``(*batch, n)`` to ``(*batch)``.

        Parameters
        ----------
        value : Tensor of int
        """
        if self._validate_args:
            self._validate_sample(value)
        # Of a permutation, a share is one where the decision was made, and zero where it was no longer open.
        taken, left = taken_and_left(permutation_matrix(value, self.logits.dtype))
        log_taken, log_left = logsigmoid(self.logits), logsigmoid(-self.logits)
        nothing = torch.zeros((), dtype=taken.dtype, device=taken.device)
        terms = torch.where(taken > 0, log_taken, nothing) + torch.where(left > 0, log_left, nothing)
        return terms.sum((-1, -2))

    def sample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw permutations, ``sample_shape + (*batch, n)``."""
        shape = torch.Size(sample_shape) + self.logits.shape
        with torch.no_grad():
            uniform = torch.rand(shape, dtype=self.logits.dtype, device=self.logits.device)
            # Sticks broken at their very ends leave all but one entry of a row below exp(-1000).
            ends = torch.where(uniform < self.logits.sigmoid(), 1e3, -1e3).to(self.logits.dtype)
            return break_sticks(ends)[0].argmax(-1)


# Relaxed permutations with parameters: guides for models with a latent permutation.

_POSITIVE = (0.0, math.inf)


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
        self.temperature = real_number("temperature", temperature, between=_POSITIVE)

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
        log_scale = math.log(real_number("scale", scale, between=_POSITIVE))
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
        self.prior_scale = real_number("prior_scale", prior_scale, between=_POSITIVE)
        scales = (0.001, _greatest_scale(self.size)) if scales is None else scales
        if not isinstance(scales, (tuple, list)) or len(scales) != 2:
            raise SettingsError(f"scales are {scales!r}; give the least and the greatest, such as (0.001, 0.5)")
        least, greatest = (real_number("scales", bound, between=_POSITIVE) for bound in scales)
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
        self.prior_temperature = real_number("prior_temperature", wide, between=_POSITIVE)
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
    """Return the scale of normal noise that exchanges some two rows of a permutation with a probability of 0.04."""
    # Two rows are exchanged where four entries of noise sum to two or more; the sum has standard deviation 2 * scale.
    pairs = size * (size - 1) / 2
    return float(-1 / torch.special.ndtri(torch.tensor(0.04 / pairs, dtype=torch.float64)))
