r"""How many groups of galaxies: the evidence of a mixture when labels can switch.

What you will learn: why the evidence of a mixture from a well-behaved sampler can be wrong by log K!, what to do about
it, and how to choose the number of components by evidence.

The velocities of 82 galaxies follow a mixture of K normal distributions,

.. math:: p(y) = \sum_{k=1}^K w_k N(y; \mu_k, \sigma_k^2), \qquad w \sim \mathrm{Dirichlet}(1, \dots, 1).

Renaming the components changes nothing, so the posterior has K! equal modes. A sampler stays in one of them, its
diagnostics are excellent, and an estimator fitted to its draws takes that mode for all of the posterior. Only a search
that starts elsewhere finds it out.
"""

import os
from dataclasses import replace

import torch

import bayeskit as bk
from bayeskit.inference.evidence import bridge_sampling
from bayeskit.models.discrete.mixtures import (
    GaussianMixture,
    Labels,
    MixturePrior,
    galaxy_velocities,
    plot_num_components,
    plot_predictive,
    relabel,
)
from bayeskit.workflows.mixtures import TemperingBudget, compare_num_components, symmetrised_bridge

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
# Chib (1995) published the first for three components; Neal (1999) explained what was wrong with it. The second is from
# importance sampling without chains, -226.808 +- .007 (benchmarks/galaxy_mixtures.py).
ONE_MODE, ALL_MODES = -228.620, -226.81


def three_components(y: torch.Tensor) -> None:
    """Show the error on the model of Chib (1995): three components of equal variance."""
    prior = MixturePrior.independent(location=20.0, spread=10.0, shape=3.0, rate=20.0)
    mixture = GaussianMixture(y, 3, prior, equal_scales=True)
    target = bk.Target.from_pyro(mixture)
    labels = Labels(target, mixture.exchangeable)

    start = target.sample_prior(2000, seed=1)
    start = start[target.log_density(start).argmax()]
    size = {"num_warmup": 150, "num_samples": 250} if SMALL else {"num_warmup": 500, "num_samples": 2000}
    draws = bk.sample(target, 4, seed=0, initial=start, **size)
    plain = bridge_sampling(target, draws, seed=0)
    right = symmetrised_bridge(draws, labels, seed=0)
    print(f"{plain}   (one mode, as published: {ONE_MODE})")
    print(f"{right}   (brute force: {ALL_MODES})")
    print(f"difference {right.log_evidence - plain.log_evidence:.3f}, log 3! = {labels.log_num_permutations:.3f}\n")
    # Nothing in the chains hints at the other modes; a search from prior draws ends at one of them.
    assert not plain.trusted and plain.diagnostics["missed_share"] > 0.1
    assert abs(plain.log_evidence - ONE_MODE) < 0.2
    assert right.trusted
    assert abs(right.log_evidence - ALL_MODES) < 4 * right.standard_error + 0.05

    # Where labels do switch, components have a meaning only after relabelling.
    turned = labels.permutations()[[0, 1, 2, 3]].unsqueeze(1)  # other labels in every chain
    switched = replace(draws, unconstrained=labels.permute(draws.unconstrained, turned))
    mended = relabel(switched, labels, mixture.responsibilities(switched))
    means = mended.values()["mean"]
    for k in means.mean((0, 1)).argsort().tolist():
        print(f"mean of a component: {float(means[..., k].mean()):6.2f} +- {float(means[..., k].std()):.2f}")
    assert float(means.std((0, 1)).max()) < 3


def main() -> None:
    y = galaxy_velocities()
    three_components(y)

    # The prior of Richardson and Green; tempering and the symmetrised bridge check each other.
    sizes = [1, 2] if SMALL else range(1, 7)
    budget = TemperingBudget(32, 8, 0.6) if SMALL else TemperingBudget()
    comparison = compare_num_components(y, sizes, budget=budget, progress=False)
    print(f"\n{comparison}")
    posterior = {int(name): value for name, value in comparison.posterior_probabilities.items()}
    assert posterior[2][0] > 100 * posterior[1][0]
    if SMALL:
        return
    # One component has a closed form but for one integral; three to six were compared by reversible jumps in 1997.
    assert abs(comparison["1"].log_evidence + 247.5427) < 4 * comparison["1"].standard_error
    assert sum(posterior[k][0] for k in (3, 4, 5, 6)) > 0.99

    mixture = GaussianMixture(y, 4)
    target = bk.Target.from_pyro(mixture)
    draws = bk.sample(target, 4, initial=mixture.start(4, seed=1), progress=False)
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    plot_predictive(mixture, draws, left)
    plot_num_components(posterior, right)
    figure.savefig("galaxy_mixture.png", dpi=100)


if __name__ == "__main__":
    main()
