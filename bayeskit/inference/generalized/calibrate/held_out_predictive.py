"""The learning rate that predicts held-out data best."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.calibrate.assumptions import pointwise_loss
from bayeskit.inference.generalized.calibrate.grids import PartPosteriors, as_grid, at_edge, losses_at, part_posteriors
from bayeskit.inference.generalized.calibrate.selection import Curve, Selection
from bayeskit.inference.generalized.losses.densities import Model
from bayeskit.inference.generalized.losses.log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses.loss import PointwiseLoss, taken
from bayeskit.inference.generalized.posterior import GibbsPosterior


def held_out_predictive(
    posterior: GibbsPosterior,
    *,
    grid: Sequence[float] | Tensor | None = None,
    num_folds: int = 10,
    model: Model | None = None,
    num_draws: int = 512,
    seed: int = 0,
) -> Selection:
    r"""Choose the weight whose posteriors of part of the data predict the rest best.

    With a predictive density ``f`` the score of a held-out datum is :math:`-\log \int f(x \mid \theta)\,\pi_w(\theta
    \mid x_{\mathrm{train}}) d\theta`; without one it is the posterior expectation of its loss. That always rewards a
    posterior for being narrow, so that its best weight is large unless the prior knows better: use it for the
    balance of prior and data, not for uncertainty. Neither score aims at coverage.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses of single data. Its weight does not matter.
    grid : sequence of float, optional
        Learning rates to compare. By default thirteen octaves about one that matches the scale of the loss, so that a
        rescaled loss gets an inversely rescaled grid.
    num_folds : int, default 10
        Parts of the data, each held out once.
    model : callable, optional
        The predictive density, ``parameter -> distribution`` of a datum, or ``(parameter, *covariates) ->
        distributions``. By default that of a ``NegativeLogLikelihood``.
    num_draws : int, default 512
        From the posterior of each fold and weight, all in one batch, by importance sampling.
    seed : int, default 0
        Of the folds and draws.

    Returns
    -------
    Selection
        With the summed scores as ``curve``, whose standard errors are those, over data, of the difference from the
        best; diagnostics ``"scores" (g, n)`` and ``"num_folds"``.

    Raises
    ------
    DataError
        If no weight has a finite score.
    SettingsError
        If there are more folds than data, or a single datum has no loss.

    References
    ----------
    Geisser, S., Eddy, W. F. (1979). A predictive approach to model selection. JASA 74, 153-160. Wu, P.-S., Martin, R.
    (2023). A comparison of learning rate selection methods in generalized Bayesian inference. Bayesian Analysis 18,
    105-132.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x)
    >>> unit = held_out_predictive(posterior, grid=[0.1, 1.0, 10.0], num_folds=6, model=lambda m: dist.Normal(m, 1.0))
    >>> unit.method, unit.curve.values.shape
    ('held_out_predictive', torch.Size([3]))
    """
    loss = pointwise_loss(posterior)
    num_folds = whole_number("num_folds", num_folds, least=2)
    if num_folds > posterior.num_data:
        raise SettingsError(f"{posterior.num_data} data cannot be cut into {num_folds} folds")
    weights = as_grid(posterior, grid)
    generator = new_generator(seed, stream="folds")
    fold = torch.randperm(posterior.num_data, generator=generator).to(weights.device) % num_folds
    training = fold != torch.arange(num_folds, device=fold.device)[:, None]
    parts = part_posteriors(posterior, training, weights, num_draws, seed)
    if model is None and isinstance(loss, NegativeLogLikelihood):
        model = loss.distribution
    density = None if model is None else NegativeLogLikelihood(model)
    scores = torch.stack(
        [_scores(posterior, density or loss, parts, training, g, density is not None) for g in range(len(weights))]
    )
    total = scores.sum(-1).nan_to_num(nan=torch.inf)
    best = int(total.argmin())
    if not bool(total[best].isfinite()):
        raise DataError("no weight of the grid gives held-out data a finite score; does the model have their support?")
    differences = scores - scores[best]
    caveat: tuple[str, ...] = ()
    if density is None:
        caveat = (
            "the expected held-out loss rewards narrow posteriors and says nothing of uncertainty; give model= for a "
            "predictive density",
        )
    what = "expected loss" if density is None else "minus log predictive density"
    return Selection(
        weight=float(weights[best]),
        target=f"The smallest {what} of held-out data; not coverage.",
        method="held_out_predictive",
        source=posterior,
        standard_error=float("nan"),
        diagnostics={"scores": scores, "num_folds": num_folds},
        warnings=at_edge(weights, best) + parts.warnings + caveat,
        curve=Curve(weights, total, differences.std(-1) * posterior.num_data**0.5, f"{what} of held-out data"),
    )


def _scores(
    posterior: GibbsPosterior, loss: PointwiseLoss, parts: PartPosteriors, training: Tensor, chosen: int, mixed: bool
) -> Tensor:
    """Return the score of each datum at one weight, ``(n,)``: of a mixture of densities, or an expected loss."""
    folds, num_data = training.shape
    size = len(parts.log_weights) // folds
    rows = torch.arange(folds, device=training.device) * size + chosen
    held_out = ~training
    # Folds differ in size by one at most: the shorter ones are filled up by a datum whose score is then left out.
    most = int(held_out.sum(-1).max())
    order = held_out.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    each = losses_at(posterior, loss, parts.replicates.draws[rows], taken(posterior.data, order))
    log_weights = parts.log_weights[rows][..., None]
    score = -(log_weights - each).logsumexp(1) if mixed else (log_weights.exp() * each).nansum(1)
    kept = held_out.gather(1, order)
    result = score.new_empty(num_data)
    result[order[kept]] = score[kept]
    return result
