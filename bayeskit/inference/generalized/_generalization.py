"""How much better a posterior looks on its own data than on new data, and the information behind that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from bayeskit.errors import DataError, DrawsError, ModelError, SettingsError
from bayeskit.extend import Draws, new_generator, one_thread, real_number, whole_number, with_error
from bayeskit.inference.generalized._coverage import (
    ReplicateLosses,
    Simulate,
    replicate_posteriors,
    simulated_sets,
    unreliable_replicates,
)
from bayeskit.inference.generalized._exact import GaussianPosterior, gaussian_posterior
from bayeskit.inference.generalized._posterior import GibbsPosterior, check_pooled_by_sum
from bayeskit.inference.generalized.losses._loss import PointwiseLoss, taken, unvalidated

_MOST_ENTRIES = 2**22  # of the Hessians of single losses
_ALIKE = 1e-8  # relative difference of Hessians that counts as rounding


@dataclass(frozen=True)
class GeneralizationGap:
    """The expected gap of a Gibbs posterior between new and own data; made by :func:`generalization_gap`.

    Attributes
    ----------
    gap : float
        Expected loss of a new datum minus the mean loss of the own data, over data sets and posterior draws.
    standard_error : float
        Over data sets; zero if ``is_exact``.
    information : float
        Symmetrised Kullback-Leibler information of data and parameter, mutual plus lautum information, in nats.
    num_data : int
        Size of a data set.
    is_exact : bool
        Whether the gap is in closed form.
    population : str
        Where new data come from: "the data", resampled, or "simulate".
    warnings : tuple of str
        Why the gap or its error cannot be trusted.

    Examples
    --------
    >>> GeneralizationGap(0.12, 0.01, 1.2, 10, False, "simulate")
    GeneralizationGap(0.120 +- 0.010 for 10 data; 1.2000 nats of information; new data from simulate)
    """

    gap: float
    standard_error: float
    information: float
    num_data: int
    is_exact: bool
    population: str
    warnings: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """True if there is no warning."""
        return not self.warnings and math.isfinite(self.gap)

    @property
    def promise(self) -> str:
        """What the number says, and what it does not, in words."""
        world = (
            "data sets drawn with replacement from the data, a stand-in for the unknown distribution"
            if self.population == "the data"
            else "data sets from the given simulator"
        )
        return (
            f"The gap is an expectation over {world}, and over draws from the posterior of each. It is no bound, holds "
            "for no single data set, and not for the posterior's mean; it belongs to the Gibbs posterior of this loss, "
            "prior and weight, sampled exactly."
        )

    def __repr__(self) -> str:
        flag = "" if self.trusted else ", NOT TRUSTED: " + "; ".join(self.warnings)
        return (
            f"GeneralizationGap({with_error(self.gap, self.standard_error)} for {self.num_data} data; "
            f"{self.information:.4f} nats of information; new data from {self.population}{flag})"
        )


def generalization_gap(
    posterior: GibbsPosterior,
    simulate: Simulate | None = None,
    *,
    num_data_sets: int = 200,
    num_draws: int = 512,
    seed: int = 0,
) -> GeneralizationGap:
    r"""Return by how much the loss of new data exceeds that of the own data, on average over data sets.

    For a Gibbs posterior with weight ``w`` (a likelihood has ``w = 1``) and ``n`` independent data the expected gap is,
    without any inequality,

    .. math::

       E\Bigl[L_{\mathrm{new}}(\theta) - \tfrac1n \sum_i \ell(\theta, x_i)\Bigr]
       = \frac{I(\theta; x) + \Lambda(\theta; x)}{w\,n},

    the symmetrised information (mutual information plus lautum information) of parameter and data over the inverse
    temperature of the mean loss, ``w n``. Both sides are found at once, by the posteriors of many data sets. For losses
    of one common Hessian, such as half the squared error about an unknown mean, and a normal prior, the gap is
    :math:`w \operatorname{tr}(\Sigma C)` in closed form, with :math:`\Sigma` the covariance of the posterior and
    :math:`C` that of the gradient of the loss of a datum.

    Parameters
    ----------
    posterior : GibbsPosterior
        With a pointwise loss, pooled by the sum.
    simulate : callable, optional
        ``generator -> data``, one data set of the shapes of the posterior's data. By default data sets are drawn with
        replacement from the posterior's data, which stand in for their distribution.
    num_data_sets : int, default 200
        At least 2.
    num_draws : int, default 512
        Draws from the posterior of each data set.
    seed : int, default 0

    Raises
    ------
    SettingsError
        If the loss is not pointwise or not pooled by the sum, or a number is out of range.
    ShapeError, DataError
        If simulated data do not have the shapes of the posterior's data, or are not finite.

    References
    ----------
    Aminian, G., Bu, Y., Toni, L., Rodrigues, M. R. D., Wornell, G. W. (2021). An exact characterization of the
    generalization error for the Gibbs algorithm. NeurIPS.

    Examples
    --------
    Ten data of variance one about an unknown mean, the squared error, and inverse temperature one for its mean: the
    gap is 2/15.

    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, generalization_gap, losses
    >>> x = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=2 * 1.0 / 10)
    >>> round(2 * generalization_gap(posterior).gap, 12)
    0.133333333333
    """
    if not isinstance(posterior.loss, PointwiseLoss):
        raise SettingsError(
            f"{type(posterior.loss).__name__} is not a sum over data, so the loss of a new datum has no meaning; "
            "take a pointwise loss"
        )
    check_pooled_by_sum(posterior, "the gap between new and own data is known")
    num_data_sets = whole_number("num_data_sets", num_data_sets, least=2)
    n, scale = posterior.num_data, posterior.weight * posterior.num_data
    if simulate is None and (exact := _in_closed_form(posterior)) is not None:
        return GeneralizationGap(exact, 0.0, exact * scale, n, True, "the data")
    generator = new_generator(seed, stream="generalization gap")
    if simulate is None:
        rows = torch.randint(n, (num_data_sets, n), generator=generator).to(posterior.device)
        counts = torch.zeros(num_data_sets, n, dtype=posterior.dtype, device=posterior.device)
        counts.scatter_add_(1, rows, torch.ones_like(counts))
        replicates = replicate_posteriors(posterior, weights=counts, num_draws=num_draws, seed=seed)
        fresh = ReplicateLosses(posterior, torch.ones_like(counts), None)
    else:
        sets = simulated_sets(posterior, simulate, 2 * num_data_sets, generator)
        own, new = taken(sets, slice(num_data_sets)), taken(sets, slice(num_data_sets, None))
        replicates = replicate_posteriors(posterior, data=own, num_draws=num_draws, seed=seed)
        fresh = ReplicateLosses(posterior, None, new)
    chances = torch.softmax(replicates.points.log_ratio(replicates.weight), -1)
    each = (chances * (fresh(replicates.draws) - replicates.points.loss)).sum(-1)
    # At a point that does not depend on a data set, its gap is zero on average: a control variate.
    means = replicates.mean()
    others = ((means.sum(0) - means) / (num_data_sets - 1)).unsqueeze(1)
    each = (each - (fresh(others) - replicates.losses(others))[:, 0]) / n
    gap, error = float(each.mean()), float(each.std()) / math.sqrt(num_data_sets)
    warnings = unreliable_replicates(replicates.trusted)
    return GeneralizationGap(
        gap, error, gap * scale, n, False, "the data" if simulate is None else "simulate", tuple(warnings)
    )


def _in_closed_form(posterior: GibbsPosterior) -> float | None:
    """Return the gap over resampled data, if log prior and losses are quadratic, the latter with one Hessian."""
    if posterior.num_data * posterior.dim**2 > _MOST_ENTRIES:
        return None
    try:
        normal: GaussianPosterior = gaussian_posterior(posterior)
    except ModelError:  # also for an improper posterior, which the general case reports
        return None

    def loss_of_one(u: Tensor, row: Tensor) -> Tensor:
        data = taken(posterior.data, row.unsqueeze(0))
        each: Tensor = posterior.loss.pointwise(posterior.prior.parameter(u), data)  # type: ignore[attr-defined]
        return each[0]

    rows = torch.arange(posterior.num_data, device=posterior.device)
    with one_thread(), unvalidated():
        hessians = vmap(jacrev(grad(loss_of_one)), in_dims=(None, 0))(normal.mean, rows)
        slopes = vmap(grad(loss_of_one), in_dims=(None, 0))(normal.mean, rows)
    if bool((hessians - hessians[0]).abs().max() > _ALIKE * hessians.abs().max()):
        return None
    scatter = (slopes - slopes.mean(0)).detach()
    return posterior.weight * float(((scatter @ normal.covariance) * scatter).sum(-1).mean())


@dataclass(frozen=True)
class PathInformation:
    """Information about the data in the path of a Langevin sampler; made by :func:`path_information`.

    Attributes
    ----------
    information : float
        Upper limit of the mutual information of data and last draw, in nats.
    by_step : Tensor
        Its parts, ``(steps,)``.
    start : float
        Part of the starting point.
    gap_bound : float
        Upper limit of the expected gap between new and own data.
    num_data : int
    num_chains : int
        Chains over which the size of the gradients is averaged.

    Examples
    --------
    >>> import torch
    >>> PathInformation(2.0, torch.tensor([1.5, 0.5]), 0.0, 0.1, 100, 4)
    PathInformation(at most 2.0000 nats of 100 data in 2 steps, so the expected gap is at most 0.1000)
    """

    information: float
    by_step: Tensor
    start: float
    gap_bound: float
    num_data: int
    num_chains: int

    @property
    def promise(self) -> str:
        """What the number says, and what it does not, in words."""
        given = (
            " that start where they were told to, a place that must not depend on the data," if self.start == 0 else ""
        )
        return (
            f"For chains{given} the mean loss of new data exceeds that of the own data by at most the bound, in "
            "expectation over data sets, draws and minibatches. The size of the gradients comes from one data set and "
            f"{self.num_chains} chains, so the bound is an estimate and no certificate. It grows with every step, "
            "however little the last draw knows of the data, and is soon larger than the range of the loss."
        )

    def __repr__(self) -> str:
        return (
            "PathInformation("
            f"at most {self.information:.4f} nats of {self.num_data} data in {len(self.by_step)} steps, "
            f"so the expected gap is at most {self.gap_bound:.4f})"
        )


def path_information(draws: Draws, *, between: tuple[float, float] = (0.0, 1.0)) -> PathInformation:
    r"""Bound the information that a run of SGLD has about its data, and the gap that it allows.

    A step adds noise of variance :math:`\epsilon` to a drift :math:`\tfrac\epsilon2 \hat g`, so that it tells at most
    :math:`\tfrac d2 \log\bigl(1 + \tfrac{\epsilon}{4 d} E|\hat g|^2\bigr)` nats: the logarithm of the mean
    ``temperature`` that the run records. The steps add up to a limit of :math:`I(\theta; x)`, and a loss in an interval
    of width ``b`` has an expected gap of at most :math:`b \sqrt{I / 2n}`.

    Parameters
    ----------
    draws : Draws
        Of :func:`~bayeskit.inference.samplers.sample_stochastic_gradient` with the kernel SGLD, without warm-up and
        thinning, so that every step is recorded. Without ``initial=``, choosing each start among ten prior draws adds
        log 10 nats; a given start must not depend on the data, and neither must a metric.
    between : tuple of float, default (0, 1)
        Range of the loss.

    Raises
    ------
    DrawsError
        If the run has another kernel, steps that are not recorded, or chains that diverged.
    SettingsError
        If the range is not finite, or the chains start at the anchor of control variates.

    References
    ----------
    Pensia, A., Jog, V., Loh, P.-L. (2018). Generalization error bounds for noisy, iterative algorithms. IEEE
    International Symposium on Information Theory. Xu, A., Raginsky, M. (2017). Information-theoretic analysis of
    generalization capability of learning algorithms. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import path_information
    >>> from bayeskit.inference.samplers import SGLD, MinibatchTarget, sample_stochastic_gradient
    >>> y = torch.linspace(-1.0, 1.0, 1000, dtype=torch.float64)
    >>> target = MinibatchTarget.from_functions(
    ...     lambda u: -0.5 * u.square().sum(), lambda u, rows: -0.5 * (y[rows] - u).square(), 1, 1000, batch_size=100)
    >>> start = torch.zeros(1, dtype=torch.float64)
    >>> draws = sample_stochastic_gradient(
    ...     target, SGLD(1e-4), num_warmup=0, num_samples=50, initial=start, progress=False)
    >>> path_information(draws).gap_bound < 0.05
    True
    """
    low, high = (real_number("between", x) for x in between)
    if not -math.inf < low < high < math.inf:
        raise SettingsError(f"between must be the finite smallest and largest value of the loss, not {between}")
    settings = draws.settings
    if settings.get("sampler") != "SGLD":
        raise DrawsError(
            f"the path of {settings.get('sampler', 'this sampler')!r} has no such limit; draw with the kernel SGLD"
        )
    if settings["num_warmup"] or settings["thinning"] != 1:
        raise DrawsError("steps of the path are not recorded; draw with num_warmup=0 and thinning=1")
    if bool(draws.sample_stats["diverging"].any()):
        raise DrawsError("a chain diverged and kept its position; lower the step size")
    temperature = draws.sample_stats["temperature"]
    by_step = draws.unconstrained.shape[-1] / 2 * temperature.mean(0).log()
    if settings["starts_at_anchor"]:
        raise SettingsError("chains start at the target's anchor, a point made from the data; leave initial= out")
    start, size = settings["start_information"], int(settings["num_data"])
    information = start + float(by_step.sum())
    if not math.isfinite(information):
        raise DataError("a gradient on the path is not finite; lower the step size")
    bound = (high - low) * math.sqrt(information / (2 * size))
    return PathInformation(information, by_step, start, bound, size, draws.num_chains)
