"""Predictive rules: what the next datum is, given all before it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit._pyro.draws import draw
from bayeskit._torch import global_stream
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data, num_data


class Completed(NamedTuple):
    """Data with their simulated future, for each replicate.

    Attributes
    ----------
    data : Tensor, tuple of Tensor or None
        Shapes ``(R, m, ...)``; None stands for the observed data.
    weights : Tensor or None
        Of these data, ``(R, m)``; None if each counts once.
    """

    data: Data | None
    weights: Tensor | None


class Predictive(ABC):
    """A rule that draws the next datum given all before it, in all replicates at once.

    A state is used up by the step that takes it: data are written into room that it brings along. The law that it
    draws from must be a martingale: what is expected of it after the next datum is what it is now.

    Attributes
    ----------
    is_smooth : bool
        Whether a smooth law takes the place of the data, whose spread is then held against the Bayesian bootstrap's.
    """

    is_smooth: ClassVar[bool] = False

    @abstractmethod
    def init(self, data: Data, num_replicates: int, horizon: int) -> Any:
        """Return the state after the observed data, before ``horizon`` further ones."""

    @abstractmethod
    def step(self, state: Any, *, generator: torch.Generator) -> Any:
        """Draw one further datum in each replicate and return the state after it; the one given is used up."""

    @abstractmethod
    def completed(self, state: Any) -> Completed:
        """Return the observed data with those drawn so far."""


class UrnState(NamedTuple):
    """Which observed datum each one is a copy of, ``(R, n + horizon)``, filled up to ``size``; and ``n``."""

    origin: Tensor
    size: int
    num_data: int


@dataclass(frozen=True)
class PolyaUrn(Predictive):
    """Draw a copy of one of all data so far: in the limit the Bayesian bootstrap, exactly.

    References
    ----------
    Blackwell, D., MacQueen, J. B. (1973). Ferguson distributions via Polya urn schemes. Annals of Statistics 1,
    353-355.

    Examples
    --------
    >>> import torch
    >>> urn = PolyaUrn()
    >>> state = urn.init(torch.tensor([1.0, 2.0]), 3, 1)
    >>> urn.completed(urn.step(state, generator=torch.Generator().manual_seed(0))).weights.sum(1)
    tensor([3., 3., 3.])
    """

    def init(self, data: Data, num_replicates: int, horizon: int) -> UrnState:
        """Return an urn with each datum once."""
        n = num_data(data)
        origin = torch.zeros(num_replicates, n + horizon, dtype=torch.long)
        origin[:, :n] = torch.arange(n)
        return UrnState(origin, n, n)

    def step(self, state: UrnState, *, generator: torch.Generator) -> UrnState:
        """Draw from the urn and put two back."""
        chosen = torch.randint(state.size, (len(state.origin), 1), generator=generator)
        state.origin[:, state.size] = state.origin.gather(1, chosen)[:, 0]
        return state._replace(size=state.size + 1)

    def completed(self, state: UrnState) -> Completed:
        """Return how often each observed datum is in the urn."""
        origin = state.origin[:, : state.size]
        counts = torch.zeros(len(origin), state.num_data, dtype=torch.get_default_dtype())
        return Completed(None, counts.scatter_add(1, origin, torch.ones_like(origin, dtype=counts.dtype)))


class ScoreState(NamedTuple):
    """Parameters ``(R, k)``; what scores are multiplied by, ``(k, k)``; data ``(R, n + horizon, ...)``."""

    parameter: Tensor
    step_matrix: Tensor
    data: Tensor
    size: int


@dataclass(frozen=True)
class ScoreDriven(Predictive):
    r"""Draw from a parametric model at a plug-in parameter, which then follows the score.

    :math:`\theta_{t+1} = \theta_t + \frac{1}{t+1} I^{-1} \nabla \log p(x_{t+1} \mid \theta_t)`. Scores have expectation
    zero, so that the parameter is a martingale. With the model's Fisher information for ``I``, it spreads by
    :math:`I^{-1} \sum_{t > n} t^{-2}` where ``I`` is constant.

    Parameters
    ----------
    family : callable
        ``parameters (R, k) -> distribution`` of a datum, batch shape ``(R,)``; differentiable.
    start : Tensor
        The parameter after the observed data, ``(k,)``, such as that of maximum likelihood.
    information : Tensor, optional
        ``I``, ``(k, k)``, positive definite; by default the mean outer product of the observed data's scores at
        ``start``.

    Raises
    ------
    ShapeError
        If shapes do not fit.
    DataError
        If the information is not positive definite.

    References
    ----------
    Holmes, C. C., Walker, S. G. (2023). Statistical inference with exchangeability and martingales. Philosophical
    Transactions of the Royal Society A 381, 20220143.

    Fong, E., Yiu, A. (2024). Asymptotics for parametric martingale posteriors. arXiv:2410.17692.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 6.0])
    >>> rule = ScoreDriven(lambda mean: torch.distributions.Normal(mean[:, 0], 1.0), x.mean()[None], torch.eye(1))
    >>> state = rule.step(rule.init(x, 5, 1), generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(state.parameter[:, 0], rule.completed(state).data.mean(1))  # the running mean
    True
    """

    family: Callable[[Tensor], Distribution]
    start: Tensor
    information: Tensor | None = None

    def init(self, data: Data, num_replicates: int, horizon: int) -> ScoreState:
        """Return the starting parameter in each replicate."""
        if isinstance(data, tuple):
            raise ShapeError("ScoreDriven draws data of one column, not of covariates and outcomes")
        if self.start.dim() != 1:
            raise ShapeError(f"start must be (k,), not {tuple(self.start.shape)}")
        if not data.is_floating_point():
            data = data.to(self.start.dtype if self.start.is_floating_point() else torch.get_default_dtype())
        start = self.start.to(data)
        information = self.information
        if information is None:
            scores = self._scores(start.expand(len(data), -1), data)
            information = scores.mT @ scores / len(scores)
        if information.shape != (len(start), len(start)):
            raise ShapeError(f"information must be ({len(start)}, {len(start)}), not {tuple(information.shape)}")
        factor, failed = torch.linalg.cholesky_ex(information.to(data))
        if int(failed):
            raise DataError("the information of ScoreDriven is not positive definite; give information=, or more data")
        room = torch.zeros(num_replicates, len(data) + horizon, *data.shape[1:], dtype=data.dtype, device=data.device)
        room[:, : len(data)] = data
        return ScoreState(start.repeat(num_replicates, 1), torch.cholesky_inverse(factor), room, len(data))

    def step(self, state: ScoreState, *, generator: torch.Generator) -> ScoreState:
        """Draw at the present parameters and move these along the score."""
        with global_stream(generator):
            drawn = draw(self.family(state.parameter))
        if drawn.shape != state.data[:, 0].shape:
            raise ShapeError(
                f"family draws data of shape {tuple(drawn.shape)} instead of {tuple(state.data[:, 0].shape)}"
            )
        state.data[:, state.size] = drawn
        move = self._scores(state.parameter, drawn.to(state.data)) @ state.step_matrix / (state.size + 1)
        return state._replace(parameter=state.parameter + move, size=state.size + 1)

    def _scores(self, parameter: Tensor, data: Tensor) -> Tensor:
        """Return the gradient of each datum's log density, ``(R, k), (R, ...) -> (R, k)``."""
        with torch.enable_grad():
            at = parameter.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.family(at).log_prob(data).sum(), at)
        return score

    def completed(self, state: ScoreState) -> Completed:
        """Return all data so far."""
        return Completed(state.data[:, : state.size], None)


def normal_location(scale: float) -> Callable[[Tensor], Distribution]:
    """Return the family of normal laws of known standard deviation, for :class:`ScoreDriven`.

    Its information is ``1 / scale**2``.

    Raises
    ------
    SettingsError
        If ``scale`` is not positive.

    Examples
    --------
    >>> import torch
    >>> normal_location(2.0)(torch.zeros(3, 1)).scale
    tensor([2., 2., 2.])
    """
    if not 0 < scale < math.inf:
        raise SettingsError(f"scale must be positive, not {scale}")
    return lambda mean: torch.distributions.Normal(mean[:, 0], torch.full_like(mean[:, 0], scale))


__all__ = ["Completed", "Predictive", "PolyaUrn", "ScoreDriven", "ScoreState", "UrnState", "normal_location"]
