"""How many blocks: by the evidence of each number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import SettingsError, UnknownNameError
from bayeskit.models.discrete.block_model.annealing import AnnealedEvidence, annealed_evidence
from bayeskit.models.discrete.block_model.stochastic_block_model import StochasticBlockModel
from bayeskit.models.discrete.inputs import prior_probabilities_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class BlockComparison:
    """Evidence of several numbers of blocks of one graph.

    Attributes
    ----------
    results : dict of AnnealedEvidence
        By number of blocks.
    prior_probabilities : dict of float
        By number of blocks, adding up to one.
    """

    results: dict[int, AnnealedEvidence]
    prior_probabilities: dict[int, float]

    def __getitem__(self, num_blocks: int) -> AnnealedEvidence:
        if num_blocks not in self.results:
            raise UnknownNameError(
                f"no model has {num_blocks!r} blocks; there are: {', '.join(map(str, self.results))}"
            )
        return self.results[num_blocks]

    def __repr__(self) -> str:
        lines = [
            f"{row.num_blocks} blocks: log evidence {row.log_evidence:.4f} +- {row.standard_error:.4f}, probability "
            f"{row.posterior_probability:.4g} +- {row.posterior_probability_error:.2g}"
            + ("" if row.reliable else " (not to be relied on)")
            for row in self.to_pandas().itertuples()
        ]
        return "\n".join(lines)

    @property
    def best(self) -> int:
        """The number with the largest evidence, whatever its prior probability."""
        return max(self.results, key=lambda size: self.results[size].log_evidence)

    def log_bayes_factor(self, num_blocks: int, other: int | None = None) -> tuple[float, float]:
        """Return the log Bayes factor of a number against another and its standard error, in nats.

        Parameters
        ----------
        num_blocks : int
        other : int, optional
            By default the best.

        Raises
        ------
        UnknownNameError
            If there is no model of such a number.
        """
        one, two = self[num_blocks], self[self.best if other is None else other]
        if one is two:
            return 0.0, 0.0
        return one.log_evidence - two.log_evidence, math.hypot(one.standard_error, two.standard_error)

    @property
    def posterior_probabilities(self) -> dict[int, tuple[float, float]]:
        """Posterior probability of each number and its Monte Carlo error, to first order in those of log evidences."""
        estimates = self.results.values()
        with np.errstate(divide="ignore"):
            weight = np.log([self.prior_probabilities[size] for size in self.results])
        weight = weight + np.array([z.log_evidence for z in estimates])
        p = np.exp(weight - weight.max())
        p = p / p.sum()
        # d p_i = p_i (d z_i - sum_j p_j d z_j), and the errors of the estimates are independent.
        error = np.sqrt((np.diag(p) - np.outer(p, p)) ** 2 @ np.array([z.standard_error for z in estimates]) ** 2)
        return {size: (float(a), float(b)) for size, a, b in zip(self.results, p, error, strict=True)}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a number of blocks; Bayes factors are against the best."""
        import pandas as pd

        posterior, rows = self.posterior_probabilities, []
        for size, z in self.results.items():
            (factor, factor_error), (p, p_error) = self.log_bayes_factor(size), posterior[size]
            rows.append(
                {
                    "num_blocks": size,
                    "log_evidence": z.log_evidence,
                    "standard_error": z.standard_error,
                    "log_bayes_factor": factor,
                    "log_bayes_factor_error": factor_error,
                    "prior_probability": self.prior_probabilities[size],
                    "posterior_probability": p,
                    "posterior_probability_error": p_error,
                    "effective_sample_size": z.effective_sample_size,
                    "num_steps": z.num_steps,
                    "reliable": z.reliable,
                }
            )
        return pd.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the posterior probability of each number of blocks, with bars of two standard errors.

        Parameters
        ----------
        ax : Axes, optional
            By default those of a new figure.
        """
        from bayeskit._plots import BLUE, GREY

        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(5.2, 3.6), layout="constrained").subplots()
        p, error = np.array(list(self.posterior_probabilities.values())).T
        reach = [np.minimum(2 * error, p), np.minimum(2 * error, 1 - p)]
        ax.bar(range(len(p)), p, color=BLUE, alpha=0.8)
        ax.errorbar(range(len(p)), p, yerr=reach, fmt="none", ecolor=GREY, capsize=3)
        ax.set_xticks(range(len(p)), [str(size) for size in self.results])
        ax.set_ylim(0.0, 1.0)
        ax.set_xlabel("number of blocks")
        ax.set_ylabel("posterior probability")
        return ax


def compare_num_blocks(
    adjacency: Tensor,
    num_blocks: Iterable[int] = range(1, 6),
    *,
    concentration: float = 1.0,
    within_prior: tuple[float, float] = (1.0, 1.0),
    between_prior: tuple[float, float] = (1.0, 1.0),
    prior_probabilities: Mapping[int, float] | None = None,
    num_chains: int = 1000,
    num_steps: int | None = None,
    max_num_steps: int = 6400,
    seed: int = 0,
    progress: bool = True,
) -> BlockComparison:
    """Estimate the evidence of each number of blocks by annealing, and turn it into their posterior.

    With 300 chains, 24 nodes in three planted blocks take a core about a minute for each number above two.
    Blocks may be empty, so that a model of more blocks also has those of fewer in it: what it loses by being too large
    is less than where every block must have members.

    Parameters
    ----------
    adjacency : Tensor or array
        Of :class:`StochasticBlockModel`, as are ``concentration`` and the priors of edges.
    num_blocks : iterable of int, default 1 to 5
        At least two numbers.
    concentration, within_prior, between_prior
    prior_probabilities : mapping of int to float, optional
        Of each number, adding up to one after scaling; by default equal.
    num_chains, num_steps, max_num_steps
        Of :func:`annealed_evidence`, for each number.
    seed : int, default 0
        Each number has random numbers of its own, which do not depend on the others.
    progress : bool, default True

    Returns
    -------
    BlockComparison

    Raises
    ------
    ShapeError, DataError
        If ``adjacency`` is no such matrix.
    SettingsError
        If there are fewer than two numbers, one is given twice, ``prior_probabilities`` are of others, or another
        setting lies outside its domain.

    Warns
    -----
    AccuracyWarning
        If an estimate is not to be relied on.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.block_model import compare_num_blocks
    >>> two_cliques = torch.block_diag(*[1 - torch.eye(5)] * 2)
    >>> comparison = compare_num_blocks(two_cliques, [1, 2], num_steps=100)
    >>> comparison.best, comparison.posterior_probabilities[2][0] > 0.99
    (2, True)
    """
    sizes = _sizes(num_blocks)
    chances = prior_probabilities_of(sizes, prior_probabilities)
    models = {size: StochasticBlockModel(adjacency, size, concentration, within_prior, between_prior) for size in sizes}
    results = {
        size: annealed_evidence(
            model,
            num_chains,
            num_steps,
            max_num_steps=max_num_steps,
            seed=new_generator(seed, model.adjacency.device, stream=f"{size} blocks"),
            progress=progress,
        )
        for size, model in models.items()
    }
    return BlockComparison(results, chances)


def _sizes(num_blocks: Any) -> list[int]:
    given = list(num_blocks) if isinstance(num_blocks, Iterable) else [num_blocks]
    sizes = [whole_number("num_blocks", size, least=1) for size in given]
    if len(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise SettingsError(f"give at least two numbers of blocks, each once, such as range(1, 5), not {sizes}")
    return sizes
