"""Distributions over the Birkhoff polytope and over permutations that come from breaking sticks."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from bayeskit._settings import whole_number
from bayeskit.errors import DataError
from bayeskit.models.discrete.permutations.assignments import (
    check_square,
    permutation_matrix,
    permutations,
    real_numbers,
)
from bayeskit.models.discrete.permutations.stick_breaking import StickBreakingTransform, break_sticks, shares

Shape = torch.Size | list[int] | tuple[int, ...]


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
        taken, left = shares(permutation_matrix(value, self.logits.dtype))
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
