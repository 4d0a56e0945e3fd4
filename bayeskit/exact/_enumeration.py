"""Exact posteriors of discrete latent sites by enumeration of all assignments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.compatibility import as_inference_data, to_datasets
from bayeskit._core.inputs import whole_number
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import new_generator
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.pyro_runs import DiscreteValues, Replay, ReplayedModel, choices_of
from bayeskit.errors import ImproperPosteriorError, ModelError, SettingsError, ShapeError, UnknownNameError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# A posterior over finitely many assignments, as a table.

#: Maximum number of tick labels on the axis of values.
_LABELS = 12


class Marginal(NamedTuple):
    """Marginal posterior of every element of a site.

    If an element exists only in some assignments, its probabilities sum to the probability that it exists.
    """

    values: Tensor  # (V,)
    probabilities: Tensor  # (*shape, V)


class Assignment(NamedTuple):
    """One assignment of the latent sites and its posterior probability."""

    values: dict[str, Tensor]
    probability: float


@dataclass(frozen=True, eq=False)
class EnumeratedPosterior:
    """Exact posterior of a model with ``M`` assignments of its discrete latent sites.

    Attributes
    ----------
    assignments : mapping of str to Tensor
        Values by site, shape ``(M, *shape)``. If a site or some of its elements exist only in some assignments, the
        values are float64, with NaN for missing elements.
    log_prior, log_likelihood : Tensor
        Shape ``(M,)``, float64. Assignments with prior probability zero are excluded.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.exact._enumeration import EnumeratedPosterior
    >>> coin = torch.tensor([0, 1])
    >>> posterior = EnumeratedPosterior({"coin": coin}, torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.3]).log())
    >>> round(posterior.log_evidence, 4), posterior.most_probable().values["coin"]
    (-0.5108, tensor(0))
    """

    assignments: Mapping[str, Tensor]
    log_prior: Tensor
    log_likelihood: Tensor

    @classmethod
    def of_rows(
        cls, rows: Sequence[Mapping[str, Tensor]], log_prior: Tensor, log_likelihood: Tensor
    ) -> EnumeratedPosterior:
        """Build the table from one mapping per assignment; sites and shapes may differ between assignments.

        Raises
        ------
        ShapeError
            If the values of a site differ in their number of dimensions.
        """
        names = dict.fromkeys(name for row in rows for name in row)
        return cls({name: _column(name, [row.get(name) for row in rows]) for name in names}, log_prior, log_likelihood)

    def __len__(self) -> int:
        return len(self.log_prior)

    def __repr__(self) -> str:
        sites = ", ".join(f"{name}{tuple(value.shape[1:])}" for name, value in self.assignments.items())
        return (
            f"EnumeratedPosterior(log_evidence={self.log_evidence:.6f}, {len(self)} assignments of "
            f"{sites or 'no site'})"
        )

    @property
    def log_joint(self) -> Tensor:
        """Log joint probability of each assignment and the data, ``(M,)``."""
        return self.log_prior + self.log_likelihood

    @property
    def log_evidence(self) -> float:
        """Log marginal likelihood in nats; ``-inf`` if the likelihood is zero at every assignment."""
        return float(self.log_joint.logsumexp(0))

    @property
    def probabilities(self) -> Tensor:
        """Posterior probability of each assignment, ``(M,)``.

        Raises
        ------
        ImproperPosteriorError
            If the likelihood is zero at every assignment.
        """
        if self.log_evidence == -torch.inf:
            raise ImproperPosteriorError(
                "the likelihood is zero at every assignment, so there is no posterior; check the observed sites and "
                "the factors"
            )
        return self.log_joint.softmax(0)

    def marginal(self, site: str) -> Marginal:
        """Return the marginal posterior of every element of a site.

        Raises
        ------
        UnknownNameError
            If there is no such site.
        ImproperPosteriorError
            If the likelihood is zero at every assignment.
        """
        if site not in self.assignments:
            raise UnknownNameError(f"no latent site is called {site!r}; there are: {', '.join(self.assignments)}")
        column = self.assignments[site]
        values, index = column.unique(return_inverse=True)  # each NaN is a separate value
        present = ~values.isnan()
        weight = self.probabilities.reshape(-1, *(1,) * (column.dim() - 1)).expand(column.shape).unsqueeze(-1)
        each = torch.zeros(*column.shape[1:], len(values), dtype=weight.dtype, device=weight.device)
        each.scatter_add_(-1, index.movedim(0, -1), weight.squeeze(-1).movedim(0, -1).contiguous())
        return Marginal(values[present], each[..., present])

    def marginals(self) -> dict[str, Marginal]:
        """Return the marginal posterior of every site."""
        return {site: self.marginal(site) for site in self.assignments}

    def expectation(self, function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Return the posterior expectation of a function of the assignment.

        Parameters
        ----------
        function : callable
            Function from all assignments, ``{site: (M, *shape)}``, to ``(M, *out)``; may be infinite or NaN where the
            posterior probability is zero.

        Returns
        -------
        Tensor
            Shape ``out``, float64.

        Raises
        ------
        ShapeError
            If the first dimension of the result is not ``M``.
        """
        values = torch.as_tensor(function(dict(self.assignments)))
        if values.dim() == 0 or len(values) != len(self):
            raise ShapeError(
                f"the function returned shape {tuple(values.shape)} instead of ({len(self)}, ...); it receives all "
                "assignments at once, so reduce only over later dimensions"
            )
        p = self.probabilities.reshape(-1, *(1,) * (values.dim() - 1))
        return torch.where(p > 0, p * values, p.new_zeros(())).sum(0)

    def most_probable(self) -> Assignment:
        """Return the most probable assignment; the first in case of ties.

        Raises
        ------
        ImproperPosteriorError
            If the likelihood is zero at every assignment.
        """
        best = int(self.log_joint.argmax())
        return Assignment({k: v[best] for k, v in self.assignments.items()}, float(self.probabilities[best]))

    def sample(self, num_draws: int, *, seed: int | torch.Generator = 0) -> dict[str, Tensor]:
        """Draw independent assignments from the posterior, ``{site: (num_draws, *shape)}``."""
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, self.log_prior.device, stream="enumerated posterior")
        index = torch.multinomial(self.probabilities, num_draws, replacement=True, generator=generator)
        return {name: value[index] for name, value in self.assignments.items()}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per assignment in descending probability, with one column per element of a site.

        Further columns are ``probability`` and ``log_joint``. Elements that do not exist are missing values.
        """
        import pandas as pd

        columns: dict[str, Any] = {}
        for name, column in self.assignments.items():
            shape = column.shape[1:]
            flat = column.reshape(len(column), -1).cpu()
            whole = bool(((flat == flat.round()) | flat.isnan()).all())
            indices = torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)) if shape else [()]
            for position, index in enumerate(indices):
                label = f"{name}[{','.join(str(int(i)) for i in index)}]" if shape else name
                series = pd.Series(flat[:, position].double().numpy())
                columns[label] = series.astype("Int64") if whole else series
        table = pd.DataFrame(columns, index=range(len(self)))
        table["probability"] = self.probabilities.cpu().numpy()
        table["log_joint"] = self.log_joint.cpu().numpy()
        return table.sort_values("probability", ascending=False, kind="stable", ignore_index=True)

    def to_arviz(self, num_chains: int = 4, num_draws: int = 1000, *, seed: int | torch.Generator = 0) -> Any:
        """Return independent draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x."""
        chains, count = whole_number("num_chains", num_chains, 1), whole_number("num_draws", num_draws, 1)
        draws = self.sample(chains * count, seed=seed)
        posterior = {name: value.reshape(chains, count, *value.shape[1:]) for name, value in draws.items()}
        return as_inference_data(to_datasets({"posterior": posterior}, {"log_evidence": self.log_evidence}))

    def plot(self, site: str, ax: Axes | None = None) -> Axes:
        """Plot the marginal posterior of a site: a bar plot for one element, an image for several elements.

        Parameters
        ----------
        site : str
        ax : Axes, optional
            Default: a new figure.

        Returns
        -------
        Axes

        Raises
        ------
        UnknownNameError
            If there is no such site.
        ImproperPosteriorError
            If the likelihood is zero at every assignment.
        """
        from bayeskit._core.plots import BLUE

        values, probabilities = self.marginal(site)
        height = probabilities.reshape(-1, len(values)).cpu().numpy()
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
        places = range(0, len(values), -(-len(values) // _LABELS))
        labels = [f"{float(values[i]):g}" for i in places]
        if len(height) == 1:
            ax.bar(range(len(values)), height[0], color=BLUE, alpha=0.8)
            ax.set_xticks(places, labels)
            ax.set_xlabel(site)
            ax.set_ylabel("posterior probability")
        else:
            image = ax.imshow(height.T, origin="lower", aspect="auto", vmin=0.0, vmax=1.0, cmap="Blues")
            ax.set_yticks(places, labels)
            ax.set_ylabel("value")
            ax.set_xlabel(f"element of {site}")
            ax.figure.colorbar(image, ax=ax, label="posterior probability")
        return ax


def _column(name: str, values: Sequence[Tensor | None]) -> Tensor:
    """Stack the values of a site, with NaN for missing values."""
    present = [value for value in values if value is not None]
    shapes = {tuple(value.shape) for value in present}
    if len(shapes) == 1 and len(present) == len(values):
        return torch.stack(present)
    if len({len(shape) for shape in shapes}) > 1:
        raise ShapeError(f"site {name!r} has values of shapes {sorted(shapes)}; the number of dimensions must not vary")
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    column = torch.full((len(values), *largest), torch.nan, dtype=torch.float64, device=present[0].device)
    for row, value in zip(column, values, strict=True):
        if value is not None:
            row[tuple(slice(n) for n in value.shape)] = value.to(torch.float64)
    return column


# Enumeration of all assignments of a model's discrete latent sites.

_MAX_ASSIGNMENTS = 100_000
_BATCH = 4096
UNIT_MASS = 1e-4


def enumerate_latents(
    model: Callable[..., Any],
    *args: Any,
    max_assignments: int = _MAX_ASSIGNMENTS,
    progress: bool = True,
    **kwargs: Any,
) -> EnumeratedPosterior:
    """Compute the exact evidence and posterior of a Pyro model with discrete latent sites only.

    All assignments of the latent sites are enumerated, including the elements of plates. Existence and support of a
    site may depend on earlier values. ``pyro.factor`` and observed sites form the likelihood, ``pyro.param`` values are
    constants, and marks for enumeration and ``pyro.markov`` have no effect. Assignments with prior probability zero are
    excluded. Small and zero probabilities are used as given to the distribution, not clamped as in torch.

    A model that can be batched runs once per batch of thousands of assignments, other models once per assignment.

    Parameters
    ----------
    model : callable
        Pyro model.
    *args, **kwargs
        Arguments of the model.
    max_assignments : int, default 100000
        Maximum number of assignments.
    progress : bool, default True
        Show a progress bar for runs over two seconds.

    Returns
    -------
    EnumeratedPosterior

    Raises
    ------
    UnsupportedSiteError
        If a latent site is continuous, or its support cannot be enumerated.
    SettingsError
        If there are more than ``max_assignments`` assignments; the message gives their number.
    ModelError
        If the model fails, a log probability is NaN, or prior probabilities do not sum to one.

    References
    ----------
    Goodman, N. D., Stuhlmueller, A. (2014). The Design and Implementation of Probabilistic Programming Languages,
    chapter 2 (enumeration by replaying a program).

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.exact._enumeration import enumerate_latents
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
    """Depth-first enumeration of assignments: the values chosen so far, and the step to the next assignment."""

    def __init__(self) -> None:
        self.choices: list[DiscreteValues] = []
        self._left: list[Iterator[Tensor]] = []
        self._values: list[Tensor] = []
        self._depth = 0

    def supply(self, name: str, fn: Any) -> Tensor:
        """Return the value chosen at this site; at the end of the path, append the first possible value."""
        if self._depth == len(self.choices):
            choice = choices_of(name, fn)
            self.choices.append(choice)
            self._left.append(_values_of(choice))
            self._values.append(next(self._left[-1]))
        elif self.choices[self._depth].name != name:
            raise ModelError(
                f"site {name!r} follows values that were followed by {self.choices[self._depth].name!r} in an earlier "
                "run; the model must draw random numbers by pyro.sample only"
            )
        self._depth += 1
        return self._values[self._depth - 1]

    def advance(self) -> bool:
        """Advance to the next assignment in depth-first order; return False after the last."""
        self._depth = 0
        while self.choices:
            value = next(self._left[-1], None)
            if value is not None:
                self._values[-1] = value
                return True
            for stack in (self.choices, self._left, self._values):
                stack.pop()
        return False


