"""Gradient estimators from relaxed draws: biased pathwise, and unbiased with a relaxation as control variate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid, one_hot

from bayeskit._core.inputs import real_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients._estimator import (
    DrawsEstimator,
    Function,
    Table,
    WeightedPoints,
    evaluated,
    magic,
    with_surrogate_gradient,
)
from bayeskit.inference.gradients._space import Factorised, Space, gumbel

# Temperatures of relaxed draws: fixed, learned, or annealed.

#: A number, a scalar tensor such as a parameter, or what returns either when a draw needs it.
Temperature = float | Tensor | Callable[[], float | Tensor]


@dataclass(frozen=True)
class ExponentialDecay:
    """Exponential annealing schedule from ``start`` down to ``end``, then constant.

    Parameters
    ----------
    rate : float
        Decrease of the log value per step, positive.

    Raises
    ------
    SettingsError
        If a setting is not positive, or ``end`` exceeds ``start``.

    References
    ----------
    Jang, E., Gu, S., Poole, B. (2017). Categorical reparameterization with Gumbel-Softmax. ICLR.

    Examples
    --------
    >>> import math
    >>> schedule = ExponentialDecay(rate=math.log(2) / 100, start=1.0, end=0.3)
    >>> round(schedule(0), 6), round(schedule(100), 6), schedule(10_000)
    (1.0, 0.5, 0.3)
    """

    rate: float
    start: float = 1.0
    end: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rate", "start", "end"):
            real_number(name, getattr(self, name), "(0, inf)")
        if self.end > self.start:
            raise SettingsError(f"end must be at most start, not {self.end} above {self.start}")

    def __call__(self, step: int) -> float:
        """Return the value at ``step``."""
        return max(self.end, self.start * math.exp(-self.rate * step))


class Annealed(nn.Module):
    """Temperature that follows a schedule over optimizer steps.

    :func:`bayeskit.fit` advances the temperature after each optimizer step, provided that the object, or an estimator
    that holds it, is an attribute of the guide or a variable that the guide reads. In other training loops, call
    :meth:`step`. Drawing does not advance it, so all sites, particles and recomputations of a step share one
    temperature.

    Parameters
    ----------
    schedule : Schedule
        Function from the zero-based step to the temperature, such as :class:`ExponentialDecay` or
        ``objectives.Linear(1000, start=1.0, end=0.3)``.

    Attributes
    ----------
    num_steps : Tensor
        Number of steps so far, a module buffer. Checkpoints of :func:`bayeskit.fit` include it; a new training run
        does not reset it.

    Examples
    --------
    >>> from bayeskit.inference.objectives._evidence_lower_bound import Linear
    >>> temperature = Annealed(Linear(4, start=1.0, end=0.5))
    >>> temperature(), temperature.step(), temperature()
    (1.0, None, 0.875)
    """

    num_steps: Tensor

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self) -> float:
        """Return the temperature of the current step."""
        return self.schedule(int(self.num_steps))

    def step(self) -> None:
        """Advance the schedule by one step."""
        self.num_steps += 1


def _check_temperature(temperature: Temperature) -> None:
    """Raise SettingsError unless this is a positive number, a scalar tensor, or a function without arguments."""
    if callable(temperature):
        try:
            inspect.signature(temperature.forward if isinstance(temperature, nn.Module) else temperature).bind()
        except TypeError:
            raise SettingsError(
                f"the temperature {temperature!r:.60} cannot be called without arguments; give Annealed(schedule), "
                "which counts the steps"
            ) from None
        return
    if isinstance(temperature, Tensor) and temperature.dim():
        raise SettingsError(f"the temperature has shape {tuple(temperature.shape)}; give a number or a scalar tensor")
    _positive(temperature)


def _present(temperature: Temperature) -> float | Tensor:
    """Return the temperature of a draw; SettingsError if it is not above zero."""
    found = temperature() if callable(temperature) else temperature
    _positive(found)
    return found


def _positive(temperature: float | Tensor) -> None:
    value = real_number("temperature", temperature)
    if not 0 < value < math.inf:
        raise SettingsError(
            f"the temperature must be above zero and finite, not {value:g}; without a relaxation there is no path: use "
            "StraightThrough, or an estimator of scores such as LeaveOneOut. A learned one stays above zero as "
            "lambda: log_temperature.exp()"
        )


# Pathwise estimators: biased, from a continuous relaxation of discrete draws.


@dataclass(frozen=True)
class GumbelSoftmax(DrawsEstimator):
    r"""Draws relaxed by a softmax of perturbed log probabilities (the Concrete distribution).

    Each categorical variable becomes :math:`\operatorname{softmax}((\log p + G) / \tau)` with Gumbel noise :math:`G`;
    each bit becomes :math:`\sigma((\operatorname{logit} p + L) / \tau)` with logistic noise :math:`L`. Gradients
    pass through the relaxed points, so the function must be differentiable.

    **Biased**: value and gradient belong to the relaxed problem, which averages the function over relaxed points. As
    the temperature goes to zero, the bias vanishes and the variance diverges. With `hard` the value is unbiased, but
    the gradient is the function's gradient at discrete points times the gradient of the relaxed points. It is biased
    even for a linear function, because it uses the mean relaxed point instead of the probabilities.

    Parameters
    ----------
    temperature : float, Tensor, or callable, default 0.5
        Positive temperature. A callable without arguments, such as :class:`Annealed`, is evaluated at each draw.
    hard : bool, default False
        Round points to discrete values and use the relaxation only for gradients (straight-through Gumbel).

    Raises
    ------
    SettingsError
        If the temperature is not positive, ``num_samples`` is less than 1, or variables depend on each other.

    References
    ----------
    Jang, E., Gu, S., Poole, B. (2017). Categorical reparameterization with Gumbel-Softmax. ICLR. Maddison, C. J., Mnih,
    A., Teh, Y. W. (2017). The Concrete distribution: a continuous relaxation of discrete random variables. ICLR.

    Examples
    --------
    >>> import torch
    >>> gradient = GumbelSoftmax(temperature=0.1).estimate(torch.zeros(5000, 2), torch.tensor([1.0, 3.0]))
    >>> bool((gradient.mean(0) - torch.tensor([-0.5, 0.5])).abs().max() < 0.1)
    True
    """

    unbiased: ClassVar[bool] = False
    relaxed: ClassVar[bool] = True

    temperature: Temperature = 0.5
    num_samples: int = 1
    hard: bool = False

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        super().__post_init__()

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw relaxed points with equal weights."""
        independent = _require_independent(space, type(self).__name__)
        noisy = _perturbed(independent, self.num_samples, generator)
        soft = (noisy / _present(self.temperature)).softmax(-1)
        if self.hard:
            soft = _straight_through(noisy.argmax(-1), soft)
        return _equally_weighted(independent.soft(soft), soft)


