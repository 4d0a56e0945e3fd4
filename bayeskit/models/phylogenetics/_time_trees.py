"""Likelihood of an alignment on a rooted topology with node heights and a molecular clock, as a Pyro model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyro
import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.extend import global_stream, new_generator, whole_number
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._clocks import Clock, StrictClock
from bayeskit.models.phylogenetics._dated_topologies import DatedTopology
from bayeskit.models.phylogenetics._site_rates import SiteRates
from bayeskit.models.phylogenetics._substitution import SubstitutionModel
from bayeskit.models.phylogenetics._time_tree_plots import plot_time_tree
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._tree_model import TreeModel
from bayeskit.models.phylogenetics._tree_priors import (
    ConstantCoalescent,
    TreePrior,
    YuleTree,
    log_topology_probability,
)
from bayeskit.models.phylogenetics._trees import check_same_taxa

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class TopologyProbability(NamedTuple):
    """Log probability of a rooted topology under a tree prior, with the standard error of the estimate.

    Examples
    --------
    >>> TopologyProbability(-1.5, 0.0).log_probability
    -1.5
    """

    log_probability: float
    standard_error: float


class TimeTreeModel:
    """Pyro model of an alignment on a fixed rooted topology with node heights and a molecular clock.

    The model samples `"node_heights"`, shape `(n-1,)` in the order of `dated.node_names` (the root is the last), the
    parameters of tree prior, clock, substitution model and site rates that have no fixed value, and of a relaxed clock
    `"rate_scores"`, shape `(2n-2,)`. The factor `"alignment"` adds the log-likelihood: a branch length is the duration
    of the branch times its rate, and the two branches at the root are one branch of the unrooted tree.

    The topology fixes which node is above which; the order in time of nodes on different lineages is free (all
    rankings). Unconstrained coordinates are the ratios of Ji et al. (2023), see `RatioTransform`.

    **What the evidence is.** With tips of one date, the prior of the heights is given the topology, and the evidence is
    that of the alignment given the topology, to be compared with that of a `TreeModel` on the unrooted topology. With
    dated tips the probability of a topology depends on the population size, and the topology is an observation: the
    factor `"topology"` adds its log probability given the heights, and the evidence is that of alignment and topology.
    Subtract `topology_probability().log_probability` for the evidence given the topology; in comparisons of models
    with the same topology, dates and tree prior, it cancels.

    Parameters
    ----------
    alignment : Alignment
    tree : str or Topologies
        Rooted topology over the same taxa: Newick text whose root has two children (branch lengths are ignored), or one
        rooted topology, such as `Topologies.from_trees([tree]).rooted_at("OUTGROUP")`.
    substitution : SubstitutionModel, default JC69()
    dates : mapping of str to float, optional
        Time of sampling of each taxon, which **grows towards the present**, such as 2009.5; see `dates_from_names` and
        `dates_from_file`.
    tip_heights : mapping of str to float, optional
        Instead of dates: the time of each taxon **before** the youngest, at least 0. Without both, all tips have the
        same date.
    clock : Clock, default StrictClock()
        `StrictClock` or `UncorrelatedLogNormalClock`.
    tree_prior : TreePrior, optional
        `YuleTree`, `BirthDeathTree` or `ConstantCoalescent`. By default `YuleTree()` for tips of one date, otherwise
        `ConstantCoalescent()`.
    site_rates : SiteRates, optional
        Distribution of the rate over sites; by default all sites have rate one.
    dtype : torch.dtype, default torch.float64
    device : torch.device or str, default "cpu"

    Attributes
    ----------
    dated : DatedTopology
        The topology, the heights of its tips, and names of nodes and edges.
    priors : dict of str to TorchDistribution
        Priors of the sampled parameters other than node heights, in the order of sampling; without a clock rate whose
        prior is given the tree length.

    Raises
    ------
    TreeError
        If the tree is unrooted, not binary, has fewer than three taxa, or has other taxa than the alignment.
    DataError
        If a date is missing, belongs to no taxon, or is not finite, or a height is negative.
    SettingsError
        If an argument has the wrong type, or the tree prior does not allow dated tips.

    References
    ----------
    J. L. Thorne, H. Kishino and I. S. Painter (1998), Estimating the rate of evolution of the rate of molecular
    evolution, Molecular Biology and Evolution 15, 1647-1657.

    A. J. Drummond, S. Y. W. Ho, M. J. Phillips and A. Rambaut (2006), Relaxed phylogenetics and dating with confidence,
    PLoS Biology 4, e88.

    X. Ji, A. A. Fisher, S. Su, J. L. Thorne, B. Potter, P. Lemey, G. Baele and M. A. Suchard (2023), Scalable Bayesian
    divergence time estimation with ratio transformations, Systematic Biology 72, 1136-1153.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
    >>> dates = {"A": 2010.0, "B": 2009.0, "C": 2000.5}
    >>> model = TimeTreeModel(alignment, "((A,B),C);", dates=dates)
    >>> model.dated
    DatedTopology(3 taxa, heights of the tips 0 to 9.5: (C,(A,B));)
    >>> heights = torch.tensor([2.0, 12.0], dtype=torch.float64)
    >>> model.log_likelihood(heights, clock_rate=torch.tensor(0.01, dtype=torch.float64))
    tensor(-11.0141, dtype=torch.float64)
    >>> model.calendar_dates(heights)
    tensor([2008., 1998.], dtype=torch.float64)
    """

    #: Names of factors that are normalised log probabilities of data.
    normalised_factors = frozenset({"alignment", "topology"})

    def __init__(
        self,
        alignment: Alignment,
        tree: str | Topologies,
        substitution: SubstitutionModel | None = None,
        *,
        dates: Mapping[str, float] | None = None,
        tip_heights: Mapping[str, float] | None = None,
        clock: Clock | None = None,
        tree_prior: TreePrior | None = None,
        site_rates: SiteRates | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_arguments(alignment, clock, tree_prior)
        self.dated = DatedTopology.of(tree, dates=dates, tip_heights=tip_heights)
        check_same_taxa(alignment.taxa, self.dated.topology.taxa, "the alignment", "the tree")
        self.clock = StrictClock() if clock is None else clock
        self.tree_prior = tree_prior or (ConstantCoalescent() if self.dated.is_dated else YuleTree())
        self.tree_prior.check(self.dated)
        unrooted, order = self.dated.topology.unrooted()
        self._unrooted = TreeModel(
            alignment, unrooted.tree(0), substitution, site_rates=site_rates, dtype=dtype, device=device
        )
        # The edge of the rooted topology of each edge of the unrooted tree; the other edge at the root adds to one.
        lower, upper = order[0][unrooted.tree_edges(0)], int(self.dated.topology.upper_root_edge[0])
        at_root = int(self.dated.topology.children[0, -1].sum()) - upper
        self._edges = torch.as_tensor(lower, dtype=torch.int64, device=device)
        self._upper, self._joined = upper, self._edges == at_root
        self._like = like = torch.empty(0, dtype=dtype, device=device)
        clock_priors = self.clock.priors(like)
        self._fixed = _fixed_values(self.clock, like) | _fixed_values(self.tree_prior, like)
        self._conditional_rate = False
        if self.clock.clock_rate is None:
            del clock_priors["clock_rate"]
            self._conditional_rate = self.dated.is_dated or self.tree_prior.sets_unit_of_time
            if not self._conditional_rate:
                self._fixed["clock_rate"] = like.new_ones(())
        clock_priors |= self.clock.sites(self.dated.topology.num_edges, like)
        self._groups = (self.tree_prior.priors(like), clock_priors, self._unrooted.priors)
        self.priors = {name: prior for group in self._groups for name, prior in group.items()}

    @property
    def alignment(self) -> Alignment:
        """The alignment."""
        return self._unrooted.alignment

    def __repr__(self) -> str:
        tips = "dated tips" if self.dated.is_dated else "tips of one date"
        kinds = [type(self.clock).__name__, type(self.tree_prior).__name__]
        sampled = ["node_heights", *self.priors, *(["clock_rate"] if self._conditional_rate else [])]
        return f"TimeTreeModel({self.dated.num_taxa} taxa, {tips}, {', '.join(kinds)}; sampled: {', '.join(sampled)})"

    @property
    def element_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the node heights, the taxa below each node, and of the elements of `"rate_scores"`."""
        names = {"node_heights": self.dated.node_names}
        return names | ({"rate_scores": self.dated.edge_names} if "rate_scores" in self.priors else {})

    def __call__(self) -> Tensor:
        """Sample heights and parameters, add the log-likelihood, and return the heights."""
        of_tree, of_clock, of_sites = self._groups
        values = {name: pyro.sample(name, prior) for name, prior in of_tree.items()}
        distribution = self.tree_prior.heights(self.dated, self._fixed | values)
        heights = pyro.sample("node_heights", distribution)
        topology = self.tree_prior.log_topology(self.dated, self._fixed | values, heights, distribution)
        if topology is not None:
            pyro.factor("topology", topology)
        if self._conditional_rate:
            tree_length = self.dated.edge_times(heights).sum(-1)
            values["clock_rate"] = pyro.sample("clock_rate", Clock.rate_given_tree_length(tree_length))
        values |= {name: pyro.sample(name, prior) for name, prior in (of_clock | of_sites).items()}
        pyro.factor("alignment", self._log_likelihood(heights, values))
        return heights

    def log_likelihood(self, node_heights: Tensor, **parameters: Tensor) -> Tensor:
        """Compute the log-likelihood of the alignment.

        Parameters
        ----------
        node_heights : Tensor
            Heights in the order of `dated.node_names`, shape `(*batch, n-1)`, above those of the nodes below. Other
            heights give NaN.
        **parameters : Tensor
            Values of the sampled parameters, shape `(*batch, *event_shape)`; those of the tree prior may be left out.

        Returns
        -------
        Tensor
            Log-likelihoods in nats, shape `(*batch)`.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of internal nodes.
        SettingsError
            If a parameter of clock, substitution model or site rates is missing.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> model = TimeTreeModel(alignment, "((A,B),C);")
        >>> model.log_likelihood(torch.tensor([0.1, 0.3], dtype=torch.float64))
        tensor(-10.8713, dtype=torch.float64)
        """
        self._check_heights(node_heights)
        return self._log_likelihood(node_heights, parameters)

    def branch_rates(self, **parameters: Tensor) -> Tensor:
        """Return the rate of each branch in the order of `dated.edge_names`, shape `(*batch, 2n-2)`.

        Parameters
        ----------
        **parameters : Tensor
            Values of the sampled parameters of the clock, shape `(*batch, *event_shape)`; others are ignored.

        Raises
        ------
        SettingsError
            If a parameter of the clock is missing.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> TimeTreeModel(alignment, "((A,B),C);").branch_rates()
        tensor([1., 1., 1., 1.], dtype=torch.float64)
        """
        values = self._fixed | parameters
        needed = {"clock_rate", *self._groups[1]}
        if needed - values.keys():
            raise SettingsError(
                f"A value is missing for {', '.join(sorted(needed - values.keys()))}. Remedy: give a value for each "
                "sampled parameter of the clock, by name."
            )
        return self.clock.rates(values, self.dated.topology.num_edges)

    def branch_lengths(self, node_heights: Tensor, **parameters: Tensor) -> Tensor:
        """Return expected substitutions per site of each branch, duration times rate.

        Parameters
        ----------
        node_heights : Tensor
            Shape `(*batch, n-1)`.
        **parameters : Tensor
            Values of the sampled parameters of the clock.

        Returns
        -------
        Tensor
            Shape `(*batch, 2n-2)`, in the order of `dated.edge_names`.

        Raises
        ------
        ShapeError
            If the last dimension is not the number of internal nodes.
        SettingsError
            If a parameter of the clock is missing.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> TimeTreeModel(alignment, "((A,B),C);", clock=StrictClock(0.5)).branch_lengths(torch.tensor([0.1, 0.3]))
        tensor([0.0500, 0.0500, 0.1500, 0.1000], dtype=torch.float64)
        """
        self._check_heights(node_heights)
        return self.dated.edge_times(node_heights) * self.branch_rates(**parameters)

    def calendar_dates(self, node_heights: Tensor) -> Tensor:
        """Return the date of each internal node, the date of the youngest tip minus its height, in the same shape."""
        return self.dated.youngest_date - node_heights

    def topology_probability(self, num_draws: int = 100_000, *, seed: int | torch.Generator = 0) -> TopologyProbability:
        """Return the log probability of the topology under the tree prior, averaged over its parameters.

        Parameters
        ----------
        num_draws : int, default 100000
            Draws from the prior, for dated tips. The error grows with the number of taxa; beyond some twenty, compare
            with the evidence of the model for an alignment without data.
        seed : int or torch.Generator, default 0

        Returns
        -------
        TopologyProbability
            With tips of one date it is exact: the standard error is 0.

        Raises
        ------
        SettingsError
            If `num_draws` is not a whole number of at least 2.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> round(TimeTreeModel(alignment, "((A,B),C);").topology_probability().log_probability, 4)
        -1.0986
        """
        count = whole_number("num_draws", num_draws, least=2)
        if not self.dated.is_dated:
            return TopologyProbability(log_topology_probability(self.dated), 0.0)
        generator = new_generator(seed, stream="topology probability")
        with global_stream(generator), torch.no_grad():
            values = self._fixed | {name: prior.sample((count,)) for name, prior in self._groups[0].items()}
            # A fixed value gives one distribution, of which as many draws are taken.
            batch = torch.Size() if self._groups[0] else (count,)
            heights = self.tree_prior.heights(self.dated, values).sample(batch)
            logs = self.tree_prior.log_topology(self.dated, values, heights)
        if logs is None:
            return TopologyProbability(0.0, 0.0)
        log_mean = logs.logsumexp(0) - torch.tensor(float(count)).log()
        spread = (logs - log_mean).exp().std() / count**0.5
        return TopologyProbability(float(log_mean), float(spread))

    def factor_terms(self, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the terms of the factors, by site pattern for `"alignment"`, for pointwise estimators.

        Parameters
        ----------
        values : mapping of str to Tensor
            Values of all sampled sites, shape `(*batch, *event_shape)`.

        Returns
        -------
        dict of str to tuple of Tensor
            Log-likelihoods, shape `(*batch, terms)`, and number of observations of each term, shape `(terms,)`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGA", "B": "ACGA", "C": "AC-A"})
        >>> model = TimeTreeModel(alignment, "((A,B),C);", tree_prior=YuleTree(1.0))
        >>> model.factor_terms({"node_heights": torch.tensor([0.1, 0.2], dtype=torch.float64)})["alignment"][1]
        tensor([2., 1., 1.], dtype=torch.float64)
        """
        heights = values["node_heights"]
        inputs = {"branch_lengths": self._lengths(heights, values)}
        inputs |= {name: values[name] for name in self._unrooted.priors}
        terms = self._unrooted.factor_terms(inputs)
        topology = self.tree_prior.log_topology(self.dated, self._fixed | dict(values), heights)
        if topology is not None:
            terms["topology"] = (topology[..., None], self._like.new_ones(1))
        return terms

    def plot_values(self, values: Mapping[str, Tensor], ax: Axes) -> tuple[str, str]:
        """Plot the tree with node heights `values["node_heights"]`, shape `(n-1,)`; return words, a caption."""
        plot_time_tree(self.dated, values["node_heights"], ax)
        lengths = self.dated.edge_times(values["node_heights"].detach().cpu().double())
        text = self.dated.topology.to_newick(0, [float(f"{length:.3g}") for length in lengths.tolist()])
        axis = "date" if self.dated.youngest_date else "time before the youngest tip"
        return f"Time tree of {self.dated.num_taxa} taxa: {text}", f"the horizontal axis is the {axis}"

    def _check_heights(self, node_heights: Tensor) -> None:
        expected = self.dated.num_taxa - 1
        if not isinstance(node_heights, Tensor) or node_heights.dim() == 0 or node_heights.shape[-1] != expected:
            found = tuple(node_heights.shape) if isinstance(node_heights, Tensor) else type(node_heights).__name__
            raise ShapeError(
                f"node_heights: {found} does not fit the tree. Remedy: give a tensor of shape (*batch, {expected}), "
                "one height for each entry of dated.node_names."
            )

    def _lengths(self, heights: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Return branch lengths of the unrooted tree, shape `(*batch, 2n-3)`."""
        rates = self.branch_rates(**values)
        times = self.dated.edge_times(heights.to(rates))
        # A negative duration must not be made up for by the other edge at the root.
        lengths = torch.where(times >= 0, times * rates, torch.nan)
        below = lengths[..., self._edges]
        return torch.where(self._joined, below + lengths[..., self._upper, None], below)

    def _log_likelihood(self, heights: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        others = {name: value for name, value in values.items() if name not in (*self._groups[0], *self._groups[1])}
        others.pop("clock_rate", None)
        return self._unrooted.log_likelihood(self._lengths(heights, values), **others)


def _fixed_values(model: Clock | TreePrior, like: Tensor) -> dict[str, Tensor]:
    """Return the parameters with values."""
    found = {name: getattr(model, name) for name in model.parameters}
    return {name: value.to(like) for name, value in found.items() if isinstance(value, Tensor)}


def _check_arguments(alignment: object, clock: object, tree_prior: object) -> None:
    """Raise SettingsError for arguments of the wrong type."""
    expected = (
        ("alignment", alignment, Alignment, "read a file with Alignment.from_file(path)"),
        ("clock", clock, Clock | None, "give an instance such as StrictClock() or UncorrelatedLogNormalClock()"),
        ("tree_prior", tree_prior, TreePrior | None, "give an instance such as YuleTree() or ConstantCoalescent()"),
    )
    for name, given, kinds, remedy in expected:
        if not isinstance(given, kinds):
            what = f"the class {given.__name__}" if isinstance(given, type) else f"{type(given).__name__} {given!r:.60}"
            raise SettingsError(f"{name}: {what} has the wrong type. Remedy: {remedy}.")
