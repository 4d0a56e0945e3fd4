"""Posterior draws."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SamplingWarning, SettingsError, ShapeError
from bayeskit.inference.samplers.adaptation import Adaptation, MetricKind
from bayeskit.inference.samplers.chains import Convergence, RunSettings
from bayeskit.inference.samplers.diagnosis import problems
from bayeskit.inference.samplers.driver import CHECKPOINT_SECONDS, Control
from bayeskit.inference.samplers.groups import Group, GroupResults, require_groups, run_groups
from bayeskit.inference.samplers.hmc import HMC
from bayeskit.inference.samplers.initial import from_prior
from bayeskit.inference.samplers.run import RunResult, run
from bayeskit.target import Target


def sample(
    target: Target,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    seed: int = 0,
    *,
    kernel: Any = None,
    target_acceptance: float = 0.8,
    metric: MetricKind = "auto",
    initial: Tensor | None = None,
    stop: Convergence | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    num_groups: int = 1,
    num_jobs: int = 1,
    progress: bool = True,
) -> Draws:
    """Draw from the posterior with batched Hamiltonian Monte Carlo.

    All chains advance together, one batched gradient a step; more chains cost little on a CPU and next to
    nothing on a GPU. Trajectory length, step size and metric are learnt from all chains during warm-up.

    Parameters
    ----------
    target : Target
    num_chains : int, default 4
    num_warmup, num_samples : int, default 500 and 1000
        Adapting iterations, thrown away, and iterations kept, of each chain.
    seed : int, default 0
    kernel : HMC or NUTS, optional
        :class:`~bayeskit.inference.samplers.HMC` by default. Its jitter and energy limit stay as they are, its
        step size is where warm-up starts; metric and, for HMC, number of steps are learnt.
    target_acceptance : float, default 0.8
        Raise it towards one where there are divergences; warm-up does so by itself where it meets them.
    metric : {"auto", "diagonal", "dense", "low_rank"}, default "auto"
        "auto" learns a full covariance up to 400 dimensions where warm-up brings enough draws, 2.5 a dimension, and
        variances and up to 32 directions of the largest correlations in more. Both are
        learnt from draws and gradients (Seyboldt, Carlson and Carpenter 2026).
    initial : Tensor, optional
        Unconstrained starting points, ``(d,)`` or ``(num_chains, d)``, used as they are; by default each
        chain climbs from the one of ten prior draws that fits the data best to a draw from the best normal
        approximation on its way (Pathfinder; Zhang et al. 2022).
    stop : Convergence, optional
        End before ``num_samples`` once R-hat and effective sample size are good enough. Each group looks at its
        own draws alone.
    checkpoint : path, optional
        File that holds the run's state; if it exists, the run resumes from it and
        ends bit for bit as if it had not been interrupted. With several groups a folder, a file for each.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    time_budget : float, optional
        Seconds, compilation included, after which the draws made so far are returned. Groups that have to wait
        for each other share it equally; where they run one after another, the rest of each goes to those after it.
    num_groups : int, default 1
        Divide the chains into so many groups, each of which adapts by itself, on random numbers of its own.
    num_jobs : int, default 1
        Groups under way at a time. Several run in processes, or on a Dask cluster, as
        :func:`bayeskit.parallel.map_tasks` says; ``num_groups`` decides what is drawn, ``num_jobs`` never does.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    Draws
        ``settings["ending"]`` says whether the run finished, converged, used up its time or was
        interrupted: Ctrl-C after the warm-up returns what is done, of groups only where they run one after
        another. Groups of different numbers of draws are cut to the shortest, after leaving out those that were
        ended so early that this would lose more; ``settings["endings"]`` has the ending of every group.

    Raises
    ------
    InitializationError
        If no chain has a finite density at its start.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    SettingsError
        If the kernel is tempered, there is nothing to run, or the chains cannot be divided equally.
    BudgetError
        If the time budget ends before the first draw, in every group.
    WorkerError
        If processes that work on groups keep dying.

    Warns
    -----
    SamplingWarning
        If transitions diverged, if chains disagree (R-hat above 1.05, looked at from 200 draws a chain on), if of
        2,000 draws and more less than a tenth, or than 400, are effective, each with the coordinate, the likely cause
        and its remedy; if the run was ended early, or if ``num_jobs`` has nothing to do because there is one group.

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
    if not hasattr(target, "can_sample_prior"):
        raise SettingsError(
            f"sample takes a Target, not a {type(target).__name__}; make one with Target.from_pyro(model, data)"
        )
    kernel = HMC() if kernel is None else kernel
    if isinstance(kernel, type) or not all(hasattr(kernel, name) for name in ("beta", "with_settings")):
        raise SettingsError(f"kernel must be HMC(...) or NUTS(...), not {kernel!r}")
    if initial is not None:
        try:
            initial = torch.as_tensor(initial)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError("initial must be a tensor; make one of values with target.unconstrain({...})") from error
    if not bool((torch.as_tensor(kernel.beta) == 1).all()):
        raise SettingsError("sample draws from the posterior, so its kernel needs beta=1; use sample_ladder to temper")
    num_chains, num_warmup = whole_number("num_chains", num_chains, 1), whole_number("num_warmup", num_warmup, 0)
    num_samples, seed = whole_number("num_samples", num_samples, 1), whole_number("seed", seed)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    settings = RunSettings(num_chains, num_warmup, num_samples, seed, "posterior", stop, control, "posterior")
    target_acceptance = real_number("target_acceptance", target_acceptance, between=(0, 1))
    num_groups, num_jobs = require_groups(num_groups, num_jobs, settings.num_chains, "chains", equal=True)
    adaptation = Adaptation(
        kernel,
        num_warmup,
        target_acceptance=target_acceptance,
        initial_variance=prior_variance(target, seed),
        metric=metric,
    )
    facts: dict[str, object] = {"num_warmup": num_warmup, "seed": seed, "target_acceptance": target_acceptance}
    beta = torch.ones(num_chains, dtype=target.dtype, device=target.device)
    if num_groups == 1:
        draws = as_draws(target, run(target, adaptation, settings, initial=initial), beta, kernel, facts)
    else:
        points = _divided(initial, num_chains, num_groups, target.dim)
        groups = [Group(adaptation, num_chains // num_groups, own) for own in points]
        done = run_groups(target, groups, settings, num_jobs=num_jobs)
        draws = join_groups(target, done, beta.chunk(num_groups), kernel, facts | {"num_groups": num_groups})
    for problem in problems(draws, adaptation.max_steps):
        warnings.warn(problem, SamplingWarning, stacklevel=2)
    return draws


def _divided(initial: Tensor | None, num_chains: int, num_groups: int, dim: int) -> Sequence[Tensor | None]:
    """Return the starting points of each group."""
    if initial is not None and initial.shape == (num_chains, dim):
        return initial.chunk(num_groups)
    if initial is not None and initial.shape != (dim,):
        raise ShapeError(f"initial has shape {tuple(initial.shape)}; needed is {(dim,)} or {(num_chains, dim)}")
    return [initial] * num_groups


def prior_variance(target: Target, seed: int, num_draws: int = 200) -> Tensor | None:
    """Return the prior's variance of each coordinate, shape ``(d,)``: a first scale for the metric."""
    draws = from_prior(target, num_draws, new_generator(seed, stream="prior variance"))
    if draws is None:
        return None
    # Quartiles, because a heavy-tailed prior has no variance to speak of.
    low, high = draws.quantile(torch.tensor([0.25, 0.75], dtype=draws.dtype, device=draws.device), dim=0)
    scale = ((high - low) / 1.349).square()
    return torch.where(scale > 0, scale, torch.ones_like(scale)).to(target.device)


def as_draws(target: Target, result: RunResult, beta: Tensor, kernel: Any, facts: dict[str, object]) -> Draws:
    """Turn what a run recorded into :class:`Draws` under ArviZ's names."""
    stats = {_ARVIZ_NAMES.get(k, k): v.movedim(0, 1).contiguous() for k, v in result.records.items()}
    step_size = result.state.step.step_size.repeat_interleave(len(beta) // len(result.state.step.step_size))
    stats["step_size"] = step_size.unsqueeze(-1).expand_as(stats["energy"]).clone()
    return Draws(
        result.position.movedim(0, 1).contiguous(),
        stats.pop("log_prior"),
        stats.pop("log_likelihood"),
        beta,
        stats,
        result.num_gradients,
        result.seconds,
        {"sampler": type(kernel).__name__, **facts, "ending": result.ending},
        target,
    )


def join_groups(
    target: Target, done: GroupResults, beta: Sequence[Tensor], kernel: Any, facts: dict[str, object]
) -> Draws:
    """Turn what groups recorded into joint :class:`Draws`; ``beta`` has the inverse temperatures of each group."""
    parts = [as_draws(target, one, own, kernel, facts) for one, own in zip(done.results, beta, strict=False)]
    joint = Draws.join(parts)
    # A group that was left out has had its ending, too.
    endings = {"ending": done.ending, "endings": done.endings}
    return replace(joint, seconds=done.seconds, settings=joint.settings | endings)


_ARVIZ_NAMES = {"num_steps": "n_steps"}
