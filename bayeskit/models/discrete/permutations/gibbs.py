"""Distributions over permutations whose log probability is a sum over pairs."""

from __future__ import annotations

import math

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.discrete.permutations.assignments import (
    all_permutations,
    check_possible,
    check_square,
    nearest_permutation,
    permutations,
    real_numbers,
)
from bayeskit.models.discrete.permutations.permanent import column_sets, partial_sums

Shape = torch.Size | list[int] | tuple[int, ...]


class GibbsPermutation(TorchDistribution):  # type: ignore[misc]
    r"""Permutations with :math:`p(\pi) = \exp(\sum_i L_{i \pi_i}) / \operatorname{perm}(e^L)`.

    All answers are exact: the normalizer is the permanent, draws go row by row through its dynamic programme, marginal
    probabilities are its gradient. They need at most 20 rows; the most probable permutation is found for any number.
    Zeros are the uniform distribution. A value is a vector of columns: row ``i`` is matched with ``value[i]``.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, n, n)``, finite, or ``-inf`` where a pair is impossible.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or no permutation avoids those that are ``-inf``.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import GibbsPermutation
    >>> matching = GibbsPermutation(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    >>> [round(p, 4) for p in matching.log_prob(torch.tensor([[0, 1], [1, 0]])).exp().tolist()]
    [0.9526, 0.0474]
    >>> matching.mode.tolist()
    [0, 1]
    """

    arg_constraints = {"log_weights": constraints.independent(constraints.real, 2)}
    support = permutations
    has_enumerate_support = True

    def __init__(self, log_weights: Tensor, validate_args: bool | None = None) -> None:
        log_weights = real_numbers("log_weights", log_weights)
        size = check_possible("log_weights", log_weights)
        self.log_weights = log_weights
        self._latest: tuple[int, list[Tensor]] | None = None
        # Impossible pairs are no real numbers, so that torch's own check of arguments would refuse them.
        super().__init__(log_weights.shape[:-2], torch.Size([size]), validate_args=False)
        self._validate_args = TorchDistribution._validate_args if validate_args is None else validate_args

    @classmethod
    def from_weights(cls, weights: Tensor) -> GibbsPermutation:
        """Return the distribution with probabilities in proportion to products of ``weights``.

        Parameters
        ----------
        weights : Tensor
            Shape ``(*batch, n, n)``, not negative.

        Raises
        ------
        ShapeError
            If a matrix is not square.
        DataError
            If entries are negative, or no permutation avoids those that are zero.
        """
        weights = real_numbers("weights", weights)
        check_square("weights", weights)
        negative = weights < 0
        if negative.any():
            where = tuple(negative.nonzero()[0].tolist())
            raise DataError(
                f"{int(negative.sum())} of {negative.numel()} weights are negative, the first at {where}: "
                f"{float(weights[where]):g}. If they are log weights, give them to GibbsPermutation itself."
            )
        return cls(weights.log())

    def expand(self, batch_shape: Shape, _instance: None = None) -> GibbsPermutation:
        """Return the same distribution with another batch shape."""
        return GibbsPermutation(
            self.log_weights.expand(*batch_shape, *self.log_weights.shape[-2:]), self._validate_args
        )

    @property
    def _sums(self) -> list[Tensor]:
        weights = self.log_weights
        if weights.requires_grad or weights.is_inference():  # a graph serves one backward pass
            return partial_sums(weights)
        if self._latest is None or self._latest[0] != weights._version:  # they may have changed in place
            self._latest = weights._version, partial_sums(weights)
        return self._latest[1]

    @property
    def log_partition(self) -> Tensor:
        """The log permanent, ``(*batch)``.

        Raises
        ------
        SettingsError
            If there are more than 20 rows.
        """
        return self._sums[-1].squeeze(-1)

    def log_weight(self, value: Tensor) -> Tensor:
        """Return the log probability up to the log permanent, for any number of rows: ``(*batch, n)`` to ``(*batch)``.

        Parameters
        ----------
        value : Tensor of int

        Raises
        ------
        ShapeError
            If values have another number of rows.
        """
        if value.shape[-1:] != self.event_shape:
            raise ShapeError(f"values have shape {tuple(value.shape)}; give (*batch, {self.event_shape[0]})")
        shape = torch.broadcast_shapes(value.shape, self.log_weights.shape[:-1])
        weights = self.log_weights.expand(*shape, self.log_weights.shape[-1])
        return weights.gather(-1, value.long().expand(shape).unsqueeze(-1)).squeeze(-1).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of permutations, ``(*batch, n)`` to ``(*batch)``.

        Parameters
        ----------
        value : Tensor of int
        """
        if self._validate_args:
            self._validate_sample(value)
        return self.log_weight(value) - self.log_partition

    @property
    def marginals(self) -> Tensor:
        """Probability of each pair, ``(*batch, n, n)``: the gradient of the log permanent, itself differentiable."""
        differentiable = self.log_weights.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            leaf = self.log_weights if differentiable else self.log_weights.detach().requires_grad_()
            total = (self if differentiable else GibbsPermutation(leaf)).log_partition.sum()
            return torch.autograd.grad(total, leaf, create_graph=differentiable)[0]

    @property
    def mode(self) -> Tensor:
        """Most probable permutation, ``(*batch, n)``, by the Hungarian algorithm, for any number of rows."""
        return nearest_permutation(self.log_weights)

    def entropy(self) -> Tensor:
        """Return the entropy, ``(*batch)``."""
        finite = self.log_weights.masked_fill(self.log_weights == -math.inf, 0.0)
        return self.log_partition - (self.marginals * finite).sum((-1, -2))

    def sample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw permutations exactly, ``sample_shape + (*batch, n)``.

        Given which columns are left, the last row is drawn first: a column has the probability of all matchings of
        the rows above with the columns that then remain.
        """
        size, shape = self.event_shape[0], self._extended_shape(sample_shape)
        with torch.no_grad():
            table = self._table().expand(*shape[:-1], -1)
            bits = 1 << torch.arange(size, device=table.device)
            left = torch.full((*shape[:-1], 1), 2**size - 1, dtype=torch.int64, device=table.device)
            drawn = []
            for row in reversed(range(size)):
                scores = self.log_weights[..., row, :] + table.gather(-1, left & ~bits)
                scores = scores.masked_fill(left & bits == 0, -math.inf)
                gumbel = -torch.empty_like(scores).exponential_().log()
                column = (scores + gumbel).argmax(-1, keepdim=True)
                drawn.append(column)
                left = left ^ bits[column]
            return torch.cat(drawn[::-1], -1)

    def _table(self) -> Tensor:
        """Return the partial sums in one table with the sets, as numbers, for its places: ``(*batch, 2^n)``."""
        table = self.log_weights.new_zeros(*self.batch_shape, 2 ** self.event_shape[0])
        for (_, _, sets), sums in zip(column_sets(self.event_shape[0]), self._sums[1:], strict=True):
            table[..., sets.to(table.device)] = sums.detach()
        return table

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """List all permutations, ``(n!, *batch, n)``, or with ones for ``batch``; of at most nine.

        Parameters
        ----------
        expand : bool, default True

        Raises
        ------
        SettingsError
            If there are too many; the message has their number.
        """
        listed = all_permutations(self.event_shape[0]).to(self.log_weights.device)
        listed = listed.reshape(-1, *(1 for _ in self.batch_shape), self.event_shape[0])
        return listed.expand(-1, *self.batch_shape, -1) if expand else listed

    def __repr__(self) -> str:
        return f"GibbsPermutation(log_weights: {tuple(self.log_weights.shape)})"
