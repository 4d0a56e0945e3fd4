"""Priors of the node heights of a rooted topology: Yule, birth-death and coalescent.

Each prior is a density over labelled histories, that is over rooted topologies with node heights, with respect to
Lebesgue measure of the heights, summed over topologies. Where all tips have the same date, all rankings of internal
nodes are equally probable whatever the parameters, so that a topology has a known probability and `heights` is the
normalised density given the topology. With `m` the number of internal nodes of the subtree of a node, a topology has
`R = (n-1)! / prod m` rankings, and its probability is `2^(n-1) / (n! prod m)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from pyro.distributions import LogNormal, TorchDistribution, Uniform
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

from bayeskit.errors import SettingsError
from bayeskit.extend import real_number
from bayeskit.models.phylogenetics._branch_length_priors import in_double_precision
from bayeskit.models.phylogenetics._dated_topologies import DatedTopology
from bayeskit.models.phylogenetics._node_heights import NodeHeights
from bayeskit.models.phylogenetics._substitution import Given, Parameter, Parameterized

#: Default prior of rates and sizes: log-normal with median one and standard deviation 2 of the logarithm.
_WIDE = Parameter(lambda like: LogNormal(like.new_zeros(()), like.new_tensor(2.0)))
_PROPORTION = Parameter(lambda like: Uniform(like.new_zeros(()), like.new_ones(())), upper=1.0)
_ROOT_HEIGHT = Parameter(lambda like: LogNormal(like.new_zeros(()), like.new_tensor(2.0)))


def log_topology_probability(dated: DatedTopology) -> float:
    """Return the log probability of a topology with tips of one date, the same under all priors of this module.

    Examples
    --------
    >>> import math
    >>> round(9 * math.exp(log_topology_probability(DatedTopology.of("((A,B),(C,D));"))), 6)
    1.0
    """
    n = dated.num_taxa
    return (n - 1) * math.log(2.0) - math.lgamma(n + 1) - float(dated.num_internal_below.log().sum())


class TreePrior(Parameterized, ABC):
    """Base class of priors of node heights.

    Examples
    --------
    >>> isinstance(YuleTree(), TreePrior)
    True
    """

    @property
    def sets_unit_of_time(self) -> bool:
        """Whether the root has a prior of its own."""
        return False

    def check(self, dated: DatedTopology) -> None:
        """Raise SettingsError where the prior does not apply to the dates of the tips."""

    @abstractmethod
    def heights(self, dated: DatedTopology, values: Mapping[str, Tensor]) -> TorchDistribution:
        """Return the distribution of the node heights, over vectors `(n-1,)`, at values of the parameters."""

    def log_topology(
        self,
        dated: DatedTopology,
        values: Mapping[str, Tensor],
        heights: Tensor,
        distribution: TorchDistribution | None = None,
    ) -> Tensor | None:
        """Return the log probability of the topology given `heights`, or None where they are given the topology.

        `distribution` is that of the heights at the values, where it is there already.
        """
        return None


# Distributions over node heights.


class _HeightsDistribution(TorchDistribution):  # type: ignore[misc]
    """Base class of distributions over the heights of the internal nodes, `(*batch, n-1)`."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, dated: DatedTopology, batch: torch.Size, validate_args: bool | None = None) -> None:
        self.dated = dated
        super().__init__(batch, torch.Size([dated.num_taxa - 1]), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> NodeHeights:
        """Heights that are above those of the nodes below."""
        return NodeHeights(self.dated)

    def _relative_ranks(self, root: Tensor) -> Tensor:
        """Draw values of the internal nodes that rank them uniformly, that of the root being given, `(*batch, n-1)`."""
        # The largest of m uniform numbers below that of the parent, independently in each subtree.
        n, parents, num_below = self.dated.num_taxa, self.dated.parents.tolist(), self.dated.num_internal_below.tolist()
        values = [root]  # from the root, the last node, to the first
        for node in reversed(range(n - 2)):
            above = values[n - 2 - parents[n + node]]
            values.append(above * torch.rand_like(root) ** (1.0 / num_below[node]))
        return torch.stack(values[::-1], -1)


class BirthDeathHeights(_HeightsDistribution):
    """Node heights of a reconstructed birth-death tree with tips of one date, given its topology.

    Parameters
    ----------
    dated : DatedTopology
        With tips of one date.
    net_diversification, relative_extinction : Tensor
        Birth rate minus death rate, above 0, and death rate divided by birth rate, in [0, 1): shapes `(*batch)`.
    sampling_fraction : float
        Probability that a species of the present is in the tree, in (0, 1].
    root_height : TorchDistribution, optional
        Prior of the root's height. None: a uniform prior of the time of origin, given the number of tips.

    Examples
    --------
    >>> heights = BirthDeathHeights(DatedTopology.of("((A,B),C);"), torch.tensor(1.0), torch.tensor(0.0))
    >>> heights.log_prob(torch.tensor([0.5, 1.0])).exp()  # 2 exp(-2 * 0.5) times 3 exp(-3 * 0.5)
    tensor(0.4925)
    """

    def __init__(
        self,
        dated: DatedTopology,
        net_diversification: Tensor,
        relative_extinction: Tensor,
        sampling_fraction: float = 1.0,
        root_height: TorchDistribution | None = None,
        validate_args: bool | None = None,
    ) -> None:
        # A fraction changes the rates: birth rate `birth`, and the same difference of rates (T. Stadler 2009).
        self.net = net_diversification
        self.birth = sampling_fraction * net_diversification / (1.0 - relative_extinction)
        self.root_height = root_height
        self._settings = (net_diversification, relative_extinction, sampling_fraction, root_height)
        batch = torch.broadcast_shapes(net_diversification.shape, relative_extinction.shape)
        super().__init__(dated, batch, validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of heights, `(*batch, n-1) -> (*batch)`."""
        if self._validate_args:
            self._validate_sample(value)
        # The heights are n independent times with distribution function F and density f but for the largest, the time
        # of origin. `_log_odds` is log(F / (1 - F)).
        net, birth = self.net[..., None], self.birth[..., None]
        log_odds = _log_odds(value, net, birth)
        log_tail = -softplus(log_odds)
        log_f = birth.log() + net * value + 2.0 * log_tail
        log_m = self.dated.num_internal_below.to(value).log()
        if self.root_height is None:
            n = self.dated.num_taxa
            return math.log(n) + log_tail[..., -1] + (log_f + log_m).sum(-1)
        log_below_root = -softplus(-log_odds[..., -1:])
        inner = (log_f + log_m)[..., :-1] - log_below_root
        return self.root_height.log_prob(value[..., -1]) + inner.sum(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw heights, shape `(*sample_shape, *batch, n-1)`."""
        shape = torch.Size([*sample_shape, *self.batch_shape])
        net, birth = self.net.detach().expand(shape), self.birth.detach().expand(shape)
        with torch.no_grad():
            if self.root_height is None:
                # The largest but one of n uniform numbers, by operations that vmap knows: torch's Beta has none.
                n = self.dated.num_taxa
                largest, ratio = 1.0 - torch.rand_like(net), 1.0 - torch.rand_like(net)
                root = largest ** (1.0 / n) * ratio ** (1.0 / (n - 1))
                height = torch.log1p(root / (1.0 - root) * net / birth) / net
            else:
                height = self.root_height.sample(shape).to(net)
                root = _log_odds(height, net, birth).sigmoid()
            lower = self._relative_ranks(root)[..., :-1]
            lower = torch.log1p(lower / (1.0 - lower) * (net / birth)[..., None]) / net[..., None]
            return torch.cat([lower, height[..., None]], -1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return the distribution expanded to a larger batch shape."""
        net, extinction, fraction, root_height = self._settings
        shape = torch.Size(batch_shape)
        return type(self)(self.dated, net.expand(shape), extinction.expand(shape), fraction, root_height, False)


def _log_odds(height: Tensor, net: Tensor, birth: Tensor) -> Tensor:
    """Return `log(birth / net * (exp(net * height) - 1))`."""
    return (birth / net).log() + net * height + (-torch.expm1(-net * height)).log()


class _Coalescences(NamedTuple):
    """The times between tips and internal nodes in ascending order, and the lineages there."""

    durations: Tensor  # (*batch, 2n-2)
    pairs: Tensor  # number of pairs of lineages, in the same shape
    joinable: Tensor  # number of pairs that are siblings
    ends_in_node: Tensor  # whether an internal node is at the end


class CoalescentHeights(_HeightsDistribution):
    """Node heights of a coalescent of constant population size on a topology.

    With tips of one date this is the density given the topology. With dated tips, it is that of a process which joins
    siblings only, at the rate of all pairs: a node's siblings are chosen uniformly. `log_topology` is the log
    probability that the coalescent makes these choices, so that the sum of both is the density of the coalescent.

    Parameters
    ----------
    dated : DatedTopology
    population_size : Tensor
        Inverse of the rate at which a pair of lineages coalesces, above 0, shape `(*batch)`.

    Examples
    --------
    >>> heights = CoalescentHeights(DatedTopology.of("((A,B),C);"), torch.tensor(2.0))
    >>> heights.log_prob(torch.tensor([0.5, 1.0])).exp()  # 3/2 exp(-3/2 * 0.5) times 1/2 exp(-1/2 * 0.5)
    tensor(0.2759)
    """

    def __init__(self, dated: DatedTopology, population_size: Tensor, validate_args: bool | None = None) -> None:
        self.population_size = population_size
        self._seen: tuple[Tensor, int, _Coalescences] | None = None
        super().__init__(dated, population_size.shape, validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of heights, `(*batch, n-1) -> (*batch)`."""
        if self._validate_args:
            self._validate_sample(value)
        found = self._coalescences(value)
        if not self.dated.is_dated:
            return self._log_density(found) - log_topology_probability(self.dated)
        return self._log_density(found) - self._log_choices(found)

    def log_topology(self, value: Tensor) -> Tensor:
        """Return the log probability of the topology given heights, `(*batch, n-1) -> (*batch)`, with dated tips."""
        return self._log_choices(self._coalescences(value))

    def _log_density(self, found: _Coalescences) -> Tensor:
        """Return the log density of the coalescent over topologies and heights."""
        waited = (found.pairs * found.durations).sum(-1) / self.population_size
        return -(self.dated.num_taxa - 1) * self.population_size.log() - waited

    def _log_choices(self, found: _Coalescences) -> Tensor:
        chosen = torch.where(found.ends_in_node, found.joinable.clamp(min=1) / found.pairs.clamp(min=1), 1.0).log()
        # While no siblings are there, no pair may coalesce.
        stopped = torch.where(found.joinable == 0, found.pairs * found.durations, 0.0)
        return chosen.sum(-1) - stopped.sum(-1) / self.population_size

    def _coalescences(self, value: Tensor) -> _Coalescences:
        """Return those of the heights, which are kept, since a model needs them twice."""
        version = 0 if value.is_inference() else value._version
        if self._seen is None or self._seen[0] is not value or self._seen[1] != version:
            self._seen = value, version, self._sorted(value)
        return self._seen[2]

    def _sorted(self, value: Tensor) -> _Coalescences:
        n, heights = self.dated.num_taxa, self.dated.all_heights(value)
        # The later of two siblings makes them joinable; ties are broken as by the stable sort.
        sibling = self.dated.siblings.to(value.device)
        index = torch.arange(2 * n - 2, device=value.device)
        here, there = heights[..., :-1], heights[..., sibling]
        later = (here > there) | ((here == there) & (index > sibling))
        order = heights.argsort(dim=-1, stable=True)
        is_node = order >= n
        after = is_node[..., :-1].cumsum(-1)  # number of internal nodes so far
        lineages = torch.arange(1, 2 * n - 1, device=value.device) - 2 * after
        come = torch.cat([later, torch.zeros_like(later[..., :1])], -1).gather(-1, order)[..., :-1]
        return _Coalescences(
            heights.gather(-1, order).diff(dim=-1),
            (lineages * (lineages - 1)).to(value) / 2,
            (come.cumsum(-1) - after).to(value),
            is_node[..., 1:],
        )

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw heights, shape `(*sample_shape, *batch, n-1)`."""
        shape = torch.Size([*sample_shape, *self.batch_shape])
        size = self.population_size.detach().expand(shape)
        with torch.no_grad():
            return self._sample_dated(size) if self.dated.is_dated else self._sample_undated(size)

    def _sample_undated(self, size: Tensor) -> Tensor:
        ranks = self._relative_ranks(torch.ones_like(size)).argsort(-1).argsort(-1)
        lineages = torch.arange(self.dated.num_taxa, 1, -1, dtype=size.dtype, device=size.device)
        waits = -torch.log1p(-torch.rand_like(size[..., None].expand(ranks.shape)))
        return (waits * size[..., None] / (0.5 * lineages * (lineages - 1.0))).cumsum(-1).gather(-1, ranks)

    def _sample_dated(self, size: Tensor) -> Tensor:
        n, children = self.dated.num_taxa, self.dated.children.to(size.device)
        tips = self.dated.tip_heights.to(size)
        now = torch.zeros_like(size)
        heights = size.new_full((*size.shape, n - 1), torch.inf)
        for _ in range(n - 1 + len(tips.unique())):
            present = torch.cat([tips.expand(*size.shape, n), heights], -1) <= now[..., None]
            ready = present[..., children].all(-1) & ~present[..., n:]
            lineages = present[..., :n].sum(-1) - present[..., n:].sum(-1)
            pairs = torch.where(ready.any(-1), 0.5 * lineages * (lineages - 1), 0.0)
            then = now - torch.log1p(-torch.rand_like(size)) * size / pairs
            arrives = torch.where(tips > now[..., None], tips, torch.inf).amin(-1)
            joins = (then < arrives) & (pairs > 0)
            chosen = torch.where(ready, torch.rand_like(heights), -1.0).argmax(-1, keepdim=True)
            one = torch.zeros_like(ready).scatter(-1, chosen, joins[..., None])
            heights = torch.where(one, then[..., None], heights)
            now = torch.where(joins, then, torch.where(arrives < torch.inf, arrives, now))
        return heights

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return the distribution expanded to a larger batch shape."""
        return type(self)(self.dated, self.population_size.expand(torch.Size(batch_shape)), False)


# Priors with parameters.


class _SpeciationPrior(TreePrior):
    """Base class of the priors that need tips of one date and may have a prior of the root's height."""

    root_height: TorchDistribution | None
    sampling_fraction: float

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        name = type(self).__name__
        if self.root_height is not None:
            if not isinstance(self.root_height, torch.distributions.Distribution):
                raise SettingsError(
                    f"{name}, root_height: {self.root_height!r:.60} is not a distribution. Remedy: give a prior of one "
                    "positive number, such as LogNormal(torch.tensor(4.0), torch.tensor(0.1)), or None."
                )
            checked: Any = _ROOT_HEIGHT.checked(f"{name}, root_height", self.root_height)
            object.__setattr__(self, "root_height", in_double_precision(checked))
        fraction = real_number(f"{name}, sampling_fraction", self.sampling_fraction)
        if not 0.0 < fraction <= 1.0:
            raise SettingsError(
                f"{name}, sampling_fraction: {fraction:g} is not a probability above 0. Remedy: give the number of "
                "taxa divided by that of all species of the group."
            )
        object.__setattr__(self, "sampling_fraction", fraction)

    @property
    def sets_unit_of_time(self) -> bool:
        """Whether the root has a prior of its own."""
        return self.root_height is not None

    def check(self, dated: DatedTopology) -> None:
        """Raise SettingsError for dated tips."""
        if dated.is_dated:
            raise SettingsError(
                f"tree_prior: {type(self).__name__} needs tips of one date, but these differ by up to "
                f"{float(dated.tip_heights.max()):g}. Remedy: use tree_prior=ConstantCoalescent()."
            )


@dataclass(frozen=True, eq=False)
class YuleTree(_SpeciationPrior):
    """Pure-birth process, with tips of one date.

    Parameters
    ----------
    birth_rate : float, Tensor or TorchDistribution, optional
        Speciations per species and unit of time, above 0; or its prior, by default log-normal with median 1 and
        standard deviation 2 of the logarithm. Give a prior in your unit of time.
    sampling_fraction : float, default 1.0
        Probability that a species of the present is in the tree, in (0, 1].
    root_height : TorchDistribution, optional
        Prior of the height of the root; the other heights follow the process given it. By default the process is
        conditioned on the number of tips, with an (improper) uniform prior of its time of origin, which gives all
        heights a proper distribution (Gernhard, 2008).

    Raises
    ------
    SettingsError
        If a parameter is outside its domain.

    References
    ----------
    G. U. Yule (1925), A mathematical theory of evolution, Philosophical Transactions of the Royal Society B 213, 21-87.

    T. Gernhard (2008), The conditioned reconstructed process, Journal of Theoretical Biology 253, 769-778.

    Examples
    --------
    >>> YuleTree(birth_rate=2.0).priors(torch.zeros(()))
    {}
    """

    birth_rate: Given = None
    sampling_fraction: float = 1.0
    root_height: TorchDistribution | None = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"birth_rate": _WIDE})

    def heights(self, dated: DatedTopology, values: Mapping[str, Tensor]) -> BirthDeathHeights:
        """Return the distribution of the node heights given the topology."""
        rate = values["birth_rate"]
        return BirthDeathHeights(dated, rate, torch.zeros_like(rate), self.sampling_fraction, self.root_height)


@dataclass(frozen=True, eq=False)
class BirthDeathTree(_SpeciationPrior):
    """Birth-death process with tips of one date, of which only the lineages with sampled descendants are seen.

    Parameters
    ----------
    net_diversification : float, Tensor or TorchDistribution, optional
        Birth rate minus death rate, above 0; or its prior, by default log-normal with median 1 and standard deviation 2
        of the logarithm. Give a prior in your unit of time.
    relative_extinction : float, Tensor or TorchDistribution, optional
        Death rate divided by birth rate, in (0, 1); or its prior, by default uniform. `YuleTree` has no deaths.
    sampling_fraction : float, default 1.0
        Probability that a species of the present is in the tree, in (0, 1].
    root_height : TorchDistribution, optional
        Prior of the height of the root: the other heights follow the process given it and the survival of both lineages
        that begin there. By default the process is conditioned on the number of tips, with an (improper) uniform prior
        of its time of origin, which gives all heights a proper distribution (Gernhard, 2008).

    Raises
    ------
    SettingsError
        If a parameter is outside its domain.

    References
    ----------
    S. Nee, R. M. May and P. H. Harvey (1994), The reconstructed evolutionary process, Philosophical Transactions of the
    Royal Society B 344, 305-311.

    T. Gernhard (2008), The conditioned reconstructed process, Journal of Theoretical Biology 253, 769-778.

    T. Stadler (2009), On incomplete sampling under birth-death models and connections to the sampling-based coalescent,
    Journal of Theoretical Biology 261, 58-66.

    Examples
    --------
    >>> sorted(BirthDeathTree(sampling_fraction=0.1).priors(torch.zeros(())))
    ['net_diversification', 'relative_extinction']
    """

    net_diversification: Given = None
    relative_extinction: Given = None
    sampling_fraction: float = 1.0
    root_height: TorchDistribution | None = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"net_diversification": _WIDE, "relative_extinction": _PROPORTION}
    )

    def heights(self, dated: DatedTopology, values: Mapping[str, Tensor]) -> BirthDeathHeights:
        """Return the distribution of the node heights given the topology."""
        net, extinction = values["net_diversification"], values["relative_extinction"]
        return BirthDeathHeights(dated, net, extinction, self.sampling_fraction, self.root_height)


