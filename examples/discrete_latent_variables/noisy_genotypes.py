"""Which mutation came first? Genotypes of single cells, read with errors.

What you will learn: when a table of cells and mutations fits a tree, how exact the posterior over all tables that do
can be made, how unknown error rates are inferred with the genotypes summed out, and how the tree is drawn from them.

If each mutation arises once and is never lost, the cells of any two mutations are nested or disjoint. The model:

    genotypes ~ uniform over the tables without a conflict,
    a 0 is read as 1 with the false positive rate ~ Beta(1, 20), a 1 as 0 with the false negative rate ~ Beta(2, 6).
"""

import os

import torch

import bayeskit as bk
from bayeskit.models.discrete.genotypes import (
    GenotypeModel,
    MutationTree,
    NoisyGenotypes,
    conflicting_pairs,
    has_conflict,
    num_conflict_free,
    plot_genotypes,
)

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def read_with_errors(genotypes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Misread three in a hundred zeros and a fifth of the ones, and lose a twentieth of all entries."""
    wrong, lost = (torch.rand(genotypes.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    flip = wrong < torch.where(genotypes, 0.2, 0.03)
    return (genotypes ^ flip).double().masked_fill(lost < 0.05, torch.nan)


def main() -> None:
    # Three cells and two mutations that no tree explains: one entry at least was misread.
    conflict = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    posterior = NoisyGenotypes(conflict, false_positive_rate=0.01, false_negative_rate=0.2).enumerate()
    print(f"{len(posterior.genotypes)} tables of 3 cells and 2 mutations have no conflict; the best three:")
    for genotypes, probability in zip(posterior.genotypes[:3].int().tolist(), posterior.probabilities, strict=False):
        print(f"  {genotypes}  {float(probability):.6f}")
    assert abs(float(posterior.probabilities[1]) - 0.393501) < 1e-6

    # A true tree of six cells and four mutations, and what is read of it.
    truth = torch.tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]], dtype=torch.bool
    )
    # A seed whose table, missing entries read as 0, breaks the rule, as more than half do: where it is not broken,
    # there is nothing to correct.
    observed = read_with_errors(truth, torch.Generator().manual_seed(19))
    pairs = int(conflicting_pairs(observed == 1).sum()) // 2
    print(f"\n{int(observed.isnan().sum())} of {observed.numel()} entries are missing; {pairs} pairs conflict")
    print(f"{num_conflict_free(6, 4)} tables have no conflict; the exact sum over them needs no list")

    # The error rates are two continuous coordinates; the genotypes are summed out.
    target = bk.Target.from_pyro(GenotypeModel(observed))
    size = {"num_warmup": 20, "num_samples": 10} if SMALL else {"num_warmup": 300, "num_samples": 250}
    rates = bk.sample(target, num_chains=4, seed=0, **size).values()
    for name, values in rates.items():
        print(f"{name}: {float(values.mean()):.3f} +- {float(values.std()):.3f}")

    # Genotypes given each draw of the rates: probabilities of entries are exact, so only their mean is kept.
    positive, negative = (rates[name].flatten() for name in ("false_positive_rate", "false_negative_rate"))
    marginals = NoisyGenotypes(observed, positive[::10], negative[::10]).marginals().mean(0)
    wrong = int(((marginals > 0.5) != truth).sum())
    misread = int((observed != truth).sum())  # or missing
    print(f"entries misread or missing: {misread}; wrong as inferred: {wrong}")
    assert wrong < misread  # so here; one misread entry that breaks no rule, nothing can correct

    # Draws of whole tables, and the tree of the one that came up most often.
    model = NoisyGenotypes(observed, positive.mean(), negative.mean())
    draws = model.sample(50 if SMALL else 1000, seed=0)
    assert not bool(has_conflict(draws).any())
    tables, counts = draws.unique(dim=0, return_counts=True)
    best = MutationTree.from_genotypes(tables[counts.argmax()])
    print(f"\n{len(tables)} different tables in {len(draws)} draws; the most frequent one, {int(counts.max())} times:")
    print(best.to_text())

    if not SMALL:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4, 4.5), layout="constrained")
        plot_genotypes(marginals, observed, figure.subplots())
        figure.savefig("noisy_genotypes.png", dpi=120)


if __name__ == "__main__":
    main()
