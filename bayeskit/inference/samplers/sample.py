"""Posterior draws and tempered ladders."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import beta as beta_distribution
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.samplers.adaptation import Adaptation
from bayeskit.inference.samplers.hmc import HMC
from bayeskit.inference.samplers.run import CHECKPOINT_SECONDS, RunResult, RunSettings, run
from bayeskit.target import Target


def sample(
    target: Target,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    seed: int = 0,
    *,
    kernel: HMC | None = None,
    target_acceptance: float = 0.8,
    initial: Tensor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = True,
) -> Draws:
    """Draw from the posterior with batched Hamiltonian Monte Carlo.

    Parameters
    ----------
    target : Target
    num_chains : int, default 4
        All chains advance together, one batched gradient a step.
    num_warmup, num_samples : int, default 500 and 1000
        Adapting iterations, thrown away, and iterations kept, of each chain.
    seed : int, default 0
    kernel : HMC, optional
        Its jitter and energy limit stay as they are, its step size is where warm-up
        starts; metric and number of steps are learnt.
    target_acceptance : float, default 0.8
        Raise it towards one where there are divergences.
    initial : Tensor, optional
        Unconstrained starting points, ``(d,)`` or ``(num_chains, d)``; by default each
        chain takes the best of ten prior draws.
    checkpoint : path, optional
        File that holds the run's state; if it exists, the run resumes from it and
        ends bit for bit as if it had not been interrupted.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    Draws

    Raises
    ------
    InitializationError
        If no chain has a finite density at its start.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    SettingsError
        If the kernel is tempered, or there is nothing to run.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([0.5, 1.5], dtype=torch.float64))
    >>> draws = bk.sample(target, num_warmup=100, num_samples=200, seed=1)
    >>> abs(float(draws.values()["mean"].mean()) - 2 / 3) < 0.15
    True
    """
    if kernel is not None and not bool((torch.as_tensor(kernel.beta) == 1).all()):
        raise SettingsError("sample draws from the posterior, so its kernel needs beta=1; use sample_ladder to temper")
    settings = RunSettings(
        num_chains, num_warmup, num_samples, seed, checkpoint, checkpoint_seconds, progress, "posterior"
    )
    adaptation = Adaptation(
        kernel or HMC(),
        num_warmup,
        target_acceptance=target_acceptance,
        initial_inverse_mass=prior_variance(target, seed),
    )
    result = run(target, adaptation, settings, initial=initial)
    facts = {"sampler": "HMC", "num_warmup": num_warmup, "seed": seed, "target_acceptance": target_acceptance}
    draws = _as_draws(target, result, torch.ones(num_chains, dtype=target.dtype, device=target.device), facts)
    divergences = int(draws.sample_stats["diverging"].sum())
    if divergences:
        warnings.warn(
            f"{divergences} of {num_chains * num_samples} transitions diverged, so parts of the posterior may be "
            "missed; raise target_acceptance or reparameterise the model",
            SamplingWarning,
            stacklevel=2,
        )
    return draws


@dataclass(frozen=True)
class Ladder:
    """Draws at increasing inverse temperatures, from the prior to the posterior.

    Attributes
    ----------
    beta : Tensor
        Shape ``(T,)``, from 0 to 1.
    draws : Draws
        All chains, those of one temperature next to each other.
    """

    beta: Tensor
    draws: Draws

    @property
    def log_likelihood(self) -> Tensor:
        """Untempered log likelihood of every draw, ``(T, chains, draws)``."""
        return self.draws.log_likelihood.reshape(len(self.beta), -1, self.draws.num_draws)

    @property
    def num_evaluations(self) -> int:
        """Gradient evaluations spent, warm-up included."""
        return self.draws.num_gradients


def sample_ladder(
    target: Target,
    num_temperatures: int = 50,
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 500,
    seed: int = 0,
    *,
    beta: Sequence[float] | Tensor | None = None,
    target_acceptance: float = 0.8,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = True,
) -> Ladder:
    """Draw from the power posteriors ``prior * likelihood ** beta``, all temperatures in one batch.

    Parameters
    ----------
    target : Target
        Its prior must be one it can draw from.
    num_temperatures : int, default 50
        Number of steps of the ladder; ``beta`` takes ``num_temperatures + 1`` values, the
        quantiles of a Beta(0.3, 1) distribution, which crowd towards the prior.
    num_chains : int, default 8
        Chains at each temperature.
    num_warmup, num_samples : int, default 200 and 500
    seed : int, default 0
    beta : sequence of float, optional
        Another ladder, increasing from 0 to 1.
    target_acceptance, checkpoint, checkpoint_seconds, progress
        As in :func:`sample`.

    Returns
    -------
    Ladder
        At ``beta = 0`` the draws come straight from the prior, independent.

    Raises
    ------
    SettingsError
        If the ladder does not increase from 0 to 1.

    References
    ----------
    Xie, W., Lewis, P. O., Fan, Y., Kuo, L., Chen, M.-H. (2011). Improving marginal
    likelihood estimation for Bayesian phylogenetic model selection. Systematic
    Biology 60, 150-160.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> ladder = sample_ladder(exact.get("beta_binomial").target(), 8, num_warmup=50, num_samples=20)
    >>> ladder.log_likelihood.shape
    torch.Size([9, 8, 20])
    """
    levels = _levels(num_temperatures, beta).to(target.dtype).to(target.device)
    warm = levels[1:]
    per_chain = warm.repeat_interleave(num_chains)
    settings = RunSettings(
        len(per_chain),
        num_warmup,
        num_samples,
        seed,
        checkpoint,
        checkpoint_seconds,
        progress,
        "tempered ladder",
    )
    adaptation = Adaptation(
        HMC(beta=per_chain),
        num_warmup,
        num_groups=len(warm),
        target_acceptance=target_acceptance,
        initial_inverse_mass=prior_variance(target, seed),
    )
    result = run(target, adaptation, settings)
    facts = {"sampler": "HMC", "num_warmup": num_warmup, "seed": seed, "target_acceptance": target_acceptance}
    draws = _as_draws(target, result, per_chain, facts)
    return Ladder(levels, _with_prior(target, draws, num_chains, seed))


def _levels(num_temperatures: int, beta: Sequence[float] | Tensor | None) -> Tensor:
    if beta is None:
        if num_temperatures < 2:
            raise SettingsError(f"num_temperatures must be at least 2, not {num_temperatures}")
        grid = torch.linspace(0, 1, num_temperatures + 1, dtype=torch.float64)
        return torch.as_tensor(beta_distribution.ppf(grid.numpy(), 0.3, 1.0))
    levels = torch.as_tensor(beta, dtype=torch.float64)
    if levels.dim() != 1 or len(levels) < 3 or levels[0] != 0 or levels[-1] != 1 or bool((levels.diff() <= 0).any()):
        raise SettingsError("beta must increase strictly from 0 to 1 in at least two steps")
    return levels


def _with_prior(target: Target, draws: Draws, num_chains: int, seed: int) -> Draws:
    """Put exact prior draws, as ``beta = 0``, in front of the ladder's chains."""
    count = num_chains * draws.num_draws
    prior = target.sample_prior(count, new_generator(seed, stream="ladder prior")).to(target.device)
    log_prior, log_likelihood = target.evaluate(prior)
    shape = (num_chains, draws.num_draws)
    stats = {
        k: torch.cat([torch.full(shape, _NEUTRAL.get(k, 0), dtype=v.dtype, device=v.device), v])
        for k, v in draws.sample_stats.items()
    }
    return Draws(
        torch.cat([prior.reshape(*shape, -1), draws.unconstrained]),
        torch.cat([log_prior.reshape(shape), draws.log_prior]),
        torch.cat([log_likelihood.reshape(shape), draws.log_likelihood]),
        torch.cat([torch.zeros_like(draws.beta[:num_chains]), draws.beta]),
        stats,
        draws.num_gradients + count,
        draws.seconds,
        draws.settings,
        target,
    )


