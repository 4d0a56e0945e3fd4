"""How the losses of the data become one: only the sum makes updates coherent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from bayeskit.errors import SettingsError

if TYPE_CHECKING:
    from bayeskit.inference.generalized.posterior import GibbsPosterior


class Pooling(ABC):
    """A function of the losses of all data that does not depend on their order.

    Attributes
    ----------
    coherent : bool
        Whether updating by all data at once and by one part after the other agree.
    """

    coherent: bool = False

    @abstractmethod
    def __call__(self, each: Tensor) -> Tensor:
        """Return the pooled loss, a scalar, of those of the data, ``(n,)``."""


@dataclass(frozen=True)
class Sum(Pooling):
    """The sum: the only pooling here under which updating is coherent.

    Examples
    --------
    >>> import torch
    >>> Sum()(torch.tensor([1.0, 2.0, 4.0])).item(), Sum().coherent
    (7.0, True)
    """

    coherent = True

    def __call__(self, each: Tensor) -> Tensor:
        """Return the sum."""
        return each.sum()


@dataclass(frozen=True)
class Mean(Pooling):
    """The mean: beliefs no longer sharpen as data come in. Not coherent.

    Examples
    --------
    >>> import torch
    >>> Mean()(torch.tensor([1.0, 2.0, 6.0])).item(), Mean().coherent
    (3.0, False)
    """

    def __call__(self, each: Tensor) -> Tensor:
        """Return the mean."""
        return each.mean()


@dataclass(frozen=True)
class Max(Pooling):
    """The largest loss: the worst datum decides. Not coherent.

    Examples
    --------
    >>> import torch
    >>> Max()(torch.tensor([1.0, 2.0, 4.0])).item(), Max().coherent
    (4.0, False)
    """

    def __call__(self, each: Tensor) -> Tensor:
        """Return the largest."""
        return each.amax()


@dataclass(frozen=True)
class DeepSets(Pooling):
    """``outer`` of the sum of ``inner`` of each loss. Not coherent, unless ``outer`` is the identity.

    Every continuous function of a set has this form if ``inner`` may return vectors.

    Parameters
    ----------
    inner : callable
        ``(n,) -> (n,)`` or ``(n, k)``, each loss on its own.
    outer : callable
        ``()`` or ``(k,) -> ()``.

    References
    ----------
    Zaheer, M., Kottur, S., Ravanbakhsh, S., Poczos, B., Salakhutdinov, R., Smola, A. (2017). Deep sets. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> root_mean_square = DeepSets(torch.square, torch.sqrt)
    >>> root_mean_square(torch.tensor([3.0, 4.0])).item()
    5.0
    """

    inner: Callable[[Tensor], Tensor]
    outer: Callable[[Tensor], Tensor]

    def __call__(self, each: Tensor) -> Tensor:
        """Return ``outer(inner(each).sum(0))``."""
        return self.outer(self.inner(each).sum(0))


def as_pooling(pooling: Pooling | Literal["sum", "mean", "max"] | Any) -> Pooling:
    """Return the pooling that a user names.

    Raises
    ------
    SettingsError
        If it is none.
    """
    if isinstance(pooling, Pooling):
        return pooling
    if pooling == "sum":
        return Sum()
    if pooling == "mean":
        return Mean()
    if pooling == "max":
        return Max()
    raise SettingsError(f"pooling must be 'sum', 'mean', 'max' or an object such as DeepSets(...), not {pooling!r:.80}")


def check_sum(posterior: GibbsPosterior, what: str = "a learning rate is calibrated") -> None:
    """Refuse losses that are pooled by anything but their sum.

    Raises
    ------
    SettingsError
    """
    if not isinstance(posterior.pooling, Sum):
        raise SettingsError(
            f"{what} for losses that add up, not ones pooled by {type(posterior.pooling).__name__}; leave pooling at "
            "'sum'"
        )


def check_pooling(posterior: GibbsPosterior) -> None:
    """Refuse poolings under which weights of the data mean nothing.

    Raises
    ------
    SettingsError
        If the pooling is neither sum nor mean.
    """
    if not isinstance(posterior.pooling, (Sum, Mean)):
        raise SettingsError(
            f"{type(posterior.pooling).__name__} pools losses so that weights of the data mean nothing; take pooling "
            "'sum'"
        )
