"""Log normalising constants from both sides: annealing forward and in reverse, their bridge, and classification."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError
from bayeskit.extend import (
    HMC,
    LEAST_OVERLAP,
    Bar,
    BidirectionalRatio,
    Evidence,
    bidirectional_ratio,
    independent_log_mean_exp_error,
    new_generator,
    pareto_shape,
    progress_bar,
    real_number,
    sigmoid_schedule,
    weight_effective_sample_size,
    weight_problems,
    whole_number,
    with_error,
    with_rounding,
)
from bayeskit.models.unnormalised._moves import (
    MovedChains,
    Unnormalised,
    base_draws,
    base_metric,
    move,
    require_normaliser,
    require_vectors,
)


@dataclass(frozen=True, repr=False)
class LogNormaliser:
    """Estimates of a log normalising constant from both sides.

    Attributes
    ----------
    forward : Evidence
        Annealed importance sampling from the base. Below the truth in expectation.
    reverse : Evidence
        Annealed importance sampling from the model back to the base. Above the truth in expectation, if its starting
        points are draws from the model.
    bridge : Evidence
        The bridge between both sets of paths, from all weights; the estimate to use.
    is_finite : bool or None
        Whether the constant is proven to be finite; None if neither proven nor refuted.
    reason : str
        Of ``is_finite``.
    has_exact_draws : bool
        Whether reverse paths start at exact draws. Otherwise ``reverse`` is a bound only as far as their chains have
        converged.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> from bayeskit.models.unnormalised._normaliser import LogNormaliser
    >>> z = LogNormaliser(*(Evidence("", x, 0.01, 1) for x in (2.99, 3.01, 3.0)), True, "bits", True)
    >>> z
    LogNormaliser(3.000 +- 0.010, from below 2.990 +- 0.010, from above 3.010 +- 0.010)
    """

    forward: Evidence
    reverse: Evidence
    bridge: Evidence
    is_finite: bool | None
    reason: str
    has_exact_draws: bool

    @property
    def value(self) -> float:
        """The bridge's estimate, in nats."""
        return self.bridge.log_evidence

    @property
    def standard_error(self) -> float:
        """Standard error of :attr:`value`."""
        return self.bridge.standard_error

    @property
    def gap(self) -> float:
        """Distance of the two one-sided estimates; in expectation at least the bias of either."""
        return self.reverse.log_evidence - self.forward.log_evidence

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem with the bridge."""
        return self.bridge.trusted

    def __repr__(self) -> str:
        below, above, both = (
            with_error(z.log_evidence, z.standard_error) for z in (self.forward, self.reverse, self.bridge)
        )
        flag = "" if self.trusted else "; NOT TRUSTED: " + "; ".join(self.bridge.warnings)
        return f"LogNormaliser({both}, from below {below}, from above {above}{flag})"


# Annealed paths between base and model.

_TARGET_ACCEPTANCE, _RATE, _FIRST_MOVES, _PILOT_CHAINS = 0.8, 0.5, 20, 64
_MAX_DISAGREEMENT = 4.5  # in standard errors
_NO_WEIGHT = "no path has a finite weight: the energy is NaN or infinite wherever the base has draws"


def log_normaliser(
    model: Unnormalised,
    *,
    num_temperatures: int = 100,
    num_chains: int = 256,
    draws: Tensor | Literal["chains", "enumerate"] = "chains",
    num_equilibration: int | None = None,
    kernel: HMC | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LogNormaliser:
    r"""Estimate the log normalising constant of an unnormalised model from below, from above, and by their bridge.

    Paths from the base :math:`b` to the model :math:`f / Z` run through :math:`b^{1-\beta} f^\beta`, by Hamiltonian
    Monte Carlo for real vectors and by Gibbs sweeps for binary ones. A path's weight :math:`w` is an importance weight
    of the model relative to the base, in the space of paths. Forward paths give :math:`Z = E[w]`, reverse paths
    :math:`1/Z = E[1/w]`; by Jensen's inequality the logs of the two means are low and high in expectation. The
    densities of the log weight under both kinds of paths have the ratio :math:`w / Z` (Crooks), so the optimal bridge
    between them estimates :math:`\log Z` with the smallest error. Noise-contrastive estimation of the constant alone is
    this bridge (see :func:`noise_contrastive_constant`), and one temperature step, without moves, makes it bridge
    sampling between base and model.

    Parameters
    ----------
    model : EnergyModel
        Or another :class:`Unnormalised`.
    num_temperatures : int, default 100
        Steps from the base to the model; at least 1.
    num_chains : int, default 256
        Forward paths, and reverse paths; at least 32.
    draws : Tensor (n, d), "chains" or "enumerate", default "chains"
        Where reverse paths start: at independent, exact draws of the model that you give; at draws from the list of
        all binary vectors; or at ends of other forward paths, resampled by their weights and moved on.
    num_equilibration : int, optional
        Moves at the model before reverse paths begin, with ``"chains"``; ``num_temperatures`` by default.
    kernel : HMC, optional
        For real vectors: its number of steps and metric. By default 5 steps in the metric of a normal base. A pilot
        finds a step size for each temperature.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    LogNormaliser
        Not trusted if weights are heavy-tailed, or if the two sides differ by more than 4.5 standard errors. A mode or
        a tail that neither base nor chains reach leaves no trace: give ``draws`` that are known to be there.

    Raises
    ------
    ModelError
        If the model has no finite normalising constant, as far as that can be seen, or its energy is random.
    SettingsError
        If a setting lies outside its domain, or states cannot be listed.
    ShapeError
        If ``draws`` are not vectors of the model.
    DataError
        If no forward path has a finite weight.

    References
    ----------
    Neal, R. M. (2001). Annealed importance sampling. Statistics and Computing 11, 125-139.

    Bennett, C. H. (1976). Efficient estimation of free energy differences from Monte Carlo data. Journal of
    Computational Physics 22, 245-268.

    Crooks, G. E. (2000). Path-ensemble averages in systems driven far from equilibrium. Physical Review E 61,
    2361-2366.

    Grosse, R. B., Ghahramani, Z., Adams, R. P. (2015). Sandwiching the marginal likelihood using bidirectional Monte
    Carlo. arXiv:1511.02543.

    Examples
    --------
    >>> import torch
    >>> from torch.distributions import Bernoulli, Independent
        >>> from bayeskit.models.unnormalised import log_normaliser
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> base = Independent(Bernoulli(torch.full((8,), 0.5, dtype=torch.float64)), 1)
    >>> model = EnergyModel(lambda x: -2.0 * (x[..., 1:] * x[..., :-1]).sum(-1), base)
    >>> z = log_normaliser(model, num_temperatures=20, progress=False)
    >>> abs(z.value - float(model.exact_log_normaliser())) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    temperatures = whole_number("num_temperatures", num_temperatures, least=1)
    chains = whole_number("num_chains", num_chains, least=32)
    equilibration = temperatures if num_equilibration is None else whole_number("num_equilibration", num_equilibration)
    if isinstance(draws, str) and draws not in ("chains", "enumerate"):
        raise SettingsError(f'draws must be a tensor, "chains" or "enumerate", not {draws!r}')
    if isinstance(draws, Tensor):
        require_vectors("draws", draws, model)
        if len(draws) < 32:
            raise SettingsError(f"{len(draws)} draws of the model are too few to start from; give at least 32")
    begin = time.monotonic()
    is_finite, reason = require_normaliser(model)
    host = new_generator(seed, stream="log normaliser")
    probe = base_draws(model, min(chains, _PILOT_CHAINS), host)
    generator = host if probe.device.type == "cpu" else new_generator(seed, probe.device, "moves of log normaliser")
    betas = sigmoid_schedule(temperatures).tolist()
    kernel = kernel or HMC(num_steps=5, metric=base_metric(model))
    anneals = 2 if isinstance(draws, Tensor) or draws == "enumerate" else 3
    total = anneals * temperatures + (equilibration if anneals == 3 else 0)
    with progress_bar("annealing", total, progress) as bar:
        paths = _Paths(model, kernel, betas, generator, bar)
        if not model.is_binary:
            paths.tune(probe)
        forward, _ = paths.forward(base_draws(model, chains, host))
        ancestor = None
        if isinstance(draws, Tensor):
            start = draws.detach()
        elif draws == "enumerate":
            start = _listed(model, chains, generator)
        else:
            weight, ends = paths.forward(base_draws(model, chains, host))
            weight = torch.where(weight < torch.inf, weight, -torch.inf)
            if not bool((weight > -torch.inf).any()):
                raise DataError(_NO_WEIGHT)
            ancestor = torch.multinomial(torch.softmax(weight, 0), chains, replacement=True, generator=generator)
            start = paths.at_the_model(ends[ancestor], equilibration)
        reverse = paths.reverse(start)
    z = _from_both_sides(forward, reverse, ancestor, probe.dtype, paths.num_evaluations, time.monotonic() - begin)
    return LogNormaliser(*z, is_finite, reason, ancestor is None)