@dataclass(frozen=True, eq=False)
class ConstantCoalescent(TreePrior):
    """Coalescent of a population of constant size, with tips of any dates.

    Parameters
    ----------
    population_size : float, Tensor or TorchDistribution, optional
        Effective number of gene copies times the generation time, in the unit of time, above 0: two lineages coalesce
        at rate `1 / population_size`. Or its prior, by default log-normal with median 1 and standard deviation 2 of the
        logarithm. Give a prior in your unit of time.

    Raises
    ------
    SettingsError
        If the size is not above 0.

    References
    ----------
    J. F. C. Kingman (1982), The coalescent, Stochastic Processes and their Applications 13, 235-248.

    A. G. Rodrigo and J. Felsenstein (1999), Coalescent approaches to HIV population genetics, in: The Evolution of HIV,
    Johns Hopkins University Press, 233-272.

    Examples
    --------
    >>> sorted(ConstantCoalescent().priors(torch.zeros(())))
    ['population_size']
    """

    population_size: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"population_size": _WIDE})

    def heights(self, dated: DatedTopology, values: Mapping[str, Tensor]) -> CoalescentHeights:
        """Return the distribution of the node heights: given the topology, where all tips have the same date."""
        return CoalescentHeights(dated, values["population_size"])

    def log_topology(
        self,
        dated: DatedTopology,
        values: Mapping[str, Tensor],
        heights: Tensor,
        distribution: TorchDistribution | None = None,
    ) -> Tensor | None:
        """Return the log probability of the topology given `heights` for dated tips, else None."""
        if not dated.is_dated:
            return None
        found = distribution if isinstance(distribution, CoalescentHeights) else self.heights(dated, values)
        return found.log_topology(heights)
