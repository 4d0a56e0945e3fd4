"""Posterior sampling: groups of chains with independent adaptation, optionally in parallel processes."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, overload
from uuid import uuid4

import torch
from torch import Tensor

from bayeskit._core.folders import as_output_folder
from bayeskit._core.inputs import real_number, remedy_for_model, unknown_name, warn_user, whole_number
from bayeskit._core.process_state import recorded_warnings
from bayeskit._core.randomness import new_generator
from bayeskit._draws import Draws, followed_by
from bayeskit._logdensity.target import HasTarget, Target, require_target
from bayeskit.errors import BudgetError, CheckpointError, SamplingWarning, SettingsError, ShapeError, UnknownNameError
from bayeskit.inference._known_modes import KnownModes, WeightedMode
from bayeskit.inference.samplers._adaptation import Adaptation, MetricKind
from bayeskit.inference.samplers._chains import Convergence, RunResult, RunSettings, run
from bayeskit.inference.samplers._diagnosis import problems, problems_in_tails
from bayeskit.inference.samplers._driver import CHECKPOINT_SECONDS, Control, Ending, Place, say_early
from bayeskit.inference.samplers._hidden_modes import hidden_modes
from bayeskit.inference.samplers._hmc import HMC
from bayeskit.inference.samplers._starts import TemperedStarts, prior_positions
from bayeskit.inference.samplers._unseen_tails import unseen_tails
from bayeskit.parallel import map_tasks

# Groups of chains with independent adaptation, one task for a process each.

_LEAST_SECONDS = 1e-3
_EARLY: tuple[Ending, ...] = ("interrupted", "time budget")  # in order of importance


class Group(NamedTuple):
    """Chains that share one adaptation."""

    adaptation: Adaptation
    num_chains: int
    initial: Tensor | TemperedStarts | None = None
    place: Place | None = None  # where a shorter run ended


class GroupResults(NamedTuple):
    """Results of the groups of a run."""

    results: list[RunResult]  # of the groups that are kept
    seconds: float  # wall-clock time
    endings: list[Ending]  # of every group, with or without results

    @property
    def ending(self) -> Ending:
        """The most important ending of all groups: an early one, else "finished", else that of the first group."""
        return next(one for one in (*_EARLY, "finished", *self.endings) if one in self.endings)


def require_groups(
    num_groups: int | None, num_jobs: int, count: int, what: str, *, equal: bool = False
) -> tuple[int, int]:
    """Return both numbers as ints; SettingsError if ``count`` is not divisible, a warning if jobs would idle.

    Jobs of -1 are one for each core. Groups of None are as many as there are jobs, as far as ``count`` is divisible.
    """
    num_jobs = whole_number("num_jobs", num_jobs, -1)
    if num_jobs == -1:
        from joblib import effective_n_jobs

        num_jobs = effective_n_jobs(-1)  # of this machine, or of the workers of a cluster that is joblib's backend
    num_jobs = whole_number("num_jobs", num_jobs, 1)
    if num_groups is None:
        num_groups = next(n for n in range(min(num_jobs, max(count, 1)), 0, -1) if not equal or count % n == 0)
        return num_groups, num_jobs
    num_groups = whole_number("num_groups", num_groups, 1)
    if num_groups > max(count, 1) or (equal and count % num_groups):
        kind = "equal groups" if equal else "groups"
        raise SettingsError(
            f"{count} {what} cannot be divided into {num_groups} {kind}; choose another num_groups"
            + (f", or a multiple of it as the number of {what}" if equal else "")
        )
    if num_jobs > 1 and num_groups == 1:
        warn_user(
            f"num_jobs={num_jobs} changes nothing: all {what} are one group, which runs as one batch in this process; "
            "leave num_groups out for as many groups as jobs, or leave num_jobs out",
            SamplingWarning,
        )
    return num_groups, num_jobs


def run_groups(
    target: Target, groups: Sequence[Group], settings: RunSettings, *, num_jobs: int = 1, all_needed: bool = False
) -> GroupResults:
    """Run each group of chains on random numbers of its own, so ``num_jobs`` affects only the time."""
    # Each group has a file in the folder ``checkpoint`` and a share of the time budget.
    # With ``all_needed``, either all groups are returned or an error is raised. Otherwise, a group that ended early is
    # dropped if truncating the others to its length would discard more draws. Without a result, BudgetError or
    # KeyboardInterrupt is raised.
    begin = time.monotonic()
    tasks = _tasks(groups, settings, num_jobs)
    function = _RunGroup(target, uuid4().hex)
    if num_jobs == 1:
        outcomes = _one_after_another(function, tasks, settings.control.time_budget)
    else:
        outcomes = map_tasks(
            function,
            tasks,
            num_jobs=num_jobs,
            progress=settings.control.progress,
            description=f"{settings.description}, groups",
        )
    _warn_again(outcomes, tasks)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    # The total includes the seconds spent before a resumed checkpoint.
    at_least = sum(result.seconds for result in results) / min(num_jobs, len(groups))
    not_begun: list[Ending] = ["interrupted"] * (len(tasks) - len(outcomes))
    endings = [outcome.ending for outcome in outcomes] + not_begun
    done = GroupResults(results, max(time.monotonic() - begin, at_least), endings)
    lacking = len(tasks) - len(results)
    if lacking and (all_needed or not results):
        raise _nothing_done(done.ending, settings.control, f"{lacking} of {len(tasks)} groups")
    if not all_needed:
        done = _worth_joining(done)
    count = min(len(result.position) for result in done.results)
    after = f"after {count} of {settings.num_samples} draws a chain of {len(done.results)} of {len(tasks)} groups"
    say_early(done.ending, settings.control, settings.description, after)
    return done


class _Task(NamedTuple):
    """All inputs of the draws of a group except the target."""

    group: Group
    settings: RunSettings

    def __repr__(self) -> str:
        return self.settings.description

    def within(self, seconds: float) -> _Task:
        """Return the task with another time budget."""
        control = replace(self.settings.control, time_budget=max(seconds, _LEAST_SECONDS))
        return self._replace(settings=replace(self.settings, control=control))


class _Outcome(NamedTuple):
    result: RunResult | None  # None if the group ended before its first draw
    ending: Ending
    warnings: list[tuple[type[Warning], str]]


def _tasks(groups: Sequence[Group], settings: RunSettings, num_jobs: int) -> list[_Task]:
    control, count = settings.control, len(groups)
    folder = None if control.checkpoint is None else _folder(control.checkpoint, count)
    budget = control.time_budget
    if budget is not None:
        budget /= math.ceil(count / num_jobs)
    tasks = []
    for i, group in enumerate(groups):
        own = replace(
            control,
            checkpoint=None if folder is None else folder / f"group-{i + 1}-of-{count}",
            time_budget=budget,
            progress=control.progress and num_jobs == 1,
        )
        name = f"group {i + 1} of {count}"
        own_settings = replace(
            settings,
            num_chains=group.num_chains,
            description=f"{settings.description}, {name}",
            stream=f"{settings.stream}, {name}",
            control=own,
        )
        tasks.append(_Task(group, own_settings))
    return tasks


def _folder(checkpoint: str | Path, count: int) -> Path:
    if Path(checkpoint).is_file():
        raise CheckpointError(
            f"{checkpoint} is the checkpoint of a run without groups; a run in groups needs a folder; give another "
            "path, or move the file away"
        )
    folder = as_output_folder(checkpoint)
    names = (re.fullmatch(r"group-\d+-of-(\d+)", path.name) for path in folder.iterdir())
    others = {int(name[1]) for name in names if name} - {count}
    if others:
        raise CheckpointError(
            f"{folder} was written with num_groups={min(others)}, this run has num_groups={count}; resume with "
            f"num_groups={min(others)}, or give another path"
        )
    return folder


def _one_after_another(function: _RunGroup, tasks: Sequence[_Task], seconds: float | None) -> list[_Outcome]:
    """Run the groups in this process, each with an equal share of the remaining time; Ctrl-C ends the loop."""
    begin, outcomes = time.monotonic(), list[_Outcome]()
    for task in tasks:
        if seconds is not None:
            left = seconds - (time.monotonic() - begin)
            task = task.within(left / (len(tasks) - len(outcomes)))
        outcomes.append(function(task))
        if outcomes[-1].ending == "interrupted":
            break
    return outcomes


def _nothing_done(ending: Ending, control: Control, groups: str) -> BudgetError | KeyboardInterrupt:
    if ending == "interrupted":
        return KeyboardInterrupt()
    remedy = (
        ", or a checkpoint from which the same call resumes"
        if control.checkpoint is None
        else "; the same call resumes from the checkpoints of the groups"
    )
    return BudgetError(
        f"the time budget of {control.time_budget:g} s ended while {groups} were compiling or warming up, before there "
        f"was anything to return; give more time{remedy}"
    )


def _worth_joining(done: GroupResults) -> GroupResults:
    """Drop groups that ended early if truncating the others to their length would discard more draws."""

    def kept(least: int) -> list[RunResult]:
        return [one for one in done.results if len(one.position) >= least or one.ending not in _EARLY]

    def worth(results: list[RunResult]) -> tuple[int, int]:
        return len(results) * min(len(one.position) for one in results), len(results)

    return done._replace(results=max((kept(len(one.position)) for one in done.results), key=worth))


def _warn_again(outcomes: Sequence[_Outcome], tasks: Sequence[_Task]) -> None:
    """Issue the warnings of the groups in this process, each text once."""
    said: dict[tuple[type[Warning], str], list[str]] = {}
    for outcome, task in zip(outcomes, tasks, strict=False):
        for warning in dict.fromkeys(outcome.warnings):
            said.setdefault(warning, []).append(task.settings.description)
    for (category, text), by in said.items():
        named = len(by) > 1 or by[0] in text
        warn_user(text if named else f"{by[0]}: {text}", category)


# -- pickling for other processes ---------------------------------------------------------------


class _RunGroup:
    """The function that runs a group; all groups of one process share a target and its graphs."""

    def __init__(self, target: Target, key: str) -> None:
        self._target, self._key = target, key

    def __call__(self, task: _Task) -> _Outcome:
        with recorded_warnings() as caught:
            result, ending = self._run(task, caught)
        # The caller issues one warning on early endings for all groups together.
        own_end = re.compile(re.escape(task.settings.description) + ": (interrupted|ended by the time budget)")
        said = [(warning.category, str(warning.message)) for warning in caught]
        return _Outcome(result, ending, [(kind, text) for kind, text in said if not own_end.match(text)])

    def _run(self, task: _Task, caught: Sequence[warnings.WarningMessage]) -> tuple[RunResult | None, Ending]:
        try:
            group = task.group
            result = run(self._target, group.adaptation, task.settings, initial=group.initial, place=group.place)
        except BudgetError:
            return None, "time budget"
        except KeyboardInterrupt:
            return None, "interrupted"
        except Exception as error:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                error.add_note(f"{task.settings.description} had warned: {text}")
            raise
        return result, result.ending

    def __reduce__(self) -> tuple[Any, ...]:
        # What is known of a target stays behind, except where chains are to start.
        return _arrived, (self._target, self._key, KnownModes.of(self._target).unvisited)


_here: dict[str, _RunGroup] = {}  # the last function used in this process


def _arrived(target: Target, key: str, unvisited: list[WeightedMode]) -> _RunGroup:
    if key not in _here:
        _here.clear()
        KnownModes.of(target).unvisited = unvisited
        _here[key] = _RunGroup(target, key)
    return _here[key]


# Posterior draws.


_Initial = Tensor | Mapping[str, Any] | Literal["pathfinder", "prior", "uniform"]


@overload
def sample(
    target: Target | HasTarget,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    *,
    seed: int = 0,
    kernel: Any = None,
    target_acceptance: float = 0.8,
    metric: MetricKind = "auto",
    initial: _Initial | None = None,
    thinning: int = 1,
    stop: Convergence | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    num_groups: int | None = None,
    num_jobs: int = 1,
    reparameterize: Literal["auto", False] = "auto",
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    progress: bool = True,
) -> Draws: ...


@overload
def sample(
    target: Callable[..., Any],
    *args: Any,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    seed: int = 0,
    kernel: Any = None,
    target_acceptance: float = 0.8,
    metric: MetricKind = "auto",
    initial: _Initial | None = None,
    thinning: int = 1,
    stop: Convergence | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    num_groups: int | None = None,
    num_jobs: int = 1,
    reparameterize: Literal["auto", False] = "auto",
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Draws: ...


def sample(
    target: Target | HasTarget | Callable[..., Any],
    *args: Any,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    seed: int = 0,
    kernel: Any = None,
    target_acceptance: float = 0.8,
    metric: MetricKind = "auto",
    initial: _Initial | None = None,
    thinning: int = 1,
    stop: Convergence | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    num_groups: int | None = None,
    num_jobs: int = 1,
    reparameterize: Literal["auto", False] = "auto",
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Draws:
    """Draw from the posterior with batched Hamiltonian Monte Carlo.

    All chains advance together with one batched gradient per step. Trajectory length, step size and metric are
    adapted from all chains during warm-up.

    Parameters
    ----------
    target : Target or callable
        A target, or a Pyro model: ``sample(model, *args, **kwargs)`` makes ``Target.from_pyro(model, *args,
        **kwargs)``, which the draws keep as ``draws.target``.
    *args
        Arguments of the model; for a target ``num_chains``, ``num_warmup`` and ``num_samples``, if given by position.
    num_chains : int, default 4
    num_warmup, num_samples : int, default 500 and 1000
        Iterations of each chain: adaptation (discarded), then draws (kept).
    seed : int, default 0
    kernel : HMC or NUTS, optional
        :class:`~bayeskit.inference.samplers.HMC` by default. Warm-up starts from its step size and adapts the metric
        and, for HMC, the number of steps; its jitter and energy limit are kept.
    target_acceptance : float, default 0.8
        Target acceptance rate. Half as many rejections are allowed where sites are centred automatically, and warm-up
        raises it if it finds divergences; set it closer to one if divergences remain.
    metric : {"auto", "diagonal", "dense", "low_rank"}, default "auto"
        "auto" is dense up to 400 dimensions if the last window of warm-up has 2.5 draws per dimension, low-rank
        (variances and up to 32 directions of large correlation) up to 10,000 dimensions if it has 200 draws, and
        otherwise diagonal. The estimates use draws and gradients (Seyboldt, Carlson and Carpenter 2026).
    initial : mapping of str to Tensor, Tensor, "pathfinder", "prior" or "uniform", optional
        Where chains start. Values of sites, each of the site's shape or with a leading dimension of chains; sites that
        are left out start at prior draws. Or unconstrained points, ``(d,)`` or ``(num_chains, d)``. "prior" starts
        each chain at a prior draw, "uniform" at an unconstrained point between -2 and 2. By default, "pathfinder",
        each chain starts from the best of ten candidates, every second one a prior draw and the others unconstrained
        points between -2 and 2, and runs Pathfinder (Zhang et al. 2022) to a draw from its best normal approximation.
        Chains also start in modes that an earlier run with this target has missed.
    thinning : int, default 1
        Every so many draws one is kept, ``num_samples`` in all.
    stop : Convergence, optional
        Early stopping rule, applied to each group separately.
    checkpoint : path, optional
        File with the state of the run, or folder with one file per group. If it exists, the run resumes from it;
        the draws are bitwise identical to those of an uninterrupted run.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    time_budget : float, optional
        Seconds, compilation included, after which the draws made so far are returned. Groups that wait for each
        other have equal shares; sequential groups pass unused time on to later groups.
    num_groups : int, optional
        Number of groups of equal size. Each group has its own adaptation and random stream. By default as many as there
        are jobs, or the next smaller number that divides the chains.
    num_jobs : int, default 1
        Number of groups run in parallel, in processes or on a Dask cluster (:func:`bayeskit.parallel.map_tasks`); -1
        for one on each core, or on each worker of the cluster. ``num_groups`` changes the draws, ``num_jobs`` does
        not: give both where draws have to be the same on other machines.
    reparameterize : "auto" or False, default "auto"
        "auto" moves the chains in coordinates in which normal, log-normal, Student-t, Laplace, Cauchy, Gumbel and
        logistic sites whose location or scale depends on other sites are centred as much as suits the data: chosen
        for each element from draws of the warm-up (after Gorinova, Moore and Hoffman 2020). The draws are those of
        the model as it is written. Models without such sites, and targets made of functions, are sampled as they are.
        In models of up to 64 dimensions and three scales, chains also jump along scales whose marginal distribution is
        long for its peak, as in the neck of a funnel or under a vague prior: Metropolis' rule accepts values of all
        coordinates that nested Laplace approximations propose in every second iteration (after Rue, Martino and Chopin
        2009). A trajectory that diverges where such jumps lead does not count as divergent.
    coords : mapping of str to sequence, optional
        Labels along plates and dimensions, such as ``{"state": ["Iowa", "Minnesota"]}``, which summaries, warnings,
        reports and ArviZ have (``effect[Minnesota]``). A plate with the name of a categorical argument or column has
        its categories by itself.
    dims : mapping of str to sequence of str, optional
        Names of the last dimensions of a site, where plates do not name them.
    progress : bool, default True
        Show a progress bar for runs longer than two seconds.
    **kwargs
        Keyword arguments of the model, and ``compile`` of :meth:`Target.from_pyro`.

    Returns
    -------
    Draws
        ``settings["ending"]`` is the reason for the end of the run (finished, converged, time budget, interrupted) and
        ``settings["endings"]`` that of each group. Ctrl-C after warm-up returns the draws made so far; several groups
        return draws only if they run sequentially. Groups of unequal length are truncated to a common length; a group
        is dropped instead if truncating to it would discard more draws.

    Raises
    ------
    InitializationError
        If no chain has a finite density at its start.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    SettingsError
        If the kernel is tempered, there is nothing to run, or the chains cannot be divided equally; or if a target is
        given together with arguments of a model.
    ShapeError, DataError
        If starting points have the wrong shape, or values of sites lie outside their support; if labels are too many,
        too few or equal.
    UnknownNameError
        If labels are of a plate or dimension, or names of a site, that the model has not.
    BudgetError
        If the time budget ends before the first draw, in every group.
    WorkerError
        If worker processes die repeatedly.

    Warns
    -----
    SamplingWarning
        If a coordinate never moves in a chain, if transitions diverge (more than one in a thousand, in a model whose
        scales have no mass beyond the draws), if R-hat exceeds 1.05 (in chains of 50 to 200 draws ``1 + 10 / draws``),
        or if the effective sample size is below 400 or below a tenth of the draws (from 2,000 draws on), of a
        coordinate or along a principal direction; if a tail of 5 % has an effective sample size below 100, or if new
        momenta change little of
        the energy (E-BFMI below 0.2; Betancourt 2016). Each warning names the coordinate, the likely cause and the
        remedy. If coordinates, R-hat and sizes are right, and a search at 5 % of the run's cost finds a mode that no
        chain has visited with 1 % of the posterior or more. If mass that matters lies where a scale is smaller or
        larger than in any draw, or if its variance comes from fewer than 30 draws. Also if the run ends early, or if
        ``num_jobs`` exceeds one with a single group.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> draws = bk.sample(model, torch.tensor([0.5, 1.5], dtype=torch.float64), num_warmup=100, num_samples=200, seed=1)
    >>> abs(float(draws["mean"].mean()) - 2 / 3) < 0.15
    True

    The same in two steps, with a target that other calls can use, too:

    >>> target = bk.Target.from_pyro(model, torch.tensor([0.5, 1.5], dtype=torch.float64))
    >>> bk.sample(target, num_chains=2, num_samples=100, initial={"mean": 0.5}, progress=False)
    Draws(2 chains x 100 draws, dim 1, sites: mean)
    """
    if isinstance(target, Draws):
        target = require_target(target)
    if _is_target(target):
        named = {"num_chains": num_chains, "num_warmup": num_warmup, "num_samples": num_samples}
        num_chains, num_warmup, num_samples = _by_position(args, kwargs, named)
    elif callable(target):
        _refuse_misspelt_settings(target, kwargs)
        target = Target.from_pyro(target, *args, seed=seed, **kwargs)
    if not _is_target(target):
        raise SettingsError(
            f"sample takes a Target or a Pyro model and its arguments, not a {type(target).__name__}; "
            f"{remedy_for_model(target)}"
        )
    if coords or dims:
        target = target.labelled(coords, dims)
    kernel = HMC() if kernel is None else kernel
    if isinstance(kernel, type) or not all(hasattr(kernel, name) for name in ("beta", "with_settings")):
        raise SettingsError(f"kernel must be HMC(...) or NUTS(...), not {kernel!r}")
    if not bool((torch.as_tensor(kernel.beta) == 1).all()):
        raise SettingsError("sample draws from the posterior, so its kernel needs beta=1; use sample_ladder to temper")
    num_chains, num_warmup = whole_number("num_chains", num_chains, 1), whole_number("num_warmup", num_warmup, 0)
    num_samples, seed = whole_number("num_samples", num_samples, 1), whole_number("seed", seed)
    start = _starting_points(target, initial, num_chains, seed)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    if reparameterize not in ("auto", False):
        raise SettingsError(f"reparameterize must be 'auto' or False, not {reparameterize!r}")
    counts: dict[str, Any] = {"seed": seed, "thinning": thinning, "reparameterize": reparameterize == "auto"}
    settings = RunSettings(num_chains, num_warmup, num_samples, "posterior", stop, control, "posterior", **counts)
    target_acceptance = real_number("target_acceptance", target_acceptance, "(0, 1)")
    num_groups, num_jobs = require_groups(num_groups, num_jobs, settings.num_chains, "chains", equal=True)
    adaptation = Adaptation(
        kernel,
        num_warmup,
        target_acceptance=target_acceptance,
        metric=metric,
    )
    facts: dict[str, object] = {"num_warmup": num_warmup, "seed": seed, "target_acceptance": target_acceptance}
    facts |= {} if thinning == 1 else {"thinning": settings.thinning}
    points = _divided(start, num_chains, num_groups, target.dim)
    groups = [Group(adaptation, num_chains // num_groups, own) for own in points]
    # Who starts all chains at one point has chosen a mode.
    chosen = start is not None and bool((start == start.reshape(-1, target.dim)[0]).all())
    return _PosteriorRun(target, groups, settings, facts, num_jobs, None if chosen else seed)()


@dataclass(frozen=True, eq=False)
class _PosteriorRun:
    """A run of :func:`sample`, and what continues its draws."""

    target: Target
    groups: Sequence[Group]
    settings: RunSettings
    facts: dict[str, object]
    num_jobs: int
    seed: int | None  # of the search for modes that chains have missed

    def __call__(self, before: Draws | None = None) -> Draws:
        """Return the draws of the run, after those of a shorter one."""
        first = self.groups[0].adaptation
        count, kernel, facts = len(self.groups), first.kernel, self.facts
        beta = torch.ones(self.settings.num_chains, dtype=self.target.dtype, device=self.target.device)
        if count == 1:
            (group,) = self.groups
            result = run(self.target, first, self.settings, initial=group.initial, place=group.place)
            draws, results = as_draws(self.target, result, beta, kernel, facts), [result]
        else:
            done = run_groups(self.target, self.groups, self.settings, num_jobs=self.num_jobs)
            facts = facts | {"num_groups": count}
            draws, results = join_groups(self.target, done, beta.chunk(count), kernel, facts), done.results
        draws = draws if before is None else followed_by(before, draws)
        if {len(result.position) for result in results} == {len(results[0].position)} and len(results) == count:
            draws = replace(draws, continuation=self._ending_at([result.place for result in results]))
        for problem in _problems(draws, first.max_steps, self.seed):
            warn_user(problem, SamplingWarning)
        return draws

    def _ending_at(self, places: Sequence[Place]) -> _PosteriorRun:
        groups = [group._replace(place=place) for group, place in zip(self.groups, places, strict=True)]
        return replace(self, groups=groups)

    def longer(self, draws: Draws, num_samples: int, *, time_budget: float | None, progress: bool) -> Draws:
        """Return the draws with ``num_samples`` more of each chain."""
        control = Control(time_budget=time_budget, progress=progress)
        settings = replace(self.settings, num_samples=draws.num_draws + num_samples, stop=None, control=control)
        return replace(self, settings=settings)(draws)


def _problems(draws: Draws, max_steps: int, seed: int | None) -> list[str]:
    """Return what speaks against draws; modes are sought with a seed. A lack of memory does not lose the draws."""
    found: list[str] = []
    try:
        found += problems(draws, max_steps)
        if not found:
            found += problems_in_tails(draws, max_steps)
            found += [] if seed is None else hidden_modes(draws, seed)
        found += [tail.warning for tail in unseen_tails(draws).found]
    except MemoryError as error:
        found.append(f"there was too little memory to judge the draws ({str(error)[:160]}): look at draws.summary()")
    return found


def _is_target(given: Any) -> TypeGuard[Target]:
    """Tell a target, or what wraps one, from a model."""
    return hasattr(given, "can_sample_prior")


def _settings() -> list[str]:
    return [name for name in inspect.signature(sample).parameters if name not in ("target", "args", "kwargs")]


def _refuse_misspelt_settings(model: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ``UnknownNameError`` for a keyword that the model does not take and that resembles a setting."""
    try:
        taken = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    for name in kwargs.keys() - {parameter.name for parameter in taken}:
        if name in _ELSEWHERE:
            raise _called_otherwise(name)
        if difflib.get_close_matches(name, _settings(), 1, 0.8):
            raise unknown_name("argument of the model or setting of sample", name, _settings())


