"""Base class of distributions over topologies."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, overload

import numpy as np
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import AccuracyWarning, CheckpointError, SettingsError, ShapeError, TreeError
from bayeskit.extend import Schema, loaded_tensors, new_generator, save_tensors, warn_user
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions._graphs import Floats, add_up
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies, canonical_children
from bayeskit.models.phylogenetics._trees import Tree

if TYPE_CHECKING:
    import pandas as pd

_SCHEMA = Schema("a distribution over topologies", 1)

# Weighted topologies, to fit distributions to and compare them with.


class WeightedTopologies(Protocol):
    """Topologies with weights, such as a `TreeSample`."""

    @property
    def topologies(self) -> Topologies:
        """The topologies."""

    @property
    def weights(self) -> Any:
        """Their weights, `(topologies,)`."""


class _Equal(NamedTuple):
    topologies: Topologies
    weights: Floats


def check_topologies(topologies: object, empty: bool = False) -> None:
    """Raise TreeError unless the argument is `Topologies`, and not empty unless `empty` is true."""
    if not isinstance(topologies, Topologies):
        raise TreeError(
            f"{type(topologies).__name__} is not Topologies. Remedy: give Topologies.from_trees(trees), or the "
            "topologies of a sample, sample.topologies."
        )
    if not (empty or len(topologies)):
        raise TreeError("There is no topology. Remedy: give at least one topology.")


def weighted_topologies(sample: WeightedTopologies | Topologies) -> tuple[Topologies, Floats]:
    """Return distinct topologies with positive weights, and these weights `(topologies,)`, which sum to one.

    `Topologies` count equally; wrong shapes raise ShapeError, other invalid samples TreeError.
    """
    if isinstance(sample, Topologies):
        check_topologies(sample)
        return weighted_topologies(_Equal(sample, np.ones(len(sample))))
    if not (hasattr(sample, "topologies") and hasattr(sample, "weights")):
        raise TreeError(
            f"{type(sample).__name__} holds no weighted topologies. Remedy: make a sample with TreeSample.from_trees "
            "or TreeSample.from_topologies; to fit another distribution, give its draws, .sample(1000, seed=0)."
        )
    check_topologies(sample.topologies)
    topologies, given = sample.topologies, torch.as_tensor(sample.weights).detach().cpu().numpy().astype(np.float64)
    if given.shape != (len(topologies),):
        raise ShapeError(
            f"weights: shape {given.shape} does not fit {len(topologies)} topologies. Remedy: give one weight for each "
            "topology."
        )
    if not np.isfinite(given).all() or (given < 0).any() or not given.sum() > 0:
        raise TreeError(
            "weights: a weight is negative or not finite, or all weights are zero. Remedy: give frequencies of trees."
        )
    distinct, index = topologies.distinct()
    weights = add_up(index, given, len(distinct))
    return distinct[weights > 0], weights[weights > 0] / given.sum()


# Probabilities of splits under a distribution over topologies.


@dataclass(frozen=True, eq=False, repr=False)
class SplitProbabilities:
    """Probabilities of splits, in descending order.

    Attributes
    ----------
    taxa : tuple of str
    splits : ndarray
        Bitset of each clade (if rooted) or of the side of each split without the first taxon: shape `(splits, words)`.
        Trivial splits are left out.
    probabilities : ndarray
        Shape `(splits,)`.
    """

    taxa: tuple[str, ...]
    splits: clades.Bits
    probabilities: Floats

    def __repr__(self) -> str:
        likely = int((self.probabilities > 0.5).sum())
        return f"SplitProbabilities({len(self.splits)} splits, {likely} above 0.5, {len(self.taxa)} taxa)"

    def to_dict(self) -> dict[tuple[str, ...], float]:
        """Return the probability of each split by the names of its taxa, in the order of `taxa`."""
        names = (tuple(self.taxa[taxon] for taxon in clades.members(split)) for split in self.splits)
        return dict(zip(names, self.probabilities.tolist(), strict=True))

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per split: its taxa joined by `|`, its size and its probability.

        Examples
        --------
        >>> splits = clades.single(4)[1:3].sum(axis=0, dtype=np.uint64)[None]
        >>> SplitProbabilities(("A", "B", "C", "D"), splits, np.array([0.75])).to_pandas()
          split  size  probability
        0   B|C     2         0.75
        """
        import pandas as pd

        names = ["|".join(taxa) for taxa in self.to_dict()]
        return pd.DataFrame({"split": names, "size": clades.size(self.splits), "probability": self.probabilities})


