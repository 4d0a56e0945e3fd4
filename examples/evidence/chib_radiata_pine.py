"""Chib's method on the radiata pine data.

What you will learn: how to get an evidence from the full conditionals of a Gibbs sampler, when a model has
them, and that conditionals which are not those of the model are found out.

Two regressions compete for the strength of 42 specimens of pine: on their density, and on the density adjusted
for resin. Given the precision, intercept and slope are normal; given these, the precision is gamma distributed.
The exact log evidences are known, and so is the Bayes factor: exp(8.42), about 4550, for the adjusted density.
"""

import os

import torch
from torch.distributions import Gamma, MultivariateNormal

import bayeskit as bk
from bayeskit.errors import ModelError
from bayeskit.inference.evidence.conjugate import ConjugateBlock, chib

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def full_conditionals(case: bk.exact.ExactCase) -> list[ConjugateBlock]:
    """Return ``(alpha, beta)`` given ``tau``, and ``tau`` given ``(alpha, beta)``."""
    covariate, response, prior_mean, prior_precision, shape, rate = case.args
    design = torch.stack([torch.ones_like(covariate), covariate - covariate.mean()], 1)
    precision = torch.diag(prior_precision) + design.mT @ design
    mean = torch.linalg.solve(precision, prior_precision * prior_mean + design.mT @ response)

    def line(others: dict[str, torch.Tensor]) -> MultivariateNormal:
        return MultivariateNormal(mean, precision_matrix=others["tau"][:, None, None] * precision)

    def spread(others: dict[str, torch.Tensor]) -> Gamma:
        b = torch.stack([others["alpha"], others["beta"]], -1)
        misfit = (response - b @ design.mT).square().sum(-1)
        penalty = (prior_precision * (b - prior_mean).square()).sum(-1)
        # The two coefficients are scaled by tau, so they add one to its shape.
        return Gamma(shape + 0.5 * len(response) + 1, rate + 0.5 * (misfit + penalty))

    return [ConjugateBlock(("alpha", "beta"), line), ConjugateBlock("tau", spread)]


def main() -> None:
    num_samples = 200 if SMALL else 2000
    results = []
    for seed, name in enumerate(("radiata_pine_m1", "radiata_pine_m2")):
        case = bk.exact.get(name)
        z = chib(case.target(), full_conditionals(case), num_samples=num_samples, seed=seed)
        print(f"{name}: {z}, exactly {case.log_evidence:.4f}")
        assert z.trusted and abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
        results.append(z)
    first, second = results
    error = (first.standard_error**2 + second.standard_error**2) ** 0.5
    print(f"log Bayes factor for adjusted density: {second.log_evidence - first.log_evidence:.4f} +- {error:.4f}")

    # The conditionals of one model are not those of the other, and that is seen before anything is computed.
    try:
        chib(bk.exact.get("radiata_pine_m1").target(), full_conditionals(bk.exact.get("radiata_pine_m2")))
    except ModelError as refusal:
        print(f"refused: {refusal}")
    else:
        raise SystemExit("the conditionals of another model went unnoticed")


if __name__ == "__main__":
    main()
