"""A distribution over sequences whose variables depend on those before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit._settings import whole_number
from bayeskit.errors import ShapeError
from bayeskit.inference.gradients.space import Space, impossible

#: From the codes before a variable, `(points, *batch, before)`, to its logits, `(points, *batch, categories)`.
Logits = Callable[[Tensor], Tensor]


class Autoregressive(TorchDistribution):  # type: ignore[misc]
    """Sequences of categorical variables, each given those before it.

    Parameters
    ----------
    logits : callable
        From codes `(points, *batch, before)`, int64, to the logits of the next variable, `(points, *batch,
        categories)`; points may be broadcast.
    num_variables, num_categories : int
    batch_shape : sequence of int, default ()

    Raises
    ------
    SettingsError
        If there are no variables, or fewer than two categories.
    ShapeError
        If logits have another shape.
    DataError
        If a logit is not finite.

    Examples
    --------
    >>> import torch
    >>> def sticky(codes):  # the second variable tends to be as the first
    ...     if not codes.shape[-1]:
    ...         return torch.zeros(*codes.shape[:-1], 2)
    ...     return 2.0 * torch.nn.functional.one_hot(codes[..., -1], 2)
    >>> pair = Autoregressive(sticky, num_variables=2, num_categories=2)
    >>> pair.log_prob(pair.enumerate_support()).exp()
    tensor([0.4404, 0.0596, 0.0596, 0.4404])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_enumerate_support = True

    def __init__(
        self, logits: Logits, num_variables: int, num_categories: int, batch_shape: Sequence[int] = ()
    ) -> None:
        self.logits = logits
        self.num_variables = whole_number("num_variables", num_variables, least=1)
        self.num_categories = whole_number("num_categories", num_categories, least=2)
        super().__init__(torch.Size(batch_shape), torch.Size((self.num_variables,)), validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Whole numbers below the number of categories."""
        return constraints.independent(constraints.integer_interval(0, self.num_categories - 1), 1)

    def space(self) -> Space:
        """Return the distribution as gradient estimators see it."""
        return _Sequences(self)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw sequences, `(*sample_shape, *batch, num_variables)`."""
        shape = torch.Size(sample_shape)
        return self.space().sample(shape.numel()).reshape(*shape, *self.batch_shape, self.num_variables)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log probabilities of sequences, `(*sample, *batch)`."""
        shape = torch.broadcast_shapes(value.shape, (*self.batch_shape, self.num_variables))
        codes = value.expand(shape)
        flat = codes.reshape(-1, *self.batch_shape, self.num_variables)
        return self.space().log_prob(flat).reshape(shape[:-1])

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all sequences, `(size, *batch, num_variables)`."""
        return self.space().enumerate()

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Autoregressive:
        """Return independent copies; logits are asked for the larger batch then."""
        return Autoregressive(self.logits, self.num_variables, self.num_categories, batch_shape)


class _Sequences(Space):
    def __init__(self, distribution: Autoregressive) -> None:
        super().__init__(distribution, distribution.num_variables, distribution.num_categories)
        self._logits = distribution.logits
        with torch.no_grad():
            self._like = self.conditional(torch.zeros(1, *self.batch_shape, 0, dtype=torch.int64))

    @property
    def like(self) -> Tensor:
        """The first variable's log probabilities."""
        return self._like

    def conditional(self, codes: Tensor) -> Tensor:
        """Return log probabilities of the next variable."""
        logits = self._logits(codes)
        wanted = (*codes.shape[:-1], self.num_categories)
        try:
            fits = torch.broadcast_shapes(logits.shape, wanted) == wanted
        except (RuntimeError, AttributeError):
            fits = False
        if not fits:
            raise ShapeError(
                f"the logits of variable {codes.shape[-1]} have shape {tuple(getattr(logits, 'shape', ()))} for codes "
                f"of shape {tuple(codes.shape)}; return {wanted}"
            )
        good = logits.detach().isfinite()
        if not bool(good.all()):
            raise impossible(f"logit of variable {codes.shape[-1]}", logits.detach(), ~good)
        return logits.log_softmax(-1).expand(wanted)

    def log_prob(self, codes: Tensor) -> Tensor:
        """Return log probabilities of points."""
        terms = [
            self.conditional(codes[..., :i]).gather(-1, codes[..., i : i + 1]).squeeze(-1)
            for i in range(self.num_variables)
        ]
        return torch.stack(terms).sum(0)

    def value(self, codes: Tensor) -> Tensor:
        """Return points as they are."""
        return codes