#: Settings by the names that they have in PyMC, NumPyro, Pyro, Stan and emcee.
_ELSEWHERE = (
    dict.fromkeys(("draws", "num_draws", "iter_sampling", "nsteps"), "num_samples")
    | dict.fromkeys(("tune", "warmup", "warmup_steps", "iter_warmup", "burn_in", "burnin"), "num_warmup")
    | dict.fromkeys(("chains", "nwalkers"), "num_chains")
    | dict.fromkeys(("cores", "parallel_chains", "num_cores", "n_jobs"), "num_jobs")
    | dict.fromkeys(("target_accept", "target_accept_prob", "adapt_delta"), "target_acceptance")
    | dict.fromkeys(("random_seed", "rng_key", "random_state"), "seed")
    | dict.fromkeys(("init", "inits", "initvals", "initial_params", "init_params"), "initial")
    | dict.fromkeys(("progressbar", "progress_bar", "show_progress"), "progress")
    | dict.fromkeys(("thin",), "thinning")
    | dict.fromkeys(("step", "nuts_sampler"), "kernel")
    | dict.fromkeys(("max_treedepth", "max_tree_depth"), "kernel=NUTS(max_depth=...)")
    | dict.fromkeys(("idata_kwargs",), "coords and dims")
)


def _called_otherwise(name: str) -> UnknownNameError:
    return UnknownNameError(f"sample has no setting {name!r}; what other packages call so is {_ELSEWHERE[name]} here")


