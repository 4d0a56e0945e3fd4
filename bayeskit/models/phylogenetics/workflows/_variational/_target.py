"""The joint density of data, branch lengths, parameters of the models, and topology."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import new_generator, setting_as_json
from bayeskit.models.phylogenetics import (
    Alignment,
    Partition,
    PartitionedForestLikelihood,
    SiteRates,
    SubsplitBayesianNetwork,
    Topologies,
)
from bayeskit.models.phylogenetics._branch_length_priors import log_prior_of_lengths
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._substitution import SubstitutionModel
from bayeskit.models.phylogenetics._topology_constraints import constraint_splits, log_number_of_topologies
from bayeskit.models.phylogenetics.workflows._parameter_guide import ParameterGuide
from bayeskit.models.phylogenetics.workflows._topology_comparison import model_facts

#: Number of points at which two priors are compared.
_PROBES = 64


@dataclass(frozen=True, eq=False)
class TreeTarget:
    """The joint density of data, branch lengths, parameters and topology, with a uniform prior of topologies."""

    likelihood: ForestLikelihood | PartitionedForestLikelihood
    branch_length_prior: dist.TorchDistribution  # over one branch length or over the vector of all
    priors: dict[str, dist.TorchDistribution] = field(default_factory=dict)  # of parameters without a fixed value
    constraints: tuple[tuple[str, ...], ...] = ()  # that all topologies with positive prior probability satisfy

    @property
    def data(self) -> Alignment | Partition:
        """The alignment or the partition."""
        likelihood = self.likelihood
        return likelihood.alignment if isinstance(likelihood, ForestLikelihood) else likelihood.partition

    @property
    def models(self) -> tuple[SubstitutionModel | None, SiteRates | None]:
        """The models of the alignment; a partition has its own."""
        likelihood = self.likelihood
        if isinstance(likelihood, ForestLikelihood):
            return likelihood.substitution, likelihood.site_rates
        return None, None

    @cached_property
    def log_topologies(self) -> float:
        """The log number of topologies with positive prior probability."""
        taxa = self.data.taxa
        return log_number_of_topologies(len(taxa), constraint_splits(self.constraints, taxa))

    @cached_property
    def guide(self) -> ParameterGuide:
        """The family of approximations of the parameters."""
        return ParameterGuide(self.priors)

    def log_densities(self, topologies: Topologies, lengths: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood `(topologies,)` of trees with branch lengths `(topologies, edges)`.

        Each parameter without a fixed value has one value per tree, `(topologies, *event_shape)`.
        """
        log_prior = log_prior_of_lengths(self.branch_length_prior, lengths) + self.guide.log_prior(parameters)
        log_likelihood = self.likelihood.log_likelihood(topologies, lengths, **parameters)
        return log_prior - self.log_topologies, log_likelihood


def log_posterior(
    target: TreeTarget, parameters: dict[str, Tensor] | None, topologies: Topologies, lengths: Tensor
) -> Tensor:
    """Return the log posterior density of trees up to a constant, at fixed parameters or at the prior's medians."""
    guide = target.guide
    if parameters is None:
        parameters = guide.medians(torch.zeros(guide.num_parameters, dtype=torch.float64))
    values = {name: value.expand(len(topologies), *value.shape) for name, value in parameters.items()}
    log_prior, log_likelihood = target.log_densities(topologies, lengths, **values)
    return log_prior + log_likelihood


def check_order_of_taxa(
    prior: dist.TorchDistribution, alignment: Alignment | Partition, network: SubsplitBayesianNetwork
) -> None:
    """Raise SettingsError for a joint prior if the order of taxa makes its edges ambiguous."""
    num_edges = 2 * alignment.num_taxa - 3
    tips = [alignment.taxa.index(taxon) for taxon in network.taxa]
    probes = _probes(num_edges)
    moved = log_prior_of_lengths(prior, probes[:, [*tips, *range(alignment.num_taxa, num_edges)]])
    # Summation in another order changes the rounding.
    if not torch.allclose(log_prior_of_lengths(prior, probes), moved, rtol=1e-9, atol=1e-9):
        raise SettingsError(
            "branch_length_prior depends on the order of the taxa, which differs between the support and the "
            "alignment. Remedy: make the network of topologies.with_taxa(alignment.taxa)[0], or give these topologies."
        )


def _probes(num_edges: int) -> Tensor:
    """Return branch lengths from very short to very long, `(probes, edges)`, no two edges alike."""
    generator = new_generator(0, stream="probes of a prior")
    return (-4.0 + 3.0 * torch.randn(_PROBES, num_edges, generator=generator, dtype=torch.float64)).exp()


def fingerprint_of_target(target: TreeTarget, network: SubsplitBayesianNetwork) -> object:
    """Return data, support and model as JSON that identifies them."""
    graph, prior = network.graph, target.branch_length_prior
    arrays = [graph.clades.view("int64"), graph.group_clade, graph.group_sister, graph.starts, graph.parts]
    parts = [
        *model_facts(target.data, *target.models),
        target.constraints,
        list(network.taxa),
        [torch.from_numpy(array) for array in arrays],
        network.logits,
        type(prior).__name__,
        # The density identifies a prior of any class.
        log_prior_of_lengths(prior, _probes(2 * len(network.taxa) - 3)),
    ]
    if target.priors:
        guide = target.guide
        normal = torch.zeros(guide.num_parameters, dtype=torch.float64)
        probes = guide.rsample(normal, _PROBES, new_generator(0, stream="probes of a prior")).values
        parts += [sorted(target.priors), guide.log_prior(probes), list(probes.values())]
    return setting_as_json(parts)