def _values_of(choice: DiscreteValues) -> Iterator[Tensor]:
    """Yield every possible value of a site, shape ``(*elements, *event)``."""
    elements = choice.elements.numel()
    possible = choice.possible.reshape(len(choice.values), elements)
    each = [possible[:, e].nonzero().squeeze(-1).tolist() for e in range(elements)]
    for indices in itertools.product(*each):
        picked = choice.values[torch.tensor(indices, dtype=torch.long, device=choice.values.device)]
        yield picked.reshape(choice.elements + choice.values.shape[1:])


def _count(choices: Mapping[str, DiscreteValues]) -> int:
    count = 1
    for choice in choices.values():
        count *= choice.num_assignments
    return count


def _looks_fixed(replayed: ReplayedModel, choices: Mapping[str, DiscreteValues]) -> bool:
    """Return True if sites and supports are unchanged in a run with the last value of every element."""
    path: dict[str, DiscreteValues] = {}

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
    replayed: ReplayedModel, choices: Mapping[str, DiscreteValues], count: int, progress: bool
) -> EnumeratedPosterior | None:
    """Enumerate a joint space in batches; None if the space depends on values or the model cannot be batched."""
    parts = []
    with progress_bar("assignments", count, enabled=progress) as bar:
        for start in range(0, count, _BATCH):
            part = _batch(replayed, choices, torch.arange(start, min(start + _BATCH, count), device=replayed.device))
            if part is None:
                return None
            parts.append(part)
            bar.update(min(start + _BATCH, count))
    log_prior = torch.cat([part[1] for part in parts])
    if not abs(float(log_prior.logsumexp(0))) < UNIT_MASS:
        return None
    table = {name: torch.cat([part[0][name] for part in parts]) for name in choices}
    return EnumeratedPosterior(table, log_prior, torch.cat([part[2] for part in parts]))


def _batch(
    replayed: ReplayedModel, choices: Mapping[str, DiscreteValues], number: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor] | None:
    """Return assignments with positive prior, log priors and log likelihoods; None as in ``_visit_in_batches``."""
    assignment = _assignments(choices, number)
    try:
        log_prior, log_likelihood = replayed.run_batch(assignment, choices)
    except UNTRACEABLE:
        return None
    possible = log_prior > -torch.inf
    undefined = log_likelihood[possible].isnan() | (log_likelihood[possible] == torch.inf)
    if bool(log_prior.isnan().any()) or bool(undefined.any()):
        return None  # the run for each assignment raises an error that names the site
    return {name: value[possible] for name, value in assignment.items()}, log_prior[possible], log_likelihood[possible]


def _assignments(choices: Mapping[str, DiscreteValues], number: Tensor) -> dict[str, Tensor]:
    """Return the assignments with indices ``number`` in mixed-radix order, ``{site: (B, *elements, *event)}``."""
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
    """Run the model once per assignment, depth first."""
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
