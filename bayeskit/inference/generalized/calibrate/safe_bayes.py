"""The learning rate with the smallest loss of each datum under the posterior of those before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.generalized.calibrate.assumptions import pointwise_loss
from bayeskit.inference.generalized.calibrate.grids import as_grid, at_edge, losses_at, part_posteriors
from bayeskit.inference.generalized.calibrate.selection import Curve, Selection
from bayeskit.inference.generalized.losses.loss import taken
from bayeskit.inference.generalized.posterior import GibbsPosterior


def safe_bayes(
    posterior: GibbsPosterior,
    grid: Sequence[float] | Tensor,
    *,
    randomized: bool = True,
    first: int | None = None,
    num_draws: int = 256,
    seed: int = 0,
) -> Selection:
    r"""Choose the weight with the smallest cumulative loss, predicting each datum from those before it.

    R-log-SafeBayes sums the posterior expected loss :math:`E_{\theta \sim \pi_w(\cdot \mid x_1, \dots, x_{i-1})}
    \ell(\theta, x_i)`, I-log-SafeBayes the loss at the posterior mean. Both make the posterior concentrate near the
    best parameter where a misspecified model would not let it. **Neither calibrates coverage**: a model that
    understates the noise of a location keeps the full weight, and its intervals stay too short.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses of single data, which are taken in the order they have. Its weight does not matter.
    grid : sequence of float
        Learning rates to compare; where the loss is minus a log likelihood, one and smaller powers of two.
    randomized : bool, default True
        R-log-SafeBayes; else I-log-SafeBayes, with the mean in unconstrained coordinates.
    first : int, optional
        Number of data before the first that is predicted. By default none where the prior is proper, and else two
        for each unknown.
    num_draws : int, default 256
        From the posterior after each datum at each weight, all in one batch, by importance sampling.
    seed : int, default 0

    Returns
    -------
    Selection
        With the cumulative losses as ``curve``, whose standard errors are those, over data, of the difference from
        the best; diagnostics ``"losses" (g, n - first)`` and ``"first"``.

    Raises
    ------
    SettingsError
        If a single datum has no loss, or there is none left to predict.

    References
    ----------
    Grunwald, P., van Ommen, T. (2017). Inconsistency of Bayesian inference for misspecified linear models, and a
    proposal for repairing it. Bayesian Analysis 12, 1069-1103.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> y = 3 * torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.HalfSquared(), y)
    >>> safe_bayes(posterior, [0.25, 0.5, 1.0]).weight  # although the calibrated weight is about 1 / 9
    1.0
    """
    loss = pointwise_loss(posterior)
    if first is None:
        first = 0 if posterior.prior.is_proper else 2 * posterior.dim
    first = whole_number("first", first, least=0 if posterior.prior.is_proper else 1)
    if first >= posterior.num_data:
        raise SettingsError(f"none of {posterior.num_data} data is left to predict after the first {first}")
    weights = as_grid(posterior, grid)
    index = torch.arange(posterior.num_data, device=weights.device)
    parts = part_posteriors(posterior, index < index[first:, None], weights, num_draws, seed)
    following = taken(posterior.data, index[first:].repeat_interleave(len(weights))[:, None])
    if randomized:
        each = losses_at(posterior, loss, parts.replicates.draws, following)[..., 0]
        each = (parts.log_weights.exp() * each).nansum(-1)
    else:
        each = losses_at(posterior, loss, parts.replicates.mean()[:, None], following)[:, 0, 0]
    scores = each.reshape(-1, len(weights)).mT
    total = scores.sum(-1)
    best = int(total.argmin())
    kind = "posterior expected loss" if randomized else "loss at the posterior mean"
    return Selection(
        weight=float(weights[best]),
        target=f"The smallest cumulative {kind} of each datum, given those before it; not coverage.",
        method="safe_bayes",
        source=posterior,
        standard_error=float("nan"),
        diagnostics={"losses": scores, "first": first},
        warnings=at_edge(weights, best, lowest_only=True) + parts.warnings,
        curve=Curve(weights, total, (scores - scores[best]).std(-1) * scores.shape[1] ** 0.5, f"cumulative {kind}"),
    )
