"""Continuous relaxations of permutations (Sinkhorn, rounding, stick-breaking), and guides based on them."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Any, NoReturn

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Transform, constraints
from torch.nn.functional import logsigmoid

from bayeskit.errors import DataError, ModelError, SettingsError
from bayeskit.extend import global_stream, new_generator, real_number, whole_number
from bayeskit.models.discrete._inputs import Shape, as_real
from bayeskit.models.discrete.permutations._distributions import (
    check_log_weights,
    check_possible,
    check_square,
    doubly_stochastic,
    nearest_permutation,
    permutation_matrix,
    permutations,
)

# Sinkhorn scaling to doubly stochastic matrices, and the Gumbel-Sinkhorn distribution.

_EULER = 0.5772156649015329


def sinkhorn(log_weights: Tensor, num_iterations: int = 20) -> Tensor:
    """Scale positive matrices to approximately doubly stochastic matrices by Sinkhorn iterations.

    Parameters
    ----------
    log_weights : Tensor
        Log entries, ``(*batch, n, n)``; ``-inf`` for zero entries.
    num_iterations : int, default 20
        Each iteration normalizes rows, then columns; column sums are exact, row sums approximate. Log entries that
        differ by hundreds need hundreds of iterations.

    Returns
    -------
    Tensor
        Log entries of the scaled matrices, same shape.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or a complete row or column is ``-inf``.
    SettingsError
        If ``num_iterations`` is less than 1.

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
    log_weights = as_real("log_weights", log_weights)
    check_log_weights("log_weights", log_weights)
    return scale(log_weights, whole_number("num_iterations", num_iterations, least=1))


def scale(log_weights: Tensor, num_iterations: int) -> Tensor:
    """Perform :func:`sinkhorn` without validation."""
    for _ in range(num_iterations):
        log_weights = log_weights.log_softmax(-1).log_softmax(-2)
    return log_weights


