"""A normalizing flow fitted to posterior draws, whose draws and densities are both cheap."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from bayeskit._flows import zuko
from bayeskit._settings import whole_number
from bayeskit._statistics import log_mean_exp, mean_error, pareto_shape
from bayeskit._torch import global_stream, new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence.checks import belongs, finite_chains
from bayeskit.target import Target

MIN_HALF = 8
MIN_TRAINING = 500  # fewer draws than these say less about a flow than about a normal
MAX_TRAINING, MAX_HELD_OUT = 20_000, 2000
HELD_OUT_SHARE = 0.2
BINS, HIDDEN, NUM_PAIRS = 8, (32, 32), 2
MIN_BOUND, MARGIN = 5.0, 1.1
BATCH, STEPS_PER_CHECK, PATIENCE = 256, 20, 2
LEARNING_RATES = (1e-2, 2e-3)
MAX_GRADIENT, MAX_RESIDUAL = 5.0, 3.0
NEARLY_EQUAL = 0.04  # squared coefficient of variation of weights that no flow need lower
BOUNDED = 10.0  # weights below so many times their mean have no tail whose shape could matter
WORTHWHILE = 0.01  # relative decrease of the mean square weight that is worth further steps
MIN_GAIN_IN_ERRORS = 2.0
TAIL_SHARE, DEGREES_OF_FREEDOM = 0.3, 5.0


@dataclass(frozen=True, eq=False)
class FittedFlow:
    """A distribution over unconstrained vectors: a whitened coupling flow, or a normal where that does as well.

    Computed in double precision whatever the target's dtype, since inverting a spline in single precision can fail.

    Attributes
    ----------
    location : Tensor
        Mean of the draws, shape ``(d,)``.
    factor : Tensor
        Cholesky factor of their covariance, ``(d, d)``.
    transform : nn.Module or None
        From whitened coordinates to noise; None for the normal.
    gain : float
        Log of the factor by which it multiplies, against the normal and by held-out draws, the effective number of
        draws of importance sampling, both with wider tails; zero for the normal.
    gain_error : float
        Its standard error; NaN where no flow was tried.
    dtype : torch.dtype
        Of the draws.
    """

    location: Tensor
    factor: Tensor
    transform: nn.Module | None = None
    gain: float = 0.0
    gain_error: float = math.nan
    dtype: torch.dtype = field(default=torch.float64)

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return len(self.location)

    @property
    def is_normal(self) -> bool:
        """Whether the normal did as well as a flow."""
        return self.transform is None

    def to_white(self, x: Tensor) -> Tensor:
        """Return ``x``, ``(*batch, d)``, in coordinates where the draws have mean zero and no correlation."""
        centred = x.to(torch.float64) - self.location
        return torch.linalg.solve_triangular(self.factor, centred.unsqueeze(-1), upper=False).squeeze(-1)

    def from_white(self, white: Tensor) -> Tensor:
        """Return vectors, in the dtype of the draws, from whitened ones."""
        return (self.location + white @ self.factor.T).to(self.dtype)

    @torch.no_grad()
    def to_noise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standard normal noise that ``x``, ``(*batch, d)``, stems from, and the log volume ``(*batch)``."""
        with one_thread():
            noise, log_volume = to_noise(self.transform, self.to_white(x))
        return noise, log_volume - self.factor.diagonal().log().sum()

    @torch.no_grad()
    def from_noise(self, noise: Tensor) -> Tensor:
        """Return the vectors that stem from ``noise``, ``(*batch, d)``, in the dtype of the draws."""
        white = noise.to(self.location)
        if self.transform is not None:
            with one_thread():
                white = self.transform().inv(white)
        return self.from_white(white)

    @torch.no_grad()
    def defensive_log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the mixture with wider tails that :func:`flow_importance_sampling` fits."""
        white = self.to_white(x)
        with one_thread():
            density = defensive_density(*to_noise(self.transform, white), white)
        return density - self.factor.diagonal().log().sum()

    def log_prob(self, x: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log densities, ``(*batch, d) -> (*batch)``, in double precision.

        Parameters
        ----------
        x : Tensor
        temperature : float, default 1.0
            Factor of the variance of the noise that the flow starts from; below one, the distribution is narrower.
        """
        noise, log_volume = self.to_noise(x)
        return log_volume + normal_density(noise, temperature)

    def sample(self, num_draws: int, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """Draw vectors, ``(num_draws, d)``, in the dtype of the draws that the flow was fitted to."""
        shape = (num_draws, self.dim)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return self.from_noise(math.sqrt(temperature) * noise)


def fit_flow(target: Target, draws: Draws, *, seed: int = 0, max_steps: int = 300) -> FittedFlow:
    """Fit a normalizing flow to the first half of each chain.

    A coupling flow of rational-quadratic splines on whitened coordinates, which starts as the normal distribution of
    the same mean and covariance. It is fitted by maximum likelihood and by the variance of the log ratio between the
    density recorded with the draws and its own, which knows the shape of the posterior without the noise of the draws.
    The last fifth of them says when to stop.

    Where importance weights from the normal are nearly equal already, none is fitted. Where a flow does not make them
    more equal than the normal does, by more than twice the error of the difference on held-out draws, or where there
    are too few draws to tell, the normal is returned.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    seed : int, default 0
    max_steps : int, default 300
        Steps of the optimiser; zero asks for the normal.

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
    >>> from bayeskit.inference.evidence.flows import fit_flow
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> fit_flow(draws.target, draws).is_normal  # as the posterior is
    True
    """
    belongs(draws, target)
    max_steps = whole_number("max_steps", max_steps, least=0)
    draws = finite_chains(draws)
    first, _ = halves(draws, target.dim)
    # Copies, which autograd can use even where the draws were made in inference mode.
    with torch.inference_mode(False):
        first = first.to(torch.float64).clone()
        log_density = (draws.log_prior + draws.log_likelihood)[:, : first.shape[1]].to(torch.float64).clone()
    location, factor = _whitening(first.flatten(0, 1))
    white = torch.linalg.solve_triangular(factor, (first - location).unsqueeze(-1), upper=False).squeeze(-1)
    normal = FittedFlow(location, factor, dtype=draws.unconstrained.dtype)
    num_held_out = round(HELD_OUT_SHARE * white.shape[1])
    training = white[:, :-num_held_out].flatten(0, 1)
    if max_steps == 0 or len(training) < max(MIN_TRAINING, 10 * target.dim):
        return normal
    held_out = _HeldOut.of(white[:, -num_held_out:], log_density[:, -num_held_out:])
    # Of this much the errors of mean and covariance are the cause, twice over for draws that are not independent.
    unavoidable = target.dim * (target.dim + 3) / len(training)
    if held_out.variation(None) < NEARLY_EQUAL + unavoidable:
        return normal
    generator = new_generator(seed, stream="flow")
    index = torch.randperm(len(training), generator=generator)[:MAX_TRAINING].to(training.device)
    heights = log_density[:, :-num_held_out].flatten()[index]
    bound = max(MIN_BOUND, MARGIN * float(white.abs().max()))
    with one_thread(), torch.inference_mode(False), torch.enable_grad():
        transform = _new_transform(target.dim, bound, generator).to(device=location.device, dtype=torch.float64)
        _train(transform, training[index], heights, held_out, max_steps, generator)
    gain, error = held_out.gain(transform)
    if not gain > MIN_GAIN_IN_ERRORS * error:
        return FittedFlow(location, factor, None, 0.0, error, normal.dtype)
    return FittedFlow(location, factor, transform, gain, error, normal.dtype)


def halves(draws: Draws, dim: int) -> tuple[Tensor, Tensor]:
    """Return the first half of each chain, to fit to, and the second, to evaluate at.

    Raises
    ------
    DrawsError
        If there are too few of them.
    """
    half = draws.num_draws // 2
    if half < MIN_HALF or half * draws.num_chains < 2 * dim:
        raise DrawsError(
            f"{draws.num_chains} chains of {draws.num_draws} draws are too few to fit a {dim}-dimensional "
            f"distribution to one half of them; give at least {2 * MIN_HALF} draws a chain and {4 * dim} in all"
        )
    return draws.unconstrained[:, :half], draws.unconstrained[:, half:]


def check_flow(flow: FittedFlow, target: Target) -> FittedFlow:
    """Refuse a flow of another dimension.

    Raises
    ------
    SettingsError
        If its dimension is not that of ``target``.
    """
    if flow.dim != target.dim:
        raise SettingsError(f"the flow has dimension {flow.dim}, the target {target.dim}; fit one to its draws")
    return flow


def shape_that_matters(log_weights: Tensor, others: Tensor) -> float:
    """Pareto shape of weights; zero where neither they nor ``others``, which find large ones sooner, are large.

    A few weights that differ from all others pass for a heavy tail even where no weight can dominate.
    """
    mean = float(log_mean_exp(log_weights.reshape(1, -1)))
    largest = max(float(log_weights.max()), float(others.max()) if others.numel() else -math.inf)
    shape = pareto_shape(log_weights)
    return min(shape, 0.0) if largest - mean < math.log(BOUNDED) else shape


def to_noise(transform: nn.Module | None, white: Tensor) -> tuple[Tensor, Tensor]:
    """Return noise and log volume of whitened vectors."""
    if transform is None:
        return white, white.new_zeros(white.shape[:-1])
    noise, log_volume = transform().call_and_ladj(white)
    return noise, log_volume


def normal_density(noise: Tensor, temperature: float = 1.0) -> Tensor:
    """Log density of normal noise, ``(*batch, d) -> (*batch)``."""
    constant = 0.5 * noise.shape[-1] * math.log(2 * math.pi * temperature)
    return -noise.square().sum(-1) / (2 * temperature) - constant


def student_density(noise: Tensor) -> Tensor:
    """Log density of the wider noise, multivariate Student-t, ``(*batch, d) -> (*batch)``."""
    d, df = noise.shape[-1], DEGREES_OF_FREEDOM
    constant = math.lgamma((df + d) / 2) - math.lgamma(df / 2) - d / 2 * math.log(df * math.pi)
    return constant - (df + d) / 2 * torch.log1p(noise.square().sum(-1) / df)


def defensive_density(noise: Tensor, log_volume: Tensor, white: Tensor) -> Tensor:
    """Log density of the mixture of the flow, the flow from wider noise, and the wider noise itself."""
    light = math.log1p(-TAIL_SHARE) + log_volume + normal_density(noise)
    tails = torch.logaddexp(log_volume + student_density(noise), student_density(white))
    return torch.logaddexp(light, math.log(TAIL_SHARE / 2) + tails)


@dataclass(frozen=True)
class _HeldOut:
    """Whitened draws ``(chains, draws, d)`` and their log densities, by which proposals are compared."""

    white: Tensor
    log_density: Tensor

    @classmethod
    def of(cls, white: Tensor, log_density: Tensor) -> _HeldOut:
        count, length = log_density.numel(), log_density.shape[1]
        thin = math.ceil(count / MAX_HELD_OUT)
        if length >= 8 * thin:
            return cls(white[:, ::thin], log_density[:, ::thin])
        return cls(white[::thin], log_density[::thin])

    @torch.no_grad()
    def log_weights(self, transform: nn.Module | None) -> Tensor:
        """Of importance sampling, at the held-out draws."""
        with one_thread():
            return self.log_density - defensive_density(*to_noise(transform, self.white), self.white)

    def variation(self, transform: nn.Module | None) -> float:
        """Squared coefficient of variation of the weights of draws from the proposal, where it is small."""
        log_weights = self.log_weights(transform)
        # The log of the mean exceeds the mean log by half the variance. Few large reciprocals cannot spoil it.
        return 2 * float(log_mean_exp(log_weights) - log_weights.mean())

    def gain(self, transform: nn.Module) -> tuple[float, float]:
        """Log ratio of the normal's mean square weight to the flow's, and its error."""
        plain, flow = self.log_weights(None), self.log_weights(transform)
        gain = float(log_mean_exp(plain) - log_mean_exp(flow))
        influence = (plain - log_mean_exp(plain)).exp() - (flow - log_mean_exp(flow)).exp()
        if influence.shape[1] >= MIN_HALF:
            return gain, float(mean_error(influence))
        # Chains too short for autocorrelation count as independent.
        return gain, float(influence.std()) / math.sqrt(influence.numel())


def _whitening(x: Tensor) -> tuple[Tensor, Tensor]:
    covariance = torch.cov(x.T).reshape(x.shape[1], x.shape[1])
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate does not move, or two move as one; "
            "check the chains and the model"
        )
    return x.mean(0), factor


