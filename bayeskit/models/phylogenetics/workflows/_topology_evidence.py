"""Evidence over all topologies in three ways: tempered chains, a sum over topologies, and variational inference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bayeskit.errors import SettingsError
from bayeskit.extend import (
    EvidenceComparison,
    Verdict,
    derived_seed,
    frame_table,
    real_number,
    result_html,
    warnings_listed,
    whole_number,
)
from bayeskit.models.phylogenetics import Alignment
from bayeskit.models.phylogenetics.workflows._topology_comparison import (
    TopologyComparison,
    compare_topologies,
    sum_over_topologies,
)
from bayeskit.models.phylogenetics.workflows._topology_inference import TopologyInference
from bayeskit.models.phylogenetics.workflows._variational import VariationalPosterior, variational_inference

#: Draws behind each way. The last two share the search's list of topologies, and the sum uses their mass in its runs.
_SOURCES = {
    "bidirectional_ratio": "tempered chains",
    "sum_over_topologies": "importance sampling",
    "variational_importance_sampling": "variational inference",
}


@dataclass(frozen=True, repr=False)
class TopologyEvidence:
    """The evidence over all topologies, or over those that satisfy the search's constraints, in three ways.

    Attributes
    ----------
    search : TopologyInference
        Tempered chains: ratios of neighbouring temperatures over topologies.
    comparison : TopologyComparison
        Evidence of each of the most probable topologies; their sum over their posterior mass.
    variational : VariationalPosterior
        Importance sampling from a subsplit Bayesian network with branch lengths, over the topologies of the search.
    table : EvidenceComparison
        The three estimates, with a table, a plot and their verdict.
    """

    search: TopologyInference
    comparison: TopologyComparison
    variational: VariationalPosterior
    table: EvidenceComparison

    @cached_property
    def verdict(self) -> Verdict:
        """The representative value, and the ways that agree, disagree or are not trusted."""
        return Verdict.of(self.table, sources=_SOURCES)

    @property
    def log_evidence(self) -> float:
        """The representative log evidence in nats."""
        return self.verdict.log_evidence

    @property
    def standard_error(self) -> float:
        """Its standard error."""
        return self.verdict.standard_error

    def _repr_html_(self) -> str:
        estimates = self.table.to_pandas()[["method", "log_evidence", "standard_error", "trusted"]]
        table = frame_table("Three ways", estimates, log_evidence=".3f", standard_error=".3f")
        warnings = [f"{z.method}: {why}" for z in self.table for why in z.warnings]
        return result_html(str(self.verdict), [table], warnings_listed("evidence", warnings), notes=self.verdict.notes)

    def __repr__(self) -> str:
        lines = [str(z) for z in self.table]
        return "\n".join([f"TopologyEvidence: {self.verdict}", *(f"  {line}" for line in lines)])


def topology_evidence(
    search: TopologyInference,
    *,
    level: float = 0.99,
    most: int = 200,
    num_steps: int = 20_000,
    num_draws: int = 10_000,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> TopologyEvidence:
    """Estimate the evidence over all topologies in three ways, each with draws of its own.

    The first is by the ratios between the temperatures of the search itself. The second is the sum of the evidence of
    the most probable topologies, each by importance sampling, divided by their posterior mass in the search's runs. The
    third is importance sampling from a variational posterior whose support is the topologies of the search. Topologies
    that all runs have missed are missing in all three ways, unless the search began at the prior (`path="prior"`). With
    constraints, all three are over the topologies that satisfy them.

    Parameters
    ----------
    search : TopologyInference
        Of `infer_topologies`, with at least two runs.
    level : float, default 0.99
        Posterior mass of the topologies that are summed.
    most : int, default 200
        Largest number of these topologies.
    num_steps : int, default 20,000
        Steps of the variational inference.
    num_draws : int, default 10,000
        Draws from the variational posterior.
    seed : int, default 0
    progress : bool, default True
    **settings
        `num_jobs` of `compare_topologies`.

    Returns
    -------
    TopologyEvidence

    Raises
    ------
    SettingsError
        If the search has one run only or separate branch lengths, or a setting lies outside its domain.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Alignment
    >>> from bayeskit.models.phylogenetics.workflows import infer_topologies
    >>> alignment = Alignment.from_sequences({"A": "AACCAGT", "B": "AACCGGT", "C": "AGCTAGA", "D": "AGCTACA"})
    >>> search = infer_topologies(alignment, num_warmup=300, num_samples=1000, num_temperatures=6, progress=False)
    >>> result = topology_evidence(search, num_steps=500, progress=False)
    >>> len(result.table.results)
    3
    """
    if not isinstance(search, TopologyInference) or len(search.samples) < 2:
        raise SettingsError(
            "search: the mass of the topologies and its error need two runs or more. Remedy: give the result of "
            "infer_topologies(alignment, num_runs=2)."
        )
    if search.branch_lengths is not None:
        raise SettingsError(
            "search: its subsets have their own branch lengths, for which there is no sum over topologies and no "
            "variational inference. Remedy: use its log_evidence, or search without separate_branch_lengths."
        )
    level = real_number("level", level, "(0, 1)")
    most = whole_number("most", most, 1)
    sample = search.sample
    chosen = sample.topologies[sample.credible_set(level)[:most]]
    model: dict[str, Any] = {
        "branch_length_prior": search.branch_length_prior,
        "constraints": search.constraints,
    }
    if isinstance(search.alignment, Alignment):
        model |= {"substitution": search.substitution, "site_rates": search.site_rates}
    comparison = compare_topologies(
        search.alignment, chosen, seed=derived_seed(seed, "sum"), progress=progress, **model, **settings
    )
    summed = sum_over_topologies(comparison, search.samples)
    variational = variational_inference(
        search.alignment,
        sample,
        num_steps=whole_number("num_steps", num_steps, 1),
        seed=derived_seed(seed, "variational"),
        progress=progress,
        **model,
    )
    weighed = variational.log_evidence(num_draws, seed=seed)
    table = {z.method: z for z in (search.evidence, summed, weighed)}
    return TopologyEvidence(search, comparison, variational, EvidenceComparison(table, None, None, {"seed": seed}))
