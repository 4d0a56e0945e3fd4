"""Held-out log likelihood by annealed importance sampling with HMC, and bidirectional bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor

from bayeskit._core.progress import Bar, progress_bar
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._core.statistics import pareto_shape
from bayeskit._core.texts import short_repr
from bayeskit._logdensity.pyro_distributions import MendedDraws
from bayeskit.errors import ModelError, SettingsError
from bayeskit.inference.held_out._importance import (
    MAX_SHARE,
    HeldOut,
    Minibatches,
    already_validated,
    positive,
    require_acceptance,
    tail_problems,
)
from bayeskit.inference.objectives._latent_density import LatentDensity
from bayeskit.inference.samplers import HMC
from bayeskit.inference.samplers._weighted_particles import sigmoid_schedule

# Chains of every observation between guide or prior and the joint density.

_FIRST_MOVES = 10  # at the first temperature, to find a rough step size
_PILOT_SHARE = 4  # the pilot uses every fourth temperature
_RATE = 0.5  # change of the log step size per unit of difference in acceptance


class AnnealingPath:
    """Annealed chains of every observation."""

    def __init__(self, density: LatentDensity, kernel: HMC, generator: torch.Generator) -> None:
        self._density, self._kernel, self._generator = density, kernel, generator
        self._num_chains = density.layout.num_particles

    def pilot(self, betas: Tensor, target_acceptance: float) -> Tensor:
        """Return a step size for each temperature and observation, ``(T, items)``, from a discarded pilot run."""
        density = self._density
        position = density.sample_initial(self._generator)
        log_step = torch.as_tensor(self._kernel.step_size).to(position).log().expand(density.layout.batch_shape)
        steps = len(betas) - 1
        index = torch.arange(1, steps + 1, _PILOT_SHARE)
        found = []
        for number, i in enumerate(index.tolist()):
            for _ in range(_FIRST_MOVES if number == 0 else 1):
                position, _, acceptance_rate = self._step(position, float(betas[i]), log_step.exp())
                acceptance = density.by_datum(acceptance_rate).mean(0)
                log_step = log_step + _RATE * (acceptance - target_acceptance)
            found.append(log_step)
        return torch.stack(found).exp().repeat_interleave(_PILOT_SHARE, 0)[:steps]

    def anneal(self, betas: Tensor, step_sizes: Tensor, bar: Bar, done: int, position: Tensor | None = None) -> Tensor:
        """Return the log weight of every chain and datum, ``(K, items)``, along ``betas`` from its first to its last.

        Chains start at ``position``, or at draws of the initial distribution; ``step_sizes`` belong to ``betas[1:]``.
        """
        density = self._density
        position = density.sample_initial(self._generator) if position is None else position
        log_weight = torch.zeros(density.num_rows, dtype=torch.float64, device=position.device)
        _, rest = density.joint(position)
        for i in range(1, len(betas)):
            log_weight += float(betas[i] - betas[i - 1]) * rest
            if i + 1 < len(betas):  # no move after the last weight
                position, rest, _ = self._step(position, float(betas[i]), step_sizes[i - 1])
            bar.update(done + i)
        return density.by_datum(log_weight)

    def _step(self, position: Tensor, beta: float, step_size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move all chains at a temperature; return positions, log weights per unit of beta, and acceptance rates."""
        # Rows of one observation share a step size.
        kernel: Any = self._kernel.with_settings(beta=beta, step_size=step_size.repeat(self._num_chains))
        state = kernel.init(self._density, position)
        state, info = kernel.step(self._density, state, generator=self._generator)
        return state.position, state.log_likelihood, info.acceptance_rate


# Held-out log likelihood by annealed importance sampling with Hamiltonian Monte Carlo.

_MIN_FOR_TAIL = 100  # least number of chains for a Pareto fit of their weights
_MAX_ERROR = 0.5  # of a log likelihood; beyond, the delta method is invalid
_MAX_SKEWNESS = 0.4  # over twice the root of the number of chains: the bias of a mean in its estimated errors