class _Paths:
    """Paths between base and model, with one step size a temperature."""

    def __init__(
        self, model: Unnormalised, kernel: HMC, betas: list[float], generator: torch.Generator, bar: Bar
    ) -> None:
        self._model, self._kernel, self._betas = model, kernel, betas
        self._generator, self._bar = generator, bar
        self._steps = [0.0] * len(betas)
        self._done = self.num_evaluations = 0

    def tune(self, x: Tensor) -> None:
        """Find a step size for each temperature with chains ``(n, d)`` of a pilot, which are then dropped."""
        log_step = math.log(0.5)
        for i, beta in enumerate(self._betas):
            for _ in range(_FIRST_MOVES if i == 0 else 2):
                moved = self._move(x, beta, math.exp(log_step))
                x = moved.position
                log_step += _RATE * (moved.acceptance_rate - _TARGET_ACCEPTANCE)
            self._steps[i] = math.exp(log_step)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log weights ``(n,)`` and ends ``(n, d)`` of paths from the base."""
        ratio = self._model.log_ratio(x)
        weight = torch.zeros_like(ratio, dtype=torch.float64)
        for i in range(1, len(self._betas)):
            weight += (self._betas[i] - self._betas[i - 1]) * ratio
            x, ratio, _ = self._move(x, self._betas[i], self._steps[i])
            self._tick()
        return weight, x

    @torch.no_grad()
    def reverse(self, x: Tensor) -> Tensor:
        """Return log weights ``(n,)`` of paths from the model, as of the same paths forward."""
        ratio = self._model.log_ratio(x)
        weight = torch.zeros_like(ratio, dtype=torch.float64)
        for i in range(len(self._betas) - 1, 0, -1):
            # The move at the model belongs to both directions.
            x, ratio, _ = self._move(x, self._betas[i], self._steps[i], is_backward=True)
            weight += (self._betas[i] - self._betas[i - 1]) * ratio
            self._tick()
        return weight

    def at_the_model(self, x: Tensor, count: int) -> Tensor:
        """Return chains ``(n, d)`` after moves at the model."""
        for number in range(count):
            x = self._move(x, 1.0, self._steps[-1], is_backward=bool(number % 2)).position
            self._tick()
        return x

    def _move(self, x: Tensor, beta: float, step: float, is_backward: bool = False) -> MovedChains:
        self.num_evaluations += len(x) * (self._model.dim + 1 if self._model.is_binary else int(self._kernel.num_steps))
        return move(self._model, x, beta, self._kernel, step, self._generator, is_backward=is_backward)

    def _tick(self) -> None:
        self._done += 1
        self._bar.update(self._done)


@torch.no_grad()
def _listed(model: Unnormalised, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``(count, d)`` from the list of all binary vectors."""
    states = model.enumerate_states()
    probabilities = torch.softmax(model.log_density(states), 0)
    return states[torch.multinomial(probabilities, count, replacement=True, generator=generator)]


