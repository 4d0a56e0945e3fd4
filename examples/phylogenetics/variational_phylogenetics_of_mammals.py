"""The posterior of topology and branch lengths together, without a Markov chain.

What you will learn: how a subsplit Bayesian network and log-normal branch lengths are fitted to the posterior of trees,
what the lower bounds say about the fit, how importance weights turn it into the evidence over all topologies with an
error, and that it agrees with integrals over branch lengths alone, topology by topology.

The model: each of the 15 unrooted topologies of five apes is equally probable, the seven branch lengths are
exponential with mean 0.1, and 898 sites of mitochondrial DNA evolve by HKY85 with a fixed ratio of rates,

    p(tree, lengths | data) is proportional to p(data | tree, lengths) p(lengths) / 15.

With more taxa not all topologies can be listed: give the trees of a short run of MCMC, TreeSample.from_file(...), as
the support. The approximation can make what these trees recombine to.
"""

import math
import os

from bayeskit.models.phylogenetics import (
    HKY85,
    SubsplitBayesianNetwork,
    all_topologies,
    empirical_frequencies,
    primates,
)
from bayeskit.workflows.phylogenetics import LearningRates, compare_topologies, variational_inference

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
APES = ["Hylobates", "Pongo", "Gorilla", "Homo_sapiens", "Pan"]


def main() -> None:
    alignment = primates()[0].select(APES)
    topologies = all_topologies(APES)
    substitution = HKY85(10.0, empirical_frequencies(alignment))
    steps = 600 if SMALL else 3000
    posterior = variational_inference(
        alignment,
        SubsplitBayesianNetwork.from_topologies(topologies),
        substitution=substitution,
        num_steps=steps,
        learning_rates=LearningRates(0.03, 0.03, factor=0.5, every=steps // 5),
    )
    one, ten = posterior.lower_bound(1, 1000), posterior.lower_bound(10, 200)
    evidence = posterior.log_evidence(2000 if SMALL else 10_000)
    print(f"lower bound of 1 sample   {one.value:.3f} +- {one.standard_error:.3f}")
    print(f"lower bound of 10 samples {ten.value:.3f} +- {ten.standard_error:.3f}")
    print(f"log evidence              {evidence.log_evidence:.3f} +- {evidence.standard_error:.3f}")

    # A weighted sample of trees, like one from a file: probabilities, credible set, consensus.
    sample = posterior.sample(4000, weighted=True)
    for place in sample.credible_set(0.95):
        print(f"{sample.weights[place]:.4f}  {sample.topologies.to_newick(place)}")

    # The same evidence from the three best topologies alone, one integral each, and the share that they have.
    best = sample.top(3)
    found = compare_topologies(alignment, sample.topologies[best], substitution=substitution, num_draws=5000)
    share = float(sample.weights[best].sum())
    total = float(found.log_evidence.logsumexp(0)) - math.log(len(topologies) * share)
    error = float((found.posterior_probabilities * found.standard_error).norm())
    print(f"from three integrals      {total:.3f} +- {error:.3f}")
    assert abs(evidence.log_evidence - total) < 4 * math.hypot(evidence.standard_error, error)
    assert int(found.posterior_probabilities.argmax()) == 0


if __name__ == "__main__":
    main()
