"""REBAR: the score function, with a relaxation of the very draw as its control variate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid, one_hot

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients.estimator import (
    Function,
    GradientEstimator,
    Table,
    WeightedPoints,
    _with_gradient,
    magic,
)
from bayeskit.inference.gradients.relaxed import perturbed, require_independent
from bayeskit.inference.gradients.space import Space
from bayeskit.inference.gradients.temperature import Temperature, check_temperature, present


class RelaxedDraws(NamedTuple):
    """Draws at corners, and two relaxations of each, equal in value.

    Attributes
    ----------
    corner : Tensor
        As the function sees it, `(draws, *batch, *event)`; one-hot for a Categorical.
    free : Tensor
        The relaxed draw that was rounded to the corner, of the same shape.
    given : Tensor
        The relaxed draw as a function of the logits given that it is rounded to this corner.
    score : Tensor
        Ones whose gradient is that of the corner's log probability, `(draws, *batch)`.
    """

    corner: Tensor
    free: Tensor
    given: Tensor
    score: Tensor


def relaxed_draws(
    space: Space, temperature: Temperature, num_samples: int, generator: torch.Generator | None, name: str
) -> RelaxedDraws:
    r"""Draw corners with their relaxations.

    Exponential arrival times :math:`T_i` with rates :math:`p_i` have :math:`z_i = -\log T_i` for log probabilities
    plus Gumbel noise, and the first to arrive, `b`, is the draw. Its time does not depend on which it is, nor on the
    probabilities; the others' are later by exponential times of their rates. So given `b`,
    :math:`z_i = z_b - \log(1 + R_i / (p_i T_b))` with noise :math:`R_i` of rate one, taken from the same draw: both
    relaxations have the same value, so that the estimate's is the draw's own, and different gradients.
    """
    independent = require_independent(space, name)
    log_probability = independent.log_probabilities
    noisy = perturbed(independent, num_samples, generator)
    top, codes = noisy.detach().max(-1, keepdim=True)
    behind = top - noisy.detach()
    log_wait = behind + torch.log1p(-(-behind).exp())  # log(R_i / (p_i T_b)); minus infinity for the first itself
    conditional = top + logsigmoid(log_probability - log_probability.detach() - log_wait)
    now = present(temperature)
    corner = one_hot(codes.squeeze(-1), space.num_categories).to(noisy.dtype)
    return RelaxedDraws(
        independent.soft(corner),
        independent.soft((noisy / now).softmax(-1)),
        independent.soft((conditional / now).softmax(-1)),
        magic(space.log_prob(codes.squeeze(-1))),
    )


class Tunable(GradientEstimator):
    """An estimator whose control variate has settings that can be learned."""

    relaxed: ClassVar[bool] = True

    def variance_loss(
        self,
        distribution: Distribution | Space | Tensor,
        f: Function | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        r"""Return the squared length of one estimate, whose gradient lowers the variance.

        As the estimator is unbiased whatever its settings :math:`\phi`, those move the variance alone, and
        :math:`\nabla_\phi \mathrm{Var}(g) = E\, \nabla_\phi g^2`. Take the gradient by the settings only, as with
        ``loss.backward(inputs=[temperature, scale])``: by logits or by parameters of `f` it means nothing.

        Parameters
        ----------
        distribution : Distribution or Tensor
            As of :meth:`surrogate`, its logits with a gradient.
        f : callable or Tensor
            Where it is evaluated between corners it must have two derivatives there.
        generator : torch.Generator, optional

        Returns
        -------
        Tensor
            A scalar: the sum over the batch.
        """
        with torch.enable_grad():
            space, logits = _with_gradient(distribution)
            function = Table(f) if isinstance(f, Tensor) else f
            total = self.surrogate(space, function, generator).sum()
            (gradient,) = torch.autograd.grad(total, logits, create_graph=True)
            return gradient.square().sum()


@dataclass(frozen=True)
class REBAR(Tunable):
    r"""The score of what a relaxed draw leaves unexplained, plus the gradient along the relaxed path.

    With a draw :math:`b`, the relaxed :math:`z` that was rounded to it, and :math:`\tilde z`, the same given
    :math:`b`, the gradient is
    :math:`(f(b) - \eta f(\tilde z)) \nabla \log p(b) + \eta \nabla f(z) - \eta \nabla f(\tilde z)`: unbiased for
    every temperature and scale :math:`\eta`. As weighted points these are :math:`b` with one, :math:`z` with
    :math:`\eta`, and :math:`\tilde z` with :math:`-\eta`. One noise makes both relaxations.

    Parameters
    ----------
    temperature : float, Tensor, or callable, default 0.5
        Above zero; as of :class:`GumbelSoftmax`. A parameter can be learned by :meth:`variance_loss`.
    scale : float or Tensor, default 1.0
        Of the control variate; zero leaves it out.
    num_samples : int, default 1

    Raises
    ------
    SettingsError
        If the temperature is not above zero, there is nothing to draw, or variables depend on each other.

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

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scale(self.scale)
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points and their relaxations."""
        drawn = relaxed_draws(space, self.temperature, self.num_samples, generator, type(self).__name__)
        return weighted(drawn, self.scale)

    def num_evaluations(self, space: Space) -> int:
        """Return three for each draw, or one without the control variate."""
        return evaluations(self.num_samples, self.scale)


def check_scale(scale: float | Tensor) -> None:
    """Refuse what is no finite number."""
    if isinstance(scale, Tensor) and scale.dim():
        raise SettingsError(f"the scale has shape {tuple(scale.shape)}; give a number or a scalar tensor")
    number = real_number("scale", scale.detach() if isinstance(scale, Tensor) else scale)
    if number - number != 0:
        raise SettingsError(f"the scale must be finite, not {number}")


def evaluations(num_samples: int, scale: float | Tensor) -> int:
    """Return how many points there are."""
    return num_samples if _absent(scale) else 3 * num_samples


def weighted(drawn: RelaxedDraws, scale: float | Tensor) -> WeightedPoints:
    """Return draws and their relaxations with their weights."""
    own = drawn.score / len(drawn.score)
    if _absent(scale):
        return WeightedPoints(drawn.corner, own)
    free = (scale / len(own)) * torch.ones_like(own)
    return WeightedPoints(torch.cat([drawn.corner, drawn.free, drawn.given]), torch.cat([own, free, -scale * own]))


def _absent(scale: float | Tensor) -> bool:
    """Tell whether there is no control variate; a learned scale of zero may yet move."""
    return not isinstance(scale, Tensor) and scale == 0