@dataclass(frozen=True)
class StraightThrough(DrawsEstimator):
    r"""Straight-through estimator: discrete draws with the gradient of their probabilities.

    A point :math:`b` is replaced by :math:`b + p - \bar p`, where :math:`\bar p` equals :math:`p` without a gradient.
    The function is evaluated at the discrete point and its derivative there is passed to the probabilities.

    **Biased**, unless the function is linear in each variable for fixed values of the others; the value is unbiased.
    The bias is of the order of the function's curvature between discrete points and cannot be reduced by a setting.

    Raises
    ------
    SettingsError
        If ``num_samples`` is less than 1, or variables depend on each other.

    References
    ----------
    Bengio, Y., Leonard, N., Courville, A. (2013). Estimating or propagating gradients through stochastic neurons for
    conditional computation. arXiv:1308.3432.

    Examples
    --------
    >>> import torch
    >>> StraightThrough().estimate(torch.zeros(2), torch.tensor([1.0, 3.0]))
    tensor([-0.5000,  0.5000])
    """

    unbiased: ClassVar[bool] = False
    relaxed: ClassVar[bool] = True

    num_samples: int = 1

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points with equal weights."""
        independent = _require_independent(space, type(self).__name__)
        codes = independent.sample(self.num_samples, generator)
        values = _straight_through(codes, independent.log_probabilities.exp())
        return _equally_weighted(independent.soft(values), values)


def _require_independent(space: Space, name: str) -> Factorised:
    """Return the space if its variables are independent; SettingsError otherwise."""
    if isinstance(space, Factorised):
        return space
    raise SettingsError(
        f"{name} relaxes independent variables, but those of {type(space.distribution).__name__} depend on each other; "
        "use Bernoulli or OneHotCategorical, alone or with .to_event, or an estimator such as UnorderedSet"
    )


def _perturbed(space: Factorised, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """Return log probabilities plus Gumbel noise, `(num_samples, *batch, variables, categories)`."""
    log_probability = space.log_probabilities
    return log_probability + gumbel((num_samples, *log_probability.shape), log_probability, generator)


def _straight_through(codes: Tensor, soft: Tensor) -> Tensor:
    """Return corners, `(points, *batch, variables, categories)`, with the gradient of soft points."""
    return one_hot(codes, soft.shape[-1]).to(soft.dtype) + (soft - soft.detach())


def _equally_weighted(values: Tensor, like: Tensor) -> WeightedPoints:
    """Return points with equal weights; `like` has their batch and two more dimensions."""
    return WeightedPoints(values, like.new_full(like.shape[:-2], 1 / len(like)))


# REBAR: the score function with a relaxation of the same draw as control variate.


class RelaxedDraws(NamedTuple):
    """Draws at corners, and two relaxations of each, equal in value."""

    corner: Tensor  # (draws, *batch, *event), input of the function; one-hot for a Categorical
    free: Tensor  # relaxed draw before rounding to the corner, same shape
    given: Tensor  # relaxed draw as a function of the logits, conditional on the corner
    score: Tensor  # (draws, *batch), ones whose gradient is that of the corner's log probability


def relaxed_draws(
    space: Space, temperature: Temperature, num_samples: int, generator: torch.Generator | None, name: str
) -> RelaxedDraws:
    """Draw corners with their relaxations."""
    # Let T_i be exponential arrival times with rates p_i. Then z_i = -log T_i is log p_i plus Gumbel noise, and the
    # first arrival b is the draw. T_b depends neither on b nor on the probabilities; the other arrivals are later by
    # exponential times with their rates. Given b, z_i = z_b - log(1 + R_i / (p_i T_b)) with rate-one noise R_i from the
    # same draw. Both relaxations thus have equal values and different gradients.
    independent = _require_independent(space, name)
    log_probability = independent.log_probabilities
    noisy = _perturbed(independent, num_samples, generator)
    top, codes = noisy.detach().max(-1, keepdim=True)
    behind = top - noisy.detach()
    log_wait = behind + torch.log1p(-(-behind).exp())  # log(R_i / (p_i T_b)); minus infinity for the first itself
    conditional = top + logsigmoid(log_probability - log_probability.detach() - log_wait)
    now = _present(temperature)
    corner = one_hot(codes.squeeze(-1), space.num_categories).to(noisy.dtype)
    return RelaxedDraws(
        independent.soft(corner),
        independent.soft((noisy / now).softmax(-1)),
        independent.soft((conditional / now).softmax(-1)),
        magic(space.log_prob(codes.squeeze(-1))),
    )


class Tunable(DrawsEstimator):
    """Base class of estimators with relaxed draws as control variate, whose settings can be learned."""

    relaxed: ClassVar[bool] = True

    temperature: Temperature
    scale: float | Tensor

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if isinstance(self.scale, Tensor) and self.scale.dim():
            raise SettingsError(f"the scale has shape {tuple(self.scale.shape)}; give a number or a scalar tensor")
        real_number("scale", self.scale, "(-inf, inf)")
        super().__post_init__()

    def num_evaluations(self, space: Space) -> int:
        """Return 3 per draw, or 1 without the function in the control variate; a learned part is not counted."""
        return self.num_samples if _absent(self.scale) else 3 * self.num_samples

    def variance_loss(
        self,
        distribution: Distribution | Space | Tensor,
        f: Function | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        r"""Return the squared norm of one gradient estimate, summed over the batch: a loss for variance reduction.

        The estimator is unbiased for all settings :math:`\phi`, so :math:`\nabla_\phi \mathrm{Var}(g) = E\, \nabla_\phi
        g^2`. Differentiate with respect to the settings only, ``loss.backward(inputs=[temperature, scale])``; gradients
        for logits or parameters of `f` are not meaningful. The logits of ``distribution`` must require a gradient, and
        `f`, a function or its values at the categories, must be twice differentiable at relaxed points if evaluated
        there.
        """
        with torch.enable_grad():
            space, logits = with_surrogate_gradient(distribution)
            function = Table(f) if isinstance(f, Tensor) else f
            total = self.surrogate(space, function, generator).sum()
            (gradient,) = torch.autograd.grad(total, logits, create_graph=True)
            return gradient.square().sum()


@dataclass(frozen=True)
class REBAR(Tunable):
    r"""Score-function estimator with a relaxation of the draw as control variate.

    Let :math:`b` be a draw, :math:`z` the relaxed draw that rounds to :math:`b`, and :math:`\tilde z` the relaxed draw
    conditional on :math:`b`, from the same noise. The gradient is :math:`(f(b) - \eta f(\tilde z)) \nabla \log p(b) +
    \eta \nabla f(z) - \eta \nabla f(\tilde z)`, unbiased for every temperature and scale :math:`\eta`. The weights of
    :math:`b`, :math:`z` and :math:`\tilde z` are 1, :math:`\eta` and :math:`-\eta`.

    Parameters
    ----------
    temperature : float, Tensor, or callable, default 0.5
        As in :class:`GumbelSoftmax`. A tensor can be learned with :meth:`variance_loss`.
    scale : float or Tensor, default 1.0
        Scale of the control variate; zero disables it.

    Raises
    ------
    SettingsError
        As in :class:`GumbelSoftmax`.

    References
    ----------
    Tucker, G., Mnih, A., Maddison, C. J., Lawson, D., Sohl-Dickstein, J. (2017). REBAR: low-variance, unbiased gradient
    estimates for discrete latent variable models. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> gradient = REBAR(temperature=0.5).estimate(torch.zeros(5000, 2), torch.tensor([1.0, 3.0]))
    >>> bool((gradient.mean(0) - torch.tensor([-0.5, 0.5])).abs().max() < 0.05)
    True
    """

    temperature: Temperature = 0.5
    scale: float | Tensor = 1.0
    num_samples: int = 1

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points and their relaxations."""
        drawn = relaxed_draws(space, self.temperature, self.num_samples, generator, type(self).__name__)
        return weighted_draws(drawn, self.scale)