def _from_both_sides(
    forward: Tensor,
    reverse: Tensor,
    ancestor: Tensor | None,
    dtype: torch.dtype,
    num_evaluations: int,
    seconds: float,
) -> tuple[Evidence, Evidence, Evidence]:
    """Return the estimates from log weights ``(n,)`` of forward and ``(m,)`` of reverse paths, with their ancestors."""
    problems = []
    lost = int((~(forward < torch.inf)).sum() + (~reverse.isfinite()).sum())
    if lost:
        problems.append(f"{lost} weights are NaN or infinite and count as zero: correct the energy")
    forward = torch.where(forward < torch.inf, forward, -torch.inf)
    ancestor = None if ancestor is None else ancestor[reverse.isfinite()]
    reverse = reverse[reverse.isfinite()]
    if not bool((forward > -torch.inf).any()) or len(reverse) < 2:
        raise DataError(_NO_WEIGHT)
    low = float(forward.logsumexp(0)) - math.log(len(forward))
    high = math.log(len(reverse)) - float((-reverse).logsumexp(0))
    low_error = float(independent_log_mean_exp_error(forward.unsqueeze(0)))
    high_error = math.sqrt(_relative_variance((high - reverse).exp(), ancestor))
    worth = len(reverse) / _family_factor((high - reverse).clamp(max=2.0).exp(), ancestor)
    ratio = bidirectional_ratio(reverse, forward, worth)
    both, denominator, numerator = float(ratio.log_ratio), ratio.of_numerator, ratio.of_denominator
    variance = _relative_variance(numerator, None) + _relative_variance(denominator, ancestor)

    shapes = [pareto_shape(forward), pareto_shape(-reverse)]
    kish = [float(weight_effective_sample_size(w.unsqueeze(0))) for w in (forward, -reverse)]
    apart = (high - low) / max(math.hypot(low_error, high_error), 1e-9 * (1 + abs(low)))
    if abs(apart) > _MAX_DISAGREEMENT and math.isfinite(apart):
        problems.append(
            f"the two sides are {high - low:.3g} nats apart, {abs(apart):.1f} standard errors: use more temperatures "
            "and equilibration; chains may have missed a mode"
        )
    own = [_more_temperatures(weight_problems(k, n)) for k, n in zip(shapes, kish, strict=True)]
    overlap = _effective_terms(ratio)
    bridged = _more_temperatures(weight_problems(-math.inf, overlap))
    facts = {"gap": high - low, "gap_in_standard_errors": apart, "effective_bridge": overlap}
    values = forward[forward.isfinite()].to(dtype)

    def evidence(method: str, value: float, error: float, found: list[str], **more: float) -> Evidence:
        everything = (*problems, *found)
        return Evidence(
            method, value, with_rounding(error, values), num_evaluations, everything, facts | more, seconds=seconds
        )

    return (
        evidence("forward_annealing", low, low_error, own[0], pareto_k=shapes[0], effective=kish[0]),
        evidence("reverse_annealing", high, high_error, own[1], pareto_k=shapes[1], effective=kish[1]),
        evidence("annealed_bridge", both, math.sqrt(variance), bridged),
    )