def most_probable_splits(
    taxa: tuple[str, ...], rooted: bool, sets: clades.Bits, probabilities: Floats
) -> SplitProbabilities:
    """Keep nontrivial splits with positive probability, in descending order of probability."""
    sizes = clades.size(sets)
    kept = (sizes > 1) & (sizes < len(taxa) - (0 if rooted else 1)) & (probabilities > 0)
    if not rooted:
        kept &= ~clades.contains(sets, 0)
    order = np.flatnonzero(kept)[np.argsort(-probabilities[kept], kind="stable")]
    return SplitProbabilities(taxa, sets[order], probabilities[order])


Shape = torch.Size | list[int] | tuple[int, ...]
#: Number of topologies in one batch.
CHUNK = 10_000
#: Largest number of taxa for sums over all unrooted topologies (10,395).
_LISTED_TAXA = 8


class Estimate(NamedTuple):
    """A number and its Monte Carlo standard error, zero if the number is exact."""

    value: float
    standard_error: float


class _TopologyConstraint(constraints.Constraint):
    """Topologies with positive probability under a distribution."""

    is_discrete = True
    event_dim = 2

    def __init__(self, distribution: TopologyDistribution) -> None:
        self._distribution = distribution

    def check(self, value: Tensor) -> Tensor:
        """Tell which topologies `(*batch, internal, 2)` are in the support, `(*batch)`."""
        with torch.no_grad():
            return self._distribution.log_prob(value) > -math.inf