def _by_position(args: tuple[Any, ...], kwargs: Mapping[str, Any], counts: dict[str, int]) -> list[int]:
    """Return the counts of chains, warm-up and draws, given by position or by name; a typed error for anything else."""
    if known := kwargs.keys() & _ELSEWHERE:
        raise _called_otherwise(min(known))
    if kwargs:
        raise unknown_name("setting of sample with a Target", next(iter(kwargs)), _settings())
    if len(args) > len(counts):
        raise SettingsError(
            f"sample takes {', '.join(counts)} by position with a Target, not {args[len(counts)]!r:.40}; give other "
            "settings by name, and arguments of a model to Target.from_pyro"
        )
    return [*args, *list(counts.values())[len(args) :]]


def _starting_points(target: Target, initial: _Initial | None, num_chains: int, seed: int) -> Tensor | None:
    """Return unconstrained starting points, ``(d,)`` or ``(chains, d)``; None for those of Pathfinder."""
    if initial is None or isinstance(initial, str) and initial == "pathfinder":
        return None
    generator = new_generator(seed, stream="starting points")
    if isinstance(initial, str):
        if initial == "uniform":
            between = 4.0 * torch.rand(num_chains, target.dim, generator=generator, dtype=torch.float64) - 2.0
            return between.to(target.device, target.dtype)
        if initial != "prior":
            raise SettingsError(f"initial={initial!r} is unknown; take 'pathfinder', 'prior' or 'uniform'")
        points = prior_positions(target, num_chains, generator)
        if points is None:
            raise SettingsError("initial='prior' needs prior draws, which this target does not have; take 'uniform'")
        return points
    if not isinstance(initial, Mapping):
        try:
            return torch.as_tensor(initial)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError("initial must be a mapping of site values, a tensor, or the name of a strategy") from error
    shapes = {site.name: site.shape for site in target.sites}
    if unknown := next((name for name in initial if name not in shapes), None):
        raise unknown_name("site", unknown, list(shapes))
    values = {name: torch.as_tensor(value, dtype=target.dtype, device=target.device) for name, value in initial.items()}
    missing = [name for name in shapes if name not in values]
    if missing:
        points = prior_positions(target, num_chains, generator)
        if points is None:
            raise ShapeError(f"initial has no value for {', '.join(missing)}, and this target has no prior draws")
        values = {name: value for name, value in target.constrain(points, False).items() if name in missing} | values
    batched = {
        name: value.expand(num_chains, *value.shape) if value.dim() == len(shapes[name]) else value
        for name, value in values.items()
    }
    return target.unconstrain(batched)