def _relative_variance(values: Tensor, ancestor: Tensor | None) -> float:
    """Return the squared relative error of a mean of values ``(n,)``, those of one ancestor being dependent."""
    return float(values.var() / values.mean().square()) / len(values) * _family_factor(values, ancestor)


def _family_factor(values: Tensor, ancestor: Tensor | None) -> float:
    """Return the factor, at least one, by which common ancestors raise the variance of a mean."""
    centred = values - values.mean()
    if ancestor is None or not bool(centred.any()):
        return 1.0
    families = torch.zeros_like(values).index_add_(0, ancestor.unique(return_inverse=True)[1], centred)
    return max(1.0, float(families.square().sum() / centred.square().sum()))


def _effective_terms(ratio: BidirectionalRatio) -> float:
    """Return the effective number of terms of the smaller side; zero where the densities do not overlap."""
    if not float(ratio.overlap) >= LEAST_OVERLAP:
        return 0.0
    return min(float(h.sum().square() / h.square().sum()) for h in (ratio.of_numerator, ratio.of_denominator))


def _more_temperatures(problems: list[str]) -> list[str]:
    """Return problems of weights with the remedy of annealing."""
    return [f"{problem.split(':')[0]}: use more temperatures or chains" for problem in problems]


# The constant by classification.


