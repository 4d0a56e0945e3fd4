"""Whether beliefs updated by parts of the data and by all of them at once agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, taken
from bayeskit.inference.generalized.posterior import GibbsPosterior

POINTS = 16


@dataclass(frozen=True)
class CoherenceReport:
    """What :func:`coherence_check` finds.

    Attributes
    ----------
    coherent : bool
        Whether all discrepancies are within rounding.
    discrepancy : float
        The largest of ``discrepancies``.
    discrepancies : tuple of float
        Of each division of the data: by how much, at most, the ratio of the densities at two parameters differs
        between updating by its parts and by all data at once, on the log scale.
    splits : tuple of tuple of int
        Sizes of the parts of each division.
    tolerance : float
        What rounding can explain.
    description : str
        Loss and pooling.
    """

    coherent: bool
    discrepancy: float
    discrepancies: tuple[float, ...]
    splits: tuple[tuple[int, ...], ...]
    tolerance: float
    description: str

    def __repr__(self) -> str:
        worst = self.splits[self.discrepancies.index(self.discrepancy)]
        if self.coherent:
            return (
                f"coherent: {self.description}, divided in {len(self.splits)} ways, log densities by parts and at "
                f"once differ by {self.discrepancy:.1e} at most"
            )
        return (
            f"not coherent: {self.description}, log density ratios by parts of {_sizes(worst)} data and at once differ "
            f"by {self.discrepancy:.3g}; use all data at once"
        )


def coherence_check(
    posterior: GibbsPosterior, splits: int | Sequence[Sequence[int]] = 5, seed: int = 0
) -> CoherenceReport:
    """Compare updating by parts of the data with updating by all at once.

    Updated by one part after the other, beliefs become ``prior * exp(-weight * sum over parts of pooled loss)``,
    whatever the pooling; coherence asks that this be the posterior of all data, up to a constant. It is looked at
    where the prior has mass.

    Parameters
    ----------
    posterior : GibbsPosterior
    splits : int or sequence of sequences of int, default 5
        How many random divisions to try, the first into single data if there are at most 1,000. Or the
        divisions themselves: sizes of consecutive parts, such as ``[(1, 2), (1, 1, 1)]`` of three data.
    seed : int, default 0
        Of divisions and points.

    Returns
    -------
    CoherenceReport

    Raises
    ------
    SettingsError
        If sizes do not sum to the number of data.
    DataError
        If there is only one datum, which cannot be divided.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
    >>> coherence_check(GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x)).coherent
    True
    >>> coherence_check(GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x, pooling="max")).coherent
    False
    """
    if posterior.num_data < 2:
        raise DataError("there is one datum, which cannot be divided; give at least two")
    points = posterior.prior.start(POINTS, seed)
    whole = _pooled(posterior, points, posterior.data)
    sizes, discrepancies, scale = [], [], float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())
    for parts in _divisions(posterior.num_data, splits, seed):
        pieces = torch.stack([_pooled(posterior, points, taken(posterior.data, rows)) for rows in parts])
        together = pieces.sum(0)
        scale = max(scale, float(pieces.nan_to_num(0.0, 0.0, 0.0).abs().sum(0).max()))
        # Where both are infinite they agree.
        difference = torch.where(whole == together, 0.0, posterior.weight * (whole - together))
        spread = (
            difference.max() - difference.min()
            if bool(difference.isfinite().all())
            else difference.new_tensor(torch.inf)
        )
        sizes.append(tuple(len(rows) for rows in parts))
        discrepancies.append(float(spread))
    tolerance = posterior.weight * scale * (posterior.num_data + 16) * torch.finfo(posterior.dtype).eps
    largest = max(discrepancies)
    how = f" pooled by {type(posterior.pooling).__name__}" if isinstance(posterior.loss, PointwiseLoss) else ""
    description = type(posterior.loss).__name__ + how
    return CoherenceReport(largest <= tolerance, largest, tuple(discrepancies), tuple(sizes), tolerance, description)


def _pooled(posterior: GibbsPosterior, points: Tensor, data: Data) -> Tensor:
    """Return the pooled loss of data at each point, ``(p,)``."""
    return torch.stack([posterior._pooled(posterior.prior.parameter(u), data) for u in points]).detach()


def _divisions(num_data: int, splits: int | Sequence[Sequence[int]], seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of each part of each division."""
    if isinstance(splits, Sequence):
        if not splits:
            raise SettingsError("splits names no division; give at least one, such as [(1, 2)] of three data")
        for sizes in splits:
            whole = [whole_number("the size of a part", size, 1) for size in sizes]
            if sum(whole) != num_data or len(whole) < 2:
                raise SettingsError(f"parts of {_sizes(whole)} data are no division of {num_data}")
            yield torch.arange(num_data).split(whole)
        return
    generator = new_generator(seed, stream="coherence")
    for number in range(whole_number("splits", splits, 1)):
        rows = torch.randperm(num_data, generator=generator)
        if number == 0 and num_data <= 1000:
            yield rows.split(1)
        else:
            num_parts = int(torch.randint(2, min(num_data, 8) + 1, (), generator=generator))
            cuts = 1 + torch.randperm(num_data - 1, generator=generator)[: num_parts - 1].sort().values
            yield rows.tensor_split(cuts)


def _sizes(sizes: Sequence[int]) -> str:
    shown = " + ".join(str(n) for n in sizes[:6])
    return shown if len(sizes) <= 6 else f"{shown} + ..."
