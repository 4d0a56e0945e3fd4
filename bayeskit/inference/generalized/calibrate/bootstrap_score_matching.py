"""The learning rate whose posterior is nearest to the bootstrap of the minimiser, in Fisher divergence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread, validation_kept
from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized.calibrate.assumptions import (
    check_minimizers_vary,
    converged_rows,
    few_data,
    on_kinks,
)
from bayeskit.inference.generalized.calibrate.resampling import resampled
from bayeskit.inference.generalized.calibrate.selection import Selection
from bayeskit.inference.generalized.minimizer import minimize
from bayeskit.inference.generalized.pooling import check_sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import smooth_total

NUMBERS_AT_ONCE = 2**22


def bootstrap_score_matching(
    posterior: GibbsPosterior, *, num_replicates: int = 1000, resamples: Tensor | None = None, seed: int = 0
) -> Selection:
    r"""Minimise the Fisher divergence between the bootstrap law of the minimiser and the posterior.

    With minimisers :math:`\theta_b` of the loss of resampled data and :math:`D` the loss of the data themselves,
    the divergence is quadratic in the weight, and least at

    .. math:: w = \frac{\sum_b \mathrm{tr} \nabla^2 D(\theta_b) + \nabla D(\theta_b) \cdot \nabla \log \pi(\theta_b)}
                       {\sum_b \|\nabla D(\theta_b)\|^2}.

    The prior counts. Derivatives are taken in unconstrained coordinates; those of a loss with kinks are ones of the
    smoothed version that also estimates its curvature.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight does not matter.
    num_replicates : int, default 1000
        Resamples of the data, all minimised in one batch.
    resamples : Tensor, optional
        How often each datum occurs in each resample, ``(R, n)``, in place of random ones, such as
        :func:`~bayeskit.inference.generalized.calibrate.resampling.all_resamples`, with which nothing is simulated.
    seed : int, default 0
        Of the resamples.

    Returns
    -------
    Selection
        With diagnostics ``"minimizers" (R, d)``, ``"converged" (R,)`` and ``"num_replicates"``.

    Raises
    ------
    DataError
        If most minimisations fail, minimisers hardly vary, or no positive weight minimises the divergence.
    SettingsError
        If losses do not add up.
    ShapeError
        If ``resamples`` is not ``(R, n)``.

    References
    ----------
    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2024). Generalized Bayesian inference for discrete
    intractable likelihood. JASA 119, 2345-2355.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> from bayeskit.inference.generalized.calibrate.resampling import all_resamples
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x)
    >>> round(bootstrap_score_matching(posterior, resamples=all_resamples(4)).weight, 6)
    0.105263
    """
    check_sum(posterior)
    if resamples is None:
        num_replicates = whole_number("num_replicates", num_replicates, least=2)
        weights = resampled(posterior.num_data, num_replicates, new_generator(seed, stream="bootstrap score matching"))
    elif resamples.dim() == 2 and resamples.shape[1] == posterior.num_data:
        weights = resamples
    else:
        raise ShapeError(f"resamples must be (R, {posterior.num_data}), not {tuple(resamples.shape)}")
    centre = minimize(posterior, seed=seed).position
    found = minimize(posterior, weights=weights.to(centre), start=centre, seed=seed)
    rows, warnings = converged_rows(found.converged)
    check_minimizers_vary(posterior, centre, _covariance(found.position[rows]))
    trace, squared, along = _derivatives(posterior, centre, found.position[rows])
    above, below = trace + along, squared
    weight = float(above.sum() / below.sum())
    if not 0 < weight < float("inf"):
        raise DataError(
            f"the divergence from the bootstrap has no minimum at a positive weight (but at {weight:.3g}): the prior "
            "is sharper than the bootstrap, or the data are fitted without error; take a wider prior"
        )
    residual = (above - weight * below) / below.mean()
    return Selection(
        weight=weight,
        target="The bootstrap law of the loss minimiser: the posterior nearest to it in Fisher divergence.",
        method="bootstrap_score_matching",
        source=posterior,
        standard_error=0.0 if resamples is not None else float(residual.std()) / len(rows) ** 0.5,
        diagnostics={
            "minimizers": found.position,
            "converged": found.converged,
            "num_replicates": len(weights),
        },
        warnings=few_data(posterior) + warnings + on_kinks(posterior, centre),
    )


def _covariance(position: Tensor) -> Tensor:
    away = position - position.mean(0)
    return away.mT @ away / len(position)


def _derivatives(posterior: GibbsPosterior, centre: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Laplacian of the loss, its squared gradient and its gradient along the prior's, each ``(R,)``."""
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        total = smooth_total(posterior, centre)

        def first(u: Tensor) -> tuple[Tensor, Tensor]:
            gradient, _ = grad_and_value(total)(u)
            return gradient, gradient

        def one(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            curvature, gradient = jacrev(first, has_aux=True)(u)
            score = grad(posterior.prior.log_density)(u)
            return torch.trace(curvature), gradient.square().sum(), gradient @ score

        at_once = max(1, NUMBERS_AT_ONCE // (posterior.num_data * posterior.dim))
        result: tuple[Tensor, Tensor, Tensor] = vmap(one, chunk_size=at_once)(position)
    return result
