"""The learning rate under which data teach as much as they were expected to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from bayeskit._pyro.draws import draw
from bayeskit._settings import whole_number
from bayeskit._torch import global_stream, new_generator, one_thread, validation_kept
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.calibrate.assumptions import pointwise_loss
from bayeskit.inference.generalized.calibrate.selection import Selection
from bayeskit.inference.generalized.losses.densities import Model, law_of
from bayeskit.inference.generalized.losses.log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, columns
from bayeskit.inference.generalized.minimizer import minimize
from bayeskit.inference.generalized.posterior import GibbsPosterior

NUMBERS_AT_ONCE = 2**21


def holmes_walker(
    posterior: GibbsPosterior, *, model: Model | None = None, num_draws: int = 4096, seed: int = 0
) -> Selection:
    r"""Match the information gain of a datum with the one that the model expects.

    The gain is the Fisher divergence between prior and posterior of one datum, :math:`w^2 \int \|\nabla_\theta
    \ell(\theta, x)\|^2 \pi(\theta) d\theta`. Its mean over the data is set to the mean, over data of the model at the
    loss minimiser :math:`\hat\theta`, of the gain of an ordinary update with the model's likelihood ``f``:

    .. math:: w^2 = \frac{E_{x \sim f(\cdot \mid \hat\theta)} \int \|\nabla \log f(x \mid \theta)\|^2 \pi(\theta)
                    d\theta}{n^{-1} \sum_i \int \|\nabla \ell(\theta, x_i)\|^2 \pi(\theta) d\theta}.

    Coverage is not its target: with a wide prior the weight is near one whatever the noise. Gradients are those in
    unconstrained coordinates.

    Parameters
    ----------
    posterior : GibbsPosterior
        With a proper prior and losses of single data. Its weight does not matter.
    model : callable, optional
        What data were expected to follow: ``parameter -> distribution`` of a datum, or ``(parameter, *covariates) ->
        distributions``, as for :class:`~bayeskit.inference.generalized.losses.log_likelihood.NegativeLogLikelihood`,
        whose own is the default. It sets the scale of information, so that a rescaled loss gets an inversely
        rescaled weight.
    num_draws : int, default 4096
        Draws from the prior, each with a simulated data set.
    seed : int, default 0

    Returns
    -------
    Selection
        With diagnostics ``"expected_gain"`` (of the model's data and likelihood), ``"gain"`` (of the data, at weight
        one) and ``"minimizer"``.

    Raises
    ------
    DataError
        If gains are not finite and positive.
    SettingsError
        If the prior is improper, there is no model, or a single datum has no loss.

    References
    ----------
    Holmes, C. C., Walker, S. G. (2017). Assigning a value to a power likelihood in a general Bayesian model. Biometrika
    104, 497-503.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(50) * 2  # of variance four
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x)
    >>> chosen = holmes_walker(posterior, model=lambda mean: dist.Normal(mean, 1.0))
    >>> abs(chosen.weight - (2 / 5) ** 0.5) < 5 * chosen.standard_error  # (1 + prior variance) / (4 + prior variance)
    True
    """
    loss = pointwise_loss(posterior)
    if model is None and isinstance(loss, NegativeLogLikelihood):
        model = loss.distribution
    if model is None:
        raise SettingsError(
            f"{type(loss).__name__} does not say which data were expected; give model=, such as "
            "lambda mean: Normal(mean, 1.0)"
        )
    if not posterior.prior.is_proper:
        raise SettingsError("information is gained over a proper prior; this one is improper")
    num_draws = whole_number("num_draws", num_draws, least=2)
    found = minimize(posterior, seed=seed)
    generator = new_generator(seed, stream="holmes walker")
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        draws = posterior.prior.start(num_draws, generator).to(posterior.dtype)
        simulated = _simulated(posterior, model, found.position, num_draws, generator)
        expected = _gains(posterior, NegativeLogLikelihood(model), draws, simulated)
        gain = _gains(posterior, loss, draws, None)
    ratio = float(expected.mean() / gain.mean())
    if not 0 < ratio < float("inf"):
        raise DataError("the gain of information is not finite and positive; does the model have the data's support?")
    weight = ratio**0.5
    residual = (expected - ratio * gain) / gain.mean()
    return Selection(
        weight=weight,
        target="The gain of information (Fisher divergence from the prior) that the model expects of a datum.",
        method="holmes_walker",
        source=posterior,
        standard_error=float(residual.std()) / num_draws**0.5 / (2 * weight),
        diagnostics={
            "expected_gain": float(expected.mean()),
            "gain": float(gain.mean()),
            "minimizer": found.position,
        },
        warnings=()
        if bool(found.converged)
        else ("the loss minimiser was not found, and the model's data are simulated elsewhere; try another seed",),
    )


def _simulated(
    posterior: GibbsPosterior, model: Model, position: Tensor, num_sets: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Return data sets ``(R, n, ...)`` of the model at one vector: the outcomes' columns alone are new."""
    law, outcomes = law_of(model, posterior.prior.parameter(position), posterior.data)
    shape = outcomes.shape[: outcomes.dim() - len(law.event_shape)]
    with global_stream(generator):
        new = draw(law.expand(shape), (num_sets,)).to(outcomes)
    return (*(x.expand(num_sets, *x.shape) for x in columns(posterior.data)[:-1]), new)


def _gains(posterior: GibbsPosterior, loss: PointwiseLoss, draws: Tensor, data: tuple[Tensor, ...] | None) -> Tensor:
    """Return the squared gradient of a datum's loss, averaged over data, at each draw, ``(S,)``."""

    def one(u: Tensor, sets: Any) -> Tensor:
        own: Data = posterior.data if sets is None else sets if isinstance(posterior.data, tuple) else sets[0]
        each = jacrev(lambda u: loss.pointwise(posterior.prior.parameter(u), own))(u)
        return each.square().sum(-1).mean()

    at_once = max(1, NUMBERS_AT_ONCE // posterior.num_data**2)
    result: Tensor = vmap(one, in_dims=(0, None if data is None else 0), chunk_size=at_once)(draws, data)
    return result