class GumbelSinkhorn(TorchDistribution):  # type: ignore[misc]
    r"""Gumbel-Sinkhorn distribution: matrices :math:`S((L + G) / \tau)` with Gumbel noise :math:`G`.

    :math:`S` is Sinkhorn scaling. As the temperature tends to 0, draws converge to the permutation that maximizes
    :math:`\sum_i (L + G)_{i \pi_i}`. **The density has no closed form**, because the scaling is not injective;
    :meth:`log_prob` raises an error. For an evidence lower bound use the noise as latent variable, with the KL
    divergence :meth:`noise_divergence`, a loose upper bound of the KL divergence of the matrices.

    Column sums of draws are 1 up to rounding, row sums only approximately. With 10 rows, zero scores and 20
    iterations, the largest row error is at least 0.01 in a third of draws at temperature 0.5, and at least 0.1 in most
    draws at temperature 0.05. :attr:`support` is therefore the set of nonnegative matrices.

    Parameters
    ----------
    log_scores : Tensor
        :math:`L`, shape ``(*batch, n, n)``; finite, or ``-inf`` where a pair is impossible.
    temperature : float, default 1.0
        :math:`\tau`, positive.
    num_iterations : int, default 20
        Number of Sinkhorn iterations.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or every permutation has probability zero.
    SettingsError
        If the temperature is not positive, or ``num_iterations`` is less than 1.

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
        log_scores = as_real("log_scores", log_scores)
        size = check_possible("log_scores", log_scores)
        self.log_scores = log_scores
        self.temperature = real_number("temperature", temperature, "(0, inf)")
        self.num_iterations = whole_number("num_iterations", num_iterations, least=1)
        super().__init__(log_scores.shape[:-2], torch.Size([size, size]), validate_args=False)

    def expand(self, batch_shape: Shape, _instance: None = None) -> GumbelSinkhorn:
        """Return the distribution expanded to another batch shape."""
        scores = self.log_scores.expand(*batch_shape, *self.event_shape)
        return GumbelSinkhorn(scores, self.temperature, self.num_iterations)

    @property
    def noise(self) -> TorchDistribution:
        """Distribution of :math:`L + G`, before division by the temperature and scaling."""
        return dist.Gumbel(self.log_scores, torch.ones_like(self.log_scores), validate_args=False).to_event(2)

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw reparameterized matrices, ``sample_shape + (*batch, n, n)``."""
        return scale(self.noise.rsample(torch.Size(sample_shape)) / self.temperature, self.num_iterations).exp()

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw permutations from the zero-temperature limit, ``sample_shape + (*batch, n)``."""
        with torch.no_grad():
            return nearest_permutation(self.noise.sample(torch.Size(sample_shape)))

    def log_prob(self, value: Tensor) -> NoReturn:
        """Raise an error, because the density has no closed form.

        Raises ``ModelError`` always.
        """
        raise ModelError(
            "GumbelSinkhorn has no density in closed form, because Sinkhorn scaling is not injective. Draw its Gumbel "
            "noise in the guide and scale it in the model (see GumbelSinkhornRelaxation), or use "
            "StickBreakingPermutation, which has a density."
        )

    def noise_divergence(self, prior_temperature: float | None = None) -> Tensor:
        r"""Return the KL divergence of :math:`(L + G) / \tau` from :math:`G / \tau_0`, ``(*batch)``.

        Impossible pairs are impossible in the prior too and do not contribute. ``prior_temperature``: :math:`\tau_0`,
        positive; default ``temperature``. Raises ``SettingsError`` if ``prior_temperature`` is not positive.
        """
        prior = self.temperature if prior_temperature is None else prior_temperature
        ratio = real_number("prior_temperature", prior, "(0, inf)") / self.temperature
        # Gumbel distributions with scales 1 / tau and 1 / tau_0: the ratio of scales is tau_0 / tau.
        constant = -math.log(ratio) + _EULER * (ratio - 1) - 1
        impossible = self.log_scores == -math.inf
        shifted = ratio * self.log_scores.masked_fill(impossible, 0.0)
        terms = shifted + (math.lgamma(ratio + 1) - shifted).exp() + constant
        return terms.masked_fill(impossible, 0.0).sum((-1, -2))


def _checked_normal(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and scales of square matrices, broadcast; ShapeError or DataError if they are invalid."""
    check_square("loc", loc)
    for name, parameter, valid in (("loc", loc, loc.isfinite()), ("scale", scale, scale.isfinite() & (scale > 0))):
        if not valid.all():
            raise DataError(
                f"{int((~valid).sum())} of {parameter.numel()} entries of {name} are not "
                f"{'finite' if name == 'loc' else 'positive and finite'}"
            )
    return torch.broadcast_tensors(loc, scale)


# Normal matrices shrunk towards the nearest permutation.


