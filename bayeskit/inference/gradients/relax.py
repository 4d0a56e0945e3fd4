"""RELAX: a learned control variate at relaxed points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients.estimator import Function, WeightedPoints, evaluated
from bayeskit.inference.gradients.rebar import Tunable, check_scale, evaluations, relaxed_draws, weighted
from bayeskit.inference.gradients.space import Space
from bayeskit.inference.gradients.temperature import Temperature, check_temperature


@dataclass(frozen=True)
class RELAX(Tunable):
    r"""REBAR with a control variate that is learned: :math:`c(z) = \eta f(z) + r(z)`.

    Unbiased for every :math:`r`, temperature and scale. A scale of zero leaves the function at corners alone, so that
    it may be a black box, and `r` has to learn all of it.

    Parameters
    ----------
    control : callable
        :math:`r`, such as a torch module: from relaxed points as the function has them, `(points, *batch, *event)`,
        to `(points, *batch)`. It may have parameters, to be learned by :meth:`variance_loss` together with
        temperature and scale.
    temperature : float, Tensor, or callable, default 0.5
        Above zero; as of :class:`GumbelSoftmax`.
    scale : float or Tensor, default 1.0
        Of the function in its own control variate.
    num_samples : int, default 1

    Raises
    ------
    SettingsError
        If `control` cannot be called, the temperature is not above zero, there is nothing to draw, or variables depend
        on each other.

    Notes
    -----
    At a site of a guide, `control` predicts what the bound has of this site, before its plate's scale. The loss of an
    objective has no gradient by its parameters; that of the squared gradient has, in a loop of your own::

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
        check_temperature(self.temperature)
        check_scale(self.scale)
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points and their relaxations; the offset is what the learned part adds."""
        drawn = relaxed_draws(space, self.temperature, self.num_samples, generator, type(self).__name__)
        free = evaluated(self.control, WeightedPoints(drawn.free, drawn.score))
        given = evaluated(self.control, WeightedPoints(drawn.given, drawn.score))
        return weighted(drawn, self.scale)._replace(offset=(free - drawn.score * given).mean(0))

    def num_evaluations(self, space: Space) -> int:
        """Return three for each draw, or one where the scale is zero; those of `control` do not count."""
        return evaluations(self.num_samples, self.scale)
