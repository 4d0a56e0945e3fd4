"""Binary genotypes of cells, seen through false positives, false negatives and missing entries."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.genotypes import noise
from bayeskit.models.discrete.genotypes.conflicts import check_genotypes, conflict_free_matrices, has_conflict

#: How many recursions run side by side while columns are sampled: at most so many, and numbers kept by all of them.
_PREFIXES, _NUMBERS = 64, 2**27


class GenotypePosterior(NamedTuple):
    """All matrices that a posterior is spread over.

    Attributes
    ----------
    genotypes : Tensor of bool
        Conflict-free matrices, most probable first, ``(count, cells, mutations)``.
    probabilities : Tensor
        Of each, ``(count,)``.
    log_evidence : Tensor
        Log probability of the observed matrix, ``()``.
    """

    genotypes: Tensor
    probabilities: Tensor
    log_evidence: Tensor

    def __repr__(self) -> str:
        count, cells, mutations = self.genotypes.shape
        return (
            f"GenotypePosterior(log_evidence={float(self.log_evidence):.6f}, {count} matrices of {cells} cells and "
            f"{mutations} mutations)"
        )


class NoisyGenotypes:
    """Posterior of a perfect phylogeny's genotype matrix, given a noisy copy of it.

    A priori all conflict-free matrices are equally probable: each mutation arose once, none was lost, and the ancestor
    had none. Each entry is then read with errors, independently.

    Parameters
    ----------
    observed : Tensor
        Zeros and ones, and NaN where an entry is missing, shape ``(cells, mutations)``.
    false_positive_rate, false_negative_rate : Tensor or float
        Probability of reading 1 where there is 0, and 0 where there is 1; in ``[0, 1)``, of shape ``(*batch)``.

    Raises
    ------
    ShapeError
        If ``observed`` is not a matrix, or the rates do not broadcast.
    DataError
        If an entry is neither 0, 1 nor missing.
    SettingsError
        If a rate is no number or lies outside its domain.

    References
    ----------
    Jahn, K., Kuipers, J., Beerenwinkel, N. (2016). Tree inference for single-cell data. Genome Biology 17, 86
    (the noise; their prior is uniform over trees of mutations, here it is so over matrices).

    Gusfield, D. (1991). Efficient algorithms for inferring evolutionary trees. Networks 21, 19-28.

    Examples
    --------
    >>> import torch
    >>> observed = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    >>> model = NoisyGenotypes(observed, false_positive_rate=0.01, false_negative_rate=0.2)
    >>> posterior = model.enumerate()
    >>> posterior.probabilities[:2]
    tensor([0.3935, 0.3935], dtype=torch.float64)
    >>> bool((model.log_evidence() - posterior.log_evidence).abs() < 1e-12)
    True
    """

    def __init__(
        self, observed: Tensor, false_positive_rate: Tensor | float, false_negative_rate: Tensor | float
    ) -> None:
        self.observed = noise.check_observed(observed)
        positive = self._rate("false_positive_rate", false_positive_rate)
        negative = self._rate("false_negative_rate", false_negative_rate)
        try:
            self.false_positive_rate, self.false_negative_rate = torch.broadcast_tensors(positive, negative)
        except RuntimeError as error:
            raise ShapeError(
                f"the rates have shapes {tuple(positive.shape)} and {tuple(negative.shape)}; give the same (*batch)"
            ) from error

    def __repr__(self) -> str:
        missing, rates = int(self.observed.isnan().sum()), []
        for name in ("false_positive_rate", "false_negative_rate"):
            rate = getattr(self, name)
            rates.append(f"{name}={f'shape {tuple(rate.shape)}' if rate.dim() else f'{float(rate):g}'}")
        return (
            f"NoisyGenotypes({self.num_cells} cells, {self.num_mutations} mutations, {missing} missing entries, "
            f"{', '.join(rates)})"
        )

    @property
    def num_cells(self) -> int:
        """Rows of the matrix."""
        return self.observed.shape[0]

    @property
    def num_mutations(self) -> int:
        """Columns of the matrix."""
        return self.observed.shape[1]

    def log_likelihood(self, genotypes: Tensor) -> Tensor:
        """Return the log probability of the observed matrix given true ones, whether these have conflicts or not.

        Parameters
        ----------
        genotypes : Tensor
            Zeros and ones, ``(*batch, cells, mutations)``; the batch broadcasts with that of the rates.

        Returns
        -------
        Tensor
            Shape ``(*batch)``.

        Raises
        ------
        ShapeError, DataError
            If ``genotypes`` are not such matrices, or their batch does not broadcast with that of the rates.
        """
        present = self._check(genotypes)
        self._broadcast_batch(present)
        return self._log_likelihood(present).to(self.observed.dtype)

    def enumerate(self, limit: int = 2**18) -> GenotypePosterior:
        """Return the posterior of every conflict-free matrix.

        Parameters
        ----------
        limit : int, default 262144
            The most matrices to list.

        Raises
        ------
        SettingsError
            If there are more; the message has their number. Also if the rates are batched.
        DataError
            If no conflict-free matrix can give rise to the observed one, as may be without errors.
        """
        self._check_single_rates("enumerate")
        genotypes = conflict_free_matrices(self.num_cells, self.num_mutations, limit).to(self.observed.device)
        log_likelihood = self._log_likelihood(genotypes)
        total = log_likelihood.logsumexp(0)
        noise.check_possible(total)
        probabilities, order = (log_likelihood - total).exp().to(self.observed.dtype).sort(descending=True, stable=True)
        log_evidence = (total - math.log(len(genotypes))).to(self.observed.dtype)
        return GenotypePosterior(genotypes[order], probabilities, log_evidence)

    def log_evidence(self) -> Tensor:
        """Return the log probability of the observed matrix, summed over all conflict-free ones without a list.

        Returns
        -------
        Tensor
            Shape ``(*batch)`` of the rates, differentiable by those above zero (by a zero, the gradient is NaN); minus
            infinity where no matrix is possible.

        Raises
        ------
        SettingsError
            If there are more than 10 cells or 8 mutations, or if the probability lies below the range of
            floating-point numbers, as may be with rates below about ``1e-12``.
        """
        log_evidence = noise.log_evidence(self.observed, self.false_positive_rate, self.false_negative_rate)
        noise.check_range(log_evidence.detach(), self._column_terms().detach())
        return log_evidence

    def marginals(self) -> Tensor:
        """Return the posterior probability of each entry to be one.

        Returns
        -------
        Tensor
            Shape ``(*batch, cells, mutations)``.

        Raises
        ------
        SettingsError
            As :meth:`log_evidence`.
        DataError
            If no conflict-free matrix is possible.
        """
        probabilities = noise.column_probabilities(self._column_terms())
        return (probabilities @ noise.members(self.num_cells, probabilities)).mT.to(self.observed.dtype)

    def sample(self, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw independent matrices from the exact posterior, column after column.

        Parameters
        ----------
        num_samples : int
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor of bool
            Shape ``(num_samples, cells, mutations)``.

        Raises
        ------
        SettingsError
            As :meth:`log_evidence`. Also if the rates are batched.
        DataError
            If no conflict-free matrix is possible.
        """
        self._check_single_rates("sample")
        num_samples = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, self.observed.device, stream="genotypes")
        terms = self._column_terms()
        kept = 2 ** (self.num_cells + 2 * self.num_mutations)
        side_by_side = min(_PREFIXES, max(1, _NUMBERS // kept))
        columns = torch.empty(num_samples, 0, dtype=torch.int64, device=terms.device)
        for j in range(self.num_mutations):
            # Samples that agree so far share one recursion.
            prefixes, which = columns.unique(dim=0, return_inverse=True) if j else (columns[:1], None)
            chunks = [noise.column_probabilities(_given(terms, chunk))[:, j] for chunk in prefixes.split(side_by_side)]
            probabilities = torch.cat(chunks)
            probabilities = probabilities.expand(num_samples, -1) if which is None else probabilities[which]
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            columns = torch.cat([columns, drawn], dim=1)
        return (noise.members(self.num_cells, self.observed)[columns] == 1).mT

    @one_thread()
    def gibbs_sweep(self, genotypes: Tensor, *, generator: torch.Generator) -> Tensor:
        """Draw each cell's genotype anew given all others, one cell after the other.

        This leaves the posterior as it is, for any number of cells; the cost grows with ``2**mutations``. As both rates
        must be positive, every conflict-free matrix can be reached, for a cell without mutations never conflicts.

        Parameters
        ----------
        genotypes : Tensor
            Conflict-free matrices, one a chain, ``(*chains, cells, mutations)``, to which the batch of the rates can
            be expanded; all zeros will do.
        generator : torch.Generator

        Returns
        -------
        Tensor of bool
            Same shape.

        Raises
        ------
        ShapeError, DataError
            If ``genotypes`` are not such matrices, or have a conflict.
        SettingsError
            If there are more than 12 mutations, or a rate is zero.
        """
        if self.num_mutations > noise.MAX_SWEEP_MUTATIONS:
            raise SettingsError(
                f"a sweep weighs all 2**{self.num_mutations} genotypes of a cell; "
                f"it takes at most {noise.MAX_SWEEP_MUTATIONS} mutations"
            )
        if bool(((self.false_positive_rate == 0) | (self.false_negative_rate == 0)).any()):
            raise SettingsError(
                "sweeps need rates above zero: without one kind of error, they cannot get from every matrix to every "
                "other; use sample, or a small rate"
            )
        present = self._check(genotypes).clone()
        if self._broadcast_batch(present) != present.shape[:-2]:
            raise ShapeError(
                f"genotypes have shape {tuple(present.shape)}, but rates a batch of shape "
                f"{tuple(self.false_positive_rate.shape)}; start from at least one matrix for each pair of rates"
            )
        if bool(has_conflict(present).any()):
            raise DataError("genotypes to start from have a conflict; start from zeros, which have none")
        patterns = noise.members(self.num_mutations, self.observed) == 1
        kinds = _gametes(patterns)
        terms = torch.stack(self._entry_terms(), dim=-2)
        for cell in range(self.num_cells):
            others = torch.cat([present[..., :cell, :], present[..., cell + 1 :, :]], dim=-2)
            seen = _gametes(others).any(-3)
            conflict = (seen.unsqueeze(-3) | kinds).all(-2).any(-1)
            absent_term, present_term = terms[..., cell, :, :].unsqueeze(-3).unbind(-2)
            logits = torch.where(patterns, present_term, absent_term).sum(-1).masked_fill(conflict, -torch.inf)
            uniform = torch.rand(conflict.shape, dtype=terms.dtype, device=terms.device, generator=generator)
            # The largest of logits with Gumbel noise is a draw from their softmax.
            present[..., cell, :] = patterns[(logits - (-uniform.log()).log()).argmax(-1)]
        return present

    def _entry_terms(self) -> tuple[Tensor, Tensor]:
        return noise.entry_terms(self.observed, self.false_positive_rate, self.false_negative_rate)

    def _column_terms(self) -> Tensor:
        noise.check_size(self.num_cells, self.num_mutations)
        return noise.column_terms(self.observed, self.false_positive_rate, self.false_negative_rate)

    def _check(self, genotypes: Tensor) -> Tensor:
        if genotypes.shape[-2:] != self.observed.shape:
            raise ShapeError(
                f"genotypes have shape {tuple(genotypes.shape)}; give (*batch, {self.num_cells}, {self.num_mutations})"
            )
        return check_genotypes(genotypes)

    def _log_likelihood(self, present: Tensor) -> Tensor:
        absent_term, present_term = self._entry_terms()
        return torch.where(present, present_term, absent_term).sum((-2, -1))

    def _broadcast_batch(self, genotypes: Tensor) -> torch.Size:
        batch, rates = genotypes.shape[:-2], self.false_positive_rate.shape
        try:
            return torch.broadcast_shapes(batch, rates)
        except RuntimeError as error:
            raise ShapeError(
                f"genotypes have a batch of shape {tuple(batch)}, which does not broadcast with that of the rates, "
                f"{tuple(rates)}"
            ) from error

    def _check_single_rates(self, method: str) -> None:
        if self.false_positive_rate.dim():
            raise SettingsError(
                f"{method} needs one pair of rates, but they have shape {tuple(self.false_positive_rate.shape)}"
            )

    def _rate(self, name: str, value: Tensor | float) -> Tensor:
        try:
            rate = torch.as_tensor(value, dtype=self.observed.dtype, device=self.observed.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"{name} must be a number in [0, 1) or a tensor of such, not {value!r}") from error
        if not bool(((rate >= 0) & (rate < 1)).all()):
            raise SettingsError(f"{name} must lie in [0, 1), not {value}")
        return rate


def _given(terms: Tensor, columns: Tensor) -> Tensor:
    """Leave the first columns no choice: ``(prefixes, columns)`` to ``(prefixes, mutations, 2**cells)``."""
    fixed = torch.nn.functional.one_hot(columns, terms.shape[-1]).bool()
    first = terms[: columns.shape[1]].masked_fill(~fixed, -torch.inf)
    return torch.cat([first, terms[columns.shape[1] :].expand(len(columns), -1, -1)], dim=1)


def _gametes(present: Tensor) -> Tensor:
    """Return which gametes (only first, only second, both) pairs show: ``(*batch, mutations)`` to ``(*, 3, pairs)``."""
    first, second = torch.triu_indices(present.shape[-1], present.shape[-1], 1, device=present.device)
    left, right = present[..., first], present[..., second]
    return torch.stack([left & ~right, ~left & right, left & right], dim=-2)