class RoundedPermutation(TorchDistribution):  # type: ignore[misc]
    r"""Matrices :math:`X = \tau \Psi + (1 - \tau) \operatorname{round}(\Psi)` of normal :math:`\Psi`.

    The entries of :math:`\Psi` are independent and normal; rounding gives the nearest permutation matrix. At
    temperature 1 matrices are not rounded; at lower temperatures draws concentrate around permutation matrices. Draws
    are not doubly stochastic. The density is zero near matrices that are equidistant from two permutations. The map
    preserves the nearest permutation, so the density is

    .. math:: q(X) = \tau^{-n^2} \prod_{ij} N(\psi_{ij}; \mu_{ij}, \nu_{ij}), \quad
              \Psi = (X - (1 - \tau) \operatorname{round}(X)) / \tau

    where :math:`\Psi` rounds to the same permutation as :math:`X`, and zero elsewhere. **Gradients of** ``rsample``
    **treat the rounded permutation as constant** and are therefore biased for temperatures below 1.

    Source: Linderman et al. (2018), as for :class:`GibbsPermutation`.

    Parameters
    ----------
    loc : Tensor
        :math:`\mu`, shape ``(*batch, n, n)``, for example ``sinkhorn(log_scores).exp()``.
    scale : Tensor
        :math:`\nu`, positive, broadcast to the shape of ``loc``.
    temperature : float, default 1.0
        :math:`\tau` in ``(0, 1]``.

    Raises
    ------
    ShapeError
        If ``loc`` is not square.
    SettingsError
        If the temperature is not in ``(0, 1]``.
    DataError
        If ``loc`` is not finite, or ``scale`` not positive and finite.

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
        check_square("loc", loc)
        self.temperature = real_number("temperature", temperature, "(0, 1]")
        self.loc, self.scale = _checked_normal(loc, scale)
        super().__init__(self.loc.shape[:-2], self.loc.shape[-2:], validate_args=False)

    @classmethod
    def near_gibbs(cls, log_weights: Tensor) -> RoundedPermutation:
        r"""Return a distribution whose :meth:`sample_permutations` approximate a :class:`GibbsPermutation`.

        It needs no training and has no limit on the number of rows. The mean is ``log_weights``, the scale
        :math:`\pi / \sqrt{12}`. The contrast of two permutations that differ in two rows is a sum of four entries; it
        has the mean and variance of a logistic variable, so their odds are approximately correct.

        ``log_weights``: ``(*batch, n, n)``, finite.

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
        loc = as_real("log_weights", log_weights)
        return cls(loc, torch.full_like(loc, math.pi / math.sqrt(12)))

    def expand(self, batch_shape: Shape, _instance: None = None) -> RoundedPermutation:
        """Return the distribution expanded to another batch shape."""
        shape = (*batch_shape, *self.event_shape)
        return RoundedPermutation(self.loc.expand(shape), self.scale.expand(shape), self.temperature)

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw matrices, ``sample_shape + (*batch, n, n)``; gradients treat the permutation as constant."""
        normal = self._normal(sample_shape)
        if self.temperature == 1:
            return normal
        rounded = permutation_matrix(nearest_permutation(normal), normal.dtype)
        return self.temperature * normal + (1 - self.temperature) * rounded

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw nearest permutations of matrices, ``sample_shape + (*batch, n)``, at any temperature."""
        with torch.no_grad():
            return nearest_permutation(self._normal(sample_shape))

    def _normal(self, sample_shape: Shape) -> Tensor:
        noise = torch.randn(self._extended_shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of all entries, ``(*batch, n, n)`` to ``(*batch)``; ``-inf`` outside the support."""
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


# Stick-breaking parameterization of the Birkhoff polytope, its density, and its zero-temperature limit.


class StickBreakingTransform(Transform):
    r"""Bijection from real matrices to doubly stochastic matrices with one more row and column.

    Entries are set sequentially: :math:`x_{mn}` lies at the fraction :math:`\beta_{mn} = \sigma(\psi_{mn} / \tau)` of
    the interval that is feasible given the previous entries. The other sums in

    .. math:: x_{mn}, \quad r = \sum_{j > n} x_{mj}, \quad c = \sum_{i > m} x_{in}, \quad q = \sum_{i > m, j > n} x_{ij}

    then follow from :math:`x_{mn}`. The interval has length :math:`w_{mn} = \min(x, q) + \min(r, c)`, and the inverse
    is :math:`\psi_{mn} = \tau (\log \min(x, q) - \log \min(r, c))`. Sums are stored as logarithms in double precision,
    so entries may underflow. Log determinants are accurate for :math:`|\psi| / \tau` up to about 60; far beyond,
    rounding of the sums causes errors of several nats. The entries of an antidiagonal are computed in parallel.

    As the temperature tends to 0, the matrices converge to permutations. The map is continuous, and not differentiable
    where two of the four sums are equal. Source: Linderman et al. (2018), as for :class:`GibbsPermutation`. Raises
    ``SettingsError`` if the temperature is not positive.

    Parameters
    ----------
    temperature : float, default 1.0
        :math:`\tau`, positive.
    cache_size : int, default 0

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
        if cache_size not in (0, 1):
            raise SettingsError(f"cache_size must be 0 or 1, not {cache_size}")
        super().__init__(cache_size=cache_size)
        self.temperature = real_number("temperature", temperature, "(0, inf)")
        self._latest: tuple[Tensor, Tensor] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StickBreakingTransform) and self.temperature == other.temperature

    __hash__ = Transform.__hash__

    def with_cache(self, cache_size: int = 1) -> StickBreakingTransform:
        """Return the transform with another cache size."""
        return self if cache_size == self._cache_size else StickBreakingTransform(self.temperature, cache_size)

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        """Return the output shape for an input shape."""
        return torch.Size([*shape[:-2], shape[-2] + 1, shape[-1] + 1])

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        """Return the input shape for an output shape."""
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
        """Return the log Jacobian determinant of the output without its last row and column, ``(*batch)``."""
        if self._latest is not None and self._latest[0] is x:
            # Use the cached logarithms: entries of the matrix may have underflowed.
            log_lengths = self._latest[1]
        else:
            log_lengths = torch.add(*taken_and_left(y.double())).log()
        logits = x.double() / self.temperature
        slopes = logsigmoid(logits) + logsigmoid(-logits) - math.log(self.temperature)
        return (log_lengths + slopes).sum((-1, -2)).to(x.dtype)


