"""What selectors ask of a posterior, and what they say where it does not hold."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.losses.loss import PointwiseLoss
from bayeskit.inference.generalized.pooling import Sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import Information

DATA_PER_UNKNOWN = 10
MAX_CONDITION = 1e8
MIN_CONVERGED = 0.5


def check_sum(posterior: GibbsPosterior) -> None:
    """Refuse losses that are pooled by anything but their sum.

    Raises
    ------
    SettingsError
    """
    if not isinstance(posterior.pooling, Sum):
        raise SettingsError(
            f"a learning rate is calibrated for losses that add up, not ones pooled by "
            f"{type(posterior.pooling).__name__}; leave pooling at 'sum'"
        )


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
