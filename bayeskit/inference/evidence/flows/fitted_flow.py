"""A normalizing flow fitted to posterior draws, whose draws and densities are both cheap."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bayeskit._flows import zuko
from bayeskit._settings import whole_number
from bayeskit._statistics import mean_error
from bayeskit._torch import global_stream, new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence.checks import belongs, finite_chains
from bayeskit.target import Target

MIN_HALF = 8
MIN_TRAINING = 500  # fewer draws than these say less about a flow than about a normal
MAX_TRAINING, MAX_HELD_OUT = 20_000, 2500
HELD_OUT_SHARE = 0.2
BINS, HIDDEN, NUM_PAIRS = 8, (32, 32), 2
BATCH, STEPS_PER_CHECK, PATIENCE = 256, 25, 3
LEARNING_RATES = (5e-3, 1e-3, 2e-4)
MAX_GRADIENT = 5.0
MIN_GAIN_IN_ERRORS = 2.0


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
        Mean log density of held-out draws above the normal's, in nats; zero for the normal.
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

    @torch.no_grad()
    def log_prob(self, x: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log densities, ``(*batch, d) -> (*batch)``, in double precision.

        Parameters
        ----------
        x : Tensor
        temperature : float, default 1.0
            Factor of the variance of the noise that the flow starts from; below one, the distribution is narrower.
        """
        centred = x.to(torch.float64) - self.location
        white = torch.linalg.solve_triangular(self.factor, centred.unsqueeze(-1), upper=False).squeeze(-1)
        with one_thread():
            density = noise_density(self.transform, white, temperature)
        return density - self.factor.diagonal().log().sum()

    @torch.no_grad()
    def sample(self, num_draws: int, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """Draw vectors, ``(num_draws, d)``, in the dtype of the draws that the flow was fitted to."""
        shape = (num_draws, self.dim)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        white = math.sqrt(temperature) * noise.to(self.location.device)
        if self.transform is not None:
            with one_thread():
                white = self.transform().inv(white)
        return (self.location + white @ self.factor.T).to(self.dtype)


def fit_flow(target: Target, draws: Draws, *, seed: int = 0, max_steps: int = 800) -> FittedFlow:
    """Fit a normalizing flow to the first half of each chain by maximum likelihood.

    A coupling flow of rational-quadratic splines on whitened coordinates, which starts as the normal distribution of
    the same mean and covariance and stops early by the last fifth of those draws. Where it does not beat that normal
    on them, by more than twice the error of the difference, or where there are too few draws to tell, the normal is
    returned.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    seed : int, default 0
    max_steps : int, default 800
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
    first, _ = halves(finite_chains(draws), target.dim)
    # A copy, which autograd can use even where the draws were made in inference mode.
    with torch.inference_mode(False):
        first = first.to(torch.float64).clone()
    location, factor = _whitening(first.flatten(0, 1))
    white = torch.linalg.solve_triangular(factor, (first - location).unsqueeze(-1), upper=False).squeeze(-1)
    normal = FittedFlow(location, factor, dtype=draws.unconstrained.dtype)
    generator = new_generator(seed, stream="flow")
    num_held_out = round(HELD_OUT_SHARE * white.shape[1])
    training, held_out = white[:, :-num_held_out].flatten(0, 1), white[:, -num_held_out:]
    if max_steps == 0 or len(training) < max(MIN_TRAINING, 10 * target.dim):
        return normal
    training = training[torch.randperm(len(training), generator=generator)[:MAX_TRAINING].to(training.device)]
    thin = math.ceil(held_out.shape[0] * held_out.shape[1] / MAX_HELD_OUT)
    held_out = held_out[:, ::thin] if held_out.shape[1] >= 8 * thin else held_out[::thin]
    with one_thread(), torch.inference_mode(False), torch.enable_grad():
        transform = _new_transform(target.dim, generator).to(device=location.device, dtype=torch.float64)
        _train(transform, training, held_out, max_steps, generator)
        with torch.no_grad():
            gains = noise_density(transform, held_out) - noise_density(None, held_out)
    gain, error = float(gains.mean()), _error(gains)
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


def noise_density(transform: nn.Module | None, white: Tensor, temperature: float = 1.0) -> Tensor:
    """Log density of whitened vectors, ``(*batch, d) -> (*batch)``."""
    log_volume = torch.zeros((), dtype=white.dtype, device=white.device)
    if transform is not None:
        white, log_volume = transform().call_and_ladj(white)
    constant = 0.5 * white.shape[-1] * math.log(2 * math.pi * temperature)
    return log_volume - white.square().sum(-1) / (2 * temperature) - constant


def _whitening(x: Tensor) -> tuple[Tensor, Tensor]:
    covariance = torch.cov(x.T).reshape(x.shape[1], x.shape[1])
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate does not move, or two move as one; "
            "check the chains and the model"
        )
    return x.mean(0), factor


def _new_transform(dim: int, generator: torch.Generator) -> nn.Module:
    """Create pairs of couplings with complementary random masks; together they are the identity."""
    shapes = [(BINS,), (BINS,), (BINS - 1,)]
    spline = zuko.transforms.MonotonicRQSTransform
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


def _train(
    transform: nn.Module, training: Tensor, held_out: Tensor, max_steps: int, generator: torch.Generator
) -> None:
    """Leave in ``transform`` the parameters that are best on ``held_out``; where they stall, the steps get shorter."""
    parameters = list(transform.parameters())
    best = [parameter.detach().clone() for parameter in parameters]
    best_density, step = _held_out_density(transform, held_out), 0
    for rate in LEARNING_RATES:
        _restore(parameters, best)
        optimizer, stalls, improved = torch.optim.Adam(parameters, rate), 0, False
        while step < max_steps and stalls < PATIENCE:
            step += 1
            index = torch.randint(len(training), (BATCH,), generator=generator).to(training.device)
            optimizer.zero_grad()
            (-noise_density(transform, training[index]).mean()).backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT)
            optimizer.step()
            if step % STEPS_PER_CHECK and step < max_steps:
                continue
            density, stalls = _held_out_density(transform, held_out), stalls + 1
            if density > best_density:
                best_density, stalls, improved = density, 0, True
                best = [parameter.detach().clone() for parameter in parameters]
        if rate < LEARNING_RATES[0] and not improved:
            break
    _restore(parameters, best)
    for parameter in parameters:
        parameter.requires_grad_(False)


@torch.no_grad()
def _held_out_density(transform: nn.Module, held_out: Tensor) -> float:
    return float(noise_density(transform, held_out).mean())


def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _error(gains: Tensor) -> float:
    """Return the error of the mean, ``(chains, draws)``; chains too short for autocorrelation count as independent."""
    if gains.shape[1] >= MIN_HALF:
        return float(mean_error(gains))
    return float(gains.std()) / math.sqrt(gains.numel())