def taken_and_left(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``min(x, q)`` and ``min(r, c)`` of each entry, ``(*batch, n - 1, n - 1)`` each."""
    check_square("the doubly stochastic matrix", matrix)
    right = _sum_after(matrix, -1)
    below, corner = _sum_after(matrix, -2), _sum_after(right, -2)
    inner = (..., slice(-1), slice(-1))
    return torch.minimum(matrix, corner)[inner], torch.minimum(right, below)[inner]


def _sum_after(matrix: Tensor, dim: int) -> Tensor:
    """Return the sum of all later entries, accumulated from the end without subtraction (no cancellation)."""
    ends = matrix.flip(dim).cumsum(dim).flip(dim)
    return torch.cat([ends.narrow(dim, 1, ends.shape[dim] - 1), torch.zeros_like(ends.narrow(dim, 0, 1))], dim)


def break_sticks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log entries ``(*batch, n, n)`` and log interval lengths for ``logits (*batch, n-1, n-1)``."""
    # Each cell divides the remainders of its row and column. The remainder of the row passes to the next column, the
    # remainder of the column to the next row.
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
        if diagonal < size:  # a new row starts on the left and a new column at the top
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
    r"""Stick-breaking distribution over doubly stochastic matrices, with normal logits :math:`\psi`.

    Fractions are :math:`\sigma(\psi / \tau)` (see :class:`StickBreakingTransform`). As the temperature tends to 0,
    draws converge to permutations with the distribution :attr:`limit`. Draws are continuous in ``loc`` and ``scale``,
    so reparameterization gradients are unbiased. The distribution depends on the order of rows and columns. The density
    is with respect to the matrix without its last row and column, and accurate for :math:`|\psi| / \tau` up to
    about 60, e.g. at temperatures from 0.05 with unit scales; at 0.01 rounding can shift its log by several nats.
    The most recent draw uses its cached :math:`\psi`; other matrices with entries of exactly zero have density
    zero. Source: Linderman et al. (2018), as for :class:`GibbsPermutation`.

    Parameters
    ----------
    loc : Tensor
        Mean of :math:`\psi`, shape ``(*batch, n - 1, n - 1)``.
    scale : Tensor
        Standard deviation of :math:`\psi`, positive, broadcast to the shape of ``loc``.
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
        self.loc, self.scale = _checked_normal(loc, scale)
        transform = StickBreakingTransform(temperature, cache_size=1)
        self.temperature = transform.temperature
        base = dist.Normal(self.loc, self.scale, validate_args=False).to_event(2)
        super().__init__(base, [transform], validate_args=validate_args)

    def expand(self, batch_shape: Shape, _instance: None = None) -> StickBreakingPermutation:
        """Return the distribution expanded to another batch shape."""
        shape = (*batch_shape, *self.loc.shape[-2:])
        return StickBreakingPermutation(
            self.loc.expand(shape), self.scale.expand(shape), self.temperature, self._validate_args
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density without last row and column: ``(*batch, n, n)`` to ``(*batch)``."""
        log_density = super().log_prob(value)
        # On a face of the polytope the logit is infinite; the density tends to zero.
        at_face = log_density.isnan() & ~value.isnan().any(-1).any(-1)
        return log_density.masked_fill(at_face, -math.inf)

    @property
    def limit(self) -> SequentialPermutation:
        """Distribution of permutations in the zero-temperature limit."""
        standardized = self.loc / self.scale
        return SequentialPermutation(torch.special.log_ndtr(standardized) - torch.special.log_ndtr(-standardized))

    def sample_permutations(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw from :attr:`limit`, permutations ``sample_shape + (*batch, n)``."""
        return self.limit.sample(sample_shape)


class SequentialPermutation(TorchDistribution):  # type: ignore[misc]
    r"""Permutations from sequential Bernoulli decisions, one per pair, in row-major order.

    An unmatched row takes an unmatched column with the probability of the pair, and the last unmatched column with
    probability 1. With :math:`p = \Phi(\mu / \nu)` it is the zero-temperature limit of
    :class:`StickBreakingPermutation`. Its probability has a closed form for any number of rows.

    Source: Linderman et al. (2018), as for :class:`GibbsPermutation`.

    Parameters
    ----------
    logits : Tensor
        Log odds of the decisions, ``(*batch, n - 1, n - 1)``.

    Raises
    ------
    ShapeError
        If ``logits`` are not square.
    DataError
        If ``logits`` has NaN.

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
        logits = as_real("logits", logits)
        size = check_square("logits", logits) + 1
        if logits.isnan().any():
            raise DataError(f"{int(logits.isnan().sum())} of {logits.numel()} logits are NaN")
        self.logits = logits
        # torch's argument check would reject infinite logits, which are deterministic decisions.
        super().__init__(logits.shape[:-2], torch.Size([size]), validate_args=False)
        self._validate_args = TorchDistribution._validate_args if validate_args is None else validate_args

    @classmethod
    def near_uniform(cls, size: int, dtype: torch.dtype | None = None) -> SequentialPermutation:
        r"""Return the distribution whose decisions have the marginal probabilities of a uniform permutation.

        Given that row :math:`m` and column :math:`n` (counted from 0) are unmatched, the probability is
        :math:`1 / (N - m - n + m n / (N - 1))`. Decisions are dependent in a uniform permutation, so the result is only
        approximately uniform for three or more rows.

        ``size``: number of rows, at least 2. ``dtype``: default torch's default dtype. Raises ``SettingsError`` if
        ``size`` is less than 2.
        """
        size = whole_number("size", size, least=2)
        before = torch.arange(size - 1, dtype=dtype or torch.get_default_dtype())
        row, column = before.unsqueeze(1), before
        odds_against = size - row - column + row * column / (size - 1) - 1
        return cls(-odds_against.log())

    def expand(self, batch_shape: Shape, _instance: None = None) -> SequentialPermutation:
        """Return the distribution expanded to another batch shape."""
        return SequentialPermutation(self.logits.expand(*batch_shape, *self.logits.shape[-2:]), self._validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of permutations, ``(*batch, n)`` to ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(value)
        # For a permutation, ``taken`` or ``left`` is 1 for open decisions; both are 0 for determined decisions.
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
            # Extreme fractions leave all but one entry of each row below exp(-1000).
            ends = torch.where(uniform < self.logits.sigmoid(), 1e3, -1e3).to(self.logits.dtype)
            return break_sticks(ends)[0].argmax(-1)


# Trainable relaxations: guides for models with a latent permutation.


class Relaxation(PyroModule):  # type: ignore[misc]
    """Base class of variational distributions over relaxed permutations, usable as Pyro guides.

    The guide draws a value at one site; :meth:`matrix` maps the value to a relaxed permutation. The model draws the
    value from :meth:`prior`. Relaxed models, and hence evidence lower bounds, are not comparable between relaxations;
    compare :meth:`sample_permutations` instead. Raises ``SettingsError`` if the shape or the temperature is outside its
    domain.

    Parameters
    ----------
    shape : tuple of int
        ``(*batch, n)``: batch of independent problems, and number of rows (at least 2).
    temperature : float
    """

    site = "relaxed_permutation"

    def __init__(self, shape: tuple[int, ...], temperature: float) -> None:
        super().__init__()
        if not isinstance(shape, (tuple, list)) or not shape:
            raise SettingsError(f"shape is {shape!r}; give (*batch, n), such as (6,) for permutations of six elements")
        self.size = whole_number("shape[-1]", shape[-1], least=2)
        self.batch_shape = torch.Size(whole_number("shape", length, least=1) for length in shape[:-1])
        self.temperature = real_number("temperature", temperature, "(0, inf)")

    @abstractmethod
    def prior(self) -> TorchDistribution:
        """Return the prior of the value, with the batch in its event shape."""

    @abstractmethod
    def posterior(self) -> TorchDistribution:
        """Return the variational distribution of the value, with the batch in its event shape."""

    @abstractmethod
    def matrix(self, value: Tensor) -> Tensor:
        """Return the relaxed permutation of a value, ``(..., *batch, n, n)``."""

    @abstractmethod
    def distribution(self) -> Any:
        """Return the variational distribution of matrices."""

    def forward(self, *args: object) -> None:
        """Run the guide: draw the value. Arguments of the model are ignored."""
        pyro.sample(self.site, self.posterior())

    def sample_permutations(self, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw permutations from the variational distribution, int64, ``(num_samples, *batch, n)``."""
        num_samples = whole_number("num_samples", num_samples, least=1)
        with torch.no_grad(), global_stream(new_generator(seed, stream="relaxed permutations")):
            return self.distribution().sample_permutations((num_samples,))

    def _parameter(self, start: Tensor) -> nn.Parameter:
        return nn.Parameter(start.expand(*self.batch_shape, *start.shape[-2:]).clone())


class StickBreakingRelaxation(Relaxation):
    r"""Stick-breaking relaxation with normal logits in guide and prior.

    The site value is the logits. The map to matrices is bijective, so the evidence lower bound equals that of
    :class:`StickBreakingPermutation` (Jacobian determinants cancel). The zero-temperature limit of the prior is
    approximately uniform. Every entry depends on the previous entries: training often ends in a local mode, and with
    dozens of rows far from the posterior. Prefer :class:`RoundingRelaxation` unless the density of matrices is needed.

    Source: Linderman et al. (2018), as for :class:`GibbsPermutation`. Raises ``SettingsError`` if the shape, the
    temperature or the scale is outside its domain.

    Parameters
    ----------
    shape, dtype
        ``(*batch, n)``, and the dtype of the parameters, by default that of torch.
    temperature : float, default 0.6
        At 0.6 the logistic function is close to the normal distribution function, so relaxed decisions have about the
        mean of their zero-temperature limit.
    scale : float, default 1.0
        Initial standard deviation of the guide; the prior has standard deviation 1.

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
        log_scale = math.log(real_number("scale", scale, "(0, inf)"))
        self.loc, self.log_scale = self._parameter(start), self._parameter(torch.full_like(start, log_scale))

    def prior(self) -> TorchDistribution:
        """Return the normal prior of the logits, with unit scale."""
        loc = self.prior_loc.expand_as(self.loc)
        return dist.Normal(loc, torch.ones_like(loc)).to_event(loc.dim())

    def posterior(self) -> TorchDistribution:
        """Return the normal variational distribution of the logits."""
        return dist.Normal(self.loc, self.log_scale.exp()).to_event(self.loc.dim())

    def matrix(self, value: Tensor) -> Tensor:
        """Return the doubly stochastic matrix of logits."""
        return break_sticks(value.double() / self.temperature)[0].exp().to(value.dtype)

    def distribution(self) -> StickBreakingPermutation:
        """Return the variational distribution of matrices."""
        return StickBreakingPermutation(self.loc, self.log_scale.exp(), self.temperature)


class RoundingRelaxation(Relaxation):
    r"""Rounding relaxation: normal matrices with doubly stochastic mean, shrunk towards permutations.

    The prior of each entry is a mixture of two normal distributions with means 0 and 1. The evidence lower bound is not
    sensitive to how often noise changes the nearest permutation; the limits ``scales`` therefore determine the
    uncertainty of :meth:`sample_permutations`. Source: Linderman et al. (2018), as for :class:`GibbsPermutation`.
    Raises ``SettingsError`` if the shape, the temperature, a scale or the number of iterations is outside its domain.

    Parameters
    ----------
    shape : tuple of int
        ``(*batch, n)``.
    temperature : float, default 1.0
        In ``(0, 1]``. At 1 matrices are not rounded in training, and gradients are unbiased.
    prior_scale : float, default 0.7
        Standard deviation of the mixture components of the prior. Below 0.5 the prior is bimodal, which pushes means to
        0 or 1; permutations are then overconfident.
    scales : (float, float), optional
        Minimum and maximum standard deviation of the guide. The default minimum is 0.001. At the default maximum, noise
        exchanges two rows of a permutation matrix with probability about 0.04 (0.36 for 6 rows, 0.25 for 50).
    num_iterations : int, default 20
        Sinkhorn iterations for the means.
    dtype : torch.dtype, optional
        Default torch's default dtype.

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
        real_number("temperature", temperature, "(0, 1]")
        self.prior_scale = real_number("prior_scale", prior_scale, "(0, inf)")
        scales = (0.001, _greatest_scale(self.size)) if scales is None else scales
        if not isinstance(scales, (tuple, list)) or len(scales) != 2:
            raise SettingsError(f"scales are {scales!r}; give minimum and maximum, such as (0.001, 0.5)")
        least, greatest = (real_number("scales", bound, "(0, inf)") for bound in scales)
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
        """Return the prior of matrices: per entry a mixture of two normal distributions."""
        ends = torch.arange(2, dtype=self.log_scores.dtype, device=self.log_scores.device)
        mixture = dist.MixtureSameFamily(
            dist.Categorical(torch.ones_like(ends)), dist.Normal(ends, self.prior_scale), validate_args=False
        )
        return mixture.expand(self.log_scores.shape).to_event(self.log_scores.dim())

    def posterior(self) -> TorchDistribution:
        """Return the distribution of matrices."""
        return self.distribution().to_event(len(self.batch_shape))

    def matrix(self, value: Tensor) -> Tensor:
        """Return the value itself."""
        return value


class GumbelSinkhornRelaxation(Relaxation):
    r"""Gumbel-Sinkhorn relaxation: scores with Gumbel noise and Sinkhorn scaling.

    The site value is the noisy scores divided by the temperature; the prior has zero scores. Source: Mena et al.
    (2018), as for :class:`GumbelSinkhorn`. Raises ``SettingsError`` if the shape, a temperature or the number of
    iterations is outside its domain.

    Parameters
    ----------
    shape, dtype
        ``(*batch, n)``, and the dtype of the parameters, by default that of torch.
    temperature : float, default 1.0
    prior_temperature : float, optional
        Temperature of the prior, default ``temperature``. A lower value gives a wider prior and smaller KL divergence.
    num_iterations : int, default 20
        Number of Sinkhorn iterations.

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
        self.prior_temperature = real_number("prior_temperature", wide, "(0, inf)")
        self.num_iterations = whole_number("num_iterations", num_iterations, least=1)
        self.log_scores = self._parameter(torch.zeros(self.size, self.size, dtype=dtype))

    def distribution(self) -> GumbelSinkhorn:
        """Return the variational distribution of matrices (without closed-form density)."""
        return GumbelSinkhorn(self.log_scores, self.temperature, self.num_iterations)

    def prior(self) -> TorchDistribution:
        """Return Gumbel noise divided by the temperature of the prior."""
        return self._gumbel(torch.zeros_like(self.log_scores), self.prior_temperature)

    def posterior(self) -> TorchDistribution:
        """Return scores with Gumbel noise, divided by the temperature."""
        return self._gumbel(self.log_scores, self.temperature)

    def _gumbel(self, scores: Tensor, temperature: float) -> TorchDistribution:
        return dist.Gumbel(scores / temperature, torch.full_like(scores, 1 / temperature)).to_event(scores.dim())

    def matrix(self, value: Tensor) -> Tensor:
        """Return the Sinkhorn-scaled matrix of noisy scores."""
        return scale(value, self.num_iterations).exp()


def _greatest_scale(size: int) -> float:
    """Return the scale of normal noise that exchanges two given rows of a permutation with probability 0.04."""
    # Two rows are exchanged if the noise of four entries sums to 2 or more; that sum has standard deviation 2 * scale.
    pairs = size * (size - 1) / 2
    return float(-1 / torch.special.ndtri(torch.tensor(0.04 / pairs, dtype=torch.float64)))