def annealed_importance_sampling(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_temperatures: int = 200,
    num_chains: int = 16,
    initial: Literal["prior", "guide"] = "guide",
    kernel: HMC | None = None,
    target_acceptance: float = 0.8,
    batch_size: int | None = None,
    data_plate: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> HeldOut:
    r"""Estimate the log likelihood of each observation by annealing from guide or prior to the joint density.

    Chains start from independent draws of :math:`p_0`, the guide or the prior, and move through :math:`p_0^{1-\beta}
    p(x, z)^\beta` as :math:`\beta` increases from 0 to 1. The mean of their weights is unbiased; the bias of its log is
    minus half its squared standard error, up to terms of higher order. Each observation has its own step size at each
    temperature. A pilot run with other draws tunes and fixes it, which causes no bias.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The latent variables of each observation and its likelihood belong to one plate; all
        latent variables are continuous.
    *args
        Arguments of model and guide: the data.
    num_temperatures : int, default 200
        Steps from 0 to 1, spaced by :func:`sigmoid_schedule`, with one transition per step.
    num_chains : int, default 16
        Independent chains per observation, at least two.
    initial : {"guide", "prior"}, default "guide"
        Distribution of the starting points. A guide narrower than the posterior anneals badly; the prior is never
        narrower.
    kernel : HMC, optional
        The pilot starts from its step size; ``HMC(step_size=0.1, num_steps=5)`` by default.
    target_acceptance : float, default 0.8
    batch_size : int, optional
        As in :func:`importance_sampling`.
    data_plate : str, optional
        Name of the plate of observations; by default the only plate that contains all sites.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    HeldOut
        Has Pareto k from 100 chains on. Not trusted if more than 5 % of the observations have k above 0.7 or a standard
        error above 0.5, or if the weights of all observations are too skewed for the number of chains.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    GuideError
        If guide and model do not match, or a latent site is discrete.
    ModelError
        If there is no plate of observations.

    References
    ----------
    Neal, R. M. (2001). Annealed importance sampling. Statistics and Computing 11, 125-139.

    Wu, Y., Burda, Y., Salakhutdinov, R., Grosse, R. (2017). On the quantitative analysis of decoder-based generative
    models. ICLR.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import annealed_importance_sampling
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 1.0))
    >>> x = torch.tensor([1.0, -0.5])
    >>> result = annealed_importance_sampling(model, guide, x, num_temperatures=20, num_chains=100)
    >>> error = result.log_likelihood - dist.Normal(0.0, 2**0.5).log_prob(x)
    >>> result.trusted, bool((error.abs() < 5 * result.pointwise_standard_error).all())
    (True, True)
    """
    positive(num_temperatures=num_temperatures, num_chains=num_chains, batch_size=batch_size)
    if num_chains < 2:
        raise SettingsError("num_chains must be at least 2: the standard error is estimated from several chains")
    require_acceptance(target_acceptance)
    begin = time.monotonic()
    host = new_generator(seed, stream="held-out annealed importance sampling")
    with global_stream(host):
        data = Minibatches.of(model, guide, args, batch_size, data_plate)
    device = data.particles.log_likelihood.device
    generator = host if device.type == "cpu" else new_generator(seed, device, stream="annealed importance sampling")
    betas = sigmoid_schedule(num_temperatures)
    parts: list[Tensor] = []
    total = num_temperatures * -(-data.num_data // data.batch_size)
    with torch.no_grad(), already_validated(), progress_bar("annealing", total, progress) as bar:
        for _, batch in data:
            with global_stream(host):
                density = LatentDensity.from_pyro(
                    model,
                    guide,
                    batch,
                    num_particles=num_chains,
                    nesting=data.nesting,
                    data_plate=data_plate,
                    initial=initial,
                )
            path = AnnealingPath(density, kernel or HMC(step_size=0.1, num_steps=5), generator)
            step_sizes = path.pilot(betas, target_acceptance)
            parts.append(path.anneal(betas, step_sizes, bar, len(parts) * num_temperatures))
    log_weight = torch.cat(parts, 1).to(torch.float64)
    return _summarised(log_weight, data.particles.log_likelihood.dtype, time.monotonic() - begin)


def _summarised(log_weight: Tensor, dtype: torch.dtype, seconds: float) -> HeldOut:
    """Return the estimates from log weights ``(K, items)``."""
    count = len(log_weight)
    lost = int(log_weight.isnan().sum())
    log_weight = torch.where(log_weight.isnan(), -torch.inf, log_weight)
    log_likelihood = log_weight.logsumexp(0) - math.log(count)
    error = (log_weight - log_likelihood).exp().std(0) / math.sqrt(count)
    pareto_k, problems = None, []
    if count >= _MIN_FOR_TAIL:
        shapes = [pareto_shape(column) for column in log_weight.T]
        pareto_k = torch.tensor(shapes, dtype=torch.float64, device=log_weight.device)
        problems += tail_problems(pareto_k, "use more temperatures, or start at the prior")
    vague = float((~(error <= _MAX_ERROR)).to(torch.float64).mean())
    if vague > MAX_SHARE:
        problems.append(
            f"the chains of {100 * vague:.1f} % of the data disagree (standard error above {_MAX_ERROR}): use more "
            "temperatures, or start at the prior"
        )
    # A few skewed weights understate their variance; data share their chains' weakness, so that all are looked at.
    relative = (log_weight - log_likelihood).exp() - 1
    skewness = float(relative.pow(3).mean() / relative.square().mean().pow(1.5))
    if skewness > 2 * math.sqrt(count) * _MAX_SKEWNESS:
        problems.append(
            f"the weights are so skewed (skewness {skewness:.1f}) that {count} chains understate their errors: use "
            "more chains or temperatures, or start at the prior"
        )
    if lost:
        problems.append(f"{lost} weights are NaN and were counted as zero: correct the model or the guide")
    error = torch.hypot(error, torch.finfo(dtype).eps * log_likelihood.abs())
    return HeldOut("annealed_importance_sampling", log_likelihood, error, count, pareto_k, tuple(problems), seconds)


# Lower and upper bounds on the log likelihood of data simulated from the model.


@dataclass(frozen=True)
class Sandwich:
    """Stochastic lower and upper bounds on the log likelihood of simulated data.

    Attributes
    ----------
    lower, upper : Tensor
        Bounds per observation, ``(items,)``, in nats. They hold in expectation; Monte Carlo noise can violate them.
    """

    lower: Tensor
    upper: Tensor

    __repr__ = short_repr

    @property
    def gap(self) -> float:
        """Mean distance of the bounds; in expectation at least the mean error of either bound."""
        return float((self.upper - self.lower).mean())

    @property
    def gap_standard_error(self) -> float:
        """Standard error of :attr:`gap`, from its variance over observations."""
        return float((self.upper - self.lower).std()) / math.sqrt(len(self.lower))


def bidirectional_annealing(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_temperatures: int = 200,
    num_chains: int = 16,
    initial: Literal["prior", "guide"] = "guide",
    kernel: HMC | None = None,
    target_acceptance: float = 0.8,
    batch_size: int | None = None,
    data_plate: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Sandwich:
    """Bound the log likelihood of simulated data from both sides, with exact posterior draws.

    Latent variables and data are drawn from the model, so the latent variables are exact posterior draws. Annealing
    from guide or prior to the joint density gives a lower bound of the log likelihood; reverse annealing from the
    latent variables gives an upper bound. A small gap validates the same settings for similar data.

    Parameters
    ----------
    model, guide : callable
        As for :func:`annealed_importance_sampling`.
    *args
        Arguments of model and guide. Observed tensors only determine the shape of the simulated data.
    num_temperatures, num_chains, initial, kernel, target_acceptance, batch_size, data_plate, seed, progress
        As for :func:`annealed_importance_sampling`.

    Returns
    -------
    Sandwich

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    ModelError
        If data cannot be simulated, because the model has a factor or transforms its arguments before observing them.
    GuideError
        If guide and model do not match, or a latent site is discrete.

    References
    ----------
    Grosse, R. B., Ghahramani, Z., Adams, R. P. (2015). Sandwiching the marginal likelihood using bidirectional Monte
    Carlo. arXiv:1511.02543.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import bidirectional_annealing
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 0.8))
    >>> bounds = bidirectional_annealing(model, guide, torch.zeros(30), num_temperatures=20)
    >>> abs(bounds.gap) < 0.05
    True
    """
    positive(num_temperatures=num_temperatures, num_chains=num_chains, batch_size=batch_size)
    require_acceptance(target_acceptance)
    host = new_generator(seed, stream="bidirectional annealing")
    with global_stream(host):
        data = Minibatches.of(model, guide, args, batch_size, data_plate)
    device = data.particles.log_likelihood.device
    generator = host if device.type == "cpu" else new_generator(seed, device, stream="bidirectional annealing")
    betas, forward, backward = sigmoid_schedule(num_temperatures), [], []
    total, done = 2 * num_temperatures * -(-data.num_data // data.batch_size), 0
    with torch.no_grad(), already_validated(), progress_bar("bidirectional annealing", total, progress) as bar:
        for _, batch in data:

            def density_of(arguments: tuple[Any, ...], num_particles: int) -> LatentDensity:
                return LatentDensity.from_pyro(
                    model,
                    guide,
                    arguments,
                    num_particles=num_particles,
                    nesting=data.nesting,
                    data_plate=data_plate,
                    initial=initial,
                )

            with global_stream(host):
                simulated, codes = _simulated(model, batch)
                position = density_of(simulated, 1).flatten(codes).repeat(num_chains, 1)
                density = density_of(simulated, num_chains)
            path = AnnealingPath(density, kernel or HMC(step_size=0.1, num_steps=5), generator)
            step_sizes = path.pilot(betas, target_acceptance)
            forward.append(path.anneal(betas, step_sizes, bar, done))
            # From the posterior back, where moves are those of the same temperatures.
            back = step_sizes[:-1].flip(0)
            backward.append(path.anneal(betas.flip(0), back, bar, done + num_temperatures, position))
            done += 2 * num_temperatures
    log_count = math.log(num_chains)
    lower = torch.cat(forward, 1).logsumexp(0) - log_count
    upper = log_count - torch.cat(backward, 1).logsumexp(0)
    return Sandwich(lower, upper)


def _simulated(model: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Draw latent variables and data; return the arguments with simulated data, and the latent variables."""
    with MendedDraws():
        given: Mapping[str, Any] = poutine.trace(model).get_trace(*args).nodes
        drawn: Mapping[str, Any] = poutine.trace(poutine.uncondition(model)).get_trace(*args).nodes
    data: dict[int, Tensor] = {}
    codes: dict[str, Tensor] = {}
    for name, site in given.items():
        if site["type"] != "sample" or name not in drawn or site["infer"].get("_deterministic"):
            continue
        if not site["is_observed"]:
            codes[name] = drawn[name]["value"]
            continue
        found = [i for i, x in enumerate(args) if x is site["value"]]
        if isinstance(site["fn"], Unit) or not found:
            raise ModelError(
                f"data of site {name!r} cannot be simulated, because "
                + ("it is a factor" if isinstance(site["fn"], Unit) else "its observed value is no argument")
                + "; write the model with pyro.sample(..., obs=x) for an argument x of the model"
            )
        data[found[0]] = drawn[name]["value"]
    return tuple(data.get(i, x) for i, x in enumerate(args)), codes