def _divided(initial: Tensor | None, num_chains: int, num_groups: int, dim: int) -> Sequence[Tensor | None]:
    """Return the starting points of each group."""
    if initial is not None and initial.shape == (num_chains, dim):
        return initial.chunk(num_groups)
    if initial is not None and initial.shape != (dim,):
        raise ShapeError(f"initial must have shape {(dim,)} or {(num_chains, dim)}, not {tuple(initial.shape)}")
    return [initial] * num_groups


def prior_variance(target: Target, seed: int, num_draws: int = 200) -> Tensor | None:
    """Return the prior's variance of each coordinate, shape ``(d,)``: a first scale for the metric."""
    draws = prior_positions(target, num_draws, new_generator(seed, stream="prior variance"))
    if draws is None:
        return None
    # Quartiles, because the variance of a heavy-tailed prior may be infinite.
    low, high = draws.quantile(torch.tensor([0.25, 0.75], dtype=draws.dtype, device=draws.device), dim=0)
    scale = ((high - low) / 1.349).square()
    return torch.where(scale > 0, scale, torch.ones_like(scale)).to(target.device)


def as_draws(target: Target, result: RunResult, beta: Tensor, kernel: Any, facts: dict[str, object]) -> Draws:
    """Turn the records of a run into :class:`Draws` under ArviZ's names."""
    stats = {_ARVIZ_NAMES.get(k, k): v.movedim(0, 1).contiguous() for k, v in result.records.items()}
    step_size = result.state.step.step_size.repeat_interleave(len(beta) // len(result.state.step.step_size))
    stats["step_size"] = step_size.unsqueeze(-1).expand_as(stats["log_prior"]).clone()
    if restarts := int(result.state.restarts):
        facts = facts | {"num_restarts": restarts}
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
    """Turn the records of groups into joint :class:`Draws`; ``beta`` has the inverse temperatures of each group."""
    parts = [as_draws(target, one, own, kernel, facts) for one, own in zip(done.results, beta, strict=False)]
    joint = Draws.join(parts)
    # The endings include those of dropped groups.
    endings = {"ending": done.ending, "endings": done.endings}
    return replace(joint, seconds=done.seconds, settings=joint.settings | endings)


_ARVIZ_NAMES = {"num_steps": "n_steps"}
