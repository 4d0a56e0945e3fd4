"""What selectors ask of a posterior, and what they say where it does not hold."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._torch import one_thread, validation_kept
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.losses.loss import PointwiseLoss
from bayeskit.inference.generalized.minimizer import residual_spread
from bayeskit.inference.generalized.pooling import check_sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import Information, curvature, influence

DATA_PER_UNKNOWN = 10
MAX_CONDITION = 1e8
MIN_CONVERGED = 0.5
NEAR_KINK = 1e-4  # in units of the residuals' spread
MAX_ON_KINKS = 0.1
MIN_VARIATION = 1e-6  # of minimisers, in units of their asymptotic variance


def pointwise_loss(posterior: GibbsPosterior) -> PointwiseLoss:
    """Return the loss, refusing one that no single datum has.

    Raises
    ------
    SettingsError
    """
    check_sum(posterior)
    if not isinstance(posterior.loss, PointwiseLoss):
        raise SettingsError(
            f"{type(posterior.loss).__name__} looks at all data at once, so that no datum has a loss of its own; take "
            "bootstrap_score_matching or weighted_likelihood_bootstrap_matching"
        )
    return posterior.loss


def few_data(posterior: GibbsPosterior) -> tuple[str, ...]:
    """Return a warning where an asymptotic argument has too few data to stand on."""
    if posterior.num_data >= DATA_PER_UNKNOWN * posterior.dim:
        return ()
    return (
        f"{posterior.num_data} data for {posterior.dim} unknowns are few for an argument that needs many; take the "
        "weight as a rough one, or compare coverage_report",
    )


def ill_conditioned(information: Information) -> tuple[str, ...]:
    """Return warnings where a direction is all but undetermined."""
    found = []
    for name, matrix in (
        ("mean Hessian of the loss", information.mean_hessian),
        ("covariance of its gradients", information.gradient_covariance),
    ):
        if not bool(torch.linalg.cond(matrix) <= MAX_CONDITION):
            found.append(f"the {name} is nearly singular; rescale covariates, or drop those that others determine")
    return tuple(found)


def converged_rows(converged: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Return the rows whose minimum was found, and a warning that counts the others.

    Raises
    ------
    DataError
        If fewer than half were found.
    """
    rows, lost = converged.nonzero()[:, 0], int((~converged).sum())
    if len(rows) < MIN_CONVERGED * len(converged):
        raise DataError(
            f"the loss has no minimum in {lost} of {len(converged)} replicates; the data leave a direction "
            "undetermined: drop unknowns, or see propriety_check"
        )
    if not lost:
        return rows, ()
    return rows, (
        f"{lost} of {len(converged)} minimisations did not converge and were left out, which favours large weights; "
        "look at propriety_check",
    )


def on_kinks(posterior: GibbsPosterior, position: Tensor) -> tuple[str, ...]:
    """Return a warning where many data lie on a kink of their loss at ``position (d,)``, as tied or rounded ones do.

    By as many kinks as there are unknowns a minimiser is held in place even where no data are tied.
    """
    loss = posterior.loss
    if not isinstance(loss, PointwiseLoss) or loss.smoothed(1.0) is loss:
        return ()
    width = NEAR_KINK * float(residual_spread(posterior, position))
    parameter = posterior.prior.parameter(position)
    plain = loss.pointwise(parameter, posterior.data)
    wide, narrow = (
        (loss.smoothed(w).pointwise(parameter, posterior.data) - plain).abs()  # type: ignore[attr-defined]
        for w in (width, width / 2)
    )
    # Half the width smooths a kink half as much, and a fourth as much far from it.
    tied = int(((wide > 0.1 * wide.max()) & (narrow > 0.4 * wide)).sum())
    if tied <= MAX_ON_KINKS * posterior.num_data + posterior.dim:
        return ()
    return (
        f"{tied} of {posterior.num_data} data lie on a kink of the loss at its minimiser, where tied or rounded data "
        "leave no density to estimate its curvature from; take a smooth loss, such as Huber",
    )


def check_minimizers_vary(posterior: GibbsPosterior, position: Tensor, covariance: Tensor) -> None:
    """Refuse minimisers of resampled data that vary much less than curvature and gradients at ``position`` tell.

    Parameters
    ----------
    posterior : GibbsPosterior
    position : Tensor
        The minimiser for the data themselves, unconstrained, ``(d,)``.
    covariance : Tensor
        Of the minimisers for resampled data, ``(d, d)``.

    Raises
    ------
    DataError
    """
    with one_thread(), validation_kept():
        torch.distributions.Distribution.set_default_validate_args(False)
        each, hessian = influence(posterior, position), curvature(posterior, position)
    centred = each - each.mean(0)
    lower, failed = torch.linalg.cholesky_ex(centred.mT @ centred / len(each))
    if int(failed):  # gradients that do not vary in some direction have nothing to say of it
        return
    half = torch.linalg.solve_triangular(lower, hessian, upper=False)
    ratio = len(each) * half @ covariance @ half.mT
    if not bool(torch.linalg.eigvalsh(0.5 * (ratio + ratio.mT)).min() > MIN_VARIATION):
        raise DataError(
            "the bootstrap's minimisers hardly vary in some direction, as where a kink of the loss lies on tied or "
            "rounded data, so that their spread says nothing of the learning rate; are the data fitted without error? "
            "Take a smooth loss, such as Huber"
        )
