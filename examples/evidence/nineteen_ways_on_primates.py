"""From an alignment to its evidence.

What you will learn: how an alignment and a tree become a Pyro model, how different methods agree on its
marginal likelihood, and how the posterior of the branch lengths looks.

The data are 898 sites of mitochondrial DNA of twelve primates. The topology is fixed; the 21 branch lengths
of the unrooted tree have independent exponential priors with mean 0.1; bases change by the model of Jukes and
Cantor. With your own files, replace ``primates()`` by ``Alignment.from_file`` and ``Tree.from_file``.
"""

import os

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import JC69, TreeModel, primates
from bayeskit.report import posterior_summary

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
METHODS = ["laplace_importance_sampling", "bridge_sampling"]
LONG_RUN = -6468.912  # importance sampling with 40,000 draws; standard error 0.004


def main() -> None:
    alignment, tree = primates()
    print(f"{alignment.num_taxa} taxa, {alignment.num_sites} sites, {alignment.num_patterns} patterns")

    model = TreeModel(alignment, tree, substitution=JC69())
    target = bk.Target.from_pyro(model, compile=False if SMALL else "auto")
    size = {"num_warmup": 150, "num_samples": 120} if SMALL else {"num_warmup": 500, "num_samples": 1000}
    methods = METHODS[-1:] if SMALL else METHODS
    comparison = evidence.compare(target, methods, seed=0, budget=evidence.Budget(num_chains=8, **size))
    columns = ["method", "log_evidence", "standard_error", "trusted"]
    print(comparison.to_pandas()[columns].to_string(index=False))
    print(comparison.verdict, f"(a long run gave {LONG_RUN})")

    if comparison.draws is not None:
        print(posterior_summary(comparison.draws).round(4).to_string())
    best = comparison.verdict.best
    assert best is not None and abs(best.log_evidence - LONG_RUN) < 5 * (best.standard_error + 0.004)


if __name__ == "__main__":
    main()
