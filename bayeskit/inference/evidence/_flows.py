"""Estimators that use a normalizing flow fitted to posterior draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import scipy
import torch
from torch import Tensor, nn

from bayeskit._core.convergence import stillness_problems
from bayeskit._core.flows import zuko
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import global_stream, new_generator, one_thread
from bayeskit._core.statistics import (
    effective_sample_size,
    independent_log_mean_exp_error,
    log_mean_exp,
    log_mean_exp_error,
    mean_error,
    r_hat,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit._core.texts import short_repr
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference._proposals import StudentT, normal_log_prob, student_log_prob
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import usable_draws
from bayeskit.inference.evidence._judging._densities import with_rounding, without_nan
from bayeskit.inference.evidence._judging._weights import missed_draws, shape_that_matters, weight_problems
from bayeskit.inference.evidence._methods import Part
from bayeskit.inference.evidence._result import Evidence

# A normalizing flow fitted to posterior draws, with cheap draws and densities.

_MIN_HALF = 8
_MIN_TRAINING = 500  # with fewer draws a normal fits better than a flow
_MAX_TRAINING, _MAX_HELD_OUT = 20_000, 2000
_HELD_OUT_SHARE = 0.2
_BINS, _HIDDEN, _NUM_PAIRS = 8, (32, 32), 2
_MIN_BOUND, _MARGIN = 5.0, 1.1
_BATCH, _STEPS_PER_CHECK, _PATIENCE = 256, 20, 2
_LEARNING_RATES = (1e-2, 2e-3)
_MAX_GRADIENT, _MAX_RESIDUAL = 5.0, 3.0
_NEARLY_EQUAL = 0.04  # squared coefficient of variation of weights below which no flow is fitted
_WORTHWHILE = 0.01  # relative decrease of the mean square weight that is worth further steps
_MIN_GAIN_IN_ERRORS = 2.0
_TAIL_SHARE, _DEGREES_OF_FREEDOM = 0.3, 5.0


@dataclass(frozen=True, eq=False)
class FittedFlow:
    """A whitened coupling flow over unconstrained vectors, or a normal distribution if a flow is no better.

    Computations use double precision for every dtype, because inverting a spline in single precision can fail.

    Attributes
    ----------
    location : Tensor
        Mean of the draws, shape ``(d,)``.
    factor : Tensor
        Cholesky factor of their covariance, ``(d, d)``.
    transform : nn.Module or None
        Map from whitened coordinates to noise; None for the normal distribution.
    gain : float
        Log ratio of the importance sampling effective sample sizes of flow and normal distribution on held-out draws,
        both with defensive tails; zero for the normal distribution.
    gain_error : float
        Standard error of ``gain``; NaN if no flow was fitted.
    dtype : torch.dtype
        Dtype of the draws.
    """

    location: Tensor
    factor: Tensor
    transform: nn.Module | None = None
    gain: float = 0.0
    gain_error: float = math.nan
    dtype: torch.dtype = field(default=torch.float64)

    __repr__ = short_repr

    @property
    def dim(self) -> int:
        """Dimension of the unconstrained space."""
        return len(self.location)

    @property
    def is_normal(self) -> bool:
        """True if the fit is a normal distribution."""
        return self.transform is None

    def to_white(self, x: Tensor) -> Tensor:
        """Return ``x``, ``(*batch, d)``, in whitened coordinates: mean zero, no correlation."""
        centred = x.to(torch.float64) - self.location
        return torch.linalg.solve_triangular(self.factor, centred.unsqueeze(-1), upper=False).squeeze(-1)

    def from_white(self, white: Tensor) -> Tensor:
        """Return vectors from whitened coordinates, in the dtype of the draws."""
        return (self.location + white @ self.factor.T).to(self.dtype)

    @torch.no_grad()
    def to_noise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standard normal noise of ``x``, ``(*batch, d)``, and the log volume ``(*batch)``."""
        with one_thread():
            noise, log_volume = to_noise(self.transform, self.to_white(x))
        return noise, log_volume - self.factor.diagonal().log().sum()

    @torch.no_grad()
    def from_noise(self, noise: Tensor) -> Tensor:
        """Return the vectors for ``noise``, ``(*batch, d)``, in the dtype of the draws."""
        white = noise.to(self.location)
        if self.transform is not None:
            with one_thread():
                white = self.transform().inv(white)
        return self.from_white(white)

    @torch.no_grad()
    def defensive_log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the defensive mixture of :func:`flow_importance_sampling`."""
        white = self.to_white(x)
        with one_thread():
            density = _defensive_density(*to_noise(self.transform, white), white)
        return density - self.factor.diagonal().log().sum()

    def log_prob(self, x: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log densities, ``(*batch, d) -> (*batch)``, in double precision.

        Parameters
        ----------
        x : Tensor
        temperature : float, default 1.0
            Factor of the noise variance; below one the distribution is narrower.
        """
        noise, log_volume = self.to_noise(x)
        return log_volume + normal_log_prob(noise, temperature)

    def sample(self, num_draws: int, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """Draw vectors, ``(num_draws, d)``, in the dtype of the draws of the fit."""
        shape = (num_draws, self.dim)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return self.from_noise(math.sqrt(temperature) * noise)


@takes_draws
def fit_flow(target: Target, draws: Draws, *, seed: int = 0, max_steps: int = 300) -> FittedFlow:
    """Fit a normalizing flow to the first half of each chain.

    The flow is a coupling flow of rational-quadratic splines on whitened coordinates, initialised as the normal
    distribution of the same mean and covariance. The objective combines the likelihood with the variance of the log
    ratio between posterior and flow density, which has no sampling noise of the draws. The last fifth of each half is
    held out for early stopping.

    The normal distribution is returned if its importance weights are nearly equal, if there are too few draws, or if
    the gain of the flow on held-out draws is below twice its standard error.

    Parameters
    ----------
    target : Target
    draws : Draws
    seed : int, default 0
    max_steps : int, default 300
        Optimiser steps; zero returns the normal distribution.

    Returns
    -------
    FittedFlow

    Raises
    ------
    DrawsError
        If the draws come from another target, are too few to be split, or do not span the space.
    SettingsError
        If ``max_steps`` is negative.

    References
    ----------
    Dinh, L., Sohl-Dickstein, J., Bengio, S. (2017). Density estimation using Real NVP. ICLR.

    Durkan, C., Bekasov, A., Murray, I., Papamakarios, G. (2019). Neural spline flows. NeurIPS 32.

    Richter, L., Boustati, A., Nuesken, N., Ruiz, F. J. R., Akyildiz, O. D. (2020). VarGrad: a low-variance gradient
    estimator for variational inference. NeurIPS 33.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._flows import fit_flow
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> fit_flow(draws.target, draws).is_normal  # as the posterior is
    True
    """
    draws = usable_draws(draws, target)
    max_steps = whole_number("max_steps", max_steps, least=0)
    first, _ = _halves(draws, target.dim)
    # Copies, because autograd cannot use tensors made in inference mode.
    with torch.inference_mode(False):
        first = first.to(torch.float64).clone()
        log_density = (draws.log_prior + draws.log_likelihood)[:, : first.shape[1]].to(torch.float64).clone()
    location, factor = _whitening(first.flatten(0, 1))
    white = torch.linalg.solve_triangular(factor, (first - location).unsqueeze(-1), upper=False).squeeze(-1)
    normal = FittedFlow(location, factor, dtype=draws.unconstrained.dtype)
    num_held_out = round(_HELD_OUT_SHARE * white.shape[1])
    training = white[:, :-num_held_out].flatten(0, 1)
    if max_steps == 0 or len(training) < max(_MIN_TRAINING, 10 * target.dim):
        return normal
    held_out = _HeldOut.of(white[:, -num_held_out:], log_density[:, -num_held_out:])
    # Variance due to the errors of mean and covariance, doubled for correlated draws.
    unavoidable = target.dim * (target.dim + 3) / len(training)
    if held_out.variation(None) < _NEARLY_EQUAL + unavoidable:
        return normal
    generator = new_generator(seed, stream="flow")
    index = torch.randperm(len(training), generator=generator)[:_MAX_TRAINING].to(training.device)
    heights = log_density[:, :-num_held_out].flatten()[index]
    bound = max(_MIN_BOUND, _MARGIN * float(white.abs().max()))
    with one_thread(), torch.inference_mode(False), torch.enable_grad():
        transform = _new_transform(target.dim, bound, generator).to(device=location.device, dtype=torch.float64)
        _train(transform, training[index], heights, held_out, max_steps, generator)
    gain, error = held_out.gain(transform)
    if not gain > _MIN_GAIN_IN_ERRORS * error:
        return FittedFlow(location, factor, None, 0.0, error, normal.dtype)
    return FittedFlow(location, factor, transform, gain, error, normal.dtype)


def _halves(draws: Draws, dim: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of each chain, ``(chains, draws, d)``; DrawsError if there are too few."""
    half = draws.num_draws // 2
    if half < _MIN_HALF or half * draws.num_chains < 2 * dim:
        raise DrawsError(
            f"{draws.num_chains} chains of {draws.num_draws} draws are too few to fit a {dim}-dimensional "
            f"distribution to one half of them; give at least {2 * _MIN_HALF} draws a chain and {4 * dim} in all"
        )
    return draws.unconstrained[:, :half], draws.unconstrained[:, half:]


def _check_flow(flow: FittedFlow, target: Target) -> FittedFlow:
    """Return the flow; SettingsError if its dimension is not the target's."""
    if flow.dim != target.dim:
        raise SettingsError(
            f"the flow has dimension {flow.dim}, the target {target.dim}; fit a flow to draws of the target"
        )
    return flow


def to_noise(transform: nn.Module | None, white: Tensor) -> tuple[Tensor, Tensor]:
    """Return noise and log volume of whitened vectors."""
    if transform is None:
        return white, white.new_zeros(white.shape[:-1])
    noise, log_volume = transform().call_and_ladj(white)
    return noise, log_volume


def _defensive_density(noise: Tensor, log_volume: Tensor, white: Tensor) -> Tensor:
    """Log density of the mixture of the flow, the flow with Student-t noise, and the Student-t itself."""
    light = math.log1p(-_TAIL_SHARE) + log_volume + normal_log_prob(noise)
    of_flow, of_white = (student_log_prob(x, _DEGREES_OF_FREEDOM) for x in (noise, white))
    tails = torch.logaddexp(log_volume + of_flow, of_white)
    return torch.logaddexp(light, math.log(_TAIL_SHARE / 2) + tails)


@dataclass(frozen=True)
class _HeldOut:
    """Whitened draws ``(chains, draws, d)`` and their log densities for the comparison of proposals."""

    white: Tensor
    log_density: Tensor

    @classmethod
    def of(cls, white: Tensor, log_density: Tensor) -> _HeldOut:
        count, length = log_density.numel(), log_density.shape[1]
        thin = math.ceil(count / _MAX_HELD_OUT)
        if length >= 8 * thin:
            return cls(white[:, ::thin], log_density[:, ::thin])
        return cls(white[::thin], log_density[::thin])

    @torch.no_grad()
    def log_weights(self, transform: nn.Module | None) -> Tensor:
        """Return log importance weights of the held-out draws."""
        with one_thread():
            return self.log_density - _defensive_density(*to_noise(transform, self.white), self.white)

    def variation(self, transform: nn.Module | None) -> float:
        """Squared coefficient of variation of the weights of draws from the proposal, accurate if small."""
        log_weights = self.log_weights(transform)
        # The log of the mean exceeds the mean log by half the variance. A few large reciprocals cannot distort it.
        return 2 * float(log_mean_exp(log_weights) - log_weights.mean())

    def gain(self, transform: nn.Module) -> tuple[float, float]:
        """Log ratio of the normal's mean square weight to the flow's, and its error."""
        plain, flow = self.log_weights(None), self.log_weights(transform)
        gain = float(log_mean_exp(plain) - log_mean_exp(flow))
        influence = (plain - log_mean_exp(plain)).exp() - (flow - log_mean_exp(flow)).exp()
        if influence.shape[1] >= _MIN_HALF:
            return gain, float(mean_error(influence))
        # Chains too short for autocorrelation count as independent.
        return gain, float(influence.std()) / math.sqrt(influence.numel())


def _whitening(x: Tensor) -> tuple[Tensor, Tensor]:
    covariance = torch.cov(x.T).reshape(x.shape[1], x.shape[1])
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate is constant, or two are perfectly correlated; "
            "check the chains and the model"
        )
    return x.mean(0), factor


def _new_transform(dim: int, bound: float, generator: torch.Generator) -> nn.Module:
    """Create pairs of couplings with complementary random masks; together they are the identity."""
    shapes = [(_BINS,), (_BINS,), (_BINS - 1,)]
    # The splines cover all draws; beyond them they are the identity, which keeps the tails of the noise.
    spline = partial(zuko.transforms.MonotonicRQSTransform, bound=bound)
    if dim == 1:
        single = zuko.flows.ElementWiseTransform(1, univariate=spline, shapes=shapes)
        with torch.no_grad():
            for parameter in single.parameters():
                parameter.zero_()
        return zuko.lazy.LazyComposedTransform(single)
    couplings = []
    for _ in range(_NUM_PAIRS):
        mask = torch.randperm(dim, generator=generator) % 2 == 0
        for half in (mask, ~mask):
            with global_stream(generator):
                coupling = zuko.flows.GeneralCouplingTransform(
                    dim, mask=half, univariate=spline, shapes=shapes, hidden_features=_HIDDEN
                )
            with torch.no_grad():
                coupling.hyper[-1].weight.zero_()
                coupling.hyper[-1].bias.zero_()
            couplings.append(coupling)
    return zuko.lazy.LazyComposedTransform(*couplings)


def _loss(transform: nn.Module, white: Tensor, log_density: Tensor) -> Tensor:
    """Cross-entropy plus half the variance of the log ratio, with a Huber loss against outliers."""
    noise, log_volume = to_noise(transform, white)
    own = log_volume + normal_log_prob(noise)
    ratio = log_density - own
    middle = ratio.detach().median()
    centre = middle + (ratio.detach() - middle).clamp(-_MAX_RESIDUAL, _MAX_RESIDUAL).mean()
    spread = nn.functional.huber_loss(ratio, centre.expand_as(ratio), delta=_MAX_RESIDUAL)
    return spread - own.mean()


def _train(
    transform: nn.Module,
    training: Tensor,
    heights: Tensor,
    held_out: _HeldOut,
    max_steps: int,
    generator: torch.Generator,
) -> None:
    """Train ``transform``, keep the parameters best on the held-out draws, and lower the learning rate on a stall."""
    parameters = list(transform.parameters())
    best = [parameter.detach().clone() for parameter in parameters]
    lowest, step = float(log_mean_exp(held_out.log_weights(None))), 0
    for rate in _LEARNING_RATES:
        _restore(parameters, best)
        optimizer, stalls = torch.optim.Adam(parameters, rate), 0
        while step < max_steps and stalls < _PATIENCE:
            step += 1
            index = torch.randint(len(training), (_BATCH,), generator=generator).to(training.device)
            optimizer.zero_grad()
            _loss(transform, training[index], heights[index]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT)
            optimizer.step()
            if step % _STEPS_PER_CHECK and step < max_steps:
                continue
            mean_square, stalls = float(log_mean_exp(held_out.log_weights(transform))), stalls + 1
            if mean_square < lowest - _WORTHWHILE:
                stalls = 0
            if mean_square < lowest:
                lowest = mean_square
                best = [parameter.detach().clone() for parameter in parameters]
    _restore(parameters, best)
    for parameter in parameters:
        parameter.requires_grad_(False)


def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


# Importance sampling from a normalizing flow fitted to posterior draws.

#: Share of draws from the prior.
_PRIOR_SHARE = 0.1
#: Number of fitted components of the proposal; the prior is the last component.
_NUM_FITTED = 3
#: Smallest number of draws of a component with a reliable sample variance.
_MIN_PART = 10


@estimator(Part.POSTERIOR, Part.FLOW, mixing=False)
def flow_importance_sampling(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, num_draws: int = 10_000, seed: int = 0
) -> Evidence:
    """Estimate the log evidence by importance sampling from a normalizing flow fitted to half of the draws.

    The proposal is a mixture. If the target supports prior draws, a tenth of the draws come from the prior, to reach
    regions that the posterior draws missed; NaN densities there count as zero; the diagnostic ``nan_from_prior`` is
    their share. Three tenths of the others come from wider distributions: half from the flow with Student-t noise of
    five degrees of freedom, half from a Student-t with the covariance of the posterior draws as its scale matrix. Every
    draw is weighted by the mixture density, so lighter tails of the flow do not make the weights unbounded. All
    posterior draws serve to check that the proposal covers the posterior.

    Parameters
    ----------
    target : Target
    draws : Draws
    flow : FittedFlow, optional
        Result of :func:`fit_flow` on ``draws``; fitted if not given.
    num_draws : int, default 10,000
        Number of proposal draws.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to be split.
    SettingsError
        If ``num_draws`` is below two, or the flow has another dimension.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
    185-194.

    Papamakarios, G., Nalisnick, E., Rezende, D. J., Mohamed, S., Lakshminarayanan, B. (2021). Normalizing flows for
    probabilistic modeling and inference. Journal of Machine Learning Research 22(57).

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._flows import flow_importance_sampling
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = flow_importance_sampling(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.standard_error < 0.02
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    _halves(draws, target.dim)
    flow = fit_flow(target, draws, seed=seed) if flow is None else _check_flow(flow, target)
    proposal = _Defensive(flow, target)
    parts = proposal.sample(num_draws, new_generator(seed, stream="flow importance sampling"))
    x, counts = torch.cat(parts), [len(part) for part in parts]
    log_prior, log_likelihood = target.evaluate(x)
    log_density = log_prior + log_likelihood
    fitted, drawn_from_prior = log_density.split([sum(counts[:_NUM_FITTED]), sum(counts[_NUM_FITTED:])])
    _, problems = without_nan(fitted)
    nan_from_prior = float(drawn_from_prior.isnan().double().mean()) if len(drawn_from_prior) else 0.0
    # Prior draws in the far tails may overflow; their density is unknown.
    log_density = torch.where(log_density.isnan(), -torch.inf, log_density)
    log_weights = log_density.to(torch.float64) - proposal.log_prob(x, log_prior)
    log_weights = torch.where(log_density == -torch.inf, -torch.inf, log_weights).unsqueeze(0)
    total, largest = float(log_mean_exp(log_weights)), float(log_weights.max())
    there = proposal.log_prob(draws.unconstrained, draws.log_prior).flatten()
    above = (draws.log_prior + draws.log_likelihood).flatten() - there
    shape = shape_that_matters(log_weights, above)
    effective = float(weight_effective_sample_size(log_weights[0]))
    problems += stillness_problems(draws.unconstrained, target.names)
    problems += weight_problems(shape, effective)
    problems += missed_draws(lambda _: there, draws, largest)
    return Evidence(
        "flow_importance_sampling",
        total,
        with_rounding(_error(log_weights[0], counts, total), log_density),
        draws.num_gradients + num_draws,
        tuple(problems),
        {
            "pareto_shape": shape,
            "effective_draws": effective,
            "log_largest_weight": max(largest, float(above.max())) - total,
            "r_hat": float(r_hat(draws.unconstrained.movedim(-1, 0)).max()),
            "flow_gain": flow.gain,
            "nan_from_prior": nan_from_prior,
        },
    )


def _error(log_weights: Tensor, counts: list[int], log_mean: float) -> float:
    """Return the standard error of the log mean weight of stratified draws."""
    if min(count for count in counts if count) < _MIN_PART or log_mean == -math.inf:
        return float(independent_log_mean_exp_error(log_weights.unsqueeze(0)))
    part = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return float(stratified_log_mean_exp_error(log_weights, part.to(log_weights.device)))


class _Defensive:
    """Mixture of a flow, the flow with Student-t noise, a Student-t distribution and, if possible, the prior."""

    def __init__(self, flow: FittedFlow, target: Target) -> None:
        self.flow, self.target = flow, target
        self.prior_share = _PRIOR_SHARE if target.can_sample_prior else 0.0
        zero, one = torch.zeros_like(flow.location), torch.eye(flow.dim).to(flow.location)
        self.wider = StudentT(zero, one, _DEGREES_OF_FREEDOM)

    def sample(self, num_draws: int, generator: torch.Generator) -> list[Tensor]:
        """Draw from each part; its number of draws is its share, randomly rounded without bias."""
        fitted = 1 - self.prior_share
        shares = [fitted * (1 - _TAIL_SHARE), fitted * _TAIL_SHARE / 2, fitted * _TAIL_SHARE / 2]
        offset = float(torch.rand((), dtype=torch.float64, generator=generator))
        ends = [math.floor(num_draws * end + offset) for end in accumulate(shares)]
        ends[-1] = ends[-1] if self.prior_share else num_draws
        light, noise, plain, prior = (last - first for first, last in pairwise([0, *ends, num_draws]))
        parts = [self.flow.sample(light, generator)]
        wider = self.wider.sample(noise + plain, generator)
        parts += [self.flow.from_noise(wider[:noise]), self.flow.from_white(wider[noise:])]
        if prior:
            parts.append(self.target.sample_prior(prior, seed=generator).to(parts[0]))
        return parts

    def log_prob(self, x: Tensor, log_prior: Tensor) -> Tensor:
        of_flow = self.flow.defensive_log_prob(x)
        if not self.prior_share:
            return of_flow
        of_prior = log_prior.to(of_flow).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return torch.logaddexp(math.log1p(-self.prior_share) + of_flow, math.log(self.prior_share) + of_prior)


# The learned harmonic mean: posterior draws weighted by a normalizing flow inside the posterior.

CHECK_DRAWS = 2000
_MIN_INSIDE = 100
"""Least number of flow draws in a truncation; in many dimensions the narrowest truncations have none."""
_MAX_OUTSIDE = 0.01
_TEMPERATURES = (0.5, 0.65, 0.8, 0.95)
_SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)


@estimator(Part.POSTERIOR, Part.FLOW)
def learned_harmonic_mean(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, temperature: float | None = None, seed: int = 0
) -> Evidence:
    """Estimate the log evidence by the harmonic mean with a narrowed normalizing flow as its target density.

    The flow is fitted to the first half of each chain. Its noise variance is multiplied by a temperature and its noise
    truncated, so that the flow lies inside the posterior and the ratios of flow to unnormalised posterior stay bounded.
    Their mean over the second half estimates the reciprocal of the evidence. Draws from the flow select the temperature
    and truncation with the smallest mean square ratio, and check that at most 1 % of the narrowed flow has ratios above
    those of the posterior draws.

    Parameters
    ----------
    target : Target
    draws : Draws
    flow : FittedFlow, optional
        Result of :func:`fit_flow` on ``draws``; fitted if not given.
    temperature : float, optional
        In (0, 1]; the noise is then not truncated. Selected by default.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to be split.
    SettingsError
        If the temperature lies outside (0, 1], or the flow has another dimension.

    References
    ----------
    McEwen, J. D., Wallis, C. G. R., Price, M. A., Spurio Mancini, A. (2021). Machine learning assisted Bayesian model
    comparison: learnt harmonic mean estimator. arXiv 2111.12720.

    Polanska, A., Price, M. A., Piras, D., Spurio Mancini, A., McEwen, J. D. (2024). Learned harmonic mean estimation
    of the Bayesian evidence with normalizing flows. arXiv 2405.05969.

    Gelfand, A. E., Dey, D. K. (1994). Bayesian model choice: asymptotics and exact calculations. Journal of the Royal
    Statistical Society B 56, 501-514.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._flows import learned_harmonic_mean
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = learned_harmonic_mean(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.standard_error < 0.04
    (True, True)
    """
    if temperature is not None:
        temperature = real_number("temperature", temperature, "(0, 1]")
    _, second = _halves(draws, target.dim)
    flow = fit_flow(target, draws, seed=seed) if flow is None else _check_flow(flow, target)
    log_density = (draws.log_prior + draws.log_likelihood)[:, -second.shape[1] :]
    check, nan_problems = _Check.of(flow, target, seed)
    narrow = check.least_variable() if temperature is None else _Narrow(temperature, 1.0)
    log_ratios = narrow.log_prob(*flow.to_noise(second)) - log_density.to(torch.float64)
    relative = (log_ratios - log_mean_exp(log_ratios)).exp()
    independent = min(1.0, float(effective_sample_size(relative)) / relative.numel())
    effective = float(weight_effective_sample_size(log_ratios.flatten())) * independent
    shape = shape_that_matters(log_ratios, check.log_ratios(narrow))
    problems = nan_problems + weight_problems(shape, effective)
    outside = check.share_above(narrow, float(log_ratios.max()))
    if not outside <= _MAX_OUTSIDE:  # NaN if no draw was inside
        problems.append(
            f"{100 * outside:.0f} % of the flow lies where the posterior has no draws, so the estimate is too high: "
            "lower the temperature or use more draws"
        )
    return Evidence(
        "learned_harmonic_mean",
        -float(log_mean_exp(log_ratios)),
        with_rounding(float(log_mean_exp_error(log_ratios)), log_density),
        draws.num_gradients + CHECK_DRAWS,
        tuple(problems),
        {"pareto_shape": shape, "effective_ratios": effective, "outside": outside, "flow_gain": flow.gain}
        | {"temperature": narrow.temperature, "share": narrow.share},
    )


class _Narrow(NamedTuple):
    """Normal noise of variance ``temperature``, truncated to its inner ``share``."""

    temperature: float
    share: float

    def radius(self, dim: int) -> float:
        return math.sqrt(self.temperature * 2 * float(scipy.special.gammaincinv(dim / 2, self.share)))

    def log_prob(self, noise: Tensor, log_volume: Tensor) -> Tensor:
        density = log_volume + normal_log_prob(noise, self.temperature) - math.log(self.share)
        return torch.where(noise.norm(dim=-1) <= self.radius(noise.shape[-1]), density, -torch.inf)


class _Check(NamedTuple):
    """Draws from the flow, which detect large ratios sooner than posterior draws."""

    noise: Tensor
    log_volume: Tensor
    log_density: Tensor

    @classmethod
    def of(cls, flow: FittedFlow, target: Target, seed: int) -> tuple[_Check, list[str]]:
        x = flow.sample(CHECK_DRAWS, new_generator(seed, stream="learned harmonic mean"))
        log_density, problems = without_nan(target.log_density(x))
        return cls(*flow.to_noise(x), log_density.to(torch.float64)), problems

    def log_ratios(self, narrow: _Narrow) -> Tensor:
        own = narrow.log_prob(self.noise, self.log_volume)
        # Beyond the truncation the ratio is zero even if the posterior has no mass there.
        return torch.where(own > -torch.inf, own - self.log_density, own)

    def log_shares(self, narrow: _Narrow) -> Tensor:
        """Log density ratio of the narrowed flow to the sampled flow; its exponential has mean one."""
        return narrow.log_prob(self.noise, self.log_volume) - normal_log_prob(self.noise) - self.log_volume

    def least_variable(self) -> _Narrow:
        """Return the temperature and truncation of least mean square ratio, estimated from draws of the flow."""

        def mean_square(narrow: _Narrow) -> float:
            # The mean ratio over the narrowed flow, up to the factor of the evidence.
            return float((self.log_shares(narrow) + self.log_ratios(narrow)).logsumexp(0))

        norms = self.noise.norm(dim=-1)
        candidates = [_Narrow(t, s) for t in _TEMPERATURES for s in _SHARES]
        known = [n for n in candidates if int((norms <= n.radius(self.noise.shape[-1])).sum()) >= _MIN_INSIDE]
        return min(known or candidates[-1:], key=mean_square)

    def share_above(self, narrow: _Narrow, largest: float) -> float:
        """Share of the narrowed flow in which the ratio is above ``largest``."""
        shares = self.log_shares(narrow).exp()
        return float(shares[self.log_ratios(narrow) > largest].sum() / shares.sum())