class TopologyDistribution(TorchDistribution):  # type: ignore[misc]
    """Base class of distributions over topologies of the same taxa.

    The Pyro event is the integer array `Topologies.children` of one topology, `(internal, 2)`, in the order of `taxa`:
    `sample()` draws such tensors from torch's global random state, and `log_prob` accepts them. Both also work with
    `Topologies`: `sample(100, seed=0)` and `log_prob(topologies)`.

    Attributes
    ----------
    taxa : tuple of str
        Names of the `n` tips.
    rooted : bool
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    has_enumerate_support = False
    taxa: tuple[str, ...]
    rooted: bool

    def __init__(self, taxa: tuple[str, ...], rooted: bool) -> None:
        self.taxa, self.rooted = tuple(taxa), rooted
        event = torch.Size((len(taxa) - (1 if rooted else 2), 2))
        super().__init__(torch.Size(), event, validate_args=False)

    def __repr__(self) -> str:
        kind = "rooted" if self.rooted else "unrooted"
        return f"{type(self).__name__}({len(self.taxa)} taxa, {kind}, {self._size()})"

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self) -> constraints.Constraint:
        """Constraint that defines the support."""
        return _TopologyConstraint(self)

    def expand(self, batch_shape: Shape, _instance: None = None) -> Self:
        """Return the distribution with another batch shape of independent topologies."""
        expanded = copy.copy(self)
        expanded._batch_shape = torch.Size(batch_shape)
        return expanded

    @overload
    def sample(self, sample_shape: int, *, seed: int | torch.Generator | None = None) -> Topologies: ...
    @overload
    def sample(self, sample_shape: Shape = ..., *, seed: int | torch.Generator | None = None) -> Tensor: ...

    def sample(
        self,
        sample_shape: int | Shape = torch.Size(),  # noqa: B008  torch's own signature
        *,
        seed: int | torch.Generator | None = None,
    ) -> Topologies | Tensor:
        """Draw topologies.

        Parameters
        ----------
        sample_shape : int or torch.Size
            An int gives `Topologies`; a shape, as in Pyro, gives a tensor.
        seed : int or torch.Generator, optional
            By default torch's global random state, as Pyro requires.

        Returns
        -------
        Topologies or Tensor
            `sample_shape` topologies; or a tensor `sample_shape + batch_shape + (internal, 2)`, int64.
        """
        generator = None if seed is None else new_generator(seed, stream="topologies")
        if isinstance(sample_shape, int):
            if sample_shape < 0:
                raise SettingsError(f"sample_shape: {sample_shape} is negative. Remedy: give a number of topologies.")
            return self._draw(sample_shape, generator)
        shape = torch.Size(sample_shape) + self.batch_shape
        drawn = self._draw(shape.numel(), generator)
        return torch.from_numpy(drawn.children.astype(np.int64)).reshape(shape + self.event_shape)

    def log_prob(self, value: Topologies | Tree | Tensor) -> Tensor:
        """Return log probabilities in nats, minus infinity outside the support.

        Parameters
        ----------
        value : Topologies, Tree or Tensor
            Topologies over the same taxa in any order, an unrooted tree, or a tensor as from `sample(shape)`.

        Returns
        -------
        Tensor
            Shape `(topologies,)`, or `()` for a tree; for a tensor `(*batch, internal, 2)`, `batch` broadcast with
            `batch_shape`.

        Raises
        ------
        TreeError
            If the taxa differ, only one of distribution and topologies is rooted, or a tensor holds no topologies.
        ShapeError
            If a tensor has another shape.
        """
        topologies = self.read(value)
        starts = range(0, len(topologies), CHUNK)
        parts = [self._log_prob(topologies[start : start + CHUNK]) for start in starts]
        total = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        if isinstance(value, Tensor):
            return total.reshape(value.shape[:-2]).expand(self._broadcast(value.shape[:-2]))
        return total[0] if isinstance(value, Tree) else total

    def read(self, value: Topologies | Tree | Tensor) -> Topologies:
        """Convert an argument of `log_prob` to topologies in the taxon order of this distribution."""
        if isinstance(value, Tree):
            if self.rooted:
                raise TreeError(
                    "A Tree has no root, but the distribution is over rooted topologies. Remedy: give Topologies."
                )
            return Topologies.from_trees([value], self.taxa)
        if isinstance(value, Tensor):
            if value.shape[-2:] != self.event_shape:
                raise ShapeError(
                    f"value: shape {tuple(value.shape)} does not end with {tuple(self.event_shape)}. Remedy: give the "
                    f"`children` of topologies of {len(self.taxa)} taxa."
                )
            children = value.detach().cpu().reshape(-1, *self.event_shape).numpy()
            return Topologies(self.taxa, canonical_children(children, len(self.taxa), self.rooted), self.rooted)
        check_topologies(value, empty=True)
        if value.rooted != self.rooted:
            kinds = ("unrooted", "rooted")
            raise TreeError(
                f"The topologies are {kinds[value.rooted]}, but the distribution is over {kinds[self.rooted]} "
                "topologies. Remedy: fit the distribution to topologies of the same kind, or convert the topologies."
            )
        return value if value.taxa == self.taxa else value.with_taxa(self.taxa)[0]

    def _broadcast(self, batch: torch.Size) -> torch.Size:
        try:
            return torch.broadcast_shapes(self.batch_shape, batch)
        except RuntimeError as error:
            raise ShapeError(
                f"value: its batch shape {tuple(batch)} does not broadcast with the batch shape "
                f"{tuple(self.batch_shape)} of the distribution. Remedy: give as many topologies."
            ) from error

    def entropy(  # type: ignore[override]  # with its error
        self, *, num_samples: int = 10_000, seed: int | torch.Generator = 0
    ) -> Estimate:
        """Return the entropy in nats.

        Parameters
        ----------
        num_samples : int, default 10_000
            Draws for the estimate if there is no closed form; at least two.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Estimate
            The value and its standard error, zero if exact.
        """
        if num_samples < 2:
            raise SettingsError(f"num_samples: {num_samples} is too small. Remedy: give at least 2.")
        with torch.no_grad():
            surprise = -self.log_prob(self.sample(num_samples, seed=seed)).to(torch.float64)
        return Estimate(float(surprise.mean()), float(surprise.std()) / math.sqrt(num_samples))

    @overload
    def kl_from(self, reference: WeightedTopologies | Topologies, floor: float = ...) -> float: ...
    @overload
    def kl_from(
        self,
        reference: TopologyDistribution,
        floor: float = ...,
        *,
        num_samples: int = ...,
        seed: int | torch.Generator = ...,
    ) -> Estimate: ...

    def kl_from(
        self,
        reference: WeightedTopologies | Topologies | TopologyDistribution,
        floor: float = 0.0,
        *,
        num_samples: int = 10_000,
        seed: int | torch.Generator = 0,
    ) -> float | Estimate:
        """Return the Kullback-Leibler divergence from a reference to this distribution, `KL(reference || self)`.

        Parameters
        ----------
        reference : WeightedTopologies or TopologyDistribution
            Weights, such as a `TreeSample` or `SampleFrequencies`; `Topologies` with equal weights; or another
            distribution. For a distribution the sum over all topologies is exact up to 8 taxa (7 if rooted), and
            estimated from draws beyond. Do not pass frequencies of its draws: they overestimate the divergence.
        floor : float, default 0.0
            Lower bound of the probability of a topology in this distribution. With zero, the divergence is infinite if
            a topology of the reference is outside the support. Zhang and Matsen (2018) use `numpy.finfo(float).eps`.
        num_samples : int, default 10_000
            Draws for the estimate, at least two. A topology outside the support that is not drawn is not detected.
        seed : int or torch.Generator, default 0

        Returns
        -------
        float or Estimate
            The divergence in nats; an Estimate for a distribution, with standard error zero if exact.

        Raises
        ------
        SettingsError
            If the floor is not in [0, 1], or there are too few draws.

        Warns
        -----
        AccuracyWarning
            If the divergence is infinite; the message gives the number of topologies outside the support.
        """
        if not 0.0 <= floor <= 1.0:
            raise SettingsError(f"floor: {floor} is not a probability. Remedy: give zero, or a tiny number.")
        if isinstance(reference, TopologyDistribution) and not hasattr(reference, "weights"):
            return self._estimated_kl(reference, floor, num_samples, seed)
        topologies, weights = weighted_topologies(reference)
        return float(weights @ self._log_ratios(np.log(weights), topologies, weights, floor))

    def _estimated_kl(
        self, reference: TopologyDistribution, floor: float, num_samples: int, seed: int | torch.Generator
    ) -> Estimate:
        if num_samples < 2:
            raise SettingsError(f"num_samples: {num_samples} is too small. Remedy: give at least 2.")
        if len(reference.taxa) <= _LISTED_TAXA - (1 if reference.rooted else 0):
            topologies = all_topologies(reference.taxa, reference.rooted)
            log_weights = reference._log_prob_array(topologies)
            held = log_weights > -math.inf
            weights, log_weights = np.exp(log_weights[held]), log_weights[held]
            return Estimate(float(weights @ self._log_ratios(log_weights, topologies[held], weights, floor)), 0.0)
        drawn = reference.sample(num_samples, seed=seed)
        equal = np.full(num_samples, 1 / num_samples)
        ratios = self._log_ratios(reference._log_prob_array(drawn), drawn, equal, floor)
        if np.isinf(ratios).any():
            return Estimate(math.inf, 0.0)
        return Estimate(float(ratios.mean()), float(ratios.std(ddof=1)) / math.sqrt(num_samples))

    def _log_ratios(self, log_reference: Floats, topologies: Topologies, weights: Floats, floor: float) -> Floats:
        """Return log ratios of a reference's probabilities to those of `self`; warn if any is infinite."""
        log_prob = self._log_prob_array(topologies)
        outside = np.isneginf(log_prob)
        if outside.any() and floor == 0.0:
            warn_user(
                f"The divergence is infinite: {outside.sum()} of the reference's {len(topologies)} topologies, with "
                f"total probability {weights[outside].sum():.3g}, have probability zero under this "
                f"{type(self).__name__}. Remedy: compare Smoothed(distribution, epsilon=1e-6), or give a floor; "
                "why_not(topologies) gives the reason.",
                AccuracyWarning,
            )
        with np.errstate(divide="ignore"):
            return log_reference - np.maximum(log_prob, np.log(floor))

    def _log_prob_array(self, topologies: Topologies) -> Floats:
        with torch.no_grad():
            array: Floats = self.log_prob(topologies).detach().to("cpu", torch.float64).numpy()
        return array

    def save(self, path: str | Path) -> None:
        """Write the distribution to one safetensors file.

        Parameters
        ----------
        path : str or Path
            Overwritten if it exists.
        """
        facts = {"kind": type(self).__name__, "taxa": list(self.taxa), "rooted": self.rooted}
        save_tensors(path, self._tensors(), {**facts, **self._facts()}, _SCHEMA)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`, without executing code from it.

        Parameters
        ----------
        path : str or Path

        Returns
        -------
        TopologyDistribution
            Called on `TopologyDistribution` itself, it reads a distribution of any class.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, or has other contents.
        """
        with loaded_tensors(path, _SCHEMA) as (tensors, facts):
            kind = cls._of_kind(facts["kind"])
            if kind is None:
                raise CheckpointError(f"{path} holds {facts['kind']}, not {cls.__name__}; load it with its own class")
            if not all(isinstance(name, str) for name in facts["taxa"]):
                raise SettingsError("the names of taxa are no text")
            return kind._restore(tensors, facts)

    def most_probable_tree(self) -> Topologies:
        """Return the most probable topology as `Topologies` of length one; `.tree(0)` makes an unrooted `Tree`."""
        raise NotImplementedError

    def split_probabilities(self) -> SplitProbabilities:
        """Return the probability that a topology has each split (or clade, if rooted)."""
        raise NotImplementedError

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Topologies:
        raise NotImplementedError

    def _log_prob(self, topologies: Topologies) -> Tensor:
        raise NotImplementedError

    def _tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _size(self) -> str:
        """Return the size of the distribution for `repr`."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _of_kind(cls, name: object) -> type[Self] | None:
        """Return this class or its subclass called `name`, or None."""
        kinds = [cls]
        for kind in kinds:
            if kind.__name__ == name:
                return kind
            kinds += kind.__subclasses__()
        return None

    @classmethod
    def _restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        raise NotImplementedError