def noise_contrastive_constant(
    log_ratio: Tensor, noise_log_ratio: Tensor, *, effective: float | None = None
) -> Evidence:
    r"""Estimate a log normalising constant by logistic regression of draws against noise, with one free parameter.

    The classifier's log odds are :math:`\log f(x) - c - \log q(x) + \log(n / m)`, with ``n`` draws of the density
    :math:`f / Z` and ``m`` draws of the noise :math:`q`, and :math:`c` is estimated by maximum likelihood. The
    likelihood is concave in :math:`c`, and its slope is zero where the optimal bridge has its fixed point: bridge
    sampling, Bennett's acceptance ratio and this are one estimator. With weights of annealed paths in place of ratios
    it is the bridge of :func:`log_normaliser`.

    Parameters
    ----------
    log_ratio : Tensor
        Shape ``(n,)`` for independent draws: log of the density without its constant, over the noise's density, at
        draws of the model.
    noise_log_ratio : Tensor
        Shape ``(m,)``: the same at draws of the noise.
    effective : float, optional
        Number of independent draws that the ``n`` draws are worth; their share of the log odds and the standard error
        follow it.

    Returns
    -------
    Evidence

    Raises
    ------
    DataError
        If a ratio is NaN or plus infinity, that of a draw of the model is minus infinity, or there are fewer than two.
    SettingsError
        If ``effective`` is not positive.

    References
    ----------
    Gutmann, M. U., Hyvarinen, A. (2012). Noise-contrastive estimation of unnormalized statistical models, with
    applications to natural image statistics. JMLR 13, 307-361.

    Meng, X.-L., Wong, W. H. (1996). Simulating ratios of normalizing constants via a simple identity. Statistica Sinica
    6, 831-860.

    Examples
    --------
    >>> import torch
        >>> from bayeskit.models.unnormalised import noise_contrastive_constant
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(2, 4000, generator=generator, dtype=torch.float64) * torch.tensor([[0.5**0.5], [1.5**0.5]])
    >>> def log_ratio(x):  # exp(-x**2) has the constant pi**0.5
    ...     return -x.square() - torch.distributions.Normal(0.0, 1.5**0.5).log_prob(x)
    >>> z = noise_contrastive_constant(log_ratio(x), log_ratio(y))
    >>> abs(z.log_evidence - 0.5723649429) < 4 * z.standard_error
    True
    """
    a, b = log_ratio.detach().flatten().to(torch.float64), noise_log_ratio.detach().flatten().to(torch.float64)
    if min(len(a), len(b)) < 2 or not bool(a.isfinite().all()) or not bool((b < torch.inf).all()):
        raise DataError(
            "ratios must be finite at draws of the model, finite or minus infinity at the noise, and at least two "
            "each; noise has to cover the model"
        )
    worth = float(len(a)) if effective is None else real_number("effective", effective, "(0, inf)")
    ratio = bidirectional_ratio(a, b, worth)
    constant, h_model, h_noise, _ = ratio
    if not bool(constant.isfinite()):
        raise DataError("the ratios of model and noise do not determine a constant: noise has to cover the model")
    # The error is that of the bridge.
    variance = float(h_model.var() / h_model.mean().square()) / worth
    variance += float(h_noise.var() / h_noise.mean().square()) / len(b)
    overlap = _effective_terms(ratio)
    problems = weight_problems(-math.inf, overlap)
    error = with_rounding(math.sqrt(variance), a)
    return Evidence(
        "noise_contrastive_constant",
        float(constant),
        error,
        len(a) + len(b),
        tuple(problems),
        {"effective_overlap": overlap},
    )
