"""A posterior over finitely many assignments, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._arviz import as_inference_data, to_datasets
from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import ImproperPosteriorError, ShapeError, UnknownNameError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Labels that an axis of values has at most.
LABELS = 12


class Marginal(NamedTuple):
    """The marginal posterior of every element of a site.

    Probabilities of an element that exists only in some assignments add up to the probability that it does.
    """

    values: Tensor  # (V,)
    probabilities: Tensor  # (*shape, V)


class Assignment(NamedTuple):
    """One assignment of the latent sites and its posterior probability."""

    values: dict[str, Tensor]
    probability: float


@dataclass(frozen=True, eq=False)
class EnumeratedPosterior:
    """The exact posterior of a model with ``M`` assignments of its discrete latent sites.

    Attributes
    ----------
    assignments : mapping of str to Tensor
        By site, shape ``(M, *shape)``. Where a site or its last elements exist only in some assignments, the values
        are float64 and NaN marks those that do not.
    log_prior, log_likelihood : Tensor
        Shape ``(M,)``, float64. No prior probability is zero.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.exact.enumerated_posterior import EnumeratedPosterior
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
        """Make the table of assignments that may differ in their sites and shapes.

        Raises
        ------
        ShapeError
            If a site has different numbers of dimensions.
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
        """Log prior plus log likelihood of each assignment, ``(M,)``."""
        return self.log_prior + self.log_likelihood

    @property
    def log_evidence(self) -> float:
        """Log marginal likelihood, in nats; ``-inf`` where no assignment admits the data."""
        return float(self.log_joint.logsumexp(0))

    @property
    def probabilities(self) -> Tensor:
        """Posterior probability of each assignment, ``(M,)``.

        Raises
        ------
        ImproperPosteriorError
            If no assignment admits the data.
        """
        if self.log_evidence == -torch.inf:
            raise ImproperPosteriorError(
                "the likelihood is zero at every assignment, so there is no posterior; look at the observed sites and "
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
            If no assignment admits the data.
        """
        if site not in self.assignments:
            raise UnknownNameError(f"no latent site is called {site!r}; there are: {', '.join(self.assignments)}")
        column = self.assignments[site]
        values, index = column.unique(return_inverse=True)  # every NaN is a value of its own
        present = ~values.isnan()
        weight = self.probabilities.reshape(-1, *(1,) * (column.dim() - 1)).expand(column.shape).unsqueeze(-1)
        each = torch.zeros(*column.shape[1:], len(values), dtype=weight.dtype, device=weight.device)
        each.scatter_add_(-1, index.movedim(0, -1), weight.squeeze(-1).movedim(0, -1).contiguous())
        return Marginal(values[present], each[..., present])

    def marginals(self) -> dict[str, Marginal]:
        """Return the marginal posterior of every site."""
        return {site: self.marginal(site) for site in self.assignments}

    def expectation(self, function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Return the posterior mean of a function of the assignment.

        Parameters
        ----------
        function : callable
            Takes all assignments at once, ``{site: (M, *shape)}``, and returns ``(M, *out)``; it may be infinite or
            NaN where the posterior probability is zero.

        Returns
        -------
        Tensor
            Shape ``out``, float64.

        Raises
        ------
        ShapeError
            If the function does not return one value an assignment.
        """
        values = torch.as_tensor(function(dict(self.assignments)))
        if values.dim() == 0 or len(values) != len(self):
            raise ShapeError(
                f"the function returned shape {tuple(values.shape)} instead of ({len(self)}, ...); it is given all "
                "assignments at once, so reduce over later dimensions only"
            )
        p = self.probabilities.reshape(-1, *(1,) * (values.dim() - 1))
        return torch.where(p > 0, p * values, p.new_zeros(())).sum(0)

    def most_probable(self) -> Assignment:
        """Return the most probable assignment, of equal ones the first.

        Raises
        ------
        ImproperPosteriorError
            If no assignment admits the data.
        """
        best = int(self.log_joint.argmax())
        return Assignment({k: v[best] for k, v in self.assignments.items()}, float(self.probabilities[best]))

    def sample(self, num_draws: int, seed: int | torch.Generator = 0) -> dict[str, Tensor]:
        """Draw independent assignments from the posterior, ``{site: (num_draws, *shape)}``."""
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, self.log_prior.device, stream="enumerated posterior")
        index = torch.multinomial(self.probabilities, num_draws, replacement=True, generator=generator)
        return {name: value[index] for name, value in self.assignments.items()}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row an assignment, the most probable first: a column an element, probability, log joint.

        Elements that do not exist in an assignment are missing there.
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

    def to_arviz(self, num_chains: int = 4, num_draws: int = 1000, seed: int | torch.Generator = 0) -> Any:
        """Return independent draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x."""
        chains, count = whole_number("num_chains", num_chains, 1), whole_number("num_draws", num_draws, 1)
        draws = self.sample(chains * count, seed)
        posterior = {name: value.reshape(chains, count, *value.shape[1:]) for name, value in draws.items()}
        return as_inference_data(to_datasets({"posterior": posterior}, {"log_evidence": self.log_evidence}))

    def plot(self, site: str, ax: Axes | None = None) -> Axes:
        """Plot the marginal posterior of a site: bars for a single element, an image for several.

        Parameters
        ----------
        site : str
        ax : Axes, optional
            By default those of a new figure.

        Returns
        -------
        Axes

        Raises
        ------
        UnknownNameError
            If there is no such site.
        ImproperPosteriorError
            If no assignment admits the data.
        """
        from bayeskit._plots import BLUE

        values, probabilities = self.marginal(site)
        height = probabilities.reshape(-1, len(values)).cpu().numpy()
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
        places = range(0, len(values), -(-len(values) // LABELS))
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
    """Stack the values of a site, NaN where there is none."""
    present = [value for value in values if value is not None]
    shapes = {tuple(value.shape) for value in present}
    if len(shapes) == 1 and len(present) == len(values):
        return torch.stack(present)
    if len({len(shape) for shape in shapes}) > 1:
        raise ShapeError(f"site {name!r} has values of shapes {sorted(shapes)}; give it one number of dimensions")
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    column = torch.full((len(values), *largest), torch.nan, dtype=torch.float64, device=present[0].device)
    for row, value in zip(column, values, strict=True):
        if value is not None:
            row[tuple(slice(n) for n in value.shape)] = value.to(torch.float64)
    return column