def weighted_draws(drawn: RelaxedDraws, scale: float | Tensor) -> WeightedPoints:
    """Return draws and their relaxations with their weights."""
    own = drawn.score / len(drawn.score)
    if _absent(scale):
        return WeightedPoints(drawn.corner, own)
    free = (scale / len(own)) * torch.ones_like(own)
    return WeightedPoints(torch.cat([drawn.corner, drawn.free, drawn.given]), torch.cat([own, free, -scale * own]))


def _absent(scale: float | Tensor) -> bool:
    """Tell whether there is no control variate; a learned scale of zero may yet move."""
    return not isinstance(scale, Tensor) and scale == 0


# RELAX: a learned control variate at relaxed points.


@dataclass(frozen=True)
class RELAX(Tunable):
    r"""REBAR with a learned control variate, :math:`c(z) = \eta f(z) + r(z)`.

    The estimator is unbiased for every :math:`r`, temperature and scale. With scale zero the function is evaluated
    only at discrete points, so it may be a black box.

    Parameters
    ----------
    control : callable
        Function :math:`r`, such as a torch module, from relaxed points `(points, *batch, *event)` to
        `(points, *batch)`. Its parameters can be learned with :meth:`variance_loss`, as can temperature and scale.
    temperature, scale, num_samples
        As in :class:`REBAR`; the scale is the weight of the function.

    Raises
    ------
    SettingsError
        If `control` is not callable, and as in :class:`REBAR`.

    Notes
    -----
    At a guide site, `control` predicts the site's contribution to the bound before the plate's scale. The loss of an
    objective has no gradient with respect to its parameters; minimize the squared gradient in a custom loop::

        found = torch.autograd.grad(ELBO().differentiable_loss(model, guide), parameters, create_graph=True)
        sum(g.square().sum() for g in found).backward(inputs=list(control.parameters()))

    References
    ----------
    Grathwohl, W., Choi, D., Wu, Y., Roeder, G., Duvenaud, D. (2018). Backpropagation through the void: optimizing
    control variates for black-box gradient estimation. ICLR.

    Examples
    --------
    >>> import torch
    >>> control = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(-2))
    >>> estimator = RELAX(control, scale=0.0)
    >>> optimizer = torch.optim.Adam(control.parameters(), lr=0.1)
    >>> logits = torch.zeros(100, 2)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     loss = estimator.variance_loss(logits, torch.tensor([1.0, 3.0]))
    ...     loss.backward(inputs=list(control.parameters()))
    ...     optimizer.step()
    >>> estimator.estimate(logits, torch.tensor([1.0, 3.0])).var(0).sum() < 1.5
    tensor(True)
    """

    control: Function
    temperature: Temperature = 0.5
    scale: float | Tensor = 1.0
    num_samples: int = 1

    def __post_init__(self) -> None:
        if not callable(self.control):
            raise SettingsError(f"control must be a function of relaxed points, not {self.control!r:.60}")
        super().__post_init__()

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points and their relaxations; the offset is the contribution of `control`."""
        drawn = relaxed_draws(space, self.temperature, self.num_samples, generator, type(self).__name__)
        free = evaluated(self.control, WeightedPoints(drawn.free, drawn.score))
        given = evaluated(self.control, WeightedPoints(drawn.given, drawn.score))
        return weighted_draws(drawn, self.scale)._replace(offset=(free - drawn.score * given).mean(0))
