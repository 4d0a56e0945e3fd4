"""Sum over every assignment of a model's discrete latent sites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._pyro.replay import Choices, Replay, ReplayedModel, choices_of
from bayeskit._settings import whole_number
from bayeskit._tracing import UNTRACEABLE
from bayeskit.errors import ModelError, SettingsError
from bayeskit.exact.enumerated_posterior import EnumeratedPosterior

MAX_ASSIGNMENTS = 100_000
BATCH = 4096
UNIT_MASS = 1e-4


def enumerate_latents(
    model: Callable[..., Any],
    *args: Any,
    max_assignments: int = MAX_ASSIGNMENTS,
    progress: bool = True,
    **kwargs: Any,
) -> EnumeratedPosterior:
    """Compute the evidence and the posterior of a Pyro model whose latent sites are all discrete, exactly.

    Every assignment of the latent sites is visited: those of a plate element by element, those of a site that exists
    only for some values of an earlier one, or whose values depend on it, where they exist. ``pyro.param`` values are
    constants, ``pyro.factor`` and observed sites the likelihood. Marks for enumeration and ``pyro.markov`` change
    nothing. Assignments of zero prior probability are left out. Probabilities that a discrete distribution was given
    count as they are, small ones and exact zeros, where torch itself would raise them to its rounding unit.

    A model that can be batched is run once for some thousand assignments at a time; any other, once for each.

    Parameters
    ----------
    model : callable
        A Pyro model.
    *args, **kwargs
        What it is called with.
    max_assignments : int, default 100000
        A larger joint space is refused before it is visited.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    EnumeratedPosterior

    Raises
    ------
    UnsupportedSiteError
        If a latent site is continuous, or its values cannot be listed.
    SettingsError
        If there are more than ``max_assignments`` assignments; the message has their number.
    ModelError
        If the model fails, a log probability is not a number, or prior probabilities do not add up to one.

    References
    ----------
    Goodman, N. D., Stuhlmueller, A. (2014). The Design and Implementation of Probabilistic Programming Languages,
    chapter 2 (enumeration by replaying a program).

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.exact.enumerate_latents import enumerate_latents
    >>> def sprinkler(wet):
    ...     rain = pyro.sample("rain", dist.Bernoulli(0.2))
    ...     on = pyro.sample("on", dist.Bernoulli(0.01 if rain else 0.4))
    ...     chance = torch.tensor([[0.0, 0.9], [0.8, 0.99]])[rain.long(), on.long()]
    ...     pyro.sample("wet", dist.Bernoulli(chance), obs=wet)
    >>> posterior = enumerate_latents(sprinkler, torch.tensor(1.0))
    >>> round(posterior.log_evidence, 6)
    -0.802114
    >>> round(float(posterior.expectation(lambda sites: sites["rain"])), 4)
    0.3577
    """
    limit = whole_number("max_assignments", max_assignments, 1)
    replayed = ReplayedModel(model, args, kwargs)
    first = _Path()
    run = replayed.run(first.supply)
    choices = {choice.name: choice for choice in first.choices}
    count = _count(choices)
    if choices and _looks_fixed(replayed, choices):
        if count > limit:
            raise _too_many(f"{count}", limit)
        batched = _visit_in_batches(replayed, choices, count, progress)
        if batched is not None:
            return batched
    elif not choices:
        return EnumeratedPosterior.of_rows([{}], torch.stack([run.log_prior]), torch.stack([run.log_likelihood]))
    return _visit_one_by_one(replayed, limit, progress)


class _Path:
    """The values chosen on the way to one assignment, and how to get to the next."""

    def __init__(self) -> None:
        self.choices: list[Choices] = []
        self._left: list[Iterator[Tensor]] = []
        self._values: list[Tensor] = []
        self._depth = 0

    def supply(self, name: str, fn: Any) -> Tensor:
        """Return the value chosen at this site; where the path ends, go on with the first possible one."""
        if self._depth == len(self.choices):
            choice = choices_of(name, fn)
            self.choices.append(choice)
            self._left.append(_values_of(choice))
            self._values.append(next(self._left[-1]))
        elif self.choices[self._depth].name != name:
            raise ModelError(
                f"site {name!r} follows values that were followed by {self.choices[self._depth].name!r} before; the "
                "model must draw random numbers by pyro.sample only"
            )
        self._depth += 1
        return self._values[self._depth - 1]

    def advance(self) -> bool:
        """Go on to the next assignment in depth-first order, or return False where there is none."""
        self._depth = 0
        while self.choices:
            value = next(self._left[-1], None)
            if value is not None:
                self._values[-1] = value
                return True
            for stack in (self.choices, self._left, self._values):
                stack.pop()
        return False


def _values_of(choice: Choices) -> Iterator[Tensor]:
    """Yield every possible value of a site, shape ``(*elements, *event)``."""
    elements = choice.elements.numel()
    possible = choice.possible.reshape(len(choice.values), elements)
    each = [possible[:, e].nonzero().squeeze(-1).tolist() for e in range(elements)]
    for indices in itertools.product(*each):
        picked = choice.values[torch.tensor(indices, dtype=torch.long, device=choice.values.device)]
        yield picked.reshape(choice.elements + choice.values.shape[1:])


def _count(choices: Mapping[str, Choices]) -> int:
    count = 1
    for choice in choices.values():
        count *= choice.num_assignments
    return count


def _looks_fixed(replayed: ReplayedModel, choices: Mapping[str, Choices]) -> bool:
    """Run the model with the last value of every element, and see whether its sites and their values are the same."""
    path: dict[str, Choices] = {}

    def supply(name: str, fn: Any) -> Tensor:
        choice = path[name] = choices_of(name, fn)
        last = len(choice.values) - 1 - choice.possible.flip(0).to(torch.int8).argmax(0)
        return choice.values[last]

    replayed.run(supply)
    return path.keys() == choices.keys() and all(
        path[name].elements == choice.elements and torch.equal(path[name].values, choice.values)
        for name, choice in choices.items()
    )


def _too_many(count: str, limit: int) -> SettingsError:
    return SettingsError(
        f"the model's latent sites have {count} joint assignments, and max_assignments is {limit}; raise it, use fewer "
        "sites or values, or sum the sites out plate by plate with Target.from_pyro"
    )


def _visit_in_batches(
    replayed: ReplayedModel, choices: Mapping[str, Choices], count: int, progress: bool
) -> EnumeratedPosterior | None:
    """Visit a joint space that does not depend on values; None where the model cannot be batched or it does."""
    parts = []
    with progress_bar("assignments", count, enabled=progress) as bar:
        for start in range(0, count, BATCH):
            part = _batch(replayed, choices, torch.arange(start, min(start + BATCH, count), device=replayed.device))
            if part is None:
                return None
            parts.append(part)
            bar.update(min(start + BATCH, count))
    log_prior = torch.cat([part[1] for part in parts])
    if not abs(float(log_prior.logsumexp(0))) < UNIT_MASS:
        return None
    table = {name: torch.cat([part[0][name] for part in parts]) for name in choices}
    return EnumeratedPosterior(table, log_prior, torch.cat([part[2] for part in parts]))


def _batch(
    replayed: ReplayedModel, choices: Mapping[str, Choices], number: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor] | None:
    """Return the possible ones of some assignments, log priors and log likelihoods; None as for all of them."""
    assignment = _assignments(choices, number)
    try:
        log_prior, log_likelihood = replayed.run_batch(assignment, choices)
    except UNTRACEABLE:
        return None
    possible = log_prior > -torch.inf
    undefined = log_likelihood[possible].isnan() | (log_likelihood[possible] == torch.inf)
    if bool(log_prior.isnan().any()) or bool(undefined.any()):
        return None  # one by one, the error can name the site
    return {name: value[possible] for name, value in assignment.items()}, log_prior[possible], log_likelihood[possible]


def _assignments(choices: Mapping[str, Choices], number: Tensor) -> dict[str, Tensor]:
    """Return the assignments of these numbers, counting as an odometer does, ``{site: (B, *elements, *event)}``."""
    result = {}
    for name, choice in reversed(list(choices.items())):
        base, elements = len(choice.values), choice.elements.numel()
        digits = []
        for _ in range(elements):
            digits.append(number % base)
            number = number // base
        index = torch.stack(digits[::-1], -1) if digits else number.new_empty(len(number), 0)
        result[name] = choice.values[index].reshape(len(number), *choice.elements, *choice.values.shape[1:])
    return {name: result[name] for name in choices}


def _visit_one_by_one(replayed: ReplayedModel, limit: int, progress: bool) -> EnumeratedPosterior:
    """Replay the model once for each assignment, depth first."""
    path = _Path()
    runs: list[Replay] = []
    with progress_bar("assignments", None, enabled=progress) as bar:
        while True:
            if len(runs) == limit:
                raise _too_many(f"more than {limit}", limit)
            runs.append(replayed.run(path.supply))
            bar.update(len(runs))
            if not path.advance():
                break
    return EnumeratedPosterior.of_rows(
        [run.values for run in runs],
        torch.stack([run.log_prior for run in runs]),
        torch.stack([run.log_likelihood for run in runs]),
    )