def _new_transform(dim: int, bound: float, generator: torch.Generator) -> nn.Module:
    """Create pairs of couplings with complementary random masks; together they are the identity."""
    shapes = [(BINS,), (BINS,), (BINS - 1,)]
    # The splines reach beyond all draws; further out they are the identity, which keeps the tails of the noise.
    spline = partial(zuko.transforms.MonotonicRQSTransform, bound=bound)
    if dim == 1:
        single = zuko.flows.ElementWiseTransform(1, univariate=spline, shapes=shapes)
        with torch.no_grad():
            for parameter in single.parameters():
                parameter.zero_()
        return zuko.lazy.LazyComposedTransform(single)
    couplings = []
    for _ in range(NUM_PAIRS):
        mask = torch.randperm(dim, generator=generator) % 2 == 0
        for half in (mask, ~mask):
            with global_stream(generator):
                coupling = zuko.flows.GeneralCouplingTransform(
                    dim, mask=half, univariate=spline, shapes=shapes, hidden_features=HIDDEN
                )
            with torch.no_grad():
                coupling.hyper[-1].weight.zero_()
                coupling.hyper[-1].bias.zero_()
            couplings.append(coupling)
    return zuko.lazy.LazyComposedTransform(*couplings)


def _loss(transform: nn.Module, white: Tensor, log_density: Tensor) -> Tensor:
    """Cross-entropy, and half the variance of the log ratio, in which outliers count less."""
    noise, log_volume = to_noise(transform, white)
    own = log_volume + normal_density(noise)
    ratio = log_density - own
    middle = ratio.detach().median()
    centre = middle + (ratio.detach() - middle).clamp(-MAX_RESIDUAL, MAX_RESIDUAL).mean()
    spread = nn.functional.huber_loss(ratio, centre.expand_as(ratio), delta=MAX_RESIDUAL)
    return spread - own.mean()


def _train(
    transform: nn.Module,
    training: Tensor,
    heights: Tensor,
    held_out: _HeldOut,
    max_steps: int,
    generator: torch.Generator,
) -> None:
    """Leave in ``transform`` the parameters best on the held-out draws; where they stall, steps get shorter."""
    parameters = list(transform.parameters())
    best = [parameter.detach().clone() for parameter in parameters]
    lowest, step = float(log_mean_exp(held_out.log_weights(None))), 0
    for rate in LEARNING_RATES:
        _restore(parameters, best)
        optimizer, stalls = torch.optim.Adam(parameters, rate), 0
        while step < max_steps and stalls < PATIENCE:
            step += 1
            index = torch.randint(len(training), (BATCH,), generator=generator).to(training.device)
            optimizer.zero_grad()
            _loss(transform, training[index], heights[index]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT)
            optimizer.step()
            if step % STEPS_PER_CHECK and step < max_steps:
                continue
            mean_square, stalls = float(log_mean_exp(held_out.log_weights(transform))), stalls + 1
            if mean_square < lowest - WORTHWHILE:
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
