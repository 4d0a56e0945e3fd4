"""Who is our closest relative? Fifteen trees of five apes, under two models of how bases change.

What you will learn: how all topologies of a few taxa are listed and weighed in one batch, how a question about a branch
becomes a sum over topologies, that a model which treats all changes alike can lead astray, how evidence says so, and
that a second estimator, which knows nothing of the first, agrees.

The data are 898 sites of mitochondrial DNA, where transitions (A-G, C-T) are far more frequent than other changes. Each
topology has seven branch lengths with independent exponential priors of mean 0.1.
"""

import os

import torch

from bayeskit.inference.evidence import Budget
from bayeskit.models.phylogenetics import HKY85, JC69, all_topologies, empirical_frequencies, greedy_consensus, primates
from bayeskit.workflows.phylogenetics import compare_topologies

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
APES = ["Hylobates", "Pongo", "Gorilla", "Homo_sapiens", "Pan"]


def main() -> None:
    alignment = primates()[0].select(APES)
    topologies = all_topologies(APES)
    print(f"{alignment.num_patterns} site patterns, {len(topologies)} topologies")
    sisters = torch.tensor(["Homo_sapiens,Pan" in topologies.to_newick(i) for i in range(len(topologies))])

    models = {
        "all changes alike (JC69)": JC69(),
        "ten transitions to a transversion (HKY85)": HKY85(10.0, empirical_frequencies(alignment)),
    }
    evidence, probability = {}, {}
    for name, substitution in models.items():
        found = compare_topologies(alignment, topologies, substitution=substitution, num_draws=4000)
        # Topologies are equally probable before the data: the evidence of a model is the mean over them.
        evidence[name] = float(found.log_evidence.logsumexp(0)) - torch.tensor(len(topologies)).log().item()
        probability[name] = float(found.posterior_probabilities[sisters].sum())
        error = float(found.posterior_errors.max())
        print(f"\n{name}: log evidence {evidence[name]:.2f}, humans and chimpanzees are sisters with probability")
        print(f"{probability[name]:.4f} +- {error:.4f}; three best topologies:")
        table = found.to_pandas()[["log_evidence", "standard_error", "posterior_probability", "newick"]]
        print(table.head(3).to_string(index=False, float_format="%.4f"))
    # The posterior of the topologies is a weighted sample of trees like any other.
    print(f"\nconsensus: {greedy_consensus(found.to_sample()).newick}")

    # The best two again, by importance sampling from a Student-t distribution of the logarithms of branch lengths.
    if not SMALL:
        best = found.posterior_probabilities.argsort(descending=True)[:2]
        pair = compare_topologies(
            alignment,
            topologies[best.tolist()],
            "laplace_importance_sampling",
            substitution=substitution,
            budget=Budget(4, 50, 50),
        )
        difference = pair.log_evidence - found.log_evidence[best]
        errors = torch.hypot(pair.standard_error, found.standard_error[best])
        print(f"the two estimators differ by {[round(z, 2) for z in (difference / errors).tolist()]} standard errors")
        assert bool((difference.abs() < 4 * errors).all())

    simple, better = models
    assert evidence[better] > evidence[simple] + 200
    assert probability[simple] < 0.6 and probability[better] > 0.99


if __name__ == "__main__":
    main()