_NEUTRAL = {"acceptance_rate": 1}


def prior_variance(target: Target, seed: int, num_draws: int = 200) -> Tensor | None:
    """Return the prior's variance of each coordinate, shape ``(d,)``: a first scale for the metric."""
    if not target.can_sample_prior:
        return None
    draws = target.sample_prior(num_draws, new_generator(seed, stream="prior variance"))
    # Quartiles, because a heavy-tailed prior has no variance to speak of.
    low, high = draws.quantile(torch.tensor([0.25, 0.75], dtype=draws.dtype, device=draws.device), dim=0)
    scale = ((high - low) / 1.349).square()
    return torch.where(scale > 0, scale, torch.ones_like(scale)).to(target.device)


def _as_draws(target: Target, result: RunResult, beta: Tensor, facts: dict[str, object]) -> Draws:
    per_chain = {k: v.movedim(0, 1) for k, v in result.records.items()}
    step_size = result.state.step_size.repeat_interleave(len(beta) // len(result.state.step_size))
    stats = {
        "acceptance_rate": per_chain["acceptance_rate"],
        "diverging": per_chain["diverging"],
        "energy": per_chain["energy"],
        "n_steps": per_chain["num_steps"],
        "step_size": step_size.unsqueeze(-1).expand_as(per_chain["energy"]).clone(),
    }
    return Draws(
        result.position.movedim(0, 1).contiguous(),
        per_chain["log_prior"].contiguous(),
        per_chain["log_likelihood"].contiguous(),
        beta,
        {k: v.contiguous() for k, v in stats.items()},
        result.num_gradients,
        result.seconds,
        dict(facts),
        target,
    )
